"""A policy that raises in the task's own code is searched with what it needs in float32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import no_contention, ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts, Unit
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.recipe import Alignment, Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.events import Event, Note, Stage
from autoprec.tuning.search import loop as search_loop
from autoprec.tuning.search.goodput import search_at_goodput
from autoprec.tuning.search.loop import Search
from autoprec.tuning.search.needed_islands import may_need_islands
from autoprec.tuning.search.task_space import baseline_point
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import Deadline
from autoprec.tuning.trials import Trials
from autoprec.workers.failures import FailureKind, WorkerFailure

SPACE = Space((Policy.FLOAT32, Policy.MIXED_BFLOAT16), batch_sizes=(8, 16, 32))
UNITS = (Unit("", "Net"), Unit("moe", "Experts"), Unit("head", "Linear", 1.0))


class Tuning:
    """A search on a worker whose mixed policies raise unless `needed` is in float32."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        needed: str,
        raised_in: tuple[str, ...] = ("moe", ""),
        raises_at_step: int = 1,
    ) -> None:
        self.events: list[Event] = []
        self.tried: list[Recipe] = []
        self.measured: list[Recipe] = []
        options = {"sampler": "cost", "search_limit": None, "trials": None, "seed": 0}
        self.job = SimpleNamespace(
            options=SimpleNamespace(**options),
            listener=self.events.append,
            memory_bytes=None,
            contention_monitor=no_contention(),
            deadline=Deadline(),
        )

        def raises(recipe: Recipe) -> bool:
            return recipe.policy.mixed and needed not in recipe.float32_modules

        def call(method: str, *, recipe: Recipe, budget: TimingBudget, **_: Any) -> None:
            self.tried.append(recipe)
            if raises(recipe) and budget.max_steps >= raises_at_step:
                raise WorkerFailure(FailureKind.UNSUPPORTED, "dtypes\nframes", raised_in=raised_in)

        def run_trial(runner: Any, point: Any, recipe: Recipe, **_: Any) -> Outcome:
            self.measured.append(recipe)
            if raises(recipe):
                return Outcome(point, Status.UNSUPPORTED, reason="dtypes\nframes")
            return ran_at(point, 100.0 * (2 if recipe.policy.mixed else 1))

        monkeypatch.setattr(search_loop, "run_trial", run_trial)
        self.study = Study(folder / "study.journal", "experts")
        self.study.set_space(SPACE)
        self.runner = SimpleNamespace(pids=(), load=lambda: None, call=call)

    def run(self) -> tuple[Outcome, ...]:
        self.tried.clear(), self.measured.clear()
        self.search = Search(cast(Any, self.job), self.study, SPACE, baseline_point(SPACE), UNITS)
        return self.search.run(cast(Any, self.runner))


def mixed(recipes: list[Recipe]) -> list[tuple[str, ...]]:
    return [recipe.float32_modules for recipe in recipes if recipe.policy.mixed]


def test_the_policy_is_measured_with_what_it_needs_and_no_point_is_lost(tmp_path, monkeypatch):
    tuning = Tuning(tmp_path, monkeypatch, needed="moe")
    history = tuning.run()
    assert all(outcome.status is Status.OK for outcome in history)
    assert mixed(tuning.tried) == [(), ("moe",)]
    assert mixed(tuning.measured)[0] == ()
    assert set(mixed(tuning.measured)[1:]) == {("moe",)}
    assert tuning.search.space.islands == {"mixed_bfloat16": ("moe",)}
    needed = tuning.search.needed_islands["mixed_bfloat16"]
    assert (needed.paths, needed.attempts, needed.products) == (("moe",), 2, 0.0)
    assert needed.reason == "it does not run without moe in float32: dtypes"
    said = [event.text for event in tuning.events if isinstance(event, Note)]
    assert "mixed_bfloat16 runs with moe kept in float32" in said
    assert any(isinstance(event, Stage) and event.name == "islands" for event in tuning.events)


def test_a_resumed_search_remembers_what_a_policy_needs(tmp_path, monkeypatch):
    Tuning(tmp_path, monkeypatch, needed="moe").run()
    again = Tuning(tmp_path, monkeypatch, needed="moe")
    again.run()
    assert again.search.space.islands == {"mixed_bfloat16": ("moe",)}
    assert again.search.needed_islands["mixed_bfloat16"].paths == ("moe",)
    assert again.tried == []


def test_a_policy_that_raises_in_later_steps_alone_is_repaired_too(tmp_path, monkeypatch):
    tuning = Tuning(tmp_path, monkeypatch, needed="moe", raises_at_step=2)
    assert all(outcome.status is Status.OK for outcome in tuning.run())
    assert tuning.search.space.islands == {"mixed_bfloat16": ("moe",)}


def test_where_nothing_helps_the_reason_says_so_and_it_is_looked_for_once(tmp_path, monkeypatch):
    tuning = Tuning(tmp_path, monkeypatch, needed="nowhere")
    failed = [outcome for outcome in tuning.run() if outcome.status is Status.UNSUPPORTED]
    assert [outcome.reason for outcome in failed] == [
        "dtypes\nframes; it raises whichever modules are kept in float32"
    ]
    assert tuning.search.needed_islands == {}
    tried = len(tuning.tried)
    tuning.search.run(cast(Any, tuning.runner))
    assert len(tuning.tried) == tried


def test_what_is_found_at_the_batch_of_most_goodput_is_handed_on(tmp_path, monkeypatch):
    tuning = Tuning(tmp_path, monkeypatch, needed="moe")
    tuning.job.options = SimpleNamespace(**vars(tuning.job.options), batch="goodput", policies=())
    plain = ran_at(baseline_point(SPACE), 100.0)
    tuning.study.tell(tuning.study.ask(plain.point)[0], plain)
    task = TaskFacts("torch", {}, 32, 32, 1000, units=UNITS)
    found = SearchResult(Trials(task, SPACE, (plain,)), plain.point)
    scale = NoiseScale(at=1e6, low=1e6, high=1e6, batch=32)
    result = search_at_goodput(
        cast(Any, tuning.job), tuning.study, found, lambda recipe: scale, cast(Any, tuning.runner)
    )
    assert result.trials.space.islands == {"mixed_bfloat16": ("moe",)}
    assert result.needed_islands["mixed_bfloat16"].paths == ("moe",)


def test_a_policy_that_would_keep_all_its_products_in_float32_is_refused(tmp_path, monkeypatch):
    tuning = Tuning(tmp_path, monkeypatch, needed="head", raised_in=("head",))
    failed = [outcome for outcome in tuning.run() if outcome.status is Status.UNSUPPORTED]
    assert "100 % of its matrix products in float32" in failed[0].reason


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe("mixed_bfloat16"), True),
        (Recipe("mixed_float16", knobs={"keep_memory": True}), True),
        (Recipe("float32"), False),
        (Recipe("mixed_bfloat16", compile=True), False),
        (Recipe("mixed_bfloat16", memory_format="channels_last"), False),
        (Recipe("mixed_bfloat16", alignment=Alignment(8, ("head",))), False),
        (Recipe("mixed_bfloat16", knobs={"implicit_bfloat16": True}), False),
    ],
)
def test_only_a_policy_by_itself_may_need_islands(recipe, expected):
    assert may_need_islands(recipe) is expected
