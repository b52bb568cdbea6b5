"""
dev/runs.py: the ledger has each token once, and what is packed again is what the ledger has.

    python -m pytest dev/tests/test_runs.py
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import train
from dataset import Location, write_shard
from dev import runs
from test_dataloader import HERE, texts_of
from tokenizer import RustBPETokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two folders, a and b, of 200 documents, and a tokenizer whose tokens are bytes."""
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(0)
    for name, letters in (("a", "abcdefgh "), ("b", "stuvwxyz ")):
        lengths = [draw.randint(0, 30) for _ in range(200)]
        lengths[7] = 300    # longer than rows
        texts = [f"{i} " + "".join(draw.choices(letters, k=n)) for i, n in enumerate(lengths)]
        groups = [pa.array(texts[i:i + 20]) for i in range(0, 200, 20)]
        write_shard(f"{folder}/{name}/train-0.parquet", groups[:5])
        write_shard(f"{folder}/{name}/train-1.parquet", groups[5:])
        write_shard(f"{folder}/{name}/val.parquet", [pa.array(["val " + name])])
    RustBPETokenizer.train_from_iterator(["x"], 265).save(f"{folder}/tokenizer")
    return folder

def words_of(base, out):
    return (f"--data {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --out {base}/{out} "
            "--device cpu --depth 1 --seq_len 64 --batch_size 16 --steps 24 --save_every 6 "
            "--eval_every 200 --num_lanes 4 --ledger").split()

class Killed(BaseException):
    pass

@pytest.fixture(scope="module")
def alone(base):
    """A run of one process that is killed in step 15, and resumed from step 12."""
    train_step = train.train_step
    calls = []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 16:
            raise Killed
        return train_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", killed)
        with pytest.raises(Killed):
            train.main(words_of(base, "alone"))
    train.main(["--out", f"{base}/alone", "--resume", "auto"])
    return f"{base}/alone"

def start_ranks(world, words):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
             "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        env = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(HERE / "train.py"), *words]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    return processes

def last_step(run):
    steps = [record.get("step", -1) for record in train.read_log(f"{run}/log.jsonl")]
    return max(steps, default=-1)

@pytest.fixture(scope="module")
def ranks(base):
    """The run by two ranks, kill -9 of both after step 8, resumed by one."""
    run = f"{base}/ranks"
    killed = start_ranks(2, words_of(base, "ranks"))
    until = time.monotonic() + 200
    while last_step(run) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 8 <= last_step(run) < 23, "it ended before it was killed"
    train.main(["--out", run, "--resume", "auto"])
    return run

# --------------------------------------------------------------------------------------------------
# The ledger

@pytest.mark.parametrize("name", ["alone", "ranks"])
def test_ledger_has_each_token_of_an_epoch_once_and_when_finds_the_same(base, name, request):
    run = request.getfixturevalue(name)
    ledger = runs.read_ledger(run)
    assert sorted({*ledger["step"].to_pylist()}) == [*range(24)]
    documents = texts_of(f"{base}/a") | texts_of(f"{base}/b")
    tokens = {}    # {(epoch, location): [(start, stop, targets, bytes), ...]}
    for row in ledger.to_pylist():
        location = Location(row["path"], row["row_group"], row["row"])
        piece = row["start"], row["stop"], row["tokens"], row["bytes"]
        tokens.setdefault((row["epoch"], location), []).append(piece)
    for location, text in documents.items():
        pieces = sorted(tokens[1, location])
        seen = sorted(k for start, stop, *_ in pieces for k in range(start, stop))
        assert [k for k in seen if k > 0] == [*range(1, len(text) + 1)]
        assert sum(n_targets for _, _, n_targets, _ in pieces) == len(text)
        assert sum(n_bytes for *_, n_bytes in pieces) == len(text)
    assert max(epoch for epoch, _ in tokens) > 2, "two whole epochs"
    saved, wanted = runs.newest_of(run), {*documents}
    assert sorted(runs.replay(saved, True, wanted)) == sorted(runs.seen_in(ledger, wanted))

def test_ledgers_of_one_and_several_ranks_are_equal(alone, ranks):
    one, other = runs.read_ledger(alone), runs.read_ledger(ranks)
    assert one.num_rows == other.num_rows
    key = [("g", "ascending"), ("path", "ascending"), ("row_group", "ascending"),
           ("row", "ascending"), ("start", "ascending")]
    one, other = one.sort_by(key), other.sort_by(key)
    assert one.drop(["nats"]).equals(other.drop(["nats"]))
    assert np.allclose(one["nats"], other["nats"], rtol=1e-2, atol=0.05)

# --------------------------------------------------------------------------------------------------
# when

