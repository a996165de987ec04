"""A Hugging Face Trainer is the task that a task file would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from autoprec.backends.capture import task_of
from autoprec.backends.protocol import Task
from autoprec.errors import UsageError
from autoprec.workers.sent_objects import receive, sent
from tests.backends.torch.capture.captured import BATCHES, first_loss
from tests.integrations.trained import images, momentum, net
from tests.integrations.transformers_trainings import (
    Classifier,
    arguments,
    samples,
    trainer_of,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state"),
    pytest.mark.filterwarnings("default"),
]


def captured(folder: Path, **settings: Any) -> Task:
    return task_of(trainer_of(folder, **settings), name="train.py:build")


def written_task() -> Task:
    """The task file that does what the Trainer does."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"])

    pixels, targets = images(64)
    rows = [{"pixels": p, "labels": t} for p, t in zip(pixels, targets, strict=True)]
    return Task(
        name="task.py",
        build_model=lambda: net(0.0),
        build_data=lambda size: DataLoader(rows, batch_size=size, shuffle=True),
        training_step=step,
        build_optimizer=lambda model: momentum(model.parameters()),
    )


@pytest.mark.parametrize("batch_size", BATCHES)
def test_the_first_loss_is_that_of_the_task_file(tmp_path: Path, batch_size: int) -> None:
    assert first_loss(captured(tmp_path), batch_size) == pytest.approx(
        first_loss(written_task(), batch_size), rel=1e-6
    )


def test_a_trainer_travels_as_it_is(tmp_path: Path) -> None:
    with sent(trainer_of(tmp_path), tmp_path) as path:
        assert path.name == "classifier.pickle"
        task = task_of(receive(path), name="classifier")
    assert first_loss(task, 16) == first_loss(captured(tmp_path), 16)


def test_clip_batch_and_the_optimizers_groups_are_the_tasks(tmp_path: Path) -> None:
    task = captured(tmp_path, max_grad_norm=0.6, weight_decay=0.1, warmup_steps=10)
    assert (task.clip_grad_norm, task.batch_size) == (0.6, 16)
    assert task.build_optimizer is not None
    optimizer = task.build_optimizer(task.build_model())
    assert [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [(0.1, 0.1), (0, 0.1)]
    assert not list(tmp_path.iterdir())  # no output folder is made, and nothing written


def test_an_optimizer_that_was_given_is_taken(tmp_path: Path) -> None:
    model = Classifier()
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=samples(32),
        optimizers=(momentum(model.net.head.parameters()), None),
    )
    task = task_of(trainer, name="task")
    copied = task.build_model()
    assert task.build_optimizer is not None
    trained = task.build_optimizer(copied).param_groups[0]["params"]
    assert [id(each) for each in trained] == [id(each) for each in copied.net.head.parameters()]


def test_labels_that_the_loss_takes_out_are_there_again(tmp_path: Path) -> None:
    task = captured(tmp_path)
    [batch] = [next(iter(task.build_data(8)))]
    kept = dict(batch)
    assert task.training_step is not None
    task.training_step(task.build_model(), batch)
    assert batch.keys() == kept.keys()


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called")


class GRPOTrainer(Trainer):
    """As TRL's is called."""


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (OwnStep, {}, "compute the loss in compute_loss"),
        (GRPOTrainer, {}, "generates what it trains on"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_way_out(
    tmp_path: Path, kind: type[Trainer], settings: dict[str, Any], message: str
) -> None:
    trainer = kind(
        model=Classifier(), args=arguments(tmp_path, **settings), train_dataset=samples(8)
    )
    with pytest.raises(UsageError) as caught:
        task_of(trainer, name="task")
    assert message.lower() in str(caught.value).lower()
