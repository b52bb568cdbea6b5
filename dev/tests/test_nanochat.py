"""dev/nanochat.py beside nanochat's own order, refill rule and scan, written again with lists."""

import functools
import gc
import itertools
import json
import random
import threading

import pyarrow as pa
import pytest
import torch

import dataset
from dev import nanochat
from test_dataloader import BOS, ByteTokenizer

with_state = nanochat.tokenizing_distributed_data_loader_with_state_bos_bestfit
without_state = nanochat.tokenizing_distributed_data_loader_bos_bestfit

class NanochatTokenizer:
    """Has nanochat's methods, and no others."""
    def __init__(self):
        self.calls = set()

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=8):
        self.calls.add((threading.current_thread(), num_threads))
        return [[prepend, *text.encode()] for text in texts]

@pytest.fixture
def as_rank(tmp_path, monkeypatch):
    """as_rank(shards, rank, world_size): writes the shards once, and sets what is read."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))

    def prepare(shards, rank=0, world_size=1):
        for i, groups in enumerate([*shards, [["val"]] * 4]):
            path = tmp_path / f"base_data/shard_{i:05d}.parquet"
            if not path.exists():
                arrays = [pa.array(group, pa.string()) for group in groups]
                dataset.write_shard(str(path), arrays)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return prepare

FEW = [[["one", "two"], ["three"]], [["four", "five"], ["six"]]]

def take(n, iterator):
    return [*itertools.islice(iterator, n)]

def seen(batch):
    """(rows of T + 1 tokens, (epoch, pq_idx, rg_idx)) of a batch, as the reference yields them."""
    inputs, targets, state = batch
    rows = torch.cat([inputs[:, :1], targets], dim=1)
    return rows.tolist(), (state["epoch"], state["pq_idx"], state["rg_idx"])

# --------------------------------------------------------------------------------------------------
# The reference

def batches_of_documents(shards, rank, world_size, batch_size):
    """What a rank tokenizes at once, with the numbers that nanochat prints; endless."""
    for epoch in itertools.count(1):
        for pq_idx, shard in enumerate(shards):
            for rg_idx in range(rank, len(shard), world_size):
                for i in range(0, len(shard[rg_idx]), batch_size):
                    texts = [text for text in shard[rg_idx][i:i + batch_size] if text is not None]
                    yield [[BOS, *text.encode()] for text in texts], (epoch, pq_idx, rg_idx)

def reference(
        shards, B, T, rank, world_size, tokenizer_batch_size=128, buffer_size=1000):
    """Yields (rows, (epoch, pq_idx, rg_idx)): nanochat's scan of its buffer."""
    batches = batches_of_documents(shards, rank, world_size, tokenizer_batch_size)
    buffer, rows, row = [], [], []
    while True:
        while len(buffer) < buffer_size:
            documents, printed = next(batches)
            buffer += documents
        free = T + 1 - len(row)
        fitting = [document for document in buffer if len(document) <= free]
        document = max(fitting, key=len) if fitting else min(buffer, key=len)
        buffer.remove(document)
        row += document[:free]
        if len(row) == T + 1:
            rows.append(row)
            row = []
        if len(rows) == B:
            yield rows, printed
            rows = []

def draw_shards(draw):
    """Three shards of 4 to 9 row groups of 1 to 30 documents, most of them short, no two alike."""
    def document(*numbers):
        if draw.random() < 0.2:
            return None
        n_x = int(draw.paretovariate(0.9) * 5) % 120
        return ".".join(map(str, numbers)) + n_x * "x"

    def group(i, j):
        return [document(i, j, k) for k in range(draw.randint(1, 30))]

    return [[group(i, j) for j in range(draw.randint(4, 9))] for i in range(3)]