def test_when_prints_past_and_coming_steps(alone, base, capsys):
    """Of a checkpoint in the middle of the run: from the ledger, and without it."""
    middle = base / "middle"
    (middle / "ledger").mkdir(parents=True)
    ledgers = [f"ledger/step_{n:07d}_rank_0000.parquet" for n in (0, 6, 12)]
    for name in ["step_0000018.pt", *ledgers]:
        os.link(f"{alone}/{name}", middle / name)
    location = Location(f"{base}/a/train-1.parquet", 1, 5)
    seen = runs.without_bos_again([*runs.seen_in(runs.read_ledger(alone), {location})])
    assert seen[0].step < 18 <= seen[-1].step, "past and to come"
    text = texts_of(f"{base}/a")[location][:60]
    want = []
    for step, g, _, epoch, start, stop in seen:
        to_come = "to come: " if step >= 18 else ""
        want.append(f"{to_come}step {step}, row {g} of the run: {location}, epoch {epoch}, tokens "
                    f"{start}-{stop - 1}: {text!r}")
    want.append(f"{len(seen)} pieces; documents in none: 0")
    for words in (["a/train-1.parquet:1:5"], ["a/train-1.parquet:25"], ["--text", text]):
        runs.main(["when", str(middle), *words])
        assert capsys.readouterr().out.splitlines() == want
    os.remove(middle / "ledger/step_0000000_rank_0000.parquet")
    runs.main(["when", str(middle), "a/train-1.parquet:25"])
    assert capsys.readouterr().out.splitlines() == want

def test_when_packs_only_the_lanes_that_have_the_document(alone, monkeypatch):
    """Of the run as if it had ended after step 3, in its first epoch."""
    packed = set()

    class Recorded(runs.PackedLoader):
        def __next__(self):
            packed.add(self.rank)
            return super().__next__()

    monkeypatch.setattr(runs, "PackedLoader", Recorded)
    saved, ledger = runs.newest_of(alone), runs.read_ledger(alone)
    saved["flags"]["steps"] = 3
    for row in ledger.slice(0, 60).to_pylist()[::15]:
        wanted = {Location(row["path"], row["row_group"], row["row"])}
        packed.clear()
        seen = sorted(runs.replay(saved, True, wanted))
        assert seen == sorted(piece for piece in runs.seen_in(ledger, wanted) if piece.step < 3)
        assert packed == {piece.g % 4 for piece in seen}

def test_when_counts_the_documents_in_no_row(alone, monkeypatch):
    """As if the run had only its first rows."""
    ledger = runs.read_ledger(alone).slice(0, 40)
    monkeypatch.setattr(runs, "read_ledger", lambda run, sources: ledger)
    monkeypatch.setattr(runs, "replay", lambda *_: [])
    n_seen = len({(row["path"], row["row_group"], row["row"]) for row in ledger.to_pylist()})
    *_, last = runs.when(alone, text=" ")
    assert last.endswith(f"; documents in none: {400 - n_seen}")

@pytest.mark.parametrize("words", [
    ["nosuch.parquet:0"], ["train-0.parquet:9999"], ["0.parquet:0"], [], ["--text", "no such"]])
def test_when_says_what_it_does_not_find(alone, words):
    with pytest.raises(SystemExit, match=r"in the run; expected FILE\[:GROUP\]:ROW or --text"):
        runs.main(["when", alone, *words])

# --------------------------------------------------------------------------------------------------
# audit

