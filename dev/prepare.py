"""
What is run once, before training: make shards of your own text, tokenize, check and count them.

    python -m dev.prepare convert 'my/*.json.gz' --text_key content  # your own text, shuffled into shards
    python -m dev.prepare tokenize --data DIR --out DIR              # the same shards, tokens for text
    python -m dev.prepare verify                                     # every shard against all its checksums
    python -m dev.prepare stats                                      # documents, bytes, lengths, lanes
"""

import argparse
import contextlib
import csv
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import logging
import lzma
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from codecs import BOM_UTF8
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dataset import (
    INDEX,
    MAKE_JSONL,
    PIECE,
    File,
    Progress,
    all_shards,
    check_local,
    check_one_version,
    columns_of_text,
    cores,
    default_data_dir,
    errors_in_one_line,
    files_and_index,
    files_below,
    filesystem_of,
    find_data,
    in_order,
    index_command,
    is_http,
    join_name,
    list_files,
    list_shards,
    lock_file,
    one_line,
    open_file,
    open_shard,
    read_footer,
    remove,
    sha256_of,
    size_of,
    split_in_name,
    text_key_flag,
    write_index,
    write_shard,
)
from tokenizer import get_tokenizer

# ---------------------------------------------------------------------------------------------------------
# Convert: whatever text there is -> shuffled shards, in bounded memory
#
# A document's key is a hash of where it stood, and the shards hold the documents in the order of their keys:
# a shuffle that is the same for any number of processes. First they parse the inputs into runs of RUN_BYTES
# of text on disk, sorted by key. From all keys and lengths (16 bytes a document) follows which documents
# each row group holds; then each shard's are looked up in all the runs.

RUN_BYTES = 32 << 20
SHARD_BYTES = 300_000_000    # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_BYTES = 32 << 20    # fewer documents in a row group where they are long
VAL_DOCUMENTS = 64    # at least, where there are ten times as many: a lane needs one
LONGEST_DOCUMENT = 1 << 30    # bytes
BAD_SHOWN = 5
RUN = pa.schema([("key", pa.uint64()), ("text", pa.large_binary())])


def convert(inputs: list[str], out: str, text_key: str = "text", skip_bad: bool = False,
            skip_torn: bool = False, cut_bytes: int | None = None, seed: int = 0, workers: int | None = None,
            shard_bytes: int = SHARD_BYTES, executor: Executor | None = None) -> dict:
    """
    Make shards of files with one of KINDS; the last shard, about 1 % of the documents, is val.

    inputs: paths, folders, globs, URIs. Nothing stands under `out` before everything does. ValueError names
    file and line of the first bad document; with `skip_bad` the report counts them and shows the first few,
    with `skip_torn` also files that end too early. Each .txt or .md file is a document, or with `cut_bytes`
    parts of at most so many bytes that end at blank lines. Any executor does whose workers see these paths;
    `workers` then says how many there are.
    """
    check_local(out)
    files, others = find_inputs(inputs)
    total = sum(file.size for file in files)
    parse = functools.partial(scatter_task, text_key=text_key, skip_bad=skip_bad, skip_torn=skip_torn,
                              cut_bytes=cut_bytes, seed=seed, longest_in_val=total // 20)
    ahead = 4 * (workers or cores())
    with working_folder(out) as building, executor_or_pool(executor, workers) as pool:
        try:
            bad = scatter_all(pool, files, functools.partial(parse, building=building), ahead)
            counts = gather_all(pool, building, shard_bytes, ahead)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)    # so that workers end at their next write
            raise
        index = write_index(building + "/shards")
        assert sum(sum(entry["rows"]) for entry in index["shards"].values()) == counts["documents"]
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(out)
        os.rename(building + "/shards", out)
    shown = [message for _, messages in bad for message in messages]
    return {"files": len(files), "others": others, "bad": sum(count for count, _ in bad),
            "shown": shown[:BAD_SHOWN], **counts}


@contextlib.contextmanager
def working_folder(out):
    """Of this run alone, beside `out`; those of runs that were killed are removed."""
    out = os.path.abspath(out)
    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"{out} is not empty; name a new folder with --out, or remove it first")
    os.makedirs(os.path.dirname(out), exist_ok=True)
    for old in glob.glob(glob.escape(out) + ".convert-*") if os.name == "posix" else ():    # where locks are
        with contextlib.suppress(FileNotFoundError), lock_file(old + "/lock", wait=False) as abandoned:
            if abandoned:
                shutil.rmtree(old, ignore_errors=True)
    building = tempfile.mkdtemp(prefix=os.path.basename(out) + ".convert-", dir=os.path.dirname(out))
    try:
        os.makedirs(building + "/runs")
        os.makedirs(building + "/shards")
        with lock_file(building + "/lock"):
            yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextlib.contextmanager
