"""
Other loaders' tests as ours: what they promise, and what we do. No code is theirs.

    python -m pytest dev/tests/test_others.py

A section names the project and its file. A docstring says what they promise in that file; where
we promise something else, it begins with "Theirs", and "Ours" is what the test shows.
"""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from dataloader import PACKINGS, choose, gather_states, merge_states
from dataset import Location
from test_dataloader import load, make, show, show_all, write

# --------------------------------------------------------------------------------------------------
# Documents that are numbers: each has 7 digits, and so fills a row of T = 7

def write_numbers(folder, *numbers):
    return write(folder, [[f"{number:07}" for number in numbers]])

@pytest.fixture
def data(tmp_path):
    return write_numbers(tmp_path / "data", *range(120))

def numbers_in(batch):
    """Of its rows; those without a target are left out."""
    rows = show(batch)
    return [int(row[1:]) for row in rows if "." not in row]

def numbers_of(loader, most=None):
    batches = itertools.islice(loader, most)
    return [number for batch in batches for number in numbers_in(batch)]

def start(data, **options):
    usual = {"num_lanes": 12, "shuffle_seed": 1, "epochs": 1}
    return make(data, **{**usual, **options})

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
    return [*itertools.chain(*batches)]

# --------------------------------------------------------------------------------------------------
# LanceDB: python/python/tests/test_elastic_dataloader.py

