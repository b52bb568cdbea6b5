"""
Machines as they are: no home folder, few cores or threads, folders that cannot be written to, and
commands in errors that must work where the user is.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

import dataset
from dataset import UserError
from dev.tests.cases import is_like, read_cases
from test_dataloader import HERE, write


def run(code, **env):
    """Run Python code in a process. -> (exit status, what it printed)"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(HERE), **env},
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr

# --------------------------------------------------------------------------------------------------
# Paths that begin with ~

@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder is tmp_path/home, the current folder tmp_path/here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    assert not os.listdir("."), "something was written beside, such as a folder named ~"

def test_a_path_with_a_tilde_is_in_the_home_folder(home, monkeypatch):
    """Shells expand --out ~/a, but neither --out=~/a nor a variable in a file."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", "~/base")
    assert dataset.get_base_dir() == f"{home}/base"
    monkeypatch.delenv("NANOLOADER_BASE_DIR")
    assert dataset.get_base_dir() == f"{home}/.cache/nanoloader"
    assert dataset.local_folder("~/a/") == dataset.folder_name("~/./a") == f"{home}/a"
    assert dataset.folder_name("s3://~/a") == "s3://~/a"
    assert dataset.folder_name("a~/~b") == "a~/~b"

def test_tools_read_and_write_in_the_home_folder(home):
    from dev import convert, import_tokenizer, prepare, runs
    from tokenizer import RustBPETokenizer, find_tokenizer, get_tokenizer
    home.mkdir()
    (home / "a.txt").write_text("one\n\ntwo\n\n" * 9)
    convert.main(["~/a.txt", "--cut_bytes", "9", "--out=~/text"])
    RustBPETokenizer.train_from_iterator(["x"], 265).save("~/tokenizer")
    assert get_tokenizer("~/tokenizer").get_vocab_size() == 265
    assert find_tokenizer("~/tokenizer", [], 1)[1] == f"{home}/tokenizer"
    prepare.main(["tokenize", "--data=~/text", "--tokenizer=~/tokenizer", "--out=~/tokens"])
    dataset.main(["index", "~/tokens"])
    assert [*map(str, sorted(home.glob("t*/index.json")))] == [
        f"{home}/text/index.json", f"{home}/tokens/index.json"]
    for tool, words in ((import_tokenizer, ["~/b.json", "--out=~/b"]), (runs, ["losses", "~/run"])):
        with pytest.raises(SystemExit, match=str(home)):
            tool.main(words)

def test_without_a_home_folder_a_tilde_is_an_error():
    """As for a container's user without a line in /etc/passwd."""
    with mock.patch("os.path.expanduser", lambda path: path):
        for path in ("~", "~/a", "~nobody/a"):
            with pytest.raises(UserError, match=f"^{path}: no home folder is known"):
                dataset.folder_name(path)
        with pytest.raises(SystemExit) as ended:
            dataset.main(["-n", "1", "--out", "~/a"])
        assert ended.value.code == 2

# --------------------------------------------------------------------------------------------------
# Cores and threads

