"""
Look at the packings and measure them, on the data at hand.

    python -m dev.bench compare    what each packing drops and cuts, and how long documents wait
    python -m dev.bench bench      tokens per second, from text and from tokens
    python -m dev.bench audit      which documents are in the rows of a run's steps

The trade-off: the benchmark takes a quarter of a minute per line, since each line takes turns with its
yardstick. So the shares hold on a busy machine, too; the tokens per second do not.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from dataloader import PACKINGS, Encoder, PackedLoader, Ref, Source, trace
from dataset import Parser, column_views, cores, errors_in_one_line, list_shards
from dev.prepare import add_folder, at_least_1, counted, folder_of, row_groups_of, tokenize
from tokenizer import RustBPETokenizer, find_tokenizer, get_tokenizer
from train import load_checkpoint, peak_memory, sources_of

# ---------------------------------------------------------------------------------------------------------
# Compare: what each packing drops and cuts, and how long documents wait

COMPARED = 4096    # rows: the shares and the wait depend on how many


def compare(tokenizer, data_dir, T):
    """Lines of a table."""
    yield f"of the first {COMPARED:,} rows of one lane"
    yield f"{'packing':<12}{'dropped':>9}{'fit but cut':>13}{'longest wait':>14}"
    for packing in PACKINGS:
        with PackedLoader(tokenizer, 1, T, "train", data_dir=data_dir, num_lanes=1,
                          packing=packing) as loader:
            wait = longest_wait(loader, COMPARED)
            dropped, cut = shares(loader)
        yield f"{packing:<12}{dropped:>9.1%}{cut:>13.2%}{counted(wait, 'row'):>14}"


def shares(loader):
    """(dropped tokens, of those that left the buffer; documents that fit a row and yet were cut, of all)"""
    stats = loader.stats()
    return stats["dropped"] / (stats["dropped"] + stats["rows"] * loader.T), stats["cut"] / stats["documents"]


def longest_wait(loader, n_rows):
    """Most rows delivered while a complete document stayed in the buffer; of one lane, with B = 1."""
    waits, longest = {}, 0
    for _ in itertools.islice(loader, n_rows):
        ((state,),) = (lane.values() for lane in loader.position.lanes.values())
        waits = {ref: waits.get(ref, 0) + 1 for ref in state.buffered if ref.token == 0}
        longest = max(longest, *waits.values(), 0)
    return longest


# ---------------------------------------------------------------------------------------------------------
# Bench: each line in a fresh process, in turns with its yardstick
#
# Text is measured against the encoding threads alone, whose tokens are thrown away; tokens on disk against
# nanoGPT's way: a memmap of the same ids, cast to two int64 tensors.

class Job(NamedTuple):
    """One line of the table."""
    tokenizer: str    # its folder
    ids: str          # file of all train tokens, for the memmap
    B: int
    T: int
    seconds: float    # of a turn; there are three
    data: str = ""    # folder of text or token shards
    kind: str = "text"
    packing: str = ""
    engine: str = "-"
    threads: int = 1


def bench(tokenizer_dir, data_dir, B, T, seconds=2.0):
    """Lines of a table."""
    yield f"B = {B}, T = {T}, {cores()} cores; share of: the encoding threads alone (text), a memmap (tokens)"
    yield (f"{'from':<8}{'packing':<12}{'engine':<10}{'threads':>8}{'M tokens/s':>12}{'share':>8}"
           f"{'first batch':>13}{'resume':>9}{'memory':>10}")
    with tempfile.TemporaryDirectory() as work:
        tokens, ids = f"{work}/tokens", f"{work}/ids"
        with contextlib.redirect_stderr(io.StringIO()):
            tokenize(data_dir, tokens, tokenizer_dir)
        write_ids(tokens, ids)
        for job in all_jobs(Job(tokenizer_dir, ids, B, T, seconds), data_dir, tokens):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                yield process.submit(measure, job).result()


def all_jobs(job, text, tokens):
    engines = ["tiktoken", *(["gigatoken"] if importlib.util.find_spec("gigatoken") else [])]
    for kind, data, engine in [*(("text", text, engine) for engine in engines), ("tokens", tokens, "-")]:
        for packing, threads in itertools.product(PACKINGS, sorted({1, cores()})):
            yield job._replace(data=data, kind=kind, packing=packing, engine=engine, threads=threads)


def measure(job):
    """One line of the table. One thread means one core as well."""
    if job.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if job.kind == "text":
        os.environ["NANOLOADER_ENGINE"] = job.engine
    before = peak_memory("cpu")
    loader, mine = make_loader(job)
    first, _ = timed(lambda: next(loader))
    tokens = tokens_of(loader)
    for _ in range(64 * loader.num_lanes // job.B):    # buffers grow with the first 64 rows of a lane
        next(tokens)
    memory = (peak_memory("cpu") - before) / (1 << 20)
    yardstick, theirs = encoded(job) if job.kind == "text" else (memmap(job), threading.Event())
    turns = (tokens, mine, theirs), (yardstick, theirs, mine)
    pairs = [[speed_in_turn(*turn, job.seconds) for turn in turns] for _ in range(3)]
    speed, best = np.median(pairs, axis=0)
    mine.set(), theirs.set()    # threads that wait would never end
    state = loader.state_dict()
    loader.close()
    again, _ = make_loader(job)
    resume, _ = timed(lambda: (again.load_state_dict(state), next(again)))
    again.close()
    return (f"{job.kind:<8}{job.packing:<12}{job.engine:<10}{job.threads:>8}{speed / 1e6:>12.2f}"
            f"{speed / best:>8.2f}{first:>11.2f} s{resume:>7.2f} s{memory:>7.0f} MB")


def make_loader(job):
    """(PackedLoader, the event while which it may encode)"""
    loader = PackedLoader(get_tokenizer(job.tokenizer), job.B, job.T, "train", data_dir=job.data,
                          packing=job.packing, threads=job.threads)
    return loader, gate(loader.tokenizer)


def encoded(job):
    """(numbers of tokens that the encoding threads make, the event while which they may)"""
    source = Source("text", list_shards(job.data, "train"), num_lanes=1)
    encoder = Encoder(get_tokenizer(job.tokenizer), job.threads)
    return (len(ids) for ids, _ in encoder.documents(source, 0, Ref())), gate(encoder.tokenizer)


def gate(tokenizer):
    """An event that the tokenizer waits for: threads that encode ahead must not use the other's turn."""
    may_encode, encode = threading.Event(), tokenizer.encode
    may_encode.set()

    def encode_in_turn(*args, **kwargs):
        may_encode.wait()
        return encode(*args, **kwargs)

    tokenizer.encode = encode_in_turn
    return may_encode


