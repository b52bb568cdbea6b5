"""
dataset.py: train and val, shards, damage, folders that cannot be used, the index, remote ends, the
download, the commands. Each section begins with its plainest example. Remote ends are one server on
127.0.0.1, which answers as the web, as Hugging Face's hub and as S3.
"""

import base64
import contextlib
import errno
import gc
import hashlib
import http.server
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from fsspec.spec import AbstractBufferedFile
from hypothesis import given, settings
from hypothesis import strategies as st

import dataset
import train
from dataset import UserError, list_shards
from test_dataloader import HERE, TIMES, grouped


def write(folder, *names, groups=None):
    """Shards of these names; texts of a: a, aa | aaa. Returns the folder."""
    for name in names:
        texts = groups or [[name, 2 * name], [3 * name]]
        arrays = [pa.array(group, pa.string()) for group in texts]
        dataset.write_shard(f"{folder}/{name}.parquet", arrays, compression="none")
    return str(folder)

def read(*shards):
    """All documents of these shards."""
    groups = [(shard, i) for shard in shards for i in range(len(shard.group_sizes))]
    return [text for shard, i in groups for text in shard.read(i).to_pylist()]

def read_all(folder):
    return read(*list_shards(str(folder), "train"), *list_shards(str(folder), "val"))

def describe(folder):
    return dataset.describe_split(folder, dataset.all_shards(folder))

def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

# --------------------------------------------------------------------------------------------------
# Train and val

def test_the_last_file_is_val_if_no_name_says_another(tmp_path):
    """The names of the download. train.py prints the line."""
    folder = write(tmp_path, "shard_06542", "shard_00001", "shard_00000")
    train, val = list_shards(folder, "train"), list_shards(folder, "val")
    assert [shard.name for shard in train] == ["shard_00000.parquet", "shard_00001.parquet"]
    assert [shard.name for shard in val] == ["shard_06542.parquet"]
    assert describe(folder) == (
        f"{folder}: 3 shards, 2 train, 1 val (shard_06542.parquet; chosen by a name such as "
        "validation-*, otherwise the last file)")
    write(folder, "dev-0", "test-0")
    assert describe(folder) == (
        f"{folder}: 5 shards, 3 train, 1 val (dev-0.parquet; chosen by a name such as "
        "validation-*, otherwise the last file), 1 test by name (not used)")
    for arguments in ((folder, "test"), ("", "train")):
        with pytest.raises(UserError, match=r"; expected .train. or .val.|empty name"):
            list_shards(*arguments)

def test_a_val_shard_that_is_in_train_is_a_warning(tmp_path):
    """train.py compares those of all sources, also those that other programs wrote."""
    folder, other = write(tmp_path / "x", "a", "b"), tmp_path / "y"
    other.mkdir()
    pq.write_table(pa.table({"text": ["a"]}), other / "a.parquet")
    shutil.copy(other / "a.parquet", other / "val-0.parquet")
    with pytest.warns(UserWarning, match="a.parquet and .*val-0.parquet look like copies"):
        dataset.warn_of_copies(dataset.all_shards(str(other)))
    os.rename(other / "val-0.parquet", other / "test-0.parquet")
    with warnings.catch_warnings():    # test is not used
        warnings.simplefilter("error")
        dataset.warn_of_copies(dataset.all_shards(str(other)))
    shutil.copy(f"{folder}/b.parquet", other / "val-0.parquet")
    words = f"--steps 1 --depth 1 --vocab_size 300 --seq_len 8 --device cpu --data {other} {folder}"
    with pytest.warns(UserWarning, match="/(x/b|y/val-0).parquet and .* look like copies"):
        train.main([*words.split(), "--out", f"{tmp_path}/run"])

@pytest.mark.parametrize("split, shards", [
    ("train", "train-00000-of-00002 train-0 training_data_0 c4-train.00000-of-01024 split=train/0"),
    ("val", "c4-validation.0 wiki-val-0 dev-0 val2 c4.VALID.0 data/eval/x evaluation/0 dev_1"),
    ("test", "wiki-test-0 test/0 testing_1 my_test_run/shard_0"),
    (None, "shard_00000 developer-0 latest contest tester trainer value lang=de/0 prétest"),
    # The innermost name decides, and in it the last word
    ("train", "my_test_run/train-0 val/train/0 unit-test-train-0"),
    ("train", "trainset trains/0 train_sets"), ("val", "valset devset.0 evals/0"),
    ("test", "testset tests/0 test-sets testData camelTest"),
    ("val", "train/dev-0 split=train/validation train_dev_0"),
])
def test_a_split_is_a_word_anywhere_in_a_name(split, shards):
    """Of a folder, too: it would be silent to learn from the test set in wiki-test/."""
    for name in shards.split():
        assert dataset.split_in_name(f"{name}.parquet") == split, name

def test_builtin_corpus_is_made_once_and_is_always_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        (folder,) = set(pool.map(dataset.find_data, [None] * 3))
    assert capsys.readouterr().out.count("building a demo corpus from Python's") == 1
    train, val = list_shards(None, "train"), list_shards(folder, "val")
    assert [len(shard.group_sizes) for shard in train + val] == [16] * 5
    assert 0.5e6 < sum(map(len, read(*val))) < 2e6
    texts = [f"{i} " * (i * 37 % 5000) for i in range(600)]
    with mock.patch("dataset.read_standard_library", return_value=texts):
        dataset.build_builtin_corpus(str(tmp_path / "fixed"))
    digests = [shard.digest for shard in dataset.all_shards(f"{tmp_path}/fixed")]
    assert digests == ["dc81deb61f793154", "c847ba384baad63e", "93f72063965cbb0d",
                       "7a772ddda5a548fb", "7d30ce9c1bc2ed9d"], "change builtin-v3"
    monkeypatch.setenv("NANOLOADER_BASE_DIR", f"{folder}/index.json")    # a file is in the way
    with pytest.raises(UserError, match=r"builtin.*; choose .* NANOLOADER_BASE_DIR=FOLDER"):
        dataset.find_data()

# --------------------------------------------------------------------------------------------------
# Shards, and their damage

