"""The backend contract for the simulated backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contract import BackendContract, Subject
from simulated import SimulatedModel

from autoprec.backends import registry
from autoprec.backends.protocol import Task


def fail() -> SimulatedModel:
    raise ZeroDivisionError("the user's own")


class TestSimulated(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("simulated.py", SimulatedModel, lambda batch: [])
        return Subject(registry.load("simulated"), task, lambda: replace(task, build_model=fail))
