"""The outputs of a model's calls during a step, to be compared between two runs.

They are what the outermost calls return: the model's, or where a train_step calls its parts by
themselves, theirs. What is large is sampled, every sample of the batch alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from autoprec.backends.keras.apply.layer_names import child_layers
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.nested_outputs import tensors_in
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.backends.keras.train.task_runner import (
    loss_and_gradients,
    loss_in_logs,
    step_function,
)
from autoprec.core.numerics.output_scale import scale_of
from autoprec.errors import TaskError

MAX_ELEMENTS = 1 << 16
"""How many elements of one output are kept for each sample."""


@dataclass(frozen=True)
class Outputs:
    """What a batch or a part of it gives: a matrix for each output, and the number of samples."""

    matrices: Sequence[Any]
    samples: int


def observing_function(model: Any) -> Any:
    """Return a function of (batch, scale), compiled as `fit` would: loss, gradients and outputs."""

    def run(batch: Any, scale: Any) -> tuple[Any, list[Any], list[Any]]:
        loss, gradients, outputs, _ = observed_step(model, batch, scale)
        return loss, gradients, outputs

    return step_function(model, run)


def observed_step(model: Any, batch: Any, scale: Any) -> tuple[Any, list[Any], list[Any], Any]:
    """Return one batch's loss, gradients, outputs as matrices, and its number of samples."""
    with _outputs_recorded(model) as found:
        loss, gradients = loss_and_gradients(model, batch, scale)
        samples = _length(batch)
    outputs = [_matrix(each, samples) for each in found if _is_known(each)]
    return loss, gradients, outputs, samples


def answered_step(model: Any, batch: Any, scale: Any) -> tuple[Any, list[Any], Outputs, list[Any]]:
    """Return one batch's loss, gradients, outputs, and the loss's gradient of each output.

    Run it eagerly. That gradient is a matrix as the output is; None where it is not known: of a
    loss that is not scaled by the optimizer, of one of several, of an output that is sampled.
    """
    with _outputs_recorded(model) as found, _answers(found) as answers:
        loss, gradients = loss_and_gradients(model, batch, scale, answers.note)
        samples = _length(batch)
    outputs, known = [], []
    for index, output in enumerate(found):
        if _is_known(output):
            matrix, answer = _matrix(output, samples), answers.of(index)
            whole = answer is not None and ops.size(matrix) == ops.size(answer)
            outputs.append(matrix)
            known.append(ops.reshape(answer, matrix.shape) if whole else None)
    return loss, gradients, Outputs(outputs, int(samples)), known


class _Answers:
    """The gradients of outputs that the loss of a step gives, without a pass through the model."""

    def __init__(self, found: Sequence[Any]) -> None:
        self._found, self._losses = found, 0
        self._gradients: Sequence[Any] = ()
        self.tape: Any = None

    def note(self, loss: Any) -> None:
        """Compute them for the first loss."""
        self._losses += 1
        if self._losses == 1:
            self._gradients = self._of_loss(loss)

    def of(self, index: int) -> Any:
        """Return that of an output, in float32; None if it is not known."""
        if self._losses != 1 or index >= len(self._gradients):
            return None
        gradient = self._gradients[index]
        return None if gradient is None else ops.cast(gradient, "float32")

    def _of_loss(self, loss: Any) -> Sequence[Any]:
        reals = [_is_real(each) for each in self._found]
        outputs = [each for each, real in zip(self._found, reals, strict=True) if real]
        if self.tape is not None:
            found = iter(self.tape.gradient(loss, outputs))
        else:
            import torch

            made = [each for each in outputs if each.requires_grad]
            answers = torch.autograd.grad(loss, made, retain_graph=True, allow_unused=True)
            known = {id(each): answer for each, answer in zip(made, answers, strict=True)}
            found = iter([known.get(id(each)) for each in outputs])
        return [next(found) if real else None for real in reals]


@contextlib.contextmanager
def _answers(found: Sequence[Any]) -> Iterator[_Answers]:
    """Let a tape of TensorFlow's see what is made of outputs inside, until the loss is noted."""
    answers = _Answers(found)
    if not on_tensorflow():
        yield answers
        return
    import tensorflow as tf

    with tf.GradientTape() as answers.tape:
        yield answers


class Evaluation:
    """A model's own `test_step` as a function of a batch, compiled as `evaluate` would.

    It gives the loss, NaN where the logs hold none, and the model's outputs. `error` is what the
    step raised when it was last traced, or run eagerly; the outputs are those until then.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.error: Exception | None = None
        self._function = step_function(model, self._evaluate)

    def __call__(self, batch: Any, scale: float) -> tuple[Any, list[Any]]:
        """Return loss and outputs."""
        found: tuple[Any, list[Any]] = self._function(batch, scale)
        return found

    def _evaluate(self, batch: Any, scale: Any) -> tuple[Any, list[Any]]:
        loss, self.error = ops.convert_to_tensor(math.nan, "float32"), None
        with _outputs_recorded(self._model) as found:
            try:
                logs = self._model.test_step(batch)
            except Exception as error:
                self.error = error
            else:
                with contextlib.suppress(TaskError):  # a step that returns no loss
                    loss = ops.cast(loss_in_logs(logs), "float32")
            samples = _length(batch)
        return loss, [_matrix(each, samples) for each in found if _is_known(each)]


class _Recorder(Hook):
    """A layer's `call` that notes its outputs, unless it is called by another recorded one."""

    def __init__(self, original: Callable[..., Any], found: list[Any], open_calls: list[Any]):
        super().__init__(original)
        self._found, self._open_calls = found, open_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._open_calls.append(self)
        try:
            result = self.original(*args, **kwargs)
        finally:
            self._open_calls.pop()
        if not self._open_calls:
            self._found += tensors_in(result)
        return result


