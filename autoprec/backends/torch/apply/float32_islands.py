"""Float32 in a mixed policy: islands, modules whose own code runs in it, and the outputs.

The unit is a module's *own* code, not its subtree: in an island autocast is off and 16-bit inputs
are cast up, while children that are not islands go back to autocast and hand their results to the
island in float32. So a container's functional code can be exact while its matrix products stay
fast.

How a child knows that it is called from an island, and not from an evaluation without autocast or
under a user's own `autocast(enabled=False)`: an island turns autocast off *and names float64 as its
dtype*, which no autocast computes in. Keeping the marker in the autocast state rather than in an
attribute makes it right in every thread, under exceptions, under activation checkpointing (which
restores enabled, dtype and cache flag before it recomputes) and under torch.compile (which guards
on them). The weight cache is left as the surrounding code has it.

Islands cannot help code that casts by hand or never calls a module's forward.

A mixed policy ends where the model does: its outputs are cast up, so that a loss computed from them
is float32 under autocast, too (the CPU's autocast, unlike CUDA's, keeps several losses in the
compute dtype). The modules that compute the last activation themselves, which become islands, are
found in `output_layers`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.float32_results import results_to_float32
from autoprec.backends.torch.apply.forward_wrappers import (
    ForwardWrapper,
    class_forward,
    install_wrapper,
    wrappers_on,
)
from autoprec.backends.torch.apply.kept_buffers import KeptBuffers
from autoprec.backends.torch.apply.nested_tensors import in_full_precision, to_float32
from autoprec.errors import UsageError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_AFTER_HOOKS = "autoprec-after-hooks"  # a name that no hook of torch's has

ENTERED: list[Any] = []
"""What looks at the models that are called inside `precision.autocast()` (`SecondModels`)."""


def has_own_code(module: nn.Module) -> bool:
    """Return whether a module computes anything itself instead of only holding others."""
    if isinstance(module, _CONTAINERS):
        return type(module).forward is not nn.Sequential.forward and "forward" in vars(type(module))
    return class_forward(module) is not nn.Module.forward


MARKER = torch.float64
"""The dtype of autocast that is off in an island's own code."""


def in_island(device_type: str) -> bool:
    """Return whether the code running now is an island's own."""
    off = not torch.is_autocast_enabled(device_type)
    return off and torch.get_autocast_dtype(device_type) is MARKER


def island_state(device_type: str) -> torch.autocast:
    """Return the context that an island's own code runs in."""
    return torch.autocast(device_type, MARKER, enabled=False)


