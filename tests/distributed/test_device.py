"""The GPU of each rank, and ranks whose devices do not fit together."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from utils.distributed.device import check_devices, choose_device, hide_other_gpus, require_gpu
from utils.distributed.launcher import Launch
from utils.distributed.store import BoundedStore
from utils.errors import UserError


def test_cpu_when_asked() -> None:
    device = choose_device("cpu", Launch(local_rank=7))
    assert hide_other_gpus(device) == device == torch.device("cpu")


def test_a_gpu_that_is_named_must_be_there() -> None:
    require_gpu(torch.device("cuda:1"), 2, "--device")
    for gpus, remedy in (
        (1, "there is 1 GPU here; give cuda:0$"),
        (2, "there are 2 GPUs here; give cuda:0 to cuda:1$"),
    ):
        with pytest.raises(UserError, match=rf"--device cuda:2: {remedy}"):
            require_gpu(torch.device("cuda:2"), gpus, "--device")


def test_no_machine_has_so_many_gpus() -> None:
    with pytest.raises(UserError, match=r"--device cuda:99: (no usable GPU|there (is|are) \d+ GPUs?) here"):
        choose_device("cuda:99", Launch())


@pytest.mark.gpu
def test_a_gpu_is_named_for_one_process() -> None:
    assert choose_device("cuda:0", Launch()) == torch.device("cuda", 0)
    with pytest.raises(
        UserError, match="--device cuda:0 with 2 processes: each has a GPU of its own; give --device cuda"
    ):
        choose_device("cuda:0", Launch(world_size=2, local_world_size=2))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("cuda 1", "cpu", "cuda 2", "cpu"), "rank 1, 3 of 4 sees no GPU, the others do"),
        (("cuda 1", "cuda 2", "cuda 3", "cuda 2"), "rank 1 and rank 3 have the same GPU"),
        (("cuda 1", "cuda 2", "cuda 3", "cuda 4"), None),
        (("cpu",) * 4, None),
    ],
)
def test_devices_that_do_not_fit_together_are_refused_on_all_ranks(
    devices: tuple[str, ...], message: str | None
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with ThreadPoolExecutor(4) as threads:
        checks = [
            threads.submit(check_devices, device, BoundedStore(TCPStore("127.0.0.1", server.port), 10), rank, 4, 10)
            for rank, device in enumerate(devices)
        ]
        errors = [check.exception() for check in checks]
    if message is None:
        assert errors == [None] * 4
    else:
        assert all(isinstance(error, UserError) and message in str(error) and error.on_all_ranks for error in errors), (
            errors
        )
