"""
Pack documents from parquet shards into (B, T) batches for pretraining, with threads in one process.

    loader = PackedLoader(get_tokenizer(), B=32, T=2048, split="train", data_dir="my_shards")
    inputs, targets = next(loader)        # int64 (B, T) each
    state = loader.state_dict()           # loading it resumes with exactly the next batch

    shards -> Source.deal -> read -> encode -> packer.row(pull) -> lane -> batch -> (inputs, targets)

Each stage pulls from the one on its left. Read dev/reference.py first: all rules except packing, and no
threads. Row groups are dealt to lanes, and row g of the run comes from lane g % num_lanes, for any number of
ranks. The trade-off: states are small (references, no tokens), but a resume re-encodes buffered documents.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import math
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dataset import Shard, column_views, cores, find_data, in_order, is_text, list_shards
from tokenizer import as_encoder

# ---------------------------------------------------------------------------------------------------------
# Sources: which documents go to which lane

class Ref(NamedTuple):
    """A place in a source. Refs compare in reading order."""
    epoch: int = 1
    group: int = 0    # index of the row group (or part of one) in the epoch's order
    doc: int = 0      # index of the document in this group's order
    token: int = 0    # index of the document's next token to deliver


def shuffled(n, seed, *key):
    """Permute range(n) by (seed, *key); without a seed, keep its order. PCG64's raw stream never changes."""
    if seed is None:
        return np.arange(n)
    return np.argsort(np.random.PCG64((seed, *key)).random_raw(n), kind="stable")


class Source:
    """
    The shards of one folder, and how their documents are dealt to lanes: row group k of an epoch's order goes
    to lane k % num_lanes. With fewer row groups than lanes, each is split into the fewest interleaved parts
    that give every lane a document.
    """

    def __init__(self, name: str, shards: list[Shard], num_lanes: int, seed: int | None = None):
        self.name, self.shards, self.num_lanes, self.seed = name, shards, num_lanes, seed
        self.first_group = np.cumsum([0, *(len(shard.rows) for shard in shards)])
        self.group_sizes = np.array([n for shard in shards for n in shard.rows], np.int64)
        named = [[shard.name, shard.size] for shard in shards]    # size: the text's, even for token shards
        self.fingerprint = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
        self.order = lru_cache(maxsize=4)(self._order)

    def _order(self, epoch):
        """
        An epoch's order: (row group numbers across all shards, the part of each, number of parts).
        Example: 2 row groups for 3 lanes -> [0, 0, 1, 1], [0, 1, 0, 1], 2
        """
        sizes, n_parts = self.group_sizes, 1
        numbers = np.flatnonzero(sizes)
        while np.minimum(sizes[numbers], n_parts).sum() < self.num_lanes:
            n_parts += 1
        numbers = numbers[shuffled(len(numbers), self.seed, epoch, 0)]
        counts = np.minimum(sizes[numbers], n_parts)
        part_of = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(numbers, counts), part_of, n_parts

    def deal(self, lane, start, epochs=None):
        """Yield the first Ref of each row group of a lane, from `start` on; endless without `epochs`."""
        epoch, group = start.epoch, start.group
        while epochs is None or epoch <= epochs:
            first = group + (lane - group) % self.num_lanes
            for group in range(first, len(self.order(epoch)[0]), self.num_lanes):
                yield Ref(epoch, group, start.doc if (epoch, group) == start[:2] else 0)
            epoch, group = epoch + 1, 0

    def find(self, ref):
        """(shard, row group, rows) for a Ref. rows: indices in that row group, in reading order."""
        numbers, part_of, n_parts = self.order(ref.epoch)
        number = int(numbers[ref.group])
        shard = int(bisect_right(self.first_group, number)) - 1
        rows = shuffled(int(self.group_sizes[number]), self.seed, ref.epoch, 1, number)
        return self.shards[shard], number - int(self.first_group[shard]), rows[part_of[ref.group]::n_parts]


# ---------------------------------------------------------------------------------------------------------
# Encoding: row groups to (ids, Ref) pairs, by threads, ahead of the packers and in order

class Location(NamedTuple):
    path: str
    row_group: int
    row: int


class Task(NamedTuple):
    refs: list[Ref]     # one row group's documents, encoded together
    shard: Shard
    row_group: int
    rows: np.ndarray    # index of each document in the row group
    array: Future       # the whole row group


TASK_BYTES = 1 << 18    # bytes of compressed text per task
CHECK_EVERY = 1000      # our tokenizer also encodes one document in 1,000 with tiktoken, as a check

