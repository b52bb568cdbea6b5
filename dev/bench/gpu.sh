#!/usr/bin/env bash
# The first minutes on a GPU machine: each figure is printed as soon as it is known, at most LIMIT
# seconds in all. dev/gpu.md says what decides. With 8 GPUs: RANKS=8 bash dev/bench/gpu.sh
# What the machine may lack is carried in .gpu/ (ignored by git), prepared on any machine with Python 3.12 wheels:
#     mkdir -p .gpu; pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#         --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 -d .gpu rustbpe==0.1.0
#     NANOLOADER_BASE_DIR=.gpu/base python train.py --device cpu --depth 1 --steps 1 \
#         --vocab_size 32768 --eval_bytes 1000 --out /tmp/warm      # corpus and tokenizer
# A trial of the script on a CPU, at toy size: DEVICE=cpu COMPILE=off SIZE=1,512,64 ROWS=2 STEPS=4 \
#     FLAGS="--device cpu --depth 1 --seq_len 64 --batch_size 2" bash dev/bench/gpu.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
began=$SECONDS limit=${LIMIT:-530} steps=${STEPS:-40}
out=${OUT:-/tmp/out} runs=${RUNS:-/tmp/runs}
mkdir -p "$out" "$runs"
export PYTHONUNBUFFERED=1 NANOLOADER_BASE_DIR=${NANOLOADER_BASE_DIR:-/tmp/base} OUT=$out
[ -d .gpu ] && cp -rn .gpu/base/. "$NANOLOADER_BASE_DIR/" 2> /dev/null
ls .gpu/*.whl > /dev/null 2>&1 && python3 -m pip install -q --no-index --no-deps --no-compile \
    --target /tmp/site .gpu/*.whl && export PYTHONPATH=/tmp/site
data=${DATA:-$(ls -d "$NANOLOADER_BASE_DIR"/builtin-*/ 2> /dev/null | head -1)}
launch=python3
[ "${RANKS:-1}" -gt 1 ] && launch="torchrun --standalone --nproc_per_node=$RANKS"
data=${data:-$(python3 -c "import dataset; print(dataset.find_data())" | tail -1)}
# One eval, at the end, of 1 MB.
flags="--data ${data%/} --vocab_size 32768 --log_every 1 --eval_every 1000000 --eval_bytes 1000000"

