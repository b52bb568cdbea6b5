"""dev/convert.py: your text or chats -> shuffled shards, nothing lost."""

import bz2
import contextlib
import csv
import functools
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
import shlex
import shutil
import signal
import subprocess
import sys
import time
from codecs import BOM_UTF8
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset
from dev import convert
from dev.records import KEYS, make_document
from dev.tests.cases import DATA, is_like, read_cases
from test_dataloader import HERE

FORMS_MD = (HERE / "dev/recipes/forms.md").read_text()

# --------------------------------------------------------------------------------------------------
# Each test has a folder of its own: `in` is converted to `out`

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

@pytest.fixture
def output(capsys):
    """What was printed since the last call, without the folder's own path."""
    return lambda: relative(capsys.readouterr().out)

def relative(text):
    return text.replace(f"{os.getcwd()}/", "")

def as_json(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()

def texts_as_json(texts):
    return as_json(*({"text": text} for text in texts))

def write(files, folder="in"):
    """{name: bytes or str}"""
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

def write_rows(*rows):
    write({"a.jsonl": as_json(*rows)})

def write_texts(texts):
    write({"a.jsonl": texts_as_json(texts)})

def command(*words):
    """The line or status with which a command ends; None if all went well."""
    try:
        convert.main(shlex.split(" ".join(map(str, words))))
    except SystemExit as end:
        return relative(f"{end.code}")

def converted(*words):
    """All documents, sorted."""
    shutil.rmtree("out", ignore_errors=True)
    assert command("in --out out", *words) is None
    return sorted(read_all())

def chats(*words):
    """All conversations, the shortest first."""
    return sorted(map(json.loads, converted(*words)), key=len)

def refused(*words):
    """The line with which it ends."""
    return command("in --out x", *words)

def rows_of(folder="out"):
    """All rows of all columns."""
    tables = [pq.read_table(shard.path) for shard in all_of(folder)]
    return pa.concat_tables(tables).to_pylist()

def all_of(folder="out"):
    return dataset.list_shards(folder, "train") + dataset.list_shards(folder, "val")

def documents_of(shards):
    documents = []
    for shard in shards:
        for row_group in range(len(shard.group_sizes)):
            documents += shard.read(row_group).to_pylist()
    return documents

def read_all(folder="out"):
    """Every document of both splits, in order."""
    return documents_of(all_of(folder))

def sides():
    """The documents of train and of val, each sorted."""
    splits = [dataset.list_shards("out", split) for split in ("train", "val")]
    return [sorted(documents_of(shards)) for shards in splits]

def user(content):
    return {"role": "user", "content": content}

def answer(content, **others):
    return {"role": "assistant", "content": content, **others}

USER, ANSWER = user("Hi"), answer("Hello")
TALK = [USER, ANSWER]
# --------------------------------------------------------------------------------------------------
# Every document once, in an order that nothing changes

@pytest.mark.parametrize("words, files, lines", read_cases("files.txt"), ids=itertools.count())
def test_files_become_what_files_txt_says(output, words, files, lines):
    for name, content in json.loads(files).items():
        if isinstance(content, str):
            content = content.encode(errors="surrogateescape")
        else:
            content = as_file(Path(name).suffix[1:], *content)
        write({name: content})
    inputs = "" if "in/" in words else "in"
    error = command(inputs, words, "--out out")
    found = [error] if error else [line for _, line in sorted(show_rows("(val)" in str(lines)))]
    found += [line for line in output().splitlines() if " -> " not in line]    # the sum
    assert is_like("\n".join(found), lines), "\n".join(found)

def show_rows(shows_val):
    """(document, "'document' {'n': 1} (val)"): with what was kept of it, and its split"""
    *train, val = all_of()
    for shard in (*train, val):
        mark = " (val)" if shows_val and shard is val else ""
        for row in pq.read_table(shard.path).to_pylist():
            document = row.pop(shard.kind)
            kept = f" {row}" if row else ""
            yield document, f"{document!r}{kept}{mark}"

def test_documents_of_two_files_are_shuffled(output):
    write({"a.jsonl": '{"text": "one"}\n{"text": "two"}\n', "b.txt": "three"})
    assert converted() == ["one", "three", "two"]
    printed = output()
    assert "\nfiles: 2 -> 3 documents in 3 shards of out, the last for val (1)\n" in printed
    assert sorted(os.listdir()) == ["in", "out"]

def as_parquet(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2, write_page_checksum=True)
    return sink.getvalue().to_pybytes()

def as_arrow(table, opened):
    sink = pa.BufferOutputStream()
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()

def as_stream(*texts):
    return as_arrow(as_table(texts), pa.ipc.new_stream)

def as_csv(texts, delimiter):
    sink = io.StringIO(newline="")
    rows = csv.writer(sink, delimiter=delimiter)
    rows.writerows([("n", "text"), *enumerate(texts)])
    return sink.getvalue().encode()

def as_table(texts, kind=None):
    texts = pa.array(texts, pa.string()).cast(kind or pa.string())
    return pa.table({"n": range(len(texts)), "text": texts})

def as_file(suffix, *rows):
    if suffix == "parquet":
        return as_parquet(pa.Table.from_pylist(rows))
    if suffix == "arrow":
        return as_arrow(pa.Table.from_pylist(rows), pa.ipc.new_stream)
    if suffix != "csv":
        return as_json(*rows)
    sink = io.StringIO(newline="")
    table = csv.DictWriter(sink, rows[0])
    table.writeheader()
    table.writerows(rows)
    return sink.getvalue()

SMALL = pa.dictionary(pa.int8(), pa.string())

FORMATS = {
    "lines.jsonl": texts_as_json,
    "crlf.ndjson": lambda texts: BOM_UTF8 + texts_as_json(texts).replace(b"\n", b"\r\n\n"),
    "array.json": lambda texts: BOM_UTF8 + as_json([{"text": text} for text in texts]),
    "comma.csv": lambda texts: BOM_UTF8 + as_csv(texts, ","),
    "pipe.csv": lambda texts: as_csv(texts, "|"),
    "semicolon.csv": lambda texts: as_csv(texts, ";"),
    "tab.csv": lambda texts: as_csv(texts, "\t"),
    "a.parquet": lambda texts: as_parquet(as_table(texts)),
    "b.pq": lambda texts: as_parquet(as_table(texts, pa.large_string())),
    "c.parquet": lambda texts: as_parquet(as_table(texts, SMALL)),
    "d.arrow": lambda texts: as_arrow(as_table(texts), pa.ipc.new_stream),
    "e.feather": lambda texts: as_arrow(as_table(texts), pa.ipc.new_file)}
PACKED = {
    "": bytes, ".bz2": bz2.compress,
    ".gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    ".lz4": lambda data: pa.Codec("lz4").compress(data, asbytes=True)}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))

@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_format_gives_back_every_document(data):
    shutil.rmtree("in", ignore_errors=True)
    texts = ["one", "two"]
    files = {"0.jsonl": texts_as_json(texts)}
    for name in data.draw(st.sets(st.sampled_from([*FORMATS]))):
        documents = data.draw(st.lists(TEXTS, min_size=1, max_size=9))
        is_table = name.endswith(("parquet", "pq", "arrow", "feather"))
        packing = "" if is_table else data.draw(st.sampled_from([*PACKED]))
        files[f"deep/{name}{packing}"] = PACKED[packing](FORMATS[name](documents))
        texts += documents
    for i, text in enumerate(data.draw(st.lists(TEXTS, max_size=3))):
        files[f"{i}.txt"] = BOM_UTF8 + text.encode()
        texts.append(text)
    write(files)
    assert converted() == sorted(filter(None, texts))

def make_texts(n, seed=0):
    """Documents of all lengths and scripts, every one different."""
    pick = random.Random(seed)
    words = ["loss", "für", "日本", "🙂", "\x00", "\n", "def f(x):", "<|bos|>", " " * 9]
    lengths = [int(pick.paretovariate(0.8)) % 3000 for _ in range(n)]
    texts = [" ".join(pick.choices(words, k=n)) for n in lengths]
    return [f"{seed}.{i} {text}" for i, text in enumerate(texts)]

def test_kept_values_count_for_the_size_of_a_run(monkeypatch):
    write_rows(*20 * [{"text": "a", "html": "b" * 500}, {"text": "b", "html": "b" * 500}])
    monkeypatch.setattr(convert, "RUN_BYTES", 1000)
    with mock.patch("dev.convert.write_run", wraps=convert.write_run) as write_run:
        assert converted("--keep html") == ["a"] * 20 + ["b"] * 20
    assert write_run.call_count == 20

@pytest.mark.parametrize("run_bytes, tasks, workers", [
    (1 << 30, 1, 1),
    (9, 256, 1),
    (999, 3, 2)])
def test_order_never_changes(monkeypatch, run_bytes, tasks, workers):
    """One run or many, one process or two."""
    texts = make_texts(300)
    for i in range(8):
        write({f"{i}.jsonl": texts_as_json(texts[i::8])})
    monkeypatch.setattr(convert, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(convert, "TASKS", tasks)
    monkeypatch.setattr(convert, "cores", lambda: 2)
    converted("-w", workers)
    documents = json.dumps(read_all()).encode()
    assert hashlib.sha256(documents).hexdigest().startswith("5923e59d1dbf576d")

def test_shards_are_equal_and_val_is_a_hundredth(monkeypatch):
    """... of the documents, or 64 of them. A document of a twentieth of all text is not in val."""
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    texts = [f"{i}" * (i % 50) or "." for i in range(2000)]
    texts += 10 * ["long" * 5000]
    n_bytes = sum(map(len, texts))
    for k in range(5):
        write_texts(texts[k:] + texts[:k])
        assert converted() == sorted(texts)
        *train, val = all_of()
        assert sum(val.group_sizes) == 64 and val.text_bytes < 20_000
    sizes = [sum(shard.group_sizes) for shard in train]
    assert 4 < len(train) < n_bytes / 20_000 + 3
    assert max(sizes) - min(sizes) <= 1
    assert min(len(shard.group_sizes) for shard in train) >= 16

@pytest.mark.parametrize("suffix, n_lost", [(".gz", 0), (".zst", 10), (".bz2", 10)])
def test_hardly_a_line_before_a_damaged_place_is_lost(output, suffix, n_lost):
    """Two files that were compressed apart, and joined; the second one was cut off."""
    lines = texts_as_json([f"{i}".zfill(100) for i in range(60)])
    data = PACKED[suffix](lines)
    write({f"a.jsonl{suffix}": data + data[:-20]})
    assert len(converted("--skip_bad")) >= 60 - n_lost
    assert f"a.jsonl{suffix}, unreadable after line" in output()

# --------------------------------------------------------------------------------------------------
# Val shares no text with train

def with_one_space(texts):
    return [" ".join(text.split()) for text in texts]

NUMBER = st.integers(0, 300).map(str)

@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBER, min_size=2, max_size=400), st.booleans())
def test_no_text_is_in_train_and_in_val(texts, drop):
    """Also if it is in two files, with other white space around it."""
    shutil.rmtree("in", ignore_errors=True)
    write_texts(texts[::2])
    write({"b.csv": as_csv([f"\n{text}\r\n" for text in texts[1::2]], ",")})
    shutil.rmtree("out", ignore_errors=True)
    line = command("in --out out", "--drop_copies" * drop)
    different = sorted({*texts})
    if len(different) == 1:
        assert "train and val need one each, saw 1 without copies. To divide" in line
        return
    train, val = map(with_one_space, sides())
    assert train and val and not {*train} & {*val}
    assert sorted(train + val) == (different if drop else sorted(texts))
    n = len(different)
    assert len({*val}) == max(1, n // 100, min(64, n // 10))

def test_a_long_run_of_line_ends_between_marks_is_no_text():
    """A million of them, as in a padded file, cost no more than other text."""
    write({"a.txt": "a" + "\n" * 10 ** 6 + "<m>b<m>c" + "\n" * 9})
    assert converted("--split_at '<m>'") == ["a" + "\n" * (10 ** 6 - 99), "b", "c" + "\n" * 9]

def test_a_very_frequent_text_is_not_all_of_val():
    for i in range(8):
        write_texts(["disclaimer" * i] * 900 + make_texts(100, i))
        converted()
        _, val = sides()
        assert len(val) == 10

@pytest.mark.parametrize("n_bytes", [1000, 100_000])
@pytest.mark.parametrize("other", [300, 3])
def test_a_book_beside_a_note_is_not_val(n_bytes, other):
    for i in range(20):
        write({"book.txt": f"{i} ".ljust(n_bytes, "."), "note.txt": f"{i}" * other})
        converted()
        assert sides()[1] == [f"{i}" * other]

@pytest.mark.parametrize("form", ["folder", "glob", "files", "folders"])
def test_splits_in_names_mean_the_same_for_all_forms_of_inputs(output, form):
    names = {"train": 40, "validation": 9, "test": 5}
    write({
        f"{name}/{i}.jsonl": texts_as_json([f"{name} {i} {k}" for k in range(n)])
        for name, n in names.items() for i in "ab"})
    write({"train/c.jsonl": texts_as_json(["validation a 3"])})
    inputs = {
        "folder": ["in"], "glob": ["in/**/*.jsonl"],
        "files": glob.glob("in/*/*"), "folders": glob.glob("in/*")}
    assert command(*inputs[form], "--out", "out") is None
    train, val = sides()
    assert train == sorted(f"train {i} {k}" for k in range(40) for i in "ab")
    assert val == sorted([
        "validation a 3", *(f"validation {i} {k}" for k in range(9) for i in "ab")])
    printed = output()
    assert "files named for test (their split; test is not read): 2, such as " in printed
    assert "\n1 of 99 documents repeat the text of another one" in printed

# --------------------------------------------------------------------------------------------------
# Which columns

def test_kept_columns_stay_beside_their_documents(output):
    """A key with dots is a key in a key. Other columns are counted."""
    numbers = {f"{i}": i for i in range(800)}
    rows = [{"data": {"text": text}, "n": i, "lang": "de"} for text, i in numbers.items()]
    rows += {"data.text": "x", "data": {"n": 0}, "n": None}, {"data": {"text": "y"}}
    table = pa.table({"data": [{"text": "z", "m": 0}], "n": [9], "url": ["there"]})
    write({"a.jsonl": as_json(*rows), "b.parquet": as_parquet(table)})
    converted("--text_key data.text --keep n")
    found = {row["text"]: row["n"] for row in rows_of()}
    assert found == {**numbers, "x": None, "y": None, "z": 9}
    printed = output()
    assert re.search(r"dropped column lang: 800, .*, line 1\n", printed)
    assert re.search(r"dropped column url: 1, .*, row 0\n", printed)

def test_values_to_keep_may_differ_in_their_types():
    """Whole and broken numbers, objects with other keys: as Arrow joins them, also of two files."""
    write({"a.jsonl": as_json({"text": "a", "n": 1}, {"text": "b", "n": 2.5}, {"text": "c"}),
           "b.jsonl": as_json({"text": "d", "n": 7})})
    converted("--keep n")
    assert {row["text"]: row["n"] for row in rows_of()} == {"a": 1, "b": 2.5, "c": None, "d": 7}
    shutil.rmtree("in")
    write_rows({"text": "a", "n": {"x": 1}}, {"text": "b", "n": {"y": [2]}})
    converted("--keep n")
    found = {row["text"]: row["n"] for row in rows_of()}
    assert found == {"a": {"x": 1, "y": None}, "b": {"x": None, "y": [2]}}

# --------------------------------------------------------------------------------------------------
# What is bad is an error with its file and line, and with --skip_bad counted and shown

TWICE = pa.table([["a"], ["b"]], 2 * ["text"])

BAD_CRC = gzip.compress(texts_as_json("ab"))[:-8] + bytes(8)
PADDED_XZ = lzma.compress(texts_as_json("a")) + bytes(8)

BAD = [    # a file, what is said of it, how many documents come before. files.txt has more
    ("a.json.gz", gzip.compress(texts_as_json(make_texts(900)))[:-2000],
     "unreadable after line [0-9]+: ", 300),
    ("a.json.zst", "no zstd", "unreadable: ", 0),
    ("a.parquet", as_parquet(as_table(["wxyz"])).replace(b"xyz", b"xxx"), "unreadable: .*CRC", 0),
    ("a.parquet", as_parquet(TWICE), "unreadable: .*2 times", 0),
    ("a.parquet", as_file("parquet", {"txt": "a"}), r"row 0: no text .*\['txt'\] .*; name", 0),
    ("a.arrow", as_stream(*"abcd")[:-8], "unreadable: it is neither parquet nor Arrow .*its end is mi", 0),
    ("a.json", "[" * 200_000, "unreadable: maximum recursion depth", 0),
    ("a.jsonl.gz", BAD_CRC, "unreadable after line 2: CRC .*see Damaged and foreign files in", 2),
    ("a.jsonl.gz", "plain", "unreadable: Not a gzip.*of the kind that its name says", 0),
    ("a.jsonl.zst", "plain", "unreadable: .*of the kind that its name says", 0),
    ("a.jsonl.xz", PADDED_XZ, "unreadable after line 1: .*see Damaged and foreign files in", 1),
    ("a.jsonl", b"\x1f\x8b\x08", "line 1: 'utf-8' .*see Damaged and foreign files in", 0),
    ("a.json", b'{"text": "\xe9"}', "line 1: 'utf-8' .*expected UTF-8; .*see Damaged and", 0),
    ("a.json", '[{"text": "a"},\n {"text": 3}]', "document 1: 'text' holds int", 1),
    ("a.jsonl", as_json(TALK, {"messages": [USER]}), "line 2: expected at least one assistant", 1)]

@pytest.mark.parametrize("name, data, words, n_before", BAD, ids=range(len(BAD)))
def test_bad_document_is_named(output, name, data, words, n_before):
    good = [{"text": "one"}, {"text": "two"}]
    if "role" in f"{data[:9]}":
        good = [TALK, [ANSWER, *TALK]]
    write({name: data, "b.jsonl": as_json(*good)})
    line = refused()
    assert re.search(rf"^error: .*/{name}, {words}", line)
    what = "the rest of bad files" if words.startswith("unreadable") else "bad documents"
    assert line.endswith(f" (to skip {what}: --skip_bad)")
    assert os.listdir() == ["in"], "an error leaves nothing"
    assert len(converted("--skip_bad")) >= 2 + n_before
    printed = output()
    assert re.search(rf"skipped {what}: 1, such as .*/{name}, {words}", printed)

@pytest.mark.parametrize("words, expected", [
    ("nowhere/*.txt", r"nowhere/\*.txt does not exist or has no files; expected a fi"),
    ("-w 0", "0: expected 1 or more, below"),
    ("--split_at ''", "--split_at: expected a text; see"),
    ("--keep n tokens", "--keep: the names text, messages and tokens are reserved for the documents"),
    ("--out s3://b/x", "cannot write to 's3://b/x'; name a local folder")])
def test_mistakes_in_flags_are_one_line(capsys, words, expected):
    write_texts("ab")
    line = command("--out out in", words)
    if line == "2":    # argparse
        line = capsys.readouterr().err
    assert re.search(expected, line) and line.strip().count("\n") == 0

@pytest.mark.parametrize("out", [".", "full", "/proc", "a.jsonl/x"])
def test_out_that_cannot_be_made_is_refused(out):
    """... before files are read. /proc is a mount point."""
    write({"a.jsonl": "{bad", "full/x": ""}, ".")
    line = command("a.jsonl", "--out", out)
    assert re.search(f"if writing to .*{out.strip('.')} failed: --out NEW_FOLDER;", line)
    assert sorted(os.listdir()) == ["a.jsonl", "full"]

def test_out_may_be_empty_or_a_link():
    write({"a.jsonl": texts_as_json("ab")}, ".")
    os.mkdir("real")
    os.symlink("real", "link")
    assert command("a.jsonl", "--out", "link") is None
    assert sorted(read_all("real")) == ["a", "b"] and os.path.islink("link")

def test_full_disk_is_named(tmp_path):
    """`ulimit -f` stands in for the full disk: no file may have more than 8 blocks."""
    write({"a.txt": "word " * 9999}, ".")
    words = f"-m dev.convert {tmp_path}/a.txt --cut_bytes 999 --out {tmp_path}/out"
    ended = subprocess.run(["bash", "-c", f"ulimit -f 8; {sys.executable} {words}"], cwd=HERE,
                           text=True, capture_output=True, timeout=300)
    expected = rf"error: .*if writing to {tmp_path}/out failed: --out NEW_FOLDER"
    assert re.search(expected, ended.stderr)
    assert os.listdir(tmp_path) == ["a.txt"]

# --------------------------------------------------------------------------------------------------
# Which files

def test_shards_below_an_input_are_files_like_any_others(output):
    """--out inside the input, twice: the report says that the text is there twice."""
    write({"a.jsonl": texts_as_json("abc")}, ".")
    assert command(". --out one") is None
    assert command("one --out two") is None
    assert sorted(read_all("one")) == sorted(read_all("two")) == ["a", "b", "c"]
    shutil.rmtree("two")
    output()
    assert command(". --out three") is None
    assert "3 of 6 documents repeat the text of another one" in output()
    assert command(". --out deep/four --drop_copies") is None
    assert sorted(read_all("deep/four")) == ["a", "b", "c"]

# --------------------------------------------------------------------------------------------------
# Records, each with what becomes of it

def show_message(message):
    weight = f" (weight {message['weight']})" if "weight" in message else ""
    return f"{message['role']}{weight}: {message['content']}".replace("\n", "\\n")

def outcome(path, flags):
    """The lines after a record, as records.txt has them."""
    say = mock.Mock()
    [(_, _, record)] = convert.records_of(path, convert.READERS[Path(path).suffix], flags)
    try:
        document, _ = make_document(record, flags, say)
    except Exception as error:
        return f"error: {error}"
    said = [call.args[0] for call in say.call_args_list]
    if "text" in said:
        said.remove("text")
        said.insert(0, f"text: {document.decode()}")
    if "messages" in said:
        said.remove("messages")
        said.insert(0, " | ".join(map(show_message, json.loads(document))))
    return "\n".join(said)

@pytest.mark.parametrize("words, record, lines", read_cases("records.txt"), ids=itertools.count())
def test_a_record_becomes_what_records_txt_says(words, record, lines):
    kinds, _, flags = words.rpartition("|")
    with mock.patch("dev.convert.convert") as run:
        convert.main(["in", *flags.split()])
    [[flags], _] = run.call_args
    for kind in kinds.split() or ["jsonl", "parquet"]:
        write({f"a.{kind}": record if kind == "jsonl" else as_file(kind, json.loads(record))})
        found = outcome(f"in/a.{kind}", flags)
        assert is_like(found, lines), f"{kind}: {found}"

def test_values_that_python_cannot_have_are_not_read():
    odd = pa.array(2 * [10 ** 12], pa.timestamp("s"))    # Python has no such year
    columns = dict.fromkeys(["when", "label", "history", "system"], odd)
    write({"a.parquet": as_parquet(pa.table({"text": ["a", "b"], **columns}))})
    assert converted("--text_key text") == ["a", "b"]

# Each recipe's input and output, for one record
OTHER_FORMS = (DATA / "other_forms.jsonl").read_text().splitlines()

@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed")
@pytest.mark.parametrize("number", range(len(OTHER_FORMS)))
def test_other_forms_become_chats_by_the_commands_of_forms_md(number):
    recipes = re.findall(r"jq -c '[^']*'[\s\\]*OLD > NEW.jsonl", FORMS_MD)
    assert len(recipes) == len(OTHER_FORMS)
    given, expected = json.loads(OTHER_FORMS[number])
    write({"OLD": as_json(given)}, ".")
    subprocess.run(recipes[number], shell=True, check=True)
    other = [ANSWER, *TALK]
    write({"a.jsonl": Path("NEW.jsonl").read_bytes() + as_json(other)})
    assert sorted(chats(), key=str) == sorted([expected, other], key=str)

ROWS = [{"text": "Hi,\n\"you\"", "n": "1"}, {"text": "", "n": "2"}]
FOREIGN = [    # for each command of forms.md before "Then reshape": its file, and the lines of JSON
    ("OLD.parquet", lambda: as_file("parquet", {"a": {"b": "ü".encode(), "n": 1}}),
     [{"a": {"b": "ü", "n": 1}}]),
    ("OLD.csv", lambda: BOM_UTF8 + as_file("csv", *ROWS).encode(), ROWS),
    ("OLD.json", lambda: '{\n "text": "a\nb"}\n{"text": "c"}', [{"text": "a\nb"}, {"text": "c"}]),
    ("OLD.txt", lambda: "{'text': 'it\\'s', 'n': None}\n[1]\n", [{"text": "it's", "n": None}, [1]]),
    ("OLD.json", lambda: json.dumps(ROWS), ROWS),
    ("OLD.json", lambda: '{\n "text": "a"}\r{"text": "b"}', [{"text": "a"}, {"text": "b"}]),
    ("OLD.json", lambda: '"a"\n"b\\nc"\n', [{"text": "a"}, {"text": "b\nc"}])]

@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_foreign_files_become_lines_of_json_by_the_commands_of_forms_md(number):
    text = FORMS_MD[FORMS_MD.index("## Other forms"):FORMS_MD.index("Then reshape")]
    commands = re.findall(r"(?ms)^((?:python|jq) -c .*?) > OLD\b", text)
    assert len(commands) == len(FOREIGN)
    if commands[number].startswith("jq") and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    name, make, expected = FOREIGN[number]
    write({name: make()}, ".")
    command = commands[number].replace("python", sys.executable, 1)
    printed = subprocess.run(command, shell=True, check=True, capture_output=True).stdout
    assert [*map(json.loads, printed.splitlines())] == expected

# --------------------------------------------------------------------------------------------------
# Processes

def test_second_convert_into_one_folder_is_refused():
    """What a killed one has left is to be removed."""
    write({"a.jsonl": texts_as_json("ab"), ".out.convert/runs/a": "x"}, ".")
    words = "a.jsonl", "--out", "out"
    line = command(*words)
    assert re.search("File exists: .*.out.convert.*killed has left the folder, remove it", line)
    shutil.rmtree(".out.convert")
    assert command(*words) is None
    assert sorted(os.listdir()) == ["a.jsonl", "out"]

def group_of(pid):
    """The process group of a process that is alive."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, _, group = file.read().rpartition(")")[2].split()[:3]
        return int(group) if state != "Z" else None

STUCK = """
import signal, time
from dev import convert
from dev.records import make_document
convert.cores = lambda: 2
convert.divide = lambda *_: time.sleep(99)
signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell may ignore it
convert.main()
"""

@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_convert(tmp_path, number):
    """Killed, or stopped by Ctrl-C: no worker or shard stays."""
    lines = texts_as_json(["some text " * 50] * 19_999 + ["other"])
    write({f"{i}.jsonl": lines for i in range(4)})
    words = [f"{tmp_path}/in", "--out", f"{tmp_path}/out", "-w", "2"]
    process = subprocess.Popen([sys.executable, "-c", STUCK, *words], cwd=HERE, text=True,
                               stderr=subprocess.PIPE, start_new_session=True)
    n_runs = 1 if number == signal.SIGKILL else 4    # then, workers wait for tasks
    while len(glob.glob(f"{tmp_path}/.out.convert/runs/*")) < n_runs:
        assert process.poll() is None
        time.sleep(0.01)
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    process.wait(60)
    while any(group_of(pid) == process.pid for pid in os.listdir("/proc")):
        time.sleep(0.05)    # the suite's time limit ends this
    printed = process.stderr.read()
    if number == signal.SIGKILL:
        shutil.rmtree(tmp_path / ".out.convert")
    else:
        assert "Traceback" not in printed and "stopped" in printed
    assert os.listdir(tmp_path) == ["in"]
    assert command(*words) is None
    assert sum(sum(shard.group_sizes) for shard in all_of()) == 80_000

def test_scripts_that_are_run_directly_say_how_to_run_them():
    files = {*glob.glob("dev/*.py", root_dir=HERE)} - {"dev/records.py"}
    for name in files:
        command = [sys.executable, name]
        ended = subprocess.run(command, cwd=HERE, text=True, capture_output=True)
        assert re.fullmatch("usage: .*\n", ended.stderr), name

def test_processes_that_cannot_start_leave_no_folder(monkeypatch):
    write_texts("ab")
    monkeypatch.setattr(convert, "cores", lambda: 2)
    failing = mock.Mock(side_effect=OSError("no semaphores"))
    monkeypatch.setattr(convert, "ProcessPoolExecutor", failing)
    line = refused("-w", 2)
    assert "no semaphores" in line
    assert os.listdir() == ["in"]

def test_a_killed_worker_is_named(monkeypatch):
    write_texts("ab")
    monkeypatch.setattr(convert, "cores", lambda: 2)
    monkeypatch.setattr(convert, "start_process", functools.partial(os._exit, 1))
    line = refused("-w", 2)
    assert "a worker process was killed; if memory ran out, use -w 1" in line
    assert os.listdir() == ["in"]

def test_without_copies_drop_copies_changes_no_order():
    write_texts(map(str, range(50)))
    converted()
    documents = read_all()
    converted("--drop_copies")
    assert read_all() == documents

# --------------------------------------------------------------------------------------------------
# What other tools write

def json_column(*values):
    """As DuckDB and Json() of datasets write it."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(map(json.dumps, values)))

def table_bytes(**columns):
    return as_parquet(pa.table(columns))

def turns_as_json():
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"]), json_column("Hi", "Hello")], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), turns)

MAPS = pa.list_(pa.map_(pa.string(), pa.string()))
FORMS_OF_CHATS = {
    "contents_of_type_json": turns_as_json,
    "a_column_of_type_json": lambda: json_column(TALK),
    "a_list_of_maps": lambda: pa.array([[list(message.items()) for message in TALK]], MAPS)}

@pytest.mark.parametrize("form", FORMS_OF_CHATS)
def test_chats_of_other_tools_are_read(form):
    write({"a.parquet": table_bytes(messages=FORMS_OF_CHATS[form]())})
    write({"b.jsonl": as_json(TALK + TALK)})
    assert chats() == [TALK, TALK + TALK]
    assert {shard.kind for shard in all_of()} == {"messages"}

def test_texts_of_type_json_are_decoded_or_refused():
    for name in ("train", "val"):
        column = {"text": json_column(f'say "{name}"')}
        write({f"{name}.parquet": table_bytes(**column)})
    assert converted() == ['say "train"', 'say "val"']
    pq.write_table(pa.table(column), "in/val.parquet", store_schema=False)    # as DuckDB's
    with pytest.raises(dataset.UserError, match="decodes texts of the type JSON"):
        all_of("in")

@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet", "arrow"])
def test_files_whose_names_are_no_utf8_are_read(suffix):
    write_texts("ab")
    kind, _, codec = suffix.partition(".")
    data = as_file(kind, {"text": "c"})
    data = data.encode() if kind == "csv" else data
    with open(b"in/caf\xe9." + suffix.encode(), "wb") as file:
        file.write(CODECS[codec](data) if codec else data)
    assert converted() == ["a", "b", "c"]

# --------------------------------------------------------------------------------------------------
# What could be lost without a word

CODECS = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zst": PACKED[".zst"], "zstd": PACKED[".zst"], "lz4": PACKED[".lz4"]}
# A, B: good members; _: an empty one; x: other bytes; the number of documents, or an error
MEMBERS = [
    ("AB", 8), ("A_B", 8), ("_AB_", 8), ("A", 4),
    ("Ax", ""), ("AxB", ""), ("A_x", ""), ("xA", ""), ("A B"[:2], "")]

@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("members, expected", MEMBERS)
def test_all_members_of_a_compressed_file_are_read_or_it_is_an_error(codec, members, expected):
    pack = CODECS[codec]
    parts = {"A": pack(texts_as_json("abcd")), "B": pack(texts_as_json("efgh")), "_": pack(b""),
             "x": b"other", " ": pack(texts_as_json("efgh"))[:-5]}
    write({f"a.jsonl.{codec.upper()}": b"".join(parts[member] for member in members)})
    if isinstance(expected, int):
        assert converted() == [*"abcdefgh"[:expected]]
    else:
        assert re.search(f"in/a.jsonl.{codec.upper()}, unreadable.*{expected}", refused())

def as_feather(*texts):
    return as_arrow(as_table(texts), pa.ipc.new_file)

STREAM = as_stream("a", "b")
JOINED = [    # what `cat` makes of several files, and the error
    ("a.arrow", STREAM + STREAM, "several files, joined into one; use the"),
    ("a.arrow", STREAM + b"other" + STREAM, "unreadable"),
    ("a.arrow", STREAM[:-8] + STREAM, "unreadable"),
    ("a.arrow", STREAM + as_feather("a"), "unreadable"),
    ("a.feather", as_feather("a", "b") * 2, "several files, joined into one; use the"),
    ("a.feather", as_feather("a", "b") + STREAM, "unreadable"),
    ("a.parquet", as_parquet(as_table("ab")) * 2, "several files, joined into one")]

@pytest.mark.parametrize("name, data, expected", JOINED)
def test_a_joined_file_is_an_error(name, data, expected):
    write({name: data})
    assert re.search(f"in/{name}, .*{expected}", refused())

ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]

@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv.gz", "a.txt"])
def test_other_encodings_are_an_error_or_said(output, name, encoding):
    """A text without a byte order mark has NULs."""
    text = FORMATS["lines.jsonl" if "json" in name else "tab.csv"](["one", "two"])
    data = text.decode().encode(encoding)
    write({name: gzip.compress(data) if "gz" in name else data, "b.txt": "b"})
    line = refused()
    if name == "a.txt" and encoding[-3:] in ("-le", "-be"):
        assert "texts with NUL bytes (damaged, or UTF-16?): 1, such as in/a.txt" in output()
    else:
        assert f"in/{name}" in line
        assert "expected UTF-8" in line or "\\x00" in line or "json" in name

SPARK_SED = """sed 's/\\\\"/""/g' OLD > NEW.csv"""

def test_quotes_that_backslashes_escape_are_read_after_the_command_that_is_named():
    """As Spark writes them, with lone backslashes as they are."""
    write({"a.csv": 'n,text\n1,"He said \\"hello\\" and left, then \\"bye\\"."\n2,"a\\nb, c"\n'})
    assert "see Other forms of data in dev/recipes/forms.md" in refused() and SPARK_SED in FORMS_MD
    shutil.move("in/a.csv", "OLD")
    subprocess.run(SPARK_SED, shell=True, check=True)
    shutil.move("NEW.csv", "in/a.csv")
    assert converted() == ['He said "hello" and left, then "bye".', "a\\nb, c"]

def csv_command(data):
    """Runs the command of forms.md"""
    Path("OLD.csv").write_bytes(data)
    command = re.search(r'^python -c "import csv.*? > OLD$', FORMS_MD, re.MULTILINE | re.DOTALL)[0]
    command = command.replace("python", sys.executable, 1)
    return subprocess.run(command, shell=True, capture_output=True, text=True)

@pytest.mark.parametrize("row", [b"x", b"x,y,z", b'x,"a\\"b"', b"x,\xe9", b'x,"y'])
def test_the_command_for_csv_stops_at_a_bad_row(row):
    assert csv_command(b"n,text\n1,a\n" + row).returncode
    assert csv_command(b'n,text\n\n1,"' + 200_000 * b"a" + b'"\n').returncode == 0

def text_column(*texts):
    """Whatever bytes they have"""
    return pa.array(texts).view(pa.string())

BAD_ROWS = {    # a table whose row 1 is bad
    "text": {"text": text_column(b"a", b"caf\xe9", b"c")},
    "bytes": {"text": pa.array([b"a", b"\xe9", b"c"])},
    "kept": {"text": ["a", "b", "c"], "n": text_column(b"a", b"caf\xe9", b"c")},
    "json": {"text": pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"a"', "{", '"c"']))}}

@pytest.mark.parametrize("form", BAD_ROWS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_bad_value_of_a_table_costs_one_document(output, suffix, form):
    table = pa.table(BAD_ROWS[form])
    as_suffix = {"parquet": as_parquet, "arrow": lambda table: as_arrow(table, pa.ipc.new_file)}
    write({f"a.{suffix}": as_suffix[suffix](table)})
    keep = "--keep n" if form == "kept" else ""
    assert f"in/a.{suffix}, row 1: " in refused(keep)
    assert converted(keep, "--skip_bad") == ["a", "c"]
    assert f"skipped bad documents: 1, such as in/a.{suffix}, row 1: " in output()

def test_texts_of_type_binary_are_read():
    """Of Impala and older Spark, also in chats."""
    turns = [{key.encode(): value.encode() for key, value in turn.items()} for turn in TALK]
    turns = pa.array([[{key.decode(): value for key, value in turn.items()} for turn in turns]])
    write({"a.parquet": table_bytes(text=pa.array(["Zürich".encode(), b"b"]))})
    assert converted() == ["Zürich", "b"]
    write({"a.parquet": table_bytes(messages=turns), "b.jsonl": as_json(TALK + TALK)})
    assert chats() == [TALK, TALK + TALK]

KEPT = {    # values of a column
    "uint64": pa.array([1, 2 ** 63 - 1, None], pa.uint64()),
    "int8": pa.array([1, -1, 3], pa.int8()),
    "float": pa.array([0.5, 0.25, None], pa.float32()),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[1]", "[2, 3]", None])),
    "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int8())),
    "time": pa.array([1, 2, None], pa.timestamp("ms", "UTC")),
    "bytes": pa.array(["ü".encode(), b"", None]),
    "struct": pa.array([{"n": 1, "m": [1]}, {"n": 2, "m": None}, None])}

@pytest.mark.parametrize("kind", KEPT)
def test_a_kept_column_has_the_values_of_its_source(kind):
    """Its type is that of the values as JSON. What JSON lacks is a text."""
    values = KEPT[kind]
    write({"a.parquet": table_bytes(text=["0", "1", "2"], x=values)})
    converted("--keep x")
    found = {row["text"]: row["x"] for row in rows_of()}
    expected = values.to_pylist(maps_as_pydicts="strict")
    if kind == "json":
        expected = [[1], [2, 3], None]
    if kind == "map":
        expected = [{"a": 1}, {"a": None}, None]
    if kind == "time":
        expected = [*map(str, expected[:2]), None]
    if kind == "bytes":
        expected = ["ü", "", None]
    assert found == dict(zip("012", expected, strict=True))

def test_a_chat_that_is_skipped_for_its_kept_value_is_no_document(output):
    """One such chat among texts stopped a whole convert."""
    write({"c.jsonl": '{"prompt": "Hi", "answer": "Hello", "n": "half \\ud83d"}'})
    write_rows({"text": "a", "n": "x"}, {"text": "b", "n": "y"})
    assert converted("--keep n --skip_bad") == ["a", "b"]
    assert "messages: " not in output()

def test_values_that_no_column_can_have_are_an_error():
    write_rows({"text": "a", "n": 2 ** 70}, {"text": "b", "n": 1})
    assert "--keep: Python int too large to convert to C long; expected" in refused("--keep n")
    write_rows({"text": "a", "n": 1}, {"text": "b", "n": "a"})
    assert re.search("--keep: .*; expected values of one type", refused("--keep n --skip_bad"))

def test_the_loader_refuses_chats_with_columns_that_convert_would_read_or_refuse():
    weights = [key for key, use in KEYS.items() if use == "weight"]
    for name in ["system", "system_prompt", "chosen", *weights]:
        assert dataset.MARK.fullmatch(name), name

def test_views_and_categories_are_kept_as_strings():
    """polars' and pandas', beside plain strings, and more than a dictionary<int8> can have."""
    columns = {
        "a": pa.array("ab", pa.string_view()), "b": pa.array("cd"),
        "e": pa.DictionaryArray.from_arrays([0, 1, 0], pa.array("ef", pa.string_view())),
        "c": pa.array(map(str, range(100))).dictionary_encode().cast(SMALL),
        "d": pa.array(map(str, range(100, 200))).dictionary_encode().cast(SMALL)}
    for name, column in columns.items():
        table = pa.table({"text": pa.array([name] * len(column)), "n": column})
        write({f"{name}.arrow": as_arrow(table, pa.ipc.new_file)})
    converted("--keep n")
    assert sorted(row["n"] for row in rows_of()) == sorted([*"abcdefe", *map(str, range(200))])

NAMES = {    # what is typed, and of the files below `in`, which are read
    "in": ["_k=1/a", "a", "b/_k=2/c"],
    "in/*": ["_a", "_k=1/a", "_raw/a", "a", "b/_k=2/c"],    # as the shell's words do
    "in/**/*": ["_k=1/a", "a", "b/_k=2/c"],
    "in/_raw in/a.jsonl": ["_raw/a", "a"],
    "in/_raw in/b/_raw2": ["_raw/a", "b/_raw2/a"],
    "in/_raw/*.jsonl": ["_raw/a"],
    "'in/_r*/*.jsonl' in/a.jsonl": ["_raw/a", "a"],
    "'in/_*.jsonl' in/b": ["_a", "b/_k=2/c"],
    "'in/**.jsonl'": ["_a", "a"],
    "in/_a.jsonl in/.b.jsonl": [".b", "_a"],
    "in/.c in": [".c/a", "_k=1/a", "a", "b/_k=2/c"],
    "in in/_raw": ["_k=1/a", "_raw/a", "a", "b/_k=2/c"],
    "in/_raw in": ["_k=1/a", "_raw/a", "a", "b/_k=2/c"]}

@pytest.mark.parametrize("words", NAMES)
def test_what_is_hidden_is_read_if_it_is_named(output, words):
    files = ["a", "_a", ".b", "_raw/a", "_k=1/a", "b/_raw2/a", "b/_k=2/c", ".c/a"]
    write({f"{name}.jsonl": texts_as_json([name]) for name in files})
    write({"b/z.jsonl": texts_as_json(["z"])} if "b/_raw2" in words else {}, "elsewhere")
    write({"z.jsonl": texts_as_json(["z"])}, ".")
    assert command(f"'{words}'" if "/*" in words[:6] else words, "z.jsonl --out out") is None
    assert sorted(read_all()) == sorted([*NAMES[words], "z"])
    if words == "in":
        assert "such as Spark's _temporary (to read them: name their folder): 3, " in output()

def test_links_to_what_is_read_are_not_read_again():
    write({"v2/a.jsonl": texts_as_json("ab"), "v2/b.txt": "c"})
    write({"far/d.jsonl": texts_as_json("d"), "far/e.jsonl": texts_as_json("e")}, ".")
    links = {"latest": "v2", "v2/circle": "..", "other": "../far", "d.jsonl": "../far/d.jsonl"}
    links["data"] = "nowhere"
    for name, target in links.items():
        os.symlink(target, f"in/{name}")
    for words in "in", "'in/**/*.*'", "'in/*/*' far", "in/latest in/v2 far":
        if "latest" in words:
            os.unlink("in/v2/circle")
        shutil.rmtree("out", ignore_errors=True)
        assert command(words, "--out out") is None
        assert sorted(read_all()) == ["a", "b", "c", "d", "e"]

def test_a_broken_link_is_an_unreadable_file(output):
    write_texts("ab")
    os.symlink("nowhere", "in/b.jsonl")
    assert re.search("in/b.jsonl, unreadable: .*No such file .*\\(to skip", refused())
    assert converted("--skip_bad") == ["a", "b"]
    assert "skipped the rest of bad files: 1, such as in/b.jsonl, unreadable: " in output()
