"""
Pack documents from parquet shards into (B, T) batches for pretraining, with threads in one process.

    tokenizer = get_tokenizer("my_tokenizer")
    loader = PackedLoader(tokenizer, B=32, T=2048, split="train", data_dir="my_shards")
    inputs, targets = next(loader)        # int64 (B, T) each
    loader.pieces()                       # the documents of this batch, and where they are on disk
    state = loader.state_dict()           # loading it resumes with exactly the next batch

    Source.deal -> (Place, [Part]) -> Packer.submit -> read, Packer.make_chunk: encode, pack, join -> Chunk
    next(loader): _next_rows -> Stream.take -> peek, which begins chunks -> Row -> _batch -> tensors

A *chunk* is the documents of about 256 rows (at least 2 MB): part of a row group, or several small ones. It
is packed by itself and its rows are shuffled, so they depend on its documents alone, and a state is little
more than a chunk's place and the number of rows delivered from it. The trade-off: one row of it is short
(0.2 % padding). Row groups are dealt to *lanes*; row g of the run comes from lane g % num_lanes, whatever the
number of ranks. 8 threads read row groups, others make chunks ahead of use, next() copies their rows.
To follow a batch, read dev/reference.py, then the functions above; packings on trust: lengths in, rows out.
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
import zlib
from bisect import bisect_left, bisect_right, insort
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import dataset
from dataset import Location, Shard, cores, env_int, list_shards, source_name
from tokenizer import as_encoder, encode_conversations, maker_of

# ---------------------------------------------------------------------------------------------------------
# Packing: pure functions of lengths, which yield rows [(document, start, stop), ...]
# lengths: tokens of each document, with BOS, all 1 or more. R: tokens in a row, T + 1
# A piece with start > 0 gets BOS in front, which takes one token of the row. In flat, no piece gets one.
# A piece that is cut is the last of its row, since the BOS after a piece says that its document ends.
# The order of rows does not matter: see Packer.shuffle.

def flat(lengths, R):
    """All documents in sequence, cut every R - 1 tokens: a row begins with the last token of the previous."""
    bounds = np.cumsum([0, *lengths]).tolist()    # of the documents, in the sequence of all tokens
    for begin in range(0, max(1, bounds[-1] - 1), R - 1):    # the last token begins no row
        end = min(begin + R, bounds[-1])
        documents = range(bisect_right(bounds, begin) - 1, bisect_left(bounds, end))
        yield [(d, max(begin, bounds[d]) - bounds[d], min(end, bounds[d + 1]) - bounds[d]) for d in documents]

def bestfit(lengths, R):
    """nanochat's rule: the longest document that fits; if none does, the shortest, its tail dropped."""
    left = sorted((n, -d) for d, n in enumerate(lengths))    # equal lengths: oldest last
    while left:
        row, free = [], R
        while free and left:
            i = bisect_right(left, (free, 0)) or bisect_right(left, (left[0][0], 0))    # 0: none fits
            n, minus_d = left.pop(i - 1)
            row.append((-minus_d, 0, min(n, free)))
            free -= min(n, free)
        yield row

