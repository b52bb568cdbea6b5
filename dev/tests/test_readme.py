"""
What the README says to type works: its commands at toy size, in their order, then its Python.

A block after a comment `<!-- not run: why -->` is not run. Commands run in this process, as `python` would
run them: an import of torch for each would take a minute.
"""

import contextlib
import csv
import gzip
import inspect
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dataloader import PackedLoader
from dataset import list_shards
from test_dataloader import BOS, HERE, ByteTokenizer, loaders_to_close, make, run
from tokenizer import RustBPETokenizer

README = (HERE / "README.md").read_text(encoding="utf-8")
TOY = ["--steps", "2", "--seq_len", "64", "--eval_rows", "8"]


def blocks(language=""):
    found = re.findall(r"(<!-- not run: [^\n]*-->\n)?```(\w*)\n(.*?)```", README, re.S)
    return [code for skipped, seen, code in found if seen == language and not skipped]


def commands():
    """The words after `python`, at toy size. No installation, no torchrun."""
    for line in "".join(blocks()).replace("\\\n", " ").splitlines():
        line = re.sub(r"step_\d+", "step_0000002", re.sub(r"--steps \d+:\d+", "--steps 0:2", line))
        python, *words = shlex.split(line, comments=True) or [""]
        if words[:1] == ["train.py"] and not {"--eval", "--sample", "--chat"} & {*words}:
            words += TOY if {"--resume", "--init"} & {*words} else [*TOY, "--depth", "1"]
        if python == "python":
            yield words


def type_in(folder, words):
    """-> what the command printed"""
    is_module, printed = words[0] == "-m", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", words[is_module:])
        try:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(HERE / words[0]), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, (words, ended.code)
    printed.seek(0)
    return printed.read()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with data as the README's reader has it, in which the commands for data were typed."""
    folder = tmp_path_factory.mktemp("reader")
    code = "".join(path.read_text() for path in sorted(HERE.glob("*.py")))
    documents = [text for text in code.split("\n\n") if text]
    (folder / "input.txt").write_text("\n\n".join(documents))
    (folder / "my" / "nested").mkdir(parents=True)
    for path in ("my/1.jsonl.gz", "my/nested/2.jsonl.gz"):
        with gzip.open(folder / path, "wt") as file:
            file.writelines(json.dumps({"content": f"{path} {text}"}) + "\n" for text in documents)
    with open(folder / "rated.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "score"), *zip(documents, np.linspace(0, 1, len(documents)),
                                                              strict=True)])
    with open(folder / "chats.jsonl", "w") as file:
        file.writelines(json.dumps({"messages": [{"role": "user", "content": text[:100]}, {
            "role": "assistant", "content": text}]}) + "\n" for text in documents)
    for words in commands():
        if not needs_a_run(words):
            assert type_in(folder, words), words
    return folder


def needs_a_run(words):
    return words[0] == "train.py" or words[1] == "dev.bench"


def test_help_of_train_and_readme_name_the_same_time_of_the_demo():
    of_help = re.search("the demo: .*, ([0-9]+ minutes)", (HERE / "train.py").read_text(encoding="utf-8"))[1]
    assert f"python train.py     # {of_help} on 2 cores" in README


def test_commands_of_training_work_in_their_order(reader):
    typed = [words for words in commands() if needs_a_run(words)]
    for words in typed:
        printed = type_in(reader, words)
        assert "bits per byte" in printed or {"--sample", "--chat"} & {*words} or words[0] == "-m", words
    assert len(typed) > 7


def test_python_works_after_the_commands(reader, monkeypatch):
    """All blocks share one namespace. What they only define is called here."""
    monkeypatch.chdir(reader)
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    weights, targets = names["weights"][:, 1:], names["targets"][:, :-1]
    known = weights > 0    # not a repeated BOS, nor padding
    assert names["loss"] > 0 and known.float().mean() > 0.5 and weights[known].min() >= 0.2
    assert ((targets >= 0) == (weights > 0.5))[known].all(), "the document of the target decides"
    transforms = [value for value in names.values() if inspect.isfunction(value)
                  and [*inspect.signature(value).parameters] == ["ids", "location", "epoch"]]
    for transform in transforms:
        assert next(make("scored", tokenizer=names["tokenizer"], transform=transform))
    for value in names.values():
        if isinstance(value, PackedLoader):
            loaders_to_close.append(value)
            assert next(value)
    assert transforms
    assert [names["late"](row) for row in (0, 1000, 5500, 10_000)] == [0, 0, 0.5, 1]


