"""Looks in a forward and backward pass for what decides which kernels and graphs it may use."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.backends.torch.apply.nested_tensors import tensors_in


class _AttentionCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the longest row of scores of any fused kernel of attention, and whether any drops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.drops = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
            names = (argument.name for argument in func._schema.arguments)
            known = {**dict(zip(names, args, strict=False)), **given}
            self.length = max(self.length, int(known["key"].shape[-2]))
            self.drops = self.drops or known.get("dropout_p", 0.0) > 0
        return func(*args, **given)


def attention_length(run: Callable[[], object]) -> int:
    """Return the longest row of scores that a fused kernel computes in `run`.

    0 where there is none, as where attention needs its scores, or where any score drops out: every
    kernel drops others, so that they could not be compared.
    """
    with _AttentionCalls() as calls:
        run()
    return 0 if calls.drops else calls.length


def keeps_outputs(model: nn.Module, run: Callable[[], object]) -> bool:
    """Return whether tensors that `model` returns are still held when `run` has ended."""
    returned: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        returned.extend(weakref.ref(tensor) for tensor in tensors_in(result))

    with _hooked(model, note):
        run()
    gc.collect()
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    alive = [found for each in returned if (found := each()) is not None]
    return any(id(tensor) not in own for tensor in alive)


@contextlib.contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
