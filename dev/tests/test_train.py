"""
Training: flags, resumed runs, the model, evals, checkpoints. Most tests call main() in this process; those of
kill -9 and of two ranks start the command that users type.

NANOLOADER_EXAMPLES=20 python -m pytest dev/tests/test_train.py -k drawn    # 20 combinations of flags, not 4
"""

import contextlib
import functools
import glob
import io
import itertools
import json
import math
import os
import pickletools
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

import dataloader
import dataset
import train
from test_dataloader import HERE, grouped, tokenized, write_shards
from tokenizer import RustBPETokenizer

EXAMPLES = int(os.environ.get("NANOLOADER_EXAMPLES", 4))
TRAIN_PY = str(HERE / "train.py")
TOY = ["--device", "cpu", "--depth", "1", "--seq_len", "32", "--batch_size", "4", "--vocab_size", "300",
       "--eval_rows", "12", "--log_every", "1", "--lr", "0.01", "--steps", "8", "--save_every", "3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with two small sources of text, `a` and `b`."""
    folder = tmp_path_factory.mktemp("train")
    for source, line in (("a", "def f(x): return x + {}\n"), ("b", "class C{}: pass\n")):
        texts = ["".join(line.format(i * j) for j in range(1 + i % 7)) for i in range(90)]
        write_shards(folder / source, [grouped(texts[i::3], [6] * 5) for i in range(3)])
    return folder


@pytest.fixture(autouse=True)
def own_folder(base, tmp_path, monkeypatch):
    """
    Each test types its commands in its own folder, with the two sources in it. This process and those that it
    starts compute with the same number of threads: one, or OMP_NUM_THREADS.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    monkeypatch.setattr(train, "cores", lambda: 1)
    monkeypatch.setattr(dataloader, "cores", lambda: 1)
    for source in ("a", "b"):
        os.symlink(base / source, source)


@pytest.fixture
def command(capsys):
    """command("--steps", 3) runs `python train.py` at toy size in this process. -> what it printed"""
    def run(*words, toy=TOY, status=0):
        words = [*toy, *map(str, words)]
        words += [] if not toy or "--data" in words else ["--data", "a"]
        capsys.readouterr()
        try:
            ended = train.main(words)
        except SystemExit as leaving:
            ended = 1 if isinstance(leaving.code, str) else leaving.code
            print(leaving.code)
        printed = "".join(capsys.readouterr())
        assert (ended or 0) == status, printed
        return printed
    return run


@pytest.fixture
def resume(command):
    return functools.partial(command, "--resume", "auto", toy=[])


class Killed(BaseException):
    """Ends main() like kill -9: nothing is saved or cleaned up by the run itself."""


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(how, step): once, after this step ("SIGTERM", "SIGINT", "kill"), or SIGTERM in an eval."""
    def set_up(how, step):
        name = "count_nats" if how == "in an eval" else "print_step"
        original = getattr(train, name)

        def interrupted(*arguments):
            result = original(*arguments)    # the log has its line before
            if name == "count_nats" or arguments[1]["step"] == step:
                monkeypatch.setattr(train, name, original)
                if how == "kill":
                    raise Killed
                os.kill(os.getpid(), signal.SIGINT if how == "SIGINT" else signal.SIGTERM)
            return result
        monkeypatch.setattr(train, name, interrupted)
    return set_up


def log_of(folder):
    """Its records without the headers, what a clock decides and what is counted since a start."""
    clock = {"tokens_per_s", "mfu", "ms", "wait_ms", "memory_gb"}
    records = [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]    # noqa: SIM115
    return [{k: v for k, v in r.items() if k not in clock} for r in records
            if not {"flags", "sources"} & r.keys()]


def losses_of(folder):
    return {r["step"]: r["loss"] for r in log_of(folder) if "loss" in r}


def newest_run():
    [folder] = glob.glob("runs/*")
    return folder


def same(a, b):
    """Whether two parts of checkpoints are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def differences(folder, other):
    """What differs between two runs: log and newest checkpoints."""
    one, two = (train.load_checkpoint(max(train.list_checkpoints(run))) for run in (folder, other))
    found = [key for key in one if not same(one[key], two[key])]
    return found + ["log"] * (log_of(folder) != log_of(other))


# ---------------------------------------------------------------------------------------------------------
# Runs that are stopped, killed and resumed

def draw_flags(pick):
    """A combination of flags that decide what a run computes."""
    flags = {"--packing": ["exactfit", "bestfit", "flat"],
             "--batch_size": [2, 4, 6], "--micro_batch_size": [1, 2, 16], "--num_lanes": [2, 4, 8],
             "--seq_len": [24, 32, 48], "--seed": [1, 2, 3], "--eval_every": [2, 3, 5],
             "--save_every": [2, 3, 4], "--dtype": ["float32", "float32", "bfloat16"]}
    switches = [name for name in ("--no_shuffle", "--doc_mask") if pick.random() < 0.5]
    data = pick.choice([["a"], ["a:0.7", "b:0.3"], ["a:0.5", "b:0.5"]])
    return ["--data", *data, *switches, "--steps", "16",
            *(str(x) for name in flags for x in (name, pick.choice(flags[name])))]


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_drawn_runs_resume_bit_for_bit_with_no_flag_but_resume(command, resume, interrupt, seed):
    """Interrupted twice, resumed by `--resume auto` alone: equal logs, weights, optimizers, loaders."""
    pick = random.Random(seed)
    flags = draw_flags(pick)
    command(*flags, "--out", "whole")
    for step, how in zip((4, 10), pick.sample(["SIGTERM", "SIGINT", "kill", "in an eval"], 2), strict=True):
        interrupt(how, step + pick.randrange(2))
        with contextlib.suppress(Killed):
            told = command(*flags) if step == 4 else resume()
            assert "stopped (SIG" in told, (how, step, told)
    told = resume()
    assert "changed: nothing" in told and "done at step 16 of 16" in told
    assert not differences("whole", newest_run()), flags


def test_run_that_is_stopped_in_an_eval_ends_it(command, resume, interrupt):
    command("--eval_every", 4, "--out", "whole")
    interrupt("in an eval", 4)
    assert "stopped (SIGTERM) at step 6" in command("--eval_every", 4)
    assert [r["step"] for r in log_of(newest_run()) if "val_bpb" in r] == [4]
    resume()
    assert not differences("whole", newest_run())


def start(*words, rank=None, port=0):
    """The command as a process; with a rank: one of two, as torchrun starts them."""
    env = {**os.environ}
    if rank is not None:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, TRAIN_PY, *map(str, words)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start_two(*words, of_second=()):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [start(*words, rank=0, port=port), start(*words, *of_second, rank=1, port=port)]


def wait_for_step(process, folder, step):
    while max((r.get("step", 0) for r in train.read_log(f"{folder}/log.jsonl")), default=0) < step:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


def outputs_of(processes, status=0):
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == status for process in processes), outputs
    return outputs


def test_two_ranks_killed_and_stopped_equal_the_uninterrupted_run(command):
    """kill -9 of both while they save each step, then SIGTERM; against torchrun's 2 ranks and against 1."""
    flags = [*TOY, "--data", "a", "--steps", 30, "--save_every", 1, "--eval_every", 15, "--doc_mask"]
    command(*flags, "--out", "one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN_PY]
    subprocess.run([*launcher, *map(str, flags), "--out", "whole"], check=True, capture_output=True)
    ranks = start_two(*flags, "--out", "two")
    wait_for_step(ranks[0], "two", 6)
    for process in ranks:
        process.kill()
    outputs_of(ranks, status=-signal.SIGKILL)
    assert len(losses_of("two")) < 30, "it was done before it was killed"
    ranks = start_two("--out", "two", "--resume", "auto")
    wait_for_step(ranks[0], "two", 20)
    ranks[1].send_signal(signal.SIGTERM)    # one tells the other
    first, second = outputs_of(ranks)
    assert "stopped (by another rank)" in first and len(losses_of("two")) < 30
    assert "stopping after this step or eval; next: --resume auto\n" in second
    assert "changed: nothing" in outputs_of(start_two("--out", "two", "--resume", "auto"))[0]
    assert not differences("whole", "two")
    assert losses_of("two") == pytest.approx(losses_of("one"), abs=1e-4)
    one, two = (train.load_checkpoint(f"{folder}/step_0000030.pt") for folder in ("one", "two"))
    assert one["loader"] == two["loader"] and one["rows_hash"] == two["rows_hash"]
    evals = [[r["val_bpb"] for r in log_of(folder) if "val_bpb" in r] for folder in ("one", "two")]
    assert evals[0] == pytest.approx(evals[1], abs=5e-4) and len(evals[0]) == 2


def test_ranks_share_a_folder_that_was_not_named():
    outputs_of(start_two(*TOY, "--data", "a", "--ledger"))
    assert {path[-12:] for path in glob.glob(newest_run() + "/ledger/*")} == {"0000.parquet", "0001.parquet"}


def test_ranks_that_differ_end_with_one_line_each():
    ranks = start_two(*TOY, "--data", "a", of_second=["--lr", "0.5"])
    for rank, output in enumerate(outputs_of(ranks, status=1)):
        assert f"error: ranks differ in flags, data, tokenizer or checkpoint (seen on rank {rank})" in output
        assert "Traceback" not in output
    assert not os.path.exists("runs")
    ranks = start_two(*TOY, "--data", "a:0.5", of_second=["nowhere:0.5"])
    first, second = outputs_of(ranks, status=1)
    assert "error: nowhere" in second and "error: lost the connection to another rank" in first
    assert "Traceback" not in first + second


def test_killed_process_resumes_bit_for_bit_and_its_temporary_file_goes(command, resume):
    command("--steps", 20, "--save_every", 1, "--out", "whole")
    process = start(*TOY, "--data", "a", "--steps", 20, "--save_every", 1, "--out", "killed")
    wait_for_step(process, "killed", 4)
    process.kill()
    process.communicate()
    (written := open("killed/step_0000019.pt.77.tmp", "w")).close()    # noqa: SIM115, as of a kill in a save
    assert 4 <= len(losses_of("killed")) < 20
    resume("--out", "killed")
    assert not os.path.exists(written.name) and not differences("whole", "killed")


def test_resume_with_other_threads_or_processor_says_that_it_rounds_differently(command, resume, monkeypatch):
    command("--steps", 2)
    words, threads = "equal up to rounding from here", torch.get_num_threads()
    assert words not in resume("--steps", 3)
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads + 1))
    told = rf"\nnow on ranks 1, threads {threads + 1}, (.*); before on ranks 1, threads {threads}, \1: "
    assert re.search(told + words, resume("--steps", 4))
    assert words not in resume("--steps", 5), "with the same threads as the last checkpoint"
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert words in resume("--steps", 6)
    monkeypatch.setattr(train.torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024")
    assert re.search(f", AVX1024; before on .*: {words}\n", resume("--steps", 7))


def test_split_of_each_source_is_printed(command):
    """Of two files, half of the data is val."""
    write_shards("halves", [[["x y"] * 20], [["y z"] * 20]])
    told = command("--steps", 1, "--data", "a:0.5", "halves:0.5")
    assert "\na: 60 documents to train on, about 0.0 epochs; 30 for val (shard_00002.parquet)\n" in told
    assert re.search(r"\nhalves: 20 documents to train on, about \S+ epochs; 20 for val \(shard_00001", told)


def test_threads_are_those_of_the_user_but_not_of_torchrun(monkeypatch):
    """It gives each of several ranks one thread; then the ranks share the cores."""
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(train, "cores", lambda: 8 // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    for threads, ranks in ((None, None), ("3", None), ("1", None), ("1", "1"), ("1", "2"), ("3", "2")):
        for name, value in (("OMP_NUM_THREADS", threads), ("LOCAL_WORLD_SIZE", ranks)):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        train.start_ranks(SimpleNamespace(device="cpu"), None)
    assert seen == [8, 3, 1, 1, 4, 3]


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, TRAIN_PY], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=50)[0] == "\nstopped; nothing was done\n"
    assert process.returncode == 130


