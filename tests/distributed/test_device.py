"""The GPU of each rank, and ranks whose devices do not fit together."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from utils.distributed.device import check_devices, choose_device, hide_other_gpus
from utils.distributed.launcher import Launch
from utils.distributed.store import BoundedStore
from utils.errors import UserError


def test_cpu_when_asked() -> None:
    device = choose_device("cpu", Launch(local_rank=7))
    assert hide_other_gpus(device) == device == torch.device("cpu")


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