class Encoder:
    """
    Turns documents into ids, in its own threads. transform(ids, ref, location) takes a document's ids (int64,
    BOS first) and returns those to deliver, or None to filter it out. It runs in these threads whenever a
    document is encoded, so it must depend only on its arguments. A state stores only its name.
    """

    def __init__(self, tokenizer, threads, transform=None):
        self.tokenizer, self.threads, self.transform = as_encoder(tokenizer), threads, transform
        self.bos, self.dtype = self.tokenizer.bos, np.dtype(np.int64) if transform else self.tokenizer.dtype
        self.executor = ThreadPoolExecutor(1 if self.tokenizer.is_multithreaded else threads, "encode")
        self.readers = ThreadPoolExecutor(8, "read")    # 8: remote reads mostly wait
        self.row_groups = weakref.WeakValueDictionary()    # Futures, alive as long as some task holds them

    def read(self, shard, row_group):
        future = self.row_groups.get((shard.path, row_group)) or self.readers.submit(shard.read, row_group)
        self.row_groups[shard.path, row_group] = future
        return future

    def documents(self, source, lane, start, epochs=None, n_streams=1):
        """An iterator of (ids, Ref). ids: empty for null documents, None for filtered ones."""
        ours, theirs = self.tokenizer.fingerprint, source.shards[0].fingerprint
        if theirs not in (None, ours):
            raise ValueError(f"{source.name} needs the tokenizer that made it, {theirs:.16}, not {ours:.16}")
        tasks = self._tasks(source, ((ref, None) for ref in source.deal(lane, start, epochs)))
        first = list(itertools.islice(tasks, 1))    # start reading now: all lanes in parallel
        # Tasks in flight per stream (lane of a source). Text: 3 + its share of 2 * threads; tokens: 2.
        in_flight = 3 + 2 * self.threads // n_streams if source.shards[0].kind == "text" else 2
        encoded = in_order(self.executor, self._encode, itertools.chain(first, tasks), in_flight)
        return itertools.chain.from_iterable(documents for _, documents in encoded)

    def reencode(self, source, refs):
        """{Ref with token 0: ids} for these documents, to refill a buffer on resume."""
        wanted, found = sorted({ref._replace(token=0) for ref in refs}), {}
        groups = (list(group) for _, group in itertools.groupby(wanted, key=lambda ref: ref[:2]))
        tasks = self._tasks(source, ((group[0], [ref.doc for ref in group]) for group in groups))
        for _, documents in in_order(self.executor, self._encode, tasks, 32):
            found.update((ref, ids) for ids, ref in documents)
        if missing := [ref for ref in wanted if found[ref] is None or not len(found[ref])]:
            raise ValueError(f"{missing[0]} in the state has no tokens; resume with the same transform")
        return found

    def _tasks(self, source, groups):
        """Yields Tasks for pairs (Ref, docs). docs: positions in find()'s rows; None: all from the Ref on."""
        located = ((ref, docs, *source.find(ref)) for ref, docs in groups)
        located = (item for item in located if item[0].doc < len(item[-1]))    # skip finished row groups
        size = TASK_BYTES >> 4    # small first tasks: all lanes start early
        for this, following in itertools.pairwise(itertools.chain(located, [None])):
            ref, docs, shard, row_group, rows = this
            array = self.read(shard, row_group)
            docs = np.arange(ref.doc, len(rows)) if docs is None else np.array(docs)
            while len(docs):
                n = len(docs) if shard.kind == "tokens" else max(1, size * sum(shard.rows) // shard.size)
                part, docs, size = docs[:n], docs[n:], min(2 * size, TASK_BYTES)
                refs = [Ref(ref.epoch, ref.group, doc) for doc in part.tolist()]
                yield Task(refs, shard, row_group, rows[part], array)
                prefetched = following and self.read(*following[2:4])    # noqa: F841, keeps the Future alive

    def close(self):
        for executor in (self.executor, self.readers):    # running tasks finish; nothing waits for them
            executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, task):
        """Pairs of ids and Ref; an encoding error names shard, row group and row."""
        path, row_group, rows, array = task.shard.path, task.row_group, task.rows, task.array.result()
        in_sequence = (np.diff(rows) == 1).all()    # a slice needs no copy
        array = array[int(rows[0]):int(rows[-1]) + 1] if in_sequence else array.take(pa.array(rows))
        try:
            encode = self._encode_text if is_text(array.type) else self._view_tokens
            ids, bounds = encode(array, task)
            check_documents(ids, bounds, array, self.bos)
            documents = [ids[a:b] for a, b in itertools.pairwise(bounds.tolist())]
            if self.transform:
                documents = [self._transformed(ids, ref, Location(path, row_group, int(row)))
                             for ids, ref, row in zip(documents, task.refs, rows, strict=True)]
        except BaseException as error:    # tiktoken's panics are not Exceptions
            if len(rows) > 1:    # one by one, to find the culprit
                for i in range(len(rows)):
                    self._encode(task._replace(refs=task.refs[i:i + 1], rows=rows[i:i + 1]))
            where = f"{path}, row group {row_group}, row {rows[0]}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        return zip(documents, task.refs, strict=True)

    def _encode_text(self, array, task):
        # The primes vary which documents are checked, by row group and epoch.
        start = -(task.refs[0].doc + 613 * task.refs[0].group + 7919 * task.refs[0].epoch) % CHECK_EVERY
        return self.tokenizer.encode(array, range(start, len(array), CHECK_EVERY), threads=self.threads)

    def _view_tokens(self, array, task):
        dtype, (data, offsets, _) = task.shard.dtype, column_views(array)
        if (np.diff(offsets) % dtype.itemsize).any():
            raise ValueError(f"a document's bytes are not a whole number of {dtype} tokens")
        ids = np.frombuffer(data[offsets[0]:offsets[-1]], dtype).astype(self.dtype, copy=False)
        return ids, (offsets - offsets[0]) // dtype.itemsize

    def _transformed(self, ids, ref, location):
        if not len(ids):
            return ids
        result = self.transform(ids.astype(self.dtype), ref, location)
        array = np.asarray(() if result is None else result)
        if not array.size:
            return None
        is_valid = array.ndim == 1 and array.dtype.kind in "iu" and array.astype(np.int64).min() >= 0
        if not is_valid or array[0] & 0xFFFFFFFF != self.bos:    # packers repeat BOS; upper 32 bits are free
            raise TypeError(f"transform returned {array.dtype} {array.shape}; expected ids >= 0, BOS first")
        return array.astype(self.dtype)


def check_documents(ids, bounds, array, bos):
    """Check a tokenizer's or token shard's output: document i is ids[bounds[i]:bounds[i + 1]], BOS first."""
    if bounds.dtype.kind not in "iu" or len(bounds) != len(array) + 1 or bounds[0] or bounds[-1] != len(ids):
        raise ValueError(f"expected {len(array) + 1} integer bounds from 0 to {len(ids)}, got {bounds}")
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    lengths, first = np.diff(bounds), bounds[:-1][valid]
    if (lengths[valid] < 1).any() or lengths[~valid].any() or (ids[first] != bos).any():
        raise ValueError(f"a document does not begin with BOS ({bos}), or a null one has tokens")


