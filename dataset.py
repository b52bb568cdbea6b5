"""
Which shards there are, what they contain, and how they are read, written and downloaded.

    python dataset.py -n 8 -w 4             # download 8 public train shards, and the val shard
    python dataset.py index DIR             # write DIR/index.json; for a bucket: index s3://... --out FILE

Data is a folder or a URI (s3://, gs://, hf://, https://) of parquet files with a column `text`, or `messages`
for chats, as `python -m dev.prepare convert` makes. An index.json beside them saves listing them and reading
their footers, which a thousand nodes need; else each node reads those once. Reads check our own checksums.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------
# Shards: which there are, and which are val

CONVERT = "python -m dev.prepare convert"
SPLIT_IN_NAME = re.compile(r"(?:split=)?(train|val|test)(?:ing|id|idation)?(?![a-z])")    # Hugging Face's

def list_shards(data_dir: str | None, split: str) -> list["Shard"]:
    """
    The shards of a split, sorted by name; none is opened. If names give the split (train-*, validation-*),
    they decide, and test-* is in neither; else the last file is val and the others are train.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'val'")
    folder = (data_dir or default_data_dir()).removesuffix("/" + INDEX)
    train, val = split_shards(shards := all_shards(folder))
    if not train:
        raise ValueError(f"{describe_split(folder, shards)}; train and val need a file each; make more: "
                         f"{CONVERT} {shlex.quote(folder)} --out NEW_FOLDER")
    return val if split == "val" else train

def split_shards(shards):    # (train, val)
    val = [shard for shard in shards if split_in_name(shard.name) == "val"]
    train = [shard for shard in shards if split_in_name(shard.name) in ("train", None)]
    return (train, val) if val else (train[:-1], train[-1:])

def split_in_name(name):
    """The split that the file's name gives, or else the innermost folder's; None if no name gives one."""
    found = filter(None, map(SPLIT_IN_NAME.match, reversed(name.lower().split("/"))))
    return next((match[1] for match in found), None)

def describe_split(folder, shards):
    """One line for the screen: how many shards each split has, and why the last file is val if it is."""
    train, val = split_shards(shards)
    test = len(shards) - len(train) - len(val)
    line = f"{folder}: {len(train):,} train shards, {len(val):,} val"
    line += f", {test:,} test (in neither split)" if test else ""
    if val and split_in_name(val[0].name) != "val":
        line += f"; val is the last file, {val[0].name} (to choose another, name it validation-*)"
        if train and os.path.dirname(val[0].name) not in {os.path.dirname(shard.name) for shard in train}:
            line += "; WARNING: train has no shard of val's folder"
    return printable(line)

def parquets_iter_batched(split: str, start: int = 0, step: int = 1, data_dir: str | None = None):
    """nanochat's: a list of documents for every `step`-th row group of each shard, from `start` on."""
    for shard in list_shards(data_dir, split):
        for row_group in range(start, len(shard.group_sizes), step):
            yield [text for text in shard.read(row_group).to_pylist() if text is not None]

# ---------------------------------------------------------------------------------------------------------
# The index: what a folder contains, known before the first read

INDEX, INDEX_FORMAT = "index.json", 2

def all_shards(folder: str) -> list["Shard"]:
    """Every shard that holds documents, sorted by name."""
    return shards_of(folder, read_index(folder) or cached_index(folder))

def shards_of(folder, index):
    dtype = index["dtype"] and np.dtype(index["dtype"]).newbyteorder("<")
    return [Shard(folder, name, entry["bytes"], entry["text_bytes"], entry["rows"], index["kind"], dtype,
                  index["tokenizer"], entry["digest"])
            for name, entry in sorted(index["shards"].items()) if any(entry["rows"])]    # skips Spark's empty

