"""Other ways to compute the same layers in training: activations twice, batch norm over all processes."""

from typing import Any, cast

from timm.layers import convert_sync_batchnorm
from torch import nn

from utils.config import ResolvedConfig
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.head import head_parameters


def apply_variants(model: nn.Module, config: ResolvedConfig, env: DistEnv) -> None:
    """Change `model` in place as `--grad-checkpointing` and `--sync-bn` say, unless it is only evaluated.

    Names, weights and buffers stay.

    Raises:
        UserError: timm has no gradient checkpointing for this architecture, or `--freeze-epochs` finds no head.
    """
    if config.evaluate:
        return
    if config.freeze_epochs:
        head_parameters(model, "--freeze-epochs")  # or the first step would find that there are none
    if config.grad_checkpointing:
        try:
            cast(Any, model).set_grad_checkpointing(True)
        except (AssertionError, AttributeError):
            raise UserError(
                f"--grad-checkpointing: timm has none for {config.arch}; leave it out, and lower --batch-size with a "
                "higher --grad-accum-steps"
            ) from None
    if config.sync_bn and env.world_size > 1:
        convert_sync_batchnorm(model)
