"""
CPU seconds of each rank in a finite run: every rank encodes all of the text.

    python -m dev.bench.finite my_shards my_tokenizer
"""

import sys
import time

from dataloader import PackedLoader
from tokenizer import get_tokenizer


def main(data, tokenizer_dir):
    for world_size in (1, 2, 8):
        tokenizer = get_tokenizer(tokenizer_dir)    # gigatoken remembers words
        loader = PackedLoader(tokenizer, 4, 2048, "train", data_dir=data, epochs=1, rank=0,
                              world_size=world_size, num_lanes=64, threads=1)
        start = time.process_time()
        n_targets = sum(int((targets >= 0).sum()) for _, targets in loader)
        seconds = time.process_time() - start
        print(f"rank 0 of {world_size}: {n_targets:,} targets delivered, {seconds:.2f} s of CPU")

if __name__ == "__main__":
    main(*sys.argv[1:])
