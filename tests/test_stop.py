"""Signals become a decision; real signals to this process."""

import os
import signal
import subprocess
import sys

from tests.conftest import ROOT
from utils.distributed import DistEnv
from utils.stop import StopRequest


def test_a_signal_is_noted_and_its_repetition_ignored(cpu: DistEnv) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest(cpu)
    assert not stop.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # as launchers do
    assert stop.agreed()
    assert stop.number == signal.SIGTERM
    stop.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_late_second_signal_ends_at_once() -> None:
    program = (
        "import os, signal, time, torch, utils.stop; from utils.distributed import DistEnv\n"
        "utils.stop.REPEAT_SECONDS = 0.2\n"
        "stop = utils.stop.StopRequest(DistEnv(0, 0, 1, 1, torch.device('cpu')))\n"
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.agreed(); time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5); print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == ""
