"""Judges checks that are made while training goes on: one micro-batch, computed again in float32.

Both runs of a check have the same weights, inputs, modes, random numbers and the same gradient of
the outputs, so what differs is what rounding does, in the forward pass and in the backward pass.
What noise of bfloat16's size on the weights does to float32 itself is no fault of a precision.
Nothing here runs a model or looks at a clock.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.core.dtypes import DType, Policy
from autoprec.core.number_words import percent
from autoprec.core.numerics.late_failures import STANDARD_ERRORS
from autoprec.core.numerics.single_step import (
    BOTH_SIGNS_FACTOR,
    MIN_NOISE_SHARE,
    NOISE_ROUNDOFF,
    TRANSIENT_FACTOR,
)
from autoprec.core.numerics.tolerance import Tolerance, chance, finite_or_none

FIRST_DOUBLED = 50
"""After the first update checks are due at this one, then at twice it, and so on."""

CONFIRM_AFTER = 10
"""Updates between a check that fails and the next one; fewer from `FIRST_DOUBLED` on, as what grows
may do so within a few."""

CONFIRM_SHARE = 1 / 25
"""There it is this share of the updates so far, if that is less."""

WAITED_FOR = 100
"""Updates that a check after a failed one waits for a batch that is as large."""

FAILED_IN_A_ROW = 2
"""So many checks that fail one after the other are acted on, unless one is certain by itself."""

ALLOWED_OF_OUTPUTS = 0.25
"""How far outputs may be from float32's, relative to how they vary over the batch."""

ALLOWED_OF_MODULE = 0.9
"""How far one module's gradient may be from float32's; one that is all zero is off by 1."""

NOTHING_LEFT = 0.9
"""Noise excuses no outputs and no gradient further away than this: what it moves so far is broken
by rounding, whatever else it is."""

DEFINED = 0.25
"""If noise moves a module's gradient further, rounding is no smaller than the gradient."""

FEWEST_SAMPLES = 16
"""Fewer samples do not tell how much of a loss's change is chance."""

MOST_NAMED = 3
"""The most modules that a message names."""


_LOSS_IS = "loss is"
_LOST = "weights are not finite"


@dataclass(frozen=True)
class Difference:
    """How far a repeated call is from float32's.

    `outputs` is relative to how float32's outputs vary over the batch; `loss` is what their
    difference does to the loss, to first order, as a share of it (None: the loss is not known), and
    `loss_error` the standard error of that over the samples (0: it is not known).
    `gradient` is ||g - g32|| / ||g32|| over all parameters, `modules` the same for each module;
    `vanished` is the share of the elements of float32's gradient that are 0 in this one (NaN: the
    gradient is not known). What is not finite although float32's is counts as infinity. `lost` are
    the modules whose own weights are not finite: nothing is known besides.
    """

    outputs: float = 0.0
    loss: float | None = None
    gradient: float = 0.0
    modules: Mapping[str, float] = field(default_factory=dict)
    vanished: float = 0.0
    loss_error: float = 0.0
    lost: tuple[str, ...] = ()

    @classmethod
    def without_weights(cls, lost: Sequence[str]) -> Difference:
        """Return what is found where the weights of the modules `lost` are not finite."""
        return cls(outputs=math.inf, gradient=math.inf, vanished=math.nan, lost=tuple(lost))

    @property
    def overflows_backward_only(self) -> bool:
        """Return whether outputs are finite and the gradient is not."""
        return math.isfinite(self.outputs) and not math.isfinite(self.gradient)

    def without_gradient(self) -> Difference:
        """Return what is left to judge if the loss scale let the backward pass overflow."""
        return replace(self, gradient=math.nan, modules={}, vanished=math.nan)


def standard_error(changes: Sequence[float]) -> float:
    """Return the standard error of the sum of what each sample changes a loss by; 0 of few."""
    if len(changes) < FEWEST_SAMPLES:
        return 0.0
    return statistics.stdev(changes) * math.sqrt(len(changes))


@dataclass(frozen=True)
class GradientPair:
    """One parameter's gradient beside float32's, in the module at `path`.

    `away` is the norm of the difference and `norm` that of float32's; of the `elements` of that
    one that are not 0 so many are `zeros` here.
    """

    path: str
    away: float
    norm: float
    zeros: float
    elements: float


