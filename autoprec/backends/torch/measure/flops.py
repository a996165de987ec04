"""Counts a step's floating-point operations, with formulas where torch counts nothing.

torch.utils.flop_counter knows matrix products, convolutions and CUDA's attention kernels. On the
CPU, fused attention and the LSTM run as single operators that it counts as 0; their formulas are
here. A multiply-add is two operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count two products, scores and values, as dense, whatever the mask."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return int(
        sdpa_backward_flop_count(grad_out, query, key, value)  # type: ignore[no-untyped-call]
    )


def _rnn_layer(inputs: Any, weight_ih: Any, weight_hh: Any, *args: Any, **kwargs: Any) -> int:
    """Count each time step's products of input and hidden state with all gates' weights."""
    steps, batch = inputs[0], inputs[1]
    gates, features = weight_ih
    hidden = weight_hh[1]
    return int(2 * steps * batch * gates * (features + hidden))


def _rnn_layer_backward(inputs: Any, weight_ih: Any, weight_hh: Any, *args: Any, **kw: Any) -> int:
    """Count twice the forward pass: gradients by inputs and by weights."""
    return 2 * _rnn_layer(inputs, weight_ih, weight_hh)


def formulas() -> dict[Any, Any]:
    """Return formulas for the operators that torch's counter does not know, where they exist."""
    aten = torch.ops.aten
    wanted = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "mkldnn_rnn_layer": _rnn_layer,
        "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    }
    return {getattr(aten, name): f for name, f in wanted.items() if hasattr(aten, name)}


class _OneModule(ModuleTracker):
    """Tells no modules apart: the real one's hooks break gradients by a pass's own inputs."""

    def __enter__(self) -> _OneModule:
        return self

    def __exit__(self, *args: object) -> None:
        return None


def counter(*, by_module: bool = True) -> FlopCounterMode:
    """Make a flop counter that knows what CPUs fuse; in total, or module by module."""
    mode = FlopCounterMode(display=False, custom_mapping=formulas())
    if not by_module:
        mode.mod_tracker = _OneModule()
    return mode


def by_module(mode: FlopCounterMode, root: torch.nn.Module) -> dict[str, int]:
    """Return the operations of each module's own code, without its children's, by module path."""
    prefix = type(root).__name__
    totals: dict[str, int] = {}
    for name, counts in mode.get_flop_counts().items():
        if name == prefix:
            totals[""] = sum(counts.values())
        elif name.startswith(prefix + "."):
            totals[name[len(prefix) + 1 :]] = sum(counts.values())
    own = {}
    for path, _ in root.named_modules():
        children = (
            f"{path}.{n}" if path else n for n, _ in root.get_submodule(path).named_children()
        )
        own[path] = max(0, totals.get(path, 0) - sum(totals.get(child, 0) for child in children))
    return own