left() { echo $((limit - SECONDS + began)); }
stage() {    # NAME SECONDS COMMAND...: its lines get the time; the next stage runs in any case
    local name=$1 most=$2 seconds
    shift 2
    seconds=$(($(left) < most ? $(left) : most))
    [ $seconds -lt 15 ] && { echo "== $name: skipped, no time"; return; }
    echo "== $name ($((SECONDS - began)) s): $*"
    timeout -k 5 $seconds "$@" 2>&1 | while IFS= read -r line; do
        printf '%s %s\n' "$EPOCHREALTIME" "$line"; done > "$out/$name.txt"
    [ ${PIPESTATUS[0]} -eq 0 ] || { echo "   status ${PIPESTATUS[0]}:"; tail -5 "$out/$name.txt"; }
    # At most 8 files come back: one archive
    (cd "$out" && tar czf logs.tgz --exclude=logs.tgz *.txt; cp -f "$runs"/*/log.jsonl . 2> /dev/null
     for f in "$runs"/*/log.jsonl; do cp "$f" "/tmp/$(basename "$(dirname "$f")").jsonl"; done
     rm -f log.jsonl; tar czf logs.tgz *.txt -C /tmp $(cd /tmp && ls *.jsonl 2> /dev/null)) 2> /dev/null
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null
python3 -c "import torch; print('torch', torch.__version__, 'cudnn', torch.backends.cudnn.version())"

# 1. Losses and gradients beside the CPU's; then where a step's time goes. The most for the least.
stage step 200 python3 -m dev.bench.gpu_step 120
cut -d" " -f2- "$out/step.txt" 2> /dev/null | grep -v USDT

# 2. A run that saves halfway; the tests use the time in which it compiles.
[ -z "${FLAGS:-}" ] && { timeout 150 python3 -m pytest -q -p no:xdist -p no:cacheprovider \
    dev/tests/test_gpu_path.py -k cuda > "$out/pytest.txt" 2>&1 & }
stage whole 170 $launch train.py $flags --out $runs/whole --steps $steps \
    --save_every $((steps / 2)) ${FLAGS:-}
wait
tail -2 "$out/pytest.txt" 2> /dev/null
rm -f $runs/whole/step_*$steps.pt

# 3. Resumed halfway
stage resumed 100 $launch train.py --out $runs/resumed --resume "$(ls $runs/whole/step_*.pt | head -1)"
rm -f $runs/*/step_*.pt

# 4. A figure of quality: the README's demo, 0.9755 bits per byte on a CPU
stage demo 100 python3 train.py --data "${data%/}" --out $runs/demo --depth 2 --seq_len 512 \
    --batch_size 2 --steps ${DEMO_STEPS:-1600} --eval_every 800 \
    --eval_bytes 1200000 --log_every 300 --vocab_size 2048

python3 - "$out" "$runs" <<'END'
import json, re, statistics, sys
out, runs = sys.argv[1:]

def read(name):
    try:
        with open(f"{runs}/{name}/log.jsonl") as file:
            return [json.loads(line) for line in file]
    except OSError:
        return []

def when(name, pattern):    # the times of the lines that match
    try:
        with open(f"{out}/{name}.txt", errors="replace") as file:
            return [float(line.split()[0]) for line in file if re.search(pattern, line)]
    except OSError:
        return []

print(f"\n{'run':9}{'k tok/s':>9}{'TFLOP/s':>9}{'ms/step':>9}{'best':>9}{'wait ms':>9}{'mem GB':>8}{'loss':>9}{'val bpb':>9}")
for name in ("whole", "resumed", "demo"):
    records = read(name)
    steps = [r for r in records if "loss" in r]
    last = steps[len(steps) // 2:]    # the first ones compile
    if not last:
        print(f"{name:9} failed")
        continue
    names = ("tokens_per_s", "tflops", "step_ms", "wait_ms", "memory_gb")
    tok, tflops, ms, wait, gb = (statistics.median(r.get(n, 0) for r in last) for n in names)
    bpb = next((r["val_bpb"] for r in reversed(records) if "val_bpb" in r), float("nan"))
    print(f"{name:9}{tok / 1e3:9.1f}{tflops:9.1f}{ms:9.1f}{min(r['step_ms'] for r in last):9.1f}{wait:9.2f}{gb:8.2f}{steps[-1]['loss']:9.4f}{bpb:9.4f}")
ours, again = ({r["step"]: r for r in read(name) if "loss" in r} for name in ("whole", "resumed"))
both = sorted(ours.keys() & again.keys())
if both:
    diff = [abs(ours[s]["loss"] - again[s]["loss"]) for s in both]
    same = all(ours[s]["rows_hash"] == again[s]["rows_hash"] for s in both)
    print(f"resume: rows {'equal' if same else 'DIFFER'}; loss of the first step differs by {diff[0]:.1e}"
          f" (weights), of the second by {diff[1]:.1e} (state), at most {max(diff):.1e}")
for name in ("whole", "resumed"):
    steps = [r for r in read(name) if "loss" in r]
    header, lines = when(name, r" step +loss"), when(name, r"^\S+ +\d+ +\d+\.\d{4} ")
    if header and len(lines) == len(steps) > 2:
        gaps = [b - a - r["step_ms"] / 1e3 for a, b, r in zip(lines, lines[1:], steps[1:])]
        print(f"{name}: first step {lines[0] - header[0]:.0f} s (compiles); longest pause between "
              f"steps {max(gaps):.1f} s (a checkpoint); from the last step to the end "
              f"{when(name, 'done at')[-1] - lines[-1]:.0f} s (checkpoint, eval compiled, sample)")
END
echo "took $((SECONDS - began)) s"
