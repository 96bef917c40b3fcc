"""`--processes`: train.py starts its processes itself, as torchrun would, and says no more than they do."""

import json
import os
import signal
import sys
import threading
import weakref
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.forked import RUN_COMMAND, launch_forked, launch_ranks
from tests.harness import Finished, launch, read_checkpoint, read_losses, start
from utils.distributed.elastic import _print_unraisable, _status_of_all

pytestmark = pytest.mark.dist
FIRST_LINES = "starting the processes\nloading torch, DALI and timm\n"


def flags(data: Path, folder: Path, *others: object) -> tuple[object, ...]:
    return ("--data-dir", data, *TINY, "--batch-size", 4, "--output-dir", folder, *others)


@pytest.mark.slow  # scripts/quickstart.sh has two processes, too
def test_it_trains_as_torchrun_does(data: Path, tmp_path: Path) -> None:
    """And a signal to it stops the run."""
    others = ("--epochs", 100000, "--deterministic")
    done = stopped(signal.SIGINT, *flags(data, tmp_path / "run", *others, "--processes", 2))
    assert done.out.startswith(FIRST_LINES)
    assert done.out.count("\n   brisk  ") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["processes"] == 2
    # torchrun's number counts, and a recipe can hold another
    more = (*others, "--processes", 8, "--time-limit", 0.1)
    by_torchrun, _ = launch_ranks(*flags(data, tmp_path / "torchrun", *more))
    assert by_torchrun.status == 143
    expected = read_losses(tmp_path / "torchrun")
    assert expected == read_losses(tmp_path / "run")[: len(expected)]
    assert len(expected) > 0
    reason = "--processes 2: the launcher's number, not 8: the global batch is 8 images instead of 32, and the "
    assert f"{reason}learning rate in force follows it; --batch-size 16 keeps both" in by_torchrun.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_other_signals_stop_the_run(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    stopped(number, *flags(data, tmp_path / "run", "--epochs", 100000, "--processes", 2))


def stopped(number: signal.Signals, *words: object) -> Finished:
    """A run of two processes that gets the signal in its second step, and has ended as it should."""
    folder = Path(str(words[words.index("--output-dir") + 1]))
    with start(*words) as started:
        started.wait_for(lambda: "  step 2/" in started.out)  # so that both processes have done the first
        started.send(number, started.pid)
        done = started.end()
        started.check_nothing_left()
    assert (done.status, done.err) == (143, "")
    assert done.out.count("the same command resumes here\n") == 1
    assert f" at step {read_checkpoint(folder)['step']}; the same command resumes here\n" in done.out
    return done


@pytest.mark.slow
def test_a_mistake_that_its_processes_find_is_one_line(tmp_path: Path) -> None:
    done = launch_forked(
        "--processes", 2, "--max-restarts", 1, "--loader", "synthetic", "--arch", "no_such_network",
        "--output-dir", tmp_path / "run", program=RUN_COMMAND,
    )  # fmt: skip
    assert (done.status, done.out) == (2, FIRST_LINES)
    assert done.err.startswith("train.py: --arch no_such_network: ")
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_a_failure_is_1_after_the_restarts(data: Path, tmp_path: Path) -> None:
    others = ("--epochs", 100000, "--processes", 2, "--max-restarts", 1, "--checkpoint-steps", 1)
    with start(*flags(data, tmp_path / "run", *others)) as started:
        started.wait_for((tmp_path / "run" / "last.pt").exists)
        os.kill(started.ranks()[1], signal.SIGKILL)
        started.wait_for(lambda: started.out.count("first step done") == 2)
        os.kill(started.ranks()[1], signal.SIGKILL)
        done = started.end()
        started.check_nothing_left()
    assert done.status == 1
    assert "start  resumed at epoch " in done.out
    assert done.err.count("is gone: killed") == len(done.err.splitlines()) == 2, done.err


@pytest.mark.slow
def test_auto_without_gpus_is_one_process(data: Path, tmp_path: Path) -> None:
    others = ("--processes", "auto", "--epochs", 1)
    done = launch(*flags(data, tmp_path, *others), env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.status, done.err) == (0, "")
    assert json.loads((tmp_path / "summary.json").read_text())["world_size"] == 1


@pytest.mark.parametrize(
    ("statuses", "expected"), [({143}, 143), ({143, 1}, 1), ({143, 2}, 2), ({1, 2}, 2), ({-9}, 1), ({1}, 1)]
)
def test_the_status_of_all(statuses: set[int], expected: int) -> None:
    assert _status_of_all(statuses) == expected


def test_a_timer_that_ends_itself_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch's, where the thread of the timer is the last to use what owns it."""

    class Owner:
        pass

    monkeypatch.setattr(sys, "unraisablehook", _print_unraisable)
    for function, error in ((threading.current_thread().join, ""), ([].pop, "IndexError: pop from empty list\n")):
        owner = Owner()
        weakref.finalize(owner, function)
        del owner
        printed = capsys.readouterr().err
        assert printed.endswith(error)
        assert bool(printed) == bool(error)


@pytest.mark.slow
def test_the_time_limit_of_several_processes_is_143(data: Path, tmp_path: Path) -> None:
    """Torch ends the process that leaves later by a signal."""
    for number in range(3):
        others = ("--processes", 2, "--epochs", 100000, "--time-limit", 0.1)
        done = launch(*flags(data, tmp_path / str(number), *others))
        assert (done.status, done.err) == (143, ""), number


@pytest.mark.slow
def test_nohup_goes_on_when_the_terminal_is_closed(data: Path, tmp_path: Path) -> None:
    others = ("--processes", 2, "--epochs", 100000)
    with start(*flags(data, tmp_path / "run", *others), prefix=["nohup"]) as started:
        started.wait_for(lambda: "  step 2/" in started.out)
        for pid in (started.pid, *started.ranks().values()):
            os.kill(pid, signal.SIGHUP)
        steps = started.out.count("  step ")
        started.wait_for(lambda: started.out.count("  step ") > steps + 20)
        started.send(signal.SIGTERM, started.pid)
        assert started.end().status == 143
