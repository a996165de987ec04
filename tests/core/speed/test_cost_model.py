"""What must hold of the cost model: it recovers known laws and never promises what it cannot."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.speed import cost_model
from autoprec.core.speed.cost_model import (
    MeasuredMemory,
    MeasuredRate,
    Prediction,
    ThroughputModel,
    predict_memory,
)

BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)


@pytest.fixture(autouse=True)
def cold():
    """Compare every pair of points anew, as a process that has just begun does."""
    cost_model._covariance.cache_clear()


def point(batch, policy="float32", compiled=False, memory_format="contiguous", **knobs):
    return {
        "policy": policy,
        "memory_format": memory_format,
        "compile": compiled,
        **knobs,
        "batch_size": batch,
    }


def rate(batch, *, peak=1000.0, half=16.0):
    return peak * batch / (batch + half)


points = st.builds(
    point,
    st.sampled_from(BATCHES),
    policy=st.sampled_from(["float32", "mixed_bfloat16", "mixed_float16"]),
    compiled=st.booleans(),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
    threads=st.sampled_from([4, 8]),
    fused=st.booleans(),
)
seen = st.builds(MeasuredRate, points, st.floats(-5, 15), st.floats(0, 0.2))


@given(st.floats(-5, 5), st.floats(0, 3), st.floats(-5, 5))
def test_an_expected_gain_is_no_loss_and_at_least_the_mean_gain(mean, deviation, best):
    gain = Prediction(mean, deviation).expected_gain(best)
    assert gain >= 0
    assert gain >= mean - best - 1e-9


@given(st.floats(-5, 5), st.floats(0, 3), st.floats(-5, 5), st.floats(0, 5))
def test_an_expected_gain_grows_with_the_mean_and_shrinks_with_the_best(mean, dev, best, more):
    gain = Prediction(mean, dev).expected_gain(best)
    assert Prediction(mean + more, dev).expected_gain(best) >= gain - 1e-9
    assert Prediction(mean, dev).expected_gain(best + more) <= gain + 1e-9


@pytest.mark.parametrize("deviation", [0.02, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("ahead", [-1.0, -0.1, 0.0, 0.1, 2.0])
def test_an_expected_gain_is_the_mean_of_what_is_won(deviation, ahead):
    """Of a normal distribution's part above the best."""
    normal = NormalDist(3.0 + ahead, deviation)
    won = ahead * (1 - normal.cdf(3.0)) + deviation**2 * normal.pdf(3.0)
    found = Prediction(3.0 + ahead, deviation).expected_gain(3.0)
    assert found == pytest.approx(won, abs=1e-12)


@given(st.floats(-5, 5), st.floats(0, 3), st.floats(0, 3), st.floats(-5, 5))
def test_doubt_raises_an_expected_gain(mean, one, other, best):
    less, more = sorted([one, other])
    gain = Prediction(mean, less).expected_gain(best)
    assert Prediction(mean, more).expected_gain(best) >= gain - 1e-9


@pytest.mark.parametrize("z", range(30, 45))
def test_an_expected_gain_far_below_the_best_is_the_tails_and_then_exactly_none(z):
    """The tail of a normal distribution, density / z^2, until a float cannot hold it."""
    tail = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / z**2
    gain = Prediction(0.0, 1.0).expected_gain(float(z))
    assert gain == pytest.approx(tail, rel=0.01, abs=0.0)
    assert (gain == 0.0) is (z >= 39)


@pytest.mark.parametrize("deviation", [0.0, 5e-324, 1e-300])
def test_without_doubt_the_gain_is_the_difference(deviation):
    assert Prediction(1.0, deviation).expected_gain(0.0) == 1.0
    assert Prediction(0.0, deviation).expected_gain(1.0) == 0.0


def test_a_model_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^a throughput model needs at least one measured point$"):
        ThroughputModel([])


