"""
Train each arm with each seed, and print a table with a line for each arm, as in dev/log.md.

    python -m dev.bench.arms "" "--num_lanes 8" "--depth 4 --steps 500" --seeds 1 2 3
    python -m dev.bench.arms "--data novels" --train ../other/train.py --out runs/other

An arm is a string of flags for train.py, or for a changed copy of it (--train; give it another
--out). Runs follow one another. A run that is in --out already is resumed, or is complete.
"""

import os
import shlex
import subprocess
import sys

import dataset
from train import read_log


def run_arm(train, arm, seed, folder):
    """Bits per byte of each eval, in order. The arm and the seed name the run's folder."""
    name = arm.replace("/", "_").replace(" ", "_") or "default"
    out = os.path.join(folder, f"{name}_seed_{seed}")
    command = [sys.executable, train, "--seed", str(seed), "--out", out, "--resume", "auto"]
    subprocess.run([*command, *shlex.split(arm)], check=True, stdout=sys.stderr)
    found = {}
    for record in read_log(os.path.join(out, "log.jsonl")):
        if "val_bpb" in record:
            found[record["step"]] = record["val_bpb"]    # over all sources
    return [*found.values()]

def line_of(arm, evals):
    """evals: for each seed, its bits per byte"""
    last = [bpb[-1] for bpb in evals]
    best = [min(bpb) for bpb in evals]
    mean = sum(last) / len(last)
    over = max(a - b for a, b in zip(last, best, strict=True))
    each = ", ".join(f"{bpb:.4f}" for bpb in last)
    return f"| `{arm or 'default'}` | {each} | {mean:.4f} | {over:.4f} |"

def main(argv=None):
    p = dataset.Parser(description=__doc__)
    p.add_argument("arms", nargs="+", metavar="FLAGS")
    p.add_argument("--seeds", nargs="+", type=int, default=[1])
    p.add_argument("--train", default="train.py", metavar="FILE")
    p.add_argument("--out", default="runs/arms", metavar="DIR")
    flags = p.parse_args(argv)
    print("| flags | bits per byte of each seed | mean | last eval above the best, at most |")
    print("| --- | --- | --- | --- |")
    for arm in flags.arms:
        evals = [run_arm(flags.train, arm, seed, flags.out) for seed in flags.seeds]
        print(line_of(arm, evals), flush=True)

if __name__ == "__main__":
    with dataset.errors_in_one_line():
        main()
