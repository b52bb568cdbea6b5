"""
Documents in parquet shards to packed (B, T) batches for pretraining, by threads of one process.

    index -> Source.deal -> read -> encode -> packer.row(pull) -> lane.row -> batch -> device

Each arrow is a pull by the stage on its right. Some threads read, `threads` encode, one packs and works
ahead; the caller only waits for batches. The row groups of an epoch are dealt to `num_lanes` lanes, each
with a packer of its own, and row g of the run comes from lane g % num_lanes: so the rows are the same for
every world size, batch size, thread count and stop point. A state names documents, and holds no token.

    loader = PackedLoader(get_tokenizer(), B=32, T=2048, split="train", data_dir="my_shards")
    inputs, targets = next(loader)        # int64 (B, T) each
    state = loader.state_dict()           # load it, and the next batch is the batch that would have come

The trade-off: a resumed run reads and encodes the documents in its packers once more (under a second a lane),
so that a state is JSON of 3 or 4 bytes for each of them.
"""

import base64
import binascii
import collections
import contextlib
import hashlib
import itertools
import json
import math
import mmap
import os
import queue
import sys
import threading
import time
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dataset import (
    Shard,
    column_views,
    cores,
    default_data_dir,
    find_data,
    in_order,
    is_text,
    list_shards,
    name_other_folder,
)
from tokenizer import as_encoder

# ---------------------------------------------------------------------------------------------------------
# Sources: which documents are whose

class Ref(NamedTuple):
    """A token's place in a source, as an odometer: each digit counts in the order of the one before."""
    epoch: int = 1
    group: int = 0    # place of the row group, or part of one, in the epoch's order
    doc: int = 0      # among the documents of it
    token: int = 0    # tokens of the document delivered before


class Order(NamedTuple):
    """
    What an epoch deals: row groups, numbered through all shards, and which part of each.
    Example: 2 row groups for 3 lanes -> numbers [0, 0, 1, 1], part_of [0, 1, 0, 1], n_parts 2
    """
    numbers: np.ndarray
    part_of: np.ndarray
    n_parts: int


def shuffled(n, seed, *key):
    """
    The order of n things: 0, 1, ... where seed is None, else drawn from (seed, *key), another for each key.
    PCG64's raw stream is fixed by NumPy's compatibility policy; Generator.permutation is not.
    """
    if seed is None:
        return range(n)
    return np.argsort(np.random.PCG64((seed, *key)).random_raw(n), kind="stable")


class Source:
    """
    The shards of one folder, and how their documents are dealt to lanes.

    An epoch is one permutation of all row groups, as they lie without a seed; number k of it goes to lane
    k % num_lanes. Where there are fewer row groups than lanes, each counts as several parts of interleaved
    documents, the fewest that give every lane a document.

    history: [epoch, n] pairs; from that epoch on, the first n shards are dealt. Example: [[1, 3], [4, 5]]
    """
    dealing = "row groups in turn"    # a setting that rows depend on

    def __init__(self, name, shards, num_lanes, seed=None, history=()):
        self.name, self.shards, self.num_lanes, self.seed = name, shards, num_lanes, seed
        self.history = [list(pair) for pair in history] or [[1, len(shards)]]
        self.first_group = np.cumsum([0, *(len(shard.rows) for shard in shards)])
        self.group_sizes = np.array([n for shard in shards for n in shard.rows], np.int64)
        self.order = lru_cache(maxsize=4)(self._order)
        self.order(self.history[-1][0])    # an error here, rather than in an epoch to come

    def _order(self, epoch):
        n_shards = [n for since, n in self.history if since <= epoch][-1]
        sizes = self.group_sizes[:self.first_group[n_shards]]
        check_enough_documents(self, sizes.sum())
        numbers, n_parts = np.flatnonzero(sizes), 1
        while np.minimum(sizes[numbers], n_parts).sum() < self.num_lanes:
            n_parts += 1
        numbers = numbers[shuffled(len(numbers), self.seed, epoch, 0)]
        counts = np.minimum(sizes[numbers], n_parts)
        part_of = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Order(np.repeat(numbers, counts), part_of, n_parts)

    def deal(self, lane, start, epochs=None):
        """The Refs of a lane's row groups from `start` on, without end unless `epochs` is a number."""
        epoch, group = start.epoch, start.group
        while epochs is None or epoch <= epochs:
            first = group + (lane - group) % self.num_lanes
            for group in range(first, len(self.order(epoch).numbers), self.num_lanes):
                yield Ref(epoch, group)
            epoch, group = epoch + 1, 0

    def find(self, ref):
        """(shard, row group, rows) of a Ref's row group, or part of one; rows in the order of delivery."""
        numbers, part_of, n_parts = self.order(ref.epoch)
        number = int(numbers[ref.group])
        shard = int(bisect_right(self.first_group, number)) - 1
        rows = shuffled(int(self.group_sizes[number]), self.seed, ref.epoch, 1, number)
        return self.shards[shard], number - int(self.first_group[shard]), rows[part_of[ref.group]::n_parts]


def fingerprint_of(shards):
    """A hash of the shards' names and sizes; a shard of tokens counts as the text that it was made of."""
    named = [[shard.name, shard.size] for shard in shards]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------
# Encoding: row groups to chunks of documents, by threads, ahead of the packers and in order

class Place(NamedTuple):
    """Where a document stands on disk."""
    path: str
    row_group: int
    row: int


class Task(NamedTuple):
    """Documents of one row group, which a thread encodes at a time."""
    group: Ref
    docs: range | list                 # their numbers in it
    shard: Shard
    row_group: int
    rows: range | np.ndarray | list    # on disk
    array: Future                      # of the whole row group
    per_chunk: int                     # documents


class Chunk(NamedTuple):
    """A few documents that have tokens: number i is ids[bounds[i]:bounds[i + 1]]."""
    ids: np.ndarray
    bounds: list[int]
    docs: range | list    # their numbers in the row group
    behind: Ref           # of the document behind the chunk

    def refs(self):
        epoch, group = self.behind[:2]
        return [Ref(epoch, group, doc) for doc in self.docs]

    def documents(self):
        """Pairs of a document's ids, BOS in front, and its Ref."""
        return zip([self.ids[a:b] for a, b in itertools.pairwise(self.bounds)], self.refs(), strict=True)


CHUNK_BYTES = 1 << 16    # of a text shard as it lies on disk; about 30,000 tokens of prose
CHECK_EVERY = 1000       # one document in so many is encoded by tiktoken too, where another engine encodes


