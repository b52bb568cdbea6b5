"""
Runs the files of dev/recipes/ as a reader does, in a folder with the three files of the loader.

Each loop prints its loss. It is run undisturbed, in one process. Then ranks are killed in their
saves, and the same command resumes, also on another number of ranks. The losses must be those of
the first run: they show if model, optimizer or rows are not.
"""

import contextlib
import io
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import shutil
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

HERE = Path(__file__).parents[2]
RECIPES = HERE / "dev/recipes"

# --------------------------------------------------------------------------------------------------
# One harness for all loops

@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """Has the three files, shards of short documents, and the base directory of all recipes."""
    folder = tmp_path_factory.mktemp("project")
    write_corpus(folder / "my_shards")
    return folder

WORDS = (HERE / "dataloader.py").read_text().split()

def write_corpus(folder):
    texts = [" ".join(WORDS[i:i + 1 + i * i % 61]) for i in range(0, len(WORDS), 4)]
    write(folder / "train-0.parquet", text=texts[::2])
    write(folder / "train-1.parquet", text=texts[1::2])
    write(folder / "val.parquet", text=texts[:40])

def write(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=100)

def texts_of(path="my_shards/train-0.parquet"):
    return pq.read_table(path)["text"].to_pylist()

@pytest.fixture
def folder(project, tmp_path, monkeypatch):
    files = [HERE / f"{name}.py" for name in ("dataset", "dataloader", "tokenizer")]
    for path in [*project.iterdir(), *files]:
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path

def be_a_rank(recipe, rank, world_size, port, log, kill, base_dir, masked_step):
    """kill: (the rank, a part of a file's name, how many times it is written)"""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    os.environ["NANOLOADER_BASE_DIR"] = base_dir
    if world_size > 1:    # as torchrun does
        os.environ |= {
            "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_RANK": f"{rank}",
            "LOCAL_WORLD_SIZE": f"{world_size}", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
            "COORDINATOR": f"127.0.0.1:{port}"}    # for JAX
    torch.set_num_threads(1)    # OpenMP hangs in a forked process
    if kill and kill[0] == rank:
        kill_in_a_write(*kill[1:], log)
    sys.path[:] = [path for path in sys.path if path not in ("", str(HERE))]
    sys.argv = [recipe, "my_shards"]
    if masked_step:
        mask(masked_step)
    runpy.run_path(recipe, run_name="__main__")

