"""The stages of a proof, from cheap to expensive: which runs follow from what is known so far.

Each stage gives the evidence with more in it. What noise does is measured only where a test fails
without it (`core.numerics.needed_noise`). Core judges; nothing here looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoprec.core.numerics import judging, needed_noise, proof_steps
from autoprec.core.numerics.headroom import needs_later_checkpoints
from autoprec.core.numerics.judging import LONG_STEPS
from autoprec.core.numerics.late_failures import (
    magnitudes_grow,
    needs_more_steps,
    needs_second_seed,
)
from autoprec.core.numerics.loss_origin import above_origin
from autoprec.core.numerics.loss_scale_choice import is_near_limit
from autoprec.core.numerics.needed_seeds import is_lost
from autoprec.core.numerics.single_step import is_noise_sensitive
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import ProofEvidence
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof import loss_scale_search
from autoprec.tuning.proof.recorded_runs import SEEDS, RecordedRuns, RunRecorder


class EvidenceStages:
    """Records the evidence of recipes through one recorder, stage by stage."""

    def __init__(self, recorder: RunRecorder, tolerance: Tolerance) -> None:
        self._recorder, self._tolerance = recorder, tolerance

    def of(
        self, recipe: Recipe, evidence: ProofEvidence, seeds: Sequence[int], until_failure: bool
    ) -> Iterator[ProofEvidence]:
        """Yield the evidence after each stage: same weights, a seed's first steps, longer runs."""
        recorder = self._recorder
        batch = evidence.trained_batch or recipe.batch_size
        runs = recorder.reference(recipe, proof_steps.ProofLength(evidence.max_steps, batch))
        recorder.compare(recipe, runs)
        first = min(proof_steps.FIRST_STEPS, runs.stopping_step(evidence.max_steps))
        evidence = self._settled(recipe, runs, runs.compared(evidence, first))
        yield evidence
        missing, steps = list(evidence.not_covered), min(proof_steps.SHORT_STEPS, first)
        check = judging.check_first_steps(evidence, self._tolerance)
        if any(each.loss is None for each in evidence.comparisons):
            missing.append("trainings (the loss is not finite already)")
            seeds = ()
        elif seeds and check.undecided in judging.DECIDED_BY_LONG_RUN:
            seeds, steps = seeds[-1:], LONG_STEPS * steps // proof_steps.SHORT_STEPS
        elif until_failure and not check.passed and not check.undecided:
            missing.append("trainings (it differs at the same weights already)")
            seeds = ()
        elif until_failure and not judging.check_all_buffers(evidence, self._tolerance).passed:
            missing.append("trainings (it leaves other buffers already)")
            seeds = ()
        elif check.passed and needs_later_checkpoints(evidence.comparisons):
            evidence = self._recorder.with_noise(evidence, runs)  # its checkpoints are replaced
            later, seeds = recorder.compare_late(recipe, runs), seeds[:1]
            evidence = replace(evidence, headroom_comparisons=later)
        evidence = replace(evidence, not_covered=tuple(missing))
        longest = first if check.passed else steps
        for seed in seeds:
            run = recorder.seed_run(
                recipe, runs, seed, steps, longest if seed == SEEDS[0] else steps
            )
            evidence = replace(evidence, runs=(*evidence.runs, run))
            yield evidence
            if not run.candidate.finite:
                break
            decided = check.passed and not check.undecided and runs.reference.metric is None
            if decided and judging.stays_close(above_origin(evidence).runs[-1], self._tolerance):
                break
            if len(evidence.runs) < len(seeds) and not check.passed:
                evidence, lost = self._look_if_lost(recipe, runs, evidence)
                if lost:
                    break
        evidence = self._settled(recipe, runs, evidence)
        yield evidence
        if seeds:
            yield from self._longer_runs(recipe, evidence, runs)

    def _look_if_lost(
        self, recipe: Recipe, runs: RecordedRuns, evidence: ProofEvidence
    ) -> tuple[ProofEvidence, bool]:
        """Say whether the first seed's training rejects a recipe, whatever the second one does.

        What noise does to it is measured only where it leaves float32 without that.
        """
        reference, tolerance = evidence.runs[0].reference, self._tolerance
        if reference.metric is not None or not is_lost(evidence, reference, tolerance):
            return evidence, False
        if not is_noise_sensitive(evidence.noise, tolerance):
            first = self._recorder.with_noisy_run(recipe, runs, evidence.runs[0])
            evidence = replace(evidence, runs=(first,))
        if is_lost(evidence, None, tolerance):
            return evidence, True
        if not is_lost(evidence, reference, tolerance):
            return evidence, False
        steps = len(reference.losses)
        other = self._recorder.float32_run(recipe, runs, SEEDS[1], steps)
        return evidence, is_lost(evidence, other, tolerance)

    def _longer_runs(
        self, recipe: Recipe, evidence: ProofEvidence, runs: RecordedRuns
    ) -> Iterator[ProofEvidence]:
        """Yield the evidence of longer runs of a recipe that passed so far.

        It is followed for as long as float32's loss falls, and over both seeds where it seems to
        break. Where both lean the same way, but too little to tell, they go to the maximum steps,
        and so does a recipe for which `needs_longest_run` says so at the same weights.

        Gradients that overflow need no float32 to be compared with: there float16 continues alone,
        and to the maximum steps where a step was skipped or the scale is near its limit.
        """
        if not judging.judge(evidence, self._tolerance).accepted:
            return
        recorder, most = self._recorder, evidence.max_steps
        steps = min(proof_steps.FIRST_STEPS, runs.stopping_step(most))
        if recipe.loss_scale is not None:
            alone = max(steps, loss_scale_search.confirmation_steps(most))
            run = recorder.candidate_run(recipe, runs, SEEDS[0], alone)
            grows = magnitudes_grow((*evidence.comparisons, *evidence.late_comparisons))
            if run.skipped or grows or is_near_limit(recipe.loss_scale):
                run = recorder.candidate_run(recipe, runs, SEEDS[0], most)
            evidence = replace(evidence, candidate_run=run)
            yield evidence
        if not proof_steps.has_ended(runs.reference.losses, most):
            recorder.extend(recipe, runs, most, stop_at_plateau=True)
        steps = runs.stopping_step(most)
        evidence = self._settled(recipe, runs, runs.compared(evidence, steps))
        if steps < most and judging.needs_longest_run(evidence, self._tolerance):
            if len(runs.reference.losses) < most:
                recorder.extend(recipe, runs, most, stop_at_plateau=False)
            steps = min(most, len(runs.reference.losses))
            evidence = runs.compared(evidence, steps)
        if steps > proof_steps.SHORT_STEPS:
            long = recorder.long_run(recipe, runs, SEEDS[0], steps)
            evidence = replace(evidence, long_runs=(long,))
        evidence = self._settled(recipe, runs, evidence)
        yield evidence
        if not evidence.long_runs:
            return
        if not needs_second_seed(above_origin(evidence).long_runs[0], self._tolerance):
            return
        for length in (steps, most):
            both = [recorder.long_run(recipe, runs, seed, length) for seed in SEEDS]
            evidence = replace(evidence, long_runs=tuple(both))
            evidence = self._settled(recipe, runs, evidence)
            if needed_noise.needs_noisy_long_runs(evidence, self._tolerance):
                both = [recorder.with_noisy_run(recipe, runs, pair) for pair in both]
                evidence = replace(evidence, long_runs=tuple(both))
            yield evidence
            if not needs_more_steps(above_origin(evidence).long_runs, self._tolerance):
                return

    def _settled(
        self, recipe: Recipe, runs: RecordedRuns, evidence: ProofEvidence
    ) -> ProofEvidence:
        """Return the evidence with what noise does, as far as a test fails without it.

        One seed's noisy training is enough: noise does much the same to the loss of every seed. A
        metric of few samples jumps.
        """
        recorder, tolerance = self._recorder, self._tolerance
        if needed_noise.needs_noise_at_checkpoints(evidence, tolerance):
            evidence = recorder.with_noise(evidence, runs)
        if not needed_noise.needs_noisy_trainings(evidence, tolerance):
            return evidence
        evidence = recorder.with_noise(evidence, runs)
        if not needed_noise.needs_noisy_trainings(evidence, tolerance):
            return evidence
        count = 1 if runs.reference.metric is None else len(evidence.runs)
        noisy = [recorder.with_noisy_run(recipe, runs, pair) for pair in evidence.runs[:count]]
        return replace(evidence, runs=(*noisy, *evidence.runs[count:]))
