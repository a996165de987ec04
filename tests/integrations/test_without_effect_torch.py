"""A profile that cannot take effect, or has another one, is refused or said once, by each trainer.

test_refused_trainers_torch.py has what a trainer's own settings refuse; here are models and loaders
that are not those of the profile.
"""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer

from autoprec import Policy, Recipe
from autoprec.core.recipe import Alignment
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.transformers import apply
from tests.integrations.trained import Net, net, recipe_of
from tests.integrations.trainings import (
    Training,
    by_accelerate,
    by_fabric,
    by_lightning,
    by_the_trainer,
)
from tests.integrations.transformers_trainings import arguments, language_model, texts

pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
]

TRAINERS: dict[str, Training] = {
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "accelerate": by_accelerate,
    "the Trainer": by_the_trainer,
}


class ReadsWeight(nn.Module):
    """Reads its head's weight without calling it, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(108, 16), nn.Linear(16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(images.flatten(1)), self.head.weight, self.head.bias)


class CastsItself(Net):
    """Computes in float32 under an autocast of its own."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(images.float())


class CastsInside(nn.Linear):
    """Computes in 16 bits under an autocast of its own, whatever is around it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(inputs)


class LaysOut(Net):
    """Lays its inputs out itself."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.contiguous(memory_format=torch.contiguous_format))


def with_an_island_that_casts() -> nn.Module:
    model = net()
    model.exact = CastsInside(8, 16)
    return model


def plain(policy: Policy = Policy.MIXED_BFLOAT16, **settings: Any) -> Recipe:
    return Recipe(policy=policy, batch_size=8, **settings)


REFUSED: dict[str, tuple[Any, Recipe, str]] = {
    "an island of another model": (
        net,
        plain(float32_modules=("encoder.last",)),
        r"'encoder.last'.* made for another model\? Tune again, or .*part=",
    ),
    "padding of another model": (
        net,
        plain(Policy.FLOAT32, alignment=Alignment(8, ("encoder.last",))),
        r"'encoder.last'.* made for another model\? Tune again, or .*part=",
    ),
    "DataParallel": (
        lambda: nn.DataParallel(net()),
        plain(),
        r"DataParallel cannot be operated on.* Use DistributedDataParallel, or one device",
    ),
    "TorchScript": (
        lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(108, 3))),
        plain(),
        r"TorchScript module was given.* Apply the profile before torch.jit.script",
    ),
}

SAID: dict[str, tuple[Any, Recipe, str]] = {
    "an island that is never called": (
        ReadsWeight,
        plain(float32_modules=("head",)),
        r"head did not run: .* take the path out of the profile",
    ),
    "padding that is never called": (
        ReadsWeight,
        plain(Policy.FLOAT32, alignment=Alignment(8, ("head",))),
        r"head did not run: .* take the path out of the profile",
    ),
    "an autocast of the model's own": (
        CastsItself,
        plain(),
        r"first matrix product ran in float32, and mixed_bfloat16 .* autocast of its own",
    ),
    "an island under an autocast of its own": (
        with_an_island_that_casts,
        plain(float32_modules=("exact",)),
        "exact should have run in float32 and gave 16-bit results",
    ),
    "a layout of the model's own": (
        LaysOut,
        plain(Policy.FLOAT32, memory_format="channels_last"),
        r"first convolution's input is contiguous, and the profile .* channels_last",
    ),
    "weights of 16 bits": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 3)).bfloat16(),
        plain(),
        r"2 parameters are 16-bit already .* keep the weights in float32",
    ),
    "a loader of another batch": (
        net,
        Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4),
        r"batches of 8 and .* checked with 4: give the loader batch_size=4"
        r"|update holds 4 samples .* held 8 by the arguments.* keep_batch=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_model_that_the_profile_cannot_be_applied_to_is_refused(
    trainer: str, case: str, tmp_path: Path
) -> None:
    make, recipe, said = REFUSED[case]
    with pytest.raises(UsageError, match=said) as raised:
        TRAINERS[trainer](make(), recipe, tmp_path, 32)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("case", SAID)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_has_no_effect_is_said_once_after_the_first_update(
    trainer: str, case: str, tmp_path: Path
) -> None:
    make, recipe, said = SAID[case]
    for updates in (1, 3):
        with pytest.warns(AutoprecWarning, match=said) as found:
            TRAINERS[trainer](make(), recipe, tmp_path, 8 * updates, watch=False)
        assert len([each for each in found if each.category is AutoprecWarning]) == 1


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_profile_that_takes_effect_is_not_spoken_of(trainer: str, tmp_path: Path) -> None:
    """As float16 does on a CPU, where the trainers' own flags train in float32."""
    for policy in (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16):
        recipe, dtypes = recipe_of(policy, accumulation_steps=1), set()
        model = net()
        model.head.register_forward_hook(
            lambda module, args, result, dtypes=dtypes: dtypes.add(result.dtype)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoprecWarning)
            TRAINERS[trainer](model, recipe, tmp_path, 16, watch=False)
        assert dtypes == {getattr(torch, str(policy).removeprefix("mixed_"))}


class FusesTheHead(Trainer):
    """Patches the model's forward before it is made, as TRL's SFTTrainer does.

    The loss reads the head's weight, and the model's own forward is left to calls without labels.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        whole, head = model.forward, model.get_output_embeddings()

        def fused(self: Any, input_ids: Any, labels: Any = None, **others: Any) -> Any:
            if labels is None:
                return whole(input_ids=input_ids, **others)
            hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = hidden[:, :-1].flatten(0, 1).float() @ head.weight.float().t()
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            return {"loss": loss / others["num_items_in_batch"]}

        model.forward = types.MethodType(fused, model)
        super().__init__(model, **settings)


def fused_trainer(folder: Path) -> Trainer:
    settings = arguments(
        folder, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=1
    )
    return FusesTheHead(language_model(), args=settings, train_dataset=texts())


def test_an_island_on_a_fused_head_is_named_and_the_others_run(tmp_path: Path) -> None:
    trainer = fused_trainer(tmp_path)
    before = trainer.model.forward
    islands = ("transformer.h.0.mlp.c_fc", "lm_head")
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, float32_modules=islands)
    precision = apply(trainer, recipe, watch=False)
    with pytest.warns(
        AutoprecWarning, match="profile: lm_head did not run: .* fused loss"
    ) as found:
        trainer.train()
    assert len([each for each in found if each.category is AutoprecWarning]) == 1
    assert precision.ran is not None
    assert precision.ran.islands == islands[:1]
    assert precision.ran.dtype == "bfloat16"  # of a Conv1D: no nn.Linear is called
    precision.detach()
    assert trainer.model.forward == before


def test_a_fused_head_trains_in_float32_as_without_the_profile(tmp_path: Path) -> None:
    weights = []
    for applied in (True, False):
        trainer = fused_trainer(tmp_path)
        if applied:
            apply(trainer, Recipe(batch_size=4))
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(map(torch.equal, weights[0].values(), weights[1].values()))
