"""
Compare the loader's rows with the reference's, in random runs.

    python -m dev.reference --drawn 1000 --seed 0

A run has one to five legs. Each ends with a state, and the next leg loads it: on another number of
ranks, with another B, T, packing or weight, from folders that have moved or hold the same text as
tokens, with a source more or less. All ranks are loaders in this process, so only a single rank
reaches the end of a finite run (test_dataloader.py has real ranks). Run i is drawn from seed + i.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.reference --drawn N, run in the folder of dataset.py")

import collections
import json
import os
import random
import shutil
import tempfile
import time
import warnings
import zlib
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import dataset
from dataloader import PACKINGS, PackedLoader, merge_states
from dataset import UserError, list_shards, write_shard
from test_dataloader import (
    ByteTokenizer,
    Run,
    expected,
    first_positions,
    ids_of_text,
    next_row,
    rows_by_number,
)

# --------------------------------------------------------------------------------------------------
# Transforms and weights

def number_of(location, epoch):
    """It stays the same when a folder moves."""
    return zlib.crc32(f"{location.key} {epoch}".encode())

def filtered(ids, location, epoch):
    return None if number_of(location, epoch) % 3 == 0 else ids

def masked(ids, location, epoch):
    is_target = (np.arange(len(ids)) + location.row) % 3 != 1
    return np.where(is_target, ids, np.minimum(ids, ~ids))

def replaced(ids, location, epoch):
    """Random tokens, other ones in each epoch."""
    draw = np.random.Generator(np.random.PCG64(number_of(location, epoch)))
    return np.append(ids[:1], draw.integers(97, 123, draw.integers(0, 40)))

FIELDS = np.dtype([("id", "i4"), ("weight", "f4"), ("place", "i8"), ("is_odd", "?")])

def with_fields(ids, location, epoch):
    rows = np.zeros(len(ids), FIELDS)
    rows["id"] = masked(ids, location, epoch)
    rows["weight"] = np.arange(len(ids)) / 8 + epoch
    rows["place"] = 1000 * location.row + np.arange(len(ids))
    rows["is_odd"] = np.arange(len(ids)) % 2
    return None if location.row % 5 == 3 else rows

def rising(g):
    return (g + 1) / 20

def late(g):
    return max(0, g - 15) / 10

def in_waves(g):
    return 1 + g % 7

TRANSFORMS = [None, filtered, masked, replaced, with_fields]
WEIGHTS = [1, 1, 2, 0.3, 10, rising, late, in_waves]

# --------------------------------------------------------------------------------------------------
# Small corpora

class Corpus(NamedTuple):
    """Folders with the same documents: as text, as tokens, and a copy of one of these."""
    folders: list
    ids: dict    # {location.key: ids, BOS first; none for a null}

def draw_corpora(draw, root):
    letters = enumerate("abcdefgh")
    return [draw_corpus(draw, f"{root}/{i}", letter, i % 2 == 1) for i, letter in letters]

def draw_corpus(draw, root, letter, has_masks):
    """Masked ids have no folder of text. letter: a text that no other corpus has."""
    n = draw.choice([1, 1, 1, 2, 3])
    shards = {f"train-{i}.parquet": draw_shard(draw, letter) for i in range(n)}
    shards["val.parquet"] = [["validation"]]
    for name, groups in shards.items():
        write_shard(f"{root}/text/{name}", [pa.array(group, pa.string()) for group in groups])
    dataset.write_index(f"{root}/text")
    ids = {}
    for name, groups in shards.items():
        for row_group, documents in enumerate(groups):
            for row, document in enumerate(documents):
                ids[f"{name}:{row_group}:{row}"] = draw_ids(document, has_masks)
    write_tokens(root, ids, np.dtype("<i4" if has_masks else "<u2"))
    folders = [f"{root}/tokens"] if has_masks else [f"{root}/text", f"{root}/tokens"]
    shutil.copytree(folders[0], f"{root}/moved")
    return Corpus([*folders, f"{root}/moved"], ids)

def draw_shard(draw, letter):
    """Row groups of texts; None is a null."""
    if draw.random() < 0.1:
        return [[letter]]
    n, longest = draw.choice([(3, 40), (12, 30), (40, 20), (40, 60), (9, 300)])
    groups = []
    for _ in range(draw.randrange(1, 6)):
        n_documents = draw.choice([0, 1, n, draw.randrange(1, n + 1)])
        groups.append([draw_text(draw, longest) for _ in range(n_documents)])
    return [*groups, [draw_text(draw, longest) or letter]]

def draw_text(draw, longest):
    if draw.random() < 0.05:
        return None
    return "".join(draw.choices("abcdefghijklmnop ", k=draw.randrange(longest)))

def draw_ids(document, has_masks):
    if document is None:
        return np.zeros(0, int)
    ids = ids_of_text(document).astype(int)
    if has_masks:
        ids[1::3] = ~ids[1::3]
    return ids

def write_tokens(root, ids, dtype):
    """Write token shards of the text, like dev.prepare tokenize."""
    for shard in dataset.all_shards(f"{root}/text"):
        arrays = []
        for row_group, n in enumerate(shard.group_sizes):
            found = [ids[f"{shard.name}:{row_group}:{row}"] for row in range(n)]
            raw = [one.astype(dtype).tobytes() or None for one in found]
            arrays.append(pa.array(raw, pa.binary()))
        write_shard(f"{root}/tokens/{shard.name}", arrays, "tokens", {
            dataset.TOKEN_DTYPE: dtype.name, dataset.FINGERPRINT: "bytes",
            dataset.TEXT_BYTES: str(shard.text_bytes), dataset.TEXT_DIGEST: shard.digest})
    dataset.write_index(f"{root}/tokens")

# --------------------------------------------------------------------------------------------------
# What is drawn of a run

class Member(NamedTuple):
    """One source of a mixture."""
    corpus: Corpus
    folder: str
    weight: object         # a number or a function
    epochs: int | None

def draw_members(draw, corpora):
    """{number of the corpus: Member}. All are finite, or all endless, or only the first is."""
    numbers = draw.sample(range(len(corpora)), draw.choice([1, 1, 2, 3]))
    kind = draw.choice(["finite", "finite", "endless", "first endless"])
    members = {}
    for i in numbers:
        is_finite = kind == "finite" or (kind == "first endless" and i != numbers[0])
        epochs = draw.choice([1, 2, 3]) if is_finite else None
        folder = draw.choice(corpora[i].folders)
        members[i] = Member(corpora[i], folder, draw.choice(WEIGHTS), epochs)
    return members

def change_members(draw, corpora, members):
    """Move folders, add or remove a source, or change a weight."""
    members = dict(members)
    if draw.random() < 0.4:
        for i, member in members.items():
            members[i] = member._replace(folder=draw.choice(member.corpus.folders))
    chance = draw.random()
    some = draw.choice([*members])
    if chance < 0.15:
        new = draw.choice([i for i in range(len(corpora)) if i not in members])
        folder = draw.choice(corpora[new].folders)
        members[new] = Member(corpora[new], folder, 1, members[some].epochs)
    elif chance < 0.3 and len(members) > 1:
        del members[some]
    elif chance < 0.4:
        members[some] = members[some]._replace(weight=draw.choice([1, 5, 0.2]))
    return members

def draw_options(draw):
    return {"T": draw.choice([1, 4, 16, 31, 64]), "packing": draw.choice([*PACKINGS, "exactfit"]),
            "num_lanes": draw.choice([1, 4, 6, 12, 12, 24, 64]),
            "chunk_bytes": draw.choice([1, 100, 300, 1000, 3000, 10**6]),
            "shuffle_seed": draw.choice([None, 0, 7, 2**40])}

def change_options(draw, options):
    changed = dict(options)
    if draw.random() < 0.25:
        changed["T"] = draw.choice([1, 5, 20, 40])
    if draw.random() < 0.15:
        changed["packing"] = draw.choice([*PACKINGS])
    return changed

# --------------------------------------------------------------------------------------------------
# The loaders of a leg, and their reference

class Stop(NamedTuple):
    """How a leg ended, for the next one."""
    g: int
    positions: dict    # the reference's
    state: dict
    options: dict
    members: dict

def open_ranks(draw, members, transform, options, stop, W, **others):
    given = dict(options)
    if stop and draw.random() < 0.5:
        del given["num_lanes"], given["chunk_bytes"]    # as in the state
    in_any_order = draw.sample([*members.values()], len(members))
    weights = {member.folder: member.weight for member in in_any_order}
    epochs = {member.folder: member.epochs for member in in_any_order if member.epochs}
    loaders = []
    for rank in range(W):
        loader = PackedLoader(
            ByteTokenizer(), split="train", data_dir=weights, epochs=epochs, threads=1,
            transform=transform, rank=rank, world_size=W, **given, **others)
        if stop:
            load(loader, members, stop)
        loaders.append(loader)
    return loaders

def load(loader, members, stop):
    """Rank 0 warns once for each source more or less, and for another weight, T or packing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader.load_state_dict(stop.state)
    weights = {i: member.weight for i, member in members.items()}
    weights_before = {i: member.weight for i, member in stop.members.items()}
    changed = {i for i, _ in weights.items() ^ weights_before.items()}
    changed |= {key for key in ("T", "packing") if stop.options[key] != getattr(loader, key)}
    n = len(changed) if loader.rank == 0 else 0
    assert len(found) == n, [str(warning.message) for warning in found]

