"""`autoprec tune` on the command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec import api
from autoprec.cli import main
from autoprec.profiles import load_profile

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")

Run = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]

MODEL = """
from autoprec.backends.simulated import SimulatedModel

def build_model():
    return SimulatedModel({arguments})

def build_data(batch_size):
    return []
"""

#: What a device that gains from bfloat16 would take; the rest of the machine is this one.
FAST = {
    "overhead": {"float32": 0.004, "mixed_bfloat16": 0.006, "mixed_float16": 0.006},
    "per_sample": {"float32": 0.0005, "mixed_bfloat16": 0.0002, "mixed_float16": 0.0003},
}
QUICK = ("--batch-sizes", "16,32,64", "--rounds", "2", "--policies", "float32,mixed_bfloat16")


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of this test alone, and no timing of real matrix products."""
    monkeypatch.setattr(api, "_measured", lambda facts, frameworks: facts)
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setenv("TMPDIR", str(locks))
    monkeypatch.setattr("tempfile.tempdir", str(locks))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a task file; keyword arguments are the simulated model's fields."""

    def task(text: str | None = None, name: str = "model_x.py", **fields: Any) -> Path:
        path = tmp_path / name
        arguments = ", ".join(f"{key}={value!r}" for key, value in {**FAST, **fields}.items())
        path.write_text(
            MODEL.format(arguments=arguments) if text is None else textwrap.dedent(text)
        )
        return path

    return task


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; return the exit code, stdout and stderr."""

    def tune(*words: object) -> tuple[int, str, str]:
        try:
            code = main(["tune", *(str(word) for word in words)])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return tune


def one_sentence(err: str) -> str:
    """The last line, which says what is wrong; there is no traceback of ours above it."""
    assert "Traceback (most recent call last)" not in err
    assert f"{os.sep}autoprec{os.sep}tuning" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith(("autoprec: ", "autoprec tune: "))
    return last


# A tuning that goes well -------------------------------------------------------------------------


def test_it_writes_a_profile_that_loads(write: Write, run: Run, tmp_path: Path) -> None:
    task = write()
    code, out, err = run(task, *QUICK)
    assert (code, out) == (0, "")
    profile = load_profile(tmp_path / "model_x.profile.yaml")
    assert profile.recipe.policy == "mixed_bfloat16"
    assert profile.evidence.speedup.ratio > 1.2
    assert "the profile is in" in err
    assert "result: mixed_bfloat16" in err
    left = {path.name for path in tmp_path.iterdir()} - {"locks", "__pycache__"}
    assert left == {
        "model_x.py",
        "model_x.profile.yaml",
        "model_x.study.journal",
        "model_x.study.journal.lock",
    }


def test_json_on_stdout_is_the_profile_and_nothing_else(
    write: Write, run: Run, tmp_path: Path
) -> None:
    code, out, _ = run(write(), *QUICK, "--json")
    assert code == 0
    assert json.loads(out) == yaml.safe_load((tmp_path / "model_x.profile.yaml").read_text())


def test_quiet_says_nothing(write: Write, run: Run) -> None:
    assert run(write(), *QUICK, "--quiet") == (0, "", "")


def test_a_task_that_prints_does_not_disturb_json(write: Write, run: Run) -> None:
    task = write()
    task.write_text("print('hello from the task')\n" + task.read_text())
    code, out, _ = run(task, *QUICK, "--json", "--quiet")
    assert code == 0
    assert json.loads(out)["schema"] == 1


def test_the_place_of_the_profile_can_be_chosen(write: Write, run: Run, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "er" / "p.yaml"
    assert run(write(), *QUICK, "--output", output)[0] == 0
    assert load_profile(output)


def test_a_finished_study_answers_at_once(write: Write, run: Run) -> None:
    task = write()
    first = run(task, *QUICK, "--json")
    code, out, err = run(task, *QUICK)
    assert (code, out) == (0, "")
    assert "already tuned" in err
    assert not trials(err)
    assert json.loads(run(task, *QUICK, "--json", "--quiet")[1]) == json.loads(first[1])


def test_fresh_tunes_again(write: Write, run: Run) -> None:
    task = write()
    first = trials(run(task, *QUICK)[2])
    assert trials(run(task, *QUICK, "--fresh")[2]) == first != []


def test_a_changed_task_is_another_study(write: Write, run: Run) -> None:
    task = write()
    run(task, *QUICK)
    task.write_text(task.read_text() + "# changed\n")
    assert trials(run(task, *QUICK)[2]) != []


def test_a_batch_size_is_kept(write: Write, run: Run, tmp_path: Path) -> None:
    task = write()
    task.write_text(task.read_text() + "BATCH_SIZE = 64\n")
    assert run(task, "--rounds", "2", "--policies", "float32,mixed_bfloat16")[0] == 0
    recipe = load_profile(tmp_path / "model_x.profile.yaml").recipe
    assert recipe.batch_size * recipe.accumulation_steps == 64


def trials(err: str) -> list[str]:
    """The recipes that were said to be measured."""
    return re.findall(r"^  trial +\d+  (.+?): ", err, re.MULTILINE)


# What is wrong with the arguments ----------------------------------------------------------------

USAGE = {
    "an unknown policy": (("--policies", "bf17"), "bf17.*expected"),
    "no number of trials": (("--trials", "0"), "--trials 0"),
    "a negative limit": (("--time-limit", "-1"), "--time-limit"),
    "a limit that is no number": (("--time-limit", "nan"), "--time-limit"),
    "batches that are none": (("--batch-sizes", "many"), "many"),
    "a batch of nothing": (("--batch-sizes", "0"), "0"),
    "a range the wrong way": (("--batch-sizes", "64-8"), "64-8"),
    "an unknown sampler": (("--sampler", "nosuch"), "cost, tpe, grid, random"),
    "an unknown knob": (("--knob", "speed=1"), "unknown knob 'speed'"),
    "a knob without levels": (("--knob", "threads"), "NAME=VALUE"),
    "a knob's wrong level": (("--knob", "threads=fast"), "threads"),
    "an unknown device": (("--device", "abacus"), "abacus"),
    "a device that is not here": (("--device", "cuda:99"), "cuda:99"),
    "a folder as output": (("--output", "."), "folder"),
    "an unknown option": (("--no-such-option",), "--no-such-option"),
    "a folder as storage": (("--storage", "."), "folder"),
    "an unknown storage": (("--storage", "nosuch://x"), "nosuch"),
}


@pytest.mark.parametrize(("words", "said"), USAGE.values(), ids=USAGE)
def test_a_wrong_argument_is_said_in_one_sentence(
    words: tuple[str, ...], said: str, write: Write, run: Run, tmp_path: Path
) -> None:
    task = write()
    code, out, err = run(task, *words)
    assert (code, out) == (2, "")
    assert re.search(said, one_sentence(err))
    assert not list(tmp_path.glob("*.yaml"))


def test_a_missing_file(run: Run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "none.py")
    assert code == 2
    assert "there is no task file" in one_sentence(err)


def test_a_folder(run: Run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path)
    assert code == 2
    assert "not a Python file" in one_sentence(err)


def test_no_arguments(run: Run) -> None:
    code, _, err = run()
    assert code == 2
    assert "TASK.py" in err


# What is wrong with the task ---------------------------------------------------------------------

WRONG = {
    "syntax": ("def build_model(:\n  pass", "model_x.py, line 1"),
    "no build_model": ("x = 1", "defines no function build_model"),
    "no build_data": ("def build_model(): ...", "defines no function build_data"),
    "no model": (
        "def build_model(): ...\ndef build_data(batch_size): ...",
        "build_model returned None",
    ),
    "a foreign model": (
        "def build_model(): return {}\ndef build_data(batch_size): ...",
        "expected a torch.nn.Module or a compiled keras.Model",
    ),
    "wrong signature": (
        "def build_model(): ...\ndef build_data(): ...",
        "build_data cannot be called as",
    ),
    "sys.exit": ("raise SystemExit(5)", r"sys\.exit\(5\)"),
    "os._exit": ("import os\nos._exit(5)", "exited with code 5"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_task_is_said_in_one_sentence(
    text: str, said: str, write: Write, run: Run, tmp_path: Path
) -> None:
    code, out, err = run(write(text), *QUICK)
    assert (code, out) == (1, "")
    assert re.search(said, err)
    assert "Traceback (most recent call last)" not in err
    assert f"autoprec{os.sep}tuning" not in err
    assert not list(tmp_path.glob("*.yaml"))


def test_the_users_exception_shows_their_frames_and_not_ours(write: Write, run: Run) -> None:
    task = write()
    task.write_text(
        task.read_text().replace(
            "    return SimulatedModel", "    inner()\n    return SimulatedModel"
        )
        + "\ndef inner():\n    raise LookupError('mine')\n"
    )
    code, _, err = run(task, *QUICK)
    assert code == 1
    assert err.index("in build_model") < err.index("in inner") < err.index("LookupError: mine")
    assert "LookupError: mine" in one_sentence(err)


def test_a_users_bug_at_the_second_trial_stops_the_tuning(
    write: Write, run: Run, tmp_path: Path
) -> None:
    task = write()
    counter = tmp_path / "count"
    task.write_text(
        task.read_text().replace(
            "    return SimulatedModel", "    count()\n    return SimulatedModel"
        )
        + f"""
