"""
Make shuffled shards from your own text or chats.

    python -m dev.convert my_folder --out my_shards                   # all files that we can read
    python -m dev.convert 'my/**/*.jsonl.gz' --text_key data.content  # a key in a key
    python -m dev.convert book.txt --cut_bytes 2000                   # cut at blank lines
    python -m dev.convert chats.jsonl --out my_chats                  # in their usual forms

All text is written twice, so any amount of it is shuffled in bounded memory: 197 MB of JSON lines
take 3 s of one core, and 260 MB of memory (2 cores, 2026-11).

In this order: convert; the shuffle; records of files; documents of records; conversations; which
files; processes and folders; the command.
"""

import sys

if __name__ == "__main__":    # here, since the imports below take half a second
    if not __package__:
        sys.exit("usage: python -m dev.convert FILES --out FOLDER, typed where dataset.py is")
    sys.excepthook = lambda kind, *error: (
        print("\nstopped", file=sys.stderr) if kind is KeyboardInterrupt
        else sys.__excepthook__(kind, *error))

import argparse
import collections
import contextlib
import csv
import difflib
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from pyarrow import feather
from tqdm import tqdm

import dataset
from dataset import UserError, cores, errors_in_one_line, printable
from tokenizer import NANOCHAT, ROLES, UNREAD_KEYS, check_message, parts_of

RUN_BYTES = 32 << 20
TASKS = 256                        # at most: small files share a run
BYTES_PER_PROCESS = 100_000_000    # while a process starts, another one converts so much
SHARD_BYTES = 300_000_000          # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_BYTES = 32 << 20         # long documents: fewer of them in a row group
VAL_DOCUMENTS = 64                 # at least, if there are ten times as many
LONGEST_PIECE = 1 << 30            # bytes that are read at once
DASK_SECONDS = 5                   # to find its scheduler

# --------------------------------------------------------------------------------------------------
# Convert: files -> sorted runs -> shards
#
# A document's key is a hash of its position in the inputs. The shards hold all documents in the
# order of their keys: a shuffle that is the same for any number of processes. First, processes
# parse the files into runs on disk, RUN_BYTES of text each, sorted by key. All keys (8 bytes each)
# decide which of them a shard holds. Then each shard collects its documents from all runs.

class Report:
    """How often something was read, dropped, skipped or ignored, and the first example of it."""
    def __init__(self):
        self.counts = collections.Counter()
        self.examples = {}

    def add(self, what, example):
        self.counts[what] += 1
        self.examples.setdefault(what, example)

    def merge(self, other):
        self.counts += other.counts
        self.examples = other.examples | self.examples

