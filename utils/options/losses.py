"""The losses of `--loss`, a record each; `utils.network.loss` makes modules of them."""

from typing import NamedTuple


class Loss(NamedTuple):
    """What training minimizes. Evaluations have cross entropy in any case.

    Attributes:
        module: "PACKAGE:CLASS", which maps logits (N, C) and targets, int64 (N,) or float32 (N, C), to a scalar. It
            also takes `weight`, float32 (C,) or None, the factor of each class.
        arguments: of the class, each with the field of TrainConfig that gives its value. A flag that only other losses
            have is refused.
    """

    name: str
    module: str
    arguments: dict[str, str]


LOSSES = {
    loss.name: loss
    for loss in (
        Loss(
            "cross-entropy", "utils.network.loss:CrossEntropy", {"label_smoothing": "label_smoothing", "focal": "focal"}
        ),
        # Each class is a question of its own (arXiv:2110.00476).
        Loss(
            "bce",
            "utils.network.loss:BinaryCrossEntropy",
            {"smoothing": "label_smoothing", "target_threshold": "bce_target_thresh"},
        ),
    )
}
