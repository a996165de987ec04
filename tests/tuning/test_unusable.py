"""What becomes of a tuning where an accelerator is here but cannot be used."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from autoprec import api, probing, recipe_for_device
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import MachineObservation, Unusable
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning, DeviceUnusable, UsageError
from autoprec.reporting.plan import print_plan
from autoprec.tuning.events import Event, Note
from autoprec.tuning.flow import plan as planning
from autoprec.tuning.flow import tuner
from autoprec.tuning.flow.preflight import load_task
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.workers.handlers import LoadedTask
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource

CPU = Observation(DeviceKind.CPU, name="a CPU")
MISMATCH = Unusable(DeviceKind.CUDA, "an NVIDIA GPU is here but its driver is not")
MISSED = MachineObservation(devices=(CPU,), notes=("a remark",), unusable=(MISMATCH,))


@pytest.fixture
def a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that cannot be used."""
    for module in (probing, recipe_for_device):
        monkeypatch.setattr(module, "observe", lambda **_: MISSED)
    monkeypatch.setattr(probing, "measure_device", lambda facts, frameworks: facts)


def loaded(job: TuningJob, *built_for: DeviceKind) -> LoadedTask:
    runner = SimpleNamespace(load=lambda: LoadedTask("torch", usable=("cpu",), built_for=built_for))
    return load_task(job, cast(Runner, runner))


def works(
    monkeypatch: pytest.MonkeyPatch, task: Path, **settings: Any
) -> tuple[TuningJob, list[Event]]:
    """What the tuner would be given, and what is said before."""
    given: list[TuningJob] = []
    events: list[Event] = []

    def take(job: TuningJob) -> Any:
        given.append(job)
        raise StopIteration

    monkeypatch.setattr(tuner, "tune", take)
    with pytest.raises(StopIteration):
        api.tune(task, listener=events.append, **settings)
    return given[0], events


@pytest.mark.usefixtures("a_broken_driver")
def test_a_gpu_that_cannot_be_used_stops_a_framework_that_was_built_for_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    job, events = works(monkeypatch, simulated())
    assert events == [Note("a remark"), Note(MISMATCH.text, warning=True)]
    with pytest.raises(DeviceUnusable, match=r"its driver is not.*`device=cpu`") as stopped:
        loaded(job, DeviceKind.CUDA)
    assert stopped.value.exit_code == 2
    assert loaded(job, DeviceKind.ROCM)
    assert loaded(job)


@pytest.mark.usefixtures("a_broken_driver")
def test_whoever_names_the_cpu_gets_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    job, events = works(monkeypatch, simulated(), device="cpu")
    assert events == [Note("a remark")]
    assert loaded(job, DeviceKind.CUDA)


def test_another_accelerator_that_can_be_used_is_tuned(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    seen = MachineObservation(devices=(Observation(DeviceKind.XPU), CPU), unusable=(MISMATCH,))
    monkeypatch.setattr(probing, "observe", lambda **_: seen)
    job, _ = works(monkeypatch, simulated())
    runner = SimpleNamespace(
        load=lambda: LoadedTask("torch", usable=("xpu",), built_for=tuple(DeviceKind))
    )
    assert load_task(job, cast(Runner, runner))


def test_a_result_from_before_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    task = simulated()
    settings = {"policies": "float32", "batch_sizes": (16,), "trials": 1, "rounds": 1}
    monkeypatch.setattr(probing, "measure_device", lambda facts, frameworks: facts)
    first = api.tune(task, device="cpu", **settings)
    seen = replace(probing.observe(), unusable=(MISMATCH,))
    monkeypatch.setattr(probing, "observe", lambda **_: replace(seen, devices=seen.devices[-1:]))
    assert api.tune(task, **settings) == first

    def refuse(job: TuningJob, runner: Runner) -> LoadedTask:
        raise DeviceUnusable(job.target.unusable[0].text)

    monkeypatch.setattr(tuner, "load_task", refuse)
    with pytest.raises(DeviceUnusable, match="its driver is not"):
        api.tune(task, **settings)


@pytest.mark.usefixtures("a_broken_driver")
def test_a_profile_made_on_such_a_device_is_told_why_it_does_not_fit(
    write_profile: Callable[[Recipe, str], Path],
) -> None:
    made = api.load_profile(write_profile(Recipe(), "simulated"))
    device = replace(made.device, fingerprint=replace(made.device.fingerprint, kind="cuda"))
    there = replace(made, device=device)
    assert MISMATCH.text in api.check_profile(there).problems
    assert MISMATCH.text not in api.check_profile(made).problems
    with pytest.raises(UsageError, match="its driver is not"):
        api.check_profile(there, device="cuda")
    with pytest.warns(AutoprecWarning, match="its driver is not"):
        api.apply_profile(there, device="cpu")


def planned_for(
    job: TuningJob, *devices: DeviceKind, built_for: DeviceKind | None, usable: tuple[str, ...] = ()
) -> DeviceKind:
    """The kind of device that a plan takes of these; the task is never run."""
    facts = [DeviceFacts(Observation(kind), "", "", {}) for kind in devices]
    built = (built_for,) if built_for else ()
    answer = LoadedTask("torch", usable=("cpu", *usable), built_for=built)
    taken: list[DeviceKind] = []

    def figures(facts: DeviceFacts) -> DeviceFacts:
        taken.append(facts.kind)
        return facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "load_task", lambda job, runner: answer)
        patch.setattr(planning, "describe", lambda job, runner: SimpleNamespace(software={}))
        patch.setattr(planning, "plan_for", lambda *given: None)
        patch.setattr(TuningJob, "runner", lambda self: contextlib.nullcontext())
        planning.plan(job, facts, figures)
    return taken[0]


