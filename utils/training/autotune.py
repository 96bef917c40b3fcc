"""What this machine offers to the feed, and what is chosen from it where the user leaves the choice open."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from utils.config import ResolvedConfig, TrainConfig
from utils.data.cache import decoded_bytes
from utils.data.manifest import Manifest
from utils.data.workers import check_sockets
from utils.distributed.collectives import all_gather_object, broadcast, raise_on_all_ranks, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.training.batch_layout import choose_batch_size

PREFETCH = 6  # batches
SMALL = 1 / 8  # of the free memory: decoded images that take no more are kept there unasked, on the CPU
LARGEST = 0.8  # of the free memory, for images that are to be kept
BY_DALI = ("dali", "proxy")  # loaders whose images DALI decodes; the others have no use for --decode and its like
BY_WORKERS = ("proxy", "torch")  # loaders that run torch's DataLoader
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


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Settings of the input pipeline; `reasons` is for the user, by flag."""

    workers: int
    decode: Literal["fused", "full"]
    hw_decoder_load: float
    cache: Literal["none", "gpu", "host"]
    prefetch: int
    reasons: dict[str, str]


def inspect_machine(env: DistEnv) -> Machine:
    """Look at this machine. A collective."""
    gpu = env.device.type == "cuda"
    own = os.sched_getaffinity(0)
    neighbours = [
        cores for host, cores in all_gather_object((os.uname().nodename, own), env) if host == os.uname().nodename
    ]
    return Machine(
        cpu_threads=cpu_share(own, neighbours),
        gpu=gpu,
        jpeg_engines=_jpeg_engines() if gpu else 0,
        gpu_memory=torch.cuda.mem_get_info(env.device)[0] if gpu else 0,
        host_memory=free_memory() // len(neighbours),
    )


def free_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this machine, and every control group around this process, has left; page cache counts as free.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    paths: dict[str, str] = {}  # by controller; that of version 2 is ""
    for line in own.read_text().splitlines() if own.exists() else []:
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


def cpu_share(own: set[int], of_all: list[set[int]]) -> int:
    """CPU threads for a process that may run on `own`, among all processes of its machine, itself included.

    A thread that several may use is divided between them. Slurm and numactl give each its own threads, torchrun gives
    all to all.
    """
    return max(1, int(sum(1 / sum(thread in others for others in of_all) for thread in own) + 1e-6))


def choose_common_loader_settings(
    config: TrainConfig, env: DistEnv, saved: dict[str, Any], manifest: Manifest
) -> LoaderSettings:
    """`choose_loader_settings` with the same pixels on all ranks: as in the checkpoint `saved`, else as on rank 0.

    Collective: call on every rank.

    How images are decoded and whether they are kept decides pixels, so neither a rank nor a resume on another machine
    may do it in another way.

    Raises:
        UserError: on all ranks, if images are to be kept that do not fit on one of them, or DataLoader would hang.
    """
    with sync_errors(env):
        if config.loader in BY_WORKERS:
            check_sockets(f"workers of --loader {config.loader}")
    machine = inspect_machine(env)
    keeps = config.loader == "dali" and config.cache != "none" and not config.evaluate
    decoded = decoded_bytes(manifest) if keeps else 0
    choice = choose_loader_settings(config, machine, decoded)
    pixels, reasons = all_gather_object(({"decode": choice.decode, "cache": choice.cache}, choice.reasons), env)[0]
    if saved and not config.evaluate:
        pixels = {name: saved["config"].get(name, "none") for name in pixels}
        reasons = dict.fromkeys(pixels, "as in the checkpoint")
    open_names = [name for name in pixels if getattr(config, name) == "auto"]
    choice = choose_loader_settings(
        dataclasses.replace(config, **{name: pixels[name] for name in open_names}),  # type: ignore[arg-type]
        machine,
        decoded,
    )
    remedy = "use --cache none"
    if saved and "cache" in open_names:
        remedy = "its checkpoint was trained so: resume where they fit, or start anew with another --output-dir"
    raise_on_all_ranks(_check_cache_fits(choice.cache, machine, decoded, remedy), env)
    shown = {name: reasons[name] for name in open_names if name in reasons and config.loader in BY_DALI}
    return dataclasses.replace(choice, reasons=choice.reasons | shown)


