"""`--class-weights`: the factor of each class in the loss."""

import hashlib
from pathlib import Path

import numpy as np

from utils.data.formats.label_rows import read_weight
from utils.data.formats.tables import read_table
from utils.data.images.manifest import Manifest
from utils.data.loaders.sampler import image_weights
from utils.errors import UserError, some
from utils.options.resolved import ResolvedConfig
from utils.text import count


def class_weights(config: ResolvedConfig, train: Manifest) -> tuple[float, ...] | None:
    """The factors in label order, (num_classes,); None for 1 each.

    `auto` is 1 / (number of classes x share of the class), scikit-learn's `balanced`: their mean over an epoch's images
    is 1. With `--balance` the share is that of the images that come. Outputs that the data has no class for have 1.

    Raises:
        UserError: the file cannot be read, or does not name each class once.
    """
    if config.class_weights == "none":
        return None
    rest = (1.0,) * (config.num_classes - len(train.classes))
    if config.class_weights != "auto":
        return _read(Path(config.class_weights), train.classes) + rest
    shares = train.class_counts(image_weights(train, config.balance))
    with np.errstate(divide="ignore"):
        factors = np.where(shares > 0, shares.sum() / (len(shares) * shares), 1.0)
    return tuple(factors.tolist()) + rest


def weights_identity(config: ResolvedConfig) -> dict[str, str]:
    """What must be the same for a resume: none, auto, or a digest of the file."""
    if config.class_weights in ("none", "auto"):
        return {"--class-weights": config.class_weights}
    try:
        content = Path(config.class_weights).read_bytes()
    except OSError as error:
        raise _unreadable(config.class_weights, error) from None
    return {"--class-weights": hashlib.sha256(content).hexdigest()[:12]}


def _read(path: Path, classes: tuple[str, ...]) -> tuple[float, ...]:
    if not path.is_file():
        raise UserError(f"--class-weights {path}: no such file; give none, auto, or a CSV with a row class,weight each")
    table = read_table(path)
    at, weight_at = table.column("class", "label"), table.column("weight")
    if at is None or weight_at is None:
        raise UserError(
            f"--class-weights {path}: has the columns {some([repr(name) for name in table.columns])}; it needs class "
            "and weight"
        )
    found: dict[str, float] = {}
    for line, row in zip(table.lines, table.rows, strict=True):
        if row[at] not in classes or row[at] in found:
            what = "again" if row[at] in found else f"which is none of the {count(len(classes), 'class')} of train"
            raise UserError(f"--class-weights {path}: line {line} has {row[at]!r}, {what}; correct or remove the line")
        found[row[at]] = read_weight(path, line, row[weight_at])
    if missing := [name for name in classes if name not in found]:
        raise UserError(f"--class-weights {path}: has no weight of {some(missing)}; add a row class,weight")
    return tuple(found[name] for name in classes)


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"--class-weights {path}: cannot be read ({error.strerror}); check its permissions")
