"""What the tests with PyTorch need: no TensorFlow in TensorBoard, no Accelerator before theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep TensorBoard from importing TensorFlow, by the module that it asks for this."""
    name = "tensorboard.compat.notf"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Let a test's Accelerator be the first of its process: all of them share one state."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
