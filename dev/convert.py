"""
Convert text or chats to shards: parquet files that the loader reads.

    python -m dev.convert my_folder --out my_shards                   # every file of a known type
    python -m dev.convert 'my/**/*.jsonl.gz' --text_key data.content  # {"data": {"content": ...}}
    python -m dev.convert book.txt --cut_bytes 2000                   # documents of up to 2 kB
    python -m dev.convert chats.jsonl --out my_chats                  # messages, prompt and answer

It shuffles the documents, sets about 1% of them aside for validation, and makes sure that no
validation text is also in the training data. Files that are named for a split (train-*, val-*)
keep it; test-* files are left out. A report says what was dropped, skipped or ignored.

The shuffle takes little memory for any amount of text: 197 MB of JSON lines take 4.0 s of one core,
and 380 MB of memory (2 cores, 2026-11).
"""

# In this order: convert; the shuffle; records of files; which files; the folder and processes; the
# command. dev/records.py makes documents of records.

import sys

if __name__ == "__main__" and not __package__:
    sys.exit("usage: python -m dev.convert FILES --out FOLDER, typed where dataset.py is")

import argparse
import bz2
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import multiprocessing
import os
import re
import shutil
import signal
import threading
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from fsspec.utils import glob_translate
from pyarrow import feather, ipc, parquet
from pyarrow.dataset import InMemoryDataset
from tqdm import tqdm

import dataset
from dataset import UserError, at_least, cores, errors_in_one_line, printable
from dev.records import (
    NOT_READ,
    by_name,
    dict_of_pairs,
    is_needed,
    load_json,
    make_document,
)

RUN_BYTES = 32 << 20
TASKS = 256                        # at most: small files share a run
SHARD_BYTES = 300_000_000          # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024

# --------------------------------------------------------------------------------------------------
# Convert: files -> sorted runs -> shards
#
# A document's key is a hash of its position in the inputs. The shards hold all documents in the
# order of their keys: a shuffle that is the same for any number of processes. First, processes
# parse the files into runs on disk, RUN_BYTES of text each, sorted by key. All runs are one table,
# of which memory holds only the keys and a hash of each text (8 bytes each). They decide which rows
# a shard has. Then each shard collects its rows.

