"""Formulas for operators whose floating-point operations torch's own counter gets wrong or lacks.

It counts as 0 what runs as one operator and is no plain product: the CPU's fused attention, whole
recurrent layers, bilinear forms, quantised layers, products with a vector or in groups, distances.
Of a convolution in groups it counts the weights' gradient once too often for each group. A formula
is given shapes in the place of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import (
    conv_flop_count,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

#: Operators each of whose results is a product of a row of their first operand with a column.
_ROW_PRODUCTS = (
    *("aten.mv", "aten.dot", "aten.vdot", "aten._int_mm", "aten._weight_int8pack_mm"),
    *("aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu", "quantized.linear"),
    *("quantized.linear_relu", "quantized.linear_dynamic", "quantized.linear_relu_dynamic"),
    *(
        "quantized.linear_dynamic_fp16",
        "quantized.linear_relu_dynamic_fp16",
        "aten._cdist_forward",
        "aten._euclidean_dist",
    ),
)

#: Quantised layers whose second operand holds their weights.
_PACKED_CONVOLUTIONS = tuple(
    f"quantized.conv{dimensions}d{how}"
    for dimensions in (1, 2, 3)
    for how in ("", "_relu", "_dynamic")
)
_PACKED_TRANSPOSED = tuple(
    f"quantized.conv_transpose{dimensions}d{how}"
    for dimensions in (1, 2, 3)
    for how in ("", "_dynamic")
)
_PACKED_CELLS = tuple(
    f"quantized.quantized_{kind}_cell_dynamic" for kind in ("lstm", "gru", "rnn_relu", "rnn_tanh")
)

_LSTM_GATES, _GRU_GATES = 4, 3


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count two products, scores and values, as dense, whatever the mask."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return int(
        sdpa_backward_flop_count(grad_out, query, key, value)  # type: ignore[no-untyped-call]
    )


def _convolution_backward(
    grad_out: Any,
    inputs: Any,
    weight: Any,
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    output_mask: Any,
    **kwargs: Any,
) -> int:
    """Count the forward pass for each gradient wanted, by inputs and by weights."""
    forward = int(conv_flop_count(inputs, weight, grad_out, transposed=transposed))
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


def _rnn_layer(inputs: Any, weight_ih: Any, weight_hh: Any, *args: Any, **kwargs: Any) -> int:
    """Count each time step's products of input and hidden state with all gates' weights."""
    steps, batch = inputs[0], inputs[1]
    gates, features = weight_ih
    hidden = weight_hh[1]
    return int(2 * steps * batch * gates * (features + hidden))


def _rnn_layer_backward(inputs: Any, weight_ih: Any, weight_hh: Any, *args: Any, **kw: Any) -> int:
    """Count twice the forward pass: gradients by inputs and by weights."""
    return int(2 * _rnn_layer(inputs, weight_ih, weight_hh))


def _cudnn_rnn(inputs: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """Count a product with every matrix for each time step and sequence."""
    matrices = sum(math.prod(shape) for shape in weights if len(shape) > 1)
    return int(2 * math.prod(inputs[:-1]) * matrices)


def _cudnn_rnn_backward(inputs: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * _cudnn_rnn(inputs, weights)


def _row_products(rows: Any, *operands: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count one product of a row for each result."""
    return int(2 * math.prod(out_shape) * int(rows[-1]))


def _row_products_added(_added: Any, rows: Any, vector: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(rows))


def _products_added(_added: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(left) * int(right[-1]))


