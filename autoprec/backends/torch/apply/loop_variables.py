"""Names variables of a training loop that an overflow spoilt: they keep state, and nobody knew.

What the loop holds itself, an average in a variable of its function, belongs to no object that
could be given its value back. So, where three steps in a row are skipped and the loss is not finite
either, a warning names what is not. Nothing is looked at, or waited for, before the second of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from autoprec.backends.torch.apply.calling_frames import variables_in_sight
from autoprec.backends.torch.apply.held_objects import Kind, kind_of
from autoprec.backends.torch.apply.noticed_steps import warn_of_loop

_MOST_NAMED, _MOST_ITEMS, _MOST_VALUES = 3, 64, 2**20


class SpoiltVariables:
    """Looks at the loop where it skips step after step; warns once of what stays not finite."""

    def __init__(self) -> None:
        self._skips = 0
        self._names: list[str] = []
        self._loss: torch.Tensor | None = None
        self._warned = False

    def note_loss(self, loss: Any) -> None:
        """Keep the loss of the step that may be the third to be skipped."""
        if self._skips == 2 and not self._warned and isinstance(loss, torch.Tensor):
            self._loss = loss.detach()

    def note_update(self) -> None:
        """Begin anew: a step was finite."""
        self._skips, self._names, self._loss = 0, [], None

    def note_skip(self) -> None:
        """Look at the second skip in a row, and compare at the third."""
        self._skips += 1
        if self._skips == 2 and not self._warned:
            self._names = list(dict.fromkeys(_nonfinite()))
        loss, self._loss = self._loss, None
        if self._skips != 3 or loss is None or not self._names or bool(loss.isfinite().all()):
            return
        now = set(_nonfinite())
        lasting = [name for name in self._names if name in now]
        if lasting:
            self._warned = True
            _warn_of(lasting)


def _warn_of(names: list[str]) -> None:
    more = len(names) - _MOST_NAMED
    named = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    warn_of_loop(
        "three steps in a row were skipped, and the loss is not finite. Nor are these variables of "
        f"the loop: {named}. If one of them is state which the loop keeps, such as an average, it "
        "kept what overflowed: a skipped step puts back what modules and callable objects hold, "
        "not variables of the loop. Assign those only after an update, which precision.step() and "
        "precision.backward_and_step(loss) say that there was"
    )


def _nonfinite() -> Iterator[str]:
    """Name what is not finite in variables, and in dicts in them."""
    for variables in variables_in_sight():
        for name, value in variables.items():
            if kind_of(type(value)) is Kind.MAPPING and len(value) <= _MOST_ITEMS:
                yield from (f"{name}[{key!r}]" for key, e in value.items() if not _is_finite(e))
            elif not _is_finite(value):
                yield name


def _is_finite(value: Any) -> bool:
    """Say whether a number or a tensor is finite, as those of a graph are taken to be."""
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) is not torch.Tensor or value.requires_grad or value.numel() > _MOST_VALUES:
        return True
    return bool(value.isfinite().all())
