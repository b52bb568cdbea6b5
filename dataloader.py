"""
Documents in parquet shards to packed (B, T) batches for pretraining, by threads of one process.

    shards -> DocumentReader -> TokenizingPool -> packer -> row -> batch -> device -> (inputs, targets)

Each arrow is a pull by the stage on its right. Documents are dealt to `num_lanes` lanes, each with its own
cursor and its own packer, and row g of the run comes from lane g % num_lanes: so the rows are the same for
every world size, batch size, thread count and stop point, and a state is a list of document references.

    python dataloader.py --show       a batch of every packer, drawn in the terminal
    python dataloader.py --compare    what each packer loses, cuts and costs on the corpus at hand
    python dataloader.py --bench      tokens per second, from text and from tokens

The trade-off: a resumed run reads and tokenizes the buffered documents once more (under a second a lane),
so that a state is JSON, of about 25 bytes for each of them, and never holds a token.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import resource
import sys
import tempfile
import threading
import time
import warnings
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from dataset import (
    column_views,
    cores,
    default_data_dir,
    errors_in_one_line,
    find_data,
    in_order,
    is_text,
    list_shards,
)

# ---------------------------------------------------------------------------------------------------------
# Reading: which documents are whose

class Slice(NamedTuple):
    """The documents of one row group that belong to one lane, in the order of their delivery."""
    epoch: int
    shard: int          # index into the split's sorted shards
    row_group: int
    rows: range | list  # rows of the row group
    start: int          # how many of `rows` were given before
    dealt: int          # how many row groups (or documents) this epoch had dealt before, to all lanes


class Cursor(NamedTuple):
    """Where a lane goes on reading. The default is the beginning of a run, shard -1 that of an epoch."""
    epoch: int = 1
    shard: int = -1
    row_group: int = -1
    given: int = 0      # how many of its documents of that row group the lane was given
    dealt: int = 0      # as in Slice: it spares reading the footers of all shards before


def shuffled(n, seed, epoch, kind, shard=0, row_group=0):
    """
    The order of n things in one epoch, as a range or list of indices; 0, 1, ... where seed is None.
    Drawn from the tuple, so that no two places share an order. PCG64's raw stream is fixed by NumPy's
    compatibility policy; Generator.permutation is not.
    """
    if seed is None:
        return range(n)
    raw = np.random.PCG64((seed, epoch, kind, shard, row_group)).random_raw(n)
    return np.argsort(raw, kind="stable").tolist()


def fingerprint_of(shards):
    """Of their names and sizes."""
    named = [[shard.name, shard.size] for shard in shards]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


class DocumentReader:
    """
    One source: its shards, and how their documents are dealt to lanes.

    Row groups, counted through the epoch in its order, go to the lanes round robin. Where the split has
    fewer row groups than lanes, documents do. grown: how many shards the split had at each launch of the
    first epoch, ascending.
    """

    def __init__(self, shards, num_lanes, seed=None, by_document=None, grown=()):
        self.shards, self.num_lanes, self.seed = shards, num_lanes, seed
        self.grown = sorted({*grown, len(shards)})
        self.by_document = self._too_few_row_groups() if by_document is None else by_document
        self.fingerprint = fingerprint_of(shards)

        def read(shard, row_group):
            return shards[shard].read(row_group)

        self._read = lru_cache(maxsize=4)(read) if self.by_document else read

    def _too_few_row_groups(self):
        row_groups = documents = 0
        for shard in self.shards:    # thousands of shards: the first few footers settle it
            row_groups += sum(n > 0 for n in shard.rows)
            documents += sum(shard.rows)
            if row_groups >= self.num_lanes:
                return False
        if documents < self.num_lanes:
            raise ValueError(
                f"{documents} documents in {len(self.shards)} shards ({self.shards[-1].path}) cannot feed "
                f"{self.num_lanes} lanes; launch with num_lanes (and a world size) of at most {documents}, "
                "or add data")
        return True

    def _shard_order(self, epoch):
        """Shards that were appended during the first epoch come behind those it began with."""
        if epoch > 1:
            return shuffled(len(self.shards), self.seed, epoch, 1)
        parts = itertools.pairwise([0, *self.grown])
        return [a + i for a, b in parts for i in shuffled(b - a, self.seed, 1, 1, a)]

    def slices(self, lane, cursor, epochs=None):
        """All slices of a lane from the cursor on, without end unless `epochs` is given."""
        epoch, at_shard, at_row_group, given, dealt = cursor
        while epochs is None or epoch <= epochs:
            order = self._shard_order(epoch)
            for shard in order[0 if at_shard < 0 else order.index(at_shard):]:
                counts = self.shards[shard].rows
                groups = shuffled(len(counts), self.seed, epoch, 2, shard)
                if shard == at_shard:    # a row group past the last (nanochat's states): the next shard
                    groups = groups[groups.index(at_row_group):] if at_row_group < len(groups) else []
                for row_group in groups:
                    here = shard == at_shard and row_group == at_row_group
                    rows, deals = self._share(lane, epoch, shard, row_group, counts[row_group], dealt)
                    if len(rows):
                        yield Slice(epoch, shard, row_group, rows, given if here else 0, dealt)
                    dealt += deals
            epoch, at_shard, at_row_group, given, dealt = Cursor(epoch + 1)

    def _share(self, lane, epoch, shard, row_group, n, dealt):
        """The lane's rows of a row group, and how many row groups or documents it deals: to `dealt`."""
        if not self.by_document and dealt % self.num_lanes != lane:
            return (), int(n > 0)
        rows = shuffled(n, self.seed, epoch, 3, shard, row_group)
        if not self.by_document:
            return rows, int(n > 0)
        return rows[(lane - dealt) % self.num_lanes::self.num_lanes], n

    def read(self, shard, row_group, rows):
        """The documents at `rows` of one row group, as an Arrow array of strings or of token bytes."""
        array = self._read(shard, row_group)
        if rows == range(len(array)):
            return array
        return array.take(pa.array(rows, pa.int64()))


# ---------------------------------------------------------------------------------------------------------
# Tokenizing: chunks of documents, in order, by threads

class Chunk(NamedTuple):
    """Tokenized documents of one slice; document i is ids[bounds[i]:bounds[i + 1]], BOS in front."""
    ids: np.ndarray
    bounds: list        # a null document has no tokens
    slice: Slice
    first: int          # index of document 0 in slice.rows

    def ref(self, i, offset=0):
        s = self.slice
        return [s.epoch, s.shard, s.row_group, s.rows[self.first + i], offset]

    def document(self, i, came, limit=None, copy=True):
        """None for a null document. One that may stay long is a copy: a view keeps its whole chunk alive."""
        a, b = self.bounds[i], self.bounds[i + 1]
        if a == b:
            return None
        ids = self.ids[a:b if limit is None else min(b, a + limit)]
        return Document(ids.copy() if copy else ids, self.ref(i), came)

    def cursor(self, i):
        s = self.slice
        return Cursor(s.epoch, s.shard, s.row_group, self.first + i, s.dealt)


