"""Whole runs of train.py: their output files, and that the arithmetic of a step is right."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import timm
import torch

from tests.conftest import TINY, assert_same, write_data
from tests.contract import assert_keys
from tests.forked import launch_ranks, launch_series, start_forked
from tests.harness import (
    Finished,
    assert_refused,
    launch,
    read_checkpoint,
    read_losses,
    read_metrics,
    start,
)
from tests.held import hold_and_end
from tests.processes import free_port
from tests.training.test_resume import EVERYTHING, PLAIN, flags_for
from utils.training.state.train_state import mean_buffers


@pytest.mark.dist
@pytest.mark.parametrize("processes", [pytest.param(count, marks=pytest.mark.slow) for count in (2, 3)])
def test_41_images_for_5_epochs(data: Path, tmp_path: Path, processes: int) -> None:
    """A prime number, and still the same number of steps on every rank: else the run would hang."""
    flags = ("--data-dir", data, *TINY, "--epochs", 5, "--batch-size", 4, "--output-dir", tmp_path)
    done = launch(*flags, processes=processes)
    assert done.status == 0, done.err
    assert "gradients are exchanged beside the backward pass (ddp)" in done.out, "there is no NVLink"
    steps = 41 // (4 * processes)
    assert [step for step, _ in read_losses(tmp_path)] == list(range(1, 5 * steps + 1))
    assert [record["val/count"] for record in read_metrics(tmp_path) if "val/count" in record] == [41] * 5


def test_the_files_keep_their_contract(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    flags = ("--data-dir", data, *TINY, "--epochs", 2, "--batch-size", 8, "--output-dir", out, "--ema-decay", 0.9)
    (done,) = launch_series((*flags, "--tensorboard", "--log-steps", 2))
    assert done.status == 0, done.err
    assert "ema  decay grows to 0.47059 in the 10 steps of the run, too few for 0.9\n" in done.out
    records = read_metrics(out)
    train = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in train] == [2, 4, 5, 7, 9, 10]
    for record in train:
        assert_keys("metrics.jsonl", record, "train")
    assert all(0 <= record["data_wait"] <= 1 for record in train)
    evaluations = [record for record in records if "val/top1" in record]
    assert [(record["epoch"], record["step"]) for record in evaluations] == [(1, 5), (2, 10)]
    assert_keys("metrics.jsonl", evaluations[0], "evaluation, EMA")
    summary = json.loads((out / "summary.json").read_text())
    assert_keys("summary.json", summary, "with EMA")
    assert summary["top1"] == evaluations[-1]["val/top1"]
    best = max(max(record["val/top1"], record["val/ema_top1"]) for record in evaluations)
    assert summary["best_top1"] == best
    assert read_checkpoint(out, "best.pt")["best"]["top1"] == best
    assert summary["images_per_second"] > 0
    assert summary["timed_steps"] == 8, "all but the first interval"
    assert "images/s and data wait cover 8 of 10 steps: without the first of each launch" in done.out
    config = json.loads((out / "config.json").read_text())
    assert_keys("config.json", config | {"chosen": None})  # flags, which differ from run to run
    assert config["arch"] == "test_resnet"
    assert list((out / "tensorboard").iterdir())
    for fact in ("0.37 M parameters", "41 train, 41 val", "0.015625 = 0.5 x 8 / 256", "DALI", "CPU, float32"):
        assert fact in done.out
    assert done.err == ""


@pytest.mark.dist
def test_accumulation_and_ranks_are_one_large_batch(tmp_path: Path) -> None:
    """The same synthetic batch twice in a step, or on two ranks, has the gradient of once; lr follows the batch."""
    flags = (*TINY, "--loader", "synthetic", "--batch-size", 4, "--epochs", 1)
    small, large = (
        (*flags, "--data-dir", write_data(tmp_path / name, train=(images - 2, 1, 1), val=(1, 1, 1)))
        for name, images in (("20 images", 20), ("40 images", 40))
    )
    done = launch_series(
        (*small, "--lr", 1.0, "--output-dir", tmp_path / "once"),
        (*small, "--lr", 0.5, "--output-dir", tmp_path / "wrong lr"),
        (*large, "--lr", 0.5, "--grad-accum-steps", 2, "--output-dir", tmp_path / "accumulated"),
    )
    done += launch_ranks(*large, "--lr", 0.5, "--output-dir", tmp_path / "two ranks")
    assert [run.status for run in done] == [0] * 5, done
    once, wrong, accumulated, ranks = (
        momentum(tmp_path / name) for name in ("once", "wrong lr", "accumulated", "two ranks")
    )
    torch.testing.assert_close(once, accumulated, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(once, ranks, rtol=1e-3, atol=1e-4)
    assert (once - wrong).abs().max() > 1e-2


def momentum(output_dir: Path) -> torch.Tensor:
    """The momentum of all weights after five steps, flat."""
    checkpoint = read_checkpoint(output_dir)
    assert checkpoint["step"] == 5
    return torch.cat([state["momentum_buffer"].flatten() for state in checkpoint["optimizer"]["state"].values()])


@pytest.mark.dist
@pytest.mark.slow
def test_compressed_gradients_are_rounded(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=(38, 1, 1), val=(1, 1, 1))
    flags = ("--data-dir", data, *TINY, "--loader", "synthetic", "--batch-size", 4, "--epochs", 1, "--lr", 0.5)
    for compression in ("none", "bf16"):
        words = ("--grad-compression", compression, "--output-dir", tmp_path / compression)
        assert launch(*flags, *words, processes=2).status == 0
    exact, rounded = momentum(tmp_path / "none"), momentum(tmp_path / "bf16")
    assert 1e-5 < (rounded - exact).norm() / exact.norm() < 0.1, "8 bits of mantissa, after five steps"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_stop_through_torchrun(data: Path, tmp_path: Path, loader: str) -> None:
    """torchrun signals the workers of a DataLoader too; the checkpoint is written nevertheless."""
    endless = ("--loader", loader, "--epochs", 100000, "--batch-size", 4)
    flags = ("--data-dir", data, *TINY, *endless, "--output-dir", tmp_path)
    hold_and_end(*flags, at=7, number=signal.SIGTERM, processes=2)
    step = read_checkpoint(tmp_path)["step"]
    assert step == 9
    mean = mean_buffers([rank["buffers"]["model"] for rank in read_checkpoint(tmp_path)["ranks"]])
    saved = read_checkpoint(tmp_path)["model"]
    assert_same({name: saved[name] for name in mean}, mean)
    resumed = launch(*flags, "--epochs", step // 5 + 1, processes=2)
    assert resumed.status == 0, resumed.err
    assert f"step {step}" in resumed.out


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ddp", "flat"])
def test_resume_is_exact_on_three_ranks(data: Path, tmp_path: Path, exchange: str) -> None:
    """A sum of three is rounded by its order, which follows DDP's buckets; so a network of several buckets."""
    flags = (*flags_for(data, 2, PLAIN), "--arch", "resnet18", "--epochs", 2, "--grad-exchange", exchange)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(*flags, "--output-dir", whole, processes=3).status == 0
    hold_and_end(*flags, "--output-dir", cut, "--checkpoint-steps", 2, at=2, processes=3)
    assert read_checkpoint(cut)["step"] == 2
    assert launch(*flags, "--output-dir", cut, processes=3).status == 0
    assert_same(read_checkpoint(whole)["model"], read_checkpoint(cut)["model"])


