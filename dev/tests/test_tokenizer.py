"""tokenizer.py: tiktoken's ids from both engines, files, the default one, anybody's own."""

import importlib.util
import json
import os
import pickle
import random
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import rustbpe
import tiktoken
from tiktoken_ext import openai_public

import dataset
import tokenizer as module
from dataloader import Encoder, ids_of_bytes
from dataset import UserError, write_atomic
from dev.import_tokenizer import HARD, hard_texts
from dev.prepare import tokenize
from test_dataloader import ByteTokenizer, grouped, write
from tokenizer import RustBPETokenizer, build_encoding, get_tokenizer


def pattern_of(name):
    """Of one of tiktoken's own, without its download."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {})
        return getattr(openai_public, name)()["pat_str"]

GPT4 = module.GPT4_PATTERN
LLAMA = (    # as its tokenizer.json has it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA.replace("{1,3}", "")
PATTERNS = {    # by gigatoken's names
    "gpt4": GPT4, "gpt2": pattern_of("r50k_base"), "o200k": pattern_of("o200k_base"),
    "olmo3": LLAMA, "qwen2": QWEN}
LIBRARY = sorted(Path(os.__file__).parent.glob("*.py"))
SOURCES = [path.read_bytes().decode() for path in LIBRARY]
needs_gigatoken = pytest.mark.skipif(
    not importlib.util.find_spec("gigatoken"), reason="no gigatoken")

@cache
def small():
    return RustBPETokenizer.train_from_iterator(iter(SOURCES[:40]), 1024)

def fresh(pattern=GPT4, ranks=None, special=("<|bos|>",), added=()):
    """With an engine that is not yet chosen, and special tokens from 70,000 on or with ids."""
    if not isinstance(special, dict):
        special = {name: 70_000 + i for i, name in enumerate(special)}
    enc = build_encoding(pattern, ranks or small().enc._mergeable_ranks, special)
    return RustBPETokenizer(enc, "<|bos|>", added)

def with_special_tokens_first_and_between():
    special = {"<|bos|>": 0, "<|pad|>": 304, "<think>": 2000}
    others = (id for id in range(2000) if id not in special.values())
    ranks = dict(zip(small().enc._mergeable_ranks, others, strict=False))
    return fresh(ranks=ranks, special=special, added=["<think>"])

@cache
def pairs(pattern):
    """Any two bytes merge, in random order, so that every wrong split shows."""
    single = [bytes([i]) for i in range(256)]
    double = [a + b for a in single for b in single]
    random.Random(0).shuffle(double)
    return fresh(pattern, {token: i for i, token in enumerate(single + double)})

def encoded_by(tok, texts):
    return [ids.tolist() for ids in dataset.divide(*tok.encode_documents(texts))]

# --------------------------------------------------------------------------------------------------
# Text to ids and back

def test_a_tokenizer_of_bytes():
    tok = RustBPETokenizer.train_from_iterator(["hi"], 265)
    assert tok.encode("hi") == tok("hi") == [*b"hi"]
    assert tok.encode(["hi", ""], prepend="<|bos|>", num_threads=3) == [[256, *b"hi"], [256]]
    assert tok.encode("hi", prepend=7) == [7, *b"hi"]
    assert encoded_by(tok, ["hi", "<|bos|>"]) == [[256, *b"hi"], [256, *b"<|bos|>"]]
    assert tok.decode([256, *b"hi"]) == "<|bos|>hi"
    assert tok.get_special_tokens() == set(module.SPECIAL_TOKENS)
    ids = [tok.encode_special(name) for name in module.SPECIAL_TOKENS]
    assert ids == [*range(256, 265)]
    assert tok.token_bytes.tolist() == 256 * [1] + 9 * [0]

def test_a_vocabulary_that_lacks_a_byte_is_refused():
    """tiktoken's Rust would panic. No text has the bytes 192, 193 and from 245 on."""
    ranks = {bytes([i]): i for i in range(256) if i not in (192, 193, *range(245, 256))}
    assert fresh(ranks=ranks).encode("\u6f22") == [230, 188, 162]
    ranks.pop(b"\xa2")
    with pytest.raises(UserError, match="cannot encode all text: no token is byte 162"):
        fresh(ranks=ranks)

