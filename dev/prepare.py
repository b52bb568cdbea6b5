"""
Run once, before training: make shards from your own text, tokenize them, look at them, check and count them.

    python -m dev.prepare convert 'my/**/*.jsonl.gz' --text_key content   # your text -> shuffled shards
    python -m dev.prepare convert chats.jsonl --messages_key messages     # conversations -> shuffled shards
    python -m dev.prepare tokenize DIR --out DIR                          # the same shards, with token ids
    python -m dev.prepare head DIR -n 5                                   # print some documents
    python -m dev.prepare stats DIR                                       # documents, lengths, lanes
    python -m dev.prepare verify DIR                                      # read all, compare all checksums
    python -m dev.prepare import_tokenizer tokenizer.json --out DIR       # Hugging Face's -> our two files

convert writes all text twice, and so shuffles any amount of it in bounded memory: about 200 MB of JSON lines
a second on one core (193 MB of Python sources, 2026-11).
"""

import argparse
import collections
import contextlib
import csv
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import lzma
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from codecs import BOM_UTF8
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

import dataset
from dataset import Parser, all_shards, cores, errors_in_one_line, find_data, list_shards
from dev.import_tokenizer import import_tokenizer
from tokenizer import (
    NANOCHAT,
    RustBPETokenizer,
    encode_conversations,
    find_tokenizer,
    is_saved,
    maker_of,
    render,
    trained_dir,
)

# ---------------------------------------------------------------------------------------------------------
# Convert: text files -> shuffled shards, in bounded memory
#
# A document's key is a hash of its position in the inputs. The shards hold the documents in the order of
# their keys: a shuffle that is the same for any number of processes. First, processes parse the inputs into
# runs of RUN_BYTES of text on disk, each sorted by key. The keys and lengths of all documents (16 bytes each)
# decide which documents a row group holds; then each shard collects its documents from all runs.

RUN_BYTES = 32 << 20
BYTES_PER_PROCESS = 100_000_000
SHARD_BYTES = 300_000_000    # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_BYTES = 32 << 20    # long documents: fewer of them in a row group
VAL_DOCUMENTS = 64    # at least, if there are ten times as many: each lane needs one
LONGEST_DOCUMENT = 1 << 30    # bytes
BAD_SHOWN = 5
KEY, DOCUMENT = "nanoloader.key", "nanoloader.text"    # columns of a run

