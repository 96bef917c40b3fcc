"""Programs in processes that have already imported train.py, forked from a server of them. That saves seconds each.

For tests whose subject is not how a process starts; those need `tests.harness`.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.harness import LIMIT, TRAIN, Finished, Process, Started, environment, launch

RUN_TRAIN = "import sys, train; sys.exit(train.main(sys.argv[1:]))"
RUN_COMMAND = f"import runpy, sys; sys.argv[0] = {str(TRAIN)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"


def start_fork_server() -> None:
    """Start the server, unless it runs; does not wait for its imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    forkserver.ensure_running()


class _Forked:
    """A process of the server, as subprocess has it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signal: int) -> None:
        os.kill(self.pid, signal)


class _StartedForked(Started):
    def _open(self, words: Sequence[str], environ: dict[str, str], cwd: Path | None) -> Process:
        return _Forked(_run, list(words), environ, cwd, self._out.name, self._err.name)


def _run(words: list[str], environ: dict[str, str], cwd: Path | None, out: str, err: str) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(path, "wb", buffering=0) as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environ)
    if cwd is not None:
        os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)  # the default one, not that of this process
    torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late
    program, *flags = words
    sys.argv = ["-c", *flags]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def start_forked(
    *flags: object, program: str = RUN_TRAIN, env: Mapping[str, object] | None = None, cwd: Path | None = None
) -> Started:
    """Start the text of a Python program, train.py by default; the rest as `tests.harness.start`."""
    return _StartedForked([program, *map(str, flags)], environment(env), cwd)


def start_on_terminal(*flags: object, terminal: str, env: Mapping[str, object] | None = None) -> Process:
    """Run train.py as a command on a terminal, of which this is the path."""
    return _Forked(_run, [RUN_COMMAND, *map(str, flags)], environment(env), None, terminal, terminal)


def launch_forked(
    *flags: object,
    program: str,
    env: Mapping[str, object] | None = None,
    cwd: Path | None = None,
    timeout: float = LIMIT,
) -> Finished:
    """Run the text of a Python program to its end."""
    with start_forked(*flags, program=program, env=env, cwd=cwd) as started:
        return started.end(timeout)


def run_train(*flags: object, processes: int = 1) -> Finished:
    """Run train.py to its end as `launch` does, but a single process has already imported it."""
    if processes > 1:
        return launch(*flags, processes=processes)
    return launch_forked(*flags, program=RUN_TRAIN)


def launch_ranks(
    *flags: object,
    processes: int = 2,
    program: str = RUN_TRAIN,
    env: Mapping[str, object] | None = None,
    cwds: Sequence[Path] = (),
) -> list[Finished]:
    """Run train.py on several ranks to their end, as torchrun does, in processes that have already imported it.

    The store is here, as it is in torchrun's process. When a rank fails the others get SIGTERM.

    Args:
        flags: of all ranks.
        processes: number of ranks.
        program: that each runs.
        env: variables of all.
        cwds: working folder of each.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all: dict[str, object] = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
    of_all |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(processes):
            of_rank = of_all | {"RANK": rank, "LOCAL_RANK": rank} | dict(env or {})
            started = start_forked(*flags, program=program, env=of_rank, cwd=cwds[rank] if cwds else None)
            ranks.append(stack.enter_context(started))
        _end_together(ranks)
        return [rank.end() for rank in ranks]


def _end_together(ranks: Sequence[Started]) -> None:
    deadline = time.monotonic() + LIMIT
    while not any(rank.process.poll() for rank in ranks):
        if all(rank.process.poll() == 0 for rank in ranks):
            return
        assert time.monotonic() < deadline, [rank.err for rank in ranks]
        time.sleep(0.01)
    for rank in ranks:
        if rank.process.poll() is None:
            rank.send(signal.SIGTERM, rank.pid)


def run_ranks(function: Callable[..., None], processes: int, *arguments: object) -> None:
    """Call `function(rank, processes, *arguments)` in as many processes, which have imported torch; none may fail.

    `function` is of a test's module.
    """
    ranks = [_Forked(function, rank, processes, *arguments) for rank in range(processes)]
    assert [rank.wait(LIMIT) for rank in ranks] == [0] * processes


# Runs a list of command lines of train.py. Writes for each the exit status, the names of the files with its standard
# output and error, and the changed files to the file `results`.
_SERIES = """
import json, os, sys
import train
from tests.harness import changed_names, list_output

folder, commands = sys.argv[1], json.loads(sys.argv[2])
results = []
for number, words in enumerate(commands):
    paths = [f"{folder}/{number}.{name}" for name in ("out", "err")]
    for stream, path in zip((sys.stdout, sys.stderr), paths):
        stream.flush()
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    before = list_output(words)
    status = train.main(words)
    results.append((status, *paths, sorted(changed_names(before, list_output(words)))))
    sys.stdout.flush()
with open(f"{folder}/results", "w") as file:
    json.dump(results, file)
"""


def launch_series(*commands: Sequence[object], cwd: Path | None = None, timeout: float = LIMIT) -> list[Finished]:
    """Run train.py once for each tuple of flags, one after the other in one process that has already imported it.

    For tests of what launches leave to each other. A test of the process itself needs `launch`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, words = Path(name), json.dumps([list(map(str, flags)) for flags in commands])
        done = launch_forked(folder, words, program=_SERIES, cwd=cwd, timeout=timeout)
        assert done.status == 0, (done, [path.read_text() for path in sorted(folder.iterdir())])
        return [
            Finished(status, Path(out).read_text(), Path(err).read_text(), frozenset(written))
            for status, out, err, written in json.loads((folder / "results").read_text())
        ]
