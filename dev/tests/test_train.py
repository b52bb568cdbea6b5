"""
Training: flags, stops and resumes, evals, checkpoints, the model. Most tests call main() in this
process, at toy size; those of two ranks and of a hanging process start others.

NANOLOADER_EXAMPLES=20 python -m pytest dev/tests/test_train.py -k drawn    # 20 draws, not 3
"""

import errno
import functools
import glob
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

import dataloader
import dataset
import train
from test_dataloader import HERE
from tokenizer import RustBPETokenizer

EXAMPLES = int(os.environ.get("NANOLOADER_EXAMPLES", 3))
TOY = ["--device", "cpu", "--depth", "1", "--seq_len", "32", "--batch_size", "4", "--lr", "0.01",
       "--vocab_size", "300", "--log_every", "1", "--steps", "8", "--save_every", "3"]

def write(folder, train_texts, val_texts):
    """Shards of these documents, five in a row group; returns the folder."""
    for name, texts in (("train-0", train_texts), ("val", val_texts)):
        groups = [pa.array(texts[i:i + 5], pa.string()) for i in range(0, len(texts), 5)]
        dataset.write_shard(f"{folder}/{name}.parquet", groups)
    return str(folder)

@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with two small sources of text, `a` and `b`."""
    folder = tmp_path_factory.mktemp("train")
    for source, line in (("a", "def f(x): return x + {}\n"), ("b", "class C{}: pass\n")):
        texts = ["".join(line.format(i * j) for j in range(1 + i % 7)) for i in range(90)]
        write(folder / source, texts[:60], texts[60:])
    return folder

@pytest.fixture(autouse=True)
def own_folder(base, tmp_path, monkeypatch):
    """Each test types its commands in its own folder, with the sources in it, on one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for module in (train, dataloader):
        monkeypatch.setattr(module, "cores", lambda: 1)
    for source in ("a", "b"):
        os.symlink(base / source, source)

@pytest.fixture(autouse=True)
def own_signals():
    """A run keeps its handlers until its process ends. None is ignored, as nohup or & would."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)

@pytest.fixture
def command(capsys):
    """command("--steps", 3) runs `python train.py` at toy size. -> what it printed"""
    def run(*words, toy=TOY, status=0):
        words = [*toy, *map(str, words)]
        if toy and "--data" not in words:
            words += ["--data", "a"]
        capsys.readouterr()
        try:
            ended = train.main(words)
        except SystemExit as leaving:
            ended = 1 if isinstance(leaving.code, str) else leaving.code
            print(leaving.code)
        printed = "".join(capsys.readouterr())
        assert ended == status, printed
        return printed
    return run

@pytest.fixture
def resume(command):
    return functools.partial(command, "--resume", "auto", toy=[])

@pytest.fixture
def finished(base, command):
    """A finished run, in the folder `run`, with checkpoints of steps 6 and 8. -> what it printed"""
    if not (base / "run").exists():
        (base / "printed").write_text(command("--out", "run"))
        shutil.move("run", base)
    shutil.copytree(base / "run", "run")
    return (base / "printed").read_text()

def log_of(folder):
    """Its records without headers, what a clock decides, and what one rank counts."""
    clock = {"tokens_per_s", "ms", "wait_ms", "rank_0_since_start"}
    records = [record for record in train.read_log(f"{folder}/log.jsonl") if "flags" not in record]
    return [{k: v for k, v in record.items() if k not in clock} for record in records]

def losses_of(folder):
    return {r["step"]: r["loss"] for r in log_of(folder) if "loss" in r}

def newest(folder):
    return train.load_checkpoint(train.list_checkpoints(folder)[-1])

def same(a, b):
    """Whether two parts of checkpoints are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b

def differences(folder, other):
    """What differs between two runs: log and newest checkpoints."""
    one, two = newest(folder), newest(other)
    found = [key for key in one if not same(one[key], two[key])]
    if log_of(folder) != log_of(other):
        found.append("log")
    return found

# --------------------------------------------------------------------------------------------------
# Flags, stop, resume, other number of ranks: the same log

class Killed(BaseException):
    """Ends main() like kill -9: nothing is saved or cleaned up by the run itself."""

