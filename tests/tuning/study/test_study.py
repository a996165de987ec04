"""The study: what was measured stays known, and nothing foreign is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import steady
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.proof_steps import ProofLength
from autoprec.core.speed.space import Point, Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.errors import UsageError
from autoprec.tuning.options import Options
from autoprec.tuning.proof.prover import StoredProofLengths
from autoprec.tuning.study import study as study_module
from autoprec.tuning.study.notes import TASK, StudyNote
from autoprec.tuning.study.study import Study, record_out_of_memory, study_name

NUMBER, TABLE = StudyNote("number", int), StudyNote("table", dict[str, int])

SPACE = Space(policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16), batch_sizes=(8, 16, 32))


def outcome(point: Point, status: Status = Status.OK, step: float = 0.01) -> Outcome:
    measured = steady(step) if status is Status.OK else None
    return Outcome(point, status, measured, "" if measured else "why")


def points() -> list[Point]:
    return list(SPACE.points())


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "s.journal"


def opened(journal: Path, space: Space = SPACE, name: str = "s", **settings: object) -> Study:
    made = Study(journal, name, **settings)  # type: ignore[arg-type]
    made.set_space(space)
    return made


def test_outcomes_are_known_to_the_next_tuning(journal: Path) -> None:
    first = opened(journal)
    told = [
        outcome(points()[0]),
        outcome(points()[1], Status.OUT_OF_MEMORY),
        outcome(points()[2], Status.TIMEOUT),
    ]
    for each in told:
        trial, point = first.ask(each.point)
        assert point == each.point
        first.tell(trial, each)
    assert opened(journal).history() == tuple(told)


def test_a_trial_that_was_running_is_no_outcome(journal: Path) -> None:
    first = opened(journal)
    first.ask(points()[0])
    again = opened(journal)
    assert again.history() == ()
    trial, point = again.ask(points()[0])
    again.tell(trial, outcome(point))
    assert len(again.history()) == 1


def test_an_outcome_that_was_written_counts_even_if_the_trial_was_not_closed(
    journal: Path,
) -> None:
    """SIGKILL can come between the outcome and the trial's state."""
    from autoprec.core.codec import to_plain

    first = opened(journal)
    trial, point = first.ask(points()[0])
    trial.set_user_attr("outcome", to_plain(outcome(point)))
    assert opened(journal).history() == (outcome(point),)


def test_a_point_counts_once_with_its_first_timing(journal: Path) -> None:
    study = opened(journal)
    for step in (0.01, 0.04, 0.02):
        trial, point = study.ask(points()[0])
        study.tell(trial, outcome(point, step=step))
    assert study.history() == (outcome(points()[0], step=0.01),)


def test_fresh_forgets(journal: Path) -> None:
    first = opened(journal)
    trial, point = first.ask(points()[0])
    first.tell(trial, outcome(point))
    first.remember(NUMBER, 3)
    again = opened(journal, fresh=True)
    assert again.history() == ()
    assert again.recall(NUMBER) is None


def test_fresh_leaves_the_other_studies_of_a_journal_alone(journal: Path) -> None:
    other = opened(journal, name="other")
    trial, point = other.ask(points()[0])
    other.tell(trial, outcome(point))
    opened(journal, name="s", fresh=True)
    assert len(opened(journal, name="other").history()) == 1


def test_trials_of_another_space_are_not_mixed_in(journal: Path) -> None:
    first = opened(journal)
    trial, point = first.ask(points()[0])
    first.tell(trial, outcome(point))
    wider = Space(policies=SPACE.policies, batch_sizes=(8, 16, 32, 64))
    second = opened(journal, wider)
    assert second.history() == ()
    trial, point = second.ask(wider.points()[0])
    second.tell(trial, outcome(point))
    assert len(second.history()) == 1
    assert len(opened(journal).history()) == 1
    assert len(opened(journal, wider).history()) == 1


def test_notes_are_shared_by_the_spaces(journal: Path) -> None:
    opened(journal).remember(TABLE, {"a": 1})
    wider = Space(policies=SPACE.policies, batch_sizes=(8, 16, 32, 64))
    assert opened(journal, wider).recall(TABLE) == {"a": 1}


def test_an_outcome_of_another_shape_is_measured_again(journal: Path) -> None:
    first = opened(journal)
    trial, point = first.ask(points()[0])
    trial.set_user_attr("outcome", {"point": {}, "written_by": "a later version"})
    first._trials.tell(trial, 1.0)
    trial, point = first.ask(points()[1])
    first.tell(trial, outcome(point))
    assert opened(journal).history() == (outcome(points()[1]),)


def test_a_note_of_another_shape_is_not_known(journal: Path) -> None:
    study = opened(journal)
    study.remember(StudyNote("task", dict), {"no": "such field"})
    assert study.recall(TASK) is None
    assert study._notes.user_attrs["task"] == {"no": "such field"}


@given(st.lists(st.integers() | st.text(max_size=5), max_size=4))
def test_a_name_is_the_same_for_the_same_parts(parts: list[object]) -> None:
    assert study_name("s", *parts) == study_name("s", *parts)
    assert study_name("s", *parts) != study_name("s", *parts, "more")


def test_another_version_is_another_study(monkeypatch: pytest.MonkeyPatch) -> None:
    before = study_name("s", 1)
    monkeypatch.setattr(study_module, "__version__", "99.0")
    assert study_name("s", 1) != before


def test_how_long_proofs_are_is_known_to_the_next_tuning(journal: Path) -> None:
    longest, shorter = ProofLength(480, 8), ProofLength(120, 16)
    lengths = StoredProofLengths(opened(journal), Options())
    lengths["8x1"], lengths["32x2"] = longest, shorter
    again = StoredProofLengths(opened(journal), Options())
    assert dict(again) == {"8x1": longest, "32x2": shorter}
    less_time = Options(proof_seconds=8.0)
    assert dict(StoredProofLengths(opened(journal), less_time)) == {}


def test_a_proof_of_fewer_steps_than_are_a_training_is_refused() -> None:
    assert Options(proof_steps=5).proof_steps == 5
    with pytest.raises(UsageError, match=r"`proof_steps` 4 given, expected 5 or more"):
        Options(proof_steps=4)


def test_a_database_keeps_the_same(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    first = Study(url, "s")
    first.set_space(SPACE)
    trial, point = first.ask(points()[0])
    first.tell(trial, outcome(point))
    first._storage.engine.dispose()
    again = Study(url, "s")
    again.set_space(SPACE)
    assert again.history() == (outcome(point),)
    again._storage.engine.dispose()


def test_a_trial_that_was_killed_for_memory_is_out_of_memory_to_the_next_tuning(
    journal: Path,
) -> None:
    first = opened(journal)
    trial, _ = first.ask(points()[0])
    first.tell(trial, outcome(points()[0]))
    first.ask(points()[1])
    record_out_of_memory(journal, "the node ran out of memory")
    found = opened(journal).history()
    assert [each.status for each in found] == [Status.OK, Status.OUT_OF_MEMORY]
    assert dict(found[1].point) == dict(points()[1])
    assert found[1].reason == "the node ran out of memory"
