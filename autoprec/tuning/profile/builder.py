"""Builds the profile from what the stages found: every claim with its number."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

from autoprec.core.device.family import Support
from autoprec.core.device.roofline import Bound, find_bound, min_traffic_bytes
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.profile import (
    NOT_COMPARED,
    SCHEMA,
    Baseline,
    BatchChoice,
    Chosen,
    DeviceRecord,
    Evidence,
    Profile,
    TaskRecord,
    TriedRecipe,
    without_speeds,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_settings, name_recipe
from autoprec.core.speed.ladder import knee_of, largest_that_ran
from autoprec.core.speed.selection import Choice
from autoprec.core.speed.space import Space
from autoprec.core.speed.step_bounds import FRAMEWORK_LAUNCH_SECONDS, KERNEL_LAUNCHING_KINDS
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.job import TuningJob
from autoprec.tuning.profile.padding_evidence import padding_evidence, rounded, significant
from autoprec.tuning.profile.warnings import warnings_for
from autoprec.tuning.stage_results import (
    REFERENCE,
    ConfirmationResult,
    PreflightResult,
    ProvenRecipe,
    TuningResult,
)
from autoprec.version import __version__

#: Characters of why a recipe did not run that the profile keeps.
_MAX_REASON = 120

#: Policy, compilation and layout of the step in which a task's operators are timed.
_AS_DESCRIBED = (Policy.FLOAT32, False, "contiguous")


def build_profile(job: TuningJob, result: TuningResult, *, digest: str, seconds: float) -> Profile:
    """Write the profile of a finished tuning; `digest` is the task's, `seconds` what it cost."""
    confirmation, plain = result.confirmation, result.search.baseline
    choice = confirmation.choice
    gains = confirmation if confirmation.proven is not None else ConfirmationResult(choice)
    proven = gains.proven or ProvenRecipe(choice.recipe, REFERENCE, rate=0.0, step_seconds=0.0)
    recipe = replace(proven.recipe, forced=not job.float32_allowed)
    base, chosen = result.measurement_of(plain), result.measurement_of(choice.recipe)
    bound = _bound(result, choice.recipe, chosen, devices=len(job.devices))
    own_batch = recipe.effective_batch == plain.effective_batch
    whole, present = gains.over_baseline, gains.present
    alike, larger = (whole, None) if own_batch else (gains.at_same_batch, whole)
    evidence = Evidence(
        baseline=_baseline(result, plain, base),
        chosen=_chosen(result, choice.recipe, chosen, bound),
        speedup=NOT_COMPARED if alike is None else rounded(alike),
        throughput=None if larger is None else rounded(larger),
        present=None if present is None else replace(present, speedup=rounded(present.speedup)),
        batch=_batch_choice(job, result, recipe, chosen),
        parity=proven.verdict,
        checkpoint=job.checkpoint,
        trials=len(result.trials.history),
        tuning_seconds=round(seconds, 1),
        proof_seconds=round(result.proof.seconds, 1),
        reason=_reason(result, choice, bound, recipe),
        refusals=result.refusals,
        memory_budget_bytes=job.memory_bytes,
        loss_scale=proven.loss_scale,
        islands=proven.islands,
        padding=padding_evidence(result, recipe),
        warnings=warnings_for(result, recipe, plain, chosen),
        waterfall=tuple(replace(p, speedup=rounded(p.speedup)) for p in confirmation.waterfall),
        inconclusive=confirmation.inconclusive,
        not_covered=result.not_covered,
        tried=tuple(_tried(outcome, result.trials.space) for outcome in result.trials.history),
    )
    facts, described = result.preflight.facts, result.preflight.task
    at = job.task.at if job.task.script else None
    if result.preflight.rehearsed:
        evidence = without_speeds(evidence)
    return Profile(
        schema=SCHEMA,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        autoprec=__version__,
        task=TaskRecord(job.task.name, digest, described.framework, job.task.arguments, at),
        device=DeviceRecord(facts.kind, facts.name, facts.family, facts.fingerprint),
        software=dict(described.software),
        recipe=recipe,
        evidence=evidence,
    )


