"""Detects what a loop must not do between the micro-batches of one update.

A loop written without accumulation clears gradients at its top and steps its scheduler at its end,
once for every batch. With accumulation the first loses all but the last micro-batch's gradients,
and the second decays the learning rate too early: neither raises anything by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoprec.errors import AutoprecWarning, UsageError


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
