"""What must hold of the bound: it names what a step of known make-up really spends its time on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.device.roofline import ARITHMETIC_BOUND_SHARE, find_bound, min_traffic_bytes

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
def test_a_step_that_grows_with_the_batch_below_the_peak_is_memory(step, share):
    each = step / (32 * (1 + share))
    bound = find_bound(
        step_seconds=step,
        samples=32,
        flops_per_sample=None,
        peak_gflops=None,
        curve=curve_of(step - 32 * each, each),
    )
    assert bound.name == "memory"
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
    assert bound.peak_share == pytest.approx(flops * samples / step / (peak * 1e9))
    if data > step:
        assert bound.name == "data pipeline"
    else:
        arithmetic = bound.peak_share >= ARITHMETIC_BOUND_SHARE
        assert bound.name == ("arithmetic" if arithmetic else "memory")


def test_the_arithmetic_is_told_where_it_is_known():
    known = {"step_seconds": 0.01, "samples": 8, "flops_per_sample": 1e6, "peak_gflops": 8.0}
    memory = find_bound(**known)
    assert memory.sentence == "the step takes 10 ms, 1 ms of it arithmetic at peak"
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
    assert (bound.name, bound.sentence) == ("memory", "the step takes 10 ms")


def test_time_that_falls_with_the_batch_is_overhead_and_nothing_worse():
    bound = find_bound(
        step_seconds=0.01,
        samples=8,
        flops_per_sample=None,
        peak_gflops=None,
        curve=[(16, 0.008), (32, 0.006)],
    )
    assert bound.name == "overhead"
