"""Whether a batch may be split: do two halves' gradients average to the whole batch's?

Only one set of gradients is kept: the halves' are subtracted from the whole batch's in place, so
that this needs no more memory than training does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.attempt import NO_MEMORY, try_to_measure
from autoprec.backends.shared.batch_splits import (
    Splitting,
    explain_difference,
    gradient_tolerance,
    in_batch,
    judge_splitting,
)
from autoprec.backends.torch.dtypes import LOW_DTYPES, dtype_name
from autoprec.backends.torch.measure.step_costs import buffers_preserved
from autoprec.backends.torch.train.batch_dimension import Samples
from autoprec.backends.torch.train.held_snapshot import around, held_generators
from autoprec.backends.torch.train.model_state import stored_values
from autoprec.backends.torch.train.task_runner import (
    batches,
    compute_loss,
    move,
    seed_everything,
    weighed,
)
from autoprec.core.dtypes import DType

_CHANGES_STATE = "a forward pass changes what the next one computes (spectral norm does this)"
_NOT_COMPARED = "two halves could not be compared with their batch"
_DRAWS_RANDOM_NUMBERS = "a step draws random numbers of its own besides dropout"

Part = tuple[Any, float, int]
"""A batch, the factor of its loss, and the seed of its random numbers."""


def splittable(
    task: Task,
    model: nn.Module,
    given: Mapping[int, Any],
    samples: Samples,
    seed: int,
    *,
    device: str,
    report: ProgressCallback,
    autocasts: bool = False,
) -> Splitting:
    """Say whether two halves' mean gradient equals the whole batch's, dropout off; else why.

    `given` are batches from all over the data by their places, the first batch first, in the order
    in which they are compared; each is put on the model's `device` for that. The task `autocasts`
    where it opens an autocast of its own. Where neither half of the first batch trains nor one of
    twice its size, the model runs at that batch size only, and the answer is `fixed`.
    """
    if task.fixed_batch:
        return Splitting(False, task.fixed_batch, fixed=True)
    first = samples.count(given[0])
    if first < 2 or first % 2:
        return Splitting(False, f"a batch of {first} samples has no halves")
    if samples.unsplittable_reason:
        return Splitting(False, samples.unsplittable_reason)

    low = {DType(dtype_name(p.dtype)) for p in model.parameters() if p.dtype in LOW_DTYPES}
    tolerance = gradient_tolerance(low | ({DType.BFLOAT16} if autocasts else set()))
    fixed = False

    def reason_against(index: int) -> str:
        nonlocal fixed
        batch, why = try_to_measure(lambda: move(given[index], device))
        if batch is None:
            return in_batch(f"a batch could not be put on the device: {why}", index)
        halves, why = try_to_measure(lambda: samples.halves(batch))
        if halves is None:
            return in_batch(f"a batch cannot be cut in two: {why}", index)
        with buffers_preserved(model), without_dropout(model):
            whole_and_halves = (batch, *weighed(task, halves))
            reason = _reason_against(task, model, whole_and_halves, seed, index, tolerance)
            if index or not reason.startswith(_NOT_COMPARED):
                return reason
            why = _why_half_fails(task, model, batch, halves[0], seed)
            fixed = bool(why) and not _trains_at(task, model, 2 * first, samples, seed, device)
        if not fixed:
            return reason
        return f"half a batch does not train, so the model runs at batches of {first} only ({why})"

    return replace(
        judge_splitting(given, reason_against, report, task.describing_seconds), fixed=fixed
    )


def _why_half_fails(task: Task, model: nn.Module, batch: Any, half: Any, seed: int) -> str:
    """Return why half a batch does not train where the whole one does; else ""."""
    whole, why = (
        try_to_measure(partial(_difference, task, model, [(part, 1.0, seed)]))[1]
        for part in (batch, half)
    )
    return "" if whole or why == NO_MEMORY else why


def _trains_at(
    task: Task, model: nn.Module, size: int, samples: Samples, seed: int, device: str
) -> bool:
    """Say whether a batch of this size trains; True where there is only not enough memory for it.

    Data that hold no such batch are never trained on at this size.
    """
    with contextlib.closing(batches(task, size, seed)) as stream:
        given, _ = try_to_measure(lambda: next(stream))
    if given is None or samples.count(given) != size:
        return False
    _, why = try_to_measure(lambda: _difference(task, model, [(move(given, device), 1.0, seed)]))
    return why in ("", NO_MEMORY)


def _reason_against(
    task: Task,
    model: nn.Module,
    whole_and_halves: tuple[Any, Any, Any],
    seed: int,
    index: int,
    tolerance: float,
) -> str:
    batch, *halves = whole_and_halves
    whole: Part = (batch, 1.0, seed)
    parts = [whole, *((half, -0.5, seed) for half in halves)]
    error, why = try_to_measure(lambda: _difference(task, model, parts))
    if error is None:
        return in_batch(f"{_NOT_COMPARED}: {why}", index)
    if error <= tolerance:
        return ""
    if math.isnan(error):
        return in_batch("the gradients of a batch or of its halves are not finite", index)
    again = [whole, (batch, -1.0, seed)]
    drawn_anew = [whole, (batch, -1.0, seed + 1)]
    state, _ = try_to_measure(lambda: _difference(task, model, again))
    random, _ = try_to_measure(lambda: _difference(task, model, drawn_anew))
    for found, why in ((state, _CHANGES_STATE), (random, _DRAWS_RANDOM_NUMBERS)):
        if found is not None and not found <= tolerance:
            return f"{why}, so that halves cannot be compared with their batch"
    return explain_difference(error, index)


def _difference(task: Task, model: nn.Module, parts: Sequence[Part]) -> float:
    """Return the norm of the parts' summed gradients, relative to the first's; NaN if unknown."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    try:
        for index, (batch, factor, seed) in enumerate(parts):
            seed_everything(seed, held_generators(model, around(task)))
            (compute_loss(task, model, batch, None) * factor).backward()  # type: ignore[no-untyped-call]
            total = total if index else _norm(model)
        left = _norm(model)
    finally:
        model.zero_grad(set_to_none=True)
    if left == 0.0:
        return 0.0
    if not math.isfinite(left + total):
        return math.nan
    return left / total if total > 0.0 else math.inf


