"""The evidence that a proof records of a candidate, the verdict on it, and that in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.core.number_words import percent, plain_number
from autoprec.core.numerics.loss_curves import LossCurves, SeedRun
from autoprec.core.numerics.single_step import NOISE_ROUNDOFF
from autoprec.core.numerics.tolerance import Check, Tolerance, mean, or_infinity, size_of
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory, above


@dataclass(frozen=True)
class Verdict:
    """A candidate judged against float32, with the numbers it rests on.

    "equal": trains like float32. "drift": trains, but not like float32. "rejected": does not.
    "equal at single steps": nothing was trained to the end, so no more can be said. "unproven": the
    time limit, or a machine that stalled, ended the check before it told anything.
    `loss_deviation` and `gradient_error` are the largest relative ones of the single-step test,
    `loss_null` and `gradient_null` what noise does there; `trajectory_deviation` is that of the
    mean loss of the last fifth, `trajectory_ratio` the deviation over the whole run against the
    noisy one's. What noise does is measured if a test fails without it.
    `steps` is how far training was followed, from `first_loss` to `last_loss` in float32, and
    `most_steps` how far it might have been, so that a repeated proof takes the same steps;
    `trained_batch` is the batch that it trained at, if that is smaller than the recipe's own (0:
    it is not). Shares of a loss are of what is above `loss_origin`.
    `buffers` says what is to be known of the model's buffers, empty for nothing; `caveat` says why
    the verdict means little, as when float32's own loss did not fall from untrained weights.
    A number that was not finite or not measured is None. `curves` are the losses of its longest
    training, to be looked at; the verdict does not rest on them.
    """

    verdict: Literal["equal", "drift", "rejected", "equal at single steps", "unproven"]
    reason: str
    step: int | None = None
    loss_deviation: float | None = None
    gradient_error: float | None = None
    loss_null: float | None = None
    gradient_null: float | None = None
    trajectory_deviation: float | None = None
    trajectory_ratio: float | None = None
    metric: float | None = None
    metric_reference: float | None = None
    skipped_steps: int = 0
    steps: int = 0
    most_steps: int = 0
    trained_batch: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    loss_origin: float = 0.0
    seconds: float = 0.0
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    buffers: str = ""
    caveat: str = ""
    curves: LossCurves | None = None

    @property
    def accepted(self) -> bool:
        """Return whether the candidate trains like float32 as far as was tested."""
        return self.verdict == "equal"


@dataclass(frozen=True)
class ProofEvidence:
    """All that was recorded of one candidate; `roundoff` is that of the format it computes in.

    `comparisons` are the checkpoints of the first steps, with `noise`; `headroom_comparisons` are
    later ones, inspected for the head-room only, and `other_batches` single steps on batches of
    other sizes than the first one's, with `other_noise`. `float32_losses` are those of the run
    whose checkpoints were compared, up to the last that counts. `late_comparisons` are those of a
    long float32 run after its first steps, with `late_noise`, and `long_runs` the runs of that
    length. All losses count from `loss_origin`: 0 as they were recorded. `start` names the weights
    that training began with, if they were trained already, and `ranks` what trained together, if
    several did. `coarse` names a format of so few bits that short trainings show
    gross failures only. `candidate_run` is the candidate's own run, which may be longer
    than float32's. `max_steps` might have been made, at `trained_batch` (0: the recipe's own).
    `ended_by` is what ended the proof before it was done (empty: nothing did).
    """

    comparisons: tuple[StepComparison, ...] = ()
    headroom_comparisons: tuple[StepComparison, ...] = ()
    other_batches: tuple[StepComparison, ...] = ()
    noise: tuple[NoisyStep, ...] = ()
    other_noise: tuple[NoisyStep, ...] = ()
    runs: tuple[SeedRun, ...] = ()
    float32_losses: tuple[float | None, ...] = ()
    loss_origin: float = 0.0
    late_comparisons: tuple[StepComparison, ...] = ()
    late_noise: tuple[NoisyStep, ...] = ()
    long_runs: tuple[SeedRun, ...] = ()
    max_steps: int = 0
    trained_batch: int = 0
    start: str = ""
    ranks: str = ""
    coarse: str = ""
    candidate_run: Trajectory | None = None
    ended_by: Literal["", "the time limit", "a stalled machine"] = ""
    seconds: float = 0.0
    not_covered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    roundoff: float = NOISE_ROUNDOFF

    @property
    def is_zero(self) -> bool:
        """Return whether float32's loss is zero wherever it is known."""
        runs = [loss for run in self.runs for loss in run.reference.losses]
        known = [*runs, *(point.reference for point in self.comparisons)]
        return bool(known) and not any(known)


NOTHING_LEARNED = "the loss did not fall in these steps, so they say little about later training"
"""What is to be known of a proof over steps in which nothing was learned."""

NOTHING_TO_COMPARE = (
    "float32's loss is zero at every step, so there is nothing to compare with: start from weights "
    "that have something to learn"
)
"""What is said of a proof in which float32 has no loss at all."""

STEPS_SETTING = "steps (proof_steps)"

