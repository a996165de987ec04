"""Where studies are kept by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.measurement_cache import FOLDER_VARIABLE
from autoprec.tuning.study import storage
from autoprec.tuning.study.storage import default_journal, kept_journals


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def test_a_study_is_in_the_cache_and_two_tasks_of_one_name_have_two(
    tmp_path: Path, cache: Path
) -> None:
    one, other = (default_journal(tmp_path / name / "model.v2.py") for name in ("a", "b"))
    assert one.parent == other.parent == cache / "studies"
    assert one != other
    assert one.name.startswith("model.v2-")
    assert one.name.endswith(".study.journal")


def test_a_task_has_one_study_by_whatever_path_it_is_reached(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert default_journal(tmp_path / "link" / "m.py") == default_journal(
        tmp_path / "real" / "m.py"
    )


def test_a_study_beside_the_task_goes_on_there(tmp_path: Path, cache: Path) -> None:
    beside = tmp_path / "model.study.journal"
    beside.touch()
    assert default_journal(tmp_path / "model.py") == beside


def test_one_that_cannot_be_written_there_does_not(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "model.study.journal"
    beside.touch()
    monkeypatch.setattr(storage, "is_writable", lambda path: path != beside)
    assert default_journal(tmp_path / "model.py").parent == cache / "studies"


def test_without_a_cache_it_is_beside_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert default_journal(tmp_path / "model.py") == tmp_path / "model.study.journal"
    assert list(kept_journals()) == []


def test_a_cache_whose_locks_hold_on_this_machine_only_is_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "local_locks_reason", lambda path: "an nfs mount without locks")
    assert default_journal(tmp_path / "model.py") == tmp_path / "model.study.journal"


def test_journals_are_found_and_their_locks_are_not(tmp_path: Path, cache: Path) -> None:
    journal = default_journal(tmp_path / "model.py")
    journal.parent.mkdir(parents=True)
    for name in (journal.name, f"{journal.name}.lock"):
        (journal.parent / name).touch()
    assert list(kept_journals()) == [journal]
