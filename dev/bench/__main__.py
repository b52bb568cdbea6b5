"""
Benchmarks: each figure and its yardstick are measured in turns, in one run.

    python -m dev.bench packings    what each packing drops, pads and cuts, on the data at hand
    python -m dev.bench peers       the same text by other loaders, as far as they are installed

The trade-off: `peers` takes a minute a line, because the loaders take turns. So its tokens per CPU
second are also right on a busy machine, while tokens per second are not.
"""

import argparse
import importlib.util
import sys

from dataset import Parser, at_least, errors_in_one_line, find_data
from dev.bench.measure import PEERS, compare_packings, measure_peers
from tokenizer import find_tokenizer


def main(argv=None):
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        for line in run(flags):
            print(line, flush=True)

def run(flags):
    """-> lines"""
    data_dir = find_data(flags.data)
    tokenizer, folder = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    print(f"data: {data_dir}; tokenizer: {folder}", file=sys.stderr)
    if flags.command == "packings":
        return compare_packings(tokenizer, data_dir, flags.T)
    return measure_peers(folder, data_dir, flags.B, flags.T, flags.engine, flags.loaders,
                         flags.seconds, flags.rounds)

def make_parser():
    parser = Parser("python -m dev.bench", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example: python -m dev.bench packings --data my_shards")
    commands = parser.add_subparsers(dest="command", required=True)
    engines = ["tiktoken", "gigatoken"] if importlib.util.find_spec("gigatoken") else ["tiktoken"]
    for name in ("packings", "peers"):
        command = commands.add_parser(name)
        add = command.add_argument
        add("--data", metavar="FOLDER", help="default: what train.py takes")
        add("--tokenizer", metavar="DIR", help="default: the one trained on the data")
        add("--T", type=at_least(1), default=2048, help="tokens in a row (default 2048)")
        add("--B", type=at_least(1), default=32, help="rows in a batch (default 32)")
        if name == "peers":
            add("--engine", nargs="+", choices=["tiktoken", "gigatoken"], default=engines[::-1])
            names = [*dict.fromkeys(peer.name for peer in PEERS)]
            add("--loaders", nargs="+", choices=names, default=names)
            add("--seconds", type=float, default=15.0,
                help="of a turn (default 15): some loaders encode for 2 s, then deliver that")
            add("--rounds", type=at_least(1), default=3, help="turns of each (default 3)")
    return parser

if __name__ == "__main__":
    main()
