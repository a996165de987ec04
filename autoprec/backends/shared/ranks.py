"""What a rank knows of the others that train with it.

Whatever reads a clock or its own memory may come out differently on every rank. Where that decides
what is run next, ranks that decide differently wait for each other for ever: such numbers go
through `agree` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError

Agree = Callable[[float], float]
"""Returns the largest value that any rank gives: the same one on all of them."""


def unchanged(value: float) -> float:
    """Return the value: the agreement of a process that trains alone."""
    return value


@dataclass(frozen=True)
class Ranks:
    """A rank's place among the others; the defaults are those of a process that trains alone.

    `distributed` is how they share a step in plain float32.
    """

    rank: int = 0
    world_size: int = 1
    distributed: Distributed | None = None
    agree: Agree = unchanged

    def shared(self, recipe: Recipe) -> Recipe:
        """Return the recipe as these ranks run it: one that says nothing of ranks, like float32.

        Raises `UsageError` where it is for another number of them.
        """
        if recipe.distributed is None:
            return replace(recipe, distributed=self.distributed)
        if self.distributed is None or recipe.world_size != self.world_size:
            raise UsageError(
                f"a recipe for {recipe.world_size} ranks given, expected one for "
                f"{self.world_size}, which is how many train here"
            )
        return recipe

    def global_index(self, index: int) -> int:
        """Return the index, among all ranks' micro-batches, of this rank's own `index`-th."""
        return index * self.world_size + self.rank


ALONE = Ranks()
