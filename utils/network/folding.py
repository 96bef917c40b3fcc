"""A pass over a compiled training step: batch norm's sums move into the kernels that make what is summed.

Three patterns of residual networks are replaced, each only where the graph of the forward and backward pass shows the
whole of it:

- a convolution and the statistics of its result;
- the gradient of a convolution's input, the ReLU in front of it, and the sums of the batch norm in front of that;
- the end of a residual block: two gradients are added, masked by the ReLU, and summed by the batch norms before it.

The first two need a kernel of cuDNN (fp16). So does the third in one kernel with the convolution whose gradient it is;
otherwise it is one pass over memory instead of two. cuDNN's sums differ in the last bits from run to run, so its
kernels are left out with `torch.use_deterministic_algorithms`. With gradient checkpointing nothing is replaced.
"""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from utils.network import folded_ops, fused_ops

AnyNode = Any  # a node of the graph; torch types its arguments as the union of 16 types
aten, prims, brisk = torch.ops.aten, torch.ops.prims, torch.ops.brisk
MEASURED = ((9, 0),)  # compute capabilities on which cuDNN's kernels are known to be faster
MASK, WEIGHT_ALONE = 10, [False, True, False]  # argument of convolution_backward: the gradients that are wanted


class Norm(NamedTuple):
    """(x - mean) * scale + bias."""

    x: AnyNode
    mean: AnyNode
    scale: AnyNode
    bias: AnyNode