def convert(inputs: list[str], out: str, text_key: str | None = None, keep: Sequence[str] = (),
            as_text: Sequence[str] = (), skip_bad: bool = False, cut_bytes: int | None = None, seed: int = 0,
            workers: int | None = None, shard_bytes: int = SHARD_BYTES,
            executor: Executor | None = None, messages_key: str | None = None) -> dict:
    """
    Write the documents of files with one of KINDS as shards; the last shard, about 1 % of them, is val.

    text_key, messages_key: the column that holds text, or conversations. Neither: `text`, or else, if the
    first documents have it, `messages` or `conversations`.
    inputs: paths, folders, globs. keep: columns that stay beside the text. as_text: patterns of names; of
    folders only files with such a name are read, as plain text. Each plain text is a document, or with
    cut_bytes several that end at blank lines. `out` appears atomically, once complete. ValueError names file
    and line of the first bad document; skip_bad reports bad documents and unreadable files instead. The
    workers of an `executor` must see the same paths; `workers` says how many there are.
    """
    if "://" in out:
        raise ValueError(f"cannot write to {out}; name a local folder, then copy it there")
    if clash := {"text", "messages", "tokens", text_key, messages_key} & {*keep}:
        raise ValueError(f"--keep {min(clash)}: shards hold the documents in a column of that name")
    files, ignored = find_inputs(inputs, as_text)
    if not (text_key or messages_key):
        messages_key = find_messages_key(files[0])
    kind, key = ("messages", messages_key) if messages_key else ("text", text_key or "text")
    if cut_bytes and not any(file.kind in (".txt", ".md") for file in files):
        raise ValueError("--cut_bytes cuts plain text, and here is none; name it by --as_text")
    out = os.path.realpath(out)    # a link stays, and its target appears
    total = sum(file.size for file in files)
    # While a process starts, another one converts 100 MB.
    workers = workers or max(1, min(cores(), total // BYTES_PER_PROCESS))
    with building_folder(out) as building, pool_of(executor, min(workers, cores() + len(files))) as pool:
        scatter = functools.partial(scatter_task, building=building, kind=kind, key=key, keep=keep,
                                    skip_bad=skip_bad, cut_bytes=cut_bytes, seed=seed, max_in_val=total // 20)
        try:
            reports = run_all(pool, scatter, list(group_files(files, total)), 4 * workers, "read")
            keys, lengths = keys_and_lengths(building)
            bad, shown, columns = zip(*reports, strict=True)
            shown = [message for messages in shown for message in messages][:BAD_SHOWN]
            shards = list(enumerate(plan_shards(keys, lengths, shard_bytes, shown)))
            gather = functools.partial(gather_shard, building=building, kind=kind)
            run_all(pool, gather, shards, 4 * workers, "write")
        except BaseException as error:
            shutil.rmtree(building, ignore_errors=True)    # so that workers end at their next write
            if getattr(error, "errno", None):    # a full disk's error names no file
                error.filename = error.filename or building
            raise
        index = dataset.write_index(building + "/shards")
        assert sum(sum(entry["rows"]) for entry in index["shards"].values()) == len(keys)
        os.rename(building + "/shards", out)    # also onto an empty folder
    return {"kind": kind, "files": len(files), "documents": len(keys), "bytes": int(lengths.sum()),
            "shards": len(shards), "empty": np.count_nonzero(lengths == 0), "ignored": ignored,
            "bad": sum(bad), "shown": shown, "dropped": set().union(*columns) - {key, *keep},
            "strings": keep if any(file.kind in DELIMITERS for file in files) else ()}

@contextlib.contextmanager
def locked(path):
    """Hold the lock of `path`. Without one (Windows, some Lustre mounts), two may do the same work."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            import fcntl
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fcntl.flock(held.enter_context(open(path + ".lock", "a")), fcntl.LOCK_EX)
        yield

@contextlib.contextmanager
def building_folder(out):
    """A folder beside `out` for this process alone. It is removed at the end, or by the next run."""
    if os.path.isfile(out) or os.path.ismount(out) or out == os.getcwd():
        raise ValueError(f"cannot make {out} anew: it is a file, a mount point or the folder you are in; "
                         "name a folder in or beside it with --out")
    parent, building = f"{out}.convert", f"{out}.convert/{os.getpid()}"
    if os.path.exists(parent):
        print(f"{parent} exists: another convert writes there (this one waits), or was killed", flush=True)
    with locked(parent + "/lock"):    # without locks, the last to begin wins, others cannot write
        try:
            if os.path.isdir(out) and os.listdir(out):
                raise ValueError(f"{out} is not empty; name a new folder with --out, or remove it first")
            for old in glob.glob(glob.escape(parent) + "/[0-9]*"):
                shutil.rmtree(old)
            os.makedirs(building + "/runs")
            os.makedirs(building + "/shards")
            yield building
        except OSError as error:
            if str(error.filename).startswith(parent):
                raise ValueError(f"{error}; to write elsewhere, name another folder with --out") from error
            raise
        finally:
            shutil.rmtree(parent, ignore_errors=True)

def in_order(executor, function, items, ahead):
    """(item, function(item)) of each item, in order, with at most `ahead` of them in flight."""
    items, waiting = iter(items), []
    try:
        while True:
            for item in itertools.islice(items, ahead - len(waiting)):
                waiting.append((item, executor.submit(function, item)))
            if not waiting:
                return
            item, future = waiting.pop(0)
            yield item, future.result()
    finally:
        for _, future in waiting:
            future.cancel()

@contextlib.contextmanager
def pool_of(executor, n):
    """The given executor, else n processes, or one thread if n is 1."""
    if executor:
        yield executor
        return
    context = multiprocessing.get_context("spawn")    # pyarrow's threads do not survive a fork
    with ctrl_c_ignored():    # also by the workers, while they import
        pool = ThreadPoolExecutor(1) if n == 1 else ProcessPoolExecutor(n, context, end_with_parent)
        list(map(pool.submit, n * [int]))    # n tasks start n workers
    try:
        yield pool
    finally:
        with ctrl_c_ignored():    # a second one would hang the exit
            pool.shutdown(cancel_futures=True)

@contextlib.contextmanager
def ctrl_c_ignored():
    """Also in processes that start meanwhile. Python delivers Ctrl-C to the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)

@contextlib.contextmanager
def dask_executor(address):
    """(an executor on a Dask cluster, threads of all its workers), which run our code and see our files."""
    if not address:
        yield None, None
        return
    from distributed import Client  # pip install distributed

    with Client(address) as client:
        yield client.get_executor(), sum(client.nthreads().values())

def end_with_parent():
    """In a worker: exit with the parent, and leave Ctrl-C to the parent."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)    # for those that start late
    threading.Thread(target=wait, daemon=True).start()

def run_all(pool, function, tasks, ahead, label):
    """[function(task), ...] in order, with a bar and at most `ahead` tasks in flight."""
    done = in_order(pool, function, tasks, ahead)
    return [result for _, result in tqdm(done, label, len(tasks), unit=" tasks", delay=1)]

def group_files(files, total):
    """Group small files, so that they share a run: (task number, [(file number, file), ...])"""
    number, group, size = 0, [], 0
    for file_number, file in enumerate(files):
        group.append((file_number, file))
        size += file.size
        if size >= min(RUN_BYTES, total // 64) or file_number == len(files) - 1:
            yield number, group
            number, group, size = number + 1, [], 0

def scatter_task(task, building, kind, key, keep, skip_bad, cut_bytes, seed, max_in_val):
    """Write sorted runs; returns (bad documents skipped, messages about the first, names of all columns)."""
    number, files = task
    keys, texts, kept, size, n_runs = [], [], [], 0, 0
    bad, shown, columns = 0, [], set()

    def write():
        write_run(f"{building}/runs/{number:08d}-{n_runs:05d}.arrow", keys, texts, kept, keep, file.path)

    for file_number, file in files:
        documents = documents_of(file, kind, [key, *keep], cut_bytes)
        for index, (where, text, record, problem) in enumerate(documents):
            if len(columns) < 100:
                columns.update(map(str, record))
            if problem:
                message = f"{file.path}, {where}: {problem}"
                if not skip_bad:
                    raise ValueError(f"{message} (to skip what is bad: --skip_bad)")
                bad, shown = bad + 1, [*shown, message][:BAD_SHOWN]
                continue
            position = b"%d %d %d" % (seed, file_number, index)
            order = int.from_bytes(hashlib.blake2b(position, digest_size=8).digest(), "big")
            # Val gets the last keys; halving the key keeps documents that are too large out of it.
            keys.append(order // 2 if len(text) > max_in_val else order)
            texts.append(text)
            kept.append([record.get(name) for name in keep])
            size += len(text)
            if size >= RUN_BYTES:
                write()
                keys, texts, kept, size, n_runs = [], [], [], 0, n_runs + 1
    if keys:
        write()
    return bad, shown, columns

def write_run(path, keys, texts, kept, keep, last):
    keys = np.array(keys, np.uint64)
    order = np.argsort(keys, kind="stable").tolist()
    columns = {KEY: pa.array(keys[order]), DOCUMENT: join_texts([texts[i] for i in order], pa.large_binary())}
    for i, name in enumerate(keep):
        try:
            columns[name] = pa.array([kept[at][i] for at in order])
        except (pa.ArrowException, OverflowError) as error:
            raise ValueError(f"--keep {name}: {error}; expected one type, in {last} or before it") from error
    table = pa.table(columns)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)

def join_texts(texts, kind):
    """Bytes objects or memoryviews as an Arrow array; by one join, see dev/log.md."""
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32 if kind == pa.string() else np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(texts), buffers)

def open_runs(building):
    """Memory-mapped batches, each sorted by key."""
    paths = sorted(glob.glob(glob.escape(building) + "/runs/*.arrow"))
    return [pa.ipc.open_file(pa.memory_map(path)).get_batch(0) for path in paths]

def keys_and_lengths(building):
    """(keys, lengths) of all documents, sorted by key."""
    runs = open_runs(building)
    keys = np.concatenate([np.zeros(0, np.uint64), *(run[KEY].to_numpy() for run in runs)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(pc.binary_length(run[DOCUMENT]) for run in runs)])
    order = np.argsort(keys, kind="stable")
    return keys[order], lengths[order]

def plan_shards(keys, lengths, shard_bytes, skipped):
    """
    For each shard, the (first key, last key) of its row groups. The last shard is val: 1 % of the documents,
    or VAL_DOCUMENTS, or a tenth, if that is fewer. The others have equal bytes. skipped: what an error names.
    """
    n = len(keys)
    if n < 2:
        cut = min(10_000, 1 + int(lengths.sum()) // 16)
        raise ValueError(f"{counted(n, 'document')}: too few for a train and a val shard, which take at "
                         "least 2, and 9 with the loader's 8 lanes"
                         + f"; to cut a long one at its blank lines, add --cut_bytes {cut}" * (cut > 1)
                         + "".join(f"; skipped: {message}" for message in skipped[:1]))
    train = n - max(1, n // 100, min(VAL_DOCUMENTS, n // 10))
    ends = np.cumsum(lengths + 1)    # + 1: all documents may be empty
    n_shards = max(4, round(int(lengths.sum()) / shard_bytes) - 1)    # 4: cores share a small corpus
    cuts = np.searchsorted(ends[:train], ends[train - 1] * np.arange(1, n_shards) / n_shards) + 1
    for first, last in itertools.pairwise(np.unique([0, *cuts, train, n])):
        rows = min(ROW_GROUP_DOCUMENTS, max(1, (last - first) // 16))
        yield [(keys[first + a], keys[first + b - 1]) for a, b in plan_row_groups(lengths[first:last], rows)]

def plan_row_groups(lengths, rows):
    """(start, stop) of row groups of `rows` documents, or of ROW_GROUP_BYTES, or of one longer document."""
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        limit = ends[start] - lengths[start] + ROW_GROUP_BYTES
        stop = min(start + rows, max(start + 1, int(np.searchsorted(ends, limit, "right"))))
        yield start, stop
        start = stop

def gather_shard(shard, building, kind):
    """Write one shard, a row group at a time."""
    number, row_groups = shard
    runs = open_runs(building)
    try:
        kept = list(pa.unify_schemas([run.schema for run in runs], promote_options="permissive"))[2:]
    except pa.ArrowException as error:
        raise ValueError(f"--keep: {error}; expected values of one type in all files") from error
    if empty := [field.name for field in kept if pa.types.is_null(field.type)]:
        raise ValueError(f"--keep {empty[0]}: no document has a value there")
    tables = (gather_row_group(runs, first, last, kept, kind) for first, last in row_groups)
    dataset.write_shard(f"{building}/shards/shard_{number:05d}.parquet", tables, kind)

def gather_row_group(runs, first, last, kept, kind):
    """A table of all documents with keys from first to last, in the order of their keys."""
    parts, texts = [], []
    for run in runs:
        keys = run[KEY].to_numpy()
        start, stop = keys.searchsorted(first), keys.searchsorted(last, "right")
        parts.append(run[start:stop])
        data, offsets, _ = dataset.column_views(parts[-1][DOCUMENT])
        texts += [data[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    order = np.argsort(np.concatenate([part[KEY] for part in parts]), kind="stable")
    columns = {kind: join_texts([texts[i] for i in order.tolist()], pa.string())}
    for field in kept:
        values = [part[field.name].cast(field.type) for part in parts]
        columns[field.name] = pa.concat_arrays(values).take(order)
    return pa.table(columns)

# ---------------------------------------------------------------------------------------------------------
# The files that convert reads

TEXT = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".md")
BINARY = {".parquet": ".parquet", ".pq": ".parquet", ".arrow": ".arrow", ".feather": ".arrow"}
KINDS = (*TEXT, *BINARY)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".xz": "Python's"}    # of text
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\x04\x22\x4d\x18": ".lz4",
         b"\xfd7zXZ": ".xz", b"PAR1": ".parquet", b"PARE": "encrypted", b"ARROW1": ".arrow",
         b"PK\x03\x04": "zip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
ABOUT_DATA = (dataset.INDEX, "dataset_info.json", "dataset_dict.json", "state.json")    # the last three: HF's
MAKE_JSONL = 'write .jsonl, a line {"text": "..."} for each document, and convert that'
NAME_KEY = ("add --text_key NAME, for conversations --messages_key NAME; pairs: jq -c '{messages: [{role: "
            '"user", content: .prompt}, {role: "assistant", content: .response}]}\' OLD > NEW.jsonl; or ')
UNREADABLE = OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, csv.Error, pa.ArrowException
PIECE = 1 << 16    # bytes at a time; a truncated file loses less than this

class Input(NamedTuple):
    path: str
    size: int
    kind: str | None    # how it is read: a suffix in KINDS

def find_inputs(inputs, as_text=()):
    """(each file that paths, folders and globs name, once, sorted; {path: reason} of what is ignored)"""
    found, ignored = {}, {}
    for pattern in inputs:
        files, others, names = {}, {}, {}    # names: of all files, below their folder
        for path in [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True):
            if os.path.isdir(path):
                dataset.list_files(path)    # refuses tables and caches that also hold deleted text
                below = files_below(path)
                names |= {file: os.path.relpath(file, path).replace(os.sep, "/") for file in below}
            else:
                names[path] = os.path.basename(path)
        reasons = {} if os.path.isfile(pattern) else reasons_to_ignore(names, as_text)
        for file in names:
            (others if file in reasons else files)[os.path.abspath(file)] = reasons.get(file)
        listed = [Input(path, os.path.getsize(path), kind_of(path, as_text)) for path in files or others]
        for file in listed:
            if not file.path.isprintable():
                raise ValueError(f"rename {file.path!a}: it is not UTF-8, or has control characters")
            if not file.kind:
                with open(file.path, "rb") as stream:
                    raise ValueError(f"cannot convert {file.path}; {advise(file, kind_seen(stream))}")
        if not files:
            raise ValueError(f"{pattern}: no such files; expected {', '.join(as_text or KINDS)} (text also "
                             f"with {', '.join(CODECS)}): a file, a folder or a glob in quotes")
        empty = [file.path for file in listed if file.kind in (".txt", ".md") and not file.size]
        found |= {file.path: file for file in listed if file.path not in empty}
        ignored |= others | dict.fromkeys(empty, "empty")
    if not found:
        raise ValueError(f"{' '.join(inputs)}: all files are empty")
    ignored = {path: reason for path, reason in ignored.items() if path not in found}
    return sorted(found.values(), key=lambda file: os.path.split(file.path)), ignored

def files_below(folder):
    """Follows links to folders, and enters each folder once. One that cannot be read is an error."""
    def fail(error):
        raise error

    seen = set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
        else:
            yield from (os.path.join(root, name) for name in names)
        seen.add(real)

def reasons_to_ignore(names, as_text):
    """{path: reason} of the files of a folder or glob that are not read. names: {path: name below it}"""
    splits, reasons, about_data = {}, {}, "about data, not documents; to convert one, name its path"
    for path, name in names.items():
        if "/." in f"/{name}":
            reasons[path] = "hidden"
        elif os.path.basename(name) in ABOUT_DATA:
            reasons[path] = about_data
        elif as_text and not has_name(name, as_text):
            reasons[path] = "not named by --as_text; to convert one, name its path"
        elif not kind_of(name, as_text):
            reasons[path] = "of another kind; if it is plain text, add --as_text '*.SUFFIX'"
        else:
            splits[path] = dataset.split_in_name(name)
    if "train" in splits.values():
        others = [path for path, split in splits.items() if split in ("val", "test")]
        reasons |= dict.fromkeys(others, "of a val or test split; to convert one, name its path")
    if {kind_of(names[path], as_text) for path in splits} - {".txt", ".md"}:    # as in Hugging Face's folders
        readmes = [path for path in splits if os.path.basename(path) == "README.md"]
        reasons |= dict.fromkeys(readmes, about_data)
    return reasons

def kind_of(name, as_text=()):
    """How a file is read: by its suffix, compression aside; None if it is not read."""
    if has_name(name, as_text):
        return ".txt"
    stem, suffix = os.path.splitext(name.lower())
    kind = os.path.splitext(stem)[1] if suffix in CODECS else suffix
    return BINARY.get(suffix) or (kind if kind in TEXT else None)

def has_name(path, patterns):
    return any(fnmatch.fnmatch(os.path.basename(path), pattern) for pattern in patterns)

def kind_seen(stream):
    """The kind of a file by its first bytes; None if unknown."""
    head = stream.read(PIECE)
    stream.seek(0)
    seen = next((seen for magic, seen in MAGIC.items() if head.startswith(magic)), None)
    return seen or ("binary" if b"\0" in head else None)

def advise(file, seen):
    """Say what to type for a file whose content does not match its name; seen: kind by its first bytes."""
    path, suffix = shlex.quote(file.path), os.path.splitext(file.path.lower())[1]
    if archive := re.search(r"\.(zip|tar|tgz)(\.\w+)?$", file.path.lower()):
        module = "zipfile" if archive[1] == "zip" else "tarfile"
        return f"it holds files; type: python -m {module} -e {path} FOLDER, and convert that folder"
    if seen == "UTF-16":
        return f"it is UTF-16; type: iconv -f UTF-16 -t UTF-8 {path} > {path}.utf8{file.kind or '.txt'}"
    if seen == suffix:
        return f"rename it to say what it holds, as .jsonl{suffix} and .txt{suffix} do"
    if seen in KINDS or seen in CODECS:
        return f"its first bytes are {seen}; type: mv {path} {shlex.quote(file.path + seen)}"
    if seen:
        return f"it is {seen}; {MAKE_JSONL}"
    if suffix in CODECS:
        return f"its first bytes are not {suffix}; type: mv {path} {shlex.quote(file.path[:-len(suffix)])}"
    pattern = shlex.quote("*" + suffix if suffix else os.path.basename(file.path))
    return f"if it is plain text, add --as_text {pattern}; else {MAKE_JSONL}"

def find_messages_key(file):
    """The first documents of a file are conversations under this key; None if they are texts."""
    for kind, key in ("text", "text"), ("messages", "messages"), ("messages", "conversations"):
        with contextlib.closing(documents_of(file, kind, [key])) as documents:
            if any(problem is None for *_, problem in itertools.islice(documents, 10)):
                return key if kind == "messages" else None

def documents_of(file, kind, columns, cut_bytes=None):
    """
    (where, UTF-8 text, record, None) of each document, or (where, None, {}, what is wrong with it). columns:
    that of the document, then those to keep. kind: text, or messages, of which the text is JSON.
    """
    where = "byte 0"
    try:
        with pa.OSFile(file.path) as stream:
            for where, record in records_in(file, stream, columns, cut_bytes):
                try:
                    yield where, *parse(record, kind, columns[0]), None
                except (ValueError, RecursionError) as error:
                    yield where, None, {}, reason(error)
    except ColumnError as error:
        yield "columns", None, {}, str(error)
    except UNREADABLE as error:
        yield f"unreadable after {where}", None, {}, reason(error)

def parse(record, kind, key):
    """A record, or a line with one as JSON -> (UTF-8 text, record)"""
    if isinstance(record, bytes):
        try:
            record = json.loads(record.decode())
        except json.JSONDecodeError as error:
            raise ValueError(f"{error}; expected one whole JSON document in a line (jq -c . FILE)") from error
    if kind == "messages" and isinstance(record, list):    # as nanochat's lines
        record = {key: record}
    if not isinstance(record, dict) or key not in record:
        for name in ("messages", "conversations") if kind == "text" and isinstance(record, dict) else ():
            if isinstance(record.get(name), list):
                messages_as_json(record[name])    # its error is the cause, not a missing text
                raise ValueError(f"a conversation, under {name!r}, among texts; convert conversations by "
                                 "themselves (train.py mixes: --data TEXT:0.7 CHATS:0.3)")
        seen = ", ".join(map(repr, record))[:200] if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no key or column {key!r}, only {seen}; {NAME_KEY}{MAKE_JSONL}")
    if None in record:    # CSV's fields beyond the header's: the text would be cut at its comma
        raise ValueError(f"{len(record[None])} more fields than the first line names; quote the text")
    text = messages_as_json(record[key]) if kind == "messages" else record[key]
    if not isinstance(text, str | bytes):    # bytes: old versions of Hive and Impala write them for strings
        raise ValueError(f"{key!r} holds {type(text).__name__}, not a string; for conversations, add "
                         f"--messages_key {key}; else {MAKE_JSONL}")
    text = (text.decode() if isinstance(text, bytes) else text).encode()
    if len(text) > LONGEST_DOCUMENT:
        raise ValueError(f"{key!r} has more than {LONGEST_DOCUMENT:,} bytes; cut it into documents")
    return text, record

def messages_as_json(messages):
    """nanochat's and OpenAI's messages, or ShareGPT's, checked; ValueError if they cannot be rendered."""
    with contextlib.suppress(json.JSONDecodeError):    # a string that is no JSON is named below
        messages = json.loads(messages) if isinstance(messages, str | bytes) else messages
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and "from" in messages[0]:
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles.get(one.get("from"), one.get("from")), "content": one.get("value")}
                    for one in messages]
    render(messages, NANOCHAT)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"no message of an assistant in {messages!r:.200}")
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    return json.dumps(messages, ensure_ascii=False, default=str)

