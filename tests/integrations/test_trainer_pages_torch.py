"""The pages of trainers: their code runs, and the scripts they change train in both forms."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe
from autoprec.integrations import lightning as integration
from tests.code_blocks import ROOT, block
from tests.fork_server import ForkServer
from tests.integrations.lightning_modules import fabric_of, pytorch_of

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),
]

FOLDER = ROOT / "examples" / "trainers"
WriteProfile = Callable[[Recipe, str], Path]
Run = Callable[..., str]

#: By script: the lines that the pages say change, the profile's batch and modules.
SCRIPTS: dict[str, tuple[int, dict[str, Any]]] = {
    "lightning": (3, {"batch_size": 16, "accumulation_steps": 2, "float32_modules": ("6",)}),
    "transformers": (2, {"batch_size": 8, "accumulation_steps": 4}),
    "accelerate": (3, {"batch_size": 32, "accumulation_steps": 2, "float32_modules": ("1",)}),
    "amp": (3, {"batch_size": 32}),
}


def changed(name: str) -> tuple[list[str], list[str]]:
    """The lines that go and those that come, blank ones left out."""
    texts = [
        (FOLDER / f"{name}_{form}.py").read_text().splitlines() for form in ("before", "after")
    ]
    lines = [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[1:].strip()]
    lines = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return [each for each in lines if each[0] == "-"], [each for each in lines if each[0] == "+"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_many_lines_change_as_the_page_says(name: str) -> None:
    gone, come = changed(name)
    assert len(come) == SCRIPTS[name][0]
    assert len(gone) <= len(come)
    page = (ROOT / "docs" / "trainers.md").read_text("utf-8")
    (row,) = [line for line in page.splitlines() if f"{name}_before.py" in line]
    assert row.endswith(f"| {len(come)} |")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("lightning", block("docs/trainers-lightning.md", 1)),
        ("accelerate", block("docs/trainers-accelerate.md", 1)),
        ("transformers", block("docs/trainers-transformers.md", 1)),
    ],
)
def test_the_lines_that_a_page_shows_are_those_of_the_script(name: str, shown: str) -> None:
    gone, come = changed(name)
    assert sorted(shown.splitlines()) == sorted(gone + come)


@pytest.fixture
def run(with_trainers: ForkServer) -> Run:
    """Run a script in a folder; return the last line that it prints."""

    def run(script: str, folder: Path, *arguments: str) -> str:
        with contextlib.chdir(folder):
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            done = with_trainers.run(FOLDER / script, *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_in_both_forms(
    name: str, tmp_path: Path, write_profile: WriteProfile, run: Run
) -> None:
    policy = Policy.MIXED_FLOAT16 if name == "amp" else Policy.MIXED_BFLOAT16
    folder = write_profile(Recipe(policy=policy, **SCRIPTS[name][1]), "torch").parent
    (elsewhere := tmp_path / "before").mkdir()
    before = run(f"{name}_before.py", elsewhere)
    after = run(f"{name}_after.py", folder)
    measure, value = after.split()
    assert measure == before.split()[0]
    found, expected = float(value), float(before.split()[1])
    assert abs(found - expected) < (0.05 if measure == "accuracy" else 0.3 * expected + 0.1)
    if name == "amp":  # a checkpoint of either form loads in the other
        run("amp_after.py", _moved(elsewhere, folder), "--resume")
        run("amp_before.py", _moved(folder, elsewhere), "--resume")
    if name == "lightning":
        assert (folder / "checkpoints" / "last.ckpt").is_file()
        state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        assert state["AutoprecPrecision"]["counts"]["steps"] == state["global_step"]


RESUME_LIGHTNING = """
import sys
sys.path.insert(0, {folder!r})
from lightning_{form} import *
plugins = [{plugin}]
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, gradient_clip_val=1.0, plugins=plugins,
    logger=False, enable_checkpointing=False,
)
trainer.fit(Classifier(), Digits(32), ckpt_path="checkpoints/last.ckpt", weights_only=True)
assert trainer.global_step == 90, trainer.global_step
print(f"accuracy {{float(trainer.callback_metrics['val_acc']):.3f}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["before", "after"])
def test_a_checkpoint_of_the_lightning_project_loads_in_its_other_form(
    first: str, write_profile: WriteProfile, run: Run
) -> None:
    folder = write_profile(Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=32), "torch").parent
    run(f"lightning_{first}.py", folder)
    second = "after" if first == "before" else "before"
    code = RESUME_LIGHTNING.format(
        folder=str(FOLDER),
        form=second,
        plugin='plugin("model.profile.yaml")' if second == "after" else "",
    )
    (folder / "resume.py").write_text(code)
    measure, value = run(str(folder / "resume.py"), folder).split()
    assert measure == "accuracy"
    assert float(value) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("first", ["before", "after"])
