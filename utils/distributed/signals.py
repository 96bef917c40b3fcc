"""Signals while the trainer is still being imported, which takes seconds: the process ends at once, nothing is lost.

Imports nothing slow. `utils.distributed.stop.StopRequest` takes over.
"""

import os
import signal
from types import FrameType

from utils.errors import EXIT_STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 3.0  # launchers send the same signal to a process twice: to its group, and to itself


def exit_on_signals() -> None:
    """From now on, a signal ends this process with status 143, without a traceback."""
    for number in SIGNALS:
        signal.signal(number, exit_now)


def exit_now(number: int, frame: FrameType | None) -> None:
    """End this process; rank 0 prints why. A signal handler."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if rank == "0":
        os.write(2, stop_message(number))
    os._exit(EXIT_STOPPED)


def stop_message(number: int, when: str = "before the first step") -> bytes:
    """The line on a stop that loses nothing."""
    return f"stopped by {signal.Signals(number).name} {when}; nothing is lost\n".encode()


def restore_defaults() -> None:
    """Undo `exit_on_signals`, except for signals that have another handler by now."""
    for number in SIGNALS:
        if signal.getsignal(number) is exit_now:
            signal.signal(number, signal.SIG_DFL)
