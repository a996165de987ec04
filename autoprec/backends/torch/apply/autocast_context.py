"""Contexts of the forward pass, for a `with` statement in every step.

Each may be kept and entered again, also inside itself, and decorates a function.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from autoprec.backends.torch.apply.second_models import SecondModels


class ProfileAutocast(threading.local, contextlib.ContextDecorator):
    """Autocast that may be entered again, also inside itself; every thread enters its own.

    What `torch.autocast` finds out when it is made is found out once, not in every step. `models`,
    if given, looks at what is called inside.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype, models: SecondModels | None = None
    ) -> None:
        self._device_type, self._dtype, self._models = device_type, dtype, models
        self._cast: torch.autocast | None = None
        self._is_free = True
        self._entered: list[tuple[torch.autocast, SecondModels | None]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a model that holds its `Precision` be copied."""
        return ProfileAutocast, (self._device_type, self._dtype, self._models)

    def __enter__(self) -> None:
        if self._is_free and torch.is_autocast_cache_enabled():
            cast = self._cast
            if cast is None:
                cast = self._cast = torch.autocast(self._device_type, self._dtype)
            self._is_free = False
        else:
            cast = torch.autocast(self._device_type, self._dtype)
        cast.__enter__()  # type: ignore[no-untyped-call]
        looking = self._models if self._models is not None and self._models.is_due() else None
        self._entered.append((cast, looking))
        if looking is not None:
            looking.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cast, looking = self._entered.pop()
        if looking is not None:
            looking.leave()
        if cast is self._cast:
            self._is_free = True
        cast.__exit__(kind, error, trace)


class _Empty(contextlib.ContextDecorator, contextlib.nullcontext[None]):
    """Changes nothing."""


EMPTY = _Empty()


class EachEntry(threading.local, contextlib.ContextDecorator):
    """Enters what `opened` returns by then: the micro-batches of an update differ."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Any]]) -> None:
        self._opened = opened
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._opened()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