def call_under(
    state: tuple[str, torch.dtype, bool],
    called: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call under a state of autocast: a kind of device, a dtype, on or off.

    As in `torch.autocast`, which finds out in every call what the device can do: that takes longer
    than many a layer. What torch.compile or torch.export takes down has to be torch's own.
    """
    kind, dtype, is_on = state
    if torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled():
        with torch.autocast(kind, dtype, enabled=is_on):
            return called(*args, **kwargs)
    was_on, before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, is_on)
    torch.set_autocast_dtype(kind, dtype)
    torch.autocast_increment_nesting()
    try:
        return called(*args, **kwargs)
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, was_on)
        torch.set_autocast_dtype(kind, before)


class CachedCasts:
    """Keeps what autocast cached without gradients from a call that needs them.

    In torch before its pull request 165068 (2.13 has it) a weight that is first cast in a call
    without gradients is cached without a history: a later call in the same context would take it
    from the cache, and its backward pass would give the weight no gradient, without a word. Calls
    without gradients go on sharing their casts.
    """

    def __init__(self) -> None:
        self._without_history = False

    def before_call(self) -> None:
        """Drop the cached weights where a call without gradients came before."""
        if self._without_history and torch.is_grad_enabled():
            torch.clear_autocast_cache()
            self._without_history = False

    def after_call(self) -> None:
        """Remember a call without gradients."""
        if not torch.is_grad_enabled():
            self._without_history = True


CACHED_CASTS = CachedCasts()


class Float32Island(ForwardWrapper):
    """Runs a module's own code in float32 wherever autocast is on."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.device_type = device_type
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the own code in float32, if autocast is on."""
        if torch.is_autocast_enabled(self.device_type):
            state = self.device_type, MARKER, False
            return call_under(state, self.call, to_float32(args), to_float32(kwargs))
        if in_island(self.device_type):
            return self.call(*to_float32(args), **to_float32(kwargs))
        return self.call(*args, **kwargs)


class BackToAutocast(ForwardWrapper):
    """Runs a module below an island under autocast again, and returns float32 to the island."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.device_type = device_type
        self.dtype = dtype
        self.named: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run under autocast again, if an island is calling."""
        kind = self.device_type
        if torch.is_autocast_enabled(kind) or not in_island(kind):
            if self.inner is None:  # as `call` does: most modules of a model come by here
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.inner(*args, **kwargs)
        result = call_under((kind, self.dtype, True), self.call, args, kwargs)
        return results_to_float32(result, self.named, given=(args, kwargs))


class Float32Outputs(ForwardWrapper):
    """Casts what a model returns up to float32; `named` is what a warning said it cannot cast.

    `kept_buffers` and the `loop_check`, if there are any, are told of the call first. From
    `copies`, if there are any, a copy of the model gets a loop check of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.kept_buffers: KeptBuffers | None = None
        self.loop_check: Any = None
        self.copies: Any = None
        self.named: set[str] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin as a copy, made by deepcopy, by pickle or for a copied model."""
        vars(self).update(state)
        self.loop_check = None if self.copies is None else self.copies.of_copy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; cast its outputs."""
        is_compiling = torch.compiler.is_compiling()
        kept = self.kept_buffers
        if not is_compiling:
            CACHED_CASTS.before_call()
            if kept is not None and not kept.in_step:
                kept.before_called(self.module)
            if self.loop_check is not None:
                self.loop_check.note_call(self.module)
        result = self.call(*args, **kwargs)
        if type(result) is torch.Tensor:
            result = in_full_precision(result)
        else:
            result = results_to_float32(result, self.named)
        if not is_compiling:
            CACHED_CASTS.after_call()
            if self.module._forward_hooks:
                self._cast_after_hooks()
            if ENTERED:
                ENTERED[-1].note_return()
        return result

    def _cast_after_hooks(self) -> None:
        """Cast what hooks of the user's own make of the outputs, by a hook after all of them.

        torch lists a module's hooks when its forward has returned.
        """
        hooks: dict[Any, Any] = self.module._forward_hooks
        hooks.pop(_AFTER_HOOKS, None)
        if hooks:
            hooks[_AFTER_HOOKS] = self._after_hooks

    def _after_hooks(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Cast up, and go."""
        hooks: dict[Any, Any] = module._forward_hooks
        hooks.pop(_AFTER_HOOKS, None)
        return results_to_float32(result, self.named)


class AutocastCalls(ForwardWrapper):
    """Runs a model under autocast wherever it is called, for a loop that opens none itself."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.device_type = device_type
        self.dtype = dtype
        self.is_on = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under autocast."""
        state = self.device_type, self.dtype, self.is_on
        return call_under(state, self.call, args, kwargs)


def own_autocast(model: nn.Module) -> AutocastCalls | None:
    """Return what runs a model under autocast wherever it is called; None where its loop does."""
    return next((each for each in wrappers_on(model) if isinstance(each, AutocastCalls)), None)


@contextlib.contextmanager
def own_autocast_is(model: nn.Module, is_on: bool) -> Iterator[None]:
    """Let a model that runs under autocast by itself do so inside, or not."""
    own = own_autocast(model)
    if own is None:
        yield
        return
    own.is_on = is_on
    try:
        yield
    finally:
        own.is_on = True


class NotedCall:
    """Calls what torch.compile made of a model, and notes its return as `Float32Outputs` does.

    Hooks of the user's own are in what is compiled, and their results are cast up here.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.named: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model."""
        if torch.compiler.is_compiling():
            return self.compiled(*args, **kwargs)
        CACHED_CASTS.before_call()
        result = self.compiled(*args, **kwargs)
        CACHED_CASTS.after_call()
        if ENTERED:
            ENTERED[-1].note_return()
        return results_to_float32(result, self.named)


def make_islands(
    model: nn.Module, paths: Collection[str], *, device_type: str, dtype: torch.dtype
) -> None:
    """Wrap the modules at `paths` as islands, and everything below them that is not one.

    A module that is called under several names is an island under all of them.
    """
    islands = [module_at(model, path) for path in paths]
    chosen = {id(module) for module in islands}
    wrapped: set[int] = set()
    for island in islands:
        for module in island.modules():
            if id(module) in wrapped or isinstance(module, NEVER_CALLED):
                continue
            wrapped.add(id(module))
            kind = Float32Island if id(module) in chosen else BackToAutocast
            install_wrapper(kind(module, device_type, dtype))


def module_at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at `path` ("" is the model itself); `UsageError` if there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(
            f"float32_modules names {path!r}, and this model has no such module"
            f"{_nearest(path, (name for name, _ in model.named_modules()))}. Was the profile made "
            "for another model? Tune again, or correct the path."
        ) from None


def _nearest(path: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(path, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
