"""Measures what --int8 of scripts/export.py costs and brings; prints a row for each run.

    python -m tests.int8_table runs/imagenet-resnet50 runs/imagenet-efficientnet_b0 --data-dir /data/imagenet

Accuracy is that of all validation images, in ONNX Runtime. Times are milliseconds an image on the CPU, each the
shortest of --repeats, float32 and int8 in turn, with --threads: of one image at a time, and of batches of 32.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.figures import figure
from utils.inference.export.classifier import Classifier
from utils.inference.export.formats import ONNX, Network, example, read_onnx
from utils.inference.export.int8 import BEFORE, measure_loss, quantize
from utils.inference.export.output import write_and_compare
from utils.inference.export.run_images import find_run_images
from utils.inference.export.trained import load_trained
from utils.text import count

BATCHES = (1, 32)


def milliseconds(networks: Sequence[Network], images: Tensor, repeats: int) -> list[float]:
    """An image, of each network."""
    seconds: list[list[float]] = [[] for _ in networks]
    for _ in range(repeats):
        for network, found in zip(networks, seconds, strict=True):
            start = time.perf_counter()
            network(images)
            found.append(time.perf_counter() - start)
    return [1000 * min(found) / len(images) for found in seconds]


def row(path: Path, data_dir: Path | None, threads: Sequence[int], repeats: int) -> list[str]:
    """The cells of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder, trained = Path(name), load_trained(path)
        images, classifier = find_run_images(trained.saved, data_dir, folder), Classifier(trained, "float")
        write_and_compare(trained, "onnx", "float", False, folder, check=False, check_data=None)
        before, after, _ = quantize(trained, classifier, folder, images)
        loss = measure_loss(before, after, classifier, images)
        sizes = [(folder / file).stat().st_size / 1e6 for file in (BEFORE, ONNX)]
        size = trained.config.val_image_size
        cells = [str(path), trained.config.arch, str(size), figure(loss.name).title, str(loss.count)]
        cells += [f"{loss.before:.2f}", f"{loss.after:.2f}", *(f"{each:.1f}" for each in sizes)]
        for number in threads:
            torch.set_num_threads(number)  # of which a session takes as many
            networks = [read_onnx(folder, file) for file in (BEFORE, ONNX)]
            for batch in BATCHES:
                found = milliseconds(
                    networks, example(trained, classifier).repeat(-(-batch // 2), 1, 1, 1)[:batch], repeats
                )
                cells.append(" / ".join(f"{each:.2f}" for each in found))
    return cells


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders or checkpoints")
    parser.add_argument("--data-dir", type=Path, help="their images, if they are elsewhere now")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(argv)
    of_threads = [f"ms, batch {batch}, {count(number, 'thread')}" for number in options.threads for batch in BATCHES]
    of_files = ["float32", "int8", "float32, MB", "int8, MB"]
    header = [
        "run",
        "network",
        "px",
        "figure",
        "images",
        *of_files,
        *(f"{each}: float32 / int8" for each in of_threads),
    ]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for path in options.runs:
        print(f"| {' | '.join(row(path, options.data_dir, options.threads, options.repeats))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