def test_one_of_tiktokens_own(monkeypatch):
    ranks = small().enc._mergeable_ranks
    enc = build_encoding(PATTERNS["gpt2"], ranks, {"<|endoftext|>": 3000})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": enc}.get)
    tok = RustBPETokenizer.from_pretrained("gpt2")
    ids, _ = tok.encode_documents(["hello 漢字"])
    assert ids.tolist() == [3000, *enc.encode_ordinary("hello 漢字")]
    assert len(tok.token_bytes) == 3001 and tok.token_bytes[ids].sum() == 12

def test_training_gives_rustbpes_merges_and_survives_hostile_documents():
    assert pattern_of("cl100k_base") == GPT4
    trained = rustbpe.Tokenizer()
    trained.train_from_iterator(iter(SOURCES[:40]), 1015, pattern=GPT4)
    assert small().get_vocab_size() == 1024
    assert small().encode(SOURCES[60]) == trained.encode(SOURCES[60])
    texts = [None, "", " " * 1_500_000 + "a", "\ud800", "ab" * 200_000]
    tok = RustBPETokenizer.train_from_iterator(iter(texts), 5000)
    assert 265 < tok.get_vocab_size() < 400

@pytest.mark.parametrize("vocab_size", [-1, 264, 1 << 31, 5_000_000_000])
def test_a_vocabulary_fits_int32(vocab_size):
    with pytest.raises(UserError, match=rf"vocab_size is {vocab_size:,}; expected 265 to"):
        RustBPETokenizer.train_from_iterator(["a"], vocab_size)

KINDS = [None, pa.string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string())]

@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_tiktokens_for_lists_and_arrays(kind):
    tok, draw = small(), random.Random(2)
    texts = ["".join(draw.choices([*HARD, "<|bos|>"], k=k % 30)) for k in range(300)]
    want = tok.enc.encode_ordinary_batch(texts)
    assert tok.encode(texts) == want
    if kind:
        texts = pa.array(["x", *texts, "y"]).cast(kind).slice(1, len(texts))
    assert encoded_by(tok, texts) == [[1015, *ids] for ids in want]

@pytest.mark.parametrize("texts, lists", [
    ([], []),
    (["\ud800"], [[1015, *"\ufffd".encode()]])])
def test_no_text_and_a_lone_surrogate(texts, lists):
    ids, bounds = small().encode_documents(texts)
    assert (ids.dtype, bounds.dtype) == (np.int32, np.int64)
    assert encoded_by(small(), texts) == lists

def test_a_million_spaces_overflow_the_stack_of_tiktokens_regex():
    tok = fresh()
    tok.engine = "tiktoken"
    assert tok.decode(tok.encode(990_000 * " " + "a")) == 990_000 * " " + "a"
    for encode in (tok.encode, lambda text: tok.encode_documents([text])):
        with pytest.raises(UserError, match=r"a million spaces .gigatoken, where"):
            encode(1_000_001 * " " + "a")

@needs_gigatoken
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_million_spaces_do_not_overflow_gigatoken(pattern):
    tok = fresh(pattern)
    for text in (1_000_001 * " " + "a", 1_100_000 * "a"):
        [[_, *ids]] = encoded_by(tok, [text])
        assert tok.decode(ids) == text
    assert tok.engine == "gigatoken"

# --------------------------------------------------------------------------------------------------
# Engines

@needs_gigatoken
@pytest.mark.parametrize("name", PATTERNS)
def test_gigatoken_gives_tiktokens_ids(name):
    tok, draw = pairs(PATTERNS[name]), random.Random(1)
    words = [*HARD, "<|bos|>"]
    texts = hard_texts(small().enc)
    texts += ["".join(draw.choices(words, k=draw.randint(0, 40))) for _ in range(3000)]
    codes = [*range(0x600), *range(0x600, 0xD800, 20), *range(0xE000, 0x20000, 16), 0x10FFFF]
    newer = module.NEWER_CHARACTERS[1:-1].replace("-", "")    # both ends of each range
    assert {text.encode()[0] for text in newer} == {*module.FIRST_BYTES}
    texts += [f"a{c}a 1{c}1 {c}{c}'s{c}. {c}\n{c}A" for c in [*map(chr, codes), *newer]]
    want = [[70_000, *ids] for ids in tok.enc.encode_ordinary_batch(texts)]
    for i in range(0, len(texts), 100):
        assert encoded_by(tok, texts[i:i + 100]) == want[i:i + 100]
    assert tok.engine == "gigatoken", "not tested"
    assert module.scheme_of(tok.enc) == name
    text = "".join(texts[-9:])
    raw, _ = tok.gigatoken([text.encode()])
    assert raw.tolist() != tok.enc.encode_ordinary(text), "they agree: drop NEWER_CHARACTERS"

