"""TrainState: everything that a resume needs, and its own position."""

import dataclasses
import time
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from utils.distributed.group import DistEnv
from utils.distributed.launcher import seconds_since_launch
from utils.figures import figure
from utils.options.resolved import ResolvedConfig
from utils.seed import random_state
from utils.training.optimization.optim import create_ema, create_optimizer
from utils.training.optimization.optimizer_graph import GraphedOptimizerStep, create_graphed_step
from utils.training.state.meter import Meter, share_interval

NETWORKS = ("model", "model_ema")  # timm's names, so that timm's loaders read our checkpoints


@dataclasses.dataclass(frozen=True)
class BestEpoch:
    """The evaluation that best.pt holds.

    Attributes:
        epoch: epochs that were trained, from 1.
        step: optimizer steps taken.
        top1: percent, of the network that is better; None where images have any number of classes.
        by: the figure of `--best-by`.
        value: of that figure, of the model or of its moving average, whichever is better; None in checkpoints without
            `--best-by`, which have chosen by top-1.
    """

    epoch: int
    step: int
    top1: float | None
    by: str = "top1"
    value: float | None = None

    def __post_init__(self) -> None:
        if self.value is None:
            object.__setattr__(self, "value", self.top1)

    @property
    def shown(self) -> str:
        """The value as lines show it, such as `76.30 %`."""
        return figure(self.by).show.format(self.value)


@dataclasses.dataclass(frozen=True)
class ReplicatedState:
    """The part of a run's state that is the same on every rank.

    Attributes:
        networks: state_dict by the names in `NETWORKS`; the moving average only where there is one.
        optimizer, scaler: state_dict of each; the scaler's is empty without fp16.
        epoch, step, best, result, evaluations_since_best: see `TrainState`.
        seconds: wall time of all launches.
    """

    networks: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    epoch: int
    step: int
    best: BestEpoch | None
    result: dict[str, Any]
    evaluations_since_best: int
    seconds: float

    @property
    def own_result(self) -> dict[str, Any]:
        """`result` if it is of these weights; {} if they have trained on since, or were not evaluated."""
        position = {"epoch": self.epoch, "step": self.step}
        return self.result if position.items() <= self.result.items() else {}


@dataclasses.dataclass(frozen=True)
class RankState:
    """The part of a run's state that each rank has for itself.

    Attributes:
        loader: `TrainLoader.state()`.
        random: `random_state()`.
        meter: `Meter.state_dict()`.
        buffers: batch norm's running statistics by network, on the CPU.
    """

    loader: dict[str, Any]
    random: dict[str, Any]
    meter: dict[str, Any]
    buffers: dict[str, dict[str, Tensor]]


