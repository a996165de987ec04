"""A model made of formulas: what it would cost on a device, and how its training would go.

A task file whose build_model returns a `SimulatedModel` is tuned without a framework or a device,
in a real worker process: its fields give step times, memory, numerics and faults. The numbers are
invented; nothing measured may come from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoprec.core.recipe import Recipe


@dataclass(frozen=True)
class SimulatedModel:
    """What training would cost and do.

    A step of b samples takes `overhead[policy] + per_sample[policy] * b` seconds, times
    `channels_last` and `compiled` where these are on, times a noise of relative size `noise`; all
    steps of one timing share another one of size `drift`, as machines drift. Memory is
    `base_bytes + bytes_per_sample * b`; above `capacity_bytes` the step is out of memory.

    `broken` policies train visibly worse than float32, `nonfinite` ones give NaN; either trains
    well with `sensitive_module` kept in float32. With `compiler_breaks` every compiled recipe
    trains worse, and with `layout_breaks` channels_last computes something else.

    On several ranks an update waits `reduction_seconds` for their gradients, half as long where
    they are rounded to 16 bits; with `reduction_breaks` training goes wrong then.

    `gradient_noise` is the gradient noise scale, in samples (None: gradients do not tell).

    From the batch sizes `crash_at_batch`, `hang_at_batch` and `exit_at_batch` on, the process dies
    by SIGSEGV, hangs, or exits. A step really takes `sleep_seconds`, and after `hang_after_steps`
    of one timing no further step ends. With `allocate_memory` memory is really allocated, page by
    page.
    """

    overhead: Mapping[str, float] = field(default_factory=lambda: {"float32": 0.002})
    per_sample: Mapping[str, float] = field(default_factory=lambda: {"float32": 0.0005})
    channels_last: float = 1.0
    compiled: float = 1.0
    noise: float = 0.01
    drift: float = 0.0
    base_bytes: int = 200 * 2**20
    bytes_per_sample: int = 2**20
    capacity_bytes: int = 8 * 2**30
    broken: tuple[str, ...] = ()
    compiler_breaks: bool = False
    layout_breaks: bool = False
    nonfinite: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    sensitive_module: str = ""
    units: tuple[str, ...] = ("encoder", "norm", "head")
    convolutions: bool = False
    splittable: bool = True
    samples: int | None = None
    crash_at_batch: int | None = None
    hang_at_batch: int | None = None
    exit_at_batch: int | None = None
    sleep_seconds: float = 0.0
    hang_after_steps: int | None = None
    allocate_memory: bool = False
    reduction_seconds: float = 0.0
    reduction_breaks: bool = False
    gradient_noise: float | None = None

    def step_seconds(self, policy: str, batch: int, layout: str, compiled: bool) -> float:
        """Return the seconds of one micro-batch, without noise."""
        overhead = self.overhead.get(policy, self.overhead["float32"])
        each = self.per_sample.get(policy, self.per_sample["float32"])
        seconds = overhead + each * batch
        if layout == "channels_last":
            seconds *= self.channels_last
        return seconds * (self.compiled if compiled else 1.0)

    def reduction(self, recipe: Recipe) -> float:
        """Return the seconds that an update waits for the gradients of other ranks."""
        if recipe.distributed is None:
            return 0.0
        return self.reduction_seconds * (0.5 if recipe.distributed.rounds_gradients else 1.0)

    def peak_bytes(self, batch: int) -> int:
        """Return the peak memory of a micro-batch."""
        return self.base_bytes + self.bytes_per_sample * batch
