"""Small real data, flags, comparisons and fixtures for all tests."""

import dataclasses
import gc
import itertools
import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness import Finished, assert_refused, changed_names, list_output, read_checkpoint, read_metrics
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig

if TYPE_CHECKING:
    from tests.object_server import ObjectServer

CLASSES = ("blue", "green", "red")
TINY = (
    "--arch", "test_resnet", "--image-size", "32", "--val-resize", "36", "--workers", "1", "--log-steps", "1",
    "--lr", "0.5", "--device", "cpu", "--cache", "none",
)  # fmt: skip


def write_images(root: Path, counts: Sequence[int], seed: int = 0) -> None:
    """JPEGs of odd sizes, one folder a class, whose color depends on the class; noise makes each unique."""
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
_LEVELS = 5  # of each color


def write_numbered(root: Path) -> Path:
    """`NUMBERED` + 5 JPEGs of one color each, which encodes a training image's number; no crop or flip changes it."""
    for split, count in (("train", NUMBERED), ("val", 5)):
        for number in range(count):
            color = tuple(25 + 51 * (number // _LEVELS**power % _LEVELS) for power in range(3))
            path = root / split / ("even", "odd")[number % 2] / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), color).save(path, quality=95)
    return root


def number_of(color: Sequence[float]) -> int:
    """The number of an image of `write_numbered` from its mean color, 0 to 255."""
    assert all(abs((channel - 25) / 51 - round((channel - 25) / 51)) < 0.15 for channel in color), color
    return sum(round((channel - 25) / 51) * _LEVELS**power for power, channel in enumerate(color))


def pytest_configure() -> None:
    if signal.getsignal(SIGINT) == signal.SIG_IGN:  # as in what a script starts with &; tests send Ctrl-C
        signal.signal(SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's library prints what is left of it


@pytest.hookimpl(trylast=True)  # when -m has left out what it leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of several processes come first on each worker of xdist, so that short ones are left for the end."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("dist")]
    short = [item for item in items if not item.get_closest_marker("dist")]
    ends = [len(short) * worker // workers for worker in range(workers + 1)]
    parts = [long[worker::workers] + short[begin:end] for worker, (begin, end) in enumerate(itertools.pairwise(ends))]
    items[:] = itertools.chain.from_iterable(parts)


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """A garbage collection looks at the objects of one test; all older ones are frozen. It takes a second otherwise."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only data set of 41 + 41 JPEGs in three classes."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def object_server() -> "Iterator[ObjectServer]":
    """A server of S3 for all tests; each uses a prefix of its own."""
    from tests.object_server import ObjectServer  # here, as processes of tests import this module

    with ObjectServer() as server:
        yield server


@pytest.fixture
def cpu() -> DistEnv:
    """A single process on the CPU."""
    return DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def resolved(**values: Any) -> ResolvedConfig:
    """What a run on the CPU would use, where a test gives no other values."""
    config = ResolvedConfig(
        epochs=90,
        batch_size=8,
        decode="fused",
        hw_decoder_load=0.65,
        cache="none",
        prefetch=2,
        val_fraction=0.0,
        val_resize=256,
        val_image_size=values.get("image_size", 224),
        val_crop="center",
        interpolation="bilinear",
        workers=1,
        processes=1,
        num_classes=3,
        task="multiclass",
        loss="cross-entropy",
        label_smoothing=0.1,
        best_by="top1",
        compile=False,
        fused_layers=False,
        cuda_graph=False,
        warmup_epochs=0.0,
        lr=0.256,
        lr_scaling="linear",
        momentum=0.875,
        weight_decay=1 / 32768,
        amp="none",
        device="cpu",
    )
    return dataclasses.replace(config, **values)


@pytest.fixture(scope="session", autouse=True)
def process_settings() -> None:
    """Settings of this process.

    One thread for torch: on busy cores several threads spend most of the time waiting, spinning. And the processes that
    tests start must not inherit that SIGINT is ignored, as it is in a background job.
    """
    torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" in os.environ:  # of the whole set; it imports train while the first tests run
        from tests.forked import start_fork_server

        start_fork_server()
    if signal.getsignal(SIGINT) == signal.SIG_IGN:
        signal.signal(SIGINT, signal.default_int_handler)


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


Main = Callable[[list[str]], int]
Refused = Callable[..., Callable[..., None]]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(*flags)(*fragments)`: `main`, by default train's, must refuse the flags in these words."""
    import train  # here, as processes of tests import this module

    def refused(*flags: object, main: Main = train.main, program: str = "train.py") -> Callable[..., None]:
        return lambda *fragments: assert_refused(call_main(main, flags, capsys), *fragments, program=program)

    return refused


def call_main(main: Main, flags: Sequence[object], capsys: pytest.CaptureFixture[str]) -> Finished:
    """A command line in this process, whose handlers of signals do not stay."""
    words = list(map(str, flags))
    capsys.readouterr()
    before, handlers = list_output(words), {number: signal.getsignal(number) for number in (SIGINT, SIGTERM)}
    status = main(words)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return Finished(status, *capsys.readouterr(), changed_names(before, list_output(words)))


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


def assert_same_run(whole: Path, cut: Path, name: str = "last.pt", without: Sequence[str] = ()) -> None:
    """Weights, moving average, optimizer, random state, losses and evaluations of two runs, to the last bit.

    Parts of a checkpoint that are named in `without` are not compared.
    """
    expected, found = read_checkpoint(whole, name), read_checkpoint(cut, name)
    for part in expected.keys() - {"config", "launch_ids", "run", "saved_at", "seconds", "ranks", *without}:
        assert_same(expected[part], found[part], f"{name}: {part}")
    for one, other in zip(expected["ranks"], found["ranks"], strict=True):
        for part in ("buffers", "random"):
            assert_same(one[part], other[part], f"{name}: {part}")
    assert curve(whole) == curve(cut)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without what depends on the machine."""
    timing = ("images_per_second", "data_wait", "seconds", "checkpoint_seconds", "val/seconds", "gpu_memory_mb")
    return [{name: record[name] for name in record if name not in timing} for record in read_metrics(folder)]
