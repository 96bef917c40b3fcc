"""Images a step and epochs that are not given follow the number of images, the device and what a run begins with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import resolved
from tests.training.checkpoints import checkpoint_of
from utils.data.loaders.settings import choose_loader_settings
from utils.distributed.group import DistEnv
from utils.distributed.machine import Machine
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.validation import validate
from utils.training.settings.autotune import resolve
from utils.training.settings.run_length import describe_length
from utils.training.state.checkpoint import Checkpoint

MACHINE = Machine(16, gpu=True, jpeg_engines=7, gpu_memory=80 * 10**9, host_memory=160 * 10**9)
RECIPE = (256, 90, 5)
TUNED: dict[str, Any] = {"pretrained": "timm"}


def length(
    num_train: int | None, on_cuda: bool = False, world_size: int = 1, saved: Checkpoint | None = None, **flags: Any
) -> tuple[int, int, float]:
    """Images a step and process, epochs, and those of the warmup."""
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    values: dict[str, Any] = {"data_dir": Path("photos"), "amp": "none", "grad_exchange": "ddp"}
    config = TrainConfig(**values | flags)
    settings = choose_loader_settings(config, MACHINE, 0)
    found = resolve(config, ("a", "b"), DistEnv(0, 0, world_size, world_size, device), settings, saved, num_train)
    return found.batch_size, found.epochs, found.warmup_epochs


@pytest.mark.parametrize("on_cuda", [True, False])
@pytest.mark.parametrize("world_size", [1, 8, 128])
@pytest.mark.parametrize("flags", [{}, TUNED])
def test_the_recipe_of_imagenet_stays(on_cuda: bool, world_size: int, flags: dict[str, Any]) -> None:
    assert length(1_281_167, on_cuda, world_size, **flags) == RECIPE
    assert length(128_000, on_cuda, world_size, **flags | {"data_dir": None}) == RECIPE, "synthetic images"
    assert length(None, on_cuda, world_size, **flags) == RECIPE, "nothing is trained"


@pytest.mark.parametrize(
    ("num_train", "on_cuda", "flags", "expected"),
    [
        (200, True, {}, (16, 90, 5)),
        (1_000, True, {}, (16, 90, 5)),
        (2_500, True, {}, (32, 90, 5)),
        (9_469, True, {}, (128, 90, 5)),
        (12_800, True, {}, RECIPE),
        (1_000, True, TUNED, (16, 17, 1.7)),
        (9_469, True, TUNED, (128, 14, 1.4)),
        (100_000, True, TUNED, (256, 10, 1)),
        (200, False, {}, (16, 90, 5)),
        (1_000, False, {}, (16, 49, 4.9)),
        (9_469, False, {}, (32, 11, 1.1)),
        (200, False, TUNED, (16, 84, 5)),
        (1_000, False, TUNED, (16, 17, 1.7)),
        (5, True, {}, (4, 90, 5)),
    ],
    ids=str,
)
def test_few_images(num_train: int, on_cuda: bool, flags: dict[str, Any], expected: tuple[int, int, float]) -> None:
    assert length(num_train, on_cuda, **flags) == expected


@pytest.mark.parametrize("num_train", [100, 400, 1_500, 6_000, 25_000, 400_000])
@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("flags", [{}, TUNED, {"epochs": 10}, {"epochs": 3}])
def test_a_run_has_hundreds_of_steps(num_train: int, world_size: int, flags: dict[str, Any]) -> None:
    """Where batches of 16 images a process make so many."""
    for on_cuda in (True, False):
        batch_size, epochs, _ = length(num_train, on_cuda, world_size, **flags)
        steps = epochs * (num_train // (batch_size * world_size))
        assert steps >= min(300, 0.8 * epochs * num_train / (16 * world_size))


def test_what_is_given_decides_the_rest() -> None:
    assert length(2_500, epochs=3)[:2] == (16, 3), "a smaller batch, as 3 epochs of 78 steps are few"
    assert length(2_500, epochs=30)[:2] == (32, 30)
    assert length(2_500, batch_size=256, **TUNED)[:2] == (256, 90), "9 steps an epoch"
    assert length(2_500, True, 8)[0] == 16, "as the processes share a step"
    assert length(6_000, True, grad_accum_steps=4)[0] == length(1_500, True)[0] == 16
    assert length(2_000, True, val_fraction=0.5)[0] == length(1_000, True)[0]


def test_epochs_of_other_flags_come_on_top_or_keep_the_recipe() -> None:
    tuned = length(1_000, **TUNED)[1]
    assert length(1_000, **TUNED, freeze_epochs=2)[1] == tuned + 2
    assert length(1_000, **TUNED, warmup_epochs=2.5, cooldown_epochs=4, min_lr=1e-5)[1:] == (tuned + 7, 2.5)
    for flags in ({"schedule": "step"}, {"mixup_off_epoch": 80}, {"resize_schedule": "0:32"}):
        assert length(1_000, **TUNED, **flags)[1] == 90
    with pytest.raises(UserError, match="--warmup-epochs 90: must be less than --epochs 90"):
        validate(TrainConfig(data_dir=Path("photos"), warmup_epochs=90))


@pytest.mark.parametrize("before", [resolved(batch_size=16, epochs=49), resolved(batch_size=256, epochs=90)])
def test_a_resume_chooses_nothing_anew(before: Any) -> None:
    """Not on another number of processes or device, nor where an earlier version has written the checkpoint."""
    saved = checkpoint_of(before)
    for on_cuda in (True, False):
        assert length(1_000, on_cuda, 2, saved)[:2] == (before.batch_size // 2, before.epochs)
        assert length(1_000, on_cuda, 1, saved, epochs=7)[:2] == (before.batch_size, 7)


def test_the_reasons() -> None:
    config = resolved(batch_size=16, epochs=49)
    assert list(describe_length(config, 1_000, 62)) == [
        "--batch-size 16: 62 steps in an epoch of 1,000 images", "--epochs 49: 3,038 steps on a CPU"
    ]  # fmt: skip
    tuned = resolved(batch_size=16, epochs=17, given=frozenset({"batch_size"}), pretrained="timm")
    assert list(describe_length(tuned, 1_000, 62)) == ["--epochs 17: 1,054 steps to fine-tune"]
    assert not list(describe_length(resolved(batch_size=256), 1_281_167, 5_004))
