"""The device of this process: which GPU a rank trains on, and whether all ranks have one of their own."""

import os

import torch
import torch.distributed as dist

from utils.distributed.collective import collective
from utils.distributed.gpu_start import visible_device_for_rank
from utils.distributed.launcher import Launch
from utils.distributed.store import BoundedStore
from utils.errors import UserError
from utils.text import count


def choose_device(choice: str, launch: Launch) -> torch.device:
    """`--device` -> the device of this process.

    Args:
        choice: auto, cuda, cuda:N or cpu.
        launch: this process among those of its machine.

    Raises:
        UserError: CUDA asked for and absent, fewer GPUs than processes, or one GPU named for several processes.
    """
    gpus = torch.cuda.device_count()
    if choice == "cpu" or (choice == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        given = choice if ":" in choice else "cuda"
        raise UserError(f"--device {given}: no usable GPU here; use --device cpu, or check nvidia-smi and the driver")
    if ":" in choice:
        return _named_gpu(choice, gpus, launch.world_size)
    if gpus == 1 and launch.world_size > 1 and "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", 0)  # Slurm can show each task its own GPU alone
    if launch.local_rank >= gpus:
        raise UserError(
            f"{launch.local_world_size} processes on this machine, but {count(gpus, 'GPU')}; start one process per "
            "GPU (torchrun --nproc_per_node, srun --ntasks-per-node)"
        )
    return torch.device("cuda", launch.local_rank)


def _named_gpu(choice: str, gpus: int, world_size: int) -> torch.device:
    if world_size > 1:
        raise UserError(
            f"--device {choice} with {world_size} processes: each has a GPU of its own; give --device cuda",
            on_all_ranks=True,
        )
    device = torch.device(choice)
    require_gpu(device, gpus, "--device")
    return device


def require_gpu(device: torch.device, gpus: int, name: str) -> None:
    """Raise UserError unless the index of `device` is one of `gpus`; `name` is what the user set."""
    if device.index >= gpus:
        are, others = ("is", "") if gpus == 1 else ("are", f" to cuda:{gpus - 1}")
        raise UserError(f"{name} {device}: there {are} {count(gpus, 'GPU')} here; give cuda:0{others}")


def hide_other_gpus(device: torch.device) -> torch.device:
    """Let this process see `device` alone, through CUDA_VISIBLE_DEVICES. To be called before torch uses CUDA.

    The GPU of each rank is then number 0. Compile results hold the number, so that otherwise no rank could use those of
    another, nor of a run on another number of GPUs.

    Returns:
        `device` by its new number; by its old one where the other GPUs could not be hidden.
    """
    if device.type != "cuda":
        return device
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_device_for_rank(before, device.index)
    if torch.cuda.device_count() == 1:
        return torch.device("cuda", 0)
    # Without the driver's management library torch has asked CUDA itself, which looked at the variable before.
    if before is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    return device


def describe_device(device: torch.device) -> str:
    """`cpu`, or `cuda` and what no other GPU in the world is called."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


@collective
def check_devices(device: str, store: BoundedStore, rank: int, world_size: int, timeout: float) -> None:
    """Compare the devices of all ranks, before any collective on those devices.

    Args:
        device: of this rank, as `describe_device` has it.
        store: one that these ranks share and no others.
        rank, world_size: this process among all.
        timeout: seconds to wait for the other ranks.

    Raises:
        UserError: on all ranks: some have GPUs and others do not, or two have the same.
        DistStoreError: a process did not come within `timeout` seconds.
        NoAnswer: the store does not answer.
    """
    store.set(f"device/{rank}", device)
    if not store.wait([f"device/{other}" for other in range(world_size)], timeout):
        raise dist.DistStoreError(f"no device of a rank after {timeout:g} s")
    devices = [store.get(f"device/{other}").decode() for other in range(world_size)]
    kinds = [each.split()[0] for each in devices]
    if len(set(kinds)) > 1:
        without_gpu = ", ".join(str(other) for other, kind in enumerate(kinds) if kind == "cpu")
        raise UserError(
            f"--device auto: rank {without_gpu} of {world_size} sees no GPU, the others do; check nvidia-smi and the "
            "driver there, or give --device cpu",
            on_all_ranks=True,
        )
    for other, each in enumerate(devices):
        if kinds[0] == "cuda" and each in devices[:other]:
            raise UserError(
                f"rank {devices.index(each)} and rank {other} have the same GPU; start one process per GPU "
                "(torchrun --nproc_per_node, srun --ntasks-per-node)",
                on_all_ranks=True,
            )