def convert(flags):
    """
    Write the documents of flags.inputs as shards; the last, about 1 % of them, is val. `out`
    appears atomically, once complete.

    UserError names file and line of the first bad document; with skip_bad, bad documents and
    unreadable files are counted instead.
    """
    out = check_out(flags.out or dataset.default_data_dir())
    report = Report()
    files = find_files(flags, report)
    check_flags(flags, files)
    total = sum(os.path.getsize(file.path) for file in files)
    n_processes = min(flags.num_workers or max(1, total // BYTES_PER_PROCESS), cores())
    with building_folder(out) as building, mapper(n_processes, flags.dask, building) as run:
        scatter = functools.partial(
            scatter_files, flags=flags, building=building, longest_val=total // 20)
        tasks = [files[i::TASKS] for i in range(min(TASKS, len(files)))]
        for part in tqdm(run(scatter, tasks), "read", len(tasks), unit=" tasks", delay=1):
            report.merge(part)
        kind = check_documents(report, files)
        n_documents = report.counts.pop(kind)
        n_bytes = report.counts.pop("bytes")
        shards = plan_shards(building, n_bytes)
        rows = min(ROW_GROUP_DOCUMENTS, n_documents * ROW_GROUP_BYTES // max(1, n_bytes))
        gather = functools.partial(gather_shard, building=building, kind=kind, rows=rows)
        for _ in tqdm(run(gather, shards), "write", len(shards), unit=" shards", delay=1):
            pass
        index = dataset.write_index(f"{building}/shards")
        n_written = sum(sum(entry["rows"]) for entry in index["shards"].values())
        assert n_written == n_documents
        os.rename(f"{building}/shards", out)
    print(f"{counted(len(files), 'file')} -> {counted(n_documents, 'document')}, "
          f"{n_bytes / 1e6:,.1f} MB, in {len(shards):,} shards, the last for val, in {out}")
    for what, n in report.counts.most_common():
        print(f"{what}: {n:,}, such as {printable(report.examples[what])}")

def check_out(out):
    """The target of a link stays where it is, and is what appears."""
    if "://" in out:
        raise UserError(f"cannot write to {out}; name a local folder, then copy it there")
    out = os.path.realpath(out)
    try:
        os.rmdir(out)    # what cannot be removed cannot be replaced: a mount point, too
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"{error}; name a new folder with --out, or remove it first") from error
    return out

def check_flags(flags, files):
    reserved = {"text", "messages", "tokens", flags.text_key, flags.messages_key}
    clash = reserved & {*flags.keep}
    if clash:
        raise UserError(f"--keep {min(clash)}: shards hold the documents in a column of that name")
    if flags.delimiter and len(flags.delimiter) != 1:
        raise UserError(f"--delimiter {flags.delimiter!r}: expected one character; a tab: $'\\t'")
    if flags.cut_bytes and not any(file.reader is read_text for file in files):
        raise UserError("--cut_bytes cuts plain text, and here is none; name it by --as_text")

def check_documents(report, files):
    """The column of the documents in a shard: 'text' or 'messages'."""
    text, messages = map(report.examples.get, ("text", "messages"))
    if text and messages:
        raise UserError(
            f"{text} is a text, but {messages} a conversation; convert conversations apart "
            "(train.py mixes: --data TEXTS:0.7 CHATS:0.3)")
    kind = "messages" if messages else "text"
    n = report.counts[kind]
    if n < 2:
        message = f"{counted(n, 'document')}, but train and val need at least one each"
        if n == 1 and files[0].reader is read_text:
            message += "; to cut a long text at blank lines: --cut_bytes 2000"
        for what in {SKIPPED, EMPTY} & report.examples.keys():
            message += f"; {what}, such as {report.examples[what]}"
        raise UserError(message)
    return kind

# --------------------------------------------------------------------------------------------------
# The shuffle

KEY, DOCUMENT = "nanoloader.key", "nanoloader.document"    # columns of a run
SKIPPED, EMPTY = "skipped bad documents or files", "skipped null or empty documents"

def scatter_files(files, flags, building, longest_val):
    """Write the documents of some files as sorted runs. Returns a Report."""
    report = Report()
    run = []
    size = 0
    for file in files:
        for index, (where, document) in enumerate(documents_of(file, flags)):
            place = f"{file.path}, {where}"
            if isinstance(document, Exception):
                problem = f"{place}: {explain(document)}"
                if not flags.skip_bad:
                    raise UserError(f"{problem} (to skip what is bad: --skip_bad)")
                report.add(SKIPPED, problem)
                continue
            if not document.text:
                report.add(EMPTY, place)
                continue
            add_document(report, document, place)
            position = b"0 %d %d" % (file.number, index)
            digest = hashlib.blake2b(position, digest_size=8).digest()
            key = int.from_bytes(digest, "big")
            if len(document.text) > longest_val:
                key //= 2    # val has the largest keys
            run.append((key, document.text, *document.kept))
            size += len(document.text)
            if size >= RUN_BYTES:
                write_run(f"{building}/runs/{file.number}-{index}", run, flags.keep)
                run = []
                size = 0
    if run:
        write_run(f"{building}/runs/{file.number}-rest", run, flags.keep)
    return report

def add_document(report, document, place):
    report.add(document.kind, place)
    report.counts["bytes"] += len(document.text)
    for what, value in document.lost.items():
        if len(report.counts) > 30 and f"dropped {what}" not in report.counts:
            what = "others"    # each record may have columns of its own
        report.add(f"dropped {what}", f"{place}: {value!r:.60}")

def write_run(path, rows, keep):
    """rows: (key, text, kept values ...) of each document."""
    keys, texts, *kept = zip(*rows, strict=True)
    columns = {KEY: pa.array(keys, pa.uint64()), DOCUMENT: pa.array(texts, pa.large_string())}
    with explained_columns():
        columns.update(zip(keep, map(pa.array, kept), strict=True))
    table = pa.table(columns).sort_by(KEY)
    feather.write_feather(table, path, "uncompressed", chunksize=len(table))

def open_runs(building):
    """Memory-mapped tables, each sorted by key."""
    folder = f"{building}/runs"
    return [feather.read_table(f"{folder}/{name}", memory_map=True) for name in os.listdir(folder)]

def plan_shards(building, n_bytes):
    """
    (number, sorted keys) of each shard. The last is val: 1 % of the documents, or VAL_DOCUMENTS, or
    a tenth, if that is fewer. The others have equally many.
    """
    keys = np.concatenate([run[KEY] for run in open_runs(building)])
    keys.sort()
    n = len(keys)
    n_train = n - max(1, n // 100, min(VAL_DOCUMENTS, n // 10))
    n_shards = max(4, round(n_bytes / SHARD_BYTES))    # cores share a small corpus, too
    cuts = np.linspace(0, n_train, n_shards).astype(int)
    borders = np.unique([*cuts, n])
    return [(number, keys[start:stop])
            for number, (start, stop) in enumerate(itertools.pairwise(borders))]

def gather_shard(shard, building, kind, rows):
    """Write the documents with these keys, up to `rows` in a row group."""
    number, keys = shard
    runs = open_runs(building)
    rows = max(1, min(rows, len(keys) // 16))
    groups = [keys[start:start + rows] for start in range(0, len(keys), rows)]
    tables = (gather_rows(runs, group[0], group[-1], kind) for group in groups)
    dataset.write_shard(f"{building}/shards/shard_{number:05d}.parquet", tables, kind)

def gather_rows(runs, first, last, kind):
    """All documents with keys from first to last, in the order of their keys."""
    parts = []
    for run in runs:
        keys = run[KEY].to_numpy()
        start = keys.searchsorted(first)
        stop = keys.searchsorted(last, "right")
        parts.append(run[start:stop])
    with explained_columns():
        table = pa.concat_tables(parts, promote_options="permissive").sort_by(KEY)
    for column in table.schema:
        if pa.types.is_null(column.type):
            raise UserError(f"--keep {column.name}: no document has a value there")
    return table.drop_columns(KEY).rename_columns({DOCUMENT: kind})

@contextlib.contextmanager
def explained_columns():
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(f"--keep: {error}; expected values of one type") from error

# --------------------------------------------------------------------------------------------------
# Records of a file

def records_of(file, flags):
    """(where, record) of each line, row or plain text; a record is a dict, or JSON as bytes."""
    if file.reader in (read_parquet, read_arrow):
        yield from file.reader(file.path, flags)
        return
    with pa.input_stream(file.path) as stream:    # decompresses, by the file's name
        stream = io.BufferedReader(stream, 1 << 16)    # a truncated file loses less than this
        yield from file.reader(stream, flags)

def read_json(stream, flags):
    """One array of records, or one record in each line, which may be an array of messages."""
    start = stream.peek(100).removeprefix(BOM_UTF8)
    if re.match(rb'\s*\[(?!\s*{\s*"(role|content|from|value|name|weight)")', start):
        for number, record in enumerate(json.loads(read_whole(stream))):
            yield f"document {number}", record
        return
    lines = iter(lambda: stream.readline(LONGEST_PIECE), b"")
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            yield f"line {number}", line

def read_csv(stream, flags, delimiter=None):
    """By default, the delimiter is the one of , ; | or tab that is most frequent in line 1."""
    csv.field_size_limit(LONGEST_PIECE)
    lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    header = lines.readline()
    delimiter = flags.delimiter or delimiter or max(",;|\t", key=header.count)
    lines = itertools.chain([header], lines)
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    names = rows.fieldnames or []
    columns_to_read(names, flags)
    seen = re.search("[,;|\t]", names[0]) if len(names) == 1 else None
    if seen:
        raise ValueError(
            f"one column, {names[0]!r}; name what divides columns: --delimiter {seen[0]!r}")
    for row in rows:
        if None in row:
            row = ValueError(
                f"{len(row[None])} fields more than the first line names: quote texts, or name "
                "what divides columns: --delimiter ';'")
        yield f"line {rows.line_num}", row

def read_text(stream, flags):
    """Cut at the last blank line, else line, else word, else character before cut_bytes."""
    data = read_whole(stream).removeprefix(BOM_UTF8)
    cut = r".{1,%d}(?:(?<=\n\n)|(?<=\n\r\n)|\Z)|.{1,%d}(?<=\n)|.{1,%d}(?<= )|.{1,%d}(?![\x80-\xbf])"
    pattern = cut.replace("%d", str(flags.cut_bytes or LONGEST_PIECE)).encode() + b"|.|^$"
    for part in re.finditer(pattern, data, re.DOTALL):
        yield f"byte {part.start()}", {flags.text_key or "text": part[0]}

def read_whole(stream):
    data = stream.read(LONGEST_PIECE + 1)
    if len(data) > LONGEST_PIECE:
        raise ValueError(f"over {LONGEST_PIECE:,} bytes in one piece; write JSON lines instead")
    return data

def read_parquet(path, flags):
    file = pq.ParquetFile(path, page_checksum_verification=True)
    names = file.schema_arrow.names
    columns = columns_to_read(names, flags)
    batches = file.iter_batches(ROW_GROUP_DOCUMENTS, columns=columns, use_threads=False)
    return rows_of(batches, names)

def read_arrow(path, flags):
    """Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    file = pa.memory_map(path)
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    table = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(file).read_all()
    names = table.column_names
    table = table.select(columns_to_read(names, flags))
    return rows_of(table.to_batches(ROW_GROUP_DOCUMENTS), names)

def columns_to_read(names, flags):
    """Those that may hold documents, and those to keep."""
    if len({*names}) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names):.200}")
    wanted = columns_of([*itertools.chain(*shapes_to_read(flags)), *flags.keep])
    return [name for name in names if name in wanted]

def rows_of(batches, names):
    unread = dict.fromkeys(names, "(not read)")
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows):
        yield f"row {number}", unread | row

# How a file is read, by the end of its name. Compressed text: .jsonl.gz, .txt.zst and so on
READERS = {
    ".jsonl": read_json, ".ndjson": read_json, ".json": read_json,
    ".csv": read_csv, ".tsv": functools.partial(read_csv, delimiter="\t"),
    ".txt": read_text, ".md": read_text,
    ".parquet": read_parquet, ".pq": read_parquet,
    ".arrow": read_arrow, ".feather": read_arrow}
COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")

# --------------------------------------------------------------------------------------------------
# Documents of records

class Document(NamedTuple):
    kind: str      # 'text' or 'messages'
    text: bytes    # UTF-8
    kept: list     # values of the columns to keep
    lost: dict     # what the record has beside them

# The columns of a document: the first of these that a record has, but not text beside another
SHAPES = (
    ("text",), ("messages",), ("conversations",),
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"),
    ("instruction", "input", "output"), ("instruction", "output"),
    ("instruction", "context", "response"), ("instruction", "response"))

def documents_of(file, flags):
    """(where, Document) of each record; of a bad one, or of an unreadable rest, (where, error)."""
    place = "unreadable"
    try:
        for where, record in records_of(file, flags):
            place = f"unreadable after {where}"
            try:
                document = make_document(record, flags)
            except (ValueError, TypeError, RecursionError) as error:
                document = error
            yield where, document
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        yield place, error

def make_document(record, flags):
    """Of a dict, a list of messages, or one of them as JSON."""
    if isinstance(record, Exception):
        raise record
    if isinstance(record, bytes):
        record = json.loads(record)
    kind, columns, values = find_document(record, flags)
    lost = {}
    if kind == "messages":
        messages = clean_messages(join_messages(*values), flags, lost)
        text = json.dumps(messages, ensure_ascii=False)
    else:
        text = values[0]
        if isinstance(text, bytes):    # plain text; old versions of Hive write it for strings, too
            text = text.decode()
        if not isinstance(text, str):
            raise UserError(
                f"{columns[0]!r} holds {type(text).__name__}, not a string; for conversations, "
                f"add --messages_key {columns[0]}")
    if isinstance(record, dict):
        used = columns_of([*columns, *flags.keep])
        for name, value in record.items():
            if name not in used:
                lost[f"column {name} (read: {', '.join(columns)})"] = value
    kept = [lookup(record, name) for name in flags.keep]
    return Document(kind, text.encode(), kept, lost)

def find_document(record, flags):
    """('text' or 'messages', the document's columns, their values)"""
    key = flags.text_key or flags.messages_key
    if isinstance(record, list) and not flags.text_key:
        return "messages", (), [record]
    found = []
    for columns in shapes_to_read(flags):
        if lookup(record, columns[0]) is None:    # most of them, fast
            continue
        values = [lookup(record, column) for column in columns]
        if None not in values:
            is_text = flags.text_key or (key is None and columns == ("text",))
            found.append(("text" if is_text else "messages", columns, values))
    if len(found) > 1 and found[0][0] == "text":
        other = found[1][1][0]
        raise UserError(f"it has 'text' and {other!r}; choose: --text_key text, or for "
                        f"conversations --messages_key {other}")
    if found:
        return found[0]
    key = key or "text"
    if isinstance(record, dict) and key in record:    # null
        return "text", (key,), [""]
    raise UserError(describe_missing(key, record))

def shapes_to_read(flags):
    """--messages_key instruction: also with the columns beside it that SHAPES names."""
    if flags.text_key:
        return [(flags.text_key,)]
    if flags.messages_key:
        key = flags.messages_key
        return [shape for shape in SHAPES if shape[0] == key and shape != (key,)] + [(key,)]
    return SHAPES

def lookup(record, key):
    """record["a"]["b"] for the key 'a.b', unless there is a key 'a.b'; None if there is neither."""
    if not isinstance(record, dict):
        return None
    if key in record:
        return record[key]
    head, dot, rest = key.partition(".")
    return lookup(record.get(head), rest) if dot else None

def columns_of(keys):
    """Of a key 'a.b', the column is 'a.b' or 'a'."""
    return {*keys, *(key.partition(".")[0] for key in keys)}

def describe_missing(key, record):
    names = [name for name in names_in(record) if name != key]
    there = ", ".join(names) or repr(record)
    near = difflib.get_close_matches(key, names)
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    return (f"nothing under {key!r}; there is {there:.200}{guess}; name it by --text_key, or for "
            "conversations --messages_key")

def names_in(record, prefix=""):
    """{'a': {'b': 1}} -> ['a', 'a.b']"""
    names = []
    if isinstance(record, dict):
        for key, value in record.items():
            names += [prefix + key, *names_in(value, f"{prefix}{key}.")]
    return names

def explain(error):
    """What an error says, in one line, and what to do."""
    advice = ""
    if isinstance(error, UnicodeDecodeError):
        advice = "; expected UTF-8: iconv -f LATIN1 -t UTF-8 OLD > NEW (or -f UTF-16)"
    elif isinstance(error, json.JSONDecodeError) and error.doc.strip() in ("{", "["):
        advice = "; expected one whole JSON document in a line: jq -c . OLD > NEW"
    return printable(error) + advice

# --------------------------------------------------------------------------------------------------
# Conversations
#
# Shards hold them as JSON: [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...].
# An assistant's content may be a list of parts, {"type": "text", "text": "Hello"}. With
# "weight": 0, a message is read and not learned. Some template of tokenizer.py knows its role and
# parts; encoding checks that the tokenizer's does.

SHAREGPT = {"human": "user", "gpt": "assistant"}    # its names; "User" is "user"

def join_messages(*columns):
    """Of a prompt and its completion; or of an instruction, its input and output."""
    *questions, answer = columns
    if not questions:
        return answer
    question = questions[0]
    if len(questions) == 2:
        question = "\n\n".join(filter(None, questions))
    return [*as_messages("user", question), *as_messages("assistant", answer)]

def as_messages(role, content):
    return content if isinstance(content, list) else [{"role": role, "content": content}]

def clean_messages(messages, flags, lost):
    """Messages as shards hold them; what they lose is added to `lost`."""
    if isinstance(messages, str | bytes):
        messages = json.loads(messages)
    cleaned = []
    for i, message in enumerate(messages):
        try:
            kept, rest = clean_message(message, flags.ignore_keys)
        except (LookupError, TypeError, AttributeError, UserError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"message {i}: {problem}; saw {message!r:.300}, expected such as {{'role': 'user', "
                "'content': 'Hi'}") from error
        cleaned.append(kept)
        for key, value in rest.items():
            lost[f"{key} of a message"] = value
    answers = [m for m in cleaned if m["role"] == "assistant"]
    if not any(m["content"] and m.get("weight", 1) for m in answers):
        raise UserError(
            "nothing to learn: expected a message of an assistant, not empty, of weight 1; saw "
            f"{messages!r:.200}")
    return cleaned

def clean_message(message, ignore_keys):
    """(its role, content and weight; all else)"""
    rest = {key: value for key, value in message.items() if value is not None}    # parquet's nulls
    if "from" in rest and "value" in rest:
        rest["role"] = rest.pop("from")
        rest["content"] = rest.pop("value")
    for key in UNREAD_KEYS:
        if rest.get(key) and not rest.get("content"):
            raise UserError(f"it has only {key}, which is not learned; remove this conversation")
        if rest.get(key) and key not in ignore_keys:
            raise UserError(f"its {key} would be lost; to drop it: --ignore_keys {key}")
    role = rest.pop("role").lower()
    kept = {"role": SHAREGPT.get(role, role), "content": rest.pop("content")}
    if "weight" in rest:
        kept["weight"] = rest.pop("weight")
    parts = parts_of(kept)
    is_answer = kept["role"] == "assistant"
    check_message(kept, parts, ROLES, NANOCHAT.tools if is_answer else {})
    if not is_answer:
        kept["content"] = "".join(text for _, text in parts)
    elif not isinstance(kept["content"], str):
        kept["content"] = [{"type": kind, "text": text} for kind, text in parts]
    return kept, rest

# --------------------------------------------------------------------------------------------------
# Which files

# Not documents; all but the first are Hugging Face's
ABOUT_DATA = (
    dataset.INDEX, "README.md", "dataset_info.json", "dataset_dict.json", "state.json")
EXPECTED = (
    f"expected names with {', '.join(READERS)} (of text also with {', '.join(COMPRESSED)}): a "
    "file, a folder or a glob in quotes; other plain text: --as_text '*.SUFFIX'; unpack archives "
    "first")

class Input(NamedTuple):
    number: int
    path: str
    reader: Callable    # of READERS

def find_files(flags, report):
    """[Input, ...], each file once, in the order of folders and names."""
    paths = {}    # by real path
    for given in flags.inputs:
        for path in choose_files(given, flags.as_text, report):
            paths.setdefault(os.path.realpath(path), os.path.abspath(path))
    files = []
    of_name = {}
    for path in sorted(paths.values(), key=os.path.split):
        other = of_name.setdefault(without_compression(path), path)
        if other != path:
            raise UserError(f"{other} and {path} seem to be copies; remove one, or name the "
                            "files to read")
        reader = reader_of(path, flags.as_text) or reader_of(path)
        if not reader:
            raise UserError(f"cannot read {path}; {EXPECTED}")
        files.append(Input(len(files), path, reader))
    return files

def choose_files(given, as_text, report):
    """The paths to read of a file, folder or glob. Others are counted in the report."""
    if os.path.isfile(given):
        return [given]
    root = given
    pattern = f"{glob.escape(given)}/**"
    if os.path.isdir(given):
        dataset.list_files(given)    # refuses older versions, circular links, unreadable folders
    elif glob.has_magic(given):
        root = re.split(r"[^/]*[*?[]", given)[0] or "."
        pattern = given
    else:
        raise UserError(f"{given} does not exist")
    paths = itertools.filterfalse(os.path.isdir, glob.glob(pattern, recursive=True))
    names = {path: os.path.relpath(path, root) for path in paths}
    has_train = not as_text and "train" in map(dataset.split_in_name, names.values())
    chosen = []
    for path, name in names.items():
        reason = why_ignored(path, name, as_text, has_train)
        if reason:
            report.add(f"ignored files, {reason}", path)
        else:
            chosen.append(path)
    if not chosen:
        seen = [f"{what}, such as {path}; " for what, path in report.examples.items()]
        raise UserError(f"{given}: no files to read; {''.join(seen)}{EXPECTED}")
    return chosen

def why_ignored(path, name, as_text, has_train):
    """None if it is to be read. name: below the folder that was named."""
    if not reader_of(path, as_text):
        return "of other kinds"
    if os.path.basename(path) in ABOUT_DATA and not as_text:
        return "about the data"
    if has_train and dataset.split_in_name(name) in ("val", "test"):
        return "of a val or test split beside train"
    if is_ours(path):
        return "shards that we wrote, val among them (to read one, name the file)"

def is_ours(path):
    """Whether it is a shard that we wrote."""
    with contextlib.suppress(OSError, pa.ArrowException):
        return dataset.CHECKSUMS.encode() in (pq.read_metadata(path).metadata or {})

def reader_of(path, as_text=()):
    """
    How to read a file, by its name, or None. as_text: patterns of names; if there are any, the
    others are None.
    """
    name = os.path.basename(path)
    if as_text:
        is_text = any(fnmatch.fnmatch(name, pattern) for pattern in as_text)
        return read_text if is_text else None
    _, suffix = os.path.splitext(without_compression(name))
    return READERS.get(suffix.lower())

def without_compression(path):
    """a.jsonl.gz -> a.jsonl"""
    stem, suffix = os.path.splitext(path)
    return stem if suffix in COMPRESSED else path

# --------------------------------------------------------------------------------------------------
# Processes, and the folder that becomes `out`

@contextlib.contextmanager
def building_folder(out):
    """A hidden folder beside `out`. It is removed at the end; if we are killed, by the next run."""
    parent = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.convert")
    building = f"{parent}/building"
    lock = FileLock(f"{parent}/lock", timeout=0)
    with errors_of_disk(parent):
        try:
            with contextlib.suppress(NotImplementedError):    # some file systems have no locks
                lock.acquire()
            shutil.rmtree(building, ignore_errors=True)    # of a killed run
            os.makedirs(f"{building}/runs")
            yield building
        except Timeout as error:
            raise UserError(f"another convert writes {out}; wait, or name another --out") from error
        finally:
            if lock.is_locked:
                with ctrl_c_ignored():
                    shutil.rmtree(parent, ignore_errors=True)
                    lock.release()

@contextlib.contextmanager
def errors_of_disk(folder):
    """An OSError may name no path; ours do."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{error}, in {folder}; to write elsewhere, name another folder with --out") from error

@contextlib.contextmanager
def mapper(n, dask, building):
    """`map` itself, or that of n processes or of a Dask cluster."""
    if dask:
        with dask_executor(dask) as executor:
            yield executor.map
        return
    if n == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")    # pyarrow's threads do not survive a fork
    pool = ProcessPoolExecutor(n, context, end_with_parent)
    with ctrl_c_ignored():    # processes inherit it: Ctrl-C is ours
        for _ in range(n):    # n tasks start n processes
            pool.submit(int)
    try:
        yield pool.map
    except BrokenExecutor as error:
        raise UserError("a process was killed; if memory is short: -w 1") from error
    finally:
        with ctrl_c_ignored():
            shutil.rmtree(building, ignore_errors=True)    # so that they end soon
            pool.shutdown(cancel_futures=True)

@contextlib.contextmanager
def ctrl_c_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

def end_with_parent():
    """In a process of ours: it ends if we are killed."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

@contextlib.contextmanager
def dask_executor(address):
    """Its workers must see the same files."""
    from distributed import Client  # pip install distributed

    try:
        client = Client(address, timeout=DASK_SECONDS)
    except (OSError, ValueError) as error:
        raise UserError(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        try:
            for run in (client.run_on_scheduler, client.run):
                run(exec, "import dev.convert")
        except ImportError as error:
            folder = os.path.dirname(os.path.abspath(dataset.__file__))
            raise UserError(
                f"the cluster at {address} says: {error}; start its scheduler and all workers with "
                f"our code and its packages: export PYTHONPATH={folder}") from error
        yield client.get_executor()

# --------------------------------------------------------------------------------------------------
# The command

def main(argv=None):
    parser = dataset.Parser(
        "python -m dev.convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = {"nargs": "+", "action": "extend", "default": []}
    kinds = ", ".join(READERS)
    add("inputs", nargs="+", metavar="IN", help=f"files, folders, globs in quotes: {kinds}")
    add("--out", help="folder, new or empty (default: where train.py looks)")
    add("--text_key", help="key or column that holds the text (default text); a.b: b in a")
    add("--messages_key", help="that of conversations (default messages or conversations, or a "
        "prompt and its completion or response, or instruction, input and output)")
    add("--keep", **names, metavar="NAME", help="columns kept beside the text")
    add("--as_text", **names, metavar="GLOB", help="read only these files, as plain text: '*.py'")
    add("--delimiter", help="of CSV (default: , ; | or tab, by its first line)")
    add("--cut_bytes", type=at_least_1, help="cut plain text to this size, at blank lines")
    add("--ignore_keys", **names, metavar="NAME", help="drop these of messages: reasoning_content")
    add("--skip_bad", action="store_true", help="skip and count bad documents, unreadable files")

    add("-w", "--num_workers", type=at_least_1, help="processes (default: up to one a core)")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster that sees the same files and our "
        "code: first export PYTHONPATH=HERE, then start its scheduler and workers")
    with errors_in_one_line():
        convert(parser.parse_args(argv))

def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)

def counted(n, noun):    # 1, "file" -> "1 file";  1234, "file" -> "1,234 files"
    return f"{n:,} {noun}{'s' * (n != 1)}"

if __name__ == "__main__":
    from dev.convert import main  # under its own name, which workers can import
    main()
