"""What a plan foresees, on tasks and devices whose bounds are known by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.device.facts import GIB, DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Kernel, TaskFacts
from autoprec.core.speed.step_bounds import (
    COMMON_MEMORY_GIB,
    LAUNCH_SECONDS,
    estimate_steps,
    explain_expectation,
    plan_memory,
)

MIB = 2**20
POLICIES = (Policy.MIXED_FLOAT16, Policy.FLOAT32)
PRODUCT = Kernel(flops_per_sample=1e10, bytes_per_sample=1e4, fixed_bytes=0)
SUM = Kernel(flops_per_sample=0.0, bytes_per_sample=1e8, fixed_bytes=0)


def gpu(kind: DeviceKind = DeviceKind.CUDA, **changes: Any) -> DeviceFacts:
    """Ten times faster in float16: 10 and 100 TFLOP/s, 1000 GB/s."""
    fast = {
        DType.FLOAT32: DTypeFact(Support.NATIVE, peak_dense_tflops=10.0),
        DType.FLOAT16: DTypeFact(Support.NATIVE, peak_dense_tflops=100.0),
    }
    known: dict[str, Any] = {"memory_bandwidth_gbps": 1000.0, "dtypes": fast, **changes}
    return DeviceFacts(Observation(kind), "family", "a GPU", **known)


def task(*kernels: Kernel, **facts: Any) -> TaskFacts:
    return TaskFacts("torch", {}, 32, 32, parameters=0, kernels=kernels, **facts)


def test_products_are_faster_by_the_peaks_and_traffic_by_half() -> None:
    base, mixed = estimate_steps(task(PRODUCT, SUM), gpu(), POLICIES, [10])
    assert base.arithmetic_seconds == pytest.approx(1e-2)  # 1e11 operations at 10 TFLOP/s
    assert base.memory_seconds == pytest.approx(1e-3)  # 1e9 bytes at 1000 GB/s
    assert base.bound == "arithmetic"
    assert mixed.arithmetic_seconds == pytest.approx(1e-3)
    assert mixed.memory_seconds == pytest.approx(5e-4)
    assert mixed.at_most == pytest.approx(1.1e-2 / 1.5e-3)


def test_tf32_makes_products_faster_and_nothing_smaller() -> None:
    known = {**gpu().dtypes, DType.TF32: DTypeFact(Support.NATIVE, peak_dense_tflops=40.0)}
    _, tf32 = estimate_steps(task(PRODUCT, SUM), gpu(dtypes=known), [Policy.TF32], [10])
    assert tf32.arithmetic_seconds == pytest.approx(2.5e-3)
    assert tf32.memory_seconds == pytest.approx(1e-3)


def test_an_update_and_the_weights_casts_are_counted() -> None:
    weights = task(SUM, parameter_bytes=MIB, trainable_bytes=MIB, optimizer_bytes=2 * MIB)
    base, mixed = estimate_steps(weights, gpu(), POLICIES, [1])
    update = (3 + 4) * MIB
    assert base.memory_seconds == pytest.approx((1e8 + update) / 1e12)
    assert mixed.memory_seconds == pytest.approx((5e7 + update + 1.5 * MIB) / 1e12)


def test_a_step_bound_by_launches_gains_nothing_and_says_so() -> None:
    tiny = task(Kernel(1e4, 1e3, 0, count=100))
    found = estimate_steps(tiny, gpu(), POLICIES, [4])
    assert [each.bound for each in found] == ["launches"] * 2
    assert found[0].least_seconds == 100 * LAUNCH_SECONDS
    (said,) = explain_expectation(found, gpu(), tiny, POLICIES)
    assert said.startswith("batch 4: nothing is to be expected: ")
    assert "launching 100 kernels" in said
    assert [e.launch_seconds for e in estimate_steps(tiny, gpu(DeviceKind.TPU), POLICIES, [4])] == [
        0,
        0,
    ]


def test_a_step_that_a_framework_launches_for_as_long_as_it_computes_gains_little() -> None:
    """A hundred small products: 0.8 ms of arithmetic, and 1 ms to launch them as frameworks do."""
    small = task(Kernel(flops_per_sample=2e7, bytes_per_sample=1e2, fixed_bytes=0, count=100))
    base, mixed = found = estimate_steps(small, gpu(), POLICIES, [4])
    assert base.bound == "arithmetic"
    assert mixed.at_most == pytest.approx(8e-4 / (100 * LAUNCH_SECONDS))
    assert mixed.likely == 1.0
    (said,) = explain_expectation(found, gpu(), small, POLICIES)
    assert said.startswith("batch 4: little is to be expected, at most 2x by mixed_float16: ")
    assert said.endswith("launching 100 kernels at 10 us each, as frameworks do it, leaves 1x")
    large = task(Kernel(flops_per_sample=2e9, bytes_per_sample=1e4, fixed_bytes=0, count=100))
    _, mixed = estimate_steps(large, gpu(), POLICIES, [4])
    assert mixed.likely == mixed.at_most == pytest.approx(10)


def test_a_step_bound_by_memory_gains_little_of_the_products_speed() -> None:
    found = estimate_steps(task(SUM), gpu(), POLICIES, [10])
    (said,) = explain_expectation(found, gpu(), task(SUM), POLICIES)
    assert "little of the products' speed is to be expected, at most 2x by mixed_float16" in said
    assert "100% of it in kernels bound by memory" in said


def test_a_step_bound_by_products_may_gain_and_what_bounds_it_then_is_said() -> None:
    both = task(PRODUCT, SUM)
    found = estimate_steps(both, gpu(), POLICIES, [10])
    (said,) = explain_expectation(found, gpu(), both, POLICIES)
    assert said.startswith("batch 10: at most 7.3x by mixed_float16: ")
    mostly = task(PRODUCT, Kernel(0.0, 6e8, 0))
    (said,) = explain_expectation(
        estimate_steps(mostly, gpu(), POLICIES, [10]), gpu(), mostly, POLICIES
    )
    assert said.endswith("faster, it would be bound by memory")


def test_how_missing_kernels_for_convolutions_would_show_is_said_once() -> None:
    known = task(PRODUCT, convolutions=True)
    estimated = estimate_steps(known, gpu(), POLICIES, [1, 10])
    *_, told = explain_expectation(estimated, gpu(), known, POLICIES)
    # 1e11 operations: 10 ms at float32's peak, 1 ms at float16's, and 14.7 ms at 68 % of float32's
    assert told.startswith("batch 10: if a step in mixed_float16 takes as long as in float32, ")
    assert "at 15 ms, products at 68 % of float32's peak are at 6.8 % of float16's" in told
    for others, facts in (
        (task(PRODUCT), gpu()),
        (task(SUM, convolutions=True), gpu()),
        (known, gpu(dtypes={**gpu().dtypes, DType.FLOAT16: DTypeFact(peak_dense_tflops=20.0)})),
        (known, gpu(dtypes={**gpu().dtypes, DType.TF32: DTypeFact(Support.NATIVE)})),
    ):
        estimated = estimate_steps(others, facts, POLICIES, [1, 10])
        assert len(explain_expectation(estimated, facts, others, POLICIES)) == 2


def test_where_peaks_or_kernels_are_not_known_nothing_is_estimated() -> None:
    blind = gpu(memory_bandwidth_gbps=None)
    assert estimate_steps(task(SUM), blind, POLICIES, [1]) == ()
    assert "no memory bandwidth" in explain_expectation((), blind, task(SUM), POLICIES)[0]
    assert estimate_steps(task(), gpu(), POLICIES, [1]) == ()
    assert "could not be counted" in explain_expectation((), gpu(), task(), POLICIES)[0]
    (alone,) = estimate_steps(task(SUM), gpu(), [Policy.MIXED_BFLOAT16], [1])
    assert alone.policy is Policy.FLOAT32
    (said,) = explain_expectation([alone], gpu(), task(SUM), list(Policy))
    assert said.endswith("no peak of this device in 16 bits")
    one_pass = {DType.FLOAT32: DTypeFact(Support.NATIVE, reason="by default one bfloat16 pass")}
    (said,) = explain_expectation((), gpu(dtypes=one_pass), task(SUM), list(Policy))
    assert said.endswith("no peak of this device in float32: by default one bfloat16 pass")


def test_without_peaks_what_products_gained_on_such_a_device_is_the_most_there_is() -> None:
    def said(ratio: float) -> str:
        fast = {DType.BFLOAT16: DTypeFact(Support.NATIVE, family_ratio=ratio)}
        found = explain_expectation((), gpu(dtypes=fast), task(SUM), list(Policy))
        return " ".join(found)

    assert said(6.0) == (
        "at most about 6x by mixed_bfloat16: bfloat16 products were measured at 6x float32's on "
        "another a GPU. How much of a step they are cannot be said without measuring: the "
        "catalogue has no peak of this device in float32"
    )
    assert said(1.2).startswith("at most about 2x by mixed_bfloat16: bfloat16 products were")


def test_where_no_policy_is_left_the_catalogues_reasons_are_said() -> None:
    slow = DTypeFact(Support.EMULATED, reason="no Tensor Cores")
    old = gpu(dtypes={DType.FLOAT16: slow, DType.BFLOAT16: slow})
    (said,) = explain_expectation((), old, task(SUM), [Policy.FLOAT32])
    assert said.startswith("nothing is to be expected: float16 is emulated (no Tensor Cores)")


def test_memory_is_predicted_by_the_larger_of_backward_pass_and_update() -> None:
    facts = task(
        Kernel(0.0, 3 * MIB, 0),
        parameter_bytes=10 * MIB,
        trainable_bytes=10 * MIB,
        optimizer_bytes=20 * MIB,
        saved_bytes_per_sample=2 * MIB,
    )
    small, large = plan_memory(facts, 1, None), plan_memory(facts, 100, GIB)
    assert small is not None
    assert large is not None
    assert small.peak_bytes == 60 * MIB  # the update's copies
    assert large.peak_bytes == 440 * MIB
    assert [fit.memory_bytes for fit in small.fits] == [size * GIB for size in COMMON_MEMORY_GIB]
    assert [fit.batch for fit in large.fits] == [(1024 - 40) // 4]
    tight = plan_memory(facts, 1, 50 * MIB)
    assert tight is not None
    assert tight.fits[0].batch == 0


def test_memory_is_that_of_the_longest_batches() -> None:
    facts = task(Kernel(0.0, 3 * MIB, 0), saved_bytes_per_sample=2 * MIB)
    ragged = replace(
        facts,
        most_saved_bytes_per_sample=6.0 * MIB,
        most_kernel_bytes_per_sample=27.0 * MIB,  # it grows with the square of a length
    )
    plans = [plan_memory(each, 10, GIB) for each in (facts, ragged)]
    assert [plan.peak_bytes for plan in plans if plan] == [10 * 4 * MIB, 10 * 24 * MIB]
    assert [plan.fits[0].batch for plan in plans if plan] == [1024 // 4, 1024 // 24]


def test_memory_is_not_predicted_where_what_is_kept_was_not_counted() -> None:
    assert plan_memory(task(SUM), 32, GIB) is None
