"""The newcomer's script before and after: the docs show the real change, and both train alike."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autoprec import Policy, Recipe, apply_profile
from tests.code_blocks import block

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "torch"
PAGE = ROOT / "docs" / "first-hour.md"

POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)
EPOCHS = 4


def code(name: str) -> list[str]:
    """The lines of a script below its docstring."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return text[text.index("from __future__") :].splitlines()


def changes() -> list[str]:
    found = difflib.unified_diff(code("train_before.py"), code("train_after.py"), n=1, lineterm="")
    return [line for line in list(found)[2:] if not line.startswith("@@")]


def test_the_docs_show_the_real_change() -> None:
    shown = block("docs/first-hour.md", 2)
    assert shown.splitlines() == changes()


def test_the_change_is_as_small_as_the_docs_say() -> None:
    added = [line for line in changes() if line.startswith("+") and line.strip("+ ")]
    removed = [line for line in changes() if line.startswith("-") and line.strip("- ")]
    assert f"{len(added)} lines added and {len(removed)} removed" in PAGE.read_text("utf-8")
    assert (len(added), len(removed)) == (10, 9)
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert "a profile costs ten lines added and nine removed" in readme
    assert 140 <= len(code("train_before.py")) <= 160


def script(name: str, recipe: Recipe | None = None) -> ModuleType:
    """Load a script; with a recipe, that is what its `apply_profile` finds."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if recipe is not None:
        module.apply_profile = lambda _, **named: apply_profile(recipe, **named)
    return module


def recipe_of(policy: Policy) -> Recipe:
    return replace(Recipe().with_policy(policy), batch_size=16, accumulation_steps=4)


def train(module: ModuleType, folder: Path, *words: object) -> float:
    options = ["--epochs", EPOCHS, "--workers", 0, "--checkpoint", folder / "digits.pt", *words]
    accuracy: float = module.main([str(option) for option in options])
    return accuracy


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The test accuracy of the script before the change, for three seeds."""
    folder, module = tmp_path_factory.mktemp("before"), script("train_before")
    return [train(module, folder, "--seed", seed) for seed in range(3)]


@pytest.mark.parametrize("policy", POLICIES)
def test_it_learns_the_same_after_the_change(
    before: list[float], tmp_path: Path, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the seeds' spread, and at most two of the 300 test digits beside it."""
    accuracy = train(script("train_after", recipe_of(policy)), tmp_path)
    assert min(before) - 2 / 300 <= accuracy <= max(before) + 2 / 300
    assert min(before) > 0.9
    updates = EPOCHS * -(-1197 // 64)  # as many as before: they are updates, not micro-batches
    assert f"after {updates} updates" in capsys.readouterr().out


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_is_resumed_ends_with_the_same_schedule(
    tmp_path: Path, policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("train_after", recipe_of(policy))
    train(module, tmp_path, "--stop-after", 2)
    saved = torch.load(tmp_path / "digits.pt")
    assert ("scale" in saved["precision"]["scaler"]) == policy.needs_loss_scale
    train(module, tmp_path, "--resume")
    assert f"after {EPOCHS * 19} updates" in capsys.readouterr().out


def test_a_checkpoint_from_before_the_change_resumes_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(script("train_before"), tmp_path, "--stop-after", 2)
    after = script("train_after", recipe_of(Policy.MIXED_FLOAT16))
    assert train(after, tmp_path, "--resume") > 0.9
    printed = capsys.readouterr().out
    assert "epoch 2: " in printed
    assert f"after {EPOCHS * 19} updates" in printed


def test_the_loaders_workers_change_nothing(tmp_path: Path) -> None:
    module = script("train_after", recipe_of(Policy.MIXED_BFLOAT16))
    alone = train(module, tmp_path, "--stop-after", 1)
    assert train(module, tmp_path, "--stop-after", 1, "--workers", 1) == alone
