"""
Make shuffled shards from your own text or chats.

    python -m dev.convert my_folder --out my_shards                   # all files that we can read
    python -m dev.convert 'my/**/*.jsonl.gz' --text_key data.content  # a key in a key
    python -m dev.convert book.txt --cut_bytes 2000                   # cut at blank lines
    python -m dev.convert chats.jsonl --out my_chats                  # in their usual forms

All text is written twice, so any amount of it is shuffled in bounded memory: about 200 MB of JSON
lines a second on one core (193 MB of Python sources, 2026-11).

In this order: convert; reading documents; conversations; the shuffle; which files; processes and
folders; the command.
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
import lzma
import multiprocessing
import os
import re
import shutil
import signal
import threading
from codecs import BOM_UTF8
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from tqdm import tqdm

import dataset
from dataset import UserError, cores, errors_in_one_line, printable

RUN_BYTES = 32 << 20
BYTES_PER_PROCESS = 100_000_000    # while a process starts, another one converts so much
SHARD_BYTES = 300_000_000          # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_BYTES = 32 << 20         # long documents: fewer of them in a row group
VAL_DOCUMENTS = 64                 # at least, if there are ten times as many
LONGEST_DOCUMENT = 1 << 30         # bytes
BAD_SHOWN = 5

# --------------------------------------------------------------------------------------------------
# Convert: files -> sorted runs -> shards
#
# A document's key is a hash of its position in the inputs. The shards hold all documents in the
# order of their keys: a shuffle that is the same for any number of processes. First, processes
# parse the files into runs on disk, RUN_BYTES of text each, sorted by key. The keys and lengths of
# all documents (16 bytes each) decide which of them a row group holds. Then each shard collects its
# documents from all runs.

class Options(NamedTuple):
    """How documents are read."""
    text_key: str | None = None       # where a record has its text: 'a.b' is b in a
    messages_key: str | None = None   # ... its conversation; None: in one of SHAPES
    keep: Sequence[str] = ()          # columns beside the documents
    as_text: Sequence[str] = ()       # patterns of names of plain text
    delimiter: str | None = None      # of CSV
    cut_bytes: int | None = None      # of plain text
    ignore_keys: Sequence[str] = ()   # of messages
    skip_bad: bool = False
    seed: int = 0
    longest_val: int = 0              # bytes of a document in val; convert sets it

    @property
    def kind(self):
        """The column of the documents in a shard."""
        return "text" if self.text_key else "messages"

@dataclass
class Report:
    """What was read and what was not."""
    counts: collections.Counter = field(default_factory=collections.Counter)
    problems: list = field(default_factory=list)    # the first bad documents
    columns: set = field(default_factory=set)       # those that were dropped
    dropped: collections.Counter = field(default_factory=collections.Counter)    # keys of messages
    examples: dict = field(default_factory=dict)    # of dropped keys

    def add_problem(self, message):
        self.counts["bad"] += 1
        self.problems = [*self.problems, message][:BAD_SHOWN]

    def add_document(self, document, path):
        self.counts["documents"] += 1
        self.counts["bytes"] += len(document.text)
        self.counts["empty"] += not document.text
        if len(self.columns) < 100:
            self.columns.update(document.columns)
        for key, value in document.dropped:
            self.dropped[key] += 1
            self.examples.setdefault(key, f"{path}, {document.where}: {value!r:.60}")

    def merge(self, other):
        self.counts += other.counts
        self.problems = (self.problems + other.problems)[:BAD_SHOWN]
        self.columns |= other.columns
        self.dropped += other.dropped
        self.examples = other.examples | self.examples

def convert(inputs, out, options=Options(), workers=None, executor=None):  # noqa: B008, a tuple
    """
    Write the documents of files, folders and globs as shards; the last, about 1 % of them, is val.
    `out` appears atomically, once complete. Returns (Report, files read, files ignored, shards).

    UserError names file and line of the first bad document; skip_bad reports bad documents and
    unreadable files instead. The workers of an `executor` must see the same paths; `workers` says
    how many there are.
    """
    out = check_out(out)
    files, ignored = find_inputs(inputs, options.as_text)
    check_options(options, files)
    total = sum(file.size for file in files)
    if not (options.text_key or options.messages_key or holds_messages(files[0], options)):
        options = options._replace(text_key="text")
    options = options._replace(longest_val=total // 20)
    n_processes = min(workers or max(1, total // BYTES_PER_PROCESS), cores())
    ahead = 4 * (workers if executor else n_processes)
    report = Report()
    with pool_of(executor, n_processes) as pool, building_folder(out) as building:
        scatter = functools.partial(scatter_files, options=options, building=building)
        tasks = list(group_files(files, total))
        for part in run_all(pool, scatter, tasks, ahead, "read"):
            report.merge(part)
        check_enough(report, files)
        shards = list(plan_shards(*keys_and_lengths(building)))
        gather = functools.partial(gather_shard, building=building, kind=options.kind)
        run_all(pool, gather, list(enumerate(shards)), ahead, "write")
        index = dataset.write_index(f"{building}/shards")
        n_written = sum(sum(entry["rows"]) for entry in index["shards"].values())
        assert n_written == report.counts["documents"]
        os.rename(f"{building}/shards", out)    # also onto an empty folder
    return report, files, ignored, len(shards)

def check_out(out):
    """The target of a link stays where it is, and is what appears."""
    if "://" in out:
        raise UserError(f"cannot write to {out}; name a local folder, then copy it there")
    out = os.path.realpath(out)
    is_here = out == os.getcwd()
    if is_here or os.path.isfile(out) or os.path.ismount(out):
        raise UserError(
            f"cannot make {out} anew: it is a file, a mount point or the folder you are in; name a "
            "folder in or beside it with --out")
    if os.path.isdir(out) and os.listdir(out):
        raise UserError(f"{out} is not empty; name a new folder with --out, or remove it first")
    return out

def check_options(options, files):
    reserved = {"text", "messages", "tokens", options.text_key, options.messages_key}
    clash = reserved & {*options.keep}
    if clash:
        raise UserError(f"--keep {min(clash)}: shards hold the documents in a column of that name")
    if options.cut_bytes and not any(file.suffix in PLAIN for file in files):
        raise UserError("--cut_bytes cuts plain text, and here is none; name it by --as_text")

def check_enough(report, files):
    """A train and a val shard need a document each."""
    n = report.counts["documents"]
    if n >= 2:
        return
    message = f"{counted(n, 'document')}, but train and val need at least one each"
    if report.counts["bytes"] > 1 and files[0].suffix in PLAIN:
        cut = min(10_000, 1 + report.counts["bytes"] // 16)
        message += f"; to cut a long one at its blank lines, add --cut_bytes {cut}"
    if report.problems:
        message += f"; skipped: {report.problems[0]}"
    raise UserError(message)

# --------------------------------------------------------------------------------------------------
# Reading documents

class Document(NamedTuple):
    where: str               # 'line 3'
    text: bytes | None       # UTF-8
    kept: Sequence = ()      # values of the columns to keep
    columns: Sequence = ()   # names of those that are lost
    dropped: Sequence = ()   # (key, value) of what messages lose
    problem: str = ""        # instead of a text

UNREADABLE = (
    OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, csv.Error, pa.ArrowException)

def documents_of(file, options):
    """Each Document of a file; of a bad one, or of the rest of an unreadable file, its problem."""
    place = "unreadable"
    try:
        for where, record in records_of(file, options):
            place = f"unreadable after {where}"
            try:
                yield make_document(where, parse(record), options)
            except (ValueError, RecursionError) as error:
                yield Document(where, None, problem=explain(error))
    except UNREADABLE as error:
        yield Document(place, None, problem=explain(error))

def records_of(file, options):
    """(where, record) of each line, row or plain text; a record is a dict, or JSON as bytes."""
    suffix = os.path.splitext(file.path.lower())[1]
    with pa.OSFile(file.path) as raw:
        if suffix == ".xz":
            stream = lzma.LZMAFile(raw)  # noqa: SIM115, closed with the stream below it
        elif suffix in CODECS:    # pyarrow's gzip reads 495 MB/s of JSON lines, Python's 353
            stream = pa.CompressedInputStream(raw, CODECS[suffix])
        else:
            stream = raw
        if file.suffix not in TABLES:
            stream = io.BufferedReader(stream, 1 << 16)    # a truncated file loses less than this
            if stream.peek(3).startswith(BOM_UTF8):
                stream.read(3)
        yield from READERS[file.suffix](stream, options)

def read_json(stream, options):
    """One array of records, or one record in each line, which may be an array of messages."""
    start = stream.peek(100)
    if re.match(rb'\s*\[(?!\s*{\s*"(role|content|from|value|name|weight)")', start):
        records = json.loads(read_whole(stream).decode())
        for number, record in enumerate(records):
            yield f"document {number}", record
    else:
        for number, line in enumerate(lines_of(stream), 1):
            if not line.isspace():
                yield f"line {number}", line

def read_csv(stream, options, delimiter=None):
    """By default, the delimiter is the comma, semicolon or tab that is most frequent in line 1."""
    csv.field_size_limit(LONGEST_DOCUMENT)
    lines = (line.decode() for line in lines_of(stream))
    header = next(lines, "")
    delimiter = options.delimiter or delimiter or max(",;\t", key=header.count)
    lines = itertools.chain([header], lines)
    rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
    columns_to_read(rows.fieldnames or [], options)
    for row in rows:
        if None in row:
            row = UserError(f"{len(row[None])} fields more than the first line names: quote texts")
        yield f"line {rows.line_num}", row

def read_text(stream, options):
    for start, part in cut_text(read_whole(stream), options.cut_bytes):
        yield f"byte {start}", {options.text_key or "text": part}

def read_parquet(stream, options):
    file = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
    columns = columns_to_read(file.schema_arrow.names, options)
    batches = file.iter_batches(ROW_GROUP_DOCUMENTS, columns=columns, use_threads=False)
    yield from rows_of(batches, file.schema_arrow.names, columns)

def read_arrow(stream, options):
    """Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if is_file:
        file = pa.ipc.open_file(stream)
        batches = map(file.get_batch, range(file.num_record_batches))
    else:
        file = batches = pa.ipc.open_stream(stream)
    columns = columns_to_read(file.schema.names, options)
    yield from rows_of(batches, file.schema.names, columns)

