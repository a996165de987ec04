"""The search space of a tuning: the recipes worth trying for one task on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoprec.backends import registry
from autoprec.backends.protocol import Engine
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Proposal, Refusal, float16_waits
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Dimension, TaskFacts
from autoprec.core.numerics.island_proposals import resolve_patterns
from autoprec.core.recipe import (
    ATTENTION,
    BLOCKS,
    COMPILE_MODE,
    COMPILE_SCOPE,
    FLOAT8,
    GRAPH_MODES,
    KEEP_MEMORY,
    Alignment,
    Distributed,
    KnobValue,
)
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cuda_graphs import GRAPH_KINDS, graph_dangers, graph_objections
from autoprec.core.speed.float8 import float8_objections, is_told_of
from autoprec.core.speed.knobs import plausible_knobs, wanted_multiples
from autoprec.core.speed.space import (
    BATCH,
    REDUCE_DTYPE,
    Point,
    Space,
    micro_batches,
    powers_of_two,
)
from autoprec.errors import UsageError
from autoprec.tuning.events import Note
from autoprec.tuning.job import TuningJob
from autoprec.tuning.options import BASELINE_BATCH, Options
from autoprec.tuning.ranks import batch_of_rank

SMALLEST_BATCH = 8

#: What else each engine has to choose from: DDP larger buckets, FSDP2 memory for fewer gathers.
_ENGINE_LEVELS: Mapping[Engine, tuple[str, tuple[KnobValue, ...]]] = {
    "ddp": ("bucket_mb", (25, 100)),
    "fsdp2": ("reshard_after_forward", (True, False)),
}

#: This knob rounds every float32 product of the process, so that no module stays in float32.
_ROUNDING_KNOB = "implicit_bfloat16"

_LOST_IN_GRAPHS = "a split batch's gradients do not survive the CUDA graphs of that mode"

#: Padding is tried where misaligned modules do at least this share of the matrix products.
_MIN_MISALIGNED_SHARE = 0.1

#: The ladder ends by itself, where a larger batch gains or fits no more; of few data sets does this
#: one make a hundred batches.
_LARGEST_BATCH = 2**16

#: Samplers that do not go by what has run try none that may take minutes, or not fit.
_LARGEST_SAMPLED_BATCH = {DeviceKind.CPU: 1024}
_LARGEST_SAMPLED_BATCH_ELSEWHERE = 4096


def build_space(
    job: TuningJob,
    task: TaskFacts,
    facts: DeviceFacts,
    proposal: Proposal,
    peaks: DeviceFacts | None = None,
) -> Space:
    """Build the space of the recipes worth trying for this task on this device.

    `peaks` are another's, if the device's own are not known.
    """
    policies = list(proposal.policies)
    if Policy.FLOAT32 not in policies:
        policies.insert(0, Policy.FLOAT32)  # measured as the baseline, never chosen
    if task.uses_tf32 and Policy.TF32 in policies and not job.options.policies:
        policies.remove(Policy.TF32)
        job.listener(
            Note(
                "tf32 is not tried: the task's float32 products are TF32 already, in the baseline "
                "and in the check's float32 as well"
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
    sizes = _batch_sizes(job, task)
    if FLOAT8 in searched and not _against_float8(job, task, facts, policies):
        extras[FLOAT8] = (False, True)
    if COMPILE_MODE in searched and not _against_graphs(job, task, peaks or facts, policies, sizes):
        extras[COMPILE_MODE] = ("default", GRAPH_MODES[0])
    if COMPILE_SCOPE in searched and _may_compile(job, task, facts) and task.equal_blocks:
        extras[COMPILE_SCOPE] = ("model", BLOCKS)
    return Space(
        policies=tuple(policies),
        batch_sizes=sizes,
        effective_batch=task.batch_size,
        memory_formats=("contiguous", "channels_last") if task.convolutions else ("contiguous",),
        compile=(False, True) if _may_compile(job, task, facts) else (False,),
        knobs={**extras, **_requested_knobs(job, task, facts, policies, sizes)},
        float32_modules=resolve_patterns(patterns, task.units) if patterns else (),
        alignments=_alignments(job, task, padding_multiples(job, facts, policies)),
        distributed=_distributed(job),
        rank_levels=rank_levels(job.options),
        batch_share=_batch_share(job.options, task),
        float16_waits=not job.options.policies and float16_waits(facts),
    )


def _batch_share(options: Options, task: TaskFacts) -> float:
    """Return what a smaller batch may lose; the parts of a batch that is kept lose nothing."""
    at_knee = options.batch in ("knee", "goodput") and task.batch_size is None
    return SPEED.knee_share if at_knee else SPEED.most_share


def _distributed(job: TuningJob) -> Distributed | None:
    """Return how the job's ranks share a step before anything is chosen; None for one process."""
    options = job.options
    return Distributed(options.engine, options.nproc) if options.nproc > 1 else None


