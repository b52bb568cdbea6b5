"""
Weight the loss of each token. Here, the weight is its document's score, from a column next to the text:

    python -m dev.convert rated.csv --keep score --out my_rated
    python dev/recipes/loss_weights.py my_rated
"""

import functools
import sys

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from tokenizer import find_tokenizer


@functools.lru_cache(64)
def read_scores(path, row_group):
    column = pq.ParquetFile(path).read_row_group(row_group, columns=["score"])["score"]
    return column.to_numpy()

def with_weight(ids, location, epoch):
    """The ids, and a weight for each."""
    scores = read_scores(location.path, location.row_group)
    tokens = np.zeros(len(ids), [("id", np.int64), ("weight", np.float32)])
    tokens["id"] = ids
    tokens["weight"] = scores[location.row]
    return tokens

if __name__ == "__main__":
    [data] = sys.argv[1:]
    tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
    n = tokenizer.get_vocab_size()
    model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n))
    optimizer = torch.optim.AdamW(model.parameters())
    with PackedLoader(tokenizer, B=4, T=128, split="train", data_dir=data,
                      transform=with_weight) as loader:
        for step in range(1, 11):
            inputs, targets, weights = next(loader)    # weights: 0 where a target is masked
            logits = model(inputs).flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
            # On several ranks, sum the weights over all ranks, as ddp.py does with the targets
            loss = (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-6)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: weighted loss {loss.item():.5f}")