def read_index(folder: str) -> dict | None:
    """
    A folder's index.json, compared with the files if the folder is local; None if it has none.
    {"format": 2, "kind": "text", "dtype": None, "tokenizer": None, "shards":
     {"a.parquet": {"bytes": 925, "text_bytes": 2104, "rows": [24, 7], "digest": "b29037..."}, ...}}
    rows: documents of each row group. text_bytes (before compression) and digest (see digest_of; None if
    unknown) are those of the text shard, also if this one holds its tokens.
    """
    filesystem_of(folder)    # first: its errors are not the index's
    where, command = join_name(folder, INDEX), f"python dataset.py index {shlex.quote(folder)}"
    try:
        index = json.loads(retry(lambda: open_file(folder, INDEX).read(), folder))
        if index["format"] != INDEX_FORMAT:
            raise ValueError(f"its format is {index['format']!r}, this code reads {INDEX_FORMAT}")
        sizes = {(name, entry["bytes"]) for name, entry in index["shards"].items()}
        if odd := [name for name, _ in sizes if not SHARD_NAME.fullmatch(name) or not name.isprintable()]:
            raise ValueError(f"{odd[0]!r} is not the name of a shard below the folder")
        shards_of(folder, index)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:    # also RecursionError, and those of fsspec's clients
        raise ValueError(f"{where} cannot be used ({type(error).__name__}: {printable(error)}); if it is "
                         f"damaged: {command}") from error
    if "://" not in folder and (differ := sizes ^ {(name, size) for name, size, _ in list_files(folder)}):
        raise ValueError(f"{where} does not match its folder: {min(differ)[0]} is new, missing or resized; "
                         f"if the folder is complete: {command}")
    return index

def cached_index(folder):
    """The index of a folder that has none: from its footers, then kept under the base directory."""
    files = list_files(folder)
    real = folder if "://" in folder else os.path.realpath(folder)
    key = hashlib.sha256(json.dumps([INDEX_FORMAT, real, files]).encode()).hexdigest()[:16]
    path = os.path.join(get_base_dir(), "index", f"{key}.json")
    with locked(path):    # one process of a node reads the footers, the others wait for it
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return json.load(file)
        index = make_index(folder, files)
        if index["kind"] == "tokens":
            raise ValueError(f"{folder}: token shards without {INDEX}: run tokenize again to finish them")
        if len(index["shards"]) > 1:    # else list_shards raises an error with this line
            print(describe_split(folder, shards_of(folder, index)), file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):    # a full disk: the next start reads the footers again
            write_atomic(path, json.dumps(index).encode())
    return index

def make_index(folder, files):
    """From the footers of these files."""
    if not files:
        what = "is no folder of shards" if "://" in folder or os.path.exists(folder) else "does not exist"
        text = shlex.quote(folder) if os.path.isfile(folder) or any(list_local(folder)) else "FILES"
        raise FileNotFoundError(f"{folder} {what}; if it is a shard or has moved, name its folder (--data); "
                                f"to get some: python dataset.py -n 8, or {CONVERT} {text} --out NEW_FOLDER")
    with ThreadPoolExecutor(32) as pool:
        read = pool.map(functools.partial(read_entry, folder), files)
        entries = list(tqdm(read, "footers", len(files), unit="shard", delay=1, disable=None))
    heads = {" ".join(map(str, head.values())): name for name, head, _ in entries}
    if len(heads) > 1:
        raise ValueError(f"{folder} holds shards of different kinds: {heads}; put each in its own folder")
    return {"format": INDEX_FORMAT, **entries[0][1], "shards": {name: entry for name, _, entry in entries}}

def read_entry(folder, file):
    """(name, index fields shared by the folder, index entry of this shard), from its footer."""
    name, size, _ = file
    with errors_named(folder, name, "footer"):
        metadata, checksums = retry(lambda: parse_footer(folder, name, size), folder)
        schema, extra = metadata.schema.to_arrow_schema(), metadata.metadata or {}
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if sum(rows) != metadata.num_rows or len(checksums or rows) != len(rows):
            raise ValueError("its footer contradicts itself")
        kind = "text" if "text" in schema.names else "messages"
        head = {"kind": kind, "dtype": None, "tokenizer": None}
        if b"nanoloader.dtype" in extra:
            head = {"kind": "tokens", "dtype": extra[b"nanoloader.dtype"].decode(),
                    "tokenizer": extra[b"nanoloader.tokenizer"].decode()}
        # Of others' shards, the size of all columns: to ask a damaged footer for one column may abort Python.
        all_bytes = sum(metadata.row_group(i).total_byte_size for i in range(len(rows)))
        text_bytes = int(extra.get(TEXT_BYTES.encode(), all_bytes))
    if head["kind"] == kind and [is_text(field.type) for field in schema if field.name == kind] != [True]:
        seen = printable(", ".join(f"{field.name}: {field.type}" for field in schema))
        column = "" if "messages" in schema.names else " --text_key COLUMN"
        raise ShardError(f"{join_name(folder, name)}: expected one string column `text`, not {seen}; type: "
                         f"{CONVERT} {shlex.quote(folder)}{column} --out NEW_FOLDER")
    digest = digest_of(extra, checksums)
    return name, head, {"bytes": size, "text_bytes": text_bytes, "rows": rows, "digest": digest}

