"""
Train with Hugging Face Accelerate, in one process or in several:

    python dev/recipes/with_accelerate.py my_shards
    accelerate launch --num_processes=2 dev/recipes/with_accelerate.py my_shards

Stop it at any time, even during a save. The same command resumes, on any number of ranks. Each save is
a new folder, on a disk that all nodes share. Delete old ones yourself, but keep the newest two.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data, write_atomic
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoints = Path("with_accelerate")

# Create the loader after Accelerator(), which sets up the ranks. Do not pass it to prepare(), in a
# DataLoader: that one would read the batches of all ranks from the loader of rank 0.
accelerator = Accelerator(cpu=not torch.cuda.is_available())    # on CPUs, ranks would train apart without it
world_size = accelerator.num_processes
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data,
                      device=accelerator.device)

torch.manual_seed(0)
n = tokenizer.get_vocab_size()
model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)

# Resume from the newest folder with a loader.json, which is written last
start = max((int(path.parent.name) for path in checkpoints.glob("*/loader.json")), default=0)
if start:
    folder = checkpoints / f"{start}"
    accelerator.load_state(folder)
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))

for step in range(start + 1, n_steps + 1):
    inputs, targets = next(loader)
    n_targets = accelerator.reduce((targets >= 0).sum())    # masked targets are -100
    logits = model(inputs).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / n_targets.clamp(min=1)
    accelerator.backward(loss * world_size)    # DDP averages the gradients, and we need the sum
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach())
    accelerator.print(f"step {step}: loss {loss.item():.5f}", flush=True)

    if step % save_every == 0:
        folder = checkpoints / f"{step}"
        accelerator.save_state(folder)
        loader_state = gather_states(loader)    # all ranks call this, and rank 0 gets the state
        if accelerator.is_main_process:
            write_atomic(folder / "loader.json", json.dumps(loader_state))

loader.close()
accelerator.end_training()
