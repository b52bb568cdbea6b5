"""
Drawn runs: the loader's rows beside those of dev/reference.py, one by one.

    python -m dev.reference --drawn 1000 --seed 0

A run has one to five legs. Each ends with a state, which the next one loads: on another number of
ranks, with another B, T or packing, from folders that have moved or hold tokens of the same text,
with a source more or less. Ranks are loaders of this process, so only a single one reaches the end
of a finite run; test_dataloader.py has real ranks. Run number i is drawn from seed + i.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.reference --drawn N, typed where dataset.py is")

import collections
import itertools
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

import dataset
from dataloader import PACKINGS, PackedLoader, merge_states
from dataset import list_shards, write_shard
from dev.reference import Run, next_row, places_at_start, rows_of
from test_dataloader import BOS, ByteTokenizer, ids_of_text

# --------------------------------------------------------------------------------------------------
# Transforms and weights

def number_of(location, epoch):
    """The same after a folder has moved."""
    return zlib.crc32(f"{location.key} {epoch}".encode())

def filtered(ids, location, epoch):
    return None if number_of(location, epoch) % 3 == 0 else ids

def masked(ids, location, epoch):
    has_loss = (np.arange(len(ids)) + location.row) % 3 != 1
    return np.where(has_loss, ids, np.minimum(ids, ~ids))

def replaced(ids, location, epoch):
    """Random tokens, of another number in each epoch."""
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
    return 1.0 if g >= 15 else 1e-9    # all weights may not be 0

def in_waves(g):
    return 1 + g % 7

TRANSFORMS = [None, filtered, masked, replaced, with_fields]
WEIGHTS = [1, 1, 2, 0.3, 10, rising, late, in_waves]

# --------------------------------------------------------------------------------------------------
# Small corpora

class Corpus(NamedTuple):
    """The same documents in several folders: text, tokens and one of these that has moved."""
    folders: list
    ids: dict    # {location.key: its ids, BOS first; none of a null}

def draw_corpora(draw, root):
    letters = enumerate("abcdefgh")
    return [draw_corpus(draw, f"{root}/{i}", letter, i % 2 == 1) for i, letter in letters]

def draw_corpus(draw, root, letter, has_masks):
    """With masks there is no folder of text. letter: the smallest text, not of other corpora."""
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
    """Row groups of texts; None: a null."""
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
    """Token shards of the text, as dev.prepare tokenize writes them."""
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
    """A source of a mixture."""
    corpus: Corpus
    folder: str
    weight: object         # a number or a function
    epochs: int | None

def draw_members(draw, corpora):
    """{number of the corpus: Member}. All are finite, all endless, or only the first one."""
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
    """Folders that moved; a source more or less; another weight."""
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
    """What a leg leaves to the next one."""
    g: int
    places: dict    # of the reference
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
    """Of each source more or less, and of another weight, T or packing, rank 0 warns in a line."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader.load_state_dict(stop.state)
    weights = {i: member.weight for i, member in members.items()}
    weights_before = {i: member.weight for i, member in stop.members.items()}
    changed = {i for i, _ in weights.items() ^ weights_before.items()}
    changed |= {name for name in ("T", "packing") if stop.state["adjustable"][name] != getattr(loader, name)}
    n = len(changed) if loader.rank == 0 else 0
    assert len(found) == n, [str(warning.message) for warning in found]

def reference_of(members, transform, options, loader):
    """Sources in the loader's order: by fingerprint."""
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
    return Run(shards, ids_of, weights=weights, epochs=epochs, **options)

def places_after_load(run, stop):
    """With another T or packing, what is left of the chunks in progress is skipped."""
    places = places_at_start(run)
    if stop is None:
        return places
    is_same = (run.T, run.packing) == (stop.options["T"], stop.options["packing"])
    for key in places.keys() & stop.places.keys():
        n, i = stop.places[key]
        places[key] = [n, i] if is_same or i == 0 else [n + 1, 0]
    return places

