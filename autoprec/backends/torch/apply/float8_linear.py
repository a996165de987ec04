"""The `float8` knob: products of wide linear layers in float8, with one scale for each tensor.

    outputs (e4m3) = inputs (e4m3) @ weight (e4m3)
    gradients of both             = the outputs' gradient (e5m2) @ the other one (e4m3)

A tensor's scale is made anew in each step from its largest magnitude, so nothing is kept between
steps: parameters, `state_dict` and optimizers stay as they are, and undoing it takes a wrapper
away. Sums are in float32, results in bfloat16. Gradients have e5m2, whose range is that of float16:
they spread over more magnitudes than what is multiplied in the forward pass.

On a CPU the products are emulated: numbers are rounded in the same way and multiplied in float32,
because the CPU's `_scaled_mm` takes seconds for one wide layer.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoprec.backends.torch.apply.change_report import Skipped
from autoprec.backends.torch.apply.forward_wrappers import ForwardWrapper, install_wrapper
from autoprec.backends.torch.apply.padding import wrapping_obstacle
from autoprec.core.speed.float8 import WIDTH_MULTIPLE, is_wide

_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_RESULT = torch.bfloat16

#: Below this a tensor counts as zero: the scale of anything smaller might be infinite.
_SMALLEST_MAGNITUDE = 1e-30

#: How far a product may be off: several times what rounding to four significant bits leaves.
_ALLOWED_ERROR = 0.2


def _rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8, and the float32 scalar that gives its magnitude back.

    What is not finite makes all of it NaN, so that it shows.
    """
    largest = torch.finfo(dtype).max
    magnitude = tensor.abs().amax().float().clamp(min=_SMALLEST_MAGNITUDE)
    scale = largest / magnitude
    scaled = (tensor.float() * scale).clamp(-largest, largest)
    return scaled.to(dtype), scale.reciprocal()


def _product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], *, native: bool, fast: bool = False
) -> Tensor:
    """Return the bfloat16 product of two float8 matrices, of (m, k) and (k, n).

    `fast` lets the hardware keep fewer bits of its sums, as is common in forward passes.
    """
    if native:
        return torch._scaled_mm(
            left.contiguous(),
            right.t().contiguous().t(),  # it wants the second one by columns
            scale_a=scales[0],
            scale_b=scales[1],
            out_dtype=_RESULT,
            use_fast_accum=fast,
        )
    product = torch.mm(left.float(), right.float())
    return (product * (scales[0] * scales[1])).to(_RESULT)


class _Float8Product(torch.autograd.Function):
    """`inputs @ weight.T` for bfloat16 inputs of (rows, in) and a weight of (out, in)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, native: bool) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            rounded, inputs_scale = _rounded(inputs, _FORWARD)
            weights, weights_scale = _rounded(weight, _FORWARD)
            scales = inputs_scale, weights_scale
            product = _product(rounded, weights.t(), scales, native=native, fast=True)
        ctx.save_for_backward(rounded, inputs_scale, weights, weights_scale)
        ctx.native, ctx.weight_dtype = native, weight.dtype
        return product

    @staticmethod
    @once_differentiable  # gradients of what is rounded here would be wrong without a word
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inputs, inputs_scale, weights, weights_scale = ctx.saved_tensors
        of_inputs = of_weight = None
        with torch.autocast(inputs.device.type, enabled=False):
            gradient, scale = _rounded(gradients[0], _GRADIENT)
            if ctx.needs_input_grad[0]:
                scales = scale, weights_scale
                of_inputs = _product(gradient, weights, scales, native=ctx.native)
            if ctx.needs_input_grad[1]:
                gradient, inputs = _full_rows(gradient), _full_rows(inputs)
                scales = scale, inputs_scale
                found = _product(gradient.t(), inputs, scales, native=ctx.native)
                of_weight = found.to(ctx.weight_dtype)
        return of_inputs, of_weight, None


def _full_rows(matrix: Tensor) -> Tensor:
    """Add rows of zeros up to a multiple that the sum over rows may have."""
    missing = -matrix.shape[0] % WIDTH_MULTIPLE
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])]) if missing else matrix


def float8_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, native: bool) -> Tensor:
    """Compute `F.linear` in float8: (..., in) and (out, in) to bfloat16 of (..., out)."""
    rows = inputs.reshape(-1, inputs.shape[-1]).to(_RESULT)
    product = cast(Tensor, _Float8Product.apply(rows, weight, native))  # type: ignore[no-untyped-call]
    result = product.reshape(*inputs.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias.to(_RESULT)


class Float8Linear(ForwardWrapper):
    """nn.Linear in float8 wherever autocast is on in bfloat16; `native` where the device has it."""

    def __init__(self, module: nn.Module, native: bool) -> None:
        super().__init__(module)
        self.native = native

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (nn's own name)
        """Compute the layer; shapes as in nn.Linear."""
        layer, kind = cast(nn.Linear, self.module), input.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is _RESULT
        if not autocast or not input.numel():
            return cast(Tensor, self.call(input))
        return float8_linear(input, layer.weight, layer.bias, self.native)


def float8_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the layers that may multiply in float8.

    The first and the last linear layer, as the model names them, are none: what enters and leaves
    a model takes the rounding worst.
    """
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    return tuple(path for path in linear[1:-1] if _may_be_wrapped(model, path))


def _may_be_wrapped(model: nn.Module, path: str) -> bool:
    layer = cast(nn.Linear, model.get_submodule(path))
    if not is_wide(layer.in_features, layer.out_features):
        return False
    return not wrapping_obstacle(model, path, layer) and layer.weight.dtype is torch.float32


def use_float8(
    model: nn.Module, islands: tuple[str, ...], device: torch.device
) -> tuple[tuple[str, ...], tuple[Skipped, ...]]:
    """Let the model's wide linear layers multiply in float8, but for `islands`.

    Returns the layers that do, and why none does where the device cannot: they stay in bfloat16.
    """
    native = device.type != "cpu"
    obstacle = float8_obstacle(device) if native else ""
    paths = tuple(path for path in float8_layers(model) if path not in islands)
    if obstacle or not paths:
        why = obstacle or "this model has no linear layer that is wide enough"
        return (), (Skipped("", "float8", why),)
    for path in paths:
        install_wrapper(Float8Linear(model.get_submodule(path), native))
    return paths, ()


@cache
def float8_obstacle(device: torch.device) -> str:
    """Say why a device does not multiply in float8; "" where it does, and rightly."""
    numbers = torch.linspace(0.1, 1.0, WIDTH_MULTIPLE**2, device=device)
    matrix = numbers.reshape(WIDTH_MULTIPLE, WIDTH_MULTIPLE)
    wanted = torch.mm(matrix, matrix)
    for dtype in (_FORWARD, _GRADIENT):
        try:
            left, left_scale = _rounded(matrix, dtype)
            right, right_scale = _rounded(matrix, _FORWARD)
            found = _product(left, right, (left_scale, right_scale), native=True)
        except RuntimeError as error:
            return f"{device} refuses such products: {error}".splitlines()[0]
        away = float((found.float() - wanted).norm() / wanted.norm())
        if not away <= _ALLOWED_ERROR:
            return f"{device} computes such products wrong, by {away:.2g} of their size"
    return ""
