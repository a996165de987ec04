"""Loads the zoos' tasks beside tests that load other tasks of the same names."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from autoprec.backends.protocol import Task
from autoprec.workers.task_file import load_task


@cache
def loaded(path: Path) -> Task:
    """The task; what another file's tests have loaded under its name is left to them."""
    before = sys.modules.pop(path.stem, None)
    try:
        return load_task(path)
    finally:
        sys.modules.pop(path.stem, None)
        if before is not None:
            sys.modules[path.stem] = before
