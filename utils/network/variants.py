"""Other ways to compute the same layers in training: activations twice, batch norm over all processes."""

from typing import Any, cast

from timm.layers import convert_sync_batchnorm
from torch import nn

from utils.errors import UserError
from utils.network.fused_layers import depthwise_shapes
from utils.network.head import head_parameters
from utils.network.input_check import check_inputs
from utils.network.kernels.shapes import DepthwiseShape
from utils.options.resolved import ResolvedConfig


def prepare_training(model: nn.Module, config: ResolvedConfig, world_size: int) -> set[DepthwiseShape]:
    """Change `model` in place as `--grad-checkpointing` and `--sync-bn` say, and try it on images of the run's sizes.

    A network that is only evaluated is only tried. Names, weights and buffers stay.

    Args:
        model: on the CPU.
        world_size: processes of the run.

    Returns:
        The shapes of its depthwise convolutions.

    Raises:
        UserError: it does not take such images, or a flag.
    """
    _use_checkpointing(model, config)
    model.train(not config.evaluate)
    is_synchronized = config.sync_bn and world_size > 1 and not config.evaluate
    with depthwise_shapes(model) as shapes:
        # One image a process is enough for batch norm over several.
        check_inputs(model, config, config.batch_size * (world_size if is_synchronized else 1))
    if is_synchronized:
        convert_sync_batchnorm(model)  # after the trial: torch's layer computes on GPUs only
    return shapes


def _use_checkpointing(model: nn.Module, config: ResolvedConfig) -> None:
    """Change `model` in place as `--grad-checkpointing` says, unless it is only evaluated.

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
