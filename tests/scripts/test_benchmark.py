"""The benchmark at its smallest: whole, and with a loader or a network that is truly slow. Nothing is timed here."""

import contextlib
import dataclasses
import gc
import json
import math
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import benchmark, performance
from tests.conftest import ROOT, SOCKETS_ARE_ELSEWHERE, environment, resolved, write_images
from train import train_step
from utils.benchmark.measure import (
    Case,
    FilesReader,
    TimmLoader,
    cpu_seconds,
    feed,
    measure,
    open_loader,
    open_loaders,
    settings,
)
from utils.benchmark.report import COLOURS
from utils.benchmark.verdict import Verdict, diagnose
from utils.data.batch import Batch, TrainLoader
from utils.data.formats.folder import FileTable
from utils.data.manifest import Manifest
from utils.distributed.group import DistEnv
from utils.errors import Stopped, UserError
from utils.training.run import Run

LOADERS = ("dali_fused", "dali_full", "torch", "timm")
FACTS = {
    "num_images": 41, "generated": False, "image_width": 56.0, "image_height": 56.0, "image_size": 32, "workers": 1,
    "cores": 1, "device": "cpu", "jpeg_engines": 0, "kept": False, "windows": 1, "window_seconds": 0.1,
}  # fmt: skip
TINY = resolved(
    loader="synthetic", resume="none", arch="test_resnet", image_size=32, batch_size=8, workers=1, device="cpu"
)


@pytest.fixture
def opened(data: Path, cpu: DistEnv, tmp_path: Path) -> Iterator[Callable[..., tuple[Run, Manifest]]]:
    """A run and its images, as the benchmark opens them: `opened(arch="resnet18")`."""
    with contextlib.ExitStack() as stack:
        yield lambda **values: benchmark.open_run(
            dataclasses.replace(TINY, **values), benchmark.read_images(data), cpu, tmp_path, stack
        )


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


def test_json_has_every_figure(finished: tuple[dict[str, Any], Path, str]) -> None:
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
    assert any("41 images: the figures mean little" in warning for warning in result["warnings"])
    assert "41 images: the figures mean little" in printed


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


class Slow:
    """A loader of 20 images a second at most, which prepares a batch while the step works on the one before."""

    def __init__(self, stream: TrainLoader) -> None:
        self.stream = stream
        self.ready = time.monotonic()

    def __next__(self) -> Batch:
        batch = next(self.stream)
        time.sleep(max(0.0, self.ready - time.monotonic()))
        self.ready = time.monotonic() + len(batch.targets) / 20
        return batch

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def close(self) -> None:
        self.stream.close()


def measured(run: Run, manifest: Manifest, slow: bool) -> Verdict:
    """The verdict on a slow loader, or on one that is never late."""
    with contextlib.ExitStack() as stack:
        (loader,), files = open_loaders(("dali-fused",), run, manifest, stack)
        stream = Slow(loader.stream) if slow else run.train_loader
        return diagnose(benchmark.collect(FACTS, run, [dataclasses.replace(loader, stream=stream, queue=1)], files))


