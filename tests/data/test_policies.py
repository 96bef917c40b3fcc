"""Policies of augmentation: DALI's draw and do what torchvision's do, through real pipelines.

What a policy did is read from its output: the test picture is such that nearly every operation and magnitude gives
another one. The tables of torchvision give how often each must come.
"""

import dataclasses
import itertools
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import nvidia.dali as dali
import pytest
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from nvidia.dali.auto_aug.core import signed_bin
from PIL import Image
from scipy.stats import chi2
from torchvision.transforms import v2

import pipelines
from tests.conftest import resolved
from utils.data.augmentation import policies
from utils.data.dali import remove_generated_files, train_pipeline_options
from utils.data.loaders.torch_loader import torch_train_transform
from utils.distributed.group import DistEnv
from utils.options.policies import POLICIES
from utils.options.resolved import ResolvedConfig

ImageInfo = NDArray[np.uint8]  # (H, W, 3)
Step = tuple[str, int, int]  # torchvision's operation, bin of its magnitude, sign
NAMED = tuple(name for name, policy in POLICIES.items() if policy.ranges)  # whose operations have magnitudes
# torchvision's table of one policy shows that `outcomes` and `chance_of` are right.
QUICK = [pytest.param(name, marks=[] if name == "trivialaugment" else pytest.mark.slow) for name in NAMED]
BINS = {name: POLICIES[name].ranges.bins for name in NAMED}  # type: ignore[union-attr]
NAMES = {
    "Identity": "identity",
    "ShearX": "shear_x",
    "ShearY": "shear_y",
    "TranslateX": "translate_x",
    "TranslateY": "translate_y",
    "Rotate": "rotate",
    "Brightness": "brightness",
    "Color": "color",
    "Contrast": "contrast",
    "Sharpness": "sharpness",
    "Posterize": "posterize",
    "Solarize": "solarize",
    "AutoContrast": "auto_contrast",
    "Equalize": "equalize",
    "Invert": "invert",
}
# Mean absolute difference between DALI and torchvision at most, of 255. Pillow rounds colors down, DALI to the nearest
# value. At the border of what a geometric operation moves, DALI interpolates toward the fill, Pillow does not. Pillow
# equalizes with a whole number of pixels per value, which matters with few pixels.
EXACT = ("Identity", "TranslateX", "TranslateY", "Posterize", "Solarize", "Invert")
LIMITS = dict.fromkeys(NAMES, 0.7) | dict.fromkeys(EXACT, 0.0)
LIMITS |= {"ShearX": 0.8, "ShearY": 0.8, "Rotate": 1.0, "Contrast": 1.0, "Equalize": 2.0}


def config_for(policy: Any, side: int, **values: Any) -> ResolvedConfig:
    return dataclasses.replace(
        resolved(), augment=policy, image_size=side, crop_scale=1.0, hflip=0.0, cache="host", decode="full", **values
    )


def torchvision(policy: str) -> Any:
    """Its transform, whose tables are private."""
    return policies.torchvision_policy(config_for(policy, 224))


def info(side: int, seed: int = 0) -> ImageInfo:
    """Smooth, in all colors, like nothing that an operation makes of it."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, size=(side // 8 + 1, side // 8 + 1, 3), dtype=np.uint8)
    return np.array(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC))


def by_dali(pictures: list[ImageInfo], policy: str, runs: int = 1, **values: Any) -> list[ImageInfo]:
    """The pictures, `runs` times augmented by the pipeline that trains; `values` are flags."""
    targets = [np.zeros(1, dtype=np.int64)] * len(pictures)
    config = config_for(policy, pictures[0].shape[0], **values, batch_size=len(pictures), workers=2, prefetch=1)
    options = train_pipeline_options(config, DistEnv.single(torch.device("cpu")), seed=0)
    pipeline = pipelines.train_pipeline(lambda _: (pictures, targets), config, "cpu", **options)
    pipeline.build()
    remove_generated_files()
    batches = (pipeline.run()[0] for _ in range(runs))
    return [np.array(images.at(index)) for images in batches for index in range(len(pictures))]


def by_torchvision(pictures: list[ImageInfo], policy: str, **values: Any) -> list[ImageInfo]:
    """The pictures, augmented as `--loader torch` does; `values` are flags."""
    transform = torch_train_transform(config_for(policy, pictures[0].shape[0], **values))
    torch.manual_seed(0)
    return [transform(Image.fromarray(one)).permute(1, 2, 0).numpy() for one in pictures]


def magnitude_of(policy: str, step: Step, side: int) -> float:
    """By torchvision's table."""
    name, number, sign = step
    magnitudes, _ = torchvision(policy)._AUGMENTATION_SPACE[name]
    found = magnitudes(BINS[policy], side, side)
    return 0.0 if found is None else sign * float(found[number])


