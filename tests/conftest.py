"""Small real data and real launches, shared by the tests."""

import contextlib
import dataclasses
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from utils.config import ResolvedConfig
from utils.distributed.group import DistEnv

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


NUMBERED = 125
_LEVELS = 5  # of each colour


def write_numbered(root: Path) -> Path:
    """`NUMBERED` + 5 JPEGs of one colour each, which tells a training image's number through every crop and flip."""
    for split, count in (("train", NUMBERED), ("val", 5)):
        for number in range(count):
            colour = tuple(25 + 51 * (number // _LEVELS**power % _LEVELS) for power in range(3))
            path = root / split / ("even", "odd")[number % 2] / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), colour).save(path, quality=95)
    return root


def number_of(colour: Sequence[float]) -> int:
    """The number of an image of `write_numbered` from its mean colour, 0 to 255."""
    assert all(abs((channel - 25) / 51 - round((channel - 25) / 51)) < 0.15 for channel in colour), colour
    return sum(round((channel - 25) / 51) * _LEVELS**power for power, channel in enumerate(colour))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only data set of 41 + 41 JPEGs in three classes."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def cpu() -> DistEnv:
    """A single process on the CPU."""
    return DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def resolved(**values: Any) -> ResolvedConfig:
    """What a run on the CPU would use, where a test gives no other values."""
    config = ResolvedConfig(
        batch_size=8,
        decode="fused",
        hw_decoder_load=0.65,
        cache="none",
        prefetch=2,
        val_resize=256,
        workers=1,
        num_classes=3,
        compile=False,
        fused_layers=False,
        cuda_graph=False,
        warmup_epochs=0.0,
        amp="none",
        device="cpu",
    )
    return dataclasses.replace(config, **values)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For torch in this process: on busy cores several wait for each other, spinning, for most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Newer Pythons put the sockets of multiprocessing into /tmp where the temporary folder has too long a path.
SOCKETS_ARE_ELSEWHERE = hasattr(multiprocessing.util, "_SUN_PATH_MAX")


@pytest.fixture
def long_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of programs that a test starts; no path in it fits a socket."""
    with tempfile.TemporaryDirectory() as short:
        folder = Path(short, "x" * 100)
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        yield folder


@dataclasses.dataclass
class Finished:
    """What a launch left behind."""

    status: int
    out: str
    err: str


def command(processes: int, *of_torchrun: str, program: Path = ROOT / "train.py") -> list[str]:
    """The launcher of train.py: plain Python, or torchrun (always, where it has flags)."""
    if processes == 1 and not of_torchrun:
        return [sys.executable, str(program)]
    flags = of_torchrun or ("--standalone",)
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", *flags, str(program)]


def environment() -> dict[str, str]:
    """One thread per process (two cores are shared by up to four), and no GPU unless a test asks for it."""
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def launch() -> Callable[..., Finished]:
    """Run train.py to its end: `launch("--epochs", "2", processes=2)`."""

    def run(
        *flags: str | Path, processes: int = 1, timeout: float = 200, program: Path = ROOT / "train.py"
    ) -> Finished:
        words = [*command(processes, program=program), *map(str, flags)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


# Command lines of train.py one after the other in one process, which imports once: a list of lists of words comes in,
# the exit statuses go out, what each said stands in files.
SERIES = """
import json, os, sys
import train

folder, commands = sys.argv[1], json.loads(sys.argv[2])
statuses = []
for number, words in enumerate(commands):
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        file = os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
        os.close(file)
    statuses.append(train.main(words))
    sys.stdout.flush()
with open(f"{folder}/statuses", "w") as file:
    json.dump(statuses, file)
"""


@pytest.fixture
def launch_series(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Finished]]:
    """Run train.py once for each tuple of flags, in one process, for tests of what launches leave to each other."""

    def run(*commands: Sequence[Any], timeout: float = 200) -> list[Finished]:
        folder = tmp_path_factory.mktemp("series")
        words = json.dumps([[str(word) for word in words] for words in commands])
        line = [sys.executable, "-c", SERIES, str(folder), words]
        options = environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=options, check=False)
        said = [[(folder / f"{number}.{name}") for name in ("out", "err")] for number in range(len(commands))]
        texts = [[path.read_text() if path.exists() else "" for path in paths] for paths in said]
        assert done.returncode == 0, (done.stderr, texts)
        statuses = json.loads((folder / "statuses").read_text())
        return [Finished(status, *pair) for status, pair in zip(statuses, texts, strict=True)]

    return run


@pytest.fixture
def launch_and_end() -> Callable[..., int]:
    """Start train.py and end it with a signal once `when()` is true; returns the launcher's exit status."""

    def run(
        *flags: str | Path,
        when: Callable[[], bool],
        number: int = signal.SIGKILL,
        processes: int = 1,
        rank: int | None = None,
    ) -> int:
        process = subprocess.Popen([*command(processes), *map(str, flags)], env=environment())
        try:
            deadline = time.monotonic() + 120
            while not when():
                assert process.poll() is None, f"ended by itself with {process.returncode}"
                assert time.monotonic() < deadline, "the moment to end it never came"
                time.sleep(0.002)
            if rank is not None:
                os.kill(workers_of(process.pid)[rank], number)
            elif number == signal.SIGKILL:
                kill_tree(process.pid)
            else:
                process.send_signal(number)  # torchrun passes it on
            return process.wait(timeout=60)
        finally:
            kill_tree(process.pid)
            process.wait()

    return run


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all below it; torchrun's workers have sessions of their own and would live on."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def workers_of(launcher: int) -> dict[int, int]:
    """Rank -> process id of the trainers below a launcher, as far as they have started."""
    found: dict[int, int] = {}
    for pid in descendants(launcher):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            if rank and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.setdefault(rank[0], pid)  # before its own children
    return found


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, parents first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def born(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it is gone or waits for its parent to note its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "XZ" else int(fields[19])


def identify(pids: Iterable[int]) -> dict[int, int]:
    """Process id -> when it started, of those that live: an id alone may be another process's tomorrow."""
    return {pid: when for pid in pids if (when := born(pid)) is not None}


def alive(processes: dict[int, int]) -> list[int]:
    """Which of the `processes`, as `identify` gave them, still live."""
    return [pid for pid, when in processes.items() if born(pid) == when]


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
