"""Checkpoints of runs that never were, for tests of what is read from one; and damaged ones."""

import dataclasses
import zipfile
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


def with_flipped_bit(path: Path) -> bytes:
    """The content of a checkpoint, with another bit in its largest tensor; between two there may be padding."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    content[largest.header_offset + 1000] ^= 1
    return bytes(content)
