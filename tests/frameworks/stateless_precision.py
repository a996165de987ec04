"""The Precision of a framework whose recipes leave nothing to scale, to count or to undo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe


@dataclass(frozen=True)
class StatelessPrecision:
    """A recipe that was applied, and nothing else; see `Precision`."""

    recipe: Recipe
    steps: int = 0
    skipped: int = 0

    @property
    def policy(self) -> Policy:
        """See `Precision.policy`."""
        return self.recipe.policy

    @property
    def batch_size(self) -> int:
        """See `Precision.batch_size`."""
        return self.recipe.batch_size

    def state_dict(self) -> dict[str, Any]:
        """See `Precision.state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Precision.load_state_dict`."""

    def restore(self) -> None:
        """See `Precision.restore`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...
