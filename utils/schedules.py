"""Values that change from an epoch on, as a flag gives them: `0:128,10:192,16:224`."""

from collections.abc import Callable
from typing import TypeVar

from utils.config import TrainConfig, choices
from utils.errors import UserError
from utils.limits import MIN_8

Value = TypeVar("Value")


def parse_schedule(flag: str, text: str, read: Callable[[str], Value]) -> dict[int, Value]:
    """`EPOCH:VALUE,...` -> value by the epoch, from 0, from which on it holds, in the order of the epochs; "" -> {}.

    Args:
        flag: for messages, as `--resize-schedule`.
        text: the flag's value.
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


def size_schedule(config: TrainConfig) -> dict[int, int]:
    """`--resize-schedule`: training size in pixels, by the epoch from which on it holds; {} where there is none.

    Raises:
        UserError: it cannot be read.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or not MIN_8.allows(int(text)):
            raise ValueError("a size of 8 pixels or more")
        return int(text)

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
