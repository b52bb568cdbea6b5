"""dev/bench/ counts what the loader delivers, and each of its commands prints a line each."""

import collections
import importlib.util
import itertools
import pickle
import random

import pytest
import torch

from dataloader import PACKINGS
from dev.bench import __main__ as bench
from dev.bench import measure, peers
from dev.prepare import tokenize
from test_dataloader import grouped, make, texts_of, write
from tokenizer import RustBPETokenizer, get_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two shards of 8 row groups each, and a tokenizer."""
    folder, draw = tmp_path_factory.mktemp("bench"), random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 500))) for _ in range(240)]
    write(folder / "data", *grouped(grouped(texts, 15), 8))
    RustBPETokenizer.train_from_iterator(iter(texts), 300).save(f"{folder}/tokenizer")
    return folder

@pytest.fixture
def fresh(monkeypatch):
    """What runs in a process of its own runs here, and is pickled."""
    def run_here(function, job):
        pickle.dumps((function, job))
        return function(job)

    monkeypatch.setattr(measure, "run_fresh", run_here)

@pytest.mark.parametrize("packing", PACKINGS)
def test_counts_are_those_of_delivered_rows(base, packing):
    """One epoch of one lane."""
    data, counts, tokens = f"{base}/data", collections.Counter(), set()
    loader = make(data, T=30, num_lanes=1, chunk_bytes=5000, epochs=1, packing=packing)
    [source] = loader.sources.values()
    for n in range(source.chunks_per_lane):
        lengths = measure.lengths_of_chunk(loader, n)
        counts += measure.count_rows(packing, lengths, 31)
    n_targets, n_rows = 0, 0
    for _, targets in loader:
        n_targets += int((targets >= 0).sum())
        n_rows += 1
        for piece in loader.pieces()[0]:
            tokens |= {(piece.location, k) for k in range(piece.start, piece.stop)}
    n_tokens = sum(len(text) + 1 for text in texts_of(data).values())
    assert counts["rows"] == n_rows and counts["padding"] == n_rows * 30 - n_targets
    assert counts["dropped"] == n_tokens - len(tokens)

def test_packings_prints_a_line_for_each(base, capsys):
    bench.main(f"packings --data {base}/data --tokenizer {base}/tokenizer --T 64".split())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*PACKINGS]

def test_peers_prints_a_line_for_each_and_names_the_missing(base, fresh, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch" and find(name))
    names = ["exactfit", "engine alone", "Grain", "a memmap"]
    lines = [*measure.measure_peers(
        f"{base}/tokenizer", f"{base}/data", 2, 32, ["tiktoken"], names, 0.01, rounds=2)]
    assert lines[0] == "skipped: Grain, which is not installed"
    loaders = [line[:26].split() for line in lines[3:]]
    assert loaders == [["exactfit", "tiktoken"], ["engine", "alone", "tiktoken"],
                       ["exactfit", "tokens"], ["a", "memmap", "tokens"]]

@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_each_peer_delivers_our_ids(base, tmp_path, peer, monkeypatch):
    """An epoch of blocks: all tokens but the last batch's, and each piece is in some document."""
    pytest.importorskip(peer.needs)
    monkeypatch.setenv("NANOLOADER_BASE_DIR", "")    # nanochat's function sets it
    tokens, own = f"{tmp_path}/tokens", tmp_path / "own"
    tokenize(f"{base}/data", tokens, f"{base}/tokenizer")
    own.mkdir()
    measure.write_ids(tokens, f"{tmp_path}/ids")
    job = peers.Job(f"{base}/data", tokens, f"{own}", f"{tmp_path}/ids", "uint16",
                    f"{base}/tokenizer", peer.engines[-1], workers=0, B=2, T=32)
    if peer.write:
        peer.write(job)
    tokenizer, documents = get_tokenizer(job.tokenizer), texts_of(job.text).values()
    joined, n_tokens = "\n".join(documents), 0
    for batch in itertools.islice(peer.make(job), 1000):    # nanochat's has no end
        if isinstance(batch, tuple):
            inputs, targets = batch
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            batch = torch.cat([inputs, targets[:, -1:]], dim=1)
        assert batch.shape == (2, 33) and batch.dtype == torch.int64
        n_tokens += batch.numel()
        for row in batch.tolist():
            pieces = tokenizer.decode(row).split("<|bos|>")
            assert all(piece in joined for piece in pieces)
    n_in_all = sum(1 + len(tokenizer.encode(text)) for text in documents)
    assert peer.packing != "flat" or 0 <= n_in_all - n_tokens < 2 * 66
