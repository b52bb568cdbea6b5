"""
The snippets of dev/loops.md, taken from it and run as they stand, at toy size.

    python -m pytest dev/tests/test_loops.py             what is not installed is skipped
    python -m pytest dev/tests/test_loops.py -k jax

A loop runs in one or more processes, which are killed two batches after a save. It is started
again, also on another number of ranks. Its model must get the rows of a run that never stopped.
"""

import collections
import contextlib
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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from dataloader import PACKINGS, PackedLoader
from dataset import list_shards
from dev.nanochat import tokenizing_distributed_data_loader_with_state_bos_bestfit
from test_dataloader import BOS, ByteTokenizer, grouped, make, numbered, show_all, texts_of, write

LOOPS = Path(__file__).parents[1] / "loops.md"

def snippets(title, kind="python"):
    """The blocks of code in a section of loops.md."""
    sections = re.split("^## (.*)\n", "## First lines\n" + LOOPS.read_text(), flags=re.M)
    sections = sections[1:]
    text = dict(zip(sections[::2], sections[1::2], strict=True))[title]
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
    assert blocks, title
    return blocks

(FIRST_LINES,) = snippets("First lines")

# --------------------------------------------------------------------------------------------------
# What the snippets leave to their reader

B, T = 2, 16
SAVE_EVERY, KILL_AT = 4, 6    # batches of one process

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(257, 8)
        self.head = torch.nn.Linear(8, 257)

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

class Enough(Exception):
    pass

def run_here(code, n=1, **names):
    """Run code in this process until its n-th step; returns its names."""
    steps = itertools.count(1)

    def train_step(*arguments):
        if next(steps) == n:
            raise Enough

    names = {**names_of_the_reader(), "train_step": train_step, **names}
    with contextlib.suppress(Enough):
        exec(FIRST_LINES + code, names)
    return names

# --------------------------------------------------------------------------------------------------
# One runner for all loops

@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = numbered([(7 * i * i + 3) % 41 for i in range(240)])
    groups = grouped(texts, 20)
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
        _, port = free.getsockname()
    # Forks of a process that has only imported these: after a backward, here, torch forbids a fork.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["pytest", "hypothesis", "tiktoken", "pyarrow.parquet",
                                   "huggingface_hub", "torch.distributed.checkpoint"])
    ranks = []
    for rank in range(world_size):
        arguments = rank, world_size, leg, port, code
        process = server.Process(target=be_a_rank, args=arguments)
        process.start()
        ranks.append(process)
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
    texts = [path.read_text() for path in sorted(Path().glob("log-*"))]
    return "\n".join(text[-3000:] for text in texts)

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

def script(title, before=""):
    """before: what this snippet leaves to its reader."""
    return FIRST_LINES + textwrap.dedent(before) + "\n".join(snippets(title))

# --------------------------------------------------------------------------------------------------
# Loops

def test_own_loop(folder):
    check(script("Your own loop, with DDP"))

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
        before = f"{GRADIENT}\n    B = {4 // world_size}\n"
        run(script("Your own loop, with DDP", before), world_size, leg=world_size)
        Path("loader.json").unlink()
        log = Path(f"log-{world_size}-0").read_text()
        found.append([float(norm) for norm in re.findall("gradient (.*)", log)])
    of_two, of_one = found
    assert len(of_two) >= SAVE_EVERY
    assert of_two == pytest.approx(of_one), logs()

MESH = """
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group()
    device_type = "cpu"
"""

def test_tensor_parallel_ranks_get_the_same_rows(folder):
    check(script("Tensor parallel", MESH), worlds=(4, 2), copies=2)

CONTEXT = """
    def train_step(*parts):
        note(torch.stack(parts))
"""

