"""
The loader's promises, each as a test, in the order of the data's flow.

    python test_dataloader.py            # this file: 2 minutes on 2 cores
    python test_dataloader.py --all      # and dev/tests: tools, training, README; 6 minutes
    python test_dataloader.py -k resume  # any arguments of pytest

Fast code is compared with slow and obvious references: dev/reference.py for the loader, functions in this
file for the packers. Most tests use a tokenizer whose tokens are the bytes of the text, and shards of a few
short documents, so that epochs end every few rows. Copied without dev/, the file skips what needs it.
"""

import collections
import copy
import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dataloader
import dataset
from dataloader import (
    BestFitPacker,
    ExactFitPacker,
    FlatPacker,
    PackedLoader,
    Ref,
    bounds_of,
    choose_best_fit,
    fill_gap,
    gather_states,
    merge_states,
    source_of_row,
    trace,
)

BOS = 256
HERE = Path(__file__).resolve().parent
settings.register_profile("no deadline", deadline=None)    # a busy machine is not a failure
settings.load_profile("no deadline")

if HAS_DEV := (HERE / "dev" / "reference.py").exists():
    from dev.reference import rows_of_run
needs_dev = pytest.mark.skipif(not HAS_DEV, reason="dev/reference.py is not here")

# ---------------------------------------------------------------------------------------------------------
# Tokenizer, corpora and loaders; dev/tests uses them, too

class ByteTokenizer:
    dtype = np.dtype(np.uint16)

    def __init__(self, name="bytes"):
        self.name = name

    def get_bos_token_id(self):
        return BOS

    def fingerprint(self):
        return self.name

    def encode_documents(self, texts):
        arrays = [np.array([] if text is None else ids_of(text), np.uint16) for text in texts]
        return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])


def ids_of(text):
    return [BOS, *text.encode()]


def write_shards(folder, shards):
    """shards: for each shard its row groups, for each row group its documents. Returns the folder's path."""
    folder, schema = Path(folder), pa.schema([("text", pa.string())])
    folder.mkdir(parents=True, exist_ok=True)
    for i, groups in enumerate(shards):
        with pq.ParquetWriter(folder / f"shard_{i:05d}.parquet", schema) as writer:
            for group in groups:
                writer.write_table(pa.table({"text": pa.array(group, pa.string())}))
    return str(folder)


