"""One short training by each trainer, under a profile or under the trainer's own precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from autoprec import Recipe
from autoprec.integrations.accelerate import bind
from autoprec.integrations.lightning import fabric_plugin, plugin
from autoprec.integrations.transformers import apply
from tests.integrations.lightning_modules import fabric_of, module_of, trainer_of
from tests.integrations.trained import images, loader, momentum

Training = Callable[..., tuple[list[float], Any]]


def by_lightning(
    model: nn.Module, recipe: Recipe | None, folder: Path, samples: int, **settings: Any
) -> tuple[list[float], Any]:
    made = plugin(recipe, package="lightning", **settings) if recipe else None
    lit = module_of("lightning", model)
    own = {} if made else {"precision": "bf16-mixed"}
    trainer = trainer_of("lightning", made, max_epochs=1, default_root_dir=folder, **own)
    trainer.fit(lit, loader(samples, 8))
    return lit.losses, made


def by_fabric(
    model: nn.Module, recipe: Recipe | None, folder: Path, samples: int, **settings: Any
) -> tuple[list[float], Any]:
    made = fabric_plugin(recipe, package="lightning", **settings)
    fabric = fabric_of("lightning").Fabric(accelerator="cpu", devices=1, plugins=[made])
    module, optimizer = fabric.setup(model, momentum(model.parameters()))
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(loader(samples, 8), 1):
        torch.manual_seed(len(losses))
        loss = nn.functional.cross_entropy(module(inputs), targets)
        losses.append(loss.item())
        fabric.backward(loss / made.accumulation_steps)
        if number % made.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, made


def by_accelerate(
    model: nn.Module, recipe: Recipe | None, folder: Path, samples: int, **settings: Any
) -> tuple[list[float], Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=settings.pop("flag", None))
    precision = bind(accelerator, recipe, **settings) if recipe else None
    model, optimizer, batches = accelerator.prepare(
        model, momentum(model.parameters()), loader(samples, 8)
    )
    losses: list[float] = []
    for inputs, targets in batches:
        torch.manual_seed(len(losses))
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses, precision


class WithLoss(nn.Module):
    """A model as the Trainer wants it, which returns its loss."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.losses = inside, list[float]()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        torch.manual_seed(len(self.losses))
        logits = self.inside(pixels)
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def by_the_trainer(
    model: nn.Module, recipe: Recipe | None, folder: Path, samples: int, **settings: Any
) -> tuple[list[float], Any]:
    from transformers import Trainer, TrainingArguments

    whole = WithLoss(model)
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", per_device_train_batch_size=8, num_train_epochs=1,
        gradient_accumulation_steps=recipe.accumulation_steps if recipe else 1, max_grad_norm=0.0,
        bf16=settings.pop("flag", None) == "bf16",
    )  # fmt: skip
    data = [
        {"pixels": pixels, "labels": target}
        for pixels, target in zip(*images(samples), strict=True)
    ]
    trainer = Trainer(
        model=whole,
        args=arguments,
        train_dataset=data,
        optimizers=(momentum(whole.parameters()), None),
    )
    trainer._get_train_sampler = lambda *_: SequentialSampler(data)
    precision = apply(trainer, recipe, **settings, part="inside") if recipe else None
    trainer.train()
    return whole.losses, precision
