"""mAP of train.py on images of several labels, beside a plain loop of torch (`tests.multilabel_loop`).

    python -m tests.multilabel_table --images IMAGENETTE --output-dir OUT
    python -m tests.multilabel_table --images IMAGENETTE --output-dir OUT --seeds 1 --epochs 2

Each image is a mosaic of 2 x 2 images of IMAGENETTE/train or /val, of one to four classes. Both train the same network
with AdamW, a cosine after a warmup of a tenth, crops from 0.35 and flips. Prints a row for each seed: mAP after the
last epoch, percent, and seconds of the whole process.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.harness import ROOT, TRAIN

TILE = 112  # pixels
COPIES = 2  # mosaics that an image is in


def write_mosaics(source: Path, root: Path, seed: int = 0) -> None:
    """train.csv and val.csv with their images."""
    random = np.random.default_rng(seed)
    for split in ("train", "val"):
        files = sorted((source / split).glob("*/*"))
        order = np.concatenate([random.permutation(len(files)) for _ in range(COPIES if split == "train" else 1)])
        (root / split).mkdir(parents=True)
        rows = [("file", "label")]
        for number, four in enumerate(order[: len(order) // 4 * 4].reshape(-1, 4)):
            mosaic = Image.new("RGB", (2 * TILE, 2 * TILE))
            for place, index in enumerate(four):
                with Image.open(files[index]) as image:
                    tile = image.convert("RGB").resize((TILE, TILE), Image.Resampling.BICUBIC)
                mosaic.paste(tile, (TILE * (place % 2), TILE * (place // 2)))
            name = f"{split}/{number:05}.jpg"
            mosaic.save(root / name, quality=90)
            rows.append((name, "|".join(sorted({files[index].parent.name for index in four}))))
        with (root / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("tests.multilabel_table", description="mAP beside a plain loop of torch.")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--arch", default="resnet18")
    for name, default in (("seeds", 3), ("size", 128), ("epochs", 30), ("batch", 64), ("workers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.001)
    given = parser.parse_args(argv)
    root = given.output_dir / "mosaics"
    if not root.exists():
        write_mosaics(given.images, root)
    print("| seed | Brisk | s | plain loop | s |\n|---|---|---|---|---|")
    for seed in range(given.seeds):
        folder = given.output_dir / f"brisk-{seed}"
        words = f"--arch {given.arch} --image-size {given.size} --epochs {given.epochs} --batch-size {given.batch}"
        words += f" --optimizer adamw --lr {given.lr} --lr-scaling none --weight-decay 0.05 --crop-scale 0.35"
        words += f" --warmup-epochs {given.epochs / 10} --workers {given.workers} --seed {seed}"
        begin = time.monotonic()
        command = [sys.executable, TRAIN, "--data-dir", root, "--output-dir", folder, *words.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        own, seconds = json.loads((folder / "summary.json").read_text())["map"], time.monotonic() - begin
        options = {name: getattr(given, name) for name in ("arch", "size", "epochs", "batch", "lr", "workers")}
        begin = time.monotonic()
        loop = [sys.executable, "-m", "tests.multilabel_loop", root, json.dumps(options | {"seed": seed})]
        done = subprocess.run(loop, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        row = (
            seed,
            f"{own:.2f}",
            f"{seconds:.0f}",
            f"{json.loads(done.stdout)[-1]:.2f}",
            f"{time.monotonic() - begin:.0f}",
        )
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
