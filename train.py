r"""
Train a GPT on packed token batches: one process, one node or many, on CPUs or GPUs.

    python train.py                                      the demo: Python's own library, 4 minutes
    torchrun --standalone --nproc_per_node=2 train.py    the same rows and the same result, by 2 ranks
    torchrun --standalone --nproc_per_node=8 train.py --data DIR --out runs/d12 --resume auto
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py --data DIR --out /shared/d12 --resume auto
    python train.py --sample "def "                      text from the newest checkpoint
    python train.py --eval FILE --data DIR               bits per byte of a checkpoint on other data
    python train.py --init FILE --data DIR               a new run that begins with its weights

Rows, their order and the losses (up to rounding; on one CPU, bit for bit) depend on the flags, not on where a
run was stopped nor on the number of ranks, as long as it divides --num_lanes. The trade-off: ranks agree on a
few numbers once a step (0.2 ms, 2 ranks over gloo), and a checkpoint is the whole run in one file (12 bytes a
parameter; 8 with Muon), written by a thread from a copy in memory.
"""

import argparse
import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import sysconfig
import threading
import time
import zipfile
import zlib
from collections import Counter
from datetime import datetime, timedelta
from typing import Any, NamedTuple

# Threads that wait for each other sleep: on shared cores spinning took 3.2 s a step of the demo, not 0.46 (2
# threads, 2 cores, load 9). Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel

from dataloader import (
    PACKINGS,
    Encoder,
    PackedLoader,
    Ref,
    Source,
    cores_of_this_rank,
    gather_states,
    trace,
)
from dataset import ShardError, find_data, list_shards, parquets_iter_batched, write_whole
from tokenizer import RustBPETokenizer, find_tokenizer, get_token_bytes

# ---------------------------------------------------------------------------------------------------------
# Settings

FLAGS = [    # name, default on a CPU and other devices, default on CUDA, what it is
    ("depth", 2, 12, "layers; the model is 64 * depth wide"),
    # 4 on a CPU: as many tokens in steps of 8 rows ended at 1.347 bits per byte, not 1.245 (seeds 1 to 3).
    ("batch_size", 4, 256, "rows in an optimizer step, over all ranks (of the last --seq_len)"),
    ("micro_batch_size", 16, 32, "most rows in one forward: less memory, the same run"),
    ("steps", 1200, 4600, "optimizer steps of the whole run"),    # CUDA: about 18 tokens a parameter
    ("eval_every", 600, 250, "steps between evals"),
    ("eval_rows", 2048, 512, "val rows of each source in an eval, each of one document"),
    ("save_every", 600, 500, "steps between checkpoints"),
    ("log_every", 50, 1, "steps between printed lines"),
]
LR = {"muon": (0.012, 0.02), "adamw": (0.0025, 0.0025)}
CHOICES = [
    ("optimizer", ["muon", "adamw"], "muon: of the blocks' matrices; AdamW for the rest"),
    ("packing", [*reversed(PACKINGS)], "how documents become rows"),
    ("tails", ["keep", "drop"], "exactfit: what lies beyond a row"),
    ("compile", ["auto", "on", "off"], "auto: on CUDA, where there are gcc or clang and Python.h"),
    ("dtype", ["float32", "bfloat16"], "of activations (cpu float32, cuda bfloat16); weights are float32"),
]
SAME_ON_RESUME = ("depth", "seq_len", "vocab_size", "optimizer", "packing", "tails", "shuffle", "doc_mask",
                  "num_lanes")


def parse_flags(argv=None):
    """Parsed twice: the device decides what the defaults of the others are."""
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    p.error = lambda message: leave(f"{p.format_usage()}{p.prog}: error: {message}", status=2)
    p.add_argument("--device", default=best_device(), help="cpu, cuda, or what torch.accelerator names (mps)")
    for name, cpu, cuda, text in FLAGS:
        p.add_argument(f"--{name}", type=type(cpu), metavar="N", help=f"{text} (cpu {cpu}, cuda {cuda})")
    for name, choices, text in CHOICES:
        p.add_argument(f"--{name}", choices=choices, default=choices[0], help=text)
    p.add_argument("--lr", type=float, metavar="N",
                   help="peak rate of the blocks' matrices (muon 0.012, on CUDA 0.02; adamw 0.0025)")
    p.add_argument("--seq_len", nargs="+", type=parse_row_length, metavar="T[@STEP]",
                   help="tokens in a row (cpu 256, cuda 2048); 512@0 1024@2000: longer rows, and fewer, from "
                        "step 2000 on")
    p.add_argument("--skip", nargs="+", type=parse_steps, default=[], metavar="A:B",
                   help="do not train on the batches of steps A to B-1")
    p.add_argument("--spike", type=float, metavar="LOSS", help="stop at a loss above it, and name the batch")
    p.add_argument("--data", nargs="+", default=[], metavar="PATH[:WEIGHT]",
                   help="folder or URI of shards; several take weights, shares of tokens (default: what "
                        "dataset.py downloaded, else the built-in corpus)")
    p.add_argument("--cache", metavar="DIR", help="a folder on this node's disk for copies of far shards")
    p.add_argument("--tokenizer", metavar="DIR", help="default: tokenizer.py's, else one trained on the data")
    p.add_argument("--vocab_size", type=int, metavar="N",
                   help="of the tokenizer that is trained where there is none (cpu 2048, cuda 32768)")
    p.add_argument("--shuffle", action="store_true", help="shuffle documents, by --seed")
    p.add_argument("--num_lanes", type=int, metavar="N",
                   help="world sizes that divide it give the same run (default: 8, or the smallest multiple "
                        "of 8 that the world size divides)")
    p.add_argument("--doc_mask", action="store_true", help="attention stays inside documents")
    p.add_argument("--seed", type=int, default=1, help="of the first weights and of --shuffle")
    p.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/DATE-TIME)")
    p.add_argument("--resume", default="none", metavar="auto|none|FILE",
                   help="auto: the newest whole checkpoint in --out, or of the newest run")
    p.add_argument("--init", metavar="FILE", help="begin with the weights and the tokenizer of a checkpoint")
    p.add_argument("--max_minutes", type=float, metavar="N", help="then save and leave")
    p.add_argument("--sample", metavar="PROMPT", help="only generate, from the newest checkpoint")
    p.add_argument("--eval", metavar="FILE", help="only evaluate this checkpoint, on --data or its own")

    cuda = p.parse_args(argv).device == "cuda"
    p.set_defaults(dtype="bfloat16" if cuda else "float32", seq_len=[[2048 if cuda else 256, 0]],
                   **{name: on_cuda if cuda else on_cpu for name, on_cpu, on_cuda, _ in FLAGS})
    flags = p.parse_args(argv)
    check_flags(flags, p)
    flags.lr = flags.lr or LR[flags.optimizer][cuda]
    return flags


