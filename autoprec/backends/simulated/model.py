"""A model made of formulas: what a device would take for it, and how its training would go.

A task file whose build_model returns a `SimulatedModel` is tuned without a framework or a device,
in a real worker process: step times, memory, numerics and faults are as written down here. The
numbers are made up; nothing measured may come from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SimulatedModel:
    """What training would cost and do.

    A step of b samples takes `overhead[policy] + per_sample[policy] * b` seconds, times
    `channels_last` and `compiled` where these are on, times a noise of relative size `noise`; the
    steps of one timing are together off by another of size `wander`, as machines drift.
    Memory is `base_bytes + bytes_per_sample * b`; above `capacity_bytes` the step is out of memory.
    `broken` policies train visibly worse than float32, `nonfinite` ones give NaN; either is mended
    if `culprit` is kept in float32. With `compiler_breaks` every compiled recipe trains worse.
    `crash_at`, `hang_at` and `exit_at` name a batch from which on the process dies by SIGSEGV,
    hangs, or exits. `sleep` makes a step really take so many seconds, and after `hang_after` steps
    of one timing no further one ends. With `allocate` the memory is really taken, page by page.
    """

    overhead: Mapping[str, float] = field(default_factory=lambda: {"float32": 0.002})
    per_sample: Mapping[str, float] = field(default_factory=lambda: {"float32": 0.0005})
    channels_last: float = 1.0
    compiled: float = 1.0
    noise: float = 0.01
    wander: float = 0.0
    base_bytes: int = 200 * 2**20
    bytes_per_sample: int = 2**20
    capacity_bytes: int = 8 * 2**30
    broken: tuple[str, ...] = ()
    compiler_breaks: bool = False
    nonfinite: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    culprit: str = ""
    units: tuple[str, ...] = ("encoder", "norm", "head")
    convolutions: bool = False
    splittable: bool = True
    samples: int | None = None
    crash_at: int | None = None
    hang_at: int | None = None
    exit_at: int | None = None
    sleep: float = 0.0
    hang_after: int | None = None
    allocate: bool = False

    def step_seconds(self, policy: str, batch: int, layout: str, compiled: bool) -> float:
        """Return the seconds of one micro-batch, without noise."""
        overhead = self.overhead.get(policy, self.overhead["float32"])
        each = self.per_sample.get(policy, self.per_sample["float32"])
        seconds = overhead + each * batch
        if layout == "channels_last":
            seconds *= self.channels_last
        return seconds * (self.compiled if compiled else 1.0)

    def peak_bytes(self, batch: int) -> int:
        """Return the peak memory of a micro-batch."""
        return self.base_bytes + self.bytes_per_sample * batch
