"""Verifying a profile compares its settings with plain float32, too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.numerics.verdict import Verdict
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.flow import verification
from autoprec.tuning.race.interleaved_timing import TimedRounds
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.tuning.stage_results import REFERENCE
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.fuzz.example import FULL
from tests.tuning.proof.fake_tracer import BFLOAT16, FakeTracer

LAID_OUT = Recipe(batch_size=8, memory_format="channels_last")


def prove_again(
    recipe: Recipe,
    tracer: FakeTracer,
    monkeypatch: pytest.MonkeyPatch,
    stated: Verdict = REFERENCE,
) -> Any:
    monkeypatch.setattr(verification, "RemoteTracer", lambda runner: tracer)
    job = SimpleNamespace(
        listener=lambda event: None, options=SimpleNamespace(tolerance=1.0), checkpoint=None
    )
    evidence = SimpleNamespace(parity=stated)
    profile = SimpleNamespace(recipe=recipe, evidence=evidence)
    return verification._prove_again(cast(Any, job), cast(Any, profile), cast(Any, None))


@pytest.mark.parametrize(("broken", "verdict"), [((), "equal"), (("memory_format",), "rejected")])
def test_a_float32_profile_with_settings_is_looked_at(
    broken: tuple[str, ...], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = FakeTracer(broken=broken or ("none such",))
    found = prove_again(LAID_OUT, tracer, monkeypatch)
    assert found.verdict == verdict
    assert "channels_last" in found.reason
    assert set(tracer.calls) == {"compare_settings"}


def test_plain_float32_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = FakeTracer()
    assert prove_again(Recipe(batch_size=8), tracer, monkeypatch) is None
    assert tracer.calls == []


@pytest.mark.parametrize(("trained", "reference"), [(4, "reference 4x1"), (0, "reference 8x1")])
def test_a_proof_is_repeated_at_the_batch_that_it_was_made_at(
    trained: int, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer, stated = FakeTracer(), replace(REFERENCE, most_steps=120, trained_batch=trained)
    found = prove_again(BFLOAT16, tracer, monkeypatch, stated)
    assert (found.verdict, found.trained_batch, found.most_steps) == ("equal", trained, 30)
    assert reference in tracer.calls


def test_float32_that_does_not_fit_at_the_larger_batch_leaves_that_gain_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratio = Ratio(2.0, 1.9, 2.1, 9)
    evidence = replace(FULL.evidence, speedup=ratio, throughput=ratio)
    recipe = replace(FULL.recipe, batch_size=64, accumulation_steps=1)
    profile = replace(FULL, recipe=recipe, evidence=evidence)
    alike, plain = (gain.rival for gain in profile.gains())
    assert (alike.batch_size, plain.batch_size) == (64, 512)

    def interleaved(job: object, recipes: list[Recipe], *rest: object) -> TimedRounds:
        for recipe in recipes:
            if recipe.key() == alike.key():
                raise FinalistFailed(
                    recipe, WorkerFailure(FailureKind.OUT_OF_MEMORY, "no memory left")
                )
        rates = {plain.key(): 1.0, profile.recipe.key(): 2.0}
        return TimedRounds(tuple(Finalist(r, (rates[r.key()],) * 9) for r in recipes), {})

    monkeypatch.setattr(verification, "time_interleaved", interleaved)
    job = SimpleNamespace(listener=lambda event: None, options=SimpleNamespace(rounds=3))
    known = verification.ProfiledMemory("torch", profile.baseline, profile)
    found = verification._time_again(cast(Any, job), profile, known, cast(Any, None))
    assert found[0] is None
    assert found[1] is not None
    assert found[1].ratio == 2.0
    claim = verification._judge_gain(profile.gains()[0], None)
    assert claim.result == "unresolved"
    assert claim.found == "float32, batch 64 does not run"