def executor_or_pool(executor, workers):
    if executor is not None:
        yield executor
        return
    context = multiprocessing.get_context("spawn")    # pyarrow's threads do not survive a fork
    with ProcessPoolExecutor(workers or cores(), mp_context=context, initializer=end_with_parent) as pool:
        yield pool


@contextlib.contextmanager
def dask_executor(address):
    """(an executor on a Dask cluster, threads of all its workers), which run our code and see our files."""
    if not address:
        yield None, None
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise ValueError("--dask needs Dask's scheduler: pip install distributed") from error
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)    # it prints tracebacks of its own
    with Client(address) as client:
        try:
            yield client.get_executor(), sum(client.nthreads().values())
        except CancelledError as error:
            raise OSError(f"the scheduler at {address} was lost, with it what was under way") from error


def end_with_parent():
    """A worker does not outlive a parent that was killed, and leaves Ctrl-C to it."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def scatter_all(pool, files, scatter, ahead):
    total = sum(file.size for file in files)
    progress, bad = Progress(len(files), "files", total / len(files)), []
    for (_, group), found in in_order(pool, scatter, group_files(files, total), ahead):
        bad.append(found)
        progress.add(sum(file.size for _, file in group), len(group))
    progress.close()
    return bad


def gather_all(pool, building, shard_bytes, ahead):
    keys, lengths = keys_and_lengths(building)
    shards = list(enumerate(plan_shards(keys, lengths, shard_bytes)))
    progress = Progress(len(shards), "shards", lengths.sum() / len(shards))
    for _, n_bytes in in_order(pool, functools.partial(gather_shard, building=building), shards, ahead):
        progress.add(n_bytes, 1)
    progress.close()
    return {"documents": len(keys), "bytes": int(lengths.sum()), "shards": len(shards)}


def group_files(files, total):
    """Group small files, so that they share a run: (task number, [(file number, file), ...])"""
    number, group, size = 0, [], 0
    for file_number, file in enumerate(files):
        group.append((file_number, file))
        size += file.size
        if size >= min(RUN_BYTES, total // 64) or file_number == len(files) - 1:
            yield number, group
            number, group, size = number + 1, [], 0


def scatter_task(task, building, text_key, skip_bad, skip_torn, cut_bytes, seed, longest_in_val):
    """Parse the files of a task into sorted runs on disk; (bad documents, messages of the first ones)"""
    number, files = task
    keys, texts, size, runs, bad, shown = [], [], 0, 0, 0, []
    for file_number, file in files:
        for index, (where, text, problem) in enumerate(documents_of(file, text_key, cut_bytes)):
            if problem:
                message = f"{file.path}, {where}: {problem}"
                check_skippable(problem, message, skip_bad, skip_torn)
                bad, shown = bad + 1, [*shown, message][:BAD_SHOWN]
                continue
            place = b"%d %d %d" % (seed, file_number, index)
            key = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big")
            # The last documents are val: one that holds much of all text does not come last.
            keys.append(key // 2 if len(text) > longest_in_val else key)
            texts.append(text)
            size += len(text)
            if size >= RUN_BYTES:
                write_run(f"{building}/runs/{number:08d}-{runs:05d}.arrow", keys, texts)
                keys, texts, size, runs = [], [], 0, runs + 1
    if keys:
        write_run(f"{building}/runs/{number:08d}-{runs:05d}.arrow", keys, texts)
    return bad, shown


def write_run(path, keys, texts):
    keys = np.array(keys, np.uint64)
    order = np.argsort(keys, kind="stable")
    sorted_texts = pa.array(texts, pa.large_binary()).take(pa.array(order))
    with pa.OSFile(path + ".tmp", "wb") as file, pa.ipc.new_file(file, RUN) as writer:
        writer.write_table(pa.table([pa.array(keys[order]), sorted_texts], schema=RUN))
    os.replace(path + ".tmp", path)


def open_run(path):
    """(sorted keys, their texts), memory-mapped."""
    batch = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
    return batch["key"].to_numpy(), batch["text"]


def list_runs(building):
    return sorted(glob.glob(glob.escape(building) + "/runs/*.arrow"))


def keys_and_lengths(building):
    """Of all documents, in the order of their keys."""
    keys, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for path in list_runs(building):
        run_keys, texts = open_run(path)
        keys.append(run_keys)
        lengths.append(pc.binary_length(texts).to_numpy())
    keys, lengths = np.concatenate(keys), np.concatenate(lengths)
    order = np.argsort(keys, kind="stable")
    return keys[order], lengths[order]


def plan_shards(keys, lengths, shard_bytes):
    """
    For each shard the (first key, last key) of its row groups. The last shard is val: 1 % of the documents,
    or so many as lanes may ask for, up to a tenth; before it shards of equal bytes.
    """
    n = len(keys)
    if n < 2:
        cut = min(10_000, 1 + int(lengths.sum()) // 16)
        raise ValueError(f"{n} documents are too few for a train and a val shard"
                         + (f"; of one long text make many: add --cut_bytes {cut}" if n else ""))
    train = n - max(1, n // 100, min(VAL_DOCUMENTS, n // 10))
    ends = np.cumsum(lengths + 1)    # + 1: there may be empty ones only
    shards = max(4, round(int(lengths.sum()) / shard_bytes) - 1)    # four, so that cores share a small corpus
    cuts = np.searchsorted(ends[:train], ends[train - 1] * np.arange(1, shards) / shards) + 1
    for first, last in itertools.pairwise(np.unique([0, *cuts, train, n])):
        rows = min(ROW_GROUP_DOCUMENTS, max(1, (last - first) // 16))
        yield [(keys[first + a], keys[first + b - 1]) for a, b in plan_row_groups(lengths[first:last], rows)]


def plan_row_groups(lengths, rows):
    """(start, stop) of row groups of so many documents, or of ROW_GROUP_BYTES, or of one that has more."""
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        limit = ends[start] - lengths[start] + ROW_GROUP_BYTES
        stop = min(start + rows, max(start + 1, int(np.searchsorted(ends, limit, "right"))))
        yield start, stop
        start = stop


def gather_shard(shard, building):
    """Write one shard, a row group at a time; returns its bytes of text."""
    number, row_groups = shard
    runs, sizes = [open_run(path) for path in list_runs(building)], []

    def gather():
        for first, last in row_groups:
            texts = gather_row_group(runs, first, last)
            sizes.append(texts.nbytes)
            yield texts

    write_shard(f"{building}/shards/shard_{number:05d}.parquet", gather())
    return sum(sizes)


def gather_row_group(runs, first, last):
    """All documents with keys from first to last, in the order of their keys."""
    keys, texts = [], []
    for run_keys, run_texts in runs:
        here = slice(run_keys.searchsorted(first), run_keys.searchsorted(last, "right"))
        keys.append(run_keys[here])
        texts.append(run_texts[here])
    order = np.argsort(np.concatenate(keys), kind="stable")
    return pa.concat_arrays(texts).take(pa.array(order)).cast(pa.large_string()).cast(pa.string())


# ---------------------------------------------------------------------------------------------------------
# The files that convert reads

TEXT = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".md")
BINARY = {".parquet": ".parquet", ".pq": ".parquet", ".arrow": ".arrow", ".feather": ".arrow"}
KINDS = (*TEXT, *BINARY)
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".xz": "Python's"}    # of text
ARCHIVES = {".zip": "zipfile", ".tar": "tarfile", ".tgz": "tarfile"}    # Python's modules that unpack them
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\x04\x22\x4d\x18": ".lz4",
         b"\xfd7zXZ": ".xz", b"PAR1": ".parquet", b"PARE": "encrypted", b"ARROW1": ".arrow",
         b"PK\x03\x04": "zip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
ABOUT_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")    # beside Hugging Face's .arrow files
TORN = "torn: "    # how the problem of a file that was cut begins


class Input(NamedTuple):
    folder: str
    name: str
    size: int

    @property
    def path(self):
        return join_name(self.folder, self.name)


def find_inputs(inputs: list[str]) -> tuple[list[Input], list[Input]]:
    """
    Every file that paths, folders, globs and URIs stand for, each once, sorted; and what else lies in these
    folders: other kinds, other splits, and hidden ones.
    """
    found, others = set(), set()
    for pattern in inputs:
        files, rest = remote_inputs(pattern) if "://" in pattern else local_inputs(pattern)
        for odd in (file for file in files or rest if not kind_of(file.name)):
            with open_file(*odd) as stream:
                advice = what_to_type(odd, seen_kind(stream))
            raise ValueError(f"{pattern}: cannot convert {odd.name}; {advice}")
        if not files:
            raise ValueError(f"{pattern}: no such files; expected {', '.join(KINDS)} (text also "
                             f"{', '.join(CODECS)}): file, folder or quoted glob")
        found.update(files)
        others.update(rest)
    return sorted(found), sorted(others)


def local_inputs(pattern):
    files, others = [], []
    for path in [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True):
        check_one_version(path)
        paths = list(files_below(path)) if os.path.isdir(path) else [path]
        names = [os.path.relpath(file, path).replace(os.sep, "/") for file in paths]    # "." is itself
        wanted = {".", *wanted_names(names)}
        for file, name in zip(paths, names, strict=True):
            kept = files if name in wanted else others
            kept.append(Input(*os.path.split(os.path.abspath(file)), size_of(file)))
    return files, others


def wanted_names(names):
    """Of those below a folder: files to read, and where names say train, no test-* or validation-*"""
    wanted = [name for name in names if kind_of(name) and "/." not in f"/{name}"
              and os.path.basename(name) not in ABOUT_DATA]
    splits = {name: split_in_name(name) for name in wanted}
    return [name for name in wanted if splits[name] in ("train", None) or "train" not in splits.values()]


def remote_inputs(pattern):
    if is_http(pattern):
        raise ValueError(f"{pattern}: fetch it first (curl -O); convert reads URIs of object stores only")
    address, mark, query = pattern.partition("?")    # options such as ?region=...; so ? is no wildcard here
    folder, _, wanted = re.split(r"[*\[]", address)[0].rpartition("/")
    wanted, folder_wanted = address[len(folder) + 1:], address[len(folder) + 1:].rstrip("/") + "/"
    folder += mark + query
    fs, root = filesystem_of(folder)
    found = [info for info in fs.get_file_info(pafs.FileSelector(root, recursive=True)) if info.is_file]
    sizes = {info.path[len(root):].lstrip("/"): info.size for info in found}
    named = fnmatch.filter(sizes, wanted)
    inside = [name for name in sizes if folder_wanted == "/" or name.startswith(folder_wanted)]
    taken = {*named, *wanted_names(inside)}
    files = [Input(folder, name, sizes[name]) for name in taken]
    return files, [Input(folder, name, sizes[name]) for name in inside if name not in taken]


def kind_of(name):
    """What a file is read as: a suffix, compression aside; None where it is not read."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix in BINARY:
        return BINARY[suffix]
    kind = os.path.splitext(stem)[1] if suffix in CODECS else suffix
    return kind if kind in TEXT else None


