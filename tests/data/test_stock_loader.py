"""`--loader stock`: equal steps, no image twice in an epoch, exact counts, and a resume to the last bit."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipelines
from tests.conftest import TINY, Refused, assert_same, assert_same_run, resolved, write_data
from tests.forked import launch_series, run_train
from tests.harness import assert_refused, launch, read_checkpoint
from utils.data.formats.folder import scan_splits
from utils.data.images.batch import Batch, TrainLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import Sampler, create_sampler
from utils.distributed.group import DistEnv
from utils.errors import BadFile, UserError
from utils.options.resolved import ResolvedConfig

BASE = resolved(loader="stock", batch_size=4, image_size=32, val_resize=36, workers=2, prefetch=3)


def config_for(**values: Any) -> ResolvedConfig:
    return dataclasses.replace(BASE, **values)


def numbered(manifest: Manifest) -> Manifest:
    """Each image is a class of its own, so that its target is its index."""
    return dataclasses.replace(manifest, labels=np.arange(len(manifest)))


def ranks(cpu: DistEnv, world_size: int) -> list[DistEnv]:
    return [dataclasses.replace(cpu, rank=rank, world_size=world_size) for rank in range(world_size)]


def open_stock(
    config: ResolvedConfig, manifest: Manifest, env: DistEnv, first_batch: int = 0, state: dict[str, Any] | None = None
) -> tuple[TrainLoader, Sampler]:
    sampler = create_sampler(config, manifest, env)
    return pipelines.create_train_loader(config, manifest, sampler, env, first_batch, state), sampler


def read_batches(loader: TrainLoader, count: int) -> list[Batch]:
    return [Batch(*(values.clone() for values in next(loader))) for _ in range(count)]


def targets_of(batches: Sequence[Batch]) -> list[int]:
    return [target for batch in batches for target in batch.targets.tolist()]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulated"), [(1, 8, 1), (2, 20, 1), (2, 8, 1), (3, 4, 1), (1, 4, 4), (1, 41, 1)]
)
def test_no_image_comes_twice_in_an_epoch(
    data: Path, cpu: DistEnv, world_size: int, batch_size: int, accumulated: int
) -> None:
    manifest, epochs = numbered(scan_splits(data)[0]), 4
    config = config_for(batch_size=batch_size, grad_accum_steps=accumulated)
    by_epoch: list[list[int]] = [[] for _ in range(epochs)]
    for env in ranks(cpu, world_size):
        loader, sampler = open_stock(config, manifest, env)
        for seen in by_epoch:
            seen += targets_of(read_batches(loader, sampler.batches_per_epoch))
        loader.close()
    for seen in by_epoch:
        assert len(seen) == len(set(seen)) == sampler.steps_per_epoch * sampler.global_batch_size
        assert seen != sorted(seen)
    assert len({tuple(seen) for seen in by_epoch}) == epochs, "another order in every epoch"


def test_seeds_and_ranks_differ(data: Path, cpu: DistEnv) -> None:
    manifest = numbered(scan_splits(data)[0])
    orders = {
        tuple(targets_of(read_batches(open_stock(config_for(seed=seed), manifest, cpu)[0], 5))) for seed in range(3)
    }
    assert len(orders) == 3
    one = manifest.select(np.zeros(8, dtype=np.int64))
    images = [
        image for env in ranks(cpu, 2) for image in read_batches(open_stock(config_for(), one, env)[0], 1)[0].images
    ]
    assert len({image.numpy().tobytes() for image in images}) == 8, "one picture, another crop each time"


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 8), (2, 20), (3, 4), (41, 4), (43, 4)])
def test_validation_counts_every_image_once(data: Path, cpu: DistEnv, world_size: int, batch_size: int) -> None:
    val = numbered(scan_splits(data)[1])
    passes: list[Counter[int]] = [Counter(), Counter()]
    for env in ranks(cpu, world_size):
        loader = pipelines.create_val_loader(config_for(batch_size=batch_size, workers=1), val, env)
        for seen in passes:
            # As `Run.val_batches`: as many batches as the largest part has, and no look beyond.
            batches = iter(loader)
            for _ in range(math.ceil(math.ceil(len(val) / world_size) / batch_size)):
                if (batch := next(batches, None)) is not None:
                    assert 0 < len(batch.targets) == len(batch.images) <= batch_size
                    seen.update(batch.targets.tolist())
    assert passes == [Counter(range(len(val)))] * 2


def test_validation_sees_the_pixels_of_the_other_loaders(data: Path, cpu: DistEnv) -> None:
    _, val = scan_splits(data)
    stock, dali = (pipelines.create_val_loader(config_for(loader=loader), val, cpu) for loader in ("stock", "dali"))
    for ours, theirs in zip(stock, dali, strict=True):
        assert torch.equal(ours.targets, theirs.targets)
        assert torch.equal(ours.images, theirs.images)


@pytest.mark.parametrize("decode", ["fused", "full"])
def test_images_match_their_targets_and_are_only_mirrored(data: Path, cpu: DistEnv, decode: str) -> None:
    train, _ = scan_splits(data)  # blue, green, red: label 0 is brightest in channel 2
    plain, mirrored = (
        read_batches(open_stock(config_for(decode=decode, hflip=hflip), train, cpu)[0], 12) for hflip in (0, 1)
    )
    for one, other in zip(plain, mirrored, strict=True):
        assert (2 - one.images.float().mean(dim=(2, 3)).argmax(dim=1)).tolist() == one.targets.tolist()
        assert torch.equal(one.images.flip(3), other.images)


@pytest.mark.parametrize(
    ("world_size", "extra"),
    [
        (1, {}),
        (2, {"decode": "full"}),
        (1, {"grad_accum_steps": 4}),
        pytest.param(2, {"augment": "randaugment"}, marks=pytest.mark.slow),
    ],
)
def test_it_continues_bit_for_bit(data: Path, cpu: DistEnv, world_size: int, extra: dict[str, Any]) -> None:
    """In an epoch and around its ends, with other threads and another queue."""
    manifest, config = numbered(scan_splits(data)[0]), config_for(**extra)
    for env in ranks(cpu, world_size):
        whole, sampler = open_stock(config, manifest, env)
        batches, states = [], []
        for _ in range(2 * sampler.batches_per_epoch + 5):
            states.append(whole.state())
            batches += read_batches(whole, 1)
        other = dataclasses.replace(config, workers=1, prefetch=5)
        epoch = sampler.batches_per_epoch
        for cut in (0, epoch // 2, epoch - 1, epoch, epoch + 1, 2 * epoch):
            resumed, _ = open_stock(other, manifest, env, cut, states[cut])
            for expected, found in zip(batches[cut : cut + 4], read_batches(resumed, 4), strict=True):
                assert_same(expected._asdict(), found._asdict())
            resumed.close()


def test_a_resumed_loader_resumes(data: Path, cpu: DistEnv) -> None:
    """Its state has the origin of DALI's count, also where that is not the start of the run."""
    manifest = numbered(scan_splits(data)[0])
    later, sampler = open_stock(BASE, manifest, cpu, 20)
    assert sampler.batches_per_epoch == 10
    start, _ = open_stock(BASE, manifest, cpu)
    assert targets_of(read_batches(start, 10)) != targets_of(read_batches(later, 10)), "another origin, other draws"
    read_batches(later, 3)
    once, _ = open_stock(BASE, manifest, cpu, 33, later.state())
    read_batches(once, 9)
    twice, _ = open_stock(BASE, manifest, cpu, 42, once.state())
    read_batches(later, 9)
    for expected, found in zip(read_batches(later, 12), read_batches(twice, 12), strict=True):
        assert_same(expected._asdict(), found._asdict())


