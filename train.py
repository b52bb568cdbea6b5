"""
Train a GPT on packed token batches: one process, one node or many, on CPUs or GPUs.

    python train.py                                      the demo: Python's own library, 3 minutes
    torchrun --standalone --nproc_per_node=2 train.py    the same rows and the same result, by 2 ranks
    python train.py --resume auto                        resume the newest run; its checkpoint has the flags
    python train.py --sample "def "                      text from the newest checkpoint
    python train.py --eval FILE --data DIR               bits per byte of a checkpoint on other data
    python train.py --init FILE --data DIR               a new run that begins with its weights
    python train.py --chat "a question"                  the answer of the newest checkpoint

Rows, their order and the losses (up to rounding; on one CPU, bit for bit) depend on the flags, not on where a
run was stopped nor on the number of ranks. The trade-off: ranks agree on a few numbers once a step (0.2 ms, 2
ranks over gloo), and a checkpoint is the whole run in one file (12 bytes a parameter; 8 with Muon).
"""

import argparse
import collections
import contextlib
import functools
import gc
import glob
import hashlib
import json
import math
import os
import platform
import re
import signal
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # One line for a Ctrl-C in the seconds that torch takes to import, up to main
    signal.signal(signal.SIGINT, lambda *seen: (os.write(2, b"\nstopped; nothing was done\n"), os._exit(130)))

# Waiting threads sleep: spinning took 3.2 s a step instead of 0.46 (2 cores, load 9). torch reads it now.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("PYTORCH_ALLOC_CONF",    # of GPUs: fewer holes in memory
                      os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))

import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by dynamo, it would keep the process group alive
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import dataloader
import dataset
from dataloader import Encoder, PackedLoader, Part, Source, gather_states, ranks_of_this_process
from dataset import atomic_file, cores, env_int, find_data, list_shards, printable, write_atomic
from tokenizer import RustBPETokenizer, find_tokenizer, get_token_bytes, maker_of

# ---------------------------------------------------------------------------------------------------------
# Settings

FLAGS = [    # name, default on a CPU and other devices, default on CUDA, what it is
    ("depth", 2, 12, "layers; the model is 64 * depth wide"),
    ("seq_len", 256, 2048, "tokens in a row"),
    ("batch_size", 4, 256, "rows in an optimizer step, over all ranks"),
    ("micro_batch_size", 16, 32, "most rows in one forward: less memory, the same run"),
    ("steps", 1200, 2520, "optimizer steps of the run"),    # CUDA: 12 tokens a parameter of blocks and head
    ("eval_every", 600, 250, "steps between evals"),
    ("eval_rows", 2048, 4096, "val rows of each source in an eval, each from one document"),
    ("save_every", 600, 500, "steps between checkpoints"),
    ("log_every", 50, 1, "steps between printed lines"),
    ("vocab_size", 2048, 32768, "tokens of the tokenizer that is trained if there is none"),
]
MODEL_FLAGS = ["depth", "vocab_size", "tokenizer"]    # --init FILE brings these; a resumed run keeps these:
FIXED_FLAGS = [*MODEL_FLAGS, "packing", "no_shuffle", "seed", "doc_mask", "num_lanes", "init"]
NOT_SAVED = ["given", "device", "out", "resume", "sample", "chat", "eval"]
USABLE_WITH = {"sample": ["out", "resume", "device", "dtype"], "chat": ["out", "resume", "device", "dtype"],
               "eval": ["data", "eval_rows", "seq_len", "micro_batch_size", "device", "dtype"]}

def parse_flags(argv=None):
    """Adds `given`: the names of the flags that were typed. The device decides the defaults of the others."""
    as_written = argparse.RawDescriptionHelpFormatter
    p = dataset.Parser(description=__doc__, formatter_class=as_written, allow_abbrev=False)
    best = torch.accelerator.current_accelerator(check_available=True)
    devices = [best.type, "cpu"] if best else ["cpu"]
    p.add_argument("--device", choices=devices, default=devices[0], help="default: the first that torch sees")
    for name, cpu, cuda, text in FLAGS:
        p.add_argument(f"--{name}", type=type(cpu), metavar="N", help=f"{text} (cpu {cpu}, cuda {cuda})")
    p.add_argument("--packing", choices=[*dataloader.PACKINGS], default="exactfit", help="rule for rows")
    p.add_argument("--compile", choices=["auto", "on", "off"], default="auto",
                   help="auto: on CUDA, which takes gcc or clang, and Python.h (python3-dev)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of activations (cuda bfloat16)")
    p.add_argument("--lr", type=float, help="peak rate of the blocks' matrices; with --init all rates follow")
    p.add_argument("--data", nargs="+", action="extend", default=[], metavar="PATH[:WEIGHT]", help="folder "
                   "or URI, WEIGHT: share of rows (default: dataset.py's download, or a built-in corpus)")
    p.add_argument("--tokenizer", metavar="DIR", help="default: trained on the data, now if missing")
    p.add_argument("--no_shuffle", action="store_true", help="documents in file order; else by --seed")
    p.add_argument("--num_lanes", type=int, metavar="N", help="world sizes that divide it give the same run "
                   "(default: the smallest multiple of 8 that the world size divides)")
    p.add_argument("--doc_mask", action="store_true", help="attention stays inside documents")
    p.add_argument("--seed", type=int, default=1, help="for the initial weights and the order of documents")
    p.add_argument("--ledger", action="store_true", help="write the loss of each document into --out")
    p.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/DATE-TIME)")
    p.add_argument("--resume", default="none", metavar="auto|none|FILE", help="auto: the newest checkpoint "
                   "in --out or of any run; it brings the flags not given. If there is none: a run of --data")
    p.add_argument("--init", metavar="FILE", help="a new run with the weights and tokenizer of a checkpoint")
    p.add_argument("--sample", metavar="PROMPT", help="only generate, from the newest checkpoint")
    p.add_argument("--chat", metavar="QUESTION", help="only answer, from the newest checkpoint")
    p.add_argument("--eval", metavar="FILE", help="only evaluate and sample FILE, on --data or its own")
    defaults = vars(p.parse_args([]))
    nothing = argparse.Namespace(**dict.fromkeys(defaults))    # has all names: argparse adds no default
    typed = {name: value for name, value in vars(p.parse_args(argv, nothing)).items() if value is not None}
    cuda = (typed.get("device") or devices[0]) == "cuda"
    has_data = typed.get("data") or dataset.list_files(dataset.default_data_dir())
    defaults |= {name: large if cuda and has_data else small for name, small, large, _ in FLAGS}
    defaults["dtype"] = "bfloat16" if cuda else "float32"
    flags = argparse.Namespace(**{**defaults, **typed}, given=[*typed])
    flags.sample = flags.sample if flags.chat is None else flags.chat
    check_flags(flags)
    return flags

