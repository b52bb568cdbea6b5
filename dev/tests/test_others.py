"""
Other loaders' tests as ours: what they promise, and what we do. No code is theirs.

    LanceDB       python/python/tests/test_elastic_dataloader.py
    litData       tests/streaming/test_elastic.py
    Grain         elastic_iterator_test.py
    torchdata     test/stateful_dataloader/test_state_dict.py
    datasets      tests/test_iterable_dataset.py, test_resume_dataloader_twice
    OLMo-core     src/test/data/data_loader_test.py

A comment says what they promise. Where we promise something else, it says "Ours". dev/log.md has a
table of all their promises. What test_dataloader.py tests as ours has no second test here.
"""

import itertools

import pytest

from dataloader import merge_states
from test_dataloader import load, make, show, show_all, write


@pytest.fixture
def data(tmp_path):
    """Documents that are numbers: each has 7 digits, and so fills a row of T = 7."""
    return write(tmp_path / "data", [[f"{number:07}" for number in range(120)]])

def start(data, **options):
    usual = {"num_lanes": 12, "shuffle_seed": 1, "epochs": 1}
    return make(data, **{**usual, **options})

def skips(ids, location, epoch):
    return None if location.row in (7, 8, 100) else ids

TO_THE_END = 999

@pytest.mark.parametrize("options, legs", [
    # LanceDB: a step has the same samples on any number of ranks. Ours: in the same order, too
    ({}, [(4, 10, 3)]),
    # LanceDB: a resume on other ranks repeats and skips nothing, after 0, 1, 4 and all 10 steps
    # Grain: so does one on more or fewer hosts. Ours: with filters, mixtures and packings, too
    ({}, [(2, 6, 0), (2, 6, 1), (3, 4, 9), (6, 2, 0)]),
    # LanceDB: on_transform_error="skip". Ours: the transform catches its error, and returns None
    ({"transform": skips}, [(4, 3, 4), (1, 12, TO_THE_END)]),
    # litData: ranks change often; a stop inside a global batch is rounded down. Ours: exact
    ({}, [(3, 1, 7), (2, 2, 3), (12, 1, 2), (1, 5, TO_THE_END)]),
    # OLMo-core: the batch size changes at multiples of the new one. Ours: anywhere
    ({}, [(1, 4, 3), (1, 8, 2), (1, 5, TO_THE_END)]),
    # torchdata: epochs go on after a resume. datasets: a resumed loader is resumed again
    ({"epochs": 4}, [(1, 1, 240), (1, 1, 2), (1, 1, TO_THE_END)])])
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
                found |= zip(loader.numbers, show(batch), strict=True)
        state = merge_states([loader.state_dict() for loader in ranks])
    want = show_all(start(data, **options))
    n_masked = len(found) - len(want)
    assert [found[g] for g in range(len(found))] == want + n_masked * ["|......."]
