"""
The snippets of loops.md, run with the real libraries at toy size.

    python -m pytest dev/test_loops.py              a few minutes; a library that is not installed is skipped
    python -m pytest dev/test_loops.py -k Fabric

Each snippet becomes a script of a process or two of its own, which is killed two batches behind a checkpoint,
started again, killed again, and, where its state may be loaded by any number of ranks, started a third time
on one. The rows that its model met are compared with those of one PackedLoader in this process.
"""

import collections
import functools
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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from dataloader import PackedLoader

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ---------------------------------------------------------------------------------------------------------
# What the snippets leave to their reader

B, T, BOS = 2, 16, 256
save_every, kill_at = 4, 6    # of the batches of one process


class Tokenizer:
    """Ids are bytes."""

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
met = 0


def meet(inputs, targets):
    """Note the rows of a batch, by process; at batch number `kill_at`, be killed as by the power switch."""
    global met
    met += 1
    rows = [[a[0], *b] for a, b in zip(inputs.tolist(), targets.tolist(), strict=True)]
    with open(f"{os.environ['ROWS']}-{os.getpid()}", "a") as file:
        print(json.dumps(rows), file=file)
    if met == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(inputs, targets):
    meet(inputs, targets)


# ---------------------------------------------------------------------------------------------------------
# Snippets to scripts, scripts to rows

def snippets():
    """{first bold word: code} of loops.md; the first one, which all need, is under ""."""
    with open(f"{HERE}/dev/loops.md") as file:
        section = file.read()
    found = re.findall(r"(?:^\*\*([^*]+)\*\*|^Each snippet)(?:(?!```).)*```python\n(.*?)```", section,
                       re.M | re.S)
    return {name.rstrip("."): code for name, code in found}


def script_of(name, before, behind):
    return "\n".join(["import sys", f"sys.path.insert(0, {HERE!r})", "from dev.test_loops import *",
                      snippets()[""], before, snippets()[name], behind])


def run_leg(folder, leg, script, ranks):
    """
    -> the rows of each batch number, of all processes together. ranks: so many processes, with the variables
    that torchrun sets; None: one, which has a launcher of its own
    """
    (folder / "script.py").write_text(script)
    common = {"LEG": str(leg), "ROWS": f"{folder}/rows-{leg}", "PYTHONPATH": HERE,
              "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "JAX_PORT": free_port()}
    by_rank = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "1"} for rank in range(ranks or 0)]
    processes = []
    for rank, variables in enumerate(by_rank):    # forked: the imports are done
        child = (folder, script, f"log-{leg}-{rank}", {**common, **variables})
        processes.append(multiprocessing.get_context("fork").Process(target=run_here, args=child))
        processes[-1].start()
    for process in processes:
        process.join(300)
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


def check(folder, name, before, behind="", launched=True, legs=(2, 2, 1)):
    """
    Each leg begins behind the last checkpoint and meets the rows of one process, none left out. legs: the
    numbers of processes; launched: as torchrun starts them.
    """
    script, want, at = script_of(name, before, behind), rows_of_one_process(folder, 60), 0
    for leg, ranks in enumerate(legs):
        batches = run_leg(folder, leg, script, ranks if launched else None)
        for number in range(save_every):
            rows = want[at:at + ranks * B]
            assert sorted(batches[number]) == sorted(rows), (leg, number, logs(folder, leg))
            at += ranks * B


IMPORTS = """
import glob, torch
import torch.distributed as dist
from torch.utils.data import DataLoader
"""


# ---------------------------------------------------------------------------------------------------------
# The loops

def test_snippets_are_ten_lines_at_most():
    lines = {name: sum(map(bool, code.splitlines())) for name, code in snippets().items()}
    assert len(lines) == 12 and max(lines.values()) == 10, lines


