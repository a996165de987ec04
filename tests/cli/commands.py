"""What the tests of `autoprec tune` share: short options, and how to read what it prints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]

QUICK = ("--batch-sizes", "16,32,64", "--rounds", "2", "--policies", "float32,mixed_bfloat16")


def one_sentence(err: str) -> str:
    """The last line, which says what is wrong; there is no traceback of ours above it."""
    assert "Traceback (most recent call last)" not in err
    assert f"{os.sep}autoprec{os.sep}tuning" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith(("autoprec: ", "autoprec tune: "))
    return last


def trials(err: str) -> list[str]:
    """The recipes that were said to be measured."""
    return re.findall(r"^  trial +\d+  (.+?): ", err, re.MULTILINE)
