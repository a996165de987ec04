"""Instance attributes put over the methods of layers, models and optimizers, and taken off again.

Hooks are callable objects rather than closures, so that copying a layer copies them with it, and
look like the method they stand for: Keras asks methods for their signature and marks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Hook:
    """Stands for a method; subclasses say what is done around `original`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.original(*args, **kwargs)


@dataclass
class Wraps:
    """Instance attributes put on objects, to be taken off again."""

    _installed: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def install(self, layer: Any, name: str, value: Any) -> None:
        """Put `value` over the method `name` of this one object."""
        self._installed.append((layer, name, vars(layer).get(name), value))
        object.__setattr__(layer, name, value)

    def restore(self) -> None:
        """Take everything off, last first, but for what someone else has put there since."""
        while self._installed:
            layer, name, before, ours = self._installed.pop()
            if vars(layer).get(name) is not ours:
                continue
            if before is None:
                vars(layer).pop(name, None)
            else:
                object.__setattr__(layer, name, before)