def test_a_save_that_fails_leaves_the_state_before(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    exec(snippets()[""], names)
    with PackedLoader(tokenizer, B, T, "train", data_dir="my_shards") as loader:
        names["save"](loader)
        before = loader.state_dict()
        next(loader)
        monkeypatch.setattr(os, "replace", lambda *paths: None)    # as where it is killed just before
        names["save"](loader)
        names["load"](loader)
        assert loader.state_dict() == before


def test_dataloader(folder):
    check(folder, "A loop of your own, torchrun", IMPORTS)


def test_stateful_dataloader(folder):
    pytest.importorskip("torchdata.stateful_dataloader")
    before = IMPORTS + "from torchdata.stateful_dataloader import StatefulDataLoader\n"
    check(folder, "StatefulDataLoader", before + "dist.init_process_group('gloo')",
          legs=(2, 2))


def test_spawn(folder):
    check(folder, "mp.spawn", IMPORTS + "import torch.multiprocessing as mp", launched=False, legs=(2, 2))


LIGHTNING = """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, i):
        meet(*batch)
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


def test_lightning(folder):
    """In the second leg, the checkpoint is that of an epoch's middle."""
    pytest.importorskip("lightning")
    check(folder, "Lightning", IMPORTS + LIGHTNING, FIT)


def test_lightning_s_own_launcher(folder):
    """Which sets other variables than torchrun does."""
    pytest.importorskip("lightning")
    check(folder, "Lightning", IMPORTS + LIGHTNING, FIT, launched=False, legs=(2, 2))


def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.validated = Model(), []

        def training_step(self, batch, i):
            return self.model(*batch)

        def validation_step(self, batch, i):
            self.validated.append((i, batch[0].tolist()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module(), functools.partial(
        lightning.Trainer, accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=4,
        enable_model_summary=False, enable_checkpointing=False)


@pytest.mark.parametrize("limit", [None, 3])
def test_every_validation_of_lightning_begins_at_the_beginning(folder, limit, monkeypatch):
    """Behind the two batches of its sanity check, and where it is broken off, too."""
    pytest.importorskip("lightning")
    monkeypatch.chdir(folder)
    names = {"PackedLoader": PackedLoader, "tokenizer": tokenizer, "B": B, "T": T}
    exec(snippets()["Validation"], names)
    module, Trainer = lightning_module()
    with PackedLoader(tokenizer, B, T, "train", data_dir="my_shards") as loader:
        trainer = Trainer(val_check_interval=2, limit_train_batches=4, limit_val_batches=limit)
        trainer.fit(module, map(tuple, loader), names["Val"]())
    whole = [(i, batch[0].tolist()) for i, batch in enumerate(names["Val"]())]
    assert module.validated == whole[:2] + 2 * whole[:limit] and len(whole) > 4


def test_lightning_may_not_save_the_bare_loader(folder, tmp_path):
    pytest.importorskip("lightning")
    module, Trainer = lightning_module()
    with PackedLoader(tokenizer, B, T, "train", data_dir=folder / "my_shards") as loader:
        trainer = Trainer()
        trainer.fit(module, loader)
        with pytest.raises(RuntimeError, match="Lightning saves rank 0's state alone, and one batch late"):
            trainer.save_checkpoint(tmp_path / "saved.ckpt")


def test_fabric(folder):
    pytest.importorskip("lightning")
    check(folder, "Fabric", IMPORTS + "import lightning as L", legs=(2, 2))


def test_fabric_s_own_launcher(folder):
    """As Lightning's."""
    pytest.importorskip("lightning")
    check(folder, "Fabric", IMPORTS + "import lightning as L", launched=False, legs=(2, 2))


def test_a_loader_made_before_fabric_s_own_launcher_is_refused(folder):
    """It would be rank 0 of 1 in every process."""
    pytest.importorskip("lightning")
    script = script_of("Fabric", IMPORTS + "import lightning as L", "")
    exchanged = re.sub(r"(fabric.launch\(\)\n)(loader = .*\n)", r"\2\1", script)
    assert exchanged != script and not run_leg(folder, 0, exchanged, None)
    assert "of RANK and WORLD_SIZE only WORLD_SIZE=2 is set; make the loader when" in logs(folder, 0)


def test_accelerate(folder):
    pytest.importorskip("accelerate")
    check(folder, "Accelerate", IMPORTS + "from accelerate import Accelerator")


def test_accelerate_with_a_dataloader_is_refused(folder):
    """It would hand on rank 0's batches; Trainer(train_dataset=loader) comes down to the same."""
    accelerate = pytest.importorskip("accelerate")
    for dispatch in (True, False):
        configuration = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
        with PackedLoader(tokenizer, B, T, "train", data_dir=folder / "my_shards") as loader:
            batches = accelerator.prepare(torch.utils.data.DataLoader(loader, batch_size=None))
            with pytest.raises(RuntimeError, match="iterate over the PackedLoader itself"):
                next(iter(batches))


TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
class Llama(LlamaForCausalLM):
    def forward(self, input_ids, shift_labels, **others):
        meet(input_ids, shift_labels)
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
from dataloader import merge_states
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if os.environ["WORLD_SIZE"] == "2":
    jax.distributed.initialize("127.0.0.1:" + os.environ["JAX_PORT"], 2, int(os.environ["RANK"]))
def train_step(inputs, targets):
    assert inputs.shape == (B * jax.process_count(), T)
    mine = [torch.tensor(x.addressable_shards[0].data.tolist()) for x in (inputs, targets)]
    meet(*mine)
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
ray.init(num_cpus=2, include_dashboard=False)    # of a machine of one core, too
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
"""


def test_ray(folder):
    pytest.importorskip("ray")
    check(folder, "Ray Train", IMPORTS + RAY, launched=False, legs=(2, 2))
