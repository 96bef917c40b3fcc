"""Parameter groups, optimizer with its usual settings, moving average, and the learning rate in words."""

import dataclasses
import difflib
import inspect
import warnings
from typing import Any

import timm.optim
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.optim.kron import Kron
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from utils.errors import UserError, first_line
from utils.network.head import head_parameters
from utils.options.arguments import optimizer_arguments
from utils.options.config import TrainConfig
from utils.options.flags import flag
from utils.options.rates import LR_BATCH, Scaling, lr_factor
from utils.options.resolved import ResolvedConfig
from utils.text import count


@dataclasses.dataclass(frozen=True)
class OptimizerDefaults:
    """What is usual for a kind of optimizer.

    Attributes:
        lr: for 256 images.
        scaling: how the rate grows with the global batch.
        momentum: of optimizers that have one.
        weight_decay: as the optimizer applies it, within the gradient or beside it.
        source: where the values are from, for the user.
    """

    lr: float
    scaling: Scaling
    momentum: float
    weight_decay: float
    source: str


_SGD = OptimizerDefaults(0.256, "linear", 0.875, 1 / 32768, "NVIDIA's ResNet-50 recipe")
_ADAMW = OptimizerDefaults(5e-4, "sqrt", 0.9, 0.05, "DeiT's and Swin's, 0.001 for 1,024 images")
_ADAM = OptimizerDefaults(1e-3, "sqrt", 0.9, 0.0, "PyTorch's defaults")
_LAMB = OptimizerDefaults(0.0028, "sqrt", 0.9, 0.02, "timm's ResNet recipe A3, 0.008 for 2,048 images")
_LION = OptimizerDefaults(1e-4, "sqrt", 0.9, 0.5, "a fifth of AdamW's rate, ten times its decay, as its paper advises")
_RMSPROP = OptimizerDefaults(0.016, "linear", 0.9, 1e-5, "the EfficientNet paper")
# Name of the class, in torch, timm, apex or bitsandbytes -> its defaults.
_DEFAULTS = {
    **dict.fromkeys(("SGD", "SGD8bit", "SGDP", "SGDW", "FusedSGD"), _SGD),
    **dict.fromkeys(("AdamW", "AdamW8bit", "AdamWLegacy", "NAdamW"), _ADAMW),
    **dict.fromkeys(("Adam", "Adam8bit", "Adamax", "FusedAdam", "NAdam", "NAdamLegacy", "RAdam", "RAdamLegacy"), _ADAM),
    **dict.fromkeys(("Lamb", "FusedLAMB"), _LAMB),
    **dict.fromkeys(("Lion", "Lion8bit"), _LION),
    **dict.fromkeys(("RMSprop", "RMSpropTF"), _RMSPROP),
}
FAR, FAR_BELOW = 3, 1 / 100  # times the usual learning rate: a warning
MISREAD, MISREAD_FACTOR = 1.5, 3  # the same for a rate that may be meant as it is, where it would grow by this factor


def usual_settings(name: str) -> OptimizerDefaults | None:
    """Defaults of timm's optimizer `name`; None if none are usual."""
    kind = timm.optim.get_optimizer_info(name).opt_class
    return _DEFAULTS.get((kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2])


def usual_scaling(name: str) -> Scaling:
    """How the rate of timm's optimizer `name` grows with the batch; as timm's train.py has it where none is usual."""
    usual = usual_settings(name)
    if usual is not None:
        return usual.scaling
    return "sqrt" if "ada" in name or "lamb" in name else "linear"


