"""Whole tunings whose confirmation belies the search: what seemed slower is compared once more.

While a neighbour uses up the processor's cache, the simulated task's steps take longer where the
batch would fit in it. The neighbour leaves when the first proof begins.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.tuning.events import Event, Judged, Note, Stage

pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

TASK = """
from pathlib import Path
from simulated import SimulatedModel

ALONE = Path(__file__).with_name("alone")

class Cached(SimulatedModel):
    def step_seconds(self, policy, batch, layout, compiled):
        each = 6e-4 if batch not in {cached} else {alone} if ALONE.exists() else 9e-4
        return 2e-3 + batch * each * (0.9 if policy == "mixed_bfloat16" else 1.0)

def build_model():
    return Cached(broken={broken})

def build_data(batch_size):
    return []
"""

RUN_AGAIN = "what seemed slower to it is compared once more"


@pytest.fixture
def tuned(tmp_path: Path) -> Callable[..., tuple[Profile, list[Event]]]:
    """Tune the task; its batches `cached` take `alone` seconds a sample when it is alone."""

    def run(
        cached: tuple[int, ...] = (16, 32, 64),
        alone: float = 5e-4,
        broken: tuple[str, ...] = (),
        leaves: bool = True,
        stop: Callable[[list[Event]], bool] = lambda _: False,
        **settings: Any,
    ) -> tuple[Profile, list[Event]]:
        path, events = tmp_path / "cached_task.py", list[Event]()
        path.write_text(TASK.format(cached=cached, alone=alone, broken=broken))

        def listen(event: Event) -> None:
            events.append(event)
            if leaves and isinstance(event, Stage) and event.name == "proof":
                path.with_name("alone").touch()
            if stop(events):
                raise KeyboardInterrupt

        policies = ("float32", "mixed_bfloat16")
        settings = {"rounds": 5, "policies": policies, "batch_sizes": "16-512", **settings}
        return tune(path, listener=listen, **settings), events

    return run


def stages(events: list[Event], name: str) -> list[str]:
    return [event.detail for event in events if isinstance(event, Stage) and event.name == name]


def runs_again(events: list[Event]) -> bool:
    return any(isinstance(event, Note) and RUN_AGAIN in event.text for event in events)


def test_a_recipe_that_only_seemed_slower_is_found_and_proven(
    tuned: Callable[..., tuple[Profile, list[Event]]],
) -> None:
    """At batch 512 the search saw 1.75x, where float32 at 32 is as fast without the neighbour."""
    profile, events = tuned()
    assert runs_again(events)
    assert stages(events, "proof") == [
        "mixed_bfloat16 at batch 512",
        "mixed_bfloat16 at batch 64",
    ]
    assert (profile.recipe.policy, profile.recipe.batch_size) == (Policy.MIXED_BFLOAT16, 64)
    assert profile.evidence.speedup.ratio == pytest.approx(
        (5e-4 + 2e-3 / 32) / (4.5e-4 + 2e-3 / 64), rel=0.03
    )
    assert profile.evidence.inconclusive == ""


def test_a_stopped_tuning_resumes_with_what_the_second_comparison_said(
    tuned: Callable[..., tuple[Profile, list[Event]]],
) -> None:
    def second_confirmation(events: list[Event]) -> bool:
        return len(stages(events, "confirmation")) == 2

    with pytest.raises(KeyboardInterrupt):
        tuned(stop=second_confirmation)
    profile, events = tuned()
    assert not runs_again(events)
    assert stages(events, "proof") == ["mixed_bfloat16 at batch 64"]
    assert not any(isinstance(event, Judged) for event in events)  # it was proven before
    assert (profile.recipe.policy, profile.recipe.batch_size) == (Policy.MIXED_BFLOAT16, 64)


def test_where_the_same_recipe_stays_ahead_nothing_is_proven_or_confirmed_twice(
    tuned: Callable[..., tuple[Profile, list[Event]]],
) -> None:
    """Only batch 32 was slowed, and is not the fastest."""
    profile, events = tuned(cached=(32,), alone=5.5e-4)
    assert runs_again(events)
    assert len(stages(events, "proof")) == 1
    assert stages(events, "confirmation") == ["the winner against float32"]
    assert profile.recipe.batch_size > 64


def test_what_was_refused_is_not_proven_again(
    tuned: Callable[..., tuple[Profile, list[Event]]],
) -> None:
    profile, events = tuned(cached=(32,), alone=5.5e-4, broken=("mixed_bfloat16",))
    assert runs_again(events)
    assert stages(events, "proof") == ["mixed_bfloat16 at batch 512"]
    assert profile.recipe.policy is Policy.FLOAT32
    assert any(refusal.candidate == "mixed_bfloat16" for refusal in profile.evidence.refusals)


def test_a_search_that_the_confirmation_bears_out_is_the_only_one(
    tuned: Callable[..., tuple[Profile, list[Event]]],
) -> None:
    profile, events = tuned(leaves=False)
    assert not runs_again(events)
    assert profile.recipe.batch_size > 64


def test_a_time_limit_leaves_no_time_for_a_second_search(
    tuned: Callable[..., tuple[Profile, list[Event]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of the time has passed by then."""
    monkeypatch.setattr("autoprec.tuning.tuner.SEARCH_SHARE", 0.0)
    _, events = tuned(time_limit=600.0)
    assert not runs_again(events)
