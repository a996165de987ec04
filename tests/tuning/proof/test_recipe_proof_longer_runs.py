"""How far a proof follows a recipe that passes its first steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.numerics.judging import LONG_STEPS
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.fake_tracer import BFLOAT16, FLOAT16, FakeTracer, falls


class BothWays(FakeTracer):
    """Losses that are off above and below at the same weights."""

    def compare_steps(self, *, recipe):
        found = super().compare_steps(recipe=recipe)
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

    def compare_steps(self, *, recipe):
        share = 2e-4 if recipe in self.leaning else 0.0
        return tuple(
            replace(point, loss=point.reference * (1 + share * min(point.step, 40)))
            for point in super().compare_steps(recipe=recipe)
        )


def test_what_leans_at_the_same_weights_is_followed_although_the_loss_is_flat():
    verdict = Proof(Leaning(BFLOAT16)).prove(BFLOAT16)
    assert (verdict.verdict, verdict.steps) == ("equal", 480)
    late = Proof(Leaning(BFLOAT16, late_error=0.001)).prove(BFLOAT16)
    assert (late.verdict, late.step) == ("rejected", 480)


def test_what_passes_at_first_and_breaks_late_is_rejected_over_both_seeds():
    tracer = FakeTracer(curve=falls, late_error=0.001)
    verdict = Proof(tracer).prove(BFLOAT16)
    assert verdict.verdict == "rejected"
    assert "after 480 steps its loss is" in verdict.reason
    assert "over 2 seeds" in verdict.reason
    assert tracer.calls[-3:] == ["float32 1", "noisy 0", "noisy 1"]


def slows(step: int) -> float:
    """A loss that falls too slowly from step 30 on to be followed further than to step 60."""
    return 2.0 / (1 + step) ** 0.25


def test_what_fails_at_first_costs_no_more_however_long_float32s_loss_falls():
    tracer = FakeTracer(curve=falls, error=0.01)
    assert Proof(tracer).prove(BFLOAT16).verdict == "rejected"
    assert tracer.steps <= 1.5 * 170


def test_a_float32_that_breaks_later_on_is_followed_no_further():
    class BreaksLate(FakeTracer):
        def reference(self, *, steps, **kwargs):
            run = super().reference(steps=steps, **kwargs)
            return run if steps <= 60 else replace(run, losses=(*run.losses[:99], None))

    verdict = Proof(BreaksLate(curve=falls)).prove(BFLOAT16)
    assert verdict.accepted
    assert verdict.steps == 60


def test_what_is_followed_to_step_60_costs_at_most_half_as_much_again():
    tracer = FakeTracer(curve=slows)
    assert Proof(tracer).prove(BFLOAT16).steps == 60
    assert tracer.steps <= 1.5 * 170


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
    """float16 whose gradients overflow from a step on, ten in a row; `also` one other step.

    They grow by a factor between the last two checkpoints.
    """

    def __init__(
        self, step: int, also: tuple[int, ...] = (), grows: float = 1.0, **known: Any
    ) -> None:
        super().__init__(**known)
        self.lost, self.grows = (*also, *range(step, step + 10)), grows

    def compare_steps(self, *, recipe):
        *before, last = super().compare_steps(recipe=recipe)
        points = [replace(point, backward=1.0) for point in before]
        return (*points, replace(last, backward=self.grows))

    def trajectory(self, *, recipe, steps, **kwargs):
        run = super().trajectory(recipe=recipe, steps=steps, **kwargs)
        lost = self.lost if recipe.policy.needs_loss_scale else ()
        return replace(run, skipped=tuple(step for step in lost if step < steps))


class NotFiniteAt(FakeTracer):
    """A candidate whose training ends with a loss that is not finite."""

    def __init__(self, step: int, **known: Any) -> None:
        super().__init__(**known)
        self.last = step

    def trajectory(self, *, recipe, **kwargs):
        run = super().trajectory(recipe=recipe, **kwargs)
        ended = recipe.policy.mixed and len(run.losses) > self.last
        return replace(run, losses=(*run.losses[: self.last], None)) if ended else run


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("step", [3, 12, 45])
@pytest.mark.parametrize("known", [{}, {"step_error": 0.3}])
def test_a_training_that_is_not_finite_is_trained_once_and_no_further(recipe, step, known):
    tracer = NotFiniteAt(step, **known)
    verdict = Proof(tracer).prove(recipe)
    trained = [call for call in tracer.calls if call[-1] in "01" and "ref" not in call]
    if known and step == 45:
        assert verdict.verdict != "equal"  # 30 steps are all that is trained of what fails before
        return
    assert (verdict.verdict, verdict.step) == ("rejected", step)
    assert verdict.reason == f"the loss is not finite at step {step}"
    assert trained == [f"{recipe.policy.value} 0"]


@pytest.mark.parametrize(
    ("tracer", "scale", "verdict"),
    [
        (OverflowsAt(300), 2.0**13, "equal"),
        (OverflowsAt(300, also=(50,)), 2.0**13, "rejected"),  # a skipped step asks for more
        (OverflowsAt(300), 2.0**-3, "rejected"),  # and so do gradients near the limit
        (OverflowsAt(300, grows=1.6), 2.0**13, "rejected"),  # and those that grow
        (OverflowsAt(300, grows=1.4), 2.0**13, "equal"),
    ],
)
def test_float16_goes_on_alone_for_gradients_that_overflow_late(tracer, scale, verdict):
    found = Proof(tracer).prove(replace(FLOAT16, loss_scale=LossScale(initial=scale)))
    assert found.verdict == verdict
    assert found.accepted or "steps were skipped because gradients overflowed" in found.reason
    assert found.steps == 60