def reference_of(members, transform, options, loader):
    """A Run with the loader's order of sources, by fingerprint."""
    fingerprints = [source.fingerprint for source in loader.sources.values()]
    assert fingerprints == sorted(fingerprints)
    by_folder = {member.folder: (i, member) for i, member in members.items()}
    in_order = dict(by_folder[name] for name in loader.sources)

    def ids_of(location, epoch):
        _, member = by_folder[os.path.dirname(location.path)]
        ids = member.corpus.ids[location.key]
        if transform and len(ids):
            ids = transform(ids, location, epoch)
        return [] if ids is None else ids

    shards = {i: list_shards(member.folder, "train") for i, member in in_order.items()}
    weights = {i: member.weight for i, member in in_order.items()}
    epochs = {i: member.epochs for i, member in in_order.items()}
    return Run(shards, weights, epochs, ids_of, **options)

def positions_after_load(run, stop):
    """With another T or packing, each lane skips the rest of its current chunk."""
    positions = first_positions()
    if stop is None:
        return positions
    is_same = (run.T, run.packing) == (stop.options["T"], stop.options["packing"])
    for (lane, name), (n, i) in stop.positions.items():
        if name in run.sources:
            positions[lane, name] = (n, i) if is_same or i == 0 else (n + 1, 0)
    return positions

