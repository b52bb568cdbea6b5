"""
dev/runs.py: the ledger has each token once, and what is packed again is what the ledger has.

    python -m pytest dev/tests/test_runs.py
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

import train
from dataset import Location, list_shards, write_shard
from dev import runs
from test_dataloader import HERE
from tokenizer import RustBPETokenizer

BOS = 256    # of a tokenizer of bytes

def documents_in(folder):
    """{location: text} of the train split"""
    texts = {}
    for shard in list_shards(folder, "train"):
        for row_group in range(len(shard.group_sizes)):
            for row, text in enumerate(shard.read(row_group).to_pylist()):
                texts[Location(shard.path, row_group, row)] = text
    return texts

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
    return max((record.get("step", -1) for record in train.read_log(f"{run}/log.jsonl")), default=-1)

@pytest.fixture(scope="module")
def ranks(base):
    """The run by two ranks, kill -9 of both after step 8, resumed by four."""
    run = f"{base}/ranks"
    killed = start_ranks(2, words_of(base, "ranks"))
    until = time.monotonic() + 200
    while last_step(run) < 8 and time.monotonic() < until:
        time.sleep(0.02)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 8 <= last_step(run) < 23, "it ended before it was killed"
    resumed = start_ranks(4, ["--out", run, "--resume", "auto"])
    assert [process.wait(200) for process in resumed] == [0] * 4
    return run

# --------------------------------------------------------------------------------------------------
# The ledger

@pytest.mark.parametrize("name", ["alone", "ranks"])
def test_ledger_has_each_token_of_an_epoch_once_and_when_finds_the_same(base, name, request):
    run = request.getfixturevalue(name)
    ledger = runs.read_ledger(run)
    assert sorted({*ledger["step"].to_pylist()}) == [*range(24)]
    documents = documents_in(f"{base}/a") | documents_in(f"{base}/b")
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
    for name in ("step_0000018.pt", *(f"ledger/step_{n:07d}_rank_0000.parquet" for n in (0, 6, 12))):
        os.link(f"{alone}/{name}", middle / name)
    location = Location(f"{base}/a/train-1.parquet", 1, 5)
    seen = runs.without_bos_again([*runs.seen_in(runs.read_ledger(alone), {location})])
    assert seen[0].step < 18 <= seen[-1].step, "past and to come"
    text = documents_in(f"{base}/a")[location][:60]
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
    """Of the run as if it had ended after step 3, in which a document is in one lane."""
    packed = set()

    class Recorded(runs.PackedLoader):
        def __next__(self):
            packed.add(self.rank)
            return super().__next__()

    monkeypatch.setattr(runs, "PackedLoader", Recorded)
    saved = runs.newest_of(alone)
    ledger = runs.read_ledger(alone)
    first = ledger.slice(0, 1).to_pylist()[0]
    wanted = {Location(first["path"], first["row_group"], first["row"])}
    state = json.loads(saved["loader"])
    for lane in range(4):
        with runs.loader_of(saved, True, 1, lane, 4) as loader:
            has = runs.has_documents(loader, lane, {**state, "rows": 1000}, True, 8, wanted)
            assert has
