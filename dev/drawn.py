"""
Drawn runs: the loader's rows beside those of dev/reference.py, one by one.

    python -m dev.reference --drawn 1000 --seed 0    ranks are loaders of this process
    python -m dev.reference --ranks 20               finite runs; ranks are real processes

A run has one to five legs. Each ends with a state, which the next one loads: on another number of
ranks, with another B, T or packing, from folders that have moved or hold tokens of the same text,
with a source more or less. Run number i is drawn from seed + i. At the end: how often each was
drawn, and what was not.
"""

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
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch.distributed as dist

import dataset
from dataloader import PACKINGS, PackedLoader, gather_states, merge_states
from dataset import list_shards, write_shard
from dev.reference import Run, next_row, places_at_start, rows_of

# --------------------------------------------------------------------------------------------------
# Tokenizer, transforms and weights

BOS = 256

class ByteTokenizer:
    """Tokens are bytes."""
    dtype = np.dtype(np.uint16)

    def get_bos_token_id(self):
        return BOS

    def get_vocab_size(self):
        return 257

    def fingerprint(self):
        return "bytes"

    def encode_documents(self, texts):
        arrays = [ids_of_text(text) for text in texts]
        bounds = np.cumsum([0, *map(len, arrays)])
        return np.concatenate(arrays), bounds

def ids_of_text(text):
    ids = np.frombuffer(text.encode(), np.uint8)
    return np.insert(ids.astype(np.uint16), 0, BOS)

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
    """The same documents in several folders."""
    folders: list
    ids: dict    # {location.key: its ids, BOS first; none of a null}

def draw_corpora(draw, root, n=8):
    return [draw_corpus(draw, f"{root}/{i}", with_tokens=i % 2 == 1) for i in range(n)]

def draw_corpus(draw, root, with_tokens):
    """In text, in text that has moved, and as tokens; or in tokens with masks, also moved."""
    n = draw.choice([1, 1, 1, 2, 3])
    shards = {f"train-{i}.parquet": draw_shard(draw) for i in range(n)}
    shards["val.parquet"] = [["validation"]]
    text, moved, tokens = (f"{root}/{name}" for name in ("text", "moved", "tokens"))
    ids = {}
    for name, groups in shards.items():
        write_shard(f"{text}/{name}", [pa.array(group, pa.string()) for group in groups])
        for row_group, row, document in numbered(groups):
            key = f"{name}:{row_group}:{row}"
            ids[key] = np.zeros(0, int) if document is None else ids_of_text(document).astype(int)
            if with_tokens and document:
                ids[key][1::3] = ~ids[key][1::3]
    dataset.write_index(text)
    write_tokens(text, tokens, shards, ids, np.dtype("<i4" if with_tokens else "<u2"))
    folders = [tokens] if with_tokens else [text, tokens]
    shutil.copytree(folders[0], moved)
    return Corpus([*folders, moved], ids)

def draw_shard(draw):
    """Row groups of texts; None: a null."""
    if draw.random() < 0.1:
        return [["a"]]
    n, longest = draw.choice([(3, 40), (12, 30), (40, 20), (40, 60), (9, 300)])
    groups = []
    for _ in range(draw.randrange(1, 6)):
        n_documents = draw.choice([0, 1, n, draw.randrange(1, n + 1)])
        groups.append([draw_text(draw, longest) for _ in range(n_documents)])
    return [*groups, [draw_text(draw, longest) or "a"]]

def draw_text(draw, longest):
    if draw.random() < 0.05:
        return None
    return "".join(draw.choices("abcdefghijklmnop ", k=draw.randrange(longest)))

def numbered(groups):
    """(row group, row, document) of each"""
    for row_group, documents in enumerate(groups):
        for row, document in enumerate(documents):
            yield row_group, row, document

def write_tokens(text, folder, shards, ids, dtype):
    """Token shards, as dev.prepare tokenize writes them."""
    of_text = [*list_shards(text, "train"), *list_shards(text, "val")]
    by_name = {shard.name: shard for shard in of_text}
    for name, groups in shards.items():
        metadata = {dataset.TOKEN_DTYPE: dtype.name, dataset.FINGERPRINT: "bytes",
                    dataset.TEXT_BYTES: str(by_name[name].text_bytes),
                    dataset.TEXT_DIGEST: by_name[name].digest}
        arrays = [[] for _ in groups]
        for row_group, row, document in numbered(groups):
            key = f"{name}:{row_group}:{row}"
            is_null = document is None
            arrays[row_group].append(None if is_null else ids[key].astype(dtype).tobytes())
        arrays = [pa.array(array, pa.binary()) for array in arrays]
        write_shard(f"{folder}/{name}", arrays, "tokens", metadata)
    dataset.write_index(folder)

