"""Losses that a Trainer normalises over the whole update: split as they would be unsplit, or said.

A mean over the tokens of each micro-batch is another loss than the mean over the update's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from autoprec import Recipe
from autoprec.backends.capture import task_of
from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.transformers import apply
from tests.integrations.transformers_trainings import (
    Classifier,
    arguments,
    language_model,
    samples,
    texts,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

SPLIT = Recipe(batch_size=4, accumulation_steps=8)


def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


class TakesNoMore(nn.Module):
    """Takes what it needs alone, and so is never given the number of the update's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = language_model()

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return self.inside(input_ids=input_ids, labels=labels)


class ShapedLikeSFT(Trainer):
    """Overrides what TRL's SFTTrainer does: columns, a loss that reads more, what is logged."""

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels"]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        self.entropies = outputs.logits.detach().float().softmax(-1).max()
        return (loss, outputs) if return_outputs else loss


def with_texts(
    folder: Path, kind: type[Trainer] = Trainer, model: Any = None, **settings: Any
) -> Trainer:
    return kind(
        model=model or language_model(),
        args=arguments(
            folder,
            max_steps=settings.pop("max_steps", 1),
            per_device_train_batch_size=settings.pop("batch", 32),
            gradient_accumulation_steps=settings.pop("steps", 1),
            max_grad_norm=0.0,
            seed=1,
        ),
        train_dataset=settings.pop("data", None) or texts(),
        **settings,
    )


@pytest.mark.parametrize(
    ("kind", "make", "settings"),
    [
        (Trainer, language_model, {}),
        (Trainer, language_model, {"compute_loss_func": loss_of}),
        (Trainer, TakesNoMore, {"compute_loss_func": loss_of}),
        (ShapedLikeSFT, language_model, {}),
    ],
    ids=["model", "function", "function, model without **kwargs", "shaped like SFTTrainer"],
)
def test_split_updates_weigh_tokens_as_whole_ones_do(
    tmp_path: Path, kind: Any, make: Any, settings: dict[str, Any]
) -> None:
    """8 micro-batches of 4 against one of 32; the mean of their means would be another gradient."""
    gradients = []
    for recipe in (Recipe(batch_size=32), SPLIT):
        trainer = with_texts(tmp_path, kind, make(), **settings)
        accepted = trainer.model_accepts_loss_kwargs
        apply(trainer, recipe)
        assert trainer.model_accepts_loss_kwargs is accepted
        found = keep_gradients(trainer)
        trainer.train()
        gradients.append(found)
    assert difference(gradients[1], gradients[0]) < 1e-5
    assert difference(naive(texts()), gradients[0]) > 0.05


def test_split_updates_of_a_model_without_kwargs_are_means(tmp_path: Path) -> None:
    """Its loss is divided by the micro-batches, once: not 8 times the gradient, and not 1/8."""
    gradients = []
    for recipe in (Recipe(batch_size=32), SPLIT):
        trainer = with_texts(tmp_path, model=Classifier(), data=samples(32))
        trainer.model.net.norm.eval()  # BatchNorm's statistics are of a micro-batch
        trainer.model.net.norm.train = lambda *_: None
        assert not trainer.model_accepts_loss_kwargs
        apply(trainer, recipe)
        found = keep_gradients(trainer)
        trainer.train()
        gradients.append(found)
    assert difference(gradients[1], gradients[0]) < 1e-5


def test_tokens_that_differ_in_a_model_without_kwargs_are_said(tmp_path: Path) -> None:
    """The Trainer takes the mean of the micro-batches' means, which nothing shows."""
    trainer = with_texts(tmp_path, model=TakesNoMore(), max_steps=3)
    apply(trainer, SPLIT)
    said = r"one update hold [\d, ]+ labels.*whole update"
    with pytest.warns(AutoprecWarning, match=said) as told:
        trainer.train()
    assert len([each for each in told if each.category is AutoprecWarning]) == 1


@pytest.mark.parametrize(
    ("make", "data"), [(language_model, texts()), (TakesNoMore, texts(1) * 32)]
)
def test_micro_batches_that_weigh_what_they_should_are_not_spoken_of(
    tmp_path: Path, make: Any, data: Any
) -> None:
    trainer = with_texts(tmp_path, model=make(), data=data, max_steps=3)
    apply(trainer, SPLIT)
    trainer.train()


class TakesMore(nn.Module):
    """Takes further arguments, as the Trainer's own models do, and makes nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = language_model()

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        return self.inside(input_ids=input_ids, labels=labels)


class OwnLoss(Trainer):
    """Computes the loss itself, a mean over each micro-batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss


class PassesOn(OwnLoss):
    """Leaves the loss to the Trainer."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def mean_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("named", "kind", "make", "settings"),
    [
        ("TakesMore.forward", Trainer, TakesMore, {}),
        ("OwnLoss.compute_loss", OwnLoss, language_model, {}),
        ("mean_of", Trainer, language_model, {"compute_loss_func": mean_of}),
    ],
)
def test_a_loss_that_leaves_the_updates_tokens_out_is_not_split(
    tmp_path: Path, named: str, kind: Any, make: Any, settings: dict[str, Any]
) -> None:
    """The Trainer takes it for one that is normalised over the update: 8 times the gradient."""
    recipe = Recipe(batch_size=4, accumulation_steps=8)
    trainer = with_texts(tmp_path, kind, make(), **settings)
    with pytest.raises(UsageError, match=rf"{named} makes nothing of .*loss_is_scaled_for_ga"):
        apply(trainer, recipe)
    apply(with_texts(tmp_path, kind, make(), **settings), recipe, keep_batch=True)
    trainer.loss_is_scaled_for_ga = False
    apply(trainer, recipe)


def test_a_loss_that_is_left_to_the_trainer_is_split(tmp_path: Path) -> None:
    apply(with_texts(tmp_path, PassesOn), Recipe(batch_size=4, accumulation_steps=8))


def test_what_is_refused_would_have_had_another_gradient(tmp_path: Path) -> None:
    norms = []
    for steps, scaled in ((1, None), (8, None), (8, False)):
        trainer = with_texts(tmp_path, OwnLoss)
        trainer.args.per_device_train_batch_size = 32 // steps
        trainer.args.gradient_accumulation_steps = steps
        trainer._train_batch_size = 32 // steps
        trainer.loss_is_scaled_for_ga = scaled
        found = keep_gradients(trainer)
        trainer.train()
        norms.append(float(torch.cat([each.flatten() for each in found]).norm()))
    assert norms[1] > 4 * norms[0]
    assert norms[2] < 2 * norms[0]


def keep_gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Return a list that will hold the first update's gradients."""
    found: list[torch.Tensor] = []
    own = trainer._get_grad_norm

    def note(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        return own(model, *args, **kwargs)

    trainer._get_grad_norm = note
    return found


def naive(data: list[dict[str, list[int]]]) -> list[torch.Tensor]:
    """Return the gradient of the mean of the micro-batches' means."""
    model = language_model()
    for start in range(0, 32, 4):
        rows = data[start : start + 4]
        ids, labels = (torch.tensor([r[key] for r in rows]) for key in ("input_ids", "labels"))
        (model(input_ids=ids, labels=labels).loss / 8).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    a, b = (torch.cat([each.flatten() for each in many]) for many in (found, expected))
    return float((a - b).norm() / b.norm())


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def captured(folder: Path, kind: Any, make: Any, settings: dict[str, Any]) -> Task:
    """The task that the tuner makes of a Trainer with an update of 32."""
    trainer = with_texts(folder, kind, make(), data_collator=collated, **settings)
    return task_of(trainer, name="task")


NORMALISED = [
    pytest.param(Trainer, language_model, {}, id="model"),
    pytest.param(Trainer, TakesNoMore, {"compute_loss_func": loss_of}, id="function"),
    pytest.param(ShapedLikeSFT, language_model, {}, id="shaped like SFTTrainer"),
]
OTHERS = [
    pytest.param(OwnLoss, language_model, {}, id="own loss"),
    pytest.param(Trainer, TakesMore, {}, id="arguments that are dropped"),
    pytest.param(Trainer, language_model, {"compute_loss_func": mean_of}, id="function"),
    pytest.param(Trainer, TakesNoMore, {}, id="model without **kwargs"),
]


@pytest.mark.parametrize(("kind", "make", "settings"), NORMALISED)
def test_the_tuner_proves_that_split_updates_are_whole_ones(
    tmp_path: Path, kind: Any, make: Any, settings: dict[str, Any]
) -> None:
    task = captured(tmp_path, kind, make, settings)
    facts = TorchBackend().describe(
        task, device="cpu", seed=0, batch_size=32, report=lambda *_: None
    )
    assert facts.splittable, facts.split_reason
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    compared = tracer.compare_settings(recipe=SPLIT)
    assert compared.points
    for point in compared.points:
        assert point.gradient_error < 1e-5
        assert point.loss == pytest.approx(point.reference, rel=1e-5)
    whole, split = (
        tracer.trajectory(recipe=recipe, seed=0, steps=2).losses
        for recipe in (Recipe(batch_size=32), SPLIT)
    )
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("kind", "make", "settings"), OTHERS)
def test_the_tuner_does_not_split_a_loss_that_leaves_the_updates_tokens_out(
    tmp_path: Path, kind: Any, make: Any, settings: dict[str, Any]
) -> None:
    task = captured(tmp_path, kind, make, settings)
    facts = TorchBackend().describe(
        task, device="cpu", seed=0, batch_size=32, report=lambda *_: None
    )
    assert not facts.splittable
    assert "differ from the whole batch's" in facts.split_reason
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    compared = tracer.compare_settings(recipe=SPLIT)
    assert max(point.gradient_error for point in compared.points) > 0.01
