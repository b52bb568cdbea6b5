"""
Train with tensor parallelism, here in groups of two ranks that share their rows:

    torchrun --standalone --nproc_per_node=2 dev/recipes/tensor_parallel.py my_shards

Stop it at any time. The same command resumes, on any even number of ranks. For context parallelism,
create the loader in the same way, and let each rank of a group take its part of a row.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data, write_atomic
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoints = Path("tensor_parallel")

dist.init_process_group()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
sizes = (dist.get_world_size() // 2, 2)
mesh = init_device_mesh(device.partition(":")[0], sizes, mesh_dim_names=("data", "tensor"))

# Ranks of one tensor-parallel group pass the same rank, so they get the same rows
data_rank, data_ranks = mesh.get_local_rank("data"), mesh["data"].size()
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, rows_per_step // data_ranks, T, "train", data_dir=data, device=device,
                      rank=data_rank, world_size=data_ranks)

torch.manual_seed(0)
n = tokenizer.get_vocab_size()
model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n)).to(device)
parallelize_module(model, mesh["tensor"], {
    "0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

# Resume from the newest folder with a loader.json, which is written last
start = max((int(path.parent.name) for path in checkpoints.glob("*/loader.json")), default=0)
if start:
    folder = checkpoints / f"{start}"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))

for step in range(start + 1, n_steps + 1):
    inputs, targets = next(loader)
    n_targets = (targets >= 0).sum()    # masked targets are -100
    dist.all_reduce(n_targets, group=mesh.get_group("data"))
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / n_targets.clamp(min=1)
    (loss * data_ranks).backward()    # FSDP2 averages the gradients of the groups, and we need the sum
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss, group=mesh.get_group("data"))
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.5f}", flush=True)

    if step % save_every == 0:
        folder = checkpoints / f"{step}"
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loader_state = gather_states(loader)    # all ranks call this, and rank 0 gets the state
        if loader_state:
            write_atomic(folder / "loader.json", json.dumps(loader_state))
loader.close()
dist.destroy_process_group()
