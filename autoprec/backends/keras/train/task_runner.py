"""How a Keras task is run, wherever it is run: placement, seeding, the model, one training step.

Timing sessions, descriptions and numerical traces share these mechanics, so that all of them train
exactly what the user trains: through the model's own train function, the one `fit` calls.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from autoprec.backends import registry
from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.optimizer_attributes import (
    optimizer_attributes,
    optimizers_of,
    replace_optimizers,
)
from autoprec.backends.keras.apply.replicas import scope_of
from autoprec.backends.keras.apply.untracked_state import (
    carried_states,
    stored_value,
    untracked_variables,
)
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.backends.keras.train.checkpoint_loading import load_weights
from autoprec.backends.protocol import Task
from autoprec.backends.shared.raising_modules import note_modules
from autoprec.errors import TaskError


def build_model(task: Task, seed: int, batch: Any) -> Any:
    """Build the user's compiled model with all generators seeded, its variables made for `batch`.

    A gradient clip the task names is given to an optimizer that clips nothing itself. The model
    begins with the weights of the task's checkpoint, where there is one.
    """
    keras.utils.set_random_seed(seed)
    model = task.build_model()
    if not isinstance(model, keras.Model):
        registry.refuse_keras_2(model)
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise TaskError(
            f"{task.name}: build_model returned {kind}, expected a compiled keras.Model; return "
            "the model from build_model"
        )
    if not getattr(model, "compiled", False) or not optimizers_of(model):
        raise TaskError(
            f"{task.name}: build_model returned a model that is not compiled with an optimizer; "
            "call model.compile(optimizer=..., loss=...) before returning it"
        )
    make_variables(model, batch)
    if not model.trainable_variables:
        raise TaskError(
            f"{task.name}: build_model returned a model without trainable weights; there is "
            "nothing to train"
        )
    if task.checkpoint is not None:
        load_weights(model, task.checkpoint)
    _clip(task, model)
    return model


def make_variables(model: Any, batch: Any) -> None:
    """Make what a first `fit` would: weights, metrics, and the optimizer's variables.

    A layer that makes variables when it is called, as a stateful recurrent one does, makes them in
    a function that never runs.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with scope_of(model):
        if not on_tensorflow() or not _built_of_shapes(model, batch):
            if on_tensorflow():
                _trace_forward(model, x)
                _built_of_shapes(model, batch)  # else the first step makes what is missing
            else:
                model._symbolic_build(data_batch=batch)
        if not model.built:
            model(x)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)


def _built_of_shapes(model: Any, batch: Any) -> bool:
    try:
        model._symbolic_build(data_batch=batch)
    except Exception:
        return False
    return True


def _trace_forward(model: Any, x: Any) -> None:
    import tensorflow as tf

    tf.function(lambda: model(x, training=False), autograph=False).get_concrete_function()


def _clip(task: Task, model: Any) -> None:
    for optimizer in optimizers_of(model):
        clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
        if task.clip_grad_norm is not None and not any(clip is not None for clip in clips):
            optimizer.global_clipnorm = task.clip_grad_norm


def state_variables(model: Any) -> list[Any]:
    """List the model's state that training changes: weights, statistics, seeds; no metrics.

    What stateful recurrent layers carry from batch to batch follows, then what Keras does not know.
    """
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    untracked = [each.variable for each in untracked_variables(model, layer_units(model))]
    known = (v for v in model.variables if id(v) not in metrics)
    return [*known, *carried_states(model), *untracked]


@contextlib.contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Put the model's state back at the end as it was, whatever is run inside."""
    before = [(variable, stored_value(variable)) for variable in state_variables(model)]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


class VariableMemory:
    """The memory of a model's variables, to be given back once nothing in Python holds them.

    TensorFlow keeps the graphs of a train function, and with them the buffers of every variable
    the step has touched, long after model and variables are gone. A variable that is still alive,
    such as a pretrained part that the task shares between its models, is left alone.
    """

    def __init__(self, model: Any) -> None:
        self._held: list[tuple[Any, Any, Any]] = []
        if not on_tensorflow():
            return
        for variable in _all_variables(model):
            handle = getattr(variable.value, "handle", None)
            if handle is not None:
                self._held.append((weakref.ref(variable), handle, variable.value.dtype))

    def free(self) -> None:
        """Empty the buffers of variables that are gone; call it after collecting garbage."""
        for reference, handle, dtype in self._held:
            if reference() is None:
                import tensorflow as tf

                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros((0,), dtype))
        self._held.clear()


def _all_variables(model: Any) -> Iterator[Any]:
    """Yield every variable of a model, its metrics and its optimizers."""
    yield from model.variables
    for optimizer in optimizers_of(model):
        yield from optimizer.variables


