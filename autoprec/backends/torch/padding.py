"""Padding (placeholder committed first; see below)."""

from __future__ import annotations

from torch import nn

from autoprec.backends.torch.report import PaddedModule, Skipped
from autoprec.core.recipe import Alignment


def pad_modules(
    model: nn.Module, alignment: Alignment
) -> tuple[tuple[PaddedModule, ...], tuple[Skipped, ...]]:
    """Pad."""
    return (), ()
