"""The plugins over the base classes of the package `lightning`, where pickle finds them."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision as FabricBase
from lightning.pytorch.plugins.precision import Precision as TrainerBase

from autoprec.integrations.lightning.fabric import FabricPlugin
from autoprec.integrations.lightning.trainer import TrainerPlugin


class AutoprecPrecision(TrainerPlugin, TrainerBase):  # type: ignore[misc]
    """The Trainer's precision plugin; checkpoints hold its state under this name."""


class AutoprecFabricPrecision(FabricPlugin, FabricBase):  # type: ignore[misc]
    """Fabric's precision plugin."""
