"""A device's matrix products are timed once for every task that is tuned on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from factories import device_of_family

from autoprec import measurement_cache
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import with_measurements
from autoprec.core.dtypes import DType
from autoprec.tuning.events import Event, Stage
from autoprec.tuning.flow.preflight import measure_device
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.study.study import Study
from autoprec.workers.task_source import TaskSource

CPU = device_of_family("amd-zen5")


def test_a_devices_products_are_timed_once_for_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second task takes what the first one's tuning remembered; another version times anew."""
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    timed: list[DeviceFacts] = []
    products = (Product(DType.FLOAT32, gflops=100.0), Product(DType.BFLOAT16, gflops=300.0))
    measured = Measurements("torch", products, 20.0, date="2026-11-24")

    def measure(known: DeviceFacts) -> DeviceFacts:
        timed.append(known)
        kept = measurement_cache.TimedDevice(known.fingerprint, "torch", "2.13.0", measured)
        assert measurement_cache.remember(kept) == ""
        return with_measurements(known, measured)

    def of_another_task(version: str = "2.13.0") -> tuple[DeviceFacts, list[str]]:
        said: list[str] = []
        target = Target(CPU, {"torch": version}, measure)
        study = SimpleNamespace(recall=lambda *name: None, remember=lambda *pair: None)

        def listen(event: Event) -> None:
            said.extend([event.name] if isinstance(event, Stage) else [])

        job = TuningJob(TaskSource(Path("task.py")), target, Options(), listen)
        return measure_device(job, cast(Study, study)), said

    assert of_another_task()[1] == ["probe"]
    facts, said = of_another_task()
    assert (len(timed), said) == (1, [])
    assert facts.fact(DType.BFLOAT16).measured_gflops == 300.0
    assert of_another_task("2.14.0")[1] == ["probe"]
    assert len(timed) == 2
