"""What must hold of a recipe: it reads back, knows its knobs, and equal ones have equal keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz.values import recipes, values_of
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import (
    GRAPH_MODES,
    KNOBS,
    Alignment,
    Distributed,
    LossScale,
    Recipe,
    check_knob,
    communication_settings,
    is_default_communication,
)
from autoprec.errors import UsageError


@given(recipes)
def test_a_recipe_reads_back_as_it_was_written(recipe):
    assert from_plain(Recipe, to_plain(recipe)) == recipe


@pytest.mark.parametrize("kind", [LossScale, Alignment])
def test_its_parts_read_back_as_they_were_written(kind):
    @given(values_of(kind))
    def check(value):
        assert from_plain(kind, to_plain(value)) == value

    check()


@given(recipes, recipes)
def test_equal_recipes_have_equal_keys_and_others_others(one, other):
    assert one.key() == from_plain(Recipe, to_plain(one)).key()
    assert (one.key() == other.key()) == (to_plain(one) == to_plain(other))


def test_the_order_of_the_knobs_is_no_part_of_the_key():
    one = Recipe(knobs={"threads": 2, "cudnn_benchmark": True})
    other = Recipe(knobs={"cudnn_benchmark": True, "threads": 2})
    assert one.key() == other.key()


@given(recipes)
def test_the_effective_batch_is_what_the_optimizer_sees(recipe):
    ranks = 1 if recipe.distributed is None else recipe.distributed.world_size
    assert recipe.effective_batch == recipe.batch_size * recipe.accumulation_steps * ranks


@given(recipes, st.sampled_from(Policy))
def test_another_policy_brings_its_loss_scale_and_drops_the_islands(recipe, policy):
    changed = recipe.with_policy(policy)
    assert changed.policy is policy
    assert changed.loss_scale == (LossScale() if policy.needs_loss_scale else None)
    assert changed.float32_modules == ()
    assert changed.batch_size == recipe.batch_size
    assert changed.knobs == {name: v for name, v in recipe.knobs.items() if name != "float8"}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0 given, expected a number from 1"),
        ({"accumulation_steps": 2**21}, "accumulation_steps: 2097152 given, .* from 1 to"),
        ({"policy": "bf16"}, "policy: 'bf16' given, expected one of float32"),
        ({"batchsize": 8}, r"batchsize: unknown key; did you mean 'batch_size'\?"),
        ({"loss_scale": {"initial": 0}}, "loss_scale.initial: 0.0 given, expected a number"),
        ({"loss_scale": {"floor": 2.0**127}}, "loss_scale.floor: "),
        ({"alignment": {"multiple": 5000}}, "alignment.multiple: 5000 given"),
        ({"memory_format": "nhwc"}, "memory_format: 'nhwc' given, expected one of contiguous"),
        ({"compile": 1}, "compile: 1 given, expected true or false"),
        ({"knobs": {"thread": 1}}, r"unknown setting 'thread'; did you mean 'threads'\? \(known: "),
        ({"knobs": {"threads": 0}}, "setting threads: 0 given, expected an integer from 1 to 4096"),
        ({"knobs": {"threads": True}}, "setting threads: True given, expected an integer"),
        ({"knobs": {"cudnn_benchmark": 1}}, "cudnn_benchmark: 1 given, expected one of True, F"),
        ({"knobs": {"compile_mode": "fast"}}, "'fast' given, expected one of default, reduce"),
        (
            {
                "compile": True,
                "accumulation_steps": 2,
                "knobs": {"compile_mode": "reduce-overhead"},
            },
            "compile_mode 'reduce-overhead' with accumulation_steps 2 given, expected 1 step: .*"
            "Give compile_mode 'default', or a batch that is not split",
        ),
    ],
)
def test_what_no_recipe_may_hold_is_refused(plain, message):
    with pytest.raises(DecodeError, match=message):
        from_plain(Recipe, plain)


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_cuda_graphs_are_refused_with_accumulation_alone(mode):
    whole = Recipe(compile=True, knobs={"compile_mode": mode})
    with pytest.raises(UsageError, match=f"{mode}' with accumulation_steps 4 given"):
        replace(whole, accumulation_steps=4)
    assert replace(whole, accumulation_steps=4, compile=False)
    assert replace(whole, accumulation_steps=4, knobs={"compile_mode": "default"})


@pytest.mark.parametrize(
    ("policy", "compiled"), [("float32", True), ("mixed_float16", True), ("mixed_bfloat16", False)]
)
def test_float8_refines_compiled_bfloat16_alone(policy, compiled):
    refined = Recipe("mixed_bfloat16", compile=True, knobs={"float8": True, "threads": 2})
    assert refined.uses_float8
    assert refined.with_policy(Policy.FLOAT32).knobs == {"threads": 2}
    given = (
        f"setting float8 with policy {policy} and compile {compiled} given, expected policy mixed"
    )
    with pytest.raises(UsageError, match=f"{given}_bfloat16 and compile True: .* leave float8 out"):
        replace(refined, policy=Policy(policy), compile=compiled)
    off = replace(refined, policy=Policy(policy), compile=compiled, knobs={"float8": False})
    assert not off.uses_float8


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_says_what_it_is(name):
    knob = KNOBS[name]
    assert knob.meaning
    for value in knob.values or (knob.low, knob.high):
        check_knob(name, value)


def refusal_of(name, value):
    try:
        check_knob(name, value)
    except UsageError as error:
        return str(error)
    return ""


@given(st.text() | st.sampled_from(sorted(KNOBS)), st.integers() | st.booleans() | st.text())
def test_a_refused_knob_is_told_in_one_short_printable_line(name, value):
    message = refusal_of(name, value)
    assert message.isprintable()
    assert len(message) < 400


def test_another_policy_changes_only_what_fsdp2_gathers() -> None:
    ranks = Distributed("fsdp2", 4, reduce_dtype=DType.BFLOAT16, reshard_after_forward=False)
    mixed = Recipe(distributed=ranks).with_policy(Policy.MIXED_BFLOAT16)
    assert mixed.distributed == Distributed(
        "fsdp2", 4, DType.BFLOAT16, DType.BFLOAT16, reshard_after_forward=False
    )
    assert mixed.with_policy(Policy.MIXED_FLOAT16).distributed == ranks
    assert Distributed("ddp", 4).for_policy(Policy.MIXED_BFLOAT16) == Distributed("ddp", 4)


def test_float32_on_ranks_has_no_setting_but_its_engine() -> None:
    ranks = Distributed("fsdp2", 4, DType.BFLOAT16, DType.BFLOAT16, 100, False, True)
    assert ranks.rounds_gradients
    assert ranks.in_float32() == Distributed("fsdp2", 4)
    assert not ranks.in_float32().rounds_gradients


def test_what_differs_in_communication_is_named_by_its_field() -> None:
    assert communication_settings(Recipe()) == {}
    assert communication_settings(Recipe(distributed=Distributed("fsdp2", 8, DType.BFLOAT16))) == {}
    ranks = Distributed("ddp", 2, None, DType.BFLOAT16, 100, False, True)
    assert communication_settings(Recipe(distributed=ranks)) == {
        "reduce_dtype": "bfloat16",
        "bucket_mb": 100,
        "reshard_after_forward": False,
        "sync_each_microbatch": True,
    }
    assert is_default_communication("bucket_mb", 25)
    assert not is_default_communication("bucket_mb", 100)
    assert not is_default_communication("threads", 25)
