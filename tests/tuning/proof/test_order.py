"""Which recipes the tuner has proven, in which order, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import ran_at

from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.numerics.reference_recipe import settings_of
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.space import Point, Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.options import Options
from autoprec.tuning.proof.order import is_float16_next, replace_finalist, run_proofs
from autoprec.tuning.proof.prover import ProofAttempt
from autoprec.tuning.stage_results import (
    REFERENCE,
    FinalistLost,
    PreflightResult,
    ProofResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.time_limit import Deadline
from autoprec.tuning.trials import Trials
from tests.core.device.test_policies import facts as device

F32, BF16, F16 = Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16
SPACE = Space((F32, BF16, F16), (16, 32, 64), compile=(False, True), batch_share=SPEED.most_share)
TASK = TaskFacts("torch", {}, 32, 32, 1000)


def at(policy: Policy, batch: int = 32, compiled: bool = False) -> Point:
    recipe = Recipe(batch_size=batch, compile=compiled).with_policy(policy)
    return SPACE.point(recipe)


def ran(rate: float, policy: Policy, batch: int = 32, compiled: bool = False) -> Outcome:
    return ran_at(at(policy, batch, compiled), rate)


class Prover:
    """Passes all but what `broken` says, and what has a `guilty` setting."""

    def __init__(
        self,
        broken: Sequence[tuple[str, bool]] = (),
        guilty: frozenset[str] = frozenset(),
    ) -> None:
        self.broken = broken
        self.guilty = guilty
        self.asked: list[tuple[Policy, int, bool]] = []
        self.forgot = 0

    def prove(self, outcome: Outcome) -> ProofAttempt:
        recipe = SPACE.recipe(outcome.point)
        self.asked.append((recipe.policy, recipe.batch_size, recipe.compile))
        if (recipe.policy.value, recipe.compile) in self.broken:
            return ProofAttempt(
                refusal=Refusal(recipe.policy.value, "it trains otherwise"), seconds=1.0
            )
        wrong = tuple(each.key for each in settings_of(recipe) if each.key in self.guilty)
        if wrong:
            return ProofAttempt(seconds=1.0, guilty=wrong)
        return ProofAttempt(ProvenRecipe(recipe, REFERENCE, outcome.rate, 0.1), seconds=1.0)

    def forget(self) -> None:
        self.forgot += 1


def searched(*history: Outcome, space: Space = SPACE, task: TaskFacts = TASK) -> SearchResult:
    return SearchResult(Trials(task, space, history), at(F32), history[::-1])


def prove(
    *history: Outcome,
    policies: tuple[Policy, ...] = (),
    broken: Sequence[tuple[str, bool]] = (),
    deadline: Deadline | None = None,
    guilty: frozenset[str] = frozenset(),
    space: Space = SPACE,
    task: TaskFacts = TASK,
) -> tuple[list[tuple[Policy, int, bool]], ProofResult]:
    """What was proven, and the result."""
    job = SimpleNamespace(
        options=Options(policies=policies),
        float32_allowed=not policies or F32 in policies,
        deadline=deadline or Deadline(),
    )
    preflight = PreflightResult(TASK, device(DeviceKind.CPU), space)
    prover = Prover(broken, guilty)
    search = searched(*history, space=space, task=task)
    result = run_proofs(cast(Any, job), preflight, search, cast(Any, prover))
    assert result.seconds == len(prover.asked)
    assert prover.forgot == 1
    return prover.asked, result


def said(result: ProofResult) -> dict[str, str]:
    return {refusal.candidate: refusal.reason for refusal in result.refusals}


def test_the_fastest_is_proven_and_nothing_else_where_it_passes() -> None:
    asked, result = prove(
        ran(100, F32), ran(120, F32, 64), ran(150, F16), ran(200, BF16), ran(180, BF16, 16)
    )
    assert asked == [(BF16, 32, False)]
    assert [proven.recipe.policy for proven in result.proven] == [BF16]
    assert result.refusals == ()
    asked, result = prove(ran(190, F32), ran(199, F16), ran(200, BF16))
    assert [policy for policy, *_ in asked] == [BF16]
    assert [proven.rate for proven in result.proven] == [200]


@pytest.mark.parametrize(("rate", "proven"), [(100.1, True), (99.9, False)])
def test_what_is_slower_than_the_fastest_float32_recipe_is_refused_with_its_number(
    rate: float, proven: bool
) -> None:
    asked, result = prove(ran(50, F32), ran(100, F32, 64), ran(rate, BF16, 64))
    assert [policy for policy, *_ in asked] == ([BF16] if proven else [F32])
    slower = {"mixed_bfloat16": "measured 1.00x the speed of the best float32 recipe"}
    nothing = {"mixed_float16": "the search ended before it was tried"}
    assert said(result) == nothing | ({} if proven else slower)


def test_what_a_model_computes_in_by_itself_is_not_called_float32() -> None:
    own = replace(TASK, weights_in="bfloat16")
    _, result = prove(ran(100, F32), ran(50, BF16), task=own)
    why = said(result)["mixed_bfloat16"]
    assert why == "measured 0.50x the speed of the best own bfloat16 recipe"


@pytest.mark.parametrize(
    ("bfloat16", "tf32", "broken", "is_next"),
    [
        (200, 150, (), False),
        (200, 250, (), False),  # nor is what ties with bfloat16 faster than TF32
        (200, 150, (("mixed_bfloat16", False),), True),
        (99, 50, (), True),
    ],
)
def test_float16_is_next_where_bfloat16_is_refused_and_not_where_it_is_overtaken(
    bfloat16: float, tf32: float, broken: Sequence[tuple[str, bool]], is_next: bool
) -> None:
    waiting = replace(SPACE, policies=(F32, Policy.TF32, BF16, F16), float16_waits=True)
    history = [ran(100, F32), ran(bfloat16, BF16), ran(tf32, Policy.TF32)]
    history += [ran(90, BF16, 16), ran(10, F32, 16)]
    _, result = prove(*history, broken=broken, space=waiting)
    why = said(result)["mixed_float16"]
    assert why.startswith("not tried: ") != is_next
    assert (why == "the search ended before it was tried") == is_next
    assert is_float16_next(searched(*history, space=waiting), result) == is_next
    assert not is_float16_next(searched(*history), result)
    tried = searched(*history, ran(1, F16), space=waiting)
    assert not is_float16_next(tried, result)


def test_float16_is_next_where_final_rounds_find_that_islands_leave_bfloat16_no_gain() -> None:
    waiting = replace(SPACE, float16_waits=True)
    search = searched(ran(100, F32), ran(200, BF16), space=waiting)
    islands = replace(Recipe(batch_size=32).with_policy(BF16), float32_modules=("a",))
    result = ProofResult(proven=(ProvenRecipe(islands, REFERENCE, 150.0, 0.1),))
    assert not is_float16_next(search, result)
    assert not is_float16_next(search, result, islands)
    assert is_float16_next(search, result, Recipe(batch_size=32))
    whole = replace(islands, float32_modules=())
    result = ProofResult(proven=(ProvenRecipe(whole, REFERENCE, 150.0, 0.1),))
    assert not is_float16_next(search, result, Recipe(batch_size=32))


@pytest.mark.parametrize(("failed_at", "largest"), [(None, 16), (32, 32)])
def test_a_refusal_says_where_a_policy_was_not_tried_at_the_batch_of_float32(
    failed_at: int | None, largest: int
) -> None:
    """On a GPU a small step waits for the host: its ratio to a large batch is none of precision."""
    failed = [] if failed_at is None else [Outcome(at(BF16, failed_at), Status.CRASHED, reason="x")]
    _, result = prove(ran(50, F32, 16), ran(100, F32, 64), ran(4, BF16, 16), *failed)
    assert said(result)["mixed_bfloat16"] == (
        "measured 0.04x the speed of the best float32 recipe, which has batch 64; it was not tried "
        f"at a batch above {largest}"
    )


def test_where_float32_may_not_be_chosen_it_is_not_proven_and_refuses_nothing() -> None:
    asked, result = prove(ran(100, F32), ran(10, BF16), policies=(BF16,))
    assert asked == [(BF16, 32, False)]
    assert result.refusals == ()


def test_a_policy_that_failed_everywhere_is_refused_with_its_first_failure() -> None:
    failed = Outcome(at(F16), Status.UNSUPPORTED, reason="no kernel")
    other = Outcome(at(F16, 64), Status.TIMEOUT, reason="slow")
    _, result = prove(other, failed, ran(100, F32))
    assert said(result)["mixed_float16"] == "unsupported: no kernel"


def test_what_is_slower_than_what_passed_is_not_proven_and_what_is_faster_is() -> None:
    """A policy's fastest recipe may be refused, and what is left of it slower than another's."""
    history = (ran(200, BF16, compiled=True), ran(120, BF16), ran(150, F16))
    policies, broken = (BF16, F16), [("mixed_bfloat16", True)]
    asked, result = prove(*history, policies=policies, broken=broken)
    assert [policy for policy, *_ in asked] == [BF16, BF16, F16]
    assert result.fastest.recipe.policy is F16
    asked, _ = prove(*history[:2], ran(119, F16), policies=policies, broken=broken)
    assert [policy for policy, *_ in asked] == [BF16, BF16]


def test_what_is_slower_than_what_did_not_pass_is_proven() -> None:
    asked, result = prove(
        ran(100, BF16), ran(20, F16), policies=(BF16, F16), broken=[("mixed_bfloat16", False)]
    )
    assert [policy for policy, *_ in asked] == [BF16, F16]
    assert [proven.recipe.policy for proven in result.proven] == [F16]


def test_where_a_compiler_breaks_a_policy_the_policy_by_itself_is_proven() -> None:
    history = [ran(200, BF16, compiled=True), ran(120, BF16), ran(110, BF16, 16)]
    asked, result = prove(*history, policies=(BF16,), broken=[("mixed_bfloat16", True)])
    assert asked == [(BF16, 32, True), (BF16, 32, False)]
    assert [proven.recipe.compile for proven in result.proven] == [False]
    asked, _ = prove(*history, policies=(BF16,))
    assert asked == [(BF16, 32, True)]


def test_a_plain_recipe_that_failed_itself_is_not_proven_twice() -> None:
    with pytest.raises(NoFeasibleRecipe):
        prove(ran(200, BF16), policies=(BF16,), broken=[("mixed_bfloat16", False)])
    history = (ran(100, F32), ran(200, BF16), ran(120, BF16, compiled=True))
    asked, _ = prove(*history, broken=[("mixed_bfloat16", False)])
    assert asked == [(BF16, 32, False), (F32, 32, False)]


def test_where_nothing_passes_every_reason_is_told() -> None:
    failed = Outcome(at(F16), Status.CRASHED, reason="died")
    with pytest.raises(NoFeasibleRecipe) as caught:
        prove(
            ran(200, BF16),
            failed,
            policies=(F16, BF16),
            broken=[("mixed_bfloat16", False)],
        )
    assert str(caught.value) == (
        "no policy that was asked for passes (mixed_bfloat16: it trains otherwise; mixed_float16: "
        "crashed: died). Add float32 to `policies`, or accept what trains differently with "
        "`accept_drift`"
    )


def test_where_the_search_ended_before_a_policy_was_tried_more_of_it_is_advised() -> None:
    advice = r"the search ended before it was tried\)\. Allow more `trials`, or a longer"
    with pytest.raises(NoFeasibleRecipe, match=advice):
        prove(ran(100, F32), policies=(BF16,))


def test_a_finalist_that_is_lost_is_replaced_by_the_fastest_at_a_smaller_batch() -> None:
    search = searched(ran(400, BF16, 64), ran(200, BF16), ran(150, BF16, 16), ran(390, F16))
    large, small = (Recipe(BF16, batch) for batch in (64, 32))
    proof = ProofResult((ProvenRecipe(large, REFERENCE, 400.0, 0.1),), seconds=2.0)
    prover = Prover()
    lost = FinalistLost(large, "no room", {})
    result = replace_finalist(proof, lost, search, cast(Any, prover))
    assert [each.recipe for each in result.proven] == [small]
    assert said(result) == {"mixed_bfloat16": "no room"}
    assert (result.seconds, prover.forgot) == (3.0, 1)
    known = replace(proof, proven=(*proof.proven, ProvenRecipe(small, REFERENCE, 200.0, 0.1)))
    again = replace_finalist(known, lost, search, cast(Any, prover))
    assert [each.recipe for each in again.proven] == [small]
    smallest = FinalistLost(Recipe(BF16, 16), "no room", {})
    assert replace_finalist(result, smallest, search, cast(Any, prover)).proven == result.proven


def test_the_fastest_recipe_without_a_guilty_setting_is_proven_in_every_policy() -> None:
    history = (
        ran(100, F32),
        ran(130, F32, compiled=True),
        ran(120, F32, 64),
        ran(200, BF16, 64, compiled=True),
        ran(190, BF16, 64),
        ran(180, BF16),
    )
    asked, result = prove(*history, guilty=frozenset({"compile"}))
    assert asked == [(BF16, 64, True), (BF16, 64, False)]
    assert [proven.rate for proven in result.proven] == [190]
    asked, result = prove(*history[:3], guilty=frozenset({"compile"}))
    assert asked == [(F32, 32, True), (F32, 64, False)]
    assert [proven.recipe.compile for proven in result.proven] == [False]


def test_plain_float32_is_left_where_settings_are_refused_and_none_is_named() -> None:
    """Such as where the comparison itself runs out of memory."""
    space = replace(SPACE, memory_formats=("contiguous", "channels_last"))
    laid_out = Recipe(batch_size=32, memory_format="channels_last")
    history = (
        ran_at(space.point(Recipe(batch_size=32)), 100.0),
        ran_at(space.point(laid_out), 130.0),
    )

    class Refuses(Prover):
        def prove(self, outcome: Outcome) -> ProofAttempt:
            recipe = space.recipe(outcome.point)
            if recipe.memory_format == "channels_last":
                return ProofAttempt(seconds=1.0)
            return ProofAttempt(ProvenRecipe(recipe, REFERENCE, outcome.rate, 0.1))

    job = SimpleNamespace(options=Options(), float32_allowed=True, deadline=Deadline())
    search = SearchResult(Trials(TASK, space, history), history[0].point, history[::-1])
    preflight = PreflightResult(TASK, device(DeviceKind.CPU), space)
    result = run_proofs(cast(Any, job), preflight, search, cast(Any, Refuses()))
    assert [proven.recipe.memory_format for proven in result.proven] == ["contiguous"]
