"""dataset.py: listing, splits, the index, shards, the download. Remote ends are servers on 127.0.0.1."""

import errno
import hashlib
import http.server
import itertools
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import dataset
from test_dataloader import HERE


def make_shards(folder, counts=(40, 40, 12), rows=8):
    """Text shards with these numbers of documents, `rows` in a row group; returns all documents in order."""
    pick, words = random.Random(0), ["loss", "für", "日本", "🙂", "\x00", "\n", "def f(x):", " " * 9]
    lengths = [int(pick.paretovariate(0.8)) % 3000 for _ in range(sum(counts))]
    texts = [f"{i} " + " ".join(pick.choices(words, k=length)) for i, length in enumerate(lengths)]
    for number, (start, stop) in enumerate(itertools.pairwise(itertools.accumulate(counts, initial=0))):
        groups = [pa.array(texts[i : min(i + rows, stop)], pa.string()) for i in range(start, stop, rows)]
        dataset.write_shard(f"{folder}/shard_{number:05d}.parquet", groups)
    return texts


def both_splits(folder):
    return [shard for split in ("train", "val") for shard in dataset.list_shards(str(folder), split)]


def read_all(folder):
    return [text for shard in both_splits(folder) for i in range(len(shard.group_sizes))
            for text in shard.read(i).to_pylist()]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def footers(monkeypatch):
    """The names of the shards whose footers are read for an index."""
    names, read = [], dataset.read_entry
    monkeypatch.setattr(dataset, "read_entry", lambda where, file: names.append(file[0]) or read(where, file))
    return names


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retries do not wait; .waits are the seconds that they would have waited."""
    quick.waits = []
    monkeypatch.setattr(dataset, "ENDING", SimpleNamespace(wait=quick.waits.append))


# ---------------------------------------------------------------------------------------------------------
# Which data, which shards, which split

def test_builtin_corpus_is_made_once_and_is_always_the_same(tmp_path, monkeypatch, capsys):
    """Three callers at once: one makes it. The splits are fair, each source file is there once."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        (folder,) = set(pool.map(dataset.find_data, [None] * 3))
    assert capsys.readouterr().out.count("building a corpus of Python's library") == 1
    train, val = dataset.list_shards(folder, "train"), dataset.list_shards(folder, "val")
    assert len(train) == 4 and len(val) == 1 and all(len(shard.group_sizes) % 8 == 0 for shard in train + val)
    texts = read_all(folder)
    assert 0.5e6 < sum(map(len, texts[-sum(val[0].group_sizes) :])) < 2e6
    with open(json.__file__, encoding="utf-8") as file:
        assert texts.count(file.read()) == 1 and len(texts) > 500 and all(texts)
    dataset.build_builtin_corpus(str(tmp_path / "again"))
    assert files_of(tmp_path / os.path.basename(folder)) == files_of(tmp_path / "again")
    make_shards(tmp_path / "base_data")
    assert dataset.find_data() == dataset.default_data_dir() == f"{tmp_path}/base_data"
    assert dataset.find_data("s3://bucket/x") == "s3://bucket/x"


@pytest.mark.parametrize("names, train, val, words", [
    ("train-0-of-2 train-1-of-2 test-0-of-1 validation-0-of-1", [0, 1], [3],
     "4 shards, 2 train, 1 val\n"),
    ("data/train-0-of-2 data/train-1-of-2 data/test-0-of-1", [0], [1], "3 shards, 1 train, 1 val"
     "; val is the last file, data/train-1-of-2.parquet (to choose another"),
    ("split=train/0 split=train/1 split=train/validation", [0, 1], [2], "3 shards, 2 train, 1 val\n"),
    ("a training val_1", [0, 1], [2], "3 shards, 2 train, 1 val\n"),
    ("tester trainer value", [0, 1], [2], "value.parquet (to choose another, name it validation-*)\n"),
    ("lang=de/0 lang=de/1 lang=en/0", [0, 1], [2], "name it validation-*)\n"),
    ("year=2023/0 year=2024/0 year=2024/1", [0, 1], [2], "(to choose another, name it validation-*)\n"),
])
def test_splits_are_those_of_the_names_or_the_last_file_is_val(tmp_path, capsys, names, train, val, words):
    """Hugging Face's and Hive's folders; files that others put beside their shards are none."""
    names = names.split()
    for name in (*names, "_temporary/0"):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        pq.write_table(pa.table({"text": [name]}), tmp_path / f"{name}.parquet")
    for name in ("_SUCCESS", "_metadata.parquet", "._train-0.parquet", ".part-0.parquet.crc", "README.md"):
        (tmp_path / name).write_text("no shard")
    empty = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / os.path.dirname(names[-1]) / "z.parquet")
    for split, numbers in (("train", train), ("val", val)):
        shards = dataset.list_shards(str(tmp_path), split)
        assert [shard.read(0).to_pylist() for shard in shards] == [[names[i]] for i in numbers]
    assert capsys.readouterr().err.count(words) == 1, "said once, when the folder is new"


