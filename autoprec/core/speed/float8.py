"""Decides whether float8 is worth trials: products of wide linear layers in a compiled recipe.

A cast to float8 reads a tensor twice, once for its largest magnitude. Where a layer is narrow, or
the casts are no part of compiled code, they cost more than the product saves: published training
runs range from 1.35 times bfloat16's speed in wide layers to a quarter of it without a compiler
(torchao and llm-foundry's benchmarks, nanochat's log).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.number_words import percent

SMALLEST_WIDTH = 2048
"""Both widths of a linear layer must be this large: published gains begin there."""

WIDTH_MULTIPLE = 16
"""Both widths must be multiples of this: `torch._scaled_mm` takes no others."""

_SMALLEST_SHARE = 0.5
"""Of the model's matrix products, this share must be in such layers."""


def is_wide(in_features: int, out_features: int) -> bool:
    """Say whether a linear layer of these widths may multiply in float8."""
    widths = (in_features, out_features)
    return min(widths) >= SMALLEST_WIDTH and not any(width % WIDTH_MULTIPLE for width in widths)


def is_told_of(facts: DeviceFacts) -> bool:
    """Say whether users of such a device are told why float8 is not tried: those of GPUs."""
    return facts.kind in (DeviceKind.CUDA, DeviceKind.ROCM)


def float8_objections(
    facts: DeviceFacts,
    task: TaskFacts,
    policies: Sequence[Policy],
    *,
    compiled: bool,
    sharded: bool = False,
) -> tuple[str, ...]:
    """Return why float8 is not tried, what changes last first; empty means that it is.

    `compiled` says whether the search compiles, `sharded` whether ranks share the weights.
    """
    device = _of_device(facts)
    if device:
        return (device,)
    return tuple(_of_task(task, policies, compiled=compiled, sharded=sharded))


def _of_device(facts: DeviceFacts) -> str:
    fact = facts.fact(DType.FLOAT8)
    reason = f": {fact.reason}" if fact.reason else ""
    if fact.support is not Support.NATIVE:
        return f"float8 is {fact.support} on this device{reason}"
    if facts.kind is not DeviceKind.CUDA:
        return f"float8 is built for CUDA alone{reason}"
    return ""


def _of_task(
    task: TaskFacts, policies: Sequence[Policy], *, compiled: bool, sharded: bool
) -> Iterator[str]:
    linear = _linear_layers(task)
    if not task.float8_layers:
        widest = max(linear, key=lambda widths: (min(widths), max(widths)), default=None)
        seen = "there is none" if widest is None else f"the widest is {widest[0]} x {widest[1]}"
        yield (
            f"no linear layer between the first and the last is {SMALLEST_WIDTH} or more wide on "
            f"both sides, in multiples of {WIDTH_MULTIPLE} ({seen}): narrower ones lose more by "
            "casts than they gain"
        )
    else:
        known = {unit.path: unit.products for unit in task.units}
        share = sum(known.get(path, 0.0) for path in task.float8_layers)
        if any(known.values()) and share < _SMALLEST_SHARE:
            yield (
                f"{len(task.float8_layers)} of {len(linear)} linear layers are wide enough, with "
                f"{percent(share)} of the model's products; half of them are needed"
            )
    if sharded:
        yield "FSDP2 shards the weights, which float8 scales as a whole"
    if Policy.MIXED_BFLOAT16 not in policies:
        yield f"it refines {Policy.MIXED_BFLOAT16}, which is not tried"
    if not compiled:
        yield (
            "it is tried in compiled recipes alone (--compile): casts that are no part of compiled "
            "code cost more than the product saves"
        )


def _linear_layers(task: TaskFacts) -> list[tuple[int, int]]:
    """Return the widths of every linear layer, in and out."""
    sizes: dict[str, dict[str, int]] = {}
    for each in task.dimensions:
        sizes.setdefault(each.module, {})[each.name] = each.size
    names = ("in_features", "out_features")
    return [
        (found[names[0]], found[names[1]])
        for found in sizes.values()
        if all(name in found for name in names)
    ]
