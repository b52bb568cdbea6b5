"""
The snippets of dev/loops.md, taken from it and run as they stand, at toy size. What is not
installed is skipped. A loop runs in one or more processes. A rank is killed in the middle of the
first, second and third save, and the loop is started again, also on another number of ranks. Model,
optimizer and rows must be those of a run that never stopped.
"""

import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import typing
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from dataloader import PACKINGS, PackedLoader
from dataset import list_shards, write_shard
from test_dataloader import BOS, ByteTokenizer, grouped, make, numbered, show_all, texts_of, write
from tokenizer import GPT4_PATTERN, RustBPETokenizer, build_encoding

LOOPS = Path(__file__).parents[1] / "loops.md"

def snippets(title, kind="python"):
    """The blocks of code in a section of loops.md."""
    sections = re.split("^## ", LOOPS.read_text(), flags=re.M)
    [text] = [section for section in sections if section.startswith(f"{title}\n")]
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)

[FIRST_LINES] = snippets("# In other loops")

# --------------------------------------------------------------------------------------------------
# What the snippets leave to their reader

B, T = 2, 16
SAVE_EVERY = 2    # batches of one process

def with_zeros(model):
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(257, 8)
        self.head = torch.nn.Linear(8, 257)
        with_zeros(self)

    def forward(self, inputs):
        note(inputs)
        return self.head(self.embedding(inputs))

class Steady(torch.optim.AdamW):
    """All gradients are 1: parameters and state depend only on the number of steps."""

    def __init__(self, params, **_):
        super().__init__(params, lr=1e-3, weight_decay=0)
        Steady.newest = self

    def step(self, closure=None):
        loss = closure() if closure else None    # Lightning's backward
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        super().step()
        self.zero_grad()
        return loss

    def values(self):
        """A parameter, and its state"""
        parameter = self.param_groups[0]["params"][0]
        state = self.state.get(parameter, {})
        tensors = [parameter, *(state.get(key, torch.zeros(1)) for key in ("exp_avg", "step"))]
        return [getattr(x, "to_local", lambda x=x: x)().flatten()[0].item() for x in tensors]

def values_after(n_steps):
    optimizer = Steady([torch.nn.Parameter(torch.zeros(1))])
    for _ in range(n_steps):
        optimizer.step()
    return optimizer.values()

class Stop(typing.NamedTuple):
    """Kills this rank in its `save`-th save (from 1), before the write, from 0, or to this file."""
    rank: int
    save: int
    write: int | str

class Saves:
    """Counts this process's writes to checkpoints, and kills it in one of them."""

    def __init__(self, stop):
        self.stop, self.n_saves, self.n_writes, self.made_a_step = stop, 0, 0, False
        sys.addaudithook(self.hear)

    def hear(self, event, arguments):
        is_open = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_open or event in ("os.mkdir", "os.rename", "torch.save"):
            self.written(f"{arguments}")

    def written(self, names):
        if not re.search(r"/step-|out/checkpoint-|saved/|ckpt\.pt", names):
            return
        if self.made_a_step:
            self.made_a_step = False
            self.n_saves += 1
            self.n_writes = 0
        _, save, write = self.stop
        here = self.n_writes == write or (isinstance(write, str) and write in names)
        if self.n_saves == save and here:
            Path(os.environ["ROWS"] + "-killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.n_writes += 1

def note(inputs, *others):
    """Write these rows, model and optimizer to this process's file. At the last batch: kill -9."""
    if be_a_rank.saves:
        be_a_rank.saves.made_a_step = True
    rows = None if inputs is None else inputs.tolist()
    with open(os.environ["ROWS"], "a") as file:
        print(json.dumps([rows, Steady.newest.values()]), file=file)
    if Path(file.name).read_text().count("\n") == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)

def train_step(inputs, *others):
    note(inputs)
    Steady.newest.step()

def names_of_the_reader():
    torch.manual_seed(0)
    model = Model()
    optimizer = Steady(model.parameters())
    return {"__name__": "__main__", "tokenizer": ByteTokenizer(), "model": model, "note": note,
            "optimizer": optimizer, "train_step": train_step, "with_zeros": with_zeros, "B": B,
            "T": T, "save_every": SAVE_EVERY, "device_type": "cpu"}