def spoiled(name, data):
    """Three shards, and a file of that name: bytes, or a table made of these arguments."""
    def spoil(folder):
        make_shards(folder)
        content = b"" if isinstance(data, tuple) else data
        dataset.write_atomic(os.path.join(folder, os.fsdecode(name)), content)
        if isinstance(data, tuple):
            pq.write_table(pa.table(*data), folder / name)
    return spoil


def indexed(change, then=lambda folder: None):
    """An index.json of these bytes, or that has these fields; then the folder changes."""
    def spoil(folder):
        make_shards(folder)
        index = dataset.write_index(str(folder))
        data = change if isinstance(change, bytes) else json.dumps(index | change).encode()
        (folder / "index.json").write_bytes(data)
        then(folder)
    return spoil


def write_tokens(folder, *names):
    head = {"nanoloader.dtype": "uint16", "nanoloader.tokenizer": "bytes", "nanoloader.text_bytes": "99"}
    for name in names:
        ids = pa.array([np.arange(3, dtype="<u2").tobytes()], pa.binary())
        dataset.write_shard(f"{folder}/{name}.parquet", [ids], "tokens", head)


FULL = {"bytes": 1, "text_bytes": 1, "rows": [1], "digest": None}
DIFFERS = r"does not match its folder: %s.parquet is new, missing or .*: python dataset.py index \S+/data$"
ONE_COLUMN = r"data/new.parquet: expected one string column `text`, not %s; .* --text_key COLUMN --out \S+$"


@pytest.mark.parametrize("spoil, words", [
    (lambda folder: None, "data does not exist, or has no shards; if .* moved, .*dataset.py -n 8, .*FILES --out NEW_FOLDER$"),
    (lambda folder: folder.mkdir(), r"data does not exist, or .* convert FILES --out NEW_FOLDER$"),
    (lambda folder: (folder / "a").mkdir(parents=True) or (folder / "a/a.txt").write_text("text"),
     r"data does not exist, or .* convert FILES --out NEW_FOLDER$"),
    (lambda folder: folder.write_text("a file"), r"/data does not exist, or has no shards; if it is a shard or has "
     r"moved, name its folder \(--data\); .*, or python -m dev.prepare convert FILES --out NEW_FOLDER$"),
    (lambda folder: make_shards(folder, (8,)), "1 shards, 0 train, 1 val; val is the last file, shard_00000.parq"
     r"uet .*; train and val need a file each; make more: python -m dev.prepare convert \S+/data --out \S+$"),
    (lambda folder: [make_shards(folder / split, (8,)) for split in ("train", "test")],
     r"2 shards, 0 train, 1 val; val is the last file, train/shard_00000.parquet"),
    (spoiled("new.parquet", ({"n": [1], "raw": ["a"]},)), ONE_COLUMN % "n: int64, raw: string"),
    (spoiled("new.parquet", ({"text": [1]},)), ONE_COLUMN % "text: int64"),
    (spoiled("new.parquet", ([["a"], ["b"]], ["text", "text"])), ONE_COLUMN % "text: string, text: string"),
    (spoiled("new.parquet", ({"tokens": [[1]]},)), ONE_COLUMN % "tokens: list<element: int64>"),
    (lambda folder: [make_shards(folder), (folder / "a.parquet").symlink_to("/nowhere")], "data/a.parquet"),
    (lambda folder: write_tokens(folder, "a", "b"), "token shards without index.json: run tokenize again"),
    (lambda folder: [make_shards(folder), dataset.write_index(str(folder)), make_shards(folder / "new")],
     "index.json does not match its folder: new/shard_00000.parquet is new, missing or resized"),
    (lambda folder: [make_shards(folder), write_tokens(folder, "a")], "different kinds: .*a.parquet"),
    *((indexed(change), r"index.json (cannot be used|does not match) .*python dataset.py index \S+/data$") for change in (
        b"", b"{", b"[]", b"3", b"[" * 200_000, b"\xff", {"format": 1}, {"dtype": "nothing"}, {"shards": []},
        {"shards": {"a.parquet": {"bytes": 1}}}, *({"shards": {name: FULL}} for name in (
            "../x.parquet", "/x.parquet", "a/../../x.parquet", "", "x.json", "./x.parquet", "\n.parquet")))),
    (indexed({"shards": {"other.parquet": FULL}}), DIFFERS % "other"),
    (indexed({}, lambda folder: (folder / "shard_00001.parquet").unlink()), DIFFERS % "shard_00001"),
    (indexed({}, lambda folder: dataset.write_shard(f"{folder}/a.parquet", [])), DIFFERS % "a"),
    (indexed({}, lambda folder: (folder / "shard_00002.parquet").write_bytes(b"")), DIFFERS % "shard_00002"),
])
def test_unusable_folder_is_an_error_that_leads_on(tmp_path, spoil, words):
    """Missing, of one file, of other columns, with odd names, dangling links, deleted text, a wrong index."""
    spoil(tmp_path / "data")
    with pytest.raises((OSError, ValueError), match=words):
        dataset.list_shards(str(tmp_path / "data"), "val")


