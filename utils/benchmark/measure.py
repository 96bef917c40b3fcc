"""Contestants of a benchmark, and their turns.

All take turns, A B A B, so that a machine that slows down slows all of them. A window is the wall time of a number of
steps, on CUDA between two synchronisations. Loaders fill their queues while others are measured. So before a window
all queues are full and idle; then the contestant's own is drained, two steps are discarded, and what the window shows
is the rate that lasts. A window of a loader with worker processes is a whole number of their rounds, as their batches
come in bursts. The first windows of each, with compilation and the search for fast kernels, only find out how many
steps fill the time that a window is to take.
"""

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import timm
import torch
import torch.utils.data
from torch import Tensor
from tqdm import tqdm

import models
import pipelines
from utils.benchmark.verdict import Feed, Rate
from utils.config import ResolvedConfig, TrainConfig
from utils.data.batch import Batch, TrainLoader
from utils.data.dali import NUM_PIPELINES
from utils.data.manifest import Manifest
from utils.data.policies import RATIO
from utils.data.reader import READ_THREADS
from utils.data.sampler import Sampler
from utils.data.workers import safe_fork
from utils.distributed.process import read_stat
from utils.errors import Stopped
from utils.network.augment import BatchAugment
from utils.network.gradients import AMP_DTYPES
from utils.training.autotune import choose_loader_settings, inspect_machine
from utils.training.metrics import Meter
from utils.training.run import Run

TIMM_POLICIES = {"none": None, "autoaugment": "original", "randaugment": "rand-m9-n2"}
MIN_STEPS, LEAD_IN = 3, 2  # of a window, and discarded before it
TrainStep = Callable[[Run], None]  # of train.py
PREFETCH = 2  # batches that a worker of torch's DataLoader keeps ready, its default
READ_AHEAD = 3  # batches of files that DALI reads before it decodes them


class _Reader:
    """A manifest, as timm's ImageDataset reads it: (open file, label)."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return open(self.manifest.path(index), "rb"), int(self.manifest.labels[index])


class TimmLoader:
    """timm's create_loader and its prefetcher: batches whose images are normalised already, in the step's dtype."""

    def __init__(self, run: Run, manifest: Manifest) -> None:
        config = run.config
        mean, std = models.normalization(run.state.model)
        loader = timm.data.create_loader(
            timm.data.ImageDataset(str(manifest.root), reader=_Reader(manifest)),
            input_size=(3, config.image_size, config.image_size),
            batch_size=config.batch_size,
            is_training=True,
            scale=(config.crop_scale, 1.0),
            ratio=RATIO,
            hflip=config.hflip,
            color_jitter=None,
            auto_augment=TIMM_POLICIES[config.augment],
            interpolation="bilinear",
            mean=mean,
            std=std,
            num_workers=config.workers,
            pin_memory=run.env.device.type == "cuda",
            img_dtype=AMP_DTYPES[config.amp],
            device=run.env.device,
        )
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        with safe_fork():
            first = next(batches)  # starts the workers
        self._batches: Iterator[Any] = itertools.chain([first], batches)

    def __next__(self) -> Batch:
        images, targets = next(self._batches)
        return Batch(images.contiguous(memory_format=torch.channels_last), targets)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self._batches


class Unchanged(BatchAugment):
    """What is left to do on the device for a batch of TimmLoader's: nothing."""

    def __init__(self) -> None:
        pass

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as they are."""
        return images, targets


class _Bytes(torch.utils.data.Dataset[int]):
    """The encoded size of each file, by reading all of it; 0 for one that cannot be read, of which the loaders tell."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __getitem__(self, index: int) -> int:
        with contextlib.suppress(OSError), open(self.manifest.path(index), "rb", buffering=0) as file:
            return len(file.read())
        return 0


class FilesReader:
    """Reads batches of files and drops them, by `readers` processes."""

    def __init__(self, manifest: Manifest, sampler: Sampler, readers: int, first_batch: int) -> None:
        self.readers = readers
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than the cores; they mostly wait
            loader = torch.utils.data.DataLoader(
                _Bytes(manifest),
                batch_sampler=(sampler.indices(batch).tolist() for batch in itertools.count(first_batch)),
                num_workers=readers,
                prefetch_factor=PREFETCH,
                collate_fn=sum,
            )
            with safe_fork():
                self._batches: Iterator[int] = iter(loader)

    def __next__(self) -> int:
        return next(self._batches)

    def close(self) -> None:
        del self._batches


