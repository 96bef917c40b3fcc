"""Rates: by what `--lr` is multiplied for the images of an optimizer step."""

import math
from typing import Literal

LR_BATCH = 256  # images for which --lr is given, as in Goyal et al. 2017, arXiv:1706.02677, section 2.1
Scaling = Literal["linear", "sqrt", "none"]


def lr_factor(scaling: Scaling, global_batch_size: float) -> float:
    """By what `--lr`, for 256 images, is multiplied for the images of an optimizer step."""
    ratio = global_batch_size / LR_BATCH
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[scaling]
