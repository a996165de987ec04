"""A recipe applied to a model changes what it computes in, and nothing else."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.apply.layer_names import layer_units, resolve_layers
from autoprec.backends.keras.apply.loss_scaler import ScaledOptimizer
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import UsageError
from tests.backends.keras.keras_models import (
    LogitsThenOwnCode,
    Subclassed,
    compiled,
    data,
    softmax_net,
)

BF16 = Recipe(policy=Policy.MIXED_BFLOAT16)
FP16 = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=2.0**12))


def apply(recipe, model=None, **arguments):
    return KerasSurgeon().apply(recipe, model=model, **arguments)


def policies(model):
    return [layer.dtype_policy.name for layer in model.layers]


def test_without_a_model_the_global_policy_is_set_and_put_back():
    with apply(BF16) as precision:
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        layer = keras.layers.Dense(4)
        assert precision.compute_dtype is DType.BFLOAT16
        assert precision.policy.variable_dtype is DType.FLOAT32
        assert layer.compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_global_policy_with_islands_still_gets_the_tuned_loss_scale():
    recipe = Recipe(
        policy=Policy.MIXED_FLOAT16,
        float32_modules=("sequential/dense_1",),
        loss_scale=LossScale(initial=256.0),
    )
    with apply(recipe) as precision:
        model = softmax_net()
        assert isinstance(model.optimizer, ScaledOptimizer), "compile alone carries it"
        assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32", "float16"]
        assert precision.report.islands == ("dense_1", "dense_2 (activation)")
        assert precision.scale == 256.0
        x, y = data()
        model.fit(x, y, verbose=0)
        assert precision.steps == 1
    assert type(model.optimizer) is keras.optimizers.SGD


def test_in_place_keeps_weights_names_and_the_optimizer():
    model = softmax_net()
    x, y = data()
    model.fit(x, y, verbose=0)
    weights = [w.numpy() for w in model.weights]
    identities = [id(w) for w in model.weights]
    names = [w.path for w in model.weights]
    optimizer = model.optimizer
    apply(BF16, model)
    assert [id(w) for w in model.weights] == identities
    assert [w.path for w in model.weights] == names
    assert all(np.array_equal(a, w.numpy()) for a, w in zip(weights, model.weights, strict=True))
    assert model.optimizer is optimizer, "bfloat16 needs no loss scale"
    assert policies(model) == ["mixed_bfloat16"] * 3


def test_after_a_fit_the_new_policy_is_what_is_trained_with():
    model = softmax_net()
    x, y = data()
    plain = softmax_net()
    plain.set_weights(model.get_weights())
    for net in (model, plain):
        net.fit(x, y, verbose=0, shuffle=False)
    apply(BF16, model)
    losses = [net.fit(x, y, verbose=0, shuffle=False).history["loss"][0] for net in (model, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.parametrize("recipe", [BF16, FP16])
def test_outputs_are_float32_where_a_model_ends_in_a_softmax(recipe):
    x, _ = data()
    dense = softmax_net()
    separate = compiled(
        keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Softmax(name="out")]
        )
    )
    reshaped = compiled(
        keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(4, activation="softmax"),
                keras.layers.Reshape((2, 2)),
            ]
        )
    )
    logits = compiled(keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)]))
    islands = []
    for model in (dense, separate, reshaped, logits):
        islands.append(apply(recipe, model).report.islands)
        assert keras.backend.standardize_dtype(model(x).dtype) == "float32"
    assert islands == [("dense_2 (activation)",), ("out",), ("dense (activation)",), ()]
    assert separate.layers[-1].compute_dtype == "float32"
    sums = keras.ops.convert_to_numpy(dense(x)).sum(axis=-1)
    assert np.abs(sums - 1).max() < 1e-6, "a 16-bit softmax sums to 1 within 1e-3 at best"


@pytest.mark.parametrize(
    ("kind", "island"), [(Subclassed, ("dense_1 (activation)",)), (LogitsThenOwnCode, ())]
)
def test_outputs_are_float32_in_a_model_without_a_graph(kind, island):
    model = kind()
    x, y = data()
    model(x)
    compiled(model)
    precision = apply(BF16, model)
    out = model(x)
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    assert np.abs(keras.ops.convert_to_numpy(out).sum(axis=-1) - 1).max() < 1e-6
    assert tuple(path for path in precision.report.islands) == island
    model.fit(x, y, verbose=0)


def test_a_functional_model_that_ends_in_plain_operations_computes_them_in_float32():
    inputs = keras.Input((8,))
    outputs = keras.ops.softmax(keras.layers.Dense(4)(inputs))
    model = keras.Model(inputs, outputs)
    apply(BF16, model)
    assert np.abs(keras.ops.convert_to_numpy(model(data()[0])).sum(axis=-1) - 1).max() < 1e-6


def test_islands_are_float32_layers_and_the_rest_is_not():
    model = softmax_net()
    precision = apply(Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("dense_1",)), model)
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32", "bfloat16"]
    assert precision.report.islands == ("dense_1", "dense_2 (activation)")


def test_a_container_island_computes_its_own_code_in_float32_and_its_layers_in_16_bits():
    seen = []

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(8)

        def call(self, x):
            y = self.inner(x)
            seen.append((keras.backend.standardize_dtype(y.dtype), self.inner.compute_dtype))
            return x - y

    model = keras.Sequential([keras.layers.Input((8,)), Block(), keras.layers.Dense(2)])
    apply(Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("block",)), model)
    model(data()[0])
    assert seen[-1] == ("float32", "bfloat16")


def test_a_recurrent_layer_is_one_unit():
    model = keras.Sequential(
        [keras.layers.Input((5, 3)), keras.layers.LSTM(4), keras.layers.Dense(2)]
    )
    assert [unit.path for unit in layer_units(model)] == ["", "input_layer", "lstm", "dense"]
    apply(Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("lstm",)), model)
    assert model.layers[0].cell.compute_dtype == "float32"
    apply(BF16, model)
    assert model.layers[0].cell.compute_dtype == "bfloat16"
    model(np.zeros((2, 5, 3), "float32"))


def test_paths_do_not_depend_on_what_was_built_before():
    first = [unit.path for unit in layer_units(softmax_net())]
    second = softmax_net()
    assert second.layers[0].name == "dense_3"
    assert [unit.path for unit in layer_units(second)] == first


def test_a_pattern_must_name_exactly_one_layer():
    units = layer_units(softmax_net())
    assert [unit.path for unit in resolve_layers(("dense_.*2",), units)] == ["dense_2"]
    with pytest.raises(UsageError, match=r"matches 2 layers \(dense_1, dense_2\)"):
        resolve_layers(("dense_.",), units)
    with pytest.raises(UsageError, match="matches no layer"):
        resolve_layers(("attention",), units)


def test_float16_gets_a_loss_scale_and_bfloat16_never():
    model = softmax_net()
    inner = model.optimizer
    precision = apply(FP16, model)
    assert isinstance(model.optimizer, ScaledOptimizer)
    assert model.optimizer.inner_optimizer is inner
    assert precision.scale == 2.0**12
    assert model.get_compile_config()["optimizer"]["class_name"] == "SGD", "what a file says"
    apply(BF16, model)
    assert model.optimizer is inner


def test_the_users_float32_layers_in_a_mixed_model_stay():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(8),
                keras.layers.Dense(4, dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    precision = apply(BF16, model)
    assert precision.report.kept == ("dense_1",)
    assert model.layers[-1].compute_dtype == "float32"


def test_layers_without_floating_weights_and_16_bit_weights_are_left_alone():
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(4, dtype="float16"), keras.layers.Dense(4)]
    )
    precision = apply(BF16, model)
    assert policies(model) == ["float16", "mixed_bfloat16"]
    assert any("16-bit weights" in note for note in precision.warnings)


def test_restore_puts_everything_back():
    model = softmax_net()
    x, y = data()
    model.fit(x, y, verbose=0)
    optimizer, before = model.optimizer, keras.ops.convert_to_numpy(model(x))
    with apply(FP16, model):
        assert model.optimizer is not optimizer
    assert model.optimizer is optimizer
    assert policies(model) == ["float32"] * 3
    assert "call" not in vars(model.layers[-1])
    assert np.array_equal(before, keras.ops.convert_to_numpy(model(x)))


def test_applying_twice_is_applying_once():
    model = softmax_net()
    x, y = data()
    apply(FP16, model)
    model.fit(x, y, verbose=0)
    scaled = model.optimizer
    precision = apply(FP16, model)
    assert model.optimizer.inner_optimizer is scaled.inner_optimizer
    model.fit(x, y, verbose=0)
    assert precision.steps == 1
    assert keras.backend.standardize_dtype(model(x).dtype) == "float32"


def test_a_saved_model_loads_without_the_wrappers_and_is_mixed_again_when_applied(tmp_path):
    model = softmax_net()
    x, y = data()
    apply(BF16, model)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert keras.backend.standardize_dtype(loaded(x).dtype) == "float32"
    precision = apply(BF16, loaded)
    assert precision.report.kept == ()
    assert [layer.compute_dtype for layer in loaded.layers] == ["bfloat16"] * 3
    assert np.array_equal(
        keras.ops.convert_to_numpy(loaded(x)), keras.ops.convert_to_numpy(model(x))
    )


def test_compile_steps_per_execution_and_threads_are_set():
    model = softmax_net()
    recipe = Recipe(compile=True, knobs={"steps_per_execution": 4, "threads": 64})
    precision = apply(recipe, model)
    assert (model.jit_compile, model.steps_per_execution) == (True, 4)
    assert any("64 intra-op threads" in note for note in precision.warnings)
    precision.restore()
    assert (model.jit_compile, model.steps_per_execution) == (False, 1)


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [("jit_compile", False, (False, 1)), ("steps_per_execution", 7, (False, 7))],
)
def test_what_the_script_changed_of_compile_stays_and_the_rest_is_put_back(name, value, left):
    model = softmax_net()
    precision = apply(Recipe(compile=True, knobs={"steps_per_execution": 4}), model)
    setattr(model, name, value)
    precision.restore()
    assert (model.jit_compile, model.steps_per_execution) == left


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("recipe", [Recipe(), BF16])
def test_tf32_and_xla_stay_as_the_task_has_them(recipe, own):
    execution = tf.config.experimental
    before = execution.tensor_float_32_execution_enabled()
    model = softmax_net()
    model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", jit_compile=own)
    try:
        execution.enable_tensor_float_32_execution(own)
        with apply(recipe, model, device="cuda"):
            assert model.jit_compile is own
            assert execution.tensor_float_32_execution_enabled() is own
        with apply(Recipe(policy=Policy.TF32, compile=True), model, device="cuda"):
            assert model.jit_compile
            assert execution.tensor_float_32_execution_enabled()
        assert model.jit_compile is own
        assert execution.tensor_float_32_execution_enabled() is own
    finally:
        execution.enable_tensor_float_32_execution(before)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match=r"expected a keras\.Model"):
        apply(BF16, object())


def test_losses_that_layers_add_in_16_bits_are_summed_in_float32():
    def build():
        keras.utils.set_random_seed(2)
        return compiled(
            keras.Sequential(
                [
                    keras.layers.Input((8,)),
                    keras.layers.Dense(8, activity_regularizer="l2"),
                    keras.layers.Dense(4, activation="softmax"),
                ]
            )
        )

    x, y = data()
    plain, mixed = build(), build()
    apply(BF16, mixed)
    losses = [m.fit(x, y, shuffle=False, verbose=0).history["loss"][0] for m in (plain, mixed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_float16_is_scaled_also_where_the_recipe_says_nothing_and_bfloat16_never_is():
    assert apply(Recipe(policy=Policy.MIXED_FLOAT16), softmax_net()).scale == LossScale().initial
    model = softmax_net()
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, loss_scale=LossScale())
    assert apply(recipe, model).scale == 1.0
    assert type(model.optimizer) is keras.optimizers.SGD


def test_apply_profile_serves_keras():
    model = softmax_net()
    x, y = data()
    precision = apply_profile(BF16, model=model)
    model.fit(x, y, verbose=0)
    assert precision.steps == 1
    with apply_profile(BF16) as before:
        assert keras.layers.Dense(1).compute_dtype == "bfloat16"
        built = softmax_net()
        before.attach(built)
    assert [layer.dtype_policy.name for layer in built.layers] == ["mixed_bfloat16"] * 3


def test_code_that_begins_with_two_layers_gets_the_same_dtype_of_both():
    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = keras.layers.Dense(4), keras.layers.Dense(4)

        def build(self, shape):
            self.left.build(shape)
            self.right.build(shape)

        def call(self, x):
            return tf.matmul(self.left(x), self.right(x), transpose_b=True)

    model = Towers()
    model.build((None, 8))
    model.compile("sgd", "mse")
    x = np.ones((4, 8), "float32")
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4)
    precision = KerasSurgeon().apply(recipe, model=model, device="cpu")
    model.train_on_batch(x, np.ones((4, 4), "float32"))
    assert model(x).dtype == "float32"
    precision.restore()
