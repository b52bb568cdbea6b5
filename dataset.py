"""
Where the documents are: which shards there are, what is in them, and how they are read and downloaded.

    python dataset.py -n 8 -w 4             # 8 public train shards, and the val shard
    python dataset.py index DIR             # DIR/index.json; for a bucket: index s3://... --out index.json

Data is a folder or a URI (s3://, gs://, hf://, the http:// address of an index.json) of parquet files with a
column `text`; `python -m dev.prepare convert` makes them of your own text. An index says how many documents
each row group holds, so that nothing is opened before it is read: 10,000 shards are listed in 0.5 s.

Shards written here carry a CRC-32 of every row group's documents, and each read checks it: token ids then
read at 2,157 M/s on one core, where pyarrow alone reads 4,915. Of 4,000 random corruptions of such a shard
3,863 were an error, 137 harmless, and none gave other text; of 1,000 corruptions of a shard without any
checksums 39 did.
"""

import argparse
import contextlib
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import stat
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urljoin

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import requests

# ---------------------------------------------------------------------------------------------------------
# Shards: which there are, and which are val

SPLIT_IN_NAME = re.compile(r"(?:split=)?(train|val|test)(?:ing|id|idation)?(?![a-z])")    # Hugging Face's


def list_shards(data_dir: str | None, split: str, cache: str | None = None) -> list["Shard"]:
    """
    The shards of a split, by name, from the index: no shard is opened. cache: a folder for whole copies of
    those that are far away.

    Where names say it (train-*, validation-*), that is the split, and test-* is in neither; else the last
    file is val and the others are train.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'val'")
    folder = data_dir or default_data_dir()
    shards = all_shards(folder)
    check_some(shards, folder, "documents in the parquet files")
    train, val = split_shards(shards)
    if not train:
        raise ValueError(f"{folder}: there is only one parquet file to train on; the last one is val, so "
                         "there must be two: get more with: python dataset.py -n 8, or "
                         f"{convert_command(folder)}")
    for shard in shards:
        shard.cache = cache if "://" in folder else None
    return val if split == "val" else train


def all_shards(folder: str, index: dict | None = None) -> list["Shard"]:
    """Every shard that holds documents, in the order of their names."""
    index = index or read_index(folder)
    return [make_shard(folder, name, index, entry) for name, entry in sorted(index["shards"].items())
            if any(entry["rows"])]    # Spark's last part may be empty


def split_shards(shards):
    """(train, val)"""
    val = [shard for shard in shards if split_in_name(shard.name) == "val"]
    train = [shard for shard in shards if split_in_name(shard.name) in ("train", None)]
    return (train, val) if val else (train[:-1], train[-1:])


def split_in_name(name):
    """Of the file, or else of the innermost folder that says one."""
    for part in reversed(name.lower().split("/")):
        if said := SPLIT_IN_NAME.match(part):
            return said[1]
    return None


def describe_split(shards):
    """One line for the screen, when a folder is seen for the first time."""
    train, val = split_shards(shards)
    if not val:
        return "no documents"
    documents, test = sum(sum(shard.rows) for shard in shards), len(shards) - len(train) - len(val)
    how = "by their names" if split_in_name(val[0].name) == "val" else f"the last file, {val[0].name}"
    return (f"{documents:,} documents; {len(train):,} train shards, {len(val):,} val ({how})"
            + (f", {test:,} test (left out)" if test else ""))


def list_parquet_files(data_dir: str | None = None, warn_on_legacy: bool = False) -> list[str]:
    """nanochat's: full paths (or URIs) of the shards in a folder, sorted. There is no legacy to warn of."""
    folder = data_dir or default_data_dir()
    return [join_name(folder, name) for name in list_files(folder)[0]]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1,
                          data_dir: str | None = None) -> Iterator[list[str]]:
    """nanochat's: the documents of every `step`-th row group of each shard from `start` on, a list each."""
    for shard in list_shards(data_dir, split):
        for row_group in range(start, len(shard.rows), step):
            yield [text for text in shard.read(row_group).to_pylist() if text is not None]


# ---------------------------------------------------------------------------------------------------------
# The index: what is in a folder, known before the first read

INDEX = "index.json"
INDEX_FORMAT = 1
FOOTERS_AT_ONCE = 32


def read_index(folder: str) -> dict:
    """
    What is in a folder or URI: from its index.json, or from ours of it, or from its footers, read now.

    {"format": 1, "kind": "text", "dtype": None, "tokenizer": None, "shards":
     {"shard_00000.parquet": {"bytes": 1925, "text_bytes": 1925, "rows": [1024, 700]}, ...}}
    rows: documents of each row group; text_bytes: of the text shard, also where this one holds its tokens.
    """
    files, index = files_and_index(folder)
    if index is None:
        return index_of_ours(folder, files)
    if problem := difference(index["shards"], files):
        raise ValueError(f"{join_name(folder, INDEX)} does not fit its folder: {problem}; "
                         f"if the folder is as you want it, type: {index_command(folder)}")
    return index


def files_and_index(folder):
    """What lies in a folder, and what its index.json says; None where it has none."""
    if is_http(folder):
        index = parse_index(patiently(lambda: http_get(folder).content, folder), folder)
        return {name: File(entry["bytes"]) for name, entry in index["shards"].items()}, index
    files, beside = list_files(folder)
    check_some(files, folder)
    if beside is None:
        return files, None
    with open_file(folder, INDEX, beside.size) as file:
        return files, parse_index(file.read(), join_name(folder, INDEX))


def difference(indexed, files):
    """The first shard about which an index and a listing differ, and how; None where they agree."""
    for name in sorted(indexed.keys() | files.keys()):
        listed = f"{files[name].size:,} bytes" if name in files else "nothing"
        said = f"{indexed[name]['bytes']:,} bytes" if name in indexed else "nothing"
        if listed != said:
            return f"of {name} the folder has {listed}, the index {said}"
    return None


