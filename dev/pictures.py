"""
README's pictures, by matplotlib. (dev/line.svg was drawn by hand.)

    python -m dev.pictures rows --out dev/rows.svg                      # documents in rows
    python -m dev.pictures documents runs/mine --out documents.svg      # which were hard (--ledger)
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.pictures, typed where dataloader.py is")

import argparse

import numpy as np

from dataloader import PACKINGS, PackedLoader
from dataset import Parser, UserError, errors_in_one_line, find_data
from dev.runs import loader_of, losses_of, newest_of
from tokenizer import find_tokenizer

try:
    import matplotlib
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.figure import Figure
except ImportError as error:
    raise SystemExit(f"error: {error}; pip install matplotlib") from None

matplotlib.rcParams["svg.fonttype"] = "none"    # text as text, not as paths
matplotlib.rcParams["svg.hashsalt"] = "nanoloader"    # the same file each time

LEGEND = ("A colour: a document. Dark bar: BOS, of a document or again after a cut. White tooth: "
          "it is cut, and goes on in another row, unless its packing drops the rest.")

def rows_picture(tokenizer, data_dir, T, n_rows=8):
    """For each packing, rows from the middle of a run."""
    figure = Figure((9, 1.8 * len(PACKINGS)), layout="constrained")
    figure.supxlabel(LEGEND, fontsize=8)
    lengths = {}

    def remember(ids, location, epoch):
        lengths[location] = len(ids)
        return ids

    for panel, packing in zip(figure.subplots(len(PACKINGS)), PACKINGS, strict=True):
        panel.set(title=packing, xlim=(0, T + 1), ylim=(n_rows - 0.5, -0.5))
        panel.set_axis_off()
        with PackedLoader(tokenizer, 256 + n_rows, T, "train", data_dir=data_dir, num_lanes=1,
                          packing=packing, transform=remember) as loader:
            next(loader)
            rows = loader.pieces()[-n_rows:]
        draw_rows(panel, rows, lengths, T)
    return figure

def draw_rows(panel, rows, lengths, T):
    colours = {}
    for y, row in enumerate(rows):
        following = [piece.location for piece in row[1:]] + [None]
        for piece, next_location in zip(row, following, strict=True):
            n_tokens = piece.stop - piece.start
            colour = colours.setdefault(piece.location, colour_of(len(colours)))
            panel.barh(y, n_tokens, left=piece.offset, color=colour)
            if piece.start == 0:
                panel.barh(y, T / 400, left=piece.offset, color="#222")
            if piece.stop < lengths[piece.location] and next_location != piece.location:
                end = piece.offset + n_tokens
                panel.plot(end - T / 300, y, "<", color="white", markersize=5)

def colour_of(n):
    """Hues by the golden ratio: none comes twice, and neighbours are far apart."""
    hue, saturation = 0.618034 * n % 1, 0.4 + 0.2 * (n % 3)
    return tuple(hsv_to_rgb((hue, saturation, 0.9)))

def documents_picture(run):
    """Of each source: bits per byte over the steps, and how far above them its documents were."""
    figure = Figure((9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    with loader_of(newest_of(run)) as loader:
        for name, _, usual, documents in losses_of(run, loader.sources):
            left.plot(np.arange(len(usual)) * 50, usual, label=name)
            above = [document.above for document in documents]
            right.hist(above, 60, log=True, histtype="stepfilled", alpha=0.7)
    left.set(xlabel="step", ylabel="bits per byte")
    right.set(xlabel="bits per byte above those of the same steps", ylabel="documents")
    left.legend()
    return figure

def main(argv=None):
    parser = Parser("python -m dev.pictures", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example: python -m dev.pictures rows --out rows.svg")
    add = parser.add_argument
    add("what", choices=["rows", "documents"])
    add("input", nargs="?", help="rows: a folder of data; documents: a run")
    add("--tokenizer", help="rows: its folder (default: the one trained on the data)")
    add("--T", type=int, default=8192, help="rows: tokens in a row (default 8192)")
    add("--out", help="the picture (default: WHAT.svg)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        picture = draw(flags)
        picture.savefig(flags.out or f"{flags.what}.svg", metadata={"Date": None})

def draw(flags):
    if flags.what == "documents":
        if not flags.input:
            raise UserError("which run? Such as: python -m dev.pictures documents runs/mine")
        return documents_picture(flags.input)
    data_dir = find_data(flags.input)
    tokenizer, _ = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    return rows_picture(tokenizer, data_dir, flags.T)

if __name__ == "__main__":
    main()
