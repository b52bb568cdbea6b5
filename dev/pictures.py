"""
Pictures: what rows are made of, how fast they come, and what runs of train.py made of them.

    python -m dev.pictures rows                                    # dev/rows.svg
    python -m dev.bench bench > bench.txt
    python -m dev.pictures speed bench.txt                         # dev/speed.svg
    python -m dev.pictures loss runs/*                             # loss.svg, here: a line a run
"""

import argparse
import os
import re
from html import escape

from dataloader import PackedLoader, trace
from dataset import errors_in_one_line, find_data
from dev.bench import all_packings
from tokenizer import find_tokenizer
from train import read_log

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH, LEFT = 880, 24
COLOURS = ["#4e79a7", "#f28e2b", "#76b7b2", "#e15759", "#59a14f", "#edc948", "#b07aa1", "#9c755f"]
ABOUT = {"flat": "every token, in order; rows begin anywhere",
         "bestfit": "rows begin with a document; what lies beyond a row is lost",
         "exactfit drop": "documents that fit a row stay whole; the others lose their ends",
         "exactfit keep": "documents that fit a row stay whole; of the others, nothing is lost"}


# ---------------------------------------------------------------------------------------------------------
# Rows: a block a document, in one colour through all of its rows

def rows_picture(tokenizer, data_dir, T, n_rows=8):
    shapes, y = [], 40
    for name, packing in all_packings().items():
        colours = {}
        shapes += [text(LEFT, y, name, bold=True), text(LEFT + 110, y, ABOUT.get(name, ""))]
        y += 10
        for row in pieces_of(tokenizer, data_dir, T, n_rows, packing):
            shapes += draw_row(row, T + 1, y, colours)
            y += 17
        y += 34
    return svg(shapes, y - 20)


def pieces_of(tokenizer, data_dir, T, n_rows, packing):
    """The Pieces of rows from the middle of a run, each with the length of its document: from one lane."""
    lengths = {}

    def remember(ids, ref, place):
        lengths[place] = len(ids)
        return ids

    options = {"data_dir": data_dir, "num_lanes": 1, "transform": remember, **packing}
    with PackedLoader(tokenizer, 256 + n_rows, T, "train", **options) as loader:
        rows = next(trace(loader))[-n_rows:]
    return [[(piece, lengths[piece.place]) for piece in row] for row in rows]


def draw_row(row, n_tokens, y, colours):
    """A dark edge where a document begins, a white tooth where one is cut. colours: {document: number}."""
    scale, x, shapes = (WIDTH - 2 * LEFT) / n_tokens, LEFT, []
    for piece, length in row:
        width = (piece.stop - piece.start) * scale
        colour = COLOURS[colours.setdefault(piece.place, len(colours)) % len(COLOURS)]
        shapes.append(box(x, y, width, 14, colour))
        if piece.start == 0:
            shapes.append(box(x, y, min(2, width), 14, "#222"))
        x += width
        if 1 < piece.stop < length:    # 1: the BOS of a rest, which is a Piece of its own
            shapes.append(f'<path d="M{x:.1f} {y}l-5 3.5l5 3.5l-5 3.5l5 3.5z" fill="#fff"/>')
    return shapes


# ---------------------------------------------------------------------------------------------------------
# Speed: what the benchmark printed, as bars

LINE = re.compile(r"(text|tokens) +(\S.*?) +(tiktoken|gigatoken|-) +(\d+) +([\d.]+) ")


def speed_picture(lines):
    """Of each reader the line with the most threads; text and tokens have a scale each."""
    seen = {}
    for line in lines:
        if found := LINE.match(line):
            kind, reader, engine, threads, speed = found.groups()
            reader = reader if engine == "-" else f"{reader}, {engine}"
            seen.setdefault(kind, {})[reader] = float(speed), int(threads)
    shapes, y = [], 40
    for kind, title in (("text", "from text"), ("tokens", "from tokens on disk")):
        readers = seen.get(kind, {})
        fastest = max((speed for speed, _ in readers.values()), default=1)
        shapes.append(text(LEFT, y, f"{title}, M tokens/s", bold=True))
        for reader, (speed, threads) in readers.items():
            y += 21
            width = (WIDTH - 2 * LEFT - 360) * speed / fastest
            shapes += [text(LEFT, y + 11, reader), box(LEFT + 220, y, width, 15, COLOURS[kind == "tokens"]),
                       text(LEFT + 228 + width, y + 12, f"{speed:,.1f} by {threads} threads")]
        y += 52
    return svg(shapes, y - 28)