# --------------------------------------------------------------------------------------------------
# A run: its loaders, and the reference

class Mixture(NamedTuple):
    """What a run is of. Sources are numbers of corpora."""
    corpora: list
    folders: dict     # {source: folder}
    weights: dict
    epochs: dict
    transform: object

def draw_mixture(draw, corpora, is_finite):
    sources = draw.sample(range(len(corpora)), draw.choice([1, 1, 2, 3]))
    folders = {source: draw.choice(corpora[source].folders) for source in sources}
    weights = {source: draw.choice(WEIGHTS) for source in sources}
    is_last = draw.random() < 0.3    # whether one source is endless
    epochs = {source: draw.choice([1, 2, 3]) if is_finite else None for source in sources}
    if is_last and not is_finite:
        epochs |= dict.fromkeys(sources[1:], 1)
    return Mixture(corpora, folders, weights, epochs, draw.choice(TRANSFORMS))

def draw_options(draw):
    return {"T": draw.choice([1, 4, 16, 31, 64]), "packing": draw.choice([*PACKINGS, "exactfit"]),
            "num_lanes": draw.choice([1, 4, 6, 12, 12, 24, 64]),
            "chunk_bytes": draw.choice([1, 100, 300, 1000, 3000, 10**6]),
            "shuffle_seed": draw.choice([None, 0, 7, 2**40])}

def make_loader(mixture, B, options, **others):
    weights = {mixture.folders[source]: weight for source, weight in mixture.weights.items()}
    epochs = {mixture.folders[source]: n for source, n in mixture.epochs.items() if n}
    return PackedLoader(
        ByteTokenizer(), B, split="train", data_dir=weights, epochs=epochs, threads=1,
        transform=mixture.transform, **options, **others)

def reference_of(mixture, options, order):
    """order: of the sources"""
    shards = {source: list_shards(mixture.folders[source], "train") for source in order}
    ids = {}
    for source, found in shards.items():
        for shard in found:
            for row_group, n in enumerate(shard.group_sizes):
                for row in range(n):
                    key = f"{shard.name}:{row_group}:{row}"
                    ids[shard.path, row_group, row] = mixture.corpora[source].ids[key]

    def ids_of(location, epoch):
        found = ids[location]
        if mixture.transform and len(found):
            found = mixture.transform(found, location, epoch)
        return [] if found is None else found

    weights = {source: mixture.weights[source] for source in order}
    return Run(shards, ids_of, weights=weights, epochs=mixture.epochs, **options)

def expected(run, row):
    """(inputs, targets, further fields ..., pieces) of a row, as the loader delivers them."""
    pieces, arrays = [], []
    offset = 0
    for location, epoch, start, stop in row:
        pieces.append((location, epoch, start, stop, offset))
        arrays.append(run.ids_of(location, epoch)[start:stop])
        offset += stop - start
    tokens = np.concatenate(arrays)
    ids = tokens["id"] if tokens.dtype.names else tokens
    ids = [*ids.tolist(), *[~BOS] * (run.T + 1 - len(ids))]
    columns = [[max(token, ~token) for token in ids[:-1]],
               [token if token >= 0 else -100 for token in ids[1:]]]
    for name in tokens.dtype.names or ():
        if name != "id":
            values = tokens[name].tolist() + [0] * (run.T + 1 - len(tokens))
            pairs = zip(ids[1:], values[1:], strict=True)
            columns.append([value if token >= 0 else type(value)(0) for token, value in pairs])
    return (*columns, pieces)

def rows_of_batch(loader):
    """{g: (inputs, targets, further fields ..., pieces)} of the next batch; {} at the end."""
    batch = next(loader, None)
    if batch is None:
        return {}
    columns = [tensor.tolist() for tensor in batch]
    rows = zip(*columns, loader.pieces(), strict=True)
    return dict(zip(loader.numbers, rows, strict=True))

# --------------------------------------------------------------------------------------------------
# A drawn run, leg by leg

def compare_run(seed, corpora, counts):
    """Adds what was drawn to `counts`; an AssertionError names the first row that differs."""
    draw = random.Random(seed)
    mixture = draw_mixture(draw, corpora, is_finite=draw.random() < 0.6)
    options = draw_options(draw)
    count_features(mixture, options, counts)
    stop = None
    for _ in range(draw.randrange(1, 6)):
        stop = compare_leg(draw, seed, mixture, options, stop, counts)
        if stop is None:
            break
        mixture = change_mixture(draw, mixture, counts)
        options = change_options(draw, options, counts)

