"""
Train with Lightning, in one process or in several:

    python dev/recipes/with_lightning.py my_shards
    torchrun --standalone --nproc_per_node=2 dev/recipes/with_lightning.py my_shards

Stop it at any time, even during a save. The same command resumes, on any number of ranks.

Lightning writes a checkpoint under TMPDIR, and then moves it. Set TMPDIR to a folder on the disk of the
checkpoints: across disks, the move is a copy, and a crash can leave half of it.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from dataset import find_data
from tokenizer import find_tokenizer

rows_per_step, T = 8, 128    # of all ranks together
n_steps, save_every = 40, 10
checkpoints = Path("with_lightning")
world_size = int(os.environ.get("WORLD_SIZE", 1))
data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)

class Data(lightning.LightningDataModule):
    """Saves the state of all ranks. Lightning alone would save that of rank 0, one batch late."""

    def setup(self, stage):    # runs after Lightning has set up the ranks
        self.loader = PackedLoader(tokenizer, rows_per_step // world_size, T, "train", data_dir=data)

    def train_dataloader(self):
        return map(tuple, self.loader)    # hides the loader's state_dict from Lightning

    def state_dict(self):
        return gather_states(self.loader) or {}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        n = tokenizer.get_vocab_size()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n))

    def training_step(self, batch, i):
        inputs, targets = batch
        n_targets = (targets >= 0).sum()    # masked targets are -100
        logits = self.layers(inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        total = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(n_targets)
            dist.all_reduce(total)
        n_targets = n_targets.clamp(min=1)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}: loss {(total / n_targets).item():.5f}", flush=True)
        return loss * world_size / n_targets    # DDP averages the gradients, and we need the sum

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
    max_steps=n_steps, max_epochs=-1, logger=False, enable_progress_bar=False,
    limit_train_batches=n_steps,    # without a limit, Lightning fetches a batch ahead, and a resume skips it
    callbacks=[ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=save_every, save_top_k=-1)])
def step_of(path):    # step=20.ckpt -> 20
    return int(path.stem.removeprefix("step="))

newest = max(checkpoints.glob("step=*.ckpt"), key=step_of, default=None)
trainer.fit(Model(), Data(), ckpt_path=newest)
