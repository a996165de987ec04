"""What else Hugging Face's Trainer is told trains under a profile as under its own bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from autoprec import Policy, Recipe
from autoprec.integrations.transformers import apply
from tests.integrations.trained import momentum
from tests.integrations.transformers_trainings import (
    Losses,
    arguments,
    language_model,
    texts,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

FEATURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gradient checkpointing": (language_model, texts, {"gradient_checkpointing": True}),
    "batches of like lengths": (
        language_model,
        texts,
        {"train_sampling_strategy": "group_by_length"},
    ),
    "smoothed labels": (language_model, texts, {"label_smoothing_factor": 0.1}),
    "an evaluation at first": (language_model, texts, {"eval_on_start": True}),
    "a compiled model": (
        language_model,
        texts,
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ),
}


def trained(
    feature: str, recipe: Recipe | None, folder: Path, **settings: Any
) -> tuple[list[float], Any, Any]:
    make, data, given = FEATURES[feature]
    told = arguments(
        folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        **given, **settings,
    )  # fmt: skip
    model = make()
    trainer = Trainer(
        model=model,
        args=told,
        train_dataset=data(),
        eval_dataset=data()[:8],
        optimizers=(momentum(model.parameters()), None),  # type: ignore[arg-type]
    )
    precision = apply(trainer, recipe, watch=False) if recipe else None
    losses = Losses(trainer)
    trainer.train()
    return losses.found, model.state_dict(), precision


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_trains_as_under_the_trainers_own_bf16(feature: str, tmp_path: Path) -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, accumulation_steps=2)
    own = trained(feature, None, tmp_path, bf16=True)
    ours = trained(feature, recipe, tmp_path)
    assert ours[0] == pytest.approx(own[0], rel=2e-3)
    for name, value in ours[1].items():
        torch.testing.assert_close(value, own[1][name], rtol=1e-2, atol=1e-3)
    assert ours[2].ran.problems(recipe) == ()
    plain = trained(feature, None, tmp_path)
    assert ours[0] != plain[0]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Batch texts of several lengths."""
    return {
        name: pad_sequence([torch.as_tensor(row[name]) for row in rows], batch_first=True)
        for name in ("input_ids", "labels")
    }


def test_what_is_generated_in_an_evaluation_is_computed_under_the_profile(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    data = [{"input_ids": each["input_ids"], "labels": each["input_ids"][:5]} for each in texts(8)]
    told = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", per_device_train_batch_size=4, max_steps=1,
        predict_with_generate=True, generation_max_length=4,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=model,
        args=told,
        train_dataset=data,
        eval_dataset=data,
        data_collator=padded,
    )
    island = "decoder.block.0.layer.0.SelfAttention.q"
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4, float32_modules=(island,))
    apply(trainer, recipe, watch=False)
    seen: dict[str, set[torch.dtype]] = {}
    for name in (island, "decoder.block.0.layer.0.SelfAttention.k"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, result, name=name: seen.setdefault(name, set()).add(result.dtype)
        )
    trainer.evaluate()
    assert seen == {island: {torch.float32}, island[:-1] + "k": {torch.bfloat16}}
    seen.clear()
    trainer.train()
    trainer.predict(data)
    assert seen == {island: {torch.float32}, island[:-1] + "k": {torch.bfloat16}}
