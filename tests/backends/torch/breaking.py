"""Models that break late in 16 bits: healthy at first, and then no longer what float32 computes.

What grows slowly in a real training grows here by a factor after every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoprec import Recipe
from autoprec.core.recipe import LossScale
from tests.backends.torch.watched import BFLOAT16, FLOAT16, Batches, batches

FIXED = replace(FLOAT16, loss_scale=LossScale(mode="fixed", initial=2.0**4, floor=1.0))


class Scaled(nn.Module):
    """A small network with a number that grows, in code of its own."""

    limit = 1e9

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.register_buffer("size", torch.tensor(1.0))
        self.size: torch.Tensor

    def grow(self, factor: float) -> None:
        self.size.mul_(factor).clamp_(max=self.limit)


class LogitScale(Scaled):
    """Scores that are scaled more and more, until float16 overflows."""

    def forward(self, given: torch.Tensor) -> Any:
        scores = self.first(given) * self.size
        return self.last(torch.softmax(scores, -1) * given.mean(-1, keepdim=True))


class NormInput(Scaled):
    """A norm of one's own, whose squares overflow float16."""

    def forward(self, given: torch.Tensor) -> Any:
        hidden = self.first(given) * self.size
        return self.last(hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


class Frequency(Scaled):
    """A learned frequency: an angle of hundreds has no digits left of one."""

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.sin(self.first(given * self.size)))


class Residual(Scaled):
    """A residual stream with an offset, which a norm takes away again."""

    limit = 300.0

    def forward(self, given: torch.Tensor) -> Any:
        stream = self.first(given) + self.size
        return self.last(nn.functional.layer_norm(stream, (16,)))


class Variance(Scaled):
    """The variance as a difference of two large numbers."""

    limit = 20.0

    def forward(self, given: torch.Tensor) -> Any:
        hidden = self.first(given) + self.size
        mean = hidden.mean(-1, keepdim=True)
        variance = hidden.square().mean(-1, keepdim=True) - mean.square()
        return self.last((hidden - mean) / (variance.abs() + 1e-2).sqrt())


class RunningSum(nn.Module):
    """Time as a count of what was seen, in bfloat16 beyond 256."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.end = nn.Linear(9, 16), nn.Linear(16, 2)
        self.register_buffer("seen", torch.tensor(0.0))
        self.seen: torch.Tensor

    def forward(self, given: torch.Tensor) -> Any:
        time = (self.seen + torch.arange(8.0)).unsqueeze(-1)
        self.seen += 8
        hidden = self.inside(torch.cat([given, time], -1))
        return self.end(torch.sin(hidden))

    def grow(self, factor: float) -> None:
        self.seen += 40


class LateRow(nn.Module):
    """A row of an embedding that comes late, and is large."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(2, 8), nn.Linear(8, 2)
        self.updates = 0
        with torch.no_grad():
            self.rows.weight[1] *= 1e5

    def forward(self, given: torch.Tensor) -> Any:
        row = self.rows(torch.tensor([int(self.updates > 8)]))
        return self.last(given * row).tanh()

    def grow(self, factor: float) -> None:
        self.updates += 1


class Threshold(Scaled):
    """A choice by scores that differ by less than a digit of theirs."""

    limit = 300.0

    def forward(self, given: torch.Tensor) -> Any:
        scores = self.first(given) + self.size
        chosen = (scores > scores.float().mean(-1, keepdim=True)).to(scores.dtype)
        return self.last(chosen * (scores - self.size))


class Small(Scaled):
    """A network whose loss is divided by what grows, so that its gradients decay."""

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(given)))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets) / self.size


class Ratio(Scaled):
    """PPO's ratio of an action's probabilities, under a policy that becomes certain."""

    limit = 3000.0

    def forward(self, given: torch.Tensor) -> Any:
        mean, drawn = self.mean(given), given[:, :2]
        with torch.no_grad(), torch.autocast(given.device.type, enabled=False):
            action = self.mean(given) + (0.2 + drawn) / self.size  # by a policy that is a bit older
        now = ((action - mean.float()) * self.size).square()
        return torch.exp((drawn.square() - now).sum(-1, keepdim=True) / 2)

    def mean(self, given: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(given)))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        advantages = targets[:, :1] - targets[:, :1].mean()
        clipped = outputs.clamp(0.8, 1.2)
        return -torch.minimum(outputs * advantages, clipped * advantages).mean()


class Offset(Scaled):
    """A target that is mostly an offset: once that is learned, the loss is near zero."""

    limit = 500.0

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(given))) + self.size

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets + self.size)


class Overflow(Scaled):
    """A batch norm whose input overflows, and with it the statistics of its batch."""

    limit = 1e7

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.norm(self.first(given * self.size))))


class Lengths(Scaled):
    """A mean over positions, as a sum of numbers that float16 cannot hold for long batches."""

    def forward(self, given: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(given)) + 1
        total = hidden.sum(1) * 100
        return self.last(total / (100 * hidden.shape[1]))

    def grow(self, factor: float) -> None:
        """Nothing grows: batches are longer now and then."""


def long_now_and_then() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of short sequences, after a while one in seven of which is long."""
    for index, (given, targets) in enumerate(batches()):
        length = 2000 if index > 8 and index % 7 == 0 else 4
        yield given.unsqueeze(1).expand(-1, length, -1), targets


BREAKS: dict[str, tuple[Callable[[], Any], Recipe]] = {
    "logit scale": (LogitScale, FLOAT16),
    "norm input": (NormInput, FLOAT16),
    "frequency": (Frequency, BFLOAT16),
    "residual": (Residual, BFLOAT16),
    "variance": (Variance, BFLOAT16),
    "running sum": (RunningSum, BFLOAT16),
    "late row": (LateRow, FLOAT16),
    "threshold": (Threshold, BFLOAT16),
    "gradients decay": (Small, FIXED),
    "ratio": (Ratio, BFLOAT16),
    "loss near zero": (Offset, BFLOAT16),
    "batch norm overflow": (Overflow, FLOAT16),
    "long batch": (Lengths, FLOAT16),
}
DATA: dict[str, Batches] = {"long batch": long_now_and_then}
