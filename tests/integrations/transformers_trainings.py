"""Trainers of Hugging Face with small models, as their documentation makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.integrations.trained import images, net


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
    """Keeps the losses of a Trainer's micro-batches, and the batches where it is given a list."""

    def __init__(self, trainer: Trainer, batches: list[Any] | None = None) -> None:
        self.found: list[float] = []
        self.batches = batches
        self.own = trainer.training_step
        trainer.training_step = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.batches is not None:
            self.batches.append(dict(args[1]))
        loss = self.own(*args, **kwargs)
        self.found.append(loss.item())
        return loss


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