def test_hash_of_rows_depends_on_their_order_and_not_on_batches():
    """What train.py prints, so that runs can be compared."""

    rows = torch.arange(12).view(3, 4)
    n, whole, n_signals = train.count_and_hash(rows, rows + 1, 0, 2).tolist()
    parts = [train.count_and_hash(rows[g:h], rows[g:h] + 1, g, 0)[1].item() for g, h in ((0, 1), (1, 3))]
    assert n == 12 and n_signals == 2 and (sum(parts) - whole) % 2**64 == 0
    assert train.count_and_hash(rows.flip(0), rows.flip(0) + 1, 0, 0)[1] != whole


# ---------------------------------------------------------------------------------------------------------
# What --resume, --init and --eval take, change and refuse

def test_given_flags_that_change_the_run_are_refused_all_at_once(command, resume):
    command("--steps", 2)
    told = resume("--depth", 2, "--no_shuffle", "--packing", "flat", "--lr", 0.5, status=1)
    assert "--depth 2 --packing flat --no_shuffle True does not fit runs/" in told
    assert "which has: --depth 1 --packing exactfit --no_shuffle False; leave out these flags" in told
    assert told.count("\n") == 1 and len(glob.glob("runs/*/step*")) == 1
    for name in train.FIXED_FLAGS:    # each alone
        value = {"packing": "flat", "tokenizer": "tok", "init": "a.pt"}.get(name, "7")
        if name == "tokenizer":
            RustBPETokenizer.train_from_iterator(["something else"], 265).save("tok")
        is_switch = name in ("no_shuffle", "doc_mask")
        words = [f"--{name}"] if is_switch else [f"--{name}", value]
        assert f"{' '.join(words)}{' True' * is_switch} does not fit" in resume(*words, status=1)


