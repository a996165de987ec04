"""Standing in for a module's `forward`, so that it can be undone, copied and saved.

A wrapper is a callable object put into the module's own `__dict__` as `forward`; hooks, parameters,
names and `state_dict` stay as they are. It is an object of a module-level class rather than a
closure because deepcopy and pickle then carry it along with the module it belongs to; a closure
would go on calling the old module's weights.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn


def class_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward of a module's class; None of a scripted module, whose class has none."""
    return None if isinstance(module, torch.jit.ScriptModule) else type(module).forward


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has made a call of its own for a module."""
    call = getattr(module, "_compiled_call_impl", None)
    return call is not None and not getattr(call, "calls_eagerly", False)


class ScriptedForward:
    """Calls what TorchScript compiled of a module, which only the module's instance has."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.module._c._get_method("forward")(*args, **kwargs)


class ForwardWrapper:
    """Calls what was the module's `forward` before; subclasses do something around it.

    `inner` is that earlier forward: another wrapper, a callable that other code put there, or None
    for the forward of the module's class. `owner` names the operation it belongs to: models may
    share modules.
    """

    owner = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        if self.inner is None and isinstance(module, torch.jit.ScriptModule):
            self.inner = ScriptedForward(module)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the earlier forward."""
        if self.inner is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `forward`."""
        return self.call(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return what `inspect.signature` should look at."""
        return self.inner or types.MethodType(type(self.module).forward, self.module)


def install_wrapper(wrapper: ForwardWrapper) -> None:
    """Make `wrapper` its module's forward."""
    wrapper.module.__dict__["forward"] = wrapper


def wrappers_on(module: nn.Module) -> Iterator[ForwardWrapper]:
    """Yield the wrappers on `module`, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ForwardWrapper):
        yield forward
        forward = forward.inner


def uninstall_wrappers(module: nn.Module, owners: Container[str]) -> None:
    """Remove the wrappers of these owners from `module`; others, and an earlier forward, stay."""
    remove_wrappers(module, lambda wrapper: wrapper.owner in owners)


def remove_wrappers(module: nn.Module, unwanted: Callable[[ForwardWrapper], bool]) -> None:
    """Remove some of the wrappers from `module`; others, and an earlier forward, stay."""
    wrappers = list(wrappers_on(module))
    kept = [wrapper for wrapper in wrappers if not unwanted(wrapper)]
    if len(kept) == len(wrappers):
        return
    inner = wrappers[-1].inner
    for wrapper in reversed(kept):
        wrapper.inner = inner
        inner = wrapper
    if inner is None or isinstance(inner, ScriptedForward):
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = inner