def best_device():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def check_flags(flags, p):
    """One line and status 2 for what cannot be."""
    for name, value in vars(flags).items():
        if name != "seed" and type(value) in (int, float) and not value > 0:
            p.error(f"--{name} {value}: expected a number above 0")
    if flags.device not in ("cpu", best_device()):
        p.error(f"--device {flags.device}: torch sees none; leave --device out to train on {best_device()}")
    if flags.device != "cpu" and int(os.environ.get("LOCAL_RANK", 0)) >= torch.accelerator.device_count():
        p.error(f"--device {flags.device}: more ranks than this node has; lower torchrun's --nproc_per_node")
    for name in ("init", "eval"):
        if (path := getattr(flags, name)) and not os.path.isfile(path):
            p.error(f"--{name} {path}: no such file; expected a checkpoint")
    if flags.resume not in ("auto", "none") and not os.path.isfile(flags.resume):
        p.error(f"--resume {flags.resume}: no such file; expected auto, none or a checkpoint")
    try:
        parse_data(flags.data)
    except ValueError as error:
        p.error(str(error))
    lengths, begins = zip(*flags.seq_len, strict=True)
    tokens = flags.batch_size * lengths[-1]
    if begins[0] != 0 or sorted(set(begins)) != list(begins) or any(tokens % T for T in lengths):
        p.error("--seq_len: expected T@STEP with ascending steps from 0 on, each T dividing the tokens of a "
                f"step ({flags.batch_size} rows of {lengths[-1]}), as in 512@0 1024@2000")


def parse_row_length(text):
    """"512@2000" -> [512, 2000], "512" -> [512, 0]"""
    found = re.fullmatch(r"([1-9]\d*)(?:@(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: expected T, or T@STEP, as in 512@0 1024@2000")
    return [int(found[1]), int(found[2] or 0)]


def parse_steps(text):
    """"3:5" -> [3, 5]"""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected A:B, two steps, the first one below the second")
    return [int(found[1]), int(found[2])]


def parse_data(specs):
    """["a"] -> {"a": 1.0};  ["a:0.7", "s3://b/c:0.3"] -> {"a": 0.7, "s3://b/c": 0.3};  [] -> {}"""
    sources = {}
    for spec in specs:
        path, _, weight = spec.rpartition(":")
        with contextlib.suppress(ValueError):
            weight = float(weight)
        if isinstance(weight, str) or os.path.isdir(spec):    # a folder may be named web:2
            path, weight = spec, 1.0 if len(specs) == 1 else 0.0
        if not path or not 0 < weight < math.inf or path in sources:
            raise ValueError(f"--data {spec}: expected PATH, or several of PATH:WEIGHT, each path once and "
                             "each weight above 0, as in --data web:0.7 code:0.3")
        sources[path] = weight
    return sources


# ---------------------------------------------------------------------------------------------------------
# The run, from top to bottom

def train(flags):
    """-> exit status"""
    # Ranks: each makes an equal part of a step's rows
    rank, local_rank, world = start_ranks(flags.device)
    refuse_differences(lambda: what_must_be_equal(flags))
    device, cuda = set_up_device(flags, local_rank), flags.device == "cuda"
    last_T = flags.seq_len[-1][0]
    stop = StopRequest(flags.max_minutes)
    out, checkpoint = from_rank(0, on_some_ranks(rank == 0, lambda: choose_run(flags)))
    saved = load_checkpoint(checkpoint) if checkpoint else None
    if flags.resume == "auto" and not saved:
        say(f"no checkpoint in {out} yet: a new run")
    settings = settle(flags, world, saved, checkpoint)

    # Data: the loader deals rows to ranks by itself
    sources = sources_of(flags)
    tokenizer, where = tokenizer_of_run(flags, settings, saved, local_rank)
    def make_loader(state, T):
        loader = PackedLoader(
            tokenizer, rows_of_rank(flags, T, world), T, "train", data_dir=sources, packing=flags.packing,
            tails=flags.tails, num_lanes=settings["num_lanes"], device=device if cuda else "cpu",
            shuffle_seed=flags.seed if flags.shuffle else None, cache=flags.cache)
        if state:
            loader.load_state_dict(state)
        return loader

    step, rows_hash = (saved["step"], saved["rows_hash"]) if saved else (0, 0)
    state = json.loads(saved["loader"]) if saved else None
    loader = make_loader(state, row_length(flags, max(0, step - 1)))
    val = {path: val_windows(tokenizer, path, last_T, flags.eval_rows) for path in sources}

    # Model and optimizer
    torch.manual_seed(flags.seed)
    bos = tokenizer.get_bos_token_id() if flags.doc_mask else None
    model = GPT(flags.depth, tokenizer.get_vocab_size(), flags.dtype == "bfloat16", bos).to(device)
    if flags.init:
        load_weights(model, load_checkpoint(flags.init), flags.init)
    compile_parts(model, flags.compile)
    optimizers = make_optimizers(model, flags.optimizer, flags.lr, flags.batch_size * last_T)
    if saved:
        restore(saved, checkpoint, model, optimizers)
    net = model
    if dist.is_initialized():
        net = DistributedDataParallel(model, [local_rank] if cuda else None, gradient_as_bucket_view=True)

    def save():    # all ranks together: each knows its own lanes and momenta
        state, parts = gather_states(loader), [o.state_dict() for o in optimizers]
        checkpoints.save(step, {"loader": state, "model": model.state_dict(), "optimizers": parts,
                                "flags": settings, "rows_hash": rows_hash, "tokenizer": tokenizer.as_dict()})

    # Loop
    n_parameters = sum(p.numel() for p in model.parameters())
    say(f"model: {n_parameters:,} parameters, depth {flags.depth}; tokenizer: "
        f"{tokenizer.get_vocab_size():,} tokens, {where}")
    for T, begin in flags.seq_len:
        rows, at_once = rows_of_rank(flags, T, world), rows_at_once(flags, T)
        since = f" from step {begin} on" if len(flags.seq_len) > 1 else ""
        say(f"a step: {world * rows} rows of {T} tokens ({world} ranks x {rows} rows, at most {at_once} in a "
            f"forward){since}")
    say(f"data: {' '.join(sources)}; run: {out}")
    warn_of_large_buffers(loader)
    mfu_of_one_token = model.flops_per_token(last_T) / (peak_flops(device) * world)
    log = Log(out, flags, mfu_of_one_token, {
        "flags": settings, "python": sys.version.split()[0], "torch": torch.__version__,
        "parameters": n_parameters, "world_size": world, "from_step": step})
    checkpoints = Checkpoints(out, checkpoint)
    first, stopping = step, False
    if step >= flags.steps:    # a finished run, started once more
        evaluate(step, model, tokenizer, val, flags.micro_batch_size, stop, log.write)
    while step < flags.steps and not stopping:
        began = time.perf_counter()
        T = row_length(flags, step)
        if T != loader.T:    # no token is lost or repeated
            state = loader.state_dict()
            loader.close()
            loader = make_loader(state, T)
        first_row, (inputs, targets) = loader.rows, next(loader)
        waited = time.perf_counter() - began
        n_tokens, rows_hash = count_and_hash(inputs, targets, first_row, rank, world, rows_hash)
        if any(a <= step < b for a, b in settings["skip"]):
            log.write({"step": step, "skipped": True, "rows_hash": f"{rows_hash:016x}"})
        else:
            share = set_rates(optimizers, step, flags.steps)
            loss, norm = train_step(net, model, optimizers, inputs, targets, n_tokens, world,
                                    rows_at_once(flags, T))
            if not math.isfinite(loss + norm) or loss > (flags.spike or math.inf):
                report_batch(out, step, loss, norm, loader)
                checkpoints.hold(step)    # torchrun kills a rank 30 s after another has left
                return 1
            log.step(step, loss, flags.lr * share, norm, time.perf_counter() - began, waited,
                     stop.seconds_left(), f"{rows_hash:016x}")
        step += 1
        stopping = stop.agreed()
        if not stopping and (step % flags.eval_every == 0 or step == flags.steps):
            stopping = not evaluate(step, model, tokenizer, val, flags.micro_batch_size, stop, log.write)
        if not stopping and step % flags.save_every == 0:
            save()
    if not checkpoints.hold(step):
        save()
    is_saved = checkpoints.hold(step)
    loader.close()
    say(f"rows: hash {rows_hash:016x}; runs that print the same one had the same rows")
    how = "done" if step >= flags.steps else f"stopped ({stop.why or 'by another rank'})"
    where = f"checkpoint: {checkpoint_path(out, step)}" if is_saved else "this step is NOT saved"
    say(f"{how} at step {step} of {flags.steps}; {step - first} steps took {log.seconds:.0f} s; {where}")
    return 0 if is_saved else 1