def test_flags_that_may_change_are_applied_and_printed(command, resume):
    command("--steps", 3, "--data", "a:0.9", "b:0.1")
    told = resume("--steps", 6, "--lr", "1e-30", "--batch_size", 2, "--seq_len", 48, "--eval_rows", 5,
                  "--data", "a:0.5", "--data", "b:0.5")
    now, before = re.search("changed: (.*) from (.*)\n", told).groups()
    flags = "--seq_len {} --batch_size {} --steps {} --eval_rows {} --lr {} --data ['a:{}', 'b:{}']".format
    assert now == flags(48, 2, 6, 5, 1e-30, 0.5, 0.5)
    assert before == flags(32, 4, 3, 12, 0.01, 0.9, 0.1)
    assert "a step: 2 rows of 48 tokens" in told
    before, after = (train.load_checkpoint(path) for path in train.list_checkpoints(newest_run()))
    moved = {name for name in before["model"] if not torch.equal(before["model"][name], after["model"][name])}
    assert {"embedding.weight", "head.weight"} < moved and not any("blocks" in name for name in moved)
    assert json.loads(after["loader"])["rows"] == 3 * 4 + 3 * 2 and after["constant_since"] == 3
    assert after["flags"]["data"] == ["a:0.5", "b:0.5"] and "changed: nothing" in resume()


def test_requeued_command_with_all_its_flags_resumes(command):
    words = ["--out", "job", "--resume", "auto", "--data", "a", "--no_shuffle", "--steps"]
    assert "no checkpoint in job yet: a new run" in command(*words, 3)
    assert "changed: --steps 5 from --steps 3\n" in command(*words, 5)
    assert "holds checkpoints; resume with --resume auto" in command("--out", "job", status=1)
    assert "job/step_0000005.pt is newer than step 3; resume from that" in command(
        "--resume", "job/step_0000003.pt", status=1, toy=[])
    assert len(losses_of("job")) == 5
    command("--resume", "job/step_0000003.pt", "--steps", 5, "--out", "other", toy=[])
    assert losses_of("other") == {3: losses_of("job")[3], 4: losses_of("job")[4]}
    told = command("--resume", "job/step_0000005.pt", "--out", "copied", toy=[])    # finished already
    assert "checkpoint: copied/step_0000005.pt (" in told and os.path.exists("copied/step_0000005.pt")


def test_resumed_run_needs_neither_the_tokenizers_folder_nor_the_datas_place(command, resume, base):
    command("--steps", 2, "--out", "run")
    for folder in glob.glob(os.environ["NANOLOADER_BASE_DIR"] + "/tokenizer*"):
        shutil.rmtree(folder) if os.path.isdir(folder) else os.remove(folder)
    shutil.copytree(base / "a", "moved")
    told = resume("--out", "run", "--steps", 3, "--data", "moved")
    assert "--data ['moved'] from --steps 2 --data ['a']\n" in told and "warning" not in told
    assert command("--sample", "def ", "--out", "run", toy=[]).startswith("def ")
    assert not glob.glob(os.environ["NANOLOADER_BASE_DIR"] + "/tokenizer*"), "another one was trained"


def test_init_brings_weights_depth_and_tokenizer(command):
    command("--depth", 2, "--seq_len", 16, "--out", "first")
    file, new = "first/step_0000008.pt", TOY[4:]    # no --depth
    told = command("--init", file, "--steps", 2, "--out", "second", toy=[*new[:2], *new[4:]])
    assert (f"from {file}: weights, tokenizer, --depth 2 --vocab_size 300; not its other flags, such as "
            "--seq_len 16 --steps 8\n") in told
    assert losses_of("second")[0] < 0.9 * losses_of("first")[0] and len(losses_of("second")) == 2
    told = command("--init", file, "--depth", 1, "--vocab_size", 999, status=1, toy=[])
    assert f"--depth 1 --vocab_size 999 does not fit {file}, which has: --depth 2 --vocab_size 300" in told
    RustBPETokenizer.train_from_iterator(["something else"], 265).save("tok")
    command("--tokenizer", "tok", "--steps", 1, "--out", "third", toy=[*TOY[:8], *TOY[10:]])
    told = command("--init", "third/step_0000001.pt", "--vocab_size", 500, status=1, toy=[])
    assert "which has: --vocab_size 265; leave out" in told


def test_eval_prints_what_the_run_printed_and_honours_its_flags(command):
    last = re.search("step 8: val.*", command("--out", "run"))[0]
    evaluate = functools.partial(command, "--eval", "run/step_0000008.pt", toy=[])
    assert last in evaluate() and last in evaluate("--micro_batch_size", 5)
    others = [evaluate(*words) for words in (["--eval_rows", 3], ["--seq_len", 16], ["--data", "b"])]
    assert all("step 8: val" in told and last not in told for told in others)
    told = evaluate("--steps", 5, "--doc_mask", status=1)
    assert "--eval cannot use --steps --doc_mask; it takes --data --eval_rows" in told


# ---------------------------------------------------------------------------------------------------------
# The run's folder: one run at a time, made with its first line, and full disks

def test_second_run_in_a_folder_is_refused_while_the_first_lives(command, interrupt, monkeypatch):
    """Also if both began before the folder was there."""
    refused = []

    def start_another(flags, record, times):
        if record["step"] == 1 and not refused:
            refused.append(None)
            with pytest.raises(SystemExit) as error:
                train.main([*TOY, "--data", "a", "--out", "shared", "--resume", "auto"])
            refused[:] = [error.value.code]
        original(flags, record, times)
    original = train.print_step
    monkeypatch.setattr(train, "print_step", start_another)
    assert "done at step 8" in command("--out", "shared")
    assert refused == ["error: another run uses shared; wait for its end, or choose another --out"]
    assert len(log_of("shared")) == 9
    monkeypatch.setattr(train, "print_step", original)

    with contextlib.ExitStack() as first:    # which makes the folder while the second one prepares itself
        monkeypatch.setattr(train, "make_optimizers", lambda *_, make=train.make_optimizers: (
            train.lock_folder("new", first), make(*_))[1])
        assert "another run uses new" in command("--out", "new", status=1)
        assert not os.path.exists("new/log.jsonl")


class FullDisk(io.FileIO):
    """A file whose disk is full after 10,000 bytes: torch.save then fails twice."""
    def write(self, data):
        if self.tell() + len(data) > 10_000:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_file_system_without_locks_trains_on(command, monkeypatch):
    import fcntl
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(38, "not implemented")))
    command("--steps", 3, "--out", "run")
    assert len(losses_of("run")) == 3


