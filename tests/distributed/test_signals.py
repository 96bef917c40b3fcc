"""A signal while the trainer is still importing ends it at once."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import command, environment

SIGUSR1_BIT = 1 << (signal.SIGUSR1 - 1)  # which Python itself does not handle


def handles(pid: int) -> bool:
    """Whether a process has installed a handler for SIGUSR1."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) & SIGUSR1_BIT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_during_the_imports(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    command_line = [*command(), "--data-dir", str(data), "--output-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        deadline = time.monotonic() + 60
        while not handles(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text(), "it is imported later"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 143
    assert (out, err) == ("", f"stopped by {number.name} before the first step; nothing is lost\n")
    assert not (tmp_path / "run").exists()
