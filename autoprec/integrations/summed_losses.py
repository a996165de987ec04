"""Whether Hugging Face's Trainer adds up micro-batches' losses, and what makes that wrong."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

_SCALED = "loss_is_scaled_for_ga"


def adds_up(trainer: Any) -> bool:
    """Say whether the Trainer adds up the losses of micro-batches, where others average."""
    said: bool | None = getattr(trainer, _SCALED, None)
    counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return counted if said is None else said


def leaves_out_items(trainer: Any) -> str:
    """Name what computes the loss and never reads the number of the update's tokens.

    The Trainer adds up such losses. Empty where the code does not tell, or it does not matter.
    """
    if getattr(trainer, _SCALED, None) is not None or not adds_up(trainer):
        return ""
    computes = trainer.compute_loss_func or trainer.compute_loss
    if computes.__module__.startswith("transformers."):
        if trainer.label_smoother is not None:
            return ""
        computes = trainer.model.forward
    if _reads(computes, "num_items_in_batch"):
        return ""
    return getattr(inspect.unwrap(computes), "__qualname__", type(computes).__name__)


def _reads(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function's code reads an argument, or other keywords; True if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    given = inspect.signature(function).parameters.values()
    wanted = {argument, *(each.name for each in given if each.kind is each.VAR_KEYWORD)}
    found = (each.argval for each in dis.get_instructions(code))
    return any(wanted.intersection(v if isinstance(v, tuple) else (v,)) for v in found)
