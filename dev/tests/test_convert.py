"""
dev/convert.py: your text or chats -> shuffled shards, nothing lost.

    python -m pytest dev/tests/test_convert.py
"""

import bz2
import contextlib
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from codecs import BOM_UTF8
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset
from dev import convert
from dev.convert import Options
from test_dataloader import HERE

# --------------------------------------------------------------------------------------------------
# Files, commands and what they made

def lines_of(**columns):
    """JSON lines: lines_of(text=["a", "b"]) -> b'{"text": "a"}\\n{"text": "b"}\\n'"""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()

def write(folder, files):
    """{name: bytes or str} -> the folder"""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder

def command(*words, main=convert.main):
    """The line or status with which a command ends; None if all went well."""
    try:
        main([*map(str, words)])
    except SystemExit as end:
        return end.code

def converted(folder, *words):
    """All documents of folder/in, converted."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    assert command(folder / "in", "--out", folder / "out", *words) is None
    return read_all(folder / "out")

def all_of(folder):
    return dataset.list_shards(str(folder), "train") + dataset.list_shards(str(folder), "val")

def read_all(folder):
    """Every document of both splits, in order."""
    groups = [s.read(i).to_pylist() for s in all_of(folder) for i in range(len(s.group_sizes))]
    return list(itertools.chain.from_iterable(groups))

# --------------------------------------------------------------------------------------------------
# Every document once, in an order that nothing changes

def test_documents_of_two_files_are_shuffled(tmp_path, capsys):
    write(tmp_path / "in", {"a.jsonl": '{"text": "one"}\n{"text": "two"}\n', "b.txt": "three"})
    assert sorted(converted(tmp_path)) == ["one", "three", "two"]
    printed = capsys.readouterr().out
    assert printed.startswith("2 files -> 3 documents, 0.0 MB, in 3 shards, the last for val, in ")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]

def table_of(texts):
    return pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string())})

def as_parquet(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()

def as_arrow(table, opened):
    sink = pa.BufferOutputStream()
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()

def as_csv(texts, delimiter):
    sink = io.StringIO(newline="")
    rows = csv.writer(sink, delimiter=delimiter)
    rows.writerows([("n", "text"), *enumerate(texts)])
    return sink.getvalue().encode()

FORMATS = {
    "lines.jsonl": lambda texts: lines_of(text=texts),
    "crlf.ndjson": lambda texts: BOM_UTF8 + lines_of(text=texts).replace(b"\n", b"\r\n\n"),
    "array.json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    "comma.csv": lambda texts: BOM_UTF8 + as_csv(texts, ","),
    "semicolon.csv": lambda texts: as_csv(texts, ";"),
    "tab.tsv": lambda texts: as_csv(texts, "\t"),
    "a.parquet": lambda texts: as_parquet(table_of(texts)),
    "b.pq": lambda texts: as_parquet(table_of(texts).cast(
        pa.schema([("n", pa.int64()), ("text", pa.binary())]))),
    "c.parquet": lambda texts: as_parquet(pa.table(
        {"text": pa.array(texts, pa.string()).dictionary_encode()})),
    "d.arrow": lambda texts: as_arrow(table_of(texts), pa.ipc.new_stream),
    "e.feather": lambda texts: as_arrow(table_of(texts), pa.ipc.new_file)}
PACKED = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    ".lz4": lambda data: pa.Codec("lz4").compress(data, asbytes=True)}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))

@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_format_gives_back_every_document(tmp_path, data):
    shutil.rmtree(tmp_path / "in", ignore_errors=True)
    texts = ["one", "two"]
    files = {"0.jsonl": lines_of(text=texts)}
    for name in data.draw(st.sets(st.sampled_from([*FORMATS]))):
        documents = data.draw(st.lists(TEXTS, min_size=1, max_size=9))
        is_table = name.endswith(("parquet", "pq", "arrow", "feather"))
        packing = "" if is_table else data.draw(st.sampled_from([*PACKED]))
        files[f"deep/{name}{packing}"] = PACKED[packing](FORMATS[name](documents))
        texts += documents
    for i, text in enumerate(data.draw(st.lists(TEXTS, max_size=3))):
        files[f"{i}.txt"] = BOM_UTF8 + text.encode()
        texts.append(text)
    write(tmp_path / "in", files)
    assert sorted(converted(tmp_path)) == sorted(texts)

def make_texts(n, seed=0):
    """Documents of all lengths and scripts, every one different."""
    pick = random.Random(seed)
    words = ["loss", "für", "日本", "🙂", "\x00", "\n", "def f(x):", "<|bos|>", " " * 9]
    lengths = [int(pick.paretovariate(0.8)) % 3000 for _ in range(n)]
    return [f"{seed}.{i} " + " ".join(pick.choices(words, k=n)) for i, n in enumerate(lengths)]

def many_inputs(folder):
    """Texts in files whose order and rows the next test has known since the second edition."""
    texts = make_texts(300)
    parts = [texts[i::8] for i in range(8)]
    lines = [lines_of(raw_content=part) for part in parts]
    return write(folder, {
        "a.jsonl": lines[0], "b.json.gz": gzip.compress(lines[1]),
        "c.json.zst": pa.Codec("zstd").compress(lines[2], asbytes=True),
        "deep/d.jsonl.gz": gzip.compress(lines[3][:999]) + gzip.compress(lines[3][999:]),
        "e.json": json.dumps([{"raw_content": text} for text in parts[4]], indent=1),
        "f.json": BOM_UTF8 + lines[5].rstrip(b"\n").replace(b"\n", b"\r\n\n"),
        **{f"deep/{i}.txt": text for i, text in enumerate(parts[6])},
        "g.parquet": as_parquet(pa.table({"raw_content": parts[7]}))})

def test_order_never_changes(tmp_path, monkeypatch):
    """One run or many, one process or two: the same row groups as the second edition wrote."""
    folder = many_inputs(tmp_path / "in")
    for run_bytes, workers in ((1 << 30, 1), (2000, 1), (1 << 30, 2)):
        monkeypatch.setattr(convert, "RUN_BYTES", run_bytes)
        out = f"{tmp_path}/{run_bytes}-{workers}"
        convert.convert([str(folder)], out, Options("raw_content"), workers)
        shards = all_of(out)
        groups = [s.read(i).to_pylist() for s in shards for i in range(len(s.group_sizes))]
        digest = hashlib.sha256(json.dumps(groups).encode()).hexdigest()
        assert digest[:16] == "cb191e3700efec48"

def test_shards_have_equal_bytes_and_val_a_hundredth_of_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(convert, "ROW_GROUP_BYTES", 1500)
    texts = [f"{i}" * (i % 50) for i in range(2000)] + ["long" * 600]
    write(tmp_path / "in", {"a.jsonl": lines_of(text=texts)})
    assert sorted(converted(tmp_path)) == sorted(texts)
    *train, val = all_of(tmp_path / "out")
    assert sum(val.group_sizes) == 64 and len(train) > 4
    sizes = [shard.text_bytes for shard in train]
    assert max(sizes) - min(sizes) < 6000
    for shard in train:
        for row_group in range(len(shard.group_sizes)):
            lengths = list(map(len, shard.read(row_group).to_pylist()))
            assert sum(lengths) <= 1500 or len(lengths) == 1

def test_one_long_document_is_not_val(tmp_path):
    files = {f"{i}.txt": "short " * (20_000 if i == 7 else 1) for i in range(100)}
    write(tmp_path / "in", files)
    for seed in range(15):
        converted(tmp_path, "--seed", seed)
        val, = dataset.list_shards(str(tmp_path / "out"), "val")
        assert sum(val.group_sizes) == 10 and val.text_bytes < 100

def test_a_book_is_cut_at_blank_lines(tmp_path):
    """... else at line ends, else at spaces, never within a character; no byte is lost."""
    text = "\n\n".join(make_texts(40)) + "ä" * 5000
    write(tmp_path / "in", {"book.txt": text})
    parts = [part for _, part in convert.cut_text(text.encode(), 1001)]
    assert b"".join(parts) == text.encode() and max(map(len, parts)) <= 1001
    assert sorted(converted(tmp_path, "--cut_bytes", 1001)) == sorted(p.decode() for p in parts)
    for book, size, cut in [
            (b"ab\n\ncdef\n\nefgh", 10, [b"ab\n\ncdef\n\n", b"efgh"]),
            (b"a\r\n\r\nb c\nd", 6, [b"a\r\n\r\n", b"b c\nd"]),
            (b"a b c", 4, [b"a b ", b"c"]), (b"\xc3\xa4\xc3\xa4", 3, [b"\xc3\xa4", b"\xc3\xa4"])]:
        assert [part for _, part in convert.cut_text(book, size)] == cut

# --------------------------------------------------------------------------------------------------
# Which columns

def test_a_key_with_dots_is_a_key_in_a_key(tmp_path):
    rows = [{"data": {"body": {"text": "one"}, "url": "x"}}, {"data.body.text": "two"}]
    table = pa.table({"data": [{"body": {"text": "three"}, "url": "y"}]})
    write(tmp_path / "in", {"a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
                            "b.parquet": as_parquet(table)})
    assert sorted(converted(tmp_path, "--text_key", "data.body.text")) == ["one", "three", "two"]
    converted(tmp_path, "--text_key", "data.body.text", "--keep", "data.url")
    rows = [row for s in all_of(tmp_path / "out") for row in pq.read_table(s.path).to_pylist()]
    assert {row["text"]: row["data.url"] for row in rows} == {"one": "x", "two": None, "three": "y"}

def test_kept_columns_stay_beside_their_documents(tmp_path, capsys):
    for part in range(2):
        numbers = range(part, 800, 2)
        columns = {"text": [*map(str, numbers)], "n": [*numbers], "lang": ["de"] * 400}
        write(tmp_path / "in", {f"{part}.jsonl": lines_of(**columns)})
    converted(tmp_path, "--keep", "n")
    assert "dropped columns: lang (to keep some: --keep NAME ...)\n" in capsys.readouterr().out
    rows = [row for s in all_of(tmp_path / "out") for row in pq.read_table(s.path).to_pylist()]
    assert len(rows) == 800 and all(row == {"text": str(row["n"]), "n": row["n"]} for row in rows)

@pytest.mark.parametrize("values, words", [
    ([1, "a"], "--keep n: .*; expected .* one type, in .*/a.jsonl or before it"),
    ([1, 2**70], "--keep n: .*; expected"),
    ([None, None], "--keep n: no document has a value"),
    ([1, 2], "--keep: .* n .*; expected values of one type")])
def test_columns_that_cannot_be_kept(tmp_path, values, words):
    write(tmp_path, {"a.jsonl": lines_of(text=["a", "b"], n=values)})
    if values == [1, 2]:    # each in a run of its own
        write(tmp_path, {"b.jsonl": lines_of(text=["a"], n=["x"])})
    assert re.search(words, command(tmp_path, "--out", tmp_path / "out", "--keep", "n"))
    line = command(tmp_path, "--keep", "tokens", "--out", tmp_path / "out")
    assert "shards hold the documents in a column of that name" in line

def test_columns_of_csv_are_strings(tmp_path):
    """A number such as 007 may be a name: convert does not guess."""
    write(tmp_path / "in", {"a.csv": "text|n\n" + "word|007\n" * 9})
    converted(tmp_path, "--keep", "n", "--delimiter", "|")
    assert pq.read_table(all_of(tmp_path / "out")[0].path)["n"][0].as_py() == "007"

# --------------------------------------------------------------------------------------------------
# What is bad is an error with its file and line, and with --skip_bad counted and shown

BAD = [    # a file, what is said of it, how many documents come before
    ("a.json.gz", gzip.compress(lines_of(text=make_texts(900)))[:-2000],
     "unreadable after line [0-9]+: ", 300),
    ("a.json.zst", b"no zstd", "unreadable: ", 0), ("a.json.gz", b"no gzip", "unreadable: ", 0),
    ("a.parquet", b"PAR1 no parquet", "unreadable: ", 0),
    ("a.arrow", b"ARROW1 no", "unreadable: ", 0),
    ("a.json", b'[{"text": "a"},\n {"text": "b"', "unreadable: .* line 2", 0),
    ("a.json", b"[" * 200_000, "unreadable: maximum recursion depth", 0),
    ("a.csv", b'text\n"one more"\n"never ends\n', "unreadable after line 2: unexpected end", 1),
    ("a.csv", b"text\ncaf\xe9\n", "unreadable: .* 0xe9 .*; expected UTF-8: iconv -f LATIN1", 0),
    ("a.csv", b"n,txt\n1,x\n", r"unreadable: nothing under 'text'; there is n, txt; did you "
     r"mean txt\?; name it by --text_key", 0),
    ("a.csv", b"text,text\nx,y\n", "unreadable: 2 columns are named 'text'", 0),
    ("a.csv", b"n,text\n1,x\n2,Well, I said\n",
     "line 3: 1 fields more than the first line names", 1),
    ("a.jsonl", b'{"text": "fine"}\n{"text": "cut',
     "line 2: Unterminated .*; expected one whole", 1),
    ("a.jsonl", b'\n\n{"txt": "x"}\n', r"line 3: nothing under 'text'; .* did you mean txt\?", 0),
    ("a.jsonl", b'{"text": null}\n', "line 1: nothing under 'text'; there is text; name it", 0),
    ("a.jsonl", b'{"text": ["x"]}\n', "line 1: 'text' holds list, .* add --messages_key text", 0),
    ("a.jsonl", b'{"text": "\xff"}\n', "line 1: .* can't decode byte 0xff", 0),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .* surrogates not allowed", 0),
    ("a.jsonl", b"3\n", "line 1: nothing under 'text'; there is only a value of type int", 0),
    ("a.json", b'[{"text": "a"},\n {"text": 3}]', "document 1: 'text' holds int", 1),
    ("a.md", "cafe".encode("utf-16"), "byte 0: .*; expected UTF-8: iconv .*UTF-16", 0),
    ("a.parquet", as_parquet(pa.table({"text": ["a", None, "b"]})),
     "row 1: nothing under 'text'", 2),
    ("a.txt", b"a" * 1001, "unreadable: over 1,000 bytes in one piece; write JSON lines", 0),
    ("a.parquet", as_parquet(pa.table({"text": ["\u00e4" * 501]})),
     "row 0: it has more than 1,000", 0)]

@pytest.mark.parametrize("name, data, words, n_before", BAD, ids=range(len(BAD)))
def test_bad_document_is_named(tmp_path, monkeypatch, capsys, name, data, words, n_before):
    monkeypatch.setattr(convert, "LONGEST_DOCUMENT", 10**6 if len(data) > 9000 else 1000)
    write(tmp_path / "in", {name: data, "b.jsonl": lines_of(text=["one", "two"])})
    line = command(tmp_path / "in", "--out", tmp_path / "out", "--text_key", "text")
    assert re.search(rf"^error: .*/{name}, {words}.* \(to skip what is bad: --skip_bad\)$", line)
    assert os.listdir(tmp_path) == ["in"], "an error leaves nothing"
    documents = converted(tmp_path, "--text_key", "text", "--skip_bad")
    assert {"one", "two"} < {*documents, "x"} and len(documents) >= 2 + n_before
    printed = capsys.readouterr().out
    shown = rf"skipped bad documents or files: 1; the first:\n .*/{name}, {words}"
    assert re.search(shown, printed)

@pytest.mark.parametrize("files, words, expected", [
    ({"a.jsonl": "\n"}, [], r"0 documents, but train and val need at least one each$"),
    ({"a.jsonl": lines_of(text=["a" * 99])}, [], r"1 document, but .* one each$"),
    ({"a.txt": "a" * 99}, [], "1 document, but .*; to cut .* blank lines, add --cut_bytes 7"),
    ({"a.txt": b"\xe9"}, ["--skip_bad"], "0 documents, but .*; skipped: .*a.txt, byte 0: .*LATIN1"),
    ({"a.txt": ""}, [], "no such files; expected names with .jsonl, "),
    ({"a.py": "x"}, [],
     r"expected .*other plain text: --as_text '\*.SUFFIX'; unpack archives first"),
    ({"a.jsonl": "x"}, ["--cut_bytes", 9],
     "--cut_bytes cuts plain text, and here is none; name it"),
    ({"a\x1b[2J.jsonl": "x"}, [], r"rename '.*a\\x1b\[2J.jsonl': it is not UTF-8, or has control"),
    ({"a.parquet": "x", "_delta_log/0.json": "{}"}, [], "holds older versions of its data"),
    ({}, ["nowhere/*.txt"], r"nowhere/\*.txt: no such files"),
    ({}, ["nowhere"], "nowhere: no such"),
    ({}, ["a", "--out", "s3://b/x"], "cannot write to s3://b/x; name a local folder"),
    ({}, ["-w", "0"], None), ({}, ["--cut_bytes", "x"], None)])
def test_other_mistakes_are_one_line(tmp_path, capsys, files, words, expected):
    given = [write(tmp_path, files)] if files else []
    line = command(*given, "--out", tmp_path / "out", *words)
    if expected is None:
        line, expected = capsys.readouterr().err, "expected a whole number, at least 1; see "
    assert re.search(expected, line) and line.strip().count("\n") == 0

@pytest.mark.parametrize("out", [".", "full", "file", "mount", "a.jsonl/x"])
def test_out_that_cannot_be_made_is_refused(tmp_path, monkeypatch, out):
    write(tmp_path, {"a.jsonl": lines_of(text=["a", "b"]), "file": "", "full/x": ""})
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == f"{tmp_path}/mount")
    line = command("a.jsonl", "--out", out)
    assert re.search("cannot make .* anew|is not empty; name|; to write elsewhere, name", line)
    assert sorted(os.listdir(tmp_path)) == before

def test_out_may_be_empty_or_a_link(tmp_path):
    write(tmp_path, {"a.jsonl": lines_of(text=["a", "b"])})
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert command(tmp_path / "a.jsonl", "--out", tmp_path / "link") is None
    assert sorted(read_all(tmp_path / "real")) == ["a", "b"] and (tmp_path / "link").is_symlink()

def test_full_disk_is_named(tmp_path):
    """`ulimit -f` stands in for the full disk: no file may have more than 8 blocks."""
    write(tmp_path, {"a.txt": "word " * 9999})
    words = f"{sys.executable} -m dev.convert {tmp_path}/a.txt --cut_bytes 999 --out {tmp_path}/out"
    ended = subprocess.run(["bash", "-c", f"ulimit -f 8; {words}"], cwd=HERE, text=True,
                           capture_output=True, timeout=300)
    assert re.search(rf"^error: .*, in {tmp_path}/.out.convert; to write elsewhere", ended.stderr)
    assert os.listdir(tmp_path) == ["a.txt"]

# --------------------------------------------------------------------------------------------------
# Which files

def test_files_that_are_not_read_are_counted(tmp_path, capsys):
    """Hidden, empty, about the data, of another kind or split; links are followed once."""
    line = lines_of(text=["a", "b"])
    names = ("train-0.jsonl", "test-0.jsonl", "a.rar", ".git/c.jsonl", "index.json", "README.md")
    write(tmp_path / "in", {**dict.fromkeys(names, line), "empty.txt": ""})
    os.symlink("..", tmp_path / "in" / ".git" / "loop")
    os.symlink("train-0.jsonl", tmp_path / "in" / "train-1.jsonl")
    assert sorted(converted(tmp_path)) == ["a", "b"]
    printed = capsys.readouterr().out
    words = "ignored 6 files, such as .*, with suffix .json, .jsonl, .md, .rar, .txt: hidden, "
    assert re.search(words, printed)
    shutil.rmtree(tmp_path / "out")
    named = [tmp_path / "in" / name for name in ("test-0.jsonl", ".git/c.jsonl")]
    assert command(*named, "--out", tmp_path / "out") is None
    assert sorted(read_all(tmp_path / "out")) == ["a", "a", "b", "b"]
    assert "ignored" not in capsys.readouterr().out

def test_shards_of_ours_below_an_input_are_not_read_again(tmp_path):
    """--out inside the input, twice; a folder of ours that is named itself is read."""
    write(tmp_path, {"a.jsonl": lines_of(text=["a", "b", "c"])})
    for path, out in ((tmp_path, "one"), (tmp_path, "deep/two"), (f"{tmp_path}/**", "three"),
                       (tmp_path / "one", "four"), (f"{tmp_path}/one/*", "five")):
        assert command(path, "--out", tmp_path / out) is None
        assert sorted(read_all(tmp_path / out)) == ["a", "b", "c"], out

def test_as_text_reads_only_what_it_names(tmp_path):
    files = ("a.py", "sub/b.py", "c.txt", "d.md", "f.json", "g.jsonl")
    write(tmp_path / "in", dict.fromkeys(files, '{"text": "a"}'))
    assert converted(tmp_path, "--as_text", "*.py", "--as_text", "*.rst") == ['{"text": "a"}'] * 2
    write(tmp_path / "one", {"README": "one\n\ntwo"})
    words = "--as_text", "README", "--cut_bytes", 5, "--out", tmp_path / "two"
    assert command(tmp_path / "one/README", tmp_path / "in/g.jsonl", *words) is None
    assert sorted(read_all(tmp_path / "two")) == ["a", "one\n\n", "two"]

# --------------------------------------------------------------------------------------------------
# Conversations

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}

def as_json(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)

def test_every_form_of_a_conversation_may_be_in_one_call(tmp_path, capsys):
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    pair = {"prompt": "Hi", "completion": "Hello"}
    hidden = {**ANSWER, "weight": 0}
    write(tmp_path / "in", {
        "a.jsonl": as_json({"messages": [USER, ANSWER]}, {"conversations": sharegpt}, pair),
        "b.jsonl": as_json([USER, ANSWER], [ANSWER, USER, ANSWER]),    # nanochat's lines
        "c.csv": "prompt;response\nHi;Hello\n",
        "d.parquet": as_parquet(pa.table({"messages": [[USER, ANSWER], [USER, hidden]]})),
        "e.json": json.dumps([{"instruction": "Hi", "input": "", "output": "Hello"},
                              {"instruction": "Add", "input": "1, 2", "output": "3"}]),
        "f.jsonl": as_json({"prompt": [USER], "completion": [ANSWER]},
                           {"messages": json.dumps([USER, ANSWER]), "n": 1})})
    found = sorted(map(str, map(json.loads, converted(tmp_path))))
    added = [{"role": "user", "content": "Add\n\n1, 2"}, {"role": "assistant", "content": "3"}]
    odd = [added, [ANSWER, USER, ANSWER], [USER, hidden]]
    assert found == sorted(map(str, [[USER, ANSWER]] * 9 + odd))
    assert "dropped columns: n (to" in capsys.readouterr().out
    assert dataset.read_index(str(tmp_path / "out"))["kind"] == "messages"
    assert command(tmp_path / "out", "--out", tmp_path / "again") is None
    assert sorted(read_all(tmp_path / "again")) == sorted(read_all(tmp_path / "out"))

def test_roles_parts_and_weights_survive(tmp_path):
    chat = [{"role": "developer", "content": "Be nice"}, USER, {**ANSWER, "weight": 0},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": [{"type": "python", "text": "1+1"},
                                              {"type": "python_output", "text": "2"}], "weight": 1}]
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    rows = {"chat": chat, "text": "x"}, {"chat": [{"role": "user", "content": parts}, ANSWER]}
    write(tmp_path / "in", {"a.jsonl": as_json(*rows)})
    found = [json.loads(line) for line in converted(tmp_path, "--messages_key", "chat")]
    assert chat in found and [USER, ANSWER] in found

def test_keys_of_messages_that_are_lost_are_reported(tmp_path, capsys):
    named = {**ANSWER, "name": "Bob", "tool_calls": None, "refusal": ""}
    rows = {"messages": [USER, named]}, [USER, ANSWER, USER, named]
    write(tmp_path / "in", {"a.jsonl": as_json(*rows)})
    converted(tmp_path)
    printed = capsys.readouterr().out
    assert re.search("dropped from messages: name, 2 times, .*/a.jsonl, line 1: 'Bob'\n", printed)

@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "refusal", "audio"])
def test_a_key_that_carries_content_is_refused(tmp_path, key):
    thought = {**ANSWER, key: "I think"}
    write(tmp_path / "in", {"a.jsonl": as_json([USER, ANSWER], {"messages": [USER, thought]})})
    line = command(tmp_path / "in", "--out", tmp_path / "out")
    words = rf"line 2: message 1: its {key} would be lost .*--ignore_keys {key}\); saw .*I thi"
    assert re.search(words, line)
    assert len(converted(tmp_path, "--ignore_keys", key)) == 2
    for content in ("", None):    # an empty answer is not learned in its place
        write(tmp_path / "in", {"b.jsonl": as_json([USER, {**thought, "content": content}])})
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        line = command(tmp_path / "in", "--out", tmp_path / "out", "--ignore_keys", key)
        assert f"b.jsonl, line 1: message 1: without its {key}, nothing is left; saw " in line

BAD_CHATS = [
    ([], "expected a list of messages"), ({"a": 1}, "expected a list of .* saw {'a': 1}"),
    ("Hi", "Expecting value"), ([USER], "no message of an assistant, so nothing to learn; saw"),
    (["Hi"], "message 0: expected {'role': 'user', 'content': 'Hi'}; saw 'Hi'"),
    ([USER, {"role": "assistant"}], "message 1: expected a string or .* saw {'role': 'assistant'"),
    ([{"content": "Hi"}, ANSWER], "message 0: expected a role"),
    ([USER, {**ANSWER, "weight": 0.5}], "message 1: expected a weight of 0 or 1"),
    ([USER, {"role": "assistant", "content": [{"type": "image"}]}],
     "message 1: expected parts .*image"),
    ([{"role": "user", "content": [{"type": "python", "text": ""}]}, ANSWER],
     "message 0: expected parts")]

@pytest.mark.parametrize("messages, words", BAD_CHATS)
def test_bad_message_is_shown(tmp_path, capsys, messages, words):
    good = {"messages": [USER, ANSWER]}
    write(tmp_path / "in", {"a.jsonl": as_json(good, good, {"messages": messages})})
    line = command(tmp_path / "in", "--out", tmp_path / "out")
    assert re.search(rf"a.jsonl, line 3: {words}.*--skip_bad", line)
    assert len(converted(tmp_path, "--skip_bad")) == 2
    assert "skipped bad documents or files: 1; the first:\n  " in capsys.readouterr().out

def test_texts_and_conversations_do_not_mix(tmp_path):
    chat = {"messages": [USER, ANSWER]}
    text = {"text": "a"}
    write(tmp_path, {"a.jsonl": as_json(text, chat), "b.jsonl": as_json(chat, text)})
    line = command(tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert "line 2: a conversation among texts; convert conversations apart" in line
    line = command(tmp_path / "b.jsonl", "--out", tmp_path / "out")
    assert "line 2: nothing under 'messages'; there is text" in line

# --------------------------------------------------------------------------------------------------
# Processes

def test_processes_are_as_many_as_cores_or_work(tmp_path, monkeypatch):
    """A process has 100 MB or more to do, if nobody says how many."""
    asked = []
    original = convert.pool_of

    def pool_of(executor, n):
        asked.append(n)
        return original(executor, 1)

    monkeypatch.setattr(convert, "pool_of", pool_of)
    monkeypatch.setattr(convert, "cores", lambda: 4)
    folder = many_inputs(tmp_path / "in")
    size = sum(path.stat().st_size for path in folder.rglob("*.*"))
    for parts, words in ((1, []), (3, []), (9, []), (1, ["-w", 2]), (1, ["-w", 1000])):
        monkeypatch.setattr(convert, "BYTES_PER_PROCESS", size // parts)
        converted(tmp_path, "--text_key", "raw_content", *words)
    assert asked == [1, 3, 4, 2, 4]

def test_second_convert_into_one_folder_is_refused(tmp_path):
    """What a killed one has left is removed."""
    left = ".out.convert/building/runs/a.arrow"
    write(tmp_path, {"a.jsonl": lines_of(text=["a", "b"]), left: "x"})
    words = tmp_path / "a.jsonl", "--out", tmp_path / "out"
    with convert.building_folder(f"{tmp_path}/out"):
        assert "/out; wait, or name another --out" in command(*words)
    assert command(*words) is None
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]

def group_of(pid):
    """The process group of a process that is alive."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, _, group = file.read().rpartition(")")[2].split()[:3]
        return int(group) if state != "Z" else None

