"""`train.py --processes N`: starts the processes of this machine with torch's elastic launcher, as torchrun does."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from utils.distributed.launcher import read_launch, terminate_torchrun
from utils.distributed.startup import show_first_line
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR
from utils.progress import end_status

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SIGNALS = "SIGTERM,SIGINT"  # on which torch's launcher ends its processes
STATUSES = "BRISK_STATUSES"  # variable of the environment: folder with the exit status of each rank
SHUTDOWN_TIMEOUT = 120  # seconds for the processes to save and end, before they are killed


def launch_processes(processes: int | Literal["auto"], max_restarts: int, argv: Sequence[str]) -> None:
    """Run this program in several processes on this machine, and end with their exit status.

    Returns at once in a process that torchrun, Slurm or this function has started, and where one process is enough.

    Args:
        processes: how many; auto is one for each GPU that this process may use.
        max_restarts: how often all of them are started again after a failure.
        argv: the program and its flags.

    Raises:
        SystemExit: the processes have ended. 2 after a mistake of the user's, 143 after a stop, 1 after a failure.
    """
    if "WORLD_SIZE" in os.environ or read_launch().world_size > 1:
        return
    if processes == 1:
        return
    show_first_line("starting the processes")
    count = _count_gpus() if processes == "auto" else processes
    if count > 1:
        raise SystemExit(_run_elastic(count, max_restarts, argv))
    end_status()


def _count_gpus() -> int:
    import torch  # slow

    return torch.cuda.device_count()


def _run_elastic(processes: int, max_restarts: int, argv: Sequence[str]) -> int:
    """Exit status of torch's launcher, which stays quiet: the processes say themselves what happens."""
    from torch.distributed.elastic.multiprocessing.api import SignalException  # slow
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()
    sys.unraisablehook = _print_unraisable
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, which warns of it
    # Not SIGHUP, so that nohup works. Where this process dies of another signal, its processes save and end.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT))
    signal.signal(signal.SIGUSR1, _pass_on)
    end_status()  # the processes have their own
    # The address spares a look-up of this machine's name.
    words = [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={processes}",
        f"--max-restarts={max_restarts}",
        *argv,
    ]
    arguments = parse_args(words)  # type: ignore[no-untyped-call]
    arguments.signals_to_handle = SIGNALS
    with tempfile.TemporaryDirectory(prefix="brisk-") as folder:
        os.environ[STATUSES] = folder
        try:
            run(arguments)  # type: ignore[no-untyped-call]
        except ChildFailedError as failed:
            statuses = {failure.exitcode for failure in failed.failures.values()}
            # torch ends processes that take longer to leave than the first by a signal.
            return _status_of_all(statuses - {-signal.SIGTERM, -signal.SIGKILL} or statuses)
        except SignalException:
            return _status_of_all({int(path.read_text()) for path in Path(folder).iterdir()} or {EXIT_STOPPED})
    return EXIT_DONE


def _status_of_all(statuses: set[int]) -> int:
    """The exit status that stands for those of all processes."""
    if EXIT_USER_ERROR in statuses:
        return EXIT_USER_ERROR
    return EXIT_STOPPED if statuses == {EXIT_STOPPED} else EXIT_FAILED


def report_status(status: int) -> int:
    """Tell the launcher of this process, if it is ours, the exit status, which torch's does not say after a signal.

    After a mistake of the user's the launcher ends, as a restart would meet it again.
    """
    folder = os.environ.get(STATUSES)
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder, str(read_launch().rank)).write_text(str(status))
        if status == EXIT_USER_ERROR:
            terminate_torchrun()
    return status


def _print_unraisable(unraisable: "UnraisableHookArgs") -> None:
    """Python's own, but for torch's timer (2.15), whose thread joins itself if it is the last to use the rendezvous."""
    if str(unraisable.exc_value) != "cannot join current thread":
        sys.__unraisablehook__(unraisable)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Torch's launcher passes SIGTERM on to the processes, but not SIGUSR1."""
    signal.raise_signal(signal.SIGTERM)