def reason(error):
    """What an error says, in one line, and what to do."""
    latin1 = "; if it is Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW"
    return " ".join(str(error).split()) + latin1 * isinstance(error, UnicodeDecodeError)

def records_in(file, stream, columns, cut_bytes):
    """(where, record) of each document; record: its columns, of which the first is the text, or JSON."""
    seen, suffix = kind_seen(stream), os.path.splitext(file.path.lower())[1]
    if (seen in MAGIC.values() and seen not in (file.kind, suffix)) or (suffix in CODECS and not seen):
        raise ValueError(advise(file, seen))
    if file.kind in (".parquet", ".arrow"):
        yield from table_records(file.kind, stream, columns)
        return
    if suffix == ".xz":
        stream = lzma.LZMAFile(stream)  # noqa: SIM115, closed with the stream below it
    elif suffix in CODECS:    # pyarrow's gzip gives 495 MB/s of JSON lines, Python's 353 (one core)
        stream = pa.CompressedInputStream(stream, CODECS[suffix])
    stream = io.BufferedReader(stream, PIECE)
    if stream.peek(3).startswith(BOM_UTF8):
        stream.read(3)
    lines = iter(lambda: stream.readline(LONGEST_DOCUMENT), b"")    # bounded memory, also for one long line
    if file.kind in DELIMITERS:
        yield from csv_records(lines, columns, DELIMITERS[file.kind])
    elif file.kind in (".txt", ".md"):
        for where, text in cut_text(read_all(stream), cut_bytes):
            yield where, {columns[0]: text}
    elif re.match(rb'\s*\[(?!{"(role|content)")', stream.peek(64)):    # else each line may be a conversation
        for number, record in enumerate(json.loads(read_all(stream).decode())):
            yield f"document {number}", record
    else:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield f"line {number}", line

