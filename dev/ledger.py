"""
The documents of a run of train.py, for dev.bench: `audit` names those of some steps, `losses` says how hard
each was for the model, `when` finds the steps that have a document. `losses` needs a run with --ledger.
"""

import argparse
import functools
import glob
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataloader import Location, PackedLoader
from tokenizer import RustBPETokenizer
from train import list_checkpoints, load_checkpoint, sources_of


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

def text_of(shard, row_group, row, loader):
    document = read_row_group(shard, row_group)[row].as_py()
    if shard.kind != "tokens":
        return document or ""
    ids = np.frombuffer(document or b"", shard.dtype).astype(int)
    return loader.tokenizer.tokenizer.decode(np.maximum(ids, ~ids)[1:].tolist())

def beginning_of(location, loader):
    shard = next(shard for shard in shards_of(loader) if shard.path == location.path)
    return text_of(shard, *location[1:], loader)[:60]

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
    first, stop = steps or (saved["step"], saved["step"] + 1)
    with loader_of(saved, first < saved["step"]) as loader:
        for step in range(0 if first < saved["step"] else saved["step"], stop):
            next(loader)
            for i, pieces in enumerate(loader.pieces() if step >= first else ()):
                found = [{**piece.location._asdict(), "epoch": piece.epoch, "from": piece.start,
                          "to": piece.stop, "offset": piece.offset,
                          "text": beginning_of(piece.location, loader)} for piece in pieces]
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
# What the model saw: the losses of documents, and the steps that have them

def read_ledger(run, sources=None):
    """Its rows (see train.ledger_rows) of these sources or all, in the order of the run; maybe none."""
    files = glob.glob(f"{glob.escape(run)}/ledger/*.parquet")
    ledger = pq.read_table(files).sort_by("g") if files else pa.table({"step": [], "path": []})
    paths = {*ledger["path"].unique().to_pylist()}
    known = [shard.path for source in (sources or {}).values() for shard in source.shards] or [*paths]
    if others := paths.difference(known):
        print(f"left out: {len(others)} files that the run no longer has (moved?), such as {min(others)}")
    return ledger.filter(pc.field("path").isin(known)) if others else ledger

def losses_of(run, sources):
    """
    Yield for each source: its name, its tokens, bits per byte in every 50 steps; and for its documents of 200
    bytes or more, sorted: (bits per byte above those of the same steps, bits per byte, bytes, Location).
    """
    ledger = read_ledger(run, sources)
    if not len(ledger):
        raise ValueError(f"{run} has no ledger; train.py writes one with --ledger")
    for name, source in sources.items():
        rows = ledger.filter(pc.field("path").isin([shard.path for shard in source.shards]))
        period, bits = rows["step"].to_numpy() // 50, rows["nats"].to_numpy() / np.log(2)
        usual = np.bincount(period, bits, 1) / np.maximum(1, np.bincount(period, rows["bytes"], 1))
        above = bits - usual[period] * rows["bytes"]
        rows = rows.append_column("bits", [bits]).append_column("above", [above])
        sums = rows.group_by(Location._fields).aggregate([(key, "sum") for key in ("above", "bits", "bytes")])
        documents = ((one["above_sum"] / n, one["bits_sum"] / n, n, Location(*map(one.get, Location._fields)))
                     for one in sums.to_pylist() if (n := one["bytes_sum"]) >= 200)    # others say little
        yield name, np.sum(rows["tokens"]), usual, sorted(documents)

def losses(run, n=10):
    """Lines: the tokens of each source and how its loss fell, then its n easiest and n hardest documents."""
    with loader_of(newest_of(run), False) as loader:
        for name, n_tokens, usual, documents in losses_of(run, loader.sources):
            began = next(filter(None, usual), 0)
            yield (f"{name}: {n_tokens:,} tokens, {began:.3f} bits per byte in the first 50 steps, "
                   f"{usual[-1]:.3f} in the last; documents: {len(documents):,}")
            yield "   above  bits per byte      bytes    (above: more bits per byte than the same 50 steps)"
            for above, bits, n_bytes, place in sorted({*documents[:n], *documents[-n:]}):
                yield f"{above:>+8.3f}{bits:>15.3f}{n_bytes:>11,}    {place}: {beginning_of(place, loader)!r}"

def when(run, name=None, text=None):
    """Lines: the rows of a run that have a document, past and to come; packed again if no ledger has them."""
    saved = newest_of(run)
    with loader_of(saved, False) as loader:
        ledger = read_ledger(run, loader.sources)
        begins = not {*range(saved["step"])} <= {*ledger["step"].unique().to_pylist()}
        places = {*find_documents(loader, name, text)}
        if not places:
            raise ValueError(f"no {name or repr(text)} in the run; expected FILE[:GROUP]:ROW or --text WORDS")
        seen = {*seen_in(ledger, places), *replay(saved, begins, places)}
        for step, g, place, epoch, start, stop in sorted(seen):
            yield (f"step {step}, row {g} of the run, epoch {epoch}{', to come' * (step >= saved['step'])}: "
                   f"{place}, tokens {start:,}-{stop - 1:,}: {beginning_of(place, loader)!r}")
    yield f"{len(seen):,} pieces; documents in none: {len(places - {place for _, _, place, *_ in seen}):,}"

def find_documents(loader, name, text):
    """Yield the Location of FILE[:GROUP]:ROW in each folder that has it, or of all with these words."""
    for shard in shards_of(loader):
        places = ((row_group, row) for row_group, n in enumerate(shard.group_sizes) for row in range(n))
        for number, place in enumerate(places):
            names = f"/{shard.path}:{number}", f"/{shard.path}:{place[0]}:{place[1]}"
            is_named = any(one.endswith(f"/{name}") for one in names)
            if is_named or (text and text in text_of(shard, *place, loader)):
                yield Location(shard.path, *place)

def seen_in(ledger, places):
    """Yield (step, g, Location, epoch, start, stop) for each piece of these documents."""
    rows = zip(*(column.to_pylist() for column in ledger.columns[:8]), strict=True)    # up to `stop`
    yield from ((*row[:2], Location(*row[2:5]), *row[5:]) for row in rows if row[2:5] in places)

def replay(saved, begins, places):
    """Yield what seen_in does, up to the run's end. Packs again those lanes that have such documents."""
    run, now = argparse.Namespace(**saved["flags"]), json.loads(saved["loader"])
    first, end = 0 if begins else now["rows"], now["rows"] + (run.steps - saved["step"]) * run.batch_size
    for rank in range(min(run.num_lanes, end - first)):
        with loader_of(saved, begins, 1, rank, run.num_lanes) as loader:
            [(lane, streams)] = loader.position.lanes.items()
            for name, state in streams.items():
                epochs = now["lanes"][str(lane)][name]["place"][0] * end // max(1, now["rows"])
                chunks = loader.sources[name].deal(lane, state.place, epochs + 1)
                if any(places.intersection(part.locations()) for _, parts in chunks for part in parts):
                    break
            else:    # none of its documents
                continue
            for g in range(first + rank, end, run.num_lanes):
                next(loader)
                step = saved["step"] + (g - now["rows"]) // run.batch_size
                yield from ((step, g, *piece[:4]) for piece in loader.pieces()[0] if piece.location in places)
