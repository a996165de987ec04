"""Whole runs of a PyTorch script: what is recorded is what it did, and nothing after it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autoprec.errors import TaskError
from autoprec.tuning.flow.script_verification import ScriptJob, verify_script
from autoprec.workers.task_source import TaskSource
from tests.core.example_profile import PROFILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_runs"),  # tests/integrations has runs as users start them
    pytest.mark.skipif(os.name != "posix", reason="runs are ended by their process group"),
]

LOOP = """
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from autoprec import Policy, Recipe, apply_profile
from autoprec.core.recipe import LossScale

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recipe = Recipe(
    policy=Policy.MIXED_FLOAT16, batch_size=8, accumulation_steps=2,
    loss_scale=LossScale(mode="fixed", initial=1024.0),
)
precision = apply_profile(recipe, model=model, optimizer=optimizer, watch=False)
data = TensorDataset(torch.randn(256, 8), torch.arange(256) % 2)
kept = [0.0]
for inputs, targets in precision.batches(DataLoader(data, batch_size=8)):
    loss = torch.nn.functional.cross_entropy(precision.forward(inputs), targets)
    kept[-1] += loss.item() / 2
    with open(sys.argv[1] + str(precision.policy), "w") as file:
        json.dump(kept, file)
    if precision.backward_and_step(loss):
        kept.append(0.0)
print("after")
open(sys.argv[1] + "after", "w").close()
"""


def test_the_losses_before_the_scale_are_recorded_update_by_update(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    source = TaskSource(script, arguments=(str(tmp_path / "losses-"),), script=True)
    job = ScriptJob(source, PROFILE, None, lambda event: None, rounds=1, updates=6)
    found = verify_script(job)
    assert [each.name for each in found.claims] == ["end to end", "losses"]
    assert found.claims[1].result == "holds"
    off, on = (
        json.loads((tmp_path / f"losses-{policy}").read_text())
        for policy in ("float32", "mixed_float16")
    )
    assert len(off) == len(on) == 6
    assert off != on
    apart = abs(sum(off) - sum(on)) / sum(off)
    assert f"{apart * 100:.2g} % apart" in found.claims[1].found
    assert not (tmp_path / "losses-after").exists()


def test_a_loss_that_is_nan_with_the_profile_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    broken = "loss = loss * float('nan') if str(precision.policy) != 'float32' else loss"
    scale = '    loss_scale=LossScale(mode="fixed", initial=1024.0),\n'
    loop = LOOP.replace("MIXED_FLOAT16", "MIXED_BFLOAT16").replace(scale, "")
    script.write_text(loop.replace("    kept[-1] +=", f"    {broken}\n    kept[-1] +="))
    source = TaskSource(script, arguments=(str(tmp_path / "losses-"),), script=True)
    job = ScriptJob(source, PROFILE, None, lambda event: None, rounds=1, updates=6)
    claim = verify_script(job).claims[1]
    assert (claim.result, claim.found) == ("fails", "not finite")


def test_a_script_that_ends_before_is_compared_over_what_it_trains(tmp_path: Path) -> None:
    """16 batches are 8 updates, and 2 would be too few to time."""
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace("randn(256", "randn(128").replace("arange(256", "arange(128"))
    source = TaskSource(script, arguments=(str(tmp_path / "losses-"),), script=True)
    job = ScriptJob(source, PROFILE, None, lambda event: None, rounds=1, updates=60)
    found = verify_script(job)
    assert found.speedup.ratio > 0.0
    assert found.claims[1].result == "holds"
    assert any("ended after 8 updates, so only these" in note for note in found.notes)
    script.write_text(LOOP.replace("randn(256", "randn(32").replace("arange(256", "arange(32"))
    with pytest.raises(TaskError, match="ended after 2 updates, which are too few to time"):
        verify_script(job)
