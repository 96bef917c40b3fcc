"""The losses of `--loss`, a record each; `utils.network.loss` makes modules of them."""

from typing import NamedTuple

from utils.figures import Task


class Loss(NamedTuple):
    """What training minimizes. Evaluations have cross entropy in any case.

    Attributes:
        module: "PACKAGE:CLASS", which maps logits (N, C) and targets, int64 (N,) or float32 (N, C), to a scalar. It
            also takes `weight`, float32 (C,) or None, the factor of each class.
        arguments: of the class, each with the field of TrainConfig that gives its value. A flag that only other losses
            have is refused.
        tasks: that it is for; the first loss of a task is its default.
    """

    name: str
    module: str
    arguments: dict[str, str]
    tasks: tuple[Task, ...]


LOSSES = {
    loss.name: loss
    for loss in (
        Loss(
            "cross-entropy",
            "utils.network.loss:CrossEntropy",
            {"label_smoothing": "label_smoothing", "focal": "focal"},
            ("multiclass",),
        ),
        # Each class is a question of its own (arXiv:2110.00476).
        Loss(
            "bce",
            "utils.network.loss:BinaryCrossEntropy",
            {"smoothing": "label_smoothing", "target_threshold": "bce_target_thresh"},
            ("multiclass", "multilabel"),
        ),
        # What is not in an image counts less, and least where that is clear (arXiv:2009.14119).
        Loss("asymmetric", "utils.network.loss:Asymmetric", {}, ("multilabel",)),
    )
}


def default_loss(task: Task) -> str:
    """The name of a task's loss where none is given."""
    return next(loss.name for loss in LOSSES.values() if task in loss.tasks)