def test_wrapped_tokenizer_gives_the_rows_of_its_library(corpus):
    names, calls = {}, []
    exec(next(block for block in blocks("python") if "class Wrapped" in block), names)
    library = SimpleNamespace(
        token_to_id=lambda name: BOS, no_truncation=lambda: calls.append(1),
        no_padding=lambda: calls.append(2), encode_batch=lambda texts, add_special_tokens: [
            SimpleNamespace(ids=[*text.encode()]) for text in texts])
    wrapped = names["Wrapped"](library, "<s>")
    assert run(corpus, steps=20, tokenizer=wrapped)[0] == run(corpus, steps=20, tokenizer=ByteTokenizer())[0]
    assert sorted(calls) == [1, 2]


def test_readme_is_short_and_what_it_links_to_is_there():
    assert README.count("\n") <= 285 and not re.search(r"TODO|@[A-Z]+@", README)
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (HERE / target).exists(), target


def test_files_copied_into_a_package_import_each_other(tmp_path):
    """... and no import but those of each other has changed, and no other file."""
    package = tmp_path / "mine" / "data"
    package.mkdir(parents=True)
    for name in ("dataloader", "dataset", "tokenizer"):
        shutil.copy(HERE / f"{name}.py", package)
        with open(package / f"{name}.py", "a") as file:
            file.write("import dataclasses\nimport datetime\n")
    (package / "other.py").write_text("import dataset\n")
    subprocess.run(re.search(r"^sed -i (.*\\\n)*.*", README, re.M)[0], shell=True, check=True, cwd=package)
    subprocess.run([sys.executable, "-c", "import mine.data.dataloader"], check=True, cwd=tmp_path)
    assert (package / "other.py").read_text() == "import dataset\n"


def test_nanogpts_tokens_become_shards(corpus, tmp_path, monkeypatch):
    """dev/loops.md: each document of train.bin once, with its end mark in front."""
    monkeypatch.chdir(tmp_path)
    RustBPETokenizer.train_from_iterator(["some text"], 265).save("my_tokenizer")
    tokenizer = RustBPETokenizer.from_directory("my_tokenizer")
    documents = [tokenizer.encode(f"document {i}") for i in range(3000)]
    bos = tokenizer.get_bos_token_id()
    for name, part in (("train", documents[:2900]), ("val", documents[2900:])):
        np.array([id for ids in part for id in (*ids, bos)], np.uint16).tofile(f"{name}.bin")
    text = (HERE / "dev" / "loops.md").read_text()
    exec(re.search(r"train.bin.*?```python\n(.*?)```", text, re.S)[1], {})
    for split, part in (("train", documents[:2900]), ("val", documents[2900:])):
        [shard] = list_shards("my_gpt", split)
        seen = [np.frombuffer(raw, shard.dtype).tolist() for group in range(-(-len(part) // 1024))
                for raw in shard.read(group).to_pylist()]
        assert seen == [[bos, *ids] for ids in part]
    assert next(make("my_gpt", tokenizer=tokenizer, num_lanes=1))


def test_tests_work_without_dev_and_say_what_they_skip(tmp_path):
    """As the README says: the four files and test_dataloader.py are enough. Arguments go to pytest."""
    for name in ("dataloader", "dataset", "tokenizer", "train", "test_dataloader"):
        shutil.copy(HERE / f"{name}.py", tmp_path)
    command = [sys.executable, tmp_path / "test_dataloader.py", "--all", "-n0", "-k", "reference or fit_is"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd="/")
    assert ended.returncode == 0, ended.stdout
    for words in ("dev/tests is not here", "dev/reference.py is not here", "slowest 10", "passed"):
        assert words in ended.stdout
