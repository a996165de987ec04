"""What a speed-up consists of: precision, settings, batch and kept memory, one after another.

From the chosen recipe to plain float32 as it was run, one thing after another is switched off, and
each recipe on the way runs beside the others. So the parts multiply to the whole: what precision
brings is seen at the chosen batch, and what the batch brings in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe, batch_in_words
from autoprec.core.statistics import Ratio, paired_ratio

PRECISION, BATCH, MEMORY = "precision", "batch", "kept memory"


@dataclass(frozen=True)
class Part:
    """One part of a speed-up: what it is due to, and how much faster than `against` that is.

    `against` names the recipe in which it is switched off, and whatever came before it, too.
    """

    what: str
    speedup: Ratio
    against: str


@dataclass(frozen=True)
class Without:
    """A recipe on the way to the baseline, and what was switched off last."""

    what: str
    recipe: Recipe


def switched_off(recipe: Recipe, plain: Recipe) -> tuple[Without, ...]:
    """The recipes from `recipe` to the baseline `plain`, each with one thing less; `plain` last."""
    memory = {KEEP_MEMORY: True} if recipe.keeps_memory else {}
    float32 = replace(recipe, policy=Policy.FLOAT32, float32_modules=(), loss_scale=None)
    steps = (
        (PRECISION, float32),
        (", ".join(_settings(recipe)), at_its_batch(recipe, plain)),
        (BATCH, replace(plain, knobs=memory)),
        (MEMORY, plain),
    )
    found, last = [], recipe
    for what, off in steps:
        if off.key() != last.key():
            found.append(Without(what, off))
            last = off
    return tuple(found)


def at_its_batch(recipe: Recipe, plain: Recipe) -> Recipe:
    """Plain float32 at a recipe's own batch, its memory kept as the recipe does."""
    return replace(
        plain,
        batch_size=recipe.batch_size,
        accumulation_steps=recipe.accumulation_steps,
        knobs={KEEP_MEMORY: True} if recipe.keeps_memory else {},
    )


def parts(recipe: Recipe, plain: Recipe, rates: Mapping[str, Sequence[float]]) -> tuple[Part, ...]:
    """The parts of the speed-up of `recipe` over `plain`, by everybody's rates round by round.

    `rates` are by the recipes' keys. What was switched off together, because a recipe between did
    not run, is one part.
    """
    found: list[Part] = []
    names: list[str] = []
    last = recipe.key()
    for step in switched_off(recipe, plain):
        names.append(step.what)
        key = step.recipe.key()
        if key in rates:
            ratio = paired_ratio(rates[last], rates[key])
            found.append(Part(" and ".join(names), ratio, in_words(step.recipe)))
            names, last = [], key
    return tuple(found)


def in_words(recipe: Recipe) -> str:
    """A side of a ratio named wholly: "float32, batch 64, memory kept"."""
    kept = ["memory kept"] if recipe.keeps_memory else []
    batch = batch_in_words(recipe.batch_size, recipe.accumulation_steps)
    return ", ".join([recipe.policy.value, batch, *_settings(recipe), *kept])


def _settings(recipe: Recipe) -> list[str]:
    """What a recipe sets besides policy, batch and kept memory."""
    found: list[str] = []
    found += [] if recipe.memory_format == "contiguous" else [recipe.memory_format]
    found += ["compiled"] if recipe.compile else []
    found += [f"padded to {recipe.alignment.multiple}"] if recipe.alignment.modules else []
    for name, value in recipe.knobs.items():
        if name != KEEP_MEMORY:
            found.append(name if value is True else f"{name}={value}")
    return found