@dataclasses.dataclass
class TrainState:
    """The run at one instant.

    Attributes:
        model: the network itself, neither compiled nor wrapped for distribution.
        optimizer, scaler: as torch's.
        ema: moving average of `model`, or None.
        meter: the log interval under way.
        graphed_step: the optimizer's step as a CUDA graph, or None.
        epoch: epochs that are trained and, where that is due, evaluated. Between an epoch's last step and the end of
            its evaluation, `step` is ahead: a resume then goes straight to the evaluation.
        step: optimizer steps taken.
        best: what best.pt in the output folder holds; None if there is none.
        result: the last evaluation's record.
        evaluations_since_best: in a row, without a better one.
        started: `time.perf_counter()` at the launch, before the first import.
        earlier_seconds: wall time of the launches before this one.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: ModelEmaV3 | None
    meter: Meter
    env: DistEnv
    graphed_step: GraphedOptimizerStep | None = None
    epoch: int = 0
    step: int = 0
    best: BestEpoch | None = None
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluations_since_best: int = 0
    started: float = dataclasses.field(default_factory=lambda: time.perf_counter() - seconds_since_launch())
    earlier_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of all launches so far."""
        return self.earlier_seconds + time.perf_counter() - self.started

    @property
    def is_evaluated(self) -> bool:
        """Whether `result` is of the last epoch that was trained."""
        return self.result.get("epoch") == self.epoch

    def optimizer_step(self, clip_grad: float) -> None:
        """Clip the gradients to this norm (0: do not), update the weights, then their moving average."""
        if clip_grad > 0:
            self.scaler.unscale_(self.optimizer)
            self.meter.add_grad_norm(nn.utils.clip_grad_norm_(self.model.parameters(), clip_grad))
        self._update_weights()
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)

    def _update_weights(self) -> None:
        """In fp16 not where a gradient overflowed, which is counted without waiting for the device."""
        if self.graphed_step is not None:
            self.graphed_step()
            return
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return
        one = torch.ones((), device=self.env.device)
        scale = self.scaler.scale(one)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.meter.count_skipped(self.scaler.scale(one) < scale)

    def networks(self) -> dict[str, nn.Module]:
        """The networks under their names in a checkpoint."""
        modules = (self.model, self.ema.module if self.ema is not None else None)
        return {name: module for name, module in zip(NETWORKS, modules, strict=True) if module is not None}

    def replicated_state(self) -> ReplicatedState:
        """What is the same on every rank. The learning-rate schedule is a function of `step` and has no state."""
        return ReplicatedState(
            networks={name: module.state_dict() for name, module in self.networks().items()},
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            epoch=self.epoch,
            step=self.step,
            best=self.best,
            result=self.result,
            evaluations_since_best=self.evaluations_since_best,
            seconds=self.seconds,
        )

    def rank_state(self, loader: dict[str, Any]) -> RankState:
        """What this rank has for itself; `loader` is its `TrainLoader.state()`.

        The buffers of one of several ranks are on the CPU, for rank 0.
        """
        buffers = {name: float_buffers(module) for name, module in self.networks().items()}
        if self.env.world_size > 1:
            buffers = {name: {key: value.cpu() for key, value in found.items()} for name, found in buffers.items()}
        return RankState(
            loader=loader, random=random_state(self.env.device), meter=self.meter.state_dict(), buffers=buffers
        )

    def load(self, replicated: ReplicatedState, rank_state: RankState) -> None:
        """Undo of `replicated_state` and `rank_state`, but for the loader and the random numbers.

        Those two belong to the caller, who makes the loader.
        """
        for name, module in self.networks().items():
            module.load_state_dict(replicated.networks[name])
            module.load_state_dict(rank_state.buffers[name], strict=False)
        self.optimizer.load_state_dict(replicated.optimizer)
        if replicated.scaler:  # empty unless the checkpoint was trained in fp16
            self.scaler.load_state_dict(replicated.scaler)
        self.epoch, self.step = replicated.epoch, replicated.step
        self.best, self.result = replicated.best, replicated.result
        self.evaluations_since_best = replicated.evaluations_since_best
        self.earlier_seconds = replicated.seconds
        self.meter.load_state_dict(rank_state.meter)


def create_state(config: ResolvedConfig, model: nn.Module, env: DistEnv, global_batch_size: int) -> TrainState:
    """The state before the first step.

    Args:
        model: on its device, with its first weights.
        global_batch_size: images of an optimizer step.
    """
    optimizer = create_optimizer(config, model, global_batch_size)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scaler=GradScaler(env.device.type, enabled=config.amp == "fp16"),
        ema=create_ema(model, config.ema_decay) if config.ema_decay > 0 else None,
        meter=Meter(env),
        env=env,
        graphed_step=create_graphed_step(config, optimizer, env.device),
    )


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers of the state, batch norm's running statistics: they differ between ranks."""
    names = {name for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    return {name: tensor for name, tensor in module.state_dict().items() if name in names}


def mean_buffers(buffers_by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean over the ranks' `float_buffers`, for the network that a checkpoint hands to others."""
    if len(buffers_by_rank) == 1:
        return buffers_by_rank[0]
    return {
        name: torch.stack([buffers[name].double() for buffers in buffers_by_rank]).mean(0).to(first.dtype)
        for name, first in buffers_by_rank[0].items()
    }


def reshard(ranks: list[RankState], rank: int) -> RankState:
    """What `rank` loads where other processes, or batches of another size, share the steps from now on.

    Running statistics are the mean over the ranks, which is in the replicated state. The loader's state and the random
    numbers are empty: they begin again.
    """
    return RankState(
        loader={},
        random={},
        meter=share_interval([state.meter for state in ranks], rank),
        buffers={name: {} for name in ranks[0].buffers},
    )
