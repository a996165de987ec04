"""The fingerprint of what a script made: what it holds, and what it must not depend on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoprec.backends.protocol import Task
from autoprec.workers.captured_task import describe_captured, fingerprint_of, optimizer_of

WIDTH = 4


class AdamW:
    """An optimizer as PyTorch's are."""

    def __init__(self, lr: Any = 0.1, parameters: int = 2) -> None:
        self.param_groups = [{"params": [object()] * parameters, "lr": lr, "betas": (0.9, 0.99)}]


class Model:
    """A model as PyTorch's are."""

    def __init__(self, width: int = WIDTH, kind: str = "float32", *, frozen: bool = False) -> None:
        weight = np.zeros((width, 2), kind)
        self.weight = SimpleNamespace(
            shape=weight.shape, dtype=weight.dtype, requires_grad=not frozen
        )

    def named_parameters(self) -> Any:
        yield "weight", self.weight

    def named_buffers(self) -> Any:
        yield "mean", np.zeros(2, "float32")


def batch(samples: int, length: int = 3, kind: str = "float32") -> Any:
    return {"x": np.zeros((samples, length), kind), "rest": [1, np.zeros(samples, "int64")]}


def task(batches: Any = None, **fields: Any) -> Task:
    given = [batch(8), batch(8)] if batches is None else list(batches)
    drawn = Task("train.py", Model, lambda size: given, batch_size=8)
    return replace(drawn, **fields)


def mark(given: Task | None = None, **made: Any) -> str:
    made = {"model": Model(), "optimizer": AdamW(), "made_by": "lightning 2.6", **made}
    return fingerprint_of(given or task(), **made)


@pytest.mark.parametrize(
    "other",
    [
        lambda: mark(model=Model(5)),
        lambda: mark(model=Model(kind="float16")),
        lambda: mark(model=Model(frozen=True)),
        lambda: mark(optimizer=AdamW(0.2)),
        lambda: mark(optimizer=AdamW(np.array(0.2))),
        lambda: mark(optimizer=AdamW(parameters=3)),
        lambda: mark(optimizer=SimpleNamespace(get_config=lambda: {"lr": 1})),
        lambda: mark(made_by="lightning 2.7"),
        lambda: mark(task(batch_size=16)),
        lambda: mark(task(clip_grad_norm=1.0)),
        lambda: mark(task((batch(8, 4), batch(8, 4)))),
        lambda: mark(task((batch(8, kind="float64"),))),
        lambda: mark(task(({"y": 1},))),
        lambda: mark(task(())),
    ],
)
def test_what_makes_another_training_makes_another_fingerprint(other: Any) -> None:
    assert mark() == mark()
    assert other() != mark()


def test_a_padded_length_is_not_part_of_it() -> None:
    lengths = [(batch(8, one), batch(8, two)) for one, two in ((3, 4), (7, 5))]
    one, two = (mark(task(each)) for each in lengths)
    assert one == two != mark()


def test_what_cannot_be_drawn_is_left_to_the_first_step() -> None:
    def fails(size: int) -> Any:
        raise OSError("no such file")

    assert mark(task(build_data=fails)) == mark(task(()))


def test_a_keras_model_has_its_optimizer_itself() -> None:
    weight = SimpleNamespace(path="dense/kernel", shape=(2, 3), dtype="float32")
    model = SimpleNamespace(weights=[weight], optimizer=SimpleNamespace(get_config=dict))
    assert optimizer_of(task(), model) is model.optimizer
    before = mark(model=model, optimizer=model.optimizer)
    weight.shape = (2, 4)
    assert mark(model=model, optimizer=model.optimizer) != before


def test_it_is_said_in_a_few_words() -> None:
    made = optimizer_of(task(build_optimizer=lambda model: AdamW()), Model())
    assert describe_captured(task(), made) == "batch 8, AdamW"
    assert describe_captured(task(batch_size=None), made) == "AdamW"
