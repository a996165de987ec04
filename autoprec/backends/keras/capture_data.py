"""What `fit` is given, at another batch size: arrays, tf.data, a PyDataset, other iterables.

Arrays are cut as `fit` cuts them, a tf.data.Dataset rebatches itself, and the batches of anything
else are joined and cut, where all arrays have the samples first and batches are not padded one by
one. Where that cannot be, the batch stays what it is, with the reason. What is split off for
validation is not trained on, and the weights of classes become those of samples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing, tf_dataset_adapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from autoprec.backends.keras.train.data import to_numpy
from autoprec.backends.shared.recorded_batches import RecordedBatches
from autoprec.errors import TaskError, UsageError

_DEFAULT_BATCH = 32
"""Keras's own, for arrays."""

_SEEN_BATCHES = 4
_OTHERWISE = "for other batches give arrays, or a tf.data.Dataset of samples of one shape"


@dataclass(frozen=True)
class Batches:
    """Data at any batch size: what `build(batch_size)` returns, `fit` goes through.

    `own` is the samples in a batch of the data themselves, `fixed` says why there are no others.
    """

    build: Callable[[int], Any]
    own: int | None = None
    fixed: str = ""


def batches_of(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    name: str,
    *,
    class_weight: Mapping[int, float] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    steps_per_epoch: int | None = None,
) -> Batches:
    """Return what `fit` with these arguments trains on, at any batch size.

    Raises `UsageError` for what `fit` would refuse as well.
    """
    if validation_split and validation_data is None:
        try:
            (x, y, sample_weight), _ = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    if y is None and sample_weight is None and not _is_arrays(x):
        if hasattr(x, "element_spec") and hasattr(x, "rebatch"):
            return _of_dataset(_weigh_dataset(x, class_weight, name), name)
        title = f"the {type(x).__name__}"
        if isinstance(x, keras.utils.PyDataset):
            return _cut(x, functools.partial(_pass_of, x), title, name, class_weight)
        if isinstance(x, Iterator):
            x = RecordedBatches(x)
        if isinstance(x, Iterable) and not isinstance(x, dict | list | tuple | str):
            return _cut(x, lambda: iter(x), title, name, class_weight)
    arrays = (x, y) if sample_weight is None else (x, y, sample_weight)
    count = _count(arrays, name)
    if class_weight:
        arrays = _weighed(arrays, class_weight, name)
    steps = math.ceil(count / steps_per_epoch) if steps_per_epoch else None
    own = batch_size or steps or _DEFAULT_BATCH
    if shuffle:
        return Batches(lambda _: arrays, own)
    return Batches(functools.partial(_CutBatches, lambda: iter((_as_fit_gives(arrays),))), own)


def _count(arrays: Any, name: str) -> int:
    """Return how many samples all arrays hold."""
    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    counts = {int(shape[0]) if shape else 0 for shape in shapes}
    if len(counts) != 1 or counts == {0}:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
        raise UsageError(
            f"{name}: the data are ({kinds}), expected arrays of as many samples each, a "
            "tf.data.Dataset, a PyDataset, or an iterable of batches"
        )
    return counts.pop()


