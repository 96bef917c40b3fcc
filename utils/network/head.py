"""The head of a network: the layers that timm calls its classifier."""

from typing import Any, cast

from torch import nn

from utils.errors import UserError


def head_modules(model: nn.Module) -> list[nn.Module]:
    """The layers of the head, of a distilled network two; [] where timm names none."""
    found = cast(Any, model).get_classifier() if hasattr(model, "get_classifier") else ()
    layers = found if isinstance(found, tuple | list) else (found,)
    return [layer for layer in layers if isinstance(layer, nn.Module)]


def head_parameters(model: nn.Module, flag: str) -> set[nn.Parameter]:
    """The weights of the head.

    Args:
        model: a network.
        flag: that needs them, for messages.

    Raises:
        UserError: there are none.
    """
    found = {parameter for layer in head_modules(model) for parameter in layer.parameters()}
    if not found:
        raise UserError(
            f"{flag}: timm names no head of this architecture; leave it out, or give another --arch", on_all_ranks=True
        )
    return found


def head_tensors(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the weights that have an entry for each class; [] where timm names no head."""
    settings: Any = model.pretrained_cfg
    names = settings.get("classifier") or ()
    prefixes = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    values = model.state_dict().items()
    return [name for name, value in values if name.startswith(prefixes) and value.shape[:1] == (num_classes,)]
