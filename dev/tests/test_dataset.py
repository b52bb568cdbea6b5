"""
dataset.py: train and val, shards, damage, folders that cannot be used, the index, remote ends, the
download, the commands. Each section begins with its plainest example. Remote ends are one server on
127.0.0.1, which answers as the web, as Hugging Face's hub and as S3.
"""

import hashlib
import http.server
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataset
import train
from dataset import UserError, list_shards
from test_dataloader import HERE


def write(folder, *names, groups=None):
    """Shards of these names; texts of a: a, aa | aaa. Returns the folder."""
    for name in names:
        texts = groups or [[name, 2 * name], [3 * name]]
        arrays = [pa.array(group, pa.string()) for group in texts]
        dataset.write_shard(f"{folder}/{name}.parquet", arrays, compression="none")
    return str(folder)

def write_tokens(folder, *names):
    pairs = {dataset.TOKEN_DTYPE: "uint16", dataset.FINGERPRINT: "bytes", dataset.TEXT_BYTES: "99"}
    for name in names:
        ids = pa.array([np.arange(3, dtype="<u2").tobytes()])
        dataset.write_shard(f"{folder}/{name}.parquet", [ids], "tokens", pairs)
    return str(folder)

def read(*shards):
    """All documents of these shards."""
    groups = [(shard, i) for shard in shards for i in range(len(shard.group_sizes))]
    return [text for shard, i in groups for text in shard.read(i).to_pylist()]

def read_all(folder):
    return read(*list_shards(str(folder), "train"), *list_shards(str(folder), "val"))

def names(folder):
    return [name.removesuffix(".parquet") for name, *_ in dataset.list_files(str(folder))]

def describe(folder):
    return dataset.describe_split(folder, dataset.all_shards(folder))

def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

# --------------------------------------------------------------------------------------------------
# Train and val

def test_the_last_file_is_val_if_no_name_says_another(tmp_path):
    """The names of the download. train.py prints the line, also if there is an index.json."""
    folder = write(tmp_path, "shard_06542", "shard_00001", "shard_00000")
    train, val = list_shards(folder, "train"), list_shards(folder, "val")
    assert [shard.name for shard in train] == ["shard_00000.parquet", "shard_00001.parquet"]
    assert [shard.name for shard in val] == ["shard_06542.parquet"]
    line = f"{folder}: 3 shards, 2 train, 1 val (shard_06542.parquet)"
    hint = "; val is the last file (to choose another, name it validation-*)"
    assert describe(folder) == line + hint
    write(folder, "dev-0", "test-0")
    dataset.write_index(folder)
    line = f"{folder}: 5 shards, 3 train, 1 val (dev-0.parquet), 1 test by name (not used)"
    assert describe(folder) == line
    with pytest.raises(UserError, match="split is 'test'; expected 'train' or 'val'"):
        list_shards(folder, "test")
    with pytest.raises(UserError, match="saw an empty name"):
        list_shards("", "train")

def test_a_val_shard_that_is_in_train_is_a_warning(tmp_path):
    """train.py also compares its sources."""
    folder = write(tmp_path / "x", "a", "b", "c")
    write(tmp_path / "y", "d", "e")
    shutil.copy(f"{folder}/b.parquet", f"{tmp_path}/y/f.parquet")
    flags = ["--steps", "1", "--depth", "1", "--vocab_size", "300",
             "--seq_len", "8", "--device", "cpu"]
    with pytest.warns(UserWarning, match=r"/y/f.parquet and .*/x/b.parquet seem to be copies"):
        train.main([*flags, "--data", folder, f"{tmp_path}/y", "--out", f"{tmp_path}/run"])
    add(tmp_path / "others", {"text": ["x"]})
    for folder in (f"{tmp_path}/x", f"{tmp_path}/others"):
        for name in ("b", "x"):
            if os.path.exists(f"{folder}/{name}.parquet"):
                shutil.copy(f"{folder}/{name}.parquet", f"{folder}/validation-{name}.parquet")
        with pytest.warns(UserWarning, match=r"(.).parquet and \S*\1.parquet seem"):
            dataset.warn_of_copies(dataset.all_shards(folder))

@pytest.mark.parametrize("split, shards", [
    ("train", "train-00000-of-00002 train-0 training_data_0 c4-train.00000-of-01024 split=train/0"),
    ("val", "c4-validation.0 wiki-val-0 dev-0 val2 c4.VALID.0 data/eval/x evaluation/0 dev_1"),
    ("test", "wiki-test-0 test/0 testing_1 my_test_run/shard_0"),
    (None, "shard_00000 developer-0 latest contest tester trainer value lang=de/0 prétest"),
    # The innermost name decides, and in it the last word
    ("train", "my_test_run/train-0 val/train/0 unit-test-train-0"),
    ("val", "train/dev-0 split=train/validation train_dev_0"),
])
def test_a_split_is_a_word_anywhere_in_a_name(split, shards):
    """
    As in Hugging Face's loader, but for `eval`, which is its test. Words in folders count like
    those in files: to learn from the test set in wiki-test/ would be silent, and that my_test_run/
    is left out is printed at each start, or is an error.
    """
    for name in shards.split():
        assert dataset.split_in_name(f"{name}.parquet") == split, name

def test_builtin_corpus_is_made_once_and_is_always_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        (folder,) = set(pool.map(dataset.find_data, [None] * 3))
    assert capsys.readouterr().out.count("building a corpus of Python's library") == 1
    train, val = list_shards(None, "train"), list_shards(folder, "val")
    assert [len(shard.group_sizes) for shard in train + val] == [16] * 5
    assert 0.5e6 < sum(map(len, read(*val))) < 2e6
    dataset.build_builtin_corpus(str(tmp_path / "again"))
    assert files_of(folder) == files_of(tmp_path / "again")
    texts = [f"{i} " * (i * 37 % 5000) for i in range(600)]
    with mock.patch("dataset.read_standard_library", return_value=texts):
        dataset.build_builtin_corpus(str(tmp_path / "fixed"))
    digests = [shard.digest for shard in dataset.all_shards(f"{tmp_path}/fixed")]
    assert digests == ["dc81deb61f793154", "c847ba384baad63e", "93f72063965cbb0d",
                       "7a772ddda5a548fb", "7d30ce9c1bc2ed9d"], "change builtin-v2"
    write(tmp_path / "base_data", "a", "b")
    assert dataset.find_data() == dataset.default_data_dir() == f"{tmp_path}/base_data"
    assert dataset.find_data("s3://bucket/x") == "s3://bucket/x"
    monkeypatch.setenv("NANOLOADER_BASE_DIR", f"{folder}/index.json")    # a file is in the way
    with pytest.raises(UserError, match=r"builtin.*; choose .* NANOLOADER_BASE_DIR=FOLDER"):
        dataset.find_data()
    assert read_all(tmp_path / "base_data") == ["a", "aa", "aaa", "b", "bb", "bbb"]

# --------------------------------------------------------------------------------------------------
# Shards, and their damage

def test_a_shard_gives_back_what_was_written(tmp_path):
    """Nulls and empty row groups, too. Of tables the first column is read."""
    folder = write(tmp_path, "a", groups=[["a", None, ""], [], ["ccc"]])
    write(folder, "b")
    write(folder, "c", groups=[[]])
    (shard,) = list_shards(folder, "train")
    assert [shard.read(i).to_pylist() for i in range(3)] == [["a", None, ""], [], ["ccc"]]
    assert (shard.kind, shard.group_sizes, shard.text_bytes) == ("text", (3, 0, 1), 4)
    batches = list(dataset.parquets_iter_batched("train", data_dir=folder))
    assert batches == [["a", ""], [], ["ccc"]]
    table = pa.table({"text": ["x"], "score": [0.5]})
    dataset.write_shard(f"{folder}/a.parquet", [table, table])
    (shard,) = list_shards(folder, "train")
    assert read(shard) == ["x", "x"]
    assert pq.read_table(shard.path)["score"].to_pylist() == [0.5, 0.5]
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
    assert (read(shard), shard.group_sizes, shard.digest) == (texts, (3, 2), None)
    data, offsets = dataset.column_views(shard.read(1).slice(1))
    assert data[offsets[0]:offsets[1]] == b"b" * 9000
    assert dataset.column_views(shard.read(0))[1].tolist() == [0, 1, 1, 1]
    other = shard._replace(group_sizes=(4, 2))
    with pytest.raises(UserError, match="was replaced by another shard of the same size"):
        other.read(0)
    footer = dataset.checked_footer(shard)
    with (mock.patch("dataset.checked_footer", return_value=footer),
          pytest.raises(UserError, match="row group 0: it has 3 documents, 4 in the index")):
        other.read(0)

