"""Losses that end near zero: what is compared there, what is said, and what is a break."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.late_failures import check_long_runs
from autoprec.core.numerics.loss_curves import SeedRun, check_trajectory
from autoprec.core.numerics.single_step import check_single_steps
from autoprec.core.numerics.tolerance import Check, chance, size_of
from autoprec.core.numerics.traces import StepComparison
from autoprec.core.numerics.verdict import (
    ProofEvidence,
    describe_single_steps,
    describe_success,
)
from tests.core.evidence import DEFAULT, evidence, run, times

STEPS = 120


def ending(share, first=2.0, steps=STEPS):
    """A run that falls and spends its last fifth at this share of the first loss."""
    tail = steps // 5
    return run([first] * (steps - tail) + [share * first] * tail)


def long_run(plain, candidate, noisy=None):
    return SeedRun(ending(plain), ending(candidate), None if noisy is None else ending(noisy))


@pytest.mark.parametrize(
    ("noise", "factor", "allowed"),
    [(0.1, 3.0, 0.3), (0.5, 3.0, 1.0), (2.0, 3.0, 2.0), (0.0, 3.0, 0.0), (0.2, 5.0, 1.0)],
)
def test_chance_is_several_times_noise_up_to_a_doubling_and_then_noise(noise, factor, allowed):
    assert chance(noise, factor) == pytest.approx(allowed)


def test_runs_that_both_end_near_zero_are_not_compared_there():
    found = check_long_runs([long_run(1e-12, 9e-6)], DEFAULT)
    assert found.passed
    assert (found.below, found.excused) == (1e-4, "")
    assert check_long_runs([long_run(1e-12, 1.05e-4)], DEFAULT).problem  # only float32 does
    assert check_long_runs([long_run(2e-4, 2.1e-4)], DEFAULT).below is None
    assert check_long_runs([long_run(2e-4, 0.9e-4)], DEFAULT).below is None
    two = [long_run(1e-12, 9e-6), long_run(0.2, 0.2)]
    assert check_long_runs(two, DEFAULT).below is None


def test_a_small_loss_that_noise_moves_as_far_passes_and_says_so():
    found = check_long_runs([long_run(1e-3, 8.8e-3, 4e-3)], DEFAULT)
    assert found.deviation == pytest.approx(7.8)
    assert (found.below, found.excused) == (0.03, "noise in the weights moves float32 as much")


def test_a_loss_that_matters_is_not_excused_by_noise_that_moves_float32_less():
    broken = check_long_runs([long_run(0.01, 0.088, 0.04)], DEFAULT)
    assert "780 % away" in broken.problem
    assert check_long_runs([long_run(0.01, 0.088, 0.099)], DEFAULT).passed  # noise goes further
    assert check_long_runs([long_run(0.1, 0.19, 0.15)], DEFAULT).passed
    assert not check_long_runs([long_run(0.1, 0.21, 0.15)], DEFAULT).passed
    assert check_long_runs([long_run(0.1, 0.02, 0.15)], DEFAULT).passed  # it is better


def test_seeds_that_differ_in_both_directions_excuse_no_loss_twice_as_high():
    lower = long_run(0.1, 0.06)
    small = check_long_runs([long_run(0.1, 0.2), lower], DEFAULT)
    assert (small.passed, small.excused) == (True, "seeds differ in both directions")
    assert small.below is None
    assert not check_long_runs([long_run(0.1, 0.4), lower], DEFAULT).passed
    tiny = [long_run(1e-3, 1.7e-2), long_run(1e-3, 6e-4)]
    found = check_long_runs(tiny, DEFAULT)
    assert (found.below, found.excused) == (0.03, "seeds differ in both directions")


def test_seeds_of_float32_that_end_apart_excuse_as_much():
    runs = [long_run(0.1, 0.13), long_run(0.2, 0.26)]
    found = check_long_runs(runs, DEFAULT)
    assert (found.passed, found.below) == (True, None)
    assert found.excused == "float32's own seeds end as far from each other"


def test_a_short_run_says_what_excuses_it():
    def checked(candidate, noisy, plain=0.2, others=()):
        pair = SeedRun(ending(plain), ending(candidate), ending(noisy) if noisy else None)
        return check_trajectory((pair, *others), DEFAULT)

    assert (checked(0.2, None).excused, checked(0.2, None).below) == ("", None)
    assert checked(0.02, None, plain=0.021).below == 0.03
    assert checked(0.031, None, plain=0.0299).below is None
    excused = checked(0.24, 0.23)
    assert (excused.passed, excused.excused) == (
        True,
        "noise in the weights moves float32 as much",
    )
    spread = checked(0.21, None, others=(SeedRun(ending(0.4), ending(0.48)),))
    assert (spread.passed, spread.excused) == (
        True,
        "float32's own seeds end as far from each other",
    )


def test_a_short_run_at_twice_the_loss_is_excused_only_by_noise_that_goes_as_far():
    def noisy_between(candidate, noisy):
        """Noise moves the second half's single steps, half of which are the last fifth's."""
        plain = run([2.0] * 15 + [0.2] * 15)
        moved = [2.0] * 15 + [noisy] * 15
        pair = SeedRun(plain, run([2.0] * 15 + [candidate] * 15), run(moved))
        return check_trajectory((pair,), DEFAULT)

    assert noisy_between(0.39, 0.3).passed  # 95 % away, noise 50 %
    assert not noisy_between(0.41, 0.3).passed  # 105 % away
    assert noisy_between(0.6, 0.61).passed  # noise goes further
    assert not noisy_between(0.62, 0.6).passed


def beginning(first, factor=1.0, steps=STEPS):
    """A run that begins near zero, jumps, and falls from there."""
    return run([first] + [factor * 0.4 * 0.98**step for step in range(steps - 1)])


def test_where_training_begins_near_zero_its_largest_loss_tells_what_is_small():
    assert size_of([2.0, 100.0, 0.5]) == 2.0  # a loss that only spikes keeps its first
    assert size_of([0.0, 0.4, 0.3]) == size_of([-1e-9, 0.4, 0.3]) == 0.4
    assert size_of([None, 1.0]) == 1.0
    assert size_of([]) == size_of([0.0]) == 0.0
    plain, same, away = beginning(0.0), beginning(1e-6), beginning(1e-6, 1.3)
    for check in (check_trajectory, check_long_runs):
        found = check([SeedRun(plain, same)], DEFAULT)
        assert found.passed, found.problem
        assert found.deviation < 0.001
        assert "30 % away" in check([SeedRun(plain, away)], DEFAULT).problem
    at_first, later = StepComparison(0, 1e-6, 0.0, 0.01), StepComparison(8, 0.3001, 0.3, 0.01)
    found = check_single_steps((at_first, later), (), DEFAULT)
    assert (found.passed, found.deviation) == (True, pytest.approx(1 / 3000))
    at_rest = StepComparison(0, 1e-6, 0.0, None)  # no gradient there, so no share of it
    assert check_single_steps((at_rest, later), (), DEFAULT).passed
    infinite = StepComparison(0, 1.0, 1.0, None)
    assert "infinitely far" in check_single_steps((infinite, later), (), DEFAULT).problem
    wrong = StepComparison(0, 0.02, 0.0, 0.01)
    assert "of step 0 its loss is" in check_single_steps((wrong, later), (), DEFAULT).problem


def test_where_float32_has_no_loss_nothing_is_compared():
    nothing = tuple(StepComparison(step, 1e-6, 0.0, None) for step in (0, 2, 8, 29))
    pair = SeedRun(run([0.0] * 30), run([1e-6] * 30))
    for found in (
        judge(ProofEvidence(nothing), DEFAULT),
        judge(ProofEvidence(nothing, runs=(pair, pair)), DEFAULT),
    ):
        assert found.verdict == "unproven"
        assert found.reason.startswith("float32's loss is zero at every step")
    broken = SeedRun(run([0.0] * 30), run([None] * 30))
    assert judge(ProofEvidence(nothing, runs=(broken,)), DEFAULT).verdict == "rejected"


def test_a_loss_that_begins_near_zero_ends_below_a_share_of_the_largest():
    numbers = replace(judge(evidence(times(1.001)), DEFAULT), first_loss=3.7e-6, last_loss=6.4e-4)
    told = describe_success(numbers, Check(deviation=0.02, below=0.03), evidence(times(1.001)))
    assert "both end below 3 % of the largest loss after 30 steps" in told


def test_a_loss_that_is_far_away_at_the_same_weights_is_told_with_what_noise_does():
    numbers = replace(judge(evidence(times(1.001)), DEFAULT), loss_deviation=7.8, loss_null=9.0)
    assert describe_single_steps(numbers) == (
        "loss within 780 % at the same weights, where small noise in the weights moves it by 900 %"
    )
    for near in (replace(numbers, loss_deviation=0.01), replace(numbers, loss_null=None)):
        assert describe_single_steps(near).endswith("at the same weights")


def test_the_sentence_says_what_was_compared():
    numbers = replace(judge(evidence(times(1.001)), DEFAULT), first_loss=2.0, last_loss=1e-5)

    def told(ended):
        return describe_success(numbers, ended, evidence(times(1.001)))

    assert "loss 2 to 1e-05; loss within 0 % at the same weights, within 3 % after" in told(
        Check(deviation=0.03)
    )
    assert (
        "both end below 0.01 % of the first loss after 30 steps, where their difference is not "
        "compared"
    ) in told(Check(deviation=0.09, below=1e-4))
    assert (
        "both end below 3 % of the first loss after 30 steps, where their difference is chance: "
        "seeds differ"
    ) in told(Check(deviation=7.8, below=0.03, excused="seeds differ"))
    assert "73 % away after 30 steps, which is chance: seeds differ" in told(
        Check(deviation=0.73, excused="seeds differ")
    )
    assert "within infinitely far after" in told(Check())


def test_the_longest_runs_are_the_ones_that_are_told():
    small = replace(evidence(times(1.001)), long_runs=(long_run(1e-9, 1e-8),))
    reason = judge(small, DEFAULT).reason
    assert "both end below 0.01 % of the first loss after 120 steps" in reason