def index_of_ours(folder, files):
    """Of a folder that has none: kept under the base directory, made anew where the folder has changed."""
    cache = os.path.join(get_base_dir(), "index")
    with contextlib.suppress(OSError):
        os.makedirs(cache, exist_ok=True)
    if not os.access(cache, os.W_OK):    # nowhere to keep it
        return make_index_of_text(folder, files)
    modified = {name: file.modified for name, file in files.items()}
    place = folder if "://" in folder else os.path.realpath(folder)
    key = hashlib.sha256(f"{INDEX_FORMAT} {place}".encode(errors="surrogateescape")).hexdigest()[:16]
    path = os.path.join(cache, f"{key}.json")
    with lock_file(path + ".lock"):    # one process of a node reads the footers, the others wait for it
        kept = read_json(path)
        if kept.get("modified") != modified or difference(kept["index"]["shards"], files):
            kept = {"modified": modified, "index": make_index_of_text(folder, files)}
            write_whole(path, json.dumps(kept).encode())
    return kept["index"]


def make_index_of_text(folder, files):
    """Token shards come with an index: without it, they may not all be there."""
    index = make_index(folder, files)
    if index["kind"] == "tokens":
        raise ValueError(f"{folder}: no {INDEX} stands beside these token shards; it comes when all are "
                         "there: let `python -m dev.prepare tokenize` end, or copy that file too")
    print(f"{folder}: {describe_split(all_shards(folder, index))}", file=sys.stderr, flush=True)
    return index


def make_index(folder, files):
    """From the footers of these files."""
    progress, shards, heads = Progress(len(files), "footers"), {}, {}
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        read = functools.partial(read_entry, folder)
        for (name, _), (head, entry) in in_order(pool, read, files.items(), 4 * FOOTERS_AT_ONCE):
            shards[name] = entry
            heads.setdefault(json.dumps(head), name)
            progress.add(done=1)
    progress.close()
    if len(heads) > 1:
        (one, first), (other, second), *_ = heads.items()
        raise ValueError(f"{folder} holds shards of two kinds, {first}: {one} and {second}: {other}; "
                         "keep each kind in a folder of its own")
    return {"format": INDEX_FORMAT, **head, "shards": shards}


def read_entry(folder, item):
    """What an index says of all shards of a folder, and of this one."""
    name, file = item
    with errors_named(folder, name, "footer"):
        metadata, checksums = patiently(lambda: read_footer(folder, name, file.size), folder)
        schema, extra = metadata.schema.to_arrow_schema(), metadata.metadata or {}
        kind = "tokens" if "tokens" in schema.names and "text" not in schema.names else "text"
        check_column(folder, name, schema, kind)
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if sum(rows) != metadata.num_rows or len(checksums or rows) != len(rows):
            raise ValueError("its footer contradicts itself")
        head, text_bytes = {"kind": kind, "dtype": None, "tokenizer": None}, file.size
        if kind == "tokens":
            head["dtype"] = extra[b"nanoloader.dtype"].decode()
            head["tokenizer"] = extra[b"nanoloader.tokenizer"].decode()
            text_bytes = int(extra[b"nanoloader.text_size"])
        return head, {"bytes": file.size, "text_bytes": text_bytes, "rows": rows}


def write_index(folder: str, out: str | None = None) -> dict:
    """Read the footers of a folder or URI and write their index, beside them unless `out` names a file."""
    if out is None:
        check_local(folder)
    files, _ = list_files(folder)
    check_some(files, folder)
    index = make_index(folder, files)
    write_whole(out or os.path.join(folder, INDEX), json.dumps(index).encode())
    return index


def index_command(folder):
    out = f" --out {INDEX}, and copy that beside the shards" if "://" in folder else ""
    return f"python dataset.py index {shlex.quote(folder)}{out}"


# ---------------------------------------------------------------------------------------------------------
# Reading

LARGE = {"text": pa.large_string(), "tokens": pa.large_binary()}    # with 64-bit offsets
CHECKSUMS = b"nanoloader.checksums"    # in a footer: the checksum of each row group's documents


class ShardError(OSError):
    """A shard that cannot be read as it was written; the message names it, and what to type next."""


@dataclass(eq=False)
class Shard:
    """
    One parquet file of documents (column `text`) or of their token ids (column `tokens`).

    All is known from the index; only `read` opens the file, and nothing stays open. Thread-safe.
    """
    folder: str
    name: str
    file_size: int
    size: int                  # bytes of the text shard, also of one of tokens: one fingerprint for both
    rows: list[int]            # documents in each row group
    kind: str                  # 'text' or 'tokens'
    dtype: np.dtype | None     # of the token ids
    fingerprint: str | None    # of the tokenizer that made them
    cache: str | None = None   # folder for its local copy

    @property
    def path(self) -> str:
        return join_name(self.folder, self.name)

    def read(self, row_group: int, wait: Callable | None = None) -> pa.Array:
        """
        All documents of a row group: strings, or binary with raw token ids; ShardError if damaged.
        wait(seconds, error): between attempts, where it is far away.
        """
        with errors_named(self.folder, self.name, f"row group {row_group}"):
            return patiently(lambda: self._read(row_group), self.folder, wait=wait or sleep)

    def _read(self, row_group):
        if not self.cache:
            return self._read_at(self.folder, self.name, row_group)
        name = copy_to_cache(self)
        try:
            return self._read_at(self.cache, name, row_group)
        except Exception:
            remove(os.path.join(self.cache, name))    # the next attempt copies it anew
            raise

    def _read_at(self, folder, name, row_group):
        metadata, checksums = read_footer(folder, name, self.file_size)
        with open_file(folder, name, self.file_size) as file:
            # Our checksum of ids says all that the pages' would, which cost two thirds of the speed.
            pages = self.kind == "text" or not checksums
            parquet = pq.ParquetFile(file, metadata=metadata, pre_buffer=False,
                                     page_checksum_verification=pages)
            array = read_column(parquet, row_group, self.kind, self.file_size)
        if len(array) != self.rows[row_group]:
            raise ValueError(f"it has {len(array):,} documents, {self.rows[row_group]:,} in the index")
        if checksums and checksum(array) != checksums[row_group]:
            raise ValueError("its documents are not those that were written (checksum)")
        array.validate(full=True)    # UTF-8 and offsets: 24 GB/s
        return array


