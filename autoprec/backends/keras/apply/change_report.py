"""Describes what a recipe changed, in plain values to print, log or put into a profile."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.backends.keras.apply.padding import PaddedLayer
from autoprec.core.dtypes import Policy


@dataclass(frozen=True)
class ChangeReport:
    """What applying a recipe changed, and what it has to say.

    `islands` are the layers computed in float32: the recipe's, then those the outputs need
    ("dense_2 (activation)" where only the end of a layer is). `kept` are float32 layers: the
    user's own, those that only prepare the model's inputs, and those that assign weights. `padded`
    are layers computed at aligned sizes, `not_padded` those that cannot be, with the reason.
    `warnings` each say what to do.
    """

    policy: Policy
    layers: int = 0
    islands: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    padded: tuple[PaddedLayer, ...] = ()
    not_padded: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