@needs_gigatoken
def test_gigatoken_encodes_vocabularies_with_special_tokens_first_and_between():
    tok = with_special_tokens_first_and_between()
    ids, _ = tok.encode_documents([SOURCES[3]])
    assert ids.tolist() == [0, *tok.enc.encode_ordinary(SOURCES[3])]
    assert tok.engine == "gigatoken"

ADVICE = "for faster encoding: pip install tiktoken==0.14.0 gigatoken==0.10.0"
RIGHT = RustBPETokenizer._call_gigatoken

def with_wrong_bounds(tok, documents):
    ids, bounds = RIGHT(tok, documents)
    return ids, np.sort(np.append(bounds[:-2], [1, bounds[-1]]))

def with_wrong_ids(tok, documents):
    """Where twenty tokens meet; each alone is right."""
    ids, bounds = RIGHT(tok, documents)
    lengths = np.diff(bounds)
    return np.where(lengths.repeat(lengths) > 9, ids ^ 1, ids), bounds

@needs_gigatoken
@pytest.mark.parametrize("name, value, reason", [
    ("tokenizer.SCHEMES", {}, "gigatoken does not know this split pattern"),
    ("tokenizer.metadata.version", lambda name: distribution(f"no-{name}"), ADVICE),
    ("tiktoken.__version__", "0.15.1", "tiktoken==0.15.1 gigatoken==0.10.0 are installed; the"),
    ("tokenizer.metadata.version", lambda name: "0.10.1", "tiktoken==0.14.0 gigatoken==0.10.1 are"),
    ("tokenizer.RustBPETokenizer._call_gigatoken", with_wrong_ids, "gigatoken's ids differ"),
    ("tokenizer.RustBPETokenizer._call_gigatoken", with_wrong_bounds, "gigatoken's ids differ"),
    (None, None, "gigatoken fails with this vocabulary: assertion")])    # a token no merge makes
def test_why_gigatoken_is_not_used(monkeypatch, name, value, reason):
    ranks = dict(small().enc._mergeable_ranks)
    if name:
        monkeypatch.setattr(name, value)
    else:
        ranks[b" qxzj"] = len(ranks)
    tok = fresh(ranks=ranks)
    assert tok.engine.startswith(f"tiktoken ({reason}")
    ids, _ = tok.encode_documents(["x qxzj"])
    assert ids.tolist() == [70_000, *tok.enc.encode_ordinary("x qxzj")]

def encode_in_threads(tok, n):
    """All encode the same text at the same time. Returns how many bytes were encoded."""
    together, texts = threading.Barrier(n), SOURCES[:30]
    want = encoded_by(tok, texts)

    def encode_all(_):
        for text, ids in zip(texts, want, strict=True):
            together.wait(60)
            assert encoded_by(tok, [text]) == [ids]

    with ThreadPoolExecutor(n) as pool:
        [*pool.map(encode_all, range(n))]
    return (n + 1) * sum(len(text.encode()) for text in texts)

@needs_gigatoken
def test_threads_share_a_gigatoken_of_bounded_memory(monkeypatch):
    monkeypatch.setattr(module, "FORGET_AFTER", 1 << 17)
    with mock.patch("tokenizer.make_gigatoken", wraps=module.make_gigatoken) as make:
        n_bytes = encode_in_threads(fresh(), 3)
    assert 2 < make.call_count < n_bytes / (1 << 17)

def test_threads_share_encodings():
    """One of 200 k tokens takes 47 MB."""
    tok = fresh()
    tok.engine = "tiktoken"
    with mock.patch("tokenizer.build_encoding", wraps=build_encoding) as build:
        for _ in range(3):
            encode_in_threads(tok, 2)
        with pytest.raises(UserError, match="million spaces"):
            tok.encode(1_000_001 * " " + "a")
    assert build.call_count <= 1 and len(tok.idle) == 1 + build.call_count

