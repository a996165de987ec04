"""Timings that cannot tell which dtype is faster: nothing is refused by them."""

from __future__ import annotations

import pytest

from autoprec.core.device.facts import DTypeFact
from autoprec.core.device.family import DTypeRow, Support
from autoprec.core.device.measurements import Measurements, Product, merge_repeated_products
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import measured_choice, objections, propose
from autoprec.core.dtypes import DType, Policy
from tests.core.device.devices import BF16, family, measured, seen

F32 = DType.FLOAT32
BFLOAT16 = Policy.MIXED_BFLOAT16


def timed(rate, slowest=None, *, base_slowest=None, kind=DeviceKind.CUDA, row=None):
    """A device whose float32 products were timed at 100."""
    products = (
        Product(F32, gflops=100.0, size=512, slowest_gflops=base_slowest),
        Product(BF16, gflops=rate, size=512, slowest_gflops=slowest),
    )
    known = family(row or DTypeRow(Support.NATIVE), kind)
    return with_measurements(merge(seen(kind), known), Measurements("torch", products))


@pytest.mark.parametrize(
    ("rate", "slowest", "base_slowest", "low", "high"),
    [
        (92.0, None, None, 0.92 / 1.2, 0.92 * 1.2),  # repeated ones differ by a fifth
        (92.0, 92.0, None, 0.92 / 1.2, 0.92 * 1.2),
        (92.0, None, 100.0, 0.92 / 1.2, 0.92 * 1.2),
        (92.0, 46.0, 100.0, 0.46, 0.92 * 1.2),
        (92.0, 92.0, 50.0, 0.92 / 1.2, 1.84),
    ],
)
def test_a_ratio_may_be_anywhere_its_timings_say(rate, slowest, base_slowest, low, high):
    facts = timed(rate, slowest, base_slowest=base_slowest)
    assert facts.measured_range(BF16) == pytest.approx((low, high))
    assert facts.measured_range(DType.FLOAT16) is None


def test_how_much_timings_slowed_is_unknown_where_it_was_not_recorded():
    assert DTypeFact(measured_gflops=100.0).slowed == 1.0
    assert DTypeFact().slowed == 1.0
    assert DTypeFact(measured_gflops=100.0, slowest_gflops=80.0).slowed == 0.8


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
def test_a_policy_that_may_be_faster_stays_a_candidate_after_float32(kind):
    facts = timed(92.0, 90.0, base_slowest=99.0, kind=kind)
    assert objections(facts, BFLOAT16) == ()
    proposal = propose(facts)
    assert proposal.recommended is Policy.FLOAT32
    (candidate,) = [each for each in proposal.candidates if each.policy is BFLOAT16]
    (note,) = [reason for reason in candidate.reasons if "timings" in reason]
    assert note == (
        "its products run at 0.77x to 1.1x float32's speed, as far as timings can tell: only "
        "training steps show more"
    )
    assert measured_choice(facts).policy is Policy.FLOAT32


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
@pytest.mark.parametrize(("rate", "refused"), [(92.0, False), (70.0, True)])
def test_timings_whose_spread_was_not_recorded_are_no_surer(rate, refused, kind):
    row = DTypeRow(Support.NATIVE)
    facts = with_measurements(
        merge(seen(kind), family(row, kind)), measured(float32=100.0, bfloat16=rate)
    )
    assert bool(objections(facts, BFLOAT16)) is refused
    assert (BFLOAT16 in propose(facts).policies) is not refused


def test_what_was_faster_before_is_not_refused_and_is_told_as_a_range():
    facts = merge(seen(DeviceKind.CUDA), family(kind=DeviceKind.CUDA))
    before = measured(float32=100.0, bfloat16=130.0)
    now = with_measurements(facts, measured(float32=200.0, bfloat16=140.0), before)
    assert now.measured_ratio(BF16) == 0.7
    assert now.measured_range(BF16) == pytest.approx((0.7 / 1.2, 1.3))
    assert objections(now, BFLOAT16) == ()
    assert propose(now).recommended is Policy.FLOAT32
    slow = with_measurements(facts, measured(float32=200.0, bfloat16=140.0), measured())
    assert objections(slow, BFLOAT16)
    faster = with_measurements(facts, before, measured(float32=200.0, bfloat16=140.0))
    assert propose(faster).recommended is BFLOAT16