def expected(run, row, dtype):
    """(inputs, targets, further fields ..., pieces) of a row, as the loader delivers them."""
    pieces, arrays = [], [np.zeros(0, dtype)]
    offset = 0
    for location, epoch, start, stop in row:
        pieces.append((location, epoch, start, stop, offset))
        arrays.append(run.ids_of(location, epoch)[start:stop])
        offset += stop - start
    tokens = np.concatenate(arrays)
    n_missing = run.T + 1 - len(tokens)
    ids = tokens["id"] if tokens.dtype.names else tokens
    ids = [*ids.tolist(), *[~BOS] * n_missing]
    columns = [[max(token, ~token) for token in ids[:-1]],
               [token if token >= 0 else -100 for token in ids[1:]]]
    for name in tokens.dtype.names or ():
        if name != "id":
            values = [*tokens[name].tolist(), *[0] * n_missing]
            pairs = zip(ids[1:], values[1:], strict=True)
            columns.append([value if token >= 0 else 0 for token, value in pairs])
    return (*columns, pieces)

def rows_of_batch(loader):
    """{g: (inputs, targets, further fields ..., pieces)} of the next batch; {} at the end."""
    batch = next(loader, None)
    if batch is None:
        return {}
    columns = [tensor.tolist() for tensor in batch]
    rows = zip(*columns, loader.pieces(), strict=True)
    return dict(zip(loader.row_numbers, rows, strict=True))

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
    """-> its Stop, or None if nothing can follow"""
    W = draw.choice([W for W in (1, 1, 2, 3, 4) if options["num_lanes"] % W == 0])
    B, drop_last = draw.choice([1, 2, 3, 5]), draw.random() < 0.5
    loaders = open_ranks(draw, members, transform, options, stop, W, B=B, drop_last=drop_last)
    run = reference_of(members, transform, options, loaders[0])
    g = stop.g if stop else 0
    places = places_after_load(run, stop)

    n_steps = draw.choice([0, 1, 4, 12, 40, 100])
    found = rows_ahead(run, g, places, n_steps * W * B)
    if W > 1:
        n_steps = min(n_steps, count_in_turn(run, g, found) // (W * B))
    found = found[:n_steps * W * B]
    if drop_last:
        found = found[:len(found) // (W * B) * W * B]
    if g == 0 and n_steps and not found:
        check_no_batch(loaders[0])
        return None
    rows = [row for _, _, row in found]
    rows += [[]] * (-len(rows) % (W * B))    # masked
    delivered = {}
    for _ in range(n_steps):
        for loader in loaders:
            delivered |= rows_of_batch(loader)
    compare_rows(run, g, rows, FIELDS if transform is with_fields else int, delivered)
    compare_stats(members, found, loaders)
    for k in range(len(found)):
        next_row(run, g + k, places)
    states = [loader.state_dict() for loader in loaders]
    state = merge_states(json.loads(json.dumps(states)))
    for loader in loaders:
        loader.close()
    counts["rows"] += len(found)
    return Stop(g + len(rows), places, state, options, members)

def rows_ahead(run, g, places, n):
    """The next n rows of the reference, or all that are left: [(lane, source, row)]"""
    places = {key: [*place] for key, place in places.items()}
    return [*itertools.islice(rows_of(run, g, places), n)]

def count_in_turn(run, g, found):
    """Those before a lane takes over: ranks without a process group cannot do that for others."""
    for k, (lane, *_) in enumerate(found):
        if lane != (g + k) % run.num_lanes:
            return k
    return len(found)

def check_no_batch(loader):
    try:
        next(loader)
    except ValueError as error:
        assert "no batch" in str(error), error
    else:
        raise AssertionError("a run without a row is no error")

def compare_rows(run, g, rows, dtype, delivered):
    numbers = [*range(g, g + len(rows))]
    assert sorted(delivered) == numbers, f"rows {sorted(delivered)} were delivered, not {numbers}"
    for number, row in zip(numbers, rows, strict=True):
        want, seen = expected(run, row, dtype), delivered[number]
        assert seen == want, f"row {number}: the loader has\n{seen}\nand the reference\n{want}"

def compare_stats(members, found, loaders):
    """Rows and tokens of each source since the load."""
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
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {error}") from error
    seconds = time.perf_counter() - began
    print(f"{n:,} runs, {counts['legs']:,} legs, {counts['rows']:,} rows: no difference, "
          f"{seconds:.0f} s")
