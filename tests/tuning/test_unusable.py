"""What becomes of a tuning where an accelerator is here but cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec import api
from autoprec.core.device import DeviceKind, Observation
from autoprec.core.probe import MachineObservation, Unusable
from autoprec.errors import DeviceUnusable
from autoprec.tuning import tuner
from autoprec.tuning.events import Event, Note
from autoprec.tuning.preflight import load
from autoprec.tuning.service import Loaded
from autoprec.tuning.trials import Runner
from autoprec.tuning.work import Work

CPU = Observation(DeviceKind.CPU, name="a CPU")
MISMATCH = Unusable(DeviceKind.CUDA, "an NVIDIA GPU is here but its driver is not")
MISSED = MachineObservation(devices=(CPU,), notes=("a remark",), unusable=(MISMATCH,))


@pytest.fixture
def a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that cannot be used."""
    monkeypatch.setattr(api, "observe", lambda **_: MISSED)
    monkeypatch.setattr(api, "_measured", lambda facts, frameworks: facts)


def loaded(work: Work, *built_for: DeviceKind) -> Loaded:
    runner = SimpleNamespace(load=lambda: Loaded("torch", usable=("cpu",), built_for=built_for))
    return load(work, cast(Runner, runner))


def works(monkeypatch: pytest.MonkeyPatch, task: Path, **settings: Any) -> tuple[Work, list[Event]]:
    """What the tuner would be given, and what is said before."""
    given: list[Work] = []
    events: list[Event] = []

    def take(work: Work) -> Any:
        given.append(work)
        raise StopIteration

    monkeypatch.setattr(tuner, "tune", take)
    with pytest.raises(StopIteration):
        api.tune(task, listener=events.append, **settings)
    return given[0], events


@pytest.mark.usefixtures("a_broken_driver")
def test_a_gpu_that_cannot_be_used_stops_a_framework_that_was_built_for_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    work, events = works(monkeypatch, simulated())
    assert events == [Note("a remark"), Note(MISMATCH.text, warning=True)]
    with pytest.raises(DeviceUnusable, match=r"its driver is not.*--device cpu") as stopped:
        loaded(work, DeviceKind.CUDA)
    assert stopped.value.exit_code == 2
    assert loaded(work, DeviceKind.ROCM)
    assert loaded(work)


@pytest.mark.usefixtures("a_broken_driver")
def test_whoever_names_the_cpu_gets_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    work, events = works(monkeypatch, simulated(), device="cpu")
    assert events == [Note("a remark")]
    assert loaded(work, DeviceKind.CUDA)


def test_another_accelerator_that_can_be_used_is_tuned(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    seen = MachineObservation(devices=(Observation(DeviceKind.XPU), CPU), unusable=(MISMATCH,))
    monkeypatch.setattr(api, "observe", lambda **_: seen)
    work, _ = works(monkeypatch, simulated())
    runner = SimpleNamespace(
        load=lambda: Loaded("torch", usable=("xpu",), built_for=tuple(DeviceKind))
    )
    assert load(work, cast(Runner, runner))


def test_a_result_from_before_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    task = simulated()
    settings = {"policies": "float32", "batch_sizes": (16,), "trials": 1, "rounds": 1, "wait": True}
    monkeypatch.setattr(api, "_measured", lambda facts, frameworks: facts)
    first = api.tune(task, device="cpu", **settings)
    seen = replace(api.observe(), unusable=(MISMATCH,))
    monkeypatch.setattr(api, "observe", lambda **_: replace(seen, devices=seen.devices[-1:]))
    assert api.tune(task, **settings) == first

    def refuse(work: Work, runner: Runner) -> Loaded:
        raise DeviceUnusable(work.place.unusable[0].text)

    monkeypatch.setattr(tuner, "load", refuse)
    with pytest.raises(DeviceUnusable, match="its driver is not"):
        api.tune(task, **settings)