def test_full_disk_is_one_line_and_the_last_checkpoint_stays(command, resume, monkeypatch):
    command("--steps", 3, "--out", "run")
    with monkeypatch.context() as patch:
        patch.setattr(train, "open", lambda path, mode="r": {"wb": FullDisk}.get(mode, open)(path, mode),
                      raising=False)
        told = resume("--out", "run", "--steps", 5, status=1)
    assert "error: step 5 is not saved: [Errno 28] No space left on device; last: run/step_0000003.pt" in told
    assert sorted(os.listdir("run")) == [".lock", "log.jsonl", "step_0000003.pt"]
    assert "done at step 5" in resume("--out", "run", "--steps", 5)
    os.makedirs("other/log.jsonl")    # cannot be written
    assert "other/log.jsonl" in command("--out", "other", status=1)


def test_folder_is_made_with_the_first_line(command):
    for words in (["--data", "nowhere"], ["--num_lanes", 999], ["--init", "x"], ["--resume", "x"]):
        command(*words, "--out", "run", status=1)
        assert not os.path.exists("run") and not os.path.exists("runs")


def test_newest_two_checkpoints_are_kept_with_pids_in_temporary_names(command, monkeypatch):
    names, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: (names.append(file.name), save(content, file)))
    command("--out", "run")
    assert names == [f"run/step_{step:07d}.pt.{os.getpid()}.tmp" for step in (3, 6, 8)]
    assert sorted(os.listdir("run")) == [".lock", "log.jsonl", "step_0000006.pt", "step_0000008.pt"]


