"""Sends a run to a tracker, from a process of its own that reads the files of the output folder.

The files are the queue. So a tracker that is slow, down or broken can neither slow nor end the training, and what was
not sent can be sent later: scripts/track.py RUN.
"""

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from utils.errors import EXIT_DONE, EXIT_FAILED, escape_control_chars, first_line, readable
from utils.files import json_text, write_json
from utils.log import EVENTS, METRICS, SUMMARY, Log
from utils.options.resolved import CHOSEN, ResolvedConfig
from utils.report.output_folder import read_lines, read_object
from utils.report.tracking.trackers import Outcome, Tracker

TRACKING = "tracking.json"  # of each tracker: id of the run, and how many there were
SENT = "tracking-{}.jsonl"  # the lines that a tracker has got
OUTPUT = "tracking.log"  # what the tracker's package prints; locked by the process that sends
PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "track.py"
MAX_OUTPUT_BYTES = 10_000_000  # of OUTPUT, which then begins again: a disk that it fills would have no checkpoint
POLL_SECONDS = 0.2
READ_SECONDS = 2.0  # between two looks at the files
RETRY_SECONDS = (5.0, 300.0)  # after a failure, twice as long each time
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # which ask for the rest
END_SECONDS = 60.0  # for the rest to be sent when a run has ended
WAIT_SECONDS, WAIT_STOPPED_SECONDS = 30.0, 5.0  # that a finished run waits for that, and one that must end
SAVE_LINES = 100  # after which SENT is written
ROUNDING = 0.01  # share by which a GPU's losses may differ when steps are repeated without --deterministic
# Keys of metrics.jsonl that differ when steps are repeated.
OF_THE_MACHINE = {
    "images_per_second", "data_wait", "seconds", "checkpoint_seconds", "gpu_memory_mb", "val/seconds",
}  # fmt: skip


class TrackerProcess(contextlib.AbstractContextManager["TrackerProcess"]):
    """The process that sends a run; on ranks other than 0, and without `--track`, there is none.

    At the end of the `with` block the rest is sent. If that takes long, the process goes on alone.

    Args:
        is_main: whether this process is rank 0.
        log: gets a warning.
    """

    def __init__(self, config: ResolvedConfig, is_main: bool, log: Log) -> None:
        self._config, self._log = config, log
        self._is_active = is_main and config.track != "none"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to send; the files of the output folder are this run's."""
        if not self._is_active:
            return
        config = self._config
        words = [sys.executable, str(PROGRAM), str(config.output_dir), "--track", config.track]
        words += ["--follow", str(os.getpid())]
        if config.track_project is not None:
            words += ["--track-project", config.track_project]
        if config.track_checkpoint:
            words += ["--track-checkpoint"]
        # Signals that come before it is ready wait until then: a short run ends earlier.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            # Of another session, so that Ctrl-C does not reach it: it sends the rest when this process has ended.
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            self._log.info(f"warning: --track {config.track}: not started ({error.strerror}); training goes on")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        seconds = WAIT_SECONDS if kind is None else WAIT_STOPPED_SECONDS
        process.terminate()  # which asks it to send the rest
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._log.info(
                f"warning: {self._config.track} has not taken all metrics yet; a process tries for {END_SECONDS:.0f} s "
                f"more, then {resend_command(self._config.output_dir, self._config.track)} sends the rest"
            )


def resend_command(folder: Path, tracker: str) -> str:
    """The command that sends what is left."""
    return f"scripts/track.py {folder} --track {tracker}"


