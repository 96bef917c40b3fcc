"""The verdict of a benchmark: what limits training on these images with this machine, and what DALI is worth there.

The feed that is judged is the DALI path that trains fastest (without one, the fastest feed). `share` is its training
rate over that of the same step on synthetic images; the noise is the larger spread of the two. In this order:

- `share` is 0.98 or more: compute-bound.
- The loader alone is as fast as the synthetic step or faster, and at most half of what is missing was spent waiting
  for input: compute-bound. What is missing is the price of feeding on a device that decodes and trains; a faster disk
  or loader would not pay it.
- `share` is below 0.98 by no more than the noise: balanced, no side can be told, and no limit.
- Else input-bound.

Where compute-bound, the limit is the GPU, or the CPU threads of a machine without one. Where input-bound, beside a GPU,
it is what loader and step share if the loader alone is at least 1.5 times as fast as the synthetic step: it is late
only when both run. Else it is the disk if reading the files without decoding them, by as many readers as the loader
has, is less than 1.2 times as fast as the loader; else the CPU threads if 0.8 of those that the loader can use, the
cores or `--workers` if these are fewer, are busy while it runs alone; else the decoder. With full decode on a GPU that
has hardware decoders it is always these: nine JPEGs in ten are theirs, and CPU threads that look busy wait for them. A
claim about DALI is made where the windows of two loaders do not overlap, or where what was measured once differs by 1.2
times or more.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Literal

Bound = Literal["input", "compute", "balanced"]
Limit = Literal["decoder", "cpu threads", "disk", "gpu", "sharing"]
ENOUGH, CLEARLY, AMPLE, BUSY, NOISY, FEW_IMAGES = 0.98, 1.2, 1.5, 0.8, 0.15, 100
TITLES = {
    "dali-fused": "DALI, fused decode",
    "dali-full": "DALI, full decode",
    "torch": "torch's DataLoader",
    "timm": "timm's loader",
}
FLAGS = {
    "dali-fused": "--loader dali --decode fused",
    "dali-full": "--loader dali --decode full",
    "torch": "--loader torch",
}


@dataclasses.dataclass(frozen=True)
class Rate:
    """Images per second in each window of a measurement."""

    windows: tuple[float, ...]

    @property
    def median(self) -> float:
        """Images per second."""
        return statistics.median(self.windows)

    @property
    def spread(self) -> float:
        """Half the range of the windows, as a share of their median."""
        return (max(self.windows) - min(self.windows)) / 2 / self.median


@dataclasses.dataclass(frozen=True)
class Feed:
    """One loader.

    Attributes:
        name: a key of `TITLES`.
        alone, training: delivering batches to nobody, and to the training step.
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
        generated: whether they are the benchmark's own.
        image_width, image_height: means, pixels.
        image_size: side of the network's input, pixels.
        workers: CPU threads of each loader.
        cores: CPU threads that this process may run on.
        on_gpu: whether the step runs on a GPU.
        jpeg_engines: hardware JPEG decoders of that GPU.
        unused: flags that are not in use and would make the step faster.
        kept: whether train.py would keep the images decoded, which no loader here does.
        synthetic: the training step without a feed.
        files: reading the files without decoding them, with as many readers as the feed that is judged.
        feeds: at least one.
    """

    num_images: int
    generated: bool
    image_width: float
    image_height: float
    image_size: int
    workers: int
    cores: int
    on_gpu: bool
    jpeg_engines: int
    unused: tuple[str, ...]
    kept: bool
    synthetic: Rate
    files: Rate
    feeds: tuple[Feed, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the figures mean, in words and, for programs, in `bound`, `limit` and `share` (see the module) of `feed`.

    `limit` is None where balanced.
    """

    bound: Bound
    share: float
    limit: Limit | None
    feed: str
    summary: tuple[str, ...]
    advice: tuple[str, ...]
    where_dali_wins: tuple[str, ...]
    where_dali_loses: tuple[str, ...]
    warnings: tuple[str, ...]