def warn_of_large_buffers(loader):
    """bestfit takes what fills a row best: where it sees most of a lane's documents, some wait for epochs."""
    for name, source in loader.sources.items():
        n, size = int(source.group_sizes.sum()) // loader.num_lanes, loader.buffer_size
        if loader.packing == "bestfit" and 4 * size > n:
            say(f"warning: {name}: a lane has {n:,} documents, and bestfit buffers {size:,} of them, so that "
                "some come several times before others come once; lower --num_lanes (now "
                f"{loader.num_lanes}), or take --packing exactfit, which has the oldest begin each row")


def row_length(flags, step):
    return [T for T, begin in flags.seq_len if begin <= step][-1]


def rows_of_rank(flags, T, world):
    """In a step. Its tokens stay the same where rows grow."""
    rows = flags.batch_size * flags.seq_len[-1][0] // T
    if rows % world:
        raise ValueError(f"{rows} rows of {T} tokens cannot be shared evenly by {world} ranks; try "
                         f"--batch_size {-(-flags.batch_size // world) * world}")
    return rows // world


def rows_at_once(flags, T):
    """In one forward. The tokens stay the same, too."""
    return max(1, flags.micro_batch_size * flags.seq_len[-1][0] // T)


def train_step(net, model, optimizers, inputs, targets, n_tokens, world, micro):
    """-> loss: the mean over all ranks' tokens, and the norm of the gradient before it was clipped"""
    device = model.embedding.weight.device
    nats = torch.zeros((), device=device)
    parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    for i, (some_inputs, some_targets) in enumerate(parts):
        last = i == len(parts) - 1    # it sums over the ranks; the forward stands inside the context, too
        with contextlib.nullcontext() if last or net is model else net.no_sync():
            loss = net(some_inputs.to(device), some_targets.to(device)).sum()
            (loss * (world / n_tokens)).backward()    # DDP divides by the world size
        nats += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return (sum_over_ranks(nats) / n_tokens).item(), norm.item()    # waits for the GPU


def count_and_hash(inputs, targets, first_row, rank, world, rows_hash):
    """
    -> the targets of all ranks, and the hash of all rows so far: a sum over their tokens, each times an odd
    number that its place in the run decides, modulo 2**64. So it is the same for any number of ranks.
    """
    B, T = inputs.shape
    rows = first_row + rank + world * torch.arange(B, device=inputs.device)
    places = rows[:, None] * T + torch.arange(T, device=inputs.device)
    factors = places * 0x1E3779B97F4A7C15 | 1
    sums = torch.stack([(targets >= 0).sum(), ((3 * inputs + targets) * factors).sum()])
    n_tokens, added = sum_over_ranks(sums).tolist()
    return n_tokens, (rows_hash + added) % 2**64


# ---------------------------------------------------------------------------------------------------------
# Ranks: all that knows of other processes. Alone, each function gives back its argument

def start_ranks(device):
    """-> rank, local rank, world size. Under torchrun a group is made on CPUs too: else N separate models."""
    if "RANK" not in os.environ:
        return 0, 0, 1
    # Tensors in CPU memory (flags, states) go over gloo, without a wait for the GPU; the rest over nccl, say.
    backend = "gloo"
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    return dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()


def is_first_rank():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text):
    if is_first_rank():
        print(text, flush=True)


