"""
train.py --ledger, dev.bench losses and when, dev.prepare's plan: each document's tokens are counted
once, and found again where they were seen.

    python -m pytest dev/tests/test_ledger.py
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import train
from dataloader import PACKINGS, Location
from dev import bench, ledger, prepare
from test_dataloader import BOS, HERE, documents_in, grouped, ids_of, make, write_shards
from tokenizer import RustBPETokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two folders of 500 documents each and a tokenizer whose tokens are bytes."""
    folder, draw = tmp_path_factory.mktemp("ledger"), random.Random(0)
    for name, letters in (("a", "abcdefgh "), ("b", "stuvwxyz ")):
        texts = [f"{i} " + "".join(draw.choices(letters, k=draw.randint(1, 16))) for i in range(500)]
        texts[7] = texts[7] * 9    # longer than rows
        write_shards(folder / name, [grouped(texts[:250], [25] * 10), grouped(texts[250:], [25] * 10),
                                     [["val " + name]]])
    RustBPETokenizer.train_from_iterator(["x"], 265).save(str(folder / "tokenizer"))
    return folder


def flags_of(base, out):
    return (f"--data {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --out {base}/{out} "
            "--device cpu --depth 1 --seq_len 64 --batch_size 32 --steps 24 --save_every 6 --eval_every 200 "
            "--eval_rows 1 --num_lanes 4 --ledger").split()


