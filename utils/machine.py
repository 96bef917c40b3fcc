"""What this machine offers to the feed, and what is chosen from it where the user leaves the choice open."""

import ctypes
import dataclasses
import importlib.util
import os
import time
from pathlib import Path
from typing import Any, Literal

from utils.config import TrainConfig
from utils.distributed import DistEnv, gather

FULL_DECODE_THREADS = 8  # fewer CPU threads than this are faster with the whole image left to the hardware decoder


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one process has.

    Attributes:
        cpu_threads: its share of the CPU threads that this machine's processes may run on.
        gpu: whether it trains on a GPU.
        jpeg_engines: hardware JPEG decoders of that GPU; 0 if it has none.
    """

    cpu_threads: int
    gpu: bool
    jpeg_engines: int


@dataclasses.dataclass(frozen=True)
class FeedChoice:
    """Settings of the input pipeline; `reasons` is for the user, by flag."""

    workers: int
    decode: Literal["fused", "full"]
    hw_decoder_load: float
    prefetch: int
    reasons: dict[str, str]


def inspect_machine(env: DistEnv) -> Machine:
    """Look at this machine. A collective."""
    gpu = env.device.type == "cuda"
    own = os.sched_getaffinity(0)
    neighbours = [cores for host, cores in gather((os.uname().nodename, own), env) if host == os.uname().nodename]
    return Machine(cpu_share(own, neighbours), gpu, _jpeg_engines() if gpu else 0)


def cpu_share(own: set[int], of_all: list[set[int]]) -> int:
    """CPU threads for a process that may run on `own`, among all processes of its machine, itself included.

    A thread that several may use is divided between them. Slurm and numactl give each its own threads, torchrun gives
    all to all.
    """
    return max(1, int(sum(1 / sum(thread in others for others in of_all) for thread in own) + 1e-6))


def choose_common_feed(config: TrainConfig, env: DistEnv, saved: dict[str, Any]) -> FeedChoice:
    """`choose_feed` with one decode path for all ranks: that of the checkpoint `saved`, else of rank 0. A collective.

    The path decides pixels, so neither a rank nor a resume on a machine with other cores may take another.
    """
    machine = inspect_machine(env)
    choice = choose_feed(config, machine)
    decode, reason = gather((choice.decode, choice.reasons.get("decode")), env)[0]
    if config.decode == "auto" and saved:
        decode, reason = saved["config"]["decode"], "as in the checkpoint"
    choice = choose_feed(dataclasses.replace(config, decode=decode), machine)
    return dataclasses.replace(choice, reasons=choice.reasons | ({"decode": reason} if reason else {}))


def choose_feed(config: TrainConfig, machine: Machine) -> FeedChoice:
    """Fill in what the user left open; measured on an H100, see docs/performance.md."""
    reasons = {}
    workers = config.workers
    if workers is None:
        workers, reasons["workers"] = machine.cpu_threads, "this process's share of the CPU threads"
    decode: Literal["fused", "full"] = "fused"
    if config.decode != "auto":
        decode = config.decode
    elif not machine.gpu:
        reasons["decode"] = "the CPU decodes no more than the crop"
    elif not machine.jpeg_engines:
        reasons["decode"] = "no hardware decoder"
    elif workers < FULL_DECODE_THREADS:
        decode, reasons["decode"] = "full", f"few CPU threads, {machine.jpeg_engines} hardware decoders"
    else:
        reasons["decode"] = f"{workers} CPU threads help {machine.jpeg_engines} hardware decoders"
    load = config.hw_decoder_load
    if load is None:
        load = 0.65 if decode == "fused" else 0.9
        if machine.jpeg_engines:
            reasons["hw_decoder_load"] = f"for {decode} decoding"
    prefetch = config.prefetch
    if prefetch is None:
        prefetch = 3 if machine.gpu else 2
    return FeedChoice(workers, decode, load, prefetch, reasons)


def seconds_since_launch() -> float:
    """Wall time since the kernel started this process, before the first import."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _jpeg_engines() -> int:
    """Hardware JPEG decoders of the current GPU, as nvJPEG counts them.

    nvjpegGetHardwareDecoderInfo: https://docs.nvidia.com/cuda/nvjpeg/#nvjpeggethardwaredecoderinfo
    """
    package = importlib.util.find_spec("nvidia.nvjpeg")
    folders = list(package.submodule_search_locations or []) if package else []
    libraries = [path for folder in folders for path in sorted(Path(folder).glob("lib/libnvjpeg.so*"))]
    if not libraries:
        return 0
    library = ctypes.CDLL(str(libraries[0]))
    handle = ctypes.c_void_p()
    engines, cores = ctypes.c_uint(0), ctypes.c_uint(0)
    if library.nvjpegCreateSimple(ctypes.byref(handle)) != 0:
        return 0
    status = library.nvjpegGetHardwareDecoderInfo(handle, ctypes.byref(engines), ctypes.byref(cores))
    library.nvjpegDestroy(handle)
    return engines.value * cores.value if status == 0 else 0
