"""
dev/nanochat.py against a slow reference: nanochat's own order, refill rule and scan, written with lists.

    python -m pytest dev/tests/test_nanochat.py
"""

import itertools
import json
import random

import pytest

import dataset
from dataloader import PackedLoader, merge_states
from dev import nanochat
from test_dataloader import BOS, ByteTokenizer, rows_of, write_shards

GENERATORS = {
    "flat": (nanochat.tokenizing_distributed_data_loader_with_state,
             nanochat.tokenizing_distributed_data_loader),
    "bestfit": (nanochat.tokenizing_distributed_data_loader_with_state_bos_bestfit,
                nanochat.tokenizing_distributed_data_loader_bos_bestfit)}


class NanochatTokenizer:
    """Has nanochat's methods, and no others."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=8):
        return [([] if prepend is None else [prepend]) + list(text.encode()) for text in texts]


# ---------------------------------------------------------------------------------------------------------
# The reference

def batches_of_documents(shards, rank, world_size, batch_size):
    """What a rank tokenizes at once, in nanochat's order; endless. shards: row groups of documents."""
    while True:
        for shard in shards:
            for group in shard[rank::world_size]:
                yield from (group[i:i + batch_size] for i in range(0, len(group), batch_size))


def flat_rows(batches, T):
    """Each row's last target opens the next row."""
    stream = itertools.chain.from_iterable([BOS, *text.encode()] for batch in batches for text in batch)
    row = list(itertools.islice(stream, T + 1))
    while True:
        yield tuple(row)
        row = row[-1:] + list(itertools.islice(stream, T))


def bestfit_rows(batches, T, buffer_size):
    """The longest document that fits, else the shortest, cut; the first in the buffer among equals."""
    buffer = []
    while True:
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size:
                buffer += [[BOS, *text.encode()] for text in next(batches)]
            free = T + 1 - len(row)
            fitting = [document for document in buffer if len(document) <= free]
            document = max(fitting, key=len) if fitting else min(buffer, key=len)
            buffer.remove(document)
            row += document[:free]
        yield tuple(row)


def reference(packing, shards, T, rank, world_size, batch_size, buffer_size):
    batches = batches_of_documents(shards, rank, world_size, batch_size)
    return flat_rows(batches, T) if packing == "flat" else bestfit_rows(batches, T, buffer_size)


def draw_shards(seed):
    """Shards of 4 to 9 row groups of 1 to 30 documents, most of them short, no two alike."""
    draw = random.Random(seed)

    def document(*numbers):
        return ".".join(map(str, numbers)) + "x" * (int(draw.paretovariate(0.9) * 5) % 120)

    return [[[document(i, group, k) for k in range(draw.randint(1, 30))]
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


def through_json(state):
    return json.loads(json.dumps(state))


# ---------------------------------------------------------------------------------------------------------
# Rows

@pytest.mark.parametrize("packing", ["flat", "bestfit"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_nanochats_and_resume_is_exact(packing, world_size, as_rank):
    """Several epochs; stopped twice, at steps that the seed draws. The two generators agree."""
    draw = random.Random(world_size)
    shards, T = draw_shards(world_size), draw.choice([16, 40])
    batch_size, buffer_size = draw.choice([5, 7, 128]), draw.choice([3, 20])
    with_state, without_state = GENERATORS[packing]
    options = {"buffer_size": buffer_size} if packing == "bestfit" else {}
    options.update(device="cpu", tokenizer_threads=2, tokenizer_batch_size=batch_size)
    for rank in range(world_size):
        as_rank(shards, rank, world_size)
        want = reference(packing, shards, T, rank, world_size, batch_size, buffer_size)
        want = list(itertools.islice(want, 2400))
        got, state, stops = [], None, [0, *sorted(draw.sample(range(1, 600), 2)), 600]
        for a, b in itertools.pairwise(stops):
            generator = with_state(NanochatTokenizer(), 4, T, "train", resume_state_dict=state, **options)
            for inputs, targets, state in itertools.islice(generator, b - a):    # noqa: B007
                got += rows_of((inputs, targets))
            generator.close()
            state = through_json(state)
        assert got == want, (rank, T, batch_size, buffer_size)
        assert state["epoch"] > 2, "the test crossed no epoch"
        again = without_state(ByteTokenizer(), 4, T, "train", **options)
        assert [row for batch in itertools.islice(again, 50) for row in rows_of(batch)] == want[:200]
        again.close()


@pytest.mark.parametrize("packing", ["flat", "bestfit"])
def test_merged_state_of_all_ranks_resumes_each_rank(packing, as_rank):
    """As dev/loops.md saves them."""
    shards, with_state, states, want = draw_shards(9), GENERATORS[packing][0], [], []
    for rank in range(3):
        as_rank(shards, rank, 3)
        generator = with_state(ByteTokenizer(), 2, 32, "train", device="cpu")
        batches = list(itertools.islice(generator, 20))
        states.append(batches[7][2])
        want.append([rows_of(batch[:2]) for batch in batches[8:]])
    merged = through_json(merge_states(states))
    for rank in range(3):
        as_rank(shards, rank, 3)
        generator = with_state(ByteTokenizer(), 2, 32, "train", device="cpu", resume_state_dict=merged)
        assert [rows_of(batch[:2]) for batch in itertools.islice(generator, 12)] == want[rank]


def test_defaults_are_nanochats(as_rank):
    """128 documents at a time, 1,000 buffered."""
    shards = [[[f"{i}.{k}" + "y" * (k % 90) for k in range(300)] for i in range(4)]] * 2
    as_rank(shards)
    generator = GENERATORS["bestfit"][1](ByteTokenizer(), 8, 64, "train", device="cpu")
    want = reference("bestfit", shards, 64, 0, 1, 128, 1000)
    assert [row for batch in itertools.islice(generator, 25) for row in rows_of(batch)] == list(
        itertools.islice(want, 200))


# ---------------------------------------------------------------------------------------------------------
# What is refused

def test_other_states_are_refused(as_rank):
    """nanochat's three numbers, and states of the core's loader, whose lanes read other row groups."""
    as_rank(draw_shards(0))
    core = PackedLoader(ByteTokenizer(), 2, 16, "train", packing="flat", num_lanes=1,
                        data_dir=dataset.default_data_dir())
    for state in ({"pq_idx": 0, "rg_idx": 3, "epoch": 1}, core.state_dict()):
        generator = GENERATORS["flat"][0](ByteTokenizer(), 2, 16, "train", device="cpu",
                                          resume_state_dict=state)
        with pytest.raises(ValueError, match="state"):
            next(generator)
    core.close()


def test_too_few_row_groups_or_shards_are_refused(as_rank, monkeypatch, tmp_path):
    """nanochat would loop without end; and it has no built-in corpus."""
    as_rank([[["a"]] * 3, [["b"]] * 4], 0, 5)
    with pytest.raises(ValueError, match="more than 4 row groups, so the last of 5 ranks never gets one"):
        next(GENERATORS["flat"][1](ByteTokenizer(), 2, 16, "train", device="cpu"))
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="base_data"):
        next(GENERATORS["flat"][1](ByteTokenizer(), 2, 16, "train", device="cpu"))
