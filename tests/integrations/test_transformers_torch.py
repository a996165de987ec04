"""A profile applied to Hugging Face's Trainer: batch, accumulation, islands, scale, resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from autoprec import Policy, Recipe
from autoprec.core.recipe import Alignment, LossScale
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.integrations.transformers import apply
from tests.integrations.trained import (
    OVERFLOWS,
    RIGHT,
    SCALE,
    SCALES,
    images,
    net,
    recipe_of,
    watched,
    wrapped_modules,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]


class Classifier(nn.Module):
    """`trained.Net` as the Trainer wants its models; it takes no further arguments."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(pixels)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def samples(count: int) -> list[dict[str, Any]]:
    pixels, targets = images(count)
    return [{"pixels": p, "labels": t} for p, t in zip(pixels, targets, strict=True)]


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            **settings,
        }
    )


def trainer_of(folder: Path, model: Any = None, count: int = 64, **settings: Any) -> Trainer:
    return Trainer(
        model=model or Classifier(),
        args=arguments(folder, **settings),
        train_dataset=samples(count),
        eval_dataset=samples(16),
    )


class Losses:
    """Keeps the losses of a Trainer's micro-batches."""

    def __init__(self, trainer: Trainer) -> None:
        self.found: list[float] = []
        self.own = trainer.training_step
        trainer.training_step = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.own(*args, **kwargs)
        self.found.append(loss.item())
        return loss


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_the_trainer_trains_under_the_profile(tmp_path: Path, policy: Policy) -> None:
    recipe = recipe_of(policy)
    plain = trainer_of(tmp_path)
    expected = Losses(plain)
    plain.train()
    trainer = trainer_of(tmp_path)
    precision = apply(trainer, recipe)
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
    precision = apply(trainer, recipe_of(Policy.MIXED_FLOAT16))
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


def overflow_in(model: Classifier, steps: list[int]) -> None:
    def overflow(grad: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        return torch.full_like(grad, torch.inf) if len(steps) in OVERFLOWS else grad

    model.net.head.bias.register_hook(overflow)


def test_overflows_are_skipped_by_scale_and_scheduler(tmp_path: Path) -> None:
    recipe = recipe_of(Policy.MIXED_FLOAT16, accumulation_steps=1, loss_scale=SCALE)
    trainer = trainer_of(
        tmp_path, gradient_accumulation_steps=1, max_steps=10, lr_scheduler_type="linear"
    )
    precision = apply(trainer, recipe)
    scales: list[float] = []
    overflow_in(trainer.model, [])

    class Look(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            scales.append(precision.scaler.get_scale())

    trainer.add_callback(Look())
    with pytest.warns(AutoprecWarning, match="256, its floor"):
        trainer.train()
    assert scales == SCALES
    assert precision.skipped == 4
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


def texts(count: int = 32) -> list[dict[str, list[int]]]:
    """Sequences whose numbers of valid labels differ much, as questions and answers do."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(0, 50, (40,), generator=generator).tolist()
        valid = (38, 3, 20, 5, 30, 2, 11, 4)[number // 4 % 8]
        found.append({"input_ids": ids, "labels": [-100] * (40 - valid) + ids[40 - valid :]})
    return found


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=40, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("with_function", [False, True])
def test_split_updates_weigh_tokens_as_whole_ones_do(tmp_path: Path, with_function: bool) -> None:
    """8 micro-batches of 4 against one of 32; the mean of their means would be another gradient."""
    gradients = []

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    for batch, steps in ((32, 1), (4, 8)):
        trainer = Trainer(
            model=language_model(),
            args=arguments(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=32,
                gradient_accumulation_steps=1,
                max_grad_norm=0.0,
                seed=1,
            ),
            train_dataset=texts(),
            compute_loss_func=loss_of if with_function else None,
        )
        accepted = trainer.model_accepts_loss_kwargs
        apply(trainer, Recipe(batch_size=batch, accumulation_steps=steps))
        assert trainer.model_accepts_loss_kwargs is accepted
        found = keep_gradients(trainer)
        trainer.train()
        gradients.append(found)
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    assert difference(naive(texts()), gradients[0]) > 0.05


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
