"""
The snippets of dev/loops.md, taken from it and run as they stand, at toy size.

    python -m pytest dev/tests/test_loops.py             what is not installed is skipped
    python -m pytest dev/tests/test_loops.py -k jax

A loop runs in one or more processes, which are killed two batches after a save. It is started
again, also on another number of ranks. Its model must get the rows of a run that never stopped.
"""

import collections
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tokenizer as tokenizer_module
from dataloader import PackedLoader
from dataset import list_shards
from dev.nanochat import tokenizing_distributed_data_loader_with_state_bos_bestfit
from test_dataloader import (
    BOS, ByteTokenizer, grouped, load, make, numbered, show, show_all, texts_of, tokenizer, write)

LOOPS = Path(__file__).parents[1] / "loops.md"

def snippet(title, kind="python"):
    """The code of a section; without a title, the lines that all begin with."""
    sections = re.split(r"^#+ (.*)\n", LOOPS.read_text(), flags=re.M)
    text = dict(zip(sections[1::2], sections[2::2], strict=True))[title or "In other loops"]
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
    assert blocks, title
    return "\n".join(blocks)

# --------------------------------------------------------------------------------------------------
# What the snippets leave to their reader

B, T = 2, 16
SAVE_EVERY, KILL_AT = 4, 6    # batches of one process

class Model(torch.nn.Module):
    """Two layers, which note the rows that they get."""
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(257, 8), torch.nn.Linear(8, 257)

    def forward(self, inputs):
        note(inputs)
        return self.head(self.embedding(inputs))

def note(inputs, *others):
    """Write these rows to this process's file. At batch KILL_AT: kill -9."""
    with open(os.environ["ROWS"], "a") as file:
        print(json.dumps(inputs.tolist()), file=file)
    if Path(file.name).read_text().count("\n") == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)

def names_of_the_reader():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"__name__": "__main__", "tokenizer": ByteTokenizer(), "model": model, "note": note,
            "optimizer": optimizer, "train_step": note, "B": B, "T": T, "save_every": SAVE_EVERY}

def run_here(title, **names):
    """Run a snippet in this process; returns its names."""
    names = {**names_of_the_reader(), **names}
    exec(snippet("") + snippet(title), names)
    return names

# --------------------------------------------------------------------------------------------------
# One runner for all loops

@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = numbered([(7 * i * i + 3) % 41 for i in range(60)])
    groups = grouped(texts, 5)
    write("my_shards", *grouped(groups, 4))
    return tmp_path

