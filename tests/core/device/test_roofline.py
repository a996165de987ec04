"""What must hold of the bound: it names what a step of known make-up really spends its time on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.device.roofline import (
    DISPROVING_SHARE,
    EXPLAINING_SHARE,
    find_bound,
    limit_text,
    min_traffic_bytes,
    unexplained,
)

seconds = st.floats(1e-5, 10)


def curve_of(overhead, each, batches=(8, 32, 128)):
    return [(float(b), overhead + each * b) for b in batches]


def test_a_loader_slower_than_the_step_bounds_it_whatever_the_step_does():
    bound = find_bound(
        step_seconds=0.010, samples=32, flops_per_sample=1e9, peak_gflops=4000, data_seconds=0.030
    )
    assert bound.name == "data pipeline"
    assert bound.peak_share == pytest.approx(0.8)
    assert bound.sentence == "the loader needs 30 ms for a step of 10 ms: training waits for data"


def test_a_step_near_the_peak_is_arithmetic():
    bound = find_bound(step_seconds=0.25, samples=32, flops_per_sample=1e9, peak_gflops=160)
    assert bound.name == "arithmetic"
    assert bound.peak_share == pytest.approx(0.8)
    assert bound.sentence == "200 ms of arithmetic in a step of 250 ms"


def test_no_more_arithmetic_is_told_than_the_step_took():
    bound = find_bound(step_seconds=0.01, samples=8, flops_per_sample=2e8, peak_gflops=100)
    assert (bound.name, bound.peak_share) == ("arithmetic", pytest.approx(1.6))
    assert bound.sentence == "10 ms of arithmetic in a step of 10 ms"


def test_a_peak_far_below_what_the_step_does_is_not_believed():
    bound = find_bound(step_seconds=0.01, samples=8, flops_per_sample=4e9, peak_gflops=100)
    assert (bound.name, bound.peak_share) == ("unknown", None)
    assert bound.sentence == "the step takes 10 ms; what limits it was not measured"


def test_the_least_traffic_has_a_share_of_the_bandwidth():
    traffic = min_traffic_bytes(trainable_bytes=125e6, saved_bytes=250e6)
    assert traffic == 1e9
    known = {"step_seconds": 0.1, "samples": 8, "flops_per_sample": None, "peak_gflops": None}
    bound = find_bound(**known, traffic=traffic, bandwidth_gbps=20.0)
    assert bound.memory_share == pytest.approx(0.5)
    assert find_bound(**known, traffic=traffic).memory_share is None
    assert find_bound(**known, bandwidth_gbps=20.0).memory_share is None


@given(seconds, st.floats(0, 0.2))
def test_a_step_that_hardly_grows_with_the_batch_is_overhead(overhead, share):
    each = share * overhead / 128
    step = overhead + each * 32
    bound = find_bound(
        step_seconds=step,
        samples=32,
        flops_per_sample=None,
        peak_gflops=None,
        curve=curve_of(overhead, each),
    )
    assert bound.name == "overhead"
    assert bound.sentence.startswith("the step is overhead-bound: ")


@given(seconds, st.floats(0, 0.2))
def test_a_step_that_grows_with_the_batch_and_is_explained_by_nothing_is_unknown(step, share):
    each = step / (32 * (1 + share))
    bound = find_bound(
        step_seconds=step,
        samples=32,
        flops_per_sample=None,
        peak_gflops=None,
        curve=curve_of(step - 32 * each, each),
    )
    assert bound.name == "unknown"
    assert bound.peak_share is None


@given(seconds, st.floats(1, 1e4), st.floats(1, 1e12), st.floats(1, 1e6), seconds)
def test_the_share_is_the_work_over_the_peak(step, samples, flops, peak, data):
    bound = find_bound(
        step_seconds=step,
        samples=samples,
        flops_per_sample=flops,
        peak_gflops=peak,
        data_seconds=data,
    )
    share = flops * samples / step / (peak * 1e9)
    believed = share <= DISPROVING_SHARE
    assert bound.peak_share == (pytest.approx(share) if believed else None)
    if data > step:
        assert bound.name == "data pipeline"
    else:
        arithmetic = believed and share >= EXPLAINING_SHARE
        assert bound.name == ("arithmetic" if arithmetic else "unknown")


def test_the_arithmetic_is_told_where_it_is_known():
    known = {"step_seconds": 0.01, "samples": 8, "flops_per_sample": 1e6, "peak_gflops": 8.0}
    unknown = find_bound(**known)
    assert unknown.sentence == (
        "the step takes 10 ms; arithmetic (10% of the peak) does not explain its time"
    )
    overhead = find_bound(**known, curve=[(8, 0.01), (64, 0.0101)])
    assert overhead.sentence == "the step is overhead-bound: 1 ms of arithmetic in 10 ms"


def test_one_batch_alone_says_nothing_about_overhead():
    bound = find_bound(
        step_seconds=0.01,
        samples=8,
        flops_per_sample=None,
        peak_gflops=None,
        curve=[(8, 0.011), (8, 0.009)],
    )
    assert (bound.name, bound.sentence) == (
        "unknown",
        "the step takes 10 ms; what limits it was not measured",
    )


def test_time_that_falls_with_the_batch_is_overhead_and_nothing_worse():
    bound = find_bound(
        step_seconds=0.01,
        samples=8,
        flops_per_sample=None,
        peak_gflops=None,
        curve=[(16, 0.008), (32, 0.006)],
    )
    assert bound.name == "overhead"


#: A step of 10 ms with a sixth of the peak and a twentieth of the bandwidth.
NEITHER = {
    "step_seconds": 0.01,
    "samples": 8,
    "flops_per_sample": 1.7e6 / 8,
    "peak_gflops": 1.0,
    "traffic": 0.5e6,
    "bandwidth_gbps": 1.0,
}


def test_a_step_far_from_both_peaks_is_limited_by_neither():
    bound = find_bound(**NEITHER)
    assert bound.name == "unknown"
    assert bound.sentence == (
        "the step takes 10 ms; neither arithmetic (17% of the peak) nor memory traffic "
        "(5% of the bandwidth) explains its time"
    )


@given(seconds, st.floats(0, 3), st.floats(0, 3))
def test_a_limit_explains_half_of_the_step_and_no_other_explains_more(step, arithmetic, memory):
    bound = find_bound(
        step_seconds=step,
        samples=1,
        flops_per_sample=1e9 * arithmetic * step or None,
        peak_gflops=1.0,
        traffic=1e9 * memory * step,
        bandwidth_gbps=1.0,
    )
    shares = {"arithmetic": bound.peak_share or 0.0, "memory": min(1.0, bound.memory_share or 0.0)}
    if bound.name == "unknown":
        assert max(shares.values()) < EXPLAINING_SHARE
    else:
        assert shares[bound.name] >= EXPLAINING_SHARE
        assert shares[bound.name] == pytest.approx(max(shares.values())) or shares[bound.name] >= 1


def test_traffic_that_takes_half_of_the_step_is_memory():
    bound = find_bound(**{**NEITHER, "traffic": 8e6})
    assert (bound.name, bound.sentence) == ("memory", "8 ms of memory traffic in a step of 10 ms")


def test_weights_that_move_in_every_step_are_memory_though_the_step_does_not_grow():
    bound = find_bound(**{**NEITHER, "traffic": 8e6}, curve=[(64, 0.0101)])
    assert bound.name == "memory"


def test_launches_are_the_limit_where_they_take_half_of_the_step():
    assert find_bound(**NEITHER, launch_seconds=0.0049).name == "unknown"
    bound = find_bound(**NEITHER, launch_seconds=0.006, curve=[(64, 0.0101)])
    assert bound.name == "launches"
    assert bound.sentence == "launching its kernels one by one takes some 6 ms of a step of 10 ms"
    arithmetic = find_bound(**{**NEITHER, "flops_per_sample": 1e6}, launch_seconds=0.006)
    assert arithmetic.name == "arithmetic"


def test_the_update_is_the_limit_where_it_takes_half_of_the_step():
    """It does not grow with the batch either: that alone would be called overhead."""
    assert find_bound(**NEITHER, update_seconds=0.0049).name == "unknown"
    bound = find_bound(**NEITHER, update_seconds=0.006, curve=[(64, 0.0101)])
    assert bound.name == "the optimizer's update"
    assert bound.sentence == "the optimizer's update takes 6 ms of a step of 10 ms"
    assert find_bound(**NEITHER, update_seconds=0.006, launch_seconds=0.006).name == "launches"


def test_an_operator_is_the_limit_where_it_takes_half_and_nothing_else_explains_the_step():
    slow = ("aten.cumsum", 0.72)
    bound = find_bound(**NEITHER, operator=slow)
    assert bound.name == "the operator aten.cumsum"
    assert bound.sentence == (
        "the step takes 10 ms, 72% of it in one operator, aten.cumsum; neither arithmetic "
        "(17% of the peak) nor memory traffic (5% of the bandwidth) explains its time"
    )
    assert find_bound(**NEITHER, operator=("aten.mm", 0.49)).name == "unknown"
    assert find_bound(**NEITHER, operator=slow, launch_seconds=0.006).name == "launches"
    assert find_bound(**NEITHER, operator=slow, curve=[(64, 0.0101)]).name == "overhead"


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((None, None), "what limits it was not measured"),
        ((None, 0.05), "memory traffic (5% of the bandwidth) does not explain its time"),
    ],
)
def test_why_nothing_is_named_tells_what_is_known(shares, said):
    assert unexplained(*shares) == said


@pytest.mark.parametrize("name", ["memory", "unknown"])
def test_a_profile_that_says_memory_beside_a_small_share_of_it_is_not_believed(name):
    assert limit_text(name, 0.17, 0.05) == (
        "unknown: neither arithmetic (17% of the peak) nor memory traffic (5% of the bandwidth) "
        "explains its time"
    )


@pytest.mark.parametrize(
    "known", [("memory", 0.17, 0.7), ("arithmetic", 0.6, None), ("overhead", 0.1, 0.1), ("", 0, 0)]
)
def test_a_limit_that_explains_the_step_is_shown_by_its_name(known):
    assert limit_text(*known) == known[0]