def _products_in_groups(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Count the products of an expert each: where rows, columns or sums are divided, once."""
    stacked = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * stacked * left[-2] * left[-1] * right[-1])


def _distances_backward(grad: Any, points: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(grad) * int(points[-1]))


def _packed_convolution(
    inputs: Any, packed: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Count a product with each filter for each of its results."""
    return int(2 * math.prod(out_shape) * math.prod(packed.unpack()[0].shape[1:]))


def _packed_transposed(inputs: Any, packed: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * math.prod(inputs) * math.prod(packed.unpack()[0].shape[1:]))


def _packed_cell(
    inputs: Any, _state: Any, of_input: Any, of_state: Any, *args: Any, **kw: Any
) -> int:
    """Count the products of input and hidden state with all gates' weights."""
    weights = sum(math.prod(each.unpack()[0].shape) for each in (of_input, of_state))
    return int(2 * math.prod(inputs[:-1]) * weights)


def _packed_layers(gates: int) -> Callable[..., int]:
    """Return the formula of whole quantised recurrent layers, with sequences packed or not."""

    def formula(inputs: Any, *args: Any, **kwargs: Any) -> int:
        state, _, _, layers, _, _, both_ways, *_ = args[1:] if len(args[0]) == 1 else args
        hidden = (state[0] if gates == _LSTM_GATES else state)[-1]
        ways = 2 if both_ways else 1
        wide = (layers - 1) * ways * hidden
        of_a_step = gates * hidden * (inputs[-1] + wide + layers * hidden)
        return int(2 * ways * math.prod(inputs[:-1]) * of_a_step)

    return formula


def _trilinear(
    one: Any,
    two: Any,
    three: Any,
    expand_one: Any,
    expand_two: Any,
    expand_three: Any,
    summed: Any,
    unrolled: int = 1,
    **kwargs: Any,
) -> int:
    """Count two products, of the first two factors and of the result with the third.

    Each is one where it sums over a dimension; the unrolled dimension is summed one by one.
    """
    given = ((one, expand_one), (two, expand_two), (three, expand_three))
    first, second, third = (_expanded(shape, axes) for shape, axes in given)
    summed = set(summed) - {unrolled}
    inner = summed & set(expand_three)
    both = [max(pair) for pair in zip(first, second, strict=True)]
    left = [1 if axis in inner else size for axis, size in enumerate(both)]
    products = [both] if inner else []
    products += [[max(pair) for pair in zip(left, third, strict=True)]] if summed - inner else []
    return 2 * sum(math.prod(sizes) for sizes in products)


def _expanded(shape: Any, axes: Any) -> list[int]:
    """Return a shape with a dimension of one put in at each of `axes`."""
    sizes = [int(size) for size in shape]
    for axis in sorted(axes):
        sizes.insert(axis, 1)
    return sizes


def formulas() -> dict[Any, Any]:
    """Return formulas for the operators that torch's counter gets wrong, where they exist."""
    wanted = {
        "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "aten.convolution_backward": _convolution_backward,
        "aten.mkldnn_rnn_layer": _rnn_layer,
        "aten.mkldnn_rnn_layer_backward": _rnn_layer_backward,
        "aten._cudnn_rnn": _cudnn_rnn,
        "aten._cudnn_rnn_backward": _cudnn_rnn_backward,
        "aten.miopen_rnn": _cudnn_rnn,
        "aten.miopen_rnn_backward": _cudnn_rnn_backward,
        "aten._trilinear": _trilinear,
        "aten.addmv": _row_products_added,
        "aten.addbmm": _products_added,
        "aten._sparse_addmm": _products_added,
        "aten._grouped_mm": _products_in_groups,
        "aten._scaled_grouped_mm": _products_in_groups,
        "aten._cdist_backward": _distances_backward,
        "aten.quantized_lstm": _packed_layers(_LSTM_GATES),
        "aten.quantized_gru": _packed_layers(_GRU_GATES),
        **dict.fromkeys(_ROW_PRODUCTS, _row_products),
        **dict.fromkeys(_PACKED_CONVOLUTIONS, _packed_convolution),
        **dict.fromkeys(_PACKED_TRANSPOSED, _packed_transposed),
        **dict.fromkeys(_PACKED_CELLS, _packed_cell),
    }
    found = {}
    for path, formula in wanted.items():
        space, _, name = path.partition(".")
        operators = getattr(torch.ops, space)
        if hasattr(operators, name):
            found[getattr(operators, name)] = formula
    return found
