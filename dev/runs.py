"""
Which documents a run of train.py saw, when, and how hard they were for the model; its curves.

    python -m dev.runs audit --resume FILE --steps 600:602    the documents in these steps' rows
    python -m dev.runs when RUN shard_00000.parquet:0         the steps that have row 0 of this file
    python -m dev.runs losses RUN                             the easiest and the hardest documents
    python -m dev.runs plot RUN [RUN ...]                     loss, rates, speed: plot.png

RUN is the folder of a run; FILE is a checkpoint in it. `losses` needs a run with --ledger. The
trade-off: steps that are in no ledger are packed again, every row of them, as fast as the loader
can. `audit` packs from the beginning of the run if a step is before FILE. `when` packs the steps to
come, and past steps that the ledger lacks. RUN/log.jsonl says with which flags each part of the run
was started, and has a hash of the rows of each step: other rows are an error.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.runs, run in the folder of dataloader.py")

import argparse
import functools
import itertools
import json
import os
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataloader import PackedLoader
from dataset import (
    Location,
    Parser,
    UserError,
    atomic_file,
    errors_in_one_line,
    expand_home,
)
from dev.convert import at_least_1
from tokenizer import RustBPETokenizer
from train import (
    RANK,
    list_own,
    load_checkpoint,
    newest_checkpoint,
    read_log,
    sources_of,
    sum_counts,
)

# --------------------------------------------------------------------------------------------------
# A run, from its newest checkpoint

def newest_of(run):
    return load_checkpoint(newest_checkpoint(run) or run)

def flags_of(saved):
    return argparse.Namespace(**saved["flags"])

def loader_of(saved, flags=None):
    """A loader for a checkpoint's run, at its beginning. flags: of a part of the run (see parts)"""
    flags = flags or flags_of(saved)
    config = json.loads(saved["loader"])["config"]
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    return PackedLoader(
        tokenizer, flags.batch_size, flags.seq_len, "train", packing=flags.packing,
        data_dir=sources_of(flags), rank=0, world_size=1, num_lanes=config["num_lanes"],
        chunk_bytes=config["chunk_bytes"], shuffle_seed=config["shuffle_seed"])

def shards_of(loader):
    return [shard for source in loader.sources.values() for shard in source.shards]

@functools.lru_cache(maxsize=16)
def read_row_group(shard, row_group):
    return shard.read(row_group)

def text_of(shard, row_group, row, loader):
    document = read_row_group(shard, row_group)[row].as_py()
    if shard.kind != "tokens":
        return document or ""
    ids = np.frombuffer(document or b"", shard.dtype).astype(int)
    tokens = np.maximum(ids, ~ids)    # ~t is token t, masked
    return loader.encoder.tokenizer.decode(tokens[1:].tolist())

def beginning_of(location, loader):
    for shard in shards_of(loader):
        if shard.path == location.path:
            return text_of(shard, location.row_group, location.row, loader)[:60]

class Seen(NamedTuple):
    """A piece of a document in a row."""
    step: int
    g: int    # the row of the run
    location: Location
    epoch: int
    start: int
    stop: int

def pack_again(run, saved, begins, first, stop):
    """
    Yield (step, g, its pieces as Seen) of each row of steps `first` to `stop` - 1, packed from the
    checkpoint or from the beginning of the run.
    """
    log = [*read_log(f"{run}/log.jsonl")]
    hashes = {-1: 0, saved["step"] - 1: saved["rows_hash"]}    # of all rows up to a step
    for record in log:
        if "rows_hash" in record:
            hashes[record["step"]] = int(record["rows_hash"], 16)
    begin = 0 if begins else saved["step"]
    state = None if begins else json.loads(saved["loader"])
    if begin < stop:
        print(f"packing steps {begin:,} to {stop - 1:,}", file=sys.stderr)
    for start, end, flags in parts(run, log, begin, stop):
        with loader_of(saved, flags) as loader:
            if state:
                loader.load_state_dict(state)
            for step in range(start, end):
                check_rows(run, step, next(loader), loader, hashes)
                rows = zip(loader.row_numbers, loader.pieces(), strict=True)
                for g, pieces in rows if step >= first else ():
                    yield step, g, [Seen(step, g, *piece[:4]) for piece in pieces]
            state = loader.state_dict()

def parts(run, log, begin, stop):
    """Yield (first step, one after the last, flags) of steps that one command made."""
    headers = [record for record in log if "flags" in record]    # one for each start of the run
    starts = [header["step"] for header in headers if begin < header["step"] < stop]
    for start, end in itertools.pairwise([begin, *starts, stop]):
        known = [header for header in headers if header["step"] <= start]
        if not known:
            raise UserError(f"{run}/log.jsonl does not tell the flags of step {start}, so its rows "
                            "cannot be named; pass a run's folder, or a checkpoint in it, with "
                            "its log")
        yield start, end, argparse.Namespace(**known[-1]["flags"])

