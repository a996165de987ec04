"""Which recipes the tuner has proven, in which order, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import ran_at

from autoprec.core.device.facts import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Point, Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.options import Options
from autoprec.tuning.profile_builder import REFERENCE, Findings, ProvenRecipe
from autoprec.tuning.time_limit import PROOF_SHARE, Deadline
from autoprec.tuning.tuner import _prove
from tests.core.device.test_policies import facts as device

F32, BF16, F16 = Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16
SPACE = Space((F32, BF16, F16), (16, 32, 64), compile=(False, True))
TASK = TaskFacts("torch", {}, 32, 32, 1000)


def at(policy: Policy, batch: int = 32, compiled: bool = False) -> Point:
    recipe = Recipe(batch_size=batch, compile=compiled).with_policy(policy)
    return SPACE.point(recipe)


def ran(rate: float, policy: Policy, batch: int = 32, compiled: bool = False) -> Outcome:
    return ran_at(at(policy, batch, compiled), rate)


class Prover:
    """Passes all but what `broken` says."""

    def __init__(self, broken: Sequence[tuple[str, bool]] = ()) -> None:
        self.broken = broken
        self.asked: list[tuple[Policy, int, bool]] = []

    def prove(self, recipe: Recipe, outcome: Outcome, space: Space) -> ProvenRecipe | None:
        assert space is SPACE
        assert SPACE.point(recipe) == outcome.point
        self.asked.append((recipe.policy, recipe.batch_size, recipe.compile))
        if (recipe.policy.value, recipe.compile) in self.broken:
            return None
        return ProvenRecipe(recipe, REFERENCE, outcome.rate, 0.1)


def prove(
    *history: Outcome,
    policies: tuple[Policy, ...] = (),
    broken: Sequence[tuple[str, bool]] = (),
    heats: bool = True,
    deadline: Deadline | None = None,
) -> tuple[list[tuple[Policy, int, bool]], list[ProvenRecipe], Findings]:
    """What was proven, what passed, and the findings. `heats`: whether they decided the order."""
    job = SimpleNamespace(
        options=Options(policies=policies),
        float32_allowed=not policies or F32 in policies,
        deadline=deadline or Deadline(),
    )
    findings = Findings(device(DeviceKind.CPU), TASK, tuple(history), SPACE)
    findings.ranking = tuple(history) if not heats else tuple(replace(o) for o in history[::-1])
    prover = Prover(broken)
    found = _prove(cast(Any, job), SPACE, cast(Any, prover), findings)
    return prover.asked, found, findings


def said(findings: Findings) -> dict[str, str]:
    return {refusal.candidate: refusal.reason for refusal in findings.refusals}


def test_the_fastest_recipe_of_every_policy_that_may_win_is_proven_fastest_first() -> None:
    asked, found, findings = prove(
        ran(100, F32), ran(120, F32, 64), ran(150, F16), ran(200, BF16), ran(180, BF16, 16)
    )
    assert asked == [(BF16, 32, False)]
    assert [proven.recipe.policy for proven in found] == [BF16]
    assert findings.refusals == []
    asked, found, _ = prove(ran(190, F32), ran(175, F16), ran(200, BF16))
    assert [policy for policy, *_ in asked] == [BF16, F32]
    assert [proven.rate for proven in found] == [200, 190]


@pytest.mark.parametrize(("rate", "proven"), [(95.0, True), (94.9, False)])
def test_what_is_slower_than_the_fastest_float32_recipe_is_refused_with_its_number(
    rate: float, proven: bool
) -> None:
    """Within the error of the search it may be faster yet."""
    asked, _, findings = prove(ran(50, F32), ran(100, F32, 64), ran(rate, BF16))
    assert [policy for policy, *_ in asked] == ([F32, BF16] if proven else [F32])
    slower = {"mixed_bfloat16": "measured 0.95x the speed of the best float32 recipe"}
    nothing = {"mixed_float16": "the search ended before it was tried"}
    assert said(findings) == nothing | ({} if proven else slower)


def test_where_float32_may_not_be_chosen_it_is_not_proven_and_refuses_nothing() -> None:
    asked, _, findings = prove(ran(100, F32), ran(10, BF16), policies=(BF16,))
    assert asked == [(BF16, 32, False)]
    assert findings.refusals == []


def test_a_policy_that_failed_everywhere_is_refused_with_its_first_failure() -> None:
    failed = Outcome(at(F16), Status.UNSUPPORTED, reason="no kernel")
    other = Outcome(at(F16, 64), Status.TIMEOUT, reason="slow")
    _, _, findings = prove(ran(100, F32), failed, other, heats=False)
    assert said(findings)["mixed_float16"] == "unsupported: no kernel"


@pytest.mark.parametrize(("rate", "proven"), [(85.0, True), (84.9, False)])
def test_what_is_clearly_slower_than_what_passed_is_not_proven(rate: float, proven: bool) -> None:
    asked, _, _ = prove(ran(100, BF16), ran(rate, F16), policies=(BF16, F16))
    assert (F16 in [policy for policy, *_ in asked]) is proven


def test_what_is_slower_than_what_did_not_pass_is_proven() -> None:
    asked, found, _ = prove(
        ran(100, BF16), ran(20, F16), policies=(BF16, F16), broken=[("mixed_bfloat16", False)]
    )
    assert [policy for policy, *_ in asked] == [BF16, F16]
    assert [proven.recipe.policy for proven in found] == [F16]


@pytest.mark.parametrize(
    ("heats", "second", "batches"),
    [(True, 99.0, [64]), (False, 99.0, [64, 32]), (False, 94.0, [64])],
)
def test_two_recipes_of_a_policy_are_proven_where_the_heats_could_not_tell_them_apart(
    heats: bool, second: float, batches: list[int]
) -> None:
    asked, _, _ = prove(
        ran(100, BF16, 64), ran(second, BF16), ran(40, BF16, 16), policies=(BF16,), heats=heats
    )
    assert [batch for _, batch, _ in asked] == batches


def test_where_a_compiler_breaks_a_policy_the_policy_by_itself_is_proven() -> None:
    history = [ran(200, BF16, compiled=True), ran(120, BF16), ran(110, BF16, 16)]
    asked, found, _ = prove(*history, policies=(BF16,), broken=[("mixed_bfloat16", True)])
    assert asked == [(BF16, 32, True), (BF16, 32, False)]
    assert [proven.recipe.compile for proven in found] == [False]
    asked, _, _ = prove(*history, policies=(BF16,))
    assert asked == [(BF16, 32, True)]


def test_a_plain_recipe_that_failed_itself_is_not_proven_twice() -> None:
    with pytest.raises(NoFeasibleRecipe):
        prove(ran(200, BF16), policies=(BF16,), broken=[("mixed_bfloat16", False)])
    history = (ran(100, F32), ran(200, BF16), ran(120, BF16, compiled=True))
    asked, _, _ = prove(*history, broken=[("mixed_bfloat16", False)])
    assert asked == [(BF16, 32, False), (F32, 32, False)]


def test_without_time_only_the_reference_itself_may_be_chosen() -> None:
    late = Deadline(0.0, 1.0, lambda: PROOF_SHARE)
    history = (ran(100, F32), ran(200, BF16))
    asked, found, findings = prove(*history, deadline=late)
    assert asked == [(F32, 32, False)]
    assert [proven.recipe.policy for proven in found] == [F32]
    assert said(findings)["mixed_bfloat16"] == "no time was left to prove it"
    assert findings.not_covered == ["the proof of mixed_bfloat16"]
    compiled = (ran(100, F32), ran(120, F32, compiled=True))
    with pytest.raises(NoFeasibleRecipe, match="no time was left to prove it"):
        prove(*compiled, deadline=late)


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
        "no policy that was asked for passes (mixed_float16: crashed: died). Add float32 to "
        "--policies, or accept what trains differently with --accept-drift"
    )