# ---------------------------------------------------------------------------------------------------------
# Packing: documents to rows of T + 1 tokens. Pure: no files, threads, ranks or randomness.
# row(pull): the arrays of the next row, T + 1 tokens or fewer (the batch masks the missing ones), [] at the
#     end. pull() returns the next (ids, Ref), or None at the end
# buffered(): a tuple of the buffered documents' Refs, oldest first; this and `rows` are the packer's state
# restore(ids, ref) for each of them, in order, rebuilds the buffer; ids: the whole document
# options: the constructor's arguments besides T, and their defaults; the loader has them as attributes
# counts: "documents" pulled, tokens "dropped", documents "cut" although they fit in a row

class FlatPacker:
    """All documents in sequence, cut every T tokens; the last token of a row opens the next."""
    options: ClassVar = {}

    def __init__(self, T):
        self.T, self.rows, self.counts = T, 0, {"documents": 0, "dropped": 0, "cut": 0}
        self.documents, self.at, self.n_tokens = collections.deque(), 0, 0    # at: offset in documents[0]

    def row(self, pull):
        while self.n_tokens <= self.T and (document := pull()) is not None:
            self.documents.append(document)
            self.n_tokens += len(document[0])
            self.counts["documents"] += 1
        if self.n_tokens <= min(1, self.rows):    # the end: no undelivered token is left
            return []
        row, missing = [], self.T + 1
        while missing and self.documents:
            ids = self.documents[0][0]
            row.append(ids[self.at:self.at + missing])
            missing -= len(row[-1])
            if missing:
                self.documents.popleft()
                self.at = 0
            else:
                if self.at == 0 and len(row[-1]) < len(ids) <= self.T + 1:
                    self.counts["cut"] += 1
                self.at += len(row[-1]) - 1
        self.n_tokens -= self.T
        self.rows += 1
        return row

    def buffered(self):
        return tuple(Ref(*ref[:3], 0 if i else self.at) for i, (_, ref) in enumerate(self.documents))

    def restore(self, ids, ref):
        self.at = self.at if self.documents else ref.token    # only the first may be partly delivered
        self.documents.append((ids, ref._replace(token=0)))
        self.n_tokens += len(ids) - ref.token


def choose_best_fit(sizes, free):
    """
    Pick the next buffered document for a row with `free` empty token slots: the longest that fits, else the
    shortest, cut to fit; the oldest among equals. sizes: sorted (length, Ref). Returns (index, n to take).
    Example: [(3, 7), (5, 2), (9, 0)], free=6 -> (1, 5);  [(8, 4), (9, 0)], free=6 -> (0, 6)
    """
    i = bisect_left(sizes, (free + 1,))
    if i == 0:
        return 0, free
    n = sizes[i - 1][0]
    return bisect_left(sizes, (n,)), n


class BestFitPacker:
    """
    nanochat's rule (github.com/karpathy/nanochat): always the longest buffered document that fits; if none
    does, the shortest, cut to fill the row. Unlike nanochat's, the buffer is refilled one document at a time.
    Long documents pile up in the buffer, so each keeps only the tokens that a row can take.
    """
    options: ClassVar = {"buffer_size": 1000}

    def __init__(self, T, buffer_size):
        self.R, self.buffer_size = T + 1, buffer_size
        self.rows, self.counts = 0, {"documents": 0, "dropped": 0, "cut": 0}
        self.buffer, self.sizes = {}, []    # Ref -> ids; sorted (whole document's length, Ref)

    def row(self, pull):
        row, free = [], self.R
        while free:
            self.refill(pull)
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

    def refill(self, pull):
        while len(self.sizes) < self.buffer_size and (document := pull()) is not None:
            self.counts["documents"] += 1
            self.restore(*document)

    def buffered(self):
        return tuple(self.buffer)

    def restore(self, ids, ref):
        insort(self.sizes, (len(ids), ref))
        self.buffer[ref] = ids[:self.R].copy()


