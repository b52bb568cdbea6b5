r"""
Train a GPT on packed token batches: one process, one node or many, on CPUs or GPUs.

    python train.py                                      the demo: Python's own library, 2 to 3 minutes
    torchrun --standalone --nproc_per_node=2 train.py    the same rows and the same result, by 2 ranks
    torchrun --standalone --nproc_per_node=8 train.py --data DIR --out runs/d12 --resume auto
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py --data DIR --out /shared/d12 --resume auto
    python train.py --sample "def "                      text from the newest checkpoint

Rows, their order and the losses depend on the flags, not on where a run was stopped nor on the number of
ranks, as long as it divides --num_lanes. The trade-off: ranks agree on a few numbers once a step (0.2 ms, 2
ranks over gloo), and a checkpoint is the whole run in one file (12 bytes a parameter; 8 with Muon), written
while the training waits.
"""

import argparse
import contextlib
import functools
import glob
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import zipfile
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from dataloader import PackedLoader, cores_of_this_rank, merge_states, peak_memory
from dataset import find_data, list_shards, parquets_iter_batched
from tokenizer import RustBPETokenizer, find_tokenizer, get_token_bytes

# ---------------------------------------------------------------------------------------------------------
# Settings

FLAGS = [    # name, default on a CPU, default on CUDA, what it is
    ("depth", 2, 12, "layers; the model is 64 * depth wide"),
    ("seq_len", 256, 2048, "T, tokens in a row"),
    ("batch_size", 8, 256, "rows in an optimizer step, over all ranks"),
    ("micro_batch_size", 16, 32, "most rows in one forward: less memory, the same run"),
    ("steps", 1800, 4600, "optimizer steps of the whole run"),    # CUDA: about 18 tokens a parameter
    ("vocab_size", 2048, 32768, "of the tokenizer that is trained where there is none"),
    ("eval_every", 900, 250, "steps between evals"),
    ("eval_rows", 4096, 512, "val rows of each source in an eval, rounded up to whole batches"),
    ("save_every", 600, 500, "steps between checkpoints"),
    ("log_every", 50, 1, "steps between printed lines"),
]
# AdamW at 4e-3: the demo ends at 1.423 bits a byte, not 1.428, but 1 and 2 ranks part by 3e-4, not 2e-6.
LR = {"adamw": 2.5e-3, "muon": 0.02}
CHOICES = [
    ("optimizer", ["adamw", "muon"], "muon: AdamW for embedding and head (cpu adamw, cuda muon)"),
    ("packing", ["exactfit", "bestfit", "flat"], "how documents become rows"),
    ("tails", ["keep", "drop"], "exactfit: what lies beyond a row"),
    ("compile", ["auto", "on", "off"], "auto: on CUDA, where there is a C compiler"),
]
SAME_ON_RESUME = ("depth", "seq_len", "optimizer", "packing", "tails", "shuffle", "doc_mask", "num_lanes")


def parse_flags(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", choices=["cpu", "cuda"], default=device)
    for name, cpu, cuda, text in FLAGS:
        p.add_argument(f"--{name}", type=type(cpu), metavar="N", help=f"{text} (cpu {cpu}, cuda {cuda})")
    for name, choices, text in CHOICES:
        default = None if name == "optimizer" else choices[0]
        p.add_argument(f"--{name}", choices=choices, default=default, help=text)
    p.add_argument("--lr", type=float, metavar="N",
                   help="peak learning rate of the blocks' matrices (adamw 0.0025, muon 0.02)")
    p.add_argument("--data", nargs="+", metavar="PATH[:WEIGHT]",
                   help="folder or URI of shards; several take weights, shares of tokens (default: what "
                        "dataset.py downloaded, else the built-in corpus)")
    p.add_argument("--tokenizer", metavar="DIR", help="default: tokenizer.py's, else one trained on the data")
    p.add_argument("--shuffle", action="store_true", help="shuffle documents, by --seed")
    p.add_argument("--num_lanes", type=int, metavar="N",
                   help="world sizes that divide it give the same run (default: 8, or the smallest multiple "
                        "of 8 that the world size divides)")
    p.add_argument("--doc_mask", action="store_true", help="attention stays inside documents")
    p.add_argument("--seed", type=int, default=1, help="of the first weights and of --shuffle")
    p.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/DATE-TIME)")
    p.add_argument("--resume", default="none", metavar="auto|none|FILE",
                   help="auto: the newest whole checkpoint in --out, or of the newest run")
    p.add_argument("--max_minutes", type=float, metavar="N", help="then save and leave")
    p.add_argument("--profile", metavar="A:B", help="trace steps A to B-1 into the run's folder")
    p.add_argument("--sample", metavar="PROMPT", help="only generate, from the newest checkpoint")
    return complete(p.parse_args(argv), p)