def rows_of(batches, names, columns):
    unread = dict.fromkeys(names)
    row = itertools.count()
    for batch in batches:
        for record in batch.select(columns).to_pylist():
            yield f"row {next(row)}", unread | record

# How a file is read, by the end of its name. Compressed text: .jsonl.gz, .txt.zst and so on
READERS = {
    ".jsonl": read_json, ".ndjson": read_json, ".json": read_json,
    ".csv": read_csv, ".tsv": functools.partial(read_csv, delimiter="\t"),
    ".txt": read_text, ".md": read_text,
    ".parquet": read_parquet, ".pq": read_parquet,
    ".arrow": read_arrow, ".feather": read_arrow}
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".xz": "Python's"}
PLAIN = (".txt", ".md")
TABLES = (".parquet", ".pq", ".arrow", ".feather")

def lines_of(stream):
    return iter(lambda: stream.readline(LONGEST_DOCUMENT), b"")    # memory is bounded

def read_whole(stream):
    data = stream.read(LONGEST_DOCUMENT + 1)
    if len(data) > LONGEST_DOCUMENT:
        raise UserError(f"over {LONGEST_DOCUMENT:,} bytes in one piece; write JSON lines instead")
    return data

def cut_text(data, cut_bytes):
    """(start, part) of at most cut_bytes, or all in one part."""
    start = 0
    while True:
        stop = start + (cut_bytes or len(data))
        if stop < len(data):
            stop = find_end(data, start, stop)
        yield start, data[start:stop]
        start = stop
        if start >= len(data):
            return

