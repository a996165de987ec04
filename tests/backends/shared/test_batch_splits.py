"""Several batches are compared with their halves, fewer where that takes long, and it is said."""

from __future__ import annotations

import pytest

from autoprec.backends.shared import batch_splits
from autoprec.backends.shared.batch_splits import explain_difference, in_batch, judge_splitting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(batch_splits.time, "monotonic", lambda: now[0])
    return now


def test_one_batch_that_differs_is_enough() -> None:
    asked = []

    def against(index: int) -> str:
        asked.append(index)
        return "why" if index == 30 else ""

    judged = judge_splitting([0, 30, 60], against, lambda *_: None)
    assert (judged.allowed, judged.reason, judged.compared) == (False, "why", 2)
    assert asked == [0, 30]
    assert judged.warnings() == ()


@pytest.mark.parametrize(("seconds", "compared"), [(1.0, 6), (3.0, 4), (100.0, 2)])
def test_slow_comparisons_are_fewer_and_their_number_is_said(
    clock: list[float], seconds: float, compared: int
) -> None:
    def against(index: int) -> str:
        clock[0] += seconds
        return ""

    reported: list[tuple[str, int]] = []
    judged = judge_splitting(range(6), against, lambda *given: reported.append(given))
    assert reported == [("describe", 0)] * compared
    assert (judged.allowed, judged.compared) == (True, compared)
    said = [f"was seen on {compared} batches only"] if compared < 6 else []
    assert [part in warning for part, warning in zip(said, judged.warnings(), strict=True)] == [
        True for _ in said
    ]


@pytest.mark.parametrize(("left", "compared"), [(0.0, 1), (5.0, 1), (6.5, 2), (100.0, 4)])
def test_what_a_limit_leaves_no_time_for_is_not_compared(
    clock: list[float], left: float, compared: int
) -> None:
    """Each takes three seconds; the first one is compared in any case."""

    def against(index: int) -> str:
        clock[0] += 3.0
        return ""

    judged = judge_splitting(range(6), against, lambda *_: None, left)
    assert (judged.allowed, judged.compared) == (True, compared)
    count = "1 batch" if compared == 1 else f"{compared} batches"
    assert f"was seen on {count} only" in judged.warnings()[0]


def test_a_reason_names_its_batch_once_and_the_first_not_at_all() -> None:
    assert "by 0.054 in batch 10 (those of the first batch agree" in explain_difference(0.054, 10)
    assert "by 0.054 (BatchNorm, " in explain_difference(0.054, 0)
    assert in_batch("not finite", 7) == "not finite, in batch 7"
    assert in_batch("not finite", 0) == "not finite"
    assert in_batch("", 7) == ""
    assert in_batch(explain_difference(0.5, 7), 7) == explain_difference(0.5, 7)
