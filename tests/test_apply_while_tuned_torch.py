"""apply_profile in a task's own code changes nothing while a tuning measures the task."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Recipe, apply_profile, distribute
from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.profiles import save_profile
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.task_source import TaskSource
from tests.applied_torch import make_profile, task

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT32 = Recipe(batch_size=8)

TRAIN = """
import torch
from autoprec import apply_profile

def make_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    apply_profile("not_yet.profile.yaml", model=model)
    return model

MODEL = make_model()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
precision = apply_profile("not_yet.profile.yaml", model=MODEL, optimizer=SGD)

def step(model, batch):
    inputs, targets = batch
    with precision.autocast():
        with open("seen.txt", "a") as file:
            file.write(f"{torch.is_autocast_enabled('cpu')} ")
        outputs = model(inputs)
    return (outputs - targets).square().mean()

def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(batch_size, 4, generator=generator), torch.ones(batch_size, 1))
        for _ in range(precision.accumulation_steps * 4)
    ]
"""

TASK = """
from train import make_model as build_model, step as training_step, batches as build_data
BATCH_SIZE = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task that imports a script which applies a profile that no tuning has written yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "model_t.py").write_text(textwrap.dedent(TASK))
    return tmp_path


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of a tuning's."""
    monkeypatch.setenv(worker_process.WORKER, "1")
    monkeypatch.setattr(worker_process, "_NOTES", {})


def losses(worker: Worker, recipe: Recipe) -> Any:
    return worker.call("trajectory", recipe=recipe, seed=0, steps=3).losses


@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_a_recipe_that_is_measured_is_the_one_in_force(folder: Path) -> None:
    seen = folder / "seen.txt"
    worker = Worker(WorkerSettings(TaskSource(folder / "model_t.py")))
    try:
        notes = worker.load().notes
        assert any("changes nothing while the task is measured" in note for note in notes)
        assert sum("not_yet.profile.yaml" in note for note in notes) == 1
        plain = losses(worker, FLOAT32)
        assert set(seen.read_text().split()) == {"False"}
        seen.unlink()
        rounded = losses(worker, BFLOAT16)
        assert set(seen.read_text().split()) == {"True"}
        assert rounded != plain
        assert rounded == pytest.approx(plain, rel=0.05)
    finally:
        worker.close()


@pytest.mark.usefixtures("in_worker")
@pytest.mark.parametrize("kind", ["file", "profile", "recipe", "off", "missing"])
def test_whatever_is_applied_is_applied_to_nothing(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=4, accumulation_steps=2)
    path = tmp_path / "p.yaml"
    save_profile(make_profile(recipe), path)
    given = {
        "file": path,
        "profile": make_profile(recipe),
        "recipe": recipe,
        "off": "off",
        "missing": tmp_path / "none.yaml",
    }[kind]
    model, optimizer = task()
    precision = apply_profile(given, model=model, optimizer=optimizer)
    assert precision.policy is Policy.FLOAT32
    known = kind not in ("off", "missing")
    assert (precision.batch_size, precision.accumulation_steps) == (8 if known else 32, 1)
    assert distribute(given, model) is model
    assert len(worker_process.notes()) == (2 if kind == "missing" else 1)


@pytest.mark.usefixtures("in_worker")
def test_a_recipe_in_force_is_not_undone() -> None:
    from autoprec.backends import registry

    model, optimizer = task()
    surgeon = registry.load("torch").surgeon()
    applied = surgeon.apply(BFLOAT16, model=model, optimizers=(optimizer,), device="cpu")
    idle = apply_profile("off", model=model, optimizer=optimizer)
    with applied.autocast(), idle.autocast():
        assert torch.is_autocast_enabled("cpu")
    inner: list[torch.dtype] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: inner.append(out.dtype) if isinstance(module, nn.Linear) else None
    )
    with hook:
        applied.forward(torch.randn(8, 8))
    assert torch.bfloat16 in inner
    applied.restore()


@pytest.mark.usefixtures("in_worker")
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_step_that_calls_the_scripts_own_precision_trains_the_tunings_model(
    is_trained: bool,
) -> None:
    """A teacher of the same form, which the script does not train, stays itself."""

    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    mine = build_model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1) if is_trained else None
    precision = apply_profile("not_yet.profile.yaml", model=mine, optimizer=optimizer)
    before = [each.clone() for each in mine.parameters()]

    def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(precision.forward(x) + 0.0 * model(x), y)

    def build_data(batch_size: int) -> Any:
        x = torch.arange(4.0 * batch_size).view(batch_size, 4) / batch_size
        return [(x, x[:, :1])] * 9

    given = Task("task.py", build_model, build_data, training_step=training_step)
    tracer = TorchBackend().tracer(given, device="cpu", seed=0, report=lambda *_: None)
    losses = tracer.reference(batch_size=8, steps=8, checkpoints=(0, 2)).losses
    assert len(set(losses)) == (8 if is_trained else 1)
    rounded = tracer.trajectory(recipe=BFLOAT16, seed=0, steps=8).losses
    assert rounded != losses
    assert rounded == pytest.approx(losses, rel=0.05)
    assert all(map(torch.equal, mine.parameters(), before))
    assert torch.equal(precision.forward(torch.ones(1, 4)), mine(torch.ones(1, 4)))
