"""Lightning's Trainer and Fabric, of both packages: a profile as their precision plugin.

    Trainer(plugins=[autoprec.integrations.lightning.plugin("model.profile.yaml")])
    Fabric(plugins=[autoprec.integrations.lightning.fabric_plugin("model.profile.yaml")])

Everything else stays as it is: automatic optimization, clipping, schedulers, checkpoints. The
profile sets `accumulate_grad_batches`; the loader is the script's and takes `plugin.batch_size`.
One thing differs from Lightning's own precisions: the last update of an epoch that holds fewer
micro-batches is made of their mean, not of a part of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Unpack

from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.integrations.seam import ForeignLoop
from autoprec.integrations.settings import Settings

_CLASSES = {
    "lightning": "autoprec.integrations.lightning.of_lightning",
    "pytorch_lightning": "autoprec.integrations.lightning.of_pytorch_lightning",
}


def plugin(
    profile: str | Path | Profile | Recipe | None,
    *,
    package: str | None = None,
    **settings: Unpack[Settings],
) -> Any:
    """Return a plugin for `Trainer(plugins=[...])`, without `precision=` beside it.

    `package` is "lightning" or "pytorch_lightning", by default the one in use.
    """
    loop = ForeignLoop("Lightning", profile, **settings)
    return _classes(package).AutoprecPrecision(loop)


def fabric_plugin(
    profile: str | Path | Profile | Recipe | None,
    *,
    package: str | None = None,
    **settings: Unpack[Settings],
) -> Any:
    """Return a plugin for `Fabric(plugins=[...])`; see `plugin`.

    Accumulating is the script's: it divides the loss by `plugin.accumulation_steps`.
    """
    loop = ForeignLoop("Fabric", profile, script_accumulates=True, **settings)
    return _classes(package).AutoprecFabricPrecision(loop)


def _classes(package: str | None) -> Any:
    """Import the plugin classes of the package in use; prefer the one that is imported already."""
    if package is None:
        imported = [name for name in _CLASSES if name in sys.modules]
        package = imported[0] if imported else None
    for name in (package,) if package else _CLASSES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(_CLASSES[name])
    return importlib.import_module(_CLASSES[package or "lightning"])
