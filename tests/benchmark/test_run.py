"""The verdict on a loader or a network that is truly slow. Nothing is timed exactly."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train import train_step
from utils.benchmark.images import read_images
from utils.benchmark.loaders import open_loaders
from utils.benchmark.run import collect, describe
from utils.benchmark.verdict import Verdict, diagnose
from utils.data.images.batch import Batch, TrainLoader
from utils.data.images.manifest import Manifest
from utils.distributed.group import DistEnv
from utils.training.run import Run

FACTS = {
    "num_images": 41, "generated": False, "image_width": 56.0, "image_height": 56.0, "image_size": 32, "workers": 1,
    "cores": 1, "device": "cpu", "jpeg_engines": 0, "kept": False, "windows": 1, "window_seconds": 0.1,
}  # fmt: skip


class Slow:
    """A loader of 20 images a second at most, which prepares a batch while the step works on the one before."""

    def __init__(self, stream: TrainLoader) -> None:
        self.stream = stream
        self.ready = time.monotonic()

    def __next__(self) -> Batch:
        batch = next(self.stream)
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.ready = time.monotonic() + len(batch.targets) / 20
        return batch

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def close(self) -> None:
        self.stream.close()


def measured(run: Run, manifest: Manifest, slow: bool) -> Verdict:
    """The verdict on a slow loader, or on one that is never late."""
    with contextlib.ExitStack() as stack:
        (loader,), files = open_loaders(("dali-fused",), run, manifest, manifest, stack)
        stream = Slow(loader.stream) if slow else run.train_loader
        return diagnose(collect(FACTS, run, train_step, [dataclasses.replace(loader, stream=stream, queue=1)], files))


@pytest.mark.parametrize(("batch_size", "expected"), [(8, True), (64, False)])
def test_images_that_fill_no_batch_are_not_kept(
    data: Path,
    cpu: DistEnv,
    tmp_path: Path,
    opened: Callable[..., tuple[Run, Manifest]],
    batch_size: int,
    expected: bool,
) -> None:
    """A benchmark of all loaders leaves them out, instead of refusing so few images."""
    run, _ = opened(batch_size=batch_size)
    images = read_images(data, tmp_path, cpu)
    assert 8 < len(images) < 64
    assert describe(run, images, False, windows=5, window_seconds=1.0)["kept"] == expected


@pytest.mark.slow
def test_jpeg_engines_count_where_they_decode(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    small, manifest = opened()
    large = dataclasses.replace(small, config=dataclasses.replace(small.config, hw_decoder_load=0.9))
    with contextlib.ExitStack() as stack:
        loaders, files = open_loaders(("dali-fused",), small, manifest, manifest, stack)
        found = [collect(FACTS | {"jpeg_engines": 7}, run, train_step, loaders, files) for run in (small, large)]
    assert [measurements.jpeg_engines for measurements in found] == [0, 7]


@pytest.mark.slow  # its loader sleeps
def test_verdict_changes_sides(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    # The light network is some 20 times as fast as the slow loader, the heavy one 5 times slower; and one window has no
    # noise, so nothing is balanced. A busy machine cannot make up for that.
    light = opened(batch_size=4)
    ample = measured(*light, slow=False)
    assert ample.bound == "compute"
    assert ample.share < 20  # alone, its loader is thousands of times as fast, but that is not training
    starved = measured(*light, slow=True)
    assert (starved.bound, starved.limit) == ("input", "decoder")  # neither the CPU nor the disk is busy
    heavy = opened(arch="resnet50", image_size=160, batch_size=1)
    assert measured(*heavy, slow=True).bound == "compute"  # the same loader is fast enough for this network
