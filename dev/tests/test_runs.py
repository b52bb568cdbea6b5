"""dev/runs.py: the ledger has each token once, and what is packed again is what the ledger has."""

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
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import train
from dataset import Location
from dev import runs
from test_dataloader import HERE, grouped, texts_of, write
from tokenizer import RustBPETokenizer

# --------------------------------------------------------------------------------------------------
# A run of 24 steps of two folders, by one process and by two

LONG = (7, 57, 107, 157)    # documents that are longer than rows

@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folders a and b of 200 documents each, and a tokenizer whose tokens are bytes."""
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(0)
    for name, letters in (("a", "abcdefgh "), ("b", "stuvwxyz ")):
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

def ledgers_of(*steps):
    return [f"_ledger/step_{step:07d}_rank_0000.parquet" for step in steps]

def location_of(row):
    name = os.path.basename(row["path"])
    return Location(row["path"], row["row_group"], row["row"], name)

# --------------------------------------------------------------------------------------------------
# The ledger

def test_ledger_has_each_token_of_an_epoch_once_and_replay_finds_the_same(alone, documents):
    ledger = runs.read_ledger(alone)
    tokens, targets = collections.defaultdict(list), collections.Counter()
    for row in ledger.to_pylist():
        key = row["epoch"], location_of(row)
        tokens[key] += range(max(1, row["start"]), row["stop"])    # without BOS
        targets[key] += row["tokens"]
        assert row["bytes"] == row["tokens"]
    for location, text in documents.items():
        assert sorted(tokens[1, location]) == [*range(1, len(text) + 1)]
        assert targets[1, location] == len(text)
    assert max(epoch for epoch, _ in tokens) > 2, "two whole epochs"
    wanted = {*documents}
    again = runs.replay(alone, runs.newest_of(alone), True, 24, wanted)
    assert sorted(again) == sorted(runs.seen_in(ledger, wanted))

def test_ledgers_of_one_and_two_ranks_are_equal(alone, ranks):
    columns = "g", "path", "row_group", "row", "start"
    key = [(name, "ascending") for name in columns]
    one = runs.read_ledger(alone).sort_by(key)
    other = runs.read_ledger(ranks).sort_by(key)
    assert one.drop(["nats"]).equals(other.drop(["nats"]))
    assert np.allclose(one["nats"], other["nats"], rtol=1e-2, atol=0.05)

def test_ledger_of_data_that_moved_says_what_is_left_out(alone, base, capsys):
    with runs.loader_of(runs.newest_of(alone)) as loader:
        b = {name: source for name, source in loader.sources.items() if name.endswith("/b")}
    ledger = runs.read_ledger(alone, b)
    assert "left out: 2 files that the run no longer has (were they moved?)" in capsys.readouterr().out
    assert {*ledger["path"].to_pylist()} == {f"{base}/b/train-{i}.parquet" for i in range(2)}

# --------------------------------------------------------------------------------------------------
# when and audit

def described(piece, documents):
    return (f"{piece.location}, epoch {piece.epoch}, tokens {piece.start}-{piece.stop - 1}: "
            f"{documents[piece.location][:60]!r}")

def test_when_prints_past_and_coming_steps(alone, base, documents, capsys):
    """At step 18 of the run: with a whole ledger, and with one of which a file is missing."""
    middle = base / "middle"
    (middle / "_ledger").mkdir(parents=True)
    ledgers = ledgers_of(0, 6, 12)
    for name in ["step_0000018.pt", "log.jsonl", *ledgers]:
        os.link(f"{alone}/{name}", middle / name)
    location = Location(f"{base}/a/train-1.parquet", 1, 8, "train-1.parquet")
    seen = runs.without_bos_again([*runs.seen_in(runs.read_ledger(alone), {location})])
    assert seen[0].step < 18 <= seen[-1].step, "past and to come"
    want = []
    for piece in seen:
        to_come = "to come: " if piece.step >= 18 else ""
        want.append(f"{to_come}step {piece.step}, row {piece.g} of the run: "
                    f"{described(piece, documents)}")
    want.append(f"pieces: {len(seen)}; documents: 1; in none of the run's 24 steps, of which 18 "
                "are done: 0")
    for words in (["a/train-1.parquet:1:8"], ["a/train-1.parquet:28"],
                  ["--text", documents[location]]):
        runs.main(["when", str(middle), *words])
        assert capsys.readouterr().out.splitlines() == want
    os.remove(middle / ledgers[0])
    assert [*runs.when(str(middle), "a/train-1.parquet:28")] == want

def test_when_names_documents_in_no_row(alone, documents, monkeypatch):
    """As if the run had only its first 40 pieces."""
    ledger = runs.read_ledger(alone).slice(0, 40)
    monkeypatch.setattr(runs, "read_ledger", lambda run, sources: ledger)
    monkeypatch.setattr(runs, "replay", lambda *_: [])
    missing = sorted({*documents} - {*map(location_of, ledger.to_pylist())})
    lines = [*runs.when(alone, text=" ")]
    found = [line for line in lines if line.startswith("in none of the run's 24 steps: ")]
    assert found == [f"in none of the run's 24 steps: {location}: {documents[location][:60]!r}"
                     for location in missing[:10]]
    assert lines[-1].endswith(f" steps, of which 24 are done: {len(missing)}")

@pytest.mark.parametrize("words, first, stop", [
    ("--steps 1:3", 1, 3), ("", 18, 19), ("--steps 20:24", 20, 24)])
def test_audit_names_the_documents_of_the_rows(alone, documents, capsys, words, first, stop):
    """Before, at and after a checkpoint: a line for each piece that the ledger has."""
    runs.main(["audit", "--resume", f"{alone}/step_0000018.pt", *words.split()])
    rows = re.split(r"^(?=step)", capsys.readouterr().out, flags=re.M)[1:]
    want = {g: {f"step {g // 16}, row {g} of the run"} for g in range(16 * first, 16 * stop)}
    for piece in runs.seen_in(runs.read_ledger(alone), {*documents}):
        if first <= piece.step < stop and piece.stop > 1:    # else BOS again, not worth a line
            want[piece.g].add(f"  {described(piece, documents)}")
    assert [{*row.splitlines()} for row in rows] == [*want.values()]

@pytest.fixture(scope="module")
def changed(alone, base):
    """The run `alone` up to step 12, then twice resumed with other flags: at 12 and at 18."""
    folder = base / "changed"
    (folder / "_ledger").mkdir(parents=True)
    for name in ("step_0000012.pt", "log.jsonl", *ledgers_of(0, 6)):
        shutil.copy(f"{alone}/{name}", folder / name)
    resume = ["--out", str(folder), "--resume", "auto", "--keep", "9", "--steps"]
    train.main([*resume, "18", "--batch_size", "8", "--seq_len", "48"])
    train.main([*resume, "24", "--batch_size", "4", "--data", f"{base}/a", f"{base}/b"])
    return str(folder)

@pytest.mark.parametrize("file, first, stop", [
    (12, 12, 15), (12, 17, 20), (18, 18, 19), (18, 10, 13), (24, 0, 24)])
def test_audit_of_a_run_with_changed_flags_names_the_rows_of_each_part(changed, file, first, stop):
    lines = [*runs.audit(f"{changed}/step_{file:07d}.pt", (first, stop))]
    told = [tuple(map(int, re.findall(r"\d+", line))) for line in lines if line.startswith("step")]
    ledger = runs.read_ledger(changed)
    rows = zip(ledger["step"].to_pylist(), ledger["g"].to_pylist(), strict=True)
    assert told == sorted({(step, g) for step, g in rows if first <= step < stop})

def test_when_knows_the_rows_of_each_part(changed, tmp_path):
    """The same with the ledger, and without it, packed again."""
    shutil.copytree(changed, tmp_path / "run")
    want = [*runs.when(changed, "a/train-1.parquet:1:8")]
    shutil.rmtree(tmp_path / "run/_ledger")
    assert [*runs.when(str(tmp_path / "run"), "a/train-1.parquet:1:8")] == want

@pytest.mark.parametrize("lost, message", [
    (["header of 0"], "does not tell the flags of step 0"),
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
        [*runs.audit(f"{tmp_path}/step_0000018.pt", (13, 14))]

# --------------------------------------------------------------------------------------------------
# losses

def test_losses_compare_a_document_with_the_same_steps(monkeypatch):
    """The loss falls from 2 bits per byte to 1. One document is 1 above it, one 0.5 below."""
    rows = []
    for step in range(100):
        usual = 2 if step < 50 else 1
        for row in range(10):
            above = {3: 1, 7: -0.5}.get(row, -0.0625)    # 0 on average
            rows.append({"step": step, "path": "x", "row_group": 0, "row": row,
                         "tokens": 9, "bytes": 10, "nats": 10 * (usual + above) * np.log(2)})
    ledger = pa.Table.from_pylist(rows)
    source = SimpleNamespace(shards=[SimpleNamespace(path="x", name="x")])
    monkeypatch.setattr(runs, "read_ledger", lambda run, sources: ledger)
    [found] = runs.losses_of("run", {"x": source})
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
    with runs.loader_of(runs.newest_of(alone)) as loader:
        for source in runs.losses_of(alone, loader.sources):
            assert next(lines).startswith(f"{source.name}: {source.n_tokens:,} tokens, ")
            next(lines)    # names of columns
            for i in shown:
                location = source.documents[i].location
                assert next(lines).endswith(f"    {location}: {documents[location][:60]!r}")
    assert not [*lines]

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
    runs.main(["plot", alone, changed, "--out", f"{tmp_path}/plot.png"])
    assert "plot.png: 2 runs" in capsys.readouterr().out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
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

@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_plot_says_what_it_needs(tmp_path, monkeypatch, has_matplotlib):
    if not has_matplotlib:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = "has no steps; name the folder" if has_matplotlib else "pip install matplotlib"
    with pytest.raises(SystemExit, match=message):
        runs.main(["plot", str(tmp_path), "--out", f"{tmp_path}/plot.png"])
    assert not os.path.exists(tmp_path / "plot.png")

# --------------------------------------------------------------------------------------------------
# Mistakes

@pytest.mark.parametrize("words, message", [
    ("audit --steps 4:4", "expected A:B"),
    ("when RUN", "which document? Pass FILE:ROW or"),
    ("when RUN 0.parquet:0", "no 0.parquet:0 in the run's training data; expected FILE[:GROUP]"),
    ("losses WITHOUT", "has no ledger; train.py writes one with --ledger")])
def test_mistakes_are_one_line(alone, tmp_path, capsys, words, message):
    os.link(f"{alone}/step_0000024.pt", tmp_path / "step_0000024.pt")    # no ledger beside it
    words = words.replace("RUN", alone).replace("WITHOUT", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        runs.main(words.split())
    error = capsys.readouterr().err or f"{ended.value}\n"
    assert error.count("\n") == 1 and message in error
