"""
What `python -m dev.bench` measures. Each line is measured in a fresh process: these functions are
not in __main__.py, since a new process does not import that.
"""

import collections
import functools
import importlib.util
import itertools
import multiprocessing
import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from dataloader import PACKINGS, PackedLoader
from dataset import column_views, cores, list_shards
from dev.bench import peers
from dev.bench.peers import Peer
from dev.prepare import tokenize
from tokenizer import get_tokenizer


def run_fresh(function, job):
    """Run it in a new process, so that memory and threads are only the job's."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, job).result()

def timed(action):
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result

def peak_memory(pid="self"):
    """MB of a process; Linux's ru_maxrss begins with the parent's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3

# --------------------------------------------------------------------------------------------------
# packings: what each packing drops, pads and cuts

def compare_packings(tokenizer, data_dir, T):
    """Lines of a table: the first 16 chunks of one lane."""
    chunks = first_chunks(tokenizer, data_dir, T)
    n_tokens = sum(map(sum, chunks))
    yield f"T = {T}: {n_tokens:,} tokens in {len(chunks)} chunks"
    yield f"{'packing':<12}{'dropped':>9}{'padding':>9}{'fit but cut':>13}"
    for packing in PACKINGS:
        shares = shares_of(packing, chunks, T)
        yield f"{packing:<12}{shares.dropped:>9.2%}{shares.padding:>9.2%}{shares.cut:>13.2%}"

def first_chunks(tokenizer, data_dir, T):
    """The lengths of the documents in each."""
    with PackedLoader(tokenizer, 1, T, "train", data_dir=data_dir, num_lanes=1) as loader:
        return [lengths_of_chunk(loader, n) for n in range(16)]

def lengths_of_chunk(loader, n):
    """The tokens of each document, without empty ones, in a chunk of the first source's lane 0."""
    source = next(iter(loader.sources.values()))
    _, parts = source.parts(0, n)
    lengths = []
    for part in parts:
        encoded = loader.encoder.encode(*part, part.shard.read(part.row_group))
        lengths += [len(ids) for ids in encoded if ids is not None]
    return lengths

class Shares(NamedTuple):
    dropped: float    # of all tokens
    padding: float    # of all tokens in rows
    cut: float        # of the documents that fit in a row

def shares_of(packing, chunks, T):
    """chunks: the lengths of each one's documents"""
    counts = collections.Counter()
    for lengths in chunks:
        counts += count_rows(packing, lengths, T + 1)
    n_tokens = sum(map(sum, chunks))
    return Shares(counts["dropped"] / n_tokens, counts["padding"] / (counts["rows"] * (T + 1)),
                  counts["cut"] / max(1, counts["fit"]))

def count_rows(packing, lengths, R):
    """Of a chunk's rows: padding, dropped tokens, documents that fit, and those of them cut."""
    rows = PACKINGS[packing](lengths, R)
    pieces = list(itertools.chain(*rows))
    n_kept = collections.Counter()
    for d, _, stop in pieces:
        n_kept[d] = max(n_kept[d], stop)
    whole = {d for d, start, stop in pieces if stop - start == lengths[d]}
    fit = {d for d in n_kept if lengths[d] <= R}
    return collections.Counter(
        rows=len(rows), padding=len(rows) * R - sum(stop - start for _, start, stop in pieces),
        dropped=sum(lengths) - sum(n_kept.values()), fit=len(fit), cut=len(fit - whole))

def tokenizer_with(engine, folder):
    tokenizer = get_tokenizer(folder)
    if engine == "tiktoken":
        tokenizer.engine = "tiktoken"
    return tokenizer

# --------------------------------------------------------------------------------------------------
# peers: each in a fresh process, in turns

def ours(job, packing="exactfit"):
    data = job.text if job.engine else job.tokens
    return PackedLoader(tokenizer_with(job.engine, job.tokenizer), job.B, job.T, "train",
                        data_dir=data, packing=packing)

def write_ids(tokens, path):
    with open(path, "wb") as file:
        for shard in list_shards(tokens, "train"):
            for row_group in range(len(shard.group_sizes)):
                content, _ = column_views(shard.read(row_group))
                file.write(content)

def memmap(job):
    """Batches from a file of all ids, from front to back. Yields once for each."""
    ids = np.memmap(job.ids, job.dtype, "r")
    n = job.B * job.T
    for start in itertools.cycle(range(0, len(ids) - n, n)):
        for part in (ids[start:start + n], ids[start + 1:start + 1 + n]):
            torch.from_numpy(part.astype(np.int64)).view(job.B, job.T)
        yield

def texts_of(data_dir):
    for shard in list_shards(data_dir, "train"):
        for row_group in range(len(shard.group_sizes)):
            yield from shard.read(row_group).drop_null().to_pylist()

def some_text(texts, n_bytes):
    found, n = [], 0
    while n < n_bytes:
        found.append(next(texts))
        n += len(found[-1].encode())
    return found

