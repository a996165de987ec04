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
    for subject in provenance.SUBJECTS.values():
        paths = [*subject.entries, *subject.packages]
        assert [path for path in paths if not (BENCHMARKS.parent / path).exists()] == []


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("overhead", ["torch/apply/accumulation", "torch/apply/precision"]),
        ("overhead", ["torch/distributed/gradient_sync", "torch/distributed/sharding"]),
        ("overhead", ["keras/apply/optimizer_wrapping", "keras/apply/loss_scaler"]),
        ("overhead", ["torch/surgeon", "keras/surgeon"]),
        ("replay", ["acquisition", "feasibility", "space", "noise", "communication"]),
        ("replay", ["stopping", "cost_model", "trial_results", "keep_memory"]),
    ],
)
def test_what_the_measured_code_imports_is_what_the_result_speaks_of(
    name: str, paths: list[str]
) -> None:
    folder = {"overhead": "autoprec/backends", "replay": "autoprec/core/speed"}[name]
    found = provenance.paths_of(provenance.SUBJECTS[name])
    assert {f"{folder}/{path}.py" for path in paths} <= set(found)


def test_what_only_another_benchmark_imports_is_not_spoken_of() -> None:
    found = provenance.paths_of(provenance.SUBJECTS["replay"])
    assert "benchmarks/search/replay.py" in found
    assert [path for path in found if "backends" in path or "overhead" in path] == []


def test_imports_are_followed_inside_the_packages_only(tmp_path: Path) -> None:
    sources = {
        "a/entry.py": "import b.one\nfrom c import other\nimport json",
        "b/__init__.py": "",
        "b/one.py": "def later():\n    from b import two",
        "b/two.py": "import b.one",
        "b/alone.py": "",
        "c/other.py": "import b.alone",
    }
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source)
    found = provenance.paths_of(provenance.Subject(("a/entry.py",), ("b",)), tmp_path)
    assert found == ("a/entry.py", "b/__init__.py", "b/one.py", "b/two.py")


def test_the_programs_that_time_steps_are_spoken_of() -> None:
    found = provenance.paths_of(provenance.SUBJECTS["overhead"])
    assert {f"benchmarks/overhead/{name}_steps.py" for name in ("torch", "keras")} <= set(found)
