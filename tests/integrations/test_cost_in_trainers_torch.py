"""What a profile costs in a trainer's update, counted: operations, waits for the device, calls."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoprec
from autoprec import Policy, Recipe
from autoprec.backends.torch.apply import noticed_steps
from autoprec.core.recipe import LossScale
from tests.integrations.trainings import (
    Training,
    by_accelerate,
    by_fabric,
    by_lightning,
    by_the_trainer,
)

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::autoprec.errors.AutoprecWarning"),
]

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
TRAINERS: list[Any] = [
    pytest.param(by_lightning, {}, marks=needs_lightning, id="Lightning"),
    pytest.param(by_accelerate, {"flag": "bf16"}, id="accelerate"),
    pytest.param(by_the_trainer, {"flag": "bf16"}, id="the Trainer"),
]
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=64.0))
WAITS = "aten._local_scalar_dense.default"


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    inside = [each for _ in range(layers) for each in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), *inside, nn.Linear(8, 3))


class Operations(TorchDispatchMode):
    """Counts what torch computes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations_of_an_update(train: Callable[[int], Any], *, batches: int = 1) -> Counter[str]:
    """Count those of 4 updates more, each of as many batches."""
    counted = []
    for updates in (4, 8):
        with Operations() as operations:
            train(8 * batches * updates)
        counted.append(operations.counted)
    return Counter({name: (counted[1][name] - counted[0][name]) // 4 for name in counted[1]})


@pytest.mark.parametrize(("training", "flags"), TRAINERS)
def test_an_update_computes_what_the_trainers_own_precision_computes(
    training: Training, flags: dict[str, str], tmp_path: Path
) -> None:
    own = operations_of_an_update(lambda n: training(deep(4), None, tmp_path, n, **flags))
    ours = operations_of_an_update(lambda n: training(deep(4), BFLOAT16, tmp_path, n))
    assert ours[WAITS] == own[WAITS]
    assert own.total() > 50
    assert ours.total() <= own.total() + 3, ours - own


@pytest.mark.parametrize(("training", "flags"), TRAINERS)
def test_a_loss_scale_waits_for_the_device_once(
    training: Training, flags: dict[str, str], tmp_path: Path
) -> None:
    waits = [
        operations_of_an_update(lambda n: training(deep(4), recipe, tmp_path, n))[WAITS]  # noqa: B023
        for recipe in (BFLOAT16, FLOAT16)
    ]
    assert waits[1] - waits[0] == 1


@pytest.mark.parametrize("training", [by_accelerate, by_the_trainer])
def test_no_gradient_is_multiplied_where_an_update_holds_all_its_micro_batches(
    training: Training, tmp_path: Path
) -> None:
    multiplied = []
    for batches in (1, 2):
        recipe = Recipe(batch_size=8, accumulation_steps=batches)
        found = operations_of_an_update(
            lambda n: training(deep(4), recipe, tmp_path, n),  # noqa: B023
            batches=batches,
        )
        multiplied.append(sum(found[name] for name in found if name.startswith("aten.mul_.")))
    assert multiplied[0] == multiplied[1] > 0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the loops of earlier tests, whose first steps were never made: each looks at ours."""
    monkeypatch.setattr(noticed_steps, "_NOTICING", weakref.WeakSet())


@contextmanager
def own_calls() -> Iterator[Counter[str]]:
    """Count the calls of autoprec's own functions, and those that it makes itself.

    A walk over modules is a call for each of them.
    """
    ours, found = str(Path(autoprec.__file__).parent), Counter[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        if event == "call" and ours in (frame.f_code.co_filename[: len(ours)], caller[: len(ours)]):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("recipe", "most"), [(BFLOAT16, 60), (FLOAT16, 240)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize(
    "training",
    [
        pytest.param(by_lightning, marks=needs_lightning),
        pytest.param(by_fabric, marks=needs_lightning),
        by_accelerate,
        by_the_trainer,
    ],
)
def test_an_update_makes_as_few_calls_in_a_deep_model_as_in_a_shallow_one(
    training: Training, recipe: Recipe, most: int, tmp_path: Path
) -> None:
    by_depth = []
    for layers in (2, 30):
        counted = []
        for updates in (4, 8):
            gc.collect()  # models of earlier trainings are looked through where one is attached
            with own_calls() as found:
                training(deep(layers), recipe, tmp_path, 8 * updates)
            counted.append(found)
        by_depth.append((counted[1] - counted[0]).total() / 4)
    assert not (counted[1] - counted[0])["AttachedRecipe._note"]  # after the first update
    assert by_depth[0] == by_depth[1]
    assert 0 < by_depth[0] < most
