"""A task file of the simulated backend, and workers that are ended after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.tuning.remote import Worker, WorkerSettings

TASK = """
from autoprec.backends.simulated import SimulatedModel

def build_model():
    return SimulatedModel({arguments})

def build_data(batch_size):
    return []
"""


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    """Write a task file whose model has these fields."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "simulated_task.py"
        arguments = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        path.write_text(TASK.format(arguments=arguments), encoding="utf-8")
        return path

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Start workers that are ended after the test."""
    made: list[Worker] = []

    def begin(task: Path, **settings: Any) -> Worker:
        made.append(Worker(WorkerSettings(task, **settings)))
        return made[-1]

    yield begin
    for worker in made:
        worker.kill()