def find_end(data, start, stop):
    """The end of the last blank line, else line, else word, else character before `stop`."""
    for mark in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        at = data.rfind(mark, start, stop)
        if at >= 0:
            return at + len(mark)
    while stop > start + 1 and data[stop] & 0xC0 == 0x80:    # not in the middle of a character
        stop -= 1
    return stop

def parse(record):
    """A record as a dict, or as a list of messages."""
    if isinstance(record, Exception):
        raise record
    if not isinstance(record, bytes):
        return record
    try:
        return json.loads(record.decode())
    except json.JSONDecodeError as error:
        raise UserError(
            f"{error}; expected one whole JSON document in a line (jq -c . FILE)") from error

def make_document(where, record, options):
    """The Document of a dict, or of a list of messages; UserError if it has none."""
    if options.text_key:
        text = find_text(record, options.text_key)
        used = [options.text_key]
        dropped = ()
    else:
        messages, used = find_messages(record, options.messages_key)
        messages, dropped = clean_messages(messages, options.ignore_keys)
        text = json.dumps(messages, ensure_ascii=False)
    if isinstance(text, bytes):    # old versions of Hive and Impala write them for strings
        text.decode()    # an error, unless it is UTF-8
    else:
        text = text.encode()
    if len(text) > LONGEST_DOCUMENT:
        raise UserError(f"it has more than {LONGEST_DOCUMENT:,} bytes; cut it into documents")
    kept = [lookup(record, name) for name in options.keep]
    columns = [*record] if isinstance(record, dict) else []
    for name in [*used, *options.keep]:
        column = name if name in columns else name.partition(".")[0]
        if column in columns:
            columns.remove(column)
    return Document(where, text, kept, columns, dropped)

