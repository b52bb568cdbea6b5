"""
What CUDA and several ranks run, without a GPU: a step without values, collectives, compilation.
Tests that need a GPU are at the end (-k cuda); dev/gpu.md tells what to run where there is one.
"""

import functools
import logging
import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train
from dev.tests.test_train import (  # noqa: F401
    HERE,
    TOY,
    at_call,
    base,
    command,
    losses_of,
    newest,
    own_folder,
    own_signals,
    resume,
)


def test_step_at_depth_12_stays_on_its_device_and_in_bfloat16(monkeypatch):
    """
    On the device meta, whose tensors have no values. To mix it with a CPU is an error, and so is to
    read a value, but for the norm.
    """
    device, seen, counts = torch.device("meta"), set(), []

    def linear(x, weight, original=torch.nn.functional.linear):
        seen.add((x.device, x.dtype, weight.dtype))
        return original(x, weight)

    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: counts.append(tensor))
    monkeypatch.setattr(train.F, "linear", linear)
    train.rope_tables.cache_clear()
    with device:
        model = train.GPT(12, 32768, torch.bfloat16)
        inputs = torch.empty(6, 256, dtype=torch.int64)
    flags = SimpleNamespace(batch_size=256, seq_len=2048, micro_batch_size=4, dtype="bfloat16",
                            lr=None, init=None, table_decay=0)
    optimizers = train.make_optimizers(model, flags)
    for group in optimizers[1].param_groups:
        group["fused"] = False    # meta has no such kernel
    for _ in range(2):
        train.sum_counts(inputs, inputs, range(12, 18))
        nats, norm = train.train_step(model, optimizers, inputs, inputs, 1536, flags)
        assert {nats.device, norm.device, counts[-1].device} == {device}
        assert nats.shape == (6, 256) and nats.dtype == torch.float32
    train.rope_tables.cache_clear()
    assert seen == {(device, torch.bfloat16, torch.bfloat16)}, "also after a norm or a square"

ALL = torch.float32, 6    # the numbers of the three weights that have gradients

@pytest.mark.parametrize("world, sent", [(1, []), (2, [ALL])])
def test_gradients_are_summed_in_fp32_and_in_one_call(monkeypatch, world, sent):
    """By ranks that have the same gradient, in any dtype; alone, nothing is sent."""
    calls = []
    monkeypatch.setattr(train, "ranks_of_this_process", lambda: (0, world))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def all_reduce(tensor):
        calls.append((tensor.dtype, tensor.numel()))
        tensor.mul_(world)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(map(torch.ones, [(1,), (2, 2), (1,), (3,)]))
    *used, unused = model.weights
    model.forward = lambda inputs, targets: sum(p.sum() for p in used) * targets.flatten()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flags = SimpleNamespace(micro_batch_size=1, dtype="bfloat16")
    targets = torch.tensor([[1.001, 2.0]])    # 1.001 is not in bfloat16
    train.train_step(model, [optimizer], targets, targets, 16, flags)
    for p in used:
        want = torch.full_like(p, 1 - world * 3.001 / 16)
        torch.testing.assert_close(p, want, rtol=0, atol=1e-7)
    assert unused.eq(1).all() and calls == sent

@pytest.mark.parametrize("local_rank, slurm_id, n_visible, index", [
    ("1", "2", 4, 1),
    ("", "2", 4, 2),
    ("2", "", 1, 0),
    ("", "", 2, 0)])
def test_each_rank_takes_a_gpu_of_its_node(monkeypatch, local_rank, slurm_id, n_visible, index):
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: n_visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    for name, value in {"LOCAL_RANK": local_rank, "SLURM_LOCALID": slurm_id}.items():
        if value:
            monkeypatch.setenv(name, value)
    with train.group_of_ranks(SimpleNamespace(device="cuda")):
        pass
    assert taken == [index]

def test_speed_is_of_each_rank(monkeypatch):
    monkeypatch.setattr(train, "ranks_of_this_process", lambda: (0, 2))
    flags = SimpleNamespace(batch_size=4, seq_len=256, device="cpu")
    model = SimpleNamespace(flops_per_token=lambda T: 1e9)
    speed = train.speed_of(flags, model, 0.5)
    assert speed == {"step_ms": 500, "tokens_per_s": 2048, "tflops": 2048 * 1e9 / 2 / 1e12}

