"""Fits a recipe to the number of devices that train together, with its effective batch kept.

The effective batch, `batch_size * accumulation_steps * world_size`, is what the learning rate was
chosen for and what the proof covers; how it is split is a matter of speed alone.
"""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError


def fit_to_world_size(
    recipe: Recipe, world_size: int, default: Distributed | None = None
) -> tuple[Recipe, str | None]:
    """Return `recipe` for `world_size` devices, and a sentence that says what changed, if anything.

    The batch of one device stays if fewer or more accumulation steps keep the effective batch;
    otherwise the largest smaller one that keeps it is taken. If the devices cannot share the
    effective batch equally, the batch of one device stays, accumulation comes nearest, and the
    sentence says that the effective batch changed. `default` is the section for a recipe that has
    none, DistributedDataParallel's if it is not given; on one device such a recipe stays as it is.
    """
    if world_size < 1:
        raise UsageError(f"world_size: {world_size} given, expected at least 1")
    if world_size == recipe.world_size:
        return recipe, None
    section = recipe.distributed or default or Distributed()
    whole = recipe.effective_batch
    shared = _share_equally(whole, world_size, recipe.batch_size)
    batch_size, accumulation_steps = shared or (
        recipe.batch_size,
        max(1, round(whole / (recipe.batch_size * world_size))),
    )
    fitted = replace(
        recipe,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        distributed=replace(section, world_size=world_size),
    )
    return fitted, _say_what_changed(recipe, fitted, section)


def _share_equally(whole: int, world_size: int, largest: int) -> tuple[int, int] | None:
    """Return the largest batch of one device, and its steps, that make up `whole`; or None."""
    share, rest = divmod(whole, world_size)
    if rest:
        return None
    batch_size = next(size for size in range(min(largest, share), 0, -1) if share % size == 0)
    return batch_size, share // batch_size


def _say_what_changed(before: Recipe, after: Recipe, section: Distributed) -> str:
    names = ("batch_size", "accumulation_steps")
    changes = [
        f"{name} {now} instead of {then}"
        for name in names
        if (now := getattr(after, name)) != (then := getattr(before, name))
    ]
    said = f"a recipe for {_count(before.world_size, section)} is applied to {after.world_size}"
    said += f" with {' and '.join(changes)}" if changes else ""
    whole, now = before.effective_batch, after.effective_batch
    if now == whole:
        return f"{said}, so that the effective batch stays {whole}"
    return (
        f"{said}; {after.world_size} cannot share the effective batch of {whole} equally, so it "
        f"is {now} now, and the learning rate is yours to adapt"
    )


def _count(world_size: int, section: Distributed) -> str:
    one, many = ("replica", "replicas") if section.engine == "mirrored" else ("rank", "ranks")
    return f"{world_size} {one if world_size == 1 else many}"