def _norm(model: nn.Module) -> float:
    """Return the norm of all gradients, one after the other: devices may have no float64."""
    return math.hypot(*(_magnitude(p.grad) for p in model.parameters() if p.grad is not None))


def _magnitude(gradient: torch.Tensor) -> float:
    values = stored_values(gradient.detach()).float()
    largest = float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    # By parts of the largest: the square of a small or a large float32 is 0 or infinite.
    return largest * float(torch.linalg.vector_norm(values / largest))


_DROPOUT_RATES: Sequence[tuple[type[nn.Module], str]] = (
    (_DropoutNd, "p"),
    (nn.RNNBase, "dropout"),
    (nn.MultiheadAttention, "dropout"),
)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, in modules and in functions, while BatchNorm stays in training mode."""
    held = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for kind, name in _DROPOUT_RATES
        if isinstance(module, kind)
    ]
    for module, name, _ in held:
        setattr(module, name, 0.0)
    try:
        with _NoDropout():
            yield
    finally:
        for module, name, rate in held:
            setattr(module, name, rate)


_DROPOUT_ARGUMENTS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions with an argument `dropout_p`, and its position."""


class _NoDropout(TorchFunctionMode):
    """Makes every functional dropout the identity, attention's too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and args and isinstance(args[0], torch.Tensor):
            return args[0]
        position = _DROPOUT_ARGUMENTS.get(name)
        if position is not None:
            args = tuple(0.0 if i == position else argument for i, argument in enumerate(args))
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
