"""A recipe: everything that applying a precision to a training loop needs, as one frozen value.

The field names are the profile file's contract (`recipe:`); none is renamed without a new schema
version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoprec.core.codec import abbreviate, bounded, did_you_mean, to_plain
from autoprec.core.dtypes import DType, Policy
from autoprec.errors import UsageError

KnobValue = bool | int | str

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**126
"""The loss scales that there are, floors included: beyond the largest, half of what a doubling
gives would be infinite."""

DEFAULT_SCALE = 2.0**16
"""The initial loss scale if none was tuned: that of torch.amp.GradScaler (`init_scale`). Keras's
LossScaleOptimizer starts at 2**15; if both are too large, the difference is one skipped step."""

GROWTH_INTERVAL = 2000
"""Good steps before a loss scale is doubled: the default of both."""


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled before the backward pass, so that float16 gradients do not underflow.

    `initial`, `growth_interval`, and halving on overflow are those of torch.amp.GradScaler and
    keras.optimizers.LossScaleOptimizer; `floor` is ours: the scale is not halved below it, which
    would help no forward pass that overflows.
    """

    mode: Literal["dynamic", "fixed"] = "dynamic"
    initial: float = bounded(default=DEFAULT_SCALE, low=SMALLEST_SCALE, high=LARGEST_SCALE)
    growth_interval: int = bounded(default=GROWTH_INTERVAL, low=1, high=2**31)
    floor: float = bounded(default=1.0, low=SMALLEST_SCALE, high=LARGEST_SCALE)


def untuned_loss_scale(policy: Policy) -> LossScale | None:
    """Return the loss scale of a policy if none was tuned; None if it needs none."""
    return LossScale() if policy.needs_loss_scale else None


@dataclass(frozen=True)
class Alignment:
    """Compute-time padding: which modules are padded, and to which multiple."""

    multiple: int = bounded(default=1, low=1, high=4096)
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Distributed:
    """How the processes of one training job share a step: one process (rank) a device.

    `engine` is DistributedDataParallel or FSDP2's `fully_shard`; replicas of a Keras strategy are
    "mirrored". Gradients are reduced over the ranks in `reduce_dtype`, in buckets of `bucket_mb`
    MiB (torch's default is 25). With FSDP2, `param_dtype` is what `MixedPrecisionPolicy` gathers
    and computes in (None: as stored, so that autocast alone casts), and `reshard_after_forward`
    frees gathered parameters between forward and backward. `sync_each_microbatch` reduces in every
    micro-batch, not only on the accumulation boundary: it saves FSDP2 the memory of whole
    gradients.
    """

    engine: Literal["ddp", "fsdp2", "mirrored"] = "ddp"
    world_size: int = bounded(default=1, low=1, high=2**20)
    param_dtype: DType | None = None
    reduce_dtype: DType = DType.FLOAT32
    bucket_mb: int = bounded(default=25, low=1, high=2**20)
    reshard_after_forward: bool = True
    sync_each_microbatch: bool = False

    def for_policy(self, policy: Policy) -> Distributed:
        """Return how ranks share a step under a policy; FSDP2 gathers what that computes in."""
        gathered = self.engine == "fsdp2" and policy is Policy.MIXED_BFLOAT16
        return replace(self, param_dtype=DType.BFLOAT16 if gathered else None)

    def in_float32(self) -> Distributed:
        """Return the same without any rounding, and everything else at its default."""
        return Distributed(self.engine, self.world_size)

    @property
    def rounds_gradients(self) -> bool:
        """Return whether gradients are rounded to 16 bits on their way between ranks."""
        return self.reduce_dtype is not DType.FLOAT32


