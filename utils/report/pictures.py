"""report.json: per-class accuracy, confused pairs and small pictures of a run, which `train.py --report` writes."""

import base64
import binascii
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from utils.errors import UserError

PICTURES = "report.json"
MAX_CLASSES, MAX_PAIRS, MAX_MATRIX = 1000, 20, 30  # classes, pairs, and classes of a matrix that a page shows
THUMBNAIL = 128  # longest side, pixels
_KEYS = {
    "classes": {"name", "count", "correct"},
    "confused": {"target", "predicted", "count"},
    "worst": {"path", "target", "predicted", "probability", "target_probability", "jpeg"},
    "samples": {"before", "after", "target", "mixed"},
}


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The content of report.json.

    Attributes:
        source: what was evaluated: checkpoint, network, epoch and top-1.
        classes: `name`, `count` and `correct` of each class, in label order.
        confused: `target`, `predicted` and `count` of the pairs of classes that are most often confused.
        worst: `path`, `target`, `predicted`, `probability`, `target_probability` and `jpeg` of the wrongly
            classified validation images, the largest loss first; and `heatmaps` (`class`, `jpeg`), of the wrong answer
            and of the right one.
        samples: `before`, `after` (both JPEG), `target` and `mixed` of the first training images of the last launch.
        confusion: images of each class (rows) by the class that they are taken for (columns), in label order; [] of
            more than `MAX_MATRIX` classes, and where an image has any number of them.
        training: name -> training images of a class; {} where they are not known.
        calibration: of the probabilities: `temperature`, `count`, `before` and `after` (each with `ece`, `nll`, `brier`
            and `bins`: images, mean probability, accuracy) and `answered` (threshold, percent answered, accuracy in
            percent or None); {} where they have none.
        no_heatmaps: why `worst` has no heat maps; "" where it has some, and in files of before.
    """

    source: dict[str, Any]
    classes: list[dict[str, Any]]
    confused: list[dict[str, Any]]
    worst: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    confusion: list[list[int]] = dataclasses.field(default_factory=list)
    training: dict[str, int] = dataclasses.field(default_factory=dict)
    calibration: dict[str, Any] = dataclasses.field(default_factory=dict)
    no_heatmaps: str = ""

    @property
    def hardest(self) -> list[dict[str, Any]]:
        """`classes`, those with the lowest accuracy first, `MAX_CLASSES` at most."""
        return sorted(self.classes, key=_accuracy)[:MAX_CLASSES]


def read_pictures(folder: Path) -> Pictures | None:
    """What `train.py --report` wrote to an output folder; None if nothing.

    Raises:
        UserError: it is broken.
    """
    path = folder / PICTURES
    if not path.is_file():
        return None
    try:
        found = Pictures(**json.loads(path.read_text()))
        if not all(keys <= each.keys() for name, keys in _KEYS.items() for each in getattr(found, name)):
            raise ValueError("a key is missing")
        size = len(found.classes)
        if found.confusion and [len(list(map(int, row))) for row in found.confusion] != [size] * size:
            raise ValueError("the matrix is of other classes")
        _ = found.hardest, sum(found.training.values())
        if found.calibration:
            _check_calibration(found.calibration)
        for wrong in found.worst:
            wrong.setdefault("heatmaps", [])  # of a file without them
        heatmaps = [each for wrong in found.worst for each in wrong["heatmaps"]]
        _ = [f"{each['class']}" for each in heatmaps], found.no_heatmaps + ""
        for picture in [*found.worst, *found.samples, *heatmaps]:
            for name in {"jpeg", "before", "after"} & picture.keys():
                base64.b64decode(picture[name], validate=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        raise UserError(
            f"{path}: cannot be read; train.py --evaluate --report --output-dir {folder} writes it again"
        ) from None
    return found


def encode_picture(picture: Image.Image) -> str:
    """A small JPEG file of an RGB image in base64; changes the image."""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    picture.save(content, format="JPEG", quality=85)
    return base64.b64encode(content.getvalue()).decode()


def _check_calibration(found: dict[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError for what a page cannot show."""
    for quality in (found["before"], found["after"]):
        _ = [float(quality[name]) for name in ("ece", "nll", "brier")]
        _ = [(int(count), float(mean), float(right)) for count, mean, right in quality["bins"]]
    temperature = found["temperature"]
    _ = int(found["count"]), [*map(float, temperature if isinstance(temperature, list) else [temperature])]
    _ = [(float(least), float(share), float(right or 0)) for least, share, right in found["answered"]]


def _accuracy(entry: dict[str, Any]) -> float:
    return float(entry["correct"] / entry["count"]) if entry["count"] else 2.0  # a class without images comes last
