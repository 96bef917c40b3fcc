"""The loaders that a benchmark compares, timm's among them, and the reading of files without decoding."""

import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import timm
import torch
import torch.utils.data
from torch import Tensor

import models
import pipelines
from utils.benchmark.measure import Case, settle, synchronize
from utils.benchmark.verdict import CACHED, TITLES
from utils.data.augmentation.policies import RATIO
from utils.data.dali import NUM_PIPELINES
from utils.data.images.batch import Batch, TrainLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import mean_decoded_bytes
from utils.data.loaders.sampler import Sampler
from utils.data.loaders.settings import check_cache_fits, choose_loader_settings
from utils.data.reading.reader import READ_THREADS, open_image, read_image
from utils.distributed.machine import inspect_machine
from utils.distributed.process_pool import safe_fork
from utils.distributed.shared_memory import check_shared_memory
from utils.errors import UserError
from utils.network.augment import BatchAugment
from utils.network.gradients import AMP_DTYPES
from utils.options.config import TrainConfig
from utils.options.policies import POLICIES
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of
from utils.targets import Targets
from utils.text import count
from utils.training.run import Run

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
        return open_image(self.manifest.record(index)), int(self.manifest.labels[index])


class TimmLoader:
    """timm's create_loader and its prefetcher: batches whose images are normalized already, in the step's dtype."""

    def __init__(self, run: Run, manifest: Manifest) -> None:
        config = run.config
        mean, std = models.normalization(run.state.model)
        loader = timm.data.create_loader(
            timm.data.ImageDataset(str(manifest.root), reader=_Reader(manifest)),
            input_size=(3, *sides_of(config.image_size)),
            batch_size=config.batch_size,
            is_training=True,
            scale=(config.crop_scale, 1.0),
            ratio=RATIO,
            hflip=config.hflip,
            color_jitter=None,
            auto_augment=POLICIES[config.augment].timm_name or None,
            interpolation=config.interpolation,
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


class Identity(BatchAugment):
    """For batches of TimmLoader, which are normalized and augmented already."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images as they are, and what the labels stand for."""
        return images, self.targets(targets)


class _Bytes(torch.utils.data.Dataset[int]):
    """The encoded size of each file, by reading all of it; 0 for one that cannot be read, which the loaders report."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __getitem__(self, index: int) -> int:
        with contextlib.suppress(OSError):
            return len(read_image(self.manifest.record(index)))
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


@dataclasses.dataclass(frozen=True)
class Loader:
    """An open loader. Attributes as in `Case` and `LoaderMeasurement`."""

    name: str
    stream: TrainLoader
    queue: int
    stride: int
    first_batch: float
    gpu_memory: float | None

    def alone(self) -> Case:
        """The loader without a training step."""
        return Case(f"{TITLES[self.name]}, alone", self.stream.__next__, self.stream, self.queue, self.stride)

    def training(self, run: Run, train_step: TrainStep) -> Case:
        """The step of train.py on batches of the loader."""
        real_run = with_loader(run, self.stream)
        name, meter = f"training with {TITLES[self.name]}", run.state.meter
        return Case(name, lambda: train_step(real_run), self.stream, self.queue, self.stride, meter)


def with_loader(run: Run, stream: TrainLoader) -> Run:
    """The same run, with the same network and optimizer, on batches of `stream`."""
    augment = Identity(run.augment.targets) if isinstance(stream, TimmLoader) else run.augment
    return dataclasses.replace(run, train_loader=stream, augment=augment)


def open_loader(name: str, run: Run, manifest: Manifest, first_batch: int = 0) -> Loader:
    """Open the loader `name` at batch `first_batch` of the run, and consume batches until its queue is in use.

    `stock` begins at the start of an epoch: its order is another anyway. So does `CACHED`, whose `manifest` has each
    image once.
    """
    config, device, sampler = run.config, run.env.device, run.sampler
    workers = config.workers if name in ("torch", "timm") else None
    queue, stride = (PREFETCH * workers + 1, workers) if workers else (config.prefetch + READ_AHEAD, 1)
    mean_image = mean_decoded_bytes(manifest)
    free_before, started = _free_memory(device), time.perf_counter()
    stream: TrainLoader
    if name == "timm":
        stream = TimmLoader(run, manifest)
    else:
        first = 0 if name in ("stock", CACHED) else first_batch
        sampler = dataclasses.replace(sampler, num_images=len(manifest))
        of_loader = config_of_loader(name, run, mean_image)
        stream = pipelines.create_train_loader(of_loader, manifest, sampler, run.env, first)
    with contextlib.ExitStack() as on_failure:  # the workers of torch's loader would delay the end of the process
        on_failure.callback(stream.close)
        next(stream)
        synchronize(device)
        seconds = time.perf_counter() - started
        for _ in range(queue):
            next(stream)
        synchronize(device)
        on_failure.pop_all()
    gpu_memory = max(0, free_before - _free_memory(device)) / 1e6 if device.type == "cuda" else None
    settle(device)
    return Loader(name, stream, queue, stride, seconds, gpu_memory)


def config_of_loader(name: str, run: Run, mean_image: float) -> ResolvedConfig:
    """The run's flags, with those that the loader `name` implies for images of `mean_image` bytes, decoded."""
    if name == "torch":
        return dataclasses.replace(run.config, loader="torch")
    if name == "stock":
        config = dataclasses.replace(run.config, loader="stock")
    else:
        decode: Any = "full" if name == CACHED else name.removeprefix("dali-")
        config = dataclasses.replace(run.config, loader="dali", decode=decode)
    if name == CACHED:
        config = dataclasses.replace(config, cache="gpu" if run.env.device.type == "cuda" else "host")
    unresolved = TrainConfig(decode=config.decode, workers=config.workers)
    choice = choose_loader_settings(unresolved, inspect_machine(run.env), 0, mean_image)
    return dataclasses.replace(config, hw_decoder_load=choice.hw_decoder_load)


def reading_threads(workers: int) -> int:
    """Threads that read files for DALI's training loader, which has `workers` CPU threads that decode.

    They mostly wait, so their number decides what a disk with a high latency delivers. `utils.data.reading.reader` sets
    it for each of the pipelines.
    """
    decoding = [max(1, (workers + pipeline) // NUM_PIPELINES) for pipeline in range(NUM_PIPELINES)]
    return sum(max(READ_THREADS, threads // 2) for threads in decoding)


def open_loaders(
    names: Sequence[str], run: Run, images: Manifest, repeated: Manifest, stack: contextlib.ExitStack
) -> tuple[list[Loader], FilesReader]:
    """Open all, those with worker processes first: a process is best forked before DALI has threads.

    Each starts in another part of the epoch, so that none reads from the page cache what another has just read. The
    files are read by as many readers as the diagnosed loader has: DALI's, if it is one of them. DALI's own reader has
    one thread.

    Args:
        names: keys of `TITLES`.
        run: whose step is timed.
        images: each once.
        repeated: the same, until an epoch is long enough.
        stack: closes all.

    Raises:
        UserError: the images do not fit where `CACHED` keeps them, or are fewer than a batch; or /dev/shm is too small.
    """
    if CACHED in names:
        _check_cache(run, images)
    if by_workers := [name for name in names if name in ("torch", "timm")]:
        others = ",".join(name for name in TITLES if name not in ("torch", "timm", CACHED))
        config = dataclasses.replace(run.config, loader="torch")
        check_shared_memory(config, 0, run.env, loaders=len(by_workers), other=f"--loaders {others}")
    part, workers = run.sampler.batches_per_epoch // (len(names) + 1), run.config.workers
    readers = reading_threads(workers) if any(name.startswith("dali") for name in names) else workers
    readers = 1 if set(names) == {"stock"} else readers
    files = FilesReader(repeated, run.sampler, readers, first_batch=part * len(names))
    stack.callback(files.close)
    loaders = {}
    for name in sorted(names, key=lambda name: name not in ("torch", "timm")):
        manifest = images if name == CACHED else repeated
        loaders[name] = open_loader(name, run, manifest, first_batch=part * names.index(name))
        stack.callback(loaders[name].stream.close)
    return [loaders[name] for name in names], files


def _check_cache(run: Run, images: Manifest) -> None:
    if len(images) < run.config.batch_size:
        raise UserError(
            f"--batch-size {run.config.batch_size}: there {'is' if len(images) == 1 else 'are'} "
            f"{count(len(images), 'image')}; lower it"
        )
    others = ",".join(name for name in TITLES if name != CACHED)
    mean, machine = mean_decoded_bytes(images), inspect_machine(run.env)
    cache = config_of_loader(CACHED, run, mean).cache
    if error := check_cache_fits(cache, machine, round(len(images) * mean), f"give --loaders {others}"):
        raise error


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
