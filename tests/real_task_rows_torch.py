"""Rows of `real_tasks` for tests: loaded as the tuner loads them, trained by hand once each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from training_loops_torch import plain

from autoprec import Policy, Recipe

FOLDER = Path(__file__).with_name("real_tasks")
ROWS = sorted(path.stem for path in FOLDER.glob("*.py"))
STEPS = 6
"""Steps of each training that is compared."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums are formed in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Plain:
    """What a plain loop leaves."""

    losses: list[float]
    state: dict[str, torch.Tensor]


_PLAIN: dict[tuple[str, str], Plain] = {}


def by_hand(task: ModuleType, recipe: Recipe) -> Plain:
    """Train STEPS in the loop by hand, once for each row and recipe."""
    key = (task.__name__, repr(recipe))
    if key not in _PLAIN:
        trained = plain(task, recipe, STEPS)
        _PLAIN[key] = Plain(trained.losses, trained.model.state_dict())
    return _PLAIN[key]


@pytest.fixture(params=ROWS)
def task(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


@cache
def load(row: str) -> ModuleType:
    """Import a row from its own folder, under its own name, which stays free for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        module = importlib.import_module(row)
    del sys.modules[row]
    return module


def recipe_of(task: ModuleType, policy: Policy = Policy.FLOAT32, **changes: Any) -> Recipe:
    return Recipe(policy=policy, batch_size=task.BATCH_SIZE, **changes)
