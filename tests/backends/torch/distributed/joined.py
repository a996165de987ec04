"""Runs a function in two rank processes that have joined, and returns what each found."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from autoprec.backends.protocol import RankPlace
from autoprec.backends.torch.distributed.communication import join
from autoprec.workers.rank_group import _free_port

Work = Callable[[int], dict[str, Any]]


def on_two_ranks(work: Work, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `work(rank)` gave in each of two processes; a failure of one fails the test."""
    arguments = (work, str(folder), _free_port())
    torch.multiprocessing.start_processes(_run, args=arguments, nprocs=2, start_method="spawn")
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2))
    return first, second


def _run(rank: int, work: Work, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch.*")
    join(RankPlace(rank, rank, 2, port=port))
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends while they still run