def _weighed(batch: Any, class_weight: Mapping[int, float], name: str) -> tuple[Any, Any, Any]:
    """Return a batch with the weight of its class for each sample, as `fit` gives it."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    if weights is not None or y is None or keras.tree.is_nested(y):
        raise UsageError(
            f"{name}: fit takes class_weight of data with one target and without sample weights; "
            "multiply the sample weights by those of the classes"
        )
    return x, y, class_weight_to_sample_weights(y, class_weight)


def _weigh_dataset(dataset: Any, class_weight: Mapping[int, float] | None, name: str) -> Any:
    if not class_weight:
        return dataset
    try:
        return dataset.map(tf_dataset_adapter.make_class_weight_map_fn(class_weight))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def _is_arrays(x: Any) -> bool:
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _of_dataset(dataset: Any, name: str) -> Batches:
    first = next(iter(dataset), None)
    if first is None:
        raise TaskError(f"{name}: the Dataset yields no batches; expected at least one")
    specs = keras.tree.flatten(dataset.element_spec)
    own = _samples(first)
    shapes: list[Any] = [getattr(spec, "shape", None) for spec in specs]
    if own is None or any(shape is None or not shape.rank for shape in shapes):
        fixed = "the Dataset yields batches that hold more than tensors with the samples first"
        return Batches(lambda _: dataset, own, f"{fixed}; {_OTHERWISE}")
    if any(size is None for shape in shapes for size in shape[1:]):
        fixed = "the Dataset yields samples whose shape is not fixed, padded batch by batch"
        return Batches(lambda _: dataset, own, f"{fixed}; {_OTHERWISE}")
    whole = all(shape[0] is not None for shape in shapes)
    return Batches(
        lambda size: dataset if size == own else dataset.rebatch(size, drop_remainder=whole), own
    )


def _pass_of(data: Any) -> Iterator[Any]:
    count = data.num_batches
    return (data[i] for i in (itertools.count() if count is None else range(count)))


def _cut(
    given: Any,
    begin: Callable[[], Iterator[Any]],
    title: str,
    name: str,
    class_weight: Mapping[int, float] | None,
) -> Batches:
    """Return batches of any size, cut from whole ones; at their own size these themselves."""
    if class_weight:
        whole = begin
        given = _Pass(lambda: (_weighed(each, class_weight, name) for each in whole()))
        begin = given.begin
    seen = list(itertools.islice(begin(), _SEEN_BATCHES))
    if not seen:
        raise TaskError(f"{name}: {title} yields no batches; expected at least one")
    own = _samples(seen[0])
    if own is None:
        fixed = f"{title} yields batches whose arrays do not all have the samples first"
        return Batches(lambda _: given, own, f"{fixed}; {_OTHERWISE}")
    if len({str([np.shape(leaf)[1:] for leaf in _leaves(batch)]) for batch in seen}) > 1:
        fixed = f"{title} pads each batch by itself, so that no two can be joined"
        return Batches(lambda _: given, own, f"{fixed}; {_OTHERWISE}")
    return Batches(lambda size: given if size == own else _CutBatches(begin, size), own)


@dataclass(frozen=True)
class _Pass:
    """Batches that `begin` goes through from their first, each time."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def _samples(batch: Any) -> int | None:
    """Return the leading length that all arrays of a batch have; None where they have none."""
    lengths = {tuple(np.shape(leaf))[:1] for leaf in _leaves(batch)}
    return int(lengths.pop()[0]) if len(lengths) == 1 and lengths != {()} else None


class _CutBatches:
    """Batches of another size, of the same samples in the same order; the last may be short."""

    def __init__(self, begin: Callable[[], Iterator[Any]], batch_size: int) -> None:
        self._begin, self._size = begin, batch_size

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        count = 0
        for batch in self._begin():
            held.append(keras.tree.map_structure(_array, batch))
            count += _samples(batch) or 0
            while count >= self._size:
                whole = _joined(held)
                yield _sliced(whole, 0, self._size)
                count -= self._size
                held = [_sliced(whole, self._size, None)] if count else []
        if count:
            yield _joined(held)


def _as_fit_gives(arrays: Any) -> Any:
    """Return arrays with their floats in Keras's floatx."""

    def prepared(leaf: Any) -> Any:
        array = _array(leaf)
        is_long = array is not None and array.dtype == np.float64
        return array.astype(keras.config.floatx()) if is_long else array

    return keras.tree.map_structure(prepared, arrays)


def _array(leaf: Any) -> Any:
    return None if leaf is None else to_numpy(leaf)


def _joined(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return keras.tree.map_structure(
        lambda *parts: None if parts[0] is None else np.concatenate(parts), *batches
    )


def _sliced(batch: Any, start: int, stop: int | None) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], batch)
