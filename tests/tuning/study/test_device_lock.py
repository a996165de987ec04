"""One tuning at a time measures on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.errors import DeviceBusy
from autoprec.tuning.study.device_lock import lock_devices

posix = pytest.mark.skipif(os.name != "posix", reason="flock is POSIX's")


@posix
def test_a_device_is_measured_by_one_tuning_at_a_time(tmp_path: Path) -> None:
    with (
        lock_devices(["cuda:0"], wait=False, folder=tmp_path),
        pytest.raises(DeviceBusy) as info,
        lock_devices(["cuda:0"], wait=False, folder=tmp_path),
    ):
        pass
    assert "`wait`" in str(info.value)
    assert f"process {os.getpid()}" in str(info.value)


@posix
def test_two_devices_are_two_locks(tmp_path: Path) -> None:
    with (
        lock_devices(["cuda:0"], wait=False, folder=tmp_path),
        lock_devices(["cuda:1"], wait=False, folder=tmp_path),
    ):
        pass


@posix
def test_the_lock_is_free_again(tmp_path: Path) -> None:
    for _ in range(3):
        with lock_devices(["cpu"], wait=False, folder=tmp_path):
            pass
    with pytest.raises(ZeroDivisionError), lock_devices(["cpu"], wait=False, folder=tmp_path):
        raise ZeroDivisionError
    with lock_devices(["cpu"], wait=False, folder=tmp_path):
        pass


_HOLDER = """
import sys
from pathlib import Path
from autoprec.tuning.study.device_lock import lock_devices
with lock_devices(["cpu"], wait=False, folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
    Path(sys.argv[1], "leaving").touch()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its stdin is closed."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


@posix
def test_a_lock_whose_holder_was_killed_is_free(tmp_path: Path) -> None:
    child = holder(tmp_path)
    with pytest.raises(DeviceBusy), lock_devices(["cpu"], wait=False, folder=tmp_path):
        pass
    child.kill()
    child.communicate()
    with lock_devices(["cpu"], wait=False, folder=tmp_path):
        pass


@posix
def test_waiting_says_for_whom_and_then_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is let go only when the lock is asked for again, after what was said."""
    import fcntl

    child = holder(tmp_path)
    said: list[str] = []
    flock = fcntl.flock

    def asked(handle: int, how: int) -> None:
        if said and child.stdin is not None:
            child.stdin.close()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", asked)
    with lock_devices(["cpu"], wait=True, folder=tmp_path, on_wait=said.append):
        assert (tmp_path / "leaving").exists(), "it goes on when the other one has ended"
        assert child.wait(timeout=60) == 0
    assert child.stdout is not None
    child.stdout.close()
    assert said == [f"waiting for another tuning on cpu (process {child.pid}) to end"]


@posix
def test_a_link_in_the_shared_folder_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "autoprec-cpu.lock").symlink_to(precious)
    with lock_devices(["cpu"], wait=False, folder=tmp_path):
        pass
    assert precious.read_text() == "mine"


@posix
def test_a_second_name_of_a_file_is_not_written_on(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.link(precious, tmp_path / "autoprec-cpu.lock")
    with lock_devices(["cpu"], wait=False, folder=tmp_path):
        pass
    assert precious.read_text() == "mine"


@posix
def test_without_a_folder_to_lock_in_a_tuning_still_runs(tmp_path: Path) -> None:
    with lock_devices(["cpu"], wait=False, folder=tmp_path / "none"):
        pass


@posix
def test_a_job_on_several_devices_holds_all_of_them_or_none(tmp_path: Path) -> None:
    with lock_devices(["cuda:1", "cuda:0"], wait=False, folder=tmp_path):
        for device in ("cuda:0", "cuda:1"):
            with pytest.raises(DeviceBusy), lock_devices([device], wait=False, folder=tmp_path):
                pass
    with (
        lock_devices(["cuda:1"], wait=False, folder=tmp_path),
        pytest.raises(DeviceBusy),
        lock_devices(["cuda:1", "cuda:0"], wait=False, folder=tmp_path),
    ):
        pass
    with lock_devices(["cuda:0"], wait=False, folder=tmp_path):
        pass
