"""Embeddings read back from the files of `scripts/predict.py`, and whether those of two splits fit each other."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from utils.errors import UserError, first_line
from utils.text import count

_NAMES = ("embeddings.npy", "embeddings.parquet")
_AGAIN = "write it again with scripts/predict.py --output-type embedding"


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Features of the images that could be read.

    Attributes:
        path: of the file.
        features: float32 (num_images, width).
        images: paths or names in shards, of each.
        targets: name of the class of each; "" where it is not known.
        network: what has computed them; see `utils.inference.embeddings.describe_embeddings`.
        top1: of the network itself on these images, percent; None where no class is known.
    """

    path: Path
    features: NDArray[np.float32]
    images: list[str]
    targets: list[str]
    network: dict[str, Any]
    top1: float | None

    def __len__(self) -> int:
        return len(self.images)


def read_embeddings(path: Path, name: str) -> Embeddings:
    """Read a .npy file with the .csv beside it, or a .parquet file; of a folder the one in it.

    Args:
        name: of the argument, for messages.

    Raises:
        UserError: there is none, it cannot be read, has no row, or does not fit the files beside it.
    """
    path = find_embeddings(path, name)
    facts_path = path.with_suffix(".json")
    try:
        facts = json.loads(facts_path.read_text())
        network, top1 = dict(facts["network"]), facts["top1"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else "other content"
        raise UserError(
            f"{name} {path}: {facts_path.name} beside it cannot be read ({reason}); keep both in one folder"
        ) from None
    try:
        rows, features = (_read_parquet if path.suffix == ".parquet" else _read_array)(path)
    except UserError:
        raise
    except ImportError:
        raise UserError(f"{name} {path}: a parquet file is read by the package pyarrow; pip install pyarrow") from None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"{name} {path}: cannot be read ({first_line(error, 200)}); {_AGAIN}") from None
    is_good = np.array([not row["error"] for row in rows], dtype=bool)
    if features.ndim != 2 or features.dtype != np.float32 or len(rows) != len(features):
        raise UserError(
            f"{name} {path}: is {features.dtype} {features.shape}, for {count(len(rows), 'row')} of "
            f"{path.with_suffix('.csv').name}; {_AGAIN}"
        )
    rows = [row for row, good in zip(rows, is_good, strict=True) if good]
    found = Embeddings(
        path, features[is_good], [row["path"] for row in rows], [row.get("target") or "" for row in rows], network, top1
    )
    if not len(found):
        raise UserError(f"{name} {path}: has no image that could be read; see the column error, and give other images")
    if not np.isfinite(found.features).all():
        raise UserError(f"{name} {path}: has features that are not finite; give another checkpoint to predict.py")
    return found


def find_embeddings(path: Path, name: str) -> Path:
    """The file that a path means: itself, or the one in a folder.

    Raises:
        UserError: there is none, or its name has another ending.
    """
    if path.is_dir():
        path = next((path / each for each in _NAMES if (path / each).is_file()), path)
    if not path.is_file():
        raise UserError(
            f"{name} {path}: no embeddings there; give the --output-dir of scripts/predict.py --output-type embedding"
        )
    if path.suffix not in (".npy", ".parquet"):
        raise UserError(f"{name} {path}: no file of embeddings; give embeddings.npy, embeddings.parquet or the folder")
    return path


def _read_array(path: Path) -> tuple[list[dict[str, Any]], NDArray[np.float32]]:
    with path.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"path", "error"} <= rows[0].keys():
        raise ValueError(f"{path.with_suffix('.csv').name} lacks a column")
    return rows, np.load(path)


def _read_parquet(path: Path) -> tuple[list[dict[str, Any]], NDArray[np.float32]]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    features = table["embedding"].combine_chunks()
    if not pyarrow.types.is_fixed_size_list(features.type):
        raise ValueError(f"embedding is {features.type}, not a list of fixed size")
    width = features.type.list_size
    rows = table.select([name for name in ("path", "target", "error") if name in table.column_names]).to_pylist()
    found = np.full((len(rows), width), np.nan, np.float32)
    found[features.is_valid().to_numpy(zero_copy_only=False)] = features.flatten().to_numpy().reshape(-1, width)
    return rows, found


def check_fit(train: Embeddings, val: Embeddings) -> None:
    """Raise UserError unless a probe of both means something."""
    if train.path.resolve() == val.path.resolve():
        raise UserError(f"TRAIN {train.path}: is VAL, too; give the embeddings of other images")
    for name, each in (("TRAIN", train), ("VAL", val)):
        if not any(each.targets):
            raise UserError(
                f"{name} {each.path}: the class of no image is known; give predict.py one folder a class, named as in "
                "training"
            )
    width, other = train.features.shape[1], val.features.shape[1]
    if width != other:
        raise UserError(
            f"TRAIN {train.path}: has {count(width, 'feature')} an image, VAL {val.path} {other:,}; give embeddings of "
            "one checkpoint"
        )
    for key in train.network.keys() | val.network.keys():
        if train.network.get(key) != val.network.get(key):
            raise UserError(
                f"TRAIN {train.path}: its {key} is {train.network.get(key)}, that of VAL {val.path} "
                f"{val.network.get(key)}; give embeddings of one checkpoint, with the same flags"
            )
    if len(classes := {*train.targets} - {""}) == 1:
        raise UserError(f"TRAIN {train.path}: has one class, {classes.pop()}; give the images of all classes")
