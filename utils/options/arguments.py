"""Arguments of timm's networks and optimizers, as a flag gives them: `betas=[0.9,0.95],eps=1e-6`."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from utils.errors import UserError, first_line
from utils.options.config import TrainConfig

_COMMA = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")  # that begins another argument, unlike those within a list
_RATES = {"drop_rate": "--drop-rate", "drop_path_rate": "--drop-path"}
# Argument of a network -> the flag that sets it.
_MODEL_FLAGS = {
    **_RATES,
    "num_classes": "--num-classes",
    "pretrained": "--pretrained",
    "checkpoint_path": "--pretrained FILE",
    "img_size": "--image-size",
}
_OPTIMIZER_FLAGS = {
    "opt": "--optimizer",
    "lr": "--lr",
    "momentum": "--momentum",
    "weight_decay": "--weight-decay",
    "layer_decay": "--layer-decay",
}


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-6 as a number; YAML 1.1 wants 1.0e-6."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"), list("-+.0123456789")
)


def parse_arguments(flag: str, text: str | None, flags: Mapping[str, str]) -> dict[str, Any]:
    """`NAME=VALUE,...` -> values, read as YAML, by name; None or "" -> {}.

    Args:
        flag: for messages, as `--model-args`.
        flags: names that are refused, and the flags to give instead.

    Raises:
        UserError: another form, a name that is refused or given twice, or a value that is no YAML.
    """
    found: dict[str, Any] = {}
    for part in _COMMA.split(text) if text else ():
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value or not name.isidentifier():
            raise UserError(f"{flag} {text}: {part!r} is not NAME=VALUE; write it as a=1,b=[2,3]")
        if name in flags:
            raise UserError(f"{flag} {text}: {name} has a flag of its own; give {flags[name]}")
        if name in found:
            raise UserError(f"{flag} {text}: {name} is given twice; keep one")
        try:
            found[name] = yaml.load(value, Loader=_Loader)
        except Exception as error:  # PyYAML raises what its constructors meet
            raise UserError(f"{flag} {text}: {value!r} is not YAML ({first_line(error)}); write a=1,b=[2,3]") from None
    return found


def model_arguments(config: TrainConfig) -> dict[str, Any]:
    """`--model-args`: arguments for `timm.create_model`.

    Raises:
        UserError: it cannot be read, names what another flag sets, or wants other channels than images have.
    """
    found = parse_arguments("--model-args", config.model_args, _MODEL_FLAGS)
    if found.get("in_chans", 3) != 3:
        raise UserError(
            f"--model-args in_chans={found['in_chans']}: images have 3 channels of 8 bits, gray ones three equal ones, "
            "which a network reads as it reads one; leave it out (docs/own-data.md, gray images)"
        )
    return found


def format_model_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Undo of `model_arguments`, without what other flags set; None for nothing."""
    shown = {name: json.dumps(value) for name, value in arguments.items() if name not in _MODEL_FLAGS}
    return ",".join(f"{name}={value}" for name, value in shown.items()) or None


def model_options(config: TrainConfig) -> dict[str, Any]:
    """`model_arguments`, with `--drop-rate` and `--drop-path` where they are given."""
    rates = {"drop_rate": config.drop_rate, "drop_path_rate": config.drop_path}
    return model_arguments(config) | {name: rate for name, rate in rates.items() if rate is not None}


def refused_model_option(arch: str, options: Mapping[str, Any], error: Exception) -> UserError | None:
    """What timm's `error` means for the user, if the `options` of `model_options` may be its cause; else None."""
    name = unexpected_argument(error)
    if name in options:
        flag = _RATES.get(name, f"--model-args {name}=")
        value = f" {options[name]}" if name in _RATES else options[name]
        return UserError(f"{flag}{value}: {arch} does not take {name}; leave it out")
    given = ",".join(f"{name}={value}" for name, value in options.items() if name not in _RATES)
    if not given:
        return None
    return UserError(f"--model-args {given}: timm cannot build {arch} with it ({first_line(error, 200)}); correct it")


def optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """`--optimizer-args`: arguments for `timm.optim.create_optimizer_v2`.

    Raises:
        UserError: it cannot be read, or names what another flag sets.
    """
    return parse_arguments("--optimizer-args", config.optimizer_args, _OPTIMIZER_FLAGS)


def unexpected_argument(error: Exception) -> str:
    """Name of the argument that a function does not take, by the error of its call; "" for another error."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    return found[1] if found else ""
