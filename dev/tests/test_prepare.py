"""
convert, tokenize, head, stats, verify and import_tokenizer of dev/prepare.py.

    python -m pytest dev/tests/test_prepare.py
"""

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
import tempfile
import time
from codecs import BOM_UTF8
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataset
from dev import prepare
from test_dataloader import HERE, ByteTokenizer, run
from tokenizer import find_tokenizer

# ---------------------------------------------------------------------------------------------------------
# Texts, files and shards


def make_texts(n, seed=0):
    """Documents of all lengths and scripts, every one different."""
    pick = random.Random(seed)
    words = ["loss", "für", "日本", "🙂", "\x00", "\n", "def f(x):", "<|bos|>", " " * 9]
    lengths = [int(pick.paretovariate(0.8)) % 3000 for _ in range(n)]
    return [f"{seed}.{i} " + " ".join(pick.choices(words, k=length)) for i, length in enumerate(lengths)]


def make_shards(folder, counts=(40, 40, 12), rows=8):
    """Text shards with these numbers of documents; returns all documents in order."""
    os.makedirs(folder, exist_ok=True)
    texts = make_texts(sum(counts))
    rest = iter(texts)
    for number, count in enumerate(counts):
        part = list(itertools.islice(rest, count))
        groups = [pa.array(part[i:i + rows], pa.string()) for i in range(0, count, rows)]
        dataset.write_shard(f"{folder}/shard_{number:05d}.parquet", groups)
    return texts


def make_inputs(folder, texts):
    """The same texts spread over JSON in all its forms, plain text and parquet."""
    os.makedirs(f"{folder}/deep", exist_ok=True)
    parts, lines = [texts[i::8] for i in range(8)], lambda part: lines_of(raw_content=part)
    files = {
        "a.jsonl": lines(parts[0]), "b.json.gz": gzip.compress(lines(parts[1])),
        "c.json.zst": pa.Codec("zstd").compress(lines(parts[2]), asbytes=True), "deep/d.jsonl.gz":
        gzip.compress(lines(parts[3][:5])) + gzip.compress(lines(parts[3][5:])),
        "e.json": json.dumps([{"raw_content": t} for t in parts[4]], indent=1).encode(),
        "f.json": b"\xef\xbb\xbf" + lines(parts[5]).rstrip(b"\n").replace(b"\n", b"\r\n\n"),
    }
    files |= {f"deep/{i}.txt": text.encode() for i, text in enumerate(parts[6])}
    for name, data in files.items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(data)
    table = pa.table({"n": range(len(parts[7])), "raw_content": parts[7]})
    pq.write_table(table, f"{folder}/g.parquet", row_group_size=7)


def all_of(folder):
    return dataset.list_shards(str(folder), "train") + dataset.list_shards(str(folder), "val")


def read_all(folder):
    """Every document of both splits, in order."""
    return [text for s in all_of(folder) for i in range(len(s.group_sizes)) for text in s.read(i).to_pylist()]


def command(*arguments):
    """The error line, or exit status, with which `python -m dev.prepare ...` ends; None if all went well."""
    try:
        prepare.main([*map(str, arguments)])
    except SystemExit as end:
        return end.code
    return None


@pytest.fixture
def byte_tokenizer(monkeypatch):
    """All commands use a ByteTokenizer that can decode."""
    made = ByteTokenizer()
    made.decode = lambda ids: bytes(ids).decode()
    monkeypatch.setattr(prepare, "find_tokenizer", lambda folder, sources, size: (made, "bytes"))
    monkeypatch.setattr(prepare, "known_tokenizer", lambda folder, source: (made, "bytes"))
    return made


# ---------------------------------------------------------------------------------------------------------
# convert: every document once, in an order that nothing changes