class TokenizingPool:
    """
    Reads row groups and encodes their documents, ahead of the consumer and in order.

    One executor for the loader's life, and in each thread an Encoding of its own (see tokenizer.py). A
    tokenizer with nanochat's face only is called as nanochat calls it: from one thread, a batch at a time.
    """

    def __init__(self, tokenizer, threads, batch=None, limit=None):
        self.bos, self.threads = tokenizer.get_bos_token_id(), threads
        self.own = hasattr(tokenizer, "encode_documents")
        self.batch = batch if self.own else batch or 128    # documents of a chunk; None: free to choose
        self.limit = limit                                  # tokens of a document that are wanted
        self.tokenizer, self.dtype = tokenizer, np.dtype(getattr(tokenizer, "dtype", np.uint32))
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.executor = ThreadPoolExecutor(threads if self.own else 1, "tokenize")
        self.tokenized, self.nulls, self.lock = 0, 0, threading.Lock()

    def chunks(self, reader, slices, depth):
        """Chunks of all documents of the slices. `depth`: how many are under way behind the next."""
        def read(s):
            return reader.read(s.shard, s.row_group, s.rows[s.start:])

        def encode(part):
            s, first, array = part
            rows = s.rows[first:first + len(array)]
            return Chunk(*self._encode(reader, s.shard, s.row_group, rows, array, self.limit), s, first)

        parts = (part for s, array in in_order(self.executor, read, slices, 2)
                 for part in self._split(s, array))
        return (chunk for _, chunk in in_order(self.executor, encode, parts, depth + 1))

    def documents(self, reader, refs, limit):
        """Read and encode just the documents of these refs: {(shard, row_group, row): ids}."""
        wanted = collections.defaultdict(set)
        for _, shard, row_group, row, *_ in refs:
            wanted[shard, row_group].add(row)

        def read(item):
            (shard, row_group), rows = item
            return reader.read(shard, row_group, sorted(rows))

        def encode(part):
            return self._encode(reader, *part, limit)

        parts = ((*where, sorted(rows)[i:i + 64], array[i:i + 64])
                 for (where, rows), array in in_order(self.executor, read, wanted.items(), 2)
                 for i in range(0, len(rows), 64))
        found = {}
        for (shard, row_group, rows, _), (ids, bounds) in in_order(self.executor, encode, parts,
                                                                   2 * self.threads):
            for row, a, b in zip(rows, bounds, bounds[1:], strict=False):
                found[shard, row_group, row] = ids[a:b].copy()
        return found

    def _split(self, s, array):
        """A slice in parts of whole documents: tokenizer batches where the packer counts in them."""
        size = self.batch or (32 if is_text(array.type) else len(s.rows))
        for first in range(s.start, len(s.rows), size):
            yield s, first, array[first - s.start:][:size]

    def _encode(self, reader, shard, row_group, rows, array, limit):
        """(ids, bounds) of an array of documents; an error names shard, row group and rows."""
        try:
            ids, bounds = (self._encode_text(array, limit) if is_text(array.type)
                           else self._view_tokens(array, reader.shards[shard]))
        except BaseException as error:    # tiktoken's panics are no Exceptions
            if len(rows) > 1:    # one by one, to find the culprit
                for i in range(len(rows)):
                    self._encode(reader, shard, row_group, rows[i:i + 1], array[i:i + 1], limit)
            where = f"row {rows[0]}" if len(rows) == 1 else f"rows {min(rows)} to {max(rows)}"
            raise RuntimeError(f"{reader.shards[shard].path}, row group {row_group}, {where}: "
                               f"{type(error).__name__}: {error}") from error
        with self.lock:
            self.tokenized += len(ids)
            self.nulls += array.null_count
        return ids, bounds

    def _encode_text(self, array, limit):
        data, offsets, valid = column_views(array)
        texts = [data[a:b] if ok else None for a, b, ok in
                 zip(offsets.tolist(), offsets[1:].tolist(), valid.tolist(), strict=False)]
        if self.own:
            ids, bounds = self.tokenizer.encode_documents(texts, limit)
            return ids, bounds.tolist()
        strings = [str(text, "utf-8") for text in texts if text is not None]
        encoded = iter(self.tokenizer.encode(strings, prepend=self.bos, num_threads=self.threads))
        arrays = [np.array(() if text is None else next(encoded), self.dtype) for text in texts]
        return np.concatenate(arrays), [0, *itertools.accumulate(map(len, arrays))]

    def _view_tokens(self, array, shard):
        """No copy: the ids of a token shard as they lie in the column's buffer."""
        if shard.fingerprint != self.fingerprint:
            raise ValueError(f"tokens of the tokenizer {shard.fingerprint}, but this run's is "
                             f"{self.fingerprint}; make them anew: python -m dev.prepare tokenize")
        data, offsets, valid = column_views(array)
        size, lengths = shard.dtype.itemsize, np.diff(offsets)
        if (lengths % size).any():
            raise ValueError(f"a document is no whole number of {shard.dtype} tokens")
        ids = np.frombuffer(data[offsets[0]:offsets[-1]], shard.dtype).astype(self.dtype, copy=False)
        bounds = (offsets - offsets[0]) // size
        if (lengths[valid] == 0).any() or (ids[bounds[:-1][valid]] != self.bos).any():
            raise ValueError(f"a document does not begin with BOS ({self.bos})")
        return ids, bounds.tolist()

    def close(self):
        self.executor.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------
# Packing: documents to rows of T + 1 tokens. Pure: no files, no threads, no rank, no chance.
#
# take(chunk, i)  is given the documents of a chunk from i on; returns the first that it did not take
# row(ended)      the next row as a list of arrays; None: it wants documents first. Once no more can come,
#                 the last row may be short and [] is the end
# held()          the Documents it holds, oldest first; restore(documents, rows) puts them back
#
# Each counts: rows, and how many of them before it was restored; documents taken; tokens dropped; documents
# cut although they fit a row; the longest wait of a document, in rows.

class Document(NamedTuple):
    """A buffered document, or the rest of one: then its first token stands for a BOS of its own."""
    ids: np.ndarray
    ref: list           # [epoch, shard, row_group, row, offset], and bestfit's with its length
    came: int           # the lane's row count when it came


class FlatPacker:
    """All documents behind one another, cut every T tokens; the last token of a row opens the next."""

    def __init__(self, T):
        self.T, self.rows = T, 0
        self.parts, self.n_held = [], 0        # arrays not yet delivered, and their tokens
        self.last, self.last_length = None, 0    # the document they end with: (chunk, i)
        self.restored = self.documents = self.dropped = self.cut = self.longest_wait = 0

    def take(self, chunk, i):
        """As many documents as the next row needs, as one array."""
        bounds = chunk.bounds
        stop = min(len(bounds) - 1, bisect_left(bounds, bounds[i] + self.T + 1 - self.n_held, i + 1))
        if bounds[stop] > bounds[i]:
            self.parts.append(chunk.ids[bounds[i]:bounds[stop]])
            self.n_held += bounds[stop] - bounds[i]
            last = bisect_left(bounds, bounds[stop], i, stop) - 1    # null documents have no tokens
            self.last, self.last_length = (chunk, last), bounds[stop] - bounds[last]
        self.documents += len({*bounds[i:stop + 1]}) - 1    # those with tokens: bounds never fall
        return stop

    def row(self, ended):
        if self.n_held <= self.T:
            return self._last_row() if ended else None
        row, part = self.parts, self.parts[-1]
        self.n_held -= self.T
        cut = len(part) - self.n_held
        row[-1], self.parts = part[:cut + 1], [part[cut:]]
        self.cut += 1 < self.n_held < self.last_length <= self.T + 1
        self.rows += 1
        return row

    def _last_row(self):
        overlap = 1 if self.rows else 0        # the first token held was the last target of the row before
        row, held = self.parts, self.n_held
        self.parts, self.n_held = [], 0
        self.rows += held > overlap
        return row if held > overlap else []

    def held(self):
        """One at most, without its tokens."""
        if not self.n_held:
            return []
        chunk, i = self.last
        return [Document(None, chunk.ref(i, self.last_length - self.n_held), self.rows)]

    def restore(self, documents, rows):
        self.rows = self.restored = rows
        for document in documents:
            epoch, shard, row_group, row, offset = document.ref
            self.parts, self.n_held = [document.ids[offset:]], len(document.ids) - offset
            only = Slice(epoch, shard, row_group, [row], 0, 0)
            self.last = Chunk(document.ids, [0, len(document.ids)], only, 0), 0
            self.last_length = len(document.ids)


def choose_best_fit(sizes, free):
    """
    The next buffered document for a row with `free` empty token slots: the largest that fits, else the
    shortest, whose tail is then dropped; the oldest among equals.

    sizes: sorted list of (n_tokens, arrival). Returns (index, tokens to copy).
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
    documents pile up in the buffer until they are all it holds, so no more of one is kept than a row takes,
    and its reference has its length as well: on resume it need not be tokenized whole.
    Source: github.com/karpathy/nanochat, nanochat/dataloader.py.
    """

    def __init__(self, T, buffer_size):
        self.R, self.buffer_size, self.rows = T + 1, buffer_size, 0
        self.buffer, self.sizes = {}, []       # arrival -> Document; sorted (length, arrival)
        self.arrivals = itertools.count()
        self.pieces, self.free = [], self.R    # the row under construction
        self.restored = self.documents = self.dropped = self.cut = self.longest_wait = 0

    def take(self, chunk, i):
        """All of it: a chunk is a tokenizer batch."""
        stop = len(chunk.bounds) - 1
        for j in range(i, stop):
            if document := chunk.document(j, self.rows, self.R):
                document.ref.append(chunk.bounds[j + 1] - chunk.bounds[j])
                self._put(document)
                self.documents += 1
        return stop

    def _put(self, document):
        arrival = next(self.arrivals)
        self.buffer[arrival] = document
        insort(self.sizes, (document.ref[5], arrival))

    def row(self, ended):
        while self.free:
            if len(self.sizes) < self.buffer_size and not ended:
                return None
            if not self.sizes:
                break
            i, n = choose_best_fit(self.sizes, self.free)
            length, arrival = self.sizes.pop(i)
            document = self.buffer.pop(arrival)
            self.pieces.append(document.ids[:n])
            self.free -= n
            self.dropped += length - n
            self.cut += n < length <= self.R
            self.longest_wait = max(self.longest_wait, self.rows - document.came)
        row, self.pieces, self.free = self.pieces, [], self.R
        self.rows += bool(row)
        return row

    def held(self):
        return list(self.buffer.values())

    def restore(self, documents, rows):
        self.rows = self.restored = rows
        for document in documents:
            self._put(document)


