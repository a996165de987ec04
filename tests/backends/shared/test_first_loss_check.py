"""A first loss that no training can begin with is refused, with where it comes from."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autoprec.backends.shared.first_loss_check import (
    nonfinite_data,
    nonfinite_unit,
    require_trainable,
)
from autoprec.errors import TaskError


def check(loss: float = 1.0, **given: Any) -> None:
    known: dict[str, Any] = {
        "nonfinite_gradients": (),
        "moves_weights": True,
        "origin": lambda: "the logarithm",
        "detached": "behind a wall",
    }
    require_trainable("task.py", loss, **(known | given))


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_no_number_is_refused_with_its_origin(loss):
    with pytest.raises(TaskError, match=f"task.py.*{loss} in float32.*the logarithm"):
        check(loss)


def test_the_last_weight_with_a_broken_gradient_is_named():
    with pytest.raises(TaskError, match="gradient by second is inf or NaN"):
        check(nonfinite_gradients=["first", "second"])


def test_a_loss_that_moves_no_weight_is_refused():
    with pytest.raises(TaskError, match=r"moves no weight.*behind a wall\?"):
        check(moves_weights=False)


def test_any_other_loss_may_be_trained_and_its_origin_is_not_looked_for():
    def never() -> str:
        raise AssertionError

    check(0.0, origin=never)


def test_the_origin_is_in_the_data_or_in_a_unit_or_in_the_loss():
    assert "2 of 9 numbers that are inf or NaN in inputs, first in sample 3" in nonfinite_data(
        2, 9, "inputs", 3
    )
    assert "sample" not in nonfinite_data(1, 1, "inputs", None).partition(".")[0]
    assert "dense (Dense) is the first layer" in nonfinite_unit("layer", "dense (Dense)", "loss_fn")
    assert "so loss_fn makes it" in nonfinite_unit("module", "", "loss_fn")
