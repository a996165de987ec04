"""What the tests with PyTorch need: no TensorFlow in TensorBoard, no Accelerator before theirs.

Scripts with trainers are forked from a process that has imported these, which takes them seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.fork_server import ForkServer, forked_from, forked_workers


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


@pytest.fixture(scope="session")
def with_trainers(forked: ForkServer) -> Iterator[ForkServer]:
    """Start a process that has imported Lightning and Transformers, too."""
    server = ForkServer((*forked.modules, "lightning.pytorch", "transformers.trainer"))
    yield server
    server.stop()


@pytest.fixture
def workers_with_trainers(with_trainers: ForkServer) -> Iterator[None]:
    """Fork the workers of tunings from it."""
    with forked_workers(with_trainers):
        yield


@pytest.fixture
def runs_with_trainers(with_trainers: ForkServer) -> Iterator[None]:
    """Fork the runs of `verify --script` from it."""
    from autoprec.tuning.flow import script_verification

    with forked_from(with_trainers, script_verification):
        yield
