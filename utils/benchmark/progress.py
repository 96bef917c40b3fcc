"""How far a benchmark is: a bar on a terminal, else a line for each finished measurement."""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from utils.log import emit
from utils.progress import is_terminal

BAR = "{desc}  {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}"


def seconds_left(finished: Sequence[Sequence[float]], windows: int, window_seconds: float) -> float | None:
    """Estimate of the time that a benchmark still takes, from what its measurements have taken so far.

    Args:
        finished: for each case, the seconds of its finished measurements, the pauses around them included. The first
            is the warm-up, in which the step may compile.
        windows: of each case, after the warm-up.
        window_seconds: wanted length of a window.

    Returns:
        Seconds; None before the first warm-up is over.
    """
    warm_ups = [seconds[0] for seconds in finished if seconds]
    if not warm_ups:
        return None
    known = list(itertools.chain.from_iterable(seconds[1:] for seconds in finished))
    usual = statistics.median(known) if known else window_seconds
    left = 0.0
    for seconds in finished:
        done = len(seconds[1:])
        left += (windows - done) * (statistics.median(seconds[1:]) if done else usual)
        left += 0.0 if seconds else statistics.median(warm_ups)
    return left


class Progress:
    """Shows what is measured, the result of each measurement, and the time left.

    Args:
        names: of the cases.
        windows, window_seconds: as for `seconds_left`.
    """

    def __init__(self, names: Sequence[str], windows: int, window_seconds: float) -> None:
        self._names, self._windows, self._window_seconds = names, windows, window_seconds
        self._finished: list[list[float]] = [[] for _ in names]
        self._total = len(names) * (windows + 1)
        self._started = 0.0
        self._bar: tqdm[Any] | None = None
        if is_terminal(sys.stderr):
            self._bar = tqdm(total=self._total, bar_format=BAR, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, case: int) -> None:
        """A measurement of the case with that number begins."""
        self._started = time.monotonic()
        if self._bar is not None:
            self._bar.set_description_str(self._title(case))

    def finish(self, case: int, rate: float) -> None:
        """The measurement that was started last is done: `rate` images/s."""
        title = self._title(case)
        self._finished[case].append(time.monotonic() - self._started)
        left = seconds_left(self._finished, self._windows, self._window_seconds)
        facts = f"about {tqdm.format_interval(left or 0)} left"
        if self._bar is not None:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update()
        else:
            number = sum(map(len, self._finished))
            emit(f"{number:>{len(str(self._total))}}/{self._total}  {title}: {rate:,.0f} images/s, {facts}")

    def _title(self, case: int) -> str:
        return self._names[case] if self._finished[case] else f"warm-up, {self._names[case]}"