@pytest.mark.parametrize("how, when", [
    (signal.SIGKILL, "reading"), (signal.SIGINT, "reading"), (signal.SIGINT, "starting")])
def test_workers_end_with_convert(tmp_path, how, when):
    """Killed, or stopped by Ctrl-C, Ctrl-C: no worker or shard stays; it can start anew."""
    for i in range(4):
        write(tmp_path / "in", {f"{i}.jsonl": lines_of(text=["some text " * 50] * 20_000)})
    words = [f"{tmp_path}/in", "--out", f"{tmp_path}/out", "-w", "2"]
    stuck = ("import signal, time; from dev import convert\n"
             "convert.cores = lambda: 2\n"
             "convert.keys_and_lengths = lambda *_: time.sleep(99)\n"
             "signal.signal(signal.SIGINT, signal.default_int_handler)\n"    # a shell may ignore it
             "convert.main()")
    process = subprocess.Popen([sys.executable, "-c", stuck, *words], cwd=HERE, text=True,
                               stderr=subprocess.PIPE, start_new_session=True)
    children = []
    runs = f"{tmp_path}/.out.convert/building/runs/*.arrow"
    while len(children) < 4 or (when == "reading" and not glob.glob(runs)):
        pids = filter(str.isdigit, os.listdir("/proc"))
        children = [pid for pid in pids if group_of(pid) == process.pid]
        assert process.poll() is None
        time.sleep(0.01)    # 4: itself, two workers, and Python's tracker of their resources
    for _ in range(1 if how == signal.SIGKILL else 3):
        process.send_signal(how) if how == signal.SIGKILL else os.killpg(process.pid, how)
        time.sleep(0.05)
    printed = None
    while printed is None:
        try:
            _, printed = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:    # Ctrl-C is ignored while processes start
            os.killpg(process.pid, how)
    while [pid for pid in children if group_of(pid) == process.pid]:
        time.sleep(0.05)    # the suite's time limit ends this
    if how == signal.SIGINT:
        assert "Traceback" not in printed and "stopped" in printed
        assert os.listdir(tmp_path) == ["in"]
    assert not (tmp_path / "out").exists()
    assert command(*words) is None
    assert sum(sum(shard.group_sizes) for shard in all_of(tmp_path / "out")) == 80_000
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]

