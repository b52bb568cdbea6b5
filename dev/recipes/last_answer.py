"""
Train on the last answer of each chat only. (By default, all answers count.)

    python -m dev.convert chats.jsonl --out my_chats
    python dev/recipes/last_answer.py my_chats
"""

import sys

import numpy as np

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from tokenizer import find_tokenizer


def last_answer(ids, location, epoch):
    """Masks all but the last run of unmasked tokens. (~t is token t, masked.)"""
    [unmasked] = np.nonzero(ids >= 0)
    end = unmasked[-1]    # the answer's last token
    begin = np.flatnonzero(ids[:end] < 0)[-1] + 1
    masked = np.minimum(ids, ~ids)
    return np.concatenate([masked[:begin], ids[begin:]])

if __name__ == "__main__":
    [data] = sys.argv[1:]
    tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
    loader = PackedLoader(
        tokenizer, B=4, T=256, split="train", data_dir=data, transform=last_answer,
        packing="wholefit")    # cuts only chats that are longer than a row
    inputs, targets = next(loader)
    print("read:   ", tokenizer.decode(inputs[0].tolist()))
    print("trained:", tokenizer.decode(targets[0][targets[0] >= 0].tolist()))
    loader.close()
