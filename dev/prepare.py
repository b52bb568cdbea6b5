"""
What is run once, before training: make shards of your own text, tokenize, check and count them.

    python -m dev.prepare convert 'my/*.json.gz' --text_key content  # your own text, shuffled into shards
    python -m dev.prepare tokenize --data DIR --out DIR              # the same shards, tokens for text
    python -m dev.prepare verify                                     # every shard against all its checksums
    python -m dev.prepare stats                                      # documents, bytes, lengths, lanes
"""

import argparse
import contextlib
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
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dataset import (
    INDEX,
    PIECE,
    File,
    Progress,
    all_shards,
    check_local,
    checksums_in,
    cores,
    default_data_dir,
    errors_in_one_line,
    files_and_index,
    filesystem_of,
    find_data,
    in_order,
    index_command,
    is_http,
    is_text,
    join_name,
    list_shards,
    lock_file,
    one_line,
    open_file,
    open_shard,
    read_metadata,
    remove,
    sha256_of,
    write_index,
    write_shard,
)
from tokenizer import get_tokenizer

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
            write_index(building + "/shards")
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
                    raise ValueError(f"{message}; mend it, or leave such documents out with --skip_bad")
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
        return None, f"no key {text_key!r}, only {seen[:200]}; name the key with --text_key"
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
        yield "the file", None, f"no string column {text_key!r}, only {columns}; name one with --text_key"
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
    check_local(out)
    if os.path.realpath(out) == os.path.realpath(data_dir):
        raise ValueError(f"{out} is the folder of the text; name another with --out")
    tokenizer = get_tokenizer(tokenizer_dir)
    shards = all_shards(data_dir)
    progress, tokens, threads = Progress(len(shards), "shards"), 0, threads or cores()
    with ThreadPoolExecutor(threads) as pool:
        for shard in shards:
            tokens += tokenize_shard(shard, out, tokenizer, pool, threads, compression, progress)
            progress.add(done=1)
    progress.close()
    write_index(out)
    return tokens


def tokenize_shard(shard, out, tokenizer, pool, threads, compression, progress):
    path = os.path.join(out, shard.name)
    if shard.kind != "text":
        raise ValueError(f"{shard.path} holds tokens already; --data takes a folder of text shards")
    dtype, fingerprint, width = tokenizer.dtype, tokenizer.fingerprint(), tokenizer.dtype.itemsize
    if os.path.exists(path):
        old = open_shard(out, shard.name, File(os.path.getsize(path), None))
        if (old.size, old.rows, old.dtype, old.fingerprint) != (shard.size, shard.rows, dtype, fingerprint):
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
    made_of = {"nanoloader.dtype": dtype.name, "nanoloader.tokenizer": fingerprint,
               "nanoloader.text_size": str(shard.size)}
    remove(os.path.join(out, INDEX))    # of a folder that was whole: it comes back when all are there
    os.makedirs(os.path.dirname(path), exist_ok=True)
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

class Check(NamedTuple):
    """What was seen of one shard."""
    documents: int = 0
    row_groups: int = 0
    nulls: int = 0
    megabytes: float = 0
    on_disk: float = 0
    checked_by: str = ""
    problem: str = ""
    damaged: bool = False    # proven: what lies on this disk is not what was written


def verify(folder: str) -> bool:
    """Read every shard against every checksum there is and print a table; True where all is intact."""
    files, index = files_and_index(folder)
    names = sorted(files.keys() | (index["shards"].keys() if index else set()))
    check = functools.partial(check_shard, folder=folder, files=files, index=index, sums=read_sums(folder))
    print(f"{'shard':<22} {'documents':>11} {'row groups':>10} {'nulls':>7} {'MB':>9} {'on disk':>9}  check")
    checks = []
    with ThreadPoolExecutor(cores()) as pool:
        for name, seen in in_order(pool, check, names, 2 * cores()):
            checks.append(seen)
            if seen.problem:
                print(f"{name:<22} {'DAMAGED' if seen.damaged else 'PROBLEM'}  {seen.problem}", flush=True)
            else:
                print(f"{name:<22} {seen.documents:>11,} {seen.row_groups:>10,} {seen.nulls:>7,} "
                      f"{seen.megabytes:>9,.1f} {seen.on_disk:>9,.1f}  {seen.checked_by}", flush=True)
    intact = [seen for seen in checks if not seen.problem]
    print(f"{folder}: {len(intact):,} of {len(names):,} shards intact, "
          f"{sum(seen.documents for seen in intact):,} documents, "
          f"{sum(seen.nulls for seen in intact):,} null (the loader counts and leaves them out)")
    damaged = [join_name(folder, name) for name, seen in zip(names, checks, strict=True) if seen.damaged]
    if damaged:
        print(f"next: rm {shlex.join(damaged[:8])}{' ...' if damaged[8:] else ''}\n"
              "then what made them: python dataset.py -n N and tokenize go on, convert wants a new folder")
    return len(intact) == len(names)


def check_shard(name, folder, files, index, sums):
    try:
        if name not in files:
            return Check(problem="it is in index.json, but not there")
        shard, nulls, size = open_shard(folder, name, files[name]), 0, 0
        for row_group in range(len(shard.rows)):
            array = shard.read(row_group)
            nulls, size = nulls + array.null_count, size + count_bytes(array)
        ours = checksums_in(read_metadata(folder, name, files[name].size))
        checked_by = "documents' CRC-32" if ours else "pages' CRC-32 where there are"
        if name in sums:
            checked_by = "SHA-256 and " + checked_by
            if sha256_of(shard.path) != sums[name]:
                return Check(problem="its SHA-256 is not the one in SHA256SUMS", damaged=True)
    except OSError as error:
        return Check(problem=str(error).partition("; check it with")[0],
                     damaged=is_damage(error.__cause__) and "://" not in folder)
    expected = index and index["shards"].get(name)
    if index and (not expected or (expected["bytes"], expected["rows"]) != (files[name].size, shard.rows)):
        return Check(problem=f"it is not what index.json says; if it is right, type: {index_command(folder)}")
    return Check(sum(shard.rows), len(shard.rows), nulls, size / 1e6, files[name].size / 1e6, checked_by)


def is_damage(cause):
    """The bytes themselves are wrong: no matter of permissions, of a disk, or of another column."""
    return cause is not None and getattr(cause, "errno", None) is None


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

    def command(name, run, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub.add_argument

    add = command("convert", run_convert, "make shards of your own .jsonl, .json, .parquet or .txt files")
    add("inputs", nargs="+", metavar="IN", help="files, folders, globs in quotes, s3:// or gs:// URIs")
    add("--text_key", default="text", help="JSON key or parquet column that holds the text (default text)")
    add("--out", default=default_data_dir(), help="folder, new or empty (default: %(default)s)")
    add("--skip_bad", action="store_true", help="leave out bad documents and count them")
    add("--seed", type=int, default=0, help="of the shuffle (default 0)")
    add("-w", "--num_workers", type=int, help="processes (default: one a core)")
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
