"""The study: every trial's point and outcome in Optuna, and what else a resumed tuning needs.

The study's name carries a hash of everything that would make old trials wrong: the task, the device
and software, the options, the seed, the version of autoprec. A changed one starts a study of its
own in the same journal, and so does a changed space: trials of different spaces are not mixed.
Optuna is imported when a study is opened, not before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.recipe import KnobValue
from autoprec.core.speed.space import Point, Space, point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.study.notes import FIRST_TRIAL, OUTCOME, SPACE, StudyNote
from autoprec.tuning.study.storage import mark_in_use, open_storage, storage_error
from autoprec.version import __version__

T = TypeVar("T")

FINAL_SUFFIX = "-result"
"""Ends the name of the study that a finished tuning is shown as."""


def study_name(stem: str, *parts: object) -> str:
    """Return a name that changes with anything in `parts`, and with the version of autoprec."""
    text = json.dumps([__version__, *map(to_plain, parts)], sort_keys=True, default=str)
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Study:
    """Trials and notes of one tuning, kept outside this process as they are made."""

    def __init__(self, storage: str | Path, name: str, *, fresh: bool = False) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = name
        self.location = str(storage)
        with self._translate_errors():
            self._storage = open_storage(storage)
            self.close = mark_in_use(storage, self)
            if fresh:
                _delete(self._storage, name)
            self._notes = self._open(name)
            self._trials = self._notes
            self._distributions: dict[str, Any] = {}
            self._fail_unfinished()

    def _open(self, name: str) -> Any:
        import optuna

        return optuna.create_study(
            storage=self._storage, study_name=name, direction="maximize", load_if_exists=True
        )

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise `UsageError` where the study cannot be read or written."""
        from optuna.exceptions import StorageInternalError

        try:
            yield
        except (OSError, StorageInternalError) as error:
            raise storage_error(self.location, error) from error

    def set_space(self, space: Space, sampler: Any = None) -> None:
        """Set the space that trials are asked from; without a sampler, at given points alone."""
        levels = space.levels()
        with self._translate_errors():
            self._separate_spaces(levels)
        if sampler is not None:
            self._trials.sampler = sampler
        self._distributions = distributions_of(levels)

    def _separate_spaces(self, levels: Mapping[str, tuple[KnobValue, ...]]) -> None:
        """Give the trials a study of their own if this study's came from another space."""
        space = study_name("space", levels)
        first = self._notes.user_attrs.get(SPACE.name)
        if first is None:
            self._notes.set_user_attr(SPACE.name, space)
        elif first != space:
            self._trials = self._open(f"{self.name}-{space}")
            self._fail_unfinished()

    def _fail_unfinished(self) -> None:
        """Mark trials that never ended as failed: the tuner that ran them was killed."""
        from optuna.trial import TrialState

        for trial in self._trials.get_trials(deepcopy=False):
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                own = self._storage.get_study_id_from_name(self._trials.study_name)
                known = self._storage.get_trial_id_from_study_id_trial_number(own, trial.number)
                self._storage.set_trial_state_values(known, TrialState.FAIL)

    def history(self) -> tuple[Outcome, ...]:
        """Return every finished trial's outcome, oldest first, each point once."""
        found: dict[object, Outcome] = {}
        with self._translate_errors():
            trials = self._trials.get_trials(deepcopy=False)
            since = self._trials.user_attrs.get(FIRST_TRIAL.name, 0)
        for trial in trials[since:]:
            plain = trial.user_attrs.get(OUTCOME.name)
            if plain is None or not trial.state.is_finished():
                continue
            with contextlib.suppress(DecodeError):  # it is measured again
                outcome = from_plain(Outcome, plain)
                found.setdefault(point_key(outcome.point), outcome)
        return tuple(found.values())

    def forget_trials(self) -> None:
        """Exclude the trials so far, so that every recipe is measured again."""
        with self._translate_errors():
            count = len(self._trials.get_trials(deepcopy=False))
            self._trials.set_user_attr(FIRST_TRIAL.name, count)

    def ask(self, point: Point | None = None) -> tuple[Any, Point]:
        """Ask for a new trial, at `point` or where the sampler says; return it and its point."""
        with self._translate_errors():
            if point is not None:
                self._trials.enqueue_trial(dict(point))
            trial = self._trials.ask(self._distributions)
        return trial, dict(trial.params)

    def tell(self, trial: Any, outcome: Outcome) -> None:
        """Record how a trial ended; a failed one counts as infeasible with value 0 for samplers."""
        with self._translate_errors():
            trial.set_user_attr(OUTCOME.name, to_plain(outcome))
            trial.set_user_attr("status", outcome.status.value)
            if outcome.reason:
                trial.set_user_attr("reason", outcome.reason)
            trial.set_constraint("feasible", 0.0 if outcome.status is Status.OK else 1.0)
            self._trials.tell(trial, outcome.rate)

    def write_final(self, trials: Iterable[Any], reason: str) -> None:
        """Keep trials of Optuna's in a study of their own, in place of an earlier one."""
        name = f"{self.name}{FINAL_SUFFIX}"
        with self._translate_errors():
            _delete(self._storage, name)
            final = self._open(name)
            final.set_user_attr("reason", reason)
            final.add_trials(trials)

    def remember(self, note: StudyNote[T], value: T) -> None:
        """Keep a plain value or a dataclass."""
        with self._translate_errors():
            self._notes.set_user_attr(note.name, to_plain(value))

    def recall(self, note: StudyNote[T]) -> T | None:
        """Return what was kept, None where nothing readable was."""
        # Asked of the storage, for a study would copy everything that was kept.
        own = self._storage.get_study_id_from_name(self.name)
        plain = self._storage.get_study_user_attrs(own).get(note.name)
        if plain is None:
            return None
        try:
            return from_plain(note.kind, plain)
        except DecodeError:
            return None


def distributions_of(levels: Mapping[str, tuple[KnobValue, ...]]) -> dict[str, Any]:
    """Return Optuna's distribution of each factor of a search."""
    import optuna

    return {k: optuna.distributions.CategoricalDistribution(v) for k, v in levels.items()}


def _delete(storage: Any, name: str) -> None:
    import optuna

    try:
        optuna.delete_study(study_name=name, storage=storage)
    except KeyError:
        return


def record_out_of_memory(storage: str | Path, reason: str) -> None:
    """Give each trial that was running when its tuning was killed the outcome "out of memory"."""
    from optuna.trial import TrialState

    opened = open_storage(storage)
    for study in opened.get_all_studies():
        own = opened.get_study_id_from_name(study.study_name)
        running = opened.get_all_trials(own, deepcopy=False, states=(TrialState.RUNNING,))
        for trial in running:
            outcome = Outcome(dict(trial.params), Status.OUT_OF_MEMORY, reason=reason)
            known = opened.get_trial_id_from_study_id_trial_number(own, trial.number)
            opened.set_trial_user_attr(known, OUTCOME.name, to_plain(outcome))
