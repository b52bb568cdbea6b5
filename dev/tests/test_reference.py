"""dev/reference.py and dev/drawn.py: the printed example, and a few drawn runs."""

import collections

import pytest

import dataloader
from dev import drawn, reference


def test_example_has_every_letter_once(capsys):
    """Shuffled, two lanes of two chunks, exactfit."""
    reference.main([])
    _, line, rows = capsys.readouterr().out.split("\n\n")
    assert line.count("chunk") == 4
    letters = collections.Counter()
    for g, printed in enumerate(rows.splitlines()[1:]):
        before, row = printed.split(": ")
        assert before == f"  row {g}, from lane {g % 2}" and len(row) == 16
        letters.update(row)
    documents = [text for groups in reference.SHARDS for group in groups for text in group]
    assert all(letters[text[0]] == len(text) for text in documents)

def test_drawn_runs_have_the_rows_of_the_reference(capsys):
    reference.main(["--drawn", "12", "--seed", "700"])
    assert "12 runs" in capsys.readouterr().out

def test_a_difference_is_an_error_that_names_the_seed(monkeypatch):
    monkeypatch.setattr(dataloader, "GOLDEN", 1 << 61)
    with pytest.raises(AssertionError, match=r"seed \d+, row \d+: the loader has"):
        drawn.compare(40, 700)
