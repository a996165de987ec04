"""`autoprec studies`: what is listed, shown and cleared, and what is refused."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.measurement_cache import FOLDER_VARIABLE
from autoprec.tuning.study import kept_tunings
from autoprec.tuning.study.notes import TASK_PATH
from autoprec.tuning.study.storage import mark_in_use
from autoprec.tuning.study.study import Study
from tests.cli.commands import QUICK, Run, Write

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]


class Tuning:
    """Stands for what uses a journal."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "studies"


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Run:
    def studies_command(*words: object) -> tuple[int, str, str]:
        code = main(["studies", *map(str, words)])
        out, err = capfd.readouterr()
        return code, out, err

    return studies_command


@pytest.fixture
def task(write: Write, run: Run) -> Path:
    """Return a task that was tuned."""
    path = write()
    assert run(path, *QUICK)[0] == 0
    return path


def test_only_the_profile_is_left_beside_the_task(task: Path) -> None:
    left = {path.name for path in task.parent.iterdir()}
    assert left - {"__pycache__", "cache"} == {"model_x.py", "model_x.profile.yaml"}


def test_the_second_tuning_is_answered_from_the_cache(task: Path, run: Run, cache: Path) -> None:
    (journal,) = cache.glob("*.journal")
    code, _, err = run(task, *QUICK)
    assert code == 0
    assert "already tuned" in err
    assert str(journal) in err


def test_they_are_listed_with_their_results(task: Path, ask: Run) -> None:
    code, out, _ = ask()
    assert code == 0
    (row,) = [line for line in out.splitlines() if str(task) in line]
    assert re.search(r"mixed_bfloat16, batch \d+.*: \d\.\d\dx \(", row)
    (plain,) = json.loads(ask("--json")[1])
    assert plain["task"] == str(task)
    assert plain["tunings"][0]["finished"]
    assert plain["bytes"] > 0


def test_a_studys_trials_are_shown(task: Path, ask: Run) -> None:
    for name in (task, "model_x", ask("path", "model_x")[1].strip()):
        code, out, _ = ask("show", name)
        assert code == 0
        assert out.startswith(str(task))
        assert re.search(r"^mixed_bfloat16 +32 ", out, re.M)
        assert re.search(r"^float32 +32 ", out, re.M)


def test_an_unfinished_one_says_so(task: Path, ask: Run, cache: Path) -> None:
    Study(cache / "other-0.study.journal", "other-0123456789abcdef").remember(TASK_PATH, "/t/o.py")
    out = ask("list")[1]
    (row,) = [line for line in out.splitlines() if "/t/o.py" in line]
    assert row.rstrip().endswith("not finished: 0 of 0 trials ran")


def test_clearing_removes_the_journal_and_its_lock(
    task: Path, ask: Run, run: Run, cache: Path
) -> None:
    code, _, err = ask("clear", task)
    assert code == 0
    assert err.startswith("removed ")
    assert list(cache.iterdir()) == []
    assert "no study is kept" in ask()[1]
    assert (task.parent / "model_x.profile.yaml").exists()
    assert "already tuned" not in run(task, *QUICK)[2]


def test_one_in_use_is_kept(task: Path, ask: Run, cache: Path) -> None:
    (journal,) = cache.glob("*.journal")
    user = Tuning()
    mark_in_use(journal, user)
    code, _, err = ask("clear", "--all")
    assert code == 1
    assert "a tuning is using it" in err
    assert journal.exists()
    del user
    assert ask("clear", "--all")[0] == 0
    assert not journal.exists()


def test_a_tuning_marks_its_journal_for_as_long_as_it_runs(tmp_path: Path) -> None:
    journal = tmp_path / "a.study.journal"
    study = Study(journal, "a")
    kept = kept_tunings.clear_studies([kept_tunings.KeptStudy(str(journal))])
    assert [each.place for each in kept] == [str(journal)]
    del study
    assert kept_tunings.clear_studies([kept_tunings.KeptStudy(str(journal))]) == ()


def test_old_ones_are_cleared_by_age(task: Path, ask: Run, cache: Path) -> None:
    assert "nothing to remove" in ask("clear", "--older-than", "1")[2]
    old = cache / "old-0.study.journal"
    old.write_text("")
    long_ago = (datetime.now() - timedelta(days=100)).timestamp()
    os.utime(old, (long_ago, long_ago))
    code, _, err = ask("clear", "--older-than", "90")
    assert code == 0
    assert str(old) in err
    assert len(list(cache.glob("*.journal"))) == 1


def test_a_damaged_one_is_listed_with_its_problem_and_can_be_cleared(ask: Run, cache: Path) -> None:
    cache.mkdir(parents=True)
    broken = cache / "broken-0.study.journal"
    broken.write_text("[1]\n{}\n" * 3)
    code, out, _ = ask()
    assert code == 0
    assert "broken-0.study.journal" in out
    assert "is not a study's journal" in out
    assert ask("clear", broken)[0] == 0
    assert not broken.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show",), "expected a study"),
        (("show", "nothing"), "there is no study nothing"),
        (("show", "nothing.py"), "has no study"),
        (("clear",), "expected one of"),
        (("clear", "--all", "--older-than", "3"), "expected one of"),
        (("list", "x"), "takes no study"),
        (("clear", "sqlite:///s.db"), "is a database"),
    ],
)
def test_what_is_wrong_is_said(
    words: tuple[str, ...], said: str, ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = ask(*words)
    assert code == 2
    assert said in err


def test_two_tasks_of_one_name_must_be_told_apart(task: Path, ask: Run, cache: Path) -> None:
    other = Study(cache / "model_x-0.study.journal", "model_x-0123456789abcdef")
    other.remember(TASK_PATH, "/elsewhere/model_x.py")
    code, _, err = ask("show", "model_x")
    assert code == 2
    assert "the name of several studies" in err
    assert "/elsewhere/model_x.py" in err