def test_links_are_followed_but_not_in_circles(tmp_path):
    texts = make_shards(tmp_path / "far")
    (tmp_path / "data").mkdir()
    os.symlink(tmp_path / "far", tmp_path / "data" / "a")
    os.symlink("..", tmp_path / "far" / "circle")
    assert read_all(tmp_path / "data") == texts
    (tmp_path / "files").mkdir()
    for path in (tmp_path / "data" / "a").glob("*.parquet"):
        os.symlink(path, tmp_path / "files" / path.name)
    assert read_all(tmp_path / "files") == texts


def test_link_to_a_folder_does_not_rename_its_shards(tmp_path, monkeypatch):
    """... whatever the order of the directory, and however deep the folder is."""
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: sorted(scan(path), key=os.DirEntry.is_symlink)[::-1])
    make_shards(tmp_path / "m" / "deep")
    for link in ("a", "z", "0/link"):
        os.makedirs((tmp_path / link).parent, exist_ok=True)
        os.symlink(tmp_path / "m" / "deep", tmp_path / link)
    assert len(dataset.list_files(str(tmp_path))) == 3


def test_every_spelling_of_parquet_is_read_and_a_packed_file_is_an_error(tmp_path):
    for name in ("a.parquet", "b.PARQUET", "c.pq", "_d.pq"):
        pq.write_table(pa.table({"text": [name]}), tmp_path / name)
    assert read_all(tmp_path) == ["a.parquet", "b.PARQUET", "c.pq"]
    assert dataset.write_index(str(tmp_path)) == dataset.read_index(str(tmp_path))
    (tmp_path / "index.json").unlink()
    (tmp_path / "d.parquet.gz").write_bytes(b"packed" * 9)
    with pytest.raises(dataset.ShardError, match=r"d.parquet.gz, footer: .*not a parquet file"):
        dataset.list_shards(str(tmp_path), "train")


def test_shards_of_a_folder_and_of_those_in_it_are_read(tmp_path):
    texts = make_shards(tmp_path / "new") + make_shards(tmp_path)
    assert sorted(read_all(tmp_path)) == sorted(texts)


def test_relative_folder_is_that_of_the_working_folder_of_today(tmp_path, monkeypatch):
    for i, name in enumerate(("one", "two")):
        make_shards(tmp_path / name / "data:2", (i + 8, 8))
        dataset.write_index(f"{tmp_path}/{name}/data:2")
        monkeypatch.chdir(tmp_path / name)
        [shard] = dataset.list_shards("data:2", "train")
        documents = [len(shard.read(row_group)) for row_group in range(len(shard.group_sizes))]
        assert documents == shard.group_sizes and sum(documents) == i + 8


def test_names_and_messages_are_printed_with_escapes(tmp_path, capsys):
    assert dataset.printable("a\x1b[2J\udcff\r\n\u202eé日") == "a\\x1b[2J\\udcff \\u202eé日"
    make_shards(tmp_path / "fol\x1bder")
    dataset.list_shards(str(tmp_path / "fol\x1bder"), "train")
    assert "fol\\x1bder: 3 shards, 2 train" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------
# Reading and writing shards

@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(),
                                  pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_foreign_parquet_of_any_string_type_reads_the_same(tmp_path, kind):
    texts = [*make_shards(tmp_path / "_ours"), None, ""]
    table = pa.table({"id": range(94), "text": pa.array(texts).cast(kind), "tokens": range(94)})
    for name in "ab":
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=40)
    (shard,) = dataset.list_shards(str(tmp_path), "train")
    assert (shard.group_sizes, shard.kind, shard.dtype) == ([40, 40, 14], "text", None)
    assert [text for i in range(3) for text in shard.read(i).to_pylist()] == texts
    data, offsets, valid = dataset.column_views(shard.read(2).slice(3))
    seen = [bytes(data[a:b]).decode() for a, b in itertools.pairwise(offsets)]
    assert seen == [text or "" for text in texts[83:]] and valid.tolist() == [True] * 9 + [False, True]