def choose_loader_settings(config: TrainConfig, machine: Machine, decoded: int) -> LoaderSettings:
    """Fill in what the user left open; measured on an H100, see docs/performance.md.

    Args:
        config: as the user gave it.
        machine: of this process.
        decoded: bytes of all training images, decoded; 0 if they cannot be kept.
    """
    reasons = {}
    workers = config.workers
    if workers is None:
        workers, reasons["workers"] = machine.cpu_threads, "this process's share of the CPU threads"
    cache: Literal["none", "gpu", "host"] = "none"
    if config.cache != "auto":
        cache = config.cache
    elif config.decode != "fused" and decoded and not machine.gpu:
        cache = "host" if decoded <= SMALL * machine.host_memory else "none"
        free = _gigabytes(machine.host_memory)
        reasons["cache"] = f"decoded, the training images take {_gigabytes(decoded)}; {free} are free"
    decode: Literal["fused", "full"] = "fused"
    if config.decode != "auto":
        decode = config.decode
    elif cache != "none":
        decode, reasons["decode"] = "full", "whole images are kept"
    elif not machine.gpu:
        reasons["decode"] = "the CPU decodes no more than the crop"
    elif not machine.jpeg_engines:
        reasons["decode"] = "no hardware decoder"
    else:
        decode, reasons["decode"] = "full", f"{machine.jpeg_engines} hardware decoders, which need whole images"
    load = config.hw_decoder_load
    if load is None:
        load = 0.65 if decode == "fused" else 0.9
        if machine.jpeg_engines:
            reasons["hw_decoder_load"] = f"for {decode} decoding"
    if config.loader not in BY_DALI:
        reasons = {name: reason for name, reason in reasons.items() if name == "workers"}
    prefetch = PREFETCH if config.prefetch is None else config.prefetch
    return LoaderSettings(workers, decode, load, cache, prefetch, reasons)


def _check_cache_fits(cache: str, machine: Machine, decoded: int, remedy: str) -> UserError | None:
    memory = {"none": None, "gpu": machine.gpu_memory, "host": machine.host_memory}[cache]
    if memory is None or decoded <= LARGEST * memory:
        return None
    if cache == "gpu" and not machine.gpu:
        return UserError(f"--cache gpu without a GPU: there is none to keep images on; {remedy}")
    return UserError(
        f"--cache {cache}: decoded, the training images take {_gigabytes(decoded)}, and {_gigabytes(memory)} are free "
        f"for each process; {remedy}"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.{1 if size >= 1e8 else 3}f} GB"


def all_pairs_nvlink(env: DistEnv) -> bool:
    """Whether all ranks are on one machine and NVLink joins every two of their GPUs. A collective."""
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


def resolve(
    config: TrainConfig,
    classes: Sequence[str],
    env: DistEnv,
    feed: LoaderSettings,
    saved: dict[str, Any] | None = None,
) -> ResolvedConfig:
    """Replace every `auto` and every absent value by what this machine, the data and the checkpoint `saved` make of it.

    Raises:
        UserError: on all ranks, for what does not fit the machine, the data or the checkpoint.
    """
    on_cuda = env.device.type == "cuda"
    num_classes = len(classes)
    amp = config.amp
    if amp == "auto":
        amp = "none"
        if on_cuda:
            all_can = all(all_gather_object(torch.cuda.is_bf16_supported(including_emulation=False), env))
            amp = "bf16" if all_can else "fp16"
    compiled = on_cuda if config.compile is None else config.compile
    if config.cuda_graph and not on_cuda:
        raise UserError(
            "--cuda-graph without a GPU: there is none to launch it on; use --no-cuda-graph", on_all_ranks=True
        )
    if amp == "fp16" and not on_cuda:
        raise UserError(
            "--amp fp16 without a GPU: the CPU has no fast float16; use --amp none or bf16", on_all_ranks=True
        )
    if config.num_classes is not None and config.num_classes < num_classes:
        raise UserError(
            f"--num-classes {config.num_classes}: fewer than the {num_classes} class folders; leave it out or raise it",
            on_all_ranks=True,
        )
    grad_exchange = config.grad_exchange
    if grad_exchange == "auto" and env.world_size > 1:
        grad_exchange = "flat" if all_pairs_nvlink(env) else "ddp"
    resolved: dict[str, Any] = {
        "batch_size": choose_batch_size(config, env, saved or {}),
        "workers": feed.workers,
        "amp": amp,
        "grad_exchange": grad_exchange,
        "decode": feed.decode,
        "hw_decoder_load": feed.hw_decoder_load,
        "cache": feed.cache,
        "prefetch": feed.prefetch,
        "device": "cuda" if on_cuda else "cpu",
        "num_classes": config.num_classes or num_classes,
        "val_resize": config.val_resize or round(config.image_size * 8 / 7),
        "compile": compiled,
        # Without a compiler what lies between the kernels is not fused, which costs more than they gain.
        "fused_layers": on_cuda and compiled if config.fused_layers is None else config.fused_layers,
        "cuda_graph": on_cuda and config.grad_accum_steps == 1 if config.cuda_graph is None else config.cuda_graph,
        "warmup_epochs": resolve_warmup(config, saved or {}),
    }
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ResolvedConfig(**(given | resolved))


def resolve_warmup(config: TrainConfig, saved: dict[str, Any]) -> float:
    """`--warmup-epochs`, else that of the checkpoint `saved`, else a tenth of the epochs, at most 5."""
    if config.warmup_epochs is not None:
        return config.warmup_epochs
    return float(saved["config"]["warmup_epochs"]) if saved else min(5, config.epochs / 10)
