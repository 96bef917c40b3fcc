"""The verdict of a benchmark: what limits training on these images with this machine, and what DALI gains or costs.

The diagnosed loader is the DALI path that trains fastest (without one, the fastest loader). `share` is its training
rate over that of the same step on synthetic images. The noise is the larger spread of the two. In this order:

- `share` is 0.98 or more: compute-bound.
- The loader alone is as fast as the synthetic step or faster, and at most half of what is missing was spent waiting
  for input: compute-bound. What is missing is the cost of loading on a device that decodes and trains; a faster disk
  or loader would not remove it.
- `share` is below 0.98 by no more than the noise: balanced, without a limit, as the measurement cannot decide.
- Else input-bound.

Where compute-bound, the limit is the GPU, or the CPU threads of a machine without one. Where input-bound, the limit is
the first of these that holds:

- Contention, beside a GPU, if the loader alone is at least 1.5 times as fast as the synthetic step: it is late only
  when both run, by what they share.
- The CPU threads, for images that were decoded once.
- The disk, if reading the files without decoding them, by as many readers as the loader has, is less than 1.2 times as
  fast as the loader.
- The decoder, with full decode on a GPU that has hardware decoders: they decode nine JPEGs in ten, unless the images
  are small, and CPU threads that look busy wait for them.
- The CPU threads, if 0.8 of those that the loader can use, the cores or `--workers` if these are fewer, are busy while
  it runs alone.
- The decoder.

A claim about DALI is made where the windows of two loaders do not overlap, or where what was measured once differs by
1.2 times or more.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Literal

from utils.options.sizes import ImageSize, sides_of
from utils.text import count

Bound = Literal["input", "compute", "balanced"]
Limit = Literal["decoder", "cpu threads", "disk", "gpu", "contention"]
COMPUTE_BOUND_SHARE = 0.98  # of the synthetic rate
CLEAR_RATIO = 1.2  # from which two values that were measured once differ
AMPLE_RATIO = 1.5  # of a loader alone to the synthetic step
BUSY_SHARE = 0.8  # of the CPU threads that a loader can use
MAX_NOISE = 0.15  # without a warning
MIN_IMAGES = 100  # without a warning
SYNTHETIC = "synthetic images"
CACHED = "cached"
TITLES = {
    "dali-fused": "DALI, fused decode",
    "dali-full": "DALI, full decode",
    "cached": "images decoded once",
    "stock": "DALI's own reader and iterator",
    "torch": "torch's DataLoader",
    "timm": "timm's loader",
}
FLAGS = {
    "dali-fused": "--loader dali --decode fused",
    "dali-full": "--loader dali --decode full",
    "cached": "--loader dali --cache auto",
    "stock": "--loader stock",
    "torch": "--loader torch",
}


@dataclasses.dataclass(frozen=True)
class Rate:
    """Images per second in each window of a measurement; as text, their median and range."""

    windows: tuple[float, ...]

    @property
    def median(self) -> float:
        """Images per second."""
        return statistics.median(self.windows)

    @property
    def spread(self) -> float:
        """Half the range of the windows, as a share of their median."""
        return (max(self.windows) - min(self.windows)) / 2 / self.median

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({min(self.windows):,.0f} to {max(self.windows):,.0f})"


@dataclasses.dataclass(frozen=True)
class LoaderMeasurement:
    """What was measured of one loader.

    Attributes:
        name: a key of `TITLES`.
        alone, training: rates of the loader alone, and of the training step with its batches.
        cpu_seconds: CPU time per 1,000 images, alone, worker processes included.
        cores_busy: CPU seconds per second, alone.
        data_wait: share of the training time in which the device waited for input, 0 to 1.
        first_batch: seconds from opening the loader to its first batch on the device.
        gpu_memory: MB on the GPU that opening it took; None without a GPU.
    """

    name: str
    alone: Rate
    training: Rate
    cpu_seconds: float
    cores_busy: float
    data_wait: float
    first_batch: float
    gpu_memory: float | None


@dataclasses.dataclass(frozen=True)
class Measurements:
    """All that was measured.

    Attributes:
        num_images: different ones.
        generated: whether the benchmark generated them.
        image_width, image_height: means, pixels.
        image_size: of the network's input.
        workers: CPU threads of each loader.
        cores: CPU threads that this process may run on.
        on_gpu: whether the step runs on a GPU.
        jpeg_engines: hardware JPEG decoders of that GPU; 0 if the images are too small for them.
        unused: flags that are not in use and would make the step faster.
        would_cache: whether train.py would keep the images decoded, as the loader `CACHED` does.
        synthetic: the training step on a synthetic batch.
        files: reading the files without decoding them, with as many readers as the diagnosed loader.
        loaders: at least one.
    """

    num_images: int
    generated: bool
    image_width: float
    image_height: float
    image_size: ImageSize
    workers: int
    cores: int
    on_gpu: bool
    jpeg_engines: int
    unused: tuple[str, ...]
    would_cache: bool
    synthetic: Rate
    files: Rate
    loaders: tuple[LoaderMeasurement, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the measurements mean.

    Attributes:
        bound, share, limit: see the module; `limit` is None where balanced.
        loader: name of the diagnosed loader.
        summary: sentences for people: the cause, then the evidence.
        advice: the remedies, a sentence each; may be empty.
        where_dali_wins, where_dali_loses, warnings: sentences, too.
    """

    bound: Bound
    share: float
    limit: Limit | None
    loader: str
    summary: tuple[str, ...]
    advice: tuple[str, ...]
    where_dali_wins: tuple[str, ...]
    where_dali_loses: tuple[str, ...]
    warnings: tuple[str, ...]


