"""
A run on a bad day, which ends by itself: 4 ranks, bad documents, disks and servers that fail, a full
disk, SIGTERM and kill -9. It takes minutes, so it is not in the usual runs:

    NANOLOADER_CHAOS=1 python -m pytest -s dev/tests/test_chaos.py

It prints what happened, and compares rows and losses with a run of the same documents without faults.
"""

import collections
import http.server
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

import dataset
from dev.tests.test_restarts import ENV, ranks_of, steps_of
from test_dataloader import HERE
from tokenizer import RustBPETokenizer

STEPS = 300
FLAGS = ("--device cpu --dtype float32 --depth 1 --seq_len 64 --batch_size 8 "
         f"--num_lanes 8 --log_every 1 --eval_every 1000 --eval_bytes 1000 --steps {STEPS} "
         "--save_every 25 --skip_bad").split()

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

class Server(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, by ranges of bytes. In a burst, the next answers are 503."""
    to_refuse, refused = 0, 0

    def do_GET(self):
        if Server.to_refuse > 0:
            Server.to_refuse -= 1
            Server.refused += 1
            self.send_error(503)
            return
        content = Path(self.translate_path(self.path))
        if not content.exists():
            self.send_error(404)
            return
        content = content.read_bytes()
        first, last = 0, len(content) - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first:last + 1])

    do_HEAD = do_GET

    def log_message(self, *_):
        pass

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
        groups = [pa.array(some[start:start + 500]) for start in range(0, len(some), 500)]
        dataset.write_shard(f"{folder}/{name}.parquet", groups, column)
    dataset.write_index(folder)

def until(condition, process):
    """Whether it came true before the process ended."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False

def kill_rank(process, rank):
    os.kill(ranks_of(process)[rank], signal.SIGKILL)

def burst(_):
    Server.to_refuse += 12

# At these steps of the run
EVENTS = [
    (40, "12 answers of 503", burst),
    (90, "kill -9 of rank 2", lambda process: kill_rank(process, 2)),
    (140, "full disk", lambda process: Path("disk_is_full").touch()),
    (210, "SIGTERM", lambda process: process.send_signal(signal.SIGTERM)),
    (230, "12 answers of 503", burst),
    (260, "kill -9 of rank 0", lambda process: kill_rank(process, 0))]

@pytest.mark.skipif("NANOLOADER_CHAOS" not in os.environ, reason="takes minutes: NANOLOADER_CHAOS=1")
def test_a_run_of_faults_ends_by_itself_with_the_rows_of_one_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_chats("disk")
    write_text("web/data")
    Path("faults.py").write_text(FAULTS)
    RustBPETokenizer.train_from_iterator(["def f(x): return x * 0.5\n"], 270).save("tokenizer")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Server(*a, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    web = f"http://127.0.0.1:{server.server_port}/data"
    env = {**ENV, "RANKS": "4", "RESTARTS": "50", "TRAIN": "faults.py"}
    recipe = ["bash", str(HERE / "dev/recipes/restarts.sh"), *FLAGS, "--data", "disk", web,
              "--tokenizer", "tokenizer"]

    began = time.monotonic()
    subprocess.run([*recipe, "--out", "whole"], check=True, env=env, stdout=subprocess.DEVNULL)
    print(f"without faults: {time.monotonic() - began:.0f} s")

    began, events, jobs, seen = time.monotonic(), [*EVENTS], 0, collections.Counter()
    status = None
    with open("told", "wb") as told:
        while status != 0:    # as a scheduler that starts the job again
            jobs += 1
            assert jobs < 10, Path("told").read_text()[-5000:]
            process = subprocess.Popen([*recipe, "--out", "run"], env={**env, "FAULTS": "1"},
                                       stdout=told, stderr=told)
            while events:
                step, name, act = events[0]
                if not until(lambda step=step: max(steps_of("run"), default=0) >= step, process):
                    break
                act(process)
                print(f"{time.monotonic() - began:4.0f} s: {name}, after step {step}")
                del events[0]
            status = process.wait()
    print(f"with faults: {time.monotonic() - began:.0f} s, {jobs} jobs")

    text = Path("told").read_text(errors="replace")
    for what in ("FAULT: EIO", "FAULT: the disk is full", "trying again", "loaded run/step_"):
        seen[what] = text.count(what)
    print(dict(seen), f"answers of 503: {Server.refused}")
    assert not events and seen["FAULT: the disk is full"] == 1 and seen["FAULT: EIO"] and Server.refused
    whole, run = steps_of("whole"), steps_of("run")
    assert sorted(run) == sorted(whole) == [*range(STEPS)]
    for step, record in run.items():
        assert record["rows_hash"] == whole[step]["rows_hash"], step
        assert record["loss"] == pytest.approx(whole[step]["loss"], rel=1e-4), step
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    resumed = [record["step"] for record in lines if "flags" in record and record["step"] > 0]
    print(f"resumed at {resumed}")
    assert len(resumed) >= 4
    told_in_log = Path("run/log.jsonl").read_text()
    for place in ("train-0.parquet, row group 6, row 333", "train-1.parquet, row group 15, row 277"):
        assert f"left out: disk/{place}" in told_in_log