@needs_gigatoken
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore")    # this process has threads
def test_a_forked_child_makes_its_own_gigatoken():
    """A thread that the child lacks may have locked the parent's."""
    tok = fresh()
    want = encoded_by(tok, ["hi"])
    used = tok.gigatoken
    child = os.fork()
    if child == 0:
        signal.alarm(60)    # ends a child that waits
        is_right = encoded_by(tok, ["hi"]) == want
        os._exit(not is_right or tok.gigatoken is used)
    assert tok.gigatoken is used
    _, status = os.waitpid(child, 0)
    assert status == 0

# --------------------------------------------------------------------------------------------------
# Files

RANKS, JSON = "tokenizer.tiktoken", "nanoloader.json"

def test_a_saved_or_pickled_tokenizer_gives_the_same_ids(tmp_path):
    tok, folder = small(), str(tmp_path / "new/t")
    tok.save(folder)
    assert sorted(os.listdir(folder)) == [JSON, RANKS]
    assert tiktoken.load.load_tiktoken_bpe(f"{folder}/{RANKS}") == tok.enc._mergeable_ranks
    of_json = RustBPETokenizer.from_dict(json.loads(json.dumps(tok.as_dict())))
    for other in (of_json, get_tokenizer(folder), pickle.loads(pickle.dumps(tok))):
        assert other.fingerprint() == tok.fingerprint()
        assert encoded_by(other, SOURCES[9:12]) == encoded_by(tok, SOURCES[9:12])
    others = [tok, fresh(), fresh(PATTERNS["gpt2"]), RustBPETokenizer(tok.enc, "<|user_end|>")]
    assert len({other.fingerprint() for other in others}) == 4

def test_a_saved_tokenizer_is_complete_and_not_overwritten(tmp_path):
    """The disk may be full after the first of two files."""
    disk = iter(["has room for one file"])

    def write_on_disk(path, data):
        if next(disk, None) is None:
            raise OSError("full")
        write_atomic(path, data)

    with mock.patch("tokenizer.write_atomic", write_on_disk), pytest.raises(OSError, match="full"):
        fresh().save(tmp_path / "new")
    words = r"no tokenizer, .*nanoloader\.json.*To train .*To import .* Tokenizers in .*README"
    with pytest.raises(UserError, match=words):
        get_tokenizer(tmp_path / "new")
    small().save(tmp_path / "new")
    (tmp_path / "file").touch()
    for name, seen in (("new", "has a tokenizer, which checkpoints"), ("file", "File exists")):
        with pytest.raises((UserError, OSError), match=seen):
            fresh().save(tmp_path / name)
    assert get_tokenizer(tmp_path / "new").fingerprint() == small().fingerprint()

@pytest.mark.parametrize("name, old, new, reason", [
    (RANKS, b"AA== 0\n", b"\xff", "UnicodeDecodeError"),
    (RANKS, b" 500\n", b" 501\n", "was changed"),
    (JSON, b"{1,3}", b"{1,4}", "was changed"),
    (JSON, b"bos_token", b"bos", "was changed"),
    (JSON, b"\n}", b"", "JSON")])
def test_damaged_files_are_errors(tmp_path, name, old, new, reason):
    small().save(tmp_path)
    before = (tmp_path / name).read_bytes()
    assert old in before
    (tmp_path / name).write_bytes(before.replace(old, new, 1))
    with pytest.raises(UserError, match=f"a damaged one .*{reason}"):
        get_tokenizer(tmp_path)

# --------------------------------------------------------------------------------------------------
# The tokenizer of some data

@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(module, "TRAIN_CHARACTERS", 5000)

def test_all_tools_find_the_tokenizer_by_one_rule(tmp_path, base, capsys):
    one = write(tmp_path / "my data", [SOURCES[:9]])
    same = write(tmp_path / "same", [SOURCES[:9]])
    other = write(tmp_path / "other", [SOURCES[9:18]])
    tok, folder = module.find_tokenizer(None, [one], 300)
    assert re.fullmatch(r".*/base/tokenizer-[0-9a-f]{16}-300", folder)
    assert "training a tokenizer of 300 tokens" in capsys.readouterr().out
    assert module.find_tokenizer(None, [same], 300)[1] == folder
    assert capsys.readouterr().out == ""
    found, _ = module.find_tokenizer(folder, [other], 999)
    assert found.fingerprint() == tok.fingerprint()

