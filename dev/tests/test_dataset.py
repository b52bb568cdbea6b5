"""
dataset.py: train and val, shards, damage, folders that cannot be used, the index, remote ends, the
download, the commands. Each section begins with its plainest example. Remote ends are one server on
127.0.0.1, which answers as the web, as Hugging Face's hub and as S3.
"""

import base64
import contextlib
import errno
import functools
import gc
import hashlib
import http.server
import io
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
from dev.tests.cases import is_like, read_cases
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
    texts = []
    for shard in shards:
        for row_group in range(len(shard.group_sizes)):
            texts += shard.read(row_group).to_pylist()
    return texts

def read_all(folder):
    return read(*list_shards(str(folder), "train"), *list_shards(str(folder), "val"))

def write_others(folder, names, columns, **options):
    """Shards of another program, of the same content."""
    for name in names:
        pq.write_table(pa.table(columns), f"{folder}/{name}.parquet", **options)

def start(*words, env=None):
    """A process of Python."""
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=HERE, env=env, text=True, stdout=-1, stderr=-1)

def end_of(process):
    """(status, output, errors)"""
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err

def describe(folder):
    return dataset.describe_split(folder, dataset.all_shards(folder))

def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

# --------------------------------------------------------------------------------------------------
# Train and val

@pytest.mark.parametrize("where, changes, lines", read_cases("folders.txt"))
def test_folders_are_what_folders_txt_says(tmp_path, monkeypatch, where, changes, lines):
    monkeypatch.chdir(tmp_path)
    first, *later = map(json.loads, changes.split(" then "))
    put(first)
    for change in later:
        dataset.write_index("data")
        put(change)
    place = f"file://{tmp_path}/"
    folder = f"{place}data" if where == "remote" else where or "data"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        told = [describe_or_error(folder)]
    told = [str(warning.message) for warning in found] + told
    text = "\n".join(told).replace(place, "")
    assert is_like(text, lines), text

