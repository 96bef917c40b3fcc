"""What is on the disk is whole, also after a crash at the worst instant."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TINY, Finished, read_checkpoint
from utils.checkpoint import LAST, write_temporary


def test_best_is_not_written_over_after_a_crash_between_two_names(tmp_path: Path) -> None:
    """Killed after best.pt was linked and before last.pt was renamed: both names then mean one file."""
    best = tmp_path / "best.pt"
    best.write_bytes(b"the best so far")
    os.link(best, tmp_path / f".{LAST}.tmp")
    write_temporary({"step": 1}, tmp_path / LAST)
    assert best.read_bytes() == b"the best so far"


def test_a_run_goes_on_from_such_a_crash(data: Path, tmp_path: Path, launch: Callable[..., Finished]) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--output-dir", tmp_path, "--lr", 1e-12)
    assert launch(*flags, "--epochs", 1).status == 0
    os.link(tmp_path / "best.pt", tmp_path / f".{LAST}.tmp")
    assert launch(*flags, "--epochs", 2, "--lr", 1e-12).status == 0
    assert read_checkpoint(tmp_path, "last.pt")["epoch"] == 2
    best = read_checkpoint(tmp_path, "best.pt")
    assert best["best_top1"] == best["result"]["val/top1"]
    assert not list(tmp_path.glob(".*.tmp"))