@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(how, step): once, after this step, or in the first eval from then on."""
    def set_up(how, step):
        name = "measure" if how == "SIGTERM in an eval" else "print_step"
        original = getattr(train, name)

        def interrupted(*arguments):
            if name == "print_step" and arguments[1]["step"] != step:
                return original(*arguments)
            monkeypatch.setattr(train, name, original)
            if how == "kill":
                raise Killed
            os.kill(os.getpid(), getattr(signal, how.split()[0]))
            return original(*arguments)
        monkeypatch.setattr(train, name, interrupted)
    return set_up

def draw_flags(pick):
    """A combination of flags that decide what a run computes."""
    choices = {
        "--packing": ["exactfit", "bestfit", "flat", "wholefit"],
        "--batch_size": [2, 4, 6], "--micro_batch_size": [1, 2, 16],
        "--num_lanes": [2, 4, 8], "--seq_len": [24, 32, 48],
        "--seed": [1, 2], "--data_seed": [1, 7],
        "--eval_every": [2, 3, 5], "--eval_bytes": [0, 300],
        "--save_every": [2, 3, 4], "--dtype": ["float32", "float32", "bfloat16"]}
    flags = ["--steps", 9, "--data", *pick.choice([["a"], ["a:0.7", "b:0.3"], ["a", "b"]])]
    for name, values in choices.items():
        flags += [name, pick.choice(values)]
    return flags

STOPS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "kill", "SIGTERM in an eval"]

@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_drawn_runs_stopped_twice_and_resumed_have_the_same_log(command, resume, interrupt, seed):
    """Resumed by `--resume auto` alone: equal logs, weights, optimizers, loaders, bit for bit."""
    pick = random.Random(seed)
    flags = draw_flags(pick)
    command(*flags, "--out", "whole")
    start = functools.partial(command, *flags, "--resume", "auto", "--out", "run")
    for step, how in zip((2, 5), pick.sample(STOPS, 2), strict=True):
        interrupt(how, step)
        if how == "kill":
            with pytest.raises(Killed):
                start()
        else:
            told = start(status=130 if how == "SIGINT" else 143)
            stopped = int(re.search(r"stopped at step (\d+) of 9", told)[1])
            assert stopped <= step + 2 or how == "SIGTERM in an eval", flags
    assert "done at step 9 of 9" in resume("--out", "run")
    assert not differences("whole", "run"), flags

RANKS = """
import os, signal, sys, train
original = train.print_step
def print_step(flags, record, seconds):
    original(flags, record, seconds)
    if record["step"] == 4 and os.environ["RANK"] == "1":    # one tells the other
        os.kill(os.getpid(), signal.SIGTERM)
train.print_step = print_step
of_second, words, pids = sys.argv[1].split(), sys.argv[2:], []
for rank in (0, 1):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.exit(train.main(words + of_second * rank))
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""

def two_ranks(*words, of_second="", status=0):
    """train.py as two processes of one group; SIGTERM to rank 1 after step 4. -> what it printed"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(HERE), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ended = subprocess.run([sys.executable, "-c", RANKS, of_second, *words], text=True, timeout=300,
                           env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert f"[{status}, {status}]" in ended.stdout, ended.stdout
    return ended.stdout

def test_two_ranks_then_one_have_the_log_of_one(command, resume):
    """Initial weights are those of rank 0; micro batches change nothing."""
    flags = ["--data", "a:0.7", "b:0.3", "--eval_every", "4"]
    command(*flags, "--out", "one")
    told = two_ranks(*TOY, *flags, "--micro_batch_size", "1", "--out", "two",
                     of_second="--out other --resume auto", status=143)
    assert "stopped at step 6 of 8" in told or "stopped at step 5 of 8" in told
    assert not os.path.exists("other"), "rank 0 chooses for all"
    resume("--out", "two")
    one, two = newest("one"), newest("two")
    assert one["loader"] == two["loader"] and one["rows_hash"] == two["rows_hash"]
    for r, s in zip(log_of("one"), log_of("two"), strict=True):
        assert r.get("rows") == s.get("rows")
        for name in r.keys() - {"rows_hash"}:
            assert r[name] == pytest.approx(s[name], rel=1e-3, abs=1e-4), name

def test_ranks_that_differ_end_with_one_line_each():
    told = two_ranks(*TOY, "--data", "a", of_second="--lr 0.5", status=1)
    assert told.count("error: ranks differ in flags, data, tokenizer or checkpoint; start all") == 2
    assert "Traceback" not in told and not os.path.exists("runs")

@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_until_the_checkpoint_is_written(monkeypatch, rank):
    """A launcher would end rank 0 in its save once another rank has exited."""
    waits = []
    monkeypatch.setattr(train, "ranks_of_this_process", lambda: (rank, 2))
    monkeypatch.setattr(train, "gather_states", lambda loader: {})
    monkeypatch.setattr(train, "sum_over_ranks", lambda _: waits.append(os.listdir("run")))
    os.mkdir("run")
    train.save("run", {}, 7, 0, torch.nn.Linear(1, 1), [], None, None)
    assert waits == [["step_0000007.pt"] if rank == 0 else []]

def test_hash_of_rows_depends_on_their_order_and_not_on_batches():
    rows = torch.arange(12).view(3, 4)
    n, whole = train.sum_counts(rows, rows + 1, [0, 1, 2]).tolist()
    parts = [train.sum_counts(rows[some], rows[some] + 1, some)[1].item()
             for some in ([0, 2], [1])]
    assert n == 12 and (sum(parts) - whole) % 2**64 == 0
    assert train.sum_counts(rows.flip(0), rows.flip(0) + 1, [0, 1, 2])[1] != whole

def test_data_seed_changes_the_rows_and_not_the_weights(command):
    seeds = {"one": (1, 1), "two": (1, 2), "three": (2, 1)}
    for out, (seed, data_seed) in seeds.items():
        command("--steps", 1, "--lr", 1e-30, "--seed", seed, "--data_seed", data_seed, "--out", out)
    one, two, three = map(newest, seeds)
    assert one["rows_hash"] == three["rows_hash"] != two["rows_hash"]
    query = "blocks.0.q.weight"    # as it was at first
    assert same(one["model"][query], two["model"][query])
    assert not same(one["model"][query], three["model"][query])

# --------------------------------------------------------------------------------------------------
# Signals, pipes and errors

def test_third_signal_ends_a_process_that_hangs():
    """In C, where no handler of Python's runs."""
    program = """if True:
        import ctypes, os, train
        train.note_signals()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        print("hangs", flush=True)
        libc.pthread_mutex_lock(mutex)"""
    process = subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": str(HERE)})
    try:
        assert process.stdout.readline() == "hangs\n"
        for number in (signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()

def test_ctrl_c_while_torch_is_imported_ends_silently():
    with open("torch.py", "w") as file:
        file.write("raise KeyboardInterrupt")
    ended = subprocess.run([sys.executable, HERE / "train.py"], capture_output=True,
                           env={**os.environ, "PYTHONPATH": "."})
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")

def test_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = train.note_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM]

