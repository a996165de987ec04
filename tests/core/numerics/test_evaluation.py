"""Outputs in evaluation: compared where they are known, and excused by what noise does there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.needed_noise import needs_noise_at_checkpoints
from autoprec.core.numerics.single_step import check_evaluation
from autoprec.core.numerics.traces import NoisyStep, StepComparison
from tests.core.evidence import DEFAULT
from tests.core.numerics.test_needed_noise import GOOD, QUIET


def evaluated(error: float | None) -> StepComparison:
    return StepComparison(29, 2.0, 2.0, 0.1, evaluated=True, evaluation_error=error)


def moved(error: float | None, step: int = 29) -> NoisyStep:
    return NoisyStep(step, 2.0, 2.0, 0.1, evaluation_error=error)


def test_nothing_is_judged_where_nothing_was_evaluated() -> None:
    assert not check_evaluation([StepComparison(29, 2.0, 2.0, 0.1)], (), DEFAULT).judged


@pytest.mark.parametrize(
    ("error", "noise", "passes"),
    [
        (0.9, (), True),
        (1.2, (), False),
        (1.2, (moved(0.31),), True),
        (1.2, (moved(0.31, step=8),), False),
        (1.2, (moved(0.1), moved(0.2)), False),
        (None, (moved(0.1),), False),
        (None, (moved(None),), True),  # noise gives outputs of another shape as well
    ],
)
def test_outputs_may_be_as_far_as_noise_allows(
    error: float | None, noise: tuple[NoisyStep, ...], passes: bool
) -> None:
    found = check_evaluation([evaluated(error)], noise, DEFAULT)
    assert found.judged
    assert found.passed is passes
    assert passes or "in evaluation, at the weights of step 29, its outputs are" in found.problem


def test_a_finer_format_is_allowed_less_of_the_noise() -> None:
    points, noise = [evaluated(1.3)], [moved(0.35)]
    assert check_evaluation(points, noise, DEFAULT).passed
    assert not check_evaluation(points, noise, DEFAULT, 2.0**-11).passed


@pytest.mark.parametrize(("error", "verdict"), [(0.01, "equal"), (math.inf, "drift")])
def test_a_verdict_says_what_evaluation_gives(error: float, verdict: str) -> None:
    last = replace(GOOD.comparisons[-1], evaluated=True, evaluation_error=error)
    evidence = replace(GOOD, comparisons=(*GOOD.comparisons[:-1], last))
    assert needs_noise_at_checkpoints(evidence, DEFAULT) is (verdict == "drift")
    found = judge(replace(evidence, noise=QUIET), DEFAULT)
    assert found.verdict == verdict
    assert "the model's outputs in evaluation" in found.covered
