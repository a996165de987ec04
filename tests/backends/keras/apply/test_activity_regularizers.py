"""What a layer adds to the loss for its activity is summed in float32, and saved as given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from autoprec import apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe

BATCH = 128


def model() -> Any:
    layers = keras.layers
    made = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(
                2048,
                kernel_initializer=keras.initializers.VarianceScaling(10.0, "fan_avg"),
                activity_regularizer=keras.regularizers.L1L2(1e-3, 1e-3),
            ),
            layers.LayerNormalization(),
            layers.Dense(1),
        ]
    )
    made.compile(keras.optimizers.SGD(1e-4), "mse")
    return made


def batch() -> Any:
    x = np.random.default_rng(0).normal(size=(BATCH, 64)).astype("float32")
    return x, x[:, :1]


@pytest.mark.parametrize("policy", [Policy.MIXED_FLOAT16, Policy.MIXED_BFLOAT16])
def test_small_activities_of_a_large_batch_do_not_overflow(policy: Policy) -> None:
    """Their squares sum to more than float16 holds."""
    x, y = batch()
    trained = model()
    assert float(np.square(trained.layers[0](x)).sum()) > 2.0 * 65504.0
    plain = trained.evaluate(x, y, verbose=0)
    trained(x)
    (added,) = trained.losses
    scale = LossScale(initial=2.0**6) if policy.needs_loss_scale else None
    with apply_profile(Recipe(policy, BATCH, loss_scale=scale), model=trained) as precision:
        trained(x)
        assert float(trained.losses[0]) == pytest.approx(float(added), rel=1e-3)
        assert trained.evaluate(x, y, verbose=0) == pytest.approx(plain, rel=1e-3)
        trained.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
        assert precision.skipped == 0
    assert trained.evaluate(x, y, verbose=0) == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("twice", [False, True])
def test_files_and_clones_hold_the_users_regularizer(twice: bool, tmp_path: Path) -> None:
    made = model()
    given = made.layers[0].activity_regularizer
    around = keras.Sequential([made, keras.layers.Dense(1)])
    around(batch()[0])
    recipe = Recipe(Policy.MIXED_FLOAT16, BATCH)
    with apply_profile(recipe, model=made):
        outer = apply_profile(recipe, model=around) if twice else None
        made.save(tmp_path / "model.keras")
        clone = keras.models.clone_model(made)
        if outer is not None:
            outer.restore()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (clone, loaded):
        assert each.layers[0].activity_regularizer.get_config() == given.get_config()
    assert made.layers[0].activity_regularizer is given