@pytest.mark.parametrize("per_step", [12, 36])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(data, per_step):
    """Each sample once an epoch, equally many steps, two runs alike. Ours: in the same order, too."""
    want, _ = run(data, B=per_step)
    assert sorted(joined(want)) == [*range(120)]
    for world_size in (1, 2, 3, 4, 6, 12):
        batches, _ = run(data, world_size, per_step // world_size)
        assert batches == want

@pytest.mark.parametrize("before, after", [(2, 2), (1, 12), (2, 3), (4, 6), (12, 1)])
def test_a_resume_repeats_and_skips_nothing(data, before, after):
    """After 0, 1, 4, 9 and all 10 steps, on other ranks; a state may be loaded twice."""
    want, _ = run(data)
    for steps in (0, 1, 4, 9, 10):
        head, state = run(data, before, 12 // before, steps)
        assert len(head) == steps
        for _ in range(2):
            tail, _ = run(data, after, 12 // after, state=state)
            assert head + tail == want

def test_the_state_of_a_rank_is_merged_with_the_others(data):
    """Theirs: any rank's state is that of all, and is merged only after skips. Ours: always."""
    rank_0, rank_1 = (start(data, rank=rank, world_size=2) for rank in range(2))
    with pytest.raises(ValueError, match="gather_states"):
        load(start(data), rank_0.state_dict())
    state = merge_states([rank_0.state_dict(), rank_1.state_dict()])
    assert numbers_of(load(start(data), state)) == numbers_of(start(data))

def test_epochs_and_seeds_have_other_orders(data):
    """Theirs: shuffle_seed=None draws a seed. Ours: it is the order of the files."""
    rows = numbers_of(start(data, epochs=2))
    orders = [rows[:120], rows[120:], numbers_of(start(data, shuffle_seed=2)), [*range(120)]]
    for one, other in itertools.combinations(orders, 2):
        assert one != other and sorted(one) == sorted(other)
    assert numbers_of(start(data, shuffle_seed=None, num_lanes=1)) == [*range(120)]

@pytest.mark.parametrize("name, value", [("num_lanes", 6), ("shuffle_seed", 2)])
def test_a_state_of_another_order_is_refused(data, name, value):
    with pytest.raises(ValueError, match=f"{name} is .* in the state"):
        start(data, **{name: value}).load_state_dict(start(data).state_dict())

def test_threads_change_nothing_and_workers_are_refused(data):
    """Theirs: any number of worker processes gives the same steps. Ours: threads, no processes."""
    loaders = torch.utils.data.DataLoader(start(data), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(iter(loaders))
    assert numbers_of(start(data, threads=1)) == numbers_of(start(data, threads=7))

def test_a_second_iterator_goes_on(data):
    """Theirs: an error while another one is active. Ours: a loader is its one iterator."""
    loader = start(data)
    rows = numbers_in(next(iter(loader))) + numbers_of(loader)
    assert rows == numbers_of(start(data))

def test_an_error_of_a_transform_is_raised_and_skipping_is_its_own_choice(data):
    """Theirs: on_transform_error="skip". Ours: the transform catches, and returns None."""
    def fails(ids, location, epoch):
        if location.row in (7, 8, 100):
            raise ValueError("bad")
        return ids

    def skips(*arguments):
        try:
            return fails(*arguments)
        except ValueError:
            return None

    with pytest.raises(RuntimeError, match=r"row (7|8|100): ValueError: bad"):
        numbers_of(start(data, transform=fails))
    want, _ = run(data, transform=skips)
    assert sorted(joined(want)) == sorted({*range(120)} - {7, 8, 100})
    head, state = run(data, 4, 3, steps=4, transform=skips)
    tail, _ = run(data, 1, state=state, transform=skips)
    assert head + tail == want

def test_a_filter_may_leave_fewer_documents_than_lanes(data):
    """
    Theirs: an error for fewer samples than splits, and an epoch ends with its shortest split. Ours:
    other lanes take over, and every document that is left is delivered.
    """
    def transform(ids, location, epoch):
        return ids if location.row < 5 else None

    rows = numbers_of(start(data, transform=transform))
    assert sorted(rows) == [*range(5)]

# --------------------------------------------------------------------------------------------------
# litData: tests/streaming/test_elastic.py

def test_ranks_may_change_twice_and_the_row_is_exact(data):
    """Theirs: a stop inside a global batch is rounded down, so samples are repeated. Ours: not."""
    want = joined(run(data)[0])
    rows, state = [], None
    for world_size, B, steps in [(3, 1, 7), (2, 2, 3), (12, 1, 2), (1, 5, None)]:
        batches, state = run(data, world_size, B, steps, state)
        rows += joined(batches)
    assert rows == want

def test_states_that_lack_something_are_refused(data):
    """Theirs: an old checkpoint's position is guessed. Ours: an error."""
    state = start(data).state_dict()
    with pytest.raises(ValueError, match="version 8"):
        start(data).load_state_dict({**state, "version": 7})
    with pytest.raises(ValueError):
        start(data).load_state_dict({key: state[key] for key in state if key != "T"})

def test_drop_last_gives_all_ranks_full_batches_of_other_rows(data):
    ranks = [start(data, B=7, rank=rank, world_size=2, drop_last=True) for rank in range(2)]
    first, second = (numbers_of(loader) for loader in ranks)
    assert len(first) == len(second) == 56
    assert len({*first, *second}) == 112

def test_the_epoch_after_a_resume_is_whole(data):
    _, state = run(data, steps=3)
    loader = load(start(data), state)
    assert len(numbers_of(loader)) == 84
    assert sorted(numbers_of(loader)) == [*range(120)]

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/elastic_iterator_test.py

def test_ranks_take_turns_and_the_rest_is_masked_or_dropped(tmp_path):
    """Theirs: an incomplete global batch is dropped. Ours: masked, or dropped with drop_last."""
    eight = write_numbers(tmp_path, *range(8))
    options = {"num_lanes": 4, "shuffle_seed": None}
    rank_2 = start(eight, rank=2, world_size=4, **options)
    assert numbers_of(rank_2) == [2, 6]
    assert numbers_of(start(eight, B=3, **options)) == [*range(8)]
    assert numbers_of(start(eight, B=3, drop_last=True, **options)) == [*range(6)]

@pytest.mark.parametrize("before, after", [(32, 16), (8, 64), (4, 8)])
def test_each_element_once_when_hosts_come_or_go(tmp_path, before, after):
    """Ours: world sizes that divide num_lanes. Theirs: without packing, filters and mixtures."""
    many = write_numbers(tmp_path, *range(1024))
    head, state = run(many, before, 2, 3, num_lanes=64)
    tail, _ = run(many, after, 2, None, json.loads(json.dumps(state)), num_lanes=64)
    assert sorted(joined(head + tail)) == [*range(1024)]

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/transformations/mix_test.py
# torchtitan: tests/unit_tests/components/data/test_grain_data.py

@pytest.fixture
def even_odd(tmp_path):
    return [write_numbers(tmp_path / name, *range(first, 100, 2))
            for first, name in enumerate(["even", "odd"])]

def test_proportions_may_be_integers_or_fractions_and_are_equal_by_default(even_odd):
    """Theirs: 4 : 1 has 800 of 1,000 rows. Ours: at most 4 more or less."""
    for weights in ([4, 1], [0.8, 0.2]):
        weighted = dict(zip(even_odd, weights, strict=True))
        rows = numbers_of(start(weighted, epochs=None), 1000)
        assert abs(sum(number % 2 == 0 for number in rows) - 800) < 4
    rows = numbers_of(start(even_odd), 50)
    assert abs(sum(number % 2 for number in rows) - 25) < 4

@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_weights_are_above_0_and_finite(even_odd, weight):
    even, odd = even_odd
    with pytest.raises(ValueError, match="expected a number above 0"):
        start({even: 1, odd: weight})
    with pytest.raises(ValueError):
        start({})

def test_a_function_may_choose_each_row(even_odd):
    """Theirs: a selection map. Ours: weights of 0 and 1, here in turns, then one after the other."""
    even, odd = even_odd
    options = {"num_lanes": 1, "shuffle_seed": None}
    rows = numbers_of(start({even: lambda g: 1 - g % 2, odd: lambda g: g % 2}, **options))
    assert rows == [*range(100)]
    rows = numbers_of(start({even: lambda g: g < 50, odd: lambda g: g >= 50}, **options))
    assert rows == [*range(0, 100, 2), *range(1, 100, 2)]

def test_a_mixture_goes_on_when_a_source_has_ended(tmp_path):
    """Theirs: the first one that is exhausted ends the mixture. Ours: the last one, or drop it."""
    few, many = write_numbers(tmp_path / "few", 1, 3), write_numbers(tmp_path / "many", *range(0, 99, 2))
    assert sorted(numbers_of(start([few, many]))) == sorted([1, 3, *range(0, 99, 2)])
    rows = numbers_of(start([few, many], epochs={many: 1}), 200)
    assert {*range(0, 99, 2)} < {*rows}, "not all of the larger one"

def test_a_mixture_resumes_with_other_sources_and_weights(tmp_path):
    """Fewer, more or others: one that stays goes on where it was. Ours: weights may change, too."""
    a, b, c = (write_numbers(tmp_path / f"{i}", *range(i * 100, i * 100 + 50)) for i in range(3))
    for before, after in [([a, b, c], [a, b]), ([a, b], [a, b, c]), ([a, c], {a: 3, b: 1})]:
        loader = start(before)
        rows = numbers_of(loader, 20)
        rows += numbers_of(load(start(after), loader.state_dict()))
        for stays in {*before} & {*after}:
            first = int(stays[-1]) * 100
            assert sorted(n for n in rows if n // 100 * 100 == first) == [*range(first, first + 50)]

def keeps_one_in_ten(ids, location, epoch):
    return ids if location.row % 10 == 0 or "even" not in location.path else None

def test_a_filter_does_not_change_the_proportions(even_odd):
    """Theirs: weights may count attempts, then a filter of 10 % leaves 1 : 10. Ours: always rows."""
    rows = numbers_of(start(even_odd, transform=keeps_one_in_ten, epochs=None), 1000)
    assert abs(sum(number % 2 for number in rows) - 500) < 4

def test_filters_mixtures_and_buffers_are_restored_exactly(even_odd):
    """In the second epoch, and of a mixture of which a source is filtered."""
    even, odd = even_odd
    options = {"transform": keeps_one_in_ten, "epochs": None, "T": 17, "chunk_bytes": 99}
    for data_dir in (even, odd, {even: 0.67, odd: 0.33}):
        loader = start(data_dir, **options)
        show_all(loader, 9)
        state = loader.state_dict()
        assert show_all(load(start(data_dir, **options), state), 20) == show_all(loader, 20)

def test_without_a_seed_epochs_repeat_their_order(data):
    """Ours: with one lane. With more, lanes take other chunks in each epoch."""
    rows = numbers_of(start(data, shuffle_seed=None, num_lanes=1, epochs=2))
    assert rows == [*range(120), *range(120)]

def test_a_random_transform_is_the_same_in_each_run(data):
    """Theirs: a generator is passed along. Ours: seeded by the document's place on disk."""
    def one_of(ids, location, epoch):
        generator = random.Random(f"{location.key} {epoch}")
        return np.append(ids[:-1], ord(generator.choice("0123456789")))

    first, second = (numbers_of(start(data, transform=one_of)) for _ in range(2))
    assert first == second != numbers_of(start(data))
    assert Location("/a/x.parquet", 1, 2).key == Location("/b/x.parquet", 1, 2).key

def test_the_last_batch_has_its_full_shape(tmp_path):
    """Theirs: 5 rows in batches of 2 end with one of 1. Ours: (2, T), and a row without targets."""
    five = write_numbers(tmp_path, *range(5))
    *_, (inputs, targets) = start(five, B=2)
    assert inputs.shape == (2, 7) and (targets >= 0).any(dim=1).tolist() == [True, False]

# --------------------------------------------------------------------------------------------------
# Grain: grain/_src/python/dataset/transformations/packing_concat_then_split_test.py

def sizes(rows):
    """Tokens in each row."""
    return [sum(stop - start for _, start, stop in row) for row in rows]

LETTERS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"]

@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_rows_are_restored_at_any_step_and_at_the_end(tmp_path, packing):
    """A new iterator from each state, also several in turns. The state of an end is kept."""
    letters = write(tmp_path, [LETTERS, LETTERS])
    options = {"num_lanes": 1, "chunk_bytes": 20, "packing": packing}
    want = show_all(start(letters, **options))
    loader, rows = start(letters, **options), []
    for _ in want:
        loader = load(start(letters, **options), loader.state_dict())
        rows += show(next(loader))
    assert rows == want
    state = loader.state_dict()
    assert show_all(loader) == [] and loader.state_dict() == state

def test_a_document_is_cut_many_times_or_kept_whole(tmp_path):
    """
    Theirs: a piece's first token may be replaced by BOS; segment ids and positions are arrays. Ours:
    BOS is added, so no token is lost, and pieces() says where each piece is in its document.
    """
    rows = PACKINGS["flat"]([7, 25], 10)
    assert sizes(rows) == [10, 10, 10, 5], "three tokens are in two rows"
    rows = PACKINGS["wholefit"]([5, 5, 10, 5, 5], 10)
    assert sorted(map(len, rows)) == [1, 2, 2], "what fills a row is not cut"
    long = write(tmp_path, [["abcdefghij"]])
    assert show_all(start(long, num_lanes=1)) == ["|abcdefg", "|hij...."]

# --------------------------------------------------------------------------------------------------
# TRL: tests/test_data_utils.py, TestPackDatasetWrapped and TestPackDatasetBfd

@pytest.mark.parametrize("lengths, R, theirs", [
    ([3, 4, 1], 4, [[4], [1, 3]]),
    ([5, 1, 4, 3], 5, [[5], [1, 4], [3]])])
def test_wholefit_has_the_rows_of_bfd(lengths, R, theirs):
    """The lengths of the pieces in each row: the longest first, each where it leaves least room."""
    rows = PACKINGS["wholefit"](lengths, R)
    found = [sorted(stop - start for _, start, stop in row) for row in rows]
    assert sorted(found) == sorted(theirs)

@pytest.mark.parametrize("lengths", [[5, 2, 4, 1], [6, 3, 3, 4]])
def test_what_is_longer_than_a_row_is_cut_and_begins_with_bos_again(lengths):
    """Theirs: bfd, the default, drops the rest; bfd_split goes on without BOS. Ours: a token more."""
    found = sizes(PACKINGS["wholefit"](lengths, 4))
    assert max(found) == 4 and sum(found) == sum(lengths) + 1

def test_wrapped_is_flat_but_rows_share_a_token():
    """Theirs: rows [1, 2, 3], [4, 5, 6], [7, 8]. Ours: a row's last token is an input of the next."""
    assert sizes(PACKINGS["flat"]([3, 4, 1], 4)) == [4, 4, 2]

def test_a_second_column_travels_along(tmp_path):
    """Ours: a field of a transform; where a target is masked, it is 0."""
    def transform(ids, location, epoch):
        fields = np.zeros(len(ids), [("id", "i8"), ("minus", "i8")])
        fields["id"], fields["minus"] = ids, -ids
        return fields

    letters = write(tmp_path, [LETTERS])
    for _, targets, minus in start(letters, transform=transform, packing="wholefit"):
        assert torch.equal(minus, torch.where(targets < 0, 0, -targets))

def test_empty_documents_are_a_bos_and_nulls_are_nothing(tmp_path):
    """Theirs: empty sequences vanish."""
    data = write(tmp_path, [["ab", None, "", "c"]])
    (row,) = show_all(start(data, num_lanes=1, chunk_bytes=99))
    assert row.count("|") == 3 and row.count(".") == 2

# --------------------------------------------------------------------------------------------------
# torchdata: test/stateful_dataloader/test_state_dict.py
# datasets: tests/test_iterable_dataset.py, test_resume_dataloader_twice

def test_a_state_at_zero_and_one_that_is_loaded_and_saved(data):
    """Before the first batch; into a loader that runs; saved again unchanged, as JSON, too."""
    loader = start(data)
    zero = loader.state_dict()
    want = numbers_of(loader)
    numbers_of(loader, 3)
    load(loader, zero)
    assert loader.state_dict() == zero
    assert numbers_of(loader) == want

def test_a_state_at_the_end_is_the_end(data):
    """
    Theirs: saved after the last batch, it has 0 batches left; saved after StopIteration, a whole
    epoch. Ours: 0 for both, and the next `for` begins again.
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

@pytest.mark.parametrize("stateful", [False, True])
def test_a_resumed_loader_is_resumed_again(data, stateful):
    """The second state does not begin the data again. Also in torchdata's StatefulDataLoader."""
    def make_loader():
        if not stateful:
            return start(data)
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        return torchdata.StatefulDataLoader(start(data), batch_size=None, num_workers=0)

    rows, state = [], None
    for most in (2, 2, None):
        loader = make_loader()
        if state:
            loader.load_state_dict(state)
        rows += numbers_of(loader, most)
        state = loader.state_dict()
    assert rows == numbers_of(start(data))

# --------------------------------------------------------------------------------------------------
# OLMo-core: src/test/data/data_loader_test.py

def test_batches_and_tokens_are_counted_in_the_second_epoch_too(data):
    """Theirs: a count starts anew with the epoch. Ours: with the run or, in stats(), the load."""
    loader = start(data, epochs=2)
    numbers_of(loader, 130)
    other = load(start(data, epochs=2), loader.state_dict())
    numbers_of(other, 10)
    counts = other.stats()[data]
    assert other.state_dict()["rows"] == 140
    assert (counts["epoch"], counts["rows"], counts["tokens"]) == (2, 10, 80)

def test_the_batch_size_may_change_in_a_run(data):
    """Theirs: at multiples of the new size. Ours: anywhere, by a state."""
    rows, state = [], None
    for B, steps in [(4, 3), (8, 2), (5, None)]:
        batches, state = run(data, 1, B, steps, state)
        rows += joined(batches)
    assert rows == numbers_of(start(data))

def test_the_row_length_changes_rows_but_loses_no_token(tmp_path):
    """Theirs: T of 2, 4 and 8 have the same tokens in the same order. Ours: only `flat`, one lane."""
    letters = write(tmp_path, [LETTERS])
    options = {"num_lanes": 1, "chunk_bytes": 99, "packing": "flat", "shuffle_seed": None}
    texts = {"".join(row[1:] for row in show_all(start(letters, T=T, **options))).rstrip(".")
             for T in (2, 4, 8)}
    assert texts == {"|".join(LETTERS)}

def test_other_data_is_refused(data, tmp_path):
    """Theirs: a flag ignores it. Ours: no flag; train.py's --init begins a new run."""
    other = write_numbers(tmp_path / "other", *range(100, 220))
    with pytest.raises(ValueError, match="none of the sources"):
        start(other).load_state_dict(gather_states(start(data)))

def test_rows_are_chosen_by_their_number_alone():
    """No counter is kept, so no mixture can drift after a resume (torchtitan, Grain)."""
    names = [choose({"a": 2, "b": 1}, g) for g in range(300)]
    for g in (0, 7, 299):
        assert choose({"a": 2, "b": 1}, g) == names[g]
    assert abs(names.count("a") - 200) < 4
