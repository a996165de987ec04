"""What a training step costs: the kernels it runs, and the bytes it keeps for the gradient.

Both are read from the traced step's graph, so loops and unknown shapes count for what is known.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from autoprec.backends.keras.measure.step_graph import StepGraph, is_backward, product_flops
from autoprec.backends.shared.kernel_counts import KernelCounts
from autoprec.core.measurement import Kernel

#: What computes nothing: constants, variables' handles, names, shapes, and views of what is there.
_NO_WORK = frozenset(
    {
        *("Const", "Placeholder", "Identity", "NoOp", "ReadVariableOp", "VarHandleOp", "Assert"),
        *("Shape", "ShapeN", "Reshape", "Squeeze", "ExpandDims", "BroadcastGradientArgs"),
        *("StopGradient", "PreventGradient"),
    }
)


def kernels(
    step: StepGraph, weights: Collection[tuple[int, ...]], samples: int
) -> tuple[Kernel, ...]:
    """List what one forward and backward pass runs; `weights` are the weights' shapes.

    What is read from a variable is a weight, and what is shaped as one is its gradient, where no
    size of it is the batch's.
    """
    counts = KernelCounts(weights, samples)
    for operation in step.operations:
        if operation.type in _NO_WORK:
            continue
        growing = fixed = 0
        for tensor in (*operation.inputs, *operation.outputs):
            size = _bytes(tensor)
            read = _origin(tensor).op.type == "ReadVariableOp"
            if size and (read or counts.is_gradient_shape(tensor.shape.as_list())):
                fixed += size
            else:
                growing += size
        counts.add(product_flops(operation), growing, fixed)
    return counts.kernels()


def saved_bytes(step: StepGraph) -> int:
    """Count the bytes that the backward pass reads of the forward pass; weights are not among them.

    A reshaped tensor is the one it was made of.
    """
    kept: dict[str, int] = {}
    for operation in step.operations:
        if not is_backward(operation.name) or operation.type in _NO_WORK:
            continue
        for tensor in map(_origin, operation.inputs):
            if not is_backward(tensor.op.name) and tensor.op.type not in _NO_WORK:
                kept[tensor.name] = _bytes(tensor)
    return sum(kept.values())


def _origin(tensor: Any) -> Any:
    """Return the tensor that was computed, of which `tensor` may be another view."""
    while tensor.op.type in ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"):
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensor: Any) -> int:
    shape = tensor.shape
    if not shape.is_fully_defined() or tensor.dtype in (tf.resource, tf.variant):
        return 0
    return int(math.prod(shape.as_list()) * tensor.dtype.size)
