"""The launcher's variables, and what torchrun and Slurm do when a process ends, with real launches."""

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.forked import launch_forked, run_train
from tests.harness import launch, read_checkpoint, read_losses, start
from tests.processes import free_port
from utils.distributed.launcher import Launch, read_launch, seconds_since_launch, seconds_since_start
from utils.errors import UserError

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 0, 1, 1)),
        (TORCHRUN, Launch(3, 1, 4, 2)),
        (SLURM, Launch(5, 1, 8, 4)),
        (SLURM | TORCHRUN, Launch(3, 1, 4, 2)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Launch(0, 0, 1, 1)),  # inside an allocation, without srun
        ({"WORLD_SIZE": "1"}, Launch(0, 0, 1, 1)),
    ],
)
def test_launch(environ: dict[str, str], expected: Launch) -> None:
    assert read_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK None"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS 'x'"),
    ],
)
def test_incomplete_launch_is_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_launch(environ)


DIES_ONCE = """
import os, signal, sys, train

step = train.train_step

def die_once(run):
    step(run)
    if run.state.step == int(os.environ["DEATH"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

train.train_step = die_once
sys.exit(train.main(sys.argv[1:]))
"""


RESTARTS = ("--standalone", "--max-restarts=2")
NOTES_THE_END = """
import sys, train
from utils.training import run

run.terminate_torchrun = lambda: print("torchrun ended")
sys.exit(train.main(sys.argv[1:]))
"""
ENDS_TORCHRUN = """
import sys
from utils.distributed.launcher import terminate_torchrun

print("stopped", flush=True)
terminate_torchrun()
sys.exit(143)
"""


@pytest.mark.slow
def test_seconds_count_the_imports_too_and_under_torchrun_from_its_start() -> None:
    code = (
        "import time; time.sleep(2)\n"
        "from utils.distributed.launcher import seconds_since_launch, seconds_since_start as start\n"
        "print(seconds_since_launch(), start(), seconds_since_launch())\n"
    )
    began = time.monotonic()
    launched, start, later = map(float, launch(program=code).out.split())
    assert 2 <= launched <= start <= later < time.monotonic() - began + 0.1
    launched, start, later = map(float, launch(program=code, torchrun=RESTARTS).out.split())
    assert 2 <= launched < later < start, "torchrun was there before"
    assert seconds_since_launch() <= seconds_since_start() <= seconds_since_launch()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("death", "start"), [(7, "resumed at epoch 2, step 6"), (1, "from scratch")])
def test_a_restart_goes_on_although_the_run_began_anew(data: Path, tmp_path: Path, death: int, start: str) -> None:
    """It resumes its own checkpoint, not the earlier one in the folder."""
    flags = ["--data-dir", data, *TINY, "--batch-size", 8, "--checkpoint-steps", 2, "--output-dir", tmp_path / "out"]
    assert run_train(*flags, "--epochs", 1).status == 0
    flags += ["--epochs", 2, "--resume", "none", "--overwrite"]
    resumed = launch(*flags, program=DIES_ONCE, torchrun=RESTARTS, env={"DEATH": death})
    assert resumed.status == 0, resumed.err
    starts = [line.split("  ")[-1] for line in resumed.out.splitlines() if line.strip().startswith("start  ")]
    assert [line.partition(", from ")[0] for line in starts] == ["from scratch", start]
    assert read_checkpoint(tmp_path / "out")["step"] == 10
    assert [step for step, _ in read_losses(tmp_path / "out")] == list(range(1, 11))


DIES_ON_ANOTHER_MACHINE = """
import os, pathlib, signal, sys, train

step = train.train_step
died = pathlib.Path(os.environ["DIED"])

def die_once(run):
    step(run)
    if run.state.step == 7 and run.env.rank == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)

train.train_step = die_once
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow  # two torchruns that start again
@pytest.mark.dist
def test_a_restart_goes_on_after_a_death_on_another_machine(data: Path, tmp_path: Path) -> None:
    """The torchrun of rank 0 then starts it again without counting that."""
    flags = ["--data-dir", data, *TINY, "--batch-size", 4, "--checkpoint-steps", 2, "--output-dir", tmp_path / "out"]
    flags += ["--epochs", 2, "--resume", "none"]
    rendezvous = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=1")
    options: Any = {"torchrun": (*rendezvous, "--max-restarts=2"), "env": {"DIED": tmp_path / "died"}}
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(start(*flags, program=DIES_ON_ANOTHER_MACHINE, **options)) for _ in range(2)]
        done = [agent.end() for agent in agents]
    assert [agent.status for agent in done] == [0, 0], done
    starts = re.findall(r"start  (.*?)(?:, from .*)?\n", "".join(agent.out for agent in done))
    assert starts == ["from scratch", "resumed at epoch 2, step 6"]


@pytest.mark.slow  # tests/distributed/test_stop.py has the limit of one process
@pytest.mark.dist
def test_the_time_limit_ends_torchrun_too(data: Path, tmp_path: Path) -> None:
    """Otherwise torchrun would start the processes again: a run ends it, and what ends it does."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 1000, "--output-dir", tmp_path)
    done = launch_forked(*flags, "--time-limit", "0.001", program=NOTES_THE_END)
    assert (done.status, done.out.count("torchrun ended\n")) == (143, 1), done.err
    assert read_checkpoint(tmp_path)["step"] == 1
    done = launch(program=ENDS_TORCHRUN, torchrun=RESTARTS)
    assert (done.status, done.out) == (1, "stopped\n"), done.err


@pytest.mark.parametrize(
    ("job", "start"), [("7", "resumed at epoch 1, step "), pytest.param("8", "from scratch", marks=pytest.mark.slow)]
)
def test_a_requeued_job_goes_on_although_it_began_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, start: str
) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, "--output-dir", tmp_path, "--resume", "none",
             "--overwrite")  # fmt: skip
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run_train(*flags, "--time-limit", 0.1).status == 143
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    done = run_train(*flags)
    assert done.status == 0, done.err
    assert f"start  {start}" in done.out
