"""Collectives: sum, gather and broadcast over all ranks, and errors that are raised on all of them."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from utils.distributed.collective import collective
from utils.distributed.group import DistEnv
from utils.errors import UserError

T = TypeVar("T")


@collective
def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum of `tensor` over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


@collective
def all_gather_object(value: T, env: DistEnv) -> list[T]:
    """`value` of every rank, in rank order, on every rank."""
    if env.world_size == 1:
        return [value]
    values: list[Any] = [None] * env.world_size
    dist.all_gather_object(values, value)
    return values


@collective
def broadcast(value: T, env: DistEnv) -> T:
    """Rank 0's `value`, on every rank."""
    if env.world_size == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return cast(T, values[0])


@collective
def gather_to_rank0(value: T, env: DistEnv) -> list[T] | None:
    """`value` of every rank, in rank order, on rank 0; None on the others."""
    if env.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * env.world_size if env.is_main else None
    dist.gather_object(value, values)
    return values


@collective
def raise_on_all_ranks(error: UserError | None, env: DistEnv) -> None:
    """Raise the first error of any rank on every rank, so that none is left waiting for the others.

    Args:
        error: of this rank; None for none.

    Raises:
        UserError: with the message of the lowest rank that has an error.
    """
    for message in all_gather_object(str(error) if error else None, env):
        if message is not None:
            raise UserError(message, on_all_ranks=True)


@collective
@contextlib.contextmanager
def sync_errors(env: DistEnv) -> Iterator[None]:
    """Around a check that may fail on some ranks only: a UserError of any rank is raised on all."""
    error = None
    try:
        yield
    except UserError as caught:
        error = caught
    raise_on_all_ranks(error, env)