def diagnose(figures: Measurements) -> Verdict:
    """Apply the rules above."""
    dali = [feed for feed in figures.feeds if feed.name.startswith("dali")]
    feed = max(dali or figures.feeds, key=lambda feed: feed.training.median)
    share = feed.training.median / figures.synthetic.median
    bound = _bound(figures, feed, share)
    limit: Limit | None = None
    if bound == "compute":
        limit = "gpu" if figures.on_gpu else "cpu threads"
        reason, advice = _step_reason(figures, feed, share), _step_advice(figures)
    elif bound == "input":
        limit = _input_limit(figures, feed)
        reason, advice = _input_reason(figures, feed, limit), _input_advice(figures, limit)
    else:
        reason, advice = _noise_reason(figures, feed), _noise_advice()
    claims = list(_claims(feed, figures.feeds)) if dali else []
    nowhere = ("nowhere measured here",)
    return Verdict(
        bound=bound,
        share=share,
        limit=limit,
        feed=feed.name,
        summary=(_outcome(feed, bound, share), reason),
        advice=(*_best_loader(figures), *advice),
        where_dali_wins=tuple(text for wins, text in claims if wins) or nowhere,
        where_dali_loses=tuple(text for wins, text in claims if not wins) or nowhere,
        warnings=tuple(_warnings(figures, feed)),
    )


def _bound(figures: Measurements, feed: Feed, share: float) -> Bound:
    in_time = feed.data_wait <= max(1 - ENOUGH, (1 - share) / 2)
    if share >= ENOUGH or (feed.alone.median >= figures.synthetic.median and in_time):
        return "compute"
    return "balanced" if ENOUGH - share <= _noise(figures, feed) else "input"


def _noise(figures: Measurements, feed: Feed) -> float:
    return max(feed.training.spread, figures.synthetic.spread)


def _usable(figures: Measurements) -> int:
    """CPU threads that can be busy with a loader at the same time."""
    return min(figures.workers, figures.cores)


def _input_limit(figures: Measurements, feed: Feed) -> Limit:
    if figures.on_gpu and feed.alone.median >= AMPLE * figures.synthetic.median:
        return "sharing"
    if figures.files.median < CLEARLY * feed.alone.median:
        return "disk"
    if feed.name == "dali-full" and figures.jpeg_engines:
        return "decoder"
    return "cpu threads" if feed.cores_busy >= BUSY * _usable(figures) else "decoder"


def _outcome(feed: Feed, bound: Bound, share: float) -> str:
    name = {"input": "Input-bound", "compute": "Compute-bound", "balanced": "Balanced, within the noise"}[bound]
    late = f"; with a feed that is never late it would be {1 / share:.2f} x as fast" if bound == "input" else ""
    return (
        f"{name}: fed by {TITLES[feed.name]}, training runs at {feed.training.median:,.0f} images/s, {share:.1%} of "
        f"the same step on synthetic images{late}."
    )


def _speed(figures: Measurements, feed: Feed) -> str:
    return f"alone, the loader delivers {feed.alone.median / figures.synthetic.median:.2f} x what the step takes"


def _step_reason(figures: Measurements, feed: Feed, share: float) -> str:
    device = "The GPU limits" if figures.on_gpu else "The CPU threads limit"
    price = f"; feeding costs {1 - share:.1%}, as it shares the device with the step" if share < ENOUGH else ""
    return f"{device}, with the training step: {_speed(figures, feed)}{price}."


def _step_advice(figures: Measurements) -> Iterator[str]:
    hardware = "" if figures.on_gpu else "a GPU, "
    flags = "".join(f"{flag}, " for flag in figures.unused)
    yield f"The network costs the time: {hardware}{flags}a smaller --arch or a smaller --image-size would speed it up."


def _noise_reason(figures: Measurements, feed: Feed) -> str:
    return (
        f"What limits cannot be told: the range of the windows is {2 * _noise(figures, feed):.1%} of their median, and "
        f"no more than half of that is missing; {_speed(figures, feed)}."
    )


def _noise_advice() -> Iterator[str]:
    yield "Measure again on a quiet machine, or with a longer --window-seconds."


