"""
Which documents a run of train.py saw, when, and how hard they were for the model.

    python -m dev.runs audit --resume FILE --steps 600:602    the documents in these steps' rows
    python -m dev.runs when RUN shard_00000.parquet:0         the steps that have row 0 of this file
    python -m dev.runs losses RUN                             the easiest and the hardest documents

RUN is the folder of a run; FILE is a checkpoint in it. `losses` needs a run with --ledger. The
trade-off: steps that are in no ledger are packed again, every row of them, as fast as the loader
can. `audit` packs from the beginning of the run if a step is before FILE. `when` packs the steps to
come, and past steps that the ledger lacks.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.runs, run in the folder of dataloader.py")

import argparse
import functools
import json
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataloader import PackedLoader
from dataset import Location, Parser, UserError, errors_in_one_line, expand_home
from dev.convert import at_least_1
from dev.ledger import list_ledger
from tokenizer import RustBPETokenizer
from train import load_checkpoint, newest_checkpoint, sources_of

# --------------------------------------------------------------------------------------------------
# A run, from its newest checkpoint

def newest_of(run):
    return load_checkpoint(newest_checkpoint(run) or run)

def flags_of(saved):
    return argparse.Namespace(**saved["flags"])

def loader_of(saved, begins=False):
    """A loader for a checkpoint's run, at the checkpoint or at the beginning of the run."""
    changed = saved["constant_since"]
    if begins and changed:
        raise UserError(f"the run changed its flags at step {changed}: a checkpoint of step "
                        f"{saved['step']} cannot name rows before it; pass one of step {changed} "
                        "or before")
    flags, state = flags_of(saved), json.loads(saved["loader"])
    config = state["config"]
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    loader = PackedLoader(
        tokenizer, flags.batch_size, state["T"], "train", packing=state["packing"],
        data_dir=sources_of(flags), rank=0, world_size=1, num_lanes=config["num_lanes"],
        chunk_bytes=config["chunk_bytes"], shuffle_seed=config["shuffle_seed"])
    if not begins:
        loader.load_state_dict(state)
    return loader

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

def pack_again(saved, loader, first, stop):
    """Yield (step, g, its pieces as Seen) of each row of steps `first` to `stop` - 1."""
    begin = saved["step"] if loader.rows_delivered else 0
    if begin < stop:
        print(f"packing steps {begin:,} to {stop - 1:,}", file=sys.stderr)
    for step in range(begin, stop):
        next(loader)
        if step >= first:
            for g, pieces in zip(loader.row_numbers, loader.pieces(), strict=True):
                yield step, g, [Seen(step, g, *piece[:4]) for piece in pieces]

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
    saved = load_checkpoint(path)
    first, stop = steps or (saved["step"], saved["step"] + 1)
    with loader_of(saved, begins=first < saved["step"]) as loader:
        for step, g, seen in pack_again(saved, loader, first, stop):
            yield f"step {step}, row {g} of the run"
            for piece in without_bos_again(seen):
                yield f"  {describe(piece, loader)}"

def describe(piece, loader):
    return (f"{piece.location}, epoch {piece.epoch}, tokens {piece.start:,}-{piece.stop - 1:,}: "
            f"{beginning_of(piece.location, loader)!r}")

# --------------------------------------------------------------------------------------------------
# The ledger: what train.py --ledger wrote

def read_ledger(run, sources=None):
    """Its records (see dev/ledger.py) for these sources, or for all, in the order of the run."""
    files = list_ledger(run)
    if not files:
        return pa.schema({"step": pa.int64(), "path": pa.string()}).empty_table()
    ledger = pq.read_table(files).sort_by("g")
    if sources is None:
        return ledger
    known = [shard.path for source in sources.values() for shard in source.shards]
    others = {*ledger["path"].unique().to_pylist()} - {*known}
    if others:
        print(f"left out: {len(others)} files that the run no longer has (moved?), such as "
              f"{min(others)}")
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
        raise UserError("which document? Name it by FILE:ROW or FILE:GROUP:ROW, or pass --text "
                        "WORDS; such as: python -m dev.runs when RUN shard_00000.parquet:0")
    saved = newest_of(run)
    now, n_steps = saved["step"], flags_of(saved).steps
    with loader_of(saved) as loader:
        wanted = {*find_documents(loader, name, text)}
        if not wanted:
            raise UserError(f"no {name or repr(text)} in the run's training data; expected "
                            "FILE[:GROUP]:ROW or --text WORDS")
        ledger = read_ledger(run, loader.sources)
        is_complete = {*range(now)} <= {*ledger["step"].unique().to_pylist()}
        seen = {*seen_in(ledger, wanted), *replay(saved, not is_complete, wanted)}
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

def replay(saved, begins, wanted):
    """Yield each piece of these documents, from the checkpoint or the beginning to the end."""
    with loader_of(saved, begins) as loader:
        first = 0 if begins else saved["step"]
        for _, _, seen in pack_again(saved, loader, first, flags_of(saved).steps):
            yield from (piece for piece in seen if piece.location in wanted)

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