def test_the_rule_names_what_a_tokenizer_depends_on(tmp_path):
    one, other = [write(tmp_path / name, [[name]]) for name in ("one", "other")]
    usual = module.trained_dir([one, other], 300)
    assert module.trained_dir([other, one], 300) == usual
    others = [
        module.trained_dir([one, other], 301),
        module.trained_dir([one], 300)]
    for name in ("GPT4_PATTERN", "TRAIN_CHARACTERS", "SPECIAL_TOKENS", "TRAIN_ROW_GROUPS"):
        with mock.patch.object(module, name, 99):    # somebody hacks it
            others.append(module.trained_dir([one, other], 300))
    assert len({usual, *others}) == 7

def write_letters(folder, shards, group_size):
    """{name: letters}, each a document of 100 times that letter."""
    for name, letters in {**shards, "val": "v"}.items():
        texts = [100 * letter for letter in letters]
        groups = [*map(pa.array, grouped(texts, group_size))]
        dataset.write_shard(f"{folder}/{name}.parquet", groups)
    return str(folder)

@pytest.mark.parametrize("shards, group_size, share", [
    ({"en/train": 900 * "a", "fr/train": 900 * "b", "zh/train": 900 * "c"}, 9, 10),
    ({"train-0": 900 * "a", "train-1": 600 * "b" + 300 * "c", "train-2": 900 * "c"}, 900, 4),
    ({"train": 3000 * "a" + 3000 * "b" + 3000 * "c"}, 10, 20),
    ({"train": 900 * "a" + 900 * "b" + 900 * "c"}, 2700, 30),
    ({f"train-{i:03}": 9 * "abc"[i % 3] for i in range(300)}, 9, 3)],
    ids=["folders", "shards", "row groups", "one row group", "many shards"])
def test_a_tokenizer_is_trained_on_all_of_its_data(tmp_path, shards, group_size, share):
    """Each letter is taken as often as the data has it."""
    data = write_letters(tmp_path / "data", shards, group_size)
    letters = "".join(shards.values())
    limit = 100 * len(letters) // share
    text = "".join(module.some_text([data], limit))
    assert text == "".join(module.some_text([data], limit))
    assert 0.9 * limit < len(text) < 1.1 * limit + 3000
    for letter in "abc":
        taken = text.count(letter) / letters.count(letter)
        assert 0.7 < taken * share / 100 < 1.5, letter

def test_a_large_corpus_is_not_read_whole(tmp_path, monkeypatch):
    data = write_letters(tmp_path / "data", {"train": 5000 * "ab"}, 10)
    monkeypatch.setattr(module, "TRAIN_ROW_GROUPS", 20)
    read = mock.Mock(wraps=dataset.Shard.read)
    monkeypatch.setattr("dataset.Shard.read", lambda *words: read(*words))
    text = "".join(module.some_text([data], 1000))
    assert 10 < read.call_count < 30
    assert 500 < len(text) < 2000

def test_text_that_fits_is_taken_whole_and_long_documents_in_pieces(tmp_path):
    texts = [f"{i} {99 * 'x'}" for i in range(100)]
    small = write(tmp_path / "small", [texts])
    large = write(tmp_path / "large", [[40_000_000 * "a"]])
    assert [*module.some_text([small], 10_500)] == texts
    found = [*module.some_text([small, large], 8_000_000)]
    assert found[:100] == texts
    assert 2_500_000 < sum(map(len, found[100:])) < 5_500_000

