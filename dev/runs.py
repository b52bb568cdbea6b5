"""
Which documents a run of train.py saw, when, and how hard they were for the model; its curves.

    python -m dev.runs audit --resume FILE --steps 600:602    the documents in these steps' rows
    python -m dev.runs when RUN shard_00000.parquet:0         the steps that have row 0 of this file
    python -m dev.runs losses RUN                             the easiest and the hardest documents
    python -m dev.runs plot RUN [RUN ...]                     loss, rates, speed: plot.png

RUN is the folder of a run; FILE is a checkpoint in it. `losses` needs a run with --ledger. The
trade-off: a run stores no list of its documents. Its rows are packed again from its beginning, as
fast as the loader can. RUN/log.jsonl has the flags of each part of the run, and a hash of the rows
of each step. Rows with a different hash are an error. If the data has moved since, name it: --data.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.runs, run in the folder of dataloader.py")

import argparse
import collections
import functools
import itertools
import json
import math
import os
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dataloader import PackedLoader
from dataset import (
    Location,
    Parser,
    UserError,
    at_least,
    atomic_file,
    errors_in_one_line,
    expand_home,
    list_shards,
)
from tokenizer import RustBPETokenizer
from train import (
    load_checkpoint,
    newest_checkpoint,
    read_log,
    sources_of,
    sum_counts,
    targets_of,
)

# --------------------------------------------------------------------------------------------------
# A run

class Run(NamedTuple):
    """A run, by one of its checkpoints and its log."""
    folder: str
    saved: dict    # the checkpoint
    log: list      # records
    tokenizer: RustBPETokenizer

def open_run(path, data=None):
    """
    path: a checkpoint, or the folder of a run, of which it takes the newest checkpoint. data: what
    --data would be now, if the data has moved.
    """
    file = newest_checkpoint(path) or path
    if os.path.isdir(file):
        raise UserError(f"{file} has no checkpoint, which has the run's tokenizer; expected a "
                        "checkpoint, or the folder of a run that has saved one")
    folder = os.path.dirname(file) or "."
    saved = load_checkpoint(file)
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    log = [*read_log(f"{folder}/log.jsonl")]
    for record in log:
        if "flags" in record:
            cwd = record.get("cwd", "")    # older logs do not have it
            theirs = [absolute(spec, cwd) for spec in record["flags"]["data"]]
            record["flags"]["data"] = data or theirs
    return Run(folder, saved, log, tokenizer)

def absolute(spec, folder):
    """A PATH[:WEIGHT] of a run that was started in this folder (which may have moved)."""
    is_relative = "://" not in spec and os.path.isdir(folder)
    return os.path.join(folder, spec) if is_relative else spec

def parts(run, begin, stop):
    """Yield (first step, one after the last, flags) of steps that one command made."""
    headers = [record for record in run.log if "flags" in record]    # one for each start of the run
    starts = [header["step"] for header in headers if begin < header["step"] < stop]
    for start, end in itertools.pairwise([begin, *starts, stop]):
        known = [header for header in headers if header["step"] <= start]
        if not known:
            raise UserError(f"{run.folder}/log.jsonl does not have the flags of step {start}, so "
                            "its rows cannot be packed again; expected a checkpoint in the folder "
                            "of its run, beside the run's log.jsonl")
        yield start, end, argparse.Namespace(**known[-1]["flags"])

def loader_of(run, flags):
    """A loader for the part of the run that these flags made, at its beginning."""
    config = json.loads(run.saved["loader"])["config"]
    return PackedLoader(
        run.tokenizer, flags.batch_size, flags.seq_len, "train", packing=flags.packing,
        data_dir=sources_of(flags), rank=0, world_size=1, num_lanes=config["num_lanes"],
        chunk_bytes=config["chunk_bytes"], shuffle_seed=config["shuffle_seed"],
        skip_bad=flags.skip_bad)

def shards_of(run, begin, stop):
    """{path: Shard} of the data that steps `begin` to `stop` - 1 read. Sources may come and go."""
    shards = {}
    for _, _, flags in parts(run, begin, stop):
        for source in sources_of(flags):
            shards |= {shard.path: shard for shard in list_shards(source, "train")}
    return shards

@functools.lru_cache(maxsize=16)
def read_row_group(shard, row_group):
    return shard.read(row_group)

def text_of(shard, row_group, row, tokenizer):
    document = read_row_group(shard, row_group)[row].as_py()
    if shard.kind != "tokens":
        return document or ""
    ids = np.frombuffer(document or b"", shard.dtype).astype(int)
    tokens = np.maximum(ids, ~ids)    # ~t is token t, masked
    return tokenizer.decode(tokens[1:].tolist())

def beginning_of(location, shards, tokenizer):
    text = text_of(shards[location.path], location.row_group, location.row, tokenizer)
    return repr(text[:60])

class Packed(NamedTuple):
    """A row of the run, packed again."""
    step: int
    g: int
    source: str
    pieces: list           # Piece: which tokens of which documents
    targets: np.ndarray    # (T,); -100: masked

def pack_again(run, first, stop):
    """
    Yield each row of steps `first` to `stop` - 1 as Packed. The run is packed from the checkpoint
    on, or if `first` is before the checkpoint, from the beginning.
    """
    begin, state = run.saved["step"], json.loads(run.saved["loader"])
    hashes = {-1: 0, begin - 1: run.saved["rows_hash"]}    # of all rows up to a step
    for record in run.log:
        if "rows_hash" in record:
            hashes[record["step"]] = int(record["rows_hash"], 16)
    if first < begin:
        begin, state = 0, None
    if begin < stop:
        print(f"packing steps {begin:,} to {stop - 1:,}", file=sys.stderr)
    for start, end, flags in parts(run, begin, stop):
        with loader_of(run, flags) as loader:
            if state:
                loader.load_state_dict(state)
            for step in range(start, end):
                batch = next(loader)
                check_rows(run, step, batch, loader, hashes)
                if step >= first:
                    rows = zip(loader.row_numbers, loader.row_sources(), loader.pieces(),
                               batch[1].numpy(), strict=True)
                    for row in rows:
                        yield Packed(step, *row)
            state = loader.state_dict()

def check_rows(run, step, batch, loader, hashes):
    """UserError unless this batch has the hash that the log has. (A step to come has none yet.)"""
    _, of_step = sum_counts(*batch, loader.row_numbers)
    before, after = hashes.get(step - 1), hashes.get(step)
    if None not in (before, after) and (before + of_step) % 2**64 != after:
        raise UserError(f"step {step}: the rows that were packed again are not those of "
                        f"{run.folder}/log.jsonl, so its documents cannot be named; the data or "
                        "the code has changed since")

class Seen(NamedTuple):
    """A piece of a document in a row."""
    step: int
    g: int    # the row of the run
    location: Location
    epoch: int
    start: int
    stop: int

def seen_in(row):
    return [Seen(row.step, row.g, *piece[:4]) for piece in row.pieces]

def without_bos_again(pieces):
    """Leave out a BOS that is repeated before a later piece of its document."""
    continued = {piece[:3] for piece in pieces if piece.start > 0}    # step, g, location
    return [piece for piece in pieces if piece.stop > 1 or piece[:3] not in continued]

# --------------------------------------------------------------------------------------------------
# audit: the documents in the rows of a run's steps

def audit(run, steps=None):
    """
    Yield lines for each row of steps A to B-1 (default: the next step) of a checkpoint's run, for
    all ranks: rank g % W of W delivers row g. For steps before the checkpoint, the run is packed
    again from its beginning.
    """
    first, stop = steps or (run.saved["step"], run.saved["step"] + 1)
    shards = shards_of(run, first, stop)
    for row in pack_again(run, first, stop):
        yield f"step {row.step}, row {row.g} of the run"
        for piece in without_bos_again(seen_in(row)):
            yield f"  {describe(piece, shards, run.tokenizer)}"

def describe(piece, shards, tokenizer):
    return (f"{piece.location}, epoch {piece.epoch}, tokens {piece.start:,}-{piece.stop - 1:,}: "
            f"{beginning_of(piece.location, shards, tokenizer)}")

# --------------------------------------------------------------------------------------------------
# losses: which documents were hard, which were easy

class Difficulty(NamedTuple):
    """How hard a document was, in bits per byte."""
    above: float    # more than the mean of the same 50 steps
    bits: float
    n_bytes: int
    location: Location

class SourceLosses(NamedTuple):
    name: str
    n_tokens: int
    usual: list        # bits per byte in every 50 steps
    documents: list    # a Difficulty each, the easiest first

def read_nats(run):
    """{(step, row of the run): [nats of each of its pieces]}, as train.py --ledger logged them"""
    nats = {}
    for record in run.log:
        for of_rank in record.get("nats_of_pieces", ()):
            for g, of_row in of_rank.items():
                nats[record["step"], int(g)] = of_row
    if not nats:
        raise UserError(f"{run.folder}/log.jsonl has no losses of documents; train.py logs them "
                        "with --ledger")
    return nats

def read_ledger(folder):
    """A table of each piece that train.py --ledger logged, for an analysis of your own."""
    run = open_run(folder)
    nats = read_nats(run)
    (first, _), (last, _) = min(nats), max(nats)
    records = []
    for row in pack_again(run, first, last + 1):
        nats_of_row = nats.get((row.step, row.g), ())    # none: a step without --ledger
        for piece, of_piece in zip(row.pieces, nats_of_row, strict=False):
            record = {"step": row.step, "g": row.g, "epoch": piece.epoch, "start": piece.start,
                      "stop": piece.stop, "nats": of_piece}
            records.append({**piece.location._asdict(), **record})
    return pa.Table.from_pylist(records)

def sum_losses(run, nats):
    """{source: {number of 50 steps: {location: tokens, bytes and bits of a document in them}}}"""
    token_bytes = run.tokenizer.token_bytes
    (first, _), (last, _) = min(nats), max(nats)
    sums = {}
    for row in pack_again(run, first, last + 1):
        periods = sums.setdefault(row.source, {})
        documents = periods.setdefault(row.step // 50, collections.defaultdict(lambda: np.zeros(3)))
        nats_of_row = nats.get((row.step, row.g), ())    # none: a step without --ledger
        for piece, of_piece in zip(row.pieces, nats_of_row, strict=False):
            tokens = row.targets[targets_of(piece)]
            tokens = tokens[tokens >= 0]
            bits = of_piece / math.log(2)
            documents[piece.location] += (len(tokens), token_bytes[tokens].sum(), bits)
    return sums

def losses_of(run, nats):
    """Yield the SourceLosses of each source. Documents of fewer than 200 bytes say little."""
    for name, periods in sum_losses(run, nats).items():
        usual, totals = [], collections.defaultdict(lambda: np.zeros(4))
        for documents in periods.values():
            _, n_bytes, bits = sum(documents.values(), np.zeros(3))
            usual.append(bits / max(1, n_bytes))
            for location, (n_tokens, n_bytes, bits) in documents.items():
                above = bits - usual[-1] * n_bytes
                totals[location] += (n_tokens, n_bytes, bits, above)
        n_tokens = sum(total[0] for total in totals.values())
        found = []
        for location, (_, n_bytes, bits, above) in totals.items():
            if n_bytes >= 200:
                found.append(Difficulty(above / n_bytes, bits / n_bytes, int(n_bytes), location))
        yield SourceLosses(name, int(n_tokens), usual, sorted(found))

def losses(run, n=10):
    """
    Yield lines: the tokens of each source and how its loss fell, then its n easiest and n hardest
    documents of 200 bytes or more.
    """
    nats = read_nats(run)
    shards = shards_of(run, 0, 1 + max(nats)[0])
    for name, n_tokens, usual, documents in losses_of(run, nats):
        yield (f"{name}: {n_tokens:,} tokens, {usual[0]:.3f} bits per byte in the first 50 steps, "
               f"{usual[-1]:.3f} in the last; documents: {len(documents):,}")
        yield ("   above  bits per byte      bytes    (above: more bits per byte than the same 50 "
               "steps)")
        both_ends = {*documents[:n], *documents[-n:]}
        for above, bits, n_bytes, location in sorted(both_ends):
            text = beginning_of(location, shards, run.tokenizer)
            yield f"{above:>+8.3f}{bits:>15.3f}{n_bytes:>11,}    {location}: {text}"

# --------------------------------------------------------------------------------------------------
# when: the steps that have a document

def when(run, name=None, text=None):
    """
    Yield lines: the rows of a run that have a document, past and to come. All rows of the run are
    packed again.
    """
    if not (name or text):
        raise UserError("which document? Pass FILE:ROW or FILE:GROUP:ROW, or --text WORDS. For "
                        "example: python -m dev.runs when RUN shard_00000.parquet:0")
    headers = [record for record in run.log if "flags" in record]
    n_steps = [run.saved, *headers][-1]["flags"]["steps"]
    now = run.saved["step"]
    shards = shards_of(run, 0, n_steps)
    wanted = {*find_documents(shards, run.tokenizer, name, text)}
    if not wanted:
        raise UserError(f"no {name or repr(text)} in the run's training data; expected "
                        "FILE[:GROUP]:ROW or --text WORDS")
    seen = []
    for row in pack_again(run, 0, n_steps):
        seen += [piece for piece in seen_in(row) if piece.location in wanted]
    seen = sorted(without_bos_again(seen))
    for piece in seen:
        to_come = "to come: " if piece.step >= now else ""
        yield (f"{to_come}step {piece.step}, row {piece.g} of the run: "
               f"{describe(piece, shards, run.tokenizer)}")
    missing = sorted(wanted - {piece.location for piece in seen})
    for location in missing[:10]:
        text = beginning_of(location, shards, run.tokenizer)
        yield f"in none of the run's {n_steps:,} steps: {location}: {text}"
    yield (f"pieces: {len(seen):,}; documents: {len(wanted):,}; in none of the run's {n_steps:,} "
           f"steps, of which {now:,} are done: {len(missing):,}")

def find_documents(shards, tokenizer, name, text):
    """Yield the Location of FILE[:GROUP]:ROW in each folder that has it, or of all with a text."""
    for shard in shards.values():
        number = 0    # of the document in the file
        for row_group, n in enumerate(shard.group_sizes):
            for row in range(n):
                names = f"/{shard.path}:{number}", f"/{shard.path}:{row_group}:{row}"
                is_named = any(full.endswith(f"/{name}") for full in names)
                if is_named or (text and text in text_of(shard, row_group, row, tokenizer)):
                    yield shard.location(row_group, row)
                number += 1

# --------------------------------------------------------------------------------------------------
# plot: the curves of one or several runs

PANELS = {
    "loss": "loss: nats per target (triangle: resumed)",
    "val": "val: bits per byte",
    "rate": "learning rate of the matrices",
    "speed": "tokens per second",
    "wait": "rank 0 waits for data: share of the step"}

def plot(folders, out):
    """
    Draw the log of each run: loss, bits per byte of val, the rate of the matrices, tokens per
    second and the share of each step that waited for data. Thin lines are single steps, thick ones
    are means. A triangle is a resume.
    """
    try:
        from matplotlib.figure import Figure  # an optional package, and no window is opened
    except ImportError:
        raise UserError("plot needs matplotlib: pip install matplotlib") from None
    _, _, kind = out.rpartition(".")
    if kind not in ("png", "pdf", "svg"):
        raise UserError(f"expected a name that ends in .png, .pdf or .svg; saw {out}")
    figure = Figure((13, 7.5), layout="constrained")
    layout = [["loss", "loss", "val"], ["rate", "speed", "wait"]]
    panels = figure.subplot_mosaic(layout, sharex=True)
    for key, title in PANELS.items():
        panels[key].set_title(title, loc="left", fontsize=11)
        panels[key].grid(alpha=0.25)
        panels[key].tick_params(labelbottom=True)
        panels[key].spines[["top", "right"]].set_visible(False)
    for number, folder in enumerate(folders):
        draw_run(panels, [*read_log(f"{folder}/log.jsonl")], folder, f"C{number % 10}")
    panels["wait"].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    panels["speed"].yaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    for key in ("rate", "speed", "wait"):
        panels[key].set_xlabel("step")
        panels[key].set_ylim(bottom=0)
    figure.legend(*panels["loss"].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    with atomic_file(out) as part:
        figure.savefig(part, dpi=120, format=kind)
    yield f"{out}: {len(folders)} runs"

def draw_run(panels, log, name, color):
    steps = [record for record in log if "tokens_per_s" in record]
    if not steps:
        raise UserError(f"{name}/log.jsonl has no steps; name the folder of a run that has begun")
    x = [record["step"] for record in steps]
    losses = [record.get("loss", np.nan) for record in steps]    # without a target, no loss
    waits = [record["wait_ms"] / record["step_ms"] for record in steps]
    speeds = [record["tokens_per_s"] for record in steps]
    for key, values in (("loss", losses), ("wait", waits), ("speed", speeds)):
        panels[key].plot(x, values, color=color, alpha=0.25, linewidth=0.7)
        panels[key].plot(x, smooth(values), color=color, label=name)
    rates = [record["lr"] for record in steps]
    panels["rate"].plot(x, rates, color=color)
    evals = [record for record in log if "val_bpb" in record]
    steps_of_evals = [record["step"] for record in evals]
    bits = [record["val_bpb"] for record in evals]
    panels["val"].plot(steps_of_evals, bits, color=color, marker="o")
    resumes = [record["step"] for record in log if "flags" in record and record["step"] > 0]
    heights = np.interp(resumes, x, smooth(losses))
    panels["loss"].plot(resumes, heights, "^", color=color, markeredgecolor="white", markersize=9)

def smooth(values):
    """Means of the steps around each, about a fortieth of them."""
    values = np.array(values, float)
    window = np.ones(2 * (len(values) // 80) + 1)
    is_known = np.isfinite(values)
    sums = np.convolve(np.where(is_known, values, 0), window, "same")
    return sums / np.maximum(1, np.convolve(is_known, window, "same"))

# --------------------------------------------------------------------------------------------------
# The command line

def main(argv=None):
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        if flags.command != "plot":
            flags.run = open_run(flags.run, flags.data)
        for line in flags.lines(flags):
            print(line, flush=True)

def make_parser():
    parser = Parser("python -m dev.runs", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example: python -m dev.runs losses runs/mine")
    commands = parser.add_subparsers(dest="command", required=True)
    moved = argparse.ArgumentParser(add_help=False)
    moved.add_argument("--data", nargs="+", metavar="PATH[:WEIGHT]",
                       help="the data of the run, if it has moved since")

    command = commands.add_parser(
        "audit", parents=[moved], description=audit.__doc__,
        epilog="example: python -m dev.runs audit --resume runs/mine/step_0000800.pt")
    command.set_defaults(lines=lambda flags: audit(flags.run, flags.steps))
    command.add_argument("--resume", required=True, type=expand_home, metavar="FILE", dest="run",
                         help="a checkpoint of the run")
    command.add_argument("--steps", type=parse_steps, metavar="A:B", help="default: the next one")

    command = commands.add_parser(
        "losses", parents=[moved], description=losses.__doc__,
        epilog="example: python -m dev.runs losses runs/mine")
    command.set_defaults(lines=lambda flags: losses(flags.run, flags.head))
    command.add_argument("run", type=expand_home, metavar="RUN",
                         help="the folder of a run with --ledger")
    command.add_argument("--head", type=at_least(1), default=10, metavar="N", help="default 10")

    command = commands.add_parser(
        "plot", description=plot.__doc__, epilog="example: python -m dev.runs plot runs/a runs/b")
    command.set_defaults(lines=lambda flags: plot(flags.runs, flags.out))
    command.add_argument("runs", nargs="+", type=expand_home, metavar="RUN", help="folders of runs")
    command.add_argument("--out", type=expand_home, default="plot.png", metavar="FILE",
                         help="the picture, as PNG, PDF or SVG (default: plot.png)")

    command = commands.add_parser(
        "when", parents=[moved], description=when.__doc__,
        epilog="example: python -m dev.runs when runs/mine shard_00000.parquet:0")
    command.set_defaults(lines=lambda flags: when(flags.run, flags.document, flags.text))
    command.add_argument("run", type=expand_home, metavar="RUN", help="the folder of a run")
    command.add_argument("document", nargs="?", metavar="FILE[:GROUP]:ROW",
                         help="row of the file, or of a row group in it; the first is 0")
    command.add_argument("--text", help="words of the documents")
    return parser

def parse_steps(text):
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text}: expected A:B with 0 <= A < B")
    return int(first), int(stop)

if __name__ == "__main__":
    main()
