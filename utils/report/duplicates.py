"""The page of images that are nearly the same: one HTML file that needs nothing else (duplicates.html, page.css)."""

import dataclasses
from collections.abc import Sequence

from utils.report.page import load_template


@dataclasses.dataclass(frozen=True)
class Side:
    """One image of a pair; `jpeg` is a small picture in base64, "" for none, `target` "" where it is not known."""

    split: str
    path: str
    target: str
    jpeg: str


@dataclasses.dataclass(frozen=True)
class ShownPair:
    """A pair as the page shows it."""

    similarity: float
    one: Side
    other: Side


def render_duplicates(pairs: Sequence[ShownPair], total: int, summary: str) -> str:
    """The page, as text of a UTF-8 file.

    Args:
        pairs: in their order on the page.
        total: how many there are.
        summary: a sentence above them.
    """
    return load_template("duplicates.html").render(pairs=pairs, total=total, summary=summary)