def test_a_shard_gives_back_what_was_written(tmp_path):
    """Nulls and empty row groups, too. A table may have further columns."""
    groups = [["a", None, ""], [], ["ccc"]]
    folder = write(tmp_path, "b")
    write(folder, "a", groups=groups)
    write(folder, "c", groups=[[]])    # no shard of documents, so not val
    (shard,) = list_shards(folder, "train")
    assert [shard.read(i).to_pylist() for i in range(3)] == groups
    assert (shard.kind, shard.group_sizes, shard.group_bytes) == ("text", (3, 0, 1), (1, 0, 3))
    assert shard.text_bytes == 4
    table = pa.table({"score": [0.5], "text": ["x"], "more": [None]})
    dataset.write_shard(f"{folder}/a.parquet", [table, table])
    assert read(*list_shards(folder, "train")) == ["x", "x"]
    with pytest.raises(UserError, match=r"x.parquet: no row groups to write; expected one"):
        dataset.write_shard(f"{folder}/x.parquet", [])

@pytest.mark.parametrize("kind", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_shards_of_other_tools_read_the_same(tmp_path, kind):
    texts = ["a", None, "", "日本", "b" * 9000]
    other = pa.table({"id": range(5), "text": pa.array(texts).cast(kind), "tokens": range(5)})
    other = other.replace_schema_metadata({"not": b"UTF-8 \xff"})
    for name in "ab":
        pq.write_table(other, tmp_path / f"{name}.parquet", row_group_size=3)
    (shard,) = list_shards(str(tmp_path), "train")
    assert (read(shard), shard.group_sizes) == (texts, (3, 2))
    footer = dataset.checked_footer(shard)
    with (mock.patch("dataset.checked_footer", return_value=footer),
          pytest.raises(UserError, match="row group 0: it has 3 documents, 4 in the index")):
        shard._replace(group_sizes=(4, 2)).read(0)

def test_files_are_complete_or_absent_also_with_two_writers(tmp_path):
    """Containers on one disk may have equal process ids: temporary names do not come from these."""
    path = tmp_path / "new" / "a"
    with dataset.atomic_file(path) as one, dataset.atomic_file(path) as two:
        Path(two).write_text("other")
        Path(one).write_text("one")
    assert path.read_text() == "one", "the one that ends last"
    with mock.patch("os.fsync", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        dataset.write_atomic(path, "other")
    assert files_of(path.parent) == {"a": b"one"}

LINES = [f"{i} für 日本\0\n" * (i * i % 40) for i in range(64)]

def is_read_or_named(folder):
    """Whether its text is read; else it is an error that names the folder."""
    try:
        assert read(list_shards(folder, "train")[0]) == LINES, "OTHER TEXT"
    except UserError as error:
        assert folder in str(error)
        return False
    return True

@settings(max_examples=100 * TIMES)
@given(st.sampled_from(["a.parquet", "a.parquet", "index.json"]), st.floats(0, 0.999),
       st.sampled_from([1, 100, 10**6]), st.sampled_from(["cut", "zeroed", "flipped"]))
def test_drawn_damage_is_an_error_or_gives_the_same_text(name, place, n, damage):
    """Also to a new index, made of the damaged shard."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, "a", groups=grouped(LINES, 8))
        dataset.write_index(write(folder, "b"))
        path = Path(folder, name)
        data = bytearray(path.read_bytes())
        start = int(place * len(data))
        stop = min(start + n, len(data))
        changes = {"cut": b"", "zeroed": bytes(stop - start), "flipped": bytes([data[start] ^ 4])}
        data[start:stop] = changes[damage]
        path.write_bytes(data)
        is_read_or_named(folder)
        Path(folder, "index.json").unlink()
        with contextlib.suppress(SystemExit):
            dataset.main(["index", folder])
        assert is_read_or_named(folder) or name == "a.parquet"

def test_a_replaced_shard_is_an_error(tmp_path):
    """Of another size, gone, or of the same size, since the folder was listed."""
    for name in "abc":
        write(tmp_path, name, groups=[[name * 99]] * 2)
    folder, path = str(tmp_path), tmp_path / "a.parquet"
    complete = path.read_bytes()
    dataset.write_index(folder)
    for now in (complete[:-9], complete + b".", None):
        shard, _ = list_shards(folder, "train")
        path.unlink() if now is None else path.write_bytes(now)
        with pytest.raises(UserError, match=r"a.parquet, footer: .* if it is damaged"):
            shard.read(1)
        path.write_bytes(complete)
    shard, other = list_shards(folder, "train")
    shard.read(0)
    written = os.stat(path)
    path.write_bytes(Path(other.path).read_bytes())
    with pytest.raises(UserError, match=r"replaced by another .* python dataset.py index \S+$"):
        shard.read(0)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    with pytest.raises(UserError, match=r"group 0: checksum mismatch: .*verify"):
        shard.read(0)    # its old footer is known

def other_texts():
    rng = random.Random(3)
    return ["".join(rng.choices("abcdefgh ", k=rng.randrange(20, 300))) for _ in range(900)]

@pytest.mark.parametrize("change", [
    lambda texts: sorted(texts),
    lambda texts: [text.replace("a", "z") for text in texts],
    lambda texts: [*texts[:-1], texts[-1].replace("b", "c")]])
@pytest.mark.parametrize("options", [
    {}, {"use_dictionary": False}, {"compression": "none", "write_statistics": False},
    {"compression": "none", "write_statistics": False, "use_dictionary": False}])
def test_a_shard_of_others_that_is_changed_in_place_is_seen(tmp_path, change, options):
    """Also if its size stays the same: at a listing, which a resume begins with, and in a run."""
    path = tmp_path / "a.parquet"
    for name in "ab":
        pq.write_table(pa.table({"text": other_texts()}), tmp_path / f"{name}.parquet", **options)
    [before] = list_shards(str(tmp_path), "train")
    before.read(0)
    pq.write_table(pa.table({"text": change(other_texts())}), path, **options)
    [after] = list_shards(str(tmp_path), "train")
    assert after.digest != before.digest
    with pytest.raises(UserError, match=r"a.parquet.*(replaced by another|bytes, but)"):
        before.read(0)

def test_other_columns_do_not_count_as_text(tmp_path):
    texts = other_texts()
    html = [f"<p>{text}</p>" * 50 for text in texts]
    vectors = pa.array([[0.5] * 99 for _ in texts], pa.list_(pa.float32()))
    pages = pa.array([{"text": page, "url": "x" * 99} for page in html])    # page.text is not text
    table = pa.table({"page": pages, "vector": vectors, "text": texts, "html": html})
    for name in "ab":
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=200)
    [shard] = list_shards(str(tmp_path), "train")
    assert 1 <= shard.text_bytes / sum(map(len, texts)) < 1.2

def test_texts_that_a_file_holds_once_count_as_often_as_they_are_there(tmp_path):
    """pyarrow's footers tell no bytes of theirs. If they do not repeat, the footer is exact."""
    texts = ["a" * 500, "b" * 900] * 2000
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1500)
    pq.write_table(pa.table({"text": other_texts()}), tmp_path / "b.parquet", row_group_size=300)
    repeated, usual = shards = dataset.all_shards(str(tmp_path))
    assert 0.9 < repeated.text_bytes / sum(map(len, texts)) < 1.5
    metadata = pq.read_metadata(usual.path)
    in_footer = [metadata.row_group(i).column(0).total_uncompressed_size for i in range(3)]
    assert usual.group_bytes == tuple(in_footer)
    dataset.write_index(str(tmp_path))
    assert dataset.all_shards(str(tmp_path)) == shards
    assert read(repeated) == texts
    other = repeated._replace(group_bytes=(9, *repeated.group_bytes[1:]))
    with pytest.raises(UserError, match=r"replaced by another .* its group_bytes was"):
        other.read(0)

def cause_of(work):
    with pytest.raises(UserError) as raised:
        work()
    return raised.value.__cause__

def test_only_bytes_that_are_wrong_in_each_run_are_damaged(monkeypatch, tmp_path):
    """Not an error of a disk, nor a footer's, nor a shard that was replaced."""
    folder = write(tmp_path / "data", "a", "b", groups=[["secret"]])
    path = Path(folder, "a.parquet")
    shard, other = dataset.all_shards(folder)
    failing = mock.Mock(**{"read_at.side_effect": OSError(5, "Input/output error")})
    failing.__enter__, failing.__exit__ = lambda _: failing, lambda *_: None
    monkeypatch.setattr(dataset, "pause", lambda seconds: None)
    shard.read(0)
    with mock.patch("dataset.open_file", return_value=failing):
        assert not isinstance(cause_of(lambda: shard.read(0)), dataset.Damaged)
    assert failing.read_at.call_count == 6
    complete = path.read_bytes()
    path.write_bytes(complete.replace(b"secret", b"sacred"))
    assert isinstance(cause_of(lambda: shard.read(0)), dataset.Damaged)
    path.write_bytes(complete[:-1] + b"x")    # a damaged footer
    os.utime(path, (1, 1))
    assert not isinstance(cause_of(lambda: shard.read(0)), dataset.Damaged)
    assert cause_of(lambda: other._replace(digest="other").read(0)) is None

@pytest.mark.parametrize("place, errors", [
    ("a.parquet", [dataset.Damaged("flipped")]),    # perhaps on a network disk
    ("s3://a.parquet", [*5 * [OSError("503")], dataset.Damaged("flipped")])])
def test_bytes_are_damaged_if_they_are_wrong_twice(monkeypatch, place, errors):
    """Once, the network may be at fault: skip_bad would leave out a good row group in one run only."""
    monkeypatch.setattr(dataset, "pause", lambda seconds: None)
    work = mock.Mock(side_effect=[*errors, "documents"])
    assert dataset.retry(work, place, "") == "documents"
    twice = mock.Mock(side_effect=[*errors, dataset.Damaged("flipped"), "documents"])
    with pytest.raises(UserError, match="flipped"):
        dataset.retry(twice, place, "")

def test_footers_are_read_once_and_kept_small(tmp_path):
    """Of any number of shards, in any order. Arrow kept files, rows and errors of each reading."""
    names = [f"{i}.parquet" for i in range(100)]
    for name in names:
        table = pa.table({"text": [name, "b" * 99], "n": [1, 2]})
        pq.write_table(table, tmp_path / name, row_group_size=1, use_dictionary=False)
    shards = dataset.all_shards(str(tmp_path))
    with mock.patch("dataset.parse_footer", wraps=dataset.parse_footer) as parse:
        for _ in range(3):
            assert len(read(*shards)) == 200
    assert parse.call_count == 100
    gc.collect()
    kinds = (AbstractBufferedFile, pq.ParquetFile, EOFError)
    assert not [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    assert dataset.unpack_footer.cache_info().currsize <= 16

class WatchedColumn:
    """A column that refuses to decode a dictionary with 32-bit offsets, as pyarrow does at 2 GB."""
    def __init__(self, column):
        self.column, self.type = column, column.type

    def cast(self, kind):
        values = getattr(self.type, "value_type", None)
        assert values in (None, pa.large_string()) or pa.types.is_dictionary(kind)
        return WatchedColumn(self.column.cast(kind))

    def __getattr__(self, name):
        return getattr(self.column, name)

def test_a_dictionary_of_texts_may_be_more_than_2_gb_of_text():
    texts = ["a", None, "bb"] * 3
    column = pa.chunked_array([pa.array(texts).dictionary_encode()])
    assert dataset.as_large(WatchedColumn(column), "text").to_pylist() == texts

@pytest.mark.parametrize("is_ours", [True, False])
def test_no_flipped_bit_of_a_footer_aborts_python(tmp_path, is_ours):
    """In a process of its own: RowGroupMetaData.column() of pyarrow 26 would end it."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    if is_ours:
        dataset.write_shard(path, [table])
    else:
        pq.write_table(table, path, store_schema=False)
    code = """if True:
        import sys, dataset
        data = open(f"{sys.argv[1]}/a.parquet", "rb").read()
        for at in range(len(data) - int.from_bytes(data[-8:-4], "little") - 8, len(data)):
            for bit in (3, 4, 5):
                damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]
                open(f"{sys.argv[1]}/b.parquet", "wb").write(damaged)
                try:
                    dataset.list_shard(sys.argv[1], "b.parquet", len(data)).read(0)
                except dataset.UserError:
                    pass
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=HERE, capture_output=True)
    assert done.returncode == 0, done.stderr