def count():
    with open({str(counter)!r}, "a") as file:
        file.write("x")
    if len(open({str(counter)!r}).read()) > 3:
        raise LookupError("late")
"""
    )
    code, _, err = run(task, *QUICK)
    assert code == 1
    assert "in count" in err
    assert "LookupError: late" in one_sentence(err)
    assert len(trials(err)) == 1


def test_nothing_that_was_asked_for_passes(write: Write, run: Run) -> None:
    task = write(broken=("mixed_bfloat16",))
    code, out, err = run(task, "--policies", "mixed_bfloat16", "--batch-sizes", "32")
    assert (code, out) == (3, "")
    assert "Add float32 to --policies" in one_sentence(err)


def test_a_model_that_never_fits(write: Write, run: Run) -> None:
    code, _, err = run(write(capacity_bytes=1), *QUICK)
    assert code in (1, 3)
    assert "memory" in one_sentence(err) or "MemoryError" in one_sentence(err)


def test_trials_that_fail_in_every_way_do_not_end_a_tuning(
    write: Write, run: Run, tmp_path: Path
) -> None:
    for name, fields in {
        "crash": {"crash_at": 64},
        "exit": {"exit_at": 64},
        "memory": {"capacity_bytes": 250 * 2**20},
        "unsupported": {"unsupported": ("mixed_bfloat16",)},
        "nan": {"nonfinite": ("mixed_bfloat16",)},
    }.items():
        code, _, err = run(write(name=f"task_{name}.py", **fields), *QUICK)
        assert code == 0, f"{name}: {err}"
        assert load_profile(tmp_path / f"task_{name}.profile.yaml")


def test_traceback_shows_ours_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.errors import TaskError

    with pytest.raises(TaskError):
        main(["--traceback", "tune", str(write("x = 1"))])


# Places that cannot be written -------------------------------------------------------------------


def test_a_full_disk_at_the_end_loses_no_trial(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write()

    def full(profile: object, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(api, "save_profile", full)
        code, _, err = run(task, *QUICK)
    assert code == 2
    assert "No space left on device" in one_sentence(err)
    assert not list(tmp_path.glob("*.yaml"))
    code, _, err = run(task, *QUICK)
    assert code == 0
    assert not trials(err)


def test_a_parent_that_is_a_file_cannot_hold_a_profile(
    write: Write, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(write(), *QUICK, "--output", tmp_path / "file" / "p.yaml")
    assert code == 2
    one_sentence(err)


# Interruption ------------------------------------------------------------------------------------

DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from autoprec import api, cli
api._measured = lambda facts, frameworks: facts
sys.exit(cli.main(sys.argv[1:]))
"""
SLOW = ("--batch-sizes", "8-64", "--policies", "float32,mixed_bfloat16", "--rounds", "1")


