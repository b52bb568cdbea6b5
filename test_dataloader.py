"""
The promises of nanoloader, each as a test, in the order of the data's flow.

    python test_dataloader.py            all of it, a few minutes on 2 cores
    python test_dataloader.py -k resume  what pytest makes of these words

Fast code is compared with a slow and obvious reference in this file. Most tests use a tokenizer whose tokens
are the bytes of the text, and shards of a few short documents, so that epochs end every few rows.
"""

import collections
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataloader
from dataloader import (
    BestFitPacker,
    Chunk,
    DocumentReader,
    ExactFitPacker,
    FlatPacker,
    PackedLoader,
    Slice,
    choose_best_fit,
    fill_gap,
    merge_states,
    whole_numbers,
    whose_turn,
)

BOS = 256
HERE = os.path.dirname(os.path.abspath(__file__))


# ---------------------------------------------------------------------------------------------------------
# A corpus that can be read at a glance

class ByteTokenizer:
    """Ids are bytes. `threads_seen`: who encoded."""
    dtype = np.dtype(np.uint16)

    def __init__(self, name="bytes"):
        self.name, self.encoded = name, []

    def get_bos_token_id(self):
        return BOS

    def fingerprint(self):
        return self.name

    def encode_documents(self, texts, limit=None):
        self.encoded.append(len(texts))
        arrays = [np.array([BOS, *bytes(t)][:limit] if t is not None else [], np.uint16) for t in texts]
        return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])


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
    options = {"threads": 2, "buffer_size": 6, **options}
    made.append(PackedLoader(tokenizer or ByteTokenizer(), B, T, split, data_dir=data, **options))
    return made[-1]


def rows_of(batch):
    """Rows as tuples of T + 1 tokens; -1 where a target is masked."""
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
# Packers against slow references

def chunk_of(lengths, first=0):
    """Documents of distinct tokens, so that rows tell where each token came from."""
    ids, bounds = [], [0]
    for i, n in enumerate(lengths):
        ids += [BOS, *(1000 * (first + i) + k for k in range(1, n))][:n]
        bounds.append(len(ids))
    rows = np.arange(first + len(lengths))
    return Chunk(np.array(ids, np.int64), bounds, Slice(1, 0, 0, rows, 0, 0), first)


def pack(packer, lengths, batch=None):
    """All rows of a finite run of a packer over documents of these lengths."""
    chunk, i, rows = chunk_of(lengths), 0, []
    while True:
        ended = i == len(lengths)
        row = packer.row(ended)
        if row is None:
            if batch:
                packer.take(chunk_of(lengths[i:i + batch], i), 0)
                i = min(len(lengths), i + batch)
            else:
                i = packer.take(chunk, i)
        elif row:
            rows.append(np.concatenate(row).tolist())
        else:
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
    assert pack(BestFitPacker(T, buffer_size), lengths, batch) == bestfit_reference(
        lengths, T, buffer_size, batch)


def test_bestfit_packer_is_nanochats_rule_over_10_000_rows():
    lengths = np.random.default_rng(0).lognormal(3.5, 1.1, 30_000).astype(int) + 1
    want = bestfit_reference(lengths.tolist(), 100, 50, 16)
    assert pack(BestFitPacker(100, 50), lengths.tolist(), 16) == want
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
    chosen = fill_gap(gap, sorted(copies), copies.__getitem__, sum(1 << n for n in copies))
    assert sum(chosen) == max(s for s in sums if s <= gap)
    assert not collections.Counter(chosen) - copies, "a document was used twice"


@settings(max_examples=150)
@given(sizes, st.integers(2, 24), st.integers(1, 10), st.booleans())
def test_exactfit_rows_hold_every_token_once_and_whole_documents(lengths, T, buffer_size, keep):
    """Every piece begins with BOS; without the BOS of the pieces, the rows are the documents."""
    rows = pack(ExactFitPacker(T, np.array([BOS]), buffer_size, "keep" if keep else "drop"), lengths)
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
    packer, cropped = ExactFitPacker(T, np.array([BOS]), buffer_size, "keep" if keep else "drop"), []
    crop = packer._crop
    packer._crop = lambda left: cropped.append(left) or crop(left)
    chunk, i = chunk_of(lengths), 0
    while True:
        before = [(len(document.ids), document.ref[4]) for document in packer.buffer.values()]
        row = packer.row(i == len(lengths))
        if row is None:
            i = packer.take(chunk, i)
        elif row:
            opener = min(before[0][0], T + 1)
            gap, reachable = T + 1 - opener, {0}
            for n, offset in before[1:]:
                reachable |= {s + n for s in reachable if offset == 0 and s + n <= gap}
            assert len(split_at_bos(np.concatenate(row).tolist())[0]) == opener
            assert gap - sum(cropped) == max(reachable)
            cropped.clear()
        else:
            break


