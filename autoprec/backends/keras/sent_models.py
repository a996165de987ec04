"""How a Keras model is pickled for another process: its `.keras` file, and what that leaves out.

Keras pickles the file alone, which names classes and functions that the other process does not
know, or knows Keras's own by the same names.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras.src.saving import saving_lib

from autoprec.backends.keras.left_out import LeftOut, finish, give, left_out, own_objects


def reduced(model: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what a pickle calls to make the model again, and with what."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas
        saving_lib._save_model_to_fileobj(model, file, "h5")
    weights = model.get_weights() if _has_adapters(model) else None
    return _received, (file.getvalue(), own_objects(model), left_out(model), weights)


def _has_adapters(model: Any) -> bool:
    """Say whether layers have LoRA's weights: loaded of a file, these are zero and never train."""
    return any(getattr(layer, "lora_enabled", False) for layer in model._flatten_layers())


def _received(
    file: bytes, objects: Mapping[str, Any], parts: Sequence[LeftOut], weights: Any
) -> Any:
    with warnings.catch_warnings(), keras.utils.custom_object_scope(dict(objects)):
        warnings.simplefilter("ignore")
        model = saving_lib._load_model_from_fileobj(
            io.BytesIO(file), custom_objects=None, compile=True, safe_mode=False
        )
    give(parts, model)
    if weights is not None:
        model.set_weights(weights)
        finish(model)
    return model