def seen_kind(stream):
    """What the first bytes of a file say that it is; None where they say nothing."""
    head = stream.read(PIECE)
    stream.seek(0)
    seen = next((seen for magic, seen in MAGIC.items() if head.startswith(magic)), None)
    return seen or ("binary" if b"\0" in head else None)


def what_to_type(file, seen):
    """About a file that is not read as it is named; seen: its kind by its first bytes."""
    folder, name, path = file.folder, file.name, file.path
    here, suffix = shlex.quote(path), os.path.splitext(name.lower())[1]
    for archive, module in ARCHIVES.items():
        if re.search(rf"\{archive}(\.\w+)?$", name.lower()):
            files = shlex.quote(path + ".files")
            return (f"it holds files; type: python -m {module} -e {here} {files} "
                    f"&& python -m dev.prepare convert {files}")
    if seen == "UTF-16":
        utf8 = shlex.quote(os.path.join(folder, f"utf8-{os.path.basename(name)}"))
        return f"it is UTF-16; type: iconv -f UTF-16 -t UTF-8 {here} > {utf8}"
    if seen in KINDS or seen in CODECS:
        return f"by its first bytes it is {seen}; type: mv {here} {shlex.quote(path + seen)}"
    if seen:
        return f"it is {seen}; {MAKE_JSONL}"
    if suffix in CODECS:
        return f"by its first bytes it is no {suffix}; type: mv {here} {shlex.quote(path[:-len(suffix)])}"
    return f"if it is plain text, type: mv {here} {shlex.quote(path + '.txt')} (of other kinds {MAKE_JSONL})"


