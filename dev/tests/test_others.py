"""
Other loaders' tests as ours: what they promise, and what we do. No code is theirs.

    python -m pytest dev/tests/test_others.py

A section names the project and its file. A docstring says what they promise there. Where we promise
something else, it says "Theirs" and "Ours", and the test shows ours.
"""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from dataloader import PACKINGS, gather_states, merge_states
from test_dataloader import load, make, show, show_all, write

# --------------------------------------------------------------------------------------------------
# Documents that are numbers: each has 7 digits, and so fills a row of T = 7

ALL = list(range(120))

def write_numbers(folder, numbers):
    return write(folder, [[f"{number:07}" for number in numbers]])

@pytest.fixture
def data(tmp_path):
    return write_numbers(tmp_path / "data", ALL)

@pytest.fixture
def even_odd(tmp_path):
    even = write_numbers(tmp_path / "even", range(0, 100, 2))
    odd = write_numbers(tmp_path / "odd", range(1, 100, 2))
    return even, odd

def start(data, **options):
    usual = {"num_lanes": 12, "shuffle_seed": 1, "epochs": 1}
    return make(data, **{**usual, **options})

def numbers_in(batch):
    """Of its rows; a masked row has none."""
    return [int(row[1:]) for row in show(batch) if "." not in row]

def numbers_of(loader, most=None):
    """Of the next batches."""
    batches = itertools.islice(loader, most)
    return [number for batch in batches for number in numbers_in(batch)]

def run(data, world_size=1, B=12, steps=None, state=None, **options):
    """(the numbers of each global batch, in the order of the run; the state of all ranks)"""
    ranks = []
    for rank in range(world_size):
        loader = start(data, B=B, rank=rank, world_size=world_size, **options)
        ranks.append(load(loader, state) if state else loader)
    batches = []
    while steps is None or len(batches) < steps:
        found = [next(loader, None) for loader in ranks]
        if None in found:
            break
        rows = {}
        for loader, batch in zip(ranks, found, strict=True):
            rows |= zip(loader.numbers, numbers_in(batch), strict=False)
        batches.append([rows[g] for g in sorted(rows)])
    return batches, merge_states([loader.state_dict() for loader in ranks])

def joined(batches):
    return list(itertools.chain(*batches))

# --------------------------------------------------------------------------------------------------
# LanceDB: python/python/tests/test_elastic_dataloader.py

