"""Run a command with a time limit, and end all its processes and remove all its temporary files.

    python scripts/bench launch --limit 280 -- python train.py --data-dir DIR
    python scripts/bench launch --limit 280 --terminate-after FILE -- COMMAND    # SIGTERM once FILE has a line

Exit status: that of the command, 128 more than the signal that ended it, or 124 after the time limit. A command that is
asked to end and does not is killed. The command gets a new folder for temporary files. All processes that inherit the
path of this folder are ended with the command, in any session and process group.

Other comparisons use the functions below.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, NoReturn

import typer

from utils.errors import Stopped, UserError
from utils.options.cli import Program
from utils.options.limits import ABOVE_0
from utils.options.readers import number_option

EXIT_TIMEOUT = 124  # as timeout(1)
END_SECONDS = 30.0  # for a command to end after SIGTERM
KILL_SECONDS = 5.0  # for a killed process to be gone
POLL_SECONDS = 0.05
TRAIN = Path(__file__).resolve().parents[2] / "train.py"
LIMIT = 400.0  # seconds, by default
Limit = Annotated[float, typer.Option(help="Seconds after which one is cut off.", **number_option(float))]


def stop_on_sigterm() -> None:
    """From now on SIGTERM raises Stopped, so that a command that is running is ended, too."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)


@contextlib.contextmanager
def launched(
    words: Sequence[object],
    out: IO[str] | None = None,
    err: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
    cpus: int | None = None,
    end_seconds: float | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A running command; at the end of the block it is asked to end, then killed with all that it has started.

    Args:
        out, err: where its output goes; None for where that of this process goes.
        environment: variables to set besides those of this process.
        cpus: number of CPU threads that it may use; None for those of this process.
        end_seconds: how long it may take to end after SIGTERM; END_SECONDS by default.
    """
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as temporary:
        allowed = sorted(os.sched_getaffinity(0))[:cpus]
        process = subprocess.Popen(
            list(map(str, words)), stdout=out, stderr=err, start_new_session=True,
            env=os.environ | (environment or {}) | {"TMPDIR": temporary},
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )  # fmt: skip
        try:
            yield process
        finally:
            try:
                if process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(END_SECONDS if end_seconds is None else end_seconds)
            finally:  # a second signal may have cut the wait short
                kill_all(temporary)
                process.wait()


def run_with_limit(
    words: Sequence[object], limit: float, out: IO[str], err: IO[str], environment: Mapping[str, str] | None = None
) -> int | None:
    """Exit status of a command, None if it ran longer than `limit` seconds; its processes and files are removed."""
    with launched(words, out, err, environment) as process, contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit)
    return None


def kill_all(temporary: str) -> None:
    """Kill the processes whose TMPDIR is this folder or one below it, and wait until they are gone.

    The folder belongs to one launch. A process keeps the variable when its parent ends, and when it starts a new
    session, as torchrun's workers do.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := _processes_with(temporary)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _processes_with(temporary: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(f"{os.fsdecode(each)}/".startswith(f"TMPDIR={temporary}/") for each in variables):
                found.append(int(pid))
    return found


def wait_for_line(path: Path, process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until a file has a line; False if the process ended before, or the monotonic clock reached `deadline`."""
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # it does not exist yet
            if b"\n" in path.read_bytes():
                return True
        time.sleep(POLL_SECONDS)
    return False


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def read_options(
    command: Annotated[list[str], typer.Argument(help="Words of the command, after --.")],
    limit: Annotated[float, typer.Option(help="Time limit of the command, seconds.", **number_option(float))],
    terminate_after: Annotated[
        Path | None, typer.Option(help="Send SIGTERM once this file has a line.", show_default=False)
    ] = None,
) -> tuple[list[str], float, Path | None]:
    """Run a command with a time limit, and end all its processes and remove all its temporary files.

    Exit status: that of the command; 124 after the time limit; 143 stopped by SIGTERM.
    """
    ABOVE_0.check("--limit", limit)
    return command, limit, terminate_after


def run(options: tuple[list[str], float, Path | None]) -> int:
    """Run the command; returns the exit status."""
    command, limit, terminate_after = options
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: cannot be started (no such program); give the words of a command")
    stop_on_sigterm()
    deadline = time.monotonic() + limit
    with launched(command) as process:
        if terminate_after is not None and wait_for_line(terminate_after, process, deadline):
            process.terminate()
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return EXIT_TIMEOUT
    return status if status >= 0 else 128 - status


PROGRAM = Program("bench launch", read_options)
