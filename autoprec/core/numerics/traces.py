"""What training looked like numerically: scalars and histograms, never tensors.

Steps count from 0. A loss that is not finite is None, so that every trace is a plain value that
JSON and YAML can hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


def above(losses: Sequence[float | None], origin: float) -> tuple[float | None, ...]:
    """Return losses counted from `origin`; None if one is not known."""
    return tuple(None if loss is None else loss - origin for loss in losses)


@dataclass(frozen=True)
class Trajectory:
    """The losses of one training run from the initial weights.

    `losses[i]` is the loss of step i before its update, in float32; `skipped` the steps whose
    update the loss scaler skipped; `scales` the loss scale after each step (empty
    without one). There may be fewer steps than requested: a run also ends when its time is up, and
    with the first loss that is not finite.
    `seconds` is the duration of the whole run; `step_seconds` that of its fastest step, the first
    one excluded because it builds, traces and compiles (0: not known): other processes on the
    machine delay most steps, but seldom all of them.
    `reproducible` is False if the data changed between runs and had to be replayed; `metric`
    is the user's own `evaluate(model)` after the last step, if every loss was finite.
    """

    losses: tuple[float | None, ...]
    skipped: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    seed: int = 0
    metric: float | None = None
    seconds: float = 0.0
    step_seconds: float = 0.0
    reproducible: bool = True
    notes: tuple[str, ...] = ()

    def above(self, origin: float) -> Trajectory:
        """Return the run with its losses counted from `origin`."""
        return replace(self, losses=above(self.losses, origin))

    @property
    def finite(self) -> bool:
        """Return whether every loss was a finite number."""
        return all(loss is not None for loss in self.losses)

    @property
    def seconds_per_step(self) -> float:
        """Return `step_seconds`, or the mean over the run if that is not known."""
        return self.step_seconds or self.seconds / max(1, len(self.losses))


@dataclass(frozen=True)
class BufferUpdate:
    """What one step made of one buffer, such as a running mean, from the same state as float32.

    `error` is ||b - b32|| over the size of float32's change (None: not finite). `rounded` says that
    the numbers it adds to the buffer had been rounded to 16 bits, and float32's had not;
    `stalls` that a lasting sum is itself rounded to 16 bits: once large, it loses what is added.
    """

    name: str
    error: float | None
    rounded: bool = False
    stalls: bool = False


@dataclass(frozen=True)
class StepComparison:
    """One step computed twice from the same float32 state, batch and RNG stream.

    `step` is the checkpoint's; `loss` the candidate's and `reference` float32's loss;
    `gradient_error` is ||g - g32|| / ||g32|| over all parameters (None: not finite). `largest` is
    the largest magnitude of any float16 number in the forward pass (None: there is none, or it was
    not looked at), and `overflowed` says that it was infinite, so that `largest` is not known.
    `backward` is the largest magnitude of any float16 number in the backward pass, as at loss scale
    1 (None: not looked at, or infinite). `gradient_seen` is False if the training step shows no
    gradient to compare. `mean_loss` and `mean_reference` are means over further batches at the same
    weights (None: none were looked at, or a loss is not finite), and `mean_error` the standard
    error of their difference. `buffers` are those that the float32 step changed. `noise_share` is
    which share of the square of float32's gradient is noise (None: not known). If the model was
    `evaluated` as well, `evaluation_error` is how far its outputs are from float32's, relative to
    how those vary over the batch (None: not finite, or of another shape). `batch` names a batch of
    another size than the first one's; empty for the step's own.
    """

    step: int
    loss: float | None
    reference: float
    gradient_error: float | None
    largest: float | None = None
    overflowed: bool = False
    gradient_seen: bool = True
    backward: float | None = None
    mean_loss: float | None = None
    mean_reference: float | None = None
    mean_error: float = 0.0
    buffers: tuple[BufferUpdate, ...] = ()
    noise_share: float | None = None
    evaluated: bool = False
    evaluation_error: float | None = 0.0
    batch: str = ""

    def with_mean_losses(self, ours: Sequence[float], theirs: Sequence[float]) -> StepComparison:
        """Return the point with the means of the losses of further batches, the same for both."""
        pairs, count = list(zip(ours, theirs, strict=True)), len(ours)
        if not count or not all(math.isfinite(x) for pair in pairs for x in pair):
            return self
        mean, reference = math.fsum(ours) / count, math.fsum(theirs) / count
        squares = math.fsum((a - b - mean + reference) ** 2 for a, b in pairs)
        error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.inf
        return replace(self, mean_loss=mean, mean_reference=reference, mean_error=error)

    def above(self, origin: float) -> StepComparison:
        """Return the point with its losses counted from `origin`."""
        loss, mean, mean_reference = above((self.loss, self.mean_loss, self.mean_reference), origin)
        return replace(
            self,
            loss=loss,
            reference=self.reference - origin,
            mean_loss=mean,
            mean_reference=mean_reference,
        )

    @property
    def losses(self) -> tuple[float, float]:
        """Return the candidate's loss (infinity: not finite) and float32's; means if known."""
        if self.mean_loss is not None and self.mean_reference is not None:
            return self.mean_loss, self.mean_reference
        return math.inf if self.loss is None else self.loss, self.reference


@dataclass(frozen=True)
class NoisyStep:
    """What float32 with noisy weights gives at one checkpoint: the single-step test's null."""

    step: int
    loss: float | None
    reference: float
    gradient_error: float | None = None
    buffers: tuple[BufferUpdate, ...] = ()
    evaluation_error: float | None = 0.0
    batch: str = ""

    def above(self, origin: float) -> NoisyStep:
        """Return the point with its losses counted from `origin`."""
        (loss,) = above((self.loss,), origin)
        return replace(self, loss=loss, reference=self.reference - origin)