def test_log_has_each_step_once_after_a_kill(command, resume):
    command("--eval_every", 3, "--out", "run")
    want = log_of("run")
    os.remove("run/step_0000008.pt")
    with open("run/log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')    # killed while it wrote
    resume("--out", "run")
    assert log_of("run") == want
    headers = [json.loads(line) for line in open("run/log.jsonl") if '"flags"' in line]    # noqa: SIM115
    assert [header["from_step"] for header in headers] == [0, 6]


# ---------------------------------------------------------------------------------------------------------
# Mistakes: one line each

@pytest.mark.parametrize("flags, told", [
    (["--batch_size", "0"], "--batch_size 0: expected a number above 0"),
    (["--lr", "0"], "--lr 0.0: expected a number above 0"),
    (["--lr", "nan"], "--lr nan: expected a number above 0"),
    (["--seed", "-1"], "--seed -1: expected a number from 0 to 2**63 - 1"),
    (["--seed", str(2**63)], "expected a number from 0 to 2**63 - 1"),
    (["--resume", ""], "--resume is empty"), (["--init", ""], "--init is empty"),
    (["--eval", ""], "--eval is empty"), (["--out", ""], "--out is empty"),
    (["--depth", "1.5"], "argument --depth: invalid int value: '1.5'"),
    (["--data", "a:0.7", "b"], "--data b lacks a weight: expected PATH, or several of PATH:WEIGHT"),
    (["--data", "a:0", "b:1"], "--data a:0: expected PATH, or several of PATH:WEIGHT"),
    (["--out", "text.pt"], "--out text.pt is a file; expected a folder (a checkpoint: --resume FILE)"),
    (["--sample", "x", "--out", "best.pt"], "--out best.pt is a file; expected a folder"),
    (["--data", "nowhere"], "nowhere"),
    (["--data", "nulls", "--tokenizer", "other"], "the val split of nulls has no text"),
    (["--data", "chats", "--tokenizer", "other"], "chats/shard_00001.parquet, row group 0, row 1: ValueErr"),
    (["--data", "tokens"], "tokens holds tokens"),
    (["--data", "tokens", "--tokenizer", "other"], "tokens needs the tokenizer that made it, "),
    (["--tokenizer", "nowhere"], "nowhere"),
    (["--resume", "nowhere.pt"], "nowhere.pt is no checkpoint's file; expected a step_*.pt of a run"),
    (["--eval", "nowhere.pt"], "nowhere.pt is no checkpoint's file; expected a step_*.pt of a run"),
    (["--init", "nowhere.pt", "--out", "x"], "no checkpoint's file; there is runs/one/step_0000002.pt"),
    (["--eval", "old.pt"], "(ValueError: the checkpoint's version is 2; expected "),
    (["--eval", "pickled.pt"], "(UnpicklingError: Weights only load failed. "),
    (["--resume", "text.pt"], "text.pt is damaged, or no step_*.pt of this train.py (BadZipFile"),
    (["--init", "tensor.pt"], "tensor.pt is damaged, or no step_*.pt of this train.py (AttributeError"),
    (["--init", "deep.pt", "--depth", "1"], "--depth 1 does not fit deep.pt, which has: --depth 2; leave"),
    (["--eval", "a"], "a is no checkpoint's file; "),
    (["--resume", "auto", "--out", "mistyped"], "train one: python train.py --data DIR --out mistyped"),
    (["--resume", "auto", "--out", "mistyped", "--steps", "9"], "no checkpoint in mistyped; train one"),
    (["--resume", "atuo", "--out", "holds"], "atuo is no checkpoint's file; "),
    (["--data", "a", "--out", "holds"], "holds holds checkpoints; resume with --resume auto"),
    (["--data", "tiny"], "tiny: 3 documents for 8 lanes; pass num_lanes=3, or --num_lanes 3"),
    (["--eval", "holds/log.jsonl"], "); there is holds/step_0000002.pt"),
    (["--resume", "holds"], "holds is no checkpoint's file; there is holds/step_0000002.pt"),
    (["--data", "a:0.5", "./a/:0.5"], "--data ./a/:0.5: expected PATH, or several"),
    (["--num_lanes", "1000"], "1000 lanes"),
    (["--device", "gpu"], "argument --device: invalid choice: 'gpu' (choose from"),
    (["--sample", "x"], "no checkpoint in runs; train one: python train.py --data DIR\n"),
    (["--sample", "x", "--out", "runs"], "no checkpoint in runs; train one: python train.py --data DIR"),
    (["--sample", "x", "--lr", "1"], "--sample cannot use --lr; it takes --out --resume --device --dtype"),
    (["LOCAL_WORLD_SIZE=0"], "LOCAL_WORLD_SIZE='0' in the environment"),
    (["RANK=a"], "RANK='a' in the environment"),
])
def test_mistakes_are_one_line(command, monkeypatch, flags, told):
    write_shards("nulls", [[["x"] * 9], [[None] * 9, [""]]])
    write_shards("tiny", [[["abc def " * 9, "ghi " * 9, "x" * 90]], [["some text " * 9]]])
    for i in (0, 1):
        chats = pa.array(['[{"role": "user", "content": "Hi"}]', '[{"role": "developer"}]'])
        dataset.write_shard(f"chats/shard_{i:05d}.parquet", [chats], "messages")
    tokenized("a", "tokens")
    RustBPETokenizer.train_from_iterator(["something else"], 265).save("other")
    content = {"version": train.VERSION, "step": 0}
    for name, saved in (("tensor.pt", torch.zeros(3)), ("old.pt", {"version": 2}), ("pickled.pt", Killed),
                        ("deep.pt", content | {"flags": {"depth": 2}})):
        torch.save(saved, name)
    os.mkdir("holds")
    for name in ("holds/step_0000002.pt", "best.pt"):
        torch.save(content | {"flags": {"data": ["a"]}}, name)
    if "--out" in flags:
        os.makedirs("runs/one")
        shutil.copy("holds/step_0000002.pt", "runs/one")
    for name in ("text.pt", "holds/log.jsonl"):
        with open(name, "w") as file:
            file.write("text")
    if "=" in flags[0]:
        monkeypatch.setenv(*flags[0].split("="))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")    # or LOCAL_WORLD_SIZE is not read
    toy = [] if flags[0] in ("--sample", "--eval", "--resume", "--init") else TOY
    flags = [flag for flag in flags if "=" not in flag]
    printed = command(*flags, toy=toy, status=2 if "argument" in told else 1)
    done = r"\d|.*: \d train shards.*|model: .*|training a tokenizer .*|warning: .* has no more pairs"
    [line] = [line for line in printed.splitlines() if not re.fullmatch(done, line)]
    assert line.startswith("error: ") and told in line + "\n" and not os.path.exists("mistyped")
    assert "x1b" not in line


def test_out_of_memory_names_the_flag(command, monkeypatch):
    def fill(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(train, "train_step", fill)
    want = "error: CUDA out of memory. Lower --micro_batch_size (now 16): the same run in less memory."
    assert want in command(status=1)


@pytest.mark.parametrize("how", ["empty", "truncated", "a weight"])
def test_damaged_checkpoint_is_named_with_the_one_before(command, resume, how):
    """... which resumes once the damaged one is gone."""
    command("--steps", 5, "--out", "run")
    newest = "run/step_0000005.pt"
    with open(newest, "r+b") as file:
        if how == "a weight":
            file.seek(os.path.getsize(newest) // 2)    # a digit of a matrix or of a momentum
            file.write(bytes(255 - byte for byte in file.read(4)))
        else:
            file.truncate(0 if how == "empty" else os.path.getsize(newest) // 2)
    told = resume("--out", "run", status=1)
    assert f"error: {newest} is damaged" in told
    assert told.endswith("); remove it to go on from run/step_0000003.pt\n") and told.count("\n") == 1
    os.remove(newest)
    assert "done at step 5" in resume("--out", "run")


def test_resumed_run_that_is_over_is_an_error_that_names_its_step(command, resume):
    command("--steps", 3)
    told = resume("--steps", 2, status=1)
    assert re.search(r"error: --steps 2: \S+step_0000003.pt is at step 3 of the run already\n", told)
    assert "done at step 3 of 3" in resume()


def test_not_finite_loss_names_the_command_that_lists_its_documents(command, resume, monkeypatch):
    def explode(*args, step=train.train_step):
        calls.append(args)
        sums, nats = step(*args)
        return (sums * math.nan, nats * math.nan) if len(calls) == 2 else (sums, nats)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", explode)
        told = command("--steps", 9, "--out", "boom", status=1)
    assert re.search(r"error: step 1: loss nan, gradient norm nan; this rank's hardest documents: "
                     r"(a/\S+, row group \d+, row \d+ \(nan nats a token\)(; )?){3}. All of them: "
                     r"python -m dev.bench audit --resume FILE \(the same run .*\) --steps 1:2\n", told)
    assert not train.list_checkpoints("boom")
    command("--steps", 3, "--out", "good")
    told = resume("--out", "good", "--steps", 9, "--lr", "1e30", status=1)
    assert "audit --resume good/step_0000003.pt --steps 4:5" in told
    assert train.list_checkpoints("good") == ["good/step_0000003.pt"]


def test_not_finite_norm_stops_the_run_although_the_loss_is_finite(command, monkeypatch):
    monkeypatch.setattr(train, "train_step", lambda *args: (torch.tensor([1.0, math.nan]), args[4]))
    told = command("--steps", 2, "--out", "run", status=1)
    assert re.search(r"error: step 0: loss 0\.\d+, gradient norm nan", told)
    assert not train.list_checkpoints("run") and not losses_of("run")


def test_changed_val_files_of_a_resumed_run_are_one_line(command, resume, base):
    shutil.copytree(base / "a", "data")
    os.rename("data/shard_00002.parquet", "data/val-0.parquet")
    command("--steps", 2, "--data", "data")
    shutil.copy(base / "b" / "shard_00002.parquet", "data/val-0.parquet")
    told = resume("--steps", 3)
    assert told.count("warning: the val files of data have changed: older bits per byte do not") == 1
    assert "warning" not in resume("--steps", 4)


def test_other_data_at_a_resume_names_the_flag_that_begins_a_new_run(command, resume):
    command("--steps", 2)
    told = resume("--steps", 3, "--data", "b", status=1)
    assert "sources ['b'] do not match the state's, ['a']; " in told and "(train.py: --init FILE)\n" in told
    words = "--init", f"{newest_run()}/step_0000002.pt", "--data", "b", *TOY[4:8]
    assert "done at step 3" in command(*words, "--steps", 3, toy=[])


def test_lanes_that_do_not_fit_are_named_before_the_batch(command, monkeypatch):
    for module in (train, train.dataloader):
        monkeypatch.setattr(module, "ranks_of_this_process", lambda group=None: (0, 3))
    assert "8 lanes cannot be shared evenly by 3 ranks" in command("--num_lanes", 8, status=1)
    assert "4 rows for 3 ranks; try --batch_size 6" in command(status=1)


def test_null_documents_are_counted(command):
    write_shards("nulls", [[["some text ", "more", None] * 9], [["some text " * 9]]])
    told = command("--data", "nulls", "--steps", 20)    # counted as a chunk ends
    assert re.search(r"\nnull documents skipped by rank 0 since its start, all epochs: [1-9]", told)
    assert "null" not in command("--steps", 2)


def test_no_thread_of_the_group_is_left_at_exit(base):
    """It could abort the exit (seen once). Without the cycle collector, which may free DDP by chance."""
    program = f"""if True:
        import gc, glob, sys
        gc.disable()
        sys.path.insert(0, {str(HERE)!r})
        import train
        assert not train.main(sys.argv[1:])
        names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
        assert names and not [name for name in names if "gloo" in name], names"""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run([sys.executable, "-c", program, *TOY, "--data", "a", "--out", "group"], text=True,
                           capture_output=True, env={**os.environ, **ranks}, timeout=300)
    assert not ended.returncode, ended.stderr


# ---------------------------------------------------------------------------------------------------------
# Model and optimizers

BOS_ID = 299


def random_model(bos=None, depth=2):
    torch.manual_seed(0)
    model = train.GPT(depth, 300, bos=bos)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    return model


@pytest.mark.parametrize("bos", [None, BOS_ID])
@pytest.mark.parametrize("depth", [1, 3])
def test_no_token_sees_a_later_one(bos, depth):
    """Also through the keys of the token before, at each place, with and without documents."""
    model = random_model(bos, depth)
    row = torch.randint(0, 299, (1, 24))
    row[0, [0, 9, 17]] = BOS_ID
    want = model(row)[0]
    for place in (1, 8, 9, 12, 23):
        other = row.clone()
        other[0, place:] = torch.randint(0, 299, (24 - place,))
        got = model(other)[0]
        assert torch.allclose(got[:place], want[:place], atol=1e-6)
        assert not torch.allclose(got[place:], want[place:], atol=1e-3)


def test_doc_mask_is_each_document_alone():
    """Logits of a row of three documents equal those of three forwards: nothing crosses a BOS."""
    model, without = random_model(BOS_ID), random_model()
    documents = [torch.cat([torch.tensor([BOS_ID]), torch.randint(0, 299, (n,))]) for n in (5, 17, 9)]
    row = torch.cat(documents)[None]
    together = model(row)[0]
    alone = torch.cat([model(document[None])[0] for document in documents])
    assert torch.allclose(together, alone, atol=1e-4)
    assert not torch.allclose(without(row)[0], alone, atol=1e-2), "the mask made no difference"


def test_key_offset_is_the_slow_half_of_the_previous_key():
    k = torch.arange(2 * 3 * 5 * 8.0).view(2, 3, 5, 8)    # (B, heads, T, head_dim): pairs (0, 4), (1, 5), ...
    moved = train.offset_keys(k, None)
    assert torch.equal(moved[..., [0, 1, 4, 5]], k[..., [0, 1, 4, 5]])
    assert torch.equal(moved[:, :, 1:, [2, 3, 6, 7]], k[:, :, :-1, [2, 3, 6, 7]])
    assert not moved[:, :, 0, [2, 3, 6, 7]].any()
    begins = torch.tensor([0, 0, 1, 0, 1]).bool().expand(2, 1, 5)[..., None]
    masked = train.offset_keys(k, begins)
    assert torch.equal(masked[:, :, [0, 1, 3]], moved[:, :, [0, 1, 3]])
    assert not masked[:, :, [2, 4]][..., [2, 3, 6, 7]].any()


def test_key_offset_lets_one_layer_copy_what_followed_an_earlier_occurrence(monkeypatch):
    """Random tokens, then the same ones again: without the offset, one layer does not learn to repeat."""
    def final_loss():
        torch.manual_seed(1)
        model, losses = train.GPT(1, 64), []
        optimizers = train.make_optimizers(model, 0.005, 2 ** 19)
        model.previous.requires_grad_(False)
        for _ in range(200):
            n = int(torch.randint(6, 24, ()))    # another distance each time
            once = torch.randint(0, 64, (16, n))
            row = torch.cat([once, once], 1)
            loss = model(row[:, :-1], row[:, 1:]).view(16, -1)[:, n:].mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20
    with_offset = final_loss()
    monkeypatch.setattr(train, "offset_keys", lambda k, begins: k)
    assert with_offset < 0.7 * final_loss(), with_offset


def test_muon_takes_the_matrices_of_blocks_only():
    model = train.GPT(2, 300)
    adamw, muon = train.make_optimizers(model, 0.02, 2048)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    assert matrices == {id(p) for p in model.blocks.parameters()}
    others = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert others == {id(p) for p in model.parameters()} - matrices


def test_muon_is_torchs_own_in_float32():
    """torch's takes bfloat16 for its Newton-Schulz steps."""
    torch.manual_seed(0)
    ours, theirs = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
    theirs.load_state_dict(ours.state_dict())
    mine = train.Muon(list(ours.named_parameters()), 0.02)
    reference = torch.optim.Muon(theirs.parameters(), 0.02, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(32, 64)
        for layer, optimizer in ((ours, mine), (theirs, reference)):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    assert (theirs.weight - ours.weight).norm() / (5 * 0.02 * 32 ** 0.5) < 0.02


def test_rates_rise_stay_and_fall():
    """Over 3 % of the steps, then until 35 %, then to 5 %."""
    optimizers = train.make_optimizers(train.GPT(1, 64), 0.1, 2048)
    shares = [train.set_rates(optimizers, step, 1000) / 0.1 for step in range(1000)]
    assert optimizers[0].param_groups[0]["lr"] == pytest.approx(optimizers[0].peak_rates[0] * shares[-1])
    assert [shares[step] for step in (0, 14, 29, 30, 384, 675, 999)] == pytest.approx(
        [1 / 30, 0.5, 1, 1, 0.05 + 0.95 * 616 / 650, 0.525, 0.05146], abs=1e-4)


def test_rate_and_decay_of_matrices_follow_the_tokens_and_steps_of_the_run():
    def muon(tokens, steps, lr=None):
        optimizers = train.make_optimizers(train.GPT(1, 64), lr, tokens)
        train.set_rates(optimizers, steps // 10, steps)
        group = optimizers[1].param_groups[0]
        return group["lr"], group["decay"] / (0.5 + 0.5 * math.cos(math.pi / 10))
    assert [muon(tokens, 500) for tokens in (1024, 2048, 2**19)] == [
        (pytest.approx(rate, abs=5e-5), pytest.approx(decay, abs=1e-3)) for rate, decay in
        ((0.0090, 1), (0.0124, 0.967), (0.01995, 0.6015))]
    assert muon(2**19, 2520, 0.02) == (0.02, pytest.approx(6 / (0.02 * 2520)))


# ---------------------------------------------------------------------------------------------------------
# A whole run: its log, its evals, its samples, its checkpoints

def test_first_loss_is_ln_of_the_padded_vocabulary_and_it_learns(command):
    told = command("--steps", 30, "--out", "run")
    losses, [header] = losses_of("run"), [r for r in train.read_log("run/log.jsonl") if "flags" in r]
    assert losses[0] == pytest.approx(math.log(320), abs=1e-5) and losses[29] < 0.7 * losses[0]
    assert header["flags"]["steps"] == 30 and header["torch"] == torch.__version__
    assert [r["step"] for r in log_of("run")] == [*range(30), 30]
    assert f"step_0000030.pt ({os.path.getsize('run/step_0000030.pt') / 1e6:.1f} MB)\n" in told
    bpb = log_of("run")[-1]
    assert f"step 30: val {bpb['val_bpb']:.4f} bits per byte (zlib -9: {bpb['zlib_bpb']:.4f})\n" in told


def test_one_rank_gives_the_same_losses_for_every_micro_batch_and_dtype(command):
    command("--out", "want")
    command("--micro_batch_size", 1, "--out", "micro")
    command("--dtype", "bfloat16", "--out", "bf16")
    assert losses_of("micro") == pytest.approx(losses_of("want"), abs=1e-4)
    assert losses_of("bf16") == pytest.approx(losses_of("want"), abs=0.05)
    assert losses_of("bf16") != losses_of("want")


def test_mixture_prints_bits_per_byte_of_each_source_and_of_all(command):
    told = command("--data", "a:0.75", "b:0.25", "--doc_mask", "--steps", 4, "--out", "run")
    assert told.count("bits per byte of ") == 2 and "bits per byte over all sources" in told
    a, b, both = [r for r in log_of("run") if "val_bpb" in r]
    nats = [r["val_bpb"] * r["val_bytes"] for r in (a, b)]
    assert both["val_bpb"] == pytest.approx(sum(nats) / both["val_bytes"])
    assert both["val_bytes"] == a["val_bytes"] + b["val_bytes"]


def test_sample_begins_with_a_val_document_and_escapes_control_characters(command):
    write_shards("odd", [[["one two\n" * 9] * 9], [["Some \x1b[31mred words\x07 begin this\n text " * 9]]])
    told = command("--data", "odd", "--steps", 2, "--out", "run")
    assert "sample: Some \\x1b[" in told and "\x1b" not in told
    told = command("--sample", "caf\u00e9 \x1b[2J", "--out", "run", toy=[])
    assert told.startswith("caf\u00e9 \\x1b[2J") and "\x1b" not in told


def test_a_model_of_ones_own_is_trained_evaluated_and_sampled(command, resume, monkeypatch):
    """make_model is the only place that builds one; a flag that is new may have the default 0."""
    command("--steps", 2, "--out", "before")
    monkeypatch.setattr(train, "FLAGS", [*train.FLAGS, ("dropout", 0, 0, "a flag of one's own")])
    built, make = [], train.make_model

    def make_model(flags, tokenizer):
        built.append(flags.dropout)
        return make(flags, tokenizer)
    monkeypatch.setattr(train, "make_model", make_model)
    command("--steps", 2, "--out", "run", "--dropout", 5)
    command("--eval", "run/step_0000002.pt", toy=[])
    command("--sample", "def", "--out", "run", toy=[])
    command("--steps", 1, "--dropout", 0)
    assert built == [5, 5, 5, 0]
    resume("--out", "before", "--steps", 3)    # whose checkpoint does not know the flag
    assert built[4:] == [0] and train.load_checkpoint("before/step_0000003.pt")["flags"]["dropout"] == 0


def test_val_windows_ask_for_each_token_once_and_never_for_what_was_given(tmp_path):
    """Documents of many lengths, some with later windows."""
    letters = "abcdefghijklmnopqrstuvwxyz" * 3
    texts = [letters[n:2 * n] for n in (0, 1, 7, 8, 9, 13, 14, 15, 26)]
    folder, T = write_shards(tmp_path / "windows", [[["x"]], [texts]]), 8
    source = train.Source(folder, train.list_shards(folder, "val"), 1, None, 1)
    tokenizer = RustBPETokenizer.train_from_iterator(["x"], 265)    # its tokens are bytes
    flags = SimpleNamespace(seq_len=T, eval_rows=1000, micro_batch_size=1)
    windows = train.val_windows(tokenizer, source, flags)
    asked = windows.targets >= 0
    later = ~asked[:, 0]
    assert len(asked) == 8 + 1 + 1 + 1 + 2 + 3, "a window each, and later ones of 9, 13, 14, 15, 26 letters"
    assert not asked[later, :T // 4].any() and asked[later, T // 4].all()
    seen = asked[:, :-1] & (windows.inputs[:, 1:] != tokenizer.get_bos_token_id())
    assert torch.equal(windows.targets[:, :-1][seen], windows.inputs[:, 1:][seen]) and seen.sum() > 50
    assert tokenizer.decode(windows.targets[asked].tolist()) == "".join(texts)
    packed = sum(len(zlib.compress(text.encode(), 9)) for text in texts if text)
    assert windows.zlib_bpb == pytest.approx(8 * packed / len("".join(texts)))
    flags = SimpleNamespace(seq_len=T, eval_rows=5, micro_batch_size=4)
    few = train.val_windows(tokenizer, source, flags)
    assert torch.equal(few.inputs[:5], windows.inputs[:5]) and few.inputs.shape == few.targets.shape == (8, T)
    assert (few.targets[5:] == -100).all(), "the last batch is whole, without more targets"


def test_val_may_have_documents_with_masked_tokens_behind_bos(base, monkeypatch):
    tokenizer = RustBPETokenizer.train_from_iterator(["x"], 265)
    bos, source = tokenizer.get_bos_token_id(), SimpleNamespace(name="masked")
    documents = [np.array([bos, ~97, ~98, 99, 100]), np.array([bos, 97, 98])]
    monkeypatch.setattr(train, "documents_of", lambda *_: documents)
    flags = SimpleNamespace(seq_len=8, eval_rows=9, micro_batch_size=1)
    windows = train.val_windows(tokenizer, source, flags)
    assert windows.inputs[0, :4].tolist() == [bos, 97, 98, 99]
    assert windows.targets[0, :4].tolist() == [-100, -100, 99, 100]
    assert windows.zlib_bpb == 8 * len(zlib.compress(b"ab", 9)) / 2, "only of what it decodes"


def test_checkpoint_is_that_of_its_step_while_the_training_continues(command, monkeypatch):
    """Weights that change while a thread writes them are not those that are written; the end waits for it."""
    command("--steps", 6, "--save_every", 2, "--out", "want")
    go, write, step, happened = threading.Event(), torch.save, train.train_step, []

    def train_step(*args):
        happened.append("step")
        result = step(*args)
        if len(happened) == 6:    # two more than the step that is being saved
            go.set()
        return result
    monkeypatch.setattr(train, "train_step", train_step)
    def save(content, file):
        happened.append(go.wait(60))
        write(content, file)
    monkeypatch.setattr(torch, "save", save)
    command("--steps", 6, "--save_every", 4, "--out", "run")
    assert happened == 6 * ["step"] + 2 * [True], "the save was over before the training continued"
    want, got = (train.load_checkpoint(f"{run}/step_0000004.pt") for run in ("want", "run"))
    assert same(want["model"], got["model"]) and same(want["optimizers"], got["optimizers"])


def test_checkpoint_holds_nothing_but_numbers_and_text(command):
    """The only globals in its pickle are torch's own for tensors: weights_only=True loads all of it."""
    command("--steps", 1, "--out", "run")
    with zipfile.ZipFile("run/step_0000001.pt") as file:
        pickled = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    used = {argument for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    assert used and all(name.split()[0] in ("torch", "torch._utils", "collections") for name in used), used
    for name in ("dataset.py", "tokenizer.py", "dataloader.py", "train.py", "dev/prepare.py"):
        code = (HERE / name).read_text()
        assert not re.search(r"import pickle|pickle\.load|allow_pickle|_object\(|_object_list\(", code)
        assert code.count("torch.load(") == code.count("weights_only=True"), "other loads unpickle"


def test_data_is_the_folder_of_that_very_name():
    def sources(*specs):
        return train.sources_of(SimpleNamespace(data=specs))
    os.mkdir("web:2")
    assert sources("web:2") == {"web:2": 1.0} and sources("web:3") == {"web": 3.0}
    assert sources("http://host:8765") == {"http://host:8765": 1.0}
    assert sources("http://host:80/x:2", "https://host:81:1") == {"http://host:80/x": 2, "https://host:81": 1}
    assert sources("web:2:0.5", "b:1", "s3://c/d:2") == {"web:2": 0.5, "b": 1.0, "s3://c/d": 2.0}
    for specs in (["web:2", "b:1"], ["a:1", "a:2"], ["a:0", "b:1"], ["a:nan", "b:1"]):
        with pytest.raises(ValueError, match=r"--data .*: expected PATH, or several of PATH:WEIGHT"):
            sources(*specs)


def test_step_is_reported_after_the_next_is_queued_and_before_anything_is_saved(command, monkeypatch):
    happened = []
    def note(owner, name, what):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: happened.append(what) or original(*args))
    for name, what in (("train_step", "run"), ("print_step", "report"), ("gather_states", "save"),
                       ("evaluate", "evaluate")):
        note(train, name, what)
    command("--steps", 5, "--save_every", 3, "--eval_every", 10)
    assert happened == ["run", "run", "report", "run", "report", "report", "save",
                        "run", "run", "report", "report", "save", "evaluate"]


def test_run_of_many_epochs_says_so_before_it_starts(command):
    write_shards("tiny", [[["one two three " * 9] * 3], [["one two three " * 9]]])
    told = command("--data", "tiny", "--steps", 9, "--num_lanes", 1)
    epochs = float(re.search(r"tiny: 3 documents to train on, about ([\d.]+) epochs;", told)[1])
    n_tokens = 1 + len(train.find_tokenizer(None, ["tiny"], 300)[0].encode("one two three " * 9))
    assert epochs == pytest.approx(9 * 4 * 32 / (3 * n_tokens), abs=0.1)


# ---------------------------------------------------------------------------------------------------------
# Devices

def test_defaults_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    flags = train.parse_flags(["--device", "cuda", "--data", "a"])
    assert (flags.dtype, flags.depth, flags.seq_len, flags.steps) == ("bfloat16", 12, 2048, 2520)
    assert flags.given == ["device", "data"]
    flags = train.parse_flags(["--seed", "2"])    # the built-in corpus is small
    assert (flags.device, flags.dtype, flags.depth, flags.steps) == ("cuda", "bfloat16", 2, 1200)
    flags = train.parse_flags(["--device", "cpu", "--data", "a"])
    assert (flags.dtype, flags.depth, flags.steps) == ("float32", 2, 1200)


def test_compiles_on_cuda_or_when_asked():
    compiled = []
    for is_cuda, choice in itertools.product((True, False), ("auto", "on", "off")):
        weight = SimpleNamespace(is_cuda=is_cuda)
        block = SimpleNamespace(compile=lambda dynamic: compiled[-1].append("block"))
        model = SimpleNamespace(embedding=SimpleNamespace(weight=weight), flex=False, blocks=[block],
                                read_out=lambda x, targets: x)
        compiled.append([is_cuda, choice])
        train.compile_parts(model, choice)
        assert model.flex == (is_cuda and choice != "off")
    assert [run[:2] for run in compiled if "block" in run] == [[True, "auto"], [True, "on"], [False, "on"]]


def test_compiled_blocks_share_their_code(monkeypatch):
    """With gradients and without; none runs uncompiled without a word."""
    from torch._dynamo.utils import counters
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.nn.Module, "compile",
                        functools.partialmethod(torch.nn.Module.compile, backend="eager"))
    for bos in (None, 3):
        model = train.GPT(3, 64, bos=bos)
        train.compile_parts(model, "on")
        counters.clear()
        inputs = torch.randint(0, 64, (2, 16))
        model(inputs, inputs).sum().backward()
        with torch.no_grad():
            model(inputs, inputs)
        assert counters["frames"]["total"] == counters["frames"]["ok"] > 1, counters["frames"]


def test_compiled_run_with_evals_compiles_few_variants(command, monkeypatch):
    """Blocks with and without value embeddings, two sources, a last micro-batch of its own size, evals."""
    from torch._dynamo.utils import counters
    backend, module = {"backend": "aot_eager"}, torch.nn.Module
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **backend))
    monkeypatch.setattr(module, "compile", functools.partialmethod(module.compile, **backend))
    torch._dynamo.reset()
    counters.clear()
    words = ["--depth", 7, "--data", "a:0.5", "b:0.5", "--steps", 4, "--eval_every", 2,
             "--micro_batch_size", 3]
    with torch._dynamo.config.patch(recompile_limit=6, fail_on_recompile_limit_hit=True):
        command(*words, "--compile", "on", "--out", "compiled")
    assert counters["frames"]["total"] == counters["frames"]["ok"] > 2, counters["frames"]
    command(*words, "--compile", "off", "--out", "eager")
    assert losses_of("compiled") == pytest.approx(losses_of("eager"), abs=1e-4)


def test_only_the_first_rank_of_a_node_compares_checksums(command, monkeypatch):
    command("--steps", 1, "--out", "run")
    compared, testzip = [], zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda file: compared.append(file) or testzip(file))
    for local_rank in ("0", "1", "7"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert train.load_checkpoint("run/step_0000001.pt")["step"] == 1
    assert len(compared) == 1


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_CUDA = [*TOY[2:], "--device", "cuda", "--steps", 20, "--dtype", "float32", "--compile", "off"]


@needs_cuda
@pytest.mark.parametrize("flags", [["--compile", "on"], ["--dtype", "bfloat16"],
                                   ["--doc_mask", "--dtype", "bfloat16", "--compile", "on"]])
def test_cuda_losses_are_those_of_plain_float32(command, flags):
    command(*ON_CUDA, *flags, "--data", "a", "--out", "cuda", toy=[])
    doc_mask = ["--doc_mask"] if "--doc_mask" in flags else []
    command(*ON_CUDA, *doc_mask, "--device", "cpu", "--data", "a", "--out", "cpu", toy=[])
    assert losses_of("cuda") == pytest.approx(losses_of("cpu"), abs=0.05)


@needs_cuda
def test_cuda_resumes_bit_for_bit(command, resume, interrupt):
    command(*ON_CUDA, "--data", "a", "--out", "whole", toy=[])
    interrupt("SIGTERM", 9)
    command(*ON_CUDA, "--data", "a", toy=[])
    resume()
    assert not differences("whole", newest_run())
