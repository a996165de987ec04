"""Watches a Keras training: which batches are checked, and what follows from what is found.

In `fit` the train function shows its data before it runs; a batch that is checked is then trained
on as any other. A loop of the script's own shows each batch to `precision.watch`.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import keras

from autoprec.backends.keras.apply.applied_recipe import RECIPE_ATTRIBUTE
from autoprec.backends.keras.apply.replicas import replica_count
from autoprec.backends.keras.watch.check import Check
from autoprec.backends.keras.watch.float32_layers import candidates
from autoprec.backends.shared.watching import told_what_is_mended, told_what_mends
from autoprec.core.numerics.tolerance import SMALLEST_LOSS_SHARE
from autoprec.core.numerics.watching import (
    CONFIRM_AFTER,
    FAILED_IN_A_ROW,
    WatchedStep,
    named,
    next_check,
)
from autoprec.core.watch_settings import Action


class Watch:
    """Checks the trainings that a `Precision` serves; `steps` are the checks so far."""

    def __init__(self, precision: Any, *, action: Action, every: int) -> None:
        self._precision = weakref.ref(precision)
        self._action, self._every = action, every
        self.steps: list[WatchedStep] = []
        self._batches = self._failed = 0
        self._due = 1
        self._first_loss = 0.0
        self._told: set[tuple[str, ...]] = set()
        self._kept: tuple[str, ...] = ()

    def before_execution(self, model: Any, iterator: Any) -> Any:
        """Check the next batch of `fit` if it is due; return what the train function is given."""
        execution = model.steps_per_execution
        first = self._begins_update(execution)
        if not first or not self._is_watchable(model):
            return iterator
        batch, iterator = _shown(iterator, execution)
        if batch is not None:
            self._check(model, batch)
        return iterator

    def before_step(self, model: Any, batch: Any) -> None:
        """Check a batch of a loop of the script's own if it is due."""
        if self._begins_update(1) and self._is_watchable(model):
            self._check(model, batch)

    def _begins_update(self, batches: int) -> bool:
        """Count batches; say whether the first of them begins an update that is due."""
        precision = self._precision()
        if precision is None:
            return False
        self._batches += batches
        return self.updates >= self._due

    @property
    def updates(self) -> int:
        """Return the number of the update that the last batch counted belongs to."""
        precision = self._precision()
        steps = 1 if precision is None else precision.recipe.accumulation_steps
        return -(-self._batches // steps)

    def _is_watchable(self, model: Any) -> bool:
        """Return whether a model is built and is one process's."""
        built = all(layer.built for layer in (model, *model._flatten_layers(include_self=False)))
        return built and replica_count(model) == 1

    def _check(self, model: Any, batch: Any) -> None:
        precision = self._precision()
        assert precision is not None
        check = Check(
            model,
            batch,
            policy=precision.policy,
            scale=precision.scale / precision.recipe.accumulation_steps,
            floor=SMALLEST_LOSS_SHARE * self._first_loss,
        )
        step = check.made(WatchedStep(self.updates))
        if not self._first_loss and math.isfinite(check.loss):
            self._first_loss = abs(check.loss)
        self._failed = self._failed + 1 if step.problem else 0
        soon = bool(step.problem) or check.overflowed
        after = min(CONFIRM_AFTER, self._every)
        self._due = self.updates + after if soon else next_check(self.updates, self._every)
        if self._failed < FAILED_IN_A_ROW:
            self.steps.append(step)
            return
        self._failed = 0
        self._act(precision, model, step, check.mending())

    def _act(self, precision: Any, model: Any, step: WatchedStep, modules: tuple[str, ...]) -> None:
        """Mend, warn or raise."""
        if self._action != "float32":
            self.steps.append(replace(step, modules=modules, action=self._action))
            if modules not in self._told:
                self._told.add(modules)
                told_what_mends(step, precision.policy, modules, self._action)
            return
        applied = vars(model)[RECIPE_ATTRIBUTE]
        whole = bool(self._kept) or not modules
        every = tuple(unit.path for unit in candidates(applied.units))
        done = "the whole model" if whole else named(modules)
        self._kept = (*self._kept, *(every if whole else modules))
        applied.keep_in_float32(self._kept)
        self.steps.append(replace(step, modules=modules, action=f"{done} in float32"))
        told_what_is_mended(step, precision.policy, done)

    def state_dict(self) -> dict[str, Any]:
        """Return the checks, and what is kept in float32 because of them, as plain values."""
        return {
            "batches": self._batches,
            "first_loss": self._first_loss,
            "float32_modules": list(self._kept),
            "steps": [asdict(each) for each in self.steps],
        }

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Go on where a training was saved; without a model yet, what was kept is not."""
        known = {field.name for field in fields(WatchedStep)}
        saved: list[dict[str, Any]] = [each for each in state["steps"] if set(each) <= known]
        self.steps = [WatchedStep(**each | {"modules": tuple(each["modules"])}) for each in saved]
        self._batches, self._first_loss = int(state["batches"]), float(state["first_loss"])
        self._failed, self._due = 0, next_check(self.updates, self._every)
        self._kept = tuple(state["float32_modules"])
        if self._kept and model is not None:
            vars(model)[RECIPE_ATTRIBUTE].keep_in_float32(self._kept)


def _shown(iterator: Any, count: int) -> tuple[Any, Any]:
    """Return the first of `count` batches, and an iterator that gives all of them again."""
    if isinstance(iterator, list | tuple):
        return (iterator[0] if iterator else None), iterator
    if keras.config.backend() != "tensorflow":
        return None, iterator
    import tensorflow as tf

    if isinstance(iterator, tf.distribute.DistributedIterator):
        return None, iterator
    if not isinstance(iterator, tf.data.Iterator):
        first = next(iterator, None)
        return first, iterator if first is None else itertools.chain([first], iterator)
    batches = []
    for _ in range(count):
        following = iterator.get_next_as_optional()
        if not bool(following.has_value()):
            break
        batches.append(following.get_value())
    again = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=iterator.element_spec
    )
    return (batches[0] if batches else None), iter(again)
