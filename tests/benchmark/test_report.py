"""benchmark.json names the source of each figure, and no number of the chart is crossed by a line."""

import numpy as np
import pytest

from tests.benchmark.test_verdict import loader, measurements, rate
from utils.benchmark.report import benchmark_json, create_chart
from utils.benchmark.verdict import LoaderMeasurement, diagnose

FACTS = {
    "arch": "resnet50", "amp": "none", "optimizer": "sgd", "teacher": None, "compile": False, "fused_layers": False,
    "cuda_graph": False, "batch_size": 8,
    "image_size": 224, "device_name": "CPU", "workers": 8, "windows": 5,
    "versions": {"dali": "1", "torch": "2", "timm": "3"},
}  # fmt: skip
FUSED, FULL, TORCH, TIMM = (
    loader(name, alone, training)
    for name, alone, training in (
        ("dali-fused", 9000, 940), ("dali-full", 8000, 960), ("torch", 990, 480), ("timm", 1100, 970),
    )
)  # fmt: skip


def test_sources_name_path_and_measurement() -> None:
    found = measurements(FUSED, FULL, TORCH, TIMM)
    result = benchmark_json({}, found, diagnose(found))
    sources = result["sources"]
    for name in ("pytorch_throughput", "dali_throughput", "timm_throughput", "synthetic_throughput"):
        table, key, statistic = sources[name]["measurement"].split(".")
        assert result[table][key][statistic] == result[name]
    assert sources["dali_throughput"]["path"] == "DALI, full decode (--loader dali --decode full)"
    assert sources["pytorch_throughput"]["path"] == "torch's DataLoader (--loader torch)"
    for name in ("ratio", "real_to_synthetic"):
        one, other = (result[key] for key in sources[name]["measurement"].split(" / "))
        assert result[name] == one / other
    for name in ("where_dali_wins", "where_dali_loses"):
        assert sources[name]["path"] == (
            "DALI, full decode (--loader dali --decode full) against torch's DataLoader (--loader torch), "
            "timm's loader (timm.data.create_loader)"
        )
        assert set(sources[name]["measurement"].split(", ")) <= result.keys()


@pytest.mark.parametrize("loaders", [(FUSED,), (TORCH,), (TORCH, TIMM)])
def test_a_figure_that_is_null_has_no_source(loaders: tuple[LoaderMeasurement, ...]) -> None:
    found = measurements(*loaders)
    result = benchmark_json({}, found, diagnose(found))
    for name in ("pytorch_throughput", "dali_throughput", "timm_throughput", "ratio", "real_to_synthetic"):
        is_null = result[name] is None
        assert {value is None for value in result["sources"][name].values()} == {is_null}, name


@pytest.mark.parametrize("synthetic", [1000, 930, 7000, 9500])
def test_no_number_is_crossed_by_a_line(synthetic: float) -> None:
    figure = create_chart(FACTS, measurements(FUSED, FULL, TORCH, TIMM, synthetic=rate(synthetic)))
    figure.draw_without_rendering()
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[synthetic, synthetic]]
        at = axes.transData.transform((synthetic, 0))[0]
        bars = max(bar.get_window_extent().x1 for bar in axes.patches)
        assert len(axes.texts) == 4
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.x0 > max(at, bars)
            assert box.x1 <= axes.bbox.x1 + 1
