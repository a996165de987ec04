"""What `autoprec tune` says of wrong arguments, wrong tasks and places it cannot write to."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec import measurement_cache, profiles
from autoprec.cli import _frames_without_message, main
from autoprec.errors import UsageError
from autoprec.profiles import load_profile
from autoprec.tuning.options import Options
from autoprec.tuning.settings import settings_of
from tests.cli.commands import QUICK, Run, Write, one_sentence, trials

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]

# What is wrong with the arguments ----------------------------------------------------------------

USAGE = {
    "an unknown policy": (("--policies", "bf17"), "bf17.*expected"),
    "no number of trials": (("--trials", "0"), "--trials 0"),
    "a negative limit": (("--time-limit", "-1"), "--time-limit"),
    "a limit that is no number": (("--time-limit", "nan"), "--time-limit"),
    "a count that is no number": (("--trials", "many"), "--trials 'many' given, expected an integ"),
    "a number for a size": (("--memory-bytes", "2GB"), "--memory-bytes '2GB' given, expected"),
    "batches that are none": (("--batch-sizes", "many"), "many"),
    "a batch of nothing": (("--batch-sizes", "0"), "0"),
    "a range the wrong way": (("--batch-sizes", "64-8"), "64-8"),
    "an unknown sampler": (("--sampler", "nosuch"), "cost, tpe, grid, random"),
    "an unknown knob": (("--knob", "speed=1"), "unknown setting 'speed'"),
    "a knob without levels": (("--knob", "threads"), "NAME=VALUE"),
    "a knob's wrong level": (("--knob", "threads=fast"), "threads"),
    "an unknown device": (("--device", "abacus"), "abacus"),
    "a device that is not here": (("--device", "cuda:99"), "cuda:99"),
    "a folder as output": (("--output", "."), "folder"),
    "a checkpoint that is not there": (("--checkpoint", "none.pt"), "none.pt does not exist"),
    "a folder as checkpoint": (("--checkpoint", "."), "is a folder"),
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


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("trials", "many"),
        ("time_limit", "nan"),
        ("batch_sizes", "many"),
        ("policies", "fp8"),
        ("sampler", "gird"),
        ("engine", "zero3"),
        ("knobs", "threads"),
        ("checkpoint", "none.pt"),
    ],
)
def test_the_command_line_says_what_python_says(
    name: str, written: str, write: Write, run: Run
) -> None:
    with pytest.raises(UsageError) as refused:
        Options(**{name: written if name != "time_limit" else float(written)})
    (flag,) = (each.flag for each in settings_of(Options) if each.name == name)
    code, _, err = run(write(), flag, written)
    assert code == 2
    assert one_sentence(err) == f"autoprec: {refused.value}".replace(f"`{name}`", flag)


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
    assert "FILE.py" in err


# What is wrong with the task ---------------------------------------------------------------------

WRONG = {
    "syntax": ("def build_model(:\n  pass", "model_x.py, line 1"),
    "no build_model": (
        "x = 1",
        r"ended without a call of fit or train .*A task file defines build_model and build_data",
    ),
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
}
ENDED = {
    "os._exit": ("import os\nos._exit(5)", "exited with code 5"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_task_is_said_in_one_sentence(
    text: str, said: str, write: Write, run: Run, tmp_path: Path
) -> None:
    refused_in_one_sentence(text, said, write, run, tmp_path)


@pytest.mark.usefixtures("real_workers")
@pytest.mark.parametrize(("text", "said"), ENDED.values(), ids=ENDED)
def test_a_task_that_ends_its_process_is_told_of_in_one_sentence(
    text: str, said: str, write: Write, run: Run, tmp_path: Path
) -> None:
    refused_in_one_sentence(text, said, write, run, tmp_path)


def refused_in_one_sentence(text: str, said: str, write: Write, run: Run, tmp_path: Path) -> None:
    """Tune a wrong task: exit code 1, no traceback of ours, and nothing is left."""
    code, out, err = run(write(text), *QUICK)
    assert (code, out) == (1, "")
    assert re.search(said, err)
    assert "Traceback (most recent call last)" not in err
    assert f"autoprec{os.sep}tuning" not in err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model_x.py"]


def test_a_journal_that_was_there_before_stays(write: Write, run: Run, tmp_path: Path) -> None:
    journal = tmp_path / "model_x.study.journal"
    assert run(write(), *QUICK)[0] == 0
    kept = journal.read_bytes()
    assert run(write("x = 1"), *QUICK)[0] == 1
    assert journal.read_bytes().startswith(kept)


DAMAGED = """
import inspect, os

def build_model():
    where = [frame.function for frame in inspect.stack()]
    if {phase!r} in where and os.path.exists({flag!r}):
        raise LookupError("row 7")
    return model()
