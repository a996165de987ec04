"""A compiled model with its data is the task that a task file would make of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.capture import task_of
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.capture import from_keras
from autoprec.backends.keras.capture_data import batches_of
from autoprec.backends.keras.train.data import batches, to_tensors
from autoprec.backends.keras.train.task_runner import build_model, loss_and_gradients, to_float
from autoprec.backends.protocol import Task
from autoprec.errors import TaskError, UsageError
from autoprec.workers.training_calls import CALLS

BATCHES = (8, 16, 64)


def model_of(**settings: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu", name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, name="last"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = {"optimizer": keras.optimizers.Adam(3e-4, clipnorm=1.0), "loss": loss, **settings}
    model.compile(**given)
    return model


def arrays(count: int = 128) -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(count, 6)).astype("float32")
    return features, generator.integers(0, 3, count)


def dataset(size: int = 8) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(size)


class Rows(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> Any:
        rows = slice(8 * place, 8 * place + 8)
        return tuple(each[rows] for each in arrays())


def written_task(build_data: Any) -> Task:
    return Task(name="task.py", build_model=model_of, build_data=build_data)


def first_loss(task: Task, batch_size: int) -> float:
    batch = next(batches(task, batch_size, 0))
    model = build_model(task, 0, batch)
    return to_float(loss_and_gradients(model, to_tensors(batch))[0])


def generated() -> Iterator[Any]:
    features, targets = arrays()
    for start in range(0, 128, 8):
        yield features[start : start + 8], targets[start : start + 8]


DATA: dict[str, Any] = {
    "arrays": (arrays, lambda size: arrays()),
    "tf.data": (lambda: (dataset(),), dataset),
    "PyDataset": (lambda: (Rows(),), dataset),
    "generator": (lambda: (generated(),), dataset),
}


@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("kind", list(DATA))
def test_the_first_loss_is_that_of_the_task_file(kind: str, batch_size: int) -> None:
    given, build_data = DATA[kind]
    task = task_of((model_of(), *given()), name="train.py:build")
    assert first_loss(task, batch_size) == pytest.approx(
        first_loss(written_task(build_data), batch_size), rel=1e-6
    )


@pytest.mark.parametrize("kind", ["tf.data", "PyDataset", "generator"])
def test_at_their_own_batch_the_data_are_what_was_given(kind: str) -> None:
    task = task_of((model_of(), *DATA[kind][0]()), name="task")
    assert task.batch_size == 8
    for (x, _), (expected, _) in zip(
        islice(batches(task, 8, 0), 4), islice(iter(dataset()), 4), strict=True
    ):
        assert np.array_equal(np.asarray(x), np.asarray(expected))


def test_arrays_have_fits_batch_and_sample_weights() -> None:
    features, targets = arrays()
    assert from_keras(model_of(), features, targets, name="task").batch_size == 32
    task = from_keras(model_of(), features, targets, np.ones(128), 16, name="task")
    assert task.batch_size == 16
    assert len(next(batches(task, 16, 0))) == 3


class Recording(keras.Model):
    """Keeps what its steps are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []
        self.last = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(x)

    def train_step(self, data: Any) -> Any:
        self.given.append([np.asarray(each) for each in data])
        return super().train_step(data)


def hot() -> tuple[Any, Any]:
    features, targets = arrays()
    return features, np.eye(3, dtype="float32")[targets]


def long_floats() -> tuple[Any, Any]:
    features, targets = arrays()
    return features.astype("float64"), targets.reshape(-1, 1)


WEIGHTS = {0: 0.5, 2: 4.0}

FITTED: dict[str, Any] = {
    "plain": (arrays, {}),
    "validation split": (arrays, {"validation_split": 0.25}),
    "validation data instead": (
        arrays,
        {"validation_split": 0.25, "validation_data": arrays(8)},
    ),
    "weights of classes": (arrays, {"class_weight": WEIGHTS}),
    "of hot classes, split": (hot, {"class_weight": WEIGHTS, "validation_split": 0.5}),
    "of a dataset": (lambda: (dataset(),), {"class_weight": WEIGHTS, "shuffle": False}),
    "of a PyDataset": (lambda: (Rows(),), {"class_weight": WEIGHTS}),
    "in order": (long_floats, {"shuffle": False, "batch_size": 24}),
    "steps": (arrays, {"steps_per_epoch": 5}),
}


@pytest.mark.parametrize("kind", FITTED)
def test_steps_are_given_what_fit_gives_them(kind: str) -> None:
    """The same samples with the same weights, in batches of the same size; in order if asked."""
    given, settings = FITTED[kind]
    model = Recording()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", "mse" if given is hot else loss, run_eagerly=True)
    x, *y = given()
    model.fit(x, *y, verbose=0, **settings)
    given_by_fit = model.given[: settings.get("steps_per_epoch")]

    call = next(each for each in CALLS if each.trainer == "Keras")
    x, *y = given()
    task = call.task_of({"self": model_of(), "x": x, **({"y": y[0]} if y else {}), **settings}, "t")
    assert task.batch_size is not None
    ours = [[np.asarray(each) for each in batch] for batch in batches(task, task.batch_size, 0)]
    for one, other in zip(ours, given_by_fit, strict=True):
        assert [(part.shape, part.dtype) for part in one] == [
            (part.shape, part.dtype) for part in other
        ]
    rows = [
        np.concatenate([np.hstack([part.reshape(len(part), -1) for part in b]) for b in found])
        for found in (ours, given_by_fit)
    ]
    if settings.get("shuffle", True):
        rows = [each[np.lexsort(each.T)] for each in rows]
    assert np.array_equal(*rows)