def test_a_location_has_a_key_that_survives_a_move(tmp_path):
    """... and differs between the subfolders of a folder."""
    write(tmp_path / "old", "en/train-0", "de/train-0", "val")
    os.rename(tmp_path / "old", tmp_path / "new")
    _, shard = list_shards(str(tmp_path / "new"), "train")
    here = shard.location(3, 17)
    assert here.key == pickle.loads(pickle.dumps(here)).key == "en/train-0.parquet:3:17"
    assert str(here) == f"{tmp_path}/new/en/train-0.parquet, row group 3, row 17"

def test_files_are_complete_or_absent_also_with_two_writers(tmp_path):
    """Containers on one disk may have equal process ids: temporary names do not come from these."""
    path = tmp_path / "new" / "a"
    with dataset.atomic_file(path) as one, dataset.atomic_file(path) as two:
        for temporary in (one, two):
            assert not dataset.is_shard(os.path.basename(temporary))
            Path(temporary).write_text(temporary)
    assert path.read_text() == one, "the one that ends last"
    with mock.patch("os.fsync", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        dataset.write_atomic(path, b"other")
    assert files_of(path.parent) == {"a": one.encode()}

@pytest.mark.parametrize("index", ["known", "of the damaged file"])
def test_a_damaged_shard_never_gives_other_text(tmp_path, index):
    """Bytes are flipped, cut or zeroed anywhere: an error that names the shard, or equal text."""
    texts = [f"{i} für 日本\0\n" * (i * i % 40) for i in range(64)]
    folder = write(tmp_path, "a", groups=[texts[i:i + 8] for i in range(0, 64, 8)])
    known = dataset.all_shards(folder)
    path = tmp_path / "a.parquet"
    complete, pick, outcomes = path.read_bytes(), random.Random(index), set()
    for _ in range(200):
        data = bytearray(complete)
        start = pick.randrange(pick.choice([0, len(data) - 3000]), len(data))
        stop = pick.choice([start + 1, start + 1, start + 100, len(data)])
        data[start:stop] = pick.choice([b"", pick.randbytes(1), bytes(len(data[start:stop]))])
        path.write_bytes(data)
        try:
            dataset.read_footers.cache_clear()
            dataset.checked_footer.cache_clear()
            (shard,) = known if index == "known" else dataset.all_shards(folder)
            assert read(shard) == texts, "OTHER TEXT"
            outcomes.add("equal")
        except UserError as error:
            assert str(path) in str(error)
            outcomes.add("error")
    assert outcomes == {"equal", "error"}

def test_a_replaced_shard_is_an_error(tmp_path):
    """Of another size, gone, or of the same size, since the folder was listed."""
    for name in "abc":
        write(tmp_path, name, groups=[[name * 99]] * 2)
    path, complete = tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes()
    dataset.write_index(str(tmp_path))
    for now in (complete[:-9], complete + b".", None):
        (shard, _) = list_shards(str(tmp_path), "train")
        path.unlink() if now is None else path.write_bytes(now)
        with pytest.raises(UserError, match=r"a.parquet, footer: .* if it is damaged"):
            shard.read(1)
        path.write_bytes(complete)
    (shard, other) = list_shards(str(tmp_path), "train")
    assert shard.read(0).to_pylist() == ["a" * 99]
    path.write_bytes(Path(other.path).read_bytes())
    with pytest.raises(UserError, match=r"row group 0: .* not those that were written .*verify"):
        shard.read(0)    # its footer is known
    advice = r"as they should be: python dataset.py index \S+$"
    with pytest.raises(UserError, match=f"a.parquet was replaced by another .*{advice}"):
        list_shards(str(tmp_path), "train")[0].read(0)

def test_a_replaced_shard_of_another_program_is_read_anew(tmp_path):
    """... although its size, and all that we know of it, is the same: here, columns trade places."""
    for name in "ab":
        pq.write_table(pa.table({"text": ["aaaa"], "othr": ["bbbb"]}), tmp_path / f"{name}.parquet")
    assert read(list_shards(str(tmp_path), "train")[0]) == ["aaaa"]
    for name in "ab":
        pq.write_table(pa.table({"othr": ["bbbb"], "text": ["aaaa"]}), tmp_path / f"{name}.parquet")
    assert read(list_shards(str(tmp_path), "train")[0]) == ["aaaa"]

@pytest.mark.parametrize("index", ["[1]", "5", '{"format": 2}', '{"forma', ""])
def test_a_damaged_index_is_an_error_and_can_be_replaced(tmp_path, index):
    folder = write(tmp_path, "a", "b")
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(UserError, match=r"index.json: .*: python dataset.py index"):
        list_shards(folder, "train")
    dataset.main(["index", folder])
    assert len(list_shards(folder, "train")) == 1

def test_a_folder_may_look_like_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "wiki:en", "a", "b")
    dataset.main(["index", "wiki:en"])
    assert read(list_shards("wiki:en", "train")[0])

