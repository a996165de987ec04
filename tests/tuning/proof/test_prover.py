"""One recipe's proof: retried after faults, refused with its reason, recalled from the study."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import steady

from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.traces import StepComparison
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import TrialFailure
from autoprec.tuning.events import Judged, silent
from autoprec.tuning.options import Options
from autoprec.tuning.proof import prover as module
from autoprec.tuning.proof.prover import ProofAttempt, Prover
from autoprec.tuning.stage_results import (
    REFERENCE,
    NeededIslands,
    PreflightResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.time_limit import Deadline
from autoprec.tuning.trials import Trials
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.core.device.test_policies import facts as device
from tests.tuning.proof.fake_tracer import BFLOAT16, FakeTracer

TASK = TaskFacts("torch", {}, 32, 32, 1000)
OUTCOME = Outcome({}, Status.OK, steady(0.1, 1.0))
STUDY = SimpleNamespace(recall=lambda *_: None, remember=lambda *_: None, notes=dict)
JOB = SimpleNamespace(options=Options(), listener=silent, deadline=Deadline(), checkpoint=None)


class Tracer(FakeTracer):
    """Fails at the calls of one name that come first, in float32 or under the recipe."""

    def __init__(self, name: str, *failures: FailureKind) -> None:
        super().__init__()
        self.name, self.failures = name, list(failures)

    def _note(self, name: str, recipe: Any = None) -> None:
        super()._note(name, recipe)
        if name.startswith(self.name) and self.failures:
            raise WorkerFailure(self.failures.pop(0), "why")


class Implicit(FakeTracer):
    """A recipe that lets oneDNN round products trains as if they were."""

    def __init__(self, error: float) -> None:
        super().__init__(error=error, step_error=error)

    def _off(self, recipe: Recipe) -> bool:
        return bool(recipe.knobs.get("implicit_bfloat16"))


def prove(
    tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch, recipe: Recipe = BFLOAT16
) -> ProofAttempt:
    monkeypatch.setattr(module, "RemoteTracer", lambda runner: tracer)
    space = cast(Space, SimpleNamespace(recipe=lambda point: recipe, policies=()))
    preflight = PreflightResult(TASK, device(DeviceKind.CUDA), space)
    prover = Prover(cast(Any, JOB), cast(Any, STUDY), preflight, cast(Any, None))
    return prover.prove(OUTCOME)


@pytest.mark.parametrize("name", ["reference", "compare_steps", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "kind", [FailureKind.KILLED, FailureKind.DEVICE_FAULT, FailureKind.LOST_DEVICE]
)
def test_what_is_not_the_recipes_doing_is_proven_once_more_from_the_start(
    name: str, kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = Tracer(name, kind)
    attempt = prove(tracer, monkeypatch)
    assert attempt.proven is not None
    assert attempt.proven.verdict.verdict == "equal"
    assert attempt.refusal is None
    assert tracer.calls.count("reference 8x1") == 2


def test_a_proof_took_all_the_time_from_its_first_call_to_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What sets the pace, settings and the loss scale is part of it, as is a failed first try."""
    now = itertools.count(100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    for tracer in (Tracer("nothing"), Tracer("compare_steps", FailureKind.KILLED)):
        before = next(now)
        attempt = prove(tracer, monkeypatch, LAID_OUT.with_policy(Policy.MIXED_BFLOAT16))
        assert attempt.proven is not None
        clocks = next(now) - before - 1  # readings of the clock, a second each
        assert attempt.seconds == clocks - 1
        assert attempt.seconds > attempt.proven.verdict.seconds


IMPLICIT = Recipe(batch_size=8, knobs={"implicit_bfloat16": True})


def test_plain_float32_needs_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer("nothing")
    plain = Recipe(knobs={"keep_memory": True})
    attempt = prove(tracer, monkeypatch, plain)
    assert attempt.proven == ProvenRecipe(plain, REFERENCE, 10.0, 0.1)
    assert tracer.calls == []


LAID_OUT = Recipe(batch_size=8, memory_format="channels_last", knobs={"fused_optimizer": True})


def test_float32_with_settings_is_compared_and_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer("nothing")
    attempt = prove(tracer, monkeypatch, LAID_OUT)
    assert tracer.calls == ["compare_settings"]
    assert attempt.proven is not None
    assert attempt.proven.verdict.accepted
    assert "channels_last and fused_optimizer" in attempt.proven.verdict.reason
    assert attempt.proven.settings is not None
    assert attempt.guilty == ()


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16])
def test_the_setting_that_computes_something_else_is_named_and_no_islands_are_sought(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = Tracer("nothing")
    tracer.broken = frozenset({"memory_format"})
    attempt = prove(tracer, monkeypatch, LAID_OUT.with_policy(policy))
    assert attempt.proven is None
    assert attempt.guilty == ("memory_format",)
    assert attempt.refusal is not None
    assert attempt.refusal.candidate == policy.value
    assert "with channels_last it computes something else" in attempt.refusal.reason
    assert set(tracer.calls) == {"compare_settings"}


def test_settings_that_are_wrong_only_together_are_all_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = Tracer("nothing")
    tracer.broken = frozenset({"memory_format", "fused_optimizer"})
    attempt = prove(tracer, monkeypatch, LAID_OUT)
    assert attempt.guilty == ("memory_format", "fused_optimizer")


def test_a_mixed_recipe_whose_settings_are_right_is_trained_and_keeps_both_verdicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = Tracer("nothing")
    attempt = prove(tracer, monkeypatch, LAID_OUT.with_policy(Policy.MIXED_BFLOAT16))
    assert tracer.calls.count("compare_settings") == 1
    assert tracer.calls.count("compare_steps") == 1
    assert attempt.proven is not None
    assert attempt.proven.settings is not None
    assert attempt.proven.settings.accepted
    assert attempt.proven.verdict.covered[0] == attempt.proven.settings.covered[0]


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_float32_whose_products_are_bfloat16_is_proven_against_float32(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = Implicit(error)
    attempt = prove(tracer, monkeypatch, IMPLICIT)
    assert tracer.calls.count("compare_steps") == 1
    assert any(call.startswith("reference") for call in tracer.calls)
    assert (attempt.proven is not None) is (error == 0.0)
    assert attempt.proven is None or attempt.proven.verdict != REFERENCE
    assert (attempt.refusal is not None) is (error > 0)
    assert attempt.refusal is None or attempt.refusal.candidate == "float32"


def test_no_islands_are_sought_where_their_own_products_would_be_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy by itself is proven next, and islands are sought for that."""
    tracer = FakeTracer(error=0.5, step_error=0.5)
    rounded = replace(BFLOAT16, knobs={"implicit_bfloat16": True})
    attempt = prove(tracer, monkeypatch, rounded)
    assert attempt.proven is None
    assert tracer.calls.count("compare_steps") == 1
    assert attempt.refusal is not None
    assert "Kept in float32" not in attempt.refusal.reason


def test_a_second_fault_counts_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FailureKind.DEVICE_FAULT
    attempt = prove(Tracer("compare_steps", fault, fault), monkeypatch)
    assert attempt.proven is None
    assert attempt.refusal is not None
    assert "the check ended with device_fault" in attempt.refusal.reason


def test_a_device_that_is_lost_twice_ends_the_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = FailureKind.LOST_DEVICE
    with pytest.raises(TrialFailure, match="the device was lost"):
        prove(Tracer("compare_steps", lost, lost), monkeypatch)


def test_what_is_the_recipes_doing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = prove(Tracer("compare_steps", FailureKind.OUT_OF_MEMORY), monkeypatch)
    assert attempt.proven is None
    assert attempt.refusal is not None
    assert "the check ended with out_of_memory" in attempt.refusal.reason


@pytest.mark.parametrize(
    ("error", "late", "left_out"),
    [
        (0.0, True, "the rest of the check of mixed_bfloat16 at batch 8"),
        (0.5, True, "which modules mixed_bfloat16 needs in float32"),
        (0.5, False, ""),
    ],
)
def test_what_time_was_missing_for_is_told_and_nothing_is_called_rejected_that_was_not(
    error: float, late: bool, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time runs out before the check begins where it fails nothing, else while it compares."""
    told: list[Any] = []
    monkeypatch.setattr(JOB, "listener", told.append)
    stalls = math.inf if error else 3
    tracer = FakeTracer(error=error, step_error=error, stalls_after=stalls)
    if late:
        began = time.monotonic()

        def clock() -> float:
            is_late = not error or "compare_steps" in tracer.calls
            return began + (2000.0 if is_late else 0.0)

        monkeypatch.setattr(JOB, "deadline", Deadline(began, 1000.0, clock))
    attempt = prove(tracer, monkeypatch)
    assert attempt.left_out == left_out
    assert attempt.refusal is not None
    judged = [event.verdict for event in told if isinstance(event, Judged)]
    if late:
        assert judged == ["rejected" if error else "unproven"]
    if not error:
        assert attempt.refusal.reason.startswith("the time limit ended its check")


ISLANDS = IslandsEvidence("runs with norm in float32", 4, 0.1, 0.8)


@pytest.mark.parametrize(("islands", "rate"), [(None, 10.0), (ISLANDS, 8.0)])
def test_what_was_proven_before_runs_at_the_speed_it_has_now(
    islands: IslandsEvidence | None, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier tuning may have run at another pace; the verdict holds at any."""
    earlier = ProvenRecipe(BFLOAT16, REFERENCE, 700.0, 0.001, islands=islands)
    monkeypatch.setattr(STUDY, "recall", lambda *_: earlier)
    attempt = prove(Tracer("nothing"), monkeypatch)
    assert attempt.proven is not None
    assert (attempt.proven.verdict, attempt.proven.islands) == (REFERENCE, islands)
    assert attempt.proven.rate == pytest.approx(rate)
    assert attempt.proven.step_seconds == pytest.approx(0.1 * 10.0 / rate)


class Noisy(FakeTracer):
    """A half of each gradient is noise; the first `failures` calls end the worker."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures

    def compare_steps(self, **asked: Any) -> tuple[StepComparison, ...]:
        if self.failures:
            self.failures -= 1
            raise WorkerFailure(FailureKind.TIMEOUT, "why")
        return tuple(replace(each, noise_share=0.5) for each in super().compare_steps(**asked))


def test_the_noise_scale_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    study = SimpleNamespace(recall=kept.get, remember=kept.__setitem__, notes=dict)
    tracer = Noisy(failures=1)
    monkeypatch.setattr(module, "RemoteTracer", lambda runner: tracer)
    space = cast(Space, SimpleNamespace(policies=()))
    preflight = PreflightResult(TASK, device(DeviceKind.CUDA), space)
    runner = SimpleNamespace(pids=())
    prover = Prover(cast(Any, JOB), cast(Any, study), preflight, cast(Any, runner))
    plain = Recipe(batch_size=16)
    assert prover.noise_scale(plain) is None, "what a worker did not answer is not known"
    found = prover.noise_scale(plain)
    assert found is not None
    assert found.at == pytest.approx(16.0)
    calls = len(tracer.calls)
    assert prover.noise_scale(plain) == found
    assert len(tracer.calls) == calls


def test_what_the_search_found_a_policy_to_need_is_evidence_of_its_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RemoteTracer", lambda runner: Tracer("nothing"))
    given, kept = Recipe(), replace(BFLOAT16, float32_modules=("moe",))
    plain, found = (cast(Space, SimpleNamespace(recipe=lambda _, r=r: r)) for r in (given, kept))
    preflight = PreflightResult(TASK, device(DeviceKind.CUDA), plain)
    prover = Prover(cast(Any, JOB), cast(Any, STUDY), preflight, cast(Any, None))
    needed = {"mixed_bfloat16": NeededIslands(("moe",), 2, "it does not run without", 0.25)}
    prover.take(SearchResult(Trials(TASK, found, ()), {}, needed_islands=needed))
    proven = prover.prove(OUTCOME).proven
    assert proven is not None
    assert proven.recipe == kept
    assert proven.islands == IslandsEvidence.of(2, 0.25, "it does not run without")
