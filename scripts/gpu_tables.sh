#!/usr/bin/env bash
# Measures small images, photographs, starts, pauses and recipes on one GPU: the commands behind the tables of
# docs/internals. Nothing else should run on the machine: starts wait for other processes that start.
#
#   scripts/gpu_tables.sh DATA_DIR PHOTOS OUT            # all tables
#   scripts/gpu_tables.sh DATA_DIR PHOTOS OUT small128 starts
#
# DATA_DIR: Imagenette in ImageFolder layout (train/, val/). PHOTOS: class folders of photographs, not resized ones.
# Each table goes to OUT/NAME.log; OUT/table.txt has all of this call. Exit status 1 if one failed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all=(small64 small128 photos starts pauses recipes feeds)
usage="usage: scripts/gpu_tables.sh DATA_DIR PHOTOS OUT [TABLE...], where TABLE is one of ${all[*]}"
[[ $# -ge 3 && -d $1/train && -d $1/val && -d $2 ]] || { echo "$usage" >&2 && exit 2; }
data=$(realpath -- "$1")
photos=$(realpath -- "$2")
out=$(realpath -m -- "$3")
shift 3
tables=("$@")
[[ $# -gt 0 ]] || tables=("${all[@]}")
for table in "${tables[@]}"; do
    [[ " ${all[*]} " == *" $table "* ]] || { echo "$table: no such table; $usage" >&2 && exit 2; }
done
PYTHON=${BRISK_PYTHON:-python3}
export PYTHONUNBUFFERED=1
mkdir -p "$out"
: >"$out/table.txt"
failed=0
cd "$root"

# measure TABLE LIMIT COMMAND...: a command with a time limit in seconds, whose output goes to the log of its table.
measure() {
    local table=$1 limit=$2 status=0
    shift 2
    echo "$*" >>"$out/$table.log"
    "$PYTHON" -m scripts.launcher --limit "$limit" -- "$PYTHON" "$@" 2>&1 | tee -a "$out/$table.log" || status=$?
    [[ $status -eq 0 ]] || { echo "$table: exit $status" | tee -a "$out/table.txt" && failed=1; }
}

# Images that stay in memory, against files and synthetic ones.
small64() {
    measure small64 400 scripts/compare_caches.py --arch resnet18 --image-size 64 --images 50000 --side 64 \
        --device cuda --output-dir "$out/small64"
}

small128() {
    measure small128 400 scripts/compare_caches.py --arch resnet18 --image-size 128 --data-dir "$data/train" \
        --device cuda --output-dir "$out/small128"
}

# Photographs that are decoded in each epoch.
photos() {
    measure photos 900 scripts/performance.py --data-dir "$photos" --output-dir "$out/photos" \
        --only resnet50,efficientnet_b0,resnet18,resnet18-8
}

# From the launch to the first step: of a run that is compiled, and of one that is too short for it.
starts() {
    measure starts 1500 scripts/compare_starts.py --data-dir "$data" --arch resnet50,efficientnet_b0 --cold \
        --device cuda --output-dir "$out/starts"
    measure starts 600 scripts/compare_starts.py --data-dir "$data" --arch resnet50,efficientnet_b0 \
        --flags "--epochs 5" --device cuda --output-dir "$out/starts-short"
}

# Between the last step of an epoch and the first of the next, without evaluations; between two image sizes with them.
pauses() {
    local flags=(--data-dir "$data" --arch resnet50 --image-size 128 --val-resize 146 --batch-size 128 --lr 0.1
        --device cuda --seed 0)
    rm -rf "$out/pauses" "$out/sizes"
    measure pauses 300 train.py "${flags[@]}" --epochs 8 --eval-every 8 --output-dir "$out/pauses"
    measure pauses 300 train.py "${flags[@]}" --epochs 3 --resize-schedule 0:96,1:112,2:128 --log-steps 1 \
        --output-dir "$out/sizes"
    [[ -f $out/pauses/summary.json && -f $out/sizes/summary.json ]] || return 0
    "$PYTHON" - "$out/pauses" "$out/sizes" <<'PYTHON' 2>&1 | tee -a "$out/pauses.log" || failed=1
import json, pathlib, statistics, sys
for folder in map(pathlib.Path, sys.argv[1:]):
    files = [(folder / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "events")]
    metrics, events = ([json.loads(line) for line in lines] for lines in files)
    steps = [line for line in metrics if "train/loss" in line]
    seconds = [event["seconds"] for event in events if event["event"] in ("started", "finished")]
    first_step = events[0]["first_step_seconds"]
    busy = sum(line["seconds"] for line in steps) - first_step + sum(line.get("val/seconds", 0) for line in metrics)
    last = metrics[-1]["epoch"]
    print(f"{folder.name}: {(seconds[-1] - seconds[0] - busy) / last:.3f} s an epoch outside of steps and evaluations,")
    print("  of which saves", *(line["checkpoint_seconds"] for line in steps if line["checkpoint_seconds"]))
    if len(steps) == metrics[-1]["step"]:  # --log-steps 1
        by_epoch = [[line["seconds"] for line in steps if line["epoch"] == epoch + 1] for epoch in range(last)]
        for epoch, (first, *others) in enumerate(by_epoch[1:], 2):
            print(f"  epoch {epoch}: first step {first:.3f} s, median of the others {statistics.median(others):.3f} s")
PYTHON
}

# The recipes of Imagenette over their seeds, one after the other.
recipes() {
    local epochs seeds
    for epochs in 5 20 80; do
        seeds=$((epochs == 5 ? 5 : epochs == 20 ? 3 : 2))
        measure recipes 900 scripts/compare_recipes.py --data-dir "$data" --output-dir "$out/recipes-$epochs" \
            --seeds $seeds "$epochs epochs: --device cuda --config configs/imagenette_${epochs}epochs.yaml"
    done
}

# What loader, precision and layout change in accuracy.
feeds() {
    local flags="--arch resnet18 --image-size 128 --val-resize 146 --epochs 10 --batch-size 128 --lr 0.4 --workers 4
        --weight-decay 5e-4 --crop-scale 0.35 --label-smoothing 0.1 --device cuda --cache gpu"
    measure feeds 1500 scripts/compare_recipes.py --data-dir "$data" --output-dir "$out/feeds" --seeds 3 --jobs 3 \
        --flags "$flags" "images on the GPU" "files: --cache none" "torch's loader: --cache none --loader torch" \
        "fp16: --amp fp16" "float32: --amp none" "no CUDA graph: --no-cuda-graph" \
        "two batches of 64 a step: --batch-size 64 --grad-accum-steps 2" \
        "compiled, fused layers: --compile" "compiled, timm's layers: --compile --no-fused-layers"
}

for table in "${tables[@]}"; do
    : >"$out/$table.log"
    "$table"
    { echo "## $table" && { grep '^|' "$out/$table.log" || tail -n 12 "$out/$table.log"; }; } >>"$out/table.txt"
done
cat "$out/table.txt"
exit "$failed"