class Stop(NamedTuple):
    """What a leg leaves to the next one."""
    g: int
    places: dict    # of the reference
    state: dict
    options: dict
    weights: dict
    n_ranks: int

def compare_leg(draw, seed, mixture, options, stop, counts):
    """-> its Stop, or None if nothing can follow"""
    W = draw.choice([W for W in (1, 1, 2, 3, 4) if options["num_lanes"] % W == 0])
    B = draw.choice([1, 2, 3, 5])
    drop_last = draw.random() < 0.5
    loaders = open_ranks(draw, mixture, B, W, options, stop, drop_last)
    run = reference_of(mixture, options, order_of(mixture, loaders[0]))
    places = places_after_load(run, stop)
    g = stop.g if stop else 0

    n_steps = draw.choice([0, 1, 4, 12, 40, 100])
    want = rows_ahead(run, g, places, n_steps * W * B)
    if W > 1:
        n_steps = min(n_steps, count_in_turn(run, g, want) // (W * B))
    want = want[:n_steps * W * B]
    n_missing = -len(want) % (W * B)    # in the last batch
    is_over = len(want) < n_steps * W * B
    counts["last batch dropped"] += n_missing > 0 and drop_last
    counts["last batch masked"] += n_missing > 0 and not drop_last
    if n_missing and drop_last:
        del want[n_missing - W * B:]
        n_missing = 0
    is_empty = is_over and g == 0 and not want
    counts["no batch at all"] += is_empty
    if is_empty:
        check_error(loaders[0], "no batch")
        return None

    rows = deliver(loaders, n_steps)
    compare_rows(seed, run, g, want, n_missing, rows)
    compare_stats(seed, mixture, want, loaders)
    count_rows(run, g, want, counts)
    count_resume(stop, W, is_over, counts)
    for k in range(len(want)):
        next_row(run, g + k, places)
    states = [loader.state_dict() for loader in loaders]
    state = merge_states(json.loads(json.dumps(states)))
    for loader in loaders:
        loader.close()
    g += len(want) + n_missing
    return Stop(g, places, state, options, mixture.weights, W)

def count_in_turn(run, g, rows):
    """Those before a lane takes over: ranks without a process group cannot do that for others."""
    for k, (lane, *_) in enumerate(rows):
        if lane != (g + k) % run.num_lanes:
            return k
    return len(rows)

def count_features(mixture, options, counts):
    counts["runs"] += 1
    counts[f"packing {options['packing']}"] += 1
    counts[f"sources: {len(mixture.weights)}"] += 1
    transform = mixture.transform
    counts[f"transform {transform and transform.__name__}"] += 1
    is_function = [callable(weight) for weight in mixture.weights.values()]
    counts["weights of functions"] += len(is_function) > 1 and any(is_function)
    counts["weights of numbers"] += len(is_function) > 1 and not all(is_function)
    endless = [n is None for n in mixture.epochs.values()]
    counts["endless"] += all(endless)
    counts["finite"] += not any(endless)
    counts["one source endless"] += any(endless) and not all(endless)
    counts["file order"] += options["shuffle_seed"] is None
    counts["shuffled"] += options["shuffle_seed"] is not None
    for source, folder in mixture.folders.items():
        has_masks = len(mixture.corpora[source].folders) == 2
        kind = os.path.basename(folder)
        counts["tokens with masks" if has_masks else f"from {kind}"] += 1

def change_mixture(draw, mixture, counts):
    """Folders that moved; a source more or less; another weight."""
    corpora, folders = mixture.corpora, dict(mixture.folders)
    weights, epochs = dict(mixture.weights), dict(mixture.epochs)
    if draw.random() < 0.4:
        for source, before in folders.items():
            folders[source] = draw.choice(corpora[source].folders)
            names = {os.path.basename(folder) for folder in (before, folders[source])}
            counts["moved at a load"] += len(names) == 2
            counts["tokens instead of text, or text"] += names == {"text", "tokens"}
    if draw.random() < 0.15:
        source = draw.choice([source for source in range(len(corpora)) if source not in folders])
        folders[source] = draw.choice(corpora[source].folders)
        weights[source] = 1
        epochs[source] = draw.choice([*epochs.values()])
        counts["a new source at a load"] += 1
    elif draw.random() < 0.2 and len(folders) > 1:
        source = draw.choice([*folders])
        left = [weights[other] for other in weights if other != source]
        if not all(callable(weight) for weight in left):
            del folders[source], weights[source], epochs[source]
            counts["a source less at a load"] += 1
    if draw.random() < 0.1:
        source = draw.choice([*weights])
        others = [weight for weight in (1, 5, 0.2) if weight != weights[source]]
        weights[source] = draw.choice(others)
        counts["another weight at a load"] += 1
    return mixture._replace(folders=folders, weights=weights, epochs=epochs)

def change_options(draw, options, counts):
    """Another T or packing."""
    changed = dict(options)
    if draw.random() < 0.25:
        changed["T"] = draw.choice([1, 5, 20, 40])
    if draw.random() < 0.15:
        changed["packing"] = draw.choice([*PACKINGS])
    counts["T changed at a load"] += changed["T"] != options["T"]
    counts["packing changed at a load"] += changed["packing"] != options["packing"]
    return changed

def open_ranks(draw, mixture, B, W, options, stop, drop_last):
    given = dict(options)
    if stop and draw.random() < 0.5:
        del given["num_lanes"], given["chunk_bytes"]    # as in the state
    folders = [*mixture.weights]
    draw.shuffle(folders)    # the order of the arguments does not matter
    weights = {source: mixture.weights[source] for source in folders}
    mixture = mixture._replace(weights=weights)
    loaders = []
    for rank in range(W):
        loader = make_loader(mixture, B, given, rank=rank, world_size=W, drop_last=drop_last)
        if stop:
            check_warnings(loader, mixture, stop)
        loaders.append(loader)
    return loaders

def check_warnings(loader, mixture, stop):
    """Loads the state. A source more or less, and another weight, are a line each, of rank 0."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader.load_state_dict(stop.state)
    changed = mixture.weights.keys() ^ stop.weights.keys()
    changed |= {source for source in mixture.weights.keys() & stop.weights.keys()
                if mixture.weights[source] != stop.weights[source]}
    changed |= {name for name in ("T", "packing") if stop.state[name] != getattr(loader, name)}
    n = len(changed) if loader.rank == 0 else 0
    assert len(found) == n, [str(warning.message) for warning in found]

def order_of(mixture, loader):
    """The sources in the loader's order: by fingerprint."""
    source_of = {folder: source for source, folder in mixture.folders.items()}
    fingerprints = [source.fingerprint for source in loader.sources.values()]
    assert fingerprints == sorted(fingerprints)
    return [source_of[name] for name in loader.sources]

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

def rows_ahead(run, g, places, n):
    """The next n rows of the reference, or all that are left."""
    places = {key: [*place] for key, place in places.items()}
    rows = rows_of(run, g, places)
    return list(itertools.islice(rows, n))

def deliver(loaders, n_steps):
    """{g: row} of this many steps, or up to the end."""
    rows = {}
    for _ in range(n_steps):
        for loader in loaders:
            rows |= rows_of_batch(loader)
    return rows

def check_error(loader, words):
    try:
        next(loader)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"expected an error: {words}")