def _input_reason(figures: Measurements, feed: Feed, limit: Limit) -> str:
    speed, files = _speed(figures, feed), figures.files.median
    busy = f"{feed.cores_busy:.1f} of {_usable(figures)} CPU threads are busy meanwhile"
    return {
        "disk": f"The disk limits: {speed}, and the files can be read, not decoded, at only {files:,.0f} a second.",
        "cpu threads": f"The CPU threads limit: {speed}; {busy}.",
        "decoder": f"The decoder limits: {speed}; {busy}, and the files can be read, not decoded, "
        f"{files / feed.alone.median:.1f} x as fast.",
        "sharing": f"What loader and step share limits: {speed}, and is late only beside it, where both take turns in "
        f"the GPU's queues, its driver and the CPU threads; {busy}.",
    }[limit]


def _input_advice(figures: Measurements, limit: Limit) -> Iterator[str]:
    if limit == "disk":
        yield "Copy the images to a local disk, or into memory (/dev/shm)."
    if limit == "cpu threads" and figures.workers < figures.cores:
        yield f"Give --workers more than {figures.workers}: the process may run on {figures.cores} CPU threads."
    elif limit == "cpu threads":
        yield f"Give the process more than {figures.cores} CPU threads, and as many --workers."
    if limit == "sharing":
        flags = "".join(f"try {flag}; " for flag in figures.unused)
        yield f"{flags}leave CUDA_DEVICE_MAX_CONNECTIONS unset; see that nothing else runs on this GPU and these cores."
        return
    if min(figures.image_width, figures.image_height) > 1.5 * figures.image_size:
        yield (
            f"Store the images smaller: they are {figures.image_width:.0f} x {figures.image_height:.0f} px on average, "
            f"for an input of {figures.image_size} px."
        )


def _best_loader(figures: Measurements) -> Iterator[str]:
    usable = [feed for feed in figures.feeds if feed.name in FLAGS and not figures.kept]
    best = max(usable, key=lambda feed: feed.training.median, default=None)
    others = [max(feed.training.windows) for feed in usable if feed is not best]
    if best and others and min(best.training.windows) > max(others):
        yield f"Train with {FLAGS[best.name]}, the fastest of the trainer's loaders here."


def _claims(dali: Feed, feeds: tuple[Feed, ...]) -> Iterator[tuple[bool, str]]:
    """Whether DALI wins, and by what figures, wherever it differs from another loader."""
    # Which DALI path opens first also loads the library, so what opening costs is the larger of the two.
    paths = [feed for feed in feeds if feed.name.startswith("dali")]
    first_batch = max(feed.first_batch for feed in paths)
    gpu_memory = max(feed.gpu_memory or 0 for feed in paths)
    for other in feeds:
        title = TITLES[other.name]
        if other in paths:
            continue
        rates = {"training": (dali.training, other.training), "loading alone": (dali.alone, other.alone)}
        for what, (ours, theirs) in rates.items():
            if min(ours.windows) > max(theirs.windows) or max(ours.windows) < min(theirs.windows):
                ratio = ours.median / theirs.median
                rate = f"{ours.median:,.0f} against {theirs.median:,.0f} images/s"
                yield ratio > 1, f"{what}, against {title}: {ratio:.2f} x ({rate})"
        for what, mine, yours, least, digits, unit in (  # `least`: a difference that is worth a word
            ("CPU time per 1,000 images", dali.cpu_seconds, other.cpu_seconds, 0.01, ".2f", "s"),
            ("time to the first batch", first_batch, other.first_batch, 0.2, ".1f", "s"),
            ("GPU memory of the loader", gpu_memory, other.gpu_memory or 0, 50, ",.0f", "MB"),
        ):
            low, high = sorted((mine, yours))
            if high >= CLEARLY * low and high - low >= least:
                yield mine < yours, f"{what}, against {title}: {mine:{digits}} against {yours:{digits}} {unit}"


def _warnings(figures: Measurements, feed: Feed) -> Iterator[str]:
    if figures.num_images < FEW_IMAGES:
        yield f"Only {figures.num_images} images: the figures mean little; give {FEW_IMAGES} or more."
    if figures.kept:
        yield "train.py would keep these images decoded in memory (--cache auto), which no loader here does."
    if figures.generated:
        yield "The images are generated: give --data-dir to learn about yours."
    noise = _noise(figures, feed)
    if noise > NOISY:
        yield f"The range of the windows is {2 * noise:.0%} of their median: the machine is busy; use a quiet one."
