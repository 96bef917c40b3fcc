"""What published recipes need: RandAugment's strength and noise, 3-Augment, color jitter.

DALI and the torch loader draw and do the same as torchvision and timm, through real pipelines.
"""

import itertools
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import nvidia.dali as dali
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from scipy.stats import chisquare, kstest, norm
from timm.data import auto_augment as timm_augment
from torchvision.transforms.v2 import functional as F

from tests.data.test_policies import (
    ImageInfo,
    Step,
    by_dali,
    by_torchvision,
    chance_of,
    dali_steps,
    info,
    outcomes,
    torchvision,
    torchvision_steps,
    variants,
)
from utils.data.augmentation import policies
from utils.data.augmentation.color_jitter import ORDERS, adjust_colors, apply_color_jitter, draw_adjustments
from utils.data.dali import remove_generated_files

MIN_CHANCE = 1e-3  # of statistics as far from what is expected; seeds are fixed
LOADERS = {"dali": by_dali, "torch": by_torchvision}
ONE_QUICK = ["dali", pytest.param("torch", marks=pytest.mark.slow)]


# ---------------------------------------------------------------------------------------------------------------------
# RandAugment


def noisy_steps(magnitude: int, std: float) -> dict[tuple[Step, ...], float]:
    """What one operation with a normally distributed magnitude may be, by torchvision's table, and the chances."""
    bins = [number for number in range(31) if abs(number - magnitude) < 6 * std]
    edges = [-math.inf, *[number + 0.5 for number in bins[:-1]], math.inf]
    of_bin = dict(zip(bins, np.diff(norm.cdf(edges, magnitude, std)), strict=True))
    names = torchvision("randaugment")._AUGMENTATION_SPACE
    found: dict[tuple[Step, ...], float] = {}
    for name in names:
        for step in variants("randaugment", name, bins):
            signs = len(variants("randaugment", name, [step[1]]))
            known = len(variants("randaugment", name, bins)) > 1
            found[(step,)] = (of_bin[step[1]] / signs if known else 1.0) / len(names)
    return found


@pytest.mark.parametrize(("magnitude", "std"), [pytest.param(21, 1.5, marks=pytest.mark.slow), (29, 2.0)])
@pytest.mark.parametrize("loader", ONE_QUICK)
def test_strength_and_noise_of_randaugment(loader: str, magnitude: int, std: float) -> None:
    """The one of 29 often reaches the largest magnitude."""
    image = info(40)
    steps = dali_steps if loader == "dali" else torchvision_steps
    expected = outcomes("randaugment", image, steps, noisy_steps(magnitude, std))
    flags = {"randaugment_ops": 1, "randaugment_magnitude": magnitude, "randaugment_std": std}
    drawn = LOADERS[loader]([image] * 4096, "randaugment", **flags)
    assert chance_of(drawn, expected) > MIN_CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("std", [0.0, 1.0])
def test_number_of_operations(loader: str, std: float) -> None:
    """Of three operations all are the identity once in 14 ** 3; of one, once in 14."""
    image = info(24)
    shares = []
    for count in (1, 3):
        flags = {"randaugment_ops": count, "randaugment_magnitude": 20, "randaugment_std": std}
        drawn = LOADERS[loader]([image] * 1024, "randaugment", **flags)
        shares.append(sum(np.array_equal(one, image) for one in drawn) / 1024)
    assert 1 / 14 - 0.03 < shares[0] < 1 / 14 + 0.03
    assert shares[1] < 0.01


@pytest.mark.parametrize("level", [6, 7, 9])
def test_timms_magnitude_is_a_third(level: int) -> None:
    """`rand-m7-inc1` is magnitude 21, where both have the same largest strength."""
    random.seed(0)
    hparams = {"translate_pct": 150 / 331}
    for name, timms in [
        ("Rotate", "Rotate"), ("ShearX", "ShearX"), ("ShearY", "ShearY"), ("TranslateX", "TranslateXRel"),
        ("Color", "ColorIncreasing"), ("Contrast", "ContrastIncreasing"), ("Sharpness", "SharpnessIncreasing"),
    ]:  # fmt: skip
        (found,) = timm_augment.LEVEL_TO_ARG[timms](level, hparams)
        magnitudes, _ = torchvision("randaugment")._AUGMENTATION_SPACE[name]
        ours = float(magnitudes(31, 1, 1)[3 * level])
        assert abs(found - 1 if timms.endswith("Increasing") else found) == pytest.approx(ours, abs=1e-6), name