class Stream(Protocol):
    """An endless stream, of batches or of what stands for them."""

    def __next__(self) -> object:
        """The next one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What takes its turn in being measured.

    Attributes:
        name: for the progress bar.
        step: what is timed, one batch.
        stream: what `step` takes its batches from; None if it needs none.
        queue: batches that `stream` may keep ready.
        stride: a window is a multiple of this many steps.
        meter: of the training step.
    """

    name: str
    step: Callable[[], object]
    stream: Stream | None = None
    queue: int = 0
    stride: int = 1
    meter: Meter | None = None


@dataclasses.dataclass(frozen=True)
class Loader:
    """A loader that is open. Attributes as in `Contestant` and `utils.verdict.Feed`."""

    name: str
    stream: TrainLoader
    queue: int
    stride: int
    first_batch: float
    gpu_memory: float | None

    def alone(self) -> Case:
        """Batches for nobody."""
        return Case(f"{self.name} alone", self.stream.__next__, self.stream, self.queue, self.stride)

    def training(self, run: Run, train_step: TrainStep) -> Case:
        """Batches for train.py's step."""
        fed, name = feed(run, self.stream), f"training, {self.name}"
        return Case(name, lambda: train_step(fed), self.stream, self.queue, self.stride, run.state.meter)


def feed(run: Run, stream: TrainLoader) -> Run:
    """The same run, with the same network and optimizer, on batches of `stream`."""
    augment = Unchanged() if isinstance(stream, TimmLoader) else run.augment
    return dataclasses.replace(run, train_loader=stream, augment=augment)


def open_loader(name: str, run: Run, manifest: Manifest, first_batch: int = 0) -> Loader:
    """Open the loader `name` at batch `first_batch` of the run, and take batches until its queue is in use."""
    config, device = run.config, run.env.device
    workers = config.workers if name in ("torch", "timm") else None
    queue, stride = (PREFETCH * workers + 1, workers) if workers else (config.prefetch + READ_AHEAD, 1)
    chosen = run.config if name == "timm" else settings(name, run)
    free, started = _free_memory(device), time.perf_counter()
    stream: TrainLoader
    if name == "timm":
        stream = TimmLoader(run, manifest)
    else:
        stream = pipelines.create_train_loader(chosen, manifest, run.sampler, run.env, first_batch)
    with contextlib.ExitStack() as failing:  # the workers of torch's loader would hold up the end of the process
        failing.callback(stream.close)
        next(stream)
        _synchronize(device)
        seconds = time.perf_counter() - started
        for _ in range(queue):
            next(stream)
        _synchronize(device)
        failing.pop_all()
    taken = max(0, free - _free_memory(device)) / 1e6 if device.type == "cuda" else None
    _settle(device)
    return Loader(name, stream, queue, stride, seconds, taken)


def settings(name: str, run: Run) -> ResolvedConfig:
    """The run's flags, with those that the loader `name` stands for."""
    if name == "torch":
        return dataclasses.replace(run.config, loader="torch")
    decode: Any = name.removeprefix("dali-")
    config = dataclasses.replace(run.config, loader="dali", decode=decode)
    left_open = TrainConfig(decode=decode, workers=config.workers)
    choice = choose_loader_settings(left_open, inspect_machine(run.env), decoded=0)
    return dataclasses.replace(config, hw_decoder_load=choice.hw_decoder_load)


