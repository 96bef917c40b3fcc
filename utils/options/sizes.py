"""Sizes of images, as flags and files give them: the side of a square, or height and width."""

import math
import re
from typing import NamedTuple

ImageSize = int | str  # 224, or "192x320": height x width, where they differ


class Sides(NamedTuple):
    """Height and width in pixels, in torch's order."""

    height: int
    width: int


def sides_of(size: ImageSize) -> Sides:
    """224 -> (224, 224), "192x320" -> (192, 320)."""
    if isinstance(size, int):
        return Sides(size, size)
    height, width = map(int, size.split("x"))
    return Sides(height, width)


def as_image_size(height: int, width: int) -> ImageSize:
    """Undo of `sides_of`."""
    return height if height == width else f"{height}x{width}"


def timm_size(size: ImageSize) -> int | tuple[int, int]:
    """As networks of timm take it for `img_size`."""
    return size if isinstance(size, int) else (*sides_of(size),)


def read_image_size(text: str) -> ImageSize:
    """224 or 192x320.

    Raises:
        ValueError: it is something else; the message says what is expected.
    """
    if not re.fullmatch(r"-?\d{1,9}(x\d{1,9})?", text):
        raise ValueError("a size in pixels: 224, or HEIGHTxWIDTH")
    height, _, width = text.partition("x")
    return as_image_size(int(height), int(width or height))


def crop_pct(size: ImageSize, resized: int) -> float:
    """Share of the shorter side `resized` that a crop of `size` takes, from which timm computes exactly `resized`."""
    shorter = min(sides_of(size))
    share = shorter / resized
    while math.floor(shorter / share) != resized:  # rounding
        share = math.nextafter(share, 0.0)
    return share


def sides_before_crop(size: ImageSize, resized: int) -> Sides:
    """What a crop of `size` is taken from, where the shorter side is `resized`: as timm computes it for `crop_pct`."""
    share = crop_pct(size, resized)
    height, width = (math.floor(side / share) for side in sides_of(size))
    return Sides(height, width)