def documents_per_chunk(shard):
    """From what the index says, so that the same documents are a chunk in text and in tokens."""
    return max(1, min(1024, CHUNK_BYTES * sum(shard.rows) // max(1, shard.size)))


class RowGroups:
    """
    Row groups that are being read or in use, shared by all lanes. Keeps about `limit` bytes of them; beyond
    that the least recently used are dropped, and read again when a lane asks. Called by one thread.
    """

    def __init__(self, threads, limit=1 << 29):
        self.limit, self.kept = limit, {}    # (path, row group): Future, the least recently used first
        self.executor = ThreadPoolExecutor(threads, "read")
        self.seconds, self.closed = 0.0, False

    def get(self, shard, row_group):
        key = shard.path, row_group
        if key not in self.kept:
            self._forget()
        self.kept[key] = self.kept.pop(key, None) or self.executor.submit(self._read, shard, row_group)
        return self.kept[key]

    def _read(self, shard, row_group):
        began = time.perf_counter()
        array = shard.read(row_group, self._wait)
        self.seconds += time.perf_counter() - began    # a lost update of two threads is a lost microsecond
        return array

    def _wait(self, seconds, error):
        """Not longer than the loader lives: at exit Python waits for its threads."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.closed:
                raise error
            time.sleep(0.05)

    def _forget(self):
        sizes = {key: f.result().nbytes for key, f in self.kept.items() if f.done() and not f.exception()}
        excess = sum(sizes.values()) - self.limit
        for key, size in sizes.items():
            if excess > 0:
                del self.kept[key]
                excess -= size


class Encoder:
    """
    Turns documents into ids in threads of its own, one executor for the loader's life.

    transform(ids, ref, place): what is to be delivered in place of a document's ids, int64 and BOS first; or
    None to leave it out. It is called in these threads, every time that a document is encoded, and its result
    must depend on its arguments alone. Its integers are delivered as they are. A state knows it by its name.
    """

    def __init__(self, tokenizer, threads, transform=None, readers=1):
        self.tokenizer, self.threads, self.transform = as_encoder(tokenizer), threads, transform
        self.bos, self.dtype = self.tokenizer.bos, np.dtype(np.int64) if transform else self.tokenizer.dtype
        self.executor = ThreadPoolExecutor(1 if self.tokenizer.threads_of_its_own else threads, "encode")
        self.row_groups = RowGroups(readers)
        self.counts, self.seconds, self.lock = collections.Counter(), 0.0, threading.Lock()

    def chunks(self, source, lane, start, epochs=None, size=None, n_streams=1):
        """
        The Chunks of a lane from `start` on. size: documents in a chunk; None: so many as make about
        CHUNK_BYTES. n_streams: how many share the threads.

        Behind the next task, two more of each stream of text are under way, and 2 a thread: work for the
        others while one is at a document of 5 MB.
        """
        ahead = 2 + 2 * self.threads // n_streams if source.shards[0].kind == "text" else 1
        largest = max(1, min(16, 128 // n_streams))    # so that 1,024 streams do not hold GBs
        tasks = self._tasks(source, source.deal(lane, start, epochs), start, size, largest)
        for _, chunks in in_order(self.executor, self._encode, tasks, ahead + 1):
            yield from chunks

    def _tasks(self, source, refs, start, size, largest):
        """
        One for all of a row group of tokens, which only need to be cut (one for each chunk: half as fast); of
        text three for CHUNK_BYTES each, three for twice as much, and so on up to `largest` times: the first
        batch comes soon, and in the long run threads wait less often for the interpreter (flat with
        gigatoken, 2 cores: 27 M tokens a second, where 4 times are the most 22).
        """
        groups, n_tasks = ((ref, *source.find(ref)) for ref in refs), 0
        for (ref, shard, row_group, rows), behind in itertools.pairwise(itertools.chain(groups, [None])):
            usual = documents_per_chunk(shard)
            per_chunk = size or usual
            doc = start.doc if ref[:2] == start[:2] else 0
            while doc < len(rows):
                n_chunks = max(1, min(largest, 1 + n_tasks // 3) * usual // per_chunk)
                per_task = n_chunks * per_chunk if shard.kind == "text" else len(rows)
                array = self.row_groups.get(shard, row_group)
                if behind and 2 * (doc + per_task) >= len(rows):
                    self.row_groups.get(*behind[1:3])    # read while the second half is being encoded
                docs = range(doc, min(doc + per_task, len(rows)))
                yield Task(ref, docs, shard, row_group, rows[doc:docs.stop], array, per_chunk)
                doc, n_tasks = docs.stop, n_tasks + 1
            if not behind or behind[1:3] != (shard, row_group):
                self._leave(source, ref, shard, row_group)

    def _leave(self, source, ref, shard, row_group):
        if source.order(ref.epoch).n_parts == 1:    # else other lanes have parts of it
            self.row_groups.kept.pop((shard.path, row_group), None)

    def encode_again(self, source, refs):
        """Read and encode just these documents of a state: {Ref without its token: ids}."""
        found, tasks = {}, self._tasks_again(source, refs)
        for _, (chunk,) in in_order(self.executor, self._encode, tasks, 2 * self.threads):
            found |= {ref: ids for ids, ref in chunk.documents()}
        if lacking := {ref._replace(token=0) for ref in refs} - found.keys():
            raise ValueError(f"{len(lacking)} documents that the state holds have no tokens here, such as "
                             f"{min(lacking)}; go on with the data and the `transform` that it was made with")
        return found

    def _tasks_again(self, source, refs):
        refs = sorted({ref._replace(token=0) for ref in refs})
        for (epoch, group), same in itertools.groupby(refs, key=lambda ref: ref[:2]):
            docs = [ref.doc for ref in same]
            shard, row_group, rows = source.find(Ref(epoch, group))
            array = self.row_groups.get(shard, row_group)
            on_disk = [int(rows[doc]) for doc in docs]
            yield Task(Ref(epoch, group), docs, shard, row_group, on_disk, array, len(docs))
            if (epoch, group) != refs[-1][:2]:    # where the lane goes on
                self._leave(source, Ref(epoch, group), shard, row_group)

    def _encode(self, task):
        """The Chunks of a task. An error names shard, row group and row."""
        if self.row_groups.closed:
            raise RuntimeError(CLOSED)
        array = take(task.array.result(), task.rows)
        began = time.perf_counter()
        try:
            encode = self._encode_text if is_text(array.type) else self._view_tokens
            ids, bounds = encode(array, task)
            if self.transform:
                ids, bounds = self._transformed(ids, bounds, task)
        except BaseException as error:    # tiktoken's panics are no Exceptions
            rows = task.rows
            if len(rows) > 1:    # one by one, to find the culprit
                for i in range(len(rows)):
                    self._encode(task._replace(docs=task.docs[i:i + 1], rows=rows[i:i + 1]))
            at = f"row {rows[0]}" if len(rows) == 1 else f"rows {min(rows)} to {max(rows)}"
            raise RuntimeError(f"{task.shard.path}, row group {task.row_group}, {at}: "
                               f"{type(error).__name__}: {error}") from error
        with self.lock:
            self.counts["tokens"] += len(ids)
            self.counts["nulls"] += array.null_count
            self.seconds += time.perf_counter() - began
        return list(chunks_of(ids, bounds, task))

    def _encode_text(self, array, task):
        # Another document in every row group and epoch (two primes), so that in the end each is checked.
        start = -(task.docs[0] + 613 * task.group.group + 7919 * task.group.epoch) % CHECK_EVERY
        check = range(start, len(array), CHECK_EVERY)
        return self.tokenizer.encode(array, check, self.executor, self.threads)

    def _view_tokens(self, array, task):
        """No copy: the ids of a token shard as they lie in the column's buffer."""
        shard, valid = task.shard, array.is_valid().to_numpy(zero_copy_only=False)
        if shard.fingerprint != self.tokenizer.fingerprint:
            raise ValueError(f"tokens of the tokenizer {shard.fingerprint}, but this run's is "
                             f"{self.tokenizer.fingerprint}; make them anew: python -m dev.prepare tokenize")
        if array.null_count:
            array = array.fill_null(b"")    # other programs may leave bytes in the slot of a null
        data, offsets, _ = column_views(array)
        if (np.diff(offsets) % shard.dtype.itemsize).any():
            raise ValueError(f"a document is no whole number of {shard.dtype} tokens")
        ids = np.frombuffer(data[offsets[0]:offsets[-1]], shard.dtype).astype(self.dtype, copy=False)
        bounds = (offsets - offsets[0]) // shard.dtype.itemsize
        if (np.diff(bounds)[valid] == 0).any() or (ids[bounds[:-1][valid]] != self.bos).any():
            raise ValueError(f"a document does not begin with BOS ({self.bos})")
        return ids, bounds

    def _transformed(self, ids, bounds, task):
        ids, arrays = ids.astype(self.dtype), []
        for i, doc in enumerate(task.docs):
            place = Place(task.shard.path, task.row_group, int(task.rows[i]))
            document, ref = ids[bounds[i]:bounds[i + 1]], Ref(task.group.epoch, task.group.group, doc)
            result = self.transform(document, ref, place) if len(document) else ()
            if result is None:
                with self.lock:
                    self.counts["left_out"] += 1
            array = np.asarray(() if result is None else result)
            if len(array) and array.dtype.kind not in "iu":
                raise TypeError(f"transform returned {array.dtype}; expected integers")
            arrays.append(array.astype(self.dtype))
        return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])

    def close(self):
        for executor in (self.executor, self.row_groups.executor):
            executor.shutdown(wait=False, cancel_futures=True)


def chunks_of(ids, bounds, task):
    all_have_tokens, bounds = np.diff(bounds).all(), bounds.tolist()
    for i in range(0, len(task.docs), task.per_chunk):
        docs, cuts = task.docs[i:i + task.per_chunk], bounds[i:i + task.per_chunk + 1]
        behind = Ref(task.group.epoch, task.group.group, docs[-1] + 1)
        if not all_have_tokens:
            kept = [k for k in range(len(docs)) if cuts[k] < cuts[k + 1]]
            docs, cuts = [docs[k] for k in kept], [*(cuts[k] for k in kept), cuts[-1]]
        yield Chunk(ids[cuts[0]:cuts[-1]], [cut - cuts[0] for cut in cuts], docs, behind)


def take(array, rows):
    """The documents at these rows, without a copy where they lie behind one another."""
    if isinstance(rows, range) and rows.step == 1:
        return array[rows.start:rows.stop]
    return array.take(pa.array(np.asarray(rows, np.int64)))


# ---------------------------------------------------------------------------------------------------------
# Packing: documents to rows of T + 1 tokens. Pure: no files, no threads, no rank, no chance.
#
# row(pull)   -> the arrays of the next row: exactly T + 1 tokens (there is no padding), fewer in a finite
#                run's last row, [] behind it. pull() gives the next Chunk; None: there are no more. Its ids
#                may be a view of a whole row group: copy what is to stay long
# held()      -> the Refs of the documents it holds, oldest first, to be iterated: all that it remembers,
#                beside `rows`
# restore(ids, ref), once for each of them in their order, makes an empty packer what that one was; ids: all
#                of the document's, of which ref.token were delivered before
#
# options: the settings of the loader, beside T, that its rows depend on: arguments of its constructor
# usual_buffer_size: where the loader is given none; 1 for a packer without a buffer. chunk_size: documents in
# a Chunk; None: as documents_per_chunk says, which is part of the rows
# rows: how many it has given (not counting []), those before it was restored, too
# counts: tokens "dropped", "documents" pulled, and "cut": documents delivered in pieces that fit a row

