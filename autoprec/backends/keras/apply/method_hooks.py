"""Instance attributes that replace the methods of layers, models and optimizers for a while.

Hooks are callable objects rather than closures, so that copying a layer copies them with it, and
look like the method they stand for: Keras asks methods for their signature and marks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Hook:
    """Stands for a method; subclasses say what is done around `original`."""

    original: Callable[..., Any]

    def __init__(self, original: Callable[..., Any]) -> None:
        self.hook_method(original)

    def hook_method(self, original: Callable[..., Any]) -> None:
        """Take another method to be the one that is hooked."""
        functools.update_wrapper(self, original, updated=())
        for name, mark in getattr(original, "__dict__", {}).items():
            vars(self).setdefault(name, mark)  # another hook's own values are not marks
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.original(*args, **kwargs)


@dataclass
class InstalledHooks:
    """Hooks put on objects, to be taken off again."""

    _installed: list[tuple[Any, str, Hook]] = field(default_factory=list)

    def install(self, owner: Any, name: str, hook: Hook) -> None:
        """Put `hook` over the method `name` of this one object."""
        self._installed.append((owner, name, hook))
        object.__setattr__(owner, name, hook)

    def restore(self) -> None:
        """Remove all hooks, last first, except where other code has replaced one."""
        while self._installed:
            remove_hook(*self._installed.pop())


def remove_hook(owner: Any, name: str, hook: Hook) -> None:
    """Remove a hook, even from below others: recipes on shared layers end in any order."""
    above, found, method = None, vars(owner).get(name), getattr(type(owner), name, None)
    while found is not hook and isinstance(found, Hook):
        above, found = found, found.original
    if found is not hook:
        return
    if above is not None:
        above.hook_method(hook.original)
    elif method is not None and getattr(hook.original, "__func__", None) is method:
        vars(owner).pop(name)
    else:
        object.__setattr__(owner, name, hook.original)


class NewObjects:
    """Notices objects of a class, and of those below it, being made; `made` is told of each."""

    def __init__(self, kind: type, made: Callable[[Any], None]) -> None:
        original = kind.__init__  # type: ignore[misc]
        self.active = True
        self._kind, self._original = kind, original

        @functools.wraps(original)
        def initialise(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            if self.active:
                made(this)

        # Keras reads it to tell a layer's configuration, and not through wrappers.
        initialise.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        self._ours = kind.__init__ = initialise  # type: ignore[misc]

    def stop(self) -> None:
        """Leave new objects alone from now on."""
        self.active = False
        if self._kind.__init__ is self._ours:  # type: ignore[misc]
            self._kind.__init__ = self._original  # type: ignore[misc]
