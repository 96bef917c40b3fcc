"""A disk that is slower than the training: the run goes on, waits where it must, and loses nothing to a kill."""

import signal
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, assert_same_run
from tests.forked import launch_forked, launch_series, start_forked
from tests.harness import Started, launch, read_checkpoint, read_metrics, start

# 41 images, five steps an epoch; saves after steps 2, 4 and 5 of an epoch, and after its evaluation.
FLAGS = (*TINY, "--augment", "trivialaugment", "--ema-decay", "0.9", "--deterministic", "--checkpoint-steps", "2")

# train.py whose write number WRITE stops at the point HELD until the file SIGNS/release is there.
HELD_DISK = """
import os, stat, sys, threading, time
from pathlib import Path
import torch, train
from utils.training.state import checkpoint

signs, number, point = Path(os.environ["SIGNS"]), int(os.environ["WRITE"]), os.environ["HELD"]
writes, is_held = 0, False
write, save, fsync = checkpoint.write_checkpoint, torch.save, os.fsync

def hold(here):
    global is_held
    if writes == number and point == here and not is_held:
        is_held = True
        (signs / "held").touch()
        while not (signs / "release").exists():
            time.sleep(0.01)

def counted_write(*arguments):
    global writes
    writes += 1
    write(*arguments)

def held_save(*arguments, **options):
    hold("copied")
    save(*arguments, **options)

def held_sync(file):
    if threading.current_thread() is not threading.main_thread():
        hold("renamed in part" if stat.S_ISDIR(os.fstat(file).st_mode) else "written in part")
    fsync(file)

checkpoint.write_checkpoint, torch.save, os.fsync = counted_write, held_save, held_sync
sys.exit(train.main(sys.argv[1:]))
"""


def start_held(data: Path, folder: Path, write: int, point: str, *flags: object, processes: int = 1) -> Started:
    """Start a run in `folder`/run whose write number `write`, from 1, stops at `point`."""
    env = {"SIGNS": folder, "WRITE": write, "HELD": point}
    run = ("--data-dir", data, *FLAGS, "--batch-size", 8 // processes, "--output-dir", folder / "run", *flags)
    if processes > 1:
        return start(*run, program=HELD_DISK, processes=processes, env=env)
    return start_forked(*run, program=HELD_DISK, env=env)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of an uninterrupted run of two epochs, on a disk that is fast."""
    folder = tmp_path_factory.mktemp("whole")
    (done,) = launch_series(("--data-dir", data, *FLAGS, "--batch-size", 8, "--epochs", 2, "--output-dir", folder))
    assert done.status == 0, done.err
    return folder


# train.py whose every write waits until the training has logged one more line; the last one cannot.
ONE_STEP_BEHIND = """
import os, sys, time
from pathlib import Path
import train
from utils.log import emit
from utils.training.state import checkpoint

write = checkpoint.write_checkpoint

def slow(content, folder, is_best, keep):
    position = content["step"] + content["epoch"]  # a line each
    emit(f"write begins {position}")  # the training prints, too: one line at a time
    while content["epoch"] < 2 and len((folder / "metrics.jsonl").read_text().splitlines()) <= position:
        time.sleep(0.01)
    write(content, folder, is_best, keep)
    emit(f"write ends {position}")

checkpoint.write_checkpoint = slow
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_training_goes_on_while_a_checkpoint_is_written(data: Path, whole: Path, tmp_path: Path, loader: str) -> None:
    """One write after the other, at every step, and the bits of a run that is not slowed down.

    The workers of torch's DataLoader for the evaluation are forked within a write.
    """
    run, fast = tmp_path / "run", whole
    flags = ("--data-dir", data, *FLAGS, "--batch-size", 8, "--epochs", 2, "--loader", loader)
    if loader != "dali":
        fast = tmp_path / "fast"
        (done,) = launch_series((*flags, "--output-dir", fast))
        assert done.status == 0, done.err
    done = launch_forked(*flags, "--checkpoint-steps", 1, "--output-dir", run, program=ONE_STEP_BEHIND)
    assert done.status == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("write ")]
    # Steps 1 to 5, and the evaluation; then the second epoch.
    assert lines == [f"write {what} {position}" for position in range(1, 13) for what in ("begins", "ends")]
    for name in ("last.pt", "best.pt"):
        assert_same_run(fast, run, name)


