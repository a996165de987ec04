"""A row of the catalogue: which devices it describes, and what is known of them.

Nothing here knows a device by its name: the rows are data (`profiles/devices/`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autoprec.core.codec import abbreviate, bounded
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import DType

#: Longer than any name needs; compiling a pattern takes time that grows with its length.
_MAX_PATTERN_LENGTH = 500


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
    times as fast as float32's products were when autoprec measured such a device; it holds if
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
