"""A spare worker: warmed up in the background, handed out once, and never left behind."""

from __future__ import annotations

from threading import Event
from typing import Any, cast

import pytest

from autoprec.core.recipe import Recipe
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.prestart import PrestartedRunners


class Runner:
    """Opens a session when `loading` allows it."""

    def __init__(self, *, loading: Event | None = None, fails: bool = False) -> None:
        self._loading, self._fails = loading, fails
        self.called: list[str] = []
        self.dropped = False

    def call(self, method: str, **arguments: object) -> None:
        if self._loading is not None:
            self._loading.wait(10)
        if self._fails:
            raise WorkerFailure(FailureKind.KILLED, "gone")
        self.called.append(method)

    def drop(self) -> None:
        self.dropped = True
        if self._loading is not None:
            self._loading.set()


def spares(*runners: Runner) -> PrestartedRunners:
    left = list(runners)
    return PrestartedRunners(lambda: cast(Any, left.pop(0)), Recipe())


def test_the_first_is_warm_when_it_is_handed_out_and_the_next_are_new() -> None:
    first, second = Runner(), Runner()
    with spares(first, second) as spare:
        spare.start()
        assert cast(Any, spare()) is first
        assert first.called == ["open", "close"]
        assert cast(Any, spare()) is second
        assert second.called == []
    assert not first.dropped  # who took it drops it


def test_without_a_start_every_runner_is_new() -> None:
    only = Runner()
    with spares(only) as spare:
        assert cast(Any, spare()) is only
    assert only.called == []


def test_one_that_nobody_took_is_ended_also_while_it_loads() -> None:
    slow = Runner(loading=Event())

    def interrupted() -> None:
        with spares(slow) as spare:
            spare.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert slow.dropped


def test_one_that_could_not_open_is_handed_out_to_say_so_itself() -> None:
    broken = Runner(fails=True)
    with spares(broken) as spare:
        spare.start()
        assert cast(Any, spare()) is broken
