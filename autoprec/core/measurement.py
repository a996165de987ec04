"""What a worker measured of a task and of one recipe, as plain values to base decisions on.

Units are in the names: seconds, bytes, samples. A `Measurement` is one trial's timing; `TaskFacts`
is what preflight learned of the task before any recipe was tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoprec.core.ratio import Ratio


@dataclass(frozen=True)
class Measurement:
    """One recipe's training step, timed.

    `step_seconds` is the median of the steady steps (an optimizer step with all its accumulated
    micro-batches), `low` and `high` the 95 % interval of that median. `samples_per_step` is
    counted, not assumed. `data_seconds` is what the user's loader takes for one step, measured
    apart. `warmup_seconds` is everything before the first steady step: compilation, page faults.
    `exposed_communication` is the share of the step, from 0 to 1, that the slowest rank waits for
    gradients of others (None: it trains alone, or that was not measured).
    """

    step_seconds: float
    low: float
    high: float
    steps: int
    samples_per_step: float
    peak_memory_bytes: int = 0
    data_seconds: float = 0.0
    warmup_seconds: float = 0.0
    warmup_steps: int = 0
    finite: bool = True
    notes: tuple[str, ...] = ()
    exposed_communication: Ratio | None = None

    @property
    def samples_per_second(self) -> float:
        """Return the throughput of the training step, without the loader's time."""
        return self.samples_per_step / self.step_seconds

    @property
    def loader_feeds(self) -> float:
        """Return how many samples a second the loader feeds; infinite if it takes no time."""
        return self.samples_per_step / self.data_seconds if self.data_seconds > 0 else math.inf


@dataclass(frozen=True)
class Dimension:
    """One dimension of a matrix product in the model: where it is and how large."""

    module: str
    kind: str
    name: str
    size: int


@dataclass(frozen=True)
class Unit:
    """The own code of one module: what can be an island.

    `products` is the module's share of the model's matrix-product work, from 0 to 1;
    `own_code` whether the module computes anything besides calling its children.
    """

    path: str
    kind: str
    products: float = 0.0
    own_code: bool = True


@dataclass(frozen=True)
class Kernel:
    """One operator of a float32 training step, or `count` of the same size; views are none.

    Its floating-point operations, and the bytes it reads and writes: those that grow with the batch
    for each sample, and `fixed_bytes` those of weights and their gradients.
    """

    flops_per_sample: float
    bytes_per_sample: float
    fixed_bytes: int
    count: int = 1


@dataclass(frozen=True)
class OperatorTime:
    """An operator's part of a step: its share of all operators' own time, from 0 to 1.

    `dtype` is what its inputs are kept in, "" if it has none or several; `updates` says that it
    is part of the optimizer's update.
    """

    name: str
    dtype: str
    share: float
    updates: bool = False


@dataclass(frozen=True)
class TaskFacts:
    """What one float32 step showed of the task.

    `samples` is the count in a typical batch when `nominal` samples were requested.
    `splittable` says whether the accumulated gradient of two halves equals the unsplit one in
    several batches; `split_reason` why not, and `fixed_batch` that the model trains at no other
    batch size either. `surveyed` is how many batches were looked at if their shapes differ: a
    session looks at as many (0: all had the same, None: not known).
    `flops_per_sample` counts forward and backward (None: unknown),
    `saved_bytes_per_sample` what float32's forward pass keeps for the backward pass, weights
    left out, `most_saved_bytes_per_sample` the same of the longest batches if batches differ
    (0: they do not), `most_kernel_bytes_per_sample` what the largest kernel of those moves,
    `trainable_bytes` the weights that an update changes, `optimizer_bytes`
    what the optimizer keeps for them (0: not counted). `kernels` are what one forward and
    backward pass runs, and `slow_operator` the operator that takes at least half of the step,
    with its share (empty: none does, or none was timed). `low_precision` names what is not
    plain float32 without any recipe, empty if there is nothing: 16-bit or float64 weights,
    an autocast of the model's own, rounded float32 products; `weights_in` is the 16-bit dtype
    that it then computes in mostly, empty if in none; `uses_tf32` says that those
    products are TF32; `convolutions_in` is what float32's convolutions may be rounded to, empty
    if there are none or nothing rounds them; `compiled` says that the model compiles its
    step itself;
    `not_compilable` says why its framework would not (empty: it would, or that is not known).
    `update_seconds` is the optimizer's part of `step_seconds` (0: not known), and `optimizer_share`
    that as a share, from 0 to 1, if fused kernels exist for it and the task does not choose
    between kernels itself; `threads` the framework's intra-op
    CPU threads and `steps_per_execution` what the task compiled with, 0 if it has none.
    `float8_layers` are the paths of the linear layers that could multiply in float8, and
    `equal_blocks` those of the modules that make up most of the model and compile alike.
    `attention_length` is the longest row of scores that a fused kernel of attention computed
    (0: none did, or scores drop out, which every kernel does otherwise), and `keeps_outputs`
    says that the task's code holds what the model returned beyond the step.
    `keepable_memory` says whether the process allocates main memory from a C library that can be
    told to keep what is freed.
    `warnings` are for the user, each with what to do.
    """

    framework: str
    software: Mapping[str, str]
    nominal: int
    samples: int
    parameters: int
    parameter_bytes: int = 0
    batch_size: int | None = None
    convolutions: bool = False
    splittable: bool = True
    split_reason: str = ""
    fixed_batch: bool = False
    surveyed: int | None = None
    flops_per_sample: float | None = None
    saved_bytes_per_sample: float = 0.0
    most_saved_bytes_per_sample: float = 0.0
    most_kernel_bytes_per_sample: float = 0.0
    trainable_bytes: int = 0
    optimizer_bytes: int = 0
    kernels: tuple[Kernel, ...] = ()
    slow_operator: str = ""
    slow_operator_share: float = 0.0
    low_precision: str = ""
    weights_in: str = ""
    convolutions_in: str = ""
    uses_tf32: bool = False
    compiled: bool = False
    not_compilable: str = ""
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    optimizer_share: float = 0.0
    threads: int = 0
    steps_per_execution: int = 0
    keepable_memory: bool = False
    float8_layers: tuple[str, ...] = ()
    equal_blocks: tuple[str, ...] = ()
    attention_length: int = 0
    keeps_outputs: bool = False
    has_evaluate: bool = False
    dimensions: tuple[Dimension, ...] = ()
    units: tuple[Unit, ...] = ()
    warnings: tuple[str, ...] = field(default=())
