"""Settings of the whole process: what a recipe sets, and that all of it is undone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.process_settings import (
    _WRITERS,
    process_settings_restored,
    set_process_settings,
)
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.torch.operated import (
    FLOAT32,
    apply,
    mlp,
    process_readings,
)

pytestmark = pytest.mark.torch

GLOBAL = [
    ("cuda:0", Recipe(policy=Policy.TF32, knobs={"cudnn_benchmark": True})),
    ("cpu", Recipe(knobs={"implicit_bfloat16": True, "threads": 1})),
]


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_process_settings_are_restored_even_after_an_error(device: str, recipe: Recipe) -> None:
    before = process_readings()

    def fail_inside() -> None:
        with process_settings_restored():
            assert set_process_settings(recipe, device)
            assert process_readings() != before
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert process_readings() == before


def test_tf32_is_set_for_products_and_convolutions() -> None:
    with process_settings_restored():
        set_process_settings(Recipe(policy=Policy.TF32), "cuda")
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"


def test_apply_sets_threads_for_the_process_and_says_so() -> None:
    with process_settings_restored():
        precision = apply(Recipe(knobs={"threads": 1}), mlp())
        assert torch.get_num_threads() == 1
        assert precision.report.globals_set == ("threads=1",)


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_what_a_recipe_set_for_the_process_is_taken_back_with_it(
    device: str, recipe: Recipe
) -> None:
    before, surgeon = process_readings(), TorchSurgeon()
    with process_settings_restored():
        with surgeon.apply(recipe, model=mlp(), device=device) as precision:
            assert process_readings() != before
        assert process_readings() == before
        precision.restore()
        assert process_readings() == before


@pytest.mark.parametrize(("device", "recipe"), GLOBAL)
def test_applying_another_recipe_takes_back_what_the_first_set(device: str, recipe: Recipe) -> None:
    before, surgeon, model = process_readings(), TorchSurgeon(), mlp()
    with process_settings_restored():
        surgeon.apply(recipe, model=model, device=device)
        surgeon.apply(FLOAT32, model=model, device=device)
        assert process_readings() == before


def test_what_the_user_set_since_stays_theirs() -> None:
    with process_settings_restored():
        precision = TorchSurgeon().apply(Recipe(policy=Policy.TF32), model=mlp(), device="cuda:0")
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("medium")
        precision.restore()
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_models_may_need_the_same_setting(first_out: int) -> None:
    before, surgeon = process_readings(), TorchSurgeon()
    models = [mlp(), mlp()]
    with process_settings_restored():
        both = [surgeon.apply(GLOBAL[0][1], model=m, device="cuda:0") for m in models]
        set_by_both = process_readings()
        both.pop(first_out).restore()
        assert process_readings() == set_by_both
        both.pop().restore()
        assert process_readings() == before


def test_products_are_restored_exactly_though_another_models_threads_stay() -> None:
    with process_settings_restored():
        threads = apply(Recipe(knobs={"threads": 1}), mlp())
        before = process_readings()
        apply(Recipe(knobs={"implicit_bfloat16": True}), mlp()).restore()
        assert process_readings() == before
        assert torch.get_num_threads() == 1
        threads.restore()


def test_what_a_model_wants_inside_a_measurement_is_forgotten_after_it() -> None:
    before, measured = process_readings(), mlp()
    with process_settings_restored():
        apply(Recipe(knobs={"threads": 2}), measured)
    apply(Recipe(knobs={"threads": 3}), mlp()).restore()
    assert process_readings() == before


def test_settings_of_a_model_that_is_gone_are_taken_back_by_the_next() -> None:
    before, surgeon = process_readings(), TorchSurgeon()
    with process_settings_restored():
        surgeon.apply(Recipe(knobs={"threads": 1}), model=mlp())
        gc.collect()
        surgeon.apply(FLOAT32, model=mlp())
        assert process_readings() == before


NAMED = {
    "matmul_precision": "set_float32_matmul_precision",
    "matmul_tf32": "backends.cuda.matmul.allow_tf32",
    "cudnn_tf32": "backends.cudnn.allow_tf32",
    "onednn_tf32": "backends.mkldnn.allow_tf32",
    "cudnn_benchmark": "backends.cudnn.benchmark",
    "threads": "set_num_threads",
}


def test_the_page_of_profiles_names_every_setting_of_the_process() -> None:
    page = Path(__file__).parents[4].joinpath("docs", "profiles.md").read_text()
    assert set(NAMED) == set(_WRITERS)
    assert [name for name in NAMED.values() if f"`torch.{name}" not in page] == []


def test_a_float32_recipe_changes_nothing_of_the_process() -> None:
    before = process_readings()
    apply(FLOAT32, mlp())
    assert process_readings() == before


def test_settings_made_through_the_newer_api_are_restored_too() -> None:
    with process_settings_restored():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_open_sessions_train_with_their_own_settings_by_turns() -> None:
    before, seen = process_readings(), dict[int, set[str]]()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.setdefault(len(batch), set()).add(torch.get_float32_matmul_precision())
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    def data(batch_size: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(batch_size, 4)

    def opened(recipe: Recipe) -> TorchSession:
        return TorchSession(task, recipe, device="cpu", seed=0, report=lambda *_: None)

    task = Task("net.py", lambda: nn.Linear(4, 1), data, training_step=step)
    budget = TimingBudget(seconds=0.0, min_steps=1, max_steps=1, precision=0.0)
    rounding = opened(Recipe(batch_size=8, knobs={"implicit_bfloat16": True}))
    plain = opened(Recipe(batch_size=16))
    for session in (plain, rounding, plain, rounding):
        session.time_steps(budget)
    assert seen == {8: {"medium"}, 16: {"highest"}}
    rounding.close()
    plain.close()
    assert process_readings() == before
