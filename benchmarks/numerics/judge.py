"""The judge: the tuner's tracer, and the loss scale it would tune. No truth may come from here."""

from __future__ import annotations

from dataclasses import replace

from autoprec.backends import registry
from autoprec.backends.protocol import Task, Tracer
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof


def silent(phase: str, step: int) -> None:
    """Report to nobody."""


def tracer(task: Task, seed: int = 0, *, framework: str = "torch", device: str = "cpu") -> Tracer:
    """The framework's tracer of a task on the device."""
    return registry.load(framework).tracer(task, device=device, seed=seed, report=silent)


def at_tuned_scale(proof: Proof, recipe: Recipe) -> Recipe:
    """The recipe at the scale the proof chooses, where it needs one and runs."""
    if recipe.loss_scale is None:
        return recipe
    try:
        return replace(recipe, loss_scale=proof.tune_loss_scale(recipe)[0])
    except RuntimeError:
        return recipe
