#!/usr/bin/env bash
# Checks what needs a GPU, in one command: the tests marked gpu, then complete runs on all GPUs of this machine, then a
# table. Exit status 1 if one of them did not end as it should.
#
#   scripts/gpu_check.sh DATA_DIR OUT     # DATA_DIR: Imagenette in ImageFolder layout (train/, val/)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -eq 2 && -d $1/train && -d $1/val ]] || {
    echo "usage: scripts/gpu_check.sh DATA_DIR OUT, where DATA_DIR has train/ and val/" >&2
    exit 2
}
data=$(realpath -- "$1")
out=$(realpath -m -- "$2")
PYTHON=${BRISK_PYTHON:-python3}
export PYTHONUNBUFFERED=1
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir -p "$out"
runs=(resnet50 efficientnet_b0)
for name in tests "${runs[@]}"; do
    rm -f -- "$out/$name.log" "$out/$name.json" # of an earlier call
done
: >"$out/table.txt"
failed=0
cd "$root"

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
torchrun=("$PYTHON")
[[ $gpus -le 1 ]] || torchrun=("$PYTHON" -m torch.distributed.run --standalone "--nproc_per_node=$gpus")

# launch SECONDS [FLAGS...] -- COMMAND: runs a command with a time limit, and ends all its processes.
launch() {
    "$PYTHON" -m scripts.bench launch --limit "$@" 2>&1
}

# add_result NAME STATUS EXPECTED: adds an exit status to the table; an unexpected one makes this script fail.
add_result() {
    local remark=
    [[ $2 -eq $3 ]] || { remark=", not $3" && failed=1; }
    echo "$1: exit $2$remark" >>"$out/table.txt"
    tail -n 1 "$out/table.txt"
}

# train NAME EXPECTED [--terminate-after FILE] -- FLAGS...: a run in a new folder, which should end with EXPECTED;
# its log and its summary are copied to OUT.
train() {
    local name=$1 expected=$2 status=0 launcher_flags=()
    shift 2
    while [[ $1 != -- ]]; do
        launcher_flags+=("$1")
        shift
    done
    shift
    launch 280 "${launcher_flags[@]}" -- "${torchrun[@]}" train.py --data-dir "$data" --output-dir "$work/$name" \
        --val-resize 146 --image-size 128 --crop-scale 0.35 --log-steps 9 "$@" | tee -a "$out/$name.log" || status=$?
    add_result "$name" "$status" "$expected"
    cp "$work/$name/summary.json" "$out/$name.json" 2>/dev/null || echo "$name: no summary yet" >>"$out/table.txt"
}

status=0
marked=gpu
[[ $gpus -gt 1 ]] || marked="gpu and not gpus"
launch 1500 -- "$PYTHON" -m pytest -m "$marked" -q -p no:cacheprovider tests | tee "$out/tests.log" || status=$?
add_result "gpu tests" "$status" 0

train resnet50 0 -- --arch resnet50 --compile --epochs 5 --batch-size 256 --amp bf16 --optimizer adamw --lr 2e-3 --weight-decay 0.05 \
    --warmup-epochs 1

# Stopped by a signal once its first step is logged, then resumed by the same command. An epoch has 36 steps on one
# GPU, 4 on eight.
b0=(--arch efficientnet_b0 --epochs 4 --batch-size 256 --amp fp16 --augment autoaugment --lr 0.25 --warmup-epochs 0.5
    --log-steps 1)
train efficientnet_b0 $((gpus > 1 ? 1 : 143)) --terminate-after "$work/efficientnet_b0/metrics.jsonl" -- \
    "${b0[@]}" # torchrun ends with 1
train efficientnet_b0 0 -- "${b0[@]}"

"$PYTHON" - "$out" "${runs[@]}" <<'PYTHON' | tee -a "$out/table.txt"
import json, pathlib, platform, sys
import torch
gpus = torch.cuda.device_count()
name = torch.cuda.get_device_name() if gpus else "GPUs"
print(f"{gpus} x {name}, torch {torch.__version__}, Python {platform.python_version()}")
for run in sys.argv[2:]:
    path = pathlib.Path(sys.argv[1], f"{run}.json")
    print(run, json.loads(path.read_text()) if path.exists() else "has no summary")
PYTHON
exit "$failed"
