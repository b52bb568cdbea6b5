"""
Make shuffled shards from your own text or chats.

    python -m dev.convert my_folder --out my_shards                   # all files that we can read
    python -m dev.convert 'my/**/*.jsonl.gz' --text_key data.content  # a key in a key
    python -m dev.convert book.txt --cut_bytes 2000                   # cut at blank lines
    python -m dev.convert chats.jsonl --out my_chats                  # in their usual forms

All text is written twice, so any amount of it is shuffled in bounded memory: 197 MB of JSON lines
take 3 s of one core, and 260 MB of memory (2 cores, 2026-11).

In this order: convert; the shuffle; records of files; documents of records; conversations; which
files; the folder and processes; the command.
"""

import sys

if __name__ == "__main__" and not __package__:
    sys.exit("usage: python -m dev.convert FILES --out FOLDER, typed where dataset.py is")

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
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import threading
from codecs import BOM_UTF8
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather
from tqdm import tqdm

import dataset
from dataset import UserError, cores, errors_in_one_line, printable
from tokenizer import ALL_ROLES, NANOCHAT, read_message, read_messages

RUN_BYTES = 32 << 20
TASKS = 256                        # at most: small files share a run
BYTES_PER_PROCESS = 100_000_000    # while a process starts, another one converts so much
SHARD_BYTES = 300_000_000          # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
VAL_DOCUMENTS = 64                 # at least, if there are ten times as many

