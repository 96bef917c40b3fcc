"""How cuDNN chooses its algorithms for the convolutions: by a search at their first use, or by its heuristics."""

import torch

MIN_SEARCH_IMAGES = 5_000_000  # docs/internals/decisions/0032


def choose_search(images: int) -> None:
    """Leave cuDNN's search on in long runs alone. To be called once, before the first convolution.

    The search takes seconds, for EfficientNet-B0 half a minute, and makes each step a little faster. Where it is off,
    as with `--deterministic`, it stays off.

    Args:
        images: that this process trains on in the whole run.
    """
    if images < MIN_SEARCH_IMAGES:
        torch.backends.cudnn.benchmark = False
