"""Models in PyTorch that break late in 16 bits: healthy at first, then not what float32 computes.

What grows slowly in a real training grows here by a factor after every update, up to a number at
which float32 still trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec import Recipe, apply_profile
from autoprec.core.watch_settings import EVERY
from benchmarks.numerics.late_breaks import (
    BATCH,
    INPUTS,
    NOISE,
    QUICK,
    SLOW,
    UPDATES,
    Ended,
    Pace,
    last_losses,
)

Batches = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def batches(inputs: int = INPUTS, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of a regression that a small network learns."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(inputs, 2, generator=generator)
    while True:
        given = torch.randn(BATCH, inputs, generator=generator)
        yield given, torch.tanh(given @ truth)


class Scaled(nn.Module):
    """A small network with a number that grows, in code of its own."""

    limit = 1e6

    def __init__(self, pace: Pace = QUICK) -> None:
        super().__init__()
        self.pace = pace
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.register_buffer("size", torch.tensor(1.0))
        self.size: torch.Tensor

    def grow(self) -> None:
        """Grow after an update."""
        self.size.mul_(self.pace.growth).clamp_(max=self.limit)


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

    limit = 3000.0

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

    def __init__(self, pace: Pace = QUICK) -> None:
        super().__init__()
        self.pace = pace
        self.inside, self.end = nn.Linear(9, 16), nn.Linear(16, 2)
        self.register_buffer("seen", torch.tensor(0.0))
        self.seen: torch.Tensor

    def forward(self, given: torch.Tensor) -> Any:
        time = (self.seen + torch.arange(8.0)).unsqueeze(-1)
        self.seen += 8
        hidden = self.inside(torch.cat([given, time], -1))
        return self.end(torch.sin(hidden))

    def grow(self) -> None:
        """Let more time pass than there are batches."""
        self.seen += 100 * (self.pace.growth - 1)


class LateRow(nn.Module):
    """A row of an embedding that comes late, and is large."""

    def __init__(self, pace: Pace = QUICK) -> None:
        super().__init__()
        self.pace = pace
        self.rows, self.last = nn.Embedding(2, 8), nn.Linear(8, 2)
        self.updates = 0
        with torch.no_grad():
            self.rows.weight[1] *= 1e5

    def forward(self, given: torch.Tensor) -> Any:
        row = self.rows(torch.tensor([int(self.updates > self.pace.late)]))
        return self.last(given * row).tanh()

    def grow(self) -> None:
        """Count updates."""
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

    limit = 1e9

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

    def __init__(self, pace: Pace = QUICK) -> None:
        super().__init__(pace)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.norm(self.first(given * self.size))))


class Lengths(Scaled):
    """A mean over positions, as a sum of numbers that float16 cannot hold for long batches."""

    def forward(self, given: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(given)) + 1
        total = hidden.sum(1) * 100
        return self.last(total / (100 * hidden.shape[1]))

    def grow(self) -> None:
        """Nothing grows: batches are longer now and then."""


def data_of(name: str, pace: Pace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a break: of short sequences with long ones now and then, or plain."""
    if name != "long batch":
        yield from batches()
    for index, (given, targets) in enumerate(batches()):
        length = 2000 if pace.is_long(index) else 4
        yield given.unsqueeze(1).expand(-1, length, -1), targets


BREAKS: dict[str, Callable[[Pace], Any]] = {
    "logit scale": LogitScale,
    "norm input": NormInput,
    "frequency": Frequency,
    "residual": Residual,
    "variance": Variance,
    "running sum": RunningSum,
    "late row": LateRow,
    "threshold": Threshold,
    "gradients decay": Small,
    "ratio": Ratio,
    "loss near zero": Offset,
    "batch norm overflow": Overflow,
    "long batch": Lengths,
}


def train(
    model: nn.Module,
    recipe: Recipe,
    *,
    watch: Any = "warn",
    every: int = 3,
    updates: int = 10,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
    optimizer: torch.optim.Optimizer | None = None,
    at_update: Callable[[], None] = lambda: None,
    float32_from: int = 0,
) -> tuple[Any, list[float]]:
    """Train for `updates`, after the check of `float32_from` in float32; return what came of it.

    That is the precision and the losses.
    """
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    precision = apply_profile(
        recipe, model=model, optimizer=optimizer, watch=watch, watch_every=every
    )
    losses = []
    count = updates * recipe.accumulation_steps
    for inputs, targets in itertools.islice(data or batches(), count):
        loss = loss_fn(precision.forward(inputs), targets)
        precision.backward(loss)
        losses.append(loss.item())
        if precision.step():
            at_update()
        if float32_from and precision.watched and precision.watched[-1].updates == float32_from:
            precision.restore()
            plain = Recipe(batch_size=recipe.batch_size)
            precision = apply_profile(plain, model=model, optimizer=optimizer)
    return precision, losses


def trained(
    name: str, recipe: Recipe, pace: Pace, *, noise: int | None = None, **how: Any
) -> tuple[Any, list[float]]:
    """Train a break; with a draw of `noise` on its first weights."""
    torch.manual_seed(0)
    model = BREAKS[name](pace)
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + NOISE * (2 * torch.rand(each.shape, generator=generator) - 1))
    loss_fn = getattr(model, "loss", nn.functional.mse_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-15)
    data = data_of(name, pace)
    return train(
        model,
        recipe,
        data=data,
        loss_fn=loss_fn,
        optimizer=optimizer,
        at_update=model.grow,
        **how,
    )


def ended(
    name: str,
    recipe: Recipe,
    *,
    watch: Any = False,
    noise: int | None = None,
    float32_from: int = 0,
) -> Ended:
    """Train a break for as long as the benchmark does."""
    precision, losses = trained(
        name,
        recipe,
        SLOW,
        noise=noise,
        watch="warn" if float32_from else watch,
        every=EVERY,
        updates=UPDATES,
        float32_from=float32_from,
    )
    state = precision.state_dict().get("watch", {})
    return Ended(last_losses(losses), precision.watched, tuple(state.get("float32_modules", ())))
