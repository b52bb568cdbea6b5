"""
A random transform. This one teaches a model to fill in the middle of a document:

    python dev/recipes/fill_in_the_middle.py my_shards

Threads call a transform in any order, and call it again after a resume. Its random numbers must
therefore depend only on the document and the epoch. location.key stays the same if the data moves.
"""

import random
import sys

import numpy as np

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from dataset import find_data
from tokenizer import find_tokenizer

data = find_data(*sys.argv[1:])
tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
# Three special tokens that plain text does not use. Choose those of your tokenizer.
fim_start = tokenizer.encode_special("<|python_start|>")
fim_end = tokenizer.encode_special("<|python_end|>")
fim_middle = tokenizer.encode_special("<|output_start|>")

def fill_in_the_middle(ids, location, epoch):
    """Turns half of all documents from start, middle, end into start, end, middle."""
    draw = random.Random(f"{location.key} {epoch}")
    if len(ids) < 3 or draw.random() < 0.5:
        return ids
    a, b = sorted(draw.sample(range(1, len(ids) + 1), 2))
    bos, start, middle, end = ids[:1], ids[1:a], ids[a:b], ids[b:]
    return np.concatenate([bos, [fim_start], start, [fim_end], end, [fim_middle], middle])

loader = PackedLoader(tokenizer, B=4, T=128, split="train", data_dir=data, transform=fill_in_the_middle)
inputs, targets = next(loader)
print(tokenizer.decode(inputs[0].tolist()))
loader.close()
