"""apply_profile on PyTorch, as a user calls it: files, folders, devices that fit and do not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Recipe, apply_profile, applying
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale
from autoprec.errors import (
    AutoprecWarning,
    ProfileError,
    ProfileMismatch,
    TaskError,
    UsageError,
)
from autoprec.profiles import save_profile
from tests.applied_torch import BFLOAT16, ELSEWHERE, make_profile, task, train


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
        applying, "recipe_for", lambda profile, at, *_, **__: (asked.append(at) or Recipe(), None)
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


def test_an_inconclusive_tuning_is_said_once_and_gives_way_to_a_conclusive_one(
    tmp_path: Path,
) -> None:
    model, optimizer = task()
    made = make_profile(Recipe(batch_size=16))
    vague = replace(made, evidence=replace(made.evidence, inconclusive="it ran at two paces"))
    save_profile(vague, tmp_path / "a.yaml")
    for given in (vague, tmp_path / "a.yaml", tmp_path):
        with pytest.warns(AutoprecWarning, match="inconclusive: float32 was kept") as said:
            apply_profile(given, model=model, optimizer=optimizer)
        assert len(said) == 1
        assert "because it ran at two paces. Tune again" in str(said[0].message)
    save_profile(make_profile(BFLOAT16), tmp_path / "b.yaml")
    assert apply_profile(tmp_path, model=model).policy is Policy.MIXED_BFLOAT16


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