@pytest.mark.parametrize("steps", [(1, 3), None, (13, 14)])
def test_audit_names_the_documents_of_the_rows(base, alone, steps):
    """Before, at and after a checkpoint: what is named is what the ledger has."""
    first, stop = steps or (12, 13)
    path = f"{base}/step_0000012.pt"
    train.torch.save(checkpoint_at_12(alone), path)
    lines = [json.loads(line) for line in runs.audit(path, steps, as_json=True)]
    assert [(line["step"], line["row"]) for line in lines] == [
        (g // 16, g) for g in range(16 * first, 16 * stop)]
    found = []
    for line in lines:
        for piece in line["documents"]:
            location = Location(piece["path"], piece["row_group"], piece["row"])
            place = piece["epoch"], piece["from"], piece["to"]
            found.append(runs.Seen(line["step"], line["row"], location, *place))
    documents = texts_of(f"{base}/a") | texts_of(f"{base}/b")
    ledger = runs.seen_in(runs.read_ledger(alone), {*documents})
    assert sorted(found) == sorted(piece for piece in ledger if first <= piece.step < stop)

def checkpoint_at_12(alone):
    """That of step 18, with the loader's state at step 12; the run keeps only the newest two."""
    saved = runs.load_checkpoint(f"{alone}/step_0000018.pt")
    with runs.loader_of(saved, begins=True) as loader:
        for _ in range(12):
            next(loader)
        return {**saved, "step": 12, "loader": json.dumps(loader.state_dict())}

def test_audit_prints_a_line_for_each_piece(alone, capsys):
    runs.main(["audit", "--resume", f"{alone}/step_0000018.pt", "--steps", "20:24"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        f"step {g // 16}, row {g} of the run" for g in range(320, 384)]
    assert any(", tokens 0-" in line for line in lines)
    cut = [line for line in lines if re.search(r", tokens [1-9]\d*-", line)]
    assert cut, "a document of 300 tokens"
    assert not any(", tokens 0-0:" in line for line in lines), "BOS again has no line"

def test_audit_refuses_steps_before_changed_flags(alone, monkeypatch):
    path = f"{alone}/step_0000018.pt"
    saved = {**runs.load_checkpoint(path), "constant_since": 2}
    monkeypatch.setattr(runs, "load_checkpoint", lambda path: saved)
    with pytest.raises(ValueError, match=r"at step 2: .*; pass one of step 2 or before"):
        next(runs.audit(path, (1, 2)))

# --------------------------------------------------------------------------------------------------
# losses

def test_losses_print_the_tokens_of_each_source_and_its_documents(alone, base, capsys):
    """Of each source, document 7 alone has 200 bytes."""
    runs.main(["losses", alone])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    ledger = runs.read_ledger(alone).to_pylist()
    for name, (first, _, line) in zip("ab", sorted([lines[:3], lines[3:]]), strict=True):
        tokens = [row["tokens"] for row in ledger if row["path"].startswith(f"{base}/{name}/")]
        assert first.startswith(f"{base}/{name}: {sum(tokens):,} tokens, ")
        assert first.endswith("in the last; documents: 1")
        location = Location(f"{base}/{name}/train-0.parquet", 0, 7)
        text = texts_of(f"{base}/{name}")[location]
        assert line.endswith(f"    {location}: {text[:60]!r}")

def test_losses_compare_a_document_with_the_same_steps(monkeypatch):
    """The loss falls from 2 bits per byte to 1. One document is 1 above it, one 0.5 below."""
    ledger = {"step": [], "path": [], "row_group": [], "row": [], "tokens": [], "bytes": [],
              "nats": []}
    for step in range(100):
        usual = 2 if step < 50 else 1
        for row in range(10):
            above = {3: 1, 7: -0.5}.get(row, -0.0625)    # 0 on average
            values = step, "x", 0, row, 9, 10, 10 * (usual + above) * np.log(2)
            for column, value in zip(ledger.values(), values, strict=True):
                column.append(value)
    shards = SimpleNamespace(shards=[SimpleNamespace(path="x")])
    monkeypatch.setattr(runs, "read_ledger", lambda run, sources: pa.table(ledger))
    [found] = runs.losses_of("run", {"x": shards})
    assert found.name == "x" and found.n_tokens == 9 * 1000
    assert found.usual == pytest.approx([2, 1])
    easiest, *_, hardest = found.documents
    assert easiest.location.row == 7 and hardest.location.row == 3
    assert easiest[:3] == pytest.approx((-0.5, 1.0, 1000))
    assert hardest[:3] == pytest.approx((1.0, 2.5, 1000))
    ledger["bytes"] = [1] * 1000
    [found] = runs.losses_of("run", {"x": shards})
    assert not found.documents, "100 bytes are too few to say"

@pytest.mark.parametrize("n, rows", [(2, [0, 1, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_losses_print_the_documents_at_both_ends_once(alone, base, capsys, monkeypatch, n, rows):
    documents = [runs.Difficulty(k / 10, 1.0, 300, Location(f"{base}/a/train-0.parquet", 0, k))
                 for k in range(5)]
    losses = runs.SourceLosses("a", 9000, [0.0, 2.0, 1.0], documents)
    monkeypatch.setattr(runs, "losses_of", lambda run, sources: [losses])
    runs.main(["losses", alone, "--head", str(n)])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == ("a: 9,000 tokens, 2.000 bits per byte in the first 50 steps, 1.000 in the "
                     "last; documents: 5")
    assert [int(re.search(r"row (\d):", line)[1]) for line in lines] == rows

def test_losses_need_a_ledger(alone, base):
    (base / "without").mkdir()
    os.link(f"{alone}/step_0000024.pt", base / "without" / "step_0000024.pt")
    with pytest.raises(SystemExit, match=r"without has no ledger; train.py writes one with"):
        runs.main(["losses", str(base / "without")])

def test_ledger_of_data_that_moved_says_what_is_left_out(alone, base, capsys):
    with runs.loader_of(runs.newest_of(alone)) as loader:
        b = {name: source for name, source in loader.sources.items() if name.endswith("/b")}
    ledger = runs.read_ledger(alone, b)
    assert "left out: 2 files that the run no longer has (moved?)" in capsys.readouterr().out
    assert {*ledger["path"].to_pylist()} == {f"{base}/b/train-{i}.parquet" for i in range(2)}

@pytest.mark.parametrize("words, message", [
    ("", "required"), ("audit", "required"), ("audit --steps 4:4", "expected A:B"),
    ("audit --steps 4", "expected A:B"), ("losses RUN --head 0", "at least 1")])
def test_mistakes_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit):
        runs.main(words.split())
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
