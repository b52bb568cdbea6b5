"""
The promises of nanoloader, each as a test, in the order of the data's flow.

    python test_dataloader.py            all of it, a few minutes on 2 cores
    python test_dataloader.py -k resume  what pytest makes of these words

Fast code is compared with a slow and obvious reference in this file. Most tests use a tokenizer whose tokens
are the bytes of the text, and shards of a few short documents, so that epochs end every few rows.
"""

import bz2
import collections
import contextlib
import copy as copy_module
import csv
import functools
import gc
import glob
import gzip
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import logging
import lzma
import math
import os
import pickle
import pickletools
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
import unicodedata
import warnings
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe
import tiktoken.load
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataloader
import dataset
import tokenizer as tokenizer_module
import train
from dataloader import (
    BestFitPacker,
    Chunk,
    ExactFitPacker,
    FlatPacker,
    Lane,
    PackedLoader,
    Ref,
    choose_best_fit,
    fill_gap,
    merge_states,
    whole_numbers,
    whose_turn,
)
from dev import bench, pictures, prepare
from tokenizer import (
    HARD,
    LONGEST_PIECE,
    NEXT_CUT,
    ODD,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    GigatokenEngine,
    RustBPETokenizer,
    TiktokenEngine,
    as_encoder,
    build_encoding,
    get_token_bytes,
    get_tokenizer,
    safe_cuts_around,
)

BOS = 256
HERE = os.path.dirname(os.path.abspath(__file__))
# What a shell runs in the background is deaf to Ctrl-C, and so would be the programs that are stopped here.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("without a deadline", deadline=None)    # a machine may stand still for a moment
settings.load_profile("without a deadline")


# ---------------------------------------------------------------------------------------------------------
# A corpus that can be read at a glance

class ByteTokenizer:
    """Ids are bytes."""
    dtype = np.dtype(np.uint16)

    def __init__(self, name="bytes"):
        self.name, self.encoded = name, []

    def get_bos_token_id(self):
        return BOS

    def fingerprint(self):
        return self.name

    def encode_documents(self, texts):
        self.encoded.append(len(texts))
        ids = [[] if text is None else [BOS, *as_bytes(text)] for text in texts]
        arrays = [np.array(document, np.uint16) for document in ids]
        return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])


def as_bytes(text):
    return text.encode() if isinstance(text, str) else bytes(text)


class PlainTokenizer:
    """The same tokens behind nanochat's face and nothing more."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=8):
        return [([] if prepend is None else [prepend]) + list(text.encode()) for text in texts]


def write_shards(folder, shards):
    """shards: per shard its row groups, per row group its documents."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string())])
    for i, groups in enumerate(shards):
        with pq.ParquetWriter(folder / f"shard_{i:05d}.parquet", schema) as writer:
            for group in groups:
                writer.write_table(pa.table({"text": pa.array(group, pa.string())}))
    return str(folder)


