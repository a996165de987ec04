"""A task of a compiled Keras model and what its `fit` is given.

Every model that is built is a clone with the same weights, frozen layers, and arguments of
`compile`; its optimizer and its metrics are made anew of their own configurations. The model itself
is never trained.
"""

from __future__ import annotations

from typing import Any

import keras

from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.apply.optimizer_saving import innermost_optimizer
from autoprec.backends.keras.capture_clones import TASK_FILE, Clones
from autoprec.backends.keras.capture_data import batches_of
from autoprec.backends.keras.train.data import iterate
from autoprec.backends.keras.train.task_runner import make_variables
from autoprec.backends.protocol import Task
from autoprec.errors import UsageError


def from_keras(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    *,
    name: str,
    **of_fit: Any,
) -> Task:
    """Make a task of what `model.fit(x, y, sample_weight=..., batch_size=..., ...)` would train.

    `of_fit` are those of its other arguments that `batches_of` knows. Raises `UsageError` for what
    cannot be tuned as it is, `TaskError` for a model that cannot be cloned; both say the way out.
    """
    _refuse(name, model)
    data = batches_of(x, y, sample_weight, batch_size, name, **of_fit)
    steps = innermost_optimizer(model.optimizer).gradient_accumulation_steps or 1
    task = Task(
        name=name,
        build_model=lambda: None,
        build_data=data.build,
        batch_size=None if data.own is None else data.own * (1 if data.fixed else steps),
        fixed_batch=data.fixed,
    )
    batch = next(iterate(task, data.build(data.own or 1), data.own or 1))
    if not model.built or not model.weights:
        make_variables(model, batch)
    return Task(**{**vars(task), "build_model": Clones(name, model, batch).build})


def _refuse(name: str, model: Any) -> None:
    def refuse(what: str, instead: str) -> None:
        raise UsageError(f"{name}: {what}. {instead[0].upper()}{instead[1:]}")

    kind = type(model).__name__
    if not isinstance(model, keras.Model):
        refuse(f"the model is a {kind}, expected a compiled keras.Model", "give that")
    if not getattr(model, "compiled", False):
        refuse(f"the {kind} is not compiled", "call model.compile(optimizer=..., loss=...) first")
    if type(model).compile is not keras.Model.compile or len(optimizers_of(model)) != 1:
        refuse(
            f"the {kind} has several optimizers or a compile() of its own, as GANs do, and a clone "
            "of it cannot be compiled by what compile() was given",
            f"{TASK_FILE} and compiles it",
        )
