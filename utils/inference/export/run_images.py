"""The images of a checkpoint's run, as its evaluation sees them: for what an export measures."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from utils.data.images.manifest import Manifest
from utils.data.splits.selection import read_data, select_images
from utils.data.staging.stage import stage
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.inference.readable_batches import ReadableBatches
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.progress import with_bar
from utils.training.resume.restore import settings_of_run
from utils.training.settings.autotune import choose_common_loader_settings, resolve
from utils.training.state.checkpoint import Checkpoint

BATCH_SIZE = 32  # of the run it may be one that a GPU holds, and a CPU does not


class RunImages(NamedTuple):
    """The splits of a run, and how it evaluates."""

    config: ResolvedConfig
    train: Manifest
    val: Manifest


def find_run_images(saved: Checkpoint, data_dir: Path | None, scratch: Path) -> RunImages:
    """List the images of a run; none is decoded.

    Args:
        data_dir: where they are now; None for where the run read them.
        scratch: an empty folder, for an index of shards and digests.

    Raises:
        UserError: they are not there, or have other classes, or the run had synthetic ones.
    """
    before = saved.config
    if data_dir is None and (before.data_dir is None or before.loader == "synthetic"):
        raise UserError(
            f"--int8: {saved.path} is of a run on synthetic images, and int8 is calibrated on training images; leave "
            "--int8 out, or give --data-dir"
        )
    values: dict[str, Any] = {"output_dir": scratch, "batch_size": BATCH_SIZE, "cache": "none"}
    values |= {} if data_dir is None else {"data_dir": data_dir}
    values |= {"loader": "dali"} if before.loader == "stock" else {}  # which has its pixels
    alone = DistEnv.single(torch.device("cpu"))
    options = TrainConfig(evaluate=True, device="cpu", given=frozenset(values), **values)
    config = stage(settings_of_run(options, before, saved.path or "", alone), alone)
    # As the training lists them: an evaluation lists val alone.
    listed = read_data(dataclasses.replace(config, evaluate=False), alone)
    train = listed["train"]
    if train.classes != saved.record.classes:
        raise UserError(
            f"--data-dir {config.data_dir}: its classes are not those of {saved.path}; give the data set that it was "
            "trained on"
        )
    settings = choose_common_loader_settings(config, alone, None, train)
    resolved = resolve(config, train.classes, alone, settings, task=train.task)
    # Without --bad-files skip, which would decode all images first; `read_images` leaves out those that are bad.
    divided = dataclasses.replace(resolved, evaluate=False, bad_files="error")
    _, splits = select_images(divided, listed, alone, saved.initial_files)
    files = saved.record.fingerprint
    had_both = files["files of train/"] != files["files of val/"]
    if had_both and splits["train"].fingerprint == splits["val"].fingerprint:
        raise UserError(f"--data-dir {config.data_dir}: has no validation images; give the folder of train/ and val/")
    return RunImages(resolved.padded_with(saved.record.normalization[0]), splits["train"], splits["val"])


def read_images(
    config: ResolvedConfig, images: Manifest, indices: Sequence[int], title: str
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Which images, int64 (n,), and their pixels, uint8 (n, height, width, 3), with a bar on the terminal.

    Images that cannot be read are left out.
    """
    batches = [np.array(indices[start : start + BATCH_SIZE]) for start in range(0, len(indices), BATCH_SIZE)]
    reader = ReadableBatches(config, images, DistEnv.single(torch.device("cpu")), batches)
    for batch, pixels in with_bar(reader, title, len(batches), is_main=True):
        if pixels is not None:
            is_good = np.array([index not in reader.bad for index in batch.tolist()])
            yield batch[is_good], pixels.permute(0, 2, 3, 1)[torch.from_numpy(is_good)].contiguous()
