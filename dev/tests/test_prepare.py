"""tokenize, verify, stats and head of dev/prepare.py."""

import collections
import errno
import functools
import glob
import http.server
import itertools
import json
import re
import threading
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataset
import tokenizer
from dataloader import encode_conversations
from dev import prepare
from dev.tests.test_convert import ANSWER, USER, all_of, make_texts, read_all
from test_dataloader import ByteTokenizer, make
from tokenizer import RustBPETokenizer


def command(*words):
    """The line or status with which a command ends; None if all went well."""
    try:
        prepare.main([*map(str, words)])
    except SystemExit as end:
        return end.code

def make_shards(folder, counts=(40, 40, 12), column="text"):
    """Shards with these numbers of documents, 8 in a row group. Returns all documents in order."""
    texts = make_texts(sum(counts))
    if column == "messages":
        texts = [json.dumps([{**USER, "content": text}, {**ANSWER, "content": text[::-1]}])
                 for text in texts]
    rest = iter(texts)
    for number, count in enumerate(counts):
        part = list(itertools.islice(rest, count))
        groups = [pa.array(part[i:i + 8], pa.string()) for i in range(0, count, 8)]
        dataset.write_shard(f"{folder}/shard_{number:05d}.parquet", groups, column)
    return texts

@pytest.fixture
def byte_tokenizer(monkeypatch):
    """All commands use a ByteTokenizer that can decode."""
    made = ByteTokenizer()
    made.decode = lambda ids: bytes(ids).decode()
    monkeypatch.setattr(prepare, "find_tokenizer", lambda folder, sources, size: (made, "bytes"))
    monkeypatch.setattr(prepare, "get_tokenizer", lambda folder: made)
    return made

@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Makes text and its tokens. -> the folder of their tokenizer, which has 300 tokens."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 300)
    make_shards(tmp_path / "text")
    assert command("tokenize", tmp_path / "text", "--out", tmp_path / "tokens") is None
    folder, = glob.glob(f"{tmp_path}/base/tokenizer-*-300")
    return folder

# --------------------------------------------------------------------------------------------------
# tokenize

def test_documents_as_tokens(tmp_path, byte_tokenizer, capsys):
    """BOS is 256; two bytes each, the lower one first. `stats` counts what has no text."""
    dataset.write_shard(f"{tmp_path}/text/a.parquet", [pa.array(["Hi", None])])
    dataset.write_shard(f"{tmp_path}/text/b.parquet", [pa.array([""])])
    prepare.tokenize(f"{tmp_path}/text", f"{tmp_path}/out")
    assert read_all(tmp_path / "out") == [b"\x00\x01H\x00i\x00", None, b"\x00\x01"]
    assert command("stats", tmp_path / "text") is None
    assert capsys.readouterr().out.endswith("\nnull or empty documents: 2\n")

def test_token_shards_mirror_text_shards(tmp_path, byte_tokenizer):
    """Same names, row groups, sizes and digests, with which the loader delivers the same rows."""
    texts = make_shards(tmp_path / "text")
    assert command("tokenize", tmp_path / "text", "--out", tmp_path / "tokens") is None
    for text, tokens in zip(all_of(tmp_path / "text"), all_of(tmp_path / "tokens"), strict=True):
        assert (text.name, text.group_bytes, text.group_sizes, text.digest) == (
            tokens.name, tokens.group_bytes, tokens.group_sizes, tokens.digest)
        assert (tokens.kind, tokens.dtype) == ("tokens", "uint16")
        assert tokens.tokenizer_fingerprint == "bytes"
    ids = [np.frombuffer(raw, "<u2").tolist() for raw in read_all(tmp_path / "tokens")]
    assert ids == [[256, *text.encode()] for text in texts]

