"""The PyTorch code of README and docs/ runs as it stands there."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoprec
from autoprec import Policy, Recipe, apply_profile
from autoprec.core.recipe import Distributed, LossScale
from tests.code_blocks import ROOT, block, commands_in

SHORT = block("README.md", 2)
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)
WriteProfile = Callable[[Recipe, str], Path]


def recipe_of(policy: Policy, **settings: Any) -> Recipe:
    scale = LossScale(initial=256.0) if policy.needs_loss_scale else None
    return Recipe(policy=policy, batch_size=8, loss_scale=scale, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_the_task_file_is_tuned_by_the_python_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its search and proof are cut short."""
    (tmp_path / "model.py").write_text(block("docs/task-file.md", 0))
    monkeypatch.chdir(tmp_path)
    quick = partial(autoprec.tune, trials=2, rounds=1, proof_steps=30, extras=False)
    monkeypatch.setattr(autoprec, "tune", quick)
    names: dict[str, Any] = {}
    exec(block("README.md", 5), names)
    profile = names["profile"]
    assert profile.recipe.effective_batch == 128  # the task's BATCH_SIZE
    assert profile.recipe.policy in POLICIES
    assert profile.task.framework == "torch"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] in {str(policy) for policy in Policy}
    assert printed[1].startswith(str(profile.recipe.policy))
    assert len(printed) == 2


def training(seed: int) -> dict[str, Any]:
    """Everything that the loops take as given."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(6)]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": loader,
        "build_loader": {8: loader}.__getitem__,
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_the_loops_of_the_readme_and_of_its_page_train_alike(
    policy: Policy,
    accumulation_steps: int,
    write_profile: WriteProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where four batches make an update, two are left and `flush` makes the last one."""
    recipe = recipe_of(policy, accumulation_steps=accumulation_steps)
    monkeypatch.chdir(write_profile(recipe, "torch").parent)
    updates = -(-6 // accumulation_steps)
    long, *shorter = training(0), training(0), training(0)
    first = [parameter.detach().clone() for parameter in long["model"].parameters()]
    exec(block("docs/apply-pytorch.md", 1), long)
    assert long["loss"].dtype is torch.float32
    assert long["precision"].steps == updates
    assert long["scheduler"].last_epoch == 6 // accumulation_steps
    for code, short in zip((SHORT, block("docs/apply-pytorch.md", 0)), shorter, strict=True):
        exec(code, short)
        assert short["loss"].dtype is torch.float32
        assert short["precision"].steps == updates
        assert short["scheduler"].last_epoch == updates
        for one, other, before in zip(
            long["model"].parameters(), short["model"].parameters(), first, strict=True
        ):
            assert torch.equal(one, other)
            assert not torch.equal(one, before)


def test_the_checks_of_a_training_are_read_as_the_page_says(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_profile(recipe_of(Policy.MIXED_BFLOAT16), "torch").parent)
    names = training(0) | {"apply_profile": apply_profile}
    exec(block("docs/watch.md", 0), names)
    for inputs, targets in names["loader"]:
        loss = names["loss_fn"](names["precision"].forward(inputs), targets)
        names["precision"].backward_and_step(loss)
    exec(block("docs/watch.md", 1), names)
    (line,) = capsys.readouterr().out.splitlines()  # of the first update
    assert line.startswith("1 0.0")


SCRIPT = f"""
import torch
from torch import nn

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loss_fn = nn.CrossEntropyLoss()
loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2)]
build_loader = {{8: loader}}.__getitem__
{SHORT}
print(precision.policy, precision.accumulation_steps)
"""


def test_the_command_that_switches_a_profile_off(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its variable the same script trains with the profile."""
    recipe = recipe_of(Policy.MIXED_BFLOAT16, accumulation_steps=2)
    monkeypatch.chdir(write_profile(recipe, "torch").parent)
    Path("train.py").write_text(SCRIPT)
    command, *_ = commands_in(block("README.md", 4))
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "float32 2", done.stderr
    runpy.run_path("train.py", run_name="__main__")
    assert capsys.readouterr().out.strip() == "mixed_bfloat16 2"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the environment that torchrun gives the only rank, and end the group afterwards."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_script_that_torchrun_starts(
    engine: Any, write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(Policy.MIXED_BFLOAT16, distributed=Distributed(engine, 1))
    monkeypatch.chdir(write_profile(recipe, "torch").parent)
    names: dict[str, Any] = {"torch": torch, "autoprec": autoprec, "apply_profile": apply_profile}
    names["build_model"] = lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    exec(block("docs/scale.md", 1), names)
    loss = names["precision"].forward(torch.randn(8, 6)).square().mean()
    assert names["precision"].backward_and_step(loss)


def digits_accuracy(names: dict[str, Any]) -> float:
    """The share of the digits that a page's model has learned."""
    inputs, targets = names["data"].tensors
    with torch.no_grad():
        return float((names["model"](inputs).argmax(1) == targets).float().mean())


DIGITS = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=32, accumulation_steps=2)


@pytest.fixture
def digits(write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first section of docs/trainers.md defines, its model trained by its loop."""
    monkeypatch.chdir(write_profile(DIGITS, "torch").parent)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block("docs/trainers.md", 0), names)
    return names


def with_new_model(names: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    assert digits_accuracy({**names, "model": model}) < 0.3
    return {**names, "model": model}


def test_a_plain_loop(digits: dict[str, Any]) -> None:
    assert digits_accuracy(digits) > 0.9


@pytest.mark.usefixtures("one_rank")
def test_a_loop_under_torchrun(digits: dict[str, Any], write_profile: WriteProfile) -> None:
    write_profile(replace(DIGITS, distributed=Distributed("ddp", 1)), "torch")
    names = with_new_model(digits)
    exec(block("docs/trainers.md", 1), names)
    assert digits_accuracy(names) > 0.9