def read_all(stream):
    data = stream.read(LONGEST_DOCUMENT + 1)
    if len(data) > LONGEST_DOCUMENT:
        raise ValueError(f"over {LONGEST_DOCUMENT:,} bytes in one piece; {MAKE_JSONL}")
    return data

def cut_text(data, cut_bytes):
    """(where, part) of at most cut_bytes that ends at a blank line, else at a line end, else at a space."""
    start, cut_bytes = 0, cut_bytes or len(data)
    if not data:
        yield "byte 0", data
    while start < len(data):
        stop = start + cut_bytes
        if stop < len(data):
            stop = next((at + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\n", b" ")
                         if (at := data.rfind(mark, start, stop)) >= 0), stop)
            while stop > start + 1 and data[stop] & 0xC0 == 0x80:
                stop -= 1    # not in the middle of a character
        yield f"byte {start}", data[start:stop]
        start = stop

class ColumnError(ValueError):
    """A file has no column of a name that was typed, or several."""

def check_columns(columns, names, seen, advice):
    """columns: the text's, then those of --keep; advice: how to name the text's."""
    if bad := [name for name in columns if names.count(name) != 1]:
        advice = advice if bad[0] == columns[0] else "it is named by --keep"
        raise ColumnError(f"expected one column {bad[0]!r}, saw {seen}; {advice}")

