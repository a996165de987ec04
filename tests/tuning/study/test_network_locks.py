"""Mounts whose locks hold on one machine only are told apart from those that lock for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.tuning.study import storage
from autoprec.tuning.study.storage import local_locks_reason

ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"


def mounts(kind: str, options: str, place: str = "/home") -> str:
    return f"{ROOT}\n40 22 0:44 / {place} rw,nosuid shared:9 - {kind} server:/export rw,{options}\n"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nfs", "vers=3,nolock,local_lock=all"),
        ("nfs", "vers=3,local_lock=flock"),
        ("nfs4", "vers=4.2,local_lock=flock"),
        ("lustre", "localflock"),
        ("cifs", "vers=3.1.1,nobrl"),
        ("fuse.sshfs", "user_id=0"),
    ],
)
def test_locks_that_other_machines_do_not_see_are_named(kind: str, options: str) -> None:
    reason = local_locks_reason(Path("/home/me/model.journal"), mounts(kind, options))
    assert reason.startswith(f"/home is a {kind} mount")
    assert local_locks_reason(Path("/tmp/model.journal"), mounts(kind, options)) == ""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nfs", "vers=3,local_lock=none"),
        ("nfs4", "vers=4.2,local_lock=none"),
        ("lustre", "flock"),
        ("ext4", "nolock"),
        ("cifs", "vers=3.1.1"),
    ],
)
def test_locks_that_all_machines_see_are_accepted(kind: str, options: str) -> None:
    assert local_locks_reason(Path("/home/me/model.journal"), mounts(kind, options)) == ""


def test_the_innermost_mount_counts_and_of_two_on_one_place_the_later() -> None:
    inner = mounts("nfs", "nolock") + mounts("xfs", "noquota", "/home/me")
    assert local_locks_reason(Path("/home/me/x"), inner) == ""
    assert local_locks_reason(Path("/home/you/x"), inner)
    assert local_locks_reason(Path("/home/x"), mounts("nfs", "nolock") + mounts("xfs", "a")) == ""


def test_a_mount_point_with_a_blank_is_found() -> None:
    assert local_locks_reason(Path("/my home/x"), mounts("nfs", "nolock", r"/my\040home"))


def test_without_a_list_of_mounts_nothing_is_refused() -> None:
    assert local_locks_reason(Path("/home/x"), "") == ""
    assert local_locks_reason(Path("/home/x"), "nonsense\n") == ""


def test_a_journal_there_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "local_locks_reason", lambda path: "it is odd")
    with pytest.raises(UsageError, match=r"it is odd.*local disk, or a database.*postgresql"):
        storage.open_storage(tmp_path / "s.journal")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_the_file_system_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match="its file system has no locks that work"):
        storage.open_storage(tmp_path / "s.journal")
