"""The report of some runs: one HTML page that needs nothing else, from their output folders (page.html, page.css)."""

import dataclasses
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jinja2
from tqdm import tqdm

from utils import __version__
from utils.figures import figure, other_figures
from utils.options.config import flags_with
from utils.options.flags import flag
from utils.options.rates import Scaling, lr_factor
from utils.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Series, line_chart
from utils.report.output_folder import RunInfo, number
from utils.report.pictures import MAX_CLASSES, Pictures, read_pictures
from utils.report.run_story import PARTS, marks, notes, points, steps_before, steps_per_epoch, time_parts, wait_verdict
from utils.text import count

PAGE = "report.html"  # of `train.py --report`, in the output folder
TEMPLATES = Path(__file__).parent
SYMBOLS = {"finished": "✓", "running": "▶", "stopped": "❚❚", "died": "✕", "unknown": "?"}
NO_BREAK = "\N{NO-BREAK SPACE}"
NAMELESS = ("output_dir", "report", *flags_with(of_launch=True))  # flags that say nothing about what was trained


class _ChartKind(NamedTuple):
    title: str
    key: str
    show: Callable[[float], str]
    options: dict[str, bool]


def _percent(value: float) -> str:
    return f"{value:.3g} %"


CHARTS = (
    _ChartKind("Training loss", "train/loss", "{:.3g}".format, {"cuts_peaks": True}),
    _ChartKind("Validation loss", "val/loss", "{:.3g}".format, {"cuts_peaks": True}),
    _ChartKind("Validation top-1", "val/top1", _percent, {}),
    _ChartKind("Validation top-1, moving average", "val/ema_top1", _percent, {}),
    _ChartKind("Validation mAP, moving average", "val/ema_map", _percent, {}),
    _ChartKind("Learning rate", "lr", "{:.3g}".format, {"from_zero": True, "may_be_log": True}),
    _ChartKind("Images/s", "images_per_second", "{:,.0f}".format, {"from_zero": True}),
    _ChartKind("Data wait", "data_wait", "{:.1%}".format, {"from_zero": True}),
    _ChartKind("Gradient norm", "grad_norm", "{:.3g}".format, {"from_zero": True, "cuts_peaks": True}),
    _ChartKind("GPU memory, MB", "gpu_memory_mb", "{:,.0f}".format, {"from_zero": True}),
)


@dataclasses.dataclass(frozen=True)
class Story:
    """One run, as page.html shows it.

    Attributes:
        number: from 0, which chooses color and dashes.
        name: short, no two the same.
        pictures: content of report.json; None if there is none.
    """

    number: int
    name: str
    run: RunInfo
    pictures: Pictures | None

    def headline(self) -> dict[str, str]:
        """The figures that a reader wants first."""
        speed = self.run.speed("images_per_second")
        return {
            "epochs": f"{self.run.epochs} of {self.run.config.get('epochs')}",
            "time": tqdm.format_interval(self.run.seconds),
            "images/s": "not known yet" if speed is None else f"{speed:,.0f}",
            "data wait": wait_verdict(self.run),
        }

    @property
    def best_epoch(self) -> int | None:
        """The epoch whose weights best.pt holds; None if it is not known."""
        return None if self.run.best is None else self.run.best["epoch"]

    @property
    def peak_lr(self) -> str:
        """The learning rate in force after the warmup, "" where the files do not say."""
        config, starts = self.run.config, self._starts
        scaling = config.get("lr_scaling", "linear")  # Brisk 0.1 had no other
        lr, batch_size, batches = (number(config, name) for name in ("lr", "batch_size", "grad_accum_steps"))
        processes = number(starts[-1], "processes") if starts else None
        if not (lr and batch_size and batches and processes and scaling in get_args(Scaling)):
            return ""
        return f"{lr * lr_factor(scaling, batch_size * batches * processes):g}"

    @property
    def _starts(self) -> list[dict[str, Any]]:
        return [event for event in self.run.events if event.get("event") == "started"]

    @property
    def symbol(self) -> str:
        """Of the state."""
        return SYMBOLS.get(self.run.state, SYMBOLS["unknown"])

    @property
    def notes(self) -> list[str]:
        """Sentences on what a reader must know."""
        return notes(self.run)

    @property
    def time_parts(self) -> list[Any]:
        """See `time_parts`."""
        return time_parts(self.run)

    @property
    def launches(self) -> list[str]:
        """One line for each start."""
        return [
            f"{_date(event)}: {count(int(number(event, 'processes') or 0), 'process')} on "
            f"{event.get('host')}, first step {steps_before(event) + 1}"
            for event in self._starts
        ]

    @property
    def facts(self) -> list[list[str]]:
        """The start-up block of the last launch, as names and texts."""
        for event in reversed(self.run.events):
            if isinstance(facts := event.get("facts"), list):
                return [list(map(str, fact)) for fact in facts if isinstance(fact, list) and len(fact) == 2]
        return []