def sum_over_ranks(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def largest_of_ranks(number: int) -> int:
    """An int; also where all ranks wait for each other."""
    if not dist.is_initialized():
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def from_rank(source, value) -> Any:
    """Rank `source`'s value, on every rank. As bytes of JSON, not as objects: nothing is ever unpickled."""
    if not dist.is_initialized():
        return value
    data = json.dumps(value).encode() if dist.get_rank() == source else b""
    data = torch.frombuffer(bytearray(data.ljust(largest_of_ranks(len(data)))), dtype=torch.uint8)
    dist.broadcast(data, source)
    return json.loads(data.numpy().tobytes())


def on_some_ranks(mine, work) -> Any:
    """-> work() where `mine`, while the others wait, who get None. Where it fails, all leave."""
    result, error = None, ""
    try:
        result = work() if mine else None
    except (ValueError, OSError) as caught:
        error = f"rank {dist.get_rank()}: {caught}" if dist.is_initialized() else str(caught)
    leave_together(error)
    return result


def leave_together(error):
    """error: this rank's, or "". Rank 0 leaves with one of them, the others silently."""
    if not dist.is_initialized():
        if error:
            raise ValueError(error)
    elif (failed := largest_of_ranks(dist.get_rank() if error else -1)) >= 0:
        error = from_rank(failed, error)
        why = f"error: {error}" if is_first_rank() else 1
        dist.destroy_process_group()    # else its threads would abort the exit
        sys.exit(why)


def leave(message, status=1):
    """With an error; of ranks that fail alike the first prints it, and the others leave without a word."""
    with contextlib.suppress(KeyError, RuntimeError):    # no ranks, or their store is not there (yet)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=5))
        if store.add(message, 1) > 1:
            sys.exit(status)
    print(message, file=sys.stderr)
    sys.exit(status)


def refuse_differences(describe):
    """describe() -> {what: value}. Where a rank's is not rank 0's, an error names the rank and the first."""
    mine = on_some_ranks(True, describe)
    first = from_rank(0, mine)
    differ = sorted(what for what in first.keys() | mine.keys() if first.get(what) != mine.get(what))
    leave_together(differ and f"rank {dist.get_rank()} differs from rank 0: {differ[0]} is "
                   f"{mine.get(differ[0], 'not there')}, not {first.get(differ[0], 'not there')}; start all "
                   "ranks with the same flags, code and data")


class StopRequest:
    """SIGTERM, SIGINT, SIGUSR1 or the clock: finish the step, save, leave with status 0."""

    def __init__(self, minutes):
        self.ends, self.why, self.since = time.monotonic() + 60 * (minutes or math.inf), "", 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number, frame):
        # torchrun passes a Ctrl-C on to ranks that the terminal has signalled already: that is no second one.
        if number == signal.SIGINT and self.why and time.monotonic() > self.since + 1:
            os._exit(130)
        self.why, self.since = self.why or signal.Signals(number).name, self.since or time.monotonic()

    def seconds_left(self):
        return max(0.0, self.ends - time.monotonic())

    def agreed(self):
        """Asked by all ranks together: once a step, once a batch of an eval."""
        if not self.seconds_left():
            self.why = self.why or "--max_minutes"
        return bool(largest_of_ranks(int(self.why != "")))


# ---------------------------------------------------------------------------------------------------------
# Data and device

def sources_of(flags):
    return parse_data(flags.data) or {find_data(): 1.0}


def what_must_be_equal(flags):
    """Of all ranks."""
    with open(__file__, "rb") as file:
        code = hashlib.sha256(file.read()).hexdigest()[:16]
    shards = [shard for path in sources_of(flags) for split in ("train", "val")
              for shard in list_shards(path, split)]
    return {"Python": sys.version.split()[0], "torch": torch.__version__, "the sha256 of train.py": code,
            **{f"--{name}": value for name, value in vars(flags).items()},
            **{f"shard {shard.path}": f"{shard.size:,} bytes" for shard in shards}}


def tokenizer_of_run(flags, settings, saved, local_rank):
    """-> tokenizer, where it is from: a checkpoint, else --tokenizer, else found, or trained once a node."""
    path = flags.init
    saved = load_checkpoint(path) if path and not saved else saved
    find = functools.partial(find_tokenizer, flags.tokenizer, list(sources_of(flags)), settings["vocab_size"])
    if saved:
        tokenizer, where = RustBPETokenizer.from_dict(saved["tokenizer"]), "kept in the checkpoint"
    else:
        tokenizer, where = on_some_ranks(local_rank == 0, find) or find()
    refuse_differences(lambda: {"the tokenizer": tokenizer.fingerprint()})
    if saved and flags.tokenizer and find()[0].fingerprint() != tokenizer.fingerprint():
        raise ValueError(f"{flags.tokenizer} is not the tokenizer of the checkpoint; leave --tokenizer out")
    n, wanted = tokenizer.get_vocab_size(), flags.vocab_size
    trained_here = where.endswith(f"-{wanted}")    # smaller than asked for where the text has few pairs
    if not saved and wanted and n != wanted and not trained_here:
        raise ValueError(f"--vocab_size {wanted}: {where} has {n} tokens; leave --vocab_size out, or pass "
                         f"--tokenizer DIR after: python tokenizer.py --vocab_size {wanted} --out DIR")
    return tokenizer, where


def set_up_device(flags, local_rank):
    if flags.device == "cpu":
        torch.set_num_threads(cores_of_this_rank())
    torch.set_float32_matmul_precision("high" if flags.device == "cuda" else "highest")
    if flags.device == "cuda" and flags.doc_mask:
        # cuDNN's backward: NaN with a mask where T % 128 == 64 (pytorch #196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cpu") if flags.device == "cpu" else torch.device(flags.device, local_rank)


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


def document_boundaries(inputs, bos, most=None):
    """
    -> positions: int64 (B, T), of each token within its document, counted from the row's beginning where
       that is no BOS; cu_seqlens: int32 (most + 1,), where the documents of the flattened batch begin, as
       varlen attention takes it, filled up with B * T: a fixed shape, so that nothing recompiles.
    most: documents in a batch (any more count as part of the last one); default B * T.
    Example: inputs [[BOS, 5, BOS, 7]], most=3 -> [[0, 1, 0, 1]], [0, 2, 4, 4]
    """
    B, T = inputs.shape
    most = B * T if most is None else most
    starts = inputs == bos
    starts[:, 0] = True
    at = torch.arange(T, device=inputs.device).expand(B, T)
    positions = at - torch.where(starts, at, 0).cummax(1).values
    begins = torch.where(starts.flatten(), torch.arange(B * T, device=inputs.device), B * T).sort().values
    return positions, F.pad(begins[:most].int(), (0, max(1, most + 1 - B * T)), value=B * T)