@settings(max_examples=50)
@given(st.lists(seen, min_size=1, max_size=12), points)
def test_every_prediction_is_finite_whatever_was_seen(items, asked):
    predicted = ThroughputModel(items).predict(asked)
    assert math.isfinite(predicted.mean)
    assert math.isfinite(predicted.deviation)
    assert predicted.deviation >= 1e-6
    rates = [item.log_rate for item in items]
    reach = 10 + max(rates) - min(rates)
    assert min(rates) - reach <= predicted.mean <= max(rates) + reach


@pytest.mark.parametrize("count", [1, 8, 64])
def test_many_predictions_compare_what_was_seen_once(monkeypatch, count):
    """Every pair of seen points once for the model, and each seen point once for a prediction."""
    compared = []
    covariance = cost_model._covariance
    monkeypatch.setattr(
        cost_model, "_covariance", lambda *pair: compared.append(1) or covariance(*pair)
    )
    model = ThroughputModel([MeasuredRate(point(8 * (i + 1)), 1.0) for i in range(count)])
    for batch in BATCHES:
        model.predict(point(batch))
    pairs = count * (count + 1) // 2
    assert pairs <= len(compared) <= pairs + len(BATCHES) * (count + 1)


@pytest.mark.parametrize("half", [0.5, 4.0, 32.0, 256.0])
@pytest.mark.parametrize("peak", [3.0, 3e5])
def test_two_points_of_the_law_predict_the_third(half, peak):
    known = [MeasuredRate(point(b), math.log(rate(b, peak=peak, half=half))) for b in (16, 128)]
    predicted = ThroughputModel(known).predict(point(512))
    truth = math.log(rate(512, peak=peak, half=half))
    assert predicted.mean == pytest.approx(truth, abs=0.08)
    assert abs(predicted.mean - truth) <= predicted.deviation <= 0.4


def test_a_measured_point_is_predicted_as_it_was_measured():
    known = [MeasuredRate(point(b), math.log(rate(b))) for b in BATCHES]
    model = ThroughputModel(known)
    for item in known:
        predicted = model.predict(item.point)
        assert predicted.mean == pytest.approx(item.log_rate, abs=0.02)
        assert predicted.deviation < 0.05, "its own timing is not all that tells"


def test_what_one_policy_shows_of_a_layout_is_expected_of_another():
    known = [
        MeasuredRate(point(64), math.log(100)),
        MeasuredRate(point(64, memory_format="channels_last"), math.log(120)),
        MeasuredRate(point(64, policy="mixed_bfloat16"), math.log(200)),
    ]
    model = ThroughputModel(known)
    plain = model.predict(point(64, policy="mixed_bfloat16"))
    other = model.predict(point(64, policy="mixed_bfloat16", memory_format="channels_last"))
    assert other.mean > plain.mean + 0.1


def test_doubt_grows_with_the_distance_from_what_was_measured():
    model = ThroughputModel([MeasuredRate(point(64), math.log(100))])
    near, far = model.predict(point(128)), model.predict(point(1024))
    elsewhere = model.predict(point(64, policy="mixed_bfloat16"))
    assert near.deviation < far.deviation < elsewhere.deviation


def test_an_unsure_measurement_counts_for_less():
    def predicted(deviation):
        known = [
            MeasuredRate(point(64), math.log(100)),
            MeasuredRate(point(128), math.log(300), deviation),
        ]
        return ThroughputModel(known).predict(point(128)).mean

    assert predicted(0.2) < predicted(0.0)