def put(files):
    """See folders.txt."""
    for name, content in files.items():
        path = Path("data", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case [int(), *_]:
                metadata = {dataset.TOKEN_DTYPE: "uint16", dataset.FINGERPRINT: name}
                ids = np.array(content, np.uint16).tobytes()
                dataset.write_shard(path, [pa.array([ids])], "tokens", metadata)
            case [*texts]:
                dataset.write_shard(path, [pa.array(texts, pa.string())])
            case {} if path.suffix == ".json":
                path.write_text(json.dumps(content))
            case {}:
                pq.write_table(pa.table(content), path)
            case str() if content.startswith("-> "):
                path.symlink_to(content.removeprefix("-> "))
            case str():
                path.write_text(content)
            case _:
                path.unlink()

def describe_or_error(folder):
    try:
        lines = [describe(folder)]
        for split in ("train", "val"):
            names = [shard.name for shard in list_shards(folder, split)]
            lines.append(f"{split}: {' '.join(names)}")
    except UserError as error:
        return f"error: {dataset.printable(error)}"
    return "\n".join(lines)

def test_there_are_two_splits_and_a_folder_has_a_name(tmp_path):
    for arguments in ((str(tmp_path), "test"), ("", "train")):
        with pytest.raises(UserError, match=r"; expected .train. or .val.|empty name"):
            list_shards(*arguments)

def test_a_val_shard_that_is_in_train_is_a_warning(tmp_path):
    """train.py compares those of all sources, also those that other programs wrote."""
    folder, other = write(tmp_path / "x", "a", "b"), tmp_path / "y"
    other.mkdir()
    write_others(other, "a", {"text": ["a"]})
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
    write_others(tmp_path, "ab", other, row_group_size=3)
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
    write_others(tmp_path, "ab", {"text": other_texts()}, **options)
    [before] = list_shards(str(tmp_path), "train")
    before.read(0)
    write_others(tmp_path, "a", {"text": change(other_texts())}, **options)
    [after] = list_shards(str(tmp_path), "train")
    assert after.digest != before.digest
    with pytest.raises(UserError, match=r"a.parquet.*(replaced by another|bytes, but)"):
        before.read(0)

def test_other_columns_do_not_count_as_text(tmp_path):
    texts = other_texts()
    html = [f"<p>{text}</p>" * 50 for text in texts]
    vectors = pa.array([[0.5] * 99 for _ in texts], pa.list_(pa.float32()))
    pages = pa.array([{"text": page, "url": "x" * 99} for page in html])    # page.text is not text
    table = {"page": pages, "vector": vectors, "text": texts, "html": html}
    write_others(tmp_path, "ab", table, row_group_size=200)
    [shard] = list_shards(str(tmp_path), "train")
    assert 1 <= shard.text_bytes / sum(map(len, texts)) < 1.2

def test_texts_that_a_file_holds_once_count_as_often_as_they_are_there(tmp_path):
    """pyarrow's footers tell no bytes of theirs. If they do not repeat, the footer is exact."""
    texts = ["a" * 500, "b" * 900] * 2000
    write_others(tmp_path, "a", {"text": texts}, row_group_size=1500)
    write_others(tmp_path, "b", {"text": other_texts()}, row_group_size=300)
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

def n_kept():
    gc.collect()
    kinds = (AbstractBufferedFile, pq.ParquetFile, EOFError)
    return sum(issubclass(type(one), kinds) for one in gc.get_objects())

def test_footers_are_read_once_and_kept_small(tmp_path):
    """Of any number of shards, in any order. Arrow kept files, rows and errors of each reading."""
    names = map(str, range(100))
    write_others(tmp_path, names, {"text": ["a", "b" * 99]}, row_group_size=1, use_dictionary=False)
    n_before = n_kept()
    shards = dataset.all_shards(str(tmp_path))
    with mock.patch("dataset.parse_footer", wraps=dataset.parse_footer) as parse:
        for _ in range(3):
            assert len(read(*shards)) == 200
    assert parse.call_count == 100
    assert n_kept() <= n_before
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
    status, _, err = end_of(start("-c", code, tmp_path))
    assert status == 0, err

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
    status, _, err = end_of(start("-m", "dev.prepare", "head", tmp_path))
    error = r"error: \S+/[ab].parquet, footer: .*crypt.*; if it .*\n"
    assert status == (column == "text")
    assert re.fullmatch(error if status else "", err)

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

@pytest.mark.parametrize("options, damage", [
    ({"write_page_checksum": True, "use_dictionary": False}, b"sacred"),
    ({"write_page_checksum": True}, b"sacred"),    # in the dictionary, which a listing measures
    ({"use_dictionary": False}, b"s\xffcret")])
def test_damage_in_shards_of_other_tools_is_an_error_where_it_is_read(tmp_path, options, damage):
    """Page checksums, if they wrote some, and UTF-8 are all that can be checked."""
    path, columns = tmp_path / "a.parquet", {"text": ["secret"] * 9}
    write_others(tmp_path, "a", columns, compression="none", write_statistics=False, **options)
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
    content, bounds = dataset.column_views(array[1:4])
    assert bytes(content) == b"abc" and bounds.tolist() == [0, 2, 2, 3]
    content, bounds = dataset.column_views(array[2:2])
    assert bytes(content) == b"" and bounds.tolist() == [0]

# --------------------------------------------------------------------------------------------------
# Folders, and the index

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
    size = os.path.getsize(tmp_path / "a.parquet")
    assert (tmp_path / "index.json").read_text() == (
        '{"format": 5, "shards": {"a.parquet": {"kind": "text", "dtype": null, '
        f'"tokenizer_fingerprint": null, "file_size": {size}, "group_sizes": [3, 5], '
        '"group_bytes": [297, 495], "digest": "b29037bed2a8726b"}}}')

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

FLIPPED = dataset.Damaged("flipped")

@pytest.mark.parametrize("place, errors, n_waits", [
    ("a.parquet", [errno.EIO, errno.EIO], 2),    # as of NFS and Lustre
    ("a.parquet", [errno.ESTALE], 1),
    ("a.parquet", [errno.ENOENT], 0),
    ("a.parquet", [errno.EACCES], 0),
    ("a.parquet", [errno.ELOOP], 0),
    ("s3://a.parquet", 5 * [errno.ENOENT], 5),
    ("s3://a.parquet", 6 * [errno.ENOENT], 5),
    # Once, the network may be at fault: skip_bad would leave out a good row group in one run only
    ("a.parquet", [FLIPPED], 1),
    ("a.parquet", [FLIPPED, FLIPPED], 1),
    ("s3://a.parquet", 5 * [errno.EIO] + [FLIPPED], 6),
    ("s3://a.parquet", 5 * [errno.EIO] + [FLIPPED, FLIPPED], 6)])
def test_errors_that_may_pass_are_tried_again(monkeypatch, place, errors, n_waits):
    errors = [OSError(one, os.strerror(one)) if isinstance(one, int) else one for one in errors]
    waits, work = [], mock.Mock(side_effect=[*errors, "documents"])
    monkeypatch.setattr(dataset, "pause", waits.append)
    if n_waits == len(errors):
        assert dataset.retry(work, place, "advice") == "documents"
    else:
        with pytest.raises(UserError, match=f"^{place}: .*{errors[-1].args[-1]}; advice$"):
            dataset.retry(work, place, "advice")
    assert waits == [1, 2, 4, 8, 16, 32][:n_waits]

def test_a_wait_ends_with_python():
    code = """if True:
        import dataset
        from concurrent.futures import ThreadPoolExecutor
        dataset.RETRY_SECONDS = 1000
        ThreadPoolExecutor().submit(dataset.retry, lambda: open("/no/such"), "s3://x", "wait")
    """
    status, _, err = end_of(start("-c", code))
    assert (status, err.count("trying again")) == (0, 1)

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
    server.start = functools.partial(start, "-c", code, env=env)
    server.run = lambda *flags: end_of(server.start(*flags))
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

def test_stopped_download_leaves_at_once(hub):
    hub.faults = {"shard_00000.parquet": ["stall"]}
    process = hub.start("-n", "1")
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    status, _, err = end_of(process)
    assert status == 130
    assert "\nstopped; run the same command to continue or repeat it\n" in err    # a thread may still print
    assert "unfinished" in (hub.data / "index.json").read_text()

@pytest.mark.parametrize("n, n_train", [("3", 3), ("-1", 6542), ("7000", 6542)])
def test_a_download_has_so_many_train_shards(n, n_train):
    with mock.patch("dataset.download") as download:
        dataset.main(["-n", n])
    download.assert_called_once_with(n_train, dataset.default_data_dir())

@pytest.mark.parametrize("error, raised, words", [
    (UserError("a\0\x9b\n b"), SystemExit, r"^error: a b$"),
    (OSError("a\0\n b"), SystemExit, r"^error: a b \(python -X dev shows where\)$"),
    (KeyboardInterrupt(), SystemExit, "130"),
    (RuntimeError("a bug"), RuntimeError, "a bug"),
    (ValueError("a bug"), ValueError, "a bug")])
def test_our_own_errors_are_one_line_and_bugs_keep_their_traceback(error, raised, words, capsys):
    with pytest.raises(SystemExit):
        dataset.Parser("x").error("a\0\x9b\n b")
    assert capsys.readouterr().err == "error: a b; see x --help\n"
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
    process = start("-c", code)
    process.stdout.close()    # as `| head` does
    assert (process.stderr.read(), process.wait(60)) == ("", 141)

def test_reading_local_data_needs_no_package_of_the_web_or_of_progress_bars(tmp_path):
    folder = write(tmp_path, "a", "b", groups=[["x"]])
    code = """if True:
        import sys
        for name in ("tqdm", "huggingface_hub", "aiohttp", "torch", "tiktoken", "rustbpe"):
            sys.modules[name] = None
        import dataset
        print(dataset.list_shards(sys.argv[1], "train")[0].read(0).to_pylist())
    """
    assert end_of(start("-c", code, folder)) == (0, "['x']\n", "")

def test_a_launcher_says_numbers(monkeypatch):
    assert dataset.env_int("NO_SUCH_NAME") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert (dataset.env_int("LOCAL_WORLD_SIZE"), dataset.cores()) == (100_000, 1)
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(UserError, match=r"RANK='-1' in the environment; expected a whole number"):
        dataset.env_int("RANK")
