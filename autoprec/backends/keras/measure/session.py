"""Builds a Keras model by a recipe and times its training steps, by the path `fit` takes.

A step is one update of the weights: the model's own train function over an iterator, once for each
micro-batch, compiled and with as many steps per execution as the recipe says. Batches are in
memory beforehand; the loader's own time is measured apart.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import keras

from autoprec.backends.keras.apply.replicas import for_whole_batches
from autoprec.backends.keras.devices import on_tensorflow, placed_on
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.keras.train.batch_dimension import count_samples
from autoprec.backends.keras.train.batch_views import survey
from autoprec.backends.keras.train.compiling import check_compiled
from autoprec.backends.keras.train.data import batches, size_in_bytes, to_tensors
from autoprec.backends.keras.train.task_runner import (
    VariableMemory,
    build_model,
    loss_in_logs,
    raising_layers_noted,
    to_float,
)
from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.process_memory import (
    peak_resident_bytes,
    reset_peak_resident,
    return_freed_memory,
)
from autoprec.backends.shared.step_timing import in_rounds, time_steps
from autoprec.backends.shared.timing_batches import SessionBatches, fetch_representative_batches
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget


class KerasSession:
    """One model under one recipe, with a few full batches in memory."""

    def __init__(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> None:
        self._task, self._recipe, self._device, self._report = task, recipe, device, report
        self._started = time.perf_counter()
        self._finite = True
        self._reset_peak()
        try:
            with placed_on(device):
                self._build(seed)
        except BaseException:
            self.close()
            raise

    def _build(self, seed: int) -> None:
        self._report("data", 0)
        fetched = self._fetch(seed)
        self._mean_samples, self._loader_seconds = fetched.mean_samples, fetched.loader_seconds
        if fetched.mixed:  # finding them took more memory than training on them does
            return_freed_memory()
            self._reset_peak()
        self._report("build", 0)
        self._model = build_model(self._task, seed, fetched.batches[0])
        self._precision = KerasSurgeon().apply(
            for_whole_batches(self._recipe, self._model), model=self._model, device=self._device
        )
        micro_batches, executed = self._recipe.accumulation_steps, self._model.steps_per_execution
        self._executions, self._updates = _update_round(
            micro_batches, int(executed), fetched.round_length
        )
        first_executions, self._first_updates = _update_round(micro_batches, int(executed))
        rounds = math.ceil(len(fetched.largest) / (micro_batches * self._first_updates))
        first_executions, self._first_updates = (
            max(1, rounds) * first_executions,
            max(1, rounds) * self._first_updates,
        )
        self._model.make_train_function()
        self._feed: Any = _feed(
            self._model, fetched.batches, [to_tensors(batch) for batch in fetched.largest]
        )
        self._report("compile" if self._recipe.compile else "warmup", 0)
        self._steps(first_executions)
        check_compiled(self._model, self._recipe)

    def _fetch(self, seed: int) -> SessionBatches:
        task, size = self._task, self._recipe.batch_size
        return fetch_representative_batches(
            lambda repeat: batches(task, size, seed, repeat=repeat, workers=True),
            look=lambda limits: survey(task, size, seed, limits, workers=True),
            surveyed=task.surveyed,
            counter=lambda first: partial(count_samples, task),
            place=to_tensors,
            size_in_bytes=size_in_bytes,
        )

    def _steps(self, executions: int) -> None:
        """Run as many executions, which make whole updates, and wait for the device."""
        logs = None
        with raising_layers_noted(self._model):
            for _ in range(executions):
                logs = self._model.train_function(next(self._feed))
        self._finite = math.isfinite(to_float(loss_in_logs(logs))) and self._finite

    def time_steps(self, budget: TimingBudget) -> Measurement:
        """Time steps until the budget says enough; see `Session.time_steps`."""
        build_seconds = time.perf_counter() - self._started
        with placed_on(self._device):
            timed = time_steps(
                self._time_rounds,
                in_rounds(budget, self._updates),
                self._report,
                updates=self._updates,
            )
        self._started = time.perf_counter()
        micro_batches = self._recipe.accumulation_steps
        return timed.measurement(
            samples_per_step=self._mean_samples * micro_batches,
            data_seconds=self._loader_seconds * micro_batches,
            peak_memory_bytes=self._peak(),
            build_seconds=build_seconds,
            finite=self._finite,
            notes=self._notes(),
            first_updates=self._first_updates,
        )

    def _time_rounds(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._steps(self._executions)
            times.append(time.perf_counter() - start)
        return times

    def _notes(self) -> tuple[str, ...]:
        return tuple(self._precision.warnings)

    def _reset_peak(self) -> None:
        gc.collect()
        if self._accelerated():
            import tensorflow as tf

            tf.config.experimental.reset_memory_stats("GPU:0")
        else:
            reset_peak_resident()

    def _peak(self) -> int:
        if self._accelerated():
            import tensorflow as tf

            return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        return peak_resident_bytes()

    def _accelerated(self) -> bool:
        return on_tensorflow() and self._device.startswith(("cuda", "gpu", "rocm"))

    def close(self) -> None:
        """Give back the memory and what was set for the process."""
        model = self.__dict__.pop("_model", None)
        memory = VariableMemory(model) if model is not None else None
        precision = self.__dict__.pop("_precision", None)
        if precision is not None:
            precision.restore()
        self.__dict__.pop("_feed", None)
        del model, precision
        _clear_session()
        gc.collect()
        if memory is not None:
            memory.free()
        return_freed_memory()


def _clear_session() -> None:
    """Forget Keras's names and graphs, but not the global policy that a task may have set."""
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)


def _update_round(
    accumulation_steps: int, steps_per_execution: int, batches: int = 1
) -> tuple[int, int]:
    """Return the fewest executions that end on an update, and how many updates those are.

    They take all of so many `batches` equally often.
    """
    micro = math.lcm(accumulation_steps, steps_per_execution, batches)
    return micro // steps_per_execution, micro // accumulation_steps


def _feed(model: Any, found: Sequence[Any], first: Sequence[Any]) -> Iterator[Any]:
    """Return what the train function is called with, endlessly, as `fit` would call it.

    Those of `first` come once, before the others in turn.
    """
    if not on_tensorflow():
        return ([batch] for batch in itertools.chain(first, itertools.cycle(found)))
    data = _dataset(found).repeat()
    if first:
        data = _dataset(first).concatenate(data)
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        data = strategy.experimental_distribute_dataset(data)
    return itertools.repeat(iter(data))


def _dataset(found: Sequence[Any]) -> Any:
    """Return a tf.data.Dataset of these batches, whose shapes may differ."""
    import tensorflow as tf

    def without_none(batch: Any) -> Any:
        """Put an empty Optional for None: that is how Keras feeds it to its train function."""
        empty = tf.experimental.Optional.empty
        return keras.tree.map_structure(lambda leaf: empty(None) if leaf is None else leaf, batch)

    data = tf.data.Dataset.from_tensors(without_none(found[0]))
    for batch in found[1:]:
        data = data.concatenate(tf.data.Dataset.from_tensors(without_none(batch)))
    return data