def prior(left, right):
    """The prior's covariance of two points' log throughputs, term by term as the module has it."""
    octaves = abs(math.log2(left["batch_size"] / right["batch_size"]))
    root = math.sqrt(5) * octaves / cost_model._DRIFT_OCTAVES
    near = (1 + root + root**2 / 3) * math.exp(-root)
    terms = [(cost_model._MEAN_DEVIATION, cost_model._COMMON_DRIFT)]
    alike = [name for name in left if name != "batch_size" and left[name] == right[name]]
    terms += [cost_model._FACTOR_SCALES.get(name, cost_model._DEFAULT_SCALE) for name in alike]
    if {"policy", "compile"} <= set(alike):
        terms.append(cost_model._POLICY_COMPILE_SCALE)
    total = sum(offset**2 + drift**2 * near for offset, drift in terms)
    if len(alike) == len(left) - 1:
        total += cost_model._ROUGHNESS**2 * math.exp(-octaves / cost_model._ROUGH_OCTAVES)
    return total


def regressed(items, asked):
    """Mean and deviation by the textbook's formulas of Gaussian process regression."""
    points = [item.point for item in items]
    noise = np.diag([cost_model._TIMING_NOISE**2 + item.deviation**2 for item in items])
    between = np.array([[prior(a, b) for b in points] for a in points]) + noise
    row = np.array([prior(asked, other) for other in points])
    rates = np.array([item.log_rate for item in items])
    means, weights = [], []
    for half in cost_model._HALF_BATCHES:
        laws = [math.log(p["batch_size"] / (p["batch_size"] + half)) for p in (*points, asked)]
        rest = rates - rates.mean() - np.array(laws[:-1])
        solved = np.linalg.solve(between, rest)
        means.append(rates.mean() + laws[-1] + row @ solved)
        weights.append(-0.5 * rest @ solved)
    weights = np.exp(np.array(weights) - max(weights))
    weights /= weights.sum()
    mean = weights @ means
    variance = prior(asked, asked) - row @ np.linalg.solve(between, row)
    return mean, math.sqrt(variance + weights @ (np.array(means) - mean) ** 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(seen, min_size=1, max_size=6), points)
def test_a_prediction_is_the_regression_that_the_module_describes(items, asked):
    predicted = ThroughputModel(items).predict(asked)
    mean, deviation = regressed(items, asked)
    assert predicted.mean == pytest.approx(mean, abs=1e-4)
    assert predicted.deviation == pytest.approx(deviation, rel=1e-3, abs=1e-5)


# Memory -----------------------------------------------------------------------------------------


def test_of_nothing_no_memory_is_predicted():
    assert predict_memory(point(64), []) is None


@given(
    st.integers(0, 2**33),
    st.integers(0, 2**24),
    st.lists(st.sampled_from(BATCHES), min_size=1, max_size=5),
    st.sampled_from(BATCHES),
)
def test_the_estimate_is_never_below_an_affine_truth(base, each, batches, asked):
    known = [MeasuredMemory(point(b), base + each * b) for b in batches]
    assert predict_memory(point(asked), known) >= base + each * asked - 1


@given(st.lists(st.tuples(st.sampled_from(BATCHES), st.integers(1, 2**33)), min_size=1))
def test_the_estimate_at_a_measured_batch_is_the_most_that_was_measured_there(pairs):
    known = [MeasuredMemory(point(b), peak) for b, peak in pairs]
    for batch, _ in pairs:
        highest = max(peak for b, peak in pairs if b == batch)
        assert predict_memory(point(batch), known) == highest


def test_two_batches_give_the_line_and_the_margin():
    known = [MeasuredMemory(point(8), 1800), MeasuredMemory(point(16), 2600)]
    assert predict_memory(point(64), known) == pytest.approx((2600 + 48 * 100) * 1.1)


def test_memory_that_is_kept_may_not_fit_together():
    kept = {"keep_memory": True}
    known = [
        MeasuredMemory({**point(8), **kept}, 1800),
        MeasuredMemory({**point(16), **kept}, 2600),
    ]
    expected = (2600 + 48 * 100) * 1.25
    assert predict_memory({**point(64), **kept}, known) == pytest.approx(expected)


def test_one_batch_gives_proportion_and_a_larger_one_an_upper_bound():
    known = [MeasuredMemory(point(32), 3200)]
    assert predict_memory(point(64), known) == pytest.approx(6400 * 1.1)
    assert predict_memory(point(16), known) == 3200


