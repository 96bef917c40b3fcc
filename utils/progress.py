"""Progress on the terminal: a status line while there is nothing to count, and bars. Nothing without a terminal."""

import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
INTERVAL = 1.0  # seconds between two updates of the status line
WIDE = 110  # columns of a terminal from which the bar of an epoch has all its facts
_BAR = "{desc}  {percentage:3.0f}% |{bar}| "
_status: "_Status | None" = None


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `sys.stdout` or `sys.stderr` is a terminal; each is None if the shell has closed it."""
    return stream is not None and stream.isatty()


def _columns() -> int | None:
    """Of the terminal that standard output is; None if it is none."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def wrap_for_terminal(text: str, indent: int) -> str:
    """Each line of `text`, wrapped between words with `indent` columns before what follows; unchanged elsewhere."""
    columns = _columns()
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def fit_terminal(facts: Sequence[str]) -> str:
    """One line of the first of `facts`, at least two, that fits the terminal; of all without one."""
    columns = _columns()
    count = len(facts)
    while columns is not None and count > 2 and len("  ".join(facts[:count])) > columns:
        count -= 1
    return "  ".join(facts[:count])


# ---------------------------------------------------------------------------------------------------------------------
# Status


class _Status:
    """The status line, which a thread keeps current."""

    def __init__(self, text: str) -> None:
        bar_format = "{desc}  {elapsed_s:.0f} s"
        self._bar: tqdm[Any] = tqdm(desc=text, bar_format=bar_format, leave=False, dynamic_ncols=True)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._update, name="status", daemon=True)
        self._thread.start()

    def show(self, text: str) -> None:
        self._bar.set_description_str(text, refresh=False)
        self._bar.reset()  # the time

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._bar.close()

    def _update(self) -> None:
        while not self._closed.wait(INTERVAL):
            self._bar.refresh()


def start_status(text: str) -> bool:
    """Begin a status line: what the program does, with the seconds. Without a terminal do nothing, and return False.

    Only a program's main calls this. Then `show_status` has an effect, until `end_status`.
    """
    global _status
    if is_terminal(sys.stderr):
        _status = _Status(text)
    return _status is not None


def show_status(text: str) -> None:
    """Replace the text of the status line, if there is one."""
    if _status is not None:
        _status.show(text)


def end_status() -> None:
    """Remove the status line, if there is one."""
    global _status
    if _status is not None:
        _status.close()
        _status = None


# ---------------------------------------------------------------------------------------------------------------------
# Bars


class _FactsBar(tqdm):  # type: ignore[type-arg]
    """A bar whose format has the key `facts`, made of the rate in steps per second and the terminal's columns."""

    def __init__(self, facts: Callable[[float | None, int], str], **options: Any) -> None:
        self._facts = facts  # tqdm draws as soon as it is made
        super().__init__(**options)

    @property
    def format_dict(self) -> dict[str, Any]:
        values = dict(super().format_dict)
        return values | {"facts": self._facts(values["rate"], values["ncols"] or 80)}


class EpochBar:
    """The bar of one epoch's training: loss, learning rate, speed, and the time that is left of epoch and run.

    Args:
        title: left of the bar.
        steps, done: of the epoch.
        images_per_step: over all processes.
        later: steps of the epochs after this one, and the seconds of all evaluations to come.
        loss_and_lr: gives the newest loss that is known, None if there is none, and the learning rate. Called
            when the bar is drawn.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        done: int,
        images_per_step: int,
        later: tuple[int, float],
        loss_and_lr: Callable[[], tuple[float | None, float]],
    ) -> None:
        self._steps, self._done, self._images_per_step = steps, done, images_per_step
        self._later, self._loss_and_lr = later, loss_and_lr
        self._data_wait: float | None = None
        self._bar = _FactsBar(
            self._facts, desc=title, total=steps, initial=done, bar_format=_BAR + "{facts}", leave=False,
            dynamic_ncols=True, smoothing=0.1,
        )  # fmt: skip

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        self._bar.update()

    def show_data_wait(self, share: float) -> None:
        """Of the last log interval, 0 to 1."""
        self._data_wait = share

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _facts(self, rate: float | None, columns: int) -> str:
        loss, lr = self._loss_and_lr()
        facts = [f"loss {loss:.3f}"] if loss is not None else []
        facts.append(f"lr {lr:.3g}")
        if columns >= WIDE:
            facts.insert(0, f"{self._done}/{self._steps} steps")
            if self._data_wait is not None:
                facts.append(f"data wait {self._data_wait:.1%}")
        if rate:
            later_steps, later_seconds = self._later
            left = (self._steps - self._done) / rate
            facts.append(f"{rate * self._images_per_step:,.0f}/s")
            run_left = left + later_steps / rate + later_seconds
            facts.append(f"{tqdm.format_interval(left)} left, run {tqdm.format_interval(run_left)}")
        return "  ".join(facts)


def with_bar(items: Iterable[T], title: str, total: int, is_main: bool) -> Iterable[T]:
    """`items`, with a bar on the terminal of the main process; it goes away at the end."""
    bar_format = _BAR + "{n_fmt}/{total_fmt}  {remaining} left"
    return tqdm(
        items, title, total, leave=False, bar_format=bar_format, dynamic_ncols=True,
        disable=None if is_main else True,
    )  # fmt: skip
