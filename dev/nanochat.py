"""
nanochat's two generators, with the same names, arguments and rows, token for token. To train
nanochat, copy this file, too: see dev/recipes/README.md. Three things are better than in nanochat: threads
encode ahead, a resume on the same number of ranks is exact, and a rank without any document is an
error, not an endless search.

    train_loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, B, T, "train")
    inputs, targets, state = next(train_loader)    # on each rank

A rank takes every world_size-th row group of each shard. It numbers these turns across epochs, so
(turn, row) names a document. A state lists the documents in the buffer, and a resume reads and
encodes them again.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: import it, as dev/recipes/README.md shows")

import itertools
from bisect import bisect_left, insort
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from dataloader import Encoder, ranks_of_this_process
from dataset import UserError, json_sha256, list_shards


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, B, T, split, tokenizer_threads=4, tokenizer_batch_size=128, device="cuda",
        resume_state_dict=None, buffer_size=1000):
    """
    Yields (inputs, targets, state): int64 (B, T) each. A state is plain JSON and resumes with the
    next batch: pass this rank's, or the list of all ranks'.
    """
    rank, world_size = ranks_of_this_process()
    encoder = Encoder(tokenizer, tokenizer_threads)
    shards = list_shards(None, split)
    check_shards(shards, world_size)
    contents = [[one.name, one.text_bytes, [*one.group_sizes], one.digest] for one in shards]
    config = {
        "world_size": world_size, "rank": rank, "packing": "bestfit",
        "tokenizer": encoder.fingerprint, "shards": json_sha256(contents)}
    buffered, place = read_state(resume_state_dict, config)

    groups = []
    for shard in shards:
        groups += [(shard, i) for i in range(rank, len(shard.group_sizes), world_size)]
    to_read = rows_to_read(groups, buffered, place)
    batches = encode_ahead(groups, to_read, encoder, tokenizer_threads, tokenizer_batch_size)
    buffer = {}
    while len(buffer) < len(buffered):
        _, documents = next(batches)
        for document, ids in documents.items():
            buffer[document] = ids[-buffered[document]:]

    def refill():
        nonlocal place
        place, documents = next(batches)
        buffer.update(documents)
        return documents

    packed = bestfit(buffer, refill, T + 1, buffer_size)
    while True:
        rows = b"".join(itertools.islice(packed, B))
        rows = np.frombuffer(rows, np.int32).reshape(B, T + 1).astype(np.int64)
        inputs, targets = to_device(rows[:, :-1], device), to_device(rows[:, 1:], device)
        epoch, i = divmod(place[0], len(groups))
        shard, rg_idx = groups[i]
        printed = {"epoch": epoch + 1, "pq_idx": shards.index(shard), "rg_idx": rg_idx}
        left = [[*document, len(ids)] for document, ids in buffer.items()]
        yield inputs, targets, {**config, **printed, "place": list(place), "buffered": left}

def tokenizing_distributed_data_loader_bos_bestfit(*args, **kwargs):
    """Like the other generator, without states."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state_bos_bestfit(
            *args, **kwargs):
        yield inputs, targets

def rows_to_read(groups, buffered, place):
    """Yield (turn, rows): the buffered documents, then everything from `place` on; endless."""
    for turn, documents in itertools.groupby(buffered, key=lambda document: document[0]):
        yield turn, [row for _, row in documents]
    first, row = place
    for turn in itertools.count(first):
        shard, rg_idx = groups[turn % len(groups)]
        start = row if turn == first else 0
        if start < shard.group_sizes[rg_idx]:
            yield turn, range(start, shard.group_sizes[rg_idx])

def encode_ahead(groups, to_read, encoder, threads, batch_size):
    """Yield batch_size documents of a row group at a time: (the place after, {document: ids})."""
    def encode(item):
        turn, rows = item
        shard, rg_idx = groups[turn % len(groups)]
        array = shard.read(rg_idx)
        batches = [rows[i:i + batch_size] for i in range(0, len(rows), batch_size)]
        return [encode_batch(turn, shard, rg_idx, batch, array) for batch in batches]

    def encode_batch(turn, shard, rg_idx, rows, array):
        documents = {}
        encoded = encoder.encode(shard, rg_idx, np.array(rows), array)
        for row, ids in zip(rows, encoded, strict=True):
            if ids is not None:    # a null
                documents[turn, row] = ids.copy()    # a view would keep all ids
        return (turn, rows[-1] + 1), documents

    n_threads = 1 if encoder.has_own_threads else threads
    executor = ThreadPoolExecutor(n_threads)    # its threads end with this generator
    waiting = deque()
    try:
        for item in to_read:
            waiting.append(executor.submit(encode, item))
            if len(waiting) == 2 * threads:
                yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()

def bestfit(buffer, refill, R, buffer_size):
    """
    Rows of R = T + 1 tokens, as bytes: the longest document that fits; if none does, the shortest,
    cut. Among equals, the oldest. refill() adds documents to the buffer, and returns them.
    """
    sizes = sorted((len(ids), document) for document, ids in buffer.items())
    while True:
        row = []
        free = R
        while free:
            while len(sizes) < buffer_size:
                for document, ids in refill().items():
                    insort(sizes, (len(ids), document))
            n_fitting = bisect_left(sizes, (free + 1,))
            length, _ = sizes[max(0, n_fitting - 1)]
            oldest = bisect_left(sizes, (length,))
            _, document = sizes.pop(oldest)
            row.append(buffer.pop(document)[:free])
            free -= len(row[-1])
        yield b"".join(row)

def to_device(rows, device):
    rows = torch.from_numpy(np.ascontiguousarray(rows))
    if torch.device(device).type == "cuda":    # a reused buffer would change before it is copied
        rows = rows.pin_memory()
    return rows.to(torch.device(device), non_blocking=True)

def read_state(state, config):
    """({buffered document: its tokens left}, the place of the next document)"""
    while isinstance(state, list):    # in a list again, if a resumed run saved before a batch
        state = state[config["rank"] % len(state)]
    if state is None:
        return {}, (0, 0)
    for key, ours in config.items():
        theirs = state.get(key)
        if theirs != ours:
            raise UserError(
                f"this state is another run's: {key} is {theirs!s:.12} in it, but {ours!s:.12} "
                "here; a run resumes with its own data and tokenizer, and with the states of all "
                "its ranks, as dev/recipes/nanochat.patch saves them")
    return {(turn, row): n for turn, row, n in state["buffered"]}, tuple(state["place"])

def check_shards(shards, world_size):
    folder = shards[0].folder
    most = max(len(shard.group_sizes) for shard in shards)
    if shards[0].kind != "text":
        raise UserError(
            f"{folder} holds {shards[0].kind}, and nanochat's generators read text; use "
            "PackedLoader")
    for rank in range(world_size):
        n_documents = sum(sum(shard.group_sizes[rank::world_size]) for shard in shards)
        if not n_documents:
            raise UserError(
                f"rank {rank} of {world_size} would never get a document: shards of {folder} have "
                f"at most {most} row groups; use PackedLoader, which splits them")