def document_mask(inputs, bos, make_block_mask=None):
    """Causal and inside documents: dense, (B, 1, T, T), or flex attention's BlockMask; fixed shapes both."""
    B, T = inputs.shape
    document = (inputs == bos).cumsum(1)
    if make_block_mask:
        def visible(b, h, q, k):
            return (q >= k) & (document[b, q] == document[b, k])
        return make_block_mask(visible, B, None, T, T, device=inputs.device)
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

    def forward(self, x, token_values, cos, sin, mask):    # x: (B, T, width)
        B, T, width = x.shape
        n = norm(x)
        values = self.v(n) if token_values is None else self.v(n) + token_values
        q, k, v = (z.view(B, T, -1, self.head_dim).transpose(1, 2) for z in (self.q(n), self.k(n), values))
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
    """
    inputs, targets: int64 (B, T) -> nats of each target, (B * T,), 0 where it is -100; without: logits.
    bos: attention stays inside documents, which begin with it.
    """

    def __init__(self, depth, vocab_size, bf16=False, bos=None):
        super().__init__()
        self.bf16, self.bos, self.make_block_mask = bf16, bos, None
        width, padded_vocab = 64 * depth, -(-vocab_size // 64) * 64
        with_values = [i for i in range(depth) if i < 3 or i >= depth - 3]
        self.head_dim = 128 if depth % 2 == 0 and depth >= 8 else 64
        self.embedding = nn.Embedding(padded_vocab, width)
        # A token has values of its own in attention: 1.6452 -> 1.6017 bits per byte (500 steps of 8 rows
        # of 256 with Muon, 768 val rows, seed 1).
        self.value_embeddings = nn.ModuleDict()
        for i in with_values:
            values = self.value_embeddings[str(i)] = nn.Embedding(padded_vocab, width)
            nn.init.uniform_(values.weight, -(3 / width) ** 0.5, (3 / width) ** 0.5)
        # To each token's embedding, some of the one before: 1.6017 -> 1.5713, together with the longer decay.
        self.previous = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, self.head_dim) for _ in range(depth))
        self.head = Head(width, padded_vocab)

    def forward(self, inputs, targets=None):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
            make_mask = self.make_block_mask if targets is not None else None    # no sample is compiled
            mask = None if self.bos is None else document_mask(inputs, self.bos, make_mask)
            # autocast alone would leave what runs past the blocks in fp32
            x = norm(self.embedding(inputs)).to(torch.bfloat16 if self.bf16 else torch.float32)
            before = F.pad(x, (0, 0, 1, -1))
            if self.bos is not None:
                before = before.masked_fill((inputs == self.bos)[..., None], 0)
            x = x + (self.previous * before).type_as(x)
            cos, sin = rope_tables(inputs.size(1), self.head_dim, x.device, x.dtype)
            for i, block in enumerate(self.blocks):
                values = None
                if str(i) in self.value_embeddings:
                    values = self.value_embeddings[str(i)](inputs).type_as(x)
                x = block(x, values, cos, sin, mask)
            return self.head(x, targets)

    def flops_per_token(self, T):
        """Forward and backward, counted as in PaLM's appendix B: causal attention as if it were full."""
        matrices = sum(p.numel() for p in (*self.blocks.parameters(), *self.head.parameters()))
        return 6 * matrices + 12 * len(self.blocks) * T * self.embedding.embedding_dim


def compile_parts(model, choice):
    """Block by block, which all share the code of the first; masks are flex attention's then, on CUDA."""
    cuda = model.embedding.weight.is_cuda
    headers = sysconfig.get_path("include", "posix_prefix") + "/Python.h"    # Triton compiles C with them
    possible = any(map(shutil.which, ("gcc", "clang"))) and os.path.exists(headers)
    if choice == "auto" and cuda and not possible:
        say(f"warning: not compiled, which is slower: that takes gcc or clang, and {headers} (python3-dev)")
    if choice == "on" or (choice == "auto" and cuda and possible):
        torch._dynamo.config.optimize_ddp = False    # a block is compiled by itself: nothing to split
        torch._dynamo.config.recompile_limit = 64    # a graph for each shape; torch stops compiling at 8
        if cuda:
            model.make_block_mask = torch.compile(create_block_mask, dynamic=False)
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)


def load_weights(model, saved, path):
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} is of another model (--depth {saved['flags']['depth']}): "
                         f"{str(error).splitlines()[-1].strip()}") from None


# ---------------------------------------------------------------------------------------------------------
# Optimizer

def orthogonalize(matrix, steps=5):
    """
    Near U V^T of its singular values' decomposition U S V^T, by Newton-Schulz steps (coefficients of Keller
    Jordan, 2024). In fp32 on a CPU: the demo's 12 matrices take 35 ms of CPU time, not the 569 ms of
    torch.optim.Muon's bfloat16 (1 thread of an EPYC without AMX).
    """
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x.T if matrix.size(0) > matrix.size(1) else x


class Muon:
    """
    Matrices are moved by their orthogonalized momentum. Each rank does so for its share of them, then sends
    these out. state_dict() is {name: momentum}, the same for every world size.
    """

    def __init__(self, named: list, lr):
        self.named = sorted(named, key=lambda item: -item[1].numel())    # dealt by size, in even shares
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.mine = self.named[dist.get_rank()::self.world] if dist.is_initialized() else self.named
        self.momenta = {name: torch.zeros_like(p) for name, p in self.mine}
        parameters = [p for _, p in self.named]
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, "lr": lr, "momentum": 0.95}]

    @torch.no_grad()
    def step(self):
        lr, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for name, p in self.mine:
            average = self.momenta[name].lerp_(p.grad, 1 - momentum)
            update = orthogonalize(p.grad.lerp(average, momentum))
            p.sub_(update, alpha=lr * max(1, p.size(0) / p.size(1)) ** 0.5)
        self._send_out([p.data for _, p in self.named])

    def _send_out(self, tensors):
        if self.world > 1:
            for work in [dist.broadcast(t, i % self.world, async_op=True) for i, t in enumerate(tensors)]:
                work.wait()

    def state_dict(self):
        """Called by all ranks together."""
        momenta = {name: self.momenta.get(name, torch.zeros_like(p)) for name, p in self.named}
        self._send_out(list(momenta.values()))
        return momenta

    def load_state_dict(self, momenta):
        for name, momentum in self.momenta.items():
            momentum.copy_(momenta[name])