class Keys(encryption.KmsClient):
    def wrap_key(self, key, name):
        return base64.b64encode(key)

@pytest.mark.parametrize("column, options", [
    ("text", {"plaintext_footer": True}), ("text", {}), ("n", {"plaintext_footer": True})])
def test_an_encrypted_column_is_an_error_if_it_is_the_text(tmp_path, column, options):
    """In a process of its own, which would abort: see the test above."""
    config = encryption.EncryptionConfiguration("key", column_keys={"key": [column]}, **options)
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    table = pa.table({"text": ["a", "b"] * 9, "n": range(18)})
    for name in "ab":
        path = tmp_path / f"{name}.parquet"
        with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
            writer.write_table(table, row_group_size=5)
    command = [sys.executable, "-m", "dev.prepare", "head", tmp_path]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if column == "n":
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    assert re.fullmatch(r"error: \S+/[ab].parquet, footer: .*crypt.*; if it .*\n", done.stderr)

def test_a_flipped_bit_in_our_own_keys_is_an_error(tmp_path):
    folder = write(tmp_path, "a", "b", groups=[["x" * 99]] * 3)
    path = tmp_path / "a.parquet"
    sound = path.read_bytes()
    for key in (b"nanoloader.group_bytes", b"nanoloader.checksums"):
        data = bytearray(sound)
        data[sound.index(key) + len(key) + 3] ^= 1    # a digit of its value
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a.parquet, footer: checksum mismatch: its keys"):
            list_shards(folder, "train")

