"""`autoprec tune` on the command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from processes import AUTOPREC

from autoprec.profiles import load_profile
from tests.cli.commands import QUICK, Run, Write, one_sentence, trials

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]


# A tuning that goes well -------------------------------------------------------------------------


@pytest.mark.usefixtures("real_workers")
def test_it_writes_a_profile_that_loads(write: Write, run: Run, tmp_path: Path) -> None:
    task = write()
    code, out, err = run(task, *QUICK)
    assert (code, out) == (0, "")
    profile = load_profile(tmp_path / "model_x.profile.yaml")
    assert profile.recipe.policy == "mixed_bfloat16"
    assert profile.evidence.speedup.ratio > 1.2
    assert "the profile is in" in err
    assert "result: mixed_bfloat16" in err
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {
        "model_x.py",
        "model_x.profile.yaml",
        "model_x.study.journal",
        "model_x.study.journal.lock",
    }


def test_a_profile_that_cannot_be_written_is_nowhere_said_to_be(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("autoprec.profiles.save_profile", full)
    code, _, err = run(write(), *QUICK)
    assert code == 2
    assert "could not be written: No space left on device. The trials are kept" in err
    assert "the profile is in" not in err


def test_explain_ends_with_the_slowest_operators_and_those_in_float32(
    write: Write, run: Run
) -> None:
    code, _, err = run(write(), *QUICK, "--explain")
    assert code == 0
    told = err[err.index("result: mixed_bfloat16") :]
    assert "slowest operators of a step under mixed_bfloat16, batch " in told
    assert re.search(r"simulated::mm +75 % +bfloat16", told)
    assert "25 % of the step is in operators whose inputs are float32, although mixed_bf" in told


def test_a_rehearsal_shows_no_speed_and_marks_its_profile(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC_REHEARSAL", "1")
    task = write()
    for _ in range(2):  # measured, then answered from the study
        code, _, err = run(task, *QUICK)
        assert code == 0
        assert "rehearsal on a pretended device" in err
        assert re.findall(r"samples/s: |[\d.]+x\b|\d samples/s", err) == []
    profile = load_profile(tmp_path / "model_x.profile.yaml")
    assert profile.device.fingerprint.rehearsal
    assert profile.recipe.policy == "mixed_bfloat16"
    assert profile.evidence.parity.verdict == "equal"
    assert profile.evidence.chosen.samples_per_second == 0.0
    assert not re.search(r"[\d.]+x\b", (tmp_path / "model_x.profile.yaml").read_text())


def test_json_on_stdout_is_the_profile_and_nothing_else(
    write: Write, run: Run, tmp_path: Path
) -> None:
    code, out, _ = run(write(), *QUICK, "--json")
    assert code == 0
    assert json.loads(out) == yaml.safe_load((tmp_path / "model_x.profile.yaml").read_text())


def test_a_report_is_written_on_request_with_the_search_and_the_curves(
    write: Write, run: Run, tmp_path: Path
) -> None:
    code, _, err = run(write(), *QUICK, "--report")
    assert code == 0
    page = tmp_path / "model_x.report.html"
    assert err.endswith(f"the report is in {page}\n")
    text = page.read_text(encoding="utf-8")
    for drawn in ("throughput over batch size", "loss over training steps", "precision 1."):
        assert f'aria-label="{drawn}' in text
    evidence = load_profile(tmp_path / "model_x.profile.yaml").evidence
    assert len(evidence.tried) == evidence.trials
    lines = (tmp_path / "model_x.profile.yaml").read_text().splitlines()
    assert len(lines) < 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--report", "r.pdf"), "expected a file ending in .html"),
        (("--plan", "--report"), "--report is for a tuning on this machine"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_before_tuning(
    write: Write, run: Run, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(write(), *QUICK, *words)
    assert (code, out) == (2, "")
    assert said in one_sentence(err)
    assert not list(tmp_path.glob("*.yaml"))


def test_quiet_says_nothing(write: Write, run: Run) -> None:
    assert run(write(), *QUICK, "--quiet") == (0, "", "")


@pytest.mark.usefixtures("real_workers")
def test_a_task_that_prints_does_not_disturb_json(write: Write, run: Run) -> None:
    task = write()
    task.write_text("print('hello from the task')\n" + task.read_text())
    code, out, _ = run(task, *QUICK, "--json", "--quiet")
    assert code == 0
    assert json.loads(out)["schema"] == 3


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
    task.write_text(task.read_text() + "# the same\n")
    assert trials(run(task, *QUICK)[2]) == []
    task.write_text(task.read_text() + "CHANGED = True\n")
    assert trials(run(task, *QUICK)[2]) != []


def test_a_batch_size_is_kept(write: Write, run: Run, tmp_path: Path) -> None:
    task = write()
    task.write_text(task.read_text() + "BATCH_SIZE = 64\n")
    assert run(task, "--rounds", "2", "--policies", "float32,mixed_bfloat16")[0] == 0
    recipe = load_profile(tmp_path / "model_x.profile.yaml").recipe
    assert recipe.batch_size * recipe.accumulation_steps == 64


SLOWED = """
from pathlib import Path
from simulated import SimulatedModel

def build_model():
    with Path(__file__).with_name("built").open("a") as file:
        file.write("x")
    late = len(Path(__file__).with_name("built").read_text()) > 3
    times = 72 if late else 1
    return SimulatedModel({"float32": 0.004 * times}, {"float32": 0.0005 * times})

def build_data(batch_size):
    return []
