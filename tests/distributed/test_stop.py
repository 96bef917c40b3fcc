"""A signal or the time limit stops all ranks after the same step; real signals to real processes."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import TINY, assert_same_run
from tests.forked import launch_forked, run_ranks, run_train
from tests.harness import Finished, read_checkpoint, read_metrics
from tests.held import hold_and_end
from utils.distributed import stop as stop_module
from utils.distributed.group import DistEnv
from utils.distributed.stop import StopRequest

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_is_noted_and_its_repetition_ignored(cpu: DistEnv, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(stop_module, "REPEAT_SECONDS", 600.0)
    number = signal.Signals[name]
    before = signal.getsignal(number)
    stop = StopRequest()
    assert signal.getsignal(number) == before
    with stop.handling_signals():
        stop.enable(cpu)
        assert not stop.should_stop()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as launchers do
        assert stop.should_stop()
        assert stop.reason == name
    assert signal.getsignal(number) == before


PROGRAM = """
import os, signal, sys, time, torch
from utils.distributed import stop as stop_module
from utils.distributed.group import DistEnv

stop_module.REPEAT_SECONDS = 0.2
env = DistEnv.single(torch.device("cpu"))
stop = stop_module.StopRequest(float(sys.argv[1]))
with stop.handling_signals():
    exec(sys.argv[2])
print("still here")
"""


def run_program(lines: str, limit: float = 0) -> Finished:
    """Run `lines` in a process that handles signals."""
    return launch_forked(limit, lines, program=PROGRAM)


def test_a_late_second_signal_ends_at_once() -> None:
    done = run_program(
        "stop.enable(env)\n"
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.should_stop(); time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)\n"
    )
    assert done.status == -signal.SIGTERM, done.err
    assert done.out == ""


def test_the_first_signal_after_the_time_limit_leaves_time_to_save() -> None:
    """Schedulers warn at about the same time."""
    done = run_program(
        "stop.enable(env); assert stop.should_stop(); time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.reason == 'the time limit'\n",
        limit=0.001,
    )
    assert done.out == "still here\n", done.err


def test_a_worker_that_inherited_the_handlers_ignores_signals() -> None:
    done = run_program(
        "end, this_end = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0: os.close(this_end); os.read(end, 1); os._exit(7)\n"
        "for number in stop.SIGNALS: os.kill(child, number)\n"
        "os.close(this_end)\n"
        "assert os.waitpid(child, 0)[1] == 7 << 8\n"
    )
    assert done.out == "still here\n"
    assert done.err == ""


@pytest.mark.parametrize("name", SIGNALS)
def test_before_the_first_step_a_signal_ends_at_once(name: str) -> None:
    done = run_program(f"os.kill(os.getpid(), signal.{name}); time.sleep(0.5)\n")
    assert done.status == 143
    assert done.out == ""
    assert done.err == f"stopped by {name} before the first step; nothing is lost\n"


def test_after_the_last_step_a_signal_ends_at_once() -> None:
    done = run_program(
        "stop.enable(env); stop.disable('after the last step'); os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5)\n"
    )
    assert (done.status, done.out, done.err) == (143, "", "stopped by SIGTERM after the last step; nothing is lost\n")


def test_the_time_limit_is_the_reason_only_when_it_is_over(cpu: DistEnv) -> None:
    for limit, reason in ((0.0, "another rank"), (1e6, "another rank"), (1e-6, "the time limit")):
        stop = StopRequest(limit)
        stop.enable(cpu)
        assert stop.should_stop() == (reason == "the time limit")
        assert (stop.reason, stop.by_signal) == (reason, False)


def step_until_stop(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is asked to stop when it has done three steps."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    stop = StopRequest()
    step = 0
    with stop.handling_signals():
        stop.enable(DistEnv(rank, rank, world_size, world_size, torch.device("cpu")))
        while True:
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop.should_stop():
                break
            step += 1
            assert step < 100, "a stop that the other ranks do not know of"
    (folder / f"{rank}").write_text(f"step {step}: {stop.reason}, {stop.by_signal}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.dist
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    """One step later: the sum travels while that runs."""
    run_ranks(step_until_stop, 2, tmp_path)
    found = [(tmp_path / f"{rank}").read_text() for rank in range(2)]
    assert found == ["step 4: another rank, False", "step 4: SIGUSR1, True"]


@pytest.mark.dist
@pytest.mark.slow  # runs that stop so and go on are quick: tests/runs/test_balance.py, test_multilabel.py
@pytest.mark.parametrize("processes", [1, 2])
def test_time_limit(data: Path, tmp_path: Path, processes: int) -> None:
    flags = ("--data-dir", data, *TINY, "--epochs", 1000, "--batch-size", 4, "--output-dir", tmp_path)
    # Over before the first step is done. And a launch as users make it, which keeps so few images decoded.
    done = run_train(*flags, "--cache", "auto", "--time-limit", "0.001", processes=processes)
    assert "--cache host: decoded, the training images take" in done.out
    assert "stopped by the time limit at step" in done.out or "stopped by another rank at step" in done.out
    assert read_checkpoint(tmp_path)["step"] == processes, "several agree while they do the next step"
    if processes == 1:
        assert done.status == 143


@pytest.mark.dist
@pytest.mark.slow  # a stop between steps is quick
@pytest.mark.parametrize("processes", [1, 2])
def test_stop_within_the_evaluation(data: Path, tmp_path: Path, processes: int) -> None:
    """The evaluation ends at once, and the resumed run evaluates all images."""
    flags = ("--data-dir", data, *TINY, "--epochs", 1, "--batch-size", 8 // processes, "--deterministic")
    uninterrupted, cut = tmp_path / "uninterrupted", tmp_path / "cut"
    assert run_train(*flags, "--output-dir", uninterrupted, processes=processes).status == 0
    status = hold_and_end(*flags, "--output-dir", cut, at="evaluation", number=signal.SIGTERM, processes=processes)
    if processes == 1:
        assert status == 143
    assert (read_checkpoint(cut)["step"], read_checkpoint(cut)["epoch"]) == (5, 0)
    assert not any("val/top1" in record for record in read_metrics(cut))
    resumed = run_train(*flags, "--output-dir", cut, processes=processes)
    assert resumed.status == 0, resumed.err
    assert read_metrics(cut)[-1]["val/count"] == 41
    assert_same_run(uninterrupted, cut)


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stop_within_the_evaluation_of_the_best_epoch(data: Path, tmp_path: Path, processes: int) -> None:
    """The same command writes the results that are missing; a launch that only writes them stops so, too."""
    flags = ("--data-dir", data, *TINY, "--epochs", 1, "--batch-size", 8 // processes, "--output-dir", tmp_path)
    assert run_train(*flags, processes=processes).status == 0
    summary = tmp_path / "summary.json"
    whole = json.loads(summary.read_text())
    summary.unlink()
    status = hold_and_end(*flags, at="evaluation", number=signal.SIGTERM, processes=processes)
    if processes == 1:
        assert status == 143
    assert not summary.exists()
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "stopped"
    done = run_train(*flags, processes=processes)
    assert done.status == 0, done.err
    again = json.loads(summary.read_text())
    for name in ("top1", "temperature", "ece", "calibrated_ece"):
        assert again[name] == whole[name], name


SENDS_A_SIGNAL = """
import os, signal, sys, train

