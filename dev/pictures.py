"""
Pictures of rows, losses and documents, by matplotlib.

    python -m dev.pictures rows --out dev/rows.svg                                # documents in rows
    python -m dev.pictures loss runs/* --out loss.svg                             # a line per run
    python -m dev.pictures documents runs/mine --out documents.svg                # which were hard (--ledger)
"""

import argparse
import collections

import numpy as np

from dataloader import PACKINGS, PackedLoader
from dataset import Parser, errors_in_one_line, find_data
from dev.ledger import loader_of, losses_of, newest_of
from tokenizer import find_tokenizer
from train import read_log

with errors_in_one_line():
    import matplotlib
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.figure import Figure
matplotlib.rcParams["svg.fonttype"] = "none"    # text as text, not as paths

def rows_picture(tokenizer, data_dir, T, n_rows=8):
    """A bar per piece, a colour per document of a panel, and a line that says what the marks are."""
    figure, lengths = Figure((9, 1.8 * len(PACKINGS)), layout="constrained"), {}

    def remember(ids, location, epoch):
        lengths[location] = len(ids)
        return ids

    figure.supxlabel("A colour: a document. Dark bar: it begins here, or its BOS is repeated. White tooth: "
                     "it is cut, and goes on in another row, unless its packing drops the rest.", fontsize=8)
    for panel, packing in zip(figure.subplots(len(PACKINGS)), PACKINGS, strict=True):
        panel.set(title=packing, xlim=(0, T + 1), ylim=(n_rows - 0.5, -0.5))
        panel.set_axis_off()
        with PackedLoader(tokenizer, 256 + n_rows, T, "train", data_dir=data_dir, num_lanes=1,
                          packing=packing, transform=remember) as loader:
            next(loader)
            rows, colours = loader.pieces()[-n_rows:], {}    # from the middle of a run
        for y, row in enumerate(rows):
            end = 0
            for location, _, start, stop, offset in row:
                colour = colours.setdefault(location, colour_of(len(colours)))
                panel.barh(y, offset + stop - start - end, left=end, color=colour)
                if start == 0 or offset > end:    # its BOS, or a repeated one
                    panel.barh(y, T / 400, left=end, color="#222")
                end = offset + stop - start
                if stop < lengths[location]:
                    panel.plot(end - T / 300, y, "<", color="white", markersize=5)
    return figure

def colour_of(n):
    """Hues by the golden ratio: none comes twice, and neighbours are far apart."""
    return tuple(hsv_to_rgb((0.618034 * n % 1, 0.4 + 0.2 * (n % 3), 0.9)))

def loss_picture(folders):
    """Training loss above, val below; of a mixture, a line for each source, dashed in other ways."""
    figure = Figure((9, 7), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for i, folder in enumerate(folders):
        records, vals = list(read_log(f"{folder}/log.jsonl")), collections.defaultdict(list)
        losses = np.array([(r["step"], r["loss"]) for r in records if "loss" in r])
        if not len(losses):
            raise ValueError(f"no losses in {folder}; expected folders of runs of train.py")
        n = -(-len(losses) // 150)
        means = losses[:len(losses) // n * n].reshape(-1, n, 2).mean(axis=1)
        upper.plot(*means.T, label=folder, color=f"C{i % 10}")
        for record in records:
            if "val_bpb" in record:
                vals[record.get("source")].append((record["step"], record["val_bpb"]))
        for j, (source, points) in enumerate(vals.items()):
            style, label = "o" + ("-", "--", ":", "-.")[j % 4], f"{folder}: {source}, {points[-1][1]:.4f}"
            lower.plot(*np.transpose(points), style, color=f"C{i % 10}", label=label)
    upper.set(ylabel="training loss, nats per token")
    lower.set(ylabel="val, bits per byte", xlabel="step")
    upper.legend()
    lower.legend()
    return figure

def documents_picture(run):
    """Of each source: bits per byte over the steps, and how far above them its documents were."""
    figure = Figure((9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    with loader_of(newest_of(run), False) as loader:
        for name, _, usual, documents in losses_of(run, loader.sources):
            left.plot(np.arange(len(usual)) * 50, usual, label=name)
            right.hist([above for above, *_ in documents], 60, log=True, histtype="stepfilled", alpha=0.7)
    left.set(xlabel="step", ylabel="bits per byte")
    right.set(xlabel="bits per byte above those of the same steps", ylabel="documents")
    left.legend()
    return figure

def main(argv: list[str] | None = None) -> None:
    parser = Parser("python -m dev.pictures", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "loss", "documents"])
    parser.add_argument("inputs", nargs="*", help="loss: folders of runs; rows: the data, as in train.py")
    parser.add_argument("--tokenizer", help="rows: its folder (default: the one trained on the data)")
    parser.add_argument("--T", type=int, default=8192, help="rows: tokens in a row (default 8192)")
    parser.add_argument("--out", help="the picture (default: WHAT.svg)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        if flags.what == "rows":
            data_dir = find_data(*flags.inputs)
            tokenizer, _ = find_tokenizer(flags.tokenizer, [data_dir], 32768)
            picture = rows_picture(tokenizer, data_dir, flags.T)
        else:
            picture = loss_picture(flags.inputs) if flags.what == "loss" else documents_picture(*flags.inputs)
        picture.savefig(flags.out or f"{flags.what}.svg")

if __name__ == "__main__":
    main()
