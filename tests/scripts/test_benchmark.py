"""The command scripts/benchmark.py on a few images: its files, its output and its refusals."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts import benchmark
from scripts.bench import series
from tests.conftest import SOCKETS_ARE_ELSEWHERE, Refused, write_images
from tests.contract import assert_keys
from tests.forked import launch_forked
from tests.harness import ROOT, error_line, launch
from tests.inference.exported import write_checkpoint
from utils.benchmark.report import COLORS
from utils.benchmark.verdict import Rate, is_same

# Without the waits for full queues between two windows: speed is of no interest.
BENCHMARK = """
import sys
from scripts import benchmark
from utils.benchmark import loaders, measure

loaders.settle = measure.settle = lambda device: None
sys.exit(benchmark.main(sys.argv[1:]))
"""
LOADERS = ("dali_fused", "dali_full", "cached", "stock", "torch", "timm")


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """Of all loaders."""
    return measure(data, tmp_path_factory.mktemp("benchmark"))


def measure(data: Path, output_dir: Path, *flags: str) -> tuple[dict[str, Any], Path, str]:
    """The whole command on 41 images: its JSON, its folder and what it printed."""
    done = launch_forked(
        "--data-dir", data, "--arch", "test_resnet", "--output-dir", output_dir, "--image-size", "32",
        "--batch-size", "8", "--workers", "1", "--device", "cpu", "--window-seconds", "0.01", *flags,
        program=BENCHMARK,
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    assert sorted(path.name for path in output_dir.iterdir()) == ["benchmark.json", "benchmark.png"]
    loaded: dict[str, Any] = json.loads((output_dir / "benchmark.json").read_text())
    return loaded, output_dir, done.out


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested JSON."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.slow
def test_json_has_every_measurement(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, _ = finished
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result))
    assert_keys("benchmark.json", result)
    assert result["kept"] is True
    assert "cached" in result["training"]
    assert not any("--loaders cached" in line for line in result["warnings"])
    for name, kind in {
        "command": str, "arch": str, "batch_size": int, "image_size": int, "amp": str, "compile": bool,
        "fused_layers": bool, "cuda_graph": bool, "workers": int,
        "device": str, "device_name": str, "versions": dict, "num_images": int, "image_width": float,
        "image_height": float, "image_bytes": float, "pytorch_throughput": float, "dali_throughput": float,
        "timm_throughput": float, "synthetic_throughput": float, "ratio": float, "real_to_synthetic": float,
        "where_dali_wins": list, "where_dali_loses": list, "warnings": list, "verdict": dict,
    }.items():  # fmt: skip
        assert type(result[name]) is kind, name
    for rate in (*result["alone"].values(), *result["training"].values()):
        assert len(rate["windows"]) == 5
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert (rate["min"], rate["median"], rate["max"]) == (
            min(rate["windows"]), sorted(rate["windows"])[2], max(rate["windows"])
        )  # fmt: skip
    assert all(seconds > 0 for seconds in result["cpu_seconds_per_1000_images"].values())
    assert set(result["gpu_memory_mb"].values()) == {None}


@pytest.mark.slow
def test_table_of_several_runs(finished: tuple[dict[str, Any], Path, str], tmp_path: Path) -> None:
    result, output_dir, _ = finished
    shutil.copytree(output_dir, tmp_path / "resnet18")
    _, _, *lines = series.table(tmp_path, series.RUNS).splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"| resnet18, {name}" for name in LOADERS]
    torch, synthetic = (Rate(tuple(result["training"][name]["windows"])) for name in ("torch", "synthetic"))
    share = "no difference" if is_same(torch, synthetic) else f"{torch.median / synthetic.median:.3f}"
    assert f" | {share} | {result['alone']['torch']['median']:,.0f} (" in lines[LOADERS.index("torch")]


@pytest.mark.slow
def test_json_agrees_with_itself(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, _ = finished
    training = {name: rate["median"] for name, rate in result["training"].items()}
    assert result["pytorch_throughput"] == training["torch"]
    assert result["timm_throughput"] == training["timm"]
    assert result["dali_throughput"] == max(training["dali_fused"], training["dali_full"])
    assert result["synthetic_throughput"] == training["synthetic"]
    assert result["ratio"] == pytest.approx(result["dali_throughput"] / result["pytorch_throughput"])
    assert result["real_to_synthetic"] == pytest.approx(result["dali_throughput"] / training["synthetic"])
    verdict = result["verdict"]
    assert verdict["share"] == pytest.approx(result["real_to_synthetic"])
    assert verdict["bound"] in ("input", "compute", "balanced")
    limits = ("decoder", "cpu threads", "disk")  # there is no GPU
    assert verdict["limit"] in ((None,) if verdict["bound"] == "balanced" else limits)
    assert training[verdict["feed"].replace("-", "_")] == result["dali_throughput"]


@pytest.mark.slow
def test_few_images_are_named(data: Path, tmp_path: Path) -> None:
    result, _, printed = measure(data, tmp_path, "--loaders", "dali-fused")
    assert result["num_images"] == 41
    assert any("41 images: the measurements mean little" in warning for warning in result["warnings"])
    assert "41 images: the measurements mean little" in printed


@pytest.mark.slow
def test_table_and_verdict_are_printed(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, printed = finished
    lines = printed.splitlines()
    header = next(number for number, line in enumerate(lines) if "alone, images/s" in line)
    table = lines[header : header + 3 + len(LOADERS)]
    assert len({len(line) for line in table}) == 1, "aligned"
    for name, line in zip(LOADERS, table[3:], strict=True):
        assert f"{result['alone'][name]['median']:,.0f} (" in line
        assert f"{result['training'][name]['median']:,.0f} (" in line
    for sentence in (*result["verdict"]["summary"], *result["where_dali_wins"], *result["where_dali_loses"]):
        assert sentence in printed


@pytest.mark.slow
def test_each_measurement_is_a_line(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, printed = finished
    count = 6 * len([*result["alone"], *result["training"]])
    lines = [line for line in printed.splitlines() if line.endswith(" left")]
    assert [line.split("/")[0].strip() for line in lines] == [str(number + 1) for number in range(count)]
    assert (
        f"{count}/{count}  training with timm's loader: {result['training']['timm']['windows'][-1]:,.0f} images/s"
        in (lines[-1])
    )


@pytest.mark.slow
def test_the_step_with_a_teacher(data: Path, tmp_path: Path) -> None:
    teacher = write_checkpoint(tmp_path / "teacher" / "best.pt")
    result, _, out = measure(data, tmp_path / "out", "--loaders", "dali-full", "--teacher", str(teacher))
    assert result["teacher"] == str(teacher)
    assert f"float32, teacher {teacher}, batch 8" in out


@pytest.mark.slow
def test_chart_is_a_picture(finished: tuple[dict[str, Any], Path, str]) -> None:
    _, output_dir, _ = finished
    with Image.open(output_dir / "benchmark.png") as image:
        assert image.format == "PNG"
        assert image.size[0] == 1200
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for color in COLORS.values():
        bars = (pixels == [int(color[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=1).sum()
        assert bars > 100, f"no bar in {color}"


@pytest.mark.parametrize("loader", ["dali-fused", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_bad_file_ends_it_in_one_line(loader: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", (4, 4, 4))
    empty, text = (tmp_path / "data" / "blue" / name for name in ("empty.jpg", "text.jpg"))
    empty.touch()
    text.write_text("no image")
    done = launch_forked(
        "--data-dir", tmp_path / "data", "--arch", "test_resnet", "--output-dir", tmp_path / "out",
        "--image-size", "32", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--loaders", loader,
        program=BENCHMARK,
    )  # fmt: skip
    assert done.status == 2, done.err
    assert "13 images" in done.out, "the empty file is not among them"
    assert "excluded: blue/empty.jpg: an empty file" in done.out
    assert done.err.startswith(f"benchmark.py: {text}: ")
    assert done.err == error_line(done, "benchmark.py") + "\n"
    assert "check_dataset.py" in done.err
    assert "--bad-files" not in done.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--window-seconds", "long"), ("--window-seconds", "'long' is not a number")),
        (("--windows", "3"), ("--windows 3", "5 or more")),
        (("--windows", "many"), ("--windows", "'many' is not a whole number")),
        (("--loaders", "nonsense"), ("--loaders nonsense", "dali-fused, dali-full, cached, stock, torch, timm")),
        (("--loaders", "torch,"), ("--loaders", "dali-fused")),
        (("--window-seconds", "0"), ("--window-seconds 0", "more than 0")),
        (("--batch-size", "0"), ("--batch-size 0", "1 or more")),
        (
            ("--augment", "trivialaugment"),
            ("--augment trivialaugment", "--loaders dali-fused,dali-full,cached,stock,torch"),
        ),
        (("--arch", "resnet_fifty"), ("--arch resnet_fifty",)),
        (("--amp", "fp16"), ("--amp fp16",)),
        (("--amp", "fp17"), ("--amp", "fp17", "bf16")),
        (("--data-dir", "nowhere"), ("--data-dir nowhere", "no such folder")),
        (("--teacher", "none.pt"), ("--teacher none.pt: no such file", "give the output folder of a run")),
        (("--speed", "3"), ("--speed", "--help")),
    ],
)
def test_refusals(
    refused: Refused, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, str],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = ("--data-dir", data, "--arch", "test_resnet", "--image-size", "32", "--device", "cpu", "--output-dir", "out")
    refused(*base, *flags, main=benchmark.main, program="benchmark.py")(*words)
    assert list(tmp_path.iterdir()) == []


def test_one_process_only(refused: Refused, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    flags = ("--data-dir", data, "--device", "cpu")
    refused(*flags, main=benchmark.main, program="benchmark.py")("without torchrun")


@pytest.mark.slow  # a fresh process; the same check as of train.py
def test_too_long_a_path_for_the_sockets_of_workers(data: Path, tmp_path: Path, long_temporary_folder: Path) -> None:
    done = launch(
        "--data-dir", data, "--arch", "test_resnet", "--output-dir", tmp_path / "out", "--image-size", "32",
        "--batch-size", "8", "--workers", "1", "--device", "cpu", "--loaders", "dali-fused", "--window-seconds", "0.1",
        program=ROOT / "scripts" / "benchmark.py",
    )  # fmt: skip
    if SOCKETS_ARE_ELSEWHERE:
        assert (done.status, done.err) == (0, "")
    else:
        assert done.status == 2
        assert error_line(done, "benchmark.py").startswith(f"benchmark.py: TMPDIR {long_temporary_folder}: ")
    assert list(long_temporary_folder.iterdir()) == []


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert benchmark.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("data-dir", "arch", "output-dir", "loaders", "batch-size", "image-size", "augment", "workers", "amp",
                 "compile", "cuda-graph", "device", "windows", "window-seconds"):  # fmt: skip
        assert f"--{name}" in shown
