"""
Tokenize shards ahead of a run, check them, count them, look at them.

    python -m dev.prepare tokenize my_shards --out my_tokens    # the same shards, with token ids
    python -m dev.prepare verify my_shards                      # read all, compare all checksums
    python -m dev.prepare stats my_shards                       # documents, bytes, tokens, lengths
    python -m dev.prepare head my_shards -n 5                   # some documents

To make shards from your own text: python -m dev.convert
"""

import sys

if __name__ == "__main__" and not __package__:
    sys.exit("usage: python -m dev.prepare COMMAND, typed where dataset.py is; see --help")

import argparse
import collections
import itertools
import json
import math
import os
import shlex
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

import dataset
from dataloader import Encoder, check_same_tokenizer
from dataset import (
    Parser,
    UserError,
    all_shards,
    cores,
    errors_in_one_line,
    find_data,
    list_shards,
    printable,
)
from tokenizer import find_tokenizer, get_tokenizer

# --------------------------------------------------------------------------------------------------
# Tokenize: the same shards, with token ids in place of text

VOCAB_SIZE = 32768    # if the data has no tokenizer, so that one must be trained

def tokenize(data_dir, out, tokenizer_dir=None, keep=()):
    """
    Write token shards with the names, row groups and rows of the text shards. To resume, keep
    complete shards of the same text and tokenizer. keep: columns to copy next to the tokens.
    """
    if os.path.realpath(out) == os.path.realpath(data_dir):
        raise UserError(f"cannot write to {out}; pass a different local folder: --out NEW_FOLDER")
    shards = all_shards(data_dir)
    if shards[0].kind == "tokens":
        raise UserError(f"{data_dir} holds token ids already; name a folder of text shards")
    dataset.split_shards(shards)    # raise its errors now: write_index would at the end
    keep = [*dict.fromkeys(keep)]
    names = {shard.name for shard in shards}
    others = [name for name, *_ in dataset.list_files(out) if name not in names]
    if others:
        raise UserError(
            f"{out} has {min(others)}, which is not in {data_dir}; choose a new folder: --out FOLDER")
    columns = columns_of(shards[0])
    missing = {*keep} - {*columns}
    if missing:
        raise UserError(f"--keep {min(missing)}: {data_dir} has only {', '.join(sorted(columns))}")
    if "tokens" in keep:
        raise UserError("--keep tokens: the column of token ids has this name; rename your column")
    dropped = {*columns} - {shards[0].kind, *keep}
    if dropped:
        print(f"dropped columns (to keep some: --keep): {printable(', '.join(sorted(dropped)))}")
    tokenizer, where = find_tokenizer(tokenizer_dir, [data_dir], VOCAB_SIZE)
    print(f"tokenizer: {where}", flush=True)
    encoder = Encoder(tokenizer)
    try:
        for shard in tqdm(shards, "tokenize", unit=" shards", delay=1):
            tokenize_shard(shard, out, encoder, where, keep)
        dataset.write_index(out)
    except OSError as error:    # it may name no path
        raise UserError(f"{error}, in {out}; to write elsewhere: --out NEW_FOLDER") from error

def tokenize_shard(shard, out, encoder, where, keep):
    """Write a token shard, unless it exists."""
    dtype = np.dtype("uint16" if encoder.vocab_size <= 1 << 16 else "uint32")
    if shard.kind == "messages":    # ~t, a masked token, is negative
        dtype = np.dtype("int32")
    made_from = {
        dataset.TOKEN_DTYPE: dtype.name,
        dataset.FINGERPRINT: encoder.fingerprint_of(shard),
        dataset.GROUP_BYTES: json.dumps(shard.group_bytes),
        dataset.TEXT_DIGEST: shard.digest or ""}
    path = f"{out}/{shard.name}"
    if os.path.exists(path):
        if not has_other_template(out, shard, encoder):
            check_kept(out, shard, made_from, keep)
            return
        print(f"{path} has a different chat template: tokenizing it again", flush=True)

    def encode_group(row_group):
        documents = []
        for ids in encode(shard, row_group, encoder):
            documents.append(None if ids is None else ids.astype(dtype).tobytes())
        tokens = pa.array(documents, pa.binary())
        kept = read_columns(shard, row_group, keep)
        return pa.table([tokens, *kept], ["tokens", *keep])

    command = ["python", "-m", "dev.prepare", "tokenize", shard.folder]
    command += ["--tokenizer", where, "--out", out]
    if keep:
        command += ["--keep", *keep]
    dataset.mark_unfinished(out, shlex.join(command))
    tables = in_order(encode_group, range(len(shard.group_sizes)))
    metadata = {**made_from, "nanoloader.tokenizer_dir": os.path.abspath(where)}
    dataset.write_shard(path, tables, "tokens", metadata, "none")    # zstd: a quarter of the speed