def csv_records(lines, columns, delimiter):
    csv.field_size_limit(LONGEST_DOCUMENT)
    rows = csv.DictReader((line.decode() for line in lines), delimiter=delimiter, strict=True)
    advice = f"{NAME_KEY}add a first line that names the columns, with {delimiter!r} between"
    check_columns(columns, rows.fieldnames or [], str(rows.fieldnames)[:200], advice)
    for row in rows:
        yield f"line {rows.line_num}", row

def table_records(kind, stream, columns):
    """Of parquet, Feather and Arrow files, and of the streams that Hugging Face's save_to_disk writes."""
    if kind == ".parquet":
        file = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
        if b"nanoloader.dtype" in (file.metadata.metadata or {}):
            raise ValueError("it holds token ids; convert the folder of the text that they were made from")
        schema = file.schema_arrow
        batches = file.iter_batches(ROW_GROUP_DOCUMENTS, columns=columns, use_threads=False)
    else:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        file = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        schema = file.schema
        batches = map(file.get_batch, range(file.num_record_batches)) if is_file else file
    seen = ", ".join(f"{field.name!r}: {field.type}" for field in schema)
    check_columns(columns, schema.names, seen, NAME_KEY + MAKE_JSONL)
    names, row = dict.fromkeys(schema.names), itertools.count()
    for batch in batches:
        for record in batch.select(columns).to_pylist():
            yield f"row {next(row)}", names | record

# ---------------------------------------------------------------------------------------------------------
# Tokenize: the same shards, with token ids in place of text

VOCAB_SIZE = 32768    # of a tokenizer that is trained because the data has none

def tokenize(data_dir: str, out: str, tokenizer_dir: str | None = None, threads: int | None = None,
             compression: str = "none", keep: Sequence[str] = ()) -> int:
    """
    Write token shards: same names, row groups and rows as the text shards. Returns the number of tokens.

    Resumes: complete shards of the same text and tokenizer are kept. keep: columns beside the tokens.
    """
    if "://" in out or os.path.realpath(out) == os.path.realpath(data_dir):
        raise ValueError(f"cannot write to {out}; name another local folder with --out")
    shards = all_shards(data_dir)
    if shards[0].kind == "tokens":
        raise ValueError(f"{data_dir} holds token ids already; name a folder of text shards")
    if others := sorted({name for name, *_ in dataset.list_files(out)} - {shard.name for shard in shards}):
        raise ValueError(f"{out} holds {others[0]}, which {data_dir} does not; name a new folder with --out")
    tokenizer, where = find_tokenizer(tokenizer_dir, [data_dir], VOCAB_SIZE)
    print(f"tokenizer: {where}", flush=True)
    columns, where = sorted(columns_of(shards[0])), os.path.abspath(where)
    if missing := {*keep} - {*columns}:
        raise ValueError(f"--keep {min(missing)}: {shards[0].path} has only {', '.join(columns)}")
    print_dropped({*columns} - {shards[0].kind, *keep})
    options = os.path.abspath(out), tokenizer, where, threads or cores(), compression, keep
    shown = tqdm(shards, "tokenize", unit=" shards", delay=1)
    tokens = sum(tokenize_shard(shard, *options) for shard in shown)
    dataset.write_index(out)
    return tokens

