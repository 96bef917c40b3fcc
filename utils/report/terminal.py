"""A run as text for a terminal: its state, its last values, and its curves in block characters."""

import itertools
import shutil
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from utils.errors import escape_control_chars
from utils.figures import figure, is_in_lines, other_figures
from utils.report.output_folder import RunInfo, number, weighted_mean

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 5  # of a large curve
LABEL = 12  # columns before a curve
CURVES = (  # title, key of metrics.jsonl, format, rows
    ("train loss", "train/loss", "{:.4f}", ROWS),
    ("val top-1", "val/top1", "{:.2f} %", ROWS),
    ("EMA top-1", "val/ema_top1", "{:.2f} %", 1),
    ("EMA mAP", "val/ema_map", "{:.2f} %", 1),
    ("lr", "lr", "{:.4g}", 1),
    ("images/s", "images_per_second", "{:,.0f}", 1),
    ("data wait", "data_wait", "{:.1%}", 1),
)
TABLE_LINES = 20  # without the headings
LEFT_OUT = "..."  # a line in place of some
TRAINING = ("train/loss", "images_per_second", "data_wait")
COLUMNS = (  # of the table of epochs: title, key, format
    ("train loss", "train/loss", "{:.4f}"),
    ("val loss", "val/loss", "{:.4f}"),
    ("top-1", "val/top1", "{:.2f} %"),
    ("top-5", "val/top5", "{:.2f} %"),
    ("EMA top-1", "val/ema_top1", "{:.2f} %"),
    ("EMA mAP", "val/ema_map", "{:.2f} %"),
    ("images/s", "images_per_second", "{:,.0f}"),
    ("data wait", "data_wait", "{:.1%}"),
)


def screen(run: RunInfo) -> list[str]:
    """The run in lines that fit the terminal."""
    columns = shutil.get_terminal_size().columns
    lines, drawn = headline(run), run.without_remainders()
    for title, key, show, rows in (*CURVES, *_other_curves(run.metrics, run.best_by)):
        if values := drawn.weighted(key):
            lines += _curve(title, values, show, rows, columns)
    if not run.metrics:
        lines.append("no log interval yet")
    return [line[: columns - 1].rstrip() for line in lines]


def _other_curves(records: Sequence[dict[str, Any]], best_by: str) -> list[tuple[str, str, str, int]]:
    """As `CURVES`, of figures that only some runs have."""
    names = (name for name in other_figures(records) if figure(name).in_lines or name == best_by)
    return [(figure(name).title, f"val/{name}", figure(name).show, 1) for name in names]


def headline(run: RunInfo) -> list[str]:
    """State and folder; progress, best figure and time."""
    facts = [f"{run.epochs}/{run.config.get('epochs')} epochs", tqdm.format_interval(run.seconds)]
    if run.best_figure is not None:
        facts.append(f"best {' '.join(run.best_figure)}")
    if run.metrics:
        facts.append(f"step {run.metrics[-1]['step']:,}")
    return [f"{run.state}  {escape_control_chars(str(run.folder))}", "  ".join(facts)]


def record_line(record: dict[str, Any], best_by: str) -> str:
    """A record of metrics.jsonl as one line, without curves."""
    facts = [f"epoch {record['epoch']}", f"step {record['step']}"]
    names = (("val loss", "val/loss", "{:.4f}", 1), *CURVES, *_other_curves([record], best_by))
    values = ((title, number(record, key), show) for title, key, show, _ in names)
    return "  ".join([*facts, *(f"{title} {show.format(value)}" for title, value, show in values if value is not None)])


