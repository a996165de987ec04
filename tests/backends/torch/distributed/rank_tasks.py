"""Task files that one process trains, or several ranks; `evaluate` leaves the weights in a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoprec.workers.client import Worker
from autoprec.workers.rank_group import RankGroup

TASK = """
import torch
from torch import nn
{head}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

def build_model():
    return Net()

def build_data(batch_size):
    for _ in range(12):
        x = torch.randn(batch_size, 6)
        yield x, (x.sum(-1) > 0).long() + (x[:, 0] > 1).long()

loss_fn = nn.functional.cross_entropy

def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)

def evaluate(model):
    import os
    state = getattr(model, "module", model).state_dict()
    whole = {{name: getattr(t, "full_tensor", lambda: t)() for name, t in state.items()}}
    if os.environ.get("RANK", "0") == "0":
        torch.save(whole, {weights!r})
    return 0.0

{more}
"""

Start = Callable[..., Worker | RankGroup]


def write_task(path: Path, *, head: str = "", more: str = "") -> Path:
    """Write a task file; `more` may define its functions anew."""
    path.write_text(TASK.format(head=head, more=more, weights=str(path.with_suffix(".pt"))))
    return path


def weights_of(worker: Worker | RankGroup) -> dict[str, torch.Tensor]:
    """The weights that the last run of the task ended with."""
    found: dict[str, torch.Tensor] = torch.load(worker.settings.task.path.with_suffix(".pt"))
    return found


class RankTracer:
    """A `Tracer` whose calls go to workers."""

    def __init__(self, worker: Worker | RankGroup) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._worker.call, method)
