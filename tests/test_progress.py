"""What a terminal shows of a run: a status line while nothing can be counted, bars, and one line for each epoch."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.forked import start_on_terminal
from tests.harness import LIMIT

VARIABLES = {"COLUMNS": None, "TERM": "xterm", "TQDM_MININTERVAL": 0}  # every step is drawn


class Terminal:
    """A terminal that keeps every state of its screen.

    Attributes:
        states: the screen before each return to the start of a line and at the end, as lines.
    """

    def __init__(self) -> None:
        self._lines, self._row, self._column = [""], 0, 0
        self.states: list[list[str]] = []

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", text):
            if part == "\x1b[A":
                self._row -= 1
            elif part == "\r":
                self.states.append([line.rstrip() for line in self._lines])
                self._column = 0
            elif part == "\n":
                self._row += 1
                self._lines += [""] * (self._row + 1 - len(self._lines))
            else:
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = line[: self._column] + part + line[self._column + len(part) :]
                self._column += len(part)
        self.states.append([line.rstrip() for line in self._lines])


def run_on_terminal(*flags: object, columns: int, timeout: float = LIMIT) -> tuple[int, Terminal]:
    """Run train.py on a terminal; its exit status and what was seen."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = start_on_terminal(*flags, terminal=os.ttyname(terminal), env=VARIABLES)
    seen, buffer = Terminal(), b""
    try:
        while (is_shown := select.select([screen], [], [], 0.1)[0]) or process.poll() is None:
            if not is_shown:
                continue
            buffer += os.read(screen, 65536)
            whole = buffer.decode(errors="ignore")
            buffer = buffer[len(whole.encode()) :]
            seen.write(whole)
        return process.wait(timeout), seen
    finally:
        if process.poll() is None:
            process.kill()
        os.close(terminal)
        os.close(screen)


@pytest.mark.parametrize("columns", [80, pytest.param(140, marks=pytest.mark.slow)])
def test_a_run_on_a_terminal(data: Path, tmp_path: Path, columns: int) -> None:
    flags = ("--data-dir", data, *TINY, "--epochs", 2, "--batch-size", 2, "--output-dir", tmp_path / "run")
    status, terminal = run_on_terminal(*flags, columns=columns)
    assert status == 0
    shown = {line for state in terminal.states for line in state}
    assert max(map(len, (line for line in shown if "|" in line))) <= columns
    for text in ("loading torch, DALI and timm  0 s", "listing the images  0 s", "first step  0 s"):
        assert text in shown
    bars = [line for line in shown if re.match(r"epoch [12]/2 +\d+% \|", line)]
    assert any("loss" in line and "lr" in line and " left, run " in line for line in bars)
    assert any(" steps " in line for line in bars) == (columns == 140)
    assert any(re.match(r"evaluating +\d+% \|", line) for line in shown)
    last = terminal.states[-1]
    epochs = [line for line in last if re.match(r"epoch \d", line)]
    assert [line[:9] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    table = [line.split() for line in last if re.match(r"epoch  |    [12]  ", line)]
    assert [row[0] for row in table] == ["epoch", "1", "2"]
    assert all("val top-1" in line and "train loss" in line for line in epochs)
    assert all(len(line) <= columns or " " not in line.strip() for line in last), "long paths alone are longer"
    chosen = next(number for number, line in enumerate(last) if line.startswith("  chosen  "))
    assert columns > 80 or last[chosen + 1].startswith(" " * 10)
    assert not any("|" in line or line.endswith(" s") for line in last), last


def test_an_error_removes_the_status_line(tmp_path: Path) -> None:
    flags = ("--loader", "synthetic", "--arch", "no_such_network", "--output-dir", str(tmp_path / "run"))
    status, terminal = run_on_terminal(*flags, columns=200)
    assert status == 2
    (line,) = [line for line in terminal.states[-1] if line]
    assert line.startswith("train.py: --arch no_such_network: ")