@pytest.mark.parametrize("kind", ["chats", "ids"])
def test_an_epoch_has_each_token_of_an_answer_as_a_target_once(tmp_path, trained, kind, capsys):
    """Tokens of messages are int32; ~t is a masked token t."""
    make_shards(tmp_path / "chats", column="messages")
    words = "--tokenizer", trained
    assert command("tokenize", tmp_path / "chats", *words, "--out", tmp_path / "ids") is None
    made = RustBPETokenizer.from_directory(trained)
    ids, bounds = encode_conversations(made, read_all(tmp_path / "chats"))
    stored = b"".join(read_all(tmp_path / "ids"))
    assert stored == ids.astype("<i4").tobytes()
    of_train = ids[:bounds[80]]
    found = collections.Counter()
    for inputs, targets in make(f"{tmp_path}/{kind}", 2, 40, made, epochs=1):
        assert inputs.min() >= 0
        found.update(targets[targets >= 0].tolist())
    assert found == collections.Counter(of_train[of_train >= 0].tolist())
    assert command("head", tmp_path / kind, *words) is None
    assert ("<|user_start|>" in capsys.readouterr().out) == (kind == "ids")
    assert command("stats", tmp_path / "chats", *words) is None
    printed = capsys.readouterr().out
    assert "bytes of messages per document, " in printed

def test_a_changed_template_is_seen_by_tokenize_and_resume(tmp_path, trained, monkeypatch, capsys):
    """Text does not depend on the template."""
    make_shards(tmp_path / "chats", column="messages")

    def tokenize(kind):
        words = tmp_path / kind, "--tokenizer", trained, "--out", f"{tmp_path}/{kind}_ids"
        assert command("tokenize", *words) is None
        return read_all(f"{tmp_path}/{kind}_ids")

    def loader(folder):
        return make(f"{tmp_path}/{folder}", 2, 99, RustBPETokenizer.from_directory(trained))

    folders = "chats", "chats_ids", "text", "text_ids"
    before = tokenize("chats"), tokenize("text")
    assert tokenize("chats") == before[0]
    states = [loader(folder).state_dict() for folder in folders]
    mine = tokenizer.NANOCHAT._replace(after="!")
    monkeypatch.setattr(tokenizer, "TEMPLATES", [mine])
    assert "tokenizing it again" not in capsys.readouterr().out
    after = tokenize("chats"), tokenize("text")
    assert capsys.readouterr().out.count("different chat template: tokenizing it again") == 3
    assert after[1] == before[1] and len({*after[0], *before[0]}) == 2 * len(before[0])
    made = RustBPETokenizer.from_directory(trained)
    ids, _ = encode_conversations(made, read_all(tmp_path / "chats"))
    assert b"".join(after[0]) == ids.astype("<i4").tobytes()
    for folder, state in zip(folders, states, strict=True):
        if "chats" in folder:
            with pytest.raises(dataset.UserError, match="rendered with a different chat template"):
                loader(folder).load_state_dict(state)
        else:
            loader(folder).load_state_dict(state)

def test_tokenize_resumes(tmp_path, byte_tokenizer, monkeypatch):
    """Stopped midway, the folder cannot be read; the same command keeps what is done."""
    make_shards(tmp_path / "text")
    words = "tokenize", tmp_path / "text", "--out", tmp_path / "out"
    assert command(*words) is None
    documents = read_all(tmp_path / "out")
    first, *_, last = sorted((tmp_path / "out").glob("*.parquet"))
    last.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_shard", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command(*words)
    assert not last.exists()
    again = "python -m dev.prepare tokenize .*/text --tokenizer .* --out .*/out$"
    with pytest.raises(dataset.UserError, match=f"is incomplete; to finish it, run: {again}"):
        dataset.list_shards(str(tmp_path / "out"), "val")
    before = first.stat().st_mtime_ns
    assert command(*words) is None
    assert first.stat().st_mtime_ns == before and read_all(tmp_path / "out") == documents

def files_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

def test_what_tokenize_refuses_leaves_all_folders_as_they_were(tmp_path, byte_tokenizer):
    text, out = tmp_path / "text", tmp_path / "out"
    make_shards(text)
    make_shards(tmp_path / "less", (40, 40))
    make_shards(tmp_path / "other", (40, 24, 12))
    prepare.tokenize(str(text), str(out))
    files = files_below(tmp_path)
    changed = "from different text, with a different tokenizer, or with other --keep columns; choose"
    for folder, target, words in (
            (out, "more", "holds token ids already"), (text, "out/../text", "cannot write to"),
            (tmp_path / "less", "out", r"out has shard_00002\.parquet, which is not in .*less"),
            (tmp_path / "other", "out", changed)):
        assert re.search(words, command("tokenize", folder, "--out", f"{tmp_path}/{target}"))
    byte_tokenizer.name = "another"
    assert changed in command("tokenize", text, "--out", out)
    assert files_below(tmp_path) == files

