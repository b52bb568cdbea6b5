"""
The loader's rows, slow and obvious: `python -m dev.reference` prints those of a small corpus; the tests compare
the loader with it. Only the packings are the loader's, every other decision is written here a second time.
A row: [((path, row group, row), epoch, start, stop), ...], tokens start to stop of each of its documents.
"""

import itertools
import tempfile

import numpy as np
import pyarrow as pa

from dataloader import PACKINGS
from dataset import list_shards, write_shard


def permutation(n, seed, *key):
    return range(n) if seed is None else np.random.PCG64((seed, *key)).random_raw(n).argsort(kind="stable")


def chunks_of(lane, epoch, shards, num_lanes, seed, chunk_bytes):
    """The chunks of a lane, in order: {(turn, number): [(path, row group, row), ...]}"""
    groups = [(shard, i, n) for shard in shards for i, n in enumerate(shard.group_sizes) if n]
    numbers = [k for k, n in enumerate(n for shard in shards for n in shard.group_sizes) if n]
    split = next(k for k in itertools.count(1) if sum(min(k, n) for *_, n in groups) >= num_lanes)
    turns = [(k, i) for k in permutation(len(groups), seed, epoch, 0) for i in range(min(split, groups[k][2]))]
    chunks, place, n_bytes = {}, None, chunk_bytes    # place, n_bytes: of the last chunk; small turns join it
    for turn, (k, i) in itertools.islice(enumerate(turns), lane, None, num_lanes):
        shard, row_group, n = groups[k]
        rows = [(shard.path, row_group, int(row)) for row in permutation(n, seed, epoch, 1, numbers[k])[i::split]]
        size = shard.text_bytes * len(rows) // sum(shard.group_sizes)
        n = max(1, min(round(size / chunk_bytes), len(rows)))
        if n == 1 and n_bytes < chunk_bytes:
            chunks[place] += rows
            n_bytes += size
            continue
        for number in range(n):
            place = turn, number
            chunks[place] = rows[number * len(rows) // n:(number + 1) * len(rows) // n]
        n_bytes = size if n == 1 else chunk_bytes
    return chunks


def rows_of_stream(lane, epochs, n_tokens, T, packing, *deal):
    for epoch in range(1, epochs + 1) if epochs else itertools.count(1):
        for documents in chunks_of(lane, epoch, *deal).values():
            lengths = [n_tokens(document, epoch) for document in documents]
            starts, R, row = [0] * len(lengths), 0, True
            while row:
                if R != T() + 1:    # a new T: what is left of the chunk is packed anew
                    R = T() + 1
                    rows = PACKINGS[packing](starts, lengths, R)
                if row := next(rows, None):
                    yield [(documents[d], epoch, start, stop) for d, start, stop in row]


def step_of(num_lanes):
    """Of the steps whose num_lanes-fold is 2**64 / golden ratio: the one with the smallest largest quotient."""
    def largest(a, b, before=0, q=1):    # of the continued fraction of b / a; q: denominators so far
        return max(a // b, largest(b, a % b, q, a // b * q + before)) if b and q <= 2**20 else 0
    steps = [(k * 2**64 + 0x9E3779B97F4A7C15) // num_lanes for k in range(num_lanes)]
    return min(steps, key=lambda step: largest(2**64, step))


def rows_of_run(sources, n_tokens, T, packing, num_lanes, seed, chunk_bytes):
    """sources: {name: (shards, weight, epochs)}; n_tokens(document, epoch); T(): now. [] in a lane that ended."""
    lanes = [{name: rows_of_stream(lane, epochs, n_tokens, T, packing, shards, num_lanes, seed, chunk_bytes)
              for name, (shards, _, epochs) in sources.items()} for lane in range(num_lanes)]
    step = step_of(num_lanes)
    for g in itertools.count():
        lane, row = lanes[g % num_lanes], None
        while lane and not row:
            weights = [max(0, sources[name][1](g) if callable(sources[name][1]) else sources[name][1]) for name in lane]
            parts = [int(weight / (max(weights) or 1) * 2**62) for weight in weights]
            parts = parts if any(parts) else [1] * len(parts)
            ends = (end * 2**64 // sum(parts) for end in itertools.accumulate(parts))
            name = next(name for name, end in zip(lane, ends) if g * step % 2**64 < end)
            if not (row := next(lane[name], None)):
                del lane[name]    # it ended, and leaves its part of [0, 1) to the others
        if not any(lanes):
            return
        yield row or []


def main():
    with tempfile.TemporaryDirectory() as folder:
        texts = [[letter * n for letter, n in zip("abcd", (3, 9, 4, 6))] for _ in range(5)]
        for name in ("train", "val"):
            write_shard(f"{folder}/{name}.parquet", map(pa.array, texts))
        shards = list_shards(folder, "train")
        for lane in range(2):
            for place, documents in chunks_of(lane, 1, shards, 2, 0, 60).items():
                print(f"lane {lane}, chunk {place}:", *(f"{i}:{row}" for _, i, row in documents))
        rows = rows_of_run({"": (shards, 1, 1)}, lambda at, _: len(texts[at[1]][at[2]]) + 1, lambda: 15, "exactfit", 2, 0, 60)
        for g, row in enumerate(rows):
            print(f"row {g}, lane {g % 2}:", *(f"{i}:{row}[{a}:{b}]" for (_, i, row), _, a, b in row))


if __name__ == "__main__":
    main()
