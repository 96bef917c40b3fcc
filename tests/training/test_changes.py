"""`--accept-changes`: a run goes on although it differs from its checkpoint, and says what that means."""

import contextlib
import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from tests.conftest import TINY, assert_same, resolved
from tests.forked import launch_series
from tests.harness import assert_refused, read_checkpoint, read_metrics
from tests.training.checkpoints import checkpoint_of
from utils.data.images.listing import load_listing
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.report.output_folder import read_run
from utils.training.optimization.optim import check_optimizer
from utils.training.resume.changes import adapt_optimizer
from utils.training.state.train_state import TrainState, create_state


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder) if "train/loss" in record]


class Small(nn.Module):
    """Weights of all shapes that optimizers treat differently."""

    pretrained_cfg: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.norm(self.conv(images)).mean((2, 3)) * self.scale))


def small_state(name: str, cpu: DistEnv) -> TrainState:
    torch.manual_seed(0)
    return create_state(resolved(optimizer=name, lr=1e-3, momentum=0.9), Small(), cpu, 256)


def take_step(state: TrainState, number: int) -> None:
    """The same for every optimizer with the same weights."""
    torch.manual_seed(number)  # from which Kron draws
    images = torch.randn(4, 3, 8, 8)
    state.optimizer.zero_grad()
    loss: Any = nn.functional.cross_entropy(state.model(images), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    state.optimizer_step(0.0)


def usable_optimizers(cpu: DistEnv) -> Iterator[str]:
    """Those that a run can name here: others want a GPU, or second gradients."""
    for name in timm.optim.list_optimizers():
        with contextlib.suppress(UserError):
            check_optimizer(name)
            small_state(name, cpu)
            yield name


def added_keys(name: str, cpu: DistEnv) -> set[str]:
    """What an optimizer has put into its groups; its next steps are those of one that has loaded its state."""
    goes_on, changed = small_state(name, cpu), small_state(name, cpu)
    fresh = {key for group in changed.optimizer.param_groups for key in group}
    for number in range(3):
        take_step(goes_on, number)
    added = {key for group in goes_on.optimizer.param_groups for key in group} - fresh
    saved = dataclasses.replace(checkpoint_of(resolved()), state=copy.deepcopy(goes_on.replicated_state()))
    changed.model.load_state_dict(saved.state.networks["model"])
    changed.optimizer.load_state_dict(adapt_optimizer(saved, changed, ["--seed"]))
    for number in range(3, 6):
        take_step(goes_on, number)
        take_step(changed, number)
    assert_same(dict(changed.model.state_dict()), dict(goes_on.model.state_dict()), name)
    return added


OPTIMIZERS = ("sgd", "adamw", "nadamw", "lamb", "adan", "lion", "muon", "rmsproptf")


@pytest.mark.parametrize("names", [OPTIMIZERS, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_optimizer_keeps_its_state(cpu: DistEnv, names: Sequence[str]) -> None:
    """Also that of its groups, as LAMB's and Adan's count of steps, and of itself, as Kron's random numbers."""
    with torch.compiler.set_stance("force_eager"):  # some are compiled, which takes minutes
        added = {name: added_keys(name, cpu) for name in names or usable_optimizers(cpu)}
    assert names or len(added) > 60
    counting = {name: {"step"} for name in added if "lamb" in name or name.startswith(("adan", "cadan"))}
    assert {name: keys for name, keys in added.items() if keys} == counting


def test_settings_of_a_group_are_those_of_the_changed_run(cpu: DistEnv) -> None:
    before, now = small_state("lamb", cpu), small_state("lamb", cpu)
    take_step(before, 0)
    before.optimizer.param_groups[0] |= {"lr": 7.0, "lr_scale": 0.5, "max_grad_norm": 9.0}
    saved = dataclasses.replace(checkpoint_of(resolved()), state=before.replicated_state())
    (group, *_) = adapt_optimizer(saved, now, ["--head-lr-scale"])["param_groups"]
    assert group == now.optimizer.state_dict()["param_groups"][0] | {"step": torch.tensor(1.0)}


def test_a_changed_run_goes_on(data: Path, tmp_path: Path) -> None:
    first, forked, halved, more = (tmp_path / name for name in ("first", "forked", "halved", "more"))
    shutil.copytree(data, more)
    shutil.copy(more / "val/blue/blue-001.jpg", more / "train/blue/new.jpg")
    plain = ("--data-dir", data, *TINY)
    flags = (*plain, "--batch-size", 8)
    path = first / "last.pt"
    accept = ("--resume", path, "--accept-changes", "--epochs", 2)
    tiny = ("--lr", 1e-12)
    others = ("--seed", 7, "--optimizer", "adamw", "--ema-decay", 0.5, "--hflip", 0)
    done = launch_series(
        (*flags, "--epochs", 1, "--output-dir", first),
        (*flags, "--epochs", 2, "--output-dir", first, "--seed", 7),
        (*flags, *accept, *others, *tiny, "--output-dir", forked),
        (*flags, *others, *tiny, "--epochs", 3, "--output-dir", forked),
        (*plain, *accept, "--batch-size", 4, "--output-dir", first),
        (*plain, *accept, "--batch-size", 4, *tiny, "--output-dir", halved),
        (*flags, *accept, "--arch", "test_vit", "--output-dir", forked, "--overwrite"),
        ("--data-dir", more, *flags[2:], *accept, "--momentum", 0.5, "--output-dir", first),
    )
    assert [run.status for run in done] == [0, 2, 0, 0, 2, 0, 2, 0], done
    assert_refused(done[1], "(--seed: 0 then, 7 now)", f"go on with them by --resume {path} --accept-changes")
    # Another seed, optimizer and flip, and a moving average: the weights are those of the checkpoint.
    assert "accepted changes: --hflip: 0.5 then, 0 now; --optimizer: sgd then, adamw now; --momentum" in done[2].out
    assert "the run is another from step 5 on; random draws begin again; the state of the optimizer" in done[2].out
    assert "the moving average begins with the weights of the checkpoint" in done[2].out
    assert "accepted changes" not in done[3].out, "they are those of the run by then"
    assert steps(forked) == list(range(6, 16))
    # Epochs of another length.
    reason = f"--accept-changes: an epoch has 10 steps instead of 5, and metrics.jsonl in --output-dir {first}"
    assert_refused(done[4], reason, "give --output-dir NEW")
    assert "an epoch has 10 steps instead of 5" in done[5].out
    assert steps(halved) == list(range(11, 21))
    assert json.loads((halved / "summary.json").read_text())["timed_steps"] < 10
    before, after = (read_checkpoint(folder, name) for folder, name in ((forked, "last-1.pt"), (halved, "last.pt")))
    torch.testing.assert_close(before["model"]["fc.weight"], after["model"]["fc.weight"])
    # What has other weights.
    again = "start again: --resume none --no-accept-changes --output-dir NEW"
    assert_refused(done[6], "--accept-changes: --arch cannot change within a run", again)
    # In the same folder, with a file more.
    assert "accepted changes: --momentum: 0.875 then, 0.5 now; train/ has 1 file more (blue/new.jpg)" in done[7].out
    assert steps(first) == list(range(1, 11))
    assert len(load_listing(first, "train")) == 42
    saved = read_checkpoint(first)
    assert [group["momentum"] for group in saved["optimizer"]["param_groups"]] == [0.5, 0.5]
    assert len(saved["files"]["train"]["mtimes"]) == 42


@pytest.mark.slow
def test_the_epoch_under_way(data: Path, tmp_path: Path) -> None:
    """Of a run that was stopped in mid-epoch: other order, other length, and another schedule, which is no change."""
    flags = ("--data-dir", data, *TINY, "--epochs", 1)
    cut, longer = tmp_path / "cut", tmp_path / "longer"
    path = cut / "last.pt"
    stop = ("--time-limit", 0.001)
    changed = ("--resume", path, "--accept-changes")
    done = launch_series(
        (*flags, "--batch-size", 8, "--output-dir", cut, *stop),
        (*flags, "--batch-size", 4, *changed, "--output-dir", longer, *stop),
        (*flags, "--batch-size", 8, *changed, "--seed", 3, "--output-dir", cut, *stop),
        (*flags, "--batch-size", 8, "--seed", 3, "--augment-schedule", "0:trivialaugment", "--output-dir", cut),
    )
    assert [run.status for run in done] == [143, 143, 143, 0], done
    assert "an epoch has 10 steps instead of 5, and the epoch under way begins again" in done[1].out
    assert "the same command with --resume auto and without --accept-changes resumes here" in done[1].out
    assert steps(longer) == [1]
    assert "the epoch under way goes on in another order, with some images twice and others not at all" in done[2].out
    assert "image size or policy of the epoch under way is another: its random draws begin again" in done[3].out
    assert steps(cut) == [1, 2, 3, 4, 5]


@pytest.mark.slow  # one change that goes on is quick
def test_between_two_parts_of_a_schedule_and_on_synthetic_data(data: Path, tmp_path: Path) -> None:
    """A checkpoint there holds no state of a loader; synthetic data has no files to count."""
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path / "scheduled", "--epochs")
    synthetic = (*TINY, "--loader", "synthetic", "--batch-size", 8, "--time-limit", 0.001, "--output-dir")
    accept = ("--resume", tmp_path / "synthetic" / "last.pt", "--accept-changes", "--mixup", 0.2)
    done = launch_series(
        (*flags, 1, "--resize-schedule", "0:48,1:32"),
        (*flags, 2),
        (*synthetic, tmp_path / "synthetic"),
        (*synthetic, tmp_path / "mixed", *accept),
    )
    assert [run.status for run in done] == [0, 0, 143, 143], done
    assert steps(tmp_path / "scheduled") == list(range(1, 11))
    assert steps(tmp_path / "mixed") == [2]
    assert "accept_changes" not in json.loads((tmp_path / "mixed" / "config.json").read_text())


@pytest.mark.slow
def test_other_validation_images_begin_a_best_epoch_of_their_own(data: Path, tmp_path: Path) -> None:
    """With classes mixed up in val no later epoch reaches the best one of before. Another size is no less a change."""
    mixed, first, sized, after = (tmp_path / name for name in ("mixed", "first", "sized", "after"))
    shutil.copytree(data, mixed)
    for source, target in (("blue", "x"), ("green", "blue"), ("red", "green"), ("x", "red")):
        (mixed / "val" / source).rename(mixed / "val" / target)
    flags = (*TINY, "--batch-size", 8, "--ema-decay", 0.5)
    accept = ("--resume", first / "last.pt", "--accept-changes")
    begun, shown, others, changed = launch_series(
        ("--data-dir", data, *flags, "--epochs", 2, "--output-dir", first),
        ("--data-dir", data, *flags, *accept, "--val-resize", 40, "--output-dir", sized, "--epochs", 3),
        ("--data-dir", mixed, *flags, *accept, "--epochs", 2, "--output-dir", after),
        ("--data-dir", mixed, *flags, *accept, "--epochs", 3, "--output-dir", first),
    )
    assert [run.status for run in (begun, shown, others, changed)] == [0] * 4, (begun, shown, others, changed)
    assert "evaluations before and after do not compare, and the next one becomes best.pt" in changed.out
    for folder, epoch in ((sized, 3), (after, 2), (first, 3)):
        *_, last = (record for record in read_metrics(folder) if "val/top1" in record)
        top1 = max(last["val/top1"], last["val/ema_top1"])
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["top1"], summary["best_top1"]) == (last["val/top1"], top1)
        assert read_checkpoint(folder, "best.pt")["best"] == {
            "epoch": epoch, "step": 5 * epoch, "top1": top1, "by": "top1", "value": top1
        }  # fmt: skip
        run = read_run(folder)
        assert run is not None
        assert run.best is not None
        assert run.best["top1"] == top1
    before, *_ = (record for record in read_metrics(first) if "val/top1" in record)
    assert top1 < max(before["val/top1"], before["val/ema_top1"]), "which is why it was kept"
