"""Meter: sums of an interval, and what a resume needs of them."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from tests.clock import Clock, measure_rank, train
from tests.forked import run_ranks
from utils.distributed.group import DistEnv
from utils.training.state.meter import WARMUP_STEPS, Interval, Meter, Totals, share_interval
from utils.training.state.train_state import TrainState
from utils.training.summary import describe_timed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("utils.training.state.meter.time", found)
    return found


def loader(meter: Meter, losses: list[float], images: int = 4) -> None:
    for loss in losses:
        with meter.waiting():
            pass
        meter.update(torch.tensor(loss), images)
        meter.end_step()


def test_loss_is_the_mean_over_images(cpu: DistEnv) -> None:
    meter = Meter(cpu)
    meter.update(torch.tensor(1.0), 1)
    meter.update(torch.tensor(4.0), 2)
    assert meter.read().metrics["train/loss"] == pytest.approx(3.0)
    loader(meter, [5.0])
    assert meter.read().metrics["train/loss"] == 5.0, "an interval begins at zero"


def test_an_interval_survives_a_resume(cpu: DistEnv) -> None:
    whole, first, second = Meter(cpu), Meter(cpu), Meter(cpu)
    loader(whole, [0.1, 0.2, 0.7])
    loader(first, [0.1, 0.2])
    second.load_state_dict(first.state_dict())
    loader(second, [0.7])
    assert whole.read().metrics == second.read().metrics


def test_the_gradient_norm_is_the_mean_over_clipped_steps_and_survives_a_resume(cpu: DistEnv) -> None:
    first, second = Meter(cpu), Meter(cpu)
    loader(first, [1.0])
    first.add_grad_norm(torch.tensor(2.0))
    second.load_state_dict(first.state_dict())
    loader(second, [1.0])
    second.add_grad_norm(torch.tensor(6.0))
    assert second.read().metrics["grad_norm"] == 4.0
    loader(second, [1.0])
    assert "grad_norm" not in second.read().metrics, "nothing was clipped"


def test_states_of_earlier_versions_are_read(cpu: DistEnv) -> None:
    state = Meter(cpu).state_dict()
    del state["metrics"]
    state |= {"loss": 6.0, "images": 4}
    for more, expected in (({}, {}), ({"grad_norm": {"sum": 3.0, "steps": 2}}, {"grad_norm": 1.5})):
        for saved in (state | more, share_interval([state | more] * 2, 0)):
            meter = Meter(cpu)
            meter.load_state_dict(saved)
            assert meter.read().metrics == {"train/loss": 1.5} | expected


def test_an_interval_has_the_figures_of_the_clock(cpu: DistEnv, clock: Clock) -> None:
    meter = Meter(cpu)
    clock.sleep(100)  # compilation, an evaluation
    meter.start()
    train(meter, clock, steps=10, images=64, seconds=0.5, wait=0.125)
    with meter.paused():
        clock.sleep(30)
    clock.sleep(3)
    assert meter.read() == Interval(
        {"train/loss": 1.0},
        images_per_second=80.0,
        data_wait=1.25 / 8,
        bad_steps=0,
        skipped_steps=0,
        seconds=8.0,
        checkpoint_seconds=30.0,
    )
    train(meter, clock, steps=4, images=64, seconds=0.25, wait=0.25)
    second = meter.read()
    assert (second.images_per_second, second.data_wait) == (256.0, 1.0), "nothing is left of the one before"
    assert (second.seconds, second.checkpoint_seconds) == (1.0, 0.0)
    assert meter.totals == Totals(steps=4, images=256.0, seconds=1.0, wait=1.0), "without the first"


def test_totals_leave_out_the_warm_up_of_a_launch(cpu: DistEnv, clock: Clock) -> None:
    """The run in which they were seen to matter: 468 steps, a line every 50 of them."""
    meter = Meter(cpu)
    for start_interval in range(0, 468, 50):
        meter.start()
        seconds, wait = (
            (60.0, 1.0) if start_interval == 0 else (0.5, 0.25) if start_interval < WARMUP_STEPS else (0.25, 0.0625)
        )
        train(meter, clock, min(50, 468 - start_interval), 256, seconds, wait)
        meter.read()
        clock.sleep(7)  # an evaluation
    assert meter.totals == Totals(steps=268, images=268 * 256, seconds=67.0, wait=16.75)
    assert (meter.totals.images_per_second, meter.totals.data_wait) == (1024.0, 0.25)
    assert describe_timed(meter.totals.steps, 468) == (
        "images/s and data wait cover 268 of 468 steps: without the first of each launch, in which buffers grow\n"
    )
    assert describe_timed(468, 468) == ""


@pytest.mark.parametrize(
    ("intervals", "timed"),
    [
        ((7,), 7),  # nothing else
        ((7, 1), 1),
        ((50, 50, 20), 70),
        ((199, 1, 30), 30),
        ((199, 2, 3), 3),
        ((1, 100, 99, 198), 397),  # fewer than those before
        ((1, 100, 99, 199), 199),
        ((200, 1), 1),
        ((1000,), 1000),
        ((1000, 1000), 1000),
    ],
)
def test_short_runs_have_totals_too(cpu: DistEnv, intervals: tuple[int, ...], timed: int) -> None:
    meter = Meter(cpu)
    for steps in intervals:
        loader(meter, [1.0] * steps)
        meter.read()
    assert (meter.totals.steps, meter.totals.images) == (timed, 4 * timed)


def test_totals_survive_a_resume(cpu: DistEnv, clock: Clock) -> None:
    """Of each launch its own warm-up is left out; what was under way when a stop came is not timed."""
    states: list[dict[str, Any]] = []
    for launch in range(3):
        meter = Meter(cpu)
        if states:
            meter.load_state_dict(states[-1])
        assert meter.totals.steps == 300 * launch
        for interval in range(5):
            meter.start()
            train(meter, clock, 100, 8, seconds=(9.0, 9.0, 0.5, 0.5, 0.5)[interval], wait=0.25)
            meter.read()
        train(meter, clock, 10, 8, seconds=9.0)
        file = io.BytesIO()
        torch.save(meter.state_dict(), file)
        file.seek(0)
        states.append(torch.load(file, weights_only=True))
    assert meter.totals == Totals(steps=900, images=7200.0, seconds=450.0, wait=225.0)
    for rank in range(3):  # on another number of processes
        other = Meter(cpu)
        resharded = share_interval([states[-1], states[-1]], rank)
        assert resharded["metrics"].get("train/loss") == ((160.0, 160.0) if rank == 0 else None)
        other.load_state_dict(resharded)
        assert other.totals == meter.totals


@pytest.mark.gpu
def test_a_pause_begins_when_the_device_has_done_its_steps() -> None:
    meter = Meter(DistEnv(0, 0, 1, 1, torch.device("cuda", 0)))
    meter.update(torch.tensor(1.0, device="cuda"), 4)
    meter.start()
    memory = torch.zeros(8_000_000, dtype=torch.uint8, device="cuda")
    with meter.waiting():
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    assert not torch.cuda.current_stream().query()
    with meter.paused():
        assert torch.cuda.current_stream().query()
    interval = meter.read()
    assert 0.5 < interval.data_wait <= 1, "the device slept in the wait, not in the pause"
    assert interval.speed()["gpu_memory_mb"] >= memory.nbytes / 10**6


@pytest.mark.dist
def test_ranks_are_summed(tmp_path: Path) -> None:
    run_ranks(measure_rank, 2, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    interval = Interval(
        {"train/loss": math.nan}, images_per_second=48.0, data_wait=0.375, bad_steps=1, skipped_steps=0, seconds=2.0
    )
    assert ranks[0]["found"] == ranks[1]["found"] == repr([False, interval, False, interval])
    one = {"steps": 5, "images": 96.0, "seconds": 2.0, "wait": 0.75}
    assert ranks[0]["totals"] == ranks[1]["totals"]
    assert {name: ranks[0]["totals"][name] for name in ("first", "early")} == {"first": one, "early": one}


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
        state.optimizer_step(clip_grad=0.0)
        meter.update(torch.tensor(1.0), 4)
    resumed = Meter(cpu)
    resumed.load_state_dict(meter.state_dict())
    for one in (meter, resumed):
        assert one.read().skipped_steps == 2
        loader(one, [1.0])
        assert one.read().skipped_steps == 0
        assert one.skipped_steps == 2
