"""dev/runs.py: rows that are packed again are those of the run, and each loss is its document's."""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from dataloader import PackedLoader
from dataset import Location
from dev import runs
from test_dataloader import HERE, grouped, texts_of, write
from tokenizer import RustBPETokenizer

# --------------------------------------------------------------------------------------------------
# A run of 24 steps of two folders, by one process and by two

LONG = (7, 57, 107, 157)    # documents that are longer than rows

@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folders a, b and c of 200 documents each, and a tokenizer whose tokens are bytes."""
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(0)
    for name, letters in (("a", "abcdefgh "), ("b", "stuvwxyz "), ("c", "0123 ")):
        lengths = [300 if i in LONG else draw.randint(0, 30) for i in range(200)]
        texts = [f"{i} " + "".join(draw.choices(letters, k=n)) for i, n in enumerate(lengths)]
        write(f"{folder}/{name}", grouped(texts[:100], 20), grouped(texts[100:], 20))
    RustBPETokenizer.train_from_iterator(["x"], 265).save(f"{folder}/tokenizer")
    return folder

def words_of(base, name):
    return (f"--data {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --out {base}/{name} "
            "--device cpu --depth 1 --seq_len 64 --batch_size 16 --steps 24 --save_every 6 "
            "--eval_every 200 --num_lanes 4 --keep 9 --ledger").split()

@pytest.fixture(scope="module")
def alone(base):
    train.main(words_of(base, "alone"))
    return f"{base}/alone"

@pytest.fixture(scope="module")
def ranks(base):
    """By two ranks. One process does steps 18 to 23 again: it replaces what both wrote."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *torchrun, str(HERE / "train.py"), *words_of(base, "ranks")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    os.remove(base / "ranks/step_0000024.pt")
    train.main(["--out", f"{base}/ranks", "--resume", "auto"])
    return f"{base}/ranks"

@pytest.fixture
def documents(base):
    return texts_of(f"{base}/a") | texts_of(f"{base}/b")

@pytest.fixture(scope="module")
def seen(alone):
    """The pieces in the rows of `alone`, by a loader that this test drives."""
    pieces = []
    run = runs.open_run(alone)
    with runs.loader_of(run, argparse.Namespace(**run.saved["flags"])) as loader:
        for step in range(24):
            next(loader)
            for g, row in zip(loader.row_numbers, loader.pieces(), strict=True):
                pieces += [runs.Seen(step, g, *piece[:4]) for piece in row]
    return pieces

# --------------------------------------------------------------------------------------------------
# What is packed again, and what train.py logs of it

def test_rows_packed_again_have_each_token_of_an_epoch_once(alone, documents, seen):
    tokens, n_targets, again = collections.defaultdict(list), collections.Counter(), []
    for row in runs.pack_again(runs.open_run(alone), 0, 24):
        again += runs.seen_in(row)
        for piece in row.pieces:
            key = piece.epoch, piece.location
            tokens[key] += range(max(1, piece.start), piece.stop)    # without BOS
            n_targets[key] += (row.targets[train.targets_of(piece)] >= 0).sum()
            n_targets[key] += piece.start > 0    # without its first
    assert again == seen
    for location, text in documents.items():
        assert sorted(tokens[1, location]) == [*range(1, len(text) + 1)]
        assert n_targets[1, location] == len(text)
    assert max(epoch for epoch, _ in tokens) > 2, "two whole epochs"

@pytest.mark.parametrize("packing", ["exactfit", "flat"])
def test_nats_of_a_piece_are_those_of_its_tokens(base, documents, packing):
    """With nats that name the target, each piece has the sum of its characters."""
    tokenizer = RustBPETokenizer.from_directory(f"{base}/tokenizer")
    with PackedLoader(tokenizer, 8, 64, "train", data_dir=f"{base}/a", packing=packing) as loader:
        for _ in range(5):
            _, targets = next(loader)
            of_rows = train.nats_of_pieces(loader, targets.clamp(min=0).float())
            for g, pieces in zip(loader.row_numbers, loader.pieces(), strict=True):
                for piece, nats in zip(pieces, of_rows[g], strict=True):
                    text = documents[piece.location][piece.start:piece.stop - 1]
                    assert nats == sum(tokenizer.encode(text))

def test_ledger_is_a_table_of_all_pieces(alone, seen):
    rows = runs.read_ledger(alone).to_pylist()
    columns = "step", "g", "path", "row_group", "row", "epoch", "start", "stop"
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (*piece[:2], *piece.location[:3], *piece[3:]) for piece in seen]
    nats = runs.read_nats(runs.open_run(alone))
    assert [row["nats"] for row in rows] == [one for of_row in sorted(nats) for one in nats[of_row]]