def test_closed_pipe_does_not_end_a_run():
    """In a child whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        sys.stdout = os.fdopen(1, "w")
        try:
            train.print0("a line")
            train.print0("another")
            sys.stdout.close()    # as at Python's end
            os._exit(7)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

def raise_(error):
    raise error

def test_full_disk_at_the_first_line_of_the_log_is_one_line(command, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(train, "write_log", lambda *_: raise_(full))
    assert "\nerror: [Errno 28] No space left on device (python -X" in command(status=1)

@pytest.mark.parametrize("error", [
    ValueError("too many values"), RuntimeError("Connection refused by my own server"),
    FileNotFoundError("weights.json")])
def test_users_own_error_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr(train, "set_rates", lambda *_: raise_(error))
    with pytest.raises((ValueError, RuntimeError)) as seen:
        train.main([*TOY, "--data", "a"])
    assert error in (seen.value, seen.value.__cause__)

def test_process_group_is_destroyed_after_success_only(command, monkeypatch):
    """After an error, NCCL could wait for the other ranks for ever: Python's end is skipped."""
    at_exit = []
    monkeypatch.setattr(train.atexit, "register", lambda *work: at_exit.append(work))
    monkeypatch.setattr(train.atexit, "unregister", lambda _: at_exit.clear())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        command("--data", "nowhere", status=1)
        assert dist.is_initialized() and at_exit == [(os._exit, 1)]
    finally:
        dist.destroy_process_group()
    command("--steps", 1)
    assert not dist.is_initialized() and not at_exit

@pytest.mark.parametrize("words, told", [
    ("--step 5", "unrecognized arguments: --step 5"),
    ("--out=", "argument --out: expected a folder or URI of shards; saw an empty"),    # $UNSET
    ("--out s3://b/x", "argument --out: cannot write to s3://b/x; name a local folder"),
    ("--batch_size 0", "--batch_size 0: expected a number above 0"),
    ("--lr nan", "--lr nan: expected a number above 0"),
    ("--lr -0.01", "--lr -0.01: expected a number above 0"),
    ("--eval_bytes -5", "--eval_bytes -5: expected a number above 0"),
    ("--num_lanes 0", "num_lanes=0; expected an int, 1 or more"),
    ("--data a:0.7 b", "--data a:0.7 b: expected each path once, and a weight for each"),
    ("--data a ./a/", "expected each path once"),
    ("--data a:-1 b:1", "weight -1.0 of a; expected a number above 0"),
    ("--data nowhere", "nowhere"),
    ("--data nulls --tokenizer other --vocab_size 265", "the val split of nulls has no text"),
    ("--tokenizer other", "--vocab_size 300: other has 265 tokens; leave out one"),
    ("--tokenizer nowhere", "nowhere"),
    ("--out text.pt", "File exists: 'text.pt'"),
    ("--out run", "run/step_0000008.pt is newer than step 0; resume it"),
    ("--resume nowhere.pt", "no checkpoint nowhere.pt (a run keeps its newest two)"),
    ("--resume auto", "no checkpoint runs/step_*.pt"),
    ("--resume auto --out mistyped", "no checkpoint mistyped/step_*.pt"),
    ("--resume auto --out run --depth 2 --data_seed 4 --lr 1",
     "run/step_0000008.pt has --depth 1 --data_seed 1; leave out these flags"),
    ("--resume run/step_0000006.pt", "run/step_0000008.pt is newer than step 6; resume it"),
    ("--resume run", "run is a folder; expected a checkpoint in it: run/step_0000008.pt"),
    ("--init nulls", "nulls is a folder; expected a checkpoint in it: it has none"),
    ("--init text.pt", "text.pt cannot be used (BadZipFile"),
    ("--init run/step_0000008.pt --data a --depth 2", "has --depth 1; leave out these flags"),
    ("--eval old.pt", "old.pt cannot be used (ValueError('its version is 2, this code reads"),
    ("--eval pickled.pt", "pickled.pt cannot be used (UnpicklingError"),
    ("--eval run/step_0000003.pt", "no checkpoint run/step_0000003.pt (a run keeps its newest"),
    ("--sample x --data a", "no checkpoint runs/step_*.pt"),
    ("--sample x --eval text.pt", "argument --eval: not allowed with argument --sample"),
    ("--chat x", "train one: python train.py --data DIR"),
    ("SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_NUM_TASKS is 4, but RANK and WORLD_SIZE are not both"),
    ("RANK=1", "RANK is 1, but RANK and WORLD_SIZE are not both set"),
    ("RANK=1 WORLD_SIZE=4", "variable MASTER_ADDR expected, but not set; torchrun sets it"),
])
def test_mistakes_are_one_line(command, finished, monkeypatch, words, told):
    write("nulls", ["x"] * 9, ["", ""])
    RustBPETokenizer.train_from_iterator(["something else"], 265).save("other")
    torch.save({"version": 2}, "old.pt")
    torch.save(Killed, "pickled.pt")
    with open("text.pt", "w") as file:
        file.write("text")
    typed = []
    for word in words.split():
        name, _, value = word.partition("=")
        if name.isupper() and value:
            monkeypatch.setenv(name, value)
        else:
            typed.append(word)
    is_alone = {"--sample", "--chat", "--eval", "--resume", "--init"} & {*typed}
    status = 2 if told.startswith(("unrecognized", "argument")) else 1
    printed = command(*typed, toy=[] if is_alone else TOY, status=status)
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and told in errors[0] and "Traceback" not in printed
    assert not os.path.exists("mistyped")

