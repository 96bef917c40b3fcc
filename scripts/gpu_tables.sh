#!/usr/bin/env bash
# Measures small images, photographs, evaluations, starts, pauses, recipes and distillation on one GPU: the commands
# behind the tables of docs/internals. Nothing else should run on the machine: starts wait for other processes that
# start.
#
#   scripts/gpu_tables.sh DATA_DIR PHOTOS OUT            # all tables
#   scripts/gpu_tables.sh DATA_DIR PHOTOS OUT small128 starts
#
# DATA_DIR: Imagenette in ImageFolder layout (train/, val/). PHOTOS: class folders of photographs, not resized ones.
# Each table goes to OUT/NAME.log; OUT/table.txt has all of this call. Exit status 1 if one failed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
all=(small64 small128 photos evaluations starts pauses recipes feeds distillation)
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
    "$PYTHON" -m scripts.bench launch --limit "$limit" -- "$PYTHON" "$@" 2>&1 | tee -a "$out/$table.log" || status=$?
    [[ $status -eq 0 ]] || { echo "$table: exit $status" | tee -a "$out/table.txt" && failed=1; }
}

# Images that stay in memory, against files and synthetic ones.
small64() {
    measure small64 400 scripts/bench caches --arch resnet18 --image-size 64 --images 50000 --side 64 \
        --window-seconds 1 --device cuda --output-dir "$out/small64"
}

small128() {
    measure small128 400 scripts/bench caches --arch resnet18 --image-size 128 --data-dir "$data/train" \
        --window-seconds 1 --device cuda --output-dir "$out/small128"
}

# Photographs that are decoded in each epoch.
photos() {
    measure photos 900 scripts/bench series --data-dir "$photos" --output-dir "$out/photos" \
        --only resnet50,efficientnet_b0,resnet18,resnet18-8
}

# From the launch to the first step: of a run that is compiled, and of one that is too short for it.
starts() {
    measure starts 1500 scripts/bench starts --data-dir "$data" --arch resnet50,efficientnet_b0 --cold \
        --device cuda --output-dir "$out/starts"
    measure starts 600 scripts/bench starts --data-dir "$data" --arch resnet50,efficientnet_b0 \
        --flags "--epochs 5" --device cuda --output-dir "$out/starts-short"
}

# 50,000 validation images: the loop alone, on one batch of random images, and with DALI, which decodes them once.
evaluations() {
    local arch loader
    rm -rf "$out/images" "$out"/evaluations-*
    "$PYTHON" - "$photos" "$out/images" <<'PYTHON'
import itertools, pathlib, sys
source, target = map(pathlib.Path, sys.argv[1:])
photos = sorted(path for path in source.rglob("*") if path.is_file())
for split, count in (("train", 2560), ("val", 50000)):
    for number, photo in zip(range(count), itertools.cycle(photos)):
        link = target / split / photo.parent.name / f"{number}{photo.suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(photo)
PYTHON
    for arch in resnet50 efficientnet_b0 resnet18; do
        for loader in synthetic dali; do
            measure evaluations 200 train.py --data-dir "$out/images" --arch $arch --epochs 6 --batch-size 256 \
                --lr 0.1 --no-compile --cache none --loader $loader --device cuda --seed 0 \
                --output-dir "$out/evaluations-$arch-$loader"
        done
    done
    "$PYTHON" - "$out" <<'PYTHON' 2>&1 | tee -a "$out/evaluations.log" || failed=1
import json, pathlib, statistics, sys
rows = ["| images/s | first evaluation | median of the others (range) |", "|---|---|---|"]
for path in sorted(pathlib.Path(sys.argv[1]).glob("evaluations-*/metrics.jsonl")):
    metrics = map(json.loads, path.read_text().splitlines())
    rates = [line["val/count"] / line["val/seconds"] for line in metrics if "val/seconds" in line]
    if len(rates) < 2:  # cut off
        continue
    first, *others = rates
    middle = f"{statistics.median(others):,.0f} ({min(others):,.0f} to {max(others):,.0f})"
    rows.append(f"| {path.parent.name.removeprefix('evaluations-')} | {first:,.0f} | {middle} |")
if rows[2:]:
    print(*rows, sep="\n")
PYTHON
}

