"""What holds for the whole process (TF32, threads) is set while a trainer trains, no longer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, Recipe
from autoprec.integrations.transformers import apply
from tests.integrations.trained import net, recipe_of
from tests.integrations.trainings import Training, by_accelerate, by_lightning, by_the_trainer
from tests.integrations.transformers_trainings import trainer_of

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

TRAINERS: list[Any] = [
    pytest.param(
        by_lightning,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
        ),
        id="Lightning",
    ),
    pytest.param(by_accelerate, id="accelerate"),
    pytest.param(by_the_trainer, id="the Trainer"),
]


class Noting(nn.Module):
    """Notes the number of threads in every training call."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.threads = net(0.0), set[int]()

    def forward(self, pixels: torch.Tensor) -> Any:
        self.threads.add(torch.get_num_threads())
        return self.inside(pixels)


@pytest.mark.parametrize("training", TRAINERS)
def test_threads_are_the_profiles_until_it_is_detached(training: Training, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    model = Noting()
    recipe = Recipe(batch_size=8, knobs={"threads": before + 1})
    _, precision = training(model, recipe, tmp_path, 32)
    getattr(precision, "detach", lambda: None)()
    assert model.threads == {before + 1}
    assert torch.get_num_threads() == before


def readings() -> dict[str, Any]:
    """What both of torch's interfaces say about TF32; the older one may refuse to."""
    found: dict[str, Any] = {}
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul"):
        owner: Any = torch.backends
        for part in name.split("."):
            owner = getattr(owner, part)
        found[name] = owner.fp32_precision
    for name in ("matmul", "conv"):
        try:
            old = torch.backends.cuda.matmul if name == "matmul" else torch.backends.cudnn
            found[f"old {name}"] = old.allow_tf32
        except RuntimeError as error:
            found[f"old {name}"] = str(error).partition("\n")[0]
    return found


@pytest.fixture(params=["untouched", "written by the newer interface", "by the older one"])
def written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a script have written TF32's switch, as the Trainer's arguments do by the newer one."""
    matmul: Any = torch.backends.cuda.matmul
    before: Any = torch.backends.fp32_precision, matmul.fp32_precision, matmul.allow_tf32
    if request.param == "written by the newer interface":
        torch.backends.fp32_precision = "tf32"
    elif request.param == "by the older one":
        matmul.allow_tf32 = True
    yield
    matmul.allow_tf32 = before[2]
    matmul.fp32_precision = before[1]
    torch.backends.fp32_precision = before[0]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("training", TRAINERS)
def test_a_training_with_checks_leaves_tf32_as_it_is(training: Training, tmp_path: Path) -> None:
    before = readings()
    recipe = recipe_of(Policy.MIXED_BFLOAT16)
    _, precision = training(net(0.0), recipe, tmp_path, 32, watch_every=1)
    assert readings() == before
    assert len(precision.watched) == 2
    assert not any(each.not_checked for each in precision.watched)
    getattr(precision, "detach", lambda: None)()
    assert readings() == before


def test_a_float32_profile_that_compiles_computes_in_float32(tmp_path: Path) -> None:
    """And either of torch's interfaces can be read, whichever a script writes next."""
    trainer = trainer_of(tmp_path)
    recipe = replace(recipe_of(Policy.FLOAT32), compile=True)
    precision = apply(trainer, recipe)
    trainer.accelerator.prepare_model(trainer.model)
    matmul: Any = torch.backends.cuda.matmul
    assert matmul.allow_tf32 is False
    assert matmul.fp32_precision in ("none", "ieee")
    for wanted in (True, False):
        matmul.allow_tf32 = wanted
        assert matmul.fp32_precision == ("tf32" if wanted else "ieee")
    precision.detach()
    assert matmul.allow_tf32 is False


@pytest.mark.usefixtures("written")
def test_a_float32_profile_that_compiles_leaves_tf32_as_it_is(tmp_path: Path) -> None:
    """The Trainer's own torch_compile=True switches it on."""
    before = readings()
    trainer = trainer_of(tmp_path)
    recipe = replace(recipe_of(Policy.FLOAT32), compile=True)
    precision = apply(trainer, recipe)
    trainer.accelerator.prepare_model(trainer.model)
    assert precision.attached is not None
    assert readings() == before
    precision.detach()
    assert readings() == before