def complete(flags, p):
    """Fill in the defaults of the device; one line and status 2 for what cannot be."""
    cuda = flags.device == "cuda"
    for name, *defaults, _ in [*FLAGS, ("optimizer", "adamw", "muon", "")]:
        if getattr(flags, name) is None:
            setattr(flags, name, defaults[cuda])
    flags.lr = LR[flags.optimizer] if flags.lr is None else flags.lr
    for name, value in vars(flags).items():
        if name != "seed" and type(value) in (int, float) and not value > 0:
            p.error(f"--{name} {value}: expected a number above 0")
    if cuda and not torch.cuda.is_available():
        p.error("--device cuda: torch sees no GPU; leave --device out to train on the CPU")
    if flags.resume not in ("auto", "none") and not os.path.isfile(flags.resume):
        p.error(f"--resume {flags.resume}: no such file; expected auto, none or a checkpoint")
    try:
        flags.sources = parse_data(flags.data or [])
    except ValueError as error:
        p.error(str(error))
    steps = re.fullmatch(r"(\d+):(\d+)", flags.profile or "0:1")
    if not steps or int(steps[1]) >= int(steps[2]):
        p.error(f"--profile {flags.profile}: expected A:B, two steps, the first one below the second")
    return flags


def parse_data(specs):
    """["a"] -> {"a": 1.0};  ["a:0.7", "s3://b/c:0.3"] -> {"a": 0.7, "s3://b/c": 0.3};  [] -> {}"""
    sources = {}
    for spec in specs:
        path, _, weight = spec.rpartition(":")
        try:
            weight = float(weight)
        except ValueError:
            path, weight = spec, 1.0 if len(specs) == 1 else 0.0
        if not path or not 0 < weight < math.inf or path in sources:
            raise ValueError(f"--data {spec}: expected PATH, or several of PATH:WEIGHT, each path once and "
                             "each weight above 0, as in --data web:0.7 code:0.3")
        sources[path] = weight
    return sources


# ---------------------------------------------------------------------------------------------------------
# Ranks: all that knows of other processes. Alone, each function gives back what it was given

def start_ranks(device):
    """-> rank, local rank, world size. Under torchrun a group is made on CPUs too: else N separate models."""
    if "RANK" not in os.environ:
        return 0, 0, 1
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Tensors in CPU memory (flags, states) go over gloo, without a wait for the GPU; the rest over nccl.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    return dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()


def sum_over_ranks(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def largest_of_ranks(number):
    """An int; also where all ranks wait for each other."""
    if not dist.is_initialized():
        return number
    number = torch.tensor(number)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def gather_json(value):
    """All ranks' values, on every rank. Bytes, not objects: nothing is ever unpickled."""
    if not dist.is_initialized():
        return [value]
    data = json.dumps(value).encode()
    data = torch.frombuffer(bytearray(data.ljust(largest_of_ranks(len(data)))), dtype=torch.uint8)
    parts = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, data)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def on_some_ranks(mine, work):
    """
    work() where `mine`, while the others wait. -> what each rank made of it. Where it fails, that rank raises
    and so tells why; the others leave without a word.
    """
    result = error = None
    try:
        result = work() if mine else None
    except (ValueError, OSError) as caught:
        error = caught
    found = gather_json([result, error is not None])
    if error:
        raise error
    if any(failed for _, failed in found):
        sys.exit(1)
    return [result for result, _ in found]


class StopRequest:
    """SIGTERM, SIGINT, SIGUSR1 or the clock: finish the step, save, leave with status 0."""

    def __init__(self, minutes):
        self.ends, self.why, self.since = time.time() + 60 * (minutes or math.inf), "", 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number, frame):
        # torchrun passes a Ctrl-C on to ranks that the terminal has told already: that is no second one.
        if number == signal.SIGINT and self.why and time.time() > self.since + 1:
            os._exit(130)
        self.why, self.since = self.why or signal.Signals(number).name, self.since or time.time()

    def agreed(self):
        """Asked by all ranks together: once a step, once a batch of an eval."""
        if time.time() > self.ends:
            self.why = self.why or "--max_minutes"
        return bool(largest_of_ranks(int(self.why != "")))


# ---------------------------------------------------------------------------------------------------------
# Model: RoPE, QK-norm, RMSNorm without parameters, squared ReLU, no biases, untied embedding and head