def check_rows(run, step, batch, loader, hashes):
    """UserError unless this batch has the hash that the log has. (A step to come has none yet.)"""
    _, of_step = sum_counts(*batch, loader.row_numbers)
    before, after = hashes.get(step - 1), hashes.get(step)
    if None not in (before, after) and (before + of_step) % 2**64 != after:
        raise UserError(f"step {step}: the rows that were packed again are not those of "
                        f"{run}/log.jsonl, so its documents cannot be named; the data or the code "
                        "has changed since")

def without_bos_again(pieces):
    """Leave out a BOS that is repeated before a later piece of its document."""
    continued = {piece[:3] for piece in pieces if piece.start > 0}    # step, g, location
    return [piece for piece in pieces if piece.stop > 1 or piece[:3] not in continued]

# --------------------------------------------------------------------------------------------------
# audit: the documents in the rows of a run's steps

def audit(path, steps=None):
    """
    Yield lines for each row of steps A to B-1 (default: the next step) of a checkpoint's run, for
    all ranks: rank g % W of W delivers row g. For steps before the checkpoint, the run is packed
    again from its beginning.
    """
    saved, run = load_checkpoint(path), os.path.dirname(path) or "."
    first, stop = steps or (saved["step"], saved["step"] + 1)
    with loader_of(saved) as loader:
        for step, g, seen in pack_again(run, saved, first < saved["step"], first, stop):
            yield f"step {step}, row {g} of the run"
            for piece in without_bos_again(seen):
                yield f"  {describe(piece, loader)}"

def describe(piece, loader):
    return (f"{piece.location}, epoch {piece.epoch}, tokens {piece.start:,}-{piece.stop - 1:,}: "
            f"{beginning_of(piece.location, loader)!r}")

# --------------------------------------------------------------------------------------------------
# The ledger: what train.py --ledger wrote

def read_ledger(run, sources=None):
    """Its records (by train.losses_of_pieces) of these sources, or of all, in the order of rows."""
    files = list_own(f"{run}/_ledger", RANK)
    if not files:
        return pa.schema({"step": pa.int64(), "path": pa.string()}).empty_table()
    ledger = pq.read_table(files).sort_by("g")
    if sources is None:
        return ledger
    known = [shard.path for source in sources.values() for shard in source.shards]
    others = {*ledger["path"].unique().to_pylist()} - {*known}
    if others:
        print(f"left out: {len(others)} files that the run no longer has (were they moved?); the "
              f"first is {min(others)}")
    return ledger.filter(pc.field("path").isin(known))

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
    usual: np.ndarray    # bits per byte in every 50 steps
    documents: list      # a Difficulty each, the easiest first

def losses_of(run, sources):
    """Yield the SourceLosses of each source. Documents of fewer than 200 bytes say little."""
    ledger = read_ledger(run, sources)
    if not len(ledger):
        raise UserError(f"{run} has no ledger; train.py writes one with --ledger")
    for name, source in sources.items():
        names = {shard.path: shard.name for shard in source.shards}
        rows = ledger.filter(pc.field("path").isin([*names]))
        period = rows["step"].to_numpy() // 50
        bits = rows["nats"].to_numpy() / np.log(2)
        n_bytes = rows["bytes"].to_numpy()
        bits_of_period = np.bincount(period, bits, minlength=1)
        bytes_of_period = np.bincount(period, n_bytes, minlength=1)
        usual = bits_of_period / np.maximum(1, bytes_of_period)
        above = bits - usual[period] * n_bytes
        rows = rows.append_column("bits", [bits]).append_column("above", [above])
        totals = rows.group_by(["path", "row_group", "row"])
        totals = totals.aggregate([("above", "sum"), ("bits", "sum"), ("bytes", "sum")])
        documents = []
        for row in totals.to_pylist():
            n = row["bytes_sum"]
            if n >= 200:
                above, bits = row["above_sum"] / n, row["bits_sum"] / n
                path = row["path"]
                location = Location(path, row["row_group"], row["row"], names[path])
                documents.append(Difficulty(above, bits, n, location))
        n_tokens = sum(rows["tokens"].to_pylist())
        yield SourceLosses(name, n_tokens, usual, sorted(documents))

def losses(run, n=10):
    """
    Yield lines: the tokens of each source and how its loss fell, then its n easiest and n hardest
    documents of 200 bytes or more.
    """
    with loader_of(newest_of(run)) as loader:
        for name, n_tokens, usual, documents in losses_of(run, loader.sources):
            began = next((bits for bits in usual if bits), 0)
            yield (f"{name}: {n_tokens:,} tokens, {began:.3f} bits per byte in the first 50 steps, "
                   f"{usual[-1]:.3f} in the last; documents: {len(documents):,}")
            yield ("   above  bits per byte      bytes    (above: more bits per byte than the same "
                   "50 steps)")
            both_ends = {*documents[:n], *documents[-n:]}
            for above, bits, n_bytes, location in sorted(both_ends):
                text = beginning_of(location, loader)
                yield f"{above:>+8.3f}{bits:>15.3f}{n_bytes:>11,}    {location}: {text!r}"

# --------------------------------------------------------------------------------------------------
# when: the steps that have a document

