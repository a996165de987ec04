"""Decides what a device's support of a dtype is: native, slow, emulated, absent or unknown.

A catalogue row says it, a probed feature proves or disproves it, and a measured product
overrides both.
"""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import DTypeRow, Support
from autoprec.core.device.measurements import Product
from autoprec.core.device.observation import Observation
from autoprec.core.dtypes import DType
from autoprec.core.number_words import about_times

#: A 16-bit product this much faster than float32's is native, whatever the catalogue says; below 1
#: it gains nothing, whatever the catalogue says. Between them the catalogue decides,
#: because repeated measurements of one product differ by up to a fifth.
CLEARLY_FASTER_RATIO = 1.2


def probed_support(row: DTypeRow, observation: Observation, whole: bool) -> DTypeFact:
    """Return what a catalogue row and the probed features say of a dtype.

    A part of a device (`whole` false) does not reach the whole one's peak.
    """
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
    usable = [name for name in has if name not in observation.unused]
    if usable[:1] != [row.requires[0]]:
        fact = replace(fact, family_ratio=None)
    if usable:
        return replace(
            fact, evidence=Evidence.PROBED, reason=_join_reasons(f"has {usable[0]}", row.reason)
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
    """Withdraw native support that was not measured, if there is a reason `why`."""
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


def measured_support(
    fact: DTypeFact,
    product: Product,
    float32_gflops: float | None,
    ratios: tuple[float, float] | None = None,
) -> DTypeFact:
    """Return what a measured product says of its dtype, put over what was known before.

    Timings that cannot tell which of both is faster prove nothing slow: `ratios` says from where to
    where the ratio may be (default: it is what was timed).
    """
    if product.crashed:
        return replace(
            fact, support=Support.ABSENT, evidence=Evidence.MEASURED, reason=product.failure
        )
    if product.gflops is None:
        why = f"not measured: {product.failure}"
        return replace(fact, reason=_join_reasons(fact.reason, why))
    fact = replace(fact, measured_gflops=product.gflops, slowest_gflops=product.slowest_gflops)
    if product.dtype is DType.FLOAT32:
        return replace(fact, support=Support.NATIVE, evidence=Evidence.MEASURED)
    if not float32_gflops:
        return fact
    ratio = product.gflops / float32_gflops
    most = ratio if ratios is None else ratios[1]
    support = fact.support
    if ratio >= CLEARLY_FASTER_RATIO:
        support = Support.NATIVE
    elif most < 1.0 and support is Support.NATIVE:
        support = Support.SLOW
    elif most < 1.0 or (
        most < CLEARLY_FASTER_RATIO and support in (Support.ABSENT, Support.UNKNOWN)
    ):
        support = Support.EMULATED
    elif support is Support.ABSENT:
        support = Support.UNKNOWN
    return replace(
        fact,
        support=support,
        evidence=Evidence.MEASURED,
        reason=f"measured: {about_times(ratio)} float32",
    )


def _join_reasons(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
