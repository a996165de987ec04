"""Traces a torch task for `autoprec.backends.shared.tracer`.

The reference is the user's own float32 loop; a recipe is applied by the same surgeon that
`apply_profile` uses. Random numbers (dropout) are drawn from a seed for every batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.batch_survey import TIMED_AGAIN
from autoprec.backends.shared.gradient_exponents import ExponentCounts
from autoprec.backends.shared.initial_states import InitialStates
from autoprec.backends.shared.ranks import ALONE
from autoprec.backends.shared.repeatable_batches import MAX_KEPT_BYTES, BatchStream
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.nested_tensors import copy_deeply
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.backends.torch.distributed.communication import Communication, join
from autoprec.backends.torch.trace import magnitudes
from autoprec.backends.torch.trace.model_under_recipe import (
    PlainFloat32,
    TorchTrainee,
    apply_recipe,
)
from autoprec.backends.torch.trace.random_numbers import RandomNumbers, drawn_alike_compiled
from autoprec.backends.torch.trace.recorded_outputs import outputs_error
from autoprec.backends.torch.train.batch_digest import digest
from autoprec.backends.torch.train.batch_dimension import Samples, find_samples
from autoprec.backends.torch.train.batch_views import size_in_bytes, survey
from autoprec.backends.torch.train.compiling import compiled_throughout
from autoprec.backends.torch.train.held_snapshot import (
    Held,
    around,
    holders_around,
    put_held,
    take_held,
)
from autoprec.backends.torch.train.model_state import (
    gradient_error,
    restore_snapshot,
    take_snapshot,
)
from autoprec.backends.torch.train.task_runner import (
    batches,
    build_model,
    build_optimizer,
    materialize,
    move,
)
from autoprec.core.numerics.traces import UnitTrace
from autoprec.core.recipe import Recipe


class TorchTracing:
    """See `TraceFramework`."""

    def __init__(
        self, task: Task, *, device: str, seed: int, communication: Communication | None = None
    ) -> None:
        self._task, self._device, self._seed = task, device, seed
        self._communication = communication
        self._initial = InitialStates()
        self._random = RandomNumbers()
        self._samples: dict[int, Samples] = {}
        self._around: Held | None = None
        self.has_evaluate = task.evaluate is not None

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return an empty context: models and batches are moved one by one."""
        return contextlib.nullcontext()

    def stream(self, batch_size: int, seed: int) -> BatchStream:
        """Return the task's batches."""
        return batch_stream(self._task, batch_size, self._seed + seed)

    @contextlib.contextmanager
    def trainee(
        self, recipe: Recipe, seed: int, batch: Any, *, reference: bool
    ) -> Iterator[TorchTrainee]:
        """Build the model under `recipe`; the optimizer sees the initial weights."""
        # What is compiled to draw alike is not what was compiled for the trial.
        draws = recipe.compile and self._random.may_draw
        drawn_alike = drawn_alike_compiled() if draws else contextlib.nullcontext()
        with process_settings_restored(), compiled_throughout(recipe), drawn_alike:
            model = build_model(self._task, self._device, self._seed + seed)
            materialize(self._task, model, move(batch, self._device), self._seed + seed)
            others = around(self._task)
            shared_by_builds = holders_around(model, others)
            if self._around is None:
                self._around = take_held(shared_by_builds)
            put_held(shared_by_builds, self._around, self._device)
            self._initial.start_alike(
                seed,
                partial(take_snapshot, model, others),
                partial(restore_snapshot, model, others=others),
            )
            shared = self._communication if recipe.distributed is not None else None
            if shared is not None:
                shared.require_same(recipe)
                model = distribute(recipe, model, self._device)
            optimizer = build_optimizer(self._task, unwrap(model))
            if reference:
                precision: Any = PlainFloat32(optimizer, recipe.accumulation_steps)
            else:
                precision = apply_recipe(recipe, model, optimizer, self._device, self._task)
            yield TorchTrainee(
                self._task,
                recipe,
                model,
                optimizer,
                precision,
                self._device,
                shared,
                self._random,
            )

    def outputs_error(self, candidate: Any, reference: Any) -> float | None:
        """Compare the outputs of whole batches, or of their parts, with those of whole ones."""
        return outputs_error(candidate, reference)

    def parts(self, batch: Any, batch_size: int, count: int) -> Sequence[Any] | None:
        """Cut a batch as the check of splitting does."""
        if batch_size not in self._samples:
            self._samples[batch_size] = find_samples(self._task, batch, batch_size, self._seed)
        return self._samples[batch_size].parts(batch, count)

    def gradient_error(self, candidate: Any, reference: Any) -> float | None:
        """Compare two gradients over all parameters."""
        return gradient_error(candidate, reference)

    def count_exponents(
        self, counts: ExponentCounts, trainee: TorchTrainee, batch: Any, seed: int
    ) -> None:
        """Add one batch's backward pass."""
        counts.add(*magnitudes.backward_magnitudes(trainee, batch, seed))

    def unit_magnitudes(
        self, trainee: TorchTrainee, batch: Any, seed: int, scale: float
    ) -> tuple[UnitTrace, ...]:
        """Measure each module's largest exponents, and its gradient's float16 underflow."""
        return magnitudes.unit_magnitudes(trainee, batch, seed, scale)


def torch_tracer(
    task: Task, *, device: str, seed: int, report: ProgressCallback
) -> ComparisonTracer:
    """Return the tracer of a torch task; see `Backend.tracer`."""
    communication = None if task.place is None else join(task.place)
    tracing = TorchTracing(task, device=device, seed=seed, communication=communication)
    ranks = ALONE if communication is None else communication.ranks()
    return ComparisonTracer(tracing, on_cpu=device == "cpu", report=report, ranks=ranks)


class TorchBatches:
    """See `BatchOperations`."""

    def store(self, batch: Any) -> Any:
        """Copy the batch to the CPU."""
        return copy_deeply(move(batch, "cpu"))

    def hand_out(self, stored: Any) -> Any:
        """Copy a stored batch for one use."""
        return copy_deeply(stored)

    def digest(self, stored: Any) -> str:
        """Return a hash of the batch."""
        return digest(stored)

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all tensors in the batch."""
        return size_in_bytes(stored)


def batch_stream(
    task: Task, batch_size: int, seed: int, keep_bytes: int = MAX_KEPT_BYTES
) -> BatchStream:
    """Return the task's batches of one size and seed.

    Large ones are looked for where a description of the task saw batches that differ in shape.
    """

    def elsewhere() -> list[Any]:
        if not task.surveyed:
            return []
        limits = replace(TIMED_AGAIN, batches=task.surveyed)
        seen, _ = survey(task, batch_size, seed, limits, compare_halves=False)
        return [seen.kept[index] for index in seen.largest()]

    draw = partial(batches, task, batch_size, seed, repeat=True)
    return BatchStream(draw, TorchBatches(), keep_bytes, elsewhere)