def numbered(lengths, tag=""):
    """Documents of these lengths, no two alike: each repeats its own number."""
    return [((f"{tag}{i}." * (n // 2 + 1))[:n]) for i, n in enumerate(lengths)]


def grouped(documents, sizes):
    """[[documents]]: one shard of row groups of these sizes, the last one takes the rest."""
    stops = list(itertools.accumulate(sizes))
    return [documents[a:b] for a, b in itertools.pairwise([0, *stops, len(documents)]) if b > a]


@pytest.fixture
def corpus(tmp_path):
    """60 documents in 12 row groups of 3 shards, and a shard for val."""
    lengths = [(7 * i * i + 3) % 41 for i in range(60)]
    groups = grouped(numbered(lengths), [5] * 11)
    return write_shards(tmp_path / "data", [groups[:4], groups[4:8], groups[8:], [["val one", "val two"]]])


made = []


@pytest.fixture(autouse=True)
def close_what_was_made():
    yield
    while made:
        made.pop().close()


def make(data, *, B=2, T=16, split="train", tokenizer=None, **options):
    """A loader of one lane a rank, unless it is told otherwise."""
    options = {"threads": 2, "buffer_size": 6, "num_lanes": options.get("world_size", 1), **options}
    made.append(PackedLoader(tokenizer or ByteTokenizer(), B, T, split, data_dir=data, **options))
    return made[-1]


def rows_of(batch):
    """Rows as tuples of T + 1 tokens; -100 where a target is masked."""
    inputs, targets = batch
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous() and targets.is_contiguous()
    return [(a[0], *b) for a, b in zip(inputs.tolist(), targets.tolist(), strict=True)]


def run(data, *, steps, world=1, state=None, state_at=None, **options):
    """
    All rows of a run in their global order, from `world` loaders in this process, and the merged state
    after `state_at` steps (default: all).
    """
    loaders = [make(data, rank=rank, world_size=world, **options) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    rows, states = [], None
    for step in range(steps + 1):
        if step == (steps if state_at is None else state_at):
            states = [loader.state_dict() for loader in loaders]
        if step < steps:
            per_rank = [rows_of(next(loader)) for loader in loaders]
            rows += [row for together in zip(*per_rank, strict=True) for row in together]
    for loader in loaders:
        loader.close()
    return rows, merge_states(states)


# ---------------------------------------------------------------------------------------------------------
# Data: the built-in corpus, shards, reading


def make_texts(n, seed=0):
    """Documents of all lengths and scripts, every one different."""
    pick = random.Random(seed)
    words = ["loss", "für", "日本", "🙂", "\x00", "\n", "def f(x):", "<|bos|>", " " * 9]
    lengths = [int(pick.paretovariate(0.8)) % 3000 for _ in range(n)]
    return [f"{seed}.{i} " + " ".join(pick.choices(words, k=length)) for i, length in enumerate(lengths)]


def make_shards(folder, counts=(40, 40, 12), rows=8):
    """Text shards with so many documents each; returns all documents in order."""
    os.makedirs(folder, exist_ok=True)
    texts = make_texts(sum(counts))
    rest = iter(texts)
    for number, count in enumerate(counts):
        part = list(itertools.islice(rest, count))
        groups = [pa.array(part[i : i + rows], pa.string()) for i in range(0, count, rows)]
        dataset.write_shard(f"{folder}/shard_{number:05d}.parquet", groups)
    return texts


def read_all(folder):
    """Every document of both splits, in order."""
    shards = dataset.list_shards(str(folder), "train") + dataset.list_shards(str(folder), "val")
    return [text for s in shards for i in range(len(s.rows)) for text in s.read(i).to_pylist()]


DATASET, PREPARE = [sys.executable, "dataset.py"], [sys.executable, "-m", "dev.prepare"]


def run_command(command, *args, **env):
    """`python dataset.py ARGS` or `python -m dev.prepare ARGS` as a user types it."""
    return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, cwd=HERE,
                          env={**os.environ, **env}, timeout=200)


@pytest.fixture(scope="session", autouse=True)
def base_of_the_tests(tmp_path_factory):
    """Indexes of the tests' folders do not go where the user's go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOLOADER_BASE_DIR", str(tmp_path_factory.mktemp("nanoloader")))
        yield


def open_shard(folder, name):
    """From its own footer, without an index."""
    path = os.path.join(folder, name)
    return dataset.open_shard(str(folder), name, dataset.File(os.path.getsize(path), None))


@pytest.fixture
def quick(monkeypatch):
    """Retries without the long waits."""
    monkeypatch.setattr(dataset, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(dataset, "TIMEOUT", (20, 20))
    dataset.read_footer.cache_clear()


@pytest.fixture
def impatient(quick, monkeypatch):
    """For servers that stall; where a machine does, there are attempts enough."""
    monkeypatch.setattr(dataset, "TIMEOUT", (20, 0.5))
    monkeypatch.setattr(dataset, "ATTEMPTS", 30)


@pytest.fixture
def threads_for_processes(monkeypatch):
    """convert() without the second that it takes to start processes."""
    pool = contextlib.contextmanager(lambda executor, workers: (yield ThreadPoolExecutor(workers or 2)))
    monkeypatch.setattr(prepare, "executor_or_pool", pool)


@pytest.fixture(scope="module")
def builtin(tmp_path_factory):
    """The built-in corpus, made by three processes that start at once."""
    base = str(tmp_path_factory.mktemp("base"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import dataset; print(dataset.find_data())"
    processes = [subprocess.Popen([sys.executable, "-c", code, HERE], text=True,
                                  env={**os.environ, "NANOLOADER_BASE_DIR": base}, stdout=subprocess.PIPE)
                 for _ in range(3)]
    outputs = [process.communicate(timeout=200)[0].splitlines() for process in processes]
    assert {lines[-1] for lines in outputs} == {outputs[0][-1]}
    assert sorted(map(len, outputs)) == [1, 1, 3], "one process makes the corpus and says so, the others wait"
    return outputs[0][-1]


def test_builtin_corpus_is_real_text_in_fair_splits(builtin):
    """Several train shards and a val shard of about 1 MB, row groups for 8 lanes, each source file once."""
    train, val = dataset.list_shards(builtin, "train"), dataset.list_shards(builtin, "val")
    assert len(train) == 4 and len(val) == 1
    assert all(len(shard.rows) % 8 == 0 for shard in train + val)
    texts = read_all(builtin)
    sources = dataset.standard_library(sysconfig.get_path("stdlib"))
    assert sorted(texts) == sorted(sources) and len(texts) > 500
    val_bytes = sum(len(t) for batch in dataset.parquets_iter_batched("val", data_dir=builtin) for t in batch)
    assert 0.5e6 < val_bytes < 2e6
    with open(json.__file__, encoding="utf-8") as file:
        assert file.read() in texts
    assert not [name for name in os.listdir(os.path.dirname(builtin)) if name.endswith(".tmp")]


def test_builtin_corpus_is_the_same_each_time(builtin, tmp_path):
    """Made again, it is the same, byte for byte."""
    dataset.build_builtin_corpus(str(tmp_path / "again"))
    for name in os.listdir(builtin):
        with open(f"{builtin}/{name}", "rb") as one, open(tmp_path / "again" / name, "rb") as two:
            assert one.read() == two.read()


def test_find_data_prefers_given_then_downloaded_then_builtin(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    assert dataset.find_data("s3://bucket/x") == "s3://bucket/x"
    make_shards(tmp_path / "base_data")
    assert dataset.find_data() == dataset.get_base_dir() + "/base_data"


def test_nanochats_listing_is_there(tmp_path):
    """As its scripts call it."""
    make_shards(tmp_path)
    paths = [str(tmp_path / f"shard_{i:05d}.parquet") for i in range(3)]
    assert dataset.list_parquet_files(str(tmp_path), warn_on_legacy=True) == paths


def test_last_shard_is_val_and_listing_opens_no_file(tmp_path, monkeypatch):
    texts = make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    monkeypatch.setattr(dataset, "read_footer", None)
    train, val = dataset.list_shards(str(tmp_path), "train"), dataset.list_shards(str(tmp_path), "val")
    assert [s.name for s in train + val] == [f"shard_{i:05d}.parquet" for i in range(3)]
    assert [s.size for s in val] == [os.path.getsize(tmp_path / "shard_00002.parquet")]
    monkeypatch.undo()
    assert read_all(tmp_path) == texts
    batches = list(dataset.parquets_iter_batched("train", start=1, step=2, data_dir=str(tmp_path)))
    assert batches == [texts[i : i + 8] for i in (8, 24, 48, 64)]


def test_each_unusable_folder_has_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no parquet files in .*dataset\.py -n 8"):
        dataset.list_shards(str(tmp_path), "train")
    make_shards(tmp_path, counts=(8,))
    with pytest.raises(ValueError, match="only one parquet file"):
        dataset.list_shards(str(tmp_path), "val")
    pq.write_table(pa.table({"n": [1], "raw": ["a"]}), tmp_path / "shard_00001.parquet")
    with pytest.raises(OSError, match=r"00001.parquet.* no column `text`, only 'n', 'raw'.*--text_key raw"):
        dataset.list_shards(str(tmp_path), "val")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "shard_00001.parquet")
    with pytest.raises(OSError, match="holds int64, not strings"):
        dataset.list_shards(str(tmp_path), "val")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(),
                                  pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_foreign_parquet_of_any_string_type_reads_the_same(tmp_path, kind):
    texts = [*make_texts(50), None, ""]
    pq.write_table(pa.table({"id": range(52), "text": pa.array(texts).cast(kind)}), tmp_path / "a.parquet",
                   row_group_size=20)
    shard = open_shard(tmp_path, "a.parquet")
    assert shard.rows == [20, 20, 12] and shard.kind == "text" and shard.dtype is None
    assert [text for i in range(3) for text in shard.read(i).to_pylist()] == texts


def test_text_is_read_beside_a_column_of_another_kind_of_tokens(tmp_path):
    pq.write_table(pa.table({"text": ["a b"], "tokens": [2]}), tmp_path / "a.parquet")
    shard = open_shard(tmp_path, "a.parquet")
    assert shard.kind == "text" and shard.read(0).to_pylist() == ["a b"]


def test_invalid_utf8_in_a_shard_is_an_error(tmp_path):
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    broken = pa.Array.from_buffers(pa.string(), 1, buffers)
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(OSError, match=r"a.parquet, row group 0.*dev.prepare verify"):
        open_shard(tmp_path, "a.parquet").read(0)


def test_shard_that_changed_is_an_error(tmp_path):
    """Cut, replaced by another of any size, removed: the error names shard, row group and command."""
    make_shards(tmp_path)
    path = tmp_path / "shard_00000.parquet"
    whole, other = path.read_bytes(), (tmp_path / "shard_00001.parquet").read_bytes()
    for now in (whole[:-100], other, other[: len(whole)].ljust(len(whole), b"x"), None):
        shard = dataset.list_shards(str(tmp_path), "train")[0]
        assert shard.read(1)
        path.unlink() if now is None else path.write_bytes(now)
        with pytest.raises(OSError, match=r"00000.parquet, row group 1: .*-m dev.prepare verify --data"):
            shard.read(1)
        path.write_bytes(whole)


def test_shard_replaced_by_one_of_the_same_shape_is_an_error(tmp_path):
    """Same size, same layout, whole pages: only the checksum of the documents tells."""
    for number, letter in enumerate("abc"):
        groups = [pa.array([letter * 99] * 9)] * 2
        dataset.write_shard(f"{tmp_path}/{number}.parquet", groups, compression="none")
    shard = dataset.list_shards(str(tmp_path), "train")[0]
    assert shard.read(0).to_pylist() == ["a" * 99] * 9
    os.replace(tmp_path / "1.parquet", tmp_path / "0.parquet")
    with pytest.raises(OSError, match="not those that were written"):
        shard.read(1)


def corrupt(data, pick):
    """One random fault: some flipped bytes, a cut end, or a zeroed range; half of them near the footer."""
    data = bytearray(data)
    low = pick.choice([0, max(0, len(data) - 3000)])
    start = pick.randrange(low, len(data))
    how = pick.choice(["flip", "flip", "cut", "zero"])
    if how == "flip":
        for _ in range(pick.choice([1, 1, 4])):
            data[pick.randrange(low, len(data))] ^= pick.randrange(1, 256)
    elif how == "cut":
        del data[start:]
    else:
        end = min(len(data), start + pick.choice([1, 8, 100, 5000]))
        data[start:end] = bytes(end - start)
    return how, bytes(data)


def check_corruptions(folder, n, seed):
    """Corrupt one shard n times; returns {(fault, outcome): count}, where no outcome may be other text."""
    make_shards(folder, counts=(64, 8), rows=16)
    path = f"{folder}/shard_00000.parquet"
    with open(path, "rb") as file:
        whole = file.read()
    want, split, pick = read_all(folder)[:64], {}, random.Random(seed)
    for _ in range(n):
        how, damaged = corrupt(whole, pick)
        with open(path, "wb") as file:
            file.write(damaged)
        dataset.read_footer.cache_clear()
        try:
            shard = open_shard(folder, "shard_00000.parquet")
            seen = [text for i in range(len(shard.rows)) for text in shard.read(i).to_pylist()]
            outcome = "harmless" if seen == want else "OTHER TEXT"
        except dataset.ShardError as error:
            assert path in str(error)
            outcome = "error"
        split[how, outcome] = split.get((how, outcome), 0) + 1
    return split


def test_corrupted_shard_never_yields_other_text(tmp_path):
    """Flips, cuts, zeros, half of them near the footer: an error naming the shard, or the same documents."""
    split = check_corruptions(str(tmp_path), 200, seed=1)
    assert {outcome for _, outcome in split} == {"error", "harmless"}
    assert {how for how, _ in split} == {"flip", "cut", "zero"}


@pytest.mark.parametrize("store_schema, use_dictionary", [(False, True), (True, True), (False, False)])
def test_small_files_that_say_they_are_huge_are_an_error(tmp_path, store_schema, use_dictionary):
    """A few bytes that are 11.8 GB of one document, or 1.2 GB of zstd; an index of 3 billion documents."""
    data = pa.DictionaryArray.from_arrays(pa.array([0] * 118_000, pa.int32()), pa.array(["a" * 10**5]))
    if not use_dictionary:
        data = pa.chunked_array([["a" * 10**5] * 600] * 20)
    pq.write_table(pa.table({"text": data}), tmp_path / "a.parquet", compression="zstd",
                   store_schema=store_schema, use_dictionary=use_dictionary, write_statistics=False)
    assert os.path.getsize(tmp_path / "a.parquet") < 200_000
    shutil.copy(tmp_path / "a.parquet", tmp_path / "b.parquet")
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    with pytest.raises(dataset.ShardError, match=r"a.parquet, row group 0: its .* bytes say that they hold "):
        dataset.list_shards(str(tmp_path), "train")[0].read(0)
    pa.set_memory_pool(before)
    assert 1e8 < pool.max_memory() < 1e9
    index = dataset.write_index(str(tmp_path))
    index["shards"]["a.parquet"]["rows"] = [2_950_000_000]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(dataset.ShardError, match=r"a.parquet, footer: its .* hold 2,950,000,000 documents"):
        dataset.list_shards(str(tmp_path), "train")


# ---------------------------------------------------------------------------------------------------------
# The index: what is in a folder, known before the first read

def count_footers(monkeypatch):
    """The names of the shards whose footers are read from now on."""
    names, read = [], dataset.read_entry
    counted = lambda folder, item: names.append(item[0]) or read(folder, item)    # noqa: E731
    monkeypatch.setattr(dataset, "read_entry", counted)
    return names


def test_index_says_what_the_footers_say(tmp_path):
    make_shards(tmp_path)
    before = dataset.list_shards(str(tmp_path), "train") + dataset.list_shards(str(tmp_path), "val")
    ended = run_command(DATASET, "index", tmp_path)
    assert "3 shards, 12 row groups, 92 documents" in ended.stdout, ended.stderr
    after = dataset.list_shards(str(tmp_path), "train") + dataset.list_shards(str(tmp_path), "val")
    assert [vars(shard) for shard in before] == [vars(shard) for shard in after]
    assert [shard.rows for shard in after] == [[8] * 5, [8] * 5, [8, 4]]
    index = json.loads((tmp_path / "index.json").read_bytes())
    assert index.pop("shards")["shard_00002.parquet"] == {
        "bytes": after[2].size, "text_bytes": after[2].size, "rows": [8, 4]}
    assert index == {"format": 1, "kind": "text", "dtype": None, "tokenizer": None}


def test_footers_of_a_folder_without_an_index_are_read_once(tmp_path, monkeypatch):
    """... until the folder changes, even to a shard of the same size; nothing is written into it."""
    make_shards(tmp_path)
    before, names = sorted(os.listdir(tmp_path)), count_footers(monkeypatch)
    for split in ("train", "val"):
        assert dataset.list_shards(str(tmp_path), split)
    assert sorted(names) == sorted(os.listdir(tmp_path)) == before
    os.utime(tmp_path / "shard_00001.parquet", ns=(0, 0))
    dataset.list_shards(str(tmp_path), "train")
    assert len(names) == 6
    for path in glob.glob(os.environ["NANOLOADER_BASE_DIR"] + "/index/*.json"):
        with open(path, "w") as file:
            file.write('{"modified": ')    # torn
    dataset.list_shards(str(tmp_path), "train")
    assert len(names) == 9


def test_without_a_place_to_keep_it_the_index_is_made_each_time(tmp_path, monkeypatch):
    make_shards(tmp_path / "data")
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)    # root may write anywhere
    names = count_footers(monkeypatch)
    for _ in range(2):
        assert len(dataset.list_shards(str(tmp_path / "data"), "train")) == 2
    assert len(names) == 6 and os.listdir(tmp_path / "base" / "index") == []
    (tmp_path / "file").write_text("")
    for arguments, status, message in (("-h", 0, "COMMAND"), ("verify", 1, "set NANOLOADER_BASE_DIR to ")):
        ended = run_command(PREPARE, arguments, NANOLOADER_BASE_DIR=str(tmp_path / "file" / "base"))
        assert ended.returncode == status and message in ended.stdout + ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_does_not_keep_a_lock_file(tmp_path):
    """A DataLoader worker that was forked while a shard was copied would keep all others waiting."""
    with dataset.lock_file(f"{tmp_path}/lock"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    with dataset.lock_file(f"{tmp_path}/lock", wait=False) as ours:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert ours


def test_one_process_of_a_node_reads_the_footers(tmp_path):
    """Four start at once: one says what it found, and every one knows."""
    make_shards(tmp_path / "data")
    code = f"import dataset; print(len(dataset.list_shards({str(tmp_path / 'data')!r}, 'train')))"
    processes = [subprocess.Popen([sys.executable, "-c", code], text=True, cwd=HERE, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE,
                                  env={**os.environ, "NANOLOADER_BASE_DIR": str(tmp_path / "base")})
                 for _ in range(4)]
    out, err = zip(*(process.communicate(timeout=200) for process in processes), strict=True)
    assert out == ("2\n",) * 4
    said = f"{tmp_path}/data: 92 documents; 2 train shards, 1 val (the last file, shard_00002.parquet)\n"
    assert sorted(text.count(said) for text in err) == [0, 0, 0, 1]


def test_folder_that_does_not_fit_its_index_is_an_error(tmp_path):
    make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    path = tmp_path / "shard_00001.parquet"
    whole, again = path.read_bytes(), f"python dataset.py index {tmp_path}"
    size = len(whole)
    for now, problem in ((None, f"of shard_00001.parquet the folder has nothing, the index {size:,} bytes"),
                         (whole + b"x", f"the folder has {size + 1:,} bytes, the index {size:,} bytes")):
        path.unlink() if now is None else path.write_bytes(now)
        with pytest.raises(ValueError, match=f"{problem}.*{again}"):
            dataset.list_shards(str(tmp_path), "train")
    path.write_bytes(whole)
    (tmp_path / "shard_00009.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=f"of shard_00009.parquet the .*, the index nothing; .*{again}"):
        dataset.list_shards(str(tmp_path), "train")
    assert run_command(DATASET, "index", tmp_path).returncode == 0
    assert dataset.list_shards(str(tmp_path), "val")[0].name == "shard_00009.parquet"
    with pytest.raises(ValueError, match="cannot write to s3://b"):
        dataset.write_index("s3://b/x")


@pytest.mark.parametrize("change", [
    b"", b"{", b"[]", b"3", {"format": 2}, {"kind": "images"}, {"dtype": "object"}, {"shards": []},
    {"shards": {"a.parquet": {"bytes": 1}}},
    {"shards": {"a.parquet": {"bytes": 1, "text_bytes": 1, "rows": [-1]}}},
    {"shards": {"a.parquet": {"bytes": 1, "text_bytes": 1, "rows": ["8"]}}}], ids=repr)
def test_damaged_index_is_an_error(tmp_path, change):
    make_shards(tmp_path)
    data = change if isinstance(change, bytes) else json.dumps(dataset.write_index(str(tmp_path)) | change)
    (tmp_path / "index.json").write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=r"index.json is no index of shards .*python dataset.py index"):
        dataset.list_shards(str(tmp_path), "train")


@pytest.mark.parametrize("name", [
    "../x.parquet", "/x.parquet", "a/../../x.parquet", "http://127.0.0.1:9/x.parquet",
    "//127.0.0.1/x.parquet", "..\\x.parquet", "", "x.json", "./x.parquet"])
def test_names_in_an_index_stay_below_its_folder(tmp_path, quick, name, byte_tokenizer):
    """Checked where the index is read: nothing is asked of another host, tokenize writes nowhere else."""
    make_shards(tmp_path / "in")
    index = dataset.write_index(str(tmp_path / "in"))
    index["shards"][name] = index["shards"]["shard_00000.parquet"]
    with UnrulyServer({"/in/index.json": json.dumps(index).encode()}) as server:
        url = f"{server.url}/in/index.json"
        for call in (lambda: dataset.list_shards(url, "train"),
                     lambda: prepare.tokenize(url, str(tmp_path / "out" / "deep"))):
            with pytest.raises(ValueError, match="is no name for a shard"):
                call()
        assert {path for path, _ in server.requests} == {"/in/index.json"}
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("names, train, val, words", [
    (["train-0-of-2", "train-1-of-2", "test-0-of-1", "validation-0-of-1"], [0, 1], [3],
     "2 train shards, 1 val (by their names), 1 test (left out)"),
    (["data/train-0-of-2", "data/train-1-of-2", "data/test-0-of-1"], [0], [1],
     "1 train shards, 1 val (the last file, data/train-1-of-2.parquet), 1 test (left out)"),
    (["training", "valid"], [0], [1], "(by their names)"),
    (["val_1", "a", "b"], [1, 2], [0], "(by their names)"),
    (["tester", "trainer", "value"], [0, 1], [2], "(the last file, value.parquet)"),
    (["part-00000-5f.snappy", "part-00001-5f.snappy", "part-00002-5f.snappy"], [0, 1], [2], "the last file"),
])
def test_splits_are_taken_from_names_that_say_them(tmp_path, capsys, names, train, val, words):
    """Hugging Face's layouts, also in data/; what others put beside their shards is no shard."""
    texts = [f"{name} {i}" for i, name in enumerate(names)]
    for name, text in zip(names, texts, strict=True):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        pq.write_table(pa.table({"text": [text]}), tmp_path / f"{name}.parquet")
    for name in ("_SUCCESS", "_metadata.parquet", "._train-0.parquet", ".part-0.parquet.crc", "README.md"):
        (tmp_path / name).write_text("no shard")
    empty = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / os.path.dirname(names[-1]) / "z.parquet")
    for split, places in (("train", train), ("val", val)):
        shards = dataset.list_shards(str(tmp_path), split)
        assert [shard.read(0).to_pylist() for shard in shards] == [[texts[i]] for i in places]
    assert capsys.readouterr().err.count(words) == 1


def test_link_to_nothing_is_an_error(tmp_path):
    make_shards(tmp_path)
    os.symlink("/nowhere", tmp_path / "shard_00001a.parquet")
    with pytest.raises(OSError, match=r"shard_00001a\.parquet"):
        dataset.list_shards(str(tmp_path), "train")


def test_a_folder_of_two_kinds_is_an_error(tmp_path, byte_tokenizer):
    make_shards(tmp_path / "text")
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    os.rename(tmp_path / "tokens" / "shard_00001.parquet", tmp_path / "text" / "shard_00003.parquet")
    with pytest.raises(ValueError, match=r"two kinds, .*shard_00003.parquet"):
        dataset.list_shards(str(tmp_path / "text"), "train")


def test_ten_thousand_shards_are_listed_in_a_moment(tmp_path):
    """With an index: no footer is opened, and a Shard costs microseconds."""
    for i in range(10_000):
        (tmp_path / f"shard_{i:05d}.parquet").touch()
    entry = {"bytes": 0, "text_bytes": 100_000_000, "rows": [1024] * 50}
    index = {"format": 1, "kind": "text", "dtype": None, "tokenizer": None}
    index["shards"] = {f"shard_{i:05d}.parquet": entry for i in range(10_000)}
    (tmp_path / "index.json").write_text(json.dumps(index))
    began = time.process_time()
    assert len(dataset.list_shards(str(tmp_path), "train")) == 9_999
    assert time.process_time() - began < 10, "0.5 s on a quiet machine"


# ---------------------------------------------------------------------------------------------------------
# Download: from servers that misbehave


class UnrulyServer(http.server.ThreadingHTTPServer):
    """Serves {path: bytes} with ranges and ETags; `faults`: what goes wrong, one for each request in turn."""

    daemon_threads = True

    def __init__(self, files, faults=(), forever=None, sha256=False):
        super().__init__(("127.0.0.1", 0), UnrulyHandler)
        self.files, self.faults, self.forever, self.sha256 = files, list(faults), forever, sha256
        self.requests, self.pace, self.retry_after = [], 0, "1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        pass


class UnrulyHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        fault = server.faults.pop(0) if server.faults else server.forever
        data = server.files.get(self.path)
        if data is None or isinstance(fault, int):
            self.send_response(404 if data is None else fault)
            if fault in (429, 503):
                self.send_header("Retry-After", server.retry_after)
            self.end_headers()
            return
        tag = f'"{hash(data)}"'
        match = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, len(data)
        if match and self.headers.get("If-Range", tag) == tag:
            start, end = int(match[1]), min(len(data), int(match[2] or len(data)) + 1)
            self.send_response(206 if start < len(data) else 416)
            given = f"{start}-{end - 1}" if start < len(data) else "*"
            self.send_header("Content-Range", f"bytes {given}/{len(data)}")
        else:
            self.send_response(200)
        body = data[start:end]
        if fault == "wrong bytes":
            body = body[:100] + bytes([body[100] ^ 1]) + body[101:]  # the footer stays whole
        self.send_header("ETag", tag)
        if server.sha256:
            self.send_header("X-Linked-ETag", f'"{dataset.hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(body) + {"too long": 10, "too short": -10}.get(fault, 0)))
        self.end_headers()
        half = body[: len(body) // 2]
        if fault in ("cut", "stall"):
            self.wfile.write(half)
            time.sleep(1.0 if fault == "stall" else 0)
            self.connection.close()
            return
        for i in range(0, len(body), 20_000):
            self.wfile.write(body[i : i + 20_000])
            time.sleep(server.pace)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """{path: bytes} of five shards to download."""
    folder = tmp_path_factory.mktemp("public")
    make_shards(folder, counts=(8, 40, 40, 40, 12))
    noise = pa.array([random.Random(i).randbytes(30_000).hex() for i in range(20)])
    dataset.write_shard(f"{folder}/shard_00000.parquet", [noise])
    return {f"/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def intact(folder, public):
    """The names of whole shards in a folder; nothing else may have the name of a shard."""
    found = {f"/{path.name}": path.read_bytes() for path in folder.iterdir() if path.suffix == ".parquet"}
    assert found.items() <= public.items()
    return set(found)


FAULTS = ["cut", "stall", 500, "too long", "too short", "wrong bytes", 429, "cut", "cut", 502]


@pytest.mark.parametrize("seed", range(2))
def test_download_from_bad_server_ends_intact(tmp_path, public, impatient, seed):
    """Cuts, stalls, 5xx, wrong lengths and bytes, in any order: every file arrives whole."""
    faults = random.Random(seed).sample(FAULTS, len(FAULTS))
    with UnrulyServer(public, faults, sha256=True) as server:
        assert dataset.download([name[1:] for name in public], str(tmp_path), server.url, workers=3) == {}
        assert not server.faults
    assert intact(tmp_path, public) == set(public)
    others = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".parquet")
    assert others == ["SHA256SUMS", "index.json"]
    assert prepare.verify(str(tmp_path))


@pytest.mark.parametrize("fault", [500, 404, "stall", "wrong bytes", "too short"])
def test_download_that_never_works_is_reported(tmp_path, public, quick, fault, monkeypatch):
    """A server that never gives the file: no shard under its name, its name and the reason in the report."""
    monkeypatch.setattr(dataset, "ATTEMPTS", 2)
    monkeypatch.setattr(dataset, "TIMEOUT", (2, 0.1))
    with UnrulyServer({"/a.parquet": next(iter(public.values()))}, forever=fault, sha256=True) as server:
        failed = dataset.download(["a.parquet"], str(tmp_path), server.url)
    assert list(failed) == ["a.parquet"] and server.url in failed["a.parquet"]
    assert intact(tmp_path, public) == set()


def test_download_from_where_nobody_listens_tells_a_short_reason(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(dataset, "ATTEMPTS", 1)
    reason = dataset.download(["a.parquet"], str(tmp_path), "http://127.0.0.1:9")["a.parquet"]
    assert reason.count("a.parquet") == 1 and "refused" in reason and len(reason) < 200


def test_download_goes_on_where_it_was_cut(tmp_path, public, quick):
    """The second half is asked for by range; if the file changed meanwhile, the first half is not kept."""
    name = next(iter(public))
    with UnrulyServer(public, ["cut"]) as server:
        assert dataset.download([name[1:]], str(tmp_path), server.url) == {}
        (_, first), (_, then) = server.requests
        assert first is None and len(public[name]) // 4 < int(then[6:-1]) <= len(public[name]) // 2
    changed = dict(public)
    changed[name] = public["/shard_00001.parquet"]
    with UnrulyServer(changed, [500] * 99) as server:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / f"{name[1:]}.part").write_bytes(public[name][:1000])
        stated = {"tag": '"another"', "size": 5000, "sha256": None}
        (tmp_path / "new" / f"{name[1:]}.part.json").write_text(json.dumps(stated))
        server.faults.clear()
        assert dataset.download([name[1:]], str(tmp_path / "new"), server.url) == {}
        assert server.requests == [(name, "bytes=1000-")]
    assert (tmp_path / "new" / name[1:]).read_bytes() == changed[name]


def test_download_that_is_stopped_keeps_its_part(tmp_path, public, quick):
    """What Ctrl-C does: the download ends at the next piece, and what came stays."""
    name, stop = next(iter(public)), threading.Event()
    stop.set()
    with UnrulyServer(public) as server:
        part = str(tmp_path / "part")
        dataset.fetch_rest(server.url + name, part, dataset.Progress(1, "shards"), stop)
    assert 0 < os.path.getsize(part) < len(public[name])


@pytest.mark.parametrize("headers", [
    {"X-Linked-ETag": f'"{"ab" * 32}"'},
    {"ETag": f'"{"ef" * 32}"', "Digest": "md5=AAAA"},
], ids=lambda headers: next(iter(headers)))
def test_sha256_is_taken_from_what_hugging_face_states(headers):
    want = None if "md5=AAAA" in headers.values() else "ab" * 32
    empty = SimpleNamespace(headers={}, history=[])
    assert dataset.stated_sha256(SimpleNamespace(headers=headers, history=[empty])) == want
    linked = SimpleNamespace(headers={"X-Linked-ETag": f'"{"cd" * 32}"'}, history=[])
    assert dataset.stated_sha256(SimpleNamespace(headers=headers, history=[linked])) == "cd" * 32


def test_download_honours_retry_after(tmp_path, public, quick):
    with UnrulyServer(public, [503]) as server:
        start = time.time()
        assert dataset.download(["shard_00004.parquet"], str(tmp_path), server.url) == {}
        assert time.time() - start >= 1


@pytest.mark.parametrize("forever, words", [
    (429, "the server answered 429 Too Many Requests; next attempt in"), ("stall", "no byte of it comes"),
    ("nobody", "refused; next attempt in"), ("lock", "another download is at it")])
def test_download_says_what_it_waits_for(tmp_path, public, monkeypatch, capsys, forever, words):
    monkeypatch.setattr(dataset, "IDLE_SECONDS", 0.1)
    said, began, sleep = [], time.monotonic(), time.sleep

    def stop_soon(seconds):
        if threading.current_thread() is threading.main_thread():
            said.append(capsys.readouterr().err)
            if words in "".join(said) or time.monotonic() > began + 60:
                raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(dataset.time, "sleep", stop_soon)
    with UnrulyServer(public, forever=forever) as server, dataset.lock_file(f"{tmp_path}/held.lock"):
        url = "http://127.0.0.1:9" if forever == "nobody" else server.url
        folder = str(tmp_path / ("held" if forever == "lock" else "free"))
        with pytest.raises(KeyboardInterrupt):
            dataset.download(["shard_00001.parquet"], folder, url)
    said = "".join(said)
    assert f"waiting: {folder if forever == 'lock' else 'shard_00001.parquet'}" in said and words in said


def test_download_indexes_what_it_brought(tmp_path, public, quick):
    """... and extends that index; a stop in between leaves a folder without one, not with a wrong one."""
    names = [name[1:] for name in public]
    with UnrulyServer(public) as server:
        for some in (names[:2], names[:3], names[2:]):
            assert dataset.download(some, str(tmp_path), server.url) == {}
            index = json.loads((tmp_path / "index.json").read_bytes())
            assert list(index["shards"]) == sorted(os.listdir(tmp_path))[2:]
        os.remove(tmp_path / names[0])
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(dataset, "index_what_is_there", lambda folder: None)
        assert dataset.download(names, str(tmp_path), server.url) == {}
        monkeypatch.undo()
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_download_shared_by_two_processes_one_stopped(tmp_path, public, how):
    """Two downloaders in one folder; one is stopped midway: the other ends with all files intact."""
    val = f"/shard_{dataset.MAX_SHARD:05d}.parquet"
    files = {**public, val: public["/shard_00004.parquet"]}
    with UnrulyServer(files) as server:
        server.pace = 0.06
        command = [*DATASET, "-n", "5", "-w", "2", "--base_url", server.url]
        start = functools.partial(subprocess.Popen, [*command, "--out", tmp_path], text=True, cwd=HERE,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = start()
        while not list(tmp_path.glob("*.part")):
            time.sleep(0.01)
        second = start()
        time.sleep(0.3)
        first.send_signal(how)
        _, words = first.communicate(timeout=20)
        assert first.returncode not in (0, None)
        if how == signal.SIGINT:
            assert "the same command goes on" in words and "Traceback" not in words
        out, _ = second.communicate(timeout=200)
        assert second.returncode == 0 and "6 of 6 shards are in" in out
    assert intact(tmp_path, files) == set(files)
    assert not list(tmp_path.glob("*.part*"))


def test_download_command_lists_what_is_missing(tmp_path, public):
    """`python dataset.py -n 2`: val is fetched too; what is missing is listed; the exit status says so."""
    with UnrulyServer(public) as server:
        ended = run_command(DATASET, "-n", 2, "-w", 4, "--base_url", server.url + "/", "--out", tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "2 of 3 shards are in" in ended.stdout
    assert "missing: shard_06542.parquet" in ended.stdout and "404" in ended.stdout


# ---------------------------------------------------------------------------------------------------------
# Convert: what people have -> shards


def json_lines(texts, key="raw_content"):
    return "".join(json.dumps({"url": "x", key: text}) + "\n" for text in texts).encode()


def make_inputs(folder, texts):
    """The same texts spread over every format that convert reads."""
    os.makedirs(f"{folder}/deep", exist_ok=True)
    parts = [texts[i::8] for i in range(8)]
    zstd = pa.Codec("zstd")
    files = {
        "a.jsonl": json_lines(parts[0]), "b.json.gz": gzip.compress(json_lines(parts[1])),
        "c.json.zst": zstd.compress(json_lines(parts[2]), asbytes=True), "deep/d.jsonl.gz":
        gzip.compress(json_lines(parts[3][:5])) + gzip.compress(json_lines(parts[3][5:])),
        "e.json": json.dumps([{"raw_content": t} for t in parts[4]], indent=1).encode(),
        "f.json": b"\xef\xbb\xbf" + json_lines(parts[5]).rstrip(b"\n").replace(b"\n", b"\r\n\n"),
    }
    files |= {f"deep/{i}.txt": text.encode() for i, text in enumerate(parts[6])}
    for name, data in files.items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(data)
    table = pa.table({"n": range(len(parts[7])), "raw_content": parts[7]})
    pq.write_table(table, f"{folder}/g.parquet", row_group_size=7)


def test_convert_returns_every_document_once(tmp_path, monkeypatch):
    """All formats in, runs far smaller than the corpus: all documents come back, shuffled, val at the end."""
    texts = make_texts(1000)
    make_inputs(tmp_path / "in", texts)
    report = prepare.convert([str(tmp_path / "in")], str(tmp_path / "out"), "raw_content", workers=2,
                             shard_bytes=sum(len(t.encode()) for t in texts) // 6)
    seen = read_all(tmp_path / "out")
    assert sorted(seen) == sorted(texts) and seen != texts
    assert report["documents"] == 1000 and report["bad"] == 0
    assert report["bytes"] == sum(len(t.encode()) for t in texts)
    val, = dataset.list_shards(str(tmp_path / "out"), "val")
    assert 64 <= sum(val.rows) < 100, "lanes enough, of little text"
    assert report["shards"] == 6
    names = [f"shard_{number:05d}.parquet" for number in range(6)]
    assert sorted(os.listdir(tmp_path / "out")) == ["index.json", *names]
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_convert_tells_what_it_left_out_of_a_folder(tmp_path):
    (tmp_path / "in" / ".hidden").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl.rar", ".hidden/c.jsonl"):
        (tmp_path / "in" / name).write_bytes(json_lines(make_texts(30), "text"))
    ended = run_command(PREPARE, "convert", tmp_path / "in", "--out", tmp_path / "out", "-w", 1)
    assert "1 files -> 30 documents" in ended.stdout, ended.stderr
    assert f"2 other files in these folders were left out: {tmp_path}/in/b.jsonl.rar " in ended.stdout
    val, = dataset.list_shards(str(tmp_path / "out"), "val")
    assert sum(val.rows) >= 3, "a tenth, for the lanes of val"


def test_convert_gives_the_same_shards_for_any_number_of_workers(tmp_path):
    make_inputs(tmp_path / "in", make_texts(300))
    for workers in (1, 3):
        out = f"{tmp_path}/out{workers}"
        prepare.convert([f"{tmp_path}/in/*.json*"], out, "raw_content", workers=workers)
    assert read_all(tmp_path / "out1") == read_all(tmp_path / "out3") != []


def test_convert_in_bounded_memory_is_the_same_shuffle(tmp_path, monkeypatch, threads_for_processes):
    """Runs of 2 kB and many of them give the order that one big run gives."""
    make_inputs(tmp_path / "in", make_texts(300))
    orders, counts, gather = [], [], prepare.gather_all

    def counted(pool, building, *rest):
        counts.append(len(prepare.list_runs(building)))
        return gather(pool, building, *rest)

    monkeypatch.setattr(prepare, "gather_all", counted)
    monkeypatch.setattr(prepare, "group_files", lambda files, total: [(0, list(enumerate(files)))])
    for run_bytes in (1 << 30, 2000):
        monkeypatch.setattr(prepare, "RUN_BYTES", run_bytes)
        prepare.convert([str(tmp_path / "in")], f"{tmp_path}/{run_bytes}", "raw_content", workers=1)
        orders.append(read_all(f"{tmp_path}/{run_bytes}"))
    assert counts[0] == 1 and counts[1] > 5
    assert orders[0] == orders[1] and len(orders[0]) == 300


TORN_GZIP = gzip.compress(json_lines(make_texts(900), "text"))[:-2000]


@pytest.mark.parametrize("name, data, message, documents", [
    ("a.json.gz", TORN_GZIP, "behind line [0-9]+: torn: ", 300),
    ("a.json.gz", b"\x1f\x8bno gzip at all", "behind its beginning: torn: ", 0),
    ("a.json.zst", b"no zstd at all", "the file: torn: by its first bytes it is no .zst; type: mv ", 0),
    ("a.json.xz", lzma.compress(json_lines(["ab" * 999], "text"))[:50], "behind its beginning: torn: ", 0),
    ("a.parquet", b"PAR1 no parquet", "behind its beginning: torn: ", 0),
    ("a.jsonl", TORN_GZIP, "the file: torn: by its first bytes it is .gz; type: mv .*/a.jsonl.gz", 0),
    ("a.json", b"PAR1", "the file: torn: by its first bytes it is .parquet; type: mv ", 0),
    ("a.arrow", b"ARROW1 no arrow", "behind its beginning: torn: ", 0),
    ("a.json", b'[{"text": "a"},\n {"text": "b"', "the file: torn: not JSON .*: line 2", 0),
    ("a.json", b'[{"text": "a"},\n', "the file: torn: not JSON .*: line", 0),
    ("a.json", b'[{"text": "a"}]\n{"text": "b"}', "the file: torn: not JSON .*: line 2", 0),
    ("a.csv", b'text\n"one more"\n"never ends\n', "behind line 2: torn: unexpected end of data", 1),
    ("a.csv", b"text\ncaf\xe9\n", "behind its beginning: torn: not UTF-8 .invalid continuation byte", 0),
], ids=lambda value: value if isinstance(value, str) else "")
def test_torn_file_is_an_error_that_says_what_is_lost(
        tmp_path, threads_for_processes, name, data, message, documents):
    """... also with skip_bad; with skip_torn what could be read is kept, the rest is counted and shown."""
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(json_lines(["one", "two"], "text"))
    with pytest.raises(ValueError, match=f"{name}, {message}.*--skip_torn"):
        prepare.convert([str(tmp_path)], str(tmp_path / "out"), skip_bad=True, workers=1)
    report = prepare.convert([str(tmp_path)], str(tmp_path / "out"), skip_torn=True, workers=1)
    assert report["bad"] == 1 and re.search(message, report["shown"][0])
    seen = read_all(tmp_path / "out")
    assert {"one", "two"} <= set(seen) and len(seen) >= 2 + documents


@pytest.mark.parametrize("name, data, message", [
    ("a.jsonl", b'{"text": "fine"}\n{"text": "torn', "line 2: not JSON"),
    ("a.jsonl", b'\n\n{"txt": "x"}\n', r"line 3: no key 'text', only keys 'txt'"),
    ("a.jsonl", b'{"text": null}\n', "line 1: 'text' holds NoneType, not a string"),
    ("a.jsonl", b'{"text": "\xff"}\n', "line 1: not UTF-8"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: 'text' cannot be UTF-8"),
    ("a.jsonl", b"3\n", "line 1: no key 'text', only int"),
    ("a.json", b'[{"text": "a"},\n {"text": 3}]', "document 1: 'text' holds int"),
    ("a.txt", b"caf\xe9", "the file: not UTF-8"),
    ("a.md", b"caf\xe9", "the file: not UTF-8"),
    ("a.csv", b"n,txt\n1,x\n", r"line 1: no column 'text', only \['n', 'txt'\]; add --text_key COLUMN"),
    ("a.tsv", b"n\ttext\n1\n", "line 2: 'text' holds NoneType"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_document_is_an_error_with_file_and_line(tmp_path, threads_for_processes, name, data, message):
    """... and with skip_bad it is counted and shown, and the others are kept."""
    (tmp_path / name).write_bytes(data)
    with open(tmp_path / "good.jsonl", "wb") as file:
        file.write(json_lines(["one", "two"], "text"))
    with pytest.raises(ValueError, match=f"{name}, {message}.*--skip_bad") as error:
        prepare.convert([str(tmp_path)], str(tmp_path / "out"), workers=1)
    assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == sorted([name, "good.jsonl"]), "an error leaves nothing behind"
    report = prepare.convert([str(tmp_path)], str(tmp_path / "out"), skip_bad=True, workers=1)
    assert report["bad"] == 1 and re.search(message, report["shown"][0])
    assert {"one", "two"} <= set(read_all(tmp_path / "out"))


def test_killed_convert_leaves_no_shards_and_the_same_command_starts_over(tmp_path):
    """SIGKILL midway: nothing under the output folder; run again, everything is there."""
    texts = make_texts(400)
    make_inputs(tmp_path / "in", texts)
    arguments = ["convert", f"{tmp_path}/in/**", "--text_key", "raw_content", "--out", f"{tmp_path}/out",
                 "-w", "1"]
    stuck = "import time; from dev import prepare; prepare.gather_all = lambda *_: time.sleep(99);"
    process = subprocess.Popen([sys.executable, "-c", stuck + "prepare.main()", *arguments], cwd=HERE,
                               stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.convert-*/runs/*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait(timeout=10)
    assert not (tmp_path / "out").exists()
    ended = run_command(PREPARE, *arguments)
    assert ended.returncode == 0 and "400 documents" in ended.stdout, ended.stderr
    assert sorted(read_all(tmp_path / "out")) == sorted(texts)
    ended = run_command(PREPARE, *arguments)
    assert ended.returncode == 1 and "is not empty" in ended.stderr and "Traceback" not in ended.stderr


def test_convert_splits_long_documents_into_small_row_groups(monkeypatch):
    """A row group ends at 1,024 documents or at ROW_GROUP_BYTES; one longer document has one of its own."""
    monkeypatch.setattr(prepare, "ROW_GROUP_BYTES", 1000)
    lengths = np.array([600, 600, 5000, *[1] * 30, 9])
    groups = list(prepare.plan_row_groups(lengths, rows=20))
    assert [b - a for a, b in groups] == [1, 1, 1, 20, 11]
    assert [i for a, b in groups for i in range(a, b)] == list(range(34))


def test_one_long_document_is_not_val(tmp_path, threads_for_processes):
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text("short " * (20_000 if i == 7 else 1))
    for seed in range(30):
        prepare.convert([str(tmp_path / "*.txt")], str(tmp_path / "out"), seed=seed, workers=1)
        val, = dataset.list_shards(str(tmp_path / "out"), "val")
        assert sum(val.rows) == 10 and max(len(text) for text in val.read(0).to_pylist()) < 10
        shutil.rmtree(tmp_path / "out")


def test_every_kind_of_file_converts(tmp_path, threads_for_processes):
    """csv, tsv, md, feather, Arrow's file and stream, byte order marks, Spark's and Hugging Face's."""
    texts = [f"{text}, a \"quoted\" line\nand one more" for text in make_texts(8)]
    texts[:2] = [text.replace("\0", "") for text in texts[:2]]    # which csv of Python 3.10 does not write
    (tmp_path / "in").mkdir()
    for number, (name, delimiter) in enumerate([("a.csv", ","), ("b.tsv.gz", "\t")]):
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / "in" / name, "wt", encoding="utf-8-sig", newline="") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerows([["n", "text"], [1, texts[number]]])
    (tmp_path / "in" / "c.md").write_text(texts[2], encoding="utf-8-sig")
    kinds = [("d.feather", pa.ipc.new_file), ("e.arrow", pa.ipc.new_file), ("f.arrow", pa.ipc.new_stream)]
    for (name, opened), text in zip(kinds, texts[3:6], strict=True):
        table = pa.table({"text": pa.array([text], pa.large_string()), "n": [1]})
        with opened(str(tmp_path / "in" / name), table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "in" / "state.json").write_text('{"_fingerprint": "0"}')
    (tmp_path / "in" / "_SUCCESS").write_text("")
    for part, some in enumerate([texts[6:8], []]):
        table = pa.table({"text": pa.array(some, pa.string())})
        pq.write_table(table, tmp_path / "in" / f"part-0000{part}-4a5f.c000.snappy.parquet")
    report = prepare.convert([str(tmp_path / "in")], str(tmp_path / "out"), workers=1)
    assert sorted(read_all(tmp_path / "out")) == sorted(texts) and report["files"] == 8
    assert [file.name for file in report["others"]] == ["_SUCCESS", "state.json"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.json", "a.txt", "a.txt.gz", "a.csv"])
def test_no_more_than_the_longest_document_is_read_at_once(tmp_path, monkeypatch, name):
    """A line or file of 10 GB, a few MB as gzip, is named and does not fill the memory."""
    monkeypatch.setattr(prepare, "LONGEST_DOCUMENT", 1000)
    first = {"json": b'[{"text": "', "jsonl": b'{"text": "one"}\n', "csv": b"text\none\n"}
    content = first.get(name.split(".")[1], b"") + b"a" * 2_000_000
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    tracemalloc.start()
    file = prepare.Input(str(tmp_path), name, os.path.getsize(tmp_path / name))
    made = list(prepare.documents_of(file, "text"))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert [text for _, text, _ in made] == [b"one", None][name.split(".")[1] not in ("jsonl", "csv"):]
    assert re.search("line [23] has over|over .* in one piece", made[-1][2])


MARKED = ["a.txt", "a.md", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"]


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("cut_bytes", [None, 4])
def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path, name, cut_bytes):
    kind = name.partition(".")[2]
    content = {"txt": "one", "md": "one", "csv": "text\none\n", "tsv": "n\ttext\n1\tone\n",
               "json": '[{"text": "one"}]'}.get(kind, '{"text": "one"}\n').encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    file = prepare.Input(str(tmp_path), name, os.path.getsize(tmp_path / name))
    made = prepare.documents_of(file, "text", cut_bytes)
    assert [(text, problem) for _, text, problem in made] == [(b"one", None)]


def test_a_text_file_is_cut_when_asked(tmp_path, threads_for_processes):
    """At blank lines, else at line ends, else at spaces, else within no character; not a byte is lost."""
    text = "\n\n".join(make_texts(40)) + "ä" * 5000
    (tmp_path / "input.txt").write_text(text, encoding="utf-8-sig", newline="")
    prepare.convert([str(tmp_path / "input.txt")], str(tmp_path / "out"), cut_bytes=1001, workers=1)
    with open(tmp_path / "input.txt", "rb") as file:
        parts = [part for _, part, _ in prepare.text_documents(file, 1001)]
    assert b"".join(parts) == text.encode() and max(map(len, parts)) <= 1001
    assert sorted(part.decode() for part in parts) == sorted(read_all(tmp_path / "out"))
    assert sum(part.endswith(b"\n\n") for part in parts) > 2


def test_convert_and_tokenize_on_a_cluster(tmp_path, byte_tokenizer):
    """The same shards as on one machine, though a worker is killed on the way."""
    distributed = pytest.importorskip("distributed")
    make_inputs(tmp_path / "in", make_texts(300))
    convert = functools.partial(prepare.convert, [str(tmp_path / "in")], text_key="raw_content", workers=2)
    convert(f"{tmp_path}/alone")
    n = prepare.tokenize(f"{tmp_path}/alone", f"{tmp_path}/alone_tokens")
    with (distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
          cluster.get_client() as client):
        victim, executor = next(iter(cluster.workers.values())).pid, SlowExecutor(client)
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
        convert(f"{tmp_path}/out", executor=executor)
        assert group_of(victim) is None
        assert prepare.tokenize(f"{tmp_path}/out", f"{tmp_path}/tokens", executor=executor, at_once=3) == n
    assert read_all(tmp_path / "out") == read_all(tmp_path / "alone") != []
    assert read_all(tmp_path / "tokens") == read_all(tmp_path / "alone_tokens") != []


def test_a_lost_scheduler_leaves_nothing(tmp_path):
    """It is killed while tasks are under way: an error that says so, and no folder, whole or half."""
    pytest.importorskip("distributed")
    make_inputs(tmp_path / "in", make_texts(300))
    known = tmp_path / "scheduler.json"
    start = functools.partial(subprocess.Popen, stderr=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": HERE})
    scheduler = start([sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1",
                       "--port", "0", "--no-dashboard", "--scheduler-file", known])
    while not known.exists() or not known.read_text():
        assert scheduler.poll() is None
        time.sleep(0.05)
    address = json.loads(known.read_text())["address"]
    worker = start([sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
                    "--no-nanny", "--no-dashboard", "--death-timeout", "1", "--local-directory", tmp_path])
    try:
        with (pytest.raises(OSError, match=f"the scheduler at {address} was lost"),
              prepare.dask_executor(address) as (executor, _)):
            tasks = []

            def submit(function, item):
                tasks.append(item)
                if len(tasks) == 4:
                    scheduler.kill()
                return executor.submit(slow_task, function, item)

            prepare.convert([str(tmp_path / "in")], str(tmp_path / "out"), "raw_content",
                            executor=SimpleNamespace(submit=submit), workers=2)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait(timeout=10)
    assert len(tasks) >= 4 and sorted(name for name in os.listdir(tmp_path) if "dask" not in name) == [
        "in", "scheduler.json"]


class SlowExecutor:
    """Tasks that last a while, so that something can happen to them."""

    def __init__(self, client):
        self.executor = client.get_executor()

    def submit(self, function, item):
        return self.executor.submit(slow_task, function, item)


def slow_task(function, item):
    time.sleep(0.05)
    return function(item)


def test_folders_are_entered_once_and_must_be_readable(tmp_path, threads_for_processes):
    """A loop of links multiplies no document; a folder that cannot be read is an error."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.jsonl").write_bytes(json_lines(make_texts(20), "text"))
    os.symlink("..", tmp_path / "in" / "deep" / "loop")
    report = prepare.convert([str(tmp_path / "in")], str(tmp_path / "out"), workers=1)
    assert report["documents"] == 20
    real, refuse = os.scandir, str(tmp_path / "in" / "deep")

    def scandir(path):
        if str(path) == refuse:
            raise PermissionError(13, "Permission denied", refuse)
        return real(path)

    with pytest.MonkeyPatch.context() as patch:    # root may read everything
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(PermissionError, match="deep"):
            prepare.convert([str(tmp_path / "in")], str(tmp_path / "out2"), workers=1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_of_convert_end_with_it(tmp_path, how):
    """Killed or stopped midway: within seconds no worker is left, and the next run works."""
    (tmp_path / "in").mkdir()
    for i in range(4):
        (tmp_path / "in" / f"{i}.jsonl").write_bytes(json_lines(["some text " * 50] * 40_000, "text"))
    arguments = ["convert", f"{tmp_path}/in", "--out", f"{tmp_path}/out", "-w", "2"]
    process = subprocess.Popen([*PREPARE, *arguments], cwd=HERE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    while not list(tmp_path.glob("out.convert-*/runs/*")):
        assert process.poll() is None
        time.sleep(0.01)
    children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and group_of(pid) == process.pid]
    assert len(children) >= 3
    while not all(ignores_ctrl_c(pid) for pid in children if pid != process.pid):    # one may still import
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how) if how == signal.SIGKILL else os.killpg(process.pid, how)
    _, words = process.communicate(timeout=200)
    deadline = time.time() + 20
    while [pid for pid in children if group_of(pid) == process.pid]:
        assert time.time() < deadline, "workers live on"
        time.sleep(0.05)
    if how == signal.SIGINT:
        assert "Traceback" not in words and "stopped" in words, words
        assert sorted(os.listdir(tmp_path)) == ["in"]
    ended = run_command(PREPARE, *arguments)
    assert "160,000 documents" in ended.stdout, ended.stderr
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def ignores_ctrl_c(pid):
    with open(f"/proc/{pid}/status") as file:
        ignored = next(line.split()[1] for line in file if line.startswith("SigIgn"))
    return int(ignored, 16) >> signal.SIGINT - 1 & 1


def group_of(pid):
    """Of a process that lives."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, _, group = file.read().rpartition(")")[2].split()[:3]
        return int(group) if state != "Z" else None


@pytest.mark.parametrize("inputs, message", [
    (["nothing*.jsonl"], "no such files; expected .jsonl, .json"),
    (["a.pdf"], "cannot convert a.pdf.*a line .\"text"),
    (["http://127.0.0.1:9/a.jsonl"], "fetch it first"), (["one.txt"], "1 documents are too few"),
])
def test_convert_says_what_it_cannot_take(tmp_path, monkeypatch, threads_for_processes, inputs, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.pdf", "one.txt"):
        (tmp_path / name).write_text("a,b")
    with pytest.raises(ValueError, match=message):
        prepare.convert(inputs, "out", workers=1)


# ---------------------------------------------------------------------------------------------------------
# Shapes: what lies on people's disks works, or one line names a route that works


def in_parquet(*names, key="text", kind=None, beside=(), **options):
    """The texts spread over parquet files of these names; beside them what is no shard."""
    def make(folder, texts):
        for name in (*names, *beside):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("no shard")
        for i, name in enumerate(names):
            part = pa.array(texts[i::len(names)], kind or pa.string())
            pq.write_table(pa.table({"n": range(len(part)), key: part}), folder / name, **options)
        return folder
    return make


def in_column(kind, value_of):
    """Two parquet files with a column `text` that holds no strings."""
    def make(folder, texts):
        for i in range(2):
            part = pa.array(map(value_of, texts[i::2]), kind)
            pq.write_table(pa.table({"text": part}), folder / f"{i}.parquet")
        return folder
    return make


def in_file(name, data_of, given=None):
    """One file of the bytes that data_of makes; given: what is named in its place."""
    def make(folder, texts):
        (folder / name).write_bytes(data_of(texts))
        return folder / (name if given is None else given)
    return make


def in_files(*suffixes):
    """A file for each text, in folders in folders."""
    def make(folder, texts):
        for i, text in enumerate(texts):
            (folder / f"{i % 3}" / "deep").mkdir(parents=True, exist_ok=True)
            (folder / f"{i % 3}/deep/{i:06d}{suffixes[i % len(suffixes)]}").write_bytes(text.encode())
        return folder
    return make


def in_archive(name, how):
    """WebDataset's and others': a file for each text and one about each."""
    def make(folder, texts):
        in_files(".txt")(folder / "in", texts)
        (folder / "in" / "0" / "deep" / "000000.cls").write_text("7")
        shutil.make_archive(folder / name.partition(".")[0], how, folder / "in")
        return folder / name
    return make


def in_links(folder, texts):
    """Hugging Face's cache: links to blobs."""
    in_parquet("blobs/0a", "blobs/1b")(folder, texts)
    (folder / "main" / "data").mkdir(parents=True)
    for i, blob in enumerate(("0a", "1b")):
        os.symlink(f"../../blobs/{blob}", folder / f"main/data/train-0000{i}-of-00002.parquet")
    os.symlink("main", folder / "link")
    return folder / "link"


def in_parquet_of_two_schemas(folder, texts):
    in_parquet("a.parquet", row_group_size=4)(folder, texts[:20])
    more = {"text": pa.array(texts[20:], pa.large_string()), "more": texts[20:]}
    pq.write_table(pa.table(more), folder / "b.parquet")
    return folder


def in_encrypted_parquet(folder, texts):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def wrap_key(self, key, master):
            return key.hex()

    config = encryption.EncryptionConfiguration(footer_key="key", column_keys={"key": ["text"]})
    keys = encryption.CryptoFactory(lambda config: Keys())
    properties = keys.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    return in_parquet("a.parquet", "b.parquet", encryption_properties=properties)(folder, texts)


def arrow(opened, **options):
    def data_of(texts):
        sink, table = pa.BufferOutputStream(), pa.table({"text": pa.array(texts, pa.large_string())})
        with opened(sink, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=7)
        return sink.getvalue().to_pybytes()
    return data_of


def saved_to_disk(folder, texts):
    """Hugging Face's DatasetDict.save_to_disk: Arrow streams, and JSON about them."""
    for split, some in (("train", texts), ("test", ["never", "trained on"])):
        (folder / split).mkdir()
        for i in range(2):
            data = arrow(pa.ipc.new_stream)(some[i::2])
            (folder / f"{split}/data-0000{i}-of-00002.arrow").write_bytes(data)
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        (folder / name).write_text('{"splits": ["train"]}')
    return folder


def separated(delimiter, header="n text", encoding="utf-8"):
    def data_of(texts):
        sink = io.StringIO(newline="")
        rows = csv.writer(sink, delimiter=delimiter)
        rows.writerows([header.split()] * bool(header))
        rows.writerows(enumerate(texts))
        return sink.getvalue().encode(encoding)
    return data_of


def packed(codec, key="text"):
    return lambda texts: pa.Codec(codec).compress(json_lines(texts, key), asbytes=True)


def lines(texts):
    return json_lines(texts, "text")


def as_json(value_of):
    return lambda texts: json.dumps(value_of(texts)).encode()


def one_text(encoding="utf-8"):
    return lambda texts: "\n\n".join(texts).encode(encoding)


TWO = ("a.parquet", "b.parquet")
CONVERT, KEY, BY_HAND = "python -m dev.prepare convert ", "--text_key ", 'a line {"text": "..."}'
SHAPES = {    # what lies there: (how it is made, None where --data takes it, else a part of the line)
    "pandas": (in_parquet(*TWO, kind=pa.large_string()), None),
    "Polars": (in_parquet(*TWO, kind=pa.large_string(), compression="zstd"), None),
    "Polars, partitioned": (in_parquet("y=0/00000000.parquet", "y=1/00000000.parquet"), None),
    "DuckDB, a file a thread": (in_parquet("data_0.parquet", "data_1.parquet", use_dictionary=False), None),
    "Spark": (in_parquet("part-00000-8f3e-c000.snappy.parquet", "part-00001-8f3e-c000.snappy.parquet",
                         beside=["_SUCCESS", "._SUCCESS.crc", ".part-00000-8f3e.snappy.parquet.crc"]), None),
    "Hive partitions": (in_parquet("year=2024/month=1/p.parquet", "year=2024/month=2/p.parquet",
                                   beside=["_temporary/0/x.parquet"]), None),
    "Dask": (in_parquet("part.0.parquet", "part.1.parquet", beside=["_metadata", "_common_metadata"]), None),
    "Ray Data": (in_parquet("1_000000_000000.parquet", "1_000001_000000.parquet"), None),
    "Hugging Face": (in_parquet("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
                                beside=["README.md", ".gitattributes", ".cache/x.parquet"]), None),
    "Hugging Face, splits": (in_parquet("train-0-of-1.parquet", "validation-0-of-1.parquet"), None),
    "Hugging Face, its own conversion": (in_parquet("x/train/0.parquet", "x/validation/0.parquet"), None),
    "Hugging Face, its cache": (in_links, None),
    "FineWeb": (in_parquet("sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"), None),
    "string": (in_parquet(*TWO), None),
    "large_string": (in_parquet(*TWO, kind=pa.large_string()), None),
    "string_view": (in_parquet(*TWO, kind=pa.string_view()), None),
    "dictionary": (in_parquet(*TWO, kind=pa.dictionary(pa.int32(), pa.string())), None),
    "two schemas": (in_parquet_of_two_schemas, None),
    "one huge row group": (in_parquet(*TWO, row_group_size=10**9), None),
    "many files of one row group": (in_parquet(*(f"{i}.parquet" for i in range(12))), None),
    "compression none": (in_parquet(*TWO, compression="none"), None),
    "compression snappy": (in_parquet(*TWO, compression="snappy"), None),
    "compression gzip": (in_parquet(*TWO, compression="gzip"), None),
    "compression brotli": (in_parquet(*TWO, compression="brotli"), None),
    "compression lz4": (in_parquet(*TWO, compression="lz4"), None),
    "compression zstd": (in_parquet(*TWO, compression="zstd"), None),
    "data pages of version 2": (in_parquet(*TWO, data_page_version="2.0"), None),
    "delta encoding": (in_parquet(*TWO, use_dictionary=False,
                                  column_encoding={"text": "DELTA_BYTE_ARRAY", "n": "PLAIN"}), None),
    "binary": (in_parquet(*TWO, kind=pa.binary()), CONVERT),
    "a column of another name": (in_parquet(*TWO, key="raw text"), KEY + "'raw text'"),
    "a list of strings": (in_column(pa.list_(pa.string()), lambda text: [text]), BY_HAND),
    "a struct": (in_column(pa.struct([("a", pa.string())]), lambda text: {"a": text}), BY_HAND),
    "a column of nulls": (in_column(pa.null(), lambda text: None), BY_HAND),
    "encrypted": (in_encrypted_parquet, "write it again without encryption"),
    "Delta Lake": (in_parquet(*TWO, beside=["_delta_log/00000000000000000000.json"]), BY_HAND),
    "Iceberg": (in_parquet("data/a.parquet", "data/b.parquet", beside=["metadata/1.metadata.json"]), BY_HAND),
    "one parquet file": (in_parquet("a.parquet"), CONVERT),
    "no rows": (lambda folder, texts: in_parquet(*TWO)(folder, []), "no documents in"),
    "an empty folder": (lambda folder, texts: folder, "get some with"),
    "a folder of .jsonl": (in_file("a.jsonl", lines, given=""), CONVERT),
    "parquet named .pq": (in_parquet("a.pq", "b.pq"), CONVERT),
}
CONVERTED = {    # the same for what convert is given
    "one parquet file": (in_parquet("a.parquet"), None),
    "binary": (in_parquet(*TWO, kind=pa.binary()), None),
    "parquet named .pq": (lambda *made: in_parquet("a.pq")(*made) / "a.pq", None),
    "parquet without suffix": (lambda *made: in_parquet("0a1b")(*made) / "0a1b", "mv "),
    "JSON lines": (in_file("a.jsonl", lines), None), ".ndjson": (in_file("a.ndjson", lines), None),
    "JSON array": (in_file("a.json", as_json(lambda texts: [{"text": text} for text in texts])), None),
    "gzip": (in_file("a.jsonl.gz", packed("gzip")), None),
    "zstd": (in_file("a.jsonl.zst", packed("zstd")), None),
    "bz2": (in_file("a.jsonl.bz2", lambda texts: b"".join(bz2.compress(lines([a])) for a in texts)), None),
    "xz": (in_file("a.jsonl.xz", lambda texts: b"".join(lzma.compress(lines([a])) for a in texts)), None),
    "lz4": (in_file("a.jsonl.lz4", packed("lz4")), None),
    "another key": (in_file("a.jsonl", lambda texts: json_lines(texts, "raw text")), KEY + "COLUMN"),
    "pandas' to_json": (in_file("a.json", as_json(lambda texts: {"text": dict(enumerate(texts))})), BY_HAND),
    "messages of a chat": (in_file("a.jsonl", as_json(lambda texts: {"text": [texts]})), BY_HAND),
    "csv": (in_file("a.csv", separated(",")), None), "tsv": (in_file("a.tsv", separated("\t")), None),
    "csv of Excel": (in_file("a.csv", separated(",", encoding="utf-8-sig")), None),
    "csv of semicolons": (in_file("a.csv", separated(";")), "a first line that names the columns"),
    "csv without names": (in_file("a.csv", separated(",", header="")), "a first line that names the columns"),
    "csv of Latin-1": (in_file("a.csv", separated(",", encoding="latin-1")), "iconv -f LATIN1 "),
    "text in folders": (in_files(".txt", ".md"), None),
    "text of Latin-1": (in_file("a.txt", one_text("latin-1")), "iconv -f LATIN1 "),
    "text of UTF-16": (in_file("a.txt", one_text("utf-16")), "iconv -f UTF-16 "),
    "one long text": (in_file("input.txt", one_text()), "--cut_bytes "),
    "sources": (in_file("a.py", one_text()), "mv "), "no suffix": (in_file("README", one_text()), "mv "),
    "Feather": (in_file("a.feather", arrow(pa.ipc.new_file)), None),
    "Feather, compressed": (in_file("a.feather", arrow(
        pa.ipc.new_file, options=pa.ipc.IpcWriteOptions(compression="lz4"))), None),
    "Arrow file": (in_file("a.arrow", arrow(pa.ipc.new_file)), None),
    "Arrow stream": (in_file("a.arrow", arrow(pa.ipc.new_stream)), None),
    "save_to_disk": (saved_to_disk, None),
    "WebDataset": (in_archive("000000.tar", "tar"), "tarfile -e"),
    "tar.gz": (in_archive("a.tar.gz", "gztar"), "tarfile -e"),
    "zip": (in_archive("a.zip", "zip"), "zipfile -e"),
    "Delta Lake": (in_parquet(*TWO, beside=["_delta_log/00000000000000000000.json"]), BY_HAND),
    "a folder of tars": (lambda *made: in_archive("t/a.tar", "tar")(*made).parent, "tarfile -e"),
    "parquet named .json": (lambda *made: in_parquet("a.json")(*made) / "a.json", "mv "),
    "gzip named .jsonl": (in_file("a.jsonl", packed("gzip")), "mv "),
    "lines named .gz": (in_file("a.jsonl.gz", lines), "mv "),
    "nanoGPT's .bin": (in_file("train.bin", lambda texts: np.arange(999, dtype="<u2").tobytes()), BY_HAND),
    "PDF": (in_file("a.pdf", lambda texts: b"%PDF-1.7 \0"), BY_HAND),
    "HTML": (in_file("a.html", one_text()), "mv "),
    "ORC": (in_file("a.orc", lambda texts: b"ORC\0"), BY_HAND),
    "a workbook": (in_file("a.xlsx", lambda texts: b"PK\x03\x04"), BY_HAND),
    "an empty folder": (lambda folder, texts: folder, "no such files; expected .jsonl"),
}


def words_in(texts):
    return sorted(" ".join(texts).split())


def convert_line(arguments):
    """The line that `python -m dev.prepare convert ...` ends with; None where it gave shards."""
    try:
        prepare.main(["convert", *arguments])
    except SystemExit as end:
        return end.code
    return None


def follow(line, given, folder, texts):
    """Do what a line says: type its command, add its flag, or make .jsonl; -> (line of convert, its file)"""
    flags = []
    if typed := re.search(r"type: (.+?)(?:, or keep| \(of other|$)", line):
        command, _, behind = typed[1].partition(" && ")
        subprocess.run(command.replace("python", sys.executable), shell=True, check=True)
        given = shlex.split(behind or command)[-1]
    elif shards := re.search(r"python -m dev\.prepare convert ([^;]+)", line):
        given, *flags = shlex.split(shards[1])
    elif "iconv" in line:
        with open(given, encoding="latin-1") as file:
            given = str(folder / f"utf8-{os.path.basename(given)}")
            with open(given, "w", encoding="utf-8") as utf8:
                utf8.write(file.read())
    elif "add --cut_bytes" in line or "add --text_key COLUMN; mend" in line:
        flags = re.search(r"add (--\w+ \w+)", line)[1].split()
    else:
        given = str(folder / "mine.jsonl")
        with open(given, "wb") as file:
            file.write(lines(texts))
    return convert_line([given, *(flag.replace("COLUMN", "raw text") for flag in flags)]), given


@pytest.mark.parametrize("command, shape", [*(("data", shape) for shape in SHAPES),
                                            *(("convert", shape) for shape in CONVERTED)])
def test_what_lies_there_works_or_one_line_names_what_does(
        tmp_path, monkeypatch, threads_for_processes, command, shape):
    """... and what the line names gives every document, whatever it takes: at most three such lines."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "it's base"))
    folder, texts = tmp_path / "it's in", [f"{i} caf\xe9 " + "word " * (i % 9) for i in range(30)]
    folder.mkdir()
    make, expected = (SHAPES if command == "data" else CONVERTED)[shape]
    given = str(make(folder, texts))
    try:
        line = words_in(read_all(given)) == words_in(texts) if command == "data" else convert_line([given])
    except (OSError, ValueError) as error:
        line = str(error)
    if expected is None:
        assert line in (None, True)
    else:
        assert expected in line
    for _ in range(3):
        if isinstance(line, str):
            assert "\n" not in line and len(line) < 700
            line, given = follow(line, given, folder, texts)
    assert line is True or words_in(read_all(dataset.find_data())) == words_in(texts)


def test_of_several_versions_in_hugging_faces_cache_the_newest_is_named(tmp_path):
    for i, version in enumerate(("b1", "a2")):
        make_shards(tmp_path / "snapshots" / version / "data")
        os.utime(tmp_path / "snapshots" / version, (i, i))
    assert dataset.list_shards(str(tmp_path), "train"), "a folder of that name is no cache yet"
    (tmp_path / "refs").mkdir()
    for read in (dataset.list_shards, lambda folder, split: prepare.find_inputs([folder])):
        with pytest.raises(ValueError, match=r"holds 2 versions of a dataset; name one: .*/snapshots/a2$"):
            read(str(tmp_path), "train")
        read(str(tmp_path / "snapshots" / "a2"), "train")


# ---------------------------------------------------------------------------------------------------------
# Remote: the same documents over HTTP, S3 and fsspec


@pytest.fixture(scope="module")
def s3_server():
    """moto's S3 server on 127.0.0.1; `every` = k makes each k-th read of a shard break off halfway."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    state = SimpleNamespace(every=0, reads=0, failed=0, requests=[])

    def flaky(environ, start_response):
        body, is_shard = app(environ, start_response), environ["PATH_INFO"].endswith(".parquet")
        state.requests += [environ["REQUEST_METHOD"]] * is_shard
        if environ["REQUEST_METHOD"] == "GET" and is_shard:
            state.reads += 1
            if state.every and state.reads % state.every == 0:
                state.failed += 1
                return (piece[: len(piece) // 2] for piece in body)  # shorter than its Content-Length
        return body

    patch = pytest.MonkeyPatch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        patch.setenv(name, "true")
    server = make_server("127.0.0.1", 0, flaky, threaded=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.query = f"?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{server.server_port}"
    state.fs, _ = pa.fs.FileSystem.from_uri(f"s3://bucket/{state.query}&allow_bucket_creation=true")
    state.fs.create_dir("bucket")
    yield state
    server.shutdown()
    patch.undo()


@pytest.fixture
def s3(s3_server):
    s3_server.every = s3_server.reads = s3_server.failed = 0
    s3_server.requests = []
    return s3_server


def upload(fs, folder, to):
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            data = file.read()
        with fs.open_output_stream(f"{to}/{name}", compression=None) as out:
            out.write(data)


def test_s3_gives_the_same_documents_also_when_reads_fail(tmp_path, s3, quick):
    """Listing, sizes and documents are those on disk; every third read breaks off and is tried again."""
    texts = make_shards(tmp_path)
    upload(s3.fs, tmp_path, "bucket/data/a")
    uri = f"s3://bucket/data/a{s3.query}"
    for split in ("train", "val"):
        near, far = dataset.list_shards(str(tmp_path), split), dataset.list_shards(uri, split)
        assert [(s.name, s.size) for s in near] == [(s.name, s.size) for s in far]
    s3.every = 3
    assert read_all(uri) == texts
    assert s3.failed >= 3
    path = dataset.list_shards(uri, "train")[0].path
    assert path == f"s3://bucket/data/a/shard_00000.parquet{s3.query}"


def test_loader_on_s3_gives_the_rows_of_the_disk(tmp_path, s3, quick):
    """A PackedLoader on s3://, where every fifth read breaks off, over more than an epoch."""
    from dataloader import PackedLoader

    make_shards(tmp_path)
    upload(s3.fs, tmp_path, "bucket/rows")
    s3.every, seen = 5, []
    for where in (str(tmp_path), f"s3://bucket/rows{s3.query}"):
        loader = PackedLoader(PlainTokenizer(), 2, 256, "train", packing="exactfit", buffer_size=8,
                              data_dir=where, num_lanes=2, rank=0, world_size=1)
        batches = [next(loader)[0].tolist() for _ in range(40)]
        (standing, *_), = [list(lane.values()) for lane in list(loader.state_dict()["lanes"].values())[:1]]
        assert standing["next"][0] > 1, "the corpus is too big: no epoch ended"
        loader.close()
        seen.append(batches)
    assert seen[0] == seen[1] and s3.failed >= 3


def test_s3_inputs_convert(tmp_path, s3, threads_for_processes):
    """A bucket's folder or glob -> shards on disk."""
    texts = make_texts(200)
    make_inputs(tmp_path / "in", texts)
    for name in ("a.jsonl", "b.json.gz", "c.json.zst"):
        with s3.fs.open_output_stream(f"bucket/raw/{name}", compression=None) as out:
            out.write((tmp_path / "in" / name).read_bytes())
    want = sorted(texts[0::8] + texts[1::8] + texts[2::8])
    for number, pattern in enumerate(["bucket/raw", "bucket/raw/*.json*", "bucket/ra*"]):
        prepare.convert([f"s3://{pattern}{s3.query}"], f"{tmp_path}/{number}", "raw_content", workers=1)
        assert sorted(read_all(tmp_path / str(number))) == want


def test_http_index_gives_the_same_documents(tmp_path, impatient):
    """data_dir may be the URL of an index.json; dropped connections, stalls and 503 are tried again."""
    texts = make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    files = {f"/d/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    faults = [None, None, "cut", 500, None, "stall", None, "cut"]
    with UnrulyServer(files, faults) as server:
        assert read_all(f"{server.url}/d/index.json") == texts
        assert not server.faults
        ranges = [asked for path, asked in server.requests if path.endswith(".parquet")]
        assert len(ranges) > 5 and all(ranges), "a whole shard was fetched"
        server.files["/d/index.json"] = b"shard_00000.parquet 1925\n"
        with pytest.raises(ValueError, match=r"d/index.json is no index of shards .*python dataset.py index"):
            dataset.list_shards(f"{server.url}/d/index.json", "train")


def test_remote_shard_that_stays_away_is_an_error(tmp_path, quick, monkeypatch):
    """After ATTEMPTS the error names shard, row group and command."""
    monkeypatch.setattr(dataset, "ATTEMPTS", 3)
    make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    files = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with UnrulyServer(files) as server:
        shard = dataset.list_shards(f"{server.url}/index.json", "train")[0]
        assert shard.rows
        server.forever, server.requests[:] = 500, []
        with pytest.raises(dataset.ShardError, match=r"00000.parquet, row group 1: .*500.*--data http"):
            shard.read(1)
        assert len(server.requests) == 3


def test_busy_server_is_waited_for_longer_than_a_broken_one(tmp_path, quick, monkeypatch):
    """More answers of 429 and 503 than ATTEMPTS; Retry-After is honoured; in the end it is an error."""
    texts = make_shards(tmp_path)
    dataset.write_index(str(tmp_path))
    files = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with UnrulyServer(files, [429]) as server:
        began = time.monotonic()
        shard = dataset.list_shards(f"{server.url}/index.json", "train")[0]
        assert time.monotonic() - began >= 1, "its Retry-After"
        server.retry_after, server.faults = "", [429, 503] * dataset.ATTEMPTS
        assert shard.read(0).to_pylist() == texts[:8] and not server.faults
        monkeypatch.setattr(dataset, "BUSY_SECONDS", 0.1)
        server.forever = 429
        with pytest.raises(dataset.ShardError, match="answered 429"):
            shard.read(1)


def test_no_more_requests_than_the_cap_are_in_flight(tmp_path, quick, monkeypatch):
    """32 threads, a cap of 3; every third answer is 429 or 503, some are cut: the documents are the same."""
    texts = make_shards(tmp_path, counts=(120, 12))
    dataset.write_index(str(tmp_path))
    files = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    get, under_way, most = dataset.http_get, [], []

    def counted_get(*arguments):
        under_way.append(1)
        most.append(len(under_way))
        try:
            return get(*arguments)
        finally:
            under_way.pop()

    monkeypatch.setattr(dataset, "http_get", counted_get)
    monkeypatch.setattr(dataset, "REQUESTS_AT_ONCE", 3)
    dataset.requests_in_flight.cache_clear()
    with UnrulyServer(files) as server, ThreadPoolExecutor(32) as pool:
        server.retry_after, server.pace = "", 0.005
        server.faults = [{0: 429, 5: 503}.get(i % 6, "cut" if i % 10 == 7 else None) for i in range(60)]
        shard = dataset.list_shards(f"{server.url}/index.json", "train")[0]
        seen = pool.map(shard.read, range(15))
        assert [text for array in seen for text in array.to_pylist()] == texts[:120]
        assert max(most) == 3
    monkeypatch.undo()
    dataset.requests_in_flight.cache_clear()


@pytest.mark.parametrize("kind", ["text", "tokens", "others"])
def test_a_row_group_is_at_most_two_requests(tmp_path, s3, quick, byte_tokenizer, kind):
    """... once its footer is known, which is two, or three; also of others' shards of several columns."""
    texts = make_shards(tmp_path / "text", counts=(400, 8), rows=200)
    if kind == "others":
        for number, part in enumerate((texts[:400], texts[400:])):
            table = pa.table({"n": range(len(part)), "text": part, "more": part})
            pq.write_table(table, tmp_path / "text" / f"shard_0000{number}.parquet", row_group_size=200)
    if kind == "tokens":
        prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    folder = tmp_path / ("tokens" if kind == "tokens" else "text")
    files = served(folder)
    upload(s3.fs, folder, f"bucket/requests/{kind}")
    with UnrulyServer(files) as server:
        for place in (f"{server.url}/index.json", f"s3://bucket/requests/{kind}{s3.query}"):
            shard = dataset.list_shards(place, "train")[0]
            for row_group, most in enumerate((5, 2)):
                s3.requests[:], server.requests[:] = [], []
                shard.read(row_group)
                assert 0 < len(server.requests) + len(s3.requests) <= most, (server.requests, s3.requests)


def served(folder):
    """The shards of a folder as a web server has them, with their index."""
    dataset.write_index(str(folder))
    return {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}


def test_a_cache_holds_whole_shards_that_are_fetched_once(tmp_path, quick):
    """By 8 threads and 2 loaders; a damaged copy is fetched again, a file of others is left alone."""
    texts, cache = make_shards(tmp_path / "far"), str(tmp_path / "cache")
    os.makedirs(cache)
    (tmp_path / "cache" / "mine.parquet").write_text("mine")
    with UnrulyServer(served(tmp_path / "far")) as server, ThreadPoolExecutor(8) as pool:
        url, server.retry_after, faults = f"{server.url}/index.json", "", ["cut", 503]
        for _ in range(2):
            shards = dataset.list_shards(url, "train", cache) + dataset.list_shards(url, "val", cache)
            places = [(shard, i) for shard in shards for i in range(len(shard.rows))]
            server.faults, faults = faults, []
            seen = pool.map(lambda place: place[0].read(place[1]).to_pylist(), places)
            assert [text for documents in seen for text in documents] == texts
        assert sum(path != "/index.json" for path, _ in server.requests) == len(shards) + 2, "the failed ones"
        copies = [name for name in os.listdir(cache) if dataset.COPY.fullmatch(name)]
        assert len(copies) == 3 and not [name for name in copies if name.endswith(".part")]
        with open(f"{cache}/{copies[0]}", "r+b") as file:
            file.truncate(100)
        with open(f"{cache}/{copies[1]}", "r+b") as file:
            file.write(bytes(500))
        seen = [text for shard, i in places for text in shard.read(i).to_pylist()]
        assert seen == texts
    assert (tmp_path / "cache" / "mine.parquet").read_text() == "mine"
    assert dataset.list_shards(str(tmp_path / "far"), "train", cache)[0].cache is None


def test_a_cache_is_bounded_and_drops_what_was_not_used_for_the_longest_time(tmp_path, quick, monkeypatch):
    make_shards(tmp_path / "far", counts=(8, 8, 8, 8, 8))
    with UnrulyServer(served(tmp_path / "far")) as server:
        shards = dataset.list_shards(f"{server.url}/index.json", "train", str(tmp_path / "cache"))
        sizes = [shard.file_size for shard in shards]
        monkeypatch.setattr(dataset, "CACHE_BYTES", sum(sizes[:3]) + max(sizes) - min(sizes))

        def read(number):
            shards[number].read(0)
            names = [name for name in os.listdir(tmp_path / "cache") if dataset.COPY.fullmatch(name)]
            assert sum(os.path.getsize(tmp_path / "cache" / name) for name in names) <= dataset.CACHE_BYTES
            return {int(name[-13:-8]) for name in names}

        for number in (0, 1, 2, 0):
            read(number)
        left = read(3)
        assert {0, 3} <= left and 1 not in left
        before = len(server.requests)
        read(0)
        assert len(server.requests) == before
        monkeypatch.setattr(dataset, "CACHE_BYTES", 1)
        with pytest.raises(dataset.ShardError, match=r"--cache .*cache has no room for a shard of"):
            shards[1].read(0)


def test_fsspec_opens_what_pyarrow_cannot(tmp_path, quick):
    """Any fsspec file system works (memory:// here); an unknown scheme is a clear error."""
    fsspec = pytest.importorskip("fsspec")
    texts = make_shards(tmp_path)
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/nanoloader-test/", recursive=True)
    assert read_all("memory://nanoloader-test") == texts
    with pytest.raises(ValueError, match=r"cannot open nope://x/y: pyarrow says: .*install fsspec"):
        dataset.list_shards("nope://x/y", "train")


# ---------------------------------------------------------------------------------------------------------
# Tokenize, verify, stats, and the command line


@pytest.fixture
def byte_tokenizer(monkeypatch):
    """get_tokenizer() gives the ByteTokenizer."""
    made = ByteTokenizer()
    monkeypatch.setattr(prepare, "get_tokenizer", lambda folder=None: made)
    return made


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_token_shards_mirror_text_shards(tmp_path, byte_tokenizer, compression):
    """Same names, row groups, rows, nulls, fingerprint sizes; BOS before each document, little-endian."""
    texts = make_shards(tmp_path / "text")
    texts[-1], texts[-2] = None, ""
    last = [pa.array(texts[80:86]), pa.array(texts[86:])]
    dataset.write_shard(f"{tmp_path}/text/shard_00002.parquet", last)
    n = prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"), compression=compression)
    assert n == sum(1 + len(text.encode()) for text in texts if text is not None)
    for split in ("train", "val"):
        both = [dataset.list_shards(f"{tmp_path}/{kind}", split) for kind in ("text", "tokens")]
        for text, tokens in zip(*both, strict=True):
            assert (text.name, text.size, text.rows) == (tokens.name, tokens.size, tokens.rows)
            assert tokens.kind == "tokens" and tokens.dtype == "<u2" and tokens.fingerprint == "bytes"
    seen = read_all(tmp_path / "tokens")
    ids = [None if raw is None else np.frombuffer(raw, "<u2").tolist() for raw in seen]
    assert ids == [None if text is None else [256, *text.encode()] for text in texts]


def test_tokenize_goes_on_where_it_was_stopped(tmp_path, byte_tokenizer, monkeypatch):
    """Stopped midway, the folder is refused; the same call keeps what is done; another tokenizer: refused."""
    make_shards(tmp_path / "text")
    text, out = str(tmp_path / "text"), str(tmp_path / "out")
    total = prepare.tokenize(text, str(tmp_path / "whole"))
    real, calls = byte_tokenizer.encode_documents, []
    monkeypatch.setattr(ByteTokenizer, "encode_documents", lambda self, texts: calls.append(1) or real(texts))
    monkeypatch.setattr(dataset, "sync", lambda path: 1 / 0 if "00002" in path else None)
    with pytest.raises(ZeroDivisionError):
        prepare.tokenize(text, out, threads=1)
    assert sorted(os.listdir(out)) == ["shard_00000.parquet", "shard_00001.parquet"]
    with pytest.raises(ValueError, match=r"no index\.json stands beside .*let `.* tokenize` end"):
        dataset.list_shards(out, "val")
    monkeypatch.undo()
    monkeypatch.setattr(prepare, "get_tokenizer", lambda folder=None: byte_tokenizer)
    before = os.stat(f"{out}/shard_00000.parquet").st_mtime_ns
    assert prepare.tokenize(text, out) == total
    assert os.stat(f"{out}/shard_00000.parquet").st_mtime_ns == before
    monkeypatch.setattr(ByteTokenizer, "fingerprint", lambda self: "another")
    with pytest.raises(ValueError, match="made of other text or by another tokenizer"):
        prepare.tokenize(text, out)
    with pytest.raises(ValueError, match="holds tokens already"):
        prepare.tokenize(out, str(tmp_path / "twice"))
    with pytest.raises(ValueError, match="is the folder of the text"):
        prepare.tokenize(text, f"{tmp_path}/out/../text")


def test_verify_finds_damage_and_exits_non_zero(tmp_path):
    """A table with nulls counted; a flipped byte: DAMAGED, what to type next, exit status 1."""
    make_shards(tmp_path)
    dataset.write_shard(f"{tmp_path}/shard_00003.parquet", [pa.array(["a", None, None], pa.string())])
    ended = run_command(PREPARE, "verify", "--data", tmp_path)
    assert ended.returncode == 0 and "4 of 4 shards intact, 95 documents, 2 null" in ended.stdout
    data = bytearray((tmp_path / "shard_00001.parquet").read_bytes())
    data[len(data) // 3] ^= 4
    (tmp_path / "shard_00001.parquet").write_bytes(data)
    ended = run_command(PREPARE, "verify", "--data", tmp_path)
    assert ended.returncode == 1 and ended.stderr == ""
    assert re.search(r"shard_00001.parquet +DAMAGED .*row group", ended.stdout)
    assert "3 of 4 shards intact" in ended.stdout
    assert f"next: rm {tmp_path}/shard_00001.parquet\n" in ended.stdout


def test_verify_advises_to_remove_only_what_is_proven_damaged(tmp_path, capsys, monkeypatch, quick):
    """Not a sound file with another column, nor one that is not ours to read, missing, new, or far away."""
    folder = tmp_path / "it's here"
    make_shards(folder, counts=(8, 8, 8, 8))
    dataset.write_index(str(folder))
    pq.write_table(pa.table({"raw": ["sound"]}), folder / "shard_00000.parquet")
    (folder / "shard_00001.parquet").unlink()
    damaged = bytearray((folder / "shard_00002.parquet").read_bytes())
    damaged[len(damaged) // 3] ^= 4
    (folder / "shard_00002.parquet").write_bytes(damaged)
    real = dataset.open_file

    def open_file(folder, name, size):
        if "00003" in name:
            raise PermissionError(13, "Permission denied")
        return real(folder, name, size)

    monkeypatch.setattr(dataset, "open_file", open_file)
    assert not prepare.verify(str(folder))
    words = capsys.readouterr().out
    assert re.search("00000.parquet +PROBLEM .*no column `text`, only 'raw'", words)
    assert re.search(r"00001.parquet +PROBLEM +it is in index.json, but not there", words)
    assert re.search("00002.parquet +DAMAGED .*row group 0", words) and "0 of 4 shards intact" in words
    assert re.search("00003.parquet +PROBLEM .*Permission denied", words)
    advice = f"next: rm {shlex.quote(f'{folder}/shard_00002.parquet')}\n"
    assert words.count("next: rm") == words.count(advice) == 1
    monkeypatch.undo()
    make_shards(folder, counts=(8, 8, 8, 8))
    shutil.copy(folder / "shard_00000.parquet", folder / "shard_00004.parquet")
    assert not prepare.verify(str(folder))
    words = capsys.readouterr().out
    assert "4 of 5 shards intact" in words and "next: rm" not in words
    assert re.search("00004.parquet +PROBLEM +it is not what index.json says; .*dataset.py index", words)
    dataset.write_index(str(folder))
    assert prepare.verify(str(folder)) and capsys.readouterr()
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files["/shard_00002.parquet"] = bytes(len(files["/shard_00002.parquet"]))
    with UnrulyServer(files) as server:
        assert not prepare.verify(f"{server.url}/index.json")
    words = capsys.readouterr().out
    assert re.search("00002.parquet +PROBLEM ", words) and "rm" not in words


def test_verify_does_not_advise_to_remove_what_is_encrypted_or_huge(tmp_path, capsys):
    in_encrypted_parquet(tmp_path, ["a", "b"])
    data = pa.DictionaryArray.from_arrays(pa.array([0] * 6000, pa.int32()), pa.array(["a" * 10**5]))
    pq.write_table(pa.table({"text": data}), tmp_path / "huge.parquet", compression="zstd")
    assert not prepare.verify(str(tmp_path))
    words = capsys.readouterr().out
    assert words.count("PROBLEM") == 3 and "DAMAGED" not in words and "next: rm" not in words


def test_verify_checks_the_sha256_of_downloads(tmp_path, capsys):
    """A foreign shard has no checksum of its documents; what was downloaded is checked by SHA-256."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"], "more": [1, 2]}), path)
    (tmp_path / "SHA256SUMS").write_text(f"{dataset.sha256_of(path)}  a.parquet\n")
    assert prepare.verify(str(tmp_path)) and "SHA-256" in capsys.readouterr().out
    pq.write_table(pa.table({"text": ["one", "two"], "more": [1, 3]}), path)
    assert not prepare.verify(str(tmp_path))
    (tmp_path / "SHA256SUMS").write_text("0123  a.parquet\n")
    with pytest.raises(ValueError, match=r"SHA256SUMS, line 1: expected `SHA-256  name`, saw '0123"):
        prepare.verify(str(tmp_path))


def test_stats_counts_documents_bytes_tokens_and_lanes(tmp_path, byte_tokenizer, capsys):
    texts = make_shards(tmp_path / "text")
    prepare.stats(str(tmp_path / "text"))
    size = sum(len(text.encode()) for text in texts[:80])
    words = capsys.readouterr().out
    assert re.search(rf"train +2 +10 +80 +0 +{size / 1e6:.1f}  about", words)
    assert re.search(r"val +2 to 2 row groups a shard; at most 12 lanes, and up to 2 that share no", words)
    prepare.tokenize(str(tmp_path / "text"), str(tmp_path / "tokens"))
    prepare.stats(str(tmp_path / "tokens"))
    assert f"  {size + 80:,}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command, arguments, status, message", [
    (DATASET, "", 0, "python dataset.py -n 8"), (DATASET, "--help", 0, "COMMAND"),
    (DATASET, "foo", 2, "invalid choice: 'foo'"), (PREPARE, "foo", 2, "invalid choice: 'foo'"),
    (DATASET, "-n 0", 1, "error: -n 0 -w 4: expected how many train shards"),
    (DATASET, "-n 2 -w 0", 1, "and how many downloads at once, at least 1"),
    (DATASET, "-n many", 2, "invalid int value"), (PREPARE, "--help", 0, "python -m dev.prepare convert"),
    (PREPARE, "verify --data /does/not/exist", 1,
     "error: no parquet files in /does/not/exist; get some with"),
    (PREPARE, "convert nothing.jsonl", 1, "error: nothing.jsonl: no such files"),
    (PREPARE, "convert x --out s3://b/x", 1, "error: cannot write to s3://b/x"),
])
def test_command_line_errors_are_one_glad_line(tmp_path, command, arguments, status, message):
    ended = run_command(command, *arguments.split(), NANOLOADER_BASE_DIR=str(tmp_path))
    assert ended.returncode == status and message in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert status != 1 or ended.stderr.count("\n") == 1


def test_nothing_needs_what_windows_has_not(tmp_path):
    make_shards(tmp_path)
    code = """if True:
        import sys
        sys.modules["resource"] = sys.modules["fcntl"] = None
        import train, dataset
        from dev import bench, prepare
        shards = dataset.list_shards(sys.argv[1], "train")
        train.os.path.exists = lambda path: False
        print(train.peak_memory("cpu"), len(shards))
    """
    assert run_command([sys.executable, "-c", code], tmp_path).stdout == "0 2\n"


# ---------------------------------------------------------------------------------------------------------
# The tokenizer

R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
          r"|\s*[\r\n]|\s+(?!\S)|\s")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
OTHER = r"(?:\p{L}| )+|\s|[^\p{L} ]"  # spaces glue words together: no cut of ours is safe in it
TRICKY = ("aZsdtlv' \t\n\r.,!/-_{\"12\x00\x1c\u00e9\u017f\u00a0\u2003\u3000\u0085\u2028"
          "\u0301\u0e31\u094d\ufe0f\u309b\u0915\u0436\u0664\u00b2\u3007\u3005\u4dc0\U0001f600"
          "\u6f22\u3042\u30a2\u30fc\u30fb\u3001\u3002\uff0c\uff01")
tricky_text = st.text(TRICKY, max_size=100) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@cache
def standard_library():
    paths = sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py")))
    return [open(path, encoding="utf-8", newline="").read() for path in paths]


@cache
def small_trained():
    trained = rustbpe.Tokenizer()
    texts, merges = iter(standard_library()[:60]), 1024 - len(SPECIAL_TOKENS)
    trained.train_from_iterator(texts, merges, pattern=SPLIT_PATTERN)
    return trained


@cache
def small_tokenizer(pattern=SPLIT_PATTERN):
    if pattern == SPLIT_PATTERN:
        return RustBPETokenizer.train_from_iterator(iter(standard_library()[:60]), 1024)
    enc = small_tokenizer().enc
    return RustBPETokenizer(build_encoding(pattern, enc._mergeable_ranks, enc._special_tokens), "<|bos|>")


@cache
def pair_tokenizer(pattern=SPLIT_PATTERN):
    """Any two bytes merge, in random order: a cut inside a token shows, which it may not with few merges."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    random.Random(0).shuffle(pairs)
    ranks = {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *pairs])}
    return RustBPETokenizer(build_encoding(pattern, ranks, {"<|bos|>": len(ranks)}), "<|bos|>")


def plain_ids(tok, text):
    """The oracle: the shared Encoding on the whole text, BOS in front."""
    return [tok.get_bos_token_id(), *tok.enc.encode_ordinary(text)]


def one_document(tok, text):
    return tok.encode_documents([text])[0].tolist()


def test_ids_are_rustbpe_s_own():
    """256 bytes and the merges in rustbpe's order, then the special tokens in nanochat's."""
    tok, trained = small_tokenizer(), small_trained()
    assert tok.get_vocab_size() == 1024
    assert [tok.encode_special(name) for name in SPECIAL_TOKENS] == list(range(1024 - 9, 1024))
    assert tok.get_special_tokens() == set(SPECIAL_TOKENS) and tok.get_bos_token_id() == 1015
    for text in standard_library()[60:90]:
        assert tok.encode(text) == trained.encode(text)
        assert tok.decode(tok.encode(text)) == text
    assert tok.id_to_token(tok.encode("a")[0]) == "a" and tok.id_to_token(1015) == "<|bos|>"


@settings(max_examples=100)
@given(st.lists(tricky_text, max_size=40), st.sampled_from([None, 0, "<|bos|>"]), st.integers(1, 3))
def test_encode_is_nanochat_s(texts, prepend, threads):
    """A list gives what its texts give one by one, in order, at any number of threads."""
    tok = small_tokenizer()
    front = {None: [], 0: [0], "<|bos|>": [1015]}[prepend]
    want = [[*front, *tok.enc.encode_ordinary(text), 7] for text in texts]
    assert tok.encode(texts, prepend, 7, threads) == want
    assert [tok(text, prepend=prepend, append=7) for text in texts] == want


def test_encode_refuses_what_is_no_text():
    with pytest.raises(ValueError, match=r"tuple: expected a str or a list of str"):
        small_tokenizer().encode(("a",))
    with pytest.raises(KeyError, match=r"special ones are .*bos"):
        small_tokenizer().encode_special("<|nothing|>")


def test_documents_of_every_kind_in_one_chunk():
    """str, bytes and memoryview give the same ids; an empty document is a BOS, a null one has no tokens."""
    tok, text = small_tokenizer(), standard_library()[3][:5000] + "é漢😀"
    data = text.encode()
    texts = [text, None, "", data, b"", memoryview(data).cast("b"), None]
    ids, bounds = tok.encode_documents(texts)
    whole = plain_ids(tok, text)
    assert ids.tolist() == [*whole, 1015, *whole, 1015, *whole]
    n = len(whole)
    assert bounds.tolist() == [0, n, n, n + 1, 2 * n + 1, 2 * n + 2, 3 * n + 2, 3 * n + 2]
    assert ids.dtype == tok.dtype == np.uint16 and bounds.dtype == np.int64
    for kind in pa.string(), pa.large_string(), pa.binary(), pa.large_binary():
        array = pa.array([None if piece is None else text[:len(piece)] for piece in texts], kind).slice(1)
        same, _ = tok.encode_documents(array)
        assert same.tolist() == tok.encode_documents(array.cast(pa.string()).to_pylist())[0].tolist()
    for nothing in [], [None], [None, None]:
        ids, bounds = tok.encode_documents(nothing)
        assert ids.tolist() == [] and bounds.tolist() == [0] * (len(nothing) + 1) and ids.dtype == tok.dtype


def test_big_vocabularies_are_uint32():
    tok = small_tokenizer()
    special = {**tok.enc._special_tokens, "<|far|>": 65536}
    tok = RustBPETokenizer(build_encoding(SPLIT_PATTERN, tok.enc._mergeable_ranks, special), "<|far|>")
    assert tok.encode_documents(["a"])[0].tolist() == [65536, 97] and tok.dtype == np.uint32


@pytest.mark.parametrize("pattern", [SPLIT_PATTERN, R50K, CL100K, O200K, OTHER])
def test_ids_are_tiktoken_s_on_real_text(pattern):
    tok = small_tokenizer(pattern)
    texts = [text for text in standard_library() if len(text.encode()) <= LONGEST_PIECE]
    texts = random.Random(0).sample(texts, 40)
    ids, bounds = tok.encode_documents(texts)
    for i, text in enumerate(texts):
        assert ids[bounds[i]:bounds[i + 1]].tolist() == plain_ids(tok, text)


def safe_pieces(data):
    """Cut at every place that CUT allows."""
    cuts = cuts_of(data)
    return [data[a:b].decode() for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def cuts_of(data):
    return sorted({found.end() for i in range(len(data)) if (found := NEXT_CUT.match(data, i))})


@pytest.mark.parametrize("pattern", [SPLIT_PATTERN, R50K, CL100K, O200K])
def test_cuts_are_where_tokens_end(pattern):
    """Cut at every place that CUT allows, tricky random text gives the tokens of the whole."""
    enc, choose, n_pieces = pair_tokenizer(pattern).enc, random.Random(0), 0
    for _ in range(300):
        text = "".join(choose.choices(TRICKY + "    aas\u6f22\u3001", k=400))
        pieces = safe_pieces(text.encode())
        n_pieces += len(pieces)
        assert [i for piece in pieces for i in enc.encode_ordinary(piece)] == enc.encode_ordinary(text)
        data, place, done = text.encode(), choose.randrange(len(text)), choose.randrange(len(text))
        begin, end = safe_cuts_around(data, max(place, done), done)
        assert done <= begin <= max(place, done) < end <= len(data)
        assert begin in {done, *cuts_of(data)} and end in {len(data), *cuts_of(data)}
    assert n_pieces > 10_000, "hardly a cut: this tested nothing"


@pytest.mark.parametrize("pattern", [SPLIT_PATTERN, R50K])
def test_no_character_breaks_a_cut(pattern):
    """Every character, on either side of every kind of cut: no space missed, no mark taken for a letter."""
    enc = pair_tokenizer(pattern).enc
    characters = [chr(i) for i in range(0x10000) if not 0xD800 <= i < 0xE000]
    for chunk in (characters[i::3] for i in range(3)):
        text = "".join(f"{c}  {c}b{c}1{c}\u6f22{c}\u3001\u6f22{c}\u3002" for c in chunk)
        pieces = safe_pieces(text.encode())
        assert len(pieces) > 0.5 * len(chunk), "hardly a cut: this tested nothing"
        assert [i for piece in pieces for i in enc.encode_ordinary(piece)] == enc.encode_ordinary(text)


@cache
def exact_pair_engine():
    return TiktokenEngine(pair_tokenizer().enc, pair_tokenizer().bos_token_id)


@settings(max_examples=100)
@given(st.lists(tricky_text, max_size=4))
def test_pieces_give_the_whole(texts):
    """With pieces so small that every text has many, also where no cut is safe: str and bytes alike."""
    tok, text = pair_tokenizer(), " ".join(texts) * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LONGEST_PIECE", 50)
        whole = one_document(tok, text)
        assert tok.decode(whole[1:]) == text
        assert one_document(tok, text.encode()) == whole
        patch.setattr(tok, "_engine", (exact_pair_engine(), ""))
        assert one_document(tok, text) == whole


HOSTILE = ["a", "A", "1", "!", "=", "\n", " ", "\t", "\0", "'", "/", "é", "漢", "😀", "\u0301", "\u00a0",
           "\u2003", " \t\u00a0\u2003", " \n", "\r\n", "aA", "'s", ".\n", "1a", "a,", "<|bos|>",
           " " * 999 + "\n", "\ud800"]


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_documents(unit):
    """Megabytes of one character or two: no crash, nothing lost, and no more than linear time."""
    tok, n = small_tokenizer(), 1_500_000 // len(unit)
    started = time.process_time()
    ids = one_document(tok, unit * n)
    took = time.process_time() - started
    assert ids[0] == 1015 and 1015 not in ids[1:]
    assert tok.decode(ids[1:]) == (unit * n).replace("\ud800", "\ufffd")
    assert took < 30, "quadratic time would be minutes"


def test_up_to_the_threshold_tokens_are_tiktoken_s():
    """A run of 256 KiB is not cut; tiktoken itself fails on a million spaces."""
    tok = small_tokenizer()
    assert LONGEST_PIECE == 256 << 10
    for unit in " ", "a", "\n", "é":
        text = unit * (LONGEST_PIECE // len(unit.encode()))
        assert one_document(tok, text) == plain_ids(tok, text)
    with pytest.raises(BaseException, match=r"StackOverflow|stack size"):
        tok.enc.encode_ordinary(" " * 1_000_000 + "a")


def test_training_survives_hostile_documents():
    texts = [None, "", " " * 1_500_000 + "a", "\ud800", "ab" * 10_000]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tok = RustBPETokenizer.train_from_iterator(iter(texts), 300)
    assert tok.decode(tok.encode("ab c")) == "ab c"


def test_lone_surrogates_count_as_replacement_characters():
    """As in tiktoken; two halves of a pair are the character."""
    tok = small_tokenizer()
    for text in "a\ud800b", "\udc00", "\ud83d\ude00", "x" * 300_000 + "\ud800 y":
        assert one_document(tok, text)[1:] == tok.encode(text)
        assert one_document(tok, text) == plain_ids(tok, text)


@pytest.mark.parametrize("bad", [b"\xff", b"abc\xe6\xbc", b"\xed\xa0\x80", b"x" * 300_000 + b" \xc0",
                                 b"\x80" * 600_000, b"\xe6a\xbc\xa2"],
                         ids=["ff", "torn", "surrogate", "at the end", "600 kB", "ASCII in its midst"])
def test_bytes_that_are_no_text_are_an_error(bad):
    with pytest.raises(ValueError, match=r"document 2 of 4 in this chunk is not UTF-8: .*byte 0x"):
        small_tokenizer().encode_documents(["a", None, bad, b"b"])


def test_each_thread_has_its_own_encoding(monkeypatch):
    """Shared by nobody, built once, and the ids do not depend on the thread."""
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")
    tok, seen, together = RustBPETokenizer(small_tokenizer().enc, "<|bos|>"), [], threading.Barrier(3)
    local = tok._engine[0].local

    def work():
        first = one_document(tok, standard_library()[0])
        mine = local.enc
        together.wait()
        assert one_document(tok, standard_library()[0]) == first and local.enc is mine
        seen.append((mine, first))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert len({id(enc) for enc, _ in seen} | {id(tok.enc)}) == 4
    assert all(ids == plain_ids(tok, standard_library()[0]) for _, ids in seen)


needs_gigatoken = pytest.mark.skipif(
    importlib.util.find_spec("gigatoken") is None or os.environ.get("NANOLOADER_ENGINE") == "tiktoken",
    reason="gigatoken is not installed, or left out")
SCHEMED = [SPLIT_PATTERN, R50K, CL100K, O200K]


@cache
def engines(pattern):
    tok = small_tokenizer(pattern)
    return GigatokenEngine(tok.enc, 1015), TiktokenEngine(tok.enc, 1015)


def assert_same_ids(pattern, texts):
    """By both engines, and as tiktoken encodes the text as it is."""
    fast, exact = engines(pattern)
    pieces = [text.encode() for text in texts]
    (ids, bounds), (want, want_bounds) = fast.encode(pieces), exact.encode(pieces)
    for i, piece in enumerate(pieces):
        mine, theirs = ids[bounds[i]:bounds[i + 1]], want[want_bounds[i]:want_bounds[i + 1]]
        assert mine.tolist() == theirs.tolist(), piece
    assert bounds.tolist() == want_bounds.tolist() and not fast.failures


@needs_gigatoken
@pytest.mark.parametrize("pattern", SCHEMED)
def test_both_engines_give_the_same_ids_of_hard_texts(pattern):
    draw = random.Random(1)
    for characters in HARD, HARD + ODD, ["1", "2", "0", "a", " "], ["1", "\u0664", "\xb2", "."]:
        texts = ["".join(draw.choices(characters, k=draw.randint(0, 40))) for _ in range(1000)]
        assert_same_ids(pattern, texts)


@needs_gigatoken
@settings(max_examples=300)
@given(st.sampled_from(SCHEMED), st.lists(tricky_text, max_size=10))
def test_both_engines_give_the_same_ids_of_drawn_texts(pattern, texts):
    assert_same_ids(pattern, texts)


@needs_gigatoken
@pytest.mark.parametrize("pattern", SCHEMED)
def test_both_engines_agree_on_every_character(pattern):
    """Of the many of China and Korea, and of those to come, on every 50th; also on new ones of Unicode 17."""
    many = [range(0x3400, 0x9FFF), range(0xAC00, 0xD7A3), range(0xE000, 0xF900), range(0x17000, 0x18B00),
            range(0x20000, 0x110000)]
    codes = {0x88F, 0xC5C, 0xCDC, 0x10940, 0x10EC5, 0x11DB0, 0x33479, *range(0, 0x110000, 50)}
    for code in range(0x20000):
        if unicodedata.category(chr(code)) != "Cn" and not any(code in block for block in many):
            codes.add(code)
    texts = [f"a{c}a 1{c}1 {c}{c}'s{c}. {c}\n{c}" for c in map(chr, sorted(codes - {*range(0xD800, 0xE000)}))]
    for i in range(0, len(texts), 10_000):
        assert_same_ids(pattern, texts[i:i + 10_000])


@needs_gigatoken
def test_the_engine_is_told(monkeypatch):
    enc = small_tokenizer().enc

    def told():
        return RustBPETokenizer(enc, "<|bos|>").engine

    assert re.fullmatch(r"gigatoken [\d.]+, checked against tiktoken", told())
    other = small_tokenizer(OTHER)
    assert re.fullmatch(r"tiktoken [\d.]+ \(gigatoken does not know this split pattern\)", other.engine)
    monkeypatch.setattr(GigatokenEngine, "call", lambda self, data: 1 / 0)
    assert re.search(r"^tiktoken .*gigatoken .* is not used: ZeroDivisionError", told())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install gigatoken" in told()
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")
    assert re.fullmatch(r"tiktoken [\d.]+, as NANOLOADER_ENGINE says", told())
    monkeypatch.setenv("NANOLOADER_ENGINE", "rust")
    with pytest.raises(ValueError, match="expected tiktoken or gigatoken"):
        told()


@needs_gigatoken
def test_an_engine_with_other_ids_is_refused(monkeypatch):
    call = GigatokenEngine.call

    def wrong(self, data):
        ids = call(self, data)
        ids[ids == 300] = 301
        return ids

    monkeypatch.setattr(GigatokenEngine, "call", wrong)
    tok = RustBPETokenizer(small_tokenizer().enc, "<|bos|>")
    assert "is not used: it encodes" in tok.engine and tok.engine.startswith("tiktoken")
    assert one_document(tok, standard_library()[0]) == plain_ids(tok, standard_library()[0])


@needs_gigatoken
def test_one_wrong_id_in_10_000_documents_is_found(monkeypatch):
    """Where both engines encode the document that has it."""
    tok = RustBPETokenizer(small_tokenizer().enc, "<|bos|>")
    texts = [None, *(f"document {i} has text" for i in range(10_000))]
    want, bounds = tok.encode_documents(texts, check=range(0, 10_000, 100))
    call = GigatokenEngine.call

    def wrong(self, data):
        ids = call(self, data)
        ids[np.flatnonzero(ids == tok.enc.n_vocab)[1234:1235] + 2] += 1    # of the document at 1,235
        return ids

    monkeypatch.setattr(GigatokenEngine, "call", wrong)
    ids, _ = tok.encode_documents(texts, check=range(0, 10_000, 100))
    at = bounds[1235] + 2
    assert np.flatnonzero(ids != want).tolist() == [at], "no stub"
    told = rf"document 1235 of 10001 .*, token 2: gigatoken .* \[{want[at] + 1}\], tiktoken \[{want[at]}\]"
    with pytest.raises(ValueError, match=told):
        tok.encode_documents(texts, check=[0, 1235])


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception either."""


class FragileModel:
    """A gigatoken that only one thread may call at a time, that panics of poison, and never recovers."""

    def __init__(self, model, source):
        self.model, self.source = model, source
        self.lock, self.may_go_on = threading.Lock(), threading.Event()

    def encode_batch_padded(self, data, *args, **kwargs):
        assert self.lock.acquire(blocking=False), "two threads called one model, or one that had panicked"
        if b"poison" in data:
            raise Panic("index out of bounds")
        if b"slow" in data:
            assert self.may_go_on.wait(60)
        ids = self.model.encode_batch_padded(self.source(data), *args, **kwargs)
        self.lock.release()
        return ids


@pytest.fixture
def fragile(monkeypatch):
    """A tokenizer of FragileModels, and the list of those that it made."""
    tok, made, make = RustBPETokenizer(small_tokenizer().enc, "<|bos|>"), [], GigatokenEngine.make_model
    module = pytest.importorskip("gigatoken")
    source = module.BytesSource
    monkeypatch.setattr(module, "BytesSource", bytes)
    monkeypatch.setattr(GigatokenEngine, "make_model",
                        lambda self: made.append(FragileModel(make(self), source)) or made[-1])
    return tok, made


@needs_gigatoken
def test_what_the_engine_fails_on_is_tiktoken_s_and_counted(fragile, monkeypatch):
    tok, made = fragile
    assert tok.engine_failures == 0 and len(made) == 1
    texts = ["a b", "poison 12", "c \u0664", "", tokenizer_module.BETWEEN.decode(), "poison \u0664"]
    ids, bounds = tok.encode_documents(texts, check=range(6))
    assert ids.tolist() == [i for text in texts for i in plain_ids(tok, text)] and len(bounds) == 7
    assert tok.engine_failures == 3 and "Panic: index out of bounds" in tok._engine[0].failures

    def interrupt(self, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(GigatokenEngine, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tok.encode_documents(texts)


@needs_gigatoken
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_two_threads_use_one_model_and_a_fork_none_that_is_in_use(fragile):
    """The others would wait for it; and in a fork it stays locked for ever."""
    tok, made = fragile
    texts = [text[i:i + 500] for text in standard_library()[:20] for i in range(0, 5000, 500)] * 5
    want = [plain_ids(tok, text) for text in texts]
    assert [one_document(tok, text) for text in texts[:9]] == want[:9] and len(made) == 1
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(lambda text: one_document(tok, text), texts)) == want
        assert len(made) <= 4
        slow = executor.submit(one_document, tok, "slow")
        while not any(model.lock.locked() for model in made):
            time.sleep(0.01)
        assert holds_in_a_fork(lambda: one_document(tok, texts[0]) == want[0] and tok.engine_failures == 0)
        for model in made:
            model.may_go_on.set()
        assert slow.result() == plain_ids(tok, "slow")
    assert tok.engine_failures == 0, tok._engine[0].failures


@needs_gigatoken
def test_words_are_forgotten(monkeypatch):
    """gigatoken's memory of words has no bound of its own."""
    tok, made = RustBPETokenizer(small_tokenizer().enc, "<|bos|>"), []
    assert tok.engine.startswith("gigatoken")
    make = GigatokenEngine.make_model
    monkeypatch.setattr(tokenizer_module, "FORGET_AFTER", 10_000)
    monkeypatch.setattr(GigatokenEngine, "make_model", lambda self: made.append(1) or make(self))
    for _ in range(10):
        assert one_document(tok, "a b c " * 1000) == plain_ids(tok, "a b c " * 1000)
    assert 4 <= len(made) <= 6


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_pair_digits_as_its_docstring_says(dtype):
    """The digits are the ids 50 to 59; 45 is no token."""
    pairs = np.arange(100) + 1000
    pairs[45] = -1

    def paired(*ids):
        return tokenizer_module.pair_digits(np.array(ids, dtype), 50, pairs).tolist()

    assert paired(51, 52, 53, 9, 51, 52, 53, 54) == [1012, 53, 9, 1012, 1034]
    assert paired(54, 55, 51, 52, 53) == [54, 55, 1012, 53]
    assert paired(51, 52, 60, 51, 49, 59, 50) == [1012, 60, 51, 49, 1090]
    assert paired(*[51] * 5) == [1011, 1011, 51] and paired(51, 52, 7, 51, 52) == [1012, 7, 1012]
    for few in [], [51], [9], [51, 9, 51]:
        assert paired(*few) == few


def test_a_huge_document_is_shared_by_the_threads_of_an_executor(monkeypatch):
    """Also where all of them do the same: nobody waits for one that has not begun."""
    monkeypatch.setattr(tokenizer_module, "BYTES_PER_TASK", 1 << 20)
    tok = small_tokenizer()
    huge = "\n".join(standard_library())[:6 << 20]
    texts = ["a", huge, None, "b c", " " * (3 * LONGEST_PIECE)]
    want, want_bounds = tok.encode_documents(texts)
    threads, encode, deadline = set(), type(tok._engine[0]).encode, time.monotonic() + 20

    def seen(self, pieces):
        threads.add(threading.get_ident())
        while len(threads) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        return encode(self, pieces)

    with ThreadPoolExecutor(3) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "cores", lambda: 4)
        patch.setattr(type(tok._engine[0]), "encode", seen)
        ids, bounds = tok.encode_documents(texts, executor=executor)
        assert ids.tolist() == want.tolist() and bounds.tolist() == want_bounds.tolist() and len(threads) > 1
        jobs = [executor.submit(tok.encode_documents, texts, executor=executor) for _ in range(3)]
        assert all(job.result(60)[0].tolist() == want.tolist() for job in jobs), "a deadlock"
        bad = [executor.submit(tok.encode_documents, [huge, b"\xff"], executor=executor) for _ in range(3)]
        for job in bad:
            with pytest.raises(ValueError, match="document 1 of 2"):
                job.result(60)


def test_a_tokenizer_is_copied_without_its_threads():
    tok = small_tokenizer()
    tok.encode(["a", "b"] * 20, num_threads=2)
    same = RustBPETokenizer.from_dict(tok.as_dict())
    for copy in copy_module.deepcopy(tok), pickle.loads(pickle.dumps(tok)), same:
        assert copy.fingerprint() == tok.fingerprint() and copy.encode("a b 12") == tok.encode("a b 12")
    assert json.loads(json.dumps(tok.as_dict())) == tok.as_dict()
    with pytest.raises(ValueError, match="was changed"):
        RustBPETokenizer.from_dict({**tok.as_dict(), "bos_token": "<|user_end|>"})


def test_executor_lives_on_and_starts_no_more_threads_than_asked_for():
    tok = RustBPETokenizer(small_tokenizer().enc, "<|bos|>")
    for _ in range(5):
        tok.encode(standard_library()[:100], num_threads=2)
    assert 1 <= len(tok.executor._threads) < 5, "one more a call: 5; two, but where one is still at its end"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_encode_works_after_a_fork():
    """A DataLoader worker forks: the parent's threads are not there any more."""
    tok = small_tokenizer()
    want = tok.encode(["a b", "c"], num_threads=2)
    assert holds_in_a_fork(lambda: tok.encode(["a b", "c"], num_threads=2) == want), "hangs or differs"


def holds_in_a_fork(check):
    """Whether it is true there, within 20 s."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if check() else 1)
        os._exit(2)
    deadline = time.time() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.time() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, 9)
    return done == (child, 0)


class Lists:
    """nanochat's face: as rustbpe trained it, of `n_merges` merges."""

    def __init__(self, n_merges):
        ranks = small_tokenizer().enc._mergeable_ranks
        ranks = {token: rank for token, rank in ranks.items() if rank < 256 + n_merges}
        self.enc, self.threads = build_encoding(SPLIT_PATTERN, ranks, {"<|bos|>": 2000}), set()

    def get_bos_token_id(self):
        return 2000

    def encode(self, texts, prepend=None, num_threads=8):
        self.threads.add(num_threads)
        return [[prepend, *self.enc.encode_ordinary(text)] for text in texts]


class Documents(Lists):
    """The same tokenizer by documents; also as the list and the int32 that other libraries return."""
    dtype, encode = "uint16", None

    def encode_documents(self, texts):
        ids = [[] if text is None else [2000, *self.enc.encode_ordinary(text.decode())] for text in texts]
        return list(itertools.chain(*ids)), np.cumsum([0, *map(len, ids)], dtype=np.int32)


def test_every_face_is_called_alike():
    """Ours, encode_documents alone, and nanochat's: an array in, ids and bounds out, nulls and slices too."""
    ours = RustBPETokenizer(Lists(100).enc, "<|bos|>")
    texts = [standard_library()[3], None, "", "a 12 \xe9\u6f22", None]
    faces = [as_encoder(tok) for tok in (ours, Documents(100), Lists(100))]
    assert as_encoder(faces[0]) is faces[0] and faces[0].fingerprint == ours.fingerprint()
    assert [face.threads_of_its_own for face in faces] == [False, False, True]
    assert [face.dtype for face in faces] == [np.uint16, np.uint16, np.uint32]
    for array in pa.array(texts), pa.array(["x", *texts], pa.large_string()).slice(1), pa.array([None, None]):
        array = array.cast(pa.string()) if pa.types.is_null(array.type) else array
        want, want_bounds = ours.encode_documents(array)
        for face in faces:
            ids, bounds = face.encode(array, range(0), None)
            assert ids.tolist() == want.tolist() and bounds.tolist() == want_bounds.tolist()
            assert bounds.dtype == np.int64 and face.bos == 2000 and face.engine_failures == 0


@pytest.mark.parametrize("container", [list, np.array])
def test_ids_that_do_not_fit_the_dtype_that_a_tokenizer_names_are_an_error(container):
    """By either face; else they wrap: 70000 would be 4464."""
    for tok, too_large in (Documents(100), 70000), (Lists(100), 1 << 32 | 7):
        encoder, ids = as_encoder(tok), container([2000, too_large])
        tok.encode_documents = lambda texts, ids=ids: (ids, [0, 2])
        tok.encode = lambda texts, prepend, num_threads, ids=ids: [ids]
        with pytest.raises(ValueError, match=rf"ids, 2000 to {too_large}, are not all uint"):
            encoder.encode(pa.array(["b"]))


def test_tokenizers_without_a_fingerprint_are_known_by_what_they_make_of_many_texts():
    """The same one, by either face, in every release; another, also where it has but ten merges more."""
    def known_as(tok):
        return as_encoder(tok).fingerprint

    assert known_as(Lists(100)) == known_as(Documents(100))
    assert known_as(Lists(0))[:16] == "cabebd9b79a8399f", "states and token shards would be refused"
    assert len({known_as(Lists(n_merges)) for n_merges in range(0, 101, 10)}) == 11
    ascii_only, larger = Lists(0), Lists(0)
    ascii_only.encode = lambda texts, **_: [[2000, *text.encode("ascii")] for text in texts]
    larger.get_vocab_size = lambda: 2001
    assert len({known_as(tok) for tok in (Lists(0), ascii_only, larger)}) == 3


@pytest.mark.parametrize("wrong", [
    lambda texts: (range(2), [0, 1, 1, 2]), lambda texts: ([2000, 97, 2000, 97], [0, 2, 4]),
    lambda texts: ([2000, 2000], [0, 1, 1, 2]), lambda texts: ([2000, 97, 2000, 98], [0, 2, 2, 4]), None])
def test_a_wrong_encode_documents_is_found_before_the_first_row(wrong):
    tok = Documents(0)
    tok.encode_documents = wrong
    with pytest.raises(ValueError, match=r"(without BOS|Documents cannot be used)[\s\S]*class Wrapped:"):
        as_encoder(tok)


@pytest.mark.parametrize("lists", [1, 3])
def test_a_list_too_few_or_too_many_is_an_error(lists):
    tok = Lists(0)
    tok.encode = lambda texts, prepend, num_threads: [[prepend, 97]] * lists
    with pytest.raises(ValueError, match=r"Lists (makes|cannot be used)[\s\S]*class Wrapped:"):
        as_encoder(tok)


def test_save_and_load(tmp_path, monkeypatch):
    """Two text files, nothing temporary left; loaded, they give the same ids and fingerprint."""
    tok, folder = small_tokenizer(), tmp_path / "tokenizer"
    tok.save(str(folder))
    assert sorted(os.listdir(folder)) == ["nanoloader.json", "tokenizer.tiktoken"]
    assert tiktoken.load.load_tiktoken_bpe(str(folder / "tokenizer.tiktoken")) == tok.enc._mergeable_ranks
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    for loaded in RustBPETokenizer.from_directory(str(folder)), get_tokenizer():
        assert loaded.encode(standard_library()[9], "<|bos|>") == tok.encode(standard_library()[9], "<|bos|>")
        assert loaded.fingerprint() == tok.fingerprint() and loaded.get_bos_token_id() == 1015


def test_from_pretrained_takes_endoftext_as_bos(monkeypatch):
    enc = build_encoding(R50K, small_tokenizer().enc._mergeable_ranks, {"<|endoftext|>": 3000})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": enc}.get)
    tok = RustBPETokenizer.from_pretrained("gpt2")
    assert tok.get_bos_token_id() == 3000 and tok.get_vocab_size() == 3001
    assert one_document(tok, "a b") == [3000, *enc.encode_ordinary("a b")]
    assert get_token_bytes(tok)[1015:].tolist() == [0] * (3001 - 1015)


def test_fingerprint_tells_tokenizers_apart():
    enc = small_tokenizer().enc
    ranks, special = enc._mergeable_ranks, enc._special_tokens
    fewer = {token: rank for token, rank in ranks.items() if rank < 900}
    others = [RustBPETokenizer(build_encoding(*parts), bos) for parts, bos in [
        ((CL100K, ranks, special), "<|bos|>"), ((SPLIT_PATTERN, fewer, special), "<|bos|>"),
        ((SPLIT_PATTERN, ranks, {**special, "<|new|>": 2000}), "<|bos|>"),
        ((SPLIT_PATTERN, ranks, special), "<|user_end|>")]]
    assert len({tok.fingerprint() for tok in [small_tokenizer(), *others]}) == 5


def test_the_one_trained_tokenizer_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer here: .*nanoloader\.json.*train one"):
        get_tokenizer()
    small_tokenizer().save(str(tmp_path / "tokenizer-mine-1024"))
    assert get_tokenizer().fingerprint() == small_tokenizer().fingerprint()
    pair_tokenizer().save(str(tmp_path / "tokenizer-pairs"))
    with pytest.raises(ValueError, match=r"choose one: get_tokenizer\('.*mine-1024'\), '.*pairs'"):
        get_tokenizer()
    pair_tokenizer().save(str(tmp_path / "tokenizer"))
    assert get_tokenizer().fingerprint() == pair_tokenizer().fingerprint()


def test_the_file_of_the_first_edition_is_renamed(tmp_path):
    """And Hugging Face's tokenizer.json is neither read nor overwritten."""
    small_tokenizer().save(str(tmp_path))
    os.rename(tmp_path / "nanoloader.json", tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"if .*tokenizer.json is ours, rename it"):
        RustBPETokenizer.from_directory(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"of Hugging Face")
    small_tokenizer().save(str(tmp_path))
    assert (tmp_path / "tokenizer.json").read_bytes() == b"of Hugging Face"


DAMAGE = {
    "ranks missing": ("tokenizer.tiktoken", lambda data: None),
    "ranks torn": ("tokenizer.tiktoken", lambda data: data[: len(data) // 2]),
    "ranks empty": ("tokenizer.tiktoken", lambda data: b""),
    "one rank changed": ("tokenizer.tiktoken", lambda data: data.replace(b" 300\n", b" 301\n")),
    "json missing": ("nanoloader.json", lambda data: None),
    "json torn": ("nanoloader.json", lambda data: data[:-20]),
    "json empty": ("nanoloader.json", lambda data: b""),
    "json is a list": ("nanoloader.json", lambda data: b"[]"),
    "json of something else": ("nanoloader.json", lambda data: b"{}"),
    "json is no text": ("nanoloader.json", lambda data: b"\xff\xfe"),
    "a later format": ("nanoloader.json", lambda data: data.replace(b"tokenizer 1", b"tokenizer 2")),
    "pattern changed": ("nanoloader.json", lambda data: data.replace(b"{1,2}", b"{1,3}")),
    "special tokens changed": ("nanoloader.json", lambda data: data.replace(b"1016", b"1017")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_errors(tmp_path, damage):
    """Whatever is missing, torn or changed: the error names the file and says what to type."""
    small_tokenizer().save(str(tmp_path))
    name, change = DAMAGE[damage]
    before = (tmp_path / name).read_bytes()
    after = change(before)
    assert after != before, "nothing was damaged"
    (tmp_path / name).unlink() if after is None else (tmp_path / name).write_bytes(after)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        RustBPETokenizer.from_directory(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value) and "python tokenizer.py" in str(caught.value)


def test_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    """A crash before the rename: the folder still holds the tokenizer that it held."""
    small_tokenizer().save(str(tmp_path))
    monkeypatch.setattr(os, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair_tokenizer().save(str(tmp_path))
    assert RustBPETokenizer.from_directory(str(tmp_path)).fingerprint() == small_tokenizer().fingerprint()


def test_vocabulary_sizes(recwarn):
    """Too small is an error; too large for the text is a smaller vocabulary, and a warning with its size."""
    with pytest.raises(ValueError, match=r"264 tokens: expected 265 .* such as --vocab_size"):
        RustBPETokenizer.train_from_iterator(iter(["abc"]), 264)
    assert RustBPETokenizer.train_from_iterator(iter(["abc"]), 265).get_vocab_size() == 265
    assert not recwarn
    tok = RustBPETokenizer.train_from_iterator(iter(["abab abab"]), 5000)
    size = tok.get_vocab_size()
    assert 265 < size < 300 and f"has {size} tokens, not 5000" in str(recwarn.pop(UserWarning).message)
    assert tok.get_bos_token_id() == size - 9 and tok.encode("abab") != list(b"abab")


def test_token_bytes_are_those_of_the_text():
    """Summed over a text's tokens they are its UTF-8 bytes, also where a token is half a character."""
    tok, text = small_tokenizer(), standard_library()[2] + "漢字 é 😀"
    n_bytes = get_token_bytes(tok)
    assert n_bytes.shape == (1024,) and str(n_bytes.dtype) == "torch.int32"
    assert n_bytes[tok.encode(text)].sum() == len(text.encode())
    assert n_bytes[1015:].sum() == 0 and n_bytes[:256].tolist() == [1] * 256


def test_nanochat_s_calls(monkeypatch):
    """Those of its tok_train: bytes of one token, and token bytes by device alone."""
    tok = small_tokenizer()
    monkeypatch.setattr(tokenizer_module, "get_tokenizer", lambda: tok)
    assert tok.decode_single_token_bytes(tok.encode("a")[0]) == b"a"
    for device in "cpu", torch.device("cpu"):
        assert get_token_bytes(device).tolist() == get_token_bytes(tok, device=device).tolist()


def test_other_data_under_the_same_name_has_a_tokenizer_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    folders = []
    for parent, rows in (("one", 8), ("two", 9), ("three", 8)):
        make_shards(tmp_path / parent / "data", rows=rows)
        monkeypatch.chdir(tmp_path / parent)
        folders.append(tokenizer_module.find_tokenizer(None, ["data"], 300)[1])
    assert folders[0] != folders[1] and folders[0] == folders[2]


def test_command_trains_and_says_so(tmp_path, monkeypatch, capsys):
    """python tokenizer.py: progress, size, bytes per token, where it was saved."""
    texts = standard_library()
    batches = {"train": [texts[:40], texts[40:80]], "val": [texts[80:90]]}
    monkeypatch.setattr(tokenizer_module, "find_data", lambda data_dir: "somewhere")
    monkeypatch.setattr(tokenizer_module, "parquets_iter_batched", lambda split, data_dir: batches[split])
    monkeypatch.setattr(sys, "argv", ["tokenizer.py", "--vocab_size", "700", "--out", str(tmp_path)])
    tokenizer_module.main()
    said = capsys.readouterr().out
    tok = RustBPETokenizer.from_directory(str(tmp_path))
    n_tokens = sum(len(ids) for ids in tok.encode(standard_library()[80:90]))
    ratio = sum(len(text.encode()) for text in standard_library()[80:90]) / n_tokens
    assert "read 80 documents" in said and "700 tokens" in said and str(tmp_path) in said
    assert f"{ratio:.2f} bytes per token" in said and f"engine: {tok.engine}" in said
    batches["train"] = None    # not even read where there is a tokenizer: checkpoints may need it
    before = [(tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))]
    for flags, message in ((), "move this one: mv "), (("--vocab_size", "99999999999"), "move this one: mv "):
        monkeypatch.setattr(sys, "argv", ["tokenizer.py", "--out", str(tmp_path), *flags])
        with pytest.raises(SystemExit, match=message):
            tokenizer_module.main()
    assert [(tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))] == before
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], str(tmp_path / "new"), *sys.argv[3:]])
    batches["train"] = []
    with pytest.raises(SystemExit, match=r"99,999,999,999 tokens: expected 265 .* to 16,777,216"):
        tokenizer_module.main()


# ---------------------------------------------------------------------------------------------------------
# Packers against slow references

def chunk_of(lengths, first=0):
    """Documents of distinct tokens, so that rows tell where each token came from."""
    ids, bounds = [], [0]
    for i, n in enumerate(lengths):
        ids += [BOS, *(1000 * (first + i) + k for k in range(1, n))][:n]
        bounds.append(len(ids))
    behind = first + len(lengths)
    return Chunk(np.array(ids, np.int64), bounds, range(first, behind), Ref(doc=behind))


def puller(lengths, batch=3):
    """What packers pull: chunks of so many documents."""
    chunks = (chunk_of(lengths[i:i + batch], i) for i in range(0, len(lengths), batch))
    return lambda: next(chunks, None)


def pack(packer, lengths, batch=3):
    """All rows of a finite run of a packer over documents of these lengths."""
    pull, rows = puller(lengths, batch), []
    while row := packer.row(pull):
        rows.append(np.concatenate(row).tolist())
    return rows


def documents_of(lengths):
    chunk = chunk_of(lengths)
    return [chunk.ids[a:b].tolist() for a, b in itertools.pairwise(chunk.bounds)]


def flat_reference(lengths, T):
    stream = list(itertools.chain(*documents_of(lengths)))
    return [stream[i:i + T + 1] for i in range(0, max(1, len(stream) - 1), T)] if stream else []


def bestfit_reference(lengths, T, buffer_size, batch):
    """nanochat's rule with lists and scans; at the end of the data, rows go on until the buffer is empty."""
    waiting, buffer, rows = collections.deque(documents_of(lengths)), [], []
    while True:
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size and waiting:
                buffer += [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            if not buffer:
                break
            free = T + 1 - len(row)
            fitting = [document for document in buffer if len(document) <= free]
            document = max(fitting, key=len) if fitting else min(buffer, key=len)    # the first among equals
            buffer.remove(document)
            row += document[:free]
        if not row:
            return rows
        rows.append(row)


sizes = st.lists(st.integers(1, 40), max_size=60)


@given(sizes, st.integers(1, 20))
def test_flat_packer_is_the_stream_cut_every_T_tokens(lengths, T):
    assert pack(FlatPacker(T), lengths) == flat_reference(lengths, T)


@given(sizes, st.integers(1, 20), st.integers(1, 12), st.integers(1, 5))
def test_bestfit_packer_is_nanochats_rule(lengths, T, buffer_size, batch):
    assert pack(BestFitPacker(T, buffer_size, batch), lengths, batch) == bestfit_reference(
        lengths, T, buffer_size, batch)


def test_bestfit_packer_is_nanochats_rule_over_10_000_rows():
    lengths = np.random.default_rng(0).lognormal(3.5, 1.1, 30_000).astype(int) + 1
    want = bestfit_reference(lengths.tolist(), 100, 50, 16)
    assert pack(BestFitPacker(100, 50, 16), lengths.tolist(), 16) == want
    assert len(want) > 10_000


def test_choose_best_fit_as_its_docstring_says():
    assert choose_best_fit([(3, 7), (5, 2), (9, 0)], 6) == (1, 5)
    assert choose_best_fit([(8, 4), (9, 0)], 6) == (0, 6)
    assert choose_best_fit([(5, 1), (5, 2), (5, 9)], 5) == (0, 5), "the oldest among equals"


@settings(max_examples=300)
@given(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=9))
def test_gap_is_filled_exactly_wherever_any_subset_does(gap, lengths):
    """All subsets, against one integer's bits."""
    sums = {sum(subset) for k in range(len(lengths) + 1) for subset in itertools.combinations(lengths, k)}
    copies = collections.Counter(lengths)
    chosen = fill_gap(gap, sorted(copies), {n: [n] * copies[n] for n in copies})
    assert sum(chosen) == max(s for s in sums if s <= gap)
    assert not collections.Counter(chosen) - copies, "a document was used twice"


@settings(max_examples=150)
@given(sizes, st.integers(2, 24), st.integers(1, 10), st.booleans())
def test_exactfit_rows_hold_every_token_once_and_whole_documents(lengths, T, buffer_size, keep):
    """Every piece begins with BOS; without the BOS of the pieces, the rows are the documents."""
    rows = pack(ExactFitPacker(T, buffer_size, "keep" if keep else "drop"), lengths)
    assert all(len(row) == T + 1 for row in rows[:-1])
    pieces = [piece for row in rows for piece in split_at_bos(row)]
    got = collections.Counter(token for piece in pieces for token in piece if token != BOS)
    assert max(got.values(), default=1) == 1
    for document in documents_of(lengths):
        assert got.keys() >= set(document[1:] if keep else document[1:T + 1])
    assert all(row[0] == BOS for row in rows)
    for piece in pieces:
        assert all(b == a + 1 for a, b in itertools.pairwise(piece[1:])), "a piece is consecutive tokens"


def split_at_bos(row):
    starts = [i for i, token in enumerate(row) if token == BOS] + [len(row)]
    return [row[a:b] for a, b in itertools.pairwise(starts)]


@settings(max_examples=150)
@given(st.lists(st.integers(2, 30), max_size=40), st.integers(4, 24), st.integers(1, 8), st.booleans())
def test_exactfit_opens_with_the_oldest_and_cuts_only_where_no_subset_fits(lengths, T, buffer_size, keep):
    """The buffer is read before every row, which must be what the rule makes of it; all subsets are tried."""
    packer, cropped = ExactFitPacker(T, buffer_size, "keep" if keep else "drop"), []
    cut_to_fit = packer._cut_to_fit
    packer._cut_to_fit = lambda left: cropped.append(left) or cut_to_fit(left)
    pull, buffers = puller(lengths), note_buffers(packer)
    while row := packer.row(pull):
        before = buffers[-1]
        opener = min(before[0][0], T + 1)
        gap, reachable = T + 1 - opener, {0}
        for n, token in before[1:]:
            reachable |= {s + n for s in reachable if token == 0 and s + n <= gap}
        assert len(split_at_bos(np.concatenate(row).tolist())[0]) == opener
        assert gap - sum(cropped) == max(reachable)
        cropped.clear()


def note_buffers(packer):
    """A list that gets, for every row, the buffer that it is chosen from: (tokens left, token) of each."""
    buffers, pop = [], packer._pop

    def note(ref):
        if len(buffers) <= packer.rows - first:
            buffers.append([(dataloader.tokens_left(ids, ref), ref.token)
                            for ref, ids in packer.buffer.items()])
        return pop(ref)

    first, packer._pop = packer.rows, note
    return buffers


def test_exactfit_buffer_grows_with_the_rows():
    """So that the first batch of many lanes comes soon."""
    packer, pull = ExactFitPacker(99, 200, "keep"), puller([20] * 1000, 1)
    buffers = note_buffers(packer)
    for _ in range(100):
        packer.row(pull)
    assert [len(buffer) for buffer in buffers] == [min(200, 32 + 4 * row) for row in range(100)]


def test_exactfit_drop_counts_what_it_drops():
    packer = ExactFitPacker(8, 4, "drop")
    assert len(pack(packer, [100] * 50)) == 50 and packer.counts["dropped"] == 50 * (100 - 9)


@pytest.mark.parametrize("rows_long", [3, 50])
def test_exactfit_rows_of_one_document_stand_far_apart(rows_long):
    """Where all documents are long, however long: by a quarter of the buffer at least."""
    T, seen, nearest = 8, {}, math.inf
    packer, pull = ExactFitPacker(T, 128, "keep"), puller([rows_long * T] * 800)
    for row in range(1500):
        number = np.concatenate(packer.row(pull))[1] // 1000    # of the document that opens it
        if row > 100:
            nearest = min(nearest, row - seen.get(number, -math.inf))
        seen[number] = row
    assert 128 // 4 - 1 <= nearest < math.inf


@pytest.mark.parametrize("tails", ["keep", "drop"])
@pytest.mark.parametrize("buffer_size, most_cut", [(256, 0.0015), (1000, 0.0002)])
def test_exactfit_on_lognormal_lengths(tails, buffer_size, most_cut):
    """
    Nothing lost but what lies beyond a row (drop), next to nothing cut, and the wait is bounded. A million:
    NANOLOADER_DOCUMENTS=1000000 python test_dataloader.py -k lognormal -s
    """
    T, n = 2048, int(os.environ.get("NANOLOADER_DOCUMENTS", 20_000))
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(6.15, 1.13, n)).astype(int).tolist()
    bounds = [0, *itertools.accumulate(lengths)]
    packer, i, rows, seconds = ExactFitPacker(T, buffer_size, tails), 0, 0, 0.0
    waiting, longest_wait = {}, 0    # whole documents in the buffer: {number: (row, documents before it)}
    zeros = np.zeros(2 * max(lengths) + 32 * 10_000, np.uint16)

    def pull():
        nonlocal i
        cuts = bounds[i:i + 32 + 1]
        behind = i + len(cuts) - 1
        chunk = Chunk(zeros[:cuts[-1] - cuts[0]], [cut - cuts[0] for cut in cuts], range(i, behind),
                      Ref(doc=behind))
        waiting.update({i + k: (rows, len(packer.buffer) + k) for k in range(len(cuts) - 1)})
        i += len(cuts) - 1
        return chunk

    while i < n:
        began = time.perf_counter()
        packer.row(pull)
        seconds += time.perf_counter() - began
        left = {ref.doc for ref in packer.buffer if ref.token == 0}
        for k in waiting.keys() - left:
            row, ahead = waiting.pop(k)
            longest_wait = max(longest_wait, rows - row)
            assert rows - row <= ahead, "it waited for more rows than there were documents before it"
        rows += 1
    fitting = sum(length <= T + 1 for length in lengths)
    reach = T + 1 if tails == "drop" else max(lengths)
    within = sum(min(length, reach) for length in lengths)
    held = sum(min(dataloader.tokens_left(ids, ref), reach) for ref, ids in packer.buffer.items())
    delivered = rows * (T + 1) + held
    assert packer.counts["cut"] <= most_cut * fitting
    assert within <= delivered <= 1.001 * within, "each piece of a cut document has a BOS of its own"
    lost, beyond = max(0, 1 - delivered / bounds[-1]), 1 - within / bounds[-1]
    print(f"\n{tails}, buffer {buffer_size}: of {n:,} documents {packer.counts['cut']} fit a row yet were "
          f"cut; lost {lost:.2%}, beyond a row {beyond:.2%}; longest wait {longest_wait} rows; "
          f"{1e6 * seconds / rows:.1f} us a row")


# ---------------------------------------------------------------------------------------------------------
# Promise 1: the same rows for every world size, batch size, thread count, prefetch depth and stop point

PACKINGS = [("flat", "keep"), ("bestfit", "keep"), ("exactfit", "keep"), ("exactfit", "drop")]


@pytest.mark.parametrize("packing, tails", PACKINGS)
@pytest.mark.parametrize("world, B, threads, prefetch", [
    (1, 8, 1, 0), (2, 4, 2, 2), (4, 1, 3, 5), (8, 3, 1, 1)])
def test_rows_are_the_same_for_every_world_size(corpus, packing, tails, world, B, threads, prefetch):
    same = {"packing": packing, "tails": tails, "num_lanes": 8}
    want, _ = run(corpus, steps=48, B=1, prefetch=0, **same)
    rows, _ = run(corpus, steps=48 // (world * B), world=world, B=B, threads=threads, prefetch=prefetch,
                  **same)
    assert rows == want[:len(rows)] and rows


FROZEN = {    # of rows; those of a version of the state never change
    ("flat", "keep"): "a09c336609661d35", ("bestfit", "keep"): "86043ee300f391a6",
    ("exactfit", "keep"): "7432fdc9e549e6b1", ("exactfit", "drop"): "55b3742583f28c97"}


@pytest.fixture(scope="module")
def frozen_corpus(tmp_path_factory):
    """8,000 documents in row groups of several chunks; how large these are does not hang on compression."""
    documents = numbered([(7 * i * i + 3) % 61 * (8 if i % 37 == 0 else 1) for i in range(8000)])
    groups = grouped(documents, [2500, 1500, 2000])
    return write_shards(tmp_path_factory.mktemp("frozen"), [groups[:2], groups[2:], [["val"]]])


@pytest.mark.parametrize("packing, tails", FROZEN)
def test_rows_of_a_version_never_change(frozen_corpus, packing, tails):
    """Promise 1 over releases: where this fails, rows have changed, and the version of the state must too."""
    digest = hashlib.sha256()
    for seed in (None, 3):
        rows, _ = run(frozen_corpus, steps=400, B=8, T=64, num_lanes=2, packing=packing, tails=tails,
                      shuffle_seed=seed, buffer_size=40, tokenizer_batch_size=16)
        digest.update(np.array(rows, "<i8").tobytes())
    assert dataloader.VERSION == 3
    assert digest.hexdigest()[:16] == FROZEN[packing, tails]


@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken"])
@pytest.mark.parametrize("packing, tails, frozen", [
    ("flat", "keep", "dd044c2b6a08f6a5"), ("bestfit", "keep", "0f56ffb1694728aa"),
    ("exactfit", "keep", "c0c4094028eb6017"), ("exactfit", "drop", "f0dbfccfe5cbbd1b")])
def test_rows_of_a_version_never_change_with_either_engine(frozen_corpus, packing, tails, frozen, engine,
                                                          monkeypatch):
    """Nor where a run stops on one and goes on with the other."""
    same = {"B": 8, "T": 64, "num_lanes": 2, "packing": packing, "tails": tails, "buffer_size": 40}
    head, state = run(frozen_corpus, steps=30, tokenizer=tokenizer_with(engine, monkeypatch), **same)
    others = {"tiktoken": "gigatoken", "gigatoken": "tiktoken"}
    tail, _ = run(frozen_corpus, steps=70, tokenizer=tokenizer_with(others[engine], monkeypatch), state=state,
                  **same)
    assert hashlib.sha256(np.array(head + tail, "<i8").tobytes()).hexdigest()[:16] == frozen


def tokenizer_with(engine, monkeypatch):
    if engine == "gigatoken":
        pytest.importorskip("gigatoken")
    monkeypatch.setenv("NANOLOADER_ENGINE", engine)
    tok = RustBPETokenizer(pair_tokenizer().enc, "<|bos|>")
    assert tok.engine.startswith(engine)
    return tok


@needs_gigatoken
def test_a_broken_engine_stops_the_run_and_names_the_document(tmp_path, monkeypatch):
    """One wrong id in a few thousand documents; each epoch checks other documents of the corpus."""
    data = write_shards(tmp_path, [grouped([f"document {i}" for i in range(5000)], [2500, 2500]), [["val"]]])
    tok, call = tokenizer_with("gigatoken", monkeypatch), GigatokenEngine.call

    def wrong(self, data):
        ids, documents = call(self, data), data.split(tokenizer_module.BETWEEN)[1:]
        if b"document 4321" in documents:
            ids[np.flatnonzero(ids == self.enc.n_vocab)[documents.index(b"document 4321")] + 2] += 1
        return ids

    monkeypatch.setattr(GigatokenEngine, "call", wrong)
    monkeypatch.setattr(dataloader, "CHECK_EVERY", 50)    # else some hundred epochs may go by
    loader = make(data, tokenizer=tok, packing="flat", T=500, B=8)
    with pytest.raises(RuntimeError, match=r"row group 1, row 1821: ValueError: document 0 of 1 in this chunk"
                                           r", token 2: gigatoken .* gives \[\d+\], tiktoken \[\d+\]"):
        for _ in range(1000):
            next(loader)
    assert loader.state_dict()["lanes"]["0"][data]["next"][0] < 60


@st.composite
def corpora(draw, nulls):
    """Per shard its row groups, with long and perhaps null documents among short ones."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 12), st.integers(0, 60)), min_size=9, max_size=40))
    documents = numbered(lengths, draw(st.sampled_from("abc")))
    for i in draw(st.sets(st.integers(0, len(lengths) - 1), max_size=2 * nulls)):
        documents[i] = None
    groups = grouped(documents, draw(st.lists(st.integers(1, 9), max_size=8)))
    return [groups[i:i + 3] for i in range(0, len(groups), 3)]


crossed = collections.Counter()    # what the draws of the test below came by


@settings(max_examples=int(os.environ.get("NANOLOADER_DRAWS", 60)), database=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_resume_gives_the_rows_of_an_uninterrupted_run(data, tmp_path_factory):
    """Stopped twice at drawn batches, gone on with on other world sizes, batch sizes and prefetch depths."""
    draw = data.draw
    packing, tails = draw(st.sampled_from(PACKINGS))
    lanes = draw(st.sampled_from([1, 2, 4, 6]))
    folder = tmp_path_factory.mktemp("drawn")
    sources = {}
    for i in range(draw(st.sampled_from([1, 1, 2, 3, 4]))):
        shards = draw(corpora(nulls=lanes == 1))
        path = write_shards(folder / f"text{i}", [*shards, [["val"]]])
        if draw(st.booleans()):
            path = tokenized_copy(path, folder / f"tokens{i}")
        sources[path] = draw(st.sampled_from([1, 0.5, 3, 0.37]))
    same = {"packing": packing, "tails": tails, "num_lanes": lanes, "T": draw(st.integers(4, 24)),
            "buffer_size": draw(st.integers(1, 9)), "tokenizer_batch_size": draw(st.integers(1, 6)),
            "shuffle_seed": draw(st.sampled_from([None, 0, 7]))}
    rows, state, made = [], None, 0
    for leg in range(3):
        world = draw(st.sampled_from([w for w in (1, 2, 3, 4, 6) if lanes % w == 0]))
        B, steps = draw(st.integers(1, 4)), draw(st.integers(1, 9))
        ahead = {"prefetch": draw(st.integers(0, 3)), "threads": draw(st.integers(1, 2))}
        more, state = run(sources, steps=steps, world=world, B=B, state=state, **ahead, **same)
        rows += more
        made += steps * world * B
        assert state["rows"] == made
        note_what_was_crossed(state, leg)
    want, _ = run(sources, steps=made, B=1, prefetch=0, **same)
    assert rows == want


def note_what_was_crossed(state, leg):
    parts = [part for lane in state["lanes"].values() for part in lane.values()]
    crossed["resumed twice"] += leg == 2
    crossed["behind an epoch's end"] += any(part["next"][0] > 1 for part in parts)
    crossed["half a document held"] += any(ref.token > 0 for part in parts for ref in held_of(part))
    crossed["half a document of an epoch that ended"] += any(
        ref.token > 0 and ref.epoch < part["next"][0] for part in parts for ref in held_of(part))
    crossed["several sources"] += any(len(lane) > 1 for lane in state["lanes"].values())


def test_the_draws_above_were_not_vacuous():
    assert not crossed or min(crossed.values()) >= 0.05 * crossed["resumed twice"], crossed
    assert not crossed or crossed["half a document of an epoch that ended"] > 2, crossed


def tokenized_copy(folder, out, tokenizer=None):
    """The token shards of text shards, as `dev.prepare tokenize` writes them, but here in a few lines."""
    tokenizer = tokenizer or ByteTokenizer()
    out.mkdir(parents=True)
    for name in sorted(os.listdir(folder)):
        file = pq.ParquetFile(os.path.join(folder, name))
        schema = pa.schema([("tokens", pa.binary())], {
            "nanoloader.dtype": "uint16", "nanoloader.tokenizer": tokenizer.fingerprint(),
            "nanoloader.text_size": str(os.path.getsize(os.path.join(folder, name)))})
        with pq.ParquetWriter(out / name, schema) as writer:
            for g in range(file.num_row_groups):
                texts = file.read_row_group(g).column("text").to_pylist()
                tokens = [text if text is None else np.array([BOS, *text.encode()], np.uint16).tobytes()
                          for text in texts]
                writer.write_table(pa.table({"tokens": pa.array(tokens, pa.binary())}, schema))
    dataset.write_index(str(out))
    return str(out)


# ---------------------------------------------------------------------------------------------------------
# Promises 4 and 5: every document once per epoch, and no document silently skipped

def texts_of(rows):
    """The documents in rows of `flat` with one lane, or of whole documents."""
    return collections.Counter(bytes(piece[1:]) for row in rows for piece in split_at_bos(list(row)))


def real(row):
    """A row without its masked end."""
    row = list(row)
    while row and row[-1] == -100:
        row.pop()
    return row if len(row) > 1 else []


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
@pytest.mark.parametrize("world, lanes", [(1, 1), (1, 8), (2, 8), (4, 4)])
def test_a_finite_run_delivers_every_document_once_per_epoch(corpus, packing, world, lanes):
    """By world size and lanes; bestfit loses tails, the others nothing."""
    rows = []
    for rank in range(world):
        loader = make(corpus, T=64, packing=packing, num_lanes=lanes, rank=rank, world_size=world, epochs=2,
                      uneven="free", shuffle_seed=3)
        rows += [real(row) for batch in loader for row in rows_of(batch)]
    tokens = collections.Counter(token for row in rows for token in row if token != BOS)
    want = collections.Counter(token for text in corpus_texts(corpus) for token in text.encode() * 2)
    if packing == "bestfit":
        assert not tokens - want and 0.8 * want.total() < tokens.total()
    elif packing == "exactfit":
        assert tokens == want
    else:    # the last token of a row opens the next
        assert not want - tokens and tokens.total() - want.total() < len(rows)


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
def test_a_finite_run_is_as_long_for_every_batch_size(corpus, packing):
    """It ends behind its last row, also where that is the last but one of a lane; no batch is empty."""
    want = None
    for B in (6, 1, 2, 3):
        batches = [rows_of(batch) for batch in make(corpus, B=B, num_lanes=6, packing=packing, epochs=1)]
        rows = [row for batch in batches for row in batch]
        want = want or [row for row in rows if real(row)]
        assert [row for row in rows if real(row)] == want
        last = max(i for i, row in enumerate(rows) if real(row))
        assert len(rows) == (last // B + 1) * B


def corpus_texts(folder, split="train"):
    files = sorted(name for name in os.listdir(folder) if name.endswith(".parquet"))
    files = files[:-1] if split == "train" else files[-1:]
    return [text for name in files for text in pq.read_table(os.path.join(folder, name))["text"].to_pylist()]


@pytest.mark.parametrize("world", [1, 64])
def test_64_lanes_on_5_row_groups_deliver_every_document_once(tmp_path, world):
    documents = numbered([3 + i % 5 for i in range(400)])
    data = write_shards(tmp_path, [grouped(documents, [100, 50, 70]), grouped([], []) or [["val"]]])
    assert pq.ParquetFile(tmp_path / "shard_00000.parquet").num_row_groups < 64
    seen = collections.Counter()
    for rank in range(world):
        loader = make(data, B=1, T=12, num_lanes=64, rank=rank, world_size=world, epochs=1, uneven="free")
        seen += texts_of(real(row) for batch in loader for row in rows_of(batch))
        loader.close()
    joined = collections.Counter(token for text, n in seen.items() for token in text * n)
    assert joined == collections.Counter(token for text in documents for token in text.encode())


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_rows_are_the_same_at_1_to_1024_ranks_where_row_groups_are_dealt_in_parts(tmp_path, kind):
    """More lanes than row groups: one rank makes a turn of all lanes and stops, others make the next."""
    data = write_shards(tmp_path / "text", [grouped(numbered([5 + i % 5 for i in range(4096)]), [200] * 20),
                                            [["val"]]])
    if kind == "tokens":
        data = tokenized_copy(data, tmp_path / "tokens")
    for lanes, worlds in ((1024, (64, 256, 1024)), (56, (7,))):
        same = {"T": 6, "num_lanes": lanes, "packing": "exactfit", "buffer_size": 1, "prefetch": 0}
        one = make(data, B=lanes, **same)
        first, state, second = rows_of(next(one)), one.state_dict(), rows_of(next(one))
        one.close()
        assert first != second and len(set(first)) > 0.9 * lanes
        for world, place in itertools.product(worlds, (0, 0.5, 1)):
            rank = int(place * (world - 1))
            loader = make(data, B=lanes // world, rank=rank, world_size=world, **same)
            assert rows_of(next(loader)) == first[rank::world]
            loader.load_state_dict(state)
            assert rows_of(next(loader)) == second[rank::world]
            loader.close()


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_a_finite_run_resumes_up_to_its_end(corpus, sources, packing, tails):
    """Also where a lane, or one source of a mixture, has ended before the stop."""
    for data in (corpus, dict(zip(sources.values(), [1, 5, 2], strict=True))):
        same = {"data": data, "packing": packing, "tails": tails, "num_lanes": 4, "epochs": 2, "T": 30}
        want = [rows_of(batch) for batch in make(**same)]
        for stop in {0, 1, len(want) // 2, len(want) - 6, len(want) - 2, len(want)}:
            loader = make(**same)
            head = [rows_of(next(loader)) for _ in range(stop)]
            rest = make(**same)
            rest.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            assert head + [rows_of(batch) for batch in rest] == want


def test_more_lanes_than_documents_is_an_error_at_construction(tmp_path):
    data = write_shards(tmp_path, [grouped(numbered([5] * 900), [300, 300]), [["val"]]])
    with pytest.raises(ValueError, match=r"900 documents .* cannot feed 1000 lanes"):
        make(data, num_lanes=1000)


def test_null_documents_are_counted_and_a_lane_of_nothing_else_is_an_error(tmp_path):
    data = write_shards(tmp_path / "some", [[["a", None, ""], [None, "b"]], [["val"]]])
    loader = make(data, B=1, T=4, packing="flat", epochs=1)
    rows = [real(row) for batch in loader for row in rows_of(batch)]
    assert [token for row in rows for token in row] == [BOS, 97, BOS, BOS, 98]
    assert loader.stats()["null_documents"] == 2
    data = write_shards(tmp_path / "none", [[["a"], [None]], [["val"]]])
    loaders = [make(data, B=1, T=4, rank=rank, world_size=2) for rank in range(2)]
    next(loaders[0])
    with pytest.raises(ValueError, match=r"none got no token for a whole epoch"):
        next(loaders[1])


def test_places_in_a_run_do_not_share_an_order():
    """Mixed as a tuple: with a sum, seed 1 in epoch 2 would be seed 2 in epoch 1."""
    places = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 2, 3, 0, 1), (1, 2, 3, 1, 0), (1, 3, 3, 0, 0)]
    orders = [tuple(dataloader.shuffled(40, *place)) for place in places]
    assert len(set(orders)) == len(places) and all(sorted(order) == list(range(40)) for order in orders)


def test_the_end_of_a_finite_run_is_bos_and_masked(tmp_path):
    data = write_shards(tmp_path, [[["ab", "c"]], [["val"]]])
    for packing in ("flat", "bestfit", "exactfit"):
        ((inputs, targets),) = make(data, B=1, T=8, packing=packing, epochs=1)
        assert sorted(inputs.tolist()[0][:5]) == sorted([BOS, 97, 98, BOS, 99])
        assert inputs.tolist()[0][5:] == [BOS] * 3
        assert targets.tolist()[0] == [*inputs.tolist()[0][1:5], -100, -100, -100, -100]


@pytest.mark.parametrize("seed", [None, 5])
def test_shuffle_is_another_order_every_epoch_and_the_same_for_every_world_size(corpus, seed):
    documents = {}
    for world in (1, 4):
        rows, _ = run(corpus, steps=400 // world, world=world, B=1, T=4, packing="flat", num_lanes=4,
                      shuffle_seed=seed)
        documents[world] = rows
    assert documents[1] == documents[4]
    source = make(corpus, shuffle_seed=seed, num_lanes=5).sources[corpus]
    refs = [list(source.deal(lane, Ref(), epochs=2)) for lane in range(5)]
    epochs = [[[describe(source, ref) for ref in lane if ref.epoch == epoch] for lane in refs]
              for epoch in (1, 2)]
    assert (epochs[0] == epochs[1]) == (seed is None)
    for epoch in epochs:
        row_groups = [documents[:2] for lane in epoch for documents in lane]
        assert len(set(row_groups)) == len(row_groups) == 12 and {len(lane) for lane in epoch} == {2, 3}


def describe(source, ref):
    shard, row_group, rows = source.find(ref)
    return shard.name, row_group, *map(int, rows)


# ---------------------------------------------------------------------------------------------------------
# States: what they hold, and what is refused

def held_of(part):
    """The Refs in the packer of a lane and source of a state."""
    return dataloader.unpacked(part["held"])


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 4)))
def test_packed_references_are_unpacked_as_they_were(refs):
    assert dataloader.unpacked(dataloader.packed(refs)) == refs


def test_state_is_small_json_of_references_and_cheap(tmp_path):
    documents = numbered([20 + i % 60 for i in range(3000)])
    data = write_shards(tmp_path, [grouped(documents, [500] * 5), [["val"]]])
    loader = make(data, T=256, B=8, buffer_size=1000, prefetch=0)
    for _ in range(60):
        next(loader)
    state = loader.state_dict()
    (part,) = state["lanes"]["0"].values()
    assert len(held_of(part)) > 950 and part["next"][0] > 1
    assert state == json.loads(json.dumps(state)) and len(json.dumps(state)) < 8 * 1024
    began = time.thread_time()
    for _ in range(20):
        loader._pipeline.lanes[0].standings()
    assert (time.thread_time() - began) / 20 < 0.005, "100 microseconds on a quiet machine"


def test_state_is_that_of_the_batch_delivered_not_of_those_prefetched(corpus):
    with_ahead, without = make(corpus, prefetch=4), make(corpus, prefetch=0)
    for _ in range(5):
        next(with_ahead), next(without)
        time.sleep(0.01)
        assert with_ahead.state_dict() == without.state_dict()


def test_loading_reads_only_the_row_groups_it_needs(tmp_path, monkeypatch):
    data = write_shards(tmp_path, [grouped(numbered([9] * 2000), [100] * 19), [["val"]]])
    loader = make(data, packing="flat", T=8)
    for _ in range(30):
        next(loader)
    state = loader.state_dict()
    again = make(data, packing="flat", T=8, prefetch=0)
    reads = count_reads(monkeypatch, again)
    again.load_state_dict(state)
    assert rows_of(next(again)) == rows_of(next(loader))
    assert 1 <= len(reads) <= 8, "of 20: its own, and those that are looked ahead to"


def test_tokens_are_not_read_far_ahead_however_many_threads(tmp_path, monkeypatch):
    """A chunk of tokens is a whole row group: eight a thread would be a gigabyte on 16 cores."""
    text = write_shards(tmp_path / "text", [grouped(numbered([9] * 2000), [50] * 39), [["val"]]])
    loader = make(tokenized_copy(text, tmp_path / "tokens"), packing="flat", T=8, threads=16, prefetch=0)
    reads = count_reads(monkeypatch, loader)
    next(loader)
    time.sleep(0.2)
    assert 1 <= len(reads) <= 5, "of 40"


def test_tasks_grow_but_the_first_and_those_of_many_streams_are_small(tmp_path, monkeypatch):
    """16 chunks at most; of a packer whose chunks have another size, so many that they hold no more."""
    monkeypatch.setattr(dataloader, "documents_per_chunk", lambda shard: 4)
    loader = make(write_shards(tmp_path, [[numbered([9] * 4000)], [["val"]]]), num_lanes=1)

    def documents_of_tasks(**options):
        encoder, tasks = dataloader.Encoder(loader.tokenizer, 1), []
        encode = encoder._encode
        encoder._encode = lambda task: tasks.append(len(task.docs)) or encode(task)
        chunks = list(encoder.chunks(*loader.sources.values(), 0, Ref(), 1, **options))
        encoder.close()
        assert {len(chunk.docs) for chunk in chunks[:-1]} == {options.get("size", 4)}
        assert sum(tasks) == sum(len(chunk.docs) for chunk in chunks) == 4000
        return tasks[:-1]

    tasks = documents_of_tasks()
    assert tasks == [4 * min(16, 1 + i // 3) for i in range(len(tasks))] and max(tasks) == 64
    assert max(documents_of_tasks(n_streams=32)) == 16 and max(documents_of_tasks(n_streams=1024)) == 4
    tasks = documents_of_tasks(size=10)
    assert min(tasks) == 10 and max(tasks) == 60 and tasks == sorted(tasks)


def count_reads(monkeypatch, loader):
    """(shard, row group) of every read of this loader from now on; others may still be reading ahead."""
    shards = [shard for source in loader.sources.values() for shard in source.shards]
    reads, read = [], dataset.Shard.read

    def counted(shard, row_group, *wait):
        if shard in shards:
            reads.append((shard.name, row_group))
        return read(shard, row_group, *wait)
    monkeypatch.setattr(dataset.Shard, "read", counted)
    return reads


@pytest.mark.parametrize("packing", ["bestfit", "exactfit"])
def test_loading_reads_each_row_group_of_the_buffer_once(tmp_path, packing, monkeypatch):
    """The buffer holds more of its documents than are tokenized at once."""
    data = write_shards(tmp_path, [grouped(numbered([9] * 2000), [400] * 4), [["val"]]])
    loader = make(data, packing=packing, buffer_size=300, T=20)
    for _ in range(40):
        next(loader)
    state = loader.state_dict()
    held = [ref.group for ref in held_of(state["lanes"]["0"][data])]
    assert max(collections.Counter(held).values()) > 64
    again = make(data, packing=packing, buffer_size=300, T=20, prefetch=0)
    reads = count_reads(monkeypatch, again)
    again.load_state_dict(state)
    next(again)
    assert len(set(reads)) == len(reads) and {i for _, i in reads} >= {group % 5 for group in held}


def test_loading_on_an_object_that_was_iterated_and_going_on_after_a_state(corpus):
    loader = make(corpus, packing="exactfit")
    first = [rows_of(next(loader)) for _ in range(3)]
    state = loader.state_dict()
    second = [rows_of(next(loader)) for _ in range(3)]
    loader.load_state_dict(state)
    assert [rows_of(next(loader)) for _ in range(3)] == second
    fresh = make(corpus, packing="exactfit")
    fresh.load_state_dict(fresh.state_dict())
    assert [rows_of(next(fresh)) for _ in range(3)] == first


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(corpus, tmp_path):
    _, state = run(corpus, steps=3, num_lanes=4, packing="exactfit")
    for change, options, words in [
            ({"version": 99}, {}, "version"), ({}, {"packing": "flat"}, "packing"),
            ({}, {"tails": "drop"}, "tails"),
            ({}, {"buffer_size": 7}, "buffer_size"), ({}, {"shuffle_seed": 1}, "shuffle_seed"),
            ({}, {"tokenizer": ByteTokenizer("other")}, "tokenizer"), ({}, {"num_lanes": 8}, "num_lanes"),
            ({}, {"world_size": 3, "rank": 0}, r"world size in \[1, 2, 4\]"),
            ({}, {"split": "val", "num_lanes": 2}, "split of the state")]:
        loader = make(corpus, **{"packing": "exactfit", "num_lanes": None, **options})
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict({**state, **change})
        assert next(loader), "the loader is as it was"
    one_rank = make(corpus, num_lanes=4, rank=1, world_size=2)
    next(one_rank)
    with pytest.raises(ValueError, match=r"lacks lanes .* merge_states"):
        make(corpus, num_lanes=4).load_state_dict(one_rank.state_dict())
    with pytest.raises(ValueError, match="merge the states of all ranks"):
        merge_states([one_rank.state_dict()])


def test_a_setting_that_only_one_side_has_is_refused(corpus):
    """In either direction: a state from code that was hacked, or loaded into it."""
    for change in ({"config": {"augmented": True}}, {"config": {"tails": None}}):
        state = run(corpus, steps=3)[1]
        state["config"].update(change["config"])
        with pytest.raises(ValueError, match=r"(augmented|tails) of the state is (True|None), of this"):
            make(corpus).load_state_dict(state)
    state = run(corpus, steps=3)[1]
    del state["config"]["tails"]
    with pytest.raises(ValueError, match="tails of the state is 'not there', of this loader 'keep'"):
        make(corpus).load_state_dict(state)


def test_changed_shards_are_refused_and_appended_ones_come_in_the_next_epoch(corpus):
    same = {"packing": "flat", "shuffle_seed": 1, "num_lanes": 2}
    state = run(corpus, steps=3, **same)[1]
    os.rename(f"{corpus}/shard_00001.parquet", f"{corpus}/shard_00001a.parquet")
    with pytest.raises(ValueError, match="put the same files back"):
        make(corpus, **same).load_state_dict(state)
    os.rename(f"{corpus}/shard_00001a.parquet", f"{corpus}/shard_00001.parquet")
    want = collections.Counter(itertools.chain(*(text.encode() for text in corpus_texts(corpus) * 2)))
    head = run(corpus, steps=3, **same)[0]
    for number in (3, 4):    # a second time in the second epoch
        append_shard(corpus, number, ["appended"] * 5)
        loader = make(corpus, **same, epochs=3)
        loader.load_state_dict(state)
        if number == 3:
            while min(lane[corpus]["next"][0] for lane in loader.state_dict()["lanes"].values()) < 2:
                head += rows_of(next(loader))
            state = loader.state_dict()
    tail = [row for batch in loader for row in rows_of(batch)]
    assert loader.state_dict()["sources"][corpus]["shards"] == [[1, 3], [2, 4], [3, 5]]
    targets = collections.Counter(token for row in head + tail for token in real(row)[1:])
    want.update(itertools.chain(*(text.encode() for text in corpus_texts(corpus)), b"appended" * 5))
    del targets[BOS]
    assert targets == want


def append_shard(folder, number, documents):
    """A train shard behind the others; val stays last."""
    last = sorted(name for name in os.listdir(folder) if name.endswith(".parquet"))[-1]
    os.rename(f"{folder}/{last}", f"{folder}/shard_00009.parquet")
    pq.write_table(pa.table({"text": documents}), f"{folder}/shard_{number:05d}.parquet")


def test_one_ranks_state_does_not_tell_from_which_epoch_on_new_shards_count(corpus):
    loader = make(corpus, num_lanes=2, rank=0, world_size=2)
    state = loader.state_dict()
    append_shard(corpus, 3, ["appended"] * 5)
    with pytest.raises(ValueError, match="one rank's"):
        make(corpus, num_lanes=2, rank=0, world_size=2).load_state_dict(state)


@pytest.mark.parametrize("state", [{"pq_idx": 1, "rg_idx": 2, "epoch": 1}, {"pq_idx": 1, "rg_idx": 2}])
def test_nanochats_three_keys_are_refused(corpus, state):
    with pytest.raises(ValueError, match="state of nanochat's own loader"):
        make(corpus).load_state_dict(state)


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_row_length_may_change_at_a_state(corpus, packing, tails):
    """To and fro: flat and exactfit keep deliver every token of every document once all the same."""
    same, state, targets = {"packing": packing, "tails": tails, "num_lanes": 2, "epochs": 2}, None, []
    for T, steps in [(16, 5), (40, 3), (7, 9), (64, None)]:
        loader = make(corpus, T=T, **same)
        if state:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = list(itertools.islice(loader, steps))
        targets += [token for batch in batches for row in rows_of(batch) for token in real(row)[1:]]
        state = loader.state_dict()
    if packing == "flat" or (packing, tails) == ("exactfit", "keep"):
        want = collections.Counter(itertools.chain(*(text.encode() * 2 for text in corpus_texts(corpus))))
        assert collections.Counter(token for token in targets if token != BOS) == want
    else:
        assert len(targets) > 500


@pytest.mark.parametrize("state", [None, {}, {"version": 1}])
def test_what_is_no_state_is_not_merged(corpus, state):
    good = run(corpus, steps=3)[1]
    for states in ([state], [good, state], [state, good]):
        with pytest.raises(ValueError, match=r"a state is a dict|this state has version"):
            merge_states(states)


def test_no_thread_is_started_for_the_state_of_a_beginning(corpus):
    """Also of a loader that was closed before its first batch."""
    loader = make(corpus)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state and loader._pipeline is None
    want, again = make(corpus), make(corpus)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert [rows_of(next(again)) for _ in range(3)] == [rows_of(next(want)) for _ in range(3)]


@pytest.mark.parametrize("path", ["sources/FOLDER/shards", "lanes/0/FOLDER/held", "lanes/0/FOLDER/next",
                                  "lanes/0/FOLDER", "lanes/0/FOLDER/rows", "rows"])
@pytest.mark.parametrize("damage", ["left out", "null", "a word"])
def test_a_damaged_state_is_refused(corpus, path, damage):
    state = part = run(corpus, steps=3)[1]
    *path, last = [corpus if key == "FOLDER" else key for key in path.split("/")]
    for key in path:
        part = part[key]
    if damage != "left out":
        part[last] = None if damage == "null" else "word"
    else:
        del part[last]
    with pytest.raises(ValueError, match=r"this state (is damaged|lacks)"):
        make(corpus).load_state_dict(state)


@pytest.mark.parametrize("place", [[0, 0, 0, 0], [1, -1, 0, 0], [1, 10**6, 0, 0], [2, 0, -1, 0],
                                   [1, 0, 10**6, 0]], ids=str)
def test_a_state_that_goes_on_where_no_document_is_is_refused(corpus, place):
    """States may be written by hand, to begin somewhere: a slip would begin elsewhere."""
    state = make(corpus).state_dict()
    state["lanes"]["0"][corpus]["next"] = place
    with pytest.raises(ValueError, match=r"goes on at Ref\(.*no such document"):
        make(corpus).load_state_dict(state)


@pytest.mark.parametrize("state, words", [
    ({}, "version None"), ({"epoch": 1}, "version None"), (None, "a state is a dict"),
    ({"version": dataloader.VERSION, "rows": 0}, r"lacks \['config', 'lanes', 'sources'\]")])
def test_what_is_no_state_is_refused(corpus, state, words):
    with pytest.raises(ValueError, match=words):
        make(corpus).load_state_dict(state)


def test_merging_no_states_is_an_error():
    with pytest.raises(ValueError, match="no states to merge"):
        merge_states([])


def test_a_state_shares_nothing_with_the_loader(corpus):
    loader = make(corpus, packing="exactfit")
    next(loader)
    state = loader.state_dict()
    before = json.dumps(state)
    for part in state["lanes"]["0"].values():
        part["next"][0] = 77
    state["sources"][corpus]["shards"][0][0] = 77
    assert json.dumps(loader.state_dict()) == before


def test_a_state_costs_no_encoding(corpus):
    tokenizer = PlainTokenizer()
    loader = make(corpus, tokenizer=tokenizer)
    next(loader)
    tokenizer.encode = None
    loader.state_dict()


@pytest.mark.parametrize("bad, words", [
    ({"split": "test"}, "choose one of train, val"), ({"packing": "bfd"}, "flat, bestfit, exactfit"),
    ({"B": 0}, "B=0; expected an int, 1 or more"), ({"T": 1.5}, "T=1.5"),
    ({"prefetch": -1}, "prefetch=-1; expected an int, 0 or more"),
    ({"buffer_size": 0}, "buffer_size=0"), ({"num_lanes": 0}, "num_lanes=0"), ({"threads": 0}, "threads=0"),
    ({"shuffle_seed": -1}, "shuffle_seed=-1"), ({"shuffle_seed": "a"}, "shuffle_seed='a'"),
    ({"world_size": 0}, "world_size=0"), ({"T": np.int64(16)}, "T=.*expected an int"),
    ({"epochs": 0}, "epochs=0"),
    ({"rank": 2, "world_size": 2}, "rank=2"),
    ({"num_lanes": 3, "rank": 0, "world_size": 2}, "multiple of 2"), ({"epochs": {"x": 1}}, "epochs names")])
def test_bad_arguments_say_what_to_choose(corpus, bad, words):
    with pytest.raises(ValueError, match=words):
        make(corpus, **bad)


# ---------------------------------------------------------------------------------------------------------
# Promise 3: ranks in step at the end of a finite run, and nobody waits for ever

RANK_PROGRAM = """
import sys; sys.path.insert(0, {here!r})
import itertools, json, os, time, torch.distributed as dist, dataloader
from test_dataloader import made, make, rows_of
dist.init_process_group("gloo")
rank = dist.get_rank()
for n in range({before}):
    for batch in make({data!r}, num_lanes=4, epochs=1):
        pass
    made.pop().close()
    files = len(os.listdir("/dev/fd"))
    first = files if n < 2 else first
    assert files <= first + 2, (n, files, first)
if {gather}:
    loader = make({data!r}, num_lanes=4)
    for _ in range(3):
        next(loader)
    print("RESULT", json.dumps([rank, json.dumps(dataloader.gather_states(loader)).replace("null", "None")
                                if rank else json.dumps(dataloader.gather_states(loader)), []]), flush=True)
    os._exit(0)
loader, rows = make({data!r}, num_lanes=4, epochs=1, **{options!r}), []
made.clear()
try:
    leave = {leave!r} if rank == 1 else None
    for batch in itertools.islice(loader, {after} if leave else None):
        rows.append(rows_of(batch))
    if leave == "close":
        loader.close()
    elif leave == "del":
        del loader
    if leave and leave != "exit":
        time.sleep(3)    # alive, but without its loader
    end = "ended"
except (RuntimeError, ValueError) as error:
    end = str(error)
print("RESULT", json.dumps([rank, end, rows]), flush=True)
os._exit(0)
"""


def own_store():
    """For ranks that this process starts, as torchrun has it: none has to find a port that is still free."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def at_store(store):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True"}


def on_two_ranks(data, leave=None, after=2, before=0, gather=False, **options):
    """
    [(how it ended, rows per batch)] of two real processes over gloo; fails where one hangs. leave: how rank
    1 does, `after` so many batches. before: so many runs have ended in these processes. gather: only gather
    the states after 3 batches of an endless run.
    """
    program = RANK_PROGRAM.format(here=HERE, data=data, options=options, leave=leave, after=after,
                                  before=before, gather=gather)
    store = own_store()
    env = {**os.environ, "WORLD_SIZE": "2", **at_store(store)}
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                              env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        out = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads(text.split("RESULT ")[1]) if "RESULT" in text else [i, "gone", []]
               for i, text in enumerate(out)]
    return [(end, rows) for _, end, rows in results]


@pytest.mark.parametrize("uneven", ["pad", "stop", "error"])
def test_ranks_of_a_finite_run_end_at_the_same_batch(corpus, uneven):
    """Lanes differ: pad loses and repeats nothing, stop ends with the shortest, error says by how much."""
    (end_0, rows_0), (end_1, rows_1) = on_two_ranks(corpus, uneven=uneven)
    want = [rows_of(batch) for batch in make(corpus, B=4, num_lanes=4, epochs=1)]
    got = [[row for pair in zip(*both, strict=True) for row in pair]
           for both in zip(rows_0, rows_1, strict=True)]
    full = [batch for batch in want if all(real(row) for row in batch)]
    assert 0 < len(full) < len(want)
    if uneven == "error":
        assert "lane 3:" in end_0 and end_0 == end_1
    else:
        assert (end_0, end_1) == ("ended", "ended")
        assert [[list(row) for row in batch] for batch in (want if uneven == "pad" else full)] == got


@pytest.mark.parametrize("uneven", ["pad", "stop", "error"])
def test_a_finite_run_of_one_rank_ends_where_that_of_two_does(corpus, uneven):
    loader = make(corpus, B=4, num_lanes=4, epochs=1, uneven=uneven)
    if uneven == "error":
        with pytest.raises(ValueError, match="lane 3:"):
            list(loader)
        return
    full = [all(real(row) for row in rows_of(batch)) for batch in loader]
    assert all(full) == (uneven == "stop") and len(full) > 5


@pytest.mark.parametrize("leave, after", [("close", 0), ("close", 2), ("del", 2), ("exit", 2)])
def test_no_rank_hangs_where_another_stops_early(corpus, leave, after):
    (end, rows), _ = on_two_ranks(corpus, leave=leave, after=after)
    assert "lost a rank: it ended, or closed its loader, too soon" in end
    assert len(rows) >= after


def test_finite_runs_one_after_another_leave_no_open_files(corpus):
    """An eval loader for every eval: each ends, is closed, and the next one is made."""
    (end_0, rows_0), (end_1, rows_1) = on_two_ranks(corpus, before=30)
    assert end_0 == end_1 == "ended" and rows_0 and rows_1


def test_a_dataloader_worker_cannot_meet_other_ranks(corpus, monkeypatch):
    monkeypatch.setattr(dataloader, "get_worker_info", lambda: SimpleNamespace(num_workers=1))
    loader = make(corpus, epochs=1)
    assert iter(loader) is loader
    monkeypatch.setattr(dataloader, "InStep", lambda *_: SimpleNamespace(close=lambda: None))
    with pytest.raises(ValueError, match="num_workers=0"):
        iter(make(corpus, epochs=1, rank=0, world_size=2))


# ---------------------------------------------------------------------------------------------------------
# Promises 2 and 6: batches stay as they were, errors arrive, and nothing hangs

def test_a_batch_that_was_yielded_is_never_written_again(corpus):
    loader = make(corpus, prefetch=3)
    kept = [next(loader) for _ in range(20)]
    copies = [(inputs.clone(), targets.clone()) for inputs, targets in kept]
    for _ in range(20):
        next(loader)
    pairs = zip(itertools.chain(*kept), itertools.chain(*copies), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len({inputs.data_ptr() for inputs, _ in kept}) == len(kept)


class Poisoned(ByteTokenizer):
    def encode_documents(self, texts):
        if any(text is not None and b"poison" in bytes(text) for text in texts):
            raise BaseException("boom")    # as tiktoken's panics: no Exception
        return super().encode_documents(texts)


def test_an_error_in_a_thread_reaches_next_with_shard_row_group_and_row(tmp_path):
    documents = numbered([30] * 40)
    documents[27] = "poison"
    data = write_shards(tmp_path, [grouped(documents, [10, 10, 10]), [["val"]]])
    loader = make(data, B=1, packing="flat", tokenizer=Poisoned())
    with pytest.raises(RuntimeError, match=r"shard_00000.parquet, row group 2, row 7: BaseException: boom"):
        for _ in range(200):
            next(loader)
    with pytest.raises(RuntimeError, match="boom"):
        next(loader)    # and again: no batch is skipped


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_anywhere_in_next_loses_no_batch(corpus, first):
    """At each opcode of the loader's code until its place has moved, in the first call or a later one."""
    want = [rows_of(batch) for batch in itertools.islice(make(corpus), 3)]
    sys._getframe().f_trace_opcodes = True    # of any frame: Python 3.12 looks for one where tracing begins
    interrupted = 0
    for k in itertools.count():
        loader = make(corpus)
        rows = [] if first else [rows_of(next(loader))]
        rows_before, left = loader.rows, k

        def trace(frame, event, arg, loader=loader, rows_before=rows_before):
            nonlocal left
            if frame.f_code.co_filename != dataloader.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_name in ("__next__", "next_batch", "_start", "__init__"):
                if left == 0 and loader.rows == rows_before:
                    left = -1
                    raise KeyboardInterrupt
                left -= 1
            return trace

        sys.settrace(trace)
        try:
            rows.append(rows_of(next(loader)))
            break
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        rows += [rows_of(next(loader)) for _ in range(2 - len(rows))]
        assert rows == want[:2], k
        loader.close()
    assert interrupted > 40


def test_a_fork_while_a_thread_reads_a_footer_does_not_hang(tmp_path):
    """A lock that the reading thread holds would stay locked in the child for ever."""
    make_shards(tmp_path)
    program = f"""
import sys, signal; sys.path.insert(0, {HERE!r})
from test_dataloader import *
shard, = dataset.list_shards({str(tmp_path)!r}, "val")
read, reading, go_on, parent = dataset.read_footer, threading.Event(), threading.Event(), os.getpid()
def slowly(*place):
    reading.set()
    if os.getpid() == parent:
        go_on.wait()
    return read(*place)
dataset.read_footer = slowly
thread = threading.Thread(target=shard.read, args=(0,))
thread.start()
reading.wait()
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(0 if len(shard.read(0)) == 8 else 1)
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
os._exit(status)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=200).returncode == 0


def test_close_wakes_a_next_that_waits(corpus):
    class Stuck(ByteTokenizer):
        def encode_documents(self, texts):
            if texts != [b"a", None, b"a"]:    # by which a tokenizer is proven when the loader is made
                go_on.wait()
            return super().encode_documents(texts)

    go_on = threading.Event()
    loader = make(corpus, tokenizer=Stuck())
    timer = threading.Timer(0.3, loader.close)
    timer.start()
    with pytest.raises(RuntimeError, match="was closed"):
        next(loader)
    go_on.set()
    timer.join()


def test_close_ends_a_next_that_is_still_starting_threads(corpus, monkeypatch):
    made_by, ended = dataloader.Encoder.__init__, []

    def closed_meanwhile(*args):
        made_by(*args)
        loader.close()

    def ask():
        with pytest.raises(RuntimeError, match="was closed"):
            next(loader)
        ended.append(True)

    monkeypatch.setattr(dataloader.Encoder, "__init__", closed_meanwhile)
    loader = make(corpus)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60)
    assert ended, "it gives a batch, or waits for ever"


def test_a_loader_that_the_garbage_collector_finds_in_its_own_submit_ends(corpus):
    """... and no lock of the executors stays held: the next loader works."""
    program = f"""
import sys; sys.path.insert(0, {HERE!r})
from test_dataloader import *
from concurrent.futures import Future
loader, node, armed, init = make({corpus!r}, prefetch=8), SimpleNamespace(), [], Future.__init__
def collecting(self):
    init(self)
    if armed and threading.current_thread().name == "pack":
        armed.clear()
        gc.collect()
        print("collected", flush=True)
made.clear()
next(loader)
node.me, node.loader, pipeline, Future.__init__ = node, loader, loader._pipeline, collecting
gc.disable()
armed.append(True)
del loader, node
while armed:
    pipeline.ready.clear()
    pipeline.requests.put(True)
    time.sleep(0.01)
next(make({corpus!r}))
print("fine")
"""
    assert run_program(program) == "collected\nfine\n"


def test_a_loader_of_another_thread_ends_with_the_main_thread(corpus):
    program = f"""
import sys; sys.path.insert(0, {HERE!r})
from test_dataloader import *
def train():
    loader = make({corpus!r})
    made.clear()
    try:
        while next(loader):
            began.set()
            time.sleep(0.01)
    except RuntimeError as error:
        print(error, flush=True)
began = threading.Event()
threading.Thread(target=train).start()
began.wait()
"""
    assert re.search("or the program ends|cannot schedule new futures", run_program(program))


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                          timeout=120).stdout


def test_a_loader_that_is_closed_does_not_try_again_for_minutes(tmp_path, monkeypatch):
    """At exit Python waits for the threads that read."""
    monkeypatch.setattr(dataset, "RETRY_SECONDS", 100)
    make_shards(tmp_path)
    with UnrulyServer(served(tmp_path)) as server:
        before, loader = set(threading.enumerate()), make(f"{server.url}/index.json")
        server.forever = 503
        asked = len(server.requests)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, loader)
            while len(server.requests) == asked:
                time.sleep(0.01)
            readers = [t for t in set(threading.enumerate()) - before if t.name.startswith("read")]
            loader.close()
            with pytest.raises(RuntimeError, match="was closed"):
                waiting.result(60)
        for thread in readers:
            thread.join(20)
        assert readers and not any(thread.is_alive() for thread in readers)


def test_loading_while_another_thread_gets_a_batch(corpus, monkeypatch):
    """It waits for that batch, and the next one is of what was loaded."""
    loader, want, next_batch = make(corpus), make(corpus), dataloader.Pipeline.next_batch
    state, inside, go_on = loader.state_dict(), threading.Event(), threading.Event()
    next(loader), next(loader)

    def slow(pipeline, position):
        batch = next_batch(pipeline, position)
        inside.set()
        go_on.wait()
        return batch

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(dataloader.Pipeline, "next_batch", slow)
        third = pool.submit(next, loader)
        inside.wait()
        loaded = pool.submit(loader.load_state_dict, state)
        time.sleep(0.1)
        go_on.set()
        assert rows_of(third.result()) and loaded.result() is None
    assert rows_of(next(loader)) == rows_of(next(want))


def test_ctrl_c_anywhere_in_loading_leaves_the_old_run_or_the_new_one(corpus):
    state = make(corpus, num_lanes=4).state_dict()
    sys._getframe().f_trace_opcodes = True
    seen = set()
    for k in itertools.count():
        loader, left = make(corpus, num_lanes=None), k
        next(loader)

        def trace(frame, event, arg):
            nonlocal left
            if frame.f_code.co_name != "_go_to":
                return trace if frame.f_code.co_name == "load_state_dict" else None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            loader.load_state_dict(state)
            break
        except KeyboardInterrupt:
            sys.settrace(None)
            now = loader.state_dict()
            assert len(now["lanes"]) == now["config"]["num_lanes"] and next(loader)
            seen.add(now["config"]["num_lanes"])
        finally:
            sys.settrace(None)
            loader.close()
    assert seen == {4, 8}


def test_stats_while_a_packer_begins_to_count_something(corpus):
    class Growing(collections.Counter):
        def items(self):
            for i, item in enumerate(super().items()):
                self[i] = 1
                yield item

    loader = make(corpus)
    next(loader)
    loader._pipeline.lanes[0].streams[corpus].packer.counts = Growing(documents=3, cut=1)
    assert loader.stats()["documents"] == 3


def test_a_loader_is_not_pickled(corpus):
    with pytest.raises(TypeError, match="num_workers=0"):
        make(corpus).__getstate__()


@pytest.mark.parametrize("how", ["loader.close()", "del loader", "pass", "raise SystemExit", "1 / 0"])
def test_close_del_and_exit_return(corpus, how):
    """A slow tokenizer's threads are at work and batches are ahead when it ends."""
    program = f"""
import sys, time; sys.path.insert(0, {HERE!r})
from test_dataloader import *
class Slow(ByteTokenizer):
    def encode_documents(self, texts):
        time.sleep(0.05)
        return super().encode_documents(texts)
loader = make({corpus!r}, tokenizer=Slow(), prefetch=4)
made.clear()
next(loader)
print("started", flush=True)
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "started\n", done.stderr
    assert (done.returncode == 0) == (how != "1 / 0")


def test_threads_end_with_the_loader(corpus):
    before, loader = set(threading.enumerate()), make(corpus)
    next(loader)
    its_own = set(threading.enumerate()) - before
    assert len(its_own) > 2
    made.clear()
    del loader
    gc.collect()
    for thread in its_own:
        thread.join(60)
        assert not thread.is_alive()


def test_memory_is_flat_over_20_epochs(corpus):
    loader = make(corpus, packing="exactfit", prefetch=0)
    sizes = []
    tracemalloc.start()
    for step in range(2000):
        next(loader)
        if step in (500, 1999):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert loader.state_dict()["lanes"]["0"][corpus]["next"][0] > 20
    assert sizes[1] < sizes[0] + 100_000, sizes


@pytest.mark.parametrize("packer", [BestFitPacker(8, 4, 9), ExactFitPacker(8, 4, "keep")])
def test_a_document_that_may_stay_long_does_not_keep_its_chunk_in_memory(packer):
    chunk = chunk_of([3, 100, 100, 100])
    alive = weakref.ref(chunk.ids)
    chunks = [chunk]
    del chunk
    row = packer.row(lambda: chunks.pop() if chunks else None)
    del row
    assert packer.held() and alive() is None


# ---------------------------------------------------------------------------------------------------------
# The faces: torch's DataLoader, nanochat's generators, other tokenizers, tokens on disk

@pytest.mark.parametrize("alone", ["RANK", "WORLD_SIZE"])
def test_one_variable_of_a_launcher_without_the_other_is_an_error(corpus, alone, monkeypatch):
    """As Lightning's and Fabric's own launchers leave them: every rank would get the same rows."""
    monkeypatch.setenv(alone, "1")
    with pytest.raises(ValueError, match=f"of RANK and WORLD_SIZE only {alone}=1 is set"):
        make(corpus)
    assert make(corpus, rank=1, world_size=2).rank == 1
    for half in ({"rank": 0}, {"world_size": 2}):
        with pytest.raises(ValueError, match="pass both, or neither"):
            make(corpus, **half)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_srun_and_mpirun_without_ranks_are_an_error(corpus, name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert make(corpus).world_size == 1
    monkeypatch.setenv(name, "4")
    with pytest.raises(ValueError, match=f"{name}=4, but no RANK"):
        make(corpus)
    assert make(corpus, rank=1, world_size=4).rank == 1
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert make(corpus, num_lanes=4).rank == 2


def test_a_group_that_came_into_being_behind_the_loader_is_an_error(corpus, monkeypatch):
    loader, asked = make(corpus, num_lanes=2), make(corpus, rank=0, world_size=1)
    monkeypatch.setattr(dataloader, "ranks_of_this_process", lambda: (1, 2))
    with pytest.raises(RuntimeError, match=r"rank 0 of 1, but here is rank 1 of 2; .* rank=1, world_size=2"):
        next(loader)
    assert next(asked)


def test_a_workers_loader_is_not_the_main_process_s(corpus):
    """Its state would say row 0; and a second worker would begin the run again."""
    loader = make(corpus)
    batches = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1)
    assert len(list(itertools.islice(batches, 3))) == 3
    with pytest.raises(RuntimeError, match="StatefulDataLoader"):
        loader.state_dict()
    with pytest.raises(ValueError, match="another DataLoader worker"):
        next(iter(batches))
    finite = torch.utils.data.DataLoader(make(corpus, epochs=1), batch_size=None, num_workers=1)
    first, second = ([rows_of(batch) for batch in finite] for _ in range(2))
    assert first == second and first


def test_a_finite_loader_begins_again_with_a_new_iter(corpus):
    loader = make(corpus, epochs=1)
    first = [rows_of(batch) for batch in loader]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert [rows_of(batch) for batch in loader] == first and len(first) > 10


def test_a_finite_loader_that_is_broken_off_goes_on(corpus):
    """As iterators do: a step's micro-batches by islice() must not be the run's first ones for ever."""
    want, loader = [rows_of(batch) for batch in make(corpus, epochs=1)], make(corpus, epochs=1)
    start, got = loader.state_dict(), [rows_of(next(loader))]
    for batch in loader:
        got.append(rows_of(batch))
        if len(got) == 4:
            break
    got += map(rows_of, itertools.islice(loader, 2))
    middle = loader.state_dict()
    got += map(rows_of, torch.utils.data.DataLoader(loader, batch_size=None))
    assert got == want and len(want) > 10
    for state, rows in (middle, want[6:]), (start, want):    # also behind the end
        loader.load_state_dict(state)
        assert list(map(rows_of, loader)) == rows


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
def test_states_of_the_batches_before_hold_no_tokens(corpus, packing):
    """64 of them would keep 64 batches of tokens in memory."""
    loader, refs = make(corpus, packing=packing, prefetch=0, T=64, threads=1), []
    encode = loader.face.encode
    loader.face.encode = lambda *args: note(*encode(*args))

    def note(ids, bounds):
        refs.append(weakref.ref(ids))
        return ids, bounds

    for _ in range(40):
        next(loader)
    gc.collect()
    alive = sum(ref() is not None for ref in refs)
    assert alive <= 16 < 40 < len(refs), "those that are packed, and the nine that are encoded ahead"


def test_a_state_of_a_batch_that_is_not_known_is_an_error(corpus):
    loader = make(corpus)
    next(loader), next(loader)
    assert loader.state_dict(batches_ago=2)["rows"] == 0
    for n in (-1, 3):
        with pytest.raises(ValueError, match=f"batches_ago={n}: expected 0 to 2"):
            loader.state_dict(batches_ago=n)


def test_a_transformation_that_returns_no_integers_is_an_error(corpus):
    loader = make(corpus, transform=lambda ids, ref, place: ids * 0.5)
    with pytest.raises(RuntimeError, match="row 0: TypeError: transform returned float64; expected integers"):
        next(loader)


def test_states_of_the_batches_before(corpus):
    """For those who fetch one batch ahead and save the state when they have trained on the one before."""
    loader, states = make(corpus, packing="exactfit"), []
    for _ in range(5):
        states.append(loader.state_dict())
        next(loader)
    assert [loader.state_dict(batches_ago) for batches_ago in (5, 4, 3, 2, 1)] == states


def test_threads_that_share_a_loader_share_its_batches(corpus):
    loader, want = make(corpus), make(corpus)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: rows_of(next(loader)), range(60)))
    assert sorted(got) == sorted(rows_of(next(want)) for _ in range(60))


def test_a_loader_closes_itself_and_says_what_it_is(corpus):
    with make(corpus, num_lanes=2) as loader:
        next(loader)
        what = "data, train, exactfit, B=2, T=16, rank 0 of 1, 2 lanes, row 2)"
        assert repr(loader).startswith("PackedLoader(") and repr(loader).endswith(what)
    with pytest.raises(RuntimeError, match="was closed"):
        next(loader)


class Forgetful(PlainTokenizer):
    def encode(self, texts, prepend=None, num_threads=8):
        return super().encode(texts)


@pytest.mark.parametrize("tokenizer", [Forgetful(), object(), SimpleNamespace(get_bos_token_id=lambda: 1)])
def test_a_tokenizer_that_puts_no_bos_in_front_is_refused_with_a_wrapper(corpus, tokenizer):
    with pytest.raises(ValueError, match=r"without BOS|cannot be used") as error:
        make(corpus, tokenizer=tokenizer)
    assert "def encode(self, texts, prepend=None, num_threads=8):" in str(error.value)


class OnlyDocuments:
    """The face that the docstring names, and nothing more."""
    get_bos_token_id = ByteTokenizer.get_bos_token_id

    def encode_documents(self, texts):
        return ByteTokenizer().encode_documents(texts)


class Wrapped:
    """As the error message shows it: the ids of an encoder of somebody else's, which refuses nothing."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=8):
        return [[prepend, *ids] for ids in [list(text.encode()) for text in texts]]


@pytest.mark.parametrize("tokenizer", [OnlyDocuments(), Wrapped()])
def test_a_tokenizer_of_few_methods_gives_the_same_rows(corpus, tokenizer):
    want, loader = make(corpus), make(corpus, tokenizer=tokenizer)
    assert [rows_of(next(loader)) for _ in range(9)] == [rows_of(next(want)) for _ in range(9)]


def test_a_shuffled_row_group_is_shuffled_once_for_all_documents_that_are_held(tmp_path, monkeypatch):
    """Once for each of them took 24 s, where the row group had 50,000 documents."""
    data = write_shards(tmp_path, [[numbered([9] * 2000)], [["val"]]])
    same = {"packing": "bestfit", "buffer_size": 300, "T": 20, "shuffle_seed": 1}
    state, again, calls = run(data, steps=9, **same)[1], make(data, **same), []
    shuffled = dataloader.shuffled
    monkeypatch.setattr(dataloader, "shuffled", lambda *place: calls.append(place) or shuffled(*place))
    again.load_state_dict(state)
    next(again)
    assert len(held_of(state["lanes"]["0"][data])) > 250 and len(calls) < 12


def test_a_row_group_that_lanes_share_is_not_read_for_each_of_them_anew(tmp_path, monkeypatch):
    data = write_shards(tmp_path, [[numbered([9] * 80)], [["val"]]])
    loader = make(data, num_lanes=8, epochs=2, T=30)
    reads = count_reads(monkeypatch, loader)
    assert len(list(loader)) > 20 and len(reads) <= 8, "16 where each lane dropped what it had just asked for"


def test_a_row_group_of_which_other_lanes_have_parts_is_not_dropped(tmp_path, monkeypatch):
    data = write_shards(tmp_path, [grouped(numbered([9] * 80), [20] * 3), [["val"]]])
    loader = make(data, num_lanes=8, epochs=1, T=30)
    reads = count_reads(monkeypatch, loader)
    assert len(list(loader)) > 10 and sorted(reads) == [("shard_00000.parquet", i) for i in range(4)]


def test_the_first_row_groups_of_a_batchs_lanes_are_read_together(tmp_path, monkeypatch):
    """One after the other, each lane would wait for a store that is far away."""
    data = write_shards(tmp_path, [grouped(numbered([9] * 80), [20] * 3), [["val"]]])
    together, read = threading.Barrier(4), dataset.Shard.read

    def read_with_the_others(shard, *row_group):
        together.wait(60)
        return read(shard, *row_group)

    monkeypatch.setattr(dataset.Shard, "read", read_with_the_others)
    assert rows_of(next(make(data, B=4, num_lanes=4, threads=4, prefetch=0, epochs=1)))


def test_nothing_is_dropped_again_by_loading(corpus):
    same = {"packing": "exactfit", "tails": "drop", "T": 4, "prefetch": 0}
    state, loader = run(corpus, steps=20, **same)[1], make(corpus, **same)
    assert any(ref.token == 0 for ref in held_of(state["lanes"]["0"][corpus]))
    loader.load_state_dict(state)
    loader._start()
    loader._pipeline.lanes[0].streams[corpus].row()
    stats = loader.stats()
    assert stats["tokens_dropped"] <= 41 * stats["documents"] + 70


@pytest.mark.parametrize("uneven", ["pad", "stop"])
def test_an_error_in_a_finite_run_of_ranks_is_an_error_again(corpus, uneven, monkeypatch):
    """As a generator it would end behind the first one, and the run with it, without a word."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: object())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: None)
    loader = make(corpus, rank=0, world_size=2, num_lanes=2, epochs=1, uneven=uneven)
    state = loader.state_dict()
    loader.tokenizer.encode_documents = None
    for _ in range(3):
        with pytest.raises(RuntimeError, match="NoneType"):
            next(loader)
    del loader.tokenizer.encode_documents
    loader.load_state_dict(state)
    assert len(list(loader)) > 5


def test_states_of_all_ranks_are_gathered_on_rank_0(corpus):
    ranks = on_two_ranks(corpus, gather=True)
    (state, _), (nothing, _) = ranks
    assert nothing == "None"
    assert json.loads(state) == json.loads(json.dumps(run(corpus, steps=3, world=2, num_lanes=4)[1]))


@pytest.mark.parametrize("workers", [0, 1])
def test_torch_dataloader_takes_it_as_it_is(corpus, workers):
    want = [rows_of(batch) for batch in itertools.islice(make(corpus), 5)]
    torch_loader = torch.utils.data.DataLoader(make(corpus), batch_size=None, num_workers=workers)
    assert [rows_of(batch) for batch in itertools.islice(torch_loader, 5)] == want


def test_two_dataloader_workers_are_an_error(corpus, monkeypatch):
    monkeypatch.setattr(dataloader, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(ValueError, match="num_workers=0"):
        iter(make(corpus))


def test_a_fork_of_a_loader_that_runs_goes_on_from_its_place(corpus):
    """Its threads stay behind in the process that started them, so the child starts anew."""
    loader, want = make(corpus), make(corpus)
    for _ in range(3):
        assert rows_of(next(loader)) == rows_of(next(want))
    loader._pid = -1    # as a child sees its parent's
    assert [rows_of(next(loader)) for _ in range(4)] == [rows_of(next(want)) for _ in range(4)]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_nanochats_generators_give_nanochats_rows(tmp_path, lanes, monkeypatch):
    """Its rule, over its order, by scans; with 3 ranks the row groups of a shard are no multiple of them."""
    lengths = [(7 * i * i + 3) % 90 for i in range(96)]
    groups = grouped(numbered(lengths), [12] * 7)
    data = write_shards(tmp_path, [groups[:4], groups[4:], [["val"]]])
    monkeypatch.setattr(dataloader, "default_data_dir", lambda: data)
    for rank in range(lanes):
        batches = [group[i:i + 5] for _ in range(900) for shard in (groups[:4], groups[4:])
                   for group in shard[rank::lanes] for i in range(0, len(group), 5)]
        want = nanochat_rows(batches, T=40, buffer_size=20)
        monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", str(lanes))
        loader = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit(
            PlainTokenizer(), 8, 40, "train", 2, 5, "cpu", None, 20)
        got, state = [], None
        for inputs, targets, state in itertools.islice(loader, 1260):    # noqa: B007
            got += rows_of((inputs, targets))
        assert [list(row) for row in got] == want[:len(got)] and len(got) > 10_000
        assert {"pq_idx", "rg_idx", "epoch"} <= state.keys()
        again = dataloader.tokenizing_distributed_data_loader_bos_bestfit(
            PlainTokenizer(), 8, 40, "train", 2, 5, "cpu", buffer_size=20)
        assert rows_of(next(again)) == got[:8]


def nanochat_rows(batches, T, buffer_size):
    """Rows until the batches run out: its buffer, its scan, its crop."""
    batches, buffer, rows = iter(batches), [], []
    while True:
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size:
                texts = next(batches, None)
                if texts is None:
                    return rows
                buffer += [[BOS, *text.encode()] for text in texts]
            free = T + 1 - len(row)
            fitting = [d for d in buffer if len(d) <= free]
            document = max(fitting, key=len) if fitting else min(buffer, key=len)
            buffer.remove(document)
            row += document[:free]
        rows.append(row)


def test_flat_generator_of_nanochat(corpus, monkeypatch):
    monkeypatch.setattr(dataloader, "default_data_dir", lambda: corpus)
    want = [rows_of(batch) for batch in itertools.islice(make(corpus, packing="flat"), 6)]
    loader = dataloader.tokenizing_distributed_data_loader_with_state(
        ByteTokenizer(), 2, 16, "train", device="cpu")
    *_, (_, _, state) = itertools.islice(loader, 3)
    resumed = dataloader.tokenizing_distributed_data_loader(
        ByteTokenizer(), 2, 16, "train", device="cpu", resume_state_dict=state)
    assert [rows_of(batch) for batch in itertools.islice(resumed, 3)] == want[3:]


def test_shards_that_are_appended_count_from_the_next_epoch_on_in_nanochats_generators(corpus, monkeypatch):
    monkeypatch.setattr(dataloader, "default_data_dir", lambda: corpus)
    generator = functools.partial(dataloader.tokenizing_distributed_data_loader_with_state,
                                  ByteTokenizer(), 2, 16, "train", device="cpu")
    want = [rows_of((inputs, targets)) for inputs, targets, _ in itertools.islice(generator(), 12)]
    *_, (_, _, state) = itertools.islice(generator(), 4)
    append_shard(corpus, 3, ["appended"] * 5)
    resumed = list(itertools.islice(generator(resume_state_dict=state), 80))
    rows = [row for inputs, targets, _ in resumed for row in rows_of((inputs, targets))]
    n_old = sum(map(len, corpus_texts(corpus))) + 60
    assert state["rows"] == 8 and [rows_of(batch[:2]) for batch in resumed[:8]] == want[4:]
    first = next(i for i, row in enumerate(rows) if b"appended" in bytes(t % 256 for t in row))
    assert (first + 8) * 16 > n_old - 16, "not in the epoch of the state"


def test_nanochats_generators_do_not_take_the_built_in_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"no parquet files in {tmp_path}/base_data"):
        next(dataloader.tokenizing_distributed_data_loader(ByteTokenizer(), 2, 16, "train", device="cpu"))


def test_where_nanochat_would_read_another_folder_a_line_names_both(corpus, tmp_path, monkeypatch, capsys):
    """Its newest sources take base_data_climbmix where both are there; we take base_data."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(dataset, "build_builtin_corpus", lambda folder: shutil.copytree(corpus, folder))
    taken, other = str(tmp_path / "base_data"), str(tmp_path / "base_data_climbmix")
    shutil.copytree(corpus, taken)

    def output():
        next(dataloader.tokenizing_distributed_data_loader(ByteTokenizer(), 2, 16, "train", device="cpu"))
        make(None, num_lanes=2), make(taken)
        return capsys.readouterr().out

    assert output() == ""
    os.mkdir(other)
    assert output().count(f"data: {taken} is read, not nanochat's {other}; ") == 2, "none where asked for"
    shutil.rmtree(taken)
    make(None)
    assert f"is read, not nanochat's {other}; " in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    make(None, num_lanes=2)
    assert capsys.readouterr().out == ""


def test_a_tokenizer_with_nanochats_face_only_gives_the_same_rows(corpus):
    for packing, tails in PACKINGS:
        plain, own = (make(corpus, packing=packing, tails=tails, tokenizer=tokenizer)
                      for tokenizer in (PlainTokenizer(), ByteTokenizer()))
        assert [rows_of(next(plain)) for _ in range(9)] == [rows_of(next(own)) for _ in range(9)]


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_a_run_stops_on_text_and_resumes_on_tokens(tmp_path, packing, tails):
    """Among short documents are some of which drop and bestfit want only the beginning."""
    lengths = [(13 * i * i + 3) % 41 * (1 if i % 4 else 9) for i in range(60)]
    text = write_shards(tmp_path / "text", [grouped(numbered(lengths), [5] * 11), [["val"]]])
    tokens = tokenized_copy(text, tmp_path / "tokens")
    want, _ = run(text, steps=90, packing=packing, tails=tails)
    head, state = run(text, steps=31, packing=packing, tails=tails)
    tail, _ = run(tokens, steps=59, packing=packing, tails=tails, state=state)
    assert head + tail == want


@pytest.mark.parametrize("packer, longest", [
    (BestFitPacker(8, 4, 9), 9), (ExactFitPacker(8, 4, "drop"), 9 + 64)])
def test_no_more_of_a_document_is_held_than_may_be_delivered(packer, longest):
    """Also where it comes whole, from tokens on disk."""
    packer.row(puller([3, 4, 100, 100, 100]))
    assert max(map(len, packer.buffer.values())) == longest


def test_null_slots_of_a_token_shard_that_hold_bytes_are_null(tmp_path):
    """As other programs may write them: Arrow leaves open what the slot of a null holds."""
    text = write_shards(tmp_path / "text", [[["ab", None, "c"]], [["val"]]])
    ids = np.array([BOS, 97, 98, BOS, 120, 121, BOS, 99], np.uint16)
    offsets, valid = np.array([0, 6, 12, 16], np.int32), np.packbits([True, False, True], bitorder="little")
    array = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(buffer) for buffer in (valid, offsets, ids)])
    assert array.null_count == 1 and array.buffers()[2].size == 16
    loader = make(tokenized_copy(text, tmp_path / "tokens"), B=1, T=8, packing="flat", epochs=1)
    for source in loader.sources.values():
        for shard in source.shards:
            shard.read = lambda row_group, wait: array
    rows = [real(row) for batch in loader for row in rows_of(batch)]
    assert rows == [[BOS, 97, 98, BOS, 99]]


def test_token_shards_of_another_tokenizer_are_refused(corpus, tmp_path):
    tokens = tokenized_copy(corpus, tmp_path / "tokens", ByteTokenizer("another"))
    with pytest.raises(RuntimeError, match="another"):
        next(make(tokens))


# ---------------------------------------------------------------------------------------------------------
# Transformations: what is delivered in place of a document

def fill_in_the_middle(ids, ref, place):
    """Another cut of each document in every epoch: its middle goes last, by a draw that its Ref decides."""
    draw = np.random.default_rng(ref[:3])
    a, b = sorted(draw.integers(1, len(ids) + 1, 2))
    return np.concatenate([ids[:a], ids[b:], ids[a:b]])


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_a_transformation_that_depends_on_the_epoch_resumes_exactly(corpus, packing, tails):
    same = {"packing": packing, "tails": tails, "num_lanes": 2, "transform": fill_in_the_middle}
    want, state = run(corpus, steps=150, **same)
    assert max(lane[corpus]["next"][0] for lane in state["lanes"].values()) > 1
    for stop in (7, 130):
        head, state = run(corpus, steps=stop, **same)
        held = [ref for lane in state["lanes"].values() for ref in held_of(lane[corpus])]
        assert stop == 7 or any(ref.epoch > 1 for ref in held)
        assert head + run(corpus, steps=150 - stop, state=state, **same)[0] == want
    plain = run(corpus, steps=150, **{**same, "transform": None})[0]
    assert plain != want


def test_a_state_with_a_transformation_needs_it_again(corpus):
    state = run(corpus, steps=3, transform=fill_in_the_middle)[1]
    with pytest.raises(ValueError, match="transform of the state is 'fill_in_the_middle', of this loader"):
        make(corpus).load_state_dict(state)


def test_a_transformation_that_leaves_out_what_the_state_holds_is_an_error(corpus):
    """It has the name of the one before, by which a state knows it."""
    def some(ids, ref, place):
        return ids if everything else None

    everything = True
    state = run(corpus, steps=3, packing="bestfit", transform=some)[1]
    everything, loader = False, make(corpus, packing="bestfit", transform=some)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="5 documents that the state holds have no tokens here, such as"):
        next(loader)


def test_a_transformation_may_leave_documents_out(corpus):
    """By what is in them or by where they stand; what is left out is delivered by no packer."""
    def keep_even(ids, ref, place):
        assert os.path.dirname(place.path) == corpus
        return ids if pq.ParquetFile(place.path).read_row_group(place.row_group)["text"][place.row].as_py()[
            :1] in "02468" else None

    want = [text for text in corpus_texts(corpus) if text[:1] in "02468"]
    for packing in ("flat", "exactfit"):
        loader = make(corpus, packing=packing, epochs=1, transform=keep_even, shuffle_seed=1)
        tokens = [token for batch in loader for row in rows_of(batch) for token in real(row)[1:]]
        counts = collections.Counter(token for token in tokens if token != BOS)
        assert counts == collections.Counter(itertools.chain(*(text.encode() for text in want)))
        assert loader.stats()["left_out_documents"] == len(corpus_texts(corpus)) - len(want)


def test_a_number_of_each_document_beside_each_of_its_tokens(corpus):
    """Wide integers pass every packer: ids below, the document's number above."""
    def numbered_ids(ids, ref, place):
        return ids + (1 + place.row_group << 32)

    for packing, tails in PACKINGS:
        plain = make(corpus, packing=packing, tails=tails)
        wide = make(corpus, packing=packing, tails=tails, transform=numbered_ids)
        for _ in range(30):
            (inputs, targets), (wide_inputs, wide_targets) = next(plain), next(wide)
            assert torch.equal(wide_inputs & 0xFFFF, inputs) and torch.equal(wide_targets & 0xFFFF, targets)
            assert ((wide_inputs >> 32 >= 1) & (wide_inputs >> 32 <= 4)).all()


# ---------------------------------------------------------------------------------------------------------
# Promise 8: every token can be traced

@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_every_token_is_the_one_that_the_trace_names(sources, tmp_path, packing, tails):
    """In mixtures of text and tokens, shuffled, past epochs, with a transformation, after elastic resumes."""
    a, b, _ = sources.values()
    data = {a: 1, tokenized_copy(b, tmp_path / "tokens"): 0.4}
    same = {"packing": packing, "tails": tails, "num_lanes": 4, "shuffle_seed": 2, "T": 30,
            "transform": fill_in_the_middle}
    _, state = run(data, steps=30, world=4, B=1, **same)
    _, state = run(data, steps=40, world=2, B=2, state=state, **same)
    assert min(part["next"][0] for lane in state["lanes"].values() for part in lane.values()) > 1
    checked = 0
    for rank in range(2):
        loader = make(data, rank=rank, world_size=2, B=3, **same)
        loader.load_state_dict(state)
        for pieces_of_rows, batch in zip(dataloader.trace(loader, state), loader, strict=False):
            for pieces, row in zip(pieces_of_rows, rows_of(batch), strict=True):
                assert [id for piece in pieces for id in encode_again(piece, same["transform"])] == list(row)
                checked += len(row)
            if checked > 4000 * (rank + 1):
                break
    assert checked > 8000


def encode_again(piece, transform):
    column = pq.ParquetFile(piece.place.path).read_row_group(piece.place.row_group).column(0)
    document = column[piece.place.row].as_py()
    ids = (np.array([BOS, *document.encode()]) if isinstance(document, str)
           else np.frombuffer(document, np.uint16).astype(np.int64))
    return transform(ids, piece.ref, piece.place).tolist()[piece.start:piece.stop]


def test_the_trace_of_a_finite_run_leaves_out_what_fills_its_last_rows(corpus):
    loader = make(corpus, epochs=1, T=40, num_lanes=4)
    lengths = [sum(piece.stop - piece.start for piece in row) for batch in dataloader.trace(loader)
               for row in batch]
    assert lengths == [len(real(row)) for batch in loader for row in rows_of(batch)] and 0 in lengths


def test_document_boundaries_as_varlen_attention_takes_them():
    """Against a scan; the shape is the same whatever the rows hold."""
    assert [x.tolist() for x in train.document_boundaries(torch.tensor([[9, 5, 9, 7]]), 9, 3)] == [
        [[0, 1, 0, 1]], [0, 2, 4, 4]]
    draw = np.random.default_rng(0)
    for _ in range(200):
        rows = draw.integers(0, 4, (3, 7))
        positions, cu_seqlens = train.document_boundaries(torch.from_numpy(rows), 0, 21)
        starts = [i for i, id in enumerate(rows.flatten()) if id == 0 or i % 7 == 0]
        assert cu_seqlens.tolist() == starts + [21] * (22 - len(starts)) and cu_seqlens.dtype == torch.int32
        assert positions.flatten().tolist() == [i - max(s for s in starts if s <= i) for i in range(21)]


# ---------------------------------------------------------------------------------------------------------
# Files that are whole or not there

def test_a_file_gets_its_name_when_it_is_safe_on_disk(tmp_path, monkeypatch):
    """Tokenizers, shards and checkpoints: written beside, synced, renamed."""
    calls, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("sync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(b) or replace(a, b))
    small_tokenizer().save(str(tmp_path))
    dataset.write_shard(str(tmp_path / "shard.parquet"), [pa.array(["text"])])
    train.write_checkpoint(train.checkpoint_path(str(tmp_path), 7), {"step": 7})
    names = [os.path.basename(call) for call in calls if call != "sync"]
    assert names == ["tokenizer.tiktoken", "nanoloader.json", "shard.parquet", "step_0000007.pt"]
    assert all(calls[calls.index(call) - 1] == "sync" for call in calls if call != "sync")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


# ---------------------------------------------------------------------------------------------------------
# What is seen and reported

def test_show_draws_documents_in_80_columns(corpus):
    for colour in (False, True):
        lines = list(bench.show(ByteTokenizer(), corpus, T=64, colour=colour))
        plain = [re.sub("\033\\[[0-9;]*m", "", line) for line in lines]
        assert max(map(len, plain)) <= 80 and (plain == lines) == (not colour)
        rows = [line.strip() for line in plain if line.startswith("  ")]
        assert len(rows) == 20 and all(len(row) == 72 for row in rows)
        assert all(row[0] == "[" for row in rows[5:10]), "bestfit: every row begins with a document"
        assert any(">" in row for row in rows), "cut ends are marked"


def test_show_marks_where_documents_begin_and_end():
    assert bench.outline(np.array([BOS, 1, 2, 3]), Ref(), None).tolist() == [1, 2, 0, 4]
    assert bench.outline(np.array([BOS, 1]), Ref(), None).tolist() == [1, 6]
    assert bench.outline(np.array([BOS]), Ref(), None).tolist() == [5]
    assert bench.draw_row([1, 2, 0, 4, 1, 0, 0, 1, 2, 0], 20, False) == "[======]<====>[====>"
    assert bench.draw_row([0, 4, *[5] * 30], 16, False) == "<" + 15 * "["


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_compare_counts_what_the_loader_counts(corpus, packing, tails):
    loader = make(corpus, packing=packing, tails=tails, T=30, B=100, prefetch=0, tokenizer_batch_size=5)
    tally = bench.tally_rows(loader, 100)
    next(loader)
    stats = loader.stats()
    assert tally.lost == bench.lost_share(stats["tokens_dropped"], 3000) and tally.cut == stats["cut_share"]
    assert 0 < tally.longest_wait < 100


def test_compare_and_bench_print_a_line_each(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", [[numbered(range(3, 400, 3))]] * 4)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(numbered(range(100))), 300)
    tokenizer.save(str(tmp_path / "tokenizer"))
    lines = list(bench.compare(tokenizer, data, B=2, T=32, seconds=0.01))
    assert [line[:14].rstrip() for line in lines[1:]] == ["flat", "bestfit", "exactfit drop", "exactfit keep"]

    def a_few_jobs(*arguments):
        wanted = {"text flat", "4 x tokens exactfit keep", "tokens memmap"}
        return [job for job in jobs(*arguments) if f"{job.note}{job.kind} {job.reader}" in wanted
                and (job.threads, job.engine) == (1, "tiktoken")]

    jobs = bench.all_jobs
    monkeypatch.setattr(bench, "all_jobs", a_few_jobs)
    monkeypatch.setattr(bench, "cores_of_this_rank", lambda: 1)
    monkeypatch.setattr(bench, "engines", lambda: ["tiktoken"])
    lines = list(bench.bench(str(tmp_path / "tokenizer"), data, B=2, T=32, seconds=0.01))
    assert [line[:25].split() for line in lines[2:]] == [
        ["text", "flat"], ["4", "x", "tokens", "exactfit", "keep"], ["tokens", "memmap"]]
    assert all(float(line[45:57]) > 0 for line in lines[2:])


@pytest.mark.parametrize("name", ["datasets", "litdata", "streaming"])
def test_other_loaders_of_the_benchmark_give_batches_of_the_same_tokens(name, tmp_path):
    """Where they are installed."""
    pytest.importorskip(name)
    data = write_shards(tmp_path / "data", [[numbered(range(3, 400, 3))]] * 4)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(numbered(range(100))), 300)
    tokenizer.save(str(tmp_path / "tokenizer"))
    prepare.tokenize(data, str(tmp_path / "tokens"), str(tmp_path / "tokenizer"))
    folders = [str(tmp_path / folder) for folder in ("tokenizer", "data", "tokens", "ids")]
    setting = bench.Setting(*folders, B=2, T=32, seconds=0.01)
    _, write, read = bench.OTHERS[name]
    if write:
        write(setting)
    ours = itertools.chain.from_iterable(bench.train_ids(setting))
    batch = next(read(None, setting, tokenizer))
    assert [token for row in rows_of((batch[0].contiguous(), batch[1].contiguous())) for token in row] == [
        int(token) for token in itertools.islice(ours, 2 * 33)]


def test_the_memmap_of_the_benchmark_gives_the_rows_of_flat(tmp_path):
    """So that both are asked for the same."""
    data = write_shards(tmp_path / "data", [[numbered(range(3, 400, 3))]] * 4)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(numbered(range(100))), 300)
    tokenizer.save(str(tmp_path / "tokenizer"))
    prepare.tokenize(data, str(tmp_path / "tokens"), str(tmp_path / "tokenizer"))
    folders = [str(tmp_path / name) for name in ("tokenizer", "data", "tokens", "ids")]
    setting = bench.Setting(*folders, B=2, T=32, seconds=0.01)
    bench.write_ids(setting)
    ours = make(setting.tokens, packing="flat", B=2, T=32, tokenizer=tokenizer)
    for want, batch in zip(itertools.islice(bench.memmap(None, setting), 50), ours, strict=False):
        assert rows_of(batch) == rows_of(want)


def test_stats_of_flat_count_what_it_cuts(tmp_path):
    """A document of up to T + 1 tokens is cut where no row has all of it; rows share a token."""
    documents = [*numbered([8] * 50), None, *numbered([16, 40, 3])]    # some end where a row does
    data = write_shards(tmp_path, [[documents], [["val"]]])
    loader = make(data, T=16, B=1, packing="flat", epochs=1, prefetch=0)
    for _ in loader:
        pass
    ends = list(itertools.accumulate(1 + len(text) for text in documents if text is not None))
    starts = [0, *ends[:-1]]
    fit = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a <= 17]
    cut = sum(any(a < k < b - 1 for k in range(16, ends[-1], 16)) for a, b in fit)
    stats = loader.stats()
    assert stats["documents"] == 53 and stats["cut_share"] == cut / 53 > 0.4


def test_stats_add_up(corpus):
    for packing, tails in PACKINGS:
        loader = make(corpus, packing=packing, tails=tails, T=30, B=4, prefetch=0)
        for _ in range(50):
            next(loader)
        stats = loader.stats()
        assert stats["rows"] == 200 and stats["tokens_delivered"] == 200 * 30
        assert (stats["tokens_dropped"] > 0) == (packing == "bestfit" or tails == "drop")
        assert stats["documents"] > 60 and 0 <= stats["cut_share"] < 1 and stats["waited_s"] > 0
        assert stats["tokens_encoded"] >= stats["tokens_delivered"]
        assert sum(source["rows"] for source in stats["sources"].values()) == 200


def test_command_line_says_what_to_choose():
    done = subprocess.run([sys.executable, "-m", "dev.bench"], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 2 and "arguments are required: {show,compare,bench,audit}" in done.stderr


def test_a_command_may_be_piped_into_head(monkeypatch):
    pipe, stdout = os.pipe()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: stdout))
    with dataset.errors_in_one_line():
        raise BrokenPipeError
    os.write(stdout, b"more")    # as the interpreter does when it exits
    assert os.read(pipe, 9) == b"", "it was written to the pipe that is closed"
    os.close(pipe), os.close(stdout)


@pytest.mark.parametrize("command, words", [
    (["-m", "dev.bench", "show", "--data", "/nowhere"], "error: no parquet files in /nowhere; get some with"),
    (["tokenizer.py", "--data", "/nowhere"], "error: no parquet files in /nowhere; get some with"),
])
def test_errors_of_the_user_are_one_line(command, words):
    done = subprocess.run([sys.executable, *command], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(words) and done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------
# Mixtures

def assert_shares_are_exact(weights, rows):
    """At every prefix; and the turns repeat."""
    weights, order = dict(enumerate(weights)), []
    shares, total = dict.fromkeys(weights, 0), sum(weights.values())
    for k in range(1, rows + 1):
        order.append(whose_turn(weights, shares))
        shares[order[-1]] += 1
        assert all(abs(shares[i] * total - w * k) < total for i, w in weights.items()), k
    assert order[total:] == order[:-total] if total < rows else True


@pytest.mark.parametrize("weights", [[7, 2, 1], [1], [1, 1], [3, 1000], [5, 7, 11, 13, 17, 1], [1] * 9])
def test_shares_are_exact_to_within_one_row_at_every_prefix(weights):
    assert_shares_are_exact(weights, 10_000)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_shares_are_exact_for_drawn_weights(weights):
    assert_shares_are_exact(weights, 300)


def test_weights_are_taken_as_they_are_written():
    assert whole_numbers({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert whole_numbers({"a": 1, "b": 0.37}) == {"a": 100, "b": 37}


@pytest.fixture
def sources(tmp_path):
    """Three sources whose documents are told by their letter."""
    groups = {letter: grouped([letter * n for n in range(2, 40)], [5] * 7) for letter in "abc"}
    return {letter: write_shards(tmp_path / letter, [groups[letter], [["v"]]]) for letter in "abc"}


def letters_of(rows):
    return [bytes(token for token in row if 0 <= token < BOS)[-1:].decode() for row in rows]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_mixture_has_its_shares_at_every_world_size(sources, world):
    data = dict(zip(sources.values(), [0.7, 0.2, 0.1], strict=True))
    rows, state = run(data, steps=1000 // world, world=world, B=10, num_lanes=8)
    letters = letters_of(rows)
    for lane in range(8):
        mine = letters[lane::8]
        for k in range(1, len(mine) + 1):
            counts = collections.Counter(mine[:k])
            assert all(abs(counts[letter] - share * k) < 1 + 1e-9
                       for letter, share in zip("abc", [0.7, 0.2, 0.1], strict=True))
    assert rows == run(data, steps=1000, B=10, num_lanes=8)[0]
    assert {part["rows"] for part in state["lanes"]["0"].values()} == {875, 250, 125}


def test_weights_changed_twice_lose_and_repeat_nothing(sources, capsys):
    """Annealing: each source's documents once per its epoch, whatever the weights did."""
    a, b, c = sources.values()
    rows, state = run({a: 1, b: 1}, steps=9, packing="flat", T=8)
    more, state = run({a: 1, b: 3, c: 1}, steps=9, packing="flat", T=8, state=state)
    rows += more
    assert f"source {c}: weight 0 -> 1; it begins at its first" in capsys.readouterr().out
    rest, state = run({b: 0.5, c: 2}, steps=9, packing="flat", T=8, state=state)
    assert f"source {a}: weight 1 -> 0\n" in capsys.readouterr().out
    rows += rest
    for letter, path in sources.items():
        alone = run(path, steps=40, packing="flat", T=8)[0]
        mine = [row for row, one in zip(rows, letters_of(rows), strict=True) if one == letter]
        assert mine == alone[:len(mine)] and mine


def test_a_mixture_in_another_order_is_the_same_mixture(sources):
    a, b, c = sources.values()
    want = run({a: 1, b: 1, c: 2}, steps=14)[0]
    head, state = run({c: 2, a: 1, b: 1}, steps=5)
    state["sources"] = dict(sorted(state["sources"].items(), reverse=True))
    assert head + run({c: 2, b + "/": 1, f"{a}/../a": 1}, steps=9, state=state)[0] == want
    with pytest.raises(ValueError, match="names a source twice"):
        make({a: 1, a + "/": 3})


def test_a_mixture_that_cannot_be_loaded_leaves_the_loader_as_it_was(sources, tmp_path, capsys):
    a, b, _ = sources.values()
    few = write_shards(tmp_path / "few", [[["few"] * 9], [["val"]]])
    state, other = run({a: 1}, steps=3, num_lanes=16)[1], run({b: 1}, steps=3, num_lanes=8)[1]
    loader = make({a: 1, few: 1}, num_lanes=None)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"9 documents in 1 shards .* cannot feed 16 lanes"):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match="name at least one as it was"):
        loader.load_state_dict(other)
    assert loader.state_dict() == before and capsys.readouterr().out == ""


def test_a_state_taken_before_the_first_batch_of_another_mixture_can_be_loaded(sources):
    a, b, c = sources.values()
    loader, again = make({b: 1, c: 1}), make({b: 1, c: 1})
    loader.load_state_dict(run({a: 1, b: 1}, steps=5)[1])
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.state_dict()["lanes"]["0"].keys() == {b, c}
    assert [rows_of(next(again)) for _ in range(9)] == [rows_of(next(loader)) for _ in range(9)]


def test_shares_begin_anew_where_weights_change(sources):
    """Not to make up for what the old ones gave: that would be 20 rows of one source."""
    a, b, _ = sources.values()
    state = run({a: 9, b: 1}, B=1, steps=30)[1]
    rows = run({a: 1, b: 1}, B=1, steps=20, state=state)[0]
    assert "".join(letters_of(rows)) == "ab" * 10


def test_shares_begin_anew_where_a_source_goes_on(sources):
    a, b, _ = sources.values()
    loader = make({a: 1, b: 1}, epochs={b: 1}, B=1)
    while (state := loader.state_dict())["lanes"]["0"][b]["share"] is not None:
        next(loader)
    rows = run({a: 1, b: 1}, epochs={b: 9}, B=1, steps=40, state=state)[0]
    assert "".join(letters_of(rows)) == "ab" * 20


def test_a_mixture_with_one_source_without_end_has_none(sources):
    """So its ranks need not talk: there is no process group here."""
    a, b, _ = sources.values()
    rows = run({a: 1, b: 1}, epochs={b: 1}, world=2, T=50, steps=40)[0]
    assert set(letters_of(rows[:20])) == {"a", "b"} and set(letters_of(rows[-20:])) == {"a"}


def test_a_finite_mixture_ends_when_every_source_has(sources):
    a, b, _ = sources.values()
    loader = make({a: 1, b: 9}, packing="exactfit", T=50, epochs={a: 1, b: 2})
    tokens = collections.Counter(itertools.chain(*(real(row) for batch in loader for row in rows_of(batch))))
    del tokens[BOS]
    assert tokens == {ord("a"): sum(range(2, 40)), ord("b"): 2 * sum(range(2, 40))}


@pytest.mark.parametrize("weights", [(1, 1, 9), (5, 2, 3, 7), (12, 15, 9, 12, 20, 11)])
def test_shares_begin_anew_where_a_source_ends(weights):
    """Exact to within one row from there on, although a source may just have been ahead of its share."""
    class Rows:
        def __init__(self, name, n):
            self.rows = [[name]] * n

        def row(self):
            return self.rows.pop() if self.rows else []

    total = sum(weights[1:])
    for rows_of_first in range(1, 30):
        streams = {i: Rows(i, 999 if i else rows_of_first) for i in range(len(weights))}
        lane = Lane(streams, dict(enumerate(weights)), dict.fromkeys(streams, 0))
        while 0 in lane.shares:
            last = lane.row()
        behind = [*last, *(lane.row()[0] for _ in range(50))]
        for k, (i, w) in itertools.product(range(1, 51), enumerate(weights)):
            assert i == 0 or abs(behind[:k].count(i) * total - w * k) < total, behind[:k]


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
def test_a_run_that_has_ended_goes_on_when_it_is_given_more_epochs(sources, packing):
    """a goes on in its second epoch; b, which is given no more, does not."""
    a, b, _ = sources.values()
    first, second = (make({a: 9, b: 1}, packing=packing, T=50, epochs={a: n, b: 1}) for n in (1, 2))
    rows = [row for batch in first for row in rows_of(batch)]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["lanes"]["0"][a]["share"] is None
    second.load_state_dict(state)
    rows += [row for batch in second for row in rows_of(batch)]
    targets = collections.Counter(itertools.chain(*(row[1:] for row in rows)))
    assert targets[ord("a")] == 2 * targets[ord("b")] == 2 * sum(range(2, 40))


@pytest.mark.parametrize("weight", [0, -1, None, True, float("nan")])
def test_a_bad_weight_is_an_error(sources, weight):
    with pytest.raises(ValueError, match="weight"):
        make({sources["a"]: weight})


# ---------------------------------------------------------------------------------------------------------
# Training: the command that users type, its checkpoints, and promise 7: nothing is unpickled

TOY = ["--device", "cpu", "--depth", "1", "--seq_len", "64", "--batch_size", "8", "--vocab_size", "512",
       "--eval_rows", "64", "--log_every", "1", "--lr", "0.01"]
TRAIN_PY = os.path.abspath(train.__file__)


@pytest.fixture(scope="module")
def train_base(tmp_path_factory):
    """A base folder with two small sources of text, so that no test waits for the built-in corpus."""
    base = tmp_path_factory.mktemp("train_base")
    for source, word in (("a", "def f(x): return x + {}\n"), ("b", "class C{}: pass\n")):
        os.makedirs(base / source)
        for shard in range(3):
            texts = ["".join(word.format(i * j) for j in range(i % 60)) for i in range(shard, 160 + shard)]
            path = base / source / f"shard_{shard}.parquet"
            pq.write_table(pa.table({"text": texts}), path, row_group_size=20)
    return base


def train_command(base, *arguments, ranks=0):
    start = [sys.executable, TRAIN_PY]
    if ranks:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start = [*torchrun, f"--nproc_per_node={ranks}", TRAIN_PY]
    data = [] if "--data" in arguments else ["--data", str(base / "a")]
    return [*start, *TOY, *data, *map(str, arguments)]


def train_process(base, *arguments, ranks=0):
    env = {**os.environ, "NANOLOADER_BASE_DIR": str(base), "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(train_command(base, *arguments, ranks=ranks), cwd=base, text=True, env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def train_run(base, *arguments, ranks=0, status=0):
    process = train_process(base, *arguments, ranks=ranks)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == status, output
    return output


def train_by_hand(bases, flags, **env):
    """Two ranks as torchrun starts them, each with a base folder and flags of its own. -> their outputs"""
    store, processes = own_store(), []
    for rank, (base, own) in enumerate(zip(bases, flags, strict=True)):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                 **at_store(store), "NANOLOADER_BASE_DIR": base}
        processes.append(subprocess.Popen(
            train_command(base, "--data", "a", *own), cwd=base, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, **{k: str(v) for k, v in ranks.items()}}))
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 1 for process in processes), outputs
    return outputs


def train_log(folder):
    with open(os.path.join(folder, "log.jsonl")) as file:
        return [json.loads(line) for line in file]


def train_losses(folder):
    """{step: loss}; a step that was done twice must have the same loss twice."""
    losses = {}
    for record in train_log(folder):
        if "loss" in record:
            assert losses.setdefault(record["step"], record["loss"]) == record["loss"], record
    return losses


@pytest.fixture(scope="module")
def train_whole(train_base):
    """20 steps on one rank, without a break."""
    output = train_run(train_base, "--steps", 20, "--save_every", 10, "--out", train_base / "whole")
    return train_base / "whole", output


def test_train_first_loss_is_ln_of_the_padded_vocabulary(train_whole):
    folder, output = train_whole
    tokens = int(output.split("tokenizer: ")[1].split(" tokens")[0].replace(",", ""))
    assert train_losses(folder)[0] == pytest.approx(math.log(-(-tokens // 64) * 64), abs=1e-5)
    assert train_losses(folder)[19] < 0.8 * train_losses(folder)[0], "it learns nothing"


def test_train_keeps_flags_versions_and_evals(train_whole):
    """log.jsonl: flags and versions first, a line a step, val bits per byte; the screen shows them too."""
    folder, output = train_whole
    first, *rest = train_log(folder)
    assert first["flags"]["steps"] == 20 and first["torch"] == torch.__version__
    assert [r["step"] for r in rest if "loss" in r] == list(range(20))
    bpb = next(r for r in rest if "val_bpb" in r)
    assert f"val {bpb['val_bpb']:.4f} bits per byte; zlib -9: {bpb['zlib_bpb']:.4f}" in output


def train_first_half(source, out):
    """What is left of a run that was killed behind its save at step 10."""
    os.makedirs(out)
    shutil.copy(source / "step_0000010.pt", out)


def test_train_10_steps_and_10_resumed_are_20(train_base, train_whole):
    """Bit for bit, past a newest checkpoint that is torn."""
    out = train_base / "halves"
    train_first_half(train_whole[0], out)
    with open(train_whole[0] / "step_0000020.pt", "rb") as file:
        whole = file.read()
    with open(out / "step_0000020.pt", "wb") as file:
        file.write(whole[:len(whole) // 2])
    output = train_run(train_base, "--steps", 20, "--save_every", 10, "--out", out, "--resume", "auto")
    assert "step_0000020.pt is torn" in output
    want = train_losses(train_whole[0])
    assert train_losses(out) == {step: want[step] for step in range(10, 20)}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_train_2_ranks_are_1_rank(train_base, train_whole, optimizer):
    """The same losses, val bits per byte and states; and on from 1 rank's checkpoint by 2."""
    one, two = train_base / f"one-{optimizer}", train_base / f"two-{optimizer}"
    flags = ["--optimizer", optimizer, "--steps", 20, "--save_every", 10, "--micro_batch_size", 2]
    if optimizer == "muon":
        one = train_whole[0]
    else:
        train_run(train_base, *flags, "--out", one)
    train_first_half(one, two)
    train_run(train_base, *flags, "--out", two, "--resume", "auto", ranks=2)
    want = train_losses(one)
    for step, loss in train_losses(two).items():
        assert step >= 10 and loss == pytest.approx(want[step], abs=1e-4)
    bpb = [next(r["val_bpb"] for r in train_log(folder) if "val_bpb" in r) for folder in (one, two)]
    assert bpb[0] == pytest.approx(bpb[1], abs=5e-4)
    ends = [json.loads(train.load_checkpoint(folder / "step_0000020.pt")["loader"]) for folder in (one, two)]
    assert ends[0] == ends[1], "the state of all lanes, whoever had them"


@pytest.mark.parametrize("ranks", [0, 2])
def test_train_sigterm_saves_and_resumes(train_base, ranks):
    """Each rank leaves with status 0 behind a checkpoint of the very step; the next start goes on from it."""
    out = train_base / f"sigterm{ranks}"
    process = train_process(train_base, "--steps", 100_000, "--out", out, ranks=ranks)
    while len([*train.read_log(out / "log.jsonl")]) < 5:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    done = max(train_losses(out)) + 1
    assert f"stopped (SIGTERM) at step {done} of 100000" in output
    assert train.newest_checkpoint(str(out)) == str(out / f"step_{done:07d}.pt")
    assert ranks or process.returncode == 0    # torchrun itself ends with a status of its own


@pytest.mark.parametrize("flags, told", [
    (["--batch_size", "0"], "--batch_size 0: expected a number above 0"),
    (["--depth", "1.5"], "argument --depth: invalid int value: '1.5'"),
    (["--data", "a:0.7", "b"], "--data b: expected PATH, or several of PATH:WEIGHT"),
    (["--resume", "nowhere.pt"], "--resume nowhere.pt: no such file; expected auto, none or a checkpoint"),
    (["--skip", "3"], "argument --skip: 3: expected A:B, two steps"),
    (["--skip", "3:3"], "argument --skip: 3:3: expected A:B, two steps, the first one below"),
    (["--seq_len", "0"], "argument --seq_len: 0: expected T, or T@STEP"),
    (["--seq_len", "64@5"], "--seq_len: expected T@STEP with ascending steps from 0 on"),
    (["--seq_len", "60@0", "64@9"], "each T dividing the tokens of a step"),
    (["--data", "nowhere"], "error: no parquet files in nowhere; get some with"),
])
def test_train_bad_flags_are_one_line(train_base, flags, told):
    process = train_process(train_base, *flags)
    output = process.communicate(timeout=300)[0]
    assert process.returncode in (1, 2) and told in output and "Traceback" not in output


def test_train_refuses_another_model_and_another_run(train_base, train_whole):
    folder = train_whole[0]
    told = train_run(train_base, "--depth", "2", "--out", folder, "--resume", "auto", status=1)
    assert "--depth is 2, in" in told and "resume with --depth 1" in told
    told = train_run(train_base, "--shuffle", "--out", folder, "--resume", "auto", status=1)
    assert "--shuffle is True, in" in told and "resume with no --shuffle, or" in told
    told = train_run(train_base, "--doc_mask", "--out", folder, "--resume", "auto", status=1)
    assert "--doc_mask is True, in" in told
    assert "holds checkpoints; go on with --resume auto" in train_run(train_base, "--out", folder, status=1)


def test_train_error_of_one_rank_is_told_once(train_base, train_whole):
    """Not as a traceback of each rank that waits for it; nor one of all ranks by each of them."""
    for wrong in (["--data", "nowhere"], ["--out", train_whole[0]], ["--depth", "0"], ["--num_lanes", "3"]):
        output = train_process(train_base, *wrong, ranks=2).communicate(timeout=300)[0]
        assert output.count("error: ") == 1 and "gather" not in output, output


def test_train_rate_is_that_of_the_flag_also_when_resumed(train_base, train_whole):
    out = train_base / "slow"
    train_first_half(train_whole[0], out)
    told = train_run(train_base, "--steps", 12, "--lr", "1e-30", "--out", out, "--resume", "auto")
    assert re.search(r"changed since \S+/step_0000010.pt: steps 20 -> 12, .*lr 0.01 -> 1e-30", told)
    before, after = (train.load_checkpoint(out / f"step_00000{step}.pt")["model"] for step in (10, 12))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("blocks" not in name for name in moved) and {"embedding.weight", "head.out.weight"} < moved
    assert train.parse_flags(["--optimizer", "muon"]).lr == 0.012
    assert train.parse_flags(["--optimizer", "adamw"]).lr == 0.0025


def test_train_finished_run_resumed_into_another_folder_is_saved_there(train_base, train_whole):
    out, file = train_base / "copied", train_whole[0] / "step_0000020.pt"
    told = train_run(train_base, "--steps", 20, "--out", out, "--resume", file)
    assert f"checkpoint: {out}/step_0000020.pt" in told and os.path.exists(out / "step_0000020.pt")


def test_train_not_finite_stops_and_names_the_batch(train_base):
    """The state before the batch is kept, and it is one that a loader takes; no checkpoint is written."""
    out = train_base / "boom"
    boom = ["--optimizer", "adamw", "--lr", "1e39", "--steps", 9]
    told = train_run(train_base, *boom, "--out", out, status=1)
    assert "error: step 1: loss nan" in told and "from row 8 of the run on" in told
    assert re.search(r" tokens of .*a/shard_\d+.parquet, row group \d+, row \d+\n", told)
    with open(out / "bad_batch_0000001.json") as file:
        assert json.load(file)["rows"] == 8
    assert not train.list_checkpoints(str(out))


def test_train_no_rank_leaves_before_the_batch_is_named(train_base, tmp_path, monkeypatch):
    """Else torchrun kills rank 0 after 30 s, with what it still writes."""
    script, left = tmp_path / "slow.py", tmp_path / "left"
    script.write_text(f"""if True:
        import atexit, os, sys, time, train
        name = train.documents_of_batch
        def name_slowly(*batch):
            time.sleep(3)
            print("the other rank has left:", os.path.exists({str(left)!r}), flush=True)
            return name(*batch)
        train.documents_of_batch = name_slowly
        if os.environ["RANK"] == "1":
            atexit.register(open, {str(left)!r}, "w")
        sys.exit(train.main())""")
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setitem(globals(), "TRAIN_PY", str(script))
    output = train_process(train_base, "--spike", 0.1, "--out", tmp_path / "out", ranks=2).communicate()[0]
    assert "the other rank has left: False" in output and "--skip 0:1" in output and left.exists()


@pytest.mark.parametrize("stop", [7, 8])
def test_train_row_length_may_grow_and_resumes_bit_for_bit(train_base, stop):
    """From a checkpoint before the second change, and from one at it. The tokens of a step stay the same."""
    same = ["--seq_len", "32@0", "64@5", "128@8", "--steps", 10, "--save_every", stop]
    whole, rest = train_base / f"growing_{stop}", train_base / f"grown_{stop}"
    told = train_run(train_base, *same, "--out", whole)
    assert "32 rows of 32 tokens" in told and "8 rows of 128 tokens" in told and "from step 8 on" in told
    again = train_run(train_base, *same, "--out", rest, "--resume", whole / f"step_{stop:07d}.pt")
    want = {step: loss for step, loss in train_losses(whole).items() if step >= stop}
    assert train_losses(rest) == want and len(want) == 10 - stop
    assert re.search("rows: hash .*", told)[0] == re.search("rows: hash .*", again)[0]


def test_train_killed_around_changes_of_row_length_goes_on_bit_for_bit(train_base):
    same, out = ["--seq_len", "32@0", "64@5", "128@8", "--steps", 10], train_base / "grown_killed"
    train_run(train_base, *same, "--out", train_base / "growing")
    for last in (4, 7, 8):
        process = train_process(train_base, *same, "--save_every", 1, "--out", out, "--resume", "auto")
        def done():
            return max((r.get("step", 0) for r in train.read_log(out / "log.jsonl")), default=0)
        while process.poll() is None and done() < last:
            pass
        process.kill()
        assert process.communicate() and done() >= last
    train_run(train_base, *same, "--out", out, "--resume", "auto")
    assert train_losses(out) == train_losses(train_base / "growing")


def test_train_skips_a_batch_on_every_rank_and_when_it_is_replayed(train_base, train_whole):
    """The rows are drawn, and their hash is that of a run that trains on them, on 2 ranks too."""
    out, hashes = train_base / "skipping", {}
    for ranks in (0, 2):
        folder = f"{out}_{ranks}"
        train_run(train_base, "--steps", 6, "--skip", "2:4", "--save_every", 3, "--out", folder, ranks=ranks)
        records = {r["step"]: r for r in train_log(folder) if "rows_hash" in r}
        assert [step for step, r in records.items() if r.get("skipped")] == [2, 3]
        hashes[ranks] = [r["rows_hash"] for r in records.values()]
    whole = [r["rows_hash"] for r in train_log(train_whole[0]) if "rows_hash" in r]
    assert hashes[0] == hashes[2] == whole[:6] and len(set(whole)) == 20
    train_run(train_base, "--steps", 6, "--out", f"{out}_again", "--resume", f"{out}_0/step_0000003.pt")
    assert train_losses(f"{out}_again") == {k: v for k, v in train_losses(f"{out}_0").items() if k >= 3}
    assert 3 not in train_losses(f"{out}_again"), "the checkpoint remembers what is skipped"


def test_audit_names_the_documents_of_a_step(train_base, train_whole):
    """Of steps behind a checkpoint and before it; each token re-encodes from what is named."""
    file = train_whole[0] / "step_0000010.pt"
    tok = RustBPETokenizer.from_dict(train.load_checkpoint(file)["tokenizer"])
    for steps in ((3, 5), (11, 12)):
        lines = list(bench.audit(str(file), steps, as_json=True))
        loader = PackedLoader(tok, 8, 64, "train", data_dir=str(train_base / "a"), rank=0, world_size=1)
        rows = [row for batch in itertools.islice(loader, *steps) for row in rows_of(batch)]
        loader.close()
        assert len(lines) == len(rows) == 8 * (steps[1] - steps[0])
        for line, row in zip(map(json.loads, lines), rows, strict=True):
            got = []
            for found in line["documents"]:
                column = pq.ParquetFile(found["path"]).read_row_group(found["row_group"])["text"]
                text = column[found["row"]].as_py()
                assert text.startswith(found["text"])
                got += plain_ids(tok, text)[found["from"]:found["to"]]
            assert got == list(row)
    mine = list(bench.audit(str(file), (3, 4), rank=1, world_size=2))
    assert [line for line in mine if line.startswith("step")] == [f"step 3, row {i}" for i in (1, 3, 5, 7)]


def test_train_garbage_in_a_mixture_is_named_and_skipped(train_base):
    garbage = "".join(random.Random(0).choices([chr(i) for i in range(0x4E00, 0x9000)], k=20_000))
    code = [["x = 1\n" * 50] * 4] * 9
    folder = write_shards(train_base / "garbage", [[*[[garbage]] * 8, *code], code])    # for all lanes
    same = ["--data", f"{train_base / 'a'}:0.9", f"{folder}:0.1", "--steps", 12, "--lr", "0.02"]
    begun, out = train_base / "begun", train_base / "spiked"
    train_run(train_base, *same, "--save_every", 7, "--out", begun)    # its first losses are as high
    told = train_run(train_base, *same, "--out", out, "--resume", begun / "step_0000007.pt", "--save_every",
                     1, "--spike", 4.5, status=1)
    assert "error: step 9: loss" in told and "--resume auto --skip 9:10" in told
    assert re.search(r" tokens of .*garbage/shard_00000.parquet, row group [0-7], row 0\n", told), told
    told = train_run(train_base, *same, "--out", out, "--resume", "auto", "--skip", "9:10", "--spike", 4.5)
    clean = train_run(train_base, *same, "--skip", "9:10", "--out", train_base / "clean")
    assert re.search("rows: hash .*", told)[0] == re.search("rows: hash .*", clean)[0]
    assert train_losses(out)[11] == train_losses(train_base / "clean")[11]


def test_train_mixture_and_sample(train_base):
    """Bits per byte of each source and of all; --sample reads the newest checkpoint."""
    out = train_base / "mixed"
    sources = [f"{train_base / 'a'}:0.75", f"{train_base / 'b'}:0.25"]
    told = train_run(train_base, "--data", *sources, "--steps", 4, "--doc_mask", "--out", out)
    assert told.count("bits per byte of ") == 2 and "bits per byte over all sources" in told
    assert train_run(train_base, "--sample", "def ", "--out", out).startswith("def ")


def test_train_checkpoint_holds_nothing_but_numbers_and_text(train_whole):
    """The only globals in its pickle are torch's own for tensors: weights_only=True loads all of it."""
    with zipfile.ZipFile(train_whole[0] / "step_0000020.pt") as file:
        pickled = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    used = {argument for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert used and all(name.split()[0] in ("torch", "torch._utils", "collections") for name in used), used
    for name in ("dataset.py", "tokenizer.py", "dataloader.py", "train.py", "dev/prepare.py"):
        with open(os.path.join(HERE, name)) as file:
            code = file.read()
        assert not re.search(r"import pickle|pickle\.load|allow_pickle|_object\(|_object_list\(", code)
        assert code.count("torch.load(") == code.count("weights_only=True"), "other loads unpickle"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_train_doc_mask_is_each_document_by_itself():
    """Logits of a row of three documents equal those of three forwards."""
    torch.manual_seed(0)
    bos = 299
    model, without = train.GPT(2, 300, bos=bos), train.GPT(2, 300)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    documents = [torch.cat([torch.tensor([bos]), torch.randint(0, 299, (n,))]) for n in (5, 17, 9)]
    row = torch.cat(documents)[None]
    without.load_state_dict(model.state_dict())
    together = model(row)[0]
    alone = torch.cat([model(document[None])[0] for document in documents])
    assert torch.allclose(together, alone, atol=1e-4)
    assert not torch.allclose(without(row)[0], alone, atol=1e-2), "the mask made no difference"
    model.make_block_mask = train.create_block_mask    # of losses only: a sample is not compiled
    with torch.no_grad():
        assert torch.equal(model(row)[0], together)
        losses = torch.nn.functional.cross_entropy(together[:-1], row[0, 1:], reduction="none")
        assert torch.allclose(model(row[:, :-1], row[:, 1:]), losses, atol=1e-4)


def test_train_muon_takes_the_matrices_of_blocks_only():
    model = train.GPT(2, 300)
    adamw, muon = train.make_optimizers(model, "muon", 0.02, 2048)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    assert matrices == {id(p) for p in model.blocks.parameters()}
    others = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert others == {id(p) for p in model.parameters()} - matrices
    assert {id(model.embedding.weight), id(model.head.out.weight)} < others


def test_train_muon_is_torchs_own_in_float32():
    """Which takes bfloat16 for its Newton-Schulz steps."""
    torch.manual_seed(0)
    ours, theirs = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
    theirs.load_state_dict(ours.state_dict())
    mine = train.Muon(list(ours.named_parameters()), 0.02)
    reference = torch.optim.Muon(theirs.parameters(), 0.02, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(32, 64)
        for layer, optimizer in ((ours, mine), (theirs, reference)):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    moved = (theirs.weight - ours.weight).norm() / (5 * 0.02 * 32 ** 0.5)
    assert moved < 0.02


def test_train_rates_rise_stay_and_fall():
    """Over 3 % of the steps, then until 35 %, then to 5 %."""
    model = train.GPT(1, 64)
    optimizers = train.make_optimizers(model, "adamw", 0.1, 2048)
    shares = [train.set_rates(optimizers, step, 1000) for step in range(1000)]
    assert optimizers[0].param_groups[-1]["lr"] == pytest.approx(0.1 * shares[-1])
    assert [shares[step] for step in (0, 14, 29, 30, 384, 675, 999)] == pytest.approx(
        [1 / 30, 0.5, 1, 1, 0.05 + 0.95 * 616 / 650, 0.525, 0.05146], abs=1e-4)


def train_content(step, **more):
    return {"version": train.VERSION, "step": step, **more}


def train_save(folder, step, checkpoints=None, **more):
    """-> whether it was saved"""
    checkpoints = checkpoints or train.Checkpoints(str(folder), None)
    checkpoints.save(step, {"loader": {}, **more})
    return checkpoints.hold(step)


def test_train_full_disk_is_told_and_leaves_no_rest(tmp_path, monkeypatch, capsys):
    checkpoints = train.Checkpoints(str(tmp_path), None)
    assert train_save(tmp_path, 1, checkpoints)
    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    assert not train_save(tmp_path, 2, checkpoints) and checkpoints.hold(1)
    told = capsys.readouterr().out
    assert "warning: step 2 could not be saved" in told and "No space left" in told
    assert f"the last good checkpoint stays: {tmp_path / 'step_0000001.pt'}" in told
    assert os.listdir(tmp_path) == ["step_0000001.pt"]
    assert train.newest_checkpoint(str(tmp_path)) == str(tmp_path / "step_0000001.pt")


def test_train_checkpoint_that_the_user_deletes_is_no_error(tmp_path, monkeypatch):
    errors, checkpoints = [], train.Checkpoints(str(tmp_path), None)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    for step in (1, 2, 3, 4):
        assert train_save(tmp_path, step, checkpoints)
        if step == 2:
            os.remove(tmp_path / "step_0000001.pt")
    assert sorted(os.listdir(tmp_path)) == ["step_0000003.pt", "step_0000004.pt"] and not errors


def test_train_goes_on_where_the_log_cannot_be_written_and_says_so_once(tmp_path, capsys):
    os.mkdir(tmp_path / "log.jsonl")    # an OSError, as a full disk is
    log = train.Log(str(tmp_path), None, 0.0, {})
    for step in range(3):
        log.write({"step": step})
    assert capsys.readouterr().out.count("log.jsonl: ") == 1


def test_train_last_two_checkpoints_are_kept_and_a_changed_one_is_passed_over(tmp_path, capsys):
    """One bit of a weight: torch.load alone would take it."""
    checkpoints = train.Checkpoints(str(tmp_path), None)
    for step in (1, 2, 3):
        assert train_save(tmp_path, step, checkpoints, weight=torch.arange(1000.0))
    older, newest = train.list_checkpoints(str(tmp_path))
    assert newest.endswith("step_0000003.pt") and train.newest_checkpoint(str(tmp_path)) == newest
    with open(newest, "r+b") as file:
        file.seek(file.read().index(torch.arange(500.0, 510.0).numpy().tobytes()))
        file.write(b"\1")
    assert train.load_checkpoint(newest)["weight"][500] != 500
    assert train.newest_checkpoint(str(tmp_path)) == older
    assert f"warning: {newest} is torn (the checksum of " in capsys.readouterr().out


def choose(**flags):
    return train.choose_run(SimpleNamespace(**{"resume": "auto", "out": None, **flags}))


def test_train_no_checkpoint_is_taken_or_left_out_unseen(tmp_path):
    for step in (1, 2):
        train.write_checkpoint(train.checkpoint_path(tmp_path, step), train_content(step))
    older, newest = train.list_checkpoints(str(tmp_path))
    assert choose(out=str(tmp_path)) == (str(tmp_path), newest) == choose(resume=newest)
    assert choose(resume=older, out=str(tmp_path / "new")) == (str(tmp_path / "new"), older)
    with pytest.raises(ValueError, match=r"holds step_0000002.pt, which is newer than .*step_0000001.pt"):
        choose(resume=older)
    for path in (older, newest):
        with open(path, "wb") as file:
            file.write(b"torn")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole; start anew with another --out"):
        choose(out=str(tmp_path))
    with pytest.raises(ValueError, match=r"step_0000002.pt is torn \(BadZipFile: .*\); take the one"):
        choose(resume=newest)


def test_train_deletes_no_file_that_it_did_not_write(tmp_path):
    for name in ("thesis.tmp", "step_1.pt.tmp", "step_0000003.pt.tmp", "step_0000003.pt.tmp.tmp"):
        (tmp_path / name).write_text("mine")
    choose(out=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step_0000003.pt.tmp.tmp", "step_1.pt.tmp", "thesis.tmp"]


def test_train_runs_that_start_together_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(5) as threads:
        folders = list(threads.map(lambda _: choose(resume="none")[0], range(5)))
    assert len(set(folders)) == 5


@pytest.mark.parametrize("flags, words", [
    ([["--lr", "0.01"], ["--lr", "0.02"]], "rank 1 differs from rank 0: --lr is 0.02, not 0.01"),
    ([["--eval_every", "5"], []], "rank 1 differs from rank 0: --eval_every is 600, not 5"),
])
def test_train_ranks_of_other_flags_are_named(train_base, flags, words):
    first, second = train_by_hand([train_base] * 2, flags)
    assert f"error: {words}" in first and "Traceback" not in first + second and "error" not in second


def test_train_rank_of_other_data_is_named(train_base, tmp_path):
    shutil.copytree(train_base / "a", tmp_path / "a")
    os.remove(tmp_path / "a" / "shard_1.parquet")
    first, second = train_by_hand([train_base, tmp_path], [[], []])
    assert re.search(r"error: rank 1 differs from rank 0: shard \S*shard_1.parquet is not there, not", first)
    assert "Traceback" not in first + second and "error" not in second
    shutil.rmtree(tmp_path / "a")
    first, second = train_by_hand([train_base, tmp_path], [[], []])
    assert "error: rank 1: no parquet files in a" in first and "Traceback" not in first + second


def test_train_prints_on_a_terminal_of_ascii(train_base, train_whole, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert train_run(train_base, "--sample", "d\u00e9f ", "--out", train_whole[0]).startswith("d\\xe9f ")


@pytest.mark.parametrize("content", [{"hello": 1}, [1, 2], "torn"])
def test_train_what_is_no_checkpoint_of_ours_is_passed_over(tmp_path, capsys, content):
    ours, other = tmp_path / "step_0000001.pt", tmp_path / "step_0000002.pt"
    train.write_checkpoint(str(ours), train_content(1))
    if content == "torn":
        shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "step_0000001.pt")
        os.rename(tmp_path / "archive.zip", other)
    else:
        torch.save(content, other)
    assert choose(out=str(tmp_path)) == (str(tmp_path), str(ours))
    assert f"warning: {other} is no checkpoint of this train.py" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"step_0000002.pt is no checkpoint of this train.py"):
        choose(resume=str(other), out=str(tmp_path / "new"))


def test_train_val_of_nulls_is_an_error_before_the_first_step(train_base, tmp_path):
    shutil.copytree(train_base / "a", tmp_path / "a")
    nulls = pa.table({"text": pa.array([None] * 20, pa.string())})
    pq.write_table(nulls, tmp_path / "a" / "shard_2.parquet", row_group_size=10)
    output = train_run(train_base, "--data", tmp_path / "a", "--steps", 1, status=1)
    assert f"error: the val split of {tmp_path / 'a'} has no text" in output and "Traceback" not in output


def test_train_val_windows_ask_for_each_token_once_and_never_for_what_was_given(tmp_path):
    """Whole documents of many lengths, some of them with later windows."""
    letters = "abcdefghijklmnopqrstuvwxyz" * 3
    texts = [letters[n:2 * n] for n in (0, 1, 7, 8, 9, 13, 14, 15, 26)]
    folder = write_shards(tmp_path / "windows", [[["x"]], [texts]])
    T, tokenizer = 8, ByteTokenizer()
    windows = train.val_windows(tokenizer, folder, T, 1000)
    assert not windows.later[0] and windows.later.sum() == 1 + 1 + 1 + 2 + 3, "of 9, 13, 14, 15, 26 letters"
    asked = windows.targets >= 0
    assert torch.equal(asked[:, 0], ~windows.later & (windows.targets[:, 0] >= 0))
    assert not asked[windows.later, :T // 4].any() and asked[windows.later, T // 4].all()
    seen = asked[:, :-1] & (windows.inputs[:, 1:] != BOS)
    assert torch.equal(windows.targets[:, :-1][seen], windows.inputs[:, 1:][seen]) and seen.sum() > 50
    assert bytes(windows.targets[asked].tolist()).decode() == "".join(texts)
    assert len(train.val_windows(tokenizer, folder, T, 5).inputs) == 5


def test_train_bits_per_byte_are_the_same_for_every_micro_batch(train_base, train_whole):
    """And those of first and later windows, weighted by their bytes, are those of all."""
    model, tokenizer, *_ = train.load_model(
        train_whole[0] / "step_0000020.pt", SimpleNamespace(dtype="float32", device="cpu"))
    windows = train.val_windows(tokenizer, str(train_base / "a"), 64, 64)
    stop, n_bytes = SimpleNamespace(agreed=lambda: False), train.get_token_bytes(tokenizer)
    want = train.count_nats(model, windows, 1, n_bytes, stop)
    assert torch.allclose(train.count_nats(model, windows, 7, n_bytes, stop), want)
    record = next(r for r in train_log(train_whole[0]) if "val_bpb" in r)
    assert record["val_bpb"] == pytest.approx(train.bits_per_byte(want.sum(0)))
    share = record["first_share"]
    assert 0 < share < 1
    assert record["val_bpb"] == pytest.approx(share * record["first_bpb"] + (1 - share) * record["later_bpb"])


def test_train_warns_of_a_buffer_that_holds_most_documents_of_a_lane(train_base, train_whole):
    told = train_run(train_base, "--packing", "bestfit", "--steps", 1, "--out", train_base / "buffered")
    assert f"warning: {train_base / 'a'}: a lane has 40 documents, and bestfit buffers 1,000 of them" in told
    assert "lower --num_lanes (now 8)" in told and "buffers" not in train_whole[1]


def test_train_data_is_the_folder_of_that_very_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("web:2")
    assert train.parse_data(["web:2"]) == {"web:2": 1.0}
    assert train.parse_data(["web:3"]) == {"web": 3.0}
    assert train.parse_data(["web:2:0.5", "b:1"]) == {"web:2": 0.5, "b": 1.0}
    with pytest.raises(ValueError, match="--data web:2: expected PATH, or several of PATH:WEIGHT"):
        train.parse_data(["web:2", "b:1"])


def test_train_vocab_size_is_not_ignored(train_base, train_whole, tmp_path):
    """Where there is a tokenizer already, of another size."""
    other = train.load_checkpoint(train_whole[0] / "step_0000020.pt")["tokenizer"]
    folder = tmp_path / "tokenizer"
    RustBPETokenizer.from_dict(other).save(folder)
    n = RustBPETokenizer.from_dict(other).get_vocab_size()
    output = train_run(train_base, "--tokenizer", folder, "--vocab_size", 4096, status=1)
    assert f"--vocab_size 4096: {folder} has {n} tokens; leave --vocab_size out" in output
    resume = ["--out", train_whole[0], "--resume", "auto"]
    output = train_run(train_base, *resume, "--vocab_size", 4096, status=1)
    assert "--vocab_size is 4096, in" in output and "resume with --vocab_size 512" in output


def test_train_torn_checkpoint_is_none_of_the_two_that_are_kept(tmp_path):
    """Nor is anything deleted that is not ours."""
    for step in (1, 2):
        train.write_checkpoint(str(tmp_path / f"step_000000{step}.pt"), train_content(step))
    (tmp_path / "step_0000003.pt").write_bytes(b"torn")
    (tmp_path / "step_0000000.pt").write_bytes(b"somebody's")
    checkpoints = train.Checkpoints(choose(out=str(tmp_path))[0], str(tmp_path / "step_0000002.pt"))
    for step, kept in ((4, "0234"), (5, "0345")):
        assert train_save(tmp_path, step, checkpoints)
        assert sorted(os.listdir(tmp_path)) == [f"step_000000{k}.pt" for k in kept]


def test_train_log_has_each_step_once_and_all_losses_after_a_resume(train_base, train_whole):
    out = train_base / "killed"
    shutil.copytree(train_whole[0], out)
    os.remove(out / "step_0000020.pt")
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 20, "lo')    # killed while it wrote
    train_run(train_base, "--steps", 20, "--save_every", 10, "--out", out, "--resume", "auto")
    log = train_log(out)
    assert [r["step"] for r in log if "loss" in r] == list(range(20))
    assert [r["step"] for r in log if "val_bpb" in r] == [20]
    assert [r["from_step"] for r in log if "flags" in r] == [0, 10]


def test_train_max_minutes_do_not_follow_the_wall_clock(monkeypatch):
    stop = train.StopRequest(1)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert not stop.agreed()
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert stop.agreed() and stop.why == "--max_minutes"


def test_train_threads_wait_passively_unless_the_user_says_otherwise():
    """Set before torch is imported, which reads it once."""
    code = "import sys; import train; import os; print(os.environ['OMP_WAIT_POLICY'])"
    for policy, want in ((None, "passive"), ("active", "active")):
        env = {**os.environ, "OMP_WAIT_POLICY": policy or ""}
        if not policy:
            del env["OMP_WAIT_POLICY"]
        output = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=HERE, text=True)
        assert output.strip() == want
    with open(train.__file__) as file:
        code = file.read()
    assert code.index("OMP_WAIT_POLICY") < code.index("import torch\n")


def test_train_checkpoint_is_that_of_its_step_and_the_training_goes_on(tmp_path, monkeypatch):
    """Weights that change while a thread writes them are not those that are written; the end waits for it."""
    go, write, weight = threading.Event(), torch.save, torch.zeros(5)
    monkeypatch.setattr(torch, "save", lambda content, file: go.wait(10) and write(content, file))
    checkpoints = train.Checkpoints(str(tmp_path), None)
    content = {"model": {"weight": weight}, "optimizers": [{"state": {0: weight[0]}}]}
    checkpoints.save(1, {"loader": {}, **content})
    weight += 1
    assert not os.path.exists(tmp_path / "step_0000001.pt"), "save waited for the thread"
    threading.Timer(0.1, go.set).start()
    assert checkpoints.hold(1)
    saved = train.load_checkpoint(tmp_path / "step_0000001.pt")
    assert not saved["model"]["weight"].any() and not saved["optimizers"][0]["state"][0]


def test_train_killed_while_it_writes_checkpoints_goes_on_bit_for_bit(train_base, train_whole):
    """Killed where a file is half written, by a signal that nothing can catch, until the run is through."""
    out, kills = train_base / "kills", 0
    more = ["--steps", 20, "--save_every", 1, "--out", out, "--resume", "auto"]
    while kills < 4:
        process = train_process(train_base, *more)
        saved = len(train_losses(out)) if out.exists() else 0
        while process.poll() is None:
            written = glob.glob(str(out / "*.pt.tmp"))
            if written and len([*train.read_log(out / "log.jsonl")]) > saved + 4:
                process.kill()
        process.communicate()
        kills += 1
        if process.returncode == 0:
            break
    assert kills > 1, "never killed"
    train_run(train_base, *more)
    assert train_losses(out) == train_losses(train_whole[0])


def test_train_eval_prints_what_the_run_printed(train_base, train_whole):
    """And bits per byte of other data."""
    folder, output = train_whole
    last = next(line for line in output.splitlines() if line.startswith("step 20: val"))
    checkpoint = folder / "step_0000020.pt"
    assert last in train_run(train_base, "--eval", checkpoint)
    other = train_run(train_base, "--eval", checkpoint, "--data", train_base / "b")
    assert "step 20: val" in other and last not in other


def test_train_init_begins_a_run_with_the_weights_of_another(train_base, train_whole):
    out, checkpoint = train_base / "init", train_whole[0] / "step_0000020.pt"
    train_run(train_base, "--init", checkpoint, "--steps", 2, "--out", out)
    before, after = train_losses(train_whole[0]), train_losses(out)
    assert sorted(after) == [0, 1] and after[0] < 0.8 * before[0]
    told = train_run(train_base, "--init", checkpoint, "--depth", 2, status=1)
    assert f"error: {checkpoint} is of another model (--depth 1)" in told
    for flag in ("--init", "--eval"):
        told = train_run(train_base, flag, "nowhere.pt", status=2)
        assert f"{flag} nowhere.pt: no such file; expected a checkpoint" in told


def test_train_device_that_is_not_there_is_one_line(train_base):
    told = train_run(train_base, "--device", "xpu", status=2)
    assert "--device xpu: torch sees none; leave --device out" in told and "Traceback" not in told


def test_train_more_ranks_than_gpus_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(train, "best_device", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert train.parse_flags(["--device", "cuda"]).dtype == "bfloat16"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit):
        train.parse_flags(["--device", "cuda"])
    assert "--device cuda: more ranks than this node has; lower torchrun's" in capsys.readouterr().err


def test_train_compiles_by_itself_where_triton_can(tmp_path, monkeypatch, capsys):
    compiled, weight = [], SimpleNamespace(is_cuda=True)
    model = SimpleNamespace(embedding=SimpleNamespace(weight=weight), blocks=[],
                            head=SimpleNamespace(compile=lambda dynamic: compiled.append("head")))
    monkeypatch.setattr(train.sysconfig, "get_path", lambda *scheme: str(tmp_path))
    monkeypatch.setattr(train.shutil, "which", lambda name: name == "clang")
    train.compile_parts(model, "auto")
    assert not compiled and f"and {tmp_path}/Python.h (python3-dev)" in capsys.readouterr().out
    (tmp_path / "Python.h").touch()
    train.compile_parts(model, "auto")
    assert compiled == ["head"] and not capsys.readouterr().out


def test_train_compiles_every_row_length(monkeypatch):
    """Of each block and batch, with gradients and without; none is run uncompiled without a word."""
    from torch._dynamo.utils import counters
    compile_quickly = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    model = train.GPT(1, 64)
    train.compile_parts(model, "on")
    counters.clear()
    for T in range(8, 20, 2):
        inputs = torch.zeros(1, T, dtype=torch.int64)
        model(inputs, inputs).sum().backward()
        with torch.no_grad():
            model(inputs, inputs)
    assert counters["frames"] == {"total": 24, "ok": 24}


def test_train_lines_of_the_gpu_on_a_cpu(train_base, train_whole):
    """bfloat16 and a mask: near the losses of float32."""
    want = train_losses(train_whole[0])
    out = train_base / "bfloat16"
    train_run(train_base, "--dtype", "bfloat16", "--steps", 20, "--out", out)
    losses = train_losses(out)
    assert losses != want and losses == pytest.approx(want, abs=0.05)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_CUDA = ["--device", "cuda", "--steps", 20, "--dtype", "float32", "--compile", "off",
           "--optimizer", "adamw"]


def train_on_cuda(base, name, *flags, **more):
    train_run(base, *ON_CUDA, *flags, "--out", base / name, **more)
    return train_losses(base / name)


@pytest.fixture(scope="module")
def train_on_cpu(train_base):
    return train_on_cuda(train_base, "cpu", "--device", "cpu")


@needs_cuda
@pytest.mark.parametrize("flags", [["--compile", "on"], ["--dtype", "bfloat16"], ["--micro_batch_size", 2],
                                   ["--dtype", "bfloat16", "--compile", "on"]])
def test_train_cuda_losses_are_those_of_plain_float32(train_base, train_on_cpu, flags):
    losses = train_on_cuda(train_base, "cuda" + "".join(map(str, flags)), *flags)
    assert losses == pytest.approx(train_on_cpu, abs=0.05)


@needs_cuda
def test_train_cuda_flex_attention_is_the_dense_mask(train_base):
    dense = train_on_cuda(train_base, "cuda-dense", "--doc_mask", "--seq_len", 128)
    flex = train_on_cuda(train_base, "cuda-flex", "--doc_mask", "--seq_len", 128, "--compile", "on")
    without = train_on_cuda(train_base, "cuda-without", "--seq_len", 128)
    assert flex == pytest.approx(dense, abs=2e-3) != without


@needs_cuda
def test_train_cuda_resumes_bit_for_bit(train_base):
    flags = ["--dtype", "bfloat16", "--save_every", 10]
    want, out = train_on_cuda(train_base, "cuda-whole", *flags), train_base / "cuda-half"
    train_first_half(train_base / "cuda-whole", out)
    train_run(train_base, *ON_CUDA, *flags, "--out", out, "--resume", "auto")
    assert train_losses(out) == {step: want[step] for step in range(10, 20)}


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_train_cuda_2_ranks_are_1_rank(train_base, optimizer):
    flags = ["--optimizer", optimizer, "--micro_batch_size", 4]
    want = train_on_cuda(train_base, f"cuda-one-{optimizer}", *flags)
    losses = train_on_cuda(train_base, f"cuda-two-{optimizer}", *flags, ranks=2)
    assert losses == pytest.approx(want, abs=1e-2)


@needs_cuda
def test_train_cuda_out_of_memory_names_the_flag(train_base):
    # Over 1 TB of activations. Not more rows: attention's kernels take 65,535.
    big = ["--depth", 12, "--batch_size", 1 << 15, "--micro_batch_size", 1 << 15, "--eval_rows", 1]
    told = train_run(train_base, *ON_CUDA, *big, "--out", train_base / "cuda-memory", status=1)
    assert f"Lower --micro_batch_size (now {1 << 15}): the same run in less memory" in told


@needs_cuda
def test_train_cuda_defaults_print_mfu_and_the_wait_for_data(train_base):
    """Depth 12, T = 2,048, compiled, bfloat16, Muon."""
    flags = ["--device", "cuda", "--depth", 12, "--seq_len", 2048, "--batch_size", 32, "--eval_rows", 32]
    output = train_run(train_base, *flags, "--steps", 5, "--out", train_base / "cuda-12")
    last = next(r for r in train_log(train_base / "cuda-12") if r.get("step") == 4)
    print(torch.cuda.get_device_name(), last, output)
    assert last["ms"] > last["wait_ms"] >= 0 and last["memory_gb"] > 1


@needs_cuda
def test_train_cuda_batches_are_never_written_again(train_base):
    loader = PackedLoader(ByteTokenizer(), 4, 64, "train", data_dir=str(train_base / "a"), device="cuda")
    batches = [next(loader) for _ in range(50)]
    copies = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
    for _ in range(50):
        next(loader)
    torch.cuda.synchronize()
    loader.close()
    for batch, copy in zip(batches, copies, strict=True):
        assert torch.equal(batch[0], copy[0]) and torch.equal(batch[1], copy[1])


def test_train_whole_run_is_in_the_checkpoint(train_base, tmp_path):
    """Sampled and resumed where the folder of its tokenizer holds another one by now."""
    base = tmp_path / "base"
    shutil.copytree(train_base / "a", base / "a")
    train_run(base, "--steps", 2, "--out", "run")
    for folder in glob.glob(str(base / "tokenizer*")):
        shutil.rmtree(folder)
    assert train_run(base, "--sample", "def ", "--out", "run").startswith("def ")
    assert "resumed from" in train_run(base, "--steps", 3, "--out", "run", "--resume", "auto")
    assert not glob.glob(str(base / "tokenizer*")), "another one was trained"


# ---------------------------------------------------------------------------------------------------------
# The README: what it says to type works

def blocks_of_the_readme(language=""):
    """The code of its blocks, those of commands by default; none that a comment before it says not to run."""
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        found = re.findall(r"(<!-- not run: [^\n]*-->\n)?```(\w*)\n(.*?)```", file.read(), re.S)
    return [code for comment, seen, code in found if seen == language and not comment]


def commands_of_the_readme():
    """Those of Python: no installation, no torchrun."""
    lines = [line for block in blocks_of_the_readme() for line in block.splitlines()]
    return [line for line in lines if line.startswith("python ")]


def type_in(folder, command):
    command = command.replace("python", shlex.quote(sys.executable), 1)
    ended = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=120,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with the code, and with data as the README's reader has it; its cheap commands were typed."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("dataset.py", "tokenizer.py", "dataloader.py", "train.py", "dev"):
        os.symlink(os.path.join(HERE, name), folder / name)
    documents = list(dataset.standard_library(os.path.dirname(json.__file__))) * 20
    (folder / "input.txt").write_text("\n\n".join(documents))
    (folder / "my").mkdir()
    with gzip.open(folder / "my/1.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"content": text}) + "\n" for text in documents)
    (folder / "scored").mkdir()
    for name in ("train-0.parquet", "validation-0.parquet"):
        table = pa.table({"text": documents, "score": np.linspace(0, 1, len(documents))})
        pq.write_table(table, folder / "scored" / name, row_group_size=16)
    for command in commands_of_the_readme():
        if not command.startswith("python train.py"):
            type_in(folder, command)
    return folder


def test_the_python_of_the_readme_runs(reader, monkeypatch, capsys):
    """All blocks in one namespace; what they only define is called here."""
    monkeypatch.chdir(reader)
    names = {}
    for block in blocks_of_the_readme("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert "my_shards/shard_00000.parquet" in capsys.readouterr().out
    assert names["loss"] > 0 and 0.5 <= names["weights"].min() <= names["weights"].max() <= 1
    made.extend([names["loader"], names["scored"]])
    assert names["mask"].shape == (2, 1, 64, 64)
    expected = [[[names["visible"](b, None, q, k) for k in range(64)] for q in range(64)] for b in range(2)]
    assert torch.equal(names["mask"][:, 0], torch.tensor(expected))
    next(make("my_shards", tokenizer=names["tokenizer"], transform=names["fill_in_the_middle"]))
    markers = {names[marker] for marker in ("PREFIX", "SUFFIX", "MIDDLE")}
    moved = [names["fill_in_the_middle"](np.arange(9), Ref(doc=n), None).tolist() for n in range(50)]
    assert {len(ids) for ids in moved} == {9, 12}
    assert all(ids[0] == 0 and sorted({*ids} - markers) == list(range(9)) for ids in moved)


def test_the_tokenizer_of_the_readme_gives_the_rows_of_its_library(reader, corpus):
    """Here with a library of one's own, whose tokens are bytes."""
    code = next(block for block in blocks_of_the_readme("python") if "class Wrapped" in block)
    names = {}
    exec(code, names)
    library = SimpleNamespace(
        token_to_id=lambda name: BOS,
        encode_batch=lambda texts, add_special_tokens: [SimpleNamespace(ids=list(text.encode()))
                                                        for text in texts])
    wrapped = names["Wrapped"](library, "<s>")
    assert run(corpus, steps=20, tokenizer=wrapped)[0] == run(corpus, steps=20)[0]


def test_the_training_commands_of_the_readme_run(reader):
    """At toy size, in their order: each goes on from what the ones before it left."""
    toy = " --steps 2 --depth 1 --seq_len 64 --eval_rows 8"
    commands = [line for line in commands_of_the_readme() if line.startswith("python train.py")]
    for command in commands:
        command = command.replace("step_0001800", "step_0000002").partition("   ")[0].rstrip()
        output = type_in(reader, command + ("" if "--eval" in command or "--sample" in command else toy))
        assert "--sample" in command or "bits per byte" in output
    assert len(commands) > 5


def test_the_readme_is_short_and_its_pictures_are_there():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()
    assert text.count("\n") <= 250 and "TODO" not in text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert os.path.exists(os.path.join(HERE, picture))


def test_pictures_are_drawn(reader, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(reader)
    out = str(tmp_path / "rows.svg")
    pictures.main(["rows", "--data", "my_shards", "--tokenizer", "my_tokenizer", "--T", "256", "--out", out])
    drawn = ElementTree.parse(out)
    assert len(drawn.findall("{*}rect")) > 4 * 8 and len(drawn.findall("{*}path")) > 8
    (tmp_path / "bench.txt").write_text("a header\n" + "\n".join(
        f"{kind:<11}{reader:<15}{engine:<10}{threads:>8}{speed:>12.2f}    0.97       0.10 s"
        for kind, reader, engine, threads, speed in [
            ("text", "flat", "tiktoken", 1, 2), ("text", "flat", "tiktoken", 2, 3.5),
            ("tokens", "exactfit keep", "-", 2, 99), ("4 x tokens", "exactfit keep", "-", 2, 50)]))
    pictures.main(["speed", str(tmp_path / "bench.txt"), "--out", out])
    words = [element.text for element in ElementTree.parse(out).findall("{*}text")]
    assert words == ["from text, M tokens/s", "flat, tiktoken", "3.5 by 2 threads",
                     "from tokens on disk, M tokens/s", "exactfit keep", "99.0 by 2 threads"]
    for run, losses in (("first", (7.0, 3.0, 2.0)), ("second", (7.0, 4.0, 3.0))):
        records = [{"flags": {}}, *({"step": i, "loss": loss} for i, loss in enumerate(losses))]
        os.makedirs(tmp_path / run)
        with open(tmp_path / run / "log.jsonl", "w") as file:
            file.writelines(json.dumps(r) + "\n" for r in [*records, {"step": 3, "val_bpb": losses[-1]}])
    pictures.main(["loss", str(tmp_path / "first"), str(tmp_path / "second"), "--out", out])
    drawn = ElementTree.parse(out)
    assert len({line.get("points") for line in drawn.findall("{*}polyline")}) == 2
    words = [element.text for element in drawn.findall("{*}text")]
    assert words[-2:] == [f"{tmp_path / 'first'}, val 2.0000", f"{tmp_path / 'second'}, val 3.0000"]
    with pytest.raises(SystemExit, match=rf"no losses in {tmp_path}/log.jsonl; expected the folder of a run"):
        pictures.main(["loss", str(tmp_path), "--out", out])


if __name__ == "__main__":
    quiet = ["-q", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]    # hypothesis
    # All of them by several processes: on 2 cores 10 minutes, not 15.
    together = ["-n", str(min(8, dataset.cores())), "--dist", "worksteal"]
    sys.exit(pytest.main([__file__, *quiet, *(sys.argv[1:] or together)]))
