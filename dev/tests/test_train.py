"""
Training: flags, stops and resumes, evals, checkpoints, the model. Tests call main() in this
process, at toy size; only two ranks are processes of their own.

    NANOLOADER_EXAMPLES=20 python -m pytest dev/tests/test_train.py -k drawn    # more draws
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dataloader
import dataset
import train
from dev import runs
from dev.tests.cases import is_like, read_cases
from test_dataloader import HERE, TIMES, grouped
from tokenizer import RustBPETokenizer

TOY = ("--device cpu --dtype float32 --depth 1 --seq_len 32 --batch_size 4 --lr 0.01 --vocab_size 300 "
       "--log_every 1 --steps 8 --save_every 3")
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 3
LENGTHS = 0, 1, 7, 8, 9, 13, 14, 15, 26
DOCUMENTS = [LETTERS[n:2 * n] for n in LENGTHS] * 121    # more than are encoded at once

def write(folder, train_texts, val_texts):
    for name, groups in (("train-0", grouped(train_texts, 5)), ("val", [val_texts])):
        arrays = [pa.array(group, pa.string()) for group in groups]
        dataset.write_shard(f"{folder}/{name}.parquet", arrays)

CHAT = '[{"role": "user", "content": "%s"}, {"role": "assistant", "content": "so"}]'

@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with what data/sessions.txt says, but the run."""
    folder = tmp_path_factory.mktemp("train")
    for source, line in (("a", "def f(x): return x + {}\n"), ("b", "class C{}: pass\n")):
        texts = ["".join(line.format(i * j) for j in range(1 + i % 7)) for i in range(90)]
        write(folder / source, texts[:60], texts[60:])
    write(folder / "letters", ["x"], DOCUMENTS)
    write(folder / "nulls", ["x"] * 9, ["", ""])
    RustBPETokenizer.train_from_iterator(["something else"], 265).save(f"{folder}/tokenizer")
    torch.save({"version": 2}, folder / "old.pt")
    torch.save(Killed, folder / "pickled.pt")
    return folder

@pytest.fixture(autouse=True)
def own_folder(base, tmp_path, monkeypatch):
    """Each test types its commands in its own folder, with the sources in it, on one thread."""
    monkeypatch.chdir(tmp_path)
    for module in (train, dataloader):
        monkeypatch.setattr(module, "cores", lambda: 1)
    for path in base.iterdir():
        os.symlink(path, path.name)

@pytest.fixture(autouse=True)
def own_signals():
    """None is ignored, as nohup or & would."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)

@pytest.fixture
def command(capsys):
    """command("--steps 3") types `python train.py` at toy size. -> what it printed"""
    def run(words, toy=TOY, status=0):
        if toy == TOY and "--data " not in words:
            words += " --data a"
        capsys.readouterr()
        try:
            ended = train.main(shlex.split(f"{toy} {words}"))
        except SystemExit as leaving:
            print(leaving.code)
            ended = 1
        printed = "".join(capsys.readouterr())
        assert ended == status, printed
        return printed
    return run

@pytest.fixture
def resume(command):
    return functools.partial(command, toy="--resume auto")

@pytest.fixture
def finished(base, command):
    """A finished run, in the folder `run`, with checkpoints of steps 6 and 8. -> what it printed"""
    run, printed = Path(f"{base}_run"), Path(f"{base}_printed")
    if not run.exists():
        printed.write_text(command("--out run"))
        shutil.move("run", run)
    shutil.copytree(run, "run")
    log = Path("run/log.jsonl")
    log.write_text(re.sub(r'"cwd": ".*?"', f'"cwd": "{os.getcwd()}"', log.read_text()))
    return printed.read_text()

def log_of(folder):
    """Its records without headers, what a clock decides, and what one rank counts."""
    records = [record for record in train.read_log(f"{folder}/log.jsonl") if "flags" not in record]
    for record in records:
        for name in ("tokens_per_s", "tflops", "step_ms", "wait_ms", "rank_0_since_start"):
            record.pop(name, None)
    return records

def losses_of(folder):
    return {record["step"]: record["loss"] for record in log_of(folder) if "loss" in record}

def newest(folder):
    return train.load_checkpoint(train.newest_checkpoint(folder))

@contextlib.contextmanager
def at_call(n, name, action):
    """Before train.NAME is called the n-th time, `action`."""
    original, calls = getattr(train, name), itertools.count(1)

    def call(*arguments, **options):
        if next(calls) == n:
            action()
        return original(*arguments, **options)

    with mock.patch.object(train, name, call):
        yield

# --------------------------------------------------------------------------------------------------
# Flags, stop, resume, other number of ranks: the same log

CHOICES = {
    "data": ["a", "a:0.7 b:0.3", "a b"], "packing": [*dataloader.PACKINGS],
    "batch_size": [2, 4, 6], "micro_batch_size": [1, 2, 16], "seq_len": [24, 32, 48],
    "num_lanes": [2, 4, 8], "seed": [1, 2], "save_every": [1, 2, 3],
    "eval_every": [2, 3], "eval_bytes": [100, 300], "dtype": ["float32", "bfloat16"]}
FLAGS = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in CHOICES.items()})
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
STOP = st.tuples(st.just("kill -9") | st.sampled_from(SIGNALS),
                 st.sampled_from(["print_step", "evaluate", "save"]), st.integers(1, 3))

class Killed(BaseException):
    """Ends main() like kill -9: nothing is saved or cleaned up by the run itself."""

def run_until(stop, words):
    """Send the signal before the n-th call of a function; check the exit status."""
    how, place, n = stop
    sent = []

    def send():
        sent.append(how)
        if how == "kill -9":
            raise Killed
        os.kill(os.getpid(), how)

    with at_call(n, place, send), contextlib.suppress(Killed):
        status = train.main(words.split())
        assert status == (143 if sent else 0)

@settings(max_examples=4 * TIMES, phases=[Phase.generate])    # to shrink takes minutes
@given(FLAGS, STOP, STOP)
def test_drawn_runs_stopped_twice_and_resumed_have_the_same_log(flags, first, second):
    """In the end by `--resume auto` alone: equal logs, weights, optimizers, loaders, to the bit."""
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    with tempfile.TemporaryDirectory() as folder:
        words = f"{TOY} --steps 6 {words} --out {folder}"
        train.main(f"{words}/whole".split())
        run_until(first, f"{words}/run --resume auto")
        run_until(second, f"{words}/run --resume auto")
        if train.list_checkpoints(f"{folder}/run"):
            words = f"--out {folder}"
        assert train.main(f"{words}/run --resume auto".split()) == 0
        assert log_of(f"{folder}/run") == log_of(f"{folder}/whole")
        run, whole = newest(f"{folder}/run"), newest(f"{folder}/whole")
    for part in ("model", "optimizers"):
        torch.testing.assert_close(run.pop(part), whole.pop(part), rtol=0, atol=0)
    assert run == whole

RANKS = """
import os, signal, sys, train
def seed_apart(seed, manual_seed=train.torch.manual_seed):    # rank 0 sends its weights to all
    return manual_seed(seed + int(os.environ["RANK"]))
