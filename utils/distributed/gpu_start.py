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
    """Let a thread start CUDA on the first visible GPU, or on number N, if it is there, and count its JPEG decoders.

    That takes 1.2 s, mostly without Python's lock. CUDA then sees this GPU alone. Sets CUDA_DEVICE_MAX_CONNECTIONS
    (`set_max_connections`). Does nothing in one of several processes: torch counts the GPUs of all before CUDA starts.

    To be followed by `wait_for_gpu`; until then nothing else may read or change CUDA_VISIBLE_DEVICES.

    Args:
        device_choice: auto, cuda, cuda:N or cpu.

    Raises:
        UserError: the launcher's variables are incomplete.
    """
    global _thread
    if device_choice == "cpu" or read_launch() != Launch():
        return
    set_max_connections()
    index = int(device_choice.partition(":")[2] or 0)
    _thread = threading.Thread(target=_start, args=(index,), name="GPU start")
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


def _start(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and index >= len(visible.split(",")):
        return  # there is no such GPU, which `choose_device` says
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_device_for_rank(visible, index)
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