@dataclass(frozen=True)
class SettingsPoint:
    """One batch at the initial weights: under a recipe's settings in float32, and in plain float32.

    `outputs_error` is how far the model's outputs are apart, relative to how they vary over the
    batch; `gradient_error` is relative to the gradient. `evaluation_error` is the larger of both
    errors, the outputs' and the loss's, in evaluation. None: not finite, or of another shape.
    `buffers` are those that the float32 step changed.
    """

    batch: int
    loss: float | None
    reference: float | None
    outputs_error: float | None
    gradient_error: float | None
    evaluation_error: float | None = 0.0
    buffers: tuple[BufferUpdate, ...] = ()


@dataclass(frozen=True)
class SettingsComparison:
    """What a recipe's settings change besides rounding; see `Tracer.compare_settings`.

    `weights_error` is how far the weights are apart after `updates` updates, relative to how far
    these moved them. `noise` and `weights_noise` are the same for plain float32 with weights that
    are off by `rounding`, a few times as much as its own rounding errors. `metric_error` is the
    relative error of the task's own `evaluate`. Without points nothing could be compared;
    `not_covered` says why. `drew` says whether plain float32 drew random numbers, and `evaluated`
    whether batches were evaluated as well.
    """

    points: tuple[SettingsPoint, ...] = ()
    noise: tuple[SettingsPoint, ...] = ()
    weights_error: float | None = None
    weights_noise: tuple[float | None, ...] = ()
    updates: int = 0
    rounding: float = 0.0
    outputs_seen: bool = True
    drew: bool = False
    evaluated: bool = False
    metric_error: float | None = 0.0
    metric_noise: tuple[float | None, ...] = ()
    not_covered: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExponentHistogram:
    """How the magnitudes of gradient tensors are spread over exponents of two.

    `counts[e]` is the share of non-zero elements with magnitude in [2**e, 2**(e+1)), each tensor
    weighted by its share of the gradient norm; keys are exponents as text, because JSON knows no
    integer keys. `largest` is the largest exponent of any tensor of the backward pass that would
    be float16 under float16, at loss scale 1 (None: no such tensor, or all zero). `finite` is
    False if the backward pass held infinities or NaN, which no scale can fix.
    """

    largest: int | None
    smallest: int | None
    counts: Mapping[str, float] = field(default_factory=dict)
    batches: int = 0
    finite: bool = True


@dataclass(frozen=True)
class UnitTrace:
    """One module's largest magnitudes, as exponents of two, and its gradient's underflow."""

    path: str
    forward_largest: int | None = None
    backward_largest: int | None = None
    underflow: float = 0.0
