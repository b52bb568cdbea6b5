"""
Weight the loss of each token. Here, the weight is its document's score, from a column next to the text:

    python -m dev.convert rated.csv --keep score --out my_rated
    python dev/recipes/loss_weights.py my_rated
"""

import functools
import sys

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

def weights_of(loader, targets):
    """The weight of each target of the last batch, (B, T); 0 where a target is masked."""
    weights = torch.zeros(targets.shape)
    for weights_of_row, pieces in zip(weights, loader.pieces(), strict=True):
        for piece in pieces:    # tokens of one document, which begin at piece.offset of the row
            location = piece.location
            scores = read_scores(location.path, location.row_group)
            begin = max(0, piece.offset - 1)    # target i is token i + 1 of the row
            end = piece.offset + piece.stop - piece.start - 1
            weights_of_row[begin:end] = scores[location.row]
    return weights * (targets >= 0)

if __name__ == "__main__":
    [data] = sys.argv[1:]
    tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
    n = tokenizer.get_vocab_size()
    model = torch.nn.Sequential(torch.nn.Embedding(n, 64), torch.nn.Linear(64, n))
    optimizer = torch.optim.AdamW(model.parameters())
    with PackedLoader(tokenizer, B=4, T=128, split="train", data_dir=data) as loader:
        for step in range(1, 11):
            inputs, targets = next(loader)
            weights = weights_of(loader, targets)
            logits = model(inputs).flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
            # On several ranks, sum the weights over all ranks, as ddp.py does with the targets
            loss = (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-6)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: weighted loss {loss.item():.5f}")
