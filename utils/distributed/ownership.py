"""What a training program takes over of its process: environment variables, torch's switches, its end with torchrun.

Only the `main` of a program does so, by a call. Whoever imports Brisk, or uses its loaders and networks in a notebook,
keeps environment, signals and process. A program takes two things more by calls of their own, because they are undone
or are needed later: the signal handlers of `StopRequest.handling_signals`, and TORCHINDUCTOR_CACHE_DIR
(`utils.network.compiler.enable_compile_cache`).
"""

import os

import torch

from utils.distributed.device import choose_device, hide_other_gpus
from utils.distributed.launcher import exit_with_torchrun, read_launch
from utils.seed import make_deterministic


def own_process(device_choice: str, deterministic: bool | None = None) -> torch.device:
    """Prepare this process for training, and choose its device. To be called before CUDA starts.

    Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, unless it is set; CUDA_VISIBLE_DEVICES to the GPU of this rank; and what
    `deterministic` says. When torchrun dies, this process gets SIGTERM.

    Args:
        device_choice: auto, cuda or cpu.
        deterministic: whether torch must compute the same bits in every run; False lets cuDNN choose its algorithms by
            trial, None leaves torch as it is.

    Returns:
        The device of this process.

    Raises:
        UserError: the launcher's variables are incomplete, or there are fewer GPUs than processes.
    """
    exit_with_torchrun()
    # CUDA reads it once, when it starts. DALI works on some thirty streams. The default of 8 hardware queues makes the
    # training step wait in a queue behind a decoder (docs/decisions/0005).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if deterministic:
        make_deterministic()
    elif deterministic is not None:
        torch.backends.cudnn.benchmark = True
    return hide_other_gpus(choose_device(device_choice, read_launch()))