def documents_of(file, text_key, cut_bytes=None):
    """(where, UTF-8 bytes, None) of each document of a file, or (where, None, what is wrong with it)."""
    kind, suffix, where = kind_of(file.name), os.path.splitext(file.name.lower())[1], "its beginning"
    try:
        with open_file(*file) as stream:
            seen = seen_kind(stream)
            other = seen in MAGIC.values() and seen not in (kind, suffix)
            if other or (suffix in CODECS and not seen):
                yield "the file", None, f"{TORN}{what_to_type(file, seen)}"
                return
            for document in documents_in(kind, unpacked(stream, suffix), text_key, cut_bytes):
                where = document[0]
                yield document
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, csv.Error, UnicodeDecodeError) as error:
        why = not_utf8(error) if isinstance(error, UnicodeDecodeError) else one_line(error)
        yield (f"behind {where}", None,
               f"{TORN}{why}; the rest of its {file.size / 1e6:,.1f} MB is lost; get it whole")


def unpacked(stream, suffix):
    if suffix == ".xz":
        return lzma.LZMAFile(stream)
    # pyarrow's gzip gives 495 MB/s of JSON lines, Python's 353 (one core; builtin corpus, level 6).
    return pa.CompressedInputStream(stream, CODECS[suffix]) if suffix in CODECS else stream


def documents_in(kind, stream, text_key, cut_bytes):
    if kind == ".parquet":
        return parquet_documents(stream, text_key)
    if kind == ".arrow":
        return arrow_documents(stream, text_key)
    stream = io.BufferedReader(stream, PIECE)
    if kind in (".csv", ".tsv"):
        return csv_documents(stream, text_key, "," if kind == ".csv" else "\t")
    return text_documents(stream, cut_bytes) if kind in (".txt", ".md") else json_documents(stream, text_key)