def numbered(lengths, tag=""):
    """Documents of these lengths, no two alike: each repeats its own number."""
    return [(f"{tag}{i}." * (n // 2 + 1))[:n] for i, n in enumerate(lengths)]


def grouped(documents, sizes):
    """Documents in row groups of these sizes; the last one takes the rest."""
    stops = [*itertools.accumulate(sizes), len(documents)]
    return [documents[a:b] for a, b in itertools.pairwise([0, *stops]) if documents[a:b]]


@pytest.fixture
def corpus(tmp_path):
    """60 documents in 12 row groups of 3 shards, and a shard for val."""
    groups = grouped(numbered([(7 * i * i + 3) % 41 for i in range(60)]), [5] * 11)
    return write_shards(tmp_path / "data", [groups[:4], groups[4:8], groups[8:], [["val one", "val two"]]])


def tokenized(data, folder):
    """A copy of a folder as token shards of ByteTokenizer."""
    os.makedirs(folder)
    for shard in dataset.list_shards(data, "train") + dataset.list_shards(data, "val"):
        groups = [pa.array([None if text is None else np.array(ids_of(text), np.uint16).tobytes()
                            for text in shard.read(i).to_pylist()], pa.binary())
                  for i in range(len(shard.group_sizes))]
        dataset.write_shard(f"{folder}/{shard.name}", groups, "tokens", {
            "nanoloader.dtype": "uint16", "nanoloader.tokenizer": "bytes",
            "nanoloader.text_bytes": str(shard.text_bytes)})
    dataset.write_index(str(folder))
    return str(folder)


def documents_in(data):
    """{(path, row group, row): text} of the train split, without nulls, in reading order."""
    return {(shard.path, group, row): text for shard in dataset.list_shards(data, "train")
            for group in range(len(shard.group_sizes)) for row, text in enumerate(shard.read(group).to_pylist())
            if text is not None}


@pytest.fixture(scope="session", autouse=True)
def base_dir_of_the_tests(tmp_path_factory):
    """Keeps indexes and tokenizers of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOLOADER_BASE_DIR", str(tmp_path_factory.mktemp("nanoloader")))
        yield


loaders_to_close = []


def close_all():
    while loaders_to_close:
        loaders_to_close.pop().close()


@pytest.fixture(autouse=True)
def close_loaders():
    yield
    close_all()


def make(data, *, B=2, T=16, split="train", tokenizer=None, **options):
    """A loader that is closed after the test; by default with one lane per rank."""
    options = {"threads": 2, "num_lanes": options.get("world_size", 1), **options}
    if options.get("packing") != "flat":
        options.setdefault("buffer_size", 6)
    loaders_to_close.append(PackedLoader(tokenizer or ByteTokenizer(), B, T, split, data_dir=data, **options))
    return loaders_to_close[-1]


def rows_of(batch):
    """Rows as tuples of T + 1 tokens; -100 where a target is masked."""
    inputs, targets = batch
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous() and targets.is_contiguous()
    return [(a[0], *b) for a, b in zip(inputs.tolist(), targets.tolist(), strict=True)]


def run(data, *, steps, world=1, state=None, **options):
    """All rows of a run in their global order, from `world` loaders in this process, and the merged state."""
    loaders = [make(data, rank=rank, world_size=world, **options) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    rows, state = steps_of_ranks(loaders, steps), merge_states([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.close()
    return rows, state


def steps_of_ranks(loaders, steps):
    """Rows in the order of the run."""
    rows = []
    for _ in range(steps):
        per_rank = [rows_of(next(loader)) for loader in loaders]
        rows += itertools.chain(*zip(*per_rank, strict=True))
    return rows


# ---------------------------------------------------------------------------------------------------------
# Promise 1: the rows are those of dev/reference.py, for any world size, batch size, thread count and stop

CONFIGURATIONS = int(os.environ.get("NANOLOADER_CONFIGURATIONS", 80))    # drawn, 10 for each test
SHAPES = [((90, 70, 20), (8, 8)), ((50, 40, 20), (5, 5)), ((200, 10), (99, 99)), ((40, 40, 10), (1, 12)),
          ((30, 10), (40, 40)), ((13, 4), (6, 6)), ((120, 60, 5), (3, 30)), ((24, 24, 24, 24), (24, 24))]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """
    Folders of many shapes: many small row groups, one large, fewer than lanes, few documents, mostly nulls,
    mostly empty documents. Beside each, under its name and "_tokens", its tokens.
    """
    root, draw, folders = tmp_path_factory.mktemp("corpora"), random.Random(0), []
    for i, (counts, (low, high)) in enumerate(SHAPES):
        nulls, empty = [(0.03, 0.03), (0.4, 0.1), (0, 0), (0.1, 0.4)][i % 4]
        shards = []
        for count in counts:
            lengths = [int(draw.paretovariate(0.8)) % (30, 200, 90)[i % 3] for _ in range(count)]
            kinds = draw.choices((None, "", True), (nulls, empty, 1 - nulls - empty), k=count)
            documents = [text if kind else kind
                         for text, kind in zip(numbered(lengths, f"{i}:"), kinds, strict=True)]
            shards.append(grouped(documents, [draw.randint(low, high) for _ in documents]))
        folders.append(write_shards(root / f"{i}", shards))
        tokenized(folders[-1], root / f"{i}_tokens")
    return folders


def rising(row):
    return row / 100


def falling(row):
    return 1 - row / 150


def wave(row):
    return 1 + row % 7


def as_delivered(row, T):
    """A row of the reference as rows_of returns it: short rows are filled with BOS and masked."""
    row = [*map(int, row)]
    inputs, targets = row + [BOS] * (T + 1 - len(row)), row + [-100] * (T + 1 - len(row))
    return tuple(inputs[:1] + targets[1:])


def run_of_reference(options, T, state=None):
    def encode(document):    # of a text or a token shard
        return np.array(ids_of(document)) if isinstance(document, str) else np.frombuffer(document, np.uint16)

    sources = {name: (dataset.list_shards(name, "train"), weight, options["epochs"][name])
               for name, weight in options["data_dir"].items()}
    buffer = {} if options["packing"] == "flat" else {"buffer_size": options["buffer_size"]}
    return rows_of_run(sources, encode, T, options["packing"], options["num_lanes"], options["shuffle_seed"],
                       state, **buffer)


def draw_options(draw, corpora):
    folders, finite = draw.sample(corpora, draw.choice((1, 1, 2, 3))), draw.random() < 0.4
    return {"data_dir": {name: draw.choice((1, 3, 0.7, 0.25, rising, falling, wave)) for name in folders},
            "epochs": {name: draw.randint(1, 3) if finite or draw.random() < 0.2 else None
                       for name in folders},
            "packing": draw.choice(("flat", "bestfit", "exactfit")),
            "buffer_size": draw.choice((1, 3, 6, 40)),
            "num_lanes": draw.choice((1, 2, 3, 4, 5, 6, 8, 12)), "shuffle_seed": draw.choice((None, 3))}


def as_text_or_tokens(draw, options):
    """The same options; each folder is now drawn to be that of the text or that of its tokens."""
    folders = {name: name.removesuffix("_tokens") + draw.choice(("", "_tokens"))
               for name in options["epochs"]}
    renamed = {key: {folders[name]: value for name, value in options[key].items()}
               for key in ("data_dir", "epochs")}
    return {**options, **renamed}


def make_ranks(draw, T, state, options):
    """Loaders of all ranks of a drawn world, with a drawn batch size."""
    world = draw.choice([n for n in range(1, 7) if options["num_lanes"] % n == 0])
    B, threads, prefetch = draw.choice((1, 2, 3, 5)), draw.choice((1, 2)), draw.randint(0, 3)
    loaders = [PackedLoader(ByteTokenizer(), B, T, "train", rank=rank, world_size=world, threads=threads,
                            prefetch=prefetch, **options) for rank in range(world)]
    loaders_to_close.extend(loaders)
    if state:
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def check_drawn_run(draw, corpora, seen):
    """A chain of up to five resumes, each in another world and batch size, and finite runs to their end."""
    options, T = draw_options(draw, corpora), draw.choice((1, 7, 16, 33))
    finite, state, want = all(options["epochs"].values()), None, run_of_reference(options, T)
    for segment in range(draw.choice((1, 2, 3, 6))):
        if state and draw.random() < 0.3:    # the reference resumes, too
            want = run_of_reference(options, T, state)
        now = as_text_or_tokens(draw, options)
        loaders = make_ranks(draw, T, state, now)
        world, B = len(loaders), loaders[0].B
        try:
            rows = steps_of_ranks(loaders, draw.randint(0, 60 // (world * B) + 1))
        except StopIteration:    # one rank without process group ends before the others
            assert finite
            break
        except ValueError as error:    # a lane of nulls only, in an endless run
            assert "100 epochs" in str(error) and not finite
            seen["null lanes"] += 1
            return
        expected = [as_delivered(row, T) for row in itertools.islice(want, len(rows))]
        if finite:
            expected += [as_delivered([], T)] * (len(rows) - len(expected))
        assert rows == expected, (segment, world, B)
        state, options = merge_states([loader.state_dict() for loader in loaders]), now
        seen.update(rows=len(rows), resumes=segment > 0, mixtures=len(options["data_dir"]) > 1)
        seen["later epochs"] += any(at["next"][0] > 1 for lane in state["lanes"].values()
                                    for at in lane.values())
        if draw.random() < 0.2:
            T = draw.choice((1, 7, 16, 33))
            want = run_of_reference(options, T, state)
    if finite:
        check_end(draw, T, state, options)
        seen["finite"] += 1


def check_end(draw, T, state, options):
    """Without a process group each rank ends after its last row, or before a batch that is not full."""
    rest = list(run_of_reference(options, T, state))
    for uneven in ("pad", "stop"):
        loaders = make_ranks(draw, T, state, options | {"uneven": uneven})
        for rank, loader in enumerate(loaders):
            mine, B = rest[rank::len(loaders)], loader.B
            lengths = [*map(len, mine), 0]
            n = (max((i for i, length in enumerate(lengths) if length), default=-1) + B) // B
            n = n if uneven == "pad" else lengths.index(0) // B
            mine += [[]] * (n * B - len(mine))
            rows = [row for batch in loader for row in rows_of(batch)]
            assert rows == [as_delivered(row, T) for row in mine[:n * B]], (uneven, rank, B)


@needs_dev
@pytest.mark.parametrize("seed", range(-(-CONFIGURATIONS // 10)))
def test_rows_are_those_of_the_reference(corpora, seed):
    seen = collections.Counter()
    for number in range(10):
        check_drawn_run(random.Random(f"{seed} {number}"), corpora, seen)
        close_all()
    assert seen["rows"] > 100 and seen["resumes"] and seen["mixtures"] and seen["later epochs"]
    assert seen["finite"] or seed > 7


# Rows of version 4. Whoever changes one of these hashes changes dataloader.VERSION, too.
FROZEN = {"flat": "a09c336609661d35", "bestfit": "14cc7c5a8eb49493", "exactfit": "5bd5a525a2ae32ed",
          "mixture": "bbed1a828552b482"}


def shards_of_stable_size(data_dir, split):
    """The order of sources depends on sizes of shards, and these on the version of the compression."""
    shards = dataset.list_shards(data_dir, split)
    for shard in shards:
        shard.text_bytes = 40 * sum(shard.group_sizes)
    return shards


@pytest.mark.parametrize("packing", FROZEN)
def test_rows_of_a_version_never_change(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(dataloader, "list_shards", shards_of_stable_size)
    documents = numbered([(7 * i * i + 3) % 61 * (8 if i % 37 == 0 else 1) for i in range(8000)])
    groups, digest = grouped(documents, [2500, 1500, 2000]), hashlib.sha256()
    data = write_shards(tmp_path / "a", [groups[:2], groups[2:], [["val"]]])
    if packing == "mixture":
        data = {data: 0.7, write_shards(tmp_path / "b", [groups[2:], groups[:2], [["val"]]]): rising}
    for seed in (None, 3):
        rows, _ = run(data, steps=400, B=8, T=64, num_lanes=2, shuffle_seed=seed, buffer_size=40,
                      packing=packing.replace("mixture", "flat"))
        digest.update(np.array(rows, "<i8").tobytes())
    assert dataloader.VERSION == 4
    assert digest.hexdigest()[:16] == FROZEN[packing]


def test_mixture_resumes_in_folders_that_moved_and_on_tokens(corpus, tmp_path):
    """Sources are known by the names and sizes of their shards, whatever the folder is called."""
    other = write_shards(tmp_path / "other", [[numbered([9] * 99)], [["val"]]])
    same = {"num_lanes": 2, "shuffle_seed": 1}
    want, _ = run({corpus: 0.3, other: rising}, steps=200, **same)
    head, state = run({corpus: 0.3, other: rising}, steps=80, **same)
    tokens, moved = tokenized(corpus, tmp_path / "tokens"), str(tmp_path / "moved")
    os.rename(other, moved)
    tail, _ = run({moved: rising, tokens: 0.3}, steps=120, state=state, **same)
    assert head + tail == want


# ---------------------------------------------------------------------------------------------------------
# Promises 4 and 5: every document once per epoch, none skipped silently

def tokens_of(batches):
    """How often each byte was a target; with BOS first, that is every byte of every document."""
    return collections.Counter(token for batch in batches for row in rows_of(batch) for token in row[1:]
                               if token not in (BOS, -100))


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
@pytest.mark.parametrize("lanes, options", [
    (1, {}), (4, {"shuffle_seed": 2}), (16, {"T": 40}), (7, {"B": 1})])
def test_finite_run_delivers_every_token_once_per_epoch(corpus, packing, lanes, options):
    loader = make(corpus, packing=packing, num_lanes=lanes, epochs=3, **options)
    want = collections.Counter("".join(documents_in(corpus).values()).encode())
    assert tokens_of(loader) == {token: 3 * n for token, n in want.items()}
    assert loader.stats()["documents"] == 3 * 60 and loader.stats()["dropped"] == 0


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4),
       st.integers(1, 12), st.none() | st.integers(0, 5), st.integers(1, 4))
def test_every_row_is_dealt_once_per_epoch_and_lanes_differ_by_one_part(shapes, num_lanes, seed, epoch):
    shards = [dataset.Shard("f", f"{i}", 9, 9, rows, "text", None, None) for i, rows in enumerate(shapes)]
    rows = {(f"{i}", k, row) for i, sizes in enumerate(shapes)
            for k, n in enumerate(sizes) for row in range(n)}
    if len(rows) < num_lanes:
        return
    source, dealt, parts = dataloader.Source("f", shards, num_lanes, seed), [], []
    for lane in range(num_lanes):
        refs = list(source.deal(lane, Ref(epoch), epoch))
        found = [source.find(ref) for ref in refs]
        assert refs == sorted(refs) and all(len(rows) for _, _, rows in found)
        parts.append(len(refs))
        dealt += [(shard.name, group, int(row)) for shard, group, rows in found for row in rows]
        assert list(source.deal(lane, refs[-1], epoch)) == refs[-1:]
    assert sorted(dealt) == sorted(rows)
    assert max(parts) - min(parts) <= 1 and min(parts) > 0


def test_nulls_and_empty_documents_are_counted(tmp_path):
    data = write_shards(tmp_path, [[["a", None, "", "bc", None] * 4], [["val"]]])
    for packing in ("flat", "bestfit", "exactfit"):
        loader = make(data, packing=packing, epochs=2, num_lanes=2)
        assert tokens_of(loader) == {ord(c): 8 for c in "abc"}
        stats = loader.stats()
        assert stats["documents"] == 24 and stats["null_documents"] == 16 and stats["filtered_documents"] == 0


def test_lane_without_tokens_is_an_error_after_100_epochs(tmp_path):
    data = write_shards(tmp_path / "data", [[[None] * 4] * 2, [["val"]]])
    loader = make(data, num_lanes=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="100 epochs"):
            next(loader)
    assert list(make(data, num_lanes=2, epochs=2)) == []
    other = write_shards(tmp_path / "other", [[["text"] * 4], [["val"]]])
    mixed = make({data: 1, other: 1}, num_lanes=2, epochs={data: 1, other: 3})
    assert tokens_of(mixed) == {ord(c): n * 12 for c, n in zip("tex", (2, 1, 1), strict=True)}
    with pytest.raises(ValueError, match=rf"{data}.*100 epochs"):
        list(make({data: 1, other: 1}, num_lanes=2, epochs={data: None, other: 1}))
    some = make(write_shards(tmp_path / "some", [[["text", None]], [["val"]]]))
    assert len([next(some) for _ in range(60)]) == 60, "380 epochs, each with a null document"


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)])
def test_lane_without_tokens_for_some_epochs_is_no_error(tmp_path, seeds):
    """A shuffled lane may get only filtered row groups for several epochs."""
    def every_fourth(ids, ref, location):
        return ids if location.row_group % 4 == 0 else None

    data = write_shards(tmp_path, [grouped(numbered([9] * 32), [2] * 15), [["val"]]])
    for seed in seeds:
        loader = make(data, num_lanes=8, shuffle_seed=seed, transform=every_fourth, B=8, threads=1)
        assert [len(rows_of(next(loader))) for _ in range(8)] == [8] * 8
        loader.close()


def test_too_few_documents_is_an_error_that_names_the_source(tmp_path):
    data = write_shards(tmp_path, [[["a", "b", "c"]], [["val"]]])
    with pytest.raises(ValueError, match=rf"{data}.*3 documents for 4 lanes; lower num_lanes to 3"):
        next(make(data, num_lanes=4))
    assert len(rows_of(next(make(data, num_lanes=3)))) == 2


# ---------------------------------------------------------------------------------------------------------
# Reading: ahead, but no further than needed

@pytest.fixture
def reads(monkeypatch):
    """The (shard, row group) of every read, as it begins."""
    seen, read = [], dataset.Shard.read

    def note(shard, row_group):
        seen.append((shard.name, row_group))
        return read(shard, row_group)

    monkeypatch.setattr(dataset.Shard, "read", note)
    return seen


def test_row_group_that_lanes_share_is_read_once_per_epoch(tmp_path, reads):
    data = write_shards(tmp_path, [grouped(numbered([9] * 80), [20] * 3), [["val"]]])
    assert len(list(make(data, num_lanes=8, epochs=1, T=30))) > 10
    assert sorted(reads) == [("shard_00000.parquet", i) for i in range(4)]


def test_first_row_groups_of_all_lanes_are_read_together(tmp_path, monkeypatch):
    """One after the other, each lane would wait for a distant store."""
    data = write_shards(tmp_path, [grouped(numbered([9] * 80), [20] * 3), [["val"]]])
    together, read = threading.Barrier(4, timeout=60), dataset.Shard.read

    def read_with_the_others(shard, row_group):
        together.wait()
        return read(shard, row_group)

    monkeypatch.setattr(dataset.Shard, "read", read_with_the_others)
    assert rows_of(next(make(data, B=4, num_lanes=4, threads=4, prefetch=0, epochs=1)))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_resume_reads_only_the_row_groups_it_needs(tmp_path, reads, kind):
    """Those of the buffered documents, the current one and a few ahead, each once."""
    data = write_shards(tmp_path / "data", [grouped(numbered([30] * 400), [10] * 39), [["val"]]])
    data = tokenized(data, tmp_path / "tokens") if kind == "tokens" else data
    state = run(data, steps=95, prefetch=0)[1]
    at, loader = state["lanes"]["0"][data], make(data, prefetch=0)
    reads.clear()
    loader.load_state_dict(state)
    assert not reads
    next(loader)
    needed = {Ref(*ref).group for ref in at["buffered"]} | {at["next"][1]}
    ahead = range(max(needed) + 1, max(needed) + (10 if kind == "text" else 4))
    assert min(needed) > 5 and needed <= {group for _, group in reads} <= {*needed, *ahead}
    assert len(reads) == len(set(reads))


# ---------------------------------------------------------------------------------------------------------
# Promise 6: an error in a thread reaches next(), with its shard, row group and row, and no batch is skipped

class Poisoned(ByteTokenizer):
    poison = "poison"

    def encode_documents(self, texts):
        if any(self.poison in text for text in texts if text is not None):
            raise BaseException("boom")    # as tiktoken's panics: not an Exception
        return super().encode_documents(texts)


@pytest.fixture
def poisoned(tmp_path):
    documents = numbered([30] * 40)
    documents[27] = "poison"
    return write_shards(tmp_path, [grouped(documents, [10, 10, 10]), [["val"]]])


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
def test_error_names_shard_row_group_and_row_and_skips_no_batch(poisoned, packing):
    """It is raised again and again; once its cause is gone, the same loader resumes."""
    want = [rows_of(batch) for batch in itertools.islice(make(poisoned, packing=packing), 60)]
    tokenizer, rows = Poisoned(), []
    loader = make(poisoned, packing=packing, tokenizer=tokenizer)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"00000.parquet, row group 2, row 7: BaseException: boom"):
            while True:
                rows.append(rows_of(next(loader)))
    assert 5 < len(rows) < 40
    tokenizer.poison = "no more"
    assert rows + [rows_of(next(loader)) for _ in range(60 - len(rows))] == want


def test_shard_that_is_damaged_in_the_middle_of_a_run_is_named(tmp_path, monkeypatch):
    data = write_shards(tmp_path, [grouped(numbered([30] * 90), [3] * 29), [["val"]]])
    path, read = tmp_path / "shard_00000.parquet", dataset.Shard.read

    def read_and_damage(shard, row_group):
        array = read(shard, row_group)
        if row_group == 2:
            path.write_bytes(b"x" * path.stat().st_size)
            dataset.read_footer.cache_clear()
        return array

    monkeypatch.setattr(dataset.Shard, "read", read_and_damage)
    loader = make(data)
    for _ in range(2):
        with pytest.raises(OSError, match=r"shard_00000.parquet, row group"):
            list(itertools.islice(loader, 100))


class Wrong(ByteTokenizer):
    """Keeps the rules while it is tried out on the texts of tokenizer.py, and breaks one later."""

    def __init__(self, break_rule):
        super().__init__()
        self.break_rule = break_rule

    def encode_documents(self, texts):
        ids, bounds = super().encode_documents(texts)
        if all(text is None or re.match(r"\d+\.", text) for text in texts):    # of the shard
            ids, bounds = self.break_rule(ids, bounds)
        return ids, bounds


BROKEN_RULES = {
    "no BOS": lambda ids, bounds: (np.where(np.arange(len(ids)) == bounds[-2], 7, ids), bounds),
    "too few bounds": lambda ids, bounds: (ids, bounds[:-1]),
    "a token too many": lambda ids, bounds: (np.append(ids, 7), bounds),
    "shifted bounds": lambda ids, bounds: (ids, bounds + 1),
    "float bounds": lambda ids, bounds: (ids, bounds + 0.5),
    "decreasing bounds": lambda ids, bounds: (ids, np.append(bounds[:-1] + bounds[-1], bounds[-1])),
    "no tokens": lambda ids, bounds: (ids, np.append(bounds[:-2], bounds[[-1, -1]])),
    "tokens of nulls": lambda ids, bounds: (np.full(len(bounds) - 1, BOS), np.arange(len(bounds)))}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_tokenizer_that_breaks_a_rule_later_is_an_error_that_names_the_document(tmp_path, rule):
    documents = numbered([20] * 40)
    documents[0] = documents[2] = None
    data = write_shards(tmp_path, [[["first"] * 4, documents], [["val"]]])
    loader = make(data, tokenizer=Wrong(BROKEN_RULES[rule]), packing="flat")
    with pytest.raises(RuntimeError, match=r"shard_00000.parquet, row group 1, row \d+: (Value|Index)Error"):
        list(itertools.islice(loader, 40))


class PlainTokenizer:
    """Has only nanochat's encode."""
    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=8):
        return [[prepend, *text.encode()] for text in texts]


class OnlyDocuments:
    get_bos_token_id = ByteTokenizer.get_bos_token_id

    def encode_documents(self, texts):
        return ByteTokenizer().encode_documents(texts)


def test_any_tokenizer_gives_the_same_rows(corpus):
    want = run(corpus, steps=9)[0]
    for tokenizer in (PlainTokenizer(), OnlyDocuments()):
        assert run(corpus, steps=9, tokenizer=tokenizer)[0] == want


def test_token_shards_are_checked_like_a_tokenizer(corpus, tmp_path):
    """Made by another tokenizer, an odd number of bytes, no BOS."""
    tokens = tokenized(corpus, tmp_path / "tokens")
    with pytest.raises(ValueError, match="tokens needs the tokenizer that made it, bytes, not ano"):
        next(make(tokens, tokenizer=ByteTokenizer("another")))

    def shard_of(name, array):
        os.makedirs(tmp_path / name)
        for i in range(2):
            dataset.write_shard(f"{tmp_path}/{name}/{i}.parquet", [array], "tokens", {
                "nanoloader.dtype": "uint16", "nanoloader.tokenizer": "bytes", "nanoloader.text_bytes": "9"})
        dataset.write_index(f"{tmp_path}/{name}")
        return f"{tmp_path}/{name}"

    good = np.array(ids_of("good"), np.uint16).tobytes()
    odd = [good + b"\0", b"\1" + good]    # together they have whole tokens, and each begins with BOS
    for name, bad in (("odd", odd), ("without_bos", [good[2:]])):
        with pytest.raises(RuntimeError, match=r"0.parquet, row group 0, row 1: ValueError"):
            next(make(shard_of(name, pa.array([good, *bad], pa.binary()))))
    loader = make(shard_of("null", pa.array([good, None])), epochs=1)
    assert tokens_of(loader) == {ord("g"): 1, ord("o"): 2, ord("d"): 1}


# ---------------------------------------------------------------------------------------------------------
# Transforms

def fill_in_the_middle(ids, ref, location):
    """Moves the middle of each document to its end; where it is cut is drawn anew in each epoch."""
    a, b = sorted(np.random.default_rng(ref[:3]).integers(1, len(ids) + 1, 2))
    return np.concatenate([ids[:a], ids[b:], ids[a:b]])


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
def test_transform_that_depends_on_the_epoch_resumes_exactly(corpus, packing):
    same = {"packing": packing, "num_lanes": 2, "transform": fill_in_the_middle}
    want, state = run(corpus, steps=150, **same)
    for stop in (7, 130):
        head, state = run(corpus, steps=stop, **same)
        assert head + run(corpus, steps=150 - stop, state=state, **same)[0] == want
    assert max(lane[corpus]["next"][0] for lane in state["lanes"].values()) > 1
    assert run(corpus, steps=150, **{**same, "transform": None})[0] != want
    with pytest.raises(ValueError, match=r"transform.*'fill_in_the_middle'.*None"):
        make(corpus, packing=packing, num_lanes=2).load_state_dict(state)


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
def test_transform_filters_documents_and_they_are_counted(corpus, packing):
    """None filters a document, and so do no tokens at all."""
    texts = documents_in(corpus)

    def keep_some(ids, ref, location):
        assert ids.dtype == np.int64 and ids.tolist() == ids_of(texts[location])
        return None if texts[location][:1] in ("1", "3") else ids[:0] if texts[location][:1] == "5" else ids

    want = [text for text in texts.values() if text[:1] not in ("1", "3", "5")]
    loader = make(corpus, packing=packing, epochs=1, transform=keep_some, shuffle_seed=1)
    assert tokens_of(loader) == collections.Counter("".join(want).encode())
    assert loader.stats()["documents"] == len(want)
    assert loader.stats()["filtered_documents"] == len(texts) - len(want) > 10


def test_transform_that_filters_what_the_state_holds_is_an_error(corpus):
    def some(ids, ref, location):
        return ids if everything else None

    everything = True
    state = run(corpus, steps=3, packing="bestfit", transform=some)[1]
    everything, loader = False, make(corpus, packing="bestfit", transform=some)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"no tokens.*same .*transform"):
        next(loader)


@pytest.mark.parametrize("result", [
    lambda ids: ids * 0.5, lambda ids: ids.reshape(1, -1), lambda ids: ids.astype(np.uint64) + 2**63,
    lambda ids: "tokens", lambda ids: ids > 0, lambda ids: ids[1:], lambda ids: -ids],
    ids=["floats", "2-D", "beyond int64", "a string", "bools", "no BOS", "negative"])
def test_transform_that_returns_no_tokens_is_an_error_that_names_the_document(corpus, result):
    loader = make(corpus, transform=lambda ids, ref, location: result(ids))
    with pytest.raises(RuntimeError, match=r"00000.parquet, row group 0, row 0: \w+: transform returned"):
        next(loader)


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
def test_transform_may_add_what_belongs_to_each_token_in_the_upper_bits(corpus, packing):
    plain = make(corpus, packing=packing)
    wide = make(corpus, packing=packing, transform=lambda ids, ref, at: ids + (1 + at.row_group << 32))
    for _ in range(30):
        for narrow, both in zip(next(plain), next(wide), strict=True):
            assert torch.equal(both & 0xFFFF, narrow) and set((both >> 32).flatten().tolist()) <= {1, 2, 3, 4}


# ---------------------------------------------------------------------------------------------------------
# The packers, each against a slow reference

def documents_of(lengths):
    """(ids, Ref) of documents whose tokens are all different, so that rows tell where each came from."""
    return [(np.array([BOS, *range(1000 * i + 1001, 1000 * i + 1000 + n)]), Ref(doc=i))
            for i, n in enumerate(lengths)]


def pack(packer, lengths, stop=None):
    """All rows of a finite run. After row `stop` the packer is a new one, restored from the references."""
    documents, new = documents_of(lengths), copy.deepcopy(packer)
    rows, pull = [], iter(documents)
    while row := packer.row(lambda: next(pull, None)):
        rows.append(np.concatenate(row).tolist())
        if len(rows) == stop:
            new.rows, new.counts = packer.rows, packer.counts
            for ref in packer.buffered():
                new.restore(documents[ref.doc][0], ref)
            assert list(new.buffered()) == list(packer.buffered())
            packer = new
    assert packer.row(lambda: None) == [] and packer.counts["documents"] == len(lengths)
    return rows


def flat_reference(lengths, T):
    stream = [token for ids, _ in documents_of(lengths) for token in ids.tolist()]
    return [stream[i:i + T + 1] for i in range(0, max(1, len(stream) - 1), T)] if stream else []


def bestfit_reference(lengths, T, buffer_size):
    """nanochat's rule with lists and scans; at the end of the data, until the buffer is empty."""
    waiting, buffer, rows = [ids.tolist() for ids, _ in documents_of(lengths)], [], []
    while waiting or buffer:
        row = []
        while len(row) < T + 1 and (waiting or buffer):
            n = max(0, buffer_size - len(buffer))
            buffer, waiting = buffer + waiting[:n], waiting[n:]
            fitting = [ids for ids in buffer if len(ids) <= T + 1 - len(row)]
            ids = max(fitting, key=len) if fitting else min(buffer, key=len)    # the first of equals
            buffer.remove(ids)
            row += ids[:T + 1 - len(row)]
        rows.append(row)
    return rows


sizes = st.lists(st.integers(1, 12) | st.integers(1, 60), max_size=50)
stops = st.none() | st.integers(1, 20)


def count_cut(lengths, rows, R):
    complete = {tuple(row[i:i + n]) for row in rows for i in range(len(row)) if row[i] == BOS
                for n in {*lengths}}
    return sum(n <= R and tuple(ids.tolist()) not in complete
               for n, (ids, _) in zip(lengths, documents_of(lengths), strict=True) if n > 1)


@given(sizes, st.integers(1, 20), stops)
def test_flat_is_the_stream_cut_every_T_tokens(lengths, T, stop):
    packer, starts = FlatPacker(T), [0, *itertools.accumulate(lengths)]
    assert pack(packer, lengths, stop) == flat_reference(lengths, T)
    ends = [max(0, -(-(start - T) // T)) * T + T + 1 for start in starts]    # of the row where it begins
    assert packer.counts["cut"] == sum(n <= T + 1 and start + n > end
                                       for n, start, end in zip(lengths, starts, ends, strict=False))


@given(sizes, st.integers(1, 20), st.integers(1, 12), stops)
def test_bestfit_is_nanochats_rule(lengths, T, buffer_size, stop):
    packer, want = BestFitPacker(T, buffer_size), bestfit_reference(lengths, T, buffer_size)
    assert pack(packer, lengths, stop) == want
    assert all(len(row) == T + 1 for row in want[:-1])
    assert packer.counts["dropped"] == sum(lengths) - sum(map(len, want))
    assert packer.counts["cut"] == count_cut(lengths, want, T + 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_best_fit_is_the_longest_that_fits_else_the_shortest(lengths, free):
    documents = sorted((n, Ref(doc=i)) for i, n in enumerate(lengths))
    i, n = choose_best_fit(documents, free)
    want = max((m for m in lengths if m <= free), default=min(lengths))
    assert documents[i][0] == want and n == min(want, free)
    assert documents[i][1].doc == lengths.index(want), "the oldest of equals"


@settings(max_examples=300)
@given(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=9))
def test_gap_is_filled_as_far_as_any_subset_does(gap, lengths):
    sums = {sum(some) for k in range(len(lengths) + 1) for some in itertools.combinations(lengths, k)}
    copies = collections.Counter(lengths)
    chosen = fill_gap(gap, sorted(copies), {n: [n] * copies[n] for n in copies})
    assert sum(chosen) == max(s for s in sums if s <= gap)
    assert not collections.Counter(chosen) - copies, "a document was used twice"


def pieces_in(row):
    starts = [i for i, token in enumerate(row) if token == BOS] + [len(row)]
    return [row[a:b] for a, b in itertools.pairwise(starts)]


@settings(max_examples=200)
@given(sizes, st.integers(2, 24), st.integers(1, 10), stops)
def test_exactfit_delivers_every_token_once_in_pieces_that_begin_with_bos(lengths, T, buffer_size, stop):
    packer, runs = ExactFitPacker(T, buffer_size), collections.defaultdict(list)
    rows = pack(packer, lengths, stop)
    assert all(len(row) == T + 1 for row in rows[:-1]) and all(row[0] == BOS for row in rows)
    for piece in itertools.chain.from_iterable(map(pieces_in, rows)):
        if len(piece) > 1:
            runs[piece[1] // 1000 - 1].append(piece[1:])
    for i, (ids, _) in enumerate(documents_of(lengths)):
        assert list(itertools.chain(*runs[i])) == ids[1:].tolist()
    assert rows == pack(ExactFitPacker(T, buffer_size), lengths)
    n_pieces, n_cut = sum(row.count(BOS) for row in rows), packer.counts["cut"]
    assert packer.counts["dropped"] == 0
    assert count_cut(lengths, rows, T + 1) <= n_cut <= n_pieces - len(lengths)


@settings(max_examples=150)
@given(st.lists(st.integers(2, 30), max_size=40), st.integers(4, 24), st.integers(1, 8))
def test_exactfit_opens_with_the_oldest_and_cuts_only_if_no_subset_fits(lengths, T, buffer_size):
    """Each row is compared with the buffer before it; all subsets are tried."""
    packer = ExactFitPacker(T, buffer_size)
    pull, cropped, cut = iter(documents_of(lengths)), [], packer._cut_to_fit
    packer._cut_to_fit = lambda missing: cropped.append(missing) or cut(missing)
    buffers = note_buffers(packer)
    while row := packer.row(lambda: next(pull, None)):
        (opener, _), *others = buffers[-1]
        opener = min(opener, T + 1)
        gap, sums = T + 1 - opener, {0}
        for n, token in others:
            sums |= {s + n for s in sums if token == 0 and s + n <= gap}
        assert len(pieces_in(np.concatenate(row).tolist())[0]) == opener
        assert gap - sum(cropped) == max(sums)
        cropped.clear()


def note_buffers(packer):
    """A list that gets, for each row, the buffer it is chosen from: (tokens left, token) of each document."""
    buffers, pop, first = [], packer._pop, packer.rows

    def note(ref):
        if len(buffers) <= packer.rows - first:
            buffers.append([(len(ids) - max(0, ref.token - 1), ref.token)    # a later piece has BOS, too
                            for ref, ids in packer.buffer.items()])
        return pop(ref)

    packer._pop = note
    return buffers


def test_exactfit_buffer_grows_with_the_rows():
    packer, pull = ExactFitPacker(99, 200), iter(documents_of([20] * 1000))
    buffers = note_buffers(packer)
    for _ in range(100):
        packer.row(lambda: next(pull))
    assert [len(buffer) for buffer in buffers] == [min(200, 32 + 4 * row) for row in range(100)]


def test_exactfit_ends_an_epoch_before_the_next_one():
    packer, lengths, spans = ExactFitPacker(16, 256), [900, 30, 1200, 7, 500], []
    pull = ((np.full(n, BOS), Ref(epoch, 0, i)) for epoch in range(1, 99) for i, n in enumerate(lengths))
    for _ in range(2000):
        packer.row(lambda: next(pull))
        spans.append(len({ref.epoch for ref in packer.buffered()}))
    assert max(spans) == 2 and packer.counts["documents"] > 50


@pytest.mark.parametrize("rows_long", [3, 50])
def test_exactfit_rows_of_one_long_document_are_far_apart(rows_long):
    """If all documents are long, by at least a quarter of the buffer."""
    packer, pull = ExactFitPacker(8, 128), iter(documents_of([rows_long * 8] * 800))
    seen, nearest = {}, math.inf
    for row in range(1500):
        number = np.concatenate(packer.row(lambda: next(pull)))[1] // 1000    # of the document that opens it
        if row > 100:
            nearest = min(nearest, row - seen.get(number, -math.inf))
        seen[number] = row
    assert 128 // 4 - 1 <= nearest < math.inf


@pytest.mark.parametrize("buffer_size, most_cut", [(256, 0.0015), (1000, 0.0002)])
def test_exactfit_cuts_next_to_nothing_of_lognormal_lengths(buffer_size, most_cut):
    """Nothing is lost, and no document waits for more rows than there were documents before it."""
    T, n = 2048, 12_000
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(6.15, 1.13, n)).astype(int)
    packer, zeros, numbers = ExactFitPacker(T, buffer_size), np.zeros(lengths.max()), iter(range(n))
    waiting, delivered, cut = {}, 0, set()

    def pull():
        if (i := next(numbers, None)) is None:
            return None
        waiting[i] = packer.rows, len(packer.buffer)
        return zeros[:lengths[i]], Ref(doc=i)

    while row := packer.row(pull):
        delivered += sum(map(len, row))
        assert len(waiting) == 0 or sum(map(len, row)) == T + 1
        complete = {ref.doc for ref in packer.buffer if ref.token == 0}
        cut |= {ref.doc for ref in packer.buffer if ref.token and lengths[ref.doc] <= T + 1}
        for i in waiting.keys() - complete:
            row, before = waiting.pop(i)
            assert packer.rows - 1 - row <= before
    assert len(cut) == packer.counts["cut"] <= most_cut * (lengths <= T + 1).sum()
    assert lengths.sum() <= delivered <= 1.001 * lengths.sum(), "each later piece has one more BOS"


@pytest.mark.parametrize("packing", ["bestfit", "exactfit"])
def test_buffered_long_document_does_not_keep_its_chunk_in_memory(packing):
    packer, chunk = dataloader.PACKINGS[packing](8, 4), np.zeros(10_000, np.int64)
    alive, documents = weakref.ref(chunk), iter([(chunk[:100], Ref()), (chunk[100:200], Ref(doc=1))])
    del chunk
    packer.row(lambda: next(documents, None)).clear()
    documents = iter(())
    assert packer.buffered() and alive() is None


# ---------------------------------------------------------------------------------------------------------
# Promise 9: a mixture has its shares in every batch

GOLDEN = 0x9E3779B97F4A7C15
WEIGHTS = [(0.5, 0.5), (0.7, 0.3), (0.9, 0.1), (0.98, 0.02), (0.6, 0.3, 0.1), (5, 3, 1), (1, 1, 1, 1),
           (1, 999), (0.382, 0.618), (1 / 3, 2 / 3), tuple(range(1, 11)), (0.5, 0.25, 0.125, 0.0625, 0.0625)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_batch_and_every_prefix_has_its_shares(weights):
    """Batches of 8 to 1,024 rows that begin at any row, and all prefixes of 100,000 rows."""
    bounds, n = bounds_of(weights, 0), 100_000
    places = np.arange(n, dtype=np.uint64) * np.uint64(GOLDEN)
    source = np.searchsorted(np.array(bounds[:-1], np.uint64), places, side="right")
    for row in (*range(300), *range(10**5 - 300, 10**5)):
        assert source_of_row(row, bounds) == source[row]
    for i, weight in enumerate(weights):
        off = np.cumsum(np.concatenate([[0], source == i])) - np.arange(n + 1) * weight / sum(weights)
        assert abs(off).max() <= 5
        for B in (8, 32, 64, 100, 256, 1024):
            assert abs(off[B:] - off[:-B]).max() <= 3


@pytest.fixture
def letters(tmp_path):
    """Three sources whose documents are all a, all b, all c."""
    return [write_shards(tmp_path / x, [grouped([x * (5 + i % n) for i in range(170)], [8] * 21), [["val"]]])
            for x, n in zip("abc", (28, 29, 30), strict=True)]


def letters_of(rows):
    return "".join(chr(max({*row} - {BOS})) for row in rows)


def letters_by_golden_ratio(data, rows):
    """What letters_of should be, for a mixture of folders that are named like their letters."""
    names = list(make(data, num_lanes=1).sources)
    weights = [data[name] for name in names]
    return "".join(names[source_of_row(g, bounds_of(weights, g))][-1] for g in rows)


@pytest.mark.parametrize("weights, lanes, world, B", [
    ((0.7, 0.3), 8, 1, 8), ((0.7, 0.3), 64, 2, 128), ((0.6, 0.3, 0.1), 8, 4, 16), ((0.98, 0.02), 8, 1, 32),
    ((5, 3, 1), 128, 1, 64), ((1, 1), 16, 4, 4)])
def test_batches_of_a_loader_have_their_shares(letters, weights, lanes, world, B):
    data = dict(zip(letters, weights, strict=False))
    rows, _ = run(data, steps=2000 // (B * world) + 5, world=world, B=B, num_lanes=lanes, packing="flat")
    got = letters_of(rows)
    for start in range(0, len(rows), B * world):
        batch = got[start:start + B * world]
        for letter, weight in zip("abc", weights, strict=False):
            assert abs(batch.count(letter) - len(batch) * weight / sum(weights)) <= 3
    assert got == letters_by_golden_ratio(data, range(len(rows)))


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e30, None])
def test_weight_that_is_no_number_of_rows_is_an_error_that_names_the_row(letters, weight):
    loader = make({letters[0]: 1, letters[1]: lambda row: weight if row == 5 else np.int64(1)}, num_lanes=4)
    with pytest.raises(ValueError, match="weights of row 5 are"):
        steps_of_ranks([loader], 4)


def test_two_equal_folders_that_both_moved_are_refused(corpus, tmp_path):
    folders = [str(shutil.copytree(corpus, tmp_path / name)) for name in "abcd"]
    state = make(dict.fromkeys(folders[:2], 1), num_lanes=2).state_dict()
    with pytest.raises(ValueError, match="do not match the state"):
        make(dict.fromkeys(folders[2:], 1), num_lanes=2).load_state_dict(state)


def test_weights_change_at_a_resume_and_may_be_functions_of_the_row(letters):
    a, b, c = letters
    same = {"num_lanes": 4, "B": 4}
    head, state = run({a: 0.9, b: 0.1}, steps=50, **same)
    tail, state = run({b: 1, a: 1}, steps=50, state=state, **same)    # the order of a dict does not matter
    assert letters_of(head) == letters_by_golden_ratio({a: 0.9, b: 0.1}, range(200))
    assert letters_of(tail) == letters_by_golden_ratio({a: 1, b: 1}, range(200, 400))
    rows, state = run({a: rising, c: 1}, steps=50, **same)
    tail, state = run({a: rising, c: 1}, steps=50, world=2, state=state, num_lanes=4, B=4)
    shares = np.cumsum([row / 100 / (row / 100 + 1) for row in range(600)])
    counts = np.cumsum([letter == "a" for letter in letters_of(rows + tail)])
    assert abs(counts - shares).max() < 4 and counts[30] < 6 < 350 < counts[-1]
    for other in ({a: falling, c: 1}, {a: 1, c: 1}, {a: 1, c: rising}):
        with pytest.raises(ValueError, match=r"weight_functions.*rising"):
            make(other, **same).load_state_dict(state)


def test_source_may_join_or_leave_at_a_resume(letters):
    """It begins at its beginning; those that stay continue."""
    a, b, c = letters
    same = {"num_lanes": 4, "B": 4, "packing": "flat"}
    plain = run(b, steps=300, **same)[0]
    head, state = run({a: 1, b: 1}, steps=40, **same)
    tail, state = run({b: 1, c: 1}, steps=40, state=state, **same)
    assert {*letters_of(tail)} == {"b", "c"}
    for lane in range(4):
        mine = [row for g, row in enumerate(head + tail) if g % 4 == lane and letters_of([row]) == "b"]
        assert mine == plain[lane::4][:len(mine)] and len(mine) > 30
    loader = make(c, **same)
    with pytest.raises(ValueError, match=r"sources"):
        loader.load_state_dict(run({a: 1, b: 1}, steps=1, **same)[1])


def test_source_that_ends_leaves_its_part_to_the_others(letters):
    a, b, c = letters
    loader = make({a: 6, b: 3, c: 1}, epochs={a: 1, b: 3, c: 3}, num_lanes=4, B=4)
    rows = [row for batch in loader for row in rows_of(batch) if row[1] != -100]
    got = letters_of(rows)
    last = [got.rindex(letter) for letter in "abc"]
    assert last == sorted(last) and abs(got[last[0] + 1:last[0] + 101].count("b") - 100 * 3 / 4) <= 3
    for letter, data, epochs in zip("abc", letters, (1, 3, 3), strict=True):
        tokens = sum(row.count(ord(letter)) for row in rows)
        assert tokens == epochs * sum(map(len, documents_in(data).values()))
    endless = make({a: 1, b: 1}, epochs={a: 1}, num_lanes=4, B=4)
    got = letters_of([row for _ in range(300) for row in rows_of(next(endless))])
    assert {*got[:200]} == {"a", "b"} and {*got[-400:]} == {"b"}


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
def test_run_that_has_ended_resumes_with_more_epochs(corpus, packing):
    same = {"num_lanes": 2, "packing": packing}
    total = collections.Counter("".join(documents_in(corpus).values()))
    for stop in (1, 2):
        loader, more = make(corpus, epochs=stop, **same), make(corpus, epochs=3, **same)
        assert list(loader)
        more.load_state_dict(loader.state_dict())
        assert tokens_of(more) == {ord(c): n * (3 - stop) for c, n in total.items()}


@pytest.mark.parametrize("data_dir, epochs", [
    ({"x": 0}, None), ({"x": -1}, None), ({"x": float("nan")}, None), ({"x": "1"}, None), ({"x": 1e10}, None),
    ({"x": True}, None), ({}, None), ({"x": 1, "./x/": 1}, None), ("x", 0), ("x", 1.5), ({"x": 1}, {"y": 1})])
def test_bad_weights_and_epochs_are_errors(tmp_path, monkeypatch, data_dir, epochs):
    monkeypatch.chdir(tmp_path)
    write_shards("x", [[["a", "b"]], [["val"]]])
    with pytest.raises(ValueError, match=r"expected"):
        make(data_dir, epochs=epochs)
    assert make("x/", epochs={"./x": 1}) and make({"x": 0.5}, epochs={"x/": 2})


# ---------------------------------------------------------------------------------------------------------
# States

def test_state_is_small_json_that_shares_nothing_with_the_loader(corpus):
    loader = make(corpus, num_lanes=2)
    next(loader)
    state = loader.state_dict()
    text = json.dumps(state)
    assert json.loads(text) == state and len(text) < 3000
    state["lanes"]["0"][corpus]["next"][0] = 77
    state["sources"].clear()
    assert json.dumps(loader.state_dict()) == text


def test_state_is_of_the_delivered_batch_not_of_prefetched_ones(corpus):
    """Also at an earlier position, for callers that fetch ahead."""
    loader, positions, states, batches = make(corpus, num_lanes=2, prefetch=5), [], [], []
    for _ in range(8):
        positions.append(loader.position)
        states.append(loader.state_dict())
        batches.append(rows_of(next(loader)))
    for position, state, batch in zip(positions, states, batches, strict=True):
        assert loader.state_dict(position) == state
        again = make(corpus, num_lanes=2)
        again.load_state_dict(state)
        assert rows_of(next(again)) == batch


def test_loading_into_a_running_or_finished_loader(corpus):
    want = [rows_of(batch) for batch in make(corpus, epochs=1)]
    loader, start = make(corpus, epochs=1), make(corpus, epochs=1).state_dict()
    got = [rows_of(next(loader)) for _ in range(4)]
    middle = loader.state_dict()
    got += [rows_of(batch) for batch in loader]
    assert got == want and len(want) > 10
    for state, rows in ((middle, want[4:]), (start, want), (middle, want[4:])):
        loader.load_state_dict(state)
        assert [rows_of(batch) for batch in loader] == rows
    with pytest.raises(StopIteration):
        next(loader)


def damaged(state, draw):
    """The state with one value, key or item changed; None if the change changed nothing."""
    state, parts = json.loads(json.dumps(state)), []

    def collect(part):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            parts.append((part, key))
            if isinstance(value, (dict, list)):
                collect(value)

    collect(state)
    before = json.dumps(state, sort_keys=True)
    part, key = draw.choice(parts)
    change = draw.randrange(4)
    if change == 0:
        del part[key]
    elif change == 1:
        part[key] = draw.choice([None, -1, 0, 7, 10**9, 1.5, True, "x", [], {}, [[1, 0, 0, 0]], math.nan])
    elif change == 2 and type(part[key]) is int:
        part[key] += draw.choice((-1, 1))
    elif isinstance(part, list):
        part.insert(key, part[key])
    else:
        part["x"] = part[key]
    return state if json.dumps(state, sort_keys=True) != before else None


def test_damaged_state_is_refused_and_changes_nothing(corpus):
    state, loader, draw = run(corpus, steps=5, num_lanes=2)[1], make(corpus, num_lanes=2), random.Random(0)
    next(loader)
    before, refused = loader.state_dict(), 0
    for _ in range(400):
        if bad := damaged(state, draw):
            with pytest.raises(ValueError, match=r"^[^\n]+$"):
                loader.load_state_dict(bad)
            refused += 1
    assert loader.state_dict() == before and refused > 200
    loader.load_state_dict(state)
    assert rows_of(next(loader)) == run(corpus, steps=6, num_lanes=2)[0][-2:]


@pytest.mark.parametrize("state", [{}, {"version": 3, "rows": 8}, {"epoch": 1, "pq_idx": 0}, None, [], "x"])
def test_other_versions_and_other_things_are_refused_in_a_line(corpus, state):
    with pytest.raises(ValueError, match=r"^[^\n]*(version|damaged)[^\n]*$"):
        make(corpus).load_state_dict(state)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(corpus, tmp_path):
    changes = {"packing": "bestfit", "num_lanes": 4, "shuffle_seed": 1, "buffer_size": 9, "split": "val",
               "tokenizer": ByteTokenizer("other"), "transform": fill_in_the_middle}
    state = run(corpus, steps=3, num_lanes=2)[1]
    for name, value in changes.items():
        loader = make(corpus, **{"num_lanes": 2, name: value})
        before = loader.state_dict()
        with pytest.raises(ValueError, match=name):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
    for name, documents in (("shards", numbered([9] * 99)), ("more", numbered([7] * 99))):
        other = write_shards(tmp_path / name, [[documents], [["val"]]])
        with pytest.raises(ValueError, match=r"shards changed in: .* Put new data"):
            make(other, num_lanes=2).load_state_dict(state)
    moved = os.rename(corpus, tmp_path / "moved") or str(tmp_path / "moved")
    loader = make(moved, num_lanes=2)
    loader.load_state_dict(state)
    assert rows_of(next(loader)) == run(moved, steps=4, num_lanes=2)[0][-2:]
    state = loader.state_dict()
    write_shards(moved, [[numbered([9] * 99)]])    # in the same folder
    with pytest.raises(ValueError, match=r"shards changed in: .* Put new data"):
        make(moved, num_lanes=2).load_state_dict(state)


def test_lanes_of_the_state_win_over_the_default(corpus):
    """Also if the default number could not be fed, and over a world size that divides them."""
    small = write_shards(Path(corpus).parent / "small", [[numbered([9] * 5)], [["val"]]])
    want, _ = run(small, steps=9, num_lanes=3)
    _, state = run(small, steps=4, num_lanes=3)
    loader = make(small, num_lanes=None)
    loader.load_state_dict(state)
    assert loader.num_lanes == 3 and rows_of(next(loader)) == want[8:10]
    other = make(small, num_lanes=None, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"3 lanes .* 2 ranks"):
        other.load_state_dict(state)
    assert other.num_lanes == 8


def test_states_of_ranks_are_merged_or_refused(corpus):
    """One rank's state lacks lanes; states of different steps are no state."""
    loaders = [make(corpus, rank=rank, world_size=2, num_lanes=4) for rank in range(2)]
    one, two = (loader.state_dict() for loader in loaders)
    with pytest.raises(ValueError, match=r"only 2 lanes.*gather_states"):
        make(corpus, num_lanes=4).load_state_dict(one)
    with pytest.raises(ValueError, match="has only"):
        merge_states([one, one])
    loaders[0].load_state_dict(one)    # its own lanes are enough
    next(loaders[1])
    with pytest.raises(ValueError, match="do not belong together"):
        merge_states([one, loaders[1].state_dict()])
    both = merge_states([two, one])
    assert both == merge_states([one, two]) == make(corpus, num_lanes=4).state_dict()
    assert list(both["lanes"]) == ["0", "1", "2", "3"]
    assert gather_states(loader := make(corpus, num_lanes=4)) == loader.state_dict()


@pytest.mark.parametrize("bad, words", [
    ({"split": "x"}, "split='x'; choose one of train, val"), ({"packing": "bfd"}, "flat, bestfit, exactfit"),
    ({"uneven": "error"}, "pad, stop"), ({"B": 0}, "B=0.*1 or more"), ({"T": 1.5}, r"T=1\.5"),
    ({"T": np.int64(16)}, "T=.*int"), ({"B": True}, "B=True"), ({"prefetch": -1}, "prefetch=-1.*0 or more"),
    ({"buffer_size": 0}, "buffer_size=0"), ({"num_lanes": 0}, "num_lanes=0"), ({"threads": 0}, "threads=0"),
    ({"shuffle_seed": -1}, "shuffle_seed=-1"), ({"shuffle_seed": "a"}, "shuffle_seed='a'"),
    ({"world_size": 0, "rank": 0}, "world_size=0"), ({"rank": 2, "world_size": 2}, "rank=2"),
    ({"rank": 0}, "world_size"), ({"world_size": 2}, "rank"),
    ({"num_lanes": 3, "rank": 0, "world_size": 2}, "3 lanes .* 2 ranks")])
def test_bad_arguments_say_what_to_choose(corpus, bad, words):
    with pytest.raises(ValueError, match=words):
        make(corpus, **bad)


# ---------------------------------------------------------------------------------------------------------
# Promise 3: no rank waits for another, and the ranks of a finite run end together

class GroupOfThreads:
    """torch.distributed for ranks that are threads of this process."""

    def __init__(self, world, monkeypatch):
        self.barrier, self.flags, self.calls = threading.Barrier(world, timeout=60), [], 0
        functions = {"is_initialized": lambda: True, "get_rank": lambda: 0, "get_world_size": lambda: world,
                     "new_group": lambda backend: self, "all_reduce": self.all_reduce,
                     "destroy_process_group": lambda group: None}
        for name, function in functions.items():
            monkeypatch.setattr(torch.distributed, name, function)

    def all_reduce(self, tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX and group is self
        self.calls += 1
        self.flags.append(tensor.clone())
        self.barrier.wait()
        result = torch.stack(self.flags).amax(0)
        if self.barrier.wait() == 0:
            self.flags.clear()
        self.barrier.wait()
        tensor.copy_(result)


@pytest.mark.parametrize("uneven", ["pad", "stop"])
@pytest.mark.parametrize("world, B, options", [(2, 2, {}), (3, 1, {"packing": "flat"}), (6, 1, {"T": 40})])
def test_ranks_of_a_finite_run_end_at_the_same_batch(corpus, monkeypatch, uneven, world, B, options):
    """pad delivers all rows of one rank, masked ones where a lane has ended; stop only its full batches."""
    same = {"num_lanes": 6, "epochs": 1, "uneven": uneven, **options}
    batches = [rows_of(batch) for batch in make(corpus, B=B * world, **same)]
    full = [batch for batch in batches if all(len(row) > 1 and row[1] != -100 for row in batch)]
    assert (batches == full) == (uneven == "stop") and len(full) > 2
    GroupOfThreads(world, monkeypatch)
    with ThreadPoolExecutor(world) as pool:
        loaders = [make(corpus, B=B, rank=rank, world_size=world, **same) for rank in range(world)]
        ranks = list(pool.map(lambda loader: [rows_of(batch) for batch in loader], loaders))
        assert [[row for rows in zip(*step, strict=True) for row in rows]
                for step in zip(*ranks, strict=True)] == batches
        again = list(pool.map(lambda loader: [rows_of(batch) for batch in loader], loaders))
    assert again == ranks


def test_error_in_a_finite_run_of_ranks_is_an_error_again_and_then_it_resumes(corpus, monkeypatch):
    GroupOfThreads(1, monkeypatch)
    tokenizer, want = Poisoned(), [rows_of(batch) for batch in make(corpus, epochs=1, world_size=2, rank=0)]
    loader = make(corpus, rank=0, world_size=2, epochs=1, tokenizer=tokenizer)
    tokenizer.poison = "40.40.40"
    rows = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom"):
            rows.extend(rows_of(batch) for batch in loader)
    tokenizer.poison = "no more"
    assert rows + [rows_of(batch) for batch in loader] == want


def test_no_rank_of_an_endless_run_waits_for_another(corpus, monkeypatch):
    """Nor does a finite run of one rank among several, as for an eval on rank 0."""
    other = write_shards(Path(corpus).parent / "other", [[numbered([9] * 40)], [["val"]]])
    group = GroupOfThreads(2, monkeypatch)
    endless = make(corpus, rank=1, world_size=4)
    assert len([rows_of(next(endless)) for _ in range(100)]) == 100
    mixed = make({corpus: 1, other: 1}, rank=1, world_size=4, epochs={corpus: 1})
    assert [len(next(mixed)) for _ in range(100)] == [2] * 100
    assert list(make(corpus, rank=0, world_size=1, epochs=1)) and not group.calls


RANK_PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from dataloader import PackedLoader, gather_states
from test_dataloader import ByteTokenizer, rows_of
data, out, before = sys.argv[2], sys.argv[3], {}
for name in ("RANK", "WORLD_SIZE"):
    before[name] = os.environ.pop(name)
options = {"data_dir": data, "num_lanes": 4, "buffer_size": 6}
early = PackedLoader(ByteTokenizer(), 2, 16, "train", **options)
os.environ.update(before)
dist.init_process_group("gloo")
seen = {}
try:
    next(early)
except RuntimeError as error:
    seen["early"] = str(error)
for uneven in ("pad", "stop"):
    loader = PackedLoader(ByteTokenizer(), 2, 16, "train", epochs=1, uneven=uneven, **options)
    seen[uneven] = []
    for batch in loader:
        seen[uneven].append(rows_of(batch))
        if len(seen[uneven]) == 3:
            seen["state"] = gather_states(loader)
    loader.close()
loader = PackedLoader(ByteTokenizer(), 2, 16, "train", epochs=1, **options)
next(loader)
if dist.get_rank() == 1:
    loader.close()    # too soon
else:
    try:
        seen["lost"] = sum(1 for _ in loader)
    except (RuntimeError, ValueError) as error:
        seen["lost"] = str(error)
with open(out + before["RANK"], "w") as file:
    json.dump(seen, file)
"""


def test_two_ranks_under_torchrun(corpus, tmp_path):
    """They end together, gather a state on rank 0, and do not hang where one stops too soon."""
    program = tmp_path / "program.py"
    program.write_text(RANK_PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, program, HERE, corpus, tmp_path / "rank"], capture_output=True,
                          text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{i}").read_text()) for i in range(2)]
    for uneven in ("pad", "stop"):
        want = [rows_of(batch) for batch in make(corpus, B=4, num_lanes=4, epochs=1, uneven=uneven)]
        got = [[tuple(row) for pair in zip(*step, strict=True) for row in pair]
               for step in zip(ranks[0][uneven], ranks[1][uneven], strict=True)]
        assert got == want and len(want) > 5
    want = run(corpus, steps=3, world=2, num_lanes=4, epochs=1)[1]
    assert ranks[0]["state"] == want and ranks[1]["state"] is None
    assert all("rank 0 of 1" in rank["early"] for rank in ranks)
    assert isinstance(ranks[0]["lost"], str)


@pytest.mark.parametrize("env, words", [
    ({"RANK": "1"}, "RANK=1"), ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM"), ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI"),
    ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a'"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"), ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE")])
def test_ranks_come_from_the_launcher_or_an_error_names_the_variable(corpus, monkeypatch, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        make(corpus, threads=None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert make(corpus, rank=1, world_size=4).rank == 1
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = make(corpus, num_lanes=4)
    assert (loader.rank, loader.world_size) == (2, 4)


def test_process_group_that_is_younger_than_the_loader_is_an_error(corpus, monkeypatch):
    loader, explicit = make(corpus, num_lanes=2), make(corpus, rank=0, world_size=1)
    monkeypatch.setattr(dataloader, "ranks_of_this_process", lambda: (1, 2))
    with pytest.raises(RuntimeError, match=r"rank 0 of 1.* 1 of 2"):
        next(loader)
    assert next(explicit)


# ---------------------------------------------------------------------------------------------------------
# Promise 2: a yielded batch is never written again. Iterators, threads, Ctrl-C, ends

def test_yielded_batch_is_never_written_again(corpus):
    loader = make(corpus, prefetch=3)
    kept = [next(loader) for _ in range(20)]
    copies = [(inputs.clone(), targets.clone()) for inputs, targets in kept]
    for _ in range(20):
        next(loader)
    for batch, copied in zip(kept, copies, strict=True):
        assert torch.equal(batch[0], copied[0]) and torch.equal(batch[1], copied[1])
    assert len({part.data_ptr() for batch in kept for part in batch}) == 2 * len(kept)


def test_batches_for_a_gpu_are_pinned_and_copied_without_waiting(corpus, monkeypatch):
    """The calls, without a GPU; the packing thread uses the rank's device, not GPU 0."""
    calls, devices = [], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda i: devices.append((threading.current_thread().name[:4], i)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part: calls.append(part.data_ptr()) or part)
    monkeypatch.setattr(torch.Tensor, "to", lambda part, device, non_blocking: (
        calls.remove(part.data_ptr()), device.type == "cuda" and non_blocking and part)[1])
    loader = make(corpus, device="cuda", prefetch=0)
    rows = [row for _ in range(9) for row in rows_of(next(loader))]
    assert not calls and len(rows) == 18
    monkeypatch.undo()
    assert rows == run(corpus, steps=9)[0]
    assert devices == [("pack", 3)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_batches_are_those_of_the_cpu_and_never_written_again(corpus):
    want, loader = make(corpus, B=64, T=256), make(corpus, B=64, T=256, device="cuda")
    torch.cuda._sleep(10**9)    # the copies wait on the GPU while the loader packs the next batches
    batches = [next(loader) for _ in range(100)]
    assert all(part.device.type == "cuda" for batch in batches for part in batch)
    for batch in batches:
        assert rows_of([part.cpu() for part in batch]) == rows_of(next(want))


def test_finite_loader_begins_again_only_after_its_end(corpus):
    """A loop that breaks, or islice, continues; so does torch's DataLoader in this process."""
    want = [rows_of(batch) for batch in make(corpus, epochs=1)]
    loader, got = make(corpus, epochs=1), []
    for batch in loader:
        got.append(rows_of(batch))
        if len(got) == 4:
            break
    got += map(rows_of, itertools.islice(loader, 2))
    got += map(rows_of, torch.utils.data.DataLoader(loader, batch_size=None))
    assert got == want and len(want) > 10
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert [rows_of(batch) for batch in loader] == want
    assert isinstance(loader, torch.utils.data.IterableDataset)


def test_worker_processes_and_forks_are_refused(corpus, monkeypatch):
    loader = make(corpus)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="num_workers=0"):
        patch.setattr(dataloader, "get_worker_info", lambda: "of a worker")
        next(loader)
    next(loader)
    if not (pid := os.fork()):
        try:
            next(loader)
        except RuntimeError as error:
            loader.close()
            os._exit(7 if "num_workers=0" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] >> 8 == 7
    assert next(loader)


def test_threads_that_share_a_loader_get_each_batch_once(corpus):
    loader, want = make(corpus, num_lanes=3), make(corpus, num_lanes=3)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: rows_of(next(loader)), range(80)))
    assert sorted(got) == sorted(rows_of(next(want)) for _ in range(80))


class Stuck(ByteTokenizer):
    """Encodes nothing of the corpus until `resume` is set; `began` says that it was asked to."""

    def __init__(self):
        super().__init__()
        self.began, self.resume = threading.Event(), threading.Event()

    def encode_documents(self, texts):
        if any(text.startswith("1.1.") for text in texts if text is not None):
            self.began.set()
            assert self.resume.wait(60)
        return super().encode_documents(texts)


def test_close_ends_a_next_that_waits_or_starts(corpus, monkeypatch):
    loader = make(corpus, tokenizer=(tokenizer := Stuck()))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, loader)
        assert tokenizer.began.wait(60)
        loader.close()
        tokenizer.resume.set()
        assert isinstance(waiting.exception(60), RuntimeError | CancelledError)
    starting, starts = make(corpus), iter([dataloader.Pipeline])    # one start: of `starting`
    monkeypatch.setattr(dataloader, "Pipeline", lambda loader: (next(starts)(loader), loader.close())[0])
    for closed in (loader, starting):
        with pytest.raises(RuntimeError, match="closed"):
            next(closed)    # and the fixture closes both again


def test_load_waits_for_the_next_of_another_thread(corpus):
    tokenizer, want = Stuck(), [rows_of(batch) for batch in itertools.islice(make(corpus), 3)]
    state, loader = run(corpus, steps=2)[1], make(corpus, tokenizer=tokenizer)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(next, loader)
        assert tokenizer.began.wait(60)
        loaded = pool.submit(loader.load_state_dict, state)
        tokenizer.resume.set()
        assert rows_of(first.result(60)) == want[0] and loaded.result(60) is None
    assert rows_of(next(loader)) == want[2]


def interrupt_at(opcode, loader, call, functions=None):
    """
    Runs call() with a KeyboardInterrupt, as of Ctrl-C, at the n-th opcode of dataloader.py (or of these
    functions), unless the loader's position moved before. Returns call's result, or None if interrupted.
    """
    left, position = opcode, loader.position

    def tracer(frame, event, arg):
        nonlocal left
        name = frame.f_code.co_name
        if frame.f_code.co_filename != dataloader.__file__ or (not functions and name in ("close", "_go_to")):
            return None    # there, it would be a second Ctrl-C
        frame.f_trace_opcodes = True
        if event == "opcode" and (not functions or name in functions):
            left -= 1
            if left == -1 and loader.position is position:
                raise KeyboardInterrupt
        return tracer

    sys._getframe().f_trace_opcodes = True    # Python 3.12 wants it in the frame where tracing begins
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return call()
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("n_before, step", [(0, 60), (1, 3)])
def test_ctrl_c_anywhere_in_next_loses_no_batch(corpus, n_before, step):
    """In the first call, which runs thousands of opcodes, and in a later one."""
    want = [rows_of(batch) for batch in itertools.islice(make(corpus), 4)]
    opcode, interrupted, draw = 0, 0, random.Random(0)
    while True:
        loader = make(corpus, threads=1)
        rows = [rows_of(next(loader)) for _ in range(n_before)]
        if batch := interrupt_at(opcode, loader, loader.__next__):
            break
        rows += [rows_of(next(loader)) for _ in range(3 - n_before)]
        assert rows == want[:3], opcode
        loader.close()
        opcode, interrupted = opcode + draw.randint(1, step), interrupted + 1
    assert rows_of(batch) == want[n_before] and interrupted > 30


def test_ctrl_c_anywhere_in_loading_leaves_the_old_run_or_the_new_one(corpus):
    state = make(corpus, num_lanes=4).state_dict()
    for opcode in itertools.count():
        loader = make(corpus, num_lanes=None)
        next(loader)
        load = functools.partial(loader.load_state_dict, state)
        interrupt_at(opcode, loader, load, ("load_state_dict", "_go_to"))
        now = loader.state_dict()
        assert len(now["lanes"]) == now["config"]["num_lanes"] == loader.num_lanes and next(loader)
        loader.close()
        if loader.num_lanes == 4:
            break
        assert now["rows"] == 2
    assert now["rows"] == 0 and opcode > 10


def threads_of_loaders():
    return {thread for thread in threading.enumerate() if thread.name.startswith(("encode", "read", "pack"))}


@pytest.mark.parametrize("how", ["close", "with", "load", "del", "cycle", "error"])
def test_threads_end_with_the_loader(corpus, how):
    before, loader = threads_of_loaders(), make(corpus, num_lanes=2)
    next(loader)
    threads = threads_of_loaders() - before
    assert len(threads) > 2
    if how == "with":
        with loader:
            pass
    elif how == "load":
        loader.load_state_dict(loader.state_dict())
    elif how == "error":
        loader._pipeline.next_batch = None
        with pytest.raises(TypeError):
            next(loader)
    elif how == "close":
        loader.close()
    else:
        if how == "cycle":
            loader.itself = loader
        loaders_to_close.clear()
        del loader
        gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


EXITS = """
import gc, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from test_dataloader import ByteTokenizer, PackedLoader
class Slow(ByteTokenizer):
    def encode_documents(self, texts):
        time.sleep(0.05)
        return super().encode_documents(texts)
def make(num_lanes):
    return PackedLoader(Slow(), 8, 64, "train", data_dir=sys.argv[2], num_lanes=num_lanes, prefetch=4)
loaders = [make(n) for n in (1, 4, 8)]
for loader in loaders:
    next(loader)
loaders[1].itself = loaders[1]
def other():
    try:
        for _ in loaders[2]:
            began.set()
    except RuntimeError:
        pass
began = threading.Event()
thread = threading.Thread(target=other)
print("started", flush=True)
"""


@pytest.mark.parametrize("end, status", [
    ("thread.start(); began.wait()", 0), ("raise SystemExit(3)", 3), ("del loaders[1]; 1 / 0", 1)])
def test_exit_with_loaders_at_work_is_clean(corpus, end, status):
    done = subprocess.run([sys.executable, "-c", EXITS + end, HERE, corpus], capture_output=True, text=True,
                          timeout=120)
    assert done.stdout == "started\n" and done.returncode == status, done.stderr
    assert done.stderr.count("Traceback") == (status == 1)


@pytest.mark.parametrize("packing", ["flat", "exactfit"])
def test_memory_does_not_grow_over_20_epochs(corpus, packing):
    loader, sizes = make(corpus, packing=packing, prefetch=0, shuffle_seed=1), []
    tracemalloc.start()
    while (epoch := loader.position.lanes[0][corpus].next.epoch) <= 21:
        next(loader)
        if epoch in (6, 21) and len(sizes) < epoch // 6:
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] < sizes[0] + 60_000, sizes


def test_stats_count_what_was_packed(corpus):
    loader = make(corpus, prefetch=0, packing="bestfit", T=20)
    assert loader.stats() == {}
    rows = [row for _ in range(50) for row in rows_of(next(loader))]
    stats = loader.stats()
    assert stats["rows"] in (100, 102) and stats["waited_s"] >= 0
    assert stats["documents"] >= sum(row.count(BOS) for row in rows) and stats["dropped"] > 0
    loader.load_state_dict(loader.state_dict())
    next(loader)
    assert loader.stats()["rows"] in (2, 4)


# ---------------------------------------------------------------------------------------------------------
# Promise 8: every token can be traced

def ids_of_piece(piece, texts, transform):
    ids = np.array(ids_of(texts[tuple(piece.location)]))
    return (transform(ids, piece.ref, piece.location) if transform else ids)[piece.start:piece.stop].tolist()


@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit"])
@pytest.mark.parametrize("transform, epochs", [(fill_in_the_middle, None), (None, 3)])
def test_trace_names_the_document_of_every_token(letters, corpus, packing, transform, epochs):
    """In a shuffled mixture, after resumes on 4 and 2 ranks, past epochs. Padding is no piece."""
    data = {letters[0]: 1, corpus: 0.5}
    texts = {**documents_in(letters[0]), **documents_in(corpus)}
    same = {"packing": packing, "num_lanes": 4, "shuffle_seed": 2, "T": 30, "transform": transform,
            "epochs": epochs}
    _, state = run(data, steps=30, world=4, B=1, **same)
    _, state = run(data, steps=10, world=2, B=2, state=state, **same)
    for rank in range(2):
        loader = make(data, rank=rank, world_size=2, B=3, **same)
        loader.load_state_dict(state)
        n = 0
        for pieces_of_rows, batch in itertools.islice(zip(trace(loader, state), loader, strict=True), 60):
            for pieces, row in zip(pieces_of_rows, rows_of(batch), strict=True):
                tokens = [token for piece in pieces for token in ids_of_piece(piece, texts, transform)]
                n += len(tokens)
                padding = 31 - len(tokens)
                assert row == (*tokens, *[-100] * padding) or (not tokens and row == (BOS, *[-100] * 30))
        assert n > 2000


@pytest.mark.parametrize("packing, T", [("flat", 7), ("flat", 64), ("exactfit", 7), ("exactfit", 64)])
def test_trace_of_an_epoch_has_every_token_once(letters, packing, T):
    """flat repeats the last token of a row at the start of the next, exactfit the BOS of a later piece."""
    loader, seen = make(dict.fromkeys(letters, 1), packing=packing, T=T, num_lanes=4, epochs=1), {}
    for row in itertools.chain.from_iterable(trace(loader)):
        cells = [(piece.location, k) for piece in row for k in range(piece.start, piece.stop)]
        for i, cell in enumerate(cells):
            seen.setdefault(cell, []).append(i)
    for (_, k), places in seen.items():
        assert len(places) == 1 or (k == 0 if packing == "exactfit" else sorted(places) == [0, T])
    want = {at: len(ids_of(text)) for folder in letters for at, text in documents_in(folder).items()}
    assert {(tuple(at), k) for at, k in seen} == {(at, k) for at, n in want.items() for k in range(n)}


def test_trace_of_a_long_run_forgets_documents_and_stays_right(corpus):
    loader, texts, known = make(corpus, B=1, T=3, threads=1), documents_in(corpus), []
    tracing = trace(loader)
    for pieces, batch in itertools.islice(zip(tracing, loader, strict=True), 2100):
        tokens = [token for piece in pieces[0] for token in ids_of_piece(piece, texts, None)]
        assert tokens == [*rows_of(batch)[0]]
        known.append(len(tracing.gi_frame.f_locals["found"]))
    assert known[2090] < known[1090] + 60 and known[1090] < known[990]


# ---------------------------------------------------------------------------------------------------------
# Promise 7, and a training: nothing is unpickled, and a run that is stopped and resumed is the same run

def log_of(out):
    """{(step, is it an eval): what must not depend on where the run was stopped}"""
    with open(f"{out}/log.jsonl") as file:
        records = [json.loads(line) for line in file]
    names = ("loss", "norm", "lr", "rows_hash", "val_bpb")
    return {(record["step"], "val_bpb" in record): [record.get(name) for name in names]
            for record in records if "step" in record}


def test_training_that_is_stopped_and_resumed_is_the_uninterrupted_one(tmp_path, monkeypatch):
    """20 steps, SIGTERM in the 12th. All losses, norms and evals are equal bit for bit."""
    import train

    texts = ["".join(f"def f(x): return x + {i * j}\n" for j in range(1 + i % 7)) for i in range(200)]
    data = write_shards(tmp_path / "data", [grouped(texts[i::4], [6] * 8) for i in range(4)])
    flags = ["--data", data, "--device", "cpu", "--depth", "1", "--seq_len", "32", "--batch_size", "4",
             "--vocab_size", "300", "--eval_rows", "12", "--eval_every", "10", "--save_every", "5",
             "--log_every", "1", "--steps", "20"]
    load, get, n_batches = torch.load, PackedLoader.__next__, itertools.count(1)

    def load_without_pickle(*args, weights_only, **options):
        assert weights_only
        return load(*args, weights_only=True, **options)

    def get_and_stop(loader):
        if loader.split == "train" and next(n_batches) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return get(loader)

    monkeypatch.setattr(torch, "load", load_without_pickle)
    monkeypatch.setattr(dataloader, "cores", lambda: 1)
    monkeypatch.chdir(tmp_path)
    assert not train.main([*flags, "--out", "whole"])
    with monkeypatch.context() as patch:
        patch.setattr(PackedLoader, "__next__", get_and_stop)
        train.main([*flags, "--out", "stopped"])
    stopped = log_of("stopped")
    assert not train.main(["--resume", "auto", "--out", "stopped"])
    assert 10 < len(stopped) < 15 and len(log_of("whole")) == 22
    assert log_of("stopped") == log_of("whole")


def test_nothing_imports_pickle():
    for path in HERE.glob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) +(\w+)", path.read_text(), re.M)
        assert not {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"} & {*imported}, path


# ---------------------------------------------------------------------------------------------------------
# python test_dataloader.py

def main(words):
    arguments = [str(HERE / "test_dataloader.py"), "-q", "-rs", "--durations=10",    # -rs: reasons of skips
                 "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]    # hypothesis
    if "--all" in words and (HERE / "dev" / "tests").exists():
        arguments += [str(HERE / "dev" / "tests")]
    elif "--all" in words:
        print("dev/tests is not here: only the loader's promises are tested")
    if importlib.util.find_spec("xdist"):
        arguments += ["-n", str(min(8, dataset.cores())), "--dist", "worksteal"]
    return pytest.main(arguments + [word for word in words if word != "--all"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