@pytest.mark.parametrize("checksums, damage", [(True, b"sacred"), (False, b"s\xffcret")])
def test_damage_in_shards_of_other_tools_is_an_error(tmp_path, checksums, damage):
    """Page checksums, if they wrote some, and UTF-8 are all that can be checked."""
    pq.write_table(pa.table({"text": ["secret"]}), tmp_path / "a.parquet", compression="none",
                   write_page_checksum=checksums, use_dictionary=False, write_statistics=False)
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"secret", damage, 1))
    with pytest.raises(UserError, match=r"a.parquet, row group 0: .*(checksum|UTF8)"):
        dataset.all_shards(str(tmp_path))[0].read(0)

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

# --------------------------------------------------------------------------------------------------
# Folders, and the index

def test_shards_are_found_below_a_folder_but_not_what_other_tools_hide(tmp_path):
    """Links to other places are as good as files."""
    write(tmp_path / "data", "a", "y=24/b", "part.parquet/c", "snapshots/d", "my_delta_log/e")
    write(tmp_path / "data", "_temporary/0", ".cache/d", "y=24/_d", ".e")
    for name in ("f.PQ", "i.parq"):
        (tmp_path / "data" / name).write_bytes(b"")
    (tmp_path / "data" / "README.md").write_text("no shard")
    write(tmp_path / "far", "x/g", "h")
    for link, target in {"m": "far/x", "n.parquet": "far/h.parquet", ".hidden": "data"}.items():
        os.symlink(tmp_path / target, tmp_path / "data" / link)
    with mock.patch("os.scandir", wraps=os.scandir) as scandir:
        assert names(tmp_path / "data") == [
            "a", "f.PQ", "i.parq", "m/g", "my_delta_log/e", "n", "part.parquet/c", "snapshots/d",
            "y=24/b"]
    entered = {os.path.relpath(call.args[0], tmp_path / "data") for call in scandir.call_args_list}
    assert "y=24" in entered
    assert not {"_temporary", ".cache", ".hidden"} & entered, "hidden folders are not walked"

def add(folder, *table):
    """A shard by others, with these arguments of pa.table."""
    write(folder, "a")
    pq.write_table(pa.table(*table), folder / "x.parquet")

def mix(folder):
    write_tokens(write(folder, "a"), "b")

def pack(folder):
    dataset.write_atomic(folder / "b.parquet.gz", b"packed" * 9)

def link(folder, target, name):
    write(folder, "a", "b", "c", "d/e")
    os.symlink(folder / target, folder / name)

def change_index(folder, data):
    """data: bytes, or what is other in it."""
    dataset.write_index(write(folder, "a", "b", "c"))
    index = json.loads((folder / "index.json").read_bytes())
    data = data if isinstance(data, bytes) else json.dumps(index | data).encode()
    (folder / "index.json").write_bytes(data)

def change_shard(folder, change, *arguments):
    dataset.write_index(write(folder, "a", "b", "c"))
    change(folder / "b.parquet", *arguments)