def test_the_command_trains_by_the_rule_and_overwrites_nothing(tmp_path, base, capsys):
    words = ["--data", write(tmp_path / "data", [SOURCES[:9]]), "--vocab_size", "900"]
    module.main(words)
    _, line = capsys.readouterr().out.splitlines()
    tok, folder = module.find_tokenizer(None, [words[1]], 900)
    assert line == f"{folder}: {tok.get_vocab_size()} tokens; engine: {tok.engine}"
    own = f"{tmp_path}/own"
    module.main([*words, "--out", own])
    assert get_tokenizer(own).fingerprint() == tok.fingerprint()
    tokenize(words[1], f"{tmp_path}/tokens", own)
    with pytest.raises(SystemExit, match=f"holds tokens, but .* made them: --tokenizer {own}"):
        module.main(["--data", f"{tmp_path}/tokens", "--out", f"{tmp_path}/new"])
    (tmp_path / "file").touch()
    capsys.readouterr()
    for out, seen in (("file/new", "Not a directory: .*file/new"), ("own", "has a tokenizer, which")):
        with pytest.raises(SystemExit, match=f"^error: .* {seen}"):
            module.main([*words, "--out", f"{tmp_path}/{out}"])
    assert "training" not in capsys.readouterr().out, "learned only after training"

def test_chats_train_a_tokenizer_too(tmp_path, base):
    """What is no chat, as half a surrogate pair, has no text: the loader refuses it."""
    parts = [{"type": "x", "text": text} for text in (99 * "ab", "ab")]
    line = json.dumps([{"role": "tool", "content": parts}])
    no_chats = ["content", line.replace("ab", r"content\ud800")]
    chats = write(tmp_path / "chats", [3 * [line, *no_chats]], column="messages")
    tok, _ = module.find_tokenizer(None, [chats], 300)
    assert len(tok.encode(99 * "ab")) < 50
    assert len(tok.encode("content")) == 7, "of the text only"

# --------------------------------------------------------------------------------------------------
# Anybody's own tokenizer

def stub(function=None, **methods):
    """BOS is 256; function: bytes of a text -> its ids, by nanochat's interface."""
    def encode(texts, prepend, num_threads):
        return [function(text.encode()) for text in texts]

    usual = {"get_bos_token_id": lambda: 256}
    if function:
        usual["encode"] = encode
    return SimpleNamespace(**usual | methods)

by_documents = ByteTokenizer().encode_documents

SHARD = SimpleNamespace(kind="text", location=lambda row_group, row: f"row {row}")

def encode(encoder, texts):
    array = pa.array(texts, pa.large_string())
    encoded = encoder.encode(SHARD, 0, np.arange(len(array)), array)
    return [None if ids is None else ids.tolist() for ids in encoded]

@pytest.mark.parametrize("tok, has_own_threads", [
    (stub(encode_documents=by_documents), False),
    (stub(lambda text: [256, *text]), True)])
def test_each_interface_gives_the_same_documents(tok, has_own_threads):
    encoder = Encoder(tok)
    encoded = encode(encoder, ["ab", None, "", None])
    assert encoded == [[256, *b"ab"], None, [256], None]
    assert encode(encoder, [None, None]) == [None, None]
    assert encode(encoder, []) == []
    assert encoder.has_own_threads == has_own_threads

def test_a_fingerprint_depends_on_ids_and_size():
    toks = [
        stub(encode_documents=by_documents), stub(lambda text: [256, *text]),
        stub(lambda text: [256, *text[::-1]]),
        stub(lambda text: [256, *text], get_vocab_size=lambda: 257)]
    one, same, *others = [Encoder(tok).fingerprint for tok in toks]
    assert one == same and len({one, *others}) == 3
    assert Encoder(small()).fingerprint == small().fingerprint()

def test_an_error_names_its_document():
    """Others of the batch are encoded again without it, if they can be."""
    def fail_at_bad(texts):
        if "bad" in texts or len(texts) == 8:
            raise KeyError("boom")
        return by_documents(texts)

    encoder = Encoder(stub(encode_documents=fail_at_bad))
    assert encode(encoder, 8 * [""]) == 8 * [[256]]
    with pytest.raises(RuntimeError, match=r"^row 5: KeyError: 'boom'"):
        encode(encoder, [*5 * ["ab"], "bad", "bad", None])

