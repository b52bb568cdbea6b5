"""
A data loader for torchtitan (0.3.0), whose own one resumes only on the same number of data-parallel ranks.

Copy this file next to dataloader.py, where your config of torchtitan can import it, and set

    dataloader = Packed.Config(dataset_path="my_shards", tokenizer_path="my_tokenizer")

To see a batch without torchtitan's trainer, run:

    python dev/recipes/with_torchtitan.py my_shards my_tokenizer
"""

import sys
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from tokenizer import get_tokenizer


class Packed(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        tokenizer_path: str = "my_tokenizer"
        split: str = "train"
        num_lanes: int = 64    # the same on any number of ranks, or DCP refuses to load the state

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        tokenizer = get_tokenizer(config.tokenizer_path)
        self.bos = tokenizer.get_bos_token_id()
        self.loader = PackedLoader(tokenizer, local_batch_size, seq_len, config.split,
                                   data_dir=config.dataset_path, rank=dp_rank, world_size=dp_world_size,
                                   num_lanes=config.num_lanes)

    def __iter__(self):
        for inputs, labels in self.loader:
            columns = torch.arange(inputs.shape[1]).expand_as(inputs)
            begins = (columns == 0) | (inputs == self.bos)    # of documents
            positions = columns - (columns * begins).cummax(1).values
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self):    # of this rank; torchtitan's checkpointer merges the ranks' states
        return self.loader.state_dict()

    def load_state_dict(self, state):
        if state:
            self.loader.load_state_dict(state)

if __name__ == "__main__":
    data, tokenizer_dir = sys.argv[1:]
    packed = Packed.Config(dataset_path=data, tokenizer_path=tokenizer_dir).build(
        dp_world_size=1, dp_rank=0, local_batch_size=4, seq_len=128, tokenizer=None,
        snapshot_every_n_steps=1)
    batch, labels = next(iter(packed))
    print(batch["input"].shape, batch["positions"].shape, labels.shape)
    packed.loader.close()
