"""One layer that takes as long as it is told to, for each precision, and what trains it on digits.

A pretended device shows no speed of its own. This one waits for its host below batch 256, and for
larger batches as much longer as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import digits
import torch
from torch import Tensor, nn

#: Samples whose step takes as long as the host needs for it.
BUSY_FROM = 256


class Asleep(nn.Module):
    """Sleeps `seconds` (by dtype, of a step at batch 256) in each forward pass.

    In what `broken` is autocast to it computes something else than in float32.
    """

    def __init__(self, seconds: Mapping[torch.dtype, float], *broken: torch.dtype) -> None:
        super().__init__()
        self.seconds, self.broken = seconds, broken
        self.layer = nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        kind = images.device.type
        low = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if low else torch.float32
        host = self.seconds[torch.float32] if len(images) < BUSY_FROM else 0.0
        time.sleep(max(host, self.seconds[dtype] * len(images) / BUSY_FROM))
        found: Tensor = self.layer(images)
        return found.flip(-1) * 3 if dtype in self.broken else found


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD has few operators, each of which takes a while on a pretended device."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def build_data(batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield digits, flat."""
    return digits.batches(batch_size, 64)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(outputs, targets)
