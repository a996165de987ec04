"""What the tests with PyTorch need: a TensorBoard that does not import TensorFlow."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep TensorBoard from importing TensorFlow, by the module that it asks for this."""
    name = "tensorboard.compat.notf"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