def test_written_shards_may_have_other_columns(tmp_path):
    """The first one is checked and read; an empty row group and an empty shard are harmless."""
    groups = [pa.table({"text": ["a", None], "score": [0.5, 1.0]}), pa.table({"text": ["b"], "score": [2.0]})]
    for name in ("a", "b"):
        dataset.write_shard(f"{tmp_path}/{name}.parquet", iter([*groups, groups[0].slice(0, 0)]))
    dataset.write_shard(f"{tmp_path}/empty.parquet", [])
    seen = [shard.read(i).to_pylist() for shard in both_splits(tmp_path) for i in range(3)]
    assert seen == [["a", None], ["b"], []] * 2
    assert pq.read_table(tmp_path / "a.parquet")["score"].to_pylist() == [0.5, 1, 2]


def test_a_file_is_complete_or_absent(tmp_path, monkeypatch):
    """Written under another name, synced, renamed; if that fails, nothing is left, and the error names it."""
    calls, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("sync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(b) or replace(a, b))
    shard, file = f"{tmp_path}/new/a.parquet", f"{tmp_path}/new/b"
    dataset.write_shard(shard, [pa.array(["text"])])
    dataset.write_atomic(file, b"data")
    assert calls == ["sync", shard, "sync", file]
    for error, words in ((OSError(errno.ENOSPC, "No space left on device"), "on device"),
                         (dataset.ShardError("other.parquet is damaged"), "^other.parquet is damaged$")):
        monkeypatch.setattr(os, "fsync", lambda file, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(OSError, match=words):
            dataset.write_atomic(file, b"more")
        assert files_of(tmp_path / "new").keys() == {"a.parquet", "b"}
    assert (tmp_path / "new/b").read_bytes() == b"data"


def test_shard_that_is_not_what_was_written_is_an_error(tmp_path):
    """Cut, replaced, removed, of the same shape (only our checksum differs), invalid UTF-8: all are named."""
    make_shards(tmp_path)
    path = tmp_path / "shard_00000.parquet"
    complete, other = path.read_bytes(), (tmp_path / "shard_00001.parquet").read_bytes()
    index = dataset.make_index(str(tmp_path), dataset.list_files(str(tmp_path)))
    index["shards"][path.name]["rows"] = [9]
    with pytest.raises(dataset.ShardError, match="it has 8 documents, 9 in the index"):
        dataset.shards_of(str(tmp_path), index)[0].read(0)
    for now in (complete[:-100], other, other[: len(complete)].ljust(len(complete), b"x"), None):
        shard = dataset.list_shards(str(tmp_path), "train")[0]
        assert shard.read(1)
        path.unlink() if now is None else path.write_bytes(now)
        with pytest.raises(dataset.ShardError, match=r"00000.parquet, row group 1: .*dev.prepare verify"):
            shard.read(1)
        path.write_bytes(complete)
    for letter in "abc":
        groups = [pa.array([letter * 99] * 9)] * 2
        dataset.write_shard(f"{tmp_path}/_same/{letter}.parquet", groups, compression="none")
    shard = dataset.list_shards(f"{tmp_path}/_same", "train")[0]
    assert shard.read(0).to_pylist() == ["a" * 99] * 9
    os.replace(tmp_path / "_same/b.parquet", tmp_path / "_same/a.parquet")
    with pytest.raises(dataset.ShardError, match="not those that were written"):
        shard.read(1)
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 1, buffers)}), path)
    with pytest.raises(dataset.ShardError, match=r"00000.parquet, row group 0.*dev.prepare verify"):
        dataset.list_shards(str(tmp_path), "train")[0].read(0)
    table = pa.table({"text": ["a", "secret"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False,
                   write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"secret", b"sacred", 1))
    with pytest.raises(dataset.ShardError, match=r"00000.parquet, row group 0: .*checksum"):
        dataset.list_shards(str(tmp_path), "train")[0].read(0)
    pq.write_table(table.replace_schema_metadata({dataset.CHECKSUMS: "[1]"}), path, row_group_size=1)
    with pytest.raises(dataset.ShardError):
        dataset.list_shards(str(tmp_path), "train")[0].read(1)


def test_checksum_differs_for_other_documents_and_never_changes():
    """It is on users' disks."""
    long = "ab" * 5000
    lists = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["abc", None], [long], [long] * 2,
             [long[:-1] + "a"], ["b" + long[1:]], ["", "abc"], []]
    assert len({dataset.checksum(pa.array(texts, pa.string())) for texts in lists}) == len(lists)
    array = pa.array(["x", "a", None, "", "bc" * 5000, "y"])
    for kind in (pa.string(), pa.large_string()):
        assert dataset.checksum(array.cast(kind).slice(1, 4)) == 596_729_577


