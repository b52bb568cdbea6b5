"""
A run on a bad day, which ends by itself: 4 ranks, bad documents, disks and servers that fail, a full
disk, SIGTERM and kill -9. It takes minutes, so it is not in the usual runs:

    NANOLOADER_CHAOS=1 python -m pytest -s dev/tests/test_chaos.py

It prints what happened, and compares rows and losses with a run of the same documents without faults.
"""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

import dataset
from dev.tests.test_dataset import Server, files_of
from dev.tests.test_restarts import ENV, ranks_of, steps_of, until
from test_dataloader import HERE, grouped
from tokenizer import RustBPETokenizer

STEPS = 300
FLAGS = ("--device cpu --dtype float32 --depth 1 --seq_len 64 --batch_size 8 "
         f"--num_lanes 8 --log_every 1 --eval_every 1000 --eval_bytes 1000 --steps {STEPS} "
         "--save_every 25 --skip_bad --tokenizer tokenizer").split()

# train.py, on a disk that sometimes fails: one open in 50 is an EIO, and the disk is full once.
FAULTS = """
import errno, os, random, sys
import dataset, train

draw, fsync = random.Random(os.getpid()), os.fsync

def open_file(folder, name, size=None, open_file=dataset.open_file):
    if draw.random() < 0.02:
        print("FAULT: EIO", flush=True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return open_file(folder, name, size)

def full(number):
    if os.path.exists("disk_is_full"):
        os.remove("disk_is_full")
        print("FAULT: the disk is full", flush=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return fsync(number)

if os.environ.get("FAULTS"):
    dataset.open_file, os.fsync = open_file, full
sys.exit(train.main())
"""

def write_text(folder):
    draw = random.Random(1)
    line = "def f{}(x): return x * {}\n"
    texts = [line.format(i, draw.random()) * draw.randint(1, 4) for i in range(20_000)]
    write_source(folder, "text", texts)

def write_chats(folder):
    """20,000 chats, of which two are none."""
    draw = random.Random(2)
    chats = []
    for i in range(20_000):
        question = {"role": "user", "content": f"What is {i} + {i}?"}
        answer = {"role": "assistant", "content": f"It is {2 * i}. " * draw.randint(1, 4)}
        chats.append(json.dumps([question, answer]))
    chats[3_333] = chats[17_777] = '[{"role": "nobody", "content": "?"}]'
    write_source(folder, "messages", chats)

def write_source(folder, column, documents):
    shards = {"train-0": documents[:10_000], "train-1": documents[10_000:], "val": documents[:100]}
    for name, some in shards.items():
        groups = map(pa.array, grouped(some, 500))
        dataset.write_shard(f"{folder}/{name}.parquet", groups, column)
    dataset.write_index(folder)

def refuse(_, server):
    server.faults = {f"train-{i}.parquet": 4 * [503] for i in (0, 1)}

def kill_rank(rank):
    return lambda process, _: os.kill(ranks_of(process)[rank], signal.SIGKILL)

# At these steps of the run
EVENTS = [
    (40, "8 answers of 503", refuse),
    (90, "kill -9 of rank 2", kill_rank(2)),
    (140, "full disk", lambda *_: Path("disk_is_full").touch()),
    (210, "SIGTERM", lambda process, _: process.send_signal(signal.SIGTERM)),
    (230, "8 answers of 503", refuse),
    (260, "kill -9 of rank 0", kill_rank(0))]

def start(name, server, faults=""):
    """4 ranks; torchrun starts them again. -> the process"""
    env = {**ENV, "RANKS": "4", "RESTARTS": "50", "TRAIN": "faults.py", "FAULTS": faults}
    recipe = ["bash", str(HERE / "dev/recipes/restarts.sh"), *FLAGS, "--out", name]
    with open(f"{name}.txt", "ab") as told:
        return subprocess.Popen([*recipe, "--data", "disk", f"{server.web}/data"], env=env,
                                stdout=told, stderr=told)

@pytest.mark.skipif("NANOLOADER_CHAOS" not in os.environ, reason="takes minutes: NANOLOADER_CHAOS=1")
def test_a_run_of_faults_ends_by_itself_with_the_rows_of_one_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_chats("disk")
    write_text("web")
    Path("faults.py").write_text(FAULTS)
    RustBPETokenizer.train_from_iterator(["def f(x): return x * 0.5\n"], 270).save("tokenizer")
    server = Server(files_of("web"))
    assert start("whole", server).wait() == 0

    events, jobs, status = [*EVENTS], 0, None
    while status != 0:    # as a scheduler that starts the job again
        jobs += 1
        assert jobs < 10, Path("run.txt").read_text()[-5000:]
        process = start("run", server, "yes")
        while events:
            step, name, act = events[0]
            if not until(lambda step=step: max(steps_of("run"), default=0) >= step, process):
                break
            act(process, server)
            print(f"after step {step}: {name}")
            del events[0]
        status = process.wait()
    assert not events

    told, log = (Path(name).read_text(errors="replace") for name in ("run.txt", "run/log.jsonl"))
    counts = {what: told.count(what) for what in (
        "FAULT: EIO", "503", "trying again", "loaded run/step_", "FAULT: the disk is full")}
    print(f"{jobs} jobs", counts)
    assert all(counts.values()) and counts["FAULT: the disk is full"] == 1
    assert counts["loaded run/step_"] >= 4
    whole, run = steps_of("whole"), steps_of("run")
    assert sorted(run) == sorted(whole) == [*range(STEPS)]
    for step, record in run.items():
        assert record["rows_hash"] == whole[step]["rows_hash"], step
        assert record["loss"] == pytest.approx(whole[step]["loss"], rel=1e-4), step
    for place in ("train-0.parquet, row group 6, row 333", "train-1.parquet, row group 15, row 277"):
        assert f"left out: disk/{place}" in log
