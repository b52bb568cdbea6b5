"""
The snippets of dev/loops.md, run with the real libraries at toy size.

    python -m pytest dev/tests/test_loops.py              a library that is not installed is skipped
    python -m pytest dev/tests/test_loops.py -k JAX
    python -m pytest dev/tests/test_loops.py -k ray       takes minutes, and runs with this command only

Each snippet becomes a script of one or two processes, which is killed two batches after a checkpoint, started
again, killed again, and, where any number of ranks may load its state, started a third time on one. The rows
that its model got are compared with those of one PackedLoader in this process.
"""

import collections
import glob
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dataloader import PackedLoader
from dev.nanochat import tokenizing_distributed_data_loader_with_state_bos_bestfit

HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ---------------------------------------------------------------------------------------------------------
# What the snippets leave to their reader

B, T, BOS = 2, 16, 256
save_every, kill_at = 4, 6    # in batches of one process


class Tokenizer:
    """Token ids are bytes."""

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend=None, num_threads=1):
        return [([] if prepend is None else [prepend]) + list(text.encode()) for text in texts]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(257, 8), torch.nn.Linear(8, 257)

    def forward(self, inputs, targets):
        logits = self.head(self.embedding(inputs))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


tokenizer, model = Tokenizer(), Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
n_batches = 0


def note_rows(inputs, targets):
    """Write the rows of a batch to this process's file; kill the process at batch number `kill_at`."""
    global n_batches
    n_batches += 1
    rows = [[a[0], *b] for a, b in zip(inputs.tolist(), targets.tolist(), strict=True)]
    with open(f"{os.environ['ROWS']}-{os.getpid()}", "a") as file:
        print(json.dumps(rows), file=file)
    if n_batches == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(inputs, targets):
    note_rows(inputs, targets)


# ---------------------------------------------------------------------------------------------------------
# Snippets to scripts, scripts to rows

def text_of_loops():
    with open(f"{HERE}/dev/loops.md") as file:
        return file.read()


def snippets():
    """{first bold words: code} of loops.md; the first one, which all need, is under ""."""
    found = re.findall(r"(?:^\*\*([^*]+)\*\*|^# In other)(?:(?!```).)*```python\n(.*?)```", text_of_loops(),
                       re.M | re.S)
    return {name.rstrip("."): code for name, code in found}


def script_of(name, before, after=""):
    return "\n".join(["import sys", f"sys.path.insert(0, {HERE!r})", "from dev.tests.test_loops import *",
                      snippets()[""], before, snippets()[name], after])


def run_leg(folder, leg, script, ranks):
    """
    -> the rows of each batch number, of all processes together. ranks: the number of processes, which get the
    variables that torchrun sets; None: one, which has its own launcher
    """
    (folder / "script.py").write_text(script)
    common = {"LEG": str(leg), "ROWS": f"{folder}/rows-{leg}", "OMP_NUM_THREADS": "1",
              "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]),
              "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": free_port(), "JAX_PORT": free_port()}
    by_rank = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "1"} for rank in range(ranks or 0)]
    processes = []
    for rank, variables in enumerate(by_rank):    # forked, so the imports are done
        child = (folder, script, f"log-{leg}-{rank}", {**common, **variables})
        processes.append(multiprocessing.get_context("fork").Process(target=run_here, args=child))
        processes[-1].start()
    for process in processes:
        process.join(100)
        assert process.exitcode is not None, logs(folder, leg)
    if not ranks:
        with open(folder / f"log-{leg}", "w") as log:
            subprocess.run([sys.executable, "script.py"], cwd=folder, stdout=log, stderr=log, timeout=300,
                           env={**os.environ, **common})
    batches = collections.defaultdict(list)
    for path in glob.glob(f"{folder}/rows-{leg}-*"):
        with open(path) as file:
            for number, line in enumerate(file):
                batches[number] += map(tuple, json.loads(line))
    return batches


def run_here(folder, script, log, variables):
    os.chdir(folder)
    os.environ.update(variables)
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1), os.dup2(file, 2)
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def logs(folder, leg):
    return "\n".join(open(path).read()[-4000:] for path in glob.glob(f"{folder}/log-{leg}*"))


@pytest.fixture
def folder(tmp_path):
    """my_shards: 60 documents in 12 row groups of 3 shards, and a shard for val."""
    texts = [(f"{i}." * 41)[:(7 * i * i + 3) % 41] for i in range(60)]
    (tmp_path / "my_shards").mkdir()
    for i, part in enumerate([texts[:20], texts[20:40], texts[40:], ["val one", "val two"] * 8]):
        table = pa.table({"text": pa.array(part, pa.string())})
        pq.write_table(table, tmp_path / f"my_shards/shard_{i:05d}.parquet", row_group_size=5)
    return tmp_path


