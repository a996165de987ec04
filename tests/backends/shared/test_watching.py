"""Checks of a training: planned, acted on at the second fault, told once, and saved."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from autoprec.backends.shared.watching import CheckLog
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.watching import CONFIRM_AFTER, WAITED_FOR, WatchedStep
from autoprec.errors import AutoprecError, AutoprecWarning

FAULT = "its outputs are far away"


def log(action: Any = "warn", every: int = 50) -> CheckLog:
    return CheckLog(Policy.MIXED_BFLOAT16, action, every)


def failed(checks: CheckLog, update: int, size: int = 8, *, certain: bool = False) -> bool:
    step = WatchedStep(update, 8, 8, problem=FAULT)
    return checks.is_acted_on(
        step,
        size,
        failed=True,
        repeats=True,
        undecided=False,
        certain=certain,
        expected=math.inf,
    )


def nothing_kept(paths: tuple[str, ...]) -> None:
    pytest.fail(f"{paths} were kept in float32")


def passed(
    checks: CheckLog, update: int, *, undecided: bool = False, outputs: float | None = None
) -> bool:
    step = WatchedStep(update, 8, 8, outputs=outputs)
    return checks.is_acted_on(
        step,
        8,
        failed=False,
        repeats=False,
        undecided=undecided,
        certain=False,
        expected=checks.fault_expected(step),
    )


def test_the_second_fault_in_a_row_is_to_be_acted_on() -> None:
    checks = log()
    assert not failed(checks, 1)
    assert not passed(checks, 11)
    assert not failed(checks, 51)
    assert failed(checks, 61)
    assert [each.updates for each in checks.steps] == [1, 11, 51]


def test_a_certain_fault_is_acted_on_at_once() -> None:
    checks = log()
    assert failed(checks, 1, certain=True)
    assert not failed(checks, 11)


def test_what_is_undecided_clears_no_fault() -> None:
    checks = log()
    assert not failed(checks, 1)
    assert not passed(checks, 11, undecided=True)
    assert failed(checks, 21)


def test_losses_off_to_both_sides_are_no_fault_that_lasts() -> None:
    checks = log()

    def loss_off(update: int, loss: float) -> bool:
        step = WatchedStep(update, 8, 8, loss=loss, problem="its loss is away from float32's")
        again = checks.repeats(step)
        return checks.is_acted_on(
            step,
            8,
            failed=True,
            repeats=again,
            undecided=False,
            certain=False,
            expected=math.inf,
        )

    acted = [loss_off(1 + 10 * i, loss) for i, loss in enumerate((0.024, -0.02, 0.03, 0.03))]
    assert acted == [False, False, False, True]
    assert not loss_off(101, 0.024)
    assert loss_off(111, -0.9)


def test_a_check_follows_soon_where_one_failed_or_is_undecided() -> None:
    checks = log()
    for update, check in ((301, passed), (351, failed)):
        check(checks, update)
        assert checks.due == update + (CONFIRM_AFTER if check is failed else 50)
    passed(checks, 361, undecided=True)
    assert checks.due == 361 + CONFIRM_AFTER


def test_after_a_fault_that_is_not_repeated_checks_go_back_to_their_pace_step_by_step() -> None:
    checks, made = log(every=2000), [1]
    passed(checks, 1)
    while checks.due < 1000:
        made.append(checks.due)
        (failed if checks.due in (50, 400) else passed)(checks, checks.due)
    assert made == [1, 50, 52, 56, 64, 80, 100, 200, 400, 410, 430, 470, 550, 710, 800]


def test_faults_that_are_never_repeated_do_not_multiply_the_checks() -> None:
    """Each is looked at again soon, and no other check comes because of it."""
    checks, made, last = log(every=2000), 0, 0
    while checks.due <= 10_000:
        fails = made % 2 == 0
        step = WatchedStep(checks.due, 8, 8, problem=FAULT if fails else "")
        last, made = checks.due, made + 1
        checks.is_acted_on(
            step,
            8,
            failed=fails,
            repeats=False,
            undecided=False,
            certain=False,
            expected=math.inf,
        )
        assert checks.due > last
    assert made < 150


def test_the_next_check_comes_no_later_than_outputs_will_be_too_far_away() -> None:
    """From a hundredth to a tenth in 50 updates: another factor of 2.5 takes 20."""
    checks = log(every=2000)
    passed(checks, 50, outputs=0.01)
    passed(checks, 100, outputs=0.1)
    assert checks.due == 119
    passed(checks, 119, outputs=0.09)
    assert checks.due == 200


def test_what_grew_before_a_mend_tells_nothing_of_what_comes_after() -> None:
    checks = log("float32", every=2000)
    passed(checks, 50, outputs=0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        checks.act(WatchedStep(52, 8, 8, problem=FAULT), ("a",), lambda paths: None, lost=False)
    passed(checks, 54, outputs=0.1)
    assert checks.due == 100


def test_what_is_undecided_ends_no_doubt() -> None:
    checks = log(every=2000)
    failed(checks, 400)
    passed(checks, 410)
    assert checks.due == 430
    passed(checks, 430, undecided=True)
    assert checks.due == 440
    passed(checks, 440)
    assert checks.due == 480


def test_a_fault_that_lasts_is_not_checked_all_the_time_once_it_was_told() -> None:
    checks, made = log(every=2000), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        while checks.due <= 10_000:
            made += 1
            step = WatchedStep(checks.due, 8, 8, problem=FAULT)
            if failed(checks, step.updates):
                checks.act(step, (), nothing_kept, lost=False)
    assert made == 2 * 11


def test_after_a_fault_a_batch_as_large_is_waited_for_but_not_forever() -> None:
    checks = log()
    assert checks.least_size(1) == 0
    failed(checks, 1, size=512)
    assert checks.least_size(checks.due) == 512
    assert checks.least_size(checks.due + WAITED_FOR) == 0
    passed(checks, 20)
    assert checks.least_size(checks.due) == 0


def test_a_fault_is_told_once_and_where_to_look() -> None:
    checks, step = log(), WatchedStep(9, 8, 8, problem=FAULT)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checks.act(step, ("a",), nothing_kept, lost=False)
        checks.act(step, ("a",), nothing_kept, lost=False)
    (warning,) = said
    assert warning.category is AutoprecWarning
    for part in (
        "after 8 updates in mixed_bfloat16 its outputs are far away",
        "keep a in float32",
        "All checks are in precision.watched",
        "autoprec verify PROFILE --checkpoint FILE",
        "watch=False",
    ):
        assert part in str(warning.message)
    assert [each.action for each in checks.steps] == ["warn", "warn"]


def test_it_can_raise() -> None:
    with pytest.raises(AutoprecError, match=r"train in float32.*autoprec verify PROFILE"):
        log("raise").act(WatchedStep(9, problem=FAULT), (), nothing_kept, lost=False)


@pytest.mark.parametrize("action", ["warn", "float32"])
def test_lost_weights_are_told_of_and_nothing_is_kept_in_float32(action: Any) -> None:
    checks = log(action)
    assert not passed(checks, 1)
    lost = WatchedStep(51, problem="weights are not finite in a")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checks.act(lost, (), nothing_kept, lost=True)
        checks.act(lost, (), nothing_kept, lost=True)
    (said,) = [str(each.message) for each in told]
    assert "after 50 updates in mixed_bfloat16 weights are not finite in a. Nothing mends" in said
    assert "saved before that (a check passed after 0 updates)" in said
    assert [each.action for each in checks.steps] == ["", "warn", "warn"]
    with pytest.raises(AutoprecError, match="go back to weights that were saved before that, and"):
        log("raise").act(lost, (), nothing_kept, lost=True)


def test_what_is_mended_once_is_mended_whole_the_next_time() -> None:
    checks = log("float32")
    kept: list[tuple[str, ...]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        checks.act(WatchedStep(9, problem=FAULT), ("a", "b"), kept.append, lost=False)
        checks.act(WatchedStep(29, problem=FAULT), ("c",), kept.append, lost=False)
    assert kept == [("a", "b"), ()]
    said = [each.action for each in checks.steps]
    assert said == ["a, b in float32", "the whole model in float32"]


def test_the_first_check_that_could_not_be_made_is_warned_of_and_no_other() -> None:
    checks = log()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        passed(checks, 1)
        part = WatchedStep(51, 2, 8, not_checked="of 8 samples 2 fit in memory")
        nothing = WatchedStep(101, 0, 8, not_checked="no memory")
        for step in (part, nothing):
            checks.is_acted_on(
                step,
                8,
                failed=False,
                repeats=False,
                undecided=False,
                certain=False,
                expected=math.inf,
            )
        checks.leave_out(151, "no call")
    (warning,) = said
    assert warning.category is AutoprecWarning
    for part_said in (
        "the check of update 101 in mixed_bfloat16 could not be made: no memory",
        "All checks are in precision.watched",
        "watch=False",
    ):
        assert part_said in str(warning.message)
    assert [each.not_checked for each in checks.steps[1:]] == [
        "of 8 samples 2 fit in memory",
        "no memory",
        "no call",
    ]


def test_checks_are_saved_and_go_on() -> None:
    checks = log()
    checks.note_loss(float("inf"))
    checks.note_loss(-4.0)
    checks.note_loss(8.0)
    passed(checks, 1)
    other = log()
    other.load_state_dict(checks.state_dict(), 130)
    assert (other.steps, other.floor, other.due) == (checks.steps, checks.floor, 180)
    assert checks.floor == pytest.approx(0.12)
