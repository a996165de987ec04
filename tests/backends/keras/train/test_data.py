"""Data are drawn as `fit` takes them, whatever their type."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import keras
import numpy as np

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.train.data import batches, digest
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.keras.keras_models import Subclassed, compiled, data, softmax_net

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**10))
QUIET: Any = lambda *_: None  # noqa: E731


def task(build_model: Any, build_data: Any = lambda n: data(32), **more: Any) -> Task:
    return Task(name="task.py", build_model=build_model, build_data=build_data, **more)


def describe(given: Task) -> Any:
    return KerasBackend().describe(given, device="cpu", seed=0, batch_size=8, report=QUIET)


def test_nested_arrays_are_one_data_set() -> None:
    """`fit(x, y)` takes x as a tuple of inputs; two of them are no two batches."""
    x, y = data(32)
    given = task(softmax_net, lambda n: ((x, x[:, :2]), y))
    found = list(batches(given, 8, 0))
    assert len(found) == 4
    (first, second), targets = found[0]
    assert (first.shape, second.shape, targets.shape) == ((8, 8), (8, 2), (8,))
    listed = list(batches(task(softmax_net, lambda n: [(x, y), (x, y)]), 8, 0))
    assert [len(batch) for batch in listed] == [2, 2]


class OwnTarget(Subclassed):
    """Learns from its inputs alone; fit takes (x, None, weights)."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, **_: Any) -> Any:
        assert y is None
        assert len(sample_weight.shape) == 1
        return keras.ops.mean(sample_weight[:, None] * y_pred * x[:, :4])


def test_weights_without_targets_stay_weights() -> None:
    x, _ = data(32)
    weights = np.ones(32, "float32")
    for given in ((x, None, weights), [(x[:8], None, weights[:8])]):
        whole = task(lambda: compiled(OwnTarget()), lambda n, given=given: given)
        assert describe(whole).step_seconds > 0
        session = KerasBackend().open(whole, BFLOAT16, device="cpu", seed=0, report=QUIET)
        assert session.time_steps(TimingBudget(seconds=0.1, min_steps=2, max_steps=2)).finite
        session.close()


def test_equal_strings_have_equal_digests() -> None:
    def made(*words: str) -> Any:
        return (np.array(["".join(list(word)) for word in words], object), np.ones(2))

    assert digest(made("one", "two")) == digest(made("one", "two"))
    assert digest(made("one", "two")) != digest(made("one", "too"))


class Slow(keras.utils.PyDataset):
    """Four batches; each is fetched by a thread that is written down."""

    threads: ClassVar[set[str]] = set()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        x, y = data(8)
        return x + index, y


def test_a_py_datasets_workers_fetch_what_is_timed() -> None:
    given = task(softmax_net, lambda n: Slow(workers=3))
    alone = [batch[0] for batch in batches(given, 8, 0)]
    assert Slow.threads == {threading.main_thread().name}
    with_workers = [batch[0] for batch in batches(given, 8, 0, workers=True)]
    assert Slow.threads > {threading.main_thread().name}
    for mine, theirs in zip(alone, with_workers, strict=True):
        assert np.array_equal(mine, theirs), "in the same order"
    Slow.threads.clear()
    session = KerasBackend().open(given, BFLOAT16, device="cpu", seed=0, report=QUIET)
    session.close()
    assert threading.main_thread().name not in Slow.threads
