"""Shapes of layers, by which their kernels are chosen."""

from typing import NamedTuple


class DepthwiseShape(NamedTuple):
    """What a depthwise convolution's kernels are compiled for; the input is (N, channels, height, width)."""

    channels: int
    height: int
    width: int
    kernel: int
    stride: int