# Between the last step of an epoch and the first of the next, without evaluations and aside from them; and between two
# image sizes. A step's line is printed as soon as the GPU has done it.
pauses() {
    local status=0
    rm -rf "$out"/pauses-*
    "$PYTHON" - "$out" --data-dir "$data" --arch resnet50 --image-size 128 --val-resize 146 --batch-size 128 --lr 0.1 \
        --device cuda --seed 0 --log-steps 1 <<'PYTHON' 2>&1 | tee -a "$out/pauses.log" || status=$?
import json, pathlib, re, statistics, subprocess, sys, time
out, *flags = sys.argv[1:]

def train(name, *more):
    """The lines of metrics.jsonl, those of steps with `at`, when they were printed, in seconds."""
    folder = pathlib.Path(out, f"pauses-{name}")
    command = [sys.executable, "train.py", *flags, "--output-dir", str(folder), *more]
    print(*command, flush=True)
    launcher, printed = [sys.executable, "-m", "scripts.bench", "launch", "--limit", "200", "--"], []
    with subprocess.Popen(launcher + command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="")
            if re.match(r"epoch \d+/\d+  step ", line):
                printed.append(time.perf_counter())
    if process.returncode:
        sys.exit(process.returncode)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, at in zip((line for line in lines if "train/loss" in line), printed, strict=True):
        line["at"] = at
    return lines

def pauses(lines):
    """Seconds from each epoch's last step to the next epoch's first, aside from the evaluation between them."""
    found, last, evaluation = [], lines[0], 0.0
    for line in lines:
        if "at" not in line:
            evaluation = line["val/seconds"]
            continue
        if line["epoch"] > last["epoch"]:
            found.append(line["at"] - line["seconds"] - last["at"] - evaluation)
        last, evaluation = line, 0.0
    return found

def add_row(name, first, others):
    middle = f"{statistics.median(others):.3f} ({min(others):.3f} to {max(others):.3f})"
    print(f"| {name} | {first:.3f} | {middle} |", flush=True)

alone = pauses(train("without-evaluations", "--epochs", "8", "--eval-every", "8"))
print("| seconds | the first | median of the others (range) |\n|---|---|---|")
add_row("between two epochs, without evaluations", alone[0], alone[1:])
beside = pauses(train("with-evaluations", "--epochs", "8", "--eval-every", "1"))
add_row("between two epochs, aside from evaluations", beside[0], beside[1:])
lines = train("sizes", "--epochs", "3", "--resize-schedule", "0:96,1:112,2:128")
for epoch, size in ((2, 112), (3, 128)):
    first, *others = (line["seconds"] for line in lines if "at" in line and line["epoch"] == epoch)
    add_row(f"a step after the change to {size} px", first, others)
PYTHON
    [[ $status -eq 0 ]] || { echo "pauses: exit $status" | tee -a "$out/table.txt" && failed=1; }
}

# The recipes of Imagenette over their seeds, one after the other.
recipes() {
    local epochs seeds
    for epochs in 5 20 80; do
        seeds=$((epochs == 5 ? 5 : epochs == 20 ? 3 : 2))
        measure recipes 900 scripts/bench recipes --data-dir "$data" --output-dir "$out/recipes-$epochs" \
            --seeds $seeds "$epochs epochs: --device cuda --config configs/imagenette_${epochs}epochs.yaml"
    done
}

# What loader, precision and layout change in accuracy.
feeds() {
    local flags="--arch resnet18 --image-size 128 --val-resize 146 --epochs 10 --batch-size 128 --lr 0.4 --workers 4
        --weight-decay 5e-4 --crop-scale 0.35 --label-smoothing 0.1 --device cuda --cache gpu"
    measure feeds 1500 scripts/bench recipes --data-dir "$data" --output-dir "$out/feeds" --seeds 3 --jobs 3 \
        --flags "$flags" "images on the GPU" "files: --cache none" "torch's loader: --cache none --loader torch" \
        "fp16: --amp fp16" "float32: --amp none" "no CUDA graph: --no-cuda-graph" \
        "two batches of 64 a step: --batch-size 64 --grad-accum-steps 2" \
        "compiled, fused layers: --compile" "compiled, timm's layers: --compile --no-fused-layers"
}

# ResNet-18 alone, and taught by a ResNet-50-D that the same recipe has trained.
distillation() {
    local recipe="--device cuda --config configs/imagenette_20epochs.yaml"
    # shellcheck disable=SC2086  # words
    measure distillation 600 train.py --data-dir "$data" --output-dir "$out/teacher" $recipe
    measure distillation 1500 scripts/bench recipes --data-dir "$data" --output-dir "$out/distillation" --seeds 3 \
        --flags "$recipe --arch resnet18" "alone" "T 4: --teacher $out/teacher" \
        "T 4, W 0.9: --teacher $out/teacher --teacher-weight 0.9" "T 1: --teacher $out/teacher --teacher-temperature 1"
}

for table in "${tables[@]}"; do
    : >"$out/$table.log"
    "$table"
    { echo "## $table" && { grep '^|' "$out/$table.log" || tail -n 12 "$out/$table.log"; }; } >>"$out/table.txt"
done
cat "$out/table.txt"
exit "$failed"
