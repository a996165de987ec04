"""How much memory a worker may use, and how long a tuning waits for other processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.backends.protocol import USABLE_FREE_MEMORY_SHARE, DeviceMemory
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.tuning.events import Event, Note
from autoprec.tuning.flow.tuner import with_memory
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.race.interleaved_timing import fit_in_memory_together
from autoprec.tuning.time_limit import Deadline
from autoprec.workers import memory_limit
from autoprec.workers.cpu_contention import PATIENCE_SECONDS
from autoprec.workers.task_source import TaskSource

GIB = 2**30


def job(events: list[Event], kind: DeviceKind = DeviceKind.CUDA, **options: Any) -> TuningJob:
    seen = Observation(kind=kind, memory_bytes=80 * GIB)
    facts = cast(Any, SimpleNamespace(kind=kind, observation=seen))
    target = cast(Target, SimpleNamespace(facts=facts))
    return TuningJob(TaskSource(Path("task.py")), target, Options(**options), events.append)


def test_an_accelerators_budget_is_of_what_is_free_and_of_all_where_nobody_tells() -> None:
    before = job([])
    assert before.memory_bytes == int(USABLE_FREE_MEMORY_SHARE * 80 * GIB)
    assert with_memory(before, None).memory_bytes == int(USABLE_FREE_MEMORY_SHARE * 80 * GIB)
    free = DeviceMemory(free=20 * GIB, others=0)
    assert with_memory(before, free).memory_bytes == int(USABLE_FREE_MEMORY_SHARE * 20 * GIB)
    asked = job([], memory_bytes=GIB)
    assert with_memory(asked, free).memory_bytes == GIB


def test_main_memory_is_what_was_free_before_the_first_worker_took_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limit, "control_group_headroom", lambda machine: ())
    monkeypatch.setattr(memory_limit, "_resource_limits", list)
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 50 * GIB)
    before = job([], DeviceKind.CPU)
    assert before.memory_bytes == 45 * GIB
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 30 * GIB)
    assert replace(before, surveyed=8).memory_bytes == 45 * GIB


@pytest.mark.parametrize(("others", "notes"), [(0, 0), (30 * GIB, 1)])
def test_others_on_the_device_are_told_of_once(others: int, notes: int) -> None:
    events: list[Event] = []
    with_memory(job(events), DeviceMemory(free=50 * GIB, others=others))
    assert len([e for e in events if isinstance(e, Note) and e.warning]) == len(events) == notes


@pytest.mark.parametrize(
    ("kind", "policy", "fit"),
    [
        (DeviceKind.CUDA, Policy.TF32, False),  # which is set for a whole process
        (DeviceKind.CUDA, Policy.MIXED_BFLOAT16, True),
        (DeviceKind.CPU, Policy.FLOAT32, True),
    ],
)
def test_each_worker_has_a_context_of_its_own(kind: DeviceKind, policy: Policy, fit: bool) -> None:
    findings = cast(Any, SimpleNamespace(framework="keras", peak_memory_of=lambda _: GIB // 4))
    two = [Recipe(policy, batch_size=16), Recipe(policy, batch_size=32)]
    assert fit_in_memory_together(job([], kind, memory_bytes=GIB), two, findings) is fit
    assert fit_in_memory_together(job([], kind, memory_bytes=2 * GIB), two, findings)


@pytest.mark.parametrize(
    ("kind", "limit", "seconds"),
    [
        (DeviceKind.CPU, math.inf, PATIENCE_SECONDS),
        (DeviceKind.CPU, 120.0, 6.0),
        (DeviceKind.CUDA, math.inf, 0.0),
    ],
)
def test_only_on_a_cpu_a_tuning_waits_for_other_processes(
    monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, limit: float, seconds: float
) -> None:
    monkeypatch.setattr("autoprec.tuning.job.PATIENCE_SECONDS", PATIENCE_SECONDS)
    limited = replace(job([], kind), deadline=Deadline(seconds=limit))
    assert limited.contention_monitor.patience == pytest.approx(seconds)
