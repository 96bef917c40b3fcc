"""Convolutions on the GPU before their first use: cuDNN's choice of algorithms, kernels that are compiled early."""

from collections.abc import Collection

import torch

from utils.distributed.group import DistEnv
from utils.network.gradient_plans import start_gradient_plans
from utils.network.gradients import AMP_DTYPES
from utils.network.kernels.shapes import DepthwiseShape
from utils.options.resolved import ResolvedConfig

MIN_SEARCH_IMAGES = 5_000_000  # docs/internals/decisions/0032


def choose_search(images: int) -> None:
    """Leave cuDNN's search on in long runs alone. To be called once, before the first convolution.

    The search takes seconds, for EfficientNet-B0 half a minute, and makes each step a little faster. Where it is off,
    as with `--deterministic`, it stays off.

    Args:
        images: that this process trains on in the whole run.
    """
    if images < MIN_SEARCH_IMAGES:
        torch.backends.cudnn.benchmark = False


def prepare_depthwise(shapes: Collection[DepthwiseShape], config: ResolvedConfig, env: DistEnv) -> None:
    """Compile kernels of depthwise convolutions before the first step needs them; on the CPU there are none.

    Those of the fused layers before this returns, cuDNN's for the gradients in a thread (`start_gradient_plans`).

    Args:
        shapes: each kind once.
    """
    if env.device.type != "cuda" or not shapes:
        return
    dtype = AMP_DTYPES[config.amp]
    if prepares_gradients(config):
        start_gradient_plans(sorted(shapes), config.batch_size, dtype, env.device, not config.fused_layers)
    if config.fused_layers:
        from utils.network.kernels.depthwise import compile_depthwise

        compile_depthwise(shapes, dtype, env.device, config.workers, not config.evaluate)


def prepares_gradients(config: ResolvedConfig) -> bool:
    """Whether cuDNN compiles kernels of gradients in a thread.

    Not where the first epochs have no such gradients, beside cuDNN's search, which measures times, and where a loader
    will fork this process.
    """
    search = torch.backends.cudnn.benchmark
    return not (config.evaluate or config.freeze_epochs or search or config.loader in ("torch", "proxy"))
