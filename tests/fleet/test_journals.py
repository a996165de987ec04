"""The journals of a cluster's tunings: whole lines, written by one driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import DeviceBusy, UsageError
from autoprec.fleet.journals import (
    Journals,
    check_folder,
    default_output,
    read_journal,
    studies_folder,
)
from autoprec.tuning.study.notes import StudyNote
from autoprec.tuning.study.study import Study

ANSWER, MORE = StudyNote("answer", int), StudyNote("more", int)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """A real journal, of a study with a note."""
    path = tmp_path / "real.journal"
    Study(path, "s").remember(ANSWER, 42)
    return path.read_text()


def test_studies_are_beside_the_folder_of_profiles() -> None:
    output = default_output(Path("/data/model.py"))
    assert output == Path("/data/model.profiles")
    assert studies_folder(output) == Path("/data/model.studies")
    assert studies_folder(Path("/data/fleet")) == Path("/data/fleet.studies")


def test_a_study_goes_on_elsewhere_with_the_journal_that_was_sent(
    tmp_path: Path, journal: str
) -> None:
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    copy.write_text(journal)
    Study(copy, "s").remember(MORE, 43)
    with Journals(tmp_path / "studies") as kept:
        kept.write("type", journal)
        kept.write("type", read_journal(copy))
        elsewhere.write_text(kept.read("type"))
        assert kept.read("another") == ""
    study = Study(elsewhere, "s")
    assert (study.recall(ANSWER), study.recall(MORE)) == (42, 43)


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "half"
    path.write_bytes(journal.encode() + b'{"op_code": 1, "st\xff')
    assert read_journal(path) == journal
    with Journals(tmp_path / "studies") as kept:
        kept.path("type").write_bytes(path.read_bytes())
        assert kept.read("type") == journal


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with Journals(tmp_path / "studies") as kept:
        kept.path("type").write_bytes(b'{"some": "json"}\n')
        with pytest.raises(UsageError, match="is not a study's journal"):
            kept.read("type")


def test_a_second_driver_is_told_and_a_later_one_is_not(tmp_path: Path) -> None:
    with Journals(tmp_path / "studies"):
        with pytest.raises(DeviceBusy, match="another tuning on a cluster writes to"):
            Journals(tmp_path / "studies").__enter__()
        with Journals(tmp_path / "others"):
            pass
    with Journals(tmp_path / "studies"):
        pass


def test_a_folder_whose_locks_hold_on_this_machine_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.fleet.journals.local_locks_reason", lambda path: "it is odd")
    with pytest.raises(UsageError, match=r"it is odd.*another file system with `output`"):
        Journals(tmp_path / "studies").__enter__()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "folder")
    check_folder(tmp_path)
    (tmp_path / "file.yaml").touch()
    with pytest.raises(UsageError, match="is a file; expected a folder"):
        check_folder(tmp_path / "file.yaml")
