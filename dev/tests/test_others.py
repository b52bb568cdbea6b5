"""
Other loaders' tests as ours: what they promise, and what we do. No code is theirs.

    python -m pytest dev/tests/test_others.py

Their files:
    LanceDB       python/python/tests/test_elastic_dataloader.py
    litData       tests/streaming/test_elastic.py
    Grain         elastic_iterator_test.py, mix_test.py
    torchtitan    tests/unit_tests/components/data/test_grain_data.py
    torchdata     test/stateful_dataloader/test_state_dict.py
    datasets      tests/test_iterable_dataset.py, test_resume_dataloader_twice
    OLMo-core     src/test/data/data_loader_test.py

A docstring or a comment says what they promise. Where we promise something else, it says "Ours".
dev/log.md has a table of all their promises. What test_dataloader.py tests as ours has no second
test here: orders of seeds and epochs, stops at any step of mixtures, filters and packings, counts,
iterators, errors of transforms, refused states, merged states, drop_last and masks, proportions,
sources that end, join or leave, moved and other folders, fields, nulls, what each packing does.
"""

import itertools
import json

import pytest

from dataloader import merge_states
from test_dataloader import load, make, show, show_all, write

# --------------------------------------------------------------------------------------------------
# Documents that are numbers: each has 7 digits, and so fills a row of T = 7

ALL = list(range(120))

def write_numbers(folder, numbers):
    return write(folder, [[f"{number:07}" for number in numbers]])

@pytest.fixture
def data(tmp_path):
    return write_numbers(tmp_path / "data", ALL)

def start(data, **options):
    usual = {"num_lanes": 12, "shuffle_seed": 1, "epochs": 1}
    return make(data, **{**usual, **options})

def numbers_of(loader, most=None):
    """Of the rows of the next batches; a masked row has none."""
    return [int(row[1:]) for row in show_all(loader, most) if "." not in row]

# --------------------------------------------------------------------------------------------------
# Stopped and resumed

def skips(ids, location, epoch):
    return None if location.row in (7, 8, 100) else ids

TO_THE_END = 999

@pytest.mark.parametrize("options, legs", [
    # LanceDB: a step has the same samples on any number of ranks. Ours: in the same order, too
    ({}, [(12, 1, 10)]),
    ({}, [(4, 10, 3)]),
    # LanceDB: a resume on other ranks repeats and skips nothing, after 0, 1, 4 and all 10 steps
    # Grain: so does one on more or fewer hosts. Ours: with filters, mixtures and packings, too
    ({}, [(2, 6, 0), (2, 6, 1), (3, 4, 9)]),
    ({}, [(4, 3, 10), (6, 2, 0)]),
    # LanceDB: on_transform_error="skip". Ours: the transform catches its error, and returns None
    ({"transform": skips}, [(4, 3, 4), (1, 12, TO_THE_END)]),
    # litData: ranks change often; a stop inside a global batch is rounded down. Ours: exact
    ({}, [(3, 1, 7), (2, 2, 3), (12, 1, 2), (1, 5, TO_THE_END)]),
    # OLMo-core: the batch size changes at multiples of the new one. Ours: anywhere
    ({}, [(1, 4, 3), (1, 8, 2), (1, 5, TO_THE_END)]),
    # torchdata: epochs go on after a resume
    ({"epochs": 4}, [(1, 1, 240), (1, 1, TO_THE_END)]),
    # datasets: a resumed loader is resumed again
    ({}, [(1, 1, 2), (1, 1, 2), (1, 1, TO_THE_END)])])
def test_a_run_in_legs_has_the_rows_of_one(data, options, legs):
    """A leg: so many ranks, rows of each in a step, and steps."""
    found, state = {}, start(data, **options).state_dict()
    for world_size, B, n_steps in legs:
        ranks = []
        for rank in range(world_size):
            loader = start(data, B=B, rank=rank, world_size=world_size, **options)
            ranks.append(load(loader, state))
        for loader in ranks:
            for batch in itertools.islice(loader, n_steps):
                found |= zip(loader.row_numbers, show(batch), strict=True)
        state = merge_states([loader.state_dict() for loader in ranks])
    want = show_all(start(data, **options))
    n_masked = len(found) - len(want)
    assert [found[g] for g in range(len(found))] == want + n_masked * ["|......."]

def test_states_at_zero_and_at_the_end(data):
    """
    torchdata: a state loads into a loader that runs, and is saved again unchanged; saved after the
    last batch, it has no batch left; saved after StopIteration, a whole epoch. Ours: the next one.
    litData: the next epoch is whole.
    """
    loader = start(data)
    zero = loader.state_dict()
    want = numbers_of(loader, 120)
    end = loader.state_dict()
    load(loader, zero)
    assert loader.state_dict() == zero == json.loads(json.dumps(zero))
    assert numbers_of(loader) == want
    other = load(start(data), end)
    assert numbers_of(other) == []
    after = load(start(data), loader.state_dict())
    for next_pass in (numbers_of(other), numbers_of(after)):
        assert sorted(next_pass) == sorted(want) and next_pass != want

# --------------------------------------------------------------------------------------------------
# Orders and filters

def test_threads_change_nothing(data):
    """LanceDB: so do worker processes. Ours: no processes."""
    one, many = start(data, threads=1), start(data, threads=7)
    assert numbers_of(one) == numbers_of(many)

def test_a_filter_may_leave_fewer_documents_than_lanes(data):
    """LanceDB: an error; an epoch ends with its shortest split. Ours: other lanes take over."""
    def transform(ids, location, epoch):
        return ids if location.row < 5 else None

    rows = numbers_of(start(data, transform=transform))
    assert sorted(rows) == [0, 1, 2, 3, 4]

def test_a_filter_does_not_change_the_proportions(tmp_path):
    """torchtitan: weights may count attempts; then a filter of 10% leaves 1 : 10. Ours: rows."""
    def transform(ids, location, epoch):
        return None if "even" in location.path and location.row % 10 else ids

    folders = [write_numbers(tmp_path / name, range(first, 100, 2))
               for first, name in enumerate(["even", "odd"])]
    rows = numbers_of(start(folders, transform=transform, epochs=None), 300)
    n_even = sum(number % 2 == 0 for number in rows)
    assert abs(n_even - 150) < 4