def start_ranks(world, words):
    """train.py as `world` processes of one group."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
             "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], stdout=subprocess.DEVNULL,
                             env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)]


def last_step(run):
    return max((record.get("step", -1) for record in train.read_log(f"{run}/log.jsonl")), default=-1)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def alone(base):
    """
    A run of one process that is killed at step 15, in an epoch, and resumed from step 12; with a file that a
    rank wrote for a checkpoint which the others did not reach.
    """
    with pytest.MonkeyPatch.context() as patch:
        print_step = train.print_step

        def killed(flags, record, times):
            print_step(flags, record, times)
            if record["step"] == 15:
                raise Killed
        patch.setattr(train, "print_step", killed)
        with pytest.raises(Killed):
            train.main(flags_of(base, "alone"))
    shutil.copy(f"{base}/alone/ledger/step_0000006_rank_0000.parquet",
                f"{base}/alone/ledger/step_0000012_rank_0003.parquet")
    train.main(["--out", f"{base}/alone", "--resume", "auto"])
    return f"{base}/alone"


@pytest.fixture(scope="module")
def ranks(base):
    """The run by four ranks, kill -9 of all after step 8, resumed by two."""
    run = f"{base}/ranks"
    killed = start_ranks(4, flags_of(base, "ranks"))
    until = time.monotonic() + 200
    while last_step(run) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 8 <= last_step(run) < 23, "it ended before it was killed"
    assert [process.wait(200) for process in start_ranks(2, ["--out", run, "--resume", "auto"])] == [0] * 2
    return run


@pytest.mark.parametrize("name", ["alone", "ranks"])
def test_ledger_has_each_token_of_an_epoch_once_and_agrees_with_when(base, name, request):
    run = request.getfixturevalue(name)
    rows, documents = ledger.read_ledger(run), documents_in(f"{base}/a") | documents_in(f"{base}/b")
    places = {Location(*place) for place in documents}
    assert sorted({*rows["step"].to_pylist()}) == [*range(24)]
    seen, counts = {}, zip(*(rows[key].to_pylist() for key in ("tokens", "bytes")), strict=True)
    for (_, _, place, epoch, *piece), n in zip(ledger.seen_in(rows, places), counts, strict=True):
        seen.setdefault((epoch, place), []).append((*piece, *n))
    for place, text in documents.items():
        pieces = sorted(seen[1, place])
        assert [piece[0] for piece in pieces] == [0, *(piece[1] for piece in pieces[:-1])]
        assert pieces[-1][1] == len(text.encode()) + 1
        assert [sum(piece[k] for piece in pieces) for k in (2, 3)] == [len(text.encode())] * 2
    assert max(epoch for epoch, _ in seen) > 2, "two whole epochs"
    replayed = sorted(ledger.replay(ledger.newest_of(run), True, places))
    assert replayed == sorted(ledger.seen_in(rows, places)) and len(places) == 1000


def test_ledgers_of_one_and_several_ranks_are_equal(alone, ranks):
    one, other = ledger.read_ledger(alone), ledger.read_ledger(ranks)
    assert one.drop(["nats"]).equals(other.drop(["nats"]))
    assert np.allclose(one["nats"], other["nats"], rtol=1e-2, atol=0.05)


@pytest.mark.parametrize("packing", [*PACKINGS])
def test_rows_of_the_ledger_count_the_targets_of_each_piece(corpus, packing):
    """The targets at a piece's place are its document's tokens without BOS; nats: of the same places."""
    loader, masked = make(corpus, packing=packing, T=30, B=3, chunk_bytes=300), 0
    documents = documents_in(corpus)
    for step in range(20):
        g, (_, targets) = loader.position.g, next(loader)
        nats = np.arange(90.0).reshape(3, 30) * (targets.numpy() >= 0)
        rows = [*train.ledger_rows(step, g, loader.pieces(), targets.numpy(), nats, np.ones(300, int))]
        found = []
        for row in rows:
            place, n = (row["path"], row["row_group"], row["row"]), row["tokens"]
            ids = ids_of(documents[place])[max(row["start"], 1):row["stop"]]
            assert len(ids) - 1 <= n == row["bytes"] <= len(ids)    # the first token of a row is no target
            found += [(row["g"], token) for token in ids[len(ids) - n:]]
        want = [(g + b, token) for b, row in enumerate(targets.tolist()) for token in row if token >= 0]
        assert found == [one for one in want if one[1] != BOS]
        of_bos = sum(nats[b, j] for b, row in enumerate(targets.tolist()) for j in range(30) if row[j] == BOS)
        assert sum(row["nats"] for row in rows) == pytest.approx(nats.sum() - of_bos)
        masked += len(found) < len(want)
    assert masked, "no BOS was a target"


def test_when_prints_past_and_coming_steps(alone, base, capsys):
    """Of a checkpoint in the middle of the run, from the ledger and without it."""
    os.makedirs(f"{base}/middle/ledger")
    for name in ("step_0000018.pt", *(f"ledger/step_{n:07d}_rank_0000.parquet" for n in (0, 6, 12))):
        os.link(f"{alone}/{name}", f"{base}/middle/{name}")
    bench.main(["when", f"{base}/middle", "a/shard_00001.parquet:1:5"])    # as audit and losses print it
    printed = capsys.readouterr().out
    bench.main(["when", f"{base}/middle", "a/shard_00001.parquet:30"])
    lines, place = capsys.readouterr().out.splitlines(), Location(f"{base}/a/shard_00001.parquet", 1, 5)
    text, seen = documents_in(f"{base}/a")[place], [*ledger.seen_in(ledger.read_ledger(alone), {place})]
    want = [f"step {step}, row {g} of the run, epoch {epoch}{', to come' * (step >= 18)}: {place}, "
            f"tokens {start}-{stop - 1}: {text!r}" for step, g, _, epoch, start, stop in seen]
    assert printed.splitlines() == lines == [*want, f"{len(want)} pieces; documents in none: 0"]
    assert "to come" in want[-1] and "to come" not in want[0]
    os.remove(f"{base}/middle/ledger/step_0000000_rank_0000.parquet")
    bench.main(["when", f"{base}/middle", "--text", text])
    assert capsys.readouterr().out.splitlines() == lines
    bench.main(["when", f"{base}/middle", "shard_00001.parquet:0"])
    printed = capsys.readouterr().out
    assert f"{base}/a/" in printed and f"{base}/b/" in printed, "a file of this name in each folder"


def test_replay_packs_only_the_lanes_that_have_the_document(alone, monkeypatch):
    """Of the run as if it ended after step 3, in its first epoch, in which a document is in one lane."""
    saved, packed = ledger.newest_of(alone), set()
    saved["flags"]["steps"] = 3

    class Recorded(ledger.PackedLoader):
        def __next__(self):
            packed.add(self.rank)
            return super().__next__()
    monkeypatch.setattr(ledger, "PackedLoader", Recorded)
    rows = ledger.read_ledger(alone)
    places = {Location(*place) for place in zip(*(rows[key][:40].to_pylist() for key in Location._fields),
                                                strict=True)}
    for place in sorted(places)[:4]:
        packed.clear()
        seen = [*ledger.replay(saved, True, {place})]
        assert seen == [one for one in ledger.seen_in(rows, {place}) if one[0] < 3]
        assert packed == {g % 4 for _, g, *_ in seen}


def test_when_counts_the_documents_in_no_row(alone, monkeypatch):
    """As if the run had ended after its first rows."""
    rows = ledger.read_ledger(alone).slice(0, 40)
    monkeypatch.setattr(ledger, "read_ledger", lambda run, sources: rows)
    monkeypatch.setattr(ledger, "replay", lambda *_: [])
    n = len({*zip(*(rows[key].to_pylist() for key in Location._fields), strict=True)})
    *lines, last = ledger.when(alone, text=" ")
    assert len(lines) == 40 and last == f"40 pieces; documents in none: {1000 - n}"


def test_when_says_what_it_does_not_find(alone, base, capsys):
    for words in (["nosuch.parquet:0"], ["shard_00000.parquet:9999"], ["00000.parquet:0"], [],
                  ["--text", "no such words"]):
        with pytest.raises(SystemExit) as ended:
            bench.main(["when", alone, *words])
        assert "in the run; expected FILE[:GROUP]:ROW" in str(ended.value)


def test_ledger_of_data_that_moved_says_what_is_left_out(alone, base, tmp_path, capsys):
    """Its old paths are not the run's any more."""
    with ledger.loader_of(ledger.newest_of(alone), False) as loader:
        sources = {name: source for name, source in loader.sources.items() if name.endswith("/b")}
    kept = ledger.read_ledger(alone, sources)
    assert "left out: 2 files that the run no longer has (moved?), such as" in capsys.readouterr().out
    assert {*kept["path"].to_pylist()} == {f"{base}/b/shard_0000{i}.parquet" for i in range(2)}


