"""The cache gives back what was kept for this device and version, or nothing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from factories import device_of_family

from autoprec import measurement_cache
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.core.speed.contention import Usage
from autoprec.probing import measure_device
from autoprec.workers.cpu_contention import ProcessorUsage

HERE = Fingerprint(DeviceKind.CPU, "a-family", "A CPU", 16, core_quota=2.0, partition="")
MEASURED = Measurements(
    "torch",
    (Product(DType.FLOAT32, gflops=100.0, size=512), Product(DType.BFLOAT16, gflops=50.0)),
    20.0,
    date="2026-11-24",
)
TIMED = measurement_cache.TimedDevice(HERE, "torch", "2.13.0+cpu", MEASURED)
SOFTWARE = {"python": "3.11.7", "torch": "2.13.0+cpu", "keras": "3.15.1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_is_remembered(folder: Path) -> None:
    assert measurement_cache.recall(HERE, SOFTWARE) == (None, ())
    assert measurement_cache.remember(TIMED) == ""
    assert measurement_cache.recall(HERE, SOFTWARE) == (MEASURED, ())


@pytest.mark.parametrize(
    ("fingerprint", "software"),
    [
        (replace(HERE, family="another"), SOFTWARE),
        (replace(HERE, core_quota=1.0), SOFTWARE),
        (replace(HERE, memory_gib=32), SOFTWARE),
        (HERE, {**SOFTWARE, "torch": "2.14.0+cpu"}),
        (HERE, {"keras": "3.15.1"}),
    ],
)
def test_it_is_for_that_device_and_version_alone(
    folder: Path, fingerprint: Fingerprint, software: dict[str, str]
) -> None:
    measurement_cache.remember(TIMED)
    assert measurement_cache.recall(fingerprint, software) == (None, ())


def test_the_first_framework_named_counts(folder: Path) -> None:
    other = measurement_cache.TimedDevice(
        HERE, "tensorflow", "2.21.0", replace(MEASURED, framework="tensorflow")
    )
    measurement_cache.remember(TIMED)
    measurement_cache.remember(other)
    both = {"tensorflow": "2.21.0", **SOFTWARE}
    assert measurement_cache.recall(HERE, both) == (other.measured, ())
    assert measurement_cache.recall(HERE, dict(reversed(both.items()))) == (MEASURED, ())


def test_a_timing_refuses_nothing_that_an_earlier_one_found_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter((70.0, 130.0, 70.0))

    def timed(*_: object) -> Measurements:
        products = Product(DType.FLOAT32, gflops=100.0), Product(DType.FLOAT16, gflops=next(rates))
        return Measurements("torch", products)

    monkeypatch.setattr("autoprec.backends.shared.matmul_timing.measure", timed)
    device = device_of_family("nvidia-volta")
    first, faster, slow = (propose(measure_device(device, SOFTWARE)) for _ in range(3))
    recalled = propose(measurement_cache.with_remembered_measurements(device, SOFTWARE))
    assert recalled.policies == slow.policies
    assert Policy.MIXED_FLOAT16 not in first.policies
    assert faster.recommended is Policy.MIXED_FLOAT16
    assert slow.recommended is Policy.FLOAT32
    assert Policy.MIXED_FLOAT16 in slow.policies


@pytest.mark.parametrize(
    ("usage", "kept"),
    [(Usage(0.1, 0.1), True), (Usage(0.6, 0.0), False), (Usage(0.2, 0.7), True), (None, True)],
    ids=["quiet", "crowded", "on other processors", "unknown"],
)
def test_what_other_processes_disturbed_is_told_and_not_remembered(
    usage: Usage | None, kept: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, gpu = device_of_family("amd-zen5"), device_of_family("nvidia-a100")
    monkeypatch.setattr("autoprec.backends.shared.matmul_timing.measure", lambda *_: MEASURED)
    monkeypatch.setattr(ProcessorUsage, "usage", lambda *_: usage)
    said = [note for note in measure_device(device, SOFTWARE).notes if "other processes" in note]
    told = [each.partition(" of the")[0] for each in said]
    assert told == ([] if kept else ["other processes used 60%"])
    assert (measurement_cache.recall(device.fingerprint, SOFTWARE)[0] is not None) is kept
    measure_device(gpu, SOFTWARE)
    assert measurement_cache.recall(gpu.fingerprint, SOFTWARE)[0] is not None


@pytest.mark.parametrize(
    "text",
    ["", "\0\0", "[1", "[]", "{}", "[" * 100_000, '{"fingerprint": 1}', "null", "\udcff"],
    ids=range(9),
)
def test_a_file_that_cannot_be_read_is_left_out_with_a_note(folder: Path, text: str) -> None:
    measurement_cache.remember(TIMED)
    (file,) = (folder / "measured").iterdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    measured, notes = measurement_cache.recall(HERE, SOFTWARE)
    assert measured is None
    (note,) = notes
    assert note.startswith(f"{file} cannot be read and is left out: ")
    assert len(note) < len(str(file)) + 250
    assert measurement_cache.remember(TIMED) == ""
    assert measurement_cache.recall(HERE, SOFTWARE) == (MEASURED, ())


def test_a_file_of_another_device_under_this_ones_name_is_left_out(folder: Path) -> None:
    measurement_cache.remember(TIMED)
    (file,) = (folder / "measured").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": "1.0"}))
    measured, (note,) = measurement_cache.recall(HERE, SOFTWARE)
    assert measured is None
    assert "is of another device or version" in note


def test_a_place_that_cannot_be_written_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    assert "is not remembered" in measurement_cache.remember(TIMED)
    assert measurement_cache.recall(HERE, SOFTWARE) == (None, ())


def test_an_empty_name_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    assert measurement_cache.cache_folder() is None
    assert measurement_cache.remember(TIMED) == ""
    assert measurement_cache.recall(HERE, SOFTWARE) == (None, ())
    assert os.listdir(tmp_path) == []


def test_without_a_name_it_is_the_systems_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(measurement_cache.FOLDER_VARIABLE)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, **_: tmp_path / name)
    assert measurement_cache.cache_folder() == tmp_path / "autoprec"