def find_text(record, key):
    text = lookup(record, key)
    if isinstance(text, str | bytes):
        return text
    if text is not None:
        raise UserError(
            f"{key!r} holds {type(text).__name__}, not a string; for conversations, add "
            f"--messages_key {key}")
    if find_shape(record):
        raise UserError(
            "a conversation among texts; convert conversations apart (train.py mixes: --data "
            "TEXTS:0.7 CHATS:0.3)")
    raise missing(key, record)

def lookup(record, key):
    """record["a"]["b"] for the key 'a.b', unless there is a key 'a.b'; None if there is neither."""
    if not isinstance(record, dict):
        return None
    if key in record:
        return record[key]
    head, _, rest = key.partition(".")
    return lookup(record.get(head), rest) if rest else None

def columns_to_read(names, options):
    """The columns with documents, and those to keep; UserError unless each is there once."""
    key = options.text_key or options.messages_key
    keys = [key] if key else find_shape(dict.fromkeys(names, ""))
    columns = []
    for key in [*keys, *options.keep]:
        column = key if key in names else key.partition(".")[0]
        if names.count(column) > 1:
            raise UserError(f"{names.count(column)} columns are named {column!r}; rename them")
        if column not in names:
            raise missing(key, names, "--keep" if key in options.keep else None)
        columns.append(column)
    return list(dict.fromkeys(columns))

def missing(key, names, flag=None):
    """The error that there is nothing under a key."""
    if not isinstance(names, dict | list):
        names = [f"only a value of type {type(names).__name__}"]
    message = f"nothing under {key!r}; there is {', '.join(map(str, names)):.200}"
    if key not in names:
        head = key.partition(".")[0]
        for name in difflib.get_close_matches(head, map(str, names), 1):
            message += f"; did you mean {name}?"
    flag = flag or "--text_key, or for conversations --messages_key"
    return UserError(f"{message}; name it by {flag}")

def explain(error):
    """What an error says, in one line, and what to do."""
    if isinstance(error, UnicodeDecodeError):
        return f"{error}; expected UTF-8: iconv -f LATIN1 -t UTF-8 OLD > NEW (or -f UTF-16)"
    return printable(error)

# --------------------------------------------------------------------------------------------------
# Conversations
#
# Shards hold them as JSON: [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...].
# An assistant's content may be a list of parts, {"type": "text", "text": "Hello"}, of PARTS. With
# "weight": 0, a message is read and not learned. Which roles and parts a model knows depends on its
# template: encoding checks that.

# The columns of a conversation: the first of these that a record has
SHAPES = (
    ("messages",), ("conversations",),
    ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "input", "output"), ("instruction", "output"))
PARTS = ("text", "python", "python_output")
ROLES = {"human": "user", "gpt": "assistant"}    # ShareGPT's names
CONTENT_KEYS = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal", "audio")

def holds_messages(file, options):
    """Whether the first records of a file are conversations, and have no `text`."""
    records = records_of(file, options)
    with contextlib.closing(records), contextlib.suppress(*UNREADABLE):
        for _, record in itertools.islice(records, 10):
            with contextlib.suppress(ValueError, RecursionError):    # named when it is read again
                record = parse(record)
                if isinstance(record, list) or "text" in record or find_shape(record):
                    return "text" not in record
    return False

def find_shape(record):
    """The columns in which a record has a conversation; none if it has none."""
    if isinstance(record, dict):
        for columns in SHAPES:
            if all(record.get(name) is not None for name in columns):
                return columns
    return ()

def find_messages(record, key):
    """(its messages, their columns). A prompt and its completion are two of them."""
    if isinstance(record, list):
        return record, ()
    columns = (key,) if key else find_shape(record)
    if not columns:
        raise missing("messages", record)
    *questions, answer = [lookup(record, column) for column in columns]
    if not questions:
        return answer, columns
    if isinstance(questions[0], str):
        asked = "\n\n".join(filter(None, questions))
        questions = [{"role": "user", "content": asked}]
    else:
        questions = questions[0]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return questions + answer, columns

def clean_messages(messages, ignore_keys):
    """(messages as shards hold them, (key, value) of each that they lose)"""
    if isinstance(messages, str | bytes):
        messages = json.loads(messages)
    if not isinstance(messages, list) or not messages:
        raise UserError(
            "expected a list of messages, [{'role': 'user', 'content': 'Hi'}, ...], under "
            f"`messages` or --messages_key; saw {messages!r:.200}")
    cleaned = []
    dropped = []
    for i, message in enumerate(messages):
        try:
            kept, rest = clean_message(message, ignore_keys)
        except UserError as error:
            raise UserError(f"message {i}: {error}; saw {message!r:.300}") from error
        cleaned.append(kept)
        dropped += rest.items()
    if not any(message["role"] == "assistant" for message in cleaned):
        raise UserError(f"no message of an assistant, so nothing to learn; saw {messages!r:.200}")
    return cleaned, dropped

