"""
Look at the packings and measure them, on the data at hand.

    python -m dev.bench show       rows of every packing, drawn in the terminal
    python -m dev.bench compare    what each packing loses, cuts and costs
    python -m dev.bench bench      tokens per second, from text and from tokens, beside other loaders
    python -m dev.bench audit      which documents a run has met, or will meet, in which steps

The trade-off: each line of the benchmark is measured in a process of its own, in turns with the best that it
could be: a quarter of a minute a line, for shares that hold on a machine that does other things, too. The
tokens per second do not.
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

from dataloader import PACKINGS, Encoder, PackedLoader, Ref, Source, cores_of_this_rank, trace
from dataset import column_views, errors_in_one_line, find_data, list_shards
from dev.prepare import tokenize
from tokenizer import RustBPETokenizer, find_tokenizer, get_tokenizer
from train import load_checkpoint, parse_steps, peak_memory, sources_of

# ---------------------------------------------------------------------------------------------------------
# Show: rows of every packing, drawn in the terminal

FIRST, SECOND, LAST = 1, 2, 4


def all_packings():
    """{name: arguments of PackedLoader}"""
    packings = {}
    for packing, packer in PACKINGS.items():
        if "tails" in packer.options:
            for tails in ("drop", "keep"):
                packings[f"{packing} {tails}"] = {"packing": packing, "tails": tails}
        else:
            packings[packing] = {"packing": packing}
    return packings


def show(tokenizer, data_dir, T, columns=72, colour=False):
    """Rows of every packing, a block a document: ] ends it, > is where it was cut, < goes on with it."""
    for name, packing in all_packings().items():
        loader = PackedLoader(tokenizer, 256, T, "train", data_dir=data_dir, num_lanes=1, prefetch=0,
                              transform=outline, **packing)
        inputs, targets = next(loader)
        stats = loader.stats()
        loader.close()
        lost = lost_share(stats["tokens_dropped"], stats["tokens_delivered"])
        yield f"{name}   lost {lost:.1%}, fit but cut {stats['cut_share']:.2%}"
        for row in torch.cat([inputs[-5:, :1], targets[-5:]], dim=1).tolist():
            yield "  " + draw_row(row, columns, colour)
        yield ""


def outline(ids, ref, place):
    """In place of a document's ids: whether each is its first, second or last."""
    marks = np.zeros(len(ids), np.int64)
    marks[:1] |= FIRST
    marks[1:2] |= SECOND
    marks[-1:] |= LAST
    return marks


def draw_row(row, columns, colour):
    """One character for every len(row) / columns tokens."""
    starts = [0, *(i for i in range(1, len(row)) if row[i] & FIRST)]
    text = ""
    for k, (a, b) in enumerate(itertools.pairwise([*starts, len(row)])):
        width = round(b * columns / len(row)) - round(a * columns / len(row))
        whole_start = row[a] & FIRST and (b - a == 1 or row[a + 1] & SECOND)
        block = ("[" if whole_start else "<") + "=" * (width - 2) + ("]" if row[b - 1] & LAST else ">")
        block = block[:width]    # "[]" where there is room for 0 or 1
        text += f"\033[30;{41 + k % 6}m{block}\033[0m" if colour else block
    return text


def lost_share(dropped, delivered):
    """Of the tokens that left the buffer."""
    return dropped / (dropped + delivered)


# ---------------------------------------------------------------------------------------------------------
# Compare: what each packing loses, cuts and costs

class Tally(NamedTuple):
    lost: float         # share of the tokens that left the buffer
    cut: float          # share of all documents: those that fit a row and yet were cut
    longest_wait: int   # rows that were given while a document stood whole in the buffer


def compare(tokenizer, data_dir, B, T, seconds=4.0):
    """Lines of a table. One lane, but for the speed: that is from text, by all threads."""
    yield f"{'packing':<15}{'lost':>8}{'fit but cut':>13}{'longest wait':>14}{'M tokens/s':>12}"
    for name, packing in all_packings().items():
        loader = PackedLoader(tokenizer, B, T, "train", data_dir=data_dir, num_lanes=1, **packing)
        tally = tally_rows(loader, max(4096, B))
        tokens = tokens_of(loader)
        speed_of(tokens, seconds / 2)    # fills the buffer
        speed = speed_of(tokens, seconds)
        loader.close()
        yield (f"{name:<15}{tally.lost:>8.1%}{tally.cut:>13.2%}{tally.longest_wait:>9,} rows"
               f"{speed / 1e6:>12.2f}")