def run_here(code, **names):
    """Run code in this process until its first step; returns its names."""
    names = {**names_of_the_reader(), "train_step": mock.Mock(side_effect=StopIteration), **names}
    with contextlib.suppress(StopIteration):
        exec(FIRST_LINES + code, names)
    return names

# --------------------------------------------------------------------------------------------------
# One runner for all loops

@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = numbered([(7 * i * i + 3) % 41 for i in range(240)])
    write("my_shards", *grouped(grouped(texts, 20), 4))
    return tmp_path

def be_a_rank(rank, world_size, leg, port, code, stop):
    n_batches = stop.save * SAVE_EVERY + 2 if stop else 2 * SAVE_EVERY
    os.environ |= {
        "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{world_size}", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "ROWS": f"rows-{leg}-{rank}",
        "KILL_AT": f"{n_batches}"}
    log = os.open(f"log-{leg}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    torch.set_num_threads(1)    # OpenMP hangs in a forked process
    torch.optim.AdamW = Steady
    torch_save = torch.save

    def audited_save(what, file, *args, **kwargs):    # torch opens a file without telling Python
        sys.audit("torch.save", file)
        torch_save(what, file, *args, **kwargs)

    torch.save = audited_save
    if stop and stop.rank == rank:
        be_a_rank.saves = Saves(stop)
    exec(compile(code, "snippet", "exec"), names_of_the_reader())

be_a_rank.saves = None

# Forks of a process that has only imported these: after a backward, here, torch forbids a fork.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "hypothesis", "tiktoken", "pyarrow.parquet",
                               "huggingface_hub", "pandas", "torch.distributed.fsdp",
                               "torch.distributed.checkpoint.state_dict"])

def run(code, world_size, leg=0, stop=None):
    """The lines of note(), of each process: lines[rank][batch] = rows, values"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        _, port = free.getsockname()
    processes = []
    for rank in range(world_size):
        arguments = rank, world_size, leg, port, code, stop
        processes.append(SERVER.Process(target=be_a_rank, args=arguments))
        processes[-1].start()
    multiprocessing.connection.wait([process.sentinel for process in processes], 100)
    lines = []
    for rank, process in enumerate(processes):
        process.join(20)
        assert process.exitcode is not None, logs()
        path = Path(f"rows-{leg}-{rank}")
        text = path.read_text() if path.exists() else ""
        lines.append([json.loads(line) for line in text.splitlines()])
    return lines

def logs():
    """What a failed test shows."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(Path().glob("log-*")))

def rows_of_one_process(n):
    with PackedLoader(ByteTokenizer(), 1, T, "train", data_dir="my_shards") as loader:
        return [next(loader)[0][0].tolist() for _ in range(n)]

IN_EACH_SAVE = Stop(0, 1, "loader.new"), Stop(1, 2, 0), Stop(0, 3, 1), None

def check(code, worlds=(2, 2, 2, 1), stops=IN_EACH_SAVE, copies=1):
    """
    worlds: processes of each start. stops: who is killed in it. copies: processes that get the
    same rows
    """
    n_steps, n_rows = 0, 0    # made before this start
    wanted = rows_of_one_process(80)
    for leg, (world_size, stop) in enumerate(zip(worlds, stops, strict=True)):
        lines = run(code, world_size, leg, stop)
        assert not stop or Path(f"rows-{leg}-{stop.rank}-killed").exists(), logs()
        n_saves = stop.save if stop else 1
        rows_a_step = world_size // copies * B
        for number in range(n_saves * SAVE_EVERY):
            assert all(len(of_rank) > number for of_rank in lines), logs()
            found = [row for of_rank in lines for row in of_rank[number][0]]
            begin = n_rows + number * rows_a_step
            want = wanted[begin:begin + rows_a_step] * copies
            assert sorted(found) == sorted(want), (leg, number, logs())
            for of_rank in lines:
                want = values_after(n_steps + number)
                assert of_rank[number][1] == pytest.approx(want), (leg, number, logs())
        n_steps += (n_saves - 1) * SAVE_EVERY
        n_rows += (n_saves - 1) * SAVE_EVERY * rows_a_step

