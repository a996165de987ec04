"""Applying a recipe to a model in place, and undoing it.

What changes: the `forward` of some modules (islands, padding, float8, outputs; see
`forward_wrappers`), the strides of 4-d parameters, the compiled call, `fused` in the optimizers'
groups. What never changes: the Parameter objects, their names, shapes and values, `state_dict`, and
the optimizers' state. So a checkpoint from before loads after, and the other way round.

Undoing needs no record of the wrappers, which are found on the modules; compilation and the
optimizers' settings are kept in a weak mapping by model, and are lost in a copy of it as torch's
own compiled call is.
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from autoprec.backends.torch.apply.attention_kernels import prefer_attention
from autoprec.backends.torch.apply.change_report import ChangeReport, Skipped
from autoprec.backends.torch.apply.equal_blocks import equal_blocks
from autoprec.backends.torch.apply.float8_linear import use_float8
from autoprec.backends.torch.apply.float32_distributions import (
    build_in_float32,
    release_constructors,
)
from autoprec.backends.torch.apply.float32_islands import (
    AutocastCalls,
    Float32Outputs,
    NotedCall,
    make_islands,
)
from autoprec.backends.torch.apply.forward_wrappers import (
    ForwardWrapper,
    install_wrapper,
    uninstall_wrappers,
    wrappers_on,
)
from autoprec.backends.torch.apply.fused_optimizer import FusedOptimizers
from autoprec.backends.torch.apply.inference_fast_path import leave_fast_path
from autoprec.backends.torch.apply.memory_format import ChannelsLast, ChannelsLastInputs
from autoprec.backends.torch.apply.output_layers import find_output_layers
from autoprec.backends.torch.apply.padding import pad_modules
from autoprec.backends.torch.distributed.sharding import sharded_modules
from autoprec.backends.torch.dtypes import EXACT_DTYPES, LOW_DTYPES, autocast_dtype
from autoprec.core.recipe import ATTENTION, BLOCKS, COMPILE_MODE, COMPILE_SCOPE, Recipe
from autoprec.errors import UsageError

#: Copies of a model that were restored by themselves: they are not given its wrappers again.
_RESTORED_COPIES: weakref.WeakSet[nn.Module] = weakref.WeakSet()

COMPILED_CALL = "_compiled_call_impl"  # where nn.Module.compile keeps the compiled call


class Operation(Protocol):
    """One surgery on a model; `owner` is that of its wrappers."""

    owner: str


@dataclass
class _Undo:
    """What cannot be found on the modules themselves."""

    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    compiled: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any] | None] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    layout: ChannelsLast = field(default_factory=ChannelsLast)
    fused: FusedOptimizers = field(default_factory=FusedOptimizers)
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)


_UNDO: weakref.WeakKeyDictionary[nn.Module, _Undo] = weakref.WeakKeyDictionary()


def operate(
    recipe: Recipe,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    device: str,
    *,
    compile_backend: str | Callable[..., Any] = "inductor",
    casts_itself: bool = False,
) -> ChangeReport:
    """Apply `recipe` to `model` and `optimizers` in place; undo what an earlier call did first.

    A model that `casts_itself` runs under the policy's autocast wherever it is called.
    """
    root = unwrap(model)
    restore(root)
    _RESTORED_COPIES.discard(root)
    undo = _UNDO.setdefault(root, _Undo())
    device_type = torch.device(device).type
    dtype = autocast_dtype(recipe.policy)
    _check_shared(root, dtype)
    padded, skipped = pad_modules(root, recipe.alignment)
    ends = find_output_layers(root) if dtype is not None else ()
    islands = tuple(dict.fromkeys(recipe.float32_modules))
    float8: tuple[str, ...] = ()
    if recipe.uses_float8:
        float8, narrow = use_float8(root, (*islands, *ends), torch.device(device))
        skipped += narrow
    if dtype is not None:
        leave_fast_path(root, device_type)
        make_islands(root, (*islands, *ends), device_type=device_type, dtype=dtype)
        install_wrapper(Float32Outputs(root))
        build_in_float32(root)
    if recipe.memory_format == "channels_last":
        skipped += _lay_out(root, optimizers, undo)
    if recipe.knobs.get("fused_optimizer"):
        skipped += undo.fused.apply(optimizers)
    skipped += _compile_and_attend(root, recipe, undo, device_type, compile_backend)
    if dtype is not None and root.__dict__.get(COMPILED_CALL) is not None:
        undo.compiled.setdefault(root, root.__dict__[COMPILED_CALL])  # it may be the user's own
        root.__dict__[COMPILED_CALL] = NotedCall(root.__dict__[COMPILED_CALL])
    if dtype is not None and casts_itself:
        install_wrapper(AutocastCalls(root, device_type, dtype))
    for module in root.modules():
        for wrapper in wrappers_on(module):
            wrapper.owner = wrapper.owner or undo.owner
    return ChangeReport(
        islands=islands if dtype is not None else (),
        outputs=tuple(path for path in ends if path not in islands),
        padded=padded,
        float8=float8,
        skipped=skipped,
        warnings=_warnings(root, dtype),
        memory_format=recipe.memory_format,
        compiled=recipe.compile,
    )


def _compile_and_attend(
    root: nn.Module, recipe: Recipe, undo: _Undo, device_type: str, backend: Any
) -> tuple[Skipped, ...]:
    """Compile the model or its blocks, with the kernel that attention prefers in what is compiled.

    Returns what of this was not done, and why.
    """
    skipped: tuple[Skipped, ...] = ()
    compiled = [root] if recipe.compile else []
    if recipe.compile and recipe.knobs.get(COMPILE_SCOPE) == BLOCKS:
        blocks = [root.get_submodule(path) for path in equal_blocks(root)]
        inside = (part for block in blocks for part in block.modules())
        why = "" if blocks else "no equal blocks make up most of this model"
        if any(any(wrappers_on(part)) for part in inside):  # each object is guarded on by itself
            why = "islands, padding or float8 in its blocks would compile every block anew"
        if why:
            skipped += (Skipped("", COMPILE_SCOPE, f"{why}; it is compiled as a whole"),)
        else:
            compiled = blocks
    wanted = str(recipe.knobs.get(ATTENTION, "default"))
    skipped += prefer_attention(dict.fromkeys([root, *compiled]), wanted, device_type)
    mode = str(recipe.knobs.get(COMPILE_MODE, "default"))
    for module in compiled:
        undo.compiled[module] = module.__dict__.get(COMPILED_CALL)
        if not any(wrappers_on(module)):
            # torch.compile leaves frames in torch's own files to Python: without a frame of ours
            # an nn.Sequential would not be compiled as a whole, and nothing would say so.
            install_wrapper(ForwardWrapper(module))
        module.compile(backend=backend, mode=_mode(mode, backend))
    return skipped


def add_optimizers(
    recipe: Recipe, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Skipped, ...]:
    """Do to optimizers that were made after `operate` what it would have done to them."""
    undo = _UNDO[unwrap(model)]
    if recipe.memory_format == "channels_last":
        undo.layout.add(optimizers)
    if recipe.knobs.get("fused_optimizer"):
        return undo.fused.apply(optimizers)
    return ()


def _lay_out(
    root: nn.Module, optimizers: Sequence[torch.optim.Optimizer], undo: _Undo
) -> tuple[Skipped, ...]:
    """Lay weights and inputs out as channels_last; return what was left as it is."""
    install_wrapper(ChannelsLastInputs(root))
    if sharded_modules(root):
        reason = "FSDP2 keeps weights contiguous; inputs are laid out"
        return (Skipped("", "memory_format", reason),)
    undo.layout.apply(root, optimizers)
    return ()


def _mode(mode: str, backend: object) -> str | None:
    """Return the mode for torch.compile: only Inductor has any, and "default" means none."""
    return mode if backend == "inductor" and mode != "default" else None


def give_wrappers(model: nn.Module, other: nn.Module) -> bool:
    """Give `other`, a copy of `model` made before `operate`, what one made after it has.

    `restore` of the model takes them back. False where neither has any to be given.
    """
    root = unwrap(model)
    undo = _UNDO.get(root)
    if undo is None or other in _RESTORED_COPIES:
        return False
    undo.copies.add(other)
    for own, its in zip(root.modules(), other.modules(), strict=True):
        for wrapper in reversed(list(wrappers_on(own))):
            if wrapper.owner == undo.owner:
                made = copy.copy(wrapper)
                made.module, made.inner = its, its.__dict__.get("forward")
                install_wrapper(made)
    return True


def restore(model: nn.Module) -> None:
    """Undo what `operate` did to `model`; a model it never saw stays as it is.

    Of modules that another model shares, what belongs to that one stays.
    """
    root = unwrap(model)
    undo = _UNDO.pop(root, None)
    release_constructors(root)
    for module in root.modules():
        foreign = _others(module)
        own = {wrapper.owner for wrapper in wrappers_on(module)} - foreign
        uninstall_wrappers(module, own)
        if undo is None and own:
            _RESTORED_COPIES.add(root)
    if undo is None:
        return
    for module in (each for other in undo.copies for each in other.modules()):
        uninstall_wrappers(module, {undo.owner})
    for module, before in undo.compiled.items():
        module.__dict__[COMPILED_CALL] = before
    undo.layout.undo()
    undo.fused.undo()


def current_operation(model: nn.Module) -> Operation | None:
    """Return a token of the last surgery on `model`; None where that is undone."""
    return _UNDO.get(unwrap(model))


def _others(module: nn.Module) -> set[str]:
    """Return the owners of wrappers on `module` whose models are alive and really hold it.

    A copy of a model carries the wrappers' names along, but is not held by the model they name.
    """
    named = {wrapper.owner for wrapper in wrappers_on(module)}
    return {
        undo.owner
        for root, undo in _UNDO.items()
        if undo.owner in named and any(each is module for each in root.modules())
    }


def _check_shared(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise where a module shared with another model would get islands for two dtypes."""
    for path, module in root.named_modules():
        for wrapper in wrappers_on(module):
            other = getattr(wrapper, "dtype", dtype)
            if dtype is not None and other is not dtype:
                raise UsageError(
                    f"{path or 'the model'} is shared with a model that runs under {other}, and "
                    f"this profile's policy computes in {dtype}: apply profiles of one policy to "
                    "both, or precision.restore() the other first"
                )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside DistributedDataParallel and torch.compile's wrapper.

    Module paths in a recipe are those of the user's own model.
    """
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "a model in torch.nn.DataParallel cannot be operated on: its replicas would go on "
            "calling the first device's weights, even if the profile were applied to the model "
            "inside. Use DistributedDataParallel, or one device without DataParallel"
        )
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        raise UsageError(
            "a DeepSpeedEngine was given: DeepSpeed casts parameters and scales losses itself, and "
            "switches other autocasts off. Write its settings with `autoprec export PROFILE --to "
            "deepspeed`, or train the model without it, under DistributedDataParallel or "
            "fully_shard"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "a TorchScript module was given, expected an ordinary nn.Module: what is compiled "
            "already cannot be given another precision module by module. Apply the profile before "
            "torch.jit.script or torch.jit.trace, or train the model that was scripted"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    inner: Any = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def _warnings(model: nn.Module, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Say what of the weights' dtypes keeps the policy, which computes in `dtype`, from helping."""
    low = [name for name, p in model.named_parameters() if p.dtype in LOW_DTYPES]
    exact = [name for name, p in model.named_parameters() if p.dtype in EXACT_DTYPES]
    found = []
    if low:
        found.append(
            f"{len(low)} parameters are 16-bit already ({low[0]}, ...): updates smaller than their "
            "rounding are lost; keep the weights in float32 and let the policy choose what to "
            "compute in"
        )
    if exact and dtype is not None:
        found.append(
            f"{len(exact)} parameters are float64 ({exact[0]}, ...), which autocast leaves as it "
            "is, with all that is computed from it: they gain nothing by the policy. Call "
            "model.float() before apply_profile"
        )
    return tuple(found)
