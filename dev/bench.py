"""
Look at the packings and measure them, on the data at hand.

    python -m dev.bench compare    what each packing drops, pads and cuts
    python -m dev.bench bench      tokens per second, from text and from tokens
    python -m dev.bench audit      which documents are in the rows of a run's steps
    python -m dev.bench losses     which documents the model of a run found hard or easy
    python -m dev.bench when       the steps of a run that have a document

The trade-off: the benchmark takes a quarter of a minute per line, since each line takes turns with its
yardstick. So the shares hold on a busy machine, too; the tokens per second do not.
"""

import argparse
import collections
import functools
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from dataloader import PACKINGS, PackedLoader, Place, flat
from dataset import Parser, column_views, cores, errors_in_one_line, list_shards
from dev.ledger import audit, losses, read_row_group, when
from dev.prepare import add_folder, at_least_1, counted, folder_of, in_order, row_groups_of, tokenize
from tokenizer import find_tokenizer, get_tokenizer
from train import peak_memory

# ---------------------------------------------------------------------------------------------------------
# Compare: what each packing drops, pads and cuts

def compare(tokenizer, data_dir, T):
    """Lines of a table."""
    with PackedLoader(tokenizer, 1, T, "train", data_dir=data_dir, num_lanes=1) as loader:
        chunks, n_tokens = [], 0
        for _, parts in deal_first_lane(loader):
            chunks.append(list(map(len, encode_chunk(loader, parts))))
            n_tokens += sum(chunks[-1])
            if n_tokens >= 4096 * (T + 1):
                break
    yield f"of the first {n_tokens:,} tokens, in {counted(len(chunks), 'chunk')} of one lane"
    yield f"{'packing':<12}{'dropped':>9}{'padding':>9}{'fit but cut':>13}"
    for packing, pack in PACKINGS.items():
        counts = sum((count_rows(pack, lengths, T + 1) for lengths in chunks), collections.Counter())
        dropped, padding = counts["dropped"] / n_tokens, counts["padding"] / (counts["rows"] * (T + 1))
        yield f"{packing:<12}{dropped:>9.2%}{padding:>9.2%}{counts['cut'] / counts['documents']:>13.2%}"

def deal_first_lane(loader):
    """The chunks of lane 0 of the only source, as (Place, [Part, ...]); endless."""
    [source] = loader.sources.values()
    return source.deal(0, Place())

def encode_chunk(loader, parts):
    """The ids of each of its documents, but empty ones."""
    return [ids for part in parts
            for ids in loader.encoder.encode(part, read_row_group(part.shard, part.row_group)) if len(ids)]

def count_rows(pack, lengths, R):
    """A Counter of a chunk's rows, padding, dropped tokens, documents, and those cut although they fit."""
    rows = list(pack(lengths, R))
    pieces = sorted(itertools.chain.from_iterable(rows))
    stops = {d: stop for d, _, stop in pieces}
    whole = {d for d, start, stop in pieces if stop - start == lengths[d]}
    cut = [d for d in stops.keys() - whole if lengths[d] <= R]
    n_tokens = sum(stop - start for _, start, stop in pieces)
    if pack is not flat:
        n_tokens += sum(start > 0 for _, start, _ in pieces)    # BOS again
    return collections.Counter(rows=len(rows), padding=len(rows) * R - n_tokens, documents=len(lengths),
                               dropped=sum(lengths) - sum(stops.values()), cut=len(cut))

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
    for _ in range(3):    # until all chunks are there that are made ahead
        next(tokens)
    memory = (peak_memory("cpu") - before) / (1 << 20)
    yardstick, theirs = encoded(job) if job.kind == "text" else (memmap(job), threading.Event())
    turns = (tokens, mine, theirs), (yardstick, theirs, mine)
    pairs = [[speed_of(*turn, job.seconds) for turn in turns] for _ in range(3)]
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
    loader, may_encode = make_loader(job)    # never started
    n_threads = 1 if loader.tokenizer.is_multithreaded else job.threads
    chunks = (parts for _, parts in deal_first_lane(loader))
    made = in_order(ThreadPoolExecutor(n_threads), lambda parts: sum(map(len, encode_chunk(loader, parts))),
                    chunks, 2 * n_threads)
    return (tokens for _, tokens in made), may_encode

def gate(tokenizer):
    """An event that the tokenizer waits for: threads that encode ahead must not use the other's turn."""
    may_encode, encode = threading.Event(), tokenizer.encode
    may_encode.set()

    def encode_in_turn(*args, **kwargs):
        may_encode.wait()
        return encode(*args, **kwargs)

    tokenizer.encode = encode_in_turn
    return may_encode

def speed_of(counts, mine, theirs, seconds):
    """Tokens per second, from an iterator of numbers of tokens. What is ready at the start does not count."""
    mine.set(), theirs.clear()
    for duration in (min(0.3, seconds), seconds):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < duration:
            tokens += next(counts)
    return tokens / (time.perf_counter() - began)

def tokens_of(loader):
    """Numbers of tokens from one chunk of lane 0 to the next: the lanes' chunks end at about the same row."""
    tokens, before = 0, None
    for inputs, _ in loader:
        tokens += inputs.numel()
        place = [stream.place for stream in loader.position.lanes[0].values()]
        if place != before:
            yield tokens
            tokens, before = 0, place

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
# The command line

def main(argv: list[str] | None = None) -> None:
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        for line in flags.lines(flags):
            print(line, flush=True)

def make_parser():
    parser = Parser("python -m dev.bench", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (("compare", compare, "what each packing drops, pads and cuts"),
                            ("bench", bench, "tokens per second, from text and from tokens")):
        command = commands.add_parser(name, description=text)
        command.set_defaults(lines=functools.partial(measured, run))
        add_folder(command)
        command.add_argument("--tokenizer", help="its folder (default: the one trained on the data)")
        command.add_argument("--T", type=at_least_1, default=2048, help="tokens in a row (default 2048)")
        command.add_argument("--B", type=at_least_1, default=32, help="rows in a batch of bench (default 32)")
    command = commands.add_parser("audit", description=audit.__doc__)
    command.set_defaults(lines=lambda flags: audit(flags.resume, flags.steps, flags.json))
    command.add_argument("--resume", required=True, metavar="FILE", help="a checkpoint of the run")
    command.add_argument("--steps", type=parse_steps, metavar="A:B", help="default: the one after FILE")
    command.add_argument("--json", action="store_true", help="a row per line, for programs")
    command = commands.add_parser("losses", description=losses.__doc__)
    command.set_defaults(lines=lambda flags: losses(flags.run, flags.head))
    command.add_argument("run", metavar="RUN", help="the folder of a run of train.py with --ledger")
    command.add_argument("--head", type=at_least_1, default=10, metavar="N", help="default 10")
    command = commands.add_parser("when", description=when.__doc__)
    command.set_defaults(lines=lambda flags: when(flags.run, flags.document, flags.text))
    command.add_argument("run", metavar="RUN", help="the folder of a run of train.py")
    command.add_argument("document", nargs="?", metavar="FILE[:GROUP]:ROW",
                         help="row of the file, or of a row group in it, from 0 on")
    command.add_argument("--text", help="words of the documents")
    return parser

def parse_steps(text):
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text}: expected A:B with 0 <= A < B")
    return int(first), int(stop)

def measured(run, flags):
    data_dir = folder_of(flags)
    tokenizer, where = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    print(f"data: {data_dir}; tokenizer: {where}", file=sys.stderr)
    if run is compare:
        return compare(tokenizer, data_dir, flags.T)
    return bench(where, data_dir, flags.B, flags.T)

if __name__ == "__main__":
    main()
