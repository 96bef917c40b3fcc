"""Embeddings: the pooled features before the head of a network, and what is known of the network beside them."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from utils.errors import UserError, first_line
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of
from utils.training.state.checkpoint import Checkpoint

FACTS = "embeddings.json"
SUMMARY = ("top1", "top5", "count")


class WithEmbeddings(nn.Module):
    """A network that gives the features before its head and its logits: float32 (N, width + num_classes).

    The features are what timm calls pre-logits. Both come from one pass. A network's `forward` is its
    `forward_features` and its `forward_head`, in all of timm.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        model = cast(Any, self.model)
        features = model.forward_features(images)
        embeddings: Tensor = model.forward_head(features, pre_logits=True)
        logits: Tensor = model.forward_head(features)
        return torch.cat([embeddings.float(), logits.float()], dim=1)


def embedding_width(model: nn.Module, config: ResolvedConfig) -> int:
    """Features that `model` has before its head, found by a black image on its device.

    Raises:
        UserError: on all ranks: it has no vector of them.
    """
    device = next(model.parameters()).device
    image = torch.zeros(1, 3, *sides_of(config.val_image_size), device=device)
    reason = ""
    try:
        with torch.inference_mode():
            found = WithEmbeddings(model)(image)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # networks have no common one
        reason = first_line(error, 200)
    if reason:
        raise UserError(
            f"--output-type embedding: {config.arch} gives no vector before its head ({reason}); give --output-type "
            "logit",
            on_all_ranks=True,
        )
    return int(found.shape[1]) - config.num_classes


def describe_embeddings(saved: Checkpoint, network: str, config: ResolvedConfig, width: int) -> dict[str, Any]:
    """The part of embeddings.json that says what has computed them: equal for embeddings that can be compared.

    Args:
        network: its name in the checkpoint.
        config: with which it is evaluated.
    """
    return {
        "arch": config.arch,
        "run": saved.record.run,
        "epoch": saved.state.epoch,
        "step": saved.state.step,
        "network": network,
        "width": width,
        "image_size": config.val_image_size,
        "resize": config.val_resize,
        "crop": config.val_crop,
        "eval_flip": config.eval_flip,
        "amp": config.amp,
    }
