"""
Promises of dataloader.py that only its authors need to read: Ctrl-C at any moment, how many lanes and
chunks, and how even mixtures are. test_dataloader.py has all others.
"""

import contextlib
import functools
import itertools
import sys
import types
from bisect import insort
from unittest import mock

import numpy as np
import pytest

import dataloader
from dataloader import Encoder
from dataset import list_shards
from test_dataloader import ByteTokenizer, make, show, show_all, visible

# --------------------------------------------------------------------------------------------------
# Ctrl-C

def interrupted(call, n):
    """
    Whether call() gets as far as Ctrl-C, which comes as the n-th function begins or ends. Only
    functions count that are in dataloader.py, or called from it.
    """
    moments = itertools.count()

    def trace(frame, event, arg):
        files = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if event in ("call", "return") and dataloader.__file__ in files and next(moments) == n:
            raise KeyboardInterrupt
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    with contextlib.suppress(KeyboardInterrupt):
        call()
    sys.settrace(usual)
    return next(moments) > n    # not whether it raised: Python drops what a generator's end raises

@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n_before", [0, 2])
def test_ctrl_c_in_next_costs_at_most_the_batch_that_was_ready(corpus, n_before):
    """At any moment: the loader is as it was before the call, or as it is after it."""
    loader = make(corpus, B=2)
    states, rows = [visible(loader)], []
    for _ in range(4):
        rows.append(show(next(loader)))
        states.append(visible(loader))
    for n in itertools.count():
        loader = make(corpus, B=2, threads=1)
        show_all(loader, n_before)
        if not interrupted(loader.__next__, n):
            break
        n_counted = states.index(visible(loader))
        assert n_counted in (n_before, n_before + 1)
        assert show(next(loader)) == rows[n_counted]
    assert n > 60

def test_ctrl_c_while_this_thread_encodes_is_no_error_of_a_document(eight):
    """train.py encodes val in its main thread."""
    [shard] = list_shards(eight, "train")
    encoder = Encoder(ByteTokenizer())
    encoder.tokenizer = mock.Mock(**{"encode_documents.side_effect": KeyboardInterrupt})
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(shard, 0, np.arange(2), shard.read(0))

# --------------------------------------------------------------------------------------------------
# Lanes and chunks

@pytest.mark.parametrize("n_sources, megabytes, T, num_lanes", [
    (1, 3, 127, 64),
    (4, 3, 127, 32),    # a row group and two chunks of 2 MB, of each source: 28 MB a lane
    (10, 3, 127, 8),
    (1, 64, 127, 8),
    (1, 3, 16383, 8)])    # 336 rows: 64 lanes would end with 32 empty ones
def test_default_lanes_fit_in_memory_and_cost_at_most_2_percent_of_padding(
        n_sources, megabytes, T, num_lanes):
    shard = types.SimpleNamespace(text_bytes=7 * megabytes << 20, group_sizes=7 * [100])
    shards = {name: [shard] for name in range(n_sources)}
    assert dataloader.default_num_lanes(shards, 2 << 20, T, is_finite=True) == num_lanes
    if T > 128:
        assert dataloader.default_num_lanes(shards, 2 << 20, T, is_finite=False) == 64

def test_default_lanes_are_one_at_least_for_each_rank_of_an_endless_run(eight):
    start = functools.partial(make, eight, num_lanes=None, rank=0, T=1, chunk_bytes=1)
    with mock.patch.object(dataloader, "default_num_lanes", return_value=64):
        lanes = {W: start(world_size=W).num_lanes for W in (1, 8, 7, 56, 64, 128, 1023)}
        assert lanes == {1: 64, 8: 64, 7: 70, 56: 112, 64: 64, 128: 128, 1023: 1023}
        assert start(world_size=7, epochs=1).num_lanes == 64

@pytest.mark.parametrize("num_lanes, threads, n_ahead, n_workers", [
    (1, 1, 2, 1),
    (1, 4, 8, 4),
    (1, 24, 10, 5),    # 16 chunks of 64 MB fit in 1 GB; five, three times, while they are made
    (4, 24, 2, 5),
    (64, 24, 1, 5)])
def test_chunks_ahead_fit_in_a_gigabyte_with_any_number_of_threads(
        eight, num_lanes, threads, n_ahead, n_workers):
    groups = mock.patch.object(dataloader, "bytes_of_group", return_value=40 << 20)
    with groups:
        loader = make(eight, num_lanes=num_lanes, threads=threads, chunk_bytes=64 << 20)
    maker = loader._maker
    assert (maker.n_ahead, maker.workers._max_workers) == (n_ahead, n_workers)
    show_all(loader, 2 * num_lanes)
    assert len(maker.futures) <= num_lanes * (1 + n_ahead)

# --------------------------------------------------------------------------------------------------
# Mixtures

def rows_off(step):
    """
    The exact most that a source is off its share in n <= 1,024 rows, with any weights. The rows are
    points on a circle, and a source is an arc of it. An arc from the i-th point to the j-th has
    j - i + 1 of n points, and should have n times its length.
    """
    points, worst, circle = [], 0, 2**64
    for n in range(1, 1025):
        insort(points, n * step * dataloader.SPREAD % circle)
        off = np.arange(n) - n * (np.array(points, np.uint64) / circle)
        worst = max(worst, off.max() - off.min() + 1)
    return worst

def test_rows_of_mixtures_are_even_in_the_run_and_on_each_rank():
    assert 5.2 < rows_off(1) < 5.3
    worlds = [2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 48, 96, 5, 10, 20, 40, 80, 7, 14, 28, 56]
    assert 6.7 < max(map(rows_off, worlds)) < 6.8