def test_sizes_of_a_schedule(data: Path, cpu: DistEnv) -> None:
    manifest = numbered(scan_splits(data)[0])
    config = config_for(resize_schedule="0:24,2:32")
    loader, sampler = open_stock(config, manifest, cpu)
    epochs = [read_batches(loader, sampler.batches_per_epoch) for _ in range(4)]
    assert [{batch.images.shape[-1] for batch in batches} for batches in epochs] == [{24}, {24}, {32}, {32}]
    assert all(len(set(targets_of(batches))) == 40 for batches in epochs)


def test_it_begins_at_the_start_of_an_epoch_only(data: Path, cpu: DistEnv) -> None:
    manifest, _ = scan_splits(data)
    with pytest.raises(UserError, match=r"stock: cannot begin within an epoch, and step 13 .* 10 steps") as one:
        open_stock(BASE, manifest, cpu, 13)
    assert one.value.on_all_ranks


def test_what_the_reader_cannot_take_is_refused(tmp_path: Path, cpu: DistEnv) -> None:
    data = write_data(tmp_path, (4, 4, 4), (4, 4, 4))
    train, val = scan_splits(data)
    shards = dataclasses.replace(train, images=_OtherTable())
    with pytest.raises(UserError, match="--loader stock reads images in class folders only; give --loader dali"):
        open_stock(BASE, shards, cpu)
    folder = os.fsencode(data / "val" / "red")
    with contextlib.suppress(OSError):  # a file system may refuse the name
        os.rename(folder + b"/red-000.jpg", folder + b"/red-\xff.jpg")
        _, val = scan_splits(data)
        with pytest.raises(UserError, match=r"red-\\xff.jpg: not UTF-8.*rename it, or give --loader dali"):
            pipelines.create_val_loader(BASE, val, cpu)


class _OtherTable:
    """Images that are no files of their own."""

    names = np.array([], dtype=np.bytes_)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is used")


@pytest.mark.parametrize("content", [b"GIF89a no image", b""])
def test_a_bad_file_is_named(tmp_path: Path, cpu: DistEnv, content: bytes) -> None:
    train, val = scan_splits(write_data(tmp_path))
    for split, manifest in (("train", train), ("val", val)):
        bad = tmp_path / split / "green" / "green-007.jpg"
        bad.write_bytes(content)
        if split == "train":
            batches: Iterator[Batch] = map(next, itertools.repeat(open_stock(BASE, manifest, cpu)[0]))
        else:
            batches = iter(pipelines.create_val_loader(BASE, manifest, cpu))
        with pytest.raises(BadFile, match=r"green-007\.jpg: .*--bad-files skip") as found:
            list(batches)
        assert found.value.path == str(bad)


FLAGS = (*TINY, "--loader", "stock", "--epochs", 2, "--deterministic")


@pytest.mark.slow  # the loader itself resumes in the tests above
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stopped_run_ends_as_the_uninterrupted_one(data: Path, tmp_path: Path, processes: int) -> None:
    """And on another number of processes it is refused, but goes on with another loader."""
    flags = ("--data-dir", data, *FLAGS, "--batch-size", 8 // processes)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    stopped = (*flags, "--output-dir", cut, "--time-limit", 0.01)  # over when the first step of a launch is done
    if processes == 1:
        done, *_ = launch_series((*flags, "--output-dir", whole), stopped, stopped)
    else:
        done, *_ = [run_train(*words, processes=2) for words in ((*flags, "--output-dir", whole), stopped, stopped)]
    assert done.status == 0, done.err
    assert "loader  stock, fused decode" in done.out
    assert read_checkpoint(cut)["step"] % 5, "in mid-epoch"
    if processes == 2:
        alone = ("--data-dir", data, *FLAGS)
        done = run_train(*alone, "--output-dir", cut)
        assert_refused(
            done, "1 process x 4 images: --loader stock goes on only as its checkpoint was saved, by 2 processes x 4",
            f"by --loader dali --resume {cut}/last.pt --accept-changes --output-dir NEW",
        )  # fmt: skip
        accepted = ("--resume", cut / "last.pt", "--accept-changes", "--output-dir", tmp_path / "other")
        done = run_train(*alone, *accepted)
        assert_refused(done, "--loader stock: cannot begin within an epoch, and step")
        done = run_train(*alone, *accepted, "--loader", "dali")
        assert done.status == 0, done.err
        assert "the epoch under way goes on in another order" in done.out
    done = run_train(*flags, "--output-dir", cut, processes=processes)
    assert done.status == 0, done.err
    assert_same_run(whole, cut)


def test_flags_that_it_cannot_honor(data: Path, tmp_path: Path, refused: Refused) -> None:
    refused("--data-dir", data, *FLAGS, "--cache", "host", "--output-dir", tmp_path / "run")(
        "--cache host with --loader stock: only --loader dali keeps images"
    )


@pytest.mark.slow
def test_other_flags_are_honored(tmp_path: Path) -> None:
    """A held-out part of train/, a bad file that is skipped, a policy."""
    data = write_data(tmp_path / "data")
    (data / "train" / "red" / "bad.jpg").write_bytes(b"GIF89a no image")
    (data / "val").rename(tmp_path / "unused")
    flags = (
        "--data-dir", data, *FLAGS, "--batch-size", 8, "--val-fraction", 0.2, "--bad-files", "skip",
        "--augment", "autoaugment", "--output-dir", tmp_path / "run",
    )  # fmt: skip
    done = launch(*flags, "--time-limit", 0.01)
    assert "train files (red 1)" in done.out, done.err
    done = launch(*flags)
    assert done.status == 0, done.err
    assert "resumed at epoch 1, step 1" in done.out
