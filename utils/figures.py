"""Names of the figures of an evaluation, as lines and reports show them, and which of two values is better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Task = Literal["multiclass", "multilabel"]  # an image has one class, or any number


class Figure(NamedTuple):
    """How a figure is shown and compared.

    Attributes:
        title: in lines and charts.
        show: its format.
        higher_is_better: otherwise lower values are.
        in_lines: whether lines have it; otherwise only those of a run with `--best-by` for it.
        min_classes: of fewer it says nothing, and lines do not have it.
        tasks: whose evaluations have it.
    """

    title: str
    show: str = "{:.2f} %"
    higher_is_better: bool = True
    in_lines: bool = True
    min_classes: int = 1
    tasks: tuple[Task, ...] = ("multiclass", "multilabel")


# By the name in evaluation.json. Figures of other classes in `EVAL_METRICS` are percent under their own name.
FIGURES = {
    "top1": Figure("top-1", tasks=("multiclass",)),
    "top5": Figure("top-5", min_classes=6, tasks=("multiclass",)),
    "loss": Figure("loss", "{:.4f}", higher_is_better=False),
    "macro_recall": Figure("macro recall", in_lines=False),
    "macro_precision": Figure("macro precision", in_lines=False),
    "macro_f1": Figure("macro F1", in_lines=False),
    "auc": Figure("AUC", in_lines=False, tasks=("multiclass",)),
    "average_precision": Figure("average precision", in_lines=False, tasks=("multiclass",)),
    "map": Figure("mAP", tasks=("multilabel",)),
    "micro_f1": Figure("micro F1", tasks=("multilabel",)),
}
OF_TWO_CLASSES = ("auc", "average_precision")  # of images of both
_IN_ALL_TABLES = ("top1", "top5", "loss")
_OF_VAL, _OF_EMA = "val/", "val/ema_"  # how keys of metrics.jsonl begin
THRESHOLDS = "thresholds"  # of the classes, beside the figures of an evaluation: a list
_NO_FIGURES = ("count", "seconds", THRESHOLDS)
MAIN_FIGURE: dict[Task, str] = {"multiclass": "top1", "multilabel": "map"}


def figure(name: str) -> Figure:
    """`top1` -> its record."""
    return FIGURES.get(name, Figure(name.replace("_", " ")))


def describe_figure(name: str, value: float) -> str:
    """`top1`, 97.5 -> "top-1 97.50 %"."""
    return f"{figure(name).title} {figure(name).show.format(value)}"


def is_better(name: str, value: float | None, other: float | None) -> bool:
    """Whether a value of a figure is better than another one. None is the worst, then what is not a number."""
    if value is None or other is None:
        return value is not None
    if math.isnan(value) or math.isnan(other):
        return not math.isnan(value)
    return value > other if figure(name).higher_is_better else value < other


def better_network(evaluation: Mapping[str, Any], name: str, prefix: str = _OF_VAL) -> str:
    """`model` or `model_ema`, which is better by the figure `name`; `model` where they are alike or one is missing.

    Args:
        prefix: of the keys: `val/` in metrics.jsonl, none in evaluation.json.
    """
    model, average = evaluation.get(prefix + name), evaluation.get(f"{prefix}ema_{name}")
    return "model_ema" if is_better(name, average, model) else "model"


def better_value(evaluation: Mapping[str, Any], name: str) -> float | None:
    """The value of the better network in a line of metrics.jsonl; None where it has none."""
    network = better_network(evaluation, name)
    value = evaluation.get((_OF_EMA if network == "model_ema" else _OF_VAL) + name)
    return None if value is None else float(value)


def figures_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value of the model's figures in a line of metrics.jsonl, in its order."""
    names = (key.removeprefix(_OF_VAL) for key in evaluation if key.startswith(_OF_VAL) and not key.startswith(_OF_EMA))
    return {name: evaluation[_OF_VAL + name] for name in names if name not in _NO_FIGURES}


def is_in_lines(name: str, best_by: str, num_classes: float) -> bool:
    """Whether lines of a run with `--best-by` and a number of classes have the figure `name`."""
    return name == best_by or (figure(name).in_lines and num_classes >= figure(name).min_classes)


def describe_figures(
    evaluation: Mapping[str, Any], best_by: str, num_classes: int, without: Sequence[str] = ()
) -> list[str]:
    """What a line shows of an evaluation: a text for each figure but some."""
    found = {name: value for name, value in figures_of(evaluation).items() if name not in without}
    return [describe_figure(name, value) for name, value in found.items() if is_in_lines(name, best_by, num_classes)]


def other_figures(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names in lines of metrics.jsonl beside those that all tables have."""
    return list(dict.fromkeys(name for record in records for name in figures_of(record) if name not in _IN_ALL_TABLES))
