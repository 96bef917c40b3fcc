"""The process group: what the launcher says, the device of this process, rendezvous and teardown."""

import contextlib
import dataclasses
import datetime
import functools
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from utils.distributed.launcher import exit_with_parent
from utils.distributed.monitor import RankMonitor
from utils.distributed.store import ANSWER_SECONDS, BoundedStore, NoAnswer, in_time
from utils.errors import RunFailed, UserError, first_line


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher says: this process among all processes and among those of its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


@dataclasses.dataclass(frozen=True)
class DistEnv:
    """This process in the group.

    Attributes:
        rank: number among all processes, from 0; DALI's shard.
        local_rank: number on this machine, from 0; the GPU, among those that the launcher shows.
        world_size: number of processes.
        local_world_size: number of processes on this machine.
        device: where this process trains.
        peers: the other processes, or None.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    monitor: RankMonitor | None = None

    def guard(self, tell: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """See `RankMonitor.watched`."""
        return self.monitor.guard(tell) if self.monitor is not None else contextlib.nullcontext()

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the user."""
        return self.rank == 0


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's variables, or Slurm's where torchrun's are absent; neither means one process.

    Raises:
        UserError: a variable is missing or is not a number.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        fallback = {"LOCAL_WORLD_SIZE": "1"} if environ["WORLD_SIZE"] == "1" else {}
        fallback |= {"RANK": "0", "LOCAL_RANK": "0"} if environ["WORLD_SIZE"] == "1" else {}
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # Of the step, not of the job: `python train.py` within an allocation of many tasks is one process.
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
        fallback = {}
    else:
        return Launch()
    values = []
    for name in names:
        text = environ.get(name, fallback.get(name))
        match = re.match(r"\d+", text or "")
        if match is None:
            raise UserError(f"{name} {text!r} in the environment: must be a number; start with torchrun or srun")
        values.append(int(match.group()))
    return Launch(*values)


def _rendezvous(environ: Mapping[str, str]) -> tuple[str, str]:
    """Where the processes meet, torchrun's store or the first host of a Slurm step, and a name that is theirs alone.

    Steps of one job may run at the same time, so each has a port of its own, below those that Linux gives out.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return "env://", "brisk"
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)  # node[03-05,9].lan,... -> node03.lan
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if first is None or not job.isdigit() or not step.isdigit():
        raise UserError("MASTER_ADDR and MASTER_PORT are missing in the environment; start with torchrun or srun")
    port = 20000 + (int(job) + 7919 * int(step)) % 12000
    return f"tcp://{first[1]}{first[2] or ''}{first[3] or ''}:{port}", f"brisk-{job}.{step}"


def choose_device(choice: str, launch: Launch) -> torch.device:
    """`--device` -> the device of this process. To be called before CUDA starts, as it hides the other ranks' GPUs.

    Each rank's GPU is then number 0. Compile results hold the number, so that otherwise no rank could use those of
    another, nor of a run on another number of GPUs.

    Raises:
        UserError: CUDA asked for and absent, or fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count()
    if choice == "cpu" or (choice == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise UserError("--device cuda: no usable GPU here; use --device cpu, or check nvidia-smi and the driver")
    if gpus == 1 and launch.world_size > 1 and "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", 0)  # Slurm can show each task its own GPU alone
    if launch.local_rank >= gpus:
        raise UserError(
            f"{launch.local_world_size} processes on this machine, but {gpus} GPUs; start one process per GPU "
            "(torchrun --nproc_per_node, srun --ntasks-per-node)"
        )
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_device_for_rank(before, launch.local_rank)
    if torch.cuda.device_count() == 1:
        return torch.device("cuda", 0)
    # Without the driver's management library torch has asked CUDA itself, which looked at the variable before.
    if before is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    return torch.device("cuda", launch.local_rank)


def visible_device_for_rank(visible: str | None, local_rank: int) -> str:
    """The part of CUDA_VISIBLE_DEVICES, or of all GPUs if it is None, that is a rank's own."""
    return str(local_rank) if visible is None else visible.split(",")[local_rank].strip()


@contextlib.contextmanager
def process_group(
    device_choice: str, timeout: float, tell: Callable[[str], None] = lambda line: None
) -> Iterator[DistEnv]:
    """The group of all processes, torn down at the end and on an error.

    Collectives on CPU tensors go through gloo, on CUDA tensors through NCCL.

    Args:
        device_choice: auto, cuda or cpu.
        timeout: seconds after which a collective that another process does not join is an error.
        tell: gives the user a line, if a process is lost while the group comes together.
    """
    launch = read_launch()
    # CUDA reads it once, when it starts. DALI works on some thirty streams. The default of 8 hardware queues makes the
    # training step wait in a queue behind a decoder (docs/decisions/0005).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = choose_device(device_choice, launch)
    env = DistEnv(**dataclasses.asdict(launch), device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    exit_with_parent()
    if env.world_size == 1:
        yield env
        return
    limit = datetime.timedelta(seconds=timeout)
    store, part, monitor = _meet(env, limit)
    with part.looked_after(timeout, functools.partial(monitor.cut_off, tell)):
        with monitor.guard(tell):
            check_devices(_describe(device), part, env.rank, env.world_size, timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"{part.prefix}group", store),
                rank=env.rank,
                world_size=env.world_size,
                timeout=limit,
            )
        try:
            yield dataclasses.replace(env, monitor=monitor)
        finally:
            dist.destroy_process_group()


