"""A profile applied to Hugging Face's Trainer: batch, accumulation, islands, scale, resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from autoprec import Policy, Recipe
from autoprec.core.recipe import Alignment
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.transformers import apply
from tests.integrations.trained import RIGHT, recipe_of, watched, wrapped_modules
from tests.integrations.transformers_trainings import (
    Classifier,
    Losses,
    arguments,
    language_model,
    samples,
    texts,
    trainer_of,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_the_trainer_trains_under_the_profile(tmp_path: Path, policy: Policy) -> None:
    recipe = recipe_of(policy)
    plain = trainer_of(tmp_path)
    expected = Losses(plain)
    plain.train()
    trainer = trainer_of(tmp_path)
    precision = apply(trainer, recipe, watch=False)
    losses = Losses(trainer)
    model = trainer.model.net
    with watched(model) as seen:
        trainer.train()
        trainer.evaluate()
    assert trainer.state.global_step == 12
    assert precision.steps == 12
    assert losses.found == pytest.approx(expected.found, rel=1e-2 if policy.mixed else 1e-5)
    assert (losses.found != expected.found) or not policy.mixed
    if policy is Policy.MIXED_BFLOAT16:
        assert seen.of("train") == RIGHT
        assert seen.of("eval") == RIGHT
        assert seen.columns == {32}
        assert seen.strides == {True}
    assert precision.ran is not None
    assert precision.ran.problems(recipe) == ()
    precision.detach()
    assert wrapped_modules(trainer.model) == []


def test_evaluating_without_training_runs_under_the_profile(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    apply(trainer, recipe_of(Policy.MIXED_BFLOAT16))
    with watched(trainer.model.net) as seen:
        trainer.evaluate()
        trainer.predict(samples(16))
    assert seen.of("eval") == RIGHT
    assert seen.columns == {32}


def test_training_twice_wraps_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_train_epochs=1)
    precision = apply(trainer, recipe_of(Policy.MIXED_BFLOAT16))
    trainer.train()
    assert precision.attached is not None
    first = wrapped_modules(trainer.model)
    depth = [type(each).__name__ for each in chain(precision.attached.root)]
    trainer.train()
    assert wrapped_modules(trainer.model) == first
    assert [type(each).__name__ for each in chain(precision.attached.root)] == depth


def chain(module: nn.Module) -> Iterator[Any]:
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "inner", None)


def test_each_trial_of_a_search_is_under_the_profile(tmp_path: Path) -> None:
    """As `_hp_search_setup` does it: another Accelerator, another model."""
    trainer = trainer_of(tmp_path, num_train_epochs=1)
    precision = apply(trainer, recipe_of(Policy.MIXED_FLOAT16), watch=False)
    for _ in range(3):
        trainer.model = trainer.model_wrapped = Classifier()
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.create_accelerator_and_postprocess()
        with watched(trainer.model.net) as seen:
            trainer.train()
        assert seen.of("train")["exact"] == {torch.float32}
        assert seen.of("train")["wide"] == {torch.float16}
        assert trainer.accelerator.scaler is precision.scaler


def test_batch_and_accumulation_are_the_profiles_and_said(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=1)
    with pytest.warns(AutoprecWarning, match=r"holds 16 samples .* held 8 .* keep_batch=True"):
        apply(trainer, recipe_of(Policy.MIXED_BFLOAT16))
    assert trainer.args.per_device_train_batch_size == 8
    assert trainer._train_batch_size == 8
    assert trainer.args.gradient_accumulation_steps == 2


def test_the_arguments_batch_can_be_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, per_device_train_batch_size=4, num_train_epochs=1)
    precision = apply(trainer, recipe_of(Policy.MIXED_BFLOAT16), keep_batch=True)
    trainer.train()
    assert trainer.state.global_step == 8
    assert precision.ran is not None
    assert precision.ran.batch == 4


def test_the_signature_that_the_trainer_reads_stays(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    accepted = trainer.model_accepts_loss_kwargs
    precision = apply(trainer, recipe_of(Policy.MIXED_BFLOAT16))
    trainer.evaluate()
    trainer._set_signature_columns_if_needed()
    assert trainer.model_accepts_loss_kwargs is accepted is False
    assert {"pixels", "labels"} <= set(trainer._signature_columns)
    precision.detach()


@pytest.mark.parametrize("with_function", [False, True])
def test_split_updates_weigh_tokens_as_whole_ones_do(tmp_path: Path, with_function: bool) -> None:
    """8 micro-batches of 4 against one of 32; the mean of their means would be another gradient."""
    gradients = []

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    for batch, steps in ((32, 1), (4, 8)):
        trainer = with_texts(tmp_path, compute_loss_func=loss_of if with_function else None)
        accepted = trainer.model_accepts_loss_kwargs
        apply(trainer, Recipe(batch_size=batch, accumulation_steps=steps))
        assert trainer.model_accepts_loss_kwargs is accepted
        found = keep_gradients(trainer)
        trainer.train()
        gradients.append(found)
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    assert difference(naive(texts()), gradients[0]) > 0.05


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


def with_texts(
    folder: Path, kind: type[Trainer] = Trainer, model: Any = None, **settings: Any
) -> Trainer:
    return kind(
        model=model or language_model(),
        args=arguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            max_grad_norm=0.0,
            seed=1,
        ),
        train_dataset=texts(),
        **settings,
    )


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


def test_a_language_model_with_adapters_has_its_islands_by_the_tuned_paths(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    recipe = Recipe(
        policy=Policy.MIXED_BFLOAT16,
        batch_size=4,
        float32_modules=("transformer.h.0.mlp.c_fc",),
    )
    adapted = peft.get_peft_model(
        language_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    trainer = Trainer(
        model=adapted,
        args=arguments(
            tmp_path, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=1
        ),
        train_dataset=texts(),
    )
    precision = apply(trainer, recipe)
    seen: dict[str, torch.dtype] = {}
    block = adapted.base_model.model.transformer.h[0].mlp
    for name in ("c_fc", "c_proj"):
        getattr(block, name).register_forward_hook(
            lambda module, args, result, name=name: seen.update({name: result.dtype})
        )
    trainer.train()
    assert seen == {"c_fc": torch.float32, "c_proj": torch.bfloat16}
    assert precision.ran is not None
    assert precision.ran.islands == ("transformer.h.0.mlp.c_fc",)


def test_the_trainers_own_16_bits_beside_a_float32_profile_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, bf16=True)
    with pytest.raises(UsageError, match=r"told bf16 .* float32.*leave mixed_precision"):
        apply(trainer, recipe_of(Policy.FLOAT32, alignment=Alignment()))


def test_switched_off_the_trainer_trains_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    runs = []
    for applied in (True, False):
        trainer = trainer_of(tmp_path, model=Classifier(0.1), num_train_epochs=1)
        if applied:
            apply(trainer, recipe_of(Policy.MIXED_BFLOAT16))
        losses = Losses(trainer)
        trainer.train()
        runs.append((losses.found, trainer.model.state_dict()))
    assert runs[0][0] == runs[1][0]
    pairs = zip(runs[0][1].values(), runs[1][1].values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