def begin(task: Path, *words: str) -> subprocess.Popen[str]:
    """Start a tuning in a process of its own, its stderr in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "tune", str(task), *SLOW, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1"},
    )


def wait_for_trials(child: subprocess.Popen[str], count: int) -> list[str]:
    """Read stderr until so many trials are finished; return their recipes."""
    assert child.stderr is not None
    seen: list[str] = []
    for line in child.stderr:
        seen += trials(line)
        if len(seen) >= count:
            return seen
    raise AssertionError(f"it ended after {seen}")


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM", "SIGHUP"])
def test_what_was_measured_before_an_interruption_is_not_measured_again(
    number: str, write: Write, run: Run
) -> None:
    task = write(sleep=0.004)
    child = begin(task)
    done = wait_for_trials(child, 2)
    child.send_signal(getattr(signal, number))
    out, err = child.communicate(timeout=60)
    done += trials(err)
    assert out == ""
    if number != "SIGKILL":
        assert child.returncode == 130
        assert "Run the same command to go on" in one_sentence(err)
    code, _, err = run(task, *SLOW)
    assert code == 0
    assert not set(trials(err)) & set(done)
    assert f"{len(done)} finished trials are known" in err


def test_a_second_tuning_is_refused_or_waits(write: Write, run: Run) -> None:
    first = begin(write(sleep=0.02, name="first_x.py"))
    wait_for_trials(first, 1)
    second = write(name="second_x.py")
    code, _, err = run(second, *QUICK)
    assert code == 1
    assert "another tuning is measuring on cpu" in one_sentence(err)
    assert f"process {first.pid}" in err
    waiting = begin(second, "--wait")
    time.sleep(1.0)
    assert waiting.poll() is None
    first.kill()
    first.communicate()
    err = waiting.communicate(timeout=120)[1]
    assert waiting.returncode == 0, err


def test_a_reader_that_goes_away_is_no_error(write: Write) -> None:
    child = begin(write(), "--json", "--quiet")
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(timeout=120) == 0
    assert child.stderr is not None
    assert child.stderr.read() == ""
    child.stderr.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii", "TERM": "dumb", "HOME": "/nonexistent", "COLUMNS": "1"},
        {"LC_ALL": "C", "LANG": "C", "PYTHONOPTIMIZE": "2", "COLUMNS": "32768"},
    ],
    ids=["ascii, no terminal, no home, one column", "no locale, -O, a very wide line"],
)
def test_any_environment_will_do(environment: dict[str, str], write: Write) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "tune", str(write(name="modèle.py")), *QUICK[:4]],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr
