"""Notices gradients that reentrant activation checkpointing keeps from a backward pass.

`torch.utils.checkpoint(..., use_reentrant=True)` hides what it computes in a node of its own, so
that a backward pass for chosen parameters never gets to those inside, and torch says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autoprec.errors import UsageError

_NODE = "CheckpointFunctionBackward"


def check_reached(loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise `UsageError` where parameters got no gradient and a reentrant checkpoint may be why.

    The graph is only looked through where a gradient is missing.
    """
    missing = any(p.grad is None for p in parameters if p.requires_grad)
    if missing and _holds_checkpoint(loss.grad_fn):
        raise UsageError(
            "precision.backward(loss, optimizer=...) was given a loss with reentrant activation "
            "checkpoints in it, inside which no gradient reaches one optimizer's parameters "
            "alone: call checkpoint(..., use_reentrant=False), or backward without optimizer="
        )


def _holds_checkpoint(start: Any) -> bool:
    """Whether a reentrant checkpoint's node is in the graph that leads to `start`."""
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == _NODE:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