def test_ledger_without_dev_is_one_line(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "dev.ledger", None)
    told = command("--out", "run", "--ledger", status=1)
    assert "error: --ledger needs the folder dev/ beside train.py\n" in told

def test_not_finite_loss_names_the_command_that_lists_its_documents(command, monkeypatch):
    step, calls = train.train_step, []

    def explode(*arguments):
        calls.append(1)
        nats, norm = step(*arguments)
        return nats, math.nan if len(calls) == 5 else norm
    monkeypatch.setattr(train, "train_step", explode)
    told = command("--out", "run", status=1)
    assert re.search(r"error: step 4: loss \d\.\d+, gradient norm nan; its documents: python -m dev"
                     r".runs audit --resume run/step_0000003.pt --steps 4:5\n", told)
    assert train.list_checkpoints("run") == ["run/step_0000003.pt"]

# --------------------------------------------------------------------------------------------------
# What flags, --resume, --init, --eval, --sample and --chat take

@pytest.mark.parametrize("specs, want", [
    (["web"], {"web": 1}),
    (["web", "code/"], {"web": 1, "code": 1}),
    (["web:0.7", "code:.3"], {"web": 0.7, "code": 0.3}),
    (["s3://b/c:2", "d:1"], {"s3://b/c": 2, "d": 1}),
    (["s3://b/x?endpoint=127.0.0.1:5123"], {"s3://b/x?endpoint=127.0.0.1:5123": 1}),
    (["s3://b/x:3?host=h:1", "d:1"], {"s3://b/x?host=h:1": 3, "d": 1}),
    (["http://localhost:8000"], {"http://localhost:8000": 1}),
    (["http://localhost:8000/web:2"], {"http://localhost:8000/web": 2})])
def test_data_is_paths_with_weights_and_a_query_has_none(specs, want):
    assert train.sources_of(SimpleNamespace(data=specs)) == want

def test_defaults_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: including_emulation)
    assert train.parse_flags(["--data", "a"]).dtype == "float32", "a T4 or V100"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    flags = train.parse_flags(["--data", "a"])
    assert (flags.dtype, flags.depth, flags.seq_len, flags.steps) == ("bfloat16", 12, 2048, 2520)
    flags = train.parse_flags(["--seed", "2"])    # the built-in corpus is small
    assert (flags.device, flags.depth, flags.steps, flags.data_seed) == ("cuda", 2, 1200, 2)
    flags = train.parse_flags(["--device", "cpu", "--data", "a", "--steps=7"])
    assert (flags.dtype, flags.depth, flags.steps) == ("float32", 2, 7)
    assert flags.given == ["device", "data", "steps"]

def test_resumed_run_takes_the_flags_that_may_change(finished, resume):
    assert "done at step 8 of 1; 0 steps" in resume("--out", "run", "--steps", 1)
    told = resume("--out", "run", "--steps", 10, "--lr", 1e-30, "--batch_size", 2,
                  "--data", "a", "b")
    assert "\nchanged flags: steps, lr, batch_size, data\n" in told
    before, after = map(train.load_checkpoint, train.list_checkpoints("run"))
    for name, weight in before["model"].items():    # all rates follow --lr
        assert torch.allclose(weight, after["model"][name], atol=1e-20)
    assert json.loads(after["loader"])["rows"] == 8 * 4 + 2 * 2 and after["constant_since"] == 8
    open("run/step_best.pt", "w").close()    # a user's own
    assert "done at step 11 of 11; 1 steps" in resume("--out", "run/", "--steps", 11)

def test_other_val_text_at_a_resume_is_said(base, finished, resume):
    assert "val text" not in resume("--out", "run", "--steps", 9)
    os.remove("a")
    os.mkdir("a")
    for path in (base / "a" / "train-0.parquet", base / "b" / "val.parquet"):
        shutil.copy(path, "a")
    assert "val text differs from that of the run's b" in resume("--out", "run", "--steps", 10)

