"""How many states of a training run are kept for a comparison: those main memory has room for."""

from __future__ import annotations

MAX_CHECKPOINT_BYTES = 8 << 30
"""How much main memory the states and gradients of a run's checkpoints may take."""


def affordable_steps(steps: frozenset[int], model_bytes: int) -> frozenset[int]:
    """Return the steps whose state and gradient fit into the budget: the first, then the last."""
    count = int(MAX_CHECKPOINT_BYTES // max(1, 2 * model_bytes))
    ordered = sorted(steps)
    preferred = ordered[:1] + ordered[:0:-1]
    return frozenset(preferred[: max(1, count)])
