"""Signals that stop a command as Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop a tuning as Ctrl-C does: workers end, trials are kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    kept = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in kept.items():
            signal.signal(getattr(signal, name), handler)
