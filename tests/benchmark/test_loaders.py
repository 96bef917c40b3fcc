"""The loaders of a benchmark: timm's, and the reading of files without decoding them."""

import contextlib
import dataclasses
import gc
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from train import train_step
from utils.benchmark.loaders import (
    FilesReader,
    TimmLoader,
    config_of_loader,
    open_loader,
    open_loaders,
    with_loader,
)
from utils.data.formats.folder import FileTable
from utils.data.images.manifest import Manifest
from utils.data.loaders.cache import mean_decoded_bytes
from utils.errors import UserError
from utils.training.run import Run


def test_timm_gives_the_step_normalized_images(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    stream = TimmLoader(run, manifest)
    images, targets = next(stream)
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert -3 < images.min() < images.max() < 3
    assert set(targets.tolist()) <= {0, 1, 2}
    # Each class has its color, so labels and normalization can be read from the pixels.
    channel = (
        images.mean(dim=(2, 3)) * torch.tensor([0.229, 0.224, 0.225]) + torch.tensor([0.485, 0.456, 0.406])
    ).argmax(1)
    assert channel.tolist() == [2 - target for target in targets.tolist()]
    real_run = with_loader(run, stream)
    assert real_run.augment(images, targets)[0] is images  # not normalized twice
    assert real_run.forward_backward is run.forward_backward
    train_step(real_run)
    assert run.state.step == 1
    stream.close()


def test_files_reader_reads(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    reader = FilesReader(manifest, run.sampler, readers=2, first_batch=3)
    expected = [sum(manifest.sizes[run.sampler.indices(b)]) for b in (3, 4)]
    assert [next(reader), next(reader)] == expected
    reader.close()


def test_a_file_that_is_gone_does_not_end_the_reading(
    opened: Callable[..., tuple[Run, Manifest]], tmp_path: Path
) -> None:
    run, manifest = opened()
    gone = dataclasses.replace(manifest, images=FileTable(tmp_path / "gone", manifest.table().names))
    reader = FilesReader(gone, run.sampler, readers=1, first_batch=0)
    assert next(reader) == 0
    reader.close()


@pytest.mark.parametrize("workers", [1, pytest.param(21, marks=pytest.mark.slow)])
def test_files_are_read_by_as_many_as_dali_reads_with(
    opened: Callable[..., tuple[Run, Manifest]], workers: int
) -> None:
    """DALI's thread pools hold those that read and those that decode, one or more for each of two pipelines."""
    run, manifest = opened(workers=workers)
    before = pool_threads()
    with contextlib.ExitStack() as stack:
        _, files = open_loaders(("dali-fused",), run, manifest, manifest, stack)
        assert files.readers == len(multiprocessing.active_children()) == pool_threads() - before - max(2, workers)


def test_files_are_read_by_as_many_as_torch_reads_with(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened(workers=1)
    with contextlib.ExitStack() as stack:
        _, files = open_loaders(("torch",), run, manifest, manifest, stack)
        assert files.readers == 1
        assert len(multiprocessing.active_children()) == 2, "torch's worker, and another that reads"


def test_files_are_read_by_one_as_by_dalis_own_reader(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    """Which begins at the start of an epoch, wherever the others begin."""
    run, manifest = opened(workers=2)
    with contextlib.ExitStack() as stack:
        (loader,), files = open_loaders(("stock",), run, manifest, manifest, stack)
        assert files.readers == 1
        assert len(next(loader.stream).targets) == run.config.batch_size
    open_loader("stock", run, manifest, first_batch=3).stream.close()


def pool_threads() -> int:
    """Threads in the pools of all DALI pipelines of this process."""
    gc.collect()  # those without references
    return sum("[DALI][TP" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def test_a_loader_that_fails_does_not_hide(opened: Callable[..., tuple[Run, Manifest]], tmp_path: Path) -> None:
    run, manifest = opened()
    broken = dataclasses.replace(manifest, images=FileTable(tmp_path / "gone", manifest.table().names))
    for name in ("dali-fused", "stock", "torch"):
        with pytest.raises(Exception, match="gone"):
            open_loader(name, run, broken)


def test_fewer_images_than_a_batch(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened(batch_size=64)
    assert len(run.sampler.indices(0)) == 64
    loader = open_loader("dali-fused", run, manifest)
    assert len(next(loader.stream).targets) == 64


def test_each_loader_has_the_flags_that_train_would_choose(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, images = opened(decode="full")
    fused, full, torch_loader = (config_of_loader(name, run, 1e6) for name in ("dali-fused", "dali-full", "torch"))
    assert [(each.loader, each.decode) for each in (fused, full)] == [("dali", "fused"), ("dali", "full")]
    assert 0 < fused.hw_decoder_load < full.hw_decoder_load
    assert torch_loader == dataclasses.replace(run.config, loader="torch")
    small = mean_decoded_bytes(images)
    assert config_of_loader("stock", run, small) == dataclasses.replace(run.config, loader="stock")
    assert config_of_loader("dali-full", run, small).hw_decoder_load == run.config.hw_decoder_load == 0
    assert config_of_loader("stock", run, 1e6).hw_decoder_load == full.hw_decoder_load


def test_images_are_decoded_once(data: Path, opened: Callable[..., tuple[Run, Manifest]], tmp_path: Path) -> None:
    """Before the first measured batch; their files are not needed any more. An epoch has each once."""
    run, manifest = opened(workers=2, batch_size=2)
    files = shutil.copytree(data / "train", tmp_path / "files")
    images = manifest.select(np.arange(40))
    images = dataclasses.replace(images, root=files, images=FileTable(files, images.table().names))
    with contextlib.ExitStack() as stack:
        (loader,), _ = open_loaders(("cached",), run, images, manifest, stack)
        shutil.rmtree(files)
        labels = [int(target) for _ in range(40) for target in next(loader.stream).targets]
        assert len(labels) == 40 * run.config.batch_size
        assert set(labels) <= set(images.labels.tolist())


def test_too_few_images_for_a_batch_cannot_be_decoded_once(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    with contextlib.ExitStack() as stack, pytest.raises(UserError, match=r"--batch-size 8: there are 3 images"):
        open_loaders(("cached",), run, manifest.select(np.arange(3)), manifest, stack)
