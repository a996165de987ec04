"""Whole tunings under faults: full disks, read-only places, kills at random moments."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import AUTOPREC, MARK, survivors

from autoprec.profiles import load_profile
from autoprec.yaml_files import write_text
from tests.cli.commands import trials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="faults are injected by Linux's means"
    ),
]

TASK = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel(
        overhead={"float32": 0.004, "mixed_bfloat16": 0.006},
        per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002},
        sleep_seconds=0.002)

def build_data(batch_size):
    return []
"""
OPTIONS = ("--policies", "float32,mixed_bfloat16", "--batch-sizes", "16-64", "--rounds", "1", "-v")


def begin(task: Path, mark: str, **settings: object) -> subprocess.Popen[str]:
    locks = task.parent.parent / "locks"
    locks.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*AUTOPREC, "tune", str(task), *OPTIONS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark, "TMPDIR": str(locks), "COLUMNS": "300"},
        **settings,  # type: ignore[call-overload]
    )


def tune(task: Path, mark: str, **settings: object) -> tuple[int, str]:
    child = begin(task, mark, **settings)
    err = child.communicate(timeout=200)[1]
    return child.returncode, err


def tried(err: str) -> list[str]:
    """The recipes in the table at the end, which holds what earlier runs measured too."""
    table = err.partition("\nrecipes tried")[2]
    found = re.findall(r"^(float32|mixed_bfloat16) +(\d+) ", table, re.MULTILINE)
    return sorted(f"{policy}, batch {size}" for policy, size in found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipes that a tuning tries which nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "here"
    folder.mkdir()
    task = folder / "task.py"
    task.write_text(TASK)
    code, err = tune(task, "undisturbed")
    assert code == 0, err
    assert len(tried(err)) >= 4
    assert sorted(trials(err)) == tried(err)
    return tried(err)


def nothing_was_lost(done: list[str], err: str, undisturbed: list[str], stops: int = 1) -> None:
    """Check that the tuning that ended kept every trial and ran none of them again.

    `done` was said to be measured by the tunings that were stopped. Each of those may have stored
    one more trial, and have been stopped before it could say so.
    """
    found = re.search(r"resuming after (\d+) finished", err)
    assert found, err
    kept, unsaid = int(found[1]), int(found[1]) - len(done)
    assert 0 <= unsaid <= stops
    assert tried(err) == undisturbed
    assert kept + len(trials(err)) == len(undisturbed)
    assert len({*done, *trials(err)}) + unsaid == len(undisturbed)


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "profile" in path.name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, really mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if not done or done.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    ballast.write_bytes(b"x" * max(0, free - leave))
    return ballast


def test_a_disk_that_fills_up_loses_nothing_that_was_measured(
    small_disk: Path, mark: str, undisturbed: list[str]
) -> None:
    task = small_disk / "task.py"
    task.write_text(TASK)
    ballast = fill(small_disk, leave=12 * 1024)
    code, err = tune(task, mark)
    assert code == 2, err
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert written(small_disk) == []
    done = trials(err)
    assert 0 < len(done) < len(undisturbed), "the disk is full before the end, and not at once"
    ballast.unlink()
    code, err = tune(task, mark)
    assert code == 0, err
    nothing_was_lost(done, err, undisturbed)
    assert load_profile(small_disk / "task.profile.yaml")
    assert survivors(mark) == []


def test_a_full_disk_at_the_first_byte(small_disk: Path, mark: str) -> None:
    task = small_disk / "task.py"
    task.write_text(TASK)
    fill(small_disk, leave=0)
    code, err = tune(task, mark)
    assert code == 2
    assert "Traceback" not in err
    assert "space" in err


def test_a_read_only_place_is_said_before_anything_is_measured(small_disk: Path, mark: str) -> None:
    task = small_disk / "task.py"
    task.write_text(TASK)
    remount(small_disk, "ro")
    code, err = tune(task, mark)
    assert code == 2
    assert "Traceback" not in err
    assert "not writable" in err or "Read-only" in err
    assert trials(err) == []


def test_a_profile_is_the_old_one_or_the_new_one(small_disk: Path) -> None:
    path = small_disk / "p.yaml"
    write_text(path, "old\n")
    fill(small_disk, leave=4096)
    with pytest.raises(OSError, match="No space left") as info:
        write_text(path, "new\n" * 20_000)
    assert info.value.errno == errno.ENOSPC
    assert path.read_text() == "old\n"
    assert {p.name for p in small_disk.iterdir()} == {"p.yaml", "ballast"}


def test_a_limit_on_file_sizes_is_a_full_disk(
    tmp_path: Path, mark: str, undisturbed: list[str]
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    task = folder / "task.py"
    task.write_text(TASK)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    code, err = tune(task, mark, preexec_fn=limited)
    assert code == 2, err
    assert "File too large" in err
    assert "Traceback" not in err
    done = trials(err)
    assert 0 < len(done) < len(undisturbed), "the limit is met before the end, and not at once"
    code, err = tune(task, mark)
    assert code == 0, err
    nothing_was_lost(done, err, undisturbed)


def run_until(child: subprocess.Popen[str], word: str, number: int) -> str:
    """Read what a tuning says up to a line with this word, send the signal; return all it said."""
    assert child.stderr is not None
    said = ""
    with child.stderr:
        while word not in said:
            line = child.stderr.readline()
            assert line, f"it ended before it said {word!r}: {said}"
            said += line
        child.send_signal(number)
        child.wait(timeout=60)
        return said + child.stderr.read()


MOMENTS = ("  trial ", "  trial ", "check: ", "confirmation: ")


def test_kills_at_every_stage_lose_nothing(
    tmp_path: Path, mark: str, undisturbed: list[str]
) -> None:
    """The long form of this, at random moments, is benchmarks/faults/soak.py."""
    rng = random.Random(1)
    folder = tmp_path / "here"
    folder.mkdir()
    task = folder / "task.py"
    task.write_text(TASK)
    done: list[str] = []
    for word in MOMENTS:
        err = run_until(begin(task, mark), word, rng.choice([signal.SIGKILL, signal.SIGTERM]))
        done += trials(err)
        assert survivors(mark) == []
        for name in written(folder):
            load_profile(folder / name)
    assert done
    code, err = tune(task, mark)
    assert code == 0, err
    nothing_was_lost(done, err, undisturbed, stops=len(MOMENTS))
    recipe = load_profile(folder / "task.profile.yaml").recipe
    assert (recipe.policy, recipe.batch_size) == ("mixed_bfloat16", 64)
