"""The search loop: ask for a point, measure it, tell the study, until acquisition says stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Unit
from autoprec.core.number_words import about_times
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.acquisition import Next, next_point
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.feasibility import fitting_baseline, why_ruled_out, with_room_to_grow
from autoprec.core.speed.float16 import float16_waits
from autoprec.core.speed.keep_memory import describe_gain, start_point
from autoprec.core.speed.space import BATCH, Point, Space, point_key
from autoprec.core.speed.stopping import OUT_OF_TIME, Limits, Stop, time_limit_reached
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome, Status, ran, setup_seconds
from autoprec.tuning.events import Note, Stage, TrialFinished, TrialStarted
from autoprec.tuning.job import TuningJob
from autoprec.tuning.proof.duration import seconds_to_keep_free
from autoprec.tuning.search.needed_islands import (
    find_needed_islands,
    may_need_islands,
    recall_needed,
    with_needed_islands,
)
from autoprec.tuning.search.samplers import next_of_sampler
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import SEARCH_SHARE
from autoprec.workers.runner import Runner, run_trial

#: Share of a worker's memory limit that a trial may be expected to need.
_MEMORY_SHARE = 0.95

#: The most steps of a trial: half a second of steps that take half a millisecond.
_MOST_STEPS = 1000


def outcome_at(history: tuple[Outcome, ...], point: Point) -> Outcome | None:
    """Return the outcome at a point, None where it was not tried."""
    return next(
        (outcome for outcome in history if point_key(outcome.point) == point_key(point)), None
    )


class Search:
    """The search of one tuning, which continues from the state of its study.

    Where plain float32 does not fit in memory at the baseline's batch, the largest batch at which
    it does becomes the baseline (`fitting_baseline` of the history tells which). Where a policy
    raises in the task's own code, its recipes are measured with the modules in float32 that it
    cannot run without; `units` are the modules there are. `spent` are the seconds of its limit that
    an earlier search took, and it ends when this `share` of the time limit has passed, or before,
    for the check to have its time (`evaluated`: of a task with an `evaluate` of its own). Trials at
    batches that the space does not have do not count.
    """

    def __init__(
        self,
        job: TuningJob,
        study: Study,
        space: Space,
        baseline: Point,
        units: Sequence[Unit] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        spent: float = 0.0,
        share: float = SEARCH_SHARE,
        evaluated: bool = False,
    ) -> None:
        self._share, self._evaluated = share, evaluated
        self._job, self._study, self._units = job, study, units
        self.needed_islands = recall_needed(study, space)
        self._space = with_needed_islands(space, self.needed_islands)
        self._beyond_repair: set[Policy] = set()
        self._baseline = baseline
        self._clock, self._began, self._spent = clock, clock(), spent
        self.not_covered: tuple[str, ...] = ()

    @property
    def space(self) -> Space:
        """Return the space, with the modules that policies were found to need in float32."""
        return self._space

    @property
    def seconds(self) -> float:
        """Return what has been spent of the search's limit."""
        return self._spent + self._clock() - self._began

    def _history(self) -> tuple[Outcome, ...]:
        sizes = self._space.batch_sizes
        return tuple(each for each in self._study.history() if each.point[BATCH] in sizes)

    def measure_since_resume(self, runner: Runner) -> None:
        """Time the baseline of a resumed study; forget the trials where its speed has changed.

        New trials could not be compared with them. Two timings must show it.
        """
        study, space, history = self._study, self._space, self._history()
        settled = fitting_baseline(space, self._baseline, history)
        plain = None if settled is None else outcome_at(history, settled)
        if settled is None or plain is None or plain.rate <= 0:
            return
        known = outcome_at(history, start_point(space, settled, history)) or plain
        recipe, budget = space.recipe(known.point), _timing_budget(0.0, 0.0)
        self._job.listener(Stage("search", "the baseline again: are earlier trials comparable?"))
        runner.load()
        for _ in range(2):
            pace = self._run_trial(runner, known.point, recipe, budget, False).rate / known.rate
            if pace <= 0 or abs(math.log(pace)) <= math.log(SPEED.out_of_line_factor):
                return
        study.forget_trials()
        self._job.listener(Note(pace_change_note(pace), warning=True))

    def run(self, runner: Runner) -> tuple[Outcome, ...]:
        """Measure recipes until none is worth its time; return every outcome, oldest first."""
        job, study, space = self._job, self._study, self._space
        self._began = self._clock()
        job.listener(Stage("search", f"{len(space.points())} recipes"))
        repeats = 0
        while True:
            history = self._history()
            settled = fitting_baseline(space, self._baseline, history)
            if settled is None:
                return history
            over = self._time_limit_reached(history) if history else None
            decision = over or self._decide(settled, history, repeats)
            if isinstance(decision, Stop):
                late = over is not None or decision is OUT_OF_TIME
                self.not_covered = self._left_out(history, out_of_time=late)
                job.listener(Note(f"the search ends: {decision.reason}"))
                return history
            trial, point = study.ask(decision.point)
            known = outcome_at(history, point)
            if known is not None:
                study.tell(trial, known)
                repeats += 1
                continue
            repeats = 0
            outcome = self._measure(runner, history, settled, point, decision)
            study.tell(trial, outcome)
            self._report_trial(history, settled, outcome)

    def _decide(self, baseline: Point, history: tuple[Outcome, ...], repeats: int) -> Next | Stop:
        """Return what to try next: what the cost model proposes, or the sampler asked for."""
        job, space = self._job, self._space
        limits = Limits(
            memory_bytes=_memory_limit(job),
            trials=job.options.trials,
            longest_step=job.deadline.longest_step,
            seconds_left=job.deadline.left(self._share_of(history)),
        ).with_setup(setup_seconds(history))
        if job.options.sampler == "cost" or outcome_at(history, baseline) is None:
            return next_point(space, baseline, history, limits)
        return next_of_sampler(job.options.sampler, space, history, limits, repeats)

    def _left_out(self, history: Sequence[Outcome], *, out_of_time: bool) -> tuple[str, ...]:
        """Return what the search did not try: for lack of time, or of trials."""
        said = []
        if missing := _policies_not_compared(self._space, history):
            said.append(f"{' and '.join(missing)} at a batch that the other policies ran at")
        most = self._job.deadline.longest_step * max(outcome.rate for outcome in history)
        tried = {int(outcome.point[BATCH]) for outcome in history}
        if out_of_time:
            said.append("recipes the search had no time to try")
        elif any(size > most for size in self._space.batch_sizes if size not in tried):
            said.append("batches whose steps are too long to be checked in the time")
        return tuple(said)

    def _share_of(self, history: Sequence[Outcome]) -> float:
        """Return the share of the time limit at which the search ends, by what is known so far."""
        kept_free = seconds_to_keep_free(history, self._space, evaluated=self._evaluated)
        return self._job.deadline.share_before(self._share, kept_free)

    def _time_limit_reached(self, history: Sequence[Outcome]) -> Stop | None:
        """Say which limit of time has ended the search; None while there is time."""
        deadline, limit = self._job.deadline, self._job.options.search_limit
        left = deadline.left(self._share_of(history))
        return time_limit_reached(left, deadline.seconds, self.seconds, limit)

    def _measure(
        self,
        runner: Runner,
        history: tuple[Outcome, ...],
        baseline: Point,
        point: Point,
        decision: Next,
    ) -> Outcome:
        job, space = self._job, self._space
        recipe = space.recipe(point)
        job.listener(TrialStarted(len(history), recipe, decision.reason))
        outcome = _outcome_if_too_large(job, history, point)
        if outcome is not None:
            return outcome
        runner.load()
        best = max((outcome.rate for outcome in history), default=0.0)
        size = recipe.effective_batch
        budget = _timing_budget(best / size / 1.25, decision.expected_rate / size)
        is_baseline = point_key(point) == point_key(baseline)
        outcome = self._run_trial(runner, point, recipe, budget, is_baseline)
        if outcome.status is Status.UNSUPPORTED and self._may_be_repaired(recipe):
            outcome = self._repaired(runner, outcome, budget)
        return with_room_to_grow(outcome, job.memory_bytes)

    def _run_trial(
        self, runner: Runner, point: Point, recipe: Recipe, budget: TimingBudget, baseline: bool
    ) -> Outcome:
        job = self._job
        run = partial(
            run_trial,
            runner,
            point,
            recipe,
            seed=job.options.seed,
            budget=budget,
            baseline=baseline,
        )
        return job.contention_monitor.undisturbed(run, lambda: runner.pids, ran)

    def _may_be_repaired(self, recipe: Recipe) -> bool:
        known = recipe.policy.value in self._space.islands or recipe.policy in self._beyond_repair
        return bool(self._units) and not known and may_need_islands(recipe)

    def _repaired(self, runner: Runner, failed: Outcome, budget: TimingBudget) -> Outcome:
        """Measure a recipe that raised with the modules in float32 that it cannot run without."""
        recipe = self._space.recipe(failed.point)
        why_not = find_needed_islands(
            self._job,
            self._study,
            runner,
            self._units,
            recipe,
            problem=failed.reason,
            budget=budget,
            out_of_time=lambda: self._time_limit_reached(self._history()) is not None,
        )
        if why_not:
            self._beyond_repair.add(recipe.policy)
            return replace(failed, reason=f"{failed.reason.rstrip('.')}; {why_not}")
        self.needed_islands = recall_needed(self._study, self._space)
        self._space = with_needed_islands(self._space, self.needed_islands)
        repaired = self._space.recipe(failed.point)
        return self._run_trial(runner, failed.point, repaired, budget, baseline=False)

    def _report_trial(
        self, history: tuple[Outcome, ...], baseline: Point, outcome: Outcome
    ) -> None:
        recipe = self._space.recipe(outcome.point)
        base = outcome_at((*history, outcome), baseline)
        best = max(each.rate for each in (*history, outcome))
        baseline_rate = base.rate if base is not None else 0.0
        self._job.listener(TrialFinished(len(history), recipe, outcome, best, baseline_rate))
        if recipe.keeps_memory and point_key(outcome.point) == point_key(
            {**baseline, KEEP_MEMORY: True}
        ):
            said = describe_gain(baseline, (*history, outcome))
            if said:
                self._job.listener(Note(said))


