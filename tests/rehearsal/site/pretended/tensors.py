"""Tensors that say they are on a GPU and are computed on the CPU, with real numbers.

A wrapper subclass around a CPU tensor: its dispatch keys are the device's, so that autocast and
autograd act as on that device, which every build of torch can. `run` unwraps, lets the CPU compute,
and wraps. A mode does the same for what has no tensor of ours among its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from pretended import faults, settings
from pretended.memory import BOOKS

aten = torch.ops.aten

_NO_FLOAT64 = {
    "mps": (
        TypeError,
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
        "float64. Please use float32 instead.",
    ),
    "xpu": (RuntimeError, "Required aspect fp64 is not supported on the device"),
}


class Pretended(torch.Tensor):
    """A tensor on a pretended device; `_host` holds its numbers, `_block` its memory."""

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int = 0) -> Pretended:
        if host.dtype in (torch.float64, torch.complex128) and not settings.HAS_FLOAT64:
            kind, message = _NO_FLOAT64[settings.KIND]
            raise kind(message)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride() if host.layout is torch.strided else None,
            storage_offset=host.storage_offset() if host.layout is torch.strided else None,
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(settings.TYPE, index),
            requires_grad=False,
        )

    def __init__(self, host: torch.Tensor, index: int = 0) -> None:
        self._host = host
        self._block = BOOKS[index].block(host)

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"{self._host!r} on {self.device}"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self._host, self._block = value._host, value._block

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._host.untyped_storage()

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def tolist(self) -> Any:
        wait()
        return self._host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._host.detach(), self.device.index, self.requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["_host"], self.device.index

    @staticmethod
    def __tensor_unflatten__(inner: dict, index: int, size: Any, stride: Any) -> Pretended:
        return Pretended(inner["_host"], index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _rebuild(host: torch.Tensor, index: int, requires_grad: bool) -> Pretended:
    return Pretended(host, index).requires_grad_(requires_grad)


# Copies that have not ended -----------------------------------------------------------------------

_under_way: list[tuple[torch.Tensor, torch.Tensor]] = []


def wait() -> None:
    """End every copy that was started without waiting for it."""
    while _under_way:
        target, numbers = _under_way.pop()
        target.copy_(numbers)


def _not_there_yet(target: torch.Tensor) -> torch.Tensor:
    """Leave `target` as a copy under way is: whoever reads it now reads no number of it."""
    _under_way.append((target, target.clone()))
    if target.is_floating_point() or target.is_complex():
        return target.fill_(float("nan"))
    return target.fill_(True if target.dtype is torch.bool else 99)


# Operators ----------------------------------------------------------------------------------------

#: Operators in which a tensor of the CPU may meet one of a device.
_MEET = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten.set_.source_Tensor,
    aten._use_cudnn_ctc_loss.default,
    aten._use_miopen_ctc_loss.default,
    aten._pack_padded_sequence.default,
    aten._pack_padded_sequence_backward.default,
}


def _softmax(op: Any) -> Any:
    def call(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return op(x.float() if half_to_float else x, dim, False)

    return call


def _lstm_cell(gates: Any, hidden: Any, cell: Any, first: Any = None, second: Any = None) -> Any:
    """aten._thnn_fused_lstm_cell: the gates' products are computed outside; here their use."""
    total = gates + hidden
    total = total if first is None else total + first + second
    i, f, g, o = total.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_backward(grad: Any, grad_cell: Any, cell: Any, after: Any, space: Any, bias: bool) -> Any:
    i, f, g, o = space.chunk(4, 1)
    shape = torch.tanh(after)
    grad = torch.zeros_like(after) if grad is None else grad
    total = grad * o * (1 - shape * shape)
    total = total if grad_cell is None else total + grad_cell
    parts = [
        total * g * i * (1 - i),
        total * cell * f * (1 - f),
        total * i * (1 - g * g),
        grad * shape * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, total * f, gates.sum(0) if bias else None


def _gru_cell(gates: Any, hidden: Any, before: Any, first: Any = None, second: Any = None) -> Any:
    gates = gates if first is None else gates + first
    hidden = hidden if second is None else hidden + second
    (ri, zi, ni), (rh, zh, nh) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    return n + z * (before - n), torch.cat([r, z, n, before, nh], 1)


def _gru_backward(grad: Any, space: Any, bias: bool) -> Any:
    r, z, n, before, nh = space.chunk(5, 1)
    to_n = grad * (1 - z) * (1 - n * n)
    to_z = grad * (before - n) * z * (1 - z)
    to_r = to_n * nh * r * (1 - r)
    gates = torch.cat([to_r, to_z, to_n], 1)
    hidden = torch.cat([to_r, to_z, to_n * r], 1)
    sums = (gates.sum(0), hidden.sum(0)) if bias else (None, None)
    return gates, hidden, grad * z, *sums


#: Operators that the CPU has not, or does otherwise.
_SPECIAL = {
    aten._fused_sdp_choice.default: lambda *args, **kwargs: 0,
    aten._use_cudnn_ctc_loss.default: lambda *args, **kwargs: False,
    aten._use_miopen_ctc_loss.default: lambda *args, **kwargs: False,
    aten._softmax.default: _softmax(aten._softmax.default),
    aten._log_softmax.default: _softmax(aten._log_softmax.default),
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}

_of_ctc = torch.ctc_loss


def ctc_loss(scores: Any, targets: Any, lengths: Any, target_lengths: Any, *more: Any) -> Any:
    """torch.ctc_loss, with lengths as numbers: for a subclass of Tensor torch goes another way."""
    found = (
        tuple(each.tolist()) if isinstance(each, torch.Tensor) else each
        for each in (lengths, target_lengths)
    )
    return _of_ctc(scores, targets, *found, *more)


_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


def index_of(asked: Any) -> int | None:
    """The index of one of our devices; None for any other."""
    if asked is None:
        return None
    device = torch.device(asked)
    if device.type != settings.TYPE:
        return None
    from pretended.border import current

    index = current() if device.index is None else device.index
    if index >= len(BOOKS):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that involves one of our tensors or devices."""
    leaves, _ = tree_flatten((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    _check_places(func, leaves, ours)
    faults.check(func, ours)
    asked = kwargs.get("device")
    if asked is not None:
        target = index_of(asked)
    elif func is aten.copy_.default:
        target = args[0].device.index if isinstance(args[0], Pretended) else None
    else:
        target = ours[0].device.index if ours else None
    if func is aten.is_pinned.default:
        return False
    if func is aten._pin_memory.default:
        return args[0]
    if func in _READS:
        wait()
    hosts, options = tree_map(lambda x: x._host if isinstance(x, Pretended) else x, (args, kwargs))
    if asked is not None:
        options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
    waits_not = _without_waiting(func, args, options)
    if not waits_not and target is None:
        wait()
    result = _SPECIAL.get(func, func)(*hosts, **options)
    if target is None:
        leaves_device = ours and func in (aten._to_copy.default, aten.copy_.default)
        return _not_there_yet(result) if waits_not and leaves_device else result
    if func is aten._pack_padded_sequence.default:
        return _wrapped(result[0], target), result[1]  # the sizes stay on the CPU
    result = tree_map(lambda x: _wrapped(x, target), result)
    return return_and_correct_aliasing(func, args, kwargs, result)


def _without_waiting(func: Any, args: Any, options: dict[str, Any]) -> bool:
    """Whether a copy is started without waiting for it; the CPU's own copies know no such thing."""
    if func is aten._to_copy.default:
        return bool(options.pop("non_blocking", False))
    if func is aten.copy_.default:
        return len(args) > 2 and bool(args[2])
    return False


def _wrapped(value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, Pretended):
        return Pretended(value, index)
    return value


def _check_places(func: Any, leaves: list[Any], ours: list[Pretended]) -> None:
    """Raise where tensors of several devices meet, as the device's own kernels do."""
    if func is aten._pack_padded_sequence.default and isinstance(leaves[1], Pretended):
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor")
    if not ours or func in _MEET:
        return
    places = dict.fromkeys(str(tensor.device) for tensor in ours)
    for leaf in leaves:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Pretended)
        if plain and leaf.dim() > 0 and leaf.device.type == "cpu":
            places["cpu"] = None
    if len(places) > 1:
        found = " and ".join(places)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found}! (when checking argument in method wrapper_{func.name()})"
        )


class Mode(TorchDispatchMode):
    """Catches what makes a tensor on one of our devices from none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        if any(isinstance(leaf, Pretended) for leaf in leaves):
            return run(func, args, kwargs)
        if index_of(kwargs.get("device")) is not None:
            return run(func, args, kwargs)
        return func(*args, **kwargs)
