"""Epochs in which only the head trains, and what a step needs again when the other layers join it."""

from collections.abc import Callable

from torch import Tensor, nn

from utils.distributed.collective import collective
from utils.network.gradients import ForwardBackward, GraphedForwardBackward
from utils.network.head import head_modules, head_parameters


def freeze(model: nn.Module, frozen: bool) -> None:
    """Let only the head of `model` have gradients, or all of it.

    Raises:
        UserError: there is no head.
    """
    head = head_parameters(model, "--freeze-epochs") if frozen else set()
    for parameter in model.parameters():
        parameter.requires_grad_(not frozen or parameter in head)


def freeze_statistics(model: nn.Module) -> None:
    """Let norms outside the head use their running statistics and keep them, until the next `model.train()`."""
    head = {module for layer in head_modules(model) for module in layer.modules()}
    for module in model.modules():
        if hasattr(module, "running_var") and module not in head:
            module.training = False  # of this layer alone: dropout stays as it is


class FreezingForwardBackward:
    """`ForwardBackward` of a network whose head trains alone at first.

    DDP, the flat exchange, the compiler and a CUDA graph hold the weights that have gradients, so that each is set up
    again where that changes. The optimizer has all weights from the start; it passes over those without a gradient.

    Args:
        inner: for the whole network.
        model: the network itself.
        freeze_epochs: in which the head trains alone.
        set_up: returns what to use in an epoch, for the weights that have gradients then.
    """

    def __init__(
        self,
        inner: ForwardBackward | GraphedForwardBackward,
        model: nn.Module,
        freeze_epochs: int,
        set_up: Callable[[int], ForwardBackward | GraphedForwardBackward],
    ) -> None:
        self._inner, self._model, self._freeze_epochs, self._set_up = inner, model, freeze_epochs, set_up
        self._frozen = False

    @collective
    def start_epoch(self, epoch: int) -> None:
        """Freeze or unfreeze, where the epoch, from 0, is the first to need it.

        To be called after `model.train()`.
        """
        frozen = epoch < self._freeze_epochs
        if frozen != self._frozen:
            self.close()
            freeze(self._model, frozen)
            self._inner, self._frozen = self._set_up(epoch), frozen
            self._model.train()
        if frozen:
            freeze_statistics(self._model)

    def __call__(self, images: Tensor, targets: Tensor, micro: int) -> Tensor:
        """As `ForwardBackward.__call__`."""
        return self._inner(images, targets, micro)

    def close(self) -> None:
        """Release what the inner one holds."""
        self._inner.close()


AnyForwardBackward = ForwardBackward | GraphedForwardBackward | FreezingForwardBackward
