"""Launchers: torchrun that restarts its ranks, Slurm, two jobs on one port."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import train
from test_dataloader import HERE, grouped, write

TOY = ("--device cpu --dtype float32 --depth 1 --seq_len 32 --batch_size 4 --vocab_size 300 --num_lanes 4 "
       "--log_every 1 --eval_every 1000 --eval_bytes 1000")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "TRAIN": str(HERE / "train.py")}

@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"def f{i}(x): return x + {i * i}\n" * (1 + i % 7) for i in range(60)]
    write("a", grouped(texts, 20))

def steps_of(run):
    """{step: its record}; a resumed run replaces what it does again."""
    records = []
    if not os.path.exists(f"{run}/log.jsonl"):
        return {}
    for line in Path(run, "log.jsonl").read_text().splitlines():
        if line.endswith("}"):    # not what is being written now
            records.append(json.loads(line))
    return {record["step"]: record for record in records if "rows_hash" in record}

def until(condition, process):
    """Whether it came true before the process ended."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False

def ranks_of(torchrun):
    """{rank: process id} of its children."""
    pids = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ranks = {}
    for pid in pids:
        for variable in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            if variable.startswith("RANK="):
                ranks[int(variable.removeprefix("RANK="))] = int(pid)
    return ranks

def test_killed_ranks_start_again_and_the_run_is_that_of_an_undisturbed_one():
    """Each rank is killed once, by kill -9, between two checkpoints. nohup protects all of it."""
    recipe = ["bash", str(HERE / "dev/recipes/restarts.sh"), *TOY.split(), "--data", "a"]
    recipe += ["--steps", "60", "--save_every", "7"]
    subprocess.run([*recipe, "--out", "whole"], check=True, env=ENV, stdout=subprocess.DEVNULL)
    with open("told", "w") as told:
        torchrun = subprocess.Popen(["nohup", *recipe, "--out", "run"], env=ENV, stdout=told, stderr=told)
    try:
        for rank, step in ((1, 17), (0, 38)):
            assert until(lambda step=step: step in steps_of("run"), torchrun), "it has ended"
            torchrun.send_signal(signal.SIGHUP)    # its terminal is closed
            os.kill(ranks_of(torchrun)[rank], signal.SIGKILL)
        assert torchrun.wait(300) == 0, Path("told").read_text()
    finally:
        torchrun.kill()
    assert Path("told").read_text().count("loaded run/step_") == 2
    whole, run = steps_of("whole"), steps_of("run")
    assert [*run] == [*whole] == [*range(60)]
    for step, record in run.items():
        assert record["rows_hash"] == whole[step]["rows_hash"]
        assert record["loss"] == pytest.approx(whole[step]["loss"], rel=1e-5)

@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])    # without, with nohup
def test_torchrun_handles_a_hangup_unless_it_is_ignored(action):
    Path("torchrun").write_text('#!/bin/sh\necho "$@"\n')
    os.chmod("torchrun", 0o755)
    printed = subprocess.check_output(
        ["bash", str(HERE / "dev/recipes/restarts.sh")], text=True,
        env={**ENV, "PATH": f"{os.getcwd()}:{os.environ['PATH']}"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, action))
    [names] = re.findall("--signals-to-handle=([A-Z0-9,]+) ", printed)
    handled = {"SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"}
    if action == signal.SIG_DFL:
        handled.add("SIGHUP")
    assert {*names.split(",")} == handled

def test_each_attempt_of_torchrun_has_its_own_keys(monkeypatch):
    """The store of all attempts is one. With old keys in it, gloo hangs, but not each time."""
    of_torchrun = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(of_torchrun, 0, 1)]))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found = {}
        train.meet_ranks(SimpleNamespace(data=["a"], seed=1), found.update)
        assert not found["store"].check(["address of rank 0"])
        found["store"].set("address of rank 0", "")

def start_rank(job, rank, port, seed):
    env = {**ENV, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port)}
    words = [*TOY.split(), "--data", "a", "--steps", "3", "--seed", seed, "--out", job]
    return subprocess.Popen([sys.executable, ENV["TRAIN"], *words], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

def test_ranks_of_two_jobs_on_one_port_do_not_meet():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = start_rank("A", 0, port, "1")
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    others = [start_rank("B", rank, port, "2") for rank in (0, 1)]
    for process in others:
        told, _ = process.communicate(timeout=100)
        assert process.returncode == 1 and "choose another MASTER_PORT" in told, told
        assert "Traceback" not in told, told
    second = start_rank("A", 1, port, "1")
    told, _ = first.communicate(timeout=100)
    assert second.wait(100) == first.returncode == 0 and "done at step 3" in told, told

FAKES = """
scontrol() { printf 'node1\\nnode2\\n'; }
srun() {
    echo "$1 $2"; shift 2
    for i in 0 1; do
        SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 "$@"
    done
}
python() { echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT "$@"; }
exec() { "$@"; }
export -f python exec
SLURM_JOB_ID=1234567 SLURM_CPUS_PER_TASK=12
export SLURM_CPUS_PER_TASK
"""

def test_slurm_script_starts_each_rank():
    job = (HERE / "dev/recipes/slurm.sh").read_text()
    printed = subprocess.check_output(["bash", "-c", FAKES + job, "job", "--data", "my data"], text=True)
    words = "train.py --threads 12 --resume auto --data my data"
    assert printed.splitlines() == [
        "--cpus-per-task=12 --kill-on-bad-exit=1",
        f"0 2 0 2 node1 24567 {words}",
        f"1 2 1 2 node1 24567 {words}"]
