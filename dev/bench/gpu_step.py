"""
A step of train.py on a GPU, without data: right? how long? what takes the time?

    python -m dev.bench.gpu_step 120      # seconds it may take
    DEVICE=cpu COMPILE=off SIZE=1,512,64 ROWS=2 python -m dev.bench.gpu_step 20
"""

import gc
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import train

SECONDS = float(sys.argv[1])
COMPILE = os.environ.get("COMPILE", "on")
ROWS = int(os.environ.get("ROWS", "32"))
DEVICE = os.environ.get("DEVICE", "cuda")
DEPTH, VOCAB, T = (int(n) for n in os.environ.get("SIZE", "12,32768,2048").split(","))
OUT = os.environ.get("OUT", ".")
BEGAN = time.time()

def make(device, dtype):
    torch.manual_seed(0)
    with torch.device(device):
        model = train.GPT(DEPTH, VOCAB, dtype)
    with torch.no_grad():
        for p in model.parameters():
            if not p.count_nonzero():    # else most gradients are 0
                p.normal_(std=0.02)
    return model

def tokens(rows, length=None):    # as rare and frequent as those of text
    torch.manual_seed(1)
    return (VOCAB ** torch.rand(rows, (length or T) + 1)).long().clamp(1, VOCAB) - 1

def compare():
    """Losses and gradients beside those of the CPU in float32."""
    ids = tokens(2, 256)
    reference = make("cpu", torch.float32)
    state = reference.state_dict()
    want = reference(ids[:, :-1], ids[:, 1:])
    want.mean().backward()
    cases = ((torch.float32, "off"), (torch.bfloat16, "off"), (torch.bfloat16, COMPILE))
    for dtype, compiled in cases:
        torch._dynamo.reset()
        model = make("cpu", dtype).to(DEVICE)
        model.load_state_dict(state)
        train.compile_parts(model, compiled)
        on_device = ids.to(DEVICE)
        nats = model(on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous())
        nats.mean().backward()
        worst, name = max(((p.grad.cpu() - q.grad).norm().item() / q.grad.norm().item(), name)
                          for (name, p), q in zip(model.named_parameters(), reference.parameters(),
                                                  strict=True))
        error = ((nats.detach().cpu() - want.detach()).norm() / want.norm()).item()
        print(f"compare: {dtype}, compile {compiled}: losses {error:.1e}, gradients at "
              f"most {worst:.1e} ({name})", flush=True)

def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()

def step_ms(name, micro=ROWS, compiled=COMPILE, frozen=(), profiled=False):
    """Of one and of two micro-batches: their difference is a micro-batch, the rest the optimizer"""
    if time.time() - BEGAN > SECONDS:
        return print(f"{name}: skipped", flush=True)
    forget_the_last_model()
    began = time.time()
    model = make(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    for part in frozen:
        getattr(model, part).weight.requires_grad_(False)
    train.compile_parts(model, compiled)
    flags = SimpleNamespace(batch_size=256, seq_len=T, micro_batch_size=micro, dtype="bfloat16",
                            lr=None, init=None, table_decay=0)
    optimizers = train.make_optimizers(model, flags)
    train.set_rates(optimizers, 500, 2520)

    def step(ids):
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        train.train_step(model, optimizers, inputs, targets, targets.numel(), flags)
        synchronize()

    one, two = [tokens(n * micro).to(DEVICE) for n in (1, 2)]
    step(one)
    first = time.time() - began
    of_one, of_two = median_ms(step, one), median_ms(step, two)
    per_micro, rest = of_two - of_one, 2 * of_one - of_two
    whole = 256 / micro * per_micro + rest
    tokens_per_s = 256 * T / whole * 1e3
    mfu = tokens_per_s * model.flops_per_token(T) / 989e12
    gb = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0
    print(f"{name}: {micro} rows {per_micro:.1f} ms, optimizer and rest {rest:.1f} ms; 256 rows: "
          f"{whole:.0f} ms, {tokens_per_s / 1e3:.0f} k tok/s, MFU {mfu:.1%}; {gb:.1f} GB; first "
          f"step after {first:.0f} s", flush=True)
    if profiled:
        profile(step, two)

def forget_the_last_model():
    torch._dynamo.reset()
    train.rope_tables.cache_clear()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

def median_ms(step, ids):
    step(ids)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        step(ids)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)

def profile(step, ids):
    """A table into profile.txt; its beginning is printed."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds[:1 + (DEVICE == "cuda")]) as seen:
        step(ids)
    by = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=by, row_limit=80, max_name_column_width=90)
    Path(OUT, "profile.txt").write_text(table)
    print(*table.splitlines()[:25], sep="\n", flush=True)

compare()
step_ms("default", profiled=True)
step_ms("bigrams frozen", frozen=["bigrams"])
torch.backends.cuda.enable_cudnn_sdp(False)
step_ms("FlashAttention 2 instead of cuDNN's")
torch.backends.cuda.enable_cudnn_sdp(True)
step_ms("half of the micro-batch", micro=ROWS // 2)
step_ms("not compiled", compiled="off")
