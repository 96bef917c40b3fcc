"""Output for people and scripts: console, progress bar, metrics.jsonl, events.jsonl and TensorBoard, by rank 0."""

import contextlib
import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.errors import UserError, escape_control_chars, first_line, readable
from utils.figures import MAIN_FIGURE, describe_figure, describe_figures
from utils.files import atomic_write_text, json_text
from utils.progress import EpochBar, end_status, fit_terminal, is_terminal, wrap_for_terminal
from utils.text import count

METRICS, EVENTS, SUMMARY = "metrics.jsonl", "events.jsonl", "summary.json"


def accept_all_characters() -> None:
    """Let standard output take any text: what its encoding lacks, such as é in ASCII, becomes an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if the shell has closed it
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def emit(text: str, indent: int = 2) -> None:
    """Print a line on stdout, above the progress bar if there is one; on a terminal it is wrapped between words.

    A line that cannot be written (a full disk, a closed pipe) does not end the run.

    Args:
        text: one line, or several.
        indent: columns before the second and further lines of one that is wrapped.
    """
    if sys.stdout is None:  # closed by the shell
        return
    written = wrap_for_terminal(readable(text), indent)
    with contextlib.suppress(OSError):
        tqdm.write(written, file=sys.stdout)
        sys.stdout.flush()


def print_error(program: str, text: str) -> None:
    """Print one line on stderr, above the progress bar: `train.py: --lr 0.0: must be more than 0 and finite`."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        tqdm.write(f"{program}: {escape_control_chars(text)}", file=sys.stderr)
        sys.stderr.flush()


