"""Attributes a speed-up to precision, the ranks' reduction, settings, batch and kept memory.

From the chosen recipe to plain float32, one thing after another is switched off, and the recipes
on the way are timed in alternation. So the parts multiply to the whole: the gain of precision is
measured at the chosen batch, that of the batch in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import (
    KEEP_MEMORY,
    Recipe,
    communication_settings,
    describe_batch,
)
from autoprec.core.speed.noise import Ratio, paired_ratio

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
    steps = (
        (PRECISION, float32),
        (REDUCTION, replace(float32, distributed=plain.distributed)),
        (
            ", ".join(_settings(replace(recipe, distributed=None))),
            baseline_at_batch_of(recipe, plain),
        ),
        (BATCH, replace(plain, knobs=memory)),
        (MEMORY, plain),
    )
    found, last = [], recipe
    for what, off in steps:
        if off.key() != last.key():
            found.append(Ablation(what, off))
            last = off
    return tuple(found)


def baseline_at_batch_of(recipe: Recipe, plain: Recipe) -> Recipe:
    """Return plain float32 at a recipe's own batch, with memory kept if the recipe keeps it."""
    return replace(
        plain,
        batch_size=recipe.batch_size,
        accumulation_steps=recipe.accumulation_steps,
        knobs={KEEP_MEMORY: True} if recipe.keeps_memory else {},
    )


def attribute_speedup(
    recipe: Recipe, plain: Recipe, rates: Mapping[str, Sequence[float]]
) -> tuple[Part, ...]:
    """Return the parts of the speed-up of `recipe` over `plain`.

    `rates` are the rounds' rates by the recipes' keys. What was switched off together, because a
    recipe in between did not run, is one part.
    """
    found: list[Part] = []
    names: list[str] = []
    last = recipe.key()
    for step in switch_off_in_turn(recipe, plain):
        names.append(step.what)
        key = step.recipe.key()
        if key in rates:
            ratio = paired_ratio(rates[last], rates[key])
            found.append(Part(" and ".join(names), ratio, describe_recipe(step.recipe)))
            names, last = [], key
    return tuple(found)


def describe_recipe(recipe: Recipe) -> str:
    """Describe a recipe completely: "float32, batch 64, memory kept"."""
    kept = ["memory kept"] if recipe.keeps_memory else []
    batch = describe_batch(recipe.batch_size, recipe.accumulation_steps, recipe.world_size)
    return ", ".join([recipe.policy.value, batch, *_settings(recipe), *kept])


def _settings(recipe: Recipe) -> list[str]:
    """Describe what a recipe sets besides policy, batch and kept memory."""
    found: list[str] = []
    found += [] if recipe.memory_format == "contiguous" else [recipe.memory_format]
    found += ["compiled"] if recipe.compile else []
    found += [f"padded to {recipe.alignment.multiple}"] if recipe.alignment.modules else []
    for name, value in {**communication_settings(recipe), **recipe.knobs}.items():
        if name != KEEP_MEMORY:
            found.append(name if value is True else f"{name}={value}")
    return found
