"""A profile as DeepSpeed's settings: all that decides how a model trains, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autoprec import Policy, Recipe
from autoprec.core.export import export
from autoprec.core.recipe import Alignment, LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.deepspeed import config

pytestmark = pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning")

BFLOAT16: dict[str, Any] = {"policy": Policy.MIXED_BFLOAT16, "batch_size": 8}


def test_settings_are_those_of_the_profile() -> None:
    recipe = Recipe(**BFLOAT16, accumulation_steps=4)
    settings = config(recipe)
    assert settings["train_micro_batch_size_per_gpu"] == 8
    assert settings["gradient_accumulation_steps"] == 4
    assert getattr(torch, settings["torch_autocast"]["dtype"]) is torch.bfloat16
    assert "bf16" not in settings  # which casts the weights
    assert json.loads(export(recipe, "deepspeed")[0]) == settings
    assert config(Recipe(batch_size=8)) == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # left out it is 1.0
    }


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(**BFLOAT16, float32_modules=("head",)), r"float32_modules \(head\)"),
        (
            Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale()),
            r"loss_scale \(its rule\)",
        ),
        (Recipe(policy=Policy.TF32, batch_size=8), r"tf32 \(TF32 products\)"),
    ],
)
def test_what_decides_how_it_trains_is_refused(recipe: Recipe, said: str) -> None:
    with pytest.raises(UsageError, match=f"no setting for {said}.*DDP or FSDP2"):
        config(recipe)


def test_what_is_for_speed_alone_is_told() -> None:
    recipe = Recipe(**BFLOAT16, alignment=Alignment(8, ("wide",)), knobs={"fused_optimizer": True})
    with pytest.warns(AutoprecWarning, match=r"alignment \(wide\), fused_optimizer \(True\)"):
        assert config(recipe)["torch_autocast"]["enabled"]