@dataclass(frozen=True)
class Recipe:
    """Everything `apply_profile` needs.

    `policy` may be given by any name that `--policies` understands. `batch_size` is the samples of
    one step on one device (the micro-batch); `batch_size * accumulation_steps`, times the ranks of
    `distributed`, is the effective batch. `distributed` is None for training in one process.
    `float32_modules` are the islands, by module path. `knobs` holds whatever else was measured to
    pay, from the closed list `KNOBS`.
    """

    policy: Policy = Policy.FLOAT32
    batch_size: int = bounded(default=32, low=1, high=2**31)
    accumulation_steps: int = bounded(default=1, low=1, high=2**20)
    float32_modules: tuple[str, ...] = ()
    alignment: Alignment = field(default_factory=Alignment)
    loss_scale: LossScale | None = None
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    compile: bool = False
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    forced: bool = False
    distributed: Distributed | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", Policy.parse(str(self.policy)))
        for name, value in self.knobs.items():
            check_knob(name, value)
        mode = self.knobs.get(COMPILE_MODE)
        if self.compile and self.accumulation_steps > 1 and mode in GRAPH_MODES:
            raise UsageError(
                f"{COMPILE_MODE} {mode!r} with accumulation_steps {self.accumulation_steps} given, "
                "expected 1 step: that mode replays CUDA graphs, which may overwrite what earlier "
                f"micro-batches left. Give {COMPILE_MODE} 'default', or a batch that is not split"
            )
        if self.uses_float8 and not may_use_float8(self.policy, self.compile):
            raise UsageError(
                f"setting {FLOAT8} with policy {self.policy} and compile {self.compile} given, "
                f"expected policy {Policy.MIXED_BFLOAT16} and compile True: it refines compiled "
                f"bfloat16. Set both, or leave {FLOAT8} out"
            )

    @property
    def effective_batch(self) -> int:
        """Return the samples the optimizer sees in one update, over all ranks."""
        return self.batch_size * self.accumulation_steps * self.world_size

    @property
    def world_size(self) -> int:
        """Return the number of ranks that train together."""
        return 1 if self.distributed is None else self.distributed.world_size

    @property
    def settings(self) -> dict[str, KnobValue]:
        """Return what it sets besides policy and batch, by parameter of the search."""
        return {
            "memory_format": self.memory_format,
            "compile": self.compile,
            "alignment": self.alignment.multiple if self.alignment.modules else 1,
            **communication_settings(self),
            **self.knobs,
        }

    @property
    def applied_loss_scale(self) -> LossScale | None:
        """Return how the loss is scaled: always under float16, never otherwise."""
        untuned = untuned_loss_scale(self.policy)
        return untuned and (self.loss_scale or untuned)

    @property
    def keeps_memory(self) -> bool:
        """Return whether the process that applies this keeps its freed memory from then on."""
        return self.knobs.get(KEEP_MEMORY) is True

    @property
    def uses_float8(self) -> bool:
        """Return whether wide linear layers multiply in float8."""
        return self.knobs.get(FLOAT8) is True

    def key(self) -> str:
        """Return a canonical text: equal recipes have equal keys."""
        return json.dumps(plain_recipe(self), sort_keys=True)

    def plain(self) -> Recipe:
        """Return plain float32 at the same batch, for one process."""
        return Recipe(batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)

    def in_float32(self) -> Recipe:
        """Return plain float32 at the same batch, on as many ranks with the same engine."""
        ranks = None if self.distributed is None else self.distributed.in_float32()
        return replace(self.plain(), distributed=ranks)

    def with_policy(self, policy: Policy) -> Recipe:
        """Return this recipe under another policy: its default loss scale, no islands or float8."""
        ranks = None if self.distributed is None else self.distributed.for_policy(policy)
        return replace(
            self,
            policy=policy,
            loss_scale=untuned_loss_scale(policy),
            float32_modules=(),
            knobs={name: value for name, value in self.knobs.items() if name != FLOAT8},
            distributed=ranks,
        )


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain values, without `distributed` if it is for one process.

    So recipes of one process read, and are named in studies, as before there were others.
    """
    plain: dict[str, Any] = to_plain(recipe)
    if recipe.distributed is None:
        del plain["distributed"]
    return plain


#: What `Distributed` says of how gradients and parameters travel; a tuning tries some of it.
_COMMUNICATION = ("reduce_dtype", "bucket_mb", "reshard_after_forward", "sync_each_microbatch")


def communication_settings(recipe: Recipe) -> dict[str, KnobValue]:
    """Return how ranks communicate, by field name, as far as it is not the default."""
    if recipe.distributed is None:
        return {}
    plain: dict[str, KnobValue] = to_plain(recipe.distributed)
    return {
        name: plain[name]
        for name in _COMMUNICATION
        if not is_default_communication(name, plain[name])
    }


def is_default_communication(name: str, value: KnobValue) -> bool:
    """Return whether `name` is a field of `Distributed` that is searched, and this its default."""
    return name in _COMMUNICATION and value == to_plain(getattr(Distributed(), name))


@dataclass(frozen=True)
class Knob:
    """What a further knob may hold. Which frameworks have it, their `Capabilities` say."""

    values: tuple[KnobValue, ...] = ()
    low: int = 0
    high: int = 0
    meaning: str = ""


COMPILE_MODE = "compile_mode"

#: Modes of torch.compile that capture CUDA graphs. A graph's memory is written anew at each replay,
#: so gradients that are summed up over micro-batches were wrong without a word (pytorch#96693), or
#: a RuntimeError (pytorch#169545).
GRAPH_MODES = ("reduce-overhead", "max-autotune")

#: What is compiled: the model, or each of its equal blocks, which then share what is compiled.
COMPILE_SCOPE, BLOCKS = "compile_scope", "blocks"

#: The kernel that `scaled_dot_product_attention` prefers, where the device has several.
ATTENTION = "attention"

#: The only knob that a process cannot undo.
KEEP_MEMORY = "keep_memory"

#: Refines one policy, in what is compiled; see `may_use_float8`.
FLOAT8 = "float8"

KNOBS: Mapping[str, Knob] = {
    "threads": Knob(low=1, high=4096, meaning="intra-op CPU threads"),
    COMPILE_MODE: Knob(("default", *GRAPH_MODES), meaning="mode of torch.compile"),
    COMPILE_SCOPE: Knob(("model", BLOCKS), meaning="compile the model, or its equal blocks"),
    ATTENTION: Knob(
        ("default", "flash", "efficient", "cudnn", "math"),
        meaning="preferred kernel of scaled_dot_product_attention",
    ),
    "fused_optimizer": Knob((True, False), meaning="fused=True in the optimizer's groups"),
    "cudnn_benchmark": Knob((True, False), meaning="torch.backends.cudnn.benchmark"),
    "implicit_bfloat16": Knob(
        (True, False),
        meaning="oneDNN computes float32 products in bfloat16 (mkldnn fp32_precision)",
    ),
    FLOAT8: Knob((True, False), meaning="wide linear layers multiply in float8"),
    KEEP_MEMORY: Knob(
        (True, False),
        meaning="freed main memory stays with the process (glibc's mallopt), for good",
    ),
    "steps_per_execution": Knob(low=1, high=4096, meaning="compile(steps_per_execution)"),
}


def may_use_float8(policy: Policy, compiled: bool) -> bool:
    """Say whether a recipe may hold `FLOAT8`.

    What stays out of float8 runs in bfloat16, and only a compiler makes its casts cheap.
    """
    return policy is Policy.MIXED_BFLOAT16 and compiled


def check_knob(name: str, value: KnobValue) -> None:
    """Raise `UsageError` unless `name` is a knob and `value` one it may hold."""
    knob = KNOBS.get(name)
    if knob is None:
        raise UsageError(
            f"unknown setting {abbreviate(name)}{did_you_mean(name, KNOBS)} "
            f"(known: {', '.join(KNOBS)})"
        )
    if knob.values:
        if not any(value == v and type(value) is type(v) for v in knob.values):
            allowed = ", ".join(str(v) for v in knob.values)
            raise UsageError(
                f"setting {name}: {abbreviate(value)} given, expected one of {allowed}"
            )
    elif type(value) is not int or not knob.low <= value <= knob.high:
        raise UsageError(
            f"setting {name}: {abbreviate(value)} given, expected an integer from {knob.low} to "
            f"{knob.high}"
        )
