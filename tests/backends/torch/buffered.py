"""Small models that keep state in buffers, in the ways modules do, and steps that overflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.precision import Precision

TOO_LARGE = 1e6  # finite in float32, infinite in float16
Batch = tuple[torch.Tensor, torch.Tensor]


class Averages(nn.Module):
    """Averages of its inputs, in all the ways in which modules keep such a thing."""

    in_place: torch.Tensor
    through_data: torch.Tensor
    replaced: torch.Tensor
    both: torch.Tensor
    last: torch.Tensor | None
    count: torch.Tensor
    started: torch.Tensor
    largest: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(size))
        self.register_buffer("through_data", torch.zeros(size), persistent=False)
        self.register_buffer("replaced", torch.zeros(size))
        self.register_buffer("both", torch.zeros(size))
        self.register_buffer("last", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().float().mean(0)
            self.in_place.lerp_(seen, 0.1)
            self.through_data.data.mul_(0.9).add_(seen)
            self.replaced = 0.9 * self.replaced + seen
            self.both.mul_(0.9)
            self.both = self.both + seen
            self.last = seen
            self.count += 1
            self.started.fill_(True)
            torch.maximum(self.largest, seen.max(), out=self.largest)
        return x


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def averages() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), Averages(8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)
    )


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), Averages(8), nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "averages": averages,
    "spectral": spectral,
}


def samples(count: int, overflowing: Sequence[int] = ()) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        inputs = torch.randn(8, 6, generator=generator)
        if index in overflowing:
            inputs[3] = TOO_LARGE
        found.append((inputs, torch.randint(3, (8,), generator=generator)))
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.{name}": None if tensor is None else tensor.clone()
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
    }


def unchanged(model: nn.Module, before: dict[str, torch.Tensor | None]) -> bool:
    now = state(model)
    return now.keys() == before.keys() and all(
        tensor is before[name] is None or (tensor is not None and torch.equal(tensor, before[name]))  # type: ignore[arg-type]
        for name, tensor in now.items()
    )


def finite(model: nn.Module) -> bool:
    return all(bool(b.isfinite().all()) for b in model.buffers() if not b.isneginf().all())


def step(precision: Precision, model: nn.Module, batch: Batch) -> bool:
    with precision.autocast():
        outputs = model(batch[0])
    precision.backward(nn.functional.cross_entropy(outputs, batch[1]))
    return precision.step()


def plain_amp(precision: Precision, call: Any, optimizer: Any, batch: Batch) -> None:
    """Take a step by the lines of torch's own documentation."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(call(batch[0]).float(), batch[1])
    precision.scaler.scale(loss).backward()
    precision.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    precision.scaler.step(optimizer)
    precision.scaler.update()
