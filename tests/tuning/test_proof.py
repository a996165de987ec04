"""The proof, with a tracer whose training is a formula: what it runs, keeps, covers and costs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Unit
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.parity import LONG_STEPS, Tolerance
from autoprec.core.numerics.records import ExponentHistogram, NoisyStep, StepComparison, Trajectory
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import Interrupted, TaskError
from autoprec.tuning import proof as proving
from autoprec.tuning.proof import Proof
from autoprec.workers.failures import FailureKind, WorkerFailure

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 8)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale())
UNITS = (Unit("", "Net"), Unit("norm", "Norm"), Unit("one", "Linear", 0.5), Unit("two", "L", 0.5))


def flattens(step: int) -> float:
    """A loss that has fallen to a tenth of itself by step 7, and hardly falls from there on."""
    return 0.2 + 1.8 * 0.5**step


def falls(step: int) -> float:
    """A loss that falls as 1 / step, for ever."""
    return 2.0 / (1 + step)


class FakeTracer:
    """Losses by formula; a 16-bit recipe is off by `error` unless `culprits` are its islands."""

    def __init__(self, *, error: float = 0.0, shadow: float | None = 0.0, **known: Any) -> None:
        self.error, self.shadow_error = error, shadow
        self.culprits = frozenset(known.get("culprits", ("none such",)))
        self.largest, self.counts = known.get("largest", -2), known.get("counts", {})
        self.overflow, self.recovery = known.get("overflow", 99), known.get("recovery", 1)
        self.step_seconds = known.get("step_seconds", 0.001)
        self.raises: Exception | None = known.get("raises")
        self.reproducible = known.get("reproducible", True)
        self.metric: float | None = known.get("metric")
        self.stalls_after = known.get("stalls_after", math.inf)
        self.curve = known.get("curve", flattens)
        self.late_error = known.get("late_error", 0.0)
        self.calls: list[str] = []
        self.steps = 0
        self.checkpoints: Sequence[int] = ()

    def _off(self, recipe: Recipe) -> bool:
        return recipe.policy.mixed and not self.culprits <= set(recipe.float32_modules)

    def _note(self, name: str, recipe: Recipe | None = None) -> None:
        self.calls.append(name)
        if recipe is not None and recipe.policy.mixed and self.raises is not None:
            raise self.raises

    def _run(
        self, error: float, steps: int, seconds: float | None = None, **kwargs: Any
    ) -> Trajectory:
        if seconds is not None and not math.isinf(self.stalls_after):
            steps = min(steps, self.stalls_after)
        self.steps += steps
        return Trajectory(
            losses=tuple(self.curve(step) * (1 + error * step) for step in range(steps)),
            seconds=steps * self.step_seconds,
            reproducible=self.reproducible,
            metric=self.metric,
            **kwargs,
        )

    def reference(
        self,
        *,
        batch_size,
        steps,
        checkpoints,
        accumulation_steps=1,
        seconds=None,
        stop_at_plateau=False,
    ):
        self._note(f"reference {batch_size}x{accumulation_steps}")
        if stop_at_plateau:
            losses = [self.curve(step) for step in range(steps)]
            steps = next(n for n in range(1, steps + 1) if proof_steps.has_ended(losses[:n], steps))
        run = self._run(0.0, steps, seconds)
        self.checkpoints = [step for step in checkpoints if step < len(run.losses)]
        return run

    def shadow(self, *, recipe):
        self._note("shadow", recipe)
        self.steps += 2 * len(self.checkpoints)
        error = self.shadow_error if self._off(recipe) else 0.0
        loss = None if error is None else 2.0 * (1 + error)
        return tuple(StepComparison(step, loss, 2.0, 0.01) for step in self.checkpoints)

    def noise(self, *, draws):
        self._note("noise")
        self.steps += draws * len(self.checkpoints)
        return tuple(
            NoisyStep(step, 2.0001, 2.0, 0.001)
            for step, _ in itertools.product(self.checkpoints, range(draws))
        )

    def trajectory(self, *, recipe, seed, steps, noisy=False, seconds=None):
        if steps == proving.PACE_STEPS:
            return self._run(0.0, steps)
        self._note(f"{'noisy' if noisy else recipe.policy.value} {seed}", recipe)
        skipped = ()
        if recipe.loss_scale is not None and recipe.loss_scale.initial > 2.0**self.overflow:
            skipped = (0, 1, 2)
        elif recipe.loss_scale is not None and recipe.loss_scale.growth_interval < steps:
            skipped = tuple(self._overflows(recipe.loss_scale, steps))
        error = 1e-6 if noisy else self.error if self._off(recipe) else 0.0
        if steps > LONG_STEPS and self._off(recipe):
            error = self.late_error
        return self._run(error, steps, seconds, seed=seed, skipped=skipped)

    def _overflows(self, scale, steps):
        """The steps that a scale which doubles after every good step throws away."""
        exponent = math.log2(scale.initial)
        for step in range(steps):
            if exponent > self.overflow:
                yield step
                exponent -= self.recovery
            else:
                exponent += 1

    def backward_exponents(self, *, recipe, batches):
        self._note("exponents", recipe)
        return ExponentHistogram(self.largest, -20, self.counts, batches)

    def unit_magnitudes(self, *, recipe):
        raise AssertionError("a proof does not ask for these")


def test_a_good_recipe_is_equal_and_everything_was_covered():
    verdict = Proof(FakeTracer()).prove(BFLOAT16)
    assert verdict.accepted
    assert verdict.steps == proof_steps.FIRST_STEPS
    assert verdict.not_covered == ()


@pytest.mark.parametrize(("most", "cost"), [(30, 140), (480, 190)])
def test_a_proof_against_a_loss_that_rests_costs_few_steps(most, cost):
    tracer = FakeTracer()
    Proof(tracer, steps=most).prove(BFLOAT16)
    assert tracer.steps <= cost


def test_a_metric_is_calibrated_on_every_seed():
    def calls(tracer):
        Proof(tracer).prove(BFLOAT16)
        return tracer.calls

    assert "noisy 1" not in calls(FakeTracer())
    assert "noisy 1" in calls(FakeTracer(metric=0.9))


def test_a_second_recipe_uses_what_is_known_of_float32():
    tracer = FakeTracer(error=0.0005)
    proof = Proof(tracer)
    proof.prove(BFLOAT16)
    tracer.calls.clear()
    proof.prove(replace(BFLOAT16, memory_format="channels_last"))
    assert tracer.calls == ["shadow", "mixed_bfloat16 0", "mixed_bfloat16 1"]


@pytest.mark.parametrize(
    ("known", "seeds"),
    [
        ({"error": 0.0001}, 1),  # a quarter of a per cent by step 29
        ({"error": 0.0005}, 2),
        ({"shadow": 0.009, "error": 0.0001}, 1),
        ({"shadow": 0.03, "error": 0.0001}, 2),  # training settles what failed there
        ({"metric": 0.9}, 2),
    ],
)
def test_another_seed_is_asked_unless_training_stays_close_to_float32(known, seeds):
    tracer = FakeTracer(**known)
    Proof(tracer, steps=30).prove(BFLOAT16)
    assert ("mixed_bfloat16 1" in tracer.calls) is (seeds == 2)
    assert ("float32 1" in tracer.calls) is (seeds == 2)


def test_another_batch_is_another_reference():
    tracer = FakeTracer()
    proof = Proof(tracer)
    proof.prove(BFLOAT16)
    proof.prove(replace(BFLOAT16, batch_size=16, accumulation_steps=2))
    assert "reference 16x2" in tracer.calls
    proof.forget()
    proof.prove(replace(BFLOAT16, batch_size=16, accumulation_steps=2))
    assert tracer.calls.count("reference 16x2") == 2


def test_a_trajectory_that_leaves_float32_is_rejected():
    assert Proof(FakeTracer(error=0.01)).prove(BFLOAT16).verdict == "rejected"


def test_a_shadow_that_fails_alone_is_drift_unless_the_tolerance_is_wider():
    off = {"shadow": 0.03, "error": 0.0005}
    assert Proof(FakeTracer(**off)).prove(BFLOAT16).verdict == "drift"
    wide = Tolerance().scaled(4)
    assert Proof(FakeTracer(**off), tolerance=wide).prove(BFLOAT16).accepted


class BothWays(FakeTracer):
    """Losses that are off above and below at the same weights."""

    def shadow(self, *, recipe):
        found = super().shadow(recipe=recipe)
        return tuple(
            replace(p, loss=p.reference * (1 + 0.03 * (-1) ** i)) for i, p in enumerate(found)
        )


def test_losses_off_both_ways_get_one_longer_run_and_then_the_longest():
    tracer = BothWays()
    verdict = Proof(tracer, steps=LONG_STEPS).prove(BFLOAT16)
    assert verdict.accepted
    assert verdict.steps == LONG_STEPS
    assert tracer.calls[-3:] == ["mixed_bfloat16 1", "float32 1", "mixed_bfloat16 0"]
    assert tracer.steps <= 300
    assert Proof(BothWays()).prove(BFLOAT16).steps == 480
    assert Proof(BothWays(error=0.001)).prove(BFLOAT16).verdict == "drift"


class Growing(FakeTracer):
    """float16 numbers that grow until step 29; whether they go on is `further`."""

    def __init__(self, *, further: float, **known: Any) -> None:
        super().__init__(**known)
        self.further = further

    def shadow(self, *, recipe):
        early = {0: 80.0, 2: 90.0, 8: 150.0, 29: 1200.0}
        return tuple(
            replace(p, largest=early.get(p.step, 1200.0 * self.further ** (p.step - 29)))
            for p in super().shadow(recipe=recipe)
        )


def test_numbers_that_grow_are_looked_at_further_on():
    tracer = Growing(further=1.0)
    proof = Proof(tracer)
    scale, _ = proof.tune_loss_scale(FLOAT16)
    tracer.steps = 0
    verdict = proof.prove(replace(FLOAT16, loss_scale=scale))
    assert verdict.accepted
    assert (
        verdict.covered[0]
        == "loss and gradient at the same weights at steps 0, 2, 8, 29, 34, 39, 44, 49, 54, 59"
    )
    assert tracer.steps <= 250
    assert Proof(Growing(further=1.1)).prove(FLOAT16).verdict == "drift"
    tracer.calls.clear()
    proof.prove(BFLOAT16)
    assert tracer.calls[0] == "reference 8x1"  # its checkpoints had been replaced


def test_a_shadow_that_is_not_finite_ends_the_proof_at_once():
    tracer = FakeTracer(shadow=None)
    verdict = Proof(tracer).prove(BFLOAT16)
    assert verdict.verdict == "rejected"
    assert "noise" not in tracer.calls
    assert "not finite" in verdict.not_covered[0]


def test_until_failure_leaves_the_trajectories_out():
    tracer = FakeTracer(shadow=0.3)
    verdict = Proof(tracer).prove(BFLOAT16, until_failure=True)
    assert not verdict.accepted
    assert tracer.calls[-1] == "noise"


def test_a_stalled_proof_says_what_it_did_not_cover_and_is_no_other_verdict():
    stalled = Proof(FakeTracer(stalls_after=12)).prove(BFLOAT16)
    assert stalled.verdict == "unproven"
    assert "no time was left at step 12" in stalled.not_covered[0]
    later = Proof(FakeTracer(stalls_after=30, curve=falls), steps=30).prove(BFLOAT16)
    assert later.accepted


class Stalls(FakeTracer):
    """A machine that stalls when the candidate trains."""

    def trajectory(self, *, recipe, **kwargs):
        self.stalls_after = 3 if recipe.policy.mixed else math.inf
        return super().trajectory(recipe=recipe, **kwargs)


def test_what_stalls_after_the_shadow_is_equal_at_single_steps_only():
    verdict = Proof(Stalls(error=0.01)).prove(BFLOAT16)
    assert verdict.verdict == "equal at single steps"
    assert not verdict.accepted
    assert any("training of 60 steps" in text for text in verdict.not_covered)


def test_the_verdict_is_the_same_however_slow_the_machine_is(monkeypatch):
    def verdict(pause):
        now = itertools.count(0.0, pause)
        monkeypatch.setattr(proving.time, "monotonic", lambda: next(now))
        return replace(Proof(FakeTracer(curve=falls), steps=480).prove(BFLOAT16), seconds=0.0)

    assert verdict(20.0) == verdict(0.001)
    assert verdict(0.001).accepted


def test_the_number_of_steps_is_chosen_once_and_kept():
    chosen: dict[str, int] = {}
    first = Proof(FakeTracer(curve=falls, step_seconds=0.1), chosen=chosen).prove(BFLOAT16)
    assert (first.most_steps, chosen) == (120, {"8x1": 120})
    again = Proof(FakeTracer(curve=falls, step_seconds=0.001), chosen=chosen).prove(BFLOAT16)
    assert (again.most_steps, again.steps) == (120, 120)
    told = Proof(FakeTracer(curve=falls), chosen=chosen, steps=60).prove(BFLOAT16)
    assert (told.most_steps, told.steps) == (60, 60)
    assert Proof(FakeTracer(step_seconds=0.1), seconds=20).prove(BFLOAT16).most_steps == 30


def test_a_loss_that_falls_is_followed_and_a_flat_one_is_not():
    falling = Proof(FakeTracer(curve=falls)).prove(BFLOAT16)
    assert (falling.steps, falling.most_steps) == (480, 480)
    assert "equal over the first 480 steps, loss 2 to " in falling.reason
    assert falling.covered == (
        "loss and gradient at the same weights at steps 0, 2, 8, 29, 59, 119, 239, 479",
        "trainings of 480 steps",
    )
    assert Proof(FakeTracer()).prove(BFLOAT16).steps == 60


class Leaning(FakeTracer):
    """Its loss at the same weights leaves float32's from mark to mark, for some recipes."""

    def __init__(self, *leaning: Recipe, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.leaning = leaning

    def shadow(self, *, recipe):
        share = 2e-4 if recipe in self.leaning else 0.0
        return tuple(
            replace(point, loss=point.reference * (1 + share * min(point.step, 40)))
            for point in super().shadow(recipe=recipe)
        )


def test_what_leans_at_the_same_weights_is_followed_although_the_loss_is_flat():
    verdict = Proof(Leaning(BFLOAT16)).prove(BFLOAT16)
    assert (verdict.verdict, verdict.steps) == ("equal", 480)
    late = Proof(Leaning(BFLOAT16, late_error=0.001)).prove(BFLOAT16)
    assert (late.verdict, late.step) == ("rejected", 480)


def test_a_verdict_does_not_depend_on_how_far_an_earlier_candidate_was_followed():
    other = replace(BFLOAT16, compile=True)
    for curve in (lambda step: 2.0, lambda step: 1.0 + falls(min(step, 50)), falls):
        proof = Proof(Leaning(other, curve=curve))
        assert proof.prove(other).steps == 480
        again = replace(proof.prove(BFLOAT16), seconds=0.0)
        assert again == replace(Proof(Leaning(curve=curve)).prove(BFLOAT16), seconds=0.0)


def test_what_passes_at_first_and_breaks_late_is_rejected_over_both_seeds():
    tracer = FakeTracer(curve=falls, late_error=0.001)
    verdict = Proof(tracer).prove(BFLOAT16)
    assert verdict.verdict == "rejected"
    assert "after 480 steps its loss is" in verdict.reason
    assert "over 2 seeds" in verdict.reason
    assert tracer.calls[-3:] == ["noisy 0", "mixed_bfloat16 1", "float32 1", "noisy 1"][-3:]


def slows(step: int) -> float:
    """A loss that falls too slowly from step 30 on to be followed further than to step 60."""
    return 2.0 / (1 + step) ** 0.25


def test_what_fails_at_first_costs_no_more_however_long_float32s_loss_falls():
    tracer = FakeTracer(curve=falls, error=0.01)
    assert Proof(tracer).prove(BFLOAT16).verdict == "rejected"
    assert tracer.steps <= 1.5 * 170 + proving.PACE_STEPS


def test_a_second_recipe_is_judged_as_if_it_were_the_first():
    tracer = FakeTracer(curve=falls)
    proof = Proof(tracer)
    first = proof.prove(BFLOAT16)
    tracer.calls.clear()
    second = proof.prove(replace(BFLOAT16, memory_format="channels_last"))
    assert replace(second, seconds=0.0) == replace(first, seconds=0.0)
    assert "reference 8x1" not in tracer.calls
    tracer.shadow_error = 0.03
    failed = proof.prove(BFLOAT16)
    alone = Proof(FakeTracer(curve=falls, shadow=0.03)).prove(BFLOAT16)
    assert replace(failed, seconds=0.0) == replace(alone, seconds=0.0)


def test_a_float32_that_breaks_later_on_is_followed_no_further():
    class BreaksLate(FakeTracer):
        def reference(self, *, steps, **kwargs):
            run = super().reference(steps=steps, **kwargs)
            return run if steps <= 60 else replace(run, losses=(*run.losses[:-1], None))

    verdict = Proof(BreaksLate(curve=falls)).prove(BFLOAT16)
    assert verdict.accepted
    assert verdict.steps == 60


def test_what_is_followed_to_step_60_costs_at_most_half_as_much_again():
    tracer = FakeTracer(curve=slows)
    assert Proof(tracer).prove(BFLOAT16).steps == 60
    assert tracer.steps <= 1.5 * 170 + proving.PACE_STEPS


class Leans(FakeTracer):
    """A candidate that is ever further away, by the share `lean` more at each step."""

    lean = 0.0

    def trajectory(self, *, recipe, steps, noisy=False, **kwargs):
        run = super().trajectory(recipe=recipe, steps=steps, noisy=noisy, **kwargs)
        if noisy or not recipe.policy.mixed:
            return run
        away = [loss * (1 + self.lean * step) for step, loss in enumerate(run.losses)]
        return replace(run, losses=tuple(away))


@pytest.mark.parametrize(
    ("lean", "verdict", "steps"),
    [(5e-4, "equal", 60), (1.2e-3, "rejected", 480), (0.0, "equal", 60)],
)
def test_what_leans_away_over_both_seeds_is_followed_to_the_end(lean, verdict, steps):
    tracer = Leans(curve=slows)
    tracer.lean = lean
    found = Proof(tracer).prove(BFLOAT16)
    assert (found.verdict, found.steps) == (verdict, steps)


class OverflowsAt(FakeTracer):
    """float16 whose gradients overflow from a step on, ten in a row; `also` one other step."""

    def __init__(self, step: int, also: tuple[int, ...] = (), **known: Any) -> None:
        super().__init__(**known)
        self.lost = (*also, *range(step, step + 10))

    def trajectory(self, *, recipe, steps, **kwargs):
        run = super().trajectory(recipe=recipe, steps=steps, **kwargs)
        lost = self.lost if recipe.policy.needs_loss_scale else ()
        return replace(run, skipped=tuple(step for step in lost if step < steps))


@pytest.mark.parametrize(
    ("tracer", "scale", "verdict"),
    [
        (OverflowsAt(60), 2.0**13, "rejected"),  # float32 was flat until then
        (OverflowsAt(300), 2.0**13, "equal"),
        (OverflowsAt(300, also=(50,)), 2.0**13, "rejected"),  # a skipped step asks for more
        (OverflowsAt(300), 2.0**-3, "rejected"),  # and so do gradients near the limit
    ],
)
def test_float16_goes_on_alone_for_gradients_that_overflow_late(tracer, scale, verdict):
    found = Proof(tracer).prove(replace(FLOAT16, loss_scale=LossScale(initial=scale)))
    assert found.verdict == verdict
    assert found.accepted or "steps were skipped because gradients overflowed" in found.reason
    assert found.steps == 60


def test_a_followed_proof_costs_no_more_than_the_ladder_says():
    for steps in (30, 120, 480):
        tracer = FakeTracer(curve=falls)
        Proof(tracer, steps=steps).prove(BFLOAT16)
        assert tracer.steps <= proof_steps.cost_in_steps(steps)


def test_the_time_of_the_whole_tuning_bounds_a_proof_however_long_it_may_take():
    limited = Proof(FakeTracer(step_seconds=1.0), seconds=600, until=time.monotonic() + 10)
    assert limited.prove(BFLOAT16).most_steps == 8
    assert Proof(FakeTracer(step_seconds=1.0), seconds=600).prove(BFLOAT16).most_steps == 120
    over = Proof(FakeTracer(stalls_after=3), steps=30, until=time.monotonic())
    assert over.prove(BFLOAT16).verdict == "unproven"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("value cannot be converted to type at::Half without overflow\nat line 3"),
        WorkerFailure(FailureKind.USER_ERROR, "value cannot be converted"),
        WorkerFailure(FailureKind.UNSUPPORTED, "value cannot be converted"),
    ],
)
def test_code_that_raises_under_the_recipe_is_a_rejection(error):
    tracer = FakeTracer(raises=error)
    proof = Proof(tracer)
    verdict = proof.prove(BFLOAT16)
    assert verdict.verdict == "rejected"
    assert verdict.reason.startswith("the task's own code raises under it: value cannot")
    proof.prove(BFLOAT16)
    assert tracer.calls.count("reference 8x1") == 2