def make_optimizers(model, kind, lr, tokens_per_step):
    """
    Muon by module: ndim == 2 would catch embeddings and head as well. Rates of these and their scale by width
    are nanochat's (scripts/base_train.py) for steps of 2 ** 19 tokens. Smaller steps take smaller rates: with
    those of the demo, the token before by channel and beta2 0.98, 1.5713 -> 1.4410 bits per byte (500 steps).
    """
    scale = (model.embedding.embedding_dim / 768) ** -0.5 * min(1.0, tokens_per_step / 2 ** 19) ** 0.2
    embeddings = [model.embedding.weight, *model.value_embeddings.parameters()]
    groups = [{"params": embeddings, "lr": 0.3 * scale},
              {"params": list(model.head.parameters()), "lr": 0.006 * scale},
              {"params": [model.previous], "lr": 0.01}]
    matrices = list(model.blocks.named_parameters())
    if kind == "adamw":
        groups.append({"params": [p for _, p in matrices], "lr": lr})
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.98), eps=1e-10, weight_decay=0.0, fused=True)
    optimizers = [adamw, Muon(matrices, lr)] if kind == "muon" else [adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rates(optimizers, step, steps):
    """Warm-up in 3 % of the steps, constant, linear decay to 5 % in the last 65 %. -> share of the peak"""
    share = min(1.0, (step + 1) / max(1.0, 0.03 * steps), 0.05 + 0.95 * (steps - step) / (0.65 * steps))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
            if "momentum" in group:    # Muon's warm-up, as in modded-nanogpt
                group["momentum"] = 0.85 + 0.10 * min(1.0, step / 300)
    return share


# ---------------------------------------------------------------------------------------------------------
# Evaluation: bits per byte of val documents, beside zlib's, and a sample

class Windows(NamedTuple):
    """Rows of val documents, each of one document alone, so that no way to pack them has an advantage."""
    inputs: torch.Tensor     # int64 (n, T)
    targets: torch.Tensor    # int64 (n, T), -100 where nothing is asked: the context, and behind the document
    later: torch.Tensor      # bool (n,): not the document's first T + 1 tokens, but some behind them


def val_windows(tokenizer, path, T, n):
    """The first n: of each document T + 1 tokens, then the others behind T // 4 that the model was given."""
    source, encoder = Source(path, list_shards(path, "val"), num_lanes=1), Encoder(tokenizer, threads=1)
    windows = []    # ids, and how many of them are given
    for chunk in encoder.chunks(source, 0, Ref(), epochs=1):
        for ids, _ in chunk.documents():
            windows.append((ids[:T + 1], 1))
            for stop in range(T + 1, len(ids), T - T // 4):
                windows.append((ids[stop - T // 4 - 1:][:T + 1], T // 4 + 1))
        if len(windows) >= n:
            break
    encoder.close()
    windows = windows[:n]
    inputs = torch.full((len(windows), T), tokenizer.get_bos_token_id())
    targets = torch.full((len(windows), T), -100)
    for i, (ids, given) in enumerate(windows):
        ids = torch.from_numpy(ids.astype(np.int64))
        inputs[i, :len(ids) - 1], targets[i, given - 1:len(ids) - 1] = ids[:-1], ids[given:]
    if not (targets >= 0).any():
        raise ValueError(f"the val split of {path} has no text: {list_shards(path, 'val')[-1].name} holds "
                         "nothing but nulls and empty documents")
    return Windows(inputs, targets, torch.tensor([given > 1 for _, given in windows]))


def evaluate(step, model, tokenizer, val, micro, stop, write):
    """Print and write bits per byte of each source and over all; print a sample. -> False if asked to stop"""
    token_bytes, totals = get_token_bytes(tokenizer), {}
    for path, windows in val.items():
        totals[path] = count_nats(model, windows, micro, token_bytes, stop)
        if totals[path] is None:
            return False
    if len(val) > 1:
        totals["all"] = sum(totals.values())
    for path, (first, later) in totals.items():
        bpb, n_bytes, zlib_bpb = bits_per_byte(first + later), int((first + later)[1]), None
        if path in val and is_first_rank():
            zlib_bpb = zlib_bits_per_byte(path, n_bytes)
        first_bpb, later_bpb, share = bits_per_byte(first), bits_per_byte(later), float(first[1] / n_bytes)
        write({"step": step, "val_bpb": bpb, "val_bytes": n_bytes, "zlib_bpb": zlib_bpb, "source": path,
               "first_bpb": first_bpb, "first_share": share, "later_bpb": later_bpb})
        of = {"all": " over all sources"}.get(path, f" of {path}") if len(val) > 1 else ""
        beside = f"; zlib -9: {zlib_bpb:.4f}" if zlib_bpb else ""
        say(f"step {step}: val {bpb:.4f} bits per byte{of}{beside}; documents' first rows {first_bpb:.4f} "
            f"({share:.0%} of the bytes), the rest {later_bpb:.4f}")
    if is_first_rank():
        T = next(iter(val.values())).inputs.size(1)
        with torch.compiler.set_stance("force_eager"):    # a shape of its own: nothing to compile for it
            text = generate(model, tokenizer, T, "def ", 64)
        say("sample: " + text.replace("\n", "\n        "))
    return True


def bits_per_byte(nats_and_bytes):
    nats, n_bytes = nats_and_bytes.tolist()
    return nats / max(1, n_bytes) / math.log(2)


@torch.no_grad()
def count_nats(model, windows, micro, token_bytes, stop):
    """
    -> float64 (2, 2): nats of the targets that stand for bytes, and these bytes; of first windows, then of
    later ones. None where the run is asked to stop. Ranks take batches in turns.
    """
    device, totals = model.embedding.weight.device, torch.zeros(2, 2, dtype=torch.float64)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    batches = list(zip(*(part.split(micro) for part in windows), strict=True))
    for i in range(0, len(batches), world):
        if stop.agreed():
            return None
        for inputs, targets, later in batches[i + rank:i + rank + 1]:    # of the last turn, not all have one
            n_bytes = token_bytes[targets.clamp(min=0)].where(targets >= 0, 0)
            nats = model(inputs.to(device), targets.to(device)).cpu().double().view_as(n_bytes)
            nats = nats.where(n_bytes > 0, 0)
            totals.index_add_(0, later.long(), torch.stack([nats.sum(1), n_bytes.sum(1)], 1).double())
    return sum_over_ranks(totals)


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


def load_model(path, flags):
    """-> model, tokenizer, flags and step of a checkpoint"""
    saved = load_checkpoint(path)
    tokenizer, depth = RustBPETokenizer.from_dict(saved["tokenizer"]), saved["flags"]["depth"]
    bos = tokenizer.get_bos_token_id() if saved["flags"]["doc_mask"] else None
    model = GPT(depth, tokenizer.get_vocab_size(), flags.dtype == "bfloat16", bos)
    load_weights(model, saved, path)
    return model.to(flags.device), tokenizer, argparse.Namespace(**saved["flags"]), saved["step"]


def print_sample(flags):
    """--sample: from the checkpoint that --resume names, else the newest."""
    folder = flags.out or newest_run()
    path = flags.resume if os.path.isfile(flags.resume) else folder and newest_checkpoint(folder)
    if not path:
        raise ValueError("no checkpoint in --out or runs/ yet; train one first: python train.py")
    model, tokenizer, saved, _ = load_model(path, flags)
    print(generate(model, tokenizer, saved.seq_len[-1][0], flags.sample, 200))


def print_eval(flags):
    """--eval: the bits per byte that a run prints, of its own data or of others."""
    start_ranks(flags.device)
    model, tokenizer, saved, step = load_model(flags.eval, flags)
    T = saved.seq_len[-1][0]
    val = {path: val_windows(tokenizer, path, T, saved.eval_rows)
           for path in sources_of(flags if flags.data else saved)}
    evaluate(step, model, tokenizer, val, saved.micro_batch_size, StopRequest(None), lambda record: None)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints: a file that is whole or not there

VERSION = 2    # of what a checkpoint holds


class Checkpoints:
    """Rank 0's, written by a thread from a copy in memory; the newest two that are whole are kept."""

    def __init__(self, folder, resumed_from):
        self.folder, self.thread, self.kept, self.saved_at = os.path.abspath(folder), None, [], None
        there, resumed_from = list_checkpoints(self.folder), os.path.abspath(resumed_from or "")
        if is_first_rank() and resumed_from in there:
            older = [path for path in there if path < resumed_from and is_ours(path)]
            self.kept, self.saved_at = [*older, resumed_from], load_checkpoint(resumed_from)["step"]

    def save(self, step, content):
        """A save that fails leaves the last good one, and the next is tried as if nothing had been."""
        self.wait()
        if is_first_rank():
            copy = copy_to_memory({"version": VERSION, "step": step, **content})
            self.thread = threading.Thread(target=self._write, args=(step, copy))
            self.thread.start()

    def _write(self, step, content):
        path = checkpoint_path(self.folder, step)
        try:
            write_checkpoint(path, {**content, "loader": json.dumps(content["loader"])})
        except (ValueError, OSError, RuntimeError) as error:    # torch makes a RuntimeError of a full disk
            free = shutil.disk_usage(self.folder).free / 1e9
            last = (self.kept or ["none yet"])[-1]
            say(f"warning: step {step} could not be saved ({free:.3f} GB free in {self.folder}: "
                f"{str(error).splitlines()[0]}); the last good checkpoint stays: {last}")
            return
        self.kept, self.saved_at = [*(other for other in self.kept if other != path), path], step
        while len(self.kept) > 2:
            with contextlib.suppress(OSError):    # the user has deleted it, say
                os.remove(self.kept.pop(0))

    def wait(self):
        if self.thread:
            self.thread.join()

    def hold(self, step):
        """Asked by all ranks together: whether this step is saved, behind what the thread still writes."""
        self.wait()
        return bool(largest_of_ranks(int(self.saved_at == step)))


def copy_to_memory(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_memory(part) for key, part in value.items()}
    return [copy_to_memory(part) for part in value] if isinstance(value, list) else value


def write_checkpoint(path, content):
    """Written beside, flushed, renamed."""
    try:
        with open(path + ".tmp", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
    handle = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def restore(saved, path, model, optimizers):
    load_weights(model, saved, path)
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        peaks = [group["peak_lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak_lr"] = peak    # --lr may be another one now
    say(f"resumed from {path}: step {saved['step']}")


def list_checkpoints(folder):
    paths = glob.glob(os.path.join(glob.escape(folder), "step_*.pt"))
    return sorted(path for path in paths if re.fullmatch(r"step_\d{7}\.pt", os.path.basename(path)))


def checkpoint_path(folder, step):
    return os.path.join(folder, f"step_{step:07d}.pt")


def load_checkpoint(path):
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:    # what is no file of torch's raises almost anything
        raise ValueError(f"{path} is no checkpoint of this train.py ({type(error).__name__})") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"{path} is no checkpoint of this train.py (it has no version {VERSION} in it)")
    return content


def is_ours(path):
    with contextlib.suppress(ValueError):
        return bool(load_checkpoint(path))
    return False


def check_whole(path):
    """torch.load would not look at the checksums of its records."""
    try:
        with zipfile.ZipFile(path) as file:
            record = file.testzip()
        torn = record and f"the checksum of {record} is wrong"
    except Exception as error:    # a torn file can raise almost anything
        torn = f"{type(error).__name__}: {error}"
    if torn:
        raise ValueError(f"{path} is torn ({torn}); take the one before it")
    load_checkpoint(path)
    return path


def newest_checkpoint(folder):
    """The newest whole one, or None where there is none at all; warns of each that it passes over."""
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return check_whole(path)
        except ValueError as error:
            print(f"warning: {error}", flush=True)
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
    out = flags.out or known or datetime.now().strftime("runs/%Y%m%d-%H%M%S-%f")
    os.makedirs(out, exist_ok=bool(flags.out or known))
    for left_over in glob.glob(os.path.join(glob.escape(out), "step_" + 7 * "[0-9]" + ".pt.tmp")):
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


def settle(flags, world, saved, path) -> dict[str, Any]:
    """The flags, and where they left it open, what the checkpoint or the number of ranks says."""
    open_ones = {"num_lanes": math.lcm(8, world), "vocab_size": 32768 if flags.device == "cuda" else 2048}
    before: Any = saved["flags"] if saved else open_ones
    settings = {**vars(flags), **{name: getattr(flags, name) or before[name] for name in open_ones}}
    for name in SAME_ON_RESUME if saved else ():
        if before[name] != settings[name]:
            same = f"--{name} {before[name]}"
            if isinstance(before[name], bool):    # a switch
                same = f"--{name}" if before[name] else f"no --{name}"
            raise ValueError(f"--{name} is {settings[name]}, in {path} it was {before[name]}; resume with "
                             f"{same}, or start anew: --resume none and another --out")
    if saved:
        settings["skip"] = sorted({*map(tuple, before["skip"]), *map(tuple, flags.skip)})
        changed = [f"{name} {before[name]} -> {now}" for name, now in settings.items()
                   if now != before.get(name, now) and name not in ("out", "resume", "skip", "max_minutes")]
        say(f"changed since {path}: {', '.join(changed) or 'nothing'}")
    return settings


# ---------------------------------------------------------------------------------------------------------
# What is printed and kept

def report_batch(out, step, loss, norm, loader):
    """Of a loss that is not finite or above --spike: the documents in it, and how to go on without it."""
    state = gather_states(loader, batches_ago=1)
    if state:    # on rank 0
        path = os.path.join(out, f"bad_batch_{step:07d}.json")
        with open(path, "w") as file:
            json.dump(state, file)
        say(f"error: step {step}: loss {loss}, gradient norm {norm}; no checkpoint was touched. Its rows, "
            f"from row {state['rows']} of the run on, hold most of:")
        for place, n in documents_of_batch(loader, state).most_common(8):
            say(f"{n:8,} tokens of {place.path}, row group {place.row_group}, row {place.row}")
        say(f"The loader's state before it: {path}. To go on without it, add: --out {out} --resume auto "
            f"--skip {step}:{step + 1}")


def documents_of_batch(loader, state):
    """Of all ranks: {Place: tokens}"""
    whole_batch = {"rank": 0, "world_size": 1, "B": loader.B * loader.world_size}
    same: dict[str, Any] = {**loader.arguments, **whole_batch, "device": "cpu", "prefetch": 0}
    with PackedLoader(**same) as whole:
        rows, counts = next(trace(whole, state)), Counter()
    for piece in (piece for row in rows for piece in row):
        counts[piece.place] += piece.stop - piece.start
    return counts


def peak_flops(device):
    """Dense bf16 peak of this GPU by its data sheet; infinite where it is not known."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    known = {"GB200": 2500e12, "B200": 2250e12, "NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
             "H200": 989e12, "A100": 312e12}    # the first that is part of the name
    return next((flops for chip, flops in known.items() if chip in name), math.inf)


def read_log(path):
    """Its records; lines that are torn are left out."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def peak_memory(device):
    """The most bytes so far: of the GPU's memory, else of the process; 0 where the system does not tell."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if os.path.exists("/proc/self/status"):    # Linux's ru_maxrss would begin with the parent's
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    with contextlib.suppress(ImportError):    # there is none on Windows
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss    # macOS counts bytes
    return 0


class Log:
    """Rank 0's: lines on the screen, and JSON lines in its folder (dev.pictures loss draws them)."""

    def __init__(self, folder, flags, mfu_of_one_token, first):
        self.path, self.flags = os.path.join(folder, "log.jsonl"), flags
        self.mfu_of_one_token, self.times, self.seconds, self.failed = mfu_of_one_token, [], 0.0, False
        if is_first_rank():
            self.cut(first.get("from_step", 0))
        self.write(first)
        say("    step      loss        lr    norm      tok/s    MFU   ms/step   wait ms   mem GB      left")

    def cut(self, step):
        """Take out what a run that is resumed at `step` does once more, and a line that a kill has torn."""
        kept = [r for r in read_log(self.path) if r.get("step", -1) < step or
                ("val_bpb" in r and r["step"] == step < self.flags.steps)]
        if os.path.isfile(self.path):
            write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())

    def write(self, record):
        if not is_first_rank():
            return
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:    # a full disk stops no training, and is reported once
            if not self.failed:
                print(f"warning: {self.path}: {error}; lines will be missing in it", flush=True)
            self.failed = True

    def step(self, step, loss, lr, norm, seconds, waited, seconds_left, rows_hash):
        self.seconds += seconds
        self.times = [*self.times[-49:], seconds]
        per_second = self.flags.batch_size * self.flags.seq_len[-1][0] / seconds
        r = {"step": step, "loss": loss, "lr": lr, "norm": norm, "tokens_per_s": per_second,
             "mfu": per_second * self.mfu_of_one_token, "ms": 1e3 * seconds, "wait_ms": 1e3 * waited,
             "memory_gb": peak_memory(self.flags.device) / 1e9, "rows_hash": rows_hash}
        self.write(r)
        if step % self.flags.log_every == 0 or step == self.flags.steps - 1:
            left = int(min((self.flags.steps - step - 1) * statistics.median(self.times), seconds_left))
            mfu = f"{r['mfu']:7.1%}" if r["mfu"] else "      -"
            say(f"{step:8d}{loss:10.4f}{lr:10.6f}{norm:8.3f}{per_second:11,.0f}{mfu}{r['ms']:10.1f}"
                f"{r['wait_ms']:10.1f}{r['memory_gb']:9.2f}{left // 60:7d}m{left % 60:02d}s")


# ---------------------------------------------------------------------------------------------------------
# python train.py

def main():
    for stream in (sys.stdout, sys.stderr):    # an ASCII terminal, and a sample that is not ASCII
        stream.reconfigure(errors="backslashreplace")
    flags = parse_flags()
    try:
        if flags.sample is not None:
            status = print_sample(flags)
        else:
            status = print_eval(flags) if flags.eval else train(flags)
    except ShardError as error:
        leave(f"error: {error}; then go on from the last checkpoint: the same command with --resume auto")
    except (ValueError, OSError) as error:
        leave(f"error: {error}")
    except torch.OutOfMemoryError as error:
        leave(f"error: {str(error).splitlines()[0]}\nLower --micro_batch_size (now "
              f"{flags.micro_batch_size}): the same run in less memory. Then --seq_len or --depth, which "
              "change it.")
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
