"""Finds variables of a training loop that keep state, and names those that an overflow spoilt.

What the loop holds itself, an average in a variable of its function, belongs to no object that
could be given its value back. So, where a step that follows a skipped one is not finite either, a
warning names what was finite neither then nor now. Nothing is looked at before a step is skipped.
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
    """Notes what is not finite in the loop where its step is skipped; warns once if it stays."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._warned = False

    def note_skip(self) -> None:
        """Note the names of variables that are not finite."""
        self._names = [] if self._warned else list(dict.fromkeys(_nonfinite()))

    def note_update(self) -> None:
        """Forget them: the step that follows was finite."""
        self._names = []

    def look_again(self, loss: Any) -> None:
        """Warn of those that are not finite still, if the next loss is not either."""
        known = self._names and isinstance(loss, torch.Tensor)
        if not known or bool(loss.isfinite().all()):
            return
        now = set(_nonfinite())
        lasting = [name for name in self._names if name in now]
        if not lasting:
            return
        self._warned, self._names = True, []
        more = len(lasting) - _MOST_NAMED
        named = ", ".join(lasting[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        warn_of_loop(
            f"the step before was skipped, and the loss is not finite again. Nor are {named}, "
            "since then: if that is state which the loop keeps, such as an average, it kept what "
            "overflowed. A skipped step puts back what modules and callable objects hold, not "
            "variables of the loop: assign those only after an update, which precision.step() and "
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
