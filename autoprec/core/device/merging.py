"""Merges what a probe saw, what a family's row says and what was measured into `DeviceFacts`.

Measured beats probed beats catalogue.
"""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import DTypeRow, Family, Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.observation import UNIFIED_MEMORY_NOTE, Observation
from autoprec.core.dtypes import DType

#: A 16-bit product this much faster than float32's is native, whatever the catalogue says; below 1
#: it gains nothing, whatever the catalogue says. Between them the catalogue decides,
#: because repeated measurements of one product differ by up to a fifth.
CLEARLY_FASTER_RATIO = 1.2


def merge(
    observation: Observation, family: Family, measured: Measurements | None = None
) -> DeviceFacts:
    """Merge what was probed, known and measured: measured beats probed beats catalogue."""
    whole = not observation.partition
    dtypes = {
        dtype: _dtype_fact(family.dtypes.get(dtype, DTypeRow()), observation, whole)
        for dtype in DType
    }
    if observation.hypothetical:
        dtypes = {d: replace(fact, evidence=Evidence.CATALOGUE) for d, fact in dtypes.items()}
    if family.unified_memory:
        observation = replace(observation, memory_bytes=None)
    notes = observation.notes
    if family.unified_memory and UNIFIED_MEMORY_NOTE not in notes:
        notes = (*notes, UNIFIED_MEMORY_NOTE)
    if not whole:
        notes = (*notes, "a part of the device: the whole one's peaks are left out")
    facts = DeviceFacts(
        observation=observation,
        family=family.name,
        title=family.title,
        dtypes=dtypes,
        source=family.source,
        memory_bandwidth_gbps=family.memory_bandwidth_gbps if whole else None,
        notes=(*notes, family.note) if family.note else notes,
        padding=family.padding,
        origin=family.origin,
    )
    return facts if measured is None else with_measurements(facts, measured)


def _dtype_fact(row: DTypeRow, observation: Observation, whole: bool) -> DTypeFact:
    fact = DTypeFact(
        support=row.support,
        reason=row.reason,
        alignment=row.alignment,
        best_alignment=row.best_alignment or row.alignment,
        peak_dense_tflops=row.peak_dense_tflops if whole else None,
        family_ratio=row.measured_ratio,
    )
    if not row.requires:
        return fact
    if not (observation.features or observation.denied):
        fact = replace(fact, family_ratio=None)
        why = f"nothing could be read of its features, {' or '.join(row.requires)} among them"
        if observation.hypothetical:
            why = f"not every one has {' or '.join(row.requires)}"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    has = [name for name in row.requires if name in observation.features]
    found = [name for name in has if name not in observation.unused]
    if found[:1] != [row.requires[0]]:
        fact = replace(fact, family_ratio=None)
    if found:
        return replace(
            fact, evidence=Evidence.PROBED, reason=_join_reasons(f"has {found[0]}", row.reason)
        )
    if has:
        why = f"has {has[0]}, which a setting keeps libraries from using"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    if observation.partial_features:
        why = f"this system does not tell whether it has {' or '.join(row.requires)}"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    denied = [name for name in row.requires if name in observation.denied]
    why = f"shows none of {', '.join(row.requires)}"
    if denied:
        others = [name for name in row.requires if name not in denied]
        why = f"advertises {', '.join(denied)} but the system denies its use"
        why += f", and shows no {' or '.join(others)}" if others else ""
    return replace(fact, support=row.otherwise, evidence=Evidence.PROBED, reason=why)


def distrust_native_support(facts: DeviceFacts, why: str) -> DeviceFacts:
    """Withdraw native support that was not measured, where there is a reason `why`."""
    if not why:
        return facts
    dtypes = {
        dtype: replace(fact, support=Support.UNKNOWN, reason=why)
        if dtype is not DType.FLOAT32
        and fact.support is Support.NATIVE
        and fact.evidence is not Evidence.MEASURED
        else fact
        for dtype, fact in facts.dtypes.items()
    }
    return replace(facts, dtypes=dtypes)


def with_measurements(facts: DeviceFacts, measured: Measurements) -> DeviceFacts:
    """Put what was measured over what the catalogue and the probe say."""
    base = measured.product(DType.FLOAT32)
    base_gflops = base.gflops if base else None
    dtypes = dict(facts.dtypes)
    for product in measured.products:
        dtypes[product.dtype] = _merge_product(facts.fact(product.dtype), product, base_gflops)
    return replace(
        facts,
        dtypes=dtypes,
        measured_memory_bandwidth_gbps=measured.memory_bandwidth_gbps,
        measured_with=measured.framework,
        measured_on=measured.date,
        notes=(*facts.notes, *measured.notes),
    )


def _merge_product(fact: DTypeFact, product: Product, base: float | None) -> DTypeFact:
    if product.crashed:
        return replace(
            fact, support=Support.ABSENT, evidence=Evidence.MEASURED, reason=product.failure
        )
    if product.gflops is None:
        why = f"not measured: {product.failure}"
        return replace(fact, reason=_join_reasons(fact.reason, why))
    fact = replace(fact, measured_gflops=product.gflops)
    if product.dtype is DType.FLOAT32:
        return replace(fact, support=Support.NATIVE, evidence=Evidence.MEASURED)
    if not base:
        return fact
    ratio = product.gflops / base
    support = fact.support
    if ratio >= CLEARLY_FASTER_RATIO:
        support = Support.NATIVE
    elif ratio < 1.0 and support is Support.NATIVE:
        support = Support.SLOW
    elif ratio < 1.0 or support in (Support.ABSENT, Support.UNKNOWN):
        support = Support.EMULATED
    return replace(
        fact,
        support=support,
        evidence=Evidence.MEASURED,
        reason=f"measured: {format_ratio(ratio)} float32",
    )


def format_ratio(ratio: float) -> str:
    """Format a ratio with two significant digits and without an exponent: "2.2x", "770x"."""
    return f"{float(f'{ratio:.2g}'):g}x"


def _join_reasons(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
