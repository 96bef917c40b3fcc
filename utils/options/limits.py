"""Limit: the range of a number on the command line, and the message for a value outside it."""

import dataclasses
import math

from utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Limit:
    """A range of finite numbers; a side that is None is open.

    Attributes:
        minimum, maximum: bounds that are allowed themselves.
        above, below: bounds that are not.
        noun: what a number from `minimum` to `maximum` is, for the message.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    noun: str = ""

    def allows(self, value: float) -> bool:
        """Whether `value` is in the range; False for nan and infinities."""
        return (
            abs(value) < math.inf
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def check(self, name: str, value: float | None, unit: str = "") -> None:
        """Raise UserError if the value of the flag `name` (`--lr`) is not in the range; None always is."""
        if value is not None and not self.allows(value):
            shown = f"{value:g}" if unit and self.maximum is not None else value
            raise UserError(f"{name} {shown}: {self._describe(isinstance(value, float), unit)}")

    def _describe(self, is_float: bool, unit: str) -> str:
        if self.noun:
            return f"a {self.noun}, from {self.minimum:g} to {self.maximum:g}"
        bounded = self.maximum is not None or self.below is not None
        parts = []
        if self.minimum is not None:
            parts.append(f"at least {self.minimum:g}" if bounded else f"{self.minimum:g} or more")
        if self.above is not None:
            parts.append(f"more than {self.above:g}")
        if self.maximum is not None:
            parts.append(f"at most {self.maximum:.15g}{f' {unit}' if unit else ''}")
        if self.below is not None:
            parts.append(f"less than {self.below:.15g}")
        if is_float and not bounded:
            parts.append("finite")
        return f"must be {' and '.join(parts)}"


BELOW_1 = Limit(minimum=0, below=1)
MIN_0, MIN_1, MIN_8, ABOVE_0 = Limit(minimum=0), Limit(minimum=1), Limit(minimum=8), Limit(above=0)
