"""The loss of training, made of its record in `utils.options.losses`."""

import pkgutil
from typing import cast

import timm.loss
from torch import Tensor, nn

from utils.options.losses import LOSSES
from utils.options.resolved import ResolvedConfig


class BinaryCrossEntropy(timm.loss.BinaryCrossEntropy):  # type: ignore[misc]
    """timm's, in float32, which also smooths mixed targets, as timm's mixup does it for that.

    Each class is a question of its own: is it in the image (arXiv:2110.00476)? The mean is over images and classes.

    Args:
        smoothing: share of the target that is spread over all classes.
        target_threshold: targets above it become 1, the others 0; None leaves them as they are.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (N, C); targets int64 (N,), or mixed ones, float32 (N, C) -> mean loss, a scalar."""
        if targets.shape == logits.shape:
            targets = targets * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return cast(Tensor, super().forward(logits.float(), targets))


def create_criterion(config: ResolvedConfig) -> nn.Module:
    """Logits and targets -> mean loss."""
    loss = LOSSES[config.loss]
    arguments = {argument: getattr(config, name) for argument, name in loss.arguments.items()}
    return cast(nn.Module, pkgutil.resolve_name(loss.module)(**arguments))
