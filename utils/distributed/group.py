"""The process group: all ranks meet, get a store of their own and NCCL or gloo, and leave it at the end."""

import contextlib
import dataclasses
import datetime
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from utils.distributed.collective import collective
from utils.distributed.crash import trace_crashes
from utils.distributed.device import check_devices, describe_device
from utils.distributed.launcher import end_idle_torchrun, read_launch, rendezvous_url
from utils.distributed.monitor import RankMonitor
from utils.distributed.store import CALL_TIMEOUT, WAIT_INTERVAL, BoundedStore, NoAnswer, call_with_timeout
from utils.errors import RunFailed, first_line


@dataclasses.dataclass(frozen=True)
class DistEnv:
    """This process in the group.

    Attributes:
        rank: number among all processes, from 0; DALI's shard.
        local_rank: number on this machine, from 0; the GPU, among those that the launcher shows.
        world_size: number of processes.
        local_world_size: number of processes on this machine.
        device: where this process trains.
        monitor: of the ranks; None for one process.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    monitor: RankMonitor | None = None

    @classmethod
    def single(cls, device: torch.device) -> "DistEnv":
        """One process, without a group."""
        return cls(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device)

    def guard(self, print_error: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """See `RankMonitor.guard`; nothing for one process."""
        return self.monitor.guard(print_error) if self.monitor is not None else contextlib.nullcontext()

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and prints for the user."""
        return self.rank == 0


@collective
@contextlib.contextmanager
def process_group(
    device: torch.device, timeout: float, print_error: Callable[[str], None] | None = None
) -> Iterator[DistEnv]:
    """The group of all processes, torn down at the end and on an error.

    Collectives on CPU tensors go through gloo, on CUDA tensors through NCCL.

    Args:
        device: of this process, from `own_process` or `choose_device`.
        timeout: seconds after which a collective that another process does not join is an error.
        print_error: prints a line for the user. With it, a process that loses another while the group is set up, or
            loses the store at any time, prints which and ends, and a crash is explained (`trace_crashes`). Without it,
            nothing here ends the process.

    Raises:
        RunFailed: the processes do not meet.
        UserError: the launcher's variables are incomplete, or the devices of the ranks do not fit together.
    """
    env = DistEnv(**dataclasses.asdict(read_launch()), device=device)
    traced = trace_crashes(env.rank, device.type == "cuda") if print_error is not None else contextlib.nullcontext()
    with traced, _joined(env, timeout, print_error) as joined:
        yield joined


@collective
@contextlib.contextmanager
def _joined(env: DistEnv, timeout: float, print_error: Callable[[str], None] | None) -> Iterator[DistEnv]:
    device = env.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.world_size == 1:
        yield env
        return
    limit = datetime.timedelta(seconds=timeout)
    try:
        torch_store, store, monitor = _rendezvous(env, limit)
    except RunFailed:
        if print_error is not None:
            end_idle_torchrun()
        raise
    watch: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if print_error is not None:
        watch = store.watch(timeout, functools.partial(monitor.exit_cut_off, print_error))
        guard = monitor.guard(print_error)
    with watch:
        with guard:
            check_devices(describe_device(device), store, env.rank, env.world_size, timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"{store.prefix}group", torch_store),
                rank=env.rank,
                world_size=env.world_size,
                timeout=limit,
            )
        try:
            yield dataclasses.replace(env, monitor=monitor)
        finally:
            dist.destroy_process_group()


@collective
def _rendezvous(env: DistEnv, limit: datetime.timedelta) -> tuple[Store, BoundedStore, RankMonitor]:
    """Connect to the launcher's store twice: for torch, and for us with a prefix that these processes alone have.

    Raises:
        RunFailed: a process did not come, or the store does not answer.
        UserError: the launcher's variables are incomplete.
    """
    timeout = limit.total_seconds()
    url, prefix = rendezvous_url(os.environ)

    def open_stores() -> tuple[Store, Store]:
        store, _, _ = next(rendezvous(url, env.rank, env.world_size, timeout=limit))
        return store, store.clone()  # one for torch, as one call may block those after it, and one for us

    try:
        # The rendezvous applies `limit` itself, but not to every call.
        torch_store, our_store = call_with_timeout(open_stores, timeout + CALL_TIMEOUT)
        bounded = BoundedStore(our_store, timeout).with_prefix(prefix)
        store = create_store_prefix(bounded, env.rank, env.world_size, timeout)
        return torch_store, store, RankMonitor(store, env.rank, env.world_size, timeout)
    except (dist.DistError, NoAnswer) as error:
        raise RunFailed(
            f"rank {env.rank}: cannot meet rank 0 or its launcher at {_host_and_port(url)} ({first_line(error)}); "
            f"--timeout is {timeout:g} s",
            on_all_ranks=False,
        ) from None


def _host_and_port(url: str) -> str:
    """Of a URL that `rendezvous_url` gives."""
    return "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ) if url == "env://" else url.partition("//")[2]


@collective
def create_store_prefix(store: BoundedStore, rank: int, world_size: int, timeout: float) -> BoundedStore:
    """`store` with a prefix that these processes alone have.

    Several agents of torchrun keep one store over all restarts (seen with torch 2.15): processes that come back find
    the addresses of the dead in it and wait for those. So each process sets a random token, and rank 0 answers every
    token that it sees with the new prefix. An earlier answer is not to any of these tokens.

    Raises:
        RunFailed: a process did not come within `timeout` seconds.
        NoAnswer: the store does not answer.
    """
    token = uuid.uuid4().hex
    store.set(f"token/{rank}", token)
    if rank == 0:
        prefix, missing = token, _answer_tokens(store, token, world_size, timeout)
    elif store.wait([f"prefix/{token}"], timeout):
        prefix, missing = store.get(f"prefix/{token}").decode(), []
        store.set(f"{prefix}/joined/{rank}", "")
    else:
        prefix, missing = "", [0]
    if missing:
        names = ", ".join(map(str, missing))
        raise RunFailed(f"rank {names} did not come within {timeout:g} s (--timeout)", on_all_ranks=False)
    return store.with_prefix(prefix)


def _answer_tokens(store: BoundedStore, prefix: str, world_size: int, timeout: float) -> list[int]:
    """Rank 0's part: answer each token with `prefix`, until all ranks have joined; the ranks that have not in time."""
    missing, deadline = list(range(1, world_size)), time.monotonic() + timeout
    while missing and time.monotonic() < deadline:
        for rank in missing:
            if store.check([f"token/{rank}"]):
                store.set(f"prefix/{store.get(f'token/{rank}').decode()}", prefix)
        missing = [rank for rank in missing if not store.check([f"{prefix}/joined/{rank}"])]
        time.sleep(WAIT_INTERVAL)
    return missing