def check_flags(flags):
    for mode, usable in USABLE_WITH.items():
        unusable = [f"--{name}" for name in flags.given if name not in (mode, *usable)]
        if mode in flags.given and unusable:
            raise ValueError(f"--{mode} cannot use {' '.join(unusable)}; it takes --{' --'.join(usable)}")
    for name in ["lr", "num_lanes", *(name for name, default, *_ in FLAGS if default)]:
        if name in flags.given and not 0 < getattr(flags, name) < math.inf:
            raise ValueError(f"--{name} {getattr(flags, name)}: expected a number above 0")
    if not 0 <= flags.seed < 2**63:
        raise ValueError(f"--seed {flags.seed}: expected a number from 0 to 2**63 - 1")
    if empty := [name for name in {*flags.given} - {"sample", "chat"} if getattr(flags, name) == ""]:
        raise ValueError(f"--{empty[0]} is empty: a variable of your shell that is not set?")
    if os.path.isfile(flags.out or ""):
        raise ValueError(f"--out {flags.out} is a file; expected a folder (a checkpoint: --resume FILE)")

def sources_of(flags):
    """{path: weight}. --data a -> {"a": 1.0};  --data a:0.7 s3://b/c:0.3 -> {"a": 0.7, "s3://b/c": 0.3}"""
    sources, specs = {}, flags.data or [find_data()]
    for spec in specs:
        path, _, weight = spec.rpartition(":")
        with contextlib.suppress(ValueError):
            weight = float(weight)
        is_port = re.match(r"https?://[^:/]+:\d+$", spec)
        if isinstance(weight, str) or is_port or os.path.isdir(spec):    # a folder may be named web:2
            path, weight = spec, 1.0 if len(specs) == 1 else 0.0
        if not path or not 0 < weight < math.inf or (path := dataset.source_name(path)) in sources:
            raise ValueError(f"--data {spec}{' lacks a weight' * (path == spec)}: expected PATH, or several "
                             "of PATH:WEIGHT, each path once, weights above 0: --data web:0.7 code:0.3")
        sources[path] = weight
    return sources

# ---------------------------------------------------------------------------------------------------------
# From the flags to a model and what it is for: a sample, an eval or a run

def run(flags, at_exit):
    """at_exit: an ExitStack, which ends what is started here."""
    device = start_ranks(flags, at_exit)
    out, checkpoint = choose_run(flags)
    origin = checkpoint or flags.init
    saved = load_checkpoint(origin) if origin else None
    if saved:
        settle(flags, saved, origin, is_new=not checkpoint)
    sources = sources_of(flags)
    torch.manual_seed(flags.seed)
    if saved:
        tokenizer, where = RustBPETokenizer.from_dict(saved["tokenizer"]), origin
    else:
        tokenizer, where = find_tokenizer(flags.tokenizer, list(sources), flags.vocab_size)
        flags.vocab_size = flags.vocab_size if "vocab_size" in flags.given else tokenizer.get_vocab_size()
    model = make_model(flags, tokenizer)
    if saved:
        model.load_state_dict(saved["model"])
    model.to(device)
    if flags.sample is not None:
        print0(answer(flags, model, tokenizer))
        return
    val = {path: val_windows(tokenizer, Source(path, list_shards(path, "val"), 1, None, 1), flags)
           for path in sources}
    if flags.eval:
        evaluate(saved["step"], model, tokenizer, val, flags.micro_batch_size)
        return
    print0(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, depth {flags.depth}; "
           f"tokenizer: {tokenizer.get_vocab_size():,} tokens, {where}")
    train(flags, sources, out, saved if checkpoint else None, tokenizer, model, val, at_exit)

# ---------------------------------------------------------------------------------------------------------
# A run, from top to bottom

