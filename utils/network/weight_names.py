"""Which weights in a file are those of a network, whatever wraps their names."""

import dataclasses
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import timm
import timm.models
from torch import Tensor, nn

from utils.errors import UserError
from utils.network.head import head_tensors
from utils.network.weight_files import StateDict, Weights

# What torch writes into names, at any place: torch.compile, FSDP, checkpointing of activations.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_COUNTER = ".num_batches_tracked"  # of batch norm, which its default momentum does not use
_AVERAGES = {"ema", "teacher", "averaged", "swa", "shadow"}  # words in the key or prefix of a moving average
# Functions in timm's modules that give the weights of a network's authors timm's names.
_FILTERS = ("checkpoint_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")
_SHARD = re.compile(r"-\d+-of-\d+\.")


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Weights under one prefix of one state_dict in a file.

    Attributes:
        key: of the state_dict.
        prefix: that was taken off the names.
        tensors: by the names that are left; heads and layers of others may be among them.
        converted: whether timm has given them its names.
    """

    key: str
    prefix: str
    tensors: StateDict
    converted: bool = False

    @property
    def is_average(self) -> bool:
        return not _AVERAGES.isdisjoint(re.split(r"[._]", f"{self.key}.{self.prefix}".lower()))


class _Wanted:
    """The weights of a network, and what is wrong with others.

    Args:
        model: the network.
        num_classes: its outputs.
    """

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        self.model, self.head = model, head_tensors(model, num_classes)
        self.shapes = {name: value.shape for name, value in model.state_dict().items()}
        self.body = [name for name in self.shapes if name not in self.head and not name.endswith(_COUNTER)]
        modules = (self.shapes, dict(model.named_children()))  # an nn.Identity has no weights
        self.parts = {name.partition(".")[0] for names in modules for name in names}
        self.head_parts = {name.rpartition(".")[0] + "." for name in self.head}

    def absent(self, tensors: StateDict) -> list[str]:
        """Weights of the network that are not there, but for those of the head."""
        return [name for name in self.body if name not in tensors]

    def misshapen(self, tensors: StateDict) -> list[str]:
        """Weights of another shape; of the head, whatever its number of classes."""
        skipped = {name: int(name in self.head) for name in self.shapes if name in tensors}
        return [name for name, skip in skipped.items() if tensors[name].shape[skip:] != self.shapes[name][skip:]]

    def unknown(self, tensors: StateDict) -> list[str]:
        """Weights that the network does not have in a part that it has: those of a larger network."""
        names = [name for name in self.foreign(tensors) if name.partition(".")[0] in self.parts]
        return [name for name in names if not name.startswith(tuple(self.head_parts))]

    def foreign(self, tensors: StateDict) -> list[str]:
        """Weights that the network does not have. A number alone is a counter."""
        return [name for name, value in tensors.items() if name not in self.shapes and value.ndim]

    def fits(self, tensors: StateDict) -> bool:
        return not (self.absent(tensors) or self.misshapen(tensors) or self.unknown(tensors))


def match_weights(weights: Weights, model: nn.Module, arch: str, num_classes: int, ema: bool | None) -> Weights:
    """`weights` with the tensors of one network by timm's names, in the shapes of `model` but for the head.

    The prefix under which the file has all weights of the network is taken off, such as `module.` or `backbone.`. Where
    no names fit, timm converts those of the network's authors.

    Args:
        weights: as read from a file.
        model: that is to take them.
        arch: its name.
        num_classes: outputs of `model`.
        ema: whether to take the moving average; None takes it if there is one.

    Raises:
        UserError: they are another architecture's, do not fit, or have no moving average where that is wanted.
    """
    if weights.arch is not None and current_name(weights.arch) != current_name(arch):
        raise UserError(
            f"--arch {arch}: {weights.source} holds {weights.arch}, another architecture; give --arch {weights.arch}"
        )
    wanted = _Wanted(model, num_classes)
    near = [found for key, tensors in weights.networks.items() for found in _prefixes(key, tensors, wanted.body)]
    found = [each for each in near if wanted.fits(each.tensors)]
    found = found or [each for each in _converted(weights, arch, wanted) if wanted.fits(each.tensors)]
    if not found:
        raise UserError(_describe_misfit(weights, arch, wanted, near))
    averages = [each for each in found if each.is_average]
    others = [each for each in found if not each.is_average]
    if ema and not averages:
        raise UserError(f"--pretrained-ema: {weights.source} has no EMA weights; leave --pretrained-ema out")
    if ema is False and not others:
        raise UserError(f"--no-pretrained-ema: {weights.source} has only EMA weights; leave --no-pretrained-ema out")
    candidates = averages if averages and ema is not False else others
    chosen = candidates[0]
    return dataclasses.replace(
        weights,
        tensors={name: value for name, value in chosen.tensors.items() if name in wanted.shapes},
        kind="EMA weights" if chosen.is_average else "weights",
        taken="" if weights.settings else _describe(chosen, len(candidates), wanted),
    )


def current_name(arch: str) -> str:
    """timm's name of today for an architecture, without the tag of its pretrained weights."""
    name = arch.partition(".")[0]
    return (timm.models.get_deprecated_models().get(name) or name).partition(".")[0]