def grow_folder(path):
    write(path.parent, "b.parquet_2")

NO_SHARDS = r"/data does not exist, or has no shards; .*dataset.py -n 8, or .*FILES --out NEW_"
ONE_COLUMN = r"/x\.parquet: expected one string column `text` or `messages`; it has: %s. .*--out NEW_F"
OLD_VERSIONS = "older versions of its data; name the folder of one version"
NOT_USED = r"/index.json: .*; if all files .*: python dataset.py index"
NO_MATCH = (r"index.json does not match: b.parquet.*: %s bytes in the index .*: "
            "python dataset.py index")

@pytest.mark.parametrize("case", [
    (NO_SHARDS, lambda folder: None),
    (NO_SHARDS, os.mkdir),
    (NO_SHARDS, Path.write_text, "a file"),
    (r"1 shards, 0 train, 1 val \(a.parquet\); .* --out NEW_FOLDER$", write, "a"),
    (r"0 train, 0 val, 2 test by name .* rename", write, "test-0", "test-1"),
    (r"/train-0.parquet is train by its name, heldout.parquet names no", write, "train-0", "heldout"),
    (ONE_COLUMN % "n: int64 raw: string", add, {"n": [1], "raw": ["a"]}),
    (ONE_COLUMN % "text: int64", add, {"text": [1]}),
    (ONE_COLUMN % "text: string messages: string", add, {"text": ["a"], "messages": ["[]"]}),
    (ONE_COLUMN % "messages: list<.*>.*", add, {"messages": [["a"]]}),
    (ONE_COLUMN % "text: .*: string", add, [["a"], ["b"]], ["text", "text"]),
    ("different kinds: a.parquet .*text.*, b.parquet .*tokens", mix),
    ("b.parquet.gz, footer: .*not a parquet file.*remove it", pack),
    ("Too many levels of symbolic links", link, "", "d/circle"),
    (r"/data, listing: .*No such file .*/link.parquet'; check", link, "nowhere", "link.parquet"),
    # Delta and Hudi tables keep deleted rows, a cache of Hugging Face old revisions
    (OLD_VERSIONS, write, "_delta_log/0"),
    (OLD_VERSIONS, write, "x/.hoodie/0"),
    (OLD_VERSIONS, write, f"x/snapshots/{'1f' * 20}/0"),
    (NOT_USED, change_index, b""),
    (NOT_USED, change_index, b"[]"),
    (NOT_USED, change_index, b"[" * 200_000),
    (NOT_USED, change_index, b"\xff"),
    (NOT_USED, change_index, {"format": 1}),
    (NOT_USED, change_index, {"shards": ["a.parquet"]}),
    (NOT_USED, change_index, {"shards": {"a.parquet": {"bytes": 1}}}),
    (NO_MATCH % r"\d+ bytes in the folder, None", change_shard, grow_folder),
    (NO_MATCH % r"None bytes in the folder, \d+", change_shard, os.unlink),
    (NO_MATCH % r"3 bytes in the folder, \d+", change_shard, Path.write_bytes, b"cut"),
])
def test_unusable_folder_is_an_error_that_says_what_to_type(tmp_path, case):
    words, spoil, *arguments = case
    spoil(tmp_path / "data", *arguments)
    with pytest.raises((UserError, OSError), match=words):
        list_shards(str(tmp_path / "data"), "val")

def test_index_holds_what_the_footers_say(tmp_path, capsys):
    """With it, no shard is opened before it is read. Its digest is in users' states."""
    folder = write(tmp_path, "a", groups=[["a" * 99] * 3, ["b" * 99] * 5])
    before = dataset.all_shards(folder)
    with pytest.raises(SystemExit):
        dataset.main(["index", folder, "-n", "1"])
    assert "expected `index DIR` alone" in capsys.readouterr().err
    dataset.main(["index", folder])
    assert capsys.readouterr().out == describe(folder) + "; index.json written\n"
    with mock.patch("dataset.parse_footer", side_effect=AssertionError):
        after = dataset.all_shards(folder)
    assert after == before
    index = json.loads((tmp_path / "index.json").read_bytes())
    assert index == {"format": 3, "shards": {"a.parquet": {
        "kind": "text", "dtype": None, "fingerprint": None,
        "file_size": os.path.getsize(tmp_path / "a.parquet"), "text_bytes": 99 * 8,
        "group_sizes": [3, 5], "digest": "b29037bed2a8726b"}}}

