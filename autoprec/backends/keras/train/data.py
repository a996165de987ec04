"""The user's batches, whatever `build_data` gave: Dataset, PyDataset, arrays, or an iterable.

Data are drawn from random streams of their own, so that what training consumes does not change
what the next batch is. Batches are what `train_step` is given: (x, y[, sample_weight]) as nested
tuples, dicts and arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from autoprec.backends.keras.dtypes import item_bytes
from autoprec.backends.keras.train.batch_dimension import count_samples
from autoprec.backends.keras.train.rng import KerasGenerators
from autoprec.backends.protocol import Task
from autoprec.backends.shared.seeded_batches import draw_batches
from autoprec.errors import TaskError


def batches(
    task: Task, batch_size: int, seed: int, *, repeat: bool = False, workers: bool = False
) -> Generator[Any, None, None]:
    """Return the user's batches; with `repeat`, start again at their end; see `iterate`.

    All generators are seeded before `build_data`. Raises `TaskError` where there is nothing to
    train on.
    """

    def check(batch: Any, place: int) -> None:
        if place == 0:
            count_samples(task, batch)

    return draw_batches(
        task,
        batch_size,
        generators=KerasGenerators(),
        seed=partial(keras.utils.set_random_seed, seed),
        iterate=lambda data: iterate(task, data, batch_size, workers=workers),
        check=check,
        size_in_bytes=size_in_bytes,
        repeat=repeat,
        hint="Is the data set smaller than the batch, with drop_remainder=True?",
    )


def iterate(task: Task, data: Any, batch_size: int, *, workers: bool = False) -> Iterator[Any]:
    """Go through `data` once, batch by batch; with `workers`, by those a PyDataset asks for.

    Which worker draws which random numbers is chance, so only the loader's time wants them.
    """
    if isinstance(data, keras.utils.PyDataset):
        parallel = workers and (data.workers > 1 or data.use_multiprocessing)
        return _with_workers(data) if parallel else _py_dataset(data)
    if _is_arrays(data):
        return _arrays(task, data, batch_size)
    if isinstance(data, Iterable) and not isinstance(data, dict | str):
        return iter(data)
    kind = "None" if data is None else f"a {type(data).__name__}"
    raise TaskError(
        f"{task.name}: build_data returned {kind}, expected a tf.data.Dataset, a PyDataset, "
        "arrays (x, y) or (x, y, sample_weight), or an iterable of such batches"
    )


def _py_dataset(data: Any) -> Iterator[Any]:
    data.on_epoch_begin()
    count = data.num_batches
    index = 0
    while count is None or index < count:
        yield data[index]
        index += 1
    data.on_epoch_end()


def _with_workers(data: Any) -> Iterator[Any]:
    """Go through a PyDataset as `fit` does, with its threads or processes."""
    adapter = PyDatasetAdapter(data, class_weight=None)
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        if adapter.enqueuer is not None and adapter.enqueuer.is_running():
            adapter.enqueuer.stop()


def _is_arrays(data: Any) -> bool:
    """Say whether `data` is one data set in memory: a tuple of arrays of as many samples.

    It is what `fit` takes as x, y and sample_weight, each of them an array or a nest of arrays.
    """
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        return False
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        return False
    return len({int(leaf.shape[0]) for leaf in leaves}) == 1


def _arrays(task: Task, data: Any, batch_size: int) -> Iterator[Any]:
    """Yield shuffled batches of arrays, with floats in Keras's floatx, as `fit` makes them."""
    floatx = keras.config.floatx()

    def prepared(leaf: Any) -> Any:
        if leaf is None or hasattr(leaf, "flat_values"):
            return leaf
        array = np.asarray(leaf)
        return array.astype(floatx) if array.dtype == np.float64 else array

    arrays = keras.tree.map_structure(prepared, data)
    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    samples = int(leaves[0].shape[0])
    if samples == 0:
        raise TaskError(f"{task.name}: build_data returned arrays without samples")
    order = np.random.permutation(samples)
    for start in range(0, samples, batch_size):
        chosen = order[start : start + batch_size]
        yield keras.tree.map_structure(partial(_rows, chosen=chosen), arrays)


def _rows(leaf: Any, chosen: Any) -> Any:
    """Return the chosen samples of an array; a ragged one knows no index but slices."""
    if leaf is None or not hasattr(leaf, "flat_values"):
        return None if leaf is None else leaf[chosen]
    import tensorflow as tf

    return tf.gather(leaf, chosen)


def to_tensors(batch: Any) -> Any:
    """Convert a batch to the backend's tensors in tuples, as a train function expects."""
    if isinstance(batch, list):
        batch = tuple(batch)
    while isinstance(batch, tuple) and batch and batch[-1] is None:
        batch = batch[:-1]
    return keras.tree.map_structure(_to_tensor, batch)


def _to_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, str):
        return leaf
    return keras.ops.convert_to_tensor(leaf)


def to_numpy(value: Any) -> Any:
    """Return a tensor or variable as a NumPy array; ragged rows are filled up with zeros."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def size_in_bytes(batch: Any) -> int:
    """Return the bytes of all arrays in a batch."""
    return sum(_bytes(leaf) for leaf in keras.tree.flatten(batch))


def _bytes(leaf: Any) -> int:
    if hasattr(leaf, "flat_values"):  # ragged: its rows lie one after another
        return sum(_bytes(part) for part in (leaf.flat_values, *leaf.nested_row_splits))
    shape = shape_of(leaf)
    return 0 if shape is None else int(np.prod(shape)) * item_bytes(leaf.dtype)


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """Return an array's shape, of a ragged one with its longest rows; None for no array."""
    if hasattr(leaf, "bounding_shape"):
        return tuple(leaf.bounding_shape().numpy().tolist())
    shape = getattr(leaf, "shape", None)
    return None if shape is None else tuple(int(length) for length in shape)


def digest(batch: Any) -> str:
    """Return a hash of a batch's shapes, dtypes and up to 65536 elements of every array."""
    state = hashlib.blake2b(digest_size=16)
    for leaf in keras.tree.flatten(batch):
        if leaf is None:
            continue
        array = to_numpy(leaf)
        flat = array.reshape(-1)
        flat = np.ascontiguousarray(flat[:: max(1, flat.size // 65536)])
        state.update(f"{array.shape}{array.dtype}".encode())
        # Strings lie elsewhere: the bytes of their array are addresses.
        state.update(repr(flat.tolist()).encode() if array.dtype.hasobject else flat.tobytes())
    return state.hexdigest()
