"""
dev/bench.py and dev/pictures.py: what they draw, count and name is what the loader gives.

    python -m pytest dev/tests/test_bench.py
"""

import collections
import contextlib
import importlib
import itertools
import json
import os
import pickle
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

import train
from dataloader import PACKINGS
from dev import bench, ledger
from test_dataloader import ByteTokenizer, documents_in, grouped, make, run, write_shards
from tokenizer import RustBPETokenizer


@pytest.fixture(autouse=True)
def three_packings(monkeypatch):
    """Other test files may add packings."""
    monkeypatch.setattr(bench, "PACKINGS", {name: PACKINGS[name] for name in ("flat", "bestfit", "exactfit")})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("bench"), random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 500))) for _ in range(240)]
    groups = grouped(texts, [15] * 16)
    write_shards(folder / "data", [groups[:8], groups[8:], [["val one", "val two"]] * 4])
    RustBPETokenizer.train_from_iterator(iter(texts), 300).save(str(folder / "tokenizer"))
    return folder


@pytest.fixture(scope="module")
def checkpoint(base):
    """That of step 3, by train.py."""
    flags = (f"--data {base}/data --tokenizer {base}/tokenizer --out {base}/run --device cpu --depth 1 "
             "--seq_len 64 --batch_size 6 --steps 3 --eval_rows 4")
    train.main(flags.split())
    return f"{base}/run/step_0000003.pt"


@pytest.mark.parametrize("packing", [*PACKINGS])
def test_compare_counts_what_a_loader_delivers(corpus, packing):
    """Over whole chunks: of `compare`, and of the pieces of all rows."""
    loader = make(corpus, packing=packing, B=1, T=30, epochs=1, chunk_bytes=200)
    chunks = [[len(ids) for ids in bench.encode_chunk(loader, parts)]
              for _, parts in itertools.islice(bench.deal_first_lane(loader), 5)]
    counts = collections.Counter()
    for lengths in chunks:
        counts.update(bench.count_rows(PACKINGS[packing], lengths, 31))
    rows, unmasked = [], 0
    while len(rows) < counts["rows"]:
        unmasked += int((next(loader)[1] >= 0).sum())
        rows += loader.pieces()
    stops = {}
    for piece in itertools.chain(*rows):
        stops.setdefault(piece.location, []).append(piece.stop)
    lengths = list(itertools.chain(*chunks))
    assert len(stops) == len(lengths) and counts["padding"] == counts["rows"] * 30 - unmasked
    assert counts["dropped"] == sum(lengths) - sum(map(max, stops.values()))
    fit = {at: len(text) + 1 for at, text in documents_in(corpus).items() if len(text) <= 30}
    whole = {piece.location for piece in itertools.chain(*rows)
             if piece.stop - piece.start == fit.get(piece.location)}
    assert counts["cut"] == len(stops.keys() & fit.keys() - whole)
    assert (counts["dropped"] > 100) == (packing == "bestfit") and counts["padding"] > 0
    assert (counts["cut"] > 0) == (packing != "wholefit")


def test_compare_and_bench_print_a_line_each(base, monkeypatch):
    def run_here(function, job):
        pickle.dumps((function, job))
        return SimpleNamespace(result=lambda: function(job))

    here = contextlib.nullcontext(SimpleNamespace(submit=run_here))
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda *args: here)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: None)
    monkeypatch.setattr(bench, "cores", lambda: 1)
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")    # is set by each line
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)    # gigatoken's, for less time
    data, folder = str(base / "data"), str(base / "tokenizer")
    lines = list(bench.compare(ByteTokenizer(), data, T=32))
    assert re.match(r"of the first 1\d\d,\d\d\d tokens, in \d+ chunks of one lane", lines[0])
    assert [line.split()[0] for line in lines[2:]] == [*bench.PACKINGS]
    lines = [line.split() for line in bench.bench(folder, data, B=2, T=32, seconds=0.01)][2:]
    want = itertools.product((("text", "tiktoken"), ("tokens", "-")), bench.PACKINGS)
    assert [line[:3] for line in lines] == [[kind, packing, engine] for (kind, engine), packing in want]
    assert all(float(line[4]) > 0 for line in lines)


@pytest.mark.parametrize("steps", [(1, 3), None, (4, 6)])
def test_audit_names_the_documents_of_all_ranks_rows(base, checkpoint, steps):
    """Before, at and after the checkpoint: each token is encoded again from what is named."""
    tokenizer = RustBPETokenizer.from_directory(str(base / "tokenizer"))
    lines = [json.loads(line) for line in bench.audit(checkpoint, steps, as_json=True)]
    first, stop = np.multiply(steps or (3, 4), 6).tolist()
    rows, _ = run(str(base / "data"), steps=stop // 6, world=2, B=3, T=64, tokenizer=tokenizer, num_lanes=8,
                  chunk_bytes=None, shuffle_seed=1)
    assert [6 * line["step"] + line["row"] for line in lines] == [*range(first, len(rows))]
    for line, row in zip(lines, rows[first:], strict=True):
        got = []
        for piece in line["documents"]:
            got += [tokenizer.get_bos_token_id()] * (piece["offset"] - len(got))    # BOS again
            row_group = pq.ParquetFile(piece["path"]).read_row_group(piece["row_group"])
            text = row_group["text"][piece["row"]].as_py()
            assert text.startswith(piece["text"])
            got += [tokenizer.get_bos_token_id(), *tokenizer.encode(text)][piece["from"]:piece["to"]]
        assert got + [-100] * (65 - len(got)) == list(row)


