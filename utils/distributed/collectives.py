"""The few collectives that the trainer needs. Each is called on every rank."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from utils.distributed.group import DistEnv
from utils.errors import UserError

T = TypeVar("T")


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum of `tensor` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def all_gather_object(value: T, env: DistEnv) -> list[T]:
    """`value` of every rank, in rank order, on every rank."""
    if env.world_size == 1:
        return [value]
    values: list[Any] = [None] * env.world_size
    dist.all_gather_object(values, value)
    return values


def broadcast(value: T, env: DistEnv) -> T:
    """Rank 0's `value`, on every rank."""
    if env.world_size == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return cast(T, values[0])


def gather_to_rank0(value: T, env: DistEnv) -> list[T] | None:
    """`value` of every rank, in rank order, on rank 0; None on the others."""
    if env.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * env.world_size if env.is_main else None
    dist.gather_object(value, values)
    return values


def raise_on_all_ranks(error: UserError | None, env: DistEnv) -> None:
    """Raise on every rank what any rank found wrong, so that none is left waiting for the others. A collective."""
    for found in all_gather_object(str(error) if error else None, env):
        if found is not None:
            raise UserError(found, on_all_ranks=True)


@contextlib.contextmanager
def sync_errors(env: DistEnv) -> Iterator[None]:
    """Around what some ranks may find wrong and others not: a UserError of any is raised on all. A collective."""
    error = None
    try:
        yield
    except UserError as found:
        error = found
    raise_on_all_ranks(error, env)