def tally_rows(loader, n_rows):
    """By a packer of the loader's kind alone, which gives the loader's rows."""
    (source,) = loader.sources.values()
    packer = PACKINGS[loader.packing](loader.T, **loader._packer_options())
    encoder, waiting, longest_wait = Encoder(loader.tokenizer, loader.threads), {}, 0
    chunks = encoder.chunks(source, 0, Ref(), size=packer.chunk_size)
    for _ in range(n_rows):
        packer.row(lambda: next(chunks))
        whole = [ref for ref in packer.held() if ref.token == 0]
        waiting = {ref: waiting.get(ref, 0) + 1 for ref in whole}
        longest_wait = max(longest_wait, *waiting.values(), 0)
    encoder.close()
    dropped, documents, cut = (packer.counts[key] for key in ("dropped", "documents", "cut"))
    return Tally(lost_share(dropped, n_rows * loader.T), cut / documents, longest_wait)


def speed_of(counts, seconds):
    """Tokens per second, from an iterator that makes some and says how many; first, what lies ready goes."""
    for duration in (min(0.3, seconds), seconds):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < duration:
            tokens += next(counts)
    return tokens / (time.perf_counter() - began)


def tokens_of(batches):
    return (inputs.numel() for inputs, _ in batches)


# ---------------------------------------------------------------------------------------------------------
# Bench: every line in a process of its own, in turns with its yardstick
#
# Text is measured against its ceiling, the encoding threads alone, their tokens thrown away; tokens on disk
# against a memmap of the same ids.

class Job(NamedTuple):
    """One line of the table."""
    kind: str      # "text" or "tokens"
    data: str | dict
    reader: str    # a packing, or another loader
    threads: int
    engine: str = "tiktoken"
    note: str = ""


class Setting(NamedTuple):
    """What all lines have in common."""
    tokenizer: str    # its folder
    text: str
    tokens: str
    ids: str          # file of all train tokens, for the memmap
    B: int
    T: int
    seconds: float    # of one turn; there are three


class Measured(NamedTuple):
    speed: float      # tokens/s
    share: float      # of the yardstick
    first: float      # s
    resume: float | None    # s
    memory: float     # MB


def bench(tokenizer_dir, data_dir, B, T, seconds=2.0):
    """Lines of a table."""
    threads = cores_of_this_rank()
    yield f"B = {B}, T = {T}, {threads} cores; share of: the encoding threads alone (text), a memmap (tokens)"
    yield (f"{'from':<11}{'reader':<15}{'engine':<10}{'threads':>8}{'M tokens/s':>12}{'share':>8}"
           f"{'first batch':>13}{'resume':>9}{'memory':>9}")
    with tempfile.TemporaryDirectory() as work:
        setting = Setting(tokenizer_dir, data_dir, f"{work}/tokens", f"{work}/ids", B, T, seconds)
        with contextlib.redirect_stderr(io.StringIO()):
            tokenize(data_dir, setting.tokens, tokenizer_dir)
        write_ids(setting)
        for job in all_jobs(setting, threads, work):
            found = in_own_process(measure, job, setting)
            resume = "-" if found.resume is None else f"{found.resume:.2f} s"
            engine = "-" if job.kind == "tokens" else job.engine
            yield (f"{job.note + job.kind:<11}{job.reader:<15}{engine:<10}{job.threads:>8}"
                   f"{found.speed / 1e6:>12.2f}{found.share:>8.2f}{found.first:>11.2f} s{resume:>9}"
                   f"{found.memory:>6.0f} MB")


