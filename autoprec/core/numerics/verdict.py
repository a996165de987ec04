"""The evidence that a proof records of a candidate, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoprec.core.numerics.curve_samples import LossCurves
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.single_step import NOISE_ROUNDOFF
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory


@dataclass(frozen=True)
class Verdict:
    """A candidate judged against float32, with the numbers it rests on.

    "equal": trains like float32. "drift": trains, but not like float32. "rejected": does not.
    "equal at single steps": nothing was trained, so no more can be said. "unproven": the machine
    stalled.
    `loss_deviation` and `gradient_error` are the largest relative ones of the single-step test,
    `loss_null` and `gradient_null` what noise does there; `trajectory_deviation` is that of the
    mean loss of the last fifth, `trajectory_ratio` the deviation over the whole run against the
    noisy one's. What noise does is measured where a test fails without it.
    `steps` is how far training was followed, from `first_loss` to `last_loss` in float32, and
    `most_steps` how far it might have been, so that a repeated proof takes the same steps;
    `trained_batch` is the batch that it trained at, where that is smaller than the recipe's own (0:
    it is not). Shares of a loss are of what is above `loss_origin`.
    `buffers` says what is to be known of the model's buffers, empty for nothing; `caveat` says why
    the verdict means little, as where float32's own loss did not fall from untrained weights.
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
    later ones, inspected for the head-room only. `float32_losses` are those of the run whose
    checkpoints were compared, up to the last that counts. `late_comparisons` are those of a long
    float32 run after its first steps, with `late_noise`, and `long_runs` the runs of that length.
    All losses count from `loss_origin`: 0 as they were recorded. `start` names the weights that
    training began with, where they were trained already, and `ranks` what trained
    together, where several did. `coarse` names a format of so few bits that short trainings show
    gross failures only. `candidate_run` is the candidate's own run, which may be longer
    than float32's. `max_steps` might have been made, at `trained_batch` (0: the recipe's own).
    `stalled` says that the machine stalled before the proof was done.
    """

    comparisons: tuple[StepComparison, ...] = ()
    headroom_comparisons: tuple[StepComparison, ...] = ()
    noise: tuple[NoisyStep, ...] = ()
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
    stalled: bool = False
    seconds: float = 0.0
    not_covered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    roundoff: float = NOISE_ROUNDOFF
