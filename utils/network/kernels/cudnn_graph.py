"""cuDNN's graph interface, in C: several operations as one kernel, where cuDNN has an engine for them.

The library is the one that torch has loaded, which calls it for single operations alone. Numbers are those of cuDNN 9's
cudnn_graph.h. Descriptors of a plan live as long as the process, as its plans do.
"""

import ctypes
import functools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
_FLOAT = DTYPES[torch.float32]
ALIGNMENT = 16  # bytes, of a tensor's first element
_CROSS_CORRELATION = 1
_HEURISTIC_A = 3  # NVIDIA's advice; no engine is tried
_STATUS_TEXT = 400  # bytes
_REFUSALS = range(2000, 4000)  # CUDNN_STATUS_BAD_PARAM and _NOT_SUPPORTED, and their kinds


class _Kind(IntEnum):
    """Of a descriptor."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE_CONFIG = 3
    HEURISTIC = 4
    PLAN = 5
    FORWARD = 10
    BACKWARD_DATA = 12
    POINTWISE_OPERATION = 13
    STATISTICS = 14
    GRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    NORM_BACKWARD = 23


class _Type(IntEnum):
    """Of an attribute's values."""

    HANDLE = 0
    DTYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    POINTER = 6
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    POINTWISE_MODE = 14
    DESCRIPTOR = 15
    STATISTICS_MODE = 16


_C_TYPES: dict[_Type, Any] = {
    _Type.HANDLE: ctypes.c_void_p,
    _Type.BOOLEAN: ctypes.c_bool,
    _Type.INT64: ctypes.c_int64,
    _Type.FLOAT: ctypes.c_float,
    _Type.POINTER: ctypes.c_void_p,
    _Type.DESCRIPTOR: ctypes.c_void_p,
}  # the others are enumerations


class Pointwise(IntEnum):
    """What an operation computes of each pair of elements."""

    ADD = 0
    MUL = 1
    RELU_BACKWARD = 200


class CudnnError(RuntimeError):
    """A call of cuDNN failed."""

    def __init__(self, text: str, is_refusal: bool) -> None:
        """`is_refusal`: cuDNN has no engine for the operations, or is not there; it will not have one later."""
        super().__init__(text)
        self.is_refusal = is_refusal


class Value(NamedTuple):
    """A tensor of a graph."""

    descriptor: int
    shape: tuple[int, ...]


@functools.cache
def _library() -> ctypes.CDLL:
    torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # loads it
    try:
        return ctypes.CDLL("libcudnn.so.9")
    except OSError as error:  # a build of torch that holds cuDNN within itself
        raise CudnnError(str(error), is_refusal=True) from error


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        text = ctypes.create_string_buffer(_STATUS_TEXT)
        _library().cudnnGetLastErrorString(text, ctypes.c_size_t(_STATUS_TEXT))
        message = f"{name}: status {status}: {text.value.decode(errors='replace')}"
        raise CudnnError(message, is_refusal=status in _REFUSALS)


def _descriptor(kind: _Kind, *attributes: tuple[int, _Type, Sequence[Any]]) -> int:
    """Make and finalize one. `attributes`: number, type and values of each."""
    made = ctypes.c_void_p()
    _call("cudnnBackendCreateDescriptor", ctypes.c_int(kind), ctypes.byref(made))
    for number, value_type, values in attributes:
        array = (_C_TYPES.get(value_type, ctypes.c_int) * len(values))(*values)
        count = ctypes.c_int64(len(values))
        _call("cudnnBackendSetAttribute", made, ctypes.c_int(number), ctypes.c_int(value_type), count, array)
    _call("cudnnBackendFinalize", made)
    assert made.value is not None
    return made.value


@functools.cache
def _handle(device: int) -> int:
    """Of the current device, which is number `device`."""
    made = ctypes.c_void_p()
    _call("cudnnCreate", ctypes.byref(made))
    assert made.value is not None
    return made.value