@pytest.mark.parametrize("tails", ["keep", "drop"])
def test_exactfit_on_lognormal_lengths(tails):
    """Nothing lost but what lies beyond a row (drop), next to nothing cut, and the wait is bounded."""
    T = 2048
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(6.15, 1.13, 20_000)).astype(int).tolist()
    bounds = [0, *itertools.accumulate(lengths)]
    packer, i, rows = ExactFitPacker(T, np.array([BOS]), 256, tails), 0, 0
    queued, waits = {}, []
    source = Slice(1, 0, 0, range(len(lengths)), 0, 0)
    chunk = Chunk(np.broadcast_to(np.int64(0), bounds[-1]), bounds, source, 0)
    while i < len(lengths):
        i, before = packer.take(chunk, i), i
        queued.update({k: (rows, len(packer.buffer) - (i - k)) for k in range(before, i)})
        packer.row(False)
        rows += 1
        left = {document.ref[3] for document in packer.buffer.values() if document.ref[4] == 0}
        for k in queued.keys() - left:
            came, ahead = queued.pop(k)
            waits.append(rows - 1 - came - ahead)
    fitting = sum(n <= T + 1 for n in lengths)
    delivered = rows * (T + 1) + packer.tokens
    within = sum(n if tails == "keep" else min(n, T + 1) for n in lengths)
    assert max(waits) <= 0, "a document waited for more rows than there were documents before it"
    assert packer.cut <= 0.0015 * fitting
    assert within <= delivered <= 1.001 * within, "each piece of a cut document has a BOS of its own"


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


