"""The study: every trial's point and outcome in Optuna, and what else a resumed tuning needs.

The study's name carries a hash of everything that would make old trials wrong: the task, the device
and software, the space, the seed. A changed one starts a study of its own in the same journal.
Optuna is imported when a study is opened, not before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.recipe import KnobValue
from autoprec.core.search import Outcome, Status, key
from autoprec.core.space import Point, Space
from autoprec.errors import UsageError
from autoprec.tuning.storage import open_storage

T = TypeVar("T")

SAMPLERS = ("cost", "tpe", "grid", "random")
_OUTCOME = "outcome"


def study_name(stem: str, *parts: object) -> str:
    """A name that changes with anything in `parts`."""
    text = json.dumps([to_plain(part) for part in parts], sort_keys=True, default=str)
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Study:
    """Trials and notes of one tuning, kept outside this process as they are made."""

    def __init__(self, storage: str | Path, name: str, *, fresh: bool = False) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = name
        self.place = str(storage)
        self._storage = open_storage(storage)
        if fresh:
            _delete(self._storage, name)
        self._study = optuna.create_study(
            storage=self._storage, study_name=name, direction="maximize", load_if_exists=True
        )
        self._distributions: dict[str, Any] = {}
        self._drop_unfinished()

    def use(self, space: Space, *, sampler: str = "cost", seed: int = 0) -> None:
        """Set the space that trials are asked from, and the sampler that asks."""
        import optuna

        levels = space.levels()
        self._study.sampler = _sampler(sampler, levels, seed)
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in levels.items()
        }

    def _drop_unfinished(self) -> None:
        """A trial that runs now runs in no process: its tuner was killed."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False):
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def history(self) -> tuple[Outcome, ...]:
        """Every finished trial's outcome, oldest first, each point once."""
        found: dict[object, Outcome] = {}
        for trial in self._study.get_trials(deepcopy=False):
            plain = trial.user_attrs.get(_OUTCOME)
            if plain is not None and trial.state.is_finished():
                outcome = from_plain(Outcome, plain)
                found.setdefault(key(outcome.point), outcome)
        return tuple(found.values())

    def ask(self, point: Point | None = None) -> tuple[Any, Point]:
        """A new trial, at `point` or where the sampler says."""
        if point is not None:
            self._study.enqueue_trial(dict(point))
        trial = self._study.ask(self._distributions)
        return trial, dict(trial.params)

    def tell(self, trial: Any, outcome: Outcome) -> None:
        """Record how a trial ended. What failed is infeasible and worth 0, so samplers learn it."""
        trial.set_user_attr(_OUTCOME, to_plain(outcome))
        trial.set_constraint("feasible", 0.0 if outcome.status is Status.OK else 1.0)
        self._study.tell(trial, outcome.rate)

    def remember(self, name: str, value: object) -> None:
        """Keep a plain value or a dataclass under a name."""
        self._study.set_user_attr(name, to_plain(value))

    def recall(self, name: str, kind: type[T]) -> T | None:
        """What was kept under a name, None if nothing readable was."""
        plain = self._study.user_attrs.get(name)
        if plain is None:
            return None
        try:
            return from_plain(kind, plain)
        except DecodeError:
            return None

    def notes(self) -> Mapping[str, Any]:
        """Everything that was kept, as plain values."""
        return dict(self._study.user_attrs)


def _delete(storage: Any, name: str) -> None:
    import optuna

    try:
        optuna.delete_study(study_name=name, storage=storage)
    except KeyError:
        return


def _sampler(name: str, levels: Mapping[str, tuple[KnobValue, ...]], seed: int) -> Any:
    import optuna

    if name in ("cost", "tpe"):
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=6)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name == "grid":
        return optuna.samplers.GridSampler({k: list(v) for k, v in levels.items()}, seed=seed)
    raise UsageError(f"unknown sampler {name!r}: expected one of {', '.join(SAMPLERS)}")
