"""Output of a benchmark: its table, its verdict as text, benchmark.json and benchmark.png.

Keys of benchmark.json besides the facts about the run and the machine. Rates are in images/s. What was not measured is
null.

- `alone`, `training`: rates of each loader without a training step, and of the training step with its batches:
  {"median", "min", "max", "windows"}. `alone.files` is reading without decoding, `training.synthetic` the step on a
  synthetic batch.
- `dali_throughput`, `pytorch_throughput`, `timm_throughput`, `synthetic_throughput`: medians of `training`. DALI's is
  that of its decode path which trains faster.
- `ratio`: dali_throughput / pytorch_throughput. `real_to_synthetic`: dali_throughput / synthetic_throughput; what
  exceeds 1 is noise.
- `where_dali_wins`, `where_dali_loses`: sentences that compare that decode path with each loader that is not `dali`.
  Time to the first batch and GPU memory are the larger of both decode paths, as the first one also loads the library.
- `sources`: for each of these figures its `path`, the loaders and decode paths that it is of, and its `measurement`,
  the keys that it is computed from.
- `verdict`: `bound`, `limit` and `share` by the rules of verdict.py; `feed`, the loader that they are of; `summary`,
  the cause and its evidence; `advice`, the remedies.
- `cpu_seconds_per_1000_images`, `cpu_cores_busy`: of each loader alone, worker processes included.
- `data_wait`: of `training`, as in metrics.jsonl.
- `first_batch_seconds`, `gpu_memory_mb`: measured once, while the loader is opened.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.benchmark.verdict import CACHED, FLAGS, SYNTHETIC, TITLES, Measurements, Rate, Verdict, show_share
from utils.files import atomic_write_bytes
from utils.text import count

LABELS_AT = 1.2  # right end of the numbers in the chart, in parts of the longest bar
COLORS = {  # Okabe and Ito's
    "dali-fused": "#0072B2", "dali-full": "#56B4E9", "cached": "#F0E442", "stock": "#009E73", "torch": "#E69F00",
    "timm": "#CC79A7",
}  # fmt: skip


def introduction(facts: dict[str, Any]) -> str:
    """What is going to be measured, in three lines."""
    images = (
        f"{count(facts['num_images'], 'image')}{', generated' if facts['generated'] else ''}, "
        f"{count(facts['num_classes'], 'class')}, "
        f"mean {facts['image_width']:.0f} x {facts['image_height']:.0f} px, {facts['image_bytes'] / 1000:.0f} KB"
    )
    return f"{_headline(facts)}\n{facts['device_name']}, CPU threads per loader: {facts['workers']}\n{images}"


def benchmark_json(facts: dict[str, Any], measurements: Measurements, verdict: Verdict) -> dict[str, Any]:
    """The content of benchmark.json: `facts` about what was measured, then the measurements, in the units above."""
    loaders = {loader.name.replace("-", "_"): loader for loader in measurements.loaders}
    dali = loaders[verdict.loader.replace("-", "_")].training.median if verdict.loader.startswith("dali") else None
    pytorch, timm_rate = (loaders[name].training.median if name in loaders else None for name in ("torch", "timm"))
    synthetic = measurements.synthetic.median
    return facts | {
        "pytorch_throughput": pytorch,
        "dali_throughput": dali,
        "timm_throughput": timm_rate,
        "synthetic_throughput": synthetic,
        "ratio": dali / pytorch if dali and pytorch else None,
        "real_to_synthetic": dali / synthetic if dali else None,
        "where_dali_wins": verdict.where_dali_wins,
        "where_dali_loses": verdict.where_dali_loses,
        "sources": _sources(measurements, verdict),
        "warnings": verdict.warnings,
        "verdict": {
            "bound": verdict.bound,
            "share": verdict.share,
            "limit": verdict.limit,
            "feed": verdict.loader,
            "summary": verdict.summary,
            "advice": verdict.advice,
        },
        "alone": {"files": _rate(measurements.files)} | {name: _rate(loader.alone) for name, loader in loaders.items()},
        "training": {"synthetic": _rate(measurements.synthetic)}
        | {name: _rate(loader.training) for name, loader in loaders.items()},
        "data_wait": {name: loader.data_wait for name, loader in loaders.items()},
        "cpu_seconds_per_1000_images": {name: loader.cpu_seconds for name, loader in loaders.items()},
        "cpu_cores_busy": {name: loader.cores_busy for name, loader in loaders.items()},
        "first_batch_seconds": {name: loader.first_batch for name, loader in loaders.items()},
        "gpu_memory_mb": {name: loader.gpu_memory for name, loader in loaders.items()},
    }


def _sources(measurements: Measurements, verdict: Verdict) -> dict[str, dict[str, str | None]]:
    """What each figure is of, and from which measurement; null for a figure that is null."""
    names = [loader.name for loader in measurements.loaders]
    dali = verdict.loader if verdict.loader.startswith("dali") else None
    others = [name for name in names if not name.startswith("dali") and name != CACHED]
    synthetic = "synthetic images, no loader"

    def source(path: str | None, measurement: str) -> dict[str, str | None]:
        return {"path": path, "measurement": measurement if path else None}

    def path(name: str | None) -> str | None:
        return _path(name) if name in names else None

    def median(name: str | None) -> str:
        return f"training.{(name or '').replace('-', '_')}.median"

    both = f"{path(dali)} / {path('torch')}" if dali and "torch" in names else None
    compared = f"{path(dali)} against {', '.join(map(_path, others))}" if dali and others else None
    claims = "alone, training, cpu_seconds_per_1000_images, first_batch_seconds, gpu_memory_mb"
    return {
        "pytorch_throughput": source(path("torch"), median("torch")),
        "dali_throughput": source(path(dali), median(dali)),
        "timm_throughput": source(path("timm"), median("timm")),
        "synthetic_throughput": source(synthetic, median("synthetic")),
        "ratio": source(both, "dali_throughput / pytorch_throughput"),
        "real_to_synthetic": source(
            f"{path(dali)} / {synthetic}" if dali else None, "dali_throughput / synthetic_throughput"
        ),
        "where_dali_wins": source(compared, claims),
        "where_dali_loses": source(compared, claims),
    }


def _path(name: str) -> str:
    return f"{TITLES[name]} ({FLAGS.get(name, 'timm.data.create_loader')})"


def _rate(rate: Rate) -> dict[str, Any]:
    windows = rate.windows
    return {"median": rate.median, "min": min(windows), "max": max(windows), "windows": list(windows)}


def table(measurements: Measurements) -> str:
    """All measurements, aligned; rates in images/s, as the median and the range of the windows."""
    titles = "|alone, images/s|training, images/s|of synthetic|data wait|CPU s/1,000|first batch|GPU MB"
    rows = [
        titles.split("|"),
        [SYNTHETIC, "", str(measurements.synthetic), "100.0%", "", "", "", ""],
        ["files, not decoded", str(measurements.files), "", "", "", "", "", ""],
    ]
    for loader in measurements.loaders:
        memory = "" if loader.gpu_memory is None else f"{loader.gpu_memory:,.0f}"
        training = [
            str(loader.training),
            show_share(loader.training, measurements.synthetic),
            f"{loader.data_wait:.1%}",
        ]
        costs = [f"{loader.cpu_seconds:.2f}", f"{loader.first_batch:.1f} s", memory]
        rows.append([TITLES[loader.name], str(loader.alone), *training, *costs])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(cells))
        for cells in (zip(line, widths, strict=True) for line in lines)
    )


def format_verdict(verdict: Verdict) -> str:
    """The verdict for people."""
    cause, *evidence = verdict.summary
    remedy = " ".join(verdict.advice) or "None follows from these measurements."
    parts = ["Verdict", cause, f"Evidence: {' '.join(evidence)}", f"Remedy: {remedy}"]
    lists = {"Where DALI wins": verdict.where_dali_wins, "Where DALI loses": verdict.where_dali_loses,
             "Warnings": verdict.warnings}  # fmt: skip
    for title, lines in lists.items():
        if lines:
            parts += [f"{title}:", *(f"  - {line}" for line in lines)]
    return "\n".join(parts)


def draw_chart(path: Path, facts: dict[str, Any], measurements: Measurements) -> None:
    """Write `create_chart` as PNG, 1,200 px wide."""
    write_png(path, create_chart(facts, measurements))


def create_chart(facts: dict[str, Any], measurements: Measurements) -> Figure:
    """Bars of the medians, lines from the slowest to the fastest window; a dashed line is the synthetic step."""
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(measurements.loaders)), dpi=120, layout="constrained")
    alone, training = figure.subplots(1, 2, sharey=True)
    _draw_panel(alone, "Loader alone", measurements, [loader.alone for loader in measurements.loaders])
    _draw_panel(training, "Training on real images", measurements, [loader.training for loader in measurements.loaders])
    figure.suptitle(_headline(facts), x=0.01, ha="left", fontsize=13, fontweight="bold")
    versions = facts["versions"]
    figure.supxlabel(
        f"{facts['device_name']}, CPU threads per loader: {facts['workers']}.  DALI {versions['dali']}, "
        f"torch {versions['torch']}, timm {versions['timm']}.  "
        f"Medians of {facts['windows']} windows, lines: their range.",
        x=0.01, ha="left", fontsize=8, color="#555555",
    )  # fmt: skip
    return figure


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure atomically as PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    atomic_write_bytes(path, content.getvalue())


def _draw_panel(axes: Axes, title: str, measurements: Measurements, rates: Sequence[Rate]) -> None:
    names, medians = [loader.name for loader in measurements.loaders], [rate.median for rate in rates]
    below = [rate.median - min(rate.windows) for rate in rates]
    above = [max(rate.windows) - rate.median for rate in rates]
    axes.barh(
        [TITLES[name] for name in names], medians, xerr=[below, above], height=0.62,
        color=[COLORS[name] for name in names], error_kw={"ecolor": "#222222", "elinewidth": 1.2},
    )  # fmt: skip
    synthetic, limit = (
        measurements.synthetic.median,
        max(*(max(rate.windows) for rate in rates), measurements.synthetic.median),
    )
    for row, rate in enumerate(rates):  # in a column at the right, which neither bars nor the dashed line reach
        axes.text(LABELS_AT * limit, row, f"{rate.median:,.0f}", ha="right", va="center", fontsize=9)
    axes.axvline(
        synthetic, color="#222222", linestyle="--", linewidth=1.2, label=f"training step alone: {synthetic:,.0f}"
    )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("images/s", fontsize=9)
    axes.set_xlim(0, LABELS_AT * limit)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if not axes.yaxis_inverted():  # the axis is shared
        axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, borderaxespad=0.2)


def _headline(facts: dict[str, Any]) -> str:
    precision = "float32" if facts["amp"] == "none" else facts["amp"]
    ways = {"compile": "compiled", "fused_layers": "fused layers", "cuda_graph": "as a CUDA graph"}
    compiled = "".join(f", {way}" for key, way in ways.items() if facts[key])
    others = "" if facts["optimizer"] == "sgd" else f", {facts['optimizer']}"
    others += f", teacher {facts['teacher']}" if facts["teacher"] else ""
    return f"{facts['arch']}, {precision}{others}{compiled}, batch {facts['batch_size']}, {facts['image_size']} px"