def test_newest_run_without_a_checkpoint_is_named_and_no_older_one_resumed(command, finished):
    shutil.move("run", "runs/older")
    os.utime("runs/older/log.jsonl", (1, 1))
    os.mkdir("runs/crashed")
    with open("runs/crashed/log.jsonl", "w") as file:
        file.write('{"step": 0}\n')
    for words in (["--resume", "auto"], ["--sample", "x"]):
        assert "no checkpoint runs/crashed/step_*.pt" in command(*words, toy=[], status=1)
    told = command("--steps", 1, "--resume", "auto")
    assert "no checkpoint in runs/crashed: a new run" in told and "loaded" not in told
    told = command("--steps", 9, "--resume", "auto", "--out", "runs/older")
    assert "loaded runs/older/step_0000008.pt\n" in told

def test_init_brings_weights_depth_and_tokenizer(command, finished):
    words = ["--init", "run/step_0000008.pt", "--data", "a", "--seq_len", 32, "--steps", 2]
    command(*words, "--out", "second", toy=[])
    assert losses_of("second")[0] < 0.9 * losses_of("run")[0] and len(losses_of("second")) == 2
    assert newest("second")["tokenizer"] == newest("run")["tokenizer"]

def test_eval_prints_what_the_run_printed_and_honours_its_flags(command, finished):
    last = "loaded run/step_0000008.pt\n" + re.search("step 8: val.*", finished)[0]
    evaluate = functools.partial(command, "--eval", "run/step_0000008.pt", toy=[])
    assert last in evaluate() and last in evaluate("--micro_batch_size", 5)
    for words in (["--eval_bytes", 100], ["--seq_len", 16], ["--data", "b"]):
        assert last not in evaluate(*words)

def test_samples_keep_their_indentation_and_have_no_control_characters(command, finished):
    assert re.search("\nsample: .", finished)
    loaded = "loaded run/step_0000008.pt\n"
    told = command("--sample", "-- a comment", "--out", "run", toy=[])
    assert told.startswith(loaded + "-- a comment")
    told = command("--sample", "caf\u00e9\n    x \x1b[2J\x9b", "--out", "run", toy=[])
    assert told.startswith(loaded + "caf\u00e9\n    x ?[2J?") and "the model sees" not in told
    told = command("--chat", "one two " * 40, "--out", "run", toy=[])
    assert re.search(r"the text has \d+ tokens; the model sees only the last 32\n", told)

def test_sample_of_chats_answers_the_first_question(monkeypatch):
    prompts = []
    monkeypatch.setattr(train, "generate", lambda model, tokenizer, T, prompt, n: prompt)
    monkeypatch.setattr(train, "print_text", prompts.append)
    tokenizer = SimpleNamespace(decode=lambda ids: str(ids))
    for targets, want in (([-100, -100, 5, 6], "[8, 9]"), ([8, 9, 5, 6], "[]")):
        val = {"a": train.Val(torch.tensor([[[7, 8, 9, 5]]]), torch.tensor([[targets]]), 1, 1)}
        train.print_sample(None, tokenizer, val, SimpleNamespace(seq_len=4))
        assert prompts[-1] == f"sample: {want}"

# --------------------------------------------------------------------------------------------------
# Evals

LETTERS = "abcdefghijklmnopqrstuvwxyz" * 3
TEXTS = [LETTERS[n:2 * n] for n in (0, 1, 7, 8, 9, 13, 14, 15, 26)]

@functools.cache
def tokenizer_of(vocab_size):
    return RustBPETokenizer.train_from_iterator(TEXTS, vocab_size)

@pytest.mark.parametrize("eval_bytes, n_documents", [(1, 2), (31, 6), (0, 9)])
@pytest.mark.parametrize("vocab_size, T, micro", [(265, 8, 1), (265, 20, 7), (275, 8, 2),
                                                  (290, 3, 4)])
