"""Computes modules at sizes that are multiples of what the device's matrix units need.

Zeros are added before the product and cut off after it. Each wrapper stands in for one module's
`forward` and reads the module's own parameters at every call, so that they stay what they are: same
objects, names, shapes, gradients, weight tying. It reads each of them once, as `forward` does: a
parametrized weight (spectral norm) is computed when it is read, and may change the module's buffers
by that. Added rows and columns of zeros add exact zeros to every sum; the result equals the
unpadded one within the rounding of a differently blocked product.

The decision and its reasons are one: `padding_obstacle` returns the first reason against padding a
module, or nothing. Whether padding pays, a measurement decides. Routers are found by name, and by a
parent whose own forward calls topk, argmax or the like: a difference of one rounding can flip which
expert is chosen. A router hidden deeper is not seen.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from autoprec.backends.torch.apply.change_report import PaddedModule, Skipped
from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper, install_wrapper
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
    return next(wrapper for kind, wrapper in _PADDED_FORMS if isinstance(module, kind))


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


# The checks, in the order in which their reasons are the most telling ----------------------------


def _kind(model: nn.Module, path: str, module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith(("torch.ao.", "torch.nn.quantized")):
        return f"{name} is quantised"
    base = next((kind for kind, _ in _PADDED_FORMS if isinstance(module, kind)), None)
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


# The forwards ------------------------------------------------------------------------------------


def padding_to(size: int, multiple: int) -> int:
    """Return how much `size` lacks to the next multiple."""
    return -size % multiple


def round_up(size: int, multiple: int) -> int:
    """Round `size` up to a multiple."""
    return size + padding_to(size, multiple)


def padded_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, multiple: int) -> Tensor:
    """Compute `F.linear` with both dimensions of `weight` padded to `multiple`."""
    features, width = weight.shape
    below, right = padding_to(features, multiple), padding_to(width, multiple)
    if right:
        inputs = F.pad(inputs, (0, right))
    if below or right:
        weight = F.pad(weight, (0, right, 0, below))
    if below and bias is not None:
        bias = F.pad(bias, (0, below))
    result = F.linear(inputs, weight, bias)
    return result[..., :features] if below else result


class PaddedForward(ForwardWrapper):
    """Computes a module at sizes that are multiples of `multiple`."""

    def __init__(self, module: nn.Module, multiple: int) -> None:
        super().__init__(module)
        self.multiple = multiple


class PaddedLinear(PaddedForward):
    """nn.Linear with padded input and output features."""

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (nn's own name)
        """Compute the layer; shapes as in nn.Linear."""
        layer = cast(nn.Linear, self.module)
        return padded_linear(input, layer.weight, layer.bias, self.multiple)


class PaddedConv(PaddedForward):
    """An ungrouped convolution with padded input and output channels."""

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (nn's own name)
        """Compute the layer; shapes as in nn.Conv1d, 2d and 3d."""
        layer: Any = self.module
        weight, bias = layer.weight, layer.bias
        spatial, features = weight.dim() - 2, weight.shape[0]
        below = padding_to(features, self.multiple)
        right = padding_to(weight.shape[1], self.multiple)
        if right:
            input = F.pad(input, (0, 0) * spatial + (0, right))
        if below or right:
            weight = F.pad(weight, (0, 0) * spatial + (0, right, 0, below))
        if below and bias is not None:
            bias = F.pad(bias, (0, below))
        result: Tensor = layer._conv_forward(input, weight, bias)
        return result.narrow(-spatial - 1, 0, features) if below else result


class PaddedEmbedding(PaddedForward):
    """nn.Embedding with a padded embedding dimension."""

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (nn's own name)
        """Look the indices up; shapes as in nn.Embedding."""
        table = cast(nn.Embedding, self.module)
        weight = table.weight
        width = weight.shape[1]
        weight = F.pad(weight, (0, padding_to(width, self.multiple)))
        rows = F.embedding(
            input, weight, table.padding_idx, scale_grad_by_freq=table.scale_grad_by_freq
        )
        return rows[..., :width]


class PaddedAttention(PaddedForward):
    """nn.MultiheadAttention with padded input and output projections.

    The attention between them is that of `F.multi_head_attention_forward` at its own head size,
    step by step: padding heads would change the scale of the scores.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results as in nn.MultiheadAttention."""
        attention = cast(nn.MultiheadAttention, self.module)
        unmasked = is_causal and attn_mask is None  # torch's own forward says what is missing
        if query.dim() != 3 or query.is_nested or unmasked:
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return cast("tuple[Tensor, Tensor | None]", self.call(query, key, value, *options))
        if attention.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = _merged_mask(attn_mask, key_padding_mask, attention.num_heads, query.dtype)
        q, k, v = self._project(attention, query, key, value)
        dropout = attention.dropout if attention.training else 0.0
        if need_weights:
            mixed, weights = _attend_with_weights(q, k, v, mask, dropout)
        else:
            mixed, weights = _attend(q, k, v, mask, dropout, attention.num_heads), None
        length, batch, width = query.shape
        out = attention.out_proj
        joined = mixed.transpose(0, 1).reshape(length, batch, width)
        result = padded_linear(joined, out.weight, out.bias, self.multiple)
        if weights is not None:
            weights = weights.view(batch, attention.num_heads, length, key.shape[0])
            weights = weights.mean(dim=1) if average_attn_weights else weights
        return (result.transpose(0, 1) if attention.batch_first else result), weights

    def _project(
        self, attention: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> list[Tensor]:
        """Return queries, keys and values as (batch * heads, length, head size)."""
        weight, bias = cast(Tensor, attention.in_proj_weight), attention.in_proj_bias
        weights = weight.chunk(3)
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        heads = query.shape[1] * attention.num_heads
        projected = []
        for inputs, w, b in zip((query, key, value), weights, biases, strict=True):
            flat = padded_linear(inputs, w, b, self.multiple).contiguous()
            projected.append(flat.view(inputs.shape[0], heads, attention.head_dim).transpose(0, 1))
        return projected


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scaled = q * (1.0 / q.shape[-1]) ** 0.5
    keys = k.transpose(-2, -1)
    scores = torch.bmm(scaled, keys) if mask is None else torch.baddbmm(mask, scaled, keys)
    weights = torch.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = F.dropout(weights, p=dropout)
    return torch.bmm(weights, v), weights


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, heads: int
) -> Tensor:
    q4, k4, v4 = (x.view(-1, heads, *x.shape[1:]) for x in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(-1, heads, *mask.shape[1:])
    return F.scaled_dot_product_attention(q4, k4, v4, mask, dropout).flatten(0, 1)


def _merged_mask(
    attention: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Return both masks as one that is added to the scores: (1 or batch * heads, L or 1, S).

    `is_causal` is a hint that comes with the mask it stands for, so the mask is enough.
    """
    mask = None if attention is None else _additive(attention, dtype)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    if padding is None:
        return mask
    batch, length = padding.shape
    ours = _additive(padding, dtype).view(batch, 1, 1, length)
    ours = ours.expand(-1, heads, -1, -1).reshape(batch * heads, 1, length)
    return ours if mask is None else mask + ours


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


#: Which class computes which kind of module at aligned sizes.
_PADDED_FORMS: tuple[tuple[type[nn.Module], type[PaddedForward]], ...] = (
    (nn.Linear, PaddedLinear),
    (nn.Conv1d, PaddedConv),
    (nn.Conv2d, PaddedConv),
    (nn.Conv3d, PaddedConv),
    (nn.Embedding, PaddedEmbedding),
    (nn.MultiheadAttention, PaddedAttention),
)
