"""`autoprec tune --explain`: how large each module's numbers are, why it stays in float32, and
which operators take the time of a step.

Reads what `Tracer.unit_magnitudes` measured; decides nothing. Magnitudes are exponents of two and
are compared with float16's range: bfloat16 has float32's range, which is never the reason there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from autoprec.core.dtypes import DType
from autoprec.core.measurement import OperatorTime
from autoprec.core.number_words import percent
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe
from autoprec.reporting.tables import table

NEAR_LIMIT_OCTAVES = 2
"""A magnitude this close to float16's limit, in powers of two, is called near."""

NOTABLE_UNDERFLOW_SHARE = 1e-3
"""A share of the gradient that underflows is mentioned from here on."""


_SLOWEST = 8
"""Operators that are listed, at most."""


def explain_table(units: Sequence[UnitTrace], recipe: Recipe) -> Table:
    """Tabulate the modules in the order given: magnitudes, underflow, dtype, and why."""
    scale = scale_exponent(recipe)
    rows = [
        [
            unit.path or "the model itself",
            magnitude_text(unit.forward_largest),
            magnitude_text(_scaled(unit.backward_largest, scale)),
            percent(unit.underflow) if unit.underflow else "none",
            "float32" if unit.path in recipe.float32_modules else recipe.policy.compute_dtype.value,
            why(unit, recipe),
        ]
        for unit in units
    ]
    names = ["module", ">forward", ">backward", ">underflow", "runs in", "why"]
    return table(names, rows, title=_title(recipe))


def operators_table(operators: Sequence[OperatorTime]) -> Table:
    """Tabulate the slowest operators of a step, the slowest first."""
    rows = [
        (
            each.name,
            percent(each.share),
            f"{each.dtype or '-'}{' (update)' if each.updates else ''}",
        )
        for each in operators[:_SLOWEST]
    ]
    return table(["operator", ">share", "runs in"], rows)


def in_float32(operators: Sequence[OperatorTime], recipe: Recipe) -> str:
    """Say what ran in float32 although the policy computes in 16 bits; "" under other policies."""
    if not recipe.policy.mixed:
        return ""
    dtype = recipe.policy.compute_dtype
    slow = [each for each in operators if each.dtype == "float32" and not each.updates]
    if not slow:
        return f"besides the update, every operator that counts has inputs in {dtype}"
    named = ", ".join(f"{each.name} {percent(each.share)}" for each in slow[:_SLOWEST])
    whole = percent(sum(each.share for each in slow))
    return (
        f"{whole} of the step is in operators whose inputs are float32, although {recipe.policy} "
        f"computes in {dtype}: {named}. Autocast keeps some there to be exact (losses, "
        "normalisation, exponentials) and casts from there; else look for casts in the model"
    )


def scale_exponent(recipe: Recipe) -> int:
    """Return the exponent of the recipe's initial loss scale; 0 without one."""
    return 0 if recipe.loss_scale is None else round(math.log2(recipe.loss_scale.initial))


def magnitude_text(exponent: int | None) -> str:
    """Show a magnitude as a power of two: "2^7"."""
    return "none" if exponent is None else f"2^{exponent}"


def why(unit: UnitTrace, recipe: Recipe) -> str:
    """Explain why a module is in float32 or not, and how its numbers fit float16's range."""
    said = [text for text in (_range_text(unit, recipe), _underflow_text(unit, recipe)) if text]
    if unit.path in recipe.float32_modules:
        needed = "the model trains like float32 only with this module or a neighbour in float32"
        return "; ".join((needed, *said))
    return "; ".join(said)


def _range_text(unit: UnitTrace, recipe: Recipe) -> str:
    """Compare the largest numbers, forward and scaled backward, with float16's range."""
    if recipe.policy.compute_dtype is not DType.FLOAT16:
        return ""
    highest = DType.FLOAT16.limits.max_exponent
    backward = _scaled(unit.backward_largest, scale_exponent(recipe))
    said = []
    for what, exponent in (("outputs", unit.forward_largest), ("gradients", backward)):
        if exponent is None or exponent < highest - NEAR_LIMIT_OCTAVES:
            continue
        limit = f"float16's limit of 2^{highest + 1}"
        said.append(f"{what} {'beyond' if exponent > highest else 'near'} {limit}")
    return " and ".join(said)


def _underflow_text(unit: UnitTrace, recipe: Recipe) -> str:
    if recipe.policy.compute_dtype is not DType.FLOAT16 or unit.underflow < NOTABLE_UNDERFLOW_SHARE:
        return ""
    return f"{percent(unit.underflow)} of its gradient is too small for float16"


def _scaled(exponent: int | None, scale: int) -> int | None:
    return None if exponent is None else exponent + scale


def _title(recipe: Recipe) -> str:
    scaled = "" if recipe.loss_scale is None else f" at loss scale 2^{scale_exponent(recipe)}"
    return f"largest magnitudes by module under {recipe.policy.value}{scaled}"
