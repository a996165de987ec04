"""Runs a function in rank processes that have joined, and returns what each found."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from autoprec.backends.protocol import RankPlace
from autoprec.backends.torch.distributed.communication import join
from autoprec.workers.rank_group import _free_port

Work = Callable[[int], dict[str, Any]]

#: What the processes have imported before they are forked: for each anew it takes six seconds.
PRELOADED = ["autoprec.backends.torch.surgeon", "torch._dynamo", "torch.distributed.fsdp"]


def start(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in `count` processes; a failure of one is raised."""
    with pytest.MonkeyPatch.context() as patch:  # its socket outlives the tests' own folder
        patch.setattr("tempfile.tempdir", str(Path(tempfile.gettempdir()).parent))
        multiprocessing.util.get_temp_dir()
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(
        work, args=arguments, nprocs=count, start_method="forkserver"
    )


def on_two_ranks(work: Work, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `work(rank)` gave in each of two processes; a failure of one fails the test."""
    first, second = on_ranks(2, work, folder)
    return first, second


def on_ranks(count: int, work: Work, folder: Path) -> list[dict[str, Any]]:
    """Return what `work(rank)` gave in each of `count` processes."""
    start(count, _run, count, work, str(folder), _free_port())
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _run(rank: int, count: int, work: Work, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch.*")
    join(RankPlace(rank, rank, count, port=port))
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends while they still run