def script(title, before=""):
    """before: what this snippet leaves to its reader."""
    return FIRST_LINES + textwrap.dedent(before) + "\n".join(snippets(title))

# --------------------------------------------------------------------------------------------------
# Loops

LIGHTNING = """
    import glob
    import lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
        def training_step(self, batch, i):
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())
    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        "saved", every_n_train_steps=save_every, save_top_k=-1)
    options = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "logger": False,
               "enable_progress_bar": False, "callbacks": [saves]}
    last_checkpoint = max(glob.glob("saved/*"), key=os.path.getmtime, default=None)
"""
TRAINER = """
    import accelerate
    from transformers import LlamaConfig, LlamaForCausalLM
    class Llama(LlamaForCausalLM):
        def forward(self, input_ids, shift_labels, **others):
            note(input_ids)
            return super().forward(input_ids, shift_labels=shift_labels, **others)
    model = with_zeros(Llama(LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=8,
                                         num_hidden_layers=1, num_attention_heads=1)))
    options = {"save_steps": save_every, "use_cpu": True, "report_to": [], "disable_tqdm": True,
               "lr_scheduler_type": "constant", "learning_rate": 1e-3}
"""
JAX = """
    import jax
    from jax.experimental.multihost_utils import sync_global_devices
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if os.environ["WORLD_SIZE"] == "2":
        address = "127.0.0.1:" + os.environ["MASTER_PORT"]
        jax.distributed.initialize(address, 2, int(os.environ["RANK"]))
    def train_step(inputs, targets):
        sync_global_devices("a step waits for all processes")
        assert inputs.shape == (B * jax.process_count(), T)
        note(inputs.addressable_shards[0].data)
        optimizer.step()
    def save_model(folder):
        if rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], folder / "model.pt")
    def load_model(folder):
        states = torch.load(folder / "model.pt")
        for part, state in zip((model, optimizer), states, strict=True):
            part.load_state_dict(state)
"""

# Lightning writes one file, elsewhere, and moves it.
WITH_ONE_FILE = Stop(0, 1, 0), Stop(0, 2, 0), Stop(0, 3, 0), None

@pytest.mark.parametrize("title, before, stops", [
    ("Your own loop, with DDP", "", IN_EACH_SAVE),
    ("torchdata", "", IN_EACH_SAVE),
    ("Accelerate", "", IN_EACH_SAVE),
    ("Lightning", LIGHTNING, WITH_ONE_FILE),
    ("transformers.Trainer", TRAINER, IN_EACH_SAVE),
    ("JAX", JAX, IN_EACH_SAVE)])
def test_loop_killed_in_a_save_resumes_with_one_steps_parts(folder, title, before, stops):
    code = script(title, before)
    for module in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        pytest.importorskip(module)
    check(code, stops=stops)

LITGPT = """
    import sys
    import tokenizer as module
    import litgpt.config
    import litgpt.pretrain as pretrain
    from litgpt.__main__ import main
    sys.path.insert(0, ".")
    module.get_tokenizer = lambda path: tokenizer
    litgpt.config.name_to_config["toy"] = {
        "name": "toy", "block_size": T, "vocab_size": 257, "padding_multiple": 1, "n_layer": 1,
        "n_head": 1, "n_embd": 8}
    class GPT(pretrain.GPT):
        def forward(self, ids, *others):
            if self.training and not ids.is_meta:
                note(ids)
            return super().forward(ids, *others)
    def cross_entropy(logits, targets, *others, was=pretrain.chunked_cross_entropy, **options):
        if not torch.is_grad_enabled():
            print("eval", json.dumps(targets.tolist()))
        return was(logits, targets, *others, **options)
    pretrain.GPT, pretrain.chunked_cross_entropy = GPT, cross_entropy
    pretrain.FSDPStrategy = lambda **_: "ddp"    # FSDP needs GPUs
    pretrain.initialize_weights = lambda fabric, model, **_: with_zeros(model)
    pretrain.torch.compile = lambda model: model
    world_size = int(os.environ["WORLD_SIZE"])
    sys.argv = [*command.split(), "--devices", f"{world_size}",
                "--train.micro_batch_size", f"{B}", "--train.global_batch_size", f"{B * world_size}"]
    main()
"""
LITGPT_FLAGS = (
    "--out_dir out --precision 32-true --logger_name csv --train.save_interval 2 "
    "--train.max_tokens 100000 --train.max_norm 1 --train.log_interval 1 --train.min_lr 0.001 "
    "--train.lr_warmup_steps 0 --eval.interval 1 --eval.max_iters 3")

