"""Starts train.py and other programs as users do, watches and ends their processes, and reads what they left."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from tests.processes import alive, descendants, identify, kill_tree, ranks_among

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
LIMIT = 600.0  # seconds: what takes longer hangs, also on a busy machine
TEXT = "TEXT_OF_A_PROGRAM"  # variable of the environment


def tracked_files(*patterns: str) -> list[Path]:
    """Files of the project that git tracks or would track, by patterns such as `*.py`, which cross folders."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(path for path in {ROOT / name for name in names if name} if path.is_file())


def offences(paths: Iterable[Path], find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Path -> what `find` finds in the text of a file, for the files with some."""
    found = {str(path.relative_to(ROOT)): find(path.read_text(encoding="utf-8")) for path in paths}
    return {name: each for name, each in found.items() if each}


@dataclass(frozen=True)
class Finished:
    """A program that has ended.

    Attributes:
        written: names in its --output-dir that were created, changed or removed.
    """

    status: int
    out: str
    err: str
    written: frozenset[str] = frozenset()


# ---------------------------------------------------------------------------------------------------------------------
# Starting


def command(program: Path | str = TRAIN, processes: int = 1, torchrun: Sequence[str] = ()) -> list[str]:
    """The words that start a program: a file, or the text of a Python program. Under torchrun, if that has flags."""
    if isinstance(program, Path):
        python, words = ([sys.executable] if program.suffix == ".py" or program.is_dir() else []), [str(program)]
    else:  # the text is in a variable, as torchrun repeats the words in its report
        python, words = [sys.executable, "-u"], ["-c", f"import os; exec(os.environ['{TEXT}'])"]
    if processes == 1 and not torchrun:
        return [*python, *words]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    launcher += torchrun or ("--standalone",)
    return [*launcher, *(["--no-python", *python] if isinstance(program, str) else []), *words]


def environment(changes: Mapping[str, object] | None = None) -> dict[str, str]:
    """This process's variables, changed: None removes one. One thread a process, as several share few cores."""
    chosen = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(changes or {})
    others = {name: value for name, value in os.environ.items() if name not in chosen}
    return others | {name: str(value) for name, value in chosen.items() if value is not None}


class Process(Protocol):
    """What is used of a subprocess.Popen."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """The exit status, -N for signal N; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def send_signal(self, signal: int) -> None:
        """Send a signal."""


class Started:
    """A program that runs. At the end of the `with` block it is killed, with all that it has started.

    Args:
        words: the whole command line.
        environ: all its variables.
        cwd: its working folder.
    """

    def __init__(self, words: Sequence[str], environ: dict[str, str], cwd: Path | None = None) -> None:
        self._list_output = partial(list_output, words, cwd)
        self._before = self._list_output()
        self._out, self._err = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()  # noqa: SIM115 -- closed at the end
        self._seen: dict[int, int] = {}
        self.process = self._open(words, environ, cwd)

    def _open(self, words: Sequence[str], environ: dict[str, str], cwd: Path | None) -> "Process":
        return subprocess.Popen(words, stdout=self._out, stderr=self._err, env=environ, cwd=cwd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        """Standard output so far."""
        return _content(self._out.fileno())

    @property
    def err(self) -> str:
        """Standard error so far."""
        return _content(self._err.fileno())

    def reaches(self, when: Callable[[], bool], timeout: float = LIMIT) -> bool:
        """Wait until `when()`; False if the program ends before.

        Raises:
            AssertionError: neither happens within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not when():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"waited {timeout} s\n{self.out}{self.err}"
            time.sleep(0.001)
        return True

    def wait_for(self, when: Callable[[], bool], timeout: float = LIMIT) -> None:
        """Wait until `when()`, which must come before the program ends."""
        assert self.reaches(when, timeout), f"ended by itself with {self.process.poll()}\n{self.out}{self.err}"

    def descendants(self) -> list[int]:
        """Process ids below the program; from now on they are known, though their parents may end."""
        found = descendants(self.pid)
        self._seen |= identify(found)
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the trainers that torchrun has started so far."""
        return ranks_among(self.descendants())

    def send(self, number: int, *pids: int) -> None:
        """Send a signal to some processes, to `pid` or below it."""
        self.descendants()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, timeout: float = LIMIT) -> Finished:
        """Wait for the program's end.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than `timeout` seconds.
        """
        status = self.process.wait(timeout)
        return Finished(status, self.out, self.err, changed_names(self._before, self._list_output()))

    def end_when(self, when: Callable[[], bool], number: int = signal.SIGKILL, rank: int | None = None) -> int:
        """Send a signal to the program, or to one of its ranks, once `when()`; returns the exit status."""
        self.wait_for(when)
        if rank is not None:
            self.send(number, self.ranks()[rank])
        elif number == signal.SIGKILL:
            self.kill()
        else:
            self.send(number, self.pid)  # torchrun passes it on
        return self.process.wait(LIMIT)

    def check_nothing_left(self, timeout: float = 100) -> None:
        """Every process that was seen below the program ends within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while left := alive(self._seen):
            assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to the program and all processes below it, also those whose parents have ended."""
        if self.process.poll() is None:
            kill_tree(self.pid)
        for pid in alive(self._seen):
            kill_tree(pid)
        self.process.wait()


def _content(file: int) -> str:
    """All of an open file. The offset, which the writing process shares, stays."""
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def start(
    *flags: object,
    program: Path | str = TRAIN,
    processes: int = 1,
    torchrun: Sequence[str] = (),
    prefix: Sequence[object] = (),
    env: Mapping[str, object] | None = None,
    cwd: Path | None = None,
) -> Started:
    """Start a program, train.py by default: `with start("--epochs", 2, processes=2) as started:`.

    Args:
        flags: of the program.
        program: a file or folder, or the text of a Python program, which can import all of the project.
        processes: of a torchrun; 1 without flags of torchrun is a plain process.
        torchrun: its flags, instead of --standalone.
        prefix: words of a command that starts the program, such as `ip netns exec NAME`.
        env: variables that differ from this process's, as in `environment`.
        cwd: its working folder.
    """
    words = [*map(str, prefix), *command(program, processes, torchrun), *map(str, flags)]
    if isinstance(program, str):
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"PYTHONPATH": os.pathsep.join(paths), TEXT: program, **(env or {})}
    return Started(words, environment(env), cwd)