@pytest.mark.parametrize("_, machine, lines", read_cases("cores.txt"))
def test_cores_are_those_that_this_process_may_use(tmp_path, monkeypatch, _, machine, lines):
    machine = json.loads(machine)
    affinity, ranks = machine.pop("affinity", None), machine.pop("ranks", "1")
    for name, text in machine.items():
        path = Path(f"{tmp_path}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity), raising=False)
    quota = dataset.cgroup_quota(str(tmp_path))
    monkeypatch.setattr(dataset, "cgroup_quota", lambda: quota)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    n, limit = dataset.cores_and_limit()
    assert [f"{n}: {limit}"] == lines
    assert dataset.cores() == n

@pytest.mark.parametrize("n_files, n_threads", [(1, 1), (40, 32)])
def test_footers_are_read_by_as_many_threads_as_there_are_files(tmp_path, n_files, n_threads):
    for i in range(n_files):
        dataset.write_shard(f"{tmp_path}/{i}.parquet", [pa.array(["a"])])
    with mock.patch.object(dataset, "ThreadPool", wraps=dataset.ThreadPool) as pool:
        dataset.all_shards(str(tmp_path))
    pool.assert_called_once_with(n_threads)

@pytest.mark.parametrize("n_started", [0, 2])
def test_a_limit_of_threads_is_one_line(tmp_path, n_started):
    write(tmp_path, [["a"]], [["b"]])
    code = f"""if True:
        import dataset, threading
        start, started = threading.Thread.start, []
        def start_some(thread):
            started.append(thread)
            if len(started) > {n_started}:
                raise RuntimeError("can't start new thread")
            start(thread)
        threading.Thread.start = start_some
        with dataset.errors_in_one_line():
            dataset.list_shards({str(tmp_path)!r}, "train")
    """
    status, printed = run(code)
    assert status == 1
    assert printed.startswith("error: the system allows no more threads") and printed.count("\n") == 1

# --------------------------------------------------------------------------------------------------
# Commands in errors

@pytest.mark.parametrize("where, words, lines", read_cases("commands.txt"))
def test_commands_work_where_they_are_typed(tmp_path, monkeypatch, where, words, lines):
    code = HERE
    if where == "copied":
        code = tmp_path / "my project"
        code.mkdir()
        for name in ("dataset.py", "dataloader.py", "tokenizer.py"):
            shutil.copy(HERE / name, code)
    monkeypatch.chdir(tmp_path if where == "elsewhere" else code)
    status, printed = run(f"import dataset; print(dataset.{words})", PYTHONPATH=str(code))
    assert status == 0, printed
    want = lines[0].replace("CODE", str(HERE)).replace("HERE", os.getcwd())
    assert is_like(printed.strip(), [want])

@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_command_of_an_error_mends_the_folder(tmp_path, monkeypatch, where):
    """A shard was added beside an index. The error's command is typed as it stands."""
    monkeypatch.chdir(HERE if where == "here" else tmp_path)
    folder = os.path.relpath(tmp_path / "it's my data")
    write(folder, [["a"]])
    dataset.write_index(folder)
    dataset.write_shard(f"{folder}/train-1.parquet", [pa.array(["b"])])
    with pytest.raises(UserError) as error:
        dataset.all_shards(folder)
    command = str(error.value).partition("run: ")[2]
    command = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(command, shell=True, check=True)
    assert len(dataset.all_shards(folder)) == 3

@pytest.mark.parametrize("name", ["a b", "it's", "a\nb", os.fsdecode(b"caf\xe9"), "\xe9\u6f22"])
def test_names_are_quoted_for_a_shell(tmp_path, name):
    path = f"{tmp_path}/{name}"
    os.makedirs(path)
    quoted = dataset.quote(path)
    quoted.encode()
    assert "\n" not in quoted
    subprocess.run(["bash", "-c", f"test -d {quoted}"], check=True)

def test_a_folder_that_cannot_be_written_to_needs_another_user(tmp_path):
    command = dataset.index_command(str(tmp_path))
    with mock.patch("os.access", lambda *_: False):
        assert dataset.index_command(str(tmp_path)) == f"{command} (as a user who may write there)"

@pytest.mark.parametrize("what", ["corpus", "tokenizer"])
def test_a_damaged_cache_is_removed_and_made_again(tmp_path, monkeypatch, what):
    """By the command in the error."""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(dataset, "read_standard_library", lambda: [f"def f{i}(): pass\n" for i in range(90)])
    from tokenizer import find_tokenizer

    def use():
        folder = dataset.find_data()
        shards = dataset.list_shards(folder, "train")
        for i in range(16):
            shards[0].read(i)
        _, tokenizer_dir = find_tokenizer(None, [folder], 300)
        return shards[0].path, f"{tokenizer_dir}/tokenizer.tiktoken"
    path = use()[["corpus", "tokenizer"].index(what)]
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"\0" * min(200, size // 4))
    with pytest.raises(UserError, match=r"again: rm -r \S+") as error:
        use()
    subprocess.run(str(error.value).partition("again: ")[2], shell=True, check=True)
    assert use()
