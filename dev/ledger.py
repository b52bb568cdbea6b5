"""
The documents of a run of train.py, for dev.bench: `audit` names those of some steps, `losses` says how hard
each was for the model, `when` finds the steps that have a document. `losses` needs a run with --ledger.
"""

import argparse
import collections
import functools
import glob
import json
import math
from bisect import bisect_right

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataloader import Location, PackedLoader
from dataset import printable
from tokenizer import RustBPETokenizer
from train import LEDGER, list_checkpoints, load_checkpoint, sources_of


def newest_of(run):
    return load_checkpoint(max(list_checkpoints(run), default=run))

def loader_of(saved, begins, B=None, rank=0, world_size=1):
    """A loader of a checkpoint's run: at the run's beginning, or at the checkpoint."""
    run, tokenizer = argparse.Namespace(**saved["flags"]), RustBPETokenizer.from_dict(saved["tokenizer"])
    if begins and (changed := saved["constant_since"]):
        raise ValueError(f"the run changed its flags at step {changed}: a checkpoint of step {saved['step']} "
                         f"cannot name rows before it; pass one of step {changed} or before")
    loader = PackedLoader(tokenizer, B or run.batch_size, run.seq_len, "train", rank=rank,
                          world_size=world_size, packing=run.packing, data_dir=sources_of(run),
                          num_lanes=run.num_lanes, shuffle_seed=None if run.no_shuffle else run.seed)
    if not begins:
        loader.load_state_dict(json.loads(saved["loader"]))
    return loader

def shards_of(loader):
    return [shard for source in loader.sources.values() for shard in source.shards]

def text_of(document, shard, tokenizer):
    if shard.kind != "tokens":
        return document.as_py() or ""
    ids = np.frombuffer(document.as_py() or b"", shard.dtype).astype(int)
    return tokenizer.decode(np.maximum(ids, ~ids)[1:].tolist())

def beginning_of(location, loader, tokenizer):
    shard = next(shard for shard in shards_of(loader) if shard.path == location.path)
    document = read_row_group(shard, location.row_group)[location.row]
    return text_of(document, shard, tokenizer)[:60]

@functools.lru_cache(maxsize=16)
def read_row_group(shard, row_group):
    return shard.read(row_group)

# ---------------------------------------------------------------------------------------------------------
# Audit: the documents in the rows of a run's steps

def audit(path, steps=None, as_json=False):
    """
    Lines for each row of steps A to B-1 (default: the next one) of the run of a checkpoint of train.py: the
    whole batch of all ranks; of W ranks, row i is that of rank i % W. Steps before the checkpoint are found
    from the beginning of the run, which takes as long as packing them again.
    """
    saved = load_checkpoint(path)
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    first, stop = steps or (saved["step"], saved["step"] + 1)
    with loader_of(saved, first < saved["step"]) as loader:
        for step in range(0 if first < saved["step"] else saved["step"], stop):
            next(loader)
            for i, pieces in enumerate(loader.pieces() if step >= first else ()):
                found = [{**piece.location._asdict(), "epoch": piece.epoch, "from": piece.start,
                          "to": piece.stop, "offset": piece.offset,
                          "text": beginning_of(piece.location, loader, tokenizer)} for piece in pieces]
                yield from lines_of_row(step, i, found, as_json)

def lines_of_row(step, number, found, as_json):
    if as_json:
        yield json.dumps({"step": step, "row": number, "documents": found})
        return
    yield f"step {step}, row {number}"
    end = 0
    for piece in found:
        again = ", after its BOS again" if piece["offset"] > end else ""
        yield ("  {path}, row group {row_group}, row {row}, epoch {epoch}, ".format(**piece)
               + f"tokens {piece['from']:,}-{piece['to'] - 1:,}{again}: {piece['text']!r}")
        end = piece["offset"] + piece["to"] - piece["from"]

# ---------------------------------------------------------------------------------------------------------
# Losses: which documents the model finds hard or easy

NEAR = np.ones(51)    # steps
LN2 = math.log(2)

def read_ledger(run):
    """Its columns as arrays, in the order of the run; empty without a ledger."""
    files = sorted(glob.glob(f"{glob.escape(run)}/ledger/step_*.parquet"))
    table = pa.concat_tables(map(pq.read_table, files)).sort_by("g") if files else {}
    return {name: table[name].to_numpy() if files else np.zeros(0, int) for name in LEDGER}

