"""Checkpoints of runs that never were, for tests of what is read from one."""

import dataclasses
from pathlib import Path
from typing import Any

from utils.options.resolved import ResolvedConfig
from utils.training.state.checkpoint import Checkpoint, RunRecord
from utils.training.state.train_state import RankState, ReplicatedState

RECORD = RunRecord("a run", {"seed": 0}, ("a", "b"), ((0.5,), (0.5,)), {"train": [], "val": []}, {}, {})


def checkpoint_of(config: ResolvedConfig, world_size: int = 1, fingerprint: dict[str, Any] | None = None) -> Checkpoint:
    """A checkpoint without weights."""
    state = ReplicatedState(
        networks={"model": {}}, optimizer={}, scaler={}, epoch=0, step=0, best=None, result={},
        evaluations_since_best=0, seconds=0.0,
    )  # fmt: skip
    record = dataclasses.replace(RECORD, fingerprint=fingerprint or RECORD.fingerprint)
    ranks = [RankState(loader={}, random={}, meter={}, buffers={}) for _ in range(world_size)]
    return Checkpoint(config, record, state, ranks, saved_at=0.0, launch_ids=[], path=Path("last.pt"))