def check_skippable(problem, message, skip_bad, skip_torn):
    if problem.startswith(TORN) and not skip_torn:
        raise ValueError(f"{message}, or keep what can be read with --skip_torn")
    if not problem.startswith(TORN) and not skip_bad:
        raise ValueError(f"{message}; mend it, or leave such documents out with --skip_bad")


def text_documents(stream, cut_bytes):
    """The file as one document, or in parts of at most cut_bytes, cut at blank lines, else at line ends."""
    data, problem = check_utf8(read_whole(stream))
    if problem or not cut_bytes:
        yield "the file", data and data.removeprefix(BOM_UTF8), problem
        return
    start = len(BOM_UTF8) if data.startswith(BOM_UTF8) else 0
    while start < len(data):
        stop = start + cut_bytes
        if stop < len(data):
            stop = next((at + len(mark) for mark in (b"\n\n", b"\n", b" ")
                         if (at := data.rfind(mark, start, stop - len(mark) + 1)) >= 0), stop)
            while stop > start + 1 and data[stop] & 0xC0 == 0x80:
                stop -= 1    # not in the middle of a character
        yield f"byte {start}", data[start:stop], None
        start = stop


def read_whole(stream):
    data = stream.read(LONGEST_DOCUMENT + 1)
    if len(data) > LONGEST_DOCUMENT:
        raise OSError(f"over {LONGEST_DOCUMENT >> 30} GB in one piece; make .jsonl of it, a document a line")
    return data


def json_documents(stream, text_key):
    """Documents of JSON lines, or of one JSON array, which is read whole."""
    if not stream.peek(64).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        for number, line in numbered_lines(stream):
            record, problem = parse_json(line)
            if not line.isspace():
                yield f"line {number}", *((None, problem) if problem else text_of(record, text_key))
        return
    records, problem = parse_json(read_whole(stream))
    if problem:
        yield "the file", None, f"{TORN}{problem}; all of it is lost; get it whole"
        return
    for number, record in enumerate(records):
        yield f"document {number}", *text_of(record, text_key)


def parse_json(data):
    try:
        return json.loads(data.decode("utf-8-sig")), None
    except UnicodeDecodeError as error:
        return None, not_utf8(error)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"


def numbered_lines(stream):
    """(number from 1, line); an error where one has no end."""
    for number in itertools.count(1):
        line = stream.readline(LONGEST_DOCUMENT)
        if len(line) == LONGEST_DOCUMENT and not line.endswith(b"\n"):
            raise OSError(f"line {number} has over {LONGEST_DOCUMENT >> 30} GB")
        if not line:
            return
        yield number, line.removeprefix(BOM_UTF8) if number == 1 else line


def csv_documents(stream, text_key, delimiter):
    csv.field_size_limit(LONGEST_DOCUMENT)
    lines = (line.decode() for _, line in numbered_lines(stream))
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    if text_key not in (rows.fieldnames or ()):
        advice = f"or a first line that names the columns, with {delimiter!r} between them"
        seen = str(rows.fieldnames)[:200]
        yield "line 1", None, f"no column {text_key!r}, only {seen}; add --text_key COLUMN, {advice}"
        return
    for row in rows:
        yield f"line {rows.line_num}", *text_of(row, text_key)


def parquet_documents(stream, text_key):
    parquet = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
    batches = parquet.iter_batches(ROW_GROUP_DOCUMENTS, columns=[text_key], use_threads=False)
    return column_documents(parquet.schema_arrow, batches, text_key)


