"""The learning rate of each step, by itself and beside timm's own schedules."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn
from torch.optim import SGD

from tests.conftest import resolved
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig
from utils.options.validation import validate
from utils.training.optimization.lr_schedule import create_schedule, describe_schedule, rate_at
from utils.training.optimization.optim import create_optimizer, learning_rate, peak_lr, resolve_optimizer


def rates(config: ResolvedConfig, steps_per_epoch: int) -> list[float]:
    optimizer = create_optimizer(config, torch.nn.Linear(2, 2), 512)
    schedule = create_schedule(config, optimizer, peak_lr(config, 512), steps_per_epoch)
    found = []
    for step in range(config.epochs * steps_per_epoch):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_run_of_one_step_has_the_peak_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert rates(resolved(epochs=1, warmup_epochs=0, lr=0.1), 1) == [0.2]
    assert rates(resolved(epochs=2, warmup_epochs=1, lr=0.1), 1) == [0.2, 0.2]
    assert caplog.records == []


def test_linear_warmup_then_cosine() -> None:
    config = resolved(epochs=10, lr=0.1, warmup_epochs=2.0)
    found = rates(config, 5)
    assert found[:11] == pytest.approx([0.2 * step / 10 * 0.9 + 0.02 for step in range(11)])
    assert found[10] == max(found) == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.1)  # half-way down a half cosine
    assert found == sorted(found[:11]) + sorted(found[11:], reverse=True)
    assert 0 < found[-1] < 0.001


def test_every_rate_of_a_run_of_eight_steps() -> None:
    """The cosine falls from its first step to 0 after the last, whatever of it the warmup leaves."""
    config = resolved(epochs=1, lr=0.5, warmup_epochs=0.0)
    cosine = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates(config, 8) == pytest.approx(cosine)
    cosine = [(1 + math.cos(math.pi * step / 7)) / 2 for step in range(7)]
    assert rates(dataclasses.replace(config, warmup_epochs=1 / 8), 8) == pytest.approx([1.0, *cosine])
    # A warmup that rounds to the whole run leaves one step at the peak.
    warmup = [1 / 7 + step / 7 * 6 / 7 for step in range(7)]
    assert rates(dataclasses.replace(config, warmup_epochs=0.99), 8) == pytest.approx([*warmup, 1.0])


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.0), (1, 0.5), (3, 0.0)])
def test_short_runs_have_a_rate_above_zero(epochs: int, warmup: float) -> None:
    assert all(rate > 0 for rate in rates(resolved(epochs=epochs, warmup_epochs=warmup), 1))


STEPS = 5  # an epoch


@pytest.mark.parametrize(
    ("flags", "timm"),
    [
        ({"schedule": "cosine", "min_lr": 0.01}, {"sched": "cosine", "min_lr": 0.02}),
        ({"schedule": "linear"}, {"sched": "poly", "decay_rate": 1.0}),
        ({"schedule": "linear", "min_lr": 0.01}, {"sched": "poly", "decay_rate": 1.0, "min_lr": 0.02}),
        ({"schedule": "step", "decay_epochs": 3.0}, {"sched": "step", "decay_epochs": 3, "warmup_prefix": False}),
        ({"schedule": "step", "decay_epochs": 2.4, "decay_rate": 0.5},
         {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.5, "warmup_prefix": False}),
        ({"schedule": "constant"}, {"sched": "step", "decay_rate": 1.0}),
        ({"min_lr": 0.01, "cooldown_epochs": 3}, {"sched": "cosine", "min_lr": 0.02, "cooldown_epochs": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_rates_are_timms(flags: dict[str, Any], timm: dict[str, Any]) -> None:
    """Of its train.py, which counts warmup and cooldown beside --epochs, and has rates that are not scaled."""
    config = resolved(epochs=10, lr=0.1, warmup_epochs=2.0, **flags)
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    given: dict[str, Any] = {"warmup_prefix": True} | timm
    epochs = 10 - (2 if given["warmup_prefix"] else 0) - config.cooldown_epochs
    schedule, length = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=2, warmup_lr=0.02, step_on_epochs=False, updates_per_epoch=STEPS,
        **given,
    )  # fmt: skip
    assert length == 10
    expected = []
    for step in range(10 * STEPS):
        schedule.step_update(step)
        expected.append(optimizer.param_groups[0]["lr"])
    found = rates(config, STEPS)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found == [rate_at(config, step, STEPS, 512) for step in range(10 * STEPS)]


def test_cooldown_keeps_the_end_of_the_schedule() -> None:
    found = rates(resolved(epochs=10, lr=0.1, warmup_epochs=0.0, min_lr=0.01, cooldown_epochs=3), STEPS)
    assert found[7 * STEPS :] == [pytest.approx(0.02)] * (3 * STEPS)
    assert min(found[: 7 * STEPS]) > 0.02


def test_groups_follow_the_schedule_with_their_own_factor() -> None:
    config = resolved(epochs=10, lr=0.1, warmup_epochs=2.0, min_lr=0.01)
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": scale} for scale in (0.5, 3.0)]
    optimizer = SGD(groups)
    schedule = create_schedule(config, optimizer, 0.2, STEPS)
    for step, expected in enumerate(rates(config, STEPS)):
        schedule.step_update(step)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5 * expected, 3 * expected])
        assert learning_rate(optimizer) == pytest.approx(expected), "metrics have that of the schedule"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ""),
        ({"min_lr": 1e-3}, "cosine to 0.002 = 0.001 x 512 / 256"),
        ({"min_lr": 1e-3, "cooldown_epochs": 4},
         "cosine to 0.002 = 0.001 x 512 / 256, which the last 4 epochs keep"),
        ({"min_lr": 1e-3, "cooldown_epochs": 1}, "cosine to 0.002 = 0.001 x 512 / 256, which the last epoch keeps"),
        ({"schedule": "linear"}, "linear to 0"),
        ({"schedule": "step"}, "step, 0.1 times the rate every 30 epochs"),
        ({"schedule": "step", "decay_epochs": 2.4, "decay_rate": 0.97}, "step, 0.97 times the rate every 2.4 epochs"),
        ({"schedule": "constant"}, "constant"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_printed(flags: dict[str, Any], expected: str) -> None:
    assert describe_schedule(resolved(**flags), 512) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"schedule": "step", "min_lr": 1e-3}, "--min-lr 0.001 with --schedule step: not used; leave it out"),
        ({"schedule": "constant", "cooldown_epochs": 2}, "--cooldown-epochs 2 with --schedule constant: not used"),
        ({"decay_rate": 0.5}, "--decay-rate 0.5 with --schedule cosine: not used; use --schedule step"),
        ({"schedule": "step", "epochs": 20},
         "--decay-epochs 30: must be less than --epochs 20, or the rate never falls; give --decay-epochs 6.7"),
        ({"cooldown_epochs": 5},
         "--cooldown-epochs 5 without --min-lr: these epochs would have a rate of 0; give --min-lr"),
        ({"cooldown_epochs": 8, "min_lr": 0.1, "warmup_epochs": 2.0, "epochs": 10},
         "--cooldown-epochs 8: with --warmup-epochs 2 must be less than --epochs 10; lower one"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(resolved(data_dir="x", **flags))
    assert str(caught.value).startswith(message)


def test_a_schedule_must_fall() -> None:
    with pytest.raises(UserError, match=r"^--min-lr 0\.3: must be less than --lr 0\.256; lower it$"):
        resolve_optimizer(resolved(min_lr=0.3))


def test_the_rates_of_a_checkpoint_do_not_matter() -> None:
    """A schedule may be made before or after the optimizer has loaded its state."""
    config = resolved(epochs=10, lr=0.1, warmup_epochs=2.0)
    optimizer = create_optimizer(config, torch.nn.Linear(2, 2), 512)
    create_schedule(config, optimizer, 7.0, STEPS).step_update(30)
    create_schedule(config, optimizer, peak_lr(config, 512), STEPS).step_update(30)
    assert optimizer.param_groups[0]["lr"] == rates(config, STEPS)[30]
