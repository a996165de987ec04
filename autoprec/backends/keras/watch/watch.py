"""Watches a Keras training: which batches are checked, and what follows from what is found.

In `fit` the train function shows its data before it runs; a batch that is checked is then trained
on as any other. A loop of the script's own shows each batch to `precision.watch`.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping
from typing import Any

import keras

from autoprec.backends.keras.apply.applied_recipe import RECIPE_ATTRIBUTE
from autoprec.backends.keras.apply.replicas import replica_count
from autoprec.backends.keras.train.data import shape_of
from autoprec.backends.keras.watch.check import Check
from autoprec.backends.keras.watch.float32_layers import candidates
from autoprec.backends.shared.watching import CheckLog
from autoprec.core.numerics.watching import WAITED_FOR, WatchedStep
from autoprec.core.watch_settings import Action

_LOOKS = 2
"""So many looks at the skipped updates, one after the other, that found new ones."""


class Watch:
    """Checks the trainings that a `Precision` serves.

    What skips updates again and again may be a kind of batch that no check has met: then one that
    is larger than those that were checked is looked for.
    """

    def __init__(self, precision: Any, *, action: Action, every: int) -> None:
        self._precision = weakref.ref(precision)
        self._log = CheckLog(precision.policy, action, every, before_steps=True)
        self._batches = self._first = 0
        self._skipped = self._looked_at = self._looks = self._largest = 0
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: tuple[str, ...] = ()

    def before_execution(self, model: Any, iterator: Any) -> Any:
        """Check the next batch of `fit` if it is due; return what the train function is given."""
        execution = model.steps_per_execution
        if self._begins_update(execution) and self._is_watchable(model):
            batch, iterator = _shown(iterator, execution)
            if batch is not None:
                self._check(model, batch)
        self._trained.add(model)
        return iterator

    def before_step(self, model: Any, batch: Any) -> None:
        """Check a batch of a loop of the script's own if it is due."""
        if self._begins_update(1) and self._is_watchable(model):
            self._check(model, batch)
        self._trained.add(model)

    def _begins_update(self, batches: int) -> bool:
        """Count batches; say whether the first of them begins an update that is due."""
        self._log.tell_unchecked()
        precision = self._precision()
        if precision is None:
            return False
        self._first = self._batches + 1
        self._batches += batches
        return self.updates >= self._log.due or self._seeks_larger(precision)

    def _seeks_larger(self, precision: Any) -> bool:
        """Look at the skipped updates now and then; say whether they go on."""
        if self.updates >= self._looked_at + WAITED_FOR:
            skipped = precision.skipped if precision.policy.needs_loss_scale else 0
            self._looks = self._looks + 1 if skipped > self._skipped else 0
            self._skipped, self._looked_at = skipped, self.updates
        return self._looks >= _LOOKS

    @property
    def steps(self) -> list[WatchedStep]:
        """Return the checks so far."""
        return self._log.steps

    @property
    def updates(self) -> int:
        """Return the number of the update that the first of the last batches belongs to."""
        precision = self._precision()
        steps = 1 if precision is None else precision.recipe.accumulation_steps
        return -(-self._first // steps)

    def _is_watchable(self, model: Any) -> bool:
        """Return whether a model is built, by its first step at the latest, and has one replica."""
        if replica_count(model) > 1:
            self._log.leave_out(self.updates, "several replicas train the model")
            return False
        layers = (model, *model._flatten_layers(include_self=False))
        return model in self._trained or all(layer.built for layer in layers)

    def _check(self, model: Any, batch: Any) -> None:
        precision, size = self._precision(), _size(batch)
        least = self._log.least_size(self.updates)
        if self.updates < self._log.due:
            least = self._largest + 1
        if precision is None or size < least:
            return
        self._largest = max(self._largest, size)
        check = Check(
            model,
            batch,
            policy=precision.policy,
            scale=precision.scale / precision.recipe.accumulation_steps,
            floor=self._log.floor,
        )
        step = check.made(WatchedStep(self.updates))
        self._log.note_loss(check.loss)
        if self._log.is_acted_on(
            step,
            size,
            failed=bool(step.problem),
            repeats=self._log.repeats(step),
            undecided=check.undecided,
            certain=step.is_certain,
            expected=self._log.fault_expected(step),
        ):
            applied = vars(model)[RECIPE_ATTRIBUTE]

            def keep(paths: tuple[str, ...]) -> None:
                every = tuple(unit.path for unit in candidates(applied.units))
                self._kept = (*self._kept, *(paths or every))
                applied.keep_in_float32(self._kept)

            modules = () if step.is_lost else check.mending()
            self._log.act(step, modules, keep, lost=step.is_lost)

    def state_dict(self) -> dict[str, Any]:
        """Return the checks, and what is kept in float32 because of them, as plain values."""
        mine = {"batches": self._batches, "float32_modules": list(self._kept)}
        return mine | self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Go on where a training was saved; without a model yet, what was kept is not."""
        self._batches = self._first = int(state["batches"])
        self._log.load_state_dict(state, self.updates)
        self._kept = tuple(state["float32_modules"])
        self._log.mended = bool(self._kept)
        if self._kept and model is not None:
            vars(model)[RECIPE_ATTRIBUTE].keep_in_float32(self._kept)


def _size(batch: Any) -> int:
    """Return the number of elements in a batch."""
    return sum(math.prod(shape_of(each) or (0,)) for each in keras.tree.flatten(batch))


def _shown(iterator: Any, count: int) -> tuple[Any, Any]:
    """Return the first of `count` batches, and an iterator that gives all of them again."""
    if isinstance(iterator, list | tuple):
        return (iterator[0] if iterator else None), iterator
    if keras.config.backend() != "tensorflow":
        return None, iterator
    import tensorflow as tf

    if not isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
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
