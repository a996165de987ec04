"""Whatever limit ends a tuning, policies were compared at one batch, or it says which were not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.dtypes import Policy
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.events import Event, TrialFinished

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)


def drawn(number: int) -> dict[str, Any]:
    """The limits of one tuning, and what chooses its trials."""
    chance = random.Random(number)
    limits: dict[str, Any] = {"sampler": chance.choice(["cost", "cost", "grid", "random"])}
    if chance.random() < 0.6:
        limits["trials"] = chance.randint(1, 12)
    if chance.random() < 0.4:
        limits["search_limit"] = 10 ** chance.uniform(-4, -0.5)
    if chance.random() < 0.3:
        limits["time_limit"] = 10 ** chance.uniform(-3, 0.5)
    if chance.random() < 0.3:
        limits["batch"] = chance.choice(["max", "16", "64"])
    return limits


@pytest.mark.parametrize("block", range(10))
def test_of_a_hundred_limits_each_compares_all_policies_or_says_which_it_did_not(
    block: int, tmp_path: Path
) -> None:
    task = tmp_path / "simulated_task.py"
    task.write_text(
        "from simulated import SimulatedModel\n"
        "def build_model():\n"
        "    return SimulatedModel(overhead={'float32': .002, 'mixed_bfloat16': .003},\n"
        "        per_sample={'float32': .0005, 'mixed_bfloat16': .00025})\n"
        "def build_data(batch_size):\n    return []\n"
    )
    for number in range(10 * block, 10 * block + 10):
        events: list[Event] = []
        limits = drawn(number)
        try:
            profile = tune(
                task, listener=events.append, rounds=2, policies=POLICIES, fresh=True, **limits
            )
        except NoFeasibleRecipe:
            continue
        tried: dict[int, set[Policy]] = {}
        for event in events:
            if isinstance(event, TrialFinished):
                tried.setdefault(event.recipe.effective_batch, set()).add(event.recipe.policy)
        most = max(tried.values(), key=len)
        said = " ".join(profile.evidence.not_covered)
        missing = [policy.value for policy in POLICIES if policy not in most]
        assert all(policy in said for policy in missing), (number, limits, said, tried)
        assert missing or "that the other policies ran at" not in said, (number, limits, said)
