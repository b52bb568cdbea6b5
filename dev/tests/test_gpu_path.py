"""
What CUDA and several ranks run, without a GPU: steps on fake tensors, collectives, attention. Tests that need
one are in test_train.py (needs_cuda); dev/gpu.md tells what to run where there is one.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import train
from dev.tests.test_train import BOS_ID, TOY, base, losses_of, own_folder, random_model  # noqa: F401
from test_dataloader import HERE

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


@pytest.fixture(scope="module")
def cuda_guard(tmp_path_factory):
    """torch for CPUs lacks what switches between GPUs, which even fake ones need for x[:, None]."""
    if not torch.backends.cuda.is_built():
        if not shutil.which("g++"):
            pytest.skip("needs g++, or torch built for CUDA")
        folder, path = tmp_path_factory.mktemp("guard"), os.path.dirname(torch.__file__)
        (folder / "guard.cpp").write_text(GUARD)
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{path}/include", "guard.cpp",
                        "-o", "guard.so", f"-L{path}/lib", "-lc10"], cwd=folder, check=True)
        ctypes.CDLL(folder / "guard.so")


@pytest.fixture
def fake(cuda_guard):
    """Tensors without memory: reading a value, or an operation on two devices, is an error."""
    train.rope_tables.cache_clear()
    with FakeTensorMode() as mode:
        yield mode
    train.rope_tables.cache_clear()


def fake_model(device, **options):
    with torch.device("meta"):
        model = train.GPT(12, 32768, bf16=True, **options)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty(p.shape, device=device)))
    return model


@pytest.mark.parametrize("device, options", [("cpu", {}), ("cuda:0", {}), ("cuda:0", {"bos": 3})])
def test_step_at_depth_12_reads_no_value_and_stays_on_its_device(fake, monkeypatch, device, options):
    """
    Forward, backward, both optimizers, a copy to save, and loading it. Autograd needs a real GPU: on the fake
    one, backward only makes the gradients. Reading a value of a fake tensor is an error.
    """
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    model, on_cpu = fake_model(device, **options), device == "cpu"
    model.flex = bool(options)
    inputs = torch.empty(6, 256, dtype=torch.int64, device=device)
    if not on_cpu:
        def backward(loss):
            assert loss.device == torch.device(device) and loss.dtype == torch.float32
            for p in model.parameters():
                p.grad = torch.empty_like(p)
        monkeypatch.setattr(torch.Tensor, "backward", backward)
    with torch.set_grad_enabled(on_cpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")    # flex attention is slow where it is not compiled
        optimizers = train.make_optimizers(model, None, 2**19)
        for _ in range(2):
            counts = train.count_and_hash(inputs, inputs, 12, 0)
            sums, _ = train.train_step(model, model, optimizers, inputs, inputs, counts[0], 4)
            assert counts.device == sums.device == torch.device(device) and sums.dtype == torch.float32
            content = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            momenta = [name for o in content["optimizers"] for name in o.get("state", o)]
            assert len(momenta) == len(list(model.parameters())), "an optimizer forgot some"
            saved = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), content)
            model.load_state_dict(saved["model"])
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)


TWO_RANKS = """
import collections, json, sys, torch.distributed as dist, train
calls, steps = collections.Counter(), []
def counted(name):
    original = getattr(dist, name)
    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)
    setattr(dist, name, call)
for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object", "barrier"):
    counted(name)
hook = train.bf16_compress_hook
train.bf16_compress_hook = lambda state, bucket: calls.update(["bf16"]) or hook(state, bucket)
step = train.train_step
def train_step(*args):
    result = step(*args)
    steps.append(dict(calls))
    calls.clear()
    return result
train.train_step = train_step
status = train.main(sys.argv[1:])
print("CALLS", json.dumps(steps))
sys.exit(status)
"""


def calls_of_two_ranks(*words):
    """-> what each step of two ranks over gloo has called, from the end of the step before"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
           "PYTHONPATH": str(HERE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, "-c", TWO_RANKS, *TOY, *map(str, words)], text=True,
                              env={**env, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE)
             for rank in "01"]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert not any(process.returncode for process in ranks), outputs
    return json.loads(outputs[0].split("CALLS")[1])


def test_step_of_two_ranks_has_five_collectives_beside_the_gradients():
    """Numbers of the batch with the wish to stop; the loss; updates of each of three shapes of matrices."""
    words = ["--depth", 3, "--data", "a", "--steps", 6, "--dtype"]
    steps = calls_of_two_ranks(*words, "float32", "--out", "float32")[1:]
    assert len(steps) == 5 and steps[0] == {"all_reduce": 2, "all_gather": 3}
    assert all(calls == steps[0] for i, calls in enumerate(steps, 1) if i % 3)    # --save_every 3
    steps = calls_of_two_ranks(*words, "bfloat16", "--out", "bfloat16")
    assert steps[1]["bf16"] >= 1 and steps[1]["all_reduce"] == 2 + steps[1]["bf16"]    # whose gradients
    assert losses_of("bfloat16") == pytest.approx(losses_of("float32"), abs=0.05)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_share_the_work_of_muon_whatever_their_number(monkeypatch, world):
    """Each rank's share is that of one rank alone; together they have all, also of one matrix for 8 ranks."""
    torch.manual_seed(0)
    shapes = [(8, 8), (32, 8), (8, 8), (8, 8), (8, 8)]
    weights, gradients, momenta = ([torch.randn(shape) for shape in shapes] for _ in range(3))

    def results(rank, world):    # NaN where another rank would have sent its share
        def gather(self, share):
            gathered = torch.full((world, *share.shape), torch.nan)
            gathered[rank] = share
            return gathered.flatten(0, 1)
        monkeypatch.setattr(train, "ranks_of_this_process", lambda: (rank, world))
        monkeypatch.setattr(train.Muon, "_gather", gather)
        named = [(str(i), torch.nn.Parameter(weight.clone())) for i, weight in enumerate(weights)]
        for (_, p), gradient in zip(named, gradients, strict=True):
            p.grad = gradient.clone()
        muon = train.Muon(named, 0.02)
        muon.load_state_dict({str(i): momentum for i, momentum in enumerate(momenta)})
        muon.step()
        return [p.detach() for _, p in named] + [muon.state_dict()[name] for name, _ in named]
    want, seen = results(0, 1), [0] * 10
    for rank in range(world):
        for i, got in enumerate(results(rank, world)):
            if not got.isnan().any():
                seen[i] += 1
                assert torch.allclose(got, want[i], atol=1e-6)
                assert not torch.equal(got, [*weights, *momenta][i])
    assert min(seen) >= 1 and max(seen[0], seen[2]) <= -(-4 // world) * world - 3


def test_flex_attention_is_the_dense_mask():
    """Of documents that change with each batch, which compiles nothing anew. Its gradients need a GPU."""
    from torch._dynamo.utils import counters
    models = [random_model(BOS_ID, depth=2), random_model(BOS_ID, depth=2)]
    models[1].flex = True
    for block in models[1].blocks:
        block.compile(dynamic=False, backend="eager")
    counters.clear()
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = torch.randint(0, 299, (3, 160))
        inputs[:, 0] = inputs[0, 70 + seed] = inputs[1, 3 * seed:9] = BOS_ID
        with torch.no_grad():
            dense, flex = (model(inputs, inputs.roll(-1)) for model in models)
        assert torch.allclose(dense, flex, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    models[0].bos = None
    assert not torch.allclose(models[0](inputs, inputs.roll(-1)), flex, atol=1e-3), "the mask did nothing"


def test_memory_of_gpus_may_grow_in_segments():
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
