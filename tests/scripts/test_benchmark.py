"""The command scripts/benchmark.py on a few images: its files, its output and its refusals."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts import benchmark, performance
from tests.conftest import ROOT, SOCKETS_ARE_ELSEWHERE, environment, write_images
from utils.benchmark.report import COLOURS

LOADERS = ("dali_fused", "dali_full", "torch", "timm")


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """The whole command on 41 images: its JSON, its folder and what it printed."""
    output_dir = tmp_path_factory.mktemp("benchmark")
    done = command(
        "--data-dir", data, "--arch", "test_resnet", "--output-dir", output_dir, "--image-size", "32",
        "--batch-size", "8", "--workers", "1", "--device", "cpu", "--window-seconds", "0.01",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in output_dir.iterdir()) == ["benchmark.json", "benchmark.png"]
    loaded: dict[str, Any] = json.loads((output_dir / "benchmark.json").read_text())
    return loaded, output_dir, done.stdout


def command(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *map(str, flags)]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment(), check=False)


def numbers(value: Any) -> Iterator[float]:
    """All numbers in nested JSON."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


def test_json_has_every_measurement(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, _ = finished
    assert all(math.isfinite(number) and number >= 0 for number in numbers(result))
    assert result["kept"] is True
    assert any("--cache auto" in line for line in result["warnings"])
    for name, kind in {
        "command": str, "arch": str, "batch_size": int, "image_size": int, "amp": str, "compile": bool,
        "fused_layers": bool, "cuda_graph": bool, "workers": int,
        "device": str, "device_name": str, "versions": dict, "num_images": int, "image_width": float,
        "image_height": float, "image_bytes": float, "pytorch_throughput": float, "dali_throughput": float,
        "timm_throughput": float, "synthetic_throughput": float, "ratio": float, "real_to_synthetic": float,
        "where_dali_wins": list, "where_dali_loses": list, "warnings": list, "verdict": dict,
    }.items():  # fmt: skip
        assert type(result[name]) is kind, name
    assert set(result["alone"]) == {"files", *LOADERS}
    assert set(result["training"]) == {"synthetic", *LOADERS}
    for rate in (*result["alone"].values(), *result["training"].values()):
        assert len(rate["windows"]) == 5
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert (rate["min"], rate["median"], rate["max"]) == (
            min(rate["windows"]), sorted(rate["windows"])[2], max(rate["windows"])
        )  # fmt: skip
    for name in ("data_wait", "cpu_seconds_per_1000_images", "cpu_cores_busy", "first_batch_seconds"):
        assert set(result[name]) == set(LOADERS), name
    assert all(seconds > 0 for seconds in result["cpu_seconds_per_1000_images"].values())
    assert set(result["gpu_memory_mb"].values()) == {None}
    assert set(result["versions"]) == {"torch", "dali", "timm", "torchvision", "python"}


def test_table_of_several_runs(finished: tuple[dict[str, Any], Path, str], tmp_path: Path) -> None:
    result, output_dir, _ = finished
    shutil.copytree(output_dir, tmp_path / "resnet18")
    _, _, *lines = performance.rows(tmp_path)
    assert [line.split(" | ")[0] for line in lines] == [f"| resnet18, {name}" for name in LOADERS]
    share = result["training"]["torch"]["median"] / result["synthetic_throughput"]
    assert f" | {share:.3f} | {result['alone']['torch']['median']:,.0f} (" in lines[2]


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


def test_few_images_are_named(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, printed = finished
    assert result["num_images"] == 41
    assert any("41 images: the measurements mean little" in warning for warning in result["warnings"])
    assert "41 images: the measurements mean little" in printed


def test_table_and_verdict_are_printed(finished: tuple[dict[str, Any], Path, str]) -> None:
    result, _, printed = finished
    lines = printed.splitlines()
    header = next(number for number, line in enumerate(lines) if "alone, images/s" in line)
    table = lines[header : header + 7]
    assert len({len(line) for line in table}) == 1, "aligned"
    for name, line in zip(LOADERS, table[3:], strict=True):
        assert f"{result['alone'][name]['median']:,.0f} (" in line
        assert f"{result['training'][name]['median']:,.0f} (" in line
    for sentence in (*result["verdict"]["summary"], *result["where_dali_wins"], *result["where_dali_loses"]):
        assert sentence in printed


def test_chart_is_a_picture(finished: tuple[dict[str, Any], Path, str]) -> None:
    _, output_dir, _ = finished
    with Image.open(output_dir / "benchmark.png") as image:
        assert image.format == "PNG"
        assert image.size[0] == 1200
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in COLOURS.values():
        bars = (pixels == [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=1).sum()
        assert bars > 100, f"no bar in {colour}"


@pytest.mark.parametrize("loader", ["dali-fused", "dali-full", "torch"])
def test_a_bad_file_ends_it_in_one_line(loader: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", (4, 4, 4))
    empty, text = (tmp_path / "data" / "blue" / name for name in ("empty.jpg", "text.jpg"))
    empty.touch()
    text.write_text("no image")
    done = command(
        "--data-dir", tmp_path / "data", "--arch", "test_resnet", "--output-dir", tmp_path / "out",
        "--image-size", "32", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--loaders", loader,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "13 images" in done.stdout, "the empty file is not among them"
    assert "excluded: blue/empty.jpg: an empty file" in done.stdout
    assert done.stderr.startswith(f"benchmark.py: {text}: ")
    assert done.stderr.count("\n") == 1
    assert "check_dataset.py" in done.stderr
    assert "--bad-files" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--window-seconds", "long"), ("--window-seconds", "'long' is not a number")),
        (("--windows", "3"), ("--windows 3", "5 or more")),
        (("--windows", "many"), ("--windows", "'many' is not a whole number")),
        (("--loaders", "nonsense"), ("--loaders nonsense", "dali-fused, dali-full, torch, timm")),
        (("--loaders", "torch,"), ("--loaders", "dali-fused")),
        (("--window-seconds", "0"), ("--window-seconds 0", "more than 0")),
        (("--batch-size", "0"), ("--batch-size 0", "1 or more")),
        (("--augment", "trivialaugment"), ("--augment trivialaugment", "--loaders dali-fused,dali-full,torch")),
        (("--arch", "resnet_fifty"), ("--arch resnet_fifty",)),
        (("--amp", "fp16"), ("--amp fp16",)),
        (("--amp", "fp17"), ("--amp", "fp17", "bf16")),
        (("--data-dir", "nowhere"), ("--data-dir nowhere", "no such folder")),
        (("--speed", "3"), ("--speed", "--help")),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, str], words: tuple[str, ...], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = ("--data-dir", str(data), "--arch", "test_resnet", "--image-size", "32", "--device", "cpu")
    assert benchmark.main([*base, "--output-dir", "out", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("benchmark.py: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_one_process_only(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert benchmark.main(["--data-dir", str(data), "--device", "cpu"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_too_long_a_path_for_the_sockets_of_workers(data: Path, tmp_path: Path, long_temporary_folder: Path) -> None:
    done = command(
        "--data-dir", data, "--arch", "test_resnet", "--output-dir", tmp_path / "out", "--image-size", "32",
        "--batch-size", "8", "--workers", "1", "--device", "cpu", "--loaders", "dali-fused", "--window-seconds", "0.1",
    )  # fmt: skip
    if SOCKETS_ARE_ELSEWHERE:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2
        assert done.stderr.startswith(f"benchmark.py: TMPDIR {long_temporary_folder}: ")
        assert done.stderr.count("\n") == 1
    assert list(long_temporary_folder.iterdir()) == []


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert benchmark.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("data-dir", "arch", "output-dir", "loaders", "batch-size", "image-size", "augment", "workers", "amp",
                 "compile", "cuda-graph", "device", "windows", "window-seconds"):  # fmt: skip
        assert f"--{name}" in shown
