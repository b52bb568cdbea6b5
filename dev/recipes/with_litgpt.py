"""
Pretrain with litgpt (0.5.13):

    python dev/recipes/with_litgpt.py pythia-14m my_shards

The same command resumes. Each validation reads the same rows.

After a crash during a save, delete the newest folder of with_litgpt/ if it has no model_config.yaml,
which is written last. Do not resume from `final`: its loader is a batch ahead of the model. Do not use
this for chats: litgpt averages the mean losses of the ranks, whose numbers of targets differ.
"""

import sys
from typing import NamedTuple

import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader, gather_states
from tokenizer import find_tokenizer


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor

    def __getitem__(self, index):    # litgpt reads [:, 0:T] and [:, 1:T + 1]
        return self.inputs if index[1].start == 0 else self.targets

class Stateful(DataLoader):
    def state_dict(self):    # all ranks call this, and rank 0 writes what it got
        return gather_states(self.dataset)

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)

class Validation(IterableDataset):
    def __init__(self, make):
        self.make = make

    def __iter__(self):    # each validation begins at the first row
        return iter(self.make("val", epochs=1, shuffle_seed=None))

class Packed(DataModule):
    def __init__(self, data_dir):
        super().__init__()
        self.data_dir = data_dir
        self.own_tokenizer, _ = find_tokenizer(None, [data_dir], vocab_size=1024)

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.B, self.T = batch_size, max_seq_length

    def make(self, split, **options):
        return PackedLoader(self.own_tokenizer, self.B, self.T, split, data_dir=self.data_dir, **options)

    def train_dataloader(self):    # num_workers=0: the loader has threads of its own
        return Stateful(self.make("train"), batch_size=None, num_workers=0, collate_fn=Batch._make)

    def val_dataloader(self):
        return DataLoader(Validation(self.make), batch_size=None, num_workers=0, collate_fn=Batch._make)

if __name__ == "__main__":
    name, data = sys.argv[1:]
    sys.argv = ["litgpt", "pretrain", name]    # litgpt parses it when it saves
    setup(name, data=Packed(data), out_dir="with_litgpt", precision="32-true", resume="auto",
          logger_name="csv", eval=EvalArgs(interval=20, max_iters=10),
          train=TrainArgs(save_interval=10, log_interval=1, global_batch_size=8, micro_batch_size=4,
                          max_tokens=40 * 8 * 128, max_seq_length=128, max_norm=1.0, min_lr=1e-4))
