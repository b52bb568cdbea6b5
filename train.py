"""
Train a GPT on packed token batches: one process, one node or many, on CPUs or GPUs.

    python train.py                                      the demo: Python's own library, 2 minutes
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
import shutil
import signal
import sys
import sysconfig
import threading
import time
import zipfile
import zlib
from datetime import datetime, timedelta
from typing import NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # One line for a Ctrl-C in the seconds that torch takes to import, up to main
    signal.signal(signal.SIGINT, lambda *seen: (os.write(2, b"\nstopped; nothing was done\n"), os._exit(130)))

# Waiting threads sleep: spinning took 3.2 s a step instead of 0.46 (2 cores, load 9). torch reads it now.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")    # of GPUs: fewer holes in memory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
CHOICES = [
    ("packing", ["exactfit", "wholefit", "bestfit", "flat"], "documents to rows; wholefit cuts no chats"),
    ("compile", ["auto", "on", "off"], "auto: on CUDA, if there are gcc or clang and Python.h"),
    ("dtype", ["float32", "bfloat16"], "of activations (cpu float32, cuda bfloat16); weights are float32"),
]
MODEL_FLAGS = ["depth", "vocab_size", "tokenizer"]    # a run with --init FILE has these from FILE
# A resumed run keeps these:
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
    for name, choices, text in CHOICES:
        p.add_argument(f"--{name}", choices=choices, default=choices[0], help=text)
    p.add_argument("--lr", type=float, help="peak rate of the blocks' matrices (default: "
                   "by make_optimizers; with --init a tenth, and other rates follow)")
    p.add_argument("--data", nargs="+", action="extend", default=[], metavar="PATH[:WEIGHT]", help="folder "
                   "or URI, WEIGHT: share of rows (default: dataset.py's download, else a built-in corpus "
                   "and a small model on any device)")
    p.add_argument("--tokenizer", metavar="DIR", help="default: trained on the data, now if missing")
    p.add_argument("--no_shuffle", action="store_true", help="documents in file order; else by --seed")
    p.add_argument("--num_lanes", type=int, metavar="N", help="world sizes that divide it give the same run "
                   "(default: the smallest multiple of 8 that the world size divides; fewer for tiny data)")
    p.add_argument("--doc_mask", action="store_true", help="attention stays inside documents")
    p.add_argument("--seed", type=int, default=1, help="for the initial weights and the order of documents")
    p.add_argument("--ledger", action="store_true", help="write the loss of each document into --out")
    p.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/DATE-TIME)")
    p.add_argument("--resume", default="none", metavar="auto|none|FILE", help="auto: the newest checkpoint "
                   "in --out or of any run; it brings the flags not given. If there is none: a run of --data")
    p.add_argument("--init", metavar="FILE", help="a new run with the weights and tokenizer of a checkpoint")
    p.add_argument("--sample", metavar="PROMPT", help="only generate, from the newest checkpoint")
    p.add_argument("--chat", metavar="QUESTION", help="only answer, from the newest checkpoint")
    p.add_argument("--eval", metavar="FILE", help="only evaluate this checkpoint, on --data or its own")
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
    local_rank, n_devices = env_int("LOCAL_RANK", least=0) or 0, torch.accelerator.device_count()
    if flags.device != "cpu" and local_rank >= n_devices:
        raise ValueError(f"--device {flags.device}: torch sees {n_devices} here, too few for local rank "
                         f"{local_rank}; leave --device out, or lower torchrun's --nproc_per_node")

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
            raise ValueError(f"--data {spec}: expected PATH, or several of PATH:WEIGHT, each path once and "
                             "each weight above 0, as in --data web:0.7 code:0.3")
        sources[path] = weight
    return sources

# ---------------------------------------------------------------------------------------------------------
# The run, from top to bottom

def train(flags, at_exit):
    """at_exit: an ExitStack, which ends what the run has started. -> exit status"""
    # Ranks: each makes an equal part of a step's rows
    device, rank, world = start_ranks(flags)
    if dist.is_initialized():    # its threads may abort the exit (pytorch #190489); DDP's cycle keeps it
        at_exit.callback(lambda: (gc.collect(), dist.destroy_process_group()))
    signals = []

    def stop():    # asked by all ranks together
        return bool(sum_over_ranks(torch.tensor(len(signals))))

    # The run: a new one, or one that a checkpoint continues
    out, checkpoint, is_locked = choose_run(flags, rank, at_exit)
    resumes = bool(checkpoint) and not flags.eval and flags.sample is None
    origin = checkpoint or flags.init
    saved = load_checkpoint(origin) if origin else None
    first, rows_hash, constant_since = 0, 0, 0    # constant_since: the first step with rows of these flags
    if saved:
        changed = settle(flags, saved, origin, None if checkpoint else MODEL_FLAGS)
    if resumes:
        first, rows_hash, constant_since = saved["step"], saved["rows_hash"], saved["constant_since"]
        if {"batch_size", "seq_len", "data"} & set(changed):
            constant_since = first
        changes = as_typed(vars(flags), changed) + " from " + as_typed(saved["flags"], changed)
        print0(f"resumed from {checkpoint}: step {first}; changed: {changes if changed else 'nothing'}")
        if first > flags.steps:
            raise ValueError(f"--steps {flags.steps}: {checkpoint} is at step {first} of the run already")
    elif flags.init:
        theirs = {name: value for name, value in saved["flags"].items() if getattr(flags, name) != value}
        taken = as_typed(vars(flags), ["depth", "vocab_size"])
        print0(f"from {origin}: weights, tokenizer, {taken}; not its "
               + as_typed(theirs, [name for name in theirs if name != "init"]))
    sources = sources_of(flags)
    torch.manual_seed(flags.seed)
    if saved:
        with misfits_named(origin):
            tokenizer, where = RustBPETokenizer.from_dict(saved["tokenizer"]), origin
            model = make_model(flags, tokenizer)
            model.load_state_dict(saved["model"])
    else:
        tokenizer, where = find_tokenizer(flags.tokenizer, list(sources), flags.vocab_size)
        model = make_model(flags, tokenizer)
    model.to(device)
    if flags.sample is not None:
        prompt, end = [tokenizer.get_bos_token_id(), *tokenizer.encode(flags.sample)], None
        if flags.chat is not None:    # the first token with a loss ends the empty answer
            ids, mask = tokenizer.render_conversation({"messages": [
                {"role": "user", "content": flags.chat}, {"role": "assistant", "content": ""}]})
            prompt, end = ids[:mask.index(1)], ids[mask.index(1)]
        return print0(generate(model, tokenizer, flags.seq_len, prompt, 200, end))
    val_sources = {path: Source(path, list_shards(path, "val"), 1, None, 1) for path in sources}
    val = {path: val_windows(tokenizer, source, flags) for path, source in val_sources.items()}
    if flags.eval:
        return not evaluate(saved["step"], model, tokenizer, val, flags.micro_batch_size, stop)

    # Data: the loader deals rows to ranks
    flags.data = flags.data or list(sources)
    documents = {path: sum(shard.n_documents for shard in list_shards(path, "train")) for path in sources}
    if not flags.num_lanes:
        flags.num_lanes, n_documents = math.lcm(8, world), min(documents.values())
        if world <= n_documents < flags.num_lanes:
            flags.num_lanes = n_documents // world * world
            print0(f"a source has only {n_documents} documents, so num_lanes is {flags.num_lanes}")
    loader = PackedLoader(
        tokenizer, -(-flags.batch_size // world), flags.seq_len, "train", data_dir=sources,
        packing=flags.packing, num_lanes=flags.num_lanes, device=device if device.type == "cuda" else "cpu",
        shuffle_seed=None if flags.no_shuffle else flags.seed)
    at_exit.enter_context(loader)
    dataloader.check_start(loader)    # the first batch would, when the run's folder is there
    if flags.batch_size % world:
        raise ValueError(f"{flags.batch_size} rows for {world} ranks; try --batch_size {loader.B * world}")
    val_files = {path: source.fingerprint for path, source in val_sources.items()}
    if resumes:
        loader.load_state_dict(json.loads(saved["loader"]))
        for path in val_files.keys() & saved["val_files"].keys():
            if val_files[path] != saved["val_files"][path]:
                print0(f"warning: the val files of {path} have changed: older bits per byte do not compare")
    settings = {name: value for name, value in vars(flags).items() if name not in NOT_SAVED}
    equal = [settings, first, rows_hash, tokenizer.fingerprint(), val_files, loader.state_dict()["sources"]]
    digest = torch.tensor(int(hashlib.sha256(json.dumps(equal).encode()).hexdigest()[:12], 16))
    if sum_over_ranks(digest.clone()) != world * digest:
        raise ValueError(f"ranks differ in flags, data, tokenizer or checkpoint (seen on rank {rank}); start "
                         "all ranks with the same")

    # Optimizers
    compile_parts(model, flags.compile)
    optimizers = make_optimizers(model, flags.lr, flags.batch_size * flags.seq_len, bool(flags.init))
    with misfits_named(origin):
        for optimizer, state in zip(optimizers, saved["optimizers"] if resumes else (), strict=resumes):
            optimizer.load_state_dict(state)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    if net is not model and flags.dtype == "bfloat16":    # half the bytes; with gloo, too, by another name
        net.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))

    # The run's folder, which begins with its first line
    n_parameters = sum(p.numel() for p in model.parameters())
    for path, source in val_sources.items():
        names, share = ", ".join(shard.name for shard in source.shards), sources[path] / sum(sources.values())
        tokens = flags.steps * flags.batch_size * flags.seq_len * share
        epochs = tokens / max(1, documents[path] * val[path].tokens_per_document)    # 4: arXiv 2305.16264
        print0(f"{path}: {documents[path]:,} documents to train on, about {epochs:.1f} epochs; "
               f"{source.group_sizes.sum():,} for val ({names:.80})")
    print0(f"model: {n_parameters:,} parameters, depth {flags.depth}; tokenizer: "
           f"{tokenizer.get_vocab_size():,} tokens, {where}\n"
           f"a step: {flags.batch_size} rows of {flags.seq_len} tokens (ranks x rows: {world} x {loader.B}), "
           f"at most {flags.micro_batch_size} in a forward; data: {' '.join(sources)}; run: {out}")
    if resumes and saved["machine"] != (machine := machine_of(device, world)):
        print0(f"now on {machine}; before on {saved['machine']}: equal up to rounding from here")
    if rank == 0 and not is_locked:
        lock_folder(out, at_exit)
    log = Log(out, flags, model.flops_per_token(flags.seq_len) / (peak_flops(device) * world), {
        "flags": settings, "python": sys.version.split()[0], "torch": torch.__version__,
        "parameters": n_parameters, "world_size": world, "from_step": first})
    checkpoints = Checkpoints(out, first if os.path.exists(checkpoint_path(out, first)) else None, at_exit)

    token_bytes, ledger = get_token_bytes(tokenizer).numpy(), []
    for path in glob.glob(os.path.join(glob.escape(out), "ledger", "step_*")) if rank == 0 else ():
        if os.path.basename(path) >= f"step_{first:07d}":    # of steps that this run repeats
            os.remove(path)

    def save(step):    # all ranks together: each knows its own lanes and momenta
        if ledger:
            write_ledger(out, ledger)    # first: a resumed run removes whole files
        if step != checkpoints.newest:
            checkpoints.save(step, {
                "version": VERSION, "step": step, "flags": settings, "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers], "tokenizer": tokenizer.as_dict(),
                "loader": json.dumps(gather_states(loader)), "rows_hash": rows_hash, "val_files": val_files,
                "constant_since": constant_since, "machine": machine_of(device, world)})

    def report(step, rows, lr, counts, sums, losses, waited, seconds):    # -> was a rank asked to stop?
        nonlocal rows_hash
        began = time.perf_counter()
        (n_tokens, added, n_signals), (nats, norm) = counts.tolist(), sums.tolist()    # waits for the GPU
        loss, rows_hash = nats / max(1, n_tokens), (rows_hash + added) % 2**64
        seen = ledger_rows(step, *rows, losses.cpu().numpy(), token_bytes)
        ledger.extend(seen if flags.ledger else ())
        if len(log.losses) == 50 and loss > np.mean(log.losses) + 6 * np.std(log.losses):
            print(f"step {step}: the loss jumped to {loss:.2f}; {hardest(seen)}", flush=True)
        if not math.isfinite(loss + norm):
            checkpoints.wait()
            file = max(list_checkpoints(out), default="FILE (the same run writes one: --steps 1 --out OTHER)")
            raise ValueError(f"step {step}: loss {loss}, gradient norm {norm}; {hardest(seen)}. All of them: "
                             f"python -m dev.bench audit --resume {file} --steps {step}:{step + 1}")
        log.step(step, loss, lr, norm, seconds + time.perf_counter() - began, waited, f"{rows_hash:016x}")
        return n_signals > 0

    # Loop. SIGTERM and Ctrl-C (which torchrun repeats) finish the step, then save. The numbers of a step are
    # read while the GPU is busy with the next one
    for number in (signal.SIGTERM, signal.SIGINT):
        at_exit.callback(signal.signal, number, signal.signal(number, lambda *seen: signals.append(seen[0])))
    unread, stopping = [], False
    for step in range(first, flags.steps + 1):
        done = step >= flags.steps
        saves, evals = (step and (done or step % n == 0) for n in (flags.save_every, flags.eval_every))
        while unread and (saves or evals or stopping or len(unread) > 1):
            stopping |= report(*unread.pop(0))
        if saves:
            save(step)
        # After the save: a run that is stopped in its eval repeats the eval when it is resumed.
        if evals and not stopping:
            stopping = not evaluate(step, model, tokenizer, val, flags.micro_batch_size, stop, log.write)
            log.write({"step": step, **loader.stats()})
        if stopping or done:
            save(step)
            break
        began = time.perf_counter()
        first_row, (inputs, targets) = loader.position.g, next(loader)
        rows = first_row, loader.pieces(), targets
        waited = time.perf_counter() - began
        counts = count_and_hash(inputs, targets, first_row, len(signals))
        lr = set_rates(optimizers, step, flags.steps)
        sums, losses = train_step(net, model, optimizers, inputs, targets, counts[0], flags.micro_batch_size)
        unread.append((step, rows, lr, counts, sums, losses, waited, time.perf_counter() - began))

    is_saved = checkpoints.wait()
    stats = sum(map(collections.Counter, loader.stats()["sources"].values()), collections.Counter())
    if stats["empty_documents"]:
        print0(f"null documents skipped by rank 0 since its start, all epochs: {stats['empty_documents']:,}")
    print0(f"rows: hash {rows_hash:016x}; runs that print the same one had the same rows")
    how = "done" if done else f"stopped ({signal.Signals(signals[0]).name if signals else 'by another rank'})"
    where = f"checkpoint: {checkpoint_path(out, step)}" if is_saved else "this step is NOT saved"
    print0(f"{how} at step {step} of {flags.steps}; {step - first} steps took {log.seconds:.0f} s; {where}")
    return 0 if is_saved else 1

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

# A row of the ledger: a piece of a document (see loader.pieces) in row g of the run; its tokens with a loss,
# their bytes and loss. BOS does not count: its loss tells nothing about the document. dev.bench reads it.
LEDGER = "step", "g", "path", "row_group", "row", "epoch", "start", "stop", "tokens", "bytes", "nats"

def ledger_rows(step, first_row, pieces, targets, nats, token_bytes):
    (rank, world), targets, rows = ranks_of_this_process(), targets.cpu().numpy(), []
    for b, row in enumerate(pieces):
        for location, epoch, start, stop, offset in row:
            of_piece = b, slice(max(0, offset - (start > 0)), offset + stop - start - 1)
            tokens = targets[of_piece][targets[of_piece] >= 0]
            rows.append((step, first_row + rank + b * world, *location, epoch, start, stop, len(tokens),
                         int(token_bytes[tokens].sum()), float(nats[of_piece].sum())))
    return rows

def write_ledger(folder, rows):    # each rank its own files
    name = f"step_{rows[0][0]:07d}_rank_{ranks_of_this_process()[0]:04d}.parquet"
    with contextlib.suppress(OSError):    # a full disk stops no training; the next file has these rows, too
        with atomic_file(os.path.join(folder, "ledger", name)) as part:
            pq.write_table(pa.table([*map(pa.array, zip(*rows, strict=True))], LEDGER), part)
        rows.clear()

def hardest(rows):
    means = [(row[-1] / row[-3], *row[2:5]) for row in rows if row[-3]]
    means.sort(key=lambda mean: -np.nan_to_num(mean[0], nan=np.inf))
    words = ("{1}, row group {2}, row {3} ({0:.2f} nats a token)".format(*mean) for mean in means[:3])
    return f"this rank's hardest documents: {'; '.join(words)}"

def count_and_hash(inputs, targets, first_row, n_signals):
    """
    -> int64 (3,), over all ranks: targets, the hash of these rows, signals. The hash is the sum over tokens,
    each times an odd number that depends on its place in the run, modulo 2**64: equal for all world sizes.
    """
    (B, T), (rank, world) = inputs.shape, ranks_of_this_process()
    rows = first_row + rank + world * torch.arange(B, device=inputs.device)
    places = rows[:, None] * T + torch.arange(T, device=inputs.device)
    factors = places * 0x1E3779B97F4A7C15 | 1
    added = ((3 * inputs + targets) * factors).sum()
    return sum_over_ranks(torch.stack([(targets >= 0).sum(), added, torch.full_like(added, n_signals)]))

# ---------------------------------------------------------------------------------------------------------
# Ranks and device. One process alone takes the same path

def start_ranks(flags):
    """-> device, rank, world size. torchrun's ranks form a group on CPUs, too; else they would be N runs."""
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
    torch.set_float32_matmul_precision("high" if flags.device == "cuda" else "highest")
    return torch.device(flags.device), *ranks_of_this_process()

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
#   state_dict(), load_state_dict(), parameters(): as every nn.Module has them; for checkpoints

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
    so one layer can copy what followed an earlier occurrence: 1.187 -> 1.082 bits per byte (make_optimizers;
    novels: 1.841 -> 1.831); learned shares: 1.109; both: 1.086. 0 for the first token and those of `begins`.
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
        # Each embedding gets some of the previous token's: 1.143 -> 1.082 bits per byte (make_optimizers).
        self.previous = nn.Parameter(torch.zeros(width))
        # A hash of two neighbouring tokens chooses a vector that the second one gets, too: 1.0823 -> 1.0664
        # bits per byte (make_optimizers; depth 4: 1.0158 -> 1.0062, seed 1); 126 M parameters at depth 12.
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
                mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]    # (B, 1, T, T)
                if self.flex and targets is not None:    # not for samples, which are not compiled
                    def attends(row, head, query, key):
                        return (query >= key) & (document[row, query] == document[row, key])
                    mask = create_block_mask(attends, len(x), None, x.size(1), x.size(1), x.device)
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
        logits = self.head(norm(x)).float()
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
    headers = sysconfig.get_path("include", "posix_prefix") + "/Python.h"    # Triton compiles C with them
    possible = any(map(shutil.which, ("gcc", "clang"))) and os.path.exists(headers)
    if choice == "auto" and cuda and not possible:
        print0(f"warning: not compiled, so slower: it takes gcc or clang, and {headers} (python3-dev)")
    if choice == "on" or (choice == "auto" and cuda and possible):
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
    # fp32 on a CPU: the demo's 12 matrices take 35 ms of CPU time instead of the 569 ms of torch.optim.Muon's
    # bfloat16 (1 thread of an EPYC without AMX).
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
    (embeddings: nanochat's scripts/base_train.py); smaller steps take less. Bits per byte after 500 steps of
    8 rows (--lr 0.012 --eval_rows 1024, 3 seeds): 1.082; `previous` at 0.01: 1.091; seed 1 with the head at
    0.0025 or without decay: 1.093. Depth 4: 1.015; head's rate falling as 1 / sqrt(width): 1.021.
    """
    width = model.embedding.embedding_dim / 768
    embeddings = [model.embedding.weight, model.bigrams.weight, *model.value_embeddings.parameters()]
    # 0.0090 for steps of 4 rows of 256 tokens, 0.0124 for 8, 0.02 for 2 ** 19 tokens
    usual = 0.02 / (1 + 1250 / tokens_per_step)
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
                # Rate x decay x steps is at most 12 (nanochat: 14); in 500 steps, 6: 1.0659, 12: 1.0731
                most = min(1.0, 12 / (peak * steps))
                group["decay"] = most * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    return group["lr"]

# ---------------------------------------------------------------------------------------------------------
# Evaluation: bits per byte of val documents, beside zlib's, and a sample

class Windows(NamedTuple):
    """Rows of val documents, each from one document alone, so that no packing has an advantage."""
    inputs: torch.Tensor     # int64 (n, T)
    targets: torch.Tensor    # int64 (n, T), -100 for context and for what follows the document
    zlib_bpb: float | None   # of these documents, each compressed alone at level 9; None for chats
    tokens_per_document: float

def val_windows(tokenizer, source, flags):
    """The first --eval_rows windows of documents: T + 1 tokens each; later ones repeat T // 4 as context."""
    T, lengths, windows, n_bytes, n_compressed = flags.seq_len, [], [], 0, 0    # windows: ids, context
    for ids in documents_of(tokenizer, source):
        if len(windows) >= flags.eval_rows:
            break
        lengths.append(len(ids))
        if len(ids) > 1:
            windows.append((ids[:T + 1], 1))
            data = tokenizer.enc.decode_bytes(ids[1:].tolist()) if ids[0] >= 0 else b""    # no chats
            n_bytes, n_compressed = n_bytes + len(data), n_compressed + len(zlib.compress(data, 9))
        for stop in range(T + 1, len(ids), T - T // 4):
            windows.append((ids[stop - T // 4 - 1:][:T + 1], T // 4 + 1))
    if not (windows := windows[:flags.eval_rows]):
        raise ValueError(f"the val split of {source.name} has no text: {source.shards[-1].name} holds only "
                         "nulls and empty documents")
    rows = -(-len(windows) // flags.micro_batch_size) * flags.micro_batch_size    # a smaller last batch would
    inputs = torch.full((rows, T), tokenizer.get_bos_token_id())    # be compiled for itself
    targets = torch.full((rows, T), -100)
    for i, (ids, given) in enumerate(windows):
        ids = torch.from_numpy(ids.astype(np.int64))
        inputs[i, :len(ids) - 1] = torch.where(ids < 0, ~ids, ids)[:-1]    # ~t is token t without a loss
        targets[i, given - 1:len(ids) - 1] = ids.where(ids >= 0, -100)[given:]
    zlib_bpb = 8 * n_compressed / n_bytes if n_bytes else None
    return Windows(inputs, targets, zlib_bpb, sum(lengths) / len(lengths))

def documents_of(tokenizer, source):
    """Yield the ids of each document, in file order."""
    encoder, theirs = Encoder(tokenizer, cores()), source.shards[0].fingerprint
    if theirs not in (None, encoder.tokenizer.fingerprint):
        raise ValueError(f"{source.name} needs the tokenizer that made it, {maker_of(source.shards[0])}")
    for shard in source.shards:
        for row_group, n in enumerate(shard.group_sizes):
            array = shard.read(row_group)
            for first in range(0, n, 1000):    # the first documents may be enough
                indices = np.arange(first, min(first + 1000, n))
                yield from encoder.encode(Part(shard, row_group, indices), array)

def evaluate(step, model, tokenizer, val, micro, stop, write=lambda record: None):
    """Print and write bits per byte of each source and over all; print a sample. -> False if asked to stop"""
    token_bytes, totals = get_token_bytes(tokenizer), {}
    for path, windows in val.items():
        totals[path] = count_nats(model, windows, micro, token_bytes, stop)
        if totals[path] is None:
            return False
    if len(val) > 1:
        totals["all"] = sum(totals.values())
    for path, total in totals.items():
        nats, n_bytes = total.tolist()
        bpb, zlib_bpb = nats / max(1, n_bytes) / math.log(2), val[path].zlib_bpb if path in val else None
        write({"step": step, "val_bpb": bpb, "val_bytes": int(n_bytes), "zlib_bpb": zlib_bpb, "source": path})
        of = {"all": " over all sources"}.get(path, f" of {path}") if len(val) > 1 else ""
        beside = f" (zlib -9: {zlib_bpb:.4f})" if zlib_bpb else ""
        print0(f"step {step}: val {bpb:.4f} bits per byte{of}{beside}")
    inputs, targets, *_ = next(iter(val.values()))    # the prompt: a question, or a text's first five words
    n = (targets[0] >= 0).int().argmax()    # targets without a loss
    words = tokenizer.decode([i for i in inputs[0, 1:64].tolist() if i != tokenizer.get_bos_token_id()])
    words = tokenizer.encode(re.match(r"\s*(\S{1,40}\s+){0,4}\S{0,40}", words)[0])
    prompt = inputs[0, :n + 1].tolist() if n else [inputs[0, 0].item(), *words]
    with torch.compiler.set_stance("force_eager"):    # a shape that occurs only here: do not compile it
        text = generate(model, tokenizer, inputs.size(1), prompt, 64)
    print0("sample: " + text.replace("\n", "\n        "))
    return True

@torch.no_grad()
def count_nats(model, windows, micro, token_bytes, stop):
    """-> float64 (2,): nats of targets that represent bytes, and these bytes. None if asked to stop"""
    (rank, world), device = ranks_of_this_process(), model.embedding.weight.device
    totals = torch.zeros(2, dtype=torch.float64)
    batches = list(zip(windows.inputs.split(micro), windows.targets.split(micro), strict=True))
    for i in range(0, len(batches), world):    # ranks take turns
        if stop():
            return None
        for inputs, targets in batches[i + rank:i + rank + 1]:    # in the last turn, some have none
            n_bytes = token_bytes[targets.clamp(min=0)].where(targets >= 0, 0).flatten()
            nats = model(inputs.to(device), targets.to(device)).cpu().double()
            totals += torch.stack([nats.where(n_bytes > 0, 0).sum(), n_bytes.sum()])
    return sum_over_ranks(totals)

@torch.no_grad()
def generate(model, tokenizer, T, prompt, n_tokens, end=None, temperature=0.8, top_k=50):
    """
    The text of the prompt's ids and what follows; with a token `end`, of what is before that. Draws with its
    own random state. All forwards are (1, T): no token sees the padding after it.
    """
    device, bos = model.embedding.weight.device, tokenizer.get_bos_token_id()
    ids, random = list(prompt), torch.Generator().manual_seed(1)
    for _ in range(n_tokens):
        seen = ids[-T:]
        logits = model(torch.tensor([seen + [bos] * (T - len(seen))], device=device))[0, len(seen) - 1].cpu()
        best, at = logits[:tokenizer.get_vocab_size()].topk(top_k)
        ids.append(at[torch.multinomial(F.softmax(best / temperature, 0), 1, generator=random)].item())
        if ids[-1] in (bos, end):
            break
    text = tokenizer.decode([i for i in ids[0 if end is None else len(prompt):] if i not in (bos, end)])
    return "\n".join(map(printable, text.split("\n")))

# ---------------------------------------------------------------------------------------------------------
# Runs and checkpoints: a file that is complete or not there

VERSION = 4    # of a checkpoint's content:
CONTENT = {"version": int, "step": int, "flags": dict, "loader": str, "model": dict, "optimizers": list,
           "tokenizer": dict, "rows_hash": int, "val_files": dict, "constant_since": int, "machine": str}

def choose_run(flags, rank, at_exit):
    """-> the run's folder; the checkpoint to resume from or to use, or None; whether the folder is locked"""
    trains = not flags.eval and flags.sample is None
    named = flags.eval or (flags.resume if flags.resume not in ("auto", "none") else None)
    known = named
    if not named and (flags.resume == "auto" or not trains):    # of the newest run
        known = max(glob.glob("runs/*/step_*.pt"), key=os.path.getmtime, default=None)
    out = flags.out or (os.path.dirname(known) or "." if known
                        else datetime.now().strftime("runs/%Y%m%d-%H%M%S-%f"))
    if is_locked := trains and rank == 0 and os.path.isdir(out):
        lock_folder(out, at_exit)
    newest = max(list_checkpoints(out), default=None)
    begins = trains and (flags.resume == "none" or {"data", "init"} & {*flags.given})
    if not (named or newest or begins):
        what = f"the newest is {known}; or train one" if known else "train one"
        raise ValueError(f"no checkpoint in {flags.out or 'runs'}; {what}: python train.py --data DIR")
    if trains and newest and flags.resume == "none":
        raise ValueError(f"{out} holds checkpoints; resume with --resume auto, or choose another --out")
    is_older = newest and os.path.isfile(named or "") and os.path.basename(newest) > os.path.basename(named)
    if trains and is_older:
        raise ValueError(f"{newest} is newer than {named}; resume from that, or choose another --out")
    if flags.resume == "auto" and not newest:
        print0(f"no checkpoint in {out} yet: a new run")
    return out, named or newest, is_locked

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

def list_checkpoints(folder):
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"step_{7 * '[0-9]'}.pt")))

def checkpoint_path(folder, step):
    return os.path.join(folder, f"step_{step:07d}.pt")

def settle(flags, saved, path, names=None):
    """Take flags that were not typed from the checkpoint (only `names`, if given). -> those that changed"""
    theirs = {name: value for name, value in saved["flags"].items() if names is None or name in names}
    changed = [name for name in theirs if name in flags.given and theirs[name] != getattr(flags, name)]
    if refused := [name for name in changed if name in FIXED_FLAGS]:
        raise ValueError(f"{as_typed(vars(flags), refused)} does not fit {path}, which has: "
                         f"{as_typed(theirs, refused)}; leave out these flags, or else --resume or --init")
    vars(flags).update({name: value for name, value in theirs.items() if name not in flags.given})
    return changed

def as_typed(values, names):
    """Example: --depth 2 --data a:0.7 b:0.3 --no_shuffle without --doc_mask"""
    words = []
    for name in names:
        value = " ".join(values[name]) if isinstance(values[name], list) else values[name]
        word = f"--{name}" if value is True else f"--{name} {value}"
        words.append(f"without --{name}" if value in (None, False) else word)
    return " ".join(words)

class Checkpoints:
    """Rank 0's, written by a thread from a copy in memory; the newest two are kept."""

    def __init__(self, folder, newest, at_exit):
        self.folder, self.newest, self.thread, self.failed = folder, newest, None, False
        at_exit.callback(self.wait)

    def save(self, step, content):
        """If it fails, the last good one stays, and the next is tried as usual."""
        self.wait()
        self.newest, self.failed = step, False
        if ranks_of_this_process()[0] == 0:
            copy = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), content)
            self.thread = threading.Thread(target=self._write, args=(step, copy))
            self.thread.start()

    def _write(self, step, content):
        try:
            with atomic_file(checkpoint_path(self.folder, step)) as part, open(part, "wb") as file:
                torch.save(content, file)
        except (OSError, RuntimeError) as error:    # torch turns a full disk into "unexpected pos"
            self.failed = True
            last, why = max(list_checkpoints(self.folder), default="none"), error.__context__ or error
            print0(f"warning: step {step} is not saved (disk full?): {why}; last: {last}")
        else:
            for path in list_checkpoints(self.folder)[:-2]:
                os.remove(path)

    def wait(self):
        """-> whether the last save has succeeded"""
        if self.thread:
            self.thread.join()
        return not self.failed

def load_checkpoint(path):
    try:
        if not env_int("LOCAL_RANK", least=0) and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"{damaged} differs from its checksum")    # torch compares none; once a node
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        wrong = [name for name, kind in CONTENT.items() if not isinstance(content.get(name), kind)]
        if content.get("version") != VERSION:
            raise ValueError(f"this train.py reads checkpoints of version {VERSION}, this one has "
                             f"{content.get('version')}")
        if wrong:
            raise ValueError(f"it lacks {', '.join(wrong)}")
    except Exception as error:    # a file that is not torch's raises almost anything
        what = "damaged, or no step_*.pt of this train.py" if os.path.isfile(path) else "no checkpoint's file"
        there = list_checkpoints(path if os.path.isdir(path) else os.path.dirname(path))
        verb, others = "remove it to go on from" if path in there else "there is", {*there} - {path}
        if not others:
            verb, others = "there is", {*glob.glob("runs/*/step_*.pt")} - {path}
        advice = f"{verb} {max(others)}" if others else "expected a step_*.pt of a run"
        why = re.sub(r"\x1b\[\d*m", "", str(error))    # torch prints in bold
        raise ValueError(f"{path} is {what} ({type(error).__name__}: {why:.200}); {advice}") from None
    return content

