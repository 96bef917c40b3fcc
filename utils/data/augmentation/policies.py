"""The policies of `utils.options.policies`: for Pillow's images, and the same made of DALI's operators.

Both draw the same operations with the same probabilities, magnitudes and signs (docs/internals/decisions/0012 and
0030). Shear, shift and rotation interpolate bilinearly and fill with black. Shear fixes the upper left corner, rotation
the center. All but 3-Augment are torchvision's. With noise each operation of RandAugment has a magnitude of its own, a
normal number rounded to a bin.
"""

import math
import warnings
from typing import Any

import numpy as np
import nvidia.dali as dali
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.auto_aug import augmentations as ops
from nvidia.dali.auto_aug import auto_augment, core, rand_augment, trivial_augment
from nvidia.dali.auto_aug.core import _Augmentation, augmentation, select, signed_bin
from PIL import Image, ImageFilter
from torchvision.transforms import v2

from utils.options.policies import POLICIES, Policy
from utils.options.resolved import ResolvedConfig
from utils.options.sizes import sides_of

SOLARIZE, BLUR = 128, (0.1, 2.0)  # of 3-Augment: least value that is inverted, sigma in pixels
# Of AutoAugment: (operation, probability, magnitude). Where it has one operation, the paper's other has probability 0.
IMAGENET: tuple[tuple[tuple[str, float, int | None], ...], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("auto_contrast", 0.6, None)),
    (("equalize", 0.8, None), ("equalize", 0.6, None)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, None), ("solarize", 0.2, 4)),
    (("equalize", 0.4, None), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, None)),
    (("posterize", 0.8, 5), ("equalize", 1.0, None)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, None), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, None)),
    (("equalize", 0.8, None),),
    (("invert", 0.6, None), ("equalize", 1.0, None)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, None)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, None)),
    (("color", 0.4, 0), ("equalize", 0.6, None)),
    (("equalize", 0.4, None), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("auto_contrast", 0.6, None)),
    (("invert", 0.6, None), ("equalize", 1.0, None)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, None), ("equalize", 0.6, None)),
)
RATIO = (3 / 4, 4 / 3)  # aspect of a random crop, torchvision's and Inception's (arXiv:1409.4842)


def torchvision_policy(config: ResolvedConfig) -> torch.nn.Module:
    """A transform of a PIL image: `config.augment`, one of those above."""
    options: dict[str, Any] = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": 0}
    policy = POLICIES[config.augment]
    transform: torch.nn.Module
    if policy.draw == "pairs":
        transform = v2.AutoAugment(**options)
    elif policy.draw == "several" and config.randaugment_std:
        transform = _NoisyRandAugment(config, _bins(policy), options)
    elif policy.draw == "several":
        transform = v2.RandAugment(config.randaugment_ops, config.randaugment_magnitude, _bins(policy), **options)
    elif policy.draw == "one":
        transform = v2.TrivialAugmentWide(_bins(policy), **options)
    else:
        transform = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(SOLARIZE, p=1), _GaussianBlur()])
    return transform


def _bins(policy: Policy) -> int:
    assert policy.ranges is not None, "only called where there are magnitudes"
    return policy.ranges.bins


class _NoisyRandAugment(torch.nn.Module):
    """torchvision's RandAugment, whose every operation has a normally distributed magnitude, as timm's `mstd`."""

    def __init__(self, config: ResolvedConfig, bins: int, options: dict[str, Any]) -> None:
        super().__init__()
        self._count = config.randaugment_ops
        self._mean, self._std = float(config.randaugment_magnitude), config.randaugment_std
        self._by_bin = [v2.RandAugment(1, number, bins, **options) for number in range(bins)]

    def forward(self, image: Image.Image) -> Image.Image:
        for _ in range(self._count):
            drawn = min(max(float(torch.normal(self._mean, self._std, ())), 0), len(self._by_bin) - 1)
            image = self._by_bin[math.floor(drawn + 0.5)](image)
        return image


class _GaussianBlur(torch.nn.Module):
    """Pillow's Gaussian blur, as 3-Augment's own and timm's."""

    def forward(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*BLUR))))


def apply_policy(images: Any, config: ResolvedConfig) -> Any:
    """DALI's: uint8 HWC images of image_size, of a pipeline with conditionals; "none" returns them."""
    # DALI's operations use operators that DALI deprecates, and its warnings override every filter.
    with warnings.catch_warnings(record=True):
        return _apply_policy(images, config)


def _apply_policy(images: Any, config: ResolvedConfig) -> Any:
    # No seed: DALI would then draw operation and magnitude from one number.
    options = {"fill_value": 0, "interp_type": types.INTERP_LINEAR}
    policy = POLICIES[config.augment]
    if policy.draw == "none":
        return images
    if policy.draw == "kinds":
        kind = fn.random.uniform(values=[0, 1, 2], dtype=types.INT32)
        sigma = fn.random.uniform(range=list(BLUR))
        return select([_grayscale, _solarize, _blur], kind, images, sigma)
    suite, bins = operations(policy, min(sides_of(config.image_size))), _bins(policy)
    if policy.draw == "pairs":
        return auto_augment.apply_auto_augment(_imagenet_policy(suite, bins), images, **options)
    drawn = list(suite.values())
    if policy.draw == "one":
        return trivial_augment.apply_trivial_augment(drawn, images, bins, **options)
    if config.randaugment_std > 0:
        return _noisy_rand_augment(drawn, images, config, bins, options)
    count, magnitude = config.randaugment_ops, config.randaugment_magnitude
    return rand_augment.apply_rand_augment(drawn, images, count, magnitude, bins, **options)