def diagnose(measurements: Measurements) -> Verdict:
    """Apply the rules above."""
    dali = [loader for loader in measurements.loaders if loader.name.startswith("dali")]
    loader = max(dali or measurements.loaders, key=lambda loader: loader.training.median)
    share = loader.training.median / measurements.synthetic.median
    bound = _bound(measurements, loader, share)
    limit: Limit | None = None
    if bound == "compute":
        limit = "gpu" if measurements.on_gpu else "cpu threads"
    elif bound == "input":
        limit = _input_limit(measurements, loader)
    claims = list(_claims(loader, measurements.loaders)) if dali else []
    nowhere = ("nowhere measured here",)
    return Verdict(
        bound=bound,
        share=share,
        limit=limit,
        loader=loader.name,
        summary=(
            _cause(measurements, bound, limit),
            *_evidence(measurements, loader, bound, limit),
            *_of_decoded_images(measurements, loader),
        ),
        advice=(*_best_loader(measurements), *_remedies(measurements, loader, bound, limit)),
        where_dali_wins=tuple(text for wins, text in claims if wins) or nowhere,
        where_dali_loses=tuple(text for wins, text in claims if not wins) or nowhere,
        warnings=tuple(_warnings(measurements, loader)),
    )


def _bound(measurements: Measurements, loader: LoaderMeasurement, share: float) -> Bound:
    in_time = loader.data_wait <= max(1 - COMPUTE_BOUND_SHARE, (1 - share) / 2)
    if share >= COMPUTE_BOUND_SHARE or (loader.alone.median >= measurements.synthetic.median and in_time):
        return "compute"
    return "balanced" if COMPUTE_BOUND_SHARE - share <= _noise(measurements, loader) else "input"


def _noise(measurements: Measurements, loader: LoaderMeasurement) -> float:
    return max(loader.training.spread, measurements.synthetic.spread)


def _usable(measurements: Measurements) -> int:
    """CPU threads that can be busy with a loader at the same time."""
    return min(measurements.workers, measurements.cores)


def _input_limit(measurements: Measurements, loader: LoaderMeasurement) -> Limit:
    if measurements.on_gpu and loader.alone.median >= AMPLE_RATIO * measurements.synthetic.median:
        return "contention"
    if loader.name == CACHED:
        return "cpu threads"
    if measurements.files.median < CLEAR_RATIO * loader.alone.median:
        return "disk"
    if loader.name in ("dali-full", "stock") and measurements.jpeg_engines:
        return "decoder"
    return "cpu threads" if loader.cores_busy >= BUSY_SHARE * _usable(measurements) else "decoder"


