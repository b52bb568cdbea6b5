"""
Where the documents are: list, read, download, convert, tokenize and check parquet shards.

    python dataset.py -n 8 -w 4                                   # 8 public train shards, and the val shard
    python dataset.py convert 'my/*.json.gz' --text-key content   # your own text, shuffled into shards
    python dataset.py tokenize --data DIR --out DIR               # the same shards, tokens in place of text
    python dataset.py verify                                      # every shard against all its checksums
    python dataset.py stats                                       # documents, bytes, lengths, lanes

Data is a folder or a URI (s3://, gs://, hf://, the http:// address of a list) of parquet files with a
column `text`; the last file is val. Shards written here carry a CRC-32 of every row group's documents, and
each read checks it: token ids then read at 2,157 M/s on one core, where pyarrow alone reads 4,915. Of 4,000
random corruptions of such a shard 3,863 were an error, 137 harmless, and none gave other text; of 1,000
corruptions of a shard without any checksums 39 did.
"""

import argparse
import base64
import contextlib
import email.utils
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from urllib.parse import urljoin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import requests

TIMEOUT = (10, 30)    # seconds to connect, seconds without a byte
RETRY_SECONDS = 1.0    # the first wait, about; doubled each time
READ_ATTEMPTS = 5    # of a row group far away

# ---------------------------------------------------------------------------------------------------------
# Folders and files, here or far away

def get_base_dir() -> str:
    """$NANOLOADER_BASE_DIR, or ~/.cache/nanoloader; made on demand."""
    base = os.environ.get("NANOLOADER_BASE_DIR") or os.path.expanduser("~/.cache/nanoloader")
    os.makedirs(base, exist_ok=True)
    return base


def default_data_dir() -> str:
    """Where downloads and conversions go, and where train.py looks first."""
    return os.path.join(get_base_dir(), "base_data")


def is_http(folder):
    return folder.startswith(("http://", "https://"))


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


def list_files(folder) -> dict[str, int]:
    """{name: bytes} of the files in a folder, sorted, in one listing however many they are."""
    if is_http(folder):
        return list_http(folder)
    fs, root = filesystem_of(folder)
    found = fs.get_file_info(pafs.FileSelector(root, allow_not_found=True))
    return dict(sorted((info.base_name, info.size) for info in found if info.is_file))


def list_http(url):
    """`url` is a text file with a shard a line, `name bytes`; names are relative to it."""
    def get():
        response = requests.get(url, timeout=TIMEOUT)
        response.raise_for_status()
        return response

    response, files = retry(get, READ_ATTEMPTS), {}
    for number, line in enumerate(response.text.splitlines(), 1):
        name, _, size = line.strip().rpartition(" ")
        if not (name and size.isdigit()):
            raise ValueError(f"{url}, line {number}: expected `name bytes`, saw {line[:60]!r}; "
                             "make the list with: stat -c '%n %s' *.parquet *.json > shards.txt")
        files[name.strip()] = int(size)
    return dict(sorted(files.items()))