# --------------------------------------------------------------------------------------------------
# A drawn run, leg by leg

def compare_run(seed, corpora, counts):
    draw = random.Random(seed)
    members, transform = draw_members(draw, corpora), draw.choice(TRANSFORMS)
    options, stop = draw_options(draw), None
    for _ in range(draw.randrange(1, 6)):
        counts["legs"] += 1
        stop = compare_leg(draw, members, transform, options, stop, counts)
        if stop is None:
            break
        members = change_members(draw, corpora, members)
        options = change_options(draw, options)

def compare_leg(draw, members, transform, options, stop, counts):
    """Its Stop; None if the run had no row."""
    W = draw.choice([W for W in (1, 1, 2, 3, 4) if options["num_lanes"] % W == 0])
    B, drop_last = draw.choice([1, 2, 3, 5]), draw.random() < 0.5
    loaders = open_ranks(draw, members, transform, options, stop, W, B=B, drop_last=drop_last)
    run = reference_of(members, transform, options, loaders[0])
    g = stop.g if stop else 0
    positions = positions_after_load(run, stop)

    n_steps = draw.choice([0, 1, 4, 12, 40, 100])
    found, is_stuck = rows_ahead(run, g, positions.copy(), n_steps * W * B)
    if W > 1:
        found = before_a_lane_takes_over(run, g, found)
    if W > 1 or is_stuck:
        n_steps = min(n_steps, len(found) // (W * B))
    found = found[:n_steps * W * B]
    if drop_last:
        found = found[:len(found) // (W * B) * W * B]
    if g == 0 and n_steps and not found:
        with pytest.raises(UserError, match="no batch"):
            next(loaders[0])
        return None
    rows = [row for _, _, row in found]
    rows += [[]] * (-len(rows) % (W * B))    # masked
    delivered = {}
    for _ in range(n_steps):
        for loader in loaders:
            delivered |= rows_by_number(loader)
    compare_rows(run, g, rows, FIELDS if transform is with_fields else int, delivered)
    compare_stats(members, found, loaders)
    if is_stuck and W == 1:
        with pytest.raises(UserError, match="their weight is 0"):
            next(loaders[0])
    for k in range(len(found)):
        next_row(run, g + k, positions)
    states = [loader.state_dict() for loader in loaders]
    state = merge_states(json.loads(json.dumps(states)))
    for loader in loaders:
        loader.close()
    counts["rows"] += len(found)
    return Stop(g + len(rows), positions, state, options, members)

def rows_ahead(run, g, positions, n):
    """
    ([(lane, source, row)] of the next n rows, or all that are left; whether what is left then has
    weight 0)
    """
    found = []
    try:
        while len(found) < n and (row := next_row(run, g + len(found), positions)):
            found.append(row)
    except UserError:
        return found, True
    return found, False

def before_a_lane_takes_over(run, g, found):
    """Without a process group, ranks cannot take over from each other's lanes."""
    for k, (lane, *_) in enumerate(found):
        if lane != (g + k) % run.num_lanes:
            return found[:k]
    return found

def compare_rows(run, g, rows, dtype, delivered):
    numbers = [*range(g, g + len(rows))]
    assert sorted(delivered) == numbers, f"the loader has rows {sorted(delivered)}, not {numbers}"
    for number, row in zip(numbers, rows, strict=True):
        want, seen = expected(run, row, dtype), delivered[number]
        assert seen == want, f"row {number}: the loader has\n{seen}\nand the reference\n{want}"

def compare_stats(members, found, loaders):
    """Rows and tokens that each source delivered since the load."""
    want, seen = collections.Counter(), collections.Counter()
    for _, i, row in found:
        folder = members[i].folder
        want[folder, "rows"] += 1
        want[folder, "tokens"] += sum(stop - start for _, _, start, stop in row)
    for loader in loaders:
        for folder, counts in loader.stats().items():
            seen[folder, "rows"] += counts["rows"]
            seen[folder, "tokens"] += counts["tokens"]
    assert seen == want, f"stats are {seen}, not {want}"

def compare(n, first_seed=0):
    counts, began = collections.Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        folder, corpora = None, []
        for seed in range(first_seed, first_seed + n):
            if f"{root}/{seed // 100}" != folder:    # new corpora for every 100 seeds
                folder = f"{root}/{seed // 100}"
                corpora = draw_corpora(random.Random(seed // 100), folder)
            try:
                compare_run(seed, corpora, counts)
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(f"seed {seed}, {error}") from error
    seconds = time.perf_counter() - began
    print(f"{n:,} runs, {counts['legs']:,} legs, {counts['rows']:,} rows: no difference, "
          f"{seconds:.0f} s")
