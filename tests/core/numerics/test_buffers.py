"""Buffers: what steps leave in running statistics and sums, against float32 and against noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.buffers import BufferCheck, check_buffers
from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.traces import BufferUpdate, NoisyStep, StepComparison
from tests.core.evidence import DEFAULT, evidence, times

FLOAT16 = 2.0**-11


def at(step, **errors):
    """One checkpoint with the errors of its buffers."""
    buffers = tuple(BufferUpdate(name, error) for name, error in errors.items())
    return StepComparison(step, 2.0, 2.0, 0.01, buffers=buffers)


def noisy(step, **errors):
    buffers = tuple(BufferUpdate(name, error) for name, error in errors.items())
    return NoisyStep(step, 2.0, 2.0, 0.01, buffers)


def test_nothing_is_judged_where_no_step_changes_a_buffer():
    assert check_buffers((at(0), at(29)), (), DEFAULT) == BufferCheck(judged=False)
    assert check_buffers((), (), DEFAULT) == BufferCheck(judged=False)


@pytest.mark.parametrize(
    ("before", "last", "roundoff", "passes"),
    [
        (0.21, 0.21, 2.0**-8, False),
        (0.19, 0.21, 2.0**-8, True),
        (0.21, 0.19, 2.0**-8, True),
        (0.2, 0.2, 2.0**-8, True),  # exactly what is allowed
        (0.19, 0.19, FLOAT16, True),  # a share is allowed in every format
        (0.21, 0.21, FLOAT16, False),
    ],
)
def test_a_buffer_is_wrong_where_the_last_two_checkpoints_say_so(before, last, roundoff, passes):
    points = (at(0, mean=9.0), at(8, mean=before), at(29, mean=last))
    assert check_buffers(points, (), DEFAULT, roundoff).passed is passes


@pytest.mark.parametrize(
    ("error", "roundoff", "passes"),
    [
        (0.95, 2.0**-8, True),
        (0.38, FLOAT16, False),  # a finer format: 3/8 of what noise explains
        (0.37, FLOAT16, True),
        (1.01, 1.0, False),  # a coarser one has no more
    ],
)
def test_noise_explains_less_in_a_finer_format(error, roundoff, passes):
    points = (at(8, mean=error), at(29, mean=error))
    noise = (noisy(8, mean=0.2), noisy(29, mean=0.2))
    assert check_buffers(points, noise, DEFAULT, roundoff).passed is passes


def test_what_noise_does_at_a_checkpoint_is_allowed_five_times():
    points = (at(8, mean=0.9), at(29, mean=0.9))
    noise = (noisy(8, mean=0.1), noisy(8, mean=0.19), noisy(29, mean=0.19, other=9.0))
    assert check_buffers(points, noise, DEFAULT).passed
    found = check_buffers(points, noise[:1] + noise[2:], DEFAULT)
    assert found.passed
    assert found.differing == ("mean",)  # at one of the two
    assert not check_buffers(points, (noisy(8, mean=0.1), noisy(29, mean=0.1)), DEFAULT).passed
    assert check_buffers(points, (noisy(8, mean=None), noisy(29, mean=None)), DEFAULT).passed
    assert not check_buffers(points, (noisy(0, mean=9.0),), DEFAULT).passed


def test_one_checkpoint_decides_where_there_is_one():
    assert not check_buffers((at(0), at(29, mean=0.3)), (), DEFAULT).passed
    assert not check_buffers((at(8, mean=0.1, sums=0.3), at(29, sums=0.3)), (), DEFAULT).passed


def test_the_worst_buffer_is_named_first_and_with_its_error():
    points = (at(8, ok=0.1, a=0.5, b=0.9), at(29, ok=0.1, a=0.6, b=1.5))
    found = check_buffers(points, (), DEFAULT)
    assert found.problem == (
        "at the same weights, step 29 changes the buffers b, a otherwise than float32 does, by "
        "150 % of the change"
    )
    assert found.step == 29
    many = {f"b{index}": 1.0 - index / 10 for index in range(6)}
    told = check_buffers((at(8, **many),), (), DEFAULT).problem
    assert "the buffers b0, b1, b2, b3 and 2 more otherwise" in told
    assert "the buffer a otherwise" in check_buffers((at(8, a=0.5),), (), DEFAULT).problem


def test_what_is_not_finite_fails_at_any_checkpoint():
    points = (at(0, squares=None, sums=0.1), at(8, squares=0.1), at(29, squares=0.1))
    found = check_buffers(points, (), DEFAULT)
    assert (found.problem, found.step) == ("step 0 makes the buffer squares inf or NaN", 0)


def marked(step, **marks):
    point = at(step, sums=0.01, count=0.0)
    return replace(point, buffers=tuple(replace(each, **marks) for each in point.buffers))


def test_a_lasting_sum_that_is_kept_in_16_bits_fails():
    found = check_buffers((at(0, sums=0.0), marked(29, stalls=True, rounded=True)), (), DEFAULT)
    assert found.problem == (
        "the buffers sums, count are rounded to 16 bits in every step: once large, such a sum "
        "loses what is added to it"
    )
    assert found.step == 29
    one = replace(marked(29, stalls=True), buffers=(BufferUpdate("sums", 0.1, stalls=True),))
    assert "the buffer sums is rounded" in check_buffers((one,), (), DEFAULT).problem


def test_what_adds_up_rounded_numbers_passes_and_is_named_once():
    points = (at(0, sums=0.01), marked(8, rounded=True), marked(29, rounded=True))
    found = check_buffers(points, (), DEFAULT)
    assert found.passed
    assert found.rounded == ("sums", "count")
    assert found.describe() == (
        "the buffers sums, count add up numbers rounded to 16 bits: a small difference of such "
        "sums, as in E[x^2] - E[x]^2, may be lost"
    )
    assert replace(found, rounded=("a",)).describe().startswith("the buffer a adds up numbers")
    assert replace(found, rounded=(), differing=("a",)).describe() == (
        "the buffer a did not change as in float32 at one of the checkpoints"
    )
    assert "; " in replace(found, differing=("a",)).describe()
    assert BufferCheck().describe() == ""


def with_buffers(*points):
    return replace(evidence(times(1.001)), comparisons=points)


def test_a_verdict_says_what_buffers_were_compared_and_which_are_wrong():
    told = judge(with_buffers(at(0, mean=0.01), at(29, mean=0.01)), DEFAULT)
    assert told.accepted
    assert "what these steps leave in the model's buffers" in told.covered
    assert told.buffers == ""
    wrong = judge(with_buffers(at(8, mean=0.5), at(29, mean=0.5)), DEFAULT)
    assert (wrong.verdict, wrong.step) == ("drift", 29)
    assert wrong.reason.startswith("it trains, but not like float32: at the same weights, step 29")
    named = judge(with_buffers(at(0, sums=0.01), marked(29, rounded=True)), DEFAULT)
    assert named.accepted
    assert named.buffers in named.reason
    assert "sums, count add up" in named.buffers
    none = judge(with_buffers(at(0), at(29)), DEFAULT)
    assert "what these steps leave in the model's buffers" not in none.covered


def test_late_checkpoints_decide_too():
    found = with_buffers(at(8, mean=0.01), at(29, mean=0.01))
    late = (at(59, mean=0.5), at(119, mean=0.5))
    assert judge(replace(found, late_comparisons=late), DEFAULT).verdict == "drift"
    noise = (noisy(59, mean=0.2), noisy(119, mean=0.2))
    assert judge(replace(found, late_comparisons=late, late_noise=noise), DEFAULT).accepted
