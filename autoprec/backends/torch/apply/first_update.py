"""Looks at what of a recipe really runs, by hooks that go away after the first update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from autoprec.backends.shared.what_ran import WhatRan
from autoprec.backends.torch.apply.float32_islands import Float32Island, has_own_code
from autoprec.backends.torch.apply.forward_wrappers import wrappers_on
from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.backends.torch.dtypes import LOW_DTYPES, dtype_name

_PRODUCTS = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def computes_products(module: nn.Module) -> bool:
    """Return whether a module is a layer of matrix products; GPT-2's linear is called Conv1D."""
    return isinstance(module, _PRODUCTS) or type(module).__name__ == "Conv1D"


class FirstUpdate:
    """Looks at a model's modules from attaching until the first optimizer step that happens."""

    def __init__(
        self, root: nn.Module, *, islands: Collection[str], padded: Collection[str], compiled: bool
    ) -> None:
        self._islands = {path: False for path in islands if has_own_code(_module(root, path))}
        self._padded = dict.fromkeys(padded, False)
        self._compiled = compiled
        self._dtype: str | None = None
        self._memory_format: str | None = None
        self._batch: int | None = None
        self._calls = 0
        self._rounded: dict[str, None] = {}
        self._handles: list[Any] = []
        if not compiled:
            self._attach(root)

    def _attach(self, root: nn.Module) -> None:
        for path in self._islands:
            self._hook(_module(root, path), self._noting(self._islands, path))
        for path in self._padded:
            self._hook(_module(root, path), self._noting(self._padded, path))
        for module in root.modules():
            if computes_products(module):
                self._hook(module, self._note_product)

    def _hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _noting(self, called: dict[str, bool], path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, result: Any) -> None:
            if not (module.training or torch.is_grad_enabled()):
                return
            called[path] = True
            if called is self._islands and any(t.dtype in LOW_DTYPES for t in tensors_in(result)):
                self._rounded[path] = None

        return note

    def _note_product(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.is_grad_enabled() or not isinstance(result, torch.Tensor):
            return
        if any(isinstance(each, Float32Island) for each in wrappers_on(module)):
            return
        if self._dtype is None:
            self._dtype = dtype_name(result.dtype)
        images = args[0] if args else None
        if self._memory_format is None and isinstance(images, torch.Tensor) and images.dim() == 4:
            last = images.is_contiguous(memory_format=torch.channels_last)
            self._memory_format = "channels_last" if last else "contiguous"

    def note_batch(self, batch: Any) -> None:
        """Count the samples of the first micro-batch that is trained on."""
        if self._batch is None and torch.is_grad_enabled():
            sizes = (tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())
            self._batch = next(sizes, None)

    def note_call(self, inputs: Any) -> None:
        """Count a call of the model itself in training."""
        self.note_batch(inputs)
        self._calls += torch.is_grad_enabled()

    def end(self, *, compares_calls: bool = False) -> WhatRan:
        """Return what was seen, and look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        called = {**self._islands, **self._padded}
        return WhatRan(
            dtype=self._dtype,
            islands=tuple(path for path, ran in self._islands.items() if ran),
            padded=tuple(path for path, ran in self._padded.items() if ran),
            inert=() if self._compiled else tuple(p for p, ran in called.items() if not ran),
            rounded=tuple(self._rounded),
            memory_format=self._memory_format,
            batch=self._batch,
            calls=self._calls if compares_calls and self._calls else None,
            compiled=self._compiled,
        )


def _module(root: nn.Module, path: str) -> nn.Module:
    return root.get_submodule(path)