def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):    # x: (B, heads, T, head_dim); cos, sin: (T, head_dim / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@functools.cache
def rope_tables(T, head_dim, device, dtype):    # (T, head_dim / 2) each
    angles = torch.outer(torch.arange(T), 10_000 ** -(torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@functools.cache
def compiled_block_mask():
    return torch.compile(create_block_mask, dynamic=False)


def document_mask(inputs, bos, flex):
    """Causal and inside documents: dense, (B, 1, T, T), or flex attention's BlockMask; fixed shapes both."""
    B, T = inputs.shape
    document = (inputs == bos).cumsum(1)
    if flex:
        def visible(b, h, q, k):
            return (q >= k) & (document[b, q] == document[b, k])
        return compiled_block_mask()(visible, B, None, T, T, device=inputs.device)
    causal = torch.ones(T, T, dtype=torch.bool, device=inputs.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


class Block(nn.Module):
    def __init__(self, width, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.attention_out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for matrix in (self.q, self.k, self.v, self.up):
            nn.init.uniform_(matrix.weight, -(3 / width) ** 0.5, (3 / width) ** 0.5)
        for matrix in (self.attention_out, self.down):    # a block begins as the identity
            nn.init.zeros_(matrix.weight)

    def forward(self, x, cos, sin, mask):    # x: (B, T, width)
        B, T, width = x.shape
        n = norm(x)
        q, k, v = (f(n).view(B, T, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (rotate(norm(z), cos, sin).type_as(v) for z in (q, k))
        if mask is None or isinstance(mask, torch.Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            y = flex_attention(q, k, v, block_mask=mask)
        x = x + self.attention_out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Head(nn.Module):
    def __init__(self, width, padded_vocab):
        super().__init__()
        self.out = nn.Linear(width, padded_vocab, bias=False)
        nn.init.zeros_(self.out.weight)    # the first loss is ln(padded_vocab)

    def forward(self, x, targets):
        logits = self.out(norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")


class GPT(nn.Module):
    """inputs, targets: int64 (B, T) -> nats of each target, (B * T,), 0 where it is -100; without: logits."""

    def __init__(self, depth, vocab_size):
        super().__init__()
        width, padded_vocab = 64 * depth, -(-vocab_size // 64) * 64
        self.head_dim = 128 if depth % 2 == 0 and depth >= 8 else 64
        self.embedding = nn.Embedding(padded_vocab, width)
        self.blocks = nn.ModuleList(Block(width, self.head_dim) for _ in range(depth))
        self.head = Head(width, padded_vocab)

    def forward(self, inputs, targets=None, mask=None):
        x = norm(self.embedding(inputs))
        if x.is_cuda:
            x = x.bfloat16()    # autocast alone would leave what runs past the blocks in fp32
        cos, sin = rope_tables(inputs.size(1), self.head_dim, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(x, targets)

    def flops_per_token(self, T):
        """Forward and backward, counted as in PaLM's appendix B: causal attention as if it were full."""
        matrices = sum(p.numel() for p in (*self.blocks.parameters(), *self.head.parameters()))
        return 6 * matrices + 12 * len(self.blocks) * T * self.embedding.embedding_dim


def peak_flops():
    """Dense bf16 peak of this GPU by its data sheet; None where it is not known."""
    name = torch.cuda.get_device_name()
    known = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}
    return next((flops for chip, flops in known.items() if chip in name), None)


# ---------------------------------------------------------------------------------------------------------
# Optimizer

class ShardedMuon:
    """
    torch.optim.Muon over this rank's share of the matrices; each rank then sends out those it has updated.

    ZeroRedundancyOptimizer does as much, but collects its state by unpickling. state_dict() is
    {name: momentum}, the same for every world size.
    """

    def __init__(self, named, lr):
        self.named = sorted(named, key=lambda item: -item[1].numel())    # dealt by size, in even shares
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = [p for _, p in self.named[self.rank::self.world]]
        self.muon = torch.optim.Muon([{"params": mine}], lr=lr, weight_decay=0.0)    # torch's default is 0.1
        self.param_groups = self.muon.param_groups

    def step(self):
        self.muon.step()
        self._send_out([p.data for _, p in self.named])

    def _send_out(self, tensors):
        if self.world > 1:
            for work in [dist.broadcast(t, i % self.world, async_op=True) for i, t in enumerate(tensors)]:
                work.wait()

    def state_dict(self):
        """Called by all ranks together."""
        momenta = {name: self.muon.state[p].get("momentum_buffer", torch.zeros_like(p))
                   for name, p in self.named}
        self._send_out(list(momenta.values()))
        return momenta

    def load_state_dict(self, momenta):
        for name, p in self.named[self.rank::self.world]:
            self.muon.state[p]["momentum_buffer"] = momenta[name].to(p.device, copy=True)


def make_optimizers(model, kind, lr):
    """
    Muon by module: ndim == 2 would catch embedding and head as well. Rates and betas of embedding and head
    with Muon, and their scale by width, are nanochat's (scripts/base_train.py).
    """
    muon, scale = kind == "muon", (model.embedding.embedding_dim / 768) ** -0.5
    groups = [{"params": list(model.embedding.parameters()), "lr": (0.3 if muon else 0.02) * scale},
              {"params": list(model.head.parameters()), "lr": 0.004 * scale}]
    matrices = list(model.blocks.named_parameters())
    if not muon:
        groups.append({"params": [p for _, p in matrices], "lr": lr})
    betas = (0.8, 0.95) if muon else (0.9, 0.95)
    optimizers = [torch.optim.AdamW(groups, betas=betas, eps=1e-10, weight_decay=0.0, fused=True)]
    if muon:
        optimizers.append(ShardedMuon(matrices, lr))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rates(optimizers, step, steps):
    """Warm-up for 3 % of the steps, constant, linear decay to 0 in the last 40 %. -> the share of the peak"""
    share = min(1.0, (step + 1) / max(1.0, 0.03 * steps), (steps - step) / (0.4 * steps))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
            if "momentum" in group:    # Muon's warm-up, as in modded-nanogpt
                group["momentum"] = 0.85 + 0.10 * min(1.0, step / 300)
    return share


# ---------------------------------------------------------------------------------------------------------
# The yardstick and the sample

@functools.cache
def zlib_bits_per_byte(path, n_bytes):
    """Level 9, each val document by itself, as many bytes of them as the val rows hold; None without text."""
    if list_shards(path, "val")[0].kind == "tokens":
        return None
    seen = packed = 0
    for text in (text for batch in parquets_iter_batched("val", data_dir=path) for text in batch):
        if seen >= n_bytes:
            break
        data = text.encode()
        seen, packed = seen + len(data), packed + len(zlib.compress(data, 9))
    return 8 * packed / seen


@torch.no_grad()
def generate(model, tokenizer, T, prompt, n_tokens, temperature=0.8, top_k=50):
    """Sampled with a random state of its own. All forwards are (1, T): what stands behind is not seen."""
    device, bos = model.head.out.weight.device, tokenizer.get_bos_token_id()
    ids, random = [bos, *tokenizer.encode(prompt)], torch.Generator().manual_seed(1)
    for _ in range(n_tokens):
        seen = ids[-T:]
        logits = model(torch.tensor([seen + [bos] * (T - len(seen))], device=device))[0, len(seen) - 1].cpu()
        best, at = logits[:tokenizer.get_vocab_size()].topk(top_k)
        ids.append(at[torch.multinomial(F.softmax(best / temperature, 0), 1, generator=random)].item())
        if ids[-1] == bos:
            break
    return tokenizer.decode([i for i in ids if i != bos])


# ---------------------------------------------------------------------------------------------------------
# Checkpoints: a file that is whole or not there

def list_checkpoints(folder):
    return sorted(glob.glob(os.path.join(glob.escape(folder), "step_*.pt")))


def checkpoint_path(folder, step):
    return os.path.join(folder, f"step_{step:07d}.pt")


def save_checkpoint(folder, step, content):
    """Written beside, flushed, renamed; then all older ones but the newest go. -> what failed, or None"""
    path = checkpoint_path(folder, step)
    try:
        with open(path + ".tmp", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        for older in [other for other in list_checkpoints(folder) if other < path][:-1]:
            os.remove(older)
    except (OSError, RuntimeError) as error:    # torch makes a RuntimeError of a full disk
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        free = shutil.disk_usage(folder).free / 1e9
        return f"{free:.3f} GB free in {folder}: {str(error).splitlines()[0]}"
    return None


def what_is_torn(path):
    """Of a checkpoint, or None. torch.load would not look at the checksums of its records."""
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
            return record and f"the checksum of {record} is wrong"
    except Exception as error:    # a torn file can raise almost anything
        return f"{type(error).__name__}: {error}"


def check_whole(path):
    if torn := what_is_torn(path):
        raise ValueError(f"{path} is torn ({torn}); take the one before it")
    return path


def newest_checkpoint(folder):
    """The newest whole one, or None where there is none at all; warns of each torn one that it passes."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        if not (torn := what_is_torn(path)):
            return path
        print(f"warning: {path} is torn ({torn}); trying the one before it", flush=True)
    if paths:
        raise ValueError(f"no checkpoint in {folder} is whole; start anew with another --out")
    return None


def newest_run():
    """The folder in runs/ with the newest checkpoint, or None."""
    paths = [path for folder in glob.glob("runs/*") for path in list_checkpoints(folder)]
    return os.path.dirname(max(paths, key=os.path.getmtime)) if paths else None


def choose_run(flags):
    """-> the run's folder, made, and the checkpoint to go on from or None. Asked on rank 0 only."""
    auto, named = flags.resume == "auto", os.path.isfile(flags.resume)
    known = os.path.dirname(os.path.abspath(flags.resume)) if named else newest_run() if auto else None
    out = flags.out or known or time.strftime("runs/%Y%m%d-%H%M%S")
    os.makedirs(out, exist_ok=True)
    for left_over in glob.glob(os.path.join(glob.escape(out), "*.tmp")):
        os.remove(left_over)
    if named:
        newest = max(map(os.path.basename, list_checkpoints(out)), default="")
        if newest > os.path.basename(flags.resume):
            raise ValueError(f"{out} holds {newest}, which is newer than {flags.resume}; resume from that, "
                             "or choose another --out")
        return out, check_whole(flags.resume)
    if not auto and list_checkpoints(out):
        raise ValueError(f"{out} holds checkpoints; go on with --resume auto, or choose another --out")
    return out, newest_checkpoint(out) if auto else None


def load_checkpoint(path):
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def refuse_other_flags(saved, flags, path):
    for name in SAME_ON_RESUME:
        if saved[name] != getattr(flags, name):
            same = f"--{name} {saved[name]}"
            if isinstance(saved[name], bool):    # a switch
                same = f"--{name}" if saved[name] else f"no --{name}"
            raise ValueError(f"--{name} is {getattr(flags, name)}, in {path} it was {saved[name]}; resume "
                             f"with {same}, or start anew: --resume none and another --out")


# ---------------------------------------------------------------------------------------------------------
# What is printed and kept

class Log:
    """Rank 0's: lines on the screen; JSON lines, TensorBoard and a plot, if installed, in its folder."""

    def __init__(self, folder, first):
        self.folder, self.losses, self.board, self.failed = folder, [], None, False
        self.write(first)
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(folder)
        print("    step      loss        lr    norm      tok/s    MFU   ms/step   wait ms   mem GB      left")

    def write(self, record):
        try:
            with open(os.path.join(self.folder, "log.jsonl"), "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:    # a full disk stops no training, and is told once
            if not self.failed:
                print(f"warning: {self.folder}/log.jsonl: {error}; lines will be missing in it", flush=True)
            self.failed = True

    def step(self, r, left, show):
        self.write(r)
        self.losses.append((r["step"], r["loss"]))
        for name in ("loss", "lr", "norm", "tokens_per_s") if self.board else ():
            self.board.add_scalar(name, r[name], r["step"])
        if show:
            mfu = f"{r['mfu']:7.1%}" if r["mfu"] else "      -"
            print(f"{r['step']:8d}{r['loss']:10.4f}{r['lr']:10.6f}{r['norm']:8.3f}{r['tokens_per_s']:11,.0f}"
                  f"{mfu}{r['ms']:10.1f}{r['wait_ms']:10.1f}{r['memory_gb']:9.2f}"
                  f"{int(left) // 60:7d}m{int(left) % 60:02d}s", flush=True)

    def close(self):
        if self.board:
            self.board.close()
        with contextlib.suppress(ImportError, OSError):
            from matplotlib.figure import Figure
            figure = Figure()
            axes = figure.subplots()
            axes.plot([step for step, _ in self.losses], [loss for _, loss in self.losses])
            axes.set(xlabel="step", ylabel="loss, nats a token")
            figure.savefig(os.path.join(self.folder, "loss.png"))


# ---------------------------------------------------------------------------------------------------------
# The run

class Run:
    """Set up in the order of the recipe, then `go`."""

    def __init__(self, flags):
        self.flags, self.cuda, self.step, self.profiler = flags, flags.device == "cuda", 0, None
        self.rank, self.local_rank, self.world = start_ranks(flags.device)
        self.stop = StopRequest(flags.max_minutes)
        self.set_up_device()
        self.out, self.checkpoint = on_some_ranks(self.rank == 0, lambda: choose_run(flags))[0]
        saved = load_checkpoint(self.checkpoint) if self.checkpoint else None
        self.set_up_lanes(saved)
        self.set_up_data()
        self.set_up_model()
        if saved:
            self.restore(saved)
        self.ddp = self.model
        if dist.is_initialized():
            self.ddp = DistributedDataParallel(self.model, [self.local_rank] if self.cuda else None,
                                               gradient_as_bucket_view=True)

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def set_up_device(self):
        if not self.cuda:
            self.device, self.peak = torch.device("cpu"), None
            torch.set_num_threads(cores_of_this_rank())
            return
        self.device, self.peak = torch.device("cuda", self.local_rank), peak_flops()
        torch.set_float32_matmul_precision("high")
        if self.flags.doc_mask:    # cuDNN's backward: NaN with a mask where T % 128 == 64 (pytorch #196678)
            torch.backends.cuda.enable_cudnn_sdp(False)

    def set_up_lanes(self, saved):
        """Who makes which rows; and that the flags are those of the checkpoint."""
        flags = self.flags
        if saved:
            flags.num_lanes = flags.num_lanes or saved["flags"]["num_lanes"]
            flags.tokenizer = flags.tokenizer or saved["flags"]["tokenizer"]
            refuse_other_flags(saved["flags"], flags, self.checkpoint)
        flags.num_lanes = flags.num_lanes or math.lcm(8, self.world)
        if flags.batch_size % self.world:
            raise ValueError(f"--batch_size {flags.batch_size} rows cannot be shared evenly by {self.world} "
                             f"ranks; try --batch_size {-(-flags.batch_size // self.world) * self.world}")
        rows = flags.batch_size // self.world
        self.micro = max(n for n in range(1, min(rows, flags.micro_batch_size) + 1) if rows % n == 0)
        self.accumulate = rows // self.micro

    def set_up_data(self):
        flags = self.flags
        self.sources = flags.sources or {find_data(): 1.0}
        folders = on_some_ranks(self.local_rank == 0, lambda: find_tokenizer(    # one a node may train it
            flags.tokenizer, self.sources, flags.vocab_size)[1])
        flags.tokenizer = folders[self.rank - self.local_rank]
        self.tokenizer = RustBPETokenizer.from_directory(flags.tokenizer)
        self.token_bytes = get_token_bytes(self.tokenizer)
        self.loader = PackedLoader(
            self.tokenizer, self.micro, flags.seq_len, "train", packing=flags.packing, tails=flags.tails,
            data_dir=self.sources, num_lanes=flags.num_lanes, device=self.device,
            shuffle_seed=flags.seed if flags.shuffle else None)
        self.val = {path: self.val_batches(path) for path in self.sources}

    def val_batches(self, path):
        """
        This rank's part of a source's first val rows, kept for the whole run. Packed by exactfit whatever
        --packing says: every token once, and evals of different packings can be compared.
        """
        n = -(-self.flags.eval_rows // self.flags.batch_size) * self.accumulate
        loader = PackedLoader(self.tokenizer, self.micro, self.flags.seq_len, "val", data_dir=path,
                              num_lanes=self.flags.num_lanes, epochs=1)
        batches = [batch for _, batch in zip(range(n), loader, strict=False)]
        loader.close()
        return batches

    def set_up_model(self):
        flags = self.flags
        torch.manual_seed(flags.seed)
        self.model = GPT(flags.depth, self.tokenizer.get_vocab_size()).to(self.device)
        self.compiled = flags.compile == "on" or (
            flags.compile == "auto" and self.cuda and any(map(shutil.which, ("cc", "gcc", "clang"))))
        if self.compiled:
            torch._dynamo.config.optimize_ddp = False    # a block is compiled by itself: nothing to split
            for part in (*self.model.blocks, self.model.head):
                part.compile(dynamic=False)
        self.flops = self.model.flops_per_token(flags.seq_len)
        self.optimizers = make_optimizers(self.model, flags.optimizer, flags.lr)

    def restore(self, saved):
        if saved["tokenizer"] != self.tokenizer.fingerprint():
            raise ValueError(f"{self.flags.tokenizer} is not the tokenizer of {self.checkpoint}; pass "
                             f"--tokenizer {saved['flags']['tokenizer']}")
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            peaks = [group["peak_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak_lr"] = peak    # --lr may be another one now
        self.loader.load_state_dict(json.loads(saved["loader"]))
        self.step = saved["step"]
        self.say(f"resumed from {self.checkpoint}: step {self.step}")

    def forward(self, net, inputs, targets):
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        bos, flex = self.tokenizer.get_bos_token_id(), self.cuda and self.compiled
        mask = document_mask(inputs, bos, flex) if self.flags.doc_mask else None
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cuda):
            return net(inputs, targets, mask)

    def train_step(self, batches):
        """-> loss, the mean over the tokens of all ranks and micro-batches; gradient norm; share of the lr"""
        share = set_rates(self.optimizers, self.step, self.flags.steps)
        n_tokens = sum_over_ranks(sum((targets >= 0).sum() for _, targets in batches))
        nats = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            wait = i < len(batches) - 1 and self.ddp is not self.model    # with summing over the ranks
            with self.ddp.no_sync() if wait else contextlib.nullcontext():    # the forward inside it too
                loss = self.forward(self.ddp, *batch).sum()
                (loss * (self.world / n_tokens)).backward()    # DDP divides by the world size
            nats += loss.detach()
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return (sum_over_ranks(nats) / n_tokens).item(), gradient_norm.item(), share    # waits for the GPU

    @torch.no_grad()
    def bits_per_byte(self, batches):
        """Nats of the targets that stand for bytes, and these bytes; None where the run is asked to stop."""
        totals = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in batches:
            if self.stop.agreed():
                return None
            n_bytes = self.token_bytes[targets.clamp(min=0)].where(targets >= 0, 0).flatten()
            nats = self.forward(self.model, inputs, targets).cpu().double()
            totals += torch.stack([nats[n_bytes > 0].sum(), n_bytes.sum()])
        return sum_over_ranks(totals).tolist()

    def evaluate(self):
        """Print bits per byte of each source, beside zlib's, and over all. -> False if asked to stop"""
        all_nats = all_bytes = 0
        for path, batches in self.val.items():
            found = self.bits_per_byte(batches)
            if found is None:
                return False
            nats, n_bytes = found
            all_nats, all_bytes = all_nats + nats, all_bytes + n_bytes
            if self.rank == 0:
                r = {"step": self.step, "val_bpb": nats / n_bytes / math.log(2), "val_bytes": n_bytes,
                     "zlib_bpb": zlib_bits_per_byte(path, n_bytes), "source": path}
                self.log.write(r)
                self.say(f"step {self.step}: val {r['val_bpb']:.4f} bits per byte"
                         + (f" of {path}" if len(self.val) > 1 else "")
                         + (f"; zlib -9: {r['zlib_bpb']:.4f}" if r["zlib_bpb"] else ""))
        if len(self.val) > 1:
            bpb = all_nats / all_bytes / math.log(2)
            self.say(f"step {self.step}: val {bpb:.4f} bits per byte over all sources")
            if self.rank == 0:
                self.log.write({"step": self.step, "val_bpb": bpb, "val_bytes": all_bytes, "source": "all"})
        if self.rank == 0:
            eager = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
            with eager, torch.autocast("cuda", torch.bfloat16, enabled=self.cuda):
                text = generate(self.model, self.tokenizer, self.flags.seq_len, "def ", 64)
            self.say("sample: " + text.replace("\n", "\n        "))
        return True

    def save(self):
        """All ranks together. A save that fails leaves the last good one and is tried again at the next."""
        states, parts = gather_json(self.loader.state_dict()), [o.state_dict() for o in self.optimizers]
        failed = self.rank == 0 and save_checkpoint(self.out, self.step, {
            "step": self.step, "model": self.model.state_dict(), "optimizers": parts,
            "loader": json.dumps(merge_states(states)), "flags": vars(self.flags),
            "tokenizer": self.tokenizer.fingerprint()})
        if failed:
            self.say(f"warning: step {self.step} could not be saved ({failed}); the last good checkpoint "
                     f"stays: {(list_checkpoints(self.out) or ['none yet'])[-1]}")
        return not largest_of_ranks(int(bool(failed)))

    def report_not_finite(self, loss, gradient_norm, before):
        """The loader's state before the batch names its documents; loaded, next() gives it again."""
        states = gather_json(before)
        if self.rank == 0:
            path = os.path.join(self.out, f"not_finite_{self.step:07d}.json")
            with open(path, "w") as file:
                json.dump(merge_states(states), file)
            at = "; ".join(f"rank {rank}: epoch {s['epoch']}, shard {s['pq_idx']}, row group {s['rg_idx']}"
                           for rank, s in enumerate(states))
            self.say(f"error: step {self.step}: loss {loss}, gradient norm {gradient_norm}; no checkpoint "
                     f"was touched. The batch begins at row {states[0]['rows']} ({at}); the loader's state "
                     f"before it: {path}")
        return 1

    def trace(self, at_end=False):
        """--profile A:B, of rank 0"""
        first, _, last = (self.flags.profile or "").partition(":")
        if self.rank == 0 and str(self.step) == first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler and (str(self.step) == last or at_end):
            self.profiler.stop()
            self.profiler.export_chrome_trace(os.path.join(self.out, "trace.json"))
            self.profiler = None

    def announce(self):
        """What is known before the first step."""
        flags, n = self.flags, sum(p.numel() for p in self.model.parameters())
        if self.rank == 0:
            self.say(f"model: {n:,} parameters, depth {flags.depth}; tokenizer: "
                     f"{self.tokenizer.get_vocab_size():,} tokens, {flags.tokenizer}")
            self.say(f"a step: {flags.batch_size} rows of {flags.seq_len} tokens ({self.world} ranks x "
                     f"{self.accumulate} micro-batches x {self.micro} rows)")
            self.say(f"data: {' '.join(self.sources)}; run: {self.out}")
            self.log = Log(self.out, {
                "flags": vars(flags), "python": sys.version.split()[0], "torch": torch.__version__,
                "parameters": n, "world_size": self.world, "from_step": self.step})

    def go(self):
        """-> exit status"""
        flags, first, times, stopping = self.flags, self.step, [], False
        self.announce()
        saved_at = self.step if self.checkpoint == checkpoint_path(self.out, self.step) else None
        if self.step >= flags.steps:    # a finished run, started once more
            self.evaluate()
        while self.step < flags.steps and not stopping:
            self.trace()
            began = time.perf_counter()
            before = self.loader.state_dict()
            batches = [next(self.loader) for _ in range(self.accumulate)]
            waited = time.perf_counter() - began
            loss, gradient_norm, share = self.train_step(batches)
            if not math.isfinite(loss + gradient_norm):
                return self.report_not_finite(loss, gradient_norm, before)
            times.append(time.perf_counter() - began)
            if self.rank == 0:
                self.log_step(loss, gradient_norm, share, waited, times)
            self.step += 1
            stopping = self.stop.agreed()
            if not stopping and (self.step % flags.eval_every == 0 or self.step == flags.steps):
                stopping = not self.evaluate()
            if self.step % flags.save_every == 0 and not stopping and self.save():
                saved_at = self.step
        self.trace(at_end=True)
        saved = saved_at == self.step or self.save()
        self.loader.close()
        how = "done" if self.step >= flags.steps else f"stopped ({self.stop.why or 'by another rank'})"
        where = f"checkpoint: {checkpoint_path(self.out, self.step)}" if saved else "this step is NOT saved"
        self.say(f"{how} at step {self.step} of {flags.steps}; {self.step - first} steps took "
                 f"{sum(times):.0f} s; {where}")
        if self.rank == 0:
            self.log.close()
        return 0 if saved else 1

    def log_step(self, loss, gradient_norm, share, waited, times):
        flags, seconds = self.flags, times[-1]
        per_second = flags.batch_size * flags.seq_len / seconds
        usual = sorted(times[-50:])[len(times[-50:]) // 2]
        memory = torch.cuda.max_memory_allocated() if self.cuda else peak_memory()
        left = min((flags.steps - self.step - 1) * usual, max(0.0, self.stop.ends - time.time()))
        self.log.step({"step": self.step, "loss": loss, "lr": flags.lr * share, "norm": gradient_norm,
                       "tokens_per_s": per_second, "ms": 1e3 * seconds, "wait_ms": 1e3 * waited,
                       "mfu": self.peak and per_second * self.flops / (self.peak * self.world),
                       "memory_gb": memory / 1e9},
                      left, self.step % flags.log_every == 0 or self.step == flags.steps - 1)


def print_sample(flags):
    folder = flags.out or newest_run()
    named = os.path.isfile(flags.resume)
    path = check_whole(flags.resume) if named else folder and newest_checkpoint(folder)
    if not path:
        raise ValueError("no checkpoint in --out or runs/ yet; train one first: python train.py")
    saved = load_checkpoint(path)
    tokenizer = RustBPETokenizer.from_directory(saved["flags"]["tokenizer"])
    if tokenizer.fingerprint() != saved["tokenizer"]:
        raise ValueError(f"{saved['flags']['tokenizer']} is no longer the tokenizer of {path}; put it back")
    model = GPT(saved["flags"]["depth"], tokenizer.get_vocab_size())
    model.load_state_dict(saved["model"])
    with torch.autocast("cuda", torch.bfloat16, enabled=flags.device == "cuda"):
        print(generate(model.to(flags.device), tokenizer, saved["flags"]["seq_len"], flags.sample, 200))


def main():
    flags = parse_flags()
    try:
        if flags.sample is not None:
            return print_sample(flags)
        run = Run(flags)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        status = run.go()
    except OSError as error:    # a shard that is missing or torn, say
        sys.exit(f"error: {error}; then go on from the last checkpoint: --out {run.out} --resume auto")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {str(error).splitlines()[0]}\nLower --micro_batch_size (now {run.micro} rows): the "
                 "same run in less memory. Then --seq_len or --depth, which change it.")
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
