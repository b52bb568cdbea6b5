"""
All rows of a run, slow and obvious: without threads, ranks, states or arithmetic on arrays.

    python -m dev.reference          # the rows of a small corpus

Only the packings, list_shards and the number SPREAD are the loader's. An epoch is one line of all
documents. It is cut into segments, one for each lane, and each segment into chunks:

    |----- segment 0 ------|----- segment 1 ------|----- segment 2 ------|----- segment 3 ------|
    | chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..|

Each chunk is packed into rows by itself (line_of, chunks_of, rows_of_chunk). The rows of a lane's
chunks, one after another, are a pile (rows_of_lane). The run deals from the piles: row g is the next
one of lane g % num_lanes, from the source whose turn it is (rows_of_run).

dev/tests/test_reference.py compares the loader's rows with these.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.reference, run in the folder of dataloader.py")

import functools
import itertools
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import pyarrow as pa
from numpy.random import PCG64

from dataloader import PACKINGS
from dataset import list_shards, write_shard


@dataclass(eq=False)    # so that functions of a run can be cached
class Run:
    """What its rows depend on."""
    sources: dict       # {name: its shards}, in the order of the loader's sources
    weights: dict       # {name: a number, or a function of g}
    epochs: dict        # {name: n; None: endless}
    ids_of: Callable    # (location, epoch) -> ids; [] if the document is null or filtered
    T: int
    packing: str
    num_lanes: int
    chunk_bytes: int
    shuffle_seed: int | None

class Row(NamedTuple):
    """The i-th row of the n-th chunk of a lane of a source."""
    lane: int
    source: str
    n: int
    i: int
    pieces: list    # (location, epoch, start, stop): tokens [start, stop) of a document

def permuted(items, seed, *key):
    if seed is None:
        return items
    numbers = PCG64((*key, seed)).random_raw(len(items)).tolist()
    return [items[i] for i in sorted(range(len(items)), key=numbers.__getitem__)]

def line_of(shards, epoch, seed):
    """All documents of an epoch, in its order: [(location, average bytes in its row group)]"""
    groups = []
    for shard in shards:
        for row_group, n in enumerate(shard.group_sizes):
            n_bytes = max(n, shard.group_bytes[row_group])    # documents may be empty
            group = [(shard.location(row_group, row), Fraction(n_bytes, n)) for row in range(n)]
            groups.append(permuted(group, seed, 1, epoch, len(groups)))
    groups = [group for group in groups if group]
    return list(itertools.chain(*permuted(groups, seed, 0, epoch)))

@functools.lru_cache(maxsize=16)
def chunks_of(run, source, epoch):
    """The chunks of each segment of the line, lists of locations, all of the same bytes."""
    line = line_of(run.sources[source], epoch, run.shuffle_seed)
    n_bytes = int(sum(average for _, average in line))
    per_lane = max(1, round(n_bytes / run.num_lanes / run.chunk_bytes))
    n_chunks = per_lane * run.num_lanes
    cuts = [n_bytes * k // n_chunks for k in range(1, n_chunks)]
    chunks = [[] for _ in range(n_chunks)]
    begin = 0
    for location, average in line:
        chunks[bisect_right(cuts, begin)].append(location)
        begin += average
    if run.shuffle_seed is None:    # in file order, all lanes move through the files together
        return [chunks[segment::run.num_lanes] for segment in range(run.num_lanes)]
    return [chunks[first:first + per_lane] for first in range(0, n_chunks, per_lane)]

@functools.lru_cache(maxsize=1024)
def rows_of_chunk(run, source, lane, n):
    """Each row's pieces. n counts the lane's chunks over all epochs; None after the last one."""
    per_lane = len(chunks_of(run, source, 1)[lane])
    epoch = 1 + n // per_lane
    if epoch > (run.epochs[source] or math.inf):
        return None
    segment = (lane + epoch - 1) % run.num_lanes    # so a lane sees all parts of a small source
    chunk = chunks_of(run, source, epoch)[segment][n % per_lane]
    documents = [at for at in chunk if len(run.ids_of(at, epoch))]
    if not documents:
        return []
    lengths = [len(run.ids_of(at, epoch)) for at in documents]
    rows = PACKINGS[run.packing](lengths, run.T + 1)
    rows.sort(key=lambda row: min(row)[0])    # by their first documents
    rows = permuted(rows, run.shuffle_seed, 2, lane, n)
    return [[(documents[d], epoch, *piece) for d, *piece in row] for row in rows]

def rows_of_lane(run, source, lane, n=0, i=0):
    """Yield a lane's rows of a source, from row i of its n-th chunk on."""
    while (rows := rows_of_chunk(run, source, lane, n)) is not None:
        for k in range(i, len(rows)):
            yield Row(lane, source, n, k, rows[k])
        n, i = n + 1, 0

