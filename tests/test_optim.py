"""Learning rate and parameter groups."""

import dataclasses
import math

import pytest
import timm
import torch

from utils.config import TrainConfig
from utils.errors import UserError
from utils.optim import (
    _has_fused,
    check_optimizer,
    create_ema,
    create_optimizer,
    create_schedule,
    describe_ema,
    scaled_lr,
)


def rates(config: TrainConfig, steps_per_epoch: int) -> list[float]:
    optimizer = create_optimizer(config, torch.nn.Linear(2, 2), 512)
    schedule = create_schedule(config, optimizer, steps_per_epoch)
    found = []
    for step in range(config.epochs * steps_per_epoch):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_lr_is_per_256_images() -> None:
    assert scaled_lr(0.1, 1024) == pytest.approx(0.4)


def test_linear_warmup_then_cosine() -> None:
    config = TrainConfig(epochs=10, lr=0.1, warmup_epochs=2.0)
    found = rates(config, 5)
    assert found[:11] == pytest.approx([0.2 * step / 10 * 0.9 + 0.02 for step in range(11)])
    assert found[10] == max(found) == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.1)  # half-way down a half cosine
    assert found == sorted(found[:11]) + sorted(found[11:], reverse=True)
    assert 0 < found[-1] < 0.001


def test_every_rate_of_a_run_of_eight_steps() -> None:
    """The cosine falls from its first step to 0 after the last, whatever of it the warmup leaves."""
    config = TrainConfig(epochs=1, lr=0.5, warmup_epochs=0.0)
    cosine = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates(config, 8) == pytest.approx(cosine)
    cosine = [(1 + math.cos(math.pi * step / 7)) / 2 for step in range(7)]
    assert rates(dataclasses.replace(config, warmup_epochs=1 / 8), 8) == pytest.approx([1.0, *cosine])
    # A warmup that rounds to the whole run leaves one step at the peak.
    warmup = [1 / 7 + step / 7 * 6 / 7 for step in range(7)]
    assert rates(dataclasses.replace(config, warmup_epochs=0.99), 8) == pytest.approx([*warmup, 1.0])


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.0), (1, 0.5), (3, 0.0)])
def test_short_runs_have_a_rate_above_zero(epochs: int, warmup: float) -> None:
    assert all(rate > 0 for rate in rates(TrainConfig(epochs=epochs, warmup_epochs=warmup), 1))


def test_no_decay_on_biases_and_norms() -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = create_optimizer(TrainConfig(weight_decay=0.01, momentum=0.8), model, 256)
    for group in optimizer.param_groups:
        decayed = {parameter.ndim > 1 for parameter in group["params"]}
        assert decayed == {group["weight_decay"] > 0}
        assert group["momentum"] == 0.8
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_other_optimizers() -> None:
    config = dataclasses.replace(TrainConfig(), optimizer="adamw")
    assert isinstance(create_optimizer(config, torch.nn.Linear(2, 2), 256), torch.optim.AdamW)
    with pytest.raises(UserError, match="--optimizer adamv: unknown to timm; the closest are adam"):
        check_optimizer("adamv")


def test_which_optimizers_have_one_kernel_for_all_weights() -> None:
    names = ("sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "rmsprop", "adafactor")
    assert [_has_fused(name) for name in names] == [True] * 5 + [False] * 3
    assert not create_optimizer(TrainConfig(), torch.nn.Linear(2, 2), 256).defaults["fused"], "on the CPU"


def test_moving_average_reaches_its_decay() -> None:
    ema = create_ema(torch.nn.Linear(2, 2), 0.9999)
    assert [ema.get_decay(step) for step in (0, 1)] == [0.0, 0.0], "a copy"
    assert [ema.get_decay(3 + n - 1) for n in (0, 5, 1000)] == pytest.approx([1 / 10, 6 / 15, 1001 / 1010])
    assert ema.get_decay(89_990) < 0.9999
    assert ema.get_decay(89_992) == 0.9999
    assert describe_ema(ema, 100_000) == "decay grows to 0.9999 in the first 89,992 steps"
    assert describe_ema(ema, 50_040) == "decay grows to 0.99982 in the 50,040 steps of the run, too few for 0.9999"
    short, long = (describe_ema(create_ema(torch.nn.Linear(2, 2), 0.9), steps) for steps in (83, 82))
    assert "grows to 0.9 in the first 82" in short
    assert "too few for 0.9" in long


def test_optimizers_take_the_same_step_in_every_process() -> None:
    """Or several processes refuse them: their random numbers differ."""
    known = timm.optim.list_optimizers()
    tried, refused = 0, []
    for name in known:
        try:
            check_optimizer(name, world_size=2)
            results = [train_a_little(name, seed) for seed in (0, 1)]
        except UserError:
            refused.append(name)
            continue
        tried += 1
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), name
    assert {"kron", "kronc", "kronw"} <= set(refused)
    assert tried > len(known) / 2
    with pytest.raises(UserError, match="draws random numbers, so that the weights of 2 processes would part"):
        check_optimizer("kron", world_size=2)
    check_optimizer("kron", world_size=1)


def train_a_little(name: str, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model, images = torch.nn.Linear(4, 3), torch.rand(2, 4)
    optimizer = create_optimizer(TrainConfig(optimizer=name, lr=0.1), model, 256)
    torch.manual_seed(seed)
    for _ in range(3):
        model(images).square().sum().backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]
