"""Flags that a refusal offers. Added to the end of the refused command as they are, they make it work."""

import shlex
from pathlib import Path

from utils.options.config import TrainConfig


def other_folder(config: TrainConfig) -> str:
    """The flag that gives another output folder; it must be the one that the command has, as both are refused."""
    return "--output-dir NEW" if "output_dir" in config.given and config.name is None else "--name NEW"


def start_again(config: TrainConfig) -> str:
    """How a run of its own begins, in another folder or in this one."""
    begin = _from_scratch(config)
    replace = begin if "--resume none" in begin else f"--resume none {begin}"
    return f"start again: {begin}{other_folder(config)} for another folder, {replace}--overwrite to replace it"


def accept_changes(config: TrainConfig, path: Path | None) -> str:
    """How a run goes on from the checkpoint `path` although it differs, in a folder that counts no other steps."""
    return f"--resume {shlex.quote(str(path))} --accept-changes {other_folder(config)}"


def from_weights(config: TrainConfig, path: Path | None) -> str:
    """How a run of its own begins with the weights of the checkpoint `path`."""
    return f"{_from_scratch(config)}--pretrained {shlex.quote(str(path))} {other_folder(config)}"


def _from_scratch(config: TrainConfig) -> str:
    """Flags that undo `--resume PATH` and `--accept-changes`; the latter is refused without the former."""
    resume = "" if config.resume == "auto" else "--resume none "
    return resume + ("--no-accept-changes " if config.accept_changes else "")
