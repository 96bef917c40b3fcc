"""What is chosen for the user, and why."""

import os
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from utils.config import TrainConfig
from utils.distributed import DistEnv
from utils.machine import Machine, choose_common_feed, choose_feed, cpu_share, inspect_machine, seconds_since_launch


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


def test_a_resume_keeps_the_decode_path_of_its_checkpoint(cpu: DistEnv) -> None:
    saved = {"config": {"decode": "full"}}
    choice = choose_common_feed(TrainConfig(), cpu, saved)
    assert (choice.decode, choice.hw_decoder_load) == ("full", 0.9)
    assert choice.reasons["decode"] == "as in the checkpoint"
    assert choose_common_feed(TrainConfig(), cpu, {}).decode == "fused"
    asked = choose_common_feed(TrainConfig(decode="fused"), cpu, saved)
    assert asked.decode == "fused", "which the fingerprint then refuses"
    assert "decode" not in asked.reasons


def test_cpu_threads_are_shared_by_the_processes_of_a_machine(cpu: DistEnv) -> None:
    alone = inspect_machine(cpu)
    assert alone == Machine(len(os.sched_getaffinity(0)), gpu=False, jpeg_engines=0)
    everything = set(range(16))
    assert cpu_share(everything, [everything]) == 16
    assert cpu_share(everything, [everything] * 2) == 8, "torchrun: all may use all"
    assert cpu_share({0, 1}, [{0, 1}, {2, 3}]) == 2, "Slurm: each has its own"
    assert cpu_share({0, 1, 2}, [{0, 1, 2}, {2, 3, 4}]) == 2
    assert cpu_share({0}, [{0}] * 8) == 1


def test_seconds_since_launch_count_the_imports_too() -> None:
    code = "import time; time.sleep(2); from utils.machine import seconds_since_launch; print(seconds_since_launch())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 2 <= float(done.stdout) <= time.monotonic() - began + 0.05
    assert seconds_since_launch() > 0
