"""How the processes of a group meet: a store prefix that they alone have, and errors that name who is missing."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from utils.distributed.group import DistEnv, create_store_prefix, process_group
from utils.distributed.store import BoundedStore
from utils.errors import RunFailed

RANK_0_OF_4 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_one_process_has_no_group() -> None:
    with process_group(torch.device("cpu"), 30.0) as env:
        assert env == DistEnv.single(torch.device("cpu"))
    assert (env.rank, env.world_size, env.is_main, env.monitor) == (0, 1, True, None)
    assert not torch.distributed.is_initialized()


def test_each_attempt_has_a_store_prefix_of_its_own() -> None:
    """What a killed attempt left behind is not there for the next, whichever process comes first."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    for attempt in range(4):
        order = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)][attempt]
        with ThreadPoolExecutor(3) as threads:
            clients = [TCPStore("127.0.0.1", server.port) for _ in order]
            futures = [
                threads.submit(create_store_prefix, BoundedStore(client, 10), rank, 3, 10)
                for client, rank in zip(clients, order, strict=True)
            ]
            stores = [future.result() for future in futures]
        assert not any(store.check(["address"]) for store in stores)
        stores[0].set("address", str(attempt))
        assert [store.get("address") for store in stores] == [str(attempt).encode()] * 3


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])} | RANK_0_OF_4
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(RunFailed, match=r"rank 0: cannot meet rank 0 .*EADDRINUSE.*--timeout is 30 s"),
            process_group(torch.device("cpu"), 30.0),
        ):
            pass


def test_a_missing_rank_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(RunFailed, match=r"rank 1, 2 did not come within 0\.3 s"):
        create_store_prefix(BoundedStore(server, 10), 0, 3, 0.3)
    with pytest.raises(RunFailed, match=r"rank 0 did not come within 0\.3 s"):
        create_store_prefix(BoundedStore(server, 10), 1, 3, 0.3)
