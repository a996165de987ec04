"""Loads the weights of a checkpoint file into a freshly built model.

An optimizer's state in the file is left alone: it belongs to the recipe that it was trained with.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprec.backends.keras.apply.optimizer_attributes import optimizer_attributes
from autoprec.errors import TaskError

_SUFFIXES = (".weights.h5", ".keras", ".h5", ".hdf5")


def load_weights(model: Any, path: Path) -> None:
    """Load a checkpoint's weights into `model`; `TaskError` where they are not its own."""
    if not path.name.endswith(_SUFFIXES):
        raise TaskError(
            f"{path.name} is not a Keras weights file; expected a name that ends in "
            f"{', '.join(_SUFFIXES)}, as model.save_weights and model.save write it"
        )
    try:
        with _without_optimizers(model):
            model.load_weights(str(path))
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise TaskError(
            f"{path.name} does not fit the model of build_model: {_cause(error)}"
        ) from error


@contextlib.contextmanager
def _without_optimizers(model: Any) -> Iterator[None]:
    """Hide a model's optimizers from what walks through all that a file may hold."""
    held = optimizer_attributes(model)
    try:
        vars(model).update(dict.fromkeys(held))
        yield
    finally:
        vars(model).update(held)


def _cause(error: Exception) -> str:
    """Return the line that says what is wrong, which Keras puts after a count of failures."""
    parts = [part.strip() for part in str(error).split("\n\n") if part.strip()]
    said = parts[1] if len(parts) > 1 and "could not be loaded" in parts[0] else "".join(parts[:1])
    return said.splitlines()[0] if said else type(error).__name__
