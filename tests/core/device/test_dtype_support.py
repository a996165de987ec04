"""What is native, slow or emulated: measured beats probed beats catalogue."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.device.dtype_support import (
    CLEARLY_FASTER_RATIO,
    distrust_native_support,
    measured_support,
    probed_support,
)
from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import DTypeRow, Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.dtypes import DType
from tests.core.device.devices import (
    BF16,
    NATIVE,
    WANTS_FLAG,
    family,
    features,
    measured,
    rows,
    seen,
)


def test_without_a_probe_the_catalogue_is_what_is_known():
    fact = merge(seen(), family()).fact(BF16)
    assert fact == DTypeFact(Support.NATIVE, Evidence.CATALOGUE, "", 8, 64, 300.0)


def test_the_best_alignment_is_the_least_one_where_no_other_is_named():
    row = DTypeRow(Support.NATIVE, alignment=8)
    facts = merge(seen(), family(row))
    assert facts.fact(BF16).best_alignment == facts.alignment(BF16) == 8


def test_a_dtype_nobody_speaks_of_is_unknown():
    facts = merge(seen(), family())
    assert facts.fact(DType.FLOAT8).support is Support.UNKNOWN
    assert DeviceFacts(seen(), "f", "t", {}).fact(BF16) == DTypeFact()


def test_the_rows_reason_is_kept_and_a_part_of_a_device_has_no_peak():
    row = replace(NATIVE, reason="on every second core", measured_ratio=3.0)
    whole = probed_support(row, seen(), True)
    assert (whole.reason, whole.peak_dense_tflops) == ("on every second core", 300.0)
    assert probed_support(row, seen(), False) == replace(whole, peak_dense_tflops=None)


def test_a_feature_that_is_there_proves_the_support():
    fact = merge(seen(features=frozenset({"fast_b"})), family(WANTS_FLAG)).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.NATIVE, Evidence.PROBED)
    assert fact.reason == "has fast_b"
    row = replace(WANTS_FLAG, reason="at half the rate")
    fact = merge(seen(features=frozenset({"fast_b"})), family(row)).fact(BF16)
    assert fact.reason == "has fast_b; at half the rate"


def test_a_feature_that_is_missing_disproves_it():
    fact = merge(seen(features=frozenset({"other"})), family(WANTS_FLAG)).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.EMULATED, Evidence.PROBED)
    assert fact.reason == "shows none of fast_a, fast_b"


def test_a_missing_feature_proves_nothing_where_not_all_are_listed():
    observation = seen(features=frozenset({"other"}), partial_features=True)
    fact = merge(observation, family(WANTS_FLAG)).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.UNKNOWN, Evidence.PROBED)
    assert fact.reason == "this system does not tell whether it has fast_a or fast_b"


def test_where_no_features_could_be_read_none_is_taken_for_granted():
    fact = merge(seen(), family(WANTS_FLAG)).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.UNKNOWN, Evidence.PROBED)
    assert fact.reason == "nothing could be read of its features, fast_a or fast_b among them"
    fact = merge(seen(hypothetical=True), family(WANTS_FLAG)).fact(BF16)
    assert fact.reason == "not every one has fast_a or fast_b"


def test_a_feature_that_is_advertised_but_denied_counts_as_missing():
    one = seen(denied=frozenset({"fast_a"}))
    fact = merge(one, family(WANTS_FLAG)).fact(BF16)
    assert fact.support is Support.EMULATED
    assert fact.reason == "advertises fast_a but the system denies its use, and shows no fast_b"
    both = seen(denied=frozenset({"fast_a", "fast_b"}))
    reason = merge(both, family(WANTS_FLAG)).fact(BF16).reason
    assert reason == "advertises fast_a, fast_b but the system denies its use"
    three = family(replace(WANTS_FLAG, requires=("fast_a", "fast_b", "fast_c")))
    reason = merge(one, three).fact(BF16).reason
    assert reason.endswith(" denies its use, and shows no fast_b or fast_c")


def test_a_feature_that_a_setting_withholds_leaves_the_support_unknown():
    one = seen(features=frozenset({"fast_a"}), unused=frozenset({"fast_a"}))
    fact = merge(one, family(WANTS_FLAG)).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.UNKNOWN, Evidence.PROBED)
    assert fact.reason == "has fast_a, which a setting keeps libraries from using"
    other = seen(features=frozenset({"fast_a", "fast_b"}), unused=frozenset({"fast_a"}))
    assert merge(other, family(WANTS_FLAG)).fact(BF16).reason == "has fast_b"


def test_what_is_doubted_is_native_by_measurement_alone():
    known = merge(seen(), family())
    assert distrust_native_support(known, "") == known
    fact = distrust_native_support(known, "no kernels").fact(BF16)
    assert (fact.support, fact.reason) == (Support.UNKNOWN, "no kernels")
    assert distrust_native_support(known, "no kernels").fact(DType.FLOAT32) == known.fact(
        DType.FLOAT32
    )
    timed = with_measurements(known, measured(float32=100, bfloat16=210))
    assert distrust_native_support(timed, "no kernels") == timed
    emulated = merge(seen(), family(DTypeRow(Support.EMULATED, reason="none")))
    assert distrust_native_support(emulated, "no kernels") == emulated


def test_a_product_faster_than_float32_is_native_whatever_the_catalogue_says():
    facts = with_measurements(
        merge(seen(), family(DTypeRow(Support.EMULATED))), measured(float32=100, bfloat16=210)
    )
    fact = facts.fact(BF16)
    assert (fact.support, fact.evidence) == (Support.NATIVE, Evidence.MEASURED)
    assert fact.reason == "measured: 2.1x float32"
    assert facts.measured_ratio(BF16) == pytest.approx(2.1)
    assert facts.measured_with == "torch"


@pytest.mark.parametrize(
    ("said", "support"),
    [
        (Support.NATIVE, Support.SLOW),  # the hardware does it, and it is no emulation's fault
        (Support.UNKNOWN, Support.EMULATED),
        (Support.EMULATED, Support.EMULATED),
    ],
)
def test_a_product_slower_than_float32_gains_nothing_whatever_the_catalogue_says(said, support):
    facts = with_measurements(
        merge(seen(), family(DTypeRow(said))), measured(float32=100, bfloat16=3)
    )
    fact = facts.fact(BF16)
    assert (fact.support, fact.evidence) == (support, Evidence.MEASURED)
    assert fact.reason == "measured: 0.03x float32"


def test_the_familys_measured_ratio_holds_with_the_first_feature_alone():
    row = replace(WANTS_FLAG, measured_ratio=5.0)
    known = family(row)

    def ratio(*features, **more):
        return merge(seen(features=frozenset(features), **more), known).fact(BF16).family_ratio

    assert ratio("fast_a", "fast_b") == 5.0
    assert ratio("fast_b") is None
    assert ratio("other") is None
    assert ratio() is None
    assert ratio("fast_a", unused=frozenset({"fast_a"})) is None
    assert merge(seen(), family(DTypeRow(Support.NATIVE, measured_ratio=2.0))).fact(
        BF16
    ).family_ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (Support.NATIVE, Support.NATIVE),
        (Support.EMULATED, Support.EMULATED),
        (Support.UNKNOWN, Support.UNKNOWN),
        (Support.ABSENT, Support.UNKNOWN),
    ],
)
def test_about_as_fast_as_float32_leaves_what_was_known(said, kept):
    for gflops in (101, 105, 119):  # from 0.84 to 1.2 times that, as far as timings can tell
        facts = with_measurements(
            merge(seen(), family(DTypeRow(said))), measured(float32=100, bfloat16=gflops)
        )
        assert facts.fact(BF16).support is kept
    clearly = with_measurements(
        merge(seen(), family(DTypeRow(said))), measured(float32=100, bfloat16=120)
    )
    assert clearly.fact(BF16).support is Support.NATIVE


@pytest.mark.parametrize(
    ("ratios", "support"),
    [
        ((0.8, CLEARLY_FASTER_RATIO), Support.UNKNOWN),  # it may be clearly faster
        ((0.8, CLEARLY_FASTER_RATIO - 0.01), Support.EMULATED),
        (None, Support.EMULATED),  # the ratio alone, which is 1
    ],
)
def test_the_most_that_a_ratio_may_be_decides(ratios, support):
    known = DTypeFact(Support.UNKNOWN)
    found = measured_support(known, Product(BF16, gflops=100.0), 100.0, ratios)
    assert found.support is support


def test_float32_that_was_measured_is_native():
    facts = with_measurements(merge(seen(), family()), measured(float32=100))
    assert facts.fact(DType.FLOAT32).support is Support.NATIVE
    assert facts.fact(DType.FLOAT32).evidence is Evidence.MEASURED
    assert facts.measured_ratio(BF16) is None


def test_without_float32_a_measurement_compares_to_nothing():
    facts = with_measurements(
        merge(seen(), family(DTypeRow(Support.UNKNOWN))), measured(bfloat16=100)
    )
    assert facts.fact(BF16).support is Support.UNKNOWN
    assert facts.fact(BF16).measured_gflops == 100
    assert facts.measured_ratio(BF16) is None


def test_a_crash_means_absent():
    crash = Measurements("torch", (Product(BF16, failure="SIGILL", crashed=True),))
    fact = with_measurements(merge(seen(), family()), crash).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.ABSENT, Evidence.MEASURED)
    assert fact.reason == "SIGILL"


def test_a_failure_that_is_no_crash_changes_only_the_reason():
    failed = Measurements("torch", (Product(BF16, failure="too slow"),), notes=("a note",))
    facts = with_measurements(merge(seen(), family()), failed)
    assert facts.fact(BF16).support is Support.NATIVE
    assert facts.fact(BF16).reason == "not measured: too slow"
    assert facts.notes == ("a note",)
    facts = with_measurements(merge(seen(), family(replace(NATIVE, reason="two passes"))), failed)
    assert facts.fact(BF16).reason == "two passes; not measured: too slow"


@settings(deadline=None)
@given(row=rows, features=features, flops=st.floats(1, 80) | st.floats(120, 1e6))
def test_what_is_clearly_measured_beats_what_is_said(row, features, flops):
    facts = merge(seen(features=features), family(row))
    told = with_measurements(facts, measured(float32=100, bfloat16=flops))
    assert told.fact(BF16).evidence is Evidence.MEASURED
    said, found = facts.fact(BF16).support, told.fact(BF16).support
    if flops < 100:
        assert found is (Support.SLOW if said is Support.NATIVE else Support.EMULATED)
    else:
        assert found is Support.NATIVE


@settings(deadline=None)
@given(row=rows, extra=features)
def test_more_features_never_take_a_proof_away(row, extra):
    few = merge(seen(features=frozenset({"a"})), family(row)).fact(BF16)
    more = merge(seen(features=frozenset({"a"}) | extra), family(row)).fact(BF16)
    if "a" in row.requires:
        assert few.support is more.support is row.support
    assert replace(few, reason="").alignment == more.alignment
