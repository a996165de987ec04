"""Selects the further knobs worth trials: those that this device and this task make plausible.

A knob that cannot pay costs trials for nothing, so each has its condition here. What is plausible
is only tried; it stays in a recipe where it was measured to be faster, and what changes the
arithmetic is proven like any other recipe.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import ATTENTION, KEEP_MEMORY, KnobValue

#: Fused kernels make an optimizer's step two to four times faster on a CPU or a GPU, so below this
#: share of the whole step they cannot gain 2 %.
_OPTIMIZER_SHARE = 0.03

#: Calling a training function costs Keras one or two milliseconds (1.7 of 17 on a Zen 4, 2.4 of
#: 100), less than 3 % of a longer step.
SHORT_STEP_SECONDS = 0.05
STEPS_PER_EXECUTION, _STEPS_AT_ONCE = "steps_per_execution", 8

#: Below this many scores in a row attention is too small a part of a step for its kernel to matter.
_LONG_ATTENTION = 512

#: Kernels of attention that are worth a trial. PyTorch's own order among them is for all shapes and
#: versions the same; "math" keeps every score and is slowest at such lengths.
_ATTENTION_KERNELS: Mapping[DeviceKind, tuple[str, ...]] = {
    DeviceKind.CUDA: ("flash", "cudnn", "efficient"),
    DeviceKind.ROCM: ("flash", "efficient"),
}


def plausible_knobs(
    facts: DeviceFacts, task: TaskFacts, searched: Collection[str]
) -> Mapping[str, tuple[KnobValue, ...]]:
    """Return the knobs to try by name, each with its levels, the default first.

    `searched` are the knobs that the task's framework lets a search try.
    """
    found = _plausible_anywhere(facts, task)
    return {name: levels for name, levels in found.items() if name in searched}


def _plausible_anywhere(facts: DeviceFacts, task: TaskFacts) -> Mapping[str, tuple[KnobValue, ...]]:
    """Return the knobs that would be plausible if the framework had all of them."""
    found: dict[str, tuple[KnobValue, ...]] = {}
    if task.optimizer_share >= _OPTIMIZER_SHARE:
        found["fused_optimizer"] = (False, True)
    if facts.kind is DeviceKind.CPU:
        if task.keepable_memory:
            found[KEEP_MEMORY] = (False, True)
        fewer = _fewer_threads(facts, task.threads)
        if fewer is not None:
            found["threads"] = (task.threads, fewer)
        if facts.fact(DType.BFLOAT16).support is Support.NATIVE:
            found["implicit_bfloat16"] = (False, True)
    if facts.kind is DeviceKind.CUDA and task.convolutions:
        found["cudnn_benchmark"] = (False, True)
    if facts.kind in _ATTENTION_KERNELS and task.attention_length >= _LONG_ATTENTION:
        found[ATTENTION] = ("default", *_ATTENTION_KERNELS[facts.kind])
    if task.steps_per_execution == 1 and 0 < task.step_seconds < SHORT_STEP_SECONDS:
        found[STEPS_PER_EXECUTION] = (1, _STEPS_AT_ONCE)
    return found


def wanted_multiples(facts: DeviceFacts, policies: Sequence[Policy]) -> tuple[int, ...]:
    """Return the multiples, in elements, worth padding dimensions to: the least, then the best.

    Of the dtypes that `policies` compute in and the device has hardware for, the largest of each;
    one where both are the same, none where padding is not plausible on such a device.
    """
    known = [facts.fact(policy.compute_dtype) for policy in policies]
    native = [fact for fact in known if fact.support is Support.NATIVE]
    if not facts.padding or not native:
        return ()
    least = max(fact.alignment for fact in native)
    best = max(fact.best_alignment for fact in native)
    return tuple(multiple for multiple in sorted({least, best}) if multiple > 1)


def _fewer_threads(facts: DeviceFacts, threads: int) -> int | None:
    """Return the processors that this process really has, if the framework starts more threads.

    A quota of CPU time stops every thread of a process together, and two threads of one core share
    its matrix unit.
    """
    observed = facts.observation
    quota = None if observed.core_quota is None else max(1, math.floor(observed.core_quota))
    known = [count for count in (quota, observed.cores, observed.usable_cores) if count]
    fewest = min(known, default=threads)
    return fewest if 0 < fewest < threads else None
