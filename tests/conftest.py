"""Small real data and real launches, shared by the tests."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from utils.distributed import DistEnv

ROOT = Path(__file__).resolve().parent.parent
CLASSES = ("blue", "green", "red")
TINY = (
    "--arch", "test_resnet", "--image-size", "32", "--val-resize", "36", "--workers", "1", "--log-steps", "1",
    "--lr", "0.5", "--device", "cpu", "--cache", "none",
)  # fmt: skip


def write_images(root: Path, counts: Sequence[int], seed: int = 0) -> None:
    """JPEGs of odd sizes, one folder a class, whose classes can be told apart by colour; noise makes each unique."""
    random = np.random.default_rng(seed)
    for label, (name, count) in enumerate(zip(CLASSES, counts, strict=True)):
        (root / name).mkdir(parents=True)
        for index in range(count):
            height, width = random.integers(33, 80, size=2)
            pixels = random.integers(0, 160, size=(height, width, 3), dtype=np.uint8)
            pixels[..., 2 - label] += 90
            Image.fromarray(pixels).save(root / name / f"{name}-{index:03}.jpg", quality=90)


def write_data(root: Path, train: Sequence[int] = (14, 14, 13), val: Sequence[int] = (14, 14, 13)) -> Path:
    """A data set of 41 + 41 images (by default): a prime number, that no batch size divides."""
    write_images(root / "train", train, seed=1)
    write_images(root / "val", val, seed=2)
    return root


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only data set of 41 + 41 JPEGs in three classes."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def cpu() -> DistEnv:
    """A single process on the CPU."""
    return DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


@dataclasses.dataclass
class Finished:
    """What a launch left behind."""

    status: int
    out: str
    err: str


def command(processes: int) -> list[str]:
    """The launcher of train.py: plain Python, or torchrun."""
    if processes == 1:
        return [sys.executable, str(ROOT / "train.py")]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*run, str(ROOT / "train.py")]


def environment() -> dict[str, str]:
    """One thread per process (two cores are shared by up to four), and no GPU unless a test asks for it."""
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def launch() -> Callable[..., Finished]:
    """Run train.py to its end: `launch("--epochs", "2", processes=2)`."""

    def run(*flags: str | Path, processes: int = 1, timeout: float = 200) -> Finished:
        words = [*command(processes), *map(str, flags)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def launch_and_end() -> Callable[..., int]:
    """Start train.py and end it with a signal once `when()` is true; returns the launcher's exit status."""

    def run(*flags: str | Path, when: Callable[[], bool], number: int = signal.SIGKILL, processes: int = 1) -> int:
        process = subprocess.Popen([*command(processes), *map(str, flags)], env=environment())
        try:
            deadline = time.monotonic() + 120
            while not when():
                assert process.poll() is None, f"ended by itself with {process.returncode}"
                assert time.monotonic() < deadline, "the moment to end it never came"
                time.sleep(0.002)
            if number == signal.SIGKILL:
                kill_tree(process.pid)
            else:
                process.send_signal(number)  # torchrun passes it on
            return process.wait(timeout=60)
        finally:
            kill_tree(process.pid)
            process.wait()

    return run


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all below it; torchrun's workers have sessions of their own and would live on."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def read_checkpoint(output_dir: Path, name: str = "last.pt") -> dict[str, Any]:
    """A checkpoint, read as the trainer does."""
    loaded: dict[str, Any] = torch.load(output_dir / name, map_location="cpu", weights_only=True)
    return loaded


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal to the last bit, through all nesting."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), f"{where}: differ by {(left.double() - right.double()).abs().max()}"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert left == right, where
