"""Other models inside `precision.autocast()`: weight averages, teachers, discriminators.

A deep copy of a model that a profile was applied to carries its wrappers along; one that was made
before has none, nor has a model of its own. All of them leave `precision.autocast()` in float32:
the first module that is called inside, and the next one after it has returned, is looked at. A part
of the profile's own model is left as it is; the outputs of any other are cast up. A copy of the
model, known by its structure, is given the model's wrappers first, so that islands hold in it, too.

Which module is called first is seen by a hook for all modules, which takes itself away when it is
called and is set again afterwards: modules inside another one do not run through it. In a training
step of a compiled model it is set after that one's call, so that what is called before is not seen.

A hook takes the model's call off torch's fast path, which costs some ten microseconds. So where the
first `ALWAYS` training contexts saw the model and its copies alone, one in `EVERY` is looked into
from then on. What is evaluated is always looked at, and so is everything once another model is
known.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from autoprec.backends.torch.apply.float32_islands import (
    CACHED_CASTS,
    ENTERED,
    Float32Island,
    Float32Outputs,
    island_state,
)
from autoprec.backends.torch.apply.float32_results import results_to_float32
from autoprec.backends.torch.apply.forward_wrappers import is_compiled, wrappers_on
from autoprec.backends.torch.apply.inference_fast_path import without_fast_path
from autoprec.backends.torch.apply.model_changes import give_wrappers, unwrap
from autoprec.backends.torch.apply.nested_tensors import to_float32

ALWAYS, EVERY = 32, 13
"""Training contexts: the first ones, all looked into, and one in how many afterwards.

A prime: loops do things in every 8th or 16th step.
"""

_HOOKS: dict[Any, Any] = nn_module._global_forward_pre_hooks
_HOOKS_AND_COMPILE = r"Using `torch.compile\(module\)` when there are global hooks"


class SecondModels:
    """Sees which models are called inside an autocast, and casts up what others return."""

    def __init__(self, model: nn.Module) -> None:
        root = unwrap(model)
        self._root = root
        self._own = {id(each): weakref.ref(each) for each in (model, *model.modules())}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._copies: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._named: set[str] = set()
        self._depth = self._thread = self._contexts = 0
        self._trains = self._others = False  # others: in training contexts, no copies of the model
        self._inside: nn.Module | None = None
        self._during_call = contextlib.ExitStack()
        self._key = f"autoprec-{id(self)}"  # a name that no hook of torch's has
        # torch.compile's wrapper, made now or later, warns that hooks run once more for itself.
        # Ours may.
        warnings.filterwarnings("ignore", message=_HOOKS_AND_COMPILE, category=UserWarning)

    def __deepcopy__(self, memo: dict[int, Any]) -> SecondModels:
        """Return this one, which a model holds while it runs: there is one for each profile."""
        return self

    def is_due(self) -> bool:
        """Return whether to look at what is called in the context about to be entered."""
        self._trains = torch.is_grad_enabled()
        if self._others or not self._trains:
            return True
        self._contexts += 1
        return self._contexts <= ALWAYS or self._contexts % EVERY == 0

    def enter(self) -> None:
        """Look at the next module that is called; where gradients flow, after a compiled model.

        A hook that is there when torch.compile traces a model changes what it compiles.
        """
        self._depth += 1
        ENTERED.append(self)
        if not (is_compiled(self._root) and torch.is_grad_enabled()):
            self._look()

    def leave(self) -> None:
        """Look no longer; what a call that raised left behind goes, too."""
        self._depth -= 1
        ENTERED.remove(self)
        if self._depth == 0:
            _HOOKS.pop(self._key, None)
        if self._inside is not None:
            self._inside._forward_hooks.pop(self._key, None)  # type: ignore[call-overload]
            self._inside = None
            self._during_call.close()

    def note_return(self) -> None:
        """Look at the next module: the model, which is called without a hook, has returned."""
        if self._inside is None:
            self._look()

    def _look(self) -> None:
        self._thread = threading.get_ident()
        _HOOKS[self._key] = self._before_call

    def _before_call(self, module: nn.Module, args: Any) -> Any:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return None
        if module is self._root:
            del _HOOKS[self._key]
            return None  # its own wrapper notes its return
        del _HOOKS[self._key]
        CACHED_CASTS.before_call()
        self._inside = module
        module._forward_hooks[self._key] = self._after_call  # type: ignore[index]
        if self._is_own(module):
            return None
        self._during_call.enter_context(without_fast_path())
        if module not in self._known:
            self._known.add(module)
            return self._adopt(module, args)
        return None

    def _after_call(self, module: nn.Module, args: Any, result: Any) -> Any:
        self._inside = None
        module._forward_hooks.pop(self._key, None)  # type: ignore[call-overload]
        if self._depth:
            _HOOKS[self._key] = self._before_call
        CACHED_CASTS.after_call()
        if self._trains and not torch.is_grad_enabled():
            self._others = True  # a call without gradients beside one that needs them
        if self._is_own(module):
            return None
        self._during_call.close()
        return results_to_float32(result, self._named)

    def _is_own(self, module: nn.Module) -> bool:
        found = self._own.get(id(module))
        return found is not None and found() is module

    def _adopt(self, module: nn.Module, args: Any) -> Any:
        """Give the copies of the model in `module` its wrappers, and return the arguments.

        The forward that is about to run was looked up already: where it should be an island's, the
        island is made around it, once.
        """
        for each in module.modules():
            if each is self._root or not is_plain_copy(each, self._root):
                continue
            if give_wrappers(self._root, each):
                self._copies.add(each)
        if self._trains and not any(isinstance(w, Float32Outputs) for w in wrappers_on(module)):
            self._others = True
        for wrapper in wrappers_on(module):
            if module in self._copies and isinstance(wrapper, Float32Island):
                self._during_call.enter_context(island_state(wrapper.device_type))
                return to_float32(args)
        return None


def is_plain_copy(module: nn.Module, root: nn.Module) -> bool:
    """Return whether `module` is built as `root` is, and has none of its wrappers."""
    if type(module) is not type(root) or any(wrappers_on(module)):
        return False
    return _structure(module) == _structure(root)


def _structure(module: nn.Module) -> list[Any]:
    modules = [(name, type(each)) for name, each in module.named_modules()]
    shapes = [(n, None if is_lazy(p) else p.shape) for n, p in module.named_parameters()]
    return [*modules, *shapes]
