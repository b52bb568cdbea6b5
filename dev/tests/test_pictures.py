"""dev/pictures.py: the bars of a row are its pieces. test_runs.py has the picture of documents."""

import importlib
import itertools
import sys

import numpy as np
import pytest

from dataloader import PACKINGS
from test_dataloader import ByteTokenizer, write


@pytest.fixture
def pictures():
    pytest.importorskip("matplotlib")
    return importlib.import_module("dev.pictures")

def test_pictures_without_matplotlib_say_so_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dev.pictures", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*; pip install matplotlib"):
        importlib.import_module("dev.pictures")

def test_bars_of_a_row_are_its_pieces(pictures, tmp_path):
    lengths = itertools.cycle([30, 170, 90, 55, 12])
    texts = [letter * n for letter, n in zip("abcdefgh" * 20, lengths, strict=False)]
    figure = pictures.rows_picture(ByteTokenizer(), write(tmp_path, [texts]), 128)
    for panel, packing in zip(figure.axes, PACKINGS, strict=True):
        assert panel.get_title() == packing
        bars, dark = [], []
        for bar in panel.patches:
            is_dark = bar.get_facecolor()[:3] == (34 / 255,) * 3
            (dark if is_dark else bars).append(bar)
        for y in range(8):
            row = [bar for bar in bars if round(bar.get_y() + 0.4) == y]
            ends = np.cumsum([bar.get_width() for bar in row]).tolist()
            assert [bar.get_x() for bar in row] == [0, *ends[:-1]]
            assert ends[-1] <= 129
        n_first = sum(bar.get_x() == 0 for bar in dark)
        assert (n_first == 8) == (packing != "flat"), "rows begin with BOS"
        assert panel.lines, "cuts are marked"