def be_a_rank(rank, world_size, leg, port, code):
    os.environ |= {
        "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{world_size}", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "ROWS": f"rows-{leg}-{rank}"}
    log = os.open(f"log-{leg}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    torch.set_num_threads(1)    # OpenMP hangs in a forked process
    exec(compile(code, "snippet", "exec"), names_of_the_reader())

def run(code, world_size, leg=0):
    """{batch number: the rows of all ranks}"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")    # what is imported here is imported there
    ranks = [fork.Process(target=be_a_rank, args=(rank, world_size, leg, port, code))
             for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        assert process.exitcode is not None, logs()
    batches = collections.defaultdict(list)
    for path in Path().glob(f"rows-{leg}-*"):
        for number, line in enumerate(path.read_text().splitlines()):
            batches[number] += json.loads(line)
    return batches

def logs():
    """What a failed test shows."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(Path().glob("log-*")))

def rows_of_one_process(n, **options):
    with PackedLoader(ByteTokenizer(), 1, T, "train", data_dir="my_shards", **options) as loader:
        return [next(loader)[0][0].tolist() for _ in range(n)]

def check(code, worlds=(2, 2, 1), copies=1, **options):
    """worlds: processes of each start. copies: processes that get the same rows."""
    want = rows_of_one_process(80, **options)
    for leg, world_size in enumerate(worlds):
        batches = run(code, world_size, leg)
        for number in range(SAVE_EVERY):
            n = world_size // copies * B
            rows, want = want[:n], want[n:]
            assert sorted(batches[number]) == sorted(rows * copies), (leg, number, logs())

def check_loop(title, before="", **options):
    check("\n".join([snippet(""), textwrap.dedent(before), snippet(title)]), **options)

# --------------------------------------------------------------------------------------------------
# Loops

def test_own_loop(folder):
    check_loop("Your own loop, with DDP")

GRADIENT = """
class optimizer:
    def step():
        print("gradient", model.module.head.bias.grad.norm().item())
    def zero_grad():
        model.zero_grad()
"""

def test_gradient_of_the_ddp_loop_is_that_of_one_process(folder):
    """2 ranks of 2 rows, 1 of 4: ranks have unequally many targets."""
    found = []
    for world_size in (2, 1):
        before = f"{snippet('')}{GRADIENT}B = {4 // world_size}\n"
        run(before + snippet("Your own loop, with DDP"), world_size, leg=world_size)
        Path("loader.json").unlink()
        log = Path(f"log-{world_size}-0").read_text()
        found.append([float(norm) for norm in re.findall("gradient (.*)", log)])
    assert len(found[0]) >= SAVE_EVERY and found[0] == pytest.approx(found[1]), logs()

MESH = """
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group()
    device_type = "cpu"
"""

def test_tensor_parallel_ranks_get_the_same_rows(folder):
    check_loop("Tensor parallel", MESH, worlds=(4, 2), copies=2)

CONTEXT = """
    def train_step(inputs, targets, positions):
        note(torch.stack([inputs, targets, positions]))
"""

def test_context_parallel_parts_make_the_batch(folder):
    """Sorted by position, the parts are the rows; each has an early and a late quarter."""
    code = textwrap.dedent(MESH + CONTEXT) + snippet("Context parallel")
    run(snippet("") + code, 4)
    want = rows_of_one_process(4)
    for data_rank in range(2):
        both = []
        for rank in (2 * data_rank, 2 * data_rank + 1):
            first = Path(f"rows-0-{rank}").read_text().splitlines()[0]
            both.append(np.array(json.loads(first)))
        inputs, targets, positions = np.concatenate(both, axis=2)
        assert positions[0].tolist() == [*range(4), *range(12, 16), *range(4, 12)]
        order = positions.argsort(axis=1)
        inputs = np.take_along_axis(inputs, order, axis=1)
        targets = np.take_along_axis(targets, order, axis=1)
        assert inputs.tolist() == want[data_rank::2]
        follows = targets[:, :-1] == inputs[:, 1:]
        assert (follows | (targets[:, :-1] == -100)).all()

STAGES = """
    readers = dist.new_group({readers})
    def train_step(inputs, targets):
        dist.barrier(readers)    # stages wait for each other
        note(inputs)
"""

def test_pipeline_stages_without_a_loader_are_not_waited_for(folder):
    """Three stages of two ranks; resumed as two stages, of which the last has a loader."""
    want = rows_of_one_process(60)
    code = snippet("Pipeline parallel")
    alone = code.replace("(0, last)", "(last,)")
    for leg, (code, world_size, readers) in enumerate([
            (code, 6, [0, 1, 4, 5]), (alone, 4, [2, 3])]):
        stages = textwrap.dedent(MESH + STAGES.format(readers=readers))
        batches = run(snippet("") + stages + code + "\ndist.barrier()", world_size, leg)
        for number in range(SAVE_EVERY):
            rows, want = want[:4], want[4:]
            assert sorted(batches[number]) == sorted(rows * (len(readers) // 2)), logs()

def test_dcp_loads_a_state_on_another_number_of_ranks(folder):
    check_loop("FSDP2 and DCP", worlds=(4, 3, 1), num_lanes=96)

def test_torchdata(folder):
    pytest.importorskip("torchdata")
    check_loop("torchdata", worlds=(1, 1, 1))

def test_accelerate(folder):
    pytest.importorskip("accelerate")
    check_loop("Accelerate and Fabric")

FABRIC = """
    import accelerate, lightning
    class Accelerator(lightning.Fabric):
        def __init__(self):
            super().__init__(accelerator="cpu", devices=dist_world_size)
            self.launch()
        prepare = lightning.Fabric.setup
        def save_state(self, path):
            self.save(f"{path}/model.pt", {"model": model})
    dist_world_size = int(os.environ["WORLD_SIZE"])
    accelerate.Accelerator = Accelerator
"""

def test_fabric(folder):
    """The same snippet."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    check_loop("Accelerate and Fabric", FABRIC)

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
            return torch.optim.SGD(self.parameters(), 0.1)
    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        "saved", every_n_train_steps=save_every, save_top_k=-1)
    options = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "logger": False,
               "enable_progress_bar": False, "callbacks": [saves]}
    last_checkpoint = max(glob.glob("saved/*"), key=os.path.getmtime, default=None)
"""

def test_lightning(folder):
    pytest.importorskip("lightning")
    check_loop("Lightning", LIGHTNING)

TRAINER = """
    import glob
    from transformers import LlamaConfig, LlamaForCausalLM
    class Llama(LlamaForCausalLM):
        def forward(self, input_ids, shift_labels, **others):
            note(input_ids)
            return super().forward(input_ids, shift_labels=shift_labels, **others)
    model = Llama(LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=8,
                              num_hidden_layers=1, num_attention_heads=1))
    options = {"save_steps": save_every, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    options["per_device_train_batch_size"] = B
    last_checkpoint = max(glob.glob("out/checkpoint-*"), key=os.path.getmtime, default=None)
"""

def test_trainer(folder):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    check_loop("transformers.Trainer", TRAINER)

JAX = """
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if os.environ["WORLD_SIZE"] == "2":
        address = "127.0.0.1:" + os.environ["MASTER_PORT"]
        jax.distributed.initialize(address, 2, int(os.environ["RANK"]))
    def train_step(inputs, targets):
        assert inputs.shape == (B * jax.process_count(), T)
        note(inputs.addressable_shards[0].data)
"""

def test_jax(folder):
    pytest.importorskip("jax")
    check_loop("JAX", JAX)

SRUN = """#!/bin/sh
for SLURM_PROCID in 0 1; do
    export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID SLURM_NTASKS=2
    "$@"
done
"""

def test_slurm_script_starts_each_rank(tmp_path):
    """Fakes of srun, scontrol and python on the PATH."""
    variables = "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $*"
    fakes = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n",
             "python": f"#!/bin/sh\necho {variables}\n"}
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", snippet("Slurm", "bash")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 2 0 node1 29500 train.py", "1 2 1 node1 29500 train.py"]

def test_interrupted_save_keeps_the_previous_state(folder, monkeypatch):
    names = run_here("", os=os)
    loader = make("my_shards")
    names["save"](loader)
    before = loader.state_dict()
    next(loader)
    monkeypatch.setattr(os, "replace", lambda *paths: None)    # as if killed just before
    names["save"](loader)
    names["load"](loader)
    assert loader.state_dict() == before

def test_validation_always_begins_again(folder):
    val = run_here("Validation")["Val"]()
    next(iter(val))
    assert show_all(val) == show_all(val) != []

# --------------------------------------------------------------------------------------------------
# Rows, fields and transforms

class Enough(Exception):
    pass

def steps(n, found):
    """A train_step that keeps what it gets, n times."""
    def train_step(*arguments):
        found.append(arguments)
        if len(found) == n:
            raise Enough
    return train_step

def test_rows_of_all_ranks_are_those_of_one(folder, monkeypatch):
    lines = []
    for world_size, n in [(2, 5), (1, 10)]:
        lines.append([])
        for rank in range(world_size):
            monkeypatch.setenv("RANK", f"{rank}")
            monkeypatch.setenv("WORLD_SIZE", f"{world_size}")
            with pytest.raises(Enough):
                run_here("Which documents were in which row", train_step=steps(n, []))
            lines[-1] += Path(f"rows-{rank}.txt").read_text().splitlines()
    two, one = (sorted(part, key=lambda line: int(line.split()[0])) for part in lines)
    assert len(two) == 16 and two == one[:16]    # the last step is not written
    assert re.fullmatch(r"0\ttrain-\d.parquet:\d:\d 0-\d+.*", one[0])

def test_each_token_has_the_weight_of_its_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("scored", [["val"]])
    table = pa.table({"text": [letter * 9 for letter in "abcd"], "score": [0.25, 0.5, 1.0, 2.0]})
    pq.write_table(table, "scored/train-0.parquet")
    losses = []
    with pytest.raises(Enough):
        run_here("A loss weight for each token", train_step=steps(3, losses), note=print,
                 model=lambda inputs: torch.zeros(B, T, 257))
    assert [loss.item() for loss, in losses] == pytest.approx(3 * [np.log(257)])