@pytest.mark.slow  # a save that is held up, and a stop within it, follow; tests/runs/test_kill.py kills at any moment
@pytest.mark.parametrize("point", ["written in part", "copied", "renamed in part"])
def test_killed_within_a_write(data: Path, whole: Path, tmp_path: Path, point: str) -> None:
    """The checkpoint before it is complete, and the resumed run drops the steps that were trained meanwhile."""
    run = tmp_path / "run"
    with start_held(data, tmp_path, 2, point, "--epochs", 2) as held:
        held.wait_for((tmp_path / "held").exists)
        held.wait_for(lambda: "step 5/5" in held.out)
        held.kill()
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert read_checkpoint(run)["step"] == 2
    (done,) = launch_series(("--data-dir", data, *FLAGS, "--batch-size", 8, "--epochs", 2, "--output-dir", run))
    assert done.status == 0, done.err
    assert "resumed at epoch 1, step 2" in done.out
    for name in ("last.pt", "best.pt"):
        assert_same_run(whole, run, name)
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.slow
def test_the_save_after_an_evaluation_does_not_wait(data: Path, whole: Path, tmp_path: Path) -> None:
    """Training goes on while the checkpoint from before the evaluation is written, and its own after that."""
    run = tmp_path / "run"
    with start_held(data, tmp_path, 3, "written in part", "--epochs", 2) as held:
        held.wait_for(lambda: "epoch 2/2  step 1/5" in held.out)
        held.wait_for((tmp_path / "held").exists)
        assert (read_checkpoint(run)["step"], read_checkpoint(run)["epoch"]) == (4, 0)
        (tmp_path / "release").touch()
        done = held.end()
    assert done.status == 0, done.err
    for name in ("last.pt", "best.pt", "last-1.pt"):
        assert_same_run(whole, run, name)


@pytest.mark.slow  # the writer's own tests are quick
def test_a_stop_waits_for_the_write(data: Path, tmp_path: Path) -> None:
    with start_held(data, tmp_path, 2, "written in part", "--epochs", 2) as held:
        held.wait_for((tmp_path / "held").exists)
        held.send(signal.SIGTERM, held.pid)
        time.sleep(1)  # for a run that would not wait
        assert held.process.poll() is None
        assert "stopped by" not in held.out
        assert read_checkpoint(tmp_path / "run")["step"] == 2
        (tmp_path / "release").touch()
        done = held.end()
    assert done.status == 143, done.err
    saved = read_checkpoint(tmp_path / "run")["step"]
    assert saved in (4, 5)
    assert f"stopped by SIGTERM at step {saved};" in done.out


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_the_write(data: Path, tmp_path: Path) -> None:
    with start_held(data, tmp_path, 4, "copied", "--epochs", 1) as held:
        held.wait_for((tmp_path / "held").exists)
        time.sleep(1)  # for a run that would not wait
        assert held.process.poll() is None
        assert not (tmp_path / "run" / "summary.json").exists()
        (tmp_path / "release").touch()
        done = held.end()
    assert done.status == 0, done.err
    assert (tmp_path / "run" / "summary.json").exists()
    assert read_checkpoint(tmp_path / "run")["epoch"] == 1


@pytest.mark.slow
def test_a_stop_before_the_first_step_keeps_an_evaluation(data: Path, tmp_path: Path) -> None:
    """A launch that resumes with an evaluation has saved it before its first step, where a signal ends it at once."""
    flags = ("--epochs", 2)
    with start_held(data, tmp_path, 4, "copied", *flags) as held:  # the one after the evaluation
        held.wait_for((tmp_path / "held").exists)
        held.kill()
    assert read_checkpoint(tmp_path / "run")["epoch"] == 0
    (tmp_path / "held").unlink()
    with start_held(data, tmp_path, 1, "copied", *flags) as held:
        held.wait_for((tmp_path / "held").exists)
        held.send(signal.SIGTERM, held.pid)
        time.sleep(1)  # for a run that would not wait
        assert held.process.poll() is None
        (tmp_path / "release").touch()
        assert held.end().status == 143
    assert read_checkpoint(tmp_path / "run")["epoch"] == 1


@pytest.mark.dist
@pytest.mark.slow
def test_a_write_that_lasts_longer_than_the_timeout(data: Path, tmp_path: Path) -> None:
    """Neither the other rank nor the watchdog takes the rank that waits for its disk for one that hangs."""
    with start_held(data, tmp_path, 2, "written in part", "--epochs", 2, "--timeout", 10, processes=2) as held:
        held.wait_for((tmp_path / "held").exists)
        time.sleep(30)  # three times --timeout; the watchdog waits for twice that
        (tmp_path / "release").touch()
        done = held.end()
    assert done.status == 0, done.err
    fast = tmp_path / "fast"
    flags = ("--data-dir", data, *FLAGS, "--batch-size", 4, "--epochs", 2, "--output-dir", fast)
    assert launch(*flags, processes=2).status == 0
    assert_same_run(fast, tmp_path / "run")
