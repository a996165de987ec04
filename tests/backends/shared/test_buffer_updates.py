"""What one step leaves in buffers: compared with float32's, and read for how it accumulates."""

from __future__ import annotations

import numpy as np
import pytest

from autoprec.backends.shared.buffer_updates import SCALE, StepBuffers
from autoprec.core.dtypes import DType

BITS = {DType.BFLOAT16: 8, DType.FLOAT16: 11}


def rounded(values, dtype):
    """Round to a 16-bit format, as Veltkamp's splitting does."""
    factor = 2.0 ** (53 - BITS[dtype]) + 1
    scaled = np.asarray(values, dtype=np.float64) * factor
    return scaled - (scaled - values)


def float32(values):
    return np.asarray(values, dtype=np.float32).astype(np.float64)


RANDOM = np.random.default_rng(0)
ADDED = float32(RANDOM.normal(30.0, 1.0, 64))
OLD = float32(RANDOM.normal(60.0, 3.0, 64))


def left_by(step, old=OLD):
    """What `step` makes of a buffer, and of the buffer scaled."""
    before, other = {"b": float32(old)}, float32(SCALE * old)
    return StepBuffers(before, {"b": float32(step(old))}, {"b": float32(step(other))})


def compared(step, plain, dtype=DType.BFLOAT16, old=OLD):
    (found,) = left_by(step, old).compared_with(left_by(plain, old), dtype)
    return found


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(
    ("keep", "weight"), [(1.0, 1.0), (0.9, 0.1), (0.99, 0.01), (0.9, 1.0)], ids=str
)
def test_numbers_rounded_before_they_are_added_are_found(dtype, keep, weight):
    def plain(old):
        return keep * old + weight * ADDED

    def low(old):
        return keep * old + weight * rounded(ADDED, dtype)

    assert compared(low, plain, dtype).rounded
    assert not compared(low, plain, dtype).stalls
    assert not compared(plain, plain, dtype).rounded
    assert not compared(lambda old: plain(old) + 1e-3, plain, dtype).rounded
    assert not compared(low, low, dtype).rounded  # float32's are such numbers, too
    assert not compared(low, plain, DType.FLOAT32).rounded


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(("keep", "stalls"), [(1.0, True), (0.999, True), (0.9, False)])
def test_a_lasting_sum_that_is_rounded_itself_stalls(dtype, keep, stalls):
    def plain(old):
        return keep * old + (1.0 if keep == 1.0 else 1.0 - keep) * ADDED

    found = compared(lambda old: rounded(plain(old), dtype), plain, dtype)
    assert found.stalls is stalls
    assert found.rounded is stalls


def test_counters_kept_in_16_bits_stall_before_they_do_so_visibly():
    steps = np.full(8, 17.0)
    kept = compared(lambda n: rounded(n + 1, DType.BFLOAT16), lambda n: n + 1, old=steps)
    assert (kept.error, kept.stalls) == (0.0, True)
    exact = compared(lambda n: n + 1, lambda n: n + 1, old=steps)
    assert (exact.error, exact.stalls, exact.rounded) == (0.0, False, False)


def test_values_that_a_step_replaces_add_nothing_up():
    low = rounded(ADDED, DType.BFLOAT16)
    assert not compared(lambda old: low, lambda old: ADDED).rounded
    half = np.arange(64) < 32
    queue = compared(lambda old: np.where(half, low, old), lambda old: np.where(half, ADDED, old))
    assert not queue.rounded
    largest = compared(
        lambda old: np.maximum(old, low * 30), lambda old: np.maximum(old, 30 * ADDED)
    )
    assert not largest.stalls


def test_values_that_are_not_finite_or_were_zero_say_nothing_of_what_is_added():
    low = np.append(rounded(ADDED, DType.BFLOAT16), [0.3, 0.3])
    plain = np.append(ADDED, [0.3, 0.3])
    old = np.append(OLD, [0.0, 0.0])
    assert compared(lambda b: b + low, lambda b: b + plain, old=old).rounded
    assert not compared(lambda b: b + 0.5, lambda b: b + 0.3, old=np.zeros(64)).rounded
    broken = StepBuffers({"b": OLD}, {"b": OLD + np.inf}, {"b": OLD})
    (found,) = broken.compared_with(left_by(lambda b: b + 1), DType.BFLOAT16)
    assert (found.error, found.rounded) == (None, False)


def test_what_float32_itself_makes_infinite_is_not_compared():
    finite, infinite = {"b": np.array([1.0, 5.0])}, {"b": np.array([1.0, np.inf])}
    exact = StepBuffers(finite, {"b": np.array([1.0, 6.0])})
    assert exact.compared_with(StepBuffers(finite, infinite)) == ()
    assert exact.compared_with(StepBuffers(infinite, finite)) == ()
    assert StepBuffers(infinite, infinite).changed == ("b",)


def test_errors_are_relative_to_the_change_of_float32():
    before = {"b": np.array([3.0, 4.0])}
    exact = StepBuffers(before, {"b": np.array([3.0, 6.0])})
    (found,) = StepBuffers(before, {"b": np.array([3.0, 5.5])}).compared_with(exact)
    assert found.error == pytest.approx(0.25)
    assert (found.rounded, found.stalls) == (False, False)  # not looked at
    (broken,) = StepBuffers(before, {"b": np.array([np.nan, 5.5])}).compared_with(exact)
    assert broken.error is None


def test_what_has_converged_is_measured_by_its_size():
    before = {"u": np.array([0.0, 100.0])}
    exact = StepBuffers(before, {"u": np.array([0.0, 100.001])})
    (found,) = StepBuffers(before, {"u": np.array([0.0, 100.301])}).compared_with(exact)
    assert found.error == pytest.approx(0.3 / (0.06 * 100.001))


def test_the_mean_of_centred_numbers_is_measured_by_the_deviation_beside_it():
    def step(mean, other="bn.running_var", variance=(4.0, 4.0)):
        before = {"bn.running_mean": np.zeros(2), other: np.ones(len(variance))}
        after = {"bn.running_mean": np.array([mean, 0.0]), other: np.array(variance)}
        return StepBuffers(before, after)

    def error(*given):
        return step(1e-4, *given).compared_with(step(1e-8, *given))[0].error

    assert error() == pytest.approx(1e-4 / (0.06 * 8.0**0.5), rel=1e-3)
    assert error("bn/moving_variance") > 1000  # another module
    assert error("bn.running_scale") > 1000
    assert error("bn.running_var", (4.0, 4.0, 4.0)) > 1000  # of something else
    variance = step(0.0, variance=(4.4, 4.0)).compared_with(step(1.0))
    assert {each.name: each.error for each in variance}["bn.running_var"] == pytest.approx(
        0.4 / 18.0**0.5
    )


def test_only_what_float32_changes_is_compared():
    before = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}
    exact = StepBuffers(before, {"a": np.ones(2), "b": np.zeros(2), "c": np.zeros(3)})
    assert exact.changed == ("b",)
    other = StepBuffers(before, {"a": np.zeros(2), "c": np.zeros(2)})
    assert other.compared_with(exact) == ()
    assert StepBuffers(before, {"b": np.zeros(5)}).compared_with(exact) == ()
    assert StepBuffers().changed == ()
