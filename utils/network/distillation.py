"""Distillation: the logits of a teacher for the images of a step, and the loss in which they have a part."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, logsigmoid

from utils.figures import Task
from utils.network.weight_files import Normalization


class Teacher:
    """A trained network that sees the images of the student, and learns nothing.

    No module, so that neither the student nor anything that walks its modules can take its weights along.

    Args:
        network: on its device, for evaluation, its weights without gradients: images (N, 3, H, W) -> logits (N, C).
        order: of each class of the run, its output; None where they are the same.
        own, given: mean and standard deviation per channel that `network` was made for, and those of the images.
        device: of the network.
        compiled: whether torch.compile compiles the pass, each image size for itself.
    """

    def __init__(
        self,
        network: nn.Module,
        order: Sequence[int] | None,
        own: Normalization,
        given: Normalization,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._network = network
        self._order = None if order is None else torch.tensor(order, device=device)
        self._scale: Tensor | None = None
        if own != given:
            # (x std + mean - own mean) / own std, in float64 before it is rounded
            (own_mean, own_std), (mean, std) = (torch.tensor(each, dtype=torch.float64) for each in (own, given))
            self._scale, self._shift = (
                value.float().view(1, -1, 1, 1).to(device) for value in (std / own_std, (mean - own_mean) / own_std)
            )
        # A method of this class, not the network: torch counts what it compiles of a function of the network's class,
        # which is the student's, too, and stops at eight.
        self._compute = torch.compile(self._pass, dynamic=False) if compiled else self._pass

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalized images (N, 3, H, W) of the student -> logits (N, C) in the run's order of classes."""
        logits: Tensor = self._compute(images)
        return logits

    def _pass(self, images: Tensor) -> Tensor:
        if self._scale is not None:
            images = (images * self._scale + self._shift).to(images.dtype)
        logits: Tensor = self._network(images)
        return logits if self._order is None else logits[:, self._order]


class Distillation(nn.Module):
    """`(1 - weight) * own loss + weight * T² * KL(teacher || student)`, both at the temperature T (arXiv:1503.02531).

    The divergence is of softmax(logits / T), summed over classes, as the mean over images. Where an image has any
    number of classes it is of sigmoid(logits / T) for each class, as the mean over images and classes, as is that of
    the own loss. T² keeps its gradients as large as those of the own loss.

    Args:
        criterion: the own loss: logits, targets -> mean loss.
        weight: of the teacher, 0 to 1.
        temperature: T, above 0.
    """

    def __init__(self, criterion: nn.Module, weight: float, temperature: float, task: Task) -> None:
        super().__init__()
        self.criterion, self.weight, self.temperature, self.task = criterion, weight, temperature, task

    def forward(self, logits: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        """Logits (N, C), targets of the own loss, logits of the teacher (N, C) -> mean loss, a float32 scalar."""
        own: Tensor = self.criterion(logits, targets)
        found, wanted = (self._log_probabilities(each.float() / self.temperature) for each in (logits, teacher))
        divergence = kl_div(found, wanted, reduction="sum", log_target=True)
        number = len(logits) if self.task == "multiclass" else logits.numel()
        return (1 - self.weight) * own + self.weight * self.temperature**2 / number * divergence

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Of each class, or of each class and of its absence."""
        if self.task == "multiclass":
            return log_softmax(logits, dim=1)
        return torch.stack((logsigmoid(logits), logsigmoid(-logits)))