def torchvision_steps(policy: str, pictures: list[ImageInfo], steps: list[Step]) -> list[ImageInfo]:
    """Each step done to its picture by torchvision."""
    transform = torchvision(policy)
    done = []
    for one, step in zip(pictures, steps, strict=True):
        found = transform._apply_image_or_video_transform(
            Image.fromarray(one),
            step[0],
            magnitude_of(policy, step, len(one)),
            transform.interpolation,
            transform._fill,
        )
        done.append(np.array(found))
    return done


def dali_steps(policy: str, pictures: list[ImageInfo], steps: list[Step]) -> list[ImageInfo]:
    """Each step done to its picture by DALI, an operation after the other."""
    positions = defaultdict(list)
    for position, (name, _, _) in enumerate(steps):
        positions[name].append(position)
    done = list(pictures)
    for name, chosen in positions.items():
        operation = policies.operations(POLICIES[policy], len(pictures[0]))[NAMES[name]]
        inputs = [
            [pictures[position] for position in chosen],
            [np.int32(steps[position][1]) for position in chosen],
            [np.int32(steps[position][2] < 0) for position in chosen],
        ]
        for position, image in zip(chosen, one_operation(operation, inputs, BINS[policy]), strict=True):
            done[position] = image
    return done


def one_operation(operation: Any, inputs: list[Any], bins: int) -> list[ImageInfo]:
    @dali.pipeline_def(batch_size=len(inputs[0]), num_threads=2, device_id=None, enable_conditionals=True)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        images = fn.external_source(lambda: inputs[0], layout="HWC")
        magnitude = signed_bin(fn.external_source(lambda: inputs[1]), random_sign=fn.external_source(lambda: inputs[2]))
        with warnings.catch_warnings(record=True):  # as in the subject
            return operation(
                images,
                magnitude_bin=magnitude,
                num_magnitude_bins=bins,
                fill_value=0,
                interp_type=types.INTERP_LINEAR,
            )

    made = pipeline(prefetch_queue_depth=1)
    made.build()
    remove_generated_files()
    images = made.run()[0]
    return [np.array(images.at(index)) for index in range(len(inputs[0]))]


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn, and how often


def variants(policy: str, name: str, bins: Iterable[int]) -> list[Step]:
    """What a drawn operation may be; all are equally likely."""
    magnitudes, signed = torchvision(policy)._AUGMENTATION_SPACE[name]
    if magnitudes(BINS[policy], 224, 224) is None:
        return [(name, 0, 1)]
    return [(name, number, sign) for number in bins for sign in ((1, -1) if signed else (1,))]


def sequences(policy: str) -> dict[tuple[Step, ...], float]:
    """What torchvision's policy may do to an image, and the probabilities, by its tables."""
    transform = torchvision(policy)
    found: dict[tuple[Step, ...], float] = defaultdict(float)
    if policy == "autoaugment":
        for sub_policy in transform._policies:
            stages = []
            for name, chance, number in sub_policy:
                may_be = variants(policy, name, [number])
                stages.append([((), 1 - chance), *(((step,), chance / len(may_be)) for step in may_be)])
            for (first, one), (second, other) in itertools.product(*stages):
                found[first + second] += one * other / len(transform._policies)
        return {steps: chance for steps, chance in found.items() if chance}
    bins = [transform.magnitude] if policy == "randaugment" else range(31)
    single: dict[Step, float] = {}
    for name in transform._AUGMENTATION_SPACE:
        may_be = variants(policy, name, bins)
        single |= {step: 1 / len(may_be) / len(transform._AUGMENTATION_SPACE) for step in may_be}
    for chosen in itertools.product(single, repeat=2 if policy == "randaugment" else 1):
        found[chosen] += math.prod(single[step] for step in chosen)
    return found


def outcomes(
    policy: str, image: ImageInfo, apply: Any, chances: dict[tuple[Step, ...], float] | None = None
) -> dict[bytes, float]:
    """Every picture that can come of `image`, and its probability; `chances` are those of the steps."""
    chances = sequences(policy) if chances is None else chances
    todo = list(chances)
    images = [image] * len(todo)
    for stage in range(2):
        positions = [position for position, steps in enumerate(todo) if len(steps) > stage]
        if positions:
            made = apply(
                policy, [images[position] for position in positions], [todo[position][stage] for position in positions]
            )
            for position, one in zip(positions, made, strict=True):
                images[position] = one
    found: dict[bytes, float] = defaultdict(float)
    for one, steps in zip(images, todo, strict=True):
        found[one.tobytes()] += chances[steps]
    assert sum(found.values()) == pytest.approx(1)
    return found