def is_same(training: Rate, synthetic: Rate) -> bool:
    """Whether a training rate differs from that of the synthetic step by no more than the noise.

    The step is never faster on real images, so that a higher rate is noise too.
    """
    return round(training.median / synthetic.median + max(training.spread, synthetic.spread), 3) >= 1


def show_share(training: Rate, synthetic: Rate) -> str:
    """A training rate over that of the synthetic step: in percent, or "no difference"."""
    return "no difference" if is_same(training, synthetic) else f"{training.median / synthetic.median:.1%}"


def _cause(measurements: Measurements, bound: Bound, limit: Limit | None) -> str:
    if bound == "balanced":
        return "The limit is not known: the noise of the measurement is as large as the difference."
    step = "the GPU" if measurements.on_gpu else "the training step on the CPU"
    causes = {
        "disk": "reading the files",
        "cpu threads": "the CPU threads of the loader",
        "decoder": "decoding",
        "contention": "contention between loader and step",
    }
    return f"Training is limited by {causes[str(limit)] if bound == 'input' else step}."


def _evidence(
    measurements: Measurements, loader: LoaderMeasurement, bound: Bound, limit: Limit | None
) -> Iterator[str]:
    share = loader.training.median / measurements.synthetic.median
    same, shown = (compare(loader.training, measurements.synthetic) for compare in (is_same, show_share))
    yield f"Training runs at {loader.training.median:,.0f} images/s with {TITLES[loader.name]}."
    synthetic = f"The same step runs at {measurements.synthetic.median:,.0f} images/s on synthetic images"
    yield f"{synthetic}: {shown}." if same else f"{synthetic}; training reaches {shown} of that."
    yield f"The loader alone delivers {loader.alone.median:,.0f} images/s."
    if bound == "balanced":
        yield f"The range of the windows is {2 * _noise(measurements, loader):.1%} of their median."
    if bound == "compute" and share < COMPUTE_BOUND_SHARE and not same:
        yield f"Loading costs {1 - share:.1%}, as it shares the device with the step."
    if bound == "input":
        yield f"Training would be {1 / share:.2f} x as fast with a loader that is never late."
        if limit != "disk":
            threads = count(_usable(measurements), "CPU thread")
            yield f"The loader alone keeps {loader.cores_busy:.1f} of {threads} busy."
        if limit in ("disk", "decoder"):
            yield f"The files can be read, not decoded, at {measurements.files.median:,.0f} a second."
        if limit == "contention":
            yield "The loader is late only beside the step: both use the GPU's queues, its driver and the CPU threads."


def _of_decoded_images(measurements: Measurements, diagnosed: LoaderMeasurement) -> Iterator[str]:
    """What keeping them decoded gains, beside the files that were diagnosed."""
    for loader in measurements.loaders:
        if loader.name != CACHED or loader is diagnosed:
            continue
        memory, flag = ("on the GPU", "gpu") if measurements.on_gpu else ("in memory", "host")
        by = "train.py keeps them there by itself" if measurements.would_cache else f"--cache {flag} keeps them there"
        rate, share = loader.training.median, show_share(loader.training, measurements.synthetic)
        yield f"Your images fit {memory}, decoded, and {by}: {rate:,.0f} images/s, {share} of the synthetic step."


def _remedies(
    measurements: Measurements, loader: LoaderMeasurement, bound: Bound, limit: Limit | None
) -> Iterator[str]:
    if bound == "balanced":
        yield "Measure again on a quiet machine, or with a longer --window-seconds."
        return
    if measurements.unused and (bound == "compute" or limit == "contention"):
        yield f"Add {', '.join(measurements.unused)}."
    if bound == "compute":
        yield "Use a smaller --arch or a smaller --image-size."
    elif limit == "contention":
        yield "Leave CUDA_DEVICE_MAX_CONNECTIONS unset."
        yield "See that nothing else runs on this GPU and on these cores."
    else:
        yield from _input_remedies(measurements, loader, limit)