class FlatPacker:
    """All documents behind one another, cut every T tokens; the last token of a row opens the next."""
    options, usual_buffer_size, chunk_size = (), 1, None

    def __init__(self, T):
        self.T, self.rows, self.counts = T, 0, collections.Counter()
        self.chunks = collections.deque()
        self.at = self.n_tokens = 0    # the next token in the first chunk; tokens from there on

    def row(self, pull):
        while self.n_tokens <= self.T and (chunk := pull()) is not None:
            self._put(chunk)
            self.counts["documents"] += len(chunk.docs)
        overlap = 1 if self.rows else 0    # the last row's last target
        if self.n_tokens <= overlap:
            return []
        ids, stop = self.chunks[0].ids, self.at + self.T + 1
        row = [ids[self.at:stop]]
        while stop > len(ids) and len(self.chunks) > 1:
            stop -= len(ids)
            self.chunks.popleft()
            ids = self.chunks[0].ids
            row.append(ids[:stop])
        self.at = stop - 1    # behind a finite run's last row there is nothing
        self.n_tokens -= self.T
        self.rows += 1
        self._count_cut()
        return row

    def _count_cut(self):
        """A document that fits a row, and has the token that two rows share inside."""
        bounds = self.chunks[0].bounds
        if self.at < bounds[-1]:
            i = bisect_right(bounds, self.at)
            if bounds[i - 1] < self.at < bounds[i] - 1 and bounds[i] - bounds[i - 1] <= self.T + 1:
                self.counts["cut"] += 1

    def _put(self, chunk):
        if len(chunk.ids):
            self.chunks.append(chunk)
            self.n_tokens += len(chunk.ids)

    def held(self):
        return Rest([chunk._replace(ids=None) for chunk in self.chunks], self.at)

    def restore(self, ids, ref):
        """Only the first can have been delivered in part."""
        if not self.chunks:
            self.at = ref.token
        self.n_tokens -= ref.token
        self._put(Chunk(ids, [0, len(ids)], [ref.doc], ref))


class Rest:
    """
    The Refs of some chunks from one token on, made where somebody wants them: a list at every row would take
    17 ms of CPU a batch, not 0.4 (short documents, T = 128, 8 lanes).
    """

    def __init__(self, chunks, at):
        self.chunks, self.at = chunks, at

    def __iter__(self):
        at = self.at
        for chunk in self.chunks:
            for ref, (begin, end) in zip(chunk.refs(), itertools.pairwise(chunk.bounds), strict=True):
                if at < end:
                    yield ref._replace(token=max(0, at - begin))
            at = max(0, at - chunk.bounds[-1])


def choose_best_fit(sizes, free):
    """
    The next buffered document for a row with `free` empty token slots: the largest that fits, else the
    shortest, whose tail is then dropped; the oldest among equals.

    sizes: sorted list of (n_tokens, Ref). Returns (index, tokens to copy).
    Example: [(3, 7), (5, 2), (9, 0)], free=6 -> (1, 5);  [(8, 4), (9, 0)], free=6 -> (0, 6)
    """
    i = bisect_left(sizes, (free + 1,))
    if i == 0:
        return 0, free
    n = sizes[i - 1][0]
    return bisect_left(sizes, (n,)), n


class BestFitPacker:
    """
    nanochat's rows: at least `buffer_size` documents buffered before every placement, refilled a tokenizer
    batch at a time; the largest that fits, and where none does the shortest, cut to fill the row. Long
    documents pile up in the buffer until they are all it holds, so no more of one is kept than a row takes.
    Source: github.com/karpathy/nanochat, nanochat/dataloader.py.
    """
    options, usual_buffer_size = ("buffer_size", "tokenizer_batch_size"), 1000

    def __init__(self, T, buffer_size, tokenizer_batch_size):
        self.R, self.buffer_size, self.chunk_size = T + 1, buffer_size, tokenizer_batch_size
        self.rows, self.counts = 0, collections.Counter()
        self.buffer, self.sizes = {}, []    # Ref -> ids; sorted (tokens of the whole document, Ref)

    def row(self, pull):
        row, free = [], self.R
        while free:
            while len(self.sizes) < self.buffer_size and (chunk := pull()) is not None:
                self.counts["documents"] += len(chunk.docs)
                for ids, ref in chunk.documents():
                    self.restore(ids, ref)
            if not self.sizes:
                break
            i, n = choose_best_fit(self.sizes, free)
            length, ref = self.sizes.pop(i)
            row.append(self.buffer.pop(ref)[:n])
            free -= n
            self.counts["dropped"] += length - n
            if n < length <= self.R:
                self.counts["cut"] += 1
        if row:
            self.rows += 1
        return row

    def held(self):
        return list(self.buffer)

    def restore(self, ids, ref):
        insort(self.sizes, (len(ids), ref))
        self.buffer[ref] = ids[:self.R].copy()


