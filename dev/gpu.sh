#!/usr/bin/env bash
# The first 45 minutes on a GPU machine, one table at the end; dev/gpu.md says what decides.
#     bash dev/gpu.sh [DATA [FLAG ...]]      DATA: a folder of shards; default: the built-in corpus
#     RANKS=8 NANOCHAT=~/nanochat bash dev/gpu.sh climbmix
#     STEPS=4 bash dev/gpu.sh my_shards --device cpu --depth 1 ...      a trial of the script itself
set -uo pipefail
cd "$(dirname "$0")/.."
data=${1:-$(python -c "import dataset; print(dataset.find_data())" | tail -1)}
shift $(($# > 0))
out=${OUT:-runs/gpu-$(date +%H%M%S)} steps=${STEPS:-60} ranks=${RANKS:-1}
mkdir -p "$out"
launch="python"
[ "$ranks" -gt 1 ] && launch="torchrun --standalone --nproc_per_node=$ranks"

run() {    # NAME FLAG...: a run of train.py whose output goes to a file
    local name=$1
    shift
    echo "== $name: train.py $*"
    $launch train.py --data "$data" --out "$out/$name" --log_every 1 --eval_every 100000 "$@" \
        > "$out/$name.txt" 2>&1 || { echo "   failed:"; tail -3 "$out/$name.txt"; }
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv 2> /dev/null
python -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda)"
echo "== tests that need a GPU" && python -m pytest -q -p no:xdist dev/tests/test_gpu_path.py -k cuda 2>&1 | tail -3
run speed --steps "$steps" "$@"
run no_compile --steps "$((steps / 3))" "$@" --compile off
run whole --steps "$steps" --save_every "$((steps / 2))" "$@"
echo "== resumed at step $((steps / 2))" && $launch train.py --out "$out/resumed" \
    --resume "$(ls "$out"/whole/step_*.pt | head -1)" > "$out/resumed.txt" 2>&1
for name in whole resumed; do
    grep "^rows: hash" "$out/$name.txt"
    grep -o '"loss": [^,]*' "$out/$name/log.jsonl" | tail -1
done
run recipe --steps "${RECIPE_STEPS:-500}" "$@"
[ -n "${NANOCHAT:-}" ] && (cd "$NANOCHAT" && python -m scripts.base_train --depth=12 --num-iterations=500 \
    --total-batch-size=524288 --window-pattern=L --core-metric-every=-1 --sample-every=-1) > "$out/nanochat.txt" 2>&1

python - "$out" <<'END'
import glob, json, os, statistics, sys
print(f"\n{'run':12}{'k tok/s':>9}{'MFU':>8}{'ms/step':>9}{'wait ms':>9}{'mem GB':>8}{'loss':>9}{'val bpb':>9}")
for path in sorted(glob.glob(sys.argv[1] + "/*/log.jsonl"), key=os.path.getmtime):
    records = [json.loads(line) for line in open(path)]
    steps = [r for r in records if "loss" in r][-20:]    # the first ones compile
    if not steps:
        print(f"{path.split('/')[-2]:12}   failed: see {path.split('/')[-2]}.txt")
        continue
    names = ("tokens_per_s", "mfu", "ms", "wait_ms", "memory_gb")    # on a CPU, two are missing
    tok, mfu, ms, wait, gb = (statistics.median(r.get(name, 0) for r in steps) for name in names)
    bpb = next((r["val_bpb"] for r in reversed(records) if "val_bpb" in r), float("nan"))
    print(f"{path.split('/')[-2]:12}{tok / 1e3:9.1f}{mfu:8.1%}{ms:9.1f}{wait:9.2f}{gb:8.2f}"
          f"{steps[-1]['loss']:9.4f}{bpb:9.4f}")
END
