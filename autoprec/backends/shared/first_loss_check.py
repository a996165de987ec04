"""The first batch's loss and gradient, which must be numbers, and depend on the weights.

Against a float32 loss that is NaN nothing can be proven, and a training that moves no weight has
nothing to tune. Both are the user's to fix, so the first number that is not finite is located.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoprec.errors import TaskError


def require_trainable(
    task_name: str,
    loss: float,
    *,
    nonfinite_gradients: Sequence[str],
    moves_weights: bool,
    origin: Callable[[], str],
    detached: str,
) -> None:
    """Raise `TaskError` where the float32 loss, or a gradient, is inf or NaN, or moves no weight.

    `nonfinite_gradients` names the weights that have such a gradient. `origin` says where a loss
    that is not finite begins, and `detached` how the framework cuts a loss off from the weights.
    """
    if not math.isfinite(loss):
        raise TaskError(
            f"{task_name}: the loss of the first batch is {loss} in float32, so no training can "
            f"be measured or checked: {origin()}"
        )
    if nonfinite_gradients:
        raise TaskError(
            f"{task_name}: the loss of the first batch is {loss:g}, but its gradient by "
            f"{nonfinite_gradients[-1]} is inf or NaN in float32: every weight would be NaN after "
            "one step. A square root or a norm at 0 does this: add a small number inside it"
        )
    if not moves_weights:
        raise TaskError(
            f"{task_name}: the loss of the first batch, {loss:g}, moves no weight: every gradient "
            "is zero or missing. Is it computed from what the model returned, and not "
            f"{detached}?"
        )


def nonfinite_data(wrong: int, numbers: int, where: str, first_sample: int | None) -> str:
    """Say that `wrong` of the `numbers` of one array of the batch are not finite."""
    first = "" if first_sample is None else f", first in sample {first_sample}"
    return (
        f"build_data yields {wrong} of {numbers} numbers that are inf or NaN in {where}{first}. "
        "Clean the data, or leave such samples out"
    )


def nonfinite_unit(kind: str, unit: str, loss: str) -> str:
    """Say which `unit`, a layer or module by `kind`, begins it; without one the `loss` does."""
    if unit:
        return f"its inputs are finite, and {unit} is the first {kind} that returns inf or NaN"
    return (
        f"the batch and every {kind}'s outputs are finite, so {loss} makes it (a logarithm or a "
        "square root of 0, a division by 0)"
    )