"""


@pytest.mark.parametrize("phase", ["_tracer", "describe"])
def test_trials_that_ran_are_kept_whatever_ends_the_tuning(
    phase: str, write: Write, run: Run, tmp_path: Path
) -> None:
    """In the proof the same command goes on from them; before any trial nothing is left."""
    flag, task = tmp_path / "damaged", write()
    text = task.read_text().replace("def build_model", "def model")
    task.write_text(text + DAMAGED.format(phase=phase, flag=str(flag)))
    flag.touch()
    journal = tmp_path / "kept.journal"
    words = (task, *QUICK, "--storage", journal)
    code, _, err = run(*words)
    assert code == 1, err
    assert "in build_model" in err
    assert one_sentence(err).endswith("LookupError: row 7")
    flag.unlink()
    if phase == "describe":
        assert not journal.exists()
        return
    assert f"the trials that ran are kept in {journal}: the same command goes on" in err
    done = len(trials(err))
    assert done > 1
    code, _, err = run(*words)
    assert code == 0
    assert len(trials(err)) < done
    assert load_profile(tmp_path / "model_x.profile.yaml").evidence.trials >= done


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
    assert one_sentence(err) == "autoprec: LookupError: mine"
    assert err.count("LookupError: mine") == 1


def test_colours_in_an_error_stay_out_of_what_is_printed(write: Write, run: Run) -> None:
    err = run(write("raise ValueError('\\x1b[1mbold\\x1b[0m words')"), *QUICK)[2]
    assert one_sentence(err).endswith("before it trained: bold words")
    assert "\x1b" not in err


def test_a_bug_that_shows_later_is_the_recipes_result_until_loading_shows_it_too(
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
        if file.tell() > 3:
            raise LookupError("late")
"""
    )
    code, _, err = run(task, *QUICK, "--batch-sizes", "16,32")
    assert code == 1
    assert "in count" in err
    assert "LookupError: late" in one_sentence(err)
    assert "trial  2  mixed_bfloat16, batch 32: unsupported: LookupError: late" in err
    assert len(trials(err)) == 2


def test_nothing_that_was_asked_for_passes(write: Write, run: Run) -> None:
    task = write(broken=("mixed_bfloat16",))
    code, out, err = run(task, "--policies", "mixed_bfloat16", "--batch-sizes", "32")
    assert (code, out) == (3, "")
    assert "Add float32 to --policies" in one_sentence(err)


def test_a_model_that_never_fits(write: Write, run: Run) -> None:
    code, _, err = run(write(capacity_bytes=1), *QUICK)
    assert code == 3
    assert "memory" in one_sentence(err)


@pytest.mark.parametrize(
    "fields",
    [
        {"capacity_bytes": 250 * 2**20},
        {"unsupported": ("mixed_bfloat16",)},
        {"nonfinite": ("mixed_bfloat16",)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_trials_that_fail_do_not_end_a_tuning(
    fields: dict[str, Any], write: Write, run: Run, tmp_path: Path
) -> None:
    code, _, err = run(write(**fields), *QUICK)
    assert code == 0, err
    assert load_profile(tmp_path / "model_x.profile.yaml")


@pytest.mark.usefixtures("real_workers")
@pytest.mark.parametrize("field", ["crash_at_batch", "exit_at_batch"])
def test_trials_that_end_their_worker_do_not_end_a_tuning(
    field: str, write: Write, run: Run, tmp_path: Path
) -> None:
    code, _, err = run(write(**{field: 64}), *QUICK)
    assert code == 0, err
    assert load_profile(tmp_path / "model_x.profile.yaml")


def test_traceback_shows_ours_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.errors import TaskError

    with pytest.raises(TaskError):
        main(["--traceback", "tune", str(write("x = 1"))])


@pytest.mark.parametrize(
    ("frames", "message", "left"),
    [
        ("  in f\nKeyError: 1\n", "in the first step: KeyError: 1", "  in f\n"),
        ("  in f\nE: a\nb\n", "E: a\nb", "  in f\n"),
        ("  in f\nE: a\nb\n", "E: a. Do this", "  in f\nE: a\nb\n"),
        ("E: a\n\n  in f\nF: b\n", "F: b", "E: a\n\n  in f\n"),
        ("  in f\nE: a\n", "something else", "  in f\nE: a\n"),
    ],
)
def test_what_the_last_line_repeats_is_left_out_of_the_traceback(
    frames: str, message: str, left: str
) -> None:
    assert _frames_without_message(frames, message) == left


# Places that cannot be written -------------------------------------------------------------------


def test_a_full_disk_at_the_end_loses_no_trial(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write()

    def full(profile: object, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(profiles, "save_profile", full)
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


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Have a folder, and what is in it, refuse to be written, also to the superuser."""
    asked, made = os.access, os.open

    def refuse(folder: Path) -> None:
        def access(path: Any, mode: int, **more: Any) -> bool:
            within = Path(path) in (folder, *folder.iterdir())
            return not (within and mode & os.W_OK) and asked(path, mode, **more)

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT and Path(os.fsdecode(path)).parent == folder:
                raise PermissionError(errno.EACCES, "Permission denied")
            return made(path, flags, *more, **named)

        monkeypatch.setattr(os, "access", access)
        monkeypatch.setattr(os, "open", opened)

    return refuse


def test_a_read_only_folder_asks_once_and_the_study_finds_a_place(
    write: Write,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_only: Callable[[Path], None],
) -> None:
    (tmp_path / "apart").mkdir()
    task = write(name="apart/model_x.py")
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    read_only(task.parent)
    code, _, err = run(task, *QUICK)
    assert code == 2
    assert one_sentence(err).endswith("choose another place with --output FILE.yaml")
    code, _, err = run(task, *QUICK, "--output", tmp_path / "out.yaml")
    assert code == 0, err
    (journal,) = (tmp_path / "cache" / "studies").glob("model_x-*.study.journal")
    written = {path.name for path in task.parent.iterdir()} - {"__pycache__"}  # Python's own
    assert written == {"model_x.py"}
    assert not trials(run(task, *QUICK, "--output", tmp_path / "out.yaml")[2])
    assert str(journal) in run(task, *QUICK, "--output", tmp_path / "out.yaml")[2]


def test_without_a_cache_a_read_only_folder_asks_for_both_at_once(
    write: Write, run: Run, tmp_path: Path, read_only: Callable[[Path], None]
) -> None:
    task = write()
    read_only(tmp_path)
    code, _, err = run(task, *QUICK)
    assert code == 2
    assert one_sentence(err).endswith("with --output FILE.yaml and --storage FILE")