@pytest.mark.parametrize("tok, reason", [
    (object(), "object cannot be used: AttributeError.*as in dev/recipes/own_tokenizer.py"),
    (stub(lambda text: [256, *text], get_bos_token_id=lambda: None), "does it know this BOS"),
    (stub(lambda text: [*text]), "BOS .256. first"),
    (stub(lambda text: [256, 256, *text]), r"ids \[256, 256, 97\], .* one BOS"),
    (stub(lambda text: [256.0, 97.5]), "expected integers t in"),
    (stub(lambda text: [256, 1 << 31]), "t < 2147483648"),
    (stub(lambda text: [256, 259], get_vocab_size=lambda: 259), r"t < 259, .* saw .*259"),
    (stub(lambda text: [256, *text[:8191]]), "1121, 8192 and 8192: expected .* no truncation"),
    (stub(lambda text: [256, *text.ljust(512)]), "'a' has the ids .* no padding"),
    (stub(lambda text: [256, random.getrandbits(30), *text]), "expected .* same ids each time")])
def test_a_tokenizer_that_cannot_be_used_is_refused(tok, reason):
    with pytest.raises(UserError, match=reason):
        Encoder(tok)

@pytest.mark.parametrize("bounds, reason", [
    ([0, 2, 2, 6], r"bounds \[0 2 2 6\]"),
    ([2, 4, 6], "bounds"),
    ([0, 2, 4], "bounds"),
    ([0, 4, 6], "expected 4, got 2")])
def test_wrong_bounds_are_refused(bounds, reason):
    with pytest.raises(UserError, match=reason):
        Encoder(stub(encode_documents=lambda texts: ([256, 1] * 3, bounds)))

def test_half_tokens_of_any_document_are_an_error():
    """... also if the two halves are whole together."""
    halves = pa.array([b"a", b"b"], pa.large_binary())
    with pytest.raises(UserError, match="whole number of uint16"):
        ids_of_bytes(halves, np.dtype("uint16"))

def test_the_engine_is_told_once(monkeypatch, capfd):
    """By whatever encodes first, such as the loader."""
    module.print_once.cache_clear()
    monkeypatch.setattr(module, "SCHEMES", {})
    for _ in range(2):
        Encoder(fresh())
    told = "tokenizer: tiktoken (gigatoken does not know this split pattern)\n"
    assert capfd.readouterr().err == told
    module.print_once.cache_clear()
    monkeypatch.setenv("RANK", "1")
    Encoder(fresh())
    assert capfd.readouterr().err == ""

def test_a_tiktoken_that_finds_special_tokens_in_text_is_refused(monkeypatch, tmp_path):
    """0.9's encode_to_numpy did."""
    small().save(tmp_path / "saved")
    real = module.tiktoken.Encoding.encode_to_numpy
    monkeypatch.setattr(
        "tiktoken.Encoding.encode_to_numpy",
        lambda enc, text, **_: real(enc, text, allowed_special="all"))
    module.check_tiktoken.cache_clear()
    words = r"^tiktoken 0.* reads '<\|bos\|>' .*install tiktoken==0.14"
    with pytest.raises(UserError, match=words):
        get_tokenizer(tmp_path / "saved")
    monkeypatch.undo()
    get_tokenizer(tmp_path / "saved")

def special_in(ids):
    return [id for id in ids if id >= 70_000]

def test_names_of_the_template_are_plain_text_whatever_a_file_says():
    """As axolotl adds them: not special. They are no text, and end an answer; <think> is text."""
    names = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|im_end|>s", "<think>"]
    one = fresh(special=names, added=names[1:])
    for tok in (one, pickle.loads(pickle.dumps(one))):
        assert [*tok.added_tokens] == ["<|im_end|>s", "<think>"]
        assert tok.token_bytes[70_001:].tolist() == [0, 0, 11, 7]
        assert tok.fingerprint() == one.fingerprint()
    text = "a<|im_end|> b<|im_end|>s"
    message = {"role": "user", "content": text}
    ids, _ = one.render_conversation({"messages": [message]})
    assert special_in(ids) == [70_000, 70_001, 70_003, 70_002]
    assert special_in(one.encode(text)) == special_in(one.encode([text])[0]) == [70_003]

def test_the_longest_name_of_a_template_is_found(monkeypatch):
    names = ["<|bos|>", "<|a|>", "<|a|><|b|>", "<|a|><|b|><|c|>"]
    mine = module.Template(names[1:], opening=names[3], closing=names[2], after=names[1])
    monkeypatch.setattr(module, "TEMPLATES", [mine])
    message = {"role": "user", "content": ""}
    ids, _ = fresh(special=names).render_conversation({"messages": [message]})
    assert ids == [70_000, 70_003, 70_002, 70_001]