@pytest.mark.parametrize(
    "error", [Interrupted("stop"), MemoryError(), WorkerFailure(FailureKind.OUT_OF_MEMORY, "")]
)
def test_what_is_not_the_recipes_fault_goes_on_up(error):
    with pytest.raises(type(error)):
        Proof(FakeTracer(raises=error)).prove(BFLOAT16)


def test_checkpoints_without_memory_are_said():
    class Small(FakeTracer):
        def shadow(self, *, recipe):
            return super().shadow(recipe=recipe)[:2]

    assert "no memory" in Proof(Small()).prove(BFLOAT16).not_covered[0]


def test_replayed_data_are_said():
    assert "replayed" in Proof(FakeTracer(reproducible=False)).prove(BFLOAT16).covered[-1]


def test_the_metric_of_a_longer_run_is_not_compared():
    verdict = Proof(FakeTracer(metric=0.5)).prove(BFLOAT16)
    assert (verdict.metric, verdict.metric_reference) == (0.5, 0.5)


def test_a_float32_that_is_not_finite_itself_proves_nothing_and_says_where() -> None:
    class Diverges(FakeTracer):
        def reference(self, **kwargs: Any) -> Trajectory:
            run = super().reference(**kwargs)
            return replace(run, losses=(*run.losses[:3], None, *run.losses[4:]))

    with pytest.raises(TaskError, match=r"in float32 the loss is inf or NaN at step 3 \(counted"):
        Proof(Diverges()).prove(BFLOAT16)
