"""
Convert token files of nanoGPT, llm.c or modded-nanogpt (uint16) into shards:

    python dev/recipes/token_files.py nanogpt my_tokenizer my_tokens train.bin val.bin
    python dev/recipes/token_files.py llm.c my_tokenizer my_tokens train.bin val.bin

In nanoGPT's files, documents end with <|endoftext|>. In those of llm.c and modded-nanogpt, they begin
with it, and the file begins with a header of 1,024 bytes. my_tokenizer is GPT-2's:
RustBPETokenizer.from_pretrained("gpt2").save("my_tokenizer")
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, ".")    # run this in the folder of dataset.py
from dataset import write_index, write_shard
from tokenizer import get_tokenizer

kind, tokenizer_dir, out, train, val = sys.argv[1:]
bos_first = kind == "llm.c"
tokenizer = get_tokenizer(tokenizer_dir)
bos = tokenizer.get_bos_token_id()

def convert(ids, path):
    """A token shard holds each document's ids, BOS first, as little-endian bytes."""
    [marks] = np.nonzero(ids == bos)
    cuts = [*marks, len(ids)] if bos_first else [0, *(marks + 1)]
    first_cuts = [*cuts[:-1:1024], cuts[-1]]    # of row groups of 1,024 documents
    text_bytes = 4 * np.diff(first_cuts)    # about

    def row_groups():
        for i in range(0, len(cuts) - 1, 1024):
            documents = np.split(ids, cuts[i:i + 1025])[1:-1]
            if not bos_first:
                documents = [np.roll(document, 1) for document in documents]
            yield pa.array([document.tobytes() for document in documents], pa.binary())

    write_shard(path, row_groups(), "tokens", {
        "nanoloader.dtype": "uint16", "nanoloader.tokenizer": tokenizer.fingerprint(),
        "nanoloader.group_bytes": json.dumps(text_bytes.tolist())})
    print(f"{path}: {len(cuts) - 1:,} documents of {len(ids):,} tokens")

for split, path in (("train", train), ("val", val)):
    ids = np.memmap(path, np.uint16, offset=1024 if bos_first else 0)
    convert(ids, Path(out, f"{split}-0.parquet"))
write_index(out)
