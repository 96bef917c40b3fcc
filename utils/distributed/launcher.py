"""Launcher: what started this process and may start it again, torchrun or Slurm."""

import ctypes
import functools
import os
import signal
import time
from pathlib import Path

_PARENT = os.getppid()  # while it lives; then the system adopts this process
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def exit_with_parent() -> None:
    """Ask the kernel for SIGTERM when torchrun dies: without it nobody would restart or end this process any more."""
    if _by_torchrun():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        _torchrun_started()  # while it lives


def terminate_torchrun() -> None:
    """Ask torchrun to end, as this process is about to on purpose: with restarts left it would start it again."""
    left = _restarts("TORCHELASTIC_MAX_RESTARTS") - _restarts("TORCHELASTIC_RESTART_COUNT")
    if _by_torchrun() and left > 0 and os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGTERM)


def seconds_since_launch() -> float:
    """Wall time since the kernel started this process, before the first import."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - _started(os.getpid())


def seconds_since_start() -> float:
    """Wall time since the user's command: the start of torchrun, also if it has started this process again."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (_torchrun_started() if _by_torchrun() else _started(os.getpid()))


def launch_ids() -> list[str]:
    """Names of what started this process, which no other launch has; none if nothing would start it again."""
    names = []
    if "SLURM_JOB_ID" in os.environ:
        names.append(f"Slurm job {os.environ['SLURM_JOB_ID']} of {os.environ.get('SLURM_CLUSTER_NAME', '')}")
    if _by_torchrun():
        names.append(f"torchrun {_PARENT} on {os.uname().nodename}, {_torchrun_started():.2f} s after its boot")
    return names


def restarted_by() -> list[str]:
    """Those of `launchers` that may have started this run before: torchrun after a death, Slurm after a requeue.

    A torchrun starts one command again and again, but counts only the deaths of its own processes, not those that make
    the torchruns of several machines start anew. A Slurm job may have started another command.
    """
    return [name for name in launch_ids() if name.startswith("torchrun") or _restarts("SLURM_RESTART_COUNT") > 0]


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def _torchrun_started() -> float:
    try:
        return _started(_PARENT)
    except OSError:  # it has been killed
        return _started(os.getpid())


def _restarts(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def _started(pid: int) -> float:
    """When a process of this machine started, in seconds since the machine did."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
