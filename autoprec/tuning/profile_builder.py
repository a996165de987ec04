"""Collects what the stages found, and writes the profile from it: every claim with its number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Refusal
from autoprec.core.device.roofline import Bound, find_bound, min_traffic_bytes
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.numerics.parity import Verdict
from autoprec.core.profile import (
    Baseline,
    CheckpointRecord,
    Chosen,
    DeviceRecord,
    Evidence,
    Profile,
    TaskRecord,
    without_speeds,
)
from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.selection import Choice
from autoprec.core.speed.space import BATCH, Point, Space, point_key
from autoprec.core.speed.trial_results import Outcome
from autoprec.core.statistics import Ratio, median, relative_spread
from autoprec.version import __version__
from autoprec.workers.cpu_contention import BUSY_SHARE

#: A baseline that varies more than this between rounds makes small ratios meaningless.
NOISY = 0.25

#: A mixed policy that needs at most this share of float32's memory leaves room for a larger batch.
FREED = 0.7


@dataclass(frozen=True)
class ProvenRecipe:
    """A recipe that may be chosen, with its verdict and its measured speed."""

    recipe: Recipe
    verdict: Verdict
    rate: float
    step_seconds: float
    loss_scale: Mapping[str, Any] | None = None
    islands: Mapping[str, Any] | None = None


REFERENCE = Verdict(verdict="equal", reason="float32 is the reference itself")


@dataclass
class Findings:
    """What the stages of one tuning learned, filled in as they go."""

    facts: DeviceFacts
    task: TaskFacts
    history: tuple[Outcome, ...]
    space: Space
    ranking: tuple[Outcome, ...] = ()
    alignment: int = 1
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory_bytes: int | None = None
    proof_seconds: float = 0.0
    neighbours: float = 0.0
    choice: Choice | None = None
    baseline: Recipe | None = None
    proven: ProvenRecipe | None = None
    speedup: Ratio | None = None
    speedup_same_batch: Ratio | None = None
    waterfall: tuple[Part, ...] = ()
    inconclusive: str = ""
    not_covered: list[str] = field(default_factory=list)
    finals: dict[str, list[Measurement]] = field(default_factory=dict)

    @property
    def rehearsed(self) -> bool:
        """Whether the device is only pretended, so that nothing timed means anything."""
        return self.facts.observation.rehearsal

    def of(self, policy: str) -> list[Outcome]:
        """The outcomes of one policy, as the re-ranking left them."""
        return [o for o in self.ranking or self.history if o.point["policy"] == policy]

    def peak_of(self, recipe: Recipe) -> int:
        """The peak memory measured nearest to a recipe, in bytes."""
        point = dict(self.space.point(recipe))
        peaks = [
            (
                dict(o.point) != point,
                o.point["policy"] != recipe.policy.value,
                abs(math.log2(int(o.point[BATCH]) / recipe.batch_size)),
                o.measurement.peak_memory_bytes,
            )
            for o in self.history
            if o.measurement is not None
        ]
        return min(peaks)[-1] if peaks else 0

    def measurement_of(self, recipe: Recipe) -> Measurement:
        """A recipe's measurement: the finish's where there is one, else the search's."""
        finals = self.finals.get(recipe.key())
        if finals:
            typical = median([m.step_seconds for m in finals])
            nearest = min(finals, key=lambda m: abs(m.step_seconds - typical))
            peak = max(m.peak_memory_bytes for m in finals)
            return replace(nearest, peak_memory_bytes=peak or self.peak_of(recipe))
        measured = self.trial_of(recipe)
        if measured is None:
            raise KeyError(recipe.key())
        return measured

    def trial_of(self, recipe: Recipe) -> Measurement | None:
        """What the search measured at a recipe, if it was there."""
        for outcome in self.history:
            if outcome.measurement is not None and _same(self.space, outcome.point, recipe):
                return outcome.measurement
        return None