def test_a_folder_is_not_read_before_its_writer_has_finished(tmp_path):
    """A download or tokenize marks it first, and writes its index last."""
    folder = write_tokens(tmp_path, "a", "b")
    dataset.mark_unfinished(folder, "again")
    with pytest.raises(UserError, match=r"is not complete; type: again$"):
        list_shards(folder, "train")
    with pytest.raises(SystemExit, match="is not complete; type: again"):
        dataset.main(["index", folder])
    dataset.write_index(folder)
    (shard,) = list_shards(folder, "train")
    seen = shard.kind, shard.dtype, shard.fingerprint, shard.text_bytes, shard.digest
    assert seen == ("tokens", "uint16", "bytes", 99, None)
    assert np.frombuffer(shard.read(0)[0].as_py(), shard.dtype).tolist() == [0, 1, 2]

def test_tokens_of_another_tokenizer_do_not_pass_for_those_in_the_index(tmp_path):
    """Of the same text, and the file has as many bytes."""
    folder = write_tokens(tmp_path, "a", "b")
    dataset.write_index(folder)
    shard = list_shards(folder, "train")[0]
    path = tmp_path / "a.parquet"
    path.write_bytes(path.read_bytes().replace(b"bytes", b"other"))
    with pytest.raises(UserError, match=r"a.parquet was replaced by another shard of the same size"):
        shard.read(0)

def test_footers_of_a_folder_without_an_index_are_read_once(tmp_path):
    """... in a process, until a file changes. Nothing is written into the folder."""
    folder = write(tmp_path, "a", "b", "c")
    with mock.patch("dataset.parse_footer", wraps=dataset.parse_footer) as parse_footer:
        assert [len(list_shards(folder, split)) for split in ("train", "val")] == [2, 1]
        assert parse_footer.call_count == 3
        os.utime(tmp_path / "b.parquet", ns=(0, 0))
        list_shards(folder, "train")
        assert parse_footer.call_count == 6
    assert len(os.listdir(folder)) == 3

# --------------------------------------------------------------------------------------------------
# Remote folders