def compared_gradients(pairs: Iterable[GradientPair]) -> tuple[float, dict[str, float], float]:
    """Return a `Difference`'s gradient, modules and vanished share.

    Left out is what is not finite in float32 either.
    """
    away: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    zeros = elements = 0.0
    for pair in pairs:
        if math.isfinite(pair.norm):
            apart = pair.away if math.isfinite(pair.away) else math.inf
            away[pair.path] = math.hypot(away[pair.path], apart)
            size[pair.path] = math.hypot(size[pair.path], pair.norm)
            zeros, elements = zeros + pair.zeros, elements + pair.elements
    whole = _ratio(math.hypot(*away.values()), math.hypot(*size.values()))
    modules = {path: _ratio(away[path], size[path]) for path in away}
    return whole, modules, zeros / elements if elements else 0.0


def _ratio(away: float, size: float) -> float:
    if away == 0.0:
        return 0.0
    return away / size if size else math.inf


@dataclass(frozen=True)
class WatchedStep:
    """One check during training: after how many `updates`, on how many `samples` of a `batch`.

    The numbers are those of `Difference`, None if they are not known or not finite. `problem` is
    empty if nothing was found; `action` is what was done about it, and `modules` are those that
    mend it in float32. `not_checked` says why the check could not be made, or not on the whole
    batch; where nothing could be told, no `samples` were checked.
    """

    updates: int
    samples: int = 0
    batch: int = 0
    outputs: float | None = None
    loss: float | None = None
    gradient: float | None = None
    vanished: float | None = None
    problem: str = ""
    modules: tuple[str, ...] = ()
    action: str = ""
    not_checked: str = ""

    def repeats(self, earlier: WatchedStep | None) -> bool:
        """Return whether a fault may be that of an `earlier` check, not chance both times.

        Losses that are off to both sides, if all else is right, are rounding that averages out.
        """
        if earlier is None or not (self._only_loss and earlier._only_loss):
            return bool(self.problem)
        losses = (self.loss or 0.0, earlier.loss or 0.0)
        most = BOTH_SIGNS_FACTOR * TRANSIENT_FACTOR * Tolerance().loss
        return losses[0] * losses[1] > 0.0 or max(map(abs, losses)) > most

    @property
    def is_certain(self) -> bool:
        """Return whether a fault needs no second check: outputs that noise cannot excuse.

        At the first update outputs may say nothing yet.
        """
        lost = self.outputs is None or self.outputs > NOTHING_LEFT
        return bool(self.problem) and lost and self.updates > 1

    @property
    def is_lost(self) -> bool:
        """Return whether weights are not finite, which no precision mends from there."""
        return _LOST in self.problem

    @property
    def _only_loss(self) -> bool:
        return _LOSS_IS in self.problem


MOST_NOISE = Difference(outputs=1.0, loss=0.25, gradient=1.0)
"""Noise that excuses all that noise can, for when it cannot be looked at."""


def next_check(updates: int, every: int) -> int:
    """Return the number of the next update that is checked, after `updates` of them.

    Those are 1, 50, 100, 200, 400, ... until that would be more than `every` updates, which from
    then on are between two.
    """
    if updates < 1:
        return 1
    doubled = FIRST_DOUBLED
    while doubled <= updates:
        doubled *= 2
    longest = doubled // 2 if doubled > FIRST_DOUBLED else FIRST_DOUBLED - 1
    return doubled if longest <= every else updates + every


def confirm_after(updates: int, every: int) -> int:
    """Return how many updates after a fault at one of these numbers the next check is due."""
    early = int(CONFIRM_SHARE * updates) if updates >= FIRST_DOUBLED else CONFIRM_AFTER
    return min(CONFIRM_AFTER, early, every)


def fault_expected(step: WatchedStep, earlier: Iterable[WatchedStep]) -> float:
    """Return the update at which outputs will be too far away if they go on growing as they did.

    That is by the same factor an update as since the `earlier` check that was furthest away.
    Infinity if that was no nearer than `step`, or if noise excuses more than what is allowed.
    """
    known = [each for each in earlier if each.outputs and each.updates < step.updates]
    before = max(known, key=lambda each: each.outputs or 0.0, default=step)
    least, now = before.outputs or 0.0, step.outputs or 0.0
    if not 0.0 < least < now < ALLOWED_OF_OUTPUTS:
        return math.inf
    octaves = math.log2(now / least) / (step.updates - before.updates)
    return step.updates + math.log2(ALLOWED_OF_OUTPUTS / now) / octaves


