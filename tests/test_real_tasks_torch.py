"""Training code as libraries and papers have it: proven, tuned, and trained by recipes.

Each row is a file in `real_tasks`. Bfloat16 is proven on it, and it is trained in the documented
loop beside the same loop in plain torch, with recipes that change one thing each. Two rows are
tuned from the command line besides, on this machine's CPU, and trained with their profiles.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import AUTOPREC
from training_loops_torch import applied, batches, plain, start

from autoprec import Policy, Recipe, apply_profile
from autoprec.backends.torch.apply.float32_islands import NEVER_CALLED
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.recipe import Alignment, LossScale
from autoprec.profiles import load_profile
from autoprec.tuning.proof.recipe_proof import Proof, silent
from autoprec.workers.task_file import load_task

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).with_name("real_tasks")
ROWS = sorted(path.stem for path in FOLDER.glob("*.py"))
STEPS = 6
"""Steps of each training that is compared."""

TUNED = ("checkpointed", "lora")

QUICK = ("--trials", "2", "--rounds", "1", "--proof-steps", "30", "--no-extras")

pytestmark = [
    pytest.mark.slow,
    # PEFT asks transformers by the name of before its version 5.16.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums are formed in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ROWS)
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(request.param, monkeypatch)


def load(row: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a row as the tuner does: from its own folder, under its own name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(row)
    monkeypatch.delitem(sys.modules, row)
    return module


# Proving -----------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_bfloat16_is_proven_to_train_a_row_like_float32(task: ModuleType) -> None:
    proof = Proof(
        TorchBackend().tracer(
            load_task(FOLDER / f"{task.__name__}.py"), device="cpu", seed=0, report=silent
        ),
        steps=30,
    )
    verdict = proof.prove(recipe_of(task, Policy.MIXED_BFLOAT16))
    sys.modules.pop(task.__name__)
    assert verdict.verdict == "equal", verdict


# Tuning ------------------------------------------------------------------------------------------


def tune(row: str, folder: Path) -> Path:
    """Tune a row for bfloat16 from the command line; return the profile's file."""
    profile = folder / "model.profile.yaml"
    subprocess.run(
        [
            *(*AUTOPREC, "tune", FOLDER / f"{row}.py", "--device", "cpu"),
            *("--policies", "mixed_bfloat16", "--output", profile, *QUICK),
            *("--storage", folder / "study.journal"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        timeout=240,
        check=True,
    )
    return profile


@pytest.fixture(scope="module")
def tunings(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The profiles of two rows, tuned side by side."""
    with ThreadPoolExecutor(2) as pool:
        profiles = pool.map(lambda row: tune(row, tmp_path_factory.mktemp(row)), TUNED)
        return dict(zip(TUNED, profiles, strict=True))


# Two tunings at once on two cores: what is gained in time may well be unknown.
@pytest.mark.filterwarnings("ignore:.*this profile's tuning was inconclusive")
@pytest.mark.parametrize("task", TUNED, indirect=True)
@pytest.mark.timeout(400)
def test_a_row_is_tuned_and_its_profile_trains_as_plain_autocast_does(
    task: ModuleType, tunings: Mapping[str, Path]
) -> None:
    path = tunings[task.__name__]
    profile = load_profile(path)
    recipe = profile.recipe
    assert recipe.policy is Policy.MIXED_BFLOAT16
    assert recipe.effective_batch == task.BATCH_SIZE
    assert profile.evidence.parity.verdict == "equal", profile.evidence.parity
    assert recipe.float32_modules == ()
    ours, theirs = applied(task, recipe, STEPS, path), plain(task, recipe, STEPS)
    assert ours.precision.recipe == recipe
    assert ours.losses == pytest.approx(theirs.losses, rel=0.01)


#: Trains a row with a profile, or by hand as its recipe says; prints the losses and the weights.
TRAIN = """
import hashlib, importlib, json, sys
from pathlib import Path
import torch
from autoprec.profiles import load_profile
from training_loops_torch import applied, plain

row, path, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
task, recipe = importlib.import_module(row), load_profile(path).recipe
trained = applied(task, recipe, 12, path) if way == "profile" else plain(task, recipe, 12)
state = {name: value.numpy().tobytes().hex() for name, value in trained.model.state_dict().items()}
digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
print(json.dumps([[loss.hex() for loss in trained.losses], digest]))
"""


@pytest.mark.timeout(400)
def test_a_profile_gives_the_weights_of_the_loop_by_hand_in_every_fresh_process(
    tunings: Mapping[str, Path],
) -> None:
    """To the bit, losses too: with one thread sums are formed in one order."""
    row = "checkpointed"
    path = tunings[row]
    recipe = load_profile(path).recipe
    assert recipe.policy is Policy.MIXED_BFLOAT16
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", FOLDER)))
    environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}

    def train(way: str) -> tuple[list[str], str]:
        words = [sys.executable, "-c", TRAIN, row, path, way]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        losses, digest = json.loads(done.stdout)
        return losses, digest

    with ThreadPoolExecutor(2) as pool:
        first, again, by_hand = pool.map(train, ("profile", "profile", "by hand"))
    assert len(set(first[0])) == 12 * recipe.accumulation_steps  # it trains
    assert first == again == by_hand


# Applying ----------------------------------------------------------------------------------------


def recipe_of(task: ModuleType, policy: Policy = Policy.FLOAT32, **changes: Any) -> Recipe:
    return Recipe(policy=policy, batch_size=task.BATCH_SIZE, **changes)


def accumulated(recipe: Recipe) -> Recipe:
    return replace(recipe, batch_size=recipe.batch_size // 2, accumulation_steps=2)


@pytest.mark.parametrize("parts", [1, 2])
def test_float32_trains_exactly_as_the_plain_loop_does(task: ModuleType, parts: int) -> None:
    recipe = recipe_of(task) if parts == 1 else accumulated(recipe_of(task))
    ours, theirs = applied(task, recipe, STEPS), plain(task, recipe, STEPS)
    assert ours.losses == theirs.losses
    assert same_state(ours.model, theirs.model)
    assert ours.precision.skipped == 0


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_a_mixed_policy_trains_as_plain_autocast_does(
    task: ModuleType, policy: Policy, parts: int
) -> None:
    scale = LossScale(initial=256.0) if policy.needs_loss_scale else None
    recipe = recipe_of(task, policy, loss_scale=scale)
    recipe = recipe if parts == 1 else accumulated(recipe)
    ours, theirs = applied(task, recipe, STEPS), plain(task, recipe, STEPS)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert ours.precision.skipped == 0
    float32 = plain(task, replace(recipe, policy=Policy.FLOAT32, loss_scale=None), STEPS)
    assert ours.losses != float32.losses
    assert ours.losses == pytest.approx(float32.losses, rel=0.02)


# The physics row's step differentiates outside any module, where autocast still reaches it.
@pytest.mark.parametrize("task", [row for row in ROWS if row != "physics"], indirect=True)
def test_with_every_module_an_island_a_mixed_policy_is_float32(task: ModuleType) -> None:
    recipe = recipe_of(task, Policy.MIXED_BFLOAT16, float32_modules=modules_of(task))
    ours, theirs = applied(task, recipe, STEPS), plain(task, recipe_of(task), STEPS)
    assert ours.losses == theirs.losses
    assert same_state(ours.model, theirs.model)


CHANGES = {
    "channels_last": {"memory_format": "channels_last"},
    "fused": {"knobs": {"fused_optimizer": True}},
}


@pytest.mark.parametrize("name", [*CHANGES, "padded"])
def test_what_a_recipe_changes_besides_leaves_the_losses(task: ModuleType, name: str) -> None:
    changes = CHANGES.get(name) or {"alignment": Alignment(24, modules_of(task))}
    recipe = recipe_of(task, **changes)
    ours, theirs = applied(task, recipe, STEPS), plain(task, recipe_of(task), STEPS)
    assert name != "padded" or ours.precision.report.padded
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


def test_an_average_of_the_weights_follows_and_predicts_under_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = load("diffusion", monkeypatch)
    recipe = recipe_of(task, Policy.MIXED_BFLOAT16, float32_modules=("up", "up.norm"))
    model, optimizers = start(task)
    precision = apply_profile(recipe, model=model, optimizer=list(optimizers))
    average = task.build_average(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    data = batches(task, recipe, STEPS)
    for batch in data:
        with precision.autocast():
            loss = task.training_step(model, batch)
        precision.backward(loss)
        assert precision.step()
        average.update_parameters(model)
        first = average.n_averaged == 1
        for name, value in model.state_dict().items():
            expected[name] = value.clone() if first else 0.9 * expected[name] + 0.1 * value
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    inputs = data[0][0]
    plain_model, _ = start(task)
    plain_model.load_state_dict(average.module.state_dict())
    with torch.no_grad(), precision.autocast():
        found = average(inputs["noisy"], inputs["steps"])
    with torch.no_grad():
        exact = plain_model(inputs["noisy"], inputs["steps"])
    assert found.dtype is torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)


def modules_of(task: ModuleType) -> tuple[str, ...]:
    """Every module that is called, of a task's model."""
    found = start(task)[0].named_modules()
    return tuple(name for name, module in found if not isinstance(module, NEVER_CALLED))


def same_state(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    """Whether two models hold the same, under the same names."""
    here, there = ours.state_dict(), theirs.state_dict()
    return list(here) == list(there) and all(torch.equal(here[name], there[name]) for name in here)
