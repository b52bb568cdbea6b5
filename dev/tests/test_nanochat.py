"""
dev/nanochat.py beside nanochat's own order, refill rule and scan, written again with lists.

    python -m pytest dev/tests/test_nanochat.py
"""

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

def take(n, iterator):
    return [*itertools.islice(iterator, n)]

def seen(batch):
    """(rows of T + 1 tokens, (epoch, pq_idx, rg_idx)) of a batch, as the reference yields them."""
    inputs, targets, state = batch
    rows = torch.cat([inputs[:, :1], targets], dim=1)
    return rows.tolist(), (state["epoch"], state["pq_idx"], state["rg_idx"])

def test_rows_as_text(as_rank):
    """The longest document that fits; where none does, the shortest is cut: here c after f."""
    as_rank([[["aaaaaa", "bb", "c", "dddd"]], [["eeeeeee", "ffffffff"]]])
    batch = next(with_state(ByteTokenizer(), 2, 9, "train", device="cpu", buffer_size=4))
    rows, _ = seen(batch)
    assert [bytes(id % 256 or ord("|") for id in row) for row in rows] == [
        b"|aaaaaa|bb", b"|ffffffff|"]

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

def reference(shards, B, T, rank, world_size, batch_size=128, buffer_size=1000):
    """Yields (rows, (epoch, pq_idx, rg_idx)): nanochat's scan of its buffer."""
    batches = batches_of_documents(shards, rank, world_size, batch_size)
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

def draw_shards(seed, nulls=0.0):
    """Three shards of 4 to 9 row groups of 1 to 30 documents, most of them short, no two alike."""
    draw = random.Random(seed)

    def document(*numbers):
        if draw.random() < nulls:
            return None
        return ".".join(map(str, numbers)) + "x" * (int(draw.paretovariate(0.9) * 5) % 120)

    def shard(i):
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(4, 9))]
        return [[document(i, j, k) for k in range(size)] for j, size in enumerate(sizes)]

    return [shard(i) for i in range(3)]

@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drawn_batches_are_nanochats_and_resume_is_exact(world_size, as_rank):
    """Several epochs, with nulls; stopped twice, after batches that the seed draws."""
    draw = random.Random(world_size)
    shards = draw_shards(world_size, nulls=0.2)
    shards[0][1], shards[1][2], shards[2][3] = [], [None] * 9, [""] * 9
    T, batch_size, buffer_size = draw.choice([16, 40]), draw.choice([5, 128]), draw.choice([3, 20])
    for rank in range(world_size):
        as_rank(shards, rank, world_size)
        want = take(400, reference(shards, 4, T, rank, world_size, batch_size, buffer_size))
        found, state = [], None
        stops = [0, *sorted(draw.sample(range(1, 400), 2)), 400]
        for start, stop in itertools.pairwise(stops):
            batches = take(stop - start, with_state(
                NanochatTokenizer(), 4, T, "train", 2, batch_size, "cpu", state, buffer_size))
            found += map(seen, batches)
            state = json.loads(json.dumps(batches[-1][2]))
            assert state == batches[-1][2]
        assert found == want
        assert state["epoch"] > 2, "the test crossed no epoch"

def test_defaults_are_nanochats(as_rank):
    """128 documents at a time, 1,000 buffered."""
    shards = [[[f"{i}.{k}" + "y" * (k % 90) for k in range(300)] for i in range(4)]] * 2
    as_rank(shards)
    batches = take(25, with_state(ByteTokenizer(), 8, 64, "train", device="cpu"))
    assert [*map(seen, batches)] == take(25, reference(shards, 8, 64, 0, 1))

