"""Preflight: one float32 step in a worker, and what is known of the device before the search."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from autoprec.backends import registry
from autoprec.backends.shared.matmul_timing import timing_software
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.device.probe_result import Unusable
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.errors import AutoprecError, DeviceUnusable, TaskError, UsageError, UserCodeError
from autoprec.measurement_cache import with_remembered_measurements
from autoprec.tuning.events import Described, Note, Stage, Started
from autoprec.tuning.job import TuningJob
from autoprec.tuning.options import BASELINE_BATCH
from autoprec.tuning.ranks import batch_of_rank, check_engine
from autoprec.tuning.search.samplers import sampler_of
from autoprec.tuning.search.task_space import build_space, padding_multiples, refusals_for_task
from autoprec.tuning.stage_results import PreflightResult
from autoprec.tuning.study.notes import FACTS, TASK
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import DESCRIPTION_SHARE
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.handlers import LoadedTask
from autoprec.workers.runner import Runner, raise_user_error


def run_preflight(job: TuningJob, study: Study, runner: Runner) -> PreflightResult:
    """Describe the task, measure the device, and build the search space from both."""
    task = describe_once(job, study, runner)
    facts = measure_device(job, study, task)
    refuse_absent_tf32(job, facts)
    proposal = propose(facts, job.options.policies)
    job.listener(Started(str(job.task), facts, proposal, study.location))
    space = build_space(job, task, facts, proposal)
    study.set_space(space, sampler_of(job.options.sampler, job.options.seed))
    job.listener(Described(task, len(study.history()), len(space.points())))
    return PreflightResult(
        task=task,
        facts=facts,
        space=space,
        alignment=min(padding_multiples(job, facts, space.policies), default=1),
        refusals=(*proposal.refusals, *refusals_for_task(job, task, facts, space)),
    )


def measure_device(job: TuningJob, study: Study, task: TaskFacts) -> DeviceFacts:
    """Time the device's matrix products, once for a device and version of its framework.

    Where the time limit leaves no time for that, they stay unknown, for this time.
    """
    facts = study.recall(FACTS)
    if facts is not None:
        return facts
    known = job.target.facts
    software = timing_software(known.kind, job.target.software, task.software)
    facts = with_remembered_measurements(known, software)
    if not facts.measured_on and job.deadline.passed(DESCRIPTION_SHARE):
        job.listener(Note("the time limit left no time to time this device's matrix products"))
        return facts
    if not facts.measured_on:
        job.listener(Stage("probe", "timing this device's matrix products"))
        facts = job.target.measure(facts, software)
    for note in facts.notes[len(known.notes) :]:
        job.listener(Note(note, warning=True))
    study.remember(FACTS, facts)
    return facts


def describe_once(job: TuningJob, study: Study, runner: Runner) -> TaskFacts:
    """Take one float32 step, so that the user's bugs show before anything else is tried."""
    known = study.recall(TASK)
    if known is not None:
        return known
    job.listener(Stage("preflight", "in float32"))
    facts = describe(job, runner)
    if not job.deadline.passed(DESCRIPTION_SHARE):  # else something may have been left out
        study.remember(TASK, facts)
    return facts


def describe(job: TuningJob, runner: Runner) -> TaskFacts:
    """Describe the task by one float32 step, at a rank's part of the user's batch where it fits."""
    own = None
    try:
        batch = runner.load().batch_size
        own = batch_of_rank(batch, job.options.nproc) if batch else _first_batch(job)
        return _describe(job, runner, own)
    except WorkerFailure as failure:
        where = "in the first float32 step: "
        hint = "" if own is None or batch else _batch_size_hint(own, failure.message)
        raise _first_step_error(job, failure, where, hint) from failure


