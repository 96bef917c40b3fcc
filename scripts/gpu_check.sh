#!/usr/bin/env bash
# Everything that can only be seen on GPUs, in one command: the tests marked gpu, then whole runs on every GPU of
# this machine, then a table.
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
cd "$root"

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
launcher=("$PYTHON")
[[ $gpus -le 1 ]] || launcher=("$PYTHON" -m torch.distributed.run --standalone "--nproc_per_node=$gpus")

# train NAME FLAGS...: a run in its own folder, its log and files kept in OUT. Adds its exit status to the table.
train() {
    local name=$1 status=0
    shift
    timeout 280 "${launcher[@]}" train.py --data-dir "$data" --output-dir "$work/$name" --val-resize 146 \
        --image-size 128 --crop-scale 0.35 --log-steps 9 "$@" 2>&1 | tee -a "$out/$name.log" || status=$?
    echo "$name: exit $status" | tee -a "$out/table.txt"
    cp "$work/$name/summary.json" "$out/$name.json" 2>/dev/null || echo "$name: no summary yet" >>"$out/table.txt"
}

: >"$out/table.txt"
status=0
wanted=gpu
[[ $gpus -gt 1 ]] || wanted="gpu and not gpus"
timeout 1500 "$PYTHON" -m pytest -m "$wanted" -q -p no:cacheprovider tests/test_gpu.py tests/test_gpus.py tests/test_kernels.py 2>&1 | tee "$out/tests.log" || status=$?
echo "gpu tests: exit $status" | tee -a "$out/table.txt"

train resnet50 --arch resnet50 --epochs 5 --batch-size 256 --amp bf16 --optimizer adamw --lr 2e-3 --weight-decay 0.05 \
    --warmup-epochs 1

# Stopped in mid-epoch by a signal, then resumed by the same command.
b0=(--arch efficientnet_b0 --epochs 1 --batch-size 256 --amp fp16 --augment autoaugment --lr 0.25 --warmup-epochs 0.5)
(
    until [[ -f $work/efficientnet_b0/metrics.jsonl && $(wc -l <"$work/efficientnet_b0/metrics.jsonl") -ge 1 ]]; do
        sleep 0.2
    done
    pkill -TERM -f "train.py --data-dir $data --output-dir $work/efficientnet_b0"
) &
watcher=$!
train efficientnet_b0 "${b0[@]}"
kill "$watcher" 2>/dev/null || : # it would wait for ever for a run that failed before its first line
train efficientnet_b0 "${b0[@]}"

"$PYTHON" - "$out" <<'PYTHON' | tee -a "$out/table.txt"
import json, pathlib, platform, sys
import torch
print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    print(path.stem, json.loads(path.read_text()))
PYTHON