def tokenize_shard(shard, out, tokenizer, where, threads, compression, keep):
    path, columns = os.path.join(out, shard.name), ["tokens", *keep]
    dtype = tokenizer.dtype if shard.kind == "text" else np.dtype(np.int32)
    if os.path.exists(path):
        old = read_shard(out, shard.name, os.path.getsize(path))
        wanted = shard.text_bytes, shard.group_sizes, dtype, tokenizer.fingerprint(), columns
        found = old.text_bytes, old.group_sizes, old.dtype, old.fingerprint, columns_of(old)
        if found != wanted or old.digest not in (None, shard.digest):
            raise ValueError(f"{path} was made from other text, by another tokenizer, or with other --keep; "
                             "name a new folder with --out, or remove this one")
        return sum(count_bytes(old.read(i)) for i in range(len(old.group_sizes))) // dtype.itemsize

    tokens = []
    def encode(row_group):
        ids = encode_array(shard.read(row_group), tokenizer, shard.kind)
        tokens.append(count_bytes(ids) // dtype.itemsize)
        return pa.table([ids, *read_columns(shard, row_group, keep)], columns) if keep else ids

    metadata = {"nanoloader.dtype": dtype.name, "nanoloader.tokenizer": tokenizer.fingerprint(),
                "nanoloader.tokenizer_dir": where,
                "nanoloader.text_bytes": str(shard.text_bytes), dataset.TEXT_DIGEST: shard.digest or ""}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(out, dataset.INDEX))    # it is written again when all shards are there
    with ThreadPoolExecutor(threads) as pool:
        encoded = in_order(pool, encode, range(len(shard.group_sizes)), 2 * threads)
        dataset.write_shard(path, (ids for _, ids in encoded), "tokens", metadata, compression)
    return sum(tokens)

def encode_array(texts, tokenizer, kind):
    """An array of documents -> binary, the ids of each, little-endian; a null stays null."""
    ids, bounds = encode(texts.to_pylist(), tokenizer, kind)
    ids = np.ascontiguousarray(ids, ids.dtype.newbyteorder("<"))
    if ids.nbytes >= 2**31:
        raise ValueError(f"a row group of {len(ids):,} tokens is too large; convert makes smaller ones")
    valid = np.packbits(~np.asarray(texts.is_null()), bitorder="little")
    buffers = [pa.py_buffer(part) for part in (valid, (bounds * ids.itemsize).astype(np.int32), ids)]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers)

def encode(documents, tokenizer, kind):
    """(ids, bounds) of texts, or of messages, whose ids are ~t where they have no loss."""
    if kind == "messages":
        return encode_conversations(tokenizer, documents)
    texts = [text for text in documents if text is not None]
    ids, bounds = tokenizer.encode_documents(texts)
    n_texts_before = np.cumsum([0, *(text is not None for text in documents)])
    return ids, bounds[n_texts_before]

def count_bytes(array):
    return pc.sum(pc.binary_length(array)).as_py() or 0

def read_shard(folder, name, size):
    """The Shard that its footer describes, whatever an index says; None if it has no documents."""
    _, header, entry = dataset.read_entry(folder, (name, size, None))
    return next(iter(dataset.shards_of(folder, {**header, "shards": {name: entry}})), None)

def columns_of(shard):
    return dataset.read_footer(shard)[0].schema.to_arrow_schema().names

def read_columns(shard, row_group, names):
    """Other columns than the documents; their pages are compared with their checksums."""
    with dataset.errors_named(shard.folder, shard.name, f"row group {row_group}"):
        with dataset.open_file(shard.folder, shard.name, shard.file_size) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            table = parquet.read_row_group(row_group, names, use_threads=False)
        return [table.column(name) for name in names]

def print_dropped(columns):
    if columns:
        names = dataset.printable(", ".join(sorted(columns)))[:200]
        print(f"dropped columns: {names} (to keep some: --keep NAME ...)", flush=True)

# ---------------------------------------------------------------------------------------------------------
# Look at shards: verify, stats, head

def verify(folder: str) -> bool:
    """Read every shard, compare it with all its checksums and the index; print a table; True if all match."""
    problems, indexed = 0, {}
    try:
        if index := dataset.read_index(folder):
            indexed = {shard.name: shard for shard in dataset.shards_of(folder, index)}
            files = [(name, entry["bytes"]) for name, entry in index["shards"].items()]
        else:
            with contextlib.suppress(dataset.ShardError):    # the table names that one
                dataset.make_index(folder, dataset.list_files(folder))
    except ValueError as error:    # the shards are checked all the same: one may be truncated
        problems = 1
        print(f"PROBLEM  {dataset.printable(error)}")
    if not indexed:
        files = [(name, size) for name, size, _ in dataset.list_files(folder)]
    check = functools.partial(check_shard, folder=folder, indexed=indexed)
    print(f"{'shard':<22} {'documents':>11} {'row groups':>10} {'nulls':>7} {'MB':>9} {'on disk':>9}  check")
    with ThreadPoolExecutor(cores()) as pool:
        for (name, _), line in in_order(pool, check, files, 2 * cores()):
            problems += line.startswith("PROBLEM")
            print(f"{dataset.printable(name):<22} {line}", flush=True)
    print(f"{folder}: {counted(len(files), 'shard')}, {counted(problems, 'problem')}")
    if problems:
        print("next: remove damaged shards, then type again what made them: python dataset.py -n N and "
              "tokenize write what is missing, convert needs a new folder")
    return not problems

def check_shard(file, folder, indexed):
    rows, nulls, n_bytes, kind = [], 0, 0, "pages, if any"
    try:
        if shard := read_shard(folder, *file):
            rows, kind = shard.group_sizes, "documents" if dataset.read_footer(shard)[1] else kind
            known = vars(indexed.get(shard.name, shard))
            if vars(shard) != known | {"digest": known["digest"] or shard.digest}:
                raise ValueError("it contradicts index.json; type: python dataset.py index FOLDER")
            others = [name for name in columns_of(shard) if name != shard.kind]
        for row_group in range(len(rows)):
            array = shard.read(row_group)
            nulls, n_bytes = nulls + array.null_count, n_bytes + count_bytes(array)
            if others:
                read_columns(shard, row_group, others)
        if shard and kind == "documents" and shard.kind != "tokens" and n_bytes != shard.text_bytes:
            raise ValueError(f"its footer says {shard.text_bytes:,} bytes of text, but it has {n_bytes:,}")
    except (OSError, ValueError) as error:
        return f"PROBLEM  {str(error).partition('; check it with')[0]}"
    return (f"{sum(rows):>11,} {len(rows):>10,} {nulls:>7,} {n_bytes / 1e6:>9,.1f} {file[1] / 1e6:>9,.1f}  "
            f"checksums of {kind}")

