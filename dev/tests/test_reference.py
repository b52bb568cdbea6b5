"""
The loader has the rows of dev/reference.py in drawn runs.

    NANOLOADER_EXAMPLES=50 python -m pytest -s dev/tests/test_reference.py    # many other runs

A run has one to four legs. Each ends with a state, and the next leg loads it: on another number of
ranks, with another B, T, packing or weight, from folders that have moved or hold the same text as
tokens, with a source more or less. A source that has left may come back.
"""

import collections
import itertools
import json
import os
import shutil
import tempfile
import warnings
import zlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset
from dataloader import PACKINGS, PackedLoader, merge_states
from dataset import UserError, list_shards
from dev import reference
from dev.reference import Run, chunks_of, piles_of, rows_of_chunk, rows_of_lane, rows_of_run
from test_dataloader import (
    BOS,
    TIMES,
    ByteTokenizer,
    rows_by_number,
    texts_of,
    write,
    write_tokens,
)

# --------------------------------------------------------------------------------------------------
# What is drawn

def number_of(location, epoch):
    """The same after a folder has moved."""
    return zlib.crc32(f"{location.key} {epoch}".encode())

def filtered(ids, location, epoch):
    return None if number_of(location, epoch) % 3 == 0 else ids

def masked(ids, location, epoch):
    is_target = (np.arange(len(ids)) + location.row) % 3 != 1
    return np.where(is_target, ids, np.minimum(ids, ~ids))

def replaced(ids, location, epoch):
    """Other tokens in each epoch."""
    draw = np.random.default_rng(number_of(location, epoch))
    n = draw.integers(0, 40)
    return np.append(ids[:1], draw.integers(97, 123, n))

def rising(g):
    return (g + 1) / 20

def late(g):
    return max(0, g - 15) / 10

LENGTH = st.none() | st.integers(0, 30) | st.integers(0, 300)    # None: a null
GROUPS = st.lists(st.lists(LENGTH, max_size=9), max_size=4)
CORPUS = st.fixed_dictionaries({
    "shards": st.lists(GROUPS, min_size=1, max_size=3),
    "times": st.sampled_from([1, 5]),    # each group is there so often
    "has_masks": st.booleans()})
TRANSFORM = st.sampled_from([None, filtered, masked, replaced])
WEIGHT = st.sampled_from([1, 1, 2, 0.3, 10, rising, late])
T = st.sampled_from([1, 4, 16, 33, 64])
PACKING = st.sampled_from([*PACKINGS])
CHANGE = st.sampled_from(["nothing", "folders", "weight", "T", "packing", "join", "leave"])
OPTIONS = st.fixed_dictionaries({
    "T": T,
    "packing": PACKING,
    "num_lanes": st.sampled_from([1, 4, 6, 12, 24]),
    "chunk_bytes": st.sampled_from([1, 100, 300, 1000, 10**6]),
    "shuffle_seed": st.sampled_from([None, 0, 7, 2**40])})

class Corpus(NamedTuple):
    """Folders with the same documents: as text, as tokens, and a copy of one of these."""
    folders: list
    ids: dict       # {location.key: ids, BOS first; none for a null}

class Source(NamedTuple):
    corpus: Corpus
    folder: str
    weight: object         # a number or a function
    epochs: int | None

class Stop(NamedTuple):
    """How a leg ended."""
    g: int
    places: dict       # {(lane, source): (n, i)}, the row after the last one
    state: dict
    run: Run

def write_corpus(root, letter, shards, times, has_masks):
    """letter: no other corpus has its texts. Masked ids have no folder of text."""
    texts = []
    for k, groups in enumerate(shards):
        lengths = [*times * groups, [k + 1]]    # no two shards are the same
        texts.append([[text_of(letter, n) for n in group] for group in lengths])
    folders = [write(f"{root}/text", *texts)]
    dataset.write_index(folders[0])
    encode = masked_ids_of if has_masks else ids_of
    ids = {location.key: encode(text) for location, text in texts_of(folders[0]).items()}
    dtype = "int32" if has_masks else "uint16"
    folders.append(write_tokens(f"{root}/tokens", folders[0], encode, dtype))
    if has_masks:
        del folders[0]
    shutil.copytree(folders[0], f"{root}/moved")
    return Corpus([*folders, f"{root}/moved"], ids)

def text_of(letter, n):
    return n if n is None else (f"{letter}{n}-" * n)[:n]