def test_litgpt_killed_in_a_save_resumes_on_another_number_of_ranks(folder):
    """Its own command, with a toy model. Each validation reads the same rows."""
    pytest.importorskip("litgpt")
    write_shard("my_shards/val.parquet", [pa.array(numbered(30 * [9]))])
    [command] = snippets("litgpt", "bash")
    command = command.replace("\\\n", " ").replace("pythia-14m", "toy")
    command = command.removeprefix("python -m ").strip() + f" {LITGPT_FLAGS}"
    Path("packed.py").write_text(FIRST_LINES + "".join(snippets("litgpt")))
    code = FIRST_LINES + f"command = {command!r}" + textwrap.dedent(LITGPT)
    check(code, stops=(Stop(0, 1, 0), Stop(1, 2, 0), Stop(0, 3, 1), None))
    with PackedLoader(ByteTokenizer(), 2 * B, T, "val", data_dir="my_shards", epochs=1,
                      shuffle_seed=None) as val:
        batches = [targets for _, targets in itertools.islice(val, 3)]
    assert any(-100 in targets for targets in batches)
    for rank in range(2):
        found = re.findall("^eval (.*)", Path(f"log-0-{rank}").read_text(), re.M)
        want = [targets[rank::2].tolist() for targets in batches]
        assert [json.loads(line) for line in found] == want[:2] + want + want, logs()

def test_fsdp2_killed_in_each_ranks_save_resumes_on_4_and_1(folder):
    stops = Stop(0, 1, "metadata"), Stop(0, 2, "loader.new"), Stop(1, 2, 1), Stop(3, 3, 1), None
    check(script("FSDP2"), (2, 2, 2, 4, 1), stops)

def test_torchtitan_resumes_on_another_number_of_ranks(folder, monkeypatch):
    """From the states of two, merged. Positions begin again at each document."""
    pytest.importorskip("torchtitan")
    names = run_here("\n".join(snippets("torchtitan")))
    build = names["Packed"].Config(dataset_path="my_shards").build
    arguments = {"tokenizer": None, "seq_len": T, "snapshot_every_n_steps": 1}
    monkeypatch.setitem(names, "get_tokenizer", lambda path: ByteTokenizer())
    loaders = [build(dp_world_size=2, dp_rank=rank, local_batch_size=B, **arguments)
               for rank in range(2)]
    for loader, (batch, labels) in ((loader, next(iter(loader))) for loader in loaders):
        assert isinstance(loader, names["BaseDataLoader"])
        for row, positions in zip(batch["input"], batch["positions"], strict=True):
            begins = (row == BOS) | (torch.arange(T) == 0)
            assert torch.equal(positions == 0, begins)
            assert torch.equal(positions.diff()[~begins[1:]], torch.ones(T - begins.sum().item()))
        assert labels.shape == batch["input"].shape == (B, T)
    states = [loader.state_dict() for loader in loaders]
    with PackedLoader(ByteTokenizer(), 1, T, "train", data_dir="my_shards") as one:
        want = [next(one)[0][0].tolist() for _ in range(4 * B)][2 * B:]
    alone = build(dp_world_size=1, dp_rank=0, local_batch_size=2 * B, **arguments)
    alone.load_state_dict(names["merge_states"](states))
    batch, _ = next(iter(alone))
    assert sorted(batch["input"].tolist()) == sorted(want)

