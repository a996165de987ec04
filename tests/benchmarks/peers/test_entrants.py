"""Recipes of several makers, each in the process that its maker has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark_rows import BF16, SPACE

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from benchmarks.peers import entrants, searches


def test_a_rival_may_have_what_autoprec_tries_and_chooses_what_it_chooses() -> None:
    space = replace(SPACE, memory_formats=("contiguous", "channels_last"))
    found = entrants.ways(BF16, space, layout_chosen=False)
    assert {(w.memory_format, w.knobs.get("fused_optimizer", False)) for w in found} == {
        (layout, fused) for layout in ("contiguous", "channels_last") for fused in (False, True)
    }
    assert all(w.policy is BF16.policy and w.batch_size == 64 for w in found)
    own = entrants.ways(replace(BF16, memory_format="channels_last"), space, layout_chosen=True)
    assert {w.memory_format for w in own} == {"channels_last"}
    plain = replace(space, knobs={}, memory_formats=("contiguous",))
    assert entrants.ways(BF16, plain, layout_chosen=False) == [BF16]


def test_knobs_apart_changes_neither_policy_nor_batch_nor_what_products_are_computed_in() -> None:
    ours = replace(
        BF16,
        memory_format="channels_last",
        float32_modules=("head",),
        knobs={"keep_memory": True, "implicit_bfloat16": True},
    )
    theirs = Recipe(Policy.MIXED_FLOAT16, 512, loss_scale=LossScale())
    found = entrants.with_knobs_of(ours, theirs)
    assert (found.policy, found.batch_size, found.loss_scale) == (
        theirs.policy,
        512,
        theirs.loss_scale,
    )
    assert found.memory_format == "channels_last"
    assert found.knobs == {"keep_memory": True}
    assert found.float32_modules == ()
    same = entrants.with_knobs_of(ours, replace(BF16, batch_size=512))
    assert same.knobs == ours.knobs
    assert same.float32_modules == ("head",)
    assert entrants.in_plain_float32(ours).knobs == {"keep_memory": True}


def test_a_rivals_process_keeps_its_memory_from_the_start_and_ours_does_not() -> None:
    from autoprec.workers.client import WorkerSettings
    from autoprec.workers.task_source import TaskSource

    started = []

    class Fake:
        alive, pids = True, (1,)

        def __init__(self, settings: Any) -> None:
            started.append(dict(settings.environment))

        def load(self, progress: Any) -> None:
            pass

        def call(self, method: str, **arguments: Any) -> None:
            pass

        def kill(self) -> None:
            pass

    settings = WorkerSettings(TaskSource(Path("mlp.py")), environment={"A": "1"})
    runner = entrants.KeptRunner(settings, lambda phase, step: None, Fake)
    for kept in (False, True, True, False):
        runner.call("open", recipe=entrants.Entrant(BF16, kept).marked)
    kept_too = {"A": "1", **entrants.KEPT}
    assert started == [{"A": "1"}, kept_too, {"A": "1"}]
    both = {entrants.Entrant(BF16, kept).marked.key() for kept in (False, True)}
    assert len(both) == 2
    assert searches.environment("lightning") == dict(searches.KEPT)
    assert searches.environment(searches.OURS) == {}