def rank_levels(options: Options) -> dict[str, tuple[KnobValue, ...]]:
    """Return what may be chosen of how ranks communicate, each with its default first.

    Others than the reduction's dtype get trials only where a step waits for communication
    (`core.speed.communication`).
    """
    if options.nproc == 1:
        return {}
    found: dict[str, tuple[KnobValue, ...]] = {
        REDUCE_DTYPE: (DType.FLOAT32.value, DType.BFLOAT16.value)
    }
    if options.extras:
        found |= dict([_ENGINE_LEVELS[options.engine]])
    return found


def _requested_knobs(
    job: TuningJob,
    task: TaskFacts,
    facts: DeviceFacts,
    policies: Sequence[Policy],
    sizes: Sequence[int],
) -> dict[str, tuple[KnobValue, ...]]:
    """Return the requested knobs, without what has no effect here or no recipe may hold."""
    known = registry.capabilities(task.framework).knobs
    found: dict[str, tuple[KnobValue, ...]] = {}
    for name, values in job.options.knobs.items():
        levels = _after_default(name, values, task)
        if name not in known:
            job.listener(Note(f"setting {name} does not apply to {task.framework} and is left out"))
        elif name == KEEP_MEMORY and not task.keepable_memory:
            job.listener(Note(f"setting {name} needs glibc's malloc on a CPU and is left out"))
        elif name == FLOAT8:
            against = _against_float8(job, task, facts, policies)
            found[name] = () if against else levels
            if against and not is_told_of(facts):
                job.listener(Note(f"setting {name} is left out: {against}"))
        elif name == _ROUNDING_KNOB and job.options.float32_modules:
            job.listener(
                Note(
                    f"setting {name} rounds every float32 product, even those of "
                    "`float32_modules`, and is left out"
                )
            )
        elif name == COMPILE_MODE:
            found[name] = _safe_modes(job, task, levels, sizes)
        else:
            found[name] = levels
    for name, levels in found.items():
        if len(levels) == 1 and len(job.options.knobs[name]) == 1:
            job.listener(
                Note(f"setting {name}: nothing to compare {levels[0]} with, so it is left out")
            )
    return {name: levels for name, levels in found.items() if len(levels) > 1}


def _safe_modes(
    job: TuningJob, task: TaskFacts, levels: tuple[KnobValue, ...], sizes: Sequence[int]
) -> tuple[KnobValue, ...]:
    """Return the requested modes of the compiler, without those that this task does not bear."""
    graphs = " and ".join(str(level) for level in levels if level in GRAPH_MODES)
    if not graphs:
        return levels
    whole = task.batch_size and batch_of_rank(task.batch_size, job.options.nproc)
    against = list(graph_dangers(task))
    if whole is not None and whole not in sizes:
        against.append(f"{_LOST_IN_GRAPHS}; --batch-sizes {whole} splits none")
    if against:
        job.listener(Note(f"setting {COMPILE_MODE}: {graphs} left out: {'; '.join(against)}"))
        return tuple(level for level in levels if level not in GRAPH_MODES)
    if whole is not None and len(sizes) > 1:
        job.listener(
            Note(
                f"setting {COMPILE_MODE}: {graphs} tried at batch {whole} alone, "
                f"for {_LOST_IN_GRAPHS}"
            )
        )
    return levels


def _after_default(
    name: str, values: tuple[KnobValue, ...], task: TaskFacts
) -> tuple[KnobValue, ...]:
    """Return what a knob is without any recipe, then the values to try besides."""
    defaults: Mapping[str, KnobValue] = {
        "threads": task.threads,
        "steps_per_execution": task.steps_per_execution,
        COMPILE_MODE: "default",
        COMPILE_SCOPE: "model",
        ATTENTION: "default",
    }
    default = defaults.get(name, False)
    others = tuple(value for value in dict.fromkeys(values) if value != default)
    return (default, *others) if default or name not in defaults else values


def _may_compile(job: TuningJob, task: TaskFacts, facts: DeviceFacts) -> bool:
    """Say whether compiled recipes get trials.

    A model that compiles itself does so in the baseline and in every recipe.
    """
    return _tries_compilation(job, task, facts) and not task.compiled and not task.not_compilable