def _prefixes(key: str, tensors: StateDict, body: Sequence[str]) -> Iterator[_Candidate]:
    """The weights under each prefix with as many weights of the network as any, in the order of the file."""
    named = {_WRAPPERS.sub("", name): value for name, value in tensors.items()}
    wanted, counts = set(body), Counter[str]()
    for name in named:
        ends = [0, *(match.end() for match in re.finditer(r"\.", name))]
        counts.update(name[:end] for end in ends if name[end:] in wanted)
    most = max(counts.values(), default=0)
    for prefix in (prefix for prefix, count in counts.items() if count == most):
        yield _Candidate(
            key, prefix, {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}
        )


def _converted(weights: Weights, arch: str, wanted: _Wanted) -> Iterator[_Candidate]:
    """The weights under timm's names, where timm converts those of the network's authors."""
    module = sys.modules[timm.models.model_entrypoint(current_name(arch)).__module__]
    functions = [getattr(module, name) for name in _FILTERS if hasattr(module, name)]
    for key, tensors in weights.networks.items() if functions else ():
        if len(tensors) < len(wanted.body) / 2:  # no network; a fused layer has fewer weights
            continue
        beginning = _common_prefix(list(tensors))
        plain = {_WRAPPERS.sub("", name.removeprefix(beginning)): value for name, value in tensors.items()}
        try:
            converted = _call(functions[0], plain, wanted.model)
        except Exception:  # a filter meets names and shapes of another network
            continue
        for found in _prefixes(key, converted, wanted.body):
            yield dataclasses.replace(found, prefix=beginning + found.prefix, converted=True)


def _call(function: Callable[..., Any], tensors: StateDict, model: nn.Module) -> StateDict:
    """timm's filter, as its builders call it; those of DeiT III's layers name an argument of one that others share."""
    taken = inspect.signature(function).parameters
    options = {"adapt_layer_scale": True} if "adapt_layer_scale" in taken else {}
    result = function(tensors, model, **options) if "model" in taken else function(tensors)
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def _common_prefix(names: Sequence[str]) -> str:
    """The longest beginning of all names that ends with a point."""
    first, last = min(names), max(names)
    length = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[: first.rfind(".", 0, length) + 1]


def _describe(found: _Candidate, count: int, wanted: _Wanted) -> str:
    """Where in the file the weights lie and what stays there: " (key model, prefix module.)"."""
    words = [f"{name} {text}" for name, text in (("key", found.key), ("prefix", found.prefix)) if text]
    words += [f"the first of {count}"] if count > 1 else []
    words += ["converted by timm"] if found.converted else []
    left = list(dict.fromkeys(name.partition(".")[0] for name in wanted.foreign(found.tensors)))
    left = [part for part in left if part not in wanted.parts]
    words += [f"without {_listed(left)}"] if left else []
    return f" ({', '.join(words)})" if words else ""


def _listed(names: Sequence[str]) -> str:
    """Up to three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe_misfit(weights: Weights, arch: str, wanted: _Wanted, near: Sequence[_Candidate]) -> str:
    """Why nothing in the file fits, by what fits best."""
    start, remedy = f"{weights.option} {weights.source}:", "give another file"
    if weights.option == "--pretrained":
        arch, remedy = f"--arch {arch}", "give the architecture of these weights"
    if weights.program:
        remedy = f"config.json names {weights.program}, whose names are not timm's: give timm's weights"
    if _SHARD.search(weights.source):
        remedy = "it is one of several files: give their folder, or index.json"
    if weights.model_args:
        remedy = f"they are of a network with --model-args {weights.model_args}: give that"
    if not near:
        names = [name for tensors in weights.networks.values() for name in tensors]
        held = f"holds {_listed(names)}" if names else "holds no weights by name"
        return f"{start} does not fit {arch} ({held}; the network has {_listed(wanted.body)}); {remedy}"
    best = max(near, key=lambda each: -len(wanted.absent(each.tensors)))
    parts = (
        (wanted.absent(best.tensors), "missing"),
        (wanted.unknown(best.tensors), "unknown"),
        (wanted.misshapen(best.tensors), "of another shape"),
    )
    told = "; ".join(
        f"{len(names):,} {'weight' if len(names) == 1 else 'weights'} {what}, {'first: ' if len(names) > 1 else ''}"
        f"{names[0]}"
        for names, what in parts
        if names
    )
    under = _describe(best, 1, wanted)
    return f"{start} does not fit {arch}{under}: {told}; {remedy}"
