"""The judge: what is equal, what drifts, what is rejected, and that tolerance is monotonic."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.loss_curves import SeedRun, check_stability, check_trajectory
from autoprec.core.numerics.single_step import check_single_steps
from autoprec.core.numerics.traces import NoisyStep, StepComparison
from autoprec.core.numerics.verdict import ProofEvidence, Verdict, _from_to
from autoprec.errors import UsageError
from tests.core.evidence import DEFAULT, FALLING, drifting, evidence, points, run, times


def test_a_run_like_float32_is_equal_and_says_what_it_covers():
    verdict = judge(evidence(times(1.001)), DEFAULT)
    assert verdict.verdict == "equal"
    assert verdict.accepted
    assert verdict.covered == (
        "loss and gradient at the same weights at steps 0, 2, 8, 29",
        "trainings of 30, 30 steps",
    )
    assert "after 30 steps" in verdict.reason


def test_equal_with_something_not_covered_says_so_where_it_says_equal():
    left_out = ("the short training with seed 1 (no time was left)",)
    verdict = judge(replace(evidence(times(1.001)), not_covered=left_out), DEFAULT)
    assert verdict.verdict == "equal"
    assert verdict.reason.endswith(
        "(not covered: the short training with seed 1 (no time was left))"
    )
    assert "not covered" not in judge(evidence(times(1.001)), DEFAULT).reason


def test_without_anything_recorded_nothing_is_accepted():
    verdict = judge(ProofEvidence(not_covered=("all",)), DEFAULT)
    assert verdict.verdict == "unproven"
    assert "proof_steps" in verdict.reason
    assert verdict.covered == ()
    assert (verdict.not_covered, verdict.steps) == (("all",), 0)
    assert verdict.loss_deviation is None


def test_a_loss_that_is_not_finite_is_rejected_at_its_step():
    verdict = judge(evidence(run((*FALLING[:7], None, *FALLING[8:]))), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("rejected", 7)
    assert "not finite at step 7" in verdict.reason


@pytest.mark.parametrize("loss", [None, math.inf])
def test_a_single_step_that_is_not_finite_is_rejected(loss):
    verdict = judge(ProofEvidence(comparisons=(StepComparison(8, loss, 1.0, None),)), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("rejected", 8)


def test_training_that_leaves_is_rejected_without_a_noisy_run_too():
    found = ProofEvidence(comparisons=points(), runs=(SeedRun(run(), drifting(0.02)),))
    assert judge(found, DEFAULT).verdict == "rejected"


def test_a_finer_format_is_judged_by_its_own_roundoff():
    near = ProofEvidence(comparisons=points(0.009))
    assert judge(near, DEFAULT).verdict == "equal at single steps"
    assert judge(replace(near, roundoff=2.0**-11), DEFAULT).verdict == "drift"
    noise = tuple(NoisyStep(step, 2.0, 2.0, 0.9) for step in (0, 2, 8, 29))
    sensitive = replace(near, noise=noise)
    assert judge(sensitive, DEFAULT).verdict == "equal at single steps"
    assert judge(replace(sensitive, roundoff=2.0**-11), DEFAULT).verdict == "drift"


def test_where_noise_breaks_every_gradient_it_excuses_no_training_either():
    noise = tuple(NoisyStep(step, 2.0, 2.0, 0.9) for step in (0, 2, 8, 29))
    off = (SeedRun(run(), times(1.3), times(1.5)),)
    assert judge(ProofEvidence(comparisons=points(), runs=off), DEFAULT).accepted
    sensitive = ProofEvidence(comparisons=points(), noise=noise, runs=off)
    assert judge(sensitive, DEFAULT).verdict == "rejected"


def test_float32_may_skip_as_many_steps_as_it_likes():
    skips = run(skipped=tuple(range(29)) * 3)
    found = ProofEvidence(comparisons=points(), runs=(SeedRun(skips, times(1.001)),))
    assert judge(found, DEFAULT).accepted


def test_numbers_of_the_forward_pass_that_outgrow_float16_later_are_drift():
    first = tuple(replace(point, largest=100.0) for point in points())
    later = tuple(StepComparison(step, 2.0, 2.0, 0.01, overflowed=True) for step in (59, 89, 119))
    assert judge(evidence(run(), comparisons=first), DEFAULT).accepted
    found = judge(evidence(run(), comparisons=first, headroom_comparisons=later), DEFAULT)
    assert found.verdict == "drift"
    assert "infinite at step 59" in found.reason


def test_two_skipped_steps_are_allowed_and_three_are_not():
    assert judge(evidence(run(skipped=(0, 1))), DEFAULT).accepted
    verdict = judge(evidence(run(skipped=(3, 4, 5))), DEFAULT)
    assert (verdict.verdict, verdict.step, verdict.skipped_steps) == ("rejected", 3, 6)


def test_single_steps_that_fail_where_training_does_not_are_drift():
    off = run(tuple(1.03 * loss for loss in FALLING))
    verdict = judge(evidence(off, comparisons=points(0.05)), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("drift", 0)
    assert not verdict.accepted
    assert verdict.loss_deviation == pytest.approx(0.05)


def test_a_trajectory_that_leaves_is_rejected_at_the_step_where_it_parts():
    verdict = judge(evidence(drifting(0.02)), DEFAULT)
    assert verdict.verdict == "rejected"
    assert 0 < verdict.step < 10


def test_float32_that_breaks_by_itself_proves_nothing():
    broken = SeedRun(run((1.0, None)), run((1.0, 1.0)))
    verdict = judge(ProofEvidence(runs=(broken,)), DEFAULT)
    assert verdict.verdict == "rejected"
    assert "float32 itself" in verdict.reason


def test_losses_around_zero_do_not_divide_by_nothing():
    zeros = SeedRun(run((0.0,) * 10), run((0.0,) * 10), run((0.0,) * 10))
    assert check_trajectory((zeros,), DEFAULT).passed
    assert check_single_steps((StepComparison(0, 0.0, 0.0, 0.0),), (), DEFAULT).passed


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_tolerance_must_be_a_positive_factor(factor):
    with pytest.raises(UsageError, match="factor above 0"):
        DEFAULT.scaled(factor)


losses = st.lists(
    st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=12
)
trajectories = st.builds(
    run,
    losses,
    skipped=st.lists(st.integers(0, 11), max_size=4).map(tuple),
    metric=st.none() | st.floats(-10, 10),
)
reals = st.floats(-1e6, 1e6, allow_nan=False)
errors = st.none() | st.floats(0, 1e6)
anything = st.builds(
    ProofEvidence,
    comparisons=st.lists(
        st.builds(StepComparison, st.integers(0, 30), st.none() | reals, reals, errors), max_size=4
    ).map(tuple),
    noise=st.lists(
        st.builds(NoisyStep, st.integers(0, 30), st.none() | reals, reals, errors), max_size=4
    ).map(tuple),
    runs=st.lists(
        st.builds(SeedRun, trajectories, trajectories, st.none() | trajectories), max_size=2
    ).map(tuple),
)
ORDER = ("equal", "equal at single steps", "unproven", "drift", "rejected")


def test_a_checkpoint_whose_gradient_is_infinite_is_not_passed_through():
    off = StepComparison(0, 1.0, 1.0 + 1.5 * DEFAULT.loss, None)
    right = [StepComparison(step, 1.0, 1.0, 0.0) for step in (1, 9, 29)]
    assert judge(ProofEvidence(comparisons=(off, *right)), DEFAULT).verdict != "equal"
    passed_through = replace(off, gradient_error=0.0)
    found = judge(ProofEvidence(comparisons=(passed_through, *right)), DEFAULT)
    assert found.verdict == "equal at single steps"


def test_without_a_trajectory_nothing_is_equal_but_single_steps():
    verdict = judge(ProofEvidence(comparisons=points()), DEFAULT)
    assert verdict.verdict == "equal at single steps"
    assert not verdict.accepted
    assert verdict.reason.startswith("equal at single steps, but nothing was trained: loss within")


@pytest.mark.parametrize(
    ("steps_", "verdict"), [(points(), "equal at single steps"), (points(0.05), "unproven")]
)
def test_a_stalled_machine_is_no_fault_of_the_precision(steps_, verdict):
    stalled = replace(
        evidence(drifting(0.02), comparisons=steps_),
        ended_by="a stalled machine",
        not_covered=("all",),
    )
    found = judge(stalled, DEFAULT)
    assert found.verdict == verdict
    assert found.not_covered == ("all",)
    assert not found.accepted
    lost = (StepComparison(2, None, 1.0, None),)
    assert judge(replace(stalled, comparisons=lost), DEFAULT).verdict == "rejected"


def test_a_training_that_stayed_close_before_the_proof_was_ended_tells_enough():
    """As a proof of so few steps would have told; a longer one that was asked for is missed."""
    ended = evidence(
        times(1.001), ended_by="the time limit", not_covered=("a training of 120 steps",)
    )
    ended = replace(ended, runs=ended.runs[:1])
    found = judge(ended, DEFAULT)
    assert found.verdict == "equal"
    assert found.reason.endswith("(not covered: a training of 120 steps)")
    for but in (
        {"long_runs": ended.runs},
        {"coarse": "float8"},
        {"runs": evidence(times(1.008)).runs[:1]},
        {"ended_by": "a stalled machine"},
    ):
        found = judge(replace(ended, **but), DEFAULT)
        assert found.verdict == "equal at single steps"
        assert "ended its trainings" in found.reason


def test_a_verdict_says_over_which_part_of_training_it_was_equal():
    verdict = judge(evidence(times(1.001), max_steps=120), DEFAULT)
    assert (verdict.steps, verdict.most_steps) == (30, 120)
    assert verdict.first_loss == 2.0
    assert "equal over the first 30 steps, loss 2 to 0.52" in verdict.reason


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (2.0, 0.52, "2 to 0.52"),
        (10.8501, 10.8366, "10.85 to 10.84"),
        (2.302, 2.331, "2.3 to 2.33"),
        (2.0, 2.0, "2 to 2"),
        (2.345, 2.345, "2.3 to 2.3"),
        (2.123456, 2.123455, "2.1235 to 2.1235"),
        (2.5, 2.4999999, "2.5 to 2.5"),
        (2.5, float("inf"), "2.5 to inf"),
    ],
)
def test_how_the_loss_went_is_told_in_digits_that_show_it(first, last, told):
    assert _from_to(first, last) == told


@given(anything, st.floats(0.01, 100), st.floats(1, 100))
def test_more_tolerance_never_rejects_more(found, factor, more):
    strict = judge(found, DEFAULT.scaled(factor))
    wide = judge(found, DEFAULT.scaled(factor * more))
    assert ORDER.index(wide.verdict) <= ORDER.index(strict.verdict)


@given(anything)
def test_every_verdict_is_plain_and_comes_back_as_it_was(found):
    verdict = judge(found, DEFAULT)
    text = json.dumps(to_plain(verdict), allow_nan=False)
    assert from_plain(Verdict, json.loads(text)) == verdict
    assert verdict.reason


@given(st.integers(0, 2**31))
def test_the_gate_of_float32_allows_any_skips(skips):
    wide = replace(DEFAULT, skipped=2**31)
    assert check_stability([run(skipped=tuple(range(min(skips, 30))))], wide).passed


def test_where_noise_alone_breaks_every_gradient_it_excuses_nothing():
    noise = tuple(NoisyStep(step, 3.0, 2.0, 1.0) for step in (0, 2, 8, 29))
    excused = (NoisyStep(0, 3.0, 2.0, 0.01), NoisyStep(2, 3.0, 2.0, 0.01), *noise[2:])
    assert not judge(evidence(run(), comparisons=points(0.2), noise=noise), DEFAULT).accepted
    assert judge(evidence(run(), comparisons=points(0.2), noise=excused), DEFAULT).accepted


def test_trajectories_alone_are_judged_too():
    verdict = judge(ProofEvidence(runs=(SeedRun(run(), times(1.001), times(1.001)),)), DEFAULT)
    assert verdict.accepted
    assert verdict.loss_deviation is None
    assert "after 30 steps" in verdict.reason


@pytest.mark.parametrize(
    ("off", "error", "apart", "accepted"),
    [
        (0.019, 0.1, 0.004, True),
        (0.019, 0.1, 0.006, False),  # training does not agree so well
        (0.019, 0.9, 0.004, False),  # nor do the gradients
        (0.021, 0.1, 0.004, False),  # too far off
    ],
)
def test_checkpoints_a_little_off_are_no_drift_where_trainings_agree(off, error, apart, accepted):
    steps_ = (*points()[:2], *points(off, error)[2:])
    found = judge(evidence(times(1 + apart), comparisons=steps_, noise=()), DEFAULT)
    assert found.accepted is accepted


def test_no_rejection_rests_on_a_loss_curve_where_float32s_seeds_spread_by_half():
    other = tuple(2 * loss for loss in FALLING)
    apart = SeedRun(run(other), run(1.2 * x for x in other), run(other))
    near = SeedRun(run(), times(1.2), run())
    assert (
        judge(ProofEvidence(comparisons=points(), runs=(near, near)), DEFAULT).verdict == "rejected"
    )
    assert judge(ProofEvidence(comparisons=points(), runs=(near, apart)), DEFAULT).accepted
    compared = points(0.2)
    assert (
        judge(ProofEvidence(comparisons=compared, runs=(near, apart)), DEFAULT).verdict == "drift"
    )


def test_what_was_proven_on_ranks_says_on_how_many_and_how():
    ranks = replace(evidence(times(1.001)), ranks="2 ranks with DDP")
    assert judge(ranks, DEFAULT).reason.endswith("; checked at 2 ranks with DDP")
    rejected = replace(evidence(run((*FALLING[:7], None, *FALLING[8:]))), ranks="2 ranks with DDP")
    assert "checked" not in judge(rejected, DEFAULT).reason
