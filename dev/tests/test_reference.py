"""dev/reference.py and dev/drawn.py: the printed example, and a few drawn runs. dev/mutants.py."""

import collections

import pytest

import dataloader
from dev import drawn, mutants, reference


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

def test_each_mutant_is_an_edit_of_dataloader_or_tokenizer():
    """The text of each occurs once. If you changed it, change the mutant, too."""
    counts = {name: mutants.count(before) for name, before, _ in mutants.MUTANTS}
    assert len(counts) == len(mutants.MUTANTS), "two mutants have the same name"
    assert {name: n for name, n in counts.items() if n != 1} == {}

def test_a_name_of_no_mutant_is_an_error(monkeypatch):
    """Not "0 mutants, 0 survived", after a run of the whole suite."""
    monkeypatch.setattr("sys.argv", ["mutants", "--help"])
    with pytest.raises(SystemExit, match="no mutant has '--help' in its name"):
        mutants.main()
