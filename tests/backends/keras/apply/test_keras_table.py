"""Kinds of models, ways of training, policies, moments of applying: as under Keras's own policy.

Keras's own way is a global policy before the model is built, its own loss scale and its own
gradient accumulation, set by hand. Every cell trains four batches from the same weights; each
batch's loss and the final weights must agree to rounding. Every two of kind, way, policy and moment
meet in `make test`, every three in `make test-release`; `pytest --whole-table` trains every cell.
Of the large network `make test-slow` trains one cell.
"""

from __future__ import annotations

import functools
from itertools import combinations, product
from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.apply.optimizer_attributes import optimizer_attributes, optimizers_of
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.kinds import KINDS, STEPS, WAYS, Gan, Kind, by_batch, compile_kind

POLICIES = {
    "float32": Recipe(),
    "mixed_bfloat16": Recipe(policy=Policy.MIXED_BFLOAT16),
    "mixed_float16": Recipe(
        policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=256.0), accumulation_steps=2
    ),
}
MOMENTS = ("before build", "after build", "after compile", "after load")


Cell = tuple[str, str, str, str]

#: Only the large network has float16, which a CPU emulates, in a loop alone.
SLOW = ("application", "mixed_float16")
#: The large network's only cell in `make test-slow`.
DAILY_LARGE = ("application", "fit", "mixed_bfloat16", "after build")


def all_cells() -> list[Cell]:
    return list(product(KINDS, WAYS, POLICIES, MOMENTS))


def pairs() -> list[Cell]:
    """Every two of kind, way, policy and moment together at least once.

    Each kind has each moment once; way and policy go round in threes, one forward as the moments
    go on and the other backward, so that they meet each other too. Of the large network only
    DAILY_LARGE is left.
    """
    ways, policies = list(WAYS), list(POLICIES)
    indexed = product(enumerate(KINDS), enumerate(MOMENTS))
    found = [
        (kind, ways[(k + m + 1) % 3], policies[(k + 2 * m + 1) % 3], moment)
        for (k, kind), (m, moment) in indexed
    ]
    return [cell for cell in found if "application" not in cell or cell == DAILY_LARGE]


def triples() -> list[Cell]:
    """Every three of them together at least once.

    The way follows from the other three, as in a Latin square: each of its values meets each pair
    of theirs.
    """
    ways = list(WAYS)
    indexed = product(enumerate(KINDS), enumerate(POLICIES), enumerate(MOMENTS))
    return [
        (kind, "loop" if (kind, policy) == SLOW else ways[(k + p + m) % 3], policy, moment)
        for (k, kind), (p, policy), (m, moment) in indexed
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "moment" not in metafunc.fixturenames:
        return
    daily, others = pairs(), triples()
    if metafunc.config.getoption("--whole-table"):
        daily, others = all_cells(), []
    marked = [pytest.param(*c, marks=[pytest.mark.slow] if c == DAILY_LARGE else []) for c in daily]
    release = [pytest.param(*cell, marks=pytest.mark.release) for cell in others]
    found = [*marked, *(each for each in release if each.values not in daily)]
    metafunc.parametrize(("name", "way", "policy", "moment"), found)


RELEASE = [*pairs(), *triples()]


@pytest.mark.parametrize(
    ("size", "part", "large"), [(2, pairs(), False), (2, RELEASE, True), (3, RELEASE, False)]
)
def test_every_two_and_every_three_of_kind_way_policy_and_moment_meet(
    size: int, part: list[Cell], large: bool
) -> None:
    for axes in combinations(range(4), size):
        there, whole = (
            {tuple(cell[axis] for axis in axes) for cell in cells} for cells in (part, all_cells())
        )
        assert {each for each in whole - there if large or "application" not in each} == set()
    assert all(way == "loop" for kind, way, policy, _ in part if (kind, policy) == SLOW)
    assert DAILY_LARGE in part


def made(kind: Kind) -> Any:
    """The model built, with the kind's first weights."""
    model = kind.build()
    x, _ = by_batch(kind)[0]
    model(x)
    if isinstance(model, Gan):
        model.generator(x[:, :4])
    return model


@functools.cache
def first_weights(name: str) -> Any:
    keras.utils.set_random_seed(11)
    return made(KINDS[name]).get_weights()


@functools.cache
def by_hand(name: str, way: str, policy: str) -> tuple[list[float], list[Any]]:
    """What Keras's own policy gives; the global one is set and put back here."""
    kind, recipe = KINDS[name], POLICIES[policy]
    weights = first_weights(name)
    keras.config.set_dtype_policy(policy)
    try:
        model = made(kind)
        model.set_weights(weights)
        more = {"gradient_accumulation_steps": 2} if recipe.accumulation_steps == 2 else {}
        compile_kind(model, kind, **more)
        if policy == "mixed_float16":
            for attribute, optimizer in optimizer_attributes(model).items():
                own = getattr(optimizer, "inner_optimizer", optimizer)
                scaled = keras.optimizers.LossScaleOptimizer(own, initial_scale=256.0)
                setattr(model, attribute, scaled)
        return WAYS[way](model, kind), model.get_weights()
    finally:
        keras.config.set_dtype_policy("float32")


def applied(name: str, policy: str, moment: str, tmp_path: Any) -> Any:
    kind, recipe = KINDS[name], POLICIES[policy]
    weights = first_weights(name)
    if moment == "before build":
        precision = KerasSurgeon().apply(recipe)
    model = made(kind)
    model.set_weights(weights)
    if moment == "before build":
        return precision, compile_kind(model, kind)
    if moment == "after build":
        precision = KerasSurgeon().apply(recipe, model=model)
        return precision, compile_kind(model, kind)
    compile_kind(model, kind)
    if moment == "after load":
        path = tmp_path / "model.keras"
        for optimizer in optimizers_of(model):
            optimizer.build(model.trainable_variables)
        model.save(path)
        model = keras.saving.load_model(path)
        if isinstance(model, Gan):
            compile_kind(model, kind)
    return KerasSurgeon().apply(recipe, model=model), model


def test_every_cell_trains_as_by_hand(
    name: str, way: str, policy: str, moment: str, tmp_path: Any
) -> None:
    kind = KINDS[name]
    graph = kind.chaotic and way != "loop"
    expected, final = by_hand(name, "train_on_batch" if graph else "loop", policy)
    precision, model = applied(name, policy, moment, tmp_path)
    with precision:
        losses = WAYS[way](model, kind)
        assert precision.steps == STEPS // precision.recipe.accumulation_steps
        assert precision.skipped == 0
    tolerance = 1e-5 if policy == "float32" else kind.tolerance
    assert losses == pytest.approx(expected, rel=tolerance)
    for mine, theirs, start in zip(model.get_weights(), final, first_weights(name), strict=True):
        moved = np.abs(theirs - start).max()
        assert np.allclose(mine, theirs, rtol=0, atol=1e-6 + 20 * tolerance * moved)
