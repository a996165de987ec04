"""Trainings whose checks are counted have the loss scale that a profile of theirs would have."""

from __future__ import annotations

import pytest

from benchmarks.numerics.watched import trained_recipe
from benchmarks.numerics.zoo import ZOO, Job
from tests.zoo_tasks import loaded

pytestmark = pytest.mark.torch


def test_float16_trains_at_the_scale_of_its_task() -> None:
    """At the default one nearly all gradients of this task are zero, of which a check tells."""
    path = ZOO / "tiny_gradients.py"
    recipe = trained_recipe(Job(path, {}, (), ()), loaded(path), "float16")
    assert recipe.loss_scale is not None
    assert recipe.loss_scale.initial >= 2.0**40
    assert trained_recipe(Job(path, {}, (), ()), loaded(path), "bfloat16").loss_scale is None