@settings(max_examples=int(os.environ.get("NANOLOADER_DRAWS", 60)), deadline=None, database=None,
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
    crossed["behind an epoch's end"] += any(part["cursor"][0] > 1 for part in parts)
    crossed["half a document held"] += any(ref[4] > 0 for part in parts for ref in part["buffer"])
    crossed["half a document of an epoch that ended"] += any(
        ref[4] > 0 and ref[0] < part["cursor"][0] for part in parts for ref in part["buffer"])
    crossed["several sources"] += any(len(lane) > 1 for lane in state["lanes"].values())


def test_the_draws_above_were_not_vacuous():
    assert not crossed or min(crossed.values()) >= 0.05 * crossed["resumed twice"], crossed
    assert not crossed or crossed["half a document of an epoch that ended"] > 10, crossed


def tokenized_copy(folder, out, tokenizer=None):
    """The token shards of text shards, as `dataset.py tokenize` writes them, but here in a few lines."""
    tokenizer = tokenizer or ByteTokenizer()
    out.mkdir(parents=True)
    sizes = {}
    for name in sorted(os.listdir(folder)):
        file = pq.ParquetFile(os.path.join(folder, name))
        sizes[name] = os.path.getsize(os.path.join(folder, name))
        schema = pa.schema([("tokens", pa.binary())], {
            "nanoloader.dtype": "uint16", "nanoloader.tokenizer": tokenizer.fingerprint()})
        with pq.ParquetWriter(out / name, schema) as writer:
            for g in range(file.num_row_groups):
                texts = file.read_row_group(g).column("text").to_pylist()
                tokens = [text if text is None else np.array([BOS, *text.encode()], np.uint16).tobytes()
                          for text in texts]
                writer.write_table(pa.table({"tokens": pa.array(tokens, pa.binary())}, schema))
    (out / "source.json").write_text(json.dumps(sizes))
    return str(out)


# ---------------------------------------------------------------------------------------------------------
# Promises 4 and 5: every document once per epoch, and no document silently skipped

def texts_of(rows):
    """The documents in rows of `flat` with one lane, or of whole documents."""
    return collections.Counter(bytes(piece[1:]) for row in rows for piece in split_at_bos(list(row)))


def real(row):
    """A row without its masked end."""
    row = list(row)
    while row and row[-1] == -1:
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
    with pytest.raises(ValueError, match="all null"):
        next(loaders[1])


@pytest.mark.parametrize("seed", [None, 5])
def test_shuffle_is_another_order_every_epoch_and_the_same_for_every_world_size(corpus, seed):
    documents = {}
    for world in (1, 4):
        rows, _ = run(corpus, steps=400 // world, world=world, B=1, T=4, packing="flat", num_lanes=4,
                      shuffle_seed=seed)
        documents[world] = rows
    assert documents[1] == documents[4]
    reader = make(corpus, shuffle_seed=seed).readers[corpus]
    epochs = [[s[:3] + tuple(s.rows) for s in itertools.islice(reader.slices(0, [e, -1, -1, 0, 0], e), 99)]
              for e in (1, 2)]
    order = [[s[1:] for s in epoch] for epoch in epochs]
    assert sorted(s[:2] for s in order[0]) == sorted(s[:2] for s in order[1])
    assert (order[0] == order[1]) == (seed is None)


# ---------------------------------------------------------------------------------------------------------
# States: what they hold, and what is refused

def test_state_is_small_json_of_references_and_cheap(tmp_path):
    documents = numbered([20 + i % 60 for i in range(3000)])
    data = write_shards(tmp_path, [grouped(documents, [500] * 5), [["val"]]])
    loader = make(data, T=256, B=8, buffer_size=1000, prefetch=0)
    for _ in range(60):
        next(loader)
    state = loader.state_dict()
    (part,) = state["lanes"]["0"].values()
    assert len(part["buffer"]) > 950 and part["cursor"][0] > 1
    assert state == json.loads(json.dumps(state)) and len(json.dumps(state)) < 64 * 1024
    began = time.perf_counter()
    for _ in range(20):
        loader._run.lanes[0].snapshot()
    assert (time.perf_counter() - began) / 20 < 0.005, "100 microseconds on a quiet machine"


def test_state_is_that_of_the_batch_delivered_not_of_those_prefetched(corpus):
    with_ahead, without = make(corpus, prefetch=4), make(corpus, prefetch=0)
    for _ in range(5):
        next(with_ahead), next(without)
        time.sleep(0.01)
        assert with_ahead.state_dict() == without.state_dict()


def test_loading_reads_only_the_row_groups_it_needs(tmp_path):
    data = write_shards(tmp_path, [grouped(numbered([9] * 2000), [100] * 19), [["val"]]])
    loader = make(data, packing="flat", T=8)
    for _ in range(30):
        next(loader)
    state = loader.state_dict()
    again = make(data, packing="flat", T=8, prefetch=0)
    reads, read = [], DocumentReader._read
    DocumentReader._read = lambda self, *where: reads.append(where) or read(self, *where)
    try:
        again.load_state_dict(state)
        assert rows_of(next(again)) == rows_of(next(loader))
    finally:
        DocumentReader._read = read
    assert 1 <= len(set(reads)) <= 3, "its row group and two ahead"


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
            ({"version": 99}, {}, "version"), ({}, {"T": 17}, "T of the state is 16"),
            ({}, {"packing": "flat"}, "packing"), ({}, {"tails": "drop"}, "tails"),
            ({}, {"buffer_size": 7}, "buffer_size"), ({}, {"shuffle_seed": 1}, "shuffle_seed"),
            ({}, {"tokenizer": ByteTokenizer("other")}, "tokenizer"), ({}, {"num_lanes": 8}, "num_lanes"),
            ({}, {"world_size": 3, "rank": 0}, r"world size in \[1, 2, 4\]"),
            ({}, {"split": "val"}, "split of the state")]:
        loader = make(corpus, **{"packing": "exactfit", **options})
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict({**state, **change})
        assert next(loader), "the loader is as it was"
    one_rank = make(corpus, num_lanes=4, rank=1, world_size=2)
    next(one_rank)
    with pytest.raises(ValueError, match=r"lacks lanes .* merge_states"):
        make(corpus, num_lanes=4).load_state_dict(one_rank.state_dict())
    with pytest.raises(ValueError, match="merge the states of all ranks"):
        merge_states([one_rank.state_dict()])


