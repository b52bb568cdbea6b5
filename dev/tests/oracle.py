"""
Whole runs as dev/reference.py deals and packs them, slow and obvious, too: with mixtures, finite sources and
changes of T. A row: [((path, row group, row), epoch, start, stop), ...]
"""
import functools
import itertools

from dataloader import PACKINGS
from dev.reference import chunks_of, permutation, rows_of


def pack_again(rows, T, packing, seed, epoch, place):
    """Rows that are left after a change of T: each of their pieces is packed as if it were a document."""
    documents = []    # lists of tokens (document, index); None: BOS again
    for k, row in enumerate(sorted(rows)):
        for i, (d, start, stop) in enumerate(row):
            tokens = [(d, index) for index in range(start, stop)]
            if packing != "flat" and start:
                tokens = [None, *tokens]
            elif packing == "flat" and k and not i:    # also the last one of the row before
                tokens = tokens[1:]
            documents += [tokens] if tokens else []
    rows = []
    for row in PACKINGS[packing]([len(tokens) for tokens in documents], T + 1) if documents else ():
        parts = [[token for token in documents[i][start:stop] if token] for i, start, stop in row]
        rows.append([(*part[0], part[-1][1] + 1) for part in parts if part])
    rows.sort(key=min)
    return [rows[k] for k in permutation(len(rows), seed, epoch, 2, *place)]

def rows_of_stream(lane, epochs, n_tokens, T, packing, shards, num_lanes, seed, chunk_bytes):
    for epoch in range(1, epochs + 1) if epochs else itertools.count(1):
        for place, documents in chunks_of(lane, epoch, shards, num_lanes, seed, chunk_bytes).items():
            now, lengths = T(), [n_tokens(at, epoch) for at in documents]
            rows = rows_of(lengths, now, packing, seed, epoch, place)
            while rows:
                if now != T():
                    now = T()
                    rows = pack_again(rows, now, packing, seed, epoch, place)
                else:
                    yield [(documents[d], epoch, start, stop) for d, start, stop in rows.pop(0)]

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