def print_and_stop(flags, record, seconds, print_step=train.print_step):
    print_step(flags, record, seconds)
    if record["step"] == 2 and os.environ["RANK"] == "1" and "two" in sys.argv[1]:
        os.kill(os.getpid(), signal.SIGTERM)    # one tells the other
def fail(loader, following=train.PackedLoader.__next__):
    if loader.rows_delivered == 5 * 4 and os.environ["RANK"] == os.environ["FAILING"]:
        raise train.UserError("this shard is bad")
    return following(loader)
train.PackedLoader.__next__ = fail
train.print_step = print_and_stop
train.torch.manual_seed = seed_apart
for words_of_second in sys.argv[2:]:
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            words = sys.argv[1] + words_of_second * rank
            sys.exit(train.main(words.split()))
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
"""

def two_ranks(words, *words_of_second, failing=""):
    """
    train.py as two processes, once for each string of the second's words, by default once as the
    first. failing: the rank that has no batch after 5 steps. -> what it printed
    """
    words_of_second = words_of_second or [""]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(HERE), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
           "FAILING": failing}
    return subprocess.check_output([sys.executable, "-c", RANKS, words, *words_of_second],
                                   text=True, timeout=300, env=env, stderr=subprocess.STDOUT)

def test_two_ranks_then_one_have_the_log_of_one(command, resume):
    """Ranks that differ end with a line each. Micro batches change nothing."""
    flags = f"{TOY} --data a:0.7 b:0.3 --steps 5 --eval_every 2"
    command(f"{flags} --out one", toy="")
    told = two_ranks(f"{flags} --micro_batch_size 1 --out two", " --lr 0.5", " --depth 2",
                     " --out other --resume auto")
    assert "[1, 1]\n" in told and "[143, 143]\n" in told and "Traceback" not in told, told
    assert told.count("error: ranks differ in flags, data, tokenizer or checkpoint; start all") == 4
    assert not os.path.exists("other"), "rank 0 chooses for all"
    resume("--out two")
    assert newest("one")["loader"] == newest("two")["loader"]
    for of_one, of_two in zip(log_of("one"), log_of("two"), strict=True):
        assert of_one.pop("rows_hash", None) == of_two.pop("rows_hash", None)
        assert of_one == pytest.approx(of_two, rel=1e-3, abs=1e-4)

def test_ranks_wait_until_the_checkpoint_is_written(monkeypatch):
    """A launcher would end rank 0 in its save once another rank has exited."""
    waits = []
    monkeypatch.setattr(train, "merge_states", lambda states: {})
    monkeypatch.setattr(train, "sum_over_ranks", lambda _: waits.append(os.listdir("run")))
    os.mkdir("run")
    constants = {"flags": {"keep": 2, "keep_every": None}}
    train.save("run", constants, 7, 0, torch.nn.Linear(1, 1), [], None)
    assert waits == [["step_0000007.pt"]]

def test_ranks_compare_their_val_text(command):
    """Of as many bytes, in the file and compressed."""
    compared = []
    for text in ("one two", "one owt"):
        write("tiny", ["one two"] * 9, [text])
        with mock.patch.object(train, "check_ranks") as check_ranks:
            command("--data tiny --steps 1 --noise 0 --table_decay 0 --out run")
        [flags, *others] = check_ranks.call_args.args[0]
        compared.append((flags.pop("val_digests"), flags, others))
        shutil.rmtree("run")
    (first, *same), (second, *others) = compared
    assert same == others and first != second

# --------------------------------------------------------------------------------------------------
# Signals, pipes and errors

def test_third_signal_ends_a_process_that_waits():
    """For a lock, as next() does for a shard that never comes."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        with train.note_signals():
            os.rename("a", "waits")
            threading.Semaphore(0).acquire()
    while not os.path.exists("waits"):
        time.sleep(0.05)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, number)
        time.sleep(0.3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM

def test_ranks_whose_launcher_is_gone_save_and_stop():
    """torchrun is killed; its ranks would hold the folder's lock and train on."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(HERE / "train.py"), *f"{TOY} --data a --steps 9999 --out run".split()]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as launcher:
        while not train.list_checkpoints("run"):
            assert launcher.poll() is None
            time.sleep(0.1)
        launcher.kill()
    lock = FileLock("run/.lock")
    lock.acquire(timeout=60)    # longer, and they have not stopped
    last_step = max(losses_of("run"))
    assert dataset.step_in_name(train.newest_checkpoint("run")) == last_step + 1

def test_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with train.note_signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM]

def test_closed_stderr_does_not_end_a_run(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        dataset.print_error("trying again")
        with pytest.raises(BrokenPipeError):
            print("unguarded", file=pipe, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)

def test_closed_pipe_does_not_end_a_run(monkeypatch):
    """Nor is there an error when Python flushes its standard output, at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    dup2 = os.dup2
    monkeypatch.setattr(os, "dup2", lambda new, _: dup2(new, writer))    # not to pytest's own
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        train.print0("a line")
        train.print0("another")

def test_process_group_ends_with_main_whatever_happens(command, monkeypatch):
    """But after an error, NCCL could wait for the other ranks for ever: Python's end is skipped."""
    at_exit = []
    monkeypatch.setattr(train.atexit, "register", lambda *work: at_exit.append(work))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for words, status in (("--data nowhere", 1), ("--steps 1", 0), ("--data nowhere", 1)):
        command(words, status=status)
        assert not dist.is_initialized() and (os._exit, 1) not in at_exit    # torch has others
    started = []
    monkeypatch.setattr(dist, "init_process_group", lambda *backend, **more: started.append(more))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(train, "meet_ranks", lambda flags, begin: begin(store=None))
    with pytest.raises(KeyError), train.group_of_ranks(SimpleNamespace(device="cuda")):
        raise KeyError
    assert (os._exit, 1) in at_exit
    assert started[0]["device_id"] == torch.device("cuda", 3)

PROGRAMS = {"train.py": train, "dataset.py": dataset, "-m dev.runs": runs}

SESSIONS = {title: lines for _, title, lines in read_cases("sessions.txt")}

def type_line(line, patch):
    """A line of a shell. Programs of nanoloader run in this process."""
    variables, python, words = line.partition("python ")
    if line.startswith("cd "):
        os.chdir(line.removeprefix("cd "))
    elif not python:
        print(subprocess.run(line, shell=True, capture_output=True, text=True).stdout)
    else:
        [program] = [name for name in PROGRAMS if words.startswith(name)]
        for variable in variables.split():
            patch.setenv(*variable.split("="))
        try:
            PROGRAMS[program].main(shlex.split(words.removeprefix(program)))
        except SystemExit as ended:
            print(ended.code if ended.code != 2 else "", file=sys.stderr)

@pytest.mark.parametrize("title", SESSIONS)
def test_commands_print_what_sessions_txt_says(finished, capsys, monkeypatch, title):
    """Without the path of this folder."""
    seen, here = [], f"{os.getcwd()}/"
    for line in SESSIONS[title]:
        if line.startswith("$ "):
            with monkeypatch.context() as patch:
                type_line(line[2:], patch)
            printed = "".join(capsys.readouterr()).splitlines()
            seen += [line, *(one.replace(here, "").strip() for one in printed if one)]
    assert is_like("\n".join(seen), SESSIONS[title]), "\n".join(seen)

def test_a_model_sends_no_control_characters(capsys):
    train.print_text("caf\u00e9\n    x \x1b[2J")
    assert capsys.readouterr().out == "caf\u00e9\n    x ?[2J\n"

def test_not_finite_loss_names_the_command_that_lists_its_documents(command, monkeypatch):
    norms = iter([1.0, 1.0, 1.0, 1.0, math.nan])
    nats = torch.ones(4, 32)
    monkeypatch.setattr(train, "train_step", lambda *_: (nats, next(norms)))
    told = command("--out run", status=1)
    audit = dataset.command("dev.runs audit --steps 4:5 --resume", "run/step_0000003.pt")
    assert re.search(r"error: step 4: loss \d\.\d+, gradient norm nan. Later steps than run/", told)
    assert f"list the documents of this step: {audit}\n" in told
    assert audit.startswith(f"cd {HERE} && python -m ")
    assert train.list_checkpoints("run") == ["run/step_0000003.pt"]

def test_a_run_gives_everything_back_in_whatever_way_it_ends(command, monkeypatch):
    """A notebook keeps the last error, with all its variables, and goes on in the same process."""
    def held():
        for thread in {*threading.enumerate()} - threads:    # of the loader
            thread.join(60)
        handlers = [signal.getsignal(number) for number in SIGNALS]
        return handlers, warnings.showwarning, {*threading.enumerate()}, atexit._ncallbacks()

    threads = {*threading.enumerate()}
    command("--steps 1")    # torch does some things once
    before, kept = held(), []
    for ending in (OSError(errno.ENOSPC, "full"), ValueError("a bug"), Killed(), None):
        def end(ending=ending):
            if ending:
                raise ending

        with at_call(3, "train_step", end):
            try:
                train.main(f"{TOY} --data a --out run --save_every 100".split())
            except BaseException as error:
                kept.append(error)
        assert held() == before
    assert [type(error) for error in kept] == [SystemExit, ValueError, Killed]
    assert newest("run")["step"] == 8

def test_a_run_in_a_thread_that_is_not_the_main_one():
    """Where no signal can be noted."""
    with ThreadPool(1) as pool:
        words = f"{TOY} --data a --out run".split()
        assert pool.apply(train.main, [words]) == 0
    assert newest("run")["step"] == 8

def test_main_takes_no_words_of_the_notebook(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ipykernel", "-f", "kernel.json"])
    seen = []
    monkeypatch.setattr(train, "run", lambda flags: seen.append(flags.given))
    train.main([])
    assert seen == [[]]

@pytest.mark.parametrize("error", [
    dataset.UserError("a/train-0, row 7: bad"), OSError("lost"), ValueError("my transform"),
    MemoryError()])
def test_an_error_of_the_loader_first_saves_what_is_done(command, resume, monkeypatch, error):
    """A resume repeats the failed step."""
    command("--save_every 100 --out whole")
    following = dataloader.PackedLoader.__next__

    def fail(loader):
        if loader.rows_delivered == 5 * 4:
            raise error
        return following(loader)

    with monkeypatch.context() as patch, pytest.raises((SystemExit, type(error))) as seen:
        patch.setattr(dataloader.PackedLoader, "__next__", fail)
        train.main(f"{TOY} --data a --save_every 100 --out run".split())
    assert str(error) in str(seen.value)
    assert train.list_checkpoints("run") == ["run/step_0000005.pt"]
    resume("--out run")
    assert log_of("run") == log_of("whole")

@pytest.mark.filterwarnings("ignore:left out")
def test_bad_documents_end_a_run_or_are_left_out_counted_and_named(command):
    """By all ranks, in the log."""
    chats = [CHAT % i for i in range(40)]
    dataset.write_shard("chats/val.parquet", [pa.array(chats)], "messages")
    chats[7:9] = '[{"role": "assistant"}]', "no chat"
    dataset.write_shard("chats/train-0.parquet", [pa.array(chats)], "messages")
    words = f"{TOY} --vocab_size 270 --data chats --num_lanes 4 --out"
    assert "chats/train-0.parquet, row group 0, row " in command(f"{words} run", toy="", status=1)
    told = two_ranks(f"{words} left_out --skip_bad")
    assert "[0, 0]" in told, told
    records = [record for record in log_of("left_out") if "warnings" in record]
    names = [name for record in records for of_rank in record["warnings"] for name in of_rank]
    assert any("left out: chats/train-0.parquet, row group 0, row 7: " in name for name in names)
    assert records[-1]["bad_documents_since_start"] >= 1
    runs.main(["audit", "--resume", "left_out", "--steps", "0:4"])    # packs the same rows again

def test_an_error_of_one_rank_saves_the_steps_of_all(command, resume):
    """The other one has drawn the batch, which is drawn again."""
    words = f"{TOY} --data a --save_every 100 --num_lanes 4"
    told = two_ranks(f"{words} --out run", failing="1")
    assert "error: this shard is bad" in told and "error: another rank has no batch" in told
    assert "[1, 1]\n" in told and "Traceback" not in told, told
    assert train.list_checkpoints("run") == ["run/step_0000005.pt"]
    resume("--out run")
    command("--save_every 100 --num_lanes 4 --out whole")
    assert newest("run")["rows_hash"] == newest("whole")["rows_hash"]
    assert newest("run")["loader"] == newest("whole")["loader"]

def test_a_weight_that_no_loss_needs_must_be_finite_too(finished):
    model = train.GPT(1, 64)
    train.check_weights(8, model, optimizers_of(model), "run", [1.0])
    with torch.no_grad():
        model.bigrams.weight[-1] = math.inf
    with pytest.raises(dataset.UserError, match=r"good checkpoint is run/step_0000008\.pt"):
        train.check_weights(8, model, optimizers_of(model), "run", [1.0])

def test_a_sample_of_weights_that_are_not_finite_is_a_line(finished, command):
    checkpoint = newest("run")
    checkpoint["model"]["head.weight"][7] = math.nan
    torch.save(checkpoint, "run/step_0000009.pt")
    for words in ("--sample x --out run", "--eval run/step_0000009.pt"):
        told = command(words, toy="", status=1)
        assert "error: the model's logits are not finite; choose an earlier checkpoint" in told

# --------------------------------------------------------------------------------------------------
# What flags, --resume, --init, --eval, --sample and --chat take

@pytest.mark.parametrize("specs, weights", [
    ("web code/", "web=1 code=1"),
    ("web:0.7 code:.3", "web=0.7 code=0.3"),
    ("web:7e-1 code:1.", "web=0.7 code=1"),
    ("web:00:+1E+2", "web:00=100"),
    # An existing path wins over a weight
    ("corpus:2024 web", "corpus:2024=1 web=1"),
    ("corpus:2024:0.3 web:0.7", "corpus:2024=0.3 web=0.7"),
    ("web:1-2 web:e3 web:.", "web:1-2=1 web:e3=1 web:.=1"),
    ("s3://b/x:3?host=h:1 d:1", "s3://b/x?host=h:1=3 d=1"),
    ("http://localhost:8000", "http://localhost:8000=1"),
    ("http://localhost:8000/web:2", "http://localhost:8000/web=2")])
def test_data_is_paths_with_weights_and_a_query_has_none(specs, weights):
    for name in ("web", "web:00", "code", "d", "corpus", "corpus:2024"):
        os.mkdir(name)
    sources = train.sources_of(SimpleNamespace(data=specs.split()))
    assert " ".join(f"{path}={weight:g}" for path, weight in sources.items()) == weights

@pytest.mark.parametrize("has_bf16, words, want", [
    (False, "--data a", "cuda float32 12 2048 2520"),    # a T4 or V100
    (True, "--data a", "cuda bfloat16 12 2048 2520"),
    (True, "--seed 2", "cuda bfloat16 2 512 1600"),      # the built-in corpus is small
    (True, "--device cpu --data a --steps=7", "cpu bfloat16 2 512 7"),
    (False, "--device cpu", "cpu float32 2 512 1600")])
def test_defaults_are_those_of_the_device(monkeypatch, has_bf16, words, want):
    def is_supported(including_emulation):
        return has_bf16 or including_emulation

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    flags = train.parse_flags(words.split())
    found = [flags.device, flags.dtype, flags.depth, flags.seq_len, flags.steps]
    assert " ".join(map(str, found)) == want

@pytest.mark.filterwarnings("ignore:load_state_dict. weight of b")
def test_resumed_run_takes_the_flags_that_may_change(finished, resume):
    told = resume("--out run/ --steps 10 --lr 1e-30 --batch_size 2 --data a b")
    assert "\nchanged flags: batch_size, steps, lr, data\n" in told
    before, after = map(train.load_checkpoint, train.list_checkpoints("run"))
    for name, weight in before["model"].items():    # all rates follow --lr
        assert torch.allclose(weight, after["model"][name], atol=1e-20)
    assert json.loads(after["loader"])["rows"] == 8 * 4 + 2 * 2

def test_eval_prints_what_the_run_printed_and_honours_its_flags(command, finished):
    last = "loaded run/step_0000008.pt\n" + re.search("step 8: val.*", finished)[0]
    evaluate = functools.partial(command, toy="--eval run/step_0000008.pt")
    assert last in evaluate("--micro_batch_size 5 --data a")
    for words in ("--eval_bytes 100", "--seq_len 16", "--data b"):
        assert last not in evaluate(words)

# --------------------------------------------------------------------------------------------------
# Evals

@functools.cache
def tokenizer_of(vocab_size):
    return RustBPETokenizer.train_from_iterator(DOCUMENTS, vocab_size)

@settings(max_examples=20 * TIMES)
@given(vocab_size=st.sampled_from([265, 275, 290]), T=st.integers(2, 40), micro=st.integers(1, 9),
       part=st.sampled_from([(1, 2), (31, 6), (10**9, len(DOCUMENTS))]),
       device=st.sampled_from(["cpu", "cuda"]))
def test_drawn_val_is_the_same_bytes_for_every_tokenizer_and_length(
        vocab_size, T, micro, part, device):
    """Each token is asked once, none that is context, in the order of the file."""
    eval_bytes, n_documents = part
    tokenizer, texts = tokenizer_of(vocab_size), DOCUMENTS[:n_documents]
    flags = SimpleNamespace(seq_len=T, eval_bytes=eval_bytes, micro_batch_size=micro,
                            device=device)
    val = train.val_windows(tokenizer, "letters", flags)
    longest = max(len(tokenizer.encode(text)) for text in texts) if device == "cpu" else T
    assert val.inputs.shape == val.targets.shape
    assert val.inputs.shape[1:] == (micro, min(T, longest)), "no longer than it must be"
    inputs, targets = val.inputs.flatten(0, 1), val.targets.flatten(0, 1)
    asked = targets >= 0
    assert tokenizer.decode(targets[asked].tolist()) == "".join(texts)
    assert val.n_bytes == len("".join(texts))
    begins = inputs[:, 0] == tokenizer.get_bos_token_id()
    later = asked[~begins]
    assert not later[:, :T // 4].any() and later[:, T // 4:T // 4 + 1].all()
    follow = asked[:, :-1] & asked[:, 1:]
    assert torch.equal(targets[:, :-1][follow], inputs[:, 1:][follow])

def test_val_asks_only_for_tokens_with_a_loss(monkeypatch):
    tokenizer = tokenizer_of(265)
    bos = tokenizer.get_bos_token_id()
    chat = np.array([bos, ~97, ~98, 99, 100, bos + 1])
    monkeypatch.setattr(train, "documents_of", lambda *_: [chat])
    flags = SimpleNamespace(seq_len=8, eval_bytes=10**9, micro_batch_size=1, device="cpu")
    val = train.val_windows(tokenizer, "chats", flags)
    assert val.inputs.flatten().tolist() == [bos, 97, 98, 99, 100]
    assert val.targets.flatten().tolist() == [-100, -100, 99, 100, -100], "special"
    assert val.n_bytes == 2

def test_mixture_has_bits_per_byte_of_each_source(command):
    told = command("--data a:0.75 b:0.25 --steps 2 --out run")
    assert "a: 2 shards, 1 train, 1 val (" in told and "\na: 60 train documents, " in told
    [record] = [record for record in log_of("run") if "val_bpb" in record]    # one, for wandb
    bits = 0
    for source, n_bytes in (("a", 2989), ("b", 2005)):
        bpb = record[f"val_bpb/{source}"]
        bits += bpb * n_bytes
        assert f"step 2: val {bpb:.4f} bits per byte of {source} ({n_bytes:,} bytes)\n" in told
    bpb = record["val_bpb"]
    assert bpb == pytest.approx(bits / 4994)
    assert f"step 2: val {bpb:.4f} bits per byte of all sources (4,994 bytes)\n" in told

def test_a_step_without_a_target_has_no_loss_and_moves_no_weight(command):
    """With chats whose questions fill a row."""
    for name in ("train-0", "val"):
        chats = pa.array([CHAT % (f"{name}? " * 50)] * 40)
        dataset.write_shard(f"chats/{name}.parquet", [chats], "messages")
    told = command("--data chats --packing wholefit --batch_size 1 --num_lanes 1 --steps 20 "
                   "--save_every 1 --keep 99 --out run")
    first, *records = [record for record in log_of("run") if "grad_norm" in record]
    models = [train.load_checkpoint(path)["model"] for path in train.list_checkpoints("run")]
    n_empty = 0
    for record, (before, after) in zip(records, itertools.pairwise(models), strict=True):
        moved = [name for name, weight in before.items() if (weight != after[name]).any()]
        is_empty = record["grad_norm"] == 0
        assert is_empty == ("loss" not in record) == (not moved)
        n_empty += is_empty
    assert 0 < n_empty < 19 and told.count(" no target") == n_empty + ("loss" not in first)

def test_models_are_told_when_they_are_evaluated_and_a_signal_breaks_it_off(command, monkeypatch):
    """At once, without a sample. The checkpoint is written once."""
    forward, modes = train.GPT.forward, []

    def note(model, *arguments):
        modes.append((model.training, torch.is_grad_enabled()))
        return forward(model, *arguments)

    monkeypatch.setattr(train.GPT, "forward", note)
    stop = functools.partial(signal.raise_signal, signal.SIGHUP)
    with at_call(2, "evaluate", stop), at_call(3, "save", pytest.fail):
        told = command("--eval_every 1 --save_every 1", status=143)
    changes = [mode for mode, _ in itertools.groupby(modes)]
    assert changes == [(True, True), (False, False), (True, True)]
    assert "stopped at step 2 of 8" in told and "step 2: val" not in told

# --------------------------------------------------------------------------------------------------
# Several epochs

def test_a_share_of_the_tokens_is_replaced_in_each_row_alike_on_any_rank():
    """By any token but the special ones, which have no bytes."""
    inputs = torch.full((4, 1000), 7)
    tokenizer = SimpleNamespace(token_bytes=np.array([0, *range(1, 50), 0]))
    flags = SimpleNamespace(noise=0.1, seed=1)
    noisy = train.add_noise(inputs, [8, 9, 10, 11], flags, tokenizer)
    assert 300 < (noisy != 7).sum() < 500 and noisy.unique().tolist() == [*range(1, 50)]
    assert inputs.unique().tolist() == [7]
    of_two = train.add_noise(inputs[:2], [9, 11], flags, tokenizer)
    assert torch.equal(of_two, noisy[[1, 3]])
    flags.seed = 2
    of_other_seed = train.add_noise(inputs, [8, 9, 10, 11], flags, tokenizer)
    for others in (of_other_seed, noisy.roll(1, 0)):
        assert (others != noisy).any(dim=1).all()

def test_noise_and_decay_of_tables_are_typed_and_told(command):
    """And the hash of rows is that of the text. What is told can be typed."""
    words = "--data a --steps 5 --num_lanes 1"
    plain = command(f"{words} --out plain")
    assert " --noise 0.0 --table_decay 0.0" in plain
    told = command(f"{words} --noise 0.2 --table_decay 30 --out run")
    for run, has_decay in (("plain", False), ("run", True)):
        tables, *others = newest(run)["optimizers"][1]["param_groups"]
        assert (tables["weight_decay"] > 0) == has_decay
        assert [group["weight_decay"] for group in others] == [0, 0]
    [line] = re.findall("^flags: (.* --noise 0.2 --table_decay 30.0.*)", told, re.M)
    assert re.search("rows: hash .*", told)[0] in plain
    assert log_of("run") != log_of("plain")
    again = command(f"--data a --out typed {line}")
    assert log_of("typed") == log_of("run") and line in again

# --------------------------------------------------------------------------------------------------
# The run's folder and its checkpoints

def test_second_run_in_a_folder_is_refused_while_the_first_lives(command):
    refused = []

    def start_another():
        with pytest.raises(SystemExit) as error:
            train.main(f"{TOY} --data a --out run --resume auto".split())
        refused.append(error.value.code)

    with at_call(2, "print_step", start_another):
        assert "done at step 8" in command("--out run")
    # Where a disk has no flock, filelock leaves a file, and knows only of this machine's processes.
    assert refused == ["error: another run uses run; wait until it ends, choose another --out, or "
                       "if it was killed on another machine: rm run/.lock"]
    assert len(losses_of("run")) == 8
    assert "done at step 9" in command("--out run --resume auto --steps 9")

def test_steps_are_counted_beyond_seven_digits():
    os.mkdir("run")
    for step in (9_999_999, 10_000_000, 10_000_001):
        Path(f"run/step_{step:07}.pt").touch()
    train.remove_old("run", {"keep": 2, "keep_every": None})
    own = ["run/step_10000000.pt", "run/step_10000001.pt"]
    assert train.list_checkpoints("run") == own and train.newest_checkpoint("run") == own[1]

def test_the_name_of_a_checkpoint_is_on_disk_once_it_is_saved(monkeypatch):
    """The folder is synced after the rename. Some network disks cannot; others fail."""
    synced, refusals = [], [None, errno.EINVAL, errno.EIO]

    def fsync(number):
        is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
        synced.append((is_folder, os.listdir("folder")))
        if is_folder and refusals[0]:
            raise OSError(refusals[0], os.strerror(refusals[0]))

    monkeypatch.setattr(os, "fsync", fsync)
    dataset.write_atomic("folder/x", "text")
    (of_file, (temporary,)), of_folder = synced
    assert not of_file and temporary.endswith(".tmp") and of_folder == (True, ["x"])
    del refusals[0]
    dataset.write_atomic("folder/x", "text")
    del refusals[0]
    with pytest.raises(OSError, match="Input/output"):
        dataset.write_atomic("folder/x", "text")

TRAIN = f"python {shlex.quote(str(HERE / 'train.py'))}"    # tests are in other folders
FULL = ("error: [Errno 28] No space left on device; to resume once this is fixed: "
        f"{TRAIN} --resume auto --out run (if there is no checkpoint: the same command again)")

@pytest.mark.parametrize("place", ["torch.save", "train.write_atomic", "train.open"])
def test_full_disk_is_one_line_and_the_last_checkpoint_stays(finished, resume, place):
    """Of a checkpoint, and of the log as a run begins and later."""
    Path(f"run/step_0000007.pt.{'0a' * 16}.tmp").touch()    # of a killed run

    def full(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            if place == "torch.save":
                raise RuntimeError("unexpected pos 64")    # as torch does

    owner, _, name = place.rpartition(".")
    owners = {"torch": torch, "train": train}
    with mock.patch.object(owners[owner], name, full, create=True):    # open is a builtin
        assert FULL in resume("--out run --steps 9", status=1)
    assert "done at step 9" in resume("--out run --steps 9")
    files = {".lock", "log.jsonl", "step_0000008.pt", "step_0000009.pt"}
    assert {*os.listdir("run")} == files

@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named_and_the_run_goes_on(command, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = command("--steps 1 --out run")
    assert f"run/.lock: {os.strerror(number)}; without a lock, see" in told
    dataset.make_once("made", "file", lambda: write("made", ["x"], ["y"]))
    assert os.path.exists("made/val.parquet")

# --------------------------------------------------------------------------------------------------
# Model and optimizers

def test_first_loss_is_ln_of_the_padded_vocabulary_and_it_learns(command):
    command("--steps 20 --out run")
    losses = losses_of("run")
    assert losses[0] == pytest.approx(math.log(320), abs=1e-5) and losses[19] < 0.7 * losses[0]

def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model = train.GPT(3, 300)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    row, other = torch.randint(0, 299, (2, 1, 24))
    want = model(row)[0]
    for place in (1, 8, 9, 23):
        got = model(torch.cat([row[:, :place], other[:, place:]], 1))[0]
        assert torch.allclose(got[:place], want[:place], atol=1e-6)
        assert not torch.allclose(got[place:], want[place:], atol=1e-3)

@pytest.mark.parametrize("T", [1, 300, 1030])
def test_attention_in_bfloat16_on_a_cpu_is_that_of_float32(T):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, T, 2, 16).bfloat16()
    got = train.attend(q, k, v)
    want = train.attend(q.float(), k.float(), v.float())
    assert got.dtype == torch.bfloat16 and got.shape == (2, 2, T, 16)
    torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.03)

def test_logits_are_capped_at_15_of_the_mean():
    """30 sigmoid(z / 7.5) = 15 + 15 tanh(z / 15), and a softmax does not see a constant."""
    torch.manual_seed(0)
    model = train.GPT(1, 64)
    torch.nn.init.normal_(model.head.weight, std=2)
    x = torch.randn(1, 5, 64)
    z = (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)
    z = z @ model.head.weight.T
    assert torch.allclose(model.read_out(x, None), 15 + 15 * torch.tanh(z / 15), atol=1e-3)

def test_run_of_a_frozen_matrix_trains_the_rest(command, monkeypatch):
    build = train.GPT.__init__

    def build_frozen(self, *sizes, **more):
        build(self, *sizes, **more)
        self.blocks[0].q.requires_grad_(False)

    monkeypatch.setattr(train.GPT, "__init__", build_frozen)
    command("--steps 2")

def optimizers_of(model, lr=None, tokens=2048):
    flags = SimpleNamespace(
        lr=lr, batch_size=1, seq_len=tokens, init=None, dtype="float32", table_decay=0)
    return train.make_optimizers(model, flags)

def test_each_parameter_is_in_one_group():
    """A new one gets into the last group of AdamW."""
    model = train.GPT(2, 300)
    model.blocks[0].q.bias = torch.nn.Parameter(torch.zeros(128))
    model.blocks[1].k.weight.requires_grad_(False)
    optimizers = optimizers_of(model)
    grouped = [p for optimizer in optimizers for group in optimizer.param_groups
               for p in group["params"]]
    assert len(grouped) == len({*grouped})
    assert {*grouped} == {p for p in model.parameters() if p.requires_grad}
    assert any(p is model.blocks[0].q.bias for p in optimizers[1].param_groups[2]["params"])

def test_muon_is_torchs_own_in_float32():
    """torch's takes bfloat16 for its Newton-Schulz steps."""
    torch.manual_seed(0)
    ours, theirs = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
    theirs.load_state_dict(ours.state_dict())
    mine = train.Muon(list(ours.parameters()), 0.02, torch.float32)
    reference = torch.optim.Muon(theirs.parameters(), 0.02, weight_decay=0.0)
    for _ in range(5):
        gradient = torch.randn(32, 64)
        for layer, optimizer in ((ours, mine), (theirs, reference)):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    assert (theirs.weight - ours.weight).norm() / (5 * 0.02 * 32 ** 0.5) < 0.02

SHARES = {0: 1 / 30, 14: 0.5, 29: 1, 30: 1, 384: 0.05 + 0.95 * 616 / 650, 675: 0.525, 999: 0.05146}

def test_rates_rise_stay_and_fall_in_any_order_of_optimizers():
    """Over 3% of the steps, then until 35%, then to 5%. Muon's fields are Muon's alone."""
    muon, adamw = optimizers_of(train.GPT(1, 64), lr=0.1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, weight_decay=0.1)
    other.param_groups[0]["peak_lr"] = 0.5
    adamw.param_groups[2]["peak_lr"] = 0    # a user's: this group stays as it is
    for step, share in SHARES.items():
        train.set_rates([other, muon, adamw], step, 1000)
        assert muon.param_groups[0]["lr"] == pytest.approx(0.1 * share, abs=1e-5)
        [group] = other.param_groups
        assert group["lr"] == pytest.approx(0.5 * share, abs=5e-5)
        assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)

@pytest.mark.parametrize("tokens, steps, lr, rate, decay", [
    (1024, 500, None, 0.0090, 1), (2048, 500, None, 0.0124, 0.967),
    (2**19, 500, None, 0.01995, 0.6015), (2**19, 2520, 0.02, 0.02, 6 / (0.02 * 2520))])
def test_rate_and_decay_of_matrices_follow_the_tokens_and_steps(tokens, steps, lr, rate, decay):
    optimizers = optimizers_of(train.GPT(1, 64), lr, tokens)
    train.set_rates(optimizers, steps // 10, steps)
    group = optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(rate, abs=5e-5)
    cosine = 0.5 + 0.5 * math.cos(math.pi / 10)
    assert group["weight_decay"] == pytest.approx(decay * cosine, abs=1e-3)