def test_changed_shards_are_refused_and_appended_ones_come_last(corpus):
    state = run(corpus, steps=3, packing="flat", shuffle_seed=1)[1]
    os.rename(f"{corpus}/shard_00001.parquet", f"{corpus}/shard_00001a.parquet")
    with pytest.raises(ValueError, match="put the same files back"):
        make(corpus, packing="flat", shuffle_seed=1).load_state_dict(state)
    os.rename(f"{corpus}/shard_00001a.parquet", f"{corpus}/shard_00001.parquet")
    os.rename(f"{corpus}/shard_00003.parquet", f"{corpus}/shard_00009.parquet")    # val stays last
    pq.write_table(pa.table({"text": ["appended"] * 5}), f"{corpus}/shard_00003.parquet")
    loader = make(corpus, packing="flat", shuffle_seed=1, epochs=1)
    loader.load_state_dict(state)
    rest = [token for batch in loader for row in rows_of(batch) for token in real(row)[1:]]    # rows overlap
    assert bytes(token for token in rest if token != BOS).endswith(b"appended" * 5)
    late = run(corpus, steps=200, packing="flat", shuffle_seed=1, state=loader.state_dict())[1]
    pq.write_table(pa.table({"text": ["too late"] * 5}), f"{corpus}/shard_00004.parquet")
    with pytest.raises(ValueError, match="first epoch only"):
        make(corpus, packing="flat", shuffle_seed=1).load_state_dict(late)


def test_nanochats_three_keys_resume_at_the_next_row_group_with_a_warning(corpus):
    loader = make(corpus, packing="flat", B=1)
    with pytest.warns(UserWarning, match="approximately"):
        loader.load_state_dict({"pq_idx": 1, "rg_idx": 2, "epoch": 1})
    next(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["pq_idx"], state["rg_idx"]) == (1, 1, 3)


@pytest.mark.parametrize("bad, words", [
    ({"split": "test"}, "choose one of train, val"), ({"packing": "bfd"}, "flat, bestfit, exactfit"),
    ({"B": 0}, "at least one row"), ({"rank": 2, "world_size": 2}, "rank=2"),
    ({"num_lanes": 3, "rank": 0, "world_size": 2}, "multiple of 2"), ({"epochs": {"x": 1}}, "epochs names")])
def test_bad_arguments_say_what_to_choose(corpus, bad, words):
    with pytest.raises(ValueError, match=words):
        make(corpus, **bad)


# ---------------------------------------------------------------------------------------------------------
# Promise 3: ranks in step at the end of a finite run, and nobody waits for ever

RANK_PROGRAM = """
import sys; sys.path.insert(0, {here!r})
import json, os, torch.distributed as dist
from test_dataloader import make, rows_of
dist.init_process_group("gloo")
rank = dist.get_rank()
loader = make({data!r}, num_lanes=4, epochs=1, **{options!r})
rows = []
try:
    for i, batch in enumerate(loader):
        rows.append(rows_of(batch))
        if rank == 1 and i == 1 and {leave!r}:
            if {leave!r} == "close":
                loader.close()
            elif {leave!r} == "exit":
                os._exit(3)
            break
    end = "ended"
except (RuntimeError, ValueError) as error:
    end = str(error)
print("RESULT", json.dumps([rank, end, rows]), flush=True)
os._exit(0)
"""


