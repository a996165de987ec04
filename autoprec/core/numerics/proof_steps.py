"""Decides how many steps a proof takes, and at which batch, once, from how long float32 steps take.

Nothing else in a proof depends on a clock. The float32 run is extended as long as its loss still
falls, which its losses alone decide; so a verdict is the same on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.numerics.tolerance import mean

PROOF_LENGTHS = (8, 30, 120, 480)
"""The most steps of a proof; so far apart that the noise of a timing seldom matters."""

SHORT_STEPS = 30
"""A proof takes at least this many steps if it can: its tests of first steps are made for
them."""

FIRST_STEPS = 2 * SHORT_STEPS
"""Steps of the float32 run before a candidate has passed its first steps."""

AVERAGED_BATCHES = 32
"""Further batches over which a loss at the same weights is averaged after the first steps.

An error floor is a few per cent of the loss by then, and so is the difference between batches.
"""

CHECKPOINT_STEPS = (0, 2, 8, 29, 59, 119, 239, 479)
"""The steps at which the float32 run's weights are kept for a comparison."""

FALLING_LOSS_SHARE = 0.35
"""The float32 loss is worth following while it falls by this share when its steps double."""

DEFAULT_SECONDS = 60.0
"""The duration of a proof, estimated from a float32 step, unless configured otherwise."""

SHORT_PROOF_FACTOR = 3.0
"""How many times that duration `SHORT_STEPS` steps may take: fewer show little."""

CHECK_STEP_SECONDS = 0.05
"""A proof trains at a smaller batch if a float32 step of the recipe's own takes twice as long:
a large batch would leave time for few steps."""

SMALLEST_CHECK_BATCH = 8
"""No smaller batch is trained than this."""

_SHORT_RUNS = 4
"""Runs of the first `SHORT_STEPS` steps in addition to the two long ones."""


@dataclass(frozen=True)
class ProofLength:
    """The most steps of a proof, and the samples of the batches that it trains on."""

    steps: int
    batch_size: int


def check_batch(batch_size: int, step_seconds: float) -> int:
    """Return the batch that a proof trains at, of a recipe's batch and its float32 step's duration.

    It is halved while half of it is expected to take `CHECK_STEP_SECONDS` or more.
    """
    if step_seconds < 2 * CHECK_STEP_SECONDS:
        return batch_size
    halved = batch_size >> int(math.log2(step_seconds / CHECK_STEP_SECONDS))
    return max(halved, min(batch_size, SMALLEST_CHECK_BATCH))


def affordable_steps(
    step_seconds: float,
    seconds: float = DEFAULT_SECONDS,
    single_seconds: float | None = None,
    *,
    left: float = math.inf,
    evaluated: bool = False,
) -> int:
    """Return the most steps whose proof takes no longer than `seconds`.

    It is below `SHORT_STEPS` only if those would take `SHORT_PROOF_FACTOR` times as long, or
    usually more than the seconds that are `left` of a time limit. `single_seconds` is the duration
    of a step at the same weights, if that has another batch; for `evaluated` see `usual_steps`.
    """
    single = step_seconds if single_seconds is None else single_seconds

    def duration(steps: int) -> float:
        return _training_cost(steps) * step_seconds + _single_steps(steps) * single

    affordable = [steps for steps in PROOF_LENGTHS if duration(steps) <= min(seconds, left)]
    usual = usual_steps(SHORT_STEPS, evaluated=evaluated) * max(step_seconds, single)
    short = duration(SHORT_STEPS) <= SHORT_PROOF_FACTOR * seconds and usual <= left
    return max([*affordable, *([SHORT_STEPS] if short else [])], default=PROOF_LENGTHS[0])


def usual_steps(steps: int, *, evaluated: bool) -> int:
    """Return what a proof of so many steps takes where training stays close to float32, in steps.

    Float32 and the candidate train once, and over another seed where the task's own `evaluate` is
    compared, too. At every checkpoint each of them takes a step. A run that goes on for as long as
    the loss falls takes more.
    """
    first = min(steps, FIRST_STEPS)
    other_seed = 2 * min(steps, SHORT_STEPS) if evaluated else 0
    return 2 * first + other_seed + 2 * len(checkpoint_steps(first))


def _training_cost(steps: int) -> int:
    """Return the most steps of a proof on the batches that it trains on.

    Beyond `FIRST_STEPS` both runs, and the comparisons at their checkpoints, begin once more. A
    forward pass alone counts as a third of a step.
    """
    again = 2 * FIRST_STEPS if steps > FIRST_STEPS else 0
    averaged = sum(2 * averaged_batches(each) // 3 for each in checkpoint_steps(steps))
    return 2 * steps + again + averaged + _SHORT_RUNS * min(steps, SHORT_STEPS)


def _single_steps(steps: int) -> int:
    """Return the steps of a proof at the weights of its checkpoints, at most.

    Forward passes at the last one (evaluation, a step on scaled buffers) are not counted.
    """
    checkpoints = [steps] if steps <= FIRST_STEPS else [steps, FIRST_STEPS]
    return 5 * sum(len(checkpoint_steps(each)) for each in checkpoints)


def checkpoint_steps(steps: int) -> tuple[int, ...]:
    """Return the steps of a run at which its weights are kept: the usual ones, and its last."""
    within = [step for step in CHECKPOINT_STEPS if step < steps]
    return tuple(dict.fromkeys([*within, steps - 1]))


def averaged_batches(step: int) -> int:
    """Return over how many further batches the loss at checkpoint `step` is averaged."""
    return AVERAGED_BATCHES if step >= FIRST_STEPS else 0


def stopping_points(steps: int) -> tuple[int, ...]:
    """Return where a run may end: at `FIRST_STEPS`, two, four ... times that, or `steps`."""
    doubled = [FIRST_STEPS]
    while doubled[-1] < steps:
        doubled.append(2 * doubled[-1])
    return tuple(sorted({min(steps, point) for point in doubled}))


def has_ended(losses: Sequence[float | None], steps: int) -> bool:
    """Return whether a float32 run that may take `steps` is over.

    It ends at a stopping point from which its loss no longer falls by `FALLING_LOSS_SHARE` when the
    steps double, and if a loss is not finite.
    """
    made = len(losses)
    if made >= steps or any(loss is None or not math.isfinite(loss) for loss in losses):
        return True
    return made in stopping_points(steps) and loss_fall(losses) < FALLING_LOSS_SHARE


def stopping_step(losses: Sequence[float | None], steps: int) -> int:
    """Return the step at which a run that may take `steps` ends; its length if it goes on."""
    ending = (
        made
        for made in stopping_points(steps)
        if made <= len(losses) and has_ended(losses[:made], steps)
    )
    return next(ending, len(losses))


def loss_fall(losses: Sequence[float | None]) -> float:
    """Return the share by which the loss fell from the second quarter of a run to its last.

    It is relative to the larger of both as magnitudes: a loss may be negative. The quarters'
    middles are a factor of 7/3 apart, close to a doubling.
    """
    known = [loss for loss in losses if loss is not None]
    quarter = len(known) // 4
    if not quarter:
        return 0.0
    before, after = mean(known[quarter : 2 * quarter]), mean(known[-quarter:])
    return (before - after) / (max(abs(before), abs(after)) or 1.0)
