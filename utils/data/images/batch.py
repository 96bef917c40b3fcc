"""A batch of images and targets, and the interfaces of the loaders that make batches."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Batch(NamedTuple):
    """One batch on the training device.

    Attributes:
        images: uint8 (N, 3, H, W), RGB, in channels_last memory.
        targets: int64 (N,).
    """

    images: Tensor
    targets: Tensor


class TrainLoader(Protocol):
    """An endless stream of training batches."""

    def __next__(self) -> Batch:
        """The next batch, always `batch_size` images."""

    def state(self) -> dict[str, Any]:
        """What a new loader needs to continue after the last batch that was returned."""

    def close(self) -> None:
        """End worker processes and threads."""


class ValLoader(Protocol):
    """This rank's part of the validation images; each `iter()` is one whole pass."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches of at most `batch_size` images; none at all on a rank without images."""
