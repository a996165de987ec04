"""Whole tunings on a simulated device that multiplies in bfloat16 and float16 equally fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import Support
from autoprec.core.dtypes import DType, Policy
from autoprec.core.profile import Profile
from autoprec.reporting.show import profile_lines
from autoprec.tuning.events import Event, Judged, Note, Stage, TrialFinished

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

GFLOPS = {DType.FLOAT32: 100.0, DType.BFLOAT16: 250.0, DType.FLOAT16: 240.0}
F32, BF16, F16 = Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16
FASTER = {"float32": 0.0005, "mixed_bfloat16": 0.00025, "mixed_float16": 0.00026}
SPARED = (
    "not tried: it is not known to be faster here than mixed_bfloat16, which was tried "
    "(--policies float32,mixed_bfloat16,mixed_float16 tries both)"
)
TRIED = "no recipe of mixed_bfloat16 passes and gains: mixed_float16 is tried"


@pytest.fixture(autouse=True)
def both_fast(unmeasured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products have been timed: both kinds of 16 bits are about as fast."""

    def timed(facts: DeviceFacts, software: object) -> DeviceFacts:
        known = {
            dtype: DTypeFact(Support.NATIVE, Evidence.MEASURED, measured_gflops=speed)
            for dtype, speed in GFLOPS.items()
        }
        return replace(facts, dtypes={**facts.dtypes, **known})

    monkeypatch.setattr("autoprec.probing.measure_device", timed)


@pytest.fixture
def tuned(simulated: Callable[..., Path]) -> Callable[..., tuple[Profile, list[Event]]]:
    """Tune a simulated model with these fields; return the profile and all events."""

    def run(
        settings: Mapping[str, Any] | None = None, **fields: Any
    ) -> tuple[Profile, list[Event]]:
        events: list[Event] = []
        path = simulated(**{"per_sample": FASTER, **fields})
        known = {"rounds": 5, "batch_sizes": (32, 64), "device": "cpu", **(settings or {})}
        return tune(path, listener=events.append, **known), events

    return run


def policies(events: list[Event]) -> list[Policy]:
    """The policies of the trials, in their order, each once."""
    return list(dict.fromkeys(e.recipe.policy for e in events if isinstance(e, TrialFinished)))


def refused(profile: Profile) -> dict[str, str]:
    return {each.candidate: each.reason for each in profile.evidence.refusals}


def said(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def test_float16_is_left_out_where_bfloat16_passes_and_the_profile_says_so(tuned: Any) -> None:
    profile, events = tuned()
    assert policies(events) == [F32, BF16]
    assert profile.recipe.policy is BF16
    assert refused(profile)["mixed_float16"] == SPARED
    assert f"refused: mixed_float16: {SPARED}" in profile_lines(profile)
    assert not [each for each in profile.evidence.not_covered if "float16" in each]


def test_float16_is_tried_where_the_user_names_it(tuned: Any) -> None:
    profile, events = tuned({"policies": (F32, BF16, F16)})
    assert policies(events) == [F32, BF16, F16]
    assert SPARED not in refused(profile).values()


def test_float16_is_tried_where_bfloat16_is_refused_by_its_proof(tuned: Any) -> None:
    profile, events = tuned(broken=("mixed_bfloat16",))
    judged = [(e.recipe.policy, e.verdict) for e in events if isinstance(e, Judged)]
    assert (BF16, "rejected") in judged
    assert judged[-1] == (F16, "equal")
    first = next(i for i, e in enumerate(events) if isinstance(e, Judged))
    trial = next(
        i for i, e in enumerate(events) if isinstance(e, TrialFinished) and e.recipe.policy is F16
    )
    assert first < events.index(next(e for e in events if getattr(e, "text", "") == TRIED)) < trial
    assert profile.recipe.policy is F16
    assert profile.recipe.loss_scale is not None
    assert "mixed_bfloat16" in refused(profile)
    assert "mixed_float16" not in refused(profile)
    proofs = [e for e in events if isinstance(e, Stage) and e.name == "proof"]
    named = [event.detail for event in proofs if "bfloat16" in event.detail]
    assert len(named) == len(set(named))  # what was refused is not proven again


def test_float16_is_tried_where_what_bfloat16_needs_in_float32_costs_its_gain(tuned: Any) -> None:
    slow = {**FASTER, "mixed_bfloat16": 0.00049}
    profile, events = tuned(per_sample=slow, broken=("mixed_bfloat16",), sensitive_module="norm")
    assert TRIED in said(events)
    assert profile.recipe.policy is F16


@pytest.mark.parametrize(
    "fields",
    [
        {"per_sample": {**FASTER, "mixed_bfloat16": 0.0006}},
        {"unsupported": ("mixed_bfloat16",)},
    ],
    ids=["slow", "unsupported"],
)
def test_float16_is_tried_in_the_search_where_bfloat16_is_slow_or_does_not_run(
    tuned: Any, fields: dict[str, Any]
) -> None:
    profile, events = tuned(**fields)
    assert policies(events) == [F32, BF16, F16]
    assert TRIED not in said(events)
    assert profile.recipe.policy is F16
    assert "mixed_bfloat16" in refused(profile)


def test_where_neither_passes_float32_is_the_answer_and_both_are_refused(tuned: Any) -> None:
    profile, events = tuned(broken=("mixed_bfloat16", "mixed_float16"))
    assert policies(events) == [F32, BF16, F16]
    assert profile.recipe.policy is F32
    assert set(refused(profile)) >= {"mixed_bfloat16", "mixed_float16"}


def test_a_finished_tuning_with_float16_is_taken_up_as_it_is(tuned: Any) -> None:
    first, _ = tuned(broken=("mixed_bfloat16",))
    again, events = tuned(broken=("mixed_bfloat16",))
    assert again == first
    assert policies(events) == []


def test_a_grid_is_of_all_policies(tuned: Any) -> None:
    profile, events = tuned({"sampler": "grid"})
    assert set(policies(events)) == {F32, BF16, F16}
    assert SPARED not in refused(profile).values()


def test_the_best_two_policies_are_compiled_before_the_trials_are_used_up(tuned: Any) -> None:
    settings = {"policies": (F32, BF16, F16), "compile": True, "batch_sizes": (32,), "trials": 5}
    _, events = tuned(settings, compiled=0.8)
    ran = [(e.recipe.policy, e.recipe.compile) for e in events if isinstance(e, TrialFinished)]
    assert set(ran[:3]) == {(F32, False), (BF16, False), (F16, False)}
    assert ran[3:] == [(BF16, True), (F16, True)]