def test_convert_returns_every_document_once(tmp_path):
    """All formats in: all documents come back, shuffled, val at the end."""
    texts = [*make_texts(999)[:7], "", *make_texts(999)[7:]]    # number 7 is in g.parquet
    size = sum(len(text.encode()) for text in texts)
    make_inputs(tmp_path / "in", texts)
    report = prepare.convert([str(tmp_path / "in")], str(tmp_path / "out"), "raw_content",
                             shard_bytes=size // 6)
    seen = read_all(tmp_path / "out")
    assert sorted(seen) == sorted(texts) and seen != texts
    assert {key: report[key] for key in ("documents", "bytes", "bad", "shards", "dropped")} == {
        "documents": 1000, "bytes": size, "bad": 0, "shards": 6, "dropped": {"n"}}
    val, = dataset.list_shards(str(tmp_path / "out"), "val")
    assert 64 <= sum(val.group_sizes) < 100, "enough for the lanes, and little text"
    names = [f"shard_{number:05d}.parquet" for number in range(6)]
    assert sorted(os.listdir(tmp_path / "out")) == ["index.json", *names]
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_order_of_convert_never_changes(tmp_path, monkeypatch):
    """One run or many, one process or two: the row groups that the second edition wrote for these inputs."""
    make_inputs(tmp_path / "in", make_texts(300))
    counts, real = [], prepare.keys_and_lengths
    monkeypatch.setattr(prepare, "keys_and_lengths",
                        lambda building: counts.append(len(prepare.open_runs(building))) or real(building))
    for run_bytes, workers in ((1 << 30, 1), (2000, 1), (1 << 30, 2)):
        monkeypatch.setattr(prepare, "RUN_BYTES", run_bytes)
        out = f"{tmp_path}/{run_bytes}-{workers}"
        prepare.convert([str(tmp_path / "in")], out, "raw_content", workers=workers)
        groups = [shard.read(i).to_pylist() for shard in all_of(out) for i in range(len(shard.group_sizes))]
        digest = hashlib.sha256(json.dumps(groups).encode()).hexdigest()
        assert digest[:16] == "e4ae49a1dde9a416"
    assert counts[1] > counts[0] > 1


def test_processes_start_when_there_is_work_for_them(tmp_path, monkeypatch):
    """A thread of this process converts up to 200 MB of files; each process has 100 MB or more to do."""
    asked, real = [], prepare.pool_of
    monkeypatch.setattr(prepare, "pool_of", lambda executor, n: asked.append(n) or real(executor, 1))
    monkeypatch.setattr(prepare, "cores", lambda: 4)
    make_inputs(tmp_path / "in", make_texts(300))
    size = sum(os.path.getsize(path) for path in glob.glob(f"{tmp_path}/in/**/*.*", recursive=True))
    for parts in (1, 2, 3, 9):
        monkeypatch.setattr(prepare, "BYTES_PER_PROCESS", size // parts)
        prepare.convert([str(tmp_path / "in")], f"{tmp_path}/{parts}", "raw_content")
    assert asked == [1, 2, 3, 4]


def test_no_more_processes_start_than_can_work(tmp_path, monkeypatch):
    make_inputs(tmp_path / "in", make_texts(50))
    seen, pool_of = [], prepare.pool_of
    monkeypatch.setattr(prepare, "pool_of", lambda executor, n: seen.append(n) or pool_of(executor, 1))
    prepare.convert([f"{tmp_path}/in"], f"{tmp_path}/out", text_key="raw_content", workers=1000)
    assert seen[0] <= prepare.cores() + 20


def test_row_groups_of_long_documents_are_small(monkeypatch):
    """A row group ends at 1,024 documents or at ROW_GROUP_BYTES; a longer document is alone in one."""
    monkeypatch.setattr(prepare, "ROW_GROUP_BYTES", 1000)
    lengths = np.array([600, 600, 5000, *[1] * 30, 9])
    groups = list(prepare.plan_row_groups(lengths, rows=20))
    assert [b - a for a, b in groups] == [1, 1, 1, 20, 11]
    assert [i for a, b in groups for i in range(a, b)] == list(range(34))


def test_one_long_document_is_not_val(tmp_path):
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text("short " * (20_000 if i == 7 else 1))
    for seed in range(15):
        prepare.convert([str(tmp_path / "*.txt")], str(tmp_path / "out"), seed=seed)
        val, = dataset.list_shards(str(tmp_path / "out"), "val")
        assert sum(val.group_sizes) == 10 and max(len(text) for text in val.read(0).to_pylist()) < 10
        shutil.rmtree(tmp_path / "out")


TOO_FEW = ": too few for a train and a val shard, which take at least 2, and 9 with the loader's 8 lanes"


@pytest.mark.parametrize("n, message", [(6, None), (2, None), (1, f"error: 1 document{TOO_FEW}"),
                                        (0, f"error: 0 documents{TOO_FEW}")])
def test_few_documents(tmp_path, n, message):
    (tmp_path / "a.jsonl").write_bytes(lines_of(text=make_texts(n)) + b"\n")
    line = command("convert", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert (line is None and len(read_all(tmp_path / "out")) == n) if message is None else message in line


def test_nine_documents_are_enough_for_eight_lanes(tmp_path):
    """... and eight are not, as the message says."""
    for n in (8, 9):
        (tmp_path / f"{n}.jsonl").write_bytes(lines_of(text=make_texts(n)))
        prepare.convert([str(tmp_path / f"{n}.jsonl")], str(tmp_path / f"{n}"))
        enough = sum(sum(shard.group_sizes) for shard in dataset.list_shards(str(tmp_path / f"{n}"), "train")) >= 8
        assert enough == (n == 9)


def test_second_convert_into_one_folder_waits_for_the_first(tmp_path, monkeypatch, capsys):
    """... and if the file system has no locks, the first one can no longer write."""
    make_inputs(tmp_path / "in", make_texts(50))
    arguments = ["convert", tmp_path / "in", "--text_key", "raw_content", "--out", tmp_path / "out"]
    os.makedirs(f"{tmp_path}/out.convert/123/runs")    # of a killed run
    with ThreadPoolExecutor(1) as pool, prepare.building_folder(str(tmp_path / "out")) as building:
        assert not os.path.isdir(f"{tmp_path}/out.convert/123")
        second = pool.submit(command, *arguments)
        assert wait([second], 0.5).not_done and os.path.isdir(building + "/runs")
        os.makedirs(tmp_path / "out" / "made by the first")
    assert re.match("error: .*/out is not empty; name a new folder", second.result())
    assert capsys.readouterr().out.count("another convert writes there (this one waits), or was killed") == 2
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", lambda *_: os.close(-1))    # an OSError
    with prepare.building_folder(str(tmp_path / "more")) as building:
        monkeypatch.setattr(prepare.os, "getpid", lambda: 1)
        assert command(*arguments[:-1], tmp_path / "more") is None
        assert not os.path.isdir(building)
    assert len(read_all(tmp_path / "more")) == 50


@pytest.mark.parametrize("how, when", [(signal.SIGKILL, "reading"), (signal.SIGINT, "reading"),
                                       (signal.SIGINT, "starting")])
def test_workers_of_convert_end_with_it(tmp_path, how, when):
    """Killed, or stopped by Ctrl-C, Ctrl-C: no worker or shard stays, and the same command starts again."""
    (tmp_path / "in").mkdir()
    for i in range(4):
        (tmp_path / "in" / f"{i}.jsonl").write_bytes(lines_of(text=["some text " * 50] * 40_000))
    arguments = ["convert", f"{tmp_path}/in", "--out", f"{tmp_path}/out", "-w", "2"]
    stuck = ("import signal, time; from dev import prepare\n"
             "prepare.keys_and_lengths = lambda *_: time.sleep(99)\n"
             "signal.signal(signal.SIGINT, signal.default_int_handler)\n")    # a shell may have it ignored
    process = subprocess.Popen([sys.executable, "-c", stuck + "prepare.main()", *arguments], cwd=HERE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = []
    runs = f"{tmp_path}/out.convert/*/runs/*.arrow"
    while len(children) < 4 or (when == "reading" and not glob.glob(runs)):
        children = [pid for pid in os.listdir("/proc") if pid.isdigit() and group_of(pid) == process.pid]
        assert process.poll() is None
        time.sleep(0.01)    # 4: itself, two workers, and Python's tracker of their resources
    for _ in range(1 if how == signal.SIGKILL else 3):
        process.send_signal(how) if how == signal.SIGKILL else os.killpg(process.pid, how)
        time.sleep(0.05)
    words = None
    while words is None:
        try:
            _, words = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:    # Ctrl-C is ignored while processes start
            os.killpg(process.pid, how)
    while [pid for pid in children if group_of(pid) == process.pid]:
        time.sleep(0.05)    # the suite's time limit ends this
    assert not (tmp_path / "out").exists()
    if how == signal.SIGINT:
        assert "Traceback" not in words and "stopped" in words, words
        assert sorted(os.listdir(tmp_path)) == ["in"]
    assert command(*arguments) is None
    assert sum(sum(shard.group_sizes) for shard in all_of(tmp_path / "out")) == 160_000
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def group_of(pid):
    """The process group of a process that is alive."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, _, group = file.read().rpartition(")")[2].split()[:3]
        return int(group) if state != "Z" else None


def test_convert_on_a_cluster(tmp_path):
    """The same shards as on one machine, although a worker is killed on the way."""
    distributed = pytest.importorskip("distributed")
    make_inputs(tmp_path / "in", make_texts(300))
    convert = functools.partial(prepare.convert, [str(tmp_path / "in")], text_key="raw_content", workers=1)
    convert(f"{tmp_path}/alone")
    with (distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
          cluster.get_client() as client):
        victim, tasks = next(iter(cluster.workers.values())).pid, itertools.count()

        def submit(function, item):
            if next(tasks) == 3:
                os.kill(victim, signal.SIGKILL)
            return client.get_executor().submit(function, item)

        executor = SimpleNamespace(submit=submit)
        convert(f"{tmp_path}/out", executor=executor)
        assert next(tasks) > 4 and group_of(victim) is None
    assert read_all(tmp_path / "out") == read_all(tmp_path / "alone") != []


# ---------------------------------------------------------------------------------------------------------
# What convert reads: a row of SHAPES for each kind of file; what is bad, truncated, filtered or dropped


def lines_of(**columns):
    rows = zip(*columns.values(), strict=True)
    return "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows).encode()


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def arrow(texts, opened=pa.ipc.new_stream, names=("text",), **options):
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays([pa.array(texts, pa.large_string())] * len(names), names)
    with opened(sink, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def separated(texts, delimiter=",", header=("n", "text"), encoding="utf-8"):
    sink = io.StringIO(newline="")
    csv.writer(sink, delimiter=delimiter).writerows([*[header] * bool(header), *enumerate(texts)])
    return sink.getvalue().encode(encoding)


def archived(texts, kind):
    with tempfile.TemporaryDirectory() as folder:
        for i, text in enumerate(texts):
            with open(f"{folder}/{i}.txt", "w", encoding="utf-8", newline="") as file:
                file.write(text)
        with open(shutil.make_archive(f"{folder}/packed", kind, folder), "rb") as file:
            return file.read()


def each(texts, suffix):
    return {f"{i % 3}/deep/{i:06d}{suffix}": BOM_UTF8 + text.encode() for i, text in enumerate(texts)}


BY_HAND, ICONV, NAME = 'a line {"text": "..."}', "iconv -f LATIN1 ", "add --text_key NAME"
LZ4, NAMES_COLUMNS = pa.ipc.IpcWriteOptions(compression="lz4"), "a first line that names the columns"
SHAPES = {    # what there is: (its files, None if convert takes it, else a part of the line)
    "parquet": (lambda t: {"a.parquet": parquet(text=t)}, None),
    ".pq": (lambda t: {"a.pq": parquet(text=pa.array(t, pa.string_view()), n=range(len(t)))}, None),
    "dictionary": (lambda t: {"a.parquet": parquet(text=pa.array(t).dictionary_encode())}, None),
    "binary": (lambda t: {"a.parquet": parquet(text=pa.array(t, pa.binary()))}, None),
    "Spark": (lambda t: {"part-0-c000.parquet": parquet(text=t), "_SUCCESS": b"", ".part-0.crc": b"x"}, None),
    "another column": (lambda t: {"a.parquet": parquet(**{"raw text": t, "n": range(len(t))})}, NAME),
    "two columns": (lambda t: {"a.arrow": arrow(t, names=("text", "text"))}, "expected one column 'text'"),
    "lists": (lambda t: {"a.parquet": parquet(text=[[text] for text in t])}, BY_HAND),
    "nulls": (lambda t: {"a.parquet": parquet(text=pa.nulls(len(t)))}, BY_HAND),
    "parquet without suffix": (lambda t: {"0a1b": parquet(text=t)}, "mv "),
    "Delta": (lambda t: {"a.parquet": parquet(text=t), "_delta_log/0.json": b"{}"}, "older versions"),
    "JSON lines": (lambda t: {"a.jsonl.gz": gzip.compress(BOM_UTF8 + lines_of(text=t))}, None),
    "JSON array": (lambda t: {"a.json": BOM_UTF8 + json.dumps([{"text": a} for a in t]).encode()}, None),
    "lz4": (lambda t: {"a.ndjson.lz4": pa.Codec("lz4").compress(lines_of(text=t), asbytes=True)}, None),
    "bz2": (lambda t: {"a.jsonl.bz2": bz2.compress(lines_of(text=t))}, None),
    "xz": (lambda t: {"a.jsonl.xz": lzma.compress(lines_of(text=t))}, None),
    "another key": (lambda t: {"a.jsonl": lines_of(**{"raw text": t})}, NAME),
    "pandas": (lambda t: {"a.json": json.dumps({"text": dict(enumerate(t))}).encode()}, BY_HAND),
    "csv": (lambda t: {"a.csv": separated(t)}, None), "tsv": (lambda t: {"a.tsv": separated(t, "\t")}, None),
    "csv of Excel": (lambda t: {"a.csv": separated(t, encoding="utf-8-sig")}, None),
    "csv of semicolons": (lambda t: {"a.csv": separated(t, ";")}, NAMES_COLUMNS),
    "csv without names": (lambda t: {"a.csv": separated(t, header=())}, NAMES_COLUMNS),
    "csv of Latin-1": (lambda t: {"a.csv": separated(t, encoding="latin-1")}, ICONV),
    "text": (lambda t: each(t, ".txt"), None), "markdown": (lambda t: each(t, ".md"), None),
    "one long text": (lambda t: {"a.txt": "\n\n".join(t).encode()}, "--cut_bytes "),
    "text of Latin-1": (lambda t: {"a.txt": "\n\n".join(t).encode("latin-1")}, ICONV),
    "JSON of UTF-16": (lambda t: {"a.jsonl": lines_of(text=t).decode().encode("utf-16")}, "iconv -f UTF-16 "),
    "text of UTF-16": (lambda t: {"a.txt": "\n\n".join(t).encode("utf-16")}, "iconv -f UTF-16 "),
    "sources": (lambda t: each(t, ".py"), "add --as_text '*.py'"),
    "no suffix": (lambda t: {"README": "\n\n".join(t).encode()}, "add --as_text README"),
    "Feather": (lambda t: {"a.feather": arrow(t, pa.ipc.new_file, options=LZ4)}, None),
    "save_to_disk": (lambda t: {"train/data-0.arrow": arrow(t), "test/data-0.arrow": arrow(["no"]),
                                "dataset_dict.json": b'{"splits": []}', "train/state.json": b"{}"}, None),
    "zip": (lambda t: {"a.zip": archived(t, "zip")}, "zipfile -e"),
    "tar.gz": (lambda t: {"a.tar.gz": archived(t, "gztar")}, "tarfile -e"),
    "gzip named .jsonl": (lambda t: {"a.jsonl": gzip.compress(lines_of(text=t))}, "mv "),
    "lines named .gz": (lambda t: {"a.jsonl.gz": lines_of(text=t)}, "mv "),
    "nanoGPT's .bin": (lambda t: {"a.bin": np.arange(999, dtype="<u2").tobytes()}, BY_HAND),
    "PDF": (lambda t: {"a.pdf": b"%PDF-1.7 \0"}, BY_HAND),
    "nothing": (lambda t: {}, "no such files; expected .jsonl"),
    "control characters": (lambda t: {"a\x1b[2J.jsonl": lines_of(text=t)}, r"a\x1b[2J.jsonl': it is not"),
    "not UTF-8": (lambda t: {"a\udce9.jsonl": lines_of(text=t)}, r"a\udce9.jsonl': it is not UTF-8"),
}


def follow(line, given, flags, folder, texts):
    """Do what a line says; returns what to give to convert next, and its flags."""
    if typed := re.search(r"type: (.+?)(, and convert that folder)?( \(to skip|$)", line):
        command_line = typed[1].replace("python", sys.executable).replace("FOLDER", f"'{folder}/out'")
        subprocess.run(command_line, shell=True, check=True)
        return shlex.split(command_line)[-1], []
    if "iconv" in line:
        with open(given, encoding="latin-1") as file, open(f"{folder}/utf8-{given[-5:]}", "w") as utf8:
            utf8.write(file.read())
        return f"{folder}/utf8-{given[-5:]}", []
    added = re.search(r"add (--\w+ [^;,]+)", line)
    if added and ("--text_key" not in line or "raw text" in line):
        return given, [*flags, *shlex.split(added[1])]
    with open(f"{folder}/mine.jsonl", "wb") as file:
        file.write(lines_of(text=texts))
    return f"{folder}/mine.jsonl", []


@pytest.mark.parametrize("shape", SHAPES)
def test_what_there_is_converts_or_one_line_names_what_does(tmp_path, monkeypatch, shape):
    """... and what the line names converts every document, after at most three such lines."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "my base"))
    folder, texts = tmp_path / "my in", [f"{i} caf\xe9 " + "word " * (i % 9) for i in range(30)]
    make_files, expected = SHAPES[shape]
    files = {f"{folder}/{name}": data for name, data in make_files(texts).items()}
    for name, data in files.items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(data)
    given, flags = next(iter(files)) if len(files) == 1 else str(folder), []
    folder.mkdir(exist_ok=True)
    line = command("convert", given)
    assert line is None if expected is None else expected in line
    for _ in range(3):
        if isinstance(line, str):
            assert "\n" not in line and len(line) < 700 and line.isprintable()
            given, flags = follow(line, given, flags, folder, texts)
            line = command("convert", given, *(flag.replace("NAME", "raw text") for flag in flags))
    assert sorted(" ".join(read_all(dataset.find_data())).split()) == sorted(" ".join(texts).split())


def test_our_own_shards_as_inputs(tmp_path, byte_tokenizer, monkeypatch):
    """Their index.json is no data; token shards are refused with the way to go."""
    make_shards(tmp_path / "text")
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    dataset.write_index(str(tmp_path / "text"))
    for given in (tmp_path / "text", f"{tmp_path}/text/*"):
        prepare.convert([str(given)], str(tmp_path / "out"))
        assert sorted(read_all(tmp_path / "out")) == sorted(read_all(tmp_path / "text"))
        shutil.rmtree(tmp_path / "out")
    line = command("convert", tmp_path / "tokens", "--out", tmp_path / "out")
    assert "it holds token ids; convert the folder of the text that they were made from" in line


# name, bytes, where and what is wrong, documents before that
TRUNCATED = gzip.compress(lines_of(text=make_texts(900)))[:-2000]
BAD = [
    ("a.json.gz", TRUNCATED, "unreadable after line [0-9]+: ", 300),
    ("a.json.gz", b"\x1f\x8bno gzip at all", "unreadable after byte 0: ", 0),
    ("a.json.zst", b"no zstd at all", "unreadable after byte 0: its first bytes are not .zst; type: mv ", 0),
    ("a.json.xz", lzma.compress(lines_of(text=["ab" * 999]))[:50], "unreadable after byte 0: ", 0),
    ("a.parquet", b"PAR1 no parquet", "unreadable after byte 0: ", 0),
    ("a.arrow", b"ARROW1 no arrow", "unreadable after byte 0: ", 0),
    ("a.json", b'[{"text": "a"},\n {"text": "b"', "unreadable after byte 0: .* line 2", 0),
    ("a.json", b'[{"text": "a"}]\n{"text": "b"}', "unreadable after byte 0: .* line 2", 0),
    ("a.json", b"[" * 200_000, "unreadable after byte 0: maximum recursion depth", 0),
    ("a.csv", b'text\n"one more"\n"never ends\n', "unreadable after line 2: unexpected end of data", 1),
    ("a.csv", b"text\ncaf\xe9\n", "unreadable after byte 0: .* can't decode byte 0xe9", 0),
    ("a.csv", b"n,txt\n1,x\n", r"columns: expected one column 'text', saw \['n', 'txt'\]; add --text_key", 0),
    ("a.csv", b"n,text,text\n1,x,y\n", "columns: expected one column 'text', saw", 0),
    ("a.parquet", parquet(txt=["a"]), "columns: expected one column 'text', saw 'txt': string; add", 0),
    ("a.csv", b"n,text\n1,x\n2,Well, I said, no\n", "line 3: 2 more fields than the first line names;", 1),
    ("a.tsv", b"n\ttext\n1\n", "line 2: 'text' holds NoneType", 0),
    ("a.jsonl", b'{"text": "fine"}\n{"text": "cut off', "line 2: Unterminated .*; expected one whole", 1),
    ("a.json", b'{\n', "line 1: Expecting property name .*; expected one whole JSON document in a line", 0),
    ("a.jsonl", b'\n\n{"txt": "x"}\n', "line 3: no key or column 'text', only 'txt'", 0),
    ("a.jsonl", b'{"prompt": "x", "response": "y"}\n', "line 1: .*'response'; .* pairs: jq -c '", 0),
    ("a.parquet", parquet(instruction=["a"], output=["b"]), "columns: .*'instruction': .* pairs: jq -c '", 0),
    ("a.csv", b"prompt,response\n1,x\n", "columns: .* pairs: jq -c '.* a first line that names", 0),
    ("a.jsonl", b'{"text": null}\n', "line 1: 'text' holds NoneType, not a string", 0),
    ("a.jsonl", b'{"text": "\xff"}\n', "line 1: .* can't decode byte 0xff", 0),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .* surrogates not allowed", 0),
    ("a.jsonl", b"3\n" + b"[" * 200_000, "line 1: no key or column 'text', only int", 0),
    ("a.json", b'[{"text": "a"},\n {"text": 3}]', "document 1: 'text' holds int", 1),
    ("a.md", b"caf\xe9", "byte 0: .* can't decode byte 0xe9.*; if it is Latin-1: iconv", 0),
    ("a.parquet", parquet(text=["a", None, "b"]), "row 1: 'text' holds NoneType", 2),
    ("a.txt", b"a" * 1001, "unreadable after byte 0: over 1,000 bytes in one piece; write .jsonl", 0),
    ("a.json", b"[" + b" " * 1000, "unreadable after byte 0: over 1,000 bytes in one piece; write .jsonl", 0),
    ("a.jsonl", b"\n" + lines_of(text=["a" * 995]), "line 2: Unterminated string", 0),
    ("a.parquet", parquet(text=["\u00e4" * 501]), "row 0: 'text' has more than 1,000 bytes", 0),
]


def test_gz_that_does_not_say_what_it_holds(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(lines_of(text=make_texts(30))))
    line = command("convert", tmp_path / "a.gz", "--out", tmp_path / "out")
    assert line.endswith("a.gz; rename it to say what it holds, as .jsonl.gz and .txt.gz do")
    os.rename(tmp_path / "a.gz", tmp_path / "a.jsonl.gz")
    assert command("convert", tmp_path / "a.jsonl.gz", "--out", tmp_path / "out") is None


def test_out_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(text=make_texts(30)))
    line = command("convert", tmp_path / "a.jsonl", "--out", tmp_path / "a.jsonl" / "out")
    assert re.match(r"error: \[Errno .*; to write elsewhere, name another folder with --out$", line)


def test_readme_beside_data_is_not_a_document(tmp_path):
    """Hugging Face puts one into each folder; a folder of plain text may hold its own."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "README.md").write_text("about the data")
    (tmp_path / "a.md").write_text("a document")
    assert prepare.convert([str(tmp_path)], str(tmp_path / "out"))["documents"] == 2
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "b.jsonl").write_bytes(lines_of(text=["one more"]))
    assert prepare.convert([str(tmp_path)], str(tmp_path / "out"))["ignored"] == {
        f"{tmp_path}/deep/README.md": "about data, not documents; to convert one, name its path"}
    assert sorted(read_all(tmp_path / "out")) == ["a document", "one more"]


def test_if_all_is_bad_the_first_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    line = command("convert", tmp_path / "a.txt", "--out", tmp_path / "out", "--skip_bad")
    assert re.match(r"error: 0 documents: too few .*; skipped: \S+a.txt, byte 0: .*Latin-1", line)


def test_what_is_no_plain_text_is_not_cut(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(text=["a text"] * 30))
    line = command("convert", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--cut_bytes", "9")
    assert line == "error: --cut_bytes cuts plain text, and here is none; name it by --as_text"


def test_empty_documents_are_counted(tmp_path, capsys):
    """... and an empty file of plain text is none."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("a document" * (name > "a"))
    (tmp_path / "d.jsonl").write_bytes(lines_of(text=[""]))
    assert command("convert", tmp_path, "--out", tmp_path / "out") is None
    words = capsys.readouterr().out
    assert "3 files -> 3 documents (1 of them empty), " in words
    assert "ignored 1 file (1 .txt): empty\n" in words
    line = command("convert", tmp_path / "d.jsonl", "--out", tmp_path / "out2")
    assert "1 document: too few" in line and "--cut_bytes" not in line
    line = command("convert", tmp_path / "a.txt", "--out", tmp_path / "out2")
    assert line == f"error: {tmp_path}/a.txt: all files are empty"


@pytest.mark.parametrize("shape", ["link", "dot", "file", "mount"])
def test_out_that_cannot_be_replaced_is_refused_before_the_work(tmp_path, monkeypatch, shape):
    """... and the target of a link is where the shards go."""
    (tmp_path / "a.jsonl").write_bytes(lines_of(text=make_texts(30)))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "real")
    monkeypatch.setattr(prepare.os.path, "ismount", lambda path: path == f"{tmp_path}/mount")
    out = "." if shape == "dot" else f"{tmp_path}/{shape}"
    monkeypatch.setattr(prepare, "plan_shards", prepare.plan_shards if shape == "link" else None)
    if shape == "link":
        monkeypatch.chdir(tmp_path)
    line = command("convert", tmp_path / "a.jsonl", "--out", out)
    if shape == "link":
        assert line is None and len(read_all(tmp_path / "real")) == 30 and (tmp_path / "link").is_symlink()
    else:
        assert re.search("cannot make .* anew: .* name a folder in or beside it with --out", line)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "file", "link", "real"]


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/**/*.jsonl"])
def test_val_and_test_files_are_not_mixed_into_train(tmp_path, pattern):
    """Neither of a folder nor of a glob; a file whose path is named is converted."""
    for name in ("train-0", "validation-0", "test-0"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(text=[f"{name} {i}" for i in range(9)]))
    report = prepare.convert([f"{tmp_path}{pattern}"], str(tmp_path / "out"))
    assert report["documents"] == 9 and len(report["ignored"]) == 2
    report = prepare.convert([f"{tmp_path}/test-0.jsonl"], str(tmp_path / "test"))
    assert report["documents"] == 9 and not report["ignored"]


@pytest.mark.parametrize("name, data, message, documents", BAD, ids=range(len(BAD)))
def test_bad_document_is_an_error_with_file_and_line(tmp_path, monkeypatch, name, data, message, documents):
    """... and with --skip_bad it is counted and shown, and what else can be read is kept."""
    monkeypatch.setattr(prepare, "LONGEST_DOCUMENT", 10**6 if len(data) > 9000 else 1000)
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(lines_of(text=["one", "two"]))
    with pytest.raises(ValueError, match=f"{name}, {message}.*--skip_bad") as error:
        prepare.convert([str(tmp_path)], str(tmp_path / "out"))
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == sorted([name, "good.jsonl"]), "an error leaves nothing"
    report = prepare.convert([str(tmp_path)], str(tmp_path / "out"), skip_bad=True)
    assert report["bad"] == (2 if name == "a.jsonl" and len(data) > 900 else 1)
    assert re.search(message, report["shown"][0])
    seen = read_all(tmp_path / "out")
    assert {"one", "two"} <= {*seen} and len(seen) >= 2 + documents


def test_convert_names_where_a_full_disk_is(tmp_path):
    """`ulimit -f` stands in for the full disk: no file may have more than 8 blocks."""
    (tmp_path / "a.txt").write_text("word " * 9999)
    command = f"ulimit -f 8; {sys.executable} -m dev.prepare convert {tmp_path}/a.txt --cut_bytes 999"
    ended = subprocess.run(["bash", "-c", f"{command} --out {tmp_path}/out"], cwd=HERE, text=True,
                           capture_output=True, timeout=300)
    words = rf"^error: .*: '{tmp_path}/out.convert/\d+'; to write elsewhere, name another folder with --out$"
    assert ended.returncode == 1 and re.search(words, ended.stderr)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_convert_names_what_it_filters_drops_and_skips(tmp_path, capsys):
    """Hidden files, other kinds, other splits; columns; links to folders are followed once."""
    (tmp_path / "in" / ".hidden").mkdir(parents=True)
    for name in ("train-0.jsonl", "test-0.jsonl", "b.jsonl.rar", ".hidden/c.jsonl", "index.json"):
        data = lines_of(text=make_texts(30), url=["x"] * 30, lang=["de"] * 30) + b"{}"
        (tmp_path / "in" / name).write_bytes(data)
    os.symlink("..", tmp_path / "in" / ".hidden" / "loop")
    assert command("convert", tmp_path / "in", "--out", tmp_path / "out", "--skip_bad") is None
    words = capsys.readouterr().out
    assert "1 file -> 30 documents" in words and "dropped columns: lang, url (to keep some: --keep" in words
    for kind, reason in ((".rar", "of another kind; if it is plain text, add --as_text '*.SUFFIX'"),
                         (".json", "about data, not documents; to convert one, name its path"),
                         (".jsonl", "hidden"),
                         (".jsonl", "of a val or test split; to convert one, name its path")):
        assert f"ignored 1 file (1 {kind}): {reason}\n" in words
    assert re.search(r"skipped bad documents or files: 1; the first:\n .*/train-0.jsonl, line 31: no", words)
    with pytest.MonkeyPatch.context() as patch:    # root may read everything
        patch.setattr(os, "scandir", lambda path: os.listdir(f"{path}/denied"))
        assert "denied" in command("convert", tmp_path / "in", "--out", tmp_path / "out2")


def test_as_text_takes_only_the_files_it_names(tmp_path, capsys):
    """... of folders and globs; a file that is named by its path is read, too."""
    os.makedirs(tmp_path / "in" / "sub")
    for name in ("a.py", "sub/b.py", "c.txt", "d.md", "sub/e.md", "f.json", "g.jsonl"):
        (tmp_path / "in" / name).write_text('{"text": "a document"}')
    for given in (tmp_path / "in", f"{tmp_path}/in/**"):
        arguments = ["convert", given, f"{tmp_path}/in/g.jsonl", "--out", tmp_path / "out", "--as_text"]
        assert command(*arguments, "*.py", "--as_text", "*.rst") is None
        assert sorted(read_all(tmp_path / "out")) == ["a document", *2 * ['{"text": "a document"}']]
        line, = re.findall("ignored .*", capsys.readouterr().out)
        assert re.fullmatch(r"ignored 4 files \(2 .md, 1 .*, 1 .*\): not named by --as_text; to .*", line)
        assert "1 .txt" in line and "1 .json" in line
        shutil.rmtree(tmp_path / "out")
    line = command("convert", f"{tmp_path}/in/c.*", "--as_text", "*.rst")
    assert "/c.*: no such files; expected *.rst (" in line


KEPT = {
    "a.jsonl": lines_of(text=["a", "b", "c"], score=[1, 2.5, None], lang=["de", None, "\u00fc"]),
    "b.parquet": parquet(text=["d", "e"], score=[7, 8], lang=["x", "y"], tags=[[1], [2]]),
    "c.csv": b"lang,text\nfr,f\n",
}


def test_kept_columns_stay_beside_the_text_and_the_tokens(tmp_path, byte_tokenizer, capsys):
    """Each value stays with its document; the rows of the loader are those of shards without them."""
    for name, data in KEPT.items():
        (tmp_path / name).write_bytes(data)
    data, text, tokens = [str(tmp_path / name) for name in KEPT], f"{tmp_path}/text", f"{tmp_path}/tokens"
    line = command("convert", *data, "--out", text, "--keep", "score")
    assert "c.csv, columns: expected one column 'score', saw ['lang', 'text']; it is named by --keep" in line
    line = command("convert", data[1], "--out", text, "--keep", "scor")
    assert "expected one column 'scor', saw " in line and "it is named by --keep" in line
    assert "--text_key" not in line
    assert command("convert", *data[:2], "--out", text, "--keep", "lang", "--keep", "score") is None
    assert "dropped columns: tags" in capsys.readouterr().out
    expected = {"a": ("de", 1.0), "b": (None, 2.5), "c": ("\u00fc", None), "d": ("x", 7.0), "e": ("y", 8.0)}
    prepare.convert(data[:2], f"{tmp_path}/plain")
    assert re.search(r"error: --keep scor: \S+/shard_00000.parquet has only lang, score, text$",
                     command("tokenize", "--data", text, "--out", tokens, "--keep", "scor"))
    assert command("tokenize", "--data", text, "--out", tokens, "--keep", "score") is None
    assert "tokenizer: bytes\ndropped columns: lang" in capsys.readouterr().out
    for shard, with_tokens in zip(all_of(text), all_of(tokens), strict=True):
        rows, of_tokens = [pq.read_table(path).to_pylist() for path in (shard.path, with_tokens.path)]
        assert [(row["lang"], row["score"]) for row in rows] == [expected[row["text"]] for row in rows]
        assert [row["score"] for row in of_tokens] == [row["score"] for row in rows]
    assert prepare.verify(text) and prepare.verify(tokens)
    with pytest.raises(OSError, match="nowhere does not exist"):
        prepare.verify("nowhere")
    assert "or with other --keep" in command("tokenize", "--data", text, "--out", tokens)
    rows, same, plain = [run(data, steps=5, T=8)[0] for data in (text, tokens, f"{tmp_path}/plain")]
    assert rows == same == plain


def test_kept_columns_of_csv_are_strings_and_convert_says_so(tmp_path, capsys):
    """A number such as 007 may be a name: convert does not guess."""
    (tmp_path / "a.csv").write_text("text,n\n" + "word,007\n" * 9)
    assert command("convert", tmp_path / "a.csv", "--out", tmp_path / "out", "--keep", "n") is None
    assert "CSV has no types, so these columns hold strings: n\n" in capsys.readouterr().out
    assert pq.read_table(all_of(tmp_path / "out")[0].path)["n"][0].as_py() == "007"


def test_kept_columns_are_shuffled_with_their_documents(tmp_path):
    for part in range(2):
        numbers = range(part, 800, 2)
        (tmp_path / f"{part}.jsonl").write_bytes(lines_of(text=map(str, numbers), n=numbers))
    prepare.convert([f"{tmp_path}/*.jsonl"], f"{tmp_path}/out", keep=["n"])
    rows = [row for shard in all_of(tmp_path / "out") for row in pq.read_table(shard.path).to_pylist()]
    assert all(row["text"] == str(row["n"]) for row in rows) and len(rows) == 800


@pytest.mark.parametrize("values, message", [
    ([1, "a"], "--keep n: "), ([1, 2**70], "--keep n: "), ([None, None], "--keep n: no document")])
def test_columns_that_cannot_be_kept(tmp_path, values, message):
    (tmp_path / "a.jsonl").write_bytes(lines_of(text=["a", "b"], n=values))
    line = command("convert", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--keep", "n")
    assert message in line and ("no document" in message or f"one type, in {tmp_path}/a.jsonl or" in line)
    assert "shards hold the documents in a column of that name" in command("convert", "x", "--keep", "tokens")


def test_kept_values_of_two_types_in_two_files_are_one_line(tmp_path):
    for name, value in (("a", 1), ("b", "x")):
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(text=["a", "b"], n=[value] * 2))
    line = command("convert", f"{tmp_path}/*.jsonl", "--out", tmp_path / "out", "--keep", "n")
    assert re.match("error: --keep: .* n .*expected values of one type in all files$", line)


def test_a_text_file_is_cut_when_asked(tmp_path):
    """At blank lines, else at line ends, else at spaces, never within a character; no byte is lost."""
    text = "\n\n".join(make_texts(40)) + "ä" * 5000
    (tmp_path / "input.txt").write_text(text, encoding="utf-8-sig", newline="")
    prepare.convert([str(tmp_path / "input.txt")], str(tmp_path / "out"), cut_bytes=1001)
    parts = [part for _, part in prepare.cut_text(text.encode(), 1001)]
    assert b"".join(parts) == text.encode() and max(map(len, parts)) <= 1001
    assert sorted(part.decode() for part in parts) == sorted(read_all(tmp_path / "out"))
    assert sum(part.endswith(b"\n\n") for part in parts) > 2
    assert [part for _, part in prepare.cut_text(b"ab\n\ncdef\n\nefgh", 10)] == [b"ab\n\ncdef\n\n", b"efgh"]
    assert max(len(part) for _, part in prepare.cut_text(b"abc\r\n\r\ndef", 1)) == 1
    book = b"\r\n\r\n".join([b"a line\r\nanother"] * 200)    # Windows's line ends
    assert all(part.endswith(b"\r\n\r\n") for _, part in [*prepare.cut_text(book, 999)][:-1])


# ---------------------------------------------------------------------------------------------------------
# tokenize, verify, stats, head


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_token_shards_mirror_text_shards(tmp_path, byte_tokenizer, compression):
    """Same names, row groups, rows, nulls, fingerprint sizes; BOS before each document, little-endian."""
    texts = make_shards(tmp_path / "text")
    texts[-1], texts[-2] = None, ""
    last = [pa.array(texts[80:86]), pa.array(texts[86:])]
    dataset.write_shard(f"{tmp_path}/text/shard_00002.parquet", last)
    n = prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"), compression=compression)
    assert n == sum(1 + len(text.encode()) for text in texts if text is not None)
    for text, tokens in zip(all_of(tmp_path / "text"), all_of(tmp_path / "tokens"), strict=True):
        assert (text.name, text.text_bytes, text.group_sizes) == (
            tokens.name, tokens.text_bytes, tokens.group_sizes)
        assert tokens.kind == "tokens" and tokens.dtype == "<u2" and tokens.fingerprint == "bytes"
    seen = read_all(tmp_path / "tokens")
    ids = [None if raw is None else np.frombuffer(raw, "<u2").tolist() for raw in seen]
    assert ids == [None if text is None else [256, *text.encode()] for text in texts]


def test_tokenize_resumes(tmp_path, byte_tokenizer, monkeypatch):
    """Stopped midway, the folder has no index; the same call keeps what is done; other text is refused."""
    make_shards(tmp_path / "text")
    text, out = str(tmp_path / "text"), str(tmp_path / "out")
    total = prepare.tokenize(text, str(tmp_path / "complete"))
    real = dataset.write_shard
    prepare.tokenize(text, out)
    os.unlink(f"{out}/shard_00002.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_shard", lambda path, *a: 1 / 0 if "00002" in path else real(path, *a))
        with pytest.raises(ZeroDivisionError):
            prepare.tokenize(text, out, threads=1)
    assert sorted(os.listdir(out)) == ["shard_00000.parquet", "shard_00001.parquet"]
    with pytest.raises(ValueError, match="index"):
        dataset.list_shards(out, "val")
    before = os.stat(f"{out}/shard_00000.parquet").st_mtime_ns
    assert prepare.tokenize(text, out) == total
    assert os.stat(f"{out}/shard_00000.parquet").st_mtime_ns == before
    digests = [[shard.digest for shard in all_of(folder)] for folder in (text, out)]
    assert digests[0] == digests[1] and len({*digests[0]}) == 3 and all(digests[0])
    with pytest.raises(ValueError, match="holds token ids already"):
        prepare.tokenize(out, str(tmp_path / "twice"))
    with pytest.raises(ValueError, match="cannot write to"):
        prepare.tokenize(text, f"{tmp_path}/out/../text")
    byte_tokenizer.name = "another"
    with pytest.raises(ValueError, match="from other text, by another tokenizer, or"):
        prepare.tokenize(text, out)
    os.unlink(f"{text}/shard_00001.parquet")
    with pytest.raises(ValueError, match=r"out holds shard_00001\.parquet, which .*text does not; name"):
        prepare.tokenize(text, out)


def test_verify_finds_shards_of_two_kinds(tmp_path, byte_tokenizer, capsys):
    make_shards(tmp_path / "text")
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    shutil.copy(tmp_path / "tokens" / "shard_00001.parquet", tmp_path / "text")
    assert command("verify", tmp_path / "text") == 1
    words = capsys.readouterr().out
    assert re.search(r"PROBLEM .*/text holds shards of different kinds: .*tokens uint16 bytes", words)
    assert "text: 3 shards, 1 problem\n" in words


def test_verify_names_each_shard_that_is_wrong(tmp_path, capsys):
    """Damaged documents, footers and other columns; what the index does not know; exit status 1."""
    make_shards(tmp_path, (8, 8, 8))
    dataset.write_shard(f"{tmp_path}/shard_00003.parquet", [pa.table({"text": ["a", None], "n": [5, 6]})])
    assert command("verify", tmp_path) == 0
    assert re.search(r"shard_00003.parquet +2 +1 +1 .* checksums of documents\n", capsys.readouterr().out)
    sound = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first, other = tmp_path / "shard_00001.parquet", tmp_path / "shard_00003.parquet"
    column = pq.read_metadata(other).row_group(0).column(1)
    end = column.data_page_offset + column.total_compressed_size
    documents = pq.read_metadata(first).row_group(0).column(0)
    middle = documents.data_page_offset + documents.total_compressed_size // 2
    wrong = [(first, middle, "PROBLEM .*row group"),
             (first, sound[first].rindex(b"checksums") + 12, "PROBLEM "),
             (first, sound[first].rindex(b"text_bytes") + 12, "PROBLEM .*bytes of text, but it has"),
             (other, end - 1, "PROBLEM .*row group 0: .*CRC")]
    for path, at, message in wrong:
        data = bytearray(sound[path])
        data[at] ^= 4
        path.write_bytes(data)
        assert command("verify", "--data", tmp_path) == 1
        words = capsys.readouterr().out
        assert re.search(f"{path.name} +{message}", words) and words.count("PROBLEM") == 1
        assert "4 shards, 1 problem\n" in words and "next: remove damaged shards" in words
        path.write_bytes(sound[path])
    dataset.write_index(str(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["shards"][first.name]["rows"] == [8]
    index["shards"][first.name]["rows"] = [8, 1]
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert command("verify", "--data", tmp_path) == 1
    assert re.search(f"{first.name} +PROBLEM  it contradicts index.json; type:", capsys.readouterr().out)
    shutil.copy(first, tmp_path / "shard_00004.parquet")
    os.truncate(tmp_path / "shard_00004.parquet", 200)
    assert command("verify", "--data", tmp_path) == 1
    words = capsys.readouterr().out
    assert re.search(r"PROBLEM  .*index.json does not match .*00004.*python dataset.py index", words)
    assert re.search(r"shard_00004.parquet +PROBLEM ", words) and "5 shards, 2 problems" in words
    os.unlink(tmp_path / "shard_00004.parquet")
    index = dataset.write_index(str(tmp_path))
    assert command("verify", "--data", tmp_path) == 0
    index["shards"][first.name]["digest"] = None    # unknown
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert command("verify", "--data", tmp_path) == 0
    index["shards"][first.name]["digest"] = "another"
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert command("verify", "--data", tmp_path) == 1


def test_stats_count_documents_tokens_and_lanes(tmp_path, byte_tokenizer, capsys):
    texts = make_shards(tmp_path / "text")
    prepare.stats(str(tmp_path / "text"))
    size = sum(len(text.encode()) for text in texts[:80])
    words = capsys.readouterr().out
    assert re.search(rf"train +2 +10 +80 +0 +{size / 1e6:.1f}  about", words)
    assert re.search(r"val +1 +2 +12 .*\nlanes  at most as many as documents; if there are more than", words)
    assert f"50 % up to {np.median([len(text.encode()) for text in texts]):,.0f}, 90 % " in words
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    prepare.stats(str(tmp_path / "tokens"))
    assert f"  {size + 80:,}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_head_prints_documents(tmp_path, byte_tokenizer, capsys, kind):
    texts = make_shards(tmp_path / "text")
    dataset.write_shard(f"{tmp_path}/text/shard_00002.parquet", [pa.array(["\x1b[2Jval", None])])
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    capsys.readouterr()
    folder = str(tmp_path / kind)
    assert command("head", folder, "-n", 42, "--tokenizer", "x") is None
    shown = capsys.readouterr().out.splitlines()[2 * 39:]
    assert [line.partition(":")[0] for line in shown[::2]] == [
        f"{number}    {folder}/shard_0000{at}" for number, at in (
            (39, "0.parquet, row group 4, row 7"), (40, "1.parquet, row group 0, row 0"),
            (41, "1.parquet, row group 0, row 1"))]
    for text, about, beginning in zip(texts[39:42], shown[::2], shown[1::2], strict=True):
        assert f"{len(text.encode()) + 1:,} tokens" in about
        assert beginning == "      " + dataset.printable(text[:200])
    assert command("head", folder, "--split", "val", "--tokenizer", "x") is None
    words = capsys.readouterr().out
    assert r"\x1b[2Jval" in words and "row 1: null" in words
    assert command("head", folder, "-n", 1) is None
    assert ("[256, 48, 46, " in capsys.readouterr().out) == (kind == "tokens")


def test_head_refuses_a_tokenizer_that_did_not_make_the_tokens(tmp_path, byte_tokenizer):
    make_shards(tmp_path / "text")
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    assert command("head", tmp_path / "tokens", "--tokenizer", "bytes") is None
    byte_tokenizer.name = "another"
    line = command("head", tmp_path / "tokens", "--tokenizer", "bytes")
    assert line == (f"error: {tmp_path}/tokens needs the tokenizer that made it, {os.getcwd()}/bytes (not "
                    "found here), not bytes")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Text, its tokens, and a tokenizer of 300 tokens that was trained on the text and made the tokens."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    make_shards(tmp_path / "text")
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 300)
    assert command("tokenize", tmp_path / "text", "--out", tmp_path / "tokens") is None
    return glob.glob(f"{tmp_path}/base/tokenizer-text-*-300")[0]


def test_tokens_know_the_folder_of_their_tokenizer(tmp_path, trained, capsys):
    """As it was when they were made, or found again in the base directory."""
    make_shards(tmp_path / "more", (50, 20))
    assert command("tokenize", tmp_path / "more", "--out", tmp_path / "more_tokens") is None
    [wrong] = glob.glob(f"{tmp_path}/base/tokenizer-more-*-300")
    line = command("head", tmp_path / "tokens", "--tokenizer", wrong)
    assert line == f"error: {tmp_path}/tokens needs the tokenizer that made it, {trained}, not {wrong}"
    with pytest.raises(ValueError, match=f"or what made them: --tokenizer {trained}$"):
        find_tokenizer(None, [str(tmp_path / "tokens")], 300)
    os.rename(trained, renamed := f"{tmp_path}/base/tokenizer-renamed")
    assert command("head", tmp_path / "tokens") is None
    assert capsys.readouterr().out.endswith(f"to see text, add --tokenizer {renamed}\n")


def test_stats_train_no_tokenizer(tmp_path, trained, capsys):
    """They take the one of this data, else count bytes and say so."""
    assert command("stats", tmp_path / "text") is None
    words = capsys.readouterr().out
    assert words.startswith(f"{tmp_path}/text, tokens by {trained}\n") and "  about " in words
    shutil.rmtree(trained)
    assert command("stats", tmp_path / "text") is None
    words = capsys.readouterr().out
    assert words.startswith(f"{tmp_path}/text: tokens need a tokenizer; add --tokenizer DIR, or ")
    assert re.search(r"train .*  -\nval .*  -\n", words) and "exactfit" not in words
    assert "bytes  of text" in words
    assert not glob.glob(f"{tmp_path}/base/tokenizer-*[0-9]")


def test_raw_head_shows_line_breaks(tmp_path, capsys):
    for name in "ab":
        texts = pa.array(["def f():\n\treturn \x1b\r\n" + 300 * "x"])
        dataset.write_shard(f"{tmp_path}/{name}.parquet", [texts])
    assert command("head", tmp_path) is None
    assert capsys.readouterr().out.splitlines()[1][:30] == r"      def f(): return \x1b xxx"
    assert command("head", tmp_path, "--raw") is None
    lines = ["def f():", r"        return \x1b", 300 * "x"]
    assert capsys.readouterr().out.splitlines()[1:] == ["      " + line for line in lines]


def test_head_of_tokens_says_how_to_see_text(tmp_path, byte_tokenizer, capsys):
    make_shards(tmp_path / "text")
    assert command("tokenize", tmp_path / "text", "--out", tmp_path / "tokens") is None
    hint = "add --tokenizer "
    for arguments in (["text"], ["tokens", "--tokenizer", "x"]):
        assert command("head", tmp_path / arguments[0], *arguments[1:]) is None
        assert hint not in capsys.readouterr().out
    assert command("head", "--data", tmp_path / "tokens") is None
    assert hint in capsys.readouterr().out


@pytest.mark.parametrize("arguments, status", [
    ("foo", "invalid choice: 'foo'"), ("convert x --cut_bytes 0", "expected a whole number, at least 1"),
    ("head -n x", "argument -n: x: expected a whole number, at least 1"),
    ("verify a b", "expected one folder, not a b; type"), ("stats --data a b", "one folder, not a b; type"),
    ("convert", "required: IN"), ("stats --data /does/not/exist", "/does/not/exist"),
    ("convert no.jsonl", "error: no.jsonl: no such files"), ("convert s3://b/x", "s3://b/x: no such files"),
    ("convert x --out s3://b/x", "error: cannot write to s3://b/x")])
def test_mistakes_are_one_line(arguments, status, capsys):
    line = command(*arguments.split())
    line = capsys.readouterr().err if line == 2 else line
    assert status in line and line.strip().count("\n") == 0
