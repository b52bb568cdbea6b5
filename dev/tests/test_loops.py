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
import inspect
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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
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
                      snippets()[""], before, snippets()[name] if name else "", after])


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
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)    # pytest's would not end in the log
    torch.set_num_threads(1)    # OpenMP hangs in a forked process if the parent used its threads
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def logs(folder, leg, n=4000):
    return "\n".join(open(path).read()[-n:] for path in glob.glob(f"{folder}/log-{leg}*"))


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


def check(folder, script, launched=True, legs=(2, 2, 1), copies=1):
    """
    Each leg begins after the last checkpoint and gets the rows of one process, none skipped. legs: numbers of
    processes; launched: as torchrun starts them. copies: the number of processes that get the same rows
    """
    want, at = rows_of_one_process(folder, 60), 0
    for leg, ranks in enumerate(legs):
        batches = run_leg(folder, leg, script, ranks if launched else None)
        for number in range(save_every):
            rows = want[at:at + ranks // copies * B]
            assert sorted(batches[number]) == sorted(rows * copies), (leg, number, logs(folder, leg))
            at += len(rows)


IMPORTS = """
import glob, torch
import torch.distributed as dist
"""


# ---------------------------------------------------------------------------------------------------------
# The loops

def test_snippets_are_ten_lines_at_most():
    lines = {name: sum(map(bool, code.splitlines())) for name, code in snippets().items()}
    assert len(lines) == 16 and {lines.pop(name) for name in ("Boundaries", "nanoGPT's tokens")} == {16, 15}
    assert max(lines.values()) == 10, lines


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
    check(folder, script_of("Your own loop", IMPORTS))


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
    script = script_of("Lightning", IMPORTS + LIGHTNING, FIT)
    check(folder, script, launched, (2, 2, 1) if launched else (2, 2))


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
    check(folder, script_of("Accelerate and Fabric", IMPORTS + "from accelerate import Accelerator"))


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
    check(folder, script_of("Accelerate and Fabric", IMPORTS + fabric), launched=False, legs=(2, 2))


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
    check(folder, script_of("transformers.Trainer", IMPORTS + TRAINER))


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
    check(folder, script_of("JAX", IMPORTS + JAX))


DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
"""


def test_fsdp2_and_dcp(folder):
    check(folder, script_of("FSDP2 and DCP", IMPORTS + DCP))


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
    check(folder, script_of("Ray Train", IMPORTS + RAY), launched=False, legs=(2, 2))


# ---------------------------------------------------------------------------------------------------------
# Parallel layouts: real processes, which talk over gloo

MESH = """
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
device_type = "cpu"
"""


def test_tensor_parallel_ranks_get_the_same_rows(folder):
    """2 x 2 processes, then 1 x 2."""
    check(folder, script_of("Tensor parallel", IMPORTS + MESH), legs=(4, 2), copies=2)


CONTEXT = """
from torch.distributed.tensor.experimental import context_parallel
def train_step(inputs, targets, positions):
    with open(f"{os.environ['ROWS']}-{os.getpid()}", "a") as file:
        print(json.dumps([[dist.get_rank(), x.tolist()] for x in (positions, inputs, targets)]), file=file)
    if sum(1 for _ in open(file.name)) == save_every:
        whole = [torch.arange(T).expand(B, T).clone()]
        with context_parallel(mesh["context"], buffers=whole, buffer_seq_dims=[1]):
            assert torch.equal(whole[0], positions), (whole, positions)
        print("like torch")
        sys.exit()
"""


def test_context_parallel_slices_make_the_batch(folder):
    """Sorted by position, the slices are the batch; each has an early and a late part, as torch's have."""
    batches = run_leg(folder, 0, script_of("Context parallel", IMPORTS + MESH + CONTEXT), 4)
    want = iter(rows_of_one_process(folder, save_every * 2 * B))
    for number in range(save_every):
        slices = collections.defaultdict(list)    # of each process: positions, inputs, targets
        for rank, tensor in batches[number]:
            slices[rank].append(tensor)
        for b, data_rank in itertools.product(range(B), range(2)):
            row = []
            for positions, inputs, targets in (slices[2 * data_rank], slices[2 * data_rank + 1]):
                row += zip(positions[b], inputs[b], targets[b], strict=True)
            assert [i for i, _, _ in row] == [*range(4), *range(12, 16), *range(4, 12)], logs(folder, 0)
            row.sort()
            assert (row[0][1], *(target for _, _, target in row)) == next(want)
            assert all(target in (token, -100) for (_, _, target), (_, token, _) in itertools.pairwise(row))
    assert logs(folder, 0).count("like torch") == 4, logs(folder, 0)


PIPELINE = """
readers = dist.new_group({readers})
def train_step(inputs, targets):
    dist.barrier(readers)    # as stages wait for each other: none is killed before the others have saved
    note_rows(inputs, targets)
"""


def test_pipeline_stages_without_a_loader_are_not_waited_for(folder):
    """
    Three stages, of which the first and last have a loader; resumed with two, of which the last has one; then
    a finite run.
    """
    want = rows_of_one_process(folder, 100)
    script, alone = (script_of("Pipeline parallel", IMPORTS + MESH + PIPELINE.format(readers=readers),
                               "dist.barrier()") for readers in ([0, 1, 4, 5], [2, 3]))
    alone = alone.replace("(0, last)", "(last,)")
    finite = alone.replace('"my_shards", ', '"my_shards", epochs=1, ').replace(" load(loader)\n", "\n")
    finite = finite.replace("import sys", "import sys, dev.tests.test_loops as t; t.kill_at = None", 1)
    for leg, (code, processes, copies) in enumerate([(script, 6, 2), (alone, 4, 1)]):
        batches = run_leg(folder, leg, code, processes)
        for number in range(save_every):
            at = 2 * B * (leg * save_every + number)
            assert sorted(batches[number]) == sorted(want[at:at + 2 * B] * copies), logs(folder, leg)
    batches = run_leg(folder, 2, finite, 4)
    with PackedLoader(tokenizer, 1, T, "train", data_dir=folder / "my_shards", epochs=1) as loader:
        want = [(int(x[0, 0]), *y[0].tolist()) for x, y in loader]
        loader.load_state_dict(json.loads((folder / "loader.json").read_text()))
        n_saved = loader.state_dict()["rows"] // (2 * B)
    rows = [row for batch in batches.values() for row in batch]
    assert sorted(filter(has_targets, rows)) == sorted(filter(has_targets, want)), logs(folder, 2)
    assert 2 * save_every < len(batches) and n_saved == len(batches) // save_every * save_every


def has_targets(row):
    return max(row[1:]) >= 0


GROUPS = """
dist.init_process_group("gloo")
others, group = dist.new_group([0]), dist.new_group([0, 2])    # rank 0 is in one more group
def batch_of_finite_run(group):
    return next(PackedLoader(tokenizer, B, T, "train", data_dir="my_shards", epochs=1, num_lanes=6,
                             group=group))
note_rows(*batch_of_finite_run(None))
try:
    dist.destroy_process_group(others)
    batch = batch_of_finite_run(group)
except ValueError as error:
    assert dist.get_rank() == 1 and "not in `group`" in str(error), error
else:
    note_rows(*batch)
"""


def test_ranks_of_a_finite_run_may_be_in_other_groups_too(folder):
    """Of the world, or of a group; a process that is no member of it gets an error."""
    batches = run_leg(folder, 0, script_of("", IMPORTS, GROUPS), 3)
    assert [len(batches[number]) for number in range(2)] == [3 * B, 2 * B], logs(folder, 0)


# ---------------------------------------------------------------------------------------------------------
# Boundaries of documents, for variable-length attention

def dense_attention(q, k, v, inputs):
    """With the dense mask; q, k, v: (B, heads, T, head size)."""
    names = {"inputs": inputs, "tokenizer": tokenizer}
    exec(snippets()["Attention inside documents"], names)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=names["mask"])