def speed_in_turn(counts, mine, theirs, seconds):
    mine.set(), theirs.clear()
    return speed_of(counts, seconds)


def speed_of(counts, seconds):
    """Tokens per second, from an iterator of numbers of tokens. What is ready at the start does not count."""
    for duration in (min(0.3, seconds), seconds):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < duration:
            tokens += next(counts)
    return tokens / (time.perf_counter() - began)


def tokens_of(batches):
    return (inputs.numel() for inputs, _ in batches)


def timed(action):
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def memmap(job):
    """Numbers of tokens in batches from a file of all ids, from front to back."""
    ids, n = np.memmap(job.ids, get_tokenizer(job.tokenizer).dtype, "r"), job.B * job.T
    for i in itertools.cycle(range(0, len(ids) - n, n)):
        for part in (ids[i:i + n], ids[i + 1:i + 1 + n]):
            torch.from_numpy(part.astype(np.int64)).view(job.B, job.T)
        yield n


def write_ids(tokens, path):
    with open(path, "wb") as file:
        for shard, row_group in row_groups_of(list_shards(tokens, "train")):
            data, offsets, _ = column_views(shard.read(row_group))
            file.write(data[offsets[0]:offsets[-1]])


# ---------------------------------------------------------------------------------------------------------
# Audit: the documents in the rows of a run's steps

