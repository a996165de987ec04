"""Training code as libraries and papers have it: proven and tuned.

Bfloat16 is proven on each row of `real_tasks`. Two rows are tuned from the command line besides, on
this machine's CPU, and trained with their profiles; `make test-slow` tunes one of them, and
verifies it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from real_task_rows_torch import FOLDER, STEPS, by_hand, load, one_thread, recipe_of, task
from training_loops_torch import Trained, applied, plain

from autoprec import Policy, verify
from autoprec.backends.torch.backend import TorchBackend
from autoprec.cli import main
from autoprec.profiles import load_profile
from autoprec.tuning.proof.recipe_proof import Proof, silent
from autoprec.workers.task_file import load_task

__all__ = ["one_thread", "task"]

ROOT = Path(__file__).parent.parent
TUNED = ("checkpointed", pytest.param("lora", marks=pytest.mark.release))

QUICK = ("--trials", "2", "--rounds", "1", "--proof-steps", "30", "--no-extras")

pytestmark = [
    pytest.mark.slow,
    # PEFT asks transformers by the name of before its version 5.16.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


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
    """Tune a row for bfloat16 by the command line's words; return the profile's file."""
    profile = folder / "model.profile.yaml"
    words = ["tune", FOLDER / f"{row}.py", "--device", "cpu", "--policies", "mixed_bfloat16"]
    words += ["--output", profile, "--storage", folder / "study.journal", *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoprec.probing.measure_device", lambda facts, frameworks: facts)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert main([str(word) for word in words]) == 0
    return profile


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the profile of a row, which is tuned when it is first asked for."""
    return cache(lambda row: tune(row, tmp_path_factory.mktemp(row)))


# On a busy machine what is gained in time may well be unknown.
@pytest.mark.filterwarnings("ignore:.*this profile's tuning was inconclusive")
@pytest.mark.parametrize("task", TUNED, indirect=True)
@pytest.mark.timeout(400)
def test_a_row_is_tuned_and_its_profile_trains_as_plain_autocast_does(
    task: ModuleType, tuning: Callable[[str], Path]
) -> None:
    path = tuning(task.__name__)
    profile = load_profile(path)
    recipe = profile.recipe
    assert recipe.policy is Policy.MIXED_BFLOAT16
    assert recipe.effective_batch == task.BATCH_SIZE
    assert profile.evidence.parity.verdict == "equal", profile.evidence.parity
    assert recipe.float32_modules == ()
    ours, theirs = applied(task, recipe, STEPS, path), by_hand(task, recipe)
    assert ours.precision.recipe == recipe
    assert ours.losses == pytest.approx(theirs.losses, rel=0.01)


def test_what_was_tuned_runs_and_trains_like_float32_again(tuning: Callable[[str], Path]) -> None:
    """How fast it is on a machine that others use is no matter of a test."""
    path = tuning("checkpointed")
    found = verify(path, FOLDER / "checkpointed.py", device="cpu", rounds=1)
    results = {claim.name: claim.result for claim in found.claims}
    assert results["runs"] == results["numerics"] == "holds"
    assert {"speed-up", "throughput"} & results.keys()
    assert found.speedup is not None
    assert found.parity is not None
    assert found.parity.steps == 30
    assert found.notes == ()


def exactly(trained: Trained) -> list[Any]:
    """The losses and the weights that a training ended with, to the bit."""
    weights = trained.model.state_dict()
    state = {name: value.numpy().tobytes().hex() for name, value in weights.items()}
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    return [[loss.hex() for loss in trained.losses], digest]


#: Trains a row with a profile; prints `exactly` what comes of it.
TRAIN = """
import json, sys
from pathlib import Path
import torch
from autoprec.profiles import load_profile
from real_task_rows_torch import load
from test_real_tasks_tuned_torch import exactly
from training_loops_torch import applied

torch.set_num_threads(1)
row, path = sys.argv[1], Path(sys.argv[2])
print(json.dumps(exactly(applied(load(row), load_profile(path).recipe, 12, path))))
"""


@pytest.mark.timeout(400)
def test_a_profile_gives_the_weights_of_the_loop_by_hand_in_a_fresh_process(
    tuning: Callable[[str], Path],
) -> None:
    """To the bit, losses too: with one thread sums are formed in one order."""
    row = "checkpointed"
    path = tuning(row)
    recipe = load_profile(path).recipe
    assert recipe.policy is Policy.MIXED_BFLOAT16
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, row, path],
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    with_profile = json.loads(done.stdout)
    assert len(set(with_profile[0])) == 12 * recipe.accumulation_steps  # it trains
    assert with_profile == exactly(plain(load(row), recipe, 12))
