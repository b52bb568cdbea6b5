"""
dev/reference.py and dev/drawn.py: the printed example, and a few drawn runs.

    python -m pytest dev/tests/test_reference.py
"""

import collections
import subprocess
import sys

import pytest

import dataloader
from dev import drawn, reference
from test_dataloader import HERE


def test_example_has_every_letter_once(capsys):
    """Shuffled, two lanes of two chunks, exactfit."""
    reference.main([])
    printed = capsys.readouterr().out
    _, line, rows = printed.split("\n\n")
    assert line.count("chunk") == 4
    letters = [text.split(": ")[1] for text in rows.splitlines()[1:]]
    assert all(len(row) == 16 for row in letters)
    counts = collections.Counter("".join(letters))
    documents = [text for groups in reference.SHARDS for group in groups for text in group]
    assert all(counts[text[0]] == len(text) for text in documents)
    assert [text.split(":")[0].split()[-1] for text in rows.splitlines()[1:]] == [
        str(g % 2) for g in range(len(letters))]

def test_drawn_runs_have_the_rows_of_the_reference(capsys):
    reference.main(["--drawn", "12", "--seed", "700"])
    assert "no difference" in capsys.readouterr().out

def test_a_difference_is_an_error_that_names_the_seed(monkeypatch):
    monkeypatch.setattr(dataloader, "GOLDEN", 1 << 61)
    with pytest.raises(AssertionError, match=r"seed \d+, row \d+: the loader has"):
        drawn.compare(40, 700)

def test_finite_runs_on_real_ranks(capsys):
    reference.main(["--ranks", "2"])
    assert "no difference" in capsys.readouterr().out

@pytest.mark.parametrize("name", ["reference", "runs", "bench", "pictures"])
def test_a_file_that_is_run_by_its_path_says_how(name):
    command = [sys.executable, f"{HERE}/dev/{name}.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f"usage: python -m dev.{name}, typed where dataloader.py is\n"
