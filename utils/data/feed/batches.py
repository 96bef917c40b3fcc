"""Feed: the batches of a split for a training loop of your own, without a run; `from pipelines import Feed`.

A feed has the images, order and random draws of `train.py --loader dali` with the same options. It changes nothing of
its process: no signal handler, no environment variable, no exit hook. It exchanges nothing with other processes.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch

from utils.data.dali import release_memory
from utils.data.feed.options import (
    DataOptions,
    check_state,
    choose_env,
    create_config,
    option_errors,
    pixel_settings,
    resolve_options,
    state_identity,
)
from utils.data.formats.sources import find_source
from utils.data.formats.split_folders import find_folder, folders_in
from utils.data.images.batch import Batch, TrainLoader, ValLoader
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import create_sampler, shard
from utils.data.splits.selection import read_data
from utils.data.staging.stage import stage
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.data_flags import BATCH_SIZE
from utils.options.resolved import ResolvedConfig
from utils.targets import Targets
from utils.text import describe_alike


class BaseFeed:
    """The batches of one split on this process, each pass with `for`. See `pipelines.Feed`, which has the loaders.

    Training: each `for` is one epoch, a new order of all images with random crops, `len(feed)` batches of exactly
    `batch_size`; the remainder is dropped. Validation: each `for` is every image once with the center crop; the last
    batch may be smaller, and a rank can have no batch.

    The first `for` is epoch 0, the next epoch 1, and so on. `set_epoch(n)` makes the next `for` epoch n, as that of
    torch's DistributedSampler. After a `for` that was left early, the next one is the next epoch from its start. After
    `load_state_dict`, the next `for` goes on with the batch after the last one that was returned.

    Args:
        data_dir: folder with train/ and val/.
        split: train or val.
        batch_size: images per process and batch, 1 or more.
        image_size: side of the images, or (height, width); pixels, 8 or more.
        seed: of order and random draws, 0 or more.
        device: auto, cpu, cuda, or a device of torch. auto is a GPU if there is one. Without an index it is torch's
            current GPU, or that of LOCAL_RANK where the program has chosen none.
        rank, world_size: this process among those that divide the images; both or neither. The default is that of
            torch.distributed if it is set up, else that of torchrun or Slurm, else one process.
        classes: names that the split must have. Those of train are the default for val, where there is a train.
        options: see `DataOptions`.

    Attributes:
        mean, std: ImageNet's per channel, of images in [0, 1], with which most networks of timm were trained.

    Raises:
        UserError: an option or the data set is wrong; the message names it and the remedy.
    """

    mean: ClassVar[tuple[float, float, float]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, float, float]] = (0.229, 0.224, 0.225)
    create_train_loader: ClassVar[Callable[..., TrainLoader]]
    create_val_loader: ClassVar[Callable[..., ValLoader]]

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        split: Literal["train", "val"] = "train",
        *,
        batch_size: int = BATCH_SIZE,
        image_size: int | tuple[int, int] = 224,
        seed: int = 0,
        device: str | torch.device = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        classes: Sequence[str] | None = None,
        **options: Unpack[DataOptions],
    ) -> None:
        values = {"batch_size": batch_size, "image_size": image_size, "seed": seed, **options}
        with option_errors():
            self._given = stage(create_config(data_dir, split, values), DistEnv.single(torch.device("cpu")))
            self._env = choose_env(device, rank, world_size)
            self._manifest = _list_images(self._given, split, classes)
            self._config = resolve_options(self._given, self._manifest, self._env)
            self._targets = Targets(len(self._manifest.classes), self._manifest.label_sets, self._env.device)
            sampler = create_sampler(self._config, self._manifest, self._env) if split == "train" else None
        self._sampler = sampler
        images = len(shard(len(self._manifest), self._env.rank, self._env.world_size))
        self._length = sampler.batches_per_epoch if sampler else -(-images // batch_size)
        self._epoch = self._batch = 0  # the next pass, and the batches of it that were returned
        self._is_resumed = False  # whether the next pass begins at `_batch`
        self._pass = 0  # number of the running pass; an iterator of another one has ended
        self._loader: TrainLoader | None = None  # opened by the first batch
        self._loader_at = 0  # its next batch, counted from epoch 0 on
        self._saved: tuple[int, dict[str, Any]] | None = None  # state of a loader, and its next batch
        self._has_failed = False  # whether the random state after the last batch is lost
        self._is_open = True

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order."""
        return self._manifest.classes

    @property
    def device(self) -> torch.device:
        """Where the batches are."""
        return self._env.device

    @property
    def epoch(self) -> int:
        """The epoch of the running `for`; between two, that of the next one, but for one that was left early."""
        return self._epoch

    def __len__(self) -> int:
        """Batches of a whole pass on this rank."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """One pass: batches of uint8 images (N, 3, H, W), RGB, channels_last, and int64 targets (N,) on the device.

        Where the label file gives images any number of classes, targets are float32 (N, num_classes) of 0 and 1.

        Raises:
            BadFile: an image cannot be read or decoded.
            UserError: the feed is closed, or another pass has begun before this one was over.
        """
        if self._batch and not self._is_resumed:
            self._epoch, self._batch = self._epoch + 1, 0
        self._is_resumed = self._has_failed = False
        self._pass += 1
        number = self._pass
        for _ in range(self._batch, self._length):
            if not self._is_open:
                raise UserError("the feed is closed; open another one")
            if number != self._pass:
                raise UserError("another pass over the feed has begun; a feed has one pass at a time")
            batch = self._next_batch()
            self._batch += 1
            yield Batch(batch.images, self._targets(batch.targets))
        if number == self._pass:
            self._epoch, self._batch = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` epoch `epoch`, from 0, from its start; a running one cannot go on.

        Where the state that was loaded lies within this epoch, the next `for` goes on there.
        """
        if epoch < 0:
            raise UserError(f"epoch {epoch}: must be 0 or more")
        if self._is_resumed and epoch == self._epoch:
            return
        self._epoch, self._batch, self._is_resumed, self._has_failed = epoch, 0, False, False
        self._pass += 1

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a feed with the same options needs to go on after the last returned batch.

        Batches that are read ahead do not count. Each rank has its own. It holds plain types and tensors, so that
        `torch.load(weights_only=True)` reads it.

        Raises:
            UserError: the last batch has failed, so that an earlier state is the newest one.
        """
        if self._has_failed:
            raise UserError("state_dict: reading has failed after the last batch; load an earlier state, or set_epoch")
        at_end = self._batch == self._length
        epoch, batch = (self._epoch + 1, 0) if at_end else (self._epoch, self._batch)
        loader = self._saved[1] if self._saved and self._saved[0] == self._next_number() else None
        if self._loader is not None and self._loader_at == self._next_number():
            loader = self._loader.state()
        return {"epoch": epoch, "batch": batch, "loader": loader, "feed": state_identity(self._config, *self._parts())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the last batch before `state_dict()`, bit for bit; a running `for` cannot go on.

        Raises:
            UserError: it is of other images, options, ranks or kind of device; names what differs.
        """
        with option_errors():
            check_state(state_dict, self._given, state_identity(self._config, *self._parts()))
            self._config = pixel_settings(self._given, self._config, state_dict["feed"], self._manifest, self._env)
        self._close_loader()
        self._epoch, self._batch, self._is_resumed = state_dict["epoch"], state_dict["batch"], True
        self._has_failed = False
        self._pass += 1
        self._saved = None if state_dict["loader"] is None else (self._next_number(), state_dict["loader"])

    def close(self) -> None:
        """End the threads and release the memory of the feed. Returned batches and `state_dict` stay valid."""
        self._is_open = False
        if self._loader is not None:
            self._saved = (self._loader_at, self._loader.state())
        self._close_loader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self) -> tuple[str, Manifest, DistEnv]:
        return ("val" if self._sampler is None else "train"), self._manifest, self._env

    def _next_number(self) -> int:
        """Number of the next batch, counted from epoch 0 on."""
        return self._epoch * self._length + self._batch

    def _next_batch(self) -> Batch:
        if self._loader is None or self._loader_at != self._next_number():
            self._close_loader()
            with option_errors():
                self._loader = self._open_loader()
            self._loader_at, self._saved = self._next_number(), None
        try:
            with option_errors():
                batch = next(self._loader)
        except Exception:
            self._close_loader()  # a pipeline that has failed cannot go on
            self._has_failed = self._sampler is not None
            raise
        self._loader_at += 1
        return batch

    def _open_loader(self) -> TrainLoader:
        if self._sampler is None:
            return _ValBatches(type(self).create_val_loader, self._config, self._manifest, self._env, self._batch)
        state = self._saved[1] if self._saved and self._saved[0] == self._next_number() else None
        first = self._next_number()
        return type(self).create_train_loader(self._config, self._manifest, self._sampler, self._env, first, state)

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None
            release_memory()


class _ValBatches:
    """The validation images of this rank again and again, from batch `first` of a pass on; a `TrainLoader`."""

    def __init__(
        self,
        create_loader: Callable[..., ValLoader],
        config: ResolvedConfig,
        manifest: Manifest,
        env: DistEnv,
        first: int,
    ) -> None:
        self._batches = _repeat(create_loader, config, manifest, env, first)

    def __next__(self) -> Batch:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return {}  # nothing is random

    def close(self) -> None:
        self._batches.close()


def _repeat(
    create_loader: Callable[..., ValLoader], config: ResolvedConfig, manifest: Manifest, env: DistEnv, first: int
) -> Generator[Batch]:
    if first:
        done = first * config.batch_size * env.world_size  # images of all ranks
        yield from create_loader(config, manifest.select(np.arange(done, len(manifest))), env)
    loader = create_loader(config, manifest, env)
    while True:
        yield from loader


def _list_images(config: TrainConfig, split: str, classes: Sequence[str] | None) -> Manifest:
    """The images of one split, also if the other one is missing."""
    names, expected, whose = [split], classes, "given"
    if classes is None and split == "val":  # else labels could count other classes than those of the training feed
        source = find_source(config, ())
        names = ["train", "val"] if "train" in source.splits else ["val"]
        train = find_folder(source.data_dir, "train", "train") if source.has_class_folders else None
        expected, whose = folders_in(source.data_dir / train) if train else (), "of train"
    manifest = read_data(config, DistEnv.single(torch.device("cpu")), names)[split]
    if expected and tuple(expected) != manifest.classes and split == "val" and {*manifest.classes} < {*expected}:
        return manifest.numbered_as(tuple(expected))
    if expected and tuple(expected) != manifest.classes:
        alike = describe_alike(manifest.classes, expected)
        raise UserError(
            f"classes: the {len(manifest.classes)} of {split} are not the {len(expected)} {whose}; "
            f"{alike or 'both splits must have the same class folders, or every label would be shifted'}"
        )
    return manifest
