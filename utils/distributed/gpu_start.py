"""The start of this process's GPU in a thread, beside imports that take seconds. Imports nothing slow."""

import ctypes
import functools
import importlib.util
import os
import threading
from pathlib import Path

from utils.distributed.launcher import Launch, read_launch

_thread: threading.Thread | None = None


def start_gpu(device_choice: str) -> None:
    """Let a thread start CUDA on the GPU of this rank, if there is one, and count its JPEG decoders.

    That takes 1.2 s, mostly without Python's lock. CUDA then sees the GPU of this rank alone, as number 0. Sets
    CUDA_DEVICE_MAX_CONNECTIONS (`set_max_connections`). Does nothing where it is not certain which GPU this will be.

    To be followed by `wait_for_gpu`; until then nothing else may read or change CUDA_VISIBLE_DEVICES.

    Args:
        device_choice: auto, cuda or cpu.

    Raises:
        UserError: the launcher's variables are incomplete.
    """
    global _thread
    launch = read_launch()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device_choice == "cpu" or not knows_gpu(launch, visible):
        return
    set_max_connections()
    _thread = threading.Thread(target=_start, args=(launch, visible), name="GPU start")
    _thread.start()


def wait_for_gpu() -> None:
    """Wait for the thread of `start_gpu`, if there is one. To be called before torch uses CUDA."""
    if _thread is not None:
        _thread.join()


def set_max_connections() -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 32, unless it is set. To be called before CUDA starts, which reads it once.

    DALI works on some thirty streams. The default of 8 hardware queues makes the training step wait in a queue behind a
    decoder (docs/internals/decisions/0005).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def visible_device_for_rank(visible: str | None, local_rank: int) -> str:
    """The entry of CUDA_VISIBLE_DEVICES that belongs to a rank; `visible` is None where all GPUs are visible."""
    return str(local_rank) if visible is None else visible.split(",")[local_rank].strip()


def knows_gpu(launch: Launch, visible: str | None) -> bool:
    """Whether this rank has the GPU of its local rank among `visible`, CUDA_VISIBLE_DEVICES, and torch counts them all.

    Slurm can show each of several processes one GPU alone. Parts of GPUs (MIG) are counted by CUDA, which sees one.
    """
    return launch.world_size == 1 or ("LOCAL_RANK" in os.environ and "MIG-" not in (visible or ""))


def _start(launch: Launch, visible: str | None) -> None:
    if launch.world_size > 1 and not _has_nvml():
        return  # as above: CUDA counts the GPUs
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        shown = visible_device_for_rank(visible, launch.local_rank)
    except (OSError, IndexError):  # no driver; fewer GPUs than processes
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    has_started = driver.cuInit(0) == 0
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        has_started
        and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0  # the context that torch uses
    ):
        jpeg_engines()


def _has_nvml() -> bool:
    """Whether the driver's management library works, so that torch counts GPUs without CUDA."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return bool(library.nvmlInit_v2() == 0 and library.nvmlShutdown() == 0)


@functools.cache
def jpeg_engines() -> int:
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