def test_ctrl_c_while_it_starts_is_one_line(tmp_path):
    """A pyarrow that takes a while to import stands in for the first half second."""
    write(tmp_path, {"pyarrow.py": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"})
    ended = subprocess.run(
        [sys.executable, "-c", "import signal, runpy, sys\n"
         "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
         "sys.argv = ['convert', 'x']\nrunpy.run_module('dev.convert', run_name='__main__')"],
        cwd=HERE, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True, capture_output=True)
    assert ended.stderr == "\nstopped\n"

def test_scripts_that_are_run_directly_say_how_to_run_them():
    for name in ("convert", "prepare"):
        words = [sys.executable, f"dev/{name}.py"]
        ended = subprocess.run(words, cwd=HERE, text=True, capture_output=True)
        assert re.fullmatch(f"usage: python -m dev.{name} .*\n", ended.stderr)

def test_convert_on_a_cluster(tmp_path):
    """The same shards as on one machine, although a worker is killed on the way."""
    distributed = pytest.importorskip("distributed")
    inputs = [str(many_inputs(tmp_path / "in"))]
    convert.convert(inputs, f"{tmp_path}/alone", Options("raw_content"))
    one_thread = {"threads_per_worker": 1, "dashboard_address": None}
    with (distributed.LocalCluster(n_workers=2, **one_thread) as cluster,
          cluster.get_client() as client):
        victim, tasks = next(iter(cluster.workers.values())).pid, itertools.count()

        def submit(function, item):
            if next(tasks) == 3:
                os.kill(victim, signal.SIGKILL)
            return client.get_executor().submit(function, item)

        executor = SimpleNamespace(submit=submit)
        convert.convert(inputs, f"{tmp_path}/out", Options("raw_content"), 1, executor)
        assert next(tasks) > 4 and group_of(victim) is None
        words = "--text_key", "raw_content", "--dask", cluster.scheduler_address
        assert command(*inputs, *words, "--out", tmp_path / "typed") is None
    for out in ("out", "typed"):
        assert read_all(tmp_path / out) == read_all(tmp_path / "alone") != []

def test_dask_workers_that_cannot_import_us_are_named(tmp_path):
    """Started elsewhere, without PYTHONPATH."""
    pytest.importorskip("distributed")
    start = ("import sys; sys.path = [path for path in sys.path if path != '']\n"
             "from distributed import LocalCluster\n"
             "cluster = LocalCluster(n_workers=1, protocol='tcp', dashboard_address=None)\n"
             "print(cluster.scheduler_address, flush=True); sys.stdin.read()")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", start]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as cluster:
        address = cluster.stdout.readline().strip()
        line = command("x", "--dask", address, "--out", tmp_path / "out")
        cluster.stdin.close()
    words = r"error: a worker of \S+ says: No module named 'dev.*; start .*PYTHONPATH=\S+ dask"
    assert re.search(words, line)