def test_older_shards_have_bytes_by_documents_and_no_checksum_of_their_keys(tmp_path):
    """Of their text and of tokens made from it alike, so that lanes are cut alike."""
    groups = [pa.array(group, pa.string()) for group in (["a" * 9, "b" * 3], [], ["c" * 999])]
    for kind, ours in {"text": {}, "tokens": {dataset.TOKEN_DTYPE: "uint16"}}.items():
        with mock.patch.multiple("dataset", GROUP_BYTES="unused", KEYS_SHA256="none"):
            for name in "ab":
                metadata = {dataset.TEXT_BYTES: "1001", **ours}
                dataset.write_shard(f"{tmp_path}/{kind}/{name}.parquet", groups, kind, metadata)
        (shard,) = list_shards(f"{tmp_path}/{kind}", "train")
        assert shard.group_bytes == (667, 0, 333)
        assert len(read(shard)) == 3

@pytest.mark.parametrize("field, value", [
    ("group_sizes", [-1]), ("group_sizes", [1.5]), ("group_sizes", ["3"]), ("group_sizes", [None]),
    ("group_sizes", 3), ("group_sizes", [10**30]), ("group_bytes", ["9", 9]),
    ("group_bytes", [-9, 9]), ("group_bytes", [9]), ("group_bytes", None),
    ("file_size", None), ("file_size", True), ("digest", [1]), ("dtype", {})])
def test_numbers_of_an_index_are_checked_where_it_is_read(tmp_path, field, value):
    folder = write(tmp_path, "a", "b")
    dataset.write_index(folder)
    index = json.loads((tmp_path / "index.json").read_bytes())
    index["shards"]["a.parquet"][field] = value
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=NO_INDEX):
        list_shards(folder, "train")

@pytest.mark.parametrize("options, damage", [
    ({"write_page_checksum": True, "use_dictionary": False}, b"sacred"),
    ({"write_page_checksum": True}, b"sacred"),    # in the dictionary, which a listing measures
    ({"use_dictionary": False}, b"s\xffcret")])
def test_damage_in_shards_of_other_tools_is_an_error_where_it_is_read(tmp_path, options, damage):
    """Page checksums, if they wrote some, and UTF-8 are all that can be checked."""
    path, table = tmp_path / "a.parquet", pa.table({"text": ["secret"] * 9})
    pq.write_table(table, path, compression="none", write_statistics=False, **options)
    path.write_bytes(path.read_bytes().replace(b"secret", damage, 1))
    [shard] = dataset.all_shards(str(tmp_path))
    with pytest.raises(UserError, match=r"a.parquet, row group 0: .*(checksum|UTF8)"):
        shard.read(0)

def test_checksum_differs_for_other_documents_and_never_changes():
    """It is on users' disks."""
    long = "ab" * 5000
    lists = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["abc", None], [long], [long] * 2,
             [long[:-1] + "a"], ["b" + long[1:]], ["", "abc"], []]
    assert len({dataset.checksum(pa.array(texts, pa.string())) for texts in lists}) == len(lists)
    array = pa.array(["x", "a", None, "", "bc" * 5000, "y"])
    for kind in (pa.string(), pa.large_string()):
        assert dataset.checksum(array.cast(kind).slice(1, 4)) == 596_729_577
    offsets = pa.py_buffer(np.array([0, 2, 3], "<i4"))
    buffers = [pa.py_buffer(b"\2"), offsets, pa.py_buffer(b"xxa")]    # bytes below a null
    array = pa.Array.from_buffers(pa.string(), 2, buffers)
    assert dataset.checksum(array) == dataset.checksum(pa.array([None, "a"]))

def test_the_content_of_a_slice_begins_at_0():
    array = pa.array(["x", "ab", "", "c", "y"], pa.large_string())
    for part, expected in ((array[1:4], (b"abc", [0, 2, 2, 3])), (array[2:2], (b"", [0]))):
        content, bounds = dataset.column_views(part)
        assert (bytes(content), bounds.tolist()) == expected

# --------------------------------------------------------------------------------------------------
# Folders, and the index

