"""Refusals of whole processes, plain and under torchrun."""

from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import SOCKETS_ARE_ELSEWHERE, TINY
from tests.forked import launch_ranks, launch_series
from tests.harness import assert_refused, launch

WITHOUT_GPU: list[tuple[str, tuple[str, ...]]] = [
    ("--device cuda", ("--device cuda:", "no usable GPU", "use --device cpu")),
    ("--device auto --amp fp16", ("--amp fp16", "without a GPU", "use --amp none or bf16")),
    ("--device auto --cuda-graph", ("--cuda-graph", "without a GPU", "use --no-cuda-graph")),
    (
        "--device auto --cuda-graph --grad-accum-steps 2",
        ("--cuda-graph", "--grad-accum-steps 2", "use --no-cuda-graph"),
    ),
]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, good: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also holds on a machine with GPUs
    done = launch_series(*((*good, *flags.split()) for flags, _ in WITHOUT_GPU))
    for run, (_, fragments) in zip(done, WITHOUT_GPU, strict=True):
        assert_refused(run, *fragments)


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["proxy", "torch", "dali"])
def test_too_long_a_path_for_the_sockets_of_workers(good: list[str], long_temporary_folder: Path, loader: str) -> None:
    done = launch(*good, "--loader", loader, timeout=250)
    if loader == "dali" or SOCKETS_ARE_ELSEWHERE:
        assert (done.status, done.err) == (0, "")
    else:
        workers = f"workers of --loader {loader} cannot open sockets there"
        assert_refused(done, f"TMPDIR {long_temporary_folder}: {workers}", "AF_UNIX", "a short path")
    # torch makes this one when it is imported, unless TORCHINDUCTOR_CACHE_DIR names another
    assert {path.name.partition("_")[0] for path in long_temporary_folder.iterdir()} <= {"torchinductor"}


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_more_processes_than_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / split / "only" / "one.jpg")
    flags = (*TINY, "--batch-size", "1", "--data-dir", tmp_path, "--output-dir", tmp_path / "run")
    done = launch(*flags, processes=2, timeout=250)
    assert_refused(done, f"--data-dir {tmp_path}:", "1 training image for 2 processes", "start at most 1", processes=2)


@pytest.mark.dist
def test_rank_0_alone_is_refused(good: list[str]) -> None:
    first, _ = launch_ranks(*good, "--output-dir", "/proc/brisk")
    assert_refused(first, "--output-dir /proc/brisk:", "cannot be written", "give another")


@pytest.mark.dist
def test_torchrun_before_the_process_group(good: list[str]) -> None:
    done = launch(*good, "--batch-size", "0", processes=2, timeout=250)
    assert_refused(done, "--batch-size 0:", "must be 1 or more", processes=2)