def judge(
    found: Difference,
    noise: Sequence[Difference],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> str:
    """Say what is wrong with a 16-bit run; nothing if it does as float32 does.

    `noise` is what noise on the weights does to float32, empty if it was not looked at: then a
    problem is one unless noise explains it. A format with a smaller `roundoff` than bfloat16's is
    allowed less of it. The loss of a single batch may deviate as far as the check before training
    leaves to what follows; up to `BOTH_SIGNS_FACTOR` times as far where its samples' losses move up
    and down so much that it may be chance.
    """
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    if found.lost:
        return f"{_LOST} in {named(found.lost)}"
    if not math.isfinite(found.outputs):
        return "its outputs are not finite, and float32's are"
    outputs = finer * max((each.outputs for each in noise), default=0.0)
    limit = max(ALLOWED_OF_OUTPUTS, min(NOTHING_LEFT, tolerance.loss_null * outputs))
    if found.outputs > limit:
        return _away("outputs are", found.outputs, limit)
    gradient = finer * max((each.gradient for each in noise), default=0.0)
    limit = max(tolerance.gradient, min(NOTHING_LEFT, tolerance.gradient_null * gradient))
    zeros = f"; {percent(found.vanished)} of it is 0" if found.vanished > tolerance.loss else ""
    if found.gradient > limit:
        return _away("gradient is", found.gradient, limit) + zeros
    wrong = _wrong_modules(found, noise, finer, tolerance)
    if wrong:
        error = max(found.modules[path] for path in wrong)
        return _away(f"gradient of {named(wrong)} is", error, ALLOWED_OF_MODULE) + zeros
    if found.loss is not None:
        loss = finer * max((abs(each.loss or 0.0) for each in noise), default=0.0)
        limit = max(TRANSIENT_FACTOR * tolerance.loss, chance(loss, tolerance.loss_null))
        by_chance = min(STANDARD_ERRORS * found.loss_error, BOTH_SIGNS_FACTOR * limit)
        if abs(found.loss) > max(limit, by_chance):
            return _away(_LOSS_IS, abs(found.loss), limit)
    return ""


class StepJudge:
    """Judges the runs of one check under `policy`, with noise if there is doubt.

    `noise` returns what noise does to float32, or says why that is not known; it is called once at
    most. `undecided` asks for another check soon: in float16 only the backward pass was not finite,
    which is the loss scale's business, or a loss is away by what may be chance.
    """

    def __init__(self, policy: Policy, noise: Callable[[], Sequence[Difference] | str]) -> None:
        self._dtype, self._make_noise = policy.compute_dtype, noise
        self._noise: Sequence[Difference] | str | None = None
        self.undecided = False

    def judged(self, step: WatchedStep, found: Difference) -> WatchedStep:
        """Return the check with what it found."""
        overflowed = self._dtype is DType.FLOAT16 and found.overflows_backward_only
        if overflowed:
            found = found.without_gradient()
        problem = self.problem(found)
        by_chance = not problem and bool(self.problem(replace(found, loss_error=0.0)))
        self.undecided = overflowed or by_chance
        if isinstance(self._noise, str):
            unknown = f"what noise does is not known: {self._noise}"
            step = replace(step, samples=0, not_checked=unknown)
        return replace(
            step,
            outputs=finite_or_none(found.outputs),
            loss=None if found.loss is None else finite_or_none(found.loss),
            gradient=finite_or_none(found.gradient),
            vanished=finite_or_none(found.vanished),
            problem=problem,
        )

    def problem(self, found: Difference) -> str:
        """Say what is wrong with a run; nothing if that cannot be told from noise."""
        roundoff = self._dtype.limits.unit_roundoff
        problem = judge(found, (), Tolerance(), roundoff)
        if not problem or math.isinf(found.outputs):
            return problem
        if self._noise is None:
            self._noise = self._make_noise()
        if isinstance(self._noise, str):
            return ""
        return judge(found, self._noise, Tolerance(), roundoff)


def named(paths: Sequence[str]) -> str:
    """Name modules in a sentence: at most `MOST_NAMED` of them, and how many more."""
    shown = [path or "the model's own code" for path in paths[:MOST_NAMED]]
    more = len(paths) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _away(what: str, error: float, limit: float) -> str:
    return (
        f"at the same weights and inputs its {what} {percent(error)} away from float32's; "
        f"{percent(limit)} is allowed"
    )


def _wrong_modules(
    found: Difference, noise: Sequence[Difference], finer: float, tolerance: Tolerance
) -> list[str]:
    """List modules whose gradient is lost, the worst first.

    One that noise moves as far has none to lose: the bias before a batch norm.
    """
    wrong = []
    for path, error in found.modules.items():
        null = max((each.modules.get(path, 0.0) for each in noise), default=0.0)
        allowed = max(ALLOWED_OF_MODULE, tolerance.gradient_null * finer * null)
        if error > allowed and null < DEFINED:
            wrong.append(path)
    return sorted(wrong, key=lambda path: -found.modules[path])
