"""`autoprec probe` on machines where things are missing: it answers, in bounded time, and says so.

Where this process may make namespaces, /proc and /sys are really taken away.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: What is promised, in seconds of processor time: what else a test machine is busy with is no part
#: of it. Counting calls would not do: most of it is imports and other programs that are asked.
SECONDS = 2.0

#: Who only waits uses no processor; no probe waits so long.
TIMEOUT_SECONDS = 30.0

FAKE_NVML = """
class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
        super().__init__({message!r})

def nvmlInit():
    raise NVMLError({code})

def nvmlShutdown():
    pass
"""


def probe(*words: str, wrap: tuple[str, ...] = (), **environment: str | None) -> str:
    """Run the probe; return its JSON after checking that it answered at all."""
    env = {**os.environ, **{k: v for k, v in environment.items() if v is not None}}
    for name in [name for name, value in environment.items() if value is None]:
        env.pop(name, None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*wrap, sys.executable, *words, "-m", "autoprec", "probe", "--json"],
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        env=env,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS
    text = done.stdout.decode()
    assert json.loads(text)["devices"][-1]["facts"]["observation"]["kind"] == "cpu"
    return text


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """The words that run a command in a mount namespace of its own."""
    words = ("unshare", "--mount", "--propagation", "private")
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("making a mount namespace needs root")
    return words


def covered(namespace: tuple[str, ...], *places: str) -> tuple[str, ...]:
    covers = "".join(f"mount -t tmpfs none {place} && " for place in places)
    return (*namespace, "sh", "-c", covers + 'exec "$@"', "sh")


def notes(wrap: tuple[str, ...]) -> list[str]:
    """What the probe says that it could not read."""
    found: list[str] = json.loads(probe(wrap=wrap))["notes"]
    return found


def test_without_proc(namespace: tuple[str, ...]) -> None:
    assert any("/proc cannot be read" in note for note in notes(covered(namespace, "/proc")))


def test_without_sys(namespace: tuple[str, ...]) -> None:
    assert any("/sys cannot be read" in note for note in notes(covered(namespace, "/sys")))


def test_without_both(namespace: tuple[str, ...]) -> None:
    said = notes(covered(namespace, "/proc", "/sys"))
    assert any("/proc cannot be read" in note for note in said)
    assert any("/sys cannot be read" in note for note in said)


def test_without_a_temporary_folder(
    namespace: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every folder that Python would take is there, but nothing can be written in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    places = ("/tmp", "/var/tmp", "/usr/tmp", str(tmp_path))
    frozen = "".join(
        f"mount --bind {place} {place} && mount -o remount,bind,ro {place} && "
        for place in places
        if os.path.isdir(place)
    )
    wrap = (*namespace, "sh", "-c", frozen + 'cd "$PWD" && exec "$@"', "sh")
    asked = [*wrap, sys.executable, "-c", "import tempfile; tempfile.gettempdir()"]
    answer = subprocess.run(asked, capture_output=True, check=False)
    assert b"No usable temporary directory" in answer.stderr
    probe(wrap=wrap)


@pytest.mark.parametrize(
    ("code", "message"),
    [(12, "NVML Shared Library Not Found"), (9, "Driver Not Loaded"), (18, "Version Mismatch")],
)
def test_an_nvidia_library_without_its_driver(tmp_path: Path, code: int, message: str) -> None:
    (tmp_path / "pynvml.py").write_text(FAKE_NVML.format(code=code, message=message))
    probe(PYTHONPATH=str(tmp_path))


def test_an_nvidia_library_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise OSError('libnvidia-ml.so.1: wrong ELF class')")
    probe(PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": None},
        {"HOME": "/nonexistent"},
        {"LANG": None, "LC_ALL": None, "LC_CTYPE": None},
        {"LC_ALL": "xx_YY.nosuch"},
        {"PYTHONIOENCODING": "ascii"},
        {"COLUMNS": "32768"},
        {"COLUMNS": "0"},
        {"TERM": None},
        {"PATH": ""},
        {"CUDA_VISIBLE_DEVICES": "MIG-nonsense,,-1,99999999999999999999"},
        {"CUDA_VISIBLE_DEVICES": "C:\\\\Windows\\\\path"},
    ],
    ids=lambda e: ", ".join(f"{k}={v}" for k, v in e.items()),
)
def test_any_environment_will_do(environment: dict[str, str | None]) -> None:
    probe(**environment)


@pytest.mark.parametrize("flag", ["-O", "-OO", "-I", "-s"])
def test_any_way_to_start_python_will_do(flag: str) -> None:
    probe(flag)


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    text = 'cd "$0" && rmdir "$0" && exec "$@"'
    probe(wrap=("sh", "-c", text, str(gone)))


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group (version 1 or 2) that gets half a core."""
    for parent, name, value in (
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "50000"),
        ("/sys/fs/cgroup", "cpu.max", "50000 100000"),
    ):
        group = Path(parent) / f"autoprec-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(value)
        except OSError:
            group.rmdir()
            continue
        yield group
        for _ in range(100):
            try:
                group.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        return
    pytest.skip("making a control group with a quota needs root")


def test_a_container_of_half_a_core(half_a_core: Path) -> None:
    joined = f'echo $$ > {half_a_core}/cgroup.procs && exec "$@"'
    text = probe(wrap=("sh", "-c", joined, "sh"))
    (cpu,) = [
        each["facts"]["observation"]
        for each in json.loads(text)["devices"]
        if each["facts"]["observation"]["kind"] == "cpu"
    ]
    assert cpu["core_quota"] == 0.5


def test_the_table_too(namespace: tuple[str, ...]) -> None:
    wrap = covered(namespace, "/proc", "/sys")
    done = subprocess.run(
        [*wrap, sys.executable, "-m", "autoprec", "probe"],
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    printed = done.stdout.decode()
    for wanted in ("cpu", "float32", "bfloat16", "/proc cannot be read", "/sys cannot be read"):
        assert wanted in printed, printed