def test_states_of_all_ranks_resume_each_rank(as_rank):
    """In a list; and in lists of it, which a run saves that was just resumed."""
    shards, states, want = draw_shards(9), [], []
    for rank in range(3):
        as_rank(shards, rank, 3)
        batches = take(12, with_state(ByteTokenizer(), 2, 32, "train", device="cpu"))
        states.append(batches[7][2])
        want.append([*map(seen, batches[8:])])
    for saved in (states, [states, states, states]):
        for rank in range(3):
            as_rank(shards, rank, 3)
            resumed = with_state(
                ByteTokenizer(), 2, 32, "train", device="cpu", resume_state_dict=saved)
            assert [*map(seen, take(4, resumed))] == want[rank]

def test_batches_for_a_gpu_are_new_pinned_tensors(as_rank, monkeypatch):
    as_rank(draw_shards(1))
    pinned, copied = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: pinned.append(rows) or rows)
    monkeypatch.setattr(torch.Tensor, "to", lambda rows, device, non_blocking: copied.append(
        (rows, device, non_blocking)) or rows)
    batches = take(9, without_state(ByteTokenizer(), 2, 16, "train", device=torch.device("cuda")))
    assert len({part.data_ptr() for batch in batches for part in batch}) == 18
    for rows, (part, device, non_blocking) in zip(pinned, copied, strict=True):
        assert part is rows and device.type == "cuda" and non_blocking

# --------------------------------------------------------------------------------------------------
# Threads

def test_dropped_generators_leave_no_threads(as_rank):
    """nanochat makes a new one for each evaluation, and drops it."""
    as_rank(draw_shards(0))
    before = threading.enumerate()
    generator = without_state(ByteTokenizer(), 2, 16, "val", device="cpu")
    next(generator)
    started = set(threading.enumerate()) - set(before)
    assert started
    del generator
    gc.collect()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()

def test_a_tokenizer_with_its_own_threads_is_called_by_one(as_rank):
    as_rank(draw_shards(0))
    tokenizer = NanochatTokenizer()
    generator = without_state(tokenizer, 2, 16, "train", tokenizer_threads=3, device="cpu")
    tokenizer.calls.clear()
    take(50, generator)
    others = {thread for thread, _ in tokenizer.calls} - {threading.current_thread()}
    assert len(others) == 1 and (*others, 3) in tokenizer.calls

# --------------------------------------------------------------------------------------------------
# What is refused

class Failing(ByteTokenizer):
    def encode_documents(self, texts):
        if "bad" in texts:
            raise KeyError("a bad text")
        return super().encode_documents(texts)

def test_errors_in_threads_name_the_row_group(as_rank):
    as_rank([[["good"] * 8], [["good"] * 8, ["good"] * 6 + ["bad", "good"]]])
    generator = without_state(Failing(), 1, 14, "train", device="cpu", buffer_size=1)
    with pytest.raises(RuntimeError, match=r"shard_00001\.parquet, row group 1: KeyError"):
        take(9, generator)

@pytest.mark.parametrize("words, options", [
    ("world_size is None in it, but 2", {"state": {"pq_idx": 0, "rg_idx": 3, "epoch": 1}}),
    ("world_size is 2 in it, but 1", {"world_size": 1}), ("rank is 0 in it, but 1", {"rank": 1}),
    ("tokenizer is 'bytes' in it, but 'x'", {"tokenizer": ByteTokenizer("x")}),
    ("shards is", {"split": "val"})])
def test_states_of_other_runs_are_refused(as_rank, words, options):
    shards = draw_shards(0)
    as_rank(shards, 0, 2)
    saved = next(with_state(ByteTokenizer(), 2, 16, "train", device="cpu"))[2]
    as_rank(shards, options.get("rank", 0), options.get("world_size", 2))
    resumed = with_state(
        options.get("tokenizer", ByteTokenizer()), 2, 16, options.get("split", "train"),
        device="cpu", resume_state_dict=options.get("state", saved))
    with pytest.raises(dataset.UserError, match=f"another run's: {words}"):
        next(resumed)

def test_a_rank_without_documents_is_refused(as_rank):
    """nanochat would search forever."""
    as_rank([[["a"], [], ["b"], []], [["c"]]], 0, 2)
    with pytest.raises(dataset.UserError, match="rank 1 of 2 would never get a document"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))
