"""What an exception says is told in one line."""

from __future__ import annotations

import pytest

from autoprec.errors import first_line

KERAS = (
    "Exception encountered when calling Dense.call().\n\n\x1b[1mthe shapes differ\x1b[0m\n\n"
    "Arguments received by Dense.call():\n  • inputs=..."
)

SCRIPTED = (
    "The following operation failed in the TorchScript interpreter.\n"
    'Traceback of TorchScript (most recent call last):\n  File "net.py", line 4, in forward\n'
    "    return x @ y\n           ~~~~~ <--- HERE\n"
    "RuntimeError: expected m1 and m2 to have the same dtype\n"
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one"), "one"),
        (ValueError("x" * 300), "x" * 200),
        (KeyError(), "KeyError"),
        (RuntimeError(SCRIPTED), "expected m1 and m2 to have the same dtype"),
        (ValueError(KERAS), "the shapes differ"),
    ],
)
def test_the_line_that_says_what_is_wrong_is_told(error, line):
    assert first_line(error) == line
