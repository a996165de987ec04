"""The changed scripts of examples/trainers are verified whole, under a profile of 16 bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec import Policy, Recipe
from autoprec.api import verify_script
from autoprec.core.recipe import LossScale
from tests.code_blocks import ROOT

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="runs are ended by their process group"),
]

FLOAT16 = {"policy": Policy.MIXED_FLOAT16, "loss_scale": LossScale(initial=1024.0)}
PROFILES: dict[str, dict[str, Any]] = {
    "lightning": {"batch_size": 16, "accumulation_steps": 2, "float32_modules": ("6",)},
    "transformers": {"batch_size": 8, "accumulation_steps": 4},
    "accelerate": {"batch_size": 16, "accumulation_steps": 2},
    "amp": {"batch_size": 32, **FLOAT16},
}


@pytest.mark.parametrize("name", list(PROFILES))
def test_a_whole_script_is_run_with_its_profile_and_without(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_profile: Callable[[Recipe, str], Path],
    request: pytest.FixtureRequest,
) -> None:
    if name != "lightning":  # whose runs are started as users start them
        request.getfixturevalue("runs_with_trainers")
    recipe = Recipe(**{"policy": Policy.MIXED_BFLOAT16, **PROFILES[name]})
    profile = write_profile(recipe, "torch")
    script = shutil.copy(ROOT / "examples" / "trainers" / f"{name}_after.py", profile.parent)
    monkeypatch.chdir(profile.parent)
    found = verify_script("model.profile.yaml", script, rounds=1, updates=8)
    assert [each.name for each in found.claims] == ["end to end", "losses"]
    losses = found.claims[1]
    assert losses.result == "holds", losses
    assert not losses.found.startswith("0 % apart")  # it did compute in 16 bits
    assert not [each for each in found.notes if "loader" not in each]
    assert found.speedup is not None
