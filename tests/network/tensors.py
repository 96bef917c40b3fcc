"""Shapes and random tensors for the tests of the fused layers and their kernels, and how far results are apart."""

import torch
from torch import Tensor

NORMS = [(2, 3, 5, 7), (4, 24, 7, 7), (3, 40, 9, 5), (8, 64, 1, 1)]
FILTERS = [(24, 3, 1, 7, 9), (24, 3, 2, 8, 7), (5, 5, 1, 6, 6), (40, 5, 2, 9, 8)]  # channels, kernel, stride, H, W


def error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; NaN never passes."""
    assert out.shape == reference.shape
    difference = (out.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-12))


def draw(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape) * 2 + 1
