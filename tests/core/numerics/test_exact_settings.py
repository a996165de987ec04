"""Settings may change the last digits of float32 and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.exact_settings import ALLOWED, agrees, judge_settings, raises
from autoprec.core.numerics.reference_recipe import settings_of
from autoprec.core.numerics.traces import BufferUpdate, SettingsComparison, SettingsPoint
from autoprec.core.recipe import Recipe

LAID_OUT = settings_of(Recipe(memory_format="channels_last"))
SEVERAL = settings_of(
    Recipe(batch_size=8, accumulation_steps=4, memory_format="channels_last", knobs={"threads": 2})
)


def point(
    loss: float | None = 2.0, outputs: float | None = 1e-6, gradient: float | None = 1e-6
) -> SettingsPoint:
    return SettingsPoint(0, loss, 2.0, outputs, gradient)


def left(*errors: float | None) -> SettingsPoint:
    """Return a point whose training is equal, and whose buffers a, b, ... are not."""
    names = "abcd"[: len(errors)]
    buffers = tuple(BufferUpdate(n, e) for n, e in zip(names, errors, strict=True))
    return replace(point(), buffers=buffers)


def found(*points: SettingsPoint, noise: float | None = 1e-6, **known: float) -> SettingsComparison:
    given = {"weights_error": 1e-6, "updates": 2, **known}
    null = SettingsPoint(0, 2.0, 2.0, noise, noise)
    return SettingsComparison(points, (null,), weights_noise=(noise,), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("comparison", "told"),
    [
        (found(point(outputs=1.07)), "its outputs are off by 107 % of how they vary"),
        (found(point(outputs=None)), "its outputs are off by infinitely far"),
        (found(point(loss=2.1)), "its loss is 5 % off"),
        (found(point(loss=None)), "its loss is infinitely far off"),
        (found(point(gradient=0.054)), "its gradient is 5.4 % off"),
        (found(point(gradient=None)), "its gradient is infinitely far off"),
        (
            found(point(), weights_error=1.4),
            "its weights after 2 updates moved 140 % otherwise",
        ),
        (found(point(), point(), point(gradient=0.01)), "its gradient is 1 % off"),
        (found(replace(point(), evaluation_error=0.3)), "its evaluation is 30 % off"),
        (found(replace(point(), evaluation_error=None)), "its evaluation is infinitely far off"),
        (found(left(1e-6, 0.2)), "its buffer b changes 20 % otherwise"),
        (found(left(0.1), left(0.01, 0.2)), "its buffer b changes 20 % otherwise; its buffer a"),
        (found(left(None)), "its buffer a changes infinitely far otherwise"),
        (found(point(), metric_error=0.1), "the metric of evaluate() is 10 % off"),
    ],
)
def test_what_computes_something_else_is_rejected_with_what_and_how_much(
    comparison: SettingsComparison, told: str
) -> None:
    judged = judge_settings(comparison, LAID_OUT, LAID_OUT[0])
    assert not agrees(comparison)
    assert not judged.accepted
    assert judged.guilty == ("memory_format",)
    assert judged.verdict.verdict == "rejected"
    assert judged.verdict.reason.startswith(
        f"with channels_last it computes something else than plain float32 does at the same "
        f"weights: {told}"
    )
    assert "how tensors lie in memory" in judged.verdict.reason


def test_rounding_is_allowed_and_the_verdict_says_what_was_compared() -> None:
    judged = judge_settings(found(point(), point(2.0 * (1 + 5e-4))), LAID_OUT)
    assert judged.accepted
    assert judged.guilty == ()
    assert judged.verdict.steps == 0
    assert judged.verdict.reason == (
        "computes what plain float32 does: with channels_last, outputs, loss and gradient of 2 "
        "batches at the first weights, and the weights after 2 updates differ by no more than "
        "float32's rounding (0.05 %); compared at the same weights, not trained further"
    )
    assert judged.verdict.covered == (
        "channels_last in float32: outputs, loss and gradient of 2 batches at the first weights, "
        "and the weights after 2 updates",
    )


def test_outputs_that_were_not_seen_are_not_said_to_be_compared() -> None:
    judged = judge_settings(replace(found(point()), outputs_seen=False), LAID_OUT)
    assert "outputs" not in judged.verdict.reason


@pytest.mark.parametrize(("noise", "allowed"), [(1e-6, ALLOWED), (0.002, 0.02)])
def test_a_chaotic_model_is_allowed_what_noise_of_rounding_s_size_does(
    noise: float, allowed: float
) -> None:
    for error, accepted in ((0.99 * allowed, True), (1.01 * allowed, False)):
        for comparison in (
            found(point(outputs=error), noise=noise),
            found(point(gradient=error), noise=noise),
            found(point(), noise=noise, weights_error=error),
        ):
            assert agrees(comparison) is accepted


def test_noise_in_a_buffer_excuses_that_buffer_alone() -> None:
    noisy = SettingsPoint(0, 2.0, 2.0, 1e-6, 1e-6, buffers=(BufferUpdate("a", 0.05),))
    assert agrees(replace(found(left(0.4, 1e-6)), noise=(noisy,)))
    assert not agrees(replace(found(left(0.4, 0.4)), noise=(noisy,)))


def test_a_metric_may_count_a_sample_more_or_less() -> None:
    assert agrees(found(point(), metric_error=0.019))
    assert agrees(replace(found(point(), metric_error=0.2), metric_noise=(0.0, 0.05)))


def test_the_verdict_says_that_buffers_and_evaluation_were_compared() -> None:
    judged = judge_settings(replace(found(left(1e-6)), evaluated=True), LAID_OUT)
    assert "outputs, loss, gradient, buffers and evaluation of 1 batches" in judged.verdict.reason


def test_what_noise_makes_infinite_excuses_anything_of_its_kind() -> None:
    assert agrees(found(point(outputs=0.5, gradient=0.5), noise=None))
    assert not agrees(found(point(loss=3.0), noise=None))


def test_a_reference_that_is_not_finite_tells_nothing() -> None:
    unknown = SettingsPoint(0, 1.0, None, 0.5, 0.5)
    assert agrees(SettingsComparison((unknown,)))


def test_several_settings_are_blamed_together_where_none_is_guilty_alone() -> None:
    judged = judge_settings(found(point(gradient=0.5)), SEVERAL)
    assert judged.guilty == ("accumulation_steps", "memory_format", "threads")
    assert "with 4 micro-batches of 8 and channels_last and threads=2" in judged.verdict.reason
    assert judge_settings(found(point(gradient=0.5)), SEVERAL, SEVERAL[2]).guilty == ("threads",)


def test_nothing_compared_is_unproven() -> None:
    judged = judge_settings(SettingsComparison(not_covered=("why",)), LAID_OUT)
    assert judged.verdict.verdict == "unproven"
    assert judged.verdict.not_covered == ("why",)
    assert judged.guilty == ()


def test_what_raises_under_a_setting_is_rejected_with_what_it_says() -> None:
    judged = raises(SEVERAL, SEVERAL[1], "view size is not compatible")
    assert judged.guilty == ("memory_format",)
    assert judged.verdict.reason == (
        "with channels_last the task's own code raises: view size is not compatible"
    )
    assert len(raises(SEVERAL, None, "no").guilty) == 3


def test_compiled_code_that_may_have_drawn_other_numbers_is_not_blamed() -> None:
    compiled = settings_of(Recipe(compile=True))
    differs = replace(found(point(gradient=0.5)), drew=True)
    judged = judge_settings(differs, compiled, compiled[0])
    assert judged.verdict.verdict == "unproven"
    assert judged.guilty == ()
    assert "draws other random numbers" in judged.verdict.not_covered[0]
    assert judge_settings(replace(differs, drew=False), compiled, compiled[0]).guilty == (
        "compile",
    )
    assert judge_settings(differs, LAID_OUT, LAID_OUT[0]).guilty == ("memory_format",)