def varlen_attention(q, k, v, cu_seqlens):
    """Document by document, as varlen_attn does on CUDA; q, k, v: (1, heads, B * T, head size)."""
    output = torch.full_like(q, torch.nan)
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        one = (x[:, :, a:b] for x in (q, k, v))
        output[:, :, a:b] = F.scaled_dot_product_attention(*one, is_causal=True)
    return output


@pytest.mark.parametrize("packing", ["exactfit", "bestfit", "flat"])
def test_boundaries_give_the_attention_of_the_dense_mask(folder, packing, monkeypatch):
    """With flex attention, and document by document; of cut documents, short rows and empty ones."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    B, seen = 18, collections.Counter()
    names = {"np": np, "torch": torch, "B": B, "T": T, "n_documents": B * T,
             "create_block_mask": create_block_mask, "flex_attention": flex_attention}
    exec(snippets()["Boundaries"], names)
    with PackedLoader(tokenizer, B, T, "train", data_dir=folder / "my_shards", epochs=1,
                      packing=packing) as loader:
        for inputs, _ in loader:
            q, k, v = torch.randn(3, 1, 2, B * T, 8)
            names |= {"loader": loader, "q": q, "k": k, "v": v}
            exec(snippets()["Flex attention"], names)
            cu_seqlens = names["cu_seqlens"]
            assert cu_seqlens.shape == (B * T + 1,) and cu_seqlens.dtype == torch.int32
            assert names["max_seqlen"] == int(cu_seqlens.diff().max())
            by_row = (x.view(2, B, T, 8).transpose(0, 1) for x in (q, k, v))
            want = dense_attention(*by_row, inputs).transpose(0, 1).reshape(q.shape)
            real = torch.tensor([b * T + i for b, pieces in enumerate(loader.pieces()) if pieces
                                 for i in range(min(T, end_of(pieces[-1])))], dtype=torch.int64)
            for output in (names["output"], varlen_attention(q, k, v, cu_seqlens)):
                assert not output.isnan().any()
                torch.testing.assert_close(output[:, :, real], want[:, :, real])
            check_positions(loader, names["positions"], seen)
            seen.update(empty=loader.pieces().count([]), short=len(real) < B * T)
    assert seen["first"] and seen["empty"] and seen["short"]
    assert bool(seen["later"]) == (packing != "bestfit")


def end_of(piece):
    return piece.offset + piece.stop - piece.start


def check_positions(loader, positions, seen):
    """Those of a piece are its tokens' offsets in the document; a repeated BOS has the one before."""
    for row, pieces in zip(positions.tolist(), loader.pieces(), strict=True):
        for piece in pieces:
            first = piece.offset - bool(piece.start and piece.offset)
            want = [*range(piece.start - piece.offset + first, piece.stop)]
            assert row[first:end_of(piece)] == want[:T - first]
            seen["later" if piece.start else "first"] += 1


