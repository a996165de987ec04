"""What is known of a device: what a probe saw, what its family says, and the two merged.

An `Observation` is what a probe saw on this machine; a `Family` is a row of the catalogue; `merge`
makes `DeviceFacts` of them, where measured beats probed beats catalogue. Nothing here looks at a
machine or a file, and nothing here knows a device by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from autoprec.core.codec import abbreviate, bounded
from autoprec.core.dtypes import DType

GIB = 2**30

#: Longer than any name needs; compiling a pattern takes time that grows with its length.
_MAX_PATTERN_LENGTH = 500

#: A 16-bit product this much faster than float32's is native, whatever the catalogue says; below 1
#: it gains nothing, whatever the catalogue says. Between them the catalogue decides,
#: because repeated measurements of one product differ by up to a fifth.
CLEARLY_FASTER_RATIO = 1.2

#: Two timings of one product that differ by this factor were disturbed: on an idle machine repeated
#: measurements differ by up to a fifth.
_DISTURBED_RATIO = 1.5

UNIFIED_MEMORY_NOTE = (
    "shares the CPU's memory: what a process may have of it is known only to the framework, which "
    "is asked when it runs"
)


class DeviceKind(StrEnum):
    """A sort of device, as frameworks name it."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"
    TPU = "tpu"


class Support(StrEnum):
    """How a device multiplies matrices in a dtype while accumulating in float32, as training does.

    `native`: the hardware does it, faster than or as fast as float32. `slow`: the hardware should
    do it, and was measured to be slower than float32. `emulated`: it works by converting, and gains
    nothing. `absent`: it does not run.
    """

    NATIVE = "native"
    SLOW = "slow"
    EMULATED = "emulated"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """How something is known; each beats the ones before it."""

    CATALOGUE = "catalogue"
    PROBED = "probed"
    MEASURED = "measured"


@dataclass(frozen=True)
class Product:
    """One measured matrix product: what ran, or how it failed."""

    dtype: DType
    gflops: float | None = bounded(default=None, low=0.0, high=1e9)
    size: int | None = None
    failure: str = ""
    crashed: bool = False


