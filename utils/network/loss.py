"""The loss of training, made of its record in `utils.options.losses`."""

import pkgutil
from collections.abc import Sequence
from typing import cast

import timm.loss
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from utils.network.distillation import Distillation
from utils.options.losses import LOSSES
from utils.options.resolved import ResolvedConfig


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's, with the mean over images also where classes have weights, and with the factor of focal loss.

    torch divides by the sum of the images' weights: the same image would count more beside others, and other numbers of
    processes would train otherwise.

    Args:
        focal: power of (1 - p) that the loss of a class with probability p is multiplied by (arXiv:1708.02002); 0 is
            cross entropy.
        label_smoothing: share of the target that is spread over all classes.
        weight: factor of each class, float32 (C,); None for 1.
    """

    def __init__(self, focal: float, label_smoothing: float, weight: Tensor | None) -> None:
        super().__init__(weight, label_smoothing=label_smoothing)
        self.focal = focal

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (N, C); targets int64 (N,), or mixed ones, float32 (N, C) -> mean loss, a scalar."""
        if not self.focal and self.weight is None:
            return super().forward(logits, targets)
        num_classes = logits.shape[1]
        if targets.shape != logits.shape:
            targets = one_hot(targets, num_classes)
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / num_classes
        log_p = logits.float().log_softmax(dim=1)
        losses = -targets * log_p
        if self.weight is not None:
            losses = losses * self.weight
        if self.focal:
            others = (-log_p.expm1()).clamp_min(
                torch.finfo(log_p.dtype).tiny
            )  # 0 has no finite slope below a power of 1
            losses = losses * others**self.focal
        return losses.sum(dim=1).mean()


class BinaryCrossEntropy(timm.loss.BinaryCrossEntropy):  # type: ignore[misc]
    """timm's, in float32, which also smooths mixed targets, as timm's mixup does it for that.

    Each class is a question of its own: is it in the image (arXiv:2110.00476)? The mean is over images and classes.

    Args:
        smoothing: share of the target that is spread over all classes.
        target_threshold: targets above it become 1, the others 0; None leaves them as they are.
        weight: factor of each class's question, float32 (C,); None for 1.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (N, C); targets int64 (N,), or mixed ones, float32 (N, C) -> mean loss, a scalar."""
        if targets.shape == logits.shape:
            targets = targets * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return cast(Tensor, super().forward(logits.float(), targets))


class Asymmetric(nn.Module):
    """The asymmetric loss of arXiv:2009.14119 with its defaults, as the mean over images and classes.

    What is not in an image counts less the clearer the network is about it, and not at all below a probability of
    `CLIP`. The paper's sum over images and classes wants a learning rate that follows their numbers.

    Args:
        weight: factor of each class's question, float32 (C,); None for 1.
    """

    GAMMA_POS, GAMMA_NEG, CLIP, EPS = 1, 4, 0.05, 1e-8
    weight: Tensor | None

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (N, C); targets float32 (N, C) -> mean loss, a scalar."""
        yes = logits.float().sigmoid()
        no = (1 - yes + self.CLIP).clamp(max=1)
        losses = -targets * yes.clamp_min(self.EPS).log() - (1 - targets) * no.clamp_min(self.EPS).log()
        wrong = 1 - yes * targets - no * (1 - targets)
        losses = losses * wrong ** (self.GAMMA_POS * targets + self.GAMMA_NEG * (1 - targets))
        return (losses if self.weight is None else losses * self.weight).mean()


def create_criterion(
    config: ResolvedConfig, device: torch.device, class_weights: Sequence[float] | None = None
) -> nn.Module:
    """Logits and targets, with a teacher also its logits -> mean loss.

    `class_weights` are the factors of the classes, None for 1.
    """
    loss = LOSSES[config.loss]
    arguments = {argument: getattr(config, name) for argument, name in loss.arguments.items()}
    weight = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
    criterion: nn.Module = pkgutil.resolve_name(loss.module)(**arguments, weight=weight)
    if config.teacher is not None:
        criterion = Distillation(criterion, config.teacher_weight, config.teacher_temperature, config.task)
    return criterion.to(device)
