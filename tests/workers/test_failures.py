"""The table of failures, against what the libraries really say."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.workers.failures import (
    FAILURE_PATTERNS,
    FailureKind,
    add_advice,
    classify_exception,
    classify_exit,
    describe_exception,
    describe_exit,
    explain_exit,
    match_failure,
)
from tests.tuning.recorded_failures import OOM, PRINTED, RECORDED, USER


@pytest.mark.parametrize(("kind", "text", "source"), RECORDED, ids=[r[1][:60] for r in RECORDED])
def test_a_recorded_message_is_told_apart(kind: FailureKind | None, text: str, source: str) -> None:
    assert match_failure(text) == kind, source


def test_every_pattern_has_a_recorded_message() -> None:
    printed = [text for _, text, _ in RECORDED] + [text for _, text, _ in PRINTED]
    lonely = [
        pattern.pattern
        for pattern in FAILURE_PATTERNS
        if not any(re.search(pattern.pattern, t) for t in printed)
    ]
    assert lonely == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("RuntimeError: Expected all tensors to be on the same device, but found", "inputs.device"),
        ("IndexError: indices should be either on cpu or on the same device", "inputs.device"),
        (
            "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are "
            "unsafe to autocast.\nMany models",
            "binary_cross_entropy_with_logits",
        ),
        (
            "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "nvidia-smi -c DEFAULT",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for", "`device`"),
        (
            "FailOnRecompileLimitHit: Hard failure due to fail_on_recompile_limit_hit",
            "mark_dynamic",
        ),
    ],
)
def test_advice_is_added_where_it_is_known(text: str, advice: str) -> None:
    assert add_advice(text).startswith(text.partition("\n")[0].rstrip("."))
    assert advice in add_advice(text)
    assert len(add_advice(text)) < 500  # what a trial keeps of a message


def test_other_messages_stay_as_they_are() -> None:
    assert add_advice("ValueError: a\nb") == "ValueError: a\nb"
    assert add_advice(RECORDED[1][1]) == RECORDED[1][1]


def test_a_row_names_its_source() -> None:
    assert all(pattern.source for pattern in FAILURE_PATTERNS)


@pytest.mark.parametrize(("kind", "printed", "number"), PRINTED, ids=[p[1][:40] for p in PRINTED])
def test_a_death_is_told_apart_by_signal_and_last_words(
    kind: FailureKind, printed: str, number: int
) -> None:
    code = number if number == 1 else -int(number)
    assert classify_exit(code, printed) == kind


@pytest.mark.parametrize("code", [0, 1, 7, 137, 139])
def test_an_exit_code_is_no_signal(code: int) -> None:
    """Only a shell says SIGKILL as 137; a task that calls os._exit(137) was not killed."""
    assert classify_exit(code, "") == FailureKind.EXITED
    assert describe_exit(code) == f"exited with code {code}"


def test_a_signal_is_named() -> None:
    assert describe_exit(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert describe_exit(-63) == "was ended by signal 63"


@pytest.mark.parametrize(
    ("code", "printed", "over", "kind", "said"),
    [
        (-signal.SIGKILL, "", "it took 9 GiB", FailureKind.OUT_OF_MEMORY, ": it took 9 GiB"),
        (None, "", "it took 9 GiB", FailureKind.OUT_OF_MEMORY, ": it took 9 GiB"),
        (None, "", "", FailureKind.EXITED, "close descriptors it did not open?"),
        (-signal.SIGKILL, "", "", FailureKind.KILLED, "SIGKILL in the phase 'load'"),
        (1, "CUDA out of memory", "", FailureKind.OUT_OF_MEMORY, "code 1 in the phase 'load'"),
        (3, "", "", FailureKind.EXITED, "does the task call os._exit?"),
        (-63, "", "", FailureKind.EXITED, "signal 63 in the phase 'load'"),
    ],
)
def test_an_end_is_explained_by_what_is_known_of_it(
    code: int | None, printed: str, over: str, kind: FailureKind, said: str
) -> None:
    found, text = explain_exit(code, printed, "load", over)
    assert (found, text.endswith(said)) == (kind, True), text


def caught(function: Callable[[], None]) -> BaseException:
    with pytest.raises(ValueError, match="data") as info:
        function()
    return info.value


def test_the_cause_of_an_exception_counts() -> None:
    def fails() -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("the data could not be made") from error

    assert classify_exception(caught(fails)) == OOM


def test_a_context_counts_unless_it_was_hidden() -> None:
    def shown() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("bad data")  # noqa: B904

    def hidden() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("bad data") from None

    assert classify_exception(caught(shown)) == OOM
    assert classify_exception(caught(hidden)) == USER


def test_exceptions_that_cause_each_other_end() -> None:
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    assert classify_exception(a) == USER


def test_every_memory_error_is_out_of_memory() -> None:
    class Own(MemoryError):
        pass

    assert classify_exception(Own("whatever it says")) == OOM


def test_an_exception_that_cannot_say_what_it_is() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Mute" in describe_exception(Mute())
    assert classify_exception(Mute()) == USER


@given(st.text(max_size=500))
def test_no_text_makes_the_table_fail(text: str) -> None:
    found = match_failure(text)
    assert found is None or isinstance(found, FailureKind)


def test_a_huge_text_is_read_in_bounded_time() -> None:
    assert match_failure("could not be " * 5_000_000) is None