def _tries_compilation(job: TuningJob, task: TaskFacts, facts: DeviceFacts) -> bool:
    """Return what was asked for; else whether it tends to pay on this device."""
    asked = job.options.compile
    by_itself = registry.capabilities(task.framework).compiles_on
    return facts.kind in by_itself if asked is None else asked


def refusals_for_task(
    job: TuningJob,
    task: TaskFacts,
    facts: DeviceFacts,
    space: Space,
    peaks: DeviceFacts | None = None,
) -> tuple[Refusal, ...]:
    """Return what is ruled out by the task, and for it on this device, besides policies."""
    policies, sizes = space.policies, space.batch_sizes
    found = []
    if _tries_compilation(job, task, facts) and task.not_compilable:
        found.append(Refusal("compiled", task.not_compilable))
    if FLOAT8 in registry.capabilities(task.framework).knobs and is_told_of(facts):
        against = _against_float8(job, task, facts, policies)
        found += [Refusal(FLOAT8, against)] * bool(against)
    if facts.kind in GRAPH_KINDS and COMPILE_MODE in registry.capabilities(task.framework).knobs:
        against = _against_graphs(job, task, peaks or facts, policies, sizes)
        found += [Refusal(f"{COMPILE_MODE} {GRAPH_MODES[0]}", against)] * bool(against)
    return tuple(found)


def _against_graphs(
    job: TuningJob,
    task: TaskFacts,
    facts: DeviceFacts,
    policies: Sequence[Policy],
    sizes: Sequence[int],
) -> str:
    """Say why CUDA graphs are not tried; "" where they are."""
    whole = task.batch_size and batch_of_rank(task.batch_size, job.options.nproc)
    if whole and whole not in sizes:
        return f"{_LOST_IN_GRAPHS}; --batch-sizes {whole} splits none"
    compiled = _may_compile(job, task, facts)
    return "; ".join(graph_objections(facts, task, policies, max(sizes), compiled=compiled))


def _against_float8(
    job: TuningJob, task: TaskFacts, facts: DeviceFacts, policies: Sequence[Policy]
) -> str:
    """Say why float8 is not tried; "" where it is."""
    options = job.options
    objections = float8_objections(
        facts,
        task,
        policies,
        compiled=_may_compile(job, task, facts),
        sharded=options.nproc > 1 and options.engine == "fsdp2",
    )
    return "; ".join(objections)


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
    asked = job.options.asked_batches
    if task.batch_size is not None:
        _refuse_other_batch(job, task.batch_size)
        own = batch_of_rank(task.batch_size, job.options.nproc)
        if not task.splittable:
            split = "split among the ranks only" if job.options.nproc > 1 else "not split"
            job.listener(Note(f"its batch of {task.batch_size} is {split}: {task.split_reason}"))
            return (own,)
        if asked is not None:
            return asked
        return micro_batches(own, low=SMALLEST_BATCH)
    if task.fixed_batch:
        others = " and at none of those asked for" if asked not in (None, (task.samples,)) else ""
        where = f"batch {task.samples}{others}"
        job.listener(Note(f"every recipe runs at {where}: {task.split_reason}"))
        return (task.samples,)
    if asked is not None:
        return asked
    if task.samples < task.nominal:
        return (task.samples,)
    if job.options.sampler == "cost":
        return powers_of_two(SMALLEST_BATCH, _LARGEST_BATCH)
    kind = job.target.facts.kind
    sampled = _LARGEST_SAMPLED_BATCH.get(kind, _LARGEST_SAMPLED_BATCH_ELSEWHERE)
    return powers_of_two(SMALLEST_BATCH, sampled)


def _refuse_other_batch(job: TuningJob, own: int) -> None:
    """Raise `UsageError` where a batch was asked for beside the task file's own."""
    options = job.options
    where = (
        f"BATCH_SIZE = {own} of the task file" if job.task.plain else f"the loader's batch {own}"
    )
    if options.fixed_batch not in (None, own):
        raise UsageError(
            f"`batch={options.batch}` given, but {where} is kept: leave `batch` out, or change "
            "that to it"
        )
    if options.batch != type(options).batch:
        job.listener(Note(f"{where} is kept, so `batch={options.batch}` chooses nothing"))


def baseline_point(space: Space) -> Point:
    """Return plain float32 as the user would run it: their batch, else 32, else the smallest."""
    sizes = space.batch_sizes
    batch = space.whole_micro_batch
    if batch not in sizes:
        batch = BASELINE_BATCH if BASELINE_BATCH in sizes else sizes[0]
    plain = {name: levels[0] for name, levels in space.levels().items()}
    return {**plain, "policy": Policy.FLOAT32.value, BATCH: batch}