class Server(http.server.ThreadingHTTPServer):
    """
    .files: {name: bytes}, whatever folder they are asked for in; a list request of S3 has all.
    .faults: {name: [what the next GETs of that file do]}: a status, 'cut', 'stall', 'flip' (another
    byte), None (nothing). .ranges: whether it has range requests. .gets: (name, range)
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
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
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
        if self.command == "GET":
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
    monkeypatch.setattr(dataset, "time", SimpleNamespace(sleep=server.waits.append))
    yield server
    server.shutdown()

def test_a_remote_folder_costs_one_request_for_each_thing(server):
    """index.json, and of a shard its footer and each row group."""
    (shard,) = list_shards(server.web + "/data?token=1", "val")
    assert shard.path == server.web + "/data/c.parquet?token=1"
    assert read(shard) == server.texts[-3:]
    index, *others = server.gets
    assert index == ("index.json", None)
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

def fail(server, name, status=503):
    server.faults[name] = [status] * 9

def lose(server, name):
    del server.files[name]

def grow(server, name):
    server.files[name] += b"."

def lose_ranges(server):
    server.ranges = False

WAITS = [1, 2, 4, 8, 16]

@pytest.mark.parametrize("case", [
    ("a.parquet, footer: .*503.*; if it is damaged", "web", WAITS, fail, "a.parquet"),
    ("index.json: .*503.*; check its address", "web", WAITS, fail, "index.json"),
    ("a.parquet, footer: .*not found", "web", WAITS, lose, "a.parquet"),
    ("index.json: .*403.*; check .* permissions", "web", WAITS, fail, "index.json", 403),
    ("has no index.json, and web servers list no files; write", "web", [], lose, "index.json"),
    ("whole .* lacks range requests", "web", [], lose_ranges),
    ("a.parquet, footer: .*the file has changed", "web", [], grow, "a.parquet"),
    ("a.parquet.*bytes, but .* as listed or in the index", "s3", [], grow, "a.parquet")])
def test_remote_errors_say_what_to_do(server, case):
    """... after six attempts with growing waits, or at once if no retry can mend them."""
    words, end, waits, damage, *arguments = case
    damage(server, *arguments)
    with pytest.raises(UserError, match=words):
        read_all(getattr(server, end))
    assert server.waits == waits
    with pytest.raises(UserError, match=r"nope://x.*Unrecognized .*; check its address"):
        list_shards("nope://x", "train")
    with pytest.raises(SystemExit, match=r"nope://x.*Unrecognized .*; check its address"):
        dataset.main(["index", "nope://x"])

@pytest.mark.parametrize("end, words", [
    ("web", "the file has changed"), ("s3", "as listed or in the index")])
def test_a_file_that_changes_under_its_reader_is_an_error(server, end, words):
    shard = list_shards(getattr(server, end), "train")[0]
    shard.read(0)
    grow(server, "a.parquet")
    with pytest.raises(UserError, match=f"row group 1: .*{words}"):
        shard.read(1)    # its footer is known

def test_s3_is_listed_or_has_an_index(server, tmp_path, monkeypatch):
    index = server.files.pop("index.json")
    assert read_all(server.s3) == server.texts
    monkeypatch.chdir(tmp_path)
    dataset.main(["index", server.s3])
    assert json.loads((tmp_path / "index.json").read_bytes()) == json.loads(index)
    assert list_shards(server.s3, "val")[0].path == server.s3.replace("?", "/c.parquet?")
    with pytest.raises(SystemExit, match=r"index.json is here already; type the command in another"):
        dataset.main(["index", server.s3])    # it may be of a folder of shards

def test_other_file_systems_of_fsspec_have_a_prefix(tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    folder = write(tmp_path / "data", "a", "folder.parquet/b")
    memory.put(f"{folder}/", "/nanoloader-test/", recursive=True)
    assert read_all("fsspec+memory://nanoloader-test") == read_all(folder)

# --------------------------------------------------------------------------------------------------
# The download and the command line

@pytest.fixture
def hub(server, tmp_path):
    """.start(*flags) -> a process of `python dataset.py`; .data is the folder where it writes."""
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
    server.fetched = lambda: [name for name, _ in server.gets if name.startswith("shard")]
    return server

def test_download_from_a_hub_that_misbehaves_ends_complete(hub):
    """Cut connections, a 503, other bytes: repeated. An error while a shard is missing."""
    hub.faults = {"shard_00000.parquet": ["cut", 503], "shard_06542.parquet": ["flip"]}
    missing = hub.files.pop("shard_00001.parquet")
    process = hub.start("-n", "2", "-w", "1")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert re.search(r"error: hf://.*00001.parquet, download: .*; the same command resumes\n$", err)
    again = f"python dataset.py -n 2 --out {hub.data}$"
    with pytest.raises(UserError, match=f"is not complete; type: {again}"):
        list_shards(str(hub.data), "train")
    assert not any(hub.faults.values())
    hub.files["shard_00001.parquet"] = missing
    hub.gets.clear()
    out, err = hub.start("-n", "2").communicate(timeout=100)
    assert f"{hub.data}: 3 shards, 2 train, 1 val (shard_06542.parquet)" in out, err
    assert hub.fetched() == ["shard_00001.parquet"]
    assert read_all(hub.data) == hub.texts
    path = hub.data / "shard_00000.parquet"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    del hub.files["shard_00000.parquet"]
    hub.start("-n", "2").communicate(timeout=100)
    with pytest.raises(UserError, match=f"is not complete; type: {again}"):
        list_shards(str(hub.data), "train")

def test_a_download_without_a_network_changes_nothing(hub):
    hub.start("-n", "1").communicate(timeout=100)
    before = read_all(hub.data)
    hub.files.clear()
    process = hub.start("-n", "2")
    process.communicate(timeout=100)
    assert process.returncode == 1
    assert read_all(hub.data) == before

def test_a_download_leaves_a_folder_of_other_shards_alone(hub):
    """convert writes shards of the same names, by default into the same folder."""
    before = files_of(write(hub.data, "shard_00000", "shard_00001"))
    process = hub.start("-n", "1")
    _, err = process.communicate(timeout=100)
    assert "has other shards than downloaded ones; choose --out NEW_FOLDER" in err
    assert (process.returncode, files_of(hub.data)) == (1, before)

def test_a_download_that_has_begun_is_not_taken_for_none(tmp_path, monkeypatch):
    """... so that the built-in corpus is used instead."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path))
    dataset.mark_unfinished(dataset.default_data_dir(), "again")
    with pytest.raises(UserError, match=r"is not complete; type: again$"):
        list_shards(None, "train")