def test_audit_says_where_a_document_continues_after_its_bos_again(checkpoint):
    lines = list(bench.audit(checkpoint, (50, 56)))
    again = [line for line in lines if ", after its BOS again: " in line]
    assert again and all(int(re.search(r"tokens (\d+)", line)[1]) > 0 for line in again)
    assert len([line for line in lines if line.startswith("step 53, row ")]) == 6


def test_audit_refuses_steps_before_changed_flags(checkpoint, monkeypatch):
    saved = {**train.load_checkpoint(checkpoint), "constant_since": 2}
    monkeypatch.setattr(ledger, "load_checkpoint", lambda path: saved)
    with pytest.raises(ValueError, match=r"at step 2: .*; pass one of step 2 or before"):
        next(bench.audit(checkpoint, (1, 2)))


def test_commands_print_lines_and_mistakes_are_one_line(base, capsys):
    bench.main(f"compare {base}/data --tokenizer {base}/tokenizer --T 64".split())
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 5 and f"tokenizer: {base / 'tokenizer'}" in printed.err
    for arguments, words in (("", "required"), ("audit", "required"), ("audit --steps 4:4", "expected A:B"),
                             ("audit --steps 4", "4: expected A:B"), ("compare --T 0", "at least 1")):
        with pytest.raises(SystemExit):
            bench.main(arguments.split())
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error
    with pytest.raises(SystemExit, match="expected one folder, not a b; "):
        bench.main(["compare", "--data", "a", "b"])


@pytest.fixture
def pictures(monkeypatch):
    pytest.importorskip("matplotlib")
    from dev import pictures
    monkeypatch.setattr(pictures, "PACKINGS", bench.PACKINGS)
    return pictures


def test_pictures_without_matplotlib_say_so_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dev.pictures", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*matplotlib"):
        importlib.import_module("dev.pictures")


def test_bars_of_a_row_fill_it(base, pictures, tmp_path):
    pictures.main(f"rows {base}/data --tokenizer {base}/tokenizer --T 128 --out {tmp_path}/rows.svg".split())
    words = "Dark bar: it begins here", "it is cut, and goes on", *bench.PACKINGS
    assert all(word in (tmp_path / "rows.svg").read_text() for word in words)
    figure = pictures.rows_picture(ByteTokenizer(), str(base / "data"), 128)
    for panel, packing in zip(figure.axes, bench.PACKINGS, strict=True):    # dark: where BOS is
        bars = [bar for bar in panel.patches if bar.get_facecolor()[:3] != (34 / 255,) * 3]
        rows = [[bar for bar in bars if round(bar.get_y() + 0.4) == y] for y in range(8)]
        widths = [sum(bar.get_width() for bar in row) for row in rows]
        assert max(widths) == 129 and widths.count(129) >= 7, "only the last row of a chunk is short"
        assert all(row[0].get_x() == 0 for row in rows)
        dark = {bar.get_y() for bar in panel.patches if bar not in bars and bar.get_x() == 0}
        assert (len(dark) == 8) == (packing != "flat"), "rows begin with BOS"
        assert panel.lines, "cuts are marked"


def test_colours_of_documents_do_not_repeat(pictures):
    colours = [pictures.colour_of(n) for n in range(300)]
    steps = [abs(np.subtract(a, b)).sum() for a, b in itertools.pairwise(colours)]
    assert len({*colours}) == 300 and min(steps) > 0.2


def test_losses_have_steps_val_and_a_legend(pictures, tmp_path):
    """A run without losses is an error."""
    names = [str(tmp_path / name) for name in ("first", "second")]
    records = [{"flags": {}}, *({"step": i, "loss": 9 - i} for i in range(3)), {"step": 3, "val_bpb": 2.5}]
    for name in names:
        os.makedirs(name)
        with open(f"{name}/log.jsonl", "w") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records) + '{"step": 4, "lo')
    upper, lower = pictures.loss_picture(names).axes
    assert [text.get_text() for text in upper.get_legend().texts] == names
    assert all(line.get_xydata().tolist() == [[0, 9], [1, 8], [2, 7]] for line in upper.lines)
    assert lower.get_xlabel() == "step" and lower.lines[0].get_xydata().tolist() == [[3, 2.5]]
    with pytest.raises(SystemExit, match="no losses in nowhere; expected folders of runs"):
        pictures.main(["loss", names[0], "nowhere"])


def test_loss_of_a_mixture_has_a_line_for_each_source(pictures, tmp_path):
    records = [{"step": step, "loss": 5.0} for step in range(3)]
    records += [{"step": step, "val_bpb": bpb + step, "source": source} for step in (1, 2)
                for source, bpb in (("web", 2.0), ("code", 1.0), ("all", 1.5))]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    upper, lower = pictures.loss_picture([str(tmp_path)]).axes
    assert [line.get_xydata().tolist() for line in lower.lines] == [
        [[1, bpb + 1], [2, bpb + 2]] for bpb in (2.0, 1.0, 1.5)]
    assert [text.get_text() for text in lower.get_legend().texts] == [
        f"{tmp_path}: web, 4.0000", f"{tmp_path}: code, 3.0000", f"{tmp_path}: all, 3.5000"]
    assert len({line.get_linestyle() for line in lower.lines}) == 3
    assert len(upper.lines) == 1