def chance_of(drawn: list[ImageInfo], expected: dict[bytes, float]) -> float:
    """Probability that frequencies as far as these or further from `expected` come by chance (Pearson's chi-square)."""
    counts = Counter(one.tobytes() for one in drawn)
    assert not set(counts) - set(expected), "a picture that no operation of the policy makes"
    cells: list[tuple[float, float]] = []  # expected, counted
    rest = [0.0, 0.0]
    for one, share in expected.items():
        if share * len(drawn) >= 5:
            cells.append((share * len(drawn), counts[one]))
        else:
            rest = [rest[0] + share * len(drawn), rest[1] + counts[one]]
    cells += [(rest[0], rest[1])] if rest[0] > 0 else []
    statistic = sum((counted - many) ** 2 / many for many, counted in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        ("trivialaugment", 1),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in NAMED),
        *(pytest.param(name, 32, marks=pytest.mark.slow) for name in NAMED),
    ],
)
def test_frequencies_are_those_of_torchvisions_tables(policy: str, runs: int) -> None:
    image = info(40)
    expected = outcomes(policy, image, dali_steps)
    assert len(expected) >= {"autoaugment": 50, "randaugment": 400, "trivialaugment": 500}[policy]
    assert chance_of(by_dali([image] * 4096, policy, runs), expected) > 1e-4


@pytest.mark.parametrize("draws", [2048, pytest.param(16384, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", QUICK)
def test_torchvision_keeps_to_its_tables(policy: str, draws: int) -> None:
    """The expectations of these tests, held against the transform of `--loader torch`."""
    image = info(40)
    expected = outcomes(policy, image, torchvision_steps)
    assert chance_of(by_torchvision([image] * draws, policy), expected) > 1e-4


def test_the_sub_policies_are_torchvisions() -> None:
    theirs = [
        tuple((NAMES[name], chance, number) for name, chance, number in each if chance)
        for each in v2.AutoAugment()._policies
    ]
    assert theirs == list(policies.IMAGENET)
    assert len(theirs) == 25


# ---------------------------------------------------------------------------------------------------------------------
# What each operation does


def differences(policy: str, name: str, image: ImageInfo) -> dict[Step, float]:
    """Mean absolute difference between DALI and torchvision, for each magnitude and sign."""
    bins = range(9, 10) if policy == "randaugment" else range(BINS[policy])
    steps = variants(policy, name, bins)
    # A random sign makes both directions of a shear alike; DALI counts it the other way round.
    mirrored = [(kind, number, -sign if kind.startswith("Shear") else sign) for kind, number, sign in steps]
    ours = dali_steps(policy, [image] * len(steps), mirrored)
    theirs = torchvision_steps(policy, [image] * len(steps), steps)
    return {
        step: float(np.abs(one.astype(int) - other).mean())
        for step, one, other in zip(steps, ours, theirs, strict=True)
    }


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=pytest.mark.slow if name == "trivialaugment" else ()) for name in NAMED]
)
def test_every_magnitude_does_what_torchvisions_does(policy: str) -> None:
    image = info(144)
    turned = np.array(Image.fromarray(image).rotate(25, Image.Resampling.BILINEAR))  # black corners, for equalization
    for name in torchvision(policy)._AUGMENTATION_SPACE:
        for one in (image, turned):
            found = differences(policy, name, one)
            worst = max(found, key=lambda step: found[step])
            assert found[worst] <= LIMITS[name], worst


@pytest.mark.slow  # frequencies and magnitudes, below and above, are those of each pixel
@pytest.mark.parametrize("policy", NAMED)
def test_pixels_change_as_much_as_by_torchvision(policy: str) -> None:
    """Mean absolute change of a picture: the expectation over everything that the policy may do to it."""
    image = info(160)
    expected = [
        sum(
            chance * np.abs(np.frombuffer(made, np.uint8).astype(int) - image.ravel()).mean()
            for made, chance in outcomes(policy, image, steps).items()
        )
        for steps in (dali_steps, torchvision_steps)
    ]
    assert expected[0] == pytest.approx(expected[1], abs=0.4)  # of some 40