# ---------------------------------------------------------------------------------------------------------------------
# 3-Augment


def waves(side: int = 48) -> ImageInfo:
    """Columns that go up and down every 8 pixels; what is left of the wave shows how much it was blurred."""
    column = np.cos(np.arange(side) * 2 * np.pi / 8)
    color = 128 + column[None, :, None] * np.array([100, 80, 60])
    return np.broadcast_to(color, (side, side, 3)).round().astype(np.uint8).copy()


def amplitude(image: ImageInfo) -> float:
    """Of the wave in the red of `waves`, away from the border."""
    red = image[20:28, 8:40, 0].astype(float).mean(0)
    return float(2 * (red * np.cos(np.arange(8, 40) * 2 * np.pi / 8)).mean())


def kind_of(image: ImageInfo, original: ImageInfo) -> str:
    if (image == image[..., :1]).all():
        return "grayscale"
    solarized = np.where(original < policies.SOLARIZE, original, 255 - original)
    return "solarize" if np.array_equal(image, solarized) else "blur"


@pytest.mark.parametrize("loader", ONE_QUICK)
def test_three_augment_draws_each_equally_and_sigma_uniformly(loader: str) -> None:
    original = waves()
    drawn = LOADERS[loader]([original] * 3072, "three-augment")
    kinds = [kind_of(one, original) for one in drawn]
    counts = Counter(kinds)
    assert chisquare([counts[kind] for kind in ("grayscale", "solarize", "blur")]).pvalue > MIN_CHANCE
    sigmas = np.linspace(*policies.BLUR, 96)
    if loader == "torch":
        picture = Image.fromarray(original)
        left = [amplitude(np.array(picture.filter(ImageFilter.GaussianBlur(sigma)))) for sigma in sigmas.tolist()]
    else:
        at = np.arange(-6, 7)
        kernels = [np.exp(-(at**2) / (2 * sigma**2)) for sigma in sigmas]
        left = [100 * float((kernel * np.cos(at * 2 * np.pi / 8)).sum() / kernel.sum()) for kernel in kernels]
    measured = [amplitude(one) for one, kind in zip(drawn, kinds, strict=True) if kind == "blur"]
    # The wave gets smaller as sigma grows; below 0.6 it hardly changes.
    found = np.interp(-np.array(measured), -np.array(left), sigmas)
    edges = [0, 0.6, 0.9, 1.2, 1.5, 1.8, 3]
    shares = np.diff(np.clip(edges, *policies.BLUR)) / (policies.BLUR[1] - policies.BLUR[0])
    assert chisquare(np.histogram(found, edges)[0], shares * len(found)).pvalue > MIN_CHANCE
    assert max(found) <= policies.BLUR[1] + 0.05


def test_operations_of_three_augment_are_timms() -> None:
    """DALI's blur is Gaussian, Pillow's nearly so."""
    original = info(96)
    picture = Image.fromarray(original)
    solarize, desaturate, blur = (steps[0] for steps in timm_augment.auto_augment_policy("3a"))
    assert (solarize.name, desaturate.name, blur.name) == ("Solarize", "Desaturate", "GaussianBlurRand")
    for kind, limit, sigma in [(0, 0.01, 1.0), (1, 0.0, 1.0), *[(2, 0.6, sigma) for sigma in (0.1, 0.5, 1.0, 2.0)]]:
        operation = (policies._grayscale, policies._solarize, policies._blur)[kind]
        (found,) = in_graph(lambda images, value, use=operation: use(images, value), original, np.float32(sigma))
        expected = (desaturate(picture), solarize(picture), picture.filter(ImageFilter.GaussianBlur(sigma)))[kind]
        assert np.abs(found.astype(int) - np.array(expected)).mean() <= limit, (kind, sigma)


