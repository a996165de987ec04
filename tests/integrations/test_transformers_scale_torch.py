"""The loss scale in Hugging Face's Trainer: overflows, clipping, fixed scales, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from autoprec import Policy
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecWarning
from autoprec.integrations.transformers import apply
from tests.integrations.trained import OVERFLOWS, SCALE, SCALES, recipe_of
from tests.integrations.transformers_trainings import Classifier, Losses, trainer_of

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


def overflow_in(model: Classifier, steps: list[int]) -> None:
    def overflow(grad: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        return torch.full_like(grad, torch.inf) if len(steps) in OVERFLOWS else grad

    model.net.head.bias.register_hook(overflow)


@pytest.mark.parametrize(
    ("optimizer", "fused"), [("sgd", False), ("adamw_torch", False), ("adamw_torch", True)]
)
def test_overflows_are_skipped_by_scale_and_scheduler(
    tmp_path: Path, optimizer: str, fused: bool
) -> None:
    knobs = {"fused_optimizer": True} if fused else {}
    recipe = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1, loss_scale=SCALE, knobs=knobs)
    settings = {"max_steps": 10, "lr_scheduler_type": "linear", "optim": optimizer}
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1, **settings)
    precision = apply(trainer, recipe)
    overflow_in(trainer.model, [])
    seen = EachUpdate(trainer, precision)
    with pytest.warns(AutoprecWarning, match="256, its floor"):
        trainer.train()
    assert seen.scales == SCALES
    unchanged = [n for n in range(1, 11) if torch.equal(seen.weights[n], seen.weights[n - 1])]
    assert unchanged == list(OVERFLOWS)
    assert precision.skipped == 4
    assert precision.scaler.counts.floor_hits == 2
    assert trainer.state.global_step == 10
    assert trainer.lr_scheduler.last_epoch == 6  # the Trainer's rule: not on skipped updates


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    recipe = recipe_of(
        Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=1024.0, growth_interval=4)
    )
    saving = {"save_strategy": "steps", "save_steps": 5, "max_steps": 12}
    trainer = trainer_of(tmp_path, **saving)
    apply(trainer, recipe)
    whole = Losses(trainer)
    trainer.train()
    trainer = trainer_of(tmp_path, **saving)
    precision = apply(trainer, recipe)
    resumed = Losses(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.found == whole.found[10:]
    assert precision.scaler.get_scale() == 1024.0 * 2**3


class EachUpdate(TrainerCallback):
    """Notes the scale and the head's weights after every update."""

    def __init__(self, trainer: Trainer, precision: Any) -> None:
        self.model: Any = trainer.model
        self.precision = precision
        self.scales: list[float] = []
        self.weights = [self.head()]
        trainer.add_callback(self)

    def head(self) -> torch.Tensor:
        return self.model.net.head.weight.detach().clone()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.scales.append(self.precision.scaler.get_scale())
        self.weights.append(self.head())


def test_a_fixed_scale_stays_while_overflows_are_skipped(tmp_path: Path) -> None:
    recipe = recipe_of(
        Policy.MIXED_FLOAT16,
        accumulation_steps=1,
        loss_scale=LossScale(mode="fixed", initial=512.0, floor=512.0),
    )
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1, max_steps=8)
    precision = apply(trainer, recipe)
    overflow_in(trainer.model, [])
    seen = EachUpdate(trainer, precision)
    trainer.train()
    assert seen.scales == [512.0] * 8
    unchanged = [n for n in range(1, 9) if torch.equal(seen.weights[n], seen.weights[n - 1])]
    assert unchanged == list(OVERFLOWS)
    assert precision.skipped == 4


LIMIT = 0.05


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_gradients_are_clipped_unscaled(tmp_path: Path, policy: Policy) -> None:
    """Plain SGD moves the weights by the learning rate times the limit; norms are float32's."""
    limited = {"max_grad_norm": LIMIT, "max_steps": 4, "logging_strategy": "steps"}
    plain = trainer_of(tmp_path, logging_steps=1, **limited)
    plain.train()
    expected = [each["grad_norm"] for each in plain.state.log_history if "grad_norm" in each]
    trainer = trainer_of(tmp_path, logging_steps=1, **limited)
    apply(trainer, recipe_of(policy))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    moved: list[float] = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = [p.detach().clone() for p in trainer.model.parameters()]
            pairs = zip(now, before, strict=True)
            moved.append(float(torch.stack([(a - b).norm() for a, b in pairs]).norm()))
            before[:] = now

    trainer.add_callback(Look())
    trainer.train()
    found = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
    assert len(found) == len(expected) == 4
    assert found == pytest.approx(expected, rel=1e-2 if policy.mixed else 1e-4)
    assert min(found) > LIMIT
    assert moved == pytest.approx([0.1 * LIMIT] * 4, rel=1e-3)


def test_checkpoints_of_torchs_own_scaler_load_and_ours_load_there(tmp_path: Path) -> None:
    recipe = recipe_of(Policy.MIXED_FLOAT16)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = trainer_of(tmp_path, **saving)
    apply(trainer, recipe)
    trainer.train()
    path = tmp_path / "checkpoint-2" / "scaler.pt"
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(torch.load(path, weights_only=True))
    assert plain.get_scale() == 1024.0
    plain.load_state_dict({**plain.state_dict(), "scale": 128.0})
    torch.save(plain.state_dict(), path)
    trainer = trainer_of(tmp_path, **saving)
    precision = apply(trainer, recipe)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert precision.scaler.get_scale() == 128.0


def test_a_float32_checkpoint_starts_at_the_profiles_scale(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = trainer_of(tmp_path, **saving)
    apply(trainer, recipe_of(Policy.FLOAT32))
    trainer.train()
    trainer = trainer_of(tmp_path, **saving)
    precision = apply(trainer, recipe_of(Policy.MIXED_FLOAT16))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert precision.scaler.get_scale() == 1024.0
    assert trainer.state.global_step == 4
