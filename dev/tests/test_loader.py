"""
Further tests of the loader: threads that share one, processes that end or fork, unusual files.

    python -m pytest dev/tests/test_loader.py
"""

import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dataset
from test_dataloader import BOS, HERE, ByteTokenizer, documents_in, grouped, make, numbered, write_shards


class LateLock:
    """A lock whose holder comes to itself late: another thread is inside before it does anything else."""
    def __init__(self):
        self.lock = threading.Lock()

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()
        time.sleep(0.05)


def test_threads_that_share_a_loader_lose_no_document_after_an_error(tmp_path, monkeypatch):
    """One read fails once. Another thread must not draw from what the failed call left half drawn."""
    data = write_shards(tmp_path / "data", [grouped(numbered([9] * 80), [4] * 20), [["val"]]])
    read, failed = dataset.Shard._read, []

    def fails_once(shard, row_group):
        if row_group == 7 and not failed:
            failed.append(1)
            raise OSError("connection reset")
        return read(shard, row_group)
    monkeypatch.setattr(dataset.Shard, "_read", fails_once)
    loader = make(data, T=32, num_lanes=2, epochs=1, packing="wholefit", chunk_bytes=36)
    loader._lock, seen, errors = LateLock(), [], []

    def work():
        while True:
            try:
                inputs, _ = next(loader)
                seen.append(bytes(i for i in inputs.flatten().tolist() if i != BOS))
            except StopIteration:
                return
            except OSError as error:
                errors.append(error)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    missing = [text for text in documents_in(data).values() if text.encode() not in b"\0".join(seen)]
    assert not missing


AT_EXIT = """
import atexit, sys, time
sys.path.insert(0, sys.argv[1])
import dataset
from test_dataloader import make
reads, read = [], dataset.Shard._read
def slow(shard, row_group):
    reads.append(row_group)
    time.sleep(0.05)
    return read(shard, row_group)
dataset.Shard._read = slow
loader = make(sys.argv[2], num_lanes=200)
atexit.register(lambda: print(len(reads), flush=True))    # after all threads have ended
next(loader)
"""


def test_program_that_ends_begins_no_more_reads(tmp_path):
    """Of 200 lanes; without close()."""
    data = write_shards(tmp_path / "data", [[[str(i)] for i in range(200)], [["val"]]])
    done = subprocess.run([sys.executable, "-c", AT_EXIT, HERE, data], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) < 100, done


FORK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from test_dataloader import make
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[4]), world_size=2)
loader = make(sys.argv[2], epochs=1, num_lanes=2)
next(loader)
if not (child := os.fork()):
    loader.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
next(loader)
os._exit(0)
"""


def test_forked_child_may_close_the_loader_of_a_finite_run(corpus, tmp_path):
    """Its parent's connections to other ranks stay open, and the child does not crash."""
    ranks = [subprocess.Popen([sys.executable, "-c", FORK, HERE, corpus, tmp_path / "store", rank])
             for rank in "01"]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


def test_run_that_stops_before_its_first_batch_is_an_error(corpus):
    with pytest.raises(ValueError, match=r"no batch: .*too few for uneven='stop'"):
        next(make(corpus, B=5000, epochs=1, uneven="stop"))


def test_nulls_may_have_bytes_that_parquet_does_not_keep(tmp_path):
    texts = pa.array(["one", "two", "three"] * 1000)
    array = pc.if_else(pa.array([True, False, True] * 1000), texts, None)
    dataset.write_shard(f"{tmp_path}/a.parquet", [array])
    dataset.write_shard(f"{tmp_path}/b.parquet", [array])
    [shard] = dataset.list_shards(str(tmp_path), "train")
    assert shard.read(0).to_pylist() == ["one", None, "three"] * 1000
    assert shard.text_bytes == 8 * 1000


def test_token_that_the_tokenizer_does_not_have_names_its_document(tmp_path):
    documents = [np.array(ids, np.uint16).tobytes() for ids in ([BOS, 1], [BOS, 300], [BOS])]

    class Small(ByteTokenizer):
        def get_vocab_size(self):
            return 257
    groups, metadata = [pa.array(documents)], {"nanoloader.dtype": "uint16", "nanoloader.tokenizer": "bytes"}
    for name in "ab":
        dataset.write_shard(f"{tmp_path}/{name}.parquet", groups, "tokens", metadata)
    dataset.write_index(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"a.parquet, row group 0, row 1: ValueError: .* 257; saw 300"):
        next(make(str(tmp_path), tokenizer=Small()))


def test_other_files_may_vanish_while_a_folder_is_listed(tmp_path, monkeypatch):
    data = write_shards(tmp_path / "data", [[["a"]], [["b"]]])
    scandir, name = os.scandir, f"{data}/shard_00000.parquet.7.tmp"

    def scan(folder):
        with open(name, "w"):
            entries = list(scandir(folder))
        os.unlink(name)
        return itertools.chain(entries)
    monkeypatch.setattr(os, "scandir", scan)
    assert [file[0] for file in dataset.list_files(data)] == ["shard_00000.parquet", "shard_00001.parquet"]
