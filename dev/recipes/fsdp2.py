"""
Train with FSDP2, and save with DCP (torch.distributed.checkpoint), in one process or in several:

    python dev/recipes/fsdp2.py my_shards
    torchrun --standalone --nproc_per_node=2 dev/recipes/fsdp2.py my_shards

Stop it at any time, even during a save. The same command resumes, on any number of ranks. Each save is
a new folder, on a disk that all nodes share. Delete old ones yourself, but keep the newest two.
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
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data, write_atomic
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoints = Path("fsdp2")

# Ranks
if "RANK" in os.environ:
    dist.init_process_group()    # no backend: torch takes gloo for CPU tensors, NCCL for CUDA tensors
else:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
rank, world_size = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(device)

# Data: create the loader after init_process_group, from which it takes its rank
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data, device=device)

# Model
torch.manual_seed(0)
n = tokenizer.get_vocab_size()
model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n)).to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)    # of the sharded parameters

# Resume from the newest folder with a loader.json, which is written last
start = max((int(path.parent.name) for path in checkpoints.glob("*/loader.json")), default=0)
if start:
    folder = checkpoints / f"{start}"
    model_state, optimizer_state = get_state_dict(model, optimizer)    # DCP loads into these tensors
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))

for step in range(start + 1, n_steps + 1):
    inputs, targets = next(loader)
    n_targets = (targets >= 0).sum()    # masked targets are -100
    dist.all_reduce(n_targets)
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / n_targets.clamp(min=1)
    (loss * world_size).backward()    # FSDP2 averages the gradients of the ranks, and we need the sum
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.5f}", flush=True)

    if step % save_every == 0:
        folder = checkpoints / f"{step}"
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loader_state = gather_states(loader)    # all ranks call this, and rank 0 gets the state
        if rank == 0:
            write_atomic(folder / "loader.json", json.dumps(loader_state))

loader.close()
dist.destroy_process_group()
