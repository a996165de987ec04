"""What a recipe changes of the arithmetic: which recipes compute what plain float32 computes."""

from __future__ import annotations

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe


def keeps_arithmetic(recipe: Recipe) -> bool:
    """Say whether a recipe changes nothing of the arithmetic besides its policy."""
    return not (recipe.compile or recipe.alignment.modules or rounds_everywhere(recipe))


def rounds_everywhere(recipe: Recipe) -> bool:
    """Say whether something is rounded besides what the policy rounds, and so in islands, too."""
    return count_global_roundings(recipe) > 0


def count_global_roundings(recipe: Recipe) -> int:
    """Return how much is rounded wherever it occurs, whatever the policy.

    That is float32 products in the whole process, and gradients on their way between ranks.
    """
    ranks = recipe.distributed
    rounds_gradients = ranks is not None and ranks.rounds_gradients
    return rounds_gradients + (recipe.knobs.get("implicit_bfloat16") is True)


def is_reference(recipe: Recipe) -> bool:
    """Say whether a recipe computes exactly what plain float32 computes, perhaps faster."""
    gathered = None if recipe.distributed is None else recipe.distributed.param_dtype
    return recipe.policy is Policy.FLOAT32 and gathered is None and keeps_arithmetic(recipe)