def test_no_index_is_written_for_a_folder_that_cannot_be_used(tmp_path):
    folder = write(tmp_path, "train-0", "heldout")
    with pytest.raises(SystemExit, match=r"heldout.parquet names no split"):
        dataset.main(["index", folder])
    assert not os.path.exists(f"{folder}/index.json")

def test_an_empty_file_of_the_hubs_client_is_fetched_again(tmp_path, monkeypatch):
    """After a power loss, say."""
    path, contents = tmp_path / "a", [b"", b"whole"]

    def download(*_, **__):
        path.write_bytes(contents.pop(0))
        return str(path)

    monkeypatch.setattr(dataset, "RETRY_SECONDS", 0)
    metadata = SimpleNamespace(etag=hashlib.sha256(b"whole").hexdigest())
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda _: metadata)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    dataset.ask_hub(dataset.fetch, "a", str(tmp_path))
    assert path.read_bytes() == b"whole" and not contents

def test_stopped_download_leaves_at_once(hub):
    hub.faults = {"shard_00000.parquet": ["stall"]}
    process = hub.start("-n", "1")
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130
    assert err.endswith("stopped; type the same command to continue or repeat it\n")
    assert "unfinished" in (hub.data / "index.json").read_text()

@pytest.mark.parametrize("flags, call", [
    ("-n 3 -w 2", (3, 2)), ("-n -1", (6542, 4)), ("-n 7000", (6542, 4)),
    ("-n 1 --out s3://b/x", None),
    ("", None), ("-n0", None), ("-n -5", None), ("-n1 -w0", None), ("index", None),
    ("index a b", None), ("foo", None), ("foo a", None), ("-n 1 --workers 8", None),
    ("-n many\x1b", None), ("index /no\x1bdir", None)])
def test_a_command_downloads_or_is_an_error_of_one_line(flags, call, capsys):
    with mock.patch("dataset.download") as download:
        if call:
            dataset.main(flags.split())
            n_train, workers = call
            download.assert_called_once_with(n_train, dataset.default_data_dir(), workers)
            return
        with pytest.raises(SystemExit) as ended:
            dataset.main(flags.split(" ") if flags else [])
    line = capsys.readouterr().err.strip() or ended.value.code
    assert re.fullmatch(r"error: [^\n\x1b]+", line)
    assert ended.value.code != 2 or line.endswith("; see python dataset.py --help")
    assert not download.called

@pytest.mark.parametrize("error, raised, words", [
    (UserError("a\0\n b"), SystemExit, r"^error: a\\x00 b$"),
    (OSError("a\0\n b"), SystemExit, r"^error: a\\x00 b \(python -X dev shows where\)$"),
    (KeyboardInterrupt(), SystemExit, "130"),
    (ValueError("a bug"), ValueError, "a bug")])
def test_our_own_errors_are_one_line_and_bugs_keep_their_traceback(error, raised, words):
    with pytest.raises(raised, match=words), dataset.errors_in_one_line():
        raise error
    with (mock.patch("sys.flags", SimpleNamespace(dev_mode=True)), pytest.raises(OSError),
          dataset.errors_in_one_line()):
        raise OSError    # python -X dev

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

def test_a_launcher_says_numbers(monkeypatch):
    assert dataset.env_int("NO_SUCH_NAME") is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert (dataset.env_int("LOCAL_WORLD_SIZE"), dataset.cores()) == (100_000, 1)
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(UserError, match=r"RANK='-1' in the environment; expected a whole number"):
        dataset.env_int("RANK")