def test_a_checkpoint_of_the_trainers_project_loads_in_its_other_form(
    first: str, write_profile: WriteProfile, run: Run
) -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8, accumulation_steps=4)
    folder = write_profile(recipe, "torch").parent
    run(f"transformers_{first}.py", folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-10")
    second = "after" if first == "before" else "before"
    run(f"transformers_{second}.py", folder, "--resume")
    state = json.loads((folder / "checkpoints/checkpoint-10/trainer_state.json").read_text())
    assert [each["step"] for each in state["log_history"]] == [5, 10]  # went on from the fifth
    first_loss, last_loss = (each["loss"] for each in state["log_history"])
    assert last_loss < first_loss


def _moved(source: Path, target: Path) -> Path:
    (target / "last.pt").write_bytes((source / "last.pt").read_bytes())
    return target


@pytest.fixture
def profile_here(write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)
    monkeypatch.chdir(write_profile(recipe, "torch").parent)


@pytest.mark.usefixtures("profile_here")
def test_the_lightning_page() -> None:
    names: dict[str, Any] = {"Trainer": pytorch_of("lightning").Trainer}
    exec(block("docs/trainers-lightning.md", 0), names)
    assert names["trainer"].precision_plugin.batch_size == 16
    names = {"Fabric": fabric_of("lightning").Fabric}
    exec(block("docs/trainers-lightning.md", 2), names)
    model = nn.Linear(4, 4)
    module, _ = names["fabric"].setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert module(torch.ones(16, 4)).dtype is torch.float32
    assert names["precision"].loop.attached.root is model


@pytest.mark.usefixtures("profile_here", "fresh_state")
def test_the_accelerate_page() -> None:
    from accelerate import Accelerator

    names: dict[str, Any] = {"Accelerator": Accelerator}
    exec(block("docs/trainers-accelerate.md", 0), names)
    assert names["precision"].batch_size == 16


@pytest.mark.usefixtures("profile_here", "fresh_state")
def test_the_transformers_page(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=16, report_to=[]
    )
    names: dict[str, Any] = {"trainer": Trainer(model=nn.Linear(4, 4), args=arguments)}
    exec(block("docs/trainers-transformers.md", 0), names)
    assert names["precision"].policy is Policy.MIXED_BFLOAT16


@pytest.mark.usefixtures("profile_here")
def test_the_sections_on_timm_and_deepspeed() -> None:
    model = nn.Linear(4, 4)
    given = {"batch_size": 16, "grad_accum_steps": 1, "amp": False, "torchcompile": None}
    names: dict[str, Any] = {"model": model, "args": Namespace(**given)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(block("docs/trainers.md", 2), names)
    with names["amp_autocast"]():
        assert model(torch.ones(16, 4)).dtype is torch.float32
    assert names["loss_scaler"].loop.policy is Policy.MIXED_BFLOAT16
    exec(block("docs/trainers.md", 3), names)
    assert names["settings"]["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_plugin_is_of_the_package_that_is_in_use(
    package: str, tmp_path: Path, forked: ForkServer
) -> None:
    code = (
        f"import {package}\n"
        "from autoprec import Recipe\n"
        "from autoprec.integrations.lightning import plugin\n"
        "print(type(plugin(Recipe())).__mro__)"
    )
    (tmp_path / "uses_one.py").write_text(code)
    done = forked.run(tmp_path / "uses_one.py")
    assert done.returncode == 0, done.stderr
    expected = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}[package]
    assert f"'{expected}.plugins.precision" in done.stdout
    assert integration.__name__ == "autoprec.integrations.lightning"
