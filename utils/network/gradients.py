"""Forward and backward pass of a batch: computed kernel by kernel, or replayed as one CUDA graph."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from utils.errors import UserError, first_line
from utils.network.distillation import Teacher
from utils.network.gradient_plans import stop_gradient_plans
from utils.seed import random_state, set_random_state

WARMUP_PASSES = 3  # torch's advice; the first also compiles
DDP_WARMUP_PASSES = 11  # torch's advice: DDP times its first ten passes, which a capture cannot
POLL_INTERVAL = 0.01  # seconds between two looks at whether the device is done
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}


class ForwardBackward:
    """Adds the gradients of one batch to the parameters' `.grad`.

    Args:
        net: images (N, 3, H, W) -> logits (N, num_classes); compiled and distributed as wanted.
        criterion: logits, targets -> mean loss; with a teacher also its logits.
        scaler: of fp16; a disabled one passes losses through.
        amp_dtype: of the forward pass; float32 is full precision.
        accum_steps: batches per optimizer step; the gradient is their mean.
        exchange: what averages the gradients over the ranks after the backward pass; None where `net` does it itself.
        teacher: images -> logits without gradients; None for none.
    """

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module,
        scaler: GradScaler,
        amp_dtype: torch.dtype,
        accum_steps: int,
        exchange: Callable[[], None] | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.net, self.criterion, self.scaler, self.exchange = net, criterion, scaler, exchange
        self.amp_dtype, self.accum_steps, self.teacher = amp_dtype, accum_steps, teacher

    def __call__(self, images: Tensor, targets: Tensor, micro: int) -> Tensor:
        """Forward and backward.

        Args:
            images: (N, 3, H, W), floating point, on the device.
            targets: int64 (N,), or float32 (N, num_classes).
            micro: number of this batch within its optimizer step, from 0. The first starts from no gradients; with
                the last the ranks exchange them.

        Returns:
            The mean loss, a scalar on the device, detached. Valid until the next call.
        """
        if micro == 0:
            self.net.zero_grad(set_to_none=True)
        is_last = micro == self.accum_steps - 1
        postpone = contextlib.nullcontext if is_last else getattr(self.net, "no_sync", contextlib.nullcontext)
        with postpone():
            with torch.autocast(images.device.type, self.amp_dtype, enabled=self.amp_dtype != torch.float32):
                # The teacher first: the memory of its pass is free again for the activations that the student keeps.
                answers = () if self.teacher is None else (self.teacher(images),)
                loss: Tensor = self.criterion(self.net(images), targets, *answers)
            self.scaler.scale(loss / self.accum_steps).backward()  # type: ignore[no-untyped-call]
        if is_last and self.exchange is not None:
            self.exchange()
        return loss.detach()

    def start_epoch(self, epoch: int) -> None:
        """Nothing changes between epochs."""

    def close(self) -> None:
        """Nothing to release."""


class GraphedForwardBackward:
    """`ForwardBackward` captured once as a CUDA graph and replayed.

    A step of a thousand kernels is then one launch. That matters beside DALI: its threads and the training thread wait
    for each other in the CUDA driver, which doubles the cost of the launches (docs/internals/experiments.md).
    It also makes small batches as fast per image as large ones.

    The first call computes the gradients of a few batches to no effect (buffers and random numbers are restored), then
    captures. So does the first call with images of another size. Parameters keep the `.grad` tensors of the capture:
    nothing may set them to None.

    With several ranks the exchange of gradients is in the graph. Replays wait for the other ranks like the passes they
    replace, but NCCL's watchdog does not see them: `StopRequest`'s sum, once a step, notices a rank that is gone, and
    `utils.distributed.watchdog` does where the main thread waits for the device.

    Args:
        eager: what to capture; one batch per optimizer step.
        stream: where to capture; DDP must have been made `on_stream` of it. The current device's.
    """

    def __init__(self, eager: ForwardBackward, stream: torch.cuda.Stream) -> None:
        assert eager.accum_steps == 1, "a replay overwrites gradients, it does not add to them"
        self._eager, self._stream = eager, stream
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, images: Tensor, targets: Tensor, micro: int) -> Tensor:
        """As `ForwardBackward.__call__`. Images of another size than before are captured again, on all ranks alike.

        Raises:
            UserError: at a capture, if the network cannot be captured.
        """
        if self._graph is None or images.shape != self._images.shape:
            self.close()
            self._graph = self._capture(images, targets)
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss

    def start_epoch(self, epoch: int) -> None:
        """Nothing changes between epochs."""

    def close(self) -> None:
        """Release the graph. NCCL waits for that before it ends a communicator that the graph holds."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _capture(self, images: Tensor, targets: Tensor) -> torch.cuda.CUDAGraph:
        self._images, self._targets = images.clone(), targets.clone()
        with preserve_state(self._eager.net, images.device), on_stream(self._stream):
            by_ddp = dist.is_initialized() and self._eager.exchange is None
            for _ in range(DDP_WARMUP_PASSES if by_ddp else WARMUP_PASSES):
                self._eager(self._images, self._targets, 0)
                wait_for_stream(self._stream)
        stop_gradient_plans()  # only this thread may use autograd's while that is captured
        self._eager.net.zero_grad(set_to_none=True)  # the capture allocates its own
        torch.cuda.empty_cache()
        return record(self._run_eagerly, self._stream, "this network's step")

    def _run_eagerly(self) -> None:
        self._loss = self._eager(self._images, self._targets, 0)


def record(work: Callable[[], object], stream: torch.cuda.Stream, name: str) -> torch.cuda.CUDAGraph:
    """The kernels of `work` as a graph; none of them runs.

    Args:
        work: has run before, so that nothing is left to load or to choose.
        stream: where to capture.
        name: of the work, for the user.

    Raises:
        UserError: it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Threads of DALI call CUDA all the time; only this thread's calls may spoil the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Going on would be unsafe: torch leaves its random generator and allocator in the state of a capture.
        reason = first_line(error.__context__ or error)
        raise UserError(f"--cuda-graph: {name} cannot be recorded ({reason}); use --no-cuda-graph") from error
    return graph


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to capture on; CUDA does not allow that on the default one.

    Of high priority, which the captured kernels keep: DALI's wait for them rather than they for DALI's.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream`, after what is under way on the current one and before what follows; None changes nothing."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def wait_for_stream(stream: torch.cuda.Stream | None) -> None:
    """Wait in short sleeps, so that signal handlers and the other threads of this process can run; None for no wait.

    A rank that has compiled first waits here for the others, up to minutes. If it launched more kernels instead, until
    the device takes no more, it would wait in CUDA: two such ranks of four reacted neither to a signal nor to the end
    of other ranks.
    """
    done = stream.record_event() if stream else None
    while done and not done.query():
        time.sleep(POLL_INTERVAL)


@contextlib.contextmanager
def preserve_state(net: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the network's buffers and the state of all random generators at the end."""
    before, buffers = random_state(device), [(buffer, buffer.clone()) for buffer in net.buffers()]
    yield
    set_random_state(before, device)
    with torch.no_grad():
        for buffer, saved in buffers:
            buffer.copy_(saved)
