"""
The rows of a run by the slow and obvious reference in test_dataloader.py, which has no threads,
ranks or states.

    python -m dev.reference                          the rows of a small corpus
    python -m dev.reference --drawn 1000 --seed 0    compare the loader's rows in 1,000 drawn runs

An epoch is one line of all documents. It is cut into lanes, and each lane into chunks:

    |------- lane 0 -------|------- lane 1 -------|------- lane 2 -------|------- lane 3 -------|
    | chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..| chunk 0 | chunk 1 |..|

Each chunk is packed into rows by itself. Row g of the run is the next row of lane g % num_lanes.
The four steps are line_of, chunks_of, rows_of_chunk and next_row.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.reference, run in the folder of dataloader.py")

import argparse
import tempfile

from dataset import Parser, errors_in_one_line, list_shards
from dev import drawn
from test_dataloader import Run, chunks_of, rows_of_run, write

SHARDS = [    # a token is a letter
    [["aaaaa", "bbbbbbbbb", "ccc"], ["ddddddd", "eeeeeeeeeeeeeeeeeeee", "ffff"]],
    [["gggggg", "hhhhhhhh", "ii"], ["jjjjjjjjjj", "kkkkkk", "lllll"]]]

def print_example():
    with tempfile.TemporaryDirectory() as folder:
        shards = list_shards(write(folder, *SHARDS), "train")

    def text_of(location, epoch=1):    # | is BOS
        shard = [shard.path for shard in shards].index(location.path)
        return "|" + SHARDS[shard][location.row_group][location.row]

    run = Run({"": shards}, {"": 1}, {"": 1}, text_of, T=15, packing="exactfit", num_lanes=2,
              chunk_bytes=21, shuffle_seed=0)
    print("2 shards of 2 row groups each; T = 15, 2 lanes; | is BOS")
    for shard, groups in zip(shards, SHARDS, strict=True):
        print(f"{shard.name}:", "; ".join(" ".join(group) for group in groups))
    print("\nthe line of epoch 1:")
    for lane, chunks in enumerate(chunks_of(run, "", 1)):
        for i, chunk in enumerate(chunks):
            letters = " ".join(text_of(location)[1] for location in chunk)
            print(f"  lane {lane}, chunk {i}: {letters}")
    print("\nthe run:")
    for g, (lane, _, row) in enumerate(rows_of_run(run)):
        pieces = [text_of(location)[start:stop] for location, _, start, stop in row]
        print(f"  row {g}, from lane {lane}: {''.join(pieces):.<16}")

def main(argv=None):
    parser = Parser("python -m dev.reference", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="runs to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the first drawn run (default 0)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        if flags.drawn:
            drawn.compare(flags.drawn, flags.seed)
        else:
            print_example()

if __name__ == "__main__":
    main()