def _baseline(result: TuningResult, plain: Recipe, measured: Measurement) -> Baseline:
    return Baseline(
        policy=Policy.FLOAT32,
        batch_size=plain.batch_size,
        samples_per_second=significant(measured.samples_per_second),
        step_seconds=significant(measured.step_seconds),
        peak_memory_bytes=measured.peak_memory_bytes,
        accumulation_steps=plain.accumulation_steps,
        exposed_communication=_exposed_communication(result, plain),
        weights_in=result.preflight.task.weights_in,
        convolutions_in=_convolutions_in(result.preflight),
    )


def _chosen(result: TuningResult, recipe: Recipe, measured: Measurement, bound: Bound) -> Chosen:
    return Chosen(
        samples_per_second=significant(measured.samples_per_second),
        step_seconds=significant(measured.step_seconds),
        peak_memory_bytes=measured.peak_memory_bytes,
        peak_share=None if bound.peak_share is None else significant(bound.peak_share),
        memory_share=None if bound.memory_share is None else significant(bound.memory_share),
        bound=bound.name,
        data_seconds=significant(measured.data_seconds),
        warmup_seconds=significant(measured.warmup_seconds),
        break_even_steps=_break_even(result, recipe),
        exposed_communication=_exposed_communication(result, recipe),
    )


def _batch_choice(
    job: TuningJob, result: TuningResult, recipe: Recipe, measured: Measurement
) -> BatchChoice:
    """Return what the trials tell of the batch; of parts of one that is kept, nothing."""
    space, feeds = result.trials.space, measured.loader_feeds
    free = space.effective_batch is None and len(space.batch_sizes) > 1
    history, ranks = result.search.ranked, space.world_size
    knee = knee_of(history, recipe.policy.value) if free else None
    proven = result.confirmation.proven
    seen = result.search.noise_scale or (None if proven is None else proven.noise_scale)
    return BatchChoice(
        yours=result.search.baseline.effective_batch,
        chosen=recipe.effective_batch,
        rule=job.options.batch,
        knee=None if knee is None else knee * ranks,
        fits=largest_that_ran(history) * ranks if free else None,
        loader_feeds=significant(feeds) if math.isfinite(feeds) else None,
        noise_scale=None if seen is None else _rounded_scale(seen),
    )


def _rounded_scale(found: NoiseScale) -> NoiseScale:
    at, low, high = (
        None if each is None else significant(each) for each in (found.at, found.low, found.high)
    )
    return replace(found, at=at, low=low, high=high)


def _bound(result: TuningResult, recipe: Recipe, measured: Measurement, *, devices: int) -> Bound:
    """Return what limits a step on each of the devices; ranks on a CPU share one.

    What other processes disturbed while the device was timed says nothing of a step.
    """
    task, facts = result.preflight.task, result.preflight.facts
    computed = recipe.policy.compute_dtype_with(task.weights_in)
    peak, bandwidth = facts.fact(computed).measured_gflops, facts.measured_memory_bandwidth_gbps
    samples = measured.samples_per_step / devices
    curve = [
        (o.measurement.samples_per_step / devices, o.measurement.step_seconds)
        for o in result.trials.history
        if o.measurement is not None
        and o.rate > 0
        and o.point["policy"] == recipe.policy.value
        and o.point["memory_format"] == recipe.memory_format
        and o.point["compile"] == recipe.compile
    ]
    as_described = (recipe.policy, recipe.compile, recipe.memory_format) == _AS_DESCRIBED
    described = Policy.FLOAT32.compute_dtype_with(task.weights_in)
    width = computed.limits.bits / described.limits.bits
    saved = task.saved_bytes_per_sample * samples * width
    return find_bound(
        step_seconds=measured.step_seconds,
        samples=samples,
        flops_per_sample=task.flops_per_sample,
        peak_gflops=None if facts.disturbed else peak,
        traffic=min_traffic_bytes(task.trainable_bytes, saved),
        bandwidth_gbps=None if facts.disturbed else bandwidth,
        data_seconds=measured.data_seconds,
        launch_seconds=_launch_seconds(result, recipe),
        update_seconds=_update_seconds(task, recipe, measured),
        operator=(task.slow_operator, task.slow_operator_share) if as_described else ("", 0.0),
        curve=[] if recipe.accumulation_steps > 1 else curve,
    )


def _update_seconds(task: TaskFacts, recipe: Recipe, measured: Measurement) -> float:
    """Return what the update takes in a step; 0 where it runs otherwise than it was timed.

    It takes no larger share of a step than of the one that it was timed in, which may have been
    disturbed.
    """
    if not task.step_seconds or recipe.compile or recipe.knobs.get("fused_optimizer"):
        return 0.0
    share = task.update_seconds / task.step_seconds
    return min(task.update_seconds, share * measured.step_seconds)