def _same(space: Space, point: Point, recipe: Recipe) -> bool:
    return dict(point) == dict(space.point(recipe))


def build_profile(
    findings: Findings,
    *,
    task_file: str,
    digest: str,
    checkpoint: CheckpointRecord | None,
    forced: bool,
    seconds: float,
) -> Profile:
    """The profile that the findings add up to."""
    choice, plain = findings.choice, findings.baseline
    if choice is None or plain is None:
        raise RuntimeError("a profile needs a choice")
    proven = findings.proven
    recipe = replace(proven.recipe if proven is not None else choice.recipe, forced=forced)
    base, chosen = findings.measurement_of(plain), findings.measurement_of(choice.recipe)
    bound = _bound(findings, choice.recipe, chosen)
    verdict = proven.verdict if proven is not None else REFERENCE
    none = Ratio(1.0, 1.0, 1.0, 0)
    gain = findings.speedup if proven is not None else None
    same = findings.speedup_same_batch if proven is not None else None
    evidence = Evidence(
        baseline=Baseline(
            policy=Policy.FLOAT32,
            batch_size=plain.batch_size,
            samples_per_second=_round(base.samples_per_second),
            step_seconds=_round(base.step_seconds),
            peak_memory_bytes=base.peak_memory_bytes,
            accumulation_steps=plain.accumulation_steps,
        ),
        chosen=Chosen(
            samples_per_second=_round(chosen.samples_per_second),
            step_seconds=_round(chosen.step_seconds),
            peak_memory_bytes=chosen.peak_memory_bytes,
            peak_share=None if bound.peak_share is None else _round(bound.peak_share),
            memory_share=None if bound.memory_share is None else _round(bound.memory_share),
            bound=bound.name,
            data_seconds=_round(chosen.data_seconds),
            warmup_seconds=_round(chosen.warmup_seconds),
            break_even_steps=_break_even(findings, choice.recipe),
        ),
        speedup=_rounded(gain) if gain is not None else none,
        speedup_same_batch=None if same is None else _rounded(same),
        parity=verdict,
        checkpoint=checkpoint,
        trials=len(findings.history),
        tuning_seconds=round(seconds, 1),
        proof_seconds=round(findings.proof_seconds, 1),
        reason=_reason(findings, choice, bound, recipe),
        refusals=tuple(findings.refusals),
        memory_budget_bytes=findings.memory_bytes,
        loss_scale=None if proven is None else proven.loss_scale,
        islands=None if proven is None else proven.islands,
        padding=_padding(findings, recipe),
        warnings=_warnings(findings, recipe, plain, chosen),
        waterfall=tuple(replace(p, speedup=_rounded(p.speedup)) for p in findings.waterfall),
        inconclusive=findings.inconclusive,
        not_covered=tuple(findings.not_covered),
    )
    facts = findings.facts
    if findings.rehearsed:
        evidence = without_speeds(evidence)
    return Profile(
        schema=1,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        autoprec=__version__,
        task=TaskRecord(task_file, digest, findings.task.framework),
        device=DeviceRecord(facts.kind, facts.name, facts.family, facts.fingerprint),
        software=dict(findings.task.software),
        recipe=recipe,
        evidence=evidence,
    )


