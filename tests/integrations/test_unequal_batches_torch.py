"""A loader's short last batch is said in every trainer whose update mixes it with whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprec import Policy
from autoprec.errors import AutoprecWarning
from tests.integrations.trained import net, recipe_of
from tests.integrations.trainings import (
    Training,
    by_accelerate,
    by_fabric,
    by_lightning,
    by_the_trainer,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

TRAININGS: list[Any] = [by_lightning, by_fabric, by_accelerate, by_the_trainer]


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_FLOAT16])
@pytest.mark.parametrize("training", TRAININGS)
def test_a_short_batch_beside_a_whole_one_is_said_once(
    training: Training, policy: Policy, tmp_path: Path
) -> None:
    with pytest.warns(AutoprecWarning, match="hold 8, 4 samples.*drop_last=True") as told:
        training(net(0.0), recipe_of(policy), tmp_path, 60)
    assert len([each for each in told if each.category is AutoprecWarning]) == 1


@pytest.mark.parametrize("samples", [64, 52])
@pytest.mark.parametrize("training", TRAININGS)
def test_whole_batches_and_a_short_one_alone_are_not_spoken_of(
    training: Training, samples: int, tmp_path: Path
) -> None:
    training(net(0.0), recipe_of(Policy.FLOAT32), tmp_path, samples)