def make_shard(folder, name, head, entry):
    with errors_named(folder, name, "footer"):    # a loader keeps 8 bytes a document
        check_size(sum(entry["rows"]), "documents", entry["bytes"], 1 << 20)
    dtype = head["dtype"] and np.dtype(head["dtype"]).newbyteorder("<")
    return Shard(folder, name, entry["bytes"], entry["text_bytes"], entry["rows"], head["kind"], dtype,
                 head["tokenizer"])


def open_shard(folder: str, name: str, file: "File") -> Shard:
    """From its own footer, whatever an index says."""
    return make_shard(folder, name, *read_entry(folder, (name, file)))


@functools.lru_cache(maxsize=64)    # a request saved for each row group that is read from far away
def read_footer(folder, name, size):
    """(metadata, checksums of the row groups' documents or None in shards that others wrote)"""
    with open_file(folder, name, size) as file:
        metadata = pq.ParquetFile(file).metadata
    checksums = (metadata.metadata or {}).get(CHECKSUMS)
    return metadata, checksums and json.loads(checksums)


@contextlib.contextmanager
def errors_named(folder, name, place):
    """Whatever damaged bytes make pyarrow raise becomes an error that names the shard, and what to type."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        advice = f"check it with: python -m dev.prepare verify --data {shlex.quote(folder)}"
        if "crypt" in str(error):
            advice = "write it again without encryption"
        raise ShardError(f"{join_name(folder, name)}, {place}: {one_line(error)}; {advice}") from error


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def columns_of_text(schema):
    """Names of those that convert takes: strings, and bytes, which old Hive and Impala call strings."""
    return [field.name for field in schema
            if is_text(field.type) or field.type in (pa.binary(), pa.large_binary(), pa.binary_view())]


def read_column(parquet, row_group, column, file_size):
    """A row group as one array with plain offsets, 64-bit ones where 2 GB are not enough."""
    kind, large = parquet.schema_arrow.field(column).type, LARGE[column]
    wanted = kind if kind in (pa.string(), pa.binary()) else large
    pieces, n_bytes = [], 0
    for batch in parquet.iter_batches(documents_at_once(parquet.metadata.row_group(row_group), column),
                                      [row_group], [column], use_threads=False):
        pieces.append(batch.column(0).cast(wanted))
        n_bytes += pieces[-1].nbytes
        check_size(n_bytes, "bytes of documents", file_size, 1 << 28)
    if n_bytes >= 2**31:
        pieces = [piece.cast(large) for piece in pieces]
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces or [pa.array([], wanted)])


def documents_at_once(row_group, column):
    """
    All where they lie as they are in less than 256 MB; else in pieces: a dictionary or zstd can make 10 GB of
    a file of 290 bytes.
    """
    columns = map(row_group.column, range(row_group.num_columns))
    (one,) = [one for one in columns if one.path_in_schema == column]
    plain = {*one.encodings} <= {"PLAIN", "RLE", "BIT_PACKED"} and one.total_uncompressed_size < 1 << 28
    return row_group.num_rows or 1 if plain else 1024


def column_views(array: pa.Array) -> tuple[memoryview, np.ndarray, np.ndarray]:
    """An Arrow string or binary array as (data, offsets, valid): memoryview, int array, bool array."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, np.int64 if wide else np.int32)
    offsets = offsets[array.offset:array.offset + len(array) + 1]
    return memoryview(data or b""), offsets, ~np.asarray(array.is_null())


def checksum(array: pa.Array) -> int:
    """
    CRC-32 of a row group's documents: of their lengths, nulls, and the sums of each 4 KB of bytes as 64-bit
    words. 42 GB/s on one core where the CRC of the bytes takes 7 (25 % of the speed of reading tokens); it
    sees all but changes within 4 KB that leave their sum as it was.

    Parquet's page checksums cover neither page headers nor the footer, nor do they tell that a file
    was replaced by another of the same size; this one is of what is read in the end.
    """
    if not len(array):
        return 0
    data, offsets, valid = column_views(array)
    crc = zlib.crc32(np.where(valid, np.diff(offsets), -1).astype("<i8"))
    content = data[offsets[0]:offsets[-1]]
    whole = len(content) // 4096
    words = np.frombuffer(content, "<u8", whole * 512).reshape(whole, 512)
    return zlib.crc32(content[whole * 4096:], zlib.crc32(words.sum(axis=1, dtype="<u8"), crc))


# ---------------------------------------------------------------------------------------------------------
# Local copies of shards that are far away

CACHE_BYTES = 200 << 30    # at most, and no more than the disk has
COPY = re.compile(r"[0-9a-f]{16}-.*\.parquet(\.part)?")    # in a cache: what is ours to delete