def test_digest_tells_shards_of_equal_size_apart(tmp_path):
    """Rewritten in this process, or replaced beside an old index.json: no old footers, no other text."""
    folder, entries, sizes = str(tmp_path), [], [(3, 5), (5, 3), (3, 5)]
    read = lambda: dataset.make_index(folder, dataset.list_files(folder))    # noqa: E731
    for n, texts in enumerate(("ab", "ab", "ba")):
        for name in "xy":
            groups = [pa.array([text * 99] * size) for text, size in zip(texts, sizes[n], strict=True)]
            dataset.write_shard(f"{tmp_path}/{name}.parquet", groups, compression="none")
        entries.append(read()["shards"]["x.parquet"])
        assert dataset.list_shards(folder, "train")[0].read(0).to_pylist() == [texts[0] * 99] * sizes[n][0]
    assert [entry["rows"] for entry in entries] == [[3, 5], [5, 3], [3, 5]]
    assert [len({entry[key] for entry in entries}) for key in ("bytes", "digest")] == [1, 3]
    assert entries[0]["digest"] == "b29037bed2a8726b", "it is in users' states"
    index = dataset.write_index(folder)
    index["shards"]["x.parquet"] = entries[0]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(dataset.ShardError, match=r"replaced by another shard of this size; .*index \S+;"):
        dataset.list_shards(folder, "train")[0].read(0)
    for entry in index["shards"].values():
        entry["digest"] = None    # unknown
    (tmp_path / "index.json").write_text(json.dumps(index))
    (shard,) = dataset.list_shards(folder, "train")
    assert shard.digest is None and shard.read(0).to_pylist() == ["b" * 99] * 3
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "foreign.parquet")
    assert read()["shards"]["foreign.parquet"]["digest"] is None


@pytest.mark.parametrize("known", [False, True])
def test_corrupted_shard_never_yields_other_text(tmp_path, known):
    """Flips, cuts, zeros, half of them near the footer: an error naming the shard, or the same documents."""
    texts, folder = make_shards(tmp_path, counts=(64, 8), rows=16), str(tmp_path)
    index, path = dataset.make_index(folder, dataset.list_files(folder)), tmp_path / "shard_00000.parquet"
    complete, pick, outcomes = path.read_bytes(), random.Random(known), set()
    for _ in range(200):
        data, how = bytearray(complete), pick.choice(["flip", "flip", "cut", "zero"])
        low = pick.choice([0, len(data) - 3000])
        start = pick.randrange(low, len(data))
        if how == "flip":
            data[start] ^= pick.randrange(1, 256)
        else:
            zeros = pick.choice([8, 100, 5000]) if how == "zero" else 0
            data[start:] = bytes(zeros) + data[start + zeros :] if zeros else b""
        path.write_bytes(data)
        try:
            shard = dataset.shards_of(
                folder, index if known else dataset.make_index(folder, dataset.list_files(folder)))[0]
            documents = [text for i in range(len(shard.group_sizes)) for text in shard.read(i).to_pylist()]
            assert documents == texts[:64], "OTHER TEXT"
            outcomes.add("harmless")
        except dataset.ShardError as error:
            assert str(path) in str(error)
            outcomes.add("error")
    assert outcomes == {"harmless", "error"}


# ---------------------------------------------------------------------------------------------------------
# The index: what a folder contains, known before the first read

def test_index_holds_what_the_footers_say(tmp_path, capsys, monkeypatch):
    """... and with it no shard is opened before it is read."""
    texts = make_shards(tmp_path)
    before = both_splits(tmp_path)
    dataset.main(["index", str(tmp_path)])
    assert "3 shards, 2 train, 1 val; val is the last file, shard_00002.parquet" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "parse_footer", None)
        after = both_splits(tmp_path)
    assert [vars(shard) for shard in before] == [vars(shard) for shard in after]
    assert [shard.group_sizes for shard in after] == [[8] * 5, [8] * 5, [8, 4]]
    assert read_all(tmp_path) == texts
    index, size = json.loads((tmp_path / "index.json").read_bytes()), os.path.getsize(after[2].path)
    assert index.pop("shards")["shard_00002.parquet"] == {
        "bytes": size, "text_bytes": after[2].text_bytes, "rows": [8, 4], "digest": after[2].digest}
    size = sum(len(text.encode()) for text in texts[80:])
    assert size <= after[2].text_bytes < size + 500, "before compression, with the lengths"
    assert index == {"format": 2, "kind": "text", "dtype": None, "tokenizer": None}
    write_tokens(tmp_path / "_tokens", "a", "b")
    dataset.write_index(str(tmp_path / "_tokens"))
    (shard,) = dataset.list_shards(str(tmp_path / "_tokens"), "train")
    assert (shard.kind, shard.dtype, shard.fingerprint, shard.text_bytes) == ("tokens", "<u2", "bytes", 99)
    assert np.frombuffer(shard.read(0)[0].as_py(), shard.dtype).tolist() == [0, 1, 2]
    batches = list(dataset.parquets_iter_batched("train", data_dir=str(tmp_path)))
    assert batches == [texts[i : i + 8] for i in range(0, 80, 8)]
    with pytest.raises(ValueError, match="cannot write to s3://b"):
        dataset.write_index("s3://b/x")
    with pytest.raises(ValueError, match="split is 'test'; expected 'train' or 'val'"):
        dataset.list_shards(str(tmp_path), "test")


