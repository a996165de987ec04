"""What a recipe changes of the arithmetic: which recipes compute what plain float32 computes."""

from __future__ import annotations

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe


def keeps_arithmetic(recipe: Recipe) -> bool:
    """Say whether a recipe changes nothing of the arithmetic besides its policy."""
    return not (recipe.compile or recipe.alignment.modules or rounds_float32(recipe))


def rounds_float32(recipe: Recipe) -> bool:
    """Say whether float32 products are rounded in the whole process, and so in islands as well."""
    return recipe.knobs.get("implicit_bfloat16") is True


def is_reference(recipe: Recipe) -> bool:
    """Say whether a recipe computes exactly what plain float32 computes, perhaps faster."""
    return recipe.policy is Policy.FLOAT32 and keeps_arithmetic(recipe)