def copy_to_cache(shard):
    """The name of its whole copy in the cache, which the first of a node's threads and ranks makes."""
    os.makedirs(shard.cache, exist_ok=True)
    key = hashlib.sha256(f"{shard.path} {shard.file_size}".encode()).hexdigest()[:16]
    name = f"{key}-{os.path.basename(shard.name)}"
    path = os.path.join(shard.cache, name)
    with lock_file(path + ".lock"):
        if size_of(path) != shard.file_size:
            make_room(shard.cache, shard.file_size)
            far = open_file(shard.folder, shard.name, shard.file_size)
            with far, open(path + ".part", "wb") as near:
                near.truncate(shard.file_size)    # others that make room see what it will take
                shutil.copyfileobj(far, near, COPY_PIECE)
                if near.tell() != shard.file_size:
                    raise OSError(f"{near.tell():,} bytes came of {shard.file_size:,}")
            os.replace(path + ".part", path)
        os.utime(path)
    return name


def make_room(cache, n_bytes):
    """Delete the copies that were not used for the longest time."""
    copies = []
    for entry in os.scandir(cache):
        with contextlib.suppress(FileNotFoundError):    # another process makes room, too
            if COPY.fullmatch(entry.name):
                copies.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
    used = sum(size for _, size, _ in copies)
    limit = min(CACHE_BYTES, used + shutil.disk_usage(cache).free)
    for _, size, path in sorted(copies):
        if used + n_bytes > limit:
            remove(path)
            used -= size
    if used + n_bytes > limit:
        raise OSError(f"--cache {cache} has no room for a shard of {n_bytes:,} bytes; name a larger disk")


# ---------------------------------------------------------------------------------------------------------
# Writing shards

def write_shard(path: str, row_groups: Iterable[pa.Array], column: str = "text",
                metadata: dict | None = None, compression: str = "zstd") -> None:
    """Write one shard, each array a row group, under a temporary name; renamed when it is safe on disk."""
    part, checksums = f"{path}.{os.getpid()}.tmp", []
    schema = pa.schema([(column, pa.string() if column == "text" else pa.binary())])
    try:
        # A dictionary would give the same size and 5 % less speed: hardly a document comes twice.
        with pq.ParquetWriter(part, schema, compression=compression, use_dictionary=False,
                              write_statistics=False, write_page_checksum=True) as writer:
            for array in row_groups:
                writer.write_table(pa.table([array], schema=schema), row_group_size=max(1, len(array)))
                checksums.append(checksum(array))
            writer.add_key_value_metadata({CHECKSUMS: json.dumps(checksums)} | (metadata or {}))
        sync(part)
        os.replace(part, path)
    finally:
        remove(part)


def write_whole(path: str, data: bytes) -> None:
    """All of the file or nothing: a reader or a crash never meets half of it."""
    part = f"{path}.{os.getpid()}.tmp"
    with open(part, "wb") as file:
        file.write(data)
    sync(part)
    os.replace(part, path)


def sync(path):
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------------------
# Which data: given, or in its default place, or built in: the standard library's own sources

BUILTIN_VERSION = 1    # of the recipe: a changed one takes a new folder
BUILTIN_TRAIN_SHARDS = 4
BUILTIN_VAL_BYTES = 1_000_000
BUILTIN_ROW_GROUPS = 16    # in a shard, so that 2, 4, 8 and 16 lanes get an even share


def find_data(data_dir: str | None = None) -> str:
    """The given folder or URI; else downloaded or converted shards; else the built-in corpus."""
    if data_dir:
        return data_dir
    if list_files(default_data_dir())[0]:
        name_other_folder(default_data_dir())
        return default_data_dir()
    version = ".".join(map(str, sys.version_info[:3]))
    folder = os.path.join(get_base_dir(), f"builtin-v{BUILTIN_VERSION}-python-{version}")
    with lock_file(folder + ".lock"):
        if not os.path.isdir(folder):
            build_builtin_corpus(folder)
    name_other_folder(folder)
    return folder


