"""
The loader's rows, slow and obvious: `python -m dev.reference` prints those of a small corpus, and the tests
compare the loader with it. Only the packings are the loader's; all else is written here a second time.
A row: [((path, row group, row), epoch, start, stop), ...], tokens start to stop of each of its documents.
"""
import functools
import itertools
import tempfile

import numpy as np
import pyarrow as pa

from dataloader import PACKINGS
from dataset import list_shards, write_shard


def permutation(n, seed, *key):
    return range(n) if seed is None else np.random.PCG64((seed, *key)).random_raw(n).argsort(kind="stable")

def chunks_of(lane, epoch, shards, num_lanes, seed, chunk_bytes):
    """A lane's chunks, in order: {(turn, number): [(path, row group, row), ...]}"""
    groups = [(shard, i, n) for shard in shards for i, n in enumerate(shard.group_sizes)]
    full = [k for k, (_, _, n) in enumerate(groups) if n]
    split = next(k for k in itertools.count(1) if sum(min(k, n) for _, _, n in groups) >= num_lanes)
    order = [full[k] for k in permutation(len(full), seed, epoch, 0)]
    turns = [(k, i) for k in order for i in range(min(split, groups[k][2]))]
    chunks, place, filled = {}, None, chunk_bytes    # of the last chunk, which small turns join
    for turn in range(lane, len(turns), num_lanes):
        (k, i), (shard, group, n) = turns[turn], groups[turns[turn][0]]
        rows = [(shard.path, group, int(row)) for row in permutation(n, seed, epoch, 1, k)[i::split]]
        n_bytes = shard.text_bytes * len(rows) // sum(shard.group_sizes)
        n = max(1, min(round(n_bytes / chunk_bytes), len(rows)))
        if n == 1 and filled < chunk_bytes:
            chunks[place] += rows
            filled += n_bytes
        else:
            for number in range(n):
                place = turn, number
                chunks[place] = rows[number * len(rows) // n:(number + 1) * len(rows) // n]
            filled = n_bytes if n == 1 else chunk_bytes
    return chunks

def pack(packing, tokens, R, seed, *key):
    """The rows of a set of tokens (document, index). Spans of them are packed as if they were documents."""
    spans = []
    for d, i in sorted(tokens):
        if (d, i - 1) not in tokens:
            spans.append([(d, None)] if i and packing != "flat" else [])    # None: BOS is repeated
        spans[-1].append((d, i))
    rows = []
    for row in PACKINGS[packing]([len(span) for span in spans], R) if spans else ():
        found = [[(d, i) for d, i in spans[k][a:b] if i is not None] for k, a, b in row]
        rows.append(sorted((*part[0], part[-1][1] + 1) for part in found if part))
    rows.sort()
    return [rows[k] for k in permutation(len(rows), seed, *key)]

def rows_of_stream(lane, epochs, n_tokens, T, packing, shards, num_lanes, seed, chunk_bytes):
    for epoch in range(1, epochs + 1) if epochs else itertools.count(1):
        for place, documents in chunks_of(lane, epoch, shards, num_lanes, seed, chunk_bytes).items():
            R, delivered = 0, set()
            rows = [[(d, 0, n_tokens(at, epoch)) for d, at in enumerate(documents)]]
            while any(rows):
                if T() + 1 != R:    # a new T: what is left of the chunk is packed anew
                    R = T() + 1
                    left = {(d, i) for row in rows for d, start, stop in row for i in range(start, stop)}
                    if packing == "flat":    # whose rows begin with a token of the previous one
                        left -= delivered - {min(left, default=None)}
                    rows = pack(packing, left, R, seed, epoch, 2, *place)
                else:
                    row = rows.pop(0)
                    delivered |= {*[(d, i) for d, start, stop in row for i in range(start, stop)][1:]}
                    yield [(documents[d], epoch, start, stop) for d, start, stop in row]

@functools.cache
def step_of(num_lanes):
    """Of the steps whose num_lanes-fold is 2**64 / golden ratio: that with the smallest largest quotient."""
    def largest(a, b, before=0, q=1):    # of the continued fraction of b / a; q: its denominators so far
        return max(a // b, largest(b, a % b, q, a // b * q + before)) if b and q <= 2**12 else 0
    steps = ((k * 2**64 + 0x9E3779B97F4A7C15) // num_lanes for k in range(num_lanes))
    return min(steps, key=lambda step: largest(2**64, step))

def choose(weights, point):
    """weights: {name: number}, by which [0, 2**64) is divided; the name of the part that holds the point."""
    largest = max(0, *weights.values())
    parts = [int(max(0, weight) / largest * 2**62) if largest else 1 for weight in weights.values()]
    ends = (end * 2**64 // sum(parts) for end in itertools.accumulate(parts))
    return next(name for name, end in zip(weights, ends, strict=True) if point < end)

def rows_of_run(sources, n_tokens, T, packing, num_lanes, seed, chunk_bytes):
    """sources: {name: (shards, weight, epochs)}; n_tokens(document, epoch); T(): now. []: a lane ended."""
    lanes = [{name: rows_of_stream(lane, epochs, n_tokens, T, packing, shards, num_lanes, seed, chunk_bytes)
              for name, (shards, _, epochs) in sources.items()} for lane in range(num_lanes)]
    for g in itertools.count():
        lane, row = lanes[g % num_lanes], None
        while lane and not row:
            weights = {name: sources[name][1] for name in lane}
            weights = {name: weight(g) if callable(weight) else weight for name, weight in weights.items()}
            name = choose(weights, g * step_of(num_lanes) % 2**64)
            if not (row := next(lane[name], None)):
                del lane[name]    # it ended, and leaves its part to the others
        if not any(lanes):
            return
        yield row or []

if __name__ == "__main__":
    texts, deal = [[x * n for x, n in zip("abcd", [3, 9, 4, 6], strict=True)]] * 5, (2, 0, 60)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "val"):
            write_shard(f"{folder}/{name}.parquet", map(pa.array, texts))
        shards = list_shards(folder, "train")
    for lane in range(2):
        for place, documents in chunks_of(lane, 1, shards, *deal).items():
            print(f"lane {lane}, chunk {place}:", *(f"{group}:{row}" for _, group, row in documents))
    run = {"": (shards, 1, 1)}, lambda at, epoch: len(texts[at[1]][at[2]]) + 1, lambda: 15, "exactfit"
    for g, row in enumerate(rows_of_run(*run, *deal)):
        print(f"row {g}, lane {g % 2}:", *(f"{group}:{row}[{a}:{b}]" for (_, group, row), _, a, b in row))