def stats(folder: str, tokenizer_dir: str | None = None) -> None:
    """Print what a folder contains: documents, bytes, tokens, lengths, row groups, lanes."""
    lengths, tokenizer, header = {}, None, folder
    if list_shards(folder, "train")[0].kind != "tokens":
        tokenizer, tokenizer_dir = known_tokenizer(tokenizer_dir, folder)
        header += (f", tokens by {tokenizer_dir}" if tokenizer else ": tokens need a tokenizer; add "
                   f"--tokenizer DIR, or train one: python tokenizer.py --data {shlex.quote(folder)}")
    print(header)
    print(f"{'split':<6} {'shards':>7} {'row groups':>11} {'documents':>13} {'nulls':>7} {'MB':>11}  tokens")
    for split in ("train", "val"):
        shards = list_shards(folder, split)
        found = lengths_of(shards)
        lengths[split] = found[found >= 0]
        nulls, n_bytes = np.count_nonzero(found < 0), lengths[split].sum()
        _, total = count_tokens(shards, n_bytes, tokenizer)
        print(f"{split:<6} {len(shards):>7,} {len(row_groups_of(shards)):>11,} {len(found):>13,} {nulls:>7,} "
              f"{n_bytes / 1e6:>11,.1f}  {total}")
    print("lanes  at most as many as documents; if there are more than row groups, some share one")
    if len(lengths["train"]):
        points = np.percentile(np.concatenate([*lengths.values()]), percents := (10, 50, 90, 99, 100))
        parts = [f"{percent} % up to {point:,.0f}" for percent, point in zip(percents, points, strict=True)]
        what = {"text": "text", "messages": "JSON", "tokens": "ids"}[shards[0].kind]
        print(f"bytes  of {what} in a document: {', '.join(parts)}")

def plan(flags):
    """Print how often a run of train.py takes the documents of each source, before it is started."""
    from train import parse_flags, sources_of  # here: to import torch takes 3 s

    run = parse_flags(["--data", *flags.data] if flags.data else [])    # for its defaults on this machine
    B, T = flags.batch_size or run.batch_size, flags.seq_len or run.seq_len
    sources, n_tokens = sources_of(run), flags.steps * B * (T + 1)
    tokenizer, where = find_tokenizer(flags.tokenizer, [*sources], run.vocab_size)
    print(f"{flags.steps:,} steps of {B:,} rows of {T:,} tokens, {n_tokens:,} tokens by {where}")
    for path, weight in sources.items():
        shards, share = list_shards(path, "train"), weight / sum(sources.values())
        available, _ = count_tokens(shards, lengths_of(shards).clip(0).sum(), tokenizer)
        epochs = share * n_tokens / available
        print(f"{path}: {share:.1%} of the rows, {share * n_tokens:,.0f} tokens of about {available:,.0f}: "
              f"{epochs:.2f} epochs, {'REPEATED' if epochs > 1 else 'nothing twice'}")

def known_tokenizer(tokenizer_dir, folder):
    """(tokenizer, its folder): the one given, or the largest that was trained on this data; else Nones."""
    if not tokenizer_dir:
        stem = trained_dir([folder], 0).removesuffix("0")
        found = filter(is_saved, glob.glob(glob.escape(stem) + "*"))
        sizes = [int(path.removeprefix(stem)) for path in found]
        if not sizes:
            return None, None
        tokenizer_dir = f"{stem}{max(sizes)}"
    return RustBPETokenizer.from_directory(tokenizer_dir), tokenizer_dir

def lengths_of(shards):
    """Bytes of every document; -1 for a null."""
    def read(shard, row_group):
        return pc.binary_length(shard.read(row_group)).fill_null(-1).to_numpy()

    with ThreadPoolExecutor(cores()) as pool:
        return np.concatenate([*pool.map(read, *zip(*row_groups_of(shards), strict=True))])

def row_groups_of(shards):
    return [(shard, row_group) for shard in shards for row_group in range(len(shard.group_sizes))]