@pytest.mark.dist
@pytest.mark.slow  # processes of two launches; tests/distributed/test_launcher.py has what Slurm's variables mean
def test_slurm_without_torchrun(data: Path, tmp_path: Path) -> None:
    """Two steps of one job at the same time, whose processes must not mix up the two groups."""
    flags = ("--data-dir", data, *TINY, "--epochs", 1, "--batch-size", 4)
    job: dict[str, object] = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
    job["SLURM_STEP_NODELIST"] = "localhost"
    with contextlib.ExitStack() as stack:
        tasks = []
        for rank, step in itertools.product(range(2), range(2)):
            task = {"SLURM_STEP_ID": step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            started = start(*flags, "--seed", step, "--output-dir", tmp_path / str(step), env=job | task)
            tasks.append(stack.enter_context(started))
        assert [task.end(120).status for task in tasks] == [0, 0, 0, 0]
    for step in range(2):
        assert json.loads((tmp_path / str(step) / "summary.json").read_text())["world_size"] == 2
        assert json.loads((tmp_path / str(step) / "config.json").read_text())["seed"] == step


def in_separate_folders(folders: Sequence[Path], flags: Sequence[object]) -> list[Finished]:
    """train.py with a process for each folder, its working folder, as on machines that do not share their disks."""
    size = len(folders)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(start_forked(*flags, env=group | {"RANK": rank, "LOCAL_RANK": rank}, cwd=folder))
            for rank, folder in enumerate(folders)
        ]
        return [rank.end(120) for rank in ranks]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint", "summary", "weights"])