def all_jobs(setting, threads, work):
    some, packings = sorted({1, threads}), list(all_packings())
    for engine in engines():
        for packing, n in itertools.product(packings, some):
            yield Job("text", setting.text, packing, n, engine)
    for packing, n in itertools.product(packings, some):
        yield Job("tokens", setting.tokens, packing, n)
    if "://" not in setting.text:
        for kind, folder in (("text", setting.text), ("tokens", setting.tokens)):
            names = four_names(folder, f"{work}/{kind}")
            yield Job(kind, dict.fromkeys(names, 1), packings[-1], threads, engines()[-1], "4 x ")
    for name, (kind, write, _) in OTHERS.items():
        if name == "memmap" or importlib.util.find_spec(name):
            if write:
                in_own_process(write, setting)
            yield Job(kind, getattr(setting, kind), name, 1, engines()[-1])


def engines():
    return ["tiktoken", "gigatoken"] if importlib.util.find_spec("gigatoken") else ["tiktoken"]


def four_names(folder, prefix):
    """Four sources made of one."""
    names = [f"{prefix}{i}" for i in range(4)]
    for name in names:
        os.symlink(os.path.abspath(folder), name)
    return names


def in_own_process(function, *arguments):
    """A fresh one, which has its own peak of memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def measure(job, setting):
    """One line of the table. threads=1 means one core as well."""
    if job.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["NANOLOADER_ENGINE"] = job.engine
    with gated(setting.tokenizer) as (tokenizer, ours), gated(setting.tokenizer) as (another, theirs):
        ours.set()
        before = peak_memory("cpu")
        *_, read = OTHERS.get(job.reader, [packed])
        make = functools.partial(read, job, setting, tokenizer)
        batches = make()
        first, _ = timed(lambda: next(batches))
        tokens = tokens_of(batches)
        n_buffers = 8 * (len(job.data) if isinstance(job.data, dict) else 1)    # one a lane and source
        for _ in range(64 * n_buffers // setting.B):    # they grow with their first 64 rows
            next(tokens)
        memory = (peak_memory("cpu") - before) / (1 << 20)
        ours.clear()
        yardstick = encoded(job, setting, another) if job.kind == "text" else tokens_of(memmap(job, setting))
        turns = (tokens, ours), (yardstick, theirs)
        pairs = [[speed_in_turn(*turn, setting.seconds) for turn in turns] for _ in range(3)]
        ours.set()
        resume = time_to_resume(batches, make()) if isinstance(batches, PackedLoader) else None
    speed, best = np.median(pairs, axis=0)
    return Measured(speed, speed / best, first, resume, memory)


@contextlib.contextmanager
def gated(folder):
    """A tokenizer, and the event while which it encodes: what works ahead must not use another's turn."""
    tokenizer, may_encode = get_tokenizer(folder), threading.Event()
    encode = tokenizer.encode_documents
    tokenizer.encode_documents = lambda *args: may_encode.wait() and encode(*args)
    try:
        yield tokenizer, may_encode
    finally:
        may_encode.set()    # a thread that waits would never end


def speed_in_turn(counts, may_encode, seconds):
    may_encode.set()
    speed = speed_of(counts, seconds)
    may_encode.clear()
    return speed


def time_to_resume(loader, again):
    state = loader.state_dict()
    seconds, _ = timed(lambda: (again.load_state_dict(state), next(again)))
    loader.close(), again.close()
    return seconds


def timed(action):
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def packed(job, setting, tokenizer):
    return PackedLoader(tokenizer, setting.B, setting.T, "train", data_dir=job.data, threads=job.threads,
                        **all_packings()[job.reader])


def encoded(job, setting, tokenizer):
    """The ceiling: tokens by the encoding threads alone."""
    source = Source("all", list_shards(setting.text, "train"), num_lanes=1)
    chunks = Encoder(tokenizer, job.threads).chunks(source, 0, Ref())
    return (len(chunk.ids) for chunk in chunks)


def memmap(job, setting, tokenizer=None):
    """All ids in one file, read from front to back, cast to two int64 tensors."""
    B, T = setting.B, setting.T
    ids = np.memmap(setting.ids, get_tokenizer(setting.tokenizer).dtype, "r")
    while True:
        for i in range(0, len(ids) - B * T, B * T):
            inputs, targets = ids[i:i + B * T], ids[i + 1:i + 1 + B * T]
            yield tuple(torch.from_numpy(part.astype(np.int64)).view(B, T) for part in (inputs, targets))