def build_builtin_corpus(folder: str) -> None:
    """Shards of the running Python's own sources, a document a file, always in the same order."""
    documents = standard_library(sysconfig.get_path("stdlib"))
    size = sum(map(len, documents))
    print(f"no data yet: making a corpus of Python's library, {len(documents):,} files, {size / 1e6:.1f} MB")
    print("(real data: python dataset.py -n 8 gets public shards, python -m dev.prepare convert takes your "
          "own files)", flush=True)
    # Every k-th document by size is val: a fair sample, although a few files hold much of the text.
    by_size = sorted(range(len(documents)), key=lambda i: (len(documents[i]), i))
    step = max(2, round(size / BUILTIN_VAL_BYTES))
    val = set(by_size[step // 2 :: step])
    train = [text for i, text in enumerate(documents) if i not in val]
    parts = [train[i::BUILTIN_TRAIN_SHARDS] for i in range(BUILTIN_TRAIN_SHARDS)]
    parts.append([documents[i] for i in sorted(val)])
    building = f"{folder}.{os.getpid()}.tmp"
    os.makedirs(building)
    try:
        for number, part in enumerate(parts):
            cuts = itertools.pairwise(np.linspace(0, len(part), BUILTIN_ROW_GROUPS + 1).astype(int))
            groups = (pa.array(part[a:b], pa.string()) for a, b in cuts)
            write_shard(f"{building}/shard_{number:05d}.parquet", groups)
        write_index(building)
        with contextlib.suppress(OSError):    # another process was faster: its folder is the same
            os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def standard_library(root):
    """All non-empty UTF-8 sources below `root`, other people's packages left out, shuffled by name."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__")]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    paths.sort(key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).digest())
    documents = []
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError, OSError), open(path, encoding="utf-8") as file:
            documents.append(file.read())
    return [text for text in documents if text]


# ---------------------------------------------------------------------------------------------------------
# Folders and files, here or far away

TIMEOUT = (10, 30)       # seconds to connect, seconds without a byte
RETRY_SECONDS = 1.0      # the first wait, about; doubled each time
ATTEMPTS = 6             # at one thing that is far away, that bring nothing
BUSY_SECONDS = 600       # so long a server that says it is busy (429, 503) is waited for
REQUESTS_AT_ONCE = 32    # of one process
COPY_PIECE = 32 << 20    # bytes of a request, where a whole shard is copied


class File(NamedTuple):
    size: int
    modified: int | None = None    # nanoseconds


def get_base_dir() -> str:
    """$NANOLOADER_BASE_DIR, or ~/.cache/nanoloader; made on demand."""
    base = os.environ.get("NANOLOADER_BASE_DIR") or os.path.expanduser("~/.cache/nanoloader")
    try:
        os.makedirs(base, exist_ok=True)
    except OSError as error:
        raise OSError(f"{one_line(error)}; set NANOLOADER_BASE_DIR to another folder than {base}") from error
    return base


def default_data_dir() -> str:
    """Where downloads and conversions go, and where train.py looks first."""
    return os.path.join(get_base_dir(), "base_data")


def name_other_folder(folder):
    """A line where nanochat, in the same place, would read another folder than the one that is read."""
    other = default_data_dir() + "_climbmix"
    if os.path.isdir(other) and os.environ.get("RANK", "0") == "0":
        print(f"data: {folder} is read, not nanochat's {other}; to read that, name it (data_dir, --data), or "
              "make base_data a link to it", flush=True)


def list_files(folder: str) -> tuple[dict[str, File], File | None]:
    """{name: File} of the shards in a folder, or where it has none, of those below; and its index.json."""
    if is_http(folder):
        raise ValueError(f"{folder}: a web server lists no files; name the index.json beside its shards")
    check_one_version(folder)
    files = {}
    for deep in (False, True):    # deep: Hugging Face's data/, Hive's year=2024/
        found = far_files(folder, deep) if "://" in folder else local_files(folder, deep)
        files = {name: file for name, file in found if is_shard(name) or name == INDEX}
        if files.keys() - {INDEX}:
            break
    for name in files:
        check_name(name, folder)
    index = files.pop(INDEX, None)
    return dict(sorted(files.items())), index


def local_files(folder, deep):
    for path in files_below(folder, deep):
        name = os.path.relpath(path, folder).replace(os.sep, "/")
        if is_shard(name) or name == INDEX:
            seen = os.stat(path)    # pyarrow's listing leaves out links to nothing
            if stat.S_ISREG(seen.st_mode):
                yield name, File(seen.st_size, seen.st_mtime_ns)


def far_files(folder, deep):
    fs, root = remote_filesystem(folder)
    for info in fs.get_file_info(pafs.FileSelector(root.rstrip("/"), allow_not_found=True, recursive=deep)):
        if info.is_file:
            yield info.path[len(root.rstrip("/")):].lstrip("/"), File(info.size, info.mtime_ns)


def files_below(root, deep=True):
    """Through links to folders too, but into each folder once; one that cannot be read is an error."""
    def fail(error):
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    seen = set()
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or not deep:
            folders.clear()
        if real not in seen:
            yield from (os.path.join(folder, name) for name in names)
        seen.add(real)


def is_shard(name):
    """Others' tools put files beside their shards, and folders, whose names begin with . or _"""
    return name.endswith(".parquet") and not re.search(r"(^|/)[._]", name)


def is_http(folder):
    return folder.startswith(("http://", "https://"))


def join_name(folder, name):
    """Path or URI of a file. Example: s3://bucket/dir?region=x, f -> s3://bucket/dir/f?region=x"""
    if is_http(folder):
        return urljoin(folder, quote(name))
    head, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


def filesystem_of(folder):
    """(file system, path in it) of a folder or URI."""
    return remote_filesystem(folder) if "://" in folder else (pafs.LocalFileSystem(), os.path.abspath(folder))


@functools.lru_cache(maxsize=16)
def remote_filesystem(folder):
    """pyarrow's own where it has one, else fsspec's."""
    try:
        return pafs.FileSystem.from_uri(folder)
    except (pa.ArrowException, ImportError) as error:
        try:
            import fsspec

            fs, path = fsspec.core.url_to_fs(folder)
        except (ImportError, ValueError) as missing:
            raise ValueError(
                f"cannot open {folder}: pyarrow says: {one_line(error)}; fsspec says: {missing}; install "
                f"fsspec and its client for {folder.split(':')[0]}://, or copy it to a disk") from missing
        return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), path


def open_file(folder, name, size):
    """A seekable pyarrow file; an error where it does not have the size that was listed."""
    if is_http(folder):
        return pa.PythonFile(HttpFile(join_name(folder, name), size), mode="r")
    fs, root = filesystem_of(folder)
    file = fs.open_input_file(f"{root}/{name}")    # no memory map: a file that is cut meanwhile would kill us
    if file.size() != size:
        raise OSError(f"it has {file.size():,} bytes, but {size:,} when the folder was listed")
    return file


class HttpFile(io.RawIOBase):
    """A seekable file over HTTP range requests; one row group is one request."""

    def __init__(self, url, size):
        self.url, self.length, self.position = url, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=0):
        self.position = offset + (0, self.position, self.length)[whence]
        return self.position

    def readinto(self, buffer):
        end = min(self.position + len(buffer), self.length)
        if end <= self.position:
            return 0
        response = http_get(self.url, {"Range": f"bytes={self.position}-{end - 1}"})
        seen, wanted = response.headers.get("Content-Range"), f"bytes {self.position}-{end - 1}/{self.length}"
        if response.status_code != 206 or seen != wanted:
            raise OSError(f"asked for {wanted}, got {seen or 'no range'}, status {response.status_code}")
        buffer[:end - self.position] = response.content
        self.position = end
        return len(response.content)