def launch(*flags: object, timeout: float = LIMIT, **options: Any) -> Finished:
    """Run a program to its end: `launch("--epochs", 2, processes=2)`. Takes what `start` takes."""
    with start(*flags, **options) as started:
        return started.end(timeout)


def launch_and_end(
    *flags: object, when: Callable[[], bool], number: int = signal.SIGKILL, rank: int | None = None, **options: Any
) -> int:
    """Start a program and end it, or one of its ranks, with a signal once `when()`; returns the exit status."""
    with start(*flags, **options) as started:
        return started.end_when(when, number, rank)


# ---------------------------------------------------------------------------------------------------------------------
# What a program left


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(output_dir: Path) -> list[tuple[int, float]]:
    """Step and training loss of every interval in metrics.jsonl."""
    return [(record["step"], record["train/loss"]) for record in read_metrics(output_dir) if "train/loss" in record]


def read_checkpoint(output_dir: Path, name: str = "last.pt") -> dict[str, Any]:
    """A checkpoint, read as the trainer does."""
    loaded: dict[str, Any] = torch.load(output_dir / name, map_location="cpu", weights_only=True)
    return loaded


def list_output(words: Sequence[str], cwd: Path | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> inode, size and time of the files in a command line's --output-dir."""
    folders = [value for flag, value in itertools.pairwise(words) if flag == "--output-dir"]
    found: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(OSError, IndexError):
        for entry in os.scandir(Path(cwd or "", folders[-1])):
            stat = entry.stat(follow_symlinks=False)
            found[entry.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns) if entry.is_file() else ()
    return found


def changed_names(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> frozenset[str]:
    """Names that are in one listing only, or not the same in both."""
    return frozenset(name for name, _ in before.items() ^ after.items())


def error_line(done: Finished, program: str = "train.py") -> str:
    """The one line that says why a program ended. torchrun's report may repeat it; there is no traceback of ours."""
    ours = [line for line in done.err.splitlines() if line.startswith(f"{program}: ")]
    repeated = done.err.count(f"  traceback : {program}: ")
    assert len(ours) == done.err.count(f"{program}: ") - repeated == 1, done.err
    assert "main(sys.argv[1:])" not in done.err, done.err  # the root of any traceback of train.py
    return ours[0]


def assert_refused(
    done: Finished,
    *fragments: str,
    program: str = "train.py",
    processes: int = 1,
    written: Iterable[str] = (),
) -> None:
    """A mistake of the user: exit status 2, one line that holds the fragments, nothing printed and nothing written.

    Args:
        done: what was refused. Under torchrun each rank's exit status is 2; torchrun reports that, and ends with 1.
        fragments: of the line.
        program: whose name the line begins with.
        processes: of torchrun; 1 without it.
        written: names of the files in --output-dir that may be written nevertheless.
    """
    line = error_line(done, program)
    for fragment in fragments:
        assert fragment in line, f"{fragment!r} is not in {line!r}"
    if processes == 1:
        assert (done.status, done.err) == (2, f"{line}\n")
    else:
        assert done.status == 1
        assert "exitcode  : 2" in done.err
        assert f"  traceback : {line}\n====" in done.err, "torchrun's report ends with it"
    assert done.out in ("", "loading torch, DALI and timm\n")
    assert done.written <= set(written)