def audit(path, steps=None, as_json=False):
    """
    Lines for each row of steps A to B-1 (default: the next one) of the run of a checkpoint of train.py: the
    whole batch of all ranks; of W ranks, row i is that of rank i % W. Steps before the checkpoint are found
    from the beginning of the run, which takes as long as packing them again.
    """
    saved = load_checkpoint(path)
    run, tokenizer = argparse.Namespace(**saved["flags"]), RustBPETokenizer.from_dict(saved["tokenizer"])
    first, stop = steps or (saved["step"], saved["step"] + 1)
    start = saved["step"] if first >= saved["step"] else 0
    if (changed := saved["constant_since"]) and not start:
        raise ValueError(f"the run changed its flags at step {changed}: {path} cannot name rows before step "
                         f"{saved['step']}; pass a checkpoint of step {first} or before")
    with PackedLoader(tokenizer, run.batch_size, run.seq_len, "train", rank=0, world_size=1,
                      packing=run.packing, data_dir=sources_of(run), num_lanes=run.num_lanes,
                      shuffle_seed=run.seed if run.shuffle else None) as loader:
        state = json.loads(saved["loader"]) if start else None
        shards = {shard.path: shard for source in loader.sources.values() for shard in source.shards}
        for step, rows in zip(range(start, stop), trace(loader, state), strict=False):
            for i, pieces in enumerate(rows if step >= first else ()):
                found = [describe_piece(piece, shards, tokenizer) for piece in pieces]
                yield from lines_of_row(step, i, found, as_json)


def describe_piece(piece, shards, tokenizer):
    (path, row_group, row), ref = piece.location, piece.ref
    document = read_row_group(shards[path], row_group)[row].as_py()
    if shards[path].kind == "tokens":
        document = tokenizer.decode(np.frombuffer(document, shards[path].dtype)[1:101].tolist())
    return {"path": path, "row_group": row_group, "row": row, "epoch": ref.epoch,
            "from": piece.start, "to": piece.stop, "text": document[:60]}


@functools.lru_cache(maxsize=16)
def read_row_group(shard, row_group):
    return shard.read(row_group)


def lines_of_row(step, number, found, as_json):
    if as_json:
        yield json.dumps({"step": step, "row": number, "documents": found})
        return
    yield f"step {step}, row {number}"
    again = ""
    for piece, following in zip(found, [*found[1:], None], strict=True):
        if following and is_repeated_bos(piece, following):
            again = ", after its BOS again"
            continue
        yield ("  {path}, row group {row_group}, row {row}, epoch {epoch}, ".format(**piece)
               + f"tokens {piece['from']:,}-{piece['to'] - 1:,}{again}: {piece['text']!r}")
        again = ""


def is_repeated_bos(piece, following):
    """Whether this piece is the BOS that opens a later piece of a document."""
    same = all(piece[key] == following[key] for key in ("path", "row_group", "row", "epoch"))
    return same and piece["to"] == 1 and following["from"] > 1


# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        for line in lines_of(flags):
            print(line, flush=True)


def make_parser():
    parser = Parser("python -m dev.bench", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("compare", "what each packing drops and cuts, and how long documents wait"),
                       ("bench", "tokens per second, from text and from tokens")):
        command = commands.add_parser(name, help=text, description=text)
        add_folder(command)
        command.add_argument("--tokenizer", help="its folder (default: the one trained on the data)")
        command.add_argument("--T", type=at_least_1, default=2048, help="tokens in a row (default 2048)")
        if name == "bench":
            command.add_argument("--B", type=at_least_1, default=32, help="rows in a batch (default 32)")
    command = commands.add_parser("audit", help="which documents are in the rows of a run's steps",
                                  description=audit.__doc__)
    command.add_argument("--resume", required=True, metavar="FILE", help="a checkpoint of the run")
    command.add_argument("--steps", type=parse_steps, metavar="A:B", help="default: the one after FILE")
    command.add_argument("--json", action="store_true", help="a row per line, for programs")
    return parser


def parse_steps(text):
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text}: expected A:B with 0 <= A < B")
    return int(first), int(stop)


def lines_of(flags):
    if flags.command == "audit":
        return audit(flags.resume, flags.steps, flags.json)
    data_dir = folder_of(flags)
    tokenizer, where = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    print(f"data: {data_dir}; tokenizer: {where}", file=sys.stderr)
    if flags.command == "compare":
        return compare(tokenizer, data_dir, flags.T)
    return bench(where, data_dir, flags.B, flags.T)


if __name__ == "__main__":
    main()
