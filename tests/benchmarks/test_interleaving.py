"""Recipes in alternation over many processes: their order, and what becomes of a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from benchmark_rows import BF16

from autoprec.core.recipe import Recipe
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.failures import FailureKind, WorkerFailure
from benchmarks import interleaving

FLOAT32 = Recipe(batch_size=32)
PEAKS = {FLOAT32.key(): 40, BF16.key(): 40}


class Job:
    memory_bytes = 100


class Final:
    def __init__(self, recipe: Recipe, rate: float) -> None:
        self.recipe, self.rates = recipe, (rate,)


class Processes:
    """Stands in for the processes: the n-th ones measure n for every recipe, or fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.opened: list[list[int]] = []

    def __call__(self, job: object, recipes: list[Recipe], together: bool) -> Processes:
        assert together, "no process holds what another recipe left"
        self.recipes = recipes
        self.opened.append([recipe.batch_size for recipe in recipes])
        return self

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, rounds: int) -> list[Final]:
        number = len(self.opened)
        if number in self.failing:
            raise FinalistFailed(BF16, WorkerFailure(FailureKind.OUT_OF_MEMORY, "out of memory"))
        return [Final(recipe, float(number)) for recipe in self.recipes]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Processes]:
    def play(failing: tuple[int, ...] = ()) -> Processes:
        processes = Processes(failing)
        monkeypatch.setattr(interleaving, "interleaved", processes)
        return processes

    return play


def alternate(**more: Any) -> dict[str, list[float]]:
    return interleaving.alternate(cast(Any, Job()), [FLOAT32, BF16], PEAKS, rounds=6, **more)


def test_every_second_process_runs_in_reverse_order(played: Callable[..., Processes]) -> None:
    processes = played()
    rates = alternate()
    assert processes.opened == [[32, 64], [64, 32]] * 3
    assert rates == {key: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] for key in PEAKS}


def test_a_failure_ends_an_alternation_unless_it_is_told_to_go_on(
    played: Callable[..., Processes],
) -> None:
    played(failing=(2,))
    with pytest.raises(FinalistFailed, match="out of memory"):
        alternate()


def test_what_failed_is_measured_again_with_one_recipe_at_a_time_in_memory(
    played: Callable[..., Processes],
) -> None:
    processes = played(failing=(2, 4))
    failed: list[FinalistFailed] = []
    rates = alternate(on_failure=failed.append)
    assert [each.recipe for each in failed] == [BF16, BF16]
    assert processes.opened[:2] == [[32, 64], [64, 32]]
    assert processes.opened[2:6] == [[64], [32], [64], [32]], "in the order of what it replaces"
    assert processes.opened[6:] == [[32], [64], [64], [32], [32], [64], [64], [32]]
    assert rates == {
        FLOAT32.key(): [1.0, 6.0, 7.0, 10.0, 11.0, 14.0],
        BF16.key(): [1.0, 5.0, 8.0, 9.0, 12.0, 13.0],
    }


def test_recipes_that_do_not_fit_together_run_in_processes_of_their_own(
    played: Callable[..., Processes],
) -> None:
    processes = played()
    crowded = dict.fromkeys(PEAKS, 60)
    interleaving.alternate(cast(Any, Job()), [FLOAT32, BF16], crowded, rounds=6)
    assert processes.opened == [[32], [64], [64], [32]] * 3
