"""Which model a tuning takes a step with: the one that stands for a script's own meanwhile.

A task's step may be a function of the script that applies its profile, and call `precision.forward`
as the script's loop does. What is measured and checked is a copy of the script's model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from autoprec.backends.torch.apply.model_changes import unwrap

_STEPPING: list[nn.Module] = []


@contextlib.contextmanager
def stepping(model: nn.Module) -> Iterator[None]:
    """Let `model` stand for its copies while it takes a step."""
    _STEPPING.append(model)
    try:
        yield
    finally:
        _STEPPING.pop()


def stepping_model() -> nn.Module | None:
    """Return the model that takes a step now; None if none does."""
    return _STEPPING[-1] if _STEPPING else None


def is_copy(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have one class, and parameters of the same names and shapes."""
    models = unwrap(one), unwrap(other)
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in models]
    return type(models[0]) is type(models[1]) and shapes[0] == shapes[1]
