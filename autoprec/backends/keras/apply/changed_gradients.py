"""Notices gradients that a script changes while they are multiplied by a loss scale.

What a loop clips or adds between `tape.gradient` and the update meets numbers as many times larger
as the scale, and trains on without a word. From a scaled loss to its update TensorFlow's tapes are
watched, from Python: an update of other gradients than theirs is one of changed gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras


class NotedTapes:
    """What `GradientTape.gradient` returned since an optimizer's loss was scaled."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._found: list[tuple[Any, Any]] = []  # a source, its gradient
        self._original: Any = None

    def note_for(self, optimizer: Any) -> None:
        """Note what tapes return until this optimizer's update."""
        if keras.config.backend() != "tensorflow":
            return
        if not self._waiting:
            self._found.clear()  # of a step that ended in an exception
        self._waiting.add(optimizer)
        if self._original is None:
            self._install()

    def changed(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Say whether this update's gradients are others than the tapes returned; note no more.

        Of gradients that another function returned, or no tape, nothing is known: False.
        """
        given = zip(gradients, variables, strict=False)
        answer = any(self._is_changed(each, variable) for each, variable in given)
        self.stop(optimizer)
        return answer

    def stop(self, optimizer: Any) -> None:
        """Note no more for this optimizer."""
        self._waiting.discard(optimizer)
        if not self._waiting and self._original is not None:
            self._uninstall()

    def _is_changed(self, gradient: Any, variable: Any) -> bool:
        if gradient is None:
            return False
        known = [found for source, found in self._found if source is variable]
        here = [found for found in known if _graph_of(found) is _graph_of(gradient)]
        return bool(here) and not any(found is gradient for found in here)

    def _install(self) -> None:
        import tensorflow as tf

        self._original = original = tf.GradientTape.gradient

        @functools.wraps(original)
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(tape, target, sources, *args, **kwargs)
            flat = (tf.nest.flatten(each) for each in (sources, found))
            self._found += [pair for pair in zip(*flat, strict=False) if pair[1] is not None]
            return found

        tf.GradientTape.gradient = gradient

    def _uninstall(self) -> None:
        import tensorflow as tf

        tf.GradientTape.gradient = self._original
        self._original = None
        self._found.clear()


#: The one of this process: a tape does not know whose update its gradients are for.
TAPES = NotedTapes()


def _graph_of(gradient: Any) -> Any:
    """Return the function in which a gradient is traced; None where it has a value."""
    return getattr(getattr(gradient, "values", gradient), "graph", None)