def compare_rows(seed, run, g, want, n_missing, rows):
    numbers = [*range(g, g + len(want) + n_missing)]
    if sorted(rows) != numbers:
        raise AssertionError(f"seed {seed}: rows {sorted(rows)} were delivered, not {numbers}")
    for k, (_, _, row) in enumerate(want):
        if rows[g + k] != expected(run, row):
            raise AssertionError(f"seed {seed}, row {g + k}: the loader has\n{rows[g + k]}\nand "
                                 f"the reference\n{expected(run, row)}")
    for k in range(len(want), len(numbers)):
        inputs, targets, *fields, pieces = rows[g + k]
        assert {*inputs} == {BOS} and {*targets} == {-100} and not pieces, f"seed {seed}: masked"
        assert not any(map(any, fields)), f"seed {seed}: fields of a masked row"

def compare_stats(seed, mixture, want, loaders):
    """Rows and tokens of each source since the load."""
    for source, folder in mixture.folders.items():
        rows = [row for _, name, row in want if name == source]
        n_tokens = sum(stop - start for row in rows for _, _, start, stop in row)
        stats = [loader.stats()[folder] for loader in loaders]
        found = [sum(of_rank.get(name, 0) for of_rank in stats) for name in ("rows", "tokens")]
        assert found == [len(rows), n_tokens], f"seed {seed}: stats {stats}"

def count_resume(stop, W, is_over, counts):
    counts["resumes"] += stop is not None
    counts["resumes on other ranks"] += stop is not None and stop.n_ranks != W
    counts["resumes on 2 to 4 ranks"] += stop is not None and W > 1
    counts["legs that reached the run's end"] += is_over

