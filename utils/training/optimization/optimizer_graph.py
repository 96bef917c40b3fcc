"""The optimizer's step captured once as a CUDA graph and replayed: one launch for all of its kernels."""

import contextlib
import inspect
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from utils.network.gradients import capture_stream, record, wait_for_stream
from utils.options.resolved import ResolvedConfig

NUM_BRANCHES = 8


class GraphedOptimizerStep:
    """`optimizer.step()` as a CUDA graph. The weights must have gradients.

    timm's Muon launches over a thousand kernels a step, one by one, which takes longer than they do. Most are too small
    for a GPU, so that the graph has `NUM_BRANCHES` side by side, each with a part of the weights
    (docs/internals/decisions/0033). Each weight's update depends on no other weight.

    The first call is a step without a graph: it creates the optimizer's state and loads its kernels. The second
    captures. So does a call where gradients are other tensors than at the capture. Between calls the optimizer is as
    without a graph: rates are numbers, `capturable` is not set. A checkpoint has neither.

    Args:
        optimizer: `is_capturable`; its state may come from a checkpoint of a run without a graph.
        device: of all weights, a GPU.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._stream = optimizer, capture_stream(device)
        self._branches = [capture_stream(device) for _ in range(NUM_BRANCHES)]
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor | None] = []
        self._is_loaded = False

    def __call__(self) -> None:
        """Update the weights from their gradients.

        Raises:
            UserError: at the capture, if the optimizer cannot be captured.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        is_same = len(gradients) == len(self._gradients) and all(map(operator.is_, gradients, self._gradients))
        if self._graph is not None and is_same:
            self._graph.replay()
            return
        self._graph, self._gradients = None, gradients
        pairs = zip(parameters, gradients, strict=True)
        has_state = all(parameter in self._optimizer.state for parameter, gradient in pairs if gradient is not None)
        with self._capturable():
            if not self._is_loaded or not has_state:  # a capture would start the state again at each replay
                self._optimizer.step()
                self._is_loaded = True
                return
            wait_for_stream(torch.cuda.current_stream(self._stream.device))  # in a way that signals can interrupt
            self._graph = record(self._step_in_branches, self._stream, "this optimizer's step")
        self._graph.replay()

    def _step_in_branches(self) -> None:
        """A step of each part of the weights, on a stream of its own; to be captured."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        for branch, part in zip(self._branches, divide(trained, NUM_BRANCHES), strict=False):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if parameter in part else None  # without one a weight stays as it is
            branch.wait_stream(self._stream)
            with torch.cuda.stream(branch):
                self._optimizer.step()
        for branch in self._branches[: len(trained)]:
            self._stream.wait_stream(branch)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    @contextlib.contextmanager
    def _capturable(self) -> Iterator[None]:
        """Rates and counts of steps are tensors on the GPU: a captured number would be that of the capture for ever."""
        groups = self._optimizer.param_groups
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and not value.is_cuda:
                    state[name] = value.to(parameter.device)
        before = [(group["lr"], group["capturable"]) for group in groups]
        for rate, group in zip(self._rates, groups, strict=True):
            group.update(lr=rate, capturable=True)
        try:
            yield
        finally:
            for (lr, capturable), group in zip(before, groups, strict=True):
                group.update(lr=lr, capturable=capturable)


def divide(parameters: Sequence[Parameter], parts: int) -> list[set[Parameter]]:
    """The parameters in at most `parts` sets, each with as many large and as many small ones as the others."""
    ordered = sorted(parameters, key=Parameter.numel, reverse=True)
    return [set(ordered[number::parts]) for number in range(min(parts, len(ordered)))]


def is_capturable(optimizer: Optimizer) -> bool:
    """Whether a graph of the step is right, as its library says, and gains time: weights are updated one by one.

    Others keep numbers that change on the host. A wrapper, as timm's Lookahead, has a class of its own.
    """
    arguments = inspect.signature(type(optimizer)).parameters
    return "capturable" in arguments and "foreach" not in arguments


def create_graphed_step(
    config: ResolvedConfig, optimizer: Optimizer, device: torch.device
) -> GraphedOptimizerStep | None:
    """The step of `optimizer` as a graph where the run has one of its passes; None where torch's own step is used.

    fp16 decides after each backward pass whether there is a step.
    """
    if not config.cuda_graph or config.amp == "fp16" or not is_capturable(optimizer):
        return None
    return GraphedOptimizerStep(optimizer, device)
