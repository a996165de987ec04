"""Preflight: one float32 step in a worker, and the search space that follows from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from autoprec.backends import registry
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Proposal, Refusal
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Dimension, TaskFacts
from autoprec.core.numerics.islands import resolve_patterns
from autoprec.core.probe_result import Unusable
from autoprec.core.recipe import KEEP_MEMORY, Alignment, KnobValue
from autoprec.core.speed.knobs import plausible_knobs, wanted_multiples
from autoprec.core.speed.space import BATCH, Point, Space, micro_batches, powers_of_two
from autoprec.errors import AutoprecError, DeviceUnusable, TaskError, UsageError, UserCodeError
from autoprec.tuning.events import Note, Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.options import BASELINE_BATCH
from autoprec.tuning.study import Study
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.handlers import LoadedTask
from autoprec.workers.runner import Runner, raise_user_error

SMALLEST_BATCH = 8

#: This knob rounds every float32 product of the process, so that no module stays in float32.
_ROUNDING_KNOB = "implicit_bfloat16"

#: Padding is tried where misaligned modules do at least this share of the matrix products.
_MIN_MISALIGNED_SHARE = 0.1
_LARGEST_BATCH = {DeviceKind.CPU: 1024}
_LARGEST_BATCH_ELSEWHERE = 4096


def preflight(job: TuningJob, study: Study, runner: Runner) -> TaskFacts:
    """Take one float32 step, so that the user's bugs show before anything else is tried."""
    known = study.recall("task", TaskFacts)
    if known is not None:
        return known
    job.listener(Stage("preflight", "in float32"))
    facts = describe(job, runner)
    study.remember("task", facts)
    return facts


def describe(job: TuningJob, runner: Runner) -> TaskFacts:
    """Describe the task by one float32 step, at the user's batch where that fits in memory."""
    try:
        batch = runner.load().batch_size or _first_batch(job)
        return _describe(job, runner, batch)
    except WorkerFailure as failure:
        raise _first_step_error(job, failure, "in the first float32 step: ") from failure


def load_task(job: TuningJob, runner: Runner) -> LoadedTask:
    """Load the task in a worker.

    Raises `DeviceUnusable` where its framework cannot drive the device, or where the CPU would be
    tuned only because an accelerator that the framework was built for is present but unusable.
    """
    try:
        loaded = runner.load()
    except WorkerFailure as failure:
        raise _first_step_error(job, failure) from failure
    never = untrainable_reason(loaded, job.target.facts.kind)
    if never:
        raise DeviceUnusable(f"{never}; tune for another: --device {loaded.usable[-1]}")
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
            f"--device {loaded.usable[-1]}"
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
            f"{'; '.join(reasons)}. Fix that, or tune for the CPU instead: --device cpu"
        )


def _first_step_error(job: TuningJob, failure: WorkerFailure, where: str = "") -> AutoprecError:
    if failure.kind is FailureKind.USER_ERROR and failure.frames:
        message = f"{where}{failure.message}{_missing_file_hint(job.task, failure.message)}"
        raise UserCodeError(message, failure.frames) from failure
    raise_user_error(failure)
    return TaskError(f"the first float32 step failed: {failure.message}\n{failure.frames}".strip())


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
    sizes = job.options.batch_sizes
    if not sizes or BASELINE_BATCH in sizes:
        return BASELINE_BATCH
    return sizes[0]


