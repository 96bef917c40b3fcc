"""Values that change from an epoch on, as a flag gives them: `0:128,10:192,16:224`; and the lengths of schedules."""

from collections.abc import Callable
from typing import TypeVar

from utils.errors import UserError
from utils.options.config import TrainConfig, choices
from utils.options.data_flags import EPOCHS
from utils.options.flags import flag
from utils.options.limits import MIN_8
from utils.options.sizes import ImageSize, read_image_size, sides_of

Value = TypeVar("Value")
DECAY_EPOCHS = 30.0  # of --schedule step, as for ImageNet in the ResNet paper (arXiv:1512.03385)


def parse_schedule(flag: str, text: str, read: Callable[[str], Value]) -> dict[int, Value]:
    """`EPOCH:VALUE,...` -> value by the epoch, from 0, from which on it holds, in the order of the epochs; "" -> {}.

    Args:
        flag: for messages, as `--resize-schedule`.
        read: a value from its text; raises ValueError, whose message says what is expected.

    Raises:
        UserError: another form, epochs that do not rise, or a value that `read` refuses.
    """
    found: dict[int, Value] = {}
    for part in text.split(",") if text else ():
        epoch, colon, value = part.partition(":")
        if not colon or not epoch.strip().isdecimal():
            raise UserError(f"{flag} {text}: {part!r} is not EPOCH:VALUE; write it as 0:A,10:B")
        if int(epoch) <= max(found, default=-1):
            raise UserError(f"{flag} {text}: epochs must rise, from 0 for the first; put them in order")
        try:
            found[int(epoch)] = read(value.strip())
        except ValueError as error:
            raise UserError(f"{flag} {text}: {value!r} is not {error}") from None
    return found


def value_at(schedule: dict[int, Value], epoch: int, before: Value) -> Value:
    """The value in an epoch, from 0; `before` is that before the first epoch of the schedule."""
    return schedule.get(max((first for first in schedule if first <= epoch), default=-1), before)


def size_schedule(config: TrainConfig) -> dict[int, ImageSize]:
    """`--resize-schedule`: size of training images, by the epoch from which on it holds; {} where there is none.

    Raises:
        UserError: it cannot be read.
    """

    def read(text: str) -> ImageSize:
        try:
            size = read_image_size(text)
        except ValueError:
            size = 0
        if not MIN_8.allows(min(sides_of(size))):
            raise ValueError("a size of 8 pixels or more")
        return size

    return parse_schedule("--resize-schedule", config.resize_schedule, read)


def policy_schedule(config: TrainConfig) -> dict[int, str]:
    """`--augment-schedule`: policy by the epoch from which on it holds; {} where there is none.

    Raises:
        UserError: it cannot be read.
    """

    def read(text: str) -> str:
        if text not in choices("augment"):
            raise ValueError(f"one of {', '.join(choices('augment'))}")
        return text

    return parse_schedule("--augment-schedule", config.augment_schedule, read)


def policies(config: TrainConfig) -> set[str]:
    """The policies of all epochs of a run.

    Raises:
        UserError: the schedule cannot be read.
    """
    schedule = policy_schedule(config)
    return set(schedule.values()) | (set() if 0 in schedule else {config.augment})


def decay_epochs(config: TrainConfig) -> float:
    """`--decay-epochs`, or what is usual."""
    return DECAY_EPOCHS if config.decay_epochs is None else config.decay_epochs


def unused_by(schedule: str) -> tuple[str, ...]:
    """Fields of TrainConfig that are of other schedules of the rate."""
    of_decay, of_steps = ("min_lr", "cooldown_epochs"), ("decay_epochs", "decay_rate")
    return (*(of_decay if schedule not in ("cosine", "linear") else ()), *(of_steps if schedule != "step" else ()))


def most_epochs(config: TrainConfig) -> int:
    """`--epochs`, or the most that are chosen where they are not given."""
    return EPOCHS if config.epochs is None else config.epochs


def check_lr_schedule(config: TrainConfig) -> None:
    """Raise UserError for flags that `--schedule` does not use, and for parts of it that have no epoch."""
    epochs = most_epochs(config)
    third = f"--decay-epochs {epochs / 3:.2g}" if decay_epochs(config) >= epochs else ""
    for name in unused_by(config.schedule):
        if value := getattr(config, name):
            remedy = "leave it out, or use cosine or linear"
            if name.startswith("decay_"):
                remedy = f"use --schedule step {third}".rstrip()
            raise UserError(f"{flag(name)} {value:g} with --schedule {config.schedule}: not used; {remedy}")
    if config.warmup_epochs is not None and config.warmup_epochs >= epochs:
        raise UserError(f"--warmup-epochs {config.warmup_epochs:g}: must be less than --epochs {epochs}; lower it")
    if config.schedule == "step" and third:
        raise UserError(
            f"--decay-epochs {decay_epochs(config):g}: must be less than --epochs {epochs}, or the rate "
            f"never falls; give {third}"
        )
    if config.cooldown_epochs and not config.min_lr:
        raise UserError(
            f"--cooldown-epochs {config.cooldown_epochs} without --min-lr: these epochs would have a rate of 0; give "
            "--min-lr"
        )
    warmup = config.warmup_epochs or 0.0
    if config.cooldown_epochs and warmup + config.cooldown_epochs >= epochs:
        raise UserError(
            f"--cooldown-epochs {config.cooldown_epochs}: with --warmup-epochs {warmup:g} must be less than --epochs "
            f"{epochs}; lower one of them"
        )
