"""Verifying a profile compares its settings with plain float32, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.recipe import Recipe
from autoprec.tuning import verification
from autoprec.tuning.stage_results import REFERENCE
from tests.tuning.proof.fake_tracer import FakeTracer

LAID_OUT = Recipe(batch_size=8, memory_format="channels_last")


def prove_again(recipe: Recipe, tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(verification, "RemoteTracer", lambda runner: tracer)
    job = SimpleNamespace(
        listener=lambda event: None, options=SimpleNamespace(tolerance=1.0), checkpoint=None
    )
    evidence = SimpleNamespace(parity=REFERENCE)
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
