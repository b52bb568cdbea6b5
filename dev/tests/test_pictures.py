"""dev/pictures.py: the bars of a row are its spans."""

import importlib

import pytest

from dataloader import PACKINGS


def test_bars_of_a_row_are_its_spans():
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("dev.pictures")
    lengths = [30, 170, 90, 55, 12] * 4
    figure = pictures.rows_picture(lengths, T := 128)
    for panel, (packing, pack) in zip(figure.axes, PACKINGS.items(), strict=True):
        assert panel.get_title() == packing
        drawn = [(round(bar.get_y()), round(bar.get_width(), 2)) for bar in panel.patches]
        want = []
        for y, row in enumerate(sorted(pack(lengths, T + 1), key=min)):
            want += [(y, stop - start) for _, start, stop in row]
            want += [(y, T / 400) for _, start, _ in row if start == 0]    # a dark edge
        assert sorted(drawn) == sorted(want)
        assert panel.lines, "cuts are marked"