def test_footers_of_a_folder_without_an_index_are_read_once(tmp_path, footers):
    """By one of four callers, until the folder changes; nothing is written into it."""
    make_shards(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        listed = pool.map(dataset.list_shards, [str(tmp_path)] * 4, ["train", "val"] * 2)
        assert [len(shards) for shards in listed] == [2, 1, 2, 1]
    assert sorted(footers) == sorted(os.listdir(tmp_path)) == before
    os.utime(tmp_path / "shard_00001.parquet", ns=(0, 0))
    assert len(both_splits(tmp_path)) == 3 and len(footers) == 6


def test_base_directory_that_is_full_or_has_no_locks_is_no_error(tmp_path, monkeypatch, footers):
    """The index is in memory; Lustre without flock answers ENOSYS."""
    texts = make_shards(tmp_path / "data")
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "x")))
    assert read_all(tmp_path / "data") == texts and len(footers) == 3


# ---------------------------------------------------------------------------------------------------------
# Remote folders

class Server(http.server.ThreadingHTTPServer):
    """
    Serves files with ranges, as the web or the hub. faults: {name: what the next GETs of that file do}: a
    status, 'cut', 'stall', 'flip' (another byte), 'long' (HEAD states one byte more).
    """
    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.requests, self.stalled = files, {}, [], threading.Event()
        self.url, self.handle_error = f"http://127.0.0.1:{self.server_port}", lambda *_: None
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, name, asked = self.server, self.path.rsplit("/")[-1], self.headers.get("Range")
        server.requests.append((self.command, name, asked))
        data, faults, is_get = server.files.get(name), server.faults.get(name, []), self.command == "GET"
        fault = faults.pop(0) if faults and is_get else None
        if data is None or isinstance(fault, int):
            return self.send_error(fault or 404)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": "a" * 40}
        data = bytes([data[0] ^ 1]) + data[1:] if fault == "flip" else data
        if asked:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
            headers["Content-Range"] = f"bytes {first}-{last or len(data) - 1}/{len(data)}"
            data = data[int(first) : int(last or len(data) - 1) + 1]
        self.send_response(206 if asked else 200)
        headers["Content-Length"] = len(data) + ("long" in faults and not is_get)
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if fault == "stall":
            server.stalled.set()
            threading.Event().wait(60)
        if is_get:
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)

    do_HEAD, log_message = do_GET, lambda *_: None


@pytest.fixture
def web(tmp_path):
    """A web server with three shards and their index.json; .texts are the documents."""
    pytest.importorskip("aiohttp")
    texts = make_shards(tmp_path / "web")
    dataset.write_index(str(tmp_path / "web"))
    server = Server(files_of(tmp_path / "web"))
    server.texts = texts
    yield server
    server.shutdown()


def test_web_folder_costs_one_request_for_each_thing(web):
    """index.json is one plain GET, a footer and a row group one range each, and nothing else is asked."""
    shard = dataset.list_shards(web.url, "train")[0]
    assert web.requests == [("GET", "index.json", None)]
    for row_group in range(3):
        assert shard.read(row_group).to_pylist() == web.texts[8 * row_group : 8 * row_group + 8]
    metadata = pq.read_metadata(pa.BufferReader(web.files[shard.name]))
    chunks = [metadata.row_group(i).column(0) for i in range(3)]
    ranges = [(c.data_page_offset, c.data_page_offset + c.total_compressed_size - 1) for c in chunks]
    assert web.requests[1][2], "of the footer"
    assert web.requests[2:] == [("GET", shard.name, f"bytes={first}-{last}") for first, last in ranges]
    for location in (web.url + "/",):
        assert read_all(location) == web.texts
        assert dataset.list_shards(location, "train")[0].path == web.url + "/shard_00000.parquet"


def test_web_reads_that_fail_are_tried_again(web, capsys):
    """Errors, cut answers; a shard that stays away is an error after six attempts, with growing waits."""
    web.faults = {"index.json": [503, "cut"], "shard_00000.parquet": ["cut", 500, None, None, 429, "cut"],
                  "shard_00002.parquet": [None, 503]}
    assert read_all(web.url) == web.texts and not any(web.faults.values())
    assert capsys.readouterr().err.count("; trying again\n") == 7
    shard = dataset.list_shards(web.url, "train")[1]
    web.faults, web.requests[:] = {shard.name: [503] * 99, "index.json": [503] * 99}, []
    with pytest.raises(dataset.ShardError, match=r"00001.parquet, row group 1: .*503.*--data http"):
        shard.read(1)
    assert len(web.requests) == 6
    assert all(0.5 <= wait / 2**i <= 1.5 for i, wait in enumerate(quick.waits[-5:]))
    with pytest.raises(ValueError, match=r"index.json cannot be used .*503"):
        dataset.list_shards(web.url, "train")
    del web.files["index.json"], web.faults["index.json"], web.requests[:]
    with pytest.raises(ValueError, match="web servers list no files"):
        dataset.list_shards(web.url, "train")
    assert len(web.requests) == 1, "a missing file is an answer"