def ids_of(text):
    return [] if text is None else [BOS, *text.encode()]

def masked_ids_of(text):
    return [~token if k % 3 == 1 else token for k, token in enumerate(ids_of(text))]

def draw_sources(draw, corpora):
    """{letter: Source}. All are finite, or all endless, or only the first is."""
    letters = draw(st.lists(st.sampled_from([*corpora]), min_size=1, unique=True))
    kind = draw(st.sampled_from(["finite", "finite", "endless", "first endless"]))
    sources = {}
    for letter in letters:
        is_endless = kind == "endless" or (kind == "first endless" and not sources)
        epochs = None if is_endless else draw(st.integers(1, 3))
        folder = draw(st.sampled_from(corpora[letter].folders))
        sources[letter] = Source(corpora[letter], folder, draw(WEIGHT), epochs)
    return sources

def change(draw, corpora, sources, options):
    """Some of what may differ from leg to leg."""
    sources, options = dict(sources), dict(options)
    some = draw(st.sampled_from([*sources]))
    others = [letter for letter in corpora if letter not in sources]
    what = draw(CHANGE)
    if what == "folders":
        for letter, source in sources.items():
            folder = draw(st.sampled_from(source.corpus.folders))
            sources[letter] = source._replace(folder=folder)
    elif what == "weight":
        sources[some] = sources[some]._replace(weight=draw(WEIGHT))
    elif what == "T":
        options["T"] = draw(T)
    elif what == "packing":
        options["packing"] = draw(PACKING)
    elif what == "join" and others:
        letter, corpus = others[0], corpora[others[0]]
        sources[letter] = Source(corpus, corpus.folders[0], 1, sources[some].epochs)
    elif what == "leave" and len(sources) > 1:
        del sources[some]
    return sources, options

# --------------------------------------------------------------------------------------------------
# A leg, by the loader and by the reference

@pytest.fixture(scope="module")
def counts():
    counts = collections.Counter()
    yield counts
    print(f"\n{counts['runs']:,} runs, {counts['legs']:,} legs, {counts['rows']:,} rows")
    assert counts["rows"] > 30 * counts["runs"]

@settings(max_examples=60 * TIMES, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(CORPUS, min_size=1, max_size=3), OPTIONS, TRANSFORM, st.data())
def test_drawn_runs_have_the_rows_of_the_reference(counts, corpora, options, transform, data):
    counts["runs"] += 1
    with tempfile.TemporaryDirectory() as root:
        corpora = {letter: write_corpus(f"{root}/{letter}", letter, **corpus)
                   for letter, corpus in zip("abc", corpora, strict=False)}
        sources, stop = draw_sources(data.draw, corpora), None
        for _ in range(data.draw(st.integers(1, 4))):
            counts["legs"] += 1
            stop = compare_leg(data.draw, sources, transform, options, stop, counts)
            if stop is None:    # the run has no row
                break
            sources, options = change(data.draw, corpora, sources, options)

