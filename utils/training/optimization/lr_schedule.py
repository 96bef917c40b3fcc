"""The learning rate of each step: linear warmup, then a cosine, a line, steps or a constant rate."""

from typing import Any

import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.step_lr import StepLRScheduler
from torch import nn
from torch.optim import SGD, Optimizer

from utils.options.resolved import ResolvedConfig
from utils.options.schedules import decay_epochs
from utils.training.optimization.optim import describe_lr, peak_lr

DECAY_RATE = 0.1  # of --schedule step


def create_schedule(config: ResolvedConfig, optimizer: Optimizer, peak: float, steps_per_epoch: int) -> Scheduler:
    """timm's schedule: linear warmup over `warmup_epochs`, then what `--schedule` names.

    - cosine: half a cosine toward `--min-lr`, which the step after the last has, or the first of `--cooldown-epochs`.
    - linear: a line to the same.
    - step: `--decay-rate` times the rate at every `--decay-epochs` from the start of the run.
    - constant: the peak.

    With W warmup steps the first step has 1/W of the peak, as a rate of 0 would waste it.

    `step_update(step)` sets the rate of that step (from 0): the schedule is a function of the step and has no state.

    Args:
        optimizer: its groups get their rates, new or loaded from a checkpoint.
        peak: highest rate, `peak_lr`.
        steps_per_epoch: optimizer steps.
    """
    total_steps = config.epochs * steps_per_epoch
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), total_steps - 1)
    for group in optimizer.param_groups:
        group["initial_lr"] = peak  # which timm takes for the peak, and a checkpoint may have another one
    warmup: dict[str, Any] = {
        "warmup_t": warmup_steps,
        "warmup_lr_init": peak / max(1, warmup_steps),
        "t_in_epochs": False,
    }
    if config.schedule == "constant":
        return StepLRScheduler(optimizer, decay_t=1, decay_rate=1.0, **warmup)
    if config.schedule == "step":
        decay_steps = max(1, round(decay_epochs(config) * steps_per_epoch))
        decay_rate = DECAY_RATE if config.decay_rate is None else config.decay_rate
        return StepLRScheduler(optimizer, decay_steps, decay_rate, warmup_prefix=False, **warmup)
    decay: dict[str, Any] = {
        # timm warns of 1, whose only step has the peak as well.
        "t_initial": max(2, total_steps - warmup_steps - config.cooldown_epochs * steps_per_epoch),
        "lr_min": peak * (config.min_lr / config.lr),
        "warmup_prefix": True,
    }
    if config.schedule == "linear":
        return PolyLRScheduler(optimizer, power=1.0, **decay, **warmup)
    return CosineLRScheduler(optimizer, **decay, **warmup)


def rate_at(config: ResolvedConfig, step: int, steps_per_epoch: int, global_batch_size: int) -> float:
    """Learning rate of a run's step number `step`, from 0."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    create_schedule(config, optimizer, peak_lr(config, global_batch_size), steps_per_epoch).step_update(step)
    return float(optimizer.param_groups[0]["lr"])


def describe_schedule(config: ResolvedConfig, global_batch_size: int) -> str:
    """What follows the warmup, where it is not the usual cosine to 0; "" for that."""
    if config.schedule == "constant":
        return "constant"
    if config.schedule == "step":
        rate = DECAY_RATE if config.decay_rate is None else config.decay_rate
        return f"step, {rate:g} times the rate every {decay_epochs(config):g} epochs"
    if config.schedule == "cosine" and not config.min_lr:
        return ""
    least = describe_lr(config.min_lr, config.lr_scaling, global_batch_size) if config.min_lr else "0"
    epochs = f"{config.cooldown_epochs} epochs keep" if config.cooldown_epochs > 1 else "epoch keeps"
    cooldown = f", which the last {epochs}" if config.cooldown_epochs else ""
    return f"{config.schedule} to {least}{cooldown}"
