"""What must hold of the words: names, short forms, and what a policy computes in."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.dtypes import DType, Policy, own_precision
from autoprec.errors import UsageError


@pytest.mark.parametrize("kind", [DType, Policy])
def test_every_name_parses_to_itself(kind):
    for member in kind:
        assert kind.parse(member.value) is member
        assert kind.parse(f"  {member.value.upper()} ") is member


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("fp32", Policy.FLOAT32),
        ("32-true", Policy.FLOAT32),
        ("bf16", Policy.MIXED_BFLOAT16),
        ("bf16-mixed", Policy.MIXED_BFLOAT16),
        ("16-mixed", Policy.MIXED_FLOAT16),
        ("fp16", Policy.MIXED_FLOAT16),
    ],
)
def test_short_forms_are_read_at_the_border(text, policy):
    assert Policy.parse(text) is policy


@pytest.mark.parametrize(
    ("text", "dtype"), [("half", "float16"), ("fp8", "float8"), ("f32", "float32")]
)
def test_dtypes_have_short_forms_too(text, dtype):
    assert DType.parse(text).value == dtype


@pytest.mark.parametrize("name", ["mixed_float8", "fp8"])
def test_float8_is_no_policy_and_the_message_says_how_to_try_it(name):
    told = f"policy '{name}' given, but float8 refines mixed_bfloat16 .* Give .* and --compile"
    with pytest.raises(UsageError, match=told):
        Policy.parse(name)


def test_an_unknown_name_tells_what_was_given_what_is_expected_and_the_nearest():
    with pytest.raises(
        UsageError, match=r"unknown policy 'mixed_float61'.*Did you mean mixed_float16"
    ):
        Policy.parse("mixed_float61")
    with pytest.raises(
        UsageError, match=r"unknown dtype '\?\?\?': expected one of float32, "
    ) as caught:
        DType.parse("???")
    assert "Did you mean" not in str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_parsing_any_text_gives_a_policy_or_a_usage_error(text):
    with contextlib.suppress(UsageError):
        assert Policy.parse(text) in Policy


def test_policies_compute_in_their_dtype_and_keep_float32_weights():
    assert [policy.compute_dtype.value for policy in Policy] == [
        "float32",
        "tf32",
        "bfloat16",
        "float16",
    ]
    assert all(policy.variable_dtype is DType.FLOAT32 for policy in Policy)
    assert [policy for policy in Policy if policy.mixed] == [
        Policy.MIXED_BFLOAT16,
        Policy.MIXED_FLOAT16,
    ]
    assert [policy for policy in Policy if policy.needs_loss_scale] == [Policy.MIXED_FLOAT16]


def test_the_limits_are_those_of_the_formats():
    assert DType.FLOAT16.limits.unit_roundoff == 2**-11
    assert DType.BFLOAT16.limits.unit_roundoff == 2**-8
    assert DType.TF32.limits.mantissa_bits == DType.FLOAT16.limits.mantissa_bits
    assert DType.BFLOAT16.limits.max_exponent == DType.FLOAT32.limits.max_exponent
    for dtype in DType:
        limits = dtype.limits
        exponent_bits = (limits.max_exponent + 1).bit_length()
        assert limits.bits == 1 + exponent_bits + limits.mantissa_bits


@pytest.mark.parametrize(
    ("weights", "own"),
    [
        ([("float32", 9, True)], ""),
        ([("bfloat16", 9, True)], "bfloat16"),
        ([("float16", 9, True), ("float32", 4, True)], "float16"),  # norms in float32, as in CLIP
        ([("bfloat16", 9, False), ("float32", 1, True)], "bfloat16"),  # adapters
        ([("bfloat16", 1, True), ("float32", 9, False)], "bfloat16"),  # all that train
        ([("bfloat16", 4, True), ("float32", 9, True)], ""),
        ([("bfloat16", 4, True), ("float16", 4, True)], ""),
        ([], ""),
    ],
)
def test_a_model_is_in_16_bits_where_most_weights_are_or_all_that_train(weights, own):
    assert own_precision(weights) == own
