"""
train.py --ledger, dev.bench losses and when, dev.prepare's plan: each document's tokens are counted
once, and found again where they were seen.

    python -m pytest dev/tests/test_ledger.py
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import train
from dataloader import PACKINGS, Location
from dev import bench, ledger, prepare
from test_dataloader import BOS, HERE, documents_in, grouped, ids_of, make, write_shards
from tokenizer import RustBPETokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two folders of 500 documents each and a tokenizer whose tokens are bytes."""
    folder, draw = tmp_path_factory.mktemp("ledger"), random.Random(0)
    for name, letters in (("a", "abcdefgh "), ("b", "stuvwxyz ")):
        texts = [f"{i} " + "".join(draw.choices(letters, k=draw.randint(1, 16))) for i in range(500)]
        texts[7] = texts[7] * 9    # longer than rows
        write_shards(folder / name, [grouped(texts[:250], [25] * 10), grouped(texts[250:], [25] * 10),
                                     [["val " + name]]])
    RustBPETokenizer.train_from_iterator(["x"], 265).save(str(folder / "tokenizer"))
    return folder


def flags_of(base, out):
    return (f"--data {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --out {base}/{out} "
            "--device cpu --depth 1 --seq_len 64 --batch_size 32 --steps 24 --save_every 6 --eval_every 200 "
            "--eval_rows 1 --num_lanes 4 --ledger").split()