class Graph:
    """Operations that are to become one kernel.

    Images are channels_last; arithmetic, vectors of a number a channel and what is not stored are float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the images."""
        self._dtype = dtype
        self._operations: list[int] = []
        self._count = 0
        self._uids: list[int] = []  # of the arguments

    def images(self, shape: Sequence[int]) -> Value:
        """(N, C, H, W), or a weight; an argument of the plan."""
        return self._tensor(shape, self._dtype)

    def vector(self, channels: int) -> Value:
        """A number a channel; an argument of the plan."""
        return self._tensor((1, channels, 1, 1), torch.float32)

    def inner(self, shape: Sequence[int]) -> Value:
        """A result that is not stored."""
        return self._tensor(shape, torch.float32, is_inner=True)

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype, is_inner: bool = False) -> Value:
        _, channels, height, width = shape
        self._count += 1
        if not is_inner:
            self._uids.append(self._count)
        descriptor = _descriptor(
            _Kind.TENSOR,
            (906, _Type.INT64, [self._count]),
            (901, _Type.DTYPE, [DTYPES[dtype]]),
            (900, _Type.INT64, [ALIGNMENT]),
            (902, _Type.INT64, list(shape)),
            (903, _Type.INT64, [channels * height * width, 1, channels * width, channels]),
            (907, _Type.BOOLEAN, [is_inner]),
        )
        return Value(descriptor, tuple(shape))

    def convolution(self, x: Value, weight: Value, y: Value, stride: Sequence[int], padding: Sequence[int]) -> None:
        """y = x * weight."""
        self._add(_Kind.FORWARD, 700, _convolution(stride, padding), weight, x, y)

    def convolution_input_grad(
        self, dy: Value, weight: Value, dx: Value, stride: Sequence[int], padding: Sequence[int]
    ) -> None:
        """dx: the gradient of a convolution's input, from that of its result."""
        self._add(_Kind.BACKWARD_DATA, 706, _convolution(stride, padding), weight, dx, dy)

    def _add(self, kind: _Kind, first: int, convolution: int, *tensors: Value) -> None:
        factors = [(first, _Type.FLOAT, [1.0]), (first + 1, _Type.FLOAT, [0.0])]
        ends = [convolution, *(tensor.descriptor for tensor in tensors)]
        attributes = [(first + 2 + at, _Type.DESCRIPTOR, [end]) for at, end in enumerate(ends)]
        self._operations.append(_descriptor(kind, *factors, *attributes))

    def sums(self, x: Value, total: Value, squares: Value) -> None:
        """Sums over N, H, W of x and of its squares."""
        ends = [(772 + at, _Type.DESCRIPTOR, [end.descriptor]) for at, end in enumerate((x, total, squares))]
        how = [(770, _Type.STATISTICS_MODE, [0]), (771, _Type.DTYPE, [_FLOAT])]
        self._operations.append(_descriptor(_Kind.STATISTICS, *how, *ends))

    def pointwise(self, mode: Pointwise, a: Value, b: Value, result: Value, factor: float = 1.0) -> None:
        """a + factor * b, a * b, or the gradient a where b > 0."""
        how = _descriptor(_Kind.POINTWISE, (0, _Type.POINTWISE_MODE, [mode]), (1, _Type.DTYPE, [_FLOAT]))
        places = (757, 751, 756) if mode == Pointwise.RELU_BACKWARD else (751, 752, 753)
        ends = [(at, _Type.DESCRIPTOR, [end.descriptor]) for at, end in zip(places, (a, b, result), strict=True)]
        factors = [(754, _Type.FLOAT, [1.0])]
        if mode != Pointwise.RELU_BACKWARD:
            factors.append((755, _Type.FLOAT, [factor]))
        descriptor = _descriptor(_Kind.POINTWISE_OPERATION, (750, _Type.DESCRIPTOR, [how]), *factors, *ends)
        self._operations.append(descriptor)

    def norm_grads(
        self, dy: Value, x: Value, mean: Value, std_inverse: Value, weight: Value, results: Sequence[Value]
    ) -> None:
        """Of a batch norm of x.

        Args:
            dy: gradient of its result.
            results: sums over N, H, W of dy * (x - mean) * std_inverse and of dy; three vectors from which the gradient
                of x follows.
        """
        ends = [end.descriptor for end in (mean, std_inverse, weight, x, dy, *results)]
        attributes = [(1621 + at, _Type.DESCRIPTOR, [end]) for at, end in enumerate(ends)]
        self._operations.append(_descriptor(_Kind.NORM_BACKWARD, (1620, _Type.DTYPE, [_FLOAT]), *attributes))

    def plan(self, device: int) -> "Plan":
        """The kernel that cuDNN takes for the best on a CUDA device.

        Raises:
            CudnnError: it has none.
        """
        with torch.cuda.device(device):
            return self._plan(_handle(device))

    def _plan(self, handle: int) -> "Plan":
        graph = _descriptor(_Kind.GRAPH, (800, _Type.HANDLE, [handle]), (801, _Type.DESCRIPTOR, self._operations))
        heuristic = _descriptor(
            _Kind.HEURISTIC, (201, _Type.DESCRIPTOR, [graph]), (200, _Type.HEURISTIC_MODE, [_HEURISTIC_A])
        )
        config = ctypes.c_void_p()
        _call("cudnnBackendCreateDescriptor", ctypes.c_int(_Kind.ENGINE_CONFIG), ctypes.byref(config))
        found = _read(heuristic, 202, _Type.DESCRIPTOR, config)
        if not found:
            raise CudnnError("no engine has these operations", is_refusal=True)
        plan = _descriptor(_Kind.PLAN, (400, _Type.HANDLE, [handle]), (401, _Type.DESCRIPTOR, [config.value]))
        return Plan(handle, plan, self._uids)


