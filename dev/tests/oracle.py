"""
Whole runs as dev/reference.py deals and packs them, slow and obvious, too: with mixtures, finite sources and
changes of T. A row: [((path, row group, row), epoch, start, stop), ...]
"""
import functools
import itertools

from dataloader import PACKINGS
from dev.reference import chunks_of, permutation, rows_of


def tokens_in(row):
    return [(d, i) for d, start, stop in row for i in range(start, stop)]

def pack_again(tokens, T, packing, seed, epoch, place):
    """The rows of a set of tokens (document, index): spans of them are packed as if they were documents."""
    spans = []
    for d, i in sorted(tokens):
        if (d, i - 1) not in tokens:
            spans.append([(d, None)] if i and packing != "flat" else [])    # None: BOS is repeated
        spans[-1].append((d, i))
    rows = []
    for row in PACKINGS[packing]([len(span) for span in spans], T + 1) if spans else ():
        found = [[(d, i) for d, i in spans[k][a:b] if i is not None] for k, a, b in row]
        rows.append(sorted((*part[0], part[-1][1] + 1) for part in found if part))
    rows.sort()
    return [rows[k] for k in permutation(len(rows), seed, epoch, 2, *place)]

def rows_of_stream(lane, epochs, n_tokens, T, packing, shards, num_lanes, seed, chunk_bytes):
    for epoch in range(1, epochs + 1) if epochs else itertools.count(1):
        for place, documents in chunks_of(lane, epoch, shards, num_lanes, seed, chunk_bytes).items():
            now, delivered, lengths = T(), set(), [n_tokens(at, epoch) for at in documents]
            rows = rows_of(lengths, now, packing, seed, epoch, place)
            while rows:
                if now != T():    # what is left of the chunk is packed anew
                    now, left = T(), {token for row in rows for token in tokens_in(row)}
                    if packing == "flat":    # whose rows begin with a token of the previous one
                        left -= delivered - {min(left)}
                    rows = pack_again(left, now, packing, seed, epoch, place)
                else:
                    row = rows.pop(0)
                    delivered |= {*tokens_in(row)[1:]}
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
