"""What is compared starts alike, sees the same batches and seeds, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest

from autoprec.backends.shared import checkpoint
from autoprec.backends.shared.trace_framework import Evaluated
from autoprec.backends.shared.tracer import batch_seed
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError
from tests.backends.shared.one_weight import ERROR, FLOAT16, FLOAT32, tracer


def test_runs_of_one_seed_start_from_the_same_weights_and_others_do_not():
    traced, _ = tracer()
    first, again = (traced.trajectory(recipe=FLOAT32, seed=0, steps=3) for _ in range(2))
    assert first.losses == again.losses == (1.0, 1.5, 2.25)
    other = traced.trajectory(recipe=FLOAT32, seed=1, steps=3)
    assert [loss - 1000 for loss in other.losses] != list(first.losses)


def test_micro_batches_follow_each_other_each_with_a_seed_of_its_own():
    traced, framework = tracer()
    run = traced.trajectory(recipe=Recipe(batch_size=8, accumulation_steps=2), seed=0, steps=2)
    trained = [entry[1:] for entry in framework.log if entry[0] == "trained"]
    assert trained == [(step * 2 + i, batch_seed(0, step, i)) for step in (0, 1) for i in (0, 1)]
    assert run.losses == (1.5, 3.0)
    # Drawn one at a time: the second is not in memory while the first is trained on.
    assert [entry[0] for entry in framework.log] == ["loss", "trained"] * 4


def test_steps_are_compared_at_the_reference_s_weights_with_its_seeds():
    traced, framework = tracer()
    reference = traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    framework.log.clear()
    first, last = traced.compare_steps(recipe=FLOAT16)
    for point in (first, last):
        assert point.reference == reference.losses[point.step]
        assert point.loss == point.reference + ERROR
        assert point.gradient_error == ERROR
        assert (point.largest, point.overflowed, point.backward) == (2.0, False, 0.5)
    assert (first.step, last.step) == (0, 3)
    assert ("loss", 3, batch_seed(0, 3, 0)) in framework.log
    assert framework.log.count(("loss", 0, batch_seed(0, 0, 0))) == 1


def test_outputs_in_evaluation_are_compared_at_the_last_checkpoint():
    def evaluated(weight, batch):
        framework.log.append(("evaluated", batch))
        return Evaluated(None, [weight.value + 3 * weight.off])

    traced, framework = tracer(evaluated=evaluated)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    first, last = traced.compare_steps(recipe=FLOAT16)
    assert (first.evaluated, first.evaluation_error) == (False, 0.0)
    assert (last.evaluated, last.evaluation_error) == (True, 3 * ERROR)
    assert [entry for entry in framework.log if entry[0] == "evaluated"] == [("evaluated", 0)] * 2
    (_, _, *noisy) = traced.noise(draws=2)
    assert [point.evaluation_error > 0 for point in noisy] == [True, True]


def test_batches_of_other_sizes_are_compared_at_the_last_of_the_first_steps():
    traced, framework = tracer(sizes={1: 16, 2: 4})
    traced.reference(batch_size=8, steps=40, checkpoints=(0, 3, 35))
    framework.log.clear()
    points = traced.compare_steps(recipe=FLOAT16)
    assert [(each.step, each.batch) for each in points] == [
        (0, ""),
        (3, "the largest batch"),
        (3, "the smallest batch"),
        (3, ""),
        (35, ""),
    ]
    assert [entry[1] for entry in framework.log if entry[0] == "loss"] == [0, 1, 2, 3, 35]
    assert all(each.loss == each.reference + ERROR for each in points)
    assert [each.noise_share for each in points[1:3]] == [None, None]
    noisy = traced.noise(draws=1)
    assert [each.batch for each in noisy] == [each.batch for each in points]


def test_a_candidate_that_ends_before_float32_does_is_evaluated_as_well():
    """Float32 may have been followed further, for an earlier candidate."""
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=120, checkpoints=(0, 8, 29, 59, 119))
    points = traced.compare_steps(recipe=FLOAT16)
    assert [point.step for point in points if point.evaluated] == [59, 119]


def test_what_only_evaluation_under_a_recipe_raises_is_raised():
    def evaluated(weight, batch):
        error = RuntimeError("no 16 bits") if weight.off else None
        return Evaluated(None, [weight.value], error)

    traced, _ = tracer(evaluated=evaluated)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    with pytest.raises(RuntimeError, match="no 16 bits"):
        traced.compare_steps(recipe=FLOAT16)


@pytest.mark.parametrize(("answers", "losses"), [(True, 4), (False, 6)])
def test_float32_answers_in_its_own_run_and_is_asked_again_only_where_that_shows_nothing(
    answers, losses
):
    traced, framework = tracer(answers=answers)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    noise = 2  # another batch's gradient at each checkpoint
    assert [entry[0] for entry in framework.log].count("loss") == losses + noise
    points = traced.compare_steps(recipe=FLOAT16)
    assert [(p.reference, p.loss - p.reference) for p in points] == [(1.0, ERROR), (3.125, ERROR)]
    assert [p.gradient_error for p in points] == [ERROR, ERROR]
    framework.log.clear()
    traced.compare_steps(recipe=FLOAT16)
    assert [entry[:2] for entry in framework.log] == [("loss", 0), ("loss", 3)]


@pytest.mark.parametrize("compared", [None, 16])
def test_the_noise_of_a_gradient_is_seen_in_that_of_the_next_batch(compared):
    """They differ by 1, which this framework takes for the error of either."""
    traced, _ = tracer(gradient_noise=1.0)
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 2), compared_batch=compared)
    first, last = traced.compare_steps(recipe=FLOAT16)
    assert first.noise_share == last.noise_share == 0.5


def test_gradients_that_are_alike_show_no_noise():
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=2, checkpoints=(0,))
    assert traced.compare_steps(recipe=FLOAT16)[0].noise_share is None


def test_the_answer_at_a_checkpoint_is_that_of_the_first_micro_batch():
    traced, _ = tracer()
    traced.reference(batch_size=8, accumulation_steps=2, steps=2, checkpoints=(0, 1))
    points = traced.compare_steps(recipe=FLOAT16)
    assert [p.reference for p in points] == [1.0, 2.5]


def test_steps_may_be_compared_at_another_batch_than_float32_trained_on():
    traced, framework = tracer()
    run = traced.reference(batch_size=4, steps=4, checkpoints=(0, 3), compared_batch=8)
    assert run.losses == (1.0, 1.5, 2.25, 3.125)
    assert set(traced._streams) == {(4, 0), (8, 0)}
    framework.log.clear()
    points = traced.compare_steps(recipe=FLOAT16)
    assert [entry[:2] for entry in framework.log] == [("loss", 0), ("loss", 1)]
    assert [p.reference for p in points] == [1.0, 1.125]  # of the weights at steps 0 and 3
    assert [p.loss - p.reference for p in points] == [ERROR, ERROR]


def test_late_losses_are_means_over_the_batches_that_are_kept():
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=61, checkpoints=(60,))
    (point,) = traced.compare_steps(recipe=FLOAT16)
    assert point.mean_reference == pytest.approx(sum(range(5)) / 5, abs=1e-6)
    assert point.mean_loss == pytest.approx(point.mean_reference + ERROR)


def test_noise_is_drawn_anew_at_every_checkpoint():
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    points = traced.noise(draws=2)
    assert [point.step for point in points] == [0, 0, 2, 2]
    assert len({point.loss for point in points}) == 4
    assert all(0 < point.gradient_error < 2.0**-9 for point in points)


def test_a_comparison_needs_a_reference():
    traced, _ = tracer()
    with pytest.raises(UsageError, match="reference"):
        traced.compare_steps(recipe=FLOAT16)


def test_checkpoints_are_kept_as_far_as_memory_has_room(monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_CHECKPOINT_BYTES", 400)
    traced, _ = tracer()
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 1, 3))
    assert [point.step for point in traced.compare_steps(recipe=FLOAT16)] == [0, 3]


@pytest.mark.parametrize("skips", [False, True])
def test_a_run_tells_its_scales_and_the_steps_it_skipped(skips):
    traced, _ = tracer(skips=skips)
    run = traced.trajectory(recipe=FLOAT16, seed=0, steps=2)
    assert run.scales == (4.0, 4.0)
    assert run.skipped == ((0, 1) if skips else ())
    assert traced.trajectory(recipe=FLOAT32, seed=0, steps=2).scales == ()


def test_a_run_ends_with_the_first_loss_that_is_not_finite():
    """No later step mends it, and a metric of such weights is none."""

    def metric() -> float:
        raise AssertionError("evaluated")

    traced, _ = tracer(losses={1: math.inf}, has_evaluate=True, metric=metric)
    run = traced.trajectory(recipe=FLOAT32, seed=0, steps=3)
    assert run.losses == (1.0, None)
    assert run.metric is None
    assert traced.reference(batch_size=8, steps=3, checkpoints=()).losses == run.losses


def test_a_metric_that_is_not_finite_is_none():
    traced, _ = tracer(has_evaluate=True, metric=lambda: math.nan)
    assert traced.trajectory(recipe=FLOAT32, seed=0, steps=1).metric is None


def test_a_reference_that_ran_out_of_time_is_asked_for_no_answers():
    traced, framework = tracer(answers=False)
    run = traced.reference(batch_size=8, steps=4, checkpoints=(0, 1), seconds=0.0)
    assert len(run.losses) == 1
    assert [entry[0] for entry in framework.log] == ["loss", "trained"]


def test_a_run_that_settles_ends_where_its_loss_no_longer_falls():
    traced, _ = tracer(losses=dict.fromkeys(range(480), 1.0))
    assert len(traced.reference(batch_size=8, steps=480, checkpoints=()).losses) == 480
    ended = traced.reference(batch_size=8, steps=480, checkpoints=(), stop_at_plateau=True)
    assert len(ended.losses) < 480


def test_nothing_stays_open_when_the_user_s_code_fails():
    def fail() -> float:
        raise RuntimeError("the user's own")

    traced, framework = tracer(has_evaluate=True, metric=fail)
    with pytest.raises(RuntimeError, match="own"):
        traced.trajectory(recipe=FLOAT32, seed=0, steps=1)
    assert (framework.open_now, framework.placed) == ([], 0)


def test_exponents_are_read_under_bfloat16_at_every_kept_state_in_turn():
    traced, framework = tracer()
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    found = traced.backward_exponents(recipe=FLOAT16, batches=3)
    assert [entry[1:3] for entry in framework.log if entry[0] == "exponents"] == [
        (1.0, 0),
        (0.25, 1),
        (1.0, 2),
    ]
    read = framework.log[-1][3]
    assert (read.policy, read.loss_scale, read.compile) == (Policy.MIXED_BFLOAT16, None, False)
    assert (found.batches, found.largest) == (3, 0)


def test_units_are_read_at_the_recipes_scale():
    traced, _ = tracer()
    assert traced.unit_magnitudes(recipe=FLOAT16) == (UnitTrace("unit", 0, 4, 0.0),)


def test_batches_of_another_size_are_forgotten():
    traced, _ = tracer()
    for size in (8, 4):
        traced.reference(batch_size=size, steps=1, checkpoints=())
        assert list(traced._streams) == [(size, 0)]
