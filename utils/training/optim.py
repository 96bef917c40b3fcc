"""Parameter groups, optimizer, moving average, and the learning rate: scaled by the global batch, warmup, cosine."""

import difflib

import timm.optim
import torch
from timm.optim.kron import Kron
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from utils.config import ResolvedConfig, TrainConfig
from utils.errors import UserError, first_line

LR_BATCH = 256  # --lr is given per this many images (Goyal et al. 2017, arXiv:1706.02677, section 2.1)


def scaled_lr(lr: float, global_batch_size: int) -> float:
    """Linear scaling rule: `lr` per 256 images times `global_batch_size / 256`."""
    return lr * global_batch_size / LR_BATCH


def check_optimizer(name: str, world_size: int = 1) -> None:
    """Raise UserError, with the closest names, unless timm knows the optimizer and our step is enough for it."""
    known = timm.optim.list_optimizers()
    if name not in known:
        close = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.0))
        raise UserError(f"--optimizer {name}: unknown to timm; the closest are {close}")
    info = timm.optim.get_optimizer_info(name)
    if info.second_order:
        raise UserError(f"--optimizer {name}: needs gradients of gradients, which are not computed here; give another")
    if world_size > 1 and isinstance(info.opt_class, type) and issubclass(info.opt_class, Kron):
        raise UserError(
            f"--optimizer {name}: draws random numbers, so that the weights of {world_size} processes would part; give "
            "another, or train with one process"
        )


def create_optimizer(
    config: TrainConfig, model: nn.Module, global_batch_size: int, fused: bool | None = None
) -> Optimizer:
    """timm's optimizer over two groups: with weight decay and without, as timm divides them (docs/decisions/0014).

    Args:
        config: its rate, momentum and weight decay.
        model: on its device.
        global_batch_size: images in an optimizer step.
        fused: whether the update is one kernel, where the optimizer has one. By default on a GPU.

    Raises:
        UserError: the optimizer needs a package that is not there, or does not take this network.
    """
    try:
        if fused is None:
            fused = next(model.parameters()).is_cuda
        fused = fused and _has_fused(config.optimizer)
        optimizer: Optimizer = timm.optim.create_optimizer_v2(
            model,
            opt=config.optimizer,
            lr=scaled_lr(config.lr, global_batch_size),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            filter_bias_and_bn=True,
            **({"fused": True} if fused else {}),
        )
    except Exception as error:  # timm lists those of apex and bitsandbytes too, whether they are installed or not
        raise UserError(
            f"--optimizer {config.optimizer}: is not available here ({first_line(error)}); give another"
        ) from error
    if fused and isinstance(optimizer, SGD):
        _fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(_fill_momentum)
    return optimizer


def _fill_momentum(optimizer: Optimizer) -> None:
    """Give each parameter of SGD that has no momentum yet one of zeros, from which the first step is torch's own.

    torch's fused step would allocate it, and leave it uninitialised if fp16's scaler skips that step. Of the others
    with a fused step, Adam and AdamW, torch starts the state with zeros.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _has_fused(name: str) -> bool:
    return timm.optim.get_optimizer_class(name, bind_defaults=False) in (SGD, Adam, AdamW)


def create_ema(model: nn.Module, decay: float) -> ModelEmaV3:
    """Moving average of the weights, whose decay grows to `decay` (0 to below 1): (1 + n) / (10 + n), n the steps done.

    That of TensorFlow's ExponentialMovingAverage with `num_updates`: the average spans a tenth of the run at most, and
    soon forgets the random weights of the beginning. The first steps copy the weights, so that n is 3 less.
    """
    return ModelEmaV3(model, decay=decay, use_warmup=True, warmup_gamma=9.0, warmup_power=1.0)


def describe_ema(ema: ModelEmaV3, total_steps: int) -> str:
    """When its decay is the one that was asked for, or which it ends with."""
    last = ema.get_decay(total_steps - 1)
    if last < ema.decay:
        return f"decay grows to {last:.5g} in the {total_steps:,} steps of the run, too few for {ema.decay:g}"
    return f"decay grows to {ema.decay:g} in the first {round(9 / (1 - ema.decay)) - 8:,} steps"


def create_schedule(config: ResolvedConfig, optimizer: Optimizer, steps_per_epoch: int) -> CosineLRScheduler:
    """Linear warmup over `warmup_epochs`, then half a cosine towards 0 after the last step.

    With W warmup steps the first step has 1/W of the peak, as a rate of 0 would waste it.

    `step_update(step)` sets the rate of that step (from 0): the schedule is a function of the step and has no state.
    """
    total_steps = config.epochs * steps_per_epoch
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps - 1)
    peak = optimizer.param_groups[0]["lr"]
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, total_steps - warmup_steps),
        warmup_t=warmup_steps,
        warmup_lr_init=peak / max(1, warmup_steps),
        warmup_prefix=True,
        t_in_epochs=False,
    )


def rate_at(config: ResolvedConfig, step: int, steps_per_epoch: int, global_batch_size: int) -> float:
    """Learning rate of a run's step number `step`, from 0."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=scaled_lr(config.lr, global_batch_size))
    create_schedule(config, optimizer, steps_per_epoch).step_update(step)
    return float(optimizer.param_groups[0]["lr"])
