"""The GPU that starts beside the imports: which one, and what it leaves of the environment."""

import json

import pytest

from tests.harness import launch
from utils.distributed.gpu_start import visible_device_for_rank

STARTS = """
import json, os, sys, threading
from utils.distributed.gpu_start import start_gpu, wait_for_gpu
start_gpu(sys.argv[1])
started = threading.active_count() > 1
wait_for_gpu()
found = {"started": started, "ended": threading.active_count() == 1, "torch": "torch" in sys.modules}
found |= {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
found |= {"connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")}
"""
PRINTS = "print(json.dumps(found))"
USES_TORCH = """
from utils.distributed.device import choose_device, hide_other_gpus
from utils.distributed.gpu_start import jpeg_engines
from utils.distributed.launcher import read_launch
import ctypes, torch
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
found |= {"status": driver.cuDeviceGetCount(ctypes.byref(count)), "seen": count.value}
found |= {"counted": jpeg_engines.cache_info().currsize, "all": torch.cuda.device_count()}
found["device"] = str(hide_other_gpus(choose_device(sys.argv[1], read_launch())))
found["sum"] = torch.ones(5, device=found["device"]).sum().item()
found["now"] = os.environ["CUDA_VISIBLE_DEVICES"]
"""


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "1"), ("4,6,7", "6"), ("GPU-2f, GPU-9c", "GPU-9c"), ("MIG-a,MIG-b", "MIG-b")]
)
def test_visible_device_for_rank(visible: str | None, expected: str) -> None:
    assert visible_device_for_rank(visible, 1) == expected


@pytest.mark.parametrize(
    ("world_size", "local_rank", "connections"), [("1", "0", "32"), ("2", "0", None), ("1", "1", None)]
)
def test_one_of_several_processes_starts_its_gpu_later(
    world_size: str, local_rank: str, connections: str | None
) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    done = launch("auto", program=STARTS + PRINTS, env=ranks | {"CUDA_DEVICE_MAX_CONNECTIONS": None})
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["connections"] == connections


@pytest.mark.parametrize(("choice", "connections"), [("cpu", None), ("auto", "32"), ("cuda", "32"), ("cuda:1", "32")])
def test_without_gpus_the_environment_stays(choice: str, connections: str | None) -> None:
    done = launch(
        choice, program=STARTS + PRINTS, env={"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": None}
    )
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["visible"], found["connections"]) == ("", connections)
    assert (found["ended"], found["torch"]) == (True, False)


@pytest.mark.parametrize(("deterministic", "connections"), [(False, "32"), (True, None)])
def test_a_deterministic_run_starts_its_gpu_later(deterministic: bool, connections: str | None) -> None:
    program = STARTS.replace("start_gpu(sys.argv[1])", f"start_imports('auto', {deterministic})")
    done = launch(
        program="from utils.distributed.startup import start_imports\n" + program + PRINTS,
        env={"CUDA_DEVICE_MAX_CONNECTIONS": None},
    )
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out.splitlines()[-1])["connections"] == connections


@pytest.mark.gpu
@pytest.mark.parametrize(("choice", "visible"), [("cuda", "0"), pytest.param("cuda:1", "1", marks=pytest.mark.gpus)])
def test_cuda_starts_on_the_first_gpu_or_on_that_which_is_named(choice: str, visible: str) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_MAX_CONNECTIONS": None}
    done = launch(choice, program=STARTS + USES_TORCH + PRINTS, env=variables)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["started"], "in a thread"
    assert (found["status"], found["seen"]) == (0, 1), "CUDA has started, and sees this GPU alone"
    assert found["all"] >= 1, "torch still counts all GPUs"
    assert (found["counted"], found["device"], found["sum"]) == (1, "cuda:0", 5.0)
    assert (found["visible"], found["connections"]) == (None, "32"), "as it was"
    assert found["now"] == visible
