"""Lets layers of a model compute in float32 for a while, where the model stands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from autoprec.backends.keras.apply.applied_recipe import own_code_in_float32
from autoprec.backends.keras.apply.layer_names import LayerUnit, has_own_code
from autoprec.backends.keras.apply.layer_policy_stack import GivenPolicies, effective_policy
from autoprec.backends.keras.apply.method_hooks import InstalledHooks
from autoprec.backends.keras.dtypes import is_low
from autoprec.core.measurement import Unit


@contextlib.contextmanager
def in_float32(units: Sequence[LayerUnit]) -> Iterator[None]:
    """Let these layers compute in float32 inside; what is traced by then stays as it is."""
    hooks = InstalledHooks()
    given: list[tuple[GivenPolicies, Any]] = []
    try:
        for layer in (member for unit in units for member in unit.members):
            if is_low(effective_policy(layer).compute_dtype):
                given.append(GivenPolicies.to(layer, "float32"))
        for unit in units:
            own_code_in_float32(unit, units, hooks)
        yield
    finally:
        hooks.restore()
        for record, policy in reversed(given):
            record.take_back(policy)


def low_units(units: Sequence[LayerUnit]) -> list[LayerUnit]:
    """List the layers that compute in 16 bits."""
    return [unit for unit in units if is_low(effective_policy(unit.layer).compute_dtype)]


def candidates(units: Sequence[LayerUnit]) -> list[Unit]:
    """List what may be kept in float32; a matrix of weights stands for the products with it."""
    found = []
    for unit in low_units(units):
        if has_own_code(unit):
            own = [v for member in unit.members for v in member._trainable_variables]
            products = sum(_elements(v.shape) for v in own if len(v.shape) > 1)
            found.append(Unit(unit.path, unit.kind, float(products)))
    return found


def _elements(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= int(length)
    return size
