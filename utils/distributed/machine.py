"""What this machine offers: CPU threads, memory, hardware JPEG decoders, NVLink."""

import contextlib
import ctypes
import dataclasses
import itertools
import os
from pathlib import Path

import torch

from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, broadcast
from utils.distributed.gpu_start import jpeg_engines
from utils.distributed.group import DistEnv

_NVML_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one process has.

    Attributes:
        cpu_threads: its share of the CPU threads that this machine's processes may run on.
        gpu: whether it trains on a GPU.
        jpeg_engines: hardware JPEG decoders of that GPU; 0 if it has none.
        gpu_memory: free on that GPU, bytes; 0 without one.
        host_memory: its share of this machine's free memory, bytes.
    """

    cpu_threads: int
    gpu: bool
    jpeg_engines: int
    gpu_memory: int
    host_memory: int


@collective
def inspect_machine(env: DistEnv) -> Machine:
    """Look at this machine."""
    gpu = env.device.type == "cuda"
    allowed = os.sched_getaffinity(0)
    neighbors = [
        cores for host, cores in all_gather_object((os.uname().nodename, allowed), env) if host == os.uname().nodename
    ]
    return Machine(
        cpu_threads=cpu_share(allowed, neighbors),
        gpu=gpu,
        jpeg_engines=jpeg_engines() if gpu else 0,
        gpu_memory=torch.cuda.mem_get_info(env.device)[0] if gpu else 0,
        host_memory=free_memory() // len(neighbors),
    )


def free_memory(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this machine, and every control group around this process, has left; page cache counts as free.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    paths: dict[str, str] = {}  # by controller; that of version 2 is ""
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.strip("/"))
    for root, path, (maximum, current, inactive) in (
        (groups, paths.get("", ""), ("memory.max", "memory.current", "inactive_file")),
        (
            groups / "memory",
            paths.get("memory", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ):
        group = root / path
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file there, as at the root; "max" for no limit
                limit, used = (int((folder / name).read_text()) for name in (maximum, current))
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = min(free, limit - used + int(statistics[inactive]))
            if folder == root:
                break
    return max(free, 0)


def cpu_share(allowed: set[int], of_all: list[set[int]]) -> int:
    """CPU threads for a process that may run on `allowed`, among all processes of its machine, itself included.

    A thread that several may use is divided between them. Slurm and numactl give each its own threads, torchrun gives
    all to all.
    """
    return max(1, int(sum(1 / sum(thread in others for others in of_all) for thread in allowed) + 1e-6))


@collective
def all_pairs_nvlink(env: DistEnv) -> bool:
    """Whether all ranks are on one machine and NVLink joins every two of their GPUs."""
    if env.device.type != "cuda" or env.local_world_size < env.world_size:
        return False
    gpus = all_gather_object(str(torch.cuda.get_device_properties(env.device).uuid), env)
    return broadcast(env.is_main and nvlink_between(gpus), env)


def nvlink_between(uuids: list[str]) -> bool:
    """Whether NVLink joins every two of these GPUs of this machine, as the driver's library says; False without it.

    That also knows GPUs which CUDA_VISIBLE_DEVICES hides from this process. nvmlDeviceGetP2PStatus:
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if library.nvmlInit_v2() != 0:
        return False
    handles = [ctypes.c_void_p() for _ in uuids]
    found = [
        library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0
        for uuid, handle in zip(uuids, handles, strict=True)
    ]
    status = ctypes.c_uint()
    joined = all(found) and all(
        library.nvmlDeviceGetP2PStatus(one, other, _NVML_P2P_NVLINK, ctypes.byref(status)) == 0 and status.value == 0
        for one, other in itertools.combinations(handles, 2)
    )
    library.nvmlShutdown()
    return joined
