"""Counting losses that are not finite, without ever making an accelerator wait for it."""

from __future__ import annotations

import logging
import math

import torch

from autoprec.backends.shared.loss_scaling_counts import StepCounts

logger = logging.getLogger("autoprec")

#: So many losses wait on an accelerator until they are checked together: a check is several
#: kernels, which take longer to launch than the one that copies a loss.
_WAITING = 64


class NonfiniteLossCounter:
    """Counts losses that are inf or NaN, and logs a line when it learns of some.

    A loss on the CPU is checked at once. On an accelerator the count is kept there, and fetched
    only by `count`.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._on_device: torch.Tensor | None = None
        self._waiting: tuple[torch.Tensor, ...] = ()
        self._places = torch.empty(0)
        self._waits = 0

    def check(self, loss: torch.Tensor, counts: StepCounts) -> None:
        """Check the loss of the optimizer step that is `counts`' current one."""
        if loss.dim() != 0:
            return
        if not loss.is_cpu:
            self._keep(loss.detach())
        elif not math.isfinite(loss.item()):
            self._add(1, counts.step_number)

    def count(self, step: int) -> int:
        """Return the count up to optimizer step `step`; wait for an accelerator."""
        self._check_waiting()
        if self._on_device is not None:
            fetched = int(self._on_device.item())
            self._on_device = None
            if fetched:
                self._add(fetched, step)
        return self._count

    def _keep(self, loss: torch.Tensor) -> None:
        """Copy the loss to where it waits; its own memory may be used for the next step's."""
        if type(loss) is not torch.Tensor:  # a DTensor is not copied into a plain one
            self._add_on_device(loss)
            return
        places = self._places
        if places.device != loss.device or places.dtype != loss.dtype:
            self._check_waiting()
            self._places = loss.new_empty(_WAITING)
            self._waiting = self._places.unbind()
        self._waiting[self._waits].copy_(loss)
        self._waits += 1
        if self._waits == _WAITING:
            self._check_waiting()

    def _check_waiting(self) -> None:
        waits, self._waits = self._waits, 0
        if waits:
            self._add_on_device(self._places[:waits])

    def _add_on_device(self, losses: torch.Tensor) -> None:
        bad = (~torch.isfinite(losses)).sum()
        known = self._on_device
        self._on_device = bad if known is None else known.to(bad.device) + bad

    def _add(self, count: int, step: int) -> None:
        self._count += count
        logger.warning("step %d: the loss is not finite (%d so far)", step, self._count)