class HttpError(OSError):
    """An answer other than the bytes that were asked for."""

    def __init__(self, response):
        status, after = response.status_code, response.headers.get("Retry-After", "")
        super().__init__(f"the server answered {status} {response.reason}")
        self.status, self.busy = status, status in (429, 503)
        # The next answer would be the same; but 416 means that the part of a file here is not of that file.
        self.final = 400 <= status < 500 and status not in (408, 416, 425, 429)
        self.seconds = int(after) if after.isdigit() else 0


def http_get(url, headers=None, stream=False):
    headers = {"Accept-Encoding": "identity"} | (headers or {})
    response = requests.get(url, headers=headers, timeout=TIMEOUT, stream=stream)
    if response.status_code not in (200, 206):
        raise HttpError(response)
    return response


def sleep(seconds, error):
    time.sleep(seconds)


def patiently(work, place, n_bytes=lambda: 0, wait=sleep):
    """
    work(); where the place is far away, again after growing waits, and never too many at once. n_bytes():
    how much of it is done: an attempt that brings some is no failure.
    """
    if "://" not in place:
        return work()
    began, failures = time.monotonic(), 0
    for attempt in itertools.count():
        before = n_bytes()
        try:
            with requests_in_flight(os.getpid()):
                return work()
        except Exception as error:
            if n_bytes() > before:
                began = time.monotonic()
            elif not getattr(error, "busy", False):
                failures += 1
            hopeless = getattr(error, "final", False) or failures == ATTEMPTS
            if hopeless or time.monotonic() - began > BUSY_SECONDS:
                raise
            wait(wait_after(error, attempt), error)


def wait_after(error, attempt):
    """Seconds: what the server asks for, or twice as long each time; never all clients at once."""
    growing = RETRY_SECONDS * 2 ** min(attempt, 5)
    return max(getattr(error, "seconds", 0) * random.uniform(1, 1.5), growing * random.uniform(0.5, 1))


@functools.cache
def requests_in_flight(process):
    """A forked child has its own: threads of its parent may have been in the middle of requests."""
    return threading.Semaphore(REQUESTS_AT_ONCE)


# ---------------------------------------------------------------------------------------------------------
# Download: parallel, resumed by byte range, checked, renamed when whole

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
MAX_SHARD = 6542      # the last public shard: val
PIECE = 1 << 16       # a connection that drops loses less than this
IDLE_SECONDS = 5      # without a byte, before the screen says why


class Damaged(OSError):
    """What came is not what the server stated: begin the file anew."""


def download(names: list[str], folder: str, base_url: str = BASE_URL, workers: int = 4) -> dict[str, str]:
    """
    Fetch the named shards into a folder, index it; returns {name: why not} of those that could not be had.

    Another download into the same folder is waited for. Stopped at any point, the same call goes on.
    """
    check_local(folder)
    os.makedirs(folder, exist_ok=True)
    queue, failed, stop = deque(names), {}, threading.Event()
    progress = Progress(len(names), "shards")

    def work():
        with contextlib.suppress(IndexError):    # the queue is empty
            while not stop.is_set():
                name = queue.popleft()
                try:
                    fetch(f"{base_url}/{name}", os.path.join(folder, name), progress, stop)
                    progress.add(done=1)
                except Exception as error:
                    failed[name] = f"{base_url}/{name}: {one_line(error)}"

    def lock_and_work():
        progress.waits = f"{folder}: another download is at it"
        with lock_file(os.path.abspath(folder) + ".lock"):
            threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            index_what_is_there(folder)

    all_work = threading.Thread(target=lock_and_work, daemon=True)
    try:
        all_work.start()
        while all_work.is_alive():
            time.sleep(0.05)    # not join(): Ctrl-C must come through
            progress.say_what_it_waits_for(IDLE_SECONDS)
    finally:
        stop.set()
        progress.close()
    return failed


def index_what_is_there(folder):
    files, index = list_files(folder)[0], read_json(os.path.join(folder, INDEX))
    if files and (not index or difference(index["shards"], files)):
        write_index(folder)


def fetch(url, path, progress, stop):
    """Download one file: whole, checked, under its own name, or an error. Waits between its attempts."""
    part = path + ".part"

    def attempt():
        try:
            if not stop.is_set():
                fetch_rest(url, part, progress, stop)
            if not stop.is_set():
                rename_whole(part, path)
        except (Damaged, HttpError) as error:
            if getattr(error, "status", 416) == 416:    # the part is of another file
                remove(part, part + ".json")
            raise

    def wait(seconds, error):
        progress.waits = f"{os.path.basename(path)}: {one_line(error)}; next attempt in {seconds:.0f} s"
        stop.wait(seconds)

    if not is_whole(path):
        patiently(attempt, url, lambda: size_of(part), wait)


def fetch_rest(url, part, progress, stop):
    """Append what is missing to the part file; beside it stands what the server states of the whole."""
    stated = read_json(part + ".json")
    have = size_of(part) if stated.get("tag") else 0    # without a tag the file may be another by now
    if have and have == stated["size"]:
        return    # stopped between the last byte and the rename
    progress.waits = f"{os.path.basename(url)}: no byte of it comes"
    headers = {"Range": f"bytes={have}-", "If-Range": stated["tag"]} if have else {}
    with http_get(url, headers, stream=True) as response:
        if response.status_code == 206:
            seen = re.fullmatch(rf"bytes {have}-\d+/(\d+)", response.headers.get("Content-Range", ""))
            if not seen:
                raise Damaged(f"asked for the bytes from {have:,} on, got others")
            size = int(seen[1])
        else:
            remove(part)    # before the new tag is there
            have, size = 0, int(response.headers.get("Content-Length", 0)) or None
        stated = {"tag": tag_of(response), "size": size, "sha256": stated_sha256(response)}
        write_whole(part + ".json", json.dumps(stated).encode())
        progress.piece_bytes = size or 0
        with open(part, "ab", buffering=0) as file:
            for piece in response.iter_content(PIECE):
                file.write(piece)
                progress.add(len(piece))
                if stop.is_set():
                    return
    if size_of(part) < (size or 0):
        raise OSError(f"the connection ended after {size_of(part):,} of {size:,} bytes")


