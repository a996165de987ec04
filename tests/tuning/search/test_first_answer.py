"""What leads after the search is told with its rough speed, and that nothing is checked yet."""

from __future__ import annotations

from factories import ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.search.run_search import first_answer
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.trials import Trials
from tests.tuning.fake_results import SPACE, TASK


def ran(policy: Policy, batch: int, rate: float) -> Outcome:
    return ran_at(SPACE.point(Recipe(policy, batch)), rate)


def said(*history: Outcome, rehearsed: bool = False, policies: tuple[Policy, ...] = ()) -> str:
    trials = Trials(TASK, SPACE, history, rehearsed)
    return first_answer(SearchResult(trials, SPACE.point(Recipe())), policies)


PLAIN = ran(Policy.FLOAT32, 32, 100.0)
CHECKED = ", by a short timing; neither compared in turns nor checked against float32 yet"


def test_precision_and_batch_are_told_apart_as_far_as_float32_ran_alike() -> None:
    fast = ran(Policy.MIXED_BFLOAT16, 128, 320.0)
    assert said(PLAIN, ran(Policy.FLOAT32, 128, 200.0), fast) == (
        "so far: mixed_bfloat16, batch 128, about 1.6x as fast as float32 like it and about 3.2x "
        f"the samples/s of batch 32{CHECKED}"
    )
    assert said(PLAIN, fast) == (
        f"so far: mixed_bfloat16, batch 128, about 3.2x the samples/s of batch 32{CHECKED}"
    )
    assert said(PLAIN, ran(Policy.MIXED_BFLOAT16, 32, 150.0)) == (
        f"so far: mixed_bfloat16, batch 32, about 1.5x as fast as float32 like it{CHECKED}"
    )


def test_float32_leads_where_nothing_is_faster() -> None:
    slow = ran(Policy.MIXED_BFLOAT16, 32, 50.0)
    assert said(PLAIN, slow) == f"so far: float32, batch 32, the fastest of 2 tried{CHECKED}"
    assert said(PLAIN, slow, ran(Policy.FLOAT32, 128, 200.0)) == (
        f"so far: float32, batch 128, about 2x the samples/s of batch 32{CHECKED}"
    )


def test_only_what_was_asked_for_is_an_answer() -> None:
    asked = (Policy.MIXED_BFLOAT16,)
    slow = ran(Policy.MIXED_BFLOAT16, 32, 50.0)
    assert "about 0.5x as fast as float32 like it" in said(PLAIN, slow, policies=asked)
    assert said(PLAIN, policies=asked) == (
        "so far: none of the policies that were asked for has run"
    )


def test_a_rehearsal_has_no_speeds() -> None:
    told = said(PLAIN, ran(Policy.MIXED_BFLOAT16, 32, 150.0), rehearsed=True)
    assert told.startswith("so far: mixed_bfloat16, batch 32; how fast")