@dataclass(frozen=True)
class Measurements:
    """What timing a device gave: its matrix products and a large copy.

    `date` is the day it was timed on, as "2026-11-24", where that was not just now. `disturbed`:
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


@dataclass(frozen=True)
class Observation:
    """What a probe saw of one device; everything but the kind may be missing.

    `features` are instruction-set flags as the system names them; `denied` are those advertised
    but not usable (AMX without tile permission), `unused` those a setting keeps libraries from.
    `partial_features`: whoever listed them does not
    know all, so a missing one proves nothing. `memory_bytes` is what may be used: the smaller of
    what is installed and what a limit leaves. `core_quota` is CPU time per second where a limit is
    set. `uuid` selects the device for a worker process: a UUID, for ROCm and TPU the ordinal that
    the visibility variable wants, for an Intel GPU its PCI address ("0000:03:00.0", of a tile
    "0000:29:00.0/1"). It is no part of a fingerprint. `partition` names the part of a device that
    is divided (MIG, vGPU, AMD's compute partitions, tiles). `rehearsal`: the machine
    only pretends to have this device, so that nothing timed on it means anything. `hypothetical`:
    nothing was seen; this is what a family's row says of a device that is not here.
    """

    kind: DeviceKind
    index: int = 0
    name: str = ""
    vendor: str = ""
    architecture: str = ""
    compute_capability: str = ""
    pci: str = ""
    pci_subsystem: str = ""
    cpu_family: int | None = None
    cpu_model: int | None = None
    implementer: str = ""
    part: str = ""
    board: str = ""
    features: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    partial_features: bool = False
    memory_bytes: int | None = None
    cores: int | None = None
    usable_cores: int | None = None
    core_quota: float | None = None
    uuid: str = ""
    driver: str = ""
    partition: str = ""
    notes: tuple[str, ...] = ()
    rehearsal: bool = False
    hypothetical: bool = False


@dataclass(frozen=True)
class Match:
    """Which observations a family describes: every condition that is given must hold.

    `name` and `board` list regular expressions of which one must match somewhere in the text,
    ignoring case; `cpu_family` and `cpu_model` list numbers ("17") and ranges ("16-31");
    `compute_capability` lists capabilities ("9.0"), also with all that are newer ("8.0-");
    `features` must all be present and none of `lacks` (a hypervisor may show another model's
    number, so what a processor can do is not left to its number); the others list texts of which
    one must be equal. Empty means no condition.
    """

    name: tuple[str, ...] = ()
    vendor: tuple[str, ...] = ()
    architecture: tuple[str, ...] = ()
    compute_capability: tuple[str, ...] = ()
    pci: tuple[str, ...] = ()
    pci_subsystem: tuple[str, ...] = ()
    cpu_family: tuple[str, ...] = ()
    cpu_model: tuple[str, ...] = ()
    implementer: tuple[str, ...] = ()
    part: tuple[str, ...] = ()
    board: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in (*self.cpu_family, *self.cpu_model):
            if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", text):
                raise ValueError(
                    f"{abbreviate(text)} given, expected a number or a range like '16-31'"
                )
        for text in self.compute_capability:
            if not re.fullmatch(r"\d{1,4}\.\d{1,4}-?", text):
                raise ValueError(
                    f"{abbreviate(text)} given, expected a capability like '9.0' or '8.0-'"
                )
        for pattern in (*self.name, *self.board):
            if len(pattern) > _MAX_PATTERN_LENGTH:
                raise ValueError(
                    f"{abbreviate(pattern)} is longer than {_MAX_PATTERN_LENGTH} characters"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True)
class DTypeRow:
    """What the catalogue says of one dtype on a family.

    `requires` names features of which one must be present for the support to hold; without any the
    support is `otherwise`. Alignments are multiples, in elements, that matrix dimensions want: the
    least that runs on the fast path, and the best the vendor names. `measured_ratio` is how many
    times as fast as float32's products were where autoprec measured such a device; it holds where
    the first feature of `requires`, if there are any, is used.
    """

    support: Support = Support.UNKNOWN
    reason: str = ""
    requires: tuple[str, ...] = ()
    otherwise: Support = Support.EMULATED
    alignment: int = bounded(default=1, low=1, high=4096)
    best_alignment: int | None = bounded(default=None, low=1, high=4096)
    peak_dense_tflops: float | None = bounded(default=None, low=1e-3, high=1e6)
    measured_ratio: float | None = bounded(default=None, low=1e-6, high=1e6)


@dataclass(frozen=True)
class Family:
    """A row of the catalogue, its parents' keys already merged in.

    `features` are the flags that all its processors have, for one that is not here to be asked.
    `padding`: whether recipes that pad to the alignment are worth trials. `unified_memory`: it
    shares the CPU's, so that no size a probe can see is what a process may have; the framework is
    asked for that when it runs. `ancestors`: nearest first; `origin`: the file the row stands in.
    """

    name: str
    kind: DeviceKind
    title: str
    source: tuple[str, ...]
    match: Match = field(default_factory=Match)
    features: tuple[str, ...] = ()
    padding: bool = True
    dtypes: Mapping[DType, DTypeRow] = field(default_factory=dict)
    memory_bandwidth_gbps: float | None = bounded(default=None, low=0.1, high=1e6)
    unified_memory: bool = False
    note: str = ""
    ancestors: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class DTypeFact:
    """What is known of one dtype on one device, and how it is known.

    `family_ratio` is how many times as fast as float32's its products were on another device of the
    family, where that was measured.
    """

    support: Support = Support.UNKNOWN
    evidence: Evidence = Evidence.CATALOGUE
    reason: str = ""
    alignment: int = 1
    best_alignment: int = 1
    peak_dense_tflops: float | None = None
    measured_gflops: float | None = None
    family_ratio: float | None = None


@dataclass(frozen=True)
class Fingerprint:
    """What makes two devices the same for a profile: no serial numbers, no addresses.

    `memory_gib` is 0 where the memory is not known. `partition` is the part of a divided device, ""
    for a whole one; None where it was not told, as in profiles from before it was.
    """

    kind: DeviceKind
    family: str
    name: str
    memory_gib: int
    core_quota: float | None = None
    rehearsal: bool = False
    partition: str | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """Everything known of one device: observation and family merged.

    Memory bandwidths are in GB/s (10^9 bytes), the catalogue's being the vendor's peak and the
    measured one counting bytes read and written. `measured_with` is the framework that this device
    was timed with, "" where it was not; `measured_on` the day, where that was earlier.
    """

    observation: Observation
    family: str
    title: str
    dtypes: Mapping[DType, DTypeFact]
    source: tuple[str, ...] = ()
    memory_bandwidth_gbps: float | None = None
    measured_memory_bandwidth_gbps: float | None = None
    measured_with: str = ""
    measured_on: str = ""
    notes: tuple[str, ...] = ()
    padding: bool = True
    origin: str = ""

    @property
    def kind(self) -> DeviceKind:
        """Return the kind of device."""
        return self.observation.kind

    @property
    def name(self) -> str:
        """Return the device's own name, else its family's title."""
        return self.observation.name or self.title

    @property
    def address(self) -> str:
        """Return the device as a user names it: "cpu", "cuda:1"."""
        if self.kind in (DeviceKind.CPU, DeviceKind.MPS):
            return self.kind.value
        return f"{self.kind.value}:{self.observation.index}"

    @property
    def identity(self) -> str:
        """Return what identifies the device on this machine in every process.

        Visibility variables renumber devices, so "cuda:0" may be two devices in two processes.
        """
        uuid = self.observation.uuid
        return f"{self.kind.value}:{uuid}" if uuid else self.address

    def fact(self, dtype: DType) -> DTypeFact:
        """Return what is known of `dtype`; support unknown where nothing is."""
        return self.dtypes.get(dtype, DTypeFact())

    def alignment(self, dtype: DType) -> int:
        """Return the least multiple, in elements, that suits matrix dimensions of `dtype`."""
        return self.fact(dtype).alignment

    def measured_ratio(self, dtype: DType) -> float | None:
        """Measured speed of a product in `dtype` over float32's, where both were measured."""
        mine = self.fact(dtype).measured_gflops
        base = self.fact(DType.FLOAT32).measured_gflops
        return mine / base if mine is not None and base else None

    @property
    def fingerprint(self) -> Fingerprint:
        """Return what a profile is matched by."""
        seen = self.observation
        memory = round((seen.memory_bytes or 0) / GIB)
        return Fingerprint(
            self.kind,
            self.family,
            self.name,
            memory,
            seen.core_quota,
            seen.rehearsal,
            seen.partition,
        )


def merge(
    observation: Observation, family: Family, measured: Measurements | None = None
) -> DeviceFacts:
    """Merge what was seen with what is known: measured beats probed beats catalogue."""
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


def _dtype_fact(row: DTypeRow, seen: Observation, whole: bool) -> DTypeFact:
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
    if not (seen.features or seen.denied):
        fact = replace(fact, family_ratio=None)
        why = f"nothing could be read of its features, {' or '.join(row.requires)} among them"
        if seen.hypothetical:
            why = f"not every one has {' or '.join(row.requires)}"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    has = [name for name in row.requires if name in seen.features]
    found = [name for name in has if name not in seen.unused]
    if found[:1] != [row.requires[0]]:
        fact = replace(fact, family_ratio=None)
    if found:
        return replace(
            fact, evidence=Evidence.PROBED, reason=_join_reasons(f"has {found[0]}", row.reason)
        )
    if has:
        why = f"has {has[0]}, which a setting keeps libraries from using"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    if seen.partial_features:
        why = f"this system does not tell whether it has {' or '.join(row.requires)}"
        return replace(fact, support=Support.UNKNOWN, evidence=Evidence.PROBED, reason=why)
    denied = [name for name in row.requires if name in seen.denied]
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


def merge_repeated_products(measured: Measurements) -> Measurements:
    """Keep the faster of two products of a dtype; where they differ, mark all as disturbed."""
    found: dict[DType, Product] = {}
    notes = list(measured.notes)
    for product in measured.products:
        first = found.setdefault(product.dtype, product)
        low, high = sorted((first.gflops or 0.0, product.gflops or 0.0))
        if first is product or not low:
            continue
        found[product.dtype] = product if product.gflops == high else first
        if high > _DISTURBED_RATIO * low:
            notes.append(
                f"{product.dtype} products ran at {low:.3g} and at {high:.3g} GFLOP/s within "
                "seconds: another process uses this device, so the numbers are not comparable; "
                "measure again when it is idle"
            )
    return replace(
        measured,
        products=tuple(found.values()),
        notes=tuple(notes),
        disturbed=len(notes) > len(measured.notes),
    )


def format_ratio(ratio: float) -> str:
    """Format a ratio with two significant digits and without an exponent: "2.2x", "770x"."""
    return f"{float(f'{ratio:.2g}'):g}x"


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


def _join_reasons(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
