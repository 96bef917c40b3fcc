"""Who am I: torchrun's variables, Slurm's, or none."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from utils.distributed.group import (
    Launch,
    check_devices,
    choose_device,
    create_store_prefix,
    process_group,
    read_launch,
    visible_device_for_rank,
)
from utils.distributed.store import BoundedStore
from utils.errors import RunFailed, UserError

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


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "1"), ("4,6,7", "6"), ("GPU-2f, GPU-9c", "GPU-9c"), ("MIG-a,MIG-b", "MIG-b")]
)
def test_own_gpu(visible: str | None, expected: str) -> None:
    assert visible_device_for_rank(visible, 1) == expected


def test_cpu_when_asked() -> None:
    assert choose_device("cpu", Launch(local_rank=7)) == torch.device("cpu")


def test_each_attempt_has_a_part_of_the_store_to_itself() -> None:
    """What a killed attempt left behind is not there for the next, whichever process comes first."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    for attempt in range(4):
        order = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)][attempt]
        with ThreadPoolExecutor(3) as threads:
            clients = [TCPStore("127.0.0.1", server.port) for _ in order]
            meetings = [
                threads.submit(create_store_prefix, BoundedStore(client, 10), rank, 3, 10)
                for client, rank in zip(clients, order, strict=True)
            ]
            parts = [meeting.result() for meeting in meetings]
        assert not any(part.check(["address"]) for part in parts)
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * 3


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])} | TORCHRUN | {"RANK": "0"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(RunFailed, match=r"rank 0: cannot meet rank 0 .*EADDRINUSE.*--timeout is 30 s"),
            process_group("cpu", 30.0),
        ):
            pass


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("cuda 1", "cpu", "cuda 2", "cpu"), "rank 1, 3 of 4 sees no GPU, the others do"),
        (("cuda 1", "cuda 2", "cuda 3", "cuda 2"), "rank 1 and rank 3 have the same GPU"),
        (("cuda 1", "cuda 2", "cuda 3", "cuda 4"), None),
        (("cpu",) * 4, None),
    ],
)
def test_devices_that_do_not_go_together_are_refused_on_all_ranks(devices: tuple[str, ...], said: str | None) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with ThreadPoolExecutor(4) as threads:
        checks = [
            threads.submit(check_devices, own, BoundedStore(TCPStore("127.0.0.1", server.port), 10), rank, 4, 10)
            for rank, own in enumerate(devices)
        ]
        errors = [check.exception() for check in checks]
    if said is None:
        assert errors == [None] * 4
    else:
        assert all(isinstance(error, UserError) and said in str(error) and error.on_all_ranks for error in errors), (
            errors
        )


def test_who_does_not_come_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(RunFailed, match=r"rank 1, 2 did not come within 0\.3 s"):
        create_store_prefix(BoundedStore(server, 10), 0, 3, 0.3)
    with pytest.raises(RunFailed, match=r"rank 0 did not come within 0\.3 s"):
        create_store_prefix(BoundedStore(server, 10), 1, 3, 0.3)
