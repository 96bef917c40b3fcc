"""Line charts: where lines, ticks and marks of several runs lie in one pair of axes, for page.html to draw as SVG."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from utils.report.output_folder import weighted_mean

WIDTH, HEIGHT = 420.0, 240.0  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 14.0, 36.0  # margins, which hold the tick labels; the left one at least
CHARACTER = 8.2  # width of one in a tick label, on average: 1e+03 has wide ones
LABEL_GAP = 6.0  # between a tick label and the axes
MAX_POINTS = 240  # of a line; more are averaged
DECADES = 6  # that a logarithmic axis covers below its largest value

Point = tuple[float, float | None]  # None where the value is not finite or not known


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis.

    Attributes:
        kind: killed, resumed or died.
        title: for people.
    """

    x: float
    kind: str
    title: str


@dataclasses.dataclass(frozen=True)
class Series:
    """One run's line, its points by ascending x."""

    name: str
    points: Sequence[Point]
    marks: Sequence[Mark] = ()


@dataclasses.dataclass(frozen=True)
class Line:
    """A series in the units of the drawing.

    Attributes:
        number: of the run, from 0, which chooses color and dashes.
        last: its last value, for people.
        path: of the mean, as SVG's `d`.
        band: around it, from the least to the largest value of what was averaged; "" if nothing was.
        dots: x, y and title of single points, where they are few.
        marks: x, kind and title.
    """

    number: int
    name: str
    last: str
    path: str
    band: str
    dots: list[tuple[float, float, str]]
    marks: list[tuple[float, str, str]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """One pair of axes.

    Attributes:
        lines: of the runs that have values.
        left: where the axes begin.
        x_ticks, y_ticks: positions of the labels in the units of the drawing, and labels.
        note: what of the values is not shown; "" if all is.
    """

    title: str
    x_title: str
    lines: list[Line]
    left: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    note: str

    @property
    def description(self) -> str:
        """What a screen reader says of it."""
        return f"{self.title} by {self.x_title}. " + "; ".join(f"{line.name}: last {line.last}" for line in self.lines)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` to positions from `start` to `end`; those beyond lie at the edge."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value."""
        value = min(max(value, self.low), self.high)
        low, high, at = (math.log10(each) if self.is_log else each for each in (self.low, self.high, value))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, count: int) -> list[float]:
        """At least `count` round values, or all powers of ten."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        unit = 10.0 ** math.ceil(math.log10(self.high - self.low))
        for step in (unit * factor for factor in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)):
            multiples = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
            if len(multiples) >= count:
                break
        return [each * step for each in multiples]


def line_chart(
    title: str,
    x_title: str,
    series: Sequence[Series],
    show: Callable[[float], str],
    *,
    end: float = 0.0,
    from_zero: bool = False,
    cuts_peaks: bool = False,
    may_be_log: bool = False,
) -> Chart | None:
    """The chart of all series; None if none has a value.

    Args:
        title: with the unit.
        series: one for each run, empty for a run without values.
        show: a value as text.
        end: of the horizontal axis, at least.
        from_zero: whether the vertical axis begins at 0.
        cuts_peaks: whether values far above the first ones are cut off, as of a loss that explodes.
        may_be_log: whether the vertical axis is logarithmic where the runs are more than a decade apart.
    """
    values = [y for each in series for _, y in each.points if y is not None]
    if not values:
        return None
    low, high, is_log = _limits(series, values, from_zero, cuts_peaks, may_be_log)
    y_scale = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log)
    y_ticks = [(y_scale(tick), show(tick)) for tick in y_scale.ticks(3)]
    left = max(LEFT, LABEL_GAP + CHARACTER * max(len(label) for _, label in y_ticks))
    ends = [x for each in series for x, _ in each.points]
    x_scale = Scale(min(0.0, *ends), max(*ends, end, 1e-9), left, WIDTH - RIGHT)
    above = sum(value > high for value in values)
    return Chart(
        title=title,
        x_title=x_title,
        lines=[
            _line(number, each, x_scale, y_scale, show, x_title)
            for number, each in enumerate(series)
            if any(y is not None for _, y in each.points)
        ],
        left=left,
        x_ticks=[_within(x_scale(tick), f"{tick:,g}") for tick in x_scale.ticks(4)],
        y_ticks=y_ticks,
        note=f"Values above {show(high)} lie at the upper edge: {above:,}." if above else "",
    )


def _within(x: float, label: str) -> tuple[float, str]:
    """The middle of a label at `x`, or where it ends with the drawing."""
    return min(x, WIDTH - CHARACTER * len(label) / 2), label


def _limits(
    series: Sequence[Series], values: Sequence[float], from_zero: bool, cuts_peaks: bool, may_be_log: bool
) -> tuple[float, float, bool]:
    """Ends of the vertical axis, and whether it is logarithmic."""
    low, high = min(values), max(values)
    of_runs = [[y for _, y in each.points if y is not None] for each in series]
    if cuts_peaks:
        high = min(high, 3 * statistics.median_low([abs(each[0]) for each in of_runs if each]) or high)
        low = min(low, high)
    peaks = [max(each) for each in of_runs if each]
    if may_be_log and min(peaks) > 0 and max(peaks) > 10 * min(peaks):
        return max(min(value for value in values if value > 0), high / 10**DECADES), high, True
    if from_zero:
        low = min(0.0, low)
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    return low if from_zero else low - margin, high if cuts_peaks and high < max(values) else high + margin, False


def _line(
    number: int, series: Series, x_scale: Scale, y_scale: Scale, show: Callable[[float], str], x_title: str
) -> Line:
    spans = [
        list(points) for is_known, points in itertools.groupby(series.points, lambda each: each[1] is not None)
        if is_known
    ]  # fmt: skip
    averaged = [_average([(x, y) for x, y in span if y is not None], len(series.points)) for span in spans]
    path, band, dots = "", "", []
    for buckets in averaged:
        means = [(x_scale(x), y_scale(mean)) for x, mean, _, _ in buckets]
        path += "M" + "L".join(f"{x:g} {y:g}" for x, y in means)
        if any(low < high for _, _, low, high in buckets):
            edge = [(x_scale(x), y_scale(high)) for x, _, _, high in buckets]
            edge += [(x_scale(x), y_scale(low)) for x, _, low, _ in reversed(buckets)]
            band += "M" + "L".join(f"{x:g} {y:g}" for x, y in edge) + "Z"
    if len(series.points) <= MAX_POINTS // 2:
        dots = [
            (x_scale(x), y_scale(y), f"{series.name}, {x_title} {x:.4g}: {show(y)}")
            for x, y in series.points if y is not None
        ]  # fmt: skip
    last = series.points[-1][1]
    marks = [(x_scale(mark.x), mark.kind, f"{series.name}: {mark.title}") for mark in series.marks]
    return Line(number, series.name, "not finite" if last is None else show(last), path, band, dots, marks)


def _average(points: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float, float, float]]:
    """At most about `MAX_POINTS` buckets of a line of `count` points: middle, mean, least and largest value.

    In a mean a point counts with its distance to the one before: a log interval with its steps.
    """
    size = math.ceil(count / MAX_POINTS)
    widths = [after - before for (before, _), (after, _) in itertools.pairwise(points)]
    widths = [*widths[:1], *widths] or [1.0]
    found = []
    for start in range(0, len(points), size):
        bucket, weights = points[start : start + size], widths[start : start + size]
        values = [y for _, y in bucket]
        middle = statistics.fmean(x for x, _ in bucket)
        found.append((middle, weighted_mean(values, weights), min(values), max(values)))
    return found