def count_tokens(shards, n_bytes, tokenizer):
    """
    (number of tokens, in words). For token shards: exact; for text: of 16 row groups spread over the shards;
    without a tokenizer, 0. n_bytes: of all documents.
    """
    if shards[0].kind == "tokens":
        n_tokens = n_bytes // shards[0].dtype.itemsize
        return n_tokens, f"{n_tokens:,}"
    if not tokenizer:
        return 0, "-"
    positions = row_groups_of(shards)
    samples = [shard.read(i).drop_null() for shard, i in positions[::-(-len(positions) // 16)]]
    encoded = [encode(texts.to_pylist(), tokenizer, shards[0].kind) for texts in samples]
    n_tokens = sum(len(ids) for ids, _ in encoded) * n_bytes / max(1, sum(map(count_bytes, samples)))
    words = f"about {n_tokens:,.0f}"
    if shards[0].kind == "messages":
        words += f", {np.concatenate([ids >= 0 for ids, _ in encoded]).mean():.0%} with a loss"
    return n_tokens, words

def head(folder: str, n: int = 5, split: str = "train", tokenizer_dir: str | None = None,
         raw: bool = False) -> None:
    """Print n documents of a split: numbers, places, lengths and beginnings, or with raw their whole text."""
    tokenizer = find_tokenizer(tokenizer_dir, [folder], VOCAB_SIZE)[0] if tokenizer_dir else None
    shards, first = list_shards(folder, split), 0
    if tokenizer and shards[0].fingerprint not in (None, tokenizer.fingerprint()):
        raise ValueError(f"{folder} needs the tokenizer that made it, {maker_of(shards[0])}, "
                         f"not {tokenizer_dir}")
    for shard, row_group in row_groups_of(shards):
        documents = shard.read(row_group)[:n - first].to_pylist() if first < n else []
        for row, document in enumerate(documents):
            lengths, text = ["null"], ""
            if document is not None and shard.kind == "tokens":
                ids = np.frombuffer(document, shard.dtype)
                lengths = [f"{len(ids):,} tokens"]
                known = np.where(ids < 0, ~ids, ids)[1:].tolist()    # ~t: without a loss
                text = tokenizer.decode(known) if tokenizer else str(ids[:40].tolist())
            elif document is not None:
                lengths, text = [f"{len(document.encode()):,} bytes"], document
                if tokenizer:
                    lengths.append(f"{len(encode([document], tokenizer, shard.kind)[0]):,} tokens")
            print(f"{first + row:<5} {shard.path}, row group {row_group}, row {row}: {', '.join(lengths)}")
            shown = re.sub("[^ \n]+", lambda word: dataset.printable(word[0]), text.expandtabs())
            print("      " + (shown.replace("\n", "\n      ") if raw else dataset.printable(text[:200])))
        first += len(documents)
    if shards[0].kind == "tokens" and not tokenizer:
        print(f"these are token ids; to see text, add --tokenizer {maker_of(shards[0])}")

# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    flags = make_parser().parse_args(argv)
    with errors_in_one_line():
        flags.run(flags)

def make_parser():
    as_written = argparse.RawTextHelpFormatter
    parser = Parser("python -m dev.prepare", description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text, has_folder=True):
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if has_folder:
            add_folder(added)
        return added.add_argument

    add = command("convert", run_convert, f"make shards from files: {' '.join(KINDS)}", has_folder=False)
    add("inputs", nargs="+", metavar="IN", help="files, folders, or globs in quotes")
    add("--text_key", help="JSON key or column that holds the text (default text)")
    add("--messages_key", help="that of conversations (default messages, if there is no text)")
    add("--keep", nargs="+", action="extend", default=[], metavar="NAME", help="columns kept beside the text")
    add("--as_text", nargs="+", action="extend", default=[], metavar="GLOB", help="read only these, as text")
    add("--out", help="folder, new or empty (default: where train.py looks)")
    add("--skip_bad", action="store_true", help="skip bad documents and unreadable files, and count them")
    add("--cut_bytes", type=at_least_1, help="cut plain text into documents of this size, at blank lines")
    add("--seed", type=int, default=0, help="of the shuffle (default 0)")
    add("-w", "--num_workers", type=at_least_1, help="processes (default: up to one a core)")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster whose workers see the same files")
    add = command("tokenize", run_tokenize, "write the same shards with tokens in place of text")
    add("--out", required=True, help="folder for the token shards")
    add("--tokenizer", help="folder of the tokenizer")
    add("--keep", nargs="+", action="extend", default=[], metavar="NAME", help="columns kept beside tokens")
    add("--compression", default="none", choices=("none", "zstd"), help="zstd: half the size, 1/4 the speed")
    add = command("head", lambda flags: head(folder_of(flags), flags.n, flags.split, flags.tokenizer,
                                             flags.raw), "print some documents")
    add("-n", type=at_least_1, default=5, help="how many (default 5)")
    add("--split", default="train", choices=("train", "val"))
    add("--raw", action="store_true", help="print whole documents, with their line breaks")
    add("--tokenizer", help="folder of the tokenizer")
    command("verify", lambda flags: sys.exit(not verify(folder_of(flags))),
            "check every shard against all its checksums")
    add = command("stats", lambda flags: plan(flags) if flags.steps else stats(
        folder_of(flags), flags.tokenizer), "count documents, bytes, tokens, lengths, row groups, lanes; "
        "with --steps, for FOLDER:WEIGHT ...: how often a run takes the documents")
    add("--steps", type=at_least_1, help="of a run: print its epochs of each FOLDER:WEIGHT")
    add("--batch_size", type=at_least_1, help="rows in a step, with --steps (default: train.py's)")
    add("--tokenizer", help="its folder (default: that trained on this data; if there is none, only bytes)")
    add("--seq_len", type=at_least_1, help="tokens in a row, with --steps (default: train.py's)")
    add = command("import_tokenizer", lambda flags: print(import_tokenizer(flags.file, flags.out, flags.bos)),
                  "convert Hugging Face's tokenizer.json, if it is a byte-level BPE", has_folder=False)
    add("file", help="a tokenizer.json")
    add("--out", required=True, help="folder for our two text files")
    add("--bos", metavar="TOKEN", help="special token that opens each document")
    return parser

def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)

def add_folder(parser):
    text = "folder or URI of shards, also as --data FOLDER (default: what train.py takes)"
    parser.add_argument("data", nargs="*", action="extend", default=[], metavar="FOLDER", help=text)
    parser.add_argument("--data", nargs="+", action="extend", help=argparse.SUPPRESS)

def folder_of(flags):
    if len(flags.data) > 1:
        raise ValueError(f"expected one folder, not {' '.join(flags.data)}; type the command for each of "
                         "them (only train.py takes several: --data FOLDER:0.7 FOLDER:0.3)")
    return find_data(*flags.data)

def counted(n, noun):    # 1, "file" -> "1 file";  1234, "file" -> "1,234 files"
    return f"{n:,} {noun}{'s' * (n != 1)}"

def run_convert(flags):
    out = flags.out or dataset.default_data_dir()
    with dask_executor(flags.dask) as (executor, threads):
        made = convert(flags.inputs, out, flags.text_key, flags.keep, flags.as_text, flags.skip_bad,
                       flags.cut_bytes, flags.seed, flags.num_workers or threads, executor=executor,
                       messages_key=flags.messages_key)
    noun = "document" if made["kind"] == "text" else "conversation"
    empty = f" ({made['empty']:,} of them empty)" if made["empty"] else ""
    print(f"{counted(made['files'], 'file')} -> {counted(made['documents'], noun)}{empty}, "
          f"{made['bytes'] / 1e6:,.1f} MB, in {made['shards']:,} shards, the last for val, in {out}")
    print_dropped(made["dropped"])
    if made["strings"]:
        print(f"CSV has no types, so these columns hold strings: {', '.join(made['strings'])}")
    ignored = {}
    for path, reason in made["ignored"].items():
        ignored.setdefault(reason, collections.Counter())[os.path.splitext(path)[1]] += 1
    for reason, suffixes in ignored.items():
        kinds = ", ".join(f"{n:,} {suffix or 'without suffix'}" for suffix, n in suffixes.most_common())
        print(f"ignored {counted(suffixes.total(), 'file')} ({dataset.printable(kinds)}): {reason}")
    if made["bad"]:
        print(f"skipped bad documents or files: {made['bad']:,}; the first:", *made["shown"], sep="\n  ")

def run_tokenize(flags):
    tokens = tokenize(folder_of(flags), flags.out, flags.tokenizer, None, flags.compression, flags.keep)
    print(f"{tokens:,} tokens in {flags.out}")

if __name__ == "__main__":
    main()
