"""
The rows of one folder, slow and obvious; only packings are the loader's. `python -m dev.reference` prints
those of a small corpus: 4:0[2:7] is tokens 2 to 6 of row 0 in row group 4. Tests compare the loader with it,
and with dev/tests/oracle.py, which adds mixtures, ends and changes of T.
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
    """A lane's chunks, in order: {(turn, number): [(path, row group, row), ...]}"""
    groups = [(shard, i, n) for shard in shards for i, n in enumerate(shard.group_sizes)]
    full, n_documents = [k for k, (*_, n) in enumerate(groups) if n], sum(n for *_, n in groups)
    split = next(k for k in itertools.count(1) if (t := sum(min(k, n) for *_, n in groups)) == n_documents
                 or (t >= num_lanes and -t % num_lanes <= t // 4))    # lanes have about equally many
    order = [full[k] for k in permutation(len(full), seed, epoch, 0)]
    turns = [(k, i) for k in order for i in range(min(split, groups[k][2]))]
    chunks, place, filled = {}, None, chunk_bytes    # of the last chunk, which small turns join
    for turn in range(lane, len(turns), num_lanes):
        (k, i), (shard, group, n) = turns[turn], groups[turns[turn][0]]
        found = [(shard.path, group, int(row)) for row in permutation(n, seed, epoch, 1, k)[i::split]]
        n_bytes = shard.text_bytes * len(found) // sum(shard.group_sizes)
        n = max(1, min(round(n_bytes / chunk_bytes), len(found)))
        if n == 1 and filled < chunk_bytes:
            chunks[place] += found
            filled += n_bytes
        else:
            for number in range(n):
                place = turn, number
                chunks[place] = found[number * len(found) // n:(number + 1) * len(found) // n]
            filled = n_bytes if n == 1 else chunk_bytes
    return chunks

def rows_of(lengths, T, packing, seed, epoch, place):
    """The rows of a chunk: [[(document, start, stop), ...], ...], tokens start to stop of its documents."""
    full = [d for d, n in enumerate(lengths) if n]
    rows = PACKINGS[packing]([lengths[d] for d in full], T + 1) if full else []
    rows = sorted(([(full[i], start, stop) for i, start, stop in row] for row in rows), key=min)
    return [rows[k] for k in permutation(len(rows), seed, epoch, 2, *place)]

if __name__ == "__main__":
    texts = [["a" * 3, "b" * 9, "c" * 4, "d" * 6]] * 5    # five row groups; a token is a letter, or BOS
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "val"):
            write_shard(f"{folder}/{name}.parquet", map(pa.array, texts))
        shards = list_shards(folder, "train")
    for lane, g in enumerate([itertools.count(0, 2), itertools.count(1, 2)]):
        for place, found in chunks_of(lane, 1, shards, 2, 0, 60).items():
            print(f"lane {lane}, chunk {place}:", *("{1}:{2}".format(*document) for document in found))
            for row in rows_of([len(texts[j][i]) + 1 for _, j, i in found], 15, "exactfit", 0, 1, place):
                print(f"  row {next(g)}:", *("{1}:{2}[{3}:{4}]".format(*found[d], a, b) for d, a, b in row))