def losses_of(ledger):
    """
    Of each document of at least 200 bytes, from the easiest to the hardest: (bits per byte above those of all
    documents in the steps around its own, bits per byte, bytes, Location).
    """
    step, documents = ledger["step"], collections.defaultdict(lambda: np.zeros(3))
    nats, n_bytes = (np.convolve(np.bincount(step, ledger[name]), NEAR) for name in ("nats", "bytes"))
    expected = (nats / np.maximum(n_bytes, 1))[step + len(NEAR) // 2] * ledger["bytes"]
    columns = [ledger[name].tolist() for name in ("path", "row_group", "row", "nats", "bytes")]
    for *place, nats, n_bytes, others in zip(*columns, expected, strict=True):
        documents[Location(*place)] += nats, n_bytes, others
    return sorted(((nats - others) / n / LN2, nats / n / LN2, int(n), place)
                  for place, (nats, n, others) in documents.items() if n >= 200)    # shorter ones say little

def losses(run, n=10):
    """
    Lines: for each source, its pieces, tokens and bits per byte; then the n easiest and n hardest documents,
    by their bits per byte above those of all documents in the steps around their own.
    """
    ledger = read_ledger(run)
    if not len(ledger["g"]):
        raise ValueError(f"{run} has no ledger; train.py writes one with --ledger")
    saved, found = newest_of(run), losses_of(ledger)
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    with loader_of(saved, False) as loader:
        for name, source in loader.sources.items():
            mine = np.isin(ledger["path"], [shard.path for shard in source.shards])
            bits = ledger["nats"][mine].sum() / max(1, ledger["bytes"][mine].sum()) / LN2
            yield (f"{name}: {mine.sum():,} pieces, {ledger['tokens'][mine].sum():,} tokens, {bits:.3f} bits "
                   "per byte")
        for title, some in (("easiest", found[:n]), ("hardest", found[-n:])):
            yield f"{title}: above others, bits per byte, bytes"
            for above, bits, n_bytes, place in some:
                yield (f"{above:>+8.3f}{bits:>8.3f}{n_bytes:>9,}  "
                       f"{place}: {printable(beginning_of(place, loader, tokenizer))}")

# ---------------------------------------------------------------------------------------------------------
# When: the steps that have a document

def when(run, name=None, text=None):
    """
    Lines: the steps and rows of a run that have a document, until its last step. FILE:ROW: row of the file,
    from 0 on; --text: all documents with these words. If the ledger lacks steps, lanes are packed again.
    """
    saved, ledger = newest_of(run), read_ledger(run)
    tokenizer = RustBPETokenizer.from_dict(saved["tokenizer"])
    begins = len(np.unique(ledger["step"][ledger["step"] < saved["step"]])) < saved["step"]
    with loader_of(saved, begins) as loader:
        places = list(find_documents(loader, tokenizer, name, text))
        if not places:
            raise ValueError(f"no {name or repr(text)} in the run's data; expected FILE:ROW, or --text WORDS")
        for place in places:
            yield f"{place}: {printable(beginning_of(place, loader, tokenizer))}"
            known = () if begins else seen_in(ledger)
            known = [one for one in known if one[2] == place and one[0] < saved["step"]]
            found = [*known, *replay(saved, loader, [place])]
            for step, g, _, epoch, start, stop in found:
                yield (f"  step {step}, row {g} of the run, epoch {epoch}, tokens {start:,}-{stop - 1:,}"
                       + (", to come" if step >= saved["step"] else ""))
            if not found:
                yield "  in no step of this run"

def find_documents(loader, tokenizer, name, text):
    path, _, row = (name or "").rpartition(":")
    for shard in shards_of(loader):
        if text:
            for row_group, i in ((j, i) for j, n in enumerate(shard.group_sizes) for i in range(n)):
                if text in text_of(read_row_group(shard, row_group)[i], shard, tokenizer):
                    yield Location(shard.path, row_group, i)
        elif shard.path.endswith(path) and row.isdecimal() and int(row) < shard.n_documents:
            firsts = [0, *np.cumsum(shard.group_sizes).tolist()]
            row_group = bisect_right(firsts, int(row)) - 1
            yield Location(shard.path, row_group, int(row) - firsts[row_group])

def seen_in(ledger):
    """(step, g, Location, epoch, start, stop) of each piece."""
    columns = (ledger[name].tolist() for name in LEDGER[:8])
    for step, g, path, row_group, row, *rest in zip(*columns, strict=True):
        yield step, g, Location(path, row_group, row), *rest

def replay(saved, loader, places):
    """What seen_in yields, of these documents, from `loader` on; packs only lanes that have them."""
    epochs = [stream.place.epoch for lane in loader.position.lanes.values() for stream in lane.values()]
    lanes, last = {}, max(epochs)
    for place in places:
        [source] = [s for s in loader.sources.values() if place.path in [shard.path for shard in s.shards]]
        epoch = min(epochs)
        while epoch <= last + 1:    # + 1: other lanes may be ahead
            lane = lane_of(source, place, epoch)
            if lane not in lanes:
                lanes[lane] = list(seen_in_lane(saved, loader, lane))
                last = max([last, *(one[3] for one in lanes[lane])])
            epoch += 1
    places = {*places}
    return sorted(one for lane in lanes.values() for one in lane if one[2] in places)

def lane_of(source, place, epoch):
    group = source.first_group[[shard.path for shard in source.shards].index(place.path)] + place.row_group
    return next(turn % source.num_lanes for turn in np.flatnonzero(source.order(epoch)[0] == group).tolist()
                if place.row in source.part(epoch, turn).indices)

def seen_in_lane(saved, loader, lane):
    first, run = loader.position.g, argparse.Namespace(**saved["flags"])
    rank, first_step = (lane - first) % loader.num_lanes, saved["step"] if first else 0
    with loader_of(saved, not first, 1, rank, loader.num_lanes) as rows:    # of this lane alone
        for g in range(first + rank, first + (run.steps - first_step) * run.batch_size, loader.num_lanes):
            next(rows)
            for location, epoch, start, stop, _ in rows.pieces()[0]:
                yield first_step + (g - first) // run.batch_size, g, location, epoch, start, stop
