"""Checks during training, judged: when they are due, what is a fault, what noise excuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.watching import (
    Difference,
    GradientPair,
    StepJudge,
    WatchedStep,
    compared_gradients,
    confirm_after,
    fault_expected,
    judge,
    named,
    next_check,
    standard_error,
)
from autoprec.core.watch_settings import check_settings
from autoprec.errors import UsageError

HEALTHY = Difference(
    outputs=0.01, loss=0.002, gradient=0.03, modules={"a": 0.02, "b": 0.1}, vanished=0.05
)
STRICT = Tolerance()


def due(every: int, until: int) -> list[int]:
    numbers, last = [], 0
    while (last := next_check(last, every)) <= until:
        numbers.append(last)
    return numbers


def test_checks_double_and_then_come_at_most_so_far_apart() -> None:
    assert due(2000, 10_000) == [1, 50, 100, 200, 400, 800, 1600, 3200, 5200, 7200, 9200]
    assert due(40, 160) == [1, 41, 81, 121]
    assert due(49, 150) == [1, 50, 99, 148]
    assert due(50, 200) == [1, 50, 100, 150, 200]
    assert due(70, 220) == [1, 50, 100, 170]
    assert due(98, 300) == [1, 50, 100, 198, 296]
    assert due(100, 400) == [1, 50, 100, 200, 300, 400]


@pytest.mark.parametrize("every", [1, 7, 100, 2000])
def test_no_two_checks_are_further_apart(every: int) -> None:
    found = due(every, 30_000)
    assert found[0] == 1
    assert all(0 < b - a <= every for a, b in itertools.pairwise(found))


def test_what_rounding_does_to_a_healthy_model_is_no_fault() -> None:
    assert judge(HEALTHY, (), STRICT) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"outputs": math.inf}, "outputs are not finite"),
        ({"outputs": 0.6}, "outputs are 60 % away"),
        ({"loss": -0.04}, "loss is 4 % away"),
        ({"gradient": 0.8}, "gradient is 80 % away"),
        ({"gradient": 0.8, "vanished": 0.7}, "50 % is allowed; 70 % of it is 0"),
        ({"modules": {"a": 0.02, "b": 1.0}}, "gradient of b is 100 % away"),
    ],
)
def test_each_number_that_is_too_far_from_float32_is_named(
    changed: dict[str, object], said: str
) -> None:
    assert said in judge(replace(HEALTHY, **changed), (), STRICT)  # type: ignore[arg-type]


def test_zeros_are_told_only_where_there_are_some() -> None:
    told = judge(replace(HEALTHY, gradient=0.8, vanished=0.0), (), STRICT)
    assert told.endswith("50 % is allowed")


def test_the_worst_modules_are_named_first() -> None:
    lost = {"a": 1.0, "b": 3.0, "c": 2.0}
    told = judge(replace(HEALTHY, modules=lost), (), STRICT)
    assert "gradient of b, c, a is 300 % away" in told


def test_noise_on_one_module_excuses_no_other() -> None:
    found = replace(HEALTHY, modules={"a": 1.0})
    assert "gradient of a" in judge(found, [replace(HEALTHY, modules={"b": 1.0})], STRICT)


def test_noise_whose_loss_is_not_known_excuses_no_loss() -> None:
    assert judge(replace(HEALTHY, loss=0.04), [replace(HEALTHY, loss=None)], STRICT)


@pytest.mark.parametrize("number", ["outputs", "loss", "gradient"])
def test_what_noise_does_to_float32_is_no_fault(number: str) -> None:
    away = {"outputs": 0.6, "loss": 0.04, "gradient": 0.8}[number]
    found = replace(HEALTHY, **{number: away})
    assert judge(found, [replace(HEALTHY, **{number: away / 2})], STRICT) == ""
    assert judge(found, [replace(HEALTHY, **{number: away / 10})], STRICT)


@pytest.mark.parametrize(("error", "told"), [(0.0, True), (0.019, True), (0.021, False)])
def test_a_loss_that_samples_move_up_and_down_is_no_fault(error: float, told: bool) -> None:
    assert bool(judge(replace(HEALTHY, loss=0.04, loss_error=error), (), STRICT)) is told


def test_noise_never_excuses_outputs_that_are_not_finite() -> None:
    found = replace(HEALTHY, outputs=math.inf)
    told = judge(found, [replace(HEALTHY, outputs=10.0)], STRICT)
    assert told == "its outputs are not finite, and float32's are"


@pytest.mark.parametrize("number", ["outputs", "gradient"])
def test_noise_excuses_nothing_of_which_nothing_is_left(number: str) -> None:
    found = replace(HEALTHY, **{number: 1.2})
    assert judge(found, [replace(HEALTHY, **{number: 1.2})], STRICT)


def test_a_finer_format_is_allowed_less_of_the_noise() -> None:
    found, noise = replace(HEALTHY, loss=0.04), [replace(HEALTHY, loss=0.015)]
    assert judge(found, noise, STRICT) == ""
    assert judge(found, noise, STRICT, roundoff=2.0**-11)
    assert judged(Policy.MIXED_BFLOAT16, found, noise)[0].problem == ""
    assert judged(Policy.MIXED_FLOAT16, found, noise)[0].problem


def test_a_finer_format_is_allowed_less_of_the_noise_on_a_module() -> None:
    found, noise = replace(HEALTHY, modules={"a": 0.95}), [replace(HEALTHY, modules={"a": 0.24})]
    assert judge(found, noise, STRICT) == ""
    assert judge(found, noise, STRICT, roundoff=2.0**-11)


def test_a_coarser_format_is_allowed_no_more_of_the_noise() -> None:
    found, noise = replace(HEALTHY, loss=0.04), [replace(HEALTHY, loss=0.008)]
    assert judge(found, noise, STRICT, roundoff=2.0**-7)


def test_a_gradient_that_is_rounding_alone_is_not_missed() -> None:
    found = replace(HEALTHY, modules={"bias": 40.0})
    assert judge(found, [replace(HEALTHY, modules={"bias": 1.4})], STRICT) == ""
    assert judge(found, [replace(HEALTHY, modules={"bias": 0.01})], STRICT)


def test_only_losses_off_to_both_sides_are_another_fault() -> None:
    loss = WatchedStep(1, 8, 8, loss=0.03, problem=judge(replace(HEALTHY, loss=0.03), (), STRICT))
    other = replace(loss, loss=-0.03)
    wrong = replace(other, problem=judge(replace(HEALTHY, loss=-0.03, gradient=0.8), (), STRICT))
    assert loss.repeats(None)
    assert loss.repeats(loss)
    assert not other.repeats(loss)
    assert wrong.repeats(loss)
    assert replace(other, loss=-0.21).repeats(loss)
    assert not replace(other, loss=-0.19).repeats(loss)
    assert not replace(loss, problem="").repeats(None)


def test_few_modules_are_named() -> None:
    assert named(["a", "", "c", "d", "e"]) == "a, the model's own code, c and 2 more"


def test_gradients_are_compared_by_module_and_where_float32_has_any() -> None:
    pairs = [
        GradientPair("a", 3.0, 5.0, 1, 4),
        GradientPair("a", 4.0, 12.0, 0, 4),
        GradientPair("b", math.nan, 1.0, 0, 2),
        GradientPair("lost", 1.0, math.inf, 1, 1),
    ]
    whole, modules, vanished = compared_gradients(pairs[:2])
    assert (whole, modules, vanished) == (5 / 13, {"a": 5 / 13}, 1 / 8)
    assert compared_gradients(pairs)[:2] == (math.inf, {"a": 5 / 13, "b": math.inf})
    assert compared_gradients(()) == (0.0, {}, 0.0)
    nothing = GradientPair("a", 1.0, 0.0, 0, 0)
    assert compared_gradients([nothing]) == (math.inf, {"a": math.inf}, 0.0)


def judged(policy: Policy, found: Difference, noise: object) -> tuple[WatchedStep, bool]:
    judge = StepJudge(policy, lambda: noise)  # type: ignore[arg-type, return-value]
    return judge.judged(WatchedStep(1, 8, 8), found), judge.undecided


def test_nothing_is_undecided_before_a_check() -> None:
    assert StepJudge(Policy.MIXED_FLOAT16, list).undecided is False


def test_a_check_keeps_what_it_found() -> None:
    step, undecided = judged(Policy.MIXED_FLOAT16, HEALTHY, None)
    assert step == WatchedStep(1, 8, 8, outputs=0.01, loss=0.002, gradient=0.03, vanished=0.05)
    assert not undecided
    assert judged(Policy.MIXED_FLOAT16, replace(HEALTHY, loss=None), None)[0].loss is None


@pytest.mark.parametrize(
    ("changed", "certain"),
    [
        ({}, False),
        ({"outputs": 0.6}, False),
        ({"outputs": 0.95}, True),
        ({"outputs": math.inf}, True),
        ({"gradient": 2.0}, False),
        ({"outputs": 0.1, "loss": 0.9}, False),
    ],
)
def test_outputs_of_which_nothing_is_left_need_no_second_check(
    changed: dict[str, float], certain: bool
) -> None:
    step, _ = judged(Policy.MIXED_BFLOAT16, replace(HEALTHY, **changed), [HEALTHY])  # type: ignore[arg-type]
    assert not step.is_certain  # at the first update
    assert replace(step, updates=2).is_certain is certain


def test_noise_is_asked_for_where_there_is_doubt_and_what_it_does_not_say_is_said() -> None:
    away = replace(HEALTHY, outputs=0.6)
    assert judged(Policy.MIXED_BFLOAT16, HEALTHY, None)[0].not_checked == ""
    assert judged(Policy.MIXED_BFLOAT16, away, [replace(HEALTHY, outputs=0.2)])[0].problem == ""
    assert judged(Policy.MIXED_BFLOAT16, away, [HEALTHY])[0].problem
    unknown, _ = judged(Policy.MIXED_BFLOAT16, away, "no memory")
    assert (unknown.samples, unknown.problem, unknown.not_checked) == (
        0,
        "",
        "what noise does is not known: no memory",
    )


def test_samples_that_agree_leave_nothing_to_chance_and_few_tell_nothing() -> None:
    assert standard_error([0.5] * 16) == 0.0
    assert standard_error([1.0, -1.0] * 8) == pytest.approx(4 * (16 / 15) ** 0.5)
    assert standard_error([1.0, -1.0] * 7) == 0.0


def test_a_backward_pass_that_overflows_in_float16_is_the_loss_scales_business() -> None:
    found = replace(HEALTHY, gradient=math.inf, modules={"a": math.inf})
    step, undecided = judged(Policy.MIXED_FLOAT16, found, [HEALTHY])
    assert (undecided, step.problem, step.gradient, step.vanished) == (True, "", None, None)
    step, undecided = judged(Policy.MIXED_BFLOAT16, found, [HEALTHY])
    assert not undecided
    assert "infinitely far away" in step.problem


@pytest.mark.parametrize(
    ("loss", "error", "fault", "undecided"),
    [
        (0.04, 0.01, True, False),
        (0.04, 0.03, False, True),  # it may be chance: another check comes soon
        (0.25, 0.2, True, False),  # too far away for that
        (0.015, 0.03, False, False),
    ],
)
def test_a_loss_that_may_be_chance_asks_for_another_check(
    loss: float, error: float, fault: bool, undecided: bool
) -> None:
    found = replace(HEALTHY, loss=loss, loss_error=error)
    step, asked = judged(Policy.MIXED_BFLOAT16, found, [HEALTHY])
    assert (bool(step.problem), asked) == (fault, undecided)


@pytest.mark.parametrize("watch", ["warn", "float32", "raise"])
def test_settings_that_say_what_to_do_are_taken(watch: str) -> None:
    assert check_settings(watch, 2000) == watch


def test_false_watches_nothing() -> None:
    assert check_settings(False, 2000) is None


@pytest.mark.parametrize(
    ("watch", "every", "said"),
    [
        ("always", 2000, "watch='always' given, expected 'warn', 'float32', 'raise' or False"),
        (True, 2000, "watch=True given"),
        ("warn", 0, "watch_every=0 given"),
        ("warn", 1.5, "watch_every=1.5 given"),
        ("warn", True, "watch_every=True given"),
    ],
)
def test_other_settings_are_refused(watch: object, every: object, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        check_settings(watch, every)


def test_outputs_that_grow_are_expected_to_go_on() -> None:
    def step(updates: int, outputs: float | None) -> WatchedStep:
        return WatchedStep(updates, 8, 8, outputs=outputs)

    before = [step(1, None), step(20, 0.02), step(40, 0.01)]
    assert fault_expected(step(60, 0.08), before) == pytest.approx(60 + 20 * math.log2(0.25 / 0.08))
    for nothing in (0.02, 0.001, 0.25, None):
        assert fault_expected(step(60, nothing), before) == math.inf
    assert fault_expected(step(60, 0.08), []) == math.inf


def test_a_fault_is_looked_at_again_soon_and_sooner_in_the_first_updates() -> None:
    assert [confirm_after(n, 2000) for n in (1, 49, 50, 100, 250, 9000)] == [10, 10, 2, 4, 10, 10]
    assert confirm_after(9000, 3) == 3
