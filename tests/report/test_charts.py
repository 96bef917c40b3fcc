"""Geometry of the charts: scales, ticks, averages, limits."""

import re
from collections.abc import Sequence

import pytest

from tests.harness import ROOT
from utils.report.charts import (
    CHARACTER,
    HEIGHT,
    LABEL_GAP,
    LEFT,
    MAX_POINTS,
    WIDTH,
    Chart,
    Mark,
    Scale,
    Series,
    _average,
    line_chart,
)


def chart(*series: Sequence[tuple[float, float | None]], **options: bool) -> Chart:
    found = line_chart("Loss", "epoch", [Series(f"run {n}", each) for n, each in enumerate(series)], str, **options)
    assert found is not None
    return found


def numbers(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path)]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 5, 10]),
        (0.0, 1.0, [0, 0.5, 1]),
        (1.2, 2.9, [1.5, 2, 2.5]),
        (0, 100, [0, 50, 100]),
        (-3, 3, [-2, 0, 2]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 1).ticks(3) == pytest.approx(ticks)


def test_a_scale_is_linear_or_logarithmic_and_ends_at_its_edges() -> None:
    linear, log = Scale(0, 10, 100, 0), Scale(0.1, 1000, 0, 4, is_log=True)
    assert [linear(value) for value in (-5, 0, 2.5, 10, 99)] == [100, 100, 75, 0, 0]
    assert [log(value) for value in (0, 0.1, 1, 1000)] == [0, 0, 1, 4]
    assert log.ticks(3) == pytest.approx([0.1, 1, 10, 100, 1000])


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    (line,) = chart([(1, 1.0), (2, None), (3, 2.0), (4, 3.0), (5, None)]).lines
    assert line.path.count("M") == 2
    assert line.last == "not finite"
    assert len(line.dots) == 3


def test_many_points_are_averaged_within_a_band() -> None:
    (line,) = chart([(x, float(x % 2)) for x in range(10 * MAX_POINTS)]).lines
    drawn = numbers(line.path)
    assert len(drawn) == MAX_POINTS
    assert len({y for _, y in drawn}) == 1, "each bucket has as many zeros as ones"
    assert {y for _, y in numbers(line.band)} > {max(y for _, y in numbers(line.band))}
    assert not line.dots
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in [*drawn, *numbers(line.band)])


def test_a_point_counts_with_its_distance_to_the_one_before() -> None:
    """As log intervals of 19 and 1 steps do."""
    points = [(20 * epoch + end, value) for epoch in range(MAX_POINTS) for end, value in ((19.0, 0.0), (20.0, 1.0))]
    means = [mean for _, mean, _, _ in _average(points, len(points))]
    assert means[1:] == [pytest.approx(0.05)] * (MAX_POINTS - 1)


def test_a_loss_that_explodes_does_not_flatten_the_others() -> None:
    found = chart([(1, 2.0), (2, 1.0)], [(1, 2.5), (2, 1e30)], [(1, 2.2), (2, 0.5)], cuts_peaks=True)
    assert found.note == f"Values above {3 * 2.2} lie at the upper edge: 1."
    ys = [y for _, y in numbers(found.lines[0].path)]
    assert max(ys) - min(ys) > HEIGHT / 10


def test_runs_a_decade_apart_have_a_logarithmic_axis() -> None:
    found = chart([(1, 0.5), (2, 0.0)], [(1, 50.0), (2, 5.0)], may_be_log=True, from_zero=True)
    assert [label for _, label in found.y_ticks] == ["1.0", "10.0"]
    assert chart([(1, 0.5), (2, 0.0)], may_be_log=True, from_zero=True).y_ticks[0][1] == "0.0"


def test_labels_have_room() -> None:
    low = line_chart("lr", "step", [Series("run", [(1e5, 1e-4), (1e6, 3e-4)])], "{:.5f}".format)
    assert low is not None
    assert low.left - LABEL_GAP >= CHARACTER * len("0.00010")
    assert all(x + CHARACTER * len(label) / 2 <= WIDTH for x, label in low.x_ticks)
    assert low.x_ticks[-1][1] == "1e+06"
    assert chart([(1, 1.0), (2, 2.0)]).left == LEFT


def test_a_run_without_values_keeps_the_colors_of_the_others() -> None:
    found = chart([], [(1, 1.0)])
    assert [line.number for line in found.lines] == [1]
    assert line_chart("Loss", "epoch", [Series("run", [(1, None)])], str) is None


def test_one_value_and_marks_have_a_place() -> None:
    found = line_chart("Loss", "epoch", [Series("run", [(0.5, 3.0)], [Mark(0.25, "killed", "at step 1")])], str)
    assert found is not None
    assert found.lines[0].marks[0][1:] == ("killed", "run: at step 1")
    assert found.description == "Loss by epoch. run: last 3.0"


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_have_the_contrast_of_wcag_aa(scheme: str) -> None:
    """4.5 for text, 3 for lines."""
    style = (ROOT / "utils" / "report" / "page.css").read_text()
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")[:2]
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light if scheme == "light" else dark.split("@media")[0]))
    texts, lines = ("ink", "faint", "warn"), [name for name in colors if name.startswith("run")]
    assert len(lines) == 7
    for names, least in ((texts, 4.5), (lines, 3.0)):
        for name in names:
            for ground in ("paper", "card"):
                low, high = sorted((luminance(colors[name]), luminance(colors[ground])))
                assert (high + 0.05) / (low + 0.05) >= least, (name, ground)
    for name in ("run0", "run1"):  # behind the numbers of a matrix, half of it at most
        pairs = ((colors[name][at : at + 2], colors["paper"][at : at + 2]) for at in (1, 3, 5))
        mixed = "#" + "".join(f"{(int(one, 16) + int(other, 16)) // 2:02x}" for one, other in pairs)
        low, high = sorted((luminance(mixed), luminance(colors["ink"])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
