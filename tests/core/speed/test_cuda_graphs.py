"""CUDA graphs are tried where launches bound the step and nothing outlives it; else it is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import device_of_family

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Kernel, TaskFacts
from autoprec.core.speed.cuda_graphs import graph_dangers, graph_objections

H100 = device_of_family("nvidia-h100-sxm")
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)

#: 300 kernels of a million operations a sample: at batch 32 they compute for less than 1 ms.
SHORT = TaskFacts("torch", {}, 32, 32, 1000, kernels=(Kernel(1e6, 100.0, 0, 300),))


def objections(
    facts: DeviceFacts = H100, batch: int = 32, compiled: bool = True, **task: Any
) -> str:
    found = graph_objections(facts, replace(SHORT, **task), POLICIES, batch, compiled=compiled)
    return "; ".join(found)


def test_they_are_tried_where_launching_takes_longer_than_computing() -> None:
    assert objections() == ""
    assert objections(batch=2**16).startswith("at batch 65536 the step's kernels compute for at")
    assert objections(batch=2**16).endswith("longer than launching them takes (3 ms)")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"compiled": False}, "a mode of the compiler, which is not tried"),
        ({"surveyed": 4}, "batches differ in shape"),
        ({"keeps_outputs": True}, "keeps outputs of the model beyond the step"),
        ({"kernels": ()}, "what the step's kernels take here is not known"),
        (
            {"facts": DeviceFacts(Observation(DeviceKind.CPU), "f", "a CPU", {})},
            "CUDA graphs are not built for cpu",
        ),
    ],
)
def test_they_are_refused_with_their_reason(given: dict[str, Any], reason: str) -> None:
    assert reason in objections(**given)


def test_every_danger_is_named() -> None:
    assert len(graph_dangers(replace(SHORT, surveyed=4, keeps_outputs=True))) == 2
    assert graph_dangers(replace(SHORT, surveyed=0)) == ()