def fill_gap(gap, lengths, copies, alone):
    """
    Choose buffered documents that fill `gap` tokens exactly, or else as much of it as can be.

    lengths: sorted, distinct; copies[n]: the documents of n tokens; alone: an integer whose bit k says that
    one document alone leaves k tokens open. Subset sum in one integer, bit k for k tokens left open: the
    longest documents first, until none is. Of those longer than half the gap only one can be part of a
    filling, so they enter all at once.
    Example: lengths [2, 3, 4, 7], one copy each: gap=10 -> [3, 7];  gap=8 -> [7], one token stays open
    """
    if alone & 1:
        return [gap]
    half, steps = gap // 2, []                 # steps: (length, what could be left open without it)
    one_of_the_longer = alone & ((1 << (gap - half)) - 1)
    left = (1 << gap) | one_of_the_longer
    for length in reversed(lengths[:bisect_right(lengths, half)]):
        for _ in range(min(len(copies[length]), gap // length)):
            steps.append((length, left))
            left |= left >> length
        if left & 1:
            break
    chosen, target = [], (left & -left).bit_length() - 1
    for length, before in reversed(steps):
        if not before >> target & 1:
            chosen.append(length)
            target += length
    return [*chosen, gap - target] if target < gap else chosen


def longest_prefix(T):
    """
    How many tokens of a document tails="drop" may deliver: a row, and 64 that may fill a gap before it.
    Without them 6.7 % of the documents that fit a row were cut (20,358 source files, T = 2048), with them
    none, for 3 % more to tokenize.
    """
    return T + 1 + 64


class ExactFitPacker:
    """
    Rows filled exactly with whole documents; every piece of one begins with BOS.

    The oldest document opens the row, so none waits for more rows than there were documents before it. One
    that is longer than a row fills rows of its own, the rest going to the back of the buffer each time; with
    tails="drop" longest_prefix(T) tokens of it are all there is. A gap is filled by fill_gap, with documents
    of which nothing was delivered yet, so that a document's rows stand far apart. Where no subset fits, the
    oldest long document gives what is missing and goes to the back, for it is cut anyway; only where there
    is none, the shortest that is longer does. `buffer_size` counts documents shorter than a row.
    """

    def __init__(self, T, bos, buffer_size, tails):
        self.R, self.buffer_size, self.keep, self.rows = T + 1, buffer_size, tails == "keep", 0
        self.limit = None if self.keep else longest_prefix(T)
        self.bos = bos                         # array of one token
        self.buffer = {}                       # arrival -> Document, oldest first
        self.arrivals = itertools.count()
        self.long = collections.deque()        # arrivals of those longer than a row, oldest first
        self.by_length = {}                    # length -> arrivals of whole others, oldest first
        self.lengths, self.bits = [], 0        # its keys, sorted, and as an integer: bit T + 1 - n for n
        self.short = self.tokens = 0           # documents in by_length; tokens of all
        self.restored = self.documents = self.dropped = self.cut = self.longest_wait = 0

    def take(self, chunk, i):
        stop = len(chunk.bounds) - 1
        size = self._size()
        while i < stop and self._wants_more(size):
            if document := chunk.document(i, self.rows, self.limit, copy=self.keep):
                self._put(document)
                self.documents += 1
                self.dropped += chunk.bounds[i + 1] - chunk.bounds[i] - len(document.ids)
            i += 1
        return i

    def _size(self):
        """The buffer grows with the lane's first rows, so that the first batch of many lanes comes soon."""
        return min(self.buffer_size, 32 + 4 * self.rows)

    def _wants_more(self, size):
        """Long documents are many tokens: of those no more than keeps the rows of one apart."""
        return self.tokens < self.R or (self.short < size and (
            self.tokens < 2 * size * self.R or len(self.buffer) < size // 4))

    def row(self, ended):
        if not ended and self._wants_more(self._size()):
            return None
        if not self.buffer:
            return []
        opener = self._pop(next(iter(self.buffer)))
        gap = self.R - len(opener.ids)
        pieces = self._deliver(opener, min(self.R, len(opener.ids)))
        if gap > 0:
            filling = fill_gap(gap, self.lengths, self.by_length, self.bits >> self.R - gap)
            for length in filling:
                pieces += self._deliver(self._pop(self.by_length[length][0]), length)
            if left := gap - sum(filling):
                pieces += self._cut_to_fit(left)
        self.rows += 1
        return pieces

    def _cut_to_fit(self, left):
        """Fill what no subset does; a row stays short only where a finite run has nothing more."""
        pieces = []
        while left and self.buffer:
            i = bisect_right(self.lengths, left)
            if self.long:
                arrival = self.long[0]
            elif i < len(self.lengths):
                arrival = self.by_length[self.lengths[i]][0]
            else:
                arrival = next(iter(self.buffer))
            document = self._pop(arrival)
            n = min(left, len(document.ids))
            pieces += self._deliver(document, n)
            left -= n
        return pieces

    def _deliver(self, document, n):
        """
        The arrays of a document's first n tokens; with tails="keep" what is left goes to the back. There
        the last token delivered stays in front of it, in the place of the BOS that its next piece gets.
        Example: n=3 of [BOS a b c d] -> [BOS a b], and [b c d] is put back; then n=3 of that -> [BOS c d]
        """
        ids, ref, came = document
        self.longest_wait = max(self.longest_wait, self.rows - came)
        resumed = ref[4] > 0
        if n < len(ids) and (self.keep or n < self.R):
            self.cut += len(ids) <= self.R and not resumed
            self._put(Document(ids[n - 1:], [*ref[:4], ref[4] + n - resumed], self.rows))
        elif n < len(ids):
            self.dropped += len(ids) - n
        return [self.bos, ids[1:n]] if resumed else [ids[:n]]

    def _put(self, document):
        n, arrival = len(document.ids), next(self.arrivals)
        self.buffer[arrival] = document
        self.tokens += n
        if n > self.R:
            self.long.append(arrival)
        elif document.ref[4] == 0:
            self.short += 1
            if n in self.by_length:
                self.by_length[n].append(arrival)
            else:
                self.by_length[n] = collections.deque([arrival])
                insort(self.lengths, n)
                self.bits |= 1 << self.R - n

    def _pop(self, arrival):
        """Always the oldest of its kind: of all, of the long ones, or of its length."""
        document = self.buffer.pop(arrival)
        n = len(document.ids)
        self.tokens -= n
        if n > self.R:
            self.long.popleft()
        elif document.ref[4] == 0:
            self.short -= 1
            self.by_length[n].popleft()
            if not self.by_length[n]:
                del self.by_length[n]
                self.lengths.pop(bisect_left(self.lengths, n))
                self.bits ^= 1 << self.R - n
        return document

    def held(self):
        return list(self.buffer.values())

    def restore(self, documents, rows):
        """The rest of a document that was cut keeps one token in front, to stand for its BOS."""
        self.rows = self.restored = rows
        for document in documents:
            offset = document.ref[4]
            self._put(document._replace(ids=document.ids[max(0, offset - 1):]))


# ---------------------------------------------------------------------------------------------------------
# Lanes: independent streams of rows

class Place(NamedTuple):
    """Where one source of one lane stands: all that a state says of it. The default is the beginning."""
    taken: int | None = 0    # rows it gave since the shares of the sources began; None: it has no more
    rows: int = 0            # rows it gave in all
    cursor: Cursor = Cursor()
    buffer: list | tuple = ()    # the Documents that its packer holds, oldest first

    def as_json(self):
        return {"taken": self.taken, "rows": self.rows, "cursor": list(self.cursor),
                "buffer": [list(document.ref) for document in self.buffer]}

    @classmethod
    def from_json(cls, saved):
        buffer = [Document(None, ref, saved["rows"]) for ref in saved["buffer"]]
        return cls(saved["taken"], saved["rows"], Cursor(*saved["cursor"]), buffer)


class Stream:
    """One source within one lane: chunks into a packer, and the cursor behind what it was given."""

    def __init__(self, name, packer, chunks, cursor):
        self.name, self.packer, self.chunks, self.cursor = name, packer, chunks, cursor
        self.chunk, self.i, self.ended = None, 0, False
        self.fed_in = cursor.epoch    # the last epoch that had a token for this lane

    def next_row(self):
        """The arrays of the next row: T + 1 tokens, fewer in a finite stream's last row, [] behind it."""
        while (row := self.packer.row(self.ended)) is None:
            if self.chunk is None or self.i == len(self.chunk.bounds) - 1:
                self._next_chunk()
            else:
                self.i = self.packer.take(self.chunk, self.i)
        return row

    def _next_chunk(self):
        chunk = next(self.chunks, None)
        if chunk is None:
            self.cursor, self.chunk, self.ended = self._cursor(), None, True
            return
        self.chunk, self.i = chunk, 0
        if len(chunk.ids):
            self.fed_in = chunk.slice.epoch
        elif chunk.slice.epoch > self.fed_in + 1:
            raise ValueError(f"{self.name} got nothing but null documents for a whole epoch; launch with "
                             "fewer lanes, or convert the data again without null documents")

    def _cursor(self):
        return self.cursor if self.chunk is None else self.chunk.cursor(self.i)

    def place(self, taken):
        return Place(taken, self.packer.rows, self._cursor(), self.packer.held())


def turns(weights, taken):
    """
    Yields which source gives the lane's next row, so that after every row each source i has given its exact
    share of them to within one row (strictly). weights: positive integers; taken[i]: its rows so far. Row n
    of a source, from 0, must stand behind row n * total / w of the lane and not behind (n + 1) * total / w;
    of the sources that may stand here, the one that is due first does. Source: Pfair scheduling, Baruah et
    al. 1996.
    Example: weights [2, 1] -> 0, 1, 0, and so on again: the order repeats after sum(weights) rows
    """
    total, taken = sum(weights), list(taken)
    for now in itertools.count(sum(taken) + 1):
        due = [(-(-(n + 1) * total // w), i) for i, (n, w) in enumerate(zip(taken, weights, strict=True))
               if n * total // w < now]
        _, turn = min(due)
        yield turn
        taken[turn] += 1


class Lane:
    """The streams of one lane, one a source, taking turns by their weights."""

    def __init__(self, streams, weights, taken):
        self.streams, self.weights, self.taken = streams, weights, taken    # by name of the source
        self._begin_turns()

    def _begin_turns(self):
        self.live = [name for name, taken in self.taken.items() if taken is not None]
        shares = whole_numbers([self.weights[name] for name in self.live])
        order = turns(shares, [self.taken[name] for name in self.live])
        self.turns = (self.live[turn] for turn in order)
        if sum(shares) <= 10_000:    # then computed once: 0.6 -> 0.03 us a row
            self.turns = itertools.cycle(list(itertools.islice(self.turns, sum(shares))))

    def next_row(self):
        """A source that ends leaves its share to the others, whose shares begin anew."""
        while self.live:
            name = next(self.turns)
            if row := self.streams[name].next_row():
                self.taken[name] += 1
                return row
            self.taken = {other: None if other == name or taken is None else 0
                          for other, taken in self.taken.items()}
            self._begin_turns()
        return []

    def places(self):
        return {name: stream.place(self.taken[name]) for name, stream in self.streams.items()}


def whole_numbers(weights):
    """Weights as integers in the same proportions: [0.7, 0.2, 0.1] -> [7, 2, 1]."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = np.lcm.reduce([fraction.denominator for fraction in exact], dtype=object) if exact else 1
    return [int(fraction * scale) for fraction in exact]


# ---------------------------------------------------------------------------------------------------------
# Batches: rows from the lanes in turn, by a thread that works ahead, onto the device

CLOSED = "this PackedLoader was closed; make a new one and load the state into it"


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    position: tuple       # where the loader stands behind it: (rows of the run, {lane: {source: Place}})
    full: bool            # no row is empty, as those of a lane that has ended are
    more: bool            # False: this batch and all behind it are empty
    copied: object        # CUDA event: the copy to the device is done; None on a CPU


class Pipeline:
    """
    The threads and lanes of a loader from one position on. Another position is another Pipeline: what the
    old threads are still at, they do to lanes that nobody reads any more.
    """

    def __init__(self, lanes, pool, rows, B, T, world_size, device, may_end, prefetch):
        self.lanes, self.pool, self.most_ready = lanes, pool, prefetch + 1
        self.order = itertools.cycle(lanes)
        self.may_end = may_end    # some source may: then rows can be short, or empty
        self.ahead = {}    # rows of lanes that were packed for a batch to come
        self.T, self.world_size, self.device = T, world_size, device
        self.rows = np.empty((B, T + 1), pool.dtype)
        self.position = rows, {number: lane.places() for number, lane in lanes.items()}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pid, self.began, self.waited = os.getpid(), time.perf_counter(), 0.0
        # A thread begins on GPU 0, where each rank would then keep a context of hundreds of MB.
        on_gpu = (torch.cuda.set_device, (self.stream.device,)) if self.stream else ()
        self.executor, self.packing = ThreadPoolExecutor(1, "pack", *on_gpu), threading.Lock()
        self.ready, self.error, self.told = collections.deque(), None, queue.SimpleQueue()

    def next_batch(self, position):
        """
        The batch behind the loader's position. It stays the first until its own position is the loader's: a
        Ctrl-C anywhere in next() loses none.
        """
        asked = time.perf_counter()
        if self.ready and self.ready[0].position is position:
            self.ready.popleft()
        self.executor.submit(self._work_ahead)
        while not self.told.empty():    # of batches that came before
            self.told.get()
        while not self.ready and self.error is None:
            self.told.get()    # no Condition: a Ctrl-C in its Python code could leave it locked for ever
        if not self.ready:
            raise self.error
        self.waited += time.perf_counter() - asked
        return self.ready[0]

    def _work_ahead(self):
        with self.packing:
            while len(self.ready) < self.most_ready and self.error is None:
                try:
                    self.ready.append(self._pack_batch())
                except BaseException as error:    # tiktoken's panics are no Exceptions
                    self.error = self.error or error
                self.told.put(None)

    def _pack_batch(self):
        B, R = self.rows.shape
        pieces, short = [], []
        numbers = list(itertools.islice(self.order, B))
        for b, number in enumerate(numbers):
            row = self.ahead.pop(number, None) or self.lanes[number].next_row()
            pieces += row
            if self.may_end and (n := sum(map(len, row))) < R:
                pieces.append(np.full(R - n, self.pool.bos, self.rows.dtype))
                short.append((b, n))
        np.concatenate(pieces, out=self.rows.reshape(-1))
        rows, places = self.position
        places = {**places, **{number: self.lanes[number].places() for number in set(numbers)}}
        self.position = rows + B * self.world_size, places
        empty = sum(n == 0 for _, n in short)
        more = empty < B or any(map(self._look_ahead, self.lanes))
        return self._to_device(short, self.position, empty == 0, more)

    def _look_ahead(self, number):
        """The next row of a lane, for a later batch: in this one's position it is not delivered yet."""
        if number not in self.ahead:
            self.ahead[number] = self.lanes[number].next_row()
        return self.ahead[number]

    def _to_device(self, short, *about):
        """New memory for every batch; on CUDA pinned, and copied on a stream of its own."""
        B, R = self.rows.shape
        both = torch.empty((2, B, R - 1), dtype=torch.int64, pin_memory=self.stream is not None)
        np.copyto(both[0].numpy(), self.rows[:, :-1])
        np.copyto(both[1].numpy(), self.rows[:, 1:])
        for b, n in short:
            both[1, b, max(0, n - 1):] = -100
        if self.stream is None:
            return Batch(*both.to(self.device), *about, None)
        with torch.cuda.stream(self.stream):
            both = both.to(self.device, non_blocking=True)
        return Batch(*both, *about, self.stream.record_event())

    def rows_of_lanes(self):
        """Pack all that is left, undelivered: {lane: rows in all}."""
        with self.packing:
            for lane in self.lanes.values():
                while lane.next_row():
                    pass
        return {number: sum(stream.packer.rows for stream in lane.streams.values())
                for number, lane in self.lanes.items()}

    def close(self):
        """Without waiting for what the threads are at; whoever waits for a batch is told."""
        self.error = self.error or RuntimeError(CLOSED)
        self.told.put(None)
        self.pool.close()
        self.executor.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------
# The loader: arguments, states, the end

VERSION = 1


class PackedLoader(IterableDataset):
    """
    An iterator over (inputs, targets), int64 (B, T) on `device`; targets are inputs one token on.

    packing: "flat", "bestfit" or "exactfit" (tails: "keep" or "drop"). data_dir: a folder or URI of
    shards, or {folder: weight}, weights being shares of tokens. num_lanes: any multiple of world_size;
    every world size that divides it gives the same rows. epochs: n, or {folder: n}: a finite run. Its
    last rows are completed with BOS whose targets are -100 (torch's ignore_index); a source that ends
    leaves its share to the others; and where lanes differ in length, `uneven` says what ranks do: "pad"
    (go on with such rows until the longest is done), "stop" (with the shortest), "error", or
    "free" (each rank ends by itself; no process group is asked). prefetch: batches made ahead.
    A yielded batch is never written again.
    """

    def __init__(self, tokenizer, B: int, T: int, split: str, *, packing: str = "exactfit",
                 tails: str = "keep", buffer_size: int | None = None, data_dir: str | dict | None = None,
                 rank: int | None = None, world_size: int | None = None, num_lanes: int | None = None,
                 shuffle_seed: int | None = None, epochs: int | dict | None = None, uneven: str = "pad",
                 device="cpu", threads: int | None = None, prefetch: int = 2,
                 tokenizer_batch_size: int = 128):
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.tokenizer, self.B, self.T, self.split = tokenizer, B, T, split
        self.packing, self.tails, self.uneven = packing, tails, uneven
        self.shuffle_seed, self.tokenizer_batch_size = shuffle_seed, tokenizer_batch_size
        usual_buffer = {"flat": 1, "bestfit": 1000}.get(packing, 256)
        self.buffer_size = usual_buffer if buffer_size is None else buffer_size
        self.device, self.prefetch = torch.device(device), prefetch
        self.threads = cores_of_this_rank() if threads is None else threads
        self.num_lanes, self._asked_lanes = self.world_size if num_lanes is None else num_lanes, num_lanes
        self._check_arguments()
        self.weights, self.epochs = sources_of(data_dir, epochs)
        self.shards = {name: list_shards(name, split) for name in self.weights}
        self.readers = self._make_readers(self.num_lanes, {})
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._group = self._own_group()
        self._position = 0, {}      # where to go on: rows of the run; {lane: {source: Place}}
        self._pipeline, self._pid = None, os.getpid()
        self._finished = self._closed = False

    def _check_arguments(self):
        choices = {"split": ("train", "val"), "packing": ("flat", "bestfit", "exactfit"),
                   "tails": ("keep", "drop"), "uneven": ("pad", "stop", "error", "free")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        for name in ("B", "T", "world_size", "num_lanes", "buffer_size", "tokenizer_batch_size", "threads",
                     "prefetch", "shuffle_seed"):
            n, least = getattr(self, name), int(name not in ("prefetch", "shuffle_seed"))
            if (name, n) != ("shuffle_seed", None) and (not isinstance(n, int) or n < least):
                raise ValueError(f"{name}={n!r}; expected an int, {least} or more")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} of world_size={self.world_size}; ranks count from 0")
        if self.num_lanes % self.world_size:
            raise ValueError(f"{self.num_lanes} lanes cannot be shared evenly by {self.world_size} ranks; "
                             f"choose num_lanes a multiple of {self.world_size}, or a world size in "
                             f"{divisors(self.num_lanes)}")

    def _make_readers(self, num_lanes, saved):
        """saved: what a state says of each source, {} for a new run. By name: then whose turn it is, too."""
        readers, new = {}, {"by_document": None, "grown": []}
        for name in sorted(self.shards):
            old = saved.get(name, new)
            readers[name] = DocumentReader(self.shards[name], num_lanes, self.shuffle_seed,
                                           old["by_document"], old["grown"])
        return readers

    def _own_group(self):
        """Only a finite run on several ranks needs them to talk: one small message a batch, over gloo."""
        if not self._is_finite() or self.world_size == 1 or self.uneven == "free":
            return None
        if not dist.is_initialized():
            raise ValueError(f"a finite run (epochs) keeps {self.world_size} ranks in step through "
                             "torch.distributed; call torch.distributed.init_process_group() before, or "
                             'pass uneven="free" and let every rank end by itself')
        return dist.new_group(backend="gloo")

    def _is_finite(self):
        """One source without end, and the run has none."""
        return all(self.epochs.values())

    # Going on from a position ----------------------------------------------------------------------------

    def _lanes_from(self, rows, num_lanes):
        """This rank's lanes in the order of their turns, from row `rows` of the run on."""
        return [(rows + self.rank + i * self.world_size) % num_lanes
                for i in range(num_lanes // self.world_size)]

    def _start(self):
        """Threads, lanes, and what the packers held; in the process that iterates, when it begins to."""
        rows, saved = self._position
        limit = longest_prefix(self.T) if (self.packing, self.tails) == ("exactfit", "drop") else None
        batch = self.tokenizer_batch_size if self.packing == "bestfit" else None
        pool = TokenizingPool(self.tokenizer, self.threads, batch, limit)
        lanes = {number: self._make_lane(pool, number, saved.get(number, {}))
                 for number in self._lanes_from(rows, self.num_lanes)}
        self._restore_buffers(pool, lanes, saved)
        self._pipeline = Pipeline(lanes, pool, rows, self.B, self.T, self.world_size, self.device,
                                  any(self.epochs.values()), self.prefetch)
        self._position = self._pipeline.position

    def _make_lane(self, pool, number, saved):
        streams_of_rank = self.num_lanes // self.world_size * len(self.readers)
        # 8 chunks a thread, over all streams: work for the others while one is at a document of 5 MB. A
        # consumer of 12 ms a batch waited 9 % of its time with 2, 0.3 % with 8 (464 MB of sources, 2 cores).
        text_ahead = 8 * self.threads // streams_of_rank
        streams, taken = {}, {}
        for name, reader in self.readers.items():
            place = saved.get(name, Place())
            depth = 1 + text_ahead * (reader.shards[0].kind == "text")    # a chunk of tokens is a row group
            chunks = pool.chunks(reader, reader.slices(number, place.cursor, self.epochs[name]), depth)
            streams[name] = Stream(f"{name}: lane {number}", self._make_packer(pool), chunks, place.cursor)
            taken[name] = place.taken
        return Lane(streams, self.weights, taken)

    def _make_packer(self, pool):
        if self.packing == "flat":
            return FlatPacker(self.T)
        if self.packing == "bestfit":
            return BestFitPacker(self.T, self.buffer_size)
        return ExactFitPacker(self.T, np.array([pool.bos], pool.dtype), self.buffer_size, self.tails)

    def _restore_buffers(self, pool, lanes, saved):
        """Read and tokenize the documents that the packers held, each row group once for all lanes."""
        for name, reader in self.readers.items():
            places = {number: saved[number][name] for number in lanes if name in saved.get(number, {})}
            limit = self.T + 1 if self.packing == "bestfit" else pool.limit    # bestfit's refs know lengths
            held = [document.ref for place in places.values() for document in place.buffer]
            ids = pool.documents(reader, held, limit)
            for number, place in places.items():
                documents = [document._replace(ids=ids[tuple(document.ref[1:4])][:limit])
                             for document in place.buffer]
                lanes[number].streams[name].packer.restore(documents, place.rows)

    # Iterating -------------------------------------------------------------------------------------------

    def __iter__(self):
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise ValueError(f"PackedLoader has threads of its own; {info.num_workers} DataLoader workers "
                             "would each deliver the same rows: pass num_workers=0 (fastest) or 1")
        if info is not None and self._group is not None:
            raise ValueError("the ranks of a finite run talk, which a DataLoader worker cannot: pass "
                             'num_workers=0, or to this loader uneven="free"')
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._finished:
            raise StopIteration
        if self._pipeline is None or self._pipeline.pid != os.getpid():    # at first, and behind a fork
            self._start()
        batch = self._pipeline.next_batch(self._position)
        if self._is_finite() and self._is_end(batch):
            self._finished = True
            self._leave_group()
            raise StopIteration
        if batch.copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.copied)
            batch.inputs.record_stream(stream)    # both are parts of one allocation
        tensors = batch.inputs, batch.targets
        self._position = batch.position    # last: if what comes before it is interrupted, it is done again
        return tensors

    def _is_end(self, batch):
        """Whether a finite run ends before this batch: asked of all ranks where there are several."""
        more, lacking, _ = self._ask_all(batch.more, not batch.full, False)
        if lacking and self.uneven == "error":
            self._refuse_uneven()
        return bool(lacking) if self.uneven == "stop" else not more

    def _ask_all(self, *flags):
        """Each flag: is it set on any rank? The last one: a rank has left."""
        if self._group is None:
            return flags
        flags = torch.tensor(flags, dtype=torch.int32)
        try:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError("this finite run has lost a rank: its process ended too soon") from error
        if flags[-1]:
            raise RuntimeError("this finite run has lost a rank: it closed its loader too soon")
        return flags.tolist()

    def _leave_group(self):
        """All ranks have just met there for the last time. A group is 3 threads and 5 open files."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _refuse_uneven(self):
        counts = torch.zeros(self.num_lanes, dtype=torch.int64)
        for number, rows in self._pipeline.rows_of_lanes().items():
            counts[number] = rows
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        if counts.min() < counts.max():
            raise ValueError('uneven="error": the lanes have different numbers of rows: ' + ", ".join(
                f"lane {number}: {rows}" for number, rows in enumerate(counts.tolist())))

    def close(self):
        """Stop the threads. In a finite run, also tell the other ranks, which would wait for this one."""
        if self._group is not None and not self._closed and self._pid == os.getpid():
            flags = torch.tensor([0, 0, 1], dtype=torch.int32)    # as in _is_end
            with contextlib.suppress(RuntimeError, ValueError):
                self._farewell = dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True)
        if self._pipeline is not None and self._pipeline.pid == os.getpid():
            self._pipeline.close()
        self._closed = True

    def __del__(self):
        if not getattr(self, "_closed", True):
            self.close()

    def __getstate__(self):
        raise TypeError("a PackedLoader has threads and cannot be pickled: pass DataLoader num_workers=0, or "
                        'multiprocessing_context="fork"')

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """
        Load this and the next batch is the one that would have come next. Plain JSON: references to
        documents, never tokens. It holds this rank's lanes; merge_states joins those of all ranks.
        """
        if not self._position[1]:
            self._start()
        rows, places = self._position
        epoch, shard, row_group, _, _ = next(iter(next(iter(places.values())).values())).cursor
        return {"version": VERSION, "epoch": epoch, "pq_idx": max(0, shard), "rg_idx": max(0, row_group),
                "num_lanes": self.num_lanes, "rows": rows, **self._settings(),
                "sources": {name: self._describe(name) for name in self.readers},
                "lanes": {str(number): {name: place.as_json() for name, place in lane.items()}
                          for number, lane in places.items()}}

    def _settings(self):
        """What must be the same for the rows to be the same."""
        settings = {"split": self.split, "T": self.T, "packing": self.packing,
                    "shuffle_seed": self.shuffle_seed, "tokenizer": self._fingerprint}
        if self.packing == "exactfit":
            settings["tails"] = self.tails
        if self.packing == "bestfit":
            settings["tokenizer_batch_size"] = self.tokenizer_batch_size
        if self.packing != "flat":
            settings["buffer_size"] = self.buffer_size
        return settings

    def _describe(self, name):
        reader = self.readers[name]
        return {"weight": self.weights[name], "shards": len(reader.shards),
                "fingerprint": reader.fingerprint, "by_document": reader.by_document,
                "grown": list(reader.grown)}

    def load_state_dict(self, state: dict) -> None:
        """
        Go on where a state ends; also on a loader that was iterated. ValueError, and nothing changed, where
        it does not fit. nanochat's three keys resume approximately: at the row group behind theirs.
        """
        if {"pq_idx", "rg_idx"} <= state.keys() <= {"pq_idx", "rg_idx", "epoch"}:
            num_lanes, readers = self.num_lanes, self.readers
            position = self._position_of_three_keys(**state)
        else:
            try:
                num_lanes, readers, position = self._position_of(state)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"this state is damaged ({type(error).__name__}: {error}); load it as "
                                 "state_dict() gave it") from error
        group = self._own_group() if self._finished else self._group
        if self._pipeline is not None and self._pipeline.pid == os.getpid():
            self._pipeline.close()
        self.num_lanes, self.readers, self._position, self._group = num_lanes, readers, position, group
        self._pipeline, self._finished = None, False

    def _position_of(self, state):
        self._check_settings(state)
        num_lanes, (sources, lanes) = state["num_lanes"], self._match_sources(state)
        mine = self._lanes_from(state["rows"], num_lanes)
        if missing := [number for number in mine if str(number) not in lanes]:
            raise ValueError(
                f"this state lacks lanes {missing} of {num_lanes}: it is one rank's; load "
                "merge_states([...]) of the states of all ranks, taken at one step")
        readers = self._make_readers(num_lanes, sources)
        places = {number: self._places(lanes[str(number)], sources) for number in mine}
        self._report_sources(sources)
        return num_lanes, readers, (state["rows"], places)

    def _places(self, lane, sources):
        """
        {source: Place} of a lane. The shares begin anew where they are others, or where a source that had
        ended has more to give: more epochs, or shards that were added.
        """
        places = {name: Place.from_json(lane[name]) if name in lane else Place() for name in self.shards}
        more = [name for name, place in places.items() if place.taken is None and (
            self.epochs[name] is None or self.epochs[name] > place.cursor.epoch
            or len(self.shards[name]) > sources[name]["shards"])]
        if not more and self.weights == {name: source["weight"] for name, source in sources.items()}:
            return places
        return {name: place if place.taken is None and name not in more else place._replace(taken=0)
                for name, place in places.items()}

    def _check_settings(self, state):
        if state.get("version") != VERSION:
            raise ValueError(f"this state has version {state.get('version')!r}, this code reads {VERSION}; "
                             "resume with the code that wrote it")
        if lacking := {"num_lanes", "rows", "sources", "lanes"} - state.keys():
            raise ValueError(f"this state lacks {sorted(lacking)}; load it as state_dict() gave it")
        for key, ours in self._settings().items():
            if state.get(key) != ours:
                raise ValueError(f"{key} of the state is {state.get(key)!r}, of this loader {ours!r}; "
                                 "resume with the same, or start a new run without the state")
        lanes = state["num_lanes"]
        if self._asked_lanes not in (None, lanes):
            raise ValueError(f"num_lanes of the state is {lanes}, of this loader {self._asked_lanes}; "
                             f"resume with num_lanes={lanes}, or leave it out")
        if lanes % self.world_size:
            raise ValueError(f"this state has {lanes} lanes, which {self.world_size} ranks cannot share "
                             f"evenly; resume with a world size in {divisors(lanes)}")

    def _match_sources(self, state):
        """The state's sources and lanes. Known by name; where both sides have one only, it may have moved."""
        sources, lanes = state["sources"], state["lanes"]
        if len(sources) == len(self.shards) == 1 and sources.keys() != self.shards.keys():
            (old,), (new,) = sources, self.shards
            sources = {new: sources[old]}
            lanes = {number: {new: part[old]} for number, part in lanes.items()}
        if not sources.keys() & self.shards.keys():
            raise ValueError(f"sources of the state are {sorted(sources)}, of this loader "
                             f"{sorted(self.shards)}; name at least one as it was, or start anew")
        for name in self.shards.keys() & sources.keys():
            self._check_shards(name, sources[name], [part[name]["cursor"][0] for part in lanes.values()])
        return sources, lanes

    def _report_sources(self, saved):
        """On rank 0, a line for each source of a mixture that has another weight now."""
        before = {name: source["weight"] for name, source in saved.items()}
        names = before | self.weights
        if self.rank or len(names) == 1:
            return
        for name in names:
            was, now = before.get(name, 0), self.weights.get(name, 0)
            if was != now:
                print(f"data: source {name}: weight {was} -> {now}"
                      + ("" if was else "; it begins at its first document"))

    def _check_shards(self, name, saved, epochs):
        shards, n = self.shards[name], saved["shards"]
        ours = fingerprint_of(shards[:n])
        if ours != saved["fingerprint"]:
            raise ValueError(
                f"shards of {name}: the state knows {n} with fingerprint {saved['fingerprint']}, here are "
                f"{len(shards)} with {ours}; put the same files back (names and sizes), or start anew")
        if len(shards) > n and (self.split != "train" or max(epochs) > 1):
            raise ValueError(
                f"shards of {name}: the state knows {n}, here are {len(shards)}; they may be added to "
                "the train split during a run's first epoch only: take the new ones away, or start anew")

    def _position_of_three_keys(self, pq_idx, rg_idx, epoch=1):
        for name, reader in self.readers.items():
            if not (pq_idx in range(len(reader.shards)) and rg_idx >= 0 and epoch >= 1):
                raise ValueError(f"pq_idx of the state is {pq_idx}, rg_idx {rg_idx}, epoch {epoch}, but "
                                 f"{name} has {len(reader.shards)} shards; resume with the same data")
        if self.shuffle_seed is not None:
            raise ValueError("a state of nanochat's three keys is no place in a shuffled order; resume "
                             "with shuffle_seed=None, as nanochat ran, or start anew")
        warnings.warn("a state of nanochat's three keys resumes approximately, at the next row group; the "
                      "rows that were buffered are lost. Save state_dict() to resume exactly", stacklevel=3)
        places = {name: Place(cursor=Cursor(epoch, pq_idx, self._row_group_behind(reader, rg_idx)))
                  for name, reader in self.readers.items()}
        return 0, dict.fromkeys(self._lanes_from(0, self.num_lanes), places)

    def _row_group_behind(self, reader, rg_idx):
        """The first that no lane has been given a document of."""
        return rg_idx + 1 if reader.by_document else (rg_idx // self.num_lanes + 1) * self.num_lanes

    def stats(self) -> dict:
        """
        Since the first batch or the last load, in this process, prefetched batches included: tokens,
        documents and rows packed; share of documents that fit a row and yet were cut; longest wait of a
        document in rows of its lane; seconds that next() waited. Per source under "sources". Dropped are
        tokens of documents that were tokenized whole: text that tails="drop" never encodes is not counted.
        """
        if self._pipeline is None:
            return {}
        pipeline, seconds = self._pipeline, time.perf_counter() - self._pipeline.began
        packers = {name: [lane.streams[name].packer for lane in pipeline.lanes.values()]
                   for name in self.readers}
        total = count_packed(list(itertools.chain(*packers.values())), self.T)
        return {**total, "tokens_tokenized": pipeline.pool.tokenized, "null_documents": pipeline.pool.nulls,
                "rows_per_second": total["rows"] / seconds, "waited_s": pipeline.waited,
                "sources": {name: count_packed(own, self.T) for name, own in packers.items()}}


def count_packed(packers, T):
    documents, rows = sum(p.documents for p in packers), sum(p.rows - p.restored for p in packers)
    return {"rows": rows, "documents": documents, "tokens_delivered": rows * T,
            "tokens_dropped": sum(p.dropped for p in packers),
            "cut_share": sum(p.cut for p in packers) / max(1, documents),
            "longest_wait_rows": max(p.longest_wait for p in packers)}


def merge_states(states: list) -> dict:
    """The states of all ranks, taken at one step, as one that every allowed world size loads."""
    if not states:
        raise ValueError("no states to merge; pass those of all ranks, taken at one step")
    first = states[0]
    for state in states[1:]:
        for key in first.keys() - {"lanes", "epoch", "pq_idx", "rg_idx"}:
            if state.get(key) != first[key]:
                raise ValueError(f"states of different steps or runs: {key} is {first[key]!r} in one and "
                                 f"{state.get(key)!r} in another; merge states taken at the same step")
    lanes = {number: part for state in states for number, part in state["lanes"].items()}
    if missing := sorted(set(range(first["num_lanes"])) - set(map(int, lanes))):
        raise ValueError(f"lanes {missing} of {first['num_lanes']} are in none of the {len(states)} states; "
                         "merge the states of all ranks")
    return {**first, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def sources_of(data_dir, epochs):
    """data_dir and epochs as {source: weight} and {source: epochs}."""
    given = data_dir if isinstance(data_dir, dict) else {find_data(data_dir): 1}
    weights = {source_name(path): weight for path, weight in given.items()}
    if not weights:
        raise ValueError("data_dir is an empty dict; name at least one source: {folder: weight}")
    if len(weights) < len(given):
        raise ValueError(f"data_dir names a source twice: {', '.join(map(str, given))}; name each once, with "
                         "its whole weight")
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"weight {weight!r} of source {name}; a weight is a positive number, a share "
                             "of the tokens")
    epochs = ({source_name(path): n for path, n in epochs.items()} if isinstance(epochs, dict)
              else dict.fromkeys(weights, epochs))
    if unknown := epochs.keys() - weights.keys():
        raise ValueError(f"epochs names {sorted(unknown)}, data_dir has {sorted(weights)}")
    for n in epochs.values():
        if n is not None and (not isinstance(n, int) or n < 1):
            raise ValueError(f"epochs={n!r}; expected an int, 1 or more, or None: without end")
    return weights, {name: epochs.get(name) for name in weights}


def source_name(path):
    """a, a/ and ./a are one source."""
    return str(path).rstrip("/") if "://" in str(path) else os.path.normpath(path)


def cores_of_this_rank():
    """The cores that this process may use, shared among the ranks of its node."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def tokenizer_fingerprint(tokenizer):
    """A tokenizer without a fingerprint of its own is known by what it makes of a line of text."""
    if hasattr(tokenizer, "fingerprint"):
        return tokenizer.fingerprint()
    probe = "The quick brown fox,\n\tjumps over 1234567890 lazy dogs; na\u00efve \u4f60\u597d <|endoftext|>"
    ids = [tokenizer.get_bos_token_id(), *tokenizer.encode([probe])[0]]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------
# nanochat's four generators

def tokenizing_distributed_data_loader_with_state(
        tokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4, tokenizer_batch_size: int = 128,
        device="cuda", resume_state_dict: dict | None = None) -> Iterator[tuple]:
    """Packs "flat"; yields (inputs, targets, state_dict)."""
    return batches_with_state(resume_state_dict, tokenizer, B, T, split, packing="flat", device=device,
                              threads=tokenizer_threads, tokenizer_batch_size=tokenizer_batch_size)


def tokenizing_distributed_data_loader(*args, **kwargs) -> Iterator[tuple]:
    """The same without the state."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state(*args, **kwargs):
        yield inputs, targets


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4, tokenizer_batch_size: int = 128,
        device="cuda", resume_state_dict: dict | None = None, buffer_size: int = 1000) -> Iterator[tuple]:
    """Packs "bestfit", nanochat's rows token for token; yields (inputs, targets, state_dict)."""
    return batches_with_state(resume_state_dict, tokenizer, B, T, split, packing="bestfit", device=device,
                              threads=tokenizer_threads, tokenizer_batch_size=tokenizer_batch_size,
                              buffer_size=buffer_size)


def tokenizing_distributed_data_loader_bos_bestfit(*args, **kwargs) -> Iterator[tuple]:
    """The same without the state."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs):
        yield inputs, targets


def batches_with_state(resume, *args, **kwargs):
    """nanochat saves rank 0's state only, which gives the other ranks their place, not their rows."""
    loader = PackedLoader(*args, data_dir=default_data_dir(), **kwargs)    # or an error: no built-in corpus
    if resume is not None and len(resume.get("lanes", ())) < resume.get("num_lanes", 0):
        resume = {key: resume[key] for key in ("pq_idx", "rg_idx", "epoch")}
    if resume is not None:
        loader.load_state_dict(resume)
    for inputs, targets in loader:
        yield inputs, targets, loader.state_dict()


# ---------------------------------------------------------------------------------------------------------
# python dataloader.py --show, --compare, --bench

CHOICES = [("flat", "keep"), ("bestfit", "keep"), ("exactfit", "drop"), ("exactfit", "keep")]
FIRST, SECOND, LAST = 1, 2, 4


class Outline:
    """A tokenizer whose tokens say only where in its document each one stands."""
    dtype = np.dtype(np.uint8)

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def get_bos_token_id(self):
        return FIRST

    def fingerprint(self):
        return self.tokenizer.fingerprint()

    def encode_documents(self, texts, limit=None):
        ids, bounds = self.tokenizer.encode_documents(texts)
        outline, starts, ends = np.zeros(len(ids), np.uint8), bounds[:-1], bounds[1:]
        outline[starts[starts < ends]] |= FIRST
        outline[starts[starts + 1 < ends] + 1] |= SECOND
        outline[ends[starts < ends] - 1] |= LAST
        return outline, bounds


def show(tokenizer, data_dir, T, columns=72, colour=False):
    """Rows of every packer, a block a document: ] ends it, > is where it was cut, < goes on with it."""
    for packing, tails in CHOICES:
        loader = PackedLoader(Outline(tokenizer), 256, T, "train", packing=packing, tails=tails,
                              data_dir=data_dir, prefetch=0)
        inputs, targets = next(loader)
        stats = loader.stats()
        loader.close()
        yield f"{packing_name(packing, tails)}   {describe_stats(stats)}"
        rows = torch.cat([inputs[-5:, :1], targets[-5:]], dim=1).numpy()
        for row in rows:
            yield "  " + draw_row(row, columns, colour)
        yield ""


def draw_row(row, columns, colour):
    """One character for every len(row) / columns tokens."""
    starts = [0, *(i for i in range(1, len(row)) if row[i] & FIRST)]
    text = ""
    for k, (a, b) in enumerate(itertools.pairwise([*starts, len(row)])):
        width = round(b * columns / len(row)) - round(a * columns / len(row))
        whole_start = row[a] & FIRST and (b - a == 1 or row[a + 1] & SECOND)
        block = ("[" if whole_start else "<") + "=" * (width - 2) + ("]" if row[b - 1] & LAST else ">")
        block = block[:width] if width < 2 else block
        text += f"\033[30;{41 + k % 6}m{block}\033[0m" if colour else block
    return text


def packing_name(packing, tails):
    return f"{packing} {tails}" if packing == "exactfit" else packing


def lost_share(stats):
    """Of the tokens that left the buffer."""
    return stats["tokens_dropped"] / (stats["tokens_dropped"] + stats["tokens_delivered"])


def describe_stats(stats):
    return (f"lost {lost_share(stats):.1%}, fit but cut {stats['cut_share']:.2%}, "
            f"longest wait {stats['longest_wait_rows']:,} rows")


def compare(tokenizer, data_dir, B, T):
    """
    Lines of a table. Fit but cut: of all documents. Held: tokens in the buffer at the end, in rows. Speed:
    from text, all threads.
    """
    yield f"{'packing':<15}{'lost':>8}{'fit but cut':>13}{'longest wait':>14}{'held':>13}{'M tokens/s':>12}"
    for packing, tails in CHOICES:
        options = {"packing": packing, "tails": tails, "data_dir": data_dir}
        outline = PackedLoader(Outline(tokenizer), B, T, "train", prefetch=0, **options)
        for _ in range(max(1, 4096 // B)):
            next(outline)
        stats = outline.stats()
        packers = [stream.packer for stream in outline._pipeline.lanes[0].streams.values()]
        held = sum(len(document.ids) for packer in packers
                   for document in getattr(packer, "buffer", {}).values()) / (T + 1)
        outline.close()
        loader = PackedLoader(tokenizer, B, T, "train", **options)
        speed_of(delivered(loader), 2)    # fills the buffer
        speed = speed_of(delivered(loader), 4)
        loader.close()
        yield (f"{packing_name(packing, tails):<15}{lost_share(stats):>8.1%}{stats['cut_share']:>13.2%}"
               f"{stats['longest_wait_rows']:>9,} rows{held:>8,.0f} rows{speed / 1e6:>12.2f}")


def speed_of(counts, seconds):
    """Tokens per second, from an iterator that makes some and says how many; first, what lies ready goes."""
    for duration in (0.3, seconds):
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < duration:
            tokens += next(counts)
    return tokens / (time.perf_counter() - began)


def delivered(loader):
    return (inputs.numel() for inputs, _ in loader)


def tokenized(pool, loader):
    """By the pool alone, of the loader's documents."""
    reader = next(iter(loader.readers.values()))
    return (len(chunk.ids) for chunk in pool.chunks(reader, reader.slices(0, Cursor()), 2 * pool.threads))


class SharedEncoding:
    """nanochat's way to tokenize: 128 documents a call, all threads on one Encoding."""

    def __init__(self, tokenizer):
        self.inner = tokenizer

    def get_bos_token_id(self):
        return self.inner.get_bos_token_id()

    def encode(self, texts, prepend=None, num_threads=8):
        encoded = self.inner.enc.encode_ordinary_batch(texts, num_threads=num_threads)
        return [[prepend, *ids] for ids in encoded]


def measure(folder, data_dir, packing, tails, B, T, threads, seconds):
    """One line of the benchmark, in a process of its own. threads=1 means one core as well."""
    from tokenizer import RustBPETokenizer

    if threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokenizer, before = RustBPETokenizer.from_directory(folder), peak_memory()

    def make():
        return PackedLoader(tokenizer, B, T, "train", packing=packing, tails=tails, data_dir=data_dir,
                            threads=threads)

    loader = make()
    first, _ = timed(lambda: next(loader))
    speed_of(delivered(loader), len(loader.readers))    # a mixture has a buffer a source to fill
    memory = (peak_memory() - before) / (1 << 20)
    pool = TokenizingPool(tokenizer, threads)
    ours, alone = delivered(loader), tokenized(pool, loader)
    pairs = [(speed_of(ours, seconds), speed_of(alone, seconds)) for _ in range(3)]
    again, state = make(), loader.state_dict()
    resume, _ = timed(lambda: (again.load_state_dict(state), next(again)))
    loader.close(), again.close(), pool.close()
    speed, top = (float(np.median(column)) for column in zip(*pairs, strict=True))
    return speed, speed / top, first, resume, memory


def timed(action):
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def peak_memory():
    """Bytes of this process so far. Linux's ru_maxrss would begin with the parent's."""
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss    # macOS counts bytes


def bench(tokenizer_dir, data_dir, B, T, seconds=2.0):
    """
    Lines of a table. Ceiling: the pool alone, its tokens thrown away, in turns with the loader. 4 x: the
    same data as a mixture of four sources.
    """
    from dev.prepare import tokenize
    from tokenizer import RustBPETokenizer

    threads = cores_of_this_rank()
    tokenizer = RustBPETokenizer.from_directory(tokenizer_dir)
    loader = PackedLoader(tokenizer, B, T, "train", data_dir=data_dir)
    own = tokenized(TokenizingPool(tokenizer, threads), loader)
    shared = tokenized(TokenizingPool(SharedEncoding(tokenizer), threads, batch=128), loader)
    pairs = [(speed_of(own, seconds), speed_of(shared, seconds)) for _ in range(3)]
    ours, theirs = (float(np.median(column)) for column in zip(*pairs, strict=True))
    yield (f"B = {B}, T = {T}, {threads} cores; {ours / 1e6:.2f} M tokens/s by {threads} threads with an "
           f"Encoding each, {theirs / 1e6:.2f} sharing one: {ours / theirs:.2f} times")
    yield (f"{'from':<11}{'packing':<15}{'threads':>8}{'M tokens/s':>12}{'of ceiling':>12}{'first batch':>13}"
           f"{'resume':>9}{'memory':>9}")
    with tempfile.TemporaryDirectory() as tokens:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenize(data_dir, tokens, tokenizer_dir)
        fresh = multiprocessing.get_context("spawn")
        kinds = [("text", data_dir), ("tokens", tokens)]
        mixtures = [("4 x " + kind, dict.fromkeys(four_names(folder, f"{tokens}/{kind}"), 1))
                    for kind, folder in kinds if "://" not in folder]
        jobs = [*itertools.product(kinds, CHOICES, sorted({1, threads})),
                *itertools.product(mixtures, CHOICES[-1:], [threads])]
        for (kind, folder), (packing, tails), n in jobs:
            with ProcessPoolExecutor(1, mp_context=fresh) as process:    # its own peak of memory
                job = process.submit(measure, tokenizer_dir, folder, packing, tails, B, T, n, seconds)
                speed, share, first, resume, memory = job.result()
            share = f"{share:.2f}" if "text" in kind else "-"
            yield (f"{kind:<11}{packing_name(packing, tails):<15}{n:>8}{speed / 1e6:>12.2f}{share:>12}"
                   f"{first:>11.2f} s{resume:>7.2f} s{memory:>6.0f} MB")


def four_names(folder, prefix):
    """Four sources made of one."""
    names = [f"{prefix}{i}" for i in range(4)]
    for name in names:
        os.symlink(os.path.abspath(folder), name)
    return names


def main():
    parser = argparse.ArgumentParser(description="Look at the packers and measure them.")
    parser.add_argument("--show", action="store_true", help="draw rows of every packer")
    parser.add_argument("--compare", action="store_true", help="what each packer loses, cuts and costs")
    parser.add_argument("--bench", action="store_true", help="tokens per second, from text and from tokens")
    parser.add_argument("--data", help="folder of shards; default: where dataset.py puts them, or built in")
    parser.add_argument("--tokenizer", help="its folder; default: the one trained on the data")
    parser.add_argument("--B", type=int, default=32, help="rows of a batch")
    parser.add_argument("--T", type=int, default=2048, help="tokens of a row")
    flags = parser.parse_args()
    if not (flags.show or flags.compare or flags.bench):
        parser.error("choose --show, --compare or --bench")
    with errors_in_one_line():
        print_tables(flags)


def print_tables(flags):
    from tokenizer import find_tokenizer

    data_dir = find_data(flags.data)
    tokenizer, folder = find_tokenizer(flags.tokenizer, [data_dir], 32768)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    chosen = [(flags.show, show(tokenizer, data_dir, flags.T, colour=colour)),
              (flags.compare, compare(tokenizer, data_dir, flags.B, flags.T)),
              (flags.bench, bench(folder, data_dir, flags.B, flags.T))]
    for wanted, lines in chosen:
        for line in lines if wanted else ():
            print(line, flush=True)


if __name__ == "__main__":
    main()
