"""Which checkpoint of a run, and which of its networks, is used when training is over."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.figures import THRESHOLDS, better_network
from utils.files import rename, temporary_of, write_temporary
from utils.log import emit
from utils.training.state.checkpoint import BEST, EARLIER, LAST, Checkpoint, Temperature, load_newest
from utils.training.state.train_state import NETWORKS


def find_best_checkpoints(path: Path, name: str = "CHECKPOINT") -> list[Path]:
    """The checkpoints that a path means: itself, or of an output folder best.pt, then the others, newest first.

    Args:
        name: of the argument.

    Raises:
        UserError: there is none.
    """
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise UserError(f"{name} {path}: no such checkpoint; give best.pt or last.pt of a run, or its output folder")
    found = [path / name for name in (BEST, LAST, *EARLIER) if os.path.isfile(path / name)]
    if not found:
        raise UserError(f"{name} {path}: no checkpoint in it; give the output folder of a run, or a checkpoint file")
    return found


@collective
def open_best_checkpoint(path: Path, env: DistEnv) -> Checkpoint:
    """The checkpoint of a file, or of a run's output folder.

    Raises:
        UserError: on all ranks: there is none, it cannot be read, or the ranks have different ones.
    """
    saved: Checkpoint | None = None
    skipped: list[str] = []
    with sync_errors(env):
        saved, skipped = load_newest(find_best_checkpoints(path), "CHECKPOINT")
    assert saved is not None, "there is a file"
    if env.is_main:
        for line in skipped:
            emit(line)
    if len(set(all_gather_object((saved.record.run, saved.position), env))) > 1:
        raise UserError(f"CHECKPOINT {path}: not the same on all ranks; use a shared folder", on_all_ranks=True)
    return saved


def thresholds_of(saved: Checkpoint, network: str) -> list[float]:
    """The probability of each output from which a class counts as predicted; 0.5 where no evaluation has fitted it.

    Probabilities are those of logits that are divided by the temperature, so that it changes no answer.
    """
    key = f"val/{'' if network == NETWORKS[0] else 'ema_'}{THRESHOLDS}"
    found: list[float] = saved.state.own_result.get(key) or [0.5] * saved.config.num_classes
    return scale_thresholds(found, temperature_of(saved, network))


def scale_thresholds(thresholds: Sequence[float], temperature: Temperature) -> list[float]:
    """Thresholds of probabilities, one a class, for logits that are divided by the temperatures: the same answers."""
    if temperature == 1.0:
        return [*thresholds]
    with np.errstate(divide="ignore", over="ignore"):
        logits = np.log(thresholds) - np.log1p(-np.array(thresholds))
        scaled: list[float] = (1 / (1 + np.exp(-logits / np.array(temperature)))).tolist()
    return scaled


def temperature_of(saved: Checkpoint, network: str) -> Temperature:
    """The number, or number a class, by which logits are divided before they become probabilities; 1 for none.

    Raises:
        UserError: on all ranks: the checkpoint has something else there.
    """
    found = saved.temperature.get(network, 1.0)
    values = found if isinstance(found, list) else [found]
    is_whole = len(values) == saved.config.num_classes if isinstance(found, list) else True
    if not is_whole or not all(isinstance(each, float) and 0 < each < math.inf for each in values):
        raise UserError(
            f"CHECKPOINT {saved.path}: its temperature is {str(found)[:40]}, not a number above 0, or one a class; "
            "scripts/predict.py --calibrate writes it again",
            on_all_ranks=True,
        )
    return found


def choose_network(saved: Checkpoint, ema: bool | None) -> str:
    """Name of a checkpoint's network, in `NETWORKS`.

    Args:
        saved: the checkpoint, the same on all ranks.
        ema: whether to take the moving average; None takes the better of the two by the checkpoint's evaluation, and
            of a checkpoint without one the model.

    Raises:
        UserError: on all ranks: there is no moving average.
    """
    model, average = NETWORKS
    if ema and average not in saved.state.networks:
        raise UserError(f"--ema: {saved.path} has no EMA weights; leave --ema out", on_all_ranks=True)
    if ema is None:
        ema = average in saved.state.networks and better_network(saved.state.result, saved.config.best_by) == average
    return average if ema else model


def write_temperature(saved: Checkpoint, network: str, temperature: Temperature) -> None:
    """Replace the file of a checkpoint with one that has the temperature of a network, too.

    Other links to the file keep its old content, as last.pt.

    Raises:
        OSError, RuntimeError: it could not be written; it is as it was.
    """
    assert saved.path is not None, "read from a file"
    content = dataclasses.replace(saved, temperature=saved.temperature | {network: temperature}).to_dict()
    try:
        rename(write_temporary(saved.path, lambda file: torch.save(content, file)), saved.path)
    finally:
        temporary_of(saved.path).unlink(missing_ok=True)