def fill_gap(gap, lengths, by_length):
    """
    Choose the lengths of buffered documents that fill `gap` tokens exactly, or as nearly as possible.
    lengths: sorted and distinct; by_length[n]: the documents of n tokens. Tries one document; then two, close
    in length; then any number, by subset sum: bit k of the integer `reachable` is set if some subset leaves
    k tokens open. Tries longer documents first, and equal ones in groups of 1, 2, 4, ...
    Example: lengths [2, 3, 4, 7], one document each: gap=10 -> [7, 3];  gap=8 -> [7], one token stays open
    """
    if gap in by_length:
        return [gap]
    half = bisect_right(lengths, gap // 2)
    for n in reversed(lengths[:half]):
        if gap - n in by_length and (2 * n < gap or len(by_length[n]) > 1):
            return [gap - n, n]
    reachable, steps = 1 << gap, []    # steps: (length, number of documents, `reachable` before)
    for n in lengths[half:bisect_right(lengths, gap)]:
        reachable |= 1 << gap - n    # a filling holds at most one document longer than half the gap
    for length in reversed(lengths[:half]):
        available, n = min(len(by_length[length]), gap // length), 1
        while available and not reachable & 1 and len(steps) * gap < 1 << 25:    # `steps`: at most 4 MB
            n = min(n, available)
            steps.append((length, n, reachable))
            reachable |= reachable >> n * length
            available, n = available - n, 2 * n
        if reachable & 1:
            break
    chosen, unfilled = [], (reachable & -reachable).bit_length() - 1
    for length, n, before in reversed(steps):
        if not before >> unfilled & 1:
            chosen += [length] * n
            unfilled += n * length
    return [gap - unfilled, *chosen] if unfilled < gap else chosen


class ExactFitPacker:
    """
    Fills rows exactly, with complete documents where it can; every piece of a cut one begins with BOS.
    Each row opens with the oldest document, so a document with n older ones waits at most n rows. A document
    longer than a row fills one row at a time; its remainder returns to the end of the buffer. fill_gap fills
    the gap with untouched documents, not with remainders. If no subset fits exactly, the open part is filled
    from the oldest document longer than a row (it is cut anyway), else from the shortest untouched one longer
    than that part. `buffer_size` counts documents that fit in a row.
    """
    options: ClassVar = {"buffer_size": 256}

    def __init__(self, T, buffer_size):
        self.R, self.buffer_size = T + 1, buffer_size
        self.rows, self.counts = 0, {"documents": 0, "dropped": 0, "cut": 0}
        self.buffer = {}                     # Ref -> ids, oldest first
        self.long = collections.deque()      # Refs of those longer than a row, oldest first
        self.by_length, self.lengths = {}, []   # length -> Refs of untouched short ones; sorted lengths
        self.n_short = self.n_tokens = 0     # documents in `by_length`; tokens of all
        self.epochs = collections.Counter()  # documents of each epoch

    def row(self, pull):
        while self._should_pull() and (document := pull()) is not None:
            ids, ref = document
            self.counts["documents"] += 1
            # Long documents stay buffered longer; a view would keep the row group in memory.
            self.restore(ids.copy() if len(ids) > self.R else ids, ref)
        if not self.buffer:
            return []
        row = self._deliver(next(iter(self.buffer)), self.R)
        gap = self.R - sum(map(len, row))
        if gap:
            filling = fill_gap(gap, self.lengths, self.by_length)
            row += [self._pop(self.by_length[length][0]) for length in filling]
            row += self._cut_to_fit(gap - sum(filling))
        self.rows += 1
        return row

    def _should_pull(self):
        """
        True while the buffer holds less than a row of tokens. Else False if it holds a document of the next
        epoch (this epoch goes first), or `size` short documents, or 2 * size rows of tokens in at least
        size / 4 documents (not just a few long ones). `size` starts low, for an early first batch.
        """
        size = min(self.buffer_size, 32 + 4 * self.rows)
        return self.n_tokens < self.R or (len(self.epochs) < 2 and self.n_short < size and (
            self.n_tokens < 2 * size * self.R or len(self.buffer) < size // 4))

    def _cut_to_fit(self, missing):
        """Fill the rest of the gap with pieces; a row stays short only at the end of a finite source."""
        pieces = []
        while missing and self.buffer:
            if self.long:
                ref = self.long[0]
            elif longer := self.lengths[bisect_right(self.lengths, missing):]:
                ref = self.by_length[longer[0]][0]
            else:
                ref = next(iter(self.buffer))
            piece = self._deliver(ref, missing)
            missing -= sum(map(len, piece))
            pieces += piece
        return pieces

    def _deliver(self, ref, n):
        """
        The arrays of a document's next tokens, at most n; the rest returns to the end of the buffer.
        Example: 3 of [BOS a b c d] -> [BOS a b], c d remain; 3 of that -> [BOS c d]
        """
        ids, token = self._pop(ref), ref.token
        if token == 0:
            pieces, stop = [ids[:n]], n
        else:
            pieces, stop = [ids[:1], ids[token:token + n - 1]], token + n - 1
        if stop < len(ids):
            self.restore(ids, Ref(*ref[:3], stop))
            if token == 0 and len(ids) <= self.R:
                self.counts["cut"] += 1
        return pieces

    def restore(self, ids, ref):
        n = len(ids) - ref.token + 1 if ref.token else len(ids)    # to deliver: a later piece repeats BOS
        self.buffer[ref] = ids
        self.epochs[ref.epoch] += 1
        self.n_tokens += n
        if n > self.R:
            self.long.append(ref)
        elif ref.token == 0:
            self.n_short += 1
            if n not in self.by_length:
                self.by_length[n] = collections.deque()
                insort(self.lengths, n)
            self.by_length[n].append(ref)

    def _pop(self, ref):
        """`ref` is always the oldest: of all, of the long ones, or of its length."""
        ids = self.buffer.pop(ref)
        self.epochs[ref.epoch] -= 1
        if not self.epochs[ref.epoch]:
            del self.epochs[ref.epoch]
        n = len(ids) - ref.token + 1 if ref.token else len(ids)
        self.n_tokens -= n
        if n > self.R:
            self.long.popleft()
        elif ref.token == 0:
            self.n_short -= 1
            self.by_length[n].popleft()
            if not self.by_length[n]:
                del self.by_length[n]
                self.lengths.pop(bisect_left(self.lengths, n))
        return ids

    def buffered(self):
        return tuple(self.buffer)


PACKINGS: dict[str, Any] = {"flat": FlatPacker, "bestfit": BestFitPacker, "exactfit": ExactFitPacker}


# ---------------------------------------------------------------------------------------------------------
# Lanes and batches: choose each row's source; one thread packs rows ahead, from the lanes in turn

def source_of_row(row, bounds):
    """
    The index of the source that gives row `row` of the run. The fractional parts of multiples of
    1 / golden ratio fill [0, 1) evenly (three-distance theorem): in 400,000 rows, no batch of 4 to 1,024 was
    over 2.7 rows off a source's share. Example: bounds_of([2, 1], ...), rows 0 to 9 -> 0001001010
    """
    return bisect_right(bounds, row * 0x9E3779B97F4A7C15 % 2**64)    # 2**64 / golden ratio


def bounds_of(weights, row):
    """Cumulative weights, scaled to 2**64. Negative weights count as 0; if all are 0, shares are equal."""
    given = [weight(row) if callable(weight) else weight for weight in weights]
    if None in given or not sum(values := [max(float(weight), 0) for weight in given]) < 1e18:    # also NaN
        raise ValueError(f"the weights of row {row} are {given}; expected finite numbers, sum below 1e18")
    scaled = [int(value * 2**64) for value in values]
    cumulative = list(itertools.accumulate(scaled if any(scaled) else [1] * len(scaled)))
    return [number * 2**64 // cumulative[-1] for number in cumulative]


class StreamState(NamedTuple):
    """The position of a stream, which is one lane of one source. The default is the beginning."""
    next: Ref = Ref()                   # the next document to pull
    buffered: tuple[Ref, ...] = ()      # documents in the packer, oldest first
    rows: int = 0                       # delivered so far
    ended: bool = False                 # a finite source has no more rows


class Stream:
    """One lane of one source: its documents and its packer."""

    def __init__(self, loader, name, lane, state, encoder, n_streams):
        self.source, self.encoder, self.epochs = loader.sources[name], encoder, loader.epochs[name]
        self.next, self.to_restore, self.rows_before, self.ended = state
        self.epoch_with_tokens, self.counts = self.next.epoch, {"null_documents": 0, "filtered_documents": 0}
        self.packer = PACKINGS[loader.packing](loader.T, **loader.packer_options())
        self.packer.rows = state.rows
        self.documents = encoder.documents(self.source, lane, self.next, self.epochs, n_streams)

    def row(self):
        """The arrays of the next row; [] at the end."""
        if self.to_restore:
            found = self.encoder.reencode(self.source, self.to_restore)
            for ref in self.to_restore:
                self.packer.restore(found[ref._replace(token=0)], ref)
            self.to_restore = ()
        row = self.packer.row(self.pull)
        self.ended = not row
        return row

    def pull(self):
        """The next document that has tokens, and its Ref; None at the end."""
        for ids, ref in self.documents:
            self.next = Ref(ref.epoch, ref.group, ref.doc + 1)
            if ids is not None and len(ids):
                self.epoch_with_tokens = ref.epoch
                return ids, ref
            self.counts["filtered_documents" if ids is None else "null_documents"] += 1
            if self.epochs is None and ref.epoch > self.epoch_with_tokens + 100:
                raise ValueError(f"{self.source.name}: a lane found no token in 100 epochs, only null or "
                                 "filtered documents; lower num_lanes, or inspect the data")
        return None

    def state(self):
        return StreamState(self.next, self.to_restore or self.packer.buffered(), self.packer.rows, self.ended)


def rows_of_lane(streams, weights, row_numbers):
    """Yield the arrays of a lane's rows, then [] forever. The other sources take over from one that ends."""
    names = [name for name, stream in streams.items() if not stream.ended]
    for number in row_numbers:
        row = []
        while names and not row:
            bounds = bounds_of([weights[name] for name in names], number) if len(names) > 1 else []
            name = names[source_of_row(number, bounds)]
            row = streams[name].row()
            if not row:
                names.remove(name)
        yield row


class Position(NamedTuple):
    rows: int      # of the run so far, by all ranks
    lanes: dict    # of this rank: {lane: {source: StreamState}}


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    position: Position    # after this batch
    lacking: bool         # some row of the batch is empty
    more: bool            # False: this batch and all later ones of this rank are empty


class Pipeline:
    """A loader's threads and lanes, from one position on; another position needs a new Pipeline."""

    def __init__(self, loader):
        self.position, self.world_size = loader.position, loader.world_size
        self.B, self.R = loader.B, loader.T + 1
        self.encoder = Encoder(loader.tokenizer, loader.threads, loader.transform)
        self.lanes, self.row_iterators, self.looked_ahead, self.waited = {}, {}, {}, 0.0
        mine = lanes_of_rank(self.position.rows, loader.rank, loader.world_size, loader.num_lanes)
        n_streams = len(mine) * len(loader.sources)
        for i, number in enumerate(mine):
            self.lanes[number] = {name: Stream(loader, name, number, state, self.encoder, n_streams)
                                  for name, state in self.position.lanes[number].items()}
            first = self.position.rows + loader.rank + i * self.world_size
            row_numbers = itertools.count(first, loader.num_lanes)
            self.row_iterators[number] = rows_of_lane(self.lanes[number], loader.weights, row_numbers)
        self.turns, self.executor = itertools.cycle(self.lanes), ThreadPoolExecutor(1, "pack")
        self.pin, index = loader.device.type == "cuda", loader.device.index
        if self.pin:    # set_device, else each rank would hold a CUDA context (hundreds of MB) on GPU 0
            index = torch.cuda.current_device() if index is None else index
            self.executor.submit(torch.cuda.set_device, index)
        self.ready = collections.deque(self.executor.submit(self._pack) for _ in range(1 + loader.prefetch))

    def next_batch(self, position):
        """The batch after `position`. It stays in `ready` until the loader has delivered it."""
        began = time.perf_counter()
        batch = self.ready[0].result()
        if batch.position is position:
            self.ready.append(self.executor.submit(self._pack))
            self.ready.popleft()
            batch = self.ready[0].result()
        self.waited += time.perf_counter() - began
        return batch

    def _pack(self):
        B, R = self.B, self.R
        pieces, short, numbers = [], [], list(itertools.islice(self.turns, B))
        for b, number in enumerate(numbers):
            row = self.looked_ahead.pop(number, None) or next(self.row_iterators[number])
            pieces += row
            if (n := sum(map(len, row))) < R:
                pieces.append(np.full(R - n, self.encoder.bos, self.encoder.dtype))
                short.append((b, n))
        # np.concatenate would release the GIL at every piece, and wait to get it back.
        rows = np.frombuffer(b"".join(pieces), self.encoder.dtype).reshape(B, R)
        states = {number: {name: stream.state() for name, stream in self.lanes[number].items()}
                  for number in set(numbers)}
        self.position = Position(self.position.rows + B * self.world_size, self.position.lanes | states)
        n_empty = sum(n == 0 for _, n in short)
        more = n_empty < B or any(map(self._look_ahead, self.lanes))
        both = [torch.from_numpy(ids.astype(np.int64)) for ids in (rows[:, :-1], rows[:, 1:])]    # copies
        for b, n in short:
            both[1][b, max(0, n - 1):] = -100
        both = [part.pin_memory() for part in both] if self.pin else both
        return Batch(*both, self.position, n_empty > 0, more)

    def _look_ahead(self, number):
        """Packs the next row of a lane for a later batch; it is not part of this batch's position."""
        if number not in self.looked_ahead:
            self.looked_ahead[number] = next(self.row_iterators[number])
        return self.looked_ahead[number]

    def close(self):
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.encoder.close()


# ---------------------------------------------------------------------------------------------------------
# The loader

class PackedLoader(IterableDataset):
    """
    An iterator over (inputs, targets), int64 (B, T) on `device`; targets are inputs shifted by one, and -100
    (torch's ignore_index) where a row is short. A yielded batch is never overwritten.
    tokenizer: see as_encoder in tokenizer.py; transform(ids, ref, location): see Encoder
    packing: "flat", "bestfit" or "exactfit"; buffer_size: documents that the packer chooses from
    data_dir: a folder or URI of shards, or {folder: weight}. Weights are proportions of rows: numbers, or
        functions of the row number (a state stores their names). Default: what dataset.find_data finds
    rank, world_size: default: torch.distributed's if initialised, else RANK and WORLD_SIZE
    num_lanes: world sizes that divide it give the same rows. Default: lcm(8, world_size), or as in the state
    shuffle_seed: None: documents in file order; an int: a new order every epoch
    epochs: n, or {folder: n}; other folders are endless. The ranks of a finite run end together if
        torch.distributed is initialised. uneven: if lanes differ in length, "stop" ends with the shortest;
        "pad" gives masked rows until the longest ends (divide summed losses by all ranks' unmasked targets)
    threads: for encoding; default: this rank's cores. prefetch: batches packed ahead
    """

    def __init__(self, tokenizer, B: int, T: int, split: str, *, packing: str = "exactfit",
                 buffer_size: int | None = None, data_dir: str | os.PathLike | dict | None = None,
                 rank: int | None = None, world_size: int | None = None, num_lanes: int | None = None,
                 shuffle_seed: int | None = None, epochs: int | dict | None = None, uneven: str = "pad",
                 device: str | torch.device = "cpu", threads: int | None = None, prefetch: int = 2,
                 transform: Callable | None = None):
        self.arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        vars(self).update(self.arguments)
        if rank is None and world_size is None:
            self.rank, self.world_size = ranks_of_this_process()
        self.num_lanes = math.lcm(8, self.world_size or 1) if num_lanes is None else num_lanes
        self.threads = cores_of_this_rank() if threads is None else threads
        if buffer_size is None and packing in PACKINGS:
            self.buffer_size = PACKINGS[packing].options.get("buffer_size", 1)
        check_arguments(self)
        self.tokenizer, self.device = as_encoder(tokenizer), torch.device(device)
        self.weights, self.epochs = sources_of(data_dir, epochs)
        sources = [Source(name, list_shards(name, split), self.num_lanes, shuffle_seed)
                   for name in self.weights]
        # By fingerprint: the same order for moved folders, and for tokens of the same text.
        sources.sort(key=lambda source: (source.fingerprint, source.name))
        self.sources = {source.name: source for source in sources}
        if num_lanes is not None:    # else a loaded state may have fewer lanes
            check_enough_documents(self)
        self.ends_together = all(self.epochs.values()) and self.world_size > 1    # endless runs never wait
        self.position = self._beginning()
        self._pipeline, self._group, self._finished, self._closed = None, None, False, False
        self._pid, self._lock = os.getpid(), threading.Lock()

    def _beginning(self):
        lanes = lanes_of_rank(0, self.rank, self.world_size, self.num_lanes)
        return Position(0, {number: dict.fromkeys(self.sources, StreamState()) for number in lanes})

    def _start(self):
        check_start(self)
        if self.ends_together and self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        return Pipeline(self)

    def packer_options(self):
        return {name: getattr(self, name) for name in PACKINGS[self.packing].options}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._finished:    # start the run again, like any iterable
            self._go_to(self._beginning())
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if os.getpid() != self._pid or get_worker_info() is not None:
            raise RuntimeError("a PackedLoader works only in the process that made it; pass num_workers=0")
        with self._lock:
            if self._finished and not self._closed:
                raise StopIteration
            try:    # close() may come from another thread at any time
                self._pipeline = self._pipeline or (None if self._closed else self._start())
                batch = None if self._closed else self._pipeline.next_batch(self.position)
                if self._closed:
                    raise RuntimeError("this PackedLoader is closed; make a new one, load the state into it")
            except BaseException:    # also Ctrl-C: the next call starts again from this position
                self._go_to(self.position)
                raise
            if not self._is_in_run(batch):
                self._finished = True
                raise StopIteration
            tensors = tuple(part.to(self.device, non_blocking=True) for part in batch[:2])
            self.position = batch.position    # last, so that an interrupted batch comes again
            return tensors

    def _is_in_run(self, batch):
        """Whether the batch belongs to the run. The ranks of a finite run agree, and so end together."""
        flags = torch.tensor([batch.more, batch.lacking], dtype=torch.int64)
        if group := self._group:    # close() may remove it
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        more, lacking = flags.tolist()
        return more and not (lacking and self.uneven == "stop")

    def close(self) -> None:
        """Stop the threads. In a finite run on several ranks, the other ranks get an error."""
        self._closed, group, self._group = True, self._group, None
        if self._pipeline and self._pid == os.getpid():
            self._pipeline.close()
        with contextlib.suppress(RuntimeError, ValueError):    # all groups may be destroyed already
            if group:
                dist.destroy_process_group(group)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def state_dict(self, position: Position | None = None) -> dict:
        """
        This rank's state as plain JSON: references to documents, no tokens. To merge states: gather_states.
        position: the value of loader.position at an earlier time, for callers that fetch batches ahead.
        """
        rows, lanes = position or self.position
        sources = {name: {"epochs": self.epochs[name], "fingerprint": source.fingerprint}
                   for name, source in self.sources.items()}
        lanes = {n: {name: state._asdict() for name, state in lane.items()} for n, lane in lanes.items()}
        return with_digest({"version": VERSION, "rows": rows, "config": config_of(self), "sources": sources,
                            "lanes": lanes})

    def load_state_dict(self, state: dict) -> None:
        """Resume, even with another T, B or world size. A state that does not fit: ValueError, no change."""
        with self._lock:
            position, changed = read_state(self, state)
            self._go_to(position, **changed)

    def _go_to(self, position, **changed):
        """Atomic: Ctrl-C leaves either the old run or the new one."""
        old = self._pipeline
        vars(self).update(changed, position=position, _pipeline=None, _finished=False)
        if old:
            old.close()

    def stats(self) -> dict:
        """Counts in this process since the start, last load or last error; prefetched batches included."""
        if not (pipeline := self._pipeline):
            return {}
        counts = collections.Counter()
        for stream in itertools.chain.from_iterable(lane.values() for lane in pipeline.lanes.values()):
            counts.update(stream.packer.counts | stream.counts, rows=stream.packer.rows - stream.rows_before)
        return {**counts, "waited_s": pipeline.waited}


def lanes_of_rank(rows, rank, world_size, num_lanes):
    """This rank's lanes in the order of their turns, starting at row `rows` of the run."""
    return [(rows + rank + i * world_size) % num_lanes for i in range(num_lanes // world_size)]


def ranks_of_this_process():
    """(rank, world size): torch.distributed's if initialised, else the launcher's."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    names = "RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"    # srun, mpirun: no RANK
    rank, world_size, *tasks = (env_int(name, least=int(name != "RANK")) for name in names)
    if (rank is None) != (world_size is None) or (rank is None and max(n or 1 for n in tasks) > 1):
        seen = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        raise ValueError(f"found only {seen}: all processes would get the same rows; initialise "
                         "torch.distributed first, or pass rank=... and world_size=...")
    return rank or 0, world_size or 1


def cores_of_this_rank():
    return max(1, cores() // (env_int("LOCAL_WORLD_SIZE", least=1) or 1))


def env_int(name, least):
    """A launcher's environment variable; None if it is not set."""
    value = os.environ.get(name)
    if value is not None and (not value.isdecimal() or int(value) < least):
        raise ValueError(f"{name}={value!r} in the environment; expected a whole number, {least} or more")
    return value and int(value)


# ---------------------------------------------------------------------------------------------------------
# States: plain JSON
# config: must match, or references would mean other documents. sources: shards must match; epochs and
# numeric weights may change. lanes: a StreamState for each lane and source. digest: detects any damage

VERSION = 4    # the rows of a version never change


def config_of(loader):
    """T, B, world size and threads are not in it: references to documents do not depend on them."""
    functions = {source.fingerprint: loader.weights[name] for name, source in loader.sources.items()}
    functions["transform"] = loader.arguments["transform"]    # trace changes loader.transform
    names = {key: getattr(function, "__name__", type(function).__name__)
             for key, function in functions.items() if callable(function)}
    return {"split": loader.split, "num_lanes": loader.num_lanes, "shuffle_seed": loader.shuffle_seed,
            "packing": loader.packing, **loader.packer_options(), "tokenizer": loader.tokenizer.fingerprint,
            "transform": names.pop("transform", None), "weight_functions": names}


def with_digest(state):
    """The state as plain JSON, with a SHA-256 per lane: a rank may be given only some of the lanes."""
    state = json.loads(json.dumps({**state, "digest": {}}))
    for number, lane in state["lanes"].items():
        part = json.dumps({**state, "digest": {}, "lanes": {number: lane}}, sort_keys=True)
        state["digest"][number] = hashlib.sha256(part.encode()).hexdigest()
    return state


def read_state(loader, state):
    """-> (Position, the attributes of the loader that change)"""
    try:
        check_state(state)
        saved, ours, theirs = state["sources"], config_of(loader), state["config"]
        if loader.arguments["num_lanes"] is None:
            ours["num_lanes"] = theirs["num_lanes"]
        for key in {**theirs, **ours}:
            if theirs.get(key) != ours.get(key):
                raise ValueError(f"{key} is {theirs.get(key)!r} in the state, but {ours.get(key)!r} here")
        rows, rank, world_size, num_lanes = state["rows"], loader.rank, loader.world_size, ours["num_lanes"]
        check_shared(num_lanes, world_size)
        mine = lanes_of_rank(rows, rank, world_size, num_lanes)
        check_lanes(mine, state["lanes"])
        names = saved_names(saved, loader.sources)
        lanes = {number: dict.fromkeys(loader.sources, StreamState()) for number in mine}
        for (number, streams), (name, old) in itertools.product(lanes.items(), names.items()):
            at = state["lanes"][str(number)][old]
            ended = at["ended"] and saved[old]["epochs"] == loader.epochs[name]
            buffered = tuple(Ref(*ref) for ref in at["buffered"])
            streams[name] = StreamState(Ref(*at["next"]), buffered, at["rows"], ended)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"this state is damaged: {type(error).__name__}: {error}") from error
    sources = {name: type(source)(name, source.shards, num_lanes, source.seed)
               for name, source in loader.sources.items()}
    return Position(rows, lanes), {"num_lanes": num_lanes, "sources": sources}


def saved_names(saved, sources):
    """{name in the loader: name in the state} of sources in both; folders may have moved."""
    moved = {entry["fingerprint"]: name for name, entry in saved.items() if name not in sources}
    known = {name: name if name in saved else moved[source.fingerprint] for name, source in sources.items()
             if name in saved or source.fingerprint in moved}
    changed = [name for name, old in known.items() if saved[old]["fingerprint"] != sources[name].fingerprint]
    if changed or not known or len({*known.values()}) < len(known):
        raise ValueError(f"sources {sorted(sources)} do not match the state's, {sorted(saved)}; shards "
                         f"changed in: {changed or 'none'}. Put new data in a new folder")
    return known


def gather_states(loader, position=None) -> dict | None:
    """The merged state of all ranks on rank 0, None on the others. Every rank must call it."""
    state = loader.state_dict(position)
    if not (dist.is_available() and dist.is_initialized()):
        return merge_states([state])
    data = json.dumps(state).encode()    # bytes of JSON: nothing is unpickled
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    size = torch.tensor(len(data), device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX)
    padded = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(padded, parts)
    return merge_states([json.loads(part.cpu().numpy().tobytes()) for part in parts]) if parts else None


def merge_states(states: list[dict]) -> dict:
    """Merge all ranks' states of one step into one that any allowed world size can load."""
    for state in states:
        check_state(state)
        for key in ("rows", "config", "sources"):
            if state[key] != states[0][key]:
                raise ValueError(f"states do not belong together: {key}: {state[key]!r}, {states[0][key]!r}")
    lanes = {number: part for state in states for number, part in state["lanes"].items()}
    check_lanes(range(states[0]["config"]["num_lanes"]), lanes)
    return with_digest({**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))})


# ---------------------------------------------------------------------------------------------------------
# What a batch holds: the documents of its tokens, and where they begin

class Piece(NamedTuple):
    """Tokens [start, stop) of a document, in one row of a batch; token 0 is the document's BOS."""
    location: Location
    ref: Ref
    start: int
    stop: int


def trace(loader, state: dict | None = None) -> Iterator[list[list[Piece]]]:
    """
    For each batch after a state (default: the loader's when iteration begins), yield each row's Pieces.
    A second loader packs ids that say "token i of document n", so the trace cannot differ from what was
    trained on. In exactfit, a piece after a cut is two Pieces: the repeated BOS, and the rest.
    """
    found, numbers = {}, itertools.count(1)

    def number_tokens(ids, ref, location):
        if loader.transform is not None and (ids := loader.transform(ids, ref, location)) is None:
            return None
        number = next(numbers)
        found[number] = location, ref
        return np.arange(len(ids)) + loader.tokenizer.bos + (number << 32)

    changed = {"rank": loader.rank, "world_size": loader.world_size, "device": "cpu"}
    with PackedLoader(**loader.arguments | changed) as tracer:
        tracer.transform, tracer.ends_together, tracer.sources = number_tokens, False, loader.sources
        tracer.load_state_dict(state or loader.state_dict())
        for n, (inputs, targets) in enumerate(tracer, 1):
            rows = torch.cat([inputs[:, :1], targets], dim=1).numpy() - loader.tokenizer.bos
            yield [pieces_of_row(row, found) for row in rows]
            if n % 1000 == 0:    # restart from here, to free the delivered documents
                tracer.load_state_dict(tracer.state_dict())
                found.clear()


def pieces_of_row(row, found):
    pieces = []
    for run in np.split(row, np.flatnonzero(np.diff(row) != 1) + 1):
        number, start = int(run[0]) >> 32, int(run[0]) & 0xFFFFFFFF
        if number in found:    # else the padding of a short row
            pieces.append(Piece(*found[number], start, start + len(run)))
    return pieces


# ---------------------------------------------------------------------------------------------------------
# Guards: reject unusable arguments, states and environments

def check_arguments(loader):
    for name, allowed in {"split": ["train", "val"], "packing": PACKINGS, "uneven": ["pad", "stop"]}.items():
        if getattr(loader, name) not in allowed:
            raise ValueError(f"{name}={getattr(loader, name)!r}; choose one of {', '.join(allowed)}")
    least = {"rank": 0, "world_size": 1, "B": 1, "T": 1, "num_lanes": 1, "buffer_size": 1, "threads": 1,
             "prefetch": 0, "shuffle_seed": 0}
    for name, low in least.items():
        n = getattr(loader, name)
        if (type(n) is not int or n < low) and (name, n) != ("shuffle_seed", None):
            raise ValueError(f"{name}={n!r}; expected an int, {low} or more")
    if loader.rank >= loader.world_size:
        raise ValueError(f"rank={loader.rank} of world_size={loader.world_size}; ranks start at 0")
    check_shared(loader.num_lanes, loader.world_size)


def check_shared(lanes, world_size):
    if lanes % world_size:
        raise ValueError(f"{lanes} lanes cannot be shared evenly by {world_size} ranks; choose a world size "
                         f"that divides {lanes}, or, in a new run, a num_lanes divisible by {world_size}")


def sources_of(data_dir, epochs):
    """data_dir and epochs as {source: weight} and {source: epochs}."""
    given = data_dir if isinstance(data_dir, dict) else {find_data(data_dir and os.fspath(data_dir)): 1}
    weights = {source_name(path): weight for path, weight in given.items()}
    epochs = ({source_name(path): n for path, n in epochs.items()} if isinstance(epochs, dict)
              else dict.fromkeys(weights, epochs))
    if not weights or len(weights) < len(given) or epochs.keys() - weights.keys():
        raise ValueError(f"data_dir={data_dir!r}, epochs for {sorted(epochs)}; expected a folder, or "
                         "{folder: weight}, each folder once, and epochs only for these")
    for name, weight in weights.items():
        n = epochs.get(name)
        if not callable(weight) and (type(weight) not in (int, float) or not 1e-9 <= weight <= 1e9):
            raise ValueError(f"weight {weight!r} of {name}; expected 1e-9 to 1e9, or a function of the row")
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"epochs={n!r}; expected an int, 1 or more, or None for an endless run")
    return weights, {name: epochs.get(name) for name in weights}


def source_name(path):    # a, a/ and ./a are one source
    return str(path).rstrip("/") if "://" in str(path) else os.path.normpath(path)


def check_start(loader):
    """A process group initialised after the loader would give every rank the same rows."""
    seen, now = (loader.rank, loader.world_size), ranks_of_this_process()
    if loader.arguments["rank"] is None and seen != now:
        raise RuntimeError(f"made as rank {seen[0]} of {seen[1]}, used as rank {now[0]} of {now[1]}: make "
                           "the loader after torch.distributed is initialised, or pass rank and world_size")
    check_enough_documents(loader)


def check_enough_documents(loader):
    for name, source in loader.sources.items():
        if (n := source.group_sizes.sum()) < loader.num_lanes:
            raise ValueError(f"{name}: {n} documents for {loader.num_lanes} lanes; lower num_lanes to {n}")


def check_state(state):
    if state["version"] != VERSION:
        raise ValueError(f"state of version {state['version']!r}, this code reads {VERSION}")
    if with_digest(state)["digest"] != state["digest"]:
        raise ValueError("this state is damaged or was edited; load it as state_dict() returned it")


def check_lanes(needed, lanes):
    if len(needed) > len(lanes) or any(str(number) not in lanes for number in needed):
        raise ValueError(f"the state has only {len(lanes)} lanes, as if saved by one rank; use gather_states")