def compare_leg(draw, sources, transform, options, stop, counts):
    """Its Stop; None if the run has no row."""
    W = draw(st.sampled_from([1, 2, 3, 4, 7]))
    B = draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    n_steps = draw(st.sampled_from([0, 1, 4, 12, 40]))
    most = n_steps * W * B
    loaders = open_ranks(sources, transform, options, stop, W, B=B, drop_last=drop_last)
    run = run_of(sources, transform, options, loaders[0])
    g = stop.g if stop else 0
    rows = [*itertools.islice(rows_of_run(run, piles_from(run, stop), g), most)]
    is_over = len(rows) < most
    if drop_last:
        rows = rows[:len(rows) // (W * B) * W * B]
    if g == 0 and n_steps and not rows:
        with pytest.raises(UserError, match="no batch"):
            next(loaders[0])
        return None

    delivered = {}
    for _ in range(n_steps):
        for loader in loaders:
            delivered |= rows_by_number(loader)
    n_masked = -len(rows) % (W * B)
    want = [row.pieces for row in rows] + n_masked * [[]]
    assert sorted(delivered) == [*range(g, g + len(want))]
    for number, pieces in enumerate(want, g):
        assert delivered[number] == expected(run, pieces)
    compare_stats(sources, rows, loaders)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    counts["rows"] += len(rows)
    state = merge_states(json.loads(json.dumps(states)))
    return Stop(g + len(want), places_at_stop(run, stop, rows, is_over), state, run)

def open_ranks(sources, transform, options, stop, W, **others):
    weights = {source.folder: source.weight for source in sources.values()}
    epochs = {source.folder: source.epochs for source in sources.values()}
    loaders = []
    for rank in range(W):
        loader = PackedLoader(ByteTokenizer(), split="train", data_dir=weights, epochs=epochs,
                              threads=1, transform=transform, rank=rank, world_size=W,
                              **options, **others)
        if stop:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")    # of what has changed
                loader.load_state_dict(stop.state)
        loaders.append(loader)
    return loaders

def run_of(sources, transform, options, loader):
    by_folder = {source.folder: (letter, source) for letter, source in sources.items()}
    in_order = dict(by_folder[folder] for folder in loader.sources)

    def ids_of(location, epoch):
        _, source = by_folder[os.path.dirname(location.path)]
        ids = source.corpus.ids[location.key]
        if transform and ids:
            ids = transform(np.array(ids), location, epoch)
        return [] if ids is None else [*map(int, ids)]

    shards = {letter: list_shards(source.folder, "train") for letter, source in in_order.items()}
    weights = {letter: source.weight for letter, source in in_order.items()}
    epochs = {letter: source.epochs for letter, source in in_order.items()}
    return Run(shards, weights, epochs, ids_of, **options)

def places_after(run, stop):
    """{(lane, source): (n, i)}. With another T or packing, lanes skip the rest of their chunks."""
    if stop is None:
        return {}
    if (run.T, run.packing) == (stop.run.T, stop.run.packing):
        return dict(stop.places)
    places = {}
    for key, (n, i) in stop.places.items():
        places[key] = (n + 1, 0) if i else (n, 0)
    return places

def piles_from(run, stop):
    places, piles = places_after(run, stop), piles_of(run)
    for lane, pile in enumerate(piles):
        for letter in run.sources:
            n, i = places.get((lane, letter), (0, 0))
            pile[letter] = rows_of_lane(run, letter, lane, n, i)
            if rows_of_chunk(run, letter, lane, n) is None:
                del pile[letter]
    return piles

def places_at_stop(run, stop, rows, is_over):
    """The place after the last row; the end, if the run is over. Sources that left stay."""
    places = places_after(run, stop)
    for row in rows:
        places[row.lane, row.source] = row.n, row.i + 1
    for lane, letter in itertools.product(range(run.num_lanes), run.sources):
        if is_over:    # also if rows were dropped
            n_chunks = run.epochs[letter] * len(chunks_of(run, letter, 1)[lane])
            n, _ = places.get((lane, letter), (0, 0))
            places[lane, letter] = max(n, n_chunks), 0
    return places

def expected(run, pieces):
    """(inputs, targets, pieces) of a row. Its end is filled with masked BOS; ~t is a masked t."""
    ids, located = [], []
    for location, epoch, start, stop in pieces:
        located.append((location, epoch, start, stop, len(ids)))
        ids += run.ids_of(location, epoch)[start:stop]
    ids += (run.T + 1 - len(ids)) * [~BOS]
    inputs = [max(token, ~token) for token in ids[:-1]]
    targets = [token if token >= 0 else -100 for token in ids[1:]]
    return inputs, targets, located

def compare_stats(sources, rows, loaders):
    """Rows and tokens that each source delivered since the load."""
    want, seen = collections.Counter(), collections.Counter()
    for row in rows:
        folder = sources[row.source].folder
        want[folder, "rows"] += 1
        for _, _, start, stop in row.pieces:
            want[folder, "tokens"] += stop - start
    for loader in loaders:
        for folder, counted in loader.stats().items():
            seen[folder, "rows"] += counted["rows"]
            seen[folder, "tokens"] += counted["tokens"]
    assert seen == want

# --------------------------------------------------------------------------------------------------
# The printed example

def test_example_has_every_letter_once(capsys):
    """Shuffled, two lanes of two chunks, exactfit."""
    reference.print_example()
    _, line, rows = capsys.readouterr().out.split("\n\n")
    assert line.count("chunk") == 4
    letters = collections.Counter()
    for g, printed in enumerate(rows.splitlines()[1:]):
        before, row = printed.split(": ")
        assert before == f"  row {g}, from lane {g % 2}" and len(row) == 16
        letters.update(row)
    documents = [text for groups in reference.SHARDS for group in groups for text in group]
    assert all(letters[text[0]] == len(text) for text in documents)
