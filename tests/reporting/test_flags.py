"""Messages name settings in the library, and flags on the command line."""

from __future__ import annotations

import pytest

from autoprec.reporting.flags import with_flags


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("choose another place with `storage`", "choose another place with --storage"),
        ("`time_limit` 0 given", "--time-limit 0 given"),
        ("tune for the CPU instead: `device=cpu`", "tune for the CPU instead: --device cpu"),
        (
            "run `autoprec tune` or define `build_model`",
            "run `autoprec tune` or define `build_model`",
        ),
    ],
)
def test_settings_are_written_as_flags_and_nothing_else_is(text: str, said: str) -> None:
    assert with_flags(text) == said
