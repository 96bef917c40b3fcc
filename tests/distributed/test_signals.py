"""A signal while the trainer is still importing ends it at once."""

import signal
from pathlib import Path

import pytest

from tests.harness import start

SIGUSR1_BIT = 1 << (signal.SIGUSR1 - 1)  # which Python itself does not handle


def handles(pid: int) -> bool:
    """Whether a process has installed a handler for SIGUSR1."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) & SIGUSR1_BIT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_during_the_imports(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    with start("--data-dir", data, "--output-dir", tmp_path / "run") as started:
        started.wait_for(lambda: handles(started.pid))
        assert "torch" not in Path(f"/proc/{started.pid}/maps").read_text(), "it is imported later"
        started.send(number, started.pid)
        done = started.end()
    assert (done.status, done.out) == (143, "")
    assert done.err == f"stopped by {number.name} before the first step; nothing is lost\n"
    assert not (tmp_path / "run").exists()
