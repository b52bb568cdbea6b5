"""dev/pictures.py: the bars of a row are its spans."""

import importlib
import sys

import numpy as np
import pytest

from dataloader import PACKINGS


@pytest.fixture
def pictures():
    pytest.importorskip("matplotlib")
    return importlib.import_module("dev.pictures")

def test_pictures_without_matplotlib_say_so_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dev.pictures", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*; pip install matplotlib"):
        importlib.import_module("dev.pictures")

def test_bars_of_a_row_are_its_spans(pictures):
    lengths = [30, 170, 90, 55, 12] * 4
    figure = pictures.rows_picture(lengths, T := 128)
    for panel, packing in zip(figure.axes, PACKINGS, strict=True):
        assert panel.get_title() == packing
        bars, dark = [], []
        for bar in panel.patches:
            is_dark = bar.get_facecolor()[:3] == (34 / 255,) * 3
            (dark if is_dark else bars).append(bar)
        n_rows = 1 + max(round(bar.get_y() + 0.4) for bar in bars)
        n_tokens = 0
        for y in range(n_rows):
            row = [bar for bar in bars if round(bar.get_y() + 0.4) == y]
            ends = np.cumsum([bar.get_width() for bar in row]).tolist()
            assert [bar.get_x() for bar in row] == [0, *ends[:-1]]
            assert ends[-1] <= T + 1
            n_tokens += ends[-1]
        assert (n_tokens >= sum(lengths)) == (packing != "bestfit"), "which drops tokens"
        n_first = sum(bar.get_x() == 0 for bar in dark)
        assert (n_first == n_rows) == (packing != "flat"), "rows begin with BOS"
        assert panel.lines, "cuts are marked"