def test_val_is_the_same_bytes_for_every_tokenizer_and_length(eval_bytes, n_documents, vocab_size,
                                                              T, micro):
    """Documents of 0, 1, 7, 8, 9, ... letters; each token is asked once, none that is context."""
    tokenizer, texts = tokenizer_of(vocab_size), TEXTS[:n_documents]
    flags = SimpleNamespace(seq_len=T, eval_bytes=eval_bytes, micro_batch_size=micro)
    val = train.val_windows(tokenizer, write("windows", ["x"], TEXTS), flags)
    assert val.inputs.shape == val.targets.shape and val.inputs.shape[1] == micro
    inputs, targets = val.inputs.flatten(0, 1), val.targets.flatten(0, 1)
    asked = targets >= 0
    assert tokenizer.decode(targets[asked].tolist()) == "".join(texts)
    assert val.n_bytes == len("".join(texts))
    assert val.n_packed == sum(len(zlib.compress(text.encode(), 9)) for text in texts)
    later = asked.any(1) & (inputs[:, 0] != tokenizer.get_bos_token_id())
    assert not asked[later, :T // 4].any() and asked[later, T // 4:][:, :1].all()
    seen = asked[:, :-1] & asked[:, 1:]
    assert torch.equal(targets[:, :-1][seen], inputs[:, 1:][seen])

def test_val_asks_only_for_tokens_with_a_loss(monkeypatch):
    tokenizer = tokenizer_of(265)
    bos = tokenizer.get_bos_token_id()
    documents = [np.array([bos, ~97, ~98, 99, 100, bos + 1]), np.array([bos, 97], np.uint16)]
    monkeypatch.setattr(train, "documents_of", lambda *_: documents)
    flags = SimpleNamespace(seq_len=8, eval_bytes=0, micro_batch_size=1)
    val = train.val_windows(tokenizer, "chats", flags)
    assert val.inputs[0, 0].tolist() == [bos, 97, 98, 99, 100, bos, bos, bos]
    assert val.targets[0, 0].tolist() == [-100, -100, 99, 100] + 4 * [-100], "bos + 1 is no text"
    assert val.n_bytes == 3

def test_val_documents_are_read_in_parts_in_file_order(monkeypatch):
    """The first may be enough."""
    texts = [f"document {i}" for i in range(2300)]
    dataset.write_shard("many/train.parquet", [pa.array(["x"])])
    dataset.write_shard("many/val.parquet", [pa.array(texts)])
    found = [tokenizer_of(265).decode(ids[1:]) for ids in train.documents_of(tokenizer_of(265),
                                                                             "many")]
    assert found == texts

def test_mixture_has_bits_per_byte_and_losses_of_each_source(command):
    told = command("--data", "a:0.75", "b:0.25", "--steps", 4, "--out", "run")
    lines = re.findall(r"step 4: val ([\d.]+) bits per byte of (.+) \(([\d,]+) bytes; zlib", told)
    (a, _, n_a), (b, _, n_b), (both, *_) = [
        (float(bpb), of, int(n.replace(",", ""))) for bpb, of, n in lines]
    assert [of for _, of, _ in lines] == ["a", "b", "all sources"]
    assert both == pytest.approx((a * n_a + b * n_b) / (n_a + n_b), abs=1e-3)
    [record] = [r for r in log_of("run") if "val_bpb" in r]    # one a step, as wandb needs it
    assert record["zlib_bpb/a"] > 0
    for name, bpb in {"val_bpb/a": a, "val_bpb/b": b, "val_bpb": both}.items():
        assert record[name] == pytest.approx(bpb, abs=1e-4)
    steps = [r for r in train.read_log("run/log.jsonl") if "loss" in r]
    assert [r["rows"] for r in steps] == [4, 8, 12, 16]
    assert steps[0]["rank_0_since_start"]["a"]["epoch"] == 1
    assert "a: 2 shards, 1 train, 1 val (val.parquet)\n" in told and "documents to train on, about 0." in told

def test_loss_of_a_source_is_that_of_its_rows():
    loader = SimpleNamespace(sources={"a": 1, "b": 2}, row_sources=lambda: ["a", "b", "a"])
    targets = torch.tensor([[1, 1], [1, -100], [1, -100]])
    nats = torch.tensor([[1.0, 2.0], [6.0, 0.0], [3.0, 0.0]])
    assert train.read_losses(loader, targets, nats) == {"loss": 3.0, "loss/a": 2.0, "loss/b": 6.0}
    loader.row_sources = lambda: ["b"] * 3
    assert train.read_losses(loader, targets, nats) == {"loss": 3.0, "loss/b": 3.0}, "a had no row"

def test_models_are_told_when_they_are_evaluated_and_a_signal_breaks_it_off(command, monkeypatch):
    """After one batch, without a sample."""
    forward, modes = train.GPT.forward, []

    def stop_in_eval(model, inputs, targets=None):
        modes.append((model.training, torch.is_grad_enabled()))
        if modes.count((False, False)) == 1:
            os.kill(os.getpid(), signal.SIGHUP)
        return forward(model, inputs, targets)
    monkeypatch.setattr(train.GPT, "forward", stop_in_eval)
    saves, save = [], train.save
    monkeypatch.setattr(train, "save", lambda *args: saves.append(args[2]) or save(*args))
    words = ["--eval_every", 4, "--save_every", 4, "--micro_batch_size", 4]
    told = command(*words, status=143)
    assert saves == [4], "once"
    assert modes == [(True, True)] * 4 + [(False, False)]
    assert "stopped at step 4 of 8" in told and "bits per byte" not in told

@pytest.mark.parametrize("part", ["q", "blocks"])
def test_run_of_frozen_blocks_trains_the_rest(command, monkeypatch, part):
    gpt = train.GPT.__init__

    def frozen(self, *sizes, **more):
        gpt(self, *sizes, **more)
        module = self.blocks if part == "blocks" else self.blocks[0].q
        module.requires_grad_(False)
    monkeypatch.setattr(train.GPT, "__init__", frozen)
    command("--steps", 2)

def test_epochs_are_printed_before_the_run_starts(command):
    text = "one two three " * 9
    write("tiny", [text] * 3, [text])
    told = command("--data", "tiny", "--steps", 9, "--num_lanes", 1, "--out", "run")
    n_tokens = len(RustBPETokenizer.from_dict(newest("run")["tokenizer"]).encode(text))
    epochs = float(re.search(r"tiny: 3 documents to train on, about ([\d.]+) epochs", told)[1])
    assert epochs == pytest.approx(9 * 4 * 32 / (3 * n_tokens), abs=0.1)

def test_a_share_of_the_tokens_is_replaced_in_each_row_alike_on_any_rank():
    inputs = torch.full((4, 1000), 7)
    noisy = train.replace_some(inputs, [8, 9, 10, 11], 1, 50, 0.1)
    assert 300 < (noisy != 7).sum() < 500 and noisy.unique().tolist() == [*range(50)]
    noisier = train.replace_some(inputs, [8, 9, 10, 11], 1, 50, 0.2)
    assert 700 < (noisier != 7).sum() < 900
    of_a_rank = train.replace_some(inputs[:2], [9, 11], 1, 50, 0.1)
    assert torch.equal(of_a_rank, noisy[[1, 3]])
    for others in (train.replace_some(inputs, [8, 9, 10, 11], 2, 50, 0.1), noisy.roll(1, 0)):
        assert (others != noisy).any(dim=1).all()
    assert torch.equal(train.replace_some(inputs, [8, 9, 10, 11], 1, 50, 0.0), inputs)

@pytest.mark.parametrize("steps, is_noisy", [(2, False), (30, True)])
def test_many_epochs_get_noise_and_tables_that_decay(command, monkeypatch, steps, is_noisy):
    """The more epochs, the more; and the hash of rows is that of the text."""
    shares, replace = [], train.replace_some

    def note(*arguments):
        shares.append(arguments[-1])
        return replace(*arguments)

    monkeypatch.setattr(train, "replace_some", note)
    write("tiny", ["one two three " * 9] * 9, ["one two"])
    told = command("--data", "tiny", "--steps", steps, "--out", "run")
    tables = newest("run")["optimizers"][1]["param_groups"][0]
    epochs = float(re.search(r"about ([\d.]+) epochs", told)[1])
    assert (epochs > 1) == is_noisy
    want = 0.05 * np.log2(epochs) if is_noisy else 0
    assert shares == pytest.approx([want] * steps, abs=0.005)
    assert (tables["weight_decay"] > 0) == is_noisy
    monkeypatch.setattr(train, "replace_some", lambda inputs, *_: inputs)
    assert re.search("rows: hash .*", told)[0] in command("--data", "tiny", "--steps", steps)

def test_a_tokenizer_of_little_text_has_about_the_root_of_its_bytes(command):
    words = ["".join(random.Random(i).choices("aeiourstlnm", k=7)) for i in range(130_000)]
    write("tiny", [" ".join(words[i:i + 1000]) for i in range(0, 130_000, 1000)], ["a word"])
    command("--data", "tiny", "--steps", 1, "--depth", 1, "--seq_len", 32, toy=[])
    assert newest(max(glob.glob("runs/*")))["flags"]["vocab_size"] == 1024

# --------------------------------------------------------------------------------------------------
# The run's folder and its checkpoints

def test_second_run_in_a_folder_is_refused_while_the_first_lives(command, monkeypatch):
    refused, original = [], train.print_step

    def start_another(flags, record, seconds):
        if record["step"] == 1:
            monkeypatch.setattr(train, "print_step", original)
            with pytest.raises(SystemExit) as error:
                train.main([*TOY, "--data", "a", "--out", "shared", "--resume", "auto"])
            refused.append(error.value.code)
        original(flags, record, seconds)
    monkeypatch.setattr(train, "print_step", start_another)
    assert "done at step 8" in command("--out", "shared")
    assert refused == ["error: another run uses shared; wait for its end, or choose another --out"]
    assert len(losses_of("shared")) == 8
    assert "done at step 9" in command("--out", "shared", "--resume", "auto", "--steps", 9)

def test_flipped_bit_or_truncated_checkpoint_is_named(command, finished, resume):
    """And once it is moved away, as the errors say, the one before is resumed."""
    path = "run/step_0000008.pt"
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)    # a digit of a matrix or of a momentum
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    told = resume("--out", "run", status=1)
    assert "step_0000008.pt cannot be used (ValueError('the checksum of" in told
    os.truncate(path, os.path.getsize(path) // 2)
    told = resume("--out", "run", status=1)
    assert "step_0000008.pt cannot be used" in told and "move it away: --resume auto" in told
    told = command("--resume", "run/step_0000006.pt", toy=[], status=1)
    assert "resume it (--resume auto), move it away, or" in told
    os.rename(path, "damaged.pt")
    told = resume("--out", "run")
    assert "loaded run/step_0000006.pt" in told and "done at step 8" in told

def test_full_disk_is_one_line_and_the_last_checkpoint_stays(finished, resume, monkeypatch):
    assert sorted(os.listdir("run")) == [".lock", "log.jsonl", "step_0000006.pt", "step_0000008.pt"]
    with open("run/step_0000007.pt.1.tmp", "w") as file:
        file.write("of a killed run")
    with monkeypatch.context() as patch:
        def full(content, file):
            file.write(b"some")
            try:
                raise OSError(28, "No space left on device")
            finally:
                raise RuntimeError("unexpected pos 64")    # as torch does
        patch.setattr(torch, "save", full)
        told = resume("--out", "run", "--steps", 9, status=1)
    assert ("error: run/step_0000009.pt was not written ([Errno 28] No space left on device); free "
            "some space, then: python train.py --resume auto --out run (without a checkpoint: the "
            "same command again)\n") in told
    assert "done at step 9" in resume("--out", "run", "--steps", 9)
    assert sorted(os.listdir("run")) == [".lock", "log.jsonl", "step_0000008.pt", "step_0000009.pt"]

# --------------------------------------------------------------------------------------------------
# Model and optimizers

def test_first_loss_is_ln_of_the_padded_vocabulary_and_it_learns(command):
    command("--steps", 30, "--out", "run")
    losses = losses_of("run")
    assert losses[0] == pytest.approx(math.log(320), abs=1e-5) and losses[29] < 0.7 * losses[0]

@pytest.mark.parametrize("depth", [1, 3])
def test_no_token_sees_a_later_one(depth):
    torch.manual_seed(0)
    model = train.GPT(depth, 300)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    row = torch.randint(0, 299, (1, 24))
    want = model(row)[0]
    for place in (1, 8, 9, 23):
        other = row.clone()
        other[0, place:] = torch.randint(0, 299, (24 - place,))
        got = model(other)[0]
        assert torch.allclose(got[:place], want[:place], atol=1e-6)
        assert not torch.allclose(got[place:], want[place:], atol=1e-3)

def test_key_offset_is_the_slow_half_of_the_previous_key():
    k = torch.arange(2 * 3 * 5 * 8.0).view(2, 3, 5, 8)    # (B, heads, T, head_dim)
    moved = train.offset_keys(k)
    fast, slow = [0, 1, 4, 5], [2, 3, 6, 7]    # RoPE pairs (0, 4), (1, 5), ...
    assert torch.equal(moved[..., fast], k[..., fast])
    assert torch.equal(moved[:, :, 1:, slow], k[:, :, :-1, slow])
    assert not moved[:, :, 0, slow].any()

def optimizers_of(model, lr=None, tokens=2048):
    flags = SimpleNamespace(lr=lr, batch_size=1, seq_len=tokens, init=None)
    return train.make_optimizers(model, flags, 0)

def test_each_parameter_is_in_one_group_or_an_error_names_it(command, monkeypatch):
    model = train.GPT(2, 300)
    muon, adamw = optimizers_of(model)
    train.check_groups(model, [muon, adamw])
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    assert of_muon == {id(p) for p in model.blocks.parameters()}
    with pytest.raises(dataset.UserError, match=r"blocks.0.q.weight, .*expected in one group"):
        train.check_groups(model, [muon, adamw, muon])
    block = train.Block.__init__

    def with_bias(self, *sizes):
        block(self, *sizes)
        self.q.bias = torch.nn.Parameter(torch.zeros(64))
    monkeypatch.setattr(train.Block, "__init__", with_bias)
    told = command(status=1)
    assert "error: blocks.0.q.bias: expected in one group of make_optimizers each" in told

def test_muon_is_torchs_own_in_float32():
    """torch's takes bfloat16 for its Newton-Schulz steps."""
    torch.manual_seed(0)
    ours, theirs = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
    theirs.load_state_dict(ours.state_dict())
    mine = train.Muon(list(ours.parameters()), 0.02)
    reference = torch.optim.Muon(theirs.parameters(), 0.02, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(32, 64)
        for layer, optimizer in ((ours, mine), (theirs, reference)):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    assert (theirs.weight - ours.weight).norm() / (5 * 0.02 * 32 ** 0.5) < 0.02

def test_rates_rise_stay_and_fall_in_any_order_of_optimizers():
    """Over 3 % of the steps, then until 35 %, then to 5 %. Muon's fields are Muon's alone."""
    muon, adamw = optimizers_of(train.GPT(1, 64), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9,
                            weight_decay=0.1)
    other.peak_rates, other.decay_totals = [0.5], [0]
    shares = []
    for step in range(1000):
        train.set_rates([muon, adamw, other], step, 1000)
        shares.append(muon.param_groups[0]["lr"] / 0.1)
    assert [shares[step] for step in (0, 14, 29, 30, 384, 675, 999)] == pytest.approx(
        [1 / 30, 0.5, 1, 1, 0.05 + 0.95 * 616 / 650, 0.525, 0.05146], abs=1e-4)
    assert other.param_groups[0]["lr"] == pytest.approx(0.5 * shares[-1])
    assert other.param_groups[0]["momentum"] == 0.9 and other.param_groups[0]["weight_decay"] == 0.1

@pytest.mark.parametrize("tokens, steps, lr, rate, decay", [
    (1024, 500, None, 0.0090, 1), (2048, 500, None, 0.0124, 0.967),
    (2**19, 500, None, 0.01995, 0.6015), (2**19, 2520, 0.02, 0.02, 6 / (0.02 * 2520))])
def test_rate_and_decay_of_matrices_follow_the_tokens_and_steps(tokens, steps, lr, rate, decay):
    muon, adamw = optimizers_of(train.GPT(1, 64), lr, tokens)
    train.set_rates([muon, adamw], steps // 10, steps)
    group = muon.param_groups[0]
    assert group["lr"] == pytest.approx(rate, abs=5e-5)
    assert group["weight_decay"] / (0.5 + 0.5 * math.cos(math.pi / 10)) == pytest.approx(decay, abs=1e-3)
