"""Plans a tuning without measuring: the task is described on the CPU, the device by the catalogue.

Nothing is written, and no lock is taken: a plan can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoprec.backends.shared.matmul_timing import timing_software
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.placement import expose_only
from autoprec.core.device.policies import propose
from autoprec.core.measurement import TaskFacts
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.step_bounds import Plan, estimate_steps, explain_expectation, plan_memory
from autoprec.measurement_cache import with_remembered_measurements
from autoprec.tuning.events import Event, Note, Stage
from autoprec.tuning.flow.preflight import (
    describe,
    load_task,
    refuse_absent_tf32,
    refuse_cpu_for_missing_accelerator,
    untrainable_reason,
)
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.ranks import check_engine
from autoprec.tuning.search.task_space import (
    baseline_point,
    build_space,
    misaligned,
    padding_multiples,
    refusals_for_task,
)
from autoprec.workers.handlers import LoadedTask

#: A batch that keeps most devices busy; the largest up to it is estimated beside the baseline's.
_BUSY_BATCH = 1024

Figures = Callable[[DeviceFacts], DeviceFacts]
"""Finds the device whose peaks and bandwidth stand for another's: itself or one of its family."""


def plan(job: TuningJob, devices: Sequence[DeviceFacts], figures: Figures) -> Plan:
    """Plan what `tune` would do on the first of `devices` that the task's framework is built for.

    The target of `job` is this machine's CPU. A single device need not be present.
    """
    if len(devices) == 1:
        refuse_absent_tf32(job, devices[0])
    job.listener(Stage("preflight", "in float32, on the CPU"))
    alone = replace(
        job,
        target=replace(job.target, unusable=()),
        options=replace(job.options, nproc=1, engine="ddp"),
    )
    with alone.runner() as runner:
        loaded = load_task(alone, runner)
        check_engine(loaded.framework, job.options.engine, job.options.nproc)
        device = next((each for each in devices[:-1] if _drives(loaded, each)), devices[-1])
        if device.kind is DeviceKind.CPU:
            refuse_cpu_for_missing_accelerator(job.target.unusable, loaded)
        refuse_absent_tf32(job, device)
        task = describe(alone, runner)
    software = timing_software(device.kind, job.target.software, task.software)
    device = with_remembered_measurements(device, software)
    made = plan_for(job, task, device, figures(device))
    never = untrainable_reason(loaded, device.kind)
    return replace(made, refusal=never, expectation=()) if never else made


def _drives(loaded: LoadedTask, device: DeviceFacts) -> bool:
    """Say whether the installed framework drives such a device; no build says so of TPUs."""
    return (
        device.kind in loaded.built_for or expose_only(device.observation).device in loaded.usable
    )


def plan_for(job: TuningJob, task: TaskFacts, device: DeviceFacts, figures: DeviceFacts) -> Plan:
    """Make the plan for a task that is described already."""
    notes: list[str] = []
    # This machine's free memory says nothing about a device that is not present.
    hypothetical = device.observation.hypothetical

    def note(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    there = replace(job, target=Target(device, job.target.software, lambda f, _: f), listener=note)
    proposal = propose(device, job.options.policies)
    space = build_space(there, task, device, proposal, figures)
    refusals = refusals_for_task(there, task, device, space, figures)
    proposal = replace(proposal, refusals=(*proposal.refusals, *refusals))
    baseline = int(baseline_point(space)[BATCH])
    busy = (size for size in space.batch_sizes if size <= _BUSY_BATCH)
    estimated = estimate_steps(
        task, figures, proposal.policies, sorted({baseline, max([baseline, *busy])})
    )
    multiple = min(padding_multiples(there, device, space.policies), default=1)
    return Plan(
        task=str(job.task),
        device=device,
        facts=task,
        proposal=proposal,
        space=space,
        recipes=len(space.points()),
        figures=figures.name if estimated else "",
        estimates=estimated,
        expectation=explain_expectation(estimated, figures, task, proposal.policies),
        alignment=multiple,
        off_alignment=misaligned(task, multiple),
        memory=plan_memory(
            task, baseline, job.options.memory_bytes if hypothetical else there.memory_bytes
        ),
        notes=tuple(notes),
    )
