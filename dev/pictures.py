"""
Draw how each packing fills its rows: README's dev/rows.svg. (README's other pictures, dev/line.svg
and dev/resume.svg, were drawn by hand.)

    pip install matplotlib
    python -m dev.pictures
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.pictures, typed where dataloader.py is")

import itertools

import matplotlib
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure

from dataloader import PACKINGS
from dataset import find_data
from dev.bench.measure import texts_of
from tokenizer import find_tokenizer

matplotlib.rcParams["svg.fonttype"] = "none"    # text as text, not as paths
matplotlib.rcParams["svg.hashsalt"] = "nanoloader"    # the same file each time

N_ROWS, T = 9, 8192
LEGEND = (
    "The same documents in each packing. Each bar is a row, and each color a document. A dark edge is\n"
    "a BOS token: a document begins there, or continues after a cut. A white triangle is a cut: the rest\n"
    "of the document is in another row or, with bestfit, dropped. The white at the end of a row is padding.")

def lengths_of_first_documents(tokenizer, data_dir, n_tokens):
    """The tokens, with BOS, of as many documents as have n_tokens together."""
    lengths = []
    for text in texts_of(data_dir):
        lengths.append(1 + len(tokenizer.encode(text)))
        if sum(lengths) >= n_tokens:
            break
    return lengths

def rows_picture(lengths, T):
    """All rows of a chunk that has documents of these lengths, for each packing."""
    figure = Figure((9, 1.6 * len(PACKINGS)), layout="constrained")
    figure.supxlabel(LEGEND, fontsize=9)
    rows_of = {packing: pack(lengths, T + 1) for packing, pack in PACKINGS.items()}
    most = max(map(len, rows_of.values()))
    panels = figure.subplots(len(PACKINGS))
    for panel, (packing, rows) in zip(panels, rows_of.items(), strict=True):
        panel.set(title=packing, xlim=(0, T + 1), ylim=(most - 0.5, -0.5))
        panel.set_axis_off()
        rows.sort(key=min)    # by first document, so that colors are in the same order
        for y, row in enumerate(rows):
            draw_row(panel, y, row, lengths, T)
    return figure

def draw_row(panel, y, row, lengths, T):
    """row: spans (document, start, stop)"""
    offset = 0
    for span, following in itertools.zip_longest(row, row[1:], fillvalue=(None, 0, 0)):
        d, start, stop = span
        panel.barh(y, stop - start, left=offset, color=color_of(d))
        if start == 0:
            panel.barh(y, T / 400, left=offset, color="#222", zorder=3)
        offset += stop - start
        if stop < lengths[d] and following[0] != d:
            panel.plot(offset - T / 300, y, "<", color="white", markersize=4, zorder=4)

def color_of(n):
    """Hues by the golden ratio: none comes twice, and neighbors are far apart."""
    hue, saturation = 0.618034 * n % 1, 0.4 + 0.2 * (n % 3)
    return tuple(hsv_to_rgb((hue, saturation, 0.9)))

def main():
    data_dir = find_data()
    tokenizer, _ = find_tokenizer(None, [data_dir], 32768)
    lengths = lengths_of_first_documents(tokenizer, data_dir, N_ROWS * T)
    rows_picture(lengths, T).savefig("dev/rows.svg", metadata={"Date": None})

if __name__ == "__main__":
    main()
