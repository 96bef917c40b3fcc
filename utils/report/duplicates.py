"""The page of images that are nearly the same: one HTML file that needs nothing else (duplicates.html, page.css)."""

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

import jinja2

from utils import __version__

TEMPLATES = Path(__file__).parent


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
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("duplicates.html").render(
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        pairs=pairs,
        total=total,
        summary=summary,
        now=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )
