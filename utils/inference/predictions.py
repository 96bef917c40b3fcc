"""The rows of predictions: as CSV, JSON lines, parquet or text, written in order.

Every rank encodes its own rows (`Columns.encode`), and rank 0 writes the pieces one behind the other.
"""

import csv
import dataclasses
import importlib.util
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from utils.data.images.manifest import SEVERAL
from utils.errors import UserError, escape_control_chars, readable
from utils.figures import Task
from utils.files import json_text

Format = Literal["csv", "jsonl", "parquet", "npy"]
OutputType = Literal["prob", "logit", "embedding"]
EMBEDDING_FORMATS: tuple[Format, ...] = ("npy", "parquet")  # the default first: parquet needs one more package
TOP = 5  # of the accuracy, besides 1
PER_CLASS, CONFUSION, ANSWERED, CALIBRATION = "per_class.csv", "confusion.csv", "min_prob.csv", "calibration.json"
RESULTS = (
    *("predictions.csv", "predictions.jsonl", "predictions.parquet", PER_CLASS, CONFUSION, ANSWERED, CALIBRATION),
    *("embeddings.csv", "embeddings.npy", "embeddings.parquet", "embeddings.json"),
)
UNKNOWN = "unknown"  # the label of an image whose likeliest class is below --min-prob


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """What the command line of scripts/predict.py says.

    Attributes:
        checkpoint: a file, or the output folder of a run.
        sources: see `utils.inference.inputs.list_inputs`.
        topk: classes for each image; there may be fewer.
        output_type: what the files hold; embeddings come with the probabilities.
        ema: whether to take the moving average of the weights; None for the better of the two.
        batch_size: images per process and batch; None for that of the run.
        workers: CPU threads per process; None for its share of the cores.
        output_dir: of the files; None prints the predictions as text.
        eval_flip: whether logits are means over an image and its mirror image.
        min_prob: least probability of an answer, 0 to 1; None answers always.
        calibrate: whether to fit the temperature of the checkpoint, and to predict nothing.
        heatmap: images that get a heat map, the first ones.
    """

    checkpoint: Path
    sources: Sequence[str]
    topk: int
    format: Format
    output_type: OutputType
    ema: bool | None
    batch_size: int | None
    workers: int | None
    device: str
    output_dir: Path | None
    eval_flip: bool
    min_prob: float | None = None
    calibrate: bool = False
    heatmap: int = 0

    @property
    def paths(self) -> list[Path]:
        """The files with a row for each image; [] if they are printed."""
        if self.output_dir is None:
            return []
        if self.output_type == "embedding":
            suffixes = ["csv", "npy"] if self.format == "npy" else [self.format]
            return [self.output_dir / f"embeddings.{suffix}" for suffix in suffixes]
        return [self.output_dir / f"predictions.{self.format}"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of some images.

    Attributes:
        indices: of the likeliest classes, likeliest first: int64 (num_images, topk).
        scores: probabilities or logits of these: float32 (num_images, topk).
        targets: true classes, `NO_TARGET` where they are not known: int64 (num_images,).
        errors: why an image could not be read; None for the others.
        embeddings: float32 (num_images, width), nan where an image could not be read; None if not asked for.
    """

    paths: Sequence[str]
    indices: NDArray[np.int64]
    scores: NDArray[np.float32]
    targets: NDArray[np.int64]
    errors: Sequence[str | None]
    embeddings: NDArray[np.float32] | None = None


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of predictions, and how rows become bytes.

    Attributes:
        format: of a file, or text for people.
        classes: names in label order. An output behind them has no label.
        output_type: what the scores are.
        has_targets: whether there are columns `target` and `correct`.
        width: of the column `embedding` of parquet; 0 for none.
        min_prob: an image whose likeliest class has a lower probability gets the label `UNKNOWN` without an index.
    """

    format: Format | Literal["text"]
    classes: Sequence[str]
    output_type: Literal["prob", "logit"]
    topk: int
    has_targets: bool
    width: int = dataclasses.field(default=0, kw_only=True)
    min_prob: float = dataclasses.field(default=0.0, kw_only=True)

    @property
    def names(self) -> list[str]:
        """Of the columns, in order."""
        top = [f"{name}{_suffix(k)}" for k in range(self.topk) for name in ("label", "index", self.output_type)]
        return ["path", *top, *(["target", "correct"] if self.has_targets else []), "error"]

    def encode(self, rows: Rows) -> bytes:
        """The rows as a piece of the file; without the heading of a CSV."""
        if self.format == "text":
            answers = zip(rows.paths, rows.errors, self._answers(rows), strict=True)
            lines = (escape_control_chars(f"{path}: {error or answer}") for path, error, answer in answers)
            return "".join(f"{readable(line)}\n" for line in lines).encode()
        values = self._values(rows)
        if self.format == "parquet":
            return self._encode_parquet(values, rows)
        if self.format == "jsonl":
            lines = (json_text(dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True))
            return "".join(f"{line}\n" for line in lines).encode()
        return csv_text(zip(*map(_spell, values.values()), strict=True)).encode()

    def heading(self) -> bytes:
        """First line of the file; none where the rows name the columns themselves."""
        return (",".join(self.names) + "\n").encode() if self.format == "csv" else b""

    def _values(self, rows: Rows) -> dict[str, list[Any]]:
        """Column name -> value of each image, None where there is none."""
        good = [error is None for error in rows.errors]
        is_sure = self._is_sure(rows)
        values: dict[str, list[Any]] = {"path": [readable(path) for path in rows.paths]}
        for k in range(self.topk):
            indices, scores = rows.indices[:, k].tolist(), rows.scores[:, k]
            # The shortest decimal number that is this float32, in all formats.
            numbers = [float(str(score)) for score in scores]
            labels = [self._label(index) for index in indices]
            if k == 0:
                labels = [label if sure else UNKNOWN for label, sure in zip(labels, is_sure, strict=True)]
                indices = _where(is_sure, indices)
            values[f"label{_suffix(k)}"] = _where(good, labels)
            values[f"index{_suffix(k)}"] = _where(good, indices)
            values[f"{self.output_type}{_suffix(k)}"] = _where(good, numbers)
        if self.has_targets:
            correct = (rows.indices[:, 0] == rows.targets).tolist()
            values["target"] = [self._label(target) for target in rows.targets.tolist()]
            values["correct"] = _where([*map(all, zip(good, rows.targets >= 0, is_sure, strict=True))], correct)
        return values | {"error": [error and readable(error) for error in rows.errors]}

    def _is_sure(self, rows: Rows) -> list[bool]:
        """Of each image, whether its likeliest class is an answer."""
        return [True] * len(rows.paths) if not self.min_prob else (rows.scores[:, 0] >= self.min_prob).tolist()

    def _answers(self, rows: Rows) -> list[str]:
        """The likeliest classes of each image and their scores."""
        ranked = [zip(*row, strict=True) for row in zip(rows.indices.tolist(), rows.scores.tolist(), strict=True)]
        answers = [
            ", ".join(self._answer(self._label(index) or f"output {index}", score) for index, score in row)
            for row in ranked
        ]
        is_sure = self._is_sure(rows)
        return [
            each if sure else f"{UNKNOWN}; the best are {each}" for each, sure in zip(answers, is_sure, strict=True)
        ]

    def _answer(self, name: str, score: float) -> str:
        return f"{name} {score:.1%}".replace("%", " %") if self.output_type == "prob" else f"{name} {score:.4g}"

    def _label(self, index: int) -> str | None:
        return self.classes[index] if 0 <= index < len(self.classes) else None

    def _encode_parquet(self, values: dict[str, Any], rows: Rows) -> bytes:
        import pyarrow as pa

        if rows.embeddings is not None:
            is_bad = pa.array([error is not None for error in rows.errors])
            flat = rows.embeddings.ravel()
            values["embedding"] = pa.FixedSizeListArray.from_arrays(flat, self.width, mask=is_bad)
        batch = pa.record_batch(values, schema=self.schema())
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            content: bytes = sink.getvalue().to_pybytes()
        return content

    def schema(self) -> Any:
        """Of a parquet file."""
        import pyarrow as pa

        kinds = {"index": pa.int32(), self.output_type: pa.float32(), "correct": pa.bool_()}
        return self._with_embedding([(name, kinds.get(name.partition("_")[0], pa.string())) for name in self.names])

    def _with_embedding(self, columns: list[tuple[str, Any]]) -> Any:
        import pyarrow as pa

        return pa.schema([*columns, *([("embedding", pa.list_(pa.float32(), self.width))] if self.width else [])])


def check_min_prob(options: PredictOptions, task: Task, classes: Sequence[str]) -> None:
    """Raise UserError, on all ranks, if `--min-prob` does not go with the checkpoint."""
    if options.min_prob is None:
        return
    given = f"--min-prob {options.min_prob:g}: CHECKPOINT {options.checkpoint}"
    if task == "multilabel":
        raise UserError(
            f"{given} gives an image any number of classes, and each has its threshold; leave it out", on_all_ranks=True
        )
    if UNKNOWN in classes:
        raise UserError(
            f"{given} has a class {UNKNOWN}, which means an image without an answer; leave it out, and compare the "
            "column prob",
            on_all_ranks=True,
        )


def require_pyarrow() -> None:
    """Raise UserError unless parquet files can be written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UserError("--format parquet: is written by the package pyarrow; pip install pyarrow") from None


def require_captum() -> None:
    """Raise UserError unless heat maps can be computed."""
    if importlib.util.find_spec("captum") is None:
        raise UserError(
            "the package captum is missing, which computes heat maps; pip install -r requirements-report.txt -c "
            "constraints.txt"
        )


def _suffix(k: int) -> str:
    return f"_{k + 1}" if k else ""


def _where(known: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value if is_known else None for is_known, value in zip(known, values, strict=True)]


def _spell(values: Sequence[Any]) -> list[Any]:
    """Values as a CSV has them: true and false as JSON."""
    return [str(value).lower() if isinstance(value, bool) else value for value in values]


@dataclasses.dataclass(frozen=True)
class MultilabelColumns(Columns):
    """Columns where an image has any number of classes: those that it has, then the score of each class.

    `Rows` has the scores of all classes in label order, and no indices. What the score of an output without a class
    says is left out.

    Attributes:
        thresholds: scores from which a class counts as predicted, one for each class.
    """

    thresholds: Sequence[float]

    @property
    def names(self) -> list[str]:
        return ["path", "labels", *(f"{self.output_type}_{name}" for name in self.classes), "error"]

    def _values(self, rows: Rows) -> dict[str, list[Any]]:
        good = [error is None for error in rows.errors]
        scores = rows.scores[:, : len(self.classes)]
        found = [
            [name for name, is_in in zip(self.classes, row, strict=True) if is_in] for row in scores >= self._least
        ]
        values: dict[str, list[Any]] = {"path": [readable(path) for path in rows.paths]}
        values["labels"] = _where(good, [SEVERAL.join(names) for names in found])
        for name, column in zip(self.names[2:-1], scores.T, strict=True):
            values[name] = _where(good, [float(str(score)) for score in column])
        return values | {"error": [error and readable(error) for error in rows.errors]}

    def _answers(self, rows: Rows) -> list[str]:
        """The classes of each image and their scores; without one the best, which is below its threshold."""
        answers = []
        for scores in rows.scores[:, : len(self.classes)]:
            found = np.flatnonzero(scores >= self._least).tolist()
            best = int(scores.argmax())
            shown = [self._answer(self.classes[index], scores[index]) for index in found or [best]]
            answers.append(", ".join(shown) if found else f"none of the classes; the best is {shown[0]}")
        return answers

    @property
    def _least(self) -> NDArray[np.float64]:
        return np.array(self.thresholds[: len(self.classes)])

    def schema(self) -> Any:
        import pyarrow as pa

        texts = ("path", "labels", "error")
        return self._with_embedding([(name, pa.string() if name in texts else pa.float32()) for name in self.names])


class _Lines(io.StringIO):
    """Lines of a csv.writer that end with a line feed."""

    def write(self, line: str) -> int:
        return super().write(line.removesuffix("\r\n") + "\n")


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Lines of a CSV."""
    # The writer quotes the characters of its own line ending only, so it has both: a file's name may contain them.
    lines = _Lines(newline="")
    csv.writer(lines, lineterminator="\r\n").writerows(rows)
    return lines.getvalue()
