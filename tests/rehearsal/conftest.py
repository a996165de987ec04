"""Machines with pretended accelerators, each with a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rehearsal import Rehearsal, stop_servers
from rehearsal.jobs import Tuned, running


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    stop_servers()


@pytest.fixture
def rehearse(tmp_path: Path) -> Callable[..., Rehearsal]:
    """Make a machine: `rehearse("cuda", gpus=[...], faults=[...])`."""

    def machine(kind: str = "cuda", **settings: Any) -> Rehearsal:
        return Rehearsal(tmp_path, kind, **settings)

    return machine


@pytest.fixture(scope="module")
def tunings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Tuned]]]:
    """The outcomes of the module's JOBS, which run in their order while its tests do."""
    with running(request.module.JOBS, tmp_path_factory) as outcomes:
        yield outcomes


@pytest.fixture
def tuned(tunings: Mapping[str, Future[Tuned]]) -> Callable[[str], Tuned]:
    """Wait for a job's outcome."""
    return lambda name: tunings[name].result()
