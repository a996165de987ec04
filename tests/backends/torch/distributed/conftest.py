from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, survivors

from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.rank_group import RankGroup, start_workers
from autoprec.workers.task_source import TaskSource
from tests.backends.torch.distributed.rank_tasks import Start, write_task


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Start]:
    """Start the workers of a task; none of their processes may be left after the test."""
    made: list[Worker | RankGroup] = []
    mark = f"ranks-{os.getpid()}-{time.monotonic_ns()}"

    def begin(nproc: int, engine: Any = "ddp", **parts: str) -> Any:
        task = write_task(tmp_path / f"task_{len(made)}.py", **parts)
        environment = {MARK: mark, "OMP_NUM_THREADS": "1"}
        made.append(
            start_workers(
                WorkerSettings(
                    TaskSource(task), nproc=nproc, engine=engine, environment=environment
                )
            )
        )
        made[-1].load()
        return made[-1]

    yield begin
    for each in made:
        each.kill()
    assert survivors(mark) == []
