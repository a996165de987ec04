"""A device's matrix products are timed once for every task that is tuned on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from factories import device_of_family

from autoprec import measurement_cache
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import with_measurements
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import TaskFacts
from autoprec.tuning.events import Event, Stage
from autoprec.tuning.flow.preflight import measure_device
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.task_source import TaskSource

CPU = device_of_family("amd-zen5")


Measure = Callable[[DeviceFacts, Mapping[str, str]], DeviceFacts]


def of_task(
    installed: Mapping[str, str],
    used: Mapping[str, str],
    measure: Measure,
    deadline: Deadline | None = None,
) -> tuple[DeviceFacts, list[str]]:
    """Return what is known of the device for a task that uses some software, and the stages."""
    said: list[str] = []
    study = SimpleNamespace(recall=lambda *name: None, remember=lambda *pair: None)

    def listen(event: Event) -> None:
        said.extend([event.name] if isinstance(event, Stage) else [])

    target = Target(CPU, installed, measure)
    job = TuningJob(
        TaskSource(Path("task.py")), target, Options(), listen, deadline=deadline or Deadline()
    )
    task = TaskFacts("keras", used, 32, 32, 1000)
    return measure_device(job, cast(Study, study), task), said


def test_a_devices_products_are_timed_once_for_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second task takes what the first one's tuning remembered; another version times anew."""
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    timed: list[DeviceFacts] = []
    products = (Product(DType.FLOAT32, gflops=100.0), Product(DType.BFLOAT16, gflops=300.0))
    measured = Measurements("torch", products, 20.0, date="2026-11-24")

    def measure(known: DeviceFacts, software: Mapping[str, str]) -> DeviceFacts:
        timed.append(known)
        kept = measurement_cache.TimedDevice(known.fingerprint, "torch", "2.13.0", measured)
        assert measurement_cache.remember(kept) == ""
        return with_measurements(known, measured)

    def of_another_task(version: str = "2.13.0") -> tuple[DeviceFacts, list[str]]:
        return of_task({"torch": version}, {"torch": version}, measure)

    assert of_another_task()[1] == ["probe"]
    facts, said = of_another_task()
    assert (len(timed), said) == (1, [])
    assert facts.fact(DType.BFLOAT16).measured_gflops == 300.0
    assert of_another_task("2.14.0")[1] == ["probe"]
    assert len(timed) == 2


@pytest.mark.parametrize(("now", "stages"), [(11.0, ["probe"]), (13.0, [])])
def test_without_time_they_stay_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float, stages: list[str]
) -> None:
    """A description may take 12 s of a minute."""
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    torch = {"torch": "2.13.0"}
    late = Deadline(0.0, 60.0, lambda: now)
    facts, said = of_task(torch, torch, lambda known, _: known, late)
    assert said == stages
    assert facts.measured_on == ""


def test_the_tasks_own_framework_times_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's products, remembered, say nothing of TensorFlow's; of an unknown framework's all
    there is to say."""
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    installed = {"torch": "2.13.0", "tensorflow": "2.21.0", "keras": "3.15.1", "python": "3.13"}
    rates = {"torch": 50.0, "tensorflow": 300.0}
    asked: list[Mapping[str, str]] = []

    def timed(framework: str) -> Measurements:
        slow = Product(DType.BFLOAT16, gflops=rates[framework])
        return Measurements(framework, (Product(DType.FLOAT32, gflops=100.0), slow), 20.0)

    def measure(known: DeviceFacts, software: Mapping[str, str]) -> DeviceFacts:
        asked.append(software)
        return with_measurements(known, timed("tensorflow"))

    kept = replace(timed("torch"), date="2026-11-24")
    timing = measurement_cache.TimedDevice(CPU.fingerprint, "torch", "2.13.0", kept)
    assert measurement_cache.remember(timing) == ""

    def policies(*used: str) -> list[Policy]:
        facts, _ = of_task(installed, {name: installed.get(name, "1") for name in used}, measure)
        return list(propose(facts).policies)

    assert Policy.MIXED_BFLOAT16 in policies("python", "keras", "tensorflow")
    assert [set(each) for each in asked] == [{"tensorflow", "keras", "python"}]
    for others in (("torch", "python"), ("keras", "torch"), ("toy", "python")):
        assert Policy.MIXED_BFLOAT16 not in policies(*others)
    assert len(asked) == 1
