"""Compares two runs of a call in numbers: outputs, loss to first order, gradients by module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autoprec.backends.shared.watching import UNLIKE
from autoprec.backends.torch.watch.caught_call import CaughtCall
from autoprec.backends.torch.watch.repeated_call import Run
from autoprec.core.numerics.output_scale import scale_of
from autoprec.core.numerics.watching import (
    Difference,
    GradientPair,
    compared_gradients,
    standard_error,
)


def difference(
    run: Run, exact: Run, call: CaughtCall, *, samples: int, share: float, floor: float
) -> Difference:
    """Compare a run with float32's.

    `share` is the loss scale divided by the accumulated micro-batches, which the outputs' gradients
    have as a factor. A loss below `floor` counts as that much where it divides.
    """
    outputs = max(
        (_outputs_error(run.outputs[i], exact.outputs[i]) for i in exact.outputs), default=0.0
    )
    changes = [
        _change(run.outputs[i], exact.outputs[i], call.cut_gradient(i, samples))
        for i in exact.outputs
    ]
    loss, error = None, 0.0
    if call.loss is not None and samples == call.batch:
        known = float(call.loss)
        size = share * max(abs(known), floor, 1e-30)
        change = sum(float(each.sum()) for each in changes)
        if math.isfinite(known) and math.isfinite(change):
            loss, error = change / size, _standard_error(changes, samples) / size
    return Difference(outputs, loss, *_gradients(run.gradients, exact.gradients), loss_error=error)


def lost_modules(root: nn.Module) -> list[str]:
    """Return the paths of the modules whose own weights are not finite.

    Of sharded weights those that this process holds count.
    """
    lost: dict[str, None] = {}
    for name, weight in root.named_parameters():
        own = getattr(weight, "_local_tensor", weight).detach()
        with contextlib.suppress(RuntimeError):  # what has no numbers, or formats without the test
            if not bool(own.isfinite().all()):
                lost[name.rpartition(".")[0]] = None
    return list(lost)


def is_repeated(run: Run, outputs: Mapping[int, torch.Tensor]) -> bool:
    """Return whether a run gave the `outputs` that the call itself, or a run before it, did.

    Those are by index, and flattened: in the part that was kept.
    """
    for index, kept in outputs.items():
        if index in run.outputs:
            again = run.outputs[index].reshape(-1)[: kept.numel()].float()
            known = kept.reshape(-1)[: again.numel()].float()
            both = again.isfinite() & known.isfinite()
            away = torch.linalg.vector_norm((again - known)[both])
            if float(away) > UNLIKE * float(torch.linalg.vector_norm(known[both])):
                return False
    return True


def _outputs_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error relative to how float32's output varies over the batch."""
    if found.numel() < 2:
        return math.inf if bool((exact.isfinite() & ~found.isfinite()).any()) else 0.0
    ours, theirs = found.float(), exact.float()
    known = theirs.isfinite()
    if bool((known & ~ours.isfinite()).any()):
        return math.inf
    theirs = torch.where(known, theirs, 0.0)
    away = float(torch.linalg.vector_norm(torch.where(known, ours, 0.0) - theirs))
    if away == 0.0:
        return 0.0
    spread = theirs - theirs.mean(0, keepdim=True) if len(theirs) > 1 else theirs
    norms = (float(torch.linalg.vector_norm(each)) for each in (spread, theirs))
    size = scale_of(*norms)
    return away / size if size else math.inf


def _change(found: torch.Tensor, exact: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return by how much each output's difference changes the loss, to first order."""
    away = found.float() - exact.float()
    return torch.where(gradient == 0, 0.0, away * gradient)


def _standard_error(changes: Sequence[torch.Tensor], samples: int) -> float:
    """Return the standard error of the changes' sum over the samples.

    It is 0 where there are few, or where an output that the loss reads has no row for each.
    """
    read = [each for each in changes if bool(each.any())]
    if not read or any(each.shape[:1] != (samples,) for each in read):
        return 0.0
    by_sample = torch.stack([each.reshape(samples, -1).sum(1) for each in read]).sum(0)
    return standard_error(by_sample.tolist())


def _gradients(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> tuple[float, dict[str, float], float]:
    """Return the error of all gradients, those by module, and the share that vanished."""
    names = [name for name in exact if name in found]
    if not names:
        return 0.0, {}, 0.0
    rows = torch.stack([_numbers(found[name], exact[name]) for name in names]).tolist()
    return compared_gradients(
        GradientPair(name.rpartition(".")[0], *row) for name, row in zip(names, rows, strict=True)
    )


def _numbers(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a `GradientPair`."""
    ours, theirs = found.float(), exact.float()
    there = theirs != 0
    away, norm = torch.linalg.vector_norm(ours - theirs), torch.linalg.vector_norm(theirs)
    return torch.stack([away, norm, (there & (ours == 0)).sum().float(), there.sum().float()])
