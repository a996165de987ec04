"""Task files with a fault in them, real workers to run them in, and a look at who survived."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, survivors

from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.task_source import TaskSource

SOUND = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel()

def build_data(batch_size):
    return []
"""

WriteTask = Callable[..., Path]
Start = Callable[..., Worker]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task file whose build_model runs `fault` first; `head` stands at module level."""

    def write(fault: str = "pass", head: str = "", name: str = "faulty_task") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(
            textwrap.dedent(head)
            + SOUND.replace(
                "    return SimulatedModel()",
                textwrap.indent(textwrap.dedent(fault).strip("\n"), "    ")
                + "\n    return SimulatedModel()",
            ),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def mark() -> str:
    """A value in the environment of every process that a test's workers start."""
    return uuid.uuid4().hex


@pytest.fixture
def start(mark: str) -> Iterator[Start]:
    """Start workers; afterwards none of them and nothing they started may be left."""
    made: list[Worker] = []

    def begin(task: Path, **settings: Any) -> Worker:
        environment = {MARK: mark, **settings.pop("environment", {})}
        made.append(Worker(WorkerSettings(TaskSource(task), environment=environment, **settings)))
        return made[-1]

    yield begin
    for worker in made:
        worker.kill()
    assert survivors(mark) == []
