"""Detects what a loop must not do between the micro-batches of one update.

A loop written without accumulation clears gradients at its top and steps its scheduler at its end,
once for every batch. With accumulation the first loses all but the last micro-batch's gradients,
and the second decays the learning rate too early: neither raises anything by itself. Nor does a
loader whose micro-batches differ: each counts as much as the others, however little it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.errors import AutoprecWarning, UsageError

_IGNORED = -100
"""The label that torch's losses leave out of their mean."""

_OF_LABELS = "Divide each loss by the labels of the whole update, or use a batch that is not split"


class UnequalBatches:
    """Says, once, that the micro-batches of one update do not hold as much as each other.

    Samples are compared in every update: a loader's last batch may be so short that one of its
    samples counts twice as much as another, or more. Labels of sequences, but for ignored ones, are
    counted in the first update, so that no later one waits for a device.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._update, self._is_over = 0, False
        self._samples, self._labels = list[int](), list[torch.Tensor]()

    def note(self, batch: Any, *, again: bool = False) -> None:
        """Note what the next backward pass is of; a model's calls may do it `again`."""
        if torch.is_grad_enabled() and not (again and self._batch is not None):
            self._batch = batch

    def count(self, update: int) -> None:
        """Count what was noted as a micro-batch of this update, after its backward pass."""
        batch, self._batch = self._batch, None
        if self._is_over or batch is None:
            return
        if update != self._update:
            self._say_if_unequal("labels", [int(each) for each in self._labels], _OF_LABELS)
            self._update = update
            self._samples.clear()
            self._labels.clear()
        samples, labels = _samples(batch), _labels(batch)
        if samples is not None:
            self._samples.append(samples)
            if max(self._samples) >= 2 * min(self._samples):
                self._say_if_unequal("samples", self._samples, "Give the loader drop_last=True")
        if labels is not None and update == 0:
            self._labels.append((labels != _IGNORED).sum())

    def _say_if_unequal(self, what: str, held: Sequence[int], instead: str) -> None:
        if len(set(held)) < 2 or self._is_over:
            return
        self._is_over = True
        warnings.warn(
            f"the micro-batches of one update hold {', '.join(map(str, held))} {what}, and each of "
            "them counts as much as the others: the mean of their losses is not that of a batch "
            f"that is not split. {instead}. To silence: filter autoprec.errors.AutoprecWarning",
            AutoprecWarning,
            stacklevel=5,
        )


def _samples(batch: Any) -> int | None:
    """Return the first dimension of a batch's tensors; None where they have not all the same."""
    found = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return found.pop() if len(found) == 1 else None


def _labels(batch: Any) -> torch.Tensor | None:
    """Return the labels of sequences, by their name or as the second of two; else None."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        batch = batch[1] if isinstance(batch[1], Mapping) else {"labels": batch[1]}
    found = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.dim() < 2:
        return None
    return found


class AccumulationCheck:
    """Compares what one micro-batch left behind with what the next one of its update finds."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, ...], _LeftBehind] = {}
        self._warned = False

    def remember(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Record a gradient and the learning rates after a backward pass for `optimizers`."""
        held = next((p.grad for p in parameters if p.grad is not None), None)
        version = None if held is None else held._version
        self._left[_name(optimizers)] = _LeftBehind(parameters, version, _rates(optimizers))

    def check(self, optimizers: Sequence[torch.optim.Optimizer], counted: int, steps: int) -> None:
        """Check, before the next backward pass, that `counted` of `steps` micro-batches remain.

        Raises `UsageError` where their gradients were cleared; warns, once, where a learning rate
        changed.
        """
        left = self._left.get(_name(optimizers))
        if counted == 0 or left is None:
            return
        if left.is_cleared():
            raise UsageError(
                f"the gradients of {counted} of {steps} micro-batches were cleared before their "
                "update, which would be made of the others alone: delete optimizer.zero_grad() (or "
                "model.zero_grad()) from the loop. precision.step() clears them after an update"
            )
        if left.rates != _rates(optimizers) and not self._warned:
            self._warned = True
            warnings.warn(
                f"a learning rate changed between the {steps} micro-batches of one update: step "
                "the scheduler where precision.step() returns True, and count its steps in "
                "updates. To silence: filter autoprec.errors.AutoprecWarning",
                AutoprecWarning,
                stacklevel=4,
            )


@dataclass(frozen=True)
class _LeftBehind:
    """The state after a backward pass: parameters, a gradient's version, learning rates."""

    parameters: Sequence[torch.nn.Parameter]
    version: int | None
    rates: list[object]

    def is_cleared(self) -> bool:
        """Return whether all gradients are None or zero; clipping writes to them, too."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.version is None or (grads and grads[0]._version == self.version):
            return False
        return not any(bool(_values(grad).any()) for grad in grads)


def _name(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, ...]:
    return tuple(id(each) for each in optimizers)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[object]:
    """List the learning rates that are plain numbers: comparing tensors waits for the device."""
    rates = (group.get("lr") for each in optimizers for group in each.param_groups)
    return [rate for rate in rates if not isinstance(rate, torch.Tensor)]