def train(flags, sources, out, saved, tokenizer, model, val, at_exit):
    """saved: the checkpoint that the run continues, or None; val: {path: Windows}"""
    device, (rank, world) = model.embedding.weight.device, ranks_of_this_process()
    first, rows_hash = (saved["step"], saved["rows_hash"]) if saved else (0, 0)

    # Data: the loader deals rows to ranks
    val_files = {path: windows.source.fingerprint for path, windows in val.items()}
    loader = at_exit.enter_context(make_loader(flags, sources, tokenizer, device, saved, val_files))
    settings = {name: value for name, value in vars(flags).items() if name not in NOT_SAVED}
    check_ranks([settings, out, first, rows_hash, tokenizer.fingerprint(), val_files,
                 loader.state_dict()["sources"]])

    # Optimizers
    compile_parts(model, flags.compile)
    optimizers = make_optimizers(model, flags.lr, flags.batch_size * flags.seq_len, bool(flags.init))
    for optimizer, state in zip(optimizers, saved["optimizers"] if saved else (), strict=bool(saved)):
        optimizer.load_state_dict(state)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    if net is not model and flags.dtype == "bfloat16":    # half the bytes; with gloo, too, by another name
        net.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))

    # The run's folder, which begins with its first line
    print_plan(flags, sources, out, loader, val)
    machine = machine_of(device, world)
    if saved and saved["machine"] != machine:
        print0(f"now on {machine}; before on {saved['machine']}: equal up to rounding from here")
    if rank == 0:
        lock_folder(out, at_exit)
        drop_repeated(out, first)
    write_log(out, {"flags": settings, "torch": torch.__version__, "machine": machine, "from_step": first})
    losses, times = collections.deque(maxlen=50), []    # of the last steps; seconds of all
    writer = at_exit.enter_context(ThreadPoolExecutor(1))
    saving = writer.submit(int)    # the Future of the last save
    token_bytes, ledger = get_token_bytes(tokenizer).numpy(), []

    def save(step):    # all ranks together: each knows its own lanes and momenta
        nonlocal saving
        if ledger:    # a file for each save: a resumed run removes whole files
            with atomic_file(f"{out}/ledger/step_{ledger[0]['step']:07d}_rank_{rank:04d}.parquet") as part:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ledger), part)
            ledger.clear()
        content = {
            "version": VERSION, "step": step, "flags": settings, "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers], "tokenizer": tokenizer.as_dict(),
            "loader": json.dumps(gather_states(loader)), "rows_hash": rows_hash, "val_files": val_files,
            "constant_since": saved["constant_since"] if saved else 0, "machine": machine}
        if rank == 0:
            saving.result()    # one copy in memory at a time
            copy = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), content)
            saving = writer.submit(write_checkpoint, out, step, copy)

    def report(step, rows, lr, counts, sums, targets, nats, copied, waited, seconds):    # -> must it stop?
        nonlocal rows_hash
        began = time.perf_counter()
        if copied:    # by the GPU, which is computing the next step by now
            copied.synchronize()
        (n_tokens, added, n_signals), (total, norm) = counts.tolist(), sums.tolist()
        loss, rows_hash = total / max(1, n_tokens), (rows_hash + added) % 2**64
        seen = list(ledger_rows(step, *rows, targets.numpy(), nats.numpy(), token_bytes))
        ledger.extend(seen if flags.ledger else ())
        check_loss(step, loss, norm, losses, seen, out)
        losses.append(loss)
        times.append(seconds + time.perf_counter() - began)
        speed = flags.batch_size * flags.seq_len / times[-1]
        record = {"step": step, "loss": loss, "lr": lr, "norm": norm, "tokens_per_s": speed,
                  "mfu": speed * model.flops_per_token(flags.seq_len) / (world * peak_flops(device)),
                  "ms": 1e3 * times[-1], "wait_ms": 1e3 * waited, "rows_hash": f"{rows_hash:016x}",
                  "memory_gb": peak_memory(flags.device) / 1e9}
        write_log(out, record)
        print_step(flags, record, times)
        return n_signals > 0

    # Loop. SIGTERM and Ctrl-C (which torchrun repeats) finish the step or eval, then save. The numbers of a
    # step are read while the GPU is busy with the next one
    signals, unread, stopping = [], [], False
    for number in (signal.SIGTERM, signal.SIGINT):    # os.write: print may not be interrupted by print
        at_exit.callback(signal.signal, number, signal.signal(number, lambda number, _: (
            signals.append(number), os.write(2, b"stopping after this step or eval; next: --resume auto\n"))))

    print0("    step      loss        lr    norm      tok/s    MFU   ms/step   wait ms   mem GB     left")
    for step in range(first, flags.steps + 1):
        done = step >= flags.steps
        saves, evals = (step and (done or step % n == 0) for n in (flags.save_every, flags.eval_every))
        while unread and (saves or evals or stopping or len(unread) > 1):
            stopping |= report(*unread.pop(0))
        if (saves or stopping) and not os.path.exists(checkpoint_path(out, step)):
            save(step)
        if evals and not stopping:    # after the save: a run that is killed in its eval repeats it
            for record in evaluate(step, model, tokenizer, val, flags.micro_batch_size):
                write_log(out, record)
            write_log(out, {"step": step, **loader.stats()})
        if stopping or done:
            break
        began = time.perf_counter()
        first_row, (inputs, targets) = loader.position.g, next(loader)
        rows = first_row, loader.pieces()
        waited = time.perf_counter() - began
        counts = count_and_hash(inputs, targets, first_row, len(signals))
        lr = set_rates(optimizers, step, flags.steps)
        sums, nats = train_step(net, model, optimizers, inputs, targets, counts[0], flags.micro_batch_size)
        results = [one.to("cpu", non_blocking=True) for one in (counts, sums, targets, nats)]
        copied = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
        unread.append((step, rows, lr, *results, copied, waited, time.perf_counter() - began))

    saving.result()
    if empty := sum(counts["empty_documents"] for counts in loader.stats()["sources"].values()):
        print0(f"null documents skipped by rank 0 since its start, all epochs: {empty:,}")
    print0(f"rows: hash {rows_hash:016x}; runs that print the same one had the same rows")
    how = "done" if done else f"stopped ({signal.Signals(signals[0]).name if signals else 'by another rank'})"
    size = os.path.getsize(checkpoint_path(out, step)) / 1e6 if rank == 0 else 0    # others may not see it
    print0(f"{how} at step {step} of {flags.steps}; {step - first} steps took {sum(times):.0f} s; "
           f"checkpoint: {checkpoint_path(out, step)} ({size:,.1f} MB)")

def make_loader(flags, sources, tokenizer, device, saved, val_files):
    """The loader of this rank; with `saved`, a checkpoint, at its place."""
    _, world = ranks_of_this_process()
    loader = PackedLoader(
        tokenizer, -(-flags.batch_size // world), flags.seq_len, "train", data_dir=sources,
        packing=flags.packing, num_lanes=flags.num_lanes, device=device if device.type == "cuda" else "cpu",
        shuffle_seed=None if flags.no_shuffle else flags.seed)
    dataloader.check_start(loader)    # the first batch would, when the run's folder is there
    if flags.batch_size % world:
        raise ValueError(f"{flags.batch_size} rows for {world} ranks; try --batch_size {loader.B * world}")
    if saved:
        loader.load_state_dict(json.loads(saved["loader"]))
        for path in val_files.keys() & saved["val_files"].keys():
            if val_files[path] != saved["val_files"][path]:
                print0(f"warning: the val files of {path} have changed: older bits per byte do not compare")
    flags.data, flags.num_lanes = flags.data or list(sources), loader.num_lanes    # for the checkpoint
    return loader

def check_ranks(values):
    rank, world = ranks_of_this_process()
    digest = torch.tensor(int(hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12], 16))
    if sum_over_ranks(digest.clone()) != world * digest:
        raise ValueError(f"ranks differ in flags, data, tokenizer or checkpoint (seen on rank {rank}); start "
                         "all ranks with the same")

def print_plan(flags, sources, out, loader, val):
    for path, (source, *_, tokens_per_document) in val.items():
        n_documents, names = loader.sources[path].group_sizes.sum(), [shard.name for shard in source.shards]
        tokens = flags.steps * flags.batch_size * flags.seq_len * sources[path] / sum(sources.values())
        epochs = tokens / max(1, n_documents * tokens_per_document)    # beyond 4: arXiv 2305.16264
        print0(f"{path}: {n_documents:,} documents to train on, about {epochs:.1f} epochs; "
               f"{source.group_sizes.sum():,} for val ({', '.join(names):.80})")
    print0(f"a step: {flags.batch_size} rows of {flags.seq_len} tokens, {loader.B} on each rank, at most "
           f"{flags.micro_batch_size} in a forward; run: {out}")

