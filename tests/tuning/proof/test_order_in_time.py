"""What is proven where a time limit leaves too little time for every check."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device.observation import DeviceKind
from autoprec.core.speed.trial_results import Outcome
from autoprec.errors import NoFeasibleRecipe
from autoprec.tuning.options import Options
from autoprec.tuning.proof.order import run_proofs
from autoprec.tuning.proof.prover import ProofAttempt
from autoprec.tuning.stage_results import PreflightResult, SearchResult
from autoprec.tuning.time_limit import PROOF_SHARE, Deadline
from autoprec.tuning.trials import Trials
from tests.core.device.test_policies import facts as device
from tests.tuning.proof.test_order import (
    BF16,
    F32,
    SPACE,
    TASK,
    Prover,
    at,
    prove,
    ran,
    said,
    searched,
)


def test_without_time_only_the_reference_itself_may_be_chosen() -> None:
    late = Deadline(0.0, 1.0, lambda: PROOF_SHARE)
    history = (ran(100, F32), ran(200, BF16))
    asked, result = prove(*history, deadline=late)
    assert asked == [(F32, 32, False)]
    assert [proven.recipe.policy for proven in result.proven] == [F32]
    assert said(result)["mixed_bfloat16"] == "no time was left to check it"
    assert result.not_covered == ("the check of mixed_bfloat16",)
    compiled = ran(120, F32, compiled=True)
    asked, result = prove(*history, compiled, deadline=late)
    assert asked == [(F32, 32, False)]
    assert [proven.recipe.compile for proven in result.proven] == [False]
    left_out = ("the check of mixed_bfloat16", "the check of float32's fastest recipe")
    assert result.not_covered == left_out
    assert "float32" not in said(result)
    with pytest.raises(NoFeasibleRecipe, match="no time was left to check it"):
        prove(compiled, deadline=late)


def test_without_time_what_is_clearly_slower_than_what_passed_stays_out() -> None:
    readings = iter([0.0, 0.0, 1000 * PROOF_SHARE, 1000 * PROOF_SHARE])
    later = Deadline(0.0, 1000.0, lambda: next(readings))
    asked, result = prove(ran(100, F32), ran(200, BF16), deadline=later)
    assert asked == [(BF16, 32, False)]
    assert result.not_covered == ()


@pytest.mark.parametrize(("seconds", "batch"), [(100.0, 64), (20.0, 16), (5.0, 16)])
def test_a_batch_whose_proof_would_not_end_in_time_gives_way_to_a_smaller_one(
    seconds: float, batch: int
) -> None:
    """40 steps of float32 at batch 64 take 26 s, at batch 16 6 s, and half of them 3 s."""
    limited = Deadline(0.0, seconds, lambda: 0.0)
    history = (ran(100, F32), ran(200, BF16, 64), ran(190, BF16, 16))
    asked, result = prove(*history, deadline=limited)
    assert asked[0] == (BF16, batch, False)
    left_out = ("the check of mixed_bfloat16 at batch 64, which is faster",)
    assert result.not_covered == (left_out if batch == 16 else ())


def test_a_check_that_would_not_end_in_time_is_not_begun() -> None:
    limited = Deadline(0.0, 3.0, lambda: 0.0)
    history = (ran(100, F32), ran(200, BF16, 64), ran(190, BF16, 16))
    asked, result = prove(*history, deadline=limited)
    assert asked == [(F32, 32, False)]
    assert said(result)["mixed_bfloat16"] == "no time was left to check it"
    assert result.not_covered == ("the check of mixed_bfloat16",)


def test_where_a_check_fails_no_other_one_begins_that_would_not_end_in_time() -> None:
    readings = iter([0.0, 0.0])
    late = Deadline(0.0, 1000.0, lambda: next(readings, 1000 * PROOF_SHARE - 1.0))
    history = [ran(100, F32), ran(200, BF16, compiled=True), ran(120, BF16)]
    asked, _ = prove(*history, broken=[("mixed_bfloat16", True)], deadline=late)
    assert asked == [(BF16, 32, True), (F32, 32, False)]


def test_what_a_check_had_no_time_for_is_told() -> None:
    class Ended(Prover):
        def prove(self, outcome: Outcome) -> ProofAttempt:
            attempt = super().prove(outcome)
            lower = SPACE.recipe(outcome.point).policy.mixed
            return replace(attempt, left_out="the rest of it") if lower else attempt

    job = SimpleNamespace(options=Options(), float32_allowed=True, deadline=Deadline())
    preflight = PreflightResult(TASK, device(DeviceKind.CPU), SPACE)
    search, prover = searched(ran(100, F32), ran(200, BF16)), Ended([("mixed_bfloat16", False)])
    result = run_proofs(cast(Any, job), preflight, search, cast(Any, prover))
    assert result.not_covered == ("the rest of it",)


def test_a_task_with_a_metric_needs_more_time_for_its_check() -> None:
    limited = Deadline(0.0, 25.0, lambda: 0.0)
    job = SimpleNamespace(options=Options(), float32_allowed=True, deadline=limited)
    preflight = PreflightResult(TASK, device(DeviceKind.CPU), SPACE)
    history = (ran(100, F32), ran(200, BF16, 64))
    for evaluated in (False, True):
        task = replace(TASK, has_evaluate=evaluated)
        search = SearchResult(Trials(task, SPACE, history), at(F32), history[::-1])
        prover = Prover()
        result = run_proofs(cast(Any, job), preflight, search, cast(Any, prover))
        asked = [policy for policy, *_ in prover.asked]
        assert asked == ([F32] if evaluated else [BF16])
        assert bool(result.not_covered) is evaluated


def test_what_needs_no_proof_is_taken_at_any_batch() -> None:
    limited = Deadline(0.0, 20.0, lambda: 0.0)
    asked, result = prove(ran(90, F32, 16), ran(100, F32, 64), deadline=limited)
    assert asked == [(F32, 64, False)]
    assert result.not_covered == ()


def test_a_smaller_batch_that_is_slower_than_float32_is_not_proven_for_lack_of_time() -> None:
    limited = Deadline(0.0, 20.0, lambda: 0.0)
    asked, result = prove(ran(100, F32), ran(200, BF16, 64), ran(80, BF16, 16), deadline=limited)
    assert asked[0] == (BF16, 64, False)
    assert result.not_covered == ()