def count_rows(run, g, want, counts):
    counts["rows"] += len(want)
    for k, (lane, _, row) in enumerate(want):
        counts["rows by a lane that takes over"] += lane != (g + k) % run.num_lanes
        counts["rows after the first epoch"] += any(epoch > 1 for _, epoch, _, _ in row)
        counts["rows with a cut document"] += any(start > 0 for _, _, start, _ in row)

# --------------------------------------------------------------------------------------------------
# Many of them

def compare(n, first_seed=0):
    counts, began = collections.Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        number, corpora = None, []
        for seed in range(first_seed, first_seed + n):
            if seed // 100 != number:    # new corpora for every 100 seeds
                number = seed // 100
                shutil.rmtree(f"{root}/{number - 1}", ignore_errors=True)
                corpora = draw_corpora(random.Random(number), f"{root}/{number}")
            compare_run(seed, corpora, counts)
    print_counts(counts, time.perf_counter() - began)
    return counts

def print_counts(counts, seconds):
    for name, count in sorted(counts.items()):
        print(f"{name:<40}{count:>10,}")
    print(f"no difference, {seconds:.0f} s")
    never = [name for name, count in counts.items() if not count]
    if never:
        print("never drawn:", ", ".join(never))

# --------------------------------------------------------------------------------------------------
# Real ranks: processes of torch.distributed

class Job(NamedTuple):
    """What one rank does."""
    mixture: Mixture
    options: dict
    B: int
    world_size: int
    rendezvous: str    # a file
    state: dict | None
    n_steps: int | None    # None: to the end

def run_rank(job, rank):
    """-> ({g: row}, rank 0's state of all)"""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=rank,
                            world_size=job.world_size)
    try:
        with make_loader(job.mixture, job.B, job.options) as loader:
            if job.state:
                loader.load_state_dict(job.state)
            rows = {}
            for _ in itertools.count() if job.n_steps is None else range(job.n_steps):
                found = rows_of_batch(loader)
                if not found:
                    break
                rows |= found
            return rows, gather_states(loader)
    finally:
        dist.destroy_process_group()

def run_ranks(processes, job):
    """-> ({g: row} of all ranks, the state)"""
    with tempfile.TemporaryDirectory() as folder:
        job = job._replace(rendezvous=f"{folder}/rendezvous")
        futures = [processes.submit(run_rank, job, rank) for rank in range(job.world_size)]
        results = [future.result(timeout=100) for future in futures]
    n_rows = {len(rows) for rows, _ in results}
    assert len(n_rows) == 1, f"ranks delivered {n_rows} rows"
    merged = {}
    for rows, _ in results:
        merged |= rows
    return merged, results[0][1]

def compare_ranks(n, first_seed=0):
    """Finite runs: a stop within the last batches, a resume on other ranks, to the end."""
    counts, began = collections.Counter(), time.perf_counter()
    with (tempfile.TemporaryDirectory() as root,
          ProcessPoolExecutor(4, get_context("spawn")) as processes):
        corpora = draw_corpora(random.Random(first_seed), root, n=12)
        for seed in range(first_seed, first_seed + n):
            compare_run_on_ranks(seed, corpora, processes, counts)
    for name in ("endless", "one source endless"):
        del counts[name]
    print_counts(counts, time.perf_counter() - began)
    return counts

def compare_run_on_ranks(seed, corpora, processes, counts):
    draw = random.Random(seed)
    mixture = draw_mixture(draw, corpora, is_finite=True)
    options = {**draw_options(draw), "num_lanes": draw.choice([12, 24])}
    count_features(mixture, options, counts)
    with make_loader(mixture, 1, options, rank=0, world_size=1) as loader:
        run = reference_of(mixture, options, order_of(mixture, loader))
    want = list(rows_of(run))
    if not want:
        return
    first, second = draw.sample([2, 3, 4], 2)
    B = draw.choice([1, 2, 3])
    n_steps = -(-len(want) // (first * B))
    stop = max(0, n_steps - draw.randrange(4))
    job = Job(mixture, options, B, first, "", None, stop)
    rows, state = run_ranks(processes, job)
    job = job._replace(B=draw.choice([1, 2, 5]), world_size=second, state=state, n_steps=None)
    tail, _ = run_ranks(processes, job)
    rows |= tail
    n_missing = len(rows) - len(want)
    assert 0 <= n_missing < job.B * second or not tail, f"seed {seed}: {n_missing} masked rows"
    compare_rows(seed, run, 0, want, n_missing, rows)
    count_rows(run, 0, want, counts)
    counts["stopped before the end"] += stop < n_steps
    counts["rows after the stop"] += len(tail)
    counts["masked rows"] += n_missing