def test_kept_columns_stay_beside_the_tokens(tmp_path, byte_tokenizer, capsys):
    rows = pa.table({"text": ["a", "b"], "score": [1.5, None], "lang": ["de", "en"],
                     "tokens": [1, 1]})
    for name in "xy":
        dataset.write_shard(f"{tmp_path}/text/{name}.parquet", [rows])
    words = "tokenize", tmp_path / "text", "--out", tmp_path / "out", "--keep"
    has_only = "--keep scor: .*/text has only lang, score, text, tokens$"
    assert re.search(has_only, command(*words, "scor"))
    assert "--keep tokens: the column of token ids has this name" in command(*words, "tokens")
    assert command(*words, "score", "score") is None
    assert "dropped columns (to keep some: --keep): lang, tokens\n" in capsys.readouterr().out
    table = pq.read_table(f"{tmp_path}/out/x.parquet")
    assert table.column_names == ["tokens", "score"] and table["score"].to_pylist() == [1.5, None]
    assert "or with other --keep" in command(*words, "lang")
    assert prepare.verify(f"{tmp_path}/out")
    dataset.write_shard(f"{tmp_path}/text/y.parquet", [rows.select(["text"])])
    line = command("tokenize", tmp_path / "text", "--out", tmp_path / "new", "--keep", "score")
    assert re.search("error: .*/text/y.parquet, row group 0: .*score", line)
    with pytest.raises(dataset.UserError, match=r"incomplete; to finish it, run: .* --keep score$"):
        dataset.list_shards(str(tmp_path / "new"), "val")

# --------------------------------------------------------------------------------------------------
# verify, stats, head

