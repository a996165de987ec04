"""A session times the steps that `fit` takes; a description says what the model is."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends import registry
from autoprec.backends.keras.apply.dtype_policies import weights_in
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.train.compiling import NotCompiled
from autoprec.backends.keras.train.data import batches
from autoprec.backends.protocol import Task
from autoprec.backends.shared import process_memory
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import TaskError
from autoprec.workers.failures import FailureKind, classify_exception
from tests.backends.keras.keras_models import OwnTrainStep, compiled, data, softmax_net

QUICK = TimingBudget(seconds=0.2, min_steps=3, max_steps=6)


def arrays(batch_size):
    return data(32)


def dataset(batch_size):
    return tf.data.Dataset.from_tensor_slices(data(32)).batch(batch_size)


class Sequence(keras.utils.PyDataset):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def __len__(self):
        return 32 // self.batch_size

    def __getitem__(self, index):
        x, y = data(32)
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return x[rows], y[rows]


def generator(batch_size):
    x, y = data(32)
    for start in range(0, 32, batch_size):
        rows = slice(start, start + batch_size)
        yield x[rows], y[rows], np.ones(len(x[rows]), "float32")


def task(build_data=arrays, build_model=softmax_net, **more):
    return Task(name="task.py", build_model=build_model, build_data=build_data, **more)


def open_session(given, recipe, phases=None):
    report = (lambda phase, step: phases.append(phase)) if phases is not None else lambda *_: None
    return KerasBackend().open(given, recipe, device="cpu", seed=0, report=report)


def describe(given, batch_size=8):
    return KerasBackend().describe(
        given, device="cpu", seed=0, batch_size=batch_size, report=lambda *_: None
    )


@functools.cache
def plain_facts():
    return describe(task())


@pytest.mark.parametrize("kind", [arrays, dataset, Sequence, generator])
def test_every_kind_of_data_is_timed(kind):
    phases = []
    session = open_session(task(kind), Recipe(batch_size=8), phases)
    measured = session.time_steps(QUICK)
    session.close()
    assert measured.samples_per_step == 8
    assert 0 < measured.low <= measured.step_seconds <= measured.high
    assert measured.finite
    assert measured.peak_memory_bytes > 0
    assert measured.data_seconds > 0
    assert phases[:3] == ["data", "build", "warmup"]
    assert phases[-1] == "steps"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8, knobs={"steps_per_execution": 3}),
        Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=64.0)),
        Recipe(batch_size=8, accumulation_steps=2, knobs={"steps_per_execution": 4}),
        Recipe(batch_size=8, compile=True),
    ],
    ids=["bfloat16", "float16", "accumulation", "jit"],
)
def test_every_knob_is_timed_and_samples_are_counted_per_update(recipe):
    session = open_session(task(), recipe)
    measured = session.time_steps(QUICK)
    iterations = int(session._precision.steps)
    session.close()
    assert measured.samples_per_step == 8 * recipe.accumulation_steps
    assert iterations == measured.steps + measured.warmup_steps
    assert keras.config.dtype_policy().name == "float32"


def test_a_loader_that_holds_fewer_samples_is_counted_not_believed():
    session = open_session(task(), Recipe(batch_size=100))
    assert session.time_steps(QUICK).samples_per_step == 32
    session.close()


def test_a_loss_that_is_not_finite_is_reported():
    def model():
        return softmax_net(optimizer=keras.optimizers.SGD(float("inf")))

    session = open_session(task(build_model=model), Recipe(batch_size=8))
    assert not session.time_steps(QUICK).finite
    session.close()


def test_data_are_the_same_for_the_same_seed_and_repeat():
    given = task()
    first = [
        x.sum() for (x, y), _ in zip(batches(given, 8, 1, repeat=True), range(6), strict=False)
    ]
    keras.utils.set_random_seed(99)
    again = [
        x.sum() for (x, y), _ in zip(batches(given, 8, 1, repeat=True), range(6), strict=False)
    ]
    assert first == again
    assert len(list(batches(given, 8, 1))) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (task(build_model=lambda: None), r"returned None, expected a compiled keras\.Model"),
        (task(build_model=lambda: keras.Sequential([keras.layers.Dense(1)])), "not compiled"),
        (task(build_data=lambda n: None), "build_data returned None"),
        (task(build_data=lambda n: []), "yielded no batches"),
        (task(build_data=lambda n: [("a", "b")]), "without any array"),
    ],
)
def test_a_wrong_task_is_told_what_was_expected(given, message):
    with pytest.raises(TaskError, match=message):
        open_session(given, Recipe(batch_size=8))


def test_a_description_counts_what_tensorflows_profiler_counts():
    def model():
        return compiled(
            keras.Sequential(
                [
                    keras.layers.Input((8, 8, 3)),
                    keras.layers.Conv2D(4, 3),
                    keras.layers.DepthwiseConv2D(3),
                    keras.layers.Flatten(),
                    keras.layers.Dense(4, activation="softmax"),
                ]
            )
        )

    facts = describe(
        task(lambda n: [(np.zeros((n, 8, 8, 3), "float32"), np.zeros(n, "int32"))], model)
    )
    net = model()
    forward = tf.function(net).get_concrete_function(tf.TensorSpec((1, 8, 8, 3)))
    profile = tf.compat.v1.profiler.profile(
        forward.graph,
        options=tf.compat.v1.profiler.ProfileOptionBuilder(
            tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
        )
        .with_empty_output()
        .build(),
    )
    backward = 3 * profile.total_float_ops
    assert facts.flops_per_sample == pytest.approx(backward, rel=0.2)
    assert not facts.convolutions, "Keras has no layout to choose: it is fixed when built"
    assert [u.path for u in facts.units] == ["conv2d", "depthwise_conv2d", "flatten", "dense"]
    assert sum(unit.products for unit in facts.units) == pytest.approx(1.0)
    assert {(d.module, d.name, d.size) for d in facts.dimensions} >= {
        ("conv2d", "filters", 4),
        ("dense", "inputs", 64),
        ("dense", "units", 4),
    }


def test_attention_recurrence_and_own_products_have_their_share():
    class Scores(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1))), x)

    def model():
        inputs = keras.Input((6, 8))
        x = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
        x = Scores()(x)
        x = keras.layers.LSTM(4)(x)
        return compiled(keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(x)))

    facts = describe(task(lambda n: [(np.ones((n, 6, 8), "float32"), np.zeros(n, "int32"))], model))
    shares = {unit.path: unit.products for unit in facts.units}
    per_sample = facts.flops_per_sample
    assert shares["lstm"] * per_sample == pytest.approx(3 * 2 * 6 * (8 + 4) * 16)
    assert shares["scores"] * per_sample == pytest.approx(3 * 2 * 2 * 6 * 6 * 8)
    assert shares["multi_head_attention"] * per_sample == pytest.approx(3 * 2 * 2 * 2 * 6 * 6 * 4)
    assert shares["multi_head_attention/query"] * per_sample == pytest.approx(3 * 2 * 6 * 8 * 8)


def test_kernels_and_kept_bytes_are_counted_from_the_graph():
    def model():
        inputs = keras.layers.Input((8,))
        x = keras.layers.Dense(16, activation="tanh", use_bias=False)(inputs)
        return compiled(keras.Model(inputs, keras.layers.Dense(4, use_bias=False)(x)))

    facts = describe(task(build_model=model))
    flops = sum(kernel.count * kernel.flops_per_sample for kernel in facts.kernels)
    assert flops == pytest.approx(facts.flops_per_sample)
    first = next(k for k in facts.kernels if k.flops_per_sample == 2 * 8 * 16)
    assert first.bytes_per_sample == 4 * (8 + 16)
    assert first.fixed_bytes == 4 * 8 * 16
    # Inputs and tanh's outputs for the products' gradients; the loss keeps a few numbers more.
    assert 4 * (8 + 16) <= facts.saved_bytes_per_sample <= 4 * (8 + 16 + 4 * 4)
    assert facts.optimizer_bytes >= 0


def test_batch_normalisation_forbids_splitting_and_dropout_does_not():
    def model(layer):
        return compiled(
            keras.Sequential(
                [
                    keras.layers.Input((8,)),
                    keras.layers.Dense(8, activation="relu"),
                    layer,
                    keras.layers.Dense(4, activation="softmax"),
                ]
            )
        )

    normal = describe(task(build_model=lambda: model(keras.layers.BatchNormalization())))
    dropout = describe(task(build_model=lambda: model(keras.layers.Dropout(0.5))))
    assert not normal.splittable
    assert "BatchNorm" in normal.split_reason
    assert dropout.splittable
    assert dropout.split_reason == ""


def test_what_the_task_counts_are_its_samples():
    twos = task(count_samples=lambda batch: len(batch[0]) // 2)
    facts = describe(twos)
    assert facts.samples == 4
    assert not facts.splittable
    assert "first dimension" in facts.split_reason


def test_a_custom_train_step_is_described_and_timed():
    given = task(build_model=lambda: compiled(OwnTrainStep()))
    facts = describe(given)
    assert facts.splittable
    assert facts.flops_per_sample > 0
    assert facts.step_seconds > 0
    assert facts.parameters == 8 * 16 + 16 + 16 * 4 + 4
    session = open_session(given, Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8))
    assert session.time_steps(QUICK).finite
    session.close()


def test_16_bit_data_and_models_are_reported():
    def half(batch_size):
        x, y = data()
        return [(x[:batch_size].astype("float16"), y[:batch_size])]

    def model():
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return softmax_net()
        finally:
            keras.config.set_dtype_policy("float32")

    assert any("float32" in note for note in describe(task(half)).warnings)
    own = describe(task(build_model=model))
    assert own.low_precision == ""
    (said,) = [each for each in own.warnings if "mixed_bfloat16" in each]
    assert said.startswith("the model sets mixed_bfloat16 itself (")
    assert not any("mixed_bfloat16" in each for each in plain_facts().warnings)
    low = describe(task(build_model=by_the_global_policy)).low_precision
    assert "16-bit weights: dense" in low
    assert plain_facts().low_precision == ""


def in_its_own(dtype):
    """A net of 16-bit weights behind a frozen float32 layer, with a head to come."""
    return compiled(
        keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(8, trainable=False),
                keras.layers.Dense(16, "relu", dtype=dtype),
                keras.layers.BatchNormalization(dtype=dtype),
            ]
        )
    )


def head(model, dtype):
    model.add(keras.layers.Dense(4, "softmax", dtype=dtype))
    return model


def by_the_global_policy():
    keras.config.set_dtype_policy("bfloat16")
    try:
        return softmax_net()
    finally:
        keras.config.set_dtype_policy("float32")


def test_the_dtype_of_16_bit_weights_is_named_where_most_have_it_or_all_that_train():
    assert describe(task(build_model=by_the_global_policy)).weights_in == "bfloat16"
    assert weights_in(head(in_its_own("bfloat16"), "bfloat16")) == "bfloat16"
    assert weights_in(head(in_its_own("bfloat16"), "float32")) == "bfloat16"
    assert weights_in(head(in_its_own("float32"), "float16")) == ""
    assert weights_in(head(in_its_own("mixed_bfloat16"), "mixed_bfloat16")) == ""
    assert plain_facts().weights_in == ""


def test_versions_and_devices():
    backend = KerasBackend()
    assert {"python", "keras", "tensorflow"} <= set(backend.versions())
    assert list(backend.devices())[-1] == "cpu"
    assert registry.owner(softmax_net()) == "keras"


def augmented():
    """Keras compiles no model with this layer, and says so in a warning only."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.RandomRotation(0.1, name="turn")(inputs)
    outputs = keras.layers.Dense(4, activation="softmax")(keras.layers.Flatten()(x))
    return compiled(keras.Model(inputs, outputs))