@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drawn_batches_are_nanochats_and_resume_is_exact(world_size, as_rank):
    """
    Several epochs, with nulls; stopped twice. A state may be in the list of all ranks', or in lists
    of it, which a run saves that was just resumed. One rank: with nanochat's default sizes.
    """
    draw = random.Random(world_size)
    shards = draw_shards(draw)
    shards[0][1] = []
    shards[1][2] = [None] * 9
    shards[2][3] = [""] * 9
    T, sizes = draw.choice([16, 40]), {}
    if world_size > 1:
        sizes["tokenizer_batch_size"] = draw.choice([5, 128])
        sizes["buffer_size"] = draw.choice([3, 20])
    for rank in range(world_size):
        as_rank(shards, rank, world_size)
        want = take(400, reference(shards, 4, T, rank, world_size, **sizes))
        found, saved = [], None
        stops = sorted(draw.sample(range(1, 400), 2))
        for start, stop in itertools.pairwise([0, *stops, 400]):
            batches = take(stop - start, with_state(
                NanochatTokenizer(), 4, T, "train", 2, device="cpu", resume_state_dict=saved,
                **sizes))
            found += map(seen, batches)
            state = batches[-1][2]
            of_all = [state if i == rank else {} for i in range(world_size)]
            saved = draw.choice([state, of_all, world_size * [of_all]])
            saved = json.loads(json.dumps(saved))
        assert found == want
        assert state["epoch"] > 2, "the test crossed no epoch"

def test_batches_for_a_gpu_are_new_pinned_tensors(as_rank, monkeypatch):
    as_rank(FEW)
    pinned, copied = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: pinned.append(rows) or rows)
    monkeypatch.setattr(torch.Tensor, "to", lambda rows, device, non_blocking: copied.append(
        (rows.data_ptr(), device.type, non_blocking)) or rows)
    batches = take(9, without_state(ByteTokenizer(), 2, 16, "train", device="cuda"))
    assert len({part.data_ptr() for batch in batches for part in batch}) == 18
    assert copied == [(rows.data_ptr(), "cuda", True) for rows in pinned]

# --------------------------------------------------------------------------------------------------
# Threads

def test_dropped_generators_leave_no_threads(as_rank):
    """nanochat makes a new one for each evaluation, and drops it. encode() starts its own."""
    as_rank(FEW)
    tokenizer, before = NanochatTokenizer(), {*threading.enumerate()}
    generator = without_state(tokenizer, 2, 16, "train", tokenizer_threads=3, device="cpu")
    take(50, generator)
    started = {*threading.enumerate()} - before
    assert len(started) == 1 and (*started, 3) in tokenizer.calls
    del generator
    gc.collect()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()

# --------------------------------------------------------------------------------------------------
# What is refused

def test_errors_in_threads_name_the_row_group(as_rank):
    good = ["good"] * 8
    as_rank([[good], [good, [*good[:6], "bad", "good"]]])
    tokenizer = ByteTokenizer()
    usual = tokenizer.encode_documents
    tokenizer.encode_documents = lambda texts: {}["bad"] if "bad" in texts else usual(texts)
    generator = without_state(tokenizer, 1, 14, "train", device="cpu", buffer_size=1)
    with pytest.raises(RuntimeError, match=r"shard_00001\.parquet, row group 1, row 6: KeyError"):
        take(9, generator)

@pytest.mark.parametrize("rank, world_size, name, split, words", [
    (0, 1, "bytes", "train", "world_size is 2 in it, but 1"),
    (1, 2, "bytes", "train", "rank is 0 in it, but 1"),
    (0, 2, "x", "train", "tokenizer is bytes in it, but x here"),
    (0, 2, "bytes", "val", r"shards is \w{12} in it, but \w{12} here")])
def test_states_of_other_runs_are_refused(as_rank, rank, world_size, name, split, words):
    as_rank(FEW, 0, 2)
    start = functools.partial(with_state, B=2, T=16, device="cpu")
    _, _, saved = next(start(ByteTokenizer(), split="train"))
    as_rank(FEW, rank, world_size)
    with pytest.raises(dataset.UserError, match=f"another run's: {words}"):
        next(start(ByteTokenizer(name), split=split, resume_state_dict=saved))

def test_a_rank_without_documents_is_refused(as_rank):
    """nanochat would search forever."""
    as_rank([[["a"], [], ["b"], []], [["c"]]], 0, 2)
    with pytest.raises(dataset.UserError, match="rank 1 of 2 would never get a document"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))
