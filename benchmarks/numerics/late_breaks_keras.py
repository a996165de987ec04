"""The twins in Keras of the models that break late in 16 bits; see `late_breaks_torch`.

What grows does so with every call, up to a number at which float32 still trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from autoprec import Recipe, apply_profile
from autoprec.backends.keras.apply.applied_recipe import RECIPE_ATTRIBUTE
from autoprec.backends.keras.watch.float32_layers import candidates
from autoprec.core.watch_settings import EVERY
from benchmarks.numerics.late_breaks import BATCH, INPUTS, LAST, NOISE, SLOW, UPDATES, Ended, Pace

layers = keras.layers


class Growing(keras.layers.Layer):  # type: ignore[misc]
    """Code of its own with a number that grows."""

    limit = 1e6

    def __init__(self, pace: Pace, **settings: Any) -> None:
        super().__init__(**settings)
        self.pace = pace

    def build(self, shape: Any) -> None:
        """Make the number."""
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size")

    def grown(self, given: Any) -> Any:
        """Return the number in the layer's dtype, and let it grow."""
        size = ops.cast(self.size, given.dtype)
        self.size.assign(ops.minimum(self.size * self.pace.growth, self.limit))
        return size


class LogitScale(Growing):
    """Scores that are scaled more and more, until float16 overflows."""

    def call(self, given: Any) -> Any:
        """Weigh what is given by its scores."""
        return ops.softmax(given * self.grown(given), -1) * ops.mean(given, -1, keepdims=True)


class NormInput(Growing):
    """A norm whose squares overflow float16."""

    limit = 1e4

    def call(self, given: Any) -> Any:
        """Divide by the root of the mean square."""
        large = given * self.grown(given)
        return large / ops.sqrt(ops.mean(large * large, -1, keepdims=True) + 1e-2)


class Angles(Growing):
    """Sines of its input times a number that grows: a learned frequency."""

    limit = 3000.0

    def call(self, given: Any) -> Any:
        """Return the sines."""
        return ops.sin(given * self.grown(given))


class Residual(Growing):
    """A residual stream with an offset, which a norm takes away again."""

    limit = 300.0

    def call(self, given: Any) -> Any:
        """Normalize the stream."""
        stream = given + self.grown(given)
        middle = stream - ops.mean(stream, -1, keepdims=True)
        return middle / ops.sqrt(ops.mean(middle * middle, -1, keepdims=True) + 1e-2)


class Variance(Growing):
    """A norm by the difference of two large numbers."""

    limit = 20.0

    def call(self, given: Any) -> Any:
        """Normalize what is given."""
        large = given + self.grown(given)
        mean = ops.mean(large, axis=-1, keepdims=True)
        square = ops.mean(large * large, axis=-1, keepdims=True)
        return (large - mean) / ops.sqrt(ops.abs(square - mean * mean) + 1e-2)


class RunningSum(Growing):
    """Time as a count of what was seen, in bfloat16 beyond 256."""

    def call(self, given: Any) -> Any:
        """Return sines of what is given plus the time."""
        counted = ops.cumsum(ops.ones_like(given[:, :1]), 0)
        time = ops.cast(self.size, given.dtype) + counted
        self.size.assign(self.size + BATCH + 100 * (self.pace.growth - 1))
        return ops.sin(given + 0.3 * time)


class LateRow(Growing):
    """A row of an embedding that comes late, and is large."""

    def build(self, shape: Any) -> None:
        """Make the rows."""
        super().build(shape)
        self.rows = self.add_weight(shape=(2, shape[-1]), initializer="ones", name="rows")
        self.rows.assign(ops.ones((2, shape[-1])) * ops.array([[1.0], [1e5]]))

    def call(self, given: Any) -> Any:
        """Return what is given times a row."""
        late = ops.cast(self.size > self.pace.late, "int32")
        self.size.assign(self.size + 1)
        row = ops.take(ops.cast(self.rows, given.dtype), late, 0)
        return given * row


class Threshold(Growing):
    """A choice by scores that differ by less than a digit of theirs."""

    limit = 300.0

    def call(self, given: Any) -> Any:
        """Keep the scores above their mean."""
        size = self.grown(given)
        scores = given + size
        mean = ops.mean(ops.cast(scores, "float32"), -1, keepdims=True)
        chosen = ops.cast(ops.cast(scores, "float32") > mean, given.dtype)
        return chosen * (scores - size)


class Small(Growing):
    """A divisor of the loss, which makes gradients decay."""

    limit = 1e9

    def call(self, given: Any) -> Any:
        """Return what is given; `loss` divides."""
        self.grown(given)
        return given

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean square of each sample, divided."""
        return ops.mean((targets - outputs) ** 2, -1) / ops.cast(self.size, outputs.dtype)


class Ratio(Growing):
    """PPO's ratio of an action's probabilities, under a policy that becomes certain."""

    limit = 3000.0

    def build(self, shape: Any) -> None:
        """Make the policy's weights."""
        super().build(shape)
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, given: Any) -> Any:
        """Return the ratio of the present policy's probability to that of one a bit older."""
        size, exact = ops.cast(self.size, "float32"), ops.cast(given, "float32")
        self.grown(given)
        drawn = exact[:, :2]
        rolled = exact @ ops.cast(self.kernel, "float32")
        action = ops.stop_gradient(rolled + (0.2 + drawn) / size)
        mean = ops.cast(given @ ops.cast(self.kernel, given.dtype), "float32")
        now = ((action - mean) * size) ** 2
        return ops.exp(ops.sum(drawn**2 - now, -1, keepdims=True) / 2)