@contextlib.contextmanager
def misfits_named(path):
    """Content that does not fit this model is an error that names the checkpoint."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path} does not fit this model ({type(error).__name__}: {why})") from error

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

class Log:
    """Rank 0's: lines on the screen, and JSON lines in the run's folder (dev.pictures loss draws them)."""

    def __init__(self, folder, flags, mfu_of_one_token, header):
        self.path, self.flags = os.path.join(folder, "log.jsonl"), flags
        self.mfu_of_one_token, self.times, self.seconds, self.failed = mfu_of_one_token, [], 0.0, False
        self.losses = collections.deque(maxlen=50)
        if ranks_of_this_process()[0] == 0:
            # Remove lines of steps that the resumed run repeats. On a full disk, they stay.
            kept = [record for record in read_log(self.path) if record.get("step", -1) < header["from_step"]]
            with contextlib.suppress(OSError):
                write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.write(header)
        print0("    step      loss        lr    norm      tok/s    MFU   ms/step   wait ms   mem GB     left")

    def write(self, record):
        if ranks_of_this_process()[0] != 0:
            return
        # >>> wandb, TensorBoard and the like go here: every record passes here, on rank 0. <<<
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:    # a full disk stops no training, and is reported once
            if not self.failed:
                print0(f"warning: {self.path}: {error}; some lines will be missing")
            self.failed = True

    def step(self, step, loss, lr, norm, seconds, waited, rows_hash):
        self.seconds += seconds
        self.times = [*self.times[-49:], seconds]
        self.losses.append(loss)
        per_second = self.flags.batch_size * self.flags.seq_len / seconds
        r = {"step": step, "loss": loss, "lr": lr, "norm": norm, "tokens_per_s": per_second,
             "mfu": per_second * self.mfu_of_one_token, "ms": 1e3 * seconds, "wait_ms": 1e3 * waited,
             "memory_gb": peak_memory(self.flags.device) / 1e9, "rows_hash": rows_hash}
        self.write(r)
        if step % self.flags.log_every == 0 or step == self.flags.steps - 1:
            left = int((self.flags.steps - step - 1) * sum(self.times) / len(self.times))
            mfu = f"{r['mfu']:7.1%}" if r["mfu"] else "      -"
            print0(f"{step:8d}{loss:10.4f}{lr:10.6f}{norm:8.3f}{per_second:11,.0f}{mfu}{r['ms']:10.1f}"
                   f"{r['wait_ms']:10.1f}{r['memory_gb']:9.2f}{left // 60:6d}m{left % 60:02d}s")

# ---------------------------------------------------------------------------------------------------------
# python train.py

def main(argv=None):
    for stream in (sys.stdout, sys.stderr):    # an ASCII terminal, and a sample that is not ASCII
        stream.reconfigure(errors="backslashreplace")
    with dataset.errors_in_one_line(), contextlib.ExitStack() as at_exit:
        flags = parse_flags(argv)
        try:
            return train(flags, at_exit)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"{error} Lower --micro_batch_size (now {flags.micro_batch_size}): the same run "
                             "in less memory. Lower --seq_len or --depth: another run.") from None
        except RuntimeError as error:
            if "onnection" not in str(error):    # of gloo: "Connection closed by peer", "Connection reset"
                raise
            raise ValueError("lost the connection to another rank; see its output") from None

if __name__ == "__main__":
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
