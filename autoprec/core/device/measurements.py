"""What timing a device gave: the rates of its matrix products and of a large copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoprec.core.codec import bounded
from autoprec.core.dtypes import DType
from autoprec.core.number_words import plain_number

#: Two timings of one product that differ by this factor were disturbed: on an idle machine repeated
#: measurements differ by up to a fifth.
_DISTURBED_RATIO = 1.5

#: No device multiplies so many times as fast in fewer bits: matrix units reach 30 times float32's.
_MOST_RATIO = 64.0


@dataclass(frozen=True)
class Product:
    """One measured matrix product: what ran, or how it failed.

    `gflops` is the best of several timings, which went from `slowest_gflops` to it; None if that
    was not recorded.
    """

    dtype: DType
    gflops: float | None = bounded(default=None, low=0.0, high=1e9)
    size: int | None = None
    failure: str = ""
    crashed: bool = False
    slowest_gflops: float | None = bounded(default=None, low=0.0, high=1e9)


@dataclass(frozen=True)
class Measurements:
    """What timing a device gave: its matrix products and a large copy.

    `date` is the day it was timed on, as "2026-11-24", if that was not just now. `disturbed`:
    something else used the device meanwhile, so that the products do not compare.
    """

    framework: str = ""
    products: tuple[Product, ...] = ()
    memory_bandwidth_gbps: float | None = None
    notes: tuple[str, ...] = ()
    date: str = ""
    disturbed: bool = False

    def product(self, dtype: DType) -> Product | None:
        """Return the product measured in `dtype`, if one was."""
        return next((p for p in self.products if p.dtype is dtype), None)

    def ratio(self, dtype: DType) -> float | None:
        """Return how many times as fast as float32's a dtype's products are, if both were timed."""
        mine, base = self.product(dtype), self.product(DType.FLOAT32)
        if mine is None or base is None or mine.gflops is None or not base.gflops:
            return None
        return mine.gflops / base.gflops


def merge_repeated_products(measured: Measurements) -> Measurements:
    """Keep the faster of two products of a dtype; if they differ much, mark all as disturbed.

    The slowest timing of both is kept with it.
    """
    kept: dict[DType, Product] = {}
    notes = list(measured.notes)
    for product in measured.products:
        first = kept.setdefault(product.dtype, product)
        low, high = sorted((first.gflops or 0.0, product.gflops or 0.0))
        if first is product or not low:
            continue
        slowest = min(first.slowest_gflops or low, product.slowest_gflops or low)
        faster = product if product.gflops == high else first
        kept[product.dtype] = replace(faster, slowest_gflops=slowest)
        if high > _DISTURBED_RATIO * low:
            notes.append(
                f"{product.dtype} products ran at {plain_number(low)} and at {plain_number(high)} "
                "GFLOP/s within seconds: another process uses this device, so the numbers are not "
                "comparable; measure again when it is idle"
            )
    plain = kept.get(DType.FLOAT32)
    for product in kept.values():
        if plain and plain.gflops and (product.gflops or 0.0) > _MOST_RATIO * plain.gflops:
            notes.append(
                f"{product.dtype} products ran at {plain_number(product.gflops or 0.0)} GFLOP/s "
                f"and float32's at {plain_number(plain.gflops)}, which no device does: another "
                "process used this one; measure again when it is idle"
            )
    return replace(
        measured,
        products=tuple(kept.values()),
        notes=tuple(notes),
        disturbed=len(notes) > len(measured.notes),
    )
