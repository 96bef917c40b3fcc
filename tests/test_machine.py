"""What is chosen for the user, and why."""

import dataclasses
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from utils.config import TrainConfig
from utils.distributed import DistEnv
from utils.machine import Machine, choose_feed, inspect_machine, seconds_since_launch


@pytest.mark.parametrize(
    ("machine", "decode", "load", "prefetch", "because"),
    [
        (Machine(16, gpu=False, jpeg_engines=0), "fused", 0.65, 2, "CPU"),
        (Machine(16, gpu=True, jpeg_engines=0), "fused", 0.65, 3, "no hardware decoder"),
        (Machine(4, gpu=True, jpeg_engines=7), "full", 0.9, 3, "few CPU threads, 7 hardware decoders"),
        (Machine(16, gpu=True, jpeg_engines=7), "fused", 0.65, 3, "16 CPU threads help 7 hardware decoders"),
    ],
)
def test_choice_by_machine(machine: Machine, decode: str, load: float, prefetch: int, because: str) -> None:
    choice = choose_feed(TrainConfig(), machine)
    assert (choice.workers, choice.decode, choice.hw_decoder_load, choice.prefetch) == (
        machine.cpu_threads,
        decode,
        load,
        prefetch,
    )
    assert because in choice.reasons["decode"]
    assert "share" in choice.reasons["workers"]


def test_flags_win_over_the_machine_and_give_no_reason() -> None:
    config = TrainConfig(workers=3, decode="fused", hw_decoder_load=0.25, prefetch=7)
    choice = choose_feed(config, Machine(16, gpu=True, jpeg_engines=7))
    assert (choice.workers, choice.decode, choice.hw_decoder_load, choice.prefetch) == (3, "fused", 0.25, 7)
    assert choice.reasons == {}
    assert choose_feed(TrainConfig(workers=3), Machine(16, gpu=True, jpeg_engines=7)).decode == "full"


def test_cpu_threads_are_shared_by_the_processes_of_a_machine(cpu: DistEnv) -> None:
    alone = inspect_machine(cpu)
    halved = inspect_machine(dataclasses.replace(cpu, local_world_size=2))
    assert alone.cpu_threads >= 1
    assert halved.cpu_threads == max(1, alone.cpu_threads // 2)
    assert (alone.gpu, alone.jpeg_engines) == (False, 0)


def test_seconds_since_launch_count_the_imports_too() -> None:
    code = "import time; time.sleep(2); from utils.machine import seconds_since_launch; print(seconds_since_launch())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 2 <= float(done.stdout) <= time.monotonic() - began + 0.05
    assert seconds_since_launch() > 0
