"""
The ledger of a run: the loss of each document, in each step that had it. `train.py --ledger` writes
it, and dev/runs.py reads it. It is parquet files in RUN/ledger, one per rank and save, so a resumed
run can remove whole files.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python train.py --ledger, run in the folder of dataset.py")

import glob
import os

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader import ranks_of_this_process
from dataset import atomic_file, step_in_name

RANK = r"_rank_[0-9]{4,}\.parquet"    # in names, after the step

def list_ledger(run):
    """Its files. Others in the folder, such as copies, are the user's."""
    paths = glob.glob(f"{glob.escape(run)}/ledger/step_*.parquet")
    return [path for path in paths if step_in_name(path, RANK) is not None]

class Ledger:
    """
    Records the rows of this rank. A run that starts or resumes at `step` removes the files from
    this step on, since it will write them again.
    """

    def __init__(self, run, step, tokenizer):
        self.folder = os.path.join(run, "ledger")
        self.token_bytes = tokenizer.token_bytes
        self.rows = []
        self.rank, _ = ranks_of_this_process()
        for path in list_ledger(run):
            if self.rank == 0 and step_in_name(path, RANK) >= step:
                os.remove(path)

    def add(self, step, loader, targets, nats):
        """Add a record for each piece of a document: its unmasked tokens, their bytes and loss."""
        targets, nats = targets.numpy(force=True), nats.numpy(force=True)
        rows = zip(loader.row_numbers, loader.pieces(), targets, nats, strict=True)
        for g, pieces, row_targets, row_nats in rows:
            for location, epoch, start, stop, offset in pieces:
                first = offset - 1 if start > 0 else offset    # BOS also precedes the rest
                of_piece = slice(max(0, first), offset + stop - start - 1)
                tokens = row_targets[of_piece]
                tokens = tokens[tokens >= 0]    # -100: masked
                self.rows.append({
                    "step": step, "g": g,
                    "path": location.path, "row_group": location.row_group, "row": location.row,
                    "epoch": epoch, "start": start, "stop": stop,
                    "tokens": len(tokens), "bytes": int(self.token_bytes[tokens].sum()),
                    "nats": float(row_nats[of_piece].sum())})

    def save(self):
        if self.rows:
            name = f"step_{self.rows[0]['step']:07d}_rank_{self.rank:04d}.parquet"
            with atomic_file(os.path.join(self.folder, name)) as part:
                pq.write_table(pa.Table.from_pylist(self.rows), part)
            self.rows.clear()