def when(run, name=None, text=None):
    """
    Yield lines: the rows of a run that have a document, past and to come. Past rows are in the
    ledger. Without a ledger they are packed again, like the rows to come.
    """
    if not (name or text):
        raise UserError("which document? Pass FILE:ROW or FILE:GROUP:ROW, or --text WORDS. For "
                        "example: python -m dev.runs when RUN shard_00000.parquet:0")
    saved = newest_of(run)
    headers = [record for record in read_log(f"{run}/log.jsonl") if "flags" in record]
    n_steps = headers[-1]["flags"]["steps"] if headers else flags_of(saved).steps
    now = saved["step"]
    with loader_of(saved) as loader:
        wanted = {*find_documents(loader, name, text)}
        if not wanted:
            raise UserError(f"no {name or repr(text)} in the run's training data; expected "
                            "FILE[:GROUP]:ROW or --text WORDS")
        ledger = read_ledger(run, loader.sources)
        is_complete = {*range(now)} <= {*ledger["step"].unique().to_pylist()}
        seen = {*seen_in(ledger, wanted), *replay(run, saved, not is_complete, n_steps, wanted)}
        seen = sorted(without_bos_again(seen))
        for piece in seen:
            to_come = "to come: " if piece.step >= now else ""
            yield f"{to_come}step {piece.step}, row {piece.g} of the run: {describe(piece, loader)}"
        missing = sorted(wanted - {piece.location for piece in seen})
        for location in missing[:10]:
            text = beginning_of(location, loader)
            yield f"in none of the run's {n_steps:,} steps: {location}: {text!r}"
    yield (f"pieces: {len(seen):,}; documents: {len(wanted):,}; in none of the run's {n_steps:,} "
           f"steps, of which {now:,} are done: {len(missing):,}")

def find_documents(loader, name, text):
    """Yield the Location of FILE[:GROUP]:ROW in each folder that has it, or of all with a text."""
    for shard in shards_of(loader):
        number = 0    # of the document in the file
        for row_group, n in enumerate(shard.group_sizes):
            for row in range(n):
                names = f"/{shard.path}:{number}", f"/{shard.path}:{row_group}:{row}"
                is_named = any(full.endswith(f"/{name}") for full in names)
                if is_named or (text and text in text_of(shard, row_group, row, loader)):
                    yield shard.location(row_group, row)
                number += 1

def seen_in(ledger, wanted):
    """Yield each piece of these documents in the ledger."""
    by_place = {location[:3]: location for location in wanted}    # path, row group, row
    paths = [*{location.path for location in wanted}]
    ledger = ledger.filter(pc.field("path").isin(paths))
    for row in ledger.to_pylist():
        location = by_place.get((row["path"], row["row_group"], row["row"]))
        if location:
            piece = row["epoch"], row["start"], row["stop"]
            yield Seen(row["step"], row["g"], location, *piece)

def replay(run, saved, begins, stop, wanted):
    """Yield each piece of these documents, from the checkpoint or the beginning to step `stop`."""
    for _, _, seen in pack_again(run, saved, begins, 0, stop):
        yield from (piece for piece in seen if piece.location in wanted)

# --------------------------------------------------------------------------------------------------
# plot: the curves of one or several runs

PANELS = {
    "loss": "loss: nats per target (triangle: resumed)",
    "val": "val: bits per byte",
    "rate": "learning rate of the matrices",
    "speed": "tokens per second",
    "wait": "waiting for data: share of the step"}

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
        figure.savefig(part, dpi=120, format="png")
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
        for line in flags.lines(flags):
            print(line, flush=True)

def make_parser():
    parser = Parser("python -m dev.runs", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example: python -m dev.runs losses runs/mine")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "audit", description=audit.__doc__,
        epilog="example: python -m dev.runs audit --resume runs/mine/step_0000800.pt")
    command.set_defaults(lines=lambda flags: audit(flags.resume, flags.steps))
    command.add_argument("--resume", required=True, type=expand_home, metavar="FILE",
                         help="a checkpoint of the run")
    command.add_argument("--steps", type=parse_steps, metavar="A:B", help="default: the next one")

    command = commands.add_parser(
        "losses", description=losses.__doc__, epilog="example: python -m dev.runs losses runs/mine")
    command.set_defaults(lines=lambda flags: losses(flags.run, flags.head))
    command.add_argument("run", type=expand_home, metavar="RUN",
                         help="the folder of a run with --ledger")
    command.add_argument("--head", type=at_least_1, default=10, metavar="N", help="default 10")

    command = commands.add_parser(
        "plot", description=plot.__doc__, epilog="example: python -m dev.runs plot runs/a runs/b")
    command.set_defaults(lines=lambda flags: plot(flags.runs, flags.out))
    command.add_argument("runs", nargs="+", type=expand_home, metavar="RUN", help="folders of runs")
    command.add_argument("--out", type=expand_home, default="plot.png", metavar="FILE",
                         help="the picture (default: plot.png)")

    command = commands.add_parser(
        "when", description=when.__doc__,
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
