"""Defines the search space: the recipes that may be tried, as parameters of independent factors.

A point of the space is a mapping from parameter names to values (what Optuna stores); `recipe`
turns it into the Recipe it stands for. Batch sizes here are micro-batches; with an effective batch
only those that divide it are in the space.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import (
    COMPILE_MODE,
    COMPILE_SCOPE,
    FLOAT8,
    GRAPH_MODES,
    Alignment,
    Distributed,
    KnobValue,
    Recipe,
    may_use_float8,
    untuned_loss_scale,
)
from autoprec.core.speed.assumptions import SPEED
from autoprec.errors import UsageError

Point = Mapping[str, KnobValue]

BATCH = "batch_size"
ALIGNMENT = "alignment"
REDUCE_DTYPE = "reduce_dtype"

LARGEST_BATCH = 2**24

BATCH_SIZES = (
    'a list such as [16, 64, 256] or "16,64,256", or a range such as "8-1024", of integers from 1 '
    f"to {LARGEST_BATCH}"
)
"""What batch sizes may be given as, for messages."""


def point_key(point: Point) -> tuple[tuple[str, object], ...]:
    """Return a hashable identity of a point, whatever the order of its parameters."""
    return tuple(sorted(point.items()))


@dataclass(frozen=True)
class Space:
    """The factors of the search and their levels; the first level of each is the default.

    `effective_batch` is kept by accumulation where it is given. `alignments` are the paddings to
    choose from, each with a multiple of its own and the modules that are off it. `float32_modules`
    stay in float32 under every mixed policy, `islands` (by policy) those that one of them cannot
    run without. Among batches within `batch_share` of the most samples a second the smallest is
    taken. `distributed` is how the ranks of a job share a step, `rank_levels` what may be
    chosen of that, by field name. Where `float16_waits`, that policy is tried only after bfloat16
    has failed or was slow.
    """

    policies: tuple[Policy, ...]
    batch_sizes: tuple[int, ...]
    effective_batch: int | None = None
    memory_formats: tuple[str, ...] = ("contiguous",)
    compile: tuple[bool, ...] = (False,)
    knobs: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    float32_modules: tuple[str, ...] = ()
    islands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alignments: tuple[Alignment, ...] = (Alignment(),)
    distributed: Distributed | None = None
    rank_levels: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    batch_share: float = SPEED.knee_share
    float16_waits: bool = False

    def __post_init__(self) -> None:
        if not self.policies or not self.batch_sizes:
            raise UsageError("the search space is empty: give at least one policy and one batch")
        if self.effective_batch is not None:
            whole = self.effective_batch
            odd = [size for size in self.batch_sizes if whole % (size * self.world_size)]
            if odd:
                ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
                raise UsageError(
                    f"batch sizes {odd}{ranks} do not divide the task's own batch, {whole}; give "
                    "divisors of it, or let the task name none"
                )

    @property
    def world_size(self) -> int:
        """Return the number of ranks, each of which has a micro-batch of its own."""
        return 1 if self.distributed is None else self.distributed.world_size

    @property
    def whole_micro_batch(self) -> int | None:
        """Return the micro-batch that needs no accumulation; None where no batch has to be kept."""
        return None if self.effective_batch is None else self.effective_batch // self.world_size

    def levels(self) -> dict[str, tuple[KnobValue, ...]]:
        """Return every factor's levels by parameter name, the batch last."""
        return {
            "policy": tuple(policy.value for policy in self.policies),
            "memory_format": self.memory_formats,
            "compile": self.compile,
            **({ALIGNMENT: tuple(self._paddings)} if len(self.alignments) > 1 else {}),
            **self.rank_levels,
            **self.knobs,
            BATCH: self.batch_sizes,
        }

    def points(self) -> list[Point]:
        """Return every point of the space, in a fixed order; none that turns an idle knob."""
        levels = self.levels()
        every = (dict(zip(levels, values, strict=True)) for values in product(*levels.values()))
        return [p for p in every if not any(self._is_turned(p, name) for name in self._idle(p))]

    def recipe(self, point: Point) -> Recipe:
        """Return the recipe a point stands for, without the knobs that are idle there."""
        policy = Policy(str(point["policy"]))
        batch = int(point[BATCH])
        idle = self._idle(point)
        return Recipe(
            policy=policy,
            batch_size=batch,
            accumulation_steps=(self.whole_micro_batch or batch) // batch,
            float32_modules=self._float32_modules(policy),
            loss_scale=untuned_loss_scale(policy),
            memory_format="channels_last"
            if point["memory_format"] == "channels_last"
            else "contiguous",
            compile=bool(point["compile"]),
            alignment=self._paddings[int(point.get(ALIGNMENT, self.alignments[0].multiple))],
            knobs={
                name: point[name]
                for name in self.knobs
                if name not in idle and self._is_turned(point, name)
            },
            distributed=self._distributed(point, policy),
        )

    def _is_turned(self, point: Point, name: str) -> bool:
        return name in self.knobs and point[name] != self.knobs[name][0]

    def _idle(self, point: Point) -> tuple[str, ...]:
        """Return the knobs that a recipe at this point may not have, or that do nothing there."""
        compiled = bool(point["compile"])
        splits = self.effective_batch is not None and point[BATCH] != self.whole_micro_batch
        replays = point.get(COMPILE_MODE) in GRAPH_MODES
        idle = {
            FLOAT8: not may_use_float8(Policy(str(point["policy"])), compiled),
            COMPILE_MODE: not compiled or (splits and replays),
            COMPILE_SCOPE: not compiled,
        }
        return tuple(name for name, is_idle in idle.items() if is_idle)

    def _float32_modules(self, policy: Policy) -> tuple[str, ...]:
        """Return the modules that stay in float32 under a policy."""
        if not policy.mixed:
            return ()
        needed = self.islands.get(policy.value, ())
        return tuple(dict.fromkeys((*self.float32_modules, *needed)))

    def _distributed(self, point: Point, policy: Policy) -> Distributed | None:
        """Return how the ranks share a step at a point."""
        if self.distributed is None:
            return None
        chosen: dict[str, Any] = {name: point[name] for name in self.rank_levels}
        if REDUCE_DTYPE in chosen:
            chosen[REDUCE_DTYPE] = DType(chosen[REDUCE_DTYPE])
        return replace(self.distributed, **chosen).for_policy(policy)

    @property
    def _paddings(self) -> Mapping[int, Alignment]:
        return {alignment.multiple: alignment for alignment in self.alignments}

    def point(self, recipe: Recipe) -> Point:
        """Return the point that stands for a recipe: the inverse of `recipe` within the space."""
        return {
            "policy": recipe.policy.value,
            "memory_format": recipe.memory_format,
            "compile": recipe.compile,
            **({ALIGNMENT: recipe.alignment.multiple} if len(self.alignments) > 1 else {}),
            **{name: to_plain(getattr(recipe.distributed, name)) for name in self.rank_levels},
            **{name: recipe.knobs.get(name, levels[0]) for name, levels in self.knobs.items()},
            BATCH: recipe.batch_size,
        }


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return the powers of two from `low` to `high`, inclusive."""
    return tuple(2**e for e in range(high.bit_length() + 1) if low <= 2**e <= high)


def micro_batches(effective: int, *, low: int = 1) -> tuple[int, ...]:
    """Return the effective batch and its halves down to `low`, while they divide; largest last."""
    sizes = [effective]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= low:
        sizes.append(sizes[-1] // 2)
    return tuple(reversed(sizes))


def parse_batch_sizes(given: str | Iterable[int]) -> tuple[int, ...]:
    """Read integers, a text such as "8,16,64", or a range of powers of two "8-1024" ("8..1024")."""
    try:
        if not isinstance(given, str):
            sizes = tuple(operator.index(size) for size in given)
        elif (cleaned := given.replace("..", "-").replace(":", "-").replace(" ", "")).count("-"):
            low, high = (int(part) for part in cleaned.split("-"))
            sizes = (low, *powers_of_two(low, high), high) if low <= high else ()
        else:
            sizes = tuple(int(part) for part in cleaned.split(",") if part)
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > LARGEST_BATCH:
        raise UsageError(f"`batch_sizes` {given!r} given, expected {BATCH_SIZES}")
    return tuple(sorted(set(sizes)))
