"""
nanochat's two generators, with its names, arguments and rows, token for token. Copy this file along to
train nanochat, see dev/loops.md. Better than nanochat's: threads encode ahead, a resume on the same number of
ranks is exact, and a rank that would search forever for a document raises an error.

    train_loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(tokenizer, B, T, "train")
    inputs, targets, state = next(train_loader)    # on each rank

A rank takes every world_size-th row group of each shard. It counts these turns on from epoch to epoch, so
(turn, row) is a document. A state lists those in the buffer; a resume reads and encodes them again.
"""

import hashlib
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch

from dataloader import ranks_of_this_process
from dataset import list_shards
from dev.prepare import in_order
from tokenizer import AnyTokenizer


def rows_to_read(groups, buffered, place):
    """Yield (turn, rows): the buffered documents, then everything from `place` on; endless."""
    for turn, documents in itertools.groupby(buffered, key=lambda document: document[0]):
        yield turn, [row for _, row in documents]
    for turn in itertools.count(place[0]):
        shard, rg_idx = groups[turn % len(groups)]
        if rows := range(place[1] if turn == place[0] else 0, shard.group_sizes[rg_idx]):
            yield turn, rows

def encode_ahead(groups, to_read, tokenizer, threads, batch_size):
    """Iterate over batch_size documents of a row group at a time: (the place after them, {document: ids})."""
    def read(item):
        turn, rows = item
        shard, rg_idx = groups[turn % len(groups)]
        return shard.read(rg_idx).take(pa.array(rows))

    def encode(batch):
        turn, rows, texts = batch
        try:    # the first document of a row group is also encoded with tiktoken, as a check
            ids, bounds = tokenizer.encode(texts, [] if rows[0] else [0], threads)
            documents = zip(rows, itertools.pairwise(bounds.tolist()), strict=True)
            # Copies: a view would keep the ids of all. Null documents have no ids.
            return (turn, rows[-1] + 1), {(turn, row): ids[a:b].copy() for row, (a, b) in documents if a < b}
        except BaseException as error:    # tiktoken's panics are not Exceptions
            shard, rg_idx = groups[turn % len(groups)]
            where = f"{shard.path}, row group {rg_idx}, rows {rows[0]} to {rows[-1]}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error

    executor = ThreadPoolExecutor(1 if tokenizer.is_multithreaded else threads)    # ends with in_order
    batches = ((turn, rows[i:i + batch_size], texts[i:i + batch_size])
               for (turn, rows), texts in in_order(executor, read, to_read, 3)
               for i in range(0, len(rows), batch_size))
    return (encoded for _, encoded in in_order(executor, encode, batches, 2 * threads))

def bestfit(buffer, refill, R, buffer_size):
    """
    Rows of R = T + 1 tokens, as bytes: the longest document that fits; if none does, the shortest, cut. Among
    equals, the oldest. refill() adds documents to the buffer, and returns them.
    """
    sizes = sorted((len(ids), document) for document, ids in buffer.items())
    while True:
        row, free = [], R
        while free:
            while len(sizes) < buffer_size:
                for document, ids in refill().items():
                    insort(sizes, (len(ids), document))
            too_long = bisect_left(sizes, (free + 1,))
            length = sizes[max(0, too_long - 1)][0]
            _, document = sizes.pop(bisect_left(sizes, (length,)))
            row.append(buffer.pop(document)[:free])
            free -= len(row[-1])
        yield b"".join(row)

def tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4, tokenizer_batch_size: int = 128,
        device: str | torch.device = "cuda", resume_state_dict: dict | list | None = None,
        buffer_size: int = 1000) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict]]:
    """A state is plain JSON and resumes with the next batch: pass this rank's, or the list of all ranks'."""
    rank, world_size = ranks_of_this_process()
    tokenizer, shards, device = AnyTokenizer(tokenizer), list_shards(None, split), torch.device(device)
    check_shards(shards, world_size)
    contents = repr([(shard.name, shard.text_bytes, shard.group_sizes, shard.digest) for shard in shards])
    config = {"world_size": world_size, "rank": rank, "packing": "bestfit",
              "tokenizer": tokenizer.fingerprint, "shards": hashlib.sha256(contents.encode()).hexdigest()}
    buffered, place = read_state(resume_state_dict, config)

    groups = [(shard, i) for shard in shards for i in range(rank, len(shard.group_sizes), world_size)]
    to_read, buffer = rows_to_read(groups, buffered, place), {}
    blocks = encode_ahead(groups, to_read, tokenizer, tokenizer_threads, tokenizer_batch_size)
    while len(buffer) < len(buffered):
        _, documents = next(blocks)
        buffer |= {document: ids[-buffered[document]:] for document, ids in documents.items()}

    def refill():
        nonlocal place
        place, documents = next(blocks)
        buffer.update(documents)
        return documents

    packed = bestfit(buffer, refill, T + 1, buffer_size)
    while True:
        rows = np.frombuffer(b"".join(itertools.islice(packed, B)), tokenizer.dtype).reshape(B, T + 1)
        both = [torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:])]
        if device.type == "cuda":    # new tensors: a reused one would change before the GPU has read it
            both = [part.pin_memory() for part in both]
        inputs, targets = (part.to(device, non_blocking=True) for part in both)
        epoch, i = divmod(place[0], len(groups))
        shard, rg_idx = groups[i]
        printed = {"epoch": epoch + 1, "pq_idx": shards.index(shard), "rg_idx": rg_idx}
        left = [[*document, len(ids)] for document, ids in buffer.items()]
        yield inputs, targets, {**config, **printed, "place": list(place), "buffered": left}

def read_state(state, config):
    """-> ({document: tokens left} of the buffered ones, the place of the next document)"""
    while isinstance(state, list):    # in a list again, if a resumed run saved it before its first batch
        state = state[config["rank"] % len(state)]
    if state is None:
        return {}, (0, 0)
    for key, ours in config.items():
        if (theirs := state.get(key)) != ours:
            raise ValueError(f"this state is another run's: {key} is {theirs!r} in it, but {ours!r} here; "
                             "a run resumes with the states of all its ranks, as dev/loops.md saves them")
    return {(turn, row): n for turn, row, n in state["buffered"]}, state["place"]

def check_shards(shards, world_size):
    folder, n = shards[0].folder, max(len(shard.group_sizes) for shard in shards)
    if shards[0].kind != "text":
        raise ValueError(f"{folder} holds {shards[0].kind}, and nanochat's generators read text; use "
                         "PackedLoader")
    for rank in range(world_size):
        if not any(any(shard.group_sizes[rank::world_size]) for shard in shards):
            raise ValueError(f"rank {rank} of {world_size} would never get a document: shards of {folder} "
                             f"have at most {n} row groups; use PackedLoader, which splits them")

def tokenizing_distributed_data_loader_bos_bestfit(*args, **kwargs) -> Iterator:
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs):
        yield inputs, targets
