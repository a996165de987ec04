"""Machines with pretended accelerators, each with a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rehearsal import Rehearsal


@pytest.fixture
def rehearse(tmp_path: Path) -> Callable[..., Rehearsal]:
    """Make a machine: `rehearse("cuda", gpus=[...], faults=[...])`."""

    def machine(kind: str = "cuda", **settings: Any) -> Rehearsal:
        return Rehearsal(tmp_path, kind, **settings)

    return machine