def write_index(folder: str, out: str | None = None) -> dict:
    """Read the footers of a folder or URI, and write the index beside them, or to the file `out`."""
    if out is None and "://" in folder:
        raise ValueError(f"cannot write to {folder}; pass --out {INDEX}, and copy that file there")
    index = make_index(folder, list_files(folder))
    write_atomic(out or os.path.join(folder, INDEX), json.dumps(index).encode())
    return index

# ---------------------------------------------------------------------------------------------------------
# Reading and writing shards

CHECKSUMS = b"nanoloader.checksums"    # in a footer: the checksum of each row group's documents
TEXT_DIGEST = b"nanoloader.text_digest"    # in a token shard's footer: the digest of its text shard
TEXT_BYTES = "nanoloader.text_bytes"    # in our footers: of the documents; in token shards, of their text

class ShardError(OSError):
    """A shard that cannot be read as it was written; the message names it, and what to type next."""

class Location(NamedTuple):
    """A document on disk."""
    path: str
    row_group: int
    row: int

    def __str__(self):
        return f"{self.path}, row group {self.row_group}, row {self.row}"

@dataclass(eq=False)
class Shard:
    """A parquet file of documents (column `text`, or `messages`: JSON) or of their ids (`tokens`)."""
    folder: str
    name: str
    file_size: int
    text_bytes: int            # of the documents, before compression; in a token shard, of its text
    group_sizes: list[int]     # documents in each row group
    kind: str                  # 'text', 'messages' or 'tokens'
    dtype: np.dtype | None     # of the token ids
    fingerprint: str | None    # of the tokenizer that made them
    digest: str | None = None    # of the text's checksums, see digest_of; None: not known

    @property
    def path(self) -> str:
        return join_name(self.folder, self.name)

    @property
    def n_documents(self) -> int:
        return sum(self.group_sizes)

    def read(self, row_group: int) -> pa.Array:
        """All documents of a row group: strings, or binary with raw token ids; ShardError if damaged."""
        with errors_named(self.folder, self.name, f"row group {row_group}"):
            return retry(lambda: self._read(row_group), self.folder)

    def _read(self, row_group):
        metadata, checksums = read_footer(self)
        with open_file(self.folder, self.name, self.file_size) as file:
            parquet = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=not checksums)
            column = parquet.read_row_group(row_group, [self.kind], use_threads=False).column(0)
        if len(column) != self.group_sizes[row_group] or is_text(column.type) != (self.kind != "tokens"):
            wanted = f"{self.group_sizes[row_group]:,}"
            raise ValueError(f"it has {len(column):,} {column.type}s, {wanted} in the index")
        if column.nbytes >= 2**31 or column.type not in (pa.string(), pa.binary()):    # plain 64-bit offsets
            column = column.cast(pa.large_binary() if self.kind == "tokens" else pa.large_string())
        array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        if checksums and checksum(array) != checksums[row_group]:
            raise ValueError("its documents are not those that were written (checksum)")
        array.validate(full=True)    # UTF-8 and offsets: 24 GB/s
        return array

@functools.lru_cache(maxsize=64)    # saves a request for each row group of a remote shard
def read_footer(shard):
    """What parse_footer returns; ValueError if the file was replaced. Cached for the life of this Shard."""
    metadata, checksums = parse_footer(shard.folder, shard.name, shard.file_size)
    if shard.digest and digest_of(metadata.metadata or {}, checksums) != shard.digest:
        raise ValueError(f"it was replaced by another shard of this size; if that is meant: "
                         f"python dataset.py index {shlex.quote(shard.folder)}")
    return metadata, checksums

