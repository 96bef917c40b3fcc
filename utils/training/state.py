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
from utils.seed import random_state
from utils.training.metrics import Meter, share_interval

SHARED_MODULES = ("model", "model_ema")  # timm's names, so that timm's loaders read our checkpoints


@dataclasses.dataclass
class TrainState:
    """The run at one instant.

    Attributes:
        model: the network itself, neither compiled nor wrapped for distribution.
        optimizer, scaler: as torch's.
        ema: moving average of `model`, or None.
        meter: the log interval under way.
        env: this process.
        epoch: epochs that are trained and evaluated. Between an epoch's last step and the end of its evaluation,
            `step` is ahead: a resume then goes straight to the evaluation.
        step: optimizer steps taken.
        best_top1: percent, of the best evaluation so far, of the model or its average; negative before the first.
        result: the last evaluation's record.
        started: `time.perf_counter()` at the launch.
        earlier_seconds: wall time of the launches before this one.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    ema: ModelEmaV3 | None
    meter: Meter
    env: DistEnv
    epoch: int = 0
    step: int = 0
    best_top1: float = -1.0
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    earlier_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of all launches so far."""
        return self.earlier_seconds + time.perf_counter() - self.started

    def modules(self) -> dict[str, nn.Module]:
        """The networks under their names in a checkpoint."""
        modules = (self.model, self.ema.module if self.ema is not None else None)
        return {name: module for name, module in zip(SHARED_MODULES, modules, strict=True) if module is not None}

    def shared(self) -> dict[str, Any]:
        """What is the same on every rank. The learning-rate schedule is a function of `step` and has no state."""
        return {name: module.state_dict() for name, module in self.modules().items()} | {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "best_top1": self.best_top1,
            "result": self.result,
            "seconds": self.seconds,
        }

    def own(self, loader: dict[str, Any]) -> dict[str, Any]:
        """What each rank has for itself: its loader's state, random state, interval, and running statistics."""
        return {
            "loader": loader,
            "random": random_state(self.env.device),
            "meter": self.meter.state_dict(),
            "buffers": {name: float_buffers(module) for name, module in self.modules().items()},
        }

    def load(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Undo of `shared` and `own`; the loader's and the random part are for whoever makes the loader."""
        for name, module in self.modules().items():
            module.load_state_dict(shared[name])
            module.load_state_dict(own["buffers"][name], strict=False)
        self.optimizer.load_state_dict(shared["optimizer"])
        if shared["scaler"]:  # empty unless the checkpoint was trained in fp16
            self.scaler.load_state_dict(shared["scaler"])
        for name in ("epoch", "step", "best_top1", "result"):
            setattr(self, name, shared[name])
        self.earlier_seconds = shared["seconds"]
        self.meter.load_state_dict(own["meter"])


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of the floating-point buffers, batch norm's running statistics: they differ between ranks."""
    saved = module.state_dict().keys()
    return {
        name: buffer.detach().cpu().clone()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and name in saved
    }


def mean_buffers(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean over the ranks' `float_buffers`, for the network that a checkpoint hands to others."""
    return {
        name: torch.stack([buffers[name].double() for buffers in of_ranks]).mean(0).to(first.dtype)
        for name, first in of_ranks[0].items()
    }


def reshard(of_ranks: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """What `rank` loads for its own where other processes, or batches of another size, share the steps from now on.

    Running statistics are the mean over the ranks, which is in the shared part. There is no loader's or random state.
    """
    return {
        "meter": share_interval([own["meter"] for own in of_ranks], rank),
        "buffers": {name: {} for name in of_ranks[0]["buffers"]},
    }
