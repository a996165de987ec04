"""Whether a result is stale: told by git's history, and unknown without it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance
from benchmarks.checkout import BENCHMARKS


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    """A repository of two files and one commit, and what commits in it; the commit's name."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        command = ["git", *identity, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "subject.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path, git, git("rev-parse", "--short", "HEAD")


def test_a_result_is_stale_once_what_it_speaks_of_changes(repository: Any) -> None:
    root, git, first = repository
    assert provenance.staleness(first, ["subject.py"], root) == provenance.CURRENT
    (root / "other.py").write_text("2")
    git("commit", "-qam", "another file")
    assert provenance.staleness(first, ["subject.py"], root) == provenance.CURRENT
    (root / "subject.py").write_text("2")  # in no commit yet
    assert provenance.staleness(first, ["subject.py"], root) == provenance.STALE
    git("commit", "-qam", "the subject")
    assert provenance.staleness(first, ["subject.py"], root) == provenance.STALE


def test_without_the_history_stale_or_not_is_unknown(
    repository: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, git, first = repository
    (root / "subject.py").write_text("2")
    git("commit", "-qam", "the subject")
    elsewhere = tmp_path_factory.mktemp("shallow") / "clone"
    git("clone", "-q", "--depth", "1", f"file://{root}", str(elsewhere))
    assert provenance.staleness(first, ["subject.py"], elsewhere) == provenance.UNKNOWN
    no_git = tmp_path_factory.mktemp("no-git")
    assert provenance.staleness(first, ["subject.py"], no_git) == provenance.UNKNOWN
    assert provenance.commit(no_git) == provenance.UNKNOWN
    for measured in (None, provenance.UNKNOWN, first + provenance.DIRTY):
        assert provenance.staleness(measured, ["subject.py"], root) == provenance.UNKNOWN
    said = provenance.staleness_in_words("replay", [])
    assert said == "Measured at a commit that was not kept; stale or not is unknown."


def test_what_results_speak_of_is_there() -> None:
    for paths in provenance.SUBJECTS.values():
        assert [path for path in paths if not (BENCHMARKS.parent / path).exists()] == []