def test_shards_are_found_below_a_folder_but_not_what_other_tools_hide(tmp_path):
    """
    Links are as good as files, unless what they lead to is in the folder, too: a circle, or
    latest -> y=24. A table of Delta, Hudi or Iceberg has more than a file named metadata.json.
    """
    folder = tmp_path / "data"
    shown = ["a", "_y=23/a", "my_delta_log/e", "part.parquet/c", "snapshots/d", "y=24/b"]
    write(folder, *shown, "_temporary/0", ".cache/d", "y=24/_d", ".e")
    for name in ("book.metadata.json", "metadata/book.metadata.json"):
        write_text(folder, name)
    for name in ("f.PQ", "i.parq", "README.md"):
        (folder / name).write_bytes(b"")
    write(tmp_path / "far", "x/g", "h")
    links = {"m": "far/x", "n.parquet": "far/h.parquet", ".hidden": "data", "circle": "data",
             "latest": "data/y=24", "o.parquet": "data/.cache/d.parquet", "p.parquet": "data/blob"}
    for link, target in links.items():
        os.symlink(tmp_path / target, folder / link)
    shutil.copy(folder / "a.parquet", folder / "blob")
    shown = [f"{name}.parquet" for name in [*shown, "m/g", "n", "o", "p"]]
    with pytest.warns(UserWarning, match=r"ignored 2 shards .* begins with _, such as _temporary/0.parquet"):
        names = [name for name, *_ in dataset.list_files(str(folder))]
    assert names == sorted([*shown, "f.PQ", "i.parq"])

def spoil_index(**changes):
    def spoil(folder):
        index = json.loads((folder / "index.json").read_bytes())
        (folder / "index.json").write_text(json.dumps(index | changes))
    return spoil

def add_tokens(folder, name="b"):
    metadata = {dataset.TOKEN_DTYPE: "uint16", dataset.FINGERPRINT: name}
    dataset.write_shard(f"{folder}/{name}.parquet", [pa.array([b"12"])], "tokens", metadata)

def add_tokens_of_two_tokenizers(folder):
    add_tokens(folder, "a")
    add_tokens(folder, "b")

NO_SHARDS = r"/data does not exist, or has no shards; .*dataset.py -n 8, or .*FILES --out NEW_"
ONE_COLUMN = r"/x.parquet: expected one string column `text` or `messages`; it has: %s. .*--out N"
OLD_VERSIONS = "older versions of its data; name the folder of one version"
NO_INDEX = r"/index.json: .*; if it is damaged or old, remove it and run: python dataset.py index"
NO_MATCH = r"not match the folder: only one .* b.parquet with \d+ bytes\. .*dataset.py index"

def write_text(folder, name, text="{}"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)

# A folder, the names of its shards, and a change: columns of another program, or a function
@pytest.mark.parametrize("words, names, change", [
    (NO_SHARDS, "", None),
    (NO_SHARDS, "", lambda folder: folder.write_text("a file")),
    (r"1 shards, 0 train, 1 val \(a.parquet; .* --out NEW_FOLDER$", "a", None),
    (r"0 train, 0 val, 2 test by name .* Rename", "test-0 test-1", None),
    ("/train-0.parquet is named for train, but .*/heldout.parquet names no", "train-0 heldout", None),
    (ONE_COLUMN % "n: int64 raw: string", "a", {"n": [1], "raw": ["a"]}),
    (ONE_COLUMN % "text: string messages: string", "a", {"text": ["a"], "messages": ["[]"]}),
    (ONE_COLUMN % "messages: list<.*>.*", "a", {"messages": [["a"]]}),
    ("/x.parquet: of chats, only `messages` is read, but it also has label, system. .*dev.convert",
     "a", {"messages": ["[]"], "label": [False], "id": [1], "system": ["Be brief."]}),
    ("different kinds: a.parquet .*text.*, b.parquet .*tokens", "a", add_tokens),
    ("different kinds: a.parquet .*tokens.*, b.parquet .*tokens", "", add_tokens_of_two_tokenizers),
    ("b.parquet.gz, footer: .*not a parquet file.*remove it", "a",
     lambda folder: (folder / "b.parquet.gz").write_bytes(b"packed" * 9)),
    ("/data/link.parquet, footer: .*No such file .*write or download it again", "a",
     lambda folder: os.symlink("nowhere", folder / "link.parquet")),
    # Delta and Hudi tables keep deleted rows, a cache of Hugging Face old revisions
    (OLD_VERSIONS, "_delta_log/0", None),
    (OLD_VERSIONS, "x/.hoodie/0", None),
    (OLD_VERSIONS, f"x/snapshots/{'1f' * 20}/0", None),
    (OLD_VERSIONS, "data/a data/b", lambda folder: write_text(folder, "metadata/v1.metadata.json")),
    # Those of litData and MosaicML
    ("/index.json is another tool's .*version', 'shards'.*, link them into a new folder", "a b",
     lambda folder: write_text(folder, "index.json", '{"version": 2, "shards": []}')),
    (NO_INDEX, "a index", spoil_index(format=1)),
    (NO_INDEX, "a index", spoil_index(shards={"a.parquet": {"bytes": 1}})),
    (NO_INDEX, "a index", lambda folder: (folder / "index.json").write_text("[" * 200_000)),
    (NO_MATCH, "a index", lambda folder: write(folder, "b")),
    (NO_MATCH, "a b index", lambda folder: os.unlink(folder / "b.parquet")),
])
def test_unusable_folder_is_an_error_that_says_what_to_type(tmp_path, words, names, change):
    folder = tmp_path / "data"
    names = names.split()
    write(folder, *[name for name in names if name != "index"])
    if "index" in names:
        dataset.write_index(str(folder))
    if isinstance(change, dict):
        pq.write_table(pa.table(change), folder / "x.parquet")
    elif change:
        change(folder)
    with pytest.raises(UserError, match=words):
        list_shards(str(folder), "val")

def test_index_holds_what_the_footers_say(tmp_path, capsys):
    """With it, no shard is opened before it is read. Its digest is in users' states."""
    folder = write(tmp_path, "a", groups=[["a" * 99] * 3, ["b" * 99] * 5])
    before = dataset.all_shards(folder)
    with pytest.raises(SystemExit):
        dataset.main(["index", folder, "-n", "1"])
    dataset.main(["index", folder])
    assert capsys.readouterr().out == describe(folder) + "; index.json written\n"
    with mock.patch("dataset.parse_footer", side_effect=AssertionError):
        assert dataset.all_shards(folder) == before
    index = json.loads((tmp_path / "index.json").read_bytes())
    assert index == {"format": 5, "shards": {"a.parquet": {
        "kind": "text", "dtype": None, "tokenizer_fingerprint": None,
        "file_size": os.path.getsize(tmp_path / "a.parquet"), "group_sizes": [3, 5],
        "group_bytes": [297, 495], "digest": "b29037bed2a8726b"}}}

