"""
What README.md and dev/train.md say to type works: the commands at toy size, in their order, then
README's Python.

A block after a comment `<!-- not run: why -->` is skipped, and so is a line that does not begin
with `python`. Commands run in this process, as `python` would run them: importing torch for each
would take a minute.
"""

import contextlib
import csv
import gzip
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

import dataloader
import dataset
import tokenizer
from dataloader import PackedLoader
from dev.tests.test_train import own_signals  # noqa: F401, a fixture
from test_dataloader import HERE

README = (HERE / "README.md").read_text(encoding="utf-8")
TRAIN = (HERE / "dev/train.md").read_text(encoding="utf-8")
RECIPES = (HERE / "dev/recipes/README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "dev/recipes/README.md", "dev/recipes/forms.md", "dev/loops.md",
         "dev/train.md", "dev/log.md", "dev/gpu.md"]
TOY = ["--steps", "2", "--seq_len", "64", "--eval_bytes", "2000"]
ANSWERS = {"--sample", "--chat"}

# runpy warns: dev.prepare has imported dev.convert before it is run again.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")

def blocks(page, language=""):
    found = re.findall(r"(<!-- not run: [^\n]*\n)?```(\w*)\n(.*?)```", page, re.DOTALL)
    return [code for skipped, seen, code in found if seen == language and not skipped]

def commands():
    """Yield the words after `python`, at toy size."""
    for line in "".join(blocks(README) + blocks(TRAIN)).splitlines():
        if line.startswith("python "):
            line = re.sub(r"step_\d+", "step_0000002", line)
            line = re.sub(r"--steps \d+:\d+", "--steps 0:2", line)
            _, *words = shlex.split(line, comments=True)
            if words[0] == "train.py":
                words += ["--device", "cpu"]
                if ANSWERS.isdisjoint(words) and "--eval" not in words:
                    words += TOY
                    if {"--resume", "--init"}.isdisjoint(words):
                        words += ["--depth", "1"]
            yield words

def is_about_runs(words):
    return "train.py" in words or "dev.runs" in words

def type_in(folder, words):
    """-> what the command printed"""
    printed = io.StringIO()
    is_module = words[0] == "-m"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", words[1:] if is_module else words)
        try:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(HERE / words[0]), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, (words, ended.code)
    return printed.getvalue()

@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with data as README's reader has it, where the commands for data were typed."""
    folder = tmp_path_factory.mktemp("reader")
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.py")))
    texts = [text for text in code.split("\n\n") if text]
    (folder / "input.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (folder / "my/nested").mkdir(parents=True)
    for path in ("my/1.jsonl.gz", "my/nested/2.jsonl.gz"):
        with gzip.open(folder / path, "wt") as file:
            for text in texts:
                print(json.dumps({"data": {"text": f"{path} {text}"}}), file=file)
    with open(folder / "rated.csv", "w", newline="", encoding="utf-8") as file:
        rows = [(text, len(text)) for text in texts]
        csv.writer(file).writerows([("text", "score"), *rows])
    with open(folder / "chats.jsonl", "w") as file:
        for text in texts:
            messages = [{"role": "user", "content": text[:100]},
                        {"role": "assistant", "content": text}]
            print(json.dumps({"messages": messages}), file=file)
    for words in commands():
        if not is_about_runs(words):
            assert type_in(folder, words), words
    return folder

def test_commands_about_runs_work_in_their_order(reader):
    typed = [words for words in commands() if is_about_runs(words)]
    for words in typed:
        printed = type_in(reader, words)
        if "train.py" in words and ANSWERS.isdisjoint(words):
            assert "bits per byte" in printed, words
        else:
            assert printed, words
    assert len(typed) > 10

def test_python_works_after_the_commands(reader, monkeypatch):
    """All blocks share one namespace."""
    monkeypatch.chdir(reader)
    names = {}
    for code in blocks(README, "python"):
        exec(compile(code, "README.md", "exec"), names)
    assert names["loss"] > 0
    assert names["state"]["rows"] == 11 * 4, "after the first batch and ten steps"
    loaders = [value for value in names.values() if isinstance(value, PackedLoader)]
    for loader in loaders:
        next(loader)
        loader.close()
    assert len(loaders) == 3

def test_calls_in_the_table_of_the_api_exist():
    section = README.partition("## The API on one screen")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    calls = re.findall(r"`(\.?\w+)(?=[(`])", "\n".join(cells))
    for call in calls:
        owners = [PackedLoader] if call[0] == "." else [dataloader, dataset, tokenizer]
        assert any(hasattr(owner, call.strip(".")) for owner in owners), call
    assert len(calls) > 15

def without_code(page):
    text = (HERE / page).read_text(encoding="utf-8")
    return re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)

def anchors_in(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", without_code(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]

@pytest.mark.parametrize("page", PAGES)
def test_what_pages_link_to_is_there(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", without_code(page)):
        path = (HERE / page).parent / target if target else HERE / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_in(path), anchor

def test_files_copied_into_a_package_import_each_other(tmp_path):
    """... and no import but those of each other has changed, and no other file."""
    package = tmp_path / "mine/data"
    package.mkdir(parents=True)
    for name in ("dataloader", "dataset", "tokenizer"):
        shutil.copy(HERE / f"{name}.py", package)
        with open(package / f"{name}.py", "a") as file:
            file.write("import dataclasses\nimport datetime\n")
    (package / "other.py").write_text("import dataset\n")
    sed = re.search(r"^sed -i (.*\\\n)*.*", RECIPES, re.MULTILINE)[0]
    subprocess.run(sed, shell=True, check=True, cwd=package)
    subprocess.run([sys.executable, "-c", "import mine.data.dataloader"], check=True, cwd=tmp_path)
    assert (package / "other.py").read_text() == "import dataset\n"

def test_tests_work_without_dev_and_say_what_they_skip(tmp_path):
    """The four files and test_dataloader.py are enough. Arguments go to pytest."""
    for name in ("dataloader", "dataset", "tokenizer", "train", "test_dataloader"):
        shutil.copy(HERE / f"{name}.py", tmp_path)
    command = [sys.executable, tmp_path / "test_dataloader.py", "--all", "-n0", "-k", "packings_of"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd="/")
    assert ended.returncode == 0, ended.stdout
    assert "dev/tests is not here" in ended.stdout and " passed" in ended.stdout