_ADVICE = {
    "the time limit": "give it a longer `time_limit`",
    "a stalled machine": f"repeat it, or give it fewer {STEPS_SETTING}",
}
"""What to do about a proof that was ended, by what ended it."""

HOW_TO_SEE_LEARNING = (
    "start from weights that have trained for a while (`checkpoint`), or give the check more steps "
    "(`proof_steps`)"
)
"""What to do about that."""


def describe_single_steps(numbers: Verdict) -> str:
    """Say how near the loss was at the same weights; empty if it was not compared."""
    if numbers.loss_deviation is None:
        return ""
    told = f"loss within {percent(numbers.loss_deviation)} at the same weights"
    if numbers.loss_null is None or numbers.loss_deviation <= Tolerance.loss:
        return told
    return f"{told}, where small noise in the weights moves it by {percent(numbers.loss_null)}"


def describe_untrained(numbers: Verdict, evidence: ProofEvidence) -> str:
    """Say that single steps were equal and what kept them from being all."""
    ended = evidence.ended_by
    why = f"{ended} ended its trainings ({_ADVICE[ended]})" if ended else "nothing was trained"
    return f"equal at single steps, but {why}: {describe_single_steps(numbers)}"


def describe_ended(evidence: ProofEvidence) -> str:
    """Say why a proof told nothing, what that left out, and what to do."""
    ended = evidence.ended_by
    if not ended:
        return f"nothing could be compared with float32; give the check more {STEPS_SETTING}"
    missing = "; ".join(evidence.not_covered)
    return f"{ended} ended its check, not covered: {missing}; {_ADVICE[ended]}"


def describe_end(curves: Check, steps: int) -> str:
    """Describe how far training ended from float32."""
    ended, late = percent(or_infinity(curves.deviation)), percent(or_infinity(curves.second_half))
    return f"after {steps} steps it is {ended} away, and single steps by then {late}"


def describe_success(numbers: Verdict, ended: Check, evidence: ProofEvidence) -> str:
    """Describe what passed and over which part of training; `ended` is the longest runs' check."""
    loss = _from_to(or_infinity(numbers.first_loss), or_infinity(numbers.last_loss))
    start = evidence.start
    parts = [describe_single_steps(numbers), _describe_passed(numbers, ended)]
    over = f"{numbers.steps} steps from {start}" if start else f"the first {numbers.steps} steps"
    told = (
        f"trains like float32: equal over {over}, loss {loss}; "
        f"{', '.join(part for part in parts if part)}"
    )
    if numbers.caveat:
        told += f"; {numbers.caveat}"
    if numbers.buffers:
        told += f"; {numbers.buffers}"
    if evidence.coarse:
        told += (
            f"; in {evidence.coarse}, {numbers.steps} steps show gross failures only: compare a "
            "longer training by its metric"
        )
    if evidence.trained_batch:
        told += f"; trained at batch {evidence.trained_batch}"
    if evidence.ranks:
        told += f"; checked at {evidence.ranks}"
    if numbers.not_covered:
        told += f" (not covered: {'; '.join(numbers.not_covered)})"
    return told


def describe_shares(numbers: Verdict, *, with_loss: bool = False) -> str:
    """Say what shares of a loss are of: what is above its origin, and how float32's went."""
    told = ""
    if with_loss and numbers.first_loss is not None and numbers.last_loss is not None:
        told = f"; float32's goes from {_from_to(numbers.first_loss, numbers.last_loss)}"
    if numbers.loss_origin != 0.0:
        told += f"; shares are of the loss above {plain_number(numbers.loss_origin)}"
    return told


def _from_to(first: float, last: float) -> str:
    """Describe how a loss went, in as many digits as show it: two at least, five at most."""
    size, change = max(abs(first), abs(last)), abs(first - last)
    digits = 2
    if 0.0 < change < math.inf:
        digits = min(5, max(2, 1 + math.ceil(math.log10(size / change))))
    return f"{first:.{digits}g} to {last:.{digits}g}"


def _describe_passed(numbers: Verdict, ended: Check) -> str:
    """Say where runs that passed ended, and why a difference that is left does not count."""
    steps = numbers.steps
    first, last = (or_infinity(loss) for loss in (numbers.first_loss, numbers.last_loss))
    largest = "first" if size_of([first, last]) == abs(first) else "largest"
    if ended.below is not None:
        why = f"chance: {ended.excused}" if ended.excused else "not compared"
        return (
            f"both end below {percent(ended.below)} of the {largest} loss after {steps} steps, "
            f"where their difference is {why}"
        )
    away = percent(or_infinity(ended.deviation))
    if ended.excused:
        return f"{away} away after {steps} steps, which is chance: {ended.excused}"
    return f"within {away} after {steps} steps"


def longest_losses(evidence: ProofEvidence) -> tuple[float | None, ...]:
    """Return float32's losses over the longest run that was judged, as the task gives them."""
    runs = [run.reference for run in (*evidence.long_runs, *evidence.runs)]
    losses = max((run.losses for run in runs), key=len, default=())
    return above(losses, -evidence.loss_origin)


def loss_range(losses: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return where a loss began and ended; None where it was not always finite."""
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(losses):
        return None, None
    return known[0], mean(known[-max(1, len(known) // 5) :])