def test_an_index_of_an_older_version_gives_the_same_shards(server):
    """It has no bytes of row groups, so the footers are read, also where nothing can be listed."""
    before = dataset.all_shards(server.web)
    index = json.loads(server.files["index.json"])
    index["format"] = 4
    for entry in index["shards"].values():
        entry["text_bytes"] = sum(entry.pop("group_bytes"))
    server.files["index.json"] = json.dumps(index).encode()
    server.gets.clear()
    dataset.remote_shards.cache_clear()
    assert dataset.all_shards(server.web) == before
    assert [name for name, _ in server.gets].count("a.parquet") == 1

def test_a_folder_is_not_read_before_its_writer_has_finished(tmp_path, monkeypatch):
    """Nor is the built-in corpus used instead of a download that has begun."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    folder = dataset.default_data_dir()
    dataset.mark_unfinished(folder, "again")
    for data_dir in (folder, None):
        with pytest.raises(UserError, match=r"is incomplete; to finish it, run: again$"):
            list_shards(data_dir, "train")
    write(folder, "a", "b")
    with pytest.raises(SystemExit, match="is incomplete; to finish it, run: again"):
        dataset.main(["index", folder])
    dataset.write_index(folder)
    assert read(*list_shards(None, "train")) == ["a", "aa", "aaa"]

# --------------------------------------------------------------------------------------------------
# Remote folders

class Server(http.server.ThreadingHTTPServer):
    """
    .files: {name: bytes}, whatever folder they are asked for in; a list request of S3 has all.
    .faults: {name: [what the next GETs of that file do]}: a status, 'cut', 'slow', 'stall', 'flip'
    (another byte), None (nothing). .ranges: whether it has range requests. .gets: (name, range)
    """
    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.gets, self.ranges = files, {}, [], True
        self.stalled = threading.Event()
        self.web = f"http://127.0.0.1:{self.server_port}"
        self.s3 = f"s3://bucket/x?scheme=http&region=a&endpoint_override={self.web[7:]}"
        self.handle_error = lambda *_: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        name = unquote(url.path.rpartition("/")[2])
        data, faults = self.server.files.get(name), self.server.faults.get(name)
        asked = self.headers.get("Range") if self.server.ranges else None
        fault = None
        if self.command == "GET":
            self.server.gets.append((name, asked))
            fault = faults.pop(0) if faults else None
        if fault == "stall":
            self.server.stalled.set()
            threading.Event().wait(60)
        if "list-type" in url.query:
            self.send(200, list_of_s3(self.server.files, parse_qs(url.query)["prefix"][0]))
        elif data is None or isinstance(fault, int):
            self.send_error(fault or 404)
        else:
            etag = hashlib.sha256(data).hexdigest()
            self.send_file(data, asked, fault, {"ETag": f'"{etag}"', "X-Repo-Commit": "a" * 40})

    def send_file(self, data, asked, fault, headers):
        if not asked:
            return self.send(200, data, headers, fault)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()
        part = data[int(first):int(last or len(data)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self.send(206, part, headers, fault)

    def send(self, status, data, headers=(), fault=None):
        self.send_response(status)
        for key, value in {"Content-Length": len(data), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "slow":
            for byte in data[:9]:
                self.wfile.write(bytes([byte]))
                time.sleep(0.3)
            data = data[9:]
        self.wfile.write(data[:len(data) // 2] if fault == "cut" else data)

    do_HEAD, log_message = do_GET, lambda *_: None

def list_of_s3(files, prefix):
    xml = "<ListBucketResult><IsTruncated>false</IsTruncated>"
    for name, data in files.items():
        xml += f"<Contents><Key>{prefix}{name}</Key><Size>{len(data)}</Size></Contents>"
    return f"{xml}</ListBucketResult>".encode()

@pytest.fixture
def server(tmp_path, monkeypatch):
    """Three shards and their index.json. Retries do not wait; .waits has how long they would."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "true")
    for name in "abc":
        write(tmp_path / "remote", name, groups=[[f"{name}{i} " * 999] for i in range(3)])
    dataset.write_index(str(tmp_path / "remote"))
    server = Server(files_of(tmp_path / "remote"))
    server.texts, server.waits = read_all(tmp_path / "remote"), []
    monkeypatch.setattr(dataset, "pause", server.waits.append)
    dataset.remote_shards.cache_clear()    # another server may have had this port
    yield server
    server.shutdown()

def test_a_remote_folder_costs_one_request_for_each_thing(server):
    """index.json, also if it is listed again, and of a shard its footer and each row group."""
    for _ in range(2):
        (shard,) = list_shards(server.web + "/data?token=1", "val")
    assert shard.path == server.web + "/data/c.parquet?token=1"
    assert read(shard) == server.texts[-3:]
    index, *others = server.gets
    assert index == ("index.json", None)    # with HEAD, fsspec says "not found" for any error
    assert len({asked for _, asked in others} - {None}) == len(others) == 1 + 3

def test_names_on_the_web_may_have_any_characters(server):
    name = "b#1?%41.parquet"
    server.files[name] = server.files.pop("b.parquet")
    server.files["index.json"] = server.files["index.json"].replace(b"b.parquet", name.encode())
    assert read_all(server.web) == server.texts

@pytest.mark.parametrize("end", ["web", "s3"])
def test_reads_that_fail_are_tried_again(server, end, capsys):
    """Errors, cut answers and other bytes."""
    server.faults = {"index.json": [503, "cut"], "c.parquet": [None, 503],
                     "a.parquet": ["cut", 500, None, None, 429, "flip"]}
    assert read_all(getattr(server, end)) == server.texts
    assert not any(server.faults.values())
    assert len(server.waits) == capsys.readouterr().err.count("; trying again\n")
    assert server.waits or end == "s3", "its client also tries again"

@pytest.mark.parametrize("number, n_waits", [
    (errno.EIO, 2), (errno.ESTALE, 2), (errno.ENOENT, 0), (errno.EACCES, 0), (errno.ELOOP, 0)])
