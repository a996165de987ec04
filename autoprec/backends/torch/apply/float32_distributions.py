"""Distributions that a model builds under a mixed policy: from float32 parameters.

`Categorical(probs=...)` divides by the sum, clamps at the dtype's epsilon and checks the simplex;
in bfloat16 that loses the log-probabilities of rare actions, or raises. Casting up what such an
object holds comes too late. So while a mixed policy is applied to any model, the constructors of
`torch.distributions` cast 16-bit arguments up where autocast is on, and compute outside of it.
Elsewhere they do what they always did. What a model computed the parameters *from* stays 16-bit,
and so do products in the distribution's methods when these are called under autocast.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributions, nn

from autoprec.backends.torch.dtypes import LOW_DTYPES

_CLAIMS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_ORIGINALS: dict[type, Callable[..., None]] = {}


def build_in_float32(model: nn.Module) -> None:
    """Let distributions be built in float32 until `model` is released, or no longer exists."""
    _CLAIMS.add(model)
    if _ORIGINALS:
        return
    for cls in _constructed():
        _ORIGINALS[cls] = vars(cls)["__init__"]
        cls.__init__ = _float32_constructor(_ORIGINALS[cls])  # type: ignore[misc]


def release_constructors(model: nn.Module) -> None:
    """Give the constructors back when the last model that claimed them is released."""
    _CLAIMS.discard(model)
    if _CLAIMS:
        return
    for cls, original in _ORIGINALS.items():
        cls.__init__ = original  # type: ignore[misc]
    _ORIGINALS.clear()


def _constructed() -> Iterator[type]:
    """Yield torch's classes of distributions and transforms that have a constructor."""
    names = {**vars(distributions), **vars(distributions.transforms)}
    kinds = (distributions.Distribution, distributions.Transform)
    for cls in {id(each): each for each in names.values()}.values():
        if isinstance(cls, type) and issubclass(cls, kinds) and "__init__" in vars(cls):
            yield cls


def _float32_constructor(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Tensor) and each.dtype in LOW_DTYPES:
                device = each.device.type
                if torch.is_autocast_enabled(device):
                    with torch.autocast(device, each.dtype, enabled=False):
                        original(self, *map(_up, args), **{k: _up(v) for k, v in kwargs.items()})
                    return
        original(self, *args, **kwargs)

    return __init__


def _up(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES
    return value.float() if is_low else value


def derive_again(original: Any, made: Any) -> None:
    """Let `made`, a copy of a distribution cast up to float32, derive what its class derives.

    Attributes that are computed from others when first read are forgotten; a Categorical's
    parameter, which was normalised in 16 bits, is normalised again.
    """
    if not isinstance(made, distributions.Distribution) or made is original:
        return
    own, kept = vars(made), vars(original).get("_param")
    if kept is None and not any(name.startswith("_unbroadcasted_") for name in own):
        return  # nothing says which of its attributes it was built from
    for name in list(own):
        lazy = isinstance(getattr(type(made), name, None), distributions.utils.lazy_property)
        if lazy and (kept is None or vars(original)[name] is not kept):
            del own[name]
    if isinstance(made, distributions.Categorical):
        _normalise(own)


def _normalise(own: dict[str, Any]) -> None:
    """Do to the parameter what a Categorical's constructor does."""
    if "probs" in own:
        own["probs"] = own["_param"] = own["probs"] / own["probs"].sum(-1, keepdim=True)
    elif "logits" in own:
        logits = own["logits"]
        own["logits"] = own["_param"] = logits - logits.logsumexp(-1, keepdim=True)
