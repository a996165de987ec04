"""Decides whether the recipes that ranks of one job are about to apply go together.

Ranks on mixed devices each take the profile of their own. If they compute, scale or accumulate
differently, training goes wrong or waits for ever, and no rank can tell by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.core.dtypes import DType
from autoprec.core.recipe import LossScale, Recipe


@dataclass(frozen=True)
class RankRecipe:
    """What a rank is about to apply, and on which device."""

    device: str
    recipe: Recipe


def disagreement(ranks: Sequence[RankRecipe]) -> str:
    """Say in what the ranks' recipes must not differ but do, with a table; empty if they agree.

    `ranks` are in the order of their ranks. Every rank that is given them says the same.
    """
    differing = {
        name: values
        for name, read in _MUST_AGREE.items()
        if len(set(values := [read(each.recipe) for each in ranks])) > 1
    }
    if not differing:
        return ""
    rows = [("rank", "device", *differing)]
    for rank, each in enumerate(ranks):
        rows.append((str(rank), each.device, *(values[rank] for values in differing.values())))
    return (
        f"the ranks' profiles differ in {' and '.join(differing)}, expected the same on all ranks: "
        "give every rank one profile, or profiles that agree; nothing was applied\n" + _table(rows)
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)


def _reduce_dtype(recipe: Recipe) -> str:
    ranks = recipe.distributed
    return str(DType.FLOAT32 if ranks is None else ranks.reduce_dtype)


def _loss_scale(recipe: Recipe) -> str:
    scale = recipe.applied_loss_scale
    return "none" if scale is None else _describe(scale)


def _describe(scale: LossScale) -> str:
    text = f"{scale.mode} {scale.initial:g}"
    if scale.mode == "fixed":
        return text
    return f"{text} (growth {scale.growth_interval}, floor {scale.floor:g})"


_MUST_AGREE: Mapping[str, Callable[[Recipe], str]] = {
    "policy": lambda recipe: str(recipe.policy),
    "reduce dtype": _reduce_dtype,
    "loss scale": _loss_scale,
    "accumulation steps": lambda recipe: str(recipe.accumulation_steps),
}
