"""`make mutants`: every module it names has its tests, and the mutated copy finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutants


@pytest.mark.parametrize("module", mutants.TESTS_OF)
def test_a_module_that_is_mutated_exists_and_has_tests_of_its_own(module: str) -> None:
    assert (mutants.ROOT / mutants.CORE / f"{module}.py").is_file()
    assert module in mutants.TESTS_OF[module]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the first module would be mutated."""
    folder = tmp_path_factory.mktemp("copy")
    mutants.copy_package(next(iter(mutants.TESTS_OF)), folder)
    return folder


def _pytest(folder: Path, *words: str) -> str:
    """Run pytest in the copy as mutmut does, without a path to this checkout; return its output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tests_are_collected_in_the_copy(copy: Path) -> None:
    names = sorted({name for names in mutants.TESTS_OF.values() for name in names})
    files = [mutants.file_of_tests(name) for name in names]
    found = _pytest(copy, "--collect-only", *files)
    for each in files:
        assert each in found


def test_the_fixtures_of_every_test_run_in_the_copy(copy: Path) -> None:
    module = next(iter(mutants.TESTS_OF))
    assert "passed" in _pytest(copy, mutants.file_of_tests(mutants.TESTS_OF[module][0]))