def load_task(job: TuningJob, runner: Runner) -> LoadedTask:
    """Load the task in a worker.

    Raises `DeviceUnusable` where its framework cannot drive the device, or where the CPU would be
    tuned only because an accelerator that the framework was built for is present but unusable.
    """
    if job.task.script and job.options.nproc > 1:
        raise UsageError(
            f"`nproc={job.options.nproc}` given, but a script is tuned on one device: write a task "
            "file for several (see `autoprec tune --help`)"
        )
    try:
        loaded = runner.load()
    except WorkerFailure as failure:
        raise _first_step_error(job, failure) from failure
    if loaded.found:
        seconds = loaded.start_seconds
        job.listener(Note(f"found {loaded.found}; its own start took {seconds:.1f} s"))
    for note in loaded.notes:
        job.listener(Note(note))
    check_engine(loaded.framework, job.options.engine, job.options.nproc)
    never = untrainable_reason(loaded, job.target.facts.kind)
    if never:
        raise DeviceUnusable(f"{never}; tune for another: `device={loaded.usable[-1]}`")
    device = job.settings().device
    # PyTorch calls ROCm's GPUs "cuda" as well: the build tells which vendor's it uses.
    other_vendor = device == "cuda" and job.target.facts.kind not in loaded.built_for
    if device not in loaded.usable or other_vendor:
        name = job.target.facts.observation.name or device
        version = loaded.software.get(loaded.framework, "")
        builds = registry.capabilities(loaded.framework).accelerator_builds
        build = f"Install a build of it for this device ({builds})"
        if job.target.facts.kind in loaded.built_for:
            build = (
                "This build is for such devices: fix the driver, install a missing library "
                f"({builds}) or change the setting that hides the device"
            )
        raise DeviceUnusable(
            f"{loaded.framework} {version} cannot use {name} ({job.target.facts.kind}): as it is "
            f"installed here it uses {' and '.join(loaded.usable)}. {build}, or tune for another: "
            f"`device={loaded.usable[-1]}`"
        )
    if job.on_cpu:
        refuse_cpu_for_missing_accelerator(job.target.unusable, loaded)
    return loaded


def untrainable_reason(loaded: LoadedTask, kind: DeviceKind) -> str:
    """Say why a framework's models are never tuned on a kind of device; "" where they are."""
    if kind in loaded.trains_on:
        return ""
    return f"{loaded.framework} models are tuned on {', '.join(loaded.trains_on)}, not on {kind}"


def refuse_cpu_for_missing_accelerator(unusable: Sequence[Unusable], loaded: LoadedTask) -> None:
    """Raise `DeviceUnusable` where the framework was built for one of the unusable accelerators."""
    reasons = [each.text for each in unusable if each.kind in loaded.built_for]
    if reasons:
        raise DeviceUnusable(
            f"{'; '.join(reasons)}. Fix that, or tune for the CPU instead: `device=cpu`"
        )


def _first_step_error(
    job: TuningJob, failure: WorkerFailure, where: str = "", hint: str = ""
) -> AutoprecError:
    if failure.kind in (FailureKind.USER_ERROR, FailureKind.DATA_ERROR) and failure.frames:
        message = (
            f"{where}{failure.message}{_missing_file_hint(job.task.path, failure.message)}{hint}"
        )
        raise UserCodeError(message, failure.frames) from failure
    raise_user_error(failure)
    what = "" if failure.phase == "script" else "the first float32 step failed: "
    return TaskError(f"{what}{failure.message}\n{failure.frames}".strip())


def _batch_size_hint(batch: int, message: str) -> str:
    """Say what to do where an error that names the batch's size may be about it; "" elsewhere."""
    if not re.search(rf"\b{batch}\b", message):
        return ""
    return (
        f". The task names no batch, so a batch of {batch} was tried: where the model runs at "
        "one batch size only, name that: BATCH_SIZE in a task file, else `batch`"
    )


def _missing_file_hint(task: Path, message: str) -> str:
    """Say what to do where the missing file exists next to the task file; "" elsewhere."""
    found = re.search(r"No such file or directory: '([^'\n]+)'", message)
    if found is None or Path(found[1]).is_absolute() or not (task.parent / found[1]).exists():
        return ""
    return (
        f". It is in {task.parent}: relative paths start from the folder the command is run in, so "
        "run it there, or begin them with Path(__file__).parent"
    )


def _first_batch(job: TuningJob) -> int:
    sizes = job.options.asked_batches
    if not sizes or BASELINE_BATCH in sizes:
        return BASELINE_BATCH
    return sizes[0]


def _describe(job: TuningJob, runner: Runner, batch: int) -> TaskFacts:
    """Describe the task at `batch`, or at the largest part of it that fits in memory."""
    left = job.deadline.left(DESCRIPTION_SHARE)
    alone = math.isfinite(left) and job.options.nproc == 1  # ranks would not stop together
    while True:
        try:
            facts: TaskFacts = runner.call(
                "describe",
                batch_size=batch,
                seed=job.options.seed,
                seconds=left if alone else None,
            )
            return facts
        except WorkerFailure as failure:
            if failure.kind is not FailureKind.OUT_OF_MEMORY or batch == 1:
                raise
            batch = max(1, batch // 4)


def refuse_absent_tf32(job: TuningJob, facts: DeviceFacts) -> None:
    """Raise `UsageError` where TF32 was asked for and the device has none."""
    if Policy.TF32 in job.options.policies and facts.fact(DType.TF32).support is Support.ABSENT:
        raise UsageError(
            f"`policies=tf32`: {facts.name} has no TF32, so it would be float32 by another name; "
            "leave it out"
        )
