"""
dev/nanochat.py against a slow reference: nanochat's own order, refill rule and scan, written with lists.

    python -m pytest dev/tests/test_nanochat.py
"""

import dataclasses
import itertools
import json
import random
import threading

import pyarrow.parquet as pq
import pytest
import torch

from dataset import list_shards
from dev import nanochat
from test_dataloader import BOS, ByteTokenizer, rows_of, tokenized, write_shards
from tokenizer import RustBPETokenizer, AnyTokenizer

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
        return [([] if prepend is None else [prepend]) + list(text.encode()) for text in texts]


# ---------------------------------------------------------------------------------------------------------
# The reference

def batches_of_documents(shards, rank, world_size, batch_size):
    """
    What a rank tokenizes at once, in nanochat's order, with the numbers that it prints; endless.
    shards: row groups of documents, None where one is null, which nanochat cannot read
    """
    for epoch in itertools.count(1):
        for pq_idx, shard in enumerate(shards):
            for rg_idx in range(rank, len(shard), world_size):
                for i in range(0, len(shard[rg_idx]), batch_size):
                    documents = [text for text in shard[rg_idx][i:i + batch_size] if text is not None]
                    yield [[BOS, *text.encode()] for text in documents], (epoch, pq_idx, rg_idx)


def bestfit_batches(batches, B, T, buffer_size):
    """The longest document that fits, else the shortest, cut; the first in the buffer among equals."""
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
            rows.append(tuple(row))
            row = []
        if len(rows) == B:
            yield rows, printed
            rows = []


def reference(shards, B, T, rank, world_size, batch_size=128, buffer_size=1000):
    """Yields (rows, (epoch, pq_idx, rg_idx)) of each batch."""
    batches = batches_of_documents(shards, rank, world_size, batch_size)
    return bestfit_batches(batches, B, T, buffer_size)


def draw_shards(seed, nulls=0.0):
    """Shards of 4 to 9 row groups of 1 to 30 documents, most of them short, no two alike."""
    draw = random.Random(seed)

    def document(*numbers):
        return ".".join(map(str, numbers)) + "x" * (int(draw.paretovariate(0.9) * 5) % 120)

    return [[[None if draw.random() < nulls else document(i, group, k) for k in range(draw.randint(1, 30))]
             for group in range(draw.randint(4, 9))] for i in range(3)]