def clean_message(message, ignore_keys):
    """(its role, content and weight; all else)"""
    if not isinstance(message, dict):
        raise UserError("expected {'role': 'user', 'content': 'Hi'}")
    rest = {key: value for key, value in message.items() if value is not None}    # parquet's nulls
    if "from" in rest and "value" in rest:
        sender = rest.pop("from")
        rest["role"] = ROLES.get(sender, sender)
        rest["content"] = rest.pop("value")
    role, content = rest.pop("role", None), rest.pop("content", None)
    for key in CONTENT_KEYS:
        if rest.get(key) and key not in ignore_keys:
            raise UserError(f"its {key} would be lost (if it may be: --ignore_keys {key})")
        if rest.get(key) and not content:
            raise UserError(f"without its {key}, nothing is left")
    if not isinstance(role, str):
        raise UserError("expected a role, such as 'user'")
    if isinstance(content, list):
        content = clean_parts(content, role == "assistant")
    elif not isinstance(content, str):
        raise UserError("expected a string or a list of parts as its content")
    kept = {"role": role, "content": content}
    if "weight" in rest:
        kept["weight"] = rest.pop("weight")
        if kept["weight"] not in (0, 1):
            raise UserError("expected a weight of 0 or 1")
    return kept, rest

def clean_parts(parts, is_answer):
    """Parts of an answer; the text of other parts."""
    known = PARTS if is_answer else ("text",)
    cleaned = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in known or not isinstance(part.get("text"), str):
            raise UserError(
                f"expected parts as {{'type': T, 'text': '...'}}, T one of {', '.join(known)}")
        cleaned.append({"type": kind, "text": part["text"]})
    return cleaned if is_answer else "".join(part["text"] for part in cleaned)

# --------------------------------------------------------------------------------------------------
# The shuffle

KEY, DOCUMENT = "nanoloader.key", "nanoloader.text"    # columns of a run

def group_files(files, total):
    """Small files share a run: (task number, [(file number, file), ...])"""
    number, group, size = 0, [], 0
    for file_number, file in enumerate(files):
        group.append((file_number, file))
        size += file.size
        if size >= min(RUN_BYTES, total // 64) or file_number == len(files) - 1:
            yield number, group
            number, group, size = number + 1, [], 0

def scatter_files(task, options, building):
    """Write the documents of some files as sorted runs. Returns a Report."""
    number, files = task
    path = f"{building}/runs/{number:08d}"
    report = Report()
    run = []
    size = n_runs = 0
    for file_number, file in files:
        for index, document in enumerate(documents_of(file, options)):
            if document.problem:
                problem = f"{file.path}, {document.where}: {document.problem}"
                if not options.skip_bad:
                    raise UserError(f"{problem} (to skip what is bad: --skip_bad)")
                report.add_problem(problem)
                continue
            report.add_document(document, file.path)
            key = key_of(document, file_number, index, options)
            run.append((key, document.text, document.kept))
            size += len(document.text)
            if size >= RUN_BYTES:
                write_run(f"{path}-{n_runs:05d}.arrow", run, options.keep, file)
                run = []
                size = 0
                n_runs += 1
    if run:
        write_run(f"{path}-{n_runs:05d}.arrow", run, options.keep, file)
    return report

def write_run(path, run, keep, last_file):
    """run: (key, text, kept values) of each document."""
    run.sort(key=lambda document: document[0])
    keys, texts, kept = zip(*run, strict=True)
    columns = {KEY: pa.array(keys, pa.uint64())}
    columns[DOCUMENT] = join_texts(texts, pa.large_binary())
    for name, values in zip(keep, zip(*kept, strict=True), strict=True):
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError) as error:
            raise UserError(
                f"--keep {name}: {error}; expected values of one type, in {last_file.path} or "
                "before it") from error
    table = pa.table(columns)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)

def key_of(document, file_number, index, options):
    """A hash of its position. Val has the largest; halves keep a large document out of it."""
    position = b"%d %d %d" % (options.seed, file_number, index)
    digest = hashlib.blake2b(position, digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    return key // 2 if len(document.text) > options.longest_val else key

def join_texts(texts, kind):
    """Bytes objects or memoryviews as an Arrow array; by one join, see dev/log.md."""
    dtype = np.int32 if kind == pa.string() else np.int64
    offsets = np.cumsum([0, *map(len, texts)], dtype=dtype)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(texts), buffers)

