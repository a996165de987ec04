"""The warnings of a profile: what in a tuning the user should know or change."""

from __future__ import annotations

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.numerics.verdict import HOW_TO_SEE_LEARNING
from autoprec.core.recipe import Recipe
from autoprec.core.speed.contention import BUSY_SHARE
from autoprec.core.speed.noise import relative_spread
from autoprec.core.speed.space import Space
from autoprec.core.speed.step_bounds import KERNEL_LAUNCHING_KINDS
from autoprec.tuning.profile.padding_evidence import describe_padding_trials
from autoprec.tuning.stage_results import PreflightResult, TuningResult

#: A baseline that varies more than this between rounds makes small ratios meaningless.
NOISY_SPREAD = 0.25

#: A mixed policy that needs at most this share of float32's memory leaves room for a larger batch.
FREED_MEMORY_SHARE = 0.7


def warnings_for(
    result: TuningResult, recipe: Recipe, plain: Recipe, measured: Measurement
) -> tuple[str, ...]:
    """Return the profile's warnings: what the user should know or change."""
    found = [*result.preflight.task.warnings, *result.search.notes]
    if result.preflight.task.low_precision:
        found.append(f"the task is not plain float32: {result.preflight.task.low_precision}")
    if recipe.effective_batch != plain.effective_batch:
        found.append(
            f"the task names no batch, so that was chosen too: {recipe.effective_batch} (the "
            f"baseline ran with {plain.effective_batch}). Adapt the learning rate and its schedule "
            "to it, or keep yours: BATCH_SIZE in a task file, or `batch`"
        )
    found += _proof_warnings(result)
    found += _memory_and_padding_advice(result, recipe, plain, measured)
    if result.not_covered:
        left_out = "; ".join(result.not_covered)
        found.append(f"a limit of this tuning, its time or its trials, left out: {left_out}")
    if result.preflight.rehearsed:
        return tuple(found)
    if result.cpu_contention > BUSY_SHARE:
        found.append(
            f"other processes used up to {result.cpu_contention:.0%} of the processors while this "
            "was measured: tune again on an idle machine"
        )
    found += _noise_warning(result, plain)
    found += _slower_warning(result, recipe)
    found += _batch_range_warning(result.preflight.space, recipe)
    found += _compilation_advice(result.preflight)
    if measured.data_seconds > measured.step_seconds:
        found.append(
            f"the loader needs {measured.data_seconds * 1e3:.1f} ms for a step of "
            f"{measured.step_seconds * 1e3:.1f} ms: use more loader workers"
        )
    return tuple(found)


def _proof_warnings(result: TuningResult) -> list[str]:
    """Warn of a proof that says little, and of buffers that it leaves open."""
    proven, found = result.confirmation.proven, []
    if proven is not None and proven.verdict.caveat:
        found.append(f"the check says little: {proven.verdict.caveat}; {HOW_TO_SEE_LEARNING}")
    if proven is not None and proven.verdict.buffers:
        found.append(
            f"{proven.verdict.buffers}. If evaluation needs more digits, name the modules that "
            "compute them in the recipe's float32_modules"
        )
    return found


def _memory_and_padding_advice(
    result: TuningResult, recipe: Recipe, plain: Recipe, measured: Measurement
) -> list[str]:
    """Advise to use memory that was freed, and to choose aligned dimensions."""
    found = []
    base = result.measurement_of(plain).peak_memory_bytes
    same_batch = recipe.batch_size == plain.batch_size and recipe.policy.mixed
    if same_batch and 0 < measured.peak_memory_bytes <= FREED_MEMORY_SHARE * base:
        found.append(
            f"{recipe.policy} needs {1 - measured.peak_memory_bytes / base:.0%} less memory than "
            f"{_plain_name(result)}: a batch of twice the size is likely to fit; try it"
        )
    multiple = result.preflight.alignment
    off = [d for d in result.preflight.task.dimensions if d.size % multiple]
    if off and not recipe.alignment.modules:
        named = ", ".join(f"{d.module} {d.name} {d.size}" for d in off[:4])
        more = f" and {len(off) - 4} more" if len(off) > 4 else ""
        found.append(
            f"this device wants dimensions in multiples of {multiple}; these are not: {named}"
            f"{more}. Padding them {describe_padding_trials(result)}; "
            f"{result.rounding or 'choosing other sizes may'}"
        )
    return found


def _plain_name(result: TuningResult) -> str:
    return Policy.FLOAT32.name_with(result.preflight.task.weights_in)


def _noise_warning(result: TuningResult, plain: Recipe) -> list[str]:
    """Warn where the baseline itself varied so much that small differences mean nothing."""
    rounds = [m.samples_per_second for m in result.confirmation.measured.get(plain.key(), ())]
    spread = relative_spread(rounds)
    if spread <= NOISY_SPREAD:
        return []
    return [
        f"this machine's step times vary by {spread:.0%} between rounds: differences below that "
        "are noise; run again when it is idle"
    ]


def _slower_warning(result: TuningResult, recipe: Recipe) -> list[str]:
    """Warn that the only recipe asked for is slower than float32."""
    gain = result.confirmation.over_baseline
    if result.confirmation.proven is None or gain is None or gain.ratio >= 1.0:
        return []
    return [
        f"{recipe.policy} is slower than {_plain_name(result)} here, {gain.in_words()}, and was "
        "taken because "
        "nothing else was asked for: add float32 to `policies`, or leave `policies` out"
    ]


def _batch_range_warning(space: Space, recipe: Recipe) -> list[str]:
    """Warn where the chosen batch is at the end of the range, so that a better one may lie beyond.

    It is only said where batches were free to choose: a task's own BATCH_SIZE is the user's limit.
    """
    smallest, largest = min(space.batch_sizes), max(space.batch_sizes)
    if space.effective_batch is not None or smallest == largest:
        return []
    ends = {smallest: ("smallest", "smaller"), largest: ("largest", "larger")}
    if recipe.batch_size == 1 or recipe.batch_size not in ends:
        return []
    end, beyond = ends[recipe.batch_size]
    return [
        f"batch {recipe.batch_size} is the {end} of those that were to be tried "
        f"({smallest}-{largest}): a {beyond} one may be faster still; widen the range with "
        "`batch_sizes`"
    ]


def _compilation_advice(preflight: PreflightResult) -> list[str]:
    """Advise to try the compiler where it was left out and kernels are launched one by one."""
    task = preflight.task
    if preflight.space.compile != (False,) or task.compiled or task.not_compilable:
        return []
    if preflight.facts.kind not in KERNEL_LAUNCHING_KINDS:
        return []
    return [
        "the compiler was not tried: on a device like this it can gain as much as precision does, "
        "or lose that; `compile` measures it, at some ten seconds more for each recipe"
    ]