def test_local_errors_that_may_pass_are_tried_again(tmp_path, monkeypatch, number, n_waits):
    """Those of NFS and Lustre. A missing file or permission is an error at once."""
    waits, error = [], OSError(number, os.strerror(number))
    folder = write(tmp_path, "a", "b", groups=[["x"]])
    (shard,) = list_shards(folder, "train")
    outcomes = itertools.chain([error, error], itertools.repeat(mock.DEFAULT))
    fail_twice = mock.Mock(wraps=dataset.open_file, side_effect=outcomes)
    monkeypatch.setattr(dataset, "pause", waits.append)
    monkeypatch.setattr(dataset, "open_file", fail_twice)
    with contextlib.nullcontext() if n_waits else pytest.raises(UserError, match=r"a.parquet, "):
        assert read(shard) == ["x"]
    assert waits == [1, 2][:n_waits]

def test_a_wait_ends_with_python():
    code = """if True:
        import dataset
        from concurrent.futures import ThreadPoolExecutor
        dataset.RETRY_SECONDS = 1000
        ThreadPoolExecutor().submit(dataset.retry, lambda: open("/no/such"), "s3://x", "wait")
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, timeout=100, capture_output=True)
    assert (done.returncode, done.stderr.count(b"trying again")) == (0, 1)

def test_a_slow_server_is_read_and_a_stalled_one_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(dataset, "WEB_SECONDS", 2)
    dataset.filesystem_of.cache_clear()
    server.faults = {"c.parquet": ["slow", "slow", "stall"]}
    assert read(*list_shards(server.web, "val")) == server.texts[-3:]
    assert server.waits == [1] and not any(server.faults.values())

def spoil(server, name, how):
    if how == "lost":
        del server.files[name]
    elif how == "grown":
        server.files[name] += b"."
    elif how == "no ranges":
        server.ranges = False
    else:
        server.faults[name] = [how] * 9

@pytest.mark.parametrize("words, end, n_waits, name, how", [
    ("a.parquet, footer: .*503.*; if it is damaged", "web", 5, "a.parquet", 503),
    ("a.parquet, footer: .*Not Found", "web", 5, "a.parquet", "lost"),
    ("index.json: .*403.*; check .* permissions", "web", 5, "index.json", 403),
    ("web servers do not list files, so .* needs an index.json. Make", "web", 0, "index.json", "lost"),
    ("doesn't appear to support range requests", "web", 0, "a.parquet", "no ranges"),
    ("a.parquet.*bytes, but .* as listed or in the index", "s3", 0, "a.parquet", "grown")])
def test_remote_errors_say_what_to_do(server, words, end, n_waits, name, how):
    """... after six attempts with growing waits, or at once if no retry can mend them."""
    spoil(server, name, how)
    with pytest.raises(UserError, match=words):
        read_all(getattr(server, end))
    assert server.waits == [1, 2, 4, 8, 16][:n_waits]

def test_s3_is_listed_or_has_an_index(server, tmp_path, monkeypatch):
    index = server.files.pop("index.json")
    assert read_all(server.s3) == server.texts
    monkeypatch.chdir(tmp_path)
    dataset.main(["index", server.s3])
    assert json.loads((tmp_path / "index.json").read_bytes()) == json.loads(index)
    assert list_shards(server.s3, "val")[0].path == server.s3.replace("?", "/c.parquet?")
    for folder, words in {server.s3: "index.json already exists here; run the command in another",
                          "nope://x": "nope://x.*Unrecognized .*; check its address"}.items():
        with pytest.raises(SystemExit, match=words):
            dataset.main(["index", folder])

def test_other_file_systems_of_fsspec_have_a_prefix(tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    folder = write(tmp_path / "data", "a", "folder.parquet/b")
    memory.put(f"{folder}/", "/nanoloader-test/", recursive=True)
    assert read_all("fsspec+memory://nanoloader-test") == read_all(folder)

# --------------------------------------------------------------------------------------------------
# The download and the command line

@pytest.fixture
def hub(server, tmp_path):
    """
    .start(*flags) -> a process of `python dataset.py`, which writes into the folder .data
    .run(*flags) -> (status, output, errors)
    """
    for number, name in {"00000": "a", "00001": "b", "06542": "c"}.items():
        server.files[f"shard_{number}.parquet"] = server.files.pop(f"{name}.parquet")
    server.data = tmp_path / "base" / "base_data"
    # A program that a shell runs in the background ignores Ctrl-C
    code = ("import dataset, signal; dataset.RETRY_SECONDS = 0.01; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); dataset.main()")
    env = {**os.environ, "HF_ENDPOINT": server.web, "HF_HOME": f"{tmp_path}/hf",
           "HF_HUB_DISABLE_XET": "1", "NANOLOADER_BASE_DIR": f"{tmp_path}/base"}
    server.start = lambda *flags: subprocess.Popen(
        [sys.executable, "-c", code, *flags], cwd=HERE, env=env, text=True, stdout=-1, stderr=-1)

    def run(*flags):
        process = server.start(*flags)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    server.run = run
    return server

def test_download_from_a_hub_that_misbehaves_ends_complete(hub):
    """Cut connections, a 503, other bytes: repeated. An error while a shard is missing."""
    hub.faults = {"shard_06542.parquet": ["flip", "cut", 503]}
    missing = hub.files.pop("shard_00001.parquet")
    status, _, err = hub.run("-n", "2")
    assert re.search(r"error: hf://.*00001.parquet, download: .*; the same command resumes\n$", err)
    again = f"python dataset.py -n 2 --out {hub.data}$"
    with pytest.raises(UserError, match=f"is incomplete; to finish it, run: {again}"):
        list_shards(str(hub.data), "train")
    assert status == 1 and not any(hub.faults.values())
    hub.files["shard_00001.parquet"] = missing
    hub.gets.clear()
    _, out, err = hub.run("-n", "2")
    assert f"{hub.data}: 3 shards, 2 train, 1 val (shard_06542.parquet; " in out, err
    assert [name for name, _ in hub.gets if "shard" in name] == ["shard_00001.parquet"]
    assert read_all(hub.data) == hub.texts

@pytest.mark.parametrize("is_ours", [True, False])
def test_a_download_that_cannot_begin_changes_nothing(hub, is_ours):
    """Without a network, or in a folder where convert has written shards of the same names."""
    if is_ours:
        hub.run("-n", "1")
        hub.files.clear()
    else:
        write(hub.data, "shard_00000", "shard_00001")
    before = read_all(hub.data)
    status, _, err = hub.run("-n", "2")
    assert (status, read_all(hub.data)) == (1, before)
    assert is_ours or "holds shards that were not downloaded; choose another one: --out" in err

def test_no_index_is_written_for_a_folder_that_cannot_be_used(tmp_path):
    folder = write(tmp_path, "train-0", "heldout")
    with pytest.raises(SystemExit, match=r"heldout.parquet names no split"):
        dataset.main(["index", folder])
    assert not os.path.exists(f"{folder}/index.json")

def test_stopped_download_leaves_at_once(hub):
    hub.faults = {"shard_00000.parquet": ["stall"]}
    process = hub.start("-n", "1")
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "\nstopped; run the same command to continue or repeat it\n" in err    # a thread may still print
    assert "unfinished" in (hub.data / "index.json").read_text()

@pytest.mark.parametrize("flags, n_train", [
    ("-n 3", 3), ("-n -1", 6542), ("-n 7000", 6542), ("", None), ("-n -5", None), ("-n1 -w2", None),
    ("-n 1 --out s3://b/x", None), ("foo a", None), ("-n many\x1b", None),
    ("index /no\x1bdir", None)])
def test_a_command_downloads_or_is_an_error_of_one_line(flags, n_train, capsys):
    with mock.patch("dataset.download") as download:
        if n_train:
            dataset.main(flags.split())
            download.assert_called_once_with(n_train, dataset.default_data_dir())
            return
        with pytest.raises(SystemExit) as ended:
            dataset.main(flags.split(" ") if flags else [])
    line = capsys.readouterr().err.strip() or ended.value.code
    assert re.fullmatch(r"error: [^\n\x1b]+", line)
    assert ended.value.code != 2 or line.endswith("; see python dataset.py --help")
    assert not download.called

@pytest.mark.parametrize("error, raised, words", [
    (UserError("a\0\x9b\n b"), SystemExit, r"^error: a b$"),
    (OSError("a\0\n b"), SystemExit, r"^error: a b \(python -X dev shows where\)$"),
    (KeyboardInterrupt(), SystemExit, "130"),
    (ValueError("a bug"), ValueError, "a bug")])
def test_our_own_errors_are_one_line_and_bugs_keep_their_traceback(error, raised, words):
    with pytest.raises(raised, match=words), dataset.errors_in_one_line():
        raise error
    with (mock.patch("sys.flags", SimpleNamespace(dev_mode=True)), pytest.raises(OSError),
          dataset.errors_in_one_line()):
        raise OSError    # python -X dev

@pytest.mark.parametrize("encoding, printed", [("latin-1", "\xe9??"), ("utf-8", "\xe9\u6f22?")])
def test_what_a_terminal_cannot_show_ends_no_command(encoding, printed, monkeypatch):
    """The last one is of a name that is not UTF-8."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    with dataset.errors_in_one_line():
        print("\xe9\u6f22\udcff", end="", flush=True)
    assert sys.stdout.buffer.getvalue().decode(encoding) == printed
    assert sys.stdout.errors == "strict", "as before"
    monkeypatch.setattr(sys, "stdout", io.StringIO())    # as in a notebook
    with dataset.errors_in_one_line():
        print("a")

