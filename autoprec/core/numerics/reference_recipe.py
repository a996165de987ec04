"""What a recipe changes of the arithmetic: which recipes compute what plain float32 computes.

Plain float32 is the reference: contiguous, at the unsplit batch, nothing compiled, padded or fused.
A recipe may change the order or the layout in which that is computed. It is *exact* then, and one
comparison at the same weights shows whether the task allows it. What rounds must be trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import (
    COMPILE_MODE,
    COMPILE_SCOPE,
    FLOAT8,
    KEEP_MEMORY,
    KnobValue,
    Recipe,
)
from autoprec.core.recipe_words import describe_setting

_IMPLICIT = "implicit_bfloat16"

_WITHOUT_EFFECT: Mapping[str, str] = {
    KEEP_MEMORY: "where freed memory goes changes no number",
    "steps_per_execution": "one call repeats the same step",
    COMPILE_MODE: "it says how `compile` compiles",
    COMPILE_SCOPE: "it says what `compile` compiles",
    _IMPLICIT: "it rounds, so that nothing exact can be asked of it",
    FLOAT8: "it rounds, and float32 cannot be refined by it",
}
"""Knobs that are no settings of their own, and why."""

_OF_COMPILE = (COMPILE_MODE, COMPILE_SCOPE)


@dataclass(frozen=True)
class Setting:
    """One thing that a recipe does otherwise than plain float32, in the order or the layout.

    `key` is the recipe's field or knob, `name` is for people, `alone` is float32 with nothing else.
    """

    key: str
    name: str
    alone: Recipe


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
    return rounds_gradients + (recipe.knobs.get(_IMPLICIT) is True)


def is_exact(recipe: Recipe) -> bool:
    """Say whether a recipe keeps float32's arithmetic, perhaps in another order or layout.

    Such a recipe is proven by a comparison at the same weights, without a training.
    """
    gathered = None if recipe.distributed is None else recipe.distributed.param_dtype
    return recipe.policy is Policy.FLOAT32 and gathered is None and keeps_arithmetic(recipe)


def is_reference(recipe: Recipe) -> bool:
    """Say whether a recipe is plain float32 itself, so that there is nothing to compare.

    How ranks travel with their gradients (buckets, resharding) is part of it: no training in one
    process could be compared with theirs.
    """
    return is_exact(recipe) and not settings_of(recipe)


def plain_float32(recipe: Recipe) -> Recipe:
    """Return the reference of a recipe: float32 at its unsplit batch, on as many ranks."""
    whole = recipe.batch_size * recipe.accumulation_steps
    return replace(recipe.in_float32(), batch_size=whole, accumulation_steps=1)


def settings_in_float32(recipe: Recipe) -> Recipe:
    """Return float32 with all of a recipe's settings, and with nothing that rounds."""
    ranks = recipe.distributed
    if ranks is not None:
        ranks = replace(ranks, param_dtype=None, reduce_dtype=DType.FLOAT32)
    kept = (*_effective_knobs(recipe), *(_OF_COMPILE if recipe.compile else ()))
    return replace(
        recipe,
        policy=Policy.FLOAT32,
        float32_modules=(),
        loss_scale=None,
        knobs={name: value for name, value in recipe.knobs.items() if name in kept},
        forced=False,
        distributed=ranks,
    )


def settings_of(recipe: Recipe) -> tuple[Setting, ...]:
    """Return what a recipe does otherwise than plain float32, besides rounding."""
    return tuple(_settings(settings_in_float32(recipe), plain_float32(recipe)))


def _settings(recipe: Recipe, plain: Recipe) -> Iterator[Setting]:
    def named(name: str, alone: Recipe) -> Setting:
        return Setting(name, describe_setting(name, recipe.settings[name]), alone)

    if recipe.accumulation_steps > 1:
        batch, steps = recipe.batch_size, recipe.accumulation_steps
        alone = replace(plain, batch_size=batch, accumulation_steps=steps)
        yield Setting("accumulation_steps", f"{steps} micro-batches of {batch}", alone)
    if recipe.memory_format != "contiguous":
        alone = replace(plain, memory_format=recipe.memory_format)
        yield named("memory_format", alone)
    if recipe.compile:
        how = {k: v for k, v in recipe.knobs.items() if k in _OF_COMPILE}
        yield named("compile", replace(plain, compile=True, knobs=how))
    if recipe.alignment.modules:
        yield named("alignment", replace(plain, alignment=recipe.alignment))
    for knob, value in _effective_knobs(recipe).items():
        yield named(knob, replace(plain, knobs={knob: value}))


def _effective_knobs(recipe: Recipe) -> dict[str, KnobValue]:
    """Return the knobs that may change a number, as far as they are on."""
    return {
        name: value
        for name, value in recipe.knobs.items()
        if name not in _WITHOUT_EFFECT and value is not False
    }
