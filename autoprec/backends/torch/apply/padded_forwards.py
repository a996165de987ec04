"""Modules computed at aligned sizes: zeros are added before the product and cut off after it.

Each wrapper stands in for one module's `forward` and reads the module's own parameters at every
call, so that they stay what they are: same objects, names, shapes, gradients, weight tying. It
reads each of them once, as `forward` does: a parametrized weight (spectral norm) is computed when
it is read, and may change the module's buffers by that. Added
rows and columns of zeros add exact zeros to every sum; the result equals the unpadded one within
the rounding of a differently blocked product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper


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
PADDED_FORMS: tuple[tuple[type[nn.Module], type[PaddedForward]], ...] = (
    (nn.Linear, PaddedLinear),
    (nn.Conv1d, PaddedConv),
    (nn.Conv2d, PaddedConv),
    (nn.Conv3d, PaddedConv),
    (nn.Embedding, PaddedEmbedding),
    (nn.MultiheadAttention, PaddedAttention),
)
