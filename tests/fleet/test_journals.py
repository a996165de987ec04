"""The journals of a cluster's tunings: whole lines, appended once, by one driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import DeviceBusy, UsageError
from autoprec.fleet.journals import (
    Journals,
    JournalTail,
    check_folder,
    default_output,
    studies_folder,
)
from autoprec.tuning.study.study import Study


@pytest.fixture
def journal(tmp_path: Path) -> bytes:
    """A real journal, of a study with a note."""
    path = tmp_path / "real.journal"
    Study(path, "s").remember("answer", 42)
    return path.read_bytes()


def test_studies_are_beside_the_folder_of_profiles() -> None:
    output = default_output(Path("/data/model.py"))
    assert output == Path("/data/model.profiles")
    assert studies_folder(output) == Path("/data/model.studies")
    assert studies_folder(Path("/data/fleet")) == Path("/data/fleet.studies")


def test_what_was_added_is_told_once_and_in_whole_lines(tmp_path: Path) -> None:
    tail = JournalTail(tmp_path / "copy", b'{"a": 1}\n')
    assert tail.added() == (9, b"")
    with tail.path.open("ab") as file:
        file.write(b'{"b": 2}\n{"c"')
    assert tail.added() == (9, b'{"b": 2}\n')
    with tail.path.open("ab") as file:
        file.write(b": 3}\n")
    assert tail.added() == (18, b'{"c": 3}\n')
    assert tail.added() == (27, b"")


def test_a_study_goes_on_elsewhere_with_the_lines_that_were_sent(
    tmp_path: Path, journal: bytes
) -> None:
    tail = JournalTail(tmp_path / "copy", journal)
    Study(tail.path, "s").remember("more", 43)
    with Journals(tmp_path / "studies") as kept:
        kept.append("type", 0, journal)
        kept.append("type", *tail.added())
        again = JournalTail(tmp_path / "elsewhere", kept.read("type"))
    study = Study(again.path, "s")
    assert (study.recall("answer", int), study.recall("more", int)) == (42, 43)


def test_lines_that_are_known_are_not_appended_again(tmp_path: Path, journal: bytes) -> None:
    with Journals(tmp_path / "studies") as kept:
        kept.append("type", 0, journal)
        kept.append("type", 0, journal)
        kept.append("type", len(journal), b"")
        assert kept.path("type").read_bytes() == journal
        assert kept.read("another") == b""


def test_a_line_that_a_killed_driver_left_half_written_is_cut_off(
    tmp_path: Path, journal: bytes
) -> None:
    with Journals(tmp_path / "studies") as kept:
        kept.path("type").write_bytes(journal + b'{"op_code": 1, "st')
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