def _noisy_rand_augment(
    suite: list[Any], images: Any, config: ResolvedConfig, bins: int, options: dict[str, Any]
) -> Any:
    mean, std = float(config.randaugment_magnitude), config.randaugment_std
    for _ in range(config.randaugment_ops):
        drawn = dali.math.clamp(fn.random.normal(mean=mean, stddev=std), 0.0, float(bins - 1))
        number = fn.cast(dali.math.floor(drawn + 0.5), dtype=types.INT32)
        kind = fn.random.uniform(values=list(range(len(suite))), dtype=types.INT32)
        images = select(suite, kind, images, magnitude_bin=signed_bin(number), num_magnitude_bins=bins, **options)
    return images


def _grayscale(images: Any, _: Any) -> Any:
    gray = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def _solarize(images: Any, _: Any) -> Any:
    return ops.solarize.op(images, types.Constant(SOLARIZE, dtype=types.UINT8))


def _blur(images: Any, sigma: Any) -> Any:
    return fn.gaussian_blur(images, sigma=sigma)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _imagenet_policy(suite: dict[str, Any], bins: int) -> Any:
    sub_policies = [[(suite[name], chance, magnitude) for name, chance, magnitude in each] for each in IMAGENET]
    return core.Policy("ImageNet", bins, sub_policies)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def operations(policy: Policy, shorter: int) -> dict[str, Any]:
    """DALI's augmentations with torchvision's magnitudes, by name.

    Magnitudes: shear as a tangent, shift in pixels, rotation in degrees, brightness to sharpness as the distance from
    the factor 1, posterize in bits that remain, solarize as the least value that is inverted, of 1. Those from shear
    to sharpness get a random sign. `shorter` is the shorter side of the images, pixels.
    """
    ranges = policy.ranges
    assert ranges is not None, "only called where there are magnitudes"
    bins, shift = ranges.bins, ranges.shift if ranges.shift >= 1 else ranges.shift * shorter
    shears, shifts, angles, factors = (
        _steps(0, most, bins) for most in (ranges.shear, shift, ranges.rotation, ranges.factor)
    )
    found = {
        "shear_x": ops.shear_x.augmentation(shears, True),
        "shear_y": ops.shear_y.augmentation(shears, True),
        "translate_x": ops.translate_x_no_shape.augmentation(shifts, True, _whole_pixels_x),
        "translate_y": ops.translate_y_no_shape.augmentation(shifts, True, _whole_pixels_y),
        "rotate": ops.rotate.augmentation(angles, True),
        "brightness": ops.brightness.augmentation(factors, True, ops.shift_enhance_range),
        "color": ops.color.augmentation(factors, True, ops.shift_enhance_range),
        "contrast": ops.contrast.augmentation(factors, True, ops.shift_enhance_range),
        "sharpness": ops.sharpness.augmentation(factors, True, ops.sharpness_kernel),
        "posterize": ops.posterize.augmentation(_steps(8, ranges.bits, bins), False, ops.poster_mask_uint8),
        "solarize": ops.solarize.augmentation(_steps(1, 0, bins), False, _least_inverted),
        "auto_contrast": ops.auto_contrast,
        "equalize": equalize,
    }
    found |= {"invert": ops.invert} if policy.draw == "pairs" else {"identity": ops.identity}
    return {name: each.augmentation(augmentation_cls=_Operation) for name, each in found.items()}


def _steps(first: float, last: float, bins: int) -> NDArray[np.float32]:
    # By torch, as torchvision's: NumPy rounds otherwise, and a shift of 15.999998 pixels is one of 15.
    steps: NDArray[np.float32] = torch.linspace(first, last, bins, dtype=torch.float32).numpy()
    return steps


def _whole_pixels_x(shift: float) -> NDArray[np.float32]:
    return np.array([np.trunc(shift), 0], dtype=np.float32)


def _whole_pixels_y(shift: float) -> NDArray[np.float32]:
    return np.array([0, np.trunc(shift)], dtype=np.float32)


def _least_inverted(threshold: float) -> NDArray[np.float32]:
    return np.array(np.ceil(255 * float(threshold)), dtype=np.float32)


class _Operation(_Augmentation):  # type: ignore[misc]
    """DALI's Augmentation, without AutoGraph: no operation has a branch that depends on an image.

    AutoGraph follows each call of Python, some 600 for the magnitudes of a policy, which takes most of the time that a
    pipeline needs to be built.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _apply_unconverted(self, args, options)


@dali.pipeline.do_not_convert  # type: ignore[untyped-decorator]
def _apply_unconverted(operation: _Operation, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _Augmentation.__call__(operation, *args, **options)


@augmentation  # type: ignore[untyped-decorator]
def equalize(images: Any, _: Any) -> Any:
    """Pillow's equalization: the sum excludes the brightest value, where DALI excludes the darkest.

    They differ by tens of 255 where a geometric operation has filled with black. What is dark in the inverse image is
    bright in the image.
    """
    white = types.Constant(255, dtype=types.UINT8)
    return white - ops.equalize.op(white - images, None)