@pytest.mark.usefixtures("a_broken_driver")
def test_a_plan_is_for_the_first_device_that_the_framework_is_built_for(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    job, _ = works(monkeypatch, simulated())
    xpu, cpu, cuda = DeviceKind.XPU, DeviceKind.CPU, DeviceKind.CUDA
    assert planned_for(job, xpu, cpu, built_for=None) is cpu
    assert planned_for(job, xpu, cpu, built_for=xpu) is xpu
    assert planned_for(job, cuda, built_for=None) is cuda  # named, and perhaps not here
    tpu = DeviceKind.TPU
    assert planned_for(job, tpu, cpu, built_for=None, usable=("tpu",)) is tpu
    with pytest.raises(DeviceUnusable, match=r"its driver is not.*`device=cpu`"):
        planned_for(job, xpu, cpu, built_for=cuda)


@pytest.mark.usefixtures("a_broken_driver")
def test_a_plan_tells_what_the_probe_noted(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    plan = api.plan(simulated())
    assert plan.notes[-2:] == ("a remark", MISMATCH.text)
    assert "a remark" not in api.plan(simulated(), device="v100").notes


def test_a_build_for_a_device_that_it_cannot_use_is_not_to_be_installed_again(
    simulated: Callable[..., Path],
) -> None:
    target = Target(
        DeviceFacts(Observation(DeviceKind.XPU), "", "", {}), {}, lambda known, _: known
    )
    job = TuningJob(TaskSource(simulated()), target, Options(), lambda event: None)
    with pytest.raises(DeviceUnusable, match="This build is for such devices: fix the driver"):
        loaded(job, DeviceKind.XPU)
    with pytest.raises(DeviceUnusable, match="Install a build of it for this device"):
        loaded(job)


def test_a_device_that_the_framework_never_trains_on_is_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, simulated: Callable[..., Path]
) -> None:
    real = planning.load_task
    monkeypatch.setattr(
        planning, "load_task", lambda *given: replace(real(*given), trains_on=(DeviceKind.CPU,))
    )
    plan = api.plan(simulated(), device="tpu v5e")
    assert plan.refusal == "simulated models are tuned on cpu, not on tpu"
    assert plan.expectation == ()
    console = Console(width=200, record=True, file=io.StringIO())
    print_plan(plan, console)
    assert f"would be refused: {plan.refusal}" in (text := console.export_text())
    assert "would be tried" not in text


def test_an_amd_gpu_is_not_tuned_on_the_nvidia_gpu_beside_it(
    simulated: Callable[..., Path],
) -> None:
    """PyTorch calls both "cuda"; its build is for one of them."""
    target = Target(
        DeviceFacts(Observation(DeviceKind.ROCM), "", "", {}), {}, lambda known, _: known
    )
    job = TuningJob(TaskSource(simulated()), target, Options(), lambda event: None)

    def answer(built_for: DeviceKind) -> LoadedTask:
        found = LoadedTask("torch", usable=("cuda", "cpu"), built_for=(built_for,))
        return load_task(job, cast(Runner, SimpleNamespace(load=lambda: found)))

    assert answer(DeviceKind.ROCM)
    with pytest.raises(DeviceUnusable, match="Install a build of it for this device"):
        answer(DeviceKind.CUDA)


def test_no_build_is_named_for_a_device_that_the_framework_never_trains_on(
    simulated: Callable[..., Path],
) -> None:
    target = Target(
        DeviceFacts(Observation(DeviceKind.MPS), "", "", {}), {}, lambda known, _: known
    )
    job = TuningJob(TaskSource(simulated()), target, Options(), lambda event: None)
    found = LoadedTask("keras", usable=("cpu",), trains_on=(DeviceKind.CPU, DeviceKind.CUDA))
    with pytest.raises(DeviceUnusable) as stopped:
        load_task(job, cast(Runner, SimpleNamespace(load=lambda: found)))
    said = "keras models are tuned on cpu, cuda, not on mps; tune for another: `device=cpu`"
    assert str(stopped.value) == said
