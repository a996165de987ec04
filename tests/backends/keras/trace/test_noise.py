"""Where the proof puts its noise: on every trained weight, and on nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.trace.model_under_recipe import KerasTrainee

pytestmark = pytest.mark.keras

NOISE = 2.0**-9


def test_noise_is_on_all_trained_weights_and_on_nothing_else() -> None:
    layers = keras.layers
    frozen = layers.Dense(64, trainable=False)
    model = keras.Sequential(
        [layers.Input((64,)), layers.Dense(64), layers.BatchNormalization(), frozen]
    )
    for each in model.weights:
        each.assign(np.ones(each.shape))
    trainee: Any = SimpleNamespace(model=model)
    KerasTrainee.add_noise(trainee, 3)
    for each in model.trainable_weights:
        away = np.abs(np.asarray(each) - 1.0)
        assert away.max() <= NOISE * 1.001, each.path
        assert away.mean() == pytest.approx(NOISE / 2, rel=0.35), each.path
        assert len(np.unique(np.asarray(each))) > 1, each.path
    assert model.non_trainable_weights
    assert all(bool((np.asarray(each) == 1.0).all()) for each in model.non_trainable_weights)
