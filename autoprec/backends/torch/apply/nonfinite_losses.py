"""Counting losses that are not finite, without ever making an accelerator wait for it."""

from __future__ import annotations

import logging
import math

import torch

logger = logging.getLogger("autoprec")


class NonfiniteLossCounter:
    """Counts losses that are inf or NaN, and logs a line when it learns of some.

    A loss on the CPU is checked at once. On an accelerator the count is kept there, and fetched
    only by `count`.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._on_device: torch.Tensor | None = None

    def check(self, loss: torch.Tensor, step: int) -> None:
        """Check the loss of optimizer step `step`."""
        if not loss.is_cpu:
            bad = (~torch.isfinite(loss.detach())).sum()
            self._on_device = bad if self._on_device is None else self._on_device + bad
        elif loss.dim() == 0 and not math.isfinite(loss.item()):
            self._add(1, step)

    def count(self, step: int) -> int:
        """Return the count up to optimizer step `step`; wait for an accelerator."""
        if self._on_device is not None:
            fetched = int(self._on_device.item())
            self._on_device = None
            if fetched:
                self._add(fetched, step)
        return self._count

    def _add(self, count: int, step: int) -> None:
        self._count += count
        logger.warning("step %d: the loss is not finite (%d so far)", step, self._count)