def rows_of_one_process(folder, n):
    with PackedLoader(tokenizer, 1, T, "train", data_dir=folder / "my_shards") as loader:
        batches = list(itertools.islice(loader, n))
    return [(int(inputs[0, 0]), *targets[0].tolist()) for inputs, targets in batches]


def check(folder, name, before, after="", launched=True, legs=(2, 2, 1)):
    """
    Each leg begins after the last checkpoint and gets the rows of one process, none skipped. legs: numbers of
    processes; launched: as torchrun starts them.
    """
    script, want, at = script_of(name, before, after), rows_of_one_process(folder, 60), 0
    for leg, ranks in enumerate(legs):
        batches = run_leg(folder, leg, script, ranks if launched else None)
        for number in range(save_every):
            rows = want[at:at + ranks * B]
            assert sorted(batches[number]) == sorted(rows), (leg, number, logs(folder, leg))
            at += ranks * B


IMPORTS = """
import glob, torch
import torch.distributed as dist
"""


# ---------------------------------------------------------------------------------------------------------
# The loops

def test_snippets_are_ten_lines_at_most():
    lines = {name: sum(map(bool, code.splitlines())) for name, code in snippets().items()}
    assert len(lines) == 9 and max(lines.values()) == 10, lines


def test_interrupted_save_keeps_the_previous_state(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    exec(snippets()[""], names)
    with PackedLoader(tokenizer, B, T, "train", data_dir="my_shards") as loader:
        names["save"](loader)
        before = loader.state_dict()
        next(loader)
        monkeypatch.setattr(os, "replace", lambda *paths: None)    # as if killed just before
        names["save"](loader)
        names["load"](loader)
        assert loader.state_dict() == before


def test_your_own_loop(folder):
    check(folder, "Your own loop", IMPORTS)


def test_dataloaders_give_the_same_batches_without_workers(folder):
    """torch's; and torchdata's, whose state holds the loader's."""
    torchdata, want = pytest.importorskip("torchdata.stateful_dataloader"), rows_of_one_process(folder, 12)
    for kind in (DataLoader, torchdata.StatefulDataLoader):
        with PackedLoader(tokenizer, B, T, "train", data_dir=folder / "my_shards") as loader:
            batches = kind(loader, batch_size=None, num_workers=0)
            got = list(itertools.islice(batches, 6))
            state = loader.state_dict()
            assert kind is DataLoader or state in find_states(batches.state_dict())
        assert [(int(x[i, 0]), *y[i].tolist()) for x, y in got for i in range(B)] == want


def find_states(value):
    """All dicts in nested dicts."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from find_states(inner)


LIGHTNING = """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, i):
        note_rows(*batch)
        return self.model(*batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
options = dict(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 2)), logger=False,
               enable_progress_bar=False, enable_model_summary=False, callbacks=[
               L.pytorch.callbacks.ModelCheckpoint("saved", every_n_train_steps=save_every, save_top_k=-1)])
"""
FIT = """
saved = sorted(glob.glob("saved/*.ckpt"), key=os.path.getmtime)
trainer.fit(Module(), Data(), ckpt_path=saved[-1] if saved else None)
"""


@pytest.mark.parametrize("launched", [True, False])
def test_lightning(folder, launched):
    """By torchrun; and by its own launcher, which sets other variables."""
    pytest.importorskip("lightning")
    check(folder, "Lightning", IMPORTS + LIGHTNING, FIT, launched, (2, 2, 1) if launched else (2, 2))


@pytest.mark.parametrize("limit", [None, 3])
def test_every_validation_of_lightning_begins_at_the_beginning(folder, limit, monkeypatch):
    """Also after the two batches of its sanity check, and where the previous one was broken off."""
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(folder)
    names = {"PackedLoader": PackedLoader, "tokenizer": tokenizer, "B": B, "T": T}
    exec(snippets()["Validation"], names)
    validated = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, i):
            return self.model(*batch)

        def validation_step(self, batch, i):
            validated.append((i, batch[0].tolist()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with PackedLoader(tokenizer, B, T, "train", data_dir="my_shards") as loader:
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, max_steps=4, val_check_interval=2, limit_train_batches=4,
            limit_val_batches=limit)
        trainer.fit(Module(), map(tuple, loader), names["Val"]())
    complete = [(i, batch[0].tolist()) for i, batch in enumerate(names["Val"]())]
    assert validated == complete[:2] + 2 * complete[:limit] and len(complete) > 4


def test_accelerate(folder):
    pytest.importorskip("accelerate")
    check(folder, "Accelerate and Fabric", IMPORTS + "from accelerate import Accelerator")


def test_fabric(folder):
    """The same snippet, with fabric's launcher."""
    pytest.importorskip("lightning")
    fabric = """
import lightning as L
class Accelerator(L.Fabric):
    def __init__(self):
        super().__init__(accelerator="cpu", devices=2)
        self.launch()
    prepare = L.Fabric.setup
    def save_state(self, path):
        self.save(path + "/model.pt", {"model": model})
"""
    check(folder, "Accelerate and Fabric", IMPORTS + fabric, launched=False, legs=(2, 2))


TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
class Llama(LlamaForCausalLM):
    def forward(self, input_ids, shift_labels, **others):
        note_rows(input_ids, shift_labels)
        return super().forward(input_ids, shift_labels=shift_labels, **others)
model = Llama(LlamaConfig(vocab_size=257, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                          num_attention_heads=1))
options = dict(save_steps=save_every, use_cpu=True, report_to=[], disable_tqdm=True)
saved = sorted(glob.glob("out/checkpoint-*"), key=os.path.getmtime)
last_checkpoint = saved[-1] if saved else None
"""


def test_trainer(folder):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.trainer")
    pytest.importorskip("transformers.models.llama.modeling_llama")
    check(folder, "transformers.Trainer", IMPORTS + TRAINER)


JAX = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if os.environ["WORLD_SIZE"] == "2":
    jax.distributed.initialize("127.0.0.1:" + os.environ["JAX_PORT"], 2, int(os.environ["RANK"]))
def train_step(inputs, targets):
    assert inputs.shape == (B * jax.process_count(), T)
    note_rows(*(torch.tensor(x.addressable_shards[0].data.tolist()) for x in (inputs, targets)))
"""


def test_jax(folder):
    pytest.importorskip("jax")
    check(folder, "JAX", IMPORTS + JAX)


DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
"""


def test_fsdp2_and_dcp(folder):
    check(folder, "FSDP2 and DCP", IMPORTS + DCP)


RAY = """
storage = os.getcwd()
import ray
ray.init(num_cpus=2, include_dashboard=False)    # also on a machine with one core
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
"""


def test_ray(folder, request):
    pytest.importorskip("ray")
    if request.config.getoption("keyword") != "ray":
        pytest.skip("takes minutes; python -m pytest dev/tests/test_loops.py -k ray")
    check(folder, "Ray Train", IMPORTS + RAY, launched=False, legs=(2, 2))


# ---------------------------------------------------------------------------------------------------------
# nanochat: its loop around what the diff adds; dev/tests/test_nanochat.py has the rows

@pytest.mark.parametrize("ranks", [1, 2])
def test_nanochat_saves_the_state_before_the_batch_it_fetched(folder, ranks, monkeypatch):
    """With and without a process group: a resumed run begins with that batch."""
    diff = re.search(r"```diff\n(.*)```", text_of_loops(), re.S)[1].splitlines()
    added = textwrap.dedent("\n".join(line[1:] for line in diff if re.match(r"\+ .*(states|is_init)", line)))
    gather, saved = added.rsplit("\n", 1)
    assert gather.count("\n") == 3 and '"dataloader_state_dict": states,' in saved
    os.rename(folder / "my_shards", folder / "base_data")
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(folder))

    def start(rank, state):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
            tokenizer, B, T, "train", device="cpu", resume_state_dict=state, buffer_size=5)
        return loader, next(loader)

    loaders, batches = zip(*(start(rank, None) for rank in range(ranks)), strict=True)
    for _ in range(3):
        before = [state for _, _, state in batches]
        batches = [next(loader) for loader in loaders]

    def all_gather_object(states, state):
        states[:] = before

    dist = SimpleNamespace(is_initialized=lambda: ranks > 1, all_gather_object=all_gather_object)
    for rank in range(ranks):
        names = {"dist": dist, "ddp_world_size": ranks, "state_before": before[rank]}
        exec(gather, names)
        saved = json.loads(json.dumps(names["states"]))
        _, (inputs, targets, _) = start(rank, saved)
        assert torch.equal(inputs, batches[rank][0]) and torch.equal(targets, batches[rank][1])