@contextlib.contextmanager
def _outputs_recorded(model: Any) -> Iterator[list[Any]]:
    """Collect the outputs of what is called inside."""
    found: list[Any] = []
    open_calls: list[Any] = []
    hooks = InstalledHooks()
    for layer in (model, *child_layers(model)):
        hooks.install(layer, "call", _Recorder(layer.call, found, open_calls))
    try:
        yield found
    finally:
        hooks.restore()


def _is_real(tensor: Any) -> bool:
    return _is_known(tensor) and "complex" not in keras.backend.standardize_dtype(tensor.dtype)


def _is_known(tensor: Any) -> bool:
    """Say whether an output is a dense tensor of numbers that this function can return.

    TensorFlow's loops and branches, and functions inside this one, keep theirs.
    """
    if not ops.is_tensor(tensor) or 0 in tensor.shape:
        return False
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if not ("float" in dtype or "complex" in dtype):
        return False
    if not on_tensorflow():
        return True
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor | tf.RaggedTensor) or tensor.shape.rank is None:
        return False
    here = tf.compat.v1.get_default_graph()
    return tf.executing_eagerly() or getattr(tensor, "graph", None) is here


def _length(batch: Any) -> Any:
    """Return the first dimension of a batch's first array, 1 where none has any."""
    shapes = [ops.shape(leaf) for leaf in keras.tree.flatten(batch) if ops.is_tensor(leaf)]
    return next((shape[0] for shape in shapes if shape), 1)


def _matrix(tensor: Any, samples: Any) -> Any:
    """Return an output as a float32 matrix, a row for every entry of its first dimension.

    Of a part of a batch the same columns are kept as of the whole.
    """
    if "complex" in keras.backend.standardize_dtype(tensor.dtype):
        tensor = ops.stack([ops.real(tensor), ops.imag(tensor)], -1)
    shape = ops.shape(tensor)
    rows = ops.reshape(tensor, (shape[0] if shape else 1, -1))
    static = all(isinstance(length, int) for length in shape)
    size = math.prod(shape) if static else ops.size(rows)
    every = -(-size // (samples * MAX_ELEMENTS))
    return ops.cast(rows[:, ::every], "float32")


def outputs_error(candidate: Sequence[Outputs], reference: Sequence[Outputs]) -> float | None:
    """Return how far outputs are apart, relative to how they vary over the batch.

    Parts are put together first. Where that gives other shapes, such as of a mean over the batch,
    an output is not compared; other shapes of a whole batch are an infinite error: None.
    """
    if not candidate or not reference:
        return 0.0
    (whole,) = reference
    split = len(candidate) > 1
    if any(len(part.matrices) != len(whole.matrices) for part in candidate):
        return 0.0 if split else None
    difference = spread = size = 0.0
    for index, theirs in enumerate(whole.matrices):
        found = [_rows(candidate, index, stacked=stacked) for stacked in (False, True)]
        if found[0] is None or found[0].shape != theirs.shape:
            if split:
                continue
            return None
        difference += min(_difference(each, theirs) for each in found if each is not None)
        known = np.nan_to_num(theirs, nan=0.0, posinf=0.0, neginf=0.0)
        spread += _square(known - known.mean(0, keepdims=True) if len(known) > 1 else known)
        size += _square(known)
    scale = scale_of(spread**0.5, size**0.5)
    if not difference < float("inf"):
        return None
    if difference == 0.0:
        return 0.0
    return float(difference**0.5 / scale) if scale else None


def _rows(parts: Sequence[Outputs], index: int, *, stacked: bool) -> Any:
    """Put an output of all parts together, a sample's rows side by side; None: they do not fit.

    With `stacked`, an output has several rows for every sample because several batches were put
    one after the other (real samples and made ones, two views): each is put together by itself.
    """
    matrices = [part.matrices[index] for part in parts]
    if len({each.shape[1:] for each in matrices}) > 1:
        return None
    if not stacked:
        return np.concatenate(matrices)
    blocks = {len(part.matrices[index]) / part.samples for part in parts}
    if len(blocks) > 1 or not (count := blocks.pop()).is_integer() or count < 1:
        return None
    (columns,) = matrices[0].shape[1:]
    split = [each.reshape(int(count), -1, columns) for each in matrices]
    return np.concatenate(split, axis=1).reshape(-1, columns)


def _difference(found: Any, theirs: Any) -> float:
    same = (found == theirs) | (np.isnan(found) & np.isnan(theirs))
    return _square(np.where(same, 0.0, found - theirs))


def _square(values: Any) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))