def open_runs(building):
    """Memory-mapped batches, each sorted by key."""
    paths = sorted(glob.glob(f"{glob.escape(building)}/runs/*.arrow"))
    return [pa.ipc.open_file(pa.memory_map(path)).get_batch(0) for path in paths]

def keys_and_lengths(building):
    """(keys, lengths) of all documents, sorted by key."""
    keys = [np.zeros(0, np.uint64)]
    lengths = [np.zeros(0, np.int64)]
    for run in open_runs(building):
        keys.append(run[KEY].to_numpy())
        lengths.append(pc.binary_length(run[DOCUMENT]).to_numpy())
    keys = np.concatenate(keys)
    lengths = np.concatenate(lengths)
    order = np.argsort(keys, kind="stable")
    return keys[order], lengths[order]

def plan_shards(keys, lengths):
    """
    For each shard, the (first key, last key) of its row groups. The last shard is val: 1 % of the
    documents, or VAL_DOCUMENTS, or a tenth, if that is fewer. The others have equal bytes.
    """
    n = len(keys)
    n_val = max(1, n // 100, min(VAL_DOCUMENTS, n // 10))
    n_train = n - n_val
    ends = np.cumsum(lengths + 1)    # + 1: all documents may be empty
    n_shards = round(int(lengths.sum()) / SHARD_BYTES) - 1
    n_shards = max(4, n_shards)    # so that cores share a small corpus
    targets = ends[n_train - 1] * np.arange(1, n_shards) / n_shards
    cuts = np.searchsorted(ends[:n_train], targets) + 1
    borders = np.unique([0, *cuts, n_train, n])
    for first, last in itertools.pairwise(borders):
        rows = min(ROW_GROUP_DOCUMENTS, max(1, (last - first) // 16))
        groups = plan_row_groups(lengths[first:last], rows)
        groups = [(first + start, first + stop - 1) for start, stop in groups]
        yield [(keys[start], keys[end]) for start, end in groups]

def plan_row_groups(lengths, rows):
    """(start, stop) of row groups of `rows` documents, ROW_GROUP_BYTES, or one longer document."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        limit = ends[start] - lengths[start] + ROW_GROUP_BYTES
        n_fit = int(np.searchsorted(ends, limit, "right"))
        stop = min(start + rows, max(start + 1, n_fit))
        yield start, stop
        start = stop

def gather_shard(shard, building, kind):
    """Write one shard, a row group at a time."""
    number, row_groups = shard
    runs = open_runs(building)
    try:
        schema = pa.unify_schemas([run.schema for run in runs], promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"--keep: {error}; expected values of one type") from error
    kept = list(schema)[2:]
    for column in kept:
        if pa.types.is_null(column.type):
            raise UserError(f"--keep {column.name}: no document has a value there")
    tables = (gather_row_group(runs, first, last, kept, kind) for first, last in row_groups)
    dataset.write_shard(f"{building}/shards/shard_{number:05d}.parquet", tables, kind)

def gather_row_group(runs, first, last, kept, kind):
    """A table of all documents with keys from first to last, in the order of their keys."""
    parts, texts = [], []
    for run in runs:
        keys = run[KEY].to_numpy()
        start = keys.searchsorted(first)
        stop = keys.searchsorted(last, "right")
        part = run[start:stop]
        parts.append(part)
        data, offsets, _ = dataset.column_views(part[DOCUMENT])
        texts += [data[a:b] for a, b in itertools.pairwise(offsets.tolist())]
    keys = np.concatenate([part[KEY] for part in parts])
    order = np.argsort(keys, kind="stable")
    texts = [texts[i] for i in order.tolist()]
    columns = {kind: join_texts(texts, pa.string())}
    for column in kept:
        values = [part[column.name].cast(column.type) for part in parts]
        columns[column.name] = pa.concat_arrays(values).take(order)
    return pa.table(columns)

# --------------------------------------------------------------------------------------------------
# Which files

# Not documents; all but the first are Hugging Face's
ABOUT_DATA = (
    dataset.INDEX, "README.md", "dataset_info.json", "dataset_dict.json", "state.json")

class Input(NamedTuple):
    path: str
    size: int
    suffix: str    # of READERS

def find_inputs(inputs, as_text=()):
    """
    ([Input, ...], paths that are ignored). A file that is named is read; each file is read once.
    as_text: patterns of names; of folders and globs, only such files are read, as plain text.
    """
    found = {}
    ignored = []
    for given in inputs:
        paths = [given]
        if not os.path.isfile(given):
            paths, others = choose_files(given, as_text)
            ignored += others
        for path in paths:
            suffix = suffix_of(path, as_text) or suffix_of(path)
            if not suffix:
                raise UserError(f"cannot read {path}; {expected(as_text)}")
            if not path.isprintable():
                raise UserError(f"rename {path!a}: it is not UTF-8, or has control characters")
            file = Input(os.path.abspath(path), os.path.getsize(path), suffix)
            found.setdefault(os.path.realpath(path), file)
    ignored = [path for path in ignored if os.path.realpath(path) not in found]
    files = sorted(found.values(), key=lambda file: os.path.split(file.path))
    return files, ignored

def choose_files(given, as_text):
    """
    (paths to read, paths to ignore) of a folder or glob. To ignore: hidden or empty files, those
    about the data, of a val or test split beside train, of another kind, or below an index of ours.
    """
    if os.path.isdir(given):
        dataset.list_files(given)    # refuses tables and caches that also hold older versions
        root = given
        paths = files_below(given)
    else:
        root = re.split(r"[^/]*[*?[]", given)[0] or "."
        paths = filter(os.path.isfile, glob.glob(given, recursive=True))
    splits = {}
    ignored = []
    for path in paths:
        name = os.path.relpath(path, root).replace(os.sep, "/")
        if is_document(path, name, as_text):
            splits[path] = dataset.split_in_name(name)
        else:
            ignored.append(path)
    if "train" in splits.values():
        for path, split in list(splits.items()):
            if split in ("val", "test"):
                ignored.append(path)
                del splits[path]
    if not splits:
        raise UserError(f"{given}: no such files; {expected(as_text)}")
    return list(splits), ignored

def files_below(folder):
    """Follows links, and enters each folder once. One that cannot be read is an error."""
    def fail(error):
        raise error

    seen = set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in names:
            yield os.path.join(root, name)

def expected(as_text):
    names = ", ".join(as_text or READERS)
    return (
        f"expected names with {names} (of text also with {', '.join(CODECS)}): a file, a folder or "
        "a glob in quotes; other plain text: --as_text '*.SUFFIX'; unpack archives first")

def is_document(path, name, as_text):
    """name: below the folder that was named, whose own index does not count."""
    if "/." in f"/{name}" or not suffix_of(path, as_text) or not os.path.getsize(path):
        return False
    if os.path.basename(path) in ABOUT_DATA and not as_text:
        return False
    for _ in range(name.count("/")):
        path = os.path.dirname(path)
        if has_index(path):
            return False
    return True

@functools.lru_cache(maxsize=10_000)
def has_index(folder):
    """Whether it is a folder of shards that we wrote."""
    with contextlib.suppress(OSError, ValueError), open(f"{folder}/{dataset.INDEX}", "rb") as file:
        return {"format", "kind", "shards"} <= {*json.load(file)}
    return False

def suffix_of(path, as_text=()):
    """The one of READERS that says how to read a file: 'a/B.JSON.gz' -> '.json', or None."""
    name = os.path.basename(path)
    if as_text:
        is_text = any(fnmatch.fnmatch(name, pattern) for pattern in as_text)
        return ".txt" if is_text else None
    stem, suffix = os.path.splitext(name.lower())
    if suffix in CODECS:
        suffix = os.path.splitext(stem)[1]
    return suffix if suffix in READERS else None

# --------------------------------------------------------------------------------------------------
# Processes, and the folder that becomes `out`

@contextlib.contextmanager
def building_folder(out):
    """A hidden folder beside `out`. It is removed at the end; if we are killed, by the next run."""
    parent = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.convert")
    building = f"{parent}/building"
    lock = FileLock(f"{parent}/lock", timeout=0)
    try:
        with contextlib.suppress(NotImplementedError):    # some file systems have no locks
            lock.acquire()
        shutil.rmtree(building, ignore_errors=True)    # of a killed run
        os.makedirs(f"{building}/runs")
        os.makedirs(f"{building}/shards")
        yield building
    except Timeout as error:
        raise UserError(f"another convert writes {out}; wait, or name another --out") from error
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{error}, in {parent}; to write elsewhere, name another folder with --out") from error
    finally:
        if lock.is_locked:
            with ctrl_c_ignored():    # workers end at their next write
                shutil.rmtree(parent, ignore_errors=True)
                lock.release()

@contextlib.contextmanager
def pool_of(executor, n):
    """The given executor, else n processes, or one thread if n is 1."""
    if executor:
        yield executor
        return
    context = multiprocessing.get_context("spawn")    # pyarrow's threads do not survive a fork
    with ctrl_c_ignored():    # also by the processes, while they import
        is_small = n == 1
        pool = ThreadPoolExecutor(1) if is_small else ProcessPoolExecutor(
            n, context, end_with_parent)
        for _ in range(n):    # n tasks start n processes
            pool.submit(int)
    try:
        yield pool
    except BrokenExecutor as error:
        raise UserError("a process was killed; if memory is short: -w 1") from error
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

def end_with_parent():
    """In a worker: exit with the parent, and leave Ctrl-C to the parent."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)    # for those that start late
    threading.Thread(target=wait, daemon=True).start()

@contextlib.contextmanager
def dask_executor(address):
    """(an executor on a Dask cluster, the threads of all its workers); they see the same files."""
    if not address:
        yield None, None
        return
    from distributed import Client  # pip install distributed

    with Client(address) as client:
        try:
            client.run(exec, "import dev.convert")
        except ImportError as error:
            folder = os.path.dirname(os.path.abspath(dataset.__file__))
            raise UserError(
                f"a worker of {address} says: {error}; start all with our code and its packages: "
                f"PYTHONPATH={folder} dask worker {address}") from error
        yield client.get_executor(), sum(client.nthreads().values())

def in_order(executor, function, items, ahead):
    """(item, function(item)) of each item, in order, with at most `ahead` of them in flight."""
    items = iter(items)
    waiting = []
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

def run_all(pool, function, tasks, ahead, label):
    """[function(task), ...] in order, with a bar and at most `ahead` tasks in flight."""
    done = in_order(pool, function, tasks, ahead)
    done = tqdm(done, label, len(tasks), unit=" tasks", delay=1)
    return [result for _, result in done]

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
    add("--delimiter", help="of CSV (default: , or ; or tab, by its first line)")
    add("--cut_bytes", type=at_least_1, help="cut plain text to this size, at blank lines")
    add("--ignore_keys", **names, metavar="NAME", help="drop these of messages: reasoning_content")
    add("--skip_bad", action="store_true", help="skip and count bad documents, unreadable files")
    add("--seed", type=int, default=0, help="of the shuffle (default 0)")
    add("-w", "--num_workers", type=at_least_1, help="processes (default: up to one a core)")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster, whose workers see the same files "
        "and our code: PYTHONPATH=HERE dask worker ADDRESS")
    with errors_in_one_line():
        flags = parser.parse_args(argv)
        out = flags.out or dataset.default_data_dir()
        with dask_executor(flags.dask) as (executor, n_threads):
            options = Options(
                flags.text_key, flags.messages_key, flags.keep, flags.as_text, flags.delimiter,
                flags.cut_bytes, flags.ignore_keys, flags.skip_bad, flags.seed)
            workers = n_threads or flags.num_workers
            print_report(out, *convert(flags.inputs, out, options, workers, executor))

def print_report(out, report, files, ignored, n_shards):
    counts = report.counts
    empty = f" ({counts['empty']:,} of them empty)" if counts["empty"] else ""
    print(f"{counted(len(files), 'file')} -> {counted(counts['documents'], 'document')}{empty}, "
          f"{counts['bytes'] / 1e6:,.1f} MB, in {n_shards:,} shards, the last for val, in {out}")
    print_dropped(report.columns)
    for key, n in report.dropped.most_common():
        print(f"dropped from messages: {key}, {n:,} times, {printable(report.examples[key])}")
    if ignored:
        suffixes = {os.path.splitext(path)[1] or "none" for path in ignored}
        print(f"ignored {counted(len(ignored), 'file')}, such as {printable(ignored[0])}, with "
              f"suffix {printable(', '.join(sorted(suffixes))):.100}: hidden, empty, about the "
              "data, of a val or test split, of other kinds, or shards of ours; to convert one, "
              "name its path")
    if counts["bad"]:
        print(f"skipped bad documents or files: {counts['bad']:,}; the first:")
        for message in report.problems:
            print(f"  {message}")

def print_dropped(columns):
    if columns:
        names = printable(", ".join(sorted(columns)))[:200]
        print(f"dropped columns: {names} (to keep some: --keep NAME ...)", flush=True)

def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)

def counted(n, noun):    # 1, "file" -> "1 file";  1234, "file" -> "1,234 files"
    return f"{n:,} {noun}{'s' * (n != 1)}"

if __name__ == "__main__":
    from dev.convert import main  # under its own name, which workers can import
    main()
