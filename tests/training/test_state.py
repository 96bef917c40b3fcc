"""TrainState: what a checkpoint holds of a run comes back, and nothing else."""

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.clock import Clock
from tests.conftest import assert_same
from utils.distributed.group import DistEnv
from utils.training.state.meter import Meter
from utils.training.state.train_state import BestEpoch, TrainState, float_buffers, mean_buffers, reshard


def create_state(env: DistEnv, seed: int, started: float = 0.0) -> TrainState:
    """A network with a norm, and a buffer that its state_dict leaves out, after a step of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("scratch", torch.full((1,), float(seed)), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    scaler = GradScaler("cpu", enabled=False)
    return TrainState(model, optimizer, scaler, ModelEmaV3(model), Meter(env), env, started=started)


def test_a_new_run_has_nothing_behind_it(cpu: DistEnv) -> None:
    state = create_state(cpu, 0)
    assert (state.epoch, state.step, state.best, state.result, state.earlier_seconds) == (0, 0, None, {}, 0.0)


def test_a_state_comes_back(cpu: DistEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("utils.training.state.train_state.time", clock)
    first, second = create_state(cpu, 1, started=900.0), create_state(cpu, 2, started=995.0)
    first.earlier_seconds = 30.0
    first.epoch, first.step, first.best, first.result = 2, 17, BestEpoch(1, 9, 12.5), {"val/top1": 12.5}
    first.meter.update(torch.tensor(1.5), 4)
    assert first.seconds == 130.0, "100 of this launch, 30 of those before"
    second.load(first.replicated_state(), first.rank_state({}))
    assert second.seconds == 135.0
    assert (second.epoch, second.step, second.best, second.result) == (2, 17, BestEpoch(1, 9, 12.5), {"val/top1": 12.5})
    assert second.networks().keys() == {"model", "model_ema"}
    for part in ("networks", "optimizer"):
        assert_same(getattr(first.replicated_state(), part), getattr(second.replicated_state(), part), part)
    assert_same(first.meter.state_dict(), second.meter.state_dict())
    second.ema = None
    assert second.networks().keys() == {"model"}


def test_running_statistics_alone_differ_between_ranks(cpu: DistEnv) -> None:
    ranks = [create_state(cpu, seed).rank_state({"at": seed}) for seed in range(3)]
    statistics = [rank.buffers["model"] for rank in ranks]
    assert statistics[0].keys() == {"1.running_mean", "1.running_var"}
    mean = mean_buffers(statistics)
    for name in statistics[0]:
        torch.testing.assert_close(mean[name], sum(buffers[name] for buffers in statistics) / 3)
        assert mean[name].dtype == torch.float32
    assert reshard(ranks, 0).buffers == {"model": {}, "model_ema": {}}
    assert float_buffers(nn.BatchNorm1d(2, track_running_stats=False)) == {}