def tag_of(response):
    """What If-Range needs to know that the file did not change: a strong ETag, or else the date."""
    tag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified", "") if tag.startswith("W/") else tag


def stated_sha256(response):
    """The file's SHA-256 in hex, which Hugging Face gives in X-Linked-ETag of its redirect; else None."""
    for answer in (*response.history, response):
        if seen := re.fullmatch('"?([0-9a-f]{64})"?', answer.headers.get("X-Linked-ETag", "")):
            return seen[1]
    return None


def rename_whole(part, path):
    stated, seen = read_json(part + ".json"), sha256_of(part)
    if stated["size"] not in (None, size_of(part)):
        raise Damaged(f"{size_of(part):,} bytes came, the server states {stated['size']:,}")
    if stated["sha256"] not in (None, seen):
        raise Damaged(f"its SHA-256 is {seen[:16]}..., the server states {stated['sha256'][:16]}...")
    if not is_whole(part):
        raise Damaged(f"{size_of(part):,} bytes came, but they are no whole parquet file")
    sync(part)
    folder, name = os.path.split(path)
    with open(os.path.join(folder, "SHA256SUMS"), "a") as file:
        file.write(f"{seen}  {name}\n")    # for verify, or sha256sum -c
    remove(os.path.join(folder, INDEX))    # it is made anew when all are there
    os.replace(part, path)
    remove(part + ".json")


def is_whole(path):
    """Whether a parquet footer can be read at its end."""
    try:
        return pq.read_metadata(path) is not None
    except (OSError, pa.ArrowException):
        return False


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def read_json(path):
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return json.load(file)
    return {}


def remove(*paths):
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# ---------------------------------------------------------------------------------------------------------
# What is refused

def check_size(number, what, file_size, always):
    """A small file that says it is huge is damaged, or made to harm: it would take all memory."""
    if number > always + 1000 * file_size:
        raise MemoryError(f"its {file_size:,} bytes say that they hold {number:,} {what}")


def check_name(name, where):
    """A name in a listing or an index stays below its folder, here and wherever it is copied to."""
    parts = name.replace("\\", "/").split("/")
    if {"", ".", ".."} & set(parts) or os.path.splitdrive(name)[0] or not (is_shard(name) or name == INDEX):
        raise ValueError(f"{where}: {name!r} is no name for a shard; expected one such as "
                         "shard_00000.parquet, without .. or an address")


def check_one_version(folder):
    """Tables and Hugging Face's cache keep the files of older versions: not all that lie there count."""
    def below(pattern):
        return glob.glob(os.path.join(glob.escape(folder), pattern))

    if below("_delta_log") or below(".hoodie") or below("metadata/*.metadata.json"):
        raise ValueError(f"{folder} is a table (Delta Lake, Iceberg, Hudi), whose files also hold what was "
                         f"deleted; {MAKE_JSONL}")
    if below("refs") and len(versions := below("snapshots/*")) > 1:
        raise ValueError(f"{folder} holds {len(versions)} versions of a dataset; name one: "
                         f"{max(versions, key=os.path.getmtime)}")


def check_some(found, folder, what="parquet files"):
    if not found:
        mine = folder if "://" in folder or os.path.exists(folder) else "FILES"
        raise FileNotFoundError(f"no {what} in {folder}; get some with: python dataset.py -n 8, "
                                f"or {convert_command(mine)}")


MAKE_JSONL = 'make .jsonl of it, for each document a line {"text": "..."}, and convert that'


def convert_command(folder, flag=""):
    return f"make them of your own text: python -m dev.prepare convert {shlex.quote(folder)}{flag}"


def text_key_flag(columns):
    """columns: those that may hold the text"""
    return f" --text_key {shlex.quote(columns[0]) if len(columns) == 1 else 'COLUMN'}"


def parse_index(data, where):
    """The index in these bytes; an error where it is none, or not one of ours."""
    try:
        index = json.loads(data)
        if index["format"] != INDEX_FORMAT:
            raise ValueError(f"it has format {index['format']!r}, this code reads {INDEX_FORMAT}")
        known = index["kind"] in ("text", "tokens") and index["dtype"] in (None, "uint16", "uint32")
        for name, entry in index["shards"].items():
            check_name(name, where)
            numbers = [entry["bytes"], entry["text_bytes"], *entry["rows"]]
            known = known and set(map(type, numbers)) == {int} and min(numbers) >= 0
        if not known:
            raise ValueError("what it says of its shards is not understood")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is no index of shards ({type(error).__name__}: {one_line(error)}); make "
                         "it where they are: python dataset.py index FOLDER") from error
    return index


def check_column(folder, name, schema, kind):
    path, columns = join_name(folder, name), columns_of_text(schema)
    if kind not in schema.names:
        raise ShardError(f"{path}: it has no column `text`, only {', '.join(map(repr, schema.names))}; "
                         f"{convert_command(folder, text_key_flag(columns)) if columns else MAKE_JSONL}")
    seen = schema.field(kind).type
    if kind == "text" and not is_text(seen):
        raise ShardError(f"{path}: its column `text` holds {seen}, not strings; "
                         f"{convert_command(folder) if 'text' in columns else MAKE_JSONL}")
    if kind == "tokens" and not pa.types.is_binary(seen):
        raise ShardError(f"{path}: its column `tokens` holds {seen}, not binary")