def has_other_template(out, shard, encoder):
    """Is this token shard of chats from the same tokenizer, but rendered in another way?"""
    footer = dataset.read_footer(out, shard.name, os.path.getsize(f"{out}/{shard.name}"))
    made_by = footer.extra.get(dataset.FINGERPRINT, "")
    is_same_tokenizer = made_by.startswith(encoder.fingerprint)
    return is_same_tokenizer and made_by != encoder.fingerprint_of(shard)

def check_kept(out, shard, made_from, keep):
    """UserError unless this token shard is what tokenize would write."""
    path = f"{out}/{shard.name}"
    footer = dataset.read_footer(out, shard.name, os.path.getsize(path))
    columns = footer.metadata.schema.to_arrow_schema().names
    is_same = made_from.items() <= footer.extra.items()
    has_same_rows = footer.shard.group_sizes == shard.group_sizes
    if not is_same or not has_same_rows or columns != ["tokens", *keep]:
        raise UserError(
            f"{path} already exists, but was made from different text, with a different tokenizer, "
            "or with other --keep columns; choose a new folder: --out FOLDER")

def in_order(function, items):
    """Yield function(item) for each item, in order. Threads run ahead by a few items."""
    waiting = collections.deque()
    with ThreadPoolExecutor(cores()) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) == 2 * cores():
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()

def encode(shard, row_group, encoder):
    """The ids of each document in a row group, None for a null."""
    array = shard.read(row_group)
    return encoder.encode(shard, row_group, np.arange(len(array)), array)

def columns_of(shard):
    return dataset.checked_footer(shard).metadata.schema.to_arrow_schema().names

def read_columns(shard, row_group, names):
    """Read extra columns. pyarrow compares their pages with their checksums."""
    def read():
        with dataset.open_file(shard.folder, shard.name, shard.file_size) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            table = parquet.read_row_group(row_group, names, use_threads=False)
            return table.select(names).columns    # raises if this shard lacks one

    place = f"{shard.path}, row group {row_group}"
    return dataset.retry(read, place, dataset.verify_advice(shard.folder))

# --------------------------------------------------------------------------------------------------
# Verify, stats, head

def verify(folder):
    """Read every column of every shard and compare all checksums. True if all match."""
    shards = all_shards(folder)
    n_damaged = n_unread = 0
    for shard, error in zip(shards, in_order(find_problem, shards), strict=True):
        if error:
            is_damaged = shows_damage(error, shard)
            n_damaged += is_damaged
            n_unread += not is_damaged
            problem, _, _ = str(error).partition("; check it with")
            print(f"{'PROBLEM' if is_damaged else 'UNREAD'}  {problem}", flush=True)
        elif not dataset.checked_footer(shard).checksums:
            print(f"{shard.path}: another program wrote it; checked only the checksums of its "
                  "pages, if it has any")
    n_documents = sum(sum(shard.group_sizes) for shard in shards)
    print(f"{folder}: {counted(len(shards), 'shard')}, {counted(n_documents, 'document')}, "
          f"{counted(n_damaged + n_unread, 'problem')}")
    if n_unread:
        print(f"next: {counted(n_unread, 'shard')} could not be read, but may be intact; check the "
              "disk, the network, the server and your permissions, then run this command again")
    if n_damaged:
        print("next: remove the damaged shards, then rerun the command that made them. dataset.py "
              "-n and tokenize write only what is missing; convert needs a new folder")
    return n_damaged + n_unread == 0

def shows_damage(error, shard):
    """Whether the bytes of a shard are wrong, not a disk, a network or a server."""
    cause = error.__cause__
    if isinstance(cause, (dataset.Damaged, pa.ArrowException)):
        return True
    has_errno = getattr(cause, "errno", None)    # Arrow's own errors have none
    return not (dataset.is_remote(shard.folder) or has_errno)

def find_problem(shard):
    """None, or the error of a shard that cannot be read, or is damaged."""
    try:
        others = [name for name in columns_of(shard) if name != shard.kind]
        for row_group in range(len(shard.group_sizes)):
            shard.read(row_group)
            if others:
                read_columns(shard, row_group, others)
    except UserError as error:
        return error

def stats(folder, tokenizer_dir=None):
    """Print the numbers of documents, bytes and tokens, and percentiles of document lengths."""
    tokenizer = load_tokenizer(tokenizer_dir, folder)
    print("split   shards  row groups    documents         MB  tokens")
    lengths = []
    for split in ("train", "val"):
        shards = list_shards(folder, split)
        places = row_groups_of(shards)
        found = np.concatenate([*in_order(read_lengths, places)])
        lengths.append(found)
        n_bytes = int(found.sum())
        print(f"{split:6}{len(shards):8,}{len(places):12,}{len(found):13,}{n_bytes / 1e6:11,.1f}"
              f"  {count_tokens(places, n_bytes, tokenizer)}")
    percents = (10, 50, 90, 99, 100)
    lengths = np.concatenate(lengths)
    points = np.percentile(lengths, percents)
    words = [f"{percent}%: {n:,.0f}" for percent, n in zip(percents, points, strict=True)]
    print(f"bytes of {shards[0].kind} per document, by percentile: {', '.join(words)}")
    print(f"null or empty documents: {np.count_nonzero(lengths == 0):,}")

