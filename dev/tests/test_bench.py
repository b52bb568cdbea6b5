"""
dev/bench.py counts what the loader delivers, and each of its commands prints a line each.

    python -m pytest dev/tests/test_bench.py
"""

import collections
import itertools
import os
import pickle
import random
import re

import pyarrow as pa
import pytest

from dataloader import PACKINGS, PackedLoader
from dataset import list_shards, write_shard
from dev import bench
from dev.drawn import ByteTokenizer
from tokenizer import RustBPETokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two shards of 8 row groups each, and a tokenizer."""
    folder, draw = tmp_path_factory.mktemp("bench"), random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 500))) for _ in range(240)]
    groups = [pa.array(texts[i:i + 15]) for i in range(0, 240, 15)]
    write_shard(f"{folder}/data/train-0.parquet", groups[:8])
    write_shard(f"{folder}/data/train-1.parquet", groups[8:])
    write_shard(f"{folder}/data/val.parquet", [pa.array(["validation"])])
    RustBPETokenizer.train_from_iterator(iter(texts), 300).save(f"{folder}/tokenizer")
    return folder

@pytest.fixture
def fresh(monkeypatch):
    """What runs in a process of its own runs here, and is pickled."""
    def run_here(function, job):
        pickle.dumps((function, job))
        return function(job)

    monkeypatch.setattr(bench, "run_fresh", run_here)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr(bench, "cores", lambda: 1)
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")    # is set by each line

def test_counts_of_two_documents():
    """Of 5 and 4 tokens, in rows of 8: what is padded, dropped, and cut although it fits."""
    def counts_of(packing):
        counts = bench.count_rows(packing, [5, 4], 8)
        return [counts[name] for name in ("rows", "padding", "dropped", "fit", "cut")]

    assert counts_of("wholefit") == [2, 3 + 4, 0, 2, 0]
    assert counts_of("bestfit") == [1, 0, 1, 2, 1]
    assert counts_of("flat") == [2, 6, 0, 2, 1]      # a row begins with the last token before
    assert counts_of("exactfit") == [2, 6, 0, 2, 1]    # 5 + 3; BOS again and the last token

@pytest.mark.parametrize("packing", [*PACKINGS])
def test_counts_are_those_of_delivered_rows(base, packing):
    """One epoch of one lane: of its chunks' lengths, and of the pieces and targets of all rows."""
    T, counts = 30, collections.Counter()
    options = {"data_dir": f"{base}/data", "num_lanes": 1, "chunk_bytes": 5000, "epochs": 1}
    with PackedLoader(ByteTokenizer(), 1, T, "train", packing=packing, **options) as loader:
        [source] = loader.sources.values()
        for n in range(source.chunks_per_lane):
            lengths = bench.lengths_of_chunk(loader, n)
            counts += bench.count_rows(packing, lengths, T + 1)
        n_targets, n_rows, stops, whole = 0, 0, {}, set()
        for _, targets in loader:
            n_targets += int((targets >= 0).sum())
            n_rows += 1
            for piece in loader.pieces()[0]:
                stops[piece.location] = max(stops.get(piece.location, 0), piece.stop)
                if piece.start == 0:
                    whole.add((piece.location, piece.stop))
    lengths = {}
    for shard in list_shards(f"{base}/data", "train"):
        for row_group in range(len(shard.group_sizes)):
            for row, text in enumerate(shard.read(row_group).to_pylist()):
                lengths[shard.path, row_group, row] = len(text) + 1
    fit = {location for location in stops if lengths[location] <= T + 1}
    assert counts["rows"] == n_rows and counts["padding"] == n_rows * T - n_targets
    assert counts["dropped"] == sum(lengths.values()) - sum(stops.values())
    assert counts["fit"] == len(fit)
    assert counts["cut"] == sum((location, lengths[location]) not in whole for location in fit)

def test_packings_and_lengths_print_a_line_for_each(base, capsys):
    words = f"--data {base}/data --tokenizer {base}/tokenizer --T 64".split()
    bench.main(["packings", *words])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*PACKINGS]
    lines = list(bench.compare_lengths(n_chunks=1))
    assert len(lines) == 2 + 2 * len(bench.LENGTHS)
    assert all(line.count("%") == 2 * len(PACKINGS) for line in lines[2:])

def test_speed_prints_a_line_for_each_input(base, fresh):
    folder, data = f"{base}/tokenizer", f"{base}/data"
    lines = bench.measure_speed(folder, data, 2, 32, ["tiktoken"], ["flat", "exactfit"], 0.01)
    lines = [line.split() for line in lines][2:]
    inputs = ("text", "tiktoken"), ("tokens", "-")
    want = itertools.product(inputs, ("flat", "exactfit"))
    assert [line[:3] for line in lines] == [
        [kind, packing, engine] for (kind, engine), packing in want]
    assert all(float(line[4]) > 0 for line in lines)

def test_remote_counts_requests(base, monkeypatch):
    """Each request takes its time: the first batch waits for at least two in succession."""
    monkeypatch.setattr(bench.SlowFile, "latency", 0.05)
    _, line, waits = bench.measure_remote(
        f"{base}/tokenizer", f"{base}/data", 2, 16, 3, 8, megabytes=0.1, steps=2, step_seconds=0.01)
    seconds, n_requests = re.search(r"first batch (\S+) s; .* (\d+)$", line).groups()
    assert float(seconds) > 0.1 and int(n_requests) >= 2
    assert re.fullmatch(r"2 steps of 0.01 s: waits \d+.\d%", waits)

def test_mixing_prints_a_line_for_each_cell(base, fresh):
    lines = bench.measure_mixing(
        f"{base}/tokenizer", f"{base}/data", "tiktoken", 2, 32, lanes=[0, 2],
        chunks=[0.01, 0.02], sources=[1, 2], groups=[0.05], megabytes=0.2)
    lines = [line.split() for line in lines][2:]
    assert [line[0] for line in lines] == ["1"] * 4 + ["2"] * 4
    assert [line[3] for line in lines] == ["64", "64", "2", "2"] * 2
    assert [line[4] for line in lines] == ["0.01", "0.02"] * 4
    assert all(float(line[6].rstrip("%")) > 0 for line in lines)

def test_a_fresh_process_has_its_own_memory():
    assert 10 < bench.run_fresh(peak_of, None) < 1000

def peak_of(_):
    return bench.peak_memory()