def test_verify_names_each_shard_that_is_wrong(tmp_path, capsys):
    """Damaged documents, checksums and kept columns; exit status 1. Others' shards are named."""
    make_shards(tmp_path, (8, 8, 8))
    both, first = tmp_path / "shard_00003.parquet", tmp_path / "shard_00001.parquet"
    dataset.write_shard(str(both), [pa.table({"text": ["a", None], "n": [5, 6]})])
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "shard_00004.parquet")
    assert command("verify", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "5 shards, 27 documents, 0 problems\n" in printed
    assert printed.count("00004.parquet: another program wrote it; checked only the checksums") == 1
    column = pq.read_metadata(both).row_group(0).column(1)
    documents = pq.read_metadata(first).row_group(0).column(0)
    middle = documents.data_page_offset + documents.total_compressed_size // 2
    end_of_column = column.data_page_offset + column.total_compressed_size - 1
    for path, at, words in (
            (first, middle, "row group 0: "), (both, end_of_column, "row group 0: .*CRC")):
        sound = path.read_bytes()
        data = bytearray(sound)
        data[at] ^= 4
        path.write_bytes(data)
        assert command("verify", "--data", tmp_path) == 1
        printed = capsys.readouterr().out
        assert re.search(f"PROBLEM  .*{path.name}.*{words}", printed)
        assert "5 shards, 27 documents, 1 problem\nnext: remove the damaged shards" in printed
        path.write_bytes(sound)

class WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server`"""
    def log_message(self, *_):
        pass

def test_verify_does_not_call_what_it_cannot_read_damaged(tmp_path, capsys, monkeypatch):
    """A server without ranges, and a disk's error."""
    make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    handler = functools.partial(WithoutRanges, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        web = f"http://127.0.0.1:{server.server_port}"
        assert command("verify", web) == 1
        server.shutdown()
    printed = capsys.readouterr().out
    assert printed.count("UNREAD  ") == 3 and "must answer range requests" in printed
    assert "next: 3 shards could not be read, but may be intact; check" in printed
    failing = mock.Mock(side_effect=PermissionError(errno.EACCES, "not yours"))
    monkeypatch.setattr(dataset.Shard, "_read", failing)
    assert command("verify", tmp_path) == 1
    printed += capsys.readouterr().out
    assert "not yours" in printed and "remove the damaged" not in printed and "PROBLEM" not in printed

def test_chat_that_cannot_be_encoded_is_named(tmp_path, trained):
    good, bad = json.dumps([USER, ANSWER]), json.dumps([{**USER, "role": "x"}, ANSWER])
    for name in "ab":
        path = f"{tmp_path}/chats/{name}.parquet"
        dataset.write_shard(path, [pa.array([good]), pa.array([good, None, bad])], "messages")
    place = f"error: {tmp_path}/chats/a.parquet, row group 1, row 2: message 0: expected a message"
    for words in (["tokenize", "--out", tmp_path / "out"], ["stats"]):
        line = command(*words, "--data", tmp_path / "chats", "--tokenizer", trained)
        assert line.startswith(place), words

def test_stats_count_documents_and_tokens(tmp_path, byte_tokenizer, capsys):
    texts = make_shards(tmp_path / "text")
    assert command("stats", tmp_path / "text", "--tokenizer", "bytes") is None
    size = sum(len(text.encode()) for text in texts[:80])
    printed = capsys.readouterr().out
    row = rf"train +2 +10 +80 +{size / 1e6:.1f}  about {size + 80:,}\nval +1 +2 +12 "
    assert re.search(row, printed)
    lengths = [len(text.encode()) for text in texts]
    assert f"50%: {np.median(lengths):,.0f}, 90%: " in printed
    assert command("tokenize", tmp_path / "text", "--out", tmp_path / "tokens") is None
    assert command("stats", tmp_path / "tokens") is None
    assert f"  {size + 80:,}\n" in capsys.readouterr().out
    assert command("stats", tmp_path / "text") is None
    assert re.search(r"train .*  \? \(add --tokenizer DIR\)\nval .*  \?", capsys.readouterr().out)

@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_head_prints_documents(tmp_path, byte_tokenizer, capsys, kind):
    """As Python would write them."""
    texts = ["\x1b[2Jname", "def f():\n\treturn 1\r\n" + 300 * "x", None]
    dataset.write_shard(f"{tmp_path}/text/a.parquet", [pa.array(texts[:1]), pa.array(texts[1:])])
    dataset.write_shard(f"{tmp_path}/text/val.parquet", [pa.array(["last"])])
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    capsys.readouterr()
    place = f"{tmp_path}/{kind}/a.parquet, row group"
    sizes = [f"{len(t)} bytes" for t in texts[:2]]
    if kind == "tokens":
        sizes = [f"{len(t) + 1} tokens" for t in texts[:2]]
    assert command("head", tmp_path / kind, "-n", 9, "--tokenizer", "x") is None
    assert capsys.readouterr().out == (
        f"0     {place} 0, row 0: {sizes[0]}\n      {texts[0]!r}\n"
        f"1     {place} 1, row 0: {sizes[1]}\n      {texts[1][:200]!r}\n"
        f"2     {place} 1, row 1: null\n      ''\n")
    assert command("head", tmp_path / kind, "--split", "val", "-n", 1) is None
    printed = capsys.readouterr().out
    assert ("[256, 108, " in printed) == ("add --tokenizer " in printed) == (kind == "tokens")
    assert ("last" in printed) == (kind == "text")

def test_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path, trained):
    make_shards(tmp_path / "more", (50, 20))
    assert command("tokenize", tmp_path / "more", "--out", tmp_path / "more_tokens") is None
    (wrong,) = set(glob.glob(f"{tmp_path}/base/tokenizer-*-300")) - {trained}
    for name in ("head", "stats"):
        line = command(name, tmp_path / "tokens", "--tokenizer", wrong)
        assert line.endswith(f"/tokens needs the tokenizer that made it, {trained}")

@pytest.mark.parametrize("words, line", [
    ("head -n x", "argument -n: invalid number value: 'x'"),
    ("verify nowhere", "nowhere does not exist"), ("", "required: COMMAND"),
    ("stats a --data b", "expected FOLDER or --data FOLDER, not both"),
    ("tokenize a", "tokenize needs a folder for the token shards: --out FOLDER")])
def test_mistakes_are_one_line(words, line, capsys):
    end = command(*words.split())
    printed = capsys.readouterr().err if end == 2 else end
    assert line in printed and printed.strip().count("\n") == 0
