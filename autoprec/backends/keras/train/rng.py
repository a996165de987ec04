"""Random numbers: the same in every dtype, and in streams of their own.

Keras draws a dropout mask in the dtype of what it drops from, so the same seed gives a bfloat16
model another mask than a float32 one. Inside `same_in_every_dtype` numbers are drawn in float32 and
then cast. This holds for `keras.random` and every layer built on it, and for a model's own calls of
`tf.random` and `tf.nn.dropout`; not for names that it has imported from there, nor for calls of
torch where Keras runs on that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend import random as keras_random
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils

from autoprec.backends.keras.dtypes import is_low
from autoprec.backends.shared.rng_streams import HostGenerators


class DrawsFromState:
    """What a run draws by TensorFlow's own generators, from a state that can be copied.

    TensorFlow draws `tf.random` and `tf.nn.dropout` from a count of how often a compiled function
    ran: two functions at the same weights, or one that was called once more, draw other numbers.
    From `variable` they draw the same as long as it is the same. `drawn` says whether they do.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        self.variable = tf.Variable(0, trainable=False, dtype="int64")
        self.drawn = False

    def functions(self) -> Iterator[_Replacement]:
        """Yield TensorFlow's operations that draw, and what to put in their place."""
        from tensorflow.python.ops import gen_random_ops as ops

        for name, own in _stateless_draws().items():
            yield ops, name, functools.partial(self._stateless, own)

    def _stateless(self, own: Callable[..., Any], original: Any) -> Callable[..., Any]:
        import tensorflow as tf

        signature = inspect.signature(original)

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            self.drawn = True
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = dict(given.arguments)
            seeds = values.pop("seed") or 0, values.pop("seed2") or 0
            del values["name"]
            key = tf.stack([tf.constant(seeds[0], "int64"), self.variable * _PRIME + seeds[1]])
            return own(key, **values)

        return draw

    @contextmanager
    def hosts(self) -> Iterator[None]:
        """Draw by Python's and NumPy's generators from the state as well inside, then as before."""
        generators = HostGenerators()
        before = generators.capture()
        generators.seed(int(self.variable.numpy()))
        try:
            yield
        finally:
            generators.restore(before)


def _stateless_draws() -> dict[str, Callable[..., Any]]:
    """Map TensorFlow's operations that draw to functions of a key, and of what they are given."""
    import tensorflow as tf
    from tensorflow.python.ops import gen_stateless_random_ops as ops

    def gamma(key: Any, shape: Any, alpha: Any) -> Any:
        return ops.stateless_random_gamma_v2(tf.concat([shape, tf.shape(alpha)], 0), key, alpha)

    def shuffle(key: Any, value: Any) -> Any:  # TensorFlow's has no gradient
        return tf.random.experimental.stateless_shuffle(tf.stop_gradient(value), key)

    def poisson(key: Any, shape: Any, rate: Any, dtype: Any) -> Any:
        whole = tf.concat([shape, tf.shape(rate)], 0)
        return ops.stateless_random_poisson(whole, key, rate, dtype)

    return {
        "random_uniform": lambda key, **given: ops.stateless_random_uniform(seed=key, **given),
        "random_standard_normal": lambda key, **given: ops.stateless_random_normal(
            seed=key, **given
        ),
        "truncated_normal": lambda key, **given: ops.stateless_truncated_normal(seed=key, **given),
        "random_uniform_int": lambda key, **given: ops.stateless_random_uniform_int(
            seed=key, **given
        ),
        "multinomial": lambda key, **given: ops.stateless_multinomial(seed=key, **given),
        "random_shuffle": shuffle,
        "random_gamma": gamma,
        "random_poisson_v2": poisson,
    }


#: Keeps the numbers of one step apart from those of the next.
_PRIME = 1_000_003

#: Where a function is held, its name, and what makes another of it.
_Replacement = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