@pytest.mark.parametrize("per_step", [12, 36])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(data, per_step):
    """Each sample once an epoch, as many steps on each rank. Ours: in the same order, too."""
    want, _ = run(data, B=per_step)
    assert sorted(joined(want)) == ALL
    for world_size in (1, 2, 3, 4, 6, 12):
        batches, _ = run(data, world_size, per_step // world_size)
        assert batches == want

WORLDS = [(2, 2), (1, 12), (2, 3), (4, 6), (12, 1)]

@pytest.mark.parametrize("before, after", WORLDS)
def test_a_resume_repeats_and_skips_nothing(data, before, after):
    """After 0, 1, 4 and all 10 steps, on other ranks. A state may be loaded twice."""
    want, _ = run(data)
    for steps in (0, 1, 4, 10):
        head, state = run(data, before, 12 // before, steps)
        assert len(head) == steps
        for _ in range(2):
            tail, _ = run(data, after, 12 // after, state=state)
            assert head + tail == want

def test_the_state_of_a_rank_is_merged_with_the_others(data):
    """Theirs: any rank's state is that of all. Ours: gather_states or merge_states makes it."""
    rank_0 = start(data, rank=0, world_size=2).state_dict()
    rank_1 = start(data, rank=1, world_size=2).state_dict()
    with pytest.raises(ValueError, match="gather_states"):
        load(start(data), rank_0)
    loader = load(start(data), merge_states([rank_0, rank_1]))
    assert numbers_of(loader) == numbers_of(start(data))

def test_epochs_and_seeds_have_other_orders(data):
    """Theirs: shuffle_seed=None draws a seed. Ours: it is the order of the files."""
    rows = numbers_of(start(data, epochs=2))
    other_seed = numbers_of(start(data, shuffle_seed=2))
    in_file_order = numbers_of(start(data, shuffle_seed=None, num_lanes=1))
    assert in_file_order == ALL
    orders = [rows[:120], rows[120:], other_seed, in_file_order]
    for one, other in itertools.combinations(orders, 2):
        assert one != other
        assert sorted(one) == sorted(other)

@pytest.mark.parametrize("option", [{"num_lanes": 6}, {"shuffle_seed": 2}])
def test_a_state_of_another_order_is_refused(data, option):
    state = start(data).state_dict()
    with pytest.raises(ValueError, match="in the state, but"):
        load(start(data, **option), state)

def test_threads_change_nothing(data):
    """Theirs: so do worker processes. Ours: no processes."""
    one, many = start(data, threads=1), start(data, threads=7)
    assert numbers_of(one) == numbers_of(many)

def test_a_second_iterator_goes_on(data):
    """Theirs: an error while another one is active. Ours: a loader is its only iterator."""
    loader = start(data)
    first = numbers_in(next(iter(loader)))
    assert first + numbers_of(loader) == numbers_of(start(data))

def fails(ids, location, epoch):
    if location.row in (7, 8, 100):
        raise ValueError("bad")
    return ids

def skips(ids, location, epoch):
    try:
        return fails(ids, location, epoch)
    except ValueError:
        return None

def test_an_error_of_a_transform_is_raised_or_its_own_business(data):
    """Theirs: on_transform_error="skip". Ours: a transform catches its errors, and returns None."""
    with pytest.raises(RuntimeError, match=r"row (7|8|100): ValueError: bad"):
        numbers_of(start(data, transform=fails))
    want, _ = run(data, transform=skips)
    assert {*ALL} - {*joined(want)} == {7, 8, 100}
    head, state = run(data, 4, 3, steps=4, transform=skips)
    tail, _ = run(data, 1, state=state, transform=skips)
    assert head + tail == want

def test_a_filter_may_leave_fewer_documents_than_lanes(data):
    """Theirs: an error; an epoch ends with its shortest split. Ours: other lanes take over."""
    def transform(ids, location, epoch):
        return ids if location.row < 5 else None

    rows = numbers_of(start(data, transform=transform))
    assert sorted(rows) == [0, 1, 2, 3, 4]

# --------------------------------------------------------------------------------------------------
# litData: tests/streaming/test_elastic.py

def test_ranks_may_change_often_and_the_row_is_exact(data):
    """Theirs: a stop inside a global batch is rounded down, which repeats samples. Ours: exact."""
    rows, state = [], None
    for world_size, B, steps in [(3, 1, 7), (2, 2, 3), (12, 1, 2), (1, 5, None)]:
        batches, state = run(data, world_size, B, steps, state)
        rows += joined(batches)
    assert rows == numbers_of(start(data))

def test_states_of_another_version_or_that_lack_something_are_refused(data):
    """Theirs: what an old checkpoint lacks is guessed."""
    state = start(data).state_dict()
    with pytest.raises(ValueError, match="version 8"):
        load(start(data), {**state, "version": 7})
    del state["T"]
    with pytest.raises(ValueError):
        load(start(data), state)

def test_drop_last_gives_all_ranks_as_many_full_batches(data):
    options = {"B": 7, "world_size": 2, "drop_last": True}
    first = numbers_of(start(data, rank=0, **options))
    second = numbers_of(start(data, rank=1, **options))
    assert len(first) == len(second) == 56
    assert not {*first} & {*second}

def test_the_epoch_after_a_resume_is_whole(data):
    _, state = run(data, steps=3)
    loader = load(start(data), state)
    assert len(numbers_of(loader)) == 84
    assert sorted(numbers_of(loader)) == ALL

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/elastic_iterator_test.py

def test_ranks_take_turns_and_the_rest_is_masked_or_dropped(tmp_path):
    """Theirs: an incomplete global batch is dropped. Ours: masked, or dropped with drop_last."""
    eight = write_numbers(tmp_path, range(8))
    options = {"num_lanes": 4, "shuffle_seed": None}
    rank_2 = start(eight, rank=2, world_size=4, **options)
    assert numbers_of(rank_2) == [2, 6]
    masks = start(eight, B=3, **options)
    assert numbers_of(masks) == [0, 1, 2, 3, 4, 5, 6, 7]
    drops = start(eight, B=3, drop_last=True, **options)
    assert numbers_of(drops) == [0, 1, 2, 3, 4, 5]

HOSTS = [(32, 16), (8, 64), (4, 8)]

@pytest.mark.parametrize("before, after", HOSTS)
def test_each_element_once_when_hosts_come_or_go(tmp_path, before, after):
    """Theirs: without filters, mixtures, packing. Ours: with; numbers of hosts divide num_lanes."""
    many = write_numbers(tmp_path, range(1024))
    head, state = run(many, before, 2, 3, num_lanes=64)
    tail, _ = run(many, after, 2, None, state, num_lanes=64)
    assert sorted(joined(head + tail)) == list(range(1024))

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/transformations/mix_test.py
# torchtitan: tests/unit_tests/components/data/test_grain_data.py

def count_even(loader, n):
    return sum(number % 2 == 0 for number in numbers_of(loader, n))

@pytest.mark.parametrize("weights, n_even", [((4, 1), 800), ((0.8, 0.2), 800), ((2, 2), 500)])
def test_proportions_may_be_integers_or_fractions(even_odd, weights, n_even):
    """Theirs: exactly these of 1,000 rows. Ours: less than 4 more or less."""
    even, odd = even_odd
    loader = start({even: weights[0], odd: weights[1]}, epochs=None)
    assert abs(count_even(loader, 1000) - n_even) < 4

@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_weights_are_above_0_and_finite(even_odd, weight):
    even, odd = even_odd
    with pytest.raises(ValueError, match="expected a number above 0"):
        start({even: 1, odd: weight})

def test_a_function_may_choose_the_source_of_each_row(even_odd):
    """Theirs: a selection map. Ours: weights of 0 and 1; in turns, or one after the other."""
    even, odd = even_odd
    options = {"num_lanes": 1, "shuffle_seed": None}
    in_turns = {even: lambda g: g % 2 == 0, odd: lambda g: g % 2 == 1}
    assert numbers_of(start(in_turns, **options)) == list(range(100))
    one_by_one = {even: lambda g: g < 50, odd: lambda g: g >= 50}
    rows = numbers_of(start(one_by_one, **options))
    assert rows == sorted(rows, key=lambda number: (number % 2, number))

def test_a_mixture_goes_on_when_a_source_has_ended(tmp_path, even_odd):
    """Theirs: it ends with the first source. Ours: with the last, or a small one is endless."""
    even, _ = even_odd
    few = write_numbers(tmp_path / "few", [1, 3])
    rows = numbers_of(start([few, even]))
    assert sorted(rows) == [0, 1, 2, 3, *range(4, 100, 2)]
    rows = numbers_of(start([few, even], epochs={even: 1}), 200)
    assert {*rows} == {1, 3, *range(0, 100, 2)}, "all of the larger one, too"

def test_a_mixture_resumes_with_other_sources_and_weights(tmp_path):
    """Fewer, more or others: a source that stays resumes. Ours: weights may change, too."""
    a = write_numbers(tmp_path / "a", range(0, 150, 3))
    b = write_numbers(tmp_path / "b", range(1, 150, 3))
    c = write_numbers(tmp_path / "c", range(2, 150, 3))
    cases = [[a, b, c], [a, b]], [[a, b], [a, b, c]], [[a, c], {a: 3, b: 1}]
    for before, after in cases:
        loader = start(before)
        rows = numbers_of(loader, 20)
        with pytest.warns(UserWarning, match="is new|gives no more rows|was 1, and is 3"):
            other = load(start(after), loader.state_dict())
        rows += numbers_of(other)
        of_a = [number for number in rows if number % 3 == 0]
        assert sorted(of_a) == list(range(0, 150, 3))

def keeps_few_even_ones(ids, location, epoch):
    return None if "even" in location.path and location.row % 10 else ids

def test_a_filter_does_not_change_the_proportions(even_odd):
    """Theirs: weights may count attempts, then a filter of 10 % leaves 1 : 10. Ours: rows."""
    loader = start(even_odd, transform=keeps_few_even_ones, epochs=None)
    assert abs(count_even(loader, 300) - 150) < 4

def test_filters_mixtures_and_packings_are_restored_exactly(even_odd):
    """In the second epoch, and of a mixture of which a source is filtered."""
    even, odd = even_odd
    options = {"transform": keeps_few_even_ones, "epochs": None, "T": 17, "chunk_bytes": 99}
    for sources in (even, odd, {even: 0.67, odd: 0.33}):
        loader = start(sources, **options)
        show_all(loader, 9)
        other = load(start(sources, **options), loader.state_dict())
        assert show_all(other, 20) == show_all(loader, 20)

def test_without_a_seed_epochs_repeat_their_order(data):
    """Ours: with one lane. With more, lanes take other chunks in each epoch."""
    loader = start(data, shuffle_seed=None, num_lanes=1, epochs=2)
    assert numbers_of(loader) == ALL + ALL

def with_random_digit(ids, location, epoch):
    draw = random.Random(f"{location.key} {epoch}")
    return np.append(ids[:-1], ord(draw.choice("0123456789")))

def test_a_random_transform_is_the_same_in_each_run(data):
    """Theirs: it gets a generator. Ours: it seeds its own with the document's place on disk."""
    rows = numbers_of(start(data, transform=with_random_digit))
    assert rows == numbers_of(start(data, transform=with_random_digit))
    assert rows != numbers_of(start(data))

def test_the_last_batch_has_its_full_shape(tmp_path):
    """Theirs: 5 rows in batches of 2 end with one of 1. Ours: (2, T), and a row is masked."""
    five = write_numbers(tmp_path, range(5))
    *_, (inputs, targets) = start(five, B=2)
    assert inputs.shape == targets.shape == (2, 7)
    assert (targets[0] >= 0).all()
    assert (targets[1] == -100).all()

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/transformations/packing_concat_then_split_test.py

LETTERS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"]

def sizes(rows):
    """Tokens in each row."""
    return [sum(stop - start for _, start, stop in row) for row in rows]

@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_rows_are_restored_at_any_step_and_at_the_end(tmp_path, packing):
    """A new loader from each state, one after the other. A state at the end is kept."""
    letters = write(tmp_path, [LETTERS, LETTERS])
    options = {"num_lanes": 1, "chunk_bytes": 20, "packing": packing}
    want = show_all(start(letters, **options))
    loader, rows = start(letters, **options), []
    for _ in want:
        loader = load(start(letters, **options), loader.state_dict())
        rows += show(next(loader))
    assert rows == want
    state = loader.state_dict()
    assert show_all(loader) == []
    assert loader.state_dict() == state

def test_a_document_is_cut_many_times_or_kept_whole():
    """Theirs: BOS may replace a piece's first token. Ours: it is added, so no token is lost."""
    rows = PACKINGS["flat"]([7, 25], 10)
    assert sizes(rows) == [10, 10, 10, 5], "three tokens are in two rows"
    rows = PACKINGS["wholefit"]([5, 5, 10, 5, 5], 10)
    assert sizes(rows) == [10, 10, 10]
    assert sum(map(len, rows)) == 5, "no document is cut"
    rows = PACKINGS["wholefit"]([25], 10)
    assert sorted(sizes(rows)) == [7, 10, 10], "BOS again, twice"

# --------------------------------------------------------------------------------------------------
# TRL: tests/test_data_utils.py, TestPackDatasetWrapped and TestPackDatasetBfd

@pytest.mark.parametrize("lengths, R, rows", [
    ([3, 4, 1], 4, [[1, 3], [4]]),
    ([5, 1, 4, 3], 5, [[1, 4], [3], [5]])])
def test_wholefit_has_the_rows_of_bfd(lengths, R, rows):
    """The lengths in each row: the longest first, each where it leaves least room."""
    found = []
    for row in PACKINGS["wholefit"](lengths, R):
        found.append(sorted(stop - start for _, start, stop in row))
    assert sorted(found) == rows

@pytest.mark.parametrize("lengths", [(5, 2, 4, 1), (6, 3, 3, 4)])
def test_what_is_longer_than_a_row_is_cut_and_begins_with_bos_again(lengths):
    """Theirs: bfd drops the rest; bfd_split goes on without BOS. Ours: BOS again, a token more."""
    found = sizes(PACKINGS["wholefit"](lengths, 4))
    assert max(found) == 4
    assert sum(found) == sum(lengths) + 1

def test_wrapped_is_flat_but_rows_share_a_token():
    """Theirs: rows of 3, 3 and 2 tokens. Ours: a row's last token is the next one's first input."""
    rows = PACKINGS["flat"]([3, 4, 1], 3)
    assert sizes(rows) == [3, 3, 3, 2]

def with_second_field(ids, location, epoch):
    fields = np.zeros(len(ids), "i8, i8")
    fields.dtype.names = "id", "minus"
    fields["id"] = np.append(ids[:-1], ~ids[-1:])    # the last token has no loss
    fields["minus"] = -ids
    return fields

def test_a_second_column_travels_along(tmp_path):
    """Ours: a field of a transform; where a target is masked, it is 0."""
    letters = write(tmp_path, [LETTERS])
    for _, targets, minus in start(letters, transform=with_second_field):
        has_target = targets >= 0
        assert torch.equal(minus, -targets * has_target)

def test_empty_documents_are_a_bos_and_nulls_are_nothing(tmp_path):
    """Theirs: empty sequences vanish."""
    data = write(tmp_path, [["ab", None, "", "c"]])
    (row,) = show_all(start(data, num_lanes=1, chunk_bytes=99))
    assert sorted(row) == sorted("|ab||c..")

# --------------------------------------------------------------------------------------------------
# torchdata: test/stateful_dataloader/test_state_dict.py
# datasets: tests/test_iterable_dataset.py, test_resume_dataloader_twice

def test_a_state_at_zero_and_one_that_is_loaded_and_saved(data):
    """Before the first batch; into a loader that runs; then saved again, unchanged."""
    loader = start(data)
    zero = loader.state_dict()
    want = numbers_of(loader)
    numbers_of(loader, 3)
    load(loader, zero)
    assert loader.state_dict() == zero == json.loads(json.dumps(zero))
    assert numbers_of(loader) == want

def test_a_state_at_the_end_is_the_end(data):
    """
    Theirs: saved after the last batch, it has no batch left; saved after StopIteration, a whole
    epoch. Ours: none for both, and the next `for` begins again.
    """
    loader = start(data)
    want = numbers_of(loader, 120)
    for _ in range(2):
        other = load(start(data), loader.state_dict())
        assert numbers_of(other) == []
        assert numbers_of(other) == want
        assert next(loader, None) is None

def test_epochs_go_on_after_a_resume(data):
    """Two of four epochs, a state, the other two: the orders of a run of four."""
    loader = start(data, epochs=4)
    rows = numbers_of(loader, 240)
    rows += numbers_of(load(start(data, epochs=4), loader.state_dict()))
    assert rows == numbers_of(start(data, epochs=4))

@pytest.mark.parametrize("kind", ["PackedLoader", "StatefulDataLoader"])
def test_a_resumed_loader_is_resumed_again(data, kind):
    """The second state does not begin the data again. Theirs: in worker processes, too."""
    rows, state = [], None
    for most in (2, 2, None):
        loader = start(data)
        if kind == "StatefulDataLoader":
            torchdata = pytest.importorskip("torchdata.stateful_dataloader")
            loader = torchdata.StatefulDataLoader(loader, batch_size=None, num_workers=0)
        if state:
            loader.load_state_dict(state)
        rows += numbers_of(loader, most)
        state = loader.state_dict()
    assert rows == numbers_of(start(data))

# --------------------------------------------------------------------------------------------------
# OLMo-core: src/test/data/data_loader_test.py

def test_batches_and_tokens_are_counted_in_the_second_epoch_too(data):
    """Theirs: a count begins with the epoch. Ours: with the run or, in stats(), with the load."""
    loader = start(data, epochs=2)
    numbers_of(loader, 130)
    other = load(start(data, epochs=2), loader.state_dict())
    numbers_of(other, 10)
    counts = other.stats()[data]
    assert other.state_dict()["rows"] == other.g == 140
    assert counts["epoch"] == 2
    assert counts["tokens"] == 8 * counts["rows"] == 80

def test_the_batch_size_may_change_in_a_run(data):
    """Theirs: at multiples of the new size. Ours: anywhere, by a state."""
    rows, state = [], None
    for B, steps in [(4, 3), (8, 2), (5, None)]:
        batches, state = run(data, 1, B, steps, state)
        rows += joined(batches)
    assert rows == numbers_of(start(data))

@pytest.mark.parametrize("T", [2, 4, 8])
def test_the_row_length_changes_rows_but_loses_no_token(tmp_path, T):
    """Theirs: each T has the same tokens in the same order. Ours: so has `flat` in one lane."""
    letters = write(tmp_path, [LETTERS])
    loader = start(letters, T=T, packing="flat", num_lanes=1, chunk_bytes=99, shuffle_seed=None)
    targets = "".join(row[1:] for row in show_all(loader))
    assert targets.rstrip(".") == "|".join(LETTERS)

def test_other_data_is_refused(data, tmp_path):
    """Theirs: a flag ignores it. Ours: no flag; train.py's --init begins a new run."""
    other = write_numbers(tmp_path / "other", range(100, 220))
    with pytest.raises(ValueError, match="none of the sources"):
        load(start(other), gather_states(start(data)))
