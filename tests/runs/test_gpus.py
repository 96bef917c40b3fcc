"""On two GPUs or more: compiled and captured runs, stopped, resumed and evaluated. Run by scripts/gpu_check.sh."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, assert_same, assert_same_run, write_data
from tests.harness import launch, launch_and_end, read_checkpoint, read_losses, read_metrics, start
from utils.distributed.machine import nvlink_between

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
    """Output folder of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ("--data-dir", images, *FLAGS, "--batch-size", 4, "--output-dir", folder)
    assert launch(*flags, processes=WORLD).status == 0
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
def test_resume_is_exact(images: Path, whole: Path, tmp_path: Path, number: int, rank: int | None) -> None:
    flags = ("--data-dir", images, *FLAGS, "--batch-size", 4, "--output-dir", tmp_path, "--checkpoint-steps", 5)
    assert launch_and_end(*flags, when=in_epoch_2(tmp_path), number=number, rank=rank, processes=WORLD) == 1
    assert 0 < read_checkpoint(tmp_path)["step"] < EPOCHS * STEPS
    done = launch(*flags, processes=WORLD)
    assert done.status == 0, done.err
    assert "resumed at epoch" in done.out
    assert_same_run(whole, tmp_path)
    assert len(read_losses(whole)) == EPOCHS * STEPS


def test_batch_norm_over_all_processes(images: Path, tmp_path: Path) -> None:
    """`--sync-bn`: every rank has the same running statistics, as a step of its own and in a CUDA graph."""
    flags = ("--data-dir", images, *FLAGS, "--batch-size", 4, "--epochs", 1, "--sync-bn", "--checkpoint-steps", 5)
    for name, extra in (("compiled", ()), ("eager", ("--no-compile", "--no-cuda-graph"))):
        done = launch(*flags, *extra, "--output-dir", tmp_path / name, processes=WORLD)
        assert done.status == 0, done.err
        first, *others = (rank["buffers"]["model"] for rank in read_checkpoint(tmp_path / name, "last-1.pt")["ranks"])
        for other in others:
            assert_same(first, other)


def in_epoch_2(folder: Path) -> Callable[[], bool]:
    return lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > STEPS + 6


def test_fewer_processes_resume(images: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", images, *FLAGS, "--output-dir", tmp_path)
    when = in_epoch_2(tmp_path)
    assert launch_and_end(*flags, "--batch-size", 4, when=when, number=signal.SIGTERM, processes=WORLD) == 1
    done = launch(*flags, processes=WORLD // 2)
    assert done.status == 0, done.err
    assert [step for step, _ in read_losses(tmp_path)] == list(range(1, EPOCHS * STEPS + 1))


def test_evaluation_is_the_same_on_any_number(images: Path, whole: Path) -> None:
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

def late_on_rank_1(self, images, targets, micro):
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    loss = compute(self, images, targets, micro)
    Path(sys.argv[sys.argv.index("--output-dir") + 1], "launched").touch()
    return loss

ForwardBackward.__call__ = late_on_rank_1
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "exchange"),
    [(signal.SIGTERM, "flat"), (signal.SIGKILL, "flat"), (signal.SIGTERM, "ddp")],
    ids=["stop", "kill", "stop ddp"],
)
def test_a_rank_that_has_compiled_first_is_stopped(images: Path, tmp_path: Path, number: int, exchange: str) -> None:
    """Its kernels wait on the GPU for the other ranks, more of them than the GPU's queue takes.

    NCCL uses trees for gradients only, as between machines.
    """
    flags = (
        "--data-dir", images, *FLAGS, "--arch", "efficientnet_b0", "--batch-size", 4, "--output-dir", tmp_path,
        "--grad-exchange", exchange,
    )  # fmt: skip
    env = {"NCCL_ALGO": "allreduce:tree;broadcast:ring"}
    with start(*flags, program=COMPILES_FOR_LONG, processes=WORLD, env=env) as started:
        started.wait_for((tmp_path / "launched").exists, timeout=240)
        time.sleep(5)  # now it waits
        ranks = started.ranks()
        assert sorted(ranks) == list(range(WORLD))
        started.send(number, started.pid if number == signal.SIGTERM else ranks[1])
        assert started.end(25).status == 1, "after 30 s torchrun kills what has not stopped"