def parse_footer(folder, name, size):
    """(metadata, checksums of the row groups' documents or None in shards that others wrote)"""
    with open_file(folder, name, size) as file:
        metadata = pq.ParquetFile(file).metadata
    return metadata, json.loads((metadata.metadata or {}).get(CHECKSUMS, b"null"))

def digest_of(extra, checksums):
    """Of a text shard; its token shard records it in its footer, `extra`. None if others wrote the text."""
    if b"nanoloader.dtype" in extra:
        return extra.get(TEXT_DIGEST, b"").decode() or None
    return checksums and hashlib.sha256(json.dumps(checksums).encode()).hexdigest()[:16]

@contextlib.contextmanager
def errors_named(folder, name, part, advice=None):
    """Turn any error inside into a ShardError that names the shard and says what to type."""
    try:
        yield
    except Exception as error:
        advice = advice or f"check it with: python -m dev.prepare verify --data {shlex.quote(folder)}"
        raise ShardError(f"{join_name(folder, name)}, {part}: {printable(error)}; {advice}") from error

def is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view())

def column_views(array: pa.Array) -> tuple[memoryview, np.ndarray, np.ndarray]:
    """An Arrow string or binary array as (data, offsets, valid): memoryview, int array, bool array."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    array = array.take(pa.array(range(len(array)))) if array.null_count else array    # no bytes below nulls
    _, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset:][:len(array) + 1]
    return memoryview(data or b""), offsets, ~np.asarray(array.is_null())

def check_documents(ids, bounds, array, tokenizer):
    """Check a tokenizer's or token shard's output: document i is ids[bounds[i]:bounds[i + 1]], BOS first."""
    if bounds.dtype.kind not in "iu" or len(bounds) != len(array) + 1 or bounds[0] or bounds[-1] != len(ids):
        raise ValueError(f"expected {len(array) + 1} integer bounds from 0 to {len(ids)}, got {bounds}")
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    lengths, begins, bos, size = np.diff(bounds), bounds[:-1][valid], tokenizer.bos, tokenizer.size
    largest = max(int(ids.max()), ~int(ids.min())) if len(ids) else 0
    if ((lengths[valid] < 1).any() or lengths[~valid].any() or largest >= size
            or not np.isin(ids[begins].astype(np.int64), (bos, ~bos)).all()):
        raise ValueError(f"expected BOS ({bos}) first, no tokens of nulls, all below {size}; saw {largest}")

def checksum(array: pa.Array) -> int:
    """
    CRC-32 of a row group's documents: of their lengths, nulls, and the sums of each 4 KB of bytes as 64-bit
    words: 42 GB/s on one core, and 7 GB/s for a CRC of the bytes (25 % of the speed of reading tokens).
    Parquet's page checksums cover neither its headers nor a file replaced by another of the same size.
    """
    if not len(array):
        return 0
    data, offsets, valid = column_views(array)
    crc = zlib.crc32(np.where(valid, np.diff(offsets), -1).astype("<i8"))
    content = data[offsets[0]:offsets[-1]]
    n_blocks = len(content) // 4096
    words = np.frombuffer(content, "<u8", n_blocks * 512).reshape(n_blocks, 512)
    return zlib.crc32(content[n_blocks * 4096:], zlib.crc32(words.sum(axis=1, dtype="<u8"), crc))

def write_shard(path: str, row_groups: Iterable[pa.Array | pa.Table], column: str = "text",
                metadata: dict | None = None, compression: str = "zstd") -> None:
    """
    Write one shard; `path` appears atomically, once complete and on disk. row_groups: arrays of documents, or
    tables whose first column is `column` (readers ignore the others).
    """
    schema = pa.schema([(column, pa.binary() if column == "tokens" else pa.string())])
    tables = (rows if isinstance(rows, pa.Table) else pa.table([rows], schema=schema) for rows in row_groups)
    checksums, text_bytes, first = [], 0, next(tables, schema.empty_table())
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    with atomic_file(path) as part, \
            pq.ParquetWriter(part, first.schema, compression=compression, **options) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table, row_group_size=max(1, len(table)))
            documents = table.combine_chunks().column(0).chunk(0)    # copies only pieces
            checksums.append(checksum(documents))
            text_bytes += int(np.ptp(column_views(documents)[1]))
        own = {CHECKSUMS: json.dumps(checksums), TEXT_BYTES: str(text_bytes)}
        writer.add_key_value_metadata(own | (metadata or {}))

def write_atomic(path: str, data: bytes) -> None:
    """`path` appears atomically, once complete and on disk."""
    with atomic_file(path) as part, open(part, "wb") as file:
        file.write(data)

@contextlib.contextmanager
def atomic_file(path):
    """Yields a temporary name, which becomes `path` at the end, or is removed after an error."""
    part = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno:    # a full disk's error names no file
            error.filename = error.filename or path
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)

# ---------------------------------------------------------------------------------------------------------
# Which data: the given folder, or the default one, or a built-in corpus: the standard library's sources

BUILTIN_VERSION, BUILTIN_TRAIN_SHARDS, BUILTIN_VAL_BYTES = 1, 4, 1_000_000    # change with the recipe
BUILTIN_ROW_GROUPS = 16    # in a shard, so that 2, 4, 8 and 16 lanes get an even share

def find_data(data_dir: str | None = None) -> str:
    """The given folder or URI; else downloaded or converted shards; else the built-in corpus."""
    if data_dir is not None or list_files(default_data_dir()):
        return default_data_dir() if data_dir is None else data_dir
    folder = os.path.join(get_base_dir(), f"builtin-v{BUILTIN_VERSION}-python-{sys.version.split()[0]}")
    with locked(folder):
        if not os.path.exists(os.path.join(folder, INDEX)):
            build_builtin_corpus(folder)
    return folder

def build_builtin_corpus(folder: str) -> None:
    """Shards of the running Python's UTF-8 sources, one document per file, always in the same order."""
    root, paths, documents = sysconfig.get_path("stdlib"), [], []
    for parent, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__")]
        paths += [os.path.join(parent, name) for name in names if name.endswith(".py")]
    for path in sorted(paths, key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).digest()):
        with contextlib.suppress(UnicodeDecodeError, OSError), open(path, encoding="utf-8") as file:
            documents += filter(None, [file.read()])    # no empty ones
    size = sum(map(len, documents))
    print(f"no data yet (to download: python dataset.py -n 8): building a corpus of Python's library, "
          f"{len(documents):,} files, {size / 1e6:.1f} MB", flush=True)
    # Every k-th document by size is val: a fair sample, although a few files hold much of the text.
    by_size = sorted(range(len(documents)), key=lambda i: (len(documents[i]), i))
    step = max(2, round(size / BUILTIN_VAL_BYTES))
    val = set(by_size[step // 2 :: step])
    train = [text for i, text in enumerate(documents) if i not in val]
    parts = [train[i::BUILTIN_TRAIN_SHARDS] for i in range(BUILTIN_TRAIN_SHARDS)]
    for number, part in enumerate([*parts, [documents[i] for i in sorted(val)]]):
        cuts = itertools.pairwise(np.linspace(0, len(part), BUILTIN_ROW_GROUPS + 1).astype(int))
        groups = (pa.array(part[a:b], pa.string()) for a, b in cuts)
        write_shard(f"{folder}/shard_{number:05d}.parquet", groups)
    write_index(folder)

# ---------------------------------------------------------------------------------------------------------
# Folders and files, local or remote; processes; the screen

# Files that begin with . or _ are other tools'. Packed shards are included: reading one is an error.
SHARD_NAME = re.compile(r"(?!.*/[._])[^._/].*(?i:\.(parquet|pq)(\.(gz|zst|bz2|xz|lz4))?)", re.DOTALL)
RETRY_SECONDS = 1.0    # the first wait, on average; each later one is twice as long
ENDING = threading.Event()    # the program ends: set before Python waits for the threads of executors
threading._register_atexit(ENDING.set)

def get_base_dir() -> str:
    """$NANOLOADER_BASE_DIR, or ~/.cache/nanoloader; made by the first write."""
    return os.environ.get("NANOLOADER_BASE_DIR") or os.path.expanduser("~/.cache/nanoloader")

def default_data_dir() -> str:
    """The folder of downloads and conversions, where train.py looks first."""
    return os.path.join(get_base_dir(), "base_data")

def list_files(folder: str) -> list[tuple[str, int, int]]:
    """(name, bytes, time) of the shards in a folder and below it, as in Hive's year=2024/; sorted by name."""
    if folder.startswith(("http://", "https://")):
        raise ValueError(f"{folder}: web servers list no files; write {INDEX}: python dataset.py index DIR")
    if "://" in folder:
        fs, root = filesystem_of(folder)
        infos = fs.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
        found = [(f.path[len(root):].lstrip("/") + "/" * (not f.is_file), f.size, f.mtime_ns) for f in infos]
    else:
        found = list(list_local(folder))
    files = sorted(file for file in found if SHARD_NAME.fullmatch(file[0]))
    versions = {name.split("/")[1] for name, _, _ in files if name.startswith("snapshots/")}
    if len(versions) > 1 or any(re.search(r"(^|/)(_delta_log|\.hoodie)/", name) for name, _, _ in found):
        raise ValueError(f"{folder} also holds files of older versions (a Delta table or a cache of Hugging "
                         "Face): name the folder of one version, or export it to new files")
    if odd := [name for name, _, _ in files if not name.isprintable()]:
        raise ValueError(f"{folder}: rename {odd[0]!a}: it is not UTF-8, or has control characters")
    return files

def list_local(folder):
    """
    pyarrow's FileSelector would silently skip broken symlinks, and follow symlink loops. Links come after the
    folders, so that a link to one of them does not give its files other names.
    """
    folders, links, seen = [""] * os.path.isdir(folder), [], set()
    while folders or links:
        prefix = (folders or links).pop(0)
        if (real := os.path.realpath(os.path.join(folder, prefix))) in seen:
            continue
        seen.add(real)
        for entry in sorted(os.scandir(real), key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.is_dir():
                yield f"{name}/", 0, 0
                (links if entry.is_symlink() else folders).append(f"{name}/")
            else:
                info = entry.stat() if SHARD_NAME.fullmatch(name) else None    # others may vanish
                yield name, *((info.st_size, info.st_mtime_ns) if info else (0, 0))

def join_name(folder, name):    # s3://bucket/dir?region=x, f -> s3://bucket/dir/f?region=x
    head, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"

def source_name(path):    # a, a/ and ./a are one folder
    return str(path).rstrip("/") if "://" in str(path) else os.path.normpath(path)

@functools.lru_cache(maxsize=16)
def filesystem_of(folder):
    """(file system, path in it): pyarrow's if it has one for the scheme, else fsspec's."""
    try:
        fs, root = pafs.FileSystem.from_uri(folder if "://" in folder else os.path.abspath(folder))
    except (pa.ArrowException, ImportError) as refused:
        import fsspec
        try:
            fs, root = fsspec.core.url_to_fs(folder)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{folder}: {refused}; {error}; https:// needs: pip install aiohttp") from error
        fs = pafs.PyFileSystem(pafs.FSSpecHandler(fs))
    return fs, root.rstrip("/")

def open_file(folder, name, size=None):
    """A seekable pyarrow file; an error if it does not have the size that was listed."""
    fs, root = filesystem_of(folder if "://" in folder else os.path.abspath(folder))
    path = join_name(root, name)
    if isinstance(fs, pafs.PyFileSystem):    # its own open fetches all of a web file, to see if it exists
        if size is None:
            return pa.BufferReader(fs.handler.fs.cat_file(path))
        return pa.PythonFile(fs.handler.fs.open(path, size=size, cache_type="none"), mode="r")
    file = fs.open_input_file(path)    # no memory map: truncating the file would kill us
    if size not in (None, file.size()):
        raise OSError(f"it has {file.size():,} bytes, but {size:,} when the folder was listed")
    return file

def retry(work: Callable, folder: str, attempts: int = 6):
    """Call work(); for a remote folder, retry with backoff, except on a missing file."""
    for attempt in range(attempts):
        try:
            return work()
        except Exception as error:
            if attempt == attempts - 1 or "://" not in folder or isinstance(error, FileNotFoundError):
                raise
            print(f"{folder}: {printable(error):.200}; trying again", file=sys.stderr, flush=True)
            if ENDING.wait(RETRY_SECONDS * 2 ** attempt * random.uniform(0.5, 1.5)):
                raise

@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of `path`. Without one (Windows, some Lustre mounts), two may do the same work."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            import fcntl
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fcntl.flock(held.enter_context(open(path + ".lock", "a")), fcntl.LOCK_EX)
        yield

def in_order(executor: ThreadPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator:
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

def cores() -> int:    # that this process may use; torchrun's processes share a machine's
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, n // (env_int("LOCAL_WORLD_SIZE", least=1) or 1))

def env_int(name: str, least: int) -> int | None:
    """A launcher's environment variable; None if it is not set."""
    value = os.environ.get(name)
    if value is not None and (not value.isdecimal() or int(value) < least):
        raise ValueError(f"{name}={value!r} in the environment; expected a whole number, {least} or more")
    return value and int(value)

def printable(text) -> str:
    """One line of text from a disk or a network, without control characters: 'a\\n\\x1bb' -> 'a \\x1bb'."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(text).split()))

class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line."""
    def error(self, message):
        self.exit(2, f"error: {printable(message)}; see {self.prog} --help\n")

@contextlib.contextmanager
def errors_in_one_line():
    """For commands: print user, disk and network errors in one line, without a traceback."""
    try:
        yield
    except BrokenPipeError:    # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)    # as a shell reports SIGPIPE: a run that ends here is not done
    except KeyboardInterrupt:
        sys.exit("\nstopped; type the same command to continue or repeat it")
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        sys.exit(f"error: {printable(error)}")

# ---------------------------------------------------------------------------------------------------------
# Download, by huggingface_hub

REPOSITORY, MAX_SHARD = "karpathy/climbmix-400b-shuffle", 6542    # the last shard is val

def download(n_train: int, folder: str, workers: int = 4) -> None:
    """Fetch train shards and the val shard, and write index.json once all are there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    def fetch(name, only_ask=False):
        with errors_named("hf://datasets/" + REPOSITORY, name, "download", "the same command resumes"):
            stated = get_hf_file_metadata(hf_hub_url(REPOSITORY, name, repo_type="dataset")).etag
            if only_ask:
                return
            path = hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
            if (seen := hashlib.sha256(np.memmap(path, "u1", "r")).hexdigest()) != stated:
                os.unlink(path)
                raise OSError(f"its SHA-256 is {seen}, but {stated} on the hub")

    names = [f"shard_{number:05d}.parquet" for number in (MAX_SHARD, *range(n_train))]
    fetch(names[0], only_ask=True)    # once: hf_hub_download would try for a minute to reach a dead network
    pool = ThreadPoolExecutor(workers)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, INDEX))    # stale until all are there
    try:
        for batch in (names[:1], names[1:]):    # val first: else another shard would be val meanwhile
            fetched = pool.map(lambda name: retry(lambda: fetch(name), "hf://", attempts=3), batch)
            list(tqdm(fetched, "shards", len(batch), unit="shard", disable=None))
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr, flush=True)
        os._exit(130)    # sys.exit would wait for the downloads in flight
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    write_index(folder)
    print(f"{len(names):,} shards are in {folder}")

def main(argv: list[str] | None = None) -> None:
    parser = Parser("python dataset.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("index", nargs="*", metavar="index DIR", help="folder or URI of parquet shards")
    parser.add_argument("-n", "--num_files", type=int, default=0, help="train shards to download (-1: all)")
    parser.add_argument("-w", "--num_workers", type=int, default=4, help="downloads at once (default 4)")
    parser.add_argument("--out", help="index: the file; download: the folder (default: where train.py looks)")
    flags = parser.parse_args(argv)
    with errors_in_one_line():
        if len(flags.index) == 2 and flags.index[0] == "index":
            index = write_index(flags.index[1], flags.out)
            print(describe_split(flags.index[1], shards_of(flags.index[1], index)) + "; index written")
        elif flags.index or flags.num_files < -1 or flags.num_files == 0 or flags.num_workers < 1:
            parser.error("expected `index DIR`, or -n: train shards, or -1 for all, and -w: at least 1")
        else:
            n_train = flags.num_files if 0 < flags.num_files < MAX_SHARD else MAX_SHARD
            download(n_train, flags.out or default_data_dir(), flags.num_workers)

if __name__ == "__main__":
    main()
