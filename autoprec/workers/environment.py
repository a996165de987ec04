"""The environment of worker processes: what a launcher sets in it, and what keeps workers quiet.

Rank processes find what torchrun would tell them of their place, so that a task file works in both.
What a launcher told the tuner itself is no worker's business: a process that believed it would wait
for ranks that never join.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from autoprec.backends import registry
from autoprec.backends.protocol import RankPlace
from autoprec.backends.shared.worker_process import WORKER

_OF_WORKERS = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", WORKER: "1"}

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

#: What else torchrun sets (torch.distributed.elastic.agent.server.local_elastic_agent).
_OTHER_VARIABLES = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)
_ELASTIC_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class OuterLauncher:
    """The place that a launcher gave to this process, among others that it started."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def one_machine(self) -> bool:
        """Return whether all of the launcher's processes run on this machine."""
        return self.local_world_size == self.world_size


def outer_launcher(environment: Mapping[str, str]) -> OuterLauncher | None:
    """Return the launcher that started this process; None if it started no others with it."""
    rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or world_size is None or world_size <= 1:
        return None
    local = _number(environment, "LOCAL_WORLD_SIZE")
    return OuterLauncher(rank, world_size, world_size if local is None else local)


def worker_environment(own: Mapping[str, str], *, scripts: bool = False) -> dict[str, str]:
    """Return a worker's environment: this process's, what frameworks want, and the worker's own.

    One that runs a whole training script finds its loggers switched off, and no display.
    """
    quiet = _silent_loggers() if scripts else {}
    environment = {**_without_launcher(os.environ), **_OF_WORKERS, **quiet}
    for known in registry.all_capabilities().values():
        environment |= known.environment
    return {**environment, **own}


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a script that runs as it is, with its trackers switched off."""
    return {**_without_launcher(environment), **_silent_loggers()}


def _silent_loggers() -> dict[str, str]:
    """Return what keeps experiment trackers from recording a run, and plots from opening."""
    return {
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"file:{tempfile.gettempdir()}/autoprec-mlflow",
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MPLBACKEND": "Agg",
    }


def _without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what a launcher told this process of its place."""
    named = {*_RANK_VARIABLES, *_OTHER_VARIABLES}
    return {
        name: value
        for name, value in environment.items()
        if name not in named and not name.startswith(_ELASTIC_PREFIX)
    }


def rank_environment(place: RankPlace) -> dict[str, str]:
    """Return the variables that torchrun would set for a process at this place, on one machine."""
    values = (
        place.rank,
        place.local_rank,
        place.world_size,
        place.world_size,
        place.address,
        place.port,
    )
    return dict(zip(_RANK_VARIABLES, map(str, values), strict=True))


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
