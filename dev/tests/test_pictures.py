"""
dev/pictures.py: bars are the pieces of the rows, lines are what the log has.

    python -m pytest dev/tests/test_pictures.py
"""

import contextlib
import importlib
import itertools
import json
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from dataloader import PACKINGS
from dataset import Location, write_shard
from dev import runs
from dev.drawn import ByteTokenizer
from test_dataloader import HERE


@pytest.fixture
def pictures():
    pytest.importorskip("matplotlib")
    from dev import pictures
    return pictures

def test_pictures_without_matplotlib_say_so_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dev.pictures", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*; pip install matplotlib"):
        importlib.import_module("dev.pictures")

def test_bars_of_a_row_are_its_pieces(pictures, tmp_path):
    lengths = itertools.cycle([30, 170, 90, 55, 12])
    texts = [letter * n for letter, n in zip("abcdefgh" * 20, lengths, strict=False)]
    write_shard(f"{tmp_path}/train.parquet", [pa.array(texts)])
    write_shard(f"{tmp_path}/val.parquet", [pa.array(["validation"])])
    figure = pictures.rows_picture(ByteTokenizer(), str(tmp_path), 128)
    assert figure.get_supxlabel() == pictures.LEGEND
    for panel, packing in zip(figure.axes, PACKINGS, strict=True):
        assert panel.get_title() == packing
        bars, dark = [], []
        for bar in panel.patches:
            is_dark = bar.get_facecolor()[:3] == (34 / 255,) * 3
            (dark if is_dark else bars).append(bar)
        rows = [[bar for bar in bars if round(bar.get_y() + 0.4) == y] for y in range(8)]
        for row in rows:
            begins = np.cumsum([0, *(bar.get_width() for bar in row)])
            assert [bar.get_x() for bar in row] == begins[:-1].tolist()
            assert begins[-1] <= 129
        first_are_bos = sum(bar.get_x() == 0 for bar in dark)
        assert (first_are_bos == 8) == (packing != "flat"), "rows begin with BOS"
        assert panel.lines, "cuts are marked"

def test_colours_of_documents_do_not_repeat(pictures):
    colours = [pictures.colour_of(n) for n in range(300)]
    steps = [abs(np.subtract(a, b)).sum() for a, b in itertools.pairwise(colours)]
    assert len({*colours}) == 300 and min(steps) > 0.2

def write_log(folder, records):
    folder.mkdir()
    lines = [json.dumps(record) for record in records]
    (folder / "log.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    return str(folder)

def test_losses_have_steps_val_and_a_legend(pictures, tmp_path):
    records = [{"flags": {}}, *({"step": i, "loss": 9 - i} for i in range(3))]
    records.append({"step": 3, "val_bpb/web": 2.5, "val_bpb": 2.5})
    names = [write_log(tmp_path / name, records) for name in ("first", "second")]
    upper, lower = pictures.loss_picture(names).axes
    assert [text.get_text() for text in upper.get_legend().texts] == names
    assert all(line.get_xydata().tolist() == [[0, 9], [1, 8], [2, 7]] for line in upper.lines)
    assert lower.lines[0].get_xydata().tolist() == [[3, 2.5]]
    with pytest.raises(SystemExit, match="no losses in nowhere; expected folders of runs"):
        pictures.main(["loss", names[0], "nowhere"])

def test_loss_of_a_mixture_has_a_line_for_each_source(pictures, tmp_path):
    records = [{"step": step, "loss": 5.0} for step in range(3)]
    records += [{"step": step, "val_bpb/web": 2.0 + step, "val_bpb/code": 1.0 + step}
                for step in (1, 2)]
    folder = write_log(tmp_path / "run", records)
    _, lower = pictures.loss_picture([folder]).axes
    assert [line.get_ydata().tolist() for line in lower.lines] == [[3.0, 4.0], [2.0, 3.0]]
    assert [text.get_text() for text in lower.get_legend().texts] == [
        f"{folder}: web, 4.0000", f"{folder}: code, 3.0000"]
    assert len({line.get_linestyle() for line in lower.lines}) == 2

def test_long_logs_are_drawn_as_means(pictures):
    points = [(step, 2.0 * step) for step in range(450)]
    means = pictures.means_of(points)
    assert means.shape == (150, 2) and means[0].tolist() == [1.0, 2.0]

def test_documents_have_a_line_and_bars_for_each_source(pictures, monkeypatch):
    documents = [runs.Difficulty(k / 10, 1.0, 300, Location("x", 0, k)) for k in range(5)]
    losses = [runs.SourceLosses(name, 9, np.array([2.0, 1.0]), documents) for name in "ab"]
    loader = contextlib.nullcontext(SimpleNamespace(sources={}))
    monkeypatch.setattr(pictures, "newest_of", lambda run: None)
    monkeypatch.setattr(pictures, "loader_of", lambda saved: loader)
    monkeypatch.setattr(pictures, "losses_of", lambda run, sources: losses)
    left, right = pictures.documents_picture("run").axes
    assert [text.get_text() for text in left.get_legend().texts] == ["a", "b"]
    assert [line.get_xydata().tolist() for line in left.lines] == [[[0, 2], [50, 1]]] * 2
    assert len(right.patches) == 2, "a filled outline for each source"

def test_line_svg_is_a_picture_of_about_900_pixels():
    root = ElementTree.parse(HERE / "dev" / "line.svg").getroot()
    assert root.get("width") == "900"