def arrow_documents(stream, text_key):
    """Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    return column_documents(reader.schema, (batch.select([text_key]) for batch in batches), text_key)


def column_documents(schema, batches, text_key):
    usable = columns_of_text(schema)
    if text_key not in usable:
        columns = ", ".join(f"{field.name!r}: {field.type}" for field in schema)
        advice = f"add{text_key_flag(usable)}" if usable else MAKE_JSONL
        yield "the file", None, f"no string column {text_key!r}, only {columns}; {advice}"
        return
    row = 0
    for batch in batches:
        for text in batch.column(0).cast(pa.large_binary()).to_pylist():
            yield f"row {row}", *((None, f"{text_key!r} is null") if text is None else check_utf8(text))
            row += 1


def text_of(record, text_key):
    if not isinstance(record, dict):
        return None, f"no key {text_key!r}, only {type(record).__name__}; {MAKE_JSONL}"
    if text_key not in record:
        usable = [key for key, value in record.items() if isinstance(value, str)]
        advice = f"add{text_key_flag(usable)}" if usable else MAKE_JSONL
        return None, f"no key {text_key!r}, only keys {', '.join(map(repr, record))[:200]}; {advice}"
    if not isinstance(record[text_key], str):
        return None, f"{text_key!r} holds {type(record[text_key]).__name__}, not a string; {MAKE_JSONL}"
    try:
        return record[text_key].encode(), None
    except UnicodeEncodeError as error:    # a lone surrogate such as "\ud800"
        return None, f"{text_key!r} cannot be UTF-8 ({error.reason} at character {error.start})"


def check_utf8(data):
    try:
        data.decode()
        return data, None
    except UnicodeDecodeError as error:
        return None, not_utf8(error)


def not_utf8(error):
    return (f"not UTF-8 ({error.reason} at byte {error.start}); "
            "text of another encoding becomes it with: iconv -f LATIN1 -t UTF-8 OLD > NEW")


# ---------------------------------------------------------------------------------------------------------
# Tokenize: the same shards with token ids in place of text

def tokenize(data_dir: str, out: str, tokenizer_dir: str | None = None, threads: int | None = None,
             compression: str = "none", executor: Executor | None = None, at_once: int | None = None) -> int:
    """
    Write token shards of text shards: same names, row groups and rows. Returns how many tokens.

    Shards that are there already, of the same text and tokenizer, are kept: a stopped run goes on. With an
    executor, whose workers see these paths, each task is a shard, `at_once` of them; else one after another.
    """
    check_local(out)
    if os.path.realpath(out) == os.path.realpath(data_dir):
        raise ValueError(f"{out} is the folder of the text; name another with --out")
    shards = all_shards(data_dir)
    check_no_others(out, shards)
    progress, tokens = Progress(len(shards), "shards"), 0
    one = functools.partial(tokenize_shard, out=os.path.abspath(out), tokenizer=get_tokenizer(tokenizer_dir),
                            threads=threads or cores(), compression=compression)
    alone = ((shard, one(shard)) for shard in shards)
    for shard, n_tokens in in_order(executor, one, shards, at_once or cores()) if executor else alone:
        tokens += n_tokens
        progress.add(shard.size, 1)
    progress.close()
    write_index(out)
    return tokens


def tokenize_shard(shard, out, tokenizer, threads, compression):
    """Returns how many tokens the shard has."""
    path = os.path.join(out, shard.name)
    if shard.kind != "text":
        raise ValueError(f"{shard.path} holds tokens already; --data takes a folder of text shards")
    dtype, fingerprint, width = tokenizer.dtype, tokenizer.fingerprint(), tokenizer.dtype.itemsize
    if os.path.exists(path):
        old = open_shard(out, shard.name, File(os.path.getsize(path)))
        if (old.size, old.rows, old.dtype, old.fingerprint) != (shard.size, shard.rows, dtype, fingerprint):
            raise ValueError(f"{path} was made of other text or by another tokenizer; "
                             "name a new folder with --out, or remove this one")
        return sum(count_bytes(old.read(i)) for i in range(len(old.rows))) // width

    tokens = []
    def encode(row_group):
        ids = encode_array(shard.read(row_group), tokenizer)
        tokens.append(count_bytes(ids) // width)
        return ids

    made_of = {"nanoloader.dtype": dtype.name, "nanoloader.tokenizer": fingerprint,
               "nanoloader.text_size": str(shard.size)}
    remove(os.path.join(out, INDEX))    # of a folder that was whole: it comes back when all are there
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with ThreadPoolExecutor(threads) as pool:
        encoded = in_order(pool, encode, range(len(shard.rows)), 2 * threads)
        write_shard(path, (ids for _, ids in encoded), "tokens", made_of, compression)
    return sum(tokens)


def check_no_others(out, shards):
    if others := sorted(list_files(out)[0].keys() - {shard.name for shard in shards}):
        raise ValueError(f"{out} holds {others[0]}, which is not of this text; name a new folder with --out")


def encode_array(texts, tokenizer):
    """An array of text -> binary, the ids of each document, little-endian; a null stays null."""
    ids, bounds = tokenizer.encode_documents(texts.to_pylist())
    ids = np.ascontiguousarray(ids, tokenizer.dtype.newbyteorder("<"))
    if ids.nbytes >= 2**31:
        raise ValueError(f"a row group of {len(ids):,} tokens is too large; convert makes smaller ones")
    valid = np.packbits(texts.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
    buffers = [valid if texts.null_count else None, (bounds * ids.itemsize).astype(np.int32), ids]
    buffers = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers)


def count_bytes(array):
    return pc.sum(pc.binary_length(array)).as_py() or 0


# ---------------------------------------------------------------------------------------------------------
# Verify and stats

class Check(NamedTuple):
    """What was seen of one shard."""
    line: str = ""
    documents: int = 0
    nulls: int = 0
    problem: str = ""
    damaged: bool = False    # proven: what lies on this disk is not what was written


def verify(folder: str) -> bool:
    """Read every shard against every checksum there is and print a table; True where all is intact."""
    files, index = files_and_index(folder)
    names = sorted(files.keys() | (index["shards"].keys() if index else set()))
    check = functools.partial(check_shard, folder=folder, files=files, index=index, sums=read_sums(folder))
    print(f"{'shard':<22} {'documents':>11} {'row groups':>10} {'nulls':>7} {'MB':>9} {'on disk':>9}  check")
    checks, damaged = [], []
    with ThreadPoolExecutor(cores()) as pool:
        for name, seen in in_order(pool, check, names, 2 * cores()):
            if seen.damaged:
                damaged.append(join_name(folder, name))
            problem = f"{'DAMAGED' if seen.damaged else 'PROBLEM'}  {seen.problem}"
            print(f"{name:<22} {problem if seen.problem else seen.line}", flush=True)
            checks.append(seen)
    intact = [seen for seen in checks if not seen.problem]
    print(f"{folder}: {len(intact):,} of {len(names):,} shards intact, "
          f"{sum(seen.documents for seen in intact):,} documents, "
          f"{sum(seen.nulls for seen in intact):,} null (the loader counts and leaves them out)")
    if damaged:
        print(f"next: rm {shlex.join(damaged[:8])}{' ...' if damaged[8:] else ''}\n"
              "then what made them: python dataset.py -n N and tokenize go on, convert wants a new folder")
    return len(intact) == len(names)


def check_shard(name, folder, files, index, sums):
    if name not in files:
        return Check(problem="it is in index.json, but not there")
    size, checked_by = files[name].size, "pages' CRC-32 where there are"
    try:
        shard, nulls, n_bytes = open_shard(folder, name, files[name]), 0, 0
        for row_group in range(len(shard.rows)):
            array = shard.read(row_group)
            nulls, n_bytes = nulls + array.null_count, n_bytes + count_bytes(array)
        if read_footer(folder, name, size)[1]:
            checked_by = "documents' CRC-32"
        if name in sums:
            checked_by = f"SHA-256 and {checked_by}"
            if sha256_of(shard.path) != sums[name]:
                return Check(problem="its SHA-256 is not the one in SHA256SUMS", damaged=True)
    except OSError as error:
        return Check(problem=str(error).partition("; check it with")[0],
                     damaged=is_damage(error.__cause__) and "://" not in folder)
    expected = index and index["shards"].get(name)
    if index and (not expected or (expected["bytes"], expected["rows"]) != (size, shard.rows)):
        return Check(problem=f"it is not what index.json says; if it is right, type: {index_command(folder)}")
    documents = sum(shard.rows)
    return Check(f"{documents:>11,} {len(shard.rows):>10,} {nulls:>7,} {n_bytes / 1e6:>9,.1f} "
                 f"{size / 1e6:>9,.1f}  {checked_by}", documents, nulls)


def is_damage(cause):
    """The bytes are wrong: no matter of permissions, a disk, another column, encryption or memory."""
    sound = isinstance(cause, MemoryError) or "crypt" in str(cause)
    return cause is not None and getattr(cause, "errno", None) is None and not sound


def read_sums(folder):
    """{name: SHA-256} of what was downloaded."""
    sums = {}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "SHA256SUMS")) as file:
        for number, line in enumerate(file, 1):
            if not (match := re.fullmatch(r"([0-9a-f]{64})  (.+)\n", line)):
                raise ValueError(f"{file.name}, line {number}: expected `SHA-256  name`, saw {line[:80]!r}; "
                                 "take the line out (that shard is then checked by what it holds itself)")
            sums[match[2]] = match[1]
    return sums


def stats(folder: str, tokenizer_dir: str | None = None) -> None:
    """Print what is in a folder: documents, bytes, tokens, lengths, row groups, lanes."""
    lanes, lengths = [], []
    print(folder)
    print(f"{'split':<6} {'shards':>7} {'row groups':>11} {'documents':>13} {'nulls':>7} {'MB':>11}  tokens")
    for split in ("train", "val"):
        shards = list_shards(folder, split)
        found, nulls = lengths_of(shards)
        groups = sorted(len(shard.rows) for shard in shards)
        print(f"{split:<6} {len(shards):>7,} {sum(groups):>11,} {len(found) + nulls:>13,} {nulls:>7,} "
              f"{found.sum() / 1e6:>11,.1f}  {count_tokens(shards, int(found.sum()), tokenizer_dir)}")
        lanes.append(f"{split:<6} {groups[0]:,} to {groups[-1]:,} row groups a shard; at most {len(found):,} "
                     f"lanes, and up to {sum(groups):,} that share no row group")
        lengths.append(found)
    print("\n".join(lanes))
    print_histogram(np.concatenate(lengths), "bytes of text" if shards[0].kind == "text" else "bytes of ids")


def lengths_of(shards):
    """(bytes of every document that is not null, how many are null)"""
    def read(place):
        array = place[0].read(place[1])
        return pc.binary_length(array.drop_null()).to_numpy().astype(np.int64), array.null_count

    places = ((shard, row_group) for shard in shards for row_group in range(len(shard.rows)))
    with ThreadPoolExecutor(cores()) as pool:
        found = [result for _, result in in_order(pool, read, places, 2 * cores())]
    lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for lengths, _ in found)])
    return lengths, sum(nulls for _, nulls in found)


def count_tokens(shards, size, tokenizer_dir):
    """Exact for token shards; else from 16 row groups spread over them, where there is a tokenizer."""
    if shards[0].kind == "tokens":
        return f"{size // shards[0].dtype.itemsize:,}"
    try:
        tokenizer = get_tokenizer(tokenizer_dir)
    except (OSError, ValueError):
        return "unknown: no tokenizer yet (python tokenizer.py)"
    places = [(shard, row_group) for shard in shards for row_group in range(len(shard.rows))]
    tokens = seen = 0
    for shard, row_group in places[:: -(-len(places) // 16)]:
        sample = shard.read(row_group)
        seen += count_bytes(sample)
        tokens += len(tokenizer.encode_documents(sample.to_pylist())[0])
    return f"about {tokens * size / max(1, seen):,.0f}"


def print_histogram(lengths, unit):
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts, sizes = np.bincount(powers), np.bincount(powers, lengths)
    print(f"\n{unit + ', up to':<20} {'documents':>12} {'of all bytes':>13}")
    for power in np.arange(powers.min(initial=len(counts)), len(counts)):
        bar = "#" * round(40 * counts[power] / counts.max())
        share = sizes[power] / max(1, sizes.sum())
        print(f"{2**power:<20,} {counts[power]:>12,} {share:>13.1%}  {bar}".rstrip())
    if len(lengths):
        print(f"mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, longest {lengths.max():,}")


# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    flags = make_parser().parse_args(argv)
    with errors_in_one_line("stopped; the same command starts again"):
        flags.run(flags)


def make_parser():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m dev.prepare", description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run, text):
        added = commands.add_parser(run.__name__.removeprefix("run_"), help=text, description=text)
        added.set_defaults(run=run)
        return added.add_argument

    add = command(run_convert, f"make shards of your own files: {' '.join(KINDS)}")
    add("inputs", nargs="+", metavar="IN", help="files, folders, globs in quotes, s3:// or gs:// URIs")
    add("--text_key", default="text", help="JSON key or column that holds the text (default text)")
    add("--out", help="folder, new or empty (default: where train.py looks)")
    add("--skip_bad", action="store_true", help="leave out bad documents and count them")
    add("--skip_torn", action="store_true", help="keep what can be read of files that were cut or damaged")
    add("--cut_bytes", type=int, help="cut .txt and .md files at blank lines into documents of so many bytes")
    add("--seed", type=int, default=0, help="of the shuffle (default 0)")
    add("-w", "--num_workers", type=int, help="processes (default: one a core)")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster whose workers see the same files")
    add = command(run_tokenize, "write the same shards with tokens in place of text")
    add("--data", help="folder or URI of text shards (default: what train.py takes)")
    add("--out", required=True, help="folder for the token shards")
    add("--tokenizer", help="folder of the tokenizer")
    add("--compression", default="none", choices=("none", "zstd"), help="zstd: half the size, 1/4 the speed")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster whose workers see the same files")
    add = command(run_verify, "check every shard against all its checksums")
    add("--data", help="folder or URI (default: what train.py takes)")
    add = command(run_stats, "count documents, bytes, tokens, lengths, row groups, lanes")
    add("--data", help="folder or URI (default: what train.py takes)")
    add("--tokenizer", help="folder of the tokenizer")
    return parser


def run_convert(flags):
    for name in ("cut_bytes", "num_workers"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected at least 1")
    out = flags.out or default_data_dir()
    with dask_executor(flags.dask) as (executor, threads):
        made = convert(flags.inputs, out, flags.text_key, flags.skip_bad, flags.skip_torn, flags.cut_bytes,
                       flags.seed, flags.num_workers or threads, executor=executor)
    print(f"{made['files']:,} files -> {made['documents']:,} documents, {made['bytes'] / 1e6:,.1f} MB, "
          f"in {made['shards']:,} shards, the last for val, in {out}")
    if made["others"]:
        print(f"{len(made['others']):,} other files in these folders were left out: "
              f"{made['others'][0].path} ... (of other kinds, hidden, or of a test or val split)")
    if made["bad"]:
        print("\n  ".join([f"{made['bad']:,} bad documents or ends of files were left out; the first:",
                           *made["shown"]]))


def run_tokenize(flags):
    with dask_executor(flags.dask) as (executor, at_once):
        tokens = tokenize(find_data(flags.data), flags.out, flags.tokenizer, 1 if executor else None,
                          flags.compression, executor, at_once)
    print(f"{tokens:,} tokens in {flags.out}")


def run_verify(flags):
    if not verify(find_data(flags.data)):
        sys.exit(1)


def run_stats(flags):
    stats(find_data(flags.data), flags.tokenizer)


if __name__ == "__main__":
    main()
