"""A task whose ranks exchange gradients over a slow link, simulated on one machine.

It makes the process group itself, as a task may. Where LINK_GB_PER_SECOND is set, every collective
goes through Gloo and then waits as long as its bytes would have taken over such a link; without it
Gloo is all there is. A small convolutional network: much arithmetic for few weights, so that
without the link hardly anything waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BATCH_SIZE = 64


class Arrived(dist._Work):
    """A collective that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class SlowLink(dist.ProcessGroup):
    """Gloo, and after each collective the time that its bytes take."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, rate: float
    ) -> None:
        super().__init__(rank, size)
        self._gloo, self._rate = dist.ProcessGroupGloo(store, rank, size, timeout), rate

    def getBackendName(self) -> str:  # noqa: N802 - torch's name for it
        return "slow_link"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Arrived:
        work = self._gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        return self._after(work, tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Arrived:
        return self._after(self._gloo.broadcast(tensors, opts), tensors, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> Arrived:
        work = self._gloo.allgather(outputs, tensors, opts or dist.AllgatherOptions())
        return self._after(work, tensors, outputs)

    def barrier(self, opts: Any = None) -> Arrived:
        return self._after(self._gloo.barrier(opts or dist.BarrierOptions()), (), [])

    def _after(self, work: Any, sent: Sequence[torch.Tensor], result: Any) -> Arrived:
        work.wait()
        time.sleep(sum(each.numel() * each.element_size() for each in sent) / self._rate)
        return Arrived(result)


def join(gigabytes_per_second: str | None) -> None:
    """Make the process group from the environment that every rank finds."""
    if gigabytes_per_second is None:
        dist.init_process_group("gloo")
        return
    rate = 1e9 * float(gigabytes_per_second)
    dist.Backend.register_backend(
        "slow_link", lambda *place: SlowLink(*place, rate=rate), devices=["cpu"]
    )
    dist.init_process_group("slow_link")


if "RANK" in os.environ:
    join(os.environ.get("LINK_GB_PER_SECOND"))


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        targets = torch.randint(10, (batch_size,), generator=generator)
        noise = torch.randn(batch_size, 3, 16, 16, generator=generator)
        yield noise + targets[:, None, None, None] / 5, targets


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
