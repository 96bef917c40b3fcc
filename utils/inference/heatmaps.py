"""Heat maps: where in an image a network sees a class, by Grad-CAM (arXiv:1610.02391), which captum computes.

For the few images of a report and of `scripts/predict.py --heatmap`, after training.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from models import create_model
from utils.errors import UserError, first_line
from utils.inference.predictions import require_captum
from utils.network.augment import Normalize
from utils.network.weight_files import Normalization
from utils.options.arguments import model_options
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of

COLORS, OPACITY = "viridis", 0.7  # readable without a sense of red and green; opacity where the map is 1
MAX_PREFIX = 16  # class and register tokens before the patches


class MapNetwork(nn.Module):
    """A timm network, the features of one layer of which go through `map` as (N, channels, height, width).

    Args:
        model: whose `forward` is its `forward_features` and its `forward_head`, as in all of timm.
        layer: name of a module of it; "" for what `forward_features` gives.

    Attributes:
        map: an identity, for hooks.
    """

    def __init__(self, model: nn.Module, layer: str = "") -> None:
        super().__init__()
        self.model, self.layer, self.map = model, layer, nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        model = cast(Any, self.model)
        logits: Tensor = model.forward_head(self._features(images))
        return logits

    def pooled(self, images: Tensor) -> Tensor:
        """What the last layer of the head gets."""
        model = cast(Any, self.model)
        found: Tensor = model.forward_head(self._features(images), pre_logits=True)
        return found

    def _features(self, images: Tensor) -> Any:
        model, size = cast(Any, self.model), (images.shape[2], images.shape[3])
        if not self.layer:
            return self._through_map(model.forward_features(images), size)
        module = model.get_submodule(self.layer)
        handle = module.register_forward_hook(lambda module, inputs, output: self._through_map(output, size))
        try:
            return model.forward_features(images)
        finally:
            handle.remove()

    def _through_map(self, features: Any, size: tuple[int, int]) -> Tensor:
        """The same features, which have gone through `map`.

        Raises:
            ValueError: they have no places in the image.
        """
        if not isinstance(features, Tensor):
            raise ValueError("features of several layers at once")
        if features.dim() == 4:
            if not _is_channels_last(self.model, features):
                return cast(Tensor, self.map(features))
            return cast(Tensor, self.map(features.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        if features.dim() != 3:
            raise ValueError(f"features of shape {tuple(features.shape[1:])}")
        height, width = find_grid(features.shape[1], size, getattr(self.model, "num_prefix_tokens", None) or 0)
        prefix, patches = features.tensor_split([features.shape[1] - height * width], dim=1)
        mapped = self.map(patches.transpose(1, 2).reshape(len(patches), -1, height, width))
        return torch.cat([prefix, mapped.flatten(2).transpose(1, 2)], dim=1)


def _is_channels_last(model: nn.Module, features: Tensor) -> bool:
    """Whether features (N, a, b, c) are (N, height, width, channels)."""
    channels = getattr(model, "num_features", None)
    if features.shape[1] != channels == features.shape[3]:
        return True
    return getattr(model, "output_fmt", "NCHW") == "NHWC" and features.shape[1] != channels


def find_grid(tokens: int, size: tuple[int, int], prefix: int) -> tuple[int, int]:
    """Height and width of the grid of patches among tokens.

    Args:
        tokens: patches, and what comes before them.
        size: height and width of the image; the grid has its proportions.
        prefix: tokens before the patches, where that fits. Some networks add them later, or do not say how many.

    Raises:
        ValueError: there is none.
    """
    for before in (prefix, *range(MAX_PREFIX + 1)):
        patches = tokens - before
        height = round(math.sqrt(max(patches, 0) * size[0] / size[1]))
        if height > 0 and patches % height == 0 and round(height * size[1] / size[0]) == patches // height:
            return height, patches // height
    raise ValueError(f"{tokens:,} tokens, which are no grid")


class HeatMaps:
    """Heat maps of one network, in float32, one image after the other: the same for all batches and processes.

    Args:
        weights: state dict of the network.
        config: of the network.
        normalization: see `Normalize`.
        device: where to compute.

    Attributes:
        grid: height and width of a map before it is enlarged.

    Raises:
        UserError: captum is not installed, or no layer of the network has a map.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: ResolvedConfig,
        normalization: Normalization,
        device: torch.device,
    ) -> None:
        require_captum()
        # A network of its own, of timm's layers: that of a run may be fused, and has gradients of all its weights.
        options = model_options(config)
        plain = create_model(config.arch, config.num_classes, image_size=config.image_size, options=options)
        plain.load_state_dict(weights)
        plain.to(device).eval().requires_grad_(False)  # no activations are kept before the layer of the map
        self._normalize = Normalize(*normalization, dtype=torch.float32, device=device)
        self._device = device
        self._network, self.grid = find_map(plain, sides_of(config.val_image_size), config.arch)

    @property
    def layer(self) -> str:
        """Name of the layer; "" for what `forward_features` gives."""
        return self._network.layer

    def compute(self, image: Tensor, label: int) -> Tensor:
        """float32 (height, width) on the CPU, 0 to 1: what speaks for the class `label`, in parts of the largest value.

        All 0 where nothing speaks for it.

        Args:
            image: uint8 (3, height, width), as the network sees it.
            label: of the class.
        """
        from captum.attr import LayerAttribution, LayerGradCam

        with torch.inference_mode(False):
            pixels = self._normalize(image[None].to(self._device))
            found = LayerGradCam(self._network, self._network.map).attribute(pixels, label, relu_attributions=True)
            enlarged = LayerAttribution.interpolate(found.detach(), tuple(image.shape[1:]), "bilinear")[0, 0].cpu()
        heat: Tensor = enlarged / enlarged.max().clamp(min=torch.finfo(torch.float32).tiny)
        return heat.nan_to_num(nan=0.0)  # of a network that has diverged

    def draw(self, image: Tensor, label: int) -> Image.Image:
        """The image with the map of `compute` on it."""
        return overlay(image, self.compute(image, label))