def on_two_ranks(data, leave=None, **options):
    """[(how it ended, rows per batch)] of two real processes over gloo; fails where one hangs."""
    program = RANK_PROGRAM.format(here=HERE, data=data, options=options, leave=leave)
    port = str(20_000 + os.getpid() % 20_000)
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={
        **os.environ, "RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        for r in range(2)]
    try:
        out = [rank.communicate(timeout=60)[0] for rank in ranks]
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


@pytest.mark.parametrize("leave", ["close", "break", "exit"])
def test_no_rank_hangs_where_another_stops_early(corpus, leave):
    (end, rows), _ = on_two_ranks(corpus, leave=leave)
    assert "lost a rank" in end and len(rows) >= 2


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
    def encode_documents(self, texts, limit=None):
        if any(text is not None and b"poison" in bytes(text) for text in texts):
            raise BaseException("boom")    # as tiktoken's panics: no Exception
        return super().encode_documents(texts, limit)


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


def test_ctrl_c_while_waiting_loses_no_batch(corpus, monkeypatch):
    loader, want = make(corpus), make(corpus)
    first = rows_of(next(loader))
    waiting = Future.result
    monkeypatch.setattr(Future, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    monkeypatch.setattr(Future, "result", waiting)
    rows = [first, rows_of(next(loader))]
    assert rows == [rows_of(next(want)) for _ in range(2)]


@pytest.mark.parametrize("how", ["loader.close()", "del loader", "pass", "raise SystemExit", "1 / 0"])
def test_close_del_and_exit_return_at_once(corpus, how):
    """A slow tokenizer's threads are at work and batches are ahead when it ends."""
    program = f"""
import sys, time; sys.path.insert(0, {HERE!r})
from test_dataloader import *
class Slow(ByteTokenizer):
    def encode_documents(self, texts, limit=None):
        time.sleep(0.05)
        return super().encode_documents(texts, limit)
loader = make({corpus!r}, tokenizer=Slow(), prefetch=4)
made.clear()
next(loader)
print("started", time.time(), flush=True)
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    ended = time.time()
    assert ended - float(done.stdout.split()[1]) < 8, done.stderr
    assert (done.returncode == 0) == (how != "1 / 0")


def test_threads_end_with_the_loader(corpus):
    before = threading.active_count()
    loader = make(corpus)
    next(loader)
    assert threading.active_count() > before
    made.clear()
    del loader
    for _ in range(100):
        gc.collect()
        if threading.active_count() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(threading.enumerate())


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
    assert loader.state_dict()["epoch"] > 20
    assert sizes[1] < sizes[0] + 100_000, sizes


# ---------------------------------------------------------------------------------------------------------
# The faces: torch's DataLoader, nanochat's generators, other tokenizers, tokens on disk

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
    loader._run.pid = -1    # as a child sees its parent's
    assert [rows_of(next(loader)) for _ in range(4)] == [rows_of(next(want)) for _ in range(4)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_nanochats_generators_give_nanochats_rows(tmp_path, lanes, monkeypatch):
    """Row groups are a multiple of the ranks: the order is nanochat's. Its rule, over its order, by scans."""
    lengths = [(7 * i * i + 3) % 90 for i in range(96)]
    groups = grouped(numbered(lengths), [12] * 7)
    data = write_shards(tmp_path, [groups[:4], groups[4:], [["val"]]])
    monkeypatch.setattr(dataloader, "find_data", lambda given: given or data)
    for rank in range(lanes):
        mine = [text for shard in (groups[:4], groups[4:]) for group in shard[rank::lanes]
                for batch in [group] for text in batch]
        batches = [group[i:i + 5] for _ in range(3) for shard in (groups[:4], groups[4:])
                   for group in shard[rank::lanes] for i in range(0, len(group), 5)]
        assert mine
        want = nanochat_rows(batches, T=40, buffer_size=20)
        monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", str(lanes))
        loader = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit(
            PlainTokenizer(), 2, 40, "train", 2, 5, "cpu", None, 20)
        got, state = [], None
        for inputs, targets, state in itertools.islice(loader, len(want) // 2 - 10):    # noqa: B007
            got += rows_of((inputs, targets))
        assert [list(row) for row in got] == want[:len(got)] and len(got) > 20
        assert {"pq_idx", "rg_idx", "epoch"} <= state.keys()
        again = dataloader.tokenizing_distributed_data_loader_bos_bestfit(
            PlainTokenizer(), 2, 40, "train", 2, 5, "cpu", buffer_size=20)
        assert rows_of(next(again)) == got[:2]


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
    monkeypatch.setattr(dataloader, "find_data", lambda given: given or corpus)
    want = [rows_of(batch) for batch in itertools.islice(make(corpus, packing="flat"), 6)]
    loader = dataloader.tokenizing_distributed_data_loader_with_state(
        ByteTokenizer(), 2, 16, "train", device="cpu")
    *_, (_, _, state) = itertools.islice(loader, 3)
    resumed = dataloader.tokenizing_distributed_data_loader(
        ByteTokenizer(), 2, 16, "train", device="cpu", resume_state_dict=state)
    assert [rows_of(batch) for batch in itertools.islice(resumed, 3)] == want[3:]


def test_a_tokenizer_with_nanochats_face_only_gives_the_same_rows(corpus):
    for packing, tails in PACKINGS:
        plain, own = (make(corpus, packing=packing, tails=tails, tokenizer=tokenizer)
                      for tokenizer in (PlainTokenizer(), ByteTokenizer()))
        assert [rows_of(next(plain)) for _ in range(9)] == [rows_of(next(own)) for _ in range(9)]


@pytest.mark.parametrize("packing, tails", PACKINGS)
def test_a_run_stops_on_text_and_resumes_on_tokens(corpus, tmp_path, packing, tails):
    tokens = tokenized_copy(corpus, tmp_path / "tokens")
    want, _ = run(corpus, steps=30, packing=packing, tails=tails)
    head, state = run(corpus, steps=11, packing=packing, tails=tails)
    tail, _ = run(tokens, steps=19, packing=packing, tails=tails, state=state)
    assert head + tail == want


def test_token_shards_of_another_tokenizer_are_refused(corpus, tmp_path):
    tokens = tokenized_copy(corpus, tmp_path / "tokens", ByteTokenizer("another"))
    with pytest.raises(RuntimeError, match="another"):
        next(make(tokens))


# ---------------------------------------------------------------------------------------------------------
# Mixtures

@pytest.mark.parametrize("weights", [[7, 2, 1], [1], [1, 1], [3, 1000], [5, 7, 11, 13, 17, 1], [1] * 9])
def test_shares_are_exact_to_within_one_row_at_every_prefix(weights):
    taken, total = [0] * len(weights), sum(weights)
    for k in range(1, 10_001):
        taken[whose_turn(taken, weights)] += 1
        assert all(abs(n * total - w * k) < total for n, w in zip(taken, weights, strict=True)), k


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_shares_are_exact_for_drawn_weights(weights):
    taken, total = [0] * len(weights), sum(weights)
    for k in range(1, 300):
        taken[whose_turn(taken, weights)] += 1
        assert all(abs(n * total - w * k) < total for n, w in zip(taken, weights, strict=True))


def test_weights_are_taken_as_they_are_written():
    assert whole_numbers([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_numbers([1, 0.37]) == [100, 37]


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
    rows, state = run(data, steps=800 // world, world=world, B=1, num_lanes=8)
    letters = letters_of(rows)
    for lane in range(8):
        mine = letters[lane::8]
        for k in range(1, len(mine) + 1):
            counts = collections.Counter(mine[:k])
            assert all(abs(counts[letter] - share * k) < 1 + 1e-9
                       for letter, share in zip("abc", [0.7, 0.2, 0.1], strict=True))
    assert rows == run(data, steps=800, B=1, num_lanes=8)[0]
    assert {part["rows"] for part in state["lanes"]["0"].values()} == {70, 20, 10}


def test_weights_changed_twice_lose_and_repeat_nothing(sources, capsys):
    """Annealing: each source's documents once per its epoch, whatever the weights did."""
    a, b, c = sources.values()
    rows, state = run({a: 1, b: 1}, steps=9, packing="flat", T=8)
    more, state = run({a: 1, b: 3, c: 1}, steps=9, packing="flat", T=8, state=state)
    rows += more
    assert "source" in capsys.readouterr().out
    rest, state = run({b: 0.5, c: 2}, steps=9, packing="flat", T=8, state=state)
    assert "removed" in capsys.readouterr().out
    rows += rest
    for letter, path in sources.items():
        alone = run(path, steps=40, packing="flat", T=8)[0]
        mine = [row for row, one in zip(rows, letters_of(rows), strict=True) if one == letter]
        assert mine == alone[:len(mine)] and mine


def test_a_finite_mixture_ends_when_every_source_has(sources):
    a, b, _ = sources.values()
    loader = make({a: 1, b: 9}, packing="exactfit", T=50, epochs={a: 1, b: 2})
    tokens = collections.Counter(itertools.chain(*(real(row) for batch in loader for row in rows_of(batch))))
    del tokens[BOS]
    assert tokens == {ord("a"): sum(range(2, 40)), ord("b"): 2 * sum(range(2, 40))}


@pytest.mark.parametrize("weight", [0, -1, None, float("nan")])
def test_a_bad_weight_is_an_error(sources, weight):
    with pytest.raises(ValueError, match="weight"):
        make({sources["a"]: weight})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", *sys.argv[1:]]))