def _input_remedies(measurements: Measurements, loader: LoaderMeasurement, limit: Limit | None) -> Iterator[str]:
    workers, cores = measurements.workers, measurements.cores
    if limit == "disk":
        yield "Copy the images to a local disk, or into memory (/dev/shm) if they fit."
    if limit == "cpu threads" and not _all_threads_busy(measurements, loader):
        yield f"Give --workers more than {workers}: the process may run on {count(cores, 'CPU thread')}."
    elif limit == "cpu threads":
        yield f"Give the process more CPU threads, if the machine has more: all {cores} are in use."
    if min(measurements.image_width, measurements.image_height) > 1.5 * max(sides_of(measurements.image_size)):
        yield (
            f"Store the images smaller: they are {measurements.image_width:.0f} x {measurements.image_height:.0f} px "
            f"on average, for an input of {measurements.image_size} px."
        )


def _all_threads_busy(measurements: Measurements, loader: LoaderMeasurement) -> bool:
    """Whether training leaves no CPU thread for more workers: the loader uses them, and without a GPU the step."""
    share = loader.training.median / measurements.synthetic.median
    by_loader = loader.cores_busy * loader.training.median / loader.alone.median
    by_step = 0.0 if measurements.on_gpu else measurements.cores * share
    return measurements.workers >= measurements.cores or by_loader + by_step >= BUSY_SHARE * measurements.cores


def _best_loader(measurements: Measurements) -> Iterator[str]:
    if measurements.would_cache:
        return
    usable = [loader for loader in measurements.loaders if loader.name in FLAGS and loader.name != CACHED]
    best = max(usable, key=lambda loader: loader.training.median, default=None)
    others = [max(loader.training.windows) for loader in usable if loader is not best]
    if best and others and min(best.training.windows) > max(others):
        yield f"Train with {FLAGS[best.name]}, the fastest of the trainer's loaders here."


def _claims(dali: LoaderMeasurement, loaders: tuple[LoaderMeasurement, ...]) -> Iterator[tuple[bool, str]]:
    """Whether DALI wins, and by how much, wherever it differs from another loader."""
    # Which DALI path opens first also loads the library, so what opening costs is the larger of the two.
    paths = [loader for loader in loaders if loader.name.startswith("dali")]
    first_batch = max(loader.first_batch for loader in paths)
    gpu_memory = max(loader.gpu_memory or 0 for loader in paths)
    for other in loaders:
        title = TITLES[other.name]
        if other in paths or other.name == CACHED:
            continue
        rates = {"training": (dali.training, other.training), "loading alone": (dali.alone, other.alone)}
        for what, (by_dali, by_other) in rates.items():
            if min(by_dali.windows) > max(by_other.windows) or max(by_dali.windows) < min(by_other.windows):
                ratio = by_dali.median / by_other.median
                rate = f"{by_dali.median:,.0f} against {by_other.median:,.0f} images/s"
                yield ratio > 1, f"{what}, against {title}: {ratio:.2f} x ({rate})"
        for what, cost_of_dali, cost_of_other, min_difference, digits, unit in (
            ("CPU time per 1,000 images", dali.cpu_seconds, other.cpu_seconds, 0.01, ".2f", "s"),
            ("time to the first batch", first_batch, other.first_batch, 0.2, ".1f", "s"),
            ("GPU memory of the loader", gpu_memory, other.gpu_memory or 0, 50, ",.0f", "MB"),
        ):
            low, high = sorted((cost_of_dali, cost_of_other))
            if high >= CLEAR_RATIO * low and high - low >= min_difference:
                costs = f"{cost_of_dali:{digits}} against {cost_of_other:{digits}} {unit}"
                yield cost_of_dali < cost_of_other, f"{what}, against {title}: {costs}"


def _warnings(measurements: Measurements, loader: LoaderMeasurement) -> Iterator[str]:
    if measurements.num_images < MIN_IMAGES:
        images = count(measurements.num_images, "image")
        yield f"Only {images}: the measurements mean little; give {MIN_IMAGES} or more."
    if measurements.would_cache and all(loader.name != CACHED for loader in measurements.loaders):
        yield f"train.py would keep these images decoded in memory (--cache auto): add --loaders {CACHED}."
    if measurements.generated:
        yield "The images are generated: give --data-dir to measure yours."
    noise = _noise(measurements, loader)
    if noise > MAX_NOISE:
        yield f"The range of the windows is {2 * noise:.0%} of their median: the machine is busy; use a quiet one."