def join_name(folder, name):
    """Path or URI of a file. Example: s3://bucket/dir?region=x, f -> s3://bucket/dir/f?region=x"""
    if is_http(folder):
        return urljoin(folder, name)
    head, mark, query = folder.partition("?") if "://" in folder else (folder, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{query}"


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
        headers = {"Range": f"bytes={self.position}-{end - 1}", "Accept-Encoding": "identity"}
        response = requests.get(self.url, headers=headers, timeout=TIMEOUT)
        seen, wanted = response.headers.get("Content-Range"), f"bytes {self.position}-{end - 1}/{self.length}"
        if response.status_code != 206 or seen != wanted:
            raise OSError(f"asked for {wanted}, got {seen or 'no range'}, status {response.status_code}")
        buffer[:end - self.position] = response.content
        self.position = end
        return len(response.content)


@contextlib.contextmanager
def lock_file(path, wait=True):
    """Hold a lock file; yields whether we do. The system frees it when its holder dies."""
    with open(path, "a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except ImportError:    # Windows: no lock; the renames are atomic all the same
            pass
        except BlockingIOError:
            yield False
            return
        yield True


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


def retry(work, attempts):
    """work(), up to so many times, with growing waits in between."""
    for attempt in range(attempts):
        try:
            return work()
        except Exception:
            if attempt + 1 == attempts:
                raise
            time.sleep(retry_wait(attempt))


def retry_wait(attempt):
    return random.uniform(0.5, 1) * RETRY_SECONDS * 2 ** min(attempt, 6)


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
        self.began = self.shown = time.time()
        self.lock = threading.Lock()

    def add(self, n_bytes=0, done=0):
        with self.lock:
            self.bytes, self.done = self.bytes + n_bytes, self.done + done
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

    def close(self):
        with self.lock:
            self.show(end="\n")


# ---------------------------------------------------------------------------------------------------------
# Shards: listing and reading

CHECKSUMS = b"nanoloader.checksums"    # in a footer: the checksum of each row group's documents


class ShardError(OSError):
    """A shard that cannot be read as it was written; the message names it, and what to type next."""


class Shard:
    """
    One parquet file of documents (column `text`) or of their token ids (column `tokens`).

    `size` is that of the text shard, also where this one holds its tokens: one fingerprint for both. Nothing
    is opened before `rows`, `kind`, `dtype` or `read` need it, and nothing stays open. Thread-safe.
    """

    def __init__(self, folder, name, file_size, text_size=None):
        self.folder, self.name, self.file_size, self.text_size = folder, name, file_size, text_size
        self.path, self.size = join_name(folder, name), file_size if text_size is None else text_size
        self.facts = None

    @property
    def rows(self) -> list[int]:
        """Documents in each row group."""
        return self.footer()["rows"]

    @property
    def kind(self) -> str:
        """'text' or 'tokens'."""
        return self.footer()["kind"]

    @property
    def dtype(self) -> np.dtype | None:
        """Of the token ids."""
        return self.footer()["dtype"]

    @property
    def fingerprint(self) -> str | None:
        """Of the tokenizer that made the ids."""
        return self.footer()["fingerprint"]

    def read(self, row_group: int) -> pa.Array:
        """All documents of a row group: strings, or binary with raw token ids; ShardError if damaged."""
        return self._attempt(lambda: self._read(row_group), f"row group {row_group}")

    def _read(self, row_group):
        facts = self.footer()
        rows, kind, checksums = facts["rows"][row_group], facts["kind"], facts["checksums"]
        with open_file(self.folder, self.name, self.file_size) as file:
            # Our checksum of ids says all that the pages' would, which cost two thirds of the speed.
            pages = kind == "text" or not checksums
            parquet = pq.ParquetFile(file, metadata=read_metadata(self.folder, self.name, self.file_size),
                                     page_checksum_verification=pages, pre_buffer=False)
            table = parquet.read_row_group(row_group, columns=[kind], use_threads=False)
        array = one_array(table.column(0), kind)
        if len(array) != rows:
            raise ValueError(f"it has {len(array):,} documents, but its footer said {rows:,}")
        if checksums and checksum(array) != checksums[row_group]:
            raise ValueError("its documents are not those that were written (checksum)")
        array.validate(full=True)    # UTF-8 and offsets: 24 GB/s
        return array

    def footer(self):
        """What is kept of the footer: a few numbers, so that thousands of shards cost little."""
        if self.facts is None:    # no lock, which a fork could inherit taken; read twice does no harm
            metadata = self._attempt(lambda: read_metadata(self.folder, self.name, self.file_size), "footer")
            self.facts = self._attempt(lambda: self._facts(metadata), "footer", attempts=1)
        return self.facts

    def _facts(self, metadata):
        schema, extra = metadata.schema.to_arrow_schema(), metadata.metadata or {}
        kind = "tokens" if "tokens" in schema.names and "text" not in schema.names else "text"
        check_column(schema, kind)
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        checksums = json.loads(extra[CHECKSUMS]) if CHECKSUMS in extra else None
        if sum(rows) != metadata.num_rows or len(checksums or rows) != len(rows):
            raise ValueError("its footer contradicts itself")
        facts = {"kind": kind, "rows": rows, "checksums": checksums, "dtype": None, "fingerprint": None}
        if kind == "tokens":
            if self.text_size is None:
                raise ValueError("no source.json stands beside it; let `python dataset.py tokenize` end")
            facts["dtype"] = np.dtype(extra[b"nanoloader.dtype"].decode()).newbyteorder("<")
            facts["fingerprint"] = extra[b"nanoloader.tokenizer"].decode()
        return facts

    def _attempt(self, work, place, attempts=None):
        """work(), again where the shard is far away; what still fails names the shard, and what to type."""
        try:
            return retry(work, attempts or (READ_ATTEMPTS if "://" in self.folder else 1))
        except ShardError:
            raise
        except Exception as error:    # whatever damaged bytes make pyarrow raise
            raise ShardError(f"{self.path}, {place}: {one_line(error)}; check it with: "
                             f"python dataset.py verify --data {self.folder}") from error


@functools.lru_cache(maxsize=64)
def read_metadata(folder, name, size):
    """The parsed footer: a request saved for each row group that is read from far away."""
    with open_file(folder, name, size) as file:
        return pq.ParquetFile(file).metadata


def check_column(schema, kind):
    if kind not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise ValueError(f"it has no column `text`, only {names}; make shards of it with: "
                         f"python dataset.py convert FILES --text-key {(schema.names or ['COLUMN'])[0]}")
    seen = schema.field(kind).type
    if not (is_text(seen) if kind == "text" else pa.types.is_binary(seen)):
        raise ValueError(f"its column `{kind}` holds {seen}, not {'strings' if kind == 'text' else 'binary'}")


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def one_array(column, kind):
    """The chunks of a column as one array with plain offsets, 64-bit ones where 2 GB are not enough."""
    if (kind == "text" and column.type != pa.string()) or column.nbytes >= 2**31:
        column = column.cast(pa.large_string() if kind == "text" else pa.large_binary())
    chunks = column.chunks or [pa.array([], column.type)]
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


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


def list_parquet_files(data_dir: str | None = None) -> list[str]:
    """Full paths (or URIs) of the shards in a folder, sorted; the last one is val."""
    folder = data_dir or default_data_dir()
    return [join_name(folder, name) for name in list_files(folder) if name.endswith(".parquet")]


def list_shards(data_dir: str | None, split: str) -> list[Shard]:
    """The shards of a split: the last file is val, the others are train. One listing; no shard is opened."""
    if split not in ("train", "val"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'val'")
    shards = all_shards(data_dir or default_data_dir())
    if len(shards) == 1:
        raise ValueError(f"there is only one parquet file, {shards[0].path}; the last one is val, so there "
                         "must be two: python dataset.py -n 8 gets more, convert makes them of your own text")
    return shards[-1:] if split == "val" else shards[:-1]


def all_shards(folder):
    files = list_files(folder)
    shards = {name: size for name, size in files.items() if name.endswith(".parquet")}
    if not shards:
        raise FileNotFoundError(f"no parquet files in {folder}; get some with: python dataset.py -n 8, "
                                "or make them of your own text: python dataset.py convert FILES")
    texts = {}
    if "source.json" in files:    # token shards
        with open_file(folder, "source.json", files["source.json"]) as file:
            texts = json.loads(file.read())
        if texts.keys() != shards.keys():
            odd = ", ".join(sorted(texts.keys() ^ shards.keys())[:3])
            raise ValueError(f"{folder}: source.json and the shards beside it differ in {odd}; "
                             "run `python dataset.py tokenize` again")
    return [Shard(folder, name, size, texts.get(name)) for name, size in shards.items()]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1,
                          data_dir: str | None = None) -> Iterator[list[str]]:
    """nanochat's: the documents of every `step`-th row group of each shard from `start` on, a list each."""
    for shard in list_shards(data_dir, split):
        for row_group in range(start, len(shard.rows), step):
            yield [text for text in shard.read(row_group).to_pylist() if text is not None]


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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


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


def check_local(folder):
    if "://" in folder:
        raise ValueError(f"cannot write to {folder}: write to a local folder, then copy it there")


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
    if list_parquet_files():
        return default_data_dir()
    version = ".".join(map(str, sys.version_info[:3]))
    folder = os.path.join(get_base_dir(), f"builtin-v{BUILTIN_VERSION}-python-{version}")
    with lock_file(folder + ".lock"):
        if not os.path.isdir(folder):
            build_builtin_corpus(folder)
    return folder


def build_builtin_corpus(folder: str) -> None:
    """Shards of the running Python's own sources, a document a file, always in the same order."""
    documents = standard_library(sysconfig.get_path("stdlib"))
    size = sum(map(len, documents))
    print(f"no data yet: making a corpus of Python's library, {len(documents):,} files, {size / 1e6:.1f} MB")
    print("(real data: python dataset.py -n 8 gets public shards, convert takes your own files)", flush=True)
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
# Download: parallel, resumed by byte range, verified, renamed when whole

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
MAX_SHARD = 6542    # the last public shard: val
FETCH_ATTEMPTS = 6    # in a row that bring not a byte
FETCH_COPIES = 3    # whole files that were not what the server stated
PIECE = 1 << 16    # a connection that drops loses less than this


class Refused(OSError):
    """An answer that trying again will not change, such as 404."""


class Damaged(OSError):
    """A whole file that is not what the server stated."""


def download(names: list[str], folder: str, base_url: str = BASE_URL, workers: int = 4) -> dict[str, str]:
    """
    Fetch the named shards into a folder; returns {name: why not} of those that could not be had.

    Any number of downloaders may share the folder. Stopped at any point, the same call goes on from there.
    """
    check_local(folder)
    os.makedirs(folder, exist_ok=True)
    queue, failed, stop = deque(names), {}, threading.Event()
    progress = Progress(len(names), "shards")

    def work():
        while queue and not stop.is_set():
            with contextlib.suppress(IndexError):
                name = queue.popleft()
                try:
                    if not fetch_locked(f"{base_url}/{name}", os.path.join(folder, name), progress, stop):
                        queue.append(name)    # another downloader is at it: look again later
                        stop.wait(0.2)
                except Exception as error:
                    failed[name] = one_line(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)    # not join(): Ctrl-C must come through
    finally:
        stop.set()
        progress.close()
    return failed


def fetch_locked(url, path, progress, stop):
    """Fetch a file unless it is there; False where another downloader holds its lock."""
    with lock_file(path + ".lock", wait=False) as mine:
        if mine and not is_whole(path):
            fetch(url, path, progress, stop)
        if mine and os.path.exists(path):
            progress.add(done=1)
            with contextlib.suppress(OSError):
                os.unlink(path + ".lock")    # whoever waits for it looks for the file first
    return mine


def fetch(url, path, progress, stop):
    """Download one file: whole, checked, under its own name, or an error. Waits between its attempts."""
    part, attempts, copies = path + ".part", 0, 0
    while not stop.is_set():
        before = size_of(part)
        try:
            if fetch_rest(url, part, progress, stop):
                rename_whole(part, path)
            return
        except Refused:
            raise
        except Damaged as error:
            remove(part, part + ".json")
            copies, reason = copies + 1, error
        except (OSError, ValueError) as error:    # whatever requests raises is an OSError
            attempts, reason = attempts + 1 if size_of(part) <= before else 0, error
        if attempts >= FETCH_ATTEMPTS or copies >= FETCH_COPIES:
            raise OSError(f"{url}: gave up: {one_line(reason)}") from reason
        stop.wait(getattr(reason, "retry_after", retry_wait(attempts)))


def fetch_rest(url, part, progress, stop):
    """Append what is missing to the part file; True when all that the server states is there."""
    stated = read_json(part + ".json")
    have = size_of(part) if stated.get("tag") else 0    # without a tag the file may be another by now
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": stated["tag"]}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if response.status_code == 416 and have == stated["size"]:
            return True    # stopped between the last byte and the rename
        check_status(response)
        start, size = stated_range(response, have)
        if not start:
            remove(part)    # before the new tag is there
        with open(part + ".json", "w") as file:
            json.dump({"tag": tag_of(response), "size": size, "sha256": stated_sha256(response)}, file)
        progress.piece_bytes = size or 0
        with open(part, "r+b" if start else "wb", buffering=0) as file:
            file.seek(start)
            for piece in response.iter_content(PIECE):
                file.write(piece)
                progress.add(len(piece))
                if stop.is_set():
                    return False
    if size is not None and size_of(part) < size:
        raise OSError(f"the connection ended after {size_of(part):,} of {size:,} bytes")
    return True


def check_status(response):
    status, after = response.status_code, response.headers.get("Retry-After", "")
    if status in (200, 206):
        return
    answer = f"the server answered {status} {response.reason}"
    if status == 416:
        raise Damaged(answer)
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise Refused(f"{response.url}: {answer}")
    error = OSError(answer)
    with contextlib.suppress(ValueError, TypeError):
        date = None if after.isdigit() else email.utils.parsedate_to_datetime(after)
        error.retry_after = min(600, float(after) if date is None else max(0, date.timestamp() - time.time()))
    raise error


def stated_range(response, have):
    """(first byte that comes, bytes of the whole file or None)"""
    if response.status_code == 200:
        length = response.headers.get("Content-Length")
        return 0, int(length) if length else None
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if not match or int(match[1]) != have:
        raise Damaged(f"asked for the bytes from {have:,} on, got {response.headers.get('Content-Range')!r}")
    return have, int(match[2])


def tag_of(response):
    """What If-Range needs to know that the file did not change: a strong ETag, or else the date."""
    tag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified", "") if tag.startswith("W/") else tag


def stated_sha256(response):
    """
    The SHA-256 of the file in hex where the server states one, else None: Hugging Face in X-Linked-ETag of
    its redirect, others in Repr-Digest (RFC 9530), Digest (RFC 3230) or x-amz-checksum-sha256.
    """
    for answer in (*response.history, response):
        if re.fullmatch('"?[0-9a-f]{64}"?', answer.headers.get("X-Linked-ETag", "")):
            return answer.headers["X-Linked-ETag"].strip('"')
    for name in ("Repr-Digest", "Digest", "x-amz-checksum-sha256"):
        match = re.search(r"(?i)(?:^|sha-256=:?)([a-z0-9+/]{43}=)", response.headers.get(name, ""))
        if match:
            return base64.b64decode(match[1]).hex()
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
    with open(os.path.join(os.path.dirname(path), "SHA256SUMS"), "a") as file:
        file.write(f"{seen}  {os.path.basename(path)}\n")    # for verify, or sha256sum -c
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
# Convert: whatever text there is -> shuffled shards, in bounded memory
#
# A document's key is a hash of where it stood, and the shards hold the documents in the order of their keys:
# a shuffle that is the same for any number of processes. First they parse the inputs into runs of RUN_BYTES
# of text, sorted by key; then they gather each shard from its range of keys in all the runs. 201 MB of text
# as .json.gz: 142 MB/s on 2 cores, 642 MB of memory in all processes together.

RUN_BYTES = 32 << 20
SHARD_BYTES = 300_000_000    # of text: about 100 MB as zstd
ROW_GROUP_DOCUMENTS = 1024
ROW_GROUP_BYTES = 32 << 20    # fewer documents in a row group where they are long
VAL_DOCUMENTS = 64    # at least, where there are ten times as many: a lane needs one
SLOTS = 1 << 16    # of the histogram of keys, by which the shards are planned
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".txt")
CODECS = {".gz": "gzip", ".zst": "zstd"}
BAD_SHOWN = 5
RUN = pa.schema([("key", pa.uint64()), ("text", pa.large_binary())])


def convert(inputs: list[str], out: str, text_key: str = "text", skip_bad: bool = False, seed: int = 0,
            workers: int | None = None, shard_bytes: int = SHARD_BYTES) -> dict:
    """
    Make shards of .jsonl/.json (plain, .gz, .zst), .parquet and .txt files; the last one, about 1 %, is val.

    `inputs`: paths, folders, globs, URIs. Nothing stands under `out` before everything does. ValueError names
    file and line of the first bad document; with `skip_bad` the report counts them and shows the first few.
    """
    check_local(out)
    (files, others), building = find_inputs(inputs), os.path.abspath(out) + ".convert.tmp"
    os.makedirs(os.path.dirname(building), exist_ok=True)
    with lock_file(building + ".lock"):
        try:
            if os.path.isdir(out) and os.listdir(out):
                raise ValueError(f"{out} is not empty; name a new folder with --out, or remove it first")
            shutil.rmtree(building, ignore_errors=True)    # of a run that was killed
            os.makedirs(building + "/runs")
            os.makedirs(building + "/shards")
            context = multiprocessing.get_context("spawn")    # pyarrow's threads do not survive a fork
            with ProcessPoolExecutor(workers or cores(), mp_context=context) as pool:
                bad = scatter_all(pool, files, building, text_key, skip_bad, seed)
                counts = gather_all(pool, building, shard_bytes)
            if os.path.isdir(out):
                os.rmdir(out)
            os.rename(building + "/shards", out)
        finally:
            shutil.rmtree(building, ignore_errors=True)
            remove(building + ".lock")
    shown = [message for _, messages in bad for message in messages]
    return {"files": len(files), "others": others, "bad": sum(count for count, _ in bad),
            "shown": shown[:BAD_SHOWN], **counts}


def scatter_all(pool, files, building, text_key, skip_bad, seed):
    total = sum(size for _, _, size in files)
    progress = Progress(len(files), "files", total / len(files))
    scatter = functools.partial(scatter_task, building=building, text_key=text_key, skip_bad=skip_bad,
                                seed=seed)
    bad = []
    for (_, group), found in in_order(pool, scatter, group_files(files, total), 4 * cores()):
        bad.append(found)
        progress.add(sum(file[2] for _, file in group), len(group))
    progress.close()
    return bad


def gather_all(pool, building, shard_bytes):
    documents, text = histogram(list_runs(building))
    edges = plan_shards(documents, text, shard_bytes)
    progress = Progress(len(edges) - 1, "shards", text.sum() / (len(edges) - 1))
    shards = [(number, *edge, documents, text) for number, edge in enumerate(itertools.pairwise(edges))]
    gather = functools.partial(gather_shard, building=building)
    for (_, low, high, _, _), _ in in_order(pool, gather, shards, 4 * cores()):
        progress.add(int(text[low:high].sum()), 1)
    progress.close()
    return {"documents": int(documents.sum()), "bytes": int(text.sum()), "shards": len(shards)}


def find_inputs(inputs: list[str]) -> tuple[list[tuple[str, str, int]], list[str]]:
    """
    (folder, name, size) of every file that paths, folders, globs and URIs stand for, each once, sorted; and
    what else lies in these folders: files of other kinds, and hidden ones.
    """
    found, others = set(), set()
    for pattern in inputs:
        files, rest = remote_inputs(pattern) if "://" in pattern else local_inputs(pattern)
        odd = [name for _, name, _ in files if not kind_of(name)]
        if odd or not files:
            raise ValueError(f"{pattern}: {f'cannot convert {odd[0]}' if odd else 'no such files'}; expected "
                             f"{', '.join(SUFFIXES)} (JSON also .gz or .zst): file, folder or quoted glob")
        found.update(files)
        others.update(rest)
    return sorted(found), sorted(others)


def local_inputs(pattern):
    paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    files, others = [path for path in paths if os.path.isfile(path)], []
    for root in filter(os.path.isdir, paths):
        inside = (os.path.join(folder, name) for folder, _, names in os.walk(root, followlinks=True)
                  for name in names)
        for path in inside:
            hidden = "/." in f"/{os.path.relpath(path, root)}"
            (others if hidden or not kind_of(path) else files).append(path)
    return [(*os.path.split(os.path.abspath(file)), os.path.getsize(file)) for file in files], others


def remote_inputs(pattern):
    if is_http(pattern):
        raise ValueError(f"{pattern}: fetch it first (curl -O); convert reads URIs of object stores only")
    address, mark, query = pattern.partition("?")    # options such as ?region=...; so ? is no wildcard here
    folder, _, wanted = re.split(r"[*\[]", address)[0].rpartition("/")
    wanted, folder_wanted = address[len(folder) + 1:], address[len(folder) + 1:].rstrip("/") + "/"
    folder += mark + query
    fs, root = filesystem_of(folder)
    files, others = [], []
    for info in fs.get_file_info(pafs.FileSelector(root, recursive=True)):
        name = info.path[len(root):].lstrip("/")
        inside = folder_wanted == "/" or name.startswith(folder_wanted)
        if info.is_file and (fnmatch.fnmatchcase(name, wanted) or (inside and kind_of(name))):
            files.append((folder, name, info.size))
        elif info.is_file and inside:
            others.append(join_name(folder, name))
    return files, others


def kind_of(name):
    """The suffix that says how to read a file, compression aside; None where none does."""
    stem, suffix = os.path.splitext(name.lower())
    kind = os.path.splitext(stem)[1] if suffix in CODECS else suffix
    return kind if kind in SUFFIXES and (kind, suffix in CODECS) != (".parquet", True) else None


def group_files(files, total):
    """Group small files, so that they share a run: (task number, [(file number, file), ...])"""
    number, group, size = 0, [], 0
    for file_number, file in enumerate(files):
        group.append((file_number, file))
        size += file[2]
        if size >= min(RUN_BYTES, total // 64) or file_number == len(files) - 1:
            yield number, group
            number, group, size = number + 1, [], 0


def scatter_task(task, building, text_key, skip_bad, seed):
    """Parse the files of a task into sorted runs on disk; (bad documents, messages of the first ones)"""
    number, files = task
    keys, texts, size, runs, bad, shown = [], [], 0, 0, 0, []
    for file_number, file in files:
        for index, (where, text, problem) in enumerate(documents_of(file, text_key)):
            if problem:
                message = f"{join_name(*file[:2])}, {where}: {problem}"
                if not skip_bad:
                    raise ValueError(f"{message}; mend it, or leave such documents out with --skip-bad")
                bad, shown = bad + 1, [*shown, message][:BAD_SHOWN]
                continue
            place = b"%d %d %d" % (seed, file_number, index)
            keys.append(int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big"))
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
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, RUN) as writer:
        writer.write_table(pa.table([pa.array(keys[order]), sorted_texts], schema=RUN))


def documents_of(file, text_key):
    """(where, UTF-8 bytes, None) of each document of a file, or (where, None, what is wrong with it)."""
    folder, name, size = file
    kind, codec = kind_of(name), CODECS.get(os.path.splitext(name.lower())[1])
    try:
        with open_file(folder, name, size) as stream:
            # pyarrow's gzip gives 495 MB/s of JSON lines, Python's 353 (one core; builtin corpus, level 6).
            plain = pa.CompressedInputStream(stream, codec) if codec else stream
            if kind == ".parquet":
                yield from parquet_documents(stream, text_key)
            elif kind == ".txt":
                yield "the file", *check_utf8(plain.read())
            else:
                yield from json_documents(io.BufferedReader(plain, PIECE), text_key)
    except (OSError, pa.ArrowException) as error:    # torn, or not what its name says: what follows is lost
        yield "the rest of the file", None, one_line(error)


def json_documents(stream, text_key):
    """Documents of JSON lines, or of one JSON array, which is read whole."""
    if stream.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from array_documents(stream.read(), text_key)
        return
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.isspace():
            yield f"line {number}", *line_document(line, text_key)


def line_document(line, text_key):
    try:
        return text_of(json.loads(line.decode()), text_key)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON ({error})"


def array_documents(data, text_key):
    data, problem = check_utf8(data)
    if problem:
        yield "the file", None, problem
        return
    text, decode, gap = data.decode("utf-8-sig"), json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    position, line, counted = gap.match(text, text.index("[") + 1).end(), 1, 0
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        try:
            record, position = decode(text, position)
        except (ValueError, RecursionError) as error:
            yield f"line {line}", None, f"not JSON ({error})"
            return
        yield f"line {line}", *text_of(record, text_key)
        position = gap.match(text, position).end()
    if text[position + 1:].strip():
        yield "the rest of the file", None, "not JSON (there is more behind the array)"


def text_of(record, text_key):
    if not isinstance(record, dict) or text_key not in record:
        seen = f"keys {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__
        return None, f"no key {text_key!r}, only {seen[:200]}; name the key with --text-key"
    if not isinstance(record[text_key], str):
        return None, f"{text_key!r} holds {type(record[text_key]).__name__}, not a string"
    try:
        return record[text_key].encode(), None
    except UnicodeEncodeError as error:    # a lone surrogate such as "\ud800"
        return None, f"{text_key!r} cannot be UTF-8 ({error.reason} at character {error.start})"


def check_utf8(data):
    try:
        data.decode()
        return data, None
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 ({error.reason} at byte {error.start})"


def parquet_documents(stream, text_key):
    parquet = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=False)
    schema = parquet.schema_arrow
    if text_key not in schema.names or not is_text(schema.field(text_key).type):
        columns = ", ".join(f"{field.name!r}: {field.type}" for field in schema)
        yield "the file", None, f"no string column {text_key!r}, only {columns}; name one with --text-key"
        return
    row = 0
    for batch in parquet.iter_batches(ROW_GROUP_DOCUMENTS, columns=[text_key], use_threads=False):
        for text in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()).to_pylist():
            yield f"row {row}", *((None, f"{text_key!r} is null") if text is None else check_utf8(text))
            row += 1