def _padding(findings: Findings, recipe: Recipe) -> tuple[Mapping[str, Any], ...]:
    """Every dimension off the alignment, and the speed with and without padding, if measured."""
    multiple = recipe.alignment.multiple if recipe.alignment.modules else findings.alignment
    gain = _padding_gain(findings)
    return tuple(
        {
            "module": d.module,
            "kind": d.kind,
            "dimension": d.name,
            "size": d.size,
            "padded_to": -(-d.size // multiple) * multiple,
            "speed_with_over_without": gain,
        }
        for d in findings.task.dimensions
        if d.size % multiple
    )


def _padding_gain(findings: Findings) -> float | None:
    """The best ratio among trials that differ in the padding alone; None where there are none."""
    rates = {point_key(o.point): o.rate for o in findings.history if o.rate > 0}
    ratios = [
        o.rate / plain
        for o in findings.history
        if o.rate > 0
        and o.point.get("alignment", 1) != 1
        and (plain := rates.get(point_key({**o.point, "alignment": 1})))
    ]
    return _round(max(ratios)) if ratios else None


def _bound(findings: Findings, recipe: Recipe, measured: Measurement) -> Bound:
    fact = findings.facts.fact(recipe.policy.compute_dtype)
    curve = [
        (o.measurement.samples_per_step, o.measurement.step_seconds)
        for o in findings.history
        if o.measurement is not None
        and o.rate > 0
        and o.point["policy"] == recipe.policy.value
        and o.point["memory_format"] == recipe.memory_format
        and o.point["compile"] == recipe.compile
    ]
    task = findings.task
    width = recipe.policy.compute_dtype.limits.bits / 32
    saved = task.saved_bytes_per_sample * measured.samples_per_step * width
    return find_bound(
        step_seconds=measured.step_seconds,
        samples=measured.samples_per_step,
        flops_per_sample=task.flops_per_sample,
        peak_gflops=fact.measured_gflops,
        traffic=min_traffic_bytes(task.trainable_bytes, saved),
        bandwidth_gbps=findings.facts.measured_memory_bandwidth_gbps,
        data_seconds=measured.data_seconds,
        curve=[] if recipe.accumulation_steps > 1 else curve,
    )


def _break_even(findings: Findings, recipe: Recipe) -> int | None:
    """Steps after which a compiled recipe is ahead of the fastest uncompiled one."""
    if not recipe.compile:
        return None
    own = next((o for o in findings.history if _same(findings.space, o.point, recipe)), None)
    plain = [o for o in findings.history if o.rate > 0 and not o.point["compile"]]
    if own is None or own.measurement is None or not plain:
        return None
    rival = max(plain, key=lambda o: o.rate)
    if rival.measurement is None or rival.rate >= own.rate:
        return None
    spent = max(0.0, own.measurement.warmup_seconds - rival.measurement.warmup_seconds)
    samples = spent / (1 / rival.rate - 1 / own.rate)
    return math.ceil(samples / own.measurement.samples_per_step)


def _reason(findings: Findings, choice: Choice, bound: Bound, recipe: Recipe) -> str:
    said = _why_chosen(findings, choice, bound, recipe)
    if not findings.inconclusive:
        return said
    kept = "float32 is kept" if findings.proven is None else said
    return f"inconclusive: {findings.inconclusive}; {kept}"


def _why_chosen(findings: Findings, choice: Choice, bound: Bound, recipe: Recipe) -> str:
    if findings.proven is not None and findings.speedup is not None:
        gain = findings.speedup
        name = recipe.policy.value + (", compiled" if recipe.compile else "")
        return (
            f"{name} at batch {recipe.batch_size} is {gain.ratio:.2f}x float32 as it was run "
            f"({gain.low:.2f}-{gain.high:.2f}, {gain.rounds} rounds) and "
            f"{findings.proven.verdict.reason}; {bound.sentence}"
        )
    refused = [r for r in findings.refusals if r.reason != "not requested"]
    first = "; ".join(f"{r.candidate}: {r.reason}" for r in refused[:2])
    parts = [part for part in (choice.reason, first, bound.sentence) if part]
    return f"float32 at batch {recipe.batch_size}: " + "; ".join(parts)


def _warnings(
    findings: Findings, recipe: Recipe, plain: Recipe, measured: Measurement
) -> tuple[str, ...]:
    found = [*findings.task.warnings, *findings.notes]
    if findings.task.low_precision:
        found.append(f"the task is not plain float32: {findings.task.low_precision}")
    if recipe.effective_batch != plain.effective_batch:
        found.append(
            f"the task names no BATCH_SIZE, so the batch was chosen too: {recipe.effective_batch} "
            f"(the baseline ran with {plain.effective_batch}). Adapt the learning rate and its "
            "schedule to it, or set BATCH_SIZE to keep yours"
        )
    found += _advice(findings, recipe, plain, measured)
    if findings.not_covered:
        found.append(f"the time limit was reached; not covered: {'; '.join(findings.not_covered)}")
    if findings.rehearsed:
        return tuple(found)
    if findings.neighbours > BUSY_SHARE:
        found.append(
            f"other processes used up to {findings.neighbours:.0%} of the processors while this "
            "was measured: tune again on an idle machine"
        )
    found += _noise(findings, plain)
    found += _slower(findings, recipe)
    found += _at_the_edge(findings.space, recipe)
    if measured.data_seconds > measured.step_seconds:
        found.append(
            f"the loader needs {measured.data_seconds * 1e3:.1f} ms for a step of "
            f"{measured.step_seconds * 1e3:.1f} ms: use more loader workers"
        )
    return tuple(found)


def _advice(findings: Findings, recipe: Recipe, plain: Recipe, measured: Measurement) -> list[str]:
    """What the guides teach: use the memory that was freed, and mind the alignment."""
    found = []
    base = findings.measurement_of(plain).peak_memory_bytes
    same_batch = recipe.batch_size == plain.batch_size and recipe.policy.mixed
    if same_batch and 0 < measured.peak_memory_bytes <= FREED * base:
        found.append(
            f"{recipe.policy} needs {1 - measured.peak_memory_bytes / base:.0%} less memory than "
            "float32: a batch of twice the size is likely to fit; try BATCH_SIZE * 2"
        )
    multiple = findings.alignment
    off = [d for d in findings.task.dimensions if d.size % multiple]
    if off and not recipe.alignment.modules:
        named = ", ".join(f"{d.module} {d.name} {d.size}" for d in off[:4])
        more = f" and {len(off) - 4} more" if len(off) > 4 else ""
        found.append(
            f"this device wants dimensions in multiples of {multiple}; these are not: {named}"
            f"{more}. Padding them {_padding_seen(findings)}; choosing other sizes may"
        )
    return found


def _padding_seen(findings: Findings) -> str:
    gain = _padding_gain(findings)
    if gain is not None and not findings.rehearsed:
        return f"was measured at {gain:.2f}x and not chosen"
    tried = any(o.point.get("alignment", 1) != 1 for o in findings.history)
    return "was tried and not chosen" if tried else "was not worth a trial"


def _noise(findings: Findings, plain: Recipe) -> list[str]:
    """Say so where the baseline itself varied so much that small differences mean nothing."""
    rounds = [m.samples_per_second for m in findings.finals.get(plain.key(), [])]
    spread = relative_spread(rounds)
    if spread <= NOISY:
        return []
    return [
        f"this machine's step times vary by {spread:.0%} between rounds: differences below that "
        "are noise; run again when it is idle"
    ]


def _slower(findings: Findings, recipe: Recipe) -> list[str]:
    """Say of a recipe that alone was asked for that it is slower than float32."""
    gain = findings.speedup
    if findings.proven is None or gain is None or gain.ratio >= 1.0:
        return []
    return [
        f"{recipe.policy} is slower than float32 here ({gain.ratio:.2g}x) and was taken because "
        "nothing else was asked for: add float32 to --policies, or leave --policies out"
    ]


def _at_the_edge(space: Space, recipe: Recipe) -> list[str]:
    """Say so where the range of batches ends with the chosen one, so that a better one may follow.

    Only where batches were free to choose: a task's own BATCH_SIZE is an end that the user set.
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
        "--batch-sizes"
    ]


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _rounded(ratio: Ratio) -> Ratio:
    return Ratio(round(ratio.ratio, 4), round(ratio.low, 4), round(ratio.high, 4), ratio.rounds)
