"""Builds a task's model with its vocabulary rounded, to time what that would bring.

It is another model, with more weights and more outputs, and nothing is trained with it: what is
measured is advice to whoever wrote the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task


def with_rounded_vocabulary(task: Task, size: int, rounded: int) -> Task:
    """Return the task with `rounded` words where its model has embeddings and outputs of `size`."""

    def build() -> Any:
        model = task.build_model()
        round_vocabulary(model, size, rounded)
        return model

    return replace(task, build_model=build, checkpoint=None)


def round_vocabulary(model: nn.Module, size: int, rounded: int) -> None:
    """Give every embedding and linear layer of `size` words or outputs `rounded` of them.

    Parameters that modules share are shared afterwards. Raises `ValueError` where there is none.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {nn.Embedding: "num_embeddings", nn.Linear: "out_features"}
    found = [
        (module, name)
        for module in model.modules()
        for kind, name in names.items()
        if isinstance(module, kind) and getattr(module, name) == size
    ]
    if not found:
        raise ValueError(f"the model has no embedding or linear layer of {size}")
    for module, name in found:
        setattr(module, name, rounded)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.shape[0] == size:
                if parameter not in made:
                    made[parameter] = _longer(parameter, rounded)
                setattr(module, key, made[parameter])


def _longer(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    """Return a parameter with zeros for the rows that were missing."""
    missing = parameter.new_zeros(rows - parameter.shape[0], *parameter.shape[1:])
    whole = torch.cat([parameter.detach(), missing])
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