def fill_gap(gap, sizes, by_length):
    """
    Choose the lengths of documents that fill `gap` tokens exactly, or as nearly as possible, by subset sum:
    bit k of `reachable` is set if some documents leave k tokens of the gap open; the lowest bit is the best.
    sizes: sorted lengths; by_length[n]: the documents of n tokens. Pairs go first: they are found faster.
    Example: one document each of 2, 3, 4, 7: gap=10 -> [7, 3];  gap=8 -> [7], one token stays open
    """
    for n in reversed(sizes[:bisect_right(sizes, gap // 2)]):
        if gap - n in by_length and (2 * n < gap or len(by_length[n]) > 1):
            return [gap - n, n]
    reachable, steps = 1 << gap, []    # steps: (length, `reachable` before a document of it)
    usable = ([n] * min(len(by_length[n]), gap // n) for n in reversed(sizes[:bisect_right(sizes, gap)]))
    for length in itertools.chain.from_iterable(usable):
        if reachable & 1 or len(steps) * gap > 1 << 25:    # filled; or `steps` has 4 MB
            break
        if (more := reachable | reachable >> length) != reachable:
            steps.append((length, reachable))
            reachable = more
    chosen, unfilled = [], (reachable & -reachable).bit_length() - 1    # the lowest bit
    for length, before in reversed(steps):    # back to `gap`, by the documents that were needed
        if not before >> unfilled & 1:
            chosen.append(length)
            unfilled += length
    return chosen

def exactfit(lengths, R):
    """
    Rows of whole documents, filled exactly: any document opens a row, fill_gap chooses others. If none fill
    the gap, a piece of a document longer than a row does (it is cut anyway), or else of the shortest one
    longer than the gap. The rest of a cut document is one more document.
    """
    by_length = {}    # tokens -> the documents that have them, as (document, start)
    for d, n in enumerate(lengths):
        by_length.setdefault(n, []).append((d, 0))
    sizes = sorted(by_length)

    def take(n, free):
        d, start = by_length[n].pop()
        if not by_length[n]:
            del by_length[n], sizes[bisect_left(sizes, n)]
        stop = start + min(n, free) - (start > 0)
        if n > free:
            rest = lengths[d] - stop + 1    # with BOS
            if rest not in by_length:
                insort(sizes, rest)
            by_length.setdefault(rest, []).append((d, stop))
        return d, start, stop
    while sizes:
        opener = next(iter(by_length))    # the length that waits longest: nearly a random one
        row, free = [take(opener, R)], R - min(opener, R)
        for n in fill_gap(free, sizes, by_length):
            row.append(take(n, free))
            free -= n
        while free and sizes:
            n = sizes[-1] if sizes[-1] > R else sizes[min(bisect_right(sizes, free), len(sizes) - 1)]
            if free == 1 and by_length[n][-1][1]:    # room for BOS alone
                break
            row.append(take(n, free))
            free -= min(n, free)
        yield row

def wholefit(lengths, R):
    """For chats: only documents longer than a row are cut. Best-fit decreasing."""
    pieces, rows = [], []    # rows: (tokens that are free, row), sorted
    for d, n in enumerate(lengths):
        cuts = [0, *range(R, n, R - 1), n]
        pieces += [(a - b - (a > 0), d, a, b) for a, b in itertools.pairwise(cuts)]    # minus its tokens
    for minus, *piece in sorted(pieces):    # the longest first, into the row where it leaves least room
        i = bisect_left(rows, (-minus,))
        free, row = rows.pop(i) if i < len(rows) else (R, [])
        row.append(tuple(piece))
        insort(rows, (free + minus, row))
    return [row for _, row in rows]

PACKINGS = {"flat": flat, "bestfit": bestfit, "exactfit": exactfit, "wholefit": wholefit}

# ---------------------------------------------------------------------------------------------------------
# Sources: which documents go to which lane, in which chunks

class Place(NamedTuple):
    """Where a chunk is in its source. Places are compared; the default is before all others."""
    epoch: int = 1
    turn: int = 0     # index in the epoch's order, see Source
    chunk: int = 0    # index of the chunk in this turn

class Part(NamedTuple):
    """Documents of one row group."""
    shard: Shard
    row_group: int
    indices: np.ndarray    # of the documents in the row group, in reading order

    def locations(self):
        return [Location(self.shard.path, self.row_group, i) for i in self.indices.tolist()]

def shuffled(n, seed, *key):
    """Permute range(n) by (seed, *key); without a seed, keep its order. PCG64's raw stream never changes."""
    if seed is None:
        return np.arange(n)
    return np.argsort(np.random.PCG64((seed, *key)).random_raw(n), kind="stable")

class Source:
    """
    The shards of one folder, and how they are dealt. An epoch's order is a list of *turns*; turn k goes to
    lane k % num_lanes. A turn is a row group; where lanes would have few or uneven turns, a slice of one,
    [i::n_slices], with the least n_slices that suffices. A *group*: a row group's number across all shards.
    """
    def __init__(self, name: str, shards: list[Shard], num_lanes: int, seed: int | None, chunk_bytes: int):
        self.name, self.shards, self.num_lanes = name, shards, num_lanes
        self.seed, self.chunk_bytes, self.n_slices = seed, chunk_bytes, 1
        self.first_group = np.cumsum([0, *(len(shard.group_sizes) for shard in shards)])    # of each shard
        self.group_sizes = np.array([n for shard in shards for n in shard.group_sizes], np.int64)
        while (n_turns := np.minimum(self.group_sizes, self.n_slices).sum()) < self.group_sizes.sum() and (
                n_turns < num_lanes or -n_turns % num_lanes > n_turns // 4):    # the last round lacks so many
            self.n_slices += 1
        content = [[shard.name, shard.text_bytes, shard.group_sizes, shard.digest] for shard in shards]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        self.order = lru_cache(maxsize=16)(self._order)

    def _order(self, epoch):
        """(groups, the slice of each) by turn. Example: 2 groups for 3 lanes -> [0, 0, 1, 1], [0, 1, 0, 1]"""
        groups = np.flatnonzero(self.group_sizes)
        groups = groups[shuffled(len(groups), self.seed, epoch, 0)]
        counts = np.minimum(self.group_sizes[groups], self.n_slices)
        slices = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(groups, counts), slices

    def deal(self, lane, start, epochs=None):
        """Yield a lane's chunks from the Place `start` on, as (Place, [Part, ...]): for ever, or `epochs`."""
        for epoch in itertools.count(start.epoch) if epochs is None else range(start.epoch, epochs + 1):
            turn = start.turn if epoch == start.epoch else 0
            turns = range(max(lane, turn), len(self.order(epoch)[0]), self.num_lanes)
            for place, parts in self.chunks(epoch, turns):
                if place >= start:    # not the earlier chunks of its row group
                    yield place, parts

    def chunks(self, epoch, turns):
        """
        Cut large row groups; join small ones that follow each other, until they have chunk_bytes. A joined
        chunk begins at its first one's turn, so a resume at this turn joins the same ones.
        """
        place, joined, joined_bytes = None, [], 0
        for turn in turns:
            part = self.part(epoch, turn)
            n = len(part.indices)
            part_bytes = part.shard.text_bytes * n // part.shard.n_documents    # about
            n_chunks = min(round(part_bytes / self.chunk_bytes), n)    # 0 or 1: joined
            if joined and (n_chunks > 1 or joined_bytes >= self.chunk_bytes):
                yield place, joined
                joined, joined_bytes = [], 0
            if n_chunks > 1:
                for i in range(n_chunks):
                    indices = part.indices[i * n // n_chunks:(i + 1) * n // n_chunks]
                    yield Place(epoch, turn, i), [part._replace(indices=indices)]
            else:
                place = place if joined else Place(epoch, turn)
                joined.append(part)
                joined_bytes += part_bytes
        if joined:
            yield place, joined

    def part(self, epoch, turn):    # the documents of a turn
        groups, slices = self.order(epoch)
        group = int(groups[turn])
        i = int(bisect_right(self.first_group, group)) - 1
        indices = shuffled(int(self.group_sizes[group]), self.seed, epoch, 1, group)
        return Part(self.shards[i], group - int(self.first_group[i]), indices[slices[turn]::self.n_slices])

# ---------------------------------------------------------------------------------------------------------
# Chunks: read, encoded and packed by threads

class Piece(NamedTuple):
    """Tokens [start, stop) of a document (0 is its BOS), in a row from `offset` on; BOS again: offset - 1."""
    location: Location
    epoch: int
    start: int
    stop: int
    offset: int

class Chunk(NamedTuple):
    """The rows of a chunk that were not delivered when it was made."""
    place: Place
    taken: tuple            # of the StreamState it was made for; the last T is that of `rows`
    locations: list         # of its documents that have ids: no nulls, none that are filtered
    counts: dict            # {"documents": of all, "empty_documents": of the others}
    rows: list              # [[(document, start, stop, offset), ...], ...]: see Piece
    ids: np.ndarray         # (rows, T + 1); short rows end with BOS

class Row(NamedTuple):
    chunk: Chunk
    i: int    # index in chunk.rows

    def pieces(self):
        locations, epoch = self.chunk.locations, self.chunk.place.epoch
        return [Piece(locations[d], epoch, *where) for d, *where in self.chunk.rows[self.i]]

    def n_tokens(self):    # without the BOS at a short row's end
        _, start, stop, offset = self.chunk.rows[self.i][-1]
        return offset + stop - start

class Encoder:
    """
    Documents to ids. transform(ids, location, epoch) takes a document's ids (int64, BOS first) and returns
    those to deliver, or None to filter it out. It runs in threads, in any order, and again after a resume, so
    it must depend only on its arguments (a state has only its name). An id ~t, below 0, is token t without a
    loss: its target is -100. Chats and token shards may bring some to a transform, too.
    """
    def __init__(self, tokenizer, threads=1, transform=None):
        self.tokenizer, self.threads, self.transform = as_encoder(tokenizer), threads, transform

    def encode(self, part, array, epoch=1, check_every=1000):    # one in 1,000 is also encoded by tiktoken
        """The ids of each document of a Part, none if null or filtered. array: its row group."""
        documents = array.take(pa.array(part.indices))
        try:
            ids, bounds = self._ids(documents, part, epoch, check_every)
            dataset.check_documents(ids, bounds, documents, self.tokenizer)
            found = [ids[a:b] for a, b in itertools.pairwise(bounds.tolist())]
            if self.transform:
                found = [self._transform(one, location, epoch)
                         for one, location in zip(found, part.locations(), strict=True)]
            return found
        except BaseException as error:    # tiktoken's panics are not Exceptions
            n = len(part.indices)
            for i in range(n if n > 1 else 0):    # one by one: the culprit raises its own error
                self.encode(part._replace(indices=part.indices[i:i + 1]), array, epoch, check_every=1)
            where = f"{part.locations()[0]}" + (f" and {n - 1} more, only together" if n > 1 else "")
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error

    def _ids(self, documents, part, epoch, check_every):
        """(ids, bounds) as encode_documents in tokenizer.py returns them."""
        if dtype := part.shard.dtype:
            data, offsets, _ = dataset.column_views(documents)
            if (np.diff(offsets) % dtype.itemsize).any():
                raise ValueError(f"a document's bytes are not a whole number of {dtype} tokens")
            bounds = (offsets - offsets[0]) // dtype.itemsize
            return np.frombuffer(data[offsets[0]:offsets[-1]], dtype), bounds
        if part.shard.kind == "messages":
            return encode_conversations(self.tokenizer.tokenizer, documents.to_pylist(), check_every)
        key = f"{part.shard.path} {part.row_group} {part.indices[0]} {epoch}"
        check = range(zlib.crc32(key.encode()) % check_every, len(documents), check_every)
        return self.tokenizer.encode(documents, check, threads=self.threads)

    def _transform(self, ids, location, epoch):
        if len(ids):
            bos, result = self.tokenizer.bos, self.transform(ids.astype(np.int64), location, epoch)
            ids = np.atleast_1d([] if result is None else result)
            if len(ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids[0]) not in (bos, ~bos)
                             or max(int(ids.max()), ~int(ids.min())) >= self.tokenizer.size):
                raise TypeError(f"transform returned {ids!r:.100}; expected tokens t or ~t, BOS first, with "
                                f"t < {self.tokenizer.size}")
        return ids.astype(np.int64)

def unless_ending(function, *arguments):    # Python ends only when all threads have
    if dataset.ENDING.is_set():
        raise CancelledError
    return function(*arguments)

class Packer:
    """Makes Chunks, in its own threads."""
    def __init__(self, loader):
        self.encoder, self.T, self.seed = loader.encoder, loader.T, loader.shuffle_seed
        self.packing, self.repeats_bos = PACKINGS[loader.packing], loader.packing != "flat"
        self.executor = ThreadPoolExecutor(1 if loader.tokenizer.is_multithreaded else loader.threads, "pack")
        self.readers = ThreadPoolExecutor(8, "read")    # 8: remote reads mostly wait
        self.reads = weakref.WeakValueDictionary()    # Futures of row groups, while somebody holds them

    def submit(self, place, parts, taken):
        """(the Future of the chunk, those of its row groups)"""
        reads = []
        for shard, row_group, _ in parts:
            key = shard.path, row_group
            reads.append(self.reads.get(key) or self.readers.submit(unless_ending, shard.read, row_group))
            self.reads[key] = reads[-1]
        return self.executor.submit(unless_ending, self.make_chunk, place, parts, taken, reads), reads

    def make_chunk(self, place, parts, taken, reads):
        found = [ids for part, read in zip(parts, reads, strict=True)
                 for ids in self.encoder.encode(part, read.result(), place.epoch)]
        locations = [location for part in parts for location in part.locations()]
        locations = [location for location, ids in zip(locations, found, strict=True) if len(ids)]
        documents = [ids for ids in found if len(ids)]
        if not taken or taken[-1][0] != self.T:
            taken = (*taken, (self.T, 0))
        (T, n_delivered), *changes = taken
        rows = self.packing(list(map(len, documents)), T + 1) if documents else []
        rows = self.shuffle(rows, place)[n_delivered:]
        for T, n_delivered in changes:
            rows = self.pack_again(rows, T + 1, place)[n_delivered:]
        counts = {"documents": len(found), "empty_documents": len(found) - len(documents)}
        return Chunk(place, taken, locations, counts, *self.join(rows, documents))

    def shuffle(self, rows, place):
        """Packings begin with long documents: unshuffled, the demo has 1.10 bits per byte, not 1.07."""
        rows = sorted(rows, key=min)    # without a seed: in the order of their first documents
        return [rows[i] for i in shuffled(len(rows), self.seed, place.epoch, 2, place.turn, place.chunk)]

    def pack_again(self, rows, R, place):
        """
        If T changes within a chunk: pack each piece of the rows that are left as if it were a document. A row
        of flat begins with the token that ends the row before; only the first one keeps it.
        """
        rows = sorted(rows)
        if not self.repeats_bos:
            rows[1:] = [[(d, start + 1, stop), *others] for (d, start, stop), *others in rows[1:]]
        pieces = [(d, start, stop) for row in rows for d, start, stop in row if start < stop]
        begins = [start - (start > 0 and self.repeats_bos) for _, start, _ in pieces]    # room for BOS
        lengths = [stop - begin for (*_, stop), begin in zip(pieces, begins, strict=True)]
        rows = []
        for row in self.packing(lengths, R) if pieces else ():
            found = [(*pieces[i][:2], begins[i] + a, begins[i] + b) for i, a, b in row]
            rows.append([(d, max(start, a), b) for d, start, a, b in found if b > start])    # not BOS alone
        return self.shuffle(rows, place)

    def join(self, rows, documents):
        """(rows, ids) of a Chunk."""
        dtype = documents[0].dtype if documents else np.dtype(np.int64)
        arrays, placed, padding = [], [], np.full(self.T + 1, self.encoder.tokenizer.bos, dtype)
        for row in rows:
            offset = 0
            placed.append([])
            for d, start, stop in row:
                if start and self.repeats_bos:
                    arrays.append(documents[d][:1])
                    offset += 1
                arrays.append(documents[d][start:stop])
                placed[-1].append((d, start, stop, offset))
                offset += stop - start
            arrays.append(padding[offset:])
        # np.concatenate would release the GIL at every piece, and wait to get it back.
        return placed, np.frombuffer(b"".join(arrays), dtype).reshape(len(rows), self.T + 1)

# ---------------------------------------------------------------------------------------------------------
# Lanes: the source of each row, and the rows of each stream

@cache
def step_of(num_lanes):
    """
    On trust: any step s gives the shares. For this one, frac(g * s / 2**64) spreads the rows g of the run
    evenly over [0, 1), and those of each lane: its step, s * num_lanes mod 2**64, is 2**64 / golden ratio.
    """
    golden = 0x9E3779B97F4A7C15    # 2**64 / golden ratio
    return min(((k * 2**64 + golden) // num_lanes for k in range(num_lanes)), key=largest_quotient)

def largest_quotient(step):
    """The largest partial quotient of step / 2**64, up to convergents with denominators of 2**12."""
    a, b, largest, denominators = 2**64, step, 0, (0, 1)
    while b and denominators[1] <= 2**12:
        largest = max(largest, a // b)
        denominators = denominators[1], a // b * denominators[1] + denominators[0]
        a, b = b, a % b
    return largest

def choose_source(weights, g, step):
    """
    The index of the source that gives row g: the one that holds frac(g * step / 2**64), where weights divide
    [0, 1). Weights below 0 count as 0; if all are 0, shares are equal. Example: [2, 1], one lane: 0001001010
    """
    given = [weight(g) if callable(weight) else weight for weight in weights]
    try:
        values = [max(float(weight), 0.0) for weight in given]
        scaled = [int(value / (max(values) or 1.0) * 2**62) for value in values]    # not of NaN or infinity
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the weights of row {g} are {given}; expected finite numbers") from error
    cumulative = list(itertools.accumulate(scaled if any(scaled) else [1] * len(scaled)))
    return bisect_right([number * 2**64 // cumulative[-1] for number in cumulative], g * step % 2**64)

class StreamState(NamedTuple):
    """The position of a stream, which is one lane of one source. The default is the beginning."""
    place: Place = Place()
    taken: tuple = ()      # ((2048, 17), (1024, 3)): 17 rows packed for T = 2048, 3 of the rest for 1024
    ended: bool = False    # a finite source has no more rows for this lane

class Stream:
    """One lane of one source: its rows, from chunks that are made ahead."""
    def __init__(self, source, lane, state, packer, epochs, ahead):
        self.source, self.packer, self.epochs, self.ahead = source, packer, epochs, ahead
        self.state, self.tasks = state, () if state.ended else source.deal(lane, state.place, epochs)
        self.chunk, self.i, self.reads = None, 0, None    # i: rows taken of it; reads: the next may need them
        self.futures, self.counts = collections.deque(), collections.Counter()    # futures: of later chunks
        self.submit(1)    # the first chunks of all lanes are made before their second ones

    def submit(self, n):
        """Let `n` chunks be ready or under way."""
        for place, parts in itertools.islice(self.tasks, max(0, n - len(self.futures))):
            taken = self.state.taken if place == self.state.place else ()    # of a chunk partly delivered
            future, self.reads = self.packer.submit(place, parts, taken)
            self.futures.append(future)

    def peek(self):
        """The next Row; None at the end. Begins chunks; leaves `state` alone."""
        while not self.state.ended:
            if self.chunk is None:
                self.submit(1)
                if not self.futures:
                    return None
                self.chunk, self.i = self.futures.popleft().result(), 0
                self.counts.update(self.chunk.counts)
                self.submit(self.ahead)
            if self.i < len(self.chunk.rows):
                return Row(self.chunk, self.i)
            if self.epochs is None and self.chunk.place.epoch > self.state.place.epoch + 100:
                raise ValueError(f"{self.source.name}: a lane found no token in 100 epochs, only null or "
                                 "filtered documents; lower num_lanes, or inspect the data")
            self.chunk = None

    def take(self):
        """The next Row, now delivered; None at the end."""
        if row := self.peek():
            *earlier, (T, n) = self.chunk.taken
            self.i += 1
            self.state = StreamState(self.chunk.place, (*earlier, (T, n + self.i)))
            self.counts["rows"] += 1
            self.counts["tokens"] += row.n_tokens()
        else:
            self.state = self.state._replace(ended=True)
        return row

# ---------------------------------------------------------------------------------------------------------
# The loader

# g: rows delivered by the whole run; lanes: {lane: {source: StreamState}} of this rank
Position = collections.namedtuple("Position", ["g", "lanes"])

class PackedLoader(IterableDataset, contextlib.AbstractContextManager):
    """
    An iterator over (inputs, targets), int64 (B, T) on `device`; targets are inputs shifted by one, and -100
    (torch's ignore_index) where a row is short or a token has no loss. A yielded batch is never overwritten.
    tokenizer: see as_encoder in tokenizer.py; transform: see Encoder; threads: default: this rank's cores
    data_dir: a folder or URI of shards, or {folder: weight}. Weights are proportions of rows: numbers, or
        functions of the row number. Default: what dataset.find_data finds
    rank, world_size: of the data-parallel ranks; tensor, context or pipeline parallel ranks that share rows
        pass the same rank. Default: those of `group`, else torch.distributed's, else RANK and WORLD_SIZE
    group: a process group of the data-parallel ranks; needed if some processes have no loader
    num_lanes: world sizes that divide it give the same rows. Default: lcm(8, world_size), or as in the state
    chunk_bytes: of text. Default: 1,024 for each token of a row (256 rows), 2 to 64 MB, or as in the state
    shuffle_seed: new orders of row groups, documents and a chunk's rows every epoch; None: file order
    epochs: n, or {folder: n}; other folders are endless. uneven: a finite run ends with its shortest lane
        ("stop"), or with its longest ("pad": others give masked rows; divide summed losses by all ranks'
        unmasked targets); its ranks end together if torch.distributed is initialised
    """
    def __init__(self, tokenizer, B: int, T: int, split: str, *, packing="exactfit", data_dir=None, rank=None,
                 world_size=None, group=None, num_lanes=None, shuffle_seed=0, epochs=None, uneven="pad",
                 device="cpu", threads=None, transform=None, chunk_bytes=None):
        self.given = {"rank": rank, "num_lanes": num_lanes, "chunk_bytes": chunk_bytes}    # None: by default
        if rank is None and world_size is None:
            rank, world_size = ranks_of_this_process(group)
        self.rank, self.world_size, self.group, self.B, self.T = rank, world_size, group, B, T
        self.split, self.packing, self.uneven, self.transform = split, packing, uneven, transform
        self.num_lanes, self.chunk_bytes, self.shuffle_seed = num_lanes, chunk_bytes, shuffle_seed
        self.threads, self.device = threads, torch.device(device)
        check_arguments(self)
        self.threads, self.num_lanes = self.threads or cores(), self.num_lanes or math.lcm(8, self.world_size)
        self.chunk_bytes = self.chunk_bytes or min(max(1024 * (self.T + 1), 1 << 21), 1 << 26)
        check_shared(self.num_lanes, self.world_size)
        self.encoder = Encoder(tokenizer, self.threads, transform)
        self.tokenizer = self.encoder.tokenizer
        self.weights, self.epochs = sources_of(data_dir, epochs)
        sources = [Source(name, list_shards(name, split), self.num_lanes, shuffle_seed, self.chunk_bytes)
                   for name in self.weights]
        # By fingerprint: the same order for moved folders, and for tokens of the same text.
        sources.sort(key=lambda source: (source.fingerprint, source.name))
        self.sources = {source.name: source for source in sources}
        self.position, self._delivered, self.waited = self._beginning(), [], 0.0
        self._streams, self._packer, self._gloo, self._finished, self._closed = None, None, None, False, False
        self._pid, self._lock, self._agreed = os.getpid(), threading.Lock(), (None,)

    def _beginning(self):
        lanes = lanes_of_rank(0, self.rank, self.world_size, self.num_lanes)
        return Position(0, {lane: dict.fromkeys(self.sources, StreamState()) for lane in lanes})

    def _start(self):
        """Start the threads, at `position`."""
        check_start(self)
        packer = self._packer = Packer(self)
        if self._closed:    # also by another thread, which has not seen this packer
            raise RuntimeError
        ends_together = all(self.epochs.values()) and self.world_size > 1    # endless runs never wait
        if ends_together and not self._gloo and dist.is_available() and dist.is_initialized():
            self._gloo = gloo_beside(self.group or dist.group.WORLD)
        g, lanes = self.position
        ahead = max(1, 2 * self.threads // (len(lanes) * len(self.sources)))    # chunks of each stream
        self._streams = {
            lane: {name: Stream(self.sources[name], lane, state, packer, self.epochs[name], ahead)
                   for name, state in lanes[lane].items()}
            for lane in lanes_of_rank(g, self.rank, self.world_size, self.num_lanes)}

    def _stop(self):
        """Drop what was prepared; the next batch is made anew, from `position`."""
        packer, self._packer, self._streams = self._packer, None, None
        for executor in (packer.executor, packer.readers) if packer else ():    # nothing waits for them
            executor.shutdown(wait=False, cancel_futures=True)

    def __iter__(self):
        if self._finished:    # start the run again, like any iterable
            self._stop()
            self.position, self._finished = self._beginning(), False
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if os.getpid() != self._pid or get_worker_info() is not None:
            raise RuntimeError("a PackedLoader works only in the process that made it; pass num_workers=0")
        if self._finished and not self._closed:
            raise StopIteration
        before = after = batch = None    # before, after: (position, rows)
        try:
            with self._lock:
                try:
                    if self._streams is None:
                        self._start()
                    before = self.position, self._delivered
                    after = self._next_rows()
                    self._finished = not self._is_in_run(after[1])
                    if not self._finished:
                        batch = self._batch(after[1])
                        self.position, self._delivered = after
                except BaseException:    # before another thread draws: it begins again from `position`
                    self._stop()
                    raise
            if batch:
                return batch
        except BaseException as error:
            with self._lock:
                if after and self.position is after[0]:    # Ctrl-C between its line and the return
                    self.position, self._delivered = before
                    self._stop()
            if self._closed and isinstance(error, Exception):
                raise RuntimeError("this PackedLoader is closed; load its state into a new one") from None
            if isinstance(error, StopIteration):    # would end the caller's loop
                raise RuntimeError("a weight, transform or packing raised StopIteration") from error
            raise
        raise StopIteration

    def _next_rows(self):
        """The Position after a batch, and its Rows, with None where a lane has ended."""
        began, step, rows = time.perf_counter(), step_of(self.num_lanes), []
        for b in range(self.B):
            g = self.position.g + self.rank + b * self.world_size
            streams, row = self._streams[g % self.num_lanes], None
            names = [name for name, stream in streams.items() if not stream.state.ended]
            while names and not row:    # the other sources take over from one that ends
                weights = [self.weights[name] for name in names]
                name = names[choose_source(weights, g, step) if len(names) > 1 else 0]
                row = streams[name].take()
                if not row:
                    names.remove(name)
            rows.append(row)
        lanes = {lane: {name: stream.state for name, stream in streams.items()}
                 for lane, streams in self._streams.items()}
        self.waited += time.perf_counter() - began
        return Position(self.position.g + self.B * self.world_size, lanes), rows

    def _is_in_run(self, rows):
        """Whether the batch belongs to the run. The ranks of a finite run agree, and so end together."""
        streams = itertools.chain(*(lane.values() for lane in self._streams.values()))    # of all lanes
        more = any(rows) or any(stream.peek() for stream in streams)    # also lanes that B did not reach
        lacking = not all(rows)    # a lane has ended
        if gloo := self._gloo:    # close() may remove it
            if self._agreed[0] is not self.position:    # else this rank alone repeats a call
                flags = torch.tensor([more, lacking], dtype=torch.int64)
                self._agreed = self.position, flags, gloo.allreduce([flags], dist.ReduceOp.MAX)
            _, flags, work = self._agreed
            work.wait()
            more, lacking = flags.tolist()
        if not (is_in_run := more and not (lacking and self.uneven == "stop")) and not self.position.g:
            raise ValueError("no batch: all documents are null or filtered, or too few for uneven='stop'")
        return is_in_run

    def _batch(self, rows):
        """(inputs, targets): copies of these rows."""
        empty = np.full(self.T + 1, self.tokenizer.bos)
        ids = np.stack([row.chunk.ids[row.i] if row else empty for row in rows])
        inputs, targets = (part.astype(np.int64) for part in (ids[:, :-1], ids[:, 1:]))
        if ids.dtype.kind != "u":    # an id ~t is token t without a loss
            inputs = np.where(inputs < 0, ~inputs, inputs)
            targets[targets < 0] = -100
        for b, row in enumerate(rows):
            n = row.n_tokens() if row else 0
            if n <= self.T:
                targets[b, max(0, n - 1):] = -100
        tensors = torch.from_numpy(inputs), torch.from_numpy(targets)
        pinned = (tensor.pin_memory() if self.device.type == "cuda" else tensor for tensor in tensors)
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in pinned)

    def pieces(self) -> list[list[Piece]]:
        """For each row of the batch that was yielded last, its Pieces: which tokens of which documents."""
        return [row.pieces() if row else [] for row in self._delivered]

    def close(self) -> None:
        """Stop the threads. In a finite run on several ranks, the other ranks get an error."""
        self._closed = True
        if self._pid == os.getpid():
            self._gloo, self._agreed = None, (None,)    # with its connections
            self._stop()

    def __exit__(self, *error):
        self.close()

    def state_dict(self) -> dict:
        """This rank's state as plain JSON: places, no tokens. To merge those of all ranks: gather_states."""
        g, lanes = self.position
        sources = {name: {"fingerprint": source.fingerprint, "epochs": self.epochs[name],
                          "weight": name_of(self.weights[name])} for name, source in self.sources.items()}
        lanes = {lane: {name: state._asdict() for name, state in streams.items()}
                 for lane, streams in lanes.items()}
        return with_digest({"version": VERSION, "rows": g, "T": self.T, "config": config_of(self),
                            "sources": sources, "lanes": lanes})

    def load_state_dict(self, state: dict) -> None:
        """Resume, even with another T, B or world size. A state that does not fit: ValueError, no change."""
        with self._lock:
            position, changed = read_state(self, state)
            self._stop()
            vars(self).update(changed, position=position, _delivered=[], _finished=False)

    def stats(self) -> dict:
        """
        Seconds waited in next(), and for each source its epoch and counts of this process since the last load
        or error: rows, tokens; of all chunks begun the documents, and the null or filtered ones.
        """
        sources = {name: collections.Counter() for name in self.sources}
        for name, stream in itertools.chain(*(lane.items() for lane in (self._streams or {}).values())):
            sources[name].update(stream.counts)
            sources[name]["epoch"] = max(sources[name]["epoch"], stream.state.place.epoch)
        return {"waited_s": self.waited, "sources": sources}

def gloo_beside(group):
    """A gloo group of the same ranks. dist.new_group needs calls of all processes, or hangs if made again."""
    store, n = group.get_group_store(), dist.get_world_size(group)
    number = (store.add("nanoloader", 1) - 1) // n    # no rank asks for the next one before all joined this
    return dist.ProcessGroupGloo(dist.PrefixStore(f"nanoloader{number}", store), dist.get_rank(group), n)

def lanes_of_rank(g, rank, world_size, num_lanes):    # in the order in which they give rows, from row g on
    return [(g + rank + i * world_size) % num_lanes for i in range(num_lanes // world_size)]

def ranks_of_this_process(group=None):
    """(rank, world size): the group's or torch.distributed's if initialised, else the launcher's."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not in `group`; only the group's members make a loader")
        return dist.get_rank(group), dist.get_world_size(group)
    names = "RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"    # srun, mpirun: no RANK
    seen = {name: n for name in names if (n := env_int(name, least=0)) is not None}
    if {"RANK", "WORLD_SIZE"} <= seen.keys():
        return seen["RANK"], seen["WORLD_SIZE"]
    if seen.keys() & {"RANK", "WORLD_SIZE"} or any(n > 1 for n in seen.values()):
        raise ValueError(f"the environment has only {seen}: all processes would get the same rows; set up "
                         "torch.distributed first, or pass rank=... and world_size=...")
    return 0, 1

# ---------------------------------------------------------------------------------------------------------
# States: plain JSON. At a load, config must match, and the shards of sources; epochs and weights may change

VERSION = 7    # the rows of a version never change

def name_of(function):    # None and numbers (weights) as they are
    return getattr(function, "__name__", type(function).__name__) if callable(function) else function

def config_of(loader):
    """What a place in the data depends on: not T, B, weights, world size or threads."""
    return {"split": loader.split, "num_lanes": loader.num_lanes, "chunk_bytes": loader.chunk_bytes,
            "shuffle_seed": loader.shuffle_seed, "packing": loader.packing,
            "tokenizer": loader.tokenizer.fingerprint, "transform": name_of(loader.transform)}

def with_digest(state):
    """The state as plain JSON, with a SHA-256 per lane: torch's DCP gives a rank only its own lanes."""
    state, digest = json.loads(json.dumps({**state, "digest": {}})), {}
    for lane, streams in state["lanes"].items():
        part = json.dumps({**state, "lanes": {lane: streams}}, sort_keys=True)
        digest[lane] = hashlib.sha256(part.encode()).hexdigest()[:16]
    return {**state, "digest": digest}

def read_state(loader, state):
    """-> (Position, the attributes of the loader that change)"""
    check_state(state)
    g, ours, theirs = state["rows"], config_of(loader), state["config"]
    ours |= {key: theirs[key] for key in ("num_lanes", "chunk_bytes") if loader.given[key] is None}
    for key in ours:
        if theirs[key] != ours[key]:
            raise ValueError(f"{key} is {theirs[key]!r} in the state, but {ours[key]!r} here")
    num_lanes, chunk_bytes = ours["num_lanes"], ours["chunk_bytes"]
    check_shared(num_lanes, loader.world_size)
    mine = lanes_of_rank(g, loader.rank, loader.world_size, num_lanes)
    check_lanes(mine, state["lanes"])
    lanes = {lane: dict.fromkeys(loader.sources, StreamState()) for lane in mine}
    for name, old in saved_names(state["sources"], loader.sources).items():
        epochs_changed = state["sources"][old]["epochs"] != loader.epochs[name]
        for lane, streams in lanes.items():
            at = state["lanes"][str(lane)][old]
            place, taken = Place(*at["place"]), tuple(map(tuple, at["taken"]))
            streams[name] = StreamState(place, taken, at["ended"] and not epochs_changed)
    sources = {name: Source(name, source.shards, num_lanes, source.seed, chunk_bytes)
               for name, source in loader.sources.items()}
    return Position(g, lanes), {"num_lanes": num_lanes, "chunk_bytes": chunk_bytes, "sources": sources}

def saved_names(saved, sources):
    """{name in the loader: name in the state} of sources in both; folders may have moved."""
    moved = {entry["fingerprint"]: name for name, entry in saved.items() if name not in sources}
    known = {name: name if name in saved else moved[source.fingerprint] for name, source in sources.items()
             if name in saved or source.fingerprint in moved}
    changed = [name for name, old in known.items() if saved[old]["fingerprint"] != sources[name].fingerprint]
    if changed or not known or len({*known.values()}) < len(known):
        raise ValueError(f"sources {sorted(sources)} do not match the state's, {sorted(saved)}; shards "
                         f"changed in: {changed or 'none'}. Put new data in a new folder of a mixture, or "
                         "begin a new run with the weights (train.py: --init FILE)")
    return known

def gather_states(loader) -> dict | None:
    """The merged state of all ranks on the first one, None on the others. All ranks of the group call it."""
    state, group = loader.state_dict(), loader.group
    if not (dist.is_available() and dist.is_initialized()):
        return merge_states([state])
    data = json.dumps(state).encode()    # bytes of JSON: nothing is unpickled
    size = torch.tensor(len(data), device="cuda" if "nccl" in dist.get_backend(group) else "cpu")
    dist.all_reduce(size, dist.ReduceOp.MAX, group)
    padded = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8).to(size.device)
    n_parts = dist.get_world_size(group) if dist.get_rank(group) == 0 else 0
    parts = [torch.empty_like(padded) for _ in range(n_parts)] or None
    dist.gather(padded, parts, group=group, group_dst=0)
    return merge_states([json.loads(part.cpu().numpy().tobytes()) for part in parts]) if parts else None

def merge_states(states: list[dict]) -> dict:
    """Merge all ranks' states of one step into one that any allowed world size can load."""
    lanes = {}
    for state in states or [None]:
        check_state(state)
        if len(seen := {states[0]["rows"], state["rows"]}) > 1:
            raise ValueError(f"ranks have drawn {min(seen)} and {max(seen)} rows, not equally many batches; "
                             "to evaluate on one of them, make another loader")
        differ = [key for key in ("T", "config", "sources") if state[key] != states[0][key]]
        differ += [f"lane {n}" for n, lane in state["lanes"].items() if lanes.setdefault(n, lane) != lane]
        if differ:
            raise ValueError(f"these are states of different runs: they differ in {', '.join(differ)}")
    check_lanes(range(states[0]["config"]["num_lanes"]), lanes)
    return with_digest({**states[0], "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))})

# ---------------------------------------------------------------------------------------------------------
# Guards: reject unusable arguments, states and environments

def check_arguments(loader):
    for name, allowed in {"split": ["train", "val"], "packing": PACKINGS, "uneven": ["pad", "stop"]}.items():
        if getattr(loader, name) not in allowed:
            raise ValueError(f"{name}={getattr(loader, name)!r}; choose one of {', '.join(allowed)}")
    may_be_none = "num_lanes", "threads", "chunk_bytes", "shuffle_seed"
    for name in ("rank", "world_size", "B", "T", *may_be_none):
        n, low = getattr(loader, name), 0 if name in ("rank", "shuffle_seed") else 1
        if isinstance(n, np.integer):
            n = vars(loader)[name] = int(n)
        if (n is not None or name not in may_be_none) and (type(n) is not int or n < low):
            raise ValueError(f"{name}={n!r}; expected an int, {low} or more")
    if loader.rank >= loader.world_size:
        raise ValueError(f"rank={loader.rank} of world_size={loader.world_size}; ranks start at 0")
    if loader.transform is not None and not callable(loader.transform):
        raise ValueError(f"transform={loader.transform!r}; expected a function of ids, location and epoch")

def check_shared(num_lanes, world_size):
    if num_lanes % world_size:
        raise ValueError(f"{num_lanes} lanes cannot be shared evenly by {world_size} ranks; choose a world "
                         f"size that divides {num_lanes}, or, in a new run, a num_lanes divisible by it")

def sources_of(data_dir, epochs):
    """data_dir and epochs as {source: weight} and {source: epochs}."""
    if isinstance(data_dir, (list, tuple, set)):
        raise ValueError(f"data_dir={data_dir!r}; for a mixture: {dict.fromkeys(map(str, data_dir), 1)}")
    one = not isinstance(data_dir, dict)
    given = {dataset.find_data(data_dir if data_dir is None else os.fspath(data_dir)): 1} if one else data_dir
    weights = {source_name(path): weight for path, weight in given.items()}
    epochs = ({source_name(path): n for path, n in epochs.items()} if isinstance(epochs, dict)
              else dict.fromkeys(weights, epochs))
    if not weights or len(weights) < len(given) or epochs.keys() - weights.keys() or "" in given:
        raise ValueError(f"data_dir={data_dir!r}, epochs for {sorted(epochs)}; expected a folder, or "
                         "{folder: weight}, each folder once, and epochs only for these")
    for name, weight in weights.items():
        n = epochs.get(name)
        is_number = isinstance(weight, (int, float)) and type(weight) is not bool
        if not callable(weight) and not (is_number and 0 < weight < math.inf):
            raise ValueError(f"weight {weight!r} of {name}; expected an int or float above 0, or a function")
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"epochs={n!r}; expected an int, 1 or more, or None for an endless run")
    return weights, {name: epochs.get(name) for name in weights}

def check_start(loader):
    """A process group initialised after the loader would give every rank the same rows."""
    seen = loader.rank, loader.world_size
    if loader.given["rank"] is None and seen != (now := ranks_of_this_process(loader.group)):
        raise RuntimeError(f"made as rank {seen[0]} of {seen[1]}, used as rank {now[0]} of {now[1]}: make "
                           "the loader after torch.distributed is initialised, or pass rank and world_size")
    for name, source in loader.sources.items():
        ours, theirs = loader.tokenizer.fingerprint, source.shards[0].fingerprint
        if theirs not in (None, ours):
            raise ValueError(f"{name} needs the tokenizer that made it, {maker_of(source.shards[0])}")
        if (n := int(source.group_sizes.sum())) < loader.num_lanes:
            fewer = n - n % loader.world_size
            advice = f"pass num_lanes={fewer}, or --num_lanes {fewer}" if fewer else "each rank needs one"
            raise ValueError(f"{name}: {n} documents for {loader.num_lanes} lanes; {advice}")

def check_state(state):
    seen = f"version {state.get('version')!r}" if isinstance(state, dict) else f"a {type(state).__name__}"
    if seen != f"version {VERSION}":
        raise ValueError(f"expected a loader state of version {VERSION}: what state_dict() returned, or "
                         f"json.loads of its text; got {seen}. An older run needs the files that began it")
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        if with_digest(state)["digest"] == state["digest"]:
            return
    raise ValueError("this state is damaged or was edited; load it as state_dict() returned it")

def check_lanes(needed, lanes):
    if any(str(lane) not in lanes for lane in needed):
        raise ValueError(f"only {len(lanes)} lanes, of one rank; use gather_states or merge_states")
