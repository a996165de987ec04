"""A framework of another distribution, in tests/frameworks: it passes the contract and is tuned."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract import BackendContract, Subject
from toy import Linear, endless_samples

import autoprec
from autoprec import apply_profile, tune
from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.speed.trial_results import Status
from autoprec.profiles import load_profile, save_profile
from autoprec.tuning.events import Event, TrialFinished

PACKAGE = Path(autoprec.__file__).parent

TASK = """
from toy import Linear, endless_samples

def build_model():
    return Linear(4)

def build_data(batch_size):
    return endless_samples(batch_size)
"""


def fail() -> Linear:
    raise ZeroDivisionError("the user's own")


class TestToy(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("toy.py", lambda: Linear(4), endless_samples)
        return Subject(registry.load("toy"), task, lambda: replace(task, build_model=fail))


def test_a_framework_of_another_package_is_tuned_and_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In real worker processes, which find it by its entry point."""
    monkeypatch.setattr("autoprec.probing.measure_device", lambda facts, frameworks: facts)
    task = tmp_path / "toy_task.py"
    task.write_text(TASK)
    events: list[Event] = []
    profile = tune(
        task,
        listener=events.append,
        policies=("float32", "mixed_bfloat16"),
        trials=4,
        rounds=5,
    )
    assert profile.task.framework == "toy"
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert profile.evidence.parity.verdict == "equal"
    assert profile.evidence.speedup.low > 1.2
    trials = [event for event in events if isinstance(event, TrialFinished)]
    assert {event.outcome.status for event in trials} == {Status.OK}

    save_profile(profile, tmp_path / "toy.profile.yaml")
    model = Linear(4)
    precision = apply_profile(load_profile(tmp_path / "toy.profile.yaml"), model=model)
    assert precision.policy is Policy.MIXED_BFLOAT16
    assert model.dtype == "bfloat16"


def framework_names_in(source: str) -> list[str]:
    """Return the names of frameworks that stand in code as strings of their own."""
    wanted = {*registry.BUILT_IN, "tensorflow"}
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in wanted
    ]


@pytest.mark.parametrize(
    "source", ["if task.framework == 'torch': pass", "KNOWN = ('keras', 'jax')"]
)
def test_a_framework_asked_for_by_name_is_found(source: str) -> None:
    assert framework_names_in(source)


def test_no_module_outside_the_backends_asks_for_a_framework_by_name() -> None:
    """But the probe's list of packages, since hardware and backends never see each other, and the
    trainers, which are of one framework, with the calls by which they train."""
    allowed = {
        Path("hardware/probes/frameworks.py"),
        Path("integrations/chosen.py"),
        Path("workers/training_calls.py"),
        Path("workers/recorded_run.py"),
    }
    found: dict[Path, Any] = {
        path.relative_to(PACKAGE): framework_names_in(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "backends"
    }
    assert {path for path, names in found.items() if names} <= allowed
