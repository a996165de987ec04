"""Pads the modules that a recipe names to the device's alignment; says which cannot be, and why.

The decision and its reasons are one: `padding_obstacle` returns the first reason against padding a
module, or nothing. Whether padding pays, a measurement decides.

Routers are found by name, and by a parent whose own forward calls topk, argmax or the like: a
difference of one rounding can flip which expert is chosen. A router hidden deeper is not seen.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.backends.torch.apply.change_report import PaddedModule, Skipped
from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper, install_wrapper
from autoprec.backends.torch.apply.padded_forwards import PADDED_FORMS, PaddedForward, round_up
from autoprec.core.recipe import Alignment

_ROUTER_NAMES = re.compile(r"^(.*router.*|gate|gating|gat(e|ing)_network|switch|selector)$")
_SELECTING_CALLS = re.compile(r"\b(topk|argmax|argsort|sort|multinomial|gumbel_softmax)\s*\(")


def pad_modules(
    model: nn.Module, alignment: Alignment
) -> tuple[tuple[PaddedModule, ...], tuple[Skipped, ...]]:
    """Install padding on the modules that `alignment` names; return what was padded and what not.

    A module that cannot be padded is skipped with its reason: the result is right without.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    padded: dict[int, PaddedModule] = {}
    skipped = []
    for path in alignment.modules:
        module = modules.get(path)
        if module is not None and id(module) in padded:
            continue
        reason = padding_obstacle(model, path, alignment.multiple)
        if module is None or reason:
            skipped.append(Skipped(path, "padding", reason))
            continue
        padded[id(module)] = _describe(path, module, alignment.multiple)
        install_wrapper(_wrapper_of(module)(module, alignment.multiple))
    return tuple(padded.values()), tuple(skipped)


def _describe(path: str, module: nn.Module, multiple: int) -> PaddedModule:
    sizes = tuple((name, size, round_up(size, multiple)) for name, size in paddable_sizes(module))
    return PaddedModule(path, type(module).__name__, sizes)


def _wrapper_of(module: nn.Module) -> type[PaddedForward]:
    return next(wrapper for kind, wrapper in PADDED_FORMS if isinstance(module, kind))


def padding_obstacle(model: nn.Module, path: str, multiple: int) -> str:
    """Return the first reason why the module at `path` cannot be padded; "" if it can."""
    module = dict(model.named_modules(remove_duplicate=False)).get(path)
    if module is None:
        return "this model has no module of that name"
    reason = wrapping_obstacle(model, path, module)
    if reason:
        return reason
    if all(size % multiple == 0 for _, size in paddable_sizes(module)):
        return f"every dimension is a multiple of {multiple} already"
    return ""


def wrapping_obstacle(model: nn.Module, path: str, module: nn.Module) -> str:
    """Return the first reason why nothing may compute in a module's stead; "" if there is none."""
    return next(filter(None, (check(model, path, module) for check in _CHECKS)), "")


def paddable_sizes(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Name the dimensions that padding would change, with their sizes."""
    if isinstance(module, nn.Linear):
        return (("in_features", module.in_features), ("out_features", module.out_features))
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return (("in_channels", module.in_channels), ("out_channels", module.out_channels))
    if isinstance(module, nn.Embedding):
        return (("embedding_dim", module.embedding_dim),)
    if isinstance(module, nn.MultiheadAttention):
        return (("embed_dim", module.embed_dim),)
    return ()


# The checks, in the order in which their reasons are the most telling -----------------------------


def _kind(model: nn.Module, path: str, module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith(("torch.ao.", "torch.nn.quantized")):
        return f"{name} is quantised"
    base = next((kind for kind, _ in PADDED_FORMS if isinstance(module, kind)), None)
    if base is None:
        return f"padding knows Linear, Conv, Embedding and MultiheadAttention, not {name}"
    if type(module).forward is not base.forward:
        return f"{name} computes in its own way, not as {base.__name__} does"
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(own, ForwardWrapper):
        return "its forward was replaced"
    return ""


def _weights(model: nn.Module, path: str, module: nn.Module) -> str:
    parameters: Iterable[torch.Tensor] = module.parameters()
    for parameter in parameters:
        if is_lazy(parameter):
            return "it is not initialised yet: call the model once before applying the profile"
        if not parameter.is_floating_point():
            return "its weights are quantised"
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            kind = type(parameter).__name__
            return f"its weights are of type {kind}, perhaps sharded or quantised"
    return ""


def _geometry(model: nn.Module, path: str, module: nn.Module) -> str:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups != 1:
        return f"a grouped convolution ({module.groups} groups): channels belong to their group"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return "its gradient is sparse" if module.sparse else "max_norm writes to the table"
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim or module.in_proj_weight is None:
            return "keys or values have another width than queries"
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds keys of its own (add_bias_kv or add_zero_attn)"
    return ""


def _surroundings(model: nn.Module, path: str, module: nn.Module) -> str:
    if not path:
        return ""  # the model itself has nothing around it
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "its forward is never called: MultiheadAttention reads its weight; pad that instead"
    for part in path.split("."):
        if _ROUTER_NAMES.match(part):
            return f"{part!r} looks like a router: a rounding could flip what it chooses"
    if "router" in type(parent).__name__.lower():
        return "it is part of a router: a rounding could flip what it chooses"
    if isinstance(module, nn.Linear) and (called := _SELECTING_CALLS.search(_source(parent))):
        return f"its parent's forward calls {called[1]}: a rounding could flip what is chosen"
    return ""


def _source(module: nn.Module) -> str:
    """Return the text of the module's own forward, "" where it cannot be read."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


_CHECKS: tuple[Callable[[nn.Module, str, nn.Module], str], ...] = (
    _kind,
    _weights,
    _geometry,
    _surroundings,
)
