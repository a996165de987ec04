"""Reads a training step's TensorFlow graph: which layer an operation is of, and what it costs.

Every layer's call is watched while the step is traced, and gives its operations a name scope;
TensorFlow puts the gradient of an operation under `gradient_tape/` and the same scope. So every
operation, forward and backward, built-in or the user's own, has a layer. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.train.task_runner import loss_and_gradients

_GRADIENT = "gradient_tape/"

#: A multiply-add is two operations, as TensorFlow's profiler counts.
_MULTIPLY_ADD = 2

#: How many products of real numbers make a complex one.
_REAL_PRODUCTS = 4


@dataclass(frozen=True)
class LayerCall:
    """One call of one unit: the scope of its operations, and the shapes that went in and out."""

    unit: LayerUnit
    scope: str
    inputs: tuple[tuple[int | None, ...], ...]
    outputs: tuple[Any, ...] = field(compare=False, default=())


@dataclass
class StepGraph:
    """A traced training step: its operations and the calls they came from."""

    operations: Sequence[Any]
    calls: list[LayerCall]

    def unit_of(self, name: str) -> str | None:
        """Return the path of the unit that the operation `name` is of; None outside every unit."""
        scope = scope_of(name)
        while scope:
            if scope in self._by_scope:
                return self._by_scope[scope]
            scope = scope.rpartition("/")[0]
        return None

    def __post_init__(self) -> None:
        self._by_scope = {call.scope: call.unit.path for call in self.calls}


def scope_of(name: str) -> str:
    """Return the forward scope of an operation's name, without its gradients' prefixes."""
    at = name.rfind(_GRADIENT)
    return name[at + len(_GRADIENT) :] if at >= 0 else name


def is_backward(name: str) -> bool:
    """Say whether an operation belongs to a gradient."""
    return _GRADIENT in name


class _CallRecorder(Hook):
    """A layer's `call` that notes its scope and shapes while a graph is traced."""

    def __init__(self, unit: LayerUnit, calls: list[LayerCall]) -> None:
        super().__init__(unit.layer.call)
        self.unit, self.calls = unit, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        # A scope of this call's own: a layer called by its `call`, or again for a gradient that
        # recomputes it, has none, or the one of the layer around it.
        with tf.name_scope("call"):
            scope = tf.compat.v1.get_default_graph().get_name_scope()
            result = self.original(*args, **kwargs)
        shapes = tuple(tuple(t.shape) for t in _tensors((args, kwargs)))
        self.calls.append(LayerCall(self.unit, scope, shapes, tuple(_tensors(result))))
        return result


def _tensors(value: Any) -> list[Any]:
    leaves = keras.tree.flatten(value)
    return [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]


@contextmanager
def calls_recorded(units: Sequence[LayerUnit], calls: list[LayerCall]) -> Iterator[None]:
    """Record every unit's calls in `calls` while the block traces."""
    hooks = InstalledHooks()
    for unit in units:
        hooks.install(unit.layer, "call", _CallRecorder(unit, calls))
    try:
        yield
    finally:
        hooks.restore()


@contextmanager
def unrolled(units: Sequence[LayerUnit]) -> Iterator[None]:
    """Trace recurrent layers step by step, so that the inside of their loops can be seen."""
    hooks = InstalledHooks()
    for unit in units:
        if isinstance(unit.layer, keras.layers.RNN) and not unit.layer.unroll:
            hooks.install(unit.layer, "call", _UnrolledCall(unit.layer))
    try:
        yield
    finally:
        hooks.restore()


