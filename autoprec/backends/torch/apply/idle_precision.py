"""The `Precision` of a script whose model somebody else trains: a tuning, which imports it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from autoprec.backends.torch.apply.autocast_context import EMPTY, ProfileAutocast
from autoprec.backends.torch.apply.precision import Precision


class IdlePrecision(Precision):
    """Leaves autocast as it finds it: a recipe that is being measured may have set it."""

    def _opened(self, cast: ProfileAutocast | None) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return EMPTY
