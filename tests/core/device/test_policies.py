"""What must hold of the rules: the order, the reasons, and that refusing never adds a candidate."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import measured_choice, objections, propose
from autoprec.core.dtypes import DType, Policy

N, E, A, U = Support.NATIVE, Support.EMULATED, Support.ABSENT, Support.UNKNOWN
F32, TF32, BF16, F16 = (
    Policy.FLOAT32,
    Policy.TF32,
    Policy.MIXED_BFLOAT16,
    Policy.MIXED_FLOAT16,
)


def fact(support, *, peak=None, gflops=None, reason=""):
    evidence = Evidence.CATALOGUE if gflops is None else Evidence.MEASURED
    return DTypeFact(support, evidence, reason, 8, 64, peak, gflops)


def timed_elsewhere(ratio, support=N):
    return replace(fact(support), family_ratio=ratio)


def facts(kind=DeviceKind.CUDA, **dtypes):
    known = {DType.FLOAT32: fact(N), **{DType(name): value for name, value in dtypes.items()}}
    for dtype in DType:
        known.setdefault(dtype, fact(A))
    return DeviceFacts(Observation(kind), "family", "title", known)


def test_an_old_gpu_gets_float32_and_is_told_why():
    proposal = propose(facts(bfloat16=fact(E), float16=fact(E, reason="no Tensor Cores")))
    assert proposal.policies == (F32,)
    assert proposal.recommended is F32
    assert {r.candidate: r.reason for r in proposal.refusals} == {
        "tf32": "tf32 is absent",
        "mixed_bfloat16": "bfloat16 is emulated",
        "mixed_float16": "float16 is emulated: no Tensor Cores",
    }
    assert "no speed-up over float32 is to be expected" in proposal.expectation


def test_float16_goes_first_where_bfloat16_is_emulated():
    proposal = propose(facts(bfloat16=fact(E), float16=fact(N)))
    assert proposal.policies == (F16, F32)
    assert "needs a loss scale" in proposal.candidates[0].reasons


def test_bfloat16_goes_before_an_equally_fast_float16_and_tf32_before_float32():
    proposal = propose(
        facts(
            float32=fact(N, peak=19.5),
            tf32=fact(N, peak=156.0),
            bfloat16=fact(N, peak=312.0),
            float16=fact(N, peak=312.0),
        )
    )
    assert proposal.policies == (BF16, F16, TF32, F32)
    assert "float32's range: no loss scale" in proposal.candidates[0].reasons
    assert "peak 16x float32's" in proposal.candidates[0].reasons
    assert "float32 code unchanged" in proposal.candidates[2].reasons
    assert "up to 16x float32" in proposal.expectation


def test_a_clearly_higher_peak_goes_first():
    proposal = propose(facts(bfloat16=fact(N, peak=92.3), float16=fact(N, peak=184.6)))
    assert proposal.policies == (F16, BF16, F32)


def test_what_was_measured_ranks_before_what_the_vendor_says():
    proposal = propose(
        facts(
            float32=fact(N, gflops=100.0),
            bfloat16=fact(N, peak=100.0, gflops=150.0),
            float16=fact(N, peak=200.0, gflops=400.0),
        )
    )
    assert proposal.policies == (F16, BF16, F32)
    assert "run 4x float32's speed (measured)" in proposal.expectation


def test_without_peaks_of_all_nothing_is_ranked_by_them():
    proposal = propose(facts(bfloat16=fact(N), float16=fact(N, peak=200.0)))
    assert proposal.policies == (BF16, F16, F32)
    assert "only measuring tells" in proposal.expectation


def test_on_a_cpu_bfloat16_is_tried_where_it_is_native_and_float16_is_not():
    proposal = propose(facts(DeviceKind.CPU, bfloat16=fact(N), float16=fact(N)))
    assert proposal.policies == (BF16, F32)
    assert "measure it first" in proposal.refusals[-1].reason


def test_on_a_cpu_a_measurement_lets_float16_in():
    proposal = propose(
        facts(
            DeviceKind.CPU,
            float32=fact(N, gflops=100.0),
            bfloat16=fact(E),
            float16=fact(N, gflops=250.0),
        )
    )
    assert proposal.policies == (F16, F32)


def test_a_native_dtype_that_measures_slower_is_refused_with_the_number():
    proposal = propose(
        facts(DeviceKind.CPU, float32=fact(N, gflops=100.0), bfloat16=fact(N, gflops=3.0))
    )
    assert proposal.policies == (F32,)
    assert "measured: 0.03x float32" in proposal.refusals[1].reason


def test_what_is_unknown_is_tried_after_float32_on_an_accelerator():
    proposal = propose(facts(bfloat16=fact(U), float16=fact(U)))
    assert proposal.policies == (F32, BF16, F16)
    assert "only a measurement can tell" in proposal.candidates[1].reasons
    assert "nothing can be expected before it is measured" in proposal.expectation


def test_what_is_unknown_is_not_tried_on_a_cpu():
    proposal = propose(facts(DeviceKind.CPU, bfloat16=fact(U), float16=fact(U)))
    assert proposal.policies == (F32,)
    assert "nothing is known of bfloat16" in proposal.refusals[1].reason


def test_a_request_overrides_refusals_and_says_what_the_rules_say():
    proposal = propose(facts(bfloat16=fact(E), float16=fact(N)), requested=(BF16, F16))
    assert proposal.policies == (F16, BF16)
    assert proposal.candidates[0].reasons[0] == "requested"
    assert proposal.candidates[1].reasons == (
        "requested",
        "the rules refuse it: bfloat16 is emulated",
    )
    assert proposal.refusals == ()


def test_float32_alone_can_be_requested():
    assert propose(facts(float16=fact(N)), requested=(F32,)).policies == (F32,)


# Every sentence whole: the table, the profile and `autoprec probe` show them ----------------------


def test_every_reason_of_a_gpus_policies_is_told_with_its_evidence():
    proposal = propose(
        facts(
            float32=replace(fact(N, peak=10.0, gflops=100.0), reason=""),
            tf32=fact(U),
            bfloat16=fact(N, peak=40.0, gflops=250.0, reason="Tensor Cores"),
            float16=replace(fact(A), reason="fused off"),
        )
    )
    assert {c.policy: c.reasons for c in proposal.candidates} == {
        BF16: (
            "bfloat16 is native: Tensor Cores",
            "peak 4x float32's",
            "float32's range: no loss scale",
        ),
        F32: ("the reference everything is measured against",),
        TF32: (
            "tf32 is unknown (catalogue)",
            "only a measurement can tell",
            "float32 code unchanged",
        ),
    }
    assert [r.reason for r in proposal.refusals] == ["float16 is absent: fused off"]
    assert proposal.expectation == (
        "matrix products run 2.5x float32's speed (measured); a whole model gains less"
    )


def test_every_objection_of_a_cpus_policies_is_told_whole():
    known = facts(DeviceKind.CPU, tf32=fact(U, reason="no flag"), bfloat16=fact(U), float16=fact(N))
    claim = "on this CPU; emulated, it can be a hundred times slower"
    assert objections(known, TF32) == (f"nothing is known of tf32 {claim}: no flag",)
    assert objections(known, BF16) == (f"nothing is known of bfloat16 {claim}",)
    assert objections(known, F16) == (
        "the CPU has float16 arithmetic, but framework libraries seldom use it in training; "
        "measure it first",
    )


@pytest.mark.parametrize(
    ("known", "expectation"),
    [
        (
            facts(),
            "no speed-up over float32 is to be expected: no faster dtype is native here",
        ),
        (
            facts(bfloat16=fact(U)),
            "not known to be faster than float32: nothing can be expected before it is measured",
        ),
        (
            facts(bfloat16=fact(N)),
            "faster than float32 if matrix products dominate; only measuring tells",
        ),
        (
            facts(float32=fact(N, peak=2.0), bfloat16=fact(N, peak=6.0)),
            "matrix products up to 3x float32 by the vendor's peaks; a whole model gains less",
        ),
    ],
)
def test_what_is_to_be_expected_is_told_whether_asked_for_or_not(known, expectation):
    assert propose(known).expectation == expectation
    assert propose(known, requested=(F32,)).expectation == expectation


def test_what_is_just_as_fast_as_float32_on_a_gpu_is_tried():
    """Slower is refused; from as fast on a whole model may gain by the smaller memory."""
    same = facts(float32=fact(N, gflops=100.0), bfloat16=fact(N, gflops=100.0))
    assert objections(same, BF16) == ()
    unsure = facts(float32=fact(N, gflops=100.0), bfloat16=fact(N, gflops=99.0))
    assert objections(unsure, BF16) == ()
    slower = facts(float32=fact(N, gflops=100.0), bfloat16=fact(N, gflops=80.0))
    why = "bfloat16 products are slower than float32's (measured: 0.8x float32)"
    assert objections(slower, BF16) == (why,)


def test_nearly_as_fast_ones_keep_their_order_and_one_step_further_does_not():
    def order(bfloat16, float16):
        known = facts(
            float32=fact(N, gflops=10.0),
            bfloat16=fact(N, gflops=bfloat16),
            float16=fact(N, gflops=float16),
        )
        return propose(known).policies[:2]

    assert order(100.0, 109.0) == (BF16, F16)
    assert order(100.0, 111.0) == (F16, BF16)


any_fact = st.builds(
    DTypeFact,
    support=st.sampled_from(Support),
    evidence=st.sampled_from(Evidence),
    peak_dense_tflops=st.none() | st.floats(0.1, 1e4),
    measured_gflops=st.none() | st.floats(0.001, 1e6),
)
any_facts = st.builds(
    lambda kind, dtypes: DeviceFacts(Observation(kind), "f", "t", dtypes),
    st.sampled_from(DeviceKind),
    st.dictionaries(st.sampled_from(DType), any_fact),
)
requests = st.lists(st.sampled_from(Policy), min_size=1, unique=True).map(tuple)


@settings(deadline=None)
@given(any_facts)
def test_float32_is_always_a_candidate(device):
    assert F32 in propose(device).policies


@settings(deadline=None)
@given(any_facts)
def test_every_policy_is_a_candidate_or_refused_and_never_both(device):
    proposal = propose(device)
    named = [*proposal.policies, *(Policy(refusal.candidate) for refusal in proposal.refusals)]
    assert sorted(named) == sorted(Policy)
    assert proposal.expectation


@settings(deadline=None)
@given(any_facts)
def test_every_candidate_and_every_refusal_has_its_reason(device):
    proposal = propose(device)
    assert all(all(candidate.reasons) and candidate.reasons for candidate in proposal.candidates)
    assert all(refusal.reason for refusal in proposal.refusals)
    for policy in Policy:
        assert (policy in proposal.policies) == (not objections(device, policy))


@settings(deadline=None)
@given(any_facts, requests)
def test_a_request_is_followed_exactly(device, requested):
    proposal = propose(device, requested)
    assert sorted(proposal.policies) == sorted(requested)
    assert proposal.refusals == ()
    assert all(candidate.reasons[0] == "requested" for candidate in proposal.candidates)


@settings(deadline=None)
@given(any_facts, st.sampled_from([DType.TF32, DType.BFLOAT16, DType.FLOAT16]))
def test_a_refusal_added_never_adds_a_candidate(device, dtype):
    worse = replace(
        device, dtypes={**device.dtypes, dtype: replace(device.fact(dtype), support=Support.ABSENT)}
    )
    assert set(propose(worse).policies) <= set(propose(device).policies)


@settings(deadline=None)
@given(any_facts)
def test_the_same_facts_give_the_same_proposal(device):
    assert propose(device) == propose(device)


@settings(deadline=None)
@given(any_facts)
def test_native_candidates_go_before_float32_and_what_is_unknown_or_seems_slow_after(device):
    policies = propose(device).policies
    enough = 1.1 if device.kind is DeviceKind.CPU else 1.0
    for policy in policies:
        support = device.fact(policy.compute_dtype).support
        ratio = device.measured_ratio(policy.compute_dtype)
        if policy is not F32:
            before = policies.index(policy) < policies.index(F32)
            seems_slow = ratio is not None and ratio < enough
            assert before == (support is Support.NATIVE and not seems_slow)


@pytest.mark.parametrize("policy", list(Policy))
def test_objections_are_empty_for_what_is_allowed(policy):
    everything = {dtype: fact(N) for dtype in DType}
    assert objections(DeviceFacts(Observation(DeviceKind.CUDA), "f", "t", everything), policy) == ()


def test_a_cpu_dtype_that_is_surely_no_faster_than_float32_is_not_tried():
    """Repeated measurements differ by up to a fifth: what may be clearly faster is."""
    known = facts(DeviceKind.CPU, float32=fact(N, gflops=200.0), float16=fact(N, gflops=180.0))
    assert objections(known, F16) == (
        "float16 products are no faster than float32's (measured: 0.9x float32)",
    )
    unsure = facts(DeviceKind.CPU, float32=fact(N, gflops=200.0), float16=fact(N, gflops=208.0))
    assert objections(unsure, F16) == ()
    faster = facts(DeviceKind.CPU, float32=fact(N, gflops=200.0), float16=fact(N, gflops=300.0))
    assert objections(faster, F16) == ()


# Where nothing was tuned --------------------------------------------------------------------------


def test_what_the_catalogue_calls_native_is_no_measurement():
    for device in (facts(bfloat16=fact(N)), facts(DeviceKind.CPU, bfloat16=fact(N))):
        assert propose(device).recommended is BF16
        choice = measured_choice(device)
        assert choice.policy is F32
        assert choice.reasons == (
            "nothing that was measured says that another policy would be faster here",
        )


def test_when_it_was_measured_is_said_of_this_device_alone():
    device = replace(facts(bfloat16=timed_elsewhere(2.0)), measured_on="2026-11-24")
    why = "bfloat16 products were measured at 2x float32's (another title)"
    assert measured_choice(device).reasons == (why,)


@pytest.mark.parametrize(("ratio", "policy"), [(2.2, BF16), (1.1, BF16), (1.09, F32), (0.56, F32)])
def test_what_was_measured_on_the_family_decides(ratio, policy):
    choice = measured_choice(facts(DeviceKind.CPU, bfloat16=timed_elsewhere(ratio)))
    assert choice.policy is policy
    if policy is BF16:
        why = f"bfloat16 products were measured at {ratio:.2g}x float32's (another title)"
        assert choice.reasons == (why,)


@pytest.mark.parametrize(("gflops", "policy"), [(110.0, BF16), (105.0, F32), (56.0, F32)])
def test_what_was_measured_here_beats_what_was_measured_on_the_family(gflops, policy):
    bfloat16 = replace(fact(N, gflops=gflops), family_ratio=2.2)
    device = facts(DeviceKind.CPU, float32=fact(N, gflops=100.0), bfloat16=bfloat16)
    choice = measured_choice(replace(device, measured_on="2026-11-24"))
    assert choice.policy is policy
    assert policy is F32 or "(this device, on 2026-11-24)" in choice.reasons[0]


def test_a_policy_that_was_not_measured_is_passed_over_for_one_that_was():
    device = facts(bfloat16=fact(N), float16=timed_elsewhere(3.0))
    assert propose(device).recommended is BF16
    assert measured_choice(device).policy is F16


def test_what_is_refused_is_not_taken_however_fast_it_was_elsewhere():
    slow = facts(float32=fact(N, gflops=100.0), bfloat16=replace(fact(N, gflops=50.0)))
    for device in (facts(bfloat16=timed_elsewhere(9.0, E)), slow):
        assert measured_choice(device).policy is F32