# ---------------------------------------------------------------------------------------------------------------------
# Color jitter


def in_graph(operation: Any, image: ImageInfo, *values: Any) -> list[NDArray[Any]]:
    """One image through a graph op, as the pipelines of training have it; `values` are its other arguments."""

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None, enable_conditionals=True)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        inputs = [dali.fn.external_source([[value]], cycle=True) for value in values]
        return operation(dali.fn.external_source(lambda: [image], layout="HWC"), *inputs)

    made = pipeline(prefetch_queue_depth=1)
    made.build()
    remove_generated_files()
    return [np.array(output.at(0)) for output in made.run()]


def adjust_by_torchvision(image: ImageInfo, order: NDArray[np.int32], factors: NDArray[np.float32]) -> ImageInfo:
    adjusted = Image.fromarray(image)
    for kind in order:
        adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)[kind]
        adjusted = adjust(adjusted, float(factors[kind]))
    return np.array(adjusted)


def test_color_jitter_does_what_torchvisions_does() -> None:
    """In all orders, which differ where a color is cut off at 255 in between."""
    image = info(64)
    factors = np.array([1.4, 0.6, 1.4], dtype=np.float32)
    expected = [adjust_by_torchvision(image, order, factors) for order in ORDERS]
    for one, other in itertools.combinations(expected, 2):
        assert np.abs(one.astype(int) - other).mean() > 0.1
    assert len({tuple(order) for order in ORDERS}) == math.factorial(3)
    for order, wanted in zip(ORDERS, expected, strict=True):
        (found,) = in_graph(adjust_colors, image, order, factors)
        assert np.abs(found.astype(int) - wanted).mean() < 1.5, order


@pytest.mark.parametrize("loader", ONE_QUICK)
def test_color_jitter_draws_uniformly(loader: str) -> None:
    """Of a gray picture with a lighter, a darker and a colored part, whose mean shows the brightness."""
    image = np.full((24, 24, 3), 90, dtype=np.uint8)
    image[:12, :12], image[12:, 12:], image[:12, 12:] = 60, 120, (120, 80, 65)
    drawn = np.array(LOADERS[loader]([image] * 2048, "none", color_jitter=0.4)).astype(float)
    gray = drawn @ np.array([0.299, 0.587, 0.114])
    brightness = gray.mean((1, 2)) / (image @ np.array([0.299, 0.587, 0.114])).mean()
    contrast = (gray[:, 13, 13] - gray[:, 0, 0]) / 60 / brightness
    saturation = (drawn[:, 0, 13, 0] - drawn[:, 0, 13, 2]) / 55 / brightness / contrast
    for factor in (brightness, contrast, saturation):
        assert kstest(factor, "uniform", (0.6, 0.8)).statistic < 0.045
        assert 0.56 < factor.min() < 0.62
        assert 1.37 < factor.max() < 1.47
    assert np.abs(np.corrcoef([brightness, contrast, saturation]) - np.eye(3)).max() < 0.1


def test_orders_and_factors_of_color_jitter() -> None:
    @dali.pipeline_def(batch_size=4096, num_threads=2, device_id=None, seed=0)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        return draw_adjustments(0.3)

    made = pipeline(prefetch_queue_depth=1)
    made.build()
    order, factors = (np.array(output.as_tensor()) for output in made.run())
    counts = Counter(map(tuple, order.tolist()))
    assert len(counts) == math.factorial(3)
    assert chisquare(list(counts.values())).pvalue > MIN_CHANCE
    for number in range(3):
        assert kstest(factors[:, number], "uniform", (0.7, 0.6)).pvalue > MIN_CHANCE
    assert (
        np.abs(np.corrcoef([*factors.T, [ORDERS.tolist().index(each) for each in order.tolist()]]) - np.eye(4)).max()
        < 0.08
    )


def test_no_jitter_returns_the_images() -> None:
    image = info(16)
    (found,) = in_graph(lambda images: apply_color_jitter(images, 0.0), image)
    assert np.array_equal(found, image)
    torch.manual_seed(0)
    assert np.array_equal(by_torchvision([image], "none")[0], image)
