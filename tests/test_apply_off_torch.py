"""apply_profile on PyTorch with a profile switched off, and by a policy's name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec import Recipe, apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale
from autoprec.errors import (
    AutoprecWarning,
    UsageError,
)
from autoprec.profiles import save_profile
from tests.applied_torch import make_profile, task

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
    under = precision.autocast()(plain_loss)
    for _ in range(3):
        with precision.autocast():
            loss = under(model, inputs)
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