def resolve_optimizer(config: TrainConfig, saved: ResolvedConfig | None = None) -> dict[str, Any]:
    """The optimizer's settings: those that were given, and the usual ones in place of the others.

    Args:
        config: as the user gave it.
        saved: of the checkpoint that the run goes on from, whose rate, and rule for it, hold where none was given.

    Raises:
        UserError: the optimizer is unknown, or no learning rate is usual and none was given.
    """
    check_optimizer(config.optimizer)
    usual = usual_settings(config.optimizer)
    if usual is None and config.lr is None:
        raise UserError(f"--optimizer {config.optimizer}: has no usual learning rate; give --lr", on_all_ranks=True)
    others = usual or OptimizerDefaults(0.0, "linear", 0.9, 0.0, "")
    names = ("momentum", "weight_decay")
    _check_arguments(config)
    if saved is None or saved.optimizer != config.optimizer:
        saved = None
    lr = config.lr or (saved.lr if saved else others.lr)
    if config.min_lr >= lr:
        raise UserError(f"--min-lr {config.min_lr:g}: must be less than --lr {lr:g}; lower it", on_all_ranks=True)
    scaling = config.lr_scaling
    if scaling == "auto":
        scaling = saved.lr_scaling if saved else usual_scaling(config.optimizer)
    found = {name: getattr(others if getattr(config, name) is None else config, name) for name in names}
    return found | {"lr": lr, "lr_scaling": scaling}


def _check_arguments(config: TrainConfig) -> None:
    """Raise UserError for `--optimizer-args` that the optimizer does not take. timm would drop two of them."""
    info = timm.optim.get_optimizer_info(config.optimizer)
    arguments = optimizer_arguments(config)
    if isinstance(info.opt_class, str):  # of a package that may not be there
        return
    taken = set(inspect.signature(info.opt_class).parameters) - {"params", "lr", "momentum", "weight_decay"}
    taken -= {name for name, has in (("eps", info.has_eps), ("betas", info.has_betas)) if not has}
    for name in arguments:
        if name not in taken:
            raise UserError(
                f"--optimizer-args {config.optimizer_args}: {config.optimizer} does not take {name}; it takes "
                f"{', '.join(sorted(taken))}",
                on_all_ranks=True,
            )


def describe_optimizer(config: ResolvedConfig, global_batch_size: int) -> tuple[str, str]:
    """Where the settings that were not given are from, and a warning of an unusual rate; "" for nothing."""
    usual = usual_settings(config.optimizer)
    if usual is None:
        return "", ""
    names = [name for name in ("lr", "momentum", "weight_decay") if name not in config.given]
    chosen = [flag(name) for name in names if getattr(config, name) == getattr(usual, name)]
    reason = f"{', '.join(chosen)} for {config.optimizer}: {usual.source}" if chosen else ""
    return reason, _describe_rate(config, usual, global_batch_size)


def _describe_rate(config: ResolvedConfig, usual: OptimizerDefaults, global_batch_size: int) -> str:
    """A warning of a rate far from the usual one, in both ways in which it may be meant; "" for none.

    timm's and torchvision's commands give the rate of a step, which here is far too much for a large batch.
    """
    factor = lr_factor(config.lr_scaling, global_batch_size)
    expected = usual.lr * lr_factor(usual.scaling, global_batch_size)
    ratio = config.lr * factor / expected
    is_doubtful = {"lr"} == config.given & {"lr", "lr_scaling"} and factor >= MISREAD_FACTOR and ratio >= MISREAD
    if not (ratio >= FAR or is_doubtful or (ratio <= FAR_BELOW and config.pretrained is None)):
        return ""
    times = f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"
    found = f"{times} the usual {expected:.3g} of {config.optimizer}"
    if config.lr_scaling == "none" or factor == 1:
        return f"--lr {config.lr:g} is {found} for {count(global_batch_size, 'image')}"
    return (
        f"--lr {config.lr:g} is for {count(LR_BATCH, 'image')}, and {config.lr * factor:.3g} for the "
        f"{global_batch_size:,} of a step: {found}; if {config.lr:g} is the rate of a step, as in timm's and "
        "torchvision's commands, add "
        "--lr-scaling none"
    )


def peak_lr(config: ResolvedConfig, global_batch_size: int) -> float:
    """The rate in force after the warmup."""
    return config.lr * lr_factor(config.lr_scaling, global_batch_size)


def describe_lr(lr: float, scaling: Scaling, global_batch_size: int) -> str:
    """A rate in force, and what it is made of: `0.4 = 0.1 x 1024 / 256`, `0.002 = 0.001 x sqrt(1024 / 256)`."""
    ratio = f"{global_batch_size} / {LR_BATCH}"
    made_of = {"linear": f" = {lr:g} x {ratio}", "sqrt": f" = {lr:g} x sqrt({ratio})", "none": ""}
    return f"{lr * lr_factor(scaling, global_batch_size):g}{made_of[scaling]}"