def pictures(batch_size):
    return [(np.ones((batch_size, 8, 8, 3), "float32"), np.zeros(batch_size, "int32"))]


def test_a_model_that_keras_does_not_compile_is_described_so():
    reason = describe(task(pictures, augmented)).not_compilable
    assert reason.startswith("Keras does not compile a model with turn (RandomRotation)")
    assert plain_facts().not_compilable == ""


@pytest.mark.filterwarnings("ignore:Model doesn't support `jit_compile=True`")
def test_a_recipe_that_says_compiled_and_is_not_is_unsupported():
    recipe = Recipe(batch_size=8, compile=True)
    with pytest.raises(NotCompiled, match="turn") as raised:
        open_session(task(pictures, augmented), recipe)
    assert classify_exception(raised.value) is FailureKind.UNSUPPORTED
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(NotCompiled, match="run_functions_eagerly"):
            open_session(task(), recipe)
    finally:
        tf.config.run_functions_eagerly(False)


def test_steps_in_which_memory_still_grows_are_warm_up(monkeypatch):
    peak = [0]

    def growing():
        peak[0] = min(peak[0] + 2**30, 4 * 2**30)
        return peak[0]

    session = open_session(task(), Recipe(batch_size=8))
    monkeypatch.setattr(process_memory, "peak_resident_bytes", growing)
    measured = session.time_steps(QUICK)
    assert measured.warmup_steps >= 1 + 3
    assert measured.steps + measured.warmup_steps == int(session._precision.steps)
    session.close()
