"""Folds, as `--fold K/N` gives them."""

import re
from typing import NamedTuple

from utils.errors import UserError


class Fold(NamedTuple):
    """One of the parts of the training images, which validates.

    Attributes:
        number: from 1 to `parts`.
        parts: 2 or more.
    """

    number: int
    parts: int


def read_fold(text: str) -> Fold:
    """2/4 -> Fold(2, 4).

    Raises:
        UserError: it is no such fold.
    """
    if not (found := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)):
        raise UserError(f"--fold {text}: must be K/N, the K-th of N parts, such as 1/4")
    fold = Fold(*map(int, found.groups()))
    if fold.parts < 2:
        raise UserError(f"--fold {text}: one part would leave no training images; give 2 parts or more, such as 1/4")
    if not 1 <= fold.number <= fold.parts:
        raise UserError(f"--fold {text}: there are the parts 1 to {fold.parts}; give one of them")
    return fold
