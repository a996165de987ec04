"""What a verdict tells: its numbers, and its reason in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, FALLING, drifting, evidence, points, run, times

LEFT_OUT = ("the short training with seed 1", "evaluate(model)")


def test_a_verdict_holds_the_numbers_it_rests_on():
    pair = SeedRun(run(metric=0.9), replace(times(1.002), metric=0.89, skipped=(3,)), times(1.0001))
    found = judge(
        ProofEvidence(points(0.003, 0.02), runs=(pair, pair), seconds=12.5, max_steps=120), DEFAULT
    )
    assert found.accepted
    assert (found.loss_deviation, found.gradient_error) == (pytest.approx(0.003), 0.02)
    assert (found.loss_null, found.gradient_null) == (None, None)  # not measured
    assert found.trajectory_deviation == pytest.approx(0.002)
    relative = (sum((loss / 2.0) ** 2 for loss in FALLING) / 30) ** 0.5
    expected = 0.002 * relative / (0.0001 * relative + DEFAULT.trajectory_slack)
    assert found.trajectory_ratio == pytest.approx(expected)
    assert (found.metric, found.metric_reference) == (pytest.approx(0.89), pytest.approx(0.9))
    assert (found.skipped_steps, found.steps, found.most_steps) == (2, 30, 120)
    assert (found.first_loss, found.last_loss) == (2.0, pytest.approx(sum(FALLING[-6:]) / 6))
    assert (found.seconds, found.step) == (12.5, None)


def test_a_run_of_few_steps_ends_with_its_last_loss():
    pair = SeedRun(run(FALLING[:6]), run(FALLING[:6]))
    found = judge(ProofEvidence(runs=(pair,)), DEFAULT)
    assert (found.last_loss, found.steps) == (FALLING[5], 6)


def test_what_passed_is_told_in_one_sentence():
    pair = SeedRun(run(), times(1.002), times(1.0001))
    found = ProofEvidence(points(0.003), runs=(pair, pair))
    told = judge(found, DEFAULT).reason
    assert told == (
        "trains like float32: equal over the first 30 steps, loss 2 to 0.52; loss within 0.3 % at "
        "the same weights, within 0.2 % after 30 steps"
    )
    more = replace(found, start="step 5000", ranks="2 ranks with DDP", not_covered=LEFT_OUT)
    assert judge(more, DEFAULT).reason == (
        "trains like float32: equal over 30 steps from step 5000, loss 2 to 0.52; loss within "
        "0.3 % at the same weights, within 0.2 % after 30 steps; checked at 2 ranks with DDP (not "
        "covered: the short training with seed 1; evaluate(model))"
    )
    trained = judge(replace(found, comparisons=()), DEFAULT).reason
    assert trained == (
        "trains like float32: equal over the first 30 steps, loss 2 to 0.52; within 0.2 % after "
        "30 steps"
    )


def test_a_long_run_tells_where_it_ended_and_not_where_the_first_steps_did():
    losses = tuple(2.0 * 0.99**step for step in range(120))
    long = SeedRun(Trajectory(losses), Trajectory(tuple(1.04 * loss for loss in losses)))
    found = judge(replace(evidence(times(1.002)), long_runs=(long,)), DEFAULT)
    assert "within 4 % after 120 steps" in found.reason


def ending(share):
    """A run of 120 steps that spends its last fifth at this share of its first loss."""
    return Trajectory((2.0,) * 96 + (2.0 * share,) * 24)


def test_a_verdict_names_no_difference_that_contradicts_it():
    """Float32 ends near zero, and so does the candidate, at nine times that."""
    small = SeedRun(ending(1e-9), ending(8.8e-9))
    found = judge(replace(evidence(times(1.001)), long_runs=(small,)), DEFAULT)
    assert found.accepted
    assert "both end below 0.01 % of the first loss after 120 steps" in found.reason
    assert "within 3 % after" in judge(evidence(times(1.03)), DEFAULT).reason
    assert "within 7" not in found.reason


def test_as_large_a_difference_at_a_loss_that_matters_is_a_break():
    broken = SeedRun(ending(0.01), ending(0.088), ending(0.04))
    found = judge(replace(evidence(times(1.001)), long_runs=(broken, broken)), DEFAULT)
    assert not found.accepted
    assert "780 %" in found.reason


def test_steps_in_which_nothing_was_learned_say_so():
    warming_up = run((0.694, 0.703) * 15)
    pair = SeedRun(warming_up, warming_up)
    found = judge(replace(evidence(warming_up), runs=(pair, pair)), DEFAULT)
    assert found.accepted
    assert "the loss did not fall in these steps" in found.reason


@pytest.mark.parametrize(
    ("ended_by", "advice"),
    [
        ("the time limit", "give it a longer `time_limit`"),
        ("a stalled machine", "repeat it, or give it fewer steps (proof_steps)"),
    ],
)
def test_a_proof_that_was_ended_says_by_what_what_it_left_out_and_what_to_do(ended_by, advice):
    ended = evidence(drifting(0.02), comparisons=(), ended_by=ended_by, not_covered=LEFT_OUT)
    found = judge(ended, DEFAULT)
    assert found.verdict == "unproven"
    assert found.reason == (
        f"{ended_by} ended its check, not covered: the short training with seed 1; "
        f"evaluate(model); {advice}"
    )
    found = judge(replace(ended, comparisons=points()), DEFAULT)
    assert found.verdict == "equal at single steps"
    assert found.reason.startswith(
        f"equal at single steps, but {ended_by} ended its trainings ({advice}): loss within"
    )
