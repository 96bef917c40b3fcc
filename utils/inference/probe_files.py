"""The files of `scripts/probe.py`: probe.json, near_duplicates.csv, and the page with pictures of the pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.data.formats.folder import file_record
from utils.data.reading.decoding import upright_rgb
from utils.data.reading.reader import read_image
from utils.errors import UserError, first_line
from utils.files import atomic_write_text, check_writable, write_json
from utils.inference.embedding_files import Embeddings
from utils.inference.predictions import csv_text
from utils.inference.probe import Fit, Pair
from utils.report.duplicates import ShownPair, Side, render_duplicates
from utils.report.pictures import encode_picture

PROBE, DUPLICATES, PAGE = "probe.json", "near_duplicates.csv", "near_duplicates.html"
MAX_SHOWN = 200  # pairs of a page
COLUMNS = ("similarity", "split", "path", "target", "other_split", "other_path", "other_target")


class Probe(NamedTuple):
    """What was found; see `utils.inference.probe`."""

    neighbors: Mapping[int, float]
    regression: Mapping[float, Fit]
    threshold: float
    pairs: Sequence[Pair]
    counts: Mapping[str, int]

    @property
    def summary(self) -> str:
        """A line on the pairs."""
        found = ", ".join(f"{number:,} {where}" for where, number in self.counts.items())
        return f"near-duplicates, similarity {self.threshold:g} or more: {found}"


def prepare(folder: Path, with_page: bool) -> None:
    """Make the folder, and try what the end needs.

    Raises:
        UserError: the folder cannot be written, or the page not be made.
    """
    check_writable(folder)
    for name in (PROBE, DUPLICATES, *([PAGE] if with_page else [])):
        if (folder / name).is_dir():
            raise UserError(f"--output-dir {folder}: {name} in it is a folder; move it, or give another folder")
    if with_page:
        try:
            render_duplicates([], 0, "")
        except OSError as error:  # jinja2's, of a template that is missing, is one
            raise UserError(
                f"--report: no page can be made ({first_line(error)}); restore utils/report/, or leave --report out"
            ) from None


def write_probe(folder: Path, train: Embeddings, val: Embeddings, found: Probe, with_page: bool) -> list[str]:
    """Write the files; returns their names.

    Raises:
        UserError: the folder cannot be written any more.
    """
    splits = {"train": train, "val": val}
    result: dict[str, Any] = {
        "train": str(train.path),
        "val": str(val.path),
        "network": val.network,
        "num_train": len(train),
        "num_val": len(val),
        "top1": val.top1,
        "nearest_neighbors": [{"k": k, "top1": top1} for k, top1 in found.neighbors.items()],
        "logistic_regression": [{"C": strength, **fit._asdict()} for strength, fit in found.regression.items()],
        "threshold": found.threshold,
        "near_duplicates": {where.replace(" ", "_"): number for where, number in found.counts.items()},
    }
    try:
        write_json(folder / PROBE, result)
        atomic_write_text(folder / DUPLICATES, _table(splits, found.pairs))
        (folder / PAGE).unlink(missing_ok=True)  # of an earlier one, with other embeddings
        if with_page:
            shown = [_shown(splits, pair) for pair in found.pairs[:MAX_SHOWN]]
            page = render_duplicates(shown, sum(found.counts.values()), found.summary)
            atomic_write_text(folder / PAGE, page)
    except OSError as error:
        raise UserError(
            f"--output-dir {folder}: cannot be written ({error.strerror or first_line(error)}); give another folder"
        ) from None
    return [PROBE, DUPLICATES, *([PAGE] if with_page else [])]


def _table(splits: Mapping[str, Embeddings], pairs: Sequence[Pair]) -> str:
    rows: list[Sequence[Any]] = [COLUMNS]
    for pair in pairs:
        one, other = splits[pair.split], splits[pair.other_split]
        rows.append(
            (
                f"{pair.similarity:.6f}", pair.split, one.images[pair.row], one.targets[pair.row],
                pair.other_split, other.images[pair.other_row], other.targets[pair.other_row],
            )
        )  # fmt: skip
    return csv_text(rows)


def _shown(splits: Mapping[str, Embeddings], pair: Pair) -> ShownPair:
    def side(split: str, row: int) -> Side:
        each = splits[split]
        return Side(split, each.images[row], each.targets[row], _picture(each.images[row]))

    return ShownPair(pair.similarity, side(pair.split, pair.row), side(pair.other_split, pair.other_row))


def _picture(path: str) -> str:
    """A small picture of an image file in base64; "" of one in a shard, or that is gone."""
    try:
        return encode_picture(upright_rgb(read_image(file_record(path))))
    except Exception:  # Pillow's own, of many kinds: a page without a picture is better than none
        return ""
