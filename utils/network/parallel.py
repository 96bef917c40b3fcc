"""Data parallelism: DDP or one flat all-reduce of the gradients, equal weights, mean running statistics."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, all_reduce_sum
from utils.distributed.group import DistEnv
from utils.distributed.startup import show_startup
from utils.network.compiler import compile_network
from utils.network.distillation import Teacher
from utils.network.freezing import AnyForwardBackward, FreezingForwardBackward
from utils.network.gradients import (
    AMP_DTYPES,
    ForwardBackward,
    GraphedForwardBackward,
    on_stream,
    preserve_state,
    wait_for_stream,
)
from utils.options.resolved import ResolvedConfig
from utils.options.schedules import size_schedule, value_at
from utils.options.sizes import sides_of

# torch 2.15 renamed the option; 2.11 to 2.14 know the old name only.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)
_ALIGNMENT = 4  # float32 in the 16 bytes that a GPU's thread loads at once
DDP_BUCKETS = (2**18, 25 * 2**18)  # float32: 1 MiB for the first, then 25 (torch 2.11's defaults)


@collective
def distribute(model: nn.Module, config: ResolvedConfig, env: DistEnv, stream: torch.cuda.Stream | None) -> nn.Module:
    """`model`, compiled on request, within DDP if that exchanges the gradients.

    DDP is compiled with the network, so that it is split where DDP's buckets end and their exchange begins early.

    Args:
        model: on its device.
        stream: where the step will be captured; None if it will not.
    """
    net = model
    if exchanges_by_ddp(config, env):
        # Running statistics stay with their rank and are averaged when they are needed; torch's default would
        # broadcast rank 0's at every step and drop the others.
        with on_stream(stream):
            net = DistributedDataParallel(
                model,
                device_ids=[env.device] if env.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_KEEP_BUFFERS,
            )
        if config.grad_compression == "bf16":
            net.register_comm_hook(None, bf16_compress_hook)
    elif env.world_size > 1:
        broadcast_weights(model)
    warm_up_nccl(model, env)
    return compile_network(net) if config.compile else net


@collective
def create_forward_backward(
    config: ResolvedConfig,
    net: nn.Module,
    model: nn.Module,
    criterion: nn.Module,
    scaler: GradScaler,
    env: DistEnv,
    stream: torch.cuda.Stream | None,
    epoch: int = 0,
    teacher: Teacher | None = None,
) -> AnyForwardBackward:
    """What a step does with a batch. Compiles for the image sizes of later epochs.

    Args:
        net: `model` as `distribute` returned it.
        model: whose gradients are exchanged where DDP does not do it.
        criterion: logits and targets, with a teacher also its logits -> mean loss.
        scaler: of fp16.
        stream: where a CUDA graph is captured; None for no graph.
        epoch: in which this launch begins, from 0.
        teacher: images -> logits; None for none.
    """

    def create(net: nn.Module) -> ForwardBackward | GraphedForwardBackward:
        exchange = None
        if env.world_size > 1 and not exchanges_by_ddp(config, env):
            dtype = torch.bfloat16 if config.grad_compression == "bf16" else torch.float32
            exchange = FlatAllReduce(model.parameters(), dtype)
        forward_backward = ForwardBackward(
            net, criterion, scaler, AMP_DTYPES[config.amp], config.grad_accum_steps, exchange, teacher
        )
        return forward_backward if stream is None else GraphedForwardBackward(forward_backward, stream)

    def set_up(epoch: int) -> ForwardBackward | GraphedForwardBackward:
        size = value_at(size_schedule(config), epoch, config.image_size)
        # Weights are the same on all ranks; running statistics are each rank's and must not become rank 0's. A resume
        # warms DDP's buckets up, too.
        with preserve_state(model, env.device), on_stream(stream):
            net = distribute(model, config, env, stream)
            warm_up_ddp_buckets(net, dataclasses.replace(config, image_size=size), env)
        compile_later_sizes(net, model, config, env, stream, epoch)
        return create(net)

    created = create(net)
    if epoch >= config.freeze_epochs:
        compile_later_sizes(net, model, config, env, stream, epoch)
    return FreezingForwardBackward(created, model, config.freeze_epochs, set_up) if config.freeze_epochs else created


def exchanges_by_ddp(config: ResolvedConfig, env: DistEnv) -> bool:
    """Whether DDP exchanges the gradients; otherwise `FlatAllReduce` does, or one process needs no exchange."""
    return env.world_size > 1 and config.grad_exchange == "ddp"


@collective
def warm_up_ddp_buckets(net: nn.Module, config: ResolvedConfig, env: DistEnv) -> None:
    """A pass of zeros through DDP, to be called before a checkpoint is loaded over the state that it changes.

    DDP lays its gradient buckets out again after the first backward pass of a launch, and the rounding of a sum over
    three and more ranks depends on the layout: without this the first resumed step would differ in its last bits.
    """
    if exchanges_by_ddp(config, env):
        _pass_zeros(net, config, env)


@collective
def compile_later_sizes(
    net: nn.Module, model: nn.Module, config: ResolvedConfig, env: DistEnv, stream: torch.cuda.Stream | None, epoch: int
) -> None:
    """Compile `net` for the image sizes that follow `epoch`, from 0, so that no later epoch waits for the compiler.

    Those until the head is no longer alone, which sets `net` up again. Leaves weights, statistics and random numbers as
    they were.  The other arguments are those of `create_forward_backward`.
    """
    sizes, end = size_schedule(config), config.freeze_epochs if epoch < config.freeze_epochs else config.epochs
    later = {size for first, size in sizes.items() if epoch < first < end}
    later -= {value_at(sizes, epoch, config.image_size)}
    for size in sorted(later, key=sides_of) if config.compile else ():
        show_startup(f"compiling for {size} px")
        with preserve_state(model, env.device), on_stream(stream):
            _pass_zeros(net, dataclasses.replace(config, image_size=size), env)
            wait_for_stream(stream)


def _pass_zeros(net: nn.Module, config: ResolvedConfig, env: DistEnv) -> None:
    """Forward and backward of a batch of zeros of `image_size`."""
    net.train()
    dtype = AMP_DTYPES[config.amp]
    images = torch.zeros(config.batch_size, 3, *sides_of(config.image_size), dtype=dtype, device=env.device)
    with torch.autocast(env.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = net(images.contiguous(memory_format=torch.channels_last)).sum()
    loss.backward()
    net.zero_grad(set_to_none=True)


class FlatAllReduce:
    """Averages gradients over all ranks in one all-reduce.

    One copy of all gradients into one buffer, one exchange, no overlap with the backward pass: over NVLink less work
    than DistributedDataParallel's copy of each gradient into its bucket (docs/internals/decisions/0011).

    Args:
        parameters: float32, dense; in the same order on all ranks.
        dtype: in which gradients travel.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._dtype = dtype
        offsets, size = [], 0
        for parameter in self._parameters:
            offsets.append(size)
            size += math.ceil(parameter.numel() / _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(size, device=self._parameters[0].device)
        self._views = [
            self._buffer.as_strided(parameter.shape, parameter.stride(), offset)
            for parameter, offset in zip(self._parameters, offsets, strict=True)
        ]

    @collective
    def __call__(self) -> None:
        """Replace every `.grad` by its mean over the ranks.

        It is then a view of a buffer that the next call overwrites. A parameter without a gradient, which must have
        none on all ranks, keeps none.
        """
        pairs = zip(self._parameters, self._views, strict=True)
        used = [(parameter, parameter.grad, view) for parameter, view in pairs if parameter.grad is not None]
        torch._foreach_copy_([view for _, _, view in used], [gradient for _, gradient, _ in used])
        buffer = self._buffer.to(self._dtype)
        if buffer.is_cuda:
            dist.all_reduce(buffer, dist.ReduceOp.AVG)
        else:  # gloo has no mean
            all_reduce_sum(buffer).div_(dist.get_world_size())
        if buffer is not self._buffer:
            self._buffer.copy_(buffer)
        for parameter, _, view in used:
            parameter.grad = view


@collective
@torch.no_grad()
def diverged_parameters(module: nn.Module, env: DistEnv) -> dict[int, list[str]]:
    """By rank, the names of the parameters that are not bit for bit those of rank 0.

    Compares a sum of each parameter's bits, read as integers.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    parameters = dict(module.named_parameters())
    if env.world_size == 1 or not parameters:
        return {}
    sums = [value.view(integers[value.element_size()]).sum(dtype=torch.int64) for value in parameters.values()]
    first, *others = all_gather_object(torch.stack(sums).tolist(), env)
    diverged = [
        [name for name, found, expected in zip(parameters, other, first, strict=True) if found != expected]
        for other in others
    ]
    return {rank: names for rank, names in enumerate(diverged, start=1) if names}


@collective
@torch.no_grad()
def broadcast_weights(module: nn.Module) -> None:
    """Rank 0's parameters and buffers, on every rank, in place."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor, 0)


@collective
def warm_up_nccl(module: nn.Module, env: DistEnv) -> None:
    """Let NCCL connect the ranks for all-reduces as large as `module`'s gradients and as DDP's buckets.

    NCCL connects within the first all-reduce that uses a new algorithm or path, and the host waits in C until all ranks
    are there. Now they are. Later one may compile for minutes longer than another, which could not handle a signal.
    """
    if env.world_size == 1 or env.device.type != "cuda":
        return
    gradients = sum(parameter.numel() for parameter in module.parameters())
    for numel in sorted({min(size, gradients) for size in (*DDP_BUCKETS, gradients)}):
        dist.all_reduce(torch.zeros(numel, device=env.device))


@collective
@torch.no_grad()
def average_buffers(module: nn.Module, env: DistEnv) -> None:
    """Replace floating-point buffers (batch norm's running statistics) by their mean over the ranks.

    Each rank gathers statistics of its own images; evaluation must not depend on which rank it runs.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if env.world_size == 1 or not buffers:
        return
    flat = torch.cat([buffer.flatten().double() for buffer in buffers])
    all_reduce_sum(flat).div_(env.world_size)
    means = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))
