"""apply_profile on PyTorch where no profile fits: what was measured decides, else float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import Profile, apply_profile, measurement_cache
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge
from autoprec.core.dtypes import DType, Policy
from autoprec.errors import (
    AutoprecWarning,
    UsageError,
)
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.probes.observe import observe
from autoprec.profiles import save_profile
from benchmarks.recordings.machine_replay import RecordedMachine, read_recording
from tests.applied_torch import BFLOAT16, ELSEWHERE, make_profile, task


def on_a_recorded(machine: str, monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """Be on a machine that was written down; return its fingerprint."""
    seen = observe(RecordedMachine(read_recording(profiles_folder() / "recordings" / machine)))
    monkeypatch.setattr("autoprec.recipe_for_device.observe", lambda **_: seen)
    return merge(seen.devices[0], load_catalogue().family_of(seen.devices[0])).fingerprint


def fallback(profile: Profile | Path, **how: Any) -> tuple[Policy, str]:
    """The policy that is taken where no profile fits, and the warning."""
    model, optimizer = task()
    with pytest.warns(AutoprecWarning, match="no profile fits this device") as caught:
        precision = apply_profile(profile, model=model, optimizer=optimizer, **how)
    return precision.policy, str(caught[0].message)


def timed(fingerprint: Fingerprint, bfloat16: float, framework: str = "torch") -> None:
    """Remember products of 100 GFLOP/s in float32, and so many in bfloat16."""
    rates = {DType.FLOAT32: 100.0, DType.BFLOAT16: bfloat16}
    products = tuple(Product(dtype, gflops=rate, size=512) for dtype, rate in rates.items())
    version = {"torch": torch.__version__, "tensorflow": "2.21.0"}[framework]
    measured = Measurements(framework, products, date="2026-11-24")
    assert (
        measurement_cache.remember(
            measurement_cache.TimedDevice(fingerprint, framework, version, measured)
        )
        == ""
    )


AMX, ZEN4 = "intel-sapphire-rapids.json", "amd-zen4.json"


def test_without_a_measurement_the_catalogues_word_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_a_recorded(AMX, monkeypatch)
    save_profile(make_profile(BFLOAT16, ELSEWHERE), tmp_path / "a.yaml")
    save_profile(make_profile(BFLOAT16, replace(ELSEWHERE, family="b")), tmp_path / "b.yaml")
    for given in (make_profile(BFLOAT16, ELSEWHERE), tmp_path):
        policy, said = fallback(given)
        assert policy is Policy.FLOAT32
        assert "training in float32, because nothing that was measured says" in said
        assert "or take mixed_bfloat16 unmeasured with fallback='rules'" in said
        policy, said = fallback(given, fallback="rules")
        assert policy is Policy.MIXED_BFLOAT16
        assert "mixed_bfloat16 by the hardware's rules, not measured" in said


@pytest.mark.parametrize(
    ("gflops", "policy"),
    [(56.0, Policy.FLOAT32), (105.0, Policy.FLOAT32), (310.0, Policy.MIXED_BFLOAT16)],
)
def test_what_was_measured_on_this_machine_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gflops: float, policy: Policy
) -> None:
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    here = on_a_recorded(AMX, monkeypatch)
    timed(replace(here, name="another CPU"), 900.0)
    timed(here, gflops)
    chosen, said = fallback(make_profile(BFLOAT16, ELSEWHERE))
    assert chosen is policy
    if policy.mixed:
        assert "bfloat16 products were measured at 3.1x float32's (this device, on 2026" in said
        assert "is not checked" in said


def test_a_damaged_memory_of_a_measurement_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    timed(on_a_recorded(AMX, monkeypatch), 310.0)
    (file,) = (tmp_path / "measured").iterdir()
    file.write_text(file.read_text()[:-20])
    policy, said = fallback(make_profile(BFLOAT16, ELSEWHERE))
    assert policy is Policy.FLOAT32
    assert f"{file} cannot be read and is left out" in said


def test_what_was_measured_on_the_family_decides_where_nothing_was_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = on_a_recorded(ZEN4, monkeypatch)
    policy, said = fallback(make_profile(BFLOAT16, ELSEWHERE))
    assert policy is Policy.MIXED_BFLOAT16
    assert "bfloat16 products were measured at 2.2x float32's (another AMD Zen 4)" in said
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    timed(here, 50.0)
    assert fallback(make_profile(BFLOAT16, ELSEWHERE))[0] is Policy.FLOAT32


@pytest.mark.parametrize(
    ("onednn", "enabled", "policy", "why"),
    [
        (True, True, Policy.MIXED_BFLOAT16, ""),
        (False, True, Policy.FLOAT32, "without oneDNN"),
        (True, False, Policy.FLOAT32, "mkldnn.enabled"),
    ],
)
@pytest.mark.parametrize("how", ["measured", "rules"])
def test_without_onednn_nothing_counts_on_the_cpus_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    onednn: bool,
    enabled: bool,
    policy: Policy,
    why: str,
    how: str,
) -> None:
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    timed(on_a_recorded(ZEN4, monkeypatch), 310.0, framework="tensorflow")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(type(torch.backends.mkldnn), "enabled", enabled)
    said = TorchBackend().missing_kernels("cpu")
    assert why in said
    assert bool(why) == bool(said)
    assert fallback(make_profile(BFLOAT16, ELSEWHERE), fallback=how)[0] is policy


def test_another_fallback_is_an_error() -> None:
    model, optimizer = task()
    with pytest.raises(UsageError, match="fallback='bf16' given, expected 'measured' or 'rules'"):
        apply_profile(
            make_profile(BFLOAT16),
            model=model,
            optimizer=optimizer,
            fallback="bf16",  # type: ignore[call-overload]
        )
