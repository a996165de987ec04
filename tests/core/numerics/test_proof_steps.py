"""The ladder: how many steps a proof takes, and when float32 has shown what it can."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.numerics import proof_steps

STEPS = (*proof_steps.PROOF_LENGTHS, 60, 200)


def cost_in_steps(steps: int) -> int:
    """Return the most that a proof of `steps` steps costs, in float32 steps."""
    return proof_steps._training_cost(steps) + proof_steps._single_steps(steps)


@pytest.mark.parametrize(
    ("pace", "steps"),
    [(0.0, 480), (0.005, 480), (0.1, 120), (0.25, 30), (0.8, 30), (1.0, 8), (100.0, 8)],
)
def test_the_rung_is_the_longest_that_sixty_seconds_allow(pace, steps):
    assert proof_steps.affordable_steps(pace) == steps
    allowed = 60 * proof_steps.SHORT_PROOF_FACTOR if steps == proof_steps.SHORT_STEPS else 60
    assert steps == proof_steps.PROOF_LENGTHS[0] or cost_in_steps(steps) * pace <= allowed


@pytest.mark.parametrize(
    ("steps", "cost"),
    [
        (8, 2 * 8 + 5 * 3 + 4 * 8),  # float32 and the candidate, what is compared at each mark,
        (30, 2 * 30 + 5 * 4 + 4 * 30),  # and four further runs of at most thirty steps
        (60, 2 * 60 + 5 * 5 + 4 * 30),
        # beyond sixty both begin once more, and losses are averaged over 32 batches
        (120, 2 * 120 + 5 * 6 + 21 + 4 * 30 + 2 * 60 + 5 * 5),
        (480, 2 * 480 + 5 * 8 + 3 * 21 + 4 * 30 + 2 * 60 + 5 * 5),
    ],
)
def test_what_a_proof_costs_is_counted_in_steps(steps, cost):
    assert cost_in_steps(steps) == cost


@pytest.mark.parametrize(
    ("batch", "pace", "trained"),
    [
        (512, 0.02, 512),
        (512, 0.0999, 512),  # half of it would take less than 50 ms
        (512, 0.1, 256),
        (512, 1.3, 32),
        (96, 0.5, 12),
        (512, 100.0, 8),
        (4, 100.0, 4),
        (512, 0.0, 512),
    ],
)
def test_a_proof_trains_at_the_smallest_batch_that_takes_fifty_milliseconds(batch, pace, trained):
    assert proof_steps.check_batch(batch, pace) == trained


def test_single_steps_at_a_larger_batch_have_a_pace_of_their_own():
    assert proof_steps.affordable_steps(0.08, 60.0, 0.08) == proof_steps.affordable_steps(0.08)
    assert proof_steps.affordable_steps(0.08, 60.0, 1.3) == 30
    assert proof_steps.affordable_steps(0.08, 60.0, 30.0) == 8


def test_losses_are_averaged_after_the_first_steps():
    assert [proof_steps.averaged_batches(step) for step in proof_steps.CHECKPOINT_STEPS] == [
        0
    ] * 5 + [32] * 3


def test_a_proof_may_take_just_what_it_is_given():
    assert proof_steps.affordable_steps(0.5, 0.5 * cost_in_steps(120)) == 120
    assert proof_steps.affordable_steps(0.5, 0.5 * cost_in_steps(120) - 0.01) == 30
    assert proof_steps.affordable_steps(0.75, 0.75 * cost_in_steps(30) / 3) == 30
    assert proof_steps.affordable_steps(0.75, 0.75 * cost_in_steps(30) / 3 - 0.01) == 8


@given(st.floats(1e-4, 10), st.floats(1, 10), st.floats(1, 1e4))
def test_slower_steps_and_less_time_never_bring_more(pace, slower, seconds):
    assert proof_steps.affordable_steps(pace * slower, seconds) <= proof_steps.affordable_steps(
        pace, seconds
    )
    assert proof_steps.affordable_steps(pace, seconds / slower) <= proof_steps.affordable_steps(
        pace, seconds
    )


def test_a_timing_that_is_off_by_half_seldom_changes_the_rung():
    paces = [10 ** (-3 + 3 * i / 999) for i in range(1000)]  # from 1 ms to 1 s
    changed = [
        proof_steps.affordable_steps(1.5 * pace) != proof_steps.affordable_steps(pace)
        for pace in paces
    ]
    assert sum(changed) <= 0.2 * len(paces)


def test_the_first_thirty_steps_cost_what_a_proof_always_cost():
    assert cost_in_steps(30) <= 200
    assert proof_steps.checkpoint_steps(30) == (0, 2, 8, 29)


@pytest.mark.parametrize("steps", STEPS)
def test_weights_are_kept_at_the_last_step_too(steps):
    marks = proof_steps.checkpoint_steps(steps)
    assert marks[0] == 0
    assert marks[-1] == steps - 1
    assert sorted(set(marks)) == list(marks)


@pytest.mark.parametrize("steps", STEPS)
def test_a_run_lands_where_its_steps_doubled_or_at_its_end(steps):
    assert proof_steps.stopping_points(steps)[-1] == steps
    assert all(landing >= 60 or landing == steps for landing in proof_steps.stopping_points(steps))


def length(curve, steps=480):
    """How far a run of these losses goes."""
    losses = [curve(step) for step in range(steps)]
    return next(made for made in range(1, steps + 1) if proof_steps.has_ended(losses[:made], steps))


@pytest.mark.parametrize(
    ("curve", "steps"),
    [
        (lambda step: 1.0, 60),
        (lambda step: 1.0 + step, 60),
        (lambda step: 2.0 / (1 + step), 480),
        (lambda step: 0.3 + 2.0 * 0.97**step, 240),
        (lambda step: 2.0 - 0.015 * step, 60),
        (lambda step: -1.0, 60),
        (lambda step: 0.0, 60),
        (lambda step: 1.0 if step != 17 else None, 18),
        (lambda step: 1.0 if step != 17 else math.inf, 18),
    ],
)
def test_float32_is_followed_while_its_loss_falls(curve, steps):
    assert length(curve) == steps


def test_a_loss_that_falls_by_just_enough_is_followed():
    just = [20.0] * 30 + [13.0] * 30
    assert proof_steps.loss_fall(just) == proof_steps.FALLING_LOSS_SHARE
    assert not proof_steps.has_ended(just, 480)
    assert proof_steps.has_ended([*just[:-1], 13.1], 480)


def test_a_fall_is_from_the_second_quarter_to_the_last():
    assert proof_steps.loss_fall([9.0] * 5 + [4.0] * 5 + [7.0] * 5 + [2.0] * 5) == 0.5
    assert proof_steps.loss_fall([1.0, -1.0, 9.0, -4.0]) == 0.75
    assert proof_steps.loss_fall([3.0, 2.0, 1.0]) == 0.0  # there are no quarters


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_a_fall_is_a_share_of_the_larger_loss(losses):
    assert -2.0001 <= proof_steps.loss_fall(losses) <= 2.0001


@given(st.floats(0, 1), st.floats(0, 2), st.sampled_from(proof_steps.PROOF_LENGTHS))
def test_a_run_that_went_further_settled_where_one_that_ends_there_does(least, pace, steps):
    losses = [least + (1 + step) ** -pace for step in range(steps)]
    ended = next(
        made for made in range(1, steps + 1) if proof_steps.has_ended(losses[:made], steps)
    )
    assert proof_steps.stopping_step(losses, steps) == ended
    assert proof_steps.stopping_step(losses[:ended], steps) == ended