def test_missing_client_is_named(monkeypatch):
    import fsspec.registry  # noqa: F401

    for name in ("aiohttp", "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    dataset.filesystem_of.cache_clear()
    for uri, words in (("https://127.0.0.1:9", "aiohttp"), ("nope://x", "nope")):
        with pytest.raises((ValueError, ImportError), match=words):
            dataset.list_shards(uri, "train")


def test_fsspec_opens_what_pyarrow_cannot(tmp_path):
    """memory:// here: listed, then from its index.json."""
    texts, memory = make_shards(tmp_path), pytest.importorskip("fsspec").filesystem("memory")
    for make_index in (lambda folder: None, dataset.write_index):
        make_index(str(tmp_path))
        memory.put(f"{tmp_path}/", "/nanoloader-test/", recursive=True)
        assert read_all("memory://nanoloader-test") == texts


@pytest.fixture
def s3(monkeypatch):
    """moto's S3 server; `every` = k makes each k-th request break off halfway if it reads a shard."""
    pytest.importorskip("moto")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    state = SimpleNamespace(every=0, failed=0, requests=[])

    def flaky(environ, start_response):
        body, method, path = app(environ, start_response), environ["REQUEST_METHOD"], environ["PATH_INFO"]
        state.requests.append((method, path, environ.get("HTTP_RANGE")))
        if not state.every or len(state.requests) % state.every or method != "GET" or "parquet" not in path:
            return body
        state.failed += 1
        return (piece[: len(piece) // 2] for piece in body)    # shorter than its Content-Length

    def upload(folder, to):
        for name, data in files_of(folder).items():
            with fs.open_output_stream(f"bucket/{to}/{name}", compression=None) as out:
                out.write(data)
        return f"s3://bucket/{to}{query}"

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "true")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, flaky, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    query = f"?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{server.server_port}"
    fs, _ = pafs.FileSystem.from_uri(f"s3://bucket/{query}&allow_bucket_creation=true")
    fs.create_dir("bucket")
    state.upload = upload
    yield state
    server.shutdown()


def test_s3_gives_the_same_documents_also_when_reads_fail(tmp_path, s3):
    """Without an index.json it is listed; with one it is not, and a first batch costs six requests."""
    texts = make_shards(tmp_path / "data")
    uri = s3.upload(tmp_path / "data", "listed/a")
    local, remote = both_splits(tmp_path / "data"), both_splits(uri)
    assert [(s.name, s.text_bytes, s.group_sizes) for s in local] == [
        (s.name, s.text_bytes, s.group_sizes) for s in remote]
    assert remote[0].path == uri.replace("?", "/shard_00000.parquet?")
    s3.every = 3
    assert read_all(uri) == texts and s3.failed >= 3
    s3.every = 0
    dataset.main(["index", uri, "--out", f"{tmp_path}/data/index.json"])
    assert dataset.read_index(f"{tmp_path}/data") == dataset.write_index(f"{tmp_path}/data")
    uri = s3.upload(tmp_path / "data", "indexed")
    s3.requests.clear()
    shard = dataset.list_shards(uri, "train")[0]
    assert shard.read(0).to_pylist() == texts[:8]
    assert len(s3.requests) == 6 and all(path.startswith("/bucket/indexed/") for _, path, _ in s3.requests)
    assert all(asked for method, _, asked in s3.requests if method == "GET"), "no whole shard"
    shard.read(1)
    assert len(s3.requests) == 8, "two more for a row group whose footer is known"


def test_program_does_not_wait_for_retries_at_its_end():
    """A thread of an executor is joined at exit, and would sleep for an hour."""
    code = """if True:
        import threading, concurrent.futures, dataset
        dataset.RETRY_SECONDS, begun = 7200, threading.Event()
        def fail():
            begun.set()
            raise ValueError
        concurrent.futures.ThreadPoolExecutor(1).submit(dataset.retry, fail, "s3://bucket")
        begun.wait()
    """
    subprocess.run([sys.executable, "-c", code], cwd=HERE, timeout=100, check=True)


# ---------------------------------------------------------------------------------------------------------
# The download and the command line

@pytest.fixture
def hub(tmp_path):
    """A fake hub; .start(*flags) -> the process of `python dataset.py`, .data its folder."""
    pytest.importorskip("huggingface_hub")
    make_shards(tmp_path / "hub", counts=[9] * 5)
    files = files_of(tmp_path / "hub")
    files["shard_06542.parquet"] = files.pop("shard_00004.parquet")
    # A program that a shell runs in the background ignores Ctrl-C.
    code = ("import dataset, signal; dataset.RETRY_SECONDS = 0.01; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); dataset.main()")
    server = Server(files)
    server.data = tmp_path / "base" / "base_data"
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": f"{tmp_path}/hf", "HF_HUB_DISABLE_XET": "1",
           "NANOLOADER_BASE_DIR": f"{tmp_path}/base"}
    server.start = lambda *flags: subprocess.Popen(
        [sys.executable, "-c", code, *flags], cwd=HERE, env=env, text=True, stdout=-1, stderr=-1)
    server.fetched = lambda: [name for how, name, _ in server.requests if how == "GET" and "shard" in name]
    yield server
    server.shutdown()


def test_download_from_a_hub_that_misbehaves_ends_complete(hub):
    """Val first; cut connections, a 503, other bytes: repeated. No index.json while a shard is missing."""
    hub.faults = {"shard_00000.parquet": ["cut", 503], "shard_00001.parquet": ["flip"],
                  "shard_06542.parquet": ["cut"]}
    missing = hub.files.pop("shard_00003.parquet")
    process = hub.start("-n", "4", "-w", "2")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1 and re.search(r"error: .*00003.parquet.*the same command resumes\n$", err)
    assert not (hub.data / "index.json").exists() and not any(hub.faults.values())
    assert hub.fetched()[:2] == ["shard_06542.parquet"] * 2 and len(set(hub.fetched())) == 4, "val; its rest"
    hub.files["shard_00003.parquet"], hub.requests[:] = missing, []
    process = hub.start("-n", "4", "-w", "2")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and f"5 shards are in {hub.data}" in out, err
    assert hub.fetched() == ["shard_00003.parquet"]
    assert {name: (hub.data / name).read_bytes() for name in hub.files} == hub.files
    assert json.loads((hub.data / "index.json").read_text())["shards"].keys() == hub.files.keys()
    assert dataset.list_shards(str(hub.data), "val")[0].name == "shard_06542.parquet"


def test_download_without_a_network_is_one_line(hub):
    hub.shutdown()
    hub.server_close()
    out, err = hub.start("-n", "1").communicate(timeout=100)
    assert re.fullmatch(r"error: hf://.*06542.parquet, download: .*; the same command resumes\n", out + err)


def test_download_of_a_wrong_size_or_stopped_by_ctrl_c_is_not_complete(hub):
    dataset.write_atomic(f"{hub.data}/index.json", b"{}")    # of an earlier download: it would not fit
    hub.faults = {"shard_06542.parquet": ["long"] * 99}
    process = hub.start("-n", "1")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1 and "shard_06542.parquet" in err and not (hub.data / "index.json").exists()
    hub.faults = {"shard_00000.parquet": ["stall"]}
    process = hub.start("-n", "2")
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130 and err.endswith("stopped; the same command resumes\n")
    assert not (hub.data / "index.json").exists()


@pytest.mark.parametrize("arguments, status, words", [
    (["--help"], 0, "python dataset.py -n 8 -w 4"), ([], 2, "or -n: train shards"), (["-n0"], 2, "or -1 for"),
    (["-n1", "-w0"], 1, "max_workers must be"), (["foo"], 2, "expected `index DIR`"), (["index"], 2, "`index"),
    (["-n", "many\x1b"], 2, "invalid int value: 'many\\x1b'; see python dataset.py --help\n"),
    (["index", "/not\x1bthere"], 1, "error: /not\\x1bthere does not exist, or has no shards; if it is a shard or has moved, "),
])
def test_mistakes_on_the_command_line_are_one_line(arguments, status, words, capsys):
    with pytest.raises(SystemExit) as ended:
        dataset.main(arguments)
    printed = capsys.readouterr()
    message = ended.value.code if status == 1 else printed.err or printed.out
    assert (1 if status == 1 else ended.value.code) == status and words in message
    assert status == 0 or (message.startswith("error: ") and message.count("\n") == (status == 2))


def test_number_of_shards_to_download(monkeypatch):
    calls = []
    monkeypatch.setattr(dataset, "download", lambda *arguments: calls.append(arguments))
    for arguments in (["-n", "3", "-w", "2"], ["-n", "-1", "--out", "x"], ["-n", "7000"]):
        dataset.main(arguments)
    here = dataset.default_data_dir()
    assert calls == [(3, here, 2), (6542, "x", 4), (6542, here, 4)], "no more than there are"


def test_commands_end_quietly(monkeypatch):
    for error, words in ((KeyboardInterrupt(), "stopped; type"), (pa.ArrowInvalid("a\0\n b"), "a\\x00 b")):
        with pytest.raises(SystemExit, match=re.escape(words)), dataset.errors_in_one_line():
            raise error
