"""
The loader's rows without threads, devices, prefetching or checks: read this first. The tests compare the
loader with it. Both use the same `Ref` and packers; every other decision is written here a second time.

1. order: an epoch is the row groups of all shards and their documents, as in the files or permuted by seed.
2. lane: row group k of that order goes to lane k % num_lanes; row g of the run comes from lane g % num_lanes.
3. source: weights divide [0, 1) among the sources; row g is from the one that holds frac(g / golden ratio).
4. document: a lane reads the documents of a source one at a time; nulls do not count.
5. packer: one for each lane and source turns documents into rows of T + 1 tokens.
6. rank: row g goes to rank g % world_size. Here there is only one.
"""

import hashlib
import itertools
import json

import numpy as np

from dataloader import PACKINGS, Ref


def permutation(n, seed, *key):
    return range(n) if seed is None else np.random.PCG64((seed, *key)).random_raw(n).argsort(kind="stable")


def deal(shards, num_lanes, seed, epoch):
    """An epoch's (shard, row group, rows), in order; each row group in parts if too few for the lanes."""
    groups = [(shard, i) for shard in shards for i in range(len(shard.rows))]
    numbers = [number for number, (shard, i) in enumerate(groups) if shard.rows[i]]
    sizes = [shard.rows[i] for shard, i in groups]
    n_parts = next(n for n in itertools.count(1) if sum(min(n, size) for size in sizes) >= num_lanes)
    for k in permutation(len(numbers), seed, epoch, 0):
        rows = permutation(sizes[numbers[k]], seed, epoch, 1, numbers[k])
        for part in range(min(n_parts, len(rows))):
            yield *groups[numbers[k]], rows[part::n_parts]


def documents(shards, lane, num_lanes, seed, epochs, encode, start):
    """(ids, Ref) of a lane's documents from `start` on."""
    for epoch in range(start.epoch, epochs + 1) if epochs else itertools.count(start.epoch):
        for group, (shard, i, rows) in enumerate(deal(shards, num_lanes, seed, epoch)):
            if group % num_lanes == lane and (epoch, group) >= start[:2]:
                texts = shard.read(i).to_pylist()
                for ref, row in ((Ref(epoch, group, doc), row) for doc, row in enumerate(rows)):
                    if ref >= start and texts[row] is not None and len(ids := encode(texts[row])):
                        yield ids, ref


def choose_source(weights, g):
    """weights: {name: number or function of g}"""
    parts = {name: int(max(0, w(g) if callable(w) else w) * 2**64) for name, w in weights.items()}
    parts = parts if any(parts.values()) else dict.fromkeys(parts, 1)
    for name, end in zip(parts, itertools.accumulate(parts.values()), strict=True):
        if g * 0x9E3779B97F4A7C15 % 2**64 < end * 2**64 // sum(parts.values()):    # 2**64 / golden ratio
            return name


def rows_of_run(sources, encode, T, packing, num_lanes, seed=None, state=None, **options):
    """
    The run's rows, an array each: T + 1 tokens, fewer at the end of a source, none in a lane that has ended.
    sources: {name: (shards, weight, epochs)}. state: of the loader, all ranks merged; to resume.
    """
    def fingerprint(name):
        shards = [[shard.name, shard.size] for shard in sources[name][0]]
        return hashlib.sha256(json.dumps(shards).encode()).hexdigest(), name

    lanes = [{} for _ in range(num_lanes)]
    for (number, lane), name in itertools.product(enumerate(lanes), sorted(sources, key=fingerprint)):
        shards, _, epochs = sources[name]
        at = (state["lanes"][str(number)] if state else {}).get(name, {})
        packer, deal_to = PACKINGS[packing](T, **options), (shards, number, num_lanes, seed, epochs, encode)
        packer.rows = at.get("rows", 0)
        for ref in (Ref(*ref) for ref in at.get("buffered", ())):
            packer.restore(next(documents(*deal_to, ref._replace(token=0)))[0], ref)
        if not at.get("ended"):
            lane[name] = packer, documents(*deal_to, Ref(*at.get("next", ())))
    for g in itertools.count(state["rows"] if state else 0):
        lane, row = lanes[g % num_lanes], []
        while lane and not row:
            name = choose_source({name: sources[name][1] for name in lane}, g)
            packer, stream = lane[name]
            if not (row := packer.row(lambda stream=stream: next(stream, None))):
                del lane[name]    # ended: it leaves its part of [0, 1) to the others
        if not any(lanes):
            return
        yield np.concatenate(row) if row else np.zeros(0, np.int64)
