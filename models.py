"""Architecture name -> nn.Module: every timm model, its head sized from the data, in channels_last memory."""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from torch import nn

from utils.distributed.collective import collective
from utils.distributed.collectives import sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError, first_line
from utils.network.convolutions import prepare_depthwise
from utils.network.fused_layers import swap_fused_layers
from utils.network.head import head_tensors
from utils.network.published_weights import published_weights
from utils.network.variants import prepare_training
from utils.network.weight_files import Normalization, Weights, read_weights
from utils.network.weight_names import match_weights
from utils.options.arguments import model_options, refused_model_option
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import ImageSize, timm_size
from utils.text import count, describe_alike


def check_arch(arch: str, option: str = "--arch") -> None:
    """Raise UserError, with the closest names, unless timm knows the architecture that the flag `option` names."""
    name, _, tag = arch.partition(".")  # timm writes pretrained variants as arch.tag
    if not timm.is_model(name):
        close = ", ".join(difflib.get_close_matches(name.lower(), timm.list_models(), n=3, cutoff=0.0))
        raise UserError(f"{option} {arch}: unknown to timm; the closest are {close}")
    variants = timm.list_pretrained(f"{name}.*")
    if tag and arch not in variants:
        close = ", ".join(difflib.get_close_matches(arch, variants, n=3, cutoff=0.0)) or f"{name} alone"
        raise UserError(f"{option} {arch}: timm has no such pretrained variant; the closest are {close}")


class HeadChoice(NamedTuple):
    """Whether the head of pretrained weights is kept, and why, as text for the user."""

    keep: bool
    reason: str


def create_model(
    arch: str,
    num_classes: int,
    pretrained: bool = False,
    image_size: ImageSize = 224,
    options: Mapping[str, Any] | None = None,
    option: str = "--arch",
) -> nn.Module:
    """Build a network.

    Args:
        arch: timm name, optionally with a pretrained tag (`resnet50.a1_in1k`).
        num_classes: outputs of the head.
        pretrained: whether to load timm's published weights; the head is random if its shape differs.
        image_size: of the input, for networks that are built for one size (vision transformers).
        options: more arguments of timm; see `model_options`.
        option: the flag that names it, for messages.

    Raises:
        UserError: unknown name, weights that are not available, or a size or an option that the network rejects.
    """
    check_arch(arch, option)
    options = options or {}
    try:
        with warnings.catch_warnings():  # another name for the same network is no concern of the user's
            warnings.filterwarnings("ignore", "Mapping deprecated model name", module=r"timm\.models")
            arguments = create_model_arguments(arch, num_classes, image_size, options)
            model: nn.Module = timm.create_model(**arguments, pretrained=pretrained)
    except Exception as error:
        if refusal := refused_model_option(arch, options, error):
            raise refusal from error
        reason = first_line(error, 200)
        if pretrained:
            of_weights = "--pretrained" if option == "--arch" else option
            raise UserError(
                f"{of_weights}: timm's weights for {arch} are not available ({reason}); give a local file"
            ) from error
        raise UserError(f"{option} {arch}: timm cannot build it at --image-size {image_size} ({reason})") from error
    return model.to(memory_format=torch.channels_last)


def create_model_arguments(
    arch: str, num_classes: int, image_size: ImageSize, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What `timm.create_model` takes for a network, as of `create_model`; all of it, so that others can build it."""
    sized = timm.get_pretrained_cfg(arch)
    size = {"img_size": timm_size(image_size)} if sized is not None and sized.fixed_input_size else {}
    return {"model_name": arch, "num_classes": num_classes, **size, **options}


def load_weights(model: nn.Module, weights: Weights, num_classes: int, keep_head: bool) -> None:
    """Put the tensors of `weights`, as `match_weights` gives them, into `model`, but for the head unless `keep_head`.

    Counters of batch norm that the weights lack stay at 0.
    """
    assert weights.tensors is not None
    skipped = () if keep_head else head_tensors(model, num_classes)
    tensors = {name: value for name, value in weights.tensors.items() if name not in skipped}
    model.load_state_dict(tensors, strict=False)


def choose_head(
    weights: Weights, model: nn.Module, num_classes: int, classes: Sequence[str], choice: str
) -> HeadChoice:
    """Whether a run on other data keeps the head of pretrained weights.

    Args:
        weights: where it comes from.
        model: that is to take them.
        num_classes: outputs of `model`.
        classes: names of the data's classes in label order.
        choice: auto keeps it for the same classes, and for as many where the weights do not name theirs; keep; new.

    Raises:
        UserError: a head of another size is to be kept.
    """
    outputs = num_outputs(weights, model, num_classes)
    if outputs != num_classes:
        if choice == "keep":
            held = "there is no head in" if outputs is None else f"a head of {count(outputs, 'class')} is in"
            raise UserError(
                f"--pretrained-head keep: {held} {weights.source}, the run has {count(num_classes, 'class')}; leave it "
                "out"
            )
        had = "no head in the file" if outputs is None else f"{count(num_classes, 'class')} instead of {outputs:,}"
        return HeadChoice(False, f"new ({had})")
    if choice != "auto":
        return HeadChoice(choice == "keep", f"{'kept' if choice == 'keep' else 'new'} (--pretrained-head {choice})")
    if weights.classes is None:
        return HeadChoice(True, f"kept ({count(num_classes, 'class')}, which the file does not name)")
    if weights.classes == tuple(classes):
        return HeadChoice(True, f"kept (the same {count(len(classes), 'class')})")
    alike = describe_alike(classes, weights.classes)
    return HeadChoice(False, f"new (other class names{alike and f': {alike}'}; --pretrained-head keep keeps it)")


def check_head(weights: Weights, model: nn.Module, num_classes: int, classes: Sequence[str]) -> str:
    """Note on what an evaluation of pretrained weights cannot know of their classes; "" for none.

    Raises:
        UserError: the head is of other classes than the data.
    """
    outputs = num_outputs(weights, model, num_classes)
    if outputs != num_classes:
        held = "no head" if outputs is None else f"a head of {count(outputs, 'class')}"
        raise UserError(
            f"--evaluate --pretrained: {weights.source} has {held}, the data {count(num_classes, 'class')}; give the "
            "data set that it was trained on, or --resume PATH of a run on this one"
        )
    if weights.classes == tuple(classes):
        return ""
    if weights.classes is not None and weights.tensors is not None:
        raise UserError(
            f"--evaluate --pretrained: the classes of {weights.source} are not those of the data, labels would mean "
            f"something else; {describe_alike(classes, weights.classes) or 'give the data set that it was trained on'}"
        )
    return f"the class names of {weights.source} are not known to be those of the data; labels must be in its order"


def base_arch(arch: str) -> str:
    """An architecture's name without the tag of its pretrained weights."""
    return arch.partition(".")[0]


def num_outputs(weights: Weights, model: nn.Module, num_classes: int) -> int | None:
    """Classes that the head of `weights` has; None if there is no head."""
    if weights.tensors is None:
        settings: Any = model.pretrained_cfg
        return int(settings["num_classes"])
    names = head_tensors(model, num_classes)
    if not names or any(name not in weights.tensors for name in names):
        return None
    return len(weights.tensors[names[-1]])


def normalization(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of images in [0, 1], that the network's weights were made for."""
    settings: Any = model.pretrained_cfg
    return tuple(settings["mean"]), tuple(settings["std"])


class Network(NamedTuple):
    """A network and what is known of its start.

    Attributes:
        model: on its device.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        origin: where its weights are from, for the user.
        note: what an evaluation of these weights cannot know; mostly "".
    """

    model: nn.Module
    normalization: Normalization
    origin: str
    note: str = ""


@collective
def create_network(
    config: ResolvedConfig, env: DistEnv, classes: Sequence[str], saved: Normalization | None = None
) -> Network:
    """The network on its device, with the weights of `--pretrained` if the run begins.

    Args:
        classes: names in label order.
        saved: normalization of the checkpoint that a run goes on from, whose weights come later.

    Raises:
        UserError: on all ranks: no such weights, or a network that does not take such images.
    """
    with sync_errors(env):  # weights may be missing on one machine
        options = model_options(config)
        model = create_model(config.arch, config.num_classes, image_size=config.image_size, options=options)
        network = Network(model, normalization(model), "from scratch")
        if config.pretrained is not None and saved is None:
            network = load_pretrained(config, model, classes)
        shapes = prepare_training(network.model, config, env.world_size)
    if saved is not None:
        network = network._replace(normalization=saved)
    network.model.to(env.device)
    if config.fused_layers:
        swap_fused_layers(network.model)
    prepare_depthwise(shapes, config, env)
    return network


def load_pretrained(config: ResolvedConfig, model: nn.Module, classes: Sequence[str]) -> Network:
    """`model`, or another one like it, with the weights of `--pretrained`."""
    assert config.pretrained is not None
    published = config.pretrained == "timm"
    if published:
        weights = published_weights(config.arch)
    else:
        file = read_weights(Path(config.pretrained))
        weights = match_weights(file, model, config.arch, config.num_classes, config.pretrained_ema)
    origin, note, keep_head = f"{weights.kind} of {weights.source}{weights.taken}", "", True
    if config.evaluate:
        note = check_head(weights, model, config.num_classes, classes)
    else:
        head = choose_head(weights, model, config.num_classes, classes, config.pretrained_head)
        origin, keep_head = f"{origin}, head {head.reason}", head.keep
    if not published:
        load_weights(model, weights, config.num_classes, keep_head)
        return Network(model, weights.normalization or normalization(model), origin, note)
    model = create_model(config.arch, config.num_classes, True, config.image_size, model_options(config))
    if not keep_head:
        cast(Any, model).reset_classifier(config.num_classes)
    return Network(model, normalization(model), origin, note)