def mask(step):
    """In this step, no target counts."""
    sys.path.insert(0, ".")
    from dataloader import PackedLoader
    following, steps = PackedLoader.__next__, itertools.count(1)

    def next_masked(loader):
        inputs, targets = following(loader)
        return inputs, torch.full_like(targets, -100) if next(steps) == step else targets

    PackedLoader.__next__ = next_masked

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def kill_in_a_write(name, count, log):
    torch_save = torch.save

    def audited_save(what, file, *args, **kwargs):    # torch opens a file without telling Python
        sys.audit("torch.save", file)
        torch_save(what, file, *args, **kwargs)

    def hear(event, arguments):
        nonlocal count
        is_open = event == "open" and (arguments[2] or 0) & WRITES
        if (is_open or event in ("os.mkdir", "os.rename", "torch.save")) and name in f"{arguments}":
            count -= 1
            if count == 0:
                Path(f"{log}-killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    torch.save = audited_save
    sys.addaudithook(hear)

# Forks of a process that has only imported these: after a backward, here, torch forbids a fork.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "tiktoken", "pyarrow.parquet", "huggingface_hub",
                               "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])

def run(recipe, world_size, log, kill=None, masked_step=None):
    """The losses that it printed, {step: loss}"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        _, port = free.getsockname()
    processes = []
    for rank in range(world_size):
        base_dir = f"{Path('base').resolve()}"
        arguments = f"{RECIPES / recipe}", rank, world_size, port, log, kill, base_dir, masked_step
        processes.append(SERVER.Process(target=be_a_rank, args=arguments))
        processes[-1].start()
    sentinels = [process.sentinel for process in processes]
    while sentinels:
        ended = multiprocessing.connection.wait(sentinels, 100)
        assert ended, Path(log).read_text()[-5000:]
        sentinels = [sentinel for sentinel in sentinels if sentinel not in ended]
        if any(process.exitcode for process in processes):    # as torchrun does
            for process in processes:
                process.kill()
    text = Path(log).read_text()
    assert kill or not any(process.exitcode for process in processes), text[-5000:]
    assert not kill or Path(f"{log}-killed").exists(), text[-5000:]
    printed = re.findall(r"step (\d+): .*loss (\S+)", text)
    return {int(step): float(loss) for step, loss in printed}

@pytest.fixture(scope="session")
def losses_of(project):
    """By recipe, those of a run that never stopped. Most train the same model."""
    return {}

@pytest.mark.parametrize("recipe, module, undisturbed, kill, world_size", [
    ("ddp.py", "torch", "ddp.py", (0, "ddp.pt.new", 3), 1),
    ("fsdp2.py", "torch", "ddp.py", (1, "fsdp2/20", 1), 1),
    ("tensor_parallel.py", "torch", "ddp.py", (1, "tensor_parallel/20", 1), 2),
    ("with_accelerate.py", "accelerate", "ddp.py", (0, "20/loader.json", 1), 1),
    ("with_lightning.py", "lightning", "ddp.py", (0, "step=20.ckpt", 1), 1),
    ("with_transformers.py", "transformers", "with_transformers.py", (1, "checkpoint-20", 1), 1),
    ("with_jax.py", "jax", "with_jax.py", (0, "20/params.pkl", 1), 1)])
def test_loop_killed_in_a_save_resumes(
        folder, losses_of, recipe, module, undisturbed, kill, world_size):
    """Two ranks, of which one is killed in its second save. world_size: of the run that resumes"""
    pytest.importorskip(module)
    if undisturbed not in losses_of:
        losses_of[undisturbed] = run(undisturbed, 1, "undisturbed")
        for path in folder.glob(f"{Path(undisturbed).stem}*"):
            path.rename(f"of-{path.name}")
    want = losses_of[undisturbed]
    assert [*want] == [*range(1, 41)]
    assert run(recipe, 2, "log-1", kill) == close_to(want, range(1, 21))
    assert run(recipe, world_size, "log-2") == close_to(want, range(11, 41))

def close_to(losses, steps):
    return pytest.approx({step: losses[step] for step in steps}, rel=1e-3)

@pytest.mark.parametrize("recipe, module", [
    ("ddp.py", "torch"),
    ("fsdp2.py", "torch"),
    ("tensor_parallel.py", "torch"),
    ("validation.py", "torch"),
    ("with_accelerate.py", "accelerate"),
    ("with_lightning.py", "lightning")])
def test_a_step_without_targets_does_not_spoil_the_weights(folder, recipe, module):
    """Such as one of chats whose questions fill the rows."""
    pytest.importorskip(module)
    world_size = 2 if recipe == "tensor_parallel.py" else 1    # it takes no fewer
    losses = run(recipe, world_size, "log", masked_step=3)
    assert len(losses) > 1
    assert all(map(math.isfinite, losses.values())), losses

def test_lightning_resumes_the_newest_checkpoint_of_a_copied_folder(folder):
    """A copy can have any times."""
    pytest.importorskip("lightning")
    run("with_lightning.py", 1, "log")
    [checkpoints] = {path.parent for path in Path().glob("*/*.ckpt")}
    for age, path in enumerate(sorted(checkpoints.glob("*.ckpt"))):    # step=10, step=20, ...
        os.utime(path, (1000 - age, 1000 - age))
    assert run("with_lightning.py", 1, "again") == {}, "no step is left"

def test_validation_is_the_same_on_any_number_of_ranks(folder):
    one, two = (run("validation.py", n, f"log-{n}") for n in (1, 2))
    assert [*one] == [20, 40] and one[20] > one[40]
    assert two == close_to(one, one)

def test_torchtitan_resumes_on_a_different_number_of_ranks(folder, type_in):
    """From the merged states of two. Positions begin again at each document."""
    pytest.importorskip("torchtitan")
    from dataloader import merge_states
    tokenizer = train_tokenizer("my_tokenizer")
    names, _ = type_in("with_torchtitan.py", "my_shards", "my_tokenizer")
    build = names["Packed"].Config(dataset_path="my_shards").build
    options = {"seq_len": 16, "tokenizer": None, "snapshot_every_n_steps": 1}
    two = [build(dp_world_size=2, dp_rank=rank, local_batch_size=2, **options) for rank in range(2)]
    alone = build(dp_world_size=1, dp_rank=0, local_batch_size=4, **options)
    next(iter(alone))
    for packed in two:
        batch, labels = next(iter(packed))
        assert labels.shape == (2, 16)
        begins = batch["input"] == tokenizer.get_bos_token_id()
        begins[:, 0] = True
        assert torch.equal(batch["positions"] == 0, begins)
        assert (batch["positions"].diff()[~begins[:, 1:]] == 1).all()
    resumed = build(dp_world_size=1, dp_rank=0, local_batch_size=4, **options)
    resumed.load_state_dict(merge_states([packed.state_dict() for packed in two]))
    assert torch.equal(next(iter(resumed))[1], next(iter(alone))[1])

# --------------------------------------------------------------------------------------------------
# Recipes about data: run in this process

@pytest.fixture
def type_in(folder, monkeypatch):
    """recipe, arguments -> (its names, what it printed)"""
    monkeypatch.setenv("NANOLOADER_BASE_DIR", "base")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_recipe(recipe, *arguments):
        monkeypatch.setattr(sys, "argv", [recipe, *arguments])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            names = runpy.run_path(f"{RECIPES / recipe}", run_name="__main__")
        return names, printed.getvalue()

    return run_recipe

def train_tokenizer(folder):
    from tokenizer import RustBPETokenizer
    tokenizer = RustBPETokenizer.train_from_iterator(texts_of(), 400)
    tokenizer.save(folder)
    return tokenizer

def spans_of_documents(row, bos):
    """[(begin, end)]; the BOS at the end of a short row are one document."""
    text = "".join("|" if token == bos else "x" for token in row)
    return [found.span() for found in re.finditer(r"^[^|]+|\|+[^|]*", text)]

@pytest.mark.parametrize("packing", ["flat", "bestfit", "exactfit", "wholefit"])
def test_attention_stays_within_documents(type_in, packing, monkeypatch):
    """Dense, flex, and document by document, as varlen_attn does on a GPU."""
    flex_module = "torch.nn.attention.flex_attention"
    monkeypatch.setattr(f"{flex_module}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    names, printed = type_in("attention.py", "my_shards")
    assert re.search(r"differ by at most (\d.\de-0[6-9]|0)", printed)
    tokenizer, T = names["tokenizer"], 16
    bos = tokenizer.get_bos_token_id()
    from dataloader import PackedLoader
    loader = PackedLoader(
        tokenizer, 6, T, "val", data_dir="my_shards", packing=packing, epochs=1)
    first, *_, last = loader
    for inputs, _ in first, last:
        q, k, v = torch.randn(3, 6, 2, T, 8)
        document = names["number_documents"](inputs, bos)
        dense = names["dense_attention"](q, k, v, document)
        torch.testing.assert_close(names["masked_flex_attention"](q, k, v, document), dense)
        lengths = []
        for b, row in enumerate(inputs.tolist()):
            for begin, end in spans_of_documents(row, bos):
                alone = [x[b, :, begin:end] for x in (q, k, v)]
                want = F.scaled_dot_product_attention(*alone, is_causal=True)
                torch.testing.assert_close(dense[b, :, begin:end], want)
                lengths.append(end - begin)
        cu_seqlens, positions = names["bounds_and_positions"](document, 96)
        n_unused = 96 - len(lengths)
        assert cu_seqlens.diff().tolist() == lengths + n_unused * [0]
        assert positions.tolist() == [*itertools.chain(*map(range, lengths))]
    with pytest.raises(AssertionError, match="raise most_documents"):
        names["bounds_and_positions"](document, 5)

def test_context_parallel_parts_have_early_and_late_tokens():
    page = (RECIPES / "README.md").read_text()
    names = {}
    exec(re.search(r"def part_of.*?(?=```)", page, re.DOTALL)[0], names)
    rows = torch.arange(8).expand(3, 8)
    assert names["part_of"](rows, 0, 2).tolist() == 3 * [[0, 1, 6, 7]]
    assert names["part_of"](rows, 1, 2).tolist() == 3 * [[2, 3, 4, 5]]

def test_wrapped_tokenizer_gives_all_its_tokens(type_in):
    """Its file may cut texts and fill them up."""
    library = pytest.importorskip("tokenizers")
    theirs = library.ByteLevelBPETokenizer()
    theirs.train_from_iterator(texts_of(), 500, special_tokens=["<s>"], show_progress=False)
    theirs.enable_truncation(64)
    theirs.enable_padding(length=64)
    theirs.save("tokenizer.json")
    names, printed = type_in("own_tokenizer.py", "tokenizer.json", "<s>", "my_shards")
    assert names["inputs"][0, 0] == 0 and printed.startswith("<s>")
    text = " ".join(texts_of())
    [ids] = names["tokenizer"].encode([text], prepend=0)
    theirs.no_truncation()
    assert ids == [0, *theirs.encode(text).ids] and len(ids) > 800

def test_loss_weights_are_those_of_the_documents(type_in):
    texts = [" ".join(WORDS[i:i + 9]) for i in range(2000)]
    scores = [i % 4 / 4 + 0.25 for i in range(2000)]
    write(Path("scored/train.parquet"), text=texts, score=scores)
    write(Path("scored/val.parquet"), text=texts[:9], score=scores[:9])
    names, printed = type_in("loss_weights.py", "scored")
    assert printed.count("weighted loss") == 10
    want = torch.zeros(4, 129)
    for row, pieces in enumerate(names["loader"].pieces()):
        for piece in pieces:
            end = piece.offset + piece.stop - piece.start
            want[row, piece.offset:end] = scores[piece.location.row]
    want[:, 1:][names["targets"] < 0] = 0
    assert torch.equal(names["weights"], want[:, 1:])

def test_fill_in_the_middle_depends_on_the_document_and_the_epoch(type_in):
    """It is the same for a folder that has moved, and loses no token."""
    from dataset import Location
    names, printed = type_in("fill_in_the_middle.py", "my_shards")
    assert "<|bos|>" in printed    # which documents are in the first row depends on the text
    transform, n_changed, n_new = names["fill_in_the_middle"], 0, 0
    ids = np.arange(20)
    marks = [names[name] for name in ("fim_start", "fim_end", "fim_middle")]
    for i in range(100):
        location = Location("my_shards/a.parquet", 0, i, "a.parquet")
        changed = transform(ids, location, 1)
        moved = location._replace(path="/moved/a.parquet")
        assert np.array_equal(changed, transform(ids, moved, 1))
        n_new += not np.array_equal(changed, transform(ids, location, 2))
        if len(changed) > len(ids):
            n_changed += 1
            cuts = np.flatnonzero(np.isin(changed, marks))
            bos, (_, *start), (_, *end), (_, *middle) = np.split(changed, cuts)
            assert np.array_equal(ids, [*bos, *start, *middle, *end])
    assert 30 < n_changed < 70 < n_new

CHAT = """[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]"""

def test_only_the_last_answer_is_trained_on(type_in):
    for name in ("train", "val"):
        write(Path(f"my_chats/{name}.parquet"), messages=200 * [CHAT])
    names, printed = type_in("last_answer.py", "my_chats")
    assert printed.count("Yo<|assistant_end|>") > 1
    _, _, trained = printed.partition("trained: ")
    assert {*trained.strip().split("<|assistant_end|>")} == {"So long", ""}
    # ChatML: a masked line end, here ~5, follows each answer.
    first, last = [1, ~2, 6, 7, ~5, ~2], [6, 6, 7, ~5]
    found = names["last_answer"](np.array(first + last), None, 1)
    assert found.tolist() == [~1, ~2, ~6, ~7, ~5, ~2, *last]

def test_a_second_source_comes_in_late(type_in):
    Path("my_json").mkdir()
    for name in ("train-0", "val"):
        shutil.copy(f"my_shards/{name}.parquet", "my_json")
    names, printed = type_in("changing_weights.py", "my_shards", "my_json")
    weights = [names["late"](row) for row in (0, 1000, 5500, 10_000)]
    assert weights == [0, 0, 0.5, 1]
    first, _, third, *_, last = map(int, re.findall(r": (\d+)% ", printed))
    assert first < 15 < third < last
    assert 45 <= last <= 55

@pytest.mark.parametrize("kind", ["nanogpt", "llm.c"])
def test_token_files_become_shards(type_in, kind):
    """Each document once, with its BOS in front."""
    from dataset import list_shards
    tokenizer = train_tokenizer("my_tokenizer")
    bos = tokenizer.get_bos_token_id()
    documents = [tokenizer.encode(f"document {i}") for i in range(2500)]
    parts = {"train": documents[:2400], "val": documents[2400:]}
    for split, part in parts.items():
        header, ids = b"", [[*document, bos] for document in part]
        if kind == "llm.c":
            header, ids = 1024 * b"\1", [[bos, *document] for document in part]
        Path(f"{split}.bin").write_bytes(header + np.concatenate(ids).astype(np.uint16).tobytes())
    type_in("token_files.py", kind, "my_tokenizer", "my_tokens", "train.bin", "val.bin")
    for split, part in parts.items():
        [shard] = list_shards("my_tokens", split)
        raw = pq.read_table(shard.path)["tokens"].to_pylist()
        found = [np.frombuffer(document, shard.dtype).tolist() for document in raw]
        assert found == [[bos, *document] for document in part]
        assert sum(shard.group_bytes) == 4 * sum(map(len, found))

def test_tiny_shakespeare_is_cut_at_blank_lines(type_in):
    text = "".join(f"Speaker {i}:\n{40 * 'word '}\n\n" for i in range(100))
    Path("input.txt").write_text(text)
    type_in("shakespeare.py", "input.txt", "shakespeare")
    train, val = (texts_of(f"shakespeare/{split}.parquet") for split in ("train", "val"))
    assert all(2000 < len(document) < 2500 for document in train[:-1])
    assert "".join(train + val) == text and train[0].endswith("\n\n")