# --------------------------------------------------------------------------------------------------
# Convert: files -> sorted runs -> shards
#
# A document's key is a hash of its position in the inputs. The shards hold all documents in the
# order of their keys: a shuffle that is the same for any number of processes. First, processes
# parse the files into runs on disk, RUN_BYTES of text each, sorted by key. All keys (8 bytes each)
# decide which of them a shard holds. Then each shard collects its documents from all runs.

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
    readers = [reader_of(path, flags.as_text) for _, path in files]
    if flags.cut_bytes and read_text not in readers:
        raise UserError("--cut_bytes cuts plain text, and here is none; name it by --as_text")
    total = sum(os.path.getsize(path) for _, path in files)
    n_processes = min(flags.num_workers or max(1, total // BYTES_PER_PROCESS), cores())
    n_tasks = min(TASKS, len(files))
    tasks = [files[i::n_tasks] for i in range(n_tasks)]
    with (building_folder(out) as building, errors_of_kept(),
          mapper(n_processes, flags.dask, building) as run):
        scatter = functools.partial(
            scatter_files, flags=flags, building=building, longest_val=total // 20)
        for part in tqdm(run(scatter, tasks), "read", n_tasks, unit=" tasks", delay=1):
            report.merge(part)
        kind = check_documents(report)
        n_documents = report.counts[kind]
        n_bytes = report.counts["bytes"]
        shards = plan_shards(building, n_bytes)
        gather = functools.partial(gather_shard, building=building, kind=kind)
        written = run(gather, range(len(shards)), shards)
        for _ in tqdm(written, "write", len(shards), unit=" shards", delay=1):
            pass
        dataset.write_index(f"{building}/shards")
        found = dataset.all_shards(f"{building}/shards")
        assert n_documents == sum(sum(shard.group_sizes) for shard in found)
        os.rename(f"{building}/shards", out)
    print(f"{counted(len(files), 'file')} -> {counted(n_documents, 'document')}, "
          f"{n_bytes / 1e6:,.1f} MB, in {len(shards):,} shards, the last for val, in {out}")
    for line in report.lines():
        print(line)

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

    def lines(self):
        return [f"{what}: {self.counts[what]:,}, such as {printable(example)}"
                for what, example in self.examples.items() if what not in ("text", "messages")]

def check_documents(report):
    """The column of the documents in a shard: 'text' or 'messages'."""
    text = report.examples.get("text")
    messages = report.examples.get("messages")
    if text and messages:
        raise UserError(
            f"{text} is a text, but {messages} a conversation; convert conversations apart "
            "(train.py mixes: --data TEXTS:0.7 CHATS:0.3)")
    kind = "messages" if messages else "text"
    n = report.counts[kind]
    if n < 2:
        raise UserError("; ".join([
            f"{counted(n, 'document')}, but train and val need at least one each (to cut plain "
            "text at blank lines: --cut_bytes 2000)", *report.lines()]))
    return kind

@contextlib.contextmanager
def errors_of_kept():
    """Arrow's errors beside those of single records are of --keep."""
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(f"--keep: {error}; expected values of one type") from error

# --------------------------------------------------------------------------------------------------
# The shuffle

KEY, DOCUMENT = "nanoloader.key", "nanoloader.document"    # columns of a run

def scatter_files(files, flags, building, longest_val):
    """Write the documents of some files as sorted runs. Returns a Report."""
    report = Report()
    rows = []
    n_bytes = 0
    for position, text, kept in good_documents(files, flags, report):
        name = b"0 %d %d" % position
        digest = hashlib.blake2b(name, digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        if len(text) > longest_val:
            key //= 2    # val has the largest keys
        rows.append((key, text, *kept))
        n_bytes += len(text) + len(str(kept))
        if n_bytes >= RUN_BYTES:
            write_run(building, rows, flags.keep)
            rows = []
            n_bytes = 0
    if rows:
        write_run(building, rows, flags.keep)
    return report

def good_documents(files, flags, report):
    """
    Yield ((number of its file, its number there), text as UTF-8, kept values) of those that are
    neither bad nor empty, which are counted. Unless skip_bad, the first bad one is a UserError.
    """
    for number, path in files:
        for index, (what, where, record) in enumerate(records_of(path, flags)):
            place = f"{path}, {where}"
            try:
                text, kept = make_document(record, flags, place, report)
            except Exception as error:    # what is bad may raise any
                problem = f"{place}: {printable(error)}{ADVICE.get(type(error), '')}"
                if not flags.skip_bad:
                    raise UserError(f"{problem} (to skip {what}: --skip_bad)") from error
                report.add(f"skipped {what}", problem)
                continue
            if text:
                yield (number, index), text, kept

def write_run(building, rows, keep):
    """rows: (key, text, kept values ...) of each document."""
    keys, texts, *kept = zip(*rows, strict=True)
    keys = pa.array(keys, pa.uint64())
    texts = pa.array(texts, pa.large_string())
    kept = map(pa.array, kept)
    table = pa.table([keys, texts, *kept], [KEY, DOCUMENT, *keep])
    path = f"{building}/runs/{keys[0]}"
    feather.write_feather(table.sort_by(KEY), path, "uncompressed", chunksize=len(rows))

def open_runs(building):
    """Memory-mapped tables, each sorted by key."""
    folder = f"{building}/runs"
    return [feather.read_table(f"{folder}/{name}", memory_map=True) for name in os.listdir(folder)]

def plan_shards(building, n_bytes):
    """
    The bounds of each shard: a row group has the documents from one key to before the next. The
    last shard is val: 1 % of the documents, or VAL_DOCUMENTS, or a tenth, if that is fewer. The
    others have equally many.
    """
    keys = np.concatenate([run[KEY] for run in open_runs(building)])
    keys.sort()
    n = len(keys)
    n_val = max(1, n // 100, min(VAL_DOCUMENTS, n // 10))
    n_shards = max(4, round(n_bytes / SHARD_BYTES))    # cores share a small corpus, too
    cuts = np.linspace(0, n - n_val, n_shards).astype(int)
    borders = np.unique([*cuts, n])
    keys = np.append(keys, np.uint64(2**64 - 1))
    shards = []
    for start, stop in itertools.pairwise(borders):
        rows = min(ROW_GROUP_DOCUMENTS, max(1, (stop - start) // 16))
        shards.append([*keys[start:stop:rows], keys[stop]])
    return shards

def gather_shard(number, bounds, building, kind):
    """Write the documents of all row groups, each in the order of their keys."""
    runs = open_runs(building)
    cuts = [run[KEY].to_numpy().searchsorted(bounds) for run in runs]

    def gather_rows(i):
        parts = [run[cut[i]:cut[i + 1]] for run, cut in zip(runs, cuts, strict=True)]
        table = pa.concat_tables(parts, promote_options="permissive").sort_by(KEY)
        for column in table.schema:
            if pa.types.is_null(column.type):
                raise UserError(f"--keep {column.name}: no document has a value there")
        return table.drop_columns(KEY).rename_columns({DOCUMENT: kind})

    tables = map(gather_rows, range(len(bounds) - 1))
    dataset.write_shard(f"{building}/shards/shard_{number:05d}.parquet", tables, kind)

# --------------------------------------------------------------------------------------------------
# Records of a file: readers yield (where, record) of each line, row or text. A record is a dict,
# JSON as bytes, or an error.

def records_of(path, flags):
    """(what is bad if the record is, where, record) of each. An error of the file is the last."""
    read = reader_of(path, flags.as_text)
    rest = "unreadable"
    try:
        for where, record in read(path, flags):
            yield "bad documents", where, record
            rest = f"unreadable after {where}"
    except Exception as error:    # a damaged file may raise any
        yield "the rest of bad files", rest, error

def open_stream(path):
    """Decompressed, by the file's name."""
    stream = pa.input_stream(path)
    return io.BufferedReader(stream, 1 << 16)    # a truncated file loses less than this

ARRAY = re.compile(rb"\s*\[")
ARRAY_OF_MESSAGES = re.compile(rb'\s*\[\s*{\s*"(role|content|from|value)"')    # one record

def read_json(path, flags):
    """One array of records, or one record in each line, which may be an array of messages."""
    with open_stream(path) as stream:
        begin = stream.peek(100).removeprefix(BOM_UTF8)
        is_record = ARRAY_OF_MESSAGES.match(begin) and not flags.text_key
        if ARRAY.match(begin) and not is_record:
            for number, record in enumerate(load_json(stream.read())):
                yield f"document {number}", record
            return
        for number, line in enumerate(stream, 1):
            if not line.isspace():
                yield f"line {number}", line

def read_csv(path, flags):
    """By default, the delimiter is the one of , ; | or tab that is most frequent in line 1."""
    csv.field_size_limit(sys.maxsize)
    with open_stream(path) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        header = lines.readline()
        delimiter = flags.delimiter or max(",;|\t", key=header.count)
        lines = itertools.chain([header], lines)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(rows, [])
        for fields in filter(None, rows):    # None: without empty lines
            record = dict_of_pairs([*zip(names, fields, strict=False)])
            if len(fields) != len(names):
                record = UserError(
                    f"{counted(len(fields), 'field')}, but {len(names)} in the first line; quote "
                    "texts, or name what divides columns: --delimiter ';'")
            yield f"line {rows.line_num}", record

def load_json(text):
    return json.loads(text, object_pairs_hook=dict_of_pairs)

def dict_of_pairs(pairs):
    """Of equal keys, Python itself takes the last. Here, such an object is an error instead."""
    record = dict(pairs)
    if len(record) < len(pairs):
        return UserError(f"a key is there twice: {pairs!r:.300}; remove one")
    return record

# Greedy: a piece has at most SIZE bytes, and ends where the first of these lets it
CUT = r"""
    .{1,SIZE} (?: (?<=\n\n) | (?<=\n\r\n) | \Z )    # after the last blank line, or at the end
    | .{1,SIZE} (?<=\n)                             # else after the last line
    | .{1,SIZE} (?<=[ ])                            # else after the last word
    | .{1,SIZE} (?![\x80-\xbf])                     # else after the last character
    | .                                             # else after a byte
    | ^$                                            # an empty file is an empty document
"""

def read_text(path, flags):
    """Pieces of about cut_bytes, as CUT says."""
    pattern = CUT.replace("SIZE", str(flags.cut_bytes or 1 << 30)).encode()
    with open_stream(path) as stream:
        data = stream.read().removeprefix(BOM_UTF8)
    for part in re.finditer(pattern, data, re.DOTALL | re.VERBOSE):
        yield f"byte {part.start()}", {flags.text_key or "text": part[0]}

def read_parquet(path, flags):
    file = pq.ParquetFile(path, page_checksum_verification=True)
    return rows_of(file.iter_batches(ROW_GROUP_DOCUMENTS, use_threads=False), flags)

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"    # Arrow itself reads a stream without it

def read_arrow(path, flags):
    """Feather and Arrow files, and the streams that Hugging Face's save_to_disk writes."""
    data = pa.memory_map(path).read_buffer()
    if data[:6] == b"ARROW1":
        reader = pa.ipc.open_file(data)
    elif data[-8:] == END_OF_STREAM:
        reader = pa.ipc.open_stream(data)
    else:
        raise ValueError("its end is missing; write or copy it again")
    return rows_of(reader.read_all().to_batches(ROW_GROUP_DOCUMENTS), flags)

NOT_READ = ()    # neither null nor a text

def rows_of(batches, flags):
    """Columns that nobody asks for are NOT_READ: they may have values that Python lacks."""
    keys = itertools.chain(*(columns for _, columns in forms_to_read(flags)))
    wanted = columns_of([*keys, *flags.keep])
    numbers = itertools.count()
    for batch in batches:
        names = batch.schema.names
        unread = dict.fromkeys(names, NOT_READ)
        read = [name for name in names if name in wanted]
        if "system" in names and "string" in str(batch.schema.field("system").type):
            read.append("system")    # beside a conversation
        for row in batch.select(read).to_pylist():
            yield f"row {next(numbers)}", unread | row

# How a file is read, by the end of its name. Compressed text: .jsonl.gz, .txt.zst and so on
READERS = {
    ".jsonl": read_json, ".ndjson": read_json, ".json": read_json,
    ".csv": read_csv, ".tsv": read_csv,
    ".txt": read_text, ".md": read_text,
    ".parquet": read_parquet, ".parq": read_parquet, ".pq": read_parquet,
    ".arrow": read_arrow, ".feather": read_arrow}
COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")

# --------------------------------------------------------------------------------------------------
# Documents of records

REFUSED = (
    "conversations that nanochat's template refuses, so train.py ends there unless its tokenizer "
    "is another's (to leave them out: --skip_bad)")

def make_document(record, flags, place, report):
    """(text as UTF-8, kept values). In the report: its kind and size, and what is dropped of it."""
    record = as_dict(record, flags)
    kind, columns = find_document(record, flags)
    values = [lookup(record, key) for key in columns]
    kept = [lookup(record, name) for name in flags.keep]
    other_keys = set()
    if kind == "messages":
        messages, other_keys = clean_messages(join_messages(values), flags.ignore_keys)
        if len(values) > 1 and isinstance(values[0], list):    # as TRL has it: a prompt
            for message in messages[:len(values[0])]:
                if message["role"] == "assistant":
                    message.setdefault("weight", 0)
        system = record.get("system", NOT_READ)    # ShareGPT and Alpaca have it beside the messages
        is_text = system is None or isinstance(system, str)
        if is_text and messages[0]["role"] != "system":
            columns = (*columns, "system")
            messages = [*as_messages("system", system), *messages] if system else messages
        try:
            read_messages(messages, NANOCHAT)
        except UserError as error:
            if flags.skip_bad:
                raise
            report.add(REFUSED, f"{place}: {error}")
        text = json.dumps(messages, ensure_ascii=False)
    else:
        text = plain_text(values[0], columns[0])
    text = text.encode()
    report.add(kind if text else "skipped null or empty documents", place)
    report.counts["bytes"] += len(text)
    dropped = {
        f"dropped columns (read: {', '.join(columns)})":
            record.keys() - columns_of([*columns, *flags.keep]),
        "dropped keys of messages": other_keys}
    for what, names in dropped.items():
        if names:
            report.add(what, f"{place}: {', '.join(sorted(names))}")
    return text, kept

def plain_text(value, column):
    if value is None:
        return ""
    if isinstance(value, bytes):    # plain text; old versions of Hive write it for strings, too
        return value.decode()
    if not isinstance(value, str):
        raise UserError(
            f"{column!r} holds {type(value).__name__}, not a string; for conversations, add "
            f"--messages_key {column}")
    return value

def as_dict(record, flags):
    """Of a record, which may also be a list of messages."""
    if isinstance(record, bytes):
        record = load_json(record)
    if isinstance(record, Exception):
        raise record
    if isinstance(record, list):
        record = {flags.messages_key or "messages": record}
    if not isinstance(record, dict):
        raise UserError(f"saw {record!r:.200}, expected such as {{'text': 'Hello'}}")
    return record

# The columns of a conversation
CHATS = (
    ("messages",), ("conversations",),
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"),
    ("instruction", "input", "output"), ("instruction", "output"),
    ("instruction", "context", "response"), ("instruction", "response"))
FORMS = [("text", ("text",)), *(("messages", columns) for columns in CHATS)]

def forms_to_read(flags):
    """[(kind, columns)] of documents. --messages_key may name the first of several columns."""
    if flags.text_key:
        return [("text", (flags.text_key,))]
    key = flags.messages_key
    if key:
        chats = [*CHATS, (key,)]
        return [("messages", columns) for columns in chats if columns[0] == key]
    return FORMS

def find_document(record, flags):
    """(kind, columns) of a document: ('text', ('text',)), ('messages', ('prompt', 'response'))"""
    found = {}
    for kind, columns in forms_to_read(flags):
        if kind not in found and None not in [lookup(record, key) for key in columns]:
            found[kind] = columns
    if len(found) == 2:
        key = found["messages"][0]
        raise UserError(f"it has 'text' and {key!r}; choose: --text_key text, or for "
                        f"conversations --messages_key {key}")
    if found:
        return found.popitem()
    key = flags.text_key or flags.messages_key or "text"
    if is_null(record, key):
        return "text", (key,)
    raise UserError(
        f"nothing under {key!r}; saw {[*record]!r:.300}; name the key by --text_key (b in a: a.b), "
        "or for conversations by --messages_key")

def lookup(record, key):
    """record["a"]["b"] for the key 'a.b', unless there is a key 'a.b'; None if there is neither."""
    head, _, rest = key.partition(".")
    value = record.get(key if key in record else head)
    if isinstance(value, Exception):    # see dict_of_pairs
        raise value
    if key in record:
        return value
    return lookup(value, rest) if isinstance(value, dict) else None

def is_null(record, key):
    """Whether the value under 'a.b' is a null, or that under 'a'."""
    if key in record:
        return record[key] is None
    head, dot, rest = key.partition(".")
    inner = record.get(head, ())
    return dot and (inner is None or (isinstance(inner, dict) and is_null(inner, rest)))

def columns_of(keys):
    """Of a key 'a.b', the column is 'a.b' or 'a'."""
    return {*keys, *(key.partition(".")[0] for key in keys)}

# What to do, beside what an error says
ADVICE = {
    UnicodeDecodeError: "; expected UTF-8: iconv -f LATIN1 -t UTF-8 OLD > NEW (or -f UTF-16)",
    csv.Error: '; expected quotes around a text, and "" for a quote in it',
    json.JSONDecodeError:
        "; expected one JSON document in a line, or an array of them; if it was cut off, copy it "
        "again, else: jq -c . OLD > NEW.jsonl"}

# --------------------------------------------------------------------------------------------------
# Conversations
#
# Shards hold them as JSON: [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...].
# An assistant's content may be a list of parts, {"type": "text", "text": "Hello"}. With
# "weight": 0, a message is read and not learned. Some template of tokenizer.py knows its role and
# parts; encoding checks that the tokenizer's does.

SHAREGPT = {"human": "user", "gpt": "assistant"}    # its names; "User" is "user"

def join_messages(values):
    """Of messages; of a prompt and its completion; of an instruction, its input and output."""
    *questions, answer = values
    if not questions:
        return answer
    if len(questions) == 2:
        questions = ["\n\n".join(filter(None, questions))]
    return [*as_messages("user", *questions), *as_messages("assistant", answer)]

def as_messages(role, content):
    return content if isinstance(content, list) else [{"role": role, "content": content}]

def clean_messages(messages, ignore_keys):
    """(messages as shards hold them, the names of their other keys)"""
    if isinstance(messages, str | bytes):
        messages = load_json(messages)
    cleaned = []
    other_keys = set()
    for i, message in enumerate(messages):
        try:
            kept, others = clean_message(message, ignore_keys)
        except Exception as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"message {i}: {problem}; saw {message!r:.300}, expected such as "
                "{'role': 'user', 'content': 'Hi'}; to drop other keys, if there is content: "
                "--ignore_keys KEY") from error
        cleaned.append(kept)
        other_keys |= others
    learned = [
        message for message in cleaned
        if message["role"] == "assistant" and message["content"] and message.get("weight", 1)]
    if not learned:
        raise UserError(
            "nothing to learn: expected a message of an assistant, not empty, of weight 1; saw "
            f"{messages!r:.200}")
    return cleaned, other_keys

def clean_message(message, ignore_keys):
    """(its role, content and weight; the names of its other keys)"""
    message = {key: value for key, value in message.items() if value is not None}    # parquet's
    if "from" in message and "value" in message:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value")
    if message.get("content"):    # else, it may be in the key to ignore
        for key in ignore_keys:
            message.pop(key, None)
    role = message["role"].lower()
    message["role"] = SHAREGPT.get(role, role)
    read = read_message(message, ALL_ROLES, NANOCHAT)
    if read.role != "assistant":
        ((_, message["content"]),) = read.parts
    kept = {key: message[key] for key in ("role", "content", "weight") if key in message}
    return kept, message.keys() - kept

# --------------------------------------------------------------------------------------------------
# Which files

# Not documents; all but the first are Hugging Face's
ABOUT_DATA = (
    dataset.INDEX, "README.md", "dataset_info.json", "dataset_dict.json", "state.json")

def find_files(flags, report):
    """[(number, path), ...], each file once, in the order of folders and names."""
    paths = {}    # by real path
    for given in flags.inputs:
        for path in choose_files(given, flags.as_text, report):
            paths.setdefault(os.path.realpath(path), os.path.abspath(path))
    paths = sorted(paths.values(), key=os.path.split)
    unpacked = {}
    for path in paths:
        stem, suffix = os.path.splitext(path)
        name = stem if suffix in COMPRESSED else path
        other = unpacked.setdefault(name, path)
        if other != path:
            raise UserError(
                f"{other} and {path} seem to be copies; remove one, or name the files to read")
    return [*enumerate(paths)]

def choose_files(given, as_text, report):
    """The paths to read of a file, folder or glob. Others are counted in the report."""
    if os.path.isfile(given) and reader_of(given, as_text):
        return [given]
    pattern = given
    if os.path.isdir(given):
        dataset.list_files(given)    # refuses older versions, circular links, unreadable folders
        pattern = f"{glob.escape(given)}/**"
    found = glob.glob(pattern, recursive=True)
    paths = [path for path in found if not os.path.isdir(path)]
    splits = {path: dataset.split_in_name(path.removeprefix(given)) for path in paths}
    has_train = "train" in splits.values() and not as_text
    chosen = []
    for path, split in splits.items():
        reader = reader_of(path, as_text)
        is_hidden = os.path.isdir(given) and dataset.HIDDEN.search(path.removeprefix(given))
        if not reader:
            reason = "of other kinds"
        elif is_hidden and reader is not read_text:    # __init__.py is a file as any
            reason = "hidden, as Spark's _temporary"
        elif os.path.basename(path) in ABOUT_DATA and not as_text:
            reason = "about the data"
        elif has_train and split in ("val", "test"):
            reason = "of a val or test split beside train"
        elif is_ours(path):
            reason = "shards that we wrote, val among them (to read one, name the file)"
        else:
            chosen.append(path)
            continue
        report.add(f"ignored files, {reason}", path)
    if not chosen:
        raise UserError("; ".join([
            f"{given} does not exist or has no files to read", *report.lines(),
            f"expected names with {', '.join(READERS)} (of text also with "
            f"{', '.join(COMPRESSED)}): a file, a folder or a glob in quotes; other plain text: "
            "--as_text '*.SUFFIX'; unpack archives first"]))
    return chosen

def is_ours(path):
    """Whether it is a shard that we wrote."""
    with contextlib.suppress(OSError, pa.ArrowException):
        return dataset.CHECKSUMS.encode() in (pq.read_metadata(path).metadata or {})

def reader_of(path, as_text):
    """How to read a file, by its name, or None. as_text: patterns of names; others are None."""
    name = os.path.basename(path)
    if as_text:
        is_text = any(fnmatch.fnmatch(name, pattern) for pattern in as_text)
        return read_text if is_text else None
    stem, suffix = os.path.splitext(name)
    if suffix in COMPRESSED:
        _, suffix = os.path.splitext(stem)
    return READERS.get(suffix.lower())

# --------------------------------------------------------------------------------------------------
# The folder that becomes `out`, and processes

def check_out(out):
    """The target of a link stays where it is, and is what appears."""
    out = os.path.realpath(out)
    try:
        os.rmdir(out)    # what cannot be removed cannot be replaced: a mount point, too
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"{error}; name a new folder with --out, or remove it first") from error
    return out

@contextlib.contextmanager
def building_folder(out):
    """A hidden folder beside `out`, removed at the end."""
    folder, name = os.path.split(out)
    building = f"{folder}/.{name}.convert"
    with errors_of_disk(building):
        try:
            os.makedirs(building)
        except FileExistsError as error:
            raise UserError(
                f"{building} exists: another convert writes {out}, or was killed; wait for it, or "
                f"rm -r {shlex.quote(building)}") from error
        try:
            os.mkdir(f"{building}/runs")
            yield building
        finally:
            with ctrl_c_ignored():
                shutil.rmtree(building, ignore_errors=True)

@contextlib.contextmanager
def errors_of_disk(folder):
    """An OSError may name no path; ours do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error}, in {folder}; to write elsewhere, name another folder with --out") from error

@contextlib.contextmanager
def mapper(n, dask, building):
    """`map` itself, or that of n processes or of a Dask cluster."""
    if dask:
        with dask_client(dask) as client:
            yield client.get_executor().map
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
        with ctrl_c_ignored():    # a shutdown that is interrupted may never end
            shutil.rmtree(building, ignore_errors=True)    # so that processes end soon
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

def dask_client(address):
    """Its workers must see the same files."""
    from distributed import Client  # pip install distributed

    folder = os.path.dirname(dataset.__file__)
    try:
        client = Client(address)
        client.run_on_scheduler(exec, "import dev.convert")
        client.run(exec, "import dev.convert")
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"no Dask cluster at {address}: {error}; start a scheduler and workers, with our "
            f"packages and code: export PYTHONPATH={folder}") from error
    return client

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
    add("--out", type=dataset.local_folder,
        help="folder, new or empty (default: where train.py looks)")
    add("--text_key", help="key or column that holds the text (default text); a.b: b in a")
    add("--messages_key", help="that of conversations (default messages or conversations, or a "
        "prompt and its completion or response, or instruction, input and output)")
    add("--keep", **names, metavar="NAME", type=column_to_keep, help="columns beside the text")
    add("--as_text", **names, metavar="GLOB", help="read only these files, as plain text: '*.py'")
    add("--delimiter", help="of CSV (default: , ; | or tab, by its first line)")
    add("--cut_bytes", type=at_least_1,
        help="cut plain text to this size, at blank lines (default 1 GiB)")
    add("--ignore_keys", **names, metavar="NAME", help="drop these of messages: reasoning_content")
    add("--skip_bad", action="store_true", help="skip and count bad documents, unreadable files")

    add("-w", "--num_workers", type=at_least_1, help="processes (default: up to one a core)")
    add("--dask", metavar="ADDRESS", help="run on a Dask cluster that sees the same files and our "
        "code: first export PYTHONPATH=HERE, then start its scheduler and workers")
    with errors_in_one_line():
        convert(parser.parse_args(argv))

def column_to_keep(name):
    if name in ("text", "messages", "tokens"):
        raise argparse.ArgumentTypeError(f"{name}: a column of that name has the documents")
    return name

def at_least_1(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)

def counted(n, noun):    # 1, "file" -> "1 file";  1234, "file" -> "1,234 files"
    return f"{n:,} {noun}{'s' * (n != 1)}"

if __name__ == "__main__":
    main()
