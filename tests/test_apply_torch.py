"""apply_profile on PyTorch, as a user calls it: files, folders, devices that fit and do not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Profile, Recipe, api, apply_profile, cache
from autoprec.api import device_fingerprint
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.device.facts import DeviceKind, Fingerprint, Measurements, Product, merge
from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.parity import Verdict
from autoprec.core.profile import Baseline, Chosen, DeviceRecord, Evidence, TaskRecord
from autoprec.core.recipe import LossScale
from autoprec.core.statistics import Ratio
from autoprec.errors import (
    AutoprecWarning,
    ProfileError,
    ProfileMismatch,
    TaskError,
    UsageError,
)
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.observe import observe
from autoprec.hardware.recording import RecordedMachine, read_recording
from autoprec.profiles import save_profile


def make_profile(
    recipe: Recipe, fingerprint: Fingerprint | None = None, **software: str
) -> Profile:
    here = fingerprint or device_fingerprint("cpu")
    return Profile(
        schema=1,
        created="2026-11-21T00:00:00Z",
        autoprec="0.1.0",
        task=TaskRecord("model.py", "0" * 64, "torch"),
        device=DeviceRecord(here.kind, here.name, here.family, here),
        software={"torch": torch.__version__, **software},
        recipe=recipe,
        evidence=Evidence(
            baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 1),
            chosen=Chosen(200.0, 0.16, 1),
            speedup=Ratio(2.0, 1.9, 2.1, 9),
            speedup_same_batch=None,
            parity=Verdict("equal", "as an example"),
            trials=3,
            tuning_seconds=1.0,
            reason="an example",
        ),
    )


ELSEWHERE = Fingerprint(DeviceKind.CUDA, "nvidia-h100", "NVIDIA H100", 80)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)


def task() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, precision: Any, steps: int = 3) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(16, 8, generator=generator)
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs), torch.arange(16) % 4)
        precision.backward(loss)
        precision.clip_grad_norm_(1.0)
        assert precision.step()
        losses.append(loss.item())
    precision.flush()
    return losses


def test_a_profile_file_applies_and_trains(tmp_path: Path) -> None:
    file = tmp_path / "model.profile.yaml"
    save_profile(make_profile(BFLOAT16), file)
    model, optimizer = task()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision = apply_profile(file, model=model, optimizer=optimizer)
    assert precision.policy is Policy.MIXED_BFLOAT16
    assert precision.batch_size == 16
    plain, plain_optimizer = task()
    expected = train(plain, apply_profile(Recipe(), model=plain, optimizer=plain_optimizer))
    losses = train(model, precision)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)


def test_float32_by_profile_trains_exactly_like_plain_float32() -> None:
    plain, plain_optimizer = task()
    expected = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(plain(inputs), torch.arange(16) % 4)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        expected.append(loss.item())
    model, optimizer = task()
    precision = apply_profile(make_profile(Recipe(batch_size=16)), model=model, optimizer=optimizer)
    assert train(model, precision) == expected


def test_several_optimizers_step_together() -> None:
    model, _ = task()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    before = [p.detach().clone() for p in model.parameters()]
    train(model, apply_profile(make_profile(BFLOAT16), model=model, optimizer=optimizers))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_from_a_folder_the_profile_of_this_device_is_taken(tmp_path: Path) -> None:
    save_profile(make_profile(replace(BFLOAT16, batch_size=99), ELSEWHERE), tmp_path / "a.yaml")
    save_profile(make_profile(BFLOAT16), tmp_path / "b.yaml")
    model, optimizer = task()
    assert apply_profile(tmp_path, model=model, optimizer=optimizer).batch_size == 16


def test_where_nothing_fits_the_batch_is_kept_and_it_says_how_to_tune() -> None:
    model, optimizer = task()
    profile = make_profile(replace(BFLOAT16, batch_size=64, accumulation_steps=2), ELSEWHERE)
    with pytest.warns(AutoprecWarning, match=r"made on a cuda device.*`autoprec tune model\.py`"):
        precision = apply_profile(profile, model=model, optimizer=optimizer)
    assert (precision.batch_size, precision.accumulation_steps) == (64, 2)


def on_a_recorded(machine: str, monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """Be on a machine that was written down; return its fingerprint."""
    seen = observe(RecordedMachine(read_recording(profiles_folder() / "recordings" / machine)))
    monkeypatch.setattr("autoprec.fitting.observe", lambda **_: seen)
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
    assert cache.remember(cache.TimedDevice(fingerprint, framework, version, measured)) == ""


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
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    here = on_a_recorded(AMX, monkeypatch)
    timed(replace(here, name="another CPU"), 900.0)
    timed(here, gflops)
    chosen, said = fallback(make_profile(BFLOAT16, ELSEWHERE))
    assert chosen is policy
    if policy.mixed:
        assert "bfloat16 products were measured at 3.1x float32's (this device, on 2026" in said
        assert "is not proven" in said


def test_a_damaged_memory_of_a_measurement_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
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
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
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
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
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


def test_strict_raises_where_nothing_fits() -> None:
    model, optimizer = task()
    with pytest.raises(ProfileMismatch, match="no profile fits this device"):
        apply_profile(
            make_profile(BFLOAT16, ELSEWHERE), model=model, optimizer=optimizer, strict=True
        )


def test_another_minor_version_of_the_framework_warns() -> None:
    model, optimizer = task()
    profile = replace(make_profile(BFLOAT16), software={"torch": "1.13.0"})
    with pytest.warns(AutoprecWarning, match=r"made with torch 1.13.0, here is"):
        apply_profile(profile, model=model, optimizer=optimizer)


def test_a_recipe_applies_without_a_profile() -> None:
    model, optimizer = task()
    recipe = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=256.0))
    precision = apply_profile(recipe, model=model, optimizer=optimizer)
    assert precision.scaler.get_scale() == 256.0


@pytest.mark.parametrize("given", ["off", BFLOAT16])
def test_what_is_no_model_is_told_as_what_was_given(given: Any) -> None:
    with pytest.raises(TaskError, match=r"^model= was given a builtins\.str, expected"):
        apply_profile(given, model="x")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("named", "meant"),
    [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")],
)
def test_a_kind_of_device_means_the_one_that_the_model_is_on(
    named: str | None, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(TorchBackend, "device_of", lambda self, model: "cuda:1")
    monkeypatch.setattr(
        api, "recipe_for", lambda profile, at, *_, **__: asked.append(at) or Recipe()
    )
    apply_profile("a.yaml", model=nn.Linear(2, 2), device=named)
    assert asked == [meant]


def test_torch_needs_a_model() -> None:
    with pytest.raises(UsageError, match=r"needs model=\.\.\."):
        apply_profile(make_profile(BFLOAT16))


def test_a_torch_profile_without_a_model_never_means_keras(tmp_path: Path) -> None:
    save_profile(make_profile(BFLOAT16), tmp_path / "p.yaml")
    with pytest.raises(UsageError, match=r"tuned with PyTorch.*model="):
        apply_profile(tmp_path / "p.yaml")


def test_a_missing_profile_is_one_clear_error(tmp_path: Path) -> None:
    model, optimizer = task()
    with pytest.raises(ProfileError, match="there is no such file; `autoprec tune"):
        apply_profile(tmp_path / "nothing.yaml", model=model, optimizer=optimizer)


def test_checkpoints_load_before_and_after(tmp_path: Path) -> None:
    model, optimizer = task()
    precision = apply_profile(make_profile(BFLOAT16), model=model, optimizer=optimizer)
    train(model, precision)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c")
    plain, plain_optimizer = task()
    plain.load_state_dict(saved["model"])
    plain_optimizer.load_state_dict(saved["optimizer"])
    again, again_optimizer = task()
    apply_profile(make_profile(BFLOAT16), model=again, optimizer=again_optimizer)
    again.load_state_dict(plain.state_dict())
    assert list(again.state_dict()) == list(plain.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_what_a_keras_profile_cannot_carry_over_is_said() -> None:
    model, optimizer = task()
    recipe = replace(
        BFLOAT16, float32_modules=("dense_3",), compile=True, knobs={"steps_per_execution": 4}
    )
    made = make_profile(recipe)
    made = replace(made, task=replace(made.task, framework="keras"))
    with pytest.warns(AutoprecWarning) as caught:
        precision = apply_profile(made, model=model, optimizer=optimizer)
    said = " ".join(str(warning.message) for warning in caught)
    for thing in ("dense_3", "compile", "steps_per_execution", "batch 16"):
        assert thing in said
    assert precision.recipe == BFLOAT16


# Off ---------------------------------------------------------------------------------------------

TRICKS = Recipe(
    policy=Policy.MIXED_FLOAT16,
    batch_size=4,
    accumulation_steps=2,
    loss_scale=LossScale(),
    memory_format="channels_last",
    knobs={"threads": 1},
)


def plain_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), torch.zeros(len(inputs), dtype=torch.long))


@pytest.mark.parametrize("given", ["off", None])
def test_off_changes_nothing_and_keeps_the_loop_running(given: str | None) -> None:
    (model, optimizer), (twin, twins) = task(), task()
    inputs = torch.randn(8, 8)
    precision = apply_profile(given, model=model, optimizer=optimizer)
    for _ in range(3):
        with precision.autocast():
            loss = plain_loss(model, inputs)
        precision.backward(loss)
        assert precision.step()
        plain_loss(twin, inputs).backward()
        twins.step()
        twins.zero_grad()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert (precision.policy, precision.accumulation_steps) == (Policy.FLOAT32, 1)
    assert not precision.scaler.is_enabled()


def test_the_environment_switches_a_profile_off_but_for_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    save_profile(make_profile(TRICKS), path)
    model, optimizer = task()
    threads = torch.get_num_threads()
    monkeypatch.setenv("AUTOPREC", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision = apply_profile(path, model=model, optimizer=optimizer)
    assert (precision.policy, precision.batch_size, precision.accumulation_steps) == (
        Policy.FLOAT32,
        4,
        2,
    )
    assert torch.get_num_threads() == threads
    assert precision.report.globals_set == ()
    with precision.autocast():
        assert model(torch.randn(2, 8)).dtype is torch.float32


def test_off_takes_back_what_was_applied_before() -> None:
    model, optimizer = task()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        apply_profile(replace(TRICKS, float32_modules=("0",)), model=model, optimizer=optimizer)
    apply_profile("off", model=model, optimizer=optimizer)
    assert all("forward" not in vars(module) for module in model.modules())


def test_another_word_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = task()
    monkeypatch.setenv("AUTOPREC", "of")
    with pytest.raises(UsageError, match="AUTOPREC='of' is set, expected off, or on"):
        apply_profile("off", model=model, optimizer=optimizer)


def test_a_recipe_takes_a_policys_name() -> None:
    assert Recipe(policy="bf16").policy is Policy.MIXED_BFLOAT16  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bf17"):
        Recipe(policy="bf17")  # type: ignore[arg-type]