def _describe(job: TuningJob, runner: Runner, batch: int) -> TaskFacts:
    """Describe the task at `batch`, or at the largest part of it that fits in memory."""
    while True:
        try:
            facts: TaskFacts = runner.call("describe", batch_size=batch, seed=job.options.seed)
            return facts
        except WorkerFailure as failure:
            if failure.kind is not FailureKind.OUT_OF_MEMORY or batch == 1:
                raise
            batch = max(1, batch // 4)


def refuse_absent_tf32(job: TuningJob, facts: DeviceFacts) -> None:
    """Raise `UsageError` where TF32 was asked for and the device has none."""
    if Policy.TF32 in job.options.policies and facts.fact(DType.TF32).support is Support.ABSENT:
        raise UsageError(
            f"--policies tf32: {facts.name} has no TF32, so it would be float32 by another name; "
            "leave it out"
        )


def build_space(job: TuningJob, task: TaskFacts, facts: DeviceFacts, proposal: Proposal) -> Space:
    """Build the space of the recipes worth trying for this task on this device."""
    policies = list(proposal.policies)
    if Policy.FLOAT32 not in policies:
        policies.insert(0, Policy.FLOAT32)  # measured as the baseline, never chosen
    if task.uses_tf32 and Policy.TF32 in policies and not job.options.policies:
        policies.remove(Policy.TF32)
        job.listener(
            Note(
                "tf32 is not tried: the task's float32 products are TF32 already, in the baseline "
                "and in the proof's float32 as well"
            )
        )
    if task.low_precision:
        job.listener(Note(f"this is not plain float32: {task.low_precision}", warning=True))
    for warning in task.warnings:
        job.listener(Note(warning, warning=True))
    patterns = job.options.float32_modules
    searched = registry.capabilities(task.framework).searched_knobs if job.options.extras else ()
    extras = dict(plausible_knobs(facts, task, searched))
    if patterns:
        extras.pop(_ROUNDING_KNOB, None)
    return Space(
        policies=tuple(policies),
        batch_sizes=_batch_sizes(job, task),
        effective_batch=task.batch_size,
        memory_formats=("contiguous", "channels_last") if task.convolutions else ("contiguous",),
        compile=(False, True) if _may_compile(job, task) else (False,),
        knobs={**extras, **_requested_knobs(job, task)},
        float32_modules=resolve_patterns(patterns, task.units) if patterns else (),
        alignments=_alignments(job, task, padding_multiples(job, facts, policies)),
    )


def _requested_knobs(job: TuningJob, task: TaskFacts) -> dict[str, tuple[KnobValue, ...]]:
    """Return the requested knobs, without those that have no effect here."""
    found = {}
    known = registry.capabilities(task.framework).knobs
    for name, levels in job.options.knobs.items():
        if name not in known:
            job.listener(Note(f"--knob {name} does not apply to {task.framework} and is left out"))
        elif name == KEEP_MEMORY and not task.keepable_memory:
            job.listener(Note(f"--knob {name} needs glibc's malloc on a CPU and is left out"))
        elif name == _ROUNDING_KNOB and job.options.float32_modules:
            job.listener(
                Note(
                    f"--knob {name} rounds every float32 product, even those of --float32-modules, "
                    "and is left out"
                )
            )
        else:
            found[name] = levels
    return found


def _may_compile(job: TuningJob, task: TaskFacts) -> bool:
    """Say whether compilation is worth trials: where it is cheap always, else on request.

    A model that compiles itself does so in the baseline and in every recipe. XLA, under Keras, can
    double a small step's speed or lose all that bfloat16 gains, and costs seconds to try;
    torch.compile can take minutes.
    """
    return _tries_compilation(job, task) and not task.compiled and not task.not_compilable


def _tries_compilation(job: TuningJob, task: TaskFacts) -> bool:
    return job.options.compile or registry.capabilities(task.framework).cheap_compilation


def refusals_for_task(job: TuningJob, task: TaskFacts) -> tuple[Refusal, ...]:
    """Return what the task itself rules out, besides policies."""
    if _tries_compilation(job, task) and task.not_compilable:
        return (Refusal("compiled", task.not_compilable),)
    return ()


def padding_multiples(
    job: TuningJob, facts: DeviceFacts, policies: Sequence[Policy]
) -> tuple[int, ...]:
    """Return the multiples that dimensions may be padded to, least first, or the requested one."""
    return (job.options.align,) if job.options.align else wanted_multiples(facts, policies)


def misaligned(task: TaskFacts, multiple: int) -> tuple[Dimension, ...]:
    """Return the model's dimensions that are not multiples of the device's alignment."""
    return tuple(dimension for dimension in task.dimensions if dimension.size % multiple)


def _alignments(job: TuningJob, task: TaskFacts, wanted: Sequence[int]) -> tuple[Alignment, ...]:
    """Return no padding and each that may pay; multiples with equal results are tried once."""
    found: dict[tuple[int, ...], Alignment] = {}
    for multiple in wanted:
        off = misaligned(task, multiple)
        if _padding_may_pay(job, task, off):
            sizes = tuple(-(-each.size // multiple) * multiple for each in task.dimensions)
            modules = tuple(dict.fromkeys(dimension.module for dimension in off))
            found.setdefault(sizes, Alignment(multiple, modules))
    return (Alignment(), *found.values())


def _padding_may_pay(job: TuningJob, task: TaskFacts, off: Sequence[Dimension]) -> bool:
    """Say whether misaligned modules do enough of the work (an image's 3 channels seldom do)."""
    if not off or job.options.align:
        return bool(off)
    modules = {dimension.module for dimension in off}
    shares = [unit.products for unit in task.units if unit.path in modules]
    known = any(unit.products for unit in task.units)
    return not known or sum(shares) >= _MIN_MISALIGNED_SHARE


def _batch_sizes(job: TuningJob, task: TaskFacts) -> tuple[int, ...]:
    asked = job.options.batch_sizes
    if task.batch_size is not None:
        if not task.splittable:
            job.listener(Note(f"BATCH_SIZE = {task.batch_size} is not split: {task.split_reason}"))
            return (task.batch_size,)
        if asked is not None:
            return asked
        return micro_batches(task.batch_size, low=SMALLEST_BATCH)
    if asked is not None:
        return asked
    if task.samples < task.nominal:
        return (task.samples,)
    largest = _LARGEST_BATCH.get(job.target.facts.kind, _LARGEST_BATCH_ELSEWHERE)
    return powers_of_two(SMALLEST_BATCH, largest)


def baseline_point(space: Space) -> Point:
    """Return plain float32 as the user would run it: their batch, else 32, else the smallest."""
    sizes = space.batch_sizes
    batch = space.effective_batch
    if batch not in sizes:
        batch = BASELINE_BATCH if BASELINE_BATCH in sizes else sizes[0]
    plain = {name: levels[0] for name, levels in space.levels().items()}
    return {**plain, "policy": Policy.FLOAT32.value, BATCH: batch}