def _launch_seconds(result: TuningResult, recipe: Recipe) -> float:
    """Return what launching a step's kernels takes; 0 where they are not launched one by one."""
    task = result.preflight.task
    if recipe.compile or task.compiled or result.preflight.facts.kind not in KERNEL_LAUNCHING_KINDS:
        return 0.0
    kernels = sum(kernel.count for kernel in task.kernels)
    return FRAMEWORK_LAUNCH_SECONDS * kernels * recipe.accumulation_steps


def _tried(outcome: Outcome, space: Space) -> TriedRecipe:
    recipe = space.recipe(outcome.point)
    return TriedRecipe(
        policy=recipe.policy,
        batch_size=recipe.batch_size,
        settings=describe_settings(recipe.settings),
        status=outcome.status,
        samples_per_second=significant(outcome.rate),
        reason=outcome.reason[:_MAX_REASON],
    )


def _convolutions_in(preflight: PreflightResult) -> str:
    """Return what the baseline's convolutions ran in, where the GPU has what they may round to."""
    rounded_to = preflight.task.convolutions_in
    if not rounded_to:
        return ""
    has_it = preflight.facts.fact(DType.parse(rounded_to.lower())).support is not Support.ABSENT
    return rounded_to if has_it else ""


def _exposed_communication(result: TuningResult, recipe: Recipe) -> Ratio | None:
    """Return the share of a recipe's step that waits for other ranks; a trial measures it best."""
    known = (result.trials.measurement_of(recipe), result.measurement_of(recipe))
    measured = (each.exposed_communication for each in known if each is not None)
    found = next((each for each in measured if each is not None), None)
    return None if found is None else rounded(found)


def _break_even(result: TuningResult, recipe: Recipe) -> int | None:
    """Return the steps after which a compiled recipe is ahead of the fastest uncompiled one."""
    if not recipe.compile:
        return None
    point = dict(result.preflight.space.point(recipe))
    own = next((o for o in result.trials.history if dict(o.point) == point), None)
    plain = [o for o in result.trials.history if o.rate > 0 and not o.point["compile"]]
    if own is None or own.measurement is None or not plain:
        return None
    rival = max(plain, key=lambda o: o.rate)
    if rival.measurement is None or rival.rate >= own.rate:
        return None
    spent = max(0.0, own.measurement.warmup_seconds - rival.measurement.warmup_seconds)
    samples = spent / (1 / rival.rate - 1 / own.rate)
    return math.ceil(samples / own.measurement.samples_per_step)


def _reason(result: TuningResult, choice: Choice, bound: Bound, recipe: Recipe) -> str:
    said = _why_chosen(result, choice, bound, recipe)
    if not result.confirmation.inconclusive:
        return said
    if result.confirmation.proven is None:
        low = result.preflight.task.weights_in
        said = "the model is kept as it is" if low else "float32 is kept"
    return f"inconclusive: {result.confirmation.inconclusive}; {said}"


def _why_chosen(result: TuningResult, choice: Choice, bound: Bound, recipe: Recipe) -> str:
    weights = result.preflight.task.weights_in
    if result.confirmation.proven is not None and result.confirmation.over_baseline is not None:
        gain, same = result.confirmation.over_baseline, result.confirmation.at_same_batch
        plain = f"the model as it is, in {weights}" if weights else "float32"
        base = plain if weights else "float32 as it was run"
        said = f", over {base}, reaches {gain.in_words()}"
        if recipe.effective_batch != result.search.baseline.effective_batch:
            alike = "" if same is None else f"{same.in_words()} over {plain} at that batch, "
            said = f" reaches {alike}{gain.in_words()} the samples/s of {base},"
        return (
            f"{name_recipe(recipe, weights)}{said} and "
            f"{result.confirmation.proven.verdict.reason}; {bound.sentence}"
        )
    # what came closest is told first
    refusals = (*result.proof.refusals, *result.search.refusals, *result.preflight.refusals)
    first = "; ".join(f"{r.candidate}: {r.reason}" for r in refusals[:2])
    parts = [part for part in (choice.reason, first, bound.sentence) if part]
    return f"{name_recipe(recipe, weights)}: {'; '.join(parts)}"
