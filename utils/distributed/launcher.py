"""Launcher: how torchrun or Slurm has started this process, and whether it may start it again."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import time
from collections.abc import Mapping

from utils.distributed.process import exit_with_parent, read_stat
from utils.errors import UserError, escape_control_chars

IDLE_SECONDS = 30.0  # of a torchrun that does not notice the end of its processes, until it is ended
RESTART_SECONDS = 60.0  # the same with restarts left: after that time without an answer torchrun gives up, too
_PARENT = os.getppid()  # while it lives; then the system adopts this process
_started: list[object] = []  # processes that outlive this one


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among all processes, and among those of its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's variables, or Slurm's where torchrun's are absent; neither means one process.

    Args:
        environ: environment variables; None for those of this process.

    Raises:
        UserError: a variable is missing or is not a number.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        defaults = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if environ["WORLD_SIZE"] == "1" else {}
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # Of the step, not of the job: `python train.py` within an allocation of many tasks is one process.
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
        defaults = {}
    else:
        return Launch()
    values = []
    for name in names:
        text = environ.get(name, defaults.get(name))
        match = re.match(r"\d+", text or "")
        if match is None:
            raise UserError(f"{name} {text!r} in the environment: must be a number; start with torchrun or srun")
        values.append(int(match.group()))
    return Launch(*values)


def rendezvous_url(environ: Mapping[str, str]) -> tuple[str, str]:
    """Where the processes meet, as a URL for torch's `rendezvous`, and a prefix for their keys in the store there.

    That is torchrun's store, or one on the first host of a Slurm step. Steps of one job may run at the same time, so
    each has a port and a prefix of its own. The port is below those that Linux gives out.

    Raises:
        UserError: neither torchrun's variables nor Slurm's are complete.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return "env://", "brisk"
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)  # node[03-05,9].lan,... -> node03.lan
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if first is None or not job.isdigit() or not step.isdigit():
        raise UserError("MASTER_ADDR and MASTER_PORT are missing in the environment; start with torchrun or srun")
    port = 20000 + (int(job) + 7919 * int(step)) % 12000
    return f"tcp://{first[1]}{first[2] or ''}{first[3] or ''}:{port}", f"brisk-{job}.{step}"


def exit_with_torchrun() -> None:
    """Let the kernel send SIGTERM when torchrun dies, as nothing would restart or end this process any more."""
    if _by_torchrun():
        exit_with_parent(signal.SIGTERM, _PARENT)
        _torchrun_started()  # read while torchrun lives


def terminate_torchrun() -> None:
    """Ask torchrun to end, as this process is about to: with restarts left, torchrun would start it again."""
    restarts_left = _restarts("TORCHELASTIC_MAX_RESTARTS") - _restarts("TORCHELASTIC_RESTART_COUNT")
    if _by_torchrun() and restarts_left > 0 and os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGTERM)


def end_idle_torchrun() -> None:
    """Let torchrun end, as the store does not answer this process, which is about to end.

    torchrun may wait for the same store, and nothing else would end it. With restarts left it has longer: the network
    may come back.
    """
    restarts_left = _restarts("TORCHELASTIC_MAX_RESTARTS") - _restarts("TORCHELASTIC_RESTART_COUNT")
    if _by_torchrun() and os.getppid() == _PARENT:
        from utils.distributed.torchrun_end import end_when_idle  # here, as most programs never need it

        with contextlib.suppress(OSError):
            _started.append(end_when_idle(_PARENT, RESTART_SECONDS if restarts_left > 0 else IDLE_SECONDS))


def record_error(text: str) -> None:
    """Give torchrun's report the line that explains this process's end, which it shows last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": escape_control_chars(text), "timestamp": int(time.time())}, file)


def seconds_since_launch() -> float:
    """Wall time since the kernel started this process, before the first import."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - read_stat(os.getpid()).started


def seconds_since_start() -> float:
    """Wall time since the user's command: the start of torchrun, also if it has started this process again."""
    started = _torchrun_started() if _by_torchrun() else read_stat(os.getpid()).started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def launch_ids() -> list[str]:
    """Names of what started this process, which no other launch has; none if nothing would start it again."""
    names = []
    if "SLURM_JOB_ID" in os.environ:
        names.append(f"Slurm job {os.environ['SLURM_JOB_ID']} of {os.environ.get('SLURM_CLUSTER_NAME', '')}")
    if _by_torchrun():
        names.append(f"torchrun {_PARENT} on {os.uname().nodename}, {_torchrun_started():.2f} s after its boot")
    return names


def restarted_by() -> list[str]:
    """Those of `launch_ids` that may have started this run before: torchrun after a death, Slurm after a requeue.

    A torchrun starts one command again and again, but counts only the deaths of its own processes, not those that make
    the torchruns of several machines start again. A Slurm job may have started another command.
    """
    return [name for name in launch_ids() if name.startswith("torchrun") or _restarts("SLURM_RESTART_COUNT") > 0]


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def _torchrun_started() -> float:
    """Seconds from the boot of the machine to the start of torchrun; of this process, if torchrun has been killed."""
    try:
        return read_stat(_PARENT).started
    except OSError:
        return read_stat(os.getpid()).started


def _restarts(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0