def write_ids(setting):
    with open(setting.ids, "wb") as file:
        for ids in train_ids(setting):
            file.write(ids)


def train_ids(setting):
    """The ids of each row group."""
    for shard in list_shards(setting.tokens, "train"):
        for row_group in range(len(shard.rows)):
            data, offsets, _ = column_views(shard.read(row_group))
            yield np.frombuffer(data[offsets[0]:offsets[-1]], shard.dtype)


# ---------------------------------------------------------------------------------------------------------
# Other loaders, where they are installed, each as its documentation has it, in one process: documents behind
# one another, cut every T + 1 tokens

def as_batch(rows):
    rows = torch.from_numpy(np.asarray(rows).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def read_datasets(job, setting, tokenizer):
    """Hugging Face's streaming; what a thousand documents leave of a row is dropped."""
    from datasets import load_dataset

    def encode(documents):
        ids, _ = tokenizer.encode_documents(documents["text"])
        n = len(ids) // (setting.T + 1)
        return {"rows": ids[:n * (setting.T + 1)].reshape(n, -1)}

    files = [shard.path for shard in list_shards(setting.text, "train")]
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
    dataset = dataset.map(encode, batched=True, remove_columns=dataset.column_names).with_format("numpy")
    while True:
        for batch in dataset.iter(setting.B, drop_last_batch=True):
            yield as_batch(batch["rows"])


def write_litdata(setting):
    from litdata import TokensLoader, optimize

    optimize(torch.from_numpy, list(train_ids(setting)), setting.ids + ".litdata", chunk_bytes="64MB",
             item_loader=TokensLoader(setting.T + 1), num_workers=1, verbose=False)


def read_litdata(job, setting, tokenizer):
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(setting.ids + ".litdata", item_loader=TokensLoader(setting.T + 1))
    while True:
        yield from map(as_batch, StreamingDataLoader(dataset, batch_size=setting.B, drop_last=True))


def write_streaming(setting):
    from streaming import MDSWriter

    rest, row = np.zeros(0, np.uint16), setting.T + 1
    with MDSWriter(out=setting.ids + ".mds", columns={"ids": "bytes"}) as writer:
        for ids in train_ids(setting):
            rest = np.concatenate([rest, ids])
            stop = len(rest) // row * row
            for i in range(0, stop, row):
                writer.write({"ids": rest[i:i + row].tobytes()})
            rest = rest[stop:]


def read_streaming(job, setting, tokenizer):
    from streaming import StreamingDataset

    def collate(samples):
        return as_batch([np.frombuffer(sample["ids"], tokenizer.dtype) for sample in samples])

    dataset = StreamingDataset(local=setting.ids + ".mds", batch_size=setting.B, shuffle=False)
    while True:
        yield from torch.utils.data.DataLoader(dataset, setting.B, collate_fn=collate, drop_last=True)


OTHERS = {    # name: what it reads; what writes that in its own form; its batches
    "datasets": ("text", None, read_datasets),
    "memmap": ("tokens", None, memmap),
    "litdata": ("tokens", write_litdata, read_litdata),
    "streaming": ("tokens", write_streaming, read_streaming),
}


# ---------------------------------------------------------------------------------------------------------
# Audit: the documents in the rows of a run's steps

def audit(path, steps=None, rank=None, world_size=1, as_json=False):
    """
    Lines for each row of steps A to B-1 (default: the next one) of train.py's checkpoint `path`. Steps before
    it are found from the beginning of the run on, which takes as long as packing them again. rank: only its
    rows, of so many.
    """
    saved = load_checkpoint(path)
    run = argparse.Namespace(**saved["flags"])
    first, behind = steps or (saved["step"], saved["step"] + 1)
    state, step = json.loads(saved["loader"]), saved["step"]
    if first < step:
        state, step = None, 0
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    while step < behind:
        ends = [begin for _, begin in run.seq_len if begin > step]
        T = [T for T, begin in run.seq_len if begin <= step][-1]
        rows_a_step = run.batch_size * run.seq_len[-1][0] // T
        with PackedLoader(tokenizer, rows_a_step, T, "train", rank=0, world_size=1, packing=run.packing,
                          tails=run.tails, data_dir=sources_of(run), num_lanes=run.num_lanes, prefetch=0,
                          shuffle_seed=run.seed if run.shuffle else None) as loader:
            if state:
                loader.load_state_dict(state)
            shards = {shard.path: shard for source in loader.sources.values() for shard in source.shards}
            traced = trace(loader)
            while step < min([behind, *ends]):
                rows = next(traced)
                for i, pieces in enumerate(rows if step >= first else ()):
                    if rank is None or i % world_size == rank:
                        found = [describe_piece(piece, shards, tokenizer) for piece in pieces]
                        yield from lines_of_row(step, i, found, as_json)
                next(loader)    # keeps the place, from which rows of another length go on
                step += 1
            state = loader.state_dict()


def describe_piece(piece, shards, tokenizer):
    place, ref = piece.place, piece.ref
    shard = shards[place.path]
    document = read_row_group(shard, place.row_group)[place.row].as_py()
    if shard.kind == "tokens":
        document = tokenizer.decode(np.frombuffer(document, shard.dtype)[1:101].tolist())
    return {"path": place.path, "row_group": place.row_group, "row": place.row, "epoch": ref.epoch,
            "from": piece.start, "to": piece.stop, "text": document[:60]}


@functools.lru_cache(maxsize=16)
def read_row_group(shard, row_group):
    return shard.read(row_group)


def lines_of_row(step, number, found, as_json):
    if as_json:
        yield json.dumps({"step": step, "row": number, "documents": found})
        return
    yield f"step {step}, row {number}"
    for one in found:
        tokens = f"{one['from']:,}-{one['to'] - 1:,}"
        yield (f"  {one['path']}, row group {one['row_group']}, row {one['row']}, epoch {one['epoch']}, "
               f"tokens {tokens:<14} {one['text']!r}")


# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        if flags.run is audit:
            for line in audit(flags.resume, flags.steps, flags.rank, flags.world_size, flags.json):
                print(line, flush=True)
            return
        data_dir = find_data(flags.data)
        tokenizer, folder = find_tokenizer(flags.tokenizer, [data_dir], 32768)
        for line in flags.run(flags, tokenizer, folder, data_dir):
            print(line, flush=True)


def make_parser():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m dev.bench", description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(required=True)
    for name, run, text in (("show", run_show, "draw rows of every packing"),
                            ("compare", run_compare, "what each packing loses, cuts and costs"),
                            ("bench", run_bench, "tokens per second, from text and from tokens")):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--data", help="folder or URI of text shards (default: what train.py takes)")
        command.add_argument("--tokenizer", help="its folder (default: the one trained on the data)")
        command.add_argument("--T", type=int, default=2048, help="tokens of a row (default 2048)")
        if name != "show":
            command.add_argument("--B", type=int, default=32, help="rows of a batch (default 32)")
    command = commands.add_parser("audit", help="which documents are in the rows of a run's steps",
                                  description=audit.__doc__)
    command.set_defaults(run=audit)
    command.add_argument("--resume", required=True, metavar="FILE", help="a checkpoint of the run")
    command.add_argument("--steps", type=parse_steps, metavar="A:B", help="default: the one behind FILE")
    command.add_argument("--rank", type=int, help="only this rank's rows, of --world_size ranks")
    command.add_argument("--world_size", type=int, default=1)
    command.add_argument("--json", action="store_true", help="a row a line, for programs")
    return parser


def run_show(flags, tokenizer, folder, data_dir):
    return show(tokenizer, data_dir, flags.T, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def run_compare(flags, tokenizer, folder, data_dir):
    return compare(tokenizer, data_dir, flags.B, flags.T)


def run_bench(flags, tokenizer, folder, data_dir):
    return bench(folder, data_dir, flags.B, flags.T)


if __name__ == "__main__":
    main()
