"""What a type checker knows of the public functions, and so what an editor completes.

`make types` checks this file, and nothing runs it. A mistake that the checker no longer sees is an
ignored error too many there.
"""

from __future__ import annotations

from typing import Any, Protocol, assert_type

import torch
from torch import nn

from autoprec import apply_profile, tune
from autoprec.backends.keras.apply.precision import Precision as KerasPrecision
from autoprec.backends.protocol import Precision
from autoprec.backends.torch.apply.precision import Precision as TorchPrecision


class Net(nn.Module):
    """A user's model."""


class LikeKeras(Protocol):
    """What is known of a Keras model, which has no types of its own."""

    def __call__(self, x: Any) -> Any: ...

    @property
    def trainable_variables(self) -> list[Any]: ...


def right(model: Net, optimizer: torch.optim.Optimizer, keras_model: LikeKeras) -> None:
    assert_type(apply_profile("p.yaml", model=model, optimizer=optimizer), TorchPrecision)
    assert_type(apply_profile("p.yaml", model=torch.compile(model)), TorchPrecision)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert_type(apply_profile("off", model=wrapped, optimizer=[optimizer]), TorchPrecision)
    assert_type(apply_profile("p.yaml", fallback="rules"), KerasPrecision)
    assert_type(apply_profile(None, model=keras_model, strict=True), KerasPrecision)
    with apply_profile("p.yaml", model=model) as precision:
        assert_type(precision, TorchPrecision)
        assert_type(precision.step(), bool)
    shared: Precision = precision
    shared = apply_profile("p.yaml")
    assert_type(shared.skipped, int)
    tune("task.py", policies=["bf16"], batch_sizes="16-64", output="p.yaml", trials=3)


def wrong(model: Net, precision: TorchPrecision) -> None:
    precision.bachward(torch.zeros(1))  # type: ignore[attr-defined]
    apply_profile("p.yaml", model=model, fallback="bf16")  # type: ignore[call-overload]
    tune("task.py", trails=3)  # type: ignore[call-arg]
    tune("task.py", trials="3")  # type: ignore[arg-type]
    tune(task="task.py", batch_sizes=64)  # type: ignore[arg-type]