def send_signal(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)

setattr(train, os.environ["AT"], send_signal)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow  # a signal before the first step is quick
@pytest.mark.parametrize("at", ["train_step", "evaluate_checkpoint"])
def test_where_nothing_can_be_lost_a_signal_ends_at_once(data: Path, tmp_path: Path, at: str) -> None:
    """The first step after an evaluation with which a launch began, as it may compile; and `--evaluate`."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path / "out")
    assert run_train(*flags, "--epochs", 1).status == 0
    before_evaluation = tmp_path / "out" / "last-1.pt"
    extra = (
        ("--evaluate",)
        if at == "evaluate_checkpoint"
        else ("--resume", before_evaluation, "--overwrite", "--epochs", 2)
    )
    done = launch_forked(*flags, *extra, program=SENDS_A_SIGNAL, env={"AT": at})
    assert done.status == 143, done.err
    assert done.err.splitlines()[-1] == "stopped by SIGUSR1 before the first step; nothing is lost"


@pytest.mark.slow  # a signal before the first step is quick
def test_before_the_first_step_the_files_of_an_earlier_run_stay(data: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path / "out")
    first = run_train(*flags, "--epochs", 1)
    assert first.status == 0, first.err
    assert {"config.json", "metrics.jsonl", "summary.json"} <= first.written
    again = ("--epochs", 2, "--resume", "none", "--overwrite")
    done = launch_forked(*flags, *again, program=SENDS_A_SIGNAL, env={"AT": "train_step"})
    assert done.status == 143, done.err
    assert done.written == frozenset()