def fill_gap(gap, lengths, copies):
    """
    Choose buffered documents that fill `gap` tokens exactly, or else as much of it as can be.

    lengths: sorted, distinct; copies[n]: the documents of n tokens. One document; else two, as near to each
    other in length as can be; else any number: subset sum, in one integer whose bit k says that some choice
    leaves k tokens open, the longest documents first, of one length 1, 2, 4, ... at a time.
    Example: lengths [2, 3, 4, 7], one copy each: gap=10 -> [7, 3];  gap=8 -> [7], one token stays open
    """
    if gap in copies:
        return [gap]
    half = bisect_right(lengths, gap // 2)
    for n in reversed(lengths[:half]):
        if gap - n in copies and (2 * n < gap or len(copies[n]) > 1):
            return [gap - n, n]
    left, steps = 1 << gap, []    # steps: (length, how many of it, what could be left open without them)
    for n in lengths[half:bisect_right(lengths, gap)]:
        left |= 1 << gap - n    # of those longer than half the gap only one can be part of a filling
    for length in reversed(lengths[:half]):
        available, n = min(len(copies[length]), gap // length), 1
        while available and not left & 1 and len(steps) * gap < MOST_BITS:
            n = min(n, available)
            steps.append((length, n, left))
            left |= left >> n * length
            available, n = available - n, 2 * n
        if left & 1:
            break
    chosen, still_open = [], (left & -left).bit_length() - 1
    for length, n, before in reversed(steps):
        if not before >> still_open & 1:
            chosen += [length] * n
            still_open += n * length
    return [gap - still_open, *chosen] if still_open < gap else chosen


MOST_BITS = 1 << 25    # that fill_gap keeps: 4 MB

# With tails="drop" a document is T + 1 tokens, and so many more that may fill a gap before them. Without them
# 6.7 % of the documents that fit a row were cut (20,358 source files, T = 2048), with them none.
SPARE = 64


class ExactFitPacker:
    """
    Rows filled exactly with whole documents; every piece of one begins with its BOS.

    The oldest document opens the row, so none waits for more rows than there were documents before it. One
    that is longer than a row fills rows of its own, the rest going to the back of the buffer each time. A gap
    is filled by fill_gap, with documents of which nothing was delivered yet, so that a document's rows stand
    far apart. Where no subset fits, the oldest long document gives what is missing and goes to the back, for
    it is cut anyway; only where there is none, the shortest that is longer does. `buffer_size` counts
    documents shorter than a row.
    """
    options, usual_buffer_size, chunk_size = ("buffer_size", "tails"), 256, None

    def __init__(self, T, buffer_size, tails):
        self.R, self.buffer_size, self.tails = T + 1, buffer_size, tails
        self.rows, self.counts = 0, collections.Counter()
        self.buffer = {}                     # Ref -> ids, oldest first
        self.long = collections.deque()      # Refs of those longer than a row, oldest first
        self.copies, self.lengths = {}, []   # length -> Refs of whole others, oldest first; its keys, sorted
        self.n_short = self.n_tokens = 0     # documents in `copies`; tokens of all

    def row(self, pull):
        while self._wants_more() and (chunk := pull()) is not None:
            self.counts["documents"] += len(chunk.docs)
            for ids, ref in chunk.documents():
                self._put(self._trimmed(ids) if len(ids) > self.R else ids, ref)
        if not self.buffer:
            return []
        row = self._deliver(next(iter(self.buffer)), self.R)
        gap = self.R - sum(map(len, row))
        if gap:
            filling = fill_gap(gap, self.lengths, self.copies)
            row += [self._pop(self.copies[length][0]) for length in filling]
            row += self._cut_to_fit(gap - sum(filling))
        self.rows += 1
        return row

    def _wants_more(self):
        """
        Until `size` short documents are there. Long ones are many tokens: of those no more than 2 * size rows
        of tokens, but at least size / 4 documents, which keep the rows of one apart. The buffer grows with
        the lane's first rows, from 32 documents on, so that the first batch of many lanes comes soon.
        """
        size = min(self.buffer_size, 32 + 4 * self.rows)
        return self.n_tokens < self.R or (self.n_short < size and (
            self.n_tokens < 2 * size * self.R or len(self.buffer) < size // 4))

    def _trimmed(self, ids):
        """A long document. Short ones soon leave; a view of this one would keep its row group in memory."""
        if self.tails == "keep":
            return ids.copy()
        self.counts["dropped"] += max(0, len(ids) - self.R - SPARE)
        return ids[:self.R + SPARE]

    def _cut_to_fit(self, missing):
        """Fill what no subset does; a row stays short only where a finite run has nothing more."""
        pieces = []
        while missing and self.buffer:
            i = bisect_right(self.lengths, missing)
            if self.long:
                ref = self.long[0]
            elif i < len(self.lengths):
                ref = self.copies[self.lengths[i]][0]
            else:
                ref = next(iter(self.buffer))
            piece = self._deliver(ref, missing)
            missing -= sum(map(len, piece))
            pieces += piece
        return pieces

    def _deliver(self, ref, most):
        """
        The arrays of a document's next tokens, at most so many; what is left goes to the back of the buffer.
        Example: 3 of [BOS a b c d] -> [BOS a b], with c d left; 3 of that -> [BOS c d]
        """
        ids, token = self._pop(ref), ref.token
        if token == 0:
            pieces, stop = [ids[:most]], most
        else:
            pieces, stop = [ids[:1], ids[token:token + most - 1]], token + most - 1
        if stop < len(ids):
            if token == 0 and len(ids) <= self.R:
                self.counts["cut"] += 1
            if self.tails == "keep" or most < self.R:
                self._put(ids, Ref(ref.epoch, ref.group, ref.doc, stop))
            else:
                self.counts["dropped"] += len(ids) - stop
        return pieces

    def _put(self, ids, ref):
        n = tokens_left(ids, ref)
        self.buffer[ref] = ids
        self.n_tokens += n
        if n > self.R:
            self.long.append(ref)
        elif ref.token == 0:
            self.n_short += 1
            if n not in self.copies:
                self.copies[n] = collections.deque()
                insort(self.lengths, n)
            self.copies[n].append(ref)

    def _pop(self, ref):
        """Always the oldest of its kind: of all, of the long ones, or of its length."""
        ids = self.buffer.pop(ref)
        n = tokens_left(ids, ref)
        self.n_tokens -= n
        if n > self.R:
            self.long.popleft()
        elif ref.token == 0:
            self.n_short -= 1
            self.copies[n].popleft()
            if not self.copies[n]:
                del self.copies[n]
                self.lengths.pop(bisect_left(self.lengths, n))
        return ids

    def held(self):
        return list(self.buffer)

    def restore(self, ids, ref):
        if self.tails == "drop":
            ids = ids[:self.R + SPARE]
        if ref.token < len(ids):    # else a shorter row drops what was left of it
            self._put(ids, ref)


def tokens_left(ids, ref):
    """To be delivered, with the BOS that a rest gets in front."""
    return len(ids) - ref.token + 1 if ref.token else len(ids)


PACKINGS: dict[str, Any] = {"flat": FlatPacker, "bestfit": BestFitPacker, "exactfit": ExactFitPacker}


# ---------------------------------------------------------------------------------------------------------
# Lanes: independent streams of rows

class Standing(NamedTuple):
    """Where a lane stands in one source: all that a state says of it. The default is the beginning."""
    next: Ref = Ref()         # of the next document to be pulled
    held: Iterable = ()       # the Refs in its packer, oldest first
    rows: int = 0             # it gave in all
    share: int | None = 0     # rows it gave since the shares of the sources began; None: it has no more

    def as_json(self):
        return {"next": list(self.next), "held": packed(self.held), "rows": self.rows, "share": self.share}

    @classmethod
    def from_json(cls, saved):
        share = None if saved["share"] is None else index(saved["share"])    # an error for what is no int
        return cls(Ref(*map(index, saved["next"])), unpacked(saved["held"]), index(saved["rows"]), share)


def packed(refs):
    """
    Refs as a short text: their bytes, first all first bytes, then all second ones, deflated. A thousand take
    3 to 4 KB in place of 15, and the states of 1,024 ranks are merged without a look at them.
    """
    table = np.array([*refs], "<i8").reshape(-1, 4).view(np.uint8).reshape(-1, 32)
    return base64.b64encode(zlib.compress(table.T.tobytes())).decode()


def unpacked(text):
    table = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(32, -1)
    return [Ref(*ref) for ref in np.ascontiguousarray(table.T).view("<i8").tolist()]


class Stream:
    """One source within one lane: its packer, and the chunks that it pulls."""

    def __init__(self, source, number, packer, chunks, standing, encoder):
        self.source, self.number, self.packer, self.chunks = source, number, packer, chunks
        self.encoder, self.to_restore, self.waited = encoder, standing.held, 0.0
        self.next, self.fed_in = standing.next, standing.next.epoch    # the last epoch that had a token
        self.rows_before = packer.rows = standing.rows

    def begin(self):
        """Have its first row groups read, while other lanes are at theirs."""
        first = next(self.source.deal(self.number, self.next))
        for ref in {ref[:2]: ref for ref in (first, *self.to_restore)}.values():
            self.encoder.row_groups.get(*self.source.find(ref)[:2])

    def row(self):
        """The arrays of the next row: T + 1 tokens, fewer in a finite run's last row, [] behind it."""
        if self.to_restore:
            found = self.encoder.encode_again(self.source, self.to_restore)
            for ref in self.to_restore:
                self.packer.restore(found[ref._replace(token=0)], ref)
            self.to_restore = ()
        return self.packer.row(self.pull)

    def pull(self):
        began = time.perf_counter()
        chunk = next(self.chunks, None)
        self.waited += time.perf_counter() - began
        if chunk is None:
            return None
        self.next = chunk.behind
        if chunk.docs:
            self.fed_in = self.next.epoch
        elif self.next.epoch > self.fed_in + 1:
            raise ValueError(f"a lane of {self.source.name} got no token for a whole epoch: all its "
                             "documents are null or left out; launch with fewer lanes, or look at the data")
        return chunk

    def standing(self, share):
        return Standing(self.next, self.to_restore or self.packer.held(), self.packer.rows, share)


def whose_turn(weights, shares):
    """
    Which source gives the lane's next row, so that after every row each has given its exact share of them to
    within one row (strictly). weights: positive integers by name; shares: rows so far of the sources that
    have more. Row n of a source, from 0, must stand behind row n * total / w of the lane and not behind
    (n + 1) * total / w; of the sources that may stand here, the one that is due first does.
    Source: Pfair scheduling, Baruah et al. 1996.
    Example: weights a: 2, b: 1 and shares from 0, 0 on -> a, b, a, and so on again
    """
    now, total = sum(shares.values()) + 1, sum(weights[name] for name in shares)
    due = [(-(-(n + 1) * total // weights[name]), name)
           for name, n in shares.items() if n * total // weights[name] < now]
    return min(due)[1]


class Lane:
    """The streams of one lane, one a source, taking turns by their weights."""

    def __init__(self, streams, weights, shares):
        self.streams, self.weights = streams, weights    # by name of the source
        self.shares = {name: share for name, share in shares.items() if share is not None}

    def row(self):
        """A source that ends leaves its share to the others, whose shares begin anew."""
        while self.shares:
            # One source needs no turns (0.6 us a row).
            name = whose_turn(self.weights, self.shares) if len(self.shares) > 1 else next(iter(self.shares))
            if row := self.streams[name].row():
                self.shares[name] += 1
                return row
            del self.shares[name]
            self.shares = dict.fromkeys(self.shares, 0)
        return []

    def standings(self):
        return {name: stream.standing(self.shares.get(name)) for name, stream in self.streams.items()}


def whole_numbers(weights):
    """In the same proportions: {"a": 0.7, "b": 0.2, "c": 0.1} -> {"a": 7, "b": 2, "c": 1}"""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(fraction.denominator for fraction in exact.values()))
    return {name: int(fraction * scale) for name, fraction in exact.items()}


# ---------------------------------------------------------------------------------------------------------
# Batches: rows from the lanes in turn, by a thread that works ahead, onto the device

CLOSED = "this PackedLoader was closed, or the program ends; make a new one and load the state into it"


class Position(NamedTuple):
    """Where a loader stands: rows of the run that it and the other ranks gave; {lane: {source: Standing}}."""
    rows: int
    lanes: dict


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    copied: Any           # CUDA event: the copy to the device is done; None on a CPU
    position: Position    # behind it
    full: bool            # no row is empty, as those of a lane that has ended are
    more: bool            # False: this batch and all behind it are empty


class Pipeline:
    """
    The threads and lanes of a loader from one position on. Another position is another Pipeline: what the
    old threads are still at, they do to lanes that nobody reads any more.
    """

    def __init__(self, lanes, encoder, rows, B, T, world_size, device, may_end, prefetch):
        self.lanes, self.encoder, self.most_ready = lanes, encoder, prefetch + 1
        self.B, self.R = B, T + 1
        self.turns, self.to_begin, self.n_to_begin = itertools.cycle(lanes), iter(lanes.values()), 2 * B
        self.may_end = may_end    # some source may: then rows can be short, or empty
        self.ahead = {}           # rows of lanes that were packed for a batch to come
        self.world_size, self.device = world_size, device
        self.position = Position(rows, {number: lane.standings() for number, lane in lanes.items()})
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.began, self.waited, self.packing_seconds = time.perf_counter(), 0.0, 0.0
        self.ready, self.error = collections.deque(), None
        # No Condition, nor what has one inside: a Ctrl-C in its Python code could leave it locked for ever.
        self.requests, self.wakes = queue.SimpleQueue(), queue.SimpleQueue()
        # No daemon: at exit that would be killed inside of Arrow's or torch's code, which aborts the process.
        threading.Thread(target=self._work_ahead, name="pack").start()

    def next_batch(self, position):
        """
        The batch behind the loader's position. It stays the first until its own position is the loader's: a
        Ctrl-C anywhere in next() loses none.
        """
        began = time.perf_counter()
        if self.ready and self.ready[0].position is position:
            self.ready.popleft()
        self.requests.put(True)
        while not self.wakes.empty():    # of batches that came before
            self.wakes.get()
        while not self.ready and self.error is None:
            self.wakes.get()
        if self.error is not None and not self.ready:
            raise self.error
        self.waited += time.perf_counter() - began
        return self.ready[0]

    def _work_ahead(self):
        try:
            if self.stream:    # else on GPU 0, where each rank would then keep a context of hundreds of MB
                torch.cuda.set_device(self.stream.device)
            while self._is_asked():
                while len(self.ready) < self.most_ready and self.error is None:
                    self.ready.append(self._pack_batch())
                    self.wakes.put(None)
        except BaseException as error:    # tiktoken's panics are no Exceptions
            self.error = self.error or error
        finally:
            self.close()
            self.encoder.close()

    def _is_asked(self):
        """Waits for a request; False where the loader is closed, or the program ends without closing it."""
        while threading.main_thread().is_alive():
            with contextlib.suppress(queue.Empty):
                return self.requests.get(timeout=0.2)
        return False

    def _pack_batch(self):
        began, B, R = time.perf_counter(), self.B, self.R
        for lane in itertools.islice(self.to_begin, self.n_to_begin):    # those of the next batch, too
            for stream in lane.streams.values():
                stream.begin()
        self.n_to_begin = B
        pieces, short, numbers = [], [], list(itertools.islice(self.turns, B))
        for b, number in enumerate(numbers):
            row = self.ahead.pop(number, None) or self.lanes[number].row()
            pieces += row
            if self.may_end and (n := sum(map(len, row))) < R:
                pieces.append(np.full(R - n, self.encoder.bos, self.encoder.dtype))
                short.append((b, n))
        # np.concatenate would let other threads run at every piece, and wait for its turn again.
        rows = np.frombuffer(b"".join(pieces), self.encoder.dtype).reshape(B, R)
        moved = {number: self.lanes[number].standings() for number in set(numbers)}
        self.position = Position(self.position.rows + B * self.world_size, {**self.position.lanes, **moved})
        n_empty = sum(n == 0 for _, n in short)
        more = n_empty < B or any(map(self._look_ahead, self.lanes))
        batch = Batch(*self._to_device(rows, short), self.position, n_empty == 0, more)
        self.packing_seconds += time.perf_counter() - began
        return batch

    def _look_ahead(self, number):
        """The next row of a lane, for a later batch: in this one's position it is not delivered yet."""
        if number not in self.ahead:
            self.ahead[number] = self.lanes[number].row()
        return self.ahead[number]

    def _to_device(self, rows, short):
        """inputs, targets, copied. New memory for every batch; on CUDA pinned, with a stream of its own."""
        inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        for b, n in short:
            targets[b, max(0, n - 1):] = -100
        both = torch.from_numpy(inputs), torch.from_numpy(targets)
        if self.stream is None:
            return *(part.to(self.device) for part in both), None
        with torch.cuda.stream(self.stream):
            both = [part.pin_memory().to(self.device, non_blocking=True) for part in both]
        return *both, self.stream.record_event()

    def close(self):
        """
        Have the threads end; whoever waits for a batch gets an error. Waits for nothing and takes no lock:
        the garbage collector may call it in any thread, also in one that is inside of executor.submit.
        """
        self.error = self.error or RuntimeError(CLOSED)
        self.requests.put(False)
        self.wakes.put(None)
        self.encoder.row_groups.closed = True    # what its threads begin from now on is an error


# ---------------------------------------------------------------------------------------------------------
# The loader

class PackedLoader(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """
    An iterator over (inputs, targets), int64 (B, T) on `device`; targets are inputs one token on.

    tokenizer: encode_documents(list of UTF-8 bytes or None) -> (ids, bounds) as in tokenizer.py, or
        nanochat's encode(list, prepend=id, num_threads=n), and get_bos_token_id(). Where it has
        fingerprint() -> str, states are checked by that, else by what it makes of some texts; dtype: of its
        ids (default uint32)
    packing: "flat", "bestfit" or "exactfit"; buffer_size: documents that it chooses from; tails (exactfit):
        "keep", or "drop" what lies beyond a row; tokenizer_batch_size (bestfit): documents of a refill
    data_dir: a folder or URI of shards, or {folder: weight}, the weights being shares of tokens; default:
        what dataset.py downloaded, else the built-in corpus
    rank, world_size: default: torch.distributed's where it is initialised, else RANK and WORLD_SIZE
    num_lanes: any multiple of world_size; every world size that divides it gives the same rows. Default: 8,
        or the least multiple of 8 that world_size divides; a state that is loaded brings its own
    shuffle_seed: None: documents as they lie; an int: another order in every epoch
    epochs: n, or {folder: n}: a finite run. Its last rows are completed with BOS whose targets are -100
        (torch's ignore_index); a source that ends leaves its share to the others. After a `break` the
        next `for` goes on, as with any iterator; after the end it begins the run again
    uneven: what the ranks of a finite run do where lanes differ in length, see InStep; "free": each rank
        ends by itself
    transform(ids, ref, place): what to deliver in place of a document's ids, see Encoder; integers may carry
        31 bits more, as in ids + (number << 32)
    threads: that encode; default: the cores of this rank. prefetch: batches made ahead
    cache: a folder on this node's disk for copies of shards that are far away, of CACHE_BYTES at most

    ValueError: an argument or a state that does not fit; ShardError, RuntimeError: a shard or document that
    cannot be read or encoded, by name. A yielded batch is never written again. Its threads end with it; where
    `transform` or the tokenizer refers to it, close it, or use `with`.
    """

    def __init__(self, tokenizer, B: int, T: int, split: str, *, packing: str = "exactfit",
                 tails: str = "keep", buffer_size: int | None = None,
                 data_dir: str | os.PathLike | dict | None = None,
                 rank: int | None = None, world_size: int | None = None, num_lanes: int | None = None,
                 shuffle_seed: int | None = None, epochs: int | dict | None = None, uneven: str = "pad",
                 device: str | torch.device = "cpu", threads: int | None = None, prefetch: int = 2,
                 tokenizer_batch_size: int = 128, transform: Callable | None = None,
                 cache: str | None = None):
        self.arguments = {key: value for key, value in locals().items() if key != "self"}
        if rank is None and world_size is None:
            rank, world_size = ranks_of_this_process()
        if rank is None or world_size is None:
            raise ValueError(f"rank={rank}, world_size={world_size}; pass both, or neither")
        self.rank, self.world_size = rank, world_size
        self.B, self.T, self.split = B, T, split
        self.packing, self.tails, self.uneven, self.transform = packing, tails, uneven, transform
        self.shuffle_seed, self.tokenizer_batch_size = shuffle_seed, tokenizer_batch_size
        self.device, self.prefetch, self.buffer_size = torch.device(device), prefetch, buffer_size
        if buffer_size is None and packing in PACKINGS:
            self.buffer_size = PACKINGS[packing].usual_buffer_size
        self.threads = cores_of_this_rank() if threads is None else threads
        check_arguments(self)
        self.num_lanes = math.lcm(8, self.world_size) if num_lanes is None else num_lanes
        self.tokenizer, self.face = tokenizer, as_encoder(tokenizer)
        self.weights, self.epochs = sources_of(data_dir, epochs)
        self.sources: dict[str, Source] = {}
        for name in sorted(self.weights):    # by name: then whose turn it is, too
            self.sources[name] = Source(name, list_shards(name, split, cache), self.num_lanes, shuffle_seed)
        self._positions = collections.deque([self._beginning()], maxlen=65)    # the last: where to go on
        self._pipeline, self._in_step = None, None
        if all(self.epochs.values()) and uneven != "free":    # one source without end: a run without end
            self._in_step = InStep(self)
        self._finished = self._closed = False
        self._pid, self._lock = os.getpid(), threading.Lock()
        # Shared with forks: the process of the DataLoader worker that iterates, or 0
        self._worker = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    # Going on from a position ----------------------------------------------------------------------------

    def _beginning(self):
        mine = lanes_of_rank(0, self.rank, self.world_size, self.num_lanes)
        return Position(0, {number: dict.fromkeys(self.sources, Standing()) for number in mine})

    def _start(self):
        """Threads, lanes, packers; in the process that iterates, when it begins to."""
        if self._closed:
            raise RuntimeError(CLOSED)
        check_ranks(self)
        if get_worker_info() is not None:
            self._worker[0] = os.getpid()
        rows, standings = self._positions[-1]
        far = any("://" in name for name in self.sources)    # there, waiting takes the time; here, 4 keep up
        encoder = Encoder(self.face, self.threads, self.transform, 16 if far else min(4, self.threads))
        lanes = {number: self._make_lane(encoder, number, standings[number])
                 for number in lanes_of_rank(rows, self.rank, self.world_size, self.num_lanes)}
        self._pipeline = Pipeline(lanes, encoder, rows, self.B, self.T, self.world_size, self.device,
                                  any(self.epochs.values()), self.prefetch)
        if self._closed:    # meanwhile, by another thread
            self._pipeline.close()
        return self._pipeline

    def _make_lane(self, encoder, number, standings):
        n_streams = self.num_lanes // self.world_size * len(self.sources)
        streams, shares = {}, {}
        for name, source in self.sources.items():
            standing = standings[name]
            packer = PACKINGS[self.packing](self.T, **self._packer_options())
            chunks = encoder.chunks(source, number, standing.next, self.epochs[name], packer.chunk_size,
                                    n_streams)
            streams[name] = Stream(source, number, packer, chunks, standing, encoder)
            shares[name] = standing.share
        return Lane(streams, whole_numbers(self.weights), shares)

    def _packer_options(self):
        return {name: getattr(self, name) for name in PACKINGS[self.packing].options}

    # Iterating -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        check_who_iterates(self)
        if self._finished:    # the same run again, as with any other iterable
            self._go_to(self._beginning())
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock_of_this_process():
            if self._closed:
                raise RuntimeError(CLOSED)
            if self._finished:
                raise StopIteration
            pipeline = self._pipeline or self._start()
            batch = pipeline.next_batch(self._positions[-1])
            more = self._in_step.more(self, batch) if self._in_step else batch.more
            if not more:
                self._finished = True
                raise StopIteration
            tensors = batch.inputs, batch.targets
            if batch.copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(batch.copied)
                for tensor in tensors:
                    tensor.record_stream(stream)
            self._positions.append(batch.position)    # last: what is interrupted before it is done again
            return tensors

    def _lock_of_this_process(self):
        if self._pid != os.getpid():    # behind a fork, threads and locks are those of another process
            self._pid, self._lock, self._pipeline = os.getpid(), threading.Lock(), None
        return self._lock

    @property
    def rows(self) -> int:
        """Of the run, by all ranks, before the next batch."""
        return self._positions[-1].rows

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __repr__(self):
        return (f"PackedLoader({' + '.join(self.sources)}, {self.split}, {self.packing}, B={self.B}, "
                f"T={self.T}, rank {self.rank} of {self.world_size}, {self.num_lanes} lanes, "
                f"row {self.rows:,})")

    def close(self) -> None:
        """Stop the threads. In a finite run on several ranks the others get an error."""
        self._closed = True
        for part in (self._pipeline, self._in_step):
            if part is not None and self._pid == os.getpid():    # behind a fork it is another process's
                part.close()

    def __del__(self):
        if not getattr(self, "_closed", True):
            self.close()

    def __getstate__(self):
        raise TypeError("a PackedLoader has threads and cannot be pickled: pass DataLoader num_workers=0, or "
                        'multiprocessing_context="fork"')

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self, batches_ago: int = 0) -> dict:
        """
        Load this and the next batch is the one that would have come next. Plain JSON: references to
        documents, never tokens. It holds this rank's lanes; merge_states joins those of all ranks.
        batches_ago: of an earlier batch, at most 64 back: 1 for those who fetch one batch ahead.
        """
        check_who_saves(self)
        if not 0 <= batches_ago < len(self._positions):
            raise ValueError(f"batches_ago={batches_ago}: expected 0 to {len(self._positions) - 1}")
        rows, lanes = self._positions[-1 - batches_ago]
        return {"version": VERSION, "rows": rows, "config": config_of(self),
                "sources": {name: describe(self, source) for name, source in self.sources.items()},
                "lanes": {str(number): {name: standing.as_json() for name, standing in lane.items()}
                          for number, lane in lanes.items()}}

    def load_state_dict(self, state: dict) -> None:
        """
        Go on where a state ends; also on a loader that was iterated, and at another T, B or world size.
        ValueError, and nothing changed, where it does not fit.
        """
        with self._lock_of_this_process():
            num_lanes, sources, position = read_state(self, state)
            self._go_to(position, num_lanes=num_lanes, sources=sources)

    def _go_to(self, position, **of_its_run):
        """In one step: a Ctrl-C finds the old run or the new one."""
        old, positions = self._pipeline, collections.deque([position], maxlen=65)
        vars(self).update(of_its_run, _positions=positions, _pipeline=None, _finished=False)
        if old is not None:
            old.close()

    def stats(self) -> dict:
        """
        Since the first batch or the last load, in this process, prefetched batches included: tokens,
        documents and rows packed; the share of documents that fit a row and yet were cut; documents that
        were null, or that `transform` left out; seconds that next() waited, and that threads spent reading,
        encoding (both summed over threads) and packing. Per source under "sources".
        """
        if self._pipeline is None:
            return {}
        pipeline, encoder = self._pipeline, self._pipeline.encoder
        streams = [stream for lane in pipeline.lanes.values() for stream in lane.streams.values()]
        total = count_packed(streams, self.T)
        seconds, waited = time.perf_counter() - pipeline.began, sum(stream.waited for stream in streams)
        return {**total, "rows_per_second": total["rows"] / seconds, "waited_s": pipeline.waited,
                "engine_failures": self.face.engine_failures,
                "tokens_encoded": encoder.counts["tokens"], "null_documents": encoder.counts["nulls"],
                "left_out_documents": encoder.counts["left_out"],
                "reading_s": encoder.row_groups.seconds, "encoding_s": encoder.seconds,
                "packing_s": pipeline.packing_seconds - waited,
                "sources": {name: count_packed([s for s in streams if s.source is source], self.T)
                            for name, source in self.sources.items()}}


def count_packed(streams, T):
    counts = {name: sum(stream.packer.counts[name] for stream in streams)    # iterated, one may be growing
              for name in ("documents", "dropped", "cut")}
    rows = sum(stream.packer.rows - stream.rows_before for stream in streams)
    return {"rows": rows, "documents": counts["documents"], "tokens_delivered": rows * T,
            "tokens_dropped": counts["dropped"], "cut_share": counts["cut"] / max(1, counts["documents"])}


def lanes_of_rank(rows, rank, world_size, num_lanes):
    """This rank's lanes in the order of their turns, from row `rows` of the run on."""
    return [(rows + rank + i * world_size) % num_lanes for i in range(num_lanes // world_size)]


def ranks_of_this_process():
    """(rank, world size): torch.distributed's where it is initialised, else those in the environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        there = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        raise ValueError(f"of RANK and WORLD_SIZE only {there}={os.environ[there]} is set; make the loader "
                         "when torch.distributed is initialised, or pass rank=... and world_size=...")
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):    # srun or mpirun, which set no RANK
        if int(os.environ.get(name, 1)) > 1:
            raise ValueError(f"{name}={os.environ[name]}, but no RANK: each of these processes would get the "
                             "same rows; make the loader when torch.distributed is initialised, or pass "
                             "rank=... and world_size=...")
    return 0, 1


def cores_of_this_rank():
    """The cores that this process may use, shared among the ranks of its node."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


# ---------------------------------------------------------------------------------------------------------
# Ends: the one place that knows a process group

class InStep:
    """
    Ends a finite run on all ranks together: one small message a batch. uneven says what to do where lanes
    differ in length:

    "pad": go on with rows whose targets are all -100 until the longest lane is done (the mean loss of a batch
    of such rows is NaN: sum, and divide by the targets of all ranks); "stop" with the shortest; "error":
    ValueError. RuntimeError on the others where a rank is lost. All ranks make it together.
    """

    def __init__(self, loader):
        check_group(loader)
        self.uneven = loader.uneven
        self.group = dist.new_group(backend="gloo") if loader.world_size > 1 else None

    def more(self, loader, batch):
        """Whether the batch is part of the run."""
        more, lacking = self._over_ranks(torch.tensor([batch.more, not batch.full], dtype=torch.int64))
        if lacking and self.uneven == "error":
            check_even(self._over_ranks(rows_of_lanes(loader)))
        return more and not (lacking and self.uneven == "stop")

    def _over_ranks(self, numbers):
        try:
            if self.group is not None:
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError("this finite run has lost a rank: it ended, or closed its loader, too "
                               "soon") from error
        return numbers.tolist()

    def close(self):
        group, self.group = self.group, None
        with contextlib.suppress(RuntimeError, ValueError):    # where all groups were destroyed already
            if group is not None:
                dist.destroy_process_group(group)


def rows_of_lanes(loader):
    """Of the whole run; what is left of it is packed for this number, and not delivered."""
    rows = torch.zeros(loader.num_lanes, dtype=torch.int64)
    loader._pipeline.close()
    loader._start()
    for number, lane in loader._pipeline.lanes.items():
        while lane.row():
            pass
        rows[number] = sum(stream.packer.rows for stream in lane.streams.values())
    return rows


# ---------------------------------------------------------------------------------------------------------
# States: plain JSON in three parts
#
# config    what must be the same for the rows to be the same
# sources   weight, epochs and shards of each; other shards are an error, any other difference only means
#           that the shares of the sources begin anew
# lanes     by lane and source: the Ref of the next document, the Refs held (packed), rows, share of the rows

VERSION = 3    # rows of a version never change


def config_of(loader):
    """T is not in it, nor are B, the world size or threads: references do not depend on them."""
    (dealing,) = {source.dealing for source in loader.sources.values()}
    transform = loader.arguments["transform"]    # not trace's
    return {"split": loader.split, "num_lanes": loader.num_lanes, "dealing": dealing,
            "shuffle_seed": loader.shuffle_seed, "packing": loader.packing, **loader._packer_options(),
            "tokenizer": loader.face.fingerprint,
            "transform": getattr(transform, "__name__", type(transform).__name__) if transform else None}


def describe(loader, source):
    return {"weight": loader.weights[source.name], "epochs": loader.epochs[source.name],
            "shards": [list(pair) for pair in source.history], "fingerprint": fingerprint_of(source.shards)}


def read_state(loader, state):
    """-> the number of lanes, the sources and the Position of a loader that goes on where the state ends"""
    check_version(state)
    try:
        num_lanes = check_config(loader, state["config"])
        saved, lanes = match_sources(loader, state)
        rows, sources = index(state["rows"]), {}
        mine = lanes_of_rank(rows, loader.rank, loader.world_size, num_lanes)
        check_lanes(mine, lanes, num_lanes)
        for name, source in loader.sources.items():
            history = history_of(source, saved[name], lanes, num_lanes) if name in saved else ()
            sources[name] = type(source)(name, source.shards, num_lanes, loader.shuffle_seed, history)
        standings = {}
        for number, lane in [(number, lanes[str(number)]) for number in mine]:
            standings[number] = {name: Standing.from_json(lane[name]) if name in saved else Standing()
                                 for name in sources}
            for name, standing in standings[number].items():
                check_place(sources[name], standing.next)
    except (KeyError, TypeError, AttributeError, IndexError, binascii.Error, zlib.error) as error:
        raise ValueError(f"this state is damaged ({type(error).__name__}: {error}); load it as "
                         "state_dict() gave it") from error
    if saved != {name: describe(loader, source) for name, source in sources.items()}:
        standings = {number: {name: standing._replace(share=0) for name, standing in lane.items()}
                     for number, lane in standings.items()}
        report_weights(loader, saved)
    return num_lanes, sources, Position(rows, standings)


def match_sources(loader, state):
    """The state's sources and lanes. Known by name; where both sides have one only, it may have moved."""
    sources, lanes = state["sources"], state["lanes"]
    if len(sources) == len(loader.sources) == 1 and sources.keys() != loader.sources.keys():
        (old,), (new,) = sources, loader.sources
        sources = {new: sources[old]}
        lanes = {number: {new: part[old]} for number, part in lanes.items()}
    if not sources.keys() & loader.sources.keys():
        raise ValueError(f"sources of the state are {sorted(sources)}, of this loader "
                         f"{sorted(loader.sources)}; name at least one as it was, or start anew")
    return sources, lanes


def history_of(source, saved, lanes, num_lanes):
    """From which epoch on how many shards count: those that were appended, from the next of every lane on."""
    history, shards = saved["shards"], source.shards
    n = history[-1][1]
    ours = fingerprint_of(shards[:n])
    if ours != saved["fingerprint"]:
        raise ValueError(
            f"shards of {source.name}: the state knows {n} with fingerprint {saved['fingerprint']}, here are "
            f"{len(shards)} with {ours}; put the same files back (names and sizes), or start anew")
    if len(shards) == n:
        return history
    check_lanes(range(num_lanes), lanes, num_lanes, f"{len(shards) - n} shards more in {source.name}: ")
    latest = max(Ref(*lane[source.name]["next"]).epoch for lane in lanes.values())
    return [*history, [latest + 1, len(shards)]]


def gather_states(loader, batches_ago: int = 0) -> dict | None:
    """
    merge_states of all ranks of torch.distributed, on rank 0; None on the others. Called by all together.
    The states travel as bytes of JSON over gloo or whatever takes CPU tensors: nothing is unpickled.
    """
    state = loader.state_dict(batches_ago)
    if not (dist.is_available() and dist.is_initialized()):
        return merge_states([state])
    data = json.dumps(state).encode()
    size = torch.tensor(len(data))
    dist.all_reduce(size, dist.ReduceOp.MAX)
    padded = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(padded, parts)
    return merge_states([json.loads(part.numpy().tobytes()) for part in parts]) if parts else None


def merge_states(states: list) -> dict:
    """The states of all ranks, taken at one step, as one that every allowed world size loads."""
    if not states:
        raise ValueError("no states to merge; pass those of all ranks, taken at one step")
    for state in states:
        check_version(state)
        for key in ("rows", "config", "sources"):
            if state[key] != states[0][key]:
                raise ValueError(f"states of different steps or runs: {key} is {states[0][key]!r} in one and "
                                 f"{state[key]!r} in another; merge states taken at the same step")
    lanes = {number: part for state in states for number, part in state["lanes"].items()}
    num_lanes = states[0]["config"]["num_lanes"]
    check_lanes(range(num_lanes), lanes, num_lanes)
    return {**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


# ---------------------------------------------------------------------------------------------------------
# What a batch holds: the documents of its tokens, and where they begin

class Piece(NamedTuple):
    """Consecutive tokens of a document in a row: start to stop - 1 of its ids, its BOS being token 0."""
    place: Place
    ref: Ref
    start: int
    stop: int


def trace(loader, state: dict | None = None) -> Iterator[list[list[Piece]]]:
    """
    Yields, for each batch behind a state (default: where the loader stands), B lists of the row's Pieces.

    It is the same loader over documents whose "ids" are places, so the answer cannot differ from what was
    trained on, and costs as much as packing those batches again. A piece after the first of a document is
    its BOS, then the rest: two Pieces.
    """
    found, numbers = {}, itertools.count(1)

    def places(ids, ref, place):
        if loader.transform is not None and (ids := loader.transform(ids, ref, place)) is None:
            return None
        number = next(numbers)
        found[number] = place, ref
        return np.arange(len(ids)) + (number << 32)

    state = loader.state_dict() if state is None else state
    changed = {"rank": loader.rank, "world_size": loader.world_size, "uneven": "free", "device": "cpu"}
    with PackedLoader(**loader.arguments | changed) as tracer:
        tracer.transform = places
        tracer.load_state_dict(state)
        for inputs, targets in tracer:
            rows = torch.cat([inputs[:, :1], targets], dim=1).numpy()
            yield [pieces_of_row(row, found) for row in rows]


def pieces_of_row(row, found):
    cuts = [0, *(np.flatnonzero(np.diff(row) != 1) + 1).tolist(), len(row)]
    pieces = []
    for a, b in itertools.pairwise(cuts):
        number, start = int(row[a]) >> 32, int(row[a]) & 0xFFFFFFFF
        if number in found:    # else what completes the last rows of a finite run
            place, ref = found[number]
            pieces.append(Piece(place, ref, start, start + b - a))
    return pieces


# ---------------------------------------------------------------------------------------------------------
# nanochat's four generators

class NanochatSource(Source):
    """Dealt as nanochat deals: lane k begins with row group k in every shard."""
    dealing = "row groups of each shard in turn"

    def _order(self, epoch):
        """-1: no row group, to fill up the turn of a shard's last ones."""
        check_enough_row_groups(self)
        padded, n_shards = [], [n for since, n in self.history if since <= epoch][-1]
        for first, behind in itertools.pairwise(self.first_group[:n_shards + 1]):
            padded += [np.arange(first, behind), np.full((first - behind) % self.num_lanes, -1)]
        numbers = np.concatenate(padded)
        return Order(numbers, np.zeros_like(numbers), 1)

    def deal(self, lane, start, epochs=None):
        for ref in super().deal(lane, start, epochs):
            if self.order(ref.epoch).numbers[ref.group] >= 0:
                yield ref


def batches_with_state(packing, tokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4,
                       tokenizer_batch_size: int = 128, device: str | torch.device = "cuda",
                       resume_state_dict: dict | None = None, buffer_size: int | None = None
                       ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict]]:
    """One lane a rank, as in nanochat; the state also says epoch, shard and row group, which it prints."""
    _, world_size = ranks_of_this_process()
    name_other_folder(default_data_dir())
    loader = PackedLoader(tokenizer, B, T, split, packing=packing, buffer_size=buffer_size,
                          data_dir=default_data_dir(), num_lanes=world_size, device=device,
                          threads=tokenizer_threads, tokenizer_batch_size=tokenizer_batch_size)
    loader.sources = {name: NanochatSource(name, source.shards, world_size)
                      for name, source in loader.sources.items()}
    if resume_state_dict is not None:
        loader.load_state_dict(resume_state_dict)
    (source,) = loader.sources.values()
    for inputs, targets in loader:
        state = loader.state_dict()
        ((standing,),) = [lane.values() for lane in state["lanes"].values()]
        ref = Ref(*standing["next"])
        shard, row_group, _ = source.find(ref)
        yield inputs, targets, {**state, "epoch": ref.epoch, "pq_idx": source.shards.index(shard),
                                "rg_idx": row_group}


def batches_without_state(*args, **kwargs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, targets, _ in batches_with_state(*args, **kwargs):
        yield inputs, targets


# "bestfit" gives nanochat's rows token for token.
tokenizing_distributed_data_loader_with_state = partial(batches_with_state, "flat")
tokenizing_distributed_data_loader = partial(batches_without_state, "flat")
tokenizing_distributed_data_loader_with_state_bos_bestfit = partial(batches_with_state, "bestfit")
tokenizing_distributed_data_loader_bos_bestfit = partial(batches_without_state, "bestfit")


# ---------------------------------------------------------------------------------------------------------
# Guards: what refuses arguments, states and surroundings that do not fit

def check_arguments(loader):
    choices = {"split": ("train", "val"), "packing": tuple(PACKINGS), "tails": ("keep", "drop"),
               "uneven": ("pad", "stop", "error", "free")}
    for name, allowed in choices.items():
        if getattr(loader, name) not in allowed:
            raise ValueError(f"{name}={getattr(loader, name)!r}; choose one of {', '.join(allowed)}")
    given = loader.arguments | vars(loader)    # which have the defaults of what was left out
    least = {"B": 1, "T": 1, "world_size": 1, "rank": 0, "num_lanes": 1, "buffer_size": 1,
             "tokenizer_batch_size": 1, "threads": 1, "prefetch": 0, "shuffle_seed": 0}
    for name, low in least.items():
        n = given[name]
        may_be_left_out = name in ("shuffle_seed", "num_lanes") and n is None
        if not may_be_left_out and (type(n) is not int or n < low):
            raise ValueError(f"{name}={n!r}; expected an int, {low} or more")
    if not 0 <= loader.rank < loader.world_size:
        raise ValueError(f"rank={loader.rank} of world_size={loader.world_size}; ranks count from 0")
    check_shared(given["num_lanes"] or loader.world_size, loader.world_size)


def check_shared(lanes, world_size):
    if lanes % world_size:
        divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
        raise ValueError(f"{lanes} lanes cannot be shared evenly by {world_size} ranks; choose a world "
                         f"size in {divisors}, or for a new run num_lanes a multiple of {world_size}")


def sources_of(data_dir, epochs):
    """data_dir and epochs as {source: weight} and {source: epochs}."""
    if isinstance(data_dir, list | tuple | set) or data_dir == {}:
        raise ValueError(f"data_dir={data_dir!r}; expected a folder, or {{folder: weight}} for one or more")
    given = data_dir if isinstance(data_dir, dict) else {find_data(data_dir and os.fspath(data_dir)): 1}
    weights = {source_name(path): weight for path, weight in given.items()}
    if len(weights) < len(given):
        raise ValueError(f"data_dir names a source twice: {', '.join(map(str, given))}; name each once, with "
                         "its whole weight")
    for name, weight in weights.items():
        if type(weight) not in (int, float) or not 0 < weight < float("inf"):
            raise ValueError(f"weight {weight!r} of source {name}; a weight is a positive number, a share "
                             "of the tokens")
    epochs = ({source_name(path): n for path, n in epochs.items()} if isinstance(epochs, dict)
              else dict.fromkeys(weights, epochs))
    if unknown := epochs.keys() - weights.keys():
        raise ValueError(f"epochs names {sorted(unknown)}, data_dir has {sorted(weights)}")
    for n in epochs.values():
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"epochs={n!r}; expected an int, 1 or more, or None: without end")
    return weights, {name: epochs.get(name) for name in weights}


def source_name(path):
    """a, a/ and ./a are one source."""
    return str(path).rstrip("/") if "://" in str(path) else os.path.normpath(path)


def check_enough_documents(source, n):
    if n < source.num_lanes:
        raise ValueError(f"{n} documents in {len(source.shards)} shards ({source.shards[-1].path}) cannot "
                         f"feed {source.num_lanes} lanes; launch with num_lanes (and a world size) of at "
                         f"most {n}, or add data")


def check_ranks(loader):
    """A group that came into being since the loader was made would give every rank the same rows."""
    asked = loader.arguments["rank"] is not None
    if not asked and (loader.rank, loader.world_size) != (found := ranks_of_this_process()):
        raise RuntimeError(f"this loader was made for rank {loader.rank} of {loader.world_size}, but here is "
                           f"rank {found[0]} of {found[1]}; make it when torch.distributed is initialised, "
                           f"or pass rank={found[0]}, world_size={found[1]}")


def check_enough_row_groups(source):
    most = max(len(shard.rows) for shard in source.shards)
    if most < source.num_lanes:
        raise ValueError(f"no shard of {source.name} has more than {most} row groups, so that of "
                         f"{source.num_lanes} ranks the last get none; use PackedLoader, which deals parts")


def check_who_iterates(loader):
    frame, info = sys._getframe(2), get_worker_info()
    while frame is not None:    # there is no other sign of what Accelerate does with a loader's batches
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            raise RuntimeError("Accelerate gives rank 0's batches of a DataLoader to all ranks, and fetches "
                               "one ahead of the state; iterate over the PackedLoader itself, not prepared, "
                               "or return it from Trainer.get_train_dataloader")
        frame = frame.f_back
    if info is not None and loader._worker[0] not in (0, os.getpid()) and not all(loader.epochs.values()):
        raise ValueError("another DataLoader worker has iterated over this loader, and this one would begin "
                         "where it began; go on with one iterator, or use torchdata's StatefulDataLoader")
    if info is not None and info.num_workers > 1:
        raise ValueError(f"PackedLoader has threads of its own; {info.num_workers} DataLoader workers "
                         "would each deliver the same rows: pass num_workers=0 (fastest) or 1")
    if info is not None and loader._in_step and loader.world_size > 1:
        raise ValueError("the ranks of a finite run talk, which a DataLoader worker cannot: pass "
                         'num_workers=0, or to this loader uneven="free"')


def check_who_saves(loader):
    if loader._worker[0] not in (0, os.getpid()):
        raise RuntimeError("a DataLoader worker iterates over this loader, and knows its state; "
                           "use torchdata's StatefulDataLoader and its state_dict, or num_workers=0")
    if sys._getframe(2).f_globals.get("__name__", "").endswith("utilities.combined_loader"):
        raise RuntimeError("Lightning saves rank 0's state alone, and one batch late; pass it "
                           "map(tuple, loader) with limit_train_batches=..., and save gather_states(loader) "
                           "in a LightningDataModule's state_dict(), as dev/loops.md shows")


def check_group(loader):
    if loader.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"a finite run (epochs) keeps {loader.world_size} ranks in step through "
                         "torch.distributed; call torch.distributed.init_process_group() before, or "
                         'pass uneven="free" and let every rank end by itself')


def check_even(counts):
    if min(counts) < max(counts):
        raise ValueError('uneven="error": the lanes have different numbers of rows: ' + ", ".join(
            f"lane {number}: {rows}" for number, rows in enumerate(counts)))


def check_version(state):
    if not isinstance(state, dict):
        raise ValueError(f"a state is a dict, as state_dict() gives it, not {state!r:.40}")
    if "version" not in state and {"pq_idx", "rg_idx"} <= state.keys():
        raise ValueError("this is a state of nanochat's own loader: it says where rank 0 was, and neither "
                         "which documents were buffered nor where the other ranks were, so no loader goes on "
                         "exactly from it; start anew, or set `next` of each lane in a fresh state_dict()")
    if state.get("version") != VERSION:
        raise ValueError(f"this state has version {state.get('version')!r}, this code reads {VERSION}; "
                         "resume with the code that wrote it")
    if lacking := {"rows", "config", "sources", "lanes"} - state.keys():
        raise ValueError(f"this state lacks {sorted(lacking)}; load it as state_dict() gave it")


def check_config(loader, saved):
    """The state's number of lanes, which becomes the loader's unless it was asked for another."""
    ours, lanes = config_of(loader), saved["num_lanes"]
    if loader.arguments["num_lanes"] is None:
        ours["num_lanes"] = lanes
    differences = [f"{key} of the state is {saved.get(key, 'not there')!r}, of this loader "
                   f"{ours.get(key, 'not there')!r}" for key in {**saved, **ours}
                   if saved.get(key, "not there") != ours.get(key, "not there")]
    if differences:
        raise ValueError(f"{'; '.join(differences)}; resume with the same, or start a new run without the "
                         "state")
    check_shared(lanes, loader.world_size)
    return lanes


def check_lanes(needed, lanes, num_lanes, why=""):
    if missing := [number for number in needed if str(number) not in lanes]:
        raise ValueError(f"{why}the state lacks lanes {missing} of {num_lanes}, as one rank's does; merge "
                         "the states of all ranks, taken at one step: merge_states([...])")


def check_place(source, ref):
    n_groups = len(source.order(ref.epoch).numbers) if ref.epoch > 0 else 0
    if not (0 <= ref.group < n_groups and 0 <= ref.doc <= len(source.find(ref)[2])):
        raise ValueError(f"the state goes on at {ref}, and {source.name} has no such document ({n_groups} "
                         "row groups an epoch, or parts of them); epochs count from 1, the rest from 0")


def report_weights(loader, saved):
    """On rank 0, a line for each source that has another weight now."""
    for name in saved | loader.weights:
        was, now = saved.get(name, {"weight": 0})["weight"], loader.weights.get(name, 0)
        if was != now and loader.rank == 0:
            begins = "" if was else "; it begins at its first document"
            print(f"data: source {name}: weight {was} -> {now}{begins}")

