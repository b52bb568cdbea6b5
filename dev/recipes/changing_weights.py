"""
Change the weights of a mixture during a run. Here, a second source comes in late:

    python dev/recipes/changing_weights.py my_shards my_json

A weight can be a function of the row's number in the run. Its value counts relative to the other
weights. If all weights at a row are 0, that is an error.
"""

import sys

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from tokenizer import find_tokenizer


def late(row):
    """0 up to row 1,000, then rising to 1 at row 10,000."""
    return min(1.0, max(0.0, (row - 1000) / 9000))

if __name__ == "__main__":
    first, second = sys.argv[1:]
    tokenizer, _ = find_tokenizer(None, [first, second], vocab_size=1024)
    with PackedLoader(tokenizer, B=100, T=64, split="train", data_dir={first: 1.0, second: late}) as loader:
        for batch in range(120):
            next(loader)
            if batch % 20 == 19:
                share = loader.row_sources().count(second) / 100
                print(f"up to row {loader.rows_delivered:6,}: {share:.0%} of the last rows are from {second}")