def test_context_parallel_parts_make_the_batch(folder):
    """Sorted by position, the parts are the rows. Each part has an early and a late quarter."""
    run(script("Context parallel", MESH + CONTEXT), 4)
    want = rows_of_one_process(4)
    for data_rank in range(2):
        parts = []
        for rank in (2 * data_rank, 2 * data_rank + 1):
            first = Path(f"rows-0-{rank}").read_text().splitlines()[0]
            parts.append(np.array(json.loads(first)))
        inputs, targets, positions = np.concatenate(parts, axis=2)
        order = [*range(4), *range(12, 16), *range(4, 12)]
        assert positions.tolist() == B * [order]
        inputs = inputs[:, np.argsort(order)]
        targets = targets[:, np.argsort(order)]
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
    """Two stages of two ranks; resumed with a loader in the last stage alone."""
    want = rows_of_one_process(32)
    both, last = (script("Pipeline parallel", MESH + STAGES.format(readers=readers))
                  for readers in ([0, 1, 2, 3], [2, 3]))
    last = last.replace("(0, last)", "(last,)")
    for leg, (code, copies) in enumerate([(both, 2), (last, 1)]):
        batches = run(code + "dist.barrier()", 4, leg)
        for number in range(SAVE_EVERY):
            rows, want = want[:4], want[4:]
            assert sorted(batches[number]) == sorted(rows * copies), logs()

def test_dcp_loads_a_state_on_another_number_of_ranks(folder):
    check(script("FSDP2 and DCP"), worlds=(4, 3, 1), num_lanes=96)

def test_torchdata(folder):
    pytest.importorskip("torchdata")
    check(script("torchdata"), worlds=(1, 1, 1))

def test_accelerate(folder):
    pytest.importorskip("accelerate")
    check(script("Accelerate and Fabric"))

FABRIC = """
    import accelerate, lightning
    class Accelerator(lightning.Fabric):
        def __init__(self):
            super().__init__(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
            self.launch()
        prepare = lightning.Fabric.setup
        def save_state(self, path):
            self.save(f"{path}/model.pt", {"model": model})
        def load_state(self, path):
            self.load(f"{path}/model.pt", {"model": model})
    accelerate.Accelerator = Accelerator
"""

def test_fabric(folder):
    """The same snippet."""
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    check(script("Accelerate and Fabric", FABRIC))

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
    check(script("Lightning", LIGHTNING))

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
    last_checkpoint = max(glob.glob("out/checkpoint-*"), key=os.path.getmtime, default=None)
"""

def test_trainer(folder):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    check(script("transformers.Trainer", TRAINER))

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
"""

def test_jax(folder):
    pytest.importorskip("jax")
    check(script("JAX", JAX))

SRUN = """#!/bin/sh
for SLURM_PROCID in 0 1; do
    export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID SLURM_NTASKS=2
    "$@"
done
"""

def test_slurm_script_starts_each_rank(tmp_path):
    """Fakes of srun, scontrol and python are on the PATH."""
    variables = "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT $*"
    fakes = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n",
             "python": f"#!/bin/sh\necho {variables}\n"}
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (job,) = snippets("Slurm", "bash")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", job], env=environment, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "0 2 0 node1 29500 train.py",
        "1 2 1 node1 29500 train.py"]

def test_validation_always_begins_again(folder):
    (code,) = snippets("Validation")
    val = run_here(code)["Val"]()
    next(iter(val))
    assert show_all(val) == show_all(val) != []

# --------------------------------------------------------------------------------------------------
# Rows, fields and transforms

