"""The progress of a benchmark: its estimate of the time left, and its lines without a terminal."""

import pytest

from utils.benchmark.progress import Progress, seconds_left


@pytest.mark.parametrize(
    ("finished", "left"),
    [
        ([[], []], None),
        ([[9.0], []], 9.0 + 4 * 2.0),  # another warm-up, and windows of the wanted length
        ([[9.0], [5.0]], 4 * 2.0),
        ([[9.0, 3.0], [5.0]], 1 * 3.0 + 2 * 3.0),  # what a window has taken, not what it should
        ([[9.0, 3.0], [5.0, 7.0]], 3.0 + 7.0),
        ([[9.0, 3.0, 5.0], [5.0, 7.0]], 7.0),
        ([[9.0, 3.0, 5.0], [5.0, 7.0, 7.0]], 0.0),
    ],
)
def test_time_left(finished: list[list[float]], left: float | None) -> None:
    assert seconds_left(finished, windows=2, window_seconds=2.0) == left


def test_a_line_for_each_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(["A", "B"], windows=1, window_seconds=60.0) as progress:
        for case, rate in ((0, 12.3), (1, 4567.8), (0, 1.0), (1, 2.0)):
            progress.start(case)
            progress.finish(case, rate)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "1/4  warm-up, A: 12 images/s, about 02:00 left",
        "2/4  warm-up, B: 4,568 images/s, about 02:00 left",
        "3/4  A: 1 images/s, about 00:00 left",
        "4/4  B: 2 images/s, about 00:00 left",
    ]
    assert err == ""