def _convolution(stride: Sequence[int], padding: Sequence[int]) -> int:
    return _descriptor(
        _Kind.CONVOLUTION,
        (100, _Type.DTYPE, [_FLOAT]),
        (101, _Type.CONVOLUTION_MODE, [_CROSS_CORRELATION]),
        (102, _Type.INT64, [1, 1]),
        (103, _Type.INT64, list(stride)),
        (104, _Type.INT64, list(padding)),
        (105, _Type.INT64, list(padding)),
        (106, _Type.INT64, [2]),
    )


def _read(descriptor: int, number: int, value_type: _Type, value: Any) -> int:
    """Read the first value of an attribute into `value`; returns how many it has."""
    count = ctypes.c_int64()
    _call(
        "cudnnBackendGetAttribute", ctypes.c_void_p(descriptor), ctypes.c_int(number), ctypes.c_int(value_type),
        ctypes.c_int64(1), ctypes.byref(count), ctypes.byref(value),
    )  # fmt: skip
    return count.value


class Plan:
    """A kernel that is ready to run."""

    def __init__(self, handle: int, descriptor: int, uids: Sequence[int]) -> None:
        self._handle, self._descriptor, self._uids = handle, descriptor, uids
        size = ctypes.c_int64()
        _read(descriptor, 402, _Type.INT64, size)
        self.workspace_bytes = size.value

    def __call__(self, *tensors: Tensor) -> None:
        """Run on the current stream. `tensors`: arguments in the order of their declaration, results among them."""
        with torch.cuda.device(tensors[0].device):
            self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=tensors[0].device)
        pack = _descriptor(
            _Kind.VARIANT_PACK,
            (1000, _Type.INT64, self._uids),
            (1001, _Type.POINTER, [tensor.data_ptr() for tensor in tensors]),
            (1003, _Type.POINTER, [workspace.data_ptr()]),
        )
        _call("cudnnSetStream", ctypes.c_void_p(self._handle), ctypes.c_void_p(stream))
        _call(
            "cudnnBackendExecute", ctypes.c_void_p(self._handle), ctypes.c_void_p(self._descriptor),
            ctypes.c_void_p(pack),
        )  # fmt: skip
        _call("cudnnBackendDestroyDescriptor", ctypes.c_void_p(pack))
