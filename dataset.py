"""
Where the documents are: list, read and download parquet shards.

    python dataset.py -n 8 -w 4        # 8 public train shards, and the val shard

Your own text becomes shards with `python -m dev.prepare convert`.

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
import functools
import hashlib
import io
import itertools
import json
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
from urllib.parse import urljoin

import numpy as np
import pyarrow as pa
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
                raise ValueError("no source.json stands beside it; let `python -m dev.prepare tokenize` end")
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
                             f"python -m dev.prepare verify --data {self.folder}") from error


@functools.lru_cache(maxsize=64)
def read_metadata(folder, name, size):
    """The parsed footer: a request saved for each row group that is read from far away."""
    with open_file(folder, name, size) as file:
        return pq.ParquetFile(file).metadata


def check_column(schema, kind):
    if kind not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise ValueError(f"it has no column `text`, only {names}; make shards of it with: "
                         f"python -m dev.prepare convert FILES --text_key {(schema.names or ['COLUMN'])[0]}")
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
                         "must be two: python dataset.py -n 8 gets more, python -m dev.prepare convert makes "
                         "them of your own text")
    return shards[-1:] if split == "val" else shards[:-1]


def all_shards(folder):
    files = list_files(folder)
    shards = {name: size for name, size in files.items() if name.endswith(".parquet")}
    if not shards:
        raise FileNotFoundError(f"no parquet files in {folder}; get some with: python dataset.py -n 8, "
                                "or make them of your own text: python -m dev.prepare convert FILES")
    texts = {}
    if "source.json" in files:    # token shards
        with open_file(folder, "source.json", files["source.json"]) as file:
            texts = json.loads(file.read())
        if texts.keys() != shards.keys():
            odd = ", ".join(sorted(texts.keys() ^ shards.keys())[:3])
            raise ValueError(f"{folder}: source.json and the shards beside it differ in {odd}; "
                             "run `python -m dev.prepare tokenize` again")
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
    add("-n", "--num_files", type=int, required=True, help="train shards, -1 for all; val comes too")
    add("-w", "--num_workers", type=int, default=4, help="downloads at once (default 4)")
    add("--base_url", default=BASE_URL, help="a mirror: what stands in front of /shard_00000.parquet")
    add("--out", default=default_data_dir(), help="folder (default: %(default)s)")
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


if __name__ == "__main__":
    main()
