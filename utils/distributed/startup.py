"""What a program does before the imports that take seconds: it handles signals and checks its command line.

Imports nothing slow.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from utils.distributed.gpu_start import start_gpu
from utils.distributed.launcher import read_launch, record_error, seconds_since_launch
from utils.distributed.signals import exit_on_signals, restore_defaults
from utils.errors import EXIT_USER_ERROR, RunFailed, UserError
from utils.log import accept_all_characters, emit
from utils.options.cli import EarlyExit, Options, Program
from utils.progress import show_status, start_status

IMPORTS = "loading torch, DALI and timm"
_parts = [(IMPORTS, 0.0)]  # of this launch's start: what was shown, and seconds since the launch when it began


def start_program(
    program: Program[Options], argv: Sequence[str], check: Callable[[Options], None] | None = None
) -> Options:
    """Answer `--help`, `--version` and mistakes in the command line at once.

    Until `StopRequest` takes over, a signal ends the process with status 143.

    Args:
        program: whose main follows, which reads the command line again.
        argv: the words after its name.
        check: raises UserError for more mistakes that show at once.

    Returns:
        The command line.

    Raises:
        SystemExit: there is nothing else to do.
    """
    exit_on_signals()
    accept_all_characters()
    try:
        options = program.parse(argv)
        program.check_early(options)
        if check is not None:
            check(options)
        read_launch()
    except EarlyExit as ended:
        raise SystemExit(ended.code) from None
    except UserError as error:
        print_once(program, error)
        raise SystemExit(EXIT_USER_ERROR) from None
    return options


def show_first_line(text: str) -> None:
    """Show on rank 0 what the program does now: as a status line on a terminal, as a printed line elsewhere."""
    if read_launch().rank == 0 and not start_status(text):
        emit(text)


def let_threads_sleep() -> None:
    """Let torch's CPU threads wait for each other asleep after a short time. To be called before torch is imported.

    They spin for milliseconds otherwise, on a core that the thread they wait for needs where other programs run, too.
    1,000 turns are what libgomp takes where it knows that there are more threads than cores
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). What the user has set is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def start_imports(device_choice: str, deterministic: bool = False) -> None:
    """To be called before the imports that take seconds. Garbage is not collected from here until `own_process`.

    They make a million objects and no garbage; searching them takes a tenth of the time. The GPU starts beside them.

    Args:
        device_choice: auto, cuda, cuda:N or cpu.
        deterministic: of `own_process`. The GPU then starts there, as cuBLAS has to find the variable that it sets.
    """
    show_first_line(IMPORTS)
    let_threads_sleep()
    if not deterministic:
        start_gpu(device_choice)
    gc.disable()


def show_startup(text: str) -> None:
    """Show what the start of this launch does now, and time it; `show_first_line` has shown the first part."""
    _parts.append((text, seconds_since_launch()))
    show_status(text)


def startup_parts() -> dict[str, float]:
    """Seconds of each part of the start until now, under the texts that were shown; they add up to it."""
    ends = [*(began for _, began in _parts[1:]), seconds_since_launch()]
    seconds: dict[str, float] = {}
    for (text, began), end in zip(_parts, ends, strict=True):
        seconds[text] = round(seconds.get(text, 0.0) + end - began, 3)
    return seconds


def print_once(program: Program[Any], error: UserError | RunFailed) -> None:
    """Print an error on one rank, if one rank can explain it for all.

    Rank 0 prints what all ranks are known to meet. What they may not all meet (a file system that only one machine
    cannot read) is printed by the others too, after the time that rank 0 needs to print it and torchrun to end them.
    """
    if isinstance(error, RunFailed):
        if not error.on_all_ranks or read_launch().rank == 0:
            _print(program, error)
        return
    restore_defaults()  # torchrun ends the others with SIGTERM as soon as one has ended
    with contextlib.suppress(UserError):  # of the launch itself, which then is `error`
        if read_launch().rank != 0:
            time.sleep(5)
            if error.on_all_ranks:
                return
    _print(program, error)


def _print(program: Program[Any], error: Exception) -> None:
    program.print_error(str(error))
    record_error(f"{program.name}: {error}")