@pytest.mark.parametrize("batch_size", [8, 12])
@pytest.mark.parametrize("data", [dataset, Rows], ids=["tf.data", "PyDataset"])
def test_weights_of_classes_follow_their_samples_into_other_batches(
    data: Any, batch_size: int
) -> None:
    found = batches_of(data(), None, None, None, "task", class_weight={0: 0.5, 1: 1.0, 2: 4.0})
    task = written_task(found.build)
    for _, y, weights in batches(task, batch_size, 0):
        assert np.array_equal(weights, np.take([0.5, 1.0, 4.0], np.asarray(y)))


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ((*arrays(), np.ones(128)), {"class_weight": WEIGHTS}, "without sample weights"),
        ((dataset(), None, None), {"validation_split": 0.5}, "only supported for tensors or NumPy"),
        ((*arrays(2), None), {"validation_split": 0.9}, "not sufficient to split"),
    ],
)
def test_what_fit_refuses_is_refused(given: Any, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches_of(*given, None, "task", **settings)


def test_a_clone_keeps_weights_frozen_layers_and_the_compilation() -> None:
    model = model_of(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    model.get_layer("first").trainable = False
    model.compile(optimizer=keras.optimizers.SGD(0.25, momentum=0.9), loss=lambda y, p: p[:, 0])
    before = model.get_weights()
    task = from_keras(model, *arrays(), name="task")
    one, other = task.build_model(), task.build_model()
    one.fit(*arrays(16), verbose=0)
    for clone in (other, model):
        assert all(np.array_equal(a, b) for a, b in zip(before, clone.get_weights(), strict=True))
    assert not np.array_equal(one.get_weights()[-1], before[-1])
    assert [layer.trainable for layer in other.layers] == [False, True, True]
    assert float(other.optimizer.learning_rate.numpy()) == 0.25
    assert other.optimizer.momentum == 0.9
    assert other.optimizer is not one.optimizer


def test_accumulation_is_the_tasks() -> None:
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    task = from_keras(model_of(optimizer=optimizer), *arrays(), name="task")
    assert task.batch_size == 64
    assert task.build_model().optimizer.gradient_accumulation_steps is None


@keras.saving.register_keras_serializable()
class Subclassed(keras.Model):
    def __init__(self, width: int = 16, **settings: Any) -> None:
        super().__init__(**settings)
        self.width = width
        self.first, self.last = keras.layers.Dense(width), keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def get_config(self) -> Any:
        return {"width": self.width}


class Unknown(Subclassed):
    def get_config(self) -> Any:
        raise NotImplementedError("no configuration")


def compiled(kind: type[Any], **settings: Any) -> Any:
    model = kind(**settings)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_model_that_was_never_called_is_built_once() -> None:
    task = from_keras(compiled(Subclassed, width=5), *arrays(), name="task")
    one, other = task.build_model().get_weights(), task.build_model().get_weights()
    assert one[0].shape == (6, 5)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_model_that_cannot_be_cloned_names_get_config_and_the_task_file() -> None:
    task = from_keras(compiled(Unknown), *arrays(), name="task")
    with pytest.raises(TaskError, match=r"no configuration.*get_config\(\).*write a task file"):
        task.build_model()


class Gan(Subclassed):
    def compile(self, one: Any, other: Any) -> None:
        super().compile(loss="mse")
        self.one, self.other = one, other


def gan() -> Any:
    model = Gan()
    model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [(gan, "several optimizers or a compile"), (Subclassed, "is not compiled")],
)
def test_what_cannot_be_tuned_is_refused_with_the_way_out(build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_keras(build(), *arrays(), name="task")


def padded() -> Iterator[Any]:
    for length in (6, 7, 6, 8):
        yield np.zeros((4, length), "float32"), np.zeros(4)


def padded_dataset() -> Any:
    samples = tf.data.Dataset.from_tensor_slices(np.arange(1, 9)).map(
        lambda count: (tf.zeros([count]), 0)
    )
    return samples.padded_batch(4)


def test_a_data_set_that_is_padded_batch_by_batch_keeps_its_batch() -> None:
    found = batches_of(padded_dataset(), None, None, None, "task")
    assert found.own == 4
    assert "whose shape is not fixed, padded batch by batch" in found.fixed


def test_a_padded_iterator_keeps_its_batch() -> None:
    found = batches_of(padded(), None, None, None, "task")
    assert found.own == 4
    assert "pads each batch by itself" in found.fixed
    assert len(list(found.build(64))) == 4


def test_a_batch_that_the_data_fix_is_not_split() -> None:
    def texts() -> Iterator[Any]:
        generator = np.random.default_rng(1)
        for length in (6, 7, 6, 8):
            yield generator.normal(size=(4, length, 1)).astype("float32"), np.arange(4) % 3

    model = keras.Sequential(
        [keras.Input((None, 1)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    task = from_keras(model, texts(), name="task")
    facts = KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=4, report=lambda *_: None
    )
    assert facts.batch_size == 4
    assert facts.fixed_batch
    assert not facts.splittable
    assert "pads each batch by itself" in facts.split_reason


def test_it_is_described_at_its_own_batch() -> None:
    task = from_keras(model_of(), *arrays(), name="task")
    facts = KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=32, report=lambda *_: None
    )
    assert facts.batch_size == facts.samples == 32
