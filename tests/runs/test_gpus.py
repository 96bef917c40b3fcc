"""On two GPUs or more, compiled and as a CUDA graph: what one of them cannot show. Run by scripts/gpu_check.sh."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import (
    ROOT,
    TINY,
    Finished,
    assert_same,
    command,
    environment,
    kill_tree,
    read_checkpoint,
    read_metrics,
    workers_of,
    write_data,
)
from utils.training.machine import nvlink_between

pytestmark = [pytest.mark.gpu, pytest.mark.gpus, pytest.mark.dist]

WORLD = torch.cuda.device_count()
FLAGS = (
    *(word if word != "cpu" else "cuda" for word in TINY), "--deterministic", "--augment",
    "trivialaugment", "--mixup", "0.2", "--ema-decay", "0.9", "--epochs", "6",
)  # fmt: skip
EPOCHS, STEPS = 6, 12


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for an epoch of `STEPS` steps of 4 images on each of `WORLD` processes; 41 for validation."""
    assert WORLD > 1, "these tests need two GPUs"
    return write_data(tmp_path_factory.mktemp("data"), train=(STEPS * 4 * WORLD, 1, 1))


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*command(WORLD), "--data-dir", images, *FLAGS, "--batch-size", 4, "--output-dir", folder]
    subprocess.run(list(map(str, words)), env=environment(), check=True, timeout=200)
    return folder


def test_exchange_of_gradients_is_chosen_by_nvlink(whole: Path) -> None:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(WORLD)]
    chosen = json.loads((whole / "config.json").read_text())["grad_exchange"]
    assert chosen == ("flat" if nvlink_between(uuids) else "ddp")


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGTERM, None), (signal.SIGTERM, 1), (signal.SIGKILL, 1)],
    ids=["torchrun stopped", "rank 1 stopped", "rank 1 killed"],
)
def test_resume_is_exact(
    images: Path,
    whole: Path,
    tmp_path: Path,
    launch: Callable[..., Finished],
    launch_and_end: Callable[..., int],
    number: int,
    rank: int | None,
) -> None:
    flags = ("--data-dir", images, *FLAGS, "--batch-size", 4, "--output-dir", tmp_path, "--checkpoint-steps", 5)
    when = lambda: (tmp_path / "metrics.jsonl").exists() and len(read_metrics(tmp_path)) > STEPS + 6  # noqa: E731
    assert launch_and_end(*flags, when=when, number=number, rank=rank, processes=WORLD) == 1
    assert 0 < read_checkpoint(tmp_path)["step"] < EPOCHS * STEPS
    done = launch(*flags, processes=WORLD)
    assert done.status == 0, done.err
    assert "resumed at epoch" in done.out
    expected, found = read_checkpoint(whole), read_checkpoint(tmp_path)
    for part in ("model", "model_ema", "optimizer", "step", "epoch", "result"):
        assert_same(expected[part], found[part], part)
    losses = [
        [(record["step"], record["train/loss"]) for record in read_metrics(folder) if "train/loss" in record]
        for folder in (whole, tmp_path)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == EPOCHS * STEPS


def test_fewer_processes_go_on(
    images: Path, tmp_path: Path, launch: Callable[..., Finished], launch_and_end: Callable[..., int]
) -> None:
    flags = ("--data-dir", images, *FLAGS, "--output-dir", tmp_path)
    when = lambda: (tmp_path / "metrics.jsonl").exists() and len(read_metrics(tmp_path)) > STEPS + 6  # noqa: E731
    assert launch_and_end(*flags, "--batch-size", 4, when=when, number=signal.SIGTERM, processes=WORLD) == 1
    done = launch(*flags, processes=WORLD // 2)
    assert done.status == 0, done.err
    steps = [record["step"] for record in read_metrics(tmp_path) if "train/loss" in record]
    assert steps == list(range(1, EPOCHS * STEPS + 1))


def test_evaluation_is_the_same_on_any_number(images: Path, whole: Path, launch: Callable[..., Finished]) -> None:
    results = []
    for processes in sorted({1, WORLD // 2, WORLD}):
        flags = ("--data-dir", images, *FLAGS, "--batch-size", 4, "--output-dir", whole, "--evaluate", "--amp", "none")
        done = launch(*flags, processes=processes)
        assert done.status == 0, done.err
        results.append(json.loads((whole / "evaluation.json").read_text()))
    assert {result["count"] for result in results} == {41}
    assert len({result["top1"] for result in results}) == 1
    assert max(result["loss"] for result in results) == pytest.approx(min(result["loss"] for result in results))


COMPILES_FOR_LONG = """
import os, sys, time
from pathlib import Path
import train
from utils.network.gradients import ForwardBackward

compute = ForwardBackward.__call__

def on_rank_1_later(self, images, targets, micro):
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    loss = compute(self, images, targets, micro)
    Path(sys.argv[sys.argv.index("--output-dir") + 1], "launched").touch()
    return loss

ForwardBackward.__call__ = on_rank_1_later
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "exchange"),
    [(signal.SIGTERM, "flat"), (signal.SIGKILL, "flat"), (signal.SIGTERM, "ddp")],
    ids=["stop", "kill", "stop ddp"],
)
def test_who_has_compiled_first_hears(images: Path, tmp_path: Path, number: int, exchange: str) -> None:
    """Its passes wait on the GPU for the others, more of them than the GPU's queue takes.

    Gradients alone take trees here, as in a network of machines; among two GPUs these are no way of their own.
    """
    script = tmp_path / "slow_train.py"
    script.write_text(COMPILES_FOR_LONG)
    flags = (
        "--data-dir", images, *FLAGS, "--arch", "efficientnet_b0", "--batch-size", 4, "--output-dir", tmp_path,
        "--grad-exchange", exchange,
    )  # fmt: skip
    err = tmp_path / "err"
    with err.open("w") as file:
        process = subprocess.Popen(
            [*command(WORLD, program=script), *map(str, flags)],
            stderr=file, env=environment() | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
            | {"NCCL_ALGO": "allreduce:tree;broadcast:ring"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "launched").exists():
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline, "rank 0 never compiled"
            time.sleep(0.1)
        time.sleep(5)  # now it waits
        ranks = workers_of(process.pid)
        assert sorted(ranks) == list(range(WORLD))
        os.kill(process.pid if number == signal.SIGTERM else ranks[1], number)
        assert process.wait(25) == 1, "torchrun kills after 30 s who has not heard"
    finally:
        kill_tree(process.pid)
        process.wait()
