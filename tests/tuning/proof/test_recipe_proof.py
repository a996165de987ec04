"""The proof, with a tracer whose training is a formula: what it runs, keeps, covers and costs."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.proof_steps import ProofLength
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.errors import Interrupted
from autoprec.tuning.proof import recipe_proof as proving
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.tuning.proof.fake_tracer import BFLOAT16, FLOAT16, FakeTracer, falls


def test_a_good_recipe_is_equal_and_everything_was_covered():
    verdict = Proof(FakeTracer()).prove(BFLOAT16)
    assert verdict.accepted
    assert verdict.steps == proof_steps.FIRST_STEPS
    assert verdict.not_covered == ()


@pytest.mark.parametrize(("most", "cost"), [(30, 68), (480, 130)])
def test_a_proof_against_a_loss_that_rests_costs_two_trainings_and_single_steps(most, cost):
    tracer = FakeTracer()
    Proof(tracer, steps=most).prove(BFLOAT16)
    assert tracer.steps == cost


@pytest.mark.parametrize(("step_seconds", "cost"), [(0.001, 130), (0.1, 130 + 21 + 3)])
def test_float32s_first_steps_tell_the_pace_and_run_anew_only_where_two_seconds_are_too_few(
    step_seconds, cost
):
    tracer = FakeTracer(step_seconds=step_seconds)
    assert Proof(tracer).prove(BFLOAT16).accepted
    assert tracer.steps == cost
    assert tracer.calls.count("reference 8x1") == (1 if cost == 130 else 2)


def test_a_proof_of_fewer_steps_has_checkpoints_of_its_own():
    verdict = Proof(FakeTracer(), seconds=0.05).prove(BFLOAT16)
    assert (verdict.most_steps, verdict.not_covered) == (8, ())
    assert verdict.covered[0] == "loss and gradient at the same weights at steps 0, 2, 7"


@pytest.mark.parametrize(
    ("known", "seeds"),
    [
        ({"error": 0.0001}, 1),  # a quarter of a per cent by step 29
        ({"error": 0.0005}, 2),
        ({"step_error": 0.009, "error": 0.0001}, 1),
        ({"step_error": 0.03, "error": 0.0001}, 2),  # training settles what failed there
        ({"metric": 0.9}, 2),
    ],
)
def test_another_seed_is_asked_unless_training_stays_close_to_float32(known, seeds):
    tracer = FakeTracer(**known)
    Proof(tracer, steps=30).prove(BFLOAT16)
    assert ("mixed_bfloat16 1" in tracer.calls) is (seeds == 2)
    assert ("float32 1" in tracer.calls) is (seeds == 2)


@pytest.mark.parametrize(("error", "verdict"), [(0.001, "equal"), (0.015, "equal"), (0.3, "drift")])
def test_a_batch_of_another_size_is_compared_as_well(error, verdict):
    """What is near the limit there is left to training."""
    found = Proof(FakeTracer(long_batch_error=error)).prove(BFLOAT16)
    assert found.verdict == verdict
    assert "a step on the largest batch" in found.covered
    if verdict == "drift":
        said = "on the largest batch, at the same weights of step 29 its loss is 30 %"
        assert said in found.reason


BOTH = ["mixed_bfloat16 0", "mixed_bfloat16 1"]


@pytest.mark.parametrize(
    ("known", "seeds"),
    [
        ({"error": 3.0, "step_error": 3.0}, ["mixed_bfloat16 0"]),  # twice as far as any two seeds
        ({"error": 0.03, "step_error": 0.3}, ["mixed_bfloat16 0", "float32 1"]),
        ({"error": 0.003, "step_error": 0.3}, [*BOTH, "float32 1"]),
        ({"error": 0.03, "step_error": 0.3, "noise_size": 0.03}, None),
    ],
)
def test_a_second_seed_is_not_trained_where_it_cannot_change_the_verdict(known, seeds):
    tracer = FakeTracer(**known)
    verdict = Proof(tracer, steps=30).prove(BFLOAT16)
    trained = [call for call in tracer.calls if call[-1] in "01" and "noisy" not in call]
    trained = [call for call in trained if not call.startswith("reference")]
    if seeds is None:  # noise excuses it, so that both are looked at
        assert set(BOTH) <= set(trained)
        assert verdict.verdict == "drift"
    else:
        assert trained == seeds
        assert verdict.verdict == "rejected"


@pytest.mark.parametrize(("worse", "verdict"), [(0.01, "equal"), (0.3, "rejected")])
def test_the_tasks_own_evaluation_decides_as_well(worse, verdict):
    found = Proof(FakeTracer(metric=0.9, worse=worse), steps=30).prove(BFLOAT16)
    assert found.verdict == verdict
    if verdict == "rejected":
        assert found.reason == "evaluate(model) gives 0.6 where float32 reaches 0.9"


def test_a_trajectory_that_leaves_float32_is_rejected():
    assert Proof(FakeTracer(error=0.01)).prove(BFLOAT16).verdict == "rejected"


def test_single_steps_that_fail_alone_are_drift_unless_the_tolerance_is_wider():
    off = {"step_error": 0.03, "error": 0.0005}
    assert Proof(FakeTracer(**off)).prove(BFLOAT16).verdict == "drift"
    wide = Tolerance().scaled(4)
    assert Proof(FakeTracer(**off), tolerance=wide).prove(BFLOAT16).accepted


def test_a_single_step_that_is_not_finite_ends_the_proof_at_once():
    tracer = FakeTracer(step_error=None)
    verdict = Proof(tracer).prove(BFLOAT16)
    assert verdict.verdict == "rejected"
    assert "noise" not in tracer.calls
    assert "not finite" in verdict.not_covered[0]


def test_what_multiplies_in_float8_takes_every_step_and_it_is_said_how_little_that_shows():
    float8 = Proof(FakeTracer(), steps=120).prove(
        replace(BFLOAT16, compile=True, knobs={"float8": True})
    )
    assert float8.verdict == "equal"
    assert float8.steps == float8.most_steps == 120
    assert "in float8, 120 steps show gross failures only: compare a longer " in float8.reason
    plain = Proof(FakeTracer(), steps=120).prove(BFLOAT16)
    assert plain.steps < 120
    assert "gross failures" not in plain.reason


def test_until_failure_leaves_the_trajectories_out():
    tracer = FakeTracer(step_error=0.3)
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


def test_what_stalls_after_the_single_steps_is_equal_at_those_only():
    verdict = Proof(Stalls(error=0.01)).prove(BFLOAT16)
    assert verdict.verdict == "equal at single steps"
    assert not verdict.accepted
    assert any("training of 60 steps" in text for text in verdict.not_covered)


class StallsAtTheEnd(FakeTracer):
    """A machine that stalls when the second seed is trained."""

    def trajectory(self, *, seed, **kwargs):
        self.stalls_after = 3 if seed else math.inf
        return super().trajectory(seed=seed, **kwargs)


def test_a_training_that_was_done_before_time_was_over_counts_if_it_stayed_close():
    limit = time.monotonic() + 1000

    def verdict(recipe=BFLOAT16, error=0.0, until=limit):
        tracer = StallsAtTheEnd(metric=0.9, error=error)
        return Proof(tracer, steps=30, until=until).prove(recipe)

    done = verdict()
    assert done.verdict == "equal"
    assert done.not_covered == ("a training of 30 steps (no time was left at step 3)",)
    assert verdict(error=0.0006).verdict == "equal at single steps"
    assert verdict(FLOAT16).verdict == "equal at single steps"  # it has to train for longer
    assert verdict(until=math.inf).verdict == "equal at single steps"  # the machine stalled


def test_the_verdict_is_the_same_however_slow_the_machine_is(monkeypatch):
    def verdict(pause):
        now = itertools.count(0.0, pause)
        monkeypatch.setattr(proving.time, "monotonic", lambda: next(now))
        return replace(Proof(FakeTracer(curve=falls), steps=480).prove(BFLOAT16), seconds=0.0)

    assert verdict(20.0) == verdict(0.001)
    assert verdict(0.001).accepted


def test_the_number_of_steps_is_chosen_once_and_kept():
    chosen: dict[str, ProofLength] = {}
    first = Proof(FakeTracer(curve=falls, step_seconds=0.1), chosen=chosen).prove(BFLOAT16)
    assert (first.most_steps, chosen) == (120, {"8x1": ProofLength(120, 8)})
    again = Proof(FakeTracer(curve=falls, step_seconds=0.001), chosen=chosen).prove(BFLOAT16)
    assert (again.most_steps, again.steps) == (120, 120)
    told = Proof(FakeTracer(curve=falls), chosen=chosen, steps=60).prove(BFLOAT16)
    assert (told.most_steps, told.steps) == (60, 60)
    assert Proof(FakeTracer(step_seconds=0.1), seconds=20).prove(BFLOAT16).most_steps == 30


def test_a_followed_proof_costs_no_more_than_the_ladder_says():
    for steps in (30, 120, 480):
        tracer = FakeTracer(curve=falls)
        Proof(tracer, steps=steps).prove(BFLOAT16)
        assert tracer.steps <= proof_steps._training_cost(steps) + proof_steps._single_steps(steps)


def test_the_time_of_the_whole_tuning_bounds_a_proof_however_long_it_may_take():
    limited = Proof(FakeTracer(step_seconds=1.0), seconds=600, until=time.monotonic() + 10)
    assert limited.prove(BFLOAT16).most_steps == 8
    assert Proof(FakeTracer(step_seconds=1.0), seconds=600).prove(BFLOAT16).most_steps == 120
    over = Proof(FakeTracer(stalls_after=3), steps=30, until=time.monotonic()).prove(BFLOAT16)
    assert over.verdict == "unproven"
    assert over.reason.startswith("the time limit ended its check")


class Evaluates(FakeTracer):
    """Calls a metric that takes some seconds after every training."""

    def _run(self, *args, **kwargs):
        run = super()._run(*args, **kwargs)
        return replace(run, seconds=run.seconds + self.evaluating, step_seconds=self.step_seconds)

    evaluating = 0.0


@pytest.mark.parametrize(
    ("metric", "evaluating", "steps"),
    [(None, 0.0, 30), (None, 2.0, 8), (0.9, 0.0, 8), (0.9, 2.0, 8)],
)
def test_no_check_is_begun_that_usually_takes_longer_than_there_is_time(metric, evaluating, steps):
    """In 10 s: 68 steps of 0.1 s, and another seed's 60 where a metric is compared."""
    tracer = Evaluates(step_seconds=0.1, metric=metric)
    tracer.evaluating = evaluating
    limited = Proof(tracer, until=time.monotonic() + 10).prove(BFLOAT16)
    assert (limited.most_steps, limited.verdict) == (steps, "equal")
    assert Proof(tracer).prove(BFLOAT16).most_steps == 120


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