def convert(flags):
    """
    Write the documents of flags.inputs as shards; the last one is val. `out` appears atomically,
    once complete.

    UserError names file and line of the first bad document; with skip_bad, bad documents and
    unreadable files are counted instead.
    """
    out = os.path.realpath(flags.out)    # not the link, its target
    report = {}    # {what was read, dropped, skipped or ignored: [count, first example]}
    files = find_files(flags, report)
    paths = [path for path, *_ in files if os.path.exists(path)]    # a link may be broken
    total = sum(map(os.path.getsize, paths))
    # While a process starts, another one converts 100 MB.
    n_processes = min(flags.num_workers or total // 100_000_000 + 1, cores())
    n_tasks = min(TASKS, len(files))
    tasks = [files[i::n_tasks] for i in range(n_tasks)]
    with workshop(out, n_processes) as (building, run):
        scatter = functools.partial(scatter_files, building, flags, total)
        for part in tqdm(run(scatter, tasks), "read", n_tasks, delay=1):
            for what, (n, example) in part.items():
                count(report, what, example, n)
        for what, (n, example) in report.items():
            print(printable(f"{what}: {n:,}, such as {example}"))
        kinds = {"text", "messages"} & report.keys()    # the column of the documents in a shard
        if len(kinds) != 1:
            raise UserError(
                "expected documents, all text or all conversations; what was read or skipped is "
                "listed above (train.py can mix folders: --data TEXTS:0.7 CHATS:0.3)")
        shards = divide(building, flags.drop_copies)
        gather = functools.partial(gather_shard, building, kinds.pop())
        written = run(gather, range(len(shards)), shards)
        list(tqdm(written, "write", len(shards), delay=1))
        dataset.write_index(f"{building}/shards")
        os.rename(f"{building}/shards", out)
    print(f"files: {len(files):,} -> {sum(map(len, shards)):,} documents in {len(shards):,} shards "
          f"of {out}, the last for val ({len(shards[-1]):,})")

def count(report, what, example, n=1):
    report.setdefault(what, [0, example])[0] += n

# --------------------------------------------------------------------------------------------------
# The shuffle

KEY, TEXT_HASH, DOCUMENT = "nanoloader.key", "nanoloader.hash", "nanoloader.document"    # of a run
SPACES = bytes.maketrans(b"\n\t", b"  ")    # copies may break lines elsewhere

def scatter_files(building, flags, total, files):
    """Write the good documents of some files as sorted runs. Returns a report."""
    report, rows, n_bytes = {}, [], 0
    for file in files:
        for size, row in rows_of_file(file, flags, total, report):
            rows.append(row)
            n_bytes += size
            if n_bytes >= RUN_BYTES:
                write_run(building, rows)
                rows, n_bytes = [], 0
    if rows:
        write_run(building, rows)
    return report

def rows_of_file(file, flags, total, report):
    """
    (bytes, (key, hash of the text, text, kept values)) of each good document. Empty and, with
    skip_bad, bad ones are counted in the report. Without it, the first bad one is a UserError.
    """
    path, read, is_val, number = file
    index = -1

    def say(what):
        count(report, what, place)

    for index, (what, place, record) in enumerate(records_of(path, read, flags)):
        is_row = read in (read_csv, read_tsv) and isinstance(record, dict)
        if is_row and re.search(ODD_FIELDS, "\0".join(["", *record.values(), ""])):
            say(ODD_LINES)
        try:
            text, kept = make_document(record, flags, say)
        except Exception as error:    # bad records may raise any
            problem = f": {error}{ADVICE.get(type(error), ADVICE.get(what, ''))}"
            if not flags.skip_bad:
                raise UserError(f"{place}{problem} (to skip {what}: --skip_bad)") from error
            count(report, f"skipped {what}", place + problem)
            continue
        if text:
            key = hash_of(b"0 %d %d" % (number, index)) + is_val
            words = text.translate(SPACES, b"\r").strip()
            # Val takes the largest hashes. The shift keeps a text that is most of the corpus out.
            text_hash = hash_of(words) >> min(20, 20 * len(words) // total)
            yield len(text) + len(str(kept)), (key, text_hash, text, kept)
    if index < 0:
        count(report, "files without documents", path)
    if (flags.split_at or flags.cut_bytes) and (read is not read_text or index == 0):
        count(report, "files that --split_at or --cut_bytes does not divide (they divide plain "
              "text; --as_text '*.SUFFIX' reads others as such)", path)

def hash_of(data):
    """63 bits, which fit Arrow's int64. The last bit is 0: in a key, 1 means val."""
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "big") // 4 * 2

# What to do, in addition to what an error says: by its type, or for the rest of a file
NO_UTF8 = (
    "; expected UTF-8; if only this place is damaged: --skip_bad; for other encodings and half "
    "surrogate pairs, see Damaged and foreign files in dev/recipes/forms.md")
ADVICE = {
    UserError: "",    # has its own
    UnicodeDecodeError: NO_UTF8,
    UnicodeEncodeError: NO_UTF8,    # in CSV, byte e9 is shown as \udce9
    "the rest of bad files":
        "; if it is not damaged, and of the kind that its name says (`file OLD` shows it), see "
        "Damaged and foreign files in dev/recipes/forms.md",
    csv.Error:
        '; expected quotes around a text, and "" for a quote in it; if backslashes escape quotes, '
        "see Other forms of data in dev/recipes/forms.md; if quotes mean nothing, name it .tsv",
    json.JSONDecodeError:
        "; expected JSON: a document in each line, one array in a .json, or of a list of texts, a "
        "message in each; copy a file again that was cut off; or see dev/recipes/forms.md"}

def write_run(building, rows):
    keys, hashes, texts, kept = zip(*rows, strict=True)
    columns = {
        KEY: keys, TEXT_HASH: hashes,
        DOCUMENT: pa.array(texts, pa.large_string())}
    columns |= {name: [values[name] for values in kept] for name in kept[0]}
    feather.write_feather(
        pa.table(columns).sort_by(KEY), f"{building}/runs/{min(keys)}", "uncompressed")

def open_runs(building):
    """All runs as one memory-mapped table."""
    tables = [
        feather.read_table(run, memory_map=True)
        for run in sorted(Path(building, "runs").iterdir())]
    return pa.concat_tables(tables, promote_options="permissive")

def divide(building, drop_copies):
    """
    The rows of each shard in the table of all runs, in the order of their keys. The last shard is
    val, and shares no text with train. It has the texts of the files for val, if there are any.
    Otherwise, it has 1% of the texts, those with the largest hashes (at least 64 of them, or a
    tenth of all if that is fewer).
    """
    table = open_runs(building)
    if pa.null() in table.schema.types:
        raise UserError("--keep: no document has a value under one of these names (that of a "
                        "folder, as in lang=en, is no column)")
    # At least 4, so that cores can share a small corpus
    n_shards = max(4, round(table[DOCUMENT].nbytes / SHARD_BYTES))
    keys, hashes = table[KEY].to_numpy(), table[TEXT_HASH].to_numpy()
    rows = keys.argsort()
    texts, first, copies = np.unique(
        hashes[rows], return_index=True, return_counts=True)
    if len(texts) < len(rows):
        print(f"{len(rows) - len(texts):,} of {len(rows):,} documents repeat the text of another "
              "one; no text is in both train and val (to keep only one of each: --drop_copies)")
    in_val = hashes[keys % 2 == 1]
    if in_val.size == 0:
        rare = texts[copies <= np.median(copies)]    # a very frequent text would be all of val
        few = min(64, len(texts) // 10)
        in_val = rare[-max(1, few, len(texts) // 100):]
    if drop_copies:
        rows = rows[np.sort(first)]
    is_val = np.isin(hashes[rows], in_val)
    if is_val.all():
        raise UserError(
            f"no text is left for train; train and val need one each, saw {len(texts):,} without "
            "copies. To divide plain text: --split_at '<|endoftext|>', --split_at '\\n' for lines, "
            "or --cut_bytes 2000")
    train = np.array_split(rows[~is_val], n_shards - 1)
    return [*filter(len, train), rows[is_val]]

def gather_shard(building, kind, number, rows):
    """Write these rows of all runs, in row groups."""
    table = open_runs(building).drop_columns([KEY, TEXT_HASH])
    # Unlike a table's, its take() copies no other rows.
    documents = InMemoryDataset(table.rename_columns({DOCUMENT: kind}))
    n_groups = max(16, len(rows) // ROW_GROUP_DOCUMENTS)    # that readers can share
    groups = filter(len, np.array_split(rows, n_groups))
    dataset.write_shard(
        f"{building}/shards/shard_{number:05d}.parquet", map(documents.take, groups), kind)

# --------------------------------------------------------------------------------------------------
# Records of a file: readers yield (where, record) of each line, row or text. A record is a dict,
# JSON as bytes, or an error.

def records_of(path, read, flags):
    """(what is bad if the record is, place, record) of each. An error of the file is the last."""
    rest = f"{path}, unreadable"
    try:
        for where, record in read(path, flags):
            yield "bad documents", f"{path}, {where}", record
            rest = f"{path}, unreadable after {where}"
    except Exception as error:    # a damaged file may raise any
        yield "the rest of bad files", rest, error

# Python's modules, or Arrow's names: Arrow refuses bz2's empty members, and zeros after gzip's.
CODECS = by_name({
    gzip: ".gz .gzip", bz2: ".bz2", lzma: ".xz", "zstd": ".zst .zstd", "lz4": ".lz4"})

def open_stream(path):
    """Decompressed, by the file's name."""
    codec = CODECS.get(Path(path).suffix.lower())
    if hasattr(codec, "open"):
        stream = codec.open(path)
        # Or it would end before a damaged member. A private name: a test fails if it has another.
        stream._buffer.raw._trailing_error = ()
    else:    # a cut file loses less than this buffer
        file = pa.OSFile(os.fsencode(path))    # its name may be no UTF-8
        stream = io.BufferedReader(pa.input_stream(file, compression=codec), 1 << 10)
    if stream.peek(99).startswith(b"version https://git-lfs"):
        raise UserError("it is a Git LFS pointer, not the file; to get that: git lfs pull")
    return stream

def read_lines(path, flags):
    """A record of JSON in each line."""
    with open_stream(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.isspace():
                yield f"line {number}", line

def read_json(path, flags):
    """One array of records, or a record in each line."""
    with open_stream(path) as stream:
        if re.match(rb"(\xef\xbb\xbf)?\s*\[", stream.peek(100)):    # after a BOM, if any
            for number, record in enumerate(load_json(stream.read().decode("utf-8-sig"))):
                yield f"document {number}", record
        else:
            yield from read_lines(path, flags)

def read_csv(path, flags, delimiters=",\t;|", quoting=csv.QUOTE_MINIMAL):
    """What divides columns is the one of the delimiters that is most frequent in the header."""
    csv.field_size_limit(sys.maxsize)
    with open_stream(path) as stream:
        # Bytes that are no UTF-8 become surrogates, which cannot be encoded.
        lines = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        lines = enumerate(lines, 1)
        not_blank = (line for line in lines if line[1].strip())
        header = next(not_blank, (1, ""))
        delimiter = max(delimiters, key=header[1].count)
        rows = rows_of_csv(itertools.chain([header], lines), delimiter, quoting)
        _, titles = next(rows, (1, []))
        if isinstance(titles, csv.Error):
            raise titles
        names = [(name or f"column {i}", i) for i, name in enumerate(titles, 1)]
        names = dict_of_pairs(names)    # raises if a name is there twice
        for number, record in rows:
            if isinstance(record, list):
                is_joined = {*record} == {*titles} or record[0].startswith("\ufeff")
                if len(record) == len(names) and not is_joined:
                    record = dict(zip(names, record, strict=True))
                else:
                    record = UserError(
                        f"expected {len(names)} fields, not the names of line 1 again; saw "
                        f"{record!r:.200}; quote texts with {delimiter!r} (name such a .tsv .csv); "
                        "if it ends each line, add it to the first; divide files that were joined")
            yield f"line {number}", record

# What in a field may show that a table has other rules: \0 is around each field. re is fast if each
# choice begins with a character.
ODD_FIELDS = r"""(?x) \0\s*b?["'] | "\0 | '\0 | \\\0 | \0\\N\0 | \\[nt]"""
ODD_LINES = (
    "lines with a quote or backslash at an end of a field, or with \\N, \\n or \\t (if they are no "
    "text, see Other forms of data in dev/recipes/forms.md; name a .tsv with quotes .csv)")

def rows_of_csv(lines, delimiter, quoting):
    """
    (the number of its first line, fields or an error) of each row. A bad quote costs its line, not
    all up to the next quote: the lines between them are read again.
    """
    taken, again = [], []    # the lines of a row; those to read again, the last one first

    def take():
        while line := again.pop() if again else next(lines, None):
            taken.append(line)
            yield line[1]

    while True:
        try:
            rows = csv.reader(take(), delimiter=delimiter, quoting=quoting, strict=True)
            for fields in rows:
                if fields:    # a blank line has none
                    yield taken[0][0], fields
                taken.clear()
            return
        except csv.Error as error:
            yield taken[0][0], error
            again += taken[:0:-1]    # all lines but the first, the next one last
            taken.clear()

def read_tsv(path, flags):
    return read_csv(path, flags, "\t", csv.QUOTE_NONE)

# Greedy: a piece has at most SIZE bytes, and ends where the first of these lets it
CUT = rb"""(?sx)
    .{1,%(SIZE)d} (?: (?<=\n\n | \r\r) | (?<=\n\r\n) | \Z )    # after a blank line, or at the end
    | .{1,%(SIZE)d} (?: (?<=\n) | (?<=\r) (?!\n) )               # else after the last line
    | .{1,%(SIZE)d} (?<=[ ])                                     # else after the last word
    | .{1,%(SIZE)d} (?![\x80-\xbf])                              # else after the last character
    | .                                                          # else after a byte
    | ^$                                                         # an empty file: one document
"""

def read_text(path, flags):
    """
    The documents between the marks of split_at that are more than white space, in pieces of about
    cut_bytes, as CUT says.
    """
    pattern = CUT % {b"SIZE": flags.cut_bytes or 1 << 30}
    with open_stream(path) as stream:
        text = stream.read()
    documents = re.split(flags.split_at, text) if flags.split_at else [text]
    parts = (
        part[0] for document in documents if not document.isspace()
        for part in re.finditer(pattern, document.removeprefix(b"\xef\xbb\xbf")))
    for number, part in enumerate(parts):
        try:
            record = {flags.text_key or "text": part.decode()}
        except UnicodeDecodeError as error:
            record = error
        yield f"text {number}", record

def read_table(path, flags):
    """Parquet, Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    data = pa.memory_map(os.fsencode(path)).read_buffer()
    stream = pa.BufferReader(data)
    # Of joined files, Arrow reads one, or the rows of one as those of another
    is_joined = re.search(rb"PAR1PAR1\x15|ARROW1ARROW1\0\0", data)
    if data[:4] == b"PAR1":
        file = parquet.ParquetFile(
            stream, page_checksum_verification=True, arrow_extensions_enabled=True)
        batches = file.iter_batches(ROW_GROUP_DOCUMENTS, use_threads=False)
    elif data[:6] == b"ARROW1":
        batches = ipc.open_file(stream).read_all().to_batches(ROW_GROUP_DOCUMENTS)
    elif data[-8:] == b"\xff\xff\xff\xff\0\0\0\0":    # Arrow reads a stream without its end, too
        batches = ipc.open_stream(stream).read_all().to_batches(ROW_GROUP_DOCUMENTS)
        is_joined = stream.read(1)
    else:
        raise ValueError(
            "it is neither parquet nor Arrow (is it a Git LFS pointer?), or its end is missing, or "
            "it is of Feather 1; write or copy it again")
    if is_joined:
        raise UserError("it is several files, joined into one; use the files themselves")
    rows = (row for batch in batches for row in read_rows(batch, flags))
    for number, row in enumerate(rows):
        yield f"row {number}", row

def read_rows(batch, flags):
    """
    Its records. A bad value costs its row. Columns that are not needed become NOT_READ: Python may
    have no type for their values.
    """
    unread = dict.fromkeys(batch.schema.names, NOT_READ)
    needed = batch.select([name for name in unread if is_needed(name, flags)])
    try:
        rows = needed.to_pylist(maps_as_pydicts="strict")
        rows = decode(rows, pa.list_(pa.struct(needed.schema)))
    except Exception as error:
        if len(batch) == 1:
            return [error]
        half = len(batch) // 2
        return read_rows(batch[:half], flags) + read_rows(batch[half:], flags)
    return [unread | row for row in rows]

def decode(value, kind):
    """
    Parse values of the type JSON (DuckDB's, and Json() of datasets), and decode texts that a
    program wrote as bytes, also inside lists and structs.
    """
    match kind, value:
        case pa.JsonType(), str():
            return load_json(value)
        case _, bytes():
            return value.decode()
        case _, list():
            return [decode(item, kind.value_type) for item in value]
        case pa.StructType(), dict():
            return {field.name: decode(value[field.name], field.type) for field in kind}
    return value

# Compressed text: .jsonl.gz, .txt.zst and so on
READERS = by_name({
    read_lines: ".jsonl .ndjson",
    read_json: ".json",
    read_csv: ".csv",
    read_tsv: ".tsv",
    read_text: ".txt .md",
    read_table: ".parquet .parq .pq .arrow .feather"})
SUFFIXES = " ".join(READERS)

# --------------------------------------------------------------------------------------------------
# Which files

# Not documents; most are Hugging Face's, whose map writes caches
ABOUT_DATA = re.compile(
    r"(?i).*/((README|LICENSE)\.(md|txt)|(index|config|dataset_(infos?|dict)|state)\.json"
    r"|cache-[^/]*\.arrow)")

def find_files(flags, report):
    """[(path, reader, is it for val?, number), ...], each file once, in the order of paths."""
    names = {}    # of files, below a folder that was named
    for given in sorted(flags.inputs, key=len):    # in/_raw after in
        names |= expand(given)
    found = {}
    for path in sorted(names):
        read = choose_reader(path, names[path], flags.as_text)
        if callable(read):
            found.setdefault(os.path.realpath(path), (path, read))    # skips links to files
        else:
            count(report, f"ignored files, {read}", path)
    readers = dict(found.values())
    folder = os.path.commonpath(map(os.path.dirname, names))
    names = {path: path.removeprefix(folder) for path in readers}
    splits = dataset.splits_of(names, must_have=not flags.as_text)
    is_split = "train" in splits
    if None in splits:    # code and notes are named for other things: train.py, testing.md
        is_split = read_text not in readers.values()
    use = "their split; test is not read" if is_split else "read like all others"
    files = []
    for path, split in zip(names, splits, strict=True):
        if split:
            count(report, f"files named for {split} ({use})", path)
        if not is_split or split != "test":
            files.append((path, readers[path], is_split and split == "val", len(files)))
    return files

def expand(given):
    """
    {path: its name below a folder that was named} of a file, of all in a folder, or of all files
    and folders that a glob matches. What was named itself is "".
    """
    before, is_recursive, _ = given.partition("**/")
    paths = [given] if os.path.exists(given) else glob.glob(before or ".")
    files = {}
    for path in map(os.path.abspath, paths):
        below = dataset.list_local(path, suffix=re.compile(""))
        files |= {f"{path}/{name}": name for name, *_ in below} or {path: ""}
    if is_recursive:    # Python's glob would follow links to folders above, forever
        matches = re.compile(glob_translate(os.path.abspath(given))).match
        files = {path: name for path, name in files.items() if matches(path)}
    if not files:
        raise UserError(
            f"{given} does not exist or has no files; expected a file, a folder, or a glob in "
            "quotes: 'my/**/*.jsonl' (in a glob, write [[] for a bracket)")
    return files

def choose_reader(path, name, as_text):
    """The function that reads a file, or as a text, why it is ignored. name: see expand"""
    if as_text:
        return read_text if any(map(Path(path).match, as_text)) else "not named by --as_text"
    if ABOUT_DATA.fullmatch(path):
        return "about the data (also if they list splits), or caches of datasets' map"
    stem, suffix = os.path.splitext(path.lower())
    if suffix in CODECS:
        _, suffix = os.path.splitext(stem)
    read = READERS.get(
        suffix, f"of other kinds (expected {SUFFIXES}, and {' '.join(CODECS)} after those of text; "
        "to read plain text: --as_text '*.SUFFIX'; rename JSON lines to .jsonl; unpack archives)")
    if dataset.SHARD_SUFFIX.search(path):    # also what is packed, which is an error
        read = read_table
    if dataset.HIDDEN.search(name):
        return "hidden, such as Spark's _temporary (to read them: name their folder)"
    return read

# --------------------------------------------------------------------------------------------------
# The folder that becomes `out`, and processes

@contextlib.contextmanager
def workshop(out, n):
    """
    Yields (a hidden folder next to `out`, a map over n processes). Removes both at the end.
    OSError if `out` has files.
    """
    if os.path.exists(out):
        os.rmdir(out)    # what cannot be removed cannot be replaced: a mount point, too
    building = f"{os.path.dirname(out)}/.{os.path.basename(out)}.convert"
    os.makedirs(f"{building}/runs")    # fails if another convert has it, or was killed
    pool = None
    try:
        if n > 1:
            # pyarrow's threads do not survive a fork
            pool = ProcessPoolExecutor(n, multiprocessing.get_context("spawn"), start_process)
        yield building, pool.map if pool else map
    except BrokenExecutor as error:
        raise UserError("a worker process was killed; if memory ran out, use -w 1") from error
    except (pa.ArrowException, OverflowError) as error:    # only values to keep raise these
        raise UserError(
            f"--keep: {error}; expected values of one type, and whole numbers below 2 ** 63; write "
            "others as texts (older versions of jq round them)") from error
    finally:
        if pool:
            shutil.rmtree(building, ignore_errors=True)    # so that processes end soon
            pool.shutdown(cancel_futures=True)
        shutil.rmtree(building, ignore_errors=True)

def start_process():
    """Ctrl-C ends a process of ours at once, and so does our own end."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=wait, daemon=True).start()

# --------------------------------------------------------------------------------------------------
# The command

def main(argv=None):
    parser = dataset.Parser(
        "python -m dev.convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = {"nargs": "+", "action": "extend", "default": []}
    add("inputs", nargs="+", type=dataset.expand_home,
        help=f"files, folders, globs in quotes: {SUFFIXES} (a .tsv has no quotes around texts)")
    add("--out", type=dataset.local_folder, default=dataset.default_data_dir(),
        help="new or empty folder (default: ~/.cache/nanoloader/base_data, where train.py looks)")
    add("--text_key",
        help="key or column that holds the text (default: text); write a.b for key b inside a")
    add("--messages_key", help="key or column that holds conversations, or their questions "
        "(default: messages, conversations, prompt, question, instruction)")
    add("--keep", **names, help="copy these columns, too (dates and decimals as texts)")
    add("--as_text", **names, help="read only these files, as plain text: '*.py'")
    add("--split_at", type=pattern_of_mark,
        help="split plain text into documents at each mark, such as '<|endoftext|>'")
    add("--cut_bytes", type=at_least(4),
        help="cut plain text into documents of up to this size, at blank lines (default: 1 GiB)")
    add("--drop_copies", action="store_true",
        help="keep one of the documents that have the same text")
    add("--ignore_keys", **names,
        help="drop these keys of messages, such as reasoning_content, and columns of these names")
    add("--skip_bad", action="store_true",
        help="skip and count bad documents and unreadable files, instead of stopping at the first")
    add("-w", "--num_workers", type=at_least(1),
        help="processes (default: at most one per core)")
    flags = parser.parse_args(argv)
    if {"text", "messages", "tokens"} & {*flags.keep}:
        parser.error("--keep: the names text, messages and tokens are reserved for the documents")
    with errors_in_one_line(
            f"if writing to {flags.out} failed: --out NEW_FOLDER; if a convert that was killed has "
            "left the folder, remove it"):
        convert(flags)

def pattern_of_mark(mark):
    """A pattern of marks and the line ends around them. \\n in a mark also matches \\r\\n."""
    if not mark:
        raise argparse.ArgumentTypeError("expected a text")
    mark = re.escape(mark.replace("\\n", "\n").encode())
    return rb"(?:[\r\n]{,99}%b)+[\r\n]*" % mark.replace(b"\\\n", rb"\r?\n")

if __name__ == "__main__":
    main()