def piles_of(run):
    """For each lane, {source: an iterator of its rows}."""
    return [{source: rows_of_lane(run, source, lane) for source in run.sources}
            for lane in range(run.num_lanes)]

def rows_of_run(run, piles, g=0):
    """
    Yield the rows of the run from row g on. Lanes take turns. In a finite run, a lane that has ended
    gives its turn to the next one. (An endless run without a token never yields.)
    """
    is_finite = None not in run.epochs.values()
    equal = dict.fromkeys(run.weights, 1)
    while True:
        first = g % run.num_lanes
        in_turn = piles[first:] + piles[:first] if is_finite else [piles[first]]
        # A source of weight 0 gives a row only if nothing else can.
        dealt = (deal(g, lane, weights) for weights in (run.weights, equal) for lane in in_turn)
        row = next(filter(None, dealt), None)
        if row is None:
            break
        yield row
        g += 1

def deal(g, piles, weights):
    """Row g, if this lane's piles, {source: an iterator}, have one. An ended pile is removed."""
    while (source := chosen(g, {source: weights[source] for source in piles})) is not None:
        row = next(piles[source], None)
        if row:
            return row
        del piles[source]
    return None

SPREAD = 0x5D9DC1A99CCFC6A7    # the loader's

def chosen(g, weights):
    """The weights divide [0, 1) among the sources. Row g is the point g * SPREAD / 2**64 mod 1."""
    numbers = [weight(g) if callable(weight) else weight for weight in weights.values()]
    *_, total = itertools.accumulate(numbers, initial=0)    # sum() may round in another way
    point = g * SPREAD % 2**64 / 2**64 * total
    for source, end in zip(weights, itertools.accumulate(numbers), strict=True):
        if point < end:
            return source
    return None    # all weights are 0

# --------------------------------------------------------------------------------------------------
# An example, in which a token is a letter

SHARDS = [
    [["aaaaa", "bbbbbbbbb", "ccc"], ["ddddddd", "eeeeeeeeeeeeeeeeeeee", "ffff"]],
    [["gggggg", "hhhhhhhh", "ii"], ["jjjjjjjjjj", "kkkkkk", "lllll"]]]

def print_example():
    with tempfile.TemporaryDirectory() as folder:
        for i, groups in enumerate([*SHARDS, [["validation"]]]):
            write_shard(f"{folder}/{i}.parquet", [pa.array(group) for group in groups])
        shards = list_shards(folder, "train")

    def ids_of(location, epoch=1):    # | is BOS
        shard = [shard.path for shard in shards].index(location.path)
        return "|" + SHARDS[shard][location.row_group][location.row]

    run = Run({"": shards}, {"": 1}, {"": 1}, ids_of, T=15, packing="exactfit", num_lanes=2,
              chunk_bytes=21, shuffle_seed=0)
    print("2 shards of 2 row groups each; T = 15, 2 lanes; | is BOS")
    for shard, groups in zip(shards, SHARDS, strict=True):
        print(f"{shard.name}:", "; ".join(" ".join(group) for group in groups))
    print("\nthe line of epoch 1:")
    for lane, chunks in enumerate(chunks_of(run, "", 1)):
        for n, chunk in enumerate(chunks):
            letters = " ".join(ids_of(location)[1] for location in chunk)
            print(f"  lane {lane}, chunk {n}: {letters}")
    print("\nthe run:")
    for g, row in enumerate(rows_of_run(run, piles_of(run))):
        text = "".join(ids_of(location)[start:stop] for location, _, start, stop in row.pieces)
        print(f"  row {g}, from lane {row.lane}: {text:.<16}")

if __name__ == "__main__":
    print_example()
