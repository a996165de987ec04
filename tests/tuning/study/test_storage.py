"""Where studies live: torn journals, locks, full disks, wrong places."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import UsageError
from autoprec.tuning.study import storage as study_storage
from autoprec.tuning.study.storage import (
    open_storage,
    repair_journal,
    storage_error,
)

posix = pytest.mark.skipif(os.name != "posix", reason="flock is POSIX's")

WHOLE = b'{"op_code":0,"worker_id":"a"}\n'


# Torn journals -----------------------------------------------------------------------------------


@given(lines=st.integers(0, 5), tail=st.binary(max_size=200), zeros=st.integers(0, 4))
def test_a_repaired_journal_holds_its_whole_lines_and_nothing_else(
    lines: int, tail: bytes, zeros: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    path.write_bytes(WHOLE * lines + tail.replace(b"{", b"(") + b"\0" * zeros)
    before = path.stat().st_size
    cut = repair_journal(path)
    assert path.read_bytes() == WHOLE * lines
    assert cut == before - len(WHOLE) * lines
    assert repair_journal(path) == 0


def test_every_torn_end_of_a_real_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for length in range(1, len(WHOLE)):
        path.write_bytes(WHOLE + WHOLE[:length])
        assert repair_journal(path) == length
        assert path.read_bytes() == WHOLE


def test_a_long_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(WHOLE * 3 + b"x" * 300_000)
    assert repair_journal(path) == 300_000
    assert path.read_bytes() == WHOLE * 3


def test_no_journal_needs_no_repair(tmp_path: Path) -> None:
    assert repair_journal(tmp_path / "none") == 0
    assert not (tmp_path / "none").exists()


def test_a_journal_with_a_torn_end_is_written_on(tmp_path: Path) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = tmp_path / "j"
    study = optuna.create_study(storage=open_storage(path), study_name="s")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"work')
    again = optuna.load_study(storage=open_storage(path), study_name="s")
    again.add_trial(optuna.trial.create_trial(value=2.0))
    third = optuna.load_study(storage=open_storage(path), study_name="s")
    assert [trial.value for trial in third.trials] == [1.0, 2.0]


def test_a_journal_that_is_damaged_in_the_middle_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"not a journal\n" + WHOLE)
    with pytest.raises(UsageError, match="damaged") as info:
        open_storage(path)
    assert "`storage`" in str(info.value)
    assert path.read_bytes() == b"not a journal\n" + WHOLE


@posix
def test_a_line_that_another_process_is_writing_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repair waits for the lock, so that it never cuts what is being written."""
    path = tmp_path / "j"
    path.write_bytes(b'{"half')

    def open_and_complain() -> None:
        with contextlib.suppress(UsageError):  # the line is whole in the end, but no study's
            open_storage(path)

    repaired: list[bytes] = []
    denied = threading.Event()

    def repair(journal: Path) -> int:
        repaired.append(journal.read_bytes())
        return repair_journal(journal)

    monkeypatch.setattr(study_storage, "repair_journal", repair)
    monkeypatch.setattr(
        study_storage.time, "sleep", lambda seconds: denied.set()
    )  # between two attempts
    lock = study_storage._KernelLock(path)
    lock.acquire()
    opener = threading.Thread(target=open_and_complain)
    opener.start()
    assert denied.wait(timeout=60), "it never asked for the lock"
    assert repaired == []
    path.write_bytes(b'{"half":0}\n')
    lock.release()
    opener.join(timeout=60)
    assert not opener.is_alive()
    assert repaired == [b'{"half":0}\n']
    assert path.read_bytes() == b'{"half":0}\n'


@posix
def test_a_lock_that_is_never_given_back_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_storage._KernelLock, "_TIMEOUT_SECONDS", 0.2)
    held = study_storage._KernelLock(tmp_path / "j")
    held.acquire()
    with pytest.raises(UsageError, match="is it suspended"):
        open_storage(tmp_path / "j")
    held.release()
    assert open_storage(tmp_path / "j") is not None


@posix
def test_a_lock_file_that_is_left_behind_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "j.lock").write_text("left by a tuning that was killed")
    assert open_storage(tmp_path / "j") is not None


# Places ------------------------------------------------------------------------------------------


def test_a_journal_may_be_given_as_a_url(tmp_path: Path) -> None:
    open_storage(f"journal://{tmp_path}/deep/er/j")
    assert (tmp_path / "deep" / "er" / "j").exists()


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder"):
        open_storage(tmp_path)


def test_a_place_below_a_file_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="`storage`"):
        open_storage(tmp_path / "file" / "j")


def test_an_unknown_url_is_said_without_its_password() -> None:
    with pytest.raises(UsageError) as info:
        open_storage("nosuch://me:secret@host/db")
    assert "secret" not in str(info.value)
    assert "nosuch://host/db" in str(info.value)


def test_a_full_disk_says_how_to_go_on() -> None:
    error = storage_error("/data/j", OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left" in str(error)
    assert "free some space" in str(error)
    assert "free some space" not in str(storage_error("/data/j", OSError(errno.EROFS, "Read-only")))
