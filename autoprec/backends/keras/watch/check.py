"""One check of a Keras training: a batch's own train_step in 16 bits and in float32.

Both run eagerly from the same state, with random numbers drawn alike in both dtypes. Nothing is
updated, and the state, that of metrics and optimizers too, is put back. Where memory is short a
part of the batch is checked.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.apply.skipped_updates import STATE
from autoprec.backends.keras.devices import on_tensorflow
from autoprec.backends.keras.train.batch_dimension import slice_samples
from autoprec.backends.keras.train.data import shape_of, to_numpy
from autoprec.backends.keras.train.recorded_outputs import (
    Outputs,
    answered_step,
    outputs_error,
)
from autoprec.backends.keras.train.rng import (
    DrawsFromState,
    KerasGenerators,
    same_in_every_dtype,
)
from autoprec.backends.keras.train.task_runner import state_variables, to_float
from autoprec.backends.keras.watch.float32_layers import candidates, in_float32, low_units
from autoprec.backends.shared.watching import NO_MEMORY, NOT_REPEATED, UNLIKE, partly
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.island_proposals import needed_islands
from autoprec.core.numerics.watching import (
    Difference,
    GradientPair,
    StepJudge,
    WatchedStep,
    compared_gradients,
    standard_error,
)
from autoprec.errors import first_line

NOISE = 2.0**-9
"""The noise on weights: half a digit of bfloat16."""

_PLAIN = (bool, int, float, str)

_NOISE_SEED = 7919
_NOISE_DRAWS = 2


@dataclass(frozen=True)
class _Run:
    loss: float
    gradients: Sequence[Any]
    outputs: Outputs
    answers: Sequence[Any]


class Check:
    """Compares one batch's step with float32's; a loss below `floor` counts as that much."""

    def __init__(
        self, model: Any, batch: Any, *, policy: Policy, scale: float, floor: float
    ) -> None:
        self._model, self._scale, self._floor = model, scale, floor
        self._batch = keras.tree.map_structure(_as_tensor, batch)
        self._units = layer_units(model)
        self._draws = DrawsFromState() if on_tensorflow() else None
        self._exact: _Run | None = None
        own = weakref.proxy(self)

        def noise() -> Sequence[Difference] | str:  # no cycle keeps what may fill a device
            made: Sequence[Difference] | str = own._noise()
            return made

        self._judge = StepJudge(policy, noise)
        self.loss = math.nan

    @property
    def undecided(self) -> bool:
        """See `StepJudge`."""
        return self._judge.undecided

    def made(self, step: WatchedStep) -> WatchedStep:
        """Return `step` with what was found; a check never ends a training."""
        try:
            return self._made(step)
        except Exception as error:
            return replace(step, not_checked=_said(error))

    def _made(self, step: WatchedStep) -> WatchedStep:
        batch = samples = _samples_of(self._batch)
        step = replace(step, batch=batch)
        if lost := self._without_weights():
            found = Difference.without_weights(lost)
            return self._judge.judged(replace(step, samples=samples), found)
        while isinstance(low := self._both_runs(), str):
            if low != NO_MEMORY or samples < 2:
                return replace(step, not_checked=low)
            self._batch = slice_samples(self._batch, samples, 0, samples // 2)
            samples //= 2
        step = replace(step, samples=samples, not_checked=partly(samples, batch))
        judged = self._judge.judged(step, self._difference(low))
        if judged.problem and not self._is_repeatable(low):
            return replace(step, samples=0, not_checked=NOT_REPEATED)
        return judged

    def _both_runs(self) -> _Run | str:
        """Return the run in 16 bits and keep that in float32, or say why there are none."""
        try:
            low = self._run()
            with in_float32(low_units(self._units)):
                self._exact = self._run()
        except Exception as error:
            return _said(error)
        self.loss = self._exact.loss
        return low

    def _is_repeatable(self, low: _Run) -> bool:
        """Return whether the run in 16 bits gives the same once more."""
        away = outputs_error([self._run().outputs], [low.outputs])
        return away is not None and away <= UNLIKE

    def mending(self) -> tuple[str, ...]:
        """Search the layers that are needed in float32 for this batch; empty where none help."""

        def passes(paths: tuple[str, ...]) -> bool:
            with in_float32([unit for unit in self._units if unit.path in paths]):
                try:
                    return not self._judge.problem(self._difference(self._run()))
                except Exception:  # some layers need their inputs in one dtype
                    return False

        return needed_islands(candidates(self._units), passes)

    def _noise(self) -> list[Difference] | str:
        try:
            with in_float32(low_units(self._units)):
                return [self._difference(self._noisy(draw)) for draw in range(_NOISE_DRAWS)]
        except Exception as error:
            return _said(error)

    def _noisy(self, draw: int) -> _Run:
        random = np.random.default_rng(_NOISE_SEED + draw)
        before = [(v, to_numpy(v)) for v in self._model.trainable_variables]
        try:
            for variable, value in before:
                factor = 1.0 + random.uniform(-NOISE, NOISE, value.shape)
                variable.assign((value * factor).astype(value.dtype))
            return self._run()
        finally:
            for variable, value in before:
                variable.assign(value)

    def _run(self) -> _Run:
        with nothing_changed(self._model), same_in_every_dtype(self._draws):
            loss, gradients, outputs, answers = answered_step(self._model, self._batch, self._scale)
            matrices = [to_numpy(each) for each in outputs.matrices]
            return _Run(
                to_float(loss),
                [to_numpy(each) for each in gradients],
                Outputs(matrices, outputs.samples),
                [None if each is None else to_numpy(each) for each in answers],
            )

    def _difference(self, run: _Run) -> Difference:
        exact = self._exact
        assert exact is not None
        if any(
            bool((np.isfinite(b) & ~np.isfinite(a)).any())
            for a, b in zip(run.outputs.matrices, exact.outputs.matrices, strict=True)
        ):
            return Difference(outputs=math.inf)
        error = outputs_error([run.outputs], [exact.outputs])
        size = max(abs(exact.loss), self._floor, 1e-30)
        loss = (run.loss - exact.loss) / size
        known = loss if math.isfinite(exact.loss) else None
        known = math.inf if known is not None and math.isnan(known) else known
        outputs = math.inf if error is None else error
        gradients = _gradients(run, exact, self._paths())
        return Difference(outputs, known, *gradients, loss_error=_loss_error(run, exact) / size)

    def _without_weights(self) -> list[str]:
        """Return the paths of the layers whose own weights are not finite."""
        weights = zip(self._paths(), self._model.trainable_variables, strict=True)
        finite = [(path, ops.all(ops.isfinite(ops.abs(weight)))) for path, weight in weights]
        return list(dict.fromkeys(path for path, each in finite if not bool(each)))

    def _paths(self) -> list[str]:
        paths = {
            id(variable): unit.path
            for unit in self._units
            for member in unit.members
            for variable in member._trainable_variables
        }
        return [paths.get(id(v), "") for v in self._model.trainable_variables]


def _said(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind in ("ResourceExhaustedError", "OutOfMemoryError"):
        return NO_MEMORY
    return f"{kind}: {first_line(error)}"


def _as_tensor(leaf: Any) -> Any:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _samples_of(batch: Any) -> int:
    """Return the first dimension of a batch's first array, 1 where none has any."""
    shapes = (shape_of(leaf) for leaf in keras.tree.flatten(batch))
    return next((shape[0] for shape in shapes if shape), 1)