def list_runs(building):
    return sorted(glob.glob(glob.escape(building) + "/runs/*.arrow"))


def open_run(path):
    """(sorted keys, their texts), memory-mapped."""
    batch = pa.ipc.open_file(pa.memory_map(path)).get_batch(0)
    return batch["key"].to_numpy(), batch["text"]


def histogram(runs):
    """Documents and bytes of text in each slot."""
    documents, text = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
    for run in runs:
        keys, texts = open_run(run)
        slots = (keys >> np.uint64(48)).astype(np.int64)
        documents += np.bincount(slots, minlength=SLOTS)
        np.add.at(text, slots, pc.binary_length(texts).to_numpy())
    return documents, text


def plan_shards(documents, text, shard_bytes):
    """
    Edges of the shards in slots: about 1 % of the text at the end for val, and so many documents as lanes may
    ask for, up to a tenth; before it shards of equal bytes.
    """
    filled = np.flatnonzero(documents)
    if len(filled) < 2:
        raise ValueError(f"{documents.sum()} documents are too few for a train and a val shard")
    behind = np.cumsum(np.stack([text + documents, documents])[:, ::-1], axis=1)[:, ::-1]    # from a slot on
    wanted = [[0.01 * behind[0, 0]], [min(VAL_DOCUMENTS, behind[1, 0] // 10)]]
    val = int(np.clip(np.sum((behind >= wanted).all(axis=0)) - 1, filled[0] + 1, filled[-1]))
    before = np.cumsum(text[:val])
    shards = max(4, round(before[-1] / shard_bytes))    # four keep some cores busy on a small corpus
    cuts = np.searchsorted(before, before[-1] * np.arange(1, shards) / shards) + 1
    edges = [0, *map(int, cuts), val, SLOTS]
    return [low for low, high in itertools.pairwise(edges) if documents[low:high].any()] + [SLOTS]


def gather_shard(shard, building):
    """Write one shard: its slots from every run, RUN_BYTES of text at a time."""
    number, low, high, documents, text = shard
    rows = min(ROW_GROUP_DOCUMENTS, max(1, int(documents[low:high].sum()) // 16))
    pieces = (gather_piece(list_runs(building), *piece) for piece in pieces_of(text, low, high))
    write_shard(f"{building}/shards/shard_{number:05d}.parquet", cut_row_groups(pieces, rows))


def pieces_of(text, low, high):
    """Ranges of slots that hold about RUN_BYTES of text."""
    size = 0
    for slot in range(low, high):
        size += int(text[slot])
        if size >= RUN_BYTES or slot == high - 1:
            yield low, slot + 1
            low, size = slot + 1, 0


def gather_piece(runs, low, high):
    """All documents in a range of slots, sorted by key."""
    keys, texts = [], []
    for run in runs:
        run_keys, run_texts = open_run(run)
        first = run_keys.searchsorted(np.uint64(low << 48))
        last = run_keys.searchsorted(np.uint64((high << 48) - 1), "right")
        keys.append(run_keys[first:last])
        texts.append(run_texts[first:last])
    order = np.argsort(np.concatenate(keys), kind="stable")
    return pa.concat_arrays(texts).take(pa.array(order)).cast(pa.large_string())


def cut_row_groups(arrays, rows):
    """Cut a stream of arrays into row groups of so many documents, or of ROW_GROUP_BYTES."""
    rest = pa.array([], pa.large_string())
    for array in arrays:
        rest = pa.concat_arrays([rest, array])
        while len(rest):
            ends = np.cumsum(pc.binary_length(rest[:rows]).to_numpy())
            fit = max(1, int(np.searchsorted(ends, ROW_GROUP_BYTES, "right")))
            if fit == len(rest) and fit < rows:
                break    # more may come
            yield rest[:fit].cast(pa.string())
            rest = rest[fit:]
    if len(rest):
        yield rest.cast(pa.string())


# ---------------------------------------------------------------------------------------------------------
# Tokenize: the same shards with token ids in place of text

def tokenize(data_dir: str, out: str, tokenizer_dir: str | None = None, threads: int | None = None,
             compression: str = "none") -> int:
    """
    Write token shards of text shards: same names, row groups and rows. Returns how many tokens.

    Shards that are there already, of the same text and tokenizer, are kept: a stopped run goes on.
    """
    from tokenizer import get_tokenizer

    check_local(out)
    if os.path.realpath(out) == os.path.realpath(data_dir):
        raise ValueError(f"{out} is the folder of the text; name another with --out")
    tokenizer = get_tokenizer(tokenizer_dir)
    shards = list_shards(data_dir, "train") + list_shards(data_dir, "val")
    os.makedirs(out, exist_ok=True)
    progress, tokens, threads = Progress(len(shards), "shards"), 0, threads or cores()
    with ThreadPoolExecutor(threads) as pool:
        for shard in shards:
            path = os.path.join(out, shard.name)
            tokens += tokenize_shard(shard, path, tokenizer, pool, threads, compression, progress)
            progress.add(done=1)
    progress.close()
    sources = {shard.name: shard.size for shard in shards}
    write_whole(os.path.join(out, "source.json"), json.dumps(sources, indent=0).encode())
    return tokens


def tokenize_shard(shard, path, tokenizer, pool, threads, compression, progress):
    if shard.kind != "text":
        raise ValueError(f"{shard.path} holds tokens already; --data takes a folder of text shards")
    made_of = {b"nanoloader.dtype": tokenizer.dtype.name.encode(),
               b"nanoloader.tokenizer": tokenizer.fingerprint().encode(),
               b"nanoloader.text_size": b"%d" % shard.size}
    width = tokenizer.dtype.itemsize
    if os.path.exists(path):
        old = Shard(os.path.dirname(path), shard.name, os.path.getsize(path), shard.size)
        if not made_of.items() <= read_metadata(old.folder, old.name, old.file_size).metadata.items():
            raise ValueError(f"{path} was made of other text or by another tokenizer; "
                             "name a new folder with --out, or remove this one")
        return sum(count_bytes(old.read(i)) for i in range(len(old.rows))) // width

    tokens = []
    def encode(row_group):
        texts = shard.read(row_group)
        ids = encode_array(texts, tokenizer)
        tokens.append(count_bytes(ids) // width)
        progress.add(texts.nbytes)
        return ids

    arrays = (ids for _, ids in in_order(pool, encode, range(len(shard.rows)), 2 * threads))
    write_shard(path, arrays, "tokens", made_of, compression)
    return sum(tokens)


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

def verify(folder: str) -> bool:
    """Read every shard against every checksum there is and print a table; True where all is intact."""
    shards, sums, damaged, documents, nulls = all_shards(folder), read_sums(folder), [], 0, 0
    print(f"{'shard':<22} {'documents':>11} {'row groups':>10} {'nulls':>7} {'MB':>9} {'on disk':>9}  check")
    with ThreadPoolExecutor(cores()) as pool:
        check = functools.partial(check_shard, sums=sums)
        for shard, (found, problem) in in_order(pool, check, shards, 2 * cores()):
            if problem:
                damaged.append(shard.path)
                print(f"{shard.name:<22} DAMAGED  {problem}", flush=True)
                continue
            row = "{:<22} {:>11,} {:>10,} {:>7,} {:>9,.1f} {:>9,.1f}  {}"
            print(row.format(shard.name, *found), flush=True)
            documents, nulls = documents + found[0], nulls + found[2]
    print(f"{folder}: {len(shards) - len(damaged):,} of {len(shards):,} shards intact, "
          f"{documents:,} documents, {nulls:,} null (the loader counts and leaves them out)")
    if damaged:
        print(f"next: rm {' '.join(damaged[:8])}{' ...' if damaged[8:] else ''}\n"
              "then what made them: python dataset.py -n N and tokenize go on, convert wants a new folder")
    return not damaged


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


def check_shard(shard, sums):
    """((documents, row groups, nulls, MB, MB on disk, checked by), None), or (None, what is wrong)."""
    try:
        nulls = size = 0
        for row_group in range(len(shard.rows)):
            array = shard.read(row_group)
            nulls, size = nulls + array.null_count, size + count_bytes(array)
        checked = "documents' CRC-32" if shard.footer()["checksums"] else "pages' CRC-32 where there are"
        if shard.name in sums:
            checked = "SHA-256 and " + checked
            if sha256_of(shard.path) != sums[shard.name]:
                raise ShardError("its SHA-256 is not the one in SHA256SUMS")
        return (sum(shard.rows), len(shard.rows), nulls, size / 1e6, shard.file_size / 1e6, checked), None
    except OSError as error:
        return None, str(error)


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
    from tokenizer import get_tokenizer

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

    def command(name, run, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub.add_argument

    add = command("download", run_download, "fetch public shards (the word may be left out)")
    add("-n", "--num-files", type=int, required=True, help="train shards, -1 for all; val comes too")
    add("-w", "--num-workers", type=int, default=4, help="downloads at once (default 4)")
    add("--base-url", default=BASE_URL, help="a mirror: what stands in front of /shard_00000.parquet")
    add("--out", default=default_data_dir(), help="folder (default: %(default)s)")
    add = command("convert", run_convert, "make shards of your own .jsonl, .json, .parquet or .txt files")
    add("inputs", nargs="+", metavar="IN", help="files, folders, globs in quotes, s3:// or gs:// URIs")
    add("--text-key", default="text", help="JSON key or parquet column that holds the text (default text)")
    add("--out", default=default_data_dir(), help="folder, new or empty (default: %(default)s)")
    add("--skip-bad", action="store_true", help="leave out bad documents and count them")
    add("--seed", type=int, default=0, help="of the shuffle (default 0)")
    add("-w", "--num-workers", type=int, help="processes (default: one a core)")
    add = command("tokenize", run_tokenize, "write the same shards with tokens in place of text")
    add("--data", help="folder or URI of text shards (default: what train.py takes)")
    add("--out", required=True, help="folder for the token shards")
    add("--tokenizer", help="folder of the tokenizer")
    add("--compression", default="none", choices=("none", "zstd"), help="zstd: half the size, 1/4 the speed")
    add = command("verify", run_verify, "check every shard against all its checksums")
    add("--data", help="folder or URI (default: what train.py takes)")
    add = command("stats", run_stats, "count documents, bytes, tokens, lengths, row groups, lanes")
    add("--data", help="folder or URI (default: what train.py takes)")
    add("--tokenizer", help="folder of the tokenizer")
    return parser


def run_download(flags):
    if flags.num_files == 0 or flags.num_files < -1:
        raise ValueError(f"-n {flags.num_files}: expected how many train shards, or -1 for all {MAX_SHARD:,}")
    count = MAX_SHARD if flags.num_files == -1 else min(flags.num_files, MAX_SHARD)
    # Val first: were it the last to come, another shard would be val meanwhile.
    names = [f"shard_{number:05d}.parquet" for number in (MAX_SHARD, *range(count))]
    failed = download(names, flags.out, flags.base_url.rstrip("/"), flags.num_workers)
    print(f"{len(names) - len(failed):,} of {len(names):,} shards are in {flags.out}")
    for name, reason in sorted(failed.items()):
        print(f"missing: {name}: {reason}")
    if failed:
        sys.exit(f"error: {len(failed):,} shards are missing; the same command fetches just those")


def run_convert(flags):
    made = convert(flags.inputs, flags.out, flags.text_key, flags.skip_bad, flags.seed, flags.num_workers)
    print(f"{made['files']:,} files -> {made['documents']:,} documents, {made['bytes'] / 1e6:,.1f} MB, "
          f"in {made['shards']:,} shards, the last for val, in {flags.out}")
    if made["others"]:
        print(f"{len(made['others']):,} other files in these folders were left out: {made['others'][0]} ...")
    if made["bad"]:
        print("\n  ".join([f"{made['bad']:,} bad documents were left out; the first:", *made["shown"]]))


def run_tokenize(flags):
    tokens = tokenize(find_data(flags.data), flags.out, flags.tokenizer, compression=flags.compression)
    print(f"{tokens:,} tokens in {flags.out}")


def run_verify(flags):
    if not verify(find_data(flags.data)):
        sys.exit(1)


def run_stats(flags):
    stats(find_data(flags.data), flags.tokenizer)


if __name__ == "__main__":
    main()