def _meet(env: DistEnv, limit: datetime.timedelta) -> tuple[Store, BoundedStore, RankMonitor]:
    """Torch's connection to the store, ours to a part of it that these processes have to themselves, and the others.

    Raises:
        RunFailed: a process did not come, or the store does not answer.
    """
    timeout = limit.total_seconds()
    meet, name = _rendezvous(os.environ)

    def connect() -> tuple[Store, Store]:
        store, _, _ = next(rendezvous(meet, env.rank, env.world_size, timeout=limit))
        return store, store.clone()  # one for torch, whose calls may hold up those of others, and one for us

    try:
        store, own = in_time(connect, timeout + ANSWER_SECONDS)  # it has --timeout of its own for most
        part = create_store_prefix(BoundedStore(own, timeout).part(name), env.rank, env.world_size, timeout)
        return store, part, RankMonitor(part, env.rank, env.world_size, timeout)
    except (dist.DistError, NoAnswer) as error:
        raise RunFailed(
            f"rank {env.rank}: cannot meet rank 0 or its launcher at {_where(meet)} ({first_line(error)}); "
            f"--timeout is {timeout:g} s",
            on_all_ranks=False,
        ) from None


def _where(meet: str) -> str:
    """Host and port of a place that `_rendezvous` gives."""
    return "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ) if meet == "env://" else meet.partition("//")[2]


def create_store_prefix(store: BoundedStore, rank: int, world_size: int, timeout: float) -> BoundedStore:
    """A part of `store` for these processes alone. A collective.

    Several agents of torchrun keep one store over all restarts (seen with torch 2.15): processes that come back find
    the addresses of the dead in it and wait for those. So each process leaves a word of its own, and rank 0 answers
    every word that it sees with the name of a new part. An answer of before answers nobody's word.

    Raises:
        RunFailed: a process did not come within `timeout` seconds.
        NoAnswer: the store does not answer.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"word/{rank}", own)
    part = own  # rank 0's word is the name
    missing = list(range(1, world_size)) if rank == 0 else [0]
    while missing and time.monotonic() < deadline:
        if rank == 0:
            for other in missing:
                if store.check([f"word/{other}"]):
                    store.set(f"answer/{store.get(f'word/{other}').decode()}", own)
            missing = [other for other in missing if not store.check([f"{own}/here/{other}"])]
        elif store.check([f"answer/{own}"]):
            part = store.get(f"answer/{own}").decode()
            store.set(f"{part}/here/{rank}", "")
            missing = []
        time.sleep(0.01)
    if missing:
        names = ", ".join(map(str, missing))
        raise RunFailed(f"rank {names} did not come within {timeout:g} s (--timeout)", on_all_ranks=False)
    return store.part(part)


def _describe(device: torch.device) -> str:
    """`cpu`, or `cuda` and what no other GPU in the world is called."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


def check_devices(own: str, store: BoundedStore, rank: int, world_size: int, timeout: float) -> None:
    """Compare the ranks' devices, each as `_describe` has it. A collective, before any that those devices take part in.

    Raises:
        UserError: on all ranks: some have GPUs and others do not, or two have the same.
        DistStoreError: a process did not come within `timeout` seconds.
        NoAnswer: the store does not answer.
    """
    store.set(f"device/{rank}", own)
    deadline = time.monotonic() + timeout
    while not store.check([f"device/{other}" for other in range(world_size)]):
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"no device of a rank after {timeout:g} s")
        time.sleep(0.01)
    devices = [store.get(f"device/{rank}").decode() for rank in range(world_size)]
    kinds = [device.split()[0] for device in devices]
    if len(set(kinds)) > 1:
        without = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == "cpu")
        raise UserError(
            f"--device auto: rank {without} of {world_size} sees no GPU, the others do; check nvidia-smi and the "
            "driver there, or give --device cpu",
            on_all_ranks=True,
        )
    for rank, device in enumerate(devices):
        if kinds[0] == "cuda" and device in devices[:rank]:
            raise UserError(
                f"rank {devices.index(device)} and rank {rank} have the same GPU; start one process per GPU "
                "(torchrun --nproc_per_node, srun --ntasks-per-node)",
                on_all_ranks=True,
            )
