"""Decides whether steps are worth replaying as CUDA graphs: torch.compile's `reduce-overhead`.

A graph launches all kernels of a step at once, which gains where launches bound the step. Each
replay writes into the same memory: what should outlive the step is lost, and other shapes are
captured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.number_words import milliseconds
from autoprec.core.speed.step_bounds import estimate_steps

GRAPH_KINDS = (DeviceKind.CUDA, DeviceKind.ROCM)
"""The devices that have graphs."""


def graph_dangers(task: TaskFacts) -> tuple[str, ...]:
    """Return why no recipe of the task may replay graphs; empty where those without splits may."""
    return tuple(_dangers(task))


def _dangers(task: TaskFacts) -> Iterator[str]:
    if task.surveyed:
        yield "batches differ in shape, and every shape is captured anew"
    if task.keeps_outputs:
        yield (
            "the task keeps outputs of the model beyond the step, which the next replay overwrites"
        )


def graph_objections(
    facts: DeviceFacts, task: TaskFacts, policies: Sequence[Policy], batch: int, *, compiled: bool
) -> tuple[str, ...]:
    """Return why graphs are not tried; empty means that they are.

    `batch` is the largest that may be tried, and `compiled` says whether the search compiles.
    """
    if facts.kind not in GRAPH_KINDS:
        return (f"CUDA graphs are not built for {facts.kind}",)
    if not compiled:
        return ("it is a mode of the compiler, which is not tried",)
    dangers = graph_dangers(task)
    if dangers:
        return dangers
    estimated = estimate_steps(task, facts, policies, (batch,))
    if not estimated:
        return ("what the step's kernels take here is not known",)
    quickest = min(estimated, key=lambda each: each.computing_seconds)
    if quickest.computing_seconds <= quickest.framework_launch_seconds:
        return ()
    return (
        f"at batch {batch} the step's kernels compute for at least "
        f"{milliseconds(quickest.computing_seconds)}, longer than launching them takes "
        f"({milliseconds(quickest.framework_launch_seconds)})",
    )