@contextmanager
def same_in_every_dtype(draws: DrawsFromState | None = None) -> Iterator[None]:
    """Draw in float32 what is traced or run inside; by TensorFlow's generators from `draws`."""
    replaced = [*_drawing_functions(), *(draws.functions() if draws is not None else ())]
    held = [(owner, name, getattr(owner, name), kind) for owner, name, kind in replaced]
    for owner, name, original, kind in held:
        setattr(owner, name, kind(original))
    try:
        yield
    finally:
        for owner, name, original, _ in held:
            setattr(owner, name, original)


def _drawing_functions() -> Iterator[_Replacement]:
    """Yield where each function that draws in a dtype is held, and what to put in its place."""
    yield keras_random, "dropout", _dropped_in_float32
    for name in ("normal", "uniform", "truncated_normal", "gamma", "binomial", "beta"):
        yield keras_random, name, _drawn_in_float32
    if keras.config.backend() != "tensorflow":
        return
    import tensorflow as tf

    yield tf.nn, "dropout", _dropped_in_float32
    yield tf.nn.experimental, "stateless_dropout", _dropped_in_float32
    for name in ("normal", "uniform", "truncated_normal"):
        yield tf.random, name, _drawn_in_float32
        yield tf.random, f"stateless_{name}", _drawn_in_float32
        yield tf.random.Generator, name, _drawn_in_float32


def _dropped_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_low(getattr(inputs, "dtype", None)):
            return original(inputs, *args, **kwargs)
        mask = original(keras.ops.ones_like(inputs, dtype="float32"), *args, **kwargs)
        return keras.ops.multiply(inputs, keras.ops.cast(mask, inputs.dtype))

    return dropout


def _drawn_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        dtype = signature.bind(*args, **kwargs).arguments.get("dtype")
        if not is_low(dtype):
            return original(*args, **kwargs)
        given = signature.bind(*map(_exact, args), **{k: _exact(v) for k, v in kwargs.items()})
        given.arguments["dtype"] = "float32"
        return keras.ops.cast(original(*given.args, **given.kwargs), dtype)

    return draw


def _exact(value: Any) -> Any:
    return keras.ops.cast(value, "float32") if is_low(getattr(value, "dtype", None)) else value


class KerasGenerators:
    """Every generator that a Keras task's data may draw from; see `Generators`.

    They are Python's and NumPy's, Keras's global one, and that of the library below: TensorFlow's
    for what is run eagerly, or torch's on the CPU. Keras's and TensorFlow's are swapped as objects,
    each with where it was.
    """

    _KERAS = (rng_utils.GLOBAL_RANDOM_SEED, seed_generator.GLOBAL_SEED_GENERATOR)

    def __init__(self) -> None:
        self._host = HostGenerators()

    def capture(self) -> Any:
        """Return their state at this moment."""
        own = [global_state.get_global_attribute(name) for name in self._KERAS]
        at = None if own[-1] is None else keras.ops.convert_to_numpy(own[-1].state)
        return self._host.capture(), own, at, _capture_library()

    def restore(self, state: Any) -> None:
        """Go back to a captured state."""
        host, own, at, library = state
        self._host.restore(host)
        for name, value in zip(self._KERAS, own, strict=True):
            global_state.set_global_attribute(name, value)
        if own[-1] is not None:
            own[-1].state.assign(at)
        _restore_library(library)


def _capture_library() -> Any:
    if keras.config.backend() == "torch":
        import torch

        return torch.get_rng_state()
    eager = _eager_context()
    own = getattr(eager, "_rng", None)  # without a seed so far there is none
    return eager._seed, own, None if own is None else own.getstate()


def _restore_library(state: Any) -> None:
    if keras.config.backend() == "torch":
        import torch

        torch.set_rng_state(state)
        return
    eager = _eager_context()
    eager._seed, eager._rng, at = state
    if at is not None:
        eager._rng.setstate(at)


def _eager_context() -> Any:
    """Return what holds TensorFlow's global seed and the generator of operations' seeds."""
    from tensorflow.python.eager import context

    return context.context()
