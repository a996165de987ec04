"""Recipes in words: complete, in short, and by what they set; every report takes them from here."""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.recipe import (
    ATTENTION,
    BLOCKS,
    COMPILE_MODE,
    COMPILE_SCOPE,
    KEEP_MEMORY,
    KNOBS,
    KnobValue,
    Recipe,
    is_default_communication,
)

#: The most float32 modules that a description names.
_NAMED_MODULES = 3

#: What sets nothing, by parameter of the search; policy and batch are described by themselves.
_DEFAULTS: Mapping[str, KnobValue] = {
    "memory_format": "contiguous",
    "compile": False,
    "alignment": 1,
    COMPILE_MODE: "default",
    COMPILE_SCOPE: "model",
    ATTENTION: "default",
}
_ON = {"compile": "compiled", KEEP_MEMORY: "memory kept"}
_NO_SETTINGS = ("policy", "batch_size")


def describe_recipe(recipe: Recipe, weights_in: str = "") -> str:
    """Describe a recipe completely: "mixed_bfloat16, batch 64, compiled, head in float32".

    `weights_in` is the dtype that the model computes in by itself if that is 16-bit: no float32.
    """
    parts = [
        recipe.policy.name_with(weights_in),
        describe_batch_of(recipe),
        describe_settings(recipe.settings),
    ]
    if recipe.float32_modules:
        named = ", ".join(path or "the root" for path in recipe.float32_modules[:_NAMED_MODULES])
        more = len(recipe.float32_modules) - _NAMED_MODULES
        parts.append(f"{named}{f' and {more} more' if more > 0 else ''} in float32")
    return ", ".join(filter(None, parts))


def name_recipe(recipe: Recipe, weights_in: str = "") -> str:
    """Name a recipe in short: "mixed_bfloat16 at batch 64 in 4 micro-batches of 16"."""
    return f"{recipe.policy.name_with(weights_in)} at {describe_batch_of(recipe)}"


def describe_settings(settings: Mapping[str, KnobValue]) -> str:
    """Describe what is set besides policy and batch: "channels_last, compiled, memory kept"."""
    texts = {name: describe_setting(name, value) for name, value in settings.items()}
    kept = texts.pop(KEEP_MEMORY, "")
    return ", ".join(filter(None, [*texts.values(), kept]))


def describe_point(point: Mapping[str, KnobValue]) -> str:
    """Describe what a point of the search sets; a knob that is off there is at its default."""
    return describe_settings({n: v for n, v in point.items() if v is not False or n not in KNOBS})


def describe_setting(name: str, value: KnobValue) -> str:
    """Describe one setting: "compiled", "padded to 8", "threads=2"; "" if it is the default."""
    default = _DEFAULTS.get(name) == value or is_default_communication(name, value)
    if default or name in _NO_SETTINGS:
        return ""
    if name == "memory_format":
        return str(value)
    if name == "alignment":
        return f"padded to {value}"
    if name == ATTENTION:
        return f"{value} attention"
    if (name, value) == (COMPILE_SCOPE, BLOCKS):
        return "by block"
    return _ON.get(name, name) if value is True else f"{name}={value}"


def describe_batch(batch_size: int, accumulation_steps: int, ranks: int = 1) -> str:
    """Describe the batch of an update and its split: "batch 32 in 4 micro-batches of 8"."""
    text = f"batch {batch_size * accumulation_steps * ranks}"
    if ranks > 1:
        text += f" on {ranks} ranks"
    if accumulation_steps > 1:
        each = f"{accumulation_steps} micro-batches of {batch_size}"
        text += f" in {each} each" if ranks > 1 else f" in {each}"
    return text


def describe_batch_of(recipe: Recipe) -> str:
    """Describe the batch of a recipe's update, over all ranks, and its split."""
    return describe_batch(recipe.batch_size, recipe.accumulation_steps, recipe.world_size)
