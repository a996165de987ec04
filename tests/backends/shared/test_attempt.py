"""Trying a measurement of our own: what it gives, or in one line why there is none."""

from __future__ import annotations

import pytest

from autoprec.backends.shared.attempt import NO_MEMORY, try_to_measure

# Frameworks have their own class of this name.
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})


def test_what_can_be_measured_is_returned() -> None:
    assert try_to_measure(lambda: 3) == (3, "")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), NO_MEMORY),
        (OutOfMemoryError("CUDA out of memory"), NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), NO_MEMORY),
        (RuntimeError("no dispatch here\nmore of it"), "RuntimeError: no dispatch here"),
        (ValueError(), "ValueError"),
        (
            ValueError('Detected at node x\n  File "t.py"\nshapes differ [[{{node x}}]]'),
            "ValueError: shapes differ",
        ),
    ],
)
def test_what_cannot_be_measured_is_unknown_and_its_reason_one_line(
    error: Exception, why: str
) -> None:
    def fail() -> None:
        raise error

    assert try_to_measure(fail) == (None, why)
