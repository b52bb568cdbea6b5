"""
Train with DDP, in one process or in several:

    python dev/recipes/ddp.py my_shards
    torchrun --standalone --nproc_per_node=2 dev/recipes/ddp.py my_shards

Stop it at any time, even during a save. The same command resumes, on any number of ranks. Without a
folder of shards, it trains on Python's standard library.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoint = "ddp.pt"

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
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)    # trained once, then cached
loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data, device=device)

# Model
torch.manual_seed(0)
n = tokenizer.get_vocab_size()
model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
start = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    start = saved["step"]
ddp_model = DistributedDataParallel(model)

for step in range(start + 1, n_steps + 1):
    inputs, targets = next(loader)
    # Masked targets (-100) fill short rows, so ranks differ in how many targets count. Divide the
    # summed loss by the number of targets on all ranks.
    n_targets = (targets >= 0).sum()
    dist.all_reduce(n_targets)
    logits = ddp_model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / n_targets.clamp(min=1)
    (loss * world_size).backward()    # DDP averages the gradients of the ranks, and we need the sum
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.5f}", flush=True)

    if step % save_every == 0:
        loader_state = gather_states(loader)    # all ranks call this, and rank 0 gets the state
        if rank == 0:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "loader": loader_state}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)    # a crash leaves the old file, whole

loader.close()
dist.destroy_process_group()    # without this call, a run on CPUs can abort at its exit