def check_optimizer(name: str, world_size: int = 1) -> None:
    """Raise UserError, with the closest names, unless timm knows the optimizer and our step is enough for it."""
    known = timm.optim.list_optimizers()
    if name not in known:
        close = ", ".join(difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0))
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
    config: ResolvedConfig, model: nn.Module, global_batch_size: int, fused: bool | None = None
) -> Optimizer:
    """timm's optimizer over `parameter_groups`.

    Args:
        config: its rate, momentum, weight decay and arguments.
        model: on its device.
        global_batch_size: images in an optimizer step.
        fused: whether the update is one kernel, where the optimizer has one. By default on a GPU.

    Raises:
        UserError: the optimizer needs a package that is not there, or does not take this network or its arguments.
    """
    fused = next(model.parameters()).is_cuda if fused is None else fused
    groups, arguments = parameter_groups(config, model), optimizer_arguments(config)
    # SGD's first momentum is the whole gradient. A momentum of zeros (see _fill_momentum) would dampen it.
    fused = fused and has_fused(config.optimizer) and not arguments.get("dampening")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "It is highly recommended to have 'opt_einsum'", module="timm.optim.kron")
            optimizer: Optimizer = timm.optim.create_optimizer_v2(
                model,
                opt=config.optimizer,
                lr=peak_lr(config, global_batch_size),
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                param_group_fn=lambda _: groups,
                **({"fused": True} if fused else {}) | arguments,
            )
    except Exception as error:  # timm lists those of apex and bitsandbytes too, whether they are installed or not
        if arguments:
            raise UserError(
                f"--optimizer-args {config.optimizer_args}: {config.optimizer} cannot be made with it "
                f"({first_line(error, 200)}); correct it, or leave it out",
                on_all_ranks=True,
            ) from error
        raise UserError(
            f"--optimizer {config.optimizer}: is not available here ({first_line(error)}); give another"
        ) from error
    if fused and isinstance(optimizer, SGD):
        _fill_momentum(optimizer)
        optimizer.register_load_state_dict_post_hook(_fill_momentum)
    return optimizer


def parameter_groups(config: ResolvedConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Weights with and without weight decay, as timm divides them; with `--layer-decay` for each layer.

    The reasons are in docs/internals/decisions/0014. A group's rate is that of the schedule times its `lr_scale`.

    Raises:
        UserError: the head has a rate of its own, and there is no head.
    """
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    groups: list[dict[str, Any]]
    if config.layer_decay is None:
        groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=exempt)
    else:
        groups = param_groups_layer_decay(model, config.weight_decay, exempt, layer_decay=config.layer_decay)
    if config.head_lr_scale is None:
        return groups
    head = head_parameters(model, "--head-lr-scale")
    divided = []
    for group in groups:
        for is_head, scale in ((False, 1.0), (True, config.head_lr_scale)):
            found = [parameter for parameter in group["params"] if (parameter in head) == is_head]
            if found:
                divided.append(group | {"params": found, "lr_scale": group.get("lr_scale", 1.0) * scale})
    return divided


def learning_rate(optimizer: Optimizer) -> float:
    """The rate of the schedule, which each group multiplies by its `lr_scale`."""
    groups = optimizer.param_groups
    group = next((group for group in groups if group.get("lr_scale", 1.0) == 1.0), groups[0])
    return float(group["lr"] / group.get("lr_scale", 1.0))


def _fill_momentum(optimizer: Optimizer) -> None:
    """Give each parameter of SGD that has no momentum yet one of zeros, from which the first step is torch's own.

    torch's fused step would allocate it, and leave it uninitialized if fp16's scaler skips that step. Of the others
    with a fused step, Adam and AdamW, torch starts the state with zeros.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def has_fused(name: str) -> bool:
    """Whether torch has timm's optimizer `name` as one kernel, to which fp16 says on the device whether to skip."""
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
        return f"decay grows to {last:.5g} in the {count(total_steps, 'step')} of the run, too few for {ema.decay:g}"
    return f"decay grows to {ema.decay:g} in the first {count(round(9 / (1 - ema.decay)) - 8, 'step')}"