GRADIENT = """
    B = 4 // int(os.environ["WORLD_SIZE"])
    class optimizer:
        def step():
            print("gradient", model.module.head.bias.grad.norm().item())
        def zero_grad():
            model.zero_grad()
    def save(*_):
        pass
"""

def test_gradient_of_the_ddp_loop_is_that_of_one_process(folder):
    """2 ranks of 2 rows, 1 of 4: ranks have unequally many targets."""
    found = {}
    for world_size in (2, 1):
        run(script("Your own loop, with DDP", GRADIENT), world_size, leg=world_size)
        norms = re.findall("gradient (.*)", Path(f"log-{world_size}-0").read_text())
        found[world_size] = [float(norm) for norm in norms]
    assert len(found[1]) >= SAVE_EVERY
    assert found[2] == pytest.approx(found[1]), logs()

PARALLEL = "Tensor, context and pipeline parallel"

def test_tensor_parallel_ranks_get_the_same_rows(folder):
    first, tensor, _, _ = snippets(PARALLEL)
    stops = Stop(0, 1, "loader.new"), Stop(3, 2, 0), Stop(1, 3, 1), None
    check(FIRST_LINES + first + tensor, (4, 4, 4, 2), stops, copies=2)

@pytest.mark.parametrize("rank, part", [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_context_parallel_parts_have_early_and_late_tokens(rank, part):
    *_, context, _ = snippets(PARALLEL)
    mesh = mock.MagicMock()
    mesh.get_local_rank.return_value = rank
    mesh["context"].size.return_value = 2
    positions = torch.arange(8).expand(B, 8)
    names = run_here(context, mesh=mesh, loader=[(positions, positions)])
    assert names["my_part"](positions).tolist() == B * [part]

STAGE_SAVED = """
        file = f"{folder}/stage-{dist.get_rank()}"
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        dist.barrier()
"""
STAGE_LOADED = """
if folder:
    for part, state in zip((model, optimizer), torch.load(f"{folder}/stage-{dist.get_rank()}")):
        part.load_state_dict(state)
"""

def test_pipeline_stages_without_a_loader_are_not_waited_for(folder):
    """3 stages of 2 ranks: the first and the last one read the same rows, the second none."""
    first, *_, pipeline = snippets(PARALLEL)
    code = FIRST_LINES + first + pipeline
    before, after = "folder, start = newest()\n", "        dist.barrier()\n"
    assert before in pipeline and after in pipeline
    code = code.replace(before, before + STAGE_LOADED).replace(after, STAGE_SAVED)
    want = rows_of_one_process(4 * 10)
    n_steps = 0    # before this start
    for leg, stop in enumerate((Stop(0, 1, "loader.new"), Stop(3, 2, 0), Stop(5, 3, 0), None)):
        found = run(code, 6, leg, stop)
        assert not stop or Path(f"rows-{leg}-{stop.rank}-killed").exists(), logs()
        for number in range(SAVE_EVERY):
            begin = 4 * (n_steps + number)
            for a, b in (found[:2], found[4:]):
                rows = a[number][0] + b[number][0]
                assert sorted(rows) == sorted(want[begin:begin + 4]), logs()
            values = pytest.approx(values_after(n_steps + number))
            assert all(of_rank[number][1] == values for of_rank in found), logs()
        assert all(rows is None for rows, _ in found[2] + found[3])
        n_steps += (stop.save - 1) * SAVE_EVERY if stop else 0

SLOW = """
import sys
import time
import train

def save_slowly(*arguments, save=train.save):
    time.sleep(3)
    save(*arguments)

train.save = save_slowly
sys.exit(train.main())
"""
TOY = ("--data my_shards --out run --device cpu --depth 1 --seq_len 32 --batch_size 4 "
       "--vocab_size 300 --steps 100000 --save_every 100000 --log_every 1 --eval_every 100000")

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_slow_save_under_torchrun_ends_after_a_signal(folder, number):
    """Without --shutdown-timeout, a save of more than 1 s would be killed here."""
    write("my_shards", *grouped(grouped(numbered(240 * [9]), 20), 4), [["val", "more"]])
    Path("slow.py").write_text(SLOW)
    [command] = snippets("Signals", "bash")
    words = command.replace("\\\n", " ").replace("train.py", "slow.py").split()
    words = [sys.executable, "-m", "torch.distributed.run", *words[1:], *TOY.split()]
    environment = {**os.environ, "PYTHONPATH": str(LOOPS.parents[1]), "OMP_NUM_THREADS": "1",
                   "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with open("log-torchrun", "w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    file = Path("run/log.jsonl")
    try:
        while not (file.exists() and file.stat().st_size):
            assert process.poll() is None, logs()
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(100)
    finally:
        process.kill()
    last = json.loads(file.read_text().splitlines()[-1])
    assert Path(f"run/step_{last['step'] + 1:07}.pt").exists(), logs()

FAKES = """
scontrol() { printf 'node1\\nnode2\\n'; }
python() { echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $*; }
export -f python
exec() { "$@"; }
export -f exec
srun() {
    for SLURM_PROCID in 0 1; do
        SLURM_PROCID=$SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID SLURM_NTASKS=2 "$@"
    done
}
"""

def test_slurm_script_starts_each_rank():
    [job] = snippets("Slurm", "bash")
    printed = subprocess.check_output(["bash", "-c", FAKES + job], text=True)
    assert printed == "0 2 0 node1 29500 train.py\n1 2 1 node1 29500 train.py\n"

def test_validation_always_begins_again(folder):
    [code] = snippets("Validation")
    val = run_here(code)["Val"]()
    rows = show_all(val, 9)
    assert 0 < len(rows) < 9, "it ends"
    assert show_all(val, 9) == rows

# --------------------------------------------------------------------------------------------------
# Transforms

def test_each_token_has_the_weight_of_its_document(folder):
    write("scored", [["val"]])
    scores = [i % 4 / 4 + 0.25 for i in range(200)]
    table = pa.table({"text": numbered(200 * [9]), "score": scores})
    pq.write_table(table, "scored/train-0.parquet")
    [code] = snippets("A loss weight for each token")
    names = run_here(code, model=lambda inputs: torch.zeros(B, T, 257))
    assert names["loss"].item() == pytest.approx(np.log(257))
    want = torch.zeros(B, T + 1)
    for row, pieces in enumerate(names["loader"].pieces()):
        for piece in pieces:
            end = piece.offset + piece.stop - piece.start
            want[row, piece.offset:end] = scores[piece.location.row]
    has_target = names["targets"] >= 0
    assert torch.equal(names["weights"], want[:, 1:] * has_target)

def test_a_random_transform_depends_on_the_document_and_the_epoch(folder):
    """It is the same for a folder that has moved, and loses no token."""
    [code] = snippets("A random transform")
    tokenizer = ByteTokenizer()
    tokenizer.get_vocab_size = lambda: 303
    names = run_here(code, tokenizer=tokenizer, fim_start=300, fim_end=301, fim_middle=302)
    transform, n_changed, n_new = names["fill_in_the_middle"], 0, 0
    for location, text in texts_of("my_shards").items():
        ids = np.array([BOS, *text.encode()])
        moved = location._replace(path=f"/moved/{location.path}")
        changed = transform(ids, location, 1)
        assert np.array_equal(changed, transform(ids, moved, 1))
        n_new += not np.array_equal(changed, transform(ids, location, 2))
        if len(changed) > len(ids):
            n_changed += 1
            bos, start, end, middle = np.split(changed, np.flatnonzero(changed >= 300))
            assert np.array_equal(ids, [*bos, *start[1:], *middle[1:], *end[1:]])
    assert 80 < n_changed < 140 < n_new
    next(names["loader"])

@pytest.mark.parametrize("is_chatml", [False, True])
def test_only_the_last_answer_has_a_loss(folder, tokenizer, is_chatml):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"},
                {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]
    write("my_chats", [200 * [json.dumps(messages)]], column="messages")
    [code] = snippets("Chats")
    end = "<|assistant_end|>"
    if is_chatml:    # a masked line end follows each answer
        end = "<|im_end|>"
        special = {"<|endoftext|>": 300, "<|im_start|>": 301, end: 302}
        enc = build_encoding(GPT4_PATTERN, tokenizer.enc._mergeable_ranks, special)
        tokenizer = RustBPETokenizer(enc, "<|endoftext|>")
    inputs, targets = next(run_here(code, tokenizer=tokenizer, T=60 if is_chatml else 40)["loader"])
    assert "Hi<|" in tokenizer.decode(inputs[0].tolist())
    answers = targets[targets >= 0].tolist()
    assert tokenizer.decode(answers) == B * f"So long{end}"

# --------------------------------------------------------------------------------------------------
# Attention inside documents

def documents_in(row):
    """[(begin, end)] of each document; BOS at the end of a short row are one document."""
    text = "".join("|" if token == BOS else chr(token) for token in row)
    return [found.span() for found in re.finditer(r"^[^|]+|\|+[^|]*", text)]

@pytest.mark.parametrize("packing", PACKINGS)
def test_attention_stays_inside_documents(folder, packing, monkeypatch):
    """By a dense mask, by flex attention, and document by document, as varlen_attn does on CUDA."""
    flex_module = "torch.nn.attention.flex_attention"
    monkeypatch.setattr(f"{flex_module}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    first, dense, flex, varlen = snippets("Attention inside documents")
    names = run_here(first, B=6, n_documents=96)
    batches = [*make("my_shards", B=6, T=T, packing=packing, epochs=1, chunk_bytes=500)]
    for inputs, _ in [*batches[::9], batches[-1]]:
        q, k, v = torch.randn(3, 6, 2, T, 8)
        names |= {"inputs": inputs, "q": q, "k": k, "v": v}
        exec(dense, names)
        output = names["output"]
        exec(flex, names)
        torch.testing.assert_close(names["output"], output)
        exec(varlen, names)
        spans = [(b, *span) for b in range(6) for span in documents_in(inputs[b].tolist())]
        for b, begin, end in spans:
            alone = [x[b, :, begin:end] for x in (q, k, v)]
            want = F.scaled_dot_product_attention(*alone, is_causal=True)
            torch.testing.assert_close(output[b, :, begin:end], want)
        lengths = [end - begin for _, begin, end in spans]
        no_more = (96 - len(lengths)) * [0]
        assert names["cu_seqlens"].diff().tolist() == lengths + no_more
        assert names["positions"].tolist() == [*itertools.chain(*map(range, lengths))]
    names["n_documents"] = 5    # fewer than rows
    with pytest.raises(AssertionError, match="raise n_documents"):
        exec(varlen, names)

# --------------------------------------------------------------------------------------------------
# nanoGPT and nanochat: what the diffs leave or add, with what is between it in miniature

def fill(template, title):
    """A line `@n` in the template stands for the next n lines that the diff leaves or adds."""
    [diff] = snippets(title, "diff")
    lines = iter(re.findall("^[ +](.*)", diff, re.M))

    def next_lines(found):
        return "\n".join(itertools.islice(lines, int(found[1])))

    return re.sub(r"^@(\d+)$", next_lines, template, flags=re.M)

NANOGPT = """
import os, sys, types
import torch
out_dir = "."
import tokenizer as module
sys.modules["model"] = types.SimpleNamespace(GPT=None, GPTConfig=None)
tokenizer.get_vocab_size = lambda: 257
module.get_tokenizer = lambda path, ours=tokenizer: ours
eval_interval, batch_size, block_size, gradient_accumulation_steps = 2, B, T, 2
if os.environ["WORLD_SIZE"] == "2":
    torch.distributed.init_process_group()
    gradient_accumulation_steps = 1
master_process, device, iter_num = os.environ["RANK"] == "0", "cpu", 0
@10
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt")
    iter_num = checkpoint["iter_num"]
    model.load_state_dict(checkpoint["model"])
@2
def estimate_loss():
@2
        for k in range(3):
@1
            print("eval", split, k, Y.tolist())
while True:
@2
    if iter_num % eval_interval == 0 and master_process:
        estimate_loss()
        if iter_num > 0:
@2
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num}
@3
@2
        train_step(X)
    iter_num += 1
"""

def test_nanogpt_resumes_with_the_next_rows(folder):
    """Each evaluation gets the same batches."""
    stops = Stop(0, 1, 0), Stop(0, 2, 1), Stop(0, 3, 0), None
    check(fill(NANOGPT, "nanoGPT"), stops=stops)
    lines = "".join(path.read_text() for path in Path().glob("log-*")).splitlines()
    evaluations = [line for line in lines if line.startswith("eval")]
    n = len(evaluations) // 6
    assert n > 2 and evaluations == evaluations[:6] * n

NANOCHAT = """
import json, os
import torch.distributed as dist
@1
ddp_world_size = int(os.environ["WORLD_SIZE"])
if ddp_world_size > 1:
    dist.init_process_group()
dataloader_resume_state_dict = None
if os.path.exists("meta.json"):
    dataloader_resume_state_dict = json.load(open("meta.json"))["dataloader_state_dict"]
def save_checkpoint(meta):
    if os.environ["RANK"] == "0":
        json.dump(meta, open("meta.json", "w"))
train_loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer, B, T, "train", device="cpu", resume_state_dict=dataloader_resume_state_dict,
    buffer_size=5)
@2
for step in range(9):
    if step == save_every:
@5
            {
@1
            })
    for micro_step in range(1):
        note(x)
@2
"""

@pytest.mark.parametrize("world_size", [1, 2])
def test_nanochat_resumes_with_the_batch_that_it_had_fetched(folder, world_size, monkeypatch):
    """dev/tests/test_nanochat.py checks the rows."""
    os.rename("my_shards", "base_data")
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(folder))
    code = fill(NANOCHAT, "nanochat")
    first, second = run(code, world_size), run(code, world_size, leg=1)
    for rank in range(world_size):
        assert second[rank][:2] == first[rank][SAVE_EVERY:4] != [], logs()

def test_tiny_shakespeare_is_cut_at_blank_lines(folder):
    text = "".join(f"Speaker {i}:\n{40 * 'word '}\n\n" for i in range(100))
    Path("input.txt").write_text(text)
    [code] = snippets("Tiny Shakespeare")
    exec(FIRST_LINES + code, {})
    shards = list_shards("shakespeare", "train") + list_shards("shakespeare", "val")
    for_train, for_val = [shard.read(0).to_pylist() for shard in shards]
    assert all(2000 < len(document) < 2500 for document in for_train[:-1])
    assert "".join(for_train + for_val) == text and for_train[0].endswith("\n\n")

@pytest.mark.parametrize("bos_first", [False, True])
def test_tokens_of_nanogpt_become_shards(folder, tokenizer, bos_first):
    """Each document of train.bin and val.bin once, with its mark in front; also llm.c's files."""
    tokenizer.save("my_tokenizer")
    bos = tokenizer.get_bos_token_id()
    documents = [tokenizer.encode(f"document {i}") for i in range(1500)]
    parts = {"train": documents[:1400], "val": documents[1400:]}
    for split, part in parts.items():
        ids = [[bos, *document] if bos_first else [*document, bos] for document in part]
        header = 1024 * bos_first * b"\1"
        Path(f"{split}.bin").write_bytes(header + np.concatenate(ids).astype(np.uint16).tobytes())
    [code] = snippets("nanoGPT's tokens")
    exec(FIRST_LINES + code.replace("bos_first = False", f"bos_first = {bos_first}"), {})
    for split, part in parts.items():
        [shard] = list_shards("my_gpt", split)
        groups = [shard.read(i).to_pylist() for i in range(len(shard.group_sizes))]
        found = [np.frombuffer(raw, shard.dtype).tolist() for raw in itertools.chain(*groups)]
        assert found == [[bos, *ids] for ids in part]
    next(make("my_gpt", tokenizer=tokenizer))