def test_one_and_two_ranks_log_the_same_losses(alone, ranks):
    one, other = [runs.read_nats(runs.open_run(folder)) for folder in (alone, ranks)]
    assert sorted(one) == sorted(other) == [(g // 16, g) for g in range(24 * 16)]
    for row, nats in one.items():
        assert nats == pytest.approx(other[row], rel=1e-2, abs=0.05)

# --------------------------------------------------------------------------------------------------
# when and audit

def described(piece, documents):
    return (f"{piece.location}, epoch {piece.epoch}, tokens {piece.start}-{piece.stop - 1}: "
            f"{documents[piece.location][:60]!r}")

def test_when_prints_past_and_coming_steps(alone, base, documents, seen, capsys):
    """At step 18 of the run."""
    middle = base / "middle"
    middle.mkdir()
    for name in ["step_0000018.pt", "log.jsonl"]:
        os.link(f"{alone}/{name}", middle / name)
    location = Location(f"{base}/a/train-1.parquet", 1, 8, "train-1.parquet")
    pieces = runs.without_bos_again([piece for piece in seen if piece.location == location])
    assert pieces[0].step < 18 <= pieces[-1].step, "past and to come"
    want = []
    for piece in pieces:
        to_come = "to come: " if piece.step >= 18 else ""
        want.append(f"{to_come}step {piece.step}, row {piece.g} of the run: "
                    f"{described(piece, documents)}")
    want.append(f"pieces: {len(pieces)}; documents: 1; in none of the run's 24 steps, of which 18 "
                "are done: 0")
    for words in (["a/train-1.parquet:1:8"], ["a/train-1.parquet:28"],
                  ["--text", documents[location]]):
        runs.main(["when", str(middle), *words])
        assert capsys.readouterr().out.splitlines() == want

@pytest.mark.parametrize("words, first, stop", [
    ("--steps 1:3", 1, 3), ("", 18, 19), ("--steps 20:24", 20, 24)])
def test_audit_names_the_documents_of_the_rows(alone, documents, seen, capsys, words, first, stop):
    """Before, at and after a checkpoint: a line for each piece."""
    runs.main(["audit", "--resume", f"{alone}/step_0000018.pt", *words.split()])
    rows = re.split(r"^(?=step)", capsys.readouterr().out, flags=re.M)[1:]
    want = {g: {f"step {g // 16}, row {g} of the run"} for g in range(16 * first, 16 * stop)}
    for piece in seen:
        if first <= piece.step < stop and piece.stop > 1:    # else BOS again, not worth a line
            want[piece.g].add(f"  {described(piece, documents)}")
    assert [{*row.splitlines()} for row in rows] == [*want.values()]

@pytest.fixture(scope="module")
def changed(alone, base):
    """The run `alone` up to step 12, then twice resumed with other flags: at 12 and at 18."""
    folder = base / "changed"
    folder.mkdir()
    for name in ("step_0000012.pt", "log.jsonl"):
        shutil.copy(f"{alone}/{name}", folder / name)
    resume = ["--out", str(folder), "--resume", "auto", "--keep", "9", "--steps"]
    train.main([*resume, "18", "--batch_size", "8", "--seq_len", "48"])
    train.main([*resume, "24", "--batch_size", "4", "--data", f"{base}/a", f"{base}/b"])
    return str(folder)

@pytest.mark.parametrize("file, first, stop", [
    (12, 12, 15), (12, 17, 20), (18, 18, 19), (18, 10, 13), (24, 0, 24)])
def test_audit_of_a_run_with_changed_flags_names_the_rows_of_each_part(changed, file, first, stop):
    run = runs.open_run(f"{changed}/step_{file:07d}.pt")
    lines = [*runs.audit(run, (first, stop))]
    told = [tuple(map(int, re.findall(r"\d+", line))) for line in lines if line.startswith("step")]
    assert told == sorted(row for row in runs.read_nats(runs.open_run(changed)) if first <= row[0] < stop)

@pytest.mark.filterwarnings("ignore:load_state_dict")
def test_audit_and_when_read_the_sources_that_came_and_left(alone, base, documents, tmp_path):
    """From checkpoints before and after that. (Once, they printed None as the text.)"""
    for name in ("step_0000012.pt", "log.jsonl"):
        shutil.copy(f"{alone}/{name}", tmp_path)
    train.main(["--out", str(tmp_path), "--resume", "auto", "--steps", "14", "--keep", "9",
                "--data", f"{base}/b", f"{base}/c"])
    documents |= texts_of(f"{base}/c")
    texts = {str(location): repr(text[:60]) for location, text in documents.items()}
    seen = set()
    for file in (12, 14):
        run = runs.open_run(f"{tmp_path}/step_{file:07d}.pt")
        for line in runs.audit(run, (11, 14)):
            if not line.startswith("step"):
                place, _, text = re.fullmatch(r"  (.*), epoch (.*?): (.*)", line).groups()
                assert text == texts[place]
                seen.add(place.removeprefix(f"{base}/")[0])
    assert seen == {*"abc"}
    lines = [*runs.when(runs.open_run(str(tmp_path)), "a/train-1.parquet:28")]
    assert "documents: 1;" in lines[-1]

@pytest.mark.parametrize("lost, message", [
    (["header of 0"], "does not have the flags of step 0"),
    (["header of 12"], "step 12: the rows that were packed again are not those of "),
    ([0, 1, 2], None)])
def test_audit_refuses_to_name_what_the_log_does_not_know(changed, tmp_path, lost, message):
    """Without these records of the log; without some steps, the others still show that it is right."""
    shutil.copy(f"{changed}/step_0000018.pt", tmp_path)
    kept = []
    for line in Path(changed, "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        name = f"header of {record['step']}" if "flags" in record else record["step"]
        if name not in lost:
            kept.append(line)
    (tmp_path / "log.jsonl").write_text("\n".join(kept))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        run = runs.open_run(f"{tmp_path}/step_0000018.pt")
        [*runs.audit(run, (13, 14))]

# --------------------------------------------------------------------------------------------------
# losses

def test_losses_compare_a_document_with_the_same_steps(monkeypatch):
    """The loss falls from 2 bits per byte to 1. One document is 1 above it, one 0.5 below."""
    periods = {}
    for period, usual in enumerate((2, 1)):
        periods[period] = {}
        for row in range(10):
            above = {3: 1, 7: -0.5}.get(row, -0.0625)    # 0 on average
            location = Location("x", 0, row, "x")
            periods[period][location] = np.array([450, 500, 500 * (usual + above)])
    monkeypatch.setattr(runs, "sum_losses", lambda *_: {"x": periods})
    [found] = runs.losses_of("run", {})
    assert found.name == "x" and found.n_tokens == 9 * 1000
    assert found.usual == pytest.approx([2, 1])
    easiest, *_, hardest = found.documents
    assert easiest.location.row == 7 and hardest.location.row == 3
    assert easiest[:3] == pytest.approx((-0.5, 1.0, 1000))
    assert hardest[:3] == pytest.approx((1.0, 2.5, 1000))

@pytest.mark.parametrize("n, shown", [(1, [0, -1]), (9, [0, 1, 2, 3])])
def test_losses_print_the_documents_at_both_ends_once(alone, documents, capsys, n, shown):
    """Of each source, the four long documents alone have 200 bytes."""
    runs.main(["losses", alone, "--head", str(n)])
    lines = iter(capsys.readouterr().out.splitlines())
    run = runs.open_run(alone)
    for source in runs.losses_of(run, runs.read_nats(run)):
        assert next(lines).startswith(f"{source.name}: {source.n_tokens:,} tokens, ")
        next(lines)    # names of columns
        for i in shown:
            location = source.documents[i].location
            assert next(lines).endswith(f"    {location}: {documents[location][:60]!r}")
    assert not [*lines]

def test_logs_of_older_runs_do_not_name_their_folder(alone, tmp_path):
    shutil.copy(f"{alone}/step_0000018.pt", tmp_path)
    log = Path(alone, "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(re.sub(r', "cwd": ".*?"', "", log))
    assert '"cwd"' in log
    runs.main(["audit", "--resume", f"{tmp_path}/step_0000018.pt", "--steps", "2:4"])

# --------------------------------------------------------------------------------------------------
# plot

def test_plot_draws_the_log_of_each_run(alone, changed, tmp_path, capsys, monkeypatch):
    """A thin and a thick line for each run, with the values of its log; a mark for each resume."""
    from matplotlib.figure import Figure
    figures, savefig = [], Figure.savefig

    def save(figure, *where, **how):
        figures.append(figure)
        savefig(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", save)
    runs.main(["plot", alone, changed, "--out", f"{tmp_path}/plot.pdf"])
    assert "plot.pdf: 2 runs" in capsys.readouterr().out
    assert (tmp_path / "plot.pdf").read_bytes().startswith(b"%PDF")
    loss, *others = figures[0].axes
    log = [record for record in train.read_log(f"{alone}/log.jsonl") if "loss" in record]
    of_alone, mean, no_resumes, *_, resumes = loss.lines
    assert [*of_alone.get_ydata()] == [record["loss"] for record in log]
    assert [*mean.get_xdata()] == [record["step"] for record in log]
    assert not len(no_resumes.get_xdata()) and [*resumes.get_xdata()] == [12, 18]
    assert [len(panel.lines) for panel in others] == [2, 2, 4, 4]

def test_curves_are_means_without_what_is_missing():
    values = [np.nan, *range(1, 200)]
    assert runs.smooth(values) == pytest.approx(
        [np.nanmean(values[max(0, i - 2):i + 3]) for i in range(200)])

def test_plot_says_that_it_needs_matplotlib(alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        runs.main(["plot", alone])
