"""
The rows of a run, slow and obvious: what dataloader.py makes with threads, on ranks, from a state.

    python -m dev.reference                          the rows of a small corpus
    python -m dev.reference --drawn 1000 --seed 0    the loader's rows beside these, in 1,000 runs

An epoch is one line of all documents. It is cut into lanes, and each lane into chunks:

    |------- lane 0 -------|------- lane 1 -------|------- lane 2 -------|------- lane 3 -------|
    | chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..|

Each chunk is packed into rows by itself. Row g of the run is the next row of lane g % num_lanes.
Only the packings are the loader's. The four steps: line_of, chunks_of, rows_of_chunk, next_row.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.reference, typed where dataloader.py is")

import argparse
import functools
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataloader import PACKINGS
from dataset import Parser, errors_in_one_line, list_shards, write_index, write_shard


@dataclass(eq=False)
class Run:
    """What its rows depend on."""
    sources: dict         # {name: its shards}, in the order of their fingerprints
    ids_of: Callable      # (location, epoch) -> the document's ids; none if it is null or filtered
    T: int
    weights: dict         # {name: a number, or a function of g}
    epochs: dict          # {name: how many, or None: endless}
    num_lanes: int
    chunk_bytes: int
    packing: str = "exactfit"
    shuffle_seed: int | None = 0

def permuted(items, seed, *key):
    """In an order that depends on (key, seed) alone; without a seed, as they are."""
    if seed is None:
        return items
    numbers = np.random.PCG64((*key, seed)).random_raw(len(items))
    return [items[i] for i in numbers.argsort(kind="stable")]

def line_of(shards, epoch, seed):
    """
    All documents of an epoch, [(location, bytes)]: row groups in random order, the documents of
    each in random order. A document counts as many bytes as its shard's have on average.
    """
    groups = []
    for shard in shards:
        average = max(1, shard.text_bytes // sum(shard.group_sizes))
        for row_group, n in enumerate(shard.group_sizes):
            locations = [shard.location(row_group, row) for row in range(n)]
            group = [(location, average) for location in locations]
            groups.append(permuted(group, seed, 1, epoch, len(groups)))
    groups = [group for group in groups if group]
    return list(itertools.chain(*permuted(groups, seed, 0, epoch)))

@functools.lru_cache(maxsize=16)
def chunks_of(run, name, epoch):
    """For each lane its chunks, lists of locations. Each begins after equally many bytes."""
    line = line_of(run.sources[name], epoch, run.shuffle_seed)
    total = sum(n_bytes for _, n_bytes in line)
    per_lane = max(1, round(total / run.num_lanes / run.chunk_bytes))
    n_chunks = per_lane * run.num_lanes
    chunks = [[] for _ in range(n_chunks)]
    begin, k = 0, 0    # of a document; its chunk
    for location, n_bytes in line:
        while k + 1 < n_chunks and begin >= total * (k + 1) // n_chunks:
            k += 1
        chunks[k].append(location)
        begin += n_bytes
    if run.shuffle_seed is None:    # in file order, all lanes move through the files together
        return [chunks[lane::run.num_lanes] for lane in range(run.num_lanes)]
    return [chunks[first:first + per_lane] for first in range(0, n_chunks, per_lane)]

@functools.lru_cache(maxsize=1024)
def rows_of_chunk(run, name, lane, n):
    """
    The rows of a lane's n-th chunk, counted over all epochs; None after its last one. A row is a
    list of pieces, (location, epoch, start, stop): tokens [start, stop) of a document.
    """
    per_lane = len(chunks_of(run, name, 1)[lane])
    epoch = 1 + n // per_lane
    if epoch > (run.epochs[name] or math.inf):
        return None
    of_line = (lane + epoch - 1) % run.num_lanes    # each epoch, a lane has the next one's part
    documents, lengths = [], []
    for location in chunks_of(run, name, epoch)[of_line][n % per_lane]:
        n_tokens = len(run.ids_of(location, epoch))
        if n_tokens:
            documents.append(location)
            lengths.append(n_tokens)
    rows = PACKINGS[run.packing](lengths, run.T + 1) if documents else []
    rows.sort(key=lambda row: min(row)[0])    # by their first documents
    rows = permuted(rows, run.shuffle_seed, 2, lane, n)
    return [[(documents[d], epoch, *piece) for d, *piece in row] for row in rows]

def next_row(run, g, places):
    """
    (lane, source, row) of row g of the run, or None at its end. places: {(lane, source): [n, i]},
    the lane's n-th chunk, of which i rows were delivered; moved past the row.
    """
    for k in range(run.num_lanes):
        lane = (g + k) % run.num_lanes    # k > 0: it takes over from one that has ended
        weights = {}
        for name in run.sources:
            n, _ = places[lane, name]
            if rows_of_chunk(run, name, lane, n) is not None:
                weights[name] = run.weights[name]
        while weights:
            name = choose(weights, g)
            row = row_of_lane(run, name, lane, places)
            if row:
                return lane, name, row
            del weights[name]    # the other sources take over from one that has ended
    return None

def row_of_lane(run, name, lane, places):
    """None after its last chunk. Of a source without tokens, an endless run never returns."""
    n, i = places[lane, name]
    while (rows := rows_of_chunk(run, name, lane, n)) is not None:
        if i < len(rows):
            places[lane, name] = [n, i + 1]
            return rows[i]
        n, i = n + 1, 0
    places[lane, name] = [n, 0]
    return None

def choose(weights, g):
    """The weights divide [0, 1) among the sources. Row g is at g * golden ratio mod 1."""
    numbers = [weight(g) if callable(weight) else weight for weight in weights.values()]
    point = g * 0x9E3779B97F4A7C15 % 2**64 / 2**64 * sum(numbers)
    ends = itertools.accumulate(numbers)
    return next(name for name, end in zip(weights, ends, strict=True) if point < end)

def rows_of(run, g=0, places=None):
    """Yield (lane, source, row) of row g of the run, g + 1, ..."""
    if places is None:
        places = places_at_start(run)
    while found := next_row(run, g, places):
        yield found
        g += 1

def places_at_start(run):
    lanes = range(run.num_lanes)
    return {(lane, name): [0, 0] for lane in lanes for name in run.sources}

# --------------------------------------------------------------------------------------------------
# The rows of a small corpus

SHARDS = [    # a token is a letter
    [["aaaaa", "bbbbbbbbb", "ccc"], ["ddddddd", "eeeeeeeeeeeeeeeeeeee", "ffff"]],
    [["gggggg", "hhhhhhhh", "ii"], ["jjjjjjjjjj", "kkkkkk", "lllll"]]]

def print_example():
    with tempfile.TemporaryDirectory() as folder:
        for i, groups in enumerate(SHARDS):
            write_shard(f"{folder}/train-{i}.parquet", map(pa.array, groups))
        write_shard(f"{folder}/val.parquet", [pa.array(["validation"])])
        write_index(folder)
        shards = list_shards(folder, "train")

    def text_of(location, epoch=1):    # | is BOS
        shard = [shard.path for shard in shards].index(location.path)
        return "|" + SHARDS[shard][location.row_group][location.row]

    run = Run({folder: shards}, text_of, T=15, weights={folder: 1}, epochs={folder: 1},
              num_lanes=2, chunk_bytes=21)
    print("2 shards of 2 row groups each; T = 15, 2 lanes; | is BOS")
    for shard, groups in zip(shards, SHARDS, strict=True):
        print(f"{shard.name}:", "; ".join(" ".join(group) for group in groups))
    print("\nthe line of epoch 1:")
    for lane, chunks in enumerate(chunks_of(run, folder, 1)):
        for i, chunk in enumerate(chunks):
            letters = " ".join(text_of(location)[1] for location in chunk)
            print(f"  lane {lane}, chunk {i}: {letters}")
    print("\nthe run:")
    for g, (lane, _, row) in enumerate(rows_of(run)):
        pieces = [text_of(location)[start:stop] for location, _, start, stop in row]
        print(f"  row {g}, of lane {lane}: {''.join(pieces):.<16}")

def main(argv=None):
    parser = Parser("python -m dev.reference", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="runs to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the first drawn run (default 0)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        if flags.drawn:
            from dev import drawn
            drawn.compare(flags.drawn, flags.seed)
        else:
            print_example()

if __name__ == "__main__":
    main()