def load_tokenizer(tokenizer_dir, folder):
    """None if no tokenizer is named. UserError if another one made the tokens in `folder`."""
    if tokenizer_dir is None:
        return None
    encoder = Encoder(get_tokenizer(tokenizer_dir))
    check_same_tokenizer(all_shards(folder)[0], encoder.fingerprint)
    return encoder

def row_groups_of(shards):
    places = []
    for shard in shards:
        places += [(shard, row_group) for row_group in range(len(shard.group_sizes))]
    return places

def read_lengths(place):
    """The bytes of each document in a row group."""
    shard, row_group = place
    return pc.binary_length(shard.read(row_group)).fill_null(0).to_numpy()

def count_tokens(places, n_bytes, tokenizer):
    """The number of tokens, as text to print. For text, estimated from 16 spread row groups."""
    shard, _ = places[0]
    if shard.kind == "tokens":
        return f"{n_bytes // np.dtype(shard.dtype).itemsize:,}"
    if not tokenizer:
        return "? (add --tokenizer DIR)"
    n_tokens = n_sampled = 0
    every = math.ceil(len(places) / 16)
    for shard, row_group in places[::every]:
        encoded = encode(shard, row_group, tokenizer)
        n_tokens += sum(len(ids) for ids in encoded if ids is not None)
        n_sampled += read_lengths((shard, row_group)).sum()
    return f"about {n_tokens * n_bytes / max(1, n_sampled):,.0f}"

def head(folder, n=5, split="train", tokenizer_dir=None):
    """Print the place, the length and the first 200 characters (as a repr) of n documents."""
    tokenizer = load_tokenizer(tokenizer_dir, folder)
    shards = list_shards(folder, split)
    documents = itertools.islice(documents_of(shards), n)
    for number, (shard, place, document) in enumerate(documents):
        length, text = describe_document(document, shard, tokenizer)
        print(f"{number:<5} {place}: {length}")
        print(f"      {text[:200]!r}")
    if shards[0].kind == "tokens" and not tokenizer:
        print(f"these are token ids; to see text, add --tokenizer {dataset.tokenizer_dir_of(shards[0])}")

def documents_of(shards):
    for shard, row_group in row_groups_of(shards):
        for row, document in enumerate(shard.read(row_group).to_pylist()):
            yield shard, shard.location(row_group, row), document

def describe_document(document, shard, tokenizer):
    """(its length, its text)"""
    if document is None:
        return "null", ""
    if shard.kind == "tokens":
        ids = np.frombuffer(document, shard.dtype)
        known = np.where(ids < 0, ~ids, ids).tolist()    # ~t: masked
        text = tokenizer.tokenizer.decode(known[1:]) if tokenizer else str(known)
        return f"{len(ids):,} tokens", text
    return f"{len(document.encode()):,} bytes", document

# --------------------------------------------------------------------------------------------------
# The command

def counted(n, noun):    # 1, "shard" -> "1 shard";  1234, "shard" -> "1,234 shards"
    return f"{n:,} {noun}{'s' * (n != 1)}"

def main(argv=None):
    parser = Parser("python -m dev.prepare", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", metavar="COMMAND", choices=("tokenize", "verify", "stats", "head"))
    add("folder", nargs="?", metavar="FOLDER",
        help="folder or URI of shards, also as --data FOLDER (default: what train.py uses)")
    add("--data", help=argparse.SUPPRESS)
    add("--tokenizer", metavar="DIR",
        help="folder of a tokenizer: to tokenize, to count tokens in stats, to show text in head")
    add("--out", type=dataset.local_folder, help="tokenize: new folder for the token shards")
    add("--keep", nargs="+", action="extend", default=[], metavar="NAME",
        help="tokenize: copy these columns, too")
    add("-n", type=dataset.at_least(1), default=5, help="head: number of documents (default: 5)")
    add("--split", default="train", choices=("train", "val"),
        help="head: which split (default: train)")
    flags = parser.parse_intermixed_args(argv)    # FOLDER may come after an option
    if flags.command == "tokenize" and not flags.out:
        parser.error("tokenize needs a folder for the token shards: --out FOLDER")
    if flags.folder and flags.data:
        parser.error("expected FOLDER or --data FOLDER, not both")
    with errors_in_one_line():
        run(flags)

def run(flags):
    folder = find_data(flags.folder or flags.data)
    if flags.command == "tokenize":
        tokenize(folder, flags.out, flags.tokenizer, flags.keep)
        print(f"tokens are in {flags.out}; next: python -m dev.prepare stats {flags.out}")
    elif flags.command == "verify":
        sys.exit(not verify(folder))
    elif flags.command == "stats":
        stats(folder, flags.tokenizer)
    else:
        head(folder, flags.n, flags.split, flags.tokenizer)

if __name__ == "__main__":
    main()