class _UnrolledCall(Hook):
    """A recurrent layer's `call`, unrolled where the number of steps is known."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.call)
        self.layer = layer

    def __call__(self, sequences: Any, *args: Any, **kwargs: Any) -> Any:
        self.layer.unroll = sequences.shape[1] is not None
        try:
            return self.original(sequences, *args, **kwargs)
        finally:
            self.layer.unroll = False


def trace_step(model: Any, units: Sequence[LayerUnit], batch: Any) -> StepGraph:
    """Trace `loss_and_gradients` on batches like `batch`."""
    import tensorflow as tf

    calls: list[LayerCall] = []
    with calls_recorded(units, calls):
        traced = tf.function(lambda given: loss_and_gradients(model, given), autograph=False)
        graph = traced.get_concrete_function(batch).graph
    return StepGraph(graph.get_operations(), calls)


def flops_by_unit(step: StepGraph) -> dict[str, int]:
    """Count floating-point operations of products and convolutions, forward and backward.

    Outside every unit (the loss, a model's own train_step) the path is "". What runs inside loops
    is counted by the recurrent layers' formula, three times the forward pass.
    """
    loops = [
        call
        for call in step.calls
        if isinstance(call.unit.layer, keras.layers.RNN) and not call.unit.layer.unroll
    ]
    inside = {call.unit.path for call in loops}
    totals: dict[str, int] = {}
    for operation in step.operations:
        count = product_flops(operation)
        path = step.unit_of(operation.name) or "" if count else ""
        if count and path not in inside:  # next to the loop is a first step that never runs
            totals[path] = totals.get(path, 0) + count
    for call in loops:
        totals[call.unit.path] = totals.get(call.unit.path, 0) + _recurrent(call)
    return totals


def _recurrent(call: LayerCall) -> int:
    """Count three products with every matrix per time step: one forward, two backward.

    A convolution's kernel is one at every place of the output.
    """
    batch, time = call.inputs[0][0] or 1, call.inputs[0][1] or 1
    matrices = (
        w for w in call.unit.layer.trainable_weights if len(w.shape) > 1 and "bias" not in w.name
    )
    once = sum(int(math.prod(w.shape)) * _places(call, len(w.shape) - 2) for w in matrices)
    return 3 * _MULTIPLY_ADD * batch * time * once


def _places(call: LayerCall, rank: int) -> int:
    """Return at how many places of a layer's output a kernel of so many dimensions is applied."""
    shape = call.outputs[0].shape
    first = getattr(call.unit.layer, "data_format", "") == "channels_first"
    return math.prod(shape[len(shape) - rank :] if first else shape[len(shape) - 1 - rank : -1])


def product_flops(operation: Any) -> int:
    """Count the operations of one product, two per multiply-add; 0 for anything else.

    A multiply-add of complex numbers is four of real ones.
    """
    count = _COUNTERS.get(operation.type)
    if count is None:
        return 0
    real = _REAL_PRODUCTS if operation.outputs[0].dtype.is_complex else 1
    try:
        return _MULTIPLY_ADD * real * count(operation)
    except (TypeError, ValueError):
        return 0  # a shape that is only known when the step runs


def _size(tensor: Any) -> int:
    return int(math.prod(tensor.shape.as_list()))


def _matmul(operation: Any) -> int:
    flag = "transpose_a" if operation.type == "MatMul" else "adj_x"
    rows = operation.inputs[0].shape.as_list()
    inner = rows[-2] if operation.get_attr(flag) else rows[-1]
    return int(_size(operation.outputs[0]) * int(inner))


def _sparse_matmul(operation: Any) -> int:
    """Count what the sparse matrix holds, once for each column of the result."""
    stored = operation.inputs[1].shape.as_list()[0]
    return int(stored) * int(operation.outputs[0].shape.as_list()[-1])


def _einsum(operation: Any) -> int:
    """Multiply the lengths of all indices; an ellipsis counts for what it stands for."""
    left = operation.get_attr("equation").decode().partition("->")[0]
    lengths: dict[str, int] = {}
    rest = 1
    for labels, tensor in zip(left.split(","), operation.inputs, strict=True):
        shape = tensor.shape.as_list()
        head, dots, tail = labels.partition("...")
        lengths.update(zip(head, shape, strict=False))
        if dots:
            lengths.update(zip(tail, shape[len(shape) - len(tail) :], strict=True))
            rest = max(rest, math.prod(shape[len(head) : len(shape) - len(tail)]))
    return int(math.prod(lengths.values()) * rest) if len(operation.inputs) > 1 else 0


def _convolution(operation: Any) -> int:
    """Count one filter per output element: all of the kernel but its last dimension."""
    kernel = operation.inputs[1].shape.as_list()
    return int(_size(operation.outputs[0]) * math.prod(kernel[:-1]))


def _depthwise(operation: Any) -> int:
    kernel = operation.inputs[1].shape.as_list()
    return int(_size(operation.outputs[0]) * math.prod(kernel[:2]))


def _by_input(operation: Any) -> int:
    """Count a convolution's gradient by its input, or a transposed one: the same as forward."""
    kernel = operation.inputs[1].shape.as_list()
    return int(_size(operation.inputs[2]) * math.prod(kernel[:-1]))


def _by_filter(operation: Any) -> int:
    kernel = operation.outputs[0].shape.as_list()
    return int(_size(operation.inputs[2]) * math.prod(kernel[:-1]))


def _depthwise_by_input(operation: Any) -> int:
    kernel = operation.inputs[1].shape.as_list()
    return int(_size(operation.inputs[2]) * math.prod(kernel[:2]))


def _depthwise_by_filter(operation: Any) -> int:
    kernel = operation.outputs[0].shape.as_list()
    return int(_size(operation.inputs[2]) * math.prod(kernel[:2]))


_COUNTERS: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "SparseTensorDenseMatMul": _sparse_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise,
    "Conv2DBackpropInput": _by_input,
    "Conv3DBackpropInputV2": _by_input,
    "Conv2DBackpropFilter": _by_filter,
    "Conv3DBackpropFilterV2": _by_filter,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_by_input,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_by_filter,
}
