#!/usr/bin/env bash
# From a fresh clone to a trained classifier: installs into .venv, writes 1,797 handwritten digits and trains
# a small ResNet on them with every GPU, or with two CPU processes (half a minute on two cores).
# Expects 99 % top-1 on the 360 validation digits, and fails under 95 %.
#
#   scripts/quickstart.sh                             # everything goes to runs/quickstart
#   scripts/quickstart.sh DIR                         # to DIR
#   CUDA_VISIBLE_DEVICES= scripts/quickstart.sh       # on the CPU, also where there is a GPU
set -euo pipefail
root=runs/quickstart
[[ $# -eq 0 ]] || root=$(realpath -m -- "$1") # before env.sh changes the folder
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[[ $# -le 1 && ${1:-} != -* ]] || die "usage: scripts/quickstart.sh [DIR]"
data_dir=$root/digits
output_dir=$root/run

use_environment requirements.txt
# A second quickstart starts from scratch, but deletes no run on other images.
"$PYTHON" - "$output_dir" "$data_dir" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

output_dir, data_dir = map(Path, sys.argv[1:])
try:
    trained_on = json.loads((output_dir / "config.json").read_text())["data_dir"]
    is_own = os.path.realpath(trained_on) == os.path.realpath(data_dir)
except (OSError, ValueError, LookupError, TypeError):
    is_own = not os.path.lexists(output_dir) or (output_dir.is_dir() and not any(output_dir.iterdir()))
if not is_own:
    message = f"{output_dir} exists and is not from a quickstart: remove it or name another folder"
    print(f"quickstart.sh: {message}", file=sys.stderr)
    sys.exit(2)
PYTHON
"$PYTHON" scripts/make_digits.py "$data_dir"

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')
processes=$((gpus > 0 ? gpus : 2))
threads=$((cores / processes > 0 ? cores / processes : 1))
# 64 images a step over all processes, so that the result does not depend on their number.
batch_size=$((64 / processes > 8 ? 64 / processes : 8))

echo "training on $((gpus > 0 ? gpus : cores)) $([[ $gpus -gt 0 ]] && echo "GPU(s)" || echo "CPU core(s)")," \
    "$processes process(es) of $threads thread(s)"
rm -rf -- "$output_dir"
# Digits have a left and a right, so no flip; a small part of one may be another, so no small crops.
OMP_NUM_THREADS=$threads "$PYTHON" train.py --processes "$processes" \
    --data-dir "$data_dir" --output-dir "$output_dir" --resume none --seed 0 --device auto \
    --arch test_resnet --image-size 32 --val-resize 32 --workers "$((threads < 4 ? threads : 4))" \
    --augment none --hflip 0 --crop-scale 0.6 \
    --epochs 12 --batch-size "$batch_size" --optimizer sgd --lr 0.5 --warmup-epochs 1 \
    --weight-decay 1e-4 --label-smoothing 0.1

"$PYTHON" - "$output_dir" <<'PYTHON'
import json
import os
import sys
from pathlib import Path

output_dir = Path(sys.argv[1])
summary = json.loads((output_dir / "summary.json").read_text())
print(f"\ntop-1 {summary['top1']:.1f} % on the 360 validation digits, trained in {summary['seconds']:.0f} s")
print(f"results: {output_dir}/summary.json, metrics.jsonl, best.pt")
python = os.path.relpath(sys.executable)
print(f"your images: {python} train.py --processes auto --data-dir FOLDER  (with train/CLASS/ and val/CLASS/)")
if summary["top1"] < 95:
    sys.exit(f"quickstart.sh: top-1 is {summary['top1']:.1f} %, expected 95 % or more")
PYTHON
