"""Which backends there are, whose model is whose, and what is known without importing any."""

from __future__ import annotations

import subprocess
import sys

import pytest
from simulated import SimulatedModel

from autoprec.backends import registry
from autoprec.core.recipe import KNOBS
from autoprec.errors import FrameworkMissing, TaskError


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


def test_capabilities_import_no_framework() -> None:
    code = (
        "import sys; from autoprec.backends import registry; registry.all_capabilities(); "
        "print({'torch', 'keras', 'tensorflow', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_every_knob_belongs_to_a_framework() -> None:
    assert {name for each in registry.built_in().values() for name in each.knobs} == set(KNOBS)


def test_no_frameworks_environment_contradicts_anothers() -> None:
    """All frameworks' variables are set for every worker: it starts before its task is known."""
    pairs = [
        pair for each in registry.all_capabilities().values() for pair in each.environment.items()
    ]
    assert len(dict(pairs)) == len(set(pairs))
