"""What an exception says is told in one line."""

from __future__ import annotations

import pytest

from autoprec.errors import first_line

KERAS = (
    "Exception encountered when calling Dense.call().\n\n\x1b[1mthe shapes differ\x1b[0m\n\n"
    "Arguments received by Dense.call():\n  • inputs=..."
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one"), "one"),
        (ValueError("x" * 300), "x" * 200),
        (KeyError(), "KeyError"),
        (ValueError(KERAS), "the shapes differ"),
    ],
)
def test_the_line_that_says_what_is_wrong_is_told(error, line):
    assert first_line(error) == line