def test_more_documents_than_expected_are_an_error(folder):
    names = {"np": np, "torch": torch}
    exec(snippets()["Boundaries"], names)
    with PackedLoader(tokenizer, B, 64, "train", data_dir=folder / "my_shards") as loader:
        next(loader)
        n = sum(len(pieces) + (end_of(pieces[-1]) < 64) for pieces in loader.pieces())
        assert n > 2 and names["boundaries"](loader, n)[0].shape == (n + 1,)
        with pytest.raises(ValueError, match=f"{n} documents in this batch, {n - 1} expected"):
            names["boundaries"](loader, n - 1)


def test_varlen_attn_takes_the_arguments_of_the_snippet():
    """It needs CUDA to run."""
    line = snippets()["Flex attention"].splitlines()[-1]
    names = {name: torch.zeros(1, 2, B * T, 8) for name in "qkv"}
    names |= {"cu_seqlens": torch.zeros(3), "max_seqlen": 9, "bind": inspect.signature(varlen_attn).bind}
    bound = eval(line.replace("# or varlen_attn(", "bind("), names).arguments
    assert bound["query"].shape == (B * T, 2, 8) and bound["window_size"] == (-1, 0)
    assert bound["cu_seq_k"] is names["cu_seqlens"] and bound["max_k"] == 9


# ---------------------------------------------------------------------------------------------------------
# nanoGPT: the diff, applied to its loop in miniature