@pytest.fixture
def as_rank(tmp_path, monkeypatch):
    """as_rank(shards, rank, world_size): writes the shards once, and sets what the generators read."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))

    def prepare(shards, rank=0, world_size=1):
        if not (tmp_path / "base_data").exists():
            write_shards(tmp_path / "base_data", [*shards, [["val"]] * 4])
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return prepare


def seen(batch):
    """(rows, (epoch, pq_idx, rg_idx)) of a batch, as the reference yields them"""
    *tensors, state = batch
    return rows_of(tensors), (state["epoch"], state["pq_idx"], state["rg_idx"])


def take(n, iterator):
    return list(itertools.islice(iterator, n))


def through_json(state):
    return json.loads(json.dumps(state))


# ---------------------------------------------------------------------------------------------------------
# Rows

@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_batches_are_nanochats_and_resume_is_exact(world_size, as_rank):
    """Several epochs; stopped twice, after batches that the seed draws. The two generators agree."""
    draw = random.Random(world_size)
    shards, B, T = draw_shards(world_size), 4, draw.choice([16, 40])
    batch_size, buffer_size = draw.choice([5, 7, 128]), draw.choice([3, 20])
    options = {"buffer_size": buffer_size, "device": "cpu", "tokenizer_threads": 2,
               "tokenizer_batch_size": batch_size}
    for rank in range(world_size):
        as_rank(shards, rank, world_size)
        want = take(600, reference(shards, B, T, rank, world_size, batch_size, buffer_size))
        got, state, stops = [], None, [0, *sorted(draw.sample(range(1, 600), 2)), 600]
        for a, b in itertools.pairwise(stops):
            generator = with_state(NanochatTokenizer(), B, T, "train", resume_state_dict=state, **options)
            batches = take(b - a, generator)
            got += map(seen, batches)
            state = through_json(batches[-1][2])
            assert state == batches[-1][2]
        assert got == want, (rank, T, batch_size, buffer_size)
        assert state["epoch"] > 2, "the test crossed no epoch"
        again = without_state(ByteTokenizer(), B, T, "train", **options)
        assert list(map(rows_of, take(50, again))) == [rows for rows, _ in want[:50]]


def test_states_of_all_ranks_resume_each_rank(as_rank):
    """In a list, as dev/loops.md saves them; and in lists of it, which a run saves that was just resumed."""
    shards, states, want = draw_shards(9), [], []
    for rank in range(3):
        as_rank(shards, rank, 3)
        batches = take(20, with_state(ByteTokenizer(), 2, 32, "train", device="cpu"))
        states.append(batches[7][2])
        want.append(list(map(seen, batches[8:])))
    for saved in (through_json(states), [states, states, states]):
        for rank in range(3):
            as_rank(shards, rank, 3)
            generator = with_state(ByteTokenizer(), 2, 32, "train", device="cpu", resume_state_dict=saved)
            assert list(map(seen, take(12, generator))) == want[rank]


def test_defaults_are_nanochats(as_rank):
    """128 documents at a time, 1,000 buffered."""
    shards = [[[f"{i}.{k}" + "y" * (k % 90) for k in range(300)] for i in range(4)]] * 2
    as_rank(shards)
    generator = with_state(ByteTokenizer(), 8, 64, "train", device="cpu")
    assert list(map(seen, take(25, generator))) == take(25, reference(shards, 8, 64, 0, 1))


def test_null_documents_and_empty_row_groups_are_skipped(as_rank, tmp_path):
    """nanochat stops at a null; empty documents are rows of BOS. Resumed after every batch."""
    shards = draw_shards(5, nulls=0.4)
    shards[0][1], shards[1][2], shards[2][3] = [], [None] * 9, [""] * 9
    as_rank(shards, 1, 2)
    assert pq.ParquetFile(tmp_path / "base_data/shard_00000.parquet").num_row_groups == len(shards[0])
    want, state = take(60, reference(shards, 1, 40, 1, 2, 7, 20)), None
    for expected in want:
        batch = next(with_state(ByteTokenizer(), 1, 40, "train", 2, 7, "cpu", state, 20))
        state = batch[2]
        assert seen(batch) == expected


def test_batches_are_new_tensors_which_are_pinned_for_a_gpu(as_rank, monkeypatch):
    """The calls, without a GPU: each tensor is pinned, and copied from there without waiting."""
    as_rank(shards := draw_shards(1))
    want, pinned = [rows for rows, _ in take(9, reference(shards, 2, 16, 0, 1))], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part: pinned.append(part.data_ptr()) or part)
    monkeypatch.setattr(torch.Tensor, "to", lambda part, device, non_blocking: (
        pinned.remove(part.data_ptr()), device == torch.device("cuda") and non_blocking and part)[1])
    for device in ("cuda", torch.device("cuda")):
        batches = take(9, without_state(ByteTokenizer(), 2, 16, "train", device=device))
        assert not pinned and len({part.data_ptr() for batch in batches for part in batch}) == 18
        assert list(map(rows_of, batches)) == want


# ---------------------------------------------------------------------------------------------------------
# Threads

def test_dropped_generators_leave_no_threads(as_rank):
    """scripts/base_train.py makes a new one for each evaluation, and drops it."""
    as_rank(draw_shards(0))
    before = threading.enumerate()
    generator = without_state(ByteTokenizer(), 2, 16, "val", device="cpu")
    next(generator)
    started = set(threading.enumerate()).difference(before)
    assert started
    del generator
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_documents_in_the_buffer_do_not_keep_others(as_rank):
    """Long ones stay there for hours; a view of one would keep the ids of all 128 of its batch."""
    as_rank(draw_shards(0))
    groups = [(shard, 0) for shard in list_shards(None, "train")]
    to_read = nanochat.rows_to_read(groups, {}, (0, 0))
    _, documents = next(nanochat.encode_ahead(groups, to_read, AnyTokenizer(ByteTokenizer()), 2, 128))
    assert len(documents) > 1 and all(ids.base is None for ids in documents.values())


def test_tokenizers_with_threads_of_their_own_are_called_by_one(as_rank):
    as_rank(draw_shards(0))
    tokenizer = NanochatTokenizer()
    generator = without_state(tokenizer, 2, 16, "train", tokenizer_threads=3, device="cpu")
    tokenizer.calls.clear()
    take(50, generator)
    assert len({thread for thread, _ in tokenizer.calls} - {threading.current_thread()}) == 1
    assert 3 in {n for _, n in tokenizer.calls}


def test_first_document_of_a_row_group_is_checked_with_tiktoken(as_rank, monkeypatch):
    ours = RustBPETokenizer.train_from_iterator(["some text"], 270)
    as_rank([[["a", "b", "c"], ["d", "e", "f"]]])
    encode, calls = RustBPETokenizer.encode_documents, []
    monkeypatch.setattr(RustBPETokenizer, "encode_documents", lambda self, texts, check=(): (
        calls.append((texts.to_pylist(), list(check))), encode(self, texts, check))[1])
    next(without_state(ours, 1, 8, "train", tokenizer_batch_size=2, device="cpu"))
    assert all(call in calls for call in [(["a", "b"], [0]), (["c"], []), (["d", "e"], [0]), (["f"], [])])


def test_errors_in_threads_name_the_documents(as_rank):
    """Those before are delivered, and nothing after."""
    class Failing(ByteTokenizer):
        def encode_documents(self, texts):
            if "bad" in texts:
                raise KeyError("a bad text")
            return super().encode_documents(texts)

    as_rank([[["good"] * 8], [["good"] * 8, ["good"] * 6 + ["bad", "good"]]])
    generator = without_state(Failing(), 1, 15, "train", tokenizer_batch_size=4, device="cpu", buffer_size=1)
    assert len(take(5, generator)) == 5
    with pytest.raises(RuntimeError, match=r"shard_00001\.parquet, row group 1, rows 4 to 7: KeyError"):
        next(generator)


# ---------------------------------------------------------------------------------------------------------
# What is refused

def test_other_states_are_refused(as_rank, monkeypatch):
    """Each by one line; and nanochat's three numbers."""
    def refused(message, state=None, tokenizer=None, rank=0, world_size=2, split="train"):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        generator = with_state(tokenizer or ByteTokenizer(), 2, 16, split, device="cpu",
                               resume_state_dict=state or saved)
        with pytest.raises(ValueError, match=f"another run's: {message}") as error:
            next(generator)
        assert "\n" not in str(error.value)

    as_rank(draw_shards(0), 0, 2)
    saved = next(with_state(ByteTokenizer(), 2, 16, "train", device="cpu"))[2]
    refused("world_size is None in it, but 2 here", {"pq_idx": 0, "rg_idx": 3, "epoch": 1})
    refused("world_size is 2 in it, but 1 here", world_size=1)
    refused("world_size is 2 in it, but 4 here", [saved, saved], rank=3, world_size=4)
    refused("rank is 0 in it, but 1 here", rank=1)
    refused("tokenizer is 'bytes' in it, but 'other' here", tokenizer=ByteTokenizer("other"))
    refused("shards is", split="val")
    for change in ({"name": "a"}, {"text_bytes": 1}, {"digest": "b"}, {"group_sizes": [2, 5]}):
        monkeypatch.setattr(nanochat, "list_shards", lambda *args, change=change: [
            dataclasses.replace(shard, **change) for shard in list_shards(*args)])
        refused("shards is")


def test_too_few_row_groups_or_shards_are_refused(as_rank, monkeypatch, tmp_path):
    """nanochat would loop without end; and it has no built-in corpus."""
    as_rank([[["a"]] * 3, [["b"]] * 4], 0, 5)
    with pytest.raises(ValueError, match=r"rank 4 of 5 would never get a document: .* at most 4 row groups"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="base_data"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))


def test_row_groups_without_documents_are_not_counted(as_rank):
    as_rank([[["a"], [], ["b"], []], [["c"]]], 0, 2)
    with pytest.raises(ValueError, match="rank 1 of 2 would never get a document"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))


def test_token_shards_are_refused(as_rank, tmp_path):
    as_rank(draw_shards(0))
    (tmp_path / "base_data").rename(tmp_path / "text")
    tokenized(str(tmp_path / "text"), str(tmp_path / "base_data"))
    with pytest.raises(ValueError, match="base_data holds tokens, and nanochat's generators read text"):
        next(without_state(ByteTokenizer(), 2, 16, "train", device="cpu"))
