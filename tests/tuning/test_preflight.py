"""Which recipes a task's own settings leave to try."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.device import DeviceFacts, DeviceKind, DTypeFact, Observation, Support
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.rules import propose
from autoprec.core.space import Space
from autoprec.tuning.events import Event, Note
from autoprec.tuning.options import Options
from autoprec.tuning.preflight import build_space
from autoprec.tuning.work import Place, Work

NATIVE = DTypeFact(Support.NATIVE)
FACTS = DeviceFacts(
    Observation(DeviceKind.CUDA), "f", "a GPU", dict.fromkeys([DType.FLOAT32, DType.TF32], NATIVE)
)


def space(events: list[Event], policies: tuple[Policy, ...] = (), **task: Any) -> Space:
    place = cast(Place, SimpleNamespace(facts=FACTS))
    work = Work(Path("task.py"), place, Options(policies=policies), events.append)
    facts = TaskFacts("keras", {}, 32, 32, parameters=100, batch_size=32, **task)
    return build_space(work, facts, FACTS, propose(FACTS))


def test_tf32_is_tried_where_it_is_another_recipe_than_the_baseline() -> None:
    events: list[Event] = []
    assert Policy.TF32 in space(events).policies
    assert events == []
    assert Policy.TF32 not in space(events, uses_tf32=True).policies
    assert [type(event) for event in events] == [Note]


@pytest.mark.parametrize(("compiled", "levels"), [(False, (False, True)), (True, (False,))])
def test_a_model_that_compiles_itself_is_left_to_it(
    compiled: bool, levels: tuple[bool, ...]
) -> None:
    assert space([], compiled=compiled).compile == levels
