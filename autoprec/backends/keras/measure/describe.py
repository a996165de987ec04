"""Takes one float32 step of a Keras task and says what the task is.

What is learned decides which knobs are worth trying, whether the batch may be split, what the step
should cost, and which layers can be islands. It also finds what would make "float32" a lie.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoprec.backends.keras.apply.dtype_policies import (
    low_precision,
    replaced_policies,
    weights_in,
)
from autoprec.backends.keras.apply.layer_names import LayerUnit, has_own_code, layer_units
from autoprec.backends.keras.apply.mixed_precision_advice import (
    dimensions,
    sixteen_bit_data,
    unused_functions,
)
from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.devices import on_tensorflow, placed_on
from autoprec.backends.keras.dtypes import item_bytes
from autoprec.backends.keras.measure.batch_splitting import batch_of_model, splittable
from autoprec.backends.keras.measure.step_graph import StepGraph, flops_by_unit, trace_step
from autoprec.backends.keras.train.batch_dimension import count_samples
from autoprec.backends.keras.train.batch_views import survey
from autoprec.backends.keras.train.compiling import compile_obstacle
from autoprec.backends.keras.train.data import to_tensors
from autoprec.backends.keras.train.first_loss_check import check_first_loss
from autoprec.backends.keras.train.task_runner import build_model, loss_in_logs, to_float
from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.attempt import try_to_measure
from autoprec.backends.shared.batch_splits import COMPARED_BATCHES
from autoprec.backends.shared.batch_survey import DESCRIBED
from autoprec.core.measurement import Dimension, Kernel, TaskFacts, Unit


def describe(
    task: Task,
    *,
    device: str,
    seed: int,
    batch_size: int,
    report: ProgressCallback,
    software: Mapping[str, str],
) -> TaskFacts:
    """Build the task, take one float32 step, and describe it; see `Backend.describe`.

    Where the task names no batch size and does not train at this one, it is described at the one
    that its model is built for.
    """
    try:
        return _describe(task, device, seed, batch_size, report, software)
    except Exception:
        with placed_on(device):
            built_for = None if task.batch_size is not None else batch_of_model(task)
        if built_for in (None, batch_size):
            raise
    gc.collect()
    facts = _describe(task, device, seed, built_for, report, software)
    if facts.splittable:
        return facts
    reason = f"the model is built for batches of {built_for} and does not train at {batch_size}"
    return replace(facts, fixed_batch=True, split_reason=f"{reason}; {facts.split_reason}")


def _describe(
    task: Task,
    device: str,
    seed: int,
    batch_size: int,
    report: ProgressCallback,
    software: Mapping[str, str],
) -> TaskFacts:
    with placed_on(device):
        report("data", 0)
        seen = survey(task, batch_size, seed, DESCRIBED, compare_halves=True)
        given = seen.kept[seen.typical()]
        batch = to_tensors(given)
        report("build", 0)
        model = build_model(task, seed, batch)
        units = layer_units(model)
        report("describe", 0)
        check_first_loss(task, model, units, batch)
        samples = count_samples(task, batch)
        counted, run, saved, warnings = _step_costs(model, units, batch, samples)
        longest = [seen.kept[index] for index in seen.largest()] if seen.varies else []
        most = [_most_each(task, model, units, each) for each in longest]
        judged = {index: seen.kept[index] for index in seen.representatives(COMPARED_BATCHES)}
        splitting = splittable(task, model, units, judged, report)
        report("describe", 1)
        seconds = _time_second_step(model, batch)
    flops = sum(counted.values())
    return replace(
        _facts_of_model(task, model, units, device, batch_size, samples),
        software=dict(software),
        splittable=splitting.allowed,
        split_reason=splitting.reason,
        fixed_batch=splitting.fixed,
        surveyed=seen.batches_to_look_at,
        flops_per_sample=flops / samples if flops else None,
        saved_bytes_per_sample=saved / samples,
        most_saved_bytes_per_sample=max((saved for saved, _ in most), default=0.0),
        most_kernel_bytes_per_sample=max((kernel for _, kernel in most), default=0.0),
        kernels=run,
        step_seconds=seconds,
        units=tuple(_units(units, counted)),
        warnings=(
            *unused_functions(task),
            *replaced_policies(units),
            *warnings,
            *sixteen_bit_data(given),
            *seen.warnings(),
            *splitting.warnings(),
        ),
    )


def _facts_of_model(
    task: Task,
    model: Any,
    units: Sequence[LayerUnit],
    device: str,
    nominal: int,
    samples: int,
) -> TaskFacts:
    """Return what a model and its process tell without another step."""
    trained = model.trainable_weights
    return TaskFacts(
        framework="keras",
        software={},
        nominal=nominal,
        samples=samples,
        parameters=sum(_size(w) for w in trained),
        parameter_bytes=sum(_size(w) * item_bytes(w.dtype) for w in model.weights),
        trainable_bytes=sum(_size(w) * item_bytes(w.dtype) for w in trained),
        optimizer_bytes=_state_bytes(model),
        batch_size=task.batch_size,
        has_evaluate=task.evaluate is not None,
        convolutions=False,  # asked for their layout, which Keras fixes when a layer is built
        uses_tf32=device != "cpu" and _rounds_to_tf32(),
        low_precision=low_precision(units),
        weights_in=weights_in(model),
        compiled=bool(model.jit_compile),
        not_compilable=compile_obstacle(model),
        steps_per_execution=int(model.steps_per_execution) if on_tensorflow() else 0,
        dimensions=tuple(_dimensions(units)),
    )


def _step_costs(
    model: Any, units: Sequence[LayerUnit], batch: Any, samples: int
) -> tuple[dict[str, int], tuple[Kernel, ...], int, tuple[str, ...]]:
    """Count operations by unit, kernels, and bytes saved in one forward and backward pass.

    A step that cannot be traced apart (one that reads values, eagerly) has unknown costs.
    """
    if on_tensorflow():
        from autoprec.backends.keras.measure.step_costs import kernels, saved_bytes

        shapes = {tuple(int(length) for length in w.shape) for w in model.weights}

        def counted(step: StepGraph) -> tuple[dict[str, int], tuple[Kernel, ...], int]:
            return flops_by_unit(step), kernels(step, shapes, samples), saved_bytes(step)

        found, why = try_to_measure(lambda: counted(trace_step(model, units, batch)))
        if found is not None:
            return *found, ()
        return {}, (), 0, (f"the step's operations could not be counted: {why}",)
    return (
        {},
        (),
        0,
        (
            "Keras runs on torch: operations are not counted, and the loss scale and islands of "
            "float16 cannot be looked for; for those set KERAS_BACKEND=tensorflow",
        ),
    )


def _most_each(
    task: Task, model: Any, units: Sequence[LayerUnit], given: Any
) -> tuple[float, float]:
    """Return the bytes of each sample of a batch that the forward pass keeps, and a kernel moves.

    0 stands for what cannot be counted; of the kernels it is the largest.
    """
    batch = to_tensors(given)
    samples = count_samples(task, batch)
    _, run, saved, _ = _step_costs(model, units, batch, samples)
    return saved / samples, max((kernel.bytes_per_sample for kernel in run), default=0.0)


def _state_bytes(model: Any) -> int:
    """Count the bytes of the model's optimizer state."""
    kept = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    return sum(_size(variable) * item_bytes(variable.dtype) for variable in kept)


def _time_second_step(model: Any, batch: Any) -> float:
    """Return the seconds of a second training step; the first one compiles."""
    model.make_train_function()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        to_float(loss_in_logs(model.train_function(iter([batch]) if on_tensorflow() else [batch])))
        seconds = time.perf_counter() - start
    return seconds


def _units(units: Sequence[LayerUnit], own: Mapping[str, int]) -> Iterator[Unit]:
    total = sum(own.values())
    for unit in units:
        if has_own_code(unit):
            yield Unit(unit.path, unit.kind, own.get(unit.path, 0) / total if total else 0.0)


def _dimensions(units: Sequence[LayerUnit]) -> Iterator[Dimension]:
    for unit in units:
        for name, size in dimensions(unit.layer):
            yield Dimension(unit.path, unit.kind, name, size)


def _size(weight: Any) -> int:
    return int(np.prod([int(length) for length in weight.shape]))


def _rounds_to_tf32() -> bool:
    """Say whether TensorFlow runs float32 products as TF32 on a GPU that has it: its default."""
    if not on_tensorflow():
        return False
    import tensorflow as tf

    return bool(tf.config.experimental.tensor_float_32_execution_enabled())
