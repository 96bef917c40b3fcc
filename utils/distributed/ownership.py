"""What a training program takes over of its process: environment variables, torch's switches, its end with torchrun.

Only a program's main calls this. Importing Brisk, or using its loaders and networks in a notebook, changes none of it.
For the same reason signal handlers are installed by `StopRequest.handling_signals`, TORCHINDUCTOR_CACHE_DIR is set by
`utils.network.compiler.enable_compile_cache`, and only `RankMonitor.guard`, `watchdog` and a `process_group` with
`print_error` end the process: a main calls these, too.
"""

import atexit
import gc

import torch

from utils.distributed.device import choose_device, hide_other_gpus
from utils.distributed.gpu_start import set_max_connections, wait_for_gpu
from utils.distributed.launcher import exit_with_torchrun, read_launch
from utils.seed import make_deterministic


def own_process(device_choice: str, deterministic: bool | None = None) -> torch.device:
    """Prepare this process for training, and choose its device. To be called before torch uses CUDA.

    Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, unless it is set; CUDA_VISIBLE_DEVICES to the GPU of this rank; float32 for
    float32 convolutions, for which torch lets cuDNN take TF32; and what `deterministic` says. When torchrun dies, this
    process gets SIGTERM. Garbage collections leave out what exists now, the modules: a whole collection took 0.2 s and
    more, and a run has one wherever DALI or a capture frees memory.

    Args:
        device_choice: auto, cuda, cuda:N or cpu.
        deterministic: whether torch must compute the same bits in every run; False lets cuDNN choose its algorithms by
            trial, None leaves torch as it is.

    Returns:
        The device of this process.

    Raises:
        UserError: the launcher's variables are incomplete, or there are fewer GPUs than processes.
    """
    exit_with_torchrun()
    wait_for_gpu()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton prints what is not collected in the end
    set_max_connections()
    torch.backends.cudnn.allow_tf32 = False  # of 10 bits; `--amp` names the types that are less than float32
    if deterministic:
        make_deterministic()
    elif deterministic is not None:
        torch.backends.cudnn.benchmark = True
    return hide_other_gpus(choose_device(device_choice, read_launch()))
