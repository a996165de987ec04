"""What applying a profile asks of the machine, whatever the framework."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stateless_precision import StatelessPrecision

from autoprec import Recipe, apply_profile
from autoprec.core.profile import DeviceRecord, Profile, TaskRecord
from autoprec.errors import AutoprecWarning
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import observe
from autoprec.probing import device_fingerprint
from autoprec.profiles import save_profile
from tests.fuzz.example import FULL


def made_here() -> Profile:
    here = device_fingerprint("cpu")
    return replace(
        FULL,
        task=TaskRecord("model.py", "0" * 64, "simulated"),
        device=DeviceRecord(here.kind, here.name, here.family, here),
        software={},
        recipe=Recipe(batch_size=64),
        evidence=replace(FULL.evidence, inconclusive=""),
    )


def made_elsewhere() -> Profile:
    profile = made_here()
    fingerprint = replace(profile.device.fingerprint, family="another")
    return replace(profile, device=replace(profile.device, fingerprint=fingerprint))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machines that were probed; empty before the test applies anything."""
    machines: list[Machine] = []

    class Counted(Machine):
        def __init__(self) -> None:
            machines.append(self)

    monkeypatch.setattr(observe, "Machine", Counted)
    return machines


def test_a_profile_probes_the_machine_once(tmp_path: Path, probed: list[Machine]) -> None:
    profile = made_here()
    probed.clear()
    assert apply_profile(profile, device="cpu") == StatelessPrecision(Recipe(batch_size=64))
    assert len(probed) == 1
    save_profile(profile, tmp_path / "here.yaml")
    apply_profile(tmp_path / "here.yaml", device="cpu")
    assert len(probed) == 2


def test_a_profile_that_fits_nowhere_probes_the_machine_once(probed: list[Machine]) -> None:
    profile = made_elsewhere()
    probed.clear()
    with pytest.warns(
        AutoprecWarning, match=r"no profile fits this device \(the profile: made on "
    ):
        precision = apply_profile(profile, device="cpu")
    assert precision.batch_size == 64
    assert len(probed) == 1


def test_a_profile_switched_off_probes_the_machine_once_for_its_batch(
    probed: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = made_here()
    probed.clear()
    monkeypatch.setenv("AUTOPREC", "off")
    assert apply_profile(profile, device="cpu").batch_size == 64
    assert len(probed) == 1