def epoch_table(run: RunInfo) -> list[str]:
    """The evaluated epochs in `TABLE_LINES` at most: all, or the first, the best, the last and some between them.

    Losses and speeds of training are means over the epoch. `*` marks the evaluation that best.pt holds.
    """
    evaluations = run.evaluations
    epochs = [each["epoch"] for each in evaluations]
    best = max((at for at, epoch in enumerate(epochs) if run.best and epoch == run.best["epoch"]), default=None)
    chosen = (figure(run.best_by).title, f"val/{run.best_by}", figure(run.best_by).show)
    all_columns = COLUMNS if chosen in COLUMNS or chosen[1] == "val/loss" else (*COLUMNS[:-2], chosen, *COLUMNS[-2:])
    columns = [column for column in all_columns if any(column[1] in record for record in run.metrics)]
    has_average = any(key == "val/ema_top1" for _, key, _ in columns)  # the table fits 80 columns
    if has_average or not is_in_lines("top5", run.best_by, run.num_classes):
        columns = [column for column in columns if column[1] != "val/top5"]
    table = [["epoch", *(title for title, *_ in columns), ""]]
    for at in _choose_rows(len(epochs), best):
        if at is None:
            table.append([LEFT_OUT, *[""] * (len(columns) + 1)])
            continue
        values = [
            _training_mean(run, key, epochs[at]) if key in TRAINING else number(evaluations[at], key)
            for _, key, _ in columns
        ]
        texts = ["" if value is None else show.format(value) for value, (*_, show) in zip(values, columns, strict=True)]
        table.append([str(epochs[at]), *texts, "*" if at == best else ""])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in table]


def _choose_rows(count: int, best: int | None) -> list[int | None]:
    """Positions of `count` rows for `TABLE_LINES` at most, at equal distances; None where two or more are left out."""
    found: list[int | None] = []
    for most in range(min(count, TABLE_LINES), 0, -1):
        evenly = {round(at * (count - 1) / max(most - 1, 1)) for at in range(most)}
        shown = sorted(evenly if best is None else evenly | {best})
        found = list(shown[:1])
        for before, at in itertools.pairwise(shown):
            found += [before + 1] if at - before == 2 else [None] if at - before > 2 else []
            found.append(at)
        if len(found) <= TABLE_LINES:
            break
    return found


def _training_mean(run: RunInfo, key: str, epoch: int) -> float | None:
    """Of a key of log intervals in an epoch; None without a finite value."""
    found = run.weighted(key, epoch)
    return weighted_mean(*zip(*found, strict=True)) if found else None


def _curve(title: str, weighted: Sequence[tuple[float, float]], show: str, rows: int, columns: int) -> list[str]:
    """A title with the last value, and the curve; a large one after a blank line, its extremes beside it."""
    width = max(columns - LABEL - 14, 10)
    values, weights = [value for value, _ in weighted], [weight for _, weight in weighted]
    drawn = draw_blocks(_fit(values, width, weights), rows)
    last = show.format(values[-1])
    if rows == 1:
        return [f"{title:<{LABEL}}{drawn[0]}  {last}"]
    ends = [show.format(max(values)), *[""] * (rows - 2), show.format(min(values))]
    lines = [f"{end:>{LABEL - 2}}  {line}" for end, line in zip(ends, drawn, strict=True)]
    return ["", f"{title}  {last}", *lines]


def _fit(values: Sequence[float], width: int, weights: Sequence[float] | None = None) -> list[float]:
    """`width` values: the means of parts with equally many, or each value several times."""
    edges = [(len(values) * at // width, -(-len(values) * (at + 1) // width)) for at in range(width)]
    return [weighted_mean(values[start:end], weights and weights[start:end]) for start, end in edges]


def draw_blocks(values: Sequence[float], rows: int) -> list[str]:
    """A bar for each value, in `rows` lines of block characters, from the least value at the bottom to the largest."""
    low, high = min(values), max(values)
    levels = rows * (len(BLOCKS) - 1)
    heights = [1 + round((value - low) / (high - low) * (levels - 1)) if high > low else 1 for value in values]
    return [
        "".join(BLOCKS[min(max(height - row * 8, 0), 8)] for height in heights).rstrip()
        for row in reversed(range(rows))
    ]  # fmt: skip
