"""Counts a step's floating-point operations, with formulas where torch's own are wrong or missing.

torch.utils.flop_counter knows matrix products, convolutions and CUDA's attention kernels. It counts
as 0 what else runs as one operator: the CPU's fused attention, whole recurrent layers, bilinear
forms, quantised layers, products with a vector. Of a convolution in groups it counts the weights'
gradient once too often for each group, of a sparse matrix all its zeros, and complex numbers as
real ones. A multiply-add is two operations, of complex numbers eight. Each is counted once: for the
module whose own code ran it.
"""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    conv_flop_count,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

#: Whose operations no module does itself; no module has such a path.
OUTSIDE = "."

#: FlopCounterMode's own name of its total.
_TOTAL = "Global"

#: How many products of real numbers make a complex one.
_REAL_PRODUCTS = 4

#: Operators each of whose results is a product of a row of their first operand with a column.
_ROW_PRODUCTS = (
    *("aten.mv", "aten.dot", "aten.vdot", "aten._int_mm", "aten._weight_int8pack_mm"),
    *("aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu", "quantized.linear"),
    *("quantized.linear_relu", "quantized.linear_dynamic", "quantized.linear_relu_dynamic"),
    *("quantized.linear_dynamic_fp16", "quantized.linear_relu_dynamic_fp16"),
)

#: The number of a backward pass where none runs.
_NO_BACKWARD = -1


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
        **dict.fromkeys(_ROW_PRODUCTS, _row_products),
    }
    found = {}
    for path, formula in wanted.items():
        space, _, name = path.partition(".")
        operators = getattr(torch.ops, space)
        if hasattr(operators, name):
            found[getattr(operators, name)] = formula
    return found


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    """Let a formula of shapes count what the tensors say: complex numbers, what is not stored."""

    @functools.wraps(formula)
    def counted(*args: Any, **kwargs: Any) -> int:
        operations = formula(*args, **kwargs)
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        for each in tensors:
            if each.is_sparse or each.is_sparse_csr:
                operations = operations * each._nnz() // max(1, each.numel())
        return operations * (_REAL_PRODUCTS if any(map(torch.is_complex, tensors)) else 1)

    return counted


#: A module and the checkpoint, if any, in which it made nodes.
_Maker = tuple[nn.Module | None, Any]


class _Owners(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whose own code runs now: the innermost module of a model, in both passes.

    Each operator of the backward pass belongs to the node of the graph that runs it, and nodes are
    numbered as they are made: the module whose code made a node owns its number. No tensor gets a
    hook, so gradients by a pass's own inputs and torch.func are followed as well.

    Each thread numbers its own nodes. Accelerators' backward passes run in threads of their own:
    what they make (a checkpoint's forward pass, run again) is theirs, all else the caller's.

    What a checkpoint runs again outside of any module is the code of who called the checkpoint: its
    hooks on saved tensors tell where one began.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(root.modules())
        self._running: list[tuple[nn.Module, int]] = []
        self._made: dict[int, _Made] = {}
        self._caller = 0
        self._checkpoints: dict[Any, nn.Module | None] = {}
        self._hooks: list[Any] = []

    @property
    def parents(self) -> set[Any]:
        """Return what an operation counts for, as FlopCounterMode asks: the total and its owner."""
        owner = self._owner()
        return {_TOTAL} if owner is None else {_TOTAL, owner}

    def __enter__(self) -> Any:
        self._caller = threading.get_ident()
        self._made = {self._caller: _Made(_next_number())}
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note()
        return func(*args, **(kwargs or {}))

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._note()
        if module in self._known:  # the code of others is their caller's own
            self._running.append((module, torch._C._current_graph_task_id()))

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._note()
        if any(module is running for running, _ in self._running):
            while self._running.pop()[0] is not module:
                pass  # a module that an exception left

    def _note(self) -> None:
        """Give the nodes made since the last note to the module whose code has run since."""
        number, thread = _next_number(), threading.get_ident()
        made = self._made.setdefault(thread, _Made(number))
        checkpoint = _checkpoint()
        if number > made.ends[-1] or (checkpoint and checkpoint not in self._checkpoints):
            owner = self._owner()
            self._checkpoints.setdefault(checkpoint, owner)
            made.ends.append(number)
            made.makers.append((owner, checkpoint))

    def _owner(self) -> nn.Module | None:
        """Return the module whose own code runs; None outside of the model."""
        innermost, began = self._running[-1] if self._running else (None, _NO_BACKWARD)
        node = torch._C._current_autograd_node()
        if node is None or (innermost and began == torch._C._current_graph_task_id()):
            return innermost  # in a backward pass: a checkpoint's forward pass, run again
        callers = self._made[self._caller]
        own = self._made.get(threading.get_ident(), callers)
        number = node._sequence_nr()
        maker, checkpoint = (own if own.holds(number) else callers).maker(number)
        runs_again = checkpoint and _checkpoint() not in (None, checkpoint)
        return self._checkpoints[checkpoint] if runs_again else maker


class _Made:
    """Who made the nodes of one thread's graph, by their numbers from `first` on."""

    def __init__(self, first: int) -> None:
        self.ends: list[int] = [first]
        self.makers: list[_Maker] = [(None, None)]  # of what was there before

    def holds(self, number: int) -> bool:
        """Return whether this thread may have made the node while it was watched."""
        return self.ends[0] <= number < self.ends[-1]

    def maker(self, number: int) -> _Maker:
        """Return whose code made the node, and in which checkpoint; None for what was before."""
        at = bisect.bisect_right(self.ends, number)
        return self.makers[at] if at < len(self.makers) else (None, None)


def _checkpoint() -> Any:
    """Return the hook by which a checkpoint that runs now saves tensors; None where none runs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ours = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return hooks[0] if ours else None


def _next_number() -> int:
    """Return the number that the next node of this thread's graph gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def count(root: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Return the operations of each module's own code in what `run` does, by module path.

    Those of its children are not among them. What no module of `root` does itself, such as a loss's
    products, is under `OUTSIDE`: the parts sum to torch's total.
    """
    mode = _counter()
    mode.mod_tracker = _Owners(root)  # type: ignore[assignment]
    with mode:
        run()
    counted = {owner: sum(parts.values()) for owner, parts in mode.get_flop_counts().items()}
    total = counted.pop(_TOTAL, 0)
    own = {path: counted.get(module, 0) for path, module in root.named_modules()}
    return {**own, OUTSIDE: total - sum(own.values())}


class _NoOwners:
    """Tells no modules apart. ModuleTracker puts hooks on tensors, which breaks some code."""

    parents = frozenset({_TOTAL})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def total(run: Callable[[], object]) -> int:
    """Return the operations of what `run` does, whoever does them."""
    mode = _counter()
    mode.mod_tracker = _NoOwners()  # type: ignore[assignment]
    with mode:
        run()
    return int(mode.get_total_flops())


def registry() -> dict[Any, Any]:
    """Return the formulas by operator: torch's own, and those that torch lacks."""
    return dict(_counter().flop_registry)


def _counter() -> FlopCounterMode:
    mode = FlopCounterMode(display=False, custom_mapping=formulas())
    mode.flop_registry = {key: _of_tensors(each) for key, each in mode.flop_registry.items()}
    return mode