def check_local(folder):
    if "://" in folder:
        raise ValueError(f"cannot write to {folder}: write to a local folder, then copy it there")


# ---------------------------------------------------------------------------------------------------------
# Processes and the screen

@contextlib.contextmanager
def lock_file(path, wait=True):
    """Hold a lock file; yields whether we do. The system frees it when its holder dies."""
    try:
        import fcntl
    except ImportError:    # Windows: no lock; the renames are atomic all the same
        yield True
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:    # to close it is not enough: a child that was forked meanwhile has it open, too
            fcntl.flock(file, fcntl.LOCK_UN)


def in_order(executor, function, items, ahead):
    """(item, function(item)) of each item, in order, at most `ahead` of them under way."""
    waiting = deque()
    try:
        for item in items:
            waiting.append((item, executor.submit(function, item)))
            if len(waiting) >= ahead:
                item, future = waiting.popleft()
                yield item, future.result()
        while waiting:
            item, future = waiting.popleft()
            yield item, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_line(error):
    """What an error says; of those of requests, the reason without the address, which we name ourselves."""
    error = getattr(error.args[0] if error.args else error, "reason", None) or error
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def errors_in_one_line(stopped="stopped"):
    """For a command: what its user, a disk or a pipe can cause is a line on the screen, and no traceback."""
    try:
        yield
    except BrokenPipeError:    # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(f"\n{stopped}")
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        sys.exit(f"error: {one_line(error)}")


class Progress:
    """One line on the screen: pieces done, megabytes, rate, time left. Any thread may report."""

    def __init__(self, total, unit, piece_bytes=0):
        self.total, self.unit, self.piece_bytes = total, unit, piece_bytes    # piece_bytes: of one, about
        self.done = self.bytes = 0
        self.began = self.shown = self.moved = time.time()
        self.waits, self.lock = "", threading.Lock()    # waits: for what, in words

    def add(self, n_bytes=0, done=0):
        with self.lock:
            self.bytes, self.done, self.moved = self.bytes + n_bytes, self.done + done, time.time()
            if time.time() - self.shown > (0.2 if sys.stderr.isatty() else 10):
                self.show()

    def show(self, end=""):
        self.shown = time.time()
        spent = max(self.shown - self.began, 1e-3)
        rate = self.bytes / spent
        left = (self.total - self.done) * (self.piece_bytes / max(rate, 1) if self.piece_bytes
                                           else spent / max(self.done, 1))
        when = f"{spent:7.1f} s" if end else f"{int(left) // 60:4}:{int(left) % 60:02} left"
        line = (f"{self.done:6,} / {self.total:,} {self.unit}  {self.bytes / 1e6:10,.1f} MB  "
                f"{rate / 1e6:7.1f} MB/s  {when}")
        print(f"\r{line:<78}" if sys.stderr.isatty() else line, end=end if sys.stderr.isatty() else "\n",
              file=sys.stderr, flush=True)

    def say_what_it_waits_for(self, idle_seconds):
        """A line every so many seconds in which nothing moves."""
        if time.time() - self.moved > idle_seconds and self.waits:
            print(f"waiting: {self.waits}", file=sys.stderr, flush=True)
            self.moved = time.time()

    def close(self):
        """Of what took less than a second, nothing is shown."""
        with self.lock:
            if time.time() - self.began > 1:
                self.show(end="\n")


# ---------------------------------------------------------------------------------------------------------
# The command line

def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        argv = ["download", *argv]    # python dataset.py -n 8
    flags = make_parser().parse_args(argv or ["--help"])
    with errors_in_one_line("stopped; the same command goes on"):
        flags.run(flags)


def make_parser():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("download", help="fetch public shards (the word may be left out)")
    command.set_defaults(run=run_download)
    command.add_argument("-n", "--num_files", type=int, required=True, help="train shards, -1: all; and val")
    command.add_argument("-w", "--num_workers", type=int, default=4, help="downloads at once (default 4)")
    command.add_argument("--base_url", default=BASE_URL, help="what stands in front of /shard_00000.parquet")
    command.add_argument("--out", help="folder (default: where train.py looks)")

    command = commands.add_parser("index", help="write the index.json of a folder or bucket that has none")
    command.set_defaults(run=run_index)
    command.add_argument("folder", help="folder or URI of parquet shards")
    command.add_argument("--out", help="file (default: index.json in the folder)")
    return parser


def run_download(flags):
    if flags.num_files < -1 or not flags.num_files or flags.num_workers < 1:
        raise ValueError(f"-n {flags.num_files} -w {flags.num_workers}: expected how many train shards, -1 "
                         "for all, and how many downloads at once, at least 1")
    folder = flags.out or default_data_dir()
    count = MAX_SHARD if flags.num_files == -1 else min(flags.num_files, MAX_SHARD)
    # Val first: were it the last to come, another shard would be val meanwhile.
    names = [f"shard_{number:05d}.parquet" for number in (MAX_SHARD, *range(count))]
    failed = download(names, folder, flags.base_url.rstrip("/"), flags.num_workers)
    print(f"{len(names) - len(failed):,} of {len(names):,} shards are in {folder}")
    for name, reason in sorted(failed.items()):
        print(f"missing: {name}: {reason}")
    if failed:
        sys.exit(f"error: {len(failed):,} shards are missing; the same command fetches just those")


def run_index(flags):
    index = write_index(flags.folder, flags.out)
    rows = [entry["rows"] for entry in index["shards"].values()]
    print(f"{len(rows):,} shards, {sum(map(len, rows)):,} row groups, {sum(map(sum, rows)):,} documents, in "
          f"{flags.out or os.path.join(flags.folder, INDEX)}")


if __name__ == "__main__":
    main()
