"""Meter: sums of an interval, and what a resume needs of them."""

import math
import time

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from train import update_weights
from utils.distributed import DistEnv
from utils.metrics import Meter
from utils.state import TrainState


def feed(meter: Meter, losses: list[float], images: int = 4) -> None:
    for loss in losses:
        with meter.waiting():
            pass
        meter.update(torch.tensor(loss), images)


def test_loss_is_the_mean_over_images(cpu: DistEnv) -> None:
    meter = Meter(cpu)
    meter.update(torch.tensor(1.0), 1)
    meter.update(torch.tensor(4.0), 2)
    assert meter.read().loss == pytest.approx(3.0)
    feed(meter, [5.0])
    assert meter.read().loss == 5.0, "an interval begins at zero"


def test_an_interval_survives_a_resume(cpu: DistEnv) -> None:
    whole, first, second = Meter(cpu), Meter(cpu), Meter(cpu)
    feed(whole, [0.1, 0.2, 0.7])
    feed(first, [0.1, 0.2])
    second.load_state_dict(first.state_dict())
    feed(second, [0.7])
    assert whole.read().loss == second.read().loss


def test_waiting_is_a_share_of_the_time(cpu: DistEnv) -> None:
    meter = Meter(cpu)
    meter.start()
    with meter.waiting():
        time.sleep(0.05)
    meter.update(torch.tensor(1.0), 1)
    with meter.paused():
        time.sleep(0.2)
    interval = meter.read()
    assert 0.3 < interval.data_wait <= 1  # 0.2 if the pause counted


def test_totals_leave_out_the_first_interval_if_they_can(cpu: DistEnv) -> None:
    meter = Meter(cpu)
    feed(meter, [1.0], images=1000)
    meter.read()
    assert meter.totals.images == 1000
    feed(meter, [1.0], images=7)
    meter.read()
    assert meter.totals.images == 7
    later = Meter(cpu)
    later.load_state_dict(meter.state_dict())
    assert later.totals.images == 7


def test_bad_steps_are_counted_in_a_row(cpu: DistEnv) -> None:
    meter = Meter(cpu)
    for values, bad in (([1.0, float("nan"), float("inf")], 2), ([float("nan")], 3), ([float("nan"), 2.0], 0)):
        for value in values:
            for loss in (1.0, value, 1.0):  # of the batches of a step
                meter.update(torch.tensor(loss), 4)
            meter.end_step()
        assert meter.is_finite() == (bad == 0)
        assert meter.read().bad_steps == bad


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")
def test_steps_that_fp16_skips_are_counted(cpu: DistEnv) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    meter = Meter(cpu)
    state = TrainState(
        model=torch.nn.ParameterList([weight]), optimizer=torch.optim.SGD([weight], lr=1.0),
        scaler=GradScaler("cpu"), ema=None, meter=meter, env=cpu, started=0.0,
    )  # fmt: skip
    for gradient in (1.0, math.inf, math.nan, 1.0):
        state.scaler.scale(torch.zeros(()))  # as before a backward pass
        weight.grad = torch.tensor([gradient])
        update_weights(state)
        meter.update(torch.tensor(1.0), 4)
    resumed = Meter(cpu)
    resumed.load_state_dict(meter.state_dict())
    for one in (meter, resumed):
        assert one.read().skipped_steps == 2
        feed(one, [1.0])
        assert one.read().skipped_steps == 0
        assert one.skipped_steps == 2