def check_loss(step, loss, norm, before, rows, out):
    """Name the hardest documents of a step if its loss is not finite, or far above those `before`."""
    is_finite = math.isfinite(loss + norm)
    if is_finite and (len(before) < 50 or loss <= np.mean(before) + 6 * np.std(before)):
        return
    means = [row["nats"] / max(1, row["tokens"]) for row in rows]
    hardest = ("{path}, row group {row_group}, row {row} ({:.2f} nats a token)".format(means[i], **rows[i])
               for i in np.argsort(means)[:-4:-1])    # from the end, where NaN is
    file = max(list_checkpoints(out), default="FILE (the same run writes one: --steps 1 --out OTHER)")
    message = (f"step {step}: {'the loss jumped to' if is_finite else 'loss'} {loss:.4g}, gradient norm "
               f"{norm:.4g}; this rank's hardest documents: {'; '.join(hardest)}. All of them: "
               f"python -m dev.bench audit --resume {file} --steps {step}:{step + 1}")
    if not is_finite:
        raise ValueError(message)
    print(message, flush=True)

def train_step(net, model, optimizers, inputs, targets, n_tokens, micro):
    """-> (nats of all ranks' tokens, norm of the gradient before it was clipped) as a tensor; nats (B, T)"""
    device, (_, world) = model.embedding.weight.device, ranks_of_this_process()
    nats = []
    parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    for i, (some_inputs, some_targets) in enumerate(parts):
        last = i == len(parts) - 1    # sums over the ranks; no_sync must enclose the forward, too
        with contextlib.nullcontext() if last or net is model else net.no_sync():
            losses = net(some_inputs.to(device), some_targets.to(device))
            (losses.sum() * (world / n_tokens.clamp(min=1))).backward()    # DDP divides by the world size
        nats.append(losses.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    nats = torch.cat(nats).view_as(targets)
    return torch.stack([sum_over_ranks(nats.sum()), norm]), nats

def ledger_rows(step, first_row, pieces, targets, nats, token_bytes):
    """Yield a row for each piece of a document: its tokens with a loss (not BOS), their bytes and loss."""
    rank, world = ranks_of_this_process()
    for b, row in enumerate(pieces):
        for location, epoch, start, stop, offset in row:
            of_piece = b, slice(max(0, offset - (start > 0)), offset + stop - start - 1)
            tokens = targets[of_piece][targets[of_piece] >= 0]
            yield {"step": step, "g": first_row + rank + b * world, **location._asdict(), "epoch": epoch,
                   "start": start, "stop": stop, "tokens": len(tokens),
                   "bytes": int(token_bytes[tokens].sum()), "nats": float(nats[of_piece].sum())}

def count_and_hash(inputs, targets, first_row, n_signals):
    """-> int64 (3,), sums over all ranks: targets, the hash of these rows (modulo 2**64), signals"""
    (B, T), (rank, world) = inputs.shape, ranks_of_this_process()
    rows = first_row + rank + world * torch.arange(B, device=inputs.device)
    places = rows[:, None] * T + torch.arange(T, device=inputs.device)
    factors = places * 0x1E3779B97F4A7C15 | 1    # odd numbers: of the place in the run, whatever the rank
    added = ((3 * inputs + targets) * factors).sum()
    return sum_over_ranks(torch.stack([(targets >= 0).sum(), added, torch.full_like(added, n_signals)]))

# ---------------------------------------------------------------------------------------------------------
# Ranks and device. One process alone takes the same path

def start_ranks(flags, at_exit):
    """-> device. torchrun's ranks form a group on CPUs, too; else they would be N runs."""
    backend = "gloo"    # for tensors in CPU memory (flags, states): without a wait for the GPU
    if flags.device == "cpu":
        threads = env_int("OMP_NUM_THREADS", least=1)
        if threads == 1 and (env_int("LOCAL_WORLD_SIZE", least=1) or 1) > 1:
            threads = None    # torchrun sets it to 1, where the user has not set it
        torch.set_num_threads(threads or cores())
    else:
        torch.accelerator.set_device_index(env_int("LOCAL_RANK", least=0) or 0)
        backend = f"cpu:gloo,{flags.device}:{dist.get_default_backend_for_device(flags.device)}"
    if env_int("RANK", least=0) is not None:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
        # Its threads may abort the exit (pytorch #190489); DDP's cycle keeps it
        at_exit.callback(lambda: (gc.collect(), dist.destroy_process_group()))
    torch.set_float32_matmul_precision("high" if flags.device == "cuda" else "highest")
    return torch.device(flags.device)

def print0(text):
    if ranks_of_this_process()[0] == 0:
        print(text, flush=True)

def sum_over_ranks(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor

# ---------------------------------------------------------------------------------------------------------
# Model: RoPE, QK-norm, RMSNorm without parameters, squared ReLU, no biases, untied embedding and head

# What the loop asks of a model, if you bring your own:
#   model(inputs, targets): nats of each target, (B * T,), 0 where the target is -100; for training and evals
#   model(inputs): logits in float32, (B, T, vocabulary or more); for samples
#   flops_per_token(T): for the MFU that is printed
#   blocks, read_out: compiled one by one; Muon takes the matrices of `blocks`
#   embedding, value_embeddings, previous, bigrams, head: have their own rates in make_optimizers

def make_model(flags, tokenizer):
    """For training, --eval and --sample. Weights are drawn from torch's random state."""
    if flags.doc_mask and flags.seq_len % 128 == 64:    # cuDNN's backward: NaN with a mask (pytorch #196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
    bos = tokenizer.get_bos_token_id() if flags.doc_mask else None
    return GPT(flags.depth, tokenizer.get_vocab_size(), flags.dtype == "bfloat16", bos)

def norm(x):
    return F.rms_norm(x, (x.size(-1),))

def rotate(x, cos, sin):    # x: (B, heads, T, head_dim); cos, sin: (T, head_dim / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

@functools.cache
def rope_tables(T, head_dim, device, dtype):    # (T, head_dim / 2) each
    angles = torch.outer(torch.arange(T), 10_000 ** -(torch.arange(0, head_dim, 2) / head_dim))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

def offset_keys(k, begins):    # k: (B, heads, T, head_dim), rotated; begins: (B, 1, T, 1) or None
    """
    Half of each head's channels, the RoPE pairs that rotate slowly, come from the key of the previous token,
    so one layer can copy what followed an earlier occurrence: 1.165 -> 1.049 bits per byte (500 steps of 8
    rows, seed 1; of novels, 0.5 % less). 0 for the first token and those of `begins`.
    """
    quarter = k.size(-1) // 4
    is_slow = torch.arange(k.size(-1), device=k.device) // quarter % 2 == 1
    previous = F.pad(k, (0, 0, 1, -1))
    return torch.where(is_slow, previous if begins is None else previous.masked_fill(begins, 0), k)

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

    def forward(self, x, token_values, cos, sin, mask, begins):    # x: (B, T, width)
        B, T, width = x.shape
        n = norm(x)
        values = self.v(n) if token_values is None else self.v(n) + token_values
        q, k, v = (z.view(B, T, -1, self.head_dim).transpose(1, 2) for z in (self.q(n), self.k(n), values))
        q, k = (rotate(norm(z), cos, sin).type_as(v) for z in (q, k))
        k = offset_keys(k, begins)
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.attention_out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.relu(self.up(norm(x))).square())

class GPT(nn.Module):
    """bos: attention stays inside documents, which begin with it. None: it crosses their borders."""

    def __init__(self, depth, vocab_size, bf16=False, bos=None):
        super().__init__()
        self.bf16, self.bos, self.flex = bf16, bos, False
        width, padded_vocab = 64 * depth, -(-vocab_size // 64) * 64
        self.head_dim = 128 if depth % 2 == 0 and depth >= 8 else 64
        self.embedding = nn.Embedding(padded_vocab, width)
        # Each token adds its own vector to the values of attention: 1.6452 -> 1.6017 bits per byte.
        self.value_embeddings = nn.ModuleDict()
        for i in sorted({*range(depth)} - {*range(3, depth - 3)}):
            values = self.value_embeddings[str(i)] = nn.Embedding(padded_vocab, width)
            nn.init.uniform_(values.weight, -(3 / width) ** 0.5, (3 / width) ** 0.5)
        # Each embedding gets some of the previous token's: 1.059 -> 1.049 bits per byte (seed 1).
        self.previous = nn.Parameter(torch.zeros(width))
        # A hash of two neighbouring tokens chooses a vector that the second one gets, too:
        # depth 2: 1.070 -> 1.049 bits per byte, 4: 1.001 -> 0.990 (3 seeds); 126 M parameters at depth 12.
        self.bigrams = nn.Embedding(5 * padded_vocab, width)
        self.bigram_share = nn.Parameter(torch.full((width,), 0.1))
        nn.init.zeros_(self.bigrams.weight)
        self.blocks = nn.ModuleList(Block(width, self.head_dim) for _ in range(depth))
        self.head = nn.Linear(width, padded_vocab, bias=False)
        nn.init.zeros_(self.head.weight)    # the first loss is ln(padded_vocab)

    def forward(self, inputs, targets=None):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
            # autocast alone would leave the stream between the blocks in fp32
            x = norm(self.embedding(inputs)).to(torch.bfloat16 if self.bf16 else torch.float32)
            pairs = (36313 * F.pad(inputs, (1, -1)) ^ 27191 * inputs) % self.bigrams.num_embeddings
            before = self.previous * F.pad(x, (0, 0, 1, -1)) + self.bigram_share * self.bigrams(pairs)
            mask, begins = None, None
            if self.bos is not None:    # nothing crosses a BOS
                is_bos = inputs == self.bos
                document = is_bos.cumsum(1)
                if self.flex and targets is not None:    # not for samples, which are not compiled
                    def attends(row, head, query, key):
                        return (query >= key) & (document[row, query] == document[row, key])
                    mask = create_block_mask(attends, len(x), None, x.size(1), x.size(1), x.device)
                else:
                    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]    # (B, 1, T, T)
                before, begins = before.masked_fill(is_bos[..., None], 0), is_bos[:, None, :, None]
            x = x + before.type_as(x)
            cos, sin = rope_tables(inputs.size(1), self.head_dim, x.device, x.dtype)
            for i, block in enumerate(self.blocks):
                values = None
                if str(i) in self.value_embeddings:
                    values = self.value_embeddings[str(i)](inputs).type_as(x)
                x = block(x, values, cos, sin, mask, begins)
            return self.read_out(x, targets)

    def read_out(self, x, targets):
        logits = 15 * torch.tanh(self.head(norm(x)).float() / 15)    # 1.0536 -> 1.0479 bits per byte
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")

    def flops_per_token(self, T):
        """Forward and backward, counted as in PaLM's appendix B: causal attention as if it were full."""
        matrices = sum(p.numel() for p in (*self.blocks.parameters(), *self.head.parameters()))
        return 6 * matrices + 12 * len(self.blocks) * T * self.embedding.embedding_dim

def compile_parts(model, choice):
    """Block by block; all blocks share the code of the first."""
    cuda = model.embedding.weight.is_cuda
    if choice == "on" or (choice == "auto" and cuda):
        torch._dynamo.config.optimize_ddp = False    # blocks are compiled one by one: nothing to split
        model.flex = cuda    # SDPA has no fast kernel for a mask
        for block in model.blocks:
            block.compile(dynamic=False)
        model.read_out = torch.compile(model.read_out, dynamic=False)

# ---------------------------------------------------------------------------------------------------------
# Optimizer

def orthogonalize(matrices, steps=5):
    """Near U V^T of each SVD U S V^T, by Newton-Schulz steps (coefficients: Keller Jordan, 2024)."""
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    # fp32 on a CPU: 35 ms of CPU time for the demo's 12 matrices; bfloat16: 569 (an EPYC without AMX)
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x

class Muon:
    """Moves matrices by their orthogonalized momentum. Ranks share the work on each stack of one shape."""

    def __init__(self, named: list, lr):
        (rank, self.world), self.stacks = ranks_of_this_process(), []
        for shape in dict.fromkeys(p.shape for _, p in named):
            stack = {name: p for name, p in named if p.shape == shape}
            share = -(-len(stack) // self.world)
            # Too few matrices: the last ranks repeat the work of the first
            mine = [[*stack][i % len(stack)] for i in range(rank * share, rank * share + share)]
            self.stacks.append((stack, mine, named[0][1].new_zeros(share, *shape)))
        self.param_groups = [{"params": [p for _, p in named], "lr": lr, "momentum": 0.95, "decay": 0.0}]

    @torch.no_grad()
    def step(self):
        lr, momentum, decay = (self.param_groups[0][name] for name in ("lr", "momentum", "decay"))
        for stack, mine, momenta in self.stacks:
            gradients = torch.stack([stack[name].grad for name in mine])
            average = momenta.lerp_(gradients, 1 - momentum)
            updates = self._gather(orthogonalize(gradients.lerp(average, momentum)))
            for p, update in zip(stack.values(), updates, strict=False):
                # Cautious weight decay: only where it does not work against the update.
                p.sub_(p * (update * p > 0), alpha=lr * decay)
                p.sub_(update, alpha=lr * max(1, p.size(0) / p.size(1)) ** 0.5)

    def _gather(self, share):    # (n, ...) of each rank -> (world * n, ...)
        if self.world == 1:
            return share
        gathered = share.new_empty(self.world, *share.shape)
        dist.all_gather([*gathered], share.contiguous())
        return gathered.flatten(0, 1)

    def state_dict(self):    # by all ranks together: the same for every world size
        return {name: momentum for stack, _, momenta in self.stacks
                for name, momentum in zip(stack, self._gather(momenta), strict=False)}

    def load_state_dict(self, saved):
        for _, mine, momenta in self.stacks:
            momenta.copy_(torch.stack([saved[name] for name in mine]))

def make_optimizers(model, lr, tokens_per_step, fine_tunes=False):
    """
    Muon for the matrices of the blocks, AdamW for the rest. Rates are for steps of 2 ** 19 tokens
    (embeddings: nanochat's scripts/base_train.py); smaller steps take less. What was tried: dev/log.md.
    """
    width = model.embedding.embedding_dim / 768
    embeddings = [model.embedding.weight, model.bigrams.weight, *model.value_embeddings.parameters()]
    usual = 0.02 / (1 + 1250 / tokens_per_step)    # 4 rows of 256: 0.0090, 8: 0.0124, 2 ** 19 tokens: 0.02
    lr = lr or usual * (0.1 if fine_tunes else 1.0)
    share = lr / usual if fine_tunes else 1.0
    batch = share * min(1.0, tokens_per_step / 2 ** 19) ** 0.2
    groups = [{"params": embeddings, "lr": 0.3 * batch / width ** 0.5},
              {"params": list(model.head.parameters()), "lr": 0.0045 * batch / width},
              {"params": [model.previous, model.bigram_share], "lr": 0.1 * share}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.98), eps=1e-10, weight_decay=0.0, fused=True)
    optimizers = [adamw, Muon(list(model.blocks.named_parameters()), lr)]
    for optimizer in optimizers:    # not in their states: --lr may change at a resume
        optimizer.peak_rates = [group["lr"] for group in optimizer.param_groups]
    return optimizers

def set_rates(optimizers, step, steps):
    """Warm-up in 3 % of the steps, constant, linear decay to 5 % in the last 65 %. -> rate of the matrices"""
    share = min(1.0, (step + 1) / max(1.0, 0.03 * steps), 0.05 + 0.95 * (steps - step) / (0.65 * steps))
    for optimizer in optimizers:
        for group, peak in zip(optimizer.param_groups, optimizer.peak_rates, strict=True):
            group["lr"] = peak * share
            if "momentum" in group:    # Muon's: a warm-up, as in modded-nanogpt, and a cosine
                group["momentum"] = 0.85 + 0.10 * min(1.0, step / 300)
                # Rate x decay x steps is at most 6: 0.902 bits per byte (depth 4, 1,000 steps); 12: 0.908
                most = min(1.0, 6 / (peak * steps))
                group["decay"] = most * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    return group["lr"]

# ---------------------------------------------------------------------------------------------------------
# Evaluation: bits per byte of val documents, beside zlib's, and a sample

class Windows(NamedTuple):
    """Rows of val documents, each from one document alone, so that no packing has an advantage."""
    source: Source
    inputs: torch.Tensor     # int64 (n, T)
    targets: torch.Tensor    # int64 (n, T), -100 for context and for what follows the document
    zlib_bpb: float | None   # of these documents, each compressed alone at level 9; None for chats
    tokens_per_document: float

def val_windows(tokenizer, source, flags):
    """The first --eval_rows windows of documents: T + 1 tokens each; later ones repeat T // 4 as context."""
    T, lengths, windows, n_bytes, n_packed = flags.seq_len, [], [], 0, 0    # windows: ids, context
    for ids in documents_of(tokenizer, source):
        if len(windows) >= flags.eval_rows:
            break
        lengths.append(len(ids))
        if len(ids) > 1:
            windows.append((ids[:T + 1], 1))
            data = tokenizer.enc.decode_bytes(ids[1:].tolist()) if ids.min() >= 0 else b""    # no chats
            n_bytes, n_packed = n_bytes + len(data), n_packed + bool(data) * len(zlib.compress(data, 9))
        for stop in range(T + 1, len(ids), T - T // 4):
            windows.append((ids[stop - T // 4 - 1:][:T + 1], T // 4 + 1))
    if not (windows := windows[:flags.eval_rows]):
        raise ValueError(f"the val split of {source.name} has no text, only nulls and empty documents")
    rows = -(-len(windows) // flags.micro_batch_size) * flags.micro_batch_size    # a smaller last batch would
    inputs = torch.full((rows, T), tokenizer.get_bos_token_id())    # be compiled for itself
    targets = torch.full((rows, T), -100)
    for i, (ids, given) in enumerate(windows):
        ids = torch.from_numpy(ids.astype(np.int64))
        inputs[i, :len(ids) - 1] = torch.where(ids < 0, ~ids, ids)[:-1]    # ~t is token t without a loss
        targets[i, given - 1:len(ids) - 1] = ids.where(ids >= 0, -100)[given:]
    zlib_bpb = 8 * n_packed / n_bytes if n_bytes else None
    return Windows(source, inputs, targets, zlib_bpb, sum(lengths) / len(lengths))

def documents_of(tokenizer, source):
    """Yield the ids of each document, in file order."""
    encoder, theirs = Encoder(tokenizer, cores()), source.shards[0].fingerprint
    if theirs not in (None, encoder.tokenizer.fingerprint):
        raise ValueError(f"{source.name} needs the tokenizer that made it, {maker_of(source.shards[0])}")
    for shard in source.shards:
        for row_group, n in enumerate(shard.group_sizes):
            array = shard.read(row_group)
            for first in range(0, n, 1000):    # the first documents may be enough
                yield from encoder.encode(Part(shard, row_group, np.arange(n)[first:first + 1000]), array)

def evaluate(step, model, tokenizer, val, micro):
    """Print bits per byte of each source and over all, and a sample. -> their records for the log"""
    token_bytes, records = get_token_bytes(tokenizer), []
    totals = {path: count_nats(model, windows, micro, token_bytes) for path, windows in val.items()}
    if len(val) > 1:
        totals["all"] = sum(totals.values())
    for path, total in totals.items():
        nats, n_bytes = total.tolist()
        bpb, zlib_bpb = nats / max(1, n_bytes) / math.log(2), val[path].zlib_bpb if path in val else None
        records.append({"step": step, "val_bpb": bpb, "val_bytes": int(n_bytes), "zlib_bpb": zlib_bpb,
                        "source": path})
        of = {"all": " over all sources"}.get(path, f" of {path}") if len(val) > 1 else ""
        beside = f" (zlib -9: {zlib_bpb:.4f})" if zlib_bpb else ""
        print0(f"step {step}: val {bpb:.4f} bits per byte{of}{beside}")
    _, inputs, targets, *_ = next(iter(val.values()))
    has_loss = (targets[0] >= 0).int()
    n = has_loss.argmax()    # targets without a loss: a question; of a text, the prompt is 8 tokens
    end = targets[0, n + has_loss[n:].argmin() - 1].item() if n else None    # of its answer, or -100
    with torch.compiler.set_stance("force_eager"):    # a shape that occurs only here: do not compile it
        text = generate(model, tokenizer, inputs.size(1), inputs[0, :(n or 8) + 1].tolist(), 64, end)
    print0("sample: " + text.replace("\n", "\n        "))
    return records

@torch.no_grad()
def count_nats(model, windows, micro, token_bytes):
    """-> float64 (2,): nats of targets that represent bytes, and these bytes"""
    (rank, world), device = ranks_of_this_process(), model.embedding.weight.device
    totals = torch.zeros(2, dtype=torch.float64)
    batches = list(zip(windows.inputs.split(micro), windows.targets.split(micro), strict=True))
    for inputs, targets in batches[rank::world]:    # some ranks may have none
        n_bytes = token_bytes[targets.clamp(min=0)].where(targets >= 0, 0).flatten()
        nats = model(inputs.to(device), targets.to(device)).cpu().double()
        totals += torch.stack([nats.where(n_bytes > 0, 0).sum(), n_bytes.sum()])
    return sum_over_ranks(totals)

def answer(flags, model, tokenizer):
    """What follows --sample, or answers --chat."""
    if flags.chat is None:
        prompt = [tokenizer.get_bos_token_id(), *tokenizer.encode(flags.sample)]
        return generate(model, tokenizer, flags.seq_len, prompt, 200)
    ids, mask = tokenizer.render_conversation({"messages": [
        {"role": "user", "content": flags.chat}, {"role": "assistant", "content": ""}]})
    n = mask.index(1)    # the first token with a loss ends the empty answer
    return generate(model, tokenizer, flags.seq_len, ids[:n], 200, ids[n], n)

@torch.no_grad()
def generate(model, tokenizer, T, prompt, n_tokens, end=None, first=0, temperature=0.8, top_k=50):
    """The text of the prompt and of what follows, up to BOS or the token `end`; from id `first` on."""
    device, bos = model.embedding.weight.device, tokenizer.get_bos_token_id()
    ids, random = list(prompt), torch.Generator().manual_seed(1)
    for _ in range(n_tokens):
        seen = ids[-T:]
        # Always (1, T): no token sees the padding after it
        logits = model(torch.tensor([seen + [bos] * (T - len(seen))], device=device))[0, len(seen) - 1].cpu()
        best, at = logits[:tokenizer.get_vocab_size()].topk(top_k)
        ids.append(at[torch.multinomial(F.softmax(best / temperature, 0), 1, generator=random)].item())
        if ids[-1] in (bos, end):
            break
    text = tokenizer.decode([i for i in ids[first:] if i not in (bos, end)])
    text += f" ... (no end after {n_tokens} tokens)" * (end is not None and ids[-1] not in (bos, end))
    return "\n".join(map(printable, text.split("\n")))

# ---------------------------------------------------------------------------------------------------------
# Runs and checkpoints: a file that is complete or not there

VERSION = 5    # of a checkpoint's content

def choose_run(flags):
    """-> the run's folder; the checkpoint to resume from or to use, or None"""
    named, trains = flags.eval or flags.resume, not flags.eval and flags.sample is None
    if named not in ("auto", "none"):
        return flags.out or os.path.dirname(named) or ".", named
    now = sum_over_ranks(torch.tensor((ranks_of_this_process()[0] == 0) * time.time(), dtype=torch.float64))
    new = flags.out or datetime.fromtimestamp(now.item()).strftime("runs/%Y%m%d-%H%M%S-%f")
    found = (list_checkpoints(flags.out) if flags.out
             else sorted(glob.glob("runs/*/step_*.pt"), key=os.path.getmtime))
    if trains and flags.resume == "none":
        if flags.out and found:
            raise ValueError(f"{new} holds checkpoints; resume with --resume auto, or choose another --out")
        return new, None
    if found:
        return os.path.dirname(found[-1]), found[-1]
    if trains and {"data", "init"} & {*flags.given}:
        print0(f"no checkpoint in {new} yet: a new run")
        return new, None
    raise ValueError(f"no checkpoint in {flags.out or 'runs'}; train one: python train.py --data DIR"
                     + f" --out {flags.out}" * bool(flags.out))

def lock_folder(folder, at_exit):
    """Two runs in one folder would delete each other's checkpoints. Makes the folder; locks it until exit."""
    os.makedirs(folder, exist_ok=True)
    try:
        import fcntl
        file = at_exit.enter_context(open(os.path.join(folder, ".lock"), "a"))    # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run uses {folder}; wait for its end, or choose another --out") from None
    except (OSError, ImportError):    # no locks on this file system (Lustre, Windows), or no space
        return
    for left_over in glob.glob(os.path.join(glob.escape(folder), "step_*.pt.*.tmp")):    # of a killed run
        os.remove(left_over)

def drop_repeated(folder, first):
    """Remove lines of the log and files of the ledger from step `first` on, where the run begins."""
    if (newest := max(list_checkpoints(folder), default="")) > checkpoint_path(folder, first):
        raise ValueError(f"{newest} is newer than step {first}; resume from that, or choose another --out")
    path = os.path.join(folder, "log.jsonl")
    kept = [record for record in read_log(path) if record.get("step", -1) < first]
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
    for path in glob.glob(os.path.join(glob.escape(folder), "ledger", "step_*")):
        if os.path.basename(path) >= f"step_{first:07d}":
            os.remove(path)

def list_checkpoints(folder):
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"step_{7 * '[0-9]'}.pt")))

def checkpoint_path(folder, step):
    return os.path.join(folder, f"step_{step:07d}.pt")

def settle(flags, saved, path, is_new):
    """Take flags that were not typed from the checkpoint, with --init only those of the model. Say so."""
    theirs = {name: value for name, value in saved["flags"].items() if name in MODEL_FLAGS or not is_new}
    changed = [name for name in theirs if name in flags.given and theirs[name] != getattr(flags, name)]
    if refused := [name for name in changed if name in FIXED_FLAGS]:
        raise ValueError(f"{as_typed(vars(flags), refused)} does not fit {path}, which has: "
                         f"{as_typed(theirs, refused)}; leave out these flags, or else --resume or --init")
    vars(flags).update({name: value for name, value in theirs.items() if name not in flags.given})
    if is_new:
        print0(f"from {path}: weights, tokenizer, {as_typed(vars(flags), ['depth', 'vocab_size'])}; not its "
               f"other flags, such as {as_typed(saved['flags'], ['seq_len', 'steps'])}")
    elif not flags.eval and flags.sample is None:
        changes = as_typed(vars(flags), changed) + " from " + as_typed(theirs, changed)
        print0(f"resumed from {path}: step {saved['step']}; changed: {changes if changed else 'nothing'}")
        if saved["step"] > flags.steps:
            raise ValueError(f"--steps {flags.steps}: {path} is at step {saved['step']} of the run already")
        if {"batch_size", "seq_len", "data"} & {*changed}:    # the steps before had rows of other flags
            saved["constant_since"] = saved["step"]

def as_typed(values, names):
    """Example: --depth 2 --data ['a:0.7', 'b:0.3'] --no_shuffle False"""
    return " ".join(f"--{name} {values[name]}" for name in names)

def write_checkpoint(folder, step, content):
    """By a thread of rank 0. The newest two are kept; of a full disk, the last good one."""
    try:
        with atomic_file(checkpoint_path(folder, step)) as part, open(part, "wb") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:    # torch turns a full disk into "unexpected pos"
        last = max(list_checkpoints(folder), default="none")
        raise OSError(f"step {step} is not saved: {error.__context__ or error}; last: {last}") from error
    for path in list_checkpoints(folder)[:-2]:
        os.remove(path)

def load_checkpoint(path):
    try:
        if not env_int("LOCAL_RANK", least=0) and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"{damaged} differs from its checksum")    # torch compares none; once a node
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content.get("version") != VERSION:
            raise ValueError(f"the checkpoint's version is {content.get('version')}; expected {VERSION}")
    except Exception as error:    # a file that is not torch's raises almost anything
        why = re.sub(r"\x1b\[\d*m", "", str(error))    # torch prints in bold
        why = f"damaged, or no step_*.pt of this train.py ({type(error).__name__}: {why:.200})"
        what = why if os.path.isfile(path) else "no checkpoint's file"
        there = {*list_checkpoints(path if os.path.isdir(path) else os.path.dirname(path))}
        others = there - {path} or {*glob.glob("runs/*/step_*.pt")} - {path}
        verb = "remove it to go on from" if path in there else "there is"
        advice = f"{verb} {max(others)}" if others else "expected a step_*.pt of a run"
        raise ValueError(f"{path} is {what}; {advice}") from None
    return content

# ---------------------------------------------------------------------------------------------------------
# What is printed and logged

def peak_flops(device):
    """Dense bf16 peak of this GPU by its data sheet; infinite if it is not known."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    known = {"GB200": 2500e12, "B200": 2250e12, "NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
             "H200": 989e12, "A100": 312e12}    # the first that is part of the name
    return next((flops for chip, flops in known.items() if chip in name), math.inf)

def machine_of(device, world):
    """On what the rounding of sums depends. Example: ranks 1, threads 2, AMD EPYC 7763 64-Core, AVX2"""
    if device.type == "cuda":
        return f"ranks {world}, {torch.cuda.get_device_name()}"
    name = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line[12:].strip(" :\n") for line in file if line.startswith("model name")), name)
    name += f", {torch.backends.cpu.get_cpu_capability()}"    # of AVX2, AVX512, ...: what torch uses
    return f"ranks {world}, threads {torch.get_num_threads()}, {name}"

def peak_memory(device):
    """The most bytes so far: of the GPU's memory, else of the process; 0 if the system does not tell."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError), open("/proc/self/status") as status:    # ru_maxrss counts the parent's
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return 0

def read_log(path):
    """Its records, without truncated lines."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)

def write_log(folder, record):
    """A JSON line in the run's folder, by rank 0 (dev.pictures loss draws them)."""
    if ranks_of_this_process()[0] == 0:
        # >>> wandb, TensorBoard and the like go here: every record passes here, on rank 0. <<<
        with open(os.path.join(folder, "log.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")

def print_step(flags, r, times):    # r: its record; times: seconds of each step
    if r["step"] % flags.log_every == 0 or r["step"] == flags.steps - 1:
        left = int((flags.steps - r["step"] - 1) * np.mean(times[-50:]))
        mfu = f"{r['mfu']:7.1%}" if r["mfu"] else "      -"
        print0(f"{r['step']:8d}{r['loss']:10.4f}{r['lr']:10.6f}{r['norm']:8.3f}{r['tokens_per_s']:11,.0f}{mfu}"
               f"{r['ms']:10.1f}{r['wait_ms']:10.1f}{r['memory_gb']:9.2f}{left // 60:6d}m{left % 60:02d}s")

# ---------------------------------------------------------------------------------------------------------
# python train.py

def main(argv=None):
    with dataset.errors_in_one_line(), contextlib.ExitStack() as at_exit:
        flags = parse_flags(argv)
        try:
            run(flags, at_exit)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{error} Lower --micro_batch_size (now {flags.micro_batch_size}): the same run "
                             "in less memory. Lower --seq_len or --depth: another run.") from None
        except RuntimeError as error:
            if type(error.__cause__) is ValueError:    # of a document, which Encoder.encode names
                raise ValueError(error) from None
            if not re.search("onnection|Timed out", str(error)):    # of gloo: "Connection closed by peer"
                raise
            raise ValueError("lost the connection to another rank; see its output") from None

if __name__ == "__main__":
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
