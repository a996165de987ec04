"""Measures how large the numbers of a step are, as its operators return them.

What belongs to the backward pass is told by two loss scales (see
`autoprec.backends.shared.gradient_exponents`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoprec.backends.shared.gradient_exponents import (
    SCALE_FACTOR,
    largest_exponent,
    least_float16_exponent,
    weighted_shares,
)
from autoprec.backends.torch.apply.float32_islands import has_own_code
from autoprec.backends.torch.train.model_state import Snapshot, stored_values
from autoprec.core.numerics.traces import UnitTrace

_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return uninitialised memory: what stands in it is no result."""


class TracedModel(Protocol):
    """What is read: a model and its loss, whose state is put back afterwards."""

    model: nn.Module

    def forward_loss(self, batch: Any, seed: int) -> torch.Tensor:
        """Compute the loss of one batch, with random numbers drawn from `seed`."""

    def take_state(self) -> Snapshot:
        """Copy the state."""

    def put_back(self, state: Snapshot) -> None:
        """Load a copied state."""


class LargestMagnitudes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest magnitude of every tensor of `dtype` that an operator returns."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in _UNINITIALISED:
            return result
        for leaf in tree_leaves(result):
            known = isinstance(leaf, torch.Tensor) and leaf.dtype is self._dtype
            # Derivatives in forward mode have zeros without memory, over which torch crashes.
            if known and leaf.numel() and not (leaf.is_meta or leaf._is_zerotensor()):
                self.found.append(leaf.detach().abs().amax().float())
        return result

    def values(self) -> list[float]:
        """Return the magnitudes in the order of the operators."""
        return torch.stack(self.found).tolist() if self.found else []

    def summary(self) -> tuple[float | None, bool]:
        """Return the largest magnitude (None: not finite, or none), and whether any overflowed."""
        values = self.values()
        if not all(math.isfinite(value) for value in values):
            return None, True
        return max(values, default=None), False


def backward_magnitudes(
    trainee: TracedModel, batch: Any, seed: int
) -> tuple[list[float], dict[int, float]]:
    """Return the largest magnitude of each backward tensor, and the gradients' exponents.

    The model's state is put back.
    """
    state = trainee.take_state()
    once = _read(trainee, batch, seed, 1.0)
    grads = [p.grad for p in trainee.model.parameters() if p.grad is not None]
    shares = weighted_shares((_norm(grad), _exponent_counts(grad)) for grad in grads)
    trainee.put_back(state)
    more = _read(trainee, batch, seed, SCALE_FACTOR)
    trainee.put_back(state)
    trainee.model.zero_grad(set_to_none=True)
    found = [
        low
        for low, high in zip(once, more, strict=False)
        if not math.isfinite(low) or (low > 0 and high == low * SCALE_FACTOR)
    ]
    return found, shares


def _read(trainee: TracedModel, batch: Any, seed: int, factor: float) -> list[float]:
    trainee.model.zero_grad(set_to_none=True)
    loss = trainee.forward_loss(batch, seed)
    mode = LargestMagnitudes()
    with mode:
        (loss * factor).backward()  # type: ignore[no-untyped-call]
    return mode.values()


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_on_host(gradient)))


def _exponent_counts(gradient: torch.Tensor) -> dict[int, int]:
    values, counts = torch.unique(_exponents(gradient), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _exponents(tensor: torch.Tensor) -> torch.Tensor:
    """Return floor(log2 |x|) of every finite, non-zero element."""
    flat = _on_host(tensor).abs().flatten()
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    return torch.frexp(flat).exponent - 1


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the elements to the CPU in float64, which MPS and Arc lack; MPS lacks frexp, too."""
    return stored_values(tensor.detach()).cpu().double()


def unit_magnitudes(
    trainee: TracedModel, batch: Any, seed: int, scale: float
) -> tuple[UnitTrace, ...]:
    """Measure each unit's largest exponents, and the share of its gradient lost at `scale`."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    handles = []
    for path, module in trainee.model.named_modules():
        handles.append(module.register_forward_hook(_record_magnitudes(forward, path)))
    try:
        trainee.model.zero_grad(set_to_none=True)
        outputs: dict[str, list[torch.Tensor]] = {}
        handles += [
            module.register_forward_hook(_retain_gradients(outputs, path))
            for path, module in trainee.model.named_modules()
        ]
        trainee.forward_loss(batch, seed).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    for path, tensors in outputs.items():
        for tensor in tensors:
            if tensor.grad is not None:
                backward[path] = max(backward.get(path, 0.0), _magnitude(tensor.grad))
    traces = tuple(
        UnitTrace(
            path,
            largest_exponent([forward[path]]),
            largest_exponent([backward.get(path, 0.0)]),
            _underflow(module, scale),
        )
        for path, module in trainee.model.named_modules()
        if path in forward and has_own_code(module)
    )
    trainee.model.zero_grad(set_to_none=True)
    return traces


def _record_magnitudes(into: dict[str, float], path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                into[path] = max(into.get(path, 0.0), _magnitude(leaf))

    return hook


def _retain_gradients(into: dict[str, list[torch.Tensor]], path: str) -> Callable[..., None]:
    """Make a hook that keeps the gradient of a module's outputs, where they have one."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.retain_grad()
                into.setdefault(path, []).append(leaf)

    return hook


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().amax())


def _underflow(module: nn.Module, scale: float) -> float:
    """Return the share of a module's own non-zero gradient that underflows float16 at `scale`."""
    found = [_exponents(p.grad) for p in module.parameters(recurse=False) if p.grad is not None]
    exponents = torch.cat(found) if found else torch.zeros(0, device="cpu")
    if exponents.numel() == 0:
        return 0.0
    return float((exponents < least_float16_exponent(scale)).float().mean())
