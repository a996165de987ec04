"""Counts the exponents of backward passes, which say what loss scale float16 bears.

bfloat16 has float32's range, so a tensor that is bfloat16 in a mixed_bfloat16 step would be float16
in a mixed_float16 one, and its largest magnitude can be read without float16 hardware. A step is
read at loss scale 1 and `SCALE_FACTOR`: what grew by exactly that factor belongs to the backward
pass; weights and activations that pass through it did not grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.traces import ExponentHistogram
from autoprec.core.recipe import Recipe

SCALE_FACTOR = 64.0
"""The second loss scale; a power of two, so that only exponents change."""


def in_bfloat16(recipe: Recipe) -> Recipe:
    """Return the recipe with bfloat16 where it has float16: float32's range, the same tensors.

    It is not compiled, so that its tensors can be read, nor shared with other ranks.
    """
    return replace(
        recipe,
        policy=Policy.MIXED_BFLOAT16,
        loss_scale=None,
        compile=False,
        accumulation_steps=1,
        distributed=None,
    )


class ExponentCounts:
    """Gathers the exponents of backward passes over several batches."""

    def __init__(self) -> None:
        self._largest: list[float] = []
        self._shares: dict[int, float] = {}
        self._batches = 0
        self._finite = True

    def add(self, magnitudes: Iterable[float], shares: Mapping[int, float]) -> None:
        """Add one batch: its tensors' largest magnitudes, and its gradients' exponents."""
        self._batches += 1
        for magnitude in magnitudes:
            if math.isfinite(magnitude):
                self._largest.append(magnitude)
            else:
                self._finite = False
        for exponent, share in shares.items():
            self._shares[exponent] = self._shares.get(exponent, 0.0) + share

    def histogram(self) -> ExponentHistogram:
        """Return what was gathered; shares sum to one."""
        total = sum(self._shares.values()) or 1.0
        return ExponentHistogram(
            largest=largest_exponent(self._largest),
            smallest=min(self._shares, default=None),
            counts={str(e): share / total for e, share in sorted(self._shares.items())},
            batches=self._batches,
            finite=self._finite,
        )


def exponent_of(value: float) -> int:
    """Return floor(log2 value) of a positive number."""
    return math.frexp(value)[1] - 1


def largest_exponent(magnitudes: Iterable[float]) -> int | None:
    """Return the exponent of the largest finite magnitude above 0, None where there is none."""
    found = [value for value in magnitudes if math.isfinite(value) and value > 0]
    return exponent_of(max(found)) if found else None


def weighted_shares(gradients: Iterable[tuple[float, Mapping[int, int]]]) -> dict[int, float]:
    """Return the shares of exponents in all gradients, each weighted by its share of the norm.

    Each gradient is its norm and how often it has each exponent; one whose norm is 0 or not finite
    does not count.
    """
    counted = [(norm, counts) for norm, counts in gradients if math.isfinite(norm) and norm]
    total = sum(norm for norm, _ in counted)
    shares: dict[int, float] = {}
    for norm, counts in counted:
        elements = sum(counts.values())
        for exponent, count in counts.items():
            share = norm / total * count / elements
            shares[exponent] = shares.get(exponent, 0.0) + share
    return shares


def least_float16_exponent(scale: float) -> float:
    """Return the exponent below which float16 loses a number whose loss is scaled by `scale`."""
    limits = DType.FLOAT16.limits
    return limits.min_exponent - limits.mantissa_bits - math.log2(scale)


def relative_error(difference: float, total: float) -> float | None:
    """Return the root of `difference` / `total`, both sums of squares; None if not finite."""
    if not math.isfinite(difference):
        return None
    if difference == 0.0:
        return 0.0
    return math.sqrt(difference / total) if total > 0.0 else None