class FoldNorms(CustomGraphPass):
    """See the module.

    Args:
        has_kernel: whether there is one kernel for an operator with such arguments, whose tensors are fake.
    """

    def __init__(self, has_kernel: Callable[[Any, tuple[Any, ...]], bool] | None = None) -> None:
        self._has_kernel = has_kernel or has_one_kernel

    def uuid(self) -> Any:
        """What the result depends on beside the graph, so that torch can keep it.

        torch 2.11 keeps a compiled step whatever the precision of autocast is: that of bf16 would also serve fp16.
        """
        kernels = Path(__file__).parent / "kernels"
        files = [__file__, fused_ops.__file__, folded_ops.__file__, *map(str, sorted(kernels.glob("*.py")))]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        precision = [
            (torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))) for device in ("cpu", "cuda")
        ]
        has_sums = gpu is not None and sums_in_cudnn(torch.float16, gpu)
        return get_hash_for_files(tuple(files)), cudnn, has_sums, precision

    def __call__(self, graph: Graph) -> None:
        """Replace all patterns in place."""
        if any("recompute" in node.meta for node in graph.nodes):
            return  # gradient checkpointing says by node what is computed again
        for node in list(graph.nodes):
            if node.target == aten.where.self:
                self._fold_residual(graph, node)
        for node in list(graph.nodes):
            if node.target == brisk.batch_norm_backward_sums.default:
                self._fold_input_grad(graph, node)
            elif node.target == brisk.batch_norm_stats.default:
                self._fold_statistics(graph, node)
        graph.eliminate_dead_code()

    def _fold_statistics(self, graph: Graph, stats: AnyNode) -> None:
        """Of the result of a convolution."""
        conv = _source(stats.args[0])
        if not _calls(conv, aten.convolution.default) or conv.args[2] is not None or not _is_plain(*conv.args[3:]):
            return
        arguments = (*conv.args[:2], *conv.args[3:5])
        if not self._fits(brisk.convolution_sums.default, arguments):
            return
        with graph.inserting_before(conv):
            new = _Builder(graph, conv)
            y, total, squares = new.results(brisk.convolution_sums.default, arguments, 3)
            count = conv.meta["val"].numel() // conv.meta["val"].shape[1]
            mean = new(aten.div.Tensor, (total, count))
            square = new(aten.mul.Tensor, (mean, mean))
            var = new(aten.sub.Tensor, (new(aten.div.Tensor, (squares, count)), square))
            var = new(aten.clamp_min.default, (var, 0.0))
        conv.replace_all_uses_with(y)
        _replace_results(graph, stats, (mean, var))

    def _fold_input_grad(self, graph: Graph, sums: AnyNode) -> None:
        """Of a convolution that follows a batch norm with a ReLU."""
        gradient, *norm, activation = sums.args
        backward = _input_grad_of(gradient)
        if activation != "relu" or backward is None or not _is_masked_elsewhere(gradient, sums):
            return
        arguments = _arguments(backward, None, None, [Norm(*norm)])
        if not _are_alike(norm[0], gradient) or not self._fits(brisk.masked_input_grad.default, arguments):
            return
        with graph.inserting_before(backward):
            masked, *results = _Builder(graph, backward).results(brisk.masked_input_grad.default, arguments, 3)
        gradient.replace_all_uses_with(masked)
        _leave_weight_grad(graph, backward)
        _replace_results(graph, sums, results)

    def _fold_residual(self, graph: Graph, masked: AnyNode) -> None:
        """The end of a residual block."""
        condition, zero, added = masked.args
        z = _relu_of(condition)
        sums = [user for user in masked.users if _is_plain_sums(user, masked)]
        if z is None or not _is_zero(zero) or not _is_sum_of_two(added, masked) or len(sums) not in (1, 2):
            return
        norms = [Norm(*each.args[1:5]) for each in sums]
        if not all(_are_alike(each, masked) for each in (z, *(norm.x for norm in norms))):
            return
        backward, branch = self._convolution_of(z, added, norms)
        if backward is not None:
            target, arguments = (
                brisk.masked_input_grad.default,
                _arguments(backward, branch, _shortcut(z, norms), norms),
            )
        else:
            pairs = [each for norm in norms for each in (norm.x, norm.mean)]
            target, arguments = brisk.residual_grad.default, (*added.args, z, *pairs, *[None] * (4 - len(pairs)))
            if not self._fits(target, arguments):
                return
        with graph.inserting_before(masked):
            g, total, *dots = _Builder(graph, masked).results(target, arguments, 2 + len(norms))
        masked.replace_all_uses_with(g)
        for each, dot in zip(sums, dots, strict=True):
            _replace_results(graph, each, (total, dot))
        graph.erase_node(masked)
        graph.erase_node(added)
        if backward is not None:
            _leave_weight_grad(graph, backward)

    def _convolution_of(self, z: AnyNode, added: AnyNode, norms: list[Norm]) -> tuple[AnyNode | None, AnyNode | None]:
        """The backward pass of a convolution whose kernel can take the end of a block along; the other gradient."""
        if not _is_relu_of(z, norms):
            return None, None
        for gradient, branch in (added.args, added.args[::-1]):
            backward = _input_grad_of(gradient)
            if backward is None or gradient is branch or len(gradient.users) != 1 or list(backward.args[4]) != [1, 1]:
                continue
            arguments = _arguments(backward, branch, _shortcut(z, norms), norms)
            if self._fits(brisk.masked_input_grad.default, arguments):
                return backward, branch
        return None, None

    def _fits(self, target: Any, arguments: tuple[Any, ...]) -> bool:
        return self._has_kernel(target, map_arg(arguments, lambda node: node.meta["val"]))


