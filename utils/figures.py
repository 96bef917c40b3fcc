"""Names of the figures of an evaluation, as lines and reports show them."""

from collections.abc import Iterable, Mapping
from typing import Any

# Name in evaluation.json -> title and format. All others are percent under their own name.
FIGURES = {"top1": ("top-1", "{:.2f} %"), "top5": ("top-5", "{:.2f} %"), "loss": ("loss", "{:.4f}")}
_OF_VAL, _OF_EMA = "val/", "val/ema_"  # how keys of metrics.jsonl begin
_NO_FIGURES = ("count", "seconds")


def title_and_format(name: str) -> tuple[str, str]:
    """`top1` -> ("top-1", "{:.2f} %")."""
    return FIGURES.get(name, (name.replace("_", " "), "{:.2f} %"))


def describe_figure(name: str, value: float) -> str:
    """`top1`, 97.5 -> "top-1 97.50 %"."""
    title, show = title_and_format(name)
    return f"{title} {show.format(value)}"


def figures_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value of the model's figures in a line of metrics.jsonl, in its order."""
    names = (key.removeprefix(_OF_VAL) for key in evaluation if key.startswith(_OF_VAL) and not key.startswith(_OF_EMA))
    return {name: evaluation[_OF_VAL + name] for name in names if name not in _NO_FIGURES}


def other_figures(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names in lines of metrics.jsonl beside those of `FIGURES`."""
    return list(dict.fromkeys(name for record in records for name in figures_of(record) if name not in FIGURES))