def loss_in_logs(logs: Any) -> Any:
    """Return the loss in what a train function returned: a dict with "loss", or the loss."""
    if isinstance(logs, dict):
        if "loss" in logs:
            return logs["loss"]
        named = [value for key, value in logs.items() if "loss" in key]
        if named:
            return sum(named)
        raise TaskError(
            f"train_step returned {', '.join(logs) or 'an empty dict'}, expected a 'loss' in it"
        )
    return keras.tree.flatten(logs)[0]


@contextlib.contextmanager
def raising_layers_noted(model: Any) -> Iterator[None]:
    """Note on an exception which of the model's layers it was raised in; it is raised on."""
    try:
        yield
    except Exception as error:
        note_modules(
            error,
            {id(layer): unit.path for unit in layer_units(model) for layer in unit.members},
        )
        raise


def to_float(tensor: Any) -> float:
    """Return a scalar tensor's value; waits for the device."""
    return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


class GradientRecorder:
    """Stands in for one of a model's optimizers during a train_step, and keeps what it is given.

    Whatever train_step the model has, its loss comes through `scale_loss` and its gradients through
    `apply` or `apply_gradients`. Nothing is updated. Everything else is the optimizer's own, its
    class too: a train_step may look for its model's optimizer. `on_loss` is told of each loss.
    """

    def __init__(
        self, optimizer: Any, scale: Any, on_loss: Callable[[Any], None] | None = None
    ) -> None:
        self.stands_for = optimizer
        self._scale, self._on_loss = scale, on_loss
        self.loss: Any = None
        self.gradients: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.stands_for)

    def scale_loss(self, loss: Any) -> Any:
        """Keep the loss; return it scaled. A number is no loss, but a limit to gradients."""
        if isinstance(loss, int | float):
            return keras.ops.multiply(keras.ops.cast(self._scale, "float32"), loss)
        self.loss = loss
        if self._on_loss is not None:
            self._on_loss(loss)
        return keras.ops.multiply(loss, keras.ops.cast(self._scale, loss.dtype))

    def apply_gradients(self, grads_and_vars: Any) -> None:
        """Keep the gradients."""
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients; those of a loss that was not scaled are scaled now."""
        known = trainable_variables or self.stands_for._trainable_variables
        for gradient, variable in zip(grads, known, strict=True):
            if gradient is not None:
                found = keras.ops.convert_to_tensor(gradient)
                if self.loss is None:
                    found = keras.ops.multiply(found, keras.ops.cast(self._scale, found.dtype))
                self.gradients[id(variable)] = found


def loss_and_gradients(
    model: Any, batch: Any, scale: Any = 1.0, on_loss: Callable[[Any], None] | None = None
) -> tuple[Any, list[Any]]:
    """Return one batch's loss, and its gradient times `scale` for every trainable variable.

    The model's own train_step computes both, with however many optimizers the model holds; an
    absent gradient is zero, and there is none at all where no optimizer is given any. Statistics
    and seeds move on as in training. Where train_step never calls `scale_loss`, the loss is the one
    it returns. `on_loss` is called with each loss that an optimizer scales, before its gradient.
    """
    recorders = {id(each): GradientRecorder(each, scale, on_loss) for each in optimizers_of(model)}
    held = optimizer_attributes(model)
    vars(model).update(
        (name, replace_optimizers(value, lambda each: recorders[id(each)]))
        for name, value in held.items()
    )
    try:
        logs = model.train_step(batch)
    finally:
        vars(model).update(held)
    losses = [each.loss for each in recorders.values() if each.loss is not None]
    loss = sum(losses[1:], losses[0]) if losses else loss_in_logs(logs)
    found: dict[int, Any] = {}
    for recorder in recorders.values():
        found.update(recorder.gradients)
    gradients = [
        found.get(id(v), keras.ops.zeros(v.shape, v.dtype)) for v in model.trainable_variables
    ]
    return keras.ops.cast(loss, "float32"), gradients if found else []


def gradient_function(model: Any) -> Any:
    """Return `loss_and_gradients` as a function of (batch, scale), compiled as `fit` would."""
    return step_function(model, functools.partial(loss_and_gradients, model))


def step_function(model: Any, run: Callable[[Any, Any], Any]) -> Any:
    """Return `run`, a function of (batch, scale), compiled as `fit` would compile the model."""
    if not on_tensorflow() or model.run_eagerly:
        return run
    import tensorflow as tf

    compiled = tf.function(
        run, autograph=False, reduce_retracing=True, jit_compile=bool(model.jit_compile)
    )
    return lambda batch, scale: compiled(batch, tf.constant(scale, tf.float32))
