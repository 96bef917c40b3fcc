"""Flags of recipes in whole runs: stopped and resumed they end with the same bits, and checkpoints keep the network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import predict
from tests.conftest import TINY, assert_same, assert_same_run
from tests.forked import launch_series, run_train
from tests.harness import launch, read_checkpoint, read_losses, read_metrics
from utils.inference.export.trained import load_trained

# 41 images, batches of 16: two steps an epoch.
SHORT = (*TINY, "--deterministic", "--batch-size", 16, "--epochs", 3)
FLAGS: dict[str, tuple[Any, ...]] = {
    "vit": (
        "--arch", "test_vit", "--model-args", "init_values=1e-4,class_token=false,global_pool=avg",
        "--drop-rate", 0.3, "--drop-path", 0.3, "--mixup", 0.2, "--bce-loss", "--bce-target-thresh", 0.2,
        "--optimizer", "adamw", "--lr", 0.01, "--optimizer-args", "betas=[0.9,0.95],eps=1e-6", "--layer-decay", 0.7,
        "--schedule", "linear", "--min-lr", 0.001, "--cooldown-epochs", 1, "--grad-checkpointing",
    ),
    "resnet": (
        "--optimizer", "adamw", "--lr", 0.01, "--drop-path", 0.3, "--freeze-epochs", 1,
        "--head-lr-scale", 5, "--ema-decay", 0.5, "--clip-grad", 1,
        "--schedule", "step", "--decay-epochs", 1.5, "--fused-layers",
    ),
}  # fmt: skip


def weights_for(data: Path, folder: Path, flags: tuple[Any, ...]) -> tuple[Any, ...]:
    """`--pretrained` where the head trains first."""
    if "--freeze-epochs" not in flags:
        return ()
    arch = ("--arch", "resnet18") if "resnet18" in flags else ()
    done = run_train("--data-dir", data, *SHORT, *arch, "--epochs", 1, "--output-dir", folder / "weights")
    assert done.status == 0, done.err
    return ("--pretrained", folder / "weights" / "last.pt", "--pretrained-head", "new")


@pytest.mark.slow  # quick: tests/training/test_resume.py
@pytest.mark.parametrize("name", FLAGS)
def test_a_stopped_run_ends_as_the_uninterrupted_one(data: Path, tmp_path: Path, name: str) -> None:
    """After the first step, and from the first step of the last epoch."""
    flags = ("--data-dir", data, *SHORT, *FLAGS[name], *weights_for(data, tmp_path, FLAGS[name]))
    whole, cut, late = tmp_path / "whole", tmp_path / "cut", tmp_path / "late"
    done = launch_series(
        (*flags, "--output-dir", whole, "--checkpoint-steps", 1),
        (*flags, "--output-dir", cut, "--time-limit", 0.001),
        (*flags, "--output-dir", cut),
        (*flags, "--output-dir", late, "--resume", whole / "last-2.pt"),
    )
    assert [run.status for run in done] == [0, 143, 0, 0], done
    assert "resumed at epoch 1, step 1" in done[2].out
    expected = "only the head in the first epoch" if "--freeze-epochs" in flags else "gradient checkpointing"
    assert expected in done[0].out
    assert "resumed at epoch 3, step 5" in done[3].out
    assert_same_run(whole, cut)
    for part in ("model", "optimizer"):
        assert_same(read_checkpoint(whole)[part], read_checkpoint(late)[part])
    assert read_losses(late) == read_losses(whole)[-1:]
    counts = {float(state["step"]) for state in read_checkpoint(whole)["optimizer"]["state"].values()}
    assert counts == ({4.0, 6.0} if "--freeze-epochs" in flags else {6.0}), "steps of each weight"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("exchange", "processes"), [("ddp", 2), ("flat", 2), ("ddp", 3)])
def test_the_head_trains_first_on_several_ranks(data: Path, tmp_path: Path, exchange: str, processes: int) -> None:
    """What is set up again, as DDP, gives a resume the same bits: stopped with the head alone, and at its end."""
    arch = ("--arch", "resnet18") if processes > 2 else ()  # of several buckets, in whose order three are summed
    weights = weights_for(data, tmp_path, ("--freeze-epochs", *arch))
    flags = ("--data-dir", data, *SHORT, *arch, "--batch-size", 6, *weights, "--freeze-epochs", 1, "--ema-decay", 0.5)
    flags = (*flags, "--grad-exchange", exchange, "--schedule", "constant", "--warmup-epochs", 0)
    whole, cut, edge = tmp_path / "whole", tmp_path / "cut", tmp_path / "edge"
    commands = {
        "whole": ("--output-dir", whole),
        "stopped": ("--output-dir", cut, "--time-limit", 0.001),
        "resumed": ("--output-dir", cut),
        "at the edge": ("--output-dir", edge, "--epochs", 1),
        "beyond it": ("--output-dir", edge),
    }
    for name, words in commands.items():
        done = launch(*flags, *words, processes=processes)
        assert done.status == (1 if name == "stopped" else 0), done.err  # torchrun's
        if name == "stopped":
            start, frozen = read_checkpoint(tmp_path / "weights")["model"], read_checkpoint(cut)["model"]
            same = {name for name in start if torch.equal(start[name], frozen[name])}
            assert start.keys() - same == {"fc.weight", "fc.bias"}
    assert_same_run(whole, cut)
    assert_same_run(whole, edge)


@pytest.mark.slow  # several runs
def test_a_checkpoint_keeps_its_network(data: Path, tmp_path: Path) -> None:
    """`--evaluate`, predict.py and export.py build it as the run did; other arguments are refused on a resume."""
    run = ("--data-dir", data, *SHORT, "--epochs", 1, "--arch", "test_vit", "--output-dir", tmp_path)
    arguments = ("--model-args", "class_token=false,global_pool=avg", "--drop-path", 0.2)
    evaluate = ("--evaluate", "--output-dir", tmp_path, "--workers", 1, "--device", "cpu")
    trained, evaluated, other, resumed, changed = launch_series(
        (*run, *arguments),
        evaluate,
        (*evaluate, "--model-args", "init_values=1.0"),
        (*run, "--epochs", 2),
        (*run, "--epochs", 2, *arguments, "--drop-path", 0.1, "--schedule", "step", "--decay-epochs", 1),
    )
    assert [each.status for each in (trained, evaluated, other, resumed, changed)] == [0, 0, 2, 2, 0], (other, changed)
    assert "cls_token" not in read_checkpoint(tmp_path)["model"]
    expected = next(record for record in read_metrics(tmp_path) if "val/loss" in record)
    assert json.loads((tmp_path / "evaluation.json").read_text())["loss"] == expected["val/loss"]
    assert "its weights do not fit test_vit" in other.err
    assert "--model-args: class_token=false,global_pool=avg then, None now" in resumed.err
    for change in ("--drop-path 0.2 -> 0.1", "--schedule cosine -> step", "--decay-epochs default -> 1"):
        assert change in changed.out
    jump = next(line for line in changed.out.splitlines() if "the learning rate goes from" in line)
    assert "--epochs 1 -> 2, --schedule cosine -> step, --decay-epochs default -> 1" in jump
    assert predict.main([str(tmp_path), str(data / "val"), "--output-dir", str(tmp_path / "predictions")]) == 0
    assert load_trained(tmp_path).config.drop_path == 0.2
