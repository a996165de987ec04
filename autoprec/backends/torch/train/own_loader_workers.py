"""Goes through a DataLoader that keeps its worker processes, with worker processes of its own.

Such a loader (`persistent_workers=True`) has one iterator, which it keeps and resets: two passes at
a time would take each other's batches, and ending its workers would break the loader for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader

_KEPT_ITERATOR = "_iterator"
"""Where a DataLoader keeps the iterator that has its workers."""


def keeps_workers(data: Any) -> bool:
    """Say whether `data` is a DataLoader whose workers live on after a pass."""
    return isinstance(data, DataLoader) and data.persistent_workers and data.num_workers > 0


class OwnLoaderWorkers:
    """The worker processes of one stream of batches, which it keeps from pass to pass.

    They end with this object: the loader itself does not know of them.
    """

    def __init__(self) -> None:
        self._iterator: Any = None

    def go_through(self, loader: Any) -> Generator[Any, None, None]:
        """Yield the batches of one pass."""
        with self._lent_to(loader):
            passing = iter(loader)
        while True:
            with self._lent_to(loader):  # a subclass may begin its pass only now
                try:
                    batch = next(passing)
                except StopIteration:
                    return
            yield batch

    @contextlib.contextmanager
    def _lent_to(self, loader: Any) -> Iterator[None]:
        """Let the loader take our iterator for its own, or make one that becomes ours."""
        theirs = getattr(loader, _KEPT_ITERATOR, None)
        setattr(loader, _KEPT_ITERATOR, self._iterator)
        try:
            yield
        finally:
            self._iterator = getattr(loader, _KEPT_ITERATOR, None)
            setattr(loader, _KEPT_ITERATOR, theirs)
