"""The backend contract for the simulated backend, and that a missing framework is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contract import BackendContract, Subject

from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.backends.simulated import SimulatedModel
from autoprec.errors import FrameworkMissing, TaskError


def fail() -> SimulatedModel:
    raise ZeroDivisionError("the user's own")


class TestSimulated(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("simulated.py", SimulatedModel, lambda batch: [])
        return Subject(registry.load("simulated"), task, lambda: replace(task, build_model=fail))


def test_naming_an_unknown_framework_fails() -> None:
    with pytest.raises(FrameworkMissing, match="expected one of torch, keras, simulated"):
        registry.load("jax")


def test_naming_a_framework_that_is_not_installed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FrameworkMissing, match=r"pip install 'autoprec\[torch\]'"):
        registry.load("torch")


def test_a_model_of_no_framework_is_the_tasks_error() -> None:
    with pytest.raises(TaskError, match=r"build_model returned None"):
        registry.owner(None)
    with pytest.raises(TaskError, match=r"expected a torch.nn.Module or a compiled keras.Model"):
        registry.owner(object())


def test_ownership_follows_the_mro_in_order() -> None:
    module = type("Module", (), {"__module__": "torch.nn.modules.module"})
    layer = type("Layer", (module,), {"__module__": "keras.src.layers.layer"})
    mine = type("Mine", (layer,), {"__module__": "user_file"})
    assert registry.owner(mine()) == "keras"
    assert registry.owner(module()) == "torch"
    assert registry.owner(SimulatedModel()) == "simulated"