def has_one_kernel(target: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether an operator is one kernel on the GPU of its arguments: cuDNN's, or for `residual_grad` Triton's."""
    first: Tensor = arguments[0]
    if target == brisk.residual_grad.default:
        return first.is_cuda and first.dtype in fused_ops.KERNEL_DTYPES
    if not first.is_cuda or first.dtype != torch.float16 or torch.are_deterministic_algorithms_enabled():
        return False
    if torch.cuda.get_device_capability(first.device) not in MEASURED:
        return False
    from utils.network.kernels.folded_convolutions import Convolution, input_grad_plan, sums_plan

    if target == brisk.convolution_sums.default:
        x, weight, stride, padding = arguments
        return sums_plan(x.get_device(), Convolution.of(x, weight, stride, padding)) is not None
    _, weight, stride, padding, branch, shortcut, x, _, _, _, x2, *_ = arguments
    conv, norms = Convolution.of(x, weight, stride, padding), 1 if x2 is None else 2
    return input_grad_plan(x.get_device(), conv, norms, shortcut is not None, branch is not None) is not None


def sums_in_cudnn(amp_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN has kernels of convolutions with batch norm's sums for a run's precision and device."""
    x, weight = (torch.empty(shape, dtype=amp_dtype, device=device) for shape in ((8, 64, 8, 8), (64, 64, 1, 1)))
    return has_one_kernel(brisk.convolution_sums.default, (x, weight, (1, 1), (0, 0)))


# Building.


class _Builder:
    """Nodes in a graph, at its insertion point, that take the place of one."""

    def __init__(self, graph: Graph, replaced: AnyNode) -> None:
        self._graph = graph
        kept = ("partitioner_tag", "seq_nr", "stack_trace", "nn_module_stack", "fwd_nn_module_stack")
        self._meta = {name: replaced.meta[name] for name in kept if name in replaced.meta}

    def __call__(self, target: Any, arguments: tuple[Any, ...]) -> AnyNode:
        node = self._graph.call_function(target, arguments)
        counters["brisk"][str(target)] += 1
        values = map_arg(arguments, lambda each: each.meta["val"])
        mode = detect_fake_mode([value for value in values if isinstance(value, Tensor)] or list(values[0]))
        assert mode is not None, "values of a traced graph are fake"
        with mode:
            node.meta |= self._meta | {"val": target(*values)}
        if isinstance(target, torch._ops.OpOverload):
            node.meta["eager_input_vals"] = (values, {})  # whose strides the compiler keeps
        return node

    def results(self, target: Any, arguments: tuple[Any, ...], number: int) -> list[AnyNode]:
        """The first results of an operator that has several."""
        node = self(target, arguments)
        return [self(operator.getitem, (node, at)) for at in range(number)]


def _arguments(
    backward: AnyNode, branch: AnyNode | None, shortcut: AnyNode | None, norms: list[Norm]
) -> tuple[Any, ...]:
    """Of `masked_input_grad`, in place of the input's gradient of a convolution."""
    convolution = (backward.args[0], backward.args[2], *backward.args[4:6])
    vectors = [each for norm in norms for each in norm]
    return (*convolution, branch, shortcut, *vectors, *[None] * (8 - len(vectors)))


def _replace_results(graph: Graph, node: AnyNode, new: Sequence[AnyNode]) -> None:
    """Give the users of the results of `node` others, and remove it."""
    for user in list(node.users):
        user.replace_all_uses_with(new[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _leave_weight_grad(graph: Graph, backward: AnyNode) -> None:
    """The gradient of a convolution's input is computed elsewhere."""
    for user in list(backward.users):
        if user.args[1] == 0:
            graph.erase_node(user)
    if backward.args[MASK][1]:
        with graph.inserting_before(backward):
            new = _Builder(graph, backward)(backward.target, (*backward.args[:MASK], WEIGHT_ALONE))
        backward.replace_all_uses_with(new)
    graph.erase_node(backward)


# Looking.


def _calls(node: Any, *targets: Any) -> bool:
    """Whether `node` is a node that calls one of `targets`, not a number."""
    return isinstance(node, Node) and node.target in targets


def _source(node: AnyNode) -> AnyNode:
    """`node`, or what it is another name of."""
    while _calls(node, aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def _is_plain(stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any, groups: Any) -> bool:
    """Of the arguments of a convolution: no dilation, transposition or groups."""
    return list(dilation) == [1, 1] and not transposed and groups == 1


def _input_grad_of(gradient: AnyNode) -> AnyNode | None:
    """The backward pass of a plain convolution whose input's gradient is `gradient`."""
    if not _calls(gradient, operator.getitem) or gradient.args[1] != 0:
        return None
    backward = gradient.args[0]
    if not _calls(backward, aten.convolution_backward.default) or not _is_plain(*backward.args[4:MASK]):
        return None
    return None if backward.args[MASK][2] else backward


def _is_masked_elsewhere(gradient: AnyNode, sums: AnyNode) -> bool:
    """Whether a gradient is used by `sums` and, where the ReLU lets it pass, by the rest of the same norm alone."""
    others = [user for user in gradient.users if user is not sums]
    if len(others) == 1 and _calls(others[0], prims.convert_element_type.default):
        others = list(others[0].users)
    if len(others) != 1 or not _calls(others[0], aten.where.self) or not _is_zero(others[0].args[2]):
        return False
    condition = others[0].args[0]
    is_positive = _calls(condition, aten.gt.Scalar) and condition.args[1] == 0
    return is_positive and _norm_of(condition.args[0]) == Norm(*sums.args[1:5])


def _norm_of(node: AnyNode) -> Norm | None:
    """The batch norm that `node` is the result of, rounded or not."""
    scaled, bias = _operands(_without_cast(node), aten.add.Tensor)
    centered, scale = _operands(scaled, aten.mul.Tensor)
    x, mean = _operands(centered, aten.sub.Tensor)
    norm = Norm(_without_cast(x), _vector_of(mean), _vector_of(scale), _vector_of(bias))
    return None if None in norm else norm


def _operands(node: AnyNode, target: Any) -> tuple[Any, Any]:
    is_plain = _calls(node, target) and len(node.args) == 2 and not node.kwargs
    return node.args if is_plain else (None, None)


def _without_cast(node: AnyNode) -> AnyNode:
    return node.args[0] if _calls(node, prims.convert_element_type.default) else node


def _vector_of(node: AnyNode) -> AnyNode | None:
    """(C,), of which `node` is (C, 1, 1)."""
    for axis in (2, 1):
        if not _calls(node, aten.unsqueeze.default) or node.args[1] != axis:
            return None
        node = node.args[0]
    return node


def _relu_of(condition: AnyNode) -> AnyNode | None:
    """The result of a ReLU of which `condition` says where it is 0."""
    if not _calls(condition, aten.le.Scalar) or condition.args[1] != 0:
        return None
    z = _source(condition.args[0])
    return z if _calls(z, aten.relu.default) else None


def _is_relu_of(z: AnyNode, norms: list[Norm]) -> bool:
    """Whether z is the ReLU of the sum of two: the norms, or one norm and something of the same shape and dtype."""
    operands = _operands(z.args[0], aten.add.Tensor)
    found = [norm for each in operands if (norm := _norm_of(each)) in norms]
    shortcut = _shortcut(z, norms)
    return sorted(map(str, found)) == sorted(map(str, norms)) and (shortcut is None or _are_alike(shortcut, z))


def _shortcut(z: AnyNode, norms: list[Norm]) -> AnyNode | None:
    """What one of `norms` is added to before the ReLU; None if that is the other of them."""
    others = [each for each in _operands(z.args[0], aten.add.Tensor) if _norm_of(each) not in norms]
    return others[0] if others else None


def _is_zero(node: AnyNode) -> bool:
    return _calls(node, aten.scalar_tensor.default, aten.full.default) and bool(node.args[-1] == 0)


def _is_plain_sums(user: AnyNode, gradient: AnyNode) -> bool:
    is_sums = _calls(user, brisk.batch_norm_backward_sums.default)
    return is_sums and user.args[0] is gradient and bool(user.args[5] == "identity")


def _is_sum_of_two(added: AnyNode, masked: AnyNode) -> bool:
    operands = _operands(added, aten.add.Tensor)
    return all(_are_alike(each, masked) for each in operands) and len(added.users) == 1


def _are_alike(a: AnyNode, b: AnyNode) -> bool:
    """Whether both are tensors of the same shape and dtype."""
    if not isinstance(a, Node):
        return False
    one, other = a.meta["val"], b.meta["val"]
    return isinstance(one, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
