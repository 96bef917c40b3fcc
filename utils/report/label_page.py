"""The page of wrong labels: pictures of the worst, each with its label and the proposed one (label_errors.html)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from utils.report.page import load_template
from utils.text import count

MAX_PAIRS = 20  # that the page shows


class Doubt(NamedTuple):
    """An image whose label may be wrong.

    Attributes:
        label_probability, proposed_probability: 0 to 1.
        jpeg: a small picture in base64; "" for none.
    """

    path: str
    label: str
    proposed: str
    label_probability: float
    proposed_probability: float
    jpeg: str


def render_label_page(
    num_images: int,
    num_found: int,
    doubts: Sequence[Doubt],
    pairs: Counter[tuple[str, str]],
    of_class: Counter[str],
    class_counts: Mapping[str, int],
) -> str:
    """The page, as text of a UTF-8 file.

    Args:
        doubts: the worst first.
        pairs: (label, proposed label) -> images whose label may be wrong.
        of_class: label -> the same.
        class_counts: label -> images.
    """
    classes = [(name, of_class[name], images) for name, images in class_counts.items() if of_class[name]]
    return load_template("label_errors.html").render(
        num_images=num_images,
        num_found=num_found,
        doubts=doubts,
        pairs=pairs.most_common(MAX_PAIRS),
        classes=sorted(classes, key=lambda row: -row[1] / row[2]),
        count=count,
    )