def find_map(model: nn.Module, size: tuple[int, int], arch: str) -> tuple[MapNetwork, tuple[int, int]]:
    """A network, and the grid of the last of its layers with more than one place on which its answer depends.

    That is the output of `forward_features`, where the head pools it. Where the head takes a class token, patches of
    the last block count for nothing: it is the block's first norm, whose patches the class token attends to.

    Args:
        model: in evaluation mode, without gradients.
        size: height and width of its images.
        arch: its name, for the message.

    Raises:
        UserError: there is no such layer.
    """
    device = next(model.parameters()).device
    images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.inference_mode(False), torch.enable_grad():
        for layer in _layers(model):
            network = MapNetwork(model, layer)
            try:
                features = _used_features(network, images)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # networks have no common one, for features that are no map
                continue
            if features is not None:
                return network, (features.shape[2], features.shape[3])
    raise UserError(
        f"{arch} has no heat maps at {size[0]} x {size[1]} px: no layer has places on which the answer depends"
    )


def _layers(model: nn.Module) -> Iterator[str]:
    """Names of layers that may have a map, the last one first."""
    yield ""
    for stage in reversed(list(getattr(model, "feature_info", None) or [])):
        yield from (name for name in (stage["module"], f"{stage['module']}.norm1") if _has_module(model, name))


def _has_module(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _used_features(network: MapNetwork, images: Tensor) -> Tensor | None:
    """The features of a map, (1, channels, height, width); None if they are of one place, or change nothing."""
    seen: list[Tensor] = []

    def watch(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        seen.append(output.clone().requires_grad_())
        return seen[-1].clone()  # which a layer may change in place

    handle = network.map.register_forward_hook(watch)
    try:
        pooled = network.pooled(images)  # not the logits: a head may begin with zeros
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].shape[2] * seen[0].shape[3] < 2:
        return None
    # Random signs: the sum of what a norm gives does not depend on its input.
    signs = torch.rand(pooled.shape, generator=torch.Generator().manual_seed(0)).to(pooled.device) - 0.5
    (gradient,) = torch.autograd.grad((pooled * signs).sum(), seen[0], allow_unused=True)
    return seen[0] if gradient is not None and bool(gradient.any()) else None


def overlay(image: Tensor, heat: Tensor) -> Image.Image:
    """An image with its map on it: the more speaks for the class, the less is left of the image.

    Args:
        image: uint8 (3, height, width).
        heat: float32 (height, width), 0 to 1, on the CPU.
    """
    import matplotlib

    colors = torch.from_numpy(matplotlib.colormaps[COLORS](heat.numpy())[..., :3]).float() * 255
    opacity = OPACITY * heat[..., None]
    mixed = image.cpu().permute(1, 2, 0) * (1 - opacity) + colors * opacity
    return Image.fromarray(mixed.round().byte().numpy())


def draw_heatmaps(
    images: Sequence[tuple[Tensor, Sequence[int]]], create: Callable[[], HeatMaps]
) -> tuple[list[list[Image.Image]], str]:
    """Each image with the maps of its labels on it, and why there are none; "" if there are.

    Args:
        images: uint8 (3, height, width), and labels.
        create: makes the maps.
    """
    try:
        maps = create()
        return [[maps.draw(image, label) for label in labels] for image, labels in images], ""
    except Exception as error:  # nothing of this is worth the report of a run
        return [[] for _ in images], first_line(error, 200)
