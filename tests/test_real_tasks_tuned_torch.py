"""Training code as libraries and papers have it: proven and tuned.

Bfloat16 is proven on each row of `real_tasks`. Two rows are tuned from the command line besides, on
this machine's CPU, and trained with their profiles; `make test` tunes one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from processes import AUTOPREC
from real_task_rows_torch import FOLDER, STEPS, by_hand, one_thread, recipe_of, task
from training_loops_torch import applied

from autoprec import Policy
from autoprec.backends.torch.backend import TorchBackend
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
    tuning: Callable[[str], Path],
) -> None:
    """To the bit, losses too: with one thread sums are formed in one order."""
    row = "checkpointed"
    path = tuning(row)
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