def test_rows_of_all_ranks_are_those_of_one(folder, monkeypatch):
    (code,) = snippets("Which documents were in which row")
    lines = {1: [], 2: []}
    for world_size, rank in [(2, 0), (2, 1), (1, 0)]:
        monkeypatch.setenv("RANK", f"{rank}")
        monkeypatch.setenv("WORLD_SIZE", f"{world_size}")
        names = run_here(code, n=1 + 8 // world_size)    # the last step is not written
        names["log"].close()
        lines[world_size] += Path(f"rows-{rank}.txt").read_text().splitlines()
    lines[2].sort(key=lambda line: int(line.split()[0]))
    assert len(lines[1]) == 16 and lines[1] == lines[2]
    assert re.fullmatch(r"0(\ttrain-\d\.parquet:\d+:\d+ \d+-\d+)+", lines[1][0])

def test_each_token_has_the_weight_of_its_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("scored", [["val"]])
    scores = [i % 4 / 4 + 0.25 for i in range(200)]
    table = pa.table({"text": numbered(200 * [9]), "score": scores})
    pq.write_table(table, "scored/train-0.parquet")
    (code,) = snippets("A loss weight for each token")
    names = run_here(code, model=lambda inputs: torch.zeros(B, T, 257))
    assert names["loss"].item() == pytest.approx(np.log(257))
    want = torch.zeros(B, T + 1)
    for row, pieces in enumerate(names["loader"].pieces()):
        for piece in pieces:
            end = piece.offset + piece.stop - piece.start
            want[row, piece.offset:end] = scores[piece.location.row]
    has_target = names["targets"] >= 0
    assert torch.equal(names["weight"], want[:, 1:] * has_target)

def test_a_random_transform_depends_on_the_document_and_the_epoch(folder):
    """It is the same for a folder that has moved, and loses no token."""
    (code,) = snippets("A random transform")
    names = run_here(code, fim_start=300, fim_end=301, fim_middle=302)
    transform, n_told, n_new = names["fill_in_the_middle"], 0, 0
    for location, text in texts_of("my_shards").items():
        ids = np.array([BOS, *text.encode()])
        moved = location._replace(path=f"/moved/{location.path}")
        told = transform(ids, location, 1)
        assert np.array_equal(told, transform(ids, moved, 1))
        n_new += not np.array_equal(told, transform(ids, location, 2))
        if len(told) > len(ids):
            n_told += 1
            bos, start, end, middle = np.split(told, np.flatnonzero(told >= 300))
            assert np.array_equal(ids, [*bos, *start[1:], *middle[1:], *end[1:]])
    assert 80 < n_told < 140 < n_new
    next(names["loader"])

def test_only_the_last_answer_has_a_loss(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    words = [("user", "Hi"), ("assistant", "Yo"), ("user", "Bye"), ("assistant", "So long")]
    messages = [{"role": role, "content": content} for role, content in words]
    write("my_chats", [200 * [json.dumps(messages)]], column="messages")
    (code,) = snippets("Chats")
    inputs, targets = next(run_here(code, tokenizer=tokenizer, T=40)["loader"])
    assert "<|user_start|>Hi<|user_end|>" in tokenizer.decode(inputs[0].tolist())
    answers = targets[targets >= 0].tolist()
    assert tokenizer.decode(answers) == B * "So long<|assistant_end|>"

# --------------------------------------------------------------------------------------------------
# Attention inside documents

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

        lengths, positions = [], []
        for b, row in enumerate(inputs.tolist()):
            text = "".join("|" if token == BOS else chr(token) for token in row)
            end = 0
            for document in re.findall(r"^[^|]+|\|+[^|]*", text):
                begin, end = end, end + len(document)
                lengths.append(end - begin)
                positions += range(end - begin)
                alone = [x[b, :, begin:end] for x in (q, k, v)]
                want = F.scaled_dot_product_attention(*alone, is_causal=True)
                torch.testing.assert_close(output[b, :, begin:end], want)
        lengths += (96 - len(lengths)) * [0]
        assert names["cu_seqlens"].diff().tolist() == lengths
        assert names["positions"].tolist() == positions
    names["n_documents"] = 5    # fewer than rows
    with pytest.raises(AssertionError, match="raise n_documents"):
        exec(varlen, names)

# --------------------------------------------------------------------------------------------------
# nanoGPT and nanochat

def apply_diff(diff, files):
    """Edit files, {name: lines}. A line "-..." deletes all lines up to the diff's next one."""
    deletes_until_next = False
    for line in diff.splitlines():
        sign, text = line[:1], line[1:]
        if sign == "#":
            name, _, _ = text.strip().partition(":")
            lines, at = files[name], 0
        elif line.strip("- ") == "...":
            deletes_until_next = True
        elif sign == "+":
            lines.insert(at, text)
            at += 1
        else:
            i = lines.index(text, at)
            if deletes_until_next:
                del lines[at:i]
                i, deletes_until_next = at, False
            if sign == "-":
                del lines[i]
            at = i + (sign == " ")

NANOGPT = """
import os
import torch
from model import GPTConfig, GPT
eval_interval, batch_size, block_size, gradient_accumulation_steps = 2, B, T, 2
if os.environ["WORLD_SIZE"] == "2":
    torch.distributed.init_process_group()
    gradient_accumulation_steps = 1
master_process = os.environ["RANK"] == "0"
device = "cpu"
def get_batch(split):
    x = y = torch.zeros(B, T, dtype=torch.int64)
    return x, y
iter_num = 0
# model init
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt")
    iter_num = checkpoint["iter_num"]
    optimizer.load_state_dict(checkpoint['optimizer'])
def estimate_loss():
    for split in ['train', 'val']:
        for k in range(3):
            X, Y = get_batch(split)
            print("eval", split, k, Y.tolist())
X, Y = get_batch('train') # fetch the very first batch
while True:
    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0 and master_process:
        estimate_loss()
        if iter_num > 0:
                checkpoint = {
                    'optimizer': optimizer.state_dict(),
                    "iter_num": iter_num,
                }
                torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        note(X)
        # immediately async prefetch next batch while model is doing the forward pass on the GPU
        X, Y = get_batch('train')
    iter_num += 1
"""
NANOGPT_LOSS = ("            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), "
                "targets.view(-1), ignore_index=-1)")
NANOGPT_TOKENIZER = """
import sys, types
import tokenizer as module
sys.modules["model"] = types.SimpleNamespace(GPT=None, GPTConfig=None)
tokenizer.get_vocab_size = lambda: 257
module.get_tokenizer = lambda path: tokenizer
"""

@pytest.mark.parametrize("world_size", [1, 2])
def test_nanogpt_resumes_with_the_next_rows(folder, world_size):
    """The diff is applied to its loop in miniature. Each evaluation gets the same batches."""
    files = {"train.py": NANOGPT.splitlines(), "model.py": [NANOGPT_LOSS]}
    (diff,) = snippets("nanoGPT", "diff")
    apply_diff(diff, files)
    assert files["model.py"][0].endswith("ignore_index=-100)")
    check(NANOGPT_TOKENIZER + "\n".join(files["train.py"]), worlds=(world_size, world_size, 1))
    lines = "".join(path.read_text() for path in Path().glob("log-*")).splitlines()
    evaluations = [line for line in lines if line.startswith("eval")]
    n = len(evaluations) // 6
    assert n > 2
    assert evaluations == evaluations[:6] * n

def test_tokens_of_nanogpt_become_shards(tmp_path, monkeypatch, tokenizer):
    """Each document of train.bin and val.bin once, with its end mark in front."""
    monkeypatch.chdir(tmp_path)
    tokenizer.save("my_tokenizer")
    bos = tokenizer.get_bos_token_id()
    documents = [tokenizer.encode(f"document {i}") for i in range(1500)]
    parts = {"train": documents[:1400], "val": documents[1400:]}
    for split, part in parts.items():
        ids = [[*document, bos] for document in part]
        np.concatenate(ids).astype(np.uint16).tofile(f"{split}.bin")
    (code,) = snippets("nanoGPT's tokens")
    exec(code, {})
    for split, part in parts.items():
        (shard,) = list_shards("my_gpt", split)
        groups = [shard.read(i).to_pylist() for i in range(len(shard.group_sizes))]
        found = [np.frombuffer(raw, shard.dtype) for raw in itertools.chain(*groups)]
        assert [ids.tolist() for ids in found] == [[bos, *ids] for ids in part]
    next(make("my_gpt", tokenizer=tokenizer))

@pytest.mark.parametrize("world_size", [1, 2])
def test_nanochat_saves_the_state_before_the_batch_it_fetched(folder, world_size, monkeypatch):
    """A resumed run begins with that batch. dev/tests/test_nanochat.py checks the rows."""
    (diff,) = snippets("nanochat", "diff")
    added = re.findall(r"^\+( .*(?:states|is_init).*)", diff, re.M)
    *gathering, saved = textwrap.dedent("\n".join(added)).splitlines()
    assert saved.strip() == '"dataloader_state_dict": states,'
    os.rename("my_shards", "base_data")
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(folder))
    monkeypatch.setenv("WORLD_SIZE", f"{world_size}")

    def start(rank, state=None):
        monkeypatch.setenv("RANK", f"{rank}")
        loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
            ByteTokenizer(), B, T, "train", device="cpu", resume_state_dict=state, buffer_size=5)
        return loader, next(loader)

    loaders, batches = zip(*map(start, range(world_size)), strict=True)
    for _ in range(3):
        before = [state for _, _, state in batches]
        batches = [next(loader) for loader in loaders]

    def all_gather_object(states, state):
        states[:] = before

    fake = SimpleNamespace(is_initialized=lambda: world_size > 1,
                           all_gather_object=all_gather_object)
    for rank, (inputs, targets, _) in enumerate(batches):
        names = {"dist": fake, "ddp_world_size": world_size, "state_before": before[rank]}
        exec("\n".join(gathering), names)
        states = json.loads(json.dumps(names["states"]))
        _, (resumed, resumed_targets, _) = start(rank, states)
        assert torch.equal(inputs, resumed) and torch.equal(targets, resumed_targets)
