"""One check of a Keras training: a batch's own train_step in 16 bits and in float32.

Both run eagerly from the same state, with random numbers drawn alike in both dtypes. Nothing is
updated, and the state, that of metrics and optimizers too, is put back.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from keras import ops

from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.optimizer_attributes import optimizers_of
from autoprec.backends.keras.train.data import to_numpy
from autoprec.backends.keras.train.recorded_outputs import (
    Outputs,
    observed_step,
    outputs_error,
)
from autoprec.backends.keras.train.rng import KerasGenerators, same_in_every_dtype
from autoprec.backends.keras.train.task_runner import state_variables, to_float
from autoprec.backends.keras.watch.float32_layers import candidates, in_float32, low_units
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.islands import needed_islands
from autoprec.core.numerics.watching import (
    Difference,
    GradientPair,
    StepJudge,
    WatchedStep,
    compared_gradients,
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


class Check:
    """Compares one batch's step with float32's; a loss below `floor` counts as that much."""

    def __init__(
        self, model: Any, batch: Any, *, policy: Policy, scale: float, floor: float
    ) -> None:
        self._model, self._batch, self._scale, self._floor = model, batch, scale, floor
        self._units = layer_units(model)
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
        """Return `step` with what was found."""
        if lost := self._without_weights():
            return self._judge.judged(step, Difference.without_weights(lost))
        try:
            low = self._run()
            with in_float32(low_units(self._units)):
                self._exact = self._run()
            self.loss = self._exact.loss
            found = self._difference(low)
        except Exception as error:  # a check never ends a training
            return replace(step, not_checked=f"{type(error).__name__}: {first_line(error)}")
        samples = low.outputs.samples
        return self._judge.judged(replace(step, samples=samples, batch=samples), found)

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
            return f"{type(error).__name__}: {first_line(error)}"

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
        with nothing_changed(self._model), same_in_every_dtype():
            loss, gradients, outputs, samples = observed_step(self._model, self._batch, self._scale)
            matrices = [to_numpy(each) for each in outputs]
            found = [to_numpy(each) for each in gradients]
            return _Run(to_float(loss), found, Outputs(matrices, int(samples)))

    def _difference(self, run: _Run) -> Difference:
        exact = self._exact
        assert exact is not None
        if any(
            bool((np.isfinite(b) & ~np.isfinite(a)).any())
            for a, b in zip(run.outputs.matrices, exact.outputs.matrices, strict=True)
        ):
            return Difference(outputs=math.inf)
        error = outputs_error([run.outputs], [exact.outputs])
        loss = (run.loss - exact.loss) / max(abs(exact.loss), self._floor, 1e-30)
        known = loss if math.isfinite(exact.loss) else None
        known = math.inf if known is not None and math.isnan(known) else known
        outputs = math.inf if error is None else error
        return Difference(outputs, known, *_gradients(run, exact, self._paths()))

    def _without_weights(self) -> list[str]:
        """Return the paths of the layers whose own weights are not finite."""
        weights = zip(self._paths(), self._model.trainable_variables, strict=True)
        finite = [(path, ops.all(ops.isfinite(weight))) for path, weight in weights]
        return list(dict.fromkeys(path for path, each in finite if not bool(each)))

    def _paths(self) -> list[str]:
        paths = {
            id(variable): unit.path
            for unit in self._units
            for member in unit.members
            for variable in member._trainable_variables
        }
        return [paths.get(id(v), "") for v in self._model.trainable_variables]


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
            away, norm = (
                np.linalg.norm(each.astype(np.float64)) for each in (ours - theirs, theirs)
            )
            there = theirs != 0
            yield GradientPair(
                path, float(away), float(norm), int((there & (ours == 0)).sum()), int(there.sum())
            )

    return compared_gradients(pairs())