# ---------------------------------------------------------------------------------------------------------
# Loss: of several runs, from their log.jsonl

def loss_picture(folders):
    """A line a run. Of the first tenth, what is higher than all behind it lies at the upper edge."""
    curves, names = {}, {}
    for folder in folders:
        records = list(read_log(os.path.join(folder, "log.jsonl")))
        losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
        if not losses:
            raise ValueError(f"no losses in {folder}/log.jsonl; expected the folder of a run of train.py")
        curves[folder] = list(means(losses, max(1, len(losses) // 150)))
        bpb = [r["val_bpb"] for r in records if "val_bpb" in r]
        names[folder] = f"{folder}, val {bpb[-1]:.4f}" if bpb else folder
    last_step = max(points[-1][0] for points in curves.values())
    settled = [loss for points in curves.values() for _, loss in points[len(points) // 10:]]
    low, height = min(settled), max(settled) - min(settled)
    left, width = LEFT + 40, WIDTH - 2 * LEFT - 40
    shapes = [text(LEFT, 30, f"loss, nats a token; {last_step + 1:,} steps", bold=True)]
    for y in range(60, 361, 75):
        shapes += [text(LEFT, y + 4, f"{low + height * (360 - y) / 300:.2f}"), box(left, y, width, 1, "#ddd")]
    for i, (folder, points) in enumerate(curves.items()):
        colour, y = COLOURS[i % len(COLOURS)], 380 + 20 * i
        xs = [left + width * step / max(1, last_step) for step, _ in points]
        ys = [max(60, 360 - 300 * (loss - low) / (height or 1)) for _, loss in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        shapes += [f'<polyline points="{line}" fill="none" stroke="{colour}"/>',
                   box(left, y, 12, 12, colour), text(left + 20, y + 11, names[folder])]
    return svg(shapes, 390 + 20 * len(curves))


def means(points, n):
    """Of n consecutive (step, loss)."""
    for i in range(0, len(points), n):
        some = points[i:i + n]
        yield some[-1][0], sum(loss for _, loss in some) / len(some)


# ---------------------------------------------------------------------------------------------------------
# SVG

def box(x, y, width, height, colour):
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def text(x, y, words, bold=False):
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}"{weight}>{escape(words)}</text>'


def svg(shapes, height):
    """On white, for pages that are dark, too."""
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                      'font-family="sans-serif" font-size="13" fill="#222">',
                      box(0, 0, WIDTH, height, "#fff"), *shapes, "</svg>", ""])


# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m dev.pictures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    rows = commands.add_parser("rows", help="documents in rows of every packing")
    rows.set_defaults(draw=draw_rows, out=os.path.join(HERE, "rows.svg"))
    rows.add_argument("--data", help="folder or URI of text shards (default: what train.py takes)")
    rows.add_argument("--tokenizer", help="its folder (default: the one trained on the data)")
    rows.add_argument("--T", type=int, default=8192, help="tokens of a row (default 8192)")
    speed = commands.add_parser("speed", help="bars of what `python -m dev.bench bench` printed")
    speed.set_defaults(draw=draw_speed, out=os.path.join(HERE, "speed.svg"))
    speed.add_argument("file", help="where that was written to")
    loss = commands.add_parser("loss", help="the losses of runs")
    loss.set_defaults(draw=lambda flags: loss_picture(flags.runs), out="loss.svg")
    loss.add_argument("runs", nargs="+", help="their folders, as in runs/*")
    for command in (rows, speed, loss):
        command.add_argument("--out", help="the picture (default: beside this file; of losses, here)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        picture = flags.draw(flags)
        with open(flags.out, "w") as file:
            file.write(picture)
        print(flags.out)


def draw_rows(flags):
    data_dir = find_data(flags.data)
    tokenizer, _ = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    return rows_picture(tokenizer, data_dir, flags.T)


def draw_speed(flags):
    with open(flags.file) as file:
        return speed_picture(file)


if __name__ == "__main__":
    main()