@pytest.mark.parametrize(
    ("kind", "rate", "refused"),
    [
        (DeviceKind.CUDA, 82.0, True),
        (DeviceKind.CUDA, 84.0, False),
        (DeviceKind.CPU, 82.0, True),
        (DeviceKind.CPU, 91.0, True),  # at most 1.092: no faster
        (DeviceKind.CPU, 92.0, False),
        (DeviceKind.CPU, 0.5, True),
    ],
)
def test_it_is_refused_where_the_whole_range_is_too_slow(kind, rate, refused):
    facts = timed(rate, rate, base_slowest=100.0, kind=kind)
    assert bool(objections(facts, BFLOAT16)) is refused


@pytest.mark.parametrize("said", [each for each in Support if each is not Support.ABSENT])
@pytest.mark.parametrize(("rate", "refused"), [(82.0, True), (91.0, True), (92.0, False)])
def test_on_a_cpu_the_timings_decide_whatever_the_catalogue_says(said, rate, refused):
    facts = timed(rate, kind=DeviceKind.CPU, row=DTypeRow(said, reason="by conversion"))
    why = objections(facts, BFLOAT16)
    assert bool(why) is refused
    assert all("products are" in each for each in why)  # and not that it is emulated
    policies = propose(facts).policies
    assert (BFLOAT16 in policies) is not refused
    assert policies[0] is Policy.FLOAT32


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.CUDA])
@pytest.mark.parametrize("said", [each for each in Support if each is not Support.ABSENT])
def test_what_an_earlier_timing_found_faster_is_refused_by_no_row(said, kind):
    facts = merge(seen(kind), family(DTypeRow(said), kind))
    now = with_measurements(
        facts, measured(float32=100.0, bfloat16=92.0), measured(float32=100.0, bfloat16=130.0)
    )
    assert objections(now, BFLOAT16) == ()
    assert propose(now).recommended is Policy.FLOAT32


def test_what_is_about_as_fast_on_a_cpu_is_tried_after_float32():
    facts = timed(105.0, 100.0, base_slowest=100.0, kind=DeviceKind.CPU)
    assert propose(facts).policies[:2] == (Policy.FLOAT32, BFLOAT16)
    gpu = timed(105.0, 100.0, base_slowest=100.0)
    assert propose(gpu).policies[:2] == (BFLOAT16, Policy.FLOAT32)
    fast = timed(115.0, 100.0, base_slowest=100.0, kind=DeviceKind.CPU)
    assert propose(fast).recommended is BFLOAT16


@pytest.mark.parametrize(
    ("said", "rate", "found"),
    [
        (Support.NATIVE, 92.0, Support.NATIVE),
        (Support.NATIVE, 80.0, Support.SLOW),
        (Support.UNKNOWN, 80.0, Support.EMULATED),
        (Support.UNKNOWN, 92.0, Support.EMULATED),  # at most 1.1: no native arithmetic
        (Support.UNKNOWN, 105.0, Support.UNKNOWN),
        (Support.ABSENT, 105.0, Support.UNKNOWN),  # it runs
        (Support.EMULATED, 92.0, Support.EMULATED),
        (Support.SLOW, 80.0, Support.EMULATED),
        (Support.UNKNOWN, 121.0, Support.NATIVE),
    ],
)
def test_uncertain_timings_prove_no_dtype_slow(said, rate, found):
    facts = timed(rate, rate, base_slowest=100.0, row=DTypeRow(said))
    assert facts.fact(BF16).support is found


def test_the_slowest_timing_of_a_repeated_product_is_kept():
    def merged(*products):
        found = merge_repeated_products(Measurements("torch", products))
        return found.product(F32)

    first = Product(F32, gflops=100.0, slowest_gflops=95.0)
    again = Product(F32, gflops=120.0, slowest_gflops=110.0)
    assert merged(first, again) == Product(F32, gflops=120.0, slowest_gflops=95.0)
    assert merged(again, first) == Product(F32, gflops=120.0, slowest_gflops=95.0)
    plain = merged(Product(F32, gflops=100.0), Product(F32, gflops=120.0))
    assert plain == Product(F32, gflops=120.0, slowest_gflops=100.0)
    assert merged(first) == first
