"""A worker that starts while a proof runs: starting takes seconds, and a proof times nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Thread

from autoprec.core.recipe import Recipe
from autoprec.workers.runner import Runner

_EXIT_WAIT_SECONDS = 10.0


class PrestartedRunners:
    """Makes runners; after `start`, the first one's worker has already trained by a recipe.

    What a framework imports in its first step takes as long as importing the framework.
    """

    def __init__(self, make: Callable[[], Runner], recipe: Recipe) -> None:
        self._make, self._recipe = make, recipe
        self._started: tuple[Runner, Thread] | None = None

    def __enter__(self) -> PrestartedRunners:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._started is not None:
            runner, thread = self._started
            runner.drop()  # ends the call that the thread waits for
            thread.join(_EXIT_WAIT_SECONDS)
            runner.drop()  # a worker that the thread had only just started

    def start(self) -> None:
        """Start a worker in the background; an error there surfaces in the worker's first call."""
        runner = self._make()
        thread = Thread(target=_warm_up, args=(runner, self._recipe), daemon=True)
        self._started = runner, thread
        thread.start()

    def __call__(self) -> Runner:
        """Hand over the started runner, or a new one."""
        if self._started is None:
            return self._make()
        runner, thread = self._started
        self._started = None
        thread.join()
        return runner


def _warm_up(runner: Runner, recipe: Recipe) -> None:
    with contextlib.suppress(Exception):  # a worker that was ended meanwhile included
        runner.call("open", name="spare", recipe=recipe, seed=0)
        runner.call("close", name="spare")