"""


def test_an_inconclusive_tuning_says_so_and_strict_makes_it_a_failure(
    write: Write, run: Run, tmp_path: Path
) -> None:
    """The machine slows down 72 times after the baseline's first trial."""
    task = write(SLOWED)
    words = (*QUICK[:4], "--policies", "float32")
    code, _, err = run(task, *words)
    lines = err.strip().splitlines()
    assert (code, lines[-2].split(":")[0]) == (0, "inconclusive")
    assert "--fresh" in lines[-2]
    text = (tmp_path / "model_x.profile.yaml").read_text()
    assert yaml.safe_load(text)["evidence"]["inconclusive"].startswith("float32, batch 32 ran at")
    code, out, err = run(task, *words, "--strict", "--json")
    assert code == 5
    assert json.loads(out) == yaml.safe_load(text)
    code, _, err = run(task, *words, "--strict")
    assert code == 5
    assert "already tuned, inconclusively" in err
    assert not trials(err)


def test_an_inconclusive_tuning_leaves_a_conclusive_profile_where_it_is(
    write: Write, run: Run, tmp_path: Path
) -> None:
    words = (*QUICK[:4], "--policies", "float32")
    place = tmp_path / "model_x.profile.yaml"
    assert run(write(), *words)[0] == 0
    before = place.read_bytes()
    code, _, err = run(write(SLOWED), *words, "--report")
    assert code == 0
    assert place.read_bytes() == before
    beside = tmp_path / "model_x.inconclusive.profile.yaml"
    assert yaml.safe_load(beside.read_text())["evidence"]["inconclusive"]
    assert f"the profile is in {beside}" in err
    assert f"the earlier profile in {place}, which is not, was kept" in err
    assert (tmp_path / "model_x.inconclusive.report.html").exists()
    assert not (tmp_path / "model_x.report.html").exists()


def test_a_conclusive_tuning_is_no_failure_of_strict(write: Write, run: Run) -> None:
    assert run(write(), *QUICK, "--strict", "--quiet")[0] == 0


def test_every_stage_is_said_at_its_start_where_output_is_piped(write: Write, run: Run) -> None:
    _, _, err = run(write(), *QUICK)
    said = [line.split(":")[0] for line in err.splitlines()]
    expected = ["start", "first step", "search", "check", "confirmation"]
    assert [name for name in said if name in expected] == expected


def test_a_forced_policy_that_is_slower_is_said_to_be(write: Write, run: Run) -> None:
    slow = {"float32": 0.0005, "mixed_float16": 0.05}
    task = write(per_sample=slow)
    code, _, err = run(task, "--policies", "fp16", "--batch-sizes", "32", "--rounds", "2")
    assert code == 0
    ratio = r"0\.012\d?x \([0-9.-]+, \d rounds?\)"
    assert re.search(rf"warning: mixed_float16 is slower than float32 here, {ratio}, and", err)
    assert re.search(rf"result: {ratio}: slower than float32, batch 32; only mixed_float16", err)
    assert "confirmation" not in {line.split(":")[0] for line in err.splitlines()}


# Interruption ------------------------------------------------------------------------------------

SLOW = ("--batch-sizes", "8-64", "--policies", "float32,mixed_bfloat16", "--rounds", "1")


def begin(task: Path, *words: str) -> subprocess.Popen[str]:
    """Start a tuning in a process of its own, its stderr in a pipe."""
    return subprocess.Popen(
        [*AUTOPREC, "tune", str(task), *SLOW, *words],
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


def wait_for_line(child: subprocess.Popen[str], wanted: str) -> None:
    """Read stderr until this is said."""
    assert child.stderr is not None
    assert any(wanted in line for line in child.stderr), f"it never said {wanted!r}"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM", "SIGHUP"])
def test_what_was_measured_before_an_interruption_is_not_measured_again(
    number: str, write: Write, run: Run
) -> None:
    task = write(sleep_seconds=0.004)
    child = begin(task)
    done = wait_for_trials(child, 2)
    child.send_signal(getattr(signal, number))
    out, err = child.communicate(timeout=60)
    done += trials(err)
    assert out == ""
    if number != "SIGKILL":
        assert child.returncode == 130
        assert "Run the same command to resume" in one_sentence(err)
    code, _, err = run(task, *SLOW)
    assert code == 0
    assert not set(trials(err)) & set(done)
    assert f"resuming after {len(done)} finished trials" in err


def test_a_second_tuning_is_refused_or_waits(write: Write, run: Run, tmp_path: Path) -> None:
    first = begin(write(sleep_seconds=0.04, name="first_x.py"))
    wait_for_trials(first, 1)
    second = write(SLOWED, name="second_x.py")
    code, _, err = run(second, *QUICK)
    assert code == 1
    assert "another tuning is measuring on cpu" in one_sentence(err)
    assert f"process {first.pid}" in err
    waiting = begin(second, "--wait")
    wait_for_line(waiting, f"waiting for another tuning on cpu (process {first.pid}) to end")
    (tmp_path / "built").unlink(missing_ok=True)
    wait_for_line(first, "confirmation: ")
    assert not (tmp_path / "built").exists(), "its model is built while it waits"
    assert waiting.poll() is None
    first.kill()
    first.communicate()
    err = waiting.communicate(timeout=120)[1]
    assert waiting.returncode == 0, err
    assert (tmp_path / "built").exists()


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
        [*AUTOPREC, "tune", str(write(name="modèle.py")), *QUICK[:4]],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr
