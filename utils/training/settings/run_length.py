"""How long a run is where that was left open: images a step and epochs, from the number of images and the device.

ImageNet's recipe is of 5,000 steps an epoch. With its batch a few thousand images make a dozen, and nothing is learned.
"""

import math
from collections.abc import Iterator

from utils.options.config import TrainConfig
from utils.options.data_flags import BATCH_SIZE, EPOCHS
from utils.options.resolved import ResolvedConfig
from utils.text import count

MANY_IMAGES = 1_000_000  # from here on the recipe is ImageNet's, whatever trains on it
EPOCH_STEPS = 50  # of an epoch, at least
RUN_STEPS = 300  # of a run whose --epochs are given, at least
TUNING_STEPS = 1_000  # of a run that fine-tunes
CPU_STEPS = 3_000  # of a run that a CPU trains from scratch
MIN_EPOCHS = 10  # of both
MIN_BATCH = 16  # batch norm wants so many
CPU_BATCH = 32  # more is no faster there, and takes more memory
# Fields whose values count epochs of a schedule that somebody has made for the recipe's.
_OF_SCHEDULES = ("mixup_off_epoch", "resize_schedule", "augment_schedule", "decay_epochs")


def fit_batch_size(config: TrainConfig, num_train: int | None, world_size: int, on_cuda: bool) -> int:
    """Images per process and step of a new run: a power of two, so that an epoch has `EPOCH_STEPS` or more.

    At least `MIN_BATCH`, unless that is more than there is, and at most `BATCH_SIZE`, on a CPU `CPU_BATCH`.

    Args:
        config: as the user gave it; with few `epochs`, there are more steps in each, to have `RUN_STEPS`.
        num_train: training images; None where a run does not train.
    """
    if num_train is None or not _is_small(config, num_train):
        return BATCH_SIZE
    steps = max(EPOCH_STEPS, math.ceil(RUN_STEPS / (config.epochs or MIN_EPOCHS)))
    of_process = num_train / (world_size * config.grad_accum_steps)
    size = BATCH_SIZE if on_cuda else CPU_BATCH
    while size > 1 and (size > of_process or size > max(MIN_BATCH, of_process / steps)):
        size //= 2
    return size


def fit_epochs(config: TrainConfig, num_train: int | None, steps_per_epoch: int, on_cuda: bool) -> int:
    """Epochs of a new run: the recipe's, or as many as have `TUNING_STEPS` or `CPU_STEPS`.

    Epochs with a frozen network, and those of a warmup and cooldown that are given, come on top.
    """
    is_long = config.pretrained is None and on_cuda
    if num_train is None or is_long or not _is_small(config, num_train) or _has_schedule(config):
        return EPOCHS
    enough = CPU_STEPS if config.pretrained is None else TUNING_STEPS
    extra = config.freeze_epochs + config.cooldown_epochs + math.ceil(config.warmup_epochs or 0)
    return min(EPOCHS, max(MIN_EPOCHS, math.ceil(enough / max(1, steps_per_epoch))) + extra)


def _is_small(config: TrainConfig, num_train: int) -> bool:
    """Whether the recipe is not ImageNet's; synthetic images stand for it."""
    return config.data_dir is not None and num_train < MANY_IMAGES


def _has_schedule(config: TrainConfig) -> bool:
    return config.schedule == "step" or any(getattr(config, name) for name in _OF_SCHEDULES)


def describe_length(config: ResolvedConfig, num_train: int, steps_per_epoch: int) -> Iterator[str]:
    """Why a new run has these images a step and epochs; nothing of what was given, or is the recipe's."""
    if "batch_size" not in config.given and config.batch_size != BATCH_SIZE:
        steps, images = count(steps_per_epoch, "step"), count(num_train, "image")
        yield f"--batch-size {config.batch_size}: {steps} in an epoch of {images}"
    if "epochs" not in config.given and config.epochs != EPOCHS:
        why = "on a CPU" if config.pretrained is None else "to fine-tune"
        yield f"--epochs {config.epochs}: {count(config.epochs * steps_per_epoch, 'step')} {why}"
