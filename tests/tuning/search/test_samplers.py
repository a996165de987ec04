"""Samplers that propose recipes instead of the cost model, by name or by import path."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import UsageError
from autoprec.tuning.options import SAMPLERS
from autoprec.tuning.search.samplers import sampler_of
from autoprec.tuning.study.study import Study

SPACE = Space(policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16), batch_sizes=(8, 16, 32))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "s.journal"


@pytest.mark.parametrize("sampler", [*SAMPLERS, "optuna.samplers.QMCSampler"])
def test_every_sampler_asks_for_points_of_the_space(journal: Path, sampler: str) -> None:
    study = Study(journal, "s")
    study.set_space(SPACE, sampler_of(sampler, 3))
    for _ in range(4):
        trial, point = study.ask()
        assert point in list(SPACE.points())
        study.tell(trial, Outcome(point, Status.OK, steady(0.01)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("optuna.samplers.Nothing", "has no attribute 'Nothing'"),
        ("no_such_package.Sampler", "No module named 'no_such_package'"),
        ("pathlib.Path", "it is no subclass of optuna.samplers.BaseSampler"),
        ("optuna.samplers.GridSampler", "it cannot be made: "),
    ],
)
def test_what_is_no_sampler_is_refused_with_what_was_expected(name: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        sampler_of(name, 0)
    assert why in str(caught.value)
    assert "its import path such as optuna.samplers.GPSampler" in str(caught.value)


def test_a_sampler_by_its_import_path_draws_from_the_seed(journal: Path) -> None:
    def asked(name: str, seed: int) -> list[object]:
        study = Study(journal, name)
        study.set_space(SPACE, sampler_of("optuna.samplers.RandomSampler", seed))
        return [study.ask()[1] for _ in range(5)]

    assert asked("one", 3) == asked("other", 3) != asked("third", 4)
