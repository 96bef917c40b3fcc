"""The policies of `--augment`, a record each; `utils.data.augmentation.policies` makes operators of them."""

from typing import Literal, NamedTuple


class Ranges(NamedTuple):
    """Largest magnitudes of the operations of a policy.

    Attributes:
        shear: as a tangent.
        shift: share of the side; from 1 on, pixels.
        rotation: degrees.
        factor: distance from 1 of the factors of brightness, color, contrast and sharpness.
        bits: that posterize leaves, the least.
        bins: steps of a magnitude.
    """

    shear: float
    shift: float
    rotation: float
    factor: float
    bits: int
    bins: int


class Policy(NamedTuple):
    """What draws operations for each training image.

    Attributes:
        draw: which operations: pairs of a table, several, one, or one kind of three; "none" for none.
        ranges: of their magnitudes, where they have some.
        changes_colors: whether it does what `--color-jitter` does.
        timm_name: timm's name of the same, "" for none; None where timm has no such policy.
    """

    name: str
    draw: Literal["none", "pairs", "several", "one", "kinds"] = "none"
    ranges: Ranges | None = None
    changes_colors: bool = False
    timm_name: str | None = None


_SHIFT = 150 / 331  # of the side (arXiv:1805.09501)
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("none", timm_name=""),
        # The 25 sub-policies for ImageNet of arXiv:1805.09501, table 9.
        Policy("autoaugment", "pairs", Ranges(0.3, _SHIFT, 30, 0.9, 4, bins=10), True, "original"),
        # By default 2 of 14 operations with magnitude 9 of 31 bins (arXiv:1909.13719).
        Policy("randaugment", "several", Ranges(0.3, _SHIFT, 30, 0.9, 4, bins=31), True, "rand-m9-n2"),
        # 1 of 14 operations with a random magnitude, "wide" (arXiv:2103.10158, table 1).
        Policy("trivialaugment", "one", Ranges(0.99, 32, 135, 0.99, 2, bins=31), True),
        # Grayscale, solarization or Gaussian blur (arXiv:2204.07118).
        Policy("three-augment", "kinds", timm_name="3a"),
    )
}