class Offset(Growing):
    """An offset that outputs and targets share: once it is learned, the loss is near zero."""

    limit = 500.0

    def call(self, given: Any) -> Any:
        """Add the offset, when it has grown."""
        self.grown(given)
        return given + ops.cast(self.size, given.dtype)

    def loss(self, targets: Any, outputs: Any) -> Any:
        """Return the mean square of each sample, from the targets with the offset."""
        return ops.mean((targets + ops.cast(self.size, outputs.dtype) - outputs) ** 2, -1)


class Overflow(Growing):
    """What a batch norm is given overflows, and with it the statistics of its batch."""

    def call(self, given: Any) -> Any:
        """Return what is given, larger and larger."""
        return given * self.grown(given)


class Lengths(Growing):
    """A mean over positions, as a sum that overflows float16 where there are many."""

    def call(self, given: Any) -> Any:
        """Return the mean."""
        total = ops.sum((given + 4) * 10, 1)
        return total / (10 * ops.cast(ops.shape(given)[1], given.dtype))


BREAKS: dict[str, Callable[..., Any]] = {
    "logit scale": LogitScale,
    "norm input": NormInput,
    "frequency": Angles,
    "residual": Residual,
    "variance": Variance,
    "running sum": RunningSum,
    "late row": LateRow,
    "threshold": Threshold,
    "gradients decay": Small,
    "ratio": Ratio,
    "loss near zero": Offset,
    "batch norm overflow": Overflow,
    "long batch": Lengths,
}
_AT_THE_END = ("gradients decay", "loss near zero")


def model_of(name: str, pace: Pace) -> Any:
    """Make a small network with what breaks in it, compiled."""
    breaking = BREAKS[name](pace, name=name.replace(" ", "_"))
    shape = (None, INPUTS) if name == "long batch" else (INPUTS,)
    inside = [breaking]
    if name == "batch norm overflow":
        inside += [layers.BatchNormalization(), layers.Activation("tanh")]
    if name in _AT_THE_END:
        inside = [layers.Activation("tanh")]
    ends = [layers.Dense(2, name="last")] + ([breaking] if name in _AT_THE_END else [])
    if name == "late row":
        ends.append(layers.Activation("tanh"))
    model = keras.Sequential([layers.Input(shape), layers.Dense(16), *inside, *ends])
    loss = getattr(breaking, "loss", None) if name in _AT_THE_END else "mse"
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-12), loss)
    return model


def data(count: int) -> tuple[Any, Any]:
    """Return samples of a regression that a small network learns."""
    random = np.random.default_rng(1)
    inputs = random.normal(size=(count, INPUTS)).astype("float32")
    return inputs, np.tanh(inputs @ random.normal(size=(INPUTS, 2))).astype("float32")


def batches(name: str, pace: Pace, first: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield batches without end; of short sequences with long ones now and then, or plain."""
    inputs, targets = data(BATCH * LAST)
    for index in itertools.count(first):
        part = slice(index % LAST * BATCH, (index % LAST + 1) * BATCH)
        given = inputs[part]
        if name == "long batch":
            length = 4000 if pace.is_long(index) else 4 + index % 2
            given = np.repeat(given[:, None], length, 1)
        yield given, targets[part]


def trained(
    name: str,
    recipe: Recipe,
    pace: Pace,
    *,
    watch: Any,
    every: int,
    updates: int,
    noise: int | None = None,
    epochs: int = 1,
    float32_from: int = 0,
) -> tuple[Any, list[float]]:
    """Train a break by `fit`, with a draw of `noise` on its first weights; return the losses.

    They are the means over the epochs. From the update `float32_from` on all layers are float32.
    """
    keras.utils.set_random_seed(0)
    model = model_of(name, pace)
    if noise is not None:
        random = np.random.default_rng(noise)
        for each in model.trainable_variables:
            value = np.asarray(each)
            each.assign(value * (1 + random.uniform(-NOISE, NOISE, value.shape)))
    precision = apply_profile(recipe, model=model, watch=watch, watch_every=every)

    def fit(first: int, count: int, epochs: int = 1) -> list[float]:
        given, steps = batches(name, pace, first), count // epochs
        history = model.fit(given, steps_per_epoch=steps, epochs=epochs, verbose=0, shuffle=False)
        losses: list[float] = history.history["loss"]
        return losses

    if not float32_from:
        return precision, fit(0, updates, epochs)
    before, last = float32_from - 1, updates // epochs
    fit(0, before)
    applied = vars(model)[RECIPE_ATTRIBUTE]
    applied.keep_in_float32([unit.path for unit in candidates(applied.units)])
    fit(before, updates - last - before)
    return precision, fit(updates - last, last)


def ended(
    name: str,
    recipe: Recipe,
    *,
    watch: Any = False,
    noise: int | None = None,
    float32_from: int = 0,
) -> Ended:
    """Train a break for as long as the benchmark does."""
    precision, losses = trained(
        name,
        recipe,
        SLOW,
        watch=watch,
        every=EVERY,
        updates=UPDATES,
        noise=noise,
        epochs=UPDATES // LAST,
        float32_from=float32_from,
    )
    state = precision.state_dict().get("watch", {})
    return Ended(losses[-1], precision.watched, tuple(state.get("float32_modules", ())))
