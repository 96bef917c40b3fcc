"""Who am I: torchrun's variables, Slurm's, or none."""

import pytest
import torch

from utils.distributed import Launch, choose_device, read_launch
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


def test_cpu_when_asked() -> None:
    assert choose_device("cpu", Launch(local_rank=7)) == torch.device("cpu")