# --------------------------------------------------------------------------------------------------
# Compilation

@pytest.mark.parametrize("best, words, want", [
    ("cuda", "", 2),
    ("cuda", "--compile off", 0),
    ("cuda", "--device cpu", 0),
    ("cpu", "", 0),
    ("cpu", "--compile on", 2)])
def test_compiles_on_cuda_or_when_asked(monkeypatch, best, words, want):
    compiled = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(best))
    monkeypatch.setattr(train, "computes_bf16", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(function))
    model = SimpleNamespace(blocks=[], embed=1, read_out=2)
    train.compile_parts(model, train.parse_flags(words.split()).compile)
    assert len(compiled) == want

def test_all_blocks_share_few_compiled_variants(monkeypatch):
    """Embed, read-out, blocks with and without value embeddings; two batch sizes, and an eval."""
    from torch._dynamo.utils import counters
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)    # slow to show
    module = torch.nn.Module
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(module, "compile", functools.partialmethod(module.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = train.GPT(7, 64)
    inputs = torch.randint(0, 64, (2, 16))
    want = model(inputs, inputs)
    train.compile_parts(model, "on")
    for _ in range(2):
        for batch in (inputs, inputs[:1]):
            model(batch, batch).sum().backward()
        with torch.no_grad():
            assert torch.allclose(model.eval()(inputs, inputs), want, atol=1e-5)
        model.train()
    assert counters["frames"]["total"] == counters["frames"]["ok"], counters["frames"]
    assert counters["stats"]["unique_graphs"] == 4 * 3

def test_gpu_sh_runs_whole_on_a_cpu_at_toy_size(base, tmp_path):    # noqa: F811
    toy = "--device cpu --dtype float32 --depth 1 --seq_len 32 --batch_size 2 --vocab_size 300"
    env = os.environ | {
        "DATA": f"{base}/a", "OUT": f"{tmp_path}/out", "RUNS": f"{tmp_path}/runs", "FLAGS": toy,
        "DEVICE": "cpu", "COMPILE": "off", "ROWS": "2", "SIZE": "1,300,32", "STEPS": "4",
        "DEMO_STEPS": "2", "OMP_NUM_THREADS": "1"}
    words = ["bash", f"{HERE}/dev/bench/gpu.sh"]
    ended = subprocess.run(words, env=env, timeout=180, capture_output=True, text=True)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    assert "resume: rows equal; loss of the first step differs by 0.0e+00" in told, told
    failed = r"^\w+ +failed$|status"    # torch says failed in other lines
    assert not re.search(failed, told, re.MULTILINE), told
    assert "not compiled: 2 rows" in told, told
    assert (tmp_path / "out/logs.tgz").exists()

# --------------------------------------------------------------------------------------------------
# Where there is a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_CUDA = f"{TOY} --steps 20 --data a --dtype float32 --compile off"    # the last flag counts

@needs_cuda
@pytest.mark.parametrize("flags", ["--compile on", "--dtype bfloat16 --compile on"])
def test_cuda_losses_are_those_of_plain_float32(command, flags):    # noqa: F811
    command(f"--device cuda {flags} --out cuda", toy=ON_CUDA)
    command("--out cpu", toy=ON_CUDA)
    assert losses_of("cuda") == pytest.approx(losses_of("cpu"), abs=0.05)

@needs_cuda
def test_cuda_resumes_with_the_same_rows(command, resume):    # noqa: F811
    """Not bit for bit: attention's backward may add in any order."""
    command("--device cuda --out whole", toy=ON_CUDA)
    with at_call(9, "print_step", lambda: os.kill(os.getpid(), signal.SIGTERM)):
        command("--device cuda --out run", toy=ON_CUDA, status=143)
    resume("--out run")
    assert newest("run")["rows_hash"] == newest("whole")["rows_hash"]
    assert losses_of("run") == pytest.approx(losses_of("whole"), abs=1e-3)
