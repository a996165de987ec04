"""Finalists measured in alternation, each in a worker of its own.

Machines drift by more than the differences that matter, so only rounds in which everybody ran count
against each other. The order turns round in every second round (A B C, C B A). Where the finalists'
memory together exceeds the budget, each worker's session is opened for its turn and closed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from autoprec.core.choice import Finalist
from autoprec.core.measurement import Measurement, TimingBudget
from autoprec.core.recipe import Recipe
from autoprec.tuning.events import Listener, Round
from autoprec.tuning.failures import FailureKind, WorkerFailure
from autoprec.tuning.neighbours import Watch
from autoprec.tuning.trials import Runner


class FinalistFailed(Exception):
    """A finalist that ran before failed now; `recipe` is out."""

    def __init__(self, recipe: Recipe, failure: WorkerFailure) -> None:
        super().__init__(str(failure))
        self.recipe, self.failure = recipe, failure


ROUND_SECONDS = 0.6
"""What a recipe's turn in a round takes, where its steps are not longer."""
_NAME = "final"


class Contest:
    """Finalists with their workers, ready to run in rounds."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        make_runner: Callable[[], Runner],
        *,
        seed: int,
        together: bool,
        listener: Listener,
        watch: Watch,
    ) -> None:
        self.recipes = tuple(recipes)
        self.measured: list[list[Measurement]] = [[] for _ in recipes]
        self._seed, self._together, self._listener = seed, together, listener
        self._watch = watch
        self._revived: set[int] = set()
        self._runners = [make_runner() for _ in (recipes if together else recipes[:1])]

    def __enter__(self) -> Contest:
        if self._together:
            for index in range(len(self.recipes)):
                self._open(index)
        return self

    def __exit__(self, *exception: object) -> None:
        for runner in self._runners:
            with contextlib.suppress(Exception):
                runner.drop()

    def _open(self, index: int) -> None:
        self._call(index, "open", recipe=self.recipes[index], seed=self._seed)

    def _call(self, index: int, method: str, **arguments: Any) -> Any:
        try:
            try:
                return self._runner(index).call(method, name=_NAME, **arguments)
            except WorkerFailure as failure:
                if failure.kind is not FailureKind.KILLED or index in self._revived:
                    raise
                return self._revive(index, method, **arguments)
        except WorkerFailure as failure:
            raise FinalistFailed(self.recipes[index], failure) from failure

    def _revive(self, index: int, method: str, **arguments: Any) -> Any:
        """Go on in a new worker, once: that one was killed says nothing of the recipe."""
        self._revived.add(index)
        runner = self._runner(index)
        if method != "open":
            runner.call("open", name=_NAME, recipe=self.recipes[index], seed=self._seed)
        return runner.call(method, name=_NAME, **arguments)

    def _runner(self, index: int) -> Runner:
        return self._runners[index if self._together else 0]

    def run(self, rounds: int, step_seconds: Sequence[float]) -> tuple[Finalist, ...]:
        """Run the rounds; return every finalist with its rate in each."""
        for number in range(rounds):
            order = list(range(len(self.recipes)))
            with self._watch.over(self._pids):
                for index in order if number % 2 == 0 else reversed(order):
                    self.measured[index].append(self._time(index, step_seconds[index]))
            rates = tuple(m[-1].samples_per_second for m in self.measured)
            self._listener(Round(number + 1, rounds, rates))
        return tuple(
            Finalist(recipe, tuple(m.samples_per_second for m in measured))
            for recipe, measured in zip(self.recipes, self.measured, strict=True)
        )

    def _pids(self) -> list[int]:
        return [pid for runner in self._runners for pid in runner.pids]

    def _time(self, index: int, step: float) -> Measurement:
        """A few steps: the first one after a wait is not counted."""
        if not self._together:
            self._open(index)
        steps = max(3, min(60, round(ROUND_SECONDS / max(step, 1e-6))))
        budget = TimingBudget(
            seconds=4 * ROUND_SECONDS, min_steps=steps, max_steps=steps, precision=0.0
        )
        measured: Measurement = self._call(index, "time", budget=budget)
        if not self._together:
            self._call(index, "close")
        return measured