def pace_change_note(pace: float) -> str:
    """Say that trials of an earlier run do not count, as the machine's speed is another now."""
    said = f"this machine now runs at {about_times(pace)} the speed of the earlier trials"
    return f"{said}: they are measured again"


def _policies_not_compared(space: Space, history: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the policies without a trial at the batch at which most of them have one.

    That is no lack of float16 while it waits for bfloat16.
    """
    tried: dict[int, set[str]] = {}
    for outcome in history:
        tried.setdefault(int(outcome.point[BATCH]), set()).add(str(outcome.point["policy"]))
    compared = max(tried.values(), key=len, default=set())
    waits = {Policy.MIXED_FLOAT16.value} if float16_waits(space, history) else set()
    return tuple(each.value for each in space.policies if each.value not in compared | waits)


def _memory_limit(job: TuningJob) -> float | None:
    """Return the memory a trial may be expected to need, a little below a worker's limit."""
    return None if job.memory_bytes is None else _MEMORY_SHARE * job.memory_bytes


def _outcome_if_too_large(
    job: TuningJob, history: tuple[Outcome, ...], point: Point
) -> Outcome | None:
    """Return the outcome of a recipe known not to fit (Optuna's samplers may propose one)."""
    why = why_ruled_out(point, history, _memory_limit(job))
    return Outcome(point, Status.WOULD_NOT_FIT, reason=why) if why else None


def _timing_budget(too_slow: float, foreseen: float) -> TimingBudget:
    """Return half a second of steps, less for a recipe that makes fewer than `too_slow` a second.

    That tells recipes apart that differ by more than a few per cent; the race does the rest.
    `foreseen` are the steps to expect in a second (0: unknown).
    """
    return TimingBudget(
        seconds=0.5,
        min_steps=2,
        max_steps=_MOST_STEPS,
        too_slow_seconds=1 / too_slow if too_slow else None,
        expected_seconds=1 / foreseen if foreseen else None,
    )
