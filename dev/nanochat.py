"""
nanochat's four generators, with its names, arguments and rows, token for token. Copy this file along to
train nanochat, see dev/loops.md. Two rules differ from the core's: which row groups a rank reads, and that
best-fit refills its buffer `tokenizer_batch_size` documents of a row group at a time.

    train_loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(tokenizer, B, T, "train")
    inputs, targets, state = next(train_loader)    # on each rank; resume with the same world size

Better than nanochat's: exact resume, threads that encode ahead, and no hang where a rank has no row group.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import numpy as np
import torch

import dataloader
from dataloader import BestFitPacker, FlatPacker, PackedLoader, Ref, Source
from dataset import default_data_dir


class NanochatSource(Source):
    """Each shard is dealt separately: its row group i goes to lane i % num_lanes."""

    def _order(self, epoch):
        """Shards padded with -1 to a multiple of num_lanes. Example: 3 and 2, 2 lanes -> 0, 1, 2, -1, 3, 4"""
        padded = []
        for first, stop in itertools.pairwise(self.first_group):
            padded += [np.arange(first, stop), np.full((first - stop) % self.num_lanes, -1)]
        numbers = np.concatenate(padded)
        return numbers, np.zeros_like(numbers), 1    # each row group in one part

    def deal(self, lane, start, epochs=None):
        for ref in super().deal(lane, start, epochs):
            if self.order(ref.epoch)[0][ref.group] >= 0:
                yield ref


class NanochatBestFitPacker(BestFitPacker):
    """
    Refills in blocks of `tokenizer_batch_size` documents of a row group. Only the next document shows that a
    block is complete: it is pulled `early` and waits for the next refill. buffered() gives it token 1.
    """
    options: ClassVar = {"buffer_size": 1000, "tokenizer_batch_size": 128}

    def __init__(self, T, buffer_size, tokenizer_batch_size):
        super().__init__(T, buffer_size)
        self.block_size, self.early = tokenizer_batch_size, None

    def refill(self, pull):
        while len(self.sizes) < self.buffer_size and (document := self.early or pull()) is not None:
            block = self.block_of(document[1])
            while document is not None and self.block_of(document[1]) == block:
                self.counts["documents"] += 1
                super().restore(*document)
                document = pull()
            self.early = document

    def block_of(self, ref):
        return ref.epoch, ref.group, ref.doc // self.block_size

    def buffered(self):
        return super().buffered() + ((self.early[1]._replace(token=1),) if self.early else ())

    def restore(self, ids, ref):
        if ref.token:
            self.early = ids, ref._replace(token=0)
        else:
            super().restore(ids, ref)


# Other names than the core's, so that no state of these generators loads into a loader that deals otherwise.
dataloader.PACKINGS.update(nanochat_flat=FlatPacker, nanochat_bestfit=NanochatBestFitPacker)


def batches_with_state(packing, tokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4,
                       tokenizer_batch_size: int = 128, device: str | torch.device = "cuda",
                       resume_state_dict: dict | None = None, buffer_size: int | None = None
                       ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict]]:
    """One lane per rank. The state is a PackedLoader's, with what nanochat prints; for merge_states, too."""
    _, world_size = dataloader.ranks_of_this_process()
    with PackedLoader(tokenizer, B, T, split, packing=packing, buffer_size=buffer_size, device=device,
                      data_dir=default_data_dir(), num_lanes=world_size, threads=tokenizer_threads) as loader:
        ((name, source),) = loader.sources.items()
        if (n := max(len(shard.rows) for shard in source.shards)) < world_size:
            raise ValueError(f"no shard of {name} has more than {n} row groups, so the last of {world_size} "
                             "ranks never gets one; use PackedLoader, which splits row groups")
        source = NanochatSource(name, source.shards, world_size)
        loader.sources, loader.tokenizer_batch_size = {name: source}, tokenizer_batch_size
        if resume_state_dict is not None:
            loader.load_state_dict(resume_state_dict)
        for inputs, targets in loader:
            state = loader.state_dict()
            ((lane,),) = (lane.values() for lane in state["lanes"].values())
            ref = Ref(*lane["next"])
            shard, row_group, _ = source.find(ref)
            printed = {"epoch": ref.epoch, "pq_idx": source.shards.index(shard), "rg_idx": row_group}
            yield inputs, targets, dataloader.with_digest({**state, **printed})


def batches_without_state(*args, **kwargs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, targets, _ in batches_with_state(*args, **kwargs):
        yield inputs, targets


tokenizing_distributed_data_loader = partial(batches_without_state, "nanochat_flat")
tokenizing_distributed_data_loader_with_state = partial(batches_with_state, "nanochat_flat")
tokenizing_distributed_data_loader_bos_bestfit = partial(batches_without_state, "nanochat_bestfit")
tokenizing_distributed_data_loader_with_state_bos_bestfit = partial(batches_with_state, "nanochat_bestfit")