def _date(event: dict[str, Any]) -> str:
    return datetime.datetime.fromtimestamp(number(event, "time") or 0.0).strftime("%Y-%m-%d %H:%M:%S")


def render(runs: Sequence[RunInfo]) -> str:
    """The page, as text of a UTF-8 file.

    Raises:
        UserError: a report.json is broken.
    """
    names = short_names([run.folder for run in runs])
    stories = [
        Story(count, name, run, read_pictures(run.folder))
        for count, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    flags = list(flag_rows(stories))
    return load_template("page.html").render(
        stories=stories,
        charts=create_charts(stories),
        class_rows=compare_classes(stories),
        differing=[row for row in flags if len(set(row[2])) > 1 and row[0] not in NAMELESS],
        flags=flags,
        num_flags=len({key for run in runs for key in run.config}),
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        duration=tqdm.format_interval,
        count=count,
        meanings=PARTS,
    )


def load_template(name: str) -> jinja2.Template:
    """A template of this folder, which escapes all values, with what head.html needs."""
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.finalize = lambda value: value.replace(" %", NO_BREAK + "%") if isinstance(value, str) else value
    template = environment.get_template(name)
    template.globals.update(
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        now=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )
    return template


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make them different."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def flag_rows(stories: Sequence[Story]) -> Iterator[tuple[str, str, list[str]]]:
    """Name of each flag, how the page shows it, and its values in the runs as in config.json; below `--lr` the rate."""
    for key in sorted({key for story in stories for key in story.run.config}):
        yield key, flag(key), [_shown(story.run.config.get(key)) for story in stories]
        if key == "lr":
            yield "peak_lr", "lr in force after the warmup", [story.peak_lr for story in stories]


def compare_classes(stories: Sequence[Story]) -> list[tuple[str, list[tuple[int, dict[str, Any]]]]]:
    """Each class, the lowest mean accuracy first, with the number and the entry of each run that has `Pictures`.

    An entry is {} where a run has no such class. [] unless there are two such runs.
    """
    found = {
        story.number: {each["name"]: each for each in story.pictures.classes} for story in stories if story.pictures
    }
    if len(found) < 2:
        return []
    names = dict.fromkeys(itertools.chain.from_iterable(found.values()))
    rows = [(name, [(number, entries.get(name, {})) for number, entries in found.items()]) for name in names]

    def mean(row: tuple[str, list[tuple[int, dict[str, Any]]]]) -> float:
        accuracies = [each["correct"] / each["count"] for _, each in row[1] if each.get("count")]
        return statistics.fmean(accuracies) if accuracies else math.inf

    return sorted(rows, key=mean)[:MAX_CLASSES]


def create_charts(stories: Sequence[Story]) -> list[Chart]:
    """The charts of all runs, by epoch, or by step where the files of a run do not say how long an epoch is."""
    runs = [story.run.without_remainders() for story in stories]
    units = [steps_per_epoch(run) for run in runs]
    x_title = "step" if None in units else "epoch"
    divisors = [1.0 if None in units or unit is None else unit for unit in units]
    end = max(
        (each["step"] / unit for run, unit in zip(runs, divisors, strict=True) for each in run.metrics), default=0
    )
    found = []
    others = other_figures(record for run in runs for record in run.metrics)
    kinds = [_ChartKind(f"Validation {figure(name).title}", f"val/{name}", _percent, {}) for name in others]
    for kind in (*CHARTS, *kinds):
        series = []
        for story, run, divisor in zip(stories, runs, divisors, strict=True):
            line = points(run, kind.key, divisor)
            series.append(Series(story.name, line, marks(run, divisor) if line else ()))
        chart = line_chart(kind.title, x_title, series, kind.show, end=end, **kind.options)
        if chart is not None:
            found.append(chart)
    return found


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