def test_files_that_only_one_rank_sees(data: Path, tmp_path: Path, what: str) -> None:
    """Files that are not on every machine: all ranks decide the same, without waiting for a timeout."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 4, "--epochs", 1, "--timeout", 150, "--output-dir", "run")
    both, *folders = (tmp_path / name for name in ("both", "0", "1"))
    for folder in folders:
        folder.mkdir()
    if what != "weights":
        (done,) = launch_series((*flags, "--batch-size", 8, "--output-dir", both))
        assert done.status == 0, done.err
        for folder in folders:
            shutil.copytree(both, folder / "run")
    if what == "summary":
        (folders[1] / "run" / "summary.json").unlink()
        ranks = in_separate_folders(folders, flags)
        assert [rank.status for rank in ranks] == [0, 0], ranks
        return
    if what == "checkpoint":  # last-1.pt is of the same step, before its evaluation
        whole = (folders[1] / "run" / "last.pt").read_bytes()
        (folders[1] / "run" / "last.pt").write_bytes(whole[:1000])
        ranks = in_separate_folders(folders, flags)
        message = "not the same checkpoint on all ranks; rank 1 skipped: --resume run/last.pt: damaged"
    else:
        torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), folders[0] / "weights.pt")
        ranks = in_separate_folders(folders, [*flags, "--pretrained", "weights.pt"])
        message = "--pretrained weights.pt: no such file"
    assert_refused(ranks[0], message)
    assert (ranks[1].status, ranks[1].err) == (2, "")


@pytest.mark.slow
def test_standard_output_on_a_full_disk(data: Path, tmp_path: Path) -> None:
    """The run continues, and ends well."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, "--output-dir", tmp_path)
    done = launch(*flags, prefix=("bash", "-c", 'exec "$@" > /dev/full', "bash"))
    assert (done.status, done.err) == (0, "")
    assert read_checkpoint(tmp_path)["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dali", "proxy"])
def test_a_killed_run_leaves_no_generated_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    """DALI writes the functions that it converts into the temporary folder, Python their bytecode beside them."""
    flags = (*flags_for(data, 1, ("--augment", "trivialaugment")), "--loader", loader, "--output-dir", tmp_path)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which is too long for the sockets of proxy's workers
        monkeypatch.setenv("TMPDIR", folder)
        # far from the next epoch, for which proxy builds another pipeline
        hold_and_end(*flags, "--batch-size", 2, "--checkpoint-steps", 1, at=1)
        assert not list(Path(folder).rglob("*autograph*"))


@pytest.mark.slow
def test_everything_on_trains_and_learns(data: Path, tmp_path: Path) -> None:
    """Colors are easy to learn. With all features on, a run learns them."""
    flags = (*flags_for(data, 1, EVERYTHING), "--epochs", 40, "--lr", 2, "--log-steps", 5, "--mixup", 0.1)
    done = launch(*flags, "--output-dir", tmp_path)
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "summary.json").read_text())["best_top1"] > 90


@pytest.mark.slow
def test_pretrained_weights_start_a_run_but_not_its_resume(data: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    model = timm.create_model("test_resnet", num_classes=3)
    torch.save(model.state_dict(), weights)
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path, "--pretrained", weights)
    evaluated = launch(*flags, "--evaluate")
    assert evaluated.status == 0, evaluated.err
    assert json.loads((tmp_path / "evaluation.json").read_text())["checkpoint"] == f"pretrained {weights}"
    first = launch(*flags, "--epochs", 1, "--lr", 1e-12)
    assert first.status == 0, first.err
    assert_refused(launch(*flags, "--evaluate"), f"--resume {tmp_path}/best.pt or --resume none")
    assert launch(*flags, "--evaluate", "--resume", "none").status == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["checkpoint"] == f"pretrained {weights}"
    trained = read_checkpoint(tmp_path)["model"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach())
    weights.unlink()
    resumed = launch(*flags, "--epochs", 2)
    assert resumed.status == 0, resumed.err


@pytest.mark.slow  # several runs
def test_what_the_best_checkpoint_of_a_folder_is(data: Path, tmp_path: Path) -> None:
    """The best of the evaluations that were made there: neither of the run before, nor of another folder."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir")
    first, second = tmp_path / "first", tmp_path / "second"
    *earlier, again, evaluated = launch_series(
        (*flags, first, "--epochs", 1),
        (*flags, second, "--epochs", 1, "--seed", 1),
        (*flags, second, "--resume", first / "last.pt", "--overwrite", "--epochs", 2, "--lr", 1e-12),
        (*flags, first, "--resume", "none", "--overwrite", "--epochs", 2, "--time-limit", 0.1),
        (*flags, first, "--evaluate", "--image-size", 48, "--val-resize", 54),
    )
    assert [run.status for run in earlier] == [0, 0, 0], earlier
    assert ["best.pt" in run.written for run in earlier] == [True, True, True]
    assert_keys("metrics.jsonl", read_metrics(second)[-1], "evaluation")
    assert_keys("summary.json", json.loads((second / "summary.json").read_text()), "without EMA")
    best = read_checkpoint(second, "best.pt")
    assert (best["epoch"], best["config"]["seed"]) == (2, 0)
    assert [step for step, _ in read_losses(second)] == list(range(6, 11))
    assert again.status == 143, again.err
    assert "the same command with --resume auto and without --overwrite resumes here" in again.out
    assert not (first / "best.pt").exists()
    notes = "note: --image-size 48, its run had 32\nnote: --val-resize 54, its run had 36"
    assert notes in evaluated.out, evaluated.err
    found = json.loads((first / "evaluation.json").read_text())
    assert_keys("evaluation.json", found, "checkpoint")
    assert (found["checkpoint"], found["image_size"], found["val_resize"]) == (f"{first}/last.pt", 48, 54)
