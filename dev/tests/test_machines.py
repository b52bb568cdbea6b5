"""
Machines as they are: no home folder, few cores or threads, folders that cannot be written to, and
commands in errors that must work where the user is.
"""

import math
import os
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import pyarrow as pa
import pytest

import dataset
from dataset import UserError
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

CGROUPS = [    # /proc/self/cgroup, files, quota
    ("0::/\n", {"/cpu.max": "800000 100000\n"}, 8),              # a container
    ("0::/a/b\n", {"/a/b/cpu.max": "max 100000\n"}, math.inf),
    ("0::/a/b\n", {"/a/b/cpu.max": "max 100000\n", "/a/cpu.max": "150000 100000\n"}, 1.5),
    ("0::/a/b\n", {"/a/b/cpu.max": "50000 100000\n", "/a/cpu.max": "150000 100000\n"}, 0.5),
    ("0::/a/b\n", {}, math.inf),
    ("4:cpu,cpuacct:/a\n3:memory:/b\n0::/c\n",                       # version 1
     {"/cpu/a/cpu.cfs_quota_us": "300000\n", "/cpu/a/cpu.cfs_period_us": "100000\n",
      "/cpu/b/cpu.cfs_quota_us": "100000\n", "/cpu/b/cpu.cfs_period_us": "100000\n"}, 3),
    ("4:cpuacct,cpu:/docker/x\n",                                    # in Docker, this folder is not seen
     {"/cpu/cpu.cfs_quota_us": "200000\n", "/cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ("4:cpu:/\n", {"/cpu/cpu.cfs_quota_us": "-1\n", "/cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    (None, {}, math.inf)]                                            # macOS

@pytest.mark.parametrize("groups, files, quota", CGROUPS)
def test_quota_is_the_smallest_of_the_groups_of_this_process(tmp_path, groups, files, quota):
    if groups:
        files = {f"/sys/fs/cgroup{name}": text for name, text in files.items()}
        files["/proc/self/cgroup"] = groups
    for name, text in files.items():
        path = tmp_path / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert dataset.cgroup_quota(str(tmp_path)) == quota

@pytest.mark.parametrize("count, affinity, quota, ranks, want", [
    (192, 192, math.inf, None, (192, "all cores")),
    (192, 12, math.inf, None, (12, "CPU affinity")),
    (192, 192, 8.0, None, (8, "cgroup quota")),
    (192, 4, 8.5, None, (4, "CPU affinity")),
    (192, 192, 2.5, "2", (1, "cgroup quota, 2 ranks")),
    (192, 192, 0.5, None, (1, "cgroup quota")),
    (192, None, math.inf, "8", (24, "all cores, 8 ranks"))])
def test_cores_are_those_that_this_process_may_use(monkeypatch, count, affinity, quota, ranks, want):
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(affinity), raising=False)
    monkeypatch.setattr(dataset, "cgroup_quota", lambda: quota)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert dataset.cores_and_limit() == want
    assert dataset.cores() == want[0]

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

@pytest.fixture(params=["here", "elsewhere", "copied"])
def place(request, tmp_path, monkeypatch):
    """The folder of dataset.py, another one, and that of a project with a copy of three files."""
    home = HERE
    if request.param == "copied":
        home = tmp_path / "my project"
        home.mkdir()
        for name in ("dataset.py", "dataloader.py", "tokenizer.py"):
            shutil.copy(HERE / name, home)
    monkeypatch.chdir(tmp_path if request.param == "elsewhere" else home)
    return request.param, home

def said(home, line):
    status, printed = run(f"import dataset; print(dataset.{line})", PYTHONPATH=str(home))
    assert status == 0, printed
    return printed.rstrip("\n")

def test_commands_work_where_they_are_typed(place, tmp_path):
    where, home = place
    here = os.getcwd()
    index = said(home, "command('dataset.py index', 'my data')")
    verify = said(home, "command('dev.prepare verify --data', 'my data')")
    remote = said(home, "command('dev.prepare verify --data', 's3://a/b')")
    page = said(home, "page('README.md')")
    if where == "here":
        assert index == "python dataset.py index 'my data'"
        assert verify == "python -m dev.prepare verify --data 'my data'"
        assert page == "README.md"
    elif where == "elsewhere":
        assert index == f"python {HERE}/dataset.py index 'my data'"
        assert verify == f"cd {HERE} && python -m dev.prepare verify --data '{here}/my data'"
        assert os.path.samefile(page, HERE / "README.md")
    else:
        assert index == "python dataset.py index 'my data'"
        assert verify == f"cd CLONE_OF_NANOLOADER && python -m dev.prepare verify --data '{here}/my data'"
        assert page == "README.md in a clone of nanoloader"
    assert remote.endswith(" s3://a/b")

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
