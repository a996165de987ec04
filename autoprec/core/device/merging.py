"""Merges what a probe saw, what a family's row says and what was measured into `DeviceFacts`.

Measured beats probed beats catalogue.
"""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.device.dtype_support import measured_support, probed_support
from autoprec.core.device.facts import DeviceFacts, Evidence
from autoprec.core.device.family import DTypeRow, Family
from autoprec.core.device.measurements import Measurements
from autoprec.core.device.observation import UNIFIED_MEMORY_NOTE, Observation
from autoprec.core.dtypes import DType


def merge(observation: Observation, family: Family) -> DeviceFacts:
    """Merge what was probed and what is known: probed beats catalogue."""
    whole = not observation.partition
    dtypes = {
        dtype: probed_support(family.dtypes.get(dtype, DTypeRow()), observation, whole)
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
    return DeviceFacts(
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


def with_measurements(
    facts: DeviceFacts, measured: Measurements, earlier: Measurements | None = None
) -> DeviceFacts:
    """Put what was measured over what the catalogue and the probe say.

    `earlier` is what the same software measured on this device before, if it did.
    """
    base = measured.product(DType.FLOAT32)
    base_gflops = base.gflops if base else None
    speeds = {
        p.dtype: replace(
            facts.fact(p.dtype),
            measured_gflops=p.gflops,
            slowest_gflops=p.slowest_gflops,
            earlier_ratio=None if earlier is None else earlier.ratio(p.dtype),
        )
        for p in measured.products
        if p.gflops is not None
    }
    timed = replace(facts, dtypes={**facts.dtypes, **speeds})
    dtypes = dict(facts.dtypes)
    for product in measured.products:
        dtypes[product.dtype] = measured_support(
            timed.fact(product.dtype), product, base_gflops, timed.measured_range(product.dtype)
        )
    return replace(
        facts,
        dtypes=dtypes,
        measured_memory_bandwidth_gbps=measured.memory_bandwidth_gbps,
        measured_with=measured.framework,
        measured_on=measured.date,
        disturbed=measured.disturbed,
        notes=(*facts.notes, *measured.notes),
    )
