"""Hundreds of epochs: memory, open files and threads do not grow.

SOAK_OUTPUT=FOLDER writes the measurements to soak.json and soak.png there.
"""

import json
import os
import statistics
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests.conftest import TINY
from tests.harness import Started, start

EPOCHS, EARLY = 300, 20
FLAGS = (*TINY, "--lr", "0.01", "--batch-size", "4", "--epochs", str(EPOCHS), "--augment", "trivialaugment",
         "--ema-decay", "0.9", "--mixup", "0.2", "--log-steps", "5", "--tensorboard")  # fmt: skip
GROWTH = {"memory": 16, "handles": 0, "threads": 0, "shared files": 0}  # allowed between the medians; MiB, and counts


def measure(worker: int) -> dict[str, float]:
    """What one process holds now. Memory is in MiB, without mapped files."""
    folder = Path(f"/proc/{worker}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "memory": int(status["RssAnon"].split()[0]) / 1024,
        "handles": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
        "shared files": len(os.listdir("/dev/shm")),
    }


def watch(started: Started, metrics: Path) -> dict[int, list[dict[str, float]]]:
    """Measurements of every worker, by epoch, until the run ends."""
    found: dict[int, list[dict[str, float]]] = {}
    while started.process.poll() is None:
        time.sleep(0.05)
        records = metrics.read_text().count("val/top1") if metrics.exists() else 0
        if records and records not in found:
            found[records] = [measure(pid) for _, pid in sorted(started.ranks().items())]
    return found


def plot(found: dict[int, list[dict[str, float]]], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    for axis, (name, unit) in zip(axes, {"memory": "MiB", "handles": "", "threads": ""}.items(), strict=True):
        for rank in range(2):
            axis.plot(list(found), [each[rank][name] for each in found.values()], label=f"rank {rank}")
        axis.set(xlabel="epoch", ylabel=unit, title=name)
        axis.set_ylim(0, 1.2 * max(each[name] for ranks in found.values() for each in ranks))
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_nothing_grows(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with start("--data-dir", data, *FLAGS, "--output-dir", output, processes=2) as started:
        found = watch(started, output / "metrics.jsonl")
        assert started.end().status == 0
    found = {epoch: each for epoch, each in found.items() if len(each) == 2}
    if "SOAK_OUTPUT" in os.environ:
        folder = Path(os.environ["SOAK_OUTPUT"])
        (folder / "soak.json").write_text(json.dumps(found))
        plot(found, folder / "soak.png")
    for rank in range(2):
        for name, allowed in GROWTH.items():
            early, late = (
                statistics.median(each[rank][name] for epoch, each in found.items() if abs(epoch - middle) <= 10)
                for middle in (EARLY, EPOCHS - 11)
            )
            assert late <= early + allowed, f"{name} of rank {rank}: {early} at epoch {EARLY}, {late} at the end"