@pytest.mark.usefixtures("one_thread")
def test_verdict_changes_sides(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    # The light network is some 20 times as fast as the slow loader, the heavy one 5 times slower; and one window has no
    # noise, so nothing is balanced. A busy machine cannot make up for that.
    light = opened(batch_size=4)
    fed = measured(*light, slow=False)
    assert fed.bound == "compute"
    assert fed.share < 20  # alone, its loader is thousands of times as fast, but that is not training
    starved = measured(*light, slow=True)
    assert (starved.bound, starved.limit) == ("input", "decoder")  # neither the CPU nor the disk is busy
    heavy = opened(arch="resnet50", image_size=160, batch_size=1)
    assert measured(*heavy, slow=True).bound == "compute"  # the same loader is fast enough for this network


def test_contestants_take_turns(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, _ = opened()
    turns: list[str] = []
    streams = {name: iter(range(10**9)) for name in "AB"}

    def case(name: str, stride: int) -> Case:
        return Case(name, lambda: turns.append(name), streams[name], queue=5, stride=stride)

    results = measure([case("A", 1), case("B", 4)], run, windows=5, window_seconds=1e-9)
    assert [len(windows) for windows in results] == [5, 5]
    assert {window.steps for window in results[0]} == {3}
    assert {window.steps for window in results[1]} == {4}  # whole rounds of its workers
    assert "".join(turns[-5 * (5 + 6) :]) == ("A" * (2 + 3) + "B" * (2 + 4)) * 5  # two steps lead in
    assert next(streams["B"]) == 7 * (5 + 4)  # drained before every window, and before the two that size it


def test_a_signal_ends_it(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, _ = opened()
    ending = Case("ending", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        measure([ending], run, windows=5, window_seconds=0.01)


def test_worker_time_counts(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    loader = open_loader("torch", run, manifest)
    everything, own = cpu_seconds(), time.process_time()
    for _ in range(50):
        next(loader.stream)
    workers = cpu_seconds() - everything - (time.process_time() - own)
    loader.stream.close()
    assert workers > 0.05, "400 images cannot be decoded in less"


def test_timm_feeds_the_step_with_normalised_images(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    stream = TimmLoader(run, manifest)
    images, targets = next(stream)
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert -3 < images.min() < images.max() < 3
    assert set(targets.tolist()) <= {0, 1, 2}
    # Each class has its colour, so labels and normalisation can be told from the picture.
    channel = (
        images.mean(dim=(2, 3)) * torch.tensor([0.229, 0.224, 0.225]) + torch.tensor([0.485, 0.456, 0.406])
    ).argmax(1)
    assert channel.tolist() == [2 - target for target in targets.tolist()]
    fed = feed(run, stream)
    assert fed.augment(images, targets)[0] is images  # not normalised again
    assert fed.gradients is run.gradients
    train_step(fed)
    assert run.state.step == 1
    stream.close()


def test_files_reader_reads(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened()
    reader = FilesReader(manifest, run.sampler, readers=2, first_batch=3)
    expected = [sum(manifest.sizes[run.sampler.indices(b)]) for b in (3, 4)]
    assert [next(reader), next(reader)] == expected
    reader.close()


def test_a_file_that_is_gone_does_not_end_the_reading(
    opened: Callable[..., tuple[Run, Manifest]], tmp_path: Path
) -> None:
    run, manifest = opened()
    gone = dataclasses.replace(manifest, images=FileTable(tmp_path / "gone", manifest.table().names))
    reader = FilesReader(gone, run.sampler, readers=1, first_batch=0)
    assert next(reader) == 0
    reader.close()


@pytest.mark.parametrize("workers", [1, 21])
def test_files_are_read_by_as_many_as_dali_reads_with(
    opened: Callable[..., tuple[Run, Manifest]], workers: int
) -> None:
    """DALI's thread pools hold those that read and those that decode, one or more for each of two pipelines."""
    run, manifest = opened(workers=workers)
    before = pool_threads()
    with contextlib.ExitStack() as stack:
        _, files = open_loaders(("dali-fused",), run, manifest, stack)
        assert files.readers == len(multiprocessing.active_children()) == pool_threads() - before - max(2, workers)


def test_files_are_read_by_as_many_as_torch_reads_with(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened(workers=1)
    with contextlib.ExitStack() as stack:
        _, files = open_loaders(("torch",), run, manifest, stack)
        assert files.readers == 1
        assert len(multiprocessing.active_children()) == 2, "torch's worker, and another that reads"


def pool_threads() -> int:
    """Threads in the pools of all DALI pipelines of this process."""
    gc.collect()  # those that nobody holds any more
    return sum("[DALI][TP" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


@pytest.mark.parametrize("plain", [False, True])
def test_either_layout(data: Path, plain: bool) -> None:
    images = benchmark.read_images(data / "train" if plain else data)
    assert len(images) == 41
    assert Path(images.record(0).name).is_file()
    repeated = benchmark.repeat(images, 100)
    assert len(repeated) == len(repeated.names()) == 123
    assert [repeated.record(at) for at in (0, 41)] == [images.record(0)] * 2
    assert np.array_equal(repeated.labels[41:82], images.labels)


def test_a_bad_file_in_the_sample_does_not_count(tmp_path: Path) -> None:
    write_images(tmp_path, (1, 1, 1))
    (tmp_path / "blue" / "text.jpg").write_text("no image")
    images = benchmark.read_images(tmp_path)
    sizes = []
    for path in tmp_path.glob("*/*-000.jpg"):
        with Image.open(path) as image:
            sizes.append(image.size)
    width, height, _ = benchmark.sample_images(images)
    assert (width, height) == pytest.approx(tuple(np.mean(sizes, axis=0)))
    for path in tmp_path.glob("*/*-000.jpg"):
        path.write_text("no image")
    with pytest.raises(UserError, match="none of 4 files is an image"):
        benchmark.sample_images(images)


def test_generated_images_are_like_imagenets(tmp_path: Path) -> None:
    benchmark.generate_images(tmp_path, count=30)
    images = benchmark.read_images(tmp_path)
    width, height, size = benchmark.sample_images(images)
    assert len(images) == 30
    assert len(images.classes) == 10
    assert 450 < width < 550
    assert 330 < height < 420
    assert 80_000 < size < 140_000


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
    assert "left out: blue/empty.jpg: an empty file" in done.stdout
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


def test_a_loader_that_fails_does_not_hide(opened: Callable[..., tuple[Run, Manifest]], tmp_path: Path) -> None:
    run, manifest = opened()
    broken = dataclasses.replace(manifest, images=FileTable(tmp_path / "gone", manifest.table().names))
    for name in ("dali-fused", "torch"):
        with pytest.raises(Exception, match="gone"):
            open_loader(name, run, broken)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert benchmark.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("data-dir", "arch", "output-dir", "loaders", "batch-size", "image-size", "augment", "workers", "amp",
                 "compile", "cuda-graph", "device", "windows", "window-seconds"):  # fmt: skip
        assert f"--{name}" in shown


def test_fewer_images_than_a_batch(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, manifest = opened(batch_size=64)
    assert len(run.sampler.indices(0)) == 64
    loader = open_loader("dali-fused", run, manifest)
    assert len(next(loader.stream).targets) == 64


def test_each_loader_has_the_flags_that_train_would_choose(opened: Callable[..., tuple[Run, Manifest]]) -> None:
    run, _ = opened(decode="full")
    fused, full, torch_loader = (settings(name, run) for name in ("dali-fused", "dali-full", "torch"))
    assert [(each.loader, each.decode) for each in (fused, full)] == [("dali", "fused"), ("dali", "full")]
    assert full.hw_decoder_load == run.config.hw_decoder_load
    assert fused.hw_decoder_load == opened(decode="fused")[0].config.hw_decoder_load != full.hw_decoder_load
    assert torch_loader == dataclasses.replace(run.config, loader="torch")
