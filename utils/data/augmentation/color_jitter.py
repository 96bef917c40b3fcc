"""torchvision's ColorJitter of brightness, contrast and saturation, made of DALI's operators: `--color-jitter`."""

import itertools
import warnings
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.auto_aug import augmentations as ops
from nvidia.dali.auto_aug.core import select

# Of brightness, contrast and saturation. The order matters where a color reaches 0 or 255.
ORDERS = np.array(list(itertools.permutations(range(3))), dtype=np.int32)


def apply_color_jitter(images: Any, strength: float) -> Any:
    """Graph op: uint8 HWC images, each with its own factors from 1 - strength to 1 + strength, in its own order.

    `strength` is from 0 to 1; 0 returns the images.
    """
    # DALI's operations use operators that DALI deprecates, and its warnings override every filter.
    with warnings.catch_warnings(record=True):
        return _apply_color_jitter(images, strength)


def _apply_color_jitter(images: Any, strength: float) -> Any:
    if strength > 0:
        order, factors = draw_adjustments(strength)
        images = adjust_colors(images, order, factors)
    return images


def draw_adjustments(strength: float) -> tuple[Any, Any]:
    """Graph op: a random order and factors for `adjust_colors`, of each image."""
    number = fn.random.uniform(values=list(range(len(ORDERS))), dtype=types.INT32)
    return types.Constant(ORDERS)[number], fn.random.uniform(range=[1 - strength, 1 + strength], shape=(3,))


def adjust_colors(images: Any, order: Any, factors: Any) -> Any:
    """Graph op: brightness, contrast and saturation of uint8 HWC images, as Pillow's ImageEnhance.

    Args:
        images: of a pipeline with conditionals.
        order: int32 (3,), a permutation of 0 (brightness), 1 (contrast) and 2 (saturation).
        factors: float32 (3,), of brightness, contrast and saturation; 1 changes nothing.
    """
    for position in range(3):
        kind = order[position]
        images = select([ops.brightness.op, ops.contrast.op, ops.color.op], kind, images, factors[kind])
    return images
