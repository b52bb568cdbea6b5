"""
Other loaders, for `python -m dev.bench peers`, each called as its own documentation does:

    pip install datasets grain litdata mosaicml-streaming
    git clone https://github.com/karpathy/nanochat    # then export PYTHONPATH=nanochat

From text, all but nanochat's concatenate the documents and cut. litData and MosaicML streaming get
token ids, since they have no packing of their own. A loader returns one epoch of batches, as
(B, T + 1) ids or as (inputs, targets).
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from dataset import column_views, list_shards
from tokenizer import get_tokenizer, make_gigatoken


class Job(NamedTuple):
    text: str         # a folder of text shards
    tokens: str       # the same as token shards
    own: str          # a folder for the loader's own format
    ids: str          # a file of all ids, for a memmap
    dtype: str        # of these
    tokenizer: str    # its folder
    engine: str
    workers: int      # processes
    B: int
    T: int

# --------------------------------------------------------------------------------------------------
# What their users write: text -> ids -> blocks

@functools.cache
def load_engines(folder, engine):
    tokenizer = get_tokenizer(folder)
    if engine == "tiktoken":
        return tokenizer, None
    return tokenizer, make_gigatoken(tokenizer.enc, tokenizer.added_tokens)

def encode(job, texts):
    """The ids of all texts, BOS before each. Unlike ours, without any check."""
    tokenizer, gigatoken = load_engines(job.tokenizer, job.engine)
    documents = [text.encode() for text in texts]
    if not gigatoken:
        return tokenizer._call_tiktoken(documents)[0]
    ids, bounds = gigatoken(documents)
    return np.insert(ids, bounds[:-1], tokenizer.get_bos_token_id())

def cut(arrays, size):
    """Concatenate arrays of ids, and cut: int64 arrays of `size`."""
    rest = np.zeros(0, np.int64)
    for ids in arrays:
        rest = np.concatenate([rest, ids])
        n = len(rest) // size * size
        yield from rest[:n].reshape(-1, size)
        rest = rest[n:]

def read_texts(job):
    """The texts of a row group at a time."""
    for shard in list_shards(job.text, "train"):
        file = pq.ParquetFile(shard.path)
        for row_group in range(file.num_row_groups):
            yield file.read_row_group(row_group, ["text"])["text"].to_pylist()

def read_ids(shard):
    """The ids of a row group at a time."""
    for row_group in range(len(shard.group_sizes)):
        content, _ = column_views(shard.read(row_group))
        yield np.frombuffer(content, shard.dtype).astype(np.int32)

# --------------------------------------------------------------------------------------------------
# The loaders, and how each one's own format is written

def loop(job):
    """No shuffle, no state, no threads."""
    arrays = (encode(job, texts) for texts in read_texts(job))
    for block in cut(arrays, job.B * (job.T + 1)):
        yield torch.from_numpy(block).view(job.B, job.T + 1)

def nanogpt(job):
    """Random windows of a file of ids, as get_batch draws them: some tokens often, some never."""
    while True:
        ids = np.memmap(job.ids, job.dtype, "r")
        starts = torch.randint(len(ids) - job.T, (job.B,))
        yield tuple(torch.stack([torch.from_numpy(ids[i:i + job.T].astype(np.int64))
                                 for i in starts + shift]) for shift in (0, 1))

def nanochat(job, module="nanochat.dataloader"):
    """The generator of nanochat or of dev/nanochat.py. It is endless."""
    os.environ["NANOLOADER_BASE_DIR"] = os.environ["NANOCHAT_BASE_DIR"] = job.own
    make = importlib.import_module(module).tokenizing_distributed_data_loader_bos_bestfit
    tokenizer = get_tokenizer(job.tokenizer)
    if job.engine == "tiktoken":
        tokenizer.engine = "tiktoken"
    return make(tokenizer, job.B, job.T, "train", device="cpu")

def write_nanochat(job):
    for name in ("base_data", "base_data_climbmix"):
        os.symlink(os.path.abspath(job.text), f"{job.own}/{name}")

def hugging_face(job):
    from datasets import load_dataset

    def blocks(batch):
        return {"ids": [*cut([encode(job, batch["text"])], job.T + 1)]}

    files = [shard.path for shard in list_shards(job.text, "train")]
    data = load_dataset(
        "parquet", data_files=files, split="train", streaming=True, columns=["text"])
    data = data.map(blocks, batched=True, remove_columns=["text"])
    return (batch["ids"] for batch in DataLoader(data, job.B, drop_last=True))

def grain(job):
    import grain
    from grain.experimental import ConcatThenSplitIterDataset

    data = grain.sources.ArrayRecordDataSource([f"{job.own}/text"])
    data = grain.MapDataset.source(data).seed(0).shuffle()
    data = data.map(lambda record: {"ids": encode(job, [record.decode()])}).to_iter_dataset()
    data = ConcatThenSplitIterDataset(data, length_struct={"ids": job.T + 1})
    data = data.batch(job.B, drop_remainder=True)
    data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers))
    return (torch.from_numpy(batch["ids"]).long() for batch in data)

def write_grain(job):
    from array_record.python.array_record_module import ArrayRecordWriter
    writer = ArrayRecordWriter(f"{job.own}/text", "group_size:1")
    for texts in read_texts(job):
        for text in texts:
            writer.write(text.encode())
    writer.close()

def litdata(job):
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    data = StreamingDataset(
        job.own, item_loader=TokensLoader(job.T + 1), shuffle=True, drop_last=True)
    batches = StreamingDataLoader(
        data, batch_size=job.B, num_workers=job.workers, drop_last=True)
    return (batch.long() for batch in batches)

def write_litdata(job):
    from litdata import TokensLoader, optimize
    optimize(tensors, list_shards(job.tokens, "train"), job.own, num_workers=1,
             chunk_size=4096 * (job.T + 1), item_loader=TokensLoader(job.T + 1))

def tensors(shard):
    yield from map(torch.from_numpy, read_ids(shard))

def mosaic(job):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    data = StreamingDataset(local=job.own, shuffle=True, batch_size=job.B)
    return (batch["ids"].long() for batch in DataLoader(data, job.B, drop_last=True))

def write_mosaic(job):
    from streaming import MDSWriter
    with MDSWriter(out=job.own, columns={"ids": "ndarray:int32"}) as writer:
        for shard in list_shards(job.tokens, "train"):
            for block in cut(read_ids(shard), job.T + 1):
                writer.write({"ids": block.astype(np.int32)})

class Peer(NamedTuple):
    name: str
    make: Callable    # job -> an epoch of batches
    engines: tuple = ("gigatoken", "tiktoken")
    packing: str | None = "flat"
    write: Callable | None = None    # its own format
    needs: str = "torch"
    workers: int = 0

# Two workers where they were the fastest, on 2 cores
TIKTOKEN, TOKENS = ("tiktoken",), ("",)
PEERS = [
    Peer("a plain loop", loop),
    Peer("Hugging Face", hugging_face, needs="datasets"),
    Peer("Grain", grain, TIKTOKEN, "flat", write_grain, "grain", 2),
    Peer("nanochat", nanochat, TIKTOKEN, "bestfit", write_nanochat, "nanochat"),
    Peer("dev/nanochat.py", functools.partial(nanochat, module="dev.nanochat"),
         ("gigatoken",), "bestfit", write_nanochat),
    Peer("nanoGPT", nanogpt, TOKENS, packing=None),
    Peer("MosaicML", mosaic, TOKENS, "flat", write_mosaic, "streaming"),
    Peer("litData", litdata, TOKENS, "flat", write_litdata, "litdata", 2),
]
