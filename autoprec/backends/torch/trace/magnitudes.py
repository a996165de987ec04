"""Measures how large the numbers of a backward pass are, without float16 hardware.

A tensor that is bfloat16 in the backward pass under bfloat16 autocast would be float16 under
float16 autocast, and bfloat16 has float32's range: its largest magnitude says which loss scale
float16 bears. Every tensor is read at loss times 1 and times 64; those that grew by exactly 64
belong to the gradient, while saved activations and weights that pass through did not grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoprec.backends.torch.trace.model_state import Snapshot, restore_snapshot, stored_values
from autoprec.backends.torch.trace.recipe_model import Trainee
from autoprec.backends.torch.train.units import has_own_code
from autoprec.core.dtypes import DType
from autoprec.core.numerics.records import ExponentHistogram, UnitTrace

_SECOND_LOSS_FACTOR = 64.0


_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return uninitialised memory: what stands in it is no result."""


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
            if isinstance(leaf, torch.Tensor) and leaf.dtype is self._dtype and leaf.numel():
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


class ExponentCounter:
    """Counts the exponents of backward passes over several batches."""

    def __init__(self) -> None:
        self._largest: list[float] = []
        self._counts: dict[int, float] = {}
        self._batches = 0
        self._finite = True

    def add(self, trainee: Trainee, batch: Any, seed: int, state: Snapshot) -> None:
        """Read the backward pass of one batch; the model's state is put back."""
        once = self._read(trainee, batch, seed, 1.0)
        grads = [p.grad for p in trainee.model.parameters()]
        shares = _shares([grad for grad in grads if grad is not None])
        restore_snapshot(trainee.model, state)
        more = self._read(trainee, batch, seed, _SECOND_LOSS_FACTOR)
        restore_snapshot(trainee.model, state)
        trainee.model.zero_grad(set_to_none=True)
        self._batches += 1
        for low, high in zip(once, more, strict=False):
            if not math.isfinite(low):
                self._finite = False
            elif low > 0 and high == low * _SECOND_LOSS_FACTOR:
                self._largest.append(low)
        for exponent, share in shares.items():
            self._counts[exponent] = self._counts.get(exponent, 0.0) + share

    @staticmethod
    def _read(trainee: Trainee, batch: Any, seed: int, factor: float) -> list[float]:
        trainee.model.zero_grad(set_to_none=True)
        loss = trainee.loss(batch, seed)
        mode = LargestMagnitudes()
        with mode:
            (loss * factor).backward()  # type: ignore[no-untyped-call]
        return mode.values()

    def histogram(self) -> ExponentHistogram:
        """Return the histogram gathered so far; shares sum to one."""
        total = sum(self._counts.values()) or 1.0
        return ExponentHistogram(
            largest=max((_exponent(value) for value in self._largest), default=None),
            smallest=min(self._counts, default=None),
            counts={str(e): share / total for e, share in sorted(self._counts.items())},
            batches=self._batches,
            finite=self._finite,
        )


def _exponent(value: float) -> int:
    """Return floor(log2 value) of a positive number."""
    return math.frexp(value)[1] - 1


def _exponents(tensor: torch.Tensor) -> torch.Tensor:
    """Return floor(log2 |x|) of every finite, non-zero element."""
    flat = _on_host(tensor).abs().flatten()
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    return torch.frexp(flat).exponent - 1


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the elements to the CPU in float64, which MPS and Arc lack; MPS lacks frexp, too."""
    return stored_values(tensor.detach()).cpu().double()


def _shares(gradients: Sequence[torch.Tensor]) -> dict[int, float]:
    """Count the exponents of all gradients, each gradient weighted by its share of the norm."""
    norms = [float(torch.linalg.vector_norm(_on_host(g))) for g in gradients]
    total = sum(norm for norm in norms if math.isfinite(norm))
    shares: dict[int, float] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        if not math.isfinite(norm) or norm == 0.0:
            continue
        values, counts = torch.unique(_exponents(gradient), return_counts=True)
        whole = int(counts.sum())
        for exponent, count in zip(values.tolist(), counts.tolist(), strict=True):
            share = norm / total * count / whole
            shares[exponent] = shares.get(exponent, 0.0) + share
    return shares


def unit_magnitudes(trainee: Trainee, batch: Any, seed: int, scale: float) -> tuple[UnitTrace, ...]:
    """Measure each unit's largest exponents, and the share of its gradient lost at `scale`."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    handles = []
    for path, module in trainee.model.named_modules():
        handles.append(module.register_forward_hook(_noting(forward, path)))
    try:
        trainee.model.zero_grad(set_to_none=True)
        outputs: dict[str, list[torch.Tensor]] = {}
        handles += [
            module.register_forward_hook(_catching(outputs, path))
            for path, module in trainee.model.named_modules()
        ]
        trainee.loss(batch, seed).backward()  # type: ignore[no-untyped-call]
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
            _known(forward.get(path)),
            _known(backward.get(path)),
            _underflow(module, scale),
        )
        for path, module in trainee.model.named_modules()
        if path in forward and has_own_code(module)
    )
    trainee.model.zero_grad(set_to_none=True)
    return traces


def _noting(into: dict[str, float], path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                into[path] = max(into.get(path, 0.0), _magnitude(leaf))

    return hook


def _catching(into: dict[str, list[torch.Tensor]], path: str) -> Callable[..., None]:
    """Make a hook that keeps the gradient of a module's outputs, where they have one."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.retain_grad()
                into.setdefault(path, []).append(leaf)

    return hook


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().amax())


def _known(value: float | None) -> int | None:
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return _exponent(value)


def _underflow(module: nn.Module, scale: float) -> float:
    """Return the share of a module's own non-zero gradient that underflows float16 at `scale`."""
    found = [_exponents(p.grad) for p in module.parameters(recurse=False) if p.grad is not None]
    exponents = torch.cat(found) if found else torch.zeros(0, device="cpu")
    if exponents.numel() == 0:
        return 0.0
    limits = DType.FLOAT16.limits
    smallest = limits.min_exponent - limits.mantissa_bits
    return float((exponents + math.log2(scale) < smallest).float().mean())
