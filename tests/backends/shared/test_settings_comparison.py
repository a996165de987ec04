"""A recipe's settings are compared in float32 with plain float32, at the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.backends.shared.trace_framework import Evaluated
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.traces import BufferUpdate
from autoprec.core.recipe import Recipe
from tests.backends.shared.one_weight import Weight, tracer

LAID_OUT = Recipe(Policy.MIXED_BFLOAT16, 8, memory_format="channels_last")


def test_settings_are_compared_at_the_first_weights_batch_by_batch():
    traced, framework = tracer(off_by={"channels_last": 0.5})
    found = traced.compare_settings(recipe=LAID_OUT)
    assert [point.batch for point in found.points] == [0, 1, 4, 13, 29]
    assert {point.outputs_error for point in found.points} == {0.5}
    assert all(point.loss - point.reference == 0.5 for point in found.points)
    assert all(0.0 < point.outputs_error < 1e-6 for point in found.noise)
    assert found.updates == 2
    recipes = [entry[1] for entry in framework.log if entry[0] == "observed"]
    assert {(each.policy, each.memory_format) for each in recipes} == {
        (Policy.FLOAT32, "contiguous"),
        (Policy.FLOAT32, "channels_last"),
    }
    assert not any(entry[2] for entry in framework.log)  # dropout stays on
    assert not framework.open_now


def test_buffers_evaluation_and_metric_are_compared_with_the_settings():
    given = {"left": {"contiguous": 1.0, "channels_last": 1.5}, "off_by": {}}
    traced, _ = tracer(**given, has_evaluate=True, metric=iter([2.0, 2.0, 2.0, 2.5]).__next__)
    found = traced.compare_settings(recipe=LAID_OUT)
    assert all(point.buffers == (BufferUpdate("mean", 0.5),) for point in found.points)
    assert all(point.buffers == (BufferUpdate("mean", 0.0),) for point in found.noise)
    assert found.metric_error == 0.25
    assert found.metric_noise == (0.0, 0.0)
    assert found.evaluated


def evaluated_by(layout: str, other: Evaluated, **given: Any) -> Any:
    """Compare channels_last where an evaluation in that layout, or in both, gives another thing."""

    def evaluated(weight: Weight, batch: int) -> Evaluated:
        plain = Evaluated(1.0, [weight.value])
        return other if weight.recipe.memory_format == layout or layout == "both" else plain

    return tracer(evaluated=evaluated)[0].compare_settings(recipe=LAID_OUT)


def test_an_evaluation_of_another_loss_or_other_outputs_is_off():
    for other in (Evaluated(1.5, [1.0]), Evaluated(1.0, [1.5])):
        found = evaluated_by("channels_last", other)
        assert {point.evaluation_error for point in found.points} == {0.5}
        assert max(point.evaluation_error for point in found.noise) < 1e-6


def test_what_raises_in_the_evaluation_under_the_settings_alone_is_raised():
    with pytest.raises(ValueError, match="view size"):
        evaluated_by("channels_last", Evaluated(None, (), ValueError("view size")))


@pytest.mark.parametrize("outputs", [(), [1.0]])
def test_a_step_that_is_not_meant_for_evaluation_is_compared_by_what_it_gave_until_then(outputs):
    found = evaluated_by("both", Evaluated(None, outputs, KeyError("boxes")))
    assert {point.evaluation_error for point in found.points} == {0.0}
    assert found.evaluated is bool(outputs)
    told = () if outputs else ("the step in evaluation: it raises 'boxes'",)
    assert found.not_covered == told


def test_an_evaluate_that_raises_anyway_is_not_blamed_on_the_settings():
    def fail() -> float:
        raise KeyError("boxes")

    found = tracer(has_evaluate=True, metric=fail)[0].compare_settings(recipe=LAID_OUT)
    assert found.points
    assert found.metric_error == 0.0
    assert found.not_covered == ("the task's evaluate(): it raises 'boxes'",)


def test_micro_batches_are_the_unsplit_batch_s_samples_with_dropout_off():
    traced, framework = tracer()
    found = traced.compare_settings(recipe=Recipe(batch_size=4, accumulation_steps=2))
    assert found.points
    assert all(entry[2] for entry in framework.log)
    given = [(entry[1].batch_size, [part for part, _ in entry[3]]) for entry in framework.log]
    assert (8, [4]) in given
    assert (4, [4, 4.1]) in given


@pytest.mark.parametrize(
    ("given", "recipe", "why"),
    [
        (
            {"draws": True},
            Recipe(batch_size=4, accumulation_steps=2),
            "a step draws random numbers of its own besides dropout, so that its parts draw others",
        ),
        ({}, Recipe(batch_size=3, accumulation_steps=3), "a whole batch of 9 cannot be cut in 3"),
    ],
)
def test_where_parts_cannot_be_compared_it_says_why(given, recipe, why):
    traced, _ = tracer(**given)
    found = traced.compare_settings(recipe=recipe)
    assert found.points == ()
    assert found.not_covered == (why,)
