"""What of a recipe really ran in a training's first update, in plain values.

A profile that is applied to a model inside somebody else's training loop may be without effect: a
module whose weights are used without calling it, a path of another model, a loader of another
batch. Nothing of that raises, so it is looked at once, and said.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.core.recipe import Recipe


@dataclass(frozen=True)
class WhatRan:
    """What was seen between attaching a recipe and the end of the first update.

    `dtype` is that of the first matrix product outside islands, `memory_format` that of the first
    convolution's input, `batch` the samples of the first micro-batch, `calls` how often the model
    was called in training; None where that was not seen.
    `inert` are the islands and padded modules that were never called, `rounded` the islands that
    gave 16-bit results. `compiled` says that the model is compiled, which hides its modules.
    """

    dtype: str | None = None
    islands: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    memory_format: str | None = None
    batch: int | None = None
    calls: int | None = None
    compiled: bool = False

    def line(self, recipe: Recipe) -> str:
        """Return one line that says what ran, for a log."""
        told = [
            f"{recipe.policy}",
            f"first product in {self.dtype or 'no module that was seen'}",
            f"islands that ran: {', '.join(map(_title, self.islands)) or 'none'}",
            f"padded modules that ran: {', '.join(map(_title, self.padded)) or 'none'}",
            f"memory format {self.memory_format or 'of no convolution'}",
            f"batch {self.batch} (checked with {recipe.batch_size})",
        ]
        if self.compiled:
            told[1:5] = ["compiled, so that its modules are not seen"]
        return "after the first update: " + "; ".join(told)

    def problems(self, recipe: Recipe) -> tuple[str, ...]:
        """Return what had no effect, or another one than was proven; empty where all is well."""
        found = []
        if self.batch is not None and self.batch != recipe.batch_size:
            found.append(
                f"the loader gives batches of {self.batch} and the profile was checked with "
                f"{recipe.batch_size}: give the loader batch_size={recipe.batch_size}"
            )
        if self.calls is not None and self.calls < recipe.accumulation_steps:
            found.append(
                f"the first update was made of {self.calls} micro-batches, and the profile "
                f"accumulates {recipe.accumulation_steps} of {recipe.batch_size}"
            )
        if self.compiled:
            return tuple(found)
        low = recipe.policy.compute_dtype
        if recipe.policy.mixed and self.dtype is not None and self.dtype != low:
            found.append(
                f"the first matrix product ran in {self.dtype}, and {recipe.policy} computes in "
                f"{low}: does the model call it under an autocast of its own?"
            )
        if self.inert:
            names = ", ".join(map(_title, self.inert))
            found.append(
                f"{names} did not run: where a module's weights are used without calling it (a "
                "fused loss, tied weights), float32_modules and padding have no effect there; "
                "switch that off, or take the path out of the profile"
            )
        if self.rounded:
            names = ", ".join(map(_title, self.rounded))
            found.append(f"{names} should have run in float32 and gave 16-bit results")
        wanted = recipe.memory_format
        if wanted == "channels_last" and self.memory_format not in (None, wanted):
            found.append(
                f"the first convolution's input is {self.memory_format}, and the profile lays "
                f"images out as {wanted}: does the training step call a part of the model?"
            )
        return tuple(found)


def _title(path: str) -> str:
    return path or "the model itself"
