"""A profile applied to Hugging Face's Trainer: batch, accumulation, islands, scale, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from autoprec import Policy, Recipe
from autoprec.core.recipe import Alignment, LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.transformers import apply
from tests.integrations.trained import RIGHT, recipe_of, relative, watched, wrapped_modules
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


@pytest.mark.parametrize(("epochs", "clip"), [(1, 0.0), (2, 0.0), (2, 0.05)])
def test_the_last_partial_update_is_the_mean_of_what_it_holds(
    tmp_path: Path, epochs: int, clip: float
) -> None:
    """7 micro-batches, 3 to an update."""
    recipe = recipe_of(Policy.FLOAT32, accumulation_steps=3)
    settings = {"num_train_epochs": epochs, "max_grad_norm": clip, "weight_decay": 0.0}
    trainer = trainer_of(tmp_path, count=56, gradient_accumulation_steps=1, **settings)
    batches: list[Any] = []
    losses = Losses(trainer, batches)
    with pytest.warns(AutoprecWarning, match="holds 24 samples"):
        apply(trainer, recipe)
    trainer.train()
    assert trainer.state.global_step == 3 * epochs
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for start in range(0, len(batches), 7):
        for first, last in ((0, 3), (3, 6), (6, 7)):
            for batch in batches[start + first : start + last]:
                loss = model(**batch)["loss"] / (last - first)
                expected.append(loss.item())
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
            optimizer.step()
            optimizer.zero_grad()
    assert losses.found == pytest.approx(expected, rel=1e-5)
    assert relative(trainer.model, model) < 1e-5  # padded and laid out otherwise


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
    first, attached = wrapped_modules(trainer.model), precision.attached
    depth = [type(each).__name__ for each in chain(precision.attached.root)]
    trainer.train()
    assert precision.attached is attached
    assert wrapped_modules(trainer.model) == first
    assert [type(each).__name__ for each in chain(precision.attached.root)] == depth


def chain(module: nn.Module) -> Iterator[Any]:
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "inner", None)


def make_classifier() -> nn.Module:
    """Make it without an argument, for which the Trainer would give the trial."""
    return Classifier()


def searching(
    folder: Path, model_init: Callable[[], nn.Module] | None = None, **settings: Any
) -> Trainer:
    """A Trainer that makes its model itself, anew for each trial of a search."""
    return Trainer(
        model_init=model_init or make_classifier,
        args=arguments(folder, **{"num_train_epochs": 1, **settings}),
        train_dataset=samples(64),
        eval_dataset=samples(16),
    )


def search(trainer: Trainer, name: str, values: Sequence[Any]) -> None:
    """Search over one argument, by Optuna, each of its values once."""
    optuna = pytest.importorskip("optuna")
    trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values)},
        n_trials=len(values),
        direction="minimize",
        backend="optuna",
        sampler=optuna.samplers.GridSampler({name: values}),
    )


class Ends(TrainerCallback):
    """Keeps, of each training, the learning rate, the loss scale and the weights at its end."""

    def __init__(self, precision: Any) -> None:
        self.precision, self.found = precision, list[tuple[float, float, int, Any]]()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weights = {name: value.clone() for name, value in given["model"].state_dict().items()}
        scale = self.precision.scaler.get_scale()
        self.found.append((args.learning_rate, scale, self.precision.steps, weights))


def test_each_trial_of_a_search_trains_as_alone(tmp_path: Path) -> None:
    scale = LossScale(initial=64.0, growth_interval=2)
    recipe = replace(recipe_of(Policy.MIXED_FLOAT16), loss_scale=scale)
    models: list[Any] = []

    def model_init() -> nn.Module:
        models.append(Classifier())
        return models[-1]

    trainer = searching(tmp_path, model_init)
    precision = apply(trainer, recipe)
    ends = Ends(precision)
    trainer.add_callback(ends)
    search(trainer, "learning_rate", [0.1, 0.2, 0.05])
    assert len(ends.found) == 3
    for rate, scale, steps, weights in ends.found:
        alone = searching(tmp_path, learning_rate=rate)
        own = apply(alone, recipe)
        alone.train()
        assert (scale, steps) == (own.scaler.get_scale(), own.steps) == (256.0, 4)
        expected = alone.model.state_dict()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert own.ran is not None
        assert precision.ran is not None
        assert precision.ran.islands == own.ran.islands == ("exact",)
    assert [wrapped_modules(model) for model in models[:-1]] == [[]] * 3


def test_a_search_over_the_batch_is_refused_or_kept(tmp_path: Path) -> None:
    recipe = recipe_of(Policy.MIXED_BFLOAT16)
    trainer = searching(tmp_path)
    apply(trainer, recipe)
    with pytest.raises(
        UsageError, match=r"a search of hyper.*keep_batch=True\), changes the batch"
    ):
        search(trainer, "per_device_train_batch_size", [4])
    trainer = searching(tmp_path)
    precision = apply(trainer, recipe, keep_batch=True)
    search(trainer, "per_device_train_batch_size", [4, 16])
    assert precision.ran is not None
    assert precision.ran.batch == precision.batch_size == trainer.args.per_device_train_batch_size


def test_a_trial_that_asks_for_another_precision_is_refused(tmp_path: Path) -> None:
    trainer = searching(tmp_path)
    apply(trainer, recipe_of(Policy.FLOAT32))
    with pytest.raises(UsageError, match=r"told bf16 and the profile's policy is float32"):
        search(trainer, "bf16", [True])


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