def test_a_closed_pipe_ends_a_command_quietly():
    code = """if True:
        import dataset
        with dataset.errors_in_one_line():
            while True:
                print("x", flush=True)
    """
    pipe = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=-1, stderr=-1)
    pipe.stdout.close()    # as `| head` does
    assert (pipe.stderr.read(), pipe.wait(60)) == (b"", 141)

def test_reading_local_data_needs_no_package_of_the_web_or_of_progress_bars(tmp_path):
    folder = write(tmp_path, "a", "b", groups=[["x"]])
    code = """if True:
        import sys
        for name in ("tqdm", "huggingface_hub", "aiohttp", "torch", "tiktoken", "rustbpe"):
            sys.modules[name] = None
        import dataset
        print(dataset.list_shards(sys.argv[1], "train")[0].read(0).to_pylist())
    """
    command = [sys.executable, "-c", code, folder]
    assert subprocess.check_output(command, cwd=HERE, text=True) == "['x']\n"

def test_a_launcher_says_numbers(monkeypatch):
    assert dataset.env_int("NO_SUCH_NAME") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert (dataset.env_int("LOCAL_WORLD_SIZE"), dataset.cores()) == (100_000, 1)
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(UserError, match=r"RANK='-1' in the environment; expected a whole number"):
        dataset.env_int("RANK")

def test_hidden_files_are_not_read_from_a_remote_folder(tmp_path):
    write(tmp_path, "a", "_temporary/b", ".c", "y=24/_d", "y=24/e")
    with pytest.warns(UserWarning, match=r"ignored 2 shards .* begins with _, such as _temporary/b.parquet"):
        names = [name for name, *_ in dataset.list_files(f"fsspec+file://{tmp_path}")]
    assert names == ["a.parquet", "y=24/e.parquet"]

@pytest.mark.parametrize("name", ["../a.parquet", "/a.parquet", "b/../../a.parquet", "..\\a.parquet"])
@pytest.mark.parametrize("index_format", [4, 5])
def test_names_of_an_index_stay_in_their_folder(tmp_path, name, index_format):
    entry = {"format": index_format, "shards": {name: {"file_size": 9}}}
    (tmp_path / "index.json").write_text(json.dumps(entry))
    with pytest.raises(UserError, match="which may be outside the folder"):
        dataset.read_index(str(tmp_path))

def test_a_strangers_command_is_not_printed(tmp_path):
    (tmp_path / "index.json").write_text('{"unfinished": "rm -r ~"}')
    with pytest.raises(UserError, match="finish it where it was made") as error:
        dataset.read_index(f"file://{tmp_path}")
    assert "rm" not in str(error.value)