NANOGPT = """
from model import GPTConfig, GPT
out_dir, eval_interval, eval_iters, batch_size, block_size, gradient_accumulation_steps = "out", 2, 3, B, T, 2
device, init_from = "cpu", "resume" if os.path.exists("out/ckpt.pt") else "scratch"
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    gradient_accumulation_steps //= dist.get_world_size()
master_process = not ddp or dist.get_rank() == 0
os.makedirs(out_dir, exist_ok=True)
def get_batch(split):
    x = y = torch.zeros(B, T, dtype=torch.int64)
    return x, y
iter_num, meta_vocab_size = 0, None
# model init
model = GPT(GPTConfig(vocab_size=meta_vocab_size))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if init_from == 'resume':
    checkpoint = torch.load("out/ckpt.pt")
    iter_num = checkpoint["iter_num"]
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint['optimizer'])
raw_model = model
if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
def estimate_loss():
    for split in ['train', 'val']:
        for k in range(eval_iters):
            X, Y = get_batch(split)
            print("eval", split, k, model(X, Y) and Y.tolist())
X, Y = get_batch('train') # fetch the very first batch
while True:
    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0 and master_process:
        estimate_loss()
        if True:
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                }
                torch.save(checkpoint, "out/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        note_rows(X, Y)
        loss = model(X, Y)
        # immediately async prefetch next batch while model is doing the forward pass on the GPU
        X, Y = get_batch('train')
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
"""
NANOGPT_MODEL = """
import torch
import torch.nn.functional as F
GPTConfig = dict
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        n = config["vocab_size"]
        self.embedding, self.head = torch.nn.Embedding(n, 8), torch.nn.Linear(8, n)
    def forward(self, inputs, targets):
        logits = self.head(self.embedding(inputs))
        if True:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return loss
"""
NANOGPT_TOKENIZER = """
import tokenizer as module
class WithSize(Tokenizer):
    def get_vocab_size(self):
        return 257
module.get_tokenizer = lambda path: WithSize()
"""


def apply_diff(diff, files):
    """Edit files, {name: lines}. A line "-..." deletes all lines up to the next one of the diff."""
    before = ""
    for line in diff.splitlines():
        if line.startswith("# "):
            lines, at = files[line.split()[1].rstrip(":")], 0
        elif line[0] == "+":
            lines.insert(at, line[1:])
            at += 1
        elif line.strip("- ") != "...":
            i = lines.index(line[1:], at)
            if before.strip("- ") == "...":
                del lines[at:i]
                i = at
            at = i + 1
            if line[0] == "-":
                del lines[i]
                at = i
        before = line


@pytest.mark.parametrize("ranks", [1, 2])
def test_nanogpt_resumes_with_the_next_rows(folder, ranks):
    """Killed after the batches that follow a checkpoint; every evaluation gets the same batches."""
    files = {"train.py": NANOGPT.splitlines(), "model.py": NANOGPT_MODEL.splitlines()}
    apply_diff(re.search(r"\*\*nanoGPT.*?```diff\n(.*?)```", text_of_loops(), re.S)[1], files)
    (folder / "model.py").write_text("\n".join(files["model.py"]))
    before = IMPORTS + NANOGPT_TOKENIZER + "sys.path.insert(0, '')"
    check(folder, script_of("", before, "\n".join(files["train.py"])), legs=(ranks, ranks, 1))
    lines = "\n".join(logs(folder, leg, 10**6) for leg in range(3)).splitlines()
    evaluated = [line for line in lines if line.startswith("eval ")]
    n = len(evaluated) // 6
    assert n >= 6 and evaluated == evaluated[:6] * n and any("-100" in line for line in evaluated), evaluated


# ---------------------------------------------------------------------------------------------------------
# nanochat: its loop around what the diff adds; dev/tests/test_nanochat.py has the rows

@pytest.mark.parametrize("ranks", [1, 2])
def test_nanochat_saves_the_state_before_the_batch_it_fetched(folder, ranks, monkeypatch):
    """With and without a process group: a resumed run begins with that batch."""
    diff = re.search(r"\*\*nanochat.*```diff\n(.*)```", text_of_loops(), re.S)[1].splitlines()
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