def start_ranks(world, words):
    """train.py as `world` processes of one group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
             "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], stdout=subprocess.DEVNULL,
                             env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)]


def last_step(run):
    return max((record.get("step", -1) for record in train.read_log(f"{run}/log.jsonl")), default=-1)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def alone(base):
    """A run of one process that is killed at step 15, in an epoch, and resumed."""
    with pytest.MonkeyPatch.context() as patch:
        print_step = train.print_step

        def killed(flags, record, times):
            print_step(flags, record, times)
            if record["step"] == 15:
                raise Killed
        patch.setattr(train, "print_step", killed)
        with pytest.raises(Killed):
            train.main(flags_of(base, "alone"))
    train.main(["--out", f"{base}/alone", "--resume", "auto"])
    return f"{base}/alone"


@pytest.fixture(scope="module")
def ranks(base):
    """The run by four ranks, kill -9 of all after step 8, resumed by two."""
    run = f"{base}/ranks"
    killed = start_ranks(4, flags_of(base, "ranks"))
    until = time.monotonic() + 200
    while last_step(run) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 8 <= last_step(run) < 23, "it ended before it was killed"
    assert [process.wait(200) for process in start_ranks(2, ["--out", run, "--resume", "auto"])] == [0] * 2
    return run


@pytest.mark.parametrize("name", ["alone", "ranks"])
def test_ledger_has_each_token_of_an_epoch_once_and_agrees_with_when(base, name, request):
    run = request.getfixturevalue(name)
    rows, documents = ledger.read_ledger(run), documents_in(f"{base}/a") | documents_in(f"{base}/b")
    assert sorted({*rows["step"].tolist()}) == [*range(24)]
    seen = {}
    for i, (_, _, place, epoch, start, stop) in enumerate(ledger.seen_in(rows)):
        seen.setdefault((epoch, place), []).append((start, stop, rows["tokens"][i], rows["bytes"][i]))
    for place, text in documents.items():
        pieces = sorted(seen[1, place])
        assert [piece[0] for piece in pieces] == [0, *(piece[1] for piece in pieces[:-1])]
        assert pieces[-1][1] == len(text.encode()) + 1
        assert [sum(piece[k] for piece in pieces) for k in (2, 3)] == [len(text.encode())] * 2
    assert max(epoch for epoch, _ in seen) > 2, "two whole epochs"
    saved = ledger.newest_of(run)
    with ledger.loader_of(saved, True) as loader:
        places = [Location(*place) for place in documents]
        assert ledger.replay(saved, loader, places) == sorted(ledger.seen_in(rows)) and len(places) == 1000


def test_ledgers_of_one_and_several_ranks_are_equal(alone, ranks):
    one, other = ledger.read_ledger(alone), ledger.read_ledger(ranks)
    for name in train.LEDGER[:-1]:
        assert one[name].tolist() == other[name].tolist()
    assert np.allclose(one["nats"], other["nats"], rtol=1e-2, atol=0.05)


@pytest.mark.parametrize("packing", [*PACKINGS])
def test_rows_of_the_ledger_count_the_targets_of_each_piece(corpus, packing):
    """The targets at a piece's place are its document's tokens without BOS; nats: of the same places."""
    loader, masked = make(corpus, packing=packing, T=30, B=3, chunk_bytes=300), 0
    documents = documents_in(corpus)
    for step in range(20):
        g, (_, targets) = loader.position.g, next(loader)
        nats = np.arange(90.0).reshape(3, 30) * (targets.numpy() >= 0)
        rows = train.ledger_rows(step, g, loader.pieces(), targets, nats, np.ones(300, int))
        found = []
        for _, row, *place, _, start, stop, n, n_bytes, _ in rows:
            ids = ids_of(documents[tuple(place)])[max(start, 1):stop]
            assert len(ids) - 1 <= n == n_bytes <= len(ids)    # the first token of a row is no target
            found += [(row, token) for token in ids[len(ids) - n:]]
        want = [(g + b, token) for b, row in enumerate(targets.tolist()) for token in row if token >= 0]
        assert found == [one for one in want if one[1] != BOS]
        of_bos = sum(nats[b, j] for b, row in enumerate(targets.tolist()) for j in range(30) if row[j] == BOS)
        assert sum(row[-1] for row in rows) == pytest.approx(nats.sum() - of_bos)
        masked += len(found) < len(want)
    assert masked, "no BOS was a target"


def test_when_prints_past_and_coming_steps(alone, base, capsys):
    """Of a checkpoint in the middle of the run, from the ledger and without it."""
    os.makedirs(f"{base}/middle/ledger")
    for name in ("step_0000018.pt", *(f"ledger/step_{n:07d}_rank_0000.parquet" for n in (0, 6, 12))):
        os.link(f"{alone}/{name}", f"{base}/middle/{name}")
    bench.main(["when", f"{base}/middle", f"{base}/a/shard_00001.parquet:30"])
    lines = capsys.readouterr().out.splitlines()
    rows = ledger.read_ledger(alone)
    mine = (rows["path"] == f"{base}/a/shard_00001.parquet") & (rows["row_group"] == 1) & (rows["row"] == 5)
    columns = (rows[name][mine].tolist() for name in ("step", "g", "epoch", "start", "stop"))
    want = [f"  step {step}, row {g} of the run, epoch {epoch}, tokens {start}-{stop - 1}"
            + ", to come" * (step >= 18) for step, g, epoch, start, stop in zip(*columns, strict=True)]
    assert lines[1:] == want and "to come" in lines[-1] and "to come" not in lines[1]
    os.remove(f"{base}/middle/ledger/step_0000000_rank_0000.parquet")
    text = documents_in(f"{base}/a")[f"{base}/a/shard_00001.parquet", 1, 5]
    bench.main(["when", f"{base}/middle", "--text", text])
    assert capsys.readouterr().out.splitlines() == lines


def test_when_says_what_it_does_not_find(alone, base, capsys):
    for words in (["nosuch.parquet:0"], ["shard_00000.parquet:9999"], ["--text", "no such words"]):
        with pytest.raises(SystemExit) as ended:
            bench.main(["when", alone, *words])
        assert "in the run's data; expected FILE:ROW" in str(ended.value)

def test_losses_compare_a_document_with_the_steps_around_its_own():
    """Documents of falling loss; 5 of 80 are harder and 5 easier than those beside them, but not than all."""
    draw = np.random.default_rng(0)
    step, n = np.repeat(np.arange(400), 4), 1600
    level = np.log(2) * (6 * np.exp(-step / 100) + 1)
    rows = {"step": step, "path": np.array(["x"] * n), "row_group": np.zeros(n, int),
            "row": draw.permutation(n) % 80, "bytes": np.full(n, 50)}
    factor = np.where(rows["row"] < 5, 1.5, np.where(rows["row"] > 74, 0.5, 1))
    rows["nats"] = 50 * level * factor * draw.uniform(0.9, 1.1, n)
    found = [place.row for *_, place in ledger.losses_of(rows)]
    assert {*found[:5]} == {75, 76, 77, 78, 79} and {*found[-5:]} == {0, 1, 2, 3, 4}
    assert all(n_bytes == 1000 for _, _, n_bytes, _ in ledger.losses_of(rows))
    rows["bytes"] = np.full(n, 9)
    assert not ledger.losses_of(rows), "too short to say"


def test_losses_print_both_ends_with_their_texts(alone, base, capsys):
    bench.main(["losses", alone, "-n", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"/[ab]: [\d,]+ pieces, [\d,]+ tokens, \d\.\d+ bits per byte", lines[0])
    assert len(lines) == 6 and lines[2].startswith("easiest") and lines[4].startswith("hardest")
    assert re.search(rf"{base}/[ab]/shard_0000\d.parquet, row group \d, row \d+: \d+ \w", lines[5])
    with pytest.raises(SystemExit, match=r"no ledger; train.py writes one with --ledger"):
        bench.main(["losses", str(base / "a")])


def test_spike_names_its_documents_at_once(base, capsys, monkeypatch):
    """Of 60 steps, the last has one row with a large loss."""
    step, calls = train.train_step, []

    def jump(*args):
        sums, nats = step(*args)
        calls.append(1)
        if len(calls) == 60:
            nats[2] += 20
            sums[0] += 20 * nats[2].numel()
        return sums, nats
    monkeypatch.setattr(train, "train_step", jump)
    train.main([*flags_of(base, "spike"), *["--steps", "60", "--batch_size", "4", "--seq_len", "16"]])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "jumped" in line]
    assert line.startswith("step 59: the loss jumped to ")
    rows = ledger.read_ledger(f"{base}/spike")
    hardest = rows["g"] == 59 * 4 + 2
    named = re.findall(r"(\S+), row group (\d+), row (\d+) \(\d+\.\d\d nats a token\)", line)
    assert named
    for path, row_group, row in named[:1]:
        assert (path, int(row_group), int(row)) in {*zip(
            rows["path"][hardest], rows["row_group"][hardest], rows["row"][hardest], strict=True)}


def test_plan_says_how_often_a_run_takes_the_documents_of_each_source(alone, base, capsys):
    """A run of 24 steps, beside its ledger; and one that repeats nothing."""
    words = f"stats {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --seq_len 64 --batch_size 32"
    prepare.main([*words.split(), "--steps", "24"])
    rows, lines = ledger.read_ledger(alone), capsys.readouterr().out.splitlines()
    for name, line in zip("ab", lines[1:], strict=True):
        mine = np.char.startswith(rows["path"].astype(str), f"{base}/{name}/")
        share, epochs = re.search(r"(\d+\.\d)% of the rows, .*: (\d+\.\d+) epochs, REPEATED", line).groups()
        tokens = (rows["stop"] - rows["start"])[mine].sum()
        of_an_epoch = sum(len(ids_of(text)) for text in documents_in(f"{base}/{name}").values())
        assert share == {"a": "60.0", "b": "40.0"}[name]
        assert float(epochs) == pytest.approx(tokens / of_an_epoch, rel=0.1)
    prepare.main([*words.split(), "--steps", "2"])
    assert capsys.readouterr().out.count("nothing twice") == 2