def _loss_error(run: _Run, exact: _Run) -> float:
    """Return the standard error, over the samples, of what the outputs' error does to the loss.

    That is to first order; 0 where it is not known.
    """
    samples = exact.outputs.samples
    pairs = zip(run.outputs.matrices, exact.outputs.matrices, strict=True)
    changes = [
        np.where(answer == 0, 0.0, (ours - theirs) * answer).sum(1, dtype=np.float64)
        for (ours, theirs), answer in zip(pairs, exact.answers, strict=True)
        if answer is not None and answer.any()
    ]
    if not changes or any(len(each) != samples for each in changes):
        return 0.0
    by_sample = sum(changes[1:], changes[0])
    return standard_error(by_sample.tolist()) if np.isfinite(by_sample).all() else 0.0


@contextlib.contextmanager
def nothing_changed(model: Any) -> Iterator[None]:
    """Put back the state of a model, of its metrics and optimizers, and of random numbers.

    Numbers and texts in layers' own attributes are state as well.
    """
    layers = [model, *model._flatten_layers(include_self=False)]
    numbers = [
        (vars(layer), {k: v for k, v in vars(layer).items() if isinstance(v, _PLAIN)})
        for layer in layers
    ]
    metrics = [v for metric in model.metrics for v in metric.variables]
    state = [*state_variables(model), *metrics]
    state += [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    before = [(variable, to_numpy(variable)) for variable in {id(v): v for v in state}.values()]
    generators = KerasGenerators()
    drawn = generators.capture()
    with STATE.paused():  # a skipped update elsewhere puts none of it back
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)
            known = {id(variable) for variable, _ in before}
            for metric in model.metrics:  # one that was first used inside
                if any(id(variable) not in known for variable in metric.variables):
                    metric.reset_state()
            generators.restore(drawn)
            for attributes, plain in numbers:
                attributes.update(plain)


def _gradients(
    run: _Run, exact: _Run, paths: Sequence[str]
) -> tuple[float, dict[str, float], float]:
    """Return the error of all gradients, those by layer, and the share that vanished."""

    def pairs() -> Iterator[GradientPair]:
        for ours, theirs, path in zip(run.gradients, exact.gradients, paths, strict=False):
            exactly = np.complex128 if np.iscomplexobj(theirs) else np.float64
            away, norm = (np.linalg.norm(each.astype(exactly)) for each in (ours - theirs, theirs))
            there = theirs != 0
            yield GradientPair(
                path, float(away), float(norm), int((there & (ours == 0)).sum()), int(there.sum())
            )

    return compared_gradients(pairs())
