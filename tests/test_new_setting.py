"""A new setting is one line: everything else follows from its field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

#: What is added to a copy of the package; it is a line of `Options` as the formatter leaves it.
LINE = '    patience: int = _study(7, "N", above=2, new="study").says("{default} or N trials")\n'

#: Everything that is made from the settings, with a tuner that says what it is given.
PROGRAM = """
import contextlib, inspect, io, json, sys
import autoprec.api as api
from autoprec.cli import main
from autoprec.fleet.messages import Request
from autoprec.workers.task_source import TaskSource
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.errors import UsageError
from autoprec.tuning.flow import tuner
from autoprec.tuning.options import Options
from benchmarks.report.settings import settings
from pathlib import Path

class Reached(Exception):
    pass

def reached(job):
    raise Reached(job.options.patience)

def outcome(function, *arguments, **named):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            function(*arguments, **named)
        except (Reached, UsageError) as ended:
            return str(ended)
        except SystemExit:
            pass
    return " ".join(said.getvalue().split())

tuner.tune = reached
task = sys.argv[1]
sent = Request(TaskSource(Path(task)), "", Path(task).parent, options=Options(patience=3)).to_line()
print(json.dumps({
    "help": outcome(main, ["tune", "--help"]),
    "reference": [line for line in settings() if "patience" in line],
    "signature": str(inspect.signature(api.tune).parameters["patience"]),
    "python": outcome(api.tune, task, patience=3, device="cpu"),
    "untold": outcome(api.tune, task, device="cpu"),
    "command": outcome(main, ["tune", task, "--patience", "3", "--device", "cpu"]),
    "node": Request.from_line(sent).options.patience,
    "refused": outcome(api.tune, task, patience=2),
    "refused there": outcome(main, ["tune", task, "--patience", "2"]),
    "both": outcome(api.tune, task, options=Options(), patience=3),
    "identity": [Options().identity(), Options(patience=3).identity()],
}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a copy of the package with the line makes of it."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "autoprec", folder / "autoprec", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "profiles", folder / "autoprec" / "_profiles")
    options = folder / "autoprec" / "tuning" / "options.py"
    text = options.read_text(encoding="utf-8")
    after = "    def __post_init__"
    assert text.count(after) == 1
    options.write_text(text.replace(after, f"{LINE}\n{after}"), encoding="utf-8")
    task = folder / "task.py"
    task.write_text("def build_model(): ...\ndef build_data(batch_size): ...\n")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, task],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_command_line_has_it_with_its_help(made: Any) -> None:
    assert "[--fresh] [--wait] [--patience N]" in made["help"]
    assert "--patience N 7 or N trials" in made["help"]


def test_the_reference_lists_it(made: Any) -> None:
    assert made["reference"] == ["- `patience` (`int`), `--patience N`: 7 or N trials"]


def test_tune_takes_it_by_name_and_shows_it(made: Any) -> None:
    assert made["signature"] == "patience: int = 7"


def test_the_tuner_gets_its_value_wherever_it_is_given(made: Any) -> None:
    assert made["python"] == made["command"] == "3"
    assert made["untold"] == "7"
    assert made["node"] == 3


def test_what_makes_no_sense_is_refused_in_the_same_words(made: Any) -> None:
    said = "{0} 2 given, expected an integer above 2; give that, or leave {0} out"
    assert made["refused"] == said.format("`patience`")
    assert made["refused there"] == f"autoprec: {said.format('--patience')}"
    assert "`options` and `patience` given" in made["both"]


def test_another_value_is_another_study_and_the_default_the_same_as_before(made: Any) -> None:
    assert made["identity"] == [{}, {"patience": 3}]