class Sender:
    """Sends what the files of a run hold and its tracker has not got yet.

    A launch that repeats steps after a crash adds none twice: a resume gives the same values. Where it gives others, as
    after another --lr, no tracker can take back what it has. Then the tracked run is ended, and a new one, NAME-2, gets
    all lines.

    Args:
        create_tracker: makes its client; called again after it has failed.
        with_checkpoint: whether `best.pt` is sent when the run is finished.
    """

    def __init__(
        self, folder: Path, name: str, create_tracker: Callable[[], Tracker], with_checkpoint: bool = False
    ) -> None:
        self._folder, self._name, self._create_tracker = folder, name, create_tracker
        self._with_checkpoint = with_checkpoint
        self._states = read_object(folder / TRACKING)  # of all trackers
        self._state: dict[str, Any] = {"run_id": None, "number": 1} | self._states.get(name, {})
        self._sent_file = folder / SENT.format(name)
        self._sent = read_lines(self._sent_file)
        self._tracker: Tracker | None = None

    def send(self) -> None:
        """Send the new lines of metrics.jsonl. May raise any error of the tracker; the next call goes on from there."""
        tracker = self._open()
        records = read_lines(self._folder / METRICS)  # without a last line that is being written
        if not self._is_beginning(records):
            tracker = self._begin_anew()
        unwritten: list[dict[str, Any]] = []
        try:
            for record in records[len(self._sent) :]:
                values = {name: value for name, value in record.items() if value is not None and name != "step"}
                tracker.log(values, record["step"])
                self._sent.append(record)
                unwritten.append(record)
                if len(unwritten) == SAVE_LINES:
                    self._note(unwritten)
        finally:
            self._note(unwritten)

    def _is_beginning(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Whether what was sent is the beginning of `records`; or more, as long as a launch may repeat its end."""
        config = read_object(self._folder / "config.json")
        is_exact = config.get("device") != "cuda" or config.get("deterministic") is True
        tolerance = 0.0 if is_exact else ROUNDING
        pairs = zip(self._sent, records, strict=False)
        is_lost = len(self._sent) > len(records) and self._outcome() == "finished"
        return not is_lost and all(_is_same(one, other, tolerance) for one, other in pairs)

    def _begin_anew(self) -> Tracker:
        """End the tracked run, and begin one that has no line yet."""
        earlier, self._tracker = self._open(), None
        earlier.finish("died", {}, None)
        self._sent = []
        with contextlib.suppress(OSError):
            self._sent_file.unlink(missing_ok=True)
        self._state = {"run_id": None, "number": self._state["number"] + 1}
        return self._open()

    def finish(self) -> None:
        """Send the end of a launch. May raise any error of the tracker."""
        outcome = self._outcome()
        best = self._folder / "best.pt"
        is_sent = self._with_checkpoint and outcome == "finished" and best.is_file()
        self._open().finish(outcome, read_object(self._folder / SUMMARY), best if is_sent else None)

    def _open(self) -> Tracker:
        if self._tracker is None:
            tracker = self._create_tracker()
            name, number = readable(self._folder.absolute().name), self._state["number"]
            config = {key: value for key, value in read_object(self._folder / "config.json").items() if key != CHOSEN}
            flags = {key: readable(value) if isinstance(value, str) else value for key, value in config.items()}
            self._state["run_id"] = tracker.open(
                self._state["run_id"], name if number == 1 else f"{name}-{number}", flags
            )
            with contextlib.suppress(OSError):  # a full disk
                write_json(self._folder / TRACKING, self._states | {self._name: self._state})
            self._tracker = tracker
        return self._tracker

    def _outcome(self) -> Outcome:
        events = [event.get("event") for event in read_lines(self._folder / EVENTS)]
        if not events:
            return "died"
        return "finished" if events[-1] == "finished" else "stopped" if events[-1] == "stopped" else "died"

    def _note(self, records: list[dict[str, Any]]) -> None:
        """Write that these lines were sent, and empty the list."""
        lines = "".join(json_text(record) + "\n" for record in records)
        records.clear()
        with contextlib.suppress(OSError), self._sent_file.open("a") as file:  # lines that are sent twice are no harm
            file.write(lines)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> bool:
    """Whether two lines of metrics.jsonl have the same values, but for times and memory.

    Args:
        tolerance: share by which losses and accuracies may differ.
    """
    for name in (one.keys() | other.keys()) - OF_THE_MACHINE:
        before, now = one.get(name), other.get(name)
        if isinstance(before, float) and isinstance(now, float) and name != "lr":
            if not math.isclose(before, now, rel_tol=tolerance):
                return False
        elif before != now:
            return False
    return True


def send_run(
    folder: Path,
    name: str,
    create_tracker: Callable[[], Tracker],
    with_checkpoint: bool = False,
    pid: int | None = None,
) -> int:
    """Send a run; returns the exit status.

    Args:
        create_tracker, with_checkpoint: as of `Sender`.
        pid: the training process, which has started this one: send while it lives, and then the rest.

    Raises:
        OSError: the folder cannot be written.
    """
    end = None if pid is None else _End(pid, folder / OUTPUT)  # before a wait for another process
    with captured_output(folder) as messages:
        sender = Sender(folder, name, create_tracker, with_checkpoint)  # of what that one has sent
        if end is not None:
            _follow(sender, end, name, messages)
        return _send_all(sender, name, folder, messages)


def _follow(sender: Sender, end: "_End", name: str, messages: IO[str]) -> None:
    """Send until `end`; a failure that repeats itself is printed once."""
    retry_seconds, last_failure = RETRY_SECONDS[0], ""
    while not end.is_due():
        try:
            sender.send()
            retry_seconds, pause = RETRY_SECONDS[0], READ_SECONDS
        except (Exception, SystemExit) as error:
            failure = first_line(error)
            if failure != last_failure:
                _print(messages, f"--track {name}: {failure}; training goes on, and so do the attempts")
            last_failure, pause = failure, retry_seconds
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS[1])
        end.wait(pause)


def _send_all(sender: Sender, name: str, folder: Path, messages: IO[str]) -> int:
    """Send what is left, and the end of the launch; returns the exit status."""
    try:
        sender.send()
        sender.finish()
    except (Exception, SystemExit) as error:
        _print(messages, f"--track {name}: {first_line(error)}; {resend_command(folder, name)} sends the rest")
        return EXIT_FAILED
    return EXIT_DONE


@contextlib.contextmanager
def captured_output(folder: Path) -> Iterator[IO[str]]:
    """Standard output and error go to OUTPUT while one process at a time sends; gives the former standard error.

    A second process waits here for the end of the first one.

    Raises:
        OSError: the file cannot be written.
    """
    with (
        (folder / OUTPUT).open("a") as locked,
        (folder / OUTPUT).open("a") as output,
        os.fdopen(os.dup(2), "w") as messages,
    ):
        for file in (locked, messages):  # else a tracker's process that lives on keeps the lock, or a pipe open
            os.register_at_fork(after_in_child=file.close)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(locked, fcntl.LOCK_EX)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        yield messages


class _End:
    """When to send the rest: SIGTERM or SIGINT came, or the training process `pid` has ended.

    This process ends END_SECONDS after that, whatever it waits for. Until then the file `output` is kept short.
    """

    def __init__(self, pid: int, output: Path) -> None:
        self._pid, self._output, self._is_asked = pid, output, False
        for number in END_SIGNALS:
            signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        threading.Thread(target=self._limit, daemon=True).start()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def is_due(self) -> bool:
        return self._is_asked or os.getppid() != self._pid

    def wait(self, seconds: float) -> None:
        """Wait, but not beyond the end."""
        deadline = time.monotonic() + seconds
        while not self.is_due() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _limit(self) -> None:
        deadline = math.inf
        while time.monotonic() < deadline:
            if self.is_due():
                deadline = min(deadline, time.monotonic() + END_SECONDS)
            with contextlib.suppress(OSError):
                if self._output.stat().st_size > MAX_OUTPUT_BYTES:
                    os.truncate(self._output, 0)
            time.sleep(POLL_SECONDS)
        if os.getpgrp() == os.getpid():  # with what the tracker's package has started
            os.killpg(0, signal.SIGKILL)
        os._exit(EXIT_FAILED)


def _print(messages: IO[str], text: str) -> None:
    """Print a line; where nobody reads it any more, nothing happens."""
    with contextlib.suppress(OSError):
        messages.write(escape_control_chars(text) + "\n")
        messages.flush()