def test_losses_of_a_ledger_that_begins_late(alone, base, capsys, monkeypatch):
    monkeypatch.setattr(ledger, "losses_of", lambda run, sources: [("a", 90, [0.0, 2.5, 1.0], [])])
    bench.main(["losses", alone])
    assert "2.500 bits per byte in the first 50 steps, 1.000 in the last" in capsys.readouterr().out


def test_losses_compare_a_document_with_the_same_steps(monkeypatch):
    """Documents of falling loss; 5 of 80 are harder and 5 easier than those beside them, but not than all."""
    draw = np.random.default_rng(0)
    step, n = np.repeat(np.arange(400), 4), 1600
    level = np.log(2) * (6 * np.exp(-step / 100) + 1)
    row = draw.permutation(n) % 80
    factor = np.where(row < 5, 1.5, np.where(row > 74, 0.5, 1))
    rows = {"step": step, "path": ["x"] * n, "row_group": np.zeros(n, int), "row": row, "tokens": [9] * n,
            "bytes": np.full(n, 50), "nats": 50 * level * factor * draw.uniform(0.9, 1.1, n)}
    sources = {name: SimpleNamespace(shards=[SimpleNamespace(path=name)]) for name in "xy"}
    monkeypatch.setattr(ledger, "read_ledger", lambda rows, sources: pa.table(rows))
    of_x, of_y = ledger.losses_of(rows, sources)
    name, n_tokens, usual, documents = of_x
    assert (name, n_tokens, len(usual)) == ("x", 9 * n, 8)
    assert usual == pytest.approx([level[step // 50 == k].mean() / np.log(2) for k in range(8)], rel=0.05)
    found = [place.row for *_, place in documents]
    assert {*found[:5]} == {75, 76, 77, 78, 79} and {*found[-5:]} == {0, 1, 2, 3, 4}
    assert all(n_bytes == 1000 for _, _, n_bytes, _ in documents)
    assert [bits for _, bits, *_ in documents] == pytest.approx([
        (rows["nats"][row == k].sum() / 1000 / np.log(2)) for k in found])
    assert of_y == ("y", 0, [0], []), "no row has it"
    [(*_, documents), _] = ledger.losses_of({**rows, "bytes": np.full(n, 9)}, sources)
    assert not documents, "too short to say"


def test_losses_print_the_tokens_of_each_source_and_documents_with_their_texts(alone, base, capsys):
    bench.main(["losses", alone])
    lines, rows = capsys.readouterr().out.splitlines(), ledger.read_ledger(alone)
    assert len(lines) == 6, "of each source, document 7 has 200 bytes"
    for name, line, _, document in zip("ab", lines[::3], lines[1::3], lines[2::3], strict=True):
        found = re.fullmatch(rf"{base}/{name}: ([\d,]+) tokens, (\d\.\d+) bits per byte in the first 50 "
                             r"steps, \2 in the last; documents: 1", line)
        mine = rows.filter(pc.starts_with(rows["path"], f"{base}/{name}/"))
        assert int(found[1].replace(",", "")) == np.sum(mine["tokens"])
        place = f"{base}/{name}/shard_00000.parquet", 0, 7
        text = documents_in(f"{base}/{name}")[place]
        words = rf" +[-+]\d\.\d+ +\d\.\d+ +\d+    {Location(*place)}: {text[:60]!r}"
        assert re.fullmatch(words, document)


@pytest.mark.parametrize("n, rows", [(2, [0, 1, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_losses_print_the_documents_at_both_ends_once(alone, base, capsys, monkeypatch, n, rows):
    documents = [(k / 10, 1.0, 300, Location(f"{base}/a/shard_00000.parquet", 0, k)) for k in range(5)]
    monkeypatch.setattr(ledger, "losses_of", lambda run, sources: [("a", 9000, [2.0, 1.5, 1.0], documents)])
    bench.main(["losses", alone, "--head", str(n)])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert "9,000 tokens, 2.000 bits per byte in the first 50 steps, 1.000 in the last; documents: 5" in first
    assert [int(re.search(r"row (\d):", line)[1]) for line in lines] == rows


def test_losses_need_a_ledger(alone, base):
    os.makedirs(base / "without")
    os.link(f"{alone}/step_0000024.pt", base / "without" / "step_0000024.pt")
    with pytest.raises(SystemExit, match=r"without has no ledger; train.py writes one with --ledger"):
        bench.main(["losses", str(base / "without")])


def test_picture_of_documents_has_a_line_and_bars_for_each_source(alone, base, tmp_path):
    pytest.importorskip("matplotlib")
    from dev import pictures
    pictures.main(["documents", alone, "--out", str(tmp_path / "documents.svg")])
    assert "bits per byte" in (tmp_path / "documents.svg").read_text()
    left, right = pictures.documents_picture(alone).axes
    with ledger.loader_of(ledger.newest_of(alone), False) as loader:
        found = [*ledger.losses_of(alone, loader.sources)]
    assert [text.get_text() for text in left.get_legend().texts] == [name for name, *_ in found]
    assert [line.get_ydata().tolist() for line in left.lines] == [usual.tolist() for _, _, usual, _ in found]
    assert len(right.patches) == 2, "a filled outline for each source"


def test_spike_names_its_documents_at_once(base, capsys, monkeypatch):
    """Of 60 steps, the last has one row with a large loss."""
    step, calls = train.train_step, []

    def jump(*args):
        sums, nats = step(*args)
        calls.append(1)
        if len(calls) == 60:
            nats[2] += 20
            sums[0] += 20 * nats[2].numel()
        return sums, nats
    monkeypatch.setattr(train, "train_step", jump)
    train.main([*flags_of(base, "spike"), *["--steps", "60", "--batch_size", "4", "--seq_len", "16"]])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "jumped" in line]
    assert line.startswith("step 59: the loss jumped to ")
    hardest = ledger.read_ledger(f"{base}/spike").filter(pc.field("g") == 59 * 4 + 2)
    named = re.findall(r"(\S+), row group (\d+), row (\d+) \(\d+\.\d\d nats a token\)", line)
    assert named
    for path, row_group, row in named[:1]:
        assert (path, int(row_group), int(row)) in {*zip(
            *(hardest[key].to_pylist() for key in Location._fields), strict=True)}


def test_first_named_document_is_the_one_whose_loss_is_not_finite():
    """Also of rows without a loss, whose mean would divide by 0."""
    losses = {"easy": (2.0, 4), "none": (0.0, 0), "broken": (np.nan, 2), "hard": (8.0, 4), "long": (9.0, 9)}
    rows = [{"path": path, "row_group": 0, "row": 1, "nats": nats, "tokens": tokens}
            for path, (nats, tokens) in losses.items()]
    words = ", row group 0, row 1 \\({} nats a token\\)"
    named = "; ".join([f"broken{words}", f"hard{words}", f"long{words}"]).format("nan", "2.00", "1.00")
    with pytest.raises(ValueError, match=f"^step 5: loss nan, gradient norm 1; .* documents: {named}. All"):
        train.check_loss(5, np.nan, 1.0, [], rows, "no_run")


@pytest.mark.parametrize("before, loss, is_told", [
    ([1, 3] * 25, 8.1, True), ([1, 3] * 25, 7.9, False), ([1, 3] * 24, 99.0, False)])
def test_a_jump_is_six_deviations_above_the_last_fifty_losses(capsys, before, loss, is_told):
    train.check_loss(5, loss, 1.0, before, [], "no_run")
    assert ("the loss jumped" in capsys.readouterr().out) == is_told


def test_plan_says_how_often_a_run_takes_the_documents_of_each_source(alone, base, capsys):
    """A run of 24 steps, beside its ledger; and one that repeats nothing."""
    words = f"stats {base}/a:0.6 {base}/b:0.4 --tokenizer {base}/tokenizer --seq_len 64 --batch_size 32"
    prepare.main([*words.split(), "--steps", "24"])
    rows, lines = ledger.read_ledger(alone), capsys.readouterr().out.splitlines()
    for name, line in zip("ab", lines[1:], strict=True):
        mine = rows.filter(pc.starts_with(rows["path"], f"{base}/{name}/"))
        share, epochs = re.search(r"(\d+\.\d)% of the rows, .*: (\d+\.\d+) epochs, REPEATED", line).groups()
        tokens = np.sum(mine["stop"]) - np.sum(mine["start"])
        of_an_epoch = sum(len(ids_of(text)) for text in documents_in(f"{base}/{name}").values())
        assert share == {"a": "60.0", "b": "40.0"}[name]
        assert float(epochs) == pytest.approx(tokens / of_an_epoch, rel=0.1)
    prepare.main([*words.split(), "--steps", "2"])
    assert capsys.readouterr().out.count("nothing twice") == 2


@pytest.mark.parametrize("device, words", [
    (None, "3 steps of 4 rows of 256 tokens, 3,084 tokens by one of 2048\n"),
    ("cuda", "3 steps of 256 rows of 2,048 tokens, 1,573,632 tokens by one of 32768\n")])
def test_plan_takes_the_defaults_of_a_run_on_this_machine(base, capsys, monkeypatch, device, words):
    monkeypatch.setattr(train.torch.accelerator, "current_accelerator",
                        lambda **_: device and train.torch.device(device))
    monkeypatch.setattr(prepare, "find_tokenizer", lambda folder, sources, size: (
        RustBPETokenizer.from_directory(f"{base}/tokenizer"), f"one of {size}"))
    prepare.main(["stats", f"{base}/a", "--steps", "3"])
    assert capsys.readouterr().out.startswith(words)