class Log:
    """Writes on rank 0 and does nothing on other ranks, so that callers need no rank test.

    Args:
        output_dir: folder of metrics.jsonl and of TensorBoard's events.
        is_main: whether this process writes.
        epochs, steps_per_epoch: of the run, for the bar.
        tensorboard: whether to write events too.
        step: optimizer steps that are done; TensorBoard drops later events, of a launch whose steps were lost.

    Raises:
        UserError: the folder of events cannot be written.
    """

    def __init__(
        self, output_dir: Path, is_main: bool, epochs: int, steps_per_epoch: int, tensorboard: bool, step: int = 0
    ) -> None:
        self._path = output_dir / METRICS
        self._active = is_main
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._unwritten = ""  # lines of metrics.jsonl
        self._bar: EpochBar | None = None
        self._open_bar: Callable[[], EpochBar] | None = None
        # Facts of the last log interval, for the line of an epoch whose bar has shown them.
        self._interval: list[str] = []
        self._evaluation_seconds, self._trained_at = 0.0, time.monotonic()
        self._events: Any = None
        if tensorboard and self._active:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and only on request

            folder = output_dir / "tensorboard"
            try:
                self._events = SummaryWriter(str(folder), purge_step=step + 1)
            except OSError as error:
                reason = error.strerror or first_line(error)
                raise UserError(
                    f"--tensorboard: {folder} cannot be written ({reason}); move it, or leave it out"
                ) from None

    def event(self, name: str, step: int, seconds: float, **facts: Any) -> None:
        """Append a line to events.jsonl: a launch has started or stopped, or the run is finished.

        Args:
            name: started, stopped or finished.
            step: optimizer steps that are done.
            seconds: wall time of all launches so far, without what a launch has lost.
            facts: more of it, JSON-ready.
        """
        if not self._active:
            return
        event = {"event": name, "time": round(time.time(), 3), "step": step, "seconds": round(seconds, 2)}
        line = json_text(event | facts) + "\n"
        with contextlib.suppress(OSError), (self._path.parent / EVENTS).open("a") as file:
            file.write(line)

    def info(self, text: str, indent: int = 2) -> None:
        """Print a line on stdout, as `emit` does."""
        if self._active:
            emit(text, indent)

    def truncate_after(self, epoch: int, step: int) -> None:
        """Drop records after a position, written by a launch that died after its last checkpoint.

        Args:
            epoch: epochs that are evaluated.
            step: optimizer steps that are done.

        Raises:
            OSError: it cannot be written.
        """
        if not self._active:
            return
        text = self._path.read_text() if self._path.is_file() else ""
        truncated = "".join(line + "\n" for line in text.splitlines() if _is_before(line, epoch, step))
        if truncated != text or not self._path.is_file():
            atomic_write_text(self._path, truncated)

    def record(self, values: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl, with null for what is not finite, and its numbers to TensorBoard."""
        if not self._active:
            return
        self._unwritten += json_text(values) + "\n"
        size = None
        try:
            with self._path.open("a") as file:
                size = os.fstat(file.fileno()).st_size
                file.write(self._unwritten)
            self._unwritten = ""
        except OSError as error:  # a full disk must not end the run; the lines wait for the next record
            self.info(f"warning: {self._path}: not written ({error.strerror})")
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, size)  # not half a line
        self._record_events(values)

    def _record_events(self, values: dict[str, Any]) -> None:
        if self._events is None:
            return
        try:
            for name in values.keys() - {"epoch", "step"}:
                self._events.add_scalar(name, values[name], values["step"])
            self._events.flush()
        except OSError as error:  # its writer's thread has ended
            self._events = None
            self.info(f"warning: TensorBoard's events are no longer written ({error.strerror}); metrics.jsonl is")

    def start_epoch(
        self,
        epoch: int,
        step: int,
        images_per_step: int,
        evaluations: int,
        loss_and_lr: Callable[[], tuple[float | None, float]],
    ) -> None:
        """Prepare a bar, which a terminal shows from the first step on; nothing elsewhere.

        Args:
            epoch: epochs that are done.
            step: optimizer steps that are done, since the start of the run.
            images_per_step: over all processes.
            evaluations: that are to come.
            loss_and_lr: as for `EpochBar`.
        """
        if not self._active or not is_terminal(sys.stderr):
            return
        left = self._epochs - epoch
        self._open_bar = functools.partial(
            EpochBar,
            f"epoch {epoch + 1}/{self._epochs}",
            self._steps_per_epoch,
            step - epoch * self._steps_per_epoch,
            images_per_step,
            ((left - 1) * self._steps_per_epoch, evaluations * self._evaluation_seconds),
            loss_and_lr,
        )

    def advance(self) -> None:
        """Advance the bar by one step."""
        if self._open_bar is not None:
            end_status()
            self._bar, self._open_bar = self._open_bar(), None
        if self._bar is not None:
            self._bar.advance()

    def train(self, values: dict[str, Any], metrics: Mapping[str, str]) -> None:
        """Write a log interval to the files, and to the bar or, without a terminal, as a line.

        Args:
            values: of a line of metrics.jsonl.
            metrics: label -> value, of what the line has beside the speed.
        """
        self.record(values)
        shown = {
            **metrics,
            "images/s": f"{values['images_per_second']:,.0f}",
            "data wait": f"{values['data_wait']:.1%}",
        }
        facts = "  ".join(f"{name} {value}" for name, value in shown.items())
        self._trained_at = time.monotonic()
        if self._bar is not None:
            self._bar.show_data_wait(values["data_wait"])
            self._interval = [f"train {name} {value}" for name, value in shown.items()]
            return
        done = values["step"] - (values["epoch"] - 1) * self._steps_per_epoch
        self.info(
            f"epoch {values['epoch']}/{self._epochs}  step {done}/{self._steps_per_epoch}  {facts}"
            f"  lr {values['lr']:.4g}"
        )

    def evaluation(self, values: dict[str, Any], best_by: str, num_classes: int) -> None:
        """Write an evaluation to the files, and as a line, which has the figure `best_by` in any case."""
        self._evaluation_seconds = time.monotonic() - self._trained_at
        self._close_bar()
        self.record({name: value for name, value in values.items() if not isinstance(value, list)})
        first, *others = describe_figures(values, best_by, num_classes)
        facts = [f"epoch {values['epoch']}/{self._epochs}", f"val {first}", *others]
        main = MAIN_FIGURE["multilabel" if "val/map" in values else "multiclass"]
        names = (main,) if best_by in (main, "top5", "loss") else (main, best_by)
        keys = ((name, f"val/ema_{name}") for name in names)
        ema = [f"EMA {describe_figure(name, values[key])}" for name, key in keys if key in values]
        if self._interval:  # on a terminal: what is left out of one line is in metrics.jsonl
            self.info(fit_terminal([*facts, *ema, *self._interval]))
        else:
            self.info("  ".join([*facts, f"on {count(values['val/count'], 'image')}", *ema]))
        self._interval = []

    def epoch_without_evaluation(self, epoch: int) -> None:
        """Write a line for an epoch that `--eval-every` leaves without an evaluation; `epoch` counts from 1."""
        self._close_bar()
        self.info(fit_terminal([f"epoch {epoch}/{self._epochs}", "not evaluated", *self._interval]))
        self._interval = []

    def _close_bar(self) -> None:
        end_status()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """End the bar and TensorBoard's file."""
        self._close_bar()
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()


def _is_before(line: str, epoch: int, step: int) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return False  # cut off by a crash
    return bool(record["epoch"] <= epoch if any(name.startswith("val/") for name in record) else record["step"] <= step)