def test_memory_that_shrinks_with_the_batch_is_not_extrapolated_below_what_was_seen():
    known = [MeasuredMemory(point(8), 3000), MeasuredMemory(point(16), 2000)]
    assert predict_memory(point(64), known) == pytest.approx(2000 * 1.1)


def test_an_arm_of_its_own_is_believed_over_others():
    known = [
        MeasuredMemory(point(32), 10_000),
        MeasuredMemory(point(32, policy="mixed_bfloat16"), 10),
    ]
    assert predict_memory(point(32, policy="mixed_bfloat16"), known) == 10
    assert predict_memory(point(32, compiled=True), known) == 10_000


def test_layouts_share_the_memory_of_their_policy():
    known = [MeasuredMemory(point(32, memory_format="channels_last"), 10)]
    assert predict_memory(point(32), known) == 10


@pytest.mark.parametrize(
    ("slopes", "expected"),
    [
        ((10, 4), (5000 + 2 * 10 * 32) * 1.1),  # twice as fast as in the arm where it grows most
        ((4, 10), (5000 + 2 * 10 * 32) * 1.1),
        ((100, 4), 10_000 * 1.1),  # but no faster than in proportion
        ((-10, -4), 5000 * 1.1),
    ],
)
def test_one_batch_of_an_arm_grows_at_most_twice_as_fast_as_others_do(slopes, expected):
    arms = ({"policy": "mixed_bfloat16"}, {"compiled": True})
    known = [MeasuredMemory(point(32), 5000)]
    for arm, slope in zip(arms, slopes, strict=True):
        known += [MeasuredMemory(point(b, **arm), 2000 + slope * b) for b in (8, 24, 16)]
    known.append(MeasuredMemory(point(32, policy="mixed_float16"), 10))  # one batch has no slope
    assert predict_memory(point(64), known) == pytest.approx(expected)
    assert predict_memory(point(32), known) == 5000
    own = [*known, MeasuredMemory(point(16), 1000)]
    assert predict_memory(point(64), own) == pytest.approx((5000 + 250 * 32) * 1.1)


def test_of_an_arm_that_never_ran_the_most_that_any_other_comes_to_is_expected():
    known = [
        MeasuredMemory(point(32), 3200),
        MeasuredMemory(point(32, policy="mixed_bfloat16"), 1600),
    ]
    asked = point(64, policy="mixed_float16")
    assert predict_memory(asked, known) == pytest.approx(6400 * 1.1)
    assert predict_memory({**asked, "keep_memory": True}, known) == pytest.approx(6400 * 1.25)


def test_memory_that_is_not_kept_is_the_arm_of_a_space_without_that_knob():
    known = [
        MeasuredMemory(point(32, keep_memory=False), 100),
        MeasuredMemory(point(32, keep_memory=True), 900),
    ]
    assert predict_memory(point(32), known) == 100
    assert predict_memory(point(32, keep_memory=True), known) == 900


def test_memory_is_of_its_own_where_weights_stay_gathered():
    arm = cost_model._memory_arm
    assert arm(point(8)) == arm(point(8, reshard_after_forward=True))
    assert arm(point(8)) != arm(point(8, reshard_after_forward=False))


def test_a_timing_that_ended_when_its_interval_was_narrow_is_hardly_surer_for_it():
    """The narrowest at which a trial ends is 2 %, so half a per cent of deviation."""
    found = [
        ThroughputModel([MeasuredRate(point(32), 0.0, deviation)]).predict(point(64)).deviation
        for deviation in (0.0, 0.005)
    ]
    assert found[1] == pytest.approx(found[0], rel=0.01)
    at_it = [
        ThroughputModel([MeasuredRate(point(32), 0.0, deviation)]).predict(point(32)).deviation
        for deviation in (0.0, 0.005)
    ]
    assert at_it[1] == pytest.approx(at_it[0], rel=0.01)
