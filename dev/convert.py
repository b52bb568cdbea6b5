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
from codecs import BOM_UTF8
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.utils import glob_translate
from pyarrow import feather, ipc, parquet
from pyarrow.dataset import InMemoryDataset
from tqdm import tqdm

import dataset
from dataset import UserError, cores, errors_in_one_line, printable
from dev.records import (
    KEPT,
    NOT_READ,
    Remark,
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
    out = os.path.realpath(flags.out or dataset.default_data_dir())    # not the link, its target
    report = Report()
    files = find_files(flags, report)
    paths = [path for path, *_ in files if os.path.exists(path)]    # a link may be broken
    total = sum(map(os.path.getsize, paths))
    # While a process starts, another one converts 100 MB.
    n_processes = min(flags.num_workers or total // 100_000_000 + 1, cores())
    n_tasks = min(TASKS, len(files))
    tasks = [files[i::n_tasks] for i in range(n_tasks)]
    with errors_of_disk(out), workshop(out, n_processes) as (building, run):
        scatter = functools.partial(scatter_files, building, flags, total)
        for part in tqdm(run(scatter, tasks), "read", n_tasks, delay=1):
            for what, (n, example) in part.items():
                report.add(what, example, n)
        print(*report.lines(), sep="\n")
        kinds = {"text", "messages"} & report.keys()    # the column of the documents in a shard
        if not kinds:
            raise UserError("no documents; what was skipped, if anything, is listed above")
        if len(kinds) == 2:
            raise UserError(
                "the input mixes text and conversations; convert them separately (train.py can mix "
                "them: --data TEXTS:0.7 CHATS:0.3)")
        shards = divide(building, flags.drop_copies)
        gather = functools.partial(gather_shard, building, kinds.pop())
        written = run(gather, range(len(shards)), shards)
        list(tqdm(written, "write", len(shards), delay=1))
        dataset.write_index(f"{building}/shards")
        os.rename(f"{building}/shards", out)
    print(f"{counted(len(files), 'file')} -> {counted(sum(map(len, shards)), 'document')} in "
          f"{len(shards):,} shards, the last for val ({counted(len(shards[-1]), 'document')}), in "
          f"{out}")

class Report(dict):
    """{what was read, dropped, skipped or ignored: [how often, the first example]}"""
    def add(self, what, example, n=1):
        self.setdefault(what, [0, example])[0] += n

    def lines(self):
        return [printable(f"{what}: {n:,}, such as {example}")
                for what, (n, example) in self.items()]

# --------------------------------------------------------------------------------------------------
# The shuffle

KEY, TEXT_HASH, DOCUMENT = "nanoloader.key", "nanoloader.hash", "nanoloader.document"    # of a run
SPACES = bytes.maketrans(b"\n\t", b"  ")    # copies may end lines elsewhere

def scatter_files(building, flags, total, files):
    """Write the good documents of some files as sorted runs. Returns a Report."""
    report, tables, n_bytes = Report(), [], 0
    for file in files:
        rows = []
        for size, row in rows_of_file(file, flags, total, report):
            rows.append(row)
            n_bytes += size
            if n_bytes >= RUN_BYTES:
                write_run(building, [*tables, as_table(rows)])
                tables, rows, n_bytes = [], [], 0
        if rows:
            tables.append(as_table(rows))
    if tables:
        write_run(building, tables)
    return report

def rows_of_file(file, flags, total, report):
    """
    (bytes, (key, hash of the text, text, kept values)) of each good document. Empty and, with
    skip_bad, bad ones are counted in the report. Without it, the first bad one is a UserError.
    """
    path, read, is_val, number = file
    n_documents = 0

    def say(what, problem=""):
        report.add(what, f"{place}{problem}")

    for index, (what, place, record) in enumerate(records_of(path, read, flags)):
        try:
            text, kept = make_document(record, flags, say)
            size = len(text) + size_of(kept)
        except Exception as error:    # bad records may raise any
            problem = f": {error}{ADVICE.get(type(error), ADVICE.get(what, ''))}"
            if not flags.skip_bad:
                raise UserError(f"{place}{problem} (to skip {what}: --skip_bad)") from error
            say(f"skipped {what}", problem)
            continue
        if not text:
            continue
        n_documents += 1
        key = hash_of(b"0 %d %d" % (number, index)) + is_val
        words = text.translate(SPACES, b"\r").strip()
        # Val takes the largest hashes: hardly that of a text that is most of all text.
        text_hash = hash_of(words) >> min(20, 20 * len(words) // total)
        yield size, (key, text_hash, text, kept)
    if n_documents == 0:
        report.add("files without documents", path)
    is_whole = read is not read_text or index == 0
    if is_whole and (flags.split_at or flags.cut_bytes):
        report.add("files that --split_at or --cut_bytes does not divide (they divide plain text; "
                   "--as_text '*.SUFFIX' reads others as such)", path)

def size_of(kept):
    """About its bytes. Raises for half a surrogate pair, which no column can hold."""
    if isinstance(kept, dict):
        return len(json.dumps(kept, ensure_ascii=False).encode()) if kept else 0
    return kept.nbytes

def hash_of(data):
    """63 bits, a signed integer of Arrow. The last one is 0: in a key, 1 means val."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") // 4 * 2

# What to do, in addition to what an error says: by its type, or for the rest of a file
NO_UTF8 = (
    "; expected UTF-8; if only this place is damaged: --skip_bad; if all of the file is of another "
    "kind, which `file OLD` shows: name a compressed one so (.gz), or iconv -f WINDOWS-1252 (or "
    "-f UTF-16) -t UTF-8 OLD > NEW; of parquet: write the column again; half a surrogate pair "
    "(such as \\ud83d) is no text: remove it")
SPARK_SED = """sed 's/\\\\"/""/g' OLD > NEW.csv"""
ADVICE = {
    UserError: "",    # has its own
    UnicodeDecodeError: NO_UTF8,
    UnicodeEncodeError: NO_UTF8,    # in CSV, byte e9 is shown as \udce9
    "the rest of bad files":
        "; is it damaged, or of another kind than its name says (`file OLD` shows it)? If neither, "
        "decompress it first: gzip -d, bzip2 -d, xz -d, zstd -d --long=31. If a checksum (CRC) "
        "failed, texts before this place may be wrong, too: leave the whole file out",
    csv.Error:
        '; expected quotes around a text, and "" for a quote in it (if quotes mean nothing in a '
        f"file of tabs, name it .tsv; if backslashes escape quotes: {SPARK_SED})",
    json.JSONDecodeError:
        "; expected one JSON document per line, or one array in a .json. If the file was cut off, "
        "copy it again; if documents have several lines, or lines end as on old Macs: jq -c . OLD "
        "> NEW.jsonl (of arrays: jq -c '.[]'; if each line is an array, name it .jsonl; of texts "
        "with line ends as they are: see Other forms of data in dev/recipes/forms.md); if Python "
        "printed lines with single quotes: python -c 'import ast, json, sys; [print(json.dumps("
        "ast.literal_eval(line))) for line in sys.stdin]' < OLD > NEW.jsonl; if pandas printed "
        "them into a column: df.to_json(NEW, orient='records', lines=True)"}

def as_table(rows):
    """rows: of one file, so that their kept values have one type, its column's"""
    keys, hashes, texts, kept = zip(*rows, strict=True)
    ours = {KEY: keys, TEXT_HASH: hashes, DOCUMENT: pa.array(texts, pa.large_string())}
    is_arrow = isinstance(kept[0], pa.RecordBatch)
    theirs = pa.Table.from_batches(kept) if is_arrow else pa.Table.from_pylist(kept)
    return pa.table(ours | dict(zip(theirs.column_names, theirs.columns, strict=True)))

def write_run(building, tables):
    table = pa.concat_tables(tables, promote_options="permissive")
    feather.write_feather(table.sort_by(KEY), f"{building}/runs/{table[KEY][0]}", "uncompressed")

def open_runs(building):
    """All runs as one memory-mapped table."""
    runs = sorted(os.listdir(f"{building}/runs"))
    tables = [feather.read_table(f"{building}/runs/{run}", memory_map=True) for run in runs]
    return pa.concat_tables(tables, promote_options="permissive")

def divide(building, drop_copies):
    """
    The rows of each shard in the table of all runs, in the order of their keys. The last shard is
    val, and shares no text with train. It has the texts of the files for val, if there are any.
    Otherwise, it has 1% of the texts, those with the largest hashes (at least 64 of them, or a
    tenth of all if that is fewer).
    """
    table = open_runs(building)
    for field in table.schema:
        if field.type == pa.null():
            raise UserError(f"--keep: no document has a value under {field.name} (the name of a "
                            "folder, as in lang=en, is no column)")
    n_shards = max(4, round(table[DOCUMENT].nbytes / SHARD_BYTES))    # cores share a small corpus
    keys, hashes = table[KEY].to_numpy(), table[TEXT_HASH].to_numpy()
    rows = keys.argsort()
    texts, first, copies = np.unique(
        hashes[rows], return_index=True, return_counts=True)
    if len(texts) < len(rows):
        print(f"{len(rows) - len(texts):,} of {len(rows):,} documents repeat the text of another "
              "one, ignoring white space; none is in both train and val (to keep only one of each: "
              "--drop_copies)")
    in_val = hashes[keys % 2 == 1]
    if in_val.size == 0:
        rare = texts[copies <= np.median(copies)]    # a very frequent text would be all of val
        n_val = max(1, len(texts) // 100, min(64, len(texts) // 10))
        in_val = rare[-n_val:]
    if drop_copies:
        rows = rows[np.sort(first)]
    is_val = np.isin(hashes[rows], in_val)
    if is_val.all():
        raise UserError(
            f"no text is left for train: {counted(len(rows), 'document')}, "
            f"{counted(len(texts), 'text')} without copies; train and val need one each. To divide "
            "plain text: --split_at '<|endoftext|>', --split_at '\\n' for lines, or --cut_bytes "
            "2000")
    return [*filter(len, np.array_split(rows[~is_val], n_shards - 1)), rows[is_val]]

def gather_shard(building, kind, number, rows):
    """Write these rows of all runs, in row groups."""
    table = open_runs(building).drop_columns([KEY, TEXT_HASH])
    # Unlike a table's, its take() copies no other rows.
    documents = InMemoryDataset(table.rename_columns({DOCUMENT: kind}))
    n_groups = max(16, len(rows) // ROW_GROUP_DOCUMENTS)    # to be read apart
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
        with open(path, "rb") as file:
            if file.read(99).startswith(b"version https://git-lfs"):
                raise UserError("it is a Git LFS pointer, not the file; to get that: git lfs pull")
        for where, record in read(path, flags):
            yield "bad documents", f"{path}, {where}", record
            rest = f"{path}, unreadable after {where}"
    except Exception as error:    # a damaged file may raise any
        yield "the rest of bad files", rest, error

# Python's modules, or Arrow's names: Arrow refuses bz2's empty members, and zeros after gzip's.
CODECS = {
    ".gz": gzip, ".gzip": gzip, ".bz2": bz2, ".xz": lzma,
    ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}

def open_stream(path):
    """Decompressed, by the file's name."""
    codec = CODECS.get(Path(path).suffix.lower())
    if codec in (gzip, bz2, lzma):
        stream = codec.open(path)
        # Or it would end before a damaged member. A private name: a test fails if it has another.
        stream._buffer.raw._trailing_error = ()
    else:    # a cut file loses less than this buffer
        file = pa.OSFile(os.fsencode(path))    # its name may be no UTF-8
        stream = io.BufferedReader(pa.input_stream(file, compression=codec), 1 << 10)
    encoding = json.detect_encoding(stream.peek(4)[:4])
    if not encoding.startswith("utf-8"):
        name = encoding.replace("-le", "le").replace("-be", "be")    # iconv's
        raise UserError(f"it is {name}; decompress it, if it is compressed, and run: "
                        f"iconv -f {name} -t UTF-8 OLD > NEW")
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
        header = next(filter(bytes.strip, stream), b"").decode()    # of those that are not blank
        delimiter = max(delimiters, key=header.count)
    with open_stream(path) as stream:
        # Bytes that are no UTF-8 become surrogates, which cannot be encoded.
        lines = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        lines = (line.removeprefix("\ufeff") for line in lines)    # joined files may have several
        rows = rows_of_csv(enumerate(lines, 1), delimiter, quoting)
        _, titles = next(rows, (1, []))
        if isinstance(titles, csv.Error):
            raise titles
        pairs = [(name or f"column {i}", i) for i, name in enumerate(titles, 1)]
        names = [*dict_of_pairs(pairs)]    # raises if a name is there twice
        for number, fields in rows:
            place = f"line {number}"
            if isinstance(fields, csv.Error):
                yield place, fields
            elif fields == titles:
                yield place, Remark("skipped lines that repeat the first one (files were joined)")
            elif len(fields) != len(names) or {*fields} == {*names}:
                yield place, UserError(
                    f"expected {counted(len(names), 'field')}, as in the first line; saw "
                    f"{fields!r:.200}; quote texts that have {delimiter!r} (a .tsv has no quotes; "
                    "if yours has, name it .csv); if each line ends with it, so must the first; if "
                    "columns change their order, divide the file there; remove a line such as "
                    "sep=;")
            else:
                for pattern, remark in SIGNS_OF_TABLES.items():
                    if any(re.search(pattern, field) for field in fields):
                        yield place, Remark(remark)
                yield place, dict(zip(names, fields, strict=True))

# What in a field may show that a table has other rules
SIGNS_OF_TABLES = {
    r"""\A\s*b?["']|["']\Z""":
        "lines with a quote at an end of a field (if these quotes are not the text's: name a .tsv "
        """with quotes .csv; remove spaces before quotes, sed 's/, *"/,"/g' OLD > NEW.csv)""",
    r"\\\Z":
        "lines with a field that ends with a backslash (it may be cut there; if backslashes escape "
        f"quotes: {SPARK_SED})",
    r"\A\\N\Z|\\[nt]":
        "lines with \\N, \\n or \\t (if they stand for null, a line end or a tab, as MySQL and "
        "PostgreSQL write them: write CSV with quotes, or JSON lines)"}

def rows_of_csv(lines, delimiter, quoting):
    """
    (the number of its first line, fields or an error) of each row. A bad quote costs its line, not
    all up to the next quote: the lines between them are read again.
    """
    n_again = 0
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
            n_again += len(taken)
            if n_again > 10_000_000:    # quotes are wrong everywhere
                raise
            yield taken[0][0], error
            again += taken[:0:-1]
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
    """The documents between the marks of split_at, in pieces of about cut_bytes, as CUT says."""
    pattern = CUT % {b"SIZE": flags.cut_bytes or 1 << 30}
    with open_stream(path) as stream:
        text = stream.read()
    documents = re.split(flags.split_at, text) if flags.split_at else [text]
    numbers = itertools.count()
    for i, document in enumerate(documents):
        if i > 0:    # line ends at a mark
            document = document.lstrip(b"\r\n")
        if i < len(documents) - 1:
            document = document.rstrip(b"\r\n")
        document = document.removeprefix(BOM_UTF8)
        if document.isspace():
            document = b""
        for part in re.finditer(pattern, document):
            try:
                record = {flags.text_key or "text": part[0].decode()}
            except UnicodeDecodeError as error:
                record = error
            yield f"text {next(numbers)}", record

def read_parquet(path, flags):
    data = pa.memory_map(os.fsencode(path)).read_buffer()
    refuse_joined(data, b"PAR1PAR1\x15")
    file = parquet.ParquetFile(
        data, page_checksum_verification=True, arrow_extensions_enabled=True)
    return rows_of(file.iter_batches(ROW_GROUP_DOCUMENTS, use_threads=False), flags)

def read_arrow(path, flags):
    """Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    data = pa.memory_map(os.fsencode(path)).read_buffer()
    stream = pa.BufferReader(data)
    if data[:6] == b"ARROW1":
        refuse_joined(data, b"ARROW1ARROW1\0\0")
        table = ipc.open_file(stream).read_all()
    elif data[-8:] == b"\xff\xff\xff\xff\0\0\0\0":    # Arrow itself reads a stream without its end
        table = ipc.open_stream(stream).read_all()
        refuse_joined(stream.read(1), b"(?s).")
    else:
        raise ValueError("its end is missing, or it is of Feather 1; write or copy it again")
    return rows_of(table.to_batches(ROW_GROUP_DOCUMENTS), flags)

def refuse_joined(data, seam):
    """Of joined files with footers, Arrow reads one, or the rows of one as those of another."""
    if re.search(seam, data):
        raise UserError("it is several files, joined into one; use the files themselves")

def rows_of(batches, flags):
    numbers = itertools.count()
    for batch in batches:
        for record in read_rows(batch, flags):
            yield f"row {next(numbers)}", record

def read_rows(batch, flags):
    """
    Its records. A bad value costs its row. Columns that are not needed become NOT_READ: Python may
    have no type for their values. Those to keep stay Arrow's.
    """
    unread = dict.fromkeys(batch.schema.names, NOT_READ)
    needed = batch.select([name for name in unread if is_needed(name, flags)])
    columns = {name: column_at(batch, name) for name in flags.keep}
    kept = pa.record_batch(columns)
    try:
        kept.validate(full=True)
        rows = needed.to_pylist(maps_as_pydicts="strict")
        rows = decode(rows, pa.list_(pa.struct(needed.schema)))
    except Exception as error:
        if len(batch) == 1:
            return [error]
        slices = [batch.slice(i, 1) for i in range(len(batch))]
        return [read_rows(row, flags)[0] for row in slices]
    for i, row in enumerate(rows):
        row[KEPT] = kept.slice(i, 1)
    return [unread | row for row in rows]

def column_at(batch, key):
    """As lookup() in dev/records.py finds it."""
    is_column = key in batch.schema.names
    name, *inside = [key] if is_column else key.split(".")
    try:
        column = pc.struct_field(batch[name], inside) if inside else batch[name]
    except (KeyError, pa.ArrowInvalid):    # there is none
        return pa.nulls(len(batch))
    is_category = pa.types.is_dictionary(column.type)    # each file has its own
    values = column.dictionary if is_category else column
    if values.type == pa.string_view():    # polars writes them; Arrow cannot sort them
        values = values.cast(pa.large_string())
    return values.take(column.indices) if is_category else values

def decode(value, kind):
    """
    Values of the type JSON (DuckDB's, and Json() of datasets), and texts that a program wrote as
    bytes, also inside lists and structs.
    """
    if isinstance(kind, pa.JsonType):
        return value and load_json(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [decode(item, kind.value_type) for item in value]
    if isinstance(value, dict) and isinstance(kind, pa.StructType):    # not a map
        return {field.name: decode(value[field.name], field.type) for field in kind}
    return value

# Compressed text: .jsonl.gz, .txt.zst and so on
READERS = by_name({
    read_lines: ".jsonl .ndjson",
    read_json: ".json",
    read_csv: ".csv",
    read_tsv: ".tsv",
    read_text: ".txt .md",
    read_parquet: ".parquet .parq .pq",
    read_arrow: ".arrow .feather"})
SUFFIXES = " ".join(READERS)

# --------------------------------------------------------------------------------------------------
# Which files

# Not documents; most are Hugging Face's
ABOUT_DATA = (
    "README.md README.txt LICENSE.md LICENSE.txt index.json config.json dataset_info.json "
    "dataset_infos.json dataset_dict.json state.json")

def find_files(flags, report):
    """[(path, reader, is it for val?, number), ...], each file once, in the order of paths."""
    names = {}    # of files, below a folder that was named
    for given in sorted(flags.inputs, key=len):    # in/_raw after in
        names |= expand(given)
    found = {}
    for path in sorted(names):
        read = choose_reader(path, names[path], flags.as_text)
        if callable(read):
            found.setdefault(os.path.realpath(path), (path, read))    # links to others are no files
        else:
            report.add(f"ignored files, {read}", path)
    if not found:
        raise UserError(
            f"no files to read; {'; '.join(report.lines())}. Expected names that end in {SUFFIXES} "
            f"(text can also end with {' '.join(CODECS)}). To read other plain text: --as_text "
            "'*.SUFFIX'. Rename files of JSON lines to .jsonl, and unpack archives first")
    readers = dict(found.values())
    folder = os.path.commonpath(map(os.path.dirname, names))
    names = {path: path.removeprefix(folder) for path in readers}
    if not flags.as_text:
        dataset.splits_of(names)    # UserError if train is beside a file of no split
    splits = [*map(dataset.split_in_name, names.values())]
    is_split = "train" in splits
    if None in splits:    # code and notes are named for other things: train.py, testing.md
        is_split = read_text not in readers.values()
    use = "kept out of the training data" if is_split else "read like all others"
    files = []
    for path, split in zip(names, splits, strict=True):
        if split and not (is_split and split == "train"):
            report.add(f"files named for {split}, {use}", path)
        if not (is_split and split == "test"):
            is_val = is_split and split == "val"
            files.append((path, readers[path], is_val, len(files)))
    return files

def expand(given):
    """
    {path: its name below a folder that was named} of a file, of all in a folder, or of all files
    and folders that a glob matches. What was named itself is "".
    """
    before, *after = given.split("**/", 1)
    paths = [given] if os.path.exists(given) else glob.glob(before or ".")
    files = {}
    for path in map(os.path.abspath, paths):
        below = dataset.list_local(path, suffix=re.compile(""))
        files |= {f"{path}/{name}": name for name, *_ in below}
        if not os.path.isdir(path):
            files[path] = ""
    if after:    # Python's glob would follow links to folders above, for ever
        matches = re.compile(glob_translate(os.path.abspath(given))).match
        files = {path: name for path, name in files.items() if matches(path)}
    if not files:
        raise UserError(
            f"{given} does not exist or has no files; expected a file, a folder, or a glob in "
            "quotes: 'my/**/*.jsonl' (in a glob, write [[] for a bracket)")
    return files

def choose_reader(path, name, as_text):
    """The function that reads a file, or as a text, why it is ignored. name: see expand"""
    folder, base = os.path.split(path)
    if as_text:
        return read_text if any(map(Path(path).match, as_text)) else "of other kinds"
    if base in ABOUT_DATA.split():
        return "about the data, also if they list splits (to read them: --as_text README.md)"
    stem, suffix = os.path.splitext(base.lower())
    if suffix in CODECS:
        _, suffix = os.path.splitext(stem)
    read = READERS.get(suffix, "of other kinds")
    if dataset.SHARD_SUFFIX.search(base):
        read = read_parquet
    if read is read_text:    # __init__.py is a file like any other
        return read
    if dataset.HIDDEN.search(name):
        return "hidden, such as Spark's _temporary (to read them: name their folder)"
    if read is read_arrow and base.startswith("cache-"):
        return "caches of datasets' map"
    if read is read_parquet and os.path.exists(f"{folder}/{dataset.INDEX}"):
        return "beside an index.json, which train.py may read (to convert them: copy them)"
    return read

# --------------------------------------------------------------------------------------------------
# The folder that becomes `out`, and processes

@contextlib.contextmanager
def workshop(out, n):
    """
    (A hidden folder next to `out`, `map` or that of n processes). At the end, both are gone.
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
    except (pa.ArrowException, OverflowError) as error:    # other values are a record's fault
        raise UserError(
            f"--keep: {error}; expected values of one type (not polars' lists in Arrow files: "
            "write parquet), and whole numbers of JSON below 2 ** 63") from error
    finally:
        if pool:
            shutil.rmtree(building, ignore_errors=True)    # so that processes end soon
            pool.shutdown(cancel_futures=True)
        shutil.rmtree(building, ignore_errors=True)

@contextlib.contextmanager
def errors_of_disk(folder):
    """An OSError may name no path; ours do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error}, in {folder}; to write elsewhere: --out NEW_FOLDER (if a convert that was "
            "killed has left the folder, remove it)") from error

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
    names = {"nargs": "+", "action": "extend", "default": [], "metavar": "NAME"}
    add("inputs", nargs="+", metavar="IN", type=dataset.expand_home,
        help=f"files, folders, globs in quotes: {SUFFIXES} (a .tsv has no quotes around texts)")
    add("--out", type=dataset.local_folder,
        help="new or empty folder (default: ~/.cache/nanoloader/base_data, where train.py looks)")
    add("--text_key",
        help="key or column that holds the text (default: text); write a.b for key b inside a")
    add("--messages_key", help="key or column that holds conversations, or their questions "
        "(default: messages, conversations, prompt, question, instruction)")
    add("--keep", **names, help="copy these columns, too")
    add("--as_text", **names, help="read only these files, as plain text: '*.py'")
    add("--split_at", metavar="MARK", type=pattern_of_mark,
        help="split plain text into documents at each MARK, such as '<|endoftext|>'")
    add("--cut_bytes", type=at_least_1,
        help="cut plain text into documents of up to this size, at blank lines (default: 1 GiB)")
    add("--drop_copies", action="store_true",
        help="drop documents whose text occurs before")
    add("--ignore_keys", **names,
        help="drop these keys of messages, such as reasoning_content, and columns of these names")
    add("--skip_bad", action="store_true",
        help="skip and count bad documents and unreadable files, instead of stopping at the first")

    add("-w", "--num_workers", type=at_least_1, help="processes (default: at most one per core)")
    flags = parser.parse_args(argv)
    if {"text", "messages", "tokens"} & {*flags.keep}:
        parser.error("--keep: the names text, messages and tokens are reserved for the documents")
    with errors_in_one_line():
        convert(flags)

def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)

def pattern_of_mark(mark):
    """\\n also stands for the line ends of Windows."""
    mark = re.sub(r"\r|\\r", "", mark).replace("\\n", "\n")
    if not mark:
        raise argparse.ArgumentTypeError("expected a text")
    return re.escape(mark.encode()).replace(b"\\\n", rb"\r?\n")

def counted(n, noun):    # 1, "file" -> "1 file";  1234, "file" -> "1,234 files"
    return f"{n:,} {noun}{'s' * (n != 1)}"

if __name__ == "__main__":
    main()
