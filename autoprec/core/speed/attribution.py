"""Attributes a speed-up to precision, the ranks' reduction, settings, batch and kept memory.

From the chosen recipe to plain float32, one thing after another is switched off, and the recipes
on the way are timed in alternation. So the parts multiply to the whole: the gain of precision is
measured at the chosen batch, that of the batch in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import COMPILE_SCOPE, FLOAT8, KEEP_MEMORY, Recipe
from autoprec.core.recipe_words import describe_recipe, describe_setting
from autoprec.core.speed.noise import paired_ratio

PRECISION, REDUCTION, BATCH, MEMORY = "precision", "reduction", "batch", "kept memory"


@dataclass(frozen=True)
class Part:
    """One factor of a speed-up: what it is due to, and how much faster that is than `against`.

    `against` names the recipe in which it is switched off, and whatever came before it, too.
    """

    what: str
    speedup: Ratio
    against: str


@dataclass(frozen=True)
class Ablation:
    """A recipe on the way to the baseline, and what was switched off last."""

    what: str
    recipe: Recipe


def switch_off_in_turn(recipe: Recipe, plain: Recipe) -> tuple[Ablation, ...]:
    """Return the recipes from `recipe` to the baseline, each with one thing less; `plain` last."""
    memory = {KEEP_MEMORY: True} if recipe.keeps_memory else {}
    float32 = recipe.with_policy(Policy.FLOAT32)
    settled = replace(float32, distributed=plain.distributed)
    bfloat16 = {name: value for name, value in recipe.knobs.items() if name != FLOAT8}
    steps = (
        (FLOAT8, replace(recipe, knobs=bfloat16)),
        (PRECISION, float32),
        (REDUCTION, settled),
        *_without_settings(settled, baseline_at_batch_of(recipe, plain)),
        (BATCH, replace(plain, knobs=memory)),
        (MEMORY, plain),
    )
    found, last = [], recipe
    for what, off in steps:
        if off.key() != last.key():
            found.append(Ablation(what, off))
            last = off
    return tuple(found)


def _without_settings(recipe: Recipe, plain: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipe without one more of its settings each time; `plain` has none of them."""
    for name, value in recipe.knobs.items():
        if name not in (KEEP_MEMORY, COMPILE_SCOPE):
            kept = {other: v for other, v in recipe.knobs.items() if other != name}
            recipe = replace(recipe, knobs=kept)
            yield describe_setting(name, value), recipe
    for field in ("alignment", "compile", "memory_format"):
        name = describe_setting(field, recipe.settings[field])
        recipe = replace(recipe, **{field: getattr(plain, field)})
        if field == "compile":
            kept = {other: v for other, v in recipe.knobs.items() if other != COMPILE_SCOPE}
            recipe = replace(recipe, knobs=kept)
        yield name, recipe


def baseline_at_batch_of(recipe: Recipe, plain: Recipe) -> Recipe:
    """Return plain float32 at a recipe's own batch, with memory kept if the recipe keeps it."""
    return replace(
        plain,
        batch_size=recipe.batch_size,
        accumulation_steps=recipe.accumulation_steps,
        knobs={KEEP_MEMORY: True} if recipe.keeps_memory else {},
    )


def attribute_speedup(
    recipe: Recipe,
    plain: Recipe,
    rates: Mapping[str, Sequence[float]],
    weights_in: str = "",
) -> tuple[Part, ...]:
    """Return the parts of the speed-up of `recipe` over `plain`.

    `rates` are the rounds' rates by the recipes' keys. What was switched off together, because a
    recipe in between did not run, is one part. `weights_in` is the model's own 16-bit dtype.
    """
    found: list[Part] = []
    names: list[str] = []
    last = recipe.key()
    for step in switch_off_in_turn(recipe, plain):
        names.append(step.what)
        key = step.recipe.key()
        if key in rates:
            ratio = paired_ratio(rates[last], rates[key])
            found.append(Part(" and ".join(names), ratio, describe_recipe(step.recipe, weights_in)))
            names, last = [], key
    return tuple(found)


def describe_parts(parts: Sequence[Part]) -> str:
    """List the parts of a speed-up: "precision 1.90x, batch 3.10x"."""
    return ", ".join(f"{part.what} {times(part.speedup.ratio)}" for part in parts)
