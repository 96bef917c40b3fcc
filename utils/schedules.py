"""Values that change from an epoch on, as a flag gives them: `0:128,10:192,16:224`."""

from collections.abc import Callable
from typing import TypeVar

from utils.errors import UserError

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