def engine_alone(job):
    """One thread encodes 64 MB of text again and again. Yields once for each batch of tokens."""
    tokenizer, gigatoken = peers.load_engines(job.tokenizer, job.engine)
    texts = some_text(itertools.cycle(texts_of(job.text)), 64e6)
    documents = [text.encode() for text in texts]
    n_tokens = 0
    for begin in itertools.cycle(range(0, len(documents), 64)):
        some = documents[begin:begin + 64]
        if gigatoken:
            ids, _ = gigatoken(some)
        else:
            ids, _ = tokenizer._call_tiktoken(some)
        n_tokens += len(ids)
        while n_tokens >= job.B * job.T:
            n_tokens -= job.B * job.T
            yield

PEERS = [
    Peer("exactfit", ours, packing="exactfit"),
    Peer("flat", functools.partial(ours, packing="flat")),
    Peer("engine alone", engine_alone, packing=None),
    *peers.PEERS,
    Peer("exactfit", ours, peers.TOKENS, "exactfit"),
    Peer("a memmap", memmap, peers.TOKENS),
]

class Speed(NamedTuple):
    cpu: float       # tokens per CPU second, of all its processes
    wall: float      # tokens per second
    first: float     # seconds to the first batch, with the tokenizer's load and check
    memory: float    # MB, all processes together

def measure_peers(tokenizer_dir, data_dir, B, T, engines, names, seconds, rounds):
    """Lines of a table, medians of the rounds. What is dropped and cut follows from the packing."""
    with tempfile.TemporaryDirectory() as work:
        tokens, ids = f"{work}/tokens", f"{work}/ids"
        tokenize(data_dir, tokens, tokenizer_dir)
        write_ids(tokens, ids)
        dtype = list_shards(tokens, "train")[0].dtype
        runs = []
        for peer in PEERS:
            if peer.name not in names:
                continue
            if not importlib.util.find_spec(peer.needs):
                yield f"skipped: {peer.name}, which is not installed"
                continue
            job = peers.Job(data_dir, tokens, tempfile.mkdtemp(dir=work), ids, dtype,
                            tokenizer_dir, "", peer.workers, B, T)
            if peer.write:
                run_fresh(peer.write, job)
            for engine in peer.engines:
                if engine in ("", *engines):
                    runs.append((peer, job._replace(engine=engine)))
        speeds = collections.defaultdict(list)
        for peer, job in tqdm(rounds * runs, "measure", delay=1):
            measured = run_fresh(measure_peer, (peer, job, seconds))
            speeds[peer, job].append(measured)
    yield f"B = {B}, T = {T}, {cores()} cores"
    yield (f"{'loader':<16}{'from':<10}{'workers':>8}{'M tokens/CPU s':>16}{'M tokens/s':>12}"
           f"{'first batch':>13}{'memory':>10}{'dropped':>9}{'fit but cut':>13}")
    chunks = first_chunks(get_tokenizer(tokenizer_dir), data_dir, T)
    for (peer, job), measured in speeds.items():
        cpu, wall, first, memory = np.median(measured, axis=0)
        line = (f"{peer.name:<16}{job.engine or 'tokens':<10}{job.workers:>8}{cpu / 1e6:>16.2f}"
                f"{wall / 1e6:>12.2f}{first:>11.2f} s{memory:>7,.0f} MB")
        if peer.packing:
            shares = shares_of(peer.packing, chunks, T)
            line += f"{shares.dropped:>9.1%}{shares.cut:>13.1%}"
        yield line

def measure_peer(run):
    peer, job, seconds = run
    importlib.import_module(peer.needs)    # not a part of the first batch
    batches = batches_of(peer, job)
    first, _ = timed(lambda: next(batches))
    count_tokens(batches, seconds / 3)    # until its threads and processes are at work
    cpu = cpu_seconds()
    wall, n_tokens = timed(lambda: count_tokens(batches, seconds))
    cpu = cpu_seconds() - cpu
    workers = [worker.pid for worker in multiprocessing.active_children()]
    memory = sum(map(peak_memory, ["self", *workers]))
    return Speed(n_tokens / cpu, n_tokens / wall, first, memory)

def batches_of(peer, job):
    """
    Yield (tokens in a batch, whether a measurement may end here). Ours may end where lane 0 begins
    a chunk: as much is ready ahead there as where it began.
    """
    place = None
    for _ in itertools.count():
        batches = peer.make(job)
        for _ in batches:
            before = place
            if isinstance(batches, PackedLoader):
                [(place, _)] = batches.state_dict()["lanes"]["0"].values()
            yield job.B * job.T, place is None or place != before

def count_tokens(batches, seconds):
    began, total = time.perf_counter(), 0
    for n_tokens, may_end in batches:
        total += n_tokens
        if may_end and time.perf_counter() - began >= seconds:
            return total

def cpu_seconds():
    """Of this process and its workers."""
    ticks = 0
    for worker in multiprocessing.active_children():
        stat = Path(f"/proc/{worker.pid}/stat").read_text()
        _, _, fields = stat.rpartition(")")
        ticks += sum(map(int, fields.split()[11:13]))    # utime, stime
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
