"""Joins the ranks of a job, and agrees with them on plain numbers.

Numbers are exchanged through Gloo in main memory, whatever moves the gradients: it costs a
millisecond and makes no device wait.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from autoprec.backends.protocol import RankPlace
from autoprec.backends.shared.ranks import Ranks
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError

_LOOPBACK = "127.0.0.1"


class Communication:
    """The ranks of one job, as one of them sees them. Every method is called by all of them."""

    def __init__(self, place: RankPlace, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._place, self._group = place, group

    def mean(self, value: float) -> float:
        """Return the mean over the ranks."""
        return self._reduced([value], dist.ReduceOp.SUM)[0] / self.world_size

    def largest(self, value: float) -> float:
        """Return the largest value of any rank."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def largest_each(self, values: Sequence[float]) -> list[float]:
        """Return the largest first value of any rank, the largest second one, and so on."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, operation, group=self._group)
        result: list[float] = tensor.tolist()
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of their ranks."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def require_same(self, recipe: Recipe) -> None:
        """Raise `UsageError` on every rank unless all are about to run the same recipe."""
        own = hashlib.sha256(recipe.key().encode()).hexdigest()[:16]
        found = self.gather(own)
        if len(set(found)) > 1:
            raise UsageError(
                "the ranks were given different recipes ("
                + ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(found))
                + "), expected the same on all of them"
            )

    def ranks(self) -> Ranks:
        """Return what the code that all frameworks share needs of this."""
        float32 = Distributed(self._place.engine, self.world_size)
        return Ranks(self.rank, self.world_size, float32, self.largest)


@cache
def join(place: RankPlace) -> Communication:
    """Join the other ranks, once a process; a group that the task made already is used.

    Raises `UsageError` where that group is not the job's.
    """
    if not dist.is_available():
        raise UsageError(
            "this build of PyTorch is without torch.distributed, which ranks need; install one "
            "from https://pytorch.org/get-started/locally"
        )
    if dist.is_initialized():
        return Communication(place, _group_in_main_memory(place))
    if place.address == _LOOPBACK and sys.platform == "linux":
        # Gloo would take the interface of the host's name, which may be none.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        _backends(),
        init_method=f"tcp://{place.address}:{place.port}",
        rank=place.rank,
        world_size=place.world_size,
    )
    atexit.register(_leave)
    return Communication(place)


def _backends() -> str:
    """Return which library reduces on which kind of device: Gloo in main memory."""
    found = ["cpu:gloo"]
    if torch.cuda.is_available():
        found.append("cuda:nccl" if dist.is_nccl_available() else "cuda:gloo")
    if torch.xpu.is_available() and dist.is_xccl_available():
        found.append("xpu:xccl")
    return ",".join(found)


def _group_in_main_memory(place: RankPlace) -> dist.ProcessGroup | None:
    """Return the task's own group if Gloo is in it (None: the default), else one beside it."""
    found = (dist.get_rank(), dist.get_world_size())
    if found != (place.rank, place.world_size):
        raise UsageError(
            f"the task's own init_process_group made this process rank {found[0]} of {found[1]}, "
            f"expected rank {place.rank} of {place.world_size}; give it no rank and no world_size: "
            "the environment (RANK, WORLD_SIZE) has them"
        )
    if "gloo" in str(dist.get_backend_config()):
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
