"""
Evaluate on the validation split during training, in one process or in several:

    python dev/recipes/validation.py my_shards
    torchrun --standalone --nproc_per_node=2 dev/recipes/validation.py my_shards

Each evaluation reads the same rows. To save and resume as well, see ddp.py.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from dataset import find_data
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, eval_every = 40, 20

if "RANK" in os.environ:
    dist.init_process_group()
else:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
rank, world_size = dist.get_rank(), dist.get_world_size()
B = rows_per_step // world_size
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, B, T, "train", data_dir=data)

torch.manual_seed(0)
n = tokenizer.get_vocab_size()
model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def sum_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor

def summed_loss(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

@torch.no_grad()
def evaluate():
    """The mean loss of all validation tokens. All ranks call this, and make the same number of steps."""
    totals = torch.zeros(2)
    # A new loader begins at the first row. Its last rows can be fully masked, on some ranks
    with PackedLoader(tokenizer, B, T, "val", data_dir=data, epochs=1, shuffle_seed=None) as batches:
        for inputs, targets in batches:
            totals += torch.stack([summed_loss(model, inputs, targets), (targets >= 0).sum()])
    loss, n_targets = sum_over_ranks(totals)
    return (loss / n_targets.clamp(min=1)).item()

for step in range(1, n_steps + 1):
    inputs, targets = next(loader)
    n_targets = sum_over_ranks((targets >= 0).sum())
    loss = summed_loss(ddp_model, inputs, targets) / n_targets.clamp(min=1)
    (loss * world_size).backward()    # DDP averages the gradients of the ranks, and we need the sum
    optimizer.step()
    optimizer.zero_grad()
    if step % eval_every == 0:
        loss = evaluate()
        if rank == 0:
            print(f"step {step}: validation loss {loss:.5f}", flush=True)
loader.close()
dist.destroy_process_group()
