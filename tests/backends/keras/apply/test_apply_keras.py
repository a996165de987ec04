"""apply_profile on Keras, as a user calls it; profiles that cross between frameworks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import Policy, Recipe, apply_profile, load_profile
from autoprec.api import device_fingerprint
from autoprec.errors import AutoprecWarning
from autoprec.hardware.catalogue import profiles_folder
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.observe import observe
from autoprec.profiles import save_profile
from benchmarks.recordings.machine_replay import RecordedMachine, read_recording

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)
WriteProfile = Callable[[Recipe, str], Path]


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    return model


def fit(model: keras.Model) -> list[float]:
    inputs = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    history = model.fit(
        inputs, np.arange(64) % 4, batch_size=16, epochs=2, verbose=0, shuffle=False
    )
    return [float(loss) for loss in history.history["loss"]]


def test_a_profile_applies_to_a_compiled_model_in_place(write_profile: WriteProfile) -> None:
    expected = fit(build())
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        precision = apply_profile(write_profile(BFLOAT16, "keras"), model=model)
    assert precision.policy is Policy.MIXED_BFLOAT16
    assert precision.batch_size == 16
    assert model.layers[0].compute_dtype == "bfloat16"
    assert model.layers[0].variable_dtype == "float32"
    losses = fit(model)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)


def test_the_machine_is_probed_once(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice on alignment needs what is known of the device as well."""
    path = write_profile(BFLOAT16, "keras")
    machines: list[Machine] = []

    class Counted(Machine):
        def __init__(self) -> None:
            machines.append(self)

    monkeypatch.setattr("autoprec.hardware.probes.observe.Machine", Counted)
    apply_profile(path, model=build())
    assert len(machines) == 1


def test_without_a_model_the_global_policy_is_set_and_can_be_put_back(
    write_profile: WriteProfile,
) -> None:
    before = keras.config.dtype_policy().name
    with apply_profile(write_profile(BFLOAT16, "keras")):
        assert keras.layers.Dense(4).compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == before


@pytest.mark.parametrize(
    ("how", "layer"), [({}, "float32"), ({"fallback": "rules"}, "bfloat16")], ids=["plain", "rules"]
)
def test_where_no_profile_fits_the_global_policy_is_float32_unless_asked(
    write_profile: WriteProfile,
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any],
    layer: str,
) -> None:
    recorded = profiles_folder() / "recordings" / "intel-sapphire-rapids.json"
    seen = observe(RecordedMachine(read_recording(recorded)))
    path = write_profile(BFLOAT16, "keras")  # of the machine this runs on, not of the recorded one
    path.write_text(path.read_text().replace(device_fingerprint("cpu").family, "another"))
    monkeypatch.setattr("autoprec.recipe_for_device.observe", lambda **_: seen)
    with (
        pytest.warns(AutoprecWarning, match="Run `autoprec tune model.py` here"),
        apply_profile(path, **how),
    ):
        assert keras.layers.Dense(4).compute_dtype == layer
    model = build()
    with pytest.warns(AutoprecWarning, match="no profile fits this device"):
        apply_profile(path, model=model, **how)
    assert model.layers[0].compute_dtype == layer


def test_float16_wraps_the_optimizer_with_the_recipes_scale(write_profile: WriteProfile) -> None:
    recipe = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=16)
    recipe = replace(recipe.with_policy(Policy.MIXED_FLOAT16))
    model = build()
    precision = apply_profile(write_profile(recipe, "keras"), model=model)
    fit(model)
    assert precision.scale == recipe.loss_scale.initial
    assert precision.skipped == 0


def test_a_torch_profile_says_what_it_cannot_carry_over(write_profile: WriteProfile) -> None:
    recipe = replace(BFLOAT16, float32_modules=("encoder.norm",), memory_format="channels_last")
    model = build()
    with pytest.warns(AutoprecWarning) as caught:
        precision = apply_profile(write_profile(recipe, "torch"), model=model)
    said = " ".join(str(warning.message) for warning in caught)
    for thing in ("encoder.norm", "channels_last", "batch 16"):
        assert thing in said
    assert precision.policy is Policy.MIXED_BFLOAT16


def test_a_profile_reads_the_same_under_either_framework(
    write_profile: WriteProfile, tmp_path: Path
) -> None:
    profile = load_profile(write_profile(BFLOAT16, "keras"))
    save_profile(profile, tmp_path / "again.yaml")
    assert load_profile(tmp_path / "again.yaml") == profile


@pytest.mark.parametrize("before_model", [False, True], ids=["model", "before the model"])
def test_an_inconclusive_tuning_is_said_once_and_gives_way_to_a_conclusive_one(
    before_model: bool, write_profile: WriteProfile, tmp_path: Path
) -> None:
    made = load_profile(write_profile(Recipe(batch_size=16), "keras"))
    vague = replace(made, evidence=replace(made.evidence, inconclusive="it ran at two paces"))
    save_profile(vague, tmp_path / "model.profile.yaml")
    how = {} if before_model else {"model": build()}
    for given in (vague, tmp_path / "model.profile.yaml", tmp_path):
        with (
            pytest.warns(AutoprecWarning, match="inconclusive: float32 was kept") as said,
            apply_profile(given, **how) as precision,
        ):
            fit(how.get("model") or build())
        (told,) = [str(each.message) for each in said if each.category is AutoprecWarning]
        assert "because it ran at two paces. Tune again" in told
        assert precision.policy is Policy.FLOAT32
    conclusive = load_profile(write_profile(BFLOAT16, "keras"))
    save_profile(vague, tmp_path / "model.profile.yaml")
    save_profile(conclusive, tmp_path / "another.profile.yaml")
    with apply_profile(tmp_path, **how) as precision:
        assert precision.policy is Policy.MIXED_BFLOAT16


@pytest.mark.parametrize("given", ["off", None])
def test_off_changes_nothing(given: str | None) -> None:
    expected = fit(build())
    model = build()
    apply_profile(Recipe(policy=Policy.MIXED_FLOAT16, accumulation_steps=2), model=model)
    precision = apply_profile(given, model=model)
    assert precision.policy is Policy.FLOAT32
    assert type(model.optimizer) is keras.optimizers.SGD
    assert fit(model) == expected


@pytest.mark.parametrize("way", ["in place", "its optimizer", "before the model", "before both"])
def test_a_loop_goes_on_where_profiles_are_off(way: str) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    if way == "before both":
        precision = apply_profile("off", optimizer=optimizer)
    if way == "before the model":
        precision = apply_profile("off")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    if way in ("in place", "before the model"):
        model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    if way == "in place":
        precision = apply_profile("off", model=model)
    if way == "its optimizer":
        precision = apply_profile("off", model=model, optimizer=optimizer)
    assert precision.optimizer is optimizer
    inputs, before = np.ones((4, 8), "float32"), model.get_weights()
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.ops.square(model(inputs, training=True)))
        scaled = precision.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    assert precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert float(scaled) == float(loss)
    assert precision.steps == 1
    for now, start, gradient in zip(model.get_weights(), before, gradients, strict=True):
        assert np.allclose(now, start - 0.1 * gradient.numpy(), rtol=0, atol=1e-6)
    precision.restore()
    assert "compile" not in vars(build())


def test_the_environment_switches_a_profile_off_and_fit_gets_the_whole_batch(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC", "off")
    before = keras.config.dtype_policy().name
    recipe = replace(BFLOAT16, accumulation_steps=2)
    with apply_profile(write_profile(recipe, "keras")) as precision:
        assert precision.batch_size == 32
    assert keras.config.dtype_policy().name == before
    assert keras.layers.Dense(4).compute_dtype == "float32"