def reading_threads(workers: int) -> int:
    """Threads that read files for DALI's training loader, which has `workers` CPU threads that decode.

    They mostly wait, so their number decides what a disk with a high latency delivers; `pipelines._FileReader` sets it
    for each of the pipelines.
    """
    shares = [max(1, (workers + turn) // NUM_PIPELINES) for turn in range(NUM_PIPELINES)]
    return sum(max(READ_THREADS, share // 2) for share in shares)


def open_loaders(
    names: Sequence[str], run: Run, manifest: Manifest, stack: contextlib.ExitStack
) -> tuple[list[Loader], FilesReader]:
    """Open all, those with worker processes first: a process is best forked before DALI has threads.

    Each starts in its own part of the epoch, so that none finds in memory what another has just read. The files are
    read by as many as read for the loader that the verdict is about: DALI, wherever it is among them.
    """
    part, workers = run.sampler.batches_per_epoch // (len(names) + 1), run.config.workers
    readers = reading_threads(workers) if any(name.startswith("dali") for name in names) else workers
    files = FilesReader(manifest, run.sampler, readers, first_batch=part * len(names))
    stack.callback(files.close)
    loaders = {}
    for name in sorted(names, key=lambda name: name.startswith("dali")):
        loaders[name] = open_loader(name, run, manifest, first_batch=part * names.index(name))
        stack.callback(loaders[name].stream.close)
    return [loaders[name] for name in names], files


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


@dataclasses.dataclass(frozen=True)
class Window:
    """One window of one contestant: wall and CPU time in seconds; `data_wait` a share of the wall time, 0 to 1."""

    steps: int
    seconds: float
    cpu_seconds: float
    data_wait: float


def measure(cases: Sequence[Case], run: Run, windows: int, window_seconds: float) -> list[list[Window]]:
    """`windows` windows of each contestant, in turns, after one of each that is discarded.

    Raises:
        Stopped: a signal came.
    """
    device = run.env.device
    run.state.model.train()
    with tqdm(total=(windows + 1) * len(cases), unit="window", disable=None, hard_exit=False) as bar:

        def turn(case: Case, steps: int) -> Window:
            bar.set_description(case.name)
            window = _window(case, steps, device)
            if run.stop.should_stop():
                raise Stopped
            return window

        def calibrate(case: Case) -> int:
            steps = case.stride
            turn(case, steps)  # compiles
            while (window := turn(case, steps)).seconds < window_seconds / 4:
                steps *= 2
            bar.update()
            wanted = max(MIN_STEPS, window_seconds * steps / window.seconds)
            return math.ceil(wanted / case.stride) * case.stride

        steps = [calibrate(case) for case in cases]
        results: list[list[Window]] = [[] for _ in cases]
        for _ in range(windows):
            for case, count, result in zip(cases, steps, results, strict=True):
                result.append(turn(case, count))
                bar.update()
    return results


def _window(case: Case, steps: int, device: torch.device) -> Window:
    _settle(device)
    if case.stream is not None:
        for _ in range(case.queue + case.stride):
            next(case.stream)
    for _ in range(LEAD_IN):
        case.step()
    _synchronize(device)
    if case.meter is not None:
        case.meter.start()
    started, cpu_started = time.perf_counter(), cpu_seconds()
    for _ in range(steps):
        case.step()
    _synchronize(device)
    seconds, used = time.perf_counter() - started, cpu_seconds() - cpu_started
    data_wait = case.meter.read().data_wait if case.meter is not None else 0.0
    return Window(steps, seconds, used, data_wait)


def _settle(device: torch.device, limit: float = 60.0) -> None:
    """Wait until all queues are full: until this process and its workers have idled for 0.1 s."""
    _synchronize(device)
    deadline, idle = time.monotonic() + limit, 0
    while idle < 2 and time.monotonic() < deadline:
        before = cpu_seconds()
        time.sleep(0.05)
        idle = idle + 1 if cpu_seconds() - before <= 0.01 else 0  # one tick of the clock that counts the workers'


def cpu_seconds() -> float:
    """CPU time of this process and its live worker processes, which no rusage counts before their end."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        assert worker.pid is not None  # it was started
        with contextlib.suppress(OSError):  # it has just ended
            seconds += read_stat(worker.pid).cpu_seconds
    return seconds


def measure_loaders(
    run: Run, train_step: TrainStep, loaders: Sequence[Loader], files: FilesReader, windows: int, window_seconds: float
) -> tuple[Rate, Rate, tuple[Feed, ...]]:
    """Measure the synthetic step, reading the files, and every loader alone and in training, in turns."""
    batch_size = run.config.batch_size
    cases = [
        Case("synthetic step", lambda: train_step(run), meter=run.state.meter),
        Case("files", files.__next__, files, PREFETCH * files.readers, files.readers),
        *(case for loader in loaders for case in (loader.alone(), loader.training(run, train_step))),
    ]
    results = measure(cases, run, windows, window_seconds)
    rates = [Rate(tuple(window.steps * batch_size / window.seconds for window in result)) for result in results]
    feeds = []
    for number, loader in enumerate(loaders):
        alone, training = 2 + 2 * number, 3 + 2 * number
        cpu = sum(window.cpu_seconds for window in results[alone])
        images = batch_size * sum(window.steps for window in results[alone])
        feeds.append(
            Feed(
                name=loader.name,
                alone=rates[alone],
                training=rates[training],
                cpu_seconds=1000 * cpu / images,
                data_wait=statistics.median(window.data_wait for window in results[training]),
                cores_busy=cpu / sum(window.seconds for window in results[alone]),
                first_batch=loader.first_batch,
                gpu_memory=loader.gpu_memory,
            )
        )
    return rates[0], rates[1], tuple(feeds)
